"""torch's OpInfo samples: every float64 operator and its derivative, taken inside forward (``autograd.grad``)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.sweep import opinfo


class DerivedModule(opinfo.OperatorModule):
    """An operator's results, and the derivatives of the sum of their squares with respect to its arguments."""

    def forward(self, *tensors: Tensor) -> Any:
        made = [each for each in pytree.tree_leaves(super().forward(*tensors)) if isinstance(each, Tensor)]
        followed = [each for each in made if each.requires_grad]
        total = sum((each * each.conj()).real.sum() for each in followed)
        wanted = [each for each in tensors if each.requires_grad]
        slopes = torch.autograd.grad(total, wanted, create_graph=True, allow_unused=True)
        return [each.clone() for each in made], [each for each in slopes if each is not None]


names = opinfo.names
run_case = partial(opinfo.run_case, kind=DerivedModule)
