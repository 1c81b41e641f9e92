"""Marks of one step of a loop (``tvm_dispatch::loop_..``) → the library calls that :mod:`autodiff.scan.roll` reads."""

from __future__ import annotations

from bridge.aten.registry import converts
from bridge.capture import LOOP_MARKS

__all__ = ["first", "last", "part", "steps"]

_FIRST, _PART, _LAST, _STEPS = LOOP_MARKS


@converts(_FIRST)
def first(importer, node, value, sources, loop, place, length, reverse):
    return importer.library("loop_first", [value, loop, place, length, reverse], importer.out(node))


@converts(_PART)
def part(importer, node, whole, loop, place):
    return importer.library("loop_part", [whole, loop, place], importer.out(node))


@converts(_LAST)
def last(importer, node, value, loop, place):
    return importer.library("loop_last", [value, loop, place], importer.out(node))


@converts(_STEPS)
def steps(importer, node, value, loop, place, length):
    return importer.library("loop_steps", [value, loop, place, length], importer.out(node))
