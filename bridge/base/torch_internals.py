"""Torch internals: every private name of torch that this package uses → the object behind it, or a named error.

Only this file and the other ``torch_*.py`` use names of torch that begin with an underscore (tested). The import of
this module looks the names up; for a name that a version lacks there is a fallback, or the import fails and names it.
Slow imports (Dynamo, Inductor, AOTAutograd) happen at first use.

:data:`PROBES` lists the lookups, to compare a new version of torch with this file. Names without a leading underscore
here are for other packages.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from bridge.base.quirks import quirk

RUN_WITH = "2.11 to 2.15"
"""Versions of torch that this file was tested with."""

PROBES: dict[str, bool] = {}
"""Dotted name of each internal → whether this torch has it."""

_REQUIRED = object()


class MissingInternalError(ImportError):
    """This version of torch lacks an internal name that has no fallback."""

    def __init__(self, path: str):
        super().__init__(f"torch {torch.__version__} has no {path}; tvm-dispatch was run with torch {RUN_WITH}")


def find(path: str, fallback: Any = _REQUIRED) -> Any:
    """The object at a dotted path below ``torch``, or the fallback; :class:`MissingInternalError` without either."""
    parts = path.split(".")
    found: Any = torch
    for end, part in enumerate(parts[1:], start=2):
        if hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            PROBES[path] = False
            if fallback is _REQUIRED:
                raise MissingInternalError(path) from None
            return fallback
    PROBES[path] = True
    return found


pytree: ModuleType = find("torch.utils._pytree")
pytree_node_type: Callable[[Any], Any] = find("torch.utils._pytree._get_node_type")
"""A container → its key in ``pytree.SUPPORTED_NODES``."""
TorchDispatchMode: type = find("torch.utils._python_dispatch.TorchDispatchMode")


# Operators

VF: Any = find("torch._C._VariableFunctions")
"""torch's functions in C, for compiled calls: unaffected by a user's replacement of ``torch.cat``."""
TensorBase: type = find("torch._C.TensorBase")
"""The class of a tensor's methods in C, likewise."""
OpOverload: type = find("torch._ops.OpOverload")
HigherOrderOperator: type = find("torch._ops.HigherOrderOperator")
has_kernel: Callable[[str, str], bool] = find("torch._C._dispatch_has_kernel_for_dispatch_key")
"""(an operator's name, a dispatch key's name) → whether it has its own kernel there."""
_COMPOSITE = "CompositeImplicitAutograd"

schema: Callable[[Any], Any] = attrgetter("_schema")
"""An operator's overload → its schema: name, arguments, returns, aliasing."""
overload_packet: Callable[[Any], Any] = attrgetter("_overloadpacket")
"""An operator's overload → the packet of all of its overloads."""


class AbsentOperator:
    """Stands for an ATen operator, and each of its overloads, that this version of torch lacks: equal to no other."""

    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, overload: str) -> AbsentOperator:
        if overload.startswith("__"):
            raise AttributeError(overload)
        made = AbsentOperator(f"{self.name}.{overload}")
        setattr(self, overload, made)
        return made

    def __repr__(self) -> str:
        return f"<{self.name}, which torch {torch.__version__} lacks>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise MissingInternalError(self.name)


class _Aten:
    """``torch.ops.aten``, in which tables may name operators that only some versions of torch have."""

    def __getattr__(self, name: str) -> Any:
        operator = getattr(torch.ops.aten, name, None)
        if operator is None and name.startswith("__"):  # Python's own lookups, as of __wrapped__ by inspect
            raise AttributeError(name)
        PROBES[f"torch.ops.aten.{name}"] = operator is not None
        if operator is None:
            operator = AbsentOperator(f"torch.ops.aten.{name}")
        setattr(self, name, operator)  # later lookups bypass this method
        return operator


aten = _Aten()


def overload_named(name: str) -> Any:
    """The operator's overload of a name such as ``"aten.add.Tensor"``; ``ValueError`` if this torch lacks it."""
    try:
        namespace, packet, overload = name.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"there is no operator {name}") from error


linear_pointwise: Any = find("torch.ops.mkldnn._linear_pointwise", None)
"""oneDNN's linear layer ``(x, weight, bias, "none", [], "")``, or ``None`` in a build without oneDNN."""
bfloat16_in_onednn: Callable[[], bool] = find("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: False)
"""``() → bool``: whether oneDNN has bfloat16 products on this processor."""


def implements_composite(op: Any) -> bool:
    """Whether an overload is defined, derivative included, by the operators that it calls."""
    return isinstance(op, OpOverload) and has_kernel(op.name(), _COMPOSITE)


def has_own_kernel(op: Any, device: torch.device) -> bool:
    """Whether a device has its own kernel for an overload, which takes precedence over its decomposition."""
    return isinstance(op, OpOverload) and has_kernel(op.name(), device.type.upper())


# Tensors

has_storage: Callable[[torch.Tensor], bool] = find("torch._C._has_storage")
no_torch_function: Callable[[], AbstractContextManager] = find("torch._C.DisableTorchFunction")
"""While active, no torch-function mode sees the calls that this thread makes."""
neg_view: Callable[[torch.Tensor], torch.Tensor] = find("torch._neg_view")
copy_each: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None] = find("torch._foreach_copy_")
pack_padded, pad_packed = find("torch._pack_padded_sequence"), find("torch._pad_packed_sequence")
empty_strided: Callable[..., torch.Tensor] = find(
    "torch._C._dynamo.guards._empty_strided_cpu", lambda *form: torch.empty_strided(*form[:2], dtype=form[2])
)
"""(shape, strides, dtype) → a CPU tensor; Inductor's, half a microsecond faster than ``torch.empty_strided``."""
tensor_at: Callable[..., torch.Tensor] = find(
    "torch._C._dynamo.guards._reinterpret_tensor",
    lambda of, shape, strides, offset: of.as_strided(shape, strides, of.storage_offset() + offset).data,
)
"""(tensor, shape, strides, offset behind its first element) → a tensor in its memory, to autograd no view; Inductor's,
in half the time of ``as_strided``."""
is_dense: Callable[[torch.Tensor], bool] = find("torch._prims_common.is_non_overlapping_and_dense_or_false")
elementwise_dtypes = find("torch._prims_common.elementwise_dtypes")
ELEMENTWISE_TYPE_PROMOTION_KIND = find("torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND")
get_data_attribute = find("torch._C._autograd._get_data_attr", None)
"""The function in Dynamo's graphs for ``tensor.data``; ``None`` in versions with another one."""

STORAGE_NUMBER: Callable[[Any], int] = attrgetter("_cdata")
"""A storage → its unique number."""


def storage_id(tensor: torch.Tensor) -> int:
    """A number that two tensors share if, and only if, they share their storage; fake tensors included."""
    return STORAGE_NUMBER(tensor.untyped_storage())


# Fake tensors

FakeTensor: type = find("torch._subclasses.FakeTensor")
FakeTensorMode: type = find("torch._subclasses.FakeTensorMode")
FunctionalTensor: type = find("torch._subclasses.functional_tensor.FunctionalTensor")
unset_fake_temporarily = find("torch._subclasses.fake_tensor.unset_fake_temporarily")
python_kernels: Callable[[], AbstractContextManager] = find("torch._dispatch.python.enable_python_dispatcher")
"""While active, this thread's operators take Python kernels where torch has some."""


# Modes of the interpreter

set_version_counters: Callable[[Sequence[torch.Tensor], Sequence[int]], None] = find(
    "torch._C._autograd._unsafe_set_version_counter"
)
set_grad_enabled: Callable[[bool], None] = find("torch._C._set_grad_enabled")
len_function_stack: Callable[[], int] = find("torch._C._len_torch_function_stack")
len_dispatch_stack: Callable[[], int] = find("torch._C._len_torch_dispatch_stack")
deterministic_algorithms: Callable[[], bool] = find("torch._C._get_deterministic_algorithms")
current_graph_task_id: Callable[[], int] = find("torch._C._current_graph_task_id")
"""The identifier of the backward that this thread runs, -1 outside of one."""
engine_run_backward: Callable[..., Any] = find("torch.autograd.graph._engine_run_backward")
will_engine_execute_node: Callable[[Any], bool] = find("torch._C._will_engine_execute_node")
"""A node → whether the present backward runs it."""
enter_autocast = find("torch.amp.autocast_mode._enter_autocast")
exit_autocast = find("torch.amp.autocast_mode._exit_autocast")
innermost_transform: Callable[[], Any] = find("torch._C._functorch.peek_interpreter_stack")
_forward_ad = find("torch.autograd.forward_ad")
find("torch._C._get_mkldnn_enabled")

forward_ad_level: Callable[[], int] = functools.partial(getattr, _forward_ad, "_current_level")
"""This thread's level of forward-mode differentiation, -1 outside of it."""

_saved_tensors_hooks = find("torch._C._autograd._top_saved_tensors_default_hooks")
saved_tensors_hooks: Callable[[], tuple[Any, Any] | None] = functools.partial(_saved_tensors_hooks, True)
"""The innermost ``torch.autograd.graph.saved_tensors_hooks`` of this thread, or ``None``."""


def has_saved_tensors_hooks() -> bool:
    """Whether ``torch.autograd.graph.saved_tensors_hooks`` are active in this thread."""
    return saved_tensors_hooks() is not None


jit_is_tracing: Callable[[], bool] = find("torch._C._is_tracing")
compiling_flag: Callable[[], Any] = functools.partial(getattr, torch.compiler, "_is_compiling_flag", False)
"""The result of ``torch.compiler.is_compiling`` where Dynamo does not answer it."""


@quirk(
    "torch.compiler.is_exporting",
    reason="Dynamo takes it for true",
    test="tests/bridge/dynamo/test_backend.py",
    until="2.12",
)
def is_exporting() -> bool:
    """``torch.compiler.is_exporting()``, also where Dynamo traces this."""
    return bool(torch.compiler._is_exporting_flag)


# Modules and their hooks

BatchNormBase: type[torch.nn.Module] = find("torch.nn.modules.batchnorm._BatchNorm")
"""The base class of all batch normalizations."""
MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of a module that hold its hooks."""
COMPILED_CALL = "_compiled_call_impl"
"""A module's attribute that replaces its call; ``nn.Module.compile`` and the dispatcher set it."""
MODULE_CALL: CodeType = find("torch.nn.Module._wrapped_call_impl").__code__
"""Code of the method that reads it."""
MODULE_FILE: dict[str, Any] = find("torch.nn.Module._wrapped_call_impl").__globals__
"""Its globals, which a frame gives without an audit event."""
_GLOBAL_HOOKS = [
    find(f"torch.nn.modules.module._global_{kind}")
    for kind in ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
]

has_global_hooks: Callable[[], bool] = functools.partial(any, _GLOBAL_HOOKS)
"""Whether hooks are registered on all modules (``register_module_forward_hook`` and its kin)."""

_PARAMETRIZE = find("torch.nn.utils.parametrize")
find("torch.nn.utils.parametrize._cache_enabled")
parametrization_caches: Callable[[], int] = functools.partial(getattr, _PARAMETRIZE, "_cache_enabled")
"""The number of active ``parametrize.cached()`` contexts in this process; in them, each parametrization runs once."""


# torch.export and torch.fx

core_decompositions: Callable[[], dict] = find("torch._decomp._core_aten_decompositions_post_autograd")
"""() → the decompositions to core ATen: overload → function."""
decomposition_of: Callable[[Any], Callable[..., Any]] = find("torch._export.utils._get_decomp_for_cia")
"""A composite overload → its decomposition."""
_is_preservable = find("torch._export.utils._is_preservable_cia_op")


def is_preservable(op: Any) -> bool:
    """Whether an operator is a composite overload that may stand in an exported graph as it is."""
    return isinstance(op, OpOverload) and _is_preservable(op)


autograd_key = find("torch._C.DispatchKey.Autograd")

_TRACERS = "_decomp _export _functorch _higher_order_ops _ops _prims _refs _subclasses _tensor_str export fx utils._"

# Dynamo: imported at first use

tensor_guards: Any = find("torch._C._dynamo.guards.TensorGuards", None)
"""Dynamo's class for checks of a list of tensors, or ``None``."""
dict_version: Callable[[dict[str, Any]], int] | None = find("torch._C._dynamo.guards.dict_version", None)
"""Dynamo's function for a dictionary's version, a number that changes with each write; or ``None``."""
TRANSFORM_MODULES = ("torch._C._functorch", "torch._functorch", "torch.autograd.forward_ad")
"""Modules of ``torch.func`` transforms and of forward-mode differentiation."""


def compile_lock() -> Any:
    """The lock under which Dynamo compiles."""
    return importlib.import_module("torch._dynamo.convert_frame").compile_lock


_backends = (find(f"torch.{name}", type) for name in ("_TorchCompileInductorWrapper", "_TorchCompileWrapper"))
COMPILING: frozenset[CodeType] = frozenset(
    each.__code__
    for each in (torch.compile, *(value for kind in _backends for value in vars(kind).values()))
    if isinstance(each, FunctionType)
)
"""The code of ``torch.compile`` and of the backends that it makes."""


def leave_frames_alone(code: CodeType) -> bool:
    """Makes Dynamo skip frames of ``code`` and all their calls; returns whether it could (``disable`` would wrap)."""
    eval_frame = find("torch._C._dynamo.eval_frame", None)
    if eval_frame is None or not hasattr(eval_frame, "set_code_exec_strategy"):
        return False
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    return True
