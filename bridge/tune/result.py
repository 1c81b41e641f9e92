"""Result of a tuning, as plain data that prints as text."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.compile import Choices

__all__ = ["TuningResult"]


@dataclass(frozen=True)
class TuningResult:
    """What :func:`bridge.tune.tuning.tune` has found.

    Attributes:
        module_name: class of the module.
        choices: those that later processes use; none where nothing was clearly faster.
        words: the choices, a line each.
        before, after: seconds of a step with what was in use before and with the choices, by turns; equal where nothing
            was raced in the end.
        trials: candidates that were tried, of earlier processes, too.
        seconds: that they took.
        kept: whether the disk cache has new choices.
        why: what became of the best candidates.
        log: the name of the log; empty if there is none.
    """

    module_name: str
    choices: Choices
    words: tuple[str, ...]
    before: float
    after: float
    trials: int
    seconds: float
    kept: bool
    why: str
    log: str = ""

    def __str__(self) -> str:
        head = f"{self.module_name}: {self.trials} candidates in {self.seconds:.0f} s; {self.why}"
        return "\n".join([head, *(f"  {each}" for each in self.words)])
