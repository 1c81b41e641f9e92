"""A stage of the lowering: the IR after a pass, with the pass and its time; the difference of two stages.

Provenance: a variable of any stage → the ATen operator, the module and the user's line that it comes from.

Variables of the forward are named after the traced graph's nodes (``gelu``, ``linear_4__2``), parameters after the
module's tensors, masks after their draws, and every node knows its module path and its line. Passes keep the names.
A new variable of a pass (``layer_norm_mean``) belongs to the node that it is computed for. A variable of the backward
(``bw_12``) belongs to the forward operation whose values it uses, otherwise to the origin of its operands;
``grad_<parameter>`` to the parameter's reader.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autodiff import Body
from autodiff.ir import Function, bindings, used_vars
from bridge.aten import Imported, parameter_name
from bridge.base.log import Stopwatch
from bridge.base.modes import autocast_to
from bridge.capture import PATH, WHERE, Captured
from bridge.lowering.text import Foldable, binding_line, script, short_op
from bridge.reference import interpret


@dataclass(frozen=True, eq=False)
class Stage(Foldable):
    """The IR after one step of the lowering.

    Attributes:
        name: as in ``lowered[name]``.
        made_by: the pass.
        ir: a Relax function in flat form; for the stage ``captured`` the ATen graph.
        seconds: time of the pass; 0 for the second of two functions from one pass.
        before: number of nodes in the pass's input, ``None`` for the first stage.
        runner: computes the results of an IR that is no Relax function.
    """

    name: str
    made_by: str
    ir: Function | fx.Graph = field(repr=False)
    seconds: float
    before: int | None = None
    runner: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = field(default=None, repr=False)

    @property
    def function(self) -> Function:
        """The Relax function. ``TypeError`` for the traced ATen graph."""
        if isinstance(self.ir, fx.Graph):
            raise TypeError(f"the stage {self.name!r} is an ATen graph, not a Relax function; it is in .ir")
        return self.ir

    @property
    def size(self) -> int:
        """Number of nodes: bindings, or calls of the traced graph."""
        if isinstance(self.ir, fx.Graph):
            return sum(node.op == "call_function" and node.target is not operator.getitem for node in self.ir.nodes)
        return sum(1 for _ in bindings(self.ir))

    @property
    def provenance(self) -> str:
        """One line: the pass, milliseconds, node count before -> after."""
        nodes = f"{self.size} nodes" if self.before is None else f"{self.before} -> {self.size} nodes"
        return f"{self.name}: {self.made_by}, {1e3 * self.seconds:.1f} ms, {nodes}"

    def script(self) -> str:
        """The IR as text (TVMScript; Python for the traced graph) under a provenance line."""
        text = self.ir.python_code("self").src.strip() if isinstance(self.ir, fx.Graph) else script(self.ir)
        return f"# {self.provenance}\n{text}"

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the stage on its own, operator by operator, with torch (:mod:`bridge.reference.relax`).

        Args:
            inputs: one tensor per parameter, as :meth:`bridge.Lowered.inputs` makes them.

        Returns:
            the function's results, in order.

        Raises:
            ValueError: the inputs' number, a shape or an element type does not fit the function.
        """
        with torch.no_grad(), autocast_to(None):  # its casts are operators of the stage
            return interpret(self.function, inputs).results if self.runner is None else self.runner(inputs)

    def __str__(self) -> str:
        return self.script()


def stage_after(
    last: Stage, name: str, made_by: str, body: Body, transform: Callable[..., object], *args: object
) -> Stage:
    """The stage of a pass on ``body``, which holds the function of the ``last`` stage; unchanged: the same function."""
    function, watch, edits = last.function, Stopwatch(), body.edits
    transform(body, *args)
    result = function if body.edits == edits else body.function()
    return Stage(name, made_by, result, watch.seconds, last.size)


class Staged:
    """A lowering with stages in order, which are indexed by name (``KeyError`` lists all names)."""

    stages: Sequence[Stage]

    def __getitem__(self, name: str) -> Stage:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(f"no stage {name!r}; there are {', '.join(stage.name for stage in self.stages)}")

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)


#: Changed lines that ``str`` shows; ``.lines`` has them all.
SHOWN = 40


@dataclass(frozen=True)
class Diff(Foldable):
    """The difference between two stages; ``print`` it.

    Attributes:
        head: both provenance lines.
        operators: operator whose count differs → its counts before and after.
        lines: the bindings, as in a unified diff without context: ``"- name: type = op(...)"`` and ``"+ ..."``.
        same: number of bindings in both.
    """

    head: tuple[str, str]
    operators: dict[str, tuple[int, int]]
    lines: tuple[str, ...]
    same: int

    @property
    def removed(self) -> tuple[str, ...]:
        return tuple(line[2:] for line in self.lines if line.startswith("-"))

    @property
    def added(self) -> tuple[str, ...]:
        return tuple(line[2:] for line in self.lines if line.startswith("+"))

    def text(self, lines: int | None = None) -> str:
        """The difference with at most ``lines`` changed bindings (all of them unless given)."""
        shown = self.lines if lines is None else self.lines[:lines]
        out = [f"--- {self.head[0]}", f"+++ {self.head[1]}", ""]
        width = max((len(name) for name in self.operators), default=0)
        out += [f"{name:<{width}}  {old:>4} -> {new:<4} {new - old:+d}" for name, (old, new) in self.operators.items()]
        out += [""] if self.operators else []
        out.append(f"{self.same} bindings the same, {len(self.removed)} removed, {len(self.added)} added")
        out += shown
        if len(shown) < len(self.lines):
            out.append(f"... {len(self.lines) - len(shown)} more: .text() has them all")
        return "\n".join(out)

    def __str__(self) -> str:
        return self.text(SHOWN)


def diff(before: Stage, after: Stage) -> Diff:
    """Compares two stages. Bindings with equal name, type and right-hand side are the same, in any order."""
    old, new = _lines(before), _lines(after)
    counts = [Counter(_operators(stage)) for stage in (before, after)]
    names = sorted(set(counts[0]) | set(counts[1]), key=lambda name: (counts[0][name] - counts[1][name], name))
    operators = {name: (counts[0][name], counts[1][name]) for name in names if counts[0][name] != counts[1][name]}
    changes = _changes(old, new)
    removed = sum(line.startswith("-") for line in changes)
    return Diff((before.provenance, after.provenance), operators, tuple(changes), len(old) - removed)


def _changes(old: list[str], new: list[str]) -> list[str]:
    """Lines of one side only, each near its neighbours of the other side."""
    in_old, in_new = set(old), set(new)
    changes: list[str] = []
    for tag, a0, a1, b0, b1 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            changes += [f"- {line}" for line in old[a0:a1] if line not in in_new]
            changes += [f"+ {line}" for line in new[b0:b1] if line not in in_old]
    return changes


def _lines(stage: Stage) -> list[str]:
    if isinstance(stage.ir, fx.Graph):
        return [node.format_node() for node in _calls(stage.ir)]
    return [binding_line(var, value) for var, value in bindings(stage.ir)]


def _operators(stage: Stage) -> list[str]:
    if isinstance(stage.ir, fx.Graph):
        return [str(node.target).removeprefix("aten.").split(".")[0] for node in _calls(stage.ir)]
    return [short_op(value) for _, value in bindings(stage.ir)]


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]


_GRADIENT = "grad_"
_MASK = re.compile(r"mask_\d+")


@dataclass(frozen=True)
class Origin:
    """The origin of a value; each field is empty if it is unknown.

    Attributes:
        aten: the operator, as in ``aten.gelu.default``.
        module: the dotted path in the lowered module.
        line: the user's line, ``file:line: code``.
        node: the traced graph's node.
    """

    aten: str = ""
    module: str = ""
    line: str = ""
    node: str = ""

    def __str__(self) -> str:
        return "  ".join(part for part in (self.module, self.aten, self.line) if part)


def origins(captured: Captured, imported: Imported, functions: Iterable[Function]) -> dict[str, Origin]:
    """The origin of every named value of these functions, as far as it is known.

    ``functions``: in the order of the lowering, forwards before the joint function.
    """
    known, rank = _named(captured, imported)
    for function in functions:
        body = [(var.name, [used.name for used in used_vars(value)]) for var, value in bindings(function)]
        unknown = {name for name, _ in body if name not in known}
        backward = {name for name in unknown if name.startswith((_GRADIENT, "bw"))}
        if unknown - backward:
            _forward(body, unknown - backward, known, rank)
        _backward([(name, sources) for name, sources in body if name in backward], known, rank)
    return known


def _named(captured: Captured, imported: Imported) -> tuple[dict[str, Origin], dict[str, int]]:
    """The origins of nodes, parameters and masks, and the graph position of the node that each belongs to."""
    known: dict[str, Origin] = {}
    rank: dict[str, int] = {}

    def add(name: str, node: fx.Node, position: int) -> None:
        known.setdefault(name, Origin(str(node.target), node.meta.get(PATH, ""), node.meta.get(WHERE, ""), node.name))
        rank.setdefault(name, position)

    position_of = {node: position for position, node in enumerate(captured.graph.nodes)}
    names = [parameter_name(spec.name) for spec in captured.module_tensors]
    for node, position in position_of.items():
        if node.op == "call_function":
            add(node.name, node, position)
        reader = next((user for user in node.users if user.op == "call_function"), None)
        if node.op == "placeholder" and reader is not None and node.name in captured.names.placeholders:
            index = captured.names.placeholders[node.name]
            add(names[index] if index < len(names) else node.name, reader, position_of[reader])
    drawn = {index: name for name, index in captured.names.draws.items()}
    nodes = {node.name: node for node in position_of}
    inputs = {f"mask_{k}": draw for k, draw in enumerate(imported.dropout_draws)}
    inputs.update((f"draw_{draw}", draw) for draw in imported.input_draws)
    for name, draw in inputs.items():
        if draw in drawn:
            node = nodes[drawn[draw]]
            add(name, node, position_of[node])
    return known, rank


def _forward(
    body: list[tuple[str, list[str]]], unknown: set[str], known: dict[str, Origin], rank: dict[str, int]
) -> None:
    """Adds forward origins: ``linear__2`` belongs to node ``linear``, any other new value to its readers' origin."""
    for name in unknown:
        mask = _MASK.match(name)
        owner = name.split("__")[0] if name.split("__")[0] in rank else mask.group() if mask else ""
        if owner in known and owner in rank:
            known[name], rank[name] = known[owner], rank[owner]
    for name, sources in reversed(body):
        if name in known:
            for source in sources:
                if source in unknown and source not in known:
                    known[source] = known[name]
                    if name in rank:  # otherwise the reader is a value of the backward, without a place in the graph
                        rank[source] = rank[name]


def _backward(body: list[tuple[str, list[str]]], known: dict[str, Origin], rank: dict[str, int]) -> None:
    depth: dict[str, int] = {}  # like rank, for values of the backward
    for name, sources in body:
        direct = [source for source in sources if source in rank]
        derived = [source for source in sources if source in depth]
        if direct:  # of several forward values, the latest belongs to the gradient rule
            owner = max(direct, key=rank.__getitem__)
            depth[name] = rank[owner]
        elif derived:  # the backward runs in reverse order, so the earliest operand is the current position
            owner = min(derived, key=depth.__getitem__)
            depth[name] = depth[owner]
        else:
            owner = ""
        parameter = name[len(_GRADIENT) :] if name.startswith(_GRADIENT) else ""
        if parameter in known:
            owner = parameter
        if owner in known:
            known[name] = known[owner]
