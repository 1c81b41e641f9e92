"""Every condition of a guard, broken once: both paths agree, the reason names it; one without a case here fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrize import cached
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.base import tensor_properties
from bridge.base.errors import ARGUMENTS, INTERPRETER, MODULE, STRUCTURE, GuardFailure
from bridge.base.modes import distributions_validate
from bridge.capture import capture
from bridge.dispatch.guards import EntryGuard
from bridge.dispatch.guards.interpreter import MODES
from bridge.state import SampleCall, write_counts
from tests.device import AUTOCAST, DEVICE

FACTOR = 2.0


class Everything(nn.Module):
    """A module with state for each condition."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.plain = nn.Linear(6, 6, bias=False)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.plain.weight
        self.register_buffer("mean", torch.ones(6))
        self.scale = 2.0
        self.options = {"gain": 1.0}
        self.sizes = [1.0, 2.0]
        self.table = torch.ones(6)

    def forward(self, x, power, *, shift):
        with torch.no_grad():
            self.mean.mul_(0.5)
        x = self.tied(self.plain(self.layers(x))) * self.scale * self.options["gain"] * self.sizes[1] * FACTOR
        x = x * torch.distributions.Normal(0.0, 1.0).scale * getattr(self, "later", 1.0)
        return (x * self.table + self.mean + shift) ** power


def rows(**options: Any) -> torch.Tensor:
    return torch.ones(5, 6, **options).requires_grad_()


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__.get(name) if isinstance(owner, nn.Module | nn.Parameter) else getattr(owner, name)
    owner.__dict__[name] = value
    yield
    if before is None:
        del owner.__dict__[name]
    else:
        owner.__dict__[name] = before


@contextmanager
def item(owner: dict | list, key: Any, value: Any) -> Iterator[None]:
    before = dict(owner) if isinstance(owner, dict) else list(owner)
    owner[key] = value
    yield
    if isinstance(owner, dict):
        owner.clear()
        owner.update(before)
    else:
        owner[:] = before


@contextmanager
def undone(change: Callable[[], Any], undo: Callable[[], Any]) -> Iterator[None]:
    change()
    yield
    undo()


@contextmanager
def reordered(held: dict[str, Any]) -> Iterator[None]:
    """The first of two entries is the last one."""
    first, second = held
    held[first] = held.pop(first)
    yield
    held[second] = held.pop(second)


@contextmanager
def removed_by(handle: Any) -> Iterator[None]:
    yield
    handle.remove()


@contextmanager
def inference_mode_with_grad() -> Iterator[None]:
    with torch.inference_mode(), torch.enable_grad():
        yield


class PassThrough(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def flushed() -> Any:
    return undone(lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False))


def deterministic() -> Any:
    use = torch.use_deterministic_algorithms
    return undone(lambda: use(True), lambda: use(False))


def unvalidated() -> Any:
    switch, now = torch.distributions.Distribution.set_default_validate_args, distributions_validate()
    return undone(lambda: switch(not now), lambda: switch(now))  # Dynamo may have switched it off already


def default_dtype() -> Any:
    return undone(lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32))


def in_vmap(check: Callable[..., None]) -> None:
    torch.func.vmap(lambda x: (check(), x)[1])(torch.ones(1))


def inference_tensor(*shape: int, requires_grad: bool = False) -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(shape).requires_grad_(requires_grad)


def negated(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.complex64).conj().imag


def subclass(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(type("Subclass", (torch.Tensor,), {})).requires_grad_()


def around(context: Callable[[], Any]) -> Callable[[nn.Module, Callable[..., None]], None]:
    """A mutation of the interpreter's state."""

    def mutate(module: nn.Module, check: Callable[..., None]) -> None:
        with context():
            check()

    return mutate


def on_module(context: Callable[[nn.Module], Any]) -> Callable[[nn.Module, Callable[..., None]], None]:
    """A mutation of the module."""

    def mutate(module: nn.Module, check: Callable[..., None]) -> None:
        with context(module):
            check()

    return mutate


def calling(*args: Any, **kwargs: Any) -> Callable[[nn.Module, Callable[..., None]], None]:
    """A call with other arguments; callables are called for them."""

    def mutate(module: nn.Module, check: Callable[..., None]) -> None:
        check(*[arg() if callable(arg) else arg for arg in args], **kwargs)

    return mutate


def given(x: Callable[[], Any]) -> Callable[[nn.Module, Callable[..., None]], None]:
    """A call with another first argument."""
    return calling(x, 2, shift=1.0)


def mean(make: Callable[[], Any]) -> Callable[[nn.Module, Callable[..., None]], None]:
    """Another buffer."""
    return on_module(lambda module: item(module._buffers, "mean", make()))


def sharing(module: nn.Module, check: Callable[..., None]) -> None:
    x = rows()
    with item(module._buffers, "mean", x.detach()[0]):
        check(x, 2, shift=1.0)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(6)])


def rename(module: nn.Module, old: str, new: str) -> None:
    module._buffers[new] = module._buffers.pop(old)


def tensor_of_the_weight(module: nn.Module) -> torch.Tensor:
    return module.layers[0].weight.detach().clone().requires_grad_()


MUTATIONS: dict[str, tuple[Callable[[nn.Module, Callable[..., None]], None], int, str]] = {
    "grad mode": (around(torch.no_grad), INTERPRETER, "grad mode: compiled for True, called with False"),
    "inference mode": (around(inference_mode_with_grad), INTERPRETER, "inference mode: compiled for False"),
    "autocast": (
        around(lambda: torch.autocast(DEVICE.type, torch.bfloat16)),
        INTERPRETER,
        f"{AUTOCAST}: compiled for False",
    ),
    "default dtype": (around(default_dtype), INTERPRETER, "default dtype: compiled for torch.float32"),
    "numbers below the smallest normal one": (
        around(flushed),
        INTERPRETER,
        "numbers below the smallest normal one: compiled for True, called with False",
    ),
    "deterministic algorithms": (around(deterministic), INTERPRETER, "deterministic algorithms: compiled for False"),
    "validation of distributions": (
        around(unvalidated),
        INTERPRETER,
        "validation of distributions: compiled for",
    ),
    "forward-mode differentiation": (
        around(forward_ad.dual_level),
        INTERPRETER,
        "forward-mode differentiation: compiled for False, called with True",
    ),
    "torch dispatch mode": (around(PassThrough), INTERPRETER, "torch dispatch mode: compiled for False, called with T"),
    "torch function mode": (
        around(BaseTorchFunctionMode),
        INTERPRETER,
        "torch function mode: compiled for False, called with True",
    ),
    "functorch transform": (
        lambda module, check: in_vmap(check),
        INTERPRETER,
        "functorch transform: compiled for False, called with True",
    ),
    "global module hooks": (
        around(lambda: removed_by(register_module_forward_hook(lambda *_: None))),
        INTERPRETER,
        "global module hooks: compiled for False, called with True",
    ),
    "parametrize.cached()": (around(cached), INTERPRETER, "parametrize.cached(): compiled for False, called with True"),
    "keyword arguments": (calling(rows, 2), STRUCTURE, "keyword arguments: compiled for ['shift'], called with []"),
    "structure": (given(lambda: [rows()]), STRUCTURE, "structure of"),
    "constants": (calling(rows, 3, shift=1.0), STRUCTURE, "value of argument args[1]: compiled for 2, called with 3"),
    "tensor arguments": (given(lambda: 3), STRUCTURE, "structure of argument args[0]: a tensor was compiled, called"),
    "type of arguments": (given(lambda: subclass(rows())), ARGUMENTS, "type of args[0]: a tensor subclass, Subclass"),
    "nested of arguments": (given(nested), ARGUMENTS, "layout of args[0]: a nested tensor"),
    "shape of arguments": (given(lambda: rows()[:3]), ARGUMENTS, "shape of args[0]: compiled for (5, 6)"),
    "dtype of arguments": (given(lambda: rows(dtype=torch.float64)), ARGUMENTS, "dtype of args[0]: compiled for t"),
    "requires_grad of arguments": (given(lambda: rows().detach()), ARGUMENTS, "requires_grad of args[0]: compiled for"),
    "device of arguments": (given(lambda: rows(device="meta")), ARGUMENTS, f"device of args[0]: compiled for {DEVICE}"),
    "layout of arguments": (
        given(lambda: rows().detach().to_sparse().requires_grad_()),
        ARGUMENTS,
        "layout of args[0]: compiled for torch.strided",
    ),
    "sign bit of arguments": (
        given(lambda: negated(5, 6).requires_grad_()),
        ARGUMENTS,
        "layout of args[0]: a tensor with its sign bit set aside",
    ),
    "strides of arguments": (
        given(lambda: torch.ones(6, 5).t().requires_grad_()),
        ARGUMENTS,
        "strides of args[0]: compiled for (6, 1), called with (1, 5)",
    ),
    "inference tensor of arguments": (
        given(lambda: inference_tensor(5, 6, requires_grad=True)),
        ARGUMENTS,
        "inference tensor args[0]",
    ),
    "reads": (on_module(lambda module: item(globals(), "FACTOR", 3.0)), MODULE, "global 'FACTOR' changed"),
    "types": (
        on_module(
            lambda module: undone(
                lambda: setattr(module.plain, "__class__", Doubling),
                lambda: setattr(module.plain, "__class__", nn.Linear),
            )
        ),
        MODULE,
        "type of submodule 'plain': compiled for Linear, called with Doubling",
    ),
    "submodules": (
        on_module(lambda module: item(module.layers._modules, "1", nn.ReLU())),
        MODULE,
        "submodule 'layers.1' was replaced",
    ),
    "order of submodules": (
        on_module(lambda module: reordered(module.layers._modules)),
        MODULE,
        "order of the submodules of submodule 'layers' changed",
    ),
    "name of a buffer": (
        on_module(
            lambda module: undone(lambda: rename(module, "mean", "other"), lambda: rename(module, "other", "mean"))
        ),
        MODULE,
        "buffer 'mean' was removed",
    ),
    "hooks": (
        on_module(lambda module: removed_by(module.plain.register_forward_hook(lambda *_: None))),
        MODULE,
        "hook on submodule 'plain' (forward_hooks)",
    ),
    "training flags": (
        on_module(lambda module: undone(module.plain.eval, module.plain.train)),
        MODULE,
        "training flag of submodule 'plain': compiled for True, called with False",
    ),
    "attribute names": (
        on_module(lambda module: attribute(module, "later", 1.0)),
        MODULE,
        "attribute 'later' was added to the module",
    ),
    "attributes": (
        on_module(lambda module: attribute(module, "scale", 3.0)),
        MODULE,
        "attribute 'scale' of the module changed",
    ),
    "tensor attributes": (
        on_module(lambda module: attribute(module, "table", 2.0)),
        MODULE,
        "attribute 'table' of the module is no tensor any more",
    ),
    "absent tensors": (
        on_module(lambda module: item(module.plain._parameters, "bias", nn.Parameter(torch.ones(6)))),
        MODULE,
        "parameter 'plain.bias' was None",
    ),
    "nested tensors": (mean(nested), MODULE, "layout of buffer 'mean': a nested tensor"),
    "ties": (
        on_module(lambda module: item(module.tied._parameters, "weight", nn.Parameter(torch.ones(6, 6)))),
        MODULE,
        "parameter 'plain.weight' is no longer tied to 'weight'",
    ),
    "parameters": (
        on_module(lambda module: item(module.plain._parameters, "more", nn.Parameter(torch.ones(1)))),
        MODULE,
        "number of parameters of submodule 'plain': compiled for 2, called with 3",
    ),
    "buffers": (
        on_module(lambda module: item(module.plain._buffers, "more", torch.ones(1))),
        MODULE,
        "number of buffers of submodule 'plain': compiled for 0, called with 1",
    ),
    "type of module tensors": (
        on_module(lambda module: item(module.layers[0]._parameters, "weight", tensor_of_the_weight(module))),
        MODULE,
        "parameter 'layers.0.weight' is a plain tensor, not a Parameter",
    ),
    "nested of module tensors": (mean(nested), MODULE, "layout of buffer 'mean': a nested tensor"),
    "shape of module tensors": (mean(lambda: torch.ones(7)), MODULE, "shape of buffer 'mean': compiled for (6,)"),
    "dtype of module tensors": (mean(lambda: torch.ones(6).double()), MODULE, "dtype of buffer 'mean': compiled for"),
    "requires_grad of module tensors": (
        on_module(
            lambda module: undone(
                lambda: module.plain.weight.requires_grad_(False), lambda: module.plain.weight.requires_grad_(True)
            )
        ),
        MODULE,
        "requires_grad of parameter 'plain.weight': compiled for True, called with False",
    ),
    "device of module tensors": (mean(lambda: torch.ones(6, device="meta")), MODULE, "device of buffer 'mean'"),
    "layout of module tensors": (mean(lambda: torch.ones(6).to_sparse()), MODULE, "layout of buffer 'mean': compiled"),
    "sign bit of module tensors": (mean(lambda: negated(6)), MODULE, "layout of buffer 'mean': a tensor with its sign"),
    "strides of module tensors": (
        mean(lambda: torch.ones(12)[::2]),
        MODULE,
        "strides of buffer 'mean': compiled for (1,), called with (2,)",
    ),
    "inference tensor of module tensors": (
        mean(lambda: inference_tensor(6)),
        MODULE,
        "inference tensor buffer 'mean': autograd cannot save it",
    ),
    "shared memory": (sharing, MODULE, "args[0] shares memory with buffer 'mean', which the call changes"),
}


@pytest.fixture(scope="module", params=["as it is", "properties one by one", "no counts of writes"])
def guarded(request) -> Iterator[tuple[nn.Module, EntryGuard]]:
    """A module and its guard, with Dynamo's quick comparisons and without either of them."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "properties one by one":
            patch.setattr(tensor_properties, "_dynamo_is_exact", lambda: False)
        if request.param == "no counts of writes":
            patch.setattr(write_counts, "write_counter", lambda: None)
        module, x = Everything(), rows()
        guard = EntryGuard(module, capture(SampleCall(module, (x, 2), {"shift": 1.0})), [x])
        module.__dict__["_compiled_call_impl"] = None  # where the dispatcher would be
        yield module, guard


def test_every_condition_has_a_mutation(guarded):
    _, guard = guarded
    of_tensors = ["type", *(each.name for each in tensor_properties.PROPERTIES), "inference tensor"]
    names = [mode.name for mode in MODES if not mode.name.startswith("CUDA")]  # of modules on CUDA
    names += ["keyword arguments", "structure", "constants", "tensor arguments"]
    names += [f"{name} of {whose}" for whose in ("arguments", "module tensors") for name in of_tensors]
    names += sorted({f"{kind}s" for _, expected in guard.tree.reads.modules for kind, _ in expected})
    names += ["order of submodules", "name of a buffer", "hooks", "attribute names", "ties"]
    names += ["tensor attributes", "absent tensors", "nested tensors", "reads", "shared memory"]
    assert sorted(names) == sorted(MUTATIONS)


@pytest.mark.parametrize("name", list(MUTATIONS))
def test_a_broken_condition_is_seen_and_named(guarded, name):
    module, guard = guarded
    mutate, stage, reason = MUTATIONS[name]
    sample = (rows(), 2), {"shift": 1.0}
    checked = []

    def check(*args: Any, **kwargs: Any) -> None:
        args, kwargs = (args, kwargs) if args else sample
        assert guard.check(module, args, kwargs) is None
        with pytest.raises(GuardFailure) as caught:
            guard.match(SampleCall(module, args, kwargs))
        assert caught.value.stage == stage
        assert caught.value.reason.startswith(reason), caught.value.reason
        checked.append(name)

    assert guard.check(module, *sample) is not None
    mutate(module, check)
    assert checked == [name]
    assert guard.check(module, *sample) is not None, "the mutation was undone"
    quick, thorough = guard.check(module, *sample), guard.match(SampleCall(module, *sample))
    assert all(a is b for a, b in zip(quick, thorough, strict=True))


SAME: dict[str, Callable[[nn.Module], Any]] = {
    "the host as the default device": lambda module: torch.device("cpu"),
    "an equal number": lambda module: attribute(module, "scale", float("2.0")),
    "an equal list": lambda module: attribute(module, "sizes", [1.0, 2.0]),
    "another buffer": lambda module: item(module._buffers, "mean", torch.zeros(6)),
    "a tensor of another class": lambda module: attribute(module, "table", nn.Parameter(torch.ones(6), False)),
}


@pytest.mark.parametrize("name", list(SAME))
def test_what_means_the_same_is_taken(guarded, name):
    """The quick path may leave equal values to the thorough one; neither sees a difference."""
    module, guard = guarded
    with SAME[name](module):
        args, kwargs = (rows(), 2), {"shift": 1.0}
        inputs = guard.match(SampleCall(module, args, kwargs))
        quick = guard.check(module, args, kwargs)
        assert quick is None or all(a is b for a, b in zip(quick, inputs, strict=True))


def test_modes_are_told_as_they_are():
    with contextlib.ExitStack() as stack:
        stack.enter_context(BaseTorchFunctionMode())
        shown = {mode.name: mode.show(mode.read()) for mode in MODES}
    assert shown["torch function mode"] is True and shown["torch dispatch mode"] is False
    assert shown["functorch transform"] is False and shown["forward-mode differentiation"] is False
