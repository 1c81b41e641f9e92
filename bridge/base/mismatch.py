"""Guard failure: why a call is not what an entry was compiled for."""

from __future__ import annotations

__all__ = ["ARGUMENTS", "INTERPRETER", "MODULE", "STRUCTURE", "Mismatch"]

#: The stages of a guard, in the order in which they are checked: the later one fails, the closer the call was.
INTERPRETER, STRUCTURE, ARGUMENTS, MODULE = range(4)


class Mismatch(Exception):
    """A call that differs from what was compiled; ``reason`` names the differing thing.

    ``field`` is the reason without the values: what differs, not by how much.
    """

    def __init__(self, stage: int, field: str, detail: str = ""):
        self.stage = stage
        self.field = field
        self.reason = f"{field}: {detail}" if detail else field
        super().__init__(self.reason)
