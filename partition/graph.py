"""Dataflow graph: a joint function -> nodes by name, with their readers and their side of the cut.

Sides of a binding::

    forward     some forward output depends on it: the forward always computes it
    adjoint     it depends on a ``grad_out``: only the backward can compute it
    side        neither, but a gradient needs it (``x > 0`` of a ReLU): either half may compute it

Bindings that no result needs are dropped. Everything downstream works on this graph; TVM objects come back in
:mod:`partition.cut`.

Normalization before the cut: bindings -> bindings that read less.
Only bindings that no forward output depends on are rewritten, so the forward stays bit for bit.

* A value read only for its shape (``zeros_like(x)``) is not read at all: shapes are known, so ``x`` need not be saved.
* A tuple that a later call reads as a whole is rebuilt from its items, because only items are ever saved.

Shared permutations: bindings -> bindings in which one permutation of a value serves all readers.
A product reads its operand by rows or by columns, and its gradients read the operand the other way: simplified, each
permutes the same value. Afterwards all read one permutation that keeps the last axis, and transpose it. The backward
can save that permutation (:mod:`partition.heuristics`). No value changes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from tvm import relax
from tvm.relax import op

from autodiff import Body
from autodiff.body import Binding
from autodiff.extents import Dim, sample_of
from autodiff.ir import (
    Call,
    DataflowVar,
    Expr,
    Function,
    TensorType,
    Tuple,
    TupleGetItem,
    TupleType,
    Var,
    dtype,
    library_name,
    op_name,
    permutation,
    shape,
)
from autodiff.ir import nbytes as tensor_bytes
from autodiff.ir import shape as tensor_shape
from autodiff.lazy import cached_property
from autodiff.zapp import LIKE
from partition.ops import RANDOM
from partition.read_again import results_of


def normalize(body: Body, outputs: Iterable[Expr]) -> None:
    """Applies both rewrites in place, except to the bindings that ``outputs`` depend on."""
    forward = ancestors(body, outputs)
    taken = {binding.name for binding in body.bindings}
    tuples = {each for each in body.bindings if isinstance(each.value, Call) and isinstance(each.var.ty, TupleType)}
    rebuilt: dict[Binding, Expr] = {}
    items: dict[tuple[Binding, int], Binding] = {}
    result: list[Binding] = []
    for binding in body.bindings:
        if isinstance(binding.value, TupleGetItem):
            items.setdefault((binding.reads[0], binding.value.index), binding)
        elif binding not in forward:
            if binding.op in _LIKE:
                body.assign(binding, _LIKE[binding.op](binding.value))
            whole = [read for read in binding.reads if read in tuples]
            for read in whole:
                if read not in rebuilt:
                    result.extend(_take_apart(read, items, taken, body))
                    rebuilt[read] = result[-1].var
            if whole:
                body.substitute(binding, rebuilt)
        result.append(binding)
    body.finish(result, {})


def ancestors(body: Body, outputs: Iterable[Expr]) -> set[Binding]:
    """The bindings that ``outputs`` depend on, and parameters."""
    wanted = {body.binding(output) for output in outputs}
    for binding in reversed(body.bindings):
        if binding in wanted:
            wanted.update(binding.reads)
    return wanted


def _take_apart(
    source: Binding, items: dict[tuple[Binding, int], Binding], taken: set[str], body: Body
) -> Iterator[Binding]:
    """Bindings that project the items of a tuple that ``items`` lacks; the last one rebuilds the tuple."""
    fields = []
    for index, part in enumerate(source.var.ty.fields):
        item = items.get((source, index))
        if item is None:
            var = DataflowVar(_fresh(f"{source.name}_{index}", taken), part)
            item = items[source, index] = body.define(var, TupleGetItem(source.var, index))
            yield item
        if isinstance(part, TupleType):
            *inner, item = _take_apart(item, items, taken, body)
            yield from (*inner, item)
        fields.append(item.var)
    yield body.define(DataflowVar(_fresh(f"{source.name}_rebuilt", taken), source.var.ty), Tuple(fields))


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


#: ``…_like`` operator -> the operator that takes the shape and dtype instead of the operand.
_LIKE = {**LIKE, "relax.collapse_sum_like": lambda call: relax.op.collapse_sum_to(call.args[0], shape(call))}


PERMUTATION = "relax.permute_dims"


def permute_once(body: Body, outputs: Iterable[Expr]) -> None:
    """Shares permutations, in place; the forward alone chooses them, so all backwards of one forward agree."""
    forward = ancestors(body, outputs)
    taken = body.names()
    orders: dict[Binding, list[int] | None] = {}
    rows: dict[Binding, Binding] = {}
    replaced: dict[Binding, Expr] = {}
    result: list[Binding] = []
    for binding in body.bindings:
        body.substitute(binding, replaced)
        if binding.op == PERMUTATION:
            (source,), axes = binding.reads, permutation(binding.value)
            if source not in orders:
                orders[source] = _rows_of(source, forward)
            order = orders[source]
            if order is not None and _as_rows(axes) == order:
                if source not in rows:
                    rows[source] = binding if axes == order else _rows(body, source, order, taken)
                    result += [rows[source]] if axes != order else []
                elif axes == order:
                    replaced[binding] = rows[source].var
                    continue
                if axes != order:
                    body.assign(binding, op.permute_dims(rows[source].var, [order.index(axis) for axis in axes]))
        result.append(binding)
    body.finish(result, replaced)


def _rows(body: Body, source: Binding, order: list[int], taken: set[str]) -> Binding:
    """A new binding: the permutation ``order``, which keeps the last axis."""
    value = body.normalize(op.permute_dims(source.var, order))
    return body.define(DataflowVar(_fresh(f"{source.name}_rows", taken), value.ty), value)


def keeps_rows(permuted: Call) -> bool:
    """Whether a permutation keeps the last axis."""
    axes = permutation(permuted)
    return axes == _as_rows(axes)


def _rows_of(source: Binding, forward: Set[Binding]) -> list[int] | None:
    """The one row order in which the forward reads a value; ``None``: there is none, or it is the value's own."""
    readers = [user for user in source.users if user in forward]
    if not readers or any(user.op != PERMUTATION for user in readers):
        return None
    orders = [_as_rows(permutation(user.value)) for user in readers]
    return None if orders[0] == sorted(orders[0]) or any(order != orders[0] for order in orders) else orders[0]


def _as_rows(axes: list[int]) -> list[int]:
    """The permutation with the last axis moved back to the end."""
    last = len(axes) - 1
    return [*(axis for axis in axes if axis != last), last]


@dataclass(frozen=True)
class Node:
    """One parameter or binding of the joint function.

    ``name`` is its variable's name, made unique where the joint repeats one; ``value`` is ``None`` for a parameter;
    ``inputs`` are the names of the nodes it reads, each once, in order; ``module_path`` is its place in the user's
    module, as far as the caller knows it.
    """

    name: str
    var: Var
    value: Expr | None
    inputs: tuple[str, ...]
    module_path: str = ""

    @cached_property
    def is_tensor(self) -> bool:
        """Whether this is one tensor of known shape; only tensors are ever saved."""
        return isinstance(self.var.ty, TensorType) and self.var.ty.shape is not None

    @cached_property
    def shape(self) -> tuple[Dim, ...]:
        """The shape; empty for a value that is not a tensor."""
        return tensor_shape(self.var) if self.is_tensor else ()

    @cached_property
    def size(self) -> Dim:
        """Bytes when stored densely; 0 for a value that is not a tensor."""
        return tensor_bytes(self.var) if self.is_tensor else 0

    @cached_property
    def dtype(self) -> str:
        """The element type as in ``"float32"``; the type's name, as in ``"TupleType"``, for other values."""
        return dtype(self.var) if self.is_tensor else type(self.var.ty).__name__

    @cached_property
    def bytes(self) -> int:
        """:attr:`size` for the sample; costs are computed with it."""
        return sample_of(self.size)

    @cached_property
    def elements(self) -> int:
        """Number of elements, for the sample."""
        return sample_of(math.prod(self.shape))

    @property
    def is_overwritten(self) -> bool:
        """Whether this is the final content of memory that the forward overwrites."""
        return self.op == "library.overwritten"

    @cached_property
    def op(self) -> str:
        """``"relax.matmul"``, ``"library.embedding"``, or the kind of expression: ``"TupleGetItem"``, ``"param"``."""
        if self.value is None:
            return "param"
        return library_name(self.value) or op_name(self.value) or type(self.value).__name__


@dataclass(frozen=True)
class JointGraph:
    """A joint function's live nodes, in joint order.

    ``outputs`` and ``gradients`` hold one entry per result: a node's name, or ``None`` where the result is a constant
    (then ``output_values`` / ``gradient_values`` has it). ``required`` are values independent of every ``grad_out``
    that the adjoint side reads, or that are gradients. ``kept`` are forward values that the backward must not recompute
    (:mod:`partition.read_again`). ``apart`` are indices of outputs that the caller may change before the backward.
    """

    nodes: dict[str, Node]
    primals: tuple[str, ...]
    grad_outs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    gradients: tuple[str | None, ...]
    output_values: tuple[Expr, ...]
    gradient_values: tuple[Expr, ...]
    forward: frozenset[str]
    side: frozenset[str]
    adjoint: frozenset[str]
    required: tuple[str, ...]
    kept: frozenset[str] = frozenset()
    apart: frozenset[int] = frozenset()

    @cached_property
    def users(self) -> dict[str, tuple[str, ...]]:
        """Node name -> the names of its readers, in joint order."""
        found: dict[str, list[str]] = {name: [] for name in self.nodes}
        for node in self.nodes.values():
            for read in node.inputs:
                found[read].append(node.name)
        return {name: tuple(users) for name, users in found.items()}

    @cached_property
    def candidates(self) -> tuple[str, ...]:
        """Every binding that the required values depend on, themselves included, in joint order."""
        wanted = set(self.required)
        for name in reversed(self.nodes):
            if name in wanted:
                wanted.update(self.nodes[name].inputs)
        return tuple(name for name in self.nodes if name in wanted and self.nodes[name].value is not None)

    @cached_property
    def output_index(self) -> dict[str, int]:
        """The forward outputs that are bindings: name to the first result index."""
        return self._first_of(range(len(self.outputs)))

    @cached_property
    def free_outputs(self) -> dict[str, int]:
        """The outputs that the backward can read at no cost, by name: tensors that the caller does not change."""
        found = self._first_of(index for index in range(len(self.outputs)) if index not in self.apart)
        return {name: index for name, index in found.items() if self.nodes[name].is_tensor}

    def _first_of(self, indices: Iterable[int]) -> dict[str, int]:
        found: dict[str, int] = {}
        for index in indices:
            name = self.outputs[index]
            if name is not None and self.nodes[name].value is not None:
                found.setdefault(name, index)
        return found

    @cached_property
    def primal_index(self) -> dict[str, int]:
        """The index of each primal parameter."""
        return {name: index for index, name in enumerate(self.primals)}


def build_graph(
    joint: Function | Body,
    num_primals: int,
    num_outputs: int,
    module_paths: Mapping[str, str] | None = None,
    *,
    as_read: bool = False,
    again: Mapping[int, tuple[bool, bool]] = MappingProxyType({}),
    owners: Mapping[str, str] = MappingProxyType({}),
    apart: Collection[int] = (),
) -> JointGraph:
    """The graph of a joint function in flat form.

    Args:
        joint: a function, or its body, which is edited; parameters are ``num_primals`` primals, then grad_outs;
            results are ``num_outputs`` forward outputs, then gradients.
        module_paths: variable name -> the value's place in the user's module.
        as_read, again, owners, apart: see :func:`partition.partition`.

    Raises:
        ValueError: counts that do not fit, a forward output that depends on a grad_out, or a random draw inside.
    """
    body = joint if isinstance(joint, Body) else Body.of(joint)
    params, returned = body.params, body.outputs
    if not 0 <= num_primals <= len(params):
        raise ValueError(f"num_primals={num_primals}, but the joint function has {len(params)} parameters")
    if not 0 <= num_outputs <= len(returned):
        raise ValueError(f"num_outputs={num_outputs}, but the joint function has {len(returned)} results")
    outputs, gradients = returned[:num_outputs], returned[num_outputs:]
    body.prune()
    normalize(body, outputs)
    if as_read:
        permute_once(body, outputs)
    body.prune()

    names, nodes = _nodes(body, module_paths or {})
    parameters = [names[param] for param in body.parameters()]
    primals, grad_outs = tuple(parameters[:num_primals]), tuple(parameters[num_primals:])
    output_names = tuple(names[body.binding(output)] for output in outputs)
    gradient_names = tuple(names[body.binding(gradient)] for gradient in gradients)
    forward = _ancestors(nodes, output_names)
    read_again = {primals[index]: told for index, told in again.items()}
    read_again |= {name: (True, False) for name in output_names if name is not None and nodes[name].is_overwritten}
    tangled = _tangled(nodes, grad_outs, forward, read_again)
    for index, name in enumerate(output_names):
        if name in tangled:
            raise ValueError(
                f"forward output {index} ({name}) depends on a grad_out; is num_outputs={num_outputs} right?"
            )
    adjoint = _ancestors(nodes, gradient_names) & tangled
    side = _ancestors(nodes, gradient_names) - tangled - forward
    required = {read for name in adjoint for read in nodes[name].inputs if read not in tangled}
    required.update(name for name in gradient_names if name is not None and name not in tangled)
    bound = {name for name, node in nodes.items() if node.value is not None}
    live_names = forward | side | adjoint
    return JointGraph(
        nodes={name: node for name, node in nodes.items() if name in live_names or node.value is None},
        primals=primals,
        grad_outs=grad_outs,
        outputs=output_names,
        gradients=gradient_names,
        output_values=tuple(outputs),
        gradient_values=tuple(gradients),
        forward=frozenset(forward & bound),
        side=frozenset(side & bound),
        adjoint=frozenset(adjoint & bound),
        required=tuple(name for name in nodes if name in required),
        kept=results_of(nodes, forward & bound, output_names, read_again, owners or {}),
        apart=frozenset(apart),
    )


def _nodes(body: Body, paths: Mapping[str, str]) -> tuple[dict[Binding | None, str | None], dict[str, Node]]:
    """The name of each binding, and the nodes by their names, in order."""
    names: dict[Binding | None, str | None] = {None: None}
    nodes: dict[str, Node] = {}
    for binding in [*body.parameters(), *body.bindings]:
        names[binding] = name = _unique(binding.name, nodes)
        inputs = tuple([names[read] for read in binding.reads])
        path = paths.get(binding.name)
        if path is None:  # a new binding: takes the path of its first operand
            path = nodes[inputs[0]].module_path if inputs else ""
        nodes[name] = node = Node(name, binding.var, binding.value, inputs, path)
        if node.op in RANDOM:
            raise ValueError(f"{name} = {node.op} draws random numbers; a partition wants every draw to be a primal")
    return names, nodes


def _tangled(
    nodes: Mapping[str, Node], grad_outs: Collection[str], forward: Collection[str], read_again: Collection[str]
) -> set[str]:
    """Nodes that depend on a grad_out, or that only the backward computes from memory it reads at its own time."""
    tangled = set(grad_outs)
    for node in nodes.values():
        if any(read in tangled or (read in read_again and node.name not in forward) for read in node.inputs):
            tangled.add(node.name)
    return tangled


def _ancestors(nodes: dict[str, Node], roots: Sequence[str | None]) -> set[str]:
    wanted = {root for root in roots if root is not None}
    for name in reversed(nodes):
        if name in wanted:
            wanted.update(nodes[name].inputs)
    return wanted


def _unique(name: str, taken: dict[str, Node]) -> str:
    if name not in taken:
        return name
    count = 1
    while f"{name}_dup{count}" in taken:
        count += 1
    return f"{name}_dup{count}"


@dataclass(frozen=True)
class Choice:
    """The values that a strategy wants saved for the backward.

    ``saved`` maps a node's name to the reason it is saved. Parameters need not be named: they are free, and the walk
    from the gradients reads them where it meets them. A named value that is never read is not saved. ``use_outputs``:
    whether forward outputs are free as well.
    """

    saved: Mapping[str, str] = field(default_factory=dict)
    use_outputs: bool = True
    notes: tuple[str, ...] = ()


class Strategy(Protocol):
    """An object with a ``name`` and a method ``choose``, for :func:`partition.partition`."""

    @property
    def name(self) -> str:
        """The strategy's name in the plan and its table."""

    def choose(self, graph: JointGraph) -> Choice:
        """The values to save. Must depend on the graph alone, so that the same module always gets the same plan."""
