"""Types table: a type → its state, how it is watched, and which of its methods change it.

State is watched in one of three ways: *contents* (a function takes a comparable snapshot), *asked* (a function in C
returns it, and is called again), or as an *effect* (each use is a change: iterators, files, queues), which a compiled
call cannot have.
"""

from __future__ import annotations

import decimal
import gc
import sys
import types
import warnings
from _random import Random as _Random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CONTAINERS", "FILES", "LOCKED", "LOCKS", "OUTSIDE", "PLAIN", "RAISING_WARNINGS", "answer_of"]
__all__ += ["contents_of", "effect_of", "implicit_of", "is_a", "is_iterator", "is_key", "is_told"]
__all__ += ["key_of", "paired", "parts_of", "put_back", "rows_of_types", "unwatched"]

PLAIN = frozenset(
    (
        *(bool, int, float, complex, str, bytes, type(None), type(...), slice, range),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, type(NotImplemented)),
    )
)
"""Types of values that never change and hold nothing."""
CONTAINERS = (list, tuple, dict, set, frozenset, deque)

_SHOWN = (types.MappingProxyType, *(type(view({})) for view in (dict.keys, dict.values, dict.items)))

FILES = "writes to or reads from a file or a data base that lies outside of the call; a compiled call does not"
_QUEUES = "puts something into a queue or takes something out of it; a compiled call does not"
_STREAMS = "moves a stream or a digest that lies outside of the call on; a compiled call does not"
_MEMORY = "frees or grows a tensor's memory, or puts another in its place; a compiled call does not"
_STORES = "reads or writes a store of several processes; a compiled call does not"
_MOVES = "moves a generator or changes an object that lies outside of the call; a compiled call does not"
_FOREIGN = "calls a library in C or reads memory by its address, whose state cannot be watched"
OUTSIDE = "do it outside of forward"
LOCKED = "acquires or releases a lock, and leaves it so; a compiled call does not", "do both in forward"
_SETS = "sets or resets a context variable; a compiled call does not", "do both in forward"
LOCKS = ("lock", "RLock")
"""Names of types of locks, whose state forward has to restore: a second run may wait for it forever."""
_EFFECTS: dict[tuple[str, str], tuple[str, str]] = {
    ("sqlite3", "execute executemany executescript commit rollback fetchone fetchall fetchmany"): (FILES, OUTSIDE),
    ("_io", "write writelines read readline readlines readinto seek truncate"): (FILES, OUTSIDE),
    ("_queue", "put get put_nowait get_nowait"): (_QUEUES, OUTSIDE),
    ("_csv", "writerow writerows"): (FILES, OUTSIDE),
    ("zlib", "compress decompress flush"): (_STREAMS, OUTSIDE),
    ("_hashlib", "update"): (_STREAMS, OUTSIDE),
    ("_socket", "send sendall sendto recv recv_into recvfrom"): (FILES, OUTSIDE),
    ("_multiprocessing", "send recv send_bytes recv_bytes"): (_QUEUES, OUTSIDE),
    ("builtins", "send throw close add_note with_traceback"): (_MOVES, OUTSIDE),
    ("_ctypes", "__call__ from_address"): (
        _FOREIGN,
        f"make a kernel an operator (torch.library.custom_op), or {OUTSIDE}",
    ),
    ("torch.storage", "resize_ _set_from_file _unsafe_set_cdata"): (_MEMORY, OUTSIDE),
    ("torch.distributed.distributed_c10d", "set add get wait delete_key append num_keys"): (_STORES, OUTSIDE),
}
_BY_MODULE = {module: (frozenset(names.split()), told) for (module, names), told in _EFFECTS.items()}
_IN_MEMORY = ("StringIO", "BytesIO")


def is_a(value: Any, kinds: Any) -> bool:
    """Whether an object is of a class; runs none of its code, whereas ``isinstance`` asks its ``__class__``."""
    return issubclass(type(value), kinds)


def effect_of(owner: Any, name: str) -> tuple[str, str] | None:
    """The reason why a compiled call cannot run an object's method, and the remedy; ``None`` if it can.

    Containers are not listed: their contents are compared and restored.
    """
    kind = type(owner)
    for base in kind.__mro__:
        found = _BY_MODULE.get(base.__module__)
        if found is not None and name in found[0] and kind.__name__ not in _IN_MEMORY:
            return None if owner in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__) else found[1]
    return None


def paired(function: Any) -> tuple[int, Callable[[], Any], tuple[str, str]] | None:
    """Paired effect (acquire, release; set, reset): a method → 1 or -1, its undo function, an unpaired one's refusal.

    Locks of several processes are acquired in code that is not followed as well: only their pairs are known.
    """
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if type(owner).__name__ == "ContextVar" and name in ("set", "reset"):
        return (1 if name == "set" else -1), str, _SETS  # nothing to undo: the run has a context of its own
    if type(owner).__name__ == "SemLock" and name in ("acquire", "release"):
        return (1 if name == "acquire" else -1), owner.release, LOCKED
    return None


_ITERATORS = ("itertools", "builtins", "collections", "_collections", "_csv", "_io")


def is_iterator(value: Any) -> bool:
    """Whether each look at an object changes it: an iterator, a generator, an open file."""
    kind = type(value)
    if not hasattr(kind, "__next__"):
        return False
    return kind.__module__ in _ITERATORS


def _array(value: Any) -> Any:
    numbers = value.tolist() if value.dtype.hasobject else value.tobytes()
    return [str(value.dtype), value.shape, value.strides, value.flags.writeable, numbers]


def _bytes(value: Any) -> Any:
    """A storage: its address and bytes (none on the meta device)."""
    return [value.data_ptr(), b"" if value.device.type == "meta" else bytes(value.tolist())]


def _goes_through(value: Any) -> Any:
    """An iterator over an array: its position and the array's entries."""
    return [value.index, *(value.base.ravel().tolist() if value.base.dtype.hasobject else [value.base.tobytes()])]


def _position(value: Any) -> Any:
    """An iterator of Python's → its container and its place there, as it tells them to ``copy``."""
    try:
        made, given, *place = value.__reduce__()
    except RuntimeError as error:  # a dictionary that has changed meanwhile
        return [str(error)]
    told = [(contents_of(each) if is_iterator(each) else None, each) for each in given]
    return [made, *(each if reader is None else reader(each) for reader, each in told), *place]


def _suspended(value: Any) -> Any:
    """A generator or coroutine: its code, the instruction where it waits, and its variables."""
    of = {each[3:]: getattr(value, each) for each in dir(value) if each[2:] in ("_code", "_frame")}
    frame = of["frame"]
    return [of["code"], *([] if frame is None else [frame.f_lasti, *frame.f_locals.items()])]


def _promised(value: Any) -> Any:
    return [value.done(), answer_of(value.value, (), {}) if value.done() else None]


def _locked(value: Any) -> Any:
    """How often a lock is held, and whether by this thread."""
    if not hasattr(value, "_is_owned"):
        return [int(value.locked())]
    return [int(repr(value).partition(" count=")[2].partition(" ")[0]), value._is_owned()]


def _write_lock(value: Any, contents: Any) -> None:
    times = _locked(value)[0] - contents[0]
    for _ in range(abs(times)):
        value.release() if times > 0 else value.acquire(False)


def _write_array(value: Any, contents: Any) -> None:
    *_, numbers = contents
    value[...] = numbers if value.dtype.hasobject else type(value)(value.shape, value.dtype, bytearray(numbers))


def _plain(state: Any) -> Any:
    """The state of a NumPy generator, in plain numbers."""
    if is_a(state, dict):
        return {name: _plain(each) for name, each in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _write_stream(value: Any, contents: Any) -> None:
    text, place = contents
    value.seek(0)
    value.truncate()
    value.write(text)
    value.seek(place)


def _write_dict(value: dict, contents: Any) -> None:
    then, kind = dict(contents), OrderedDict if is_a(value, OrderedDict) else dict
    for key in dict.keys(value) - then.keys():
        kind.pop(value, key, None)
    moved = list(kind.__iter__(value)) != list(then)[: len(value)]
    for key, each in then.items():
        if moved:
            kind.pop(value, key, None)
        kind.__setitem__(value, key, each)


def _write_set(value: set, contents: Any) -> None:
    set.intersection_update(value, contents)
    set.update(value, contents)


def _write_deque(value: deque, contents: Any) -> None:
    deque.clear(value)
    deque.extend(value, contents[1:])


def _write_defaultdict(value: defaultdict, contents: Any) -> None:
    value.default_factory, *entries = contents
    _write_dict(value, entries)


def _write_slice(value: Any, contents: Any) -> None:
    value[:] = contents


def _precision(value: Any) -> Any:
    """A decimal context, without the flags that each operation sets."""
    traps = [kind.__name__ for kind, raises in value.traps.items() if raises]
    return [*(getattr(value, name) for name in ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")), *traps]


def _write_memory(value: Any, contents: Any) -> None:
    ctypes = sys.modules["ctypes"]
    ctypes.memmove(ctypes.addressof(value), contents, len(contents))


def _stored(kind: type) -> Any:
    return lambda held: list(kind.__iter__(held))


_stream = (lambda value: [value.getvalue(), value.tell()], _write_stream)
_numpys = (
    lambda value: _plain((getattr(value, "bit_generator", None) or value._bit_generator).state),
    lambda value, state: setattr(getattr(value, "bit_generator", None) or value._bit_generator, "state", state),
)
_memory = (bytes, _write_memory)
_FUTURES = ("Future", "Task")
_GOES_ON = """
list_iterator list_reverseiterator tuple_iterator range_iterator longrange_iterator str_iterator str_ascii_iterator
bytes_iterator bytearray_iterator set_iterator dict_keyiterator dict_valueiterator dict_itemiterator
dict_reversekeyiterator dict_reversevalueiterator dict_reverseitemiterator iterator callable_iterator
enumerate zip map filter reversed
"""
_ROWS: dict[tuple[str, str], tuple[Callable[[Any], Any], Callable[[Any, Any], None] | None]] = {
    ("collections", "OrderedDict"): (lambda value: list(OrderedDict.items(value)), _write_dict),
    ("collections", "defaultdict"): (lambda value: [value.default_factory, *dict.items(value)], _write_defaultdict),
    ("builtins", "dict"): (lambda value: list(dict.items(value)), _write_dict),
    ("builtins", "list"): (_stored(list), lambda value, contents: list.__setitem__(value, slice(None), contents)),
    ("builtins", "set"): (_stored(set), _write_set),
    ("builtins", "frozenset"): (_stored(frozenset), None),
    ("collections", "deque"): (lambda value: [value.maxlen, *deque.__iter__(value)], _write_deque),
    ("builtins", "mappingproxy"): (lambda value: list(value.items()), None),
    **{("builtins", f"dict_{each}"): (list, None) for each in ("keys", "values", "items")},
    ("builtins", "bytearray"): (bytes, _write_slice),
    ("builtins", "memoryview"): (lambda value: [bytes(value), value.format, value.shape, value.readonly], None),
    ("array", "array"): (
        lambda value: [value.typecode, value.tobytes()],
        lambda value, contents: _write_slice(value, type(value)(*contents)),
    ),
    ("mmap", "mmap"): (lambda value: value[:], _write_slice),
    ("_io", "StringIO"): _stream,
    ("_io", "_IOBase"): (lambda value: value.closed or (value.seekable() and value.tell()), None),
    ("_io", "BytesIO"): _stream,
    ("numpy", "ndarray"): (_array, _write_array),
    ("numpy", "void"): (lambda value: [str(value.dtype), value.tolist()], None),
    ("numpy.ma", "MaskedArray"): (lambda value: [_array(value.data), _array(value.mask), value._fill_value], None),
    ("numpy.random._generator", "Generator"): _numpys,
    ("numpy.random.mtrand", "RandomState"): _numpys,
    ("numpy.random.bit_generator", "BitGenerator"): (lambda value: _plain(value.state), None),
    ("_random", "Random"): (_Random.getstate, _Random.setstate),
    ("re", "Match"): (lambda value: [value.re, value.regs, value.string and value.string[:]], None),
    ("_ctypes", "_SimpleCData"): _memory,
    ("_ctypes", "Array"): _memory,
    ("_ctypes", "Structure"): _memory,
    ("_ctypes", "Union"): _memory,
    ("_ctypes", "_Pointer"): (lambda value: [bytes(value), bytes(value.contents) if value else None], None),
    ("_thread", "RLock"): (_locked, _write_lock),
    ("_thread", "lock"): (_locked, _write_lock),
    ("_queue", "SimpleQueue"): (lambda value: value.qsize(), None),
    ("_hashlib", "HASH"): (lambda value: value.digest(), None),
    **{("_asyncio", each): (lambda value: [value.done(), value._result, value._exception], None) for each in _FUTURES},
    ("numpy", "flatiter"): (_goes_through, None),
    ("numpy", "nditer"): (lambda value: [each.tobytes() for each in value.operands], None),
    ("torch._C", "StorageBase"): (_bytes, None),
    **{(each, "Future"): (_promised, None) for each in ("torch", "torch._C")},
    ("itertools", "count"): (repr, None),
    ("itertools", "repeat"): (repr, None),
    **{("builtins", each): (_position, None) for each in _GOES_ON.split()},
    **{("builtins", each): (_suspended, None) for each in ("generator", "coroutine", "async_generator")},
    ("builtins", "BaseException"): (lambda value: list(value.args), None),
    ("numpy._core.multiarray", "flagsobj"): (str, None),
    ("decimal", "Context"): (_precision, None),
    ("functools", "partial"): (lambda value: [value.func, *value.args, *value.keywords.items()], None),
    ("_contextvars", "Context"): (lambda value: list(value.items()), None),
    ("xml.etree.ElementTree", "Element"): (lambda value: value.__getstate__(), None),
}
"""A type → (a comparable snapshot of an object's contents, a function that restores it, or ``None``)."""


def _row(kind: type) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None] | None] | None:
    for base in kind.__mro__:
        module = "numpy.ma" if base.__name__ == "MaskedArray" else base.__module__
        if (found := _ROWS.get((module, base.__name__))) is not None:
            return found
    return None


def contents_of(value: Any) -> Callable[[Any], Any] | None:
    """The function that takes a comparable snapshot of an object's contents; ``None``: its type is not in the table."""
    found = _row(type(value))
    return None if found is None else found[0]


_UNCHANGING = {
    "builtins": """
        type module function builtin_function_or_method method method-wrapper wrapper_descriptor code cell super
        method_descriptor classmethod_descriptor getset_descriptor member_descriptor property staticmethod classmethod
        PyCapsule tuple int str float complex bytes range frame traceback
    """,
    "types": "GenericAlias UnionType",
    "typing": "TypeVar ParamSpec TypeVarTuple TypeAliasType Union",
    "weakref": "ReferenceType weakref",
    "re": "Pattern",
    "decimal": "Decimal",
    "datetime": "date time timedelta tzinfo datetime timezone",
    "zoneinfo": "ZoneInfo",
    "functools": "_lru_cache_wrapper partialmethod",
    "operator": "attrgetter itemgetter methodcaller",
    "numpy": "generic dtype ufunc",
    "_contextvars": "ContextVar Token",
    "_thread": "_local _ThreadHandle",
    "_struct": "Struct",
    "_multiprocessing": "SemLock",
    "_csv": "Dialect",
    "unicodedata": "UCD",
    "pydantic_core._pydantic_core": "SchemaValidator SchemaSerializer",
}
UNCHANGING = frozenset((module, name) for module, names in _UNCHANGING.items() for name in names.split())
"""Classes in C whose objects never change, or whose state has places of its own, by module and name."""

_TOLD = (("builtins", "range"), ("decimal", "Decimal"), ("datetime", "date"), ("datetime", "timedelta"))
_TOLD += (("datetime", "datetime"), ("datetime", "time"))


_SCALARS = ("floating", "complexfloating", "signedinteger", "unsignedinteger", "generic")


def is_told(kind: type) -> bool:
    """Whether a class is immutable with all of its state in its text (``repr``)."""
    return (kind.__module__, kind.__name__) in _TOLD or (
        kind.__module__ == "numpy" and kind.__base__.__name__ in _SCALARS
    )


def rows_of_types() -> list[tuple[str, str]]:
    """The types table as text: each type with its way of watching, and its methods with side effects."""
    kinds = [(of, "contents, put back" if row[1] else "contents") for of, row in _ROWS.items()]
    kinds += [(of, "never changes") for of in UNCHANGING]
    effects = [(f"{of} {name}()", told[0]) for of, (names, told) in _BY_MODULE.items() for name in names]
    return [*((".".join(of), how) for of, how in kinds), *effects]


def unwatched(kind: type) -> type | None:
    """The class in C in an object's bases whose state no row describes; ``None``: there is none."""
    bases = kind.__mro__[:-1]
    if any((of := (base.__module__, base.__name__)) in _ROWS or of in UNCHANGING for base in bases):
        return None
    for below, base in zip((kind, *bases), bases, strict=False):
        slots = base.__dict__.get("__slots__", ())
        own = 8 * (2 + (1 if is_a(slots, str) else len(slots)))  # size that a ``class`` statement adds to its base
        if base.__basicsize__ - base.__base__.__basicsize__ > own or base.__itemsize__ != base.__base__.__itemsize__:
            torchs = any(each.__module__.partition(".")[0] == "torch" for each in (below, base))
            known = torchs or hasattr(base, "__next__")
            return None if known or "cython_function" in base.__name__ else base
    return None


def put_back(value: Any, contents: Any) -> None:
    """Restores a snapshot of :func:`contents_of`; never empties the object first, since another thread may read it."""
    found = _row(type(value))
    if found is not None and found[1] is not None:
        found[1](value, contents)


def parts_of(value: Any) -> list[Any]:
    """The objects that a container holds, as they are stored; for an iterator, the objects that it iterates over."""
    kind = next((each for each in (*CONTAINERS, *_SHOWN) if is_a(value, each)), None)
    if kind is dict:
        return list(dict.values(value))
    if kind is types.MappingProxyType:
        return list(value.values())
    if kind is not None:
        return list(kind.__iter__(value))
    if is_iterator(value):
        found, waiting = [], [(value, 0)]
        while waiting:
            each, deep = waiting.pop()
            inner = dict.items(each) if is_a(each, dict) else ()
            if deep < 6 and (is_iterator(each) or is_a(each, CONTAINERS)):
                inner = inner or gc.get_referents(each)
            elif contents_of(each) is _array:  # the collector does not know its contents
                found += parts_of(each)
            waiting += [(part, deep + 1) for part in inner if deep < 6 and type(part) not in PLAIN]
            found.append(each)
        return found[1:]
    reader = contents_of(value)
    if reader is _array:
        return value.ravel().tolist() if value.dtype.hasobject else []
    held = () if reader is None else reader(value)
    return list(held.values()) if type(held) is dict else held if type(held) is list else []


def _raising_warnings() -> tuple[Any, ...]:
    return tuple(map(str, (each for each in warnings.filters if each[0] == "error")))


def implicit_of(value: Any) -> tuple[Callable[[], Any], str] | None:
    """The thread-wide state that a module's or object's results depend on: (a function that returns it, its name)."""
    module = value.__name__ if is_a(value, types.ModuleType) else type(value).__module__
    if module in ("decimal", "_decimal", "_pydecimal") or (is_a(value, type) and value.__module__ == "decimal"):
        return decimal.getcontext, "the decimal context"
    if module == "numpy":
        return sys.modules["numpy"].geterr, "what NumPy does at errors"
    return None


RAISING_WARNINGS = _raising_warnings, "which warnings raise"


def answer_of(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """The present result of a function that returns hidden state, in a comparable form."""
    try:
        found = function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - forward would meet it as well
        return type(error).__name__, str(error)
    kind = type(found)
    if kind.__name__ == "stat_result":
        return found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns
    if kind.__module__ == "decimal":
        return _precision(found)
    if kind.__name__ == "ModuleSpec":
        return found.name, found.origin
    if kind.__name__ == "Context":
        return [each for pair in sorted(found.items(), key=lambda pair: pair[0].name) for each in pair]
    return found


def is_key(key: Any) -> bool:
    """Whether a key can be looked up without running the user's code."""
    if is_a(key, tuple):
        return all(map(is_key, key))
    if type(key).__hash__ is None:
        return False
    return type(key) in PLAIN or type(key).__hash__ is object.__hash__ or is_a(key, type | str | int)


def key_of(value: Any) -> Any:
    """A hashable key of an object: type and value of a plain one, else the identity."""
    return (type(value), value) if type(value) in PLAIN else id(value)
