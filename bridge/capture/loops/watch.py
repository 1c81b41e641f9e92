"""Watch over operators: a mode under which forward is recorded -> what no call of torch tells ends the recording."""

from __future__ import annotations

from typing import Any

import torch

from bridge.base.torch_internals import TorchDispatchMode, aten, len_dispatch_stack, schema
from bridge.capture.loops.recorder import CallRecorder

__all__ = ["OperatorWatch"]


class OperatorWatch(TorchDispatchMode):
    """Ends a recording before an operator draws, reads a number or writes outside of a call, or is not ATen's."""

    def __init__(self, recorder: CallRecorder):
        super().__init__()
        self.recorder = recorder
        self._fine: set[Any] = set()

    def __enter__(self):
        super().__enter__()
        self.recorder.modes = len_dispatch_stack()
        return self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags and func.namespace == "aten":
            return self.recorder.draw(func, args, kwargs or {})
        if func not in self._fine:
            if (why := _problem(func)) is not None:
                self.recorder.fail(why)
            if not schema(func).is_mutable:
                self._fine.add(func)
            elif not self.recorder.is_inside:
                self.recorder.fail(f"{func} writes")
        self.recorder.operators += 1
        return func(*args, **(kwargs or {}))


_READS = (aten._local_scalar_dense, aten.equal, aten._assert_async, aten.as_strided, aten.is_nonzero)


def _problem(func: Any) -> str | None:
    known = schema(func)
    if func.namespace != "aten":
        return f"{func} is not torch's own"
    if torch.Tag.dynamic_output_shape in func.tags:
        return f"the result of {func} has a shape that numbers decide"
    if func.overloadpacket in _READS or "batch_norm" in known.name or "instance_norm" in known.name:
        return f"{func} reads or writes more than the graph says"
    return None
