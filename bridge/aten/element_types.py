"""Element types that Relax computes with: torch's and their names."""

from __future__ import annotations

import torch

from bridge.aten.registry import UnsupportedUse

__all__ = ["ELEMENT_TYPES", "relax_dtype"]

ELEMENT_TYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
}


def relax_dtype(torch_dtype: torch.dtype) -> str:
    """The Relax name of a torch dtype. :class:`UnsupportedUse` for those that Relax does not compute with."""
    if torch_dtype not in ELEMENT_TYPES:
        raise UnsupportedUse(f"values of type {torch_dtype}")
    return ELEMENT_TYPES[torch_dtype]
