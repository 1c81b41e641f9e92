"""Modules that torch runs on several processes or replicas: what of them can be dispatched, and what is refused.

Wrappers (DDP, FSDP) run Python code and collectives around the module that they hold; that module can be dispatched.
"""

from __future__ import annotations

from torch import nn

from bridge.base.errors import Unsupported, UnsupportedModule

__all__ = ["refuse_parallel"]

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


def refuse_parallel(module: nn.Module) -> None:
    """Raises :class:`UnsupportedModule` for wrappers, by what to dispatch instead, and for parameters that are shards.

    ``fully_shard`` leaves this rank's part of each parameter on the module until it is called.
    """
    name = type(module).__name__
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
