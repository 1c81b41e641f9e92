"""Guards of forward's reads: recorded reads → conditions, checked together (quick path) or one by one (reasons)."""

from bridge.guards.changes import read_later
from bridge.guards.conditions import ReadGuard
from bridge.guards.functions import audited, rebound_count, tables
from bridge.guards.kinds import contents_of, put_back
from bridge.guards.machinery import in_its_place, reads_as_forward
from bridge.guards.modules import ATTRIBUTE, TRAINING, ModulePlace, walks
from bridge.guards.objects import is_changeable
from bridge.guards.recording import Reads, profiled
from bridge.guards.tensor_reads import ADDRESSES, TensorReads, told_otherwise
from bridge.guards.undo import Settling, Snapshot, Undo, needs_first_call, recorded_reads, undo
from bridge.guards.watched import ABSENT, ClosureCell, Contents, Name, Place, Slot, alike, slot_of

__all__ = ["ABSENT", "ADDRESSES", "ATTRIBUTE", "TRAINING", "ClosureCell", "Contents", "ModulePlace", "Name", "Place"]
__all__ += ["ReadGuard", "Reads", "Settling", "Slot", "Snapshot", "TensorReads", "Undo", "alike", "audited"]
__all__ += ["contents_of", "in_its_place", "is_changeable", "needs_first_call", "profiled", "put_back", "read_later"]
__all__ += ["reads_as_forward", "rebound_count", "recorded_reads", "slot_of", "tables", "told_otherwise", "undo"]
__all__ += ["walks"]
