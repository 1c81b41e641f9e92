"""Diff of two stages → operator counts, and the bindings that were added, removed or changed."""

from __future__ import annotations

import difflib
import html
import operator
from collections import Counter
from dataclasses import dataclass

from torch import fx

from autodiff.ir import bindings
from bridge.lowering.stage import Stage
from bridge.lowering.text import binding_line, html_table, short_op

__all__ = ["Diff", "diff"]

#: Changed lines that ``str`` shows; ``.lines`` has them all.
SHOWN = 40


@dataclass(frozen=True)
class Diff:
    """The difference between two stages; ``print`` it.

    Attributes:
        head: both provenance lines.
        operators: for each operator whose count differs, how often it occurs before and after.
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

    def _repr_html_(self) -> str:
        rows = [(name, str(old), str(new), f"{new - old:+d}") for name, (old, new) in self.operators.items()]
        colour = {"-": "#b00", "+": "#070"}
        body = "\n".join(f'<span style="color:{colour[line[0]]}">{html.escape(line)}</span>' for line in self.lines)
        summary = f"{self.same} bindings the same, {len(self.removed)} removed, {len(self.added)} added"
        return (
            f"<div>{html.escape(self.head[0])}<br>{html.escape(self.head[1])}</div>"
            f"{html_table(('operator', 'before', 'after', ''), rows, right=(1, 2, 3))}"
            f"<details><summary>{summary}</summary><pre>{body}</pre></details>"
        )


def diff(before: Stage, after: Stage) -> Diff:
    """Compares two stages. A binding is the same if name, type and right-hand side are, wherever it stands."""
    old, new = _lines(before), _lines(after)
    counts = [Counter(_operators(stage)) for stage in (before, after)]
    names = sorted(set(counts[0]) | set(counts[1]), key=lambda name: (counts[0][name] - counts[1][name], name))
    operators = {name: (counts[0][name], counts[1][name]) for name in names if counts[0][name] != counts[1][name]}
    changes = _changes(old, new)
    removed = sum(line.startswith("-") for line in changes)
    return Diff((before.provenance, after.provenance), operators, tuple(changes), len(old) - removed)


def _changes(old: list[str], new: list[str]) -> list[str]:
    """Lines that only one side has, each near its neighbours of the other side."""
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
