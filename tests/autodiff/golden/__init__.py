"""Golden tests: a pass and a TVMScript module with ``before`` and ``expected`` -> an entry that test_golden compares.

@golden(zero_zapp)
@I.ir_module
class ZeroZapp: ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tvm

from autodiff.ir import Function, IRModule, bindings

__all__ = ["GOLDEN", "Golden", "assert_same", "golden", "is_pass"]


@dataclass(frozen=True)
class Golden:
    """A case: ``apply(before, **options)`` must equal ``expected``."""

    apply: Callable[..., Function]
    before: Function
    expected: Function
    options: dict[str, Any] = field(default_factory=dict)


GOLDEN: dict[str, Golden] = {}


def golden(apply: Callable[..., Function], **options: Any) -> Callable[[IRModule], IRModule]:
    """Registers the functions ``before`` and ``expected`` of a module for a pass, under the module's name."""

    def add(module: IRModule) -> IRModule:
        GOLDEN[module.__name__] = Golden(apply, module["before"], module["expected"], options)
        return module

    return add


def assert_same(found: Function, expected: Function) -> None:
    """The same structure, and the same names of parameters and bindings."""
    tvm.ir.assert_structural_equal(found, expected)
    assert _names(found) == _names(expected)


def is_pass(value: object, results: tuple[str, ...] = ("Function",)) -> bool:
    """Whether a value is a function that takes a Relax function first and returns one (by its annotations)."""
    annotations = list(getattr(value, "__annotations__", {}).items())
    return (
        callable(value)
        and len(annotations) > 1
        and annotations[0][1] in ("Function", "Function | Body")
        and dict(annotations)["return"] in results
    )


def _names(func: Function) -> list[str]:
    return [param.name for param in func.params] + [var.name for var, _ in bindings(func)]
