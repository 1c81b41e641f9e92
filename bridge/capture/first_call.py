"""First call: does forward do at its first call, which sets attributes, what it does from then on?

``if not self.started: self.started = True`` may stand around a clipped window, which is the same at every call, or
around what is done once: a codebook that begins with the first batch, weights that are drawn, another loss. What is
captured is the later call. So the two are observed, and where they differ the first one is eager's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from bridge.base.errors import CacheNotFilled, Unsupported
from bridge.capture.fake_run import fake_run
from bridge.capture.number_reader import given
from bridge.capture.observation_key import observation_key
from bridge.capture.readings import Reading
from bridge.capture.thread_isolation import capturing
from bridge.state import PythonState, generators_put_back, module_tensors

__all__ = ["refuse_another_first_call"]


def refuse_another_first_call(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    first: PythonState,
    settled: PythonState,
    readings: Sequence[Reading],
) -> None:
    """Nothing if the call does the same from the states ``first`` and ``settled``; the module is left ``settled``.

    Raises:
        CacheNotFilled: it does something else, or what cannot be compared; the module is then as it was ``first``.
    """
    keys = [_key(module, args, kwargs, state, readings) for state in (first, settled)]
    if keys[0] is not None and keys[0] == keys[1]:
        return
    changed = first.changes()
    first.restore()
    name = type(module).__name__
    reason = "Python state that forward sets at its first call, which does something else than later ones"
    hint = "call the module once before; add_tvm_dispatch without a sample compiles its second call"
    raise CacheNotFilled(name, [Unsupported(what, f"{name}.forward", reason, hint) for what in changed])


@generators_put_back()
def _key(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], state: PythonState, readings: Sequence[Reading]
) -> tuple | None:
    """What a call from a state does, but for what is refused anyway; ``None`` where that cannot be told."""
    state.restore()
    try:
        with capturing(module), given(module, readings):
            run = fake_run(module, *module_tensors(module), args, kwargs)
        return observation_key(replace(run.observation, unsupported=[], objects=[]), readings)
    except Exception:  # noqa: BLE001 - what it raises, it raises in eager
        return None
    finally:
        state.restore()
        state.restore_caches()
