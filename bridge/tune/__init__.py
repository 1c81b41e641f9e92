"""Tuning: candidates of choices against measured time → choices that the disk cache keeps for every later process."""

from bridge.tune.search import Outcome, Search, Trial, TuningLog
from bridge.tune.tuning import TuningResult, tune

__all__ = ["Outcome", "Search", "Trial", "TuningLog", "TuningResult", "tune"]
