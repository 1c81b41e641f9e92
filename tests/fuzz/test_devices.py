"""The fuzz's parts for a GPU: tensors on a device, the judging kernels, processes."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from tests.fuzz import compare
from tests.fuzz.check import check
from tests.fuzz.generate import generate
from tests.fuzz.placed import placed
from tests.fuzz.program import Program, make_arguments, make_module
from tests.fuzz.run import run_seeds
from tests.fuzz.verdict import Verdict
from tests.host_kernels import HostKernels

OFF = 1 + 1e-8


def program(*body: str, result: str = "y", others: tuple = ()) -> Program:
    arguments = (("x", "torch.randn(3, 4, dtype=D).requires_grad_()", False), *others)
    return Program(7, "float64", (), arguments, body, result)


def dispatched_as(monkeypatch, forward):
    """Replaces the dispatch by a function, which is not differentiated twice."""
    monkeypatch.setattr("tests.fuzz.calls.TWICE", 0.0)
    monkeypatch.setattr(
        "tests.fuzz.sample.add_tvm_dispatch",
        lambda module, sample, **options: module.__dict__.update(_compiled_call_impl=forward),
    )
    monkeypatch.setattr("tests.fuzz.sample._attributes", lambda module: {})
    monkeypatch.setattr("tests.fuzz.check.stats", lambda module: SimpleNamespace(hits=6, misses=Counter()))


def test_tensors_are_made_on_the_device_and_arguments_drawn_on_the_host():
    meta = torch.device("meta")
    written = program("y = x * torch.arange(4) + torch.ones((3, 1), dtype=D)", "y = y[torch.tensor([0, 2])]")
    names = written.load(meta)
    assert placed(written.source, torch.device("cpu")) == written.source
    assert "torch.randn(3, 4, dtype=D, device='cpu').to('meta').requires_grad_()" in placed(written.source, meta)
    given = make_arguments(names, 0)
    assert make_module(names)(*given.args).is_meta and given.leaves[0].is_meta
    for seed in range(12):
        compile(placed(generate(seed).source, meta), "placed", "exec")


def less_exact(func, args, kwargs):
    """Another kernel for sines."""
    made = func(*args, **kwargs)
    return made * OFF if func.overloadpacket is torch.ops.aten.sin else made


def test_other_kernels_numbers_take_the_place_of_its_own():
    x = torch.linspace(-1, 1, 7, dtype=torch.float64)
    with HostKernels(less_exact) as mode:
        y = x.sin()
        y.mul_(2)
        narrow = x.float().sin()
    assert torch.equal(y, x.sin() * OFF * 2) and torch.equal(narrow, x.float().sin())
    assert mode.differing == {"sin"}


@pytest.mark.parametrize(("factor", "status"), [(OFF, "imprecise"), (1 + 2e-8, "wrong"), (1.0, "same")])
def test_a_kernel_of_eagers_is_imprecise_only_where_ours_has_the_hosts_numbers(monkeypatch, factor, status):
    dispatched_as(monkeypatch, lambda x: x.sin() + x.detach().sin() * (factor - 1) + 1)
    monkeypatch.setattr(compare.Comparison.__init__, "__defaults__", (lambda: HostKernels(less_exact),))
    verdict = check(program("y = x.sin() + 1"))
    assert verdict.status == status and (status != "imprecise" or "sin" in verdict.detail), verdict


TWICE = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]])
"""A column is written to one place two or three times."""
WRITES = {
    "scatter": (
        "torch.zeros_like(x).scatter(0, torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]]), x.sin())",
        lambda x: torch.zeros_like(x).scatter(0, TWICE.flip(0), x.sin().flip(0)),
    ),
    "index_copy": (
        "torch.zeros_like(x).index_copy(0, torch.tensor([1, 2, 1]), x.sin())",
        lambda x: torch.zeros_like(x).index_copy(0, torch.tensor([1, 2, 1]), x.sin().flip(0)),
    ),
    "index_put": (
        "torch.zeros_like(x).index_put((torch.tensor([1, 2, 1]),), x.sin())",
        lambda x: torch.zeros_like(x).index_put((torch.tensor([1, 2, 1]),), x.sin().flip(0)),
    ),
}


@pytest.mark.parametrize("factor", [1.0, 4.0], ids=["another order", "another number"])
@pytest.mark.parametrize("name", WRITES)
def test_the_order_of_writes_to_one_place_is_a_gpus_own(monkeypatch, name, factor):
    """Neither order is wrong there, any other number is; on the CPU the last write wins."""
    written, other = WRITES[name]
    dispatched_as(monkeypatch, lambda x: factor * 3 * other(x))
    assert check(program(f"y = 3 * {written}")).status == "wrong"
    monkeypatch.setattr(compare.Comparison.__init__, "__defaults__", (HostKernels,))
    verdict = check(program(f"y = 3 * {written}"))
    assert verdict.status == ("imprecise" if factor == 1 else "wrong"), verdict
    assert factor != 1 or name in verdict.detail


@pytest.mark.parametrize(
    ("other", "forward", "word"),
    [
        ("x", lambda x, z: x * 2 + x[:1], "of their own"),
        ("torch.randn(3, 4, dtype=D).requires_grad_()", lambda x, z: x * 2 if x is z else x + z, "of one memory"),
    ],
)
def test_arguments_are_tried_apart_and_as_one(monkeypatch, other, forward, word):
    dispatched_as(monkeypatch, forward)
    body = "y = x * 2 + z[:1]" if other == "x" else "y = x + z if x is not z else x * 3"
    verdict = check(program(body, others=(("z", other, False),)))
    assert verdict.status == "wrong" and word in verdict.detail, verdict


def test_seeds_end_where_the_device_is_lost():
    found = {}
    run_seeds(range(5), lambda each: Verdict("skipped", "", each.seed == 2), found.__setitem__)
    assert list(found) == [0, 1, 2]
