"""The plan: a graph and a choice -> the saved tensors with reasons and bytes, and the recomputed bindings.

Backward reads: a graph and a strategy's choice -> the values that the backward reads, and the values it computes.

Graph colouring: a graph -> the strategies ``save_all`` and ``recompute_all``, and a colour per node.
Forward bindings are red. Bindings that the gradient reads turn blue and are saved. Parameters and forward outputs are
green: they are free. Constants are duplicated; a view is saved as its base, a tuple as its items, a mask cast to a
wider type as the mask.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import tvm
import tvm_ffi

from autodiff.extents import Dim, Extent, is_symbol, symbols_alive
from autodiff.ir import Expr, Var, itemsize, substitute, used_vars
from partition.cost import Cost, flops, is_item, is_slice, is_view, moved_bytes, save_cost
from partition.graph import Choice, JointGraph


@dataclass(frozen=True)
class BackwardReads:
    """The values that the backward reads and the values that it computes itself.

    It reads ``primals``, ``outputs`` and ``saved_tensors``. ``computed`` are bindings of the backward that do not
    depend on a grad_out; ``extra`` are side bindings that the forward computes only for a saved tensor. All in joint
    order.
    """

    primals: tuple[str, ...]
    outputs: tuple[str, ...]
    saved_tensors: tuple[str, ...]
    computed: tuple[str, ...]
    extra: tuple[str, ...]


def backward_reads(graph: JointGraph, choice: Choice) -> BackwardReads:
    """Walks from the values that the backward requires to saved values, parameters and constants."""
    free = graph.free_outputs
    if not choice.use_outputs:
        free = {name: index for name, index in free.items() if graph.nodes[name].is_overwritten}
    seen: set[str] = set()
    read: set[str] = set()
    stack = list(graph.required)
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        if graph.nodes[name].value is None or name in free or name in choice.saved:
            read.add(name)
        else:
            stack.extend(graph.nodes[name].inputs)
    saved_tensors = tuple(
        name for name in graph.nodes if name in read and name not in free and graph.nodes[name].value is not None
    )
    return BackwardReads(
        primals=tuple(name for name in graph.primals if name in read),
        outputs=tuple(name for name in free if name in read),
        saved_tensors=saved_tensors,
        computed=tuple(name for name in graph.nodes if name in seen and name not in read),
        extra=_side_work(graph, saved_tensors),
    )


def _side_work(graph: JointGraph, saved_tensors: tuple[str, ...]) -> tuple[str, ...]:
    wanted = {name for name in saved_tensors if name not in graph.forward}
    for name in reversed(graph.nodes):
        if name in wanted:
            wanted.update(read for read in graph.nodes[name].inputs if read in graph.side)
    return tuple(name for name in graph.nodes if name in wanted)


def fingerprints(graph: JointGraph) -> dict[str, int]:
    """Value -> a hash of its computation, equal in all joint functions of one forward; primals count by position."""
    found: dict[str, int] = {
        name: hash((index, tvm_ffi.structural_hash(graph.nodes[name].var.ty)))
        for index, name in enumerate(graph.primals)
    }
    for name, node in graph.nodes.items():
        if name in graph.forward or name in graph.side:
            found[name] = hash((_hash(node.value), *(found[read] for read in node.inputs)))
    return found


def _hash(value: Expr) -> int:
    """A hash of an expression, independent of variable names and of which variables are results."""
    plain = {var: Var("x", var.ty) for var in used_vars(value)}
    found = tvm_ffi.structural_hash(substitute(value, plain), map_free_vars=True)
    names = _symbols(value) if symbols_alive() else []
    return hash((found, *names)) if names else found


def _symbols(value: Expr) -> list[str]:
    """The names of the symbols in an expression, in order; its structural hash ignores them."""
    names: list[str] = []
    tvm.relax.analysis.post_order_visit(
        value, lambda part: names.append(part.name) if isinstance(part, Var) and is_symbol(part) else None
    )
    return names


#: Prefix of the names of primals that are random draws.
_MASK_PREFIX = "mask_"


@dataclass(frozen=True)
class Saved:
    """One value that the backward reads.

    ``kind`` is ``"intermediate"`` (an additional result of the forward), ``"output"`` (a regular result), or for inputs
    ``"primal"`` and ``"mask"`` (a dropout mask). ``reason`` is a sentence; ``op`` is the operator of the value;
    ``module_path`` is its place in the user's module, as far as the caller knows it. ``bytes`` are the sample's where
    an extent is symbolic.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: str
    bytes: int
    reason: str
    kind: str
    op: str = ""
    module_path: str = ""

    @property
    def size(self) -> Dim:
        """Bytes, for all sizes."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True)
class Plan:
    """The values that the backward reads from the forward, and the values it recomputes.

    One plan holds for all sizes; numbers of bytes and flops are the sample's, and where an extent is symbolic the table
    gives the saved bytes as a formula as well.

    Args:
        strategy: name of the strategy.
        saved_primals: indices of the primal parameters that the backward reads.
        saved_outputs: indices of the forward outputs that it reads.
        saved_tensors: the additional results of the forward, in their order.
        free: the primals and outputs above, described like the saved tensors; they are not copied.
        recomputed: the forward's bindings that the backward recomputes.
        cost: the cost of their recomputation.
        save_all_bytes: bytes saved under ``save_all``, for comparison.
        inputs_only: the cost of recomputing everything from the inputs, without any saved tensor.
        notes: requests that could not be met, in sentences.
        fingerprints: a hash of the computation behind each saved value, for :func:`partition.rebuild_backward`.
        as_read: whether tensors are saved in the layout of their readers.
    """

    strategy: str
    saved_primals: tuple[int, ...]
    saved_outputs: tuple[int, ...]
    saved_tensors: tuple[Saved, ...]
    free: tuple[Saved, ...]
    recomputed: tuple[str, ...]
    cost: Cost
    save_all_bytes: int
    inputs_only: Cost
    notes: tuple[str, ...]
    fingerprints: Mapping[str, int] = field(repr=False, hash=False)
    as_read: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the saved tensors, which only the backward keeps alive."""
        return sum(saved.bytes for saved in self.saved_tensors)

    @property
    def size(self) -> Dim:
        """Bytes of the saved tensors, as an extent."""
        return sum(saved.size for saved in self.saved_tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes of all values that the backward reads from the forward, free ones included."""
        return self.bytes + sum(saved.bytes for saved in self.free)

    @property
    def by_size(self) -> list[Saved]:
        """The saved tensors, the largest first, then the free values."""
        return [*sorted(self.saved_tensors, key=lambda saved: -saved.bytes), *self.free]

    def table(self) -> str:
        """The plan as text: a row per saved value, largest saved tensor first, then totals and notes."""
        rows = [("value", "module", "shape", "dtype", "bytes", "kind", "why")]
        for saved in self.by_size:
            shape = "x".join(map(str, saved.shape)) or "scalar"
            named = saved.name, saved.module_path, shape, saved.dtype
            rows.append((*named, bytes_text(saved), saved.kind, saved.reason))
        if not any(row[1] for row in rows[1:]):
            rows = [row[:1] + row[2:] for row in rows]
        return "\n".join([*columns(rows, right=[len(rows[0]) - 3]), "", self.summary()])

    def summary(self) -> str:
        """Totals saved and recomputed, compared with the extremes, and the notes: a few lines."""
        share = f", {self.bytes / self.save_all_bytes:.2f} of save_all" if self.save_all_bytes else ""
        lines = [
            f"{self.strategy}: {len(self.saved_tensors)} saved tensors, {bytes_text(self)} bytes{share}; "
            f"{self.total_bytes:,} bytes with what is free",
            f"recomputed: {len(self.recomputed)} bindings, {self.cost.flops:,} flops, {self.cost.bytes:,} bytes moved",
            f"extremes: save_all {self.save_all_bytes:,} bytes, nothing recomputed; inputs only 0 bytes, "
            f"{self.inputs_only.flops:,} flops recomputed",
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def __str__(self) -> str:
        return self.table()


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """A line per row, its cells aligned in columns, ``right`` ones to the right; the last column is not padded."""
    widths = [*(max(map(len, cells)) for cells in list(zip(*rows, strict=True))[:-1]), 0]
    return [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def bytes_text(held: Saved | Plan) -> str:
    """``"1,024"``, with the formula where an extent is symbolic: ``"1,024 = 4*n*m"``."""
    formula = f" = {held.size}" if isinstance(held.size, Extent) else ""
    return f"{held.bytes:,}{formula}"


def make_plan(
    graph: JointGraph, strategy: str, choice: Choice, *, save_all: Choice, as_read: bool = False
) -> tuple[Plan, BackwardReads]:
    """The plan of a choice, and the backward reads that it describes.

    ``ValueError`` if the choice saves a value that does not exist, is no tensor, or depends on a grad_out.
    """
    for name in choice.saved:
        if name not in graph.forward and name not in graph.side:
            raise ValueError(f"{strategy} saves {name}, which is no binding that the forward could compute")
        if not graph.nodes[name].is_tensor:
            raise ValueError(f"{strategy} saves {name}, a {graph.nodes[name].dtype}; only tensors can be saved")
    reads = backward_reads(graph, choice)
    known = fingerprints(graph)

    def saved(name: str, kind: str, reason: str) -> Saved:
        node = graph.nodes[name]
        return Saved(name, node.shape, node.dtype, node.bytes, reason, kind, node.op, node.module_path)

    free = [
        saved(name, "mask", "free: a mask, drawn before the forward and never drawn twice")
        if name.startswith(_MASK_PREFIX)
        else saved(name, "primal", "free: a parameter of the forward")
        for name in reads.primals
    ]
    free += [saved(name, "output", "free: the forward returns it anyway") for name in reads.outputs]
    recomputed = _recomputed(graph, reads)
    plan = Plan(
        strategy=strategy,
        saved_primals=tuple(graph.primal_index[name] for name in reads.primals),
        saved_outputs=tuple(graph.free_outputs[name] for name in reads.outputs),
        saved_tensors=tuple(saved(name, "intermediate", choice.saved[name]) for name in reads.saved_tensors),
        free=tuple(free),
        recomputed=tuple(recomputed),
        cost=_cost(graph, recomputed),
        save_all_bytes=sum(graph.nodes[name].bytes for name in backward_reads(graph, save_all).saved_tensors),
        inputs_only=_cost(graph, _recomputed(graph, backward_reads(graph, Choice(use_outputs=False)))),
        notes=choice.notes,
        fingerprints={name: known[name] for name in (*reads.primals, *reads.outputs, *reads.saved_tensors)},
        as_read=as_read,
    )
    return plan, reads


def _recomputed(graph: JointGraph, reads: BackwardReads) -> list[str]:
    """The forward's bindings that the backward computes again."""
    return [name for name in reads.computed if name in graph.forward or name in reads.extra]


def _cost(graph: JointGraph, names: list[str]) -> Cost:
    work = [name for name in names if not is_view(graph.nodes[name])]
    return Cost(flops=sum(flops(graph, name) for name in work), bytes=sum(moved_bytes(graph, name) for name in work))


class SaveAll:
    """Saves every forward value that the gradient reads. Only views and widened masks are computed twice."""

    name = "save_all"

    def choose(self, graph: JointGraph) -> Choice:
        """Every savable forward value; the walk from the gradients reads only the first ones on each path."""
        saved = {}
        for name in graph.candidates:
            if _is_red(graph, name) and not is_slice(graph, graph.nodes[name]) and save_cost(graph, name) is not None:
                saved[name] = f"needed by {reader(graph, name)}"
        return Choice(saved)


class RecomputeAll:
    """Saves nothing: the backward recomputes everything from the inputs and parameters."""

    name = "recompute_all"

    def choose(self, graph: JointGraph) -> Choice:
        """No value, not even the outputs that the forward returns anyway."""
        return Choice(use_outputs=False)


def coloring(graph: JointGraph) -> dict[str, str]:
    """Node -> its colour under ``save_all``, for pictures and explanations.

    ``"red"``: forward. ``"blue"``: forward, and saved. ``"green"``: parameters and outputs that the backward reads for
    free. ``"white"``: other parameters. ``"black"``: backward.
    """
    reads = backward_reads(graph, SaveAll().choose(graph))
    colors = {}
    for name, node in graph.nodes.items():
        if name in reads.primals or name in reads.outputs:
            colors[name] = "green"
        elif node.value is None:
            colors[name] = "white"
        elif name in reads.saved_tensors:
            colors[name] = "blue"
        else:
            colors[name] = "red" if name in graph.forward else "black"
    return colors


def reader(graph: JointGraph, name: str) -> str:
    """The first binding outside the forward that reads a value, directly or through views, as in "sum of db1"."""
    queue = [name]
    for read in queue:
        for user in graph.users[read]:
            node = graph.nodes[user]
            if user not in graph.forward and not is_view(node):
                return f"{node.op.removeprefix('relax.')} of {user}"
            queue.append(user)
    return "a gradient that is this very value"


def _is_red(graph: JointGraph, name: str) -> bool:
    """Whether the forward computes a value, or the tuple that it is an item of."""
    node = graph.nodes[name]
    return name in graph.forward or (is_item(graph, node) and node.inputs[0] in graph.forward)
