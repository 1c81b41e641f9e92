"""Looped call: a module's sample call is run once in eager -> its observation, and a forward with its loops rolled up.

Tracing costs milliseconds for each operator; recording a call costs microseconds. So a forward of many operators whose
steps are proven to be equal (:mod:`bridge.capture.loops.find`) is traced with one step of each loop. The run that is
recorded is the eager run of the capture: what is traced is compared with it as ever. Its numbers are not, so that it
computes each call once and no more (:mod:`bridge.capture.loops.uncomputed`). ``None`` wherever anything could be
missed: the call is then captured as if this had not been tried.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from types import CodeType
from typing import Any

import torch
from torch import nn

from bridge.base.collector import collection_paused
from bridge.base.devices import HOST, current_device
from bridge.base.log import channel
from bridge.base.torch_internals import pytree
from bridge.capture.eager_run import nothing_saved, owned_state
from bridge.capture.isolated_rng import IsolatedRNG
from bridge.capture.loops.alive import evenly_alive
from bridge.capture.loops.any_length import ReplayOfAnyLength
from bridge.capture.loops.find import find_loops
from bridge.capture.loops.folded import folded, of_any_length
from bridge.capture.loops.recorder import CallRecorder, NotRecordedError
from bridge.capture.loops.replay import Replay
from bridge.capture.loops.uncomputed import INTEGERS
from bridge.capture.loops.watch import OperatorWatch
from bridge.capture.observation import Observation, Output
from bridge.capture.observe import observe
from bridge.capture.own_functions import OwnFunctions
from bridge.capture.own_leaves import own_leaves
from bridge.capture.thread_isolation import capturing
from bridge.capture.tracing import eagers_branches
from bridge.state import PythonState, constant_key, functions_of, generators_put_back, module_tensors, with_helpers

__all__ = ["LEAST_OPERATORS", "Looped", "looped_call", "recorded_loops"]

log = channel("dispatch")

LEAST_OPERATORS = 100
"""A call of fewer operators is traced as it is."""


@dataclass(frozen=True)
class Looped:
    """A call with loops: the observation of its eager run, and how it is replayed.

    Attributes:
        any_length: its loops for all sizes of a dimension; ``None``: they are of this length.
    """

    observation: Observation
    replay: Replay
    any_length: ReplayOfAnyLength | None = None

    @cached_property
    def form(self) -> tuple | None:
        """What it does and what eager returns, the same for all lengths (:mod:`bridge.capture.loops.folded`); ``None``
        if that has no such form."""
        outputs = [_described(output) for output in self.observation.outputs]
        if None in outputs:
            return None
        try:
            return folded(self.replay), tuple(outputs), self.observation.reads_validation
        except NotRecordedError as error:
            log.debug("a loop of one length: %s", error)
            return None


    def of_any_length(self, other: Any, size: int, leaf: int, dimension: int, own: int) -> Looped | None:
        """The call for all sizes of a dimension, ``own`` here, as the form of one of another size tells, too."""
        form = of_any_length(other, size, self.form, own)
        return None if form is None else replace(self, any_length=ReplayOfAnyLength(form, leaf, dimension, {own}))


def _described(output: Output) -> tuple | None:
    """What is known of a result; ``None`` where it cannot be compared."""
    value = constant_key(output.value)
    rest = [getattr(output, each.name) for each in fields(output) if each.name != "value"]
    return None if value is None else (value, *rest)


def looped_call(module: nn.Module, args: tuple, kwargs: dict[str, Any], first: PythonState) -> Looped | None:
    """The call, if its code has loops and they make it worth it; ``first`` is put back."""
    if not _has_loops(type(each) for each in module.modules()):
        return None
    for computes in (False, True) if current_device() == HOST else (True,):
        run = _RecordedRun(computes)
        try:
            with capturing(module, fakes=False), eagers_branches(), collection_paused():
                found = run.of(module, args, kwargs)
            return None if first.changes() else found
        except Exception as error:  # noqa: BLE001 - whatever forward raises, it raises again where it is captured
            log.debug("%s is traced without recording its loops: %s", type(module).__name__, error)
            if not run.may_compute:
                return None
        finally:
            first.restore()
    return None


@generators_put_back()
def recorded_loops(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Looped | None:
    """:func:`looped_call` of a module as it is."""
    return looped_call(module, args, kwargs, PythonState(module))


class _RecordedRun:
    """One run of forward; ``computes``: whether all of its calls are computed."""

    def __init__(self, computes: bool):
        self._computes, self._ended = computes, False
        self._recorder: CallRecorder | None = None

    @property
    def may_compute(self) -> bool:
        """Whether forward has raised what it may not raise if all calls are computed."""
        recorder = self._recorder
        if self._ended or recorder is None or recorder.uncomputed is None or not recorder.uncomputed.left_out:
            return False
        return recorder.reason in (None, INTEGERS)

    def of(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Looped | None:
        """The call with its loops; ``None`` if it is too short."""
        tensors, real_tensors = module_tensors(module)
        args, kwargs = own_leaves(args, kwargs, real_tensors, range(len(pytree.tree_leaves((args, kwargs)))))
        arguments = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        owned, state = owned_state(module, tensors, real_tensors)
        parameters = [tensor for spec, tensor in zip(tensors, owned, strict=True) if spec.kind == "parameter"]
        named = {spec.name: tensor for spec, tensor in zip(tensors, owned, strict=True)}
        self._recorder = recorder = CallRecorder(arguments, named, self._computes)
        with IsolatedRNG(), nothing_saved():
            given = module, state, parameters, [*owned, *arguments], args, kwargs, nullcontext()
            run = observe(*given, functions=OwnFunctions(), traced=False, recorders=(recorder, OperatorWatch(recorder)))
        self._ended = True
        left_out = 0 if recorder.uncomputed is None else recorder.uncomputed.left_out
        if run.unsupported or run.objects or recorder.operators + left_out < LEAST_OPERATORS:
            return None
        if run.replaced:  # a replay makes calls and sets nothing
            return None
        calls = recorder.finish(run.results, run.out_spec)
        replay = Replay(calls, evenly_alive(calls, find_loops(calls)))
        run.draws.extend(replay.draws)
        if 2 * replay.length > len(calls.rows):
            raise NotRecordedError(f"{replay.length} of {len(calls.rows)} calls are in no loop")
        run.results.clear()
        return Looped(run, replay)


def _has_loops(kinds: Iterator[type]) -> bool:
    """Whether the code that modules of these classes run, as far as it is not torch's, repeats anything."""
    functions = [function for kind in dict.fromkeys(kinds) for function in functions_of(kind)]
    return any(_repeats(function.__code__) for function in with_helpers(functions))


@cache
def _repeats(code: CodeType) -> bool:
    here = any(step.opname == "FOR_ITER" or _goes_back(step) for step in dis.get_instructions(code))
    return here or any(_repeats(inner) for inner in code.co_consts if isinstance(inner, CodeType))


def _goes_back(step: dis.Instruction) -> bool:
    return "JUMP" in step.opname and isinstance(step.argval, int) and step.argval <= step.offset
