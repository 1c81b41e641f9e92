"""Wrappers of layers in a training loop work around dispatched layers, with the eager run's result."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bridge import add_tvm_dispatch, stats
from tests.bridge.compare import Function

STEPS, ROWS, WIDTH = 4, 6, 8


class Net(nn.Module):
    """Three residual blocks with dropout; the last one normalizes over the batch."""

    def __init__(self) -> None:
        super().__init__()
        normalizations = (nn.LayerNorm, nn.LayerNorm, nn.BatchNorm1d)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, WIDTH), kind(WIDTH))
            for kind in normalizations
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.fixture
def nets():
    """The eager net, and one whose blocks are dispatched."""
    torch.manual_seed(0)
    eager = Net().double().train()
    dispatched = copy.deepcopy(eager)
    for block in dispatched.blocks:
        add_tvm_dispatch(block, torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True))
    return eager, dispatched


def batches(count):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(count)]


def check(nets, loop, *, calls):
    """``loop(net)`` under one seed leaves both nets and the generator in the same state; every call was dispatched."""
    start = copy.deepcopy(nets[0].state_dict())
    generators = []
    for net in nets:
        torch.manual_seed(1)
        loop(net)
        generators.append(torch.get_rng_state())
    assert torch.equal(*generators)
    expected, actual = (net.state_dict() for net in nets)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-9, atol=1e-11)
    assert any((value - start[name]).abs().max() > 1e-3 for name, value in expected.items())
    for block in nets[1].blocks:
        assert (stats(block).hits, dict(stats(block).misses)) == (calls, {})


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def loss_of(net, batch):
    return net(batch).square().mean()


@pytest.mark.composes(
    "accumulation, clipping, `foreach` and `fused` optimizers, steps inside the backward",
    "works",
    section="Autograd, memory, threads",
)
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_accumulation_and_clipping(nets, clip):
    def loop(net):
        optimizer = sgd(net)
        for number, batch in enumerate(batches(3 * STEPS), start=1):
            (loss_of(net, batch) / 3).backward()
            if number % 3 == 0:
                if clip == "norm":
                    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                else:
                    nn.utils.clip_grad_value_(net.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()

    check(nets, loop, calls=3 * STEPS)


@pytest.mark.composes("accumulation, clipping, `foreach` and `fused` optimizers, steps inside the backward")
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False, "amsgrad": True}])
def test_optimizers_of_every_kind(nets, options):
    def loop(net):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3, **options)
        for batch in batches(STEPS):
            loss_of(net, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    check(nets, loop, calls=STEPS)


def test_gradients_kept_in_place(nets):
    """``zero_grad(set_to_none=False)``: the backward adds into tensors that the optimizer holds on to."""

    def loop(net):
        optimizer = sgd(net)
        for batch in batches(STEPS):
            loss_of(net, batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    check(nets, loop, calls=STEPS)


@pytest.mark.composes("`GradScaler`, scaled losses")
def test_grad_scaler(nets):
    """Losses scaled up, gradients scaled back; the step whose gradient overflows is skipped in both."""
    scales = []

    def loop(net):
        optimizer, scaler = sgd(net), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for number, batch in enumerate(batches(STEPS)):
            loss = loss_of(net, batch) * (float("inf") if number == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())

    check(nets, loop, calls=STEPS)
    assert scales[0] == scales[1] == 2.0**10


@pytest.mark.composes("accumulation, clipping, `foreach` and `fused` optimizers, steps inside the backward")
def test_optimizer_steps_inside_the_backward(nets):
    """``register_post_accumulate_grad_hook``: each parameter is updated as soon as its gradient is there."""

    def loop(net):
        for parameter in net.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.05)

            def step(_, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        for batch in batches(STEPS):
            loss_of(net, batch).backward()

    check(nets, loop, calls=STEPS)


@pytest.mark.composes("`saved_tensors_hooks`, `save_on_cpu`", "works", section="Autograd, memory, threads")
def test_saved_tensors_hooks_see_everything_that_is_saved(nets):
    """Every tensor goes through numpy and back; a block's saved tensors are handed to the hooks and taken from them."""
    packed = []

    def loop(net):
        optimizer, count = sgd(net), [0, 0]

        def pack(tensor):
            count[0] += 1
            return tensor.detach().numpy().copy()

        def unpack(array):
            count[1] += 1
            return torch.from_numpy(array)

        for batch in batches(STEPS):
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                loss = loss_of(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        packed.append(count)

    check(nets, loop, calls=STEPS)
    (saved, restored) = packed[1]
    assert saved == restored > 3 * STEPS


@pytest.mark.composes("`saved_tensors_hooks`, `save_on_cpu`")
def test_save_on_cpu(nets):
    def loop(net):
        optimizer = sgd(net)
        for batch in batches(STEPS):
            with torch.autograd.graph.save_on_cpu():
                loss = loss_of(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    check(nets, loop, calls=STEPS)


MASKED = {
    "an argument": lambda x, m: torch.where(m, x.sin(), x),
    "computed": lambda x, m: nn.functional.scaled_dot_product_attention(x.sin(), x, x, attn_mask=m[:, :2] | m[:, 2:]),
}


@pytest.mark.composes("`saved_tensors_hooks`, `save_on_cpu`")
@pytest.mark.parametrize("function", MASKED.values(), ids=MASKED)
def test_hooks_that_hand_masks_back_as_bytes(function):
    x, mask = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_(), torch.arange(8).view(2, 4) % 3 == 0
    ours, found = add_tvm_dispatch(Function(function), (x, mask)), []
    for run in (ours, function):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.byte() if t.dtype is torch.bool else t, lambda t: t):
            y = run(x, mask)
        found.append(torch.autograd.grad(y.square().sum(), x))
    torch.testing.assert_close(*found)
    assert stats(ours).hits == 1


def test_parameters_changed_between_forward_and_backward_are_an_error(nets):
    for net in nets:
        loss = loss_of(net, batches(1)[0])
        with torch.no_grad():
            net.blocks[0][0].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_hooks_registered_before_the_dispatch_run_once():
    torch.manual_seed(0)
    eager = Net().double().blocks[0]
    dispatched = copy.deepcopy(eager)
    for module in (eager, dispatched):
        module.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        module.register_forward_hook(lambda module, args, result: result * 2)
    add_tvm_dispatch(dispatched, batches(1)[0])
    results = []
    for module in (eager, dispatched):
        torch.manual_seed(2)
        result = module(batches(1)[0])
        result.square().sum().backward()
        results.append([result, *(parameter.grad for parameter in module.parameters())])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    assert stats(dispatched).hits == 1


@pytest.mark.composes("EMA copies, `AveragedModel`", "works", section="The module stays the user's")
def test_exponential_moving_average(nets):
    averages = []

    def loop(net):
        optimizer, average = sgd(net), AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        for batch in batches(STEPS):
            loss_of(net, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(net)
        averages.append(average.eval()(batches(1)[0]))

    check(nets, loop, calls=STEPS)
    torch.testing.assert_close(*averages, rtol=1e-9, atol=1e-11)


def test_learning_rate_schedule_and_loaded_state(nets):
    """A checkpoint of the eager run, loaded into the dispatched one, goes on as the eager run does."""
    eager, dispatched = nets
    optimizers = [sgd(net) for net in nets]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS) for optimizer in optimizers]

    def step(index):
        torch.manual_seed(3)
        loss_of(nets[index], batches(1)[0]).backward()
        optimizers[index].step()
        optimizers[index].zero_grad()
        schedules[index].step()

    for _ in range(2):
        step(0)
    dispatched.load_state_dict(eager.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    schedules[1].load_state_dict(schedules[0].state_dict())
    for index in (0, 1):
        step(index)
    for actual, expected in zip(dispatched.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
    assert stats(dispatched.blocks[0]).hits == 1
