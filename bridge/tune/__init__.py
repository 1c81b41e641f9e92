"""Tuning: candidates of choices against measured time → choices that the disk cache keeps for every later process."""

from bridge.tune.log import TuningLog
from bridge.tune.race import Race, is_faster
from bridge.tune.result import TuningResult
from bridge.tune.search import Outcome, Search, Trial
from bridge.tune.tuning import tune

__all__ = ["Outcome", "Race", "Search", "Trial", "TuningLog", "TuningResult", "is_faster", "tune"]
