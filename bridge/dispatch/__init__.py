"""Dispatch: entries, guards and the autograd Function behind a module's call."""

from bridge.dispatch.api import add_tvm_dispatch, dispatch_at_first_call, remove_tvm_dispatch, stats
from bridge.dispatch.bound import MAX_BOUND
from bridge.dispatch.call_steps import CallStep
from bridge.dispatch.compile_entry import backend_of_call, require_capturable
from bridge.dispatch.dispatcher import MAX_ENTRIES
from bridge.dispatch.entries import Entries
from bridge.dispatch.entry import Entry
from bridge.dispatch.guards import interpreter_state
from bridge.dispatch.stats import DispatchStats

__all__ = [
    "MAX_BOUND",
    "MAX_ENTRIES",
    "CallStep",
    "DispatchStats",
    "Entries",
    "Entry",
    "add_tvm_dispatch",
    "backend_of_call",
    "dispatch_at_first_call",
    "interpreter_state",
    "remove_tvm_dispatch",
    "require_capturable",
    "stats",
]
