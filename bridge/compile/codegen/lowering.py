"""Lowering of kernels that are loops already → the packed calling convention, for every backend."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx

__all__ = ["lower_loops"]


def lower_loops() -> tuple[tvm.transform.Pass, Callable, Callable]:
    """The passes that the packed calling convention needs, no others; then those of the host's part and the device's.

    TVM's default pipeline simplifies under an analyzer that substitutes every bound variable by its value, which is
    exponential in the length of a chain of bindings (a polynomial is one). Nothing here does that.

    The calling convention's checks of every argument (number of dimensions, each extent, dtype, device, strides) are
    more code than most kernels and take more than half of LLVM's time. A kernel is called only by the Program that it
    was built for, which checks its inputs once per call and makes everything else itself; so they are left out.
    """
    passes = [
        tirx.transform.BF16ComputeLegalize(),
        tirx.transform.VerifyMemory(),
        tirx.transform.AnnotateEntryFunc(),
        tirx.transform.SplitHostDevice(),
        tirx.transform.MakePackedAPI(),
        tirx.transform.SkipAssert(),
        tirx.transform.BF16StorageLegalize(),
    ]
    return tvm.transform.Sequential(passes), tirx.transform.LowerTVMBuiltin, lambda: tvm.transform.Sequential([])
