"""Lowering: the pipeline's stages as data, their origins, and their reuse by equal calls."""

from bridge.lowering.lowered import FrozenCall, LoweredCall, Sample, freeze_call
from bridge.lowering.pipeline import DEFAULT_PARTITION, cleaned_and_named, lower_captured, partition_options
from bridge.lowering.reuse import lower_once
from bridge.lowering.stage import Origin, Stage
from bridge.lowering.text import attributes, binding_line, count, html_table, megabytes, script, short_op, value_text

__all__ = ["DEFAULT_PARTITION", "FrozenCall", "LoweredCall", "Origin", "Sample", "Stage", "attributes", "binding_line"]
__all__ += ["cleaned_and_named", "count", "freeze_call", "html_table", "lower_captured", "lower_once", "megabytes"]
__all__ += ["partition_options", "script", "short_op", "value_text"]
