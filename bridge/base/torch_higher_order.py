"""Torch's private names of higher-order operators, and Dynamo's trace of one, through which eager runs it."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from bridge.base.modes import replaced
from bridge.base.torch_internals import HigherOrderOperator, find, frames_compiled
from bridge.base.torch_recording import no_python_kernels

__all__ = ["lifted_operands", "nested_operands"]

_no_modes: Callable[[], AbstractContextManager] = find("torch.utils._python_dispatch._disable_current_modes")
_cond = importlib.import_module("torch._higher_order_ops.cond")
_environment: Callable[[], AbstractContextManager] = find("torch._higher_order_ops.utils.setup_compilation_env")


class _TracedError(Exception):
    """Ends a call after Dynamo's trace, before it runs."""


def lifted_operands(op: Any, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """A call of a higher-order operator → the tensor arguments of eager's ``autograd.Function`` for it.

    These are the operands that its functions use, and other tensors that the functions read: eager calls Dynamo there,
    which makes them inputs. Runs only Dynamo's trace, on fake tensors; raises its errors.
    """
    found: list[torch.Tensor] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        calls = [node for node in graph.graph.nodes if isinstance(node.target, HigherOrderOperator)]
        operands = {each.name for call in calls for each in call.all_input_nodes}

        def stop(*inputs: Any) -> None:
            found.extend(
                each
                for name, each in zip(names, inputs, strict=True)
                if name in operands and isinstance(each, torch.Tensor)
            )
            raise _TracedError

        return stop

    def call(*operands: Any) -> Any:
        return op(*operands, **kwargs)

    with _no_modes(), no_python_kernels(), frames_compiled(), _environment():
        try:
            torch.compile(call, backend=backend, fullgraph=True)(*args)
        except _TracedError:
            return found
    return found


@contextmanager
def nested_operands() -> Iterator[None]:
    """While active, ``torch.cond`` takes operands in dictionaries and lists in this thread, as under Dynamo."""
    original, thread = _cond.validate_subgraph_args_types, threading.get_ident()

    def validate(operands: Any) -> None:
        if threading.get_ident() != thread:
            original(operands)

    with replaced(_cond, validate_subgraph_args_types=validate):
        yield
