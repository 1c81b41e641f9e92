"""Ways of calling a module: as in its sample, and with the variations that occur in training loops."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.device import DEVICE
from tests.fuzz import inputs
from tests.fuzz.program import Arguments, Program, make_arguments
from tests.fuzz.themes import themes

TWICE = 0.4
"""The share of programs with a second derivative in one call."""


@dataclass(frozen=True)
class Call:
    """A call of a module.

    Attributes:
        name: its variation.
        arguments: makes them, new at each call.
        change: a change of the module before it.
        outputs: number of outputs → which of them get a grad_out.
        context: entered around the forward.
        special: whether an argument holds special values: then finite, infinite and nan elements are compared one by
            one.
        strange: whether eager may refuse the arguments' values.
        twice: whether its gradients are differentiated again.
    """

    name: str
    arguments: Callable[[], Arguments]
    change: Callable[[nn.Module], Any]
    outputs: Callable[[int], list[bool]]
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    special: bool = False
    strange: bool = False
    twice: bool = False


def nothing(module: nn.Module) -> None:
    pass


def every(count: int) -> list[bool]:
    return [True] * count


def _every_second(count: int) -> list[bool]:
    return [i % 2 == 0 for i in range(count)]


def _last(count: int) -> list[bool]:
    return [i == count - 1 for i in range(count)]


def _none(count: int) -> list[bool]:
    return [False] * count


def _step(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.9).add_(0.01)


def _flip(module: nn.Module) -> None:
    module.train(not module.training)


def _freeze(module: nn.Module) -> None:
    for parameter in list(module.parameters())[::2]:
        parameter.requires_grad_(not parameter.requires_grad)


def _renew(module: nn.Module) -> None:
    """New parameter objects, as after ``load_state_dict(assign=True)``; tied ones stay tied."""
    renewed: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in list(child._parameters.items()):
            if parameter is not None:
                new = nn.Parameter(parameter.detach() * 0.8, requires_grad=parameter.requires_grad)
                child._parameters[name] = renewed.setdefault(id(parameter), new)


def _hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda module, args: tuple(_halved(arg) for arg in args))
    module.register_forward_hook(lambda module, args, result: pytree.tree_map(_halved, result))


def _renumber(module: nn.Module) -> None:
    """Other numbers in its attributes (a schedule's weight, a count, a flag)."""
    for name, value in list(vars(module).items()):
        if name.startswith("m") and isinstance(value, bool | int | float):
            setattr(module, name, not value if isinstance(value, bool) else value + 1)


def _retensor(module: nn.Module) -> None:
    """Other tensors in its attributes, including lists and dictionaries."""
    for name, value in list(vars(module).items()):
        if name.startswith("m") and any(isinstance(each, Tensor) for each in pytree.tree_leaves(value)):
            other = lambda each: (each.detach() * 0.8 + 0.1).requires_grad_(each.requires_grad)  # noqa: E731
            setattr(module, name, pytree.tree_map_only(Tensor, other, value))


def _hook_inside(module: nn.Module) -> None:
    for child in module.children():
        child.register_forward_hook(lambda module, args, result: pytree.tree_map(_halved, result))


def _halved(value: Any) -> Any:
    return value * 0.5 if isinstance(value, Tensor) and value.is_floating_point() else value


@contextlib.contextmanager
def _other_default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _autocast() -> contextlib.AbstractContextManager:
    return torch.autocast(DEVICE.type, torch.bfloat16)


def calls_of(program: Program, names: Mapping[str, Any]) -> list[Call]:
    """Two calls like the sample with other numbers, and variations chosen by the seed."""
    spelled = [name for name, _, keyword in sorted(program.arguments, key=lambda argument: argument[2])]

    def arguments(seed: int) -> Callable[[], Arguments]:
        return lambda: make_arguments(names, seed)

    def changed(transform: Callable[[Tensor], Tensor]) -> Callable[[], Arguments]:
        def build() -> Arguments:
            given = make_arguments(names, 3)
            args, kwargs = pytree.tree_map_only(Tensor, transform, (given.args, given.kwargs))
            return Arguments(args, kwargs, given.leaves)

        return build

    def given(change: inputs.Change) -> Callable[[], Arguments]:
        return lambda: change(make_arguments(names, 2))

    def with_rows(transform: Callable[[Tensor], Tensor]) -> Callable[[], Arguments]:
        return changed(lambda tensor: transform(tensor) if tensor.dim() else tensor)

    same = arguments(2)
    special = [
        Call("grad_outs of every second output", same, nothing, _every_second),
        Call("grad_out of the last output", same, nothing, _last),
        Call("no backward", same, nothing, _none),
        Call("after a step", same, _step, every),
        Call("in the other mode", same, _flip, every),
        Call("with other parameters frozen", same, _freeze, every),
        Call("with detached arguments", changed(Tensor.detach), nothing, every),
        Call("with another batch", with_rows(lambda t: torch.cat([t, t])), nothing, every),
        Call("with other strides", with_rows(lambda t: t.movedim(0, -1).clone().movedim(-1, 0)), nothing, every),
        Call("with expanded arguments", with_rows(lambda t: t[:1].expand(t.shape)), nothing, every),
        Call("in another dtype", changed(lambda t: t.float() if t.is_floating_point() else t), nothing, every),
        Call("with non-leaf arguments", changed(lambda t: t * 1), nothing, every),
        Call("without grad", same, nothing, every, torch.no_grad),
        Call("under autocast", same, nothing, every, _autocast),
        Call("in inference mode", same, nothing, every, torch.inference_mode),
        Call("under another default dtype", same, nothing, every, _other_default_dtype),
        Call("with other parameters", same, _renew, every),
        Call("with hooks", same, _hook, every),
        Call("with hooks inside", same, _hook_inside, every),
        Call("of another dtype", same, nn.Module.double, every),
        Call("by keyword", given(inputs.by_keyword(spelled)), nothing, every),
        Call("by position", given(inputs.by_position(spelled)), nothing, every),
        Call("with other numbers in attributes", same, _renumber, every),
    ]
    rng = random.Random(program.seed + 1)
    state = [Call("with other tensors in attributes", same, _retensor, every)] * ("state" in themes(program.seed))
    strange = [
        ("with special values", inputs.special_values(rng.random()), True),
        ("with huge values", inputs.special_values(rng.random(), huge=True), True),
        ("with other indices", inputs.other_indices(rng.random()), False),
    ]
    first = Call("first call", arguments(0), nothing, every)
    second = Call("second call", arguments(1), nothing, every)
    strangely = [
        Call(name, given(change), nothing, every, special=kind, strange=True) for name, change, kind in strange
    ]
    otherwise = [
        Call(name, given(change), nothing, every)
        for name, change, shared in (
            ("with arguments of their own", inputs.of_their_own, True),
            ("with arguments of one memory", inputs.of_one_memory, False),
        )
        if inputs.share_memory(make_arguments(names, 0)) is shared
        and inputs.share_memory(change(make_arguments(names, 0))) is not shared
    ]
    chosen = rng.choice(special)
    if rng.random() < TWICE:
        otherwise.append(Call("with a second derivative", same, nothing, every, twice=True))
    return [first, second, *strangely, chosen, *otherwise, *state]
