"""Sizes that forward or torch asks about: guards with their lines, dimensions that are fixed, names, refusals."""

from __future__ import annotations

import itertools

import pytest
import sympy
import torch
from torch import nn
from torch.export import AdditionalInputs, Dim, ShapesCollection
from torch.utils._sympy import functions as torch_sympy

from autodiff.extents import ExtentScope
from bridge import UnsupportedModule
from bridge.capture import capture, dynamic_dims
from bridge.capture.symbolic_sizes import NotTranslatedError, extent_of, holds
from bridge.state import SampleCall
from tests.bridge.symbolic import assert_as_eager, imported

ROWS, COLUMNS = Dim("rows"), Dim("columns")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Asks(nn.Module):
    def forward(self, x):
        if x.shape[1] > 512:
            x = x * 2
        if x.shape[0] % 2 == 0:
            x = x + 1
        return x


def test_what_forward_asks_is_a_guard_with_its_line():
    lowered = imported(Asks(), normal(4, 6), ({0: ROWS, 1: COLUMNS},))
    captured = lowered.captured
    found = {str(guard): captured.sizes.lines[guard] for guard in captured.sizes.scope.guards}
    assert list(found) == ["512 >= columns", "((rows) % (2)) == 0"]
    assert found["512 >= columns"].endswith("if x.shape[1] > 512:")
    assert found["((rows) % (2)) == 0"].endswith("if x.shape[0] % 2 == 0:")
    assert_as_eager(lowered, normal, [(4, 6), (2, 512)])
    for sizes in ({"rows": 5, "columns": 6}, {"rows": 4, "columns": 513}, {"rows": 0, "columns": 6}):
        assert captured.sizes.scope.broken()(sizes) is not None


class Loops(nn.Module):
    def forward(self, x):
        return sum(row * 2 for row in [x[i] for i in range(x.shape[0])])


@pytest.mark.parametrize("dim", [ROWS, Dim.DYNAMIC, Dim("rows", min=2, max=8)])
def test_a_loop_over_a_dimension_that_must_vary_is_refused_with_its_line(dim):
    with pytest.raises(UnsupportedModule, match=r"the sample's 4 alone\n.*for i in range\(x\.shape\[0\]\)"):
        imported(Loops(), normal(4, 6), ({0: dim, 1: COLUMNS},))


def test_a_loop_makes_a_dimension_static_that_may_be():
    lowered = imported(Loops(), normal(4, 6), ({0: Dim.AUTO, 1: Dim.AUTO},))
    assert lowered.captured.sizes.shapes[0][0] == 4
    assert [symbol.name for symbol in lowered.captured.sizes.scope.samples] == ["x_1"]
    assert_as_eager(lowered, lambda n: normal(4, n), [(6,), (2,), (9,)])


class Sums(nn.Module):
    def forward(self, x, y):
        return x + y


def test_dimensions_that_torch_finds_equal_have_one_extent():
    lowered = imported(Sums(), (normal(4, 6), normal(4, 6)), [{0: Dim.AUTO, 1: Dim.AUTO}, {0: Dim.AUTO, 1: Dim.AUTO}])
    captured = lowered.captured
    assert captured.sizes.shapes[0] == captured.sizes.shapes[1] and len(captured.sizes.scope.samples) == 2
    assert not captured.sizes.scope.guards
    assert captured.sizes.strides == ((captured.sizes.shapes[0][1], 1),) * 2


class Apart(nn.Module):
    def forward(self, x, y):
        return x * 2, y.sum(0)


def test_dimensions_of_one_name_have_one_extent_and_others_have_their_own():
    pair = normal(4, 6), normal(4, 3)
    lowered = imported(Apart(), pair, [{0: ROWS}, {0: ROWS}])
    assert len(lowered.captured.sizes.scope.samples) == 1
    lowered = imported(Apart(), pair, [{0: Dim.AUTO}, {0: Dim.AUTO}])
    assert [symbol.name for symbol in lowered.captured.sizes.scope.samples] == ["x_0", "y_0"]
    with pytest.raises(
        ValueError, match=r"dynamic_shapes\[1\]\[1\]: wanted the size that rows has at \[0\]\[0\], 4, got 3"
    ):
        imported(Apart(), pair, [{0: ROWS}, {1: ROWS}])


class Pads(nn.Module):
    def forward(self, x, y):
        return nn.functional.pad(x, (0, 1)) * nn.functional.pad(y, (0, 1))


def test_sizes_stay_symbolic_where_torch_finds_them_equal_after_it_has_traced_an_operator():
    """The fake run meets other symbols than the export; torch's C++ kernel of a padding fixes them."""
    lowered = imported(Pads(), (normal(4, 5), normal(4, 5)), [{0: ROWS}, {0: ROWS}])
    assert len(lowered.captured.sizes.scope.samples) == 1 and not lowered.captured.sizes.scope.guards
    assert_as_eager(lowered, lambda n: (normal(n, 5), normal(n, 5)), [(4,), (2,), (7,)])


class Losses(nn.Module):
    def forward(self, x, y):
        return (x.reshape(-1) * y.reshape(-1)).sum()


def test_what_is_equal_as_a_product_is_equal_by_its_factors():
    auto = {0: Dim.AUTO, 1: Dim.AUTO}
    lowered = imported(Losses(), (normal(4, 6), normal(4, 6)), [auto, auto])
    assert len(lowered.captured.sizes.scope.samples) == 2 and not lowered.captured.sizes.scope.guards
    assert_as_eager(lowered, lambda *s: (normal(*s), normal(*s)), [(4, 6), (2, 3)])
    lowered = imported(Losses(), (normal(4, 6), normal(3, 8)), [auto, auto])
    names, broken = (
        [symbol.name for symbol in lowered.captured.sizes.scope.samples],
        lowered.captured.sizes.scope.broken(),
    )
    fits = {sizes: broken(dict(zip(names, sizes, strict=True))) is None for sizes in [(4, 6, 3, 8), (4, 6, 5, 5)]}
    assert fits == {(4, 6, 3, 8): True, (4, 6, 5, 5): False}


class Halves(nn.Module):
    def forward(self, x, y):
        return x.view(-1, 2, x.shape[1])[:, 0] + y


def test_a_dimension_that_is_a_multiple_of_another():
    lowered = imported(Halves(), (normal(8, 3), normal(4, 3)), [{0: 2 * ROWS}, {0: ROWS}])
    assert_as_eager(lowered, lambda n: (normal(2 * n, 3), normal(n, 3)), [(4,), (2,), (7,)])
    scope = lowered.captured.sizes.scope
    assert len(scope.samples) == 1
    holding = [n for n in range(1, 12) if scope.broken()({symbol.name: n for symbol in scope.samples}) is None]
    assert holding == [4, 6, 8, 10]  # of 2 or 3 the half is 1, which torch takes for another case; x is even


def test_bounds_of_a_dimension_that_others_decide_are_guards():
    small = {0: Dim("few", min=3, max=5)}
    scope = imported(Halves(), (normal(8, 3), normal(4, 3)), [{0: Dim("many")}, small]).captured.sizes.scope
    holding = [n for n in range(1, 20) if scope.broken()({symbol.name: n for symbol in scope.samples}) is None]
    assert holding == [6, 8, 10]


def test_bounds_of_a_dimension_are_its_range():
    captured = imported(Asks(), normal(4, 6), ({0: Dim("rows", min=3, max=9)},)).captured
    (bounds,) = captured.sizes.scope.ranges.values()
    assert (bounds.low, bounds.high) == (3, 9)
    assert captured.sizes.scope.broken()({"rows": 10}) is not None


def test_transposed_arguments_have_their_strides():
    lowered = imported(Sums(), (normal(6, 4).t(), normal(4, 6)), [{0: ROWS, 1: COLUMNS}] * 2)
    rows, columns = lowered.captured.sizes.shapes[0]
    assert lowered.captured.sizes.strides == ((1, rows), (columns, 1))
    assert_as_eager(lowered, lambda n, m: (normal(m, n).t(), normal(n, m)), [(4, 6), (3, 2), (2, 9)])


def test_arguments_inside_structures_and_by_name():
    class Nested(nn.Module):
        def forward(self, parts, *, scale):
            return parts["a"][0] * scale + parts["a"][1]

    sample = {"parts": {"a": [normal(4, 6), 2.0]}, "scale": normal(6)}
    spec = {"parts": {"a": [{0: Dim.AUTO, 1: COLUMNS}, None]}, "scale": (COLUMNS,)}
    lowered = imported(Nested(), sample, spec)
    assert [symbol.name for symbol in lowered.captured.sizes.scope.samples] == ["parts_a_0_0", "columns"]
    assert_as_eager(lowered, lambda n, m: {"parts": {"a": [normal(n, m), 2.0]}, "scale": normal(m)}, [(4, 6), (2, 3)])


def test_collections_and_further_samples():
    x, y = normal(4, 6), normal(4, 6)
    shapes = ShapesCollection()
    shapes[x] = {0: ROWS}
    (found,) = dynamic_dims(SampleCall(Sums(), (x, y), {}), shapes)
    assert (found.leaf, found.dimension, found.name, found.required) == (0, 0, "rows", True)
    inputs = AdditionalInputs()
    inputs.add((normal(7, 6), normal(7, 6)))
    found = dynamic_dims(SampleCall(Sums(), (x, y), {}), inputs)
    assert [(each.leaf, each.dimension) for each in found] == [(0, 0), (1, 0)]


def test_a_tensor_that_is_passed_twice_is_two_arguments():
    x = normal(4, 6)
    found = dynamic_dims(SampleCall(Sums(), (x, x), {}), [{0: ROWS}, {1: COLUMNS}])
    assert [(each.leaf, each.dimension) for each in found] == [(0, 0), (1, 1)]


@pytest.mark.parametrize(
    ("dim", "message"),
    [
        (ROWS, r"\[0\]\[0\]: wanted a sample of a size from 2 for dimension rows, got 1"),
        (Dim.DYNAMIC, "wanted a sample of a size from 2 for dimension Dim.DYNAMIC, got 1"),
    ],
)
def test_a_sample_of_one_is_no_sample_of_a_dimension_that_varies(dim, message):
    with pytest.raises(ValueError, match=message):
        imported(Asks(), normal(1, 6), ({0: dim},))
    assert dynamic_dims(SampleCall(Asks(), (normal(1, 6),), {}), ({0: Dim.AUTO},)) == ()


def test_a_sample_outside_of_the_bounds():
    with pytest.raises(ValueError, match="wanted a sample of a size from 5 to 9 for dimension rows, got 4"):
        imported(Asks(), normal(4, 6), ({0: Dim("rows", min=5, max=9)},))


class Times(nn.Module):
    def forward(self, x, count):
        return x * count


def test_a_number_that_varies_is_refused():
    dims = dynamic_dims(SampleCall(Times(), (normal(4, 6), 3), {}), ({0: ROWS}, Dim.DYNAMIC))
    with pytest.raises(UnsupportedModule, match=r"dynamic_shapes\[1\]: a number that varies"):
        capture(SampleCall(Times(), (normal(4, 6), 3), {}, dims))


n, m = sympy.symbols("n m", integer=True, positive=True)
TRANSLATED = {
    "polynomial": 3 * n * m - n**2 + 7,
    "floor": torch_sympy.FloorDiv(n * m + 1, 3),
    "rest": torch_sympy.Mod(n, 4) + torch_sympy.PythonMod(m, n),
    "modular": torch_sympy.ModularIndexing(n * m, 2, 5),
    "bounds": torch_sympy.Max(n, m + 1) - torch_sympy.Min(n, 5),
    "up": torch_sympy.CeilToInt(torch_sympy.IntTrueDiv(n, sympy.Integer(3))),
    "down": torch_sympy.FloorToInt(torch_sympy.IntTrueDiv(n * m, m + 1)),
    "scaled": torch_sympy.TruncToInt(sympy.Float(2.5) * torch_sympy.ToFloat(n)),
}


@pytest.mark.parametrize("name", TRANSLATED)
def test_expressions_of_torch_are_extents(name):
    scope = ExtentScope()
    symbols = {n: scope.symbol("n", 6), m: scope.symbol("m", 5)}
    made = extent_of(TRANSLATED[name], symbols)
    for sizes in itertools.product(range(2, 12), repeat=2):
        wanted = TRANSLATED[name].subs(dict(zip((n, m), sizes, strict=True)))
        assert scope.value(made, dict(zip("nm", sizes, strict=True))) == int(wanted), sizes


CONDITIONS = {
    "and": sympy.And(n > m, sympy.Ne(n, 7)),
    "or": sympy.Or(sympy.Eq(n, 4), n >= m),
    "not": sympy.Not(sympy.Eq(torch_sympy.Mod(n, 4), 0)),
    "nested": sympy.And(sympy.Or(m < 4, n < 9), m <= n),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_holds_where_its_guards_do(name):
    scope = ExtentScope()
    symbols = {n: scope.symbol("n", 6), m: scope.symbol("m", 5)}
    assert holds(CONDITIONS[name], symbols)
    held = 0
    for sizes in itertools.product(range(2, 12), repeat=2):
        if scope.broken()(dict(zip("nm", sizes, strict=True))) is None:
            held += 1
            assert CONDITIONS[name].subs(dict(zip((n, m), sizes, strict=True)))
    assert held > 1


@pytest.mark.parametrize(
    "expr", [sympy.sqrt(n), n / 2, torch_sympy.TruncToInt(sympy.Float(0.1) * torch_sympy.ToFloat(n))]
)
def test_what_extents_do_not_have_is_no_extent(expr):
    with pytest.raises(NotTranslatedError):
        extent_of(expr, {n: ExtentScope().symbol("n", 6)})


def test_strides_that_no_size_tells_are_the_samples():
    """A part of a wider tensor: its rows may have any stride, and the entry is for the sample's."""

    def part(n: int) -> torch.Tensor:
        return normal(n, 9)[:, ::2]

    lowered = imported(Sums(), (part(4), part(4)), ({0: ROWS}, {0: ROWS}))
    assert [tuple(map(str, stride)) for stride in lowered.captured.sizes.strides] == [("9", "2")] * 2
    assert_as_eager(lowered, lambda n: (part(n), part(n)), [(2,), (7,)])
