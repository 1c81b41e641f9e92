"""Private names of torch.export's tracer, which imports AOTAutograd: looked up when something is traced."""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType

from bridge.base.torch_internals import find

EXPORT_CONTEXTS = ("_compiling_state_context", "_override_builtin_ops", "_ignore_backend_decomps")
"""Contexts that torch.export traces in, by name: its flags; ``max``, ``min`` and ``math.pow``; oneDNN switched off."""

_EXPORT_TRACER = "torch.export._trace"


@functools.cache
def export_tracer() -> ModuleType:
    """The module of torch.export that traces, with :data:`EXPORT_CONTEXTS` in it; it imports Dynamo."""
    for name in EXPORT_CONTEXTS:
        find(f"torch.export._trace.{name}")
    return importlib.import_module(_EXPORT_TRACER)


def loaded_export_tracer() -> ModuleType | None:
    """:func:`export_tracer`, if it was imported: that takes as long as two fake runs of a model."""
    return export_tracer() if _EXPORT_TRACER in sys.modules else None
