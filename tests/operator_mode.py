"""A dispatch mode for operators, also for those inside of a higher-order operator's functions."""

from __future__ import annotations

from typing import Any

from torch._C import DispatchKey
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OperatorMode"]


class OperatorMode(TorchDispatchMode):
    """Calls :meth:`operator` for each operator; runs ``torch.cond``, ``scan`` and the like as eager does, in the mode.

    torch asks a mode for a higher-order operator as a whole, and raises for a mode that has no rule for it.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            with self:
                return func.py_kernels[DispatchKey.CompositeExplicitAutograd](*args, **kwargs)
        return self.operator(func, args, kwargs)

    def operator(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The results of an operator."""
        raise NotImplementedError
