"""ATen to Relax with training semantics: one file per family of operators, one function per operator."""

from bridge.aten import creation, indexing, linalg, nn, pointwise, reductions, shape
from bridge.aten.importer import Imported, import_graph, unsupported_nodes
from bridge.aten.registry import CONVERSIONS, Refused

__all__ = [
    "CONVERSIONS",
    "Imported",
    "Refused",
    "creation",
    "import_graph",
    "indexing",
    "linalg",
    "nn",
    "pointwise",
    "reductions",
    "shape",
    "unsupported_nodes",
]
