"""What is never captured, told from a call before it is made: the module's kind, its hooks, its arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.base.pytrees import leaf_names
from bridge.base.torch_internals import pytree
from bridge.capture.parallel import refuse_parallel
from bridge.state.module import hooks_of
from bridge.state.tensors import tensor_problem

__all__ = ["CACHES", "NO_CACHE", "check_call"]

#: Where transformers' caches of keys and values live, and what to do about one.
CACHES = "transformers.cache_utils"
NO_CACHE = "set model.config.use_cache = False: training has no use for the keys and values of earlier tokens"

_PASS_CONTENTS = "make it an attribute of the module, or pass what forward takes from it"
_PLAIN_ARGUMENTS = (type(None), bool, int, float, str)


def check_call(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises :class:`UnsupportedModule` for what is never captured: lazy parameters, hooks inside, odd arguments."""
    name = type(module).__name__
    _refuse_scripted(module, name)
    _refuse_uninitialized(module, name)
    refuse_parallel(module)
    _refuse_hooks(module, name)
    _refuse_arguments(args, kwargs, name)


def _refuse_scripted(module: nn.Module, name: str) -> None:
    reason, hint = "compiled by TorchScript, whose code torch.export does not see", "dispatch the module it was made of"
    found = [
        Unsupported(f"torch.jit module '{path}'" if path else "torch.jit module", f"{name}.{path}", reason, hint)
        for path, child in module.named_modules()
        if isinstance(child, torch.jit.ScriptModule)
    ]
    if found:
        raise UnsupportedModule(name, found[:1])


def _refuse_uninitialized(module: nn.Module, name: str) -> None:
    lazy = [
        path
        for path, tensor in (*module.named_parameters(), *module.named_buffers())
        if isinstance(tensor, nn.parameter.UninitializedTensorMixin)
    ]
    if lazy:
        reason = "a parameter of a lazy module that has no shape yet"
        hint = "call the module once on a sample, then dispatch it"
        raise UnsupportedModule(name, [Unsupported(f"uninitialized '{path}'", path, reason, hint) for path in lazy])


def _refuse_hooks(module: nn.Module, name: str) -> None:
    found = [
        Unsupported(f"{kind} on '{path}'", f"{name}.{path}", "a hook on an inner module is Python code", "remove it")
        for path, child in module.named_modules()
        if path and (kind := hooks_of(child))
    ]
    if found:
        raise UnsupportedModule(name, found)


def _refuse_arguments(args: tuple, kwargs: dict[str, Any], name: str) -> None:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    found = []
    for path, leaf in zip(leaf_names(spec), leaves, strict=True):
        what = f"argument {path}, a {type(leaf).__name__}"
        if isinstance(leaf, torch.Tensor):
            if problem := tensor_problem(leaf):
                found.append(Unsupported(what, f"{name}.forward", problem, "pass a plain tensor"))
        elif not isinstance(leaf, _PLAIN_ARGUMENTS):
            hint = NO_CACHE if type(leaf).__module__ == CACHES else _PASS_CONTENTS
            reason = "not a tensor, number, string, flag or None, nor a tuple, list or dict of them"
            found.append(Unsupported(what, f"{name}.forward", reason, hint))
    if found:
        raise UnsupportedModule(name, found)
