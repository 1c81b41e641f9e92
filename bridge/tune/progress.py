"""Progress bar of a tuning: trials → seconds spent and the best so far, where ``tqdm`` is installed."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

from bridge.base.log import channel
from bridge.tune.search import FASTER, Knob, Search, Trial

__all__ = ["Progress"]

_LOG = channel("tune")

_FORM = "{desc} {percentage:3.0f}%|{bar:20}| {n:.0f} of {total:.0f} s{postfix}"


class Progress:
    """A bar over the seconds that trials may take.

    Args:
        name: of the module.
        seconds: that they may take.
        shown: whether there is a bar.
    """

    def __init__(self, name: str, seconds: float, *, shown: bool):
        self._name, self._bar, self._shown_seconds = name, None, 0.0
        self._seconds = seconds
        self._is_shown = shown

    def __enter__(self) -> Progress:
        if self._is_shown:
            self._bar = _bar(total=self._seconds, desc=f"tune {self._name}", bar_format=_FORM)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def told(self, search: Search, knob: Knob, trial: Trial) -> None:
        """Shows a trial."""
        verdict = trial.outcome.verdict
        _LOG.info("%s %s: %s", self._name, knob, verdict)
        if verdict == FASTER:
            _LOG.debug("%s: %r instead of %r", self._name, trial.candidate, trial.incumbent)
        if self._bar is None:
            return
        best = math.prod(search.gains)
        self._bar.set_postfix_str(f"best {best:.3f} of the time, {search.trials} tried, {knob}", refresh=False)
        now = min(search.spent, self._seconds)
        self._bar.update(now - self._shown_seconds)
        self._shown_seconds = now


def _bar(**how: Any) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:  # it comes with the extra ``train``
        return None
    return tqdm(**how)
