"""Types table: a type → its state, how it is watched, and which of its methods change it.

State is watched in one of three ways: *contents* (a function gives a snapshot that can be compared), *asked* (a
function in C tells it, and is called again), or as an *effect* (to use it is to change it: iterators, files, queues),
which a compiled call cannot have.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "ASKED",
    "CONTAINERS",
    "PLAIN",
    "answer_of",
    "contents_of",
    "effect_of",
    "effect_of_function",
    "is_a",
    "is_iterator",
    "put_back",
]

PLAIN = frozenset(
    (
        *(bool, int, float, complex, str, bytes, type(None), type(...), slice, range),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, type(NotImplemented)),
    )
)
"""Types of values that never change and hold nothing."""
CONTAINERS = (list, tuple, dict, set, frozenset, deque)

_FILES = "writes to or reads from a file or a data base that lies outside of the call; a compiled call does not"
_QUEUES = "puts something into a queue or takes something out of it; a compiled call does not"
_STREAMS = "moves a stream or a digest that lies outside of the call on; a compiled call does not"
_OUTSIDE = "do it outside of forward"
_EFFECTS: dict[tuple[str, str], tuple[str, str]] = {
    ("sqlite3", "execute executemany executescript commit rollback fetchone fetchall fetchmany"): (_FILES, _OUTSIDE),
    ("_io", "write writelines read readline readlines readinto seek truncate"): (_FILES, _OUTSIDE),
    ("_queue", "put get put_nowait get_nowait"): (_QUEUES, _OUTSIDE),
    ("_csv", "writerow writerows"): (_FILES, _OUTSIDE),
    ("zlib", "compress decompress flush"): (_STREAMS, _OUTSIDE),
    ("_hashlib", "update"): (_STREAMS, _OUTSIDE),
    ("_socket", "send sendall sendto recv recv_into recvfrom"): (_FILES, _OUTSIDE),
    ("_multiprocessing", "send recv send_bytes recv_bytes"): (_QUEUES, _OUTSIDE),
}
_BY_MODULE = {module: (frozenset(names.split()), told) for (module, names), told in _EFFECTS.items()}
_IN_MEMORY = ("StringIO", "BytesIO")


def is_a(value: Any, kinds: Any) -> bool:
    """Whether an object is of a class, for which none of its code runs: ``isinstance`` asks its ``__class__``."""
    return issubclass(type(value), kinds)


def effect_of(owner: Any, name: str) -> tuple[str, str] | None:
    """Why a compiled call cannot do what a method of an object does, and what to do instead; ``None`` if it can.

    Containers are none of these: what they hold is compared and put back.
    """
    kind = type(owner)
    for base in kind.__mro__:
        found = _BY_MODULE.get(base.__module__)
        if found is not None and name in found[0] and kind.__name__ not in _IN_MEMORY:
            return None if owner in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__) else found[1]
    return None


_PROCESS = "changes files, the process or another one; a compiled call does not"
_OF_THE_PROCESS = frozenset(
    "mkdir rmdir remove unlink rename replace write system chdir putenv unsetenv kill truncate ftruncate symlink link "
    "fork forkpty posix_spawn execv execve umask".split()
)


def effect_of_function(module: str, name: str, mode: str = "r", stream: Any = None) -> tuple[str, str] | None:
    """Likewise of a function in C.

    Args:
        mode: in which ``open`` opens a file.
        stream: what ``print`` is told to write to.
    """
    if module in ("posix", "nt") and name in _OF_THE_PROCESS:
        return _PROCESS, _OUTSIDE
    if module in ("_io", "io") and name == "open" and set(mode) & set("wax+"):
        return _FILES, _OUTSIDE
    if name == "print" and stream not in (None, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        return _FILES, _OUTSIDE
    return None


_ITERATORS = ("itertools", "builtins", "collections", "_collections", "_csv", "_io")


def is_iterator(value: Any) -> bool:
    """Whether to look at an object is to change it: an iterator, a generator, an open file."""
    kind = type(value)
    if not hasattr(kind, "__next__"):
        return False
    return kind.__module__ in _ITERATORS


def _array(value: Any) -> Any:
    numbers = value.tolist() if value.dtype.hasobject else value.tobytes()
    return [str(value.dtype), value.shape, numbers]


def _state_of(generator: Any) -> Any:
    """The state of a generator of NumPy's, in plain numbers."""
    return _plain(generator.state)


def _plain(state: Any) -> Any:
    if is_a(state, dict):
        return {name: _plain(each) for name, each in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _partial(value: functools.partial) -> list[Any]:
    return [value.func, *value.args, *value.keywords.items()]


def _by_class(kind: type) -> Callable[[Any], Any] | None:
    module, name = kind.__module__, kind.__name__
    if module == "numpy" and name in ("ndarray", "memmap", "recarray"):
        return _array
    if module == "numpy.ma" or (module.startswith("numpy") and name == "MaskedArray"):
        return lambda value: [_array(value.data), _array(value.mask)]
    known = {
        ("builtins", "bytearray"): bytes,
        ("builtins", "memoryview"): bytes,
        ("array", "array"): lambda value: [value.typecode, value.tobytes()],
        ("mmap", "mmap"): lambda value: value[:],
        ("_io", "StringIO"): lambda value: [value.getvalue(), value.tell()],
        ("_io", "BytesIO"): lambda value: [value.getvalue(), value.tell()],
        ("numpy.random._generator", "Generator"): lambda value: _state_of(value.bit_generator),
        ("numpy.random.mtrand", "RandomState"): lambda value: _state_of(value._bit_generator),
        ("_random", "Random"): lambda value: value.getstate(),
        ("random", "Random"): lambda value: value.getstate(),
        ("decimal", "Context"): repr,
        ("_thread", "lock"): lambda value: value.locked(),
        ("_thread", "RLock"): repr,
        ("functools", "partial"): _partial,
    }
    return known.get((module, name))


def contents_of(value: Any) -> Callable[[Any], Any] | None:
    """The function that gives a comparable snapshot of what an object holds; ``None``: its type is not in the table."""
    kind = type(value)
    if issubclass(kind, OrderedDict | dict):
        return lambda held: list(dict.items(held)) if not is_a(held, OrderedDict) else list(OrderedDict.items(held))
    if issubclass(kind, types.MappingProxyType):
        return lambda held: list(held.items())
    if kind.__name__ in ("dict_keys", "dict_values", "dict_items", "odict_keys", "odict_values", "odict_items"):
        return list
    for each in (list, deque, set, frozenset):
        if issubclass(kind, each):
            return functools.partial(_as_stored, each)
    if kind is tuple:
        return None
    for base in kind.__mro__:
        if (found := _by_class(base)) is not None:
            return found
    if "_ctypes" in sys.modules and is_a(value, (sys.modules["_ctypes"]._SimpleCData, sys.modules["_ctypes"].Array)):
        return bytes
    return None


def put_back(value: Any, contents: Any) -> None:
    """Makes an object hold what :func:`contents_of` gave; never empties it first: another thread may be looking."""
    if is_a(value, dict):
        then, kind = dict(contents), OrderedDict if is_a(value, OrderedDict) else dict
        for key in dict.keys(value) - then.keys():
            kind.pop(value, key, None)
        moved = list(kind.__iter__(value)) != list(then)[: len(value)]
        for key, each in then.items():
            if moved:
                kind.pop(value, key, None)
            kind.__setitem__(value, key, each)
    elif is_a(value, list):
        list.__setitem__(value, slice(None), contents)
    elif is_a(value, set):
        set.intersection_update(value, contents)
        set.update(value, contents)
    elif is_a(value, deque):
        value.clear()
        value.extend(contents)
    elif is_a(value, bytearray):
        value[:] = contents
    elif type(value).__name__ in _IN_MEMORY:
        text, place = contents
        value.seek(0)
        value.truncate()
        value.write(text)
        value.seek(place)
    elif type(value).__module__ == "array":
        value[:] = type(value)(contents[0], contents[1])
    elif "_ctypes" in sys.modules and type(value).__mro__[-2].__module__ == "_ctypes":
        ctypes = sys.modules["ctypes"]
        ctypes.memmove(ctypes.addressof(value), contents, len(contents))
    elif hasattr(value, "setstate"):
        value.setstate(contents)
    elif hasattr(value, "bit_generator") or hasattr(value, "_bit_generator"):
        getattr(value, "bit_generator", getattr(value, "_bit_generator", None)).state = contents
    elif type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        _, _, numbers = contents
        value[...] = numbers if value.dtype.hasobject else type(value)(value.shape, value.dtype, bytearray(numbers))


def _as_stored(kind: type, held: Any) -> Any:
    return set(kind.__iter__(held)) if kind in (set, frozenset) else list(kind.__iter__(held))


_ASKED = """
posix getcwd|posix getcwdb|posix stat|posix lstat|posix access|posix listdir|posix getpid|posix getppid
nt getcwd|nt stat|_signal getsignal|signal getsignal|_locale localeconv|_locale setlocale|locale localeconv
decimal getcontext|_decimal getcontext|gc isenabled|gc get_threshold|gc get_count|sys getrecursionlimit
sys getswitchinterval|sys gettrace|sys getdefaultencoding|_thread get_ident|_thread get_native_id
ContextVar get|_lru_cache_wrapper cache_info|_contextvars copy_context|lock locked|type __subclasses__|numpy geterr
numpy.core.umath geterrobj
numpy._core._multiarray_umath _get_extobj_dict|Generator initial_seed|torch._C get_num_threads|torch get_num_threads
torch._C get_num_interop_threads|torch get_num_interop_threads|torch._C _get_deterministic_algorithms
torch._C _get_deterministic_algorithms_warn_only|torch._C _get_float32_matmul_precision|torch._C get_default_dtype
torch get_default_dtype|torch._C _get_cudnn_enabled|torch._C _get_cudnn_benchmark|torch._C _get_cudnn_deterministic
torch._C _get_mkldnn_enabled|torch._C _get_flash_sdp_enabled|torch._C _get_math_sdp_enabled|torch is_anomaly_enabled
torch._C _get_mem_efficient_sdp_enabled|torch._C _get_cudnn_sdp_enabled|torch._C _get_cublas_allow_tf32
torch._C is_anomaly_enabled|torch._C is_anomaly_check_nan_enabled|torch is_anomaly_check_nan_enabled
torch._C _get_cudnn_allow_tf32|torch._C _cuda_getDeviceCount|torch._C _get_default_device
"""
ASKED: frozenset[tuple[str, str]] = frozenset(
    tuple(each.split()) for line in _ASKED.split("\n") for each in line.split("|") if each
)
"""Functions in C that tell hidden state, by module or type, and name: cheap and free of effects."""


def answer_of(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a function that tells hidden state says now, in a form that can be compared."""
    try:
        found = function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - as forward would meet it
        return type(error).__name__, str(error)
    kind = type(found)
    if kind.__name__ == "stat_result":
        return found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns
    if kind.__module__ == "decimal":
        return repr(found)
    if kind.__name__ == "ModuleSpec":
        return found.name, found.origin
    if kind.__name__ == "Context":
        return [each for pair in sorted(found.items(), key=lambda pair: pair[0].name) for each in pair]
    return found
