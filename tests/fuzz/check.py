"""One random module under dispatch beside eager: same numbers, or a refusal, or a miss, each with a reason."""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.fuzz.noise import Noise
from tests.fuzz.program import Arguments, Program, make_arguments, make_module

__all__ = ["Verdict", "check"]

FLOOR_ULPS = 64
"""Rounding units of a tensor's largest element that are always allowed."""
NOISE_FACTOR = 10.0
"""How many times what eager moves under noise is still rounding."""
NOISE_RUNS = 3


@dataclass(frozen=True)
class Verdict:
    """What became of one program.

    Attributes:
        status: ``"same"``, ``"refused"``, ``"missed"`` (nothing was dispatched), ``"skipped"`` (eager itself raises),
            ``"wrong"`` or ``"crash"``.
        detail: one line: the reason, or the difference.
    """

    status: str
    detail: str = ""

    @property
    def is_bug(self) -> bool:
        return self.status in ("wrong", "crash")


@dataclass(frozen=True)
class Played:
    """What one call left behind: a name for everything that can be compared, and what the caller cannot see."""

    values: Mapping[str, Any]
    form: tuple
    generator: Tensor


class Wrong(AssertionError):
    """A difference from eager."""


def check(program: Program) -> Verdict:
    """Runs a program eager and dispatched and compares: twice as the sample, then in a way that the seed chooses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generator = torch.get_rng_state()
        try:
            return _check(program)
        finally:
            torch.set_rng_state(generator)


def _check(program: Program) -> Verdict:
    names = program.load()
    eager = make_module(names)
    try:
        play(copy.deepcopy(eager), make_arguments(names, 0), seed=0)
    except Exception as error:  # noqa: BLE001 - the generator proposes freely: eager may refuse the backward
        return Verdict("skipped", f"eager: {_one_line(error)}")
    dispatched = make_module(names)
    try:
        _add(dispatched, make_arguments(names, 0))
        calls = _calls(program, names)
        for describe, change, call, outputs in calls:
            change(eager), change(dispatched)
            _compare(eager, dispatched, call, outputs, describe)
    except UnsupportedModule as refusal:
        if not refusal.ops or not all(op.op and op.reason and op.where for op in refusal.ops):
            return Verdict("wrong", f"a refusal without a reason: {refusal}")
        return Verdict("refused", "; ".join(f"{op.op}: {op.reason}" for op in refusal.ops)[:300])
    except Wrong as difference:
        return Verdict("wrong", _one_line(difference))
    except Exception as error:  # noqa: BLE001 - any other exception is a bug, and listing them is the job
        return Verdict("crash", f"{_one_line(error)} @ {_place(error)}")
    counted = stats(dispatched)
    if counted.hits + counted.misses.total() != len(calls):
        return Verdict("wrong", f"{len(calls)} calls, {counted}")
    if not counted.hits:
        return Verdict("missed", "; ".join(counted.misses))
    return Verdict("same", "; ".join(counted.misses))


def _add(module: nn.Module, arguments: Arguments) -> None:
    """Adds the dispatch and checks that, successful or not, it leaves no trace."""
    before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    attributes = {path: _attributes(child) for path, child in module.named_modules()}
    torch.manual_seed(11)
    generator = torch.get_rng_state()
    versions = [leaf._version for leaf in arguments.leaves]
    try:
        add_tvm_dispatch(module, arguments.args, sample_kwargs=arguments.kwargs)
    finally:
        after = module.state_dict()
        if after.keys() != before.keys() or not all(_identical(after[name], before[name]) for name in before):
            raise Wrong("add_tvm_dispatch changed a parameter or a buffer")
        if {path: _attributes(child) for path, child in module.named_modules()} != attributes:
            raise Wrong("add_tvm_dispatch changed an attribute")
        if not torch.equal(torch.get_rng_state(), generator):
            raise Wrong("add_tvm_dispatch moved the generator")
        if [leaf._version for leaf in arguments.leaves] != versions or any(
            x.grad is not None for x in arguments.leaves
        ):
            raise Wrong("add_tvm_dispatch changed its sample")


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Its attributes: objects by identity, containers and plain values by what they hold (tracing renews them)."""
    return {name: _key(value) for name, value in module.__dict__.items() if name != "_compiled_call_impl"}


def _key(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value), [_key(item) for item in value]
    return (type(value), value) if isinstance(value, bool | int | float | str) else id(value)


Call = Callable[[], Arguments]
Calls = list[tuple[str, Callable[[nn.Module], Any], Call, Callable[[int], list[bool]]]]


def _nothing(module: nn.Module) -> None:
    pass


def _every(count: int) -> list[bool]:
    return [True] * count


def _calls(program: Program, names: Mapping[str, Any]) -> Calls:
    """``(name, change of the module, arguments, which outputs get a grad_out)`` of each call."""

    def arguments(seed: int) -> Call:
        return lambda: make_arguments(names, seed)

    def step(module: nn.Module) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.9).add_(0.01)

    def flip(module: nn.Module) -> None:
        module.train(not module.training)

    def freeze(module: nn.Module) -> None:
        for parameter in list(module.parameters())[::2]:
            parameter.requires_grad_(not parameter.requires_grad)

    def changed(transform: Callable[[Tensor], Tensor]) -> Call:
        def build() -> Arguments:
            given = make_arguments(names, 3)
            args, kwargs = pytree.tree_map_only(Tensor, transform, (given.args, given.kwargs))
            return Arguments(args, kwargs, given.leaves)

        return build

    special: Calls = [
        ("grad_outs of every second output", _nothing, arguments(2), lambda count: [i % 2 == 0 for i in range(count)]),
        ("grad_out of the last output", _nothing, arguments(2), lambda count: [i == count - 1 for i in range(count)]),
        ("no backward", _nothing, arguments(2), lambda count: [False] * count),
        ("after a step", step, arguments(2), _every),
        ("in the other mode", flip, arguments(2), _every),
        ("with other parameters frozen", freeze, arguments(2), _every),
        ("with detached arguments", _nothing, changed(lambda t: t.detach()), _every),
        ("with another batch", _nothing, changed(lambda t: torch.cat([t, t]) if t.dim() else t), _every),
        (
            "with other strides",
            _nothing,
            changed(lambda t: t.movedim(0, -1).clone().movedim(-1, 0) if t.dim() else t),
            _every,
        ),
        ("with expanded arguments", _nothing, changed(lambda t: t[:1].expand(t.shape) if t.dim() else t), _every),
        ("in another dtype", _nothing, changed(lambda t: t.float() if t.is_floating_point() else t), _every),
        ("with non-leaf arguments", _nothing, changed(lambda t: t * 1), _every),
    ]
    chosen = special[program.seed % len(special)]
    return [("first call", _nothing, arguments(0), _every), ("second call", _nothing, arguments(1), _every), chosen]


def play(
    module: nn.Module, arguments: Arguments, *, seed: int, outputs: Callable[[int], list[bool]] = _every
) -> Played:
    """One forward and one backward, with grad_outs of the differentiable outputs that ``outputs`` chooses."""
    for parameter in module.parameters():
        parameter.grad = None
    torch.manual_seed(seed)
    result = module(*arguments.args, **arguments.kwargs)
    generator = torch.get_rng_state()
    leaves, spec = pytree.tree_flatten(result)
    values: dict[str, Any] = {f"output {i}": _copy(leaf) for i, leaf in enumerate(leaves)}
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    needs = tuple(leaf.requires_grad for leaf in tensors)
    objects = [*pytree.tree_leaves((arguments.args, arguments.kwargs)), *leaves]
    same = tuple(next(i for i, other in enumerate(objects) if other is leaf) for leaf in leaves)
    shared = tuple(_shares(leaf, objects) for leaf in tensors if leaf.numel())
    wanted = [
        leaf for leaf, chosen in zip(tensors, outputs(len(tensors)), strict=True) if chosen and leaf.requires_grad
    ]
    if wanted:
        torch.autograd.backward(wanted, _cotangents(wanted, seed))
    values |= {f"gradient of {name}": _copy(p.grad) for name, p in module.named_parameters()}
    values |= {f"gradient of argument {i}": _copy(leaf.grad) for i, leaf in enumerate(arguments.leaves)}
    values |= {f"buffer {name}": _copy(buffer) for name, buffer in module.named_buffers()}
    return Played(values, (spec, needs, same, shared), generator)


def _shares(tensor: Tensor, others: list[Any]) -> int:
    """The first tensor with the same memory: a caller who writes into one sees it in the other."""
    storage = tensor.untyped_storage()._cdata
    return next(i for i, t in enumerate(others) if isinstance(t, Tensor) and t.untyped_storage()._cdata == storage)


def _cotangents(outputs: list[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    return [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in outputs]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _attempt(*args: Any, **kwargs: Any) -> Played | Exception:
    try:
        return play(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - what one side raises the other must raise
        return error


def _compare(eager: nn.Module, dispatched: nn.Module, call: Call, outputs: Any, where: str) -> None:
    reference = copy.deepcopy(eager)
    want = _attempt(eager, call(), seed=5, outputs=outputs)
    got = _attempt(dispatched, call(), seed=5, outputs=outputs)
    if isinstance(want, Exception):
        if not isinstance(got, Exception):
            return  # eager refuses its own in-place writes in the backward; a functional graph need not
        if type(got) is not type(want):
            raise Wrong(f"{where}: raised {_one_line(got)} @ {_place(got)}, eager {_one_line(want)}")
        return
    if isinstance(got, Exception):
        raise got
    _assert_same(reference, call, outputs, got, want, where)


def _assert_same(reference: nn.Module, call: Call, outputs: Any, got: Played, want: Played, where: str) -> None:
    labels = ("structure", "requires_grad", "same objects", "shared memory")
    for label, one, other in zip(labels, got.form, want.form, strict=True):
        if one != other:
            raise Wrong(f"{where}: {label}: {one}, eager's is {other}")
    if not torch.equal(got.generator, want.generator):
        raise Wrong(f"{where}: the generator's state is not eager's")
    far = [name for name in want.values if not _matches(name, got.values[name], want.values[name], where)]
    if not far:
        return
    moved = dict.fromkeys(far, 0.0)
    for run in range(NOISE_RUNS):
        with Noise(run):
            noisy = play(copy.deepcopy(reference), call(), seed=5, outputs=outputs)
        for name in far:
            moved[name] = max(moved[name], _distance(noisy.values[name], want.values[name]))
    for name in far:
        distance = _distance(got.values[name], want.values[name])
        if not distance <= NOISE_FACTOR * moved[name]:
            shape, dtype = tuple(want.values[name].shape), want.values[name].dtype
            raise Wrong(
                f"{where}: {name} {shape} {dtype} is off by {distance:.3g}; noise moves eager by {moved[name]:.3g}"
            )


def _matches(name: str, got: Any, want: Any, where: str) -> bool:
    """Whether two values agree up to a few roundings. Anything but numbers must agree exactly."""
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        if type(got) is not type(want) or (want is not None and got != want):
            raise Wrong(f"{where}: {name} is {_brief(got)}, eager's is {_brief(want)}")
        return True
    if got.shape != want.shape or got.dtype != want.dtype:
        raise Wrong(f"{where}: {name} is {_brief(got)}, eager's is {_brief(want)}")
    if not want.is_floating_point():
        return torch.equal(got, want)
    finite = want[want.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return _distance(got, want) <= FLOOR_ULPS * torch.finfo(want.dtype).eps * largest


def _distance(got: Tensor, want: Tensor) -> float:
    """The largest difference, in float64; infinite where one is finite and the other is not."""
    got, want = got.double(), want.double()
    same = (got == want) | (got.isnan() & want.isnan())
    difference = torch.where(same, 0.0, (got - want).abs())
    if not difference.numel():
        return 0.0
    return float(difference.nan_to_num(nan=float("inf")).max())


def _identical(one: Any, other: Any) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num()) if isinstance(one, Tensor) else one == other


def _brief(value: Any) -> str:
    return f"a tensor {tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else repr(value)


def _one_line(error: BaseException, limit: int = 300) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:limit]


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{'/'.join(frames[-1].filename.split('/')[-2:])}:{frames[-1].lineno}" if frames else "unknown place"
