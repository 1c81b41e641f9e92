"""Export: a dispatched module ↔ a folder that runs and trains without its source, and in C++ by TVM's runtime."""

from bridge.export.load import load_compiled
from bridge.export.save import save_compiled
from bridge.export.structure import ResultRecord

__all__ = ["ResultRecord", "load_compiled", "save_compiled"]
