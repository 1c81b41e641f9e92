"""ATen → Relax with training semantics: one file per family of operators, one function per operator."""

from bridge.aten import (  # noqa: F401
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
from bridge.aten.importer import Imported, import_graph, parameter_name
from bridge.aten.registry import CONVERSIONS, UnsupportedUse

__all__ = ["CONVERSIONS", "Imported", "UnsupportedUse", "described_draw", "import_graph", "parameter_name"]
