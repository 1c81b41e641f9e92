"""Guards: a call → whether an entry serves it, or the first condition that fails.

Each condition is stated once (reader, expected value, equivalent values, message); the fast check and the thorough one
are both generated from it. :mod:`.interpreter`, :mod:`.arguments`, :mod:`.tensors` and :mod:`.module` define the
conditions, :mod:`.guard` their order.
"""

from bridge.base.errors import GuardFailure
from bridge.dispatch.guards.arguments import SAVED, signature_of
from bridge.dispatch.guards.guard import EntryGuard
from bridge.dispatch.guards.interpreter import active_modes, interpreter_state
from bridge.dispatch.guards.sizes import ArgumentSizes, Sizes, argument_sizes
from bridge.dispatch.guards.tensors import uncounted_statistics

__all__ = ["SAVED", "ArgumentSizes", "EntryGuard", "GuardFailure", "Sizes", "active_modes", "argument_sizes"]
__all__ += ["interpreter_state", "signature_of", "uncounted_statistics"]
