"""Guard failure: which condition of an entry a call does not meet, in words for the user."""

from __future__ import annotations

__all__ = ["ARGUMENTS", "INTERPRETER", "MODULE", "RUN", "STRUCTURE", "GuardFailure"]

#: The stages of a guard, in the order in which they are checked: the later one fails, the closer the call was.
#: ``RUN``: the guard held, and the forward program found what differs.
INTERPRETER, STRUCTURE, ARGUMENTS, MODULE, RUN = range(5)


class GuardFailure(Exception):
    """The first condition that a call does not meet.

    Attributes:
        stage: ``INTERPRETER``, ``STRUCTURE``, ``ARGUMENTS``, ``MODULE`` or ``RUN``.
        field: what differs, without the values, as in ``"shape of args[0]"``.
        reason: with the values, as in ``"shape of args[0]: compiled for (5, 6), called with (3, 6)"``.
        tried: entries whose forward program found it in this call, one after the other.
    """

    def __init__(self, stage: int, field: str, detail: str = ""):
        self.stage = stage
        self.field = field
        self.reason = f"{field}: {detail}" if detail else field
        self.tried: tuple = ()
        super().__init__(self.reason)
