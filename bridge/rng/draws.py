"""Random draws at call time: observed draws → tensors from torch's generators, in eager's order and memory layout.

Each draw is made on its device, from that device's default generator. On the CPU, compiled code (:mod:`bridge.rng.cpu`)
makes consecutive Bernoulli draws, mainly dropout masks, where it is faster and gives torch's bits. A GPU's dropout
masks come from eager's own kernel (:mod:`bridge.rng.computed`), other draws from torch. Where the program computes a
GPU's mask, or makes a GPU's draw at its place, the generator's state is returned instead (:mod:`bridge.rng.engine`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import groupby

import torch

from bridge.base.devices import HOST
from bridge.base.errors import RUN, GuardFailure, Unsupported, UnsupportedModule
from bridge.base.generators import default_generator, generator_device
from bridge.base.tensor_properties import as_parts
from bridge.base.torch_internals import VF, no_torch_function, overload_named, schema
from bridge.capture import Draw, StepMasks, with_generator
from bridge.rng import cpu as mt19937
from bridge.rng.computed import NATIVE_DROPOUT, AttentionMask, FusedDropout, FusedSteps
from bridge.rng.engine import GeneratorStates, swap_state

__all__ = ["Draws", "undo_draws"]


def undo_draws(
    before: torch.Tensor, draw_again: Callable[[torch.Generator], object], device: torch.device = HOST
) -> None:
    """Restores a device's default generator to ``before`` if it is in the state that the draws leave.

    Otherwise another thread has drawn, before, between or after them, and its numbers must not repeat. A GPU's
    generator has no accessible lock: another thread can draw between the comparison and the replacement.

    Args:
        before: the generator's state before the draws.
        draw_again: repeats the draws from a generator.
    """
    twin = torch.Generator(device)
    twin.set_state(before)
    draw_again(twin)
    after, generator = twin.get_state(), default_generator(device)
    if device == HOST:
        swap_state(after, before)
    elif VF.equal(generator.get_state(), after):
        generator.set_state(before)


_WORTH = 300
"""Number of elements of consecutive Bernoulli draws from which compiled code is faster: its call takes 3 us, torch 5 ns
per element."""

_BERNOULLI = "aten.bernoulli_.float"
_STATE = "the generator's state"

_Maker = Callable[[torch.Generator | None, Sequence[torch.Tensor]], list[torch.Tensor]]
"""(a generator, or ``None`` for torch's default one; the call's inputs) → one draw, or consecutive ones; the inputs'
addresses decide the numbers of a GPU's dropout."""


class Draws:
    """All draws of one call of a module.

    Args:
        draws: eager's draws, in order; all are made, used or not, to leave the generators in eager's state. From the
            first draw with computed parameters on, the program makes them, from the generator's state in its place.
        masks: indices of dropout masks (drawn as ``bool``).
        used: indices of the draws that the compiled code takes, in the order of its parameters.
        computed: indices of masks that the program computes, from the generator's state before each.
        device: the device of the used draws: a module on a GPU may draw on the host.

    Raises:
        UnsupportedModule: for an operator that cannot be replayed.
    """

    def __init__(
        self,
        draws: Sequence[Draw],
        masks: Sequence[int],
        used: Sequence[int],
        module_name: str,
        computed: Collection[int] = (),
        device: torch.device = HOST,
    ):
        self._makers: list[tuple[torch.device, _Maker]] = []
        self._used = tuple(used)
        self._count = len(draws)
        for index in masks:
            if draws[index].op not in (_BERNOULLI, NATIVE_DROPOUT) and not draws[index].is_attention_mask:
                raise UnsupportedModule(
                    module_name, [Unsupported(draws[index].op, module_name, "not a dropout's draw")]
                )
        self._device = device
        self._moved = {
            index
            for index, draw in enumerate(draws)
            if draw.device != device and not draw.is_placed and index not in computed
        }
        values = set(used).difference(masks)  # must have the draw's dtype
        chained = next((index for index, draw in enumerate(draws) if draw.is_computed), None)
        draws = draws[:chained]

        def kind(item: tuple[int, Draw]) -> tuple:
            index, draw = item
            return _STATE if draw.is_placed or index in computed else draw.op, draw.device

        for (op, device), group in groupby(enumerate(draws), key=kind):
            if op == _STATE:
                made = [GeneratorStates([draw for _, draw in group]).draw]
            elif op == _BERNOULLI and device == HOST:
                made = _bernoullis([(draw, index in values) for index, draw in group])
            else:
                made = [_replay(draw, module_name) for _, draw in group]
            self._makers += [(generator_device(device), maker) for maker in made]
        self._on_gpu = any(owner.type == "cuda" for owner, _ in self._makers)
        self._reads_state = bool(computed) or any(draw.is_placed for draw in draws)
        self._devices = tuple({device: None for device, _ in self._makers})
        if chained is not None:
            self._makers.append((HOST, _state))

    def __len__(self) -> int:
        return self._count

    def make(self, inputs: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Makes every draw in order, from torch's default generators, and returns the used ones.

        Args:
            inputs: module tensors and arguments of the call.

        Raises:
            GuardFailure: before any draw, under stream capture if the program takes the generator's state: replays
                would repeat the present one.
        """
        if self._reads_state:
            self._refuse_capture()
        made = [tensor for _, maker in self._makers for tensor in maker(None, inputs)]
        return [made[index] if index not in self._moved else made[index].to(self._device) for index in self._used]

    def undo(self, inputs: Sequence[torch.Tensor] = ()) -> Callable[[], None]:
        """A function that takes back the next draws with these inputs.

        Raises:
            GuardFailure: under stream capture, where the state must not be read.
        """
        self._refuse_capture()
        before = [(device, default_generator(device).get_state()) for device in self._devices]

        def take_back() -> None:
            with no_torch_function():  # a default device applies only to the user's factories
                for device, state in before:
                    undo_draws(state, partial(self._draw_again, device, inputs), device)

        return take_back

    def _refuse_capture(self) -> None:
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            raise GuardFailure(RUN, "a CUDA graph is being captured", "the generator's state is read in every call")

    def _draw_again(self, device: torch.device, inputs: Sequence[torch.Tensor], generator: torch.Generator) -> None:
        for owner, maker in self._makers:
            if owner == device:
                maker(generator, inputs)


def _state(generator: torch.Generator | None, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [(generator or torch.default_generator).get_state()]


def _bernoullis(run: list[tuple[Draw, bool]]) -> list[_Maker]:
    """Makers of consecutive Bernoulli draws, each a mask or, where flagged, a tensor of the draw's dtype."""
    masks = [mt19937.Mask(draw.shape, draw.stride, draw.args[0], draw.dtype) for draw, _ in run]
    dtypes = [draw.dtype if wanted else torch.bool for draw, wanted in run]
    one_rate = all(draw.steps is None or len({*draw.steps.kept}) == 1 for draw, _ in run)
    if one_rate and sum(mask.count for mask in masks) >= _WORTH and all(mask.dense for mask in masks):
        kernels = mt19937.compiled()
        if kernels is not None:
            make = mt19937.MaskRun(kernels, masks).draw
            return [partial(_compiled, make) if set(dtypes) == {torch.bool} else partial(_converted, make, dtypes)]
    return [
        partial(_by_torch, mask, dtype) if draw.steps is None else partial(_steps_by_torch, mask, draw.steps)
        for mask, dtype, (draw, _) in zip(masks, dtypes, run, strict=True)
    ]


def _steps_by_torch(
    mask: mt19937.Mask, steps: StepMasks, generator: torch.Generator | None, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The masks of all steps, drawn one after the other: only torch's serial rule makes them one draw."""
    whole = mask.empty()
    for row in whole:
        for part, kept in zip(row.split(steps.counts), steps.kept, strict=True):
            part.copy_(mt19937.draw_by_torch(mt19937.Mask(part.shape, (1,), kept, steps.dtype), generator))
    return [whole]


def _by_torch(
    mask: mt19937.Mask, dtype: torch.dtype, generator: torch.Generator | None, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    if dtype is torch.bool:
        return [mt19937.draw_by_torch(mask, generator)]
    drawn = VF.empty_strided(mask.shape, mask.stride, dtype=dtype)
    return [drawn.bernoulli_(mask.probability, generator=generator)]


_Compiled = Callable[[torch.Generator | None], list[torch.Tensor]]


def _compiled(make: _Compiled, generator: torch.Generator | None, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return make(generator)


def _converted(
    make: _Compiled, dtypes: list[torch.dtype], generator: torch.Generator | None, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    return [mask.to(dtype) for mask, dtype in zip(make(generator), dtypes, strict=True)]


def _value(
    draw: Draw,
    operator: Callable[..., torch.Tensor],
    takes_tensor: bool,
    generator: torch.Generator | None,
    inputs: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    kwargs = dict(draw.kwargs)
    if generator is not None:
        operator, kwargs["generator"] = with_generator(operator), generator
    if not takes_tensor:
        return [as_parts(operator(*draw.args, **kwargs))]
    filled = VF.empty_strided(draw.shape, draw.stride, dtype=draw.dtype, device=draw.device)
    return [as_parts(operator(filled, *draw.args, **kwargs))]


def _replay(draw: Draw, module_name: str) -> _Maker:
    if draw.op == NATIVE_DROPOUT:
        return FusedDropout(draw).draw
    if draw.steps is not None:
        return FusedSteps(draw).draw
    if draw.is_attention_mask:
        return AttentionMask(draw).draw
    operator = overload_named(draw.op)
    first = schema(operator).arguments[0]
    takes_tensor = str(first.type) == "Tensor"
    if len(schema(operator).returns) != 1 or with_generator(operator) is None:
        raise UnsupportedModule(module_name, [Unsupported(draw.op, module_name, "a draw that cannot be replayed")])
    return partial(_value, draw, operator, takes_tensor)
