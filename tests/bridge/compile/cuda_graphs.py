"""Loop graphs that together need every kind of kernel for a GPU."""

from __future__ import annotations

from collections.abc import Callable

from autodiff.extents import Dim
from bridge.compile.loop_ir.graph import Graph
from tests.bridge.compile.planned_graphs import Builder


def softmax(rows: Dim, columns: Dim, dtype: str = "float32") -> Graph:
    """Two reductions of a row, one after another, with a value cached between them."""
    b = Builder(dtype)
    x = b.param(rows, columns)
    largest = b.reduce("max", x, rows, columns, 1, rows, 1)
    e = b.op("exp", b.op("subtract", x, largest))
    total = b.reduce("sum", e, rows, columns, 1, rows, 1)
    return b.graph(b.op("divide", e, total), total)


def layer_norm_backward(rows: Dim, columns: Dim, dtype: str = "float32") -> Graph:
    """Four reductions of rows, two of columns, results of rows and of elements."""
    b = Builder(dtype)
    x, dy, gain = b.param(rows, columns), b.param(rows, columns), b.param(columns)

    def mean(value):
        return b.op("multiply", b.reduce("sum", value, rows, columns, 1, rows, 1), 0.01)

    d = b.op("subtract", x, mean(x))
    r = b.op("rsqrt", b.op("add", mean(b.op("square", d)), 1e-5))
    normal = b.op("multiply", d, r)
    of_gain = b.reduce("sum", b.op("multiply", dy, normal), 1, rows, columns, columns)
    of_bias = b.reduce("sum", dy, 1, rows, columns, columns)
    dn = b.op("multiply", dy, gain)
    along = b.op("multiply", normal, mean(b.op("multiply", dn, normal)))
    dx = b.op("multiply", b.op("subtract", b.op("subtract", dn, mean(dn)), along), r)
    return b.graph(dx, of_gain, of_bias, normal, r)


def column_sums(batches: Dim, rows: Dim, columns: Dim, op: str = "sum", dtype: str = "float32") -> Graph:
    """A column reduction alone."""
    b = Builder(dtype)
    x = b.param(batches, rows, columns)
    return b.graph(b.reduce(op, x, batches, rows, columns, batches, columns))


def fused_columns(batches: int, rows: int, columns: int, dtype: str = "float32") -> Graph:
    """Two column reductions with the arithmetic in front of them."""
    b = Builder(dtype)
    x, bias = b.param(batches * rows, columns), b.param(columns)
    y = b.op("tanh", b.op("add", x, bias))
    sums, largest = (b.reduce(op, y, batches, rows, columns, batches, columns) for op in ("sum", "max"))
    return b.graph(sums, y, largest)


def rows_and_columns(rows: Dim, columns: Dim, dtype: str = "float32", others: tuple[str, ...] = ()) -> Graph:
    """Four reductions of rows in one pass and of the same columns, and of columns in other element types."""
    b = Builder(dtype)
    x = y = b.param(rows, columns)
    sums = []
    for factor in range(4):
        value = b.op("square", b.op("multiply", x, float(factor)))
        sums.append(b.reduce("sum", value, 1, rows, columns, columns))
        y = b.op("divide", y, b.op("add", b.reduce("sum", value, rows, columns, 1, rows, 1), 1.0))
    cast = [b.op("astype", x, dtype=other) for other in others]
    return b.graph(y, *sums, *(b.reduce("max", each, 1, rows, columns, columns) for each in cast))


def strided(a: Dim, b: Dim, c: Dim, dtype: str = "float32") -> Graph:
    """Permuted operands, windows of a tensor."""
    g = Builder(dtype)
    x, y, wide = g.param(a, b, c), g.param(b, a, c), g.param(a, 3 * c)
    window = g.windowed(wide, (a, c), (3 * c, 1), c)
    return g.graph(
        g.op("add", g.transposed(x, 1, 0, 2), y), g.op("multiply", g.transposed(x, 2, 1, 0), 2.0), g.op("exp", window)
    )


def padded(rows: Dim, columns: Dim, wide: Dim, dtype: str = "float32") -> Graph:
    """Rows with zeros behind, of a kernel that reduces them and of one that does not; sums of their columns."""
    b = Builder(dtype)
    x = b.param(rows, columns)
    normal = b.op("divide", x, b.reduce("max", b.op("square", x), rows, columns, 1, rows, 1))
    sums = b.reduce("sum", normal, 1, rows, columns, columns)
    return b.graph(b.pad(normal, wide), sums, b.pad(b.op("negative", b.param(rows, columns)), wide))


GRAPHS: dict[str, Callable[[], Graph]] = {
    **{
        f"softmax {r} x {c}": lambda r=r, c=c: softmax(r, c)
        for r, c in ((7, 3), (9, 31), (10, 100), (3, 768), (2, 5000))
    },
    **{
        f"layer_norm_backward {r} x {c}": lambda r=r, c=c: layer_norm_backward(r, c)
        for r, c in ((700, 16), (67, 31), (100, 1100))
    },
    **{f"column_sums {e}": lambda e=e: column_sums(*e) for e in ((1, 1000, 5), (4, 7, 33), (1, 300, 1000))},
    **{f"fused_columns {e}": lambda e=e: fused_columns(*e) for e in ((2, 500, 64), (3, 40, 5))},
    **{f"strided {e}": lambda e=e: strided(*e) for e in ((12, 7, 64), (5, 6, 7))},
    "softmax bfloat16": lambda: softmax(33, 64, "bfloat16"),
    "softmax float16": lambda: softmax(33, 31, "float16"),
    "softmax float64": lambda: softmax(33, 64, "float64"),
    "mixed rows_and_columns": lambda: rows_and_columns(70, 128, "float64", ("float32", "int64", "int32")),
    **{f"padded {e}": lambda e=e: padded(*e) for e in ((9, 30, 32), (5, 31, 40), (3, 1026, 1032), (7, 66, 67))},
    "padded bfloat16": lambda: padded(40, 60, 64, "bfloat16"),
    "integers": lambda: column_sums(2, 40, 6, "max", "int64"),
}
