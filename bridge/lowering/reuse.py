"""Memoized lowering: equal calls of different modules share one lowered call; of twelve equal layers, one is lowered.

A lookup has two steps. The *call key* describes the call before it runs: module classes, names and layouts of tensors,
shared memory, arguments, modes. The *key of its record* (:mod:`bridge.capture.record_call`) describes the run: the
operators in order, their constants, the tensors that they read and that the call returns, and the numbers that Python
code reads.

Why that is exact: two calls with equal keys run the same operators on the same inputs, so they are the same function of
their inputs. The record is made of the very module that is to be dispatched, so a layer whose ``forward`` reads a
global, or one of another dropout rate, has another key and is lowered by itself.

A cache entry lives as long as a dispatch entry uses it. Lowerings of earlier processes are in the disk cache under the
same two keys, extended by facts that are constant within a process: versions and sources of this package, torch's
settings, and the source files of the module's code. Two processes that lower one call at once write the same.

Canonical form of a key: classes, operators, layouts, structures, plain values → the same data in any process.

Sources: a module → a digest of the code that its forward can reach, file by file, and of its plain attributes.
A record does not hold everything that a capture finds out (for instance the number of runs until the call is steady);
these facts stay true as long as the code does.
"""

from __future__ import annotations

import atexit
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
from weakref import WeakValueDictionary

import torch
from torch import nn

from bridge.artifact import NoFormError, current_store, key_of, of_this_package
from bridge.base.devices import HOST, current_device, name_of, working_for
from bridge.base.errors import UnsupportedModule
from bridge.base.log import Stopwatch, channel
from bridge.base.modes import autocast_setting, cuda_autocast_setting
from bridge.base.session import SESSION
from bridge.base.torch_cuda import gpu_features, read_settings
from bridge.base.torch_internals import OpOverload, pytree, storage_id
from bridge.capture import Captured, LoopedCall, RecordedCall, capture, device_of_call, in_attempts, record_call
from bridge.compile import host_features
from bridge.lowering.lowered import LoweredCall
from bridge.lowering.pipeline import lower_captured
from bridge.lowering.record import KeptLowering, parts_of_lowering
from bridge.state import SampleCall, constant_key, dict_of, kept, module_tensors


def call_key_of(call: SampleCall, partition: Any) -> tuple | None:
    """The call key of a call made now; ``None`` if a part of it cannot be compared.

    Shared memory of tensors is part of it: a write through one tensor is read through another.
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
    settings = tuple(map(str, read_settings()))  # they choose the kernels in composite operators
    looks = classes, tuple(tensors), tuple(places), tuple(keys), spec
    return *looks, modes, strategy, tuple(call.dims), settings, torch.backends.mkldnn.enabled


def _tensor_key(tensor: torch.Tensor) -> tuple:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _strategy_key(partition: Any) -> tuple | None:
    """A strategy's name or value; ``None`` for an object that may change."""
    if isinstance(partition, str):
        return (partition,)
    if not (is_dataclass(partition) and partition.__dataclass_params__.frozen):
        return None
    values = tuple(constant_key(getattr(partition, field.name)) for field in fields(partition))
    return None if None in values else (type(partition), values)


_BY_NAME = (torch.dtype, torch.layout, torch.memory_format)


class NotCanonicalError(TypeError):
    """An object without a name that holds in another process."""


def canonical(value: Any) -> Any:
    """Plain data (see :func:`bridge.artifact.key_of`), the same in all processes and on all GPUs for equal values.

    ``NotCanonicalError`` for an object of any other kind.
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
"""Packages outside of a model's code: their versions are in the key, or they compute nothing for the model."""


def code_digest(module: nn.Module) -> str | None:
    """The module's code digest; ``None`` if a class of the module tree has no file (a notebook cell)."""
    files = _files_now(_modules_of(module))
    if files is None:
        return None
    try:
        read = [[name, _digest_of(path, changed)] for name, (path, changed) in sorted(files.items())]
    except OSError:
        return None
    return key_of(read, _attributes(module))


def begin_reading(module: nn.Module) -> None:
    """Starts read-ahead, by the operating system, of the source files for the module's digest (hundreds for a model).

    A thread that reads them would wait for the interpreter's lock at each, and delay the capture.
    """
    if hasattr(os, "posix_fadvise"):
        for path, changed in (_files_now(_modules_of(module)) or {}).values():
            _begin_to_read(path, changed)


@cache
def _begin_to_read(path: str, changed: int) -> None:
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _modules_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the Python modules that define the classes of the module tree."""
    classes = {base for child in module.modules() for base in type(child).__mro__}
    return tuple(sorted({each.__module__ for each in classes if each.__module__.partition(".")[0] not in _OTHERS}))


Files = dict[str, tuple[str, int]]
"""Python module name → its file's path and modification time."""

_FOUND: dict[tuple[str, ...], tuple[int, Files]] = SESSION.cache("lowerings", {})
"""Module names → the number of imported modules at the search, and the files found (a cache)."""


def _files_now(names: tuple[str, ...]) -> Files | None:
    """Files of all Python modules that these reach; ``None`` if one of these has no file, or a file is gone.

    A cached answer holds until a module is imported or one of the files changes: an edited module may have been
    reloaded, and may name modules that were imported before.
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
    """Modules that define the objects in a module's namespace."""
    for value in list(vars(module).values()):
        if issubclass(type(value), ModuleType):
            yield value.__name__
        elif issubclass(type(value), _WITH_MODULE):
            yield value.__module__ or ""


def _attributes(module: nn.Module) -> list[Any]:
    """The plain attributes of the modules in the tree, and of the objects that they hold."""
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
"""Attributes that every module has: its parameters, buffers, hooks and children."""


_CALL, _LOWERING = "call", "lowering"

cache_log = channel("cache")


def call_on_disk(call_key: tuple | None) -> str | None:
    """The disk cache's key of a call before its run; ``None`` if there is no cache, or no key."""
    if call_key is None or not current_store().is_usable:
        return None
    try:
        return of_this_package(_CALL, canonical(call_key), _surroundings())
    except NotCanonicalError as error:
        cache_log.info("a lowering is not kept: %s", error)
        return None


def keep_lowering(call: str, observed: tuple, module: nn.Module, lowered: LoweredCall) -> None:
    """Stores a lowered call, with its record's key ``observed``, in the disk cache, if it can be serialized; its
    programs are keyed by it from then on."""
    key = _key(call, observed, module)
    if key is None:
        return
    try:
        parts = parts_of_lowering(lowered)
    except (NoFormError, NotCanonicalError, ValueError) as error:
        cache_log.info("%s: the lowering is not kept: %s", type(module).__name__, error)
        return
    lowered.content = KeptLowering.content_of(parts)
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    current_store().put(_LOWERING, key, parts, name)


def kept_lowering(call: str, observed: tuple, module: nn.Module, recorded: RecordedCall) -> LoweredCall | None:
    """The lowered call of the disk cache with the same call key and record, or ``None``.

    Args:
        call: its key of :func:`call_on_disk`.
        observed: the key of its record.
        recorded: the current call.
    """
    key = _key(call, observed, module)
    found = None if key is None else current_store().get(_LOWERING, key)
    if found is None:
        return None
    cache_log.info("%s is lowered already, in the disk cache", type(module).__name__)
    return KeptLowering(found.parts, recorded.given)


def _key(call: str, observed: tuple, module: nn.Module) -> str | None:
    code = code_digest(module)
    if code is None:
        return None
    try:
        return of_this_package(_LOWERING, call, canonical(observed), code)
    except NotCanonicalError as error:
        cache_log.info("%s: the lowering is not kept: %s", type(module).__name__, error)
        return None


def _surroundings() -> list[Any]:
    """The facts beside the call on which shapes, strides and draws may depend: processor, GPU, torch's settings."""
    device = current_device()
    found = [host_features(), torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled()]
    if device != HOST:
        found += [*gpu_features(device), canonical(read_settings())]
    return found


log = channel("reuse")

#: By call key, then by the key of the record.
_LOWERED: dict[tuple, WeakValueDictionary[tuple, LoweredCall]] = SESSION.cache("lowerings", {})

# An entry is removed by its key when its value dies, and at interpreter exit a key cannot be hashed any more.
atexit.register(_LOWERED.clear)


def lower_once(call: SampleCall, partition: Any, looped: LoopedCall | None = None, steady: bool = False) -> LoweredCall:
    """Lowers a call, or returns the lowered call of an equal one; with gradients if grad mode is on.

    The module is left as :func:`bridge.capture.record_call` leaves it.

    Args:
        partition: a strategy of :func:`partition.partition`. A lowering with a strategy object that could change is not
            shared.
        looped: the call with loops of any length, which is not shared.
        steady: whether to refuse a call whose random draws decide its branches anew each time.

    Raises:
        UnsupportedModule, CompilationError: as :func:`bridge.lower.lower`.
    """
    watch = Stopwatch()
    if looped is not None:
        return _lowered(_decided(capture(call, looped), steady), partition, watch)
    return in_attempts(lambda: _lowered_once(call, partition, steady, watch))


def _lowered_once(call: SampleCall, partition: Any, steady: bool, watch: Stopwatch) -> LoweredCall:
    recorded, module = record_call(call), call.module
    with working_for(device_of_call(call)):
        call_key = call_key_of(call, partition)
        key = None if call_key is None else recorded.key
        on_disk = None if key is None or call.dims else call_on_disk(call_key)
        found = None if key is None else _LOWERED.get(call_key, {}).get(key)
        if found is not None:
            log.info("%s runs the operators of a call that is lowered already", call.name)
            _decided(found.captured, steady)
            return found
        found = None if on_disk is None else kept_lowering(on_disk, key, module, recorded)
        if found is not None:
            _decided(found.captured, steady)
            found.seconds = watch.seconds
            _remember(call_key, key, found)
            return found
        if on_disk is not None:
            begin_reading(module)
        captured = _decided(recorded.captured(), steady)
        lowered = _lowered(captured, partition, watch)
        if key is not None:
            _remember(call_key, key, lowered)
            if on_disk is not None and not (captured.problems or captured.runs_python):
                keep_lowering(on_disk, key, module, lowered)
        return lowered


def _decided(captured: Captured, steady: bool) -> Captured:
    """The captured call; with ``steady``, a refusal if random draws decide its branches anew each time."""
    if steady and captured.numbers.by_draws:
        raise UnsupportedModule(captured.module_name, captured.decisions)
    return captured


def _lowered(captured: Captured, partition: Any, watch: Stopwatch) -> LoweredCall:
    """Lowers a captured call; ``watch`` runs since its capture began."""
    seconds = watch.seconds
    lowered = lower_captured(captured, grad=torch.is_grad_enabled(), partition=partition, capture_seconds=seconds)
    lowered.seconds = watch.seconds
    return lowered


def _remember(call_key: tuple, key: tuple, lowered: LoweredCall) -> None:
    for each in [each for each, held in _LOWERED.items() if not held]:
        del _LOWERED[each]
    _LOWERED.setdefault(call_key, WeakValueDictionary())[key] = lowered
