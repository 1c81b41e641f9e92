"""Losses in blocks of rows: losses that are found, their numbers beside eager's, and the bytes saved."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autodiff import row_blocks
from autodiff.ir import bindings
from autodiff.scan import is_scan, scan_of
from bridge import add_tvm_dispatch, explain, lower, stats
from bridge.base.session import SESSION
from bridge.compile import CompileOptions, RunLoop, compile_function
from tests.bridge.compare import check_module
from tests.bridge.compile.test_cuda_programs import Collecting, check_compiled
from tests.nvrtc import ARCHES, needs_nvrtc

WORDS = 23


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small products are computed in blocks of at least five rows."""
    monkeypatch.setattr(row_blocks, "LEAST_ROWS", 5)
    monkeypatch.setattr(row_blocks, "LEAST_SAVED", -(10**9))
    SESSION.reset("lowerings")
    yield
    SESSION.reset("lowerings")


class Model(nn.Module):
    """An embedding, a layer, a head (of the embedding's weight where there is none), and a loss of its logits."""

    def __init__(self, loss, bias=False, tied=False):
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, WORDS, bias=bias)
        self.loss = loss
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words, labels):
        return self.loss(self.head(torch.tanh(self.layer(self.words(words)))), labels)


def flat(logits, labels, **options):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def shifted(logits, labels):
    return flat(logits[:, :-1].contiguous(), labels[:, 1:])


def z_loss(logits, labels):
    return flat(logits, labels) + 1e-2 * (torch.logsumexp(logits, -1) ** 2).mean()


def soft_capped(logits, labels):
    return flat(5 * torch.tanh(logits / 5), labels)


def by_hand(logits, labels):
    found = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])
    return -(found.squeeze(-1) * (labels >= 0)).sum() / (labels >= 0).sum()


def of_targets(logits, labels):
    targets = F.one_hot(labels.clamp(min=0), WORDS).to(logits.dtype) * 0.9 + 0.1 / WORDS
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))


def squared(logits, labels):
    return ((logits.sigmoid() - 0.5) ** 2).sum() / logits.numel()


def weighted(logits, labels):
    return flat(logits, labels, weight=torch.linspace(0.5, 2, WORDS, dtype=logits.dtype))


LOSSES = {
    "mean": flat,
    "sum": lambda logits, labels: flat(logits, labels, reduction="sum"),
    "another ignored label": lambda logits, labels: flat(logits, labels.clamp(min=0), ignore_index=0),
    "smoothed labels": lambda logits, labels: flat(logits, labels, label_smoothing=0.1),
    "shifted": shifted,
    "z-loss": z_loss,
    "soft cap": soft_capped,
    "scaled": lambda logits, labels: flat(logits * 0.25, labels),
    "loss scaled after": lambda logits, labels: 3 * flat(logits, labels) ** 2,
    "by hand": by_hand,
    "probabilities": of_targets,
    "no labels": squared,
    "weights of classes": lambda logits, labels: flat(
        logits, labels, weight=torch.linspace(0.5, 2, WORDS, dtype=logits.dtype)
    ),
}


def sample(rows=4, columns=5):
    words = torch.randint(0, WORDS, (rows, columns))
    labels = torch.randint(0, WORDS, (rows, columns))
    labels[1, 2:] = -100
    return words, labels


def in_blocks(module, given, **options):
    return "in blocks" in [stage.name for stage in lower(module, given, **options)]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("options", [{}, {"bias": True, "tied": True}], ids=["weight", "bias, tied"])
def test_the_numbers_are_eagers(name, options):
    module = check_module(lambda: Model(LOSSES[name], **options), sample)
    assert "in blocks" in [stage.name for stage in stats(module).entries[0].lowered]


@pytest.mark.parametrize("rows, columns", [(1, 11), (2, 8), (23, 1), (6, 23)])
def test_numbers_of_rows_that_are_no_multiple(rows, columns):
    """Eleven rows are blocks of four, four and three; there may be as many rows as words."""

    def given():
        return torch.randint(0, WORDS, (rows, columns)), torch.randint(0, WORDS, (rows, columns))

    module = check_module(lambda: Model(flat, bias=True), given)
    assert "in blocks" in [stage.name for stage in stats(module).entries[0].lowered]


@pytest.mark.parametrize("name", ["mean", "smoothed labels", "z-loss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrower_types_are_as_close_as_eager(name, dtype):
    def loss(logits, labels):
        return LOSSES[name](logits.float() if dtype == torch.bfloat16 else logits, labels)

    torch.manual_seed(0)
    exact = Model(loss, bias=True).double()
    eager = copy.deepcopy(exact).to(dtype)
    batches = [sample() for _ in range(8)]  # the rounding of one loss is as good as chance
    module = add_tvm_dispatch(copy.deepcopy(eager), batches[0])
    assert "in blocks" in [stage.name for stage in stats(module).entries[0].lowered]
    for mine, its, true in zip(*(of_batches(each, batches) for each in (module, eager, exact)), strict=True):
        allowed = 2 * (its - true).square().mean().sqrt() + 8 * torch.finfo(its.dtype).eps * true.abs().max()
        assert (mine - true).square().mean().sqrt() <= allowed
    assert stats(module).hits == len(batches)


def of_batches(module, batches):
    """The losses and the gradients of the parameters, each of all batches."""
    found = []
    for batch in batches:
        loss = module(*batch)
        found.append([loss.detach(), *torch.autograd.grad(loss, [*module.parameters()])])
    return [torch.stack(each) for each in zip(*found, strict=True)]


def test_autocast():
    torch.manual_seed(0)
    module, given = Model(flat, bias=True, tied=True), sample()
    eager = copy.deepcopy(module)
    with torch.autocast("cpu", torch.bfloat16):
        assert in_blocks(module, given)
        add_tvm_dispatch(module, given)
        losses = module(*given), eager(*given)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-2, atol=0)
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        assert ours.grad.dtype == theirs.grad.dtype
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=0.02 * float(theirs.grad.abs().max()))
    assert stats(module).hits == 1


class Returned(Model):
    """Also returns the logits, a number for each row, another number of them, or the predicted words."""

    def __init__(self, what):
        super().__init__(flat)
        self.what = what

    def forward(self, words, labels):
        logits = self.head(self.words(words))
        return self.loss(logits, labels), self.what(logits, labels)


OTHER = {
    "logits": lambda logits, labels: logits,
    "rows": lambda logits, labels: flat(logits, labels, reduction="none"),
    "predicted": lambda logits, labels: logits.argmax(-1),
    "number": lambda logits, labels: logits.std(),
    "over rows": lambda logits, labels: logits.softmax(0).sum(),
    "product of numbers": lambda logits, labels: logits.sum() * logits.exp().sum(),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_is_read_otherwise_stays_whole(name):
    module = check_module(lambda: Returned(OTHER[name]), sample)
    assert "in blocks" not in [stage.name for stage in stats(module).entries[0].lowered]


class Gram(nn.Linear):
    """A product of a tensor with itself."""

    def forward(self, x):
        y = super().forward(x)
        return (y @ y.t()).exp().sum()


def test_a_product_of_a_tensor_with_itself_stays_whole():
    module = check_module(lambda: Gram(3, 4), lambda: torch.randn(12, 3))
    assert "in blocks" not in [stage.name for stage in stats(module).entries[0].lowered]


class Halved(Model):
    """Memory that eager's backward reads changes after the loss."""

    def __init__(self):
        super().__init__(lambda logits, labels: flat(logits * self.scale, labels))
        self.register_buffer("scale", torch.ones(WORDS))

    def forward(self, words, labels):
        loss = super().forward(words, labels)
        self.scale.data.mul_(0.5)
        return loss


def test_what_is_no_single_region_stays_whole(monkeypatch):
    given = sample()
    sizes = {name: {0: torch.export.Dim("rows")} for name in ("words", "labels")}
    half = Model(flat).half()
    assert not in_blocks(half, given)
    assert not in_blocks(Halved(), given)
    assert not in_blocks(Model(flat), given, dynamic_shapes=sizes)
    assert in_blocks(Model(flat), given)
    monkeypatch.setattr(row_blocks, "LEAST_SAVED", 64 << 20)
    assert not in_blocks(Model(flat), given)


def test_a_call_without_gradients():
    module, given = Model(z_loss).double(), sample()
    eager = copy.deepcopy(module)
    with torch.no_grad():
        assert in_blocks(module, given)
        add_tvm_dispatch(module, given)
        torch.testing.assert_close(module(*given), eager(*given), rtol=1e-12, atol=0)
    assert stats(module).hits == 1


def test_gradients_of_gradients_are_eagers():
    module, given = Model(flat, tied=True).double(), sample()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, given)
    found = []
    for each in (module, eager):
        weight = each.layer.weight
        (grad,) = torch.autograd.grad(each(*given), weight, create_graph=True)
        found.append((grad, *torch.autograd.grad(grad.square().sum(), [weight, each.words.weight])))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


class Halves(Model):
    """The rows come out of a tuple."""

    def forward(self, words, labels):
        first, second = self.layer(self.words(words)).chunk(2, dim=1)
        return self.loss(self.head(first * second), labels[:, :2])


def test_gradients_flow_through_tuples():
    module = check_module(lambda: Halves(flat), lambda: sample(4, 4))
    assert "in blocks" in [stage.name for stage in stats(module).entries[0].lowered]


class Measured(Model):
    """A trained result, and a loss without gradients."""

    def forward(self, words, labels):
        rows = self.layer(self.words(words))
        with torch.no_grad():
            measured = self.loss(self.head(rows), labels)
        return rows.square().mean(), measured


def test_no_gradient_is_computed_of_a_loss_that_has_none():
    module = check_module(lambda: Measured(flat), sample)
    stage = stats(module).entries[0].lowered["in blocks"]
    (scan,) = [scan_of(value)[0] for _, value in bindings(stage.function) if is_scan(value)]
    assert scan.carries == len(scan.type.fields) == 1


@pytest.mark.parametrize("trained", ["head", "layer", "words"])
def test_only_some_gradients_are_wanted(trained):
    def make():
        module = Model(z_loss, bias=True)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.startswith(trained))
        return module

    check_module(make, sample)


def test_the_plan_says_so_and_less_is_held(monkeypatch):
    """A product of 512 x 4,000 in blocks of 64 rows: the step's memory shrinks by about the plan's number."""
    held = {}
    given = torch.randn(512, 16, requires_grad=True), torch.randint(0, 4000, (512,))
    for rows in (1024, 64):
        monkeypatch.setattr(row_blocks, "LEAST_ROWS", rows)
        SESSION.reset("lowerings")
        module = Head(16, 4000)
        add_tvm_dispatch(module, given)
        (entry,) = stats(module).entries
        arenas = max(entry.forward.arena_bytes, entry.backward.arena_bytes)
        held[rows] = entry.lowered.plan.bytes + arenas
        notes = entry.lowered.plan.notes
        assert bool(notes) == (rows == 64)
    saved = 448 * 4000 * 8 - row_blocks._HELD * 4000 * 16 * 4
    words = "linear, 512 x 4,000, is computed and reduced in 8 blocks of 64 rows, which takes"
    assert notes == (f"{words} {saved:,} bytes less at once",)
    assert notes[0] in str(explain(module))
    assert 0.9 * saved <= held[1024] - held[64]


class Head(nn.Module):
    def __init__(self, columns, words):
        super().__init__()
        self.head = nn.Linear(columns, words, bias=False)

    def forward(self, x, labels):
        return F.cross_entropy(self.head(x), labels)


@needs_nvrtc
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_kernels_are_compiled_for_a_gpu(autocast):
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        lowered = lower(Model(flat, bias=True), sample())
    backend = Collecting(arch=ARCHES[0])
    options = CompileOptions.current(backend)
    forward = compile_function(lowered.forward, name="forward", options=options)
    compile_function(lowered.expected_backward, name="backward", options=options)
    assert any(isinstance(step, RunLoop) for step in forward.steps)
    check_compiled(backend.kernels, ARCHES[0])
