"""``python -m bridge.quirks``: prints the table of irregularities of single operators and torch versions."""

from __future__ import annotations

import importlib
import os
import pkgutil
from contextlib import suppress

from bridge.base.quirks import QUIRKS, Quirk, table

__all__ = ["all_quirks"]


def all_quirks() -> list[Quirk]:
    """Imports every file of the package; returns the registered quirks, each once."""
    for found in pkgutil.walk_packages([os.path.dirname(__file__)], "bridge."):
        if not found.name.endswith("__main__"):
            with suppress(ModuleNotFoundError):  # of an optional package
                importlib.import_module(found.name)
    return list(dict.fromkeys(QUIRKS))


if __name__ == "__main__":
    print(table(all_quirks()))
