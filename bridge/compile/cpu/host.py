"""This processor: its model, what LLVM may use of it, LLVM's version; keys of what is kept on disk rest on them."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

import tvm

__all__ = ["features", "fingerprint", "llvm_version", "model"]

_SETTINGS = ("MKL_", "OMP_", "KMP_", "GOMP_", "ONEDNN_", "DNNL_", "OPENBLAS_")
"""What environment variables that libraries of products look at begin with."""


def fingerprint() -> tuple:
    """What measured times depend on: the processor, how many of them, what libraries are told."""
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_SETTINGS))
    return model(), features(), os.cpu_count(), settings


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
