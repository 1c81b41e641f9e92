"""Python build: the interpreter that runs → nothing, or an error that names what it is."""

from __future__ import annotations

import sys

__all__ = ["refuse_free_threaded"]


def refuse_free_threaded() -> None:
    """Refuses builds of Python without a global interpreter lock.

    Guards, entries and the capture's patches of torch rely on that lock between bytecodes; nobody has proven them
    without it.

    Raises:
        ImportError: the build is free-threaded.
    """
    if "free-threading" in sys.version:  # what the documentation of Python names as the sign
        raise ImportError(
            "tvm-dispatch does not support free-threaded builds of Python yet; "
            "use the build with the global interpreter lock, as in python3.13 instead of python3.13t"
        )
