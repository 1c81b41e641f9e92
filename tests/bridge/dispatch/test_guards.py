"""PyTorch runs a call that no entry serves, and the statistics name the difference."""

import contextlib
import copy
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, explain, stats
from bridge.base.tensor_properties import tensor_checks
from bridge.dispatch.guards import EntryGuard
from bridge.state import write_counter
from tests.bridge.compare import Call, as_call, assert_same, run
from tests.bridge.models import MLP
from tests.device import DEVICE


def rows(count: int = 7, **options) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(count, 6, requires_grad=True, **options)


def assert_reason(module: nn.Module, pattern: str) -> None:
    """Exactly one miss was counted, under a reason that matches ``pattern``."""
    misses = stats(module).misses
    assert sum(misses.values()) == 1, dict(misses)
    (reason,) = misses
    assert _matches(pattern, reason), f"reason {reason!r} does not name {pattern!r}"


def _matches(pattern: str, reason: str) -> bool:
    return any(word in reason.lower() for word in pattern.split("|"))


def check_miss(module: nn.Module, sample, other, pattern: str, change=None, context=contextlib.nullcontext) -> None:
    """hit, then a call that differs (eager's result, one miss with a reason), then a hit again.

    Args:
        change: makes the call differ by changing the module; returns the function that undoes it.
        context: a context manager around the call that differs.
    """
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, sample)
    run(module, as_call(sample))
    assert stats(module).hits == 1, dict(stats(module).misses)

    undo = [change(module), change(eager)] if change else []
    with context():
        actual = run(module, as_call(other))
        expected = run(eager, as_call(other))
    assert_same(actual, expected, rtol=0, atol=0)
    assert stats(module).hits == 1, "a call that differs was dispatched"
    assert_reason(module, pattern)
    for restore in undo:
        restore()

    actual = run(module, as_call(sample))
    expected = run(eager, as_call(sample))
    assert_same(actual, expected, rtol=1e-5, atol=1e-5)
    assert stats(module).hits == 2, dict(stats(module).misses)


class Half(nn.Module):
    def forward(self, x):
        return x * 0.5


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, tensors, extra=None):
        y = self.linear(tensors[0] + tensors[1])
        return y if extra is None else y * extra


def test_shape():
    check_miss(MLP(), rows(), rows(5), "shape")


def test_rank():
    check_miss(MLP(), rows(), rows().detach().reshape(1, 7, 6).requires_grad_(), "shape|rank|dim")


def test_dtype_of_an_input():
    check_miss(Half(), rows(), rows(dtype=torch.float64), "dtype")


def test_dtype_of_the_parameters():
    def change(module):
        module.double()
        return module.float

    check_miss(MLP(), rows(), rows(dtype=torch.float64), "dtype", change)


def test_training_flag():
    def change(module):
        module.eval()
        return module.train

    check_miss(MLP(dropout=0.5), rows(), rows(), "training", change)


def test_training_flag_of_a_submodule():
    def change(module):
        module.dropout.eval()
        return module.dropout.train

    check_miss(MLP(dropout=0.5), rows(), rows(), "training", change)


def test_no_grad():
    check_miss(MLP(dropout=0.5), rows(), rows(), "grad", context=torch.no_grad)


def test_inference_mode():
    """Eager's result there is an inference tensor, which must never be saved for a backward."""
    module = MLP()
    x = rows()
    add_tvm_dispatch(module, x)
    with torch.inference_mode():
        result = module(x.detach())
    assert stats(module).hits == 0
    assert result.is_inference()
    torch.testing.assert_close(result.clone(), module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.composes("requires_grad patterns")
def test_input_does_not_require_grad():
    check_miss(MLP(), rows(), rows().detach(), "requires_grad|requires grad")


def test_input_requires_grad_where_the_sample_did_not():
    check_miss(MLP(), rows().detach(), rows(), "requires_grad|requires grad")


@pytest.mark.composes("requires_grad patterns", "an entry each", section="Guards")
def test_parameter_frozen_later():
    def change(module):
        module.first.weight.requires_grad_(False)
        return module.first.weight.requires_grad_

    check_miss(MLP(), rows(), rows(), "requires_grad|requires grad", change)


def test_parameter_thawed_later():
    def change(module):
        module.first.weight.requires_grad_(True)
        return lambda: module.first.weight.requires_grad_(False)

    module = MLP()
    module.first.weight.requires_grad_(False)
    check_miss(module, rows(), rows(), "requires_grad|requires grad", change)


def test_structure():
    x, y = rows(), rows().detach() * 2
    check_miss(Sum(), ((x, y),), ([x, y],), "structure")


def test_extra_argument():
    x, y = rows(), rows().detach() * 2
    check_miss(Sum(), ((x, y),), ((x, y), torch.ones(3)), "structure|argument")


@pytest.mark.composes("numbers, flags, strings among the arguments", "constants of the entry", section="Guards")
def test_value_of_a_number():
    x, y = rows(), rows().detach()
    check_miss(Sum(), ((x, y), 2.0), ((x, y), 3.0), "value|constant|argument")


@pytest.mark.composes("numbers, flags, strings among the arguments")
def test_type_of_a_number():
    """``True`` equals ``1`` in Python, but not for an operator that looks at the type."""

    class Typed(nn.Module):
        def forward(self, x, flag):
            return x * 2 if flag is True else x * flag

    check_miss(Typed(), (rows(), 1), (rows(), True), "value|constant|argument|type")


def test_autocast():
    check_miss(MLP(), rows(), rows(), "autocast", context=lambda: torch.autocast(DEVICE.type, dtype=torch.bfloat16))


@pytest.mark.composes("hooks on modules inside")
def test_hook_on_a_submodule():
    seen = []

    def change(module):
        return module.first.register_forward_hook(lambda *_: seen.append(module)).remove

    check_miss(MLP(), rows(), rows(), "hook", change)
    assert len(seen) == 2, "the hook ran once for the dispatched module and once for eager"


def test_pre_hook_on_a_submodule():
    seen = []

    def change(module):
        return module.first.register_forward_pre_hook(lambda *_: seen.append(module)).remove

    check_miss(MLP(), rows(), rows(), "hook", change)
    assert len(seen) == 2


def test_attribute_a_submodule_reads():
    """The rate of a dropout is compiled into the entry; after a change eager's numbers are the right ones."""
    module = MLP(dropout=0.5)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    module.dropout.p = eager.dropout.p = 0.9
    assert_same(run(module, Call((rows(),))), run(eager, Call((rows(),))), rtol=1e-5, atol=1e-5)


def test_replaced_submodule():
    torch.manual_seed(0)
    module = MLP()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    module.second = nn.Sequential(nn.Linear(10, 4), nn.Tanh())
    eager.second = copy.deepcopy(module.second)
    assert_same(run(module, Call((rows(),))), run(eager, Call((rows(),))), rtol=1e-5, atol=1e-5)


def test_other_strides():
    """A transposed argument of the sample's shape gives eager's result, dispatched or not."""
    module = MLP()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    other = torch.randn(6, 7).t().requires_grad_()
    assert_same(run(module, Call((other,))), run(eager, Call((other,))), rtol=1e-5, atol=1e-5)


def test_one_tensor_where_the_sample_had_two():
    class Product(nn.Module):
        def forward(self, a, b):
            return a * torch.exp(b)

    module = Product()
    add_tvm_dispatch(module, (rows(), rows()))
    x = rows()
    assert_same(run(module, Call((x, x))), run(Product(), Call((x, x))), rtol=1e-5, atol=1e-5)


def test_a_sharded_module_needs_no_closer_look(monkeypatch):
    """fully_shard gives a module a class of its own and notes beside its attributes, and swaps parameters."""
    module, x = MLP(), rows()
    add_tvm_dispatch(module, x)
    module.__class__ = type(f"FSDP{MLP.__name__}", (MLP,), {"_orig_cls_mro_index": 1})
    module.__dict__["__composable_api_state"] = {}
    close, match = [], EntryGuard.match
    monkeypatch.setattr(EntryGuard, "match", lambda *args, **kwargs: close.append(1) or match(*args, **kwargs))
    linear = next(each for each in module.modules() if isinstance(each, nn.Linear))
    for _ in range(4):
        whole = linear._parameters["weight"]
        linear._parameters["weight"] = None
        linear._parameters["weight"] = nn.Parameter(whole.detach().clone())
        module(x)
    assert stats(module).hits == 4 and not close
    module.other = 3  # nothing that forward reads
    module(x)
    assert stats(module).hits == 5


class Twice(nn.Module):
    def forward(self, x, y):
        return (x * 2).sum() + y.sum()


@pytest.mark.parametrize("sampled", [True, False])
def test_a_tensor_that_is_given_twice_is_looked_at_closely_once(monkeypatch, sampled):
    """As language models are: the input's words are the labels."""
    module, x = Twice(), rows()
    add_tvm_dispatch(module, (x, x if sampled else rows()))
    close, match = [], EntryGuard.match
    monkeypatch.setattr(EntryGuard, "match", lambda *args, **kwargs: close.append(1) or match(*args, **kwargs))
    for _ in range(4):
        torch.testing.assert_close(module(x, x), Twice()(x, x))
    assert stats(module).hits == 4 and not close
    for given_twice in (True, False):
        check = tensor_checks([x, x] if sampled else [x, rows()], given_twice)
        assert check([x, x]) == (sampled or given_twice) and check([x, rows()])
        assert not check([x, rows(5)]) and not check([x[:3]] * 2)


def test_each_reason_is_counted():
    module = MLP(dropout=0.5)
    add_tvm_dispatch(module, rows())
    module(rows(5))
    module(rows(4))
    module.eval()
    module(rows())
    module.train()
    module(rows())
    counted = stats(module)
    assert counted.hits == 1
    assert sum(counted.misses.values()) == 3
    assert sum(n for reason, n in counted.misses.items() if "shape" in reason) == 2
    assert sum(n for reason, n in counted.misses.items() if "training" in reason) == 1
    assert "shape" in repr(counted) and "training" in repr(counted)


def test_a_second_entry():
    """Another shape and eval mode, added to the same module: each call finds its own entry."""
    module = MLP(dropout=0.5)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    add_tvm_dispatch(module, rows(5))
    module.eval(), eager.eval()
    add_tvm_dispatch(module, rows())
    assert len(stats(module).entries) == 3
    for flag in (False, True):
        module.train(flag), eager.train(flag)
        assert_same(run(module, Call((rows(),))), run(eager, Call((rows(),))), rtol=1e-5, atol=1e-5)
    assert_same(run(module, Call((rows(5),))), run(eager, Call((rows(5),))), rtol=1e-5, atol=1e-5)
    assert stats(module).hits == 3
    assert not stats(module).misses


def test_on_miss_error():
    module = MLP()
    add_tvm_dispatch(module, rows(), on_miss="error")
    module(rows())
    with pytest.raises(RuntimeError, match="shape"):
        module(rows(5))
    module(rows())
    assert stats(module).hits == 2


def test_on_miss_compile():
    module = MLP(dropout=0.5)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows(), on_miss="compile")
    for _ in range(2):
        assert_same(run(module, Call((rows(5),))), run(eager, Call((rows(5),))), rtol=1e-5, atol=1e-5)
    assert len(stats(module).entries) == 1, "the entry for all sizes takes the place of one that served none"
    assert stats(module).hits >= 1, "the second call of the new shape is a hit"
    run(module, Call((rows(),)))
    assert len(stats(module).entries) == 1


def test_a_failing_call_fails_as_in_eager():
    module = MLP()
    add_tvm_dispatch(module, rows())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        module(torch.randn(7, 5))
    with pytest.raises(TypeError):
        module()
    module(rows())
    assert stats(module).hits == 1


class SeveralResults(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return torch.tanh(self.body(x)), self.head(x)


FEW_FRAMES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "no tensors of its own": (nn.Tanh, (7, 6)),
    "two layers": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()), (7, 6)),
    "sixteen layers": (lambda: nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(8))), (7, 6)),
    "several results": (SeveralResults, (7, 6)),
    "a buffer that is written": (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), (7, 6)),
}


@pytest.mark.cpu("a GPU has streams, and graphs that replay")
@pytest.mark.skipif(write_counter() is None, reason="this Python counts no writes: reads are compared one by one")
@pytest.mark.parametrize("name", list(FEW_FRAMES))
def test_a_hit_runs_few_frames_of_python(name):
    """Nineteen frames, and one for each instruction, whether a kernel or a product of torch."""
    make, shape = FEW_FRAMES[name]
    module, x = make(), torch.randn(shape, requires_grad=True)
    add_tvm_dispatch(module, x)
    for _ in range(3):
        module(x)
    frames = []
    sys.setprofile(lambda frame, event, _: frames.append(frame.f_code.co_name) if event == "call" else None)
    try:
        module(x)
    finally:
        sys.setprofile(None)
    assert stats(module).hits == 4
    (entry,) = stats(module).entries
    assert len(frames) <= 19 + len(entry.forward.steps), frames


def test_the_check_that_runs_is_printed():
    module, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), rows()
    add_tvm_dispatch(module, x)
    (entry,) = stats(module).entries
    source, report = entry.guard.check.source, str(explain(module).full)
    assert all(line.strip() in report for line in source.splitlines())
    assert "global 'torch" in report and "global 'torch" not in str(explain(module))
    namespace = dict(entry.guard.check.__globals__)
    exec(source, namespace)
    assert namespace["check"](module, (x,), {}) is not None and namespace["check"](module, (rows(5),), {}) is None
