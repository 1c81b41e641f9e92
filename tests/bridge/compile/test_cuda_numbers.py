"""Numbers of a GPU's kernels, run as OpenCL: functions of float32 at OpenCL's error bounds, half types as torch's.

A GPU's own library has the bits of eager's kernels: ``tests/gpu/test_functions.py``.
"""

from __future__ import annotations

import math

import pytest
import torch
from tvm.relax import const
from tvm.relax import op as R

from bridge.compile.cuda.row import RowVariant
from bridge.compile.loop_ir.graph import Pointwise
from bridge.compile.passes.choose_layouts import choose_layouts
from bridge.compile.passes.patterns import name_normal_functions
from bridge.compile.pipeline import optimize
from bridge.compile.translate import translate
from tests.bridge.compile.test_fastmath import FUNCTIONS, floats, ulps
from tests.bridge.compile_helpers import function
from tests.cuda_plans import BACKEND, CudaKernels, planned

BOUNDS = {"exp": 3, "log": 3, "tanh": 5, "erf": 16, "sigmoid": 5, "log1p": 2, "expm1": 3}
"""Units in the last place that OpenCL C promises of its functions; a sigmoid's sum and quotient beside ``exp``."""


def run(inputs, body):
    """``body`` as kernels for a GPU, on these inputs."""
    params = [(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in inputs]
    graph = name_normal_functions(translate(function(params, body), BACKEND), BACKEND)
    graph = optimize(choose_layouts(graph, BACKEND, BACKEND.products(1, True)), BACKEND)
    plans = planned(graph)
    memory = dict(zip(graph.params, inputs, strict=True))
    CudaKernels([plans]).run(plans, memory)
    return [memory[operand.value].reshape(operand.shape) for operand in graph.results]


def test_error_over_the_whole_range():
    x = floats()
    x = torch.cat([x[::32], x[-9:]])
    results = run([x], lambda emit, p: [emit(ours(p)) for ours, *_ in FUNCTIONS.values()])
    for y, (name, (_, exact, _, promised)) in zip(results, FUNCTIONS.items(), strict=True):
        inside = torch.ones_like(x, dtype=torch.bool) if promised is None else promised(x)
        theirs = exact(x[inside].double())
        assert float(ulps(y[inside], theirs).max()) <= BOUNDS[name], name
        assert torch.equal(y[inside].isnan(), theirs.isnan()), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_round_and_widen_as_torch(dtype):
    name = str(dtype).removeprefix("torch.")
    x = floats()[::64].contiguous()
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    (narrow,) = run([x], lambda emit, p: [emit(R.astype(p, name))])
    (wide,) = run([every], lambda emit, p: [emit(R.astype(p, "float32"))])
    for ours, theirs in ((narrow, x.to(dtype)), (wide, every.float())):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours[~ours.isnan()], theirs[~theirs.isnan()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_arithmetic_is_rounded_step_by_step(dtype):
    """Also where a factor is no number of the type: eager's scalars are float32."""
    torch.manual_seed(0)
    name = str(dtype).removeprefix("torch.")
    x, y = torch.randn(40, 64).to(dtype), torch.randn(40, 64).to(dtype)

    def body(emit, x, y):
        def by(number, value):  # as an importer writes ``number * value``
            wide = emit(R.multiply(emit(R.astype(value, "float32")), const(number, "float32")))
            return emit(R.astype(wide, name))

        total = emit(R.add(emit(R.multiply(x, x)), y))
        some = emit(R.maximum(total, emit(R.negative(y))))
        return [some, emit(R.subtract(emit(R.multiply(some, by(0.5, x))), by(0.3, y)))]

    ours = run([x, y], body)
    some = torch.maximum(x * x + y, -y)
    for one, two in zip(ours, (some, some * (x * 0.5) - y * 0.3), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_normal_distribution_of_every_number_of_a_half_type(dtype):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    below, density, activated = run([x], normal_functions)
    wide = x.double()
    assert float((below - torch.special.ndtr(wide)).abs().nan_to_num().max()) < 2.5e-7
    assert float((density - torch.exp(wide * wide / -2)).abs().nan_to_num().max()) < 2e-7
    for ours, theirs in ((below, wide), (density, wide), (activated, torch.nn.functional.gelu(wide))):
        assert torch.equal(ours.isnan(), theirs.isnan())
    exact = wide * torch.special.erfc(-wide * math.sqrt(0.5)) / 2
    inside = exact.isfinite() & activated.isfinite()
    distance, best = ((each - exact)[inside].abs() for each in (activated.double(), exact.to(dtype).double()))
    assert bool((distance <= best + 1e-5 * exact[inside].abs() + 1e-30).all())
    large = (x > 6) & x.isfinite()
    assert torch.equal(activated[large], x[large])


def normal_functions(emit, x):
    """Half-type normal distribution function, its density but for a factor, and GELU."""
    wide = emit(R.astype(x, "float32"))
    root = emit(R.erf(emit(R.multiply(wide, const(math.sqrt(0.5), "float32")))))
    below = emit(R.multiply(const(0.5, "float32"), emit(R.add(const(1, "float32"), root))))
    square = emit(R.multiply(wide, wide))
    return [below, emit(R.exp(emit(R.multiply(const(-0.5, "float32"), square)))), emit(R.nn.gelu(x))]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_normal_distribution_is_found_where_numbers_are_of_a_half_type(dtype):
    graph = name_normal_functions(translate(function([((4, 64), dtype)], normal_functions), BACKEND), BACKEND)
    found = [node.op for node in graph.nodes if isinstance(node, Pointwise)]
    expected = {"normal_cdf": 2, "gaussian": 1, "erf": 0, "exp": 0}
    if dtype == "float32":
        expected = {"normal_cdf": 0, "gaussian": 0, "erf": 2, "exp": 1}
    assert {name: found.count(name) for name in expected} == expected


def test_nan_and_infinity_in_reductions():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1.0, nan, -inf, inf], [-inf, -inf, -inf, -inf], [inf, inf, 1.0, 2.0]]).repeat(1, 30)
    largest, least, total, columns = run(
        [x], lambda emit, p: [emit(R.max(p, [1])), emit(R.min(p, [1])), emit(R.sum(p, [1])), emit(R.max(p, [0]))]
    )
    assert largest[0].isnan() and least[0].isnan() and total[0].isnan()
    assert (
        largest[1:].tolist() == [-inf, inf] and least[1:].tolist() == [-inf, 1.0] and total[1:].tolist() == [-inf, inf]
    )
    torch.testing.assert_close(columns, x.amax(0), equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "columns", "function", "is_wider"),
    [
        ("bfloat16", 256, "abs", True),
        ("float16", 768, "abs", True),
        ("bfloat16", 256, "tanh", False),
        ("bfloat16", 260, "abs", False),
        ("float32", 256, "abs", False),
    ],
)
def test_sums_of_columns_are_the_same_bits_in_wider_vectors(monkeypatch, dtype, columns, function, is_wider):
    """A thread loads a whole vector of half types where that is quicker; a vector that all rows share may be wider."""
    torch.manual_seed(0)
    x, scale = torch.randn(70, columns).to(getattr(torch, dtype)), torch.randn(columns)

    def body(emit, x, scale):
        x = emit(getattr(R, function)(emit(R.astype(x, "float32"))))
        y = emit(R.astype(emit(R.multiply(x, scale)), dtype))
        return [y, emit(R.sum(emit(R.astype(y, "float32")), [0]))]

    forms = []
    wider = RowVariant.widened
    monkeypatch.setattr(RowVariant, "widened", lambda form, plan: forms.append(wider(form, plan)) or forms[-1])
    y, total = run([x, scale], body)
    assert [form.lanes for form in forms] == [8 if is_wider else 4]
    monkeypatch.setattr(RowVariant, "widened", lambda form, plan: form)
    for ours, plain in zip((y, total), run([x, scale], body), strict=True):
        assert torch.equal(ours, plain)
    assert function != "abs" or torch.equal(y, (x.float().abs() * scale).to(y.dtype))
    torch.testing.assert_close(total, y.float().sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("columns", [300, 30, 7, 96, 2306, 2051])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_any_length_beside_their_places(dtype, columns):
    """Threads take several vectors of rows of any length, in a long row a warp's vectors apart; ranges are computed."""
    x = torch.arange(50 * columns).view(50, columns).remainder(251).to(dtype)
    chosen = torch.arange(50, dtype=torch.int32).remainder(columns).view(50, 1)

    def body(emit, p, index):
        hit = emit(R.equal(index, emit(R.arange(0, columns, 1, "int32"))))
        return [emit(R.where(hit, p, emit(R.negative(p))))]

    (y,) = run([x, chosen], body)
    assert torch.equal(y, torch.where(chosen == torch.arange(columns), x, -x))
    graph = translate(function([((50, columns), "float32"), ((50, 1), "int32")], body), BACKEND)
    graph = optimize(choose_layouts(graph, BACKEND, BACKEND.products(1, True)), BACKEND)
    assert not any(operand.value in graph.constants for node in graph.nodes for operand in node.operands)
