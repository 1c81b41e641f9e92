"""Logs: what the compiler did and why, by channel.

Every message goes to a logger of the standard library, ``bridge.<channel>``, so an application's own configuration
applies. The environment variable ``BRIDGE_LOGS`` switches channels on from outside, as ``TORCH_LOGS`` does:

    BRIDGE_LOGS="passes,guards,+compile,-dynamo" python train.py

A channel by itself shows its one-line messages (INFO), ``+`` shows everything (DEBUG), ``-`` nothing below ERROR;
``all`` stands for every channel. :func:`set_logs` does the same from inside.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

__all__ = ["CHANNELS", "channel", "set_logs"]

VARIABLE = "BRIDGE_LOGS"

#: What can be switched on, and what it tells (after ``;``: what ``+`` adds).
CHANNELS: Mapping[str, str] = {
    "passes": "a line for each pass: name, milliseconds, nodes before -> after; the IR after it",
    "partition": "what is saved for the backward and what is computed again; a reason for every tensor",
    "guards": "calls that run eager, and what differed",
    "fallbacks": "operators that torch computes, or for which there is only a generic kernel",
    "compile": "compiled programs: steps, bytes, seconds by stage; every step",
    "dispatch": "entries that are added, evicted, refused",
    "reuse": "calls that are lowered already",
    "mt19937": "random masks that are left to torch",
    "dynamo": "torch.compile's graphs that run eager",
}

_FORMAT = "[%(name)s] %(message)s"


def channel(name: str) -> logging.Logger:
    """The logger of a channel. ``KeyError`` if there is none of that name."""
    if name not in CHANNELS:
        raise KeyError(f"no log channel {name!r}; there are {', '.join(CHANNELS)}")
    return logging.getLogger(f"bridge.{name}")


def set_logs(text: str) -> None:
    """Switches channels on and off; an empty text puts everything back to what the application configured.

    Args:
        text: comma-separated channels, each by itself (INFO), with ``+`` (DEBUG) or with ``-`` (ERROR).

    Messages go to the standard error stream, and no longer to the root logger's handlers.

    Raises:
        ValueError: a channel that does not exist.
    """
    levels = _levels(text)
    root = logging.getLogger("bridge")
    for name in CHANNELS:
        channel(name).setLevel(levels.get(name, logging.NOTSET))
    own = [handler for handler in root.handlers if isinstance(handler, _Handler)]
    if levels and not own:
        root.addHandler(_Handler())
    elif not levels:
        for handler in own:
            root.removeHandler(handler)
    root.propagate = not levels


def _levels(text: str) -> dict[str, int]:
    levels: dict[str, int] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        level = {"+": logging.DEBUG, "-": logging.ERROR}.get(word[0], logging.INFO)
        name = word.lstrip("+-")
        if name != "all" and name not in CHANNELS:
            known = "\n".join(f"  {known:<10} {told}" for known, told in CHANNELS.items())
            raise ValueError(f"{VARIABLE}: no channel {name!r} in {text!r}. There are 'all' and\n{known}")
        levels.update(dict.fromkeys(CHANNELS if name == "all" else [name], level))
    return levels


class _Handler(logging.StreamHandler):
    """Ours, to be told from the application's."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(_FORMAT))


if os.environ.get(VARIABLE):
    set_logs(os.environ[VARIABLE])
