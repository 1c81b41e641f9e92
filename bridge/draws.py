"""Random draws at call time: made by torch, from its generator, in eager's order and in eager's memory layout.

A draw is an object of its own (:class:`bridge.witness.Draw`), so that another device can later recompute the same
bits from the generator's recorded state instead of storing them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from bridge.errors import Unsupported, UnsupportedModule
from bridge.witness import Draw

__all__ = ["Draws"]


def _mask(draw: Draw) -> torch.Tensor:
    # the bits of bernoulli_ do not depend on the dtype, so a mask can be drawn as one byte per element
    return torch.empty_strided(draw.shape, draw.stride, dtype=torch.bool).bernoulli_(draw.args[0])


def _value(draw: Draw, operator: Callable[..., torch.Tensor], takes_tensor: bool) -> torch.Tensor:
    kwargs = dict(draw.kwargs)
    if not takes_tensor:
        return operator(*draw.args, **kwargs)
    return operator(torch.empty_strided(draw.shape, draw.stride, dtype=draw.dtype), *draw.args, **kwargs)


class Draws:
    """All draws of one call of a module.

    Args:
        draws: what eager draws, in order; all of them are made, used or not, to leave the generator in eager's state.
        masks: indices of those that are dropout masks (drawn as ``bool``).
        used: indices of the draws that the compiled code takes, in the order of its parameters.

    Raises:
        UnsupportedModule: for an operator that cannot be replayed.
    """

    def __init__(self, draws: Sequence[Draw], masks: Sequence[int], used: Sequence[int], module_name: str):
        self._makers: list[Callable[[], torch.Tensor]] = []
        self._used = tuple(used)
        for index, draw in enumerate(draws):
            if index in masks:
                if draw.op != "aten.bernoulli_.float":
                    raise UnsupportedModule(module_name, [Unsupported(draw.op, module_name, "not a dropout's draw")])
                self._makers.append(partial(_mask, draw))
            else:
                self._makers.append(_replay(draw, module_name))

    def __len__(self) -> int:
        return len(self._makers)

    def make(self) -> list[torch.Tensor]:
        """Makes every draw in order and returns the used ones."""
        made = [maker() for maker in self._makers]
        return [made[index] for index in self._used]


def _replay(draw: Draw, module_name: str) -> Callable[[], torch.Tensor]:
    _, name, overload = draw.op.split(".")
    operator = getattr(getattr(torch.ops.aten, name), overload)
    first = operator._schema.arguments[0]
    takes_tensor = str(first.type) == "Tensor"
    if len(operator._schema.returns) != 1:
        raise UnsupportedModule(module_name, [Unsupported(draw.op, module_name, "a draw that cannot be replayed")])
    return partial(_value, draw, operator, takes_tensor)
