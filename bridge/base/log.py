"""Logs: the compiler's actions and their reasons, by channel.

Every message goes to a logger of the standard library, ``bridge.<channel>``, so an application's own configuration
applies. The environment variable ``BRIDGE_LOGS`` switches channels on from outside, as ``TORCH_LOGS`` does:

    BRIDGE_LOGS="passes,guards,+compile,-dynamo" python train.py

A channel by itself shows its one-line messages (INFO), ``+`` shows everything (DEBUG), ``-`` nothing below ERROR;
``all`` stands for every channel. :func:`set_logs` does the same from inside.

Stopwatch: the seconds in logs and reports. Choices by measured time are made in :mod:`bridge.trials`.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import TextIO

VARIABLE = "BRIDGE_LOGS"

#: The channels and their messages (after ``;``: the additional ones of ``+``).
CHANNELS: Mapping[str, str] = {
    "passes": "a line for each pass: name, milliseconds, nodes before -> after; the IR after it",
    "partition": "what is saved for the backward and what is computed again; a reason for every tensor",
    "guards": "calls that run eager, and what differed",
    "fallbacks": "operators that torch computes",
    "cache": "what the disk cache gave and took; why it is not used",
    "compile": "compiled programs: steps, bytes, seconds by stage; every step",
    "dispatch": "entries that are added, evicted, refused",
    "reuse": "calls that are lowered already",
    "graphs": "programs that are recorded as graphs of a device, or are not any more, and why",
    "mt19937": "random masks that are left to torch",
    "philox": "a GPU's random masks that are left to torch",
    "dynamo": "torch.compile's graphs that run eager",
}

_FORMAT = "[%(name)s] %(message)s"


class Stopwatch:
    """Seconds since its creation."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()

    @property
    def seconds(self) -> float:
        """The seconds so far."""
        return time.perf_counter() - self._begun


def channel(name: str) -> logging.Logger:
    """The logger of a channel. ``KeyError`` if there is none of that name."""
    if name not in CHANNELS:
        raise KeyError(f"no log channel {name!r}; there are {', '.join(CHANNELS)}")
    return logging.getLogger(f"bridge.{name}")


def set_logs(text: str) -> None:
    """Switches channels on and off; an empty text restores the application's configuration.

    Args:
        text: comma-separated channels, each by itself (INFO), with ``+`` (DEBUG) or with ``-`` (ERROR). Capitals and
            a leading ``bridge.`` make no difference.

    Messages go to the application's handlers, in its format; if it has configured no logging, to the standard error
    stream. Channels that are not named stay as they are.

    Raises:
        ValueError: a channel that does not exist.
    """
    levels = _levels(text)
    root = logging.getLogger("bridge")
    for name in CHANNELS:
        channel(name).setLevel(levels.get(name, logging.NOTSET))
    for handler in [handler for handler in root.handlers if handler.name == _HANDLER]:
        root.removeHandler(handler)
    if levels:
        root.addHandler(_Handler())


def _levels(text: str) -> dict[str, int]:
    levels: dict[str, int] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        level = {"+": logging.DEBUG, "-": logging.ERROR}.get(word[0], logging.INFO)
        name = word.lstrip("+-").strip().lower().removeprefix("bridge.")
        if name != "all" and name not in CHANNELS:
            known = "\n".join(f"  {known:<10} {told}" for known, told in CHANNELS.items())
            raise ValueError(f"{VARIABLE}: no channel {name!r} in {text!r}. There are 'all' and\n{known}")
        levels.update(dict.fromkeys(CHANNELS if name == "all" else [name], level))
    return levels


_HANDLER = "BRIDGE_LOGS"  # a name, since a reloaded module has another class


class _Handler(logging.StreamHandler):
    """Writes to the current standard error stream, unless a handler of the application takes the message."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.set_name(_HANDLER)
        self.setFormatter(logging.Formatter(_FORMAT))

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    def filter(self, record: logging.LogRecord) -> bool | logging.LogRecord:
        handlers = [*logging.getLogger().handlers, *logging.getLogger("bridge").handlers]
        others = [each for each in handlers if each is not self and not isinstance(each, logging.NullHandler)]
        return not any(each.level <= record.levelno for each in others) and super().filter(record)


if os.environ.get(VARIABLE):
    set_logs(os.environ[VARIABLE])
