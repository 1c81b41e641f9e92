"""Audited events: what Python tells of files and processes before it acts → an answer to be asked again, or a refusal.

``sys.addaudithook`` has no counterpart that takes a hook away: it is added with the first run that is recorded, and
tests from then on whether any is. Python's own part of calling a hook costs some 4 us (``open``, ``import``,
``sys._getframe``), the test 0.1 us; operators of tensors cause no events.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["LISTS", "OPENS", "audited", "changes_files", "entries_of", "file_state"]

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
"""Who hears of events, by thread."""
_hooked: list[bool] = []


def changes_files(event: str, args: tuple[Any, ...]) -> bool:
    """Whether what is about to happen changes files or the process."""
    return event in _EFFECTS or (event == OPENS and type(args[2]) is int and bool(args[2] & _WRITING))


def file_state(path: Any) -> tuple[int, ...]:
    """What tells whether somebody has written to a file, or put another one in its place."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def entries_of(path: Any) -> tuple[Any, ...]:
    """The names in a folder."""
    return tuple(os.listdir(path))


@contextmanager
def audited(hear: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """While active, a function hears of this thread's events before they happen; what it raises prevents them."""
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_hook)
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


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _hearing and event in _HEARD:
        hear = _hearing.get(threading.get_ident())
        if hear is not None:
            hear(event, args)
