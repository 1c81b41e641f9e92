"""User's frames: the stack trace that torch.fx gives each node of a graph → the part of it that is read here.

torch looks up the names and files of all frames, most of which are its own and this package's: a twentieth of a
capture. A node's line is that of its innermost frame of the user's (:func:`bridge.base.errors.user_line`).
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

from bridge.base.errors import is_user_file
from bridge.base.torch_internals import FullTraceback
from bridge.capture.tracing import is_capturing

__all__ = ["UsersTraceback"]

_KEPT_BY_NAME = "forward"
"""torch.fx keeps frames from the first one of this name on."""


class UsersTraceback:
    """In the place of torch's ``CapturedTraceback``, where torch.fx makes a node."""

    @staticmethod
    def extract(*args: Any, **kwargs: Any) -> Any:
        """Whose ``summary`` is asked for next: in a thread that captures, of the user's frames."""
        return _Frames() if is_capturing() else FullTraceback.extract(*args, **kwargs)


class _Frames:
    def summary(self) -> traceback.StackSummary:
        """The user's frames and whatever is called forward, outermost first."""
        found = traceback.StackSummary()
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_name == _KEPT_BY_NAME or is_user_file(code.co_filename):
                found.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name, lookup_line=False))
            frame = frame.f_back
        found.reverse()
        return found
