"""Loops in Relax: a *scan* runs a body once for each step of a sequence.

:mod:`~autodiff.scan.operator` defines the call, and makes it of a step between marks; :mod:`~autodiff.scan.reverse`
builds the scan of its backward.
"""

from autodiff.scan.hoist import hoist, turned_inside
from autodiff.scan.operator import Scan, body_text, from_marks, is_scan, scan_call, scan_of, unroll
from autodiff.scan.reverse import BackwardParameter, BackwardStep, backward_of, gradient_of, reverse_scan

__all__ = ["BackwardParameter", "BackwardStep", "Scan", "backward_of", "body_text"]
__all__ += ["from_marks", "gradient_of", "hoist", "is_scan", "reverse_scan", "scan_call"]
__all__ += ["scan_of", "turned_inside", "unroll"]
