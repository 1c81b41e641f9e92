"""Lowering: the pipeline's stages as data, their origins, and their reuse by equal calls."""

from bridge.lowering.frozen import FrozenCall, freeze_call
from bridge.lowering.lowered import LoweredCall, Sample
from bridge.lowering.origin import Origin
from bridge.lowering.pipeline import DEFAULT_PARTITION, cleaned_and_named, lower_captured, partition_options
from bridge.lowering.reuse import lower_once
from bridge.lowering.stage import Stage
from bridge.lowering.text import attributes, binding_line, count, html_table, megabytes, script, short_op, value_text

__all__ = [
    "DEFAULT_PARTITION",
    "FrozenCall",
    "LoweredCall",
    "Origin",
    "Sample",
    "Stage",
    "attributes",
    "binding_line",
    "cleaned_and_named",
    "count",
    "freeze_call",
    "html_table",
    "lower_captured",
    "lower_once",
    "megabytes",
    "partition_options",
    "script",
    "short_op",
    "value_text",
]
