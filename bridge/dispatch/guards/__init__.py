"""Guards: a call → whether an entry was compiled for it, and the first condition that it does not meet.

Each condition is stated once (what is read, what is expected, which values mean the same, the words for a failure);
the quick path and the thorough one are both made of it. The conditions lie in :mod:`.interpreter`, :mod:`.arguments`,
:mod:`.tensors` and :mod:`.module`; :mod:`.guard` puts them in order.
"""

from bridge.base.errors import GuardFailure
from bridge.dispatch.guards.arguments import SAVED, signature_of
from bridge.dispatch.guards.guard import EntryGuard
from bridge.dispatch.guards.interpreter import active_modes, interpreter_state
from bridge.dispatch.guards.sizes import ArgumentSizes, Sizes, argument_sizes
from bridge.dispatch.guards.tensors import uncounted_statistics

__all__ = ["SAVED", "ArgumentSizes", "EntryGuard", "GuardFailure", "Sizes", "active_modes", "argument_sizes"]
__all__ += ["interpreter_state", "signature_of", "uncounted_statistics"]
