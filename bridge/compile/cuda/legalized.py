"""Schedules of functions that TVM legalized, for CUDA: their spatial loops bound to blocks and threads."""

from __future__ import annotations

from tvm.ir import IRModule
from tvm.s_tir import dlight
from tvm.target import Target
from tvm.tirx import PrimFunc

__all__ = ["scheduled"]


def scheduled(func: PrimFunc, target: Target) -> PrimFunc:
    """Every block's spatial loops over threads, reductions serial in each: the order of a serial loop.

    ``NotImplementedError`` for a function that is not made of schedulable blocks (sorts, scans, scatters).
    """
    with target:
        module = dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(IRModule({"main": func}))
    made = module["main"]
    if not made.attrs.get("tirx.is_scheduled", False):
        raise NotImplementedError("a function that TVM legalizes to a serial one, which is no kernel for a GPU")
    return made
