"""Errors of torch's tracers in the user's terms: an exception → :class:`bridge.base.errors.Unsupported`."""

from __future__ import annotations

import re

from bridge.base.errors import Unsupported, user_line
from bridge.capture.preconditions import CACHES, NO_CACHE

__all__ = ["explain_error"]


def explain_error(error: BaseException) -> Unsupported:
    """What tracing a module, or running it on fake tensors, stumbled over."""
    where = user_line(error) or "code of torch's; the exception is this one's .cause"
    kind = type(error).__name__
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), kind)
    if kind in ("GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException"):
        return Unsupported(
            "data-dependent control flow or shape",
            where,
            "what happens next depends on the numbers in a tensor",
            "use torch.where, or dispatch the submodules on either side of it",
        )
    if unknown := re.match(r"Found <class '([\w.]+)'> in output, which is not a known type", first_line):
        home, _, name = unknown[1].rpartition(".")
        hint = NO_CACHE if home == CACHES else "return tensors, or a tuple, a list or a dict of them"
        return Unsupported(
            f"a result of type {name}", "the module's result", "not a type that torch.export knows", hint
        )
    if kind == "UnsupportedOperatorException":
        return Unsupported(str(error).splitlines()[0], where, "an operator that torch.export cannot trace")
    return Unsupported("torch.export", where, f"{kind}: {first_line}")
