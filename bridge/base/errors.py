"""Errors: refusals and failures in the user's terms, with the user's source line.

Guard failure: the condition of an entry that a call does not meet, in words for the user.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

TORCH_DIR = os.path.join(os.path.dirname(torch.__file__), "")
"""Ends with a separator: ``torch_geometric`` lies beside it."""
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = ("bridge", "autodiff", "partition")
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_OWN = tuple(os.path.join(_ROOT, package, "") for package in _PACKAGES)


DISPATCH_A_SUBMODULE = "dispatch a submodule that does not contain it, or leave this module to PyTorch"


@dataclass(frozen=True)
class Unsupported:
    """A part of a module that cannot be dispatched exactly.

    Attributes:
        op: the operator or construct, as in ``"aten.linalg_eigh.default"``.
        where: the user's source line (``file:line: code``), or the module path if no line is known.
        reason: the behaviour that is not handled.
        hint: a remedy for the user.
    """

    op: str
    where: str
    reason: str
    hint: str = DISPATCH_A_SUBMODULE

    def __str__(self) -> str:
        return f"{self.op}: {self.reason}\n    at {self.where}\n    {self.hint}"


class UnsupportedModule(RuntimeError):
    """A module that cannot be dispatched exactly; the module is left as it was.

    Attributes:
        ops: each different :class:`Unsupported` part, in program order.
        cause: torch's error from tracing the module, with its chain and traceback; ``None`` where this package found
            the unsupported part. ``BRIDGE_LOGS=+dispatch`` shows it.

    Args:
        what: the attempted action, as a participle for the message.
    """

    def __init__(
        self,
        module_name: str,
        ops: Sequence[Unsupported],
        cause: BaseException | None = None,
        what: str = "dispatched to TVM",
    ):
        self.module_name = module_name
        self.ops = tuple(dict.fromkeys(ops))
        self.cause = cause
        lines = "\n".join(f"  {op}" for op in self.ops)
        super().__init__(f"{module_name} cannot be {what}; it was left as it was.\n{lines}")

    @property
    def is_of_draws(self) -> bool:
        """Whether a random draw may decide the control flow; its submodules can still be dispatched."""
        return any(each.reason.startswith(BY_DRAWS) for each in self.ops)

    @property
    def is_of_numbers(self) -> bool:
        """Whether numbers in tensors decide the control flow; with dynamic counts they may not."""
        return any(BY_NUMBERS in each.reason for each in self.ops)


def without_parts(refused: UnsupportedModule) -> UnsupportedModule:
    """A refusal where no submodule can be dispatched → the same, whose hints do not advise that."""
    advice = "(, or |^)dispatch [^:]*: whole=False$|^" + DISPATCH_A_SUBMODULE
    hints = [re.sub(advice, "", each.hint) or "leave this module to PyTorch" for each in refused.ops]
    ops = [replace(each, hint=hint) for each, hint in zip(refused.ops, hints, strict=True)]
    return type(refused)(refused.module_name, ops, refused.cause)


BY_NUMBERS = "depends on the numbers in a tensor"
BY_DRAWS = ("a random draw decides", "draws from a generator that is not torch's", "draws from a generator of its own")


class CacheNotFilled(UnsupportedModule):
    """A module whose first forward makes tensors and keeps them; after one eager call it may be dispatched."""


CALL_BEFORE = "call the module once before; add_tvm_dispatch without a sample compiles its second call"
"""The remedy for :class:`CacheNotFilled`."""


class CompilationError(RuntimeError):
    """A failure inside the compiler (a bug of this package): in the stage ``stage``, on its input ``ir``, as text."""

    def __init__(self, stage: str, ir: str, cause: BaseException):
        self.stage = stage
        self.ir = ir
        super().__init__(f"stage '{stage}' failed: {type(cause).__name__}: {cause}\n(the stage's input is in .ir)")


class DispatchMiss(RuntimeError):
    """Raised instead of running eager when a call matches no entry and ``on_miss="error"``."""


def refused_by_eager(error: Exception) -> Exception:
    """Marks an error that PyTorch itself raises for the call, with or without a dispatch; returns it."""
    error._refused_by_eager = True
    return error


def is_refused_by_eager(error: Exception) -> bool:
    return getattr(error, "_refused_by_eager", False)


def note_sample(error: Exception) -> None:
    """Adds to an error that eager raises as well that it is about the sample."""
    if is_refused_by_eager(error) and hasattr(error, "add_note"):  # not in Python 3.10
        error.add_note("PyTorch raises this for the sample that was given, with or without a dispatch")


def failed_together(error: Exception) -> Exception:
    """Marks the error of a collective, which the other processes of its group have called as well; returns it."""
    error._failed_together = True
    return error


def is_final(error: Exception) -> bool:
    """Whether eager must not run after an error in compiled code: memory ran out, or other processes have gone on."""
    return is_out_of_memory(error) or getattr(error, "_failed_together", False)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out; torch raises a plain RuntimeError for the CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def swallowed(error: Exception) -> None:
    """Called with an error that its handler ignores; with ``BRIDGE_RAISE=1`` in the environment, raises a bug.

    An error is a bug if its class is not this package's, this package's code raised it, and no user frame took part.
    """
    if os.environ.get("BRIDGE_RAISE") != "1" or type(error).__module__.partition(".")[0] in _PACKAGES:
        return
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_own = [is_own_file(file) for file in files]
    if any(is_own[-1:]) and all(own or not is_user_file(file) for own, file in zip(is_own, files, strict=True)):
        raise error


def from_user_code(error: Exception) -> Exception:
    """``error`` with a traceback that begins at the first user frame, if there is one."""
    frames = error.__traceback__
    while frames is not None and not is_user_file(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return error if frames is None else error.with_traceback(frames)


@cache
def is_pythons_file(filename: str) -> bool:
    """Whether a source file is of the standard library; packages installed inside its folder are not."""
    return filename.startswith(_STDLIB) and not any(each in filename for each in ("site-packages", "dist-packages"))


def is_own_file(filename: str) -> bool:
    """Whether a source file is this package's."""
    return filename.startswith(_OWN)


@cache
def is_user_file(filename: str) -> bool:
    """Whether a source file is neither torch's, nor this package's, nor of the standard library."""
    if filename.startswith((TORCH_DIR, "<")) or is_own_file(filename):
        return False
    return not is_pythons_file(filename)


def user_line(source: str | traceback.StackSummary | BaseException | None) -> str | None:
    """``file:line: code`` of the innermost user frame of a formatted trace, a stack or an exception, or ``None``."""
    if source is None:
        return None
    if isinstance(source, str):
        return _user_line_of_text(source)
    frames = traceback.extract_tb(source.__traceback__) if isinstance(source, BaseException) else source
    for frame in reversed(frames):
        if is_user_file(frame.filename):
            return line_of((frame.filename, frame.lineno or 0))
    return None


def line_of_forward() -> str:
    """The user's line that this thread runs, or ``"forward"``."""
    return user_line(traceback.extract_stack()) or "forward"


def line_of(place: tuple[str, int] | None, unknown: str = "forward") -> str:
    """``file:line: code`` of a file name and a line number; ``unknown`` for ``None``."""
    if place is None:
        return unknown
    filename, number = place
    return f"{filename}:{number}: {linecache.getline(filename, number).strip()}"


def _user_line_of_text(text: str) -> str | None:
    frames = reversed(re.findall(r'^\s*File "(.*?)", line (\d+).*(?=\n(.*)|\Z)', text, re.MULTILINE))
    told = (f"{filename}:{number}: {code.strip()}" for filename, number, code in frames if is_user_file(filename))
    return next(told, None)


#: The stages of a guard, in the order of their checks: the later one fails, the closer the call was.
#: ``RUN``: the guard held, and the forward program found the difference.
INTERPRETER, STRUCTURE, ARGUMENTS, MODULE, RUN = range(5)


class GuardFailure(Exception):
    """The first condition that a call does not meet.

    Attributes:
        stage: ``INTERPRETER``, ``STRUCTURE``, ``ARGUMENTS``, ``MODULE`` or ``RUN``.
        field: the differing property, without the values, as in ``"shape of args[0]"``.
        reason: with the values, as in ``"shape of args[0]: compiled for (5, 6), called with (3, 6)"``.
        tried: entries whose forward program found the difference in this call, in order.
    """

    def __init__(self, stage: int, field: str, detail: str = ""):
        self.stage = stage
        self.field = field
        self.reason = f"{field}: {detail}" if detail else field
        self.tried: tuple = ()
        super().__init__(self.reason)
