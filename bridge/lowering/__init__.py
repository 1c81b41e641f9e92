"""Lowering: the pipeline's stages as data, their origins, and their reuse by equal calls."""

from bridge.lowering.lowered import FrozenCall, LoweredCall, Sample, freeze_call
from bridge.lowering.pipeline import DEFAULT_PARTITION, cleaned_and_named, lower_captured, partition_options
from bridge.lowering.reuse import lower_once
from bridge.lowering.stage import Origin, Stage
from bridge.lowering.text import (
    Foldable,
    attributes,
    binding_line,
    count,
    folded,
    megabytes,
    script,
    short_op,
    value_text,
)

__all__ = ["DEFAULT_PARTITION", "Foldable", "FrozenCall", "LoweredCall", "Origin", "Sample", "Stage", "attributes"]
__all__ += ["binding_line", "cleaned_and_named", "count", "folded", "freeze_call", "lower_captured", "lower_once"]
__all__ += ["megabytes", "partition_options", "script", "short_op", "value_text"]
