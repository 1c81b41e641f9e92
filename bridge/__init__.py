"""A training-time bridge from PyTorch to Apache TVM: forward and backward in TVM, the training loop unchanged."""

import importlib
import sys
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from bridge.base.python_build import refuse_free_threaded

refuse_free_threaded()  # before anything that relies on the lock is imported

from bridge.api import (
    add_tvm_dispatch,
    examine,
    explain,
    load_compiled,
    lower,
    remove_tvm_dispatch,
    save_compiled,
    stats,
    visualize,
)
from bridge.base.errors import CompilationError, DispatchMiss, Unsupported, UnsupportedModule

if TYPE_CHECKING:
    from bridge.dispatch import DispatchStats
    from bridge.examine import Coverage
    from bridge.lower import Lowered
    from bridge.show import Report

__version__: str = "0.1.0"

__all__ = ["CompilationError", "Coverage", "DispatchMiss", "DispatchStats", "Lowered", "Report"]
__all__ += ["Unsupported", "UnsupportedModule", "__version__", "add_tvm_dispatch", "examine", "explain"]
__all__ += ["load_compiled", "lower", "remove_tvm_dispatch", "save_compiled", "stats", "visualize"]

_ROOMS = {
    "Coverage": "bridge.examine",
    "DispatchStats": "bridge.dispatch",
    "Lowered": "bridge.lower",
    "Report": "bridge.show",
}
"""Result classes → the packages that define them, imported at the first access."""


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(importlib.import_module(_ROOMS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Face(ModuleType):
    """Keeps ``lower`` and ``examine`` functions: importing a submodule binds it to its name here."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and isinstance(vars(self).get(name), FunctionType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
