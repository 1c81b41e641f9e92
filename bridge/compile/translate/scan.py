"""Scans → loop calls on dense tensors, whose bodies are compiled by themselves."""

from __future__ import annotations

import dataclasses

from autodiff.ir import Call, extents_of
from autodiff.scan import scan_of
from bridge.compile.loop_ir.graph import LoopCall, Operand, whole
from bridge.compile.translate.builder import Builder
from bridge.compile.translate.libcalls import tensor
from bridge.compile.translate.registry import register

__all__: list[str] = []


@register("library.scan")
def _scan(builder: Builder, call: Call) -> list[Operand]:
    scan, tensors = scan_of(call)
    operands = tuple(builder.dense(tensor(builder, each)) for each in tensors)
    outs = tuple(builder.fresh(extents_of(ty), str(ty.dtype)) for ty in call.ty.fields)
    builder.add(LoopCall("loop", operands, outs, scan=dataclasses.replace(scan, gradient=None)))
    return [whole(out) for out in outs]
