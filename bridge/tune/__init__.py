"""Autotuning: a module's call → the fastest measured choices, which the disk cache keeps for later processes."""

from bridge.tune.search import Outcome, Search, Trial, TuningLog
from bridge.tune.tuning import TuningResult, tune

__all__ = ["Outcome", "Search", "Trial", "TuningLog", "TuningResult", "tune"]
