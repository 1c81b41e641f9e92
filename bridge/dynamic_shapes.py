"""``dynamic_shapes=`` in torch.export's form: what is static passes, what is dynamic is refused by name.

Compiled code here has static extents: arenas, loop bounds and vector lanes are laid out for them. Calls of several
lengths get an entry each (``on_miss="compile"``), which shares everything but the compilation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.export import Dim

from bridge.errors import Unsupported, UnsupportedModule

__all__ = ["refuse_dynamic"]


def refuse_dynamic(module_name: str, dynamic_shapes: Any) -> None:
    """Checks a specification of dynamic shapes.

    Args:
        dynamic_shapes: as for ``torch.export.export``: nested dicts, tuples and lists by argument, with ``None`` or one
            entry per dimension: ``None``, ``Dim.STATIC`` or a number for a static one.

    Raises:
        UnsupportedModule: names every dimension that is meant to vary.
        TypeError: something else than such a specification.
    """
    problems = [
        Unsupported(
            f"dynamic_shapes{path}",
            "add_tvm_dispatch",
            f"dimension {dim} is meant to vary; compiled code has static shapes",
            'leave dynamic_shapes out and give on_miss="compile": every length gets an entry of its own',
        )
        for path, dim in _dynamic(dynamic_shapes, "")
    ]
    if problems:
        raise UnsupportedModule(module_name, problems)


def _dynamic(spec: Any, path: str) -> Iterator[tuple[str, str]]:
    if spec is None or spec is Dim.STATIC or isinstance(spec, int):
        return
    if isinstance(spec, dict):
        for key, value in spec.items():
            yield from _dynamic(value, f"{path}[{key!r}]")
    elif isinstance(spec, tuple | list):
        for index, value in enumerate(spec):
            yield from _dynamic(value, f"{path}[{index}]")
    elif isinstance(spec, Dim) or type(spec) is type(Dim.AUTO):
        yield path, getattr(spec, "__name__", None) or str(spec)
    else:
        raise TypeError(
            f"dynamic_shapes{path}: wanted torch.export's form (None, Dim, numbers, in dicts, tuples and lists), got "
            f"{type(spec).__name__}"
        )
