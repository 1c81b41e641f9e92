"""Cases that crash or never end by their names, for tests of :mod:`tests.pool`; it imports nothing that takes long."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

CASES = ("first", "crash", "second", "hang", "third")


def serve(connection: Connection) -> None:
    """A process's loop."""
    connection.send(None)
    while (name := connection.recv()) is not None:
        if name == "crash":
            os._exit(11)
        if name == "hang":
            connection.poll(None)
        connection.send((name, "pass"))
