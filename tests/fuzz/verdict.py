"""The verdict on a random module, and one-line texts of differences and errors."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """The verdict on one program.

    Attributes:
        status: ``"same"``, ``"imprecise"`` (the same as the host's kernels; eager's own on the device are less
            precise), ``"refused"``, ``"missed"`` (no call was dispatched), ``"skipped"`` (eager itself raises),
            ``"wrong"`` or ``"crash"``.
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
    """Eager refuses the sample at the generator's present state (a drawn index), or its kernel asserts; the cause is
    its error."""


def one_line(error: BaseException, limit: int = 300) -> str:
    """The error's type and text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:limit]


def words(error: BaseException) -> str:
    """The error's text without addresses."""
    return re.sub(r"0x[0-9a-f]+", "0x", str(error))


def is_lost(error: BaseException) -> bool:
    """Whether a kernel's assertion failed: nothing runs on the GPU in this process any more."""
    return "device-side assert" in str(error)


def in_backward(error: BaseException) -> bool:
    """Whether autograd raised it."""
    return any("autograd" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def place(error: BaseException) -> str:
    """File and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{'/'.join(frames[-1].filename.split('/')[-2:])}:{frames[-1].lineno}" if frames else "unknown place"
