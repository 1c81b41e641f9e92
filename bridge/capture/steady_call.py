"""Steady-state trace: a module's sample call → the runs that hold for every later call, and the Python state they need.

Forward may set attributes: ``self.calls += 1``, a window that is clipped at the first call, a cached mask. A compiled
call runs no Python. So the call runs again from the state that the first run left. The second run

    changes nothing                     the module keeps the first run's state, in which the record holds
    counts integers up                  counters, which a compiled call counts up as well
    sets places anew                    results, which a compiled call puts there (kept_state.py)
    changes other state                 a refusal by name
    calls other operators               the first call is eager's: a refusal that says so
    reads other numbers of buffers      the first call is eager's as well: a buffer is a flag

The user's module changes only at the end, if at all.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from bridge.base.errors import (
    Unsupported,
    UnsupportedModule,
    from_user_code,
    is_out_of_memory,
    refused_by_eager,
    swallowed,
)
from bridge.base.log import channel
from bridge.base.modes import while_active
from bridge.capture.autograd_uses import AnotherRunError
from bridge.capture.custom_functions import Chosen
from bridge.capture.fake_run import FakeRecord, differences, fake_run_of, same_numbers
from bridge.capture.inplace_rules import FOREIGN_DRAW, OTHER_NAME
from bridge.capture.kept_state import KeptState, kept_state
from bridge.capture.loops.prove import unrolled_rows
from bridge.capture.loops.rolled import rolled_up
from bridge.capture.numbers import Counted, Counter
from bridge.capture.real_run import RealRun, real_run_of
from bridge.capture.refusals import explain_error
from bridge.capture.rows import Record, Row, ValueRef, mapped, values_in
from bridge.capture.scalar_guards import ScalarGuard
from bridge.guards import Undo, contents_of, needs_first_call, put_back, undo
from bridge.state import SampleCall

log = channel("dispatch")

_EVERY_CALL = "Python state that forward changes at every call; a compiled call runs no Python"
_BY_SIZES = "Python state that forward changes by the sizes that vary"
_REGISTRIES = ("_buffers", "_parameters", "_modules")
_KEEP = "keep it in a buffer, or change it outside of forward"


_BESIDE = "forward changes it, and applies an autograd.Function that cannot be traced, and may have changed it"


Result = TypeVar("Result")


@dataclass
class SteadyCall:
    """A call in its steady state: later calls do the same.

    Attributes:
        real, fake: its runs.
        counters: attributes that each call counts up.
        problems: refusals of differences between the two runs.
    """

    real: RealRun
    fake: FakeRecord
    counters: tuple[Counter, ...]
    problems: list[Unsupported]


def steady_call(call: SampleCall) -> SteadyCall:
    """Runs a call on real numbers, and again on fake tensors, with symbols for its dynamic dimensions.

    Sets the attributes on the module that forward sets once; :class:`bridge.guards.Undo` can restore them.

    Raises:
        UnsupportedModule: a compiled call cannot do exactly the same, or forward changes state at every call.
        Exception: eager's own, if PyTorch itself refuses the sample.
    """
    with undo() as before:
        return _steady(before, call)


def in_attempts(capture: Callable[[], Result]) -> Result:
    """Calls a function that captures a module → its result. After a refusal, custom autograd Functions that the module
    applies are opaque (:mod:`bridge.capture.opaque_functions`) in further attempts; the first refusal is raised."""
    first, chosen = None, Chosen()
    while True:
        with undo() as before, chosen.active():
            try:
                return capture()
            except Exception as error:  # the user's code may have raised another error from a refusal
                if (refusal := _refusal_in(error)) is None:
                    raise
                log.debug("%s", refusal, exc_info=refusal)
                first = first or error
                if not (more := _untraced(chosen, refusal)):
                    raise first from first.__cause__
                before.restore()
        chosen = Chosen(chosen.kinds | more)


def _refusal_in(error: BaseException | None) -> UnsupportedModule | None:
    """The refusal in an error's chain of causes, if there is one."""
    while error is not None and not isinstance(error, UnsupportedModule):
        error = error.__cause__ or error.__context__
    return error


def _untraced(chosen: Chosen, refusal: UnsupportedModule) -> set[tuple[str, str]]:
    """The Functions to run as they are in another attempt: the ones that a refusal names, or all."""
    more = chosen.applied - chosen.kinds
    names = {each.op for each in refusal.ops}
    return {each for each in more if f"autograd.Function {each[1].rpartition('.')[2]}" in names} or more


def _steady(before: Undo, call: SampleCall) -> SteadyCall:
    real = first = _in_eager(call)
    changed = real.changed()
    if changed and real.functions.opaque.applied:
        raise UnsupportedModule(call.name, [Unsupported(each, "forward", _BESIDE, _KEEP) for each in changed])
    _find_loops(real)
    if not changed:
        return _compared(_started(real))
    if _integers(real, changed) == changed and (found := _counted(real, changed)) is not None:
        before.restore()
        return found
    real.reset()
    try:
        real = _again(real)
    except UnsupportedModule:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise _changing(first, changed) from error
    _find_loops(real)
    again = real.changed()
    counts = _integers(real, again)
    if len(counts) < len(again):
        if (kept := _keeping(real, counts)) is None:
            raise _changing(first, again)
        real = kept
        _find_loops(real)
    found = _counted(real, counts) if counts else _compared(real)
    if real.kept is not None:
        real.kept.put_back(first.observation.reads)
    if found is None:
        raise _changing(first, again)
    begun = _begun(call.module, real, changed, counts)
    if begun or any(_place(each)[1] in _REGISTRIES for each in changed) or not _same_function(first, real):
        needs_first_call()
    _settle(call.module, first, [each for each in changed if each not in again or each in begun])
    return found


def _begun(module: nn.Module, real: RealRun, changed: Sequence[str], counts: Sequence[str]) -> list[str]:
    """Attributes with another kind of value before the first call: counters of the class's, or ``self.hidden``."""
    carried = () if real.kept is None else [f"self.{each}" for each in real.kept.carried]
    places = [(each, *_place(each)) for each in changed if each in carried or each in counts]
    then = real.prepared.before.value_of
    held = [(each, module.get_submodule(path).__dict__.get(name), then(path, name)) for each, path, name in places]
    return [each for each, now, later in held if not _may_begin(now, later)]


def _may_begin(value: Any, later: Any) -> bool:
    """Whether a value may be the first one of an attribute that is a number or tensor like ``later`` in later calls."""
    if not (isinstance(value, torch.Tensor) and isinstance(later, torch.Tensor)):
        return type(value) is type(later)
    before, after = ((each.shape, each.dtype, each.stride()) for each in (value, later))
    return before == after and value.requires_grad <= later.requires_grad  # else its gradient would be lost


def _in_eager(call: SampleCall, **how: Any) -> RealRun:
    try:
        return real_run_of(call, **how)
    except UnsupportedModule as error:
        raise _named(error, call.name) from error.cause
    except AnotherRunError as error:
        writing = {**how.get("writing", {}), **error.how.get("writing", {})}
        again = replace(call, followed=call.followed | error.followed)
        return _in_eager(again, **{**how, **error.how, "writing": writing})
    except Exception as error:  # noqa: BLE001 - the user's code may raise any error
        swallowed(error)
        if "saves" not in how:  # the run may have failed because autograd saved no tensors
            return _in_eager(call, **how, saves=True)
        raise refused_by_eager(from_user_code(error)) from error.__cause__


def _again(real: RealRun, **how: Any) -> RealRun:
    """The call once more, from the state that a run has left."""
    return _in_eager(replace(real.given.call, module=real.twin), origin=real.observation.reads.originals, **how)


def _started(real: RealRun) -> RealRun:
    """The run; or, if it changes a buffer that decides a number that Python reads (a flag), the run after it. A number
    that moves on at each run (the position in a ring buffer) is no flag."""
    asked = {number for each in real.record.reads for number in values_in(each.numbers)}
    for row in reversed(real.record.rows):
        if not asked.isdisjoint(values_in(row.results)):
            asked.update(values_in((row.args, row.kwargs)))
    flags = {id(real.given.inputs[number]) for number in asked if number < len(real.given.real_tensors)}
    if all(id(made) not in flags or torch.equal(made, before) for made, before in real.given.buffers):
        return real
    later = _again(real)
    first, after = _readings(real), _readings(later)
    moves_on = first != after and _readings(_again(later)) != after
    for each in (real, later):
        each.reset()
    if later.changed() or first == after or moves_on:
        return real
    needs_first_call()
    _find_loops(later)
    return later


def _readings(real: RealRun) -> list[ScalarGuard]:
    return [each.reading for each in real.record.reads]


def _named(error: UnsupportedModule, module_name: str) -> UnsupportedModule:
    """The refusal, with this module's name if it has none."""
    return error if error.module_name else UnsupportedModule(module_name, error.ops, error.cause)


def _find_loops(real: RealRun) -> None:
    """Notes the loops of a run, or refuses long unrolled ones; drops refusals of writes that a step returns instead."""
    if not (real.functions.uses or real.given.call.dims):
        real.loops = rolled_up(real.record, real.made, real.observation.draws)
    record = real.record if real.loops is None else real.loops.record
    parameters = [each for each in real.given.tensors if each.kind == "parameter"]
    real.observation.unsupported.extend(unrolled_rows(record, len(parameters), f"{real.given.call.name}.forward"))
    if real.loops is not None:
        loops_found()
        real.observation.draws[:] = real.loops.draws
        if not real.loops.writes:
            problems = real.observation.unsupported
            problems[:] = [each for each in problems if each.reason != OTHER_NAME]


def _compared(real: RealRun) -> SteadyCall:
    name = real.given.call.name
    if problems := real.observation.unsupported:
        raise UnsupportedModule(name, problems)
    try:
        fake = _on_fakes(real)
    except UnsupportedModule as error:
        raise _named(error, name) from error.cause
    except Exception as error:
        swallowed(error)
        log.debug("%s cannot be run on fake tensors", name, exc_info=error)
        raise UnsupportedModule(name, [explain_error(error)], cause=error) from None
    return SteadyCall(real, fake, (), list(differences(real, fake)))


def _on_fakes(real: RealRun, *change: Callable[[nn.Module], Any]) -> FakeRecord:
    """The fake run, after which the state outside of the call is as the real run left it."""
    with real.observation.reads.unchanged() as changed:  # no fake tensor stays in a cache, nor a symbol
        fake = fake_run_of(real, *change)
    if fake.symbols is not None:
        names = {f"self.{each}" for each in fake.changed}.difference(real.changed())
        changed += sorted(
            each for each in names if not each.endswith("._buffers")
        )  # tensors: their values are compared
    if changed and fake.symbols is not None:
        problems = [Unsupported(each, "forward", _BY_SIZES, _KEEP) for each in changed]
        raise UnsupportedModule(real.given.call.name, problems)
    return fake


def _changing(real: RealRun, changed: Sequence[str]) -> UnsupportedModule:
    name, known, places = real.given.call.name, real.observation.unsupported, real.observation.reads.items.values()
    draws = {each.place.changed for each in places if isinstance(getattr(each, "value", None), _generators())}
    if any(each.reason == FOREIGN_DRAW[0] for each in known):  # by name, with the line
        changed = [each for each in changed if each not in draws]
    said = [(each, FOREIGN_DRAW if each in draws else (_EVERY_CALL, _KEEP)) for each in changed]
    return UnsupportedModule(name, [*known, *(Unsupported(each, f"{name}.forward", *words) for each, words in said)])


def _generators() -> tuple[type, ...]:
    return random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator


def _keeping(second: RealRun, counts: Sequence[str]) -> RealRun | None:
    """Another run of the call, whose results include the values of the places that it sets; ``None`` if the call
    changes other state, or depends on the values of the last call."""
    kept = kept_state(second.twin, second.prepared.before, second.observation.reads, counts)
    if kept is None or (found := _with_places(second, kept)) is not None:
        return None if kept is None else found
    found = _with_places(second, kept.reading_tensors(second.prepared.before))
    if found is None:
        return None
    read = kept.reading_tensors(
        second.prepared.before, [each.name for each in found.given.tensors if each.kind == "attribute"]
    )
    return _with_places(second, read) or found


def _with_places(second: RealRun, kept: KeptState) -> RealRun | None:
    second.reset()
    constants = kept.constants(kept.last())
    try:
        with kept.absent():
            found = _again(second, kept=kept)
    except Exception as error:  # the user's code may raise any error for the absent values
        log.debug("%s reads what it sets", second.given.call.name, exc_info=error)
        return None
    return found if found.left == constants and _same_function(second, found) else None


def _same_function(first: RealRun, later: RealRun) -> bool:
    """Whether two runs of a call are the same function of the module's tensors, the arguments and draws.

    The later run may read, as an attribute, a tensor that the first run made and kept there, for instance a mask. Then
    it lacks the rows of the first run that made the tensor, which read no input.
    """
    known: dict[int, int] = {}
    count = first.record.inputs - len(first.given.attributes)
    paths = dict(enumerate(later.given.attributes, later.record.inputs - len(later.given.attributes)))
    carried = () if later.kept is None else set(later.kept.carried).intersection(first.given.attributes)
    for place in range(later.record.inputs):
        if place < count:
            known[place] = place
        elif paths.get(place) in carried:
            known[place] = count + first.given.attributes.index(paths[place])
        elif (number := first.values.number_of(later.given.inputs[place])) is not None:
            known[place] = number
    held = {id(tensor): number for number, (tensor, _) in first.record.free.items()}
    known.update((number, held[id(each)]) for number, (each, _) in later.record.free.items() if id(each) in held)
    if len(first.observation.draws) != len(later.observation.draws):
        return False
    literals = zip(first.record.literals.items(), later.record.literals.items(), strict=False)
    known.update((b, a) for (a, ours), (b, theirs) in literals if same_numbers(ours, theirs) and b not in known)
    constant = _constants(first.record)
    remaining = iter(later.record.rows)
    row = next(remaining, None)
    for each in first.record.rows:
        if row is not None and _matches(each, row, first.record, later.record, known):
            pairs = zip(values_in(row.results), values_in(each.results), strict=False)
            known.update({b: a for b, a in pairs if b not in known})
            row = next(remaining, None)
        elif not all(number in constant for number in values_in(each.results)):
            return False
    if row is not None:
        return False
    return _renamed(list(later.results), known)[: len(first.results)] == list(first.results)


def _constants(record: Record) -> set[int]:
    """Values that depend on no input and no draw."""
    found = set(record.literals)
    for row in record.rows:
        if row.draws[0] == row.draws[1] and all(number in found for number in values_in((row.args, row.kwargs))):
            found.update(values_in(row.results))
    return found


def _matches(a: Row, b: Row, first: Record, later: Record, known: dict[int, int]) -> bool:
    if a.op is not b.op or a.grad != b.grad:
        return False
    if repr((a.args, a.kwargs)) != repr(_renamed((b.args, b.kwargs), known)):
        return False
    forms = [[record.forms[n] for n in values_in(row.results)] for record, row in ((first, a), (later, b))]
    return forms[0] == forms[1]


def _renamed(tree: Any, known: dict[int, int]) -> Any:
    return mapped(tree, ValueRef, lambda value: ValueRef(known.get(value.number, -1 - value.number)))


def _settle(module: nn.Module, real: RealRun, changed: Sequence[str]) -> None:
    """Sets the attributes on the module that the run set; the module's own containers are written in place."""
    own = dict(module.named_modules())
    for what in changed:
        if not what.startswith("self."):
            continue
        path, name = _place(what)
        twin = dict(real.twin.named_modules()).get(path)
        if twin is None or path not in own:
            continue
        if name in twin.__dict__:
            of, made, held = real.prepared.twin.original, twin.__dict__[name], own[path].__dict__.get(name)
            made = {key: of(each) for key, each in made.items()} if name in _REGISTRIES else of(made)
            if issubclass(type(held), list | dict | set | deque) and type(made) is type(held):
                put_back(held, contents_of(held)(made))
            else:
                own[path].__dict__[name] = made
        else:
            own[path].__dict__.pop(name, None)


def _place(what: str) -> tuple[str, str]:
    path, _, name = what.removeprefix("self.").rpartition(".")
    return path, name


# Counters


def _integers(real: RealRun, changed: Sequence[str]) -> list[str]:
    """The changed attributes that were and are integers of modules: possible counters."""
    modules, found = dict(real.twin.named_modules()), []
    for what in changed:
        path, name = _place(what)
        held = modules[path].__dict__ if what.startswith("self.") and path in modules else {}
        if type(held.get(name)) is int and type(real.prepared.before.value_of(path, name)) is int:
            found.append(what)
    return found


def _counted(real: RealRun, changed: Sequence[str]) -> SteadyCall | None:
    """The call with counters, or ``None`` if one of the attributes is no counter.

    In the fake run, a stand-in that supports only addition takes the place of each: any other use of it raises.
    """
    if real.observation.reads.mentions("type"):  # the type of a stand-in is not ``int``
        return None
    places = [_place(what) for what in changed]
    twins: list[nn.Module] = []

    def change(twin: nn.Module) -> None:
        twins.append(twin)
        for index, (path, name) in enumerate(places):
            twin.get_submodule(path).__dict__[name] = Counted(0, index)

    try:
        fake = _on_fakes(real, change)
    except Exception as error:
        swallowed(error)
        log.debug("%s is no counter", changed, exc_info=error)
        return None
    ends = [twins[0].get_submodule(path).__dict__.get(name) for path, name in places]
    if not all(type(end) is Counted and end.place == index for index, end in enumerate(ends)):
        return None
    if any(type(each) is Counted for each in fake.results):
        return None
    problems = list(differences(real, fake))
    counters = tuple(Counter(path, name, end.step) for (path, name), end in zip(places, ends, strict=True))
    return None if problems else SteadyCall(real, fake, counters, problems)


# Listener for loops: notifies the compiler of a call as soon as its loops are found, long before the graph exists.


class _Thread(threading.local):
    listener: Callable[[], object] | None = None


_thread = _Thread()


def loops_tell(do: Callable[[], object]) -> AbstractContextManager[None]:
    """While active, ``do`` is called in this thread when loops have been found in a recorded call."""
    return while_active(_thread, listener=do)


def loops_found() -> None:
    """Calls the innermost listener."""
    if _thread.listener is not None:
        _thread.listener()
