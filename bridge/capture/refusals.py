"""Preconditions of a capture: the module's kind, its hooks, its arguments → refusals before anything is traced."""

from __future__ import annotations

import os
import re
import traceback
from typing import Any

import torch
from torch import nn

from bridge.base.devices import HOST, devices_of, may_be_on_host
from bridge.base.errors import BY_NUMBERS, TORCH_DIR, Unsupported, UnsupportedModule, line_of, user_line
from bridge.base.pytrees import is_plain, leaf_names
from bridge.base.quirks import quirk
from bridge.base.torch_distributed import is_distributed
from bridge.base.torch_internals import pytree
from bridge.state import SampleCall, hooks_of, tensor_problem, written_class

#: Where transformers' caches of keys and values live, and what to do about one.
CACHES = "transformers.cache_utils"
NO_CACHE = "set model.config.use_cache = False: training has no use for the keys and values of earlier tokens"

_PASS_CONTENTS = "make it an attribute of the module, or pass what forward takes from it"
_PASS_TUPLE = "pass a tuple of its numbers: tuple(x.shape)"
_HINTS = {CACHES: NO_CACHE, "numpy": "pass a tensor (torch.as_tensor) or a Python number"}
_DISPATCH_INSIDE = "dispatch what it wraps, before or after wrapping it: add_tvm_dispatch({}.module, ...)"
#: Wrappers of torch's by class name, so that none of their packages is imported.
_WRAPPERS = {
    "DistributedDataParallel": ("runs collectives and Python code around its module", _DISPATCH_INSIDE),
    "DataParallel": ("copies its module to devices and runs threads", _DISPATCH_INSIDE),
    "FullyShardedDataParallel": (
        "runs collectives and Python code around its module",
        "leave it to PyTorch, or use fully_shard: add_tvm_dispatch(layer, ...), then fully_shard(layer)",
    ),
}


def check_call(call: SampleCall) -> None:
    """Raises :class:`UnsupportedModule` for lazy parameters, inner backward hooks, wrappers and odd arguments."""
    for problems in (_in_cpp, _without_shapes, _parallel, _backward_hooks, _odd_arguments):
        if found := problems(call):
            raise UnsupportedModule(call.name, found)


def device_of_call(call: SampleCall) -> torch.device:
    """The device of a call's tensors; the host if it has none.

    Integers on the host, lengths for instance, may be moved to the other tensors' device.

    Raises:
        UnsupportedModule: the tensors are on several devices.
    """
    module, leaves = call.module, call.tensors
    owned = [*module.parameters(), *module.buffers()]
    devices = devices_of([*owned, *leaves])
    if len(devices) > 1:
        hosted = [leaf for leaf in leaves if leaf.device == HOST and may_be_on_host(leaf)]
        devices = devices_of([*owned, *(leaf for leaf in leaves if not any(leaf is each for each in hosted))])
    if len(devices) > 1:
        name, reason = type(module).__name__, "compiled code runs on one device"
        where = " and ".join(map(str, devices))
        problem = Unsupported(f"tensors on {where}", f"{name}.forward", reason, "dispatch the parts on each device")
        raise UnsupportedModule(name, [problem])
    return devices[0] if devices else HOST


def _in_cpp(call: SampleCall) -> list[Unsupported]:
    """Refuses the first module whose code or weights are objects in C++: TorchScript's, packed quantized weights."""
    hint = "dispatch the module it was made of"
    for path, child in call.module.named_modules():
        op, where = f"{type(child).__name__} '{path}'" if path else call.name, f"{call.name}.{path}".rstrip(".")
        objects = [each for each in vars(child).values() if isinstance(each, torch.ScriptObject)]
        if isinstance(child, torch.jit.ScriptModule):
            reason = "a torch.jit module, compiled by TorchScript, whose code is not seen"
        elif any("quantized" in str(each._type()) for each in objects):
            reason = "packed weights in C++ (quantized), whose numbers are not seen"
        else:
            continue
        return [Unsupported(op, where, reason, hint)]
    return []


def uninitialized(module: nn.Module) -> list[str]:
    """Paths of parameters and buffers of lazy modules that have no shape before the first call."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [path for path, tensor in tensors if isinstance(tensor, nn.parameter.UninitializedTensorMixin)]


def _without_shapes(call: SampleCall) -> list[Unsupported]:
    reason = "a parameter of a lazy module that has no shape yet"
    hint = "call the module once on a sample, then dispatch it; or dispatch it without a sample"
    return [Unsupported(f"uninitialized '{path}'", path, reason, hint) for path in uninitialized(call.module)]


def _parallel(call: SampleCall) -> list[Unsupported]:
    """Refuses sharded parameters, and wrappers for several processes or replicas; names the module to dispatch instead.

    Wrappers (DDP, FSDP) run Python code and collectives around the module that they hold, which can be dispatched.
    ``fully_shard`` leaves this rank's shard of each parameter on the module until the module is called.
    """
    module, name, problems = call.module, call.name, []
    for path, child in module.named_modules():
        kinds = [kind.__name__ for kind in type(child).__mro__ if kind.__module__.startswith("torch.")]
        if known := next((kind for kind in kinds if kind in _WRAPPERS), None):
            reason, hint = _WRAPPERS[known]
            problems.append(Unsupported(known, path or name, reason, hint.format(path or "model")))
    # this wrapper hides its part of a parameter's name; inside another module it is just Python code
    if "ActivationWrapper" in [kind.__name__ for kind in type(module).__mro__]:
        hint = "dispatch what it wraps: add_tvm_dispatch(model._checkpoint_wrapped_module, ...)"
        problems.append(Unsupported(name, name, "names its parameters as if it were not there", hint))
    shards = [path for path, each in module.named_parameters() if is_distributed(each)]
    if shards and any(written_class(type(child)) is not type(child) for child in module.modules()):
        op = f"shard '{shards[0]}'" + (f" and {len(shards) - 1} more" if len(shards) > 1 else "")
        reason = "a parameter that is a shard already (DTensor)"
        hint = "call add_tvm_dispatch before fully_shard, and after parallelize_module"
        problems.append(Unsupported(op, shards[0], reason, hint))
    return problems


def _backward_hooks(call: SampleCall) -> list[Unsupported]:
    """Refuses backward hooks on inner modules; forward hooks there are recorded like forward."""
    reason = "a backward hook on an inner module is Python code in the middle of the backward"
    hint = "remove it, register it on the dispatched module, or dispatch the modules around it: whole=False"
    return [
        Unsupported(f"{kind} on '{path}'", f"{call.name}.{path}", reason, hint)
        for path, child in call.module.named_modules()
        for kind, _ in hooks_of(child)
        if path and not kind.startswith("forward")
    ]


@quirk(
    "Cache",
    reason="caches of keys and values are arguments that no graph holds; training has no use for them",
    test="tests/bridge/composition/test_trainer_uses.py",
    library="transformers",
)
def _odd_arguments(call: SampleCall) -> list[Unsupported]:
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs), is_leaf=_is_size)
    found, where = [], f"{call.name}.forward"
    for path, leaf in zip(leaf_names(spec), leaves, strict=True):
        what = f"argument {path}, a {type(leaf).__name__}"
        if isinstance(leaf, torch.Tensor):
            if problem := tensor_problem(leaf):
                hint = _AROUND if is_distributed(leaf) else "pass a plain tensor"
                found.append(Unsupported(what, where, problem, hint))
        elif isinstance(leaf, type) or not is_plain(leaf):
            hint = _PASS_TUPLE if _is_size(leaf) else _HINTS.get(type(leaf).__module__, _PASS_CONTENTS)
            found.append(Unsupported(what, where, _NO_CONSTANT, hint))
    return found


_NO_CONSTANT = "not a tensor, number, string, flag, enum, dtype, device or None, nor a tuple, list or dict of them"
_AROUND = "dispatch the module around it: its own plan makes DTensors outside of its forward"


def _is_size(value: Any) -> bool:
    """Whether a value is a ``torch.Size``, which pytree would turn into a plain tuple."""
    return isinstance(value, torch.Size)


# Errors in the user's terms: an exception of a fake run → :class:`bridge.base.errors.Unsupported`.


_BY_NUMBERS = ("GuardOnDataDependentSymNode", "DataDependentOutputException")

#: Patterns in the user's line that makes a shape of numbers -> the hint.
_MAKES_SHAPES = (
    (r"\bexpert_mask\b", 'model.set_experts_implementation("grouped_mm") keeps the shapes fixed'),
    (r"repeat_interleave\(", "pass output_size=, the sum of the repeats, as a Python number"),
    (r"\bnonzero\(", "torch.nonzero_static(x, size=…) has a fixed shape"),
)

_DATA_DEPENDENT = "data-dependent control flow or shape"
_BRANCH = "use torch.where, or dispatch the submodules on either side of it"
_DENSE = "keep it dense, or dispatch the modules around it: whole=False"
_SHAPE = "keep the shape (torch.where, masked_fill, a multiplication by the mask), or dispatch the rest: whole=False"

#: Openings of torch's advice on exporting, compiling or reporting a bug, which does not apply to the user.
_ADVICE = re.compile(
    r"please|if you('re| are)|for (more|the|potential)|see |to fix|this typically|consider|hint|potential|you can"
    r"|TORCH_|torch\._|https?:",
    re.IGNORECASE,
)
_LONGEST = 200


def explain_error(error: BaseException, where: str | None = None) -> Unsupported:
    """An error of tracing a module or running it on fake tensors → a refusal; ``where``: the user's line, if known."""
    frames = traceback.extract_tb(error.__traceback__)
    where = where or user_line(error) or _torch_line(frames)
    kind = type(error).__name__
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), kind)
    if kind == "DynamicOutputShapeException":
        return shape_by_numbers(where)
    if kind in _BY_NUMBERS:
        return Unsupported(_DATA_DEPENDENT, where, f"the branch taken {BY_NUMBERS}", _BRANCH)
    if first_line.startswith("Cannot access data pointer of Tensor"):
        reason = "forward asks for a tensor's address: to copy it in Python, or for a kernel unknown to torch"
        hint = "make a kernel an operator (torch.library.custom_op, triton_op); copy outside of forward"
        return Unsupported("Tensor.data_ptr", where, reason, hint)
    if first_line.startswith("The tensor has a non-zero number of elements, but its data is not allocated"):
        reason = "torch reads the numbers in C++, as LongTensor([t]) and x.new([t]) do: a graph would not hold them"
        return Unsupported("a tensor of tensors' numbers", where, reason, "make it by torch.tensor([t]) or torch.stack")
    if first_line.startswith("Values and compressed tensor instance need to be on the same device"):
        return Unsupported("a sparse tensor", where, "is numbers and their places: no program holds one", _DENSE)
    if kind == "UnsupportedOperatorException":
        return Unsupported(str(error).splitlines()[0], where, "an operator that has no shapes for fake tensors")
    return Unsupported("a run on fake tensors", where, f"{kind}: {_without_advice(first_line)}")


@quirk(
    "expert_mask",
    reason="a mixture of experts selects rows by its router's numbers, unless another implementation is asked for",
    test="tests/bridge/base/test_quirks.py::test_experts_are_told_what_helps",
    library="transformers",
)
def shape_by_numbers(where: str, reason: str = f"the shape of a result {BY_NUMBERS}") -> Unsupported:
    """The refusal of a shape that is unknown before the call computes it."""
    code = re.sub(r"^.*?:\d+: ", "", where)
    hint = next((hint for words, hint in _MAKES_SHAPES if re.search(words, code)), _SHAPE)
    return Unsupported(_DATA_DEPENDENT, where, reason, hint)


def _torch_line(frames: traceback.StackSummary) -> str:
    """The innermost line in ``torch.nn``, used if no line of the user's is known."""
    inside = f"{TORCH_DIR}nn/".replace(os.sep, "/")
    of_modules = [frame for frame in frames if frame.filename.replace(os.sep, "/").startswith(inside)]
    if not of_modules:
        return "torch's own code; .cause of this exception is torch's"
    line = line_of((of_modules[-1].filename, of_modules[-1].lineno or 0))
    return line[len(TORCH_DIR) - len("torch/") :]


def _without_advice(message: str) -> str:
    """The first sentences of torch's message, up to its advice; at most ``_LONGEST`` characters."""
    kept: list[str] = []
    for sentence in re.split(r"(?<=[.!?;]) +", message):
        if _ADVICE.search(sentence):
            break
        kept.append(sentence)
    words = " ".join(kept).strip() or "no more is known; .cause of this exception is torch's"
    return words if len(words) <= _LONGEST else words[: _LONGEST - 1] + "…"
