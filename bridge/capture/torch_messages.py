"""Torch's messages while a module is captured → this package's log, at debug level, instead of the error stream.

``torch.export`` and fake tensors log and print whole tracebacks and graphs before they raise. A refusal says in its own
words what stood in the way; ``BRIDGE_LOGS=+dispatch`` shows the rest. Where ``TORCH_LOGS`` is set, nothing is hidden.
"""

from __future__ import annotations

import builtins
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx import graph_module

from bridge.base.log import channel
from bridge.base.torch_export import loaded_export_tracer
from bridge.capture.tracing import is_capturing

__all__ = ["messages_logged"]

log = channel("dispatch")


@contextmanager
def messages_logged() -> Iterator[None]:
    """While active, what torch logs as a warning or an error, or prints, in a capturing thread goes to our log."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    loggers = [logger for name, logger in [*logging.root.manager.loggerDict.items()] if name.split(".")[0] == "torch"]
    handlers = {handler for logger in loggers for handler in getattr(logger, "handlers", ())}
    filtered = [handler for handler in handlers if _is_shown not in handler.filters]  # captures may be nested
    modules = [module for module in (loaded_export_tracer(), graph_module) if module is not None]
    printing = [vars(module) for module in modules if "print" not in vars(module)]
    for handler in filtered:
        handler.addFilter(_is_shown)
    for names in printing:
        names["print"] = _print
    try:
        yield
    finally:
        for names in printing:
            del names["print"]
        for handler in filtered:
            handler.removeFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    if not is_capturing() or record.levelno < logging.WARNING:
        return True
    log.debug("%s: %s", record.name, record.getMessage())
    return False


def _print(*values: Any, **options: Any) -> None:
    if is_capturing():
        log.debug("%s", " ".join(map(str, values)))
    else:
        builtins.print(*values, **options)  # noqa: T201 - another thread's own, as torch meant it
