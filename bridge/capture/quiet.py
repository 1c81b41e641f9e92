"""Quiet runs: a run that eager does not make → it prints, logs and warns nothing.

Other threads find what was there before, since each call asks which thread it is of.
"""

from __future__ import annotations

import builtins
import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from bridge.base.modes import replaced

__all__ = ["quiet"]

_print = print
_SPOKEN = (builtins, "print"), (logging.Logger, "handle"), (warnings, "_showwarnmsg")


@contextmanager
def quiet() -> Iterator[None]:
    """While active, this thread prints nothing to the standard streams, logs nothing and shows no warnings."""
    here = threading.get_ident()

    def silent(spoken: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != here or kwargs.get("file") not in (None, sys.stdout, sys.stderr):
                return spoken(*args, **kwargs)
            if spoken is _print:  # what is printed is read
                spoken(*args, **{**kwargs, "file": io.StringIO()})
            elif isinstance(args[-1], logging.LogRecord):
                args[-1].getMessage()
            return None

        return run

    with ExitStack() as stack:
        for owner, name in _SPOKEN:
            stack.enter_context(replaced(owner, **{name: silent(getattr(owner, name))}))
        yield
