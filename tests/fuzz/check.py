"""One random module under dispatch beside eager: same numbers, or a refusal, or a miss, each with a reason."""

from __future__ import annotations

import copy
import functools
import random
import re
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from partition import MinCut
from tests.device import generators, set_generators
from tests.fuzz.calls import Call, calls_of, every, nothing
from tests.fuzz.inputs import other_layout
from tests.fuzz.noise import Noise
from tests.fuzz.play import Played, play
from tests.fuzz.program import Arguments, Program, make_arguments, make_module
from tests.fuzz.reordered import Reordered
from tests.fuzz.unused import Unraised

__all__ = ["PARTITIONS", "Verdict", "Wrong", "check", "judge", "undisturbed"]

FLOOR_ULPS = 64
"""Rounding units of a tensor's largest element that are always allowed."""
NOISE_FACTOR = 10.0
"""How many times what eager moves under noise is still rounding."""
NOISE_RUNS = 3
REORDERED_RUNS = 4
"""In how many orders sums at huge arguments are tried."""


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


class Wrong(AssertionError):
    """A difference from eager."""


class _EagerRaises(Exception):
    """A sample that eager refuses at the generator's state of that moment: an index that is drawn, for example."""


def undisturbed(judge: Callable[..., Verdict]) -> Callable[..., Verdict]:
    """A judge that leaves torch's generator alone and is not disturbed by advice."""

    @functools.wraps(judge)
    def judged(program: Program, **options: Any) -> Verdict:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            generator = generators()
            try:
                return judge(program, **options)
            finally:
                set_generators(generator)

    return judged


@undisturbed
def check(program: Program) -> Verdict:
    """Runs a program eager and dispatched and compares: twice as the sample, then in ways that the seed chooses."""
    names = program.load()
    rng = random.Random(program.seed)
    options = {"partition": rng.choice(PARTITIONS), "on_miss": rng.choice(ON_MISS)}
    try:
        play(make_module(names), Call("eager", lambda: make_arguments(names, 0), nothing, every))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # eager may refuse the backward
        return Verdict("skipped", f"eager: {_one_line(error)}")
    return judge(names, lambda: calls_of(program, names), options)


def judge(
    names: Mapping[str, Any],
    calls: Callable[[], Sequence[Call]],
    options: Mapping[str, Any],
    look: Callable[[nn.Module, Call], None] | None = None,
) -> Verdict:
    """Dispatches a loaded program's module by the sample call, with options, and compares calls with eager.

    ``look``: called after each call that returned, may raise :class:`Wrong`.
    """
    eager, dispatched = make_module(names), make_module(names)
    try:
        _add(dispatched, make_arguments(names, 0), options)
        made, done = calls(), 0
        for call in made:
            _level(dispatched, eager)
            call.change(eager), call.change(dispatched)
            done += _compare(eager, dispatched, call)
            if look is not None:
                look(dispatched, call)
    except _EagerRaises as skip:
        return Verdict("skipped", f"eager: {_one_line(skip.__cause__)}")
    except UnsupportedModule as refusal:
        if not refusal.ops or not all(op.op and op.reason and op.where for op in refusal.ops):
            return Verdict("wrong", f"a refusal without a reason: {refusal}")
        return Verdict("refused", "; ".join(f"{op.op}: {op.reason}" for op in refusal.ops)[:300])
    except Wrong as difference:
        return Verdict("wrong", _one_line(difference))
    except Exception as error:  # noqa: BLE001 - any other exception is a bug, and listing them is the job
        return Verdict("crash", f"{_one_line(error)} @ {_place(error)}")
    counted = stats(dispatched)
    if not done <= counted.hits + counted.misses.total() <= len(made):
        return Verdict("wrong", f"{done} of {len(made)} calls returned, {counted}")
    if not counted.hits:
        return Verdict("missed", "; ".join(counted.misses))
    return Verdict("same", "; ".join(counted.misses))


DISPATCH_STATE = ("_compiled_call_impl", "_forward_hooks_with_kwargs")
"""Attributes of every module in which a dispatch is noted."""
PARTITIONS = ("min_cut", "min_cut", "min_cut", "save_all", "recompute_all", MinCut(budget=0.3))
ON_MISS = ("eager", "eager", "compile")


def _add(module: nn.Module, arguments: Arguments, options: Mapping[str, Any]) -> None:
    """Adds the dispatch and checks that, successful or not, it leaves no trace."""
    before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    attributes = {path: _attributes(child) for path, child in module.named_modules()}
    torch.manual_seed(11)
    generator = generators()
    versions = [leaf._version for leaf in arguments.leaves]
    try:
        add_tvm_dispatch(module, arguments.args, sample_kwargs=arguments.kwargs, **options)
    except Exception as error:
        if not isinstance(error, UnsupportedModule) and _raises_alike(module, arguments, generator, error):
            raise _EagerRaises from error
        raise
    finally:
        after = module.state_dict()
        if after.keys() != before.keys() or not all(_identical(after[name], before[name]) for name in before):
            raise Wrong("add_tvm_dispatch changed a parameter or a buffer")
        if {path: _attributes(child) for path, child in module.named_modules()} != attributes:
            raise Wrong("add_tvm_dispatch changed an attribute")
        if not torch.equal(generators(), generator):
            raise Wrong("add_tvm_dispatch moved the generator")
        if [leaf._version for leaf in arguments.leaves] != versions or any(
            x.grad is not None for x in arguments.leaves
        ):
            raise Wrong("add_tvm_dispatch changed its sample")


def _raises_alike(module: nn.Module, arguments: Arguments, generator: Tensor, error: Exception) -> bool:
    """Whether eager raises the same at a state of the generator, which is left at that state."""
    torch.set_rng_state(generator)
    try:
        _copied(module)(*arguments.args, **arguments.kwargs)
    except Exception as own:  # noqa: BLE001 - whatever it is, it is compared
        return type(own) is type(error) and _words(own) == _words(error)
    finally:
        torch.set_rng_state(generator)
    return False


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Its attributes: objects by identity, containers and plain values by what they hold (tracing renews them)."""
    return {name: _key(value) for name, value in module.__dict__.items() if name not in DISPATCH_STATE}


def _key(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value), [_key(item) for item in value]
    return (type(value), value) if isinstance(value, bool | int | float | str) else id(value)


def _attempt(module: nn.Module, call: Call) -> Played | Exception:
    try:
        return play(module, call)
    except Exception as error:  # noqa: BLE001 - what one side raises the other must raise
        return error


def _left(module: nn.Module) -> list[Tensor]:
    """What a call that raised has left behind: buffers and the generator's state."""
    return [*(buffer.detach().clone() for buffer in module.buffers()), generators()]


def _level(module: nn.Module, reference: nn.Module) -> None:
    """Gives the reference's buffers to a module: what rounding made of them in one call is no fault of the next."""
    with torch.no_grad():
        for one, other in zip(module.buffers(), reference.buffers(), strict=True):
            if not torch.equal(one, other):
                one.copy_(other)


def _copied(module: nn.Module) -> nn.Module:
    """A copy; what ``weight_norm`` and its kin have computed, which no copy takes along, is computed anew by a call."""
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                vars(part)[name] = value.detach()
    return copy.deepcopy(module)


def _compare(eager: nn.Module, dispatched: nn.Module, call: Call) -> bool:
    """Whether both returned, and the same; ``False`` if both raised the same."""
    reference = _copied(eager)
    want = _attempt(eager, call)
    left = _left(eager)
    got = _attempt(dispatched, call)
    if isinstance(want, Exception):
        if not isinstance(got, Exception):
            if _in_backward(want):
                return True  # eager refuses its own in-place writes in the backward; a functional graph need not
            unraised = _unraised(reference, call)
            if unraised:
                _level(eager, dispatched)  # what the failing call did not write
                with Unraised(2):
                    _assert_same(reference, call, got, unraised)
                return True
            raise Wrong(f"{call.name}: returned, eager raised {_one_line(want)}")
        if type(got) is not type(want) or _words(got) != _words(want):
            raise Wrong(f"{call.name}: raised {_one_line(got)} @ {_place(got)}, eager {_one_line(want)}")
        for one, other in zip(_left(dispatched), left, strict=True):
            if not _matches("what a failing call left", one, other, call.name):
                raise Wrong(f"{call.name}: another buffer or generator after {_one_line(want)}")
        return False
    if isinstance(got, Exception):
        raise got
    _assert_same(reference, call, got, want)
    return True


def _unraised(reference: nn.Module, call: Call) -> Played | None:
    """What eager returns if the operators that raise are left out, where nothing uses their results.

    An operator whose result nothing uses does not run in a compiled call (``docs/limits.md``), so its error goes
    unnoticed; of one that is used, two numbers as its result make two results.
    """
    runs = []
    for factor in (2, 3):
        with Unraised(factor):
            runs.append(_attempt(_copied(reference), call))
    if any(isinstance(run, Exception) for run in runs):
        return None
    one, other = (run.values for run in runs)
    used = any(not _identical(one[name], other[name]) for name in one)
    return None if used else runs[0]


def _assert_same(reference: nn.Module, call: Call, got: Played, want: Played) -> None:
    labels = ("structure", "requires_grad and strides", "same objects")
    for label, one, other in zip(labels, got.form, want.form, strict=True):
        if one != other:
            raise Wrong(f"{call.name}: {label}: {one}, eager's is {other}")
    if not want.spanned <= got.shared <= want.shared:
        raise Wrong(f"{call.name}: tensors that share memory: {got.shared}, eager's are {want.shared}")
    if not torch.equal(got.generator, want.generator):
        raise Wrong(f"{call.name}: the generator's state is not eager's")
    far = [name for name in want.values if not _matches(name, got.values[name], want.values[name], call.name)]
    if not far:
        return
    if call.special:
        _assert_same_kinds(reference, call, got, want, far)
        return
    moved = dict.fromkeys(far, 0.0)
    for run in range(NOISE_RUNS):
        with Noise(run):
            noisy = play(_copied(reference), call)
        for name in far:
            moved[name] = max(moved[name], _distance(noisy.values[name], want.values[name]))
    for name in far:
        value, distance = want.values[name], _distance(got.values[name], want.values[name])
        if not distance <= NOISE_FACTOR * moved[name]:
            far_off = f"is off by {distance:.3g}; noise moves eager by {moved[name]:.3g}"
            raise Wrong(f"{call.name}: {name} {tuple(value.shape)} {value.dtype} {far_off}")


def _assert_same_kinds(reference: nn.Module, call: Call, got: Played, want: Played, far: list[str]) -> None:
    """What is finite, infinite or nan is eager's, element by element, wherever eager agrees with itself: under
    rounding noise and on other strides; finite elements differ by no more than eager's own do. With huge arguments
    also where sums are taken in another order and products are rounded before they are added (``reordered.py``): which
    partial sum overflows, and with it whether two of them cancel to ``inf - inf``, is the kernel's choice.

    Left open: a gradient that is exactly zero here (what an output does not depend on) where eager multiplies zeros by
    nan; what is not finite where a huge argument overflows inside a kernel.
    """
    others = []
    for run in range(NOISE_RUNS):
        with Noise(run):
            others.append(play(_copied(reference), call))
    for run in range(REORDERED_RUNS if "huge" in call.name else 0):
        with Reordered(run):
            others.append(play(_copied(reference), call))
    strided = _attempt(_copied(reference), replace(call, arguments=lambda: other_layout(call.arguments())))
    if isinstance(strided, Played):  # a view of those strides may be refused, an in-place write for example
        others.append(strided)
    for name in far:
        one, value = got.values[name].double(), want.values[name].double()
        alternatives = [other.values[name].double() for other in others]
        stable = torch.stack([_kind(other) == _kind(value) for other in alternatives]).all(0)
        if "gradient" in name:
            stable &= ~(value.isnan() & (one == 0))
        if "huge" in call.name:
            stable &= value.isfinite()
        wrong = stable & (_kind(one) != _kind(value))
        moved = max(_finite_distance(other, value) for other in alternatives)
        floats = want.values[name].is_floating_point()
        floor = FLOOR_ULPS * torch.finfo(want.values[name].dtype).eps * _largest(value) if floats else 0.0
        allowed = max(NOISE_FACTOR * moved, floor)
        wrong |= stable & value.isfinite() & ((one - value).abs() > allowed)
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            raise Wrong(f"{call.name}: {name} {tuple(value.shape)} at {at} is {one[at]:.6g}, eager's {value[at]:.6g}")


def _kind(value: Tensor) -> Tensor:
    """0 finite, 1 and -1 infinite, 2 nan."""
    return torch.where(value.isnan(), 2, torch.where(value.isinf(), value.sign(), 0)).nan_to_num().to(torch.int8)


def _finite_distance(one: Tensor, other: Tensor) -> float:
    distance = (one - other).abs()[one.isfinite() & other.isfinite()]
    return float(distance.max()) if distance.numel() else 0.0


def _largest(value: Tensor) -> float:
    finite = value[value.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


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
    return _distance(got, want) <= FLOOR_ULPS * torch.finfo(want.dtype).eps * _largest(want.double())


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


def _words(error: BaseException) -> str:
    """Its words without addresses."""
    return re.sub(r"0x[0-9a-f]+", "0x", str(error))


def _in_backward(error: BaseException) -> bool:
    return any("autograd" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{'/'.join(frames[-1].filename.split('/')[-2:])}:{frames[-1].lineno}" if frames else "unknown place"
