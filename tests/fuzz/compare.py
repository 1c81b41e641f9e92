"""One call of the dispatched module beside eager: the same error, or the same numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from tests.device import DEVICE, generators
from tests.fuzz.calls import Call
from tests.fuzz.closeness import distance, finite_distance, floor, identical, kind, matches
from tests.fuzz.inputs import mapped, other_layout
from tests.fuzz.noise import Noise
from tests.fuzz.parts import PartByPart
from tests.fuzz.play import Played, copied, play
from tests.fuzz.races import Races
from tests.fuzz.reordered import Reordered
from tests.fuzz.unreached import Unreached
from tests.fuzz.unused import Unraised
from tests.fuzz.verdict import EagerRaises, Wrong, in_backward, is_lost, one_line, place, words
from tests.host_kernels import HostKernels

__all__ = ["Comparison"]

NOISE_FACTOR = 10.0
"""How many times what eager moves under noise is still rounding."""
NOISE_RUNS, MORE_RUNS = 3, 16
"""How often eager is tried under noise, and how often at most before a difference is told: a float32 sum whose gradient
is float64 moves by whole units of float32, or not at all."""
RACES = 6
"""In how many orders writes to one place are tried."""
RACE_FACTOR = 2.0
"""How many times what these move is still another order: each place has its own winner."""
HUGE_RUNS = 16
"""How often eager is tried at huge arguments under noise, and in how many orders sums are: a sine of 1e308 that three
runs leave where it was is another number in the fourth."""


class Comparison:
    """Two modules, call by call.

    Args:
        host: makes the mode in which eager's operators are the host's; ``None`` where eager's are that anyway, and
            where no kernel writes one place from several threads.

    Attributes:
        imprecise: eager's operators that differ from the host's where the dispatched module does not, and those whose
            result torch leaves undefined (:mod:`tests.fuzz.races`).
    """

    def __init__(
        self,
        eager: nn.Module,
        dispatched: nn.Module,
        host: Callable[[], HostKernels] | None = None if DEVICE.type == "cpu" else HostKernels,
    ):
        self._eager, self._dispatched, self._host = eager, dispatched, host
        self.imprecise: set[str] = set()

    def call(self, call: Call) -> bool:
        """Calls both, the dispatched one with eager's buffers. Whether both returned; ``False`` if both raised.

        Raises:
            Wrong: they differ.
            EagerRaises: a kernel of eager's failed an assertion.
            Exception: what the dispatched module raises where eager does not.
        """
        eager, dispatched = self._eager, self._dispatched
        _level(dispatched, eager)
        call.change(eager), call.change(dispatched)
        reference = copied(eager)
        want = _attempt(eager, call)
        if isinstance(want, Exception) and is_lost(want):
            raise EagerRaises from want
        left = _left(eager)
        got = _attempt(dispatched, call)
        if isinstance(want, Exception):
            return self._both_raised(reference, call, got, want, left)
        if isinstance(got, Exception):
            raise got
        self._assert_same(reference, call, got, want)
        return True

    def _both_raised(
        self, reference: nn.Module, call: Call, got: Played | Exception, want: Exception, left: list[Tensor]
    ) -> bool:
        if not isinstance(got, Exception):
            if in_backward(want):
                return True  # eager refuses its own in-place writes in the backward; a functional graph need not
            unraised = without_unused(reference, call)
            if unraised:
                _level(self._eager, self._dispatched)  # what the failing call did not write
                with Unraised(2):
                    self._assert_same(reference, call, got, unraised)
                return True
            if _is_huge(call) and _returns_reordered(reference, call):
                _level(self._eager, self._dispatched)
                return True
            raise Wrong(f"{call.name}: returned, eager raised {one_line(want)}")
        if call.twice and in_backward(got) and in_backward(want):
            return False  # which operator it is that has no second derivative is the graph's
        if type(got) is not type(want) or words(got) != words(want):
            raise Wrong(f"{call.name}: raised {one_line(got)} @ {place(got)}, eager {one_line(want)}")
        for one, other in zip(_left(self._dispatched), left, strict=True):
            if not matches("what a failing call left", one, other, call.name):
                raise Wrong(f"{call.name}: another buffer or generator after {one_line(want)}")
        return False

    def _assert_same(self, reference: nn.Module, call: Call, got: Played, want: Played) -> None:
        labels = ("structure", "requires_grad and strides", "same objects")
        for label, one, other in zip(labels, got.form, want.form, strict=True):
            if one != other:
                raise Wrong(f"{call.name}: {label}: {one}, eager's is {other}")
        if not want.spanned <= got.shared <= want.shared:
            raise Wrong(f"{call.name}: tensors that share memory: {got.shared}, eager's are {want.shared}")
        if not torch.equal(got.generator, want.generator):
            if _is_huge(call) and _draws_by_numbers(reference, call):
                return  # what overflows decides how many: a kernel's choice
            raise Wrong(f"{call.name}: the generator's state is not eager's")
        judge = _judge_kinds if call.special else _judge
        try:
            judge(_again(reference, contextlib.nullcontext), call, got, want)
        except Wrong:
            if self._host and (met := _raced(reference, call, got, want)):
                self.imprecise |= met
                return
            if not (host := self._host and self._host()):
                raise
            with host:
                exact = play(copied(reference), call)
            if not host.differing:
                raise
            judge(_again(reference, self._host), call, got, exact)
            self.imprecise |= host.differing


def _raced(reference: nn.Module, call: Call, got: Played, want: Played) -> set[str]:
    """The operators that write in no defined order, if that explains what differs; none otherwise."""
    far = _far(call, got, want)
    moved, met = dict.fromkeys(far, 0.0), set()
    for run in range(RACES):
        with Races(run) as races:
            other = play(copied(reference), call)
        met |= races.met
        for name in far:
            moved[name] = max(moved[name], distance(other.values[name], want.values[name]))
    explained = all(distance(got.values[name], want.values[name]) <= RACE_FACTOR * moved[name] for name in far)
    return met if explained else set()


Again = Callable[[Call, contextlib.AbstractContextManager], Played]
"""A call of the reference, as it was before, in a mode."""


def _again(reference: nn.Module, kernels: Callable[[], contextlib.AbstractContextManager]) -> Again:
    def again(call: Call, mode: contextlib.AbstractContextManager) -> Played:
        with mode, kernels():
            return play(copied(reference), call)

    return again


def without_unused(reference: nn.Module, call: Call) -> Played | None:
    """What eager returns if the operators that raise are left out, where nothing uses their results.

    An operator whose result nothing uses does not run in a compiled call (``docs/limits.md``), so its error goes
    unnoticed; of one that is used, two numbers as its result make two results.
    """
    runs = []
    for factor in (2, 3):
        with Unraised(factor):
            runs.append(_attempt(copied(reference), call))
    if any(isinstance(run, Exception) for run in runs):
        return None
    one, other = (run.values for run in runs)
    used = any(not identical(one[name], other[name]) for name in one)
    return None if used else runs[0]


def _returns_reordered(reference: nn.Module, call: Call) -> bool:
    """Whether eager returns in some order of its sums: what it raises of is what overflows, a kernel's choice."""
    for run in range(HUGE_RUNS):
        with Reordered(run):
            if not isinstance(_attempt(copied(reference), call), Exception):
                return True
    return False


def _draws_by_numbers(reference: nn.Module, call: Call) -> bool:
    """Whether the arguments' numbers decide how far the generator moves: ``rrelu`` draws for negative ones alone."""

    def left(seed: int) -> Tensor:
        def other(tensor: Tensor) -> Tensor:
            numbers = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
            return tensor.copy_(numbers) if tensor.is_floating_point() else tensor

        return play(copied(reference), replace(call, arguments=lambda: mapped(call.arguments(), other))).generator

    return any(not torch.equal(left(seed), left(0)) for seed in range(1, 4))


def _is_huge(call: Call) -> bool:
    return "huge" in call.name


def _attempt(module: nn.Module, call: Call) -> Played | Exception:
    try:
        return play(module, call)
    except Exception as error:  # noqa: BLE001 - what one side raises the other must raise
        return error


def _left(module: nn.Module) -> list[Tensor]:
    """What a call that raised has left behind: buffers and the generator's state."""
    return [*(buffer.detach().clone() for buffer in module.buffers()), generators()]


def _level(module: nn.Module, reference: nn.Module) -> None:
    """Gives the reference's buffers to a module: what rounding made of them in one call is no fault of the next.

    In inference mode, which alone may write a buffer that a call in it made.
    """
    with torch.inference_mode():
        for one, other in zip(module.buffers(), reference.buffers(), strict=True):
            if not torch.equal(one, other):
                one.copy_(other)


def _far(call: Call, got: Played, want: Played) -> list[str]:
    return [name for name in want.values if not matches(name, got.values[name], want.values[name], call.name)]


def _noisy(again: Again, call: Call, run: int) -> Played:
    """Eager under rounding noise; under noise that leaves ties alone where it raises, of an index in no range."""
    try:
        return again(call, Noise(run))
    except (RuntimeError, IndexError):
        return again(call, Noise(run, of_values=True))


def _judge(again: Again, call: Call, got: Played, want: Played) -> None:
    """Numbers are eager's up to a few roundings, or as far from them as eager moves under noise."""
    far = _far(call, got, want)
    if not far:
        return
    moved = dict.fromkeys(far, 0.0)
    for run in range(NOISE_RUNS):
        noisy = _noisy(again, call, run)
        for name in far:
            moved[name] = max(moved[name], distance(noisy.values[name], want.values[name]))
    for name in far:
        value, off = want.values[name], distance(got.values[name], want.values[name])
        for run in range(NOISE_RUNS, MORE_RUNS):
            if off <= NOISE_FACTOR * moved[name]:
                break
            moved[name] = max(moved[name], distance(_noisy(again, call, run).values[name], value))
        if not off <= NOISE_FACTOR * moved[name]:
            far_off = f"is off by {off:.3g}; noise moves eager by {moved[name]:.3g}"
            raise Wrong(f"{call.name}: {name} {tuple(value.shape)} {value.dtype} {far_off}")


def _judge_kinds(again: Again, call: Call, got: Played, want: Played) -> None:
    """What is finite, infinite or nan is eager's, element by element, wherever eager agrees with itself: under
    rounding noise, on other strides and where complex numbers meet real ones part by part (``parts.py``); finite
    elements differ by no more than eager's own do.

    With huge arguments also where sums are taken in another order and products are rounded before they are added
    (``reordered.py``): which partial sum overflows, and with it whether two of them cancel to ``inf - inf``, is the
    kernel's choice.

    Left open: a gradient where eager multiplies zeros by nan, if it is zero here, or what eager's is where zeros stay
    zeros (``unreached.py``); what is not finite where a huge argument overflows inside a kernel.
    """
    far = _far(call, got, want)
    if not far:
        return
    is_huge, unreached = _is_huge(call), again(call, Unreached())
    others = [_noisy(again, call, run) for run in range(HUGE_RUNS if is_huge else NOISE_RUNS)]
    try:
        others += [again(call, Reordered(run)) for run in range(HUGE_RUNS if is_huge else 0)]
    except AssertionError:
        return  # of forward itself, about what overflows: whether it raises is the kernel's choice, too
    others.append(again(call, PartByPart()))
    strided = replace(call, arguments=lambda: other_layout(call.arguments()))
    with contextlib.suppress(Exception):  # a view of those strides may be refused, an in-place write for example
        others += [again(strided, mode) for mode in (contextlib.nullcontext(), PartByPart())]
    for name in far:
        one, value = got.values[name].double(), want.values[name].double()
        alternatives = [other.values[name].double() for other in others]
        stable = torch.stack([kind(other) == kind(value) for other in alternatives]).all(0)
        moved = max(finite_distance(other, value) for other in alternatives)
        allowed = max(NOISE_FACTOR * moved, floor(want.values[name]))
        if "gradient" in name:
            reached = unreached.values[name].double()
            stable &= ~(value.isnan() & ((one == 0) | ((one - reached).abs() <= allowed)))
        if is_huge:
            stable &= value.isfinite()
        wrong = stable & (kind(one) != kind(value))
        wrong |= stable & value.isfinite() & ((one - value).abs() > allowed)
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            raise Wrong(f"{call.name}: {name} {tuple(value.shape)} at {at} is {one[at]:.6g}, eager's {value[at]:.6g}")
