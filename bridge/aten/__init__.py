"""ATen → Relax with training semantics: one file per family of operators, one function per operator."""

from bridge.aten import (
    activations,
    arithmetic,
    attention,
    conv,
    creation,
    indexing,
    linalg,
    loops,
    nn,
    norm,
    own_functions,
    pointwise,
    recurrent,
    reductions,
    shape,
    special,
    whole,
)
from bridge.aten.draws import described_draw
from bridge.aten.imported import Imported
from bridge.aten.importer import import_graph
from bridge.aten.recurrent import LayerShape, layers_chosen_by
from bridge.aten.registry import CONVERSIONS, UnsupportedUse

__all__ = [
    "CONVERSIONS",
    "Imported",
    "LayerShape",
    "UnsupportedUse",
    "activations",
    "arithmetic",
    "attention",
    "conv",
    "creation",
    "described_draw",
    "import_graph",
    "indexing",
    "layers_chosen_by",
    "linalg",
    "loops",
    "nn",
    "norm",
    "own_functions",
    "pointwise",
    "recurrent",
    "reductions",
    "shape",
    "special",
    "whole",
]
