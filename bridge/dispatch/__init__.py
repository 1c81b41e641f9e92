"""Dispatch: entries, guards and the autograd Function behind a module's call."""

from bridge.dispatch.api import add_tvm_dispatch, dispatch_at_first_call, remove_tvm_dispatch, stats
from bridge.dispatch.call_steps import STEPS, Backward, CallStep, MakeDraws, Save
from bridge.dispatch.compile_entry import backend_of_call, require_capturable
from bridge.dispatch.dispatcher import MAX_ENTRIES, Dispatcher, DispatchOptions
from bridge.dispatch.entries import NO_ENTRY, DispatchStats, Entries
from bridge.dispatch.entry import MAX_BOUND, Entry, EntryOptions
from bridge.dispatch.executable import Executable
from bridge.dispatch.guards import SAVED, EntryGuard, GuardFailure, interpreter_state, signature_of
from bridge.dispatch.parts import PartStats
from bridge.dispatch.programs import BackwardRun, Constants, Programs, compile_programs

__all__ = ["MAX_BOUND", "MAX_ENTRIES", "NO_ENTRY", "SAVED", "STEPS", "Backward", "BackwardRun", "CallStep"]
__all__ += ["DispatchOptions", "DispatchStats", "Dispatcher", "Entries", "Entry", "EntryGuard", "EntryOptions"]
__all__ += ["Constants", "Executable", "GuardFailure", "MakeDraws", "PartStats", "Programs", "Save"]
__all__ += ["add_tvm_dispatch", "backend_of_call", "compile_programs", "dispatch_at_first_call", "interpreter_state"]
__all__ += ["remove_tvm_dispatch", "require_capturable", "signature_of", "stats"]
