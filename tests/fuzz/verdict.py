"""What became of a random module, and how a difference or an error is told in one line."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass

__all__ = ["EagerRaises", "Verdict", "Wrong", "in_backward", "is_lost", "one_line", "place", "words"]


@dataclass(frozen=True)
class Verdict:
    """What became of one program.

    Attributes:
        status: ``"same"``, ``"imprecise"`` (the same as the host's kernels; eager's own on the device compute with
            narrower numbers), ``"refused"``, ``"missed"`` (nothing was dispatched), ``"skipped"`` (eager itself
            raises), ``"wrong"`` or ``"crash"``.
        detail: one line: the reason, or the difference.
        lost: whether an error of eager's has left this process without its GPU.
    """

    status: str
    detail: str = ""
    lost: bool = False

    @property
    def is_bug(self) -> bool:
        return self.status in ("wrong", "crash")


class Wrong(AssertionError):
    """A difference from eager."""


class EagerRaises(Exception):
    """A sample that eager refuses at the generator's state of that moment (an index that is drawn), or its kernel
    asserts; the cause is eager's error."""


def one_line(error: BaseException, limit: int = 300) -> str:
    """Its type and its words."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:limit]


def words(error: BaseException) -> str:
    """Its words without addresses."""
    return re.sub(r"0x[0-9a-f]+", "0x", str(error))


def is_lost(error: BaseException) -> bool:
    """Whether a kernel's assertion failed: nothing runs on the GPU in this process any more."""
    return "device-side assert" in str(error)


def in_backward(error: BaseException) -> bool:
    """Whether it was raised in autograd."""
    return any("autograd" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def place(error: BaseException) -> str:
    """File and line where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{'/'.join(frames[-1].filename.split('/')[-2:])}:{frames[-1].lineno}" if frames else "unknown place"
