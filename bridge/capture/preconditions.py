"""Preconditions of a capture: the module's kind, its hooks, its arguments → refusals before anything is traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bridge.base.devices import HOST, devices_of, may_be_on_host
from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.base.pytrees import leaf_names
from bridge.base.torch_internals import pytree
from bridge.state import SampleCall, derived_attribute, hooks_of, tensor_problem

__all__ = ["CACHES", "NO_CACHE", "check_call", "device_of_call", "uninitialized"]

#: Where transformers' caches of keys and values live, and what to do about one.
CACHES = "transformers.cache_utils"
NO_CACHE = "set model.config.use_cache = False: training has no use for the keys and values of earlier tokens"

_OTHERWISE = "use torch.nn.utils.parametrizations, or make it permanent (remove_weight_norm, prune.remove)"
_PASS_CONTENTS = "make it an attribute of the module, or pass what forward takes from it"
_PASS_TUPLE = "pass a tuple of its numbers: tuple(x.shape)"
_PLAIN_ARGUMENTS = (type(None), bool, int, float, str)

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
    """Raises :class:`UnsupportedModule` for what is never captured: lazy parameters, hooks inside, odd arguments."""
    module, name = call.module, call.name
    _refuse_scripted(module, name)
    _refuse_uninitialized(module, name)
    _refuse_parallel(module, name)
    _refuse_hooks(module, name)
    _refuse_arguments(call.args, call.kwargs, name)


def device_of_call(call: SampleCall) -> torch.device:
    """The device of everything that a call works on; the host's where there is no tensor.

    Integers on the host, lengths for instance, are taken to the device of the others.

    Raises:
        UnsupportedModule: there are several.
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


def _refuse_scripted(module: nn.Module, name: str) -> None:
    reason, hint = "compiled by TorchScript, whose code is not seen", "dispatch the module it was made of"
    found = [
        Unsupported(f"torch.jit module '{path}'" if path else "torch.jit module", f"{name}.{path}", reason, hint)
        for path, child in module.named_modules()
        if isinstance(child, torch.jit.ScriptModule)
    ]
    if found:
        raise UnsupportedModule(name, found[:1])


def uninitialized(module: nn.Module) -> list[str]:
    """Paths of parameters and buffers of lazy modules that have no shape yet: the first call gives it to them."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [path for path, tensor in tensors if isinstance(tensor, nn.parameter.UninitializedTensorMixin)]


def _refuse_uninitialized(module: nn.Module, name: str) -> None:
    if lazy := uninitialized(module):
        reason = "a parameter of a lazy module that has no shape yet"
        hint = "call the module once on a sample, then dispatch it; or dispatch it without a sample"
        raise UnsupportedModule(name, [Unsupported(f"uninitialized '{path}'", path, reason, hint) for path in lazy])


def _refuse_parallel(module: nn.Module, name: str) -> None:
    """Refuses wrappers for several processes or replicas, naming what to dispatch instead, and sharded parameters.

    Wrappers (DDP, FSDP) run Python code and collectives around the module that they hold; that one can be dispatched.
    ``fully_shard`` leaves this rank's part of each parameter on the module until it is called.
    """
    problems = []
    for path, child in module.named_modules():
        kinds = [kind.__name__ for kind in type(child).__mro__ if kind.__module__.startswith("torch.")]
        if known := next((kind for kind in kinds if kind in _WRAPPERS), None):
            reason, hint = _WRAPPERS[known]
            problems.append(Unsupported(known, path or name, reason, hint.format(path or "model")))
    # one that hides its own part of a parameter's name; inside another module it is just Python code
    if "ActivationWrapper" in [kind.__name__ for kind in type(module).__mro__]:
        hint = "dispatch what it wraps: add_tvm_dispatch(model._checkpoint_wrapped_module, ...)"
        problems.append(Unsupported(name, name, "names its parameters as if it were not there", hint))
    shards = [path for path, each in module.named_parameters() if type(each.data).__name__ == "DTensor"]
    if shards:
        op = f"shard '{shards[0]}'" + (f" and {len(shards) - 1} more" if len(shards) > 1 else "")
        reason = "a parameter that is a shard already (DTensor)"
        hint = "call add_tvm_dispatch before fully_shard; leave tensor parallelism (parallelize_module) to PyTorch"
        problems.append(Unsupported(op, shards[0], reason, hint))
    if problems:
        raise UnsupportedModule(name, problems)


def _refuse_hooks(module: nn.Module, name: str) -> None:
    """Forward hooks on inner modules are traced as forward is; those that are not functions of tensors are refused."""
    found = [
        Unsupported(f"{kind} on '{path}'" if path else kind, f"{name}.{path}" if path else name, *problem)
        for path, child in module.named_modules()
        for kind, hook in hooks_of(child)
        if (problem := _problem_of_hook(kind, hook, child) if path else _problem_of_own_hook(hook)) is not None
    ]
    if found:
        raise UnsupportedModule(name, found)


def _problem_of_hook(kind: str, hook: Any, module: nn.Module) -> tuple[str, str] | None:
    """Why a hook on an inner module cannot be traced, and what to do about it."""
    if not kind.startswith("forward"):
        return "a backward hook on an inner module is Python code in the middle of the backward", "remove it"
    if derived_attribute(hook) is not None:
        if type(module).__setattr__ is not nn.Module.__setattr__:  # recurrent modules keep their weights elsewhere too
            return f"{type(hook).__name__} on a module that does more where an attribute is set", _OTHERWISE
        return None
    if type(hook).__module__.startswith("torch.nn.utils."):
        return f"{type(hook).__name__} sets an attribute of the module at every call", _OTHERWISE
    return None


def _problem_of_own_hook(hook: Any) -> tuple[str, str] | None:
    """The module's own hooks run around the compiled call, which would take what they set as an input."""
    if derived_attribute(hook) is None:
        return None
    hint = "dispatch a module around it: nn.Sequential(module)"
    return f"{type(hook).__name__} on the dispatched module itself", hint


def _refuse_arguments(args: tuple, kwargs: dict[str, Any], name: str) -> None:
    leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_size)
    found = []
    for path, leaf in zip(leaf_names(spec), leaves, strict=True):
        what = f"argument {path}, a {type(leaf).__name__}"
        if isinstance(leaf, torch.Tensor):
            if problem := tensor_problem(leaf):
                found.append(Unsupported(what, f"{name}.forward", problem, "pass a plain tensor"))
        elif not isinstance(leaf, _PLAIN_ARGUMENTS):
            hint = NO_CACHE if type(leaf).__module__ == CACHES else _PASS_TUPLE if _is_size(leaf) else _PASS_CONTENTS
            reason = "not a tensor, number, string, flag or None, nor a tuple, list or dict of them"
            found.append(Unsupported(what, f"{name}.forward", reason, hint))
    if found:
        raise UnsupportedModule(name, found)


def _is_size(value: Any) -> bool:
    """Whether pytree takes it for a tuple, and gives a tuple back, which has less to it."""
    return isinstance(value, torch.Size)
