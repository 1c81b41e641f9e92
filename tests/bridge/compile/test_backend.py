"""Backends: a second one beside the CPU's, keys of programs, and that nothing else knows the processor."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest
import torch
from torch import nn
from tvm.relax import op
from tvm.target import Target

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from bridge.compile import Backend, CompileOptions, Launch, backend_for, compile_function
from bridge.compile.cuda import nvrtc
from tests.bridge.compile_helpers import assert_same, function
from tests.rooms import PACKAGES, ROOT

HOST = backend_for(None)
#: Eight lanes, two accumulators, columns in chunks of four rows.
OTHER_ORDER = replace(
    HOST, order=replace(HOST.order, lanes=8, interleaved=(2, 1), chunk_rows=4, chunk_elements=64, split=256)
)
OTHER_LIMITS = replace(
    HOST, limits=HOST.limits.having(nodes=2, flat_row=512, short_row=32, parallel_work=1, tasks=3, joined_sections=2)
)


def options(backend: Backend) -> CompileOptions:
    return CompileOptions.current(backend)


def normalized(emit, x, scale):
    """A softmax of halves, sums of rows and of columns."""
    scaled = emit(op.multiply(x, scale))
    soft = emit(op.nn.softmax(emit(op.permute_dims(scaled, [1, 0])), axis=1))
    return [soft, emit(op.sum(emit(op.exp(scaled)), [1])), emit(op.sum(scaled, [0])), emit(op.sum(scaled))]


@pytest.fixture
def case():
    torch.manual_seed(0)
    inputs = [torch.randn(200, 120), torch.randn(120)]
    return function([((200, 120), "float32"), ((120,), "float32")], normalized), inputs


def kernels(program) -> int:
    return sum(isinstance(step, Launch) for step in program.steps)


def test_another_order_rounds_otherwise_and_shares_nothing(case):
    func, inputs = case
    ours, theirs = (compile_function(func, name="test", options=options(each)) for each in (HOST, OTHER_ORDER))
    assert ours is not theirs and ours.backend.key != theirs.backend.key
    assert not {*map(id, ours.code.values())} & {*map(id, theirs.code.values())}
    pairs = list(zip(ours(inputs), theirs(inputs), strict=True))
    for one, other in pairs:
        assert_same(one, other, rtol=1e-4, atol=1e-4)
    assert not all(torch.equal(one, other) for one, other in pairs)
    assert compile_function(func, name="test", options=options(HOST)) is ours
    assert compile_function(func, name="test", options=options(OTHER_ORDER)) is theirs


def test_other_limits_change_no_bit(case):
    func, inputs = case
    ours, theirs = (compile_function(func, name="test", options=options(each)) for each in (HOST, OTHER_LIMITS))
    assert kernels(theirs) > kernels(ours)
    for one, other in zip(ours(inputs), theirs(inputs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(4000, 3), (900, 17)])
def test_sums_over_many_rows_are_added_in_blocks(shape):
    """The rounding error of a sum of equal numbers grows with the length of the chain of additions."""
    by_rows = replace(HOST, order=replace(HOST.order, block_rows=0))

    def sums(emit, x):
        return [emit(op.sum(x, [0])), emit(op.sum(emit(op.negative(x)), [0])), emit(op.max(x, [0]))]

    func, x, lost = function([(shape, "float32")], sums), torch.full(shape, 0.1), []
    for backend in (HOST, by_rows):
        plain, negative, largest = compile_function(func, name="test", options=options(backend))([x])
        assert torch.equal(plain, -negative) and (largest == 0.1).all()
        lost.append((plain.double() / x.double().sum(0) - 1).abs().max().item())
    assert lost[0] < 1e-6 < 4 * lost[0] + 1e-6 < lost[1]


@pytest.mark.parametrize(
    ("shape", "order", "axes"),
    [((20, 60_000), (0, 1), [1]), ((20, 59_991), (0, 1), [1]), ((300, 20, 192), (1, 0, 2), [1, 2])],
    ids=["one loop", "a tail", "two loops"],
)
def test_sums_of_long_rows_are_added_in_blocks(shape, order, axes):
    """Likewise along a row, whose accumulators take the vectors in turn."""
    by_turns = replace(HOST, order=replace(HOST.order, block_turns=0))

    def sums(emit, x):
        x = emit(op.permute_dims(emit(op.negative(x)), order))
        return [emit(op.sum(x, axes)), emit(op.max(x, axes)), emit(op.sum(emit(op.exp(x)), axes))]

    func, x, lost = function([(shape, "float32")], sums), torch.full(shape, 0.1), []
    for backend in (HOST, by_turns):
        plain, largest, grown = compile_function(func, name="test", options=options(backend))([x])
        assert (largest == -0.1).all()
        exact = x.double().neg().permute(order)
        pairs = (plain, exact.sum(axes)), (grown, x.neg().exp().double().permute(order).sum(axes))
        lost.append(max((found.double() / wanted - 1).abs().max().item() for found, wanted in pairs))
    assert lost[0] < 2e-6 < lost[1]


def test_a_module_trains_on_another_backend():
    """The same gradients to rounding; entries of one backend are not taken for the other's."""
    module = nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.GELU())
    x = torch.randn(9, 24)
    grads = []
    for backend in (None, OTHER_ORDER, OTHER_ORDER):
        module.zero_grad()
        add_tvm_dispatch(module, x, target=backend)
        module(x).square().sum().backward()
        grads.append([parameter.grad.clone() for parameter in module.parameters()])
        (entry,) = stats(module).entries
        assert entry.forward.backend.key == (backend or HOST).key and not stats(module).misses
    for one, other, again in zip(*grads, strict=True):
        assert_same(one, other, rtol=1e-4, atol=1e-5)
        assert torch.equal(other, again)


@pytest.mark.parametrize("target", ["llvm", {"kind": "llvm", "mcpu": "x86-64-v3"}, Target("llvm")])
def test_targets_name_backends(target, case):
    func, inputs = case
    backend = backend_for(target)
    assert backend.key == backend_for(target).key != HOST.key and backend.device == torch.device("cpu")
    for one, other in zip(
        compile_function(func, name="test", options=options(backend))(inputs),
        compile_function(func, name="test", options=options(HOST))(inputs),
        strict=True,
    ):
        assert_same(one, other, rtol=1e-5, atol=1e-5)


def test_targets_without_a_backend_are_refused_by_name():
    with pytest.raises(ValueError, match=r"target: wanted a TVM target of kind 'llvm' or 'cuda', .*, got one of kind"):
        add_tvm_dispatch(nn.Linear(2, 2), torch.ones(1, 2), target={"kind": "opencl"})


@pytest.mark.parametrize("target", ["cuda:77", torch.device("cuda", 77)])
def test_a_gpu_that_is_not_there_is_refused_by_name(target):
    with pytest.raises(ValueError, match=r"'cuda:77' is no GPU of this machine, torch finds \d+; kernels"):
        add_tvm_dispatch(nn.Linear(2, 2), torch.ones(1, 2), target=target)


def test_a_gpu_without_nvrtc_is_refused_when_the_dispatch_is_added(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(nvrtc, "_library", lambda: None)
    with pytest.raises(ValueError, match=r"kernels for cuda:0 cannot be compiled: no NVRTC library: .* wheels bring"):
        backend_for("cuda:0")
    monkeypatch.setattr("bridge.dispatch.compile_entry.device_of_call", lambda *_: torch.device("cuda", 0))
    with pytest.raises(UnsupportedModule, match="no NVRTC library"):
        add_tvm_dispatch(nn.Linear(2, 2), torch.ones(1, 2))


@pytest.mark.parametrize(("target", "message"), [("cuda:x", "cuda:x"), (torch.device("meta"), "no backend for meta")])
def test_what_is_no_device_is_refused_by_name(target, message):
    with pytest.raises(ValueError, match=f"target: .*{message}"):
        backend_for(target)


def test_the_hosts_device_is_the_processor():
    assert backend_for(torch.device("cpu")) is HOST


def test_a_target_of_kind_cuda_names_the_architecture():
    """Kernels for it are compiled on any machine; another architecture or device is another key."""
    backend = backend_for({"kind": "cuda", "arch": "sm_80"})
    assert backend.device == torch.device("cuda", 0) and backend.arch == "sm_80"
    others = [
        replace(backend, **changed) for changed in ({"arch": "sm_90"}, {"index": 1}, {"order": OTHER_ORDER.order})
    ]
    assert len({backend.key, *(other.key for other in others)}) == 4


def test_options_are_frozen_and_every_field_is_in_the_key(case, monkeypatch):
    func, _ = case
    now = options(HOST)
    program = compile_function(func, name="test", options=now)
    changes = {"backend": OTHER_LIMITS, "threads": now.threads + 1, "versions": (("torch", "0"),)}
    changes["orders"] = changes["given_orders"] = ((0, (1, 0)),)
    for field in fields(now):
        with pytest.raises(FrozenInstanceError):
            setattr(now, field.name, None)
        changed = replace(now, **{field.name: changes.get(field.name, True)})
        assert changed.key != now.key
        assert compile_function(func, name="test", options=changed) is not program
    assert {"torch", "tvm", "sources"} == {name for name, _ in now.versions}
    monkeypatch.setattr(type(HOST), "threads", lambda self: 7)
    assert options(HOST).threads == 7


#: Words for the CPU's room alone: its device, its vectors, its processor and its number of threads.
FORBIDDEN = re.compile(r"LANES|host_cpu|(get|set)_num_threads|cpu_count|sched_getaffinity|is_cpu|cpu(:\d+)?")
#: Files that name the processor for the others.
MAY_SAY = {
    "bridge/base/devices.py": "the device of captures, as an object",
    "bridge/compile/cuda/build.py": "as many compilations side by side as the host has processors for",
    "bridge/compile/targets.py": "names of targets become backends",
    "bridge/compile/__init__.py": "hands on what other rooms draw masks with",
    "bridge/rng/draws.py": "imports the draws from the CPU's generator by that name",
}


def said(path: Path) -> Iterator[str]:
    """Names, attributes and strings that are no docstrings; none for a file without a forbidden word."""
    text = path.read_text()
    if FORBIDDEN.search(text) is None:
        return
    tree = ast.parse(text)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bridge.compile.cpu"):
            yield "cpu"


def test_only_the_cpus_room_knows_the_cpu():
    room = ROOT / "bridge" / "compile" / "cpu"
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path.parent != room]
    found = {
        (path.relative_to(ROOT).as_posix(), word) for path in files for word in said(path) if FORBIDDEN.fullmatch(word)
    }
    assert sorted(each for each in found if each[0] not in MAY_SAY) == []
    assert {file for file, _ in found} == set(MAY_SAY)
    assert {"LANES", "get_num_threads", "cpu"} <= {word for path in room.glob("*.py") for word in said(path)}
