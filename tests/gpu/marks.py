"""Marks of tests that want a GPU, or two."""

from __future__ import annotations

import pytest
import torch

from tests.device import DEVICE

ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: TEST_DEVICE=cuda, or make test-gpu"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
