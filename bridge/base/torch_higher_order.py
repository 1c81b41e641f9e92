"""Torch's private names of higher-order operators, and Dynamo's trace of one, through which eager runs it."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bridge.base.modes import replaced_here
from bridge.base.torch_internals import HigherOrderOperator, find
from bridge.base.torch_recording import no_python_kernels

_no_modes: Callable[[], AbstractContextManager] = find("torch.utils._python_dispatch._disable_current_modes")
_cond = importlib.import_module("torch._higher_order_ops.cond")
_flex = importlib.import_module("torch.nn.attention.flex_attention")
BlockMask: type = _flex.BlockMask
no_score_mod: Callable = find("torch.nn.attention.flex_attention._identity")
"""The function that ``flex_attention`` takes where no ``score_mod`` is given."""
_environment: Callable[[], AbstractContextManager] = find("torch._higher_order_ops.utils.setup_compilation_env")


OUTPUT_ALONE = "OUTPUT_ALONE"
"""A key of the kernels' options, in graphs, where nothing reads logsumexp and maximum."""
FLEX_ATTENTION: HigherOrderOperator = _flex.flex_attention_hop
_TAKEN = {"flex_attention": 7}
"""Name of an operator → number of arguments that Dynamo takes; it appends the tensors that the functions read."""


_INDEXING = "torch._dynamo._trace_wrapped_higher_order_op"
INDEX: type = find(f"{_INDEXING}.ModIndex")
"""The Function of indexing by tensors, whose ``apply`` is looked up at each call since torch 2.14."""
_requires_grad = torch.Tensor.requires_grad.__get__
_BETWEEN = 8
"""Frames between a mode of torch functions and the caller of a function: other modes, such as ``torch.device``."""


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
            torch.compile(call, backend=backend, fullgraph=True)(*args[: _TAKEN.get(op.name())])
        except _TracedError:
            return found
    return found


def flex_attention_casts(kind: str) -> bool:
    """Whether ``flex_attention`` on a type of devices casts its operands under autocast."""
    return find(f"torch._C.DispatchKey.Autocast{kind.upper()}") in _flex.flex_attention_hop.py_kernels


def indexing_by_tensors() -> TorchFunctionMode:
    """While active, ``table[i, j]`` with integers and 0-d tensors takes the element there, by the tensors' numbers."""
    return find(f"{_INDEXING}.TransformGetItemToIndex")()


def is_indexing(op: Any, args: tuple) -> bool:
    """Whether a higher-order operator is that indexing, a function with a backward of torch's own, under ``vmap``."""
    return op.name() == "custom_function_call" and args[0] is INDEX


def is_check_of_devices(func: Any) -> bool:
    """Whether a torch function is ``requires_grad``, by which ``flex_attention`` refuses tensors on a CPU in eager.

    To be asked in a mode of torch functions.
    """
    if func != _requires_grad:
        return False
    return _frame_around(_flex._validate_device, 1 + _BETWEEN) is not None


def returns_output_alone() -> bool:
    """Whether the call of ``flex_attention`` that runs returns neither logsumexp nor maximum of the scores."""
    frame = _frame_around(_flex.flex_attention)
    return frame is not None and not frame.f_locals["return_lse"] and frame.f_locals.get("return_aux") is None


def _frame_around(function: Any, most: int = sys.maxsize) -> FrameType | None:
    """The frame of a function in Python that runs, at most so many frames outside of the caller."""
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_code is not function.__code__:
        frame, most = frame.f_back if most > 1 else None, most - 1
    return frame


@contextmanager
def no_frames_compiled() -> Iterator[None]:
    """While active, Dynamo neither compiles nor runs compiled code in this thread.

    Otherwise Dynamo would skip a frame that it meets under a dispatch mode in all later calls. Without it,
    ``torch.cond`` gets operands in dictionaries and lists, which its check would refuse.
    """
    eval_frame, here = importlib.import_module("torch._dynamo.eval_frame"), threading.get_ident()
    original = eval_frame._callback_from_stance
    compiled = getattr(eval_frame, "set_fullgraph_compiled_frame_count", None)  # no count below 0 requires a frame
    callback, count = eval_frame.set_eval_frame(None), compiled and compiled(0)
    eval_frame._callback_from_stance = lambda each: (
        None if threading.get_ident() == here and not getattr(_frames, "compiled", False) else original(each)
    )
    try:
        with replaced_here(_cond, validate_subgraph_args_types=lambda original: lambda operands: None):
            yield
    finally:
        eval_frame._callback_from_stance = original
        eval_frame.set_eval_frame(callback)
        if compiled:
            compiled(count)


_frames = threading.local()


@contextmanager
def frames_compiled() -> Iterator[None]:
    """While active inside of :func:`no_frames_compiled`, Dynamo compiles the functions of ``torch.compile``."""
    _frames.compiled = True
    try:
        yield
    finally:
        _frames.compiled = False
