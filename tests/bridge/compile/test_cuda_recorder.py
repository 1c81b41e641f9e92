"""Programs that are recorded on a GPU, and programs that are not: tested without one."""

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from bridge.compile.cuda.recorder import CudaRecorder


class Eigenvalues(nn.Module):
    def forward(self, x):
        return torch.linalg.eigvalsh(x @ x.mT) + torch.linalg.svdvals(x)


class Inverse(nn.Module):
    def forward(self, x):
        return torch.linalg.pinv(x @ x.mT, hermitian=True)


@pytest.mark.parametrize(
    ("make", "operator"), [(Eigenvalues, "aten._linalg_eigh.default"), (Inverse, "aten.linalg_pinv")]
)
def test_what_waits_for_the_device_is_not_recorded(make, operator):
    """cuSOLVER fails during stream capture, and again in the next call of any program."""
    module = make().double()
    add_tvm_dispatch(module, torch.randn(4, 4, dtype=torch.float64))
    (entry,) = stats(module).entries
    assert operator in CudaRecorder(entry.programs.forward.program, torch.device("cuda", 0)).refusal()
