"""This processor: its model, what LLVM may use of it, LLVM's version; keys of what is kept on disk rest on them."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import tvm

__all__ = ["features", "llvm_version", "model"]


@functools.cache
def features() -> str:
    """What LLVM finds here: a target names a processor, of which a virtual machine may let programs use less."""
    found = tvm.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    return " ".join(sorted(str(name) for name, there in dict(found or {}).items() if bool(there)))


@functools.cache
def llvm_version() -> str:
    return str(tvm.get_global_func("target.llvm_version_major")())


@functools.cache
def model() -> str:
    """The processor's name, as in ``"AMD EPYC 9V74 80-Core Processor"``."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    lines = (line.partition(":") for line in told.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), platform.processor())
