"""ATen → Relax with training semantics: one file per family of operators, one function per operator."""

from bridge.aten import (
    activations,
    any_operator,
    conv,
    custom_functions,
    indexing,
    nn,
    pointwise,
    recurrent,
    reductions,
    shape,
    special,
)
from bridge.aten.draws import described_draw
from bridge.aten.importer import Imported, import_graph
from bridge.aten.registry import CONVERSIONS, UnsupportedUse

__all__ = ["CONVERSIONS", "Imported", "UnsupportedUse", "activations", "any_operator", "conv"]
__all__ += ["custom_functions", "described_draw", "import_graph", "indexing", "nn"]
__all__ += ["pointwise", "recurrent", "reductions", "shape", "special"]
