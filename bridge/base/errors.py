"""Errors: what can go wrong, in the user's terms and with the user's line.

Guard failure: which condition of an entry a call does not meet, in words for the user.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

__all__ = ["ARGUMENTS", "BY_DRAWS", "BY_NUMBERS", "CALL_BEFORE", "INTERPRETER", "MODULE", "RUN", "STRUCTURE"]
__all__ += ["CacheNotFilled", "CompilationError", "DispatchMiss", "GuardFailure", "Unsupported", "UnsupportedModule"]
__all__ += ["from_user_code", "is_out_of_memory", "is_pythons_file", "is_refused_by_eager", "is_user_file", "line_of"]
__all__ += ["TORCH_DIR", "refused_by_eager", "swallowed", "user_line"]

TORCH_DIR = os.path.join(os.path.dirname(torch.__file__), "")
"""With what ends a folder's name: ``torch_geometric`` lies beside it."""
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = ("bridge", "autodiff", "partition")
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_OWN = tuple(os.path.join(_ROOT, package, "") for package in _PACKAGES)


@dataclass(frozen=True)
class Unsupported:
    """One thing in a module that cannot be dispatched exactly.

    Attributes:
        op: the operator or construct, as in ``"aten.linalg_eigh.default"``.
        where: the user's source line (``file:line: code``), or the module path when no line is known.
        reason: what is not handled.
        hint: what the user can do about it.
    """

    op: str
    where: str
    reason: str
    hint: str = "dispatch a submodule that does not contain it, or leave this module to PyTorch"

    def __str__(self) -> str:
        return f"{self.op}: {self.reason}\n    at {self.where}\n    {self.hint}"


class UnsupportedModule(RuntimeError):
    """A module that cannot be dispatched exactly; the module is as it was.

    Attributes:
        ops: each :class:`Unsupported` thing that stood in the way, in program order.
        cause: what torch raised while the module was traced, with its own chain and traceback; ``None`` where this
            package found what stood in the way. ``BRIDGE_LOGS=+dispatch`` shows it.

    Args:
        what: was to be done with it.
    """

    def __init__(
        self,
        module_name: str,
        ops: Sequence[Unsupported],
        cause: BaseException | None = None,
        what: str = "dispatched to TVM",
    ):
        self.module_name = module_name
        self.ops = tuple(ops)
        self.cause = cause
        lines = "\n".join(f"  {op}" for op in self.ops)
        super().__init__(f"{module_name} cannot be {what}; it was left as it was.\n{lines}")

    @property
    def is_of_draws(self) -> bool:
        """Whether draws may decide what its code does: the modules inside can be dispatched all the same."""
        return any(each.reason.startswith(BY_DRAWS) for each in self.ops)

    @property
    def is_of_numbers(self) -> bool:
        """Whether it is for numbers in tensors that decide, and may not be where counts are sizes that vary."""
        return any(BY_NUMBERS in each.reason for each in self.ops)


BY_NUMBERS = "depends on the numbers in a tensor"
BY_DRAWS = ("a random draw decides", "draws from a generator that is not torch's")


class CacheNotFilled(UnsupportedModule):
    """A module whose forward makes tensors at its first call and keeps them; once eager has, it may be dispatched."""


CALL_BEFORE = "call the module once before; add_tvm_dispatch without a sample compiles its second call"
"""What helps then."""


class CompilationError(RuntimeError):
    """A failure inside the compiler (a bug of this package, not of the module).

    Attributes:
        stage: the stage that failed.
        ir: that stage's input, as text.
    """

    def __init__(self, stage: str, ir: str, cause: BaseException):
        self.stage = stage
        self.ir = ir
        super().__init__(f"stage '{stage}' failed: {type(cause).__name__}: {cause}\n(the stage's input is in .ir)")


class DispatchMiss(RuntimeError):
    """Raised instead of running eager when a call matches no entry and ``on_miss="error"``."""


def refused_by_eager(error: Exception) -> Exception:
    """``error``, known from now on as what PyTorch itself raises for the call, with or without a dispatch."""
    error._refused_by_eager = True
    return error


def is_refused_by_eager(error: Exception) -> bool:
    return getattr(error, "_refused_by_eager", False)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out; torch raises a plain RuntimeError for the CPU's."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def swallowed(error: Exception) -> None:
    """Noted by a handler that goes on after any error: raises one that is a bug of this package's, in the test mode.

    Such an error is none of this package's own classes, its code raised it, and no frame of a user's took part in it.
    The test mode is ``BRIDGE_RAISE=1`` in the environment.
    """
    if os.environ.get("BRIDGE_RAISE") != "1" or type(error).__module__.partition(".")[0] in _PACKAGES:
        return
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_own = [file.startswith(_OWN) for file in files]
    if any(is_own[-1:]) and all(own or not is_user_file(file) for own, file in zip(is_own, files, strict=True)):
        raise error


def from_user_code(error: Exception) -> Exception:
    """``error`` with a traceback that begins at the first frame that is neither torch's nor ours, if there is one."""
    frames = error.__traceback__
    while frames is not None and not is_user_file(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return error if frames is None else error.with_traceback(frames)


@cache
def is_pythons_file(filename: str) -> bool:
    """Whether a source file is of the standard library, in whose folder packages may lie that are none of it."""
    return filename.startswith(_STDLIB) and not any(each in filename for each in ("site-packages", "dist-packages"))


@cache
def is_user_file(filename: str) -> bool:
    """Whether a source file is neither torch's, nor this package's, nor of the standard library."""
    if filename.startswith((TORCH_DIR, *_OWN, "<")):
        return False
    return not is_pythons_file(filename)


def user_line(source: str | traceback.StackSummary | BaseException | None) -> str | None:
    """``file:line: code`` of the innermost frame that is neither torch's nor ours, or ``None``.

    Args:
        source: a formatted stack trace (``node.meta["stack_trace"]``), a stack, or an exception.
    """
    if source is None:
        return None
    if isinstance(source, str):
        return _user_line_of_text(source)
    frames = traceback.extract_tb(source.__traceback__) if isinstance(source, BaseException) else source
    for frame in reversed(frames):
        if is_user_file(frame.filename):
            return line_of((frame.filename, frame.lineno or 0))
    return None


def line_of(place: tuple[str, int]) -> str:
    """``file:line: code`` of a file name and a line number."""
    filename, number = place
    return f"{filename}:{number}: {linecache.getline(filename, number).strip()}"


def _user_line_of_text(text: str) -> str | None:
    frames = reversed(re.findall(r'^\s*File "(.*?)", line (\d+).*(?=\n(.*)|\Z)', text, re.MULTILINE))
    told = (f"{filename}:{number}: {code.strip()}" for filename, number, code in frames if is_user_file(filename))
    return next(told, None)


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
