"""Schedules of functions that TVM legalized, for the CPU: their spatial loops in parallel."""

from __future__ import annotations

import math

import tvm
from tvm import s_tir, tirx
from tvm.tirx import PrimFunc

__all__ = ["scheduled"]


def scheduled(func: PrimFunc, parallel: int) -> PrimFunc:
    """Spatial loops of each block of ``parallel`` iterations or more: fused and parallel.

    Functions that are not made of schedulable blocks (sorts, scans, scatters) are left as they are.
    """
    sch = s_tir.Schedule(func)
    try:
        blocks = sch.get_child_blocks(sch.get_sblock("root"))
    except tvm.error.InternalError:
        return func
    for block in blocks:
        loops = sch.get_loops(block)
        iterators = sch.get(block).iter_vars
        if len(loops) != len(iterators) or not loops or sch.get_child_blocks(block):
            continue
        data_parallel = tirx.IterVar.DataPar
        spatial = 0
        while spatial < len(loops) and iterators[spatial].iter_type == data_parallel:
            spatial += 1
        if spatial == 0:
            continue
        if math.prod(int(sch.get(loop).extent) for loop in loops) >= parallel:
            sch.parallel(sch.fuse(*loops[:spatial]) if spatial > 1 else loops[0])
    return sch.mod["main"]
