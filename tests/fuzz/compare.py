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
from tests.fuzz.written_out import written_out
from tests.host_kernels import HostKernels

NOISE_FACTOR = 10.0
"""Allowed distance, in multiples of eager's change under noise."""
NOISE_RUNS, MORE_RUNS = 3, 16
"""Runs of eager under noise, and the most before a difference is reported: a float32 sum with a float64 gradient moves
by whole units of float32, or not at all."""
RACES = 6
"""Orders of racing writes that are tried."""
RACE_FACTOR = 2.0
"""Allowed distance, in multiples of eager's change in other orders: each place has its own winner."""
HUGE_RUNS = 16
"""Runs of eager at huge arguments under noise, and orders of sums: a sine of 1e308 may stay the same in three runs and
change in the fourth."""


class Comparison:
    """Two modules, call by call.

    Args:
        host: makes the mode in which eager's operators are the host's; ``None`` where they are anyway, and where no
            kernel writes one place from several threads.

    Attributes:
        imprecise: eager's operators that differ from the host's where the dispatched module does not, and operators
            with undefined results in torch (:mod:`tests.fuzz.races`).
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
        """Calls both modules, the dispatched one with eager's buffers; returns whether both returned (or both raised).

        Raises:
            Wrong: they differ.
            EagerRaises: a kernel of eager's failed an assertion.
            Exception: an error of the dispatched module alone.
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
        if "FakeTensor" in words(want):
            raise Wrong(f"{call.name}: a cache of eager's holds fake tensors: {one_line(want)}")
        if not isinstance(got, Exception):
            if in_backward(want):
                return True  # eager refuses its own in-place writes in the backward; a functional graph need not
            unraised = without_unused(reference, call)
            if unraised:
                _level(self._eager, self._dispatched)  # buffers that the failing call did not write
                with Unraised(2):
                    self._assert_same(reference, call, got, unraised)
                return True
            if _is_huge(call) and _returns_reordered(reference, call):
                _level(self._eager, self._dispatched)
                return True
            raise Wrong(f"{call.name}: returned, eager raised {one_line(want)}")
        if call.twice and in_backward(got) and in_backward(want):
            return False  # the graph decides which operator without a second derivative comes first
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
                return  # overflow, a kernel's choice, decides the number of draws
            raise Wrong(f"{call.name}: the generator's state is not eager's")
        judge, kernels = _judge_kinds if call.special else _judge, contextlib.nullcontext
        if call.twice and {each for each in _far(call, got, want) if "second gradient" in each}:
            exact, kernels = _again(reference, written_out)(call, contextlib.nullcontext()), written_out
            want = replace(
                want, values={name: (exact if "second gradient" in name else want).values[name] for name in want.values}
            )
        try:
            judge(_again(reference, kernels), call, got, want)
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
    """The operators with an undefined order of writes, if they explain the differences; otherwise none."""
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
"""(a call, a mode) → the call of the reference, in its earlier state, in the mode."""


def _again(reference: nn.Module, kernels: Callable[[], contextlib.AbstractContextManager]) -> Again:
    def again(call: Call, mode: contextlib.AbstractContextManager) -> Played:
        with mode, kernels():
            return play(copied(reference), call)

    return again


def _shape(value: Tensor | None) -> torch.Size | None:
    return None if value is None else value.shape


def without_unused(reference: nn.Module, call: Call) -> Played | None:
    """Eager's results without raising operators, where nothing uses their results; ``None`` otherwise.

    A compiled call does not run an operator with an unused result (``docs/limits.md``), so its error goes unnoticed.
    Two runs with different numbers in its place tell whether it is used.
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
    """Whether eager returns in some order of its sums: then an overflow, a kernel's choice, decides its error."""
    for run in range(HUGE_RUNS):
        with Reordered(run):
            if not isinstance(_attempt(copied(reference), call), Exception):
                return True
    return False


def _draws_by_numbers(reference: nn.Module, call: Call) -> bool:
    """Whether the arguments' numbers decide the generator's advance: ``rrelu`` draws only for negative ones."""

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
    except Exception as error:  # noqa: BLE001 - the other side must raise it as well
        return error


def _left(module: nn.Module) -> list[Tensor]:
    """The state after a failed call: buffers and the generator's state."""
    return [*(buffer.detach().clone() for buffer in module.buffers()), generators()]


def _level(module: nn.Module, reference: nn.Module) -> None:
    """Copies the reference's buffers into a module, so that rounding in one call does not affect the next.

    In inference mode, since only it may write buffers that were made in it.
    """
    with torch.inference_mode():
        for one, other in zip(module.buffers(), reference.buffers(), strict=True):
            if not torch.equal(one, other):
                one.copy_(other)


def _far(call: Call, got: Played, want: Played) -> list[str]:
    return [name for name in want.values if not matches(name, got.values[name], want.values[name], call.name)]


def _noisy(again: Again, call: Call, run: int) -> Played:
    """Eager under rounding noise; where that raises (an index out of range), under noise that keeps ties."""
    try:
        return again(call, Noise(run))
    except (RuntimeError, IndexError):
        return again(call, Noise(run, of_values=True))


def _judge(again: Again, call: Call, got: Played, want: Played) -> None:
    """Raises :class:`Wrong` unless numbers are eager's up to a few roundings, or within eager's change under noise."""
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
    """Compares finite, infinite and nan elements one by one, wherever eager agrees with itself: under rounding noise,
    with other strides, and with mixed real and complex operators applied part by part (``parts.py``). Finite elements
    may differ by eager's own variation.

    With huge arguments, eager's variants also include other orders of sums and products rounded before their sum
    (``reordered.py``): the kernel decides which partial sum overflows, and so whether ``inf - inf`` occurs.

    Not compared: a gradient where eager multiplies zeros by nan, if it is zero here or eager's number with zeros kept
    (``unreached.py``); non-finite elements where a huge argument overflows inside a kernel.
    """
    far = _far(call, got, want)
    if not far:
        return
    is_huge, unreached = _is_huge(call), again(call, Unreached())
    others = [_noisy(again, call, run) for run in range(HUGE_RUNS if is_huge else NOISE_RUNS)]
    try:
        others += [again(call, Reordered(run)) for run in range(HUGE_RUNS if is_huge else 0)]
    except AssertionError:
        return  # an assertion of forward about overflowed values: it depends on the kernel as well
    others.append(again(call, PartByPart()))
    strided = replace(call, arguments=lambda: other_layout(call.arguments()))
    with contextlib.suppress(Exception):  # some strides may be refused, for example by an in-place write
        others += [again(strided, mode) for mode in (contextlib.nullcontext(), PartByPart())]
    for name in far:
        pair = got.values[name].double(), want.values[name].double(), floor(want.values[name])
        kept = unreached.values[name] if "gradient" in name else None
        at = _differs(*pair, kept, [other.values[name] for other in others], is_huge)
        if at is not None and not is_huge:
            others += [_noisy(again, call, run) for run in range(len(others), MORE_RUNS)]
            at = _differs(*pair, kept, [other.values[name] for other in others], is_huge)
        if at is not None:
            one, value = (each[at] for each in pair[:2])
            raise Wrong(f"{call.name}: {name} {tuple(pair[1].shape)} at {at} is {one:.6g}, eager's {value:.6g}")


def _differs(
    one: Tensor, value: Tensor, least: float, kept: Tensor | None, others: list[Tensor | None], is_huge: bool
) -> tuple[int, ...] | None:
    """The place of an element that differs from eager's by more than eager's variants do, or ``None``.

    Args:
        least: a distance that is always allowed. ``kept``: of a gradient, eager's with zeros kept.
    """
    alternatives = [other.double() for other in others if _shape(other) == value.shape]
    if not alternatives or (is_huge and len(alternatives) < len(others)):
        return None  # noise changes its shape: eager's numbers are none to compare with
    stable = torch.stack([kind(other) == kind(value) for other in alternatives]).all(0)
    allowed = max(NOISE_FACTOR * max(finite_distance(other, value) for other in alternatives), least)
    if kept is not None and kept.shape == value.shape:
        stable &= ~(value.isnan() & ((one == 0) | ((one - kept.double()).abs() <= allowed)))
    if is_huge:
        stable &= value.isfinite()
    wrong = stable & (kind(one) != kind(value))
    wrong |= stable & value.isfinite() & ((one - value).abs() > allowed)
    return tuple(wrong.nonzero()[0].tolist()) if wrong.any() else None
