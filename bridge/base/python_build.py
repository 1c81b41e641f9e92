"""Python build: refuses free-threaded interpreters."""

from __future__ import annotations

import sys


def refuse_free_threaded() -> None:
    """Raises ``ImportError`` in builds of Python without a global interpreter lock.

    Guards, entries and the capture's patches of torch rely on that lock between bytecodes; unproven without it.
    """
    if "free-threading" in sys.version:  # the sign named in Python's documentation
        raise ImportError(
            "tvm-dispatch does not support free-threaded builds of Python yet; "
            "use the build with the global interpreter lock, as in python3.13 instead of python3.13t"
        )
