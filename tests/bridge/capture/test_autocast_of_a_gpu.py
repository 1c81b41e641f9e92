"""A GPU's autocast of operators, recorded on fake tensors: without a GPU."""

from __future__ import annotations

import pytest
import torch

from bridge.base.devices import working_for
from bridge.base.torch_internals import FakeTensorMode, aten, python_kernels
from bridge.capture.recorder import OperatorRecorder

WIDENED = {
    "sum": (aten.sum.default, ()),
    "sum of rows": (aten.sum.dim_IntList, ([1], True)),
    "prod": (aten.prod.dim_int, (1,)),
    "cumsum": (aten.cumsum.default, (1,)),
    "softmax": (aten.softmax.int, (1,)),
    "vector_norm": (aten.linalg_vector_norm.default, (2, [1])),
    "matrix_norm": (aten.linalg_matrix_norm.str_ord, ("fro",)),
    "norm": (aten.norm.Scalar, (2,)),
    "norm of rows": (aten.norm.ScalarOpt_dim, (2, [1])),
}


@pytest.fixture
def gpu(monkeypatch):
    """Autocast for a GPU, also on a machine without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    with working_for(torch.device("cuda", 0)):
        yield FakeTensorMode()


def recorded(mode, target, args, dtype):
    """The rows of one operator of one tensor under autocast."""
    with mode, torch.autocast("cuda", torch.bfloat16), python_kernels():
        x = torch.empty(4, 4, dtype=dtype, device="cuda")
        with OperatorRecorder([x], {}) as recorder:
            target(x, *args)
    return recorder.record.rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", WIDENED)
def test_results_are_asked_for_in_float32(name, dtype, gpu):
    target, args = WIDENED[name]
    (row,) = recorded(gpu, target, args, dtype)
    assert row.op.overloadpacket is target.overloadpacket
    assert torch.float32 in (*row.args, *row.kwargs.values(), dtype)
    torch.manual_seed(0)
    x = torch.randn(4, 4).to(dtype)
    torch.testing.assert_close(row.op(x, *row.args[1:], **row.kwargs), target(x.float(), *args))


def test_doubles_are_left_alone(gpu):
    (row,) = recorded(gpu, aten.sum.default, (), torch.float64)
    assert row.kwargs == {} and row.op is aten.sum.default
