"""``tensor.data`` while a module is traced → ``tensor.detach()``, the same numbers in the same memory, off the graph.

torch.export would keep the fake tensor that it gets as a constant. The two differ in the version counter alone: a
write through ``.data`` is not seen by autograd. What is written in place is judged in the fake run, by memory
(:mod:`bridge.capture.inplace_rules`): into a buffer it is a new value of the buffer, into what requires grad it is
refused, as it is through ``detach()``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["DataIsDetached"]


class DataIsDetached(TorchFunctionMode):
    """While active, reading ``tensor.data`` calls ``tensor.detach()``."""

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        if func == torch.Tensor.data.__get__:  # a new object at each look, so not ``is``
            return args[0].detach()
        return func(*args, **(kwargs or {}))
