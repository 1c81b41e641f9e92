"""Guards of what forward read: recorded reads → conditions, one by one and in one quick check."""

from bridge.guards.conditions import ReadGuard
from bridge.guards.recording import Reads

__all__ = ["ReadGuard", "Reads"]
