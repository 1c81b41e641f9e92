"""Call key: a call before it is made → what it looks like: classes, names and layouts of tensors, arguments, modes.

Canonical form of a key: classes, operators, layouts, structures, plain values → the same data in any process.

Sources: a module → a digest of the code that its forward can reach, file by file, and of its plain attributes.

The record of a call's runs says what forward does. What a capture finds out beyond that (how often it runs until it is
steady, what no row tells) stays true as long as this code does.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import starmap
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from bridge.artifact import key_of
from bridge.base.devices import current_device, name_of
from bridge.base.modes import autocast_setting, cuda_autocast_setting
from bridge.base.session import SESSION
from bridge.base.torch_cuda import read_settings
from bridge.base.torch_internals import OpOverload, pytree, storage_id
from bridge.compile import backend_for
from bridge.state import SampleCall, constant_key, dict_of, kept, module_tensors

__all__ = ["NotCanonicalError", "begin_reading", "call_key_of", "canonical", "code_digest"]


def call_key_of(call: SampleCall, partition: Any) -> tuple | None:
    """What a call, made now, looks like before it is made; ``None`` where that cannot be compared.

    How tensors share memory is part of it: what is written through one of them is read through the other.
    """
    strategy = _strategy_key(partition)
    tensors, real_tensors = module_tensors(call.module)
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    memory: dict[int, int] = {}
    places = []
    for tensor in (*real_tensors, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))):
        storage = memory.setdefault(storage_id(tensor), len(memory))
        places.append((storage, tensor.storage_offset(), tensor.device, tensor.is_neg()))
    keys = [_tensor_key(leaf) if isinstance(leaf, torch.Tensor) else constant_key(leaf) for leaf in leaves]
    if strategy is None or None in keys:
        return None
    classes = tuple((path, type(child)) for path, child in call.module.named_modules(remove_duplicate=False))
    casts = autocast_setting(), cuda_autocast_setting()
    modes = (torch.is_grad_enabled(), torch.get_default_dtype(), current_device(), *casts)
    settings = tuple(map(str, read_settings()))  # which kernels composite operators are made of
    measured = _measured() if any(issubclass(kind, nn.RNNBase) for _, kind in classes) else ()
    looks = classes, tuple(tensors), tuple(places), tuple(keys), spec
    return *looks, modes, strategy, tuple(call.dims), settings, measured


def _measured() -> tuple:
    """What the choice between the forms of a recurrent layer depends on beside its shape."""
    host = backend_for(None)
    settings = torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled()
    return host.threads(), str(host.machine()), *settings


def _tensor_key(tensor: torch.Tensor) -> tuple:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _strategy_key(partition: Any) -> tuple | None:
    """A strategy by name or by value; ``None`` for an object that is not known to stay as it is."""
    if isinstance(partition, str):
        return (partition,)
    if not (is_dataclass(partition) and partition.__dataclass_params__.frozen):
        return None
    values = tuple(constant_key(getattr(partition, field.name)) for field in fields(partition))
    return None if None in values else (type(partition), values)


_BY_NAME = (torch.dtype, torch.layout, torch.memory_format)


class NotCanonicalError(TypeError):
    """Something whose name in another process is not known."""


def canonical(value: Any) -> Any:
    """Plain data (see :func:`bridge.artifact.key_of`), equal in all processes, and on all GPUs, for what is the same.

    Raises:
        NotCanonicalError: for an object of any other kind.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, _BY_NAME):
        return ["torch", str(value)]
    if isinstance(value, torch.device):
        return ["device", name_of(value)]
    if isinstance(value, OpOverload):
        return ["operator", str(value)]
    if isinstance(value, pytree.TreeSpec):
        return ["structure", canonical(value.type), canonical(value.context), list(map(canonical, value.children()))]
    if isinstance(value, type):
        return ["class", value.__module__, value.__qualname__]
    if isinstance(value, tuple | list):
        return [type(value).__qualname__, *map(canonical, kept(value))]
    if isinstance(value, set | frozenset):
        return ["set", *sorted(map(canonical, kept(value)), key=repr)]
    if type(value) is dict:
        return ["dict", *([canonical(key), canonical(each)] for key, each in value.items())]
    if is_dataclass(value) and value.__dataclass_params__.frozen:
        return [canonical(type(value)), *([each.name, canonical(getattr(value, each.name))] for each in fields(value))]
    raise NotCanonicalError(f"{type(value)} has no form that is the same in every process")


_OTHERS = frozenset([*sys.stdlib_module_names, "torch", "tvm", "tvm_ffi", "numpy", "bridge", "autodiff", "partition"])
"""Packages that are no part of a model's code: their versions are in the key, or they compute nothing of it."""


def code_digest(module: nn.Module) -> str | None:
    """The digest; ``None`` where a class of the module tree has no file (a cell of a notebook)."""
    files = _files_now(_modules_of(module))
    if files is None:
        return None
    try:
        read = [[name, _digest_of(path, changed)] for name, (path, changed) in sorted(files.items())]
    except OSError:
        return None
    return key_of(read, _attributes(module))


def begin_reading(module: nn.Module) -> None:
    """Has the system read the files that the module's digest will be of, hundreds of a model's, if they are on a disk.

    A thread that reads them would wait for the interpreter's lock at each, and make the capture wait for it.
    """
    if hasattr(os, "posix_fadvise"):
        for path, changed in (_files_now(_modules_of(module)) or {}).values():
            _begin_to_read(path, changed)


@cache
def _begin_to_read(path: str, changed: int) -> None:
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _modules_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the Python modules that classes of the module tree are from."""
    classes = {base for child in module.modules() for base in type(child).__mro__}
    return tuple(sorted({each.__module__ for each in classes if each.__module__.partition(".")[0] not in _OTHERS}))


Files = dict[str, tuple[str, int]]
"""Of modules by their names: the path, and when it was changed."""

_FOUND: dict[tuple[str, ...], tuple[int, Files]] = SESSION.cache("lowerings", {})
"""What modules were found to reach, and how many were imported then: modules of one model ask again and again."""


def _files_now(names: tuple[str, ...]) -> Files | None:
    """Files of all modules that these reach; ``None`` where one of these has none, or a file is gone.

    What was found before holds until a module is imported or one of the files is another: an edited one may have been
    loaded again, and name modules that were there before.
    """
    found = _FOUND.get(names)
    if found is not None and found[0] == len(sys.modules):
        with suppress(OSError):
            if all(starmap(_is_as_found, found[1].items())):
                return found[1]
    imported, files = len(sys.modules), _files_reached(names)
    if files is not None:
        _FOUND[names] = imported, files
    return files


def _is_as_found(name: str, file: tuple[str, int]) -> bool:
    path, changed = file
    return getattr(sys.modules.get(name), "__file__", None) == path and os.stat(path).st_mtime_ns == changed


def _files_reached(names: tuple[str, ...]) -> Files | None:
    reached: Files = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in reached or name.partition(".")[0] in _OTHERS:
            continue
        found = sys.modules.get(name)
        path = getattr(found, "__file__", None)
        if path is None:
            if name in names:
                return None
            continue
        try:
            reached[name] = path, os.stat(path).st_mtime_ns
        except OSError:
            return None
        waiting.extend(set(_named_in(found)))
    return reached


@cache
def _digest_of(path: str, changed: int) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.sha256(file.read()).hexdigest()


_WITH_MODULE = (type, FunctionType)


def _named_in(module: ModuleType) -> Iterator[str]:
    """Modules that a module's names are of."""
    for value in list(vars(module).values()):
        if issubclass(type(value), ModuleType):
            yield value.__name__
        elif issubclass(type(value), _WITH_MODULE):
            yield value.__module__ or ""


def _attributes(module: nn.Module) -> list[Any]:
    """What is plain among the attributes of the modules in the tree, and of the objects that they hold."""
    found: list[Any] = []
    seen: set[int] = set()
    for path, child in module.named_modules():
        for name, value in sorted(vars(child).items()):
            if name.startswith("_") and name in _OWN:
                continue
            inside = {} if issubclass(type(value), nn.Module) or id(value) in seen else dict_of(value) or {}
            if inside:
                seen.add(id(value))
            for key, each in [("", value), *sorted(inside.items(), key=lambda item: str(item[0]))]:
                try:
                    found.append([path, name, str(key), canonical(each)])
                except NotCanonicalError:
                    continue
    return found


_OWN = frozenset(vars(nn.Module()))
"""Attributes of every module: its parameters, buffers, hooks and children."""
