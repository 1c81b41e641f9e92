"""Torch's private names for modes above autograd and autocast (the pre-dispatch key).

TorchScript functions: run operator by operator, without the fusions of earlier calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch

from bridge.base.devices import TYPES, current_device
from bridge.base.torch_internals import FunctionalTensor, TorchDispatchMode, find, has_kernel, no_torch_function, schema

_Proxy: type = find("torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode")
_PRE_DISPATCH = find("torch._C.DispatchKey.PreDispatch")
_PROXY = find("torch._C._TorchDispatchModeKey.PROXY")

no_python_kernels: Callable[[], AbstractContextManager] = find("torch._dispatch.python.no_python_dispatcher")
"""While active, this thread's operators use no Python kernels."""
has_wrapper: Callable[[Any], bool] = find("torch._C._functorch.is_functorch_wrapped_tensor")
"""Whether a tensor belongs to a ``torch.func`` transform."""

_without_keys = find("torch._C._ExcludeDispatchKeyGuard")
_RECORDED = find("torch._C.DispatchKeySet")(_PRE_DISPATCH)


def unrecorded(call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls a function hidden from this thread's pre-dispatch modes and torch-function modes."""
    with no_torch_function(), _without_keys(_RECORDED):
        return call(*args, **kwargs)


class DispatchMode(TorchDispatchMode):
    """A dispatch mode without torch's wrapper for Dynamo."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled under this mode, and torch's wrapper takes as long as the mode itself."""
        return False


class PreDispatchMode(DispatchMode, _Proxy):
    """A dispatch mode that sees operators as they are called: composite ones whole, before autocast and autograd.

    Requires an active Python dispatcher (:data:`bridge.base.torch_internals.python_kernels`). It is at torch's key of
    proxies, which accepts only subclasses of torch's own mode.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self, _PRE_DISPATCH)
        self._mode_key, self.pre_dispatch = _PROXY, True
        self.enter_stack: list[Any] = []

    def __sym_dispatch__(self, func: Any, types: Any, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        return func(*args, **(kwargs or {}))


FunctionalTensorMode: type = find("torch._subclasses.functional_tensor.FunctionalTensorMode")
below_autograd: Callable[[], AbstractContextManager] = find("torch._C._AutoDispatchBelowAutograd")
"""While active, autograd ignores this thread's operators, and composite ones reach modes whole."""
_sync, _inside = find("torch._sync"), find("torch._from_functional_tensor")
_is_written = find("torch._functionalize_has_data_mutation")
composite_kernel: Callable[..., Any] = find("torch._ops.OpOverload.decompose")
"""(a composite overload, arguments) → runs its decomposition; ``NotImplemented`` for any other operator."""


def in_functional(tensor: Any) -> Any:
    """The tensor behind a functional tensor, up to date."""
    _sync(tensor)
    return _inside(tensor.elem)


_to_functional = find("torch._to_functional_tensor")


def functional_of(tensor: Any, mode: Any) -> Any:
    """A functional tensor of a mode around a tensor."""
    return FunctionalTensor(_to_functional(tensor), mode)


def is_written(tensor: Any) -> bool:
    """Whether a functional tensor was written since it was made."""
    return _is_written(tensor.elem)


_transforms = find("torch._C._functorch.get_interpreter_stack")
_VMAP = find("torch._C._functorch.TransformType.Vmap")


def is_only_mapped() -> bool:
    """Whether all active transforms of ``torch.func`` are ``vmap``."""
    return all(each.key() == _VMAP for each in _transforms() or ())


_AUTOCAST = {kind: find(f"torch._C.DispatchKey.Autocast{kind.upper()}") for kind in TYPES}
_is_excluded = find("torch._C._dispatch_tls_is_dispatch_key_excluded")


def is_below_autocast() -> bool:
    """Whether autocast calls an operator, after it has cast the operands."""
    return _is_excluded(_AUTOCAST[current_device().type])


def has_casts(op: Any) -> bool:
    """Whether autocast has a kernel for an operator: it casts its operands or sets its output dtype."""
    return has_kernel(op.name(), _AUTOCAST[current_device().type].name)


_after = find("torch._C._dispatch_keyset_full_after")(_PRE_DISPATCH)
_included = find("torch._C._dispatch_tls_local_include_set")
_excluded = find("torch._C._dispatch_tls_local_exclude_set")
_keys_of = find("torch._C._dispatch_keys")
_passes_on = find("torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough")
_PYTHON_DISPATCHER = find("torch._C.DispatchKey.PythonDispatcher")


@cache
def _kinds(op: Any) -> list[str]:
    return [str(argument.type) for argument in schema(op).arguments]


def _as_operand(dtype: torch.dtype, value: Any, kind: str) -> Any:
    """A number passed to a mode in the place of a tensor → a 0-d tensor, of its promoted type beside ``dtype``."""
    if kind != "Tensor" or type(value) not in (bool, int, float, complex):
        return value
    if type(value) in (float, complex) and not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.get_default_dtype()
    if type(value) is complex:
        dtype = dtype.to_complex()
    elif type(value) is int and dtype is torch.bool:
        dtype = torch.int64
    return torch.scalar_tensor(value, dtype=dtype)


def called_below(op: Any, tensors: Sequence[Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls an operator on ``vmap`` tensors, past the pre-dispatch modes, which still see its calls on plain tensors.

    torch's dispatcher skips an operator's fall-through keys, but a redispatch from a given key set does not.
    """
    args = [*map(partial(_as_operand, tensors[0].dtype), args, _kinds(op))]
    keys = _included()
    for tensor in tensors:
        keys = keys | _keys_of(tensor)
    keys = ((keys - _excluded()) & _after).remove(_PYTHON_DISPATCHER)
    left = keys
    while (key := left.highestPriorityTypeId()).name != "Undefined":
        if has_kernel(op.name(), key.name):
            passes = _passes_on(op.name(), key)
        else:  # the fallback kernel for all operators, a fall-through
            passes = key.name == "FuncTorchVmapMode" or key.name.startswith("Autocast")
        keys, left = keys.remove(key) if passes else keys, left.remove(key)
    return op.redispatch(keys, *args, **kwargs)


_library = torch.library.Library("tvm_dispatch", "FRAGMENT")


def own_operator(
    schema: str,
    kernel: Callable[..., Any] | None,
    meta: Callable[..., Any] | None = None,
    *,
    is_composite: bool = False,
) -> Any:
    """Defines an operator of this package → its overload.

    Args:
        kernel: ``None`` for an operator that is traced and never run.
        meta: makes meta tensors; by default ``kernel`` does.
        is_composite: whether ``kernel`` calls torch's operators, whose derivatives it has.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    if kernel is not None:
        _library.impl(name, kernel, "CompositeImplicitAutograd" if is_composite else "CompositeExplicitAutograd")
    if not is_composite:
        _library.impl(name, meta or kernel, "Meta")
    return getattr(torch.ops.tvm_dispatch, name).default


ScriptFunction: type = torch.jit.ScriptFunction
_call_script = ScriptFunction.__call__
_function_of_graph = find("torch._C._create_function_from_graph")


def run_unfused(function: Any, *args: Any, fakes: bool, **kwargs: Any) -> Any:
    """A TorchScript function's results, computed operator by operator, whatever its earlier calls have optimized.

    A first call runs unfused: this calls a new function with the same graph. Not on real tensors if the graph holds
    tensors, as a traced one does: torch does not read them in a first call under a mode. ``fakes``: on fake tensors.
    """
    constants = () if fakes else (node for node in function.graph.nodes() if node.kind() == "prim::Constant")
    if any(node.hasAttribute("value") and node.kindOf("value") == "t" for node in constants):
        return _call_script(function, *args, **kwargs)
    fresh = _function_of_graph(function.name, function.graph)
    left = function.schema.arguments[len(args) :]  # a graph has neither their names nor their defaults
    given = {argument.name: argument.default_value for argument in left if argument.has_default_value()} | kwargs
    if given.keys() != {argument.name for argument in left}:
        return _call_script(fresh, *args, **kwargs)  # raises
    return _call_script(fresh, *args, *(given[argument.name] for argument in left))
