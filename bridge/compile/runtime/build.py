"""Building: PrimFuncs → machine code, in one call of the compiler for all that the process has not built before.

The compiler runs in the background (:mod:`bridge.compile.runtime.background`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

from tvm.tirx import PrimFunc
from tvm_ffi import structural_equal, structural_hash

from bridge.base.interrupts import raise_deferred
from bridge.compile.backend import Built
from bridge.compile.codegen.tir import LOOPS_ATTR, SHARED_ATTR
from bridge.compile.runtime.background import Build
from bridge.compile.runtime.cache import WeakCache
from bridge.compile.runtime.kernel_store import KernelTexts, Libraries, stored_or_built

__all__ = ["build_kernels", "clear_kernels"]


def _is_usable(built: Built) -> bool:
    return not built.build.has_failed


_KERNELS: WeakCache[PrimFunc, Built] = WeakCache(structural_equal, _is_usable)
_LOCK = threading.Lock()

_SHARED: list[Built] = []


def clear_kernels() -> None:
    """Forget every kernel built in this process."""
    with _LOCK:
        _KERNELS.clear()
        _SHARED.clear()


def _library_of(name: str, func: PrimFunc) -> tuple[bool, str]:
    """Whether a function is loops already, and what it shares a library with: its own name or all the others."""
    return bool(func.attrs.get(LOOPS_ATTR, False)), name if func.attrs.get(SHARED_ATTR, False) else ""


def build_kernels(
    funcs: Sequence[tuple[str, PrimFunc]],
    key: str,
    libraries: Libraries,
    *,
    together: bool = False,
) -> list[Built]:
    """Machine code for PrimFuncs given with names, made in the background.

    Equal functions share it for as long as somebody holds it.

    Args:
        funcs: names and functions.
        key: of the backend; functions of different backends share nothing.
        libraries: makes one of functions.
        together: all in one library, with what are no loops yet; ``libraries`` is then told that all are.
    """
    keys = [(key, structural_hash(func)) for _, func in funcs]
    with _LOCK:
        held: list[Built | None] = []
        missing: dict[str, tuple[tuple[str, int], PrimFunc]] = {}
        for (name, func), own in zip(funcs, keys, strict=True):
            held.append(_KERNELS.get(own, func))
            pending = any(k == own and structural_equal(func, f) for k, f in missing.values())
            if held[-1] is None and not pending:
                missing[name] = (own, func)
        wanted: dict[tuple[bool, str], dict[str, tuple[tuple[str, int], PrimFunc]]] = {}
        for name, (own, func) in missing.items():
            wanted.setdefault((True, "") if together else _library_of(name, func), {})[name] = (own, func)
        for (loops, alone), chosen in wanted.items():
            raise_deferred()
            functions = {name: func for name, (_, func) in chosen.items()}
            kernels = KernelTexts(functions)
            made = Build(partial(stored_or_built, kernels, loops, key, libraries), kernels.read)
            for name, (own, func) in chosen.items():
                built = Built(
                    lambda name=name, made=made: made.result()[name],
                    made,
                    lambda name=name, made=made: getattr(made.result(), "keys_on_disk", {}).get(name),
                )
                held.append(built)  # alive until it is looked up below
                if alone:
                    _SHARED.append(built)
                _KERNELS.put(own, func, built)
        return [_KERNELS.get(own, func) for (_, func), own in zip(funcs, keys, strict=True)]
