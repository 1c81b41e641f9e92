"""A stage of the lowering: what was made, by which pass, in how long, and from how much."""

from __future__ import annotations

import html
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autodiff.ir import Function, bindings
from bridge.base.modes import autocast_to
from bridge.lowering.script import script
from bridge.reference import interpret

__all__ = ["Stage", "stage_named"]


@dataclass(frozen=True, eq=False)
class Stage:
    """The IR after one step of the lowering.

    Attributes:
        name: as in ``lowered[name]``.
        made_by: the pass.
        ir: a Relax function in flat form; for the stage ``captured`` the ATen graph.
        seconds: that the pass took; 0 for the second of two functions that one pass makes.
        before: number of nodes that the pass was given, ``None`` for the first stage.
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
        """The Relax function. ``TypeError`` for the traced ATen graph, which is none."""
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
            ValueError: the number, a shape or an element type of the inputs is not the function's.
        """
        with torch.no_grad(), autocast_to(None):  # its casts are operators of the stage
            return interpret(self.function, inputs).results if self.runner is None else self.runner(inputs)

    def __str__(self) -> str:
        return self.script()

    def _repr_html_(self) -> str:
        head, body = html.escape(self.provenance), html.escape(self.script())
        return f"<details><summary>{head}</summary><pre>{body}</pre></details>"


def stage_named(stages: Sequence[Stage], name: str) -> Stage:
    """The stage of that name. ``KeyError`` if there is none, which names those that there are."""
    for stage in stages:
        if stage.name == name:
            return stage
    raise KeyError(f"no stage {name!r}; there are {', '.join(stage.name for stage in stages)}")
