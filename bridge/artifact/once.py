"""Made once: of several processes that need the same artifact at the same time, one makes it, the others wait for it.

Who makes it claims it in a file that names the process. A claim is no lock: it does not outlive its process, for the
others look whether that is still there, and none waits longer than some seconds before it makes the artifact itself.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from bridge.artifact.settings import complain, made_private
from bridge.artifact.store import Store
from bridge.base.threads import raise_deferred

__all__ = ["made_once"]

Made = TypeVar("Made")

_POLL = 0.02
_LONGEST = 120.0
"""Seconds to wait for a claim's process that lives: a large model's kernels, while many processes share the machine."""
_ELSEWHERE = 20.0
"""Seconds to wait for a process that cannot be asked, on another host."""


def made_once(store: Store, claim: str, get: Callable[[], Made | None], make: Callable[[], Made]) -> Made:
    """What ``get`` finds, or what ``make`` makes, if no other process is making it.

    Args:
        claim: name of what is made, a key.
        get: looks in the store.
        make: makes it and puts it into the store.
    """
    found = get()
    if found is not None or not store.is_usable:
        return make() if found is None else found
    path = store.folder / "claims" / claim
    started = time.monotonic()
    while True:
        with _claimed(path) as is_ours:
            if is_ours:
                found = get()  # somebody may have made it since
                return make() if found is None else found
        time.sleep(_POLL)
        raise_deferred()
        found = get()
        if found is not None:
            return found
        if not _is_at_work(path, time.monotonic() - started):
            return make()


@contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Whether this process has the claim while this is active; also true where none can be written."""
    ours = _process(os.getpid())
    try:
        made_private(path.parent)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        yield False
        return
    except OSError as error:
        complain("the cache cannot be written", str(error))
        yield True
        return
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(ours)
    except OSError as error:
        complain("the cache cannot be written", str(error))
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)


def _is_at_work(path: Path, waited: float) -> bool:
    """Whether a claim's process may still be making what it claims; a claim whose process is gone is removed."""
    if waited > _LONGEST:
        return False
    try:
        told = path.read_text(encoding="utf-8")
        age = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return True  # the claim is over: it is our turn, or the artifact is there
    except (OSError, UnicodeDecodeError):
        return False
    host, _, rest = told.partition(" ")
    number = rest.partition(" ")[0]
    if not number.isdigit():  # not written yet, or damaged
        gone = age > 1.0
    elif host != socket.gethostname():
        return waited < _ELSEWHERE
    else:
        gone = _process(int(number)) != told
    if gone:
        path.unlink(missing_ok=True)
    return True


def _process(number: int) -> str:
    """A process of this host: its number, and when it began, since numbers come again; empty if there is none."""
    began = ""
    try:
        os.kill(number, 0)
        # the 22nd field; the second, the name, may hold anything but ends with the last parenthesis
        told = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
        began = told.rpartition(")")[2].split()[19]
    except ProcessLookupError:
        return ""
    except (OSError, IndexError):  # no such file system, or somebody else's process
        pass
    return f"{socket.gethostname()} {number} {began}"
