"""Dispatch: entries, guards and the autograd Function behind a module's call."""

from bridge.dispatch.api import add_tvm_dispatch, remove_tvm_dispatch, stats
from bridge.dispatch.call_steps import STEPS, Backward, CallStep, MakeDraws, Save
from bridge.dispatch.dispatcher import MAX_ENTRIES, Dispatcher, DispatchOptions
from bridge.dispatch.entries import NO_ENTRY, DispatchStats
from bridge.dispatch.entry import Entry, EntryOptions
from bridge.dispatch.executable import Executable
from bridge.dispatch.guards import SAVED, EntryGuard, GuardFailure, signature_of
from bridge.dispatch.options import dispatcher_of
from bridge.dispatch.parts import PartStats
from bridge.dispatch.programs import BackwardRun, Constants, Programs

__all__ = ["MAX_ENTRIES", "NO_ENTRY", "SAVED", "STEPS", "Backward", "BackwardRun", "CallStep", "Constants"]
__all__ += ["DispatchOptions", "DispatchStats", "Dispatcher", "Entry", "EntryGuard", "EntryOptions", "Executable"]
__all__ += ["GuardFailure", "MakeDraws", "PartStats", "Programs", "Save", "add_tvm_dispatch", "dispatcher_of"]
__all__ += ["remove_tvm_dispatch", "signature_of", "stats"]
