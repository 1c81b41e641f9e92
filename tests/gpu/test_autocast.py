"""Every operator that a GPU's autocast casts for, with operands in half and in single precision, beside eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bridge import add_tvm_dispatch, stats
from tests.device import DEVICE
from tests.gpu.marks import ON_A_GPU

pytestmark = ON_A_GPU

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(-1, keepdim=True) * x,
    "prod": lambda x: x.prod(),
    "prod of rows": lambda x: x.prod(1),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(1),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "norm": lambda x: x.norm(),
    "norm of rows": lambda x: x.norm(dim=1, keepdim=True),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
    "matrix_norm": torch.linalg.matrix_norm,
    "normalize": lambda x: F.normalize(x, dim=1),
    "a norm spelled out": lambda x: x / x.pow(2).sum(-1, keepdim=True).pow(0.5),
    "pow": lambda x: x.pow(3),
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": lambda x: (x * x + 1).log(),
    "log1p": lambda x: (x * x).log1p(),
    "reciprocal": lambda x: (x * x + 1).reciprocal(),
    "rsqrt": lambda x: (x * x + 1).rsqrt(),
    "tan": torch.tan,
    "sinh": torch.sinh,
    "asin": lambda x: (x / 8).asin(),
    "erfinv": lambda x: (x / 8).erfinv(),
    "logsumexp": lambda x: x.logsumexp(1),
    "softplus": F.softplus,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[1:]),
    "group_norm": lambda x: F.group_norm(x, 2),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0) + 1),
    "mse_loss": lambda x: F.mse_loss(x, x.flip(0)),
    "l1_loss": lambda x: F.l1_loss(x, x.flip(0)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.flip(0)),
    "kl_div": lambda x: F.kl_div(x.log_softmax(1), x.flip(0).softmax(1), reduction="batchmean"),
    "nll_loss": lambda x: F.nll_loss(x, torch.arange(x.shape[0], device=x.device) % x.shape[1]),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(x.shape[0], device=x.device) % x.shape[1]),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.full_like(x, 0.3)),
    "dist": lambda x: torch.dist(x, x.flip(0)),
    "cdist": lambda x: torch.cdist(x, x.flip(0) * 2 + 1, compute_mode="donot_use_mm_for_euclid_dist"),
    "atan2": lambda x: torch.atan2(x, x.float().exp()),
    "addcmul": lambda x: torch.addcmul(x.float(), x, x),
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.25, device=x.device)),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(1, torch.zeros_like(x, dtype=torch.long), x),
    "index_put": lambda x: x.index_put((torch.arange(2, device=x.device),), x.float()[2:4]),
    "matmul": lambda x: x @ x.mT,
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
}


class Operator(nn.Module):
    """An operator of a linear layer's result, which autocast gives in half precision, or of that in float32."""

    def __init__(self, name: str, half: bool):
        super().__init__()
        self.linear, self.operator, self.half = nn.Linear(6, 8), OPERATORS[name], half

    def forward(self, x):
        y = self.linear(x)
        return self.operator(y if self.half else y.float())


@pytest.mark.parametrize("half", [True, False], ids=["half", "float32"])
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_cast_as_in_eager(name, half):
    torch.manual_seed(0)
    eager = Operator(name, half).to(DEVICE)
    ours, x = copy.deepcopy(eager), torch.randn(5, 6, device=DEVICE).requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        add_tvm_dispatch(ours, x)
    found = []
    for module in (eager, ours):
        given = x.detach().clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            y = module(given)
        torch.manual_seed(1)
        y.backward(torch.randn(y.shape, device=DEVICE, dtype=y.dtype))
        found.append([y, given.grad, *(parameter.grad for parameter in module.parameters())])
    assert stats(ours).hits == 1, stats(ours)
    for want, have in zip(*found, strict=True):
        assert have.dtype == want.dtype
        far = torch.linalg.vector_norm((have - want).double()).item()
        assert far <= 0.02 * max(torch.linalg.vector_norm(want.double()).item(), 1e-3), (want, have)
