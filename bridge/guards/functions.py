"""Functions table: a function in C → its use of its arguments, whether it returns state or changes the process.

Audited events: Python's reports of file and process operations before they run → a guard question, or a refusal.

Python also reports writes to a function's code and defaults, an object's class and a class's bases: they are counted.

``sys.addaudithook`` cannot remove a hook: it is added with the first recorded run, and tests from then on whether a run
is active. Python's own part of calling a hook costs some 4 us (``open``, ``import``, ``sys._getframe``), the test
0.1 us; operators of tensors cause no events.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bridge.guards.kinds import FILES, OUTSIDE, rows_of_types

__all__ = ["CHANGES_FILES", "CLOCKS", "LISTS", "OPENS", "USES", "audited", "changes_files", "does", "entries_of"]
__all__ += ["effect_of_function", "file_state", "is_asked", "rebound_count", "tables"]

OPENS, LISTS = "open", ("os.listdir", "os.scandir")
_EFFECTS = frozenset(
    """
    os.chdir os.chflags os.chmod os.chown os.exec os.fork os.forkpty os.kill os.killpg os.link os.mkdir os.posix_spawn
    os.putenv os.remove os.removexattr os.rename os.rmdir os.setxattr os.spawn os.startfile os.symlink os.system
    os.truncate os.unsetenv os.utime subprocess.Popen pty.spawn signal.pthread_kill resource.setrlimit
    resource.prlimit socket.bind socket.connect socket.sendto socket.sendmsg socket.sethostname syslog.syslog
    shutil.chown sys.addaudithook builtins.input urllib.Request
    """.split()
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_hearing: dict[int, Callable[[str, tuple[Any, ...]], None]] = {}
"""Listeners of audit events, by thread."""


def changes_files(event: str, args: tuple[Any, ...]) -> bool:
    """Whether an audited operation changes files or the process."""
    return event in _EFFECTS or (event == OPENS and type(args[2]) is int and bool(args[2] & _WRITING))


def file_state(path: Any) -> tuple[int, ...]:
    """A file's identity, size and times: they change where it is written or replaced."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def entries_of(path: Any) -> tuple[Any, ...]:
    """The names in a folder."""
    return tuple(os.listdir(path))


@contextmanager
def audited(hear: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """While active, a function receives this thread's audit events before they happen; its errors stop them."""
    rebound_count()
    thread = threading.get_ident()
    before, _hearing[thread] = _hearing.get(thread), hear
    try:
        yield
    finally:
        if before is None:
            del _hearing[thread]
        else:
            _hearing[thread] = before


_HEARD = {OPENS, *LISTS, *_EFFECTS}


_SETS = ("object.__setattr__", "object.__delattr__")
_REBINDS = frozenset(("__bases__", "__class__", "__code__", "__defaults__", "__kwdefaults__"))
_rebound, _numbers = [float(0)], itertools.count(1)


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event in _SETS:
        if args[1] in _REBINDS:
            _rebound[0] = next(_numbers)
    elif _hearing and event in _HEARD:
        hear = _hearing.get(threading.get_ident())
        if hear is not None:
            hear(event, args)


@functools.cache
def rebound_count() -> list[float]:
    """Count of the process's writes to functions' code and defaults, objects' classes and classes' bases, in a list.

    It is nan, which equals no earlier count, if this Python does not report all of these writes.

    An event comes just before its write: a count that was seen twice tells that the writes up to it are done.
    """
    sys.addaudithook(_hook)
    made, seen = type("made", (), {}), set()
    owner, function = type("owner", (made,), {}), lambda given=1, *, named=2: given
    writes = [(function, name, getattr(function, name)) for name in ("__code__", "__defaults__", "__kwdefaults__")]
    for of, name, value in (*writes, (owner(), "__class__", made), (owner, "__bases__", (type("base", (), {}),))):
        setattr(of, name, value)
        seen.add(_rebound[0])
    if len(seen - {0}) < len(writes) + 2:
        _rebound[0] = float("nan")
    return _rebound


CHANGES_FILES = "changes files, the process or another one; a compiled call does not", OUTSIDE
_CHANGING = {
    "sys": "excepthook displayhook",
    "gc": "enable disable freeze unfreeze",
    "posix": "umask write nice dup2 lockf fchmod fchown posix_fallocate sendfile setuid setgid setsid",
    "_signal": "signal alarm raise_signal pause",
    "_thread": "start_new_thread start_joinable_thread stack_size",
    "time": "tzset",
    "atexit": "register unregister",
    "_csv": "register_dialect unregister_dialect field_size_limit",
    "faulthandler": "enable disable register",
    "_tracemalloc": "start stop",
    "fcntl": "fcntl ioctl flock lockf",
    "_codecs": "register unregister register_error",
    "_locale": "textdomain bindtextdomain",
}
"""Functions in C that change the process, by module, besides setters (``set*``) and audited operations."""


_UNREPEATED = {("gc", "get_objects"), ("gc", "get_referrers"), ("sys", "getrefcount"), ("posix", "urandom")}
_UNREPEATED |= {("_weakref", "getweakrefcount"), ("_weakref", "getweakrefs"), ("posix", "getrandom")}


def effect_of_function(module: str, name: str, arguments: int, stream: Any = None) -> tuple[str, str] | None:
    """The reason why a compiled call cannot run a function in C, and the remedy; ``None`` if it can.

    ``arguments``: their number; ``stream``: the ``file`` argument of ``print``.
    """
    if (module, name) in _UNREPEATED:
        return "depends on other objects of the process, or on chance; a compiled call reads neither", OUTSIDE
    if (module, name) == ("_locale", "setlocale"):
        return CHANGES_FILES if arguments > 1 else None
    if module == "_csv" and name == "field_size_limit" and not arguments:
        return None
    if name in ("setprofile", "settrace"):
        return None
    if module in _CHANGING and (name.startswith(("set_", "set", "sched_set")) or name in _CHANGING[module].split()):
        return CHANGES_FILES
    if name == "print" and stream not in (None, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        return FILES, OUTSIDE
    return None


_USES = {
    "shows": """
        index count remove join __eq__ __ne__ __contains__ repr str ascii format print format_map eq ne
        __repr__ __str__ __format__ __mod__
    """,
    "takes": "next sum max min any all sorted list tuple dict set frozenset zip enumerate map filter",
    "finds": "get __getitem__ __contains__ setdefault pop getitem contains",
    "reads": "get keys values items copy count index __contains__ __getitem__ __len__ __iter__",
    "tells": "isinstance issubclass len id hash callable hasattr repr print setattr delattr",
    "searches": "__reduce_ex__ __reduce__ __getstate__ __sizeof__ dumps getsizeof reduce",
    "gets": "attrgetter itemgetter methodcaller",
    "binds": "attrgetter itemgetter methodcaller partial ReferenceType weakref",
}
USES = {use: frozenset(names.split()) for use, names in _USES.items()}
"""A use of arguments by functions, methods and classes in C → their names.

They *show* them as text or compare them, *take* values of iterators, *find* an entry by a key, *read* a container
without a change, *tell* a fact and return none of them, *search* them however deep, *get* the attributes or entries
that they were made for, or *bind* them for later.
"""


def does(kind: type, use: str) -> bool:
    """Whether a class of Python's standard library is in this row of :data:`USES`."""
    return kind.__name__ in USES[use] and str(kind.__module__) in sys.stdlib_module_names


_ASKED = """
posix stat|posix lstat|posix access|posix readlink|posix sched_getaffinity|posix isatty|sys getsizeof
_decimal getcontext|decimal getcontext|_lru_cache_wrapper cache_info|_contextvars copy_context|ContextVar get
type __subclasses__|type mro|_locale setlocale|_locale localeconv|_csv field_size_limit|_csv list_dialects
atexit _ncallbacks|_codecs lookup|_warnings _filters_mutated|Generator initial_seed
RandomState get_state|time localtime|time ctime|_imp lock_held|numpy geterr
numpy._core._multiarray_umath _get_extobj_dict|lock locked|Context get|Context keys|Context values|Context items
Context copy|datetime fromtimestamp|date fromtimestamp|numpy.core.umath getbufsize
torch._C _check_sparse_tensor_invariants|_abc get_cache_token|gc get_referents|_thread _count
SimpleQueue qsize|SimpleQueue empty|SemLock _is_zero|SemLock _count|SemLock _is_mine|SemLock _get_value
Token old_value|numpy.core.umath geterrobj
"""
ASKED: frozenset[tuple[str, str]] = frozenset(
    tuple(each.split()) for line in _ASKED.split("\n") for each in line.split("|") if each
)
"""Cheap functions in C without side effects that return hidden state, by (module or type, name)."""
_TELLS = re.compile(r"_*(get|is|are|has|cuda_get|current)_?.*|(?!(.*_)?set_).*_(enabled|allowed)")
_STATE = ("posix", "nt", "sys", "gc", "_locale", "_signal", "_thread", "_socket", "resource", "_tracemalloc", "torch")
_STATE += ("faulthandler", "_asyncio", "_csv")
_OF_CALLS = re.compile(r"_?is_grad_enabled|is_inference_mode_enabled|_getframe|getallocatedblocks|_?get_tracing_state")
_OF_CALLS_IN_C = ("get_objects", "get_referrers", "get_count", "get_stats", "getrandom", "getloadavg", "getrusage")


def is_asked(module: str, name: str) -> bool:
    """Whether a function in C returns hidden state: it is listed, or a getter in a module with state.

    Modes of the call (grad mode) have conditions of their own.
    """
    if (module, name) in ASKED:
        return True
    known = module in _STATE or module.startswith("torch")
    return known and bool(_TELLS.fullmatch(name)) and not _OF_CALLS.fullmatch(name) and name not in _OF_CALLS_IN_C


CLOCKS = frozenset(
    f"{name}{unit}"
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
    for unit in ("", "_ns")
)
"""Functions of ``time`` that return the time: asked only where their result is compared."""


def tables() -> str:
    """The tables of types and of functions as text, a row each."""
    rows = [*rows_of_types(), *((f"{of} {name}()", "tells state: asked again") for of, name in ASKED)]
    rows += [(f"{of}.{name}()", CHANGES_FILES[0]) for of, names in _CHANGING.items() for name in names.split()]
    by_name: dict[str, list[str]] = {}
    for use, names in USES.items():
        for name in names:
            by_name.setdefault(f"{name}()", []).append(use)
    rows += [(name, ", ".join(uses)) for name, uses in by_name.items()]
    return "\n".join(f"{name:<50} {what}" for name, what in sorted(rows))
