"""Canonical text: TVM's JSON of functions, the same in every process for the same function, and back."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi

__all__ = ["canonical_text", "functions_of"]

_SMALL_FLOAT = re.compile(r'"value":(-?\d[\d.]*e-3\d\d)\b')


def canonical_text(functions: Sequence[Any]) -> str:
    """The text of TIR or Relax functions; :func:`functions_of` reads it.

    Raises:
        ValueError: a literal that TVM's JSON cannot hold, a float64 below 2.3e-308.
    """
    text = tvm.ir.save_json(tvm_ffi.Array(list(functions)))
    for number in _SMALL_FLOAT.findall(text):
        if abs(float(number)) < sys.float_info.min:
            raise ValueError(f"TVM's JSON cannot hold a kernel's literal {number}")
    return text


def functions_of(text: str) -> list[Any]:
    """The functions of a :func:`canonical_text` that this version of TVM wrote.

    ``tvm.ir.load_json`` would look for what older versions wrote first, which takes several times as long.
    """
    return list(tvm_ffi.serialization.from_json_graph_str(text))
