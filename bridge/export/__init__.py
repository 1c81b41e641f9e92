"""Export: a dispatched module ↔ a folder that runs and trains without its source, and in C++ by TVM's runtime."""

from bridge.export.entry_data import ResultRecord
from bridge.export.load import load_compiled
from bridge.export.save import save_compiled

__all__ = ["ResultRecord", "load_compiled", "save_compiled"]
