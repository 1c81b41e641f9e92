"""Pre-call guard expressions: the nodes of the numbers that forward reads → operations that compute them from inputs.

If a number depends only on arguments, buffers and constants, a call computes it before the compiled forward runs, with
torch's own operators, and compares it. The compiled forward computes the other numbers beside its results: those
depend on trained parameters or draws, or take long.

Why that is exact: the graph is functional, so its nodes give the number at its place in forward, whatever is written
before and after; and they are the operators that eager runs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import fx

from autodiff.lazy import cached_property
from bridge.base.devices import HOST
from bridge.base.errors import BY_NUMBERS, Unsupported
from bridge.base.pytrees import tensor_leaves
from bridge.base.torch_internals import VF, OpOverload, aten, schema
from bridge.base.torch_shapes import hint
from bridge.capture.draws import IsolatedRNG
from bridge.capture.passes.stop_gradient import STOP_GRADIENT
from bridge.capture.refusals import shape_by_numbers
from bridge.capture.rows import NumberRead
from bridge.capture.scalar_guards import ScalarGuard
from bridge.state import ModuleTensor

#: Bounds on the work that a call repeats before its compiled forward: operators, elements of all their results.
MAX_OPERATIONS, MAX_ELEMENTS = 64, 1 << 20
MAX_LITERAL = 64
_SHOWN = 40
"""Characters of a list of numbers that a reason quotes."""


def literal(elements: tuple, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A constant tensor."""
    return VF.tensor(elements, dtype=dtype, device=device).reshape(shape)


_OF_SIZES = (operator.add, operator.mul, operator.floordiv, operator.sub, operator.mod)
FUNCTIONS = {each.__name__: each for each in (*_OF_SIZES, operator.getitem, literal)}
"""The functions of an expression's graph that are no operators of torch, by name: Python's on sizes and on several
results, and constants."""

_UNKNOWN = (torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


@dataclass(frozen=True, eq=False)
class PreCallExpression:
    """A flag or integers that forward reads, as a function of inputs.

    Attributes:
        where: ``file:line: code`` of the read.
        numbers: the numbers that the sample read, flat.
        inputs: indices into module tensors and arguments.
        graph: computes the numbers from these inputs, in their order.
        sizes: for each number, the index of its counted dimension (:mod:`bridge.capture.counted_dims`), or ``None`` for
            a number that must be equal; empty if all must be equal.
    """

    where: str
    numbers: tuple[int, ...]
    inputs: tuple[int, ...]
    graph: fx.Graph
    sizes: tuple[int | None, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PreCallExpression) and self._plain == other._plain

    def __hash__(self) -> int:
        return hash(self._plain)

    @property
    def _plain(self) -> tuple:
        """Its parts, which are compared by value."""
        return self.where, self.numbers, self.inputs, str(self.graph), self.sizes

    @cached_property
    def compute(self) -> Callable[..., torch.Tensor]:
        """The graph as a function of the inputs."""
        code = self.graph.python_code("self")
        namespace = dict(code.globals)
        exec(code.src, namespace)
        return partial(namespace["forward"], None)

    @property
    def field(self) -> str:
        """The name of the number in a guard's failure."""
        return f"number read at {self.where}"

    @property
    def words(self) -> str:
        """The sample's numbers in a guard's failure."""
        pairs = zip(self.numbers, self.sizes, strict=True) if self.sizes else ()
        named = [number if size is None else f"count_{size}" for number, size in pairs]
        return f"compiled for {', '.join(map(str, named)) or shown(self.numbers)}"


def shown(numbers: Sequence[int]) -> str:
    """Numbers as text of at most about ``_SHOWN`` characters."""
    text = repr(numbers[0] if len(numbers) == 1 else tuple(numbers))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def recomputed(
    read: Sequence[fx.Node | None],
    readings: Sequence[ScalarGuard],
    tensors: Sequence[ModuleTensor],
    bound: Mapping[str, int],
    literals: Mapping[str, torch.Tensor],
    sizes: Sequence[tuple[int | None, ...]],
    given: int,
) -> tuple[tuple[PreCallExpression, ...], tuple[fx.Node | None, ...], set[fx.Node]]:
    """Splits the numbers that forward reads → (pre-call guard expressions, ``read`` with ``None`` for their numbers,
    for constants and for certain numbers, the nodes that compute the expressions).

    Args:
        read, readings: the nodes of the numbers in a functional graph; their scalar guards.
        tensors: the module's tensors.
        bound, literals: the graph's placeholders, as in :class:`bridge.capture.captured.Captured`.
        sizes: for each reading, as in :class:`PreCallExpression`.
        given: the number of inputs before the counted dimensions.
    """
    found, left, gone = [], list(read), set[fx.Node]()
    for place, (node, reading) in enumerate(zip(read, readings, strict=True)):
        if node is None:
            continue
        is_size, is_rounded = bool(sizes[place]), reading.dtype.is_floating_point or reading.dtype.is_complex
        nodes = None if is_size else constant(node, bound)
        if nodes is None and not is_rounded and not is_size and (always := certain(node)) is not None:
            nodes = always[1] if set(_flat(reading)) == {always[0]} else None
        if nodes is None and not is_rounded and (nodes := _repeatable(node, tensors, bound, literals)) is not None:
            indices = (bound[each.name] for each in nodes if each.op == "placeholder" and each.name in bound)
            inputs = tuple(dict.fromkeys(indices))
            known = given + sum(size is not None for each in found for size in each.sizes)
            if any(index >= known for index in inputs):  # it depends on a number that is read later
                continue
            graph = _graph(nodes, bound, literals, inputs)
            found.append(PreCallExpression(reading.where, tuple(_flat(reading)), inputs, graph, sizes[place]))
        if nodes is not None:
            left[place] = None
            gone.update(each for each in nodes if each.op == "call_function")
    return tuple(found), tuple(left), gone


def constant(node: fx.Node, bound: Mapping[str, int]) -> list[fx.Node] | None:
    """The nodes that compute a value without inputs and draws; ``None`` if it needs one."""
    return _behind(
        node, lambda each: each.name not in bound and (each.op == "placeholder" or _operator(each) is not None)
    )


def _behind(node: fx.Node, may_be: Callable[[fx.Node], bool]) -> list[fx.Node] | None:
    """A node and the nodes that it is computed from, in the graph's order; ``None`` if ``may_be`` refuses one."""
    todo, seen = [node], {node}
    while todo:
        each = todo.pop()
        if not may_be(each):
            return None
        new = set(each.all_input_nodes) - seen
        seen |= new
        todo += new
    return sorted(seen)


def _repeatable(
    node: fx.Node, tensors: Sequence[ModuleTensor], bound: Mapping[str, int], literals: Mapping[str, torch.Tensor]
) -> list[fx.Node] | None:
    """A number's node and the nodes that it is computed from, in order; ``None`` if a call may not compute them before
    its forward: they depend on parameters or draws, or are too many."""
    calls = elements = 0

    def may_be(each: fx.Node) -> bool:
        nonlocal calls, elements
        if each.op == "placeholder":
            if each.name not in bound:
                return each.name in literals and literals[each.name].numel() <= MAX_LITERAL
            index = bound[each.name]
            return not (index < len(tensors) and tensors[index].requires_grad)
        extents = (map(hint, made.shape) for made in tensor_leaves(each.meta.get("val")))
        calls, elements = calls + 1, elements + sum(math.prod(n or MAX_ELEMENTS for n in shape) for shape in extents)
        is_known = each.op == "call_function" and _operator(each) is not None
        return is_known and calls <= MAX_OPERATIONS and elements <= MAX_ELEMENTS

    return _behind(node, may_be)


def _graph(
    nodes: Sequence[fx.Node], bound: Mapping[str, int], literals: Mapping[str, torch.Tensor], inputs: Sequence[int]
) -> fx.Graph:
    """Nodes of the captured graph → a graph of the inputs alone, which returns the value of the last node."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    given = [graph.placeholder(f"input_{place}") for place in inputs]
    for node in nodes:
        if node.op == "placeholder" and node.name in bound:
            made[node] = given[inputs.index(bound[node.name])]
        elif node.op == "placeholder":
            value = literals[node.name]
            elements = tuple(value.detach().reshape(-1).tolist())
            made[node] = graph.call_function(literal, (elements, tuple(value.shape), value.dtype, value.device))
        elif node.target == STOP_GRADIENT:
            made[node] = made[node.args[0]]
        else:
            kwargs = {name: each for name, each in node.kwargs.items() if node.target not in _FILLED or name != _LAYOUT}
            args, kwargs = fx.map_arg((node.args, kwargs), made.__getitem__)
            made[node] = graph.call_function(_operator(node), args, kwargs)
    graph.output(made[nodes[-1]])
    return graph


def _operator(node: fx.Node) -> Callable[..., Any] | None:
    """A node's operator if a call may run it before its forward, else ``None``."""
    target = _FILLED.get(node.target, node.target)
    if isinstance(target, OpOverload) and target != STOP_GRADIENT:
        tags = set(_UNKNOWN) & set(target.tags)
        if target is aten.index.Tensor and not any(map(_is_mask, node.args[1])):
            tags.discard(torch.Tag.dynamic_output_shape)
        reads = schema(target).is_mutable or bool(tags)
        is_empty = "empty" in target.name()
        return None if reads or is_empty or target.namespace != "aten" else target
    return target if target == STOP_GRADIENT or target in FUNCTIONS.values() else None


_LAYOUT = "memory_format"
_FILLED: Mapping[Any, OpOverload] = {
    aten.empty.memory_format: aten.zeros.default,
    aten.empty_like.default: aten.zeros_like.default,
    aten.new_empty.default: aten.new_zeros.default,
}
"""Operators that leave memory as it is → operators that fill it as a program does (:func:`bridge.aten.shape.empty`)."""


def _is_mask(index: Any) -> bool:
    return isinstance(index, fx.Node) and index.meta["val"].dtype in (torch.bool, torch.uint8)


def _flat(reading: ScalarGuard) -> list:
    return torch.tensor(reading.value, dtype=reading.dtype, device=HOST).reshape(-1).tolist()


_MOST_GUARDED = {str: 1000, np.ndarray: 0}
"""The most numbers that a call compares for a text (torch prints up to 1000 in full), and for an array."""
_WORDS = {
    str: ("the text of a tensor", "too many numbers to compare at each call", "print outside of forward"),
    np.ndarray: (
        "Tensor.numpy",
        "NumPy's results are not in a graph; a compiled call would repeat the sample's numbers for ever",
        "compute it with torch, or outside of forward",
    ),
}


def too_many(reads: Sequence[NumberRead], nodes: Sequence[Any], bound: Mapping[str, int]) -> list[Unsupported]:
    """Refusals of texts and arrays with too many non-constant numbers to compare at each call.

    Args:
        nodes: the numbers' nodes in the functional graph.
        bound: the graph's placeholders of inputs, by name.
    """
    found = []
    for each, node in zip(reads, nodes, strict=True):
        limit = _MOST_GUARDED.get(type(each.given))
        if limit is not None and each.reading.count > limit and isinstance(node, fx.Node):
            if constant(node, bound) is None:
                op, reason, hint = _WORDS[type(each.given)]
                found.append(Unsupported(op, each.reading.where, reason, hint))
    return found


def uncounted(
    read: Sequence[fx.Node | None],
    readings: Sequence[ScalarGuard],
    sizes: Sequence[tuple[int | None, ...]],
    sizes_vary: bool = False,
) -> list[Unsupported]:
    """Refusals of data-dependent sizes that a call cannot compute before its forward."""
    reason = (
        f"the shape of a result {BY_NUMBERS}, and sizes vary"
        if sizes_vary
        else "the shape of a result depends on numbers that forward computes of parameters or draws"
    )
    return [
        shape_by_numbers(reading.where, reason)
        for node, reading, size in zip(read, readings, sizes, strict=True)
        if (size and node is not None)
        or (reading.is_size and (sizes_vary or (node is not None and not reading.is_least)))
    ]


# Certain flags: a uniform draw compared with a number outside of [0, 1) → the constant result of the comparison.
#
# ``torch.rand([]) < self.layerdrop`` with a rate of 0: a program that computes the flag beside its results would make
# the host wait for it. A comparison with a constant is monotone in the draw: it is constant if the least and the
# greatest draw give one flag.


_COMPARISONS = (aten.lt.Scalar, aten.ge.Scalar, aten.le.Scalar, aten.gt.Scalar)
_DRAWS = (aten.rand.default, aten.rand_like.default)
_MOVES = (aten.alias.default, aten.clone.default, aten.detach.default)


def certain(node: fx.Node) -> tuple[bool, list[fx.Node]] | None:
    """A flag's constant value and the nodes that compute it, in order; ``None`` if the flag may vary."""
    nodes = [node]
    while nodes[0].target in (*_MOVES, *_COMPARISONS) and len(nodes[0].all_input_nodes) == 1:
        nodes = [*nodes[0].all_input_nodes, *nodes]
    draw, *others = nodes
    dtype = draw.meta["val"].dtype if draw.target in _DRAWS else None
    if dtype not in (torch.float32, torch.float64) or node.meta["val"].dtype is not torch.bool:  # others round up to 1
        return None
    least, one = (torch.tensor(number, dtype=dtype, device=HOST) for number in (0, 1))
    flags = {_run(others, {draw: each})[node].item() for each in (least, torch.nextafter(one, least))}
    return (flags.pop(), nodes) if len(flags) == 1 else None


# Decisions by draws: a number that depends only on draws (``torch.rand([]) < 0.1``) → whether it varies between calls.


_REDRAWS = 32
"""How often a number is drawn again; one that is equal each time counts as constant."""


def varies(node: fx.Node | None, drawing: Collection[str], literals: Mapping[str, torch.Tensor]) -> bool:
    """Whether a number depends on draws and on no input, and changes when the draws are repeated.

    Args:
        drawing: names of the nodes that draw.
        literals: the graph's placeholders of constants, as in :func:`recomputed`.
    """

    def may_be(each: fx.Node) -> bool:
        if each.op == "placeholder":
            return each.name in literals
        return each.name in drawing or each.target is aten.empty.memory_format or _operator(each) is not None

    nodes = (None if node is None else _behind(node, may_be)) or []
    calls = [each for each in nodes if each.op != "placeholder"]
    if len(calls) > MAX_OPERATIONS or not any(each.name in drawing for each in calls):
        return False
    known = {each: literals[each.name] for each in nodes if each.op == "placeholder"}
    with IsolatedRNG(), torch.no_grad():
        found = [_run(calls, dict(known))[node] for _ in range(_REDRAWS)]
    return not all(torch.equal(each, found[0]) for each in found)


def _run(nodes: Sequence[fx.Node], values: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
    for each in nodes:
        args, kwargs = fx.map_arg((each.args, each.kwargs), values.__getitem__)
        values[each] = args[0] if each.target == STOP_GRADIENT else each.target(*args, **kwargs)
    return values
