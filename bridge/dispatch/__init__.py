"""Dispatch: entries, guards and the autograd Function behind a module's call."""

from bridge.dispatch.api import add_tvm_dispatch, dispatch_at_first_call, remove_tvm_dispatch, stats
from bridge.dispatch.call_steps import STEPS, Backward, CallStep, MakeDraws, Save
from bridge.dispatch.compile_entry import (
    Tuned,
    backend_of_call,
    before_compiling,
    keep_tuned,
    require_capturable,
    tuned_of,
    tuning_key,
    with_choices,
)
from bridge.dispatch.compile_entry import compile_entry as entry_of_call
from bridge.dispatch.dispatcher import MAX_ENTRIES, Dispatcher, DispatchOptions
from bridge.dispatch.entries import NO_ENTRY, DispatchStats, Entries
from bridge.dispatch.entry import MAX_BOUND, Entry, EntryOptions
from bridge.dispatch.executable import Executable
from bridge.dispatch.guards import SAVED, EntryGuard, GuardFailure, interpreter_state, signature_of
from bridge.dispatch.parts import PartStats
from bridge.dispatch.profitability import TimedStep, unnoticed
from bridge.dispatch.programs import BackwardRun, FrozenPrograms, Programs, compile_programs

__all__ = ["MAX_BOUND", "MAX_ENTRIES", "NO_ENTRY", "SAVED", "STEPS", "Backward", "BackwardRun", "CallStep"]
__all__ += ["DispatchOptions", "DispatchStats", "Dispatcher", "Entries", "Entry", "EntryGuard", "EntryOptions"]
__all__ += ["Executable", "FrozenPrograms", "GuardFailure", "MakeDraws", "PartStats", "Programs", "Save", "TimedStep"]
__all__ += ["Tuned", "add_tvm_dispatch", "backend_of_call", "before_compiling", "compile_programs"]
__all__ += ["dispatch_at_first_call", "entry_of_call", "interpreter_state", "keep_tuned", "remove_tvm_dispatch"]
__all__ += ["require_capturable", "signature_of", "stats", "tuned_of", "tuning_key", "unnoticed", "with_choices"]
