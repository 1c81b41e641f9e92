"""A dispatch mode for operators, also for those inside of a higher-order operator's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C import DispatchKey
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):
    """Calls :meth:`operator` for each operator; runs ``torch.cond``, ``scan`` and the like as eager does, in the mode.

    torch asks a mode for a higher-order operator as a whole, and raises for a mode that has no rule for it. Under most
    modes Dynamo, by which eager runs these operators, compiles nothing: results and gradients may differ then.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            # some of torch's kernels refuse any mode, so that only their functions run in it
            args, kwargs = pytree.tree_map_only(Callable, self._inside, (args, kwargs))
            return func.py_kernels[DispatchKey.CompositeExplicitAutograd](*args, **kwargs)
        if any(issubclass(kind, FakeTensor) for kind in types):  # torch only asks for shapes
            return func(*args, **kwargs)
        return self.operator(func, args, kwargs)

    def _inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self:
                return function(*args)

        return call

    def operator(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The results of an operator."""
        raise NotImplementedError
