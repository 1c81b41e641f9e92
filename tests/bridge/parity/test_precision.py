"""Half-precision modules, autocast, scaled losses: no further from float64 than eager is, and the same element types.

Gradients of half types are compared by distance to the float64 run: three times eager's own, plus rounding.
"""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import add_tvm_dispatch, lower, stats
from tests.bridge.compare import check_module
from tests.bridge.models import MLP, bert_layer
from tests.device import AUTOCAST, DEVICE
from tests.sampling import sampled

RATIO = 3.0


def autocast(dtype=torch.bfloat16, enabled=True):
    return torch.autocast(DEVICE.type, dtype=dtype, enabled=enabled)


def images() -> torch.Tensor:
    return torch.randn(2, 3, 6, 6)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


def normalized() -> nn.Module:
    """A product in half precision, then normalization with float32 weights."""
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU(), nn.Softmax(-1))


def rows() -> torch.Tensor:
    return torch.randn(7, 6, requires_grad=True)


def hidden() -> torch.Tensor:
    return torch.randn(2, 5, 24, requires_grad=True)


def step(module: nn.Module, x: torch.Tensor, context) -> dict[str, torch.Tensor]:
    """Outputs and gradients of one call under ``context``, backward outside of it, as in a training loop."""
    x = x.detach().clone().requires_grad_(x.requires_grad)
    module.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with context:
        y = module(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype))
    found = {"output": y.detach(), **{name: p.grad for name, p in module.named_parameters() if p.grad is not None}}
    found |= {name: buffer.clone() for name, buffer in module.named_buffers()}
    return found | ({"input": x.grad} if x.requires_grad else {})


def distance(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30))


def assert_close_enough(ours, eager, exact) -> dict[str, tuple[float, float]]:
    """Each tensor has eager's type and at most ``RATIO`` times eager's distance; the distances by name."""
    assert ours.keys() == eager.keys()
    largest = max(float(value.double().norm()) for value in exact.values())
    found = {}
    for name, value in eager.items():
        assert ours[name].dtype == value.dtype, name
        eps = torch.finfo(torch.bfloat16).eps if value.is_floating_point() else 0.0
        # where eager happens to be exact, or a gradient vanishes (an attention key's bias), rounding alone is left
        floor = eps * max(0.05, largest / 100 / max(float(exact[name].double().norm()), 1e-30) * 0.05)
        mine, own = distance(ours[name], exact[name]), distance(value, exact[name])
        assert mine <= RATIO * own + floor, f"{name}: {mine:.2e} from float64, eager {own:.2e}"
        found[name] = mine, own
    return found


@pytest.mark.composes("bfloat16, float16, float64 modules", "works", section="Precision")
@pytest.mark.parametrize(
    ("make", "inputs", "dtype"),
    [
        pytest.param(lambda: MLP(dropout=0.5), rows, torch.bfloat16, marks=pytest.mark.sweep),
        (lambda: MLP(dropout=0.5), rows, torch.float16),
        (convolutions, images, torch.bfloat16),
        pytest.param(convolutions, images, torch.float16, marks=pytest.mark.sweep),
    ],
)
def test_half_precision_modules(make, inputs, dtype):
    check_module(make, inputs, dtype=dtype)


@pytest.mark.composes(
    '`torch.autocast("cpu")`, regions inside forward',
    "works; the backward runs without autocast",
    section="Precision",
)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    sampled(
        itertools.product(("mlp", "normalized", "convolutions"), (torch.bfloat16, torch.float16)),
        [("mlp", torch.float16), ("normalized", torch.bfloat16), ("convolutions", torch.bfloat16)],
    ),
    ids=str,
)
def test_autocast(kind, dtype):
    make, inputs = {
        "mlp": (lambda: MLP(dropout=0.5), rows),
        "normalized": (normalized, rows),
        "convolutions": (convolutions, images),
    }[kind]
    torch.manual_seed(0)
    eager, x = make(), inputs()
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    with autocast(dtype):
        add_tvm_dispatch(ours, x)
    results = (
        step(ours, x, autocast(dtype)),
        step(eager, x, autocast(dtype)),
        step(exact, x.double(), autocast(dtype, False)),
    )
    assert stats(ours).hits == 1, stats(ours)
    assert_close_enough(*results)


def test_autocast_of_a_bert_layer():
    """The must-show of issue 6; run with ``-s`` it prints the distances."""
    torch.manual_seed(0)
    eager, x = bert_layer(), hidden()
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    with autocast():
        add_tvm_dispatch(ours, x)
    results = step(ours, x, autocast()), step(eager, x, autocast()), step(exact, x.double(), autocast(enabled=False))
    assert stats(ours).hits == 1, stats(ours)
    for name, (mine, own) in assert_close_enough(*results).items():
        print(f"{name:40s} ours {mine:.2e}  eager {own:.2e}  ratio {mine / own:.2f}")


def test_casts_are_nodes_of_the_graph():
    """A weight that is used twice is cast once, as eager's cache does; other tensors at each use."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6, bias=False)

        def forward(self, x):
            return self.linear(torch.relu(x)) + self.linear(torch.tanh(x))

    with autocast():
        lowered = lower(Twice(), torch.randn(7, 6))
    casts = [node for node in lowered.captured.graph.nodes if "_to_copy" in str(node.target)]
    assert [cast.args[0].name for cast in casts].count("p_linear_weight") == 1
    assert len(casts) == 3


def test_an_entry_belongs_to_its_autocast_state():
    torch.manual_seed(0)
    module = MLP()
    eager, x = copy.deepcopy(module), torch.randn(7, 6)
    with autocast():
        add_tvm_dispatch(module, x)
    for context in (autocast(enabled=False), autocast(torch.float16)):
        with context:
            torch.testing.assert_close(module(x), eager(x), rtol=0, atol=0)
    assert list(stats(module).misses) == [
        f"{AUTOCAST}: compiled for torch.bfloat16, called with False",
        f"{AUTOCAST}: compiled for torch.bfloat16, called with torch.float16",
    ]
    add_tvm_dispatch(module, x)
    with autocast():
        assert module(x).dtype == torch.bfloat16
    assert module(x).dtype == torch.float32
    assert stats(module).hits == 2


class Region(nn.Module):
    """Autocast turned on, and off, inside forward."""

    def __init__(self, inside: bool, no_grad: bool = False):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.inside = inside
        self.no_grad = no_grad

    def forward(self, x):
        y = self.linear(x)
        with (
            torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=self.inside),
            torch.set_grad_enabled(not self.no_grad),
        ):
            z = self.linear(x.to(self.linear.weight.dtype))
        return y * 2 + z


def check_region(around, inside, **options):
    torch.manual_seed(0)
    eager, x = Region(inside, **options), rows()
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    exact.inside = False
    with autocast(enabled=around):
        add_tvm_dispatch(ours, x)
    contexts = autocast(enabled=around), autocast(enabled=around), autocast(enabled=False)
    results = [step(m, each, c) for m, each, c in zip((ours, eager, exact), (x, x, x.double()), contexts, strict=True)]
    assert stats(ours).hits == 1, stats(ours)
    assert_close_enough(*results)


@pytest.mark.composes('`torch.autocast("cpu")`, regions inside forward')
@pytest.mark.parametrize(
    ("inside", "around"), sampled(itertools.product((False, True), repeat=2), [(True, False), (False, True)])
)
def test_regions(around, inside):
    check_region(around, inside)


@pytest.mark.parametrize("around", [False, True])
def test_a_grad_mode_inside_a_region(around):
    check_region(around, True, no_grad=True)


def off() -> torch.autocast:
    return torch.autocast(DEVICE.type, enabled=False)


def a_helper_without_grad(m, x):
    """Transformers' rotary embedding, below a forward that Accelerate has wrapped."""
    with torch.no_grad(), off():
        angles = (torch.arange(x.shape[0])[:, None] * x.float().mean()).cos()
    return m.linear(m.linear(x) * angles)


def alternating(m, x):
    with torch.no_grad(), autocast(), torch.enable_grad():
        with off():
            h = m.linear(x.to(m.linear.weight.dtype))
        h = h + m.linear(x)
        with torch.no_grad(), off():
            k = m.linear(x.to(m.linear.weight.dtype))
    return h + k


def off_within_off(m, x):
    x = x.to(m.linear.weight.dtype)
    with off():
        with autocast(), torch.no_grad():
            a = m.linear(x)
        with off():
            b = m.linear(x)
        with autocast(), off():
            c = m.linear(b)
    return a.to(b.dtype) + b + c


class Nested(nn.Module):
    def __init__(self, function, wraps):
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6), function
        if wraps:
            self.forward = autocast()(self.forward)

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.composes('`torch.autocast("cpu")`, regions inside forward')
@pytest.mark.parametrize("wraps", [False, True], ids=["around the call", "around forward"])
@pytest.mark.parametrize("function", [a_helper_without_grad, alternating, off_within_off])
def test_grad_modes_and_autocast_in_any_order_and_depth(function, wraps):
    ran = []
    for dispatched in (False, True):
        torch.manual_seed(0)
        module, x = Nested(function, wraps), rows()
        with nullcontext() if wraps else autocast():
            if dispatched:
                add_tvm_dispatch(module, x)
            y = module(x)
        y.float().square().sum().backward()
        ran.append([y, module.linear.weight.grad, module.linear.bias.grad])
    assert stats(module).hits == 1
    for theirs, ours in zip(*ran, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.03)


@pytest.mark.composes('`torch.autocast("cpu")`, regions inside forward')
def test_backward_inside_autocast():
    """Eager warns against it, but defines it: the backward's own operators are cast then; compiled code is not."""
    torch.manual_seed(0)
    module, x = MLP(), torch.randn(7, 6)
    eager = copy.deepcopy(module)
    with autocast():
        add_tvm_dispatch(module, x)
        module(x).float().square().sum().backward()
        eager(x).float().square().sum().backward()
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        assert ours.grad.dtype == theirs.grad.dtype == torch.float32
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.03, atol=0.03)


@pytest.mark.composes("`GradScaler`, scaled losses", "works", section="Precision")
@pytest.mark.parametrize("overflow", [False, True])
def test_scaled_losses(overflow):
    """``GradScaler``: the same steps are taken, and the same ones skipped, with the same scale afterwards."""
    torch.manual_seed(0)
    module, x = MLP(), torch.randn(7, 6)
    eager = copy.deepcopy(module)
    with autocast(torch.float16):
        add_tvm_dispatch(module, x)
    scales, losses = [], []
    for each in (module, eager):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (24 if overflow else 8), growth_interval=2)
        curve = []
        for _ in range(6):
            with autocast(torch.float16):
                loss = each(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            curve.append(loss.item())
        scales.append(scaler.get_scale())
        losses.append(curve)
    assert stats(module).hits == 6
    assert scales[0] == scales[1]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=5e-3, atol=1e-4)


def test_fifty_steps_under_autocast():
    """The loss curve of a small classifier, ours and eager's side by side (printed with ``-s``)."""
    torch.manual_seed(0)
    eager = nn.Sequential(bert_layer(), nn.Linear(24, 3))
    ours = copy.deepcopy(eager)
    x, labels = torch.randn(8, 6, 24), torch.randint(0, 3, (8,))
    with autocast():
        add_tvm_dispatch(ours[0], x)
    curves = []
    for module in (ours, eager):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        curve = []
        for _ in range(50):
            with autocast():
                loss = F.cross_entropy(module(x).mean(1).float(), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        curves.append(torch.tensor(curve))
    assert stats(ours[0]).hits == 50
    for i in range(0, 50, 7):
        print(f"step {i:2d}: ours {curves[0][i]:.4f}  eager {curves[1][i]:.4f}")
    assert curves[1][-5:].mean() < 0.7 * curves[1][0], "the model learns"
    torch.testing.assert_close(curves[0], curves[1], rtol=0.05, atol=0.02)


class OnAnotherDevice(nn.Module):
    """Sizes or a table of positions, computed on another device than the module's: autocast casts no operand there."""

    def __init__(self, device):
        super().__init__()
        self.linear, self.device = nn.Linear(4, 4), device

    def forward(self, x):
        table = (torch.ones(4, 4, device=self.device) @ torch.ones(4, 4, device=self.device)) ** 2
        seen = table.to(x.device) if table.device.type == "cpu" else table.prod(-1).shape[0]
        return self.linear(x) * seen


@pytest.mark.parametrize("device", ["meta", *(["cpu"] if DEVICE.type != "cpu" else [])])
def test_operators_on_another_device_under_autocast(device):
    """torch's kernel that casts is never called for them: called by its name, it ended in an internal assertion."""
    eager, x = OnAnotherDevice(device).to(DEVICE), torch.randn(4, 4, device=DEVICE)
    dispatched = copy.deepcopy(eager)
    with autocast():
        add_tvm_dispatch(dispatched, x)
    found, wanted = step(dispatched, x, autocast()), step(eager, x, autocast())
    assert stats(dispatched).hits == 1
    for name, value in wanted.items():
        assert value.dtype == found[name].dtype
        torch.testing.assert_close(found[name], value, rtol=2e-2, atol=2e-2)


class Mixed(nn.Module):
    """A float32 and a bfloat16 operand meet in one product: only autocast makes that legal."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_parameter("table", nn.Parameter(torch.randn(6, 6)))

    def forward(self, x):
        return torch.cat([self.linear(x) @ self.table, x.type_as(self.table)], -1)


def test_operands_of_mixed_types():
    torch.manual_seed(0)
    eager, x = Mixed(), rows()
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    with autocast():
        add_tvm_dispatch(ours, x)
    results = step(ours, x, autocast()), step(eager, x, autocast()), step(exact, x.double(), autocast(enabled=False))
    assert stats(ours).hits == 1, stats(ours)
    assert_close_enough(*results)


class Attention(nn.Module):
    """Fused attention: with a mask or dropout, the operator itself goes from half precision to float32 and back."""

    def __init__(self, mask: str, dropout: float):
        super().__init__()
        self.projection = nn.Linear(6, 18)
        self.mask = mask
        self.dropout = dropout

    def forward(self, x):
        q, k, v = self.projection(x).unsqueeze(1).chunk(3, -1)
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mask = {"none": None, "bool": allowed, "float": torch.zeros_like(allowed, dtype=x.dtype)}[self.mask]
        return F.scaled_dot_product_attention(q, k, v, mask, self.dropout)


@pytest.mark.parametrize(
    ("mask", "dropout"),
    sampled([("none", 0.0), ("none", 0.5), ("bool", 0.5), ("float", 0.5)], [("none", 0.0), ("float", 0.5)]),
)
def test_fused_attention_under_autocast(mask, dropout):
    torch.manual_seed(0)
    eager, x = Attention(mask, dropout), torch.randn(2, 5, 6, requires_grad=True)
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    with autocast():
        add_tvm_dispatch(ours, x)
    results = step(ours, x, autocast()), step(eager, x, autocast()), step(exact, x.double(), autocast(enabled=False))
    assert stats(ours).hits == 1, stats(ours)
    assert_close_enough(*results)
