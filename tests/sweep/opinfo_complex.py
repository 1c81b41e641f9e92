"""torch's OpInfo samples: every differentiable complex128 operator as a module of its tensor arguments."""

from __future__ import annotations

from functools import partial

import torch

from tests.sweep import opinfo

names = partial(opinfo.names, torch.complex128)
run_case = partial(opinfo.run_case, dtype=torch.complex128)
