"""Operator traits: an operator's name -> a set of words, in one table that every package reads.

Each operator has exactly one cost class::

    random          a second draw would be another number, so it must never run twice
    view            the same elements seen differently; nothing to save beyond the base
    slice           a part of the same elements: a view, unless copying the part is cheaper than holding the whole
    creation        made from nothing, or from scalars
    cheap           an instruction or two per element; fuses into the consumer
    transcendental  as cheap, but for a transcendental function per element
    row             one kernel over rows: a reduction and point-wise work, with a result as large as its input
    reduction       many numbers to a few, or a running total: small to save, a pass over the operand to recompute
    product         a matrix product, a convolution, or the like

Further traits::

    elementwise     element i of the result depends on element i of each operand, after broadcasting, and nothing else
    broadcasting    ... of two or more operands that broadcast against each other
    hoisted         view simplification computes it before a broadcast of all its operands, on fewer elements
    plain           a view of one operand as one result
    slow            many cycles per element in a kernel: its result is cached there and not computed twice

``hoisted`` and ``slow`` describe current decisions, not permissions: adding an operator changes compiled code. An
operator that is not in the table has no traits. Readers of the table must treat it as the expensive case: the partition
saves its results.

>>> sorted(traits("relax.add"))
['broadcasting', 'cheap', 'elementwise', 'hoisted']
>>> sorted(having("product", "elementwise"))
[]
"""

from __future__ import annotations

#: Words on the left, operators (without ``relax.``, or with ``library.``) on the right; an operator stands in one line.
_TABLE = (
    ("random", "nn.dropout"),
    ("view plain", "reshape permute_dims expand_dims squeeze broadcast_to flatten"),
    ("view", "nn.batch_flatten split"),
    ("slice", "strided_slice"),
    ("creation", "full zeros ones arange library.extent"),
    ("cheap elementwise", "abs bitwise_not ceil clip floor isfinite isinf isnan logical_not nn.relu round sign trunc"),
    ("cheap elementwise hoisted", "astype negative square"),
    ("cheap elementwise hoisted slow", "rsqrt sqrt"),
    ("cheap elementwise broadcasting", "bitwise_and bitwise_or bitwise_xor"),
    ("cheap elementwise broadcasting hoisted", "add equal greater greater_equal less less_equal logical_and"),
    ("cheap elementwise broadcasting hoisted", "logical_or logical_xor maximum minimum multiply not_equal"),
    ("cheap elementwise broadcasting hoisted", "subtract where"),
    ("cheap elementwise broadcasting hoisted slow", "divide"),
    ("cheap", "concat flip full_like nn.pad ones_like zeros_like library.embedding"),
    ("transcendental elementwise", "nn.gelu nn.gelu_tanh nn.silu"),
    ("transcendental elementwise slow", "acos acosh asin asinh atan atanh cos cosh erf sin sinh tan"),
    ("transcendental elementwise slow", "library.expm1 library.log1p"),
    ("transcendental elementwise hoisted slow", "exp log sigmoid tanh"),
    ("transcendental elementwise broadcasting hoisted", "atan2"),
    ("transcendental elementwise broadcasting hoisted slow", "power"),
    ("row", "nn.layer_norm nn.log_softmax nn.softmax"),
    ("reduction", "collapse_sum_like collapse_sum_to cumsum max mean min prod sum"),
    ("product", "matmul library.matmul_bias"),
)


def _read(table: tuple[tuple[str, str], ...]) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for words, names in table:
        for name in names.split():
            name = name if name.startswith("library.") else f"relax.{name}"
            if name in found:
                raise ValueError(f"{name} stands twice in the table of operator traits")
            found[name] = frozenset(words.split())
    return found


_TRAITS = _read(_TABLE)


def traits(name: str) -> frozenset[str]:
    """The traits of an operator, as in ``"relax.add"`` or ``"library.log1p"``; empty if it is not in the table."""
    return _TRAITS.get(name, frozenset())


def having(*words: str) -> frozenset[str]:
    """The names of the operators that have all these traits."""
    return frozenset(name for name, held in _TRAITS.items() if held.issuperset(words))


#: Relax's own point-wise operators.
POINTWISE = frozenset(name for name in having("elementwise") if name.startswith("relax."))

STOP = "relax.grad.no_grad"
"""The operator that stops gradients."""

#: Operators that keep the elements in order.
RESHAPES = ("relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten")
