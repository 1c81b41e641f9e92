"""CUDA without a GPU, and with one: a test's requirements on the machine, else it is skipped with the reason."""

from __future__ import annotations

import pytest
import torch

from bridge.compile.cuda import nvrtc

ARCHES = ("sm_80", "sm_90")
"""Architectures that everything is compiled for."""

needs_nvrtc = pytest.mark.skipif(bool(nvrtc.absent()), reason=nvrtc.absent() or "there is NVRTC")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
