"""Words of a refusal: short, without torch.export's chain above them; eager's own error where eager refuses too."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, lower, stats
from bridge.capture.eager_error import raise_if_eager_raises

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]

HEAD = """
import torch
from torch import nn
from bridge import add_tvm_dispatch

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
"""
CALL = "\nadd_tvm_dispatch(Block(), torch.randn(5, 4))\n"
REFUSED = {
    "control flow": "return y if y.sum() > 0 else -y",
    "a number": "return y * int(y.sum().item())",
    "a shape": "return y[torch.nonzero(y[:, 0])[:, 0]]",
    "numpy": "return y + torch.from_numpy(x.detach().numpy())",
    "a type": "return (y for _ in range(2))",
}
WRONG = {
    "shapes": "return y + torch.ones(3, 7)",
    "types": "return y @ x.double().T",
    "the user's": "raise ValueError('no such block')",
}


def run(line: str, **environment: str) -> list[str]:
    """The lines that a script, which dispatches a module whose forward ends with ``line``, leaves on stderr."""
    script = HEAD + " " * 8 + line + CALL
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    variables.pop("TORCH_LOGS", None)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and not done.stdout
    return done.stderr.splitlines()


@pytest.mark.parametrize("line", REFUSED.values(), ids=REFUSED)
def test_a_refusal_is_all_there_is_on_stderr(line):
    lines = run(line)
    assert lines[0] == "Traceback (most recent call last):", "something is printed before it"
    assert sum(each.startswith("Traceback") for each in lines) == 1, "a chain of exceptions above it"
    assert len(lines) < 40 and not any("torch/" in each for each in lines)
    assert any("Block cannot be dispatched to TVM" in each for each in lines)


@pytest.mark.parametrize("line", WRONG.values(), ids=WRONG)
def test_an_error_of_eagers_is_all_there_is_on_stderr(line):
    lines = run(line)
    assert lines[0] == "Traceback (most recent call last):" and len(lines) < 80
    assert sum(each.startswith("Traceback") for each in lines) == 1
    assert lines[-1].startswith(("RuntimeError: ", "ValueError: no such block"))


def test_the_log_has_the_chain_on_request():
    lines = run(REFUSED["control flow"], BRIDGE_LOGS="+dispatch")
    assert any("[bridge.dispatch] Block cannot be captured" in each for each in lines)
    assert any("GuardOnDataDependentSymNode" in each for each in lines)


class Calls(nn.Module):
    def __init__(self, then):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.then = then

    def forward(self, *args):
        return self.then(self.linear(args[0]), *args[1:])


def by_numbers(y):
    return y if y.sum() > 0 else -y


def test_the_cause_is_torchs_exception():
    with pytest.raises(UnsupportedModule) as caught:
        add_tvm_dispatch(Calls(by_numbers), torch.randn(5, 4))
    error = caught.value
    assert type(error.cause).__name__ == "GuardOnDataDependentSymNode" and error.cause.__traceback__ is not None
    assert error.__cause__ is None and error.__context__ is None


def test_a_refusal_of_ours_has_no_cause():
    with pytest.raises(UnsupportedModule) as caught:
        add_tvm_dispatch(Calls(torch.linalg.eigh), torch.randn(4, 4))
    assert caught.value.cause is None


def loss(y, labels):
    return nn.functional.cross_entropy(y.view(-1, 4), labels.view(-1))


def write_in_place(y):
    y.t_().view(-1)
    return y


def spoiled(y):
    """Its backward needs what is overwritten; fake tensors do not get that far."""
    z = y.exp()
    total = z.sum()
    z.add_(1)
    return total * z if total.item() is not None else total


class Leaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        self.scale.mul_(2)
        return x * self.scale


ROWS = torch.arange(10).remainder(4).reshape(2, 5)
EAGERS = {
    "labels sliced": (Calls(loss), (torch.randn(2, 4, 4), ROWS[:, 1:]), "view size is not compatible"),
    "labels expanded": (Calls(loss), (torch.randn(2, 4, 4), ROWS[:, :1].expand(2, 4)), "view size is not compatible"),
    "a transposed result": (Calls(write_in_place), (torch.randn(5, 4),), "view size is not compatible"),
    "a leaf": (Leaf(), (torch.randn(5, 4),), "a leaf Variable that requires grad"),
    "the backward": (Calls(spoiled), (torch.randn(5, 4),), "modified by an inplace operation"),
}


@pytest.mark.parametrize(("module", "args", "words"), EAGERS.values(), ids=EAGERS)
def test_eagers_error_is_the_one_that_is_raised(module, args, words):
    with pytest.raises(RuntimeError, match=words) as eagers:
        result = module(*args)
        result.sum().backward()
    module.zero_grad()
    before = {name: (tensor, tensor.detach().clone()) for name, tensor in module.state_dict(keep_vars=True).items()}
    attributes, values = dict(vars(module)), [arg.clone() for arg in args]
    generator = torch.get_rng_state()
    for refuse in (add_tvm_dispatch, lower):
        with pytest.raises(RuntimeError, match=words) as caught:
            refuse(module, args)
        assert type(caught.value) is type(eagers.value) and str(caught.value) == str(eagers.value)
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert vars(module) == attributes and torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(now, then) for now, then in zip(args, values, strict=True))
    for name, tensor in module.state_dict(keep_vars=True).items():
        assert tensor is before[name][0] and torch.equal(tensor, before[name][1]) and tensor.grad is None


class Remembers(nn.Module):
    """Leaves a fake tensor on itself when it is traced, on which eager would stumble."""

    def __init__(self):
        super().__init__()
        self.state = None
        self.calls = [0]

    def forward(self, x):
        self.state = x if self.state is None else self.state + x
        self.calls[0] += 1
        return by_numbers(self.state)


def test_eager_is_tried_in_the_state_before_the_capture():
    module = Remembers()
    with pytest.raises(UnsupportedModule, match="data-dependent"):
        add_tvm_dispatch(module, torch.randn(5, 4))
    assert module.state is None and module.calls == [0]


def test_what_fails_in_the_fake_run_is_tried_in_eager_too(monkeypatch):
    from bridge.capture import pipeline

    def fails(*args):
        raise RuntimeError("only on fake tensors")

    monkeypatch.setattr(pipeline, "fake_run", fails)
    with pytest.raises(UnsupportedModule, match="only on fake tensors"):
        add_tvm_dispatch(Calls(torch.tanh), torch.randn(5, 4))
    monkeypatch.setattr(pipeline, "export", fails)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        add_tvm_dispatch(Calls(loss), (torch.randn(2, 4, 4), ROWS[:, 1:]))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("is_leaf", [False, True])
@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[:, 1::2],
        lambda x: x[:1].expand(3, 6),
        lambda x: x[:0],
        lambda x: x[0, 0],
    ],
    ids=["dense", "transposed", "sliced", "expanded", "empty", "scalar"],
)
def test_eager_gets_a_copy_of_the_same_layout(layout, is_leaf, requires_grad):
    seen = []
    sample = layout(torch.randn(5, 6).requires_grad_(requires_grad) * 1)
    if is_leaf:
        sample = sample.detach().requires_grad_(requires_grad)

    class Looks(nn.Module):
        def forward(self, x):
            seen.append((x, x.is_leaf))
            return x * 1

    raise_if_eager_raises(Looks(), (sample,), {})
    (copy, copied_leaf), form = seen[0], (sample.shape, sample.stride(), sample.requires_grad, sample.is_leaf)
    assert (copy.shape, copy.stride(), copy.requires_grad, copied_leaf) == form
    assert torch.equal(copy, sample) and copy.untyped_storage().data_ptr() != sample.untyped_storage().data_ptr()
    assert not sample.is_leaf or sample.grad is None


def test_warnings_of_torchs_log_stay_where_they_are_outside_of_a_capture():
    records = []
    logger = logging.getLogger("torch.export")
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)

    def forward(y):
        logger.warning("while it is captured")
        return y.tanh()

    try:
        add_tvm_dispatch(Calls(forward), torch.randn(5, 4))
        assert not records
        logger.warning("later")
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in records] == ["later"] and not handler.filters
    assert "print" not in vars(sys.modules["torch.export._trace"])


def test_a_call_that_eager_refuses_is_no_entry_under_on_miss_compile():
    module = Calls(lambda y: y + torch.ones(5, 4))
    add_tvm_dispatch(module, torch.randn(5, 4), on_miss="compile")
    with pytest.raises(RuntimeError, match="must match the size"):
        module(torch.randn(3, 4))
    assert len(stats(module).entries) == 1
