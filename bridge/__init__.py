"""A training-time bridge from PyTorch to Apache TVM: forward and backward in TVM, the training loop unchanged."""

from bridge.base.python_build import refuse_free_threaded

refuse_free_threaded()  # before anything that relies on the lock is imported

from bridge.base.errors import CompilationError, DispatchMiss, Unsupported, UnsupportedModule
from bridge.dispatch import DispatchStats, add_tvm_dispatch, remove_tvm_dispatch, stats
from bridge.examine import Coverage, examine
from bridge.export import load_compiled, save_compiled
from bridge.lower import Lowered, lower
from bridge.show import Report, explain, visualize
from bridge.tune import TuningResult, tune

__version__: str = "0.1.0"

__all__ = ["CompilationError", "Coverage", "DispatchMiss", "DispatchStats", "Lowered", "Report", "TuningResult"]
__all__ += ["Unsupported", "UnsupportedModule", "__version__", "add_tvm_dispatch", "examine", "explain"]
__all__ += ["load_compiled", "lower", "remove_tvm_dispatch", "save_compiled", "stats", "tune", "visualize"]
