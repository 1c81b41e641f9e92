"""Whole functions: functions of torch's whose traces need numbers → operators of ours, computed by torch's own.

Neither a fake run nor ``torch.export`` gets past a composite function that reads numbers on its way (a check of its
arguments, a mask that is in the shape alone), or one that has a further result whose shape they decide. Where the shape
of what it returns does not depend on them, the whole of it is one operator: torch's function is its kernel, and
autograd's derivative of that its derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["HANDLERS", "WHOLE_FUNCTIONS", "WholeFunction", "WholeFunctions", "define_whole"]

_library = torch.library.Library("tvm_dispatch", "FRAGMENT")


@dataclass(frozen=True)
class WholeFunction:
    """What an operator of ours computes.

    Attributes:
        operator: torch's; or a function of torch's operators, which the program then calls by the name of ours.
        keywords: names of its last arguments where it takes them by keyword; ours takes all by position.
    """

    operator: Any
    keywords: tuple[str, ...] = ()

    def call(self, args: tuple) -> tuple[tuple, dict[str, Any]]:
        """Arguments of ours as torch's operator takes them."""
        count = len(args) - len(self.keywords)
        return tuple(args[:count]), dict(zip(self.keywords, args[count:], strict=True))

    def __call__(self, *args: Any) -> Any:
        args, kwargs = self.call(args)
        return self.operator(*args, **kwargs)


WHOLE_FUNCTIONS: dict[Any, WholeFunction] = {}
"""Operators of ours and what they compute."""

HANDLERS: dict[Any, Callable[..., Any]] = {}
"""Functions of torch's → what is called in their place while forward is traced."""


class WholeFunctions(TorchFunctionMode):
    """While forward is traced, or runs on fake tensors: these functions are our operators."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return HANDLERS.get(func, func)(*args, **(kwargs or {}))


def define_whole(schema: str, computed: WholeFunction, like: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Defines an operator of one result and registers it.

    Args:
        schema: as in ``"cov(Tensor input, int correction) -> Tensor"``.
        computed: its kernel, and what its derivative is of.
        like: its arguments → an empty tensor of the result's form.
    """
    name = schema.partition("(")[0]
    _library.define(schema)

    def kernel(*args):
        return computed(*args)

    def keep(ctx, inputs, output):
        ctx.save_for_backward(*[each for each in inputs if isinstance(each, torch.Tensor)])
        ctx.others = [_SAVED if isinstance(each, torch.Tensor) else each for each in inputs]

    def backward(ctx, grad):
        saved = iter(ctx.saved_tensors)
        args = [next(saved).detach() if each is _SAVED else each for each in ctx.others]
        wanted = [place for place, needs in enumerate(ctx.needs_input_grad) if needs]
        with torch.enable_grad():
            for place in wanted:
                args[place].requires_grad_()
            found = torch.autograd.grad(computed(*args), [args[place] for place in wanted], grad)
        gradients = dict(zip(wanted, found, strict=True))
        return tuple(map(gradients.get, range(len(args))))

    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _library.impl(name, like, "Meta")
    torch.library.register_autograd(f"tvm_dispatch::{name}", backward, setup_context=keep, lib=_library)
    made = getattr(torch.ops.tvm_dispatch, name)
    WHOLE_FUNCTIONS[made.default] = computed
    return made


_SAVED = object()
