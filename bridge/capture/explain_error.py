"""Errors in the user's terms: an exception of a run on fake tensors → :class:`bridge.base.errors.Unsupported`."""

from __future__ import annotations

import os
import re
import traceback

from bridge.base.errors import BY_NUMBERS, TORCH_DIR, Unsupported, line_of, user_line
from bridge.capture.packed import PackedUseError
from bridge.capture.readings import ReadsDifferError

__all__ = ["explain_error", "shape_by_numbers"]

_BY_NUMBERS = ("GuardOnDataDependentSymNode", "DataDependentOutputException")

_PACKED = (
    "a packed sequence",
    "its shapes are the numbers in the lengths; pack_padded_sequence, recurrent layers in float32 or float64, without "
    "dropout between them, without projections, and pad_packed_sequence alone keep it padded",
    "run the recurrent layer on the padded batch and mask what it gives, or dispatch the other layers",
)

#: Patterns in the user's line that makes a shape of numbers -> what helps.
_MAKES_SHAPES = (
    (r"\bexpert_mask\b", 'model.set_experts_implementation("grouped_mm") keeps the shapes fixed'),
    (r"repeat_interleave\(", "pass output_size=, the sum of the repeats, as a Python number"),
    (r"\bnonzero\(", "torch.nonzero_static(x, size=…) has a fixed shape"),
)

_DATA_DEPENDENT = "data-dependent control flow or shape"
_BRANCH = "use torch.where, or dispatch the submodules on either side of it"
_SHAPE = "keep the shape (torch.where, masked_fill, a multiplication by the mask), or dispatch the rest: whole=False"

#: What begins advice on exporting, compiling, or how to report a bug of torch's: not the user's to follow.
_ADVICE = re.compile(
    r"please|if you('re| are)|for (more|the|potential)|see |to fix|this typically|consider|hint|potential|you can"
    r"|TORCH_|torch\._|https?:",
    re.IGNORECASE,
)
_LONGEST = 200


def explain_error(error: BaseException, where: str | None = None) -> Unsupported:
    """What tracing a module, or running it on fake tensors, stumbled over; ``where``: the user's line, if known."""
    frames = traceback.extract_tb(error.__traceback__)
    where = where or user_line(error) or _torch_line(frames)
    kind = type(error).__name__
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), kind)
    if isinstance(error, ReadsDifferError):
        reason = "forward reads other numbers on fake tensors than on real ones"
        return Unsupported("a number that forward reads", first_line, reason, "do not let it depend on numbers")
    if isinstance(error, PackedUseError):
        op, reason, hint = _PACKED
        return Unsupported(op, where, reason, hint)
    if kind == "DynamicOutputShapeException":
        return shape_by_numbers(where)
    if kind in _BY_NUMBERS:
        return Unsupported(_DATA_DEPENDENT, where, f"what happens next {BY_NUMBERS}", _BRANCH)
    if first_line.startswith("Cannot access data pointer of Tensor"):
        reason = "a tensor's address is asked for: to copy it in Python, or for a kernel that torch does not know of"
        hint = "make a kernel an operator (torch.library.custom_op, triton_op); copy outside of forward"
        return Unsupported("Tensor.data_ptr", where, reason, hint)
    if first_line.startswith("The tensor has a non-zero number of elements, but its data is not allocated"):
        reason = "torch reads the numbers in C++, as LongTensor([t]) and x.new([t]) do: a graph would not hold them"
        return Unsupported("a tensor of tensors' numbers", where, reason, "make it by torch.tensor([t]) or torch.stack")
    if kind == "UnsupportedOperatorException":
        return Unsupported(str(error).splitlines()[0], where, "an operator that has no shapes for fake tensors")
    return Unsupported("a run on fake tensors", where, f"{kind}: {_without_advice(first_line)}")


def shape_by_numbers(where: str, reason: str = f"the shape of what comes out {BY_NUMBERS}") -> Unsupported:
    """A shape that is not known before the call computes it."""
    code = re.sub(r"^.*?:\d+: ", "", where)
    hint = next((hint for words, hint in _MAKES_SHAPES if re.search(words, code)), _SHAPE)
    return Unsupported(_DATA_DEPENDENT, where, reason, hint)


def _torch_line(frames: traceback.StackSummary) -> str:
    """The innermost line of a module or a function of torch's, where no line of the user's is known."""
    inside = f"{TORCH_DIR}nn/".replace(os.sep, "/")
    of_modules = [frame for frame in frames if frame.filename.replace(os.sep, "/").startswith(inside)]
    if not of_modules:
        return "code of torch's; the exception is this one's .cause"
    line = line_of((of_modules[-1].filename, of_modules[-1].lineno or 0))
    return line[len(TORCH_DIR) - len("torch/") :]


def _without_advice(message: str) -> str:
    """The first sentences of a message of torch's: what happened, not what to file or to set."""
    kept: list[str] = []
    for sentence in re.split(r"(?<=[.!?;]) +", message):
        if _ADVICE.search(sentence):
            break
        kept.append(sentence)
    words = " ".join(kept).strip() or "no more is known; the exception is this one's .cause"
    return words if len(words) <= _LONGEST else words[: _LONGEST - 1] + "…"
