"""Products chosen by measurement: every way gives the numbers, the fastest is taken, once per class, in any mode."""

from __future__ import annotations

import copy
import itertools
import math
import re
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from tvm import IRModule, tirx
from tvm.relax import op as R
from tvm_ffi import structural_hash

from bridge import add_tvm_dispatch, explain, stats
from bridge.base.session import SESSION
from bridge.compile import backend_for, compile_function, host_backend
from bridge.compile.cpu.build import CpuLibraries
from bridge.compile.cpu.gemm import gemm_function
from bridge.compile.cpu.gemm_tile import NARROW, WIDE, register_tile
from bridge.compile.cpu.products import CpuProducts, ProductTrial, library_ways, measured, shape_class
from bridge.compile.runtime.build import library_bytes
from bridge.compile.schedule.products import GENERATED, LayoutClass, ProductShape
from tests.bridge.compile_helpers import function, program
from tests.sampling import sampled

BLOCKINGS = [GENERATED, f"{GENERATED} short"]
WAYS = ["mm", "mm_swapped", "linear", *BLOCKINGS]
SIZES = [(1, 13, 15), (13, 1, 14), (14, 15, 1), (15, 14, 33), (29, 257, 70), (130, 31, 13)]
ROW, COLUMN = LayoutClass("row"), LayoutClass("column")
LINEAR = ProductShape("float32", 1, 256, 48, 32, ROW, COLUMN)


@pytest.fixture(autouse=True)
def _without_choices():
    SESSION.reset("choices")
    yield
    SESSION.reset("choices")


class Stopwatch:
    """Stands in for measuring: the favourite takes 1 second, every other way 2; keeps its arguments."""

    def __init__(self, *favourites: str) -> None:
        self.favourites = itertools.cycle(favourites)
        self.asked: list[tuple[ProductShape, tuple[str, ...]]] = []

    def __call__(self, product, ways):
        self.asked.append((product, tuple(ways)))
        favourite = next(self.favourites)
        return {way: 1.0 if way == favourite else 2.0 for way in ways}


def products(measure=None, backend=None, deterministic: bool = False) -> CpuProducts:
    return replace((backend or host_backend()).products(2, deterministic), measure=measure)


def forced(monkeypatch, way: str) -> None:
    monkeypatch.setattr(CpuProducts, "choose", lambda policy, product: way if product.batch == 1 else "bmm")


def cut(emit, x, turned):
    """The operand inside a stored matrix that is larger by a row and a column, and transposed if ``turned``."""
    rows, columns = (int(extent) for extent in x.ty.shape)
    inside = emit(R.strided_slice(x, [0, 1], [1, 1], [rows, columns]))
    return emit(R.permute_dims(inside)) if turned else inside


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut out"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_computes_every_layout_and_edge(monkeypatch, way, is_cut):
    forced(monkeypatch, way)
    torch.manual_seed(0)
    dtype = torch.float32 if way == "linear" else torch.float64
    for (m, k, n), turned in itertools.product(SIZES, itertools.product((False, True), repeat=2)):
        stored = [shape[::-1] if t else shape for shape, t in zip(((m, k), (k, n)), turned, strict=True)]
        tensors = [torch.randn(rows + is_cut, columns + is_cut, dtype=dtype) for rows, columns in stored]

        def body(emit, *operands, turned=turned):
            if is_cut:
                return [emit(R.matmul(*(cut(emit, x, t) for x, t in zip(operands, turned, strict=True))))]
            return [
                emit(R.matmul(*(emit(R.permute_dims(x)) if t else x for x, t in zip(operands, turned, strict=True))))
            ]

        compiled = program([(tuple(x.shape), str(dtype)[6:]) for x in tensors], body)
        steps = [step.name for step in compiled.steps]
        assert ("product_float64" if way.startswith(GENERATED) else way) in steps, str(compiled)
        a, b = (x[is_cut:, is_cut:].double() for x in tensors)
        exact = (a.T if turned[0] else a) @ (b.T if turned[1] else b)
        bound = 1e-5 if dtype is torch.float32 else 1e-10
        torch.testing.assert_close(compiled(tensors)[0].double(), exact, rtol=bound, atol=bound * k)


@pytest.mark.parametrize("dtype", sampled([torch.float32, torch.float64], [torch.float32]), ids=str)
def test_no_bit_depends_on_the_width_of_registers(monkeypatch, dtype):
    """Tiles of AVX-512 and of AVX2, as far as this processor has the registers."""
    forced(monkeypatch, f"{GENERATED} short")
    torch.manual_seed(0)
    sizes = [*SIZES, (115, 300, 200)]
    operands = [(torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)) for m, k, n in sizes]
    found, kernels = [], set()
    for tile in (WIDE, NARROW):
        for room in ("products", "backend"):
            monkeypatch.setattr(f"bridge.compile.cpu.{room}.register_tile", lambda target, tile=tile: tile)
        SESSION.reset("programs")
        found.append([])
        for tensors in operands:
            shapes = [(tuple(x.shape), str(dtype)[6:]) for x in tensors]
            compiled = program(shapes, lambda emit, a, b: [emit(R.matmul(a, emit(R.permute_dims(b))))])
            (kernel,) = (made for name, made in compiled.kernels.items() if "product" in name)
            kernels.add(structural_hash(kernel))
            found[-1].append(compiled(tensors)[0])
    assert len(kernels) == 2
    for (a, b), wide, narrow in zip(operands, *found, strict=True):
        assert torch.equal(wide, narrow)
        torch.testing.assert_close(wide.double(), a.double() @ b.double().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("layouts", list(itertools.product((ROW, COLUMN, LayoutClass("none")), repeat=2)), ids=str)
def test_what_is_measured_computes_the_product(layouts, dtype):
    """Every way that is offered for a class, in batches with the copies that a library needs."""
    policy = products()
    for batch, copied in ((1, False), (3, False), (3, True)):
        a, b = (LayoutClass(x.unit, copied or x.unit == "none") for x in layouts)
        shape = ProductShape(dtype, batch, 6, 40, 9, a, b)
        trial = ProductTrial.of(shape)
        ways = library_ways(shape) + (BLOCKINGS if dtype != "bfloat16" else [])
        for run in policy.runs(shape, trial, ways).values():
            trial.c.zero_()
            run()
            assert torch.all(trial.c == 9)


@pytest.mark.parametrize("way", WAYS)
def test_the_fastest_way_is_taken_and_measured_once_per_class(way):
    measure = Stopwatch(way)
    policy = products(measure)
    assert [policy.choose(LINEAR) for _ in range(3)] == [way] * 3
    assert measure.asked == [(LINEAR, tuple(WAYS))]
    turned = ProductShape("float32", 1, 256, 48, 32, COLUMN, ROW)
    policy.choose(turned)
    assert [product for product, _ in measure.asked] == [LINEAR, turned]


def test_torch_stays_unless_another_way_gains():
    for seconds, chosen in ((0.96, "mm"), (0.94, GENERATED)):
        SESSION.reset("choices")
        policy = products(lambda _, ways, seconds=seconds: {"mm": 1.0, GENERATED: seconds})
        assert policy.choose(LINEAR) == chosen
    assert products(lambda *_: {}).choose(LINEAR) == "mm"
    near = {"mm": 2.0, "linear": 0.98, f"{GENERATED} short": 0.97, GENERATED: 1.04}
    assert products(lambda *_: near).choose(LINEAR) == f"{GENERATED} short"
    assert products(lambda *_: near | {"linear": 0.5}).choose(LINEAR) == "linear"


def test_a_class_is_a_quarter_of_an_octave_and_large_products_are_represented():
    near = [ProductShape("float32", 1, m, 96, 32, ROW, COLUMN) for m in (57, 60, 64)]
    assert {shape_class(product, 2) for product in near} == {near[-1]}
    assert shape_class(ProductShape("float32", 1, 13, 5, 1), 2) == ProductShape("float32", 1, 14, 5, 1)
    large = [shape_class(ProductShape("float32", 512, m, 4096, 768), 2) for m in (8192, 16384)]
    assert large[0] == large[1]
    assert large[0].multiplications <= 2**27


def test_nothing_is_measured_for_small_products_integers_and_deterministic_algorithms():
    measure = Stopwatch(GENERATED)
    policy = products(measure)
    assert policy.choose(ProductShape("float32", 1, 4, 4, 4)) == "mm"
    assert policy.choose(ProductShape("int64", 3, 64, 64, 64)) == "bmm"
    assert products(measure, deterministic=True).choose(LINEAR) == "mm"
    assert not measure.asked
    assert policy.choose(LINEAR) == GENERATED


def test_a_process_measures_a_bounded_number_of_classes(monkeypatch):
    monkeypatch.setattr("bridge.trials._MOST", 2)
    measure = Stopwatch(GENERATED)
    policy = products(measure)
    shapes = [ProductShape("float32", 1, m, 96, 32) for m in (32, 64, 128)]
    assert [policy.choose(shape) for shape in shapes] == [GENERATED, GENERATED, "mm"]
    assert [policy.choose(shape) for shape in shapes] == [GENERATED, GENERATED, "mm"]
    assert len(measure.asked) == 2


def test_equal_products_of_one_process_have_equal_bits(monkeypatch):
    """Whichever way wins later: a recomputed product has the forward's bits."""
    measure = Stopwatch("mm", GENERATED, "linear", "mm_swapped")
    policy = products(measure)
    monkeypatch.setattr("bridge.compile.cpu.backend.CpuBackend.products", lambda *_: policy)
    torch.manual_seed(1)
    x, w = torch.randn(64, 300), torch.randn(40, 300)
    shapes = [((64, 300), "float32"), ((40, 300), "float32")]

    def forward(emit, x, w):
        return [emit(R.matmul(x, emit(R.permute_dims(w))))]

    def backward(emit, x, w):
        y = forward(emit, x, w)[0]
        return [emit(R.matmul(emit(R.permute_dims(y)), x)), emit(R.tanh(y)), emit(R.permute_dims(y))]

    ours = [compile_function(function(shapes, body), name="test")([x, w]) for body in (forward, backward)]
    assert torch.equal(ours[1][2], ours[0][0].T)
    assert len(measure.asked) == 2


def test_the_way_does_not_depend_on_who_reads_the_operands(monkeypatch):
    """A product that is only read permuted is stored permuted, unless it is also a result."""
    measure = Stopwatch(GENERATED, "mm", GENERATED)
    policy = products(measure)
    monkeypatch.setattr("bridge.compile.cpu.backend.CpuBackend.products", lambda *_: policy)
    torch.manual_seed(3)
    inputs = [torch.randn(*shape) for shape in ((4, 300, 48), (48, 24), (300, 64))]

    def body(emit, x, w, u, *, is_result):
        heads = emit(R.matmul(x, w))
        turned = emit(R.permute_dims(heads, [0, 2, 1]))
        joined = emit(R.matmul(emit(R.reshape(turned, (96, 300))), u))
        mixed = emit(R.matmul(turned, u))
        return [joined, mixed, *([heads] if is_result else [])]

    forms = [(tuple(x.shape), "float32") for x in inputs]
    ours = [
        compile_function(function(forms, partial(body, is_result=is_result)), name="test")(inputs)
        for is_result in (False, True)
    ]
    assert torch.equal(ours[0][0], ours[1][0])
    assert torch.equal(ours[0][1], ours[1][1])
    assert len(measure.asked) == 3, measure.asked


def test_deterministic_algorithms_take_torchs_products():
    """A program of its own: the one compiled before does not serve."""
    relax_function = function([((64, 64), "float32"), ((64, 96), "float32")], lambda emit, a, b: [emit(R.matmul(a, b))])
    plain = compile_function(relax_function, name="test")
    torch.use_deterministic_algorithms(True)
    try:
        strict = compile_function(relax_function, name="test")
    finally:
        torch.use_deterministic_algorithms(False)
    assert "product_float32" in str(plain)
    assert "library mm(" in str(strict)


@pytest.mark.parametrize("way", ["mm_swapped", "linear", GENERATED])
def test_a_program_names_its_ways(monkeypatch, way):
    forced(monkeypatch, way)
    compiled = program(
        [((8, 64), "float32"), ((96, 64), "float32")],
        lambda emit, x, w: [emit(R.matmul(x, emit(R.permute_dims(w))))],
    )
    named = "product_float32" if way == GENERATED else f"library {way}("
    assert named in str(compiled)


@pytest.mark.parametrize("way", sampled([*WAYS, "in turn"], ["mm_swapped", "linear", "generated short", "in turn"]))
def test_a_module_trains_whichever_way_wins(monkeypatch, way):
    """Forward and backward, which recomputes products, use the measured way of each class."""
    SESSION.reset("programs")  # programs of an equal module, compiled under another policy
    measure = Stopwatch(*(WAYS if way == "in turn" else [way]))
    policy = products(measure)
    monkeypatch.setattr("bridge.compile.cpu.backend.CpuBackend.products", lambda *_: policy)
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(96, 160), nn.GELU(), nn.Linear(160, 48))
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, torch.randn(3, 50, 96, requires_grad=True), partition="recompute_all")
    x = torch.randn(3, 50, 96, requires_grad=True)
    results = []
    for each in (module, eager):
        y = each(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *each.parameters()])])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert stats(module).hits == 1
    assert len({shape for shape, _ in measure.asked}) == len(measure.asked)
    named = "product" if way.startswith(GENERATED) else "mm" if way == "in turn" else way
    told = str(explain(module).full)
    assert re.search(rf"\b{named}\b", told)
    assert re.search(rf"matmul( add)? \({way}, \d+ x \d+ a task\)", told) or not way.startswith(GENERATED), told


def in_vmap(call):
    torch.func.vmap(lambda x: call() and x)(torch.ones(2))


def in_mode(mode):
    def inside(call):
        with mode():
            call()

    return inside


MODES = {
    "fake": in_mode(FakeTensorMode),
    "inference": in_mode(torch.inference_mode),
    "autocast": in_mode(lambda: torch.autocast("cpu", torch.bfloat16)),
    "meta device": in_mode(lambda: torch.device("meta")),
    "vmap": in_vmap,
    "enabled grad": in_mode(torch.enable_grad),
}


def really(product, ways):
    """Measures products in spite of the fixture of all tests."""
    return measured(products(), product, ways)


@pytest.mark.parametrize("mode", MODES)
def test_measuring_sees_no_mode_and_leaves_no_trace(mode):
    times = {}
    policy = products(lambda *asked: times.update(really(*asked)) or times)
    before = torch.get_rng_state(), torch.is_grad_enabled(), torch.get_num_threads()
    MODES[mode](lambda: policy.choose(LINEAR) is not None)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.is_grad_enabled(), torch.get_num_threads()) == before[1:]
    assert times.keys() >= {"mm", "mm_swapped", "linear"}
    assert all(0 < seconds < 10 for seconds in times.values())


def test_real_measuring_chooses_one_of_the_ways():
    assert products(really).choose(LINEAR) in WAYS


def test_generated_loops_are_compiled_in_less_time_than_at_llvms_default_level():
    """They are in vectors already."""
    target, times = host_backend().target, {}
    func = gemm_function("float32", register_tile(target) or NARROW)
    module = IRModule({"product": func.with_attr("global_symbol", "product")})
    makes = {
        "ours": lambda: CpuLibraries(target).build_bytes({"product": func}),
        "default": lambda: library_bytes(tirx.build(module, target, pipeline="bridge_loops")),
    }
    for _ in range(3):
        for name, make in makes.items():
            begun = time.thread_time()
            make()
            times[name] = min(times.get(name, math.inf), time.thread_time() - begun)
    assert times["ours"] < 0.85 * times["default"], times


@pytest.mark.parametrize("processor, is_offered", [("haswell", True), ("sandybridge", False)])
def test_generated_code_is_a_candidate_where_vectors_have_fused_multiply_adds(processor, is_offered):
    """Without them it would be right, and slow."""
    backend = backend_for({"kind": "llvm", "mcpu": processor})
    measure = Stopwatch(GENERATED)
    policy = products(measure, backend)
    assert policy.choose(LINEAR) == (GENERATED if is_offered else "mm")
    assert any(way.startswith(GENERATED) for way in measure.asked[0][1]) is is_offered
    if is_offered:
        shape = ProductShape("float64", 2, 17, 37, 300, ROW, COLUMN)
        trial = ProductTrial.of(shape)
        policy.runs(shape, trial, [GENERATED])[GENERATED]()
        assert torch.all(trial.c == 300)
