"""Tuning: candidates of choices against measured time → choices that the disk cache keeps for every later process."""

from bridge.tune.search import Outcome, Race, Search, Trial, TuningLog, is_faster
from bridge.tune.tuning import TuningResult, tune

__all__ = ["Outcome", "Race", "Search", "Trial", "TuningLog", "TuningResult", "is_faster", "tune"]
