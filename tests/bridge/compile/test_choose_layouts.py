"""Layout choice: golden graphs with open layouts → memory layouts, and ways of products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from tvm import relax
from tvm.relax import Tuple, op

from bridge.compile import host_backend
from bridge.compile.cuda.products import CudaProducts
from bridge.compile.loop_ir.graph import LayoutAgnostic, LibraryCall, Product
from bridge.compile.loop_ir.operations import FIELDS, Packing, ProductPlan
from bridge.compile.passes.choose_layouts import choose_layouts
from bridge.compile.schedule.products import GENERATED, IN_PANELS, ProductShape
from bridge.compile.translate import translate
from tests.bridge.compile.graph_text import text
from tests.bridge.compile_helpers import function


@dataclass
class Policy:
    """One way for all products; keeps its arguments."""

    way: str
    asked: list[ProductShape] = field(default_factory=list)
    keeps_order: bool = False
    joins: bool = False
    packs: bool = False

    def choose(self, product: ProductShape) -> str:
        self.asked.append(product)
        return self.way

    def block(self, way: str, product: ProductShape) -> tuple[int, int]:
        return 4, 32

    def unit(self, product: ProductShape) -> int:
        return 1

    def packing(self, way: str, product: ProductShape) -> Packing | None:
        return Packing(4, product.n * product.k) if way == IN_PANELS else None


def chosen(params: list[tuple], body: Callable, policy: Policy, grad_outs: int = 0):
    backend = host_backend()
    graph = translate(function([(shape, "float32") for shape in params], body), backend)
    return graph, choose_layouts(graph, backend, policy, grad_outs)


def product_then(order: list[int] | None, *, then: Callable | None = None) -> Callable:
    """``x @ w``, read in another order."""

    def body(emit: Callable, x: relax.Expr, w: relax.Expr) -> list[relax.Var]:
        y = emit(op.matmul(x, w))
        read = y if order is None else emit(op.permute_dims(y, order))
        return [emit(op.exp(read)), *(then(emit, y) if then else [])]

    return body


def turned(emit: Callable, x: relax.Expr, w: relax.Expr) -> list[relax.Var]:
    return [emit(op.matmul(x, emit(op.permute_dims(w, [1, 0]))))]


def reshaped(emit: Callable, x: relax.Expr, w: relax.Expr) -> list[relax.Var]:
    y = emit(op.permute_dims(emit(op.matmul(x, w)), [0, 2, 1, 3]))
    return [emit(op.exp(emit(op.reshape(y, (8, 24)))))]


def vectors(emit: Callable, x: relax.Expr, w: relax.Expr) -> list[relax.Var]:
    return [emit(op.matmul(x, w))]


def joined(emit: Callable, x: relax.Expr, w: relax.Expr) -> list[relax.Var]:
    y = emit(op.permute_dims(emit(op.matmul(x, w)), [0, 2, 1]))
    return [emit(op.concat(Tuple([y, y]), axis=2))]


HEADS = [(2, 3, 4, 8), (2, 3, 8, 8)]

GOLDEN = {
    "rows of a batch are one dimension": (
        [(2, 3, 8), (8, 16)],
        product_then(None),
        ["0 = generated 1x1 6x8x16(p0[6,8:8,1+0], p1)", "1 = exp(0[2,3,16:48,16,1+0])", "return 1"],
        ["0 = library mm(p0[6,8:8,1+0], p1)", "1 = exp(0[2,3,16:48,16,1+0])", "return 1"],
    ),
    "a transposed operand is read as it lies": (
        [(6, 8), (16, 8)],
        turned,
        ["0 = generated 1x1 6x8x16(p0, p1[8,16:1,8+0])", "return 0"],
        ["0 = library mm(p0, p1[8,16:1,8+0])", "return 0"],
    ),
    "a result is stored in its readers' order": (
        HEADS,
        product_then([0, 2, 1, 3]),
        ["0 = generated 2x3 4x8x8(p0, p1)", "1 = exp(0)", "return 1"],
        [
            "0 = library bmm(p0[6,4,8:32,8,1+0], p1[6,8,8:64,8,1+0])",
            "1 = exp(0[2,4,3,8:96,8,32,1+0])",
            "return 1",
        ],
    ),
    "for transposed readers the product of the transposes": (
        [(2, 3, 8), (2, 8, 16)],
        product_then([0, 2, 1]),
        ["0 = generated 1x2 16x8x3(p1, p0)", "1 = exp(0)", "return 1"],
        ["0 = library bmm(p0, p1)", "1 = exp(0[2,16,3:48,1,16+0])", "return 1"],
    ),
    "two readers in the same order": (
        HEADS,
        product_then([0, 2, 1, 3], then=lambda emit, y: [emit(op.negative(emit(op.permute_dims(y, [0, 2, 1, 3]))))]),
        ["0 = generated 2x3 4x8x8(p0, p1)", "1 = exp(0)", "2 = negative(0)", "return 1, 2"],
        None,
    ),
    "readers that do not agree": (
        HEADS,
        product_then([0, 2, 1, 3], then=lambda emit, y: [emit(op.negative(y))]),
        [
            "0 = generated 1x6 4x8x8(p0, p1)",
            "1 = exp(0[2,4,3,8:96,8,32,1+0])",
            "2 = negative(0)",
            "return 1, 2",
        ],
        None,
    ),
    "a result of the function keeps its order": (
        HEADS,
        product_then([0, 2, 1, 3], then=lambda emit, y: [y]),
        ["0 = generated 1x6 4x8x8(p0, p1)", "1 = exp(0[2,4,3,8:96,8,32,1+0])", "return 1, 0"],
        None,
    ),
    "no order that generated code cannot write": (
        [(2, 3, 4, 8), (8, 8)],
        product_then([2, 3, 0, 1]),
        ["0 = generated 1x6 4x8x8(p0, p1)", "1 = exp(0[4,8,2,3:8,1,96,32+0])", "return 1"],
        None,
    ),
    "a reshape of the readers' order is no copy": (
        HEADS,
        reshaped,
        ["0 = generated 2x3 4x8x8(p0, p1)", "1 = exp(0[8,24:24,1+0])", "return 1"],
        [
            "0 = library bmm(p0[6,4,8:32,8,1+0], p1[6,8,8:64,8,1+0])",
            "1 = copy(0[2,4,3,8:96,8,32,1+0])",
            "2 = exp(1[8,24:24,1+0])",
            "return 2",
        ],
    ),
    "vectors are rows and columns": (
        [(8,), (8,)],
        vectors,
        ["0 = generated 1x1 1x8x1(p0[1,8:8,1+0], p1[8,1:1,1+0])", "return 0[:+0]"],
        ["0 = library mm(p0[1,8:8,1+0], p1[8,1:1,1+0])", "return 0[:+0]"],
    ),
    "a concatenation reads what is stored": (
        [(40, 16, 8), (40, 8, 32)],
        joined,
        [
            "0 = generated 1x40 32x8x16(p1, p0)",
            "1 = concat(0[40,32,2,16:512,16,0,1+0], 0[40,32,2,16:512,16,0,1+0])",
            "return 1",
        ],
        [
            "0 = library bmm(p0, p1)",
            "1 = concat(0[40,32,2,16:512,1,0,32+0], 0[40,32,2,16:512,1,0,32+0])",
            "return 1",
        ],
    ),
}


@pytest.mark.parametrize("case", GOLDEN.values(), ids=GOLDEN)
def test_golden(case):
    params, body, generated, library = case
    for way, expected in ((GENERATED, generated), ("mm", library)):
        neutral, graph = chosen(params, body, Policy(way))
        assert any(isinstance(node, LayoutAgnostic) for node in neutral.nodes)
        if expected is not None:
            assert text(graph) == expected


def scores(emit: Callable, q: relax.Expr, k: relax.Expr) -> list[relax.Var]:
    heads = [emit(op.permute_dims(x, [0, 2, 1, 3])) for x in (q, k)]
    return [emit(op.matmul(heads[0], emit(op.permute_dims(heads[1], [0, 1, 3, 2]))))]


def test_a_copy_for_a_library_keeps_neighbours_neighbours():
    """Keys are copied as rows of heads; a kernel that can reads them as columns."""
    heads = [(2, 5, 3, 8), (2, 5, 3, 8)]
    _, graph = chosen(heads, scores, Policy("bmm", keeps_order=True))
    assert text(graph) == [
        "0 = copy(p0[2,3,5,8:120,8,24,1+0])",
        "1 = copy(p1[2,3,5,8:120,8,24,1+0])",
        "2 = library bmm(0[6,5,8:40,8,1+0], 1[6,8,5:40,1,8+0])",
        "return 2[2,3,5,5:75,25,5,1+0]",
    ]
    _, graph = chosen(heads, scores, Policy("bmm"))
    assert "1 = copy(p1[2,3,8,5:120,8,1,24+0])" in text(graph)


def test_a_gradient_is_stored_by_a_library_as_its_readers_want_it():
    """The product of the transposes, for readers that read its rows as columns; never where a forward also has it."""
    body, policy = product_then([0, 3, 1, 2]), Policy("bmm", keeps_order=True)
    _, graph = chosen(HEADS, body, policy, grad_outs=1)
    assert text(graph) == [
        "0 = library bmm(p1[6,8,8:64,1,8+0], p0[6,8,4:32,1,8+0])",
        "1 = exp(0[2,8,3,4:96,4,32,1+0])",
        "return 1",
    ]
    _, graph = chosen(HEADS, body, policy)
    assert text(graph)[0] == "0 = library bmm(p0[6,4,8:32,8,1+0], p1[6,8,8:64,8,1+0])"
    _, graph = chosen(HEADS, product_then([0, 2, 1, 3]), policy, grad_outs=1)
    assert text(graph)[0] == "0 = library bmm(p0[6,4,8:32,8,1+0], p1[6,8,8:64,8,1+0])"


@pytest.mark.parametrize("shapes", [((4, 5), (2, 3, 5, 6)), ((2, 1, 4, 5), (3, 5, 6)), ((2, 3, 4, 5), (5, 6))])
def test_such_a_gradient_of_batches_that_one_operand_lacks(shapes):
    """One matrix for a whole batch, on either side, is one product of many rows, whichever comes first."""
    params = [(shape, "float32") for shape in shapes]
    backend = host_backend()
    graph = translate(function(params, product_then([0, 1, 3, 2])), backend)
    placed = choose_layouts(graph, backend, CudaProducts(), grad_outs=1)
    (call,) = (node for node in placed.nodes if isinstance(node, LibraryCall))
    assert call.name == ("bmm" if len(shapes[0]) == 4 and len(shapes[1]) == 3 else "mm")
    assert {len(operand.shape) for operand in call.operands} == {3 if call.name == "bmm" else 2}


def test_translation_says_what_and_not_where():
    graph, _ = chosen(HEADS, reshaped, Policy("mm"))
    assert text(graph) == [
        "0 = MatMul(p0, p1)",
        "1 = Shaped(0)",
        "2 = Shaped(1)",
        "3 = exp(2)",
        "4 = Result(3)",
        "return 4",
    ]


def as_it_is(emit: Callable, y: relax.Expr) -> relax.Expr:
    return y


def turned_back(emit: Callable, y: relax.Expr) -> relax.Expr:
    return emit(op.permute_dims(y, [0, 1, 3, 2]))


def cut(emit: Callable, y: relax.Expr) -> relax.Expr:
    return emit(op.strided_slice(y, [3], [0], [4]))


def merged(emit: Callable, y: relax.Expr) -> relax.Expr:
    return emit(op.permute_dims(emit(op.reshape(y, (8, 24))), [1, 0]))


@pytest.mark.parametrize("then", [as_it_is, turned_back, cut, merged])
@pytest.mark.parametrize("order", [[0, 2, 1, 3], [0, 1, 3, 2], [2, 0, 1, 3]], ids=str)
def test_the_policy_is_asked_the_same_whoever_reads_a_product(order, then):
    """Generated code stores the first product for its readers; later ones are asked for as if it had not."""

    def body(is_result: bool) -> Callable:
        def products(emit: Callable, x: relax.Expr, w: relax.Expr) -> list[relax.Var]:
            y = emit(op.matmul(x, w))
            read = then(emit, emit(op.permute_dims(y, order)))
            rank = len(read.ty.shape)
            other = emit(op.permute_dims(read, [*range(rank - 2), rank - 1, rank - 2]))
            return [emit(op.matmul(read, other)), *([y] if is_result else [])]

        return products

    asked = []
    for way in (GENERATED, "bmm"):
        for is_result in (False, True):
            policy = Policy(way)
            chosen(HEADS, body(is_result), policy)
            asked.append(policy.asked)
    assert len(asked[0]) == 2 and asked == asked[:1] * 4


@pytest.mark.parametrize("is_result", [False, True])
def test_no_order_of_readers_makes_a_product_another_way(is_result):
    """The kernel has loops for two batch extents; read in this order, they are three."""
    other = (lambda emit, y: [y]) if is_result else None
    _, graph = chosen([(2, 3, 4, 5, 8), (2, 3, 4, 8, 8)], product_then([2, 1, 0, 3, 4], then=other), Policy(GENERATED))
    assert text(graph)[0] == "0 = generated 1x24 5x8x8(p0, p1)"


def test_an_operand_stored_in_more_extents_than_the_kernel_has_loops_for_is_copied():
    """The kernel could read the operand's own order, so readers must not change the product's way."""

    def body(emit: Callable, x: relax.Expr, w: relax.Expr, v: relax.Expr) -> list[relax.Var]:
        y = emit(op.permute_dims(emit(op.matmul(x, w)), [1, 2, 0, 3, 4]))
        return [emit(op.matmul(emit(op.permute_dims(y, [2, 0, 1, 3, 4])), v))]

    _, graph = chosen([(2, 3, 4, 5, 8), (2, 3, 4, 8, 8), (2, 3, 1, 8, 6)], body, Policy(GENERATED))
    assert text(graph) == [
        "0 = generated 2x12 5x8x8(p0, p1)",
        "1 = copy(0[2,3,4,5,8:40,320,80,8,1+0])",
        "2 = generated 6x4 5x8x6(1, p2)",
        "return 2",
    ]


def test_nothing_is_asked_about_empty_products():
    policy = Policy(GENERATED)
    _, graph = chosen([(4, 0), (0, 6)], vectors, policy)
    assert policy.asked == [] and text(graph) == ["0 = library mm(p0, p1)", "return 0"]


def test_a_plan_is_all_that_the_kernel_is_told():
    _, graph = chosen([(2, 3, 8), (2, 8, 16)], product_then([0, 2, 1]), Policy(f"{GENERATED} short"))
    (product,) = (node for node in graph.nodes if isinstance(node, Product))
    plan = product.plan
    assert (plan.way, plan.element_type, plan.block, plan.offsets) == (f"{GENERATED} short", "float32", (4, 32), (0, 0))
    fields = dict(zip(FIELDS, plan.descriptor(), strict=True))
    assert {name: fields[name] for name in ("outer", "inner", "m", "n", "k")} == {
        "outer": 1,
        "inner": 2,
        "m": 16,
        "n": 3,
        "k": 8,
    }
    assert [fields[f"a_{name}"] for name in ("inner", "row", "column")] == [128, 1, 16]
    assert [fields[f"b_{name}"] for name in ("inner", "row", "column")] == [24, 1, 8]
    assert [fields[f"c_{name}"] for name in ("inner", "row")] == [48, 3]
    assert (fields["block_rows"], fields["block_columns"]) == (4, 32)
    again = ProductPlan(plan.way, plan.element_type, plan.geometry, plan.block)
    assert again == plan and hash(again) == hash(plan)


def test_copies_of_results_come_right_behind_the_products_that_they_are_of():
    """A gradient waits only for its operands; a kernel stores its own results."""

    def body(emit: Callable, x: relax.Expr, w: relax.Expr) -> list[relax.Var]:
        first = emit(op.matmul(x, w))
        kept = emit(op.exp(first))
        second = emit(op.matmul(kept, w))
        return [*(emit(op.permute_dims(each, [1, 0])) for each in (second, first, kept)), second]

    _, graph = chosen([(8, 8), (8, 8)], body, Policy(GENERATED))
    products = [place for place, node in enumerate(graph.nodes) if isinstance(node, Product)]
    made = {out: place for place, node in enumerate(graph.nodes) for out in node.outs}
    second, first, kept = (made[each.value] for each in graph.results[:3])
    assert (first, second) == (products[0] + 1, products[1] + 1) and kept == len(graph.nodes) - 1
