"""Guards of what forward read: recorded reads → conditions, one by one and in one quick check."""

from bridge.guards.conditions import ReadGuard
from bridge.guards.recording import Reads, profiled
from bridge.guards.undo import Undo, recorded_reads, undo

__all__ = ["ReadGuard", "Reads", "Undo", "profiled", "recorded_reads", "undo"]
