"""Where autocast casts: inside composite operators, of tensors in odd layouts, once or at each use."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from bridge.base.torch_internals import bfloat16_in_onednn
from tests.bridge.compare import Call, assert_same, check_module, run
from tests.bridge.parity.test_precision import assert_close_enough, autocast, step
from tests.device import AUTOCAST, DEVICE


class Recurrent(nn.Module):
    """Two layers, both ways, dropout between them."""

    def __init__(self, kind: type[nn.Module], **options):
        super().__init__()
        twice = {"num_layers": 2, "dropout": 0.3, "bidirectional": True}
        self.layers = kind(4, 5, batch_first=True, **{**twice, **options})

    def forward(self, x):
        y = self.layers(x)[0]
        return torch.relu(y) + torch.ones(1, dtype=y.dtype)


class Contractions(nn.Module):
    """Operators that reach autocast through the products that they call."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3, 6))
        self.cell = nn.GRUCell(6, 6)

    def forward(self, x):
        y = torch.linalg.multi_dot([x.flatten(0, 1), self.left, self.right])
        y = self.cell(y).view(3, 7, 6)
        return torch.einsum("bik,bjk->bij", y, y) + torch.tensordot(y, y, dims=([0, 2], [0, 2]))


class SharedHeads(nn.Module):
    """Keys that all heads share are expanded; their cast is dense, as the operator sees it then."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(4, 6), nn.Linear(4, 3)
        self.register_buffer("angle", torch.rand(7, 3))

    def forward(self, x):
        queries = self.query(x).view(3, 7, 2, 3).transpose(1, 2)
        keys = (self.key(x) * self.angle.cos())[:, None].expand(3, 2, 7, 3)
        return queries @ keys.mT


class LearnedBias(nn.Module):
    """Eager leaves the fused attention where its mask requires grad, and computes in float32 between casts."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.positions = nn.Embedding(13, 2)

    def forward(self, x):
        steps = torch.arange(7)
        bias = self.positions(steps[:, None] - steps + 6).permute(2, 0, 1)
        query = self.query(x).view(3, 7, 2, 2).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(query, query, query * 2, bias, dropout_p=0.2)


def refused_on_a_gpu(is_recurrent):
    """Expects the refusal of recurrent layers with dropout on a GPU, whose draws cuDNN makes; else nothing."""
    if is_recurrent and DEVICE.type == "cuda":
        return pytest.raises(UnsupportedModule, match="a recurrent layer with dropout between its layers: on a GPU")
    return nullcontext()


needs_lstms_in_bfloat16 = pytest.mark.skipif(
    DEVICE.type == "cpu" and not bfloat16_in_onednn(),
    reason="oneDNN has no bfloat16 on this processor: eager raises under autocast, and rounds at each step without",
)
MODULES = {
    "lstm": lambda: Recurrent(nn.LSTM),
    "lstm without biases": lambda: Recurrent(nn.LSTM, bias=False),
    "gru": lambda: Recurrent(nn.GRU, bidirectional=False),
    "contractions": Contractions,
    "shared heads": SharedHeads,
    "learned bias": LearnedBias,
}


@pytest.mark.composes("autocast: LSTM, GRU, einsum, attention with a learned bias", "works", section="Precision")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_lstms_in_bfloat16) if "lstm" in name else name for name in MODULES]
)
def test_operators_inside_which_autocast_casts(name):
    torch.manual_seed(0)
    eager, x = MODULES[name](), torch.randn(3, 7, 4, requires_grad=True)
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    with autocast(), refused_on_a_gpu(isinstance(eager, Recurrent)) as refused:
        add_tvm_dispatch(ours, x)
    if refused:
        return
    results = step(ours, x, autocast()), step(eager, x, autocast()), step(exact, x.double(), autocast(enabled=False))
    assert stats(ours).hits == 1, stats(ours)
    assert_close_enough(*results)


def test_attention_with_a_learned_bias():
    check_module(LearnedBias, lambda: torch.randn(3, 7, 4, requires_grad=True))


class Similar(nn.Module):
    """Attends by similarity: a mask of truth values requires no grad, whatever it is computed from."""

    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=(x @ x.mT) > 0)


def test_attention_with_an_arithmetic_mask_of_truth_values():
    check_module(Similar, lambda: torch.randn(3, 7, 4, requires_grad=True))


@pytest.mark.cpu("oneDNN's kernel")
@needs_lstms_in_bfloat16
@pytest.mark.parametrize("bias", [True, False])
def test_an_lstm_in_bfloat16_is_eagers_kernel(bias):
    """Step by step it would round far more often than eager: three times the distance after sixty steps."""

    def inputs():
        return torch.randn(3, 7, 4, requires_grad=True)

    module = check_module(lambda: Recurrent(nn.LSTM, bias=bias), inputs, dtype=torch.bfloat16)
    eager = copy.deepcopy(module)
    x = torch.randn(3, 7, 4, dtype=torch.bfloat16, requires_grad=True)
    assert_same(run(module, Call((x,))), run(eager, Call((x,))), rtol=0, atol=0)


class Decorated(nn.Linear):
    """Each call is an autocast region: its cast of the weight ends with it."""

    @torch.autocast(DEVICE.type, dtype=torch.bfloat16)
    def forward(self, x):
        return super().forward(x)


class ManyUses(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        scales = [1] * 8 + [300] + [1] * 8
        return sum(scale * self.layer(x + i / 100) for i, scale in enumerate(scales))


@pytest.mark.parametrize("kind", ["decorated", "not cached"])
def test_gradients_of_casts_at_each_use_are_added_in_float32(kind):
    """In bfloat16 the sum would lose small terms: many times eager's distance."""
    torch.manual_seed(0)
    context = torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=kind == "not cached", cache_enabled=False)
    layer = Decorated if kind == "decorated" else nn.Linear
    eager, x = ManyUses(layer(4, 4)), torch.randn(5, 4)
    exact = ManyUses(nn.Linear(4, 4)).double()
    exact.load_state_dict(eager.state_dict())
    ours = copy.deepcopy(eager)
    with context:
        add_tvm_dispatch(ours, x)
    results = step(ours, x, context), step(eager, x, context), step(exact, x.double(), autocast(enabled=False))
    assert stats(ours).hits == 1, stats(ours)
    found = assert_close_enough(*results)
    mine, own = found["layer.weight"]
    assert mine < 3 * own


class TwoTypes(nn.Module):
    """Eager's cache holds both in bfloat16, and the region gets bfloat16 instead of float16."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x):
        y = self.left @ self.right
        with torch.autocast(DEVICE.type, dtype=torch.float16):
            return x + y + self.left @ self.right


def test_a_cast_that_is_kept_is_used_in_a_region_of_another_type():
    torch.manual_seed(0)
    eager, x = TwoTypes(), torch.randn(4, 4)
    ours = copy.deepcopy(eager)
    with autocast():
        add_tvm_dispatch(ours, x)
        results = ours(x), eager(x)
    assert stats(ours).hits == 1
    torch.testing.assert_close(*results)


def test_a_cast_that_was_kept_before_is_none_of_the_call():
    torch.manual_seed(0)
    eager, x = nn.Linear(4, 4), torch.randn(4, 4)
    ours = copy.deepcopy(eager)
    with autocast():
        with torch.autocast(DEVICE.type, dtype=torch.float16):
            ours(x)
        add_tvm_dispatch(ours, x)
        results = ours(x), eager(x)
    assert stats(ours).hits == 1
    torch.testing.assert_close(*results)


class RunsAgain(nn.Module):
    """A module whose call is recorded more than once, in one context of autocast that keeps casts."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how, self.seen = nn.Linear(6, 8), how, None

    def forward(self, x):
        y = self.layer(x)
        if self.how == "set once" and self.seen is None:
            self.seen = y.shape
        elif self.how == "set anew":
            self.seen = y.float().sum()
        return y.sin()


@pytest.mark.parametrize("how", ["set once", "set anew"])
def test_casts_that_an_earlier_run_has_left(how):
    torch.manual_seed(0)
    eager, x = RunsAgain(how), torch.randn(5, 6)
    ours = copy.deepcopy(eager)
    with autocast():
        add_tvm_dispatch(ours, x)
    results = []
    for module in (ours, eager):
        with autocast():
            y = module(x)
        y.float().sum().backward()
        results.append([y, *(each.grad for each in module.parameters())])
    assert stats(ours).hits == 1
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


def test_a_cache_of_casts_is_part_of_the_state():
    torch.manual_seed(0)
    module, x = nn.Linear(4, 3), torch.randn(5, 4)
    with autocast():
        add_tvm_dispatch(module, x)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16, cache_enabled=False):
        module(x)
    (reason,) = stats(module).misses
    assert reason == f"{AUTOCAST}: compiled for torch.bfloat16, called with torch.bfloat16 (cache_enabled=False)"
