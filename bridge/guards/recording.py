"""Recorded reads: forward runs under a profiler → the state outside of the call that its code read.

The thread's profiler reports each Python function that runs and each function in C that is called. The reads of a
Python function (:mod:`bridge.guards.dataflow`) are followed on the real objects (:mod:`bridge.guards.world`) when it
begins, and again for each call result: names of files and closures, attributes of modules, classes and objects,
entries of containers.
"""

from __future__ import annotations

import dis
import logging
import os
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import _bootstrap
from types import CodeType, FrameType, FunctionType, GeneratorType, MethodDescriptorType
from typing import Any

import torch

from bridge.base.errors import is_pythons_file
from bridge.guards.bytecode import DataFlow
from bridge.guards.calls import CallAnalysis
from bridge.guards.changes import reads_later
from bridge.guards.dataflow import flow_of
from bridge.guards.functions import CHANGES_FILES, OPENS, audited, changes_files, does, entries_of, file_state
from bridge.guards.kinds import CONTAINERS, LOCKED, LOCKS, PLAIN, is_a, is_iterator, parts_of
from bridge.guards.machinery import (
    ASKED_PYTHON,
    CALLED,
    CALLING,
    CHANGING_PYTHON,
    LOOKING,
    OWN,
    is_in_its_place,
    is_library,
    is_machinery,
)
from bridge.guards.objects import ANY, Instance, inner_function, is_changeable
from bridge.guards.sources import MOST_RESULTS, Frame
from bridge.guards.watched import ABSENT, ClassName, ClosureCell, Contents, Name, Place
from bridge.guards.world import REGISTRIES

__all__ = ["Reads", "profiled"]

_OPTIMIZED = 0x2
_IMPORTS: CodeType = _bootstrap._find_and_load.__code__
"""Runs at the first import of a module."""
_HASHED = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Types of values that are part of a function's key by value."""


class Reads(CallAnalysis):
    """The reads of a run of forward; takes the arguments of :class:`bridge.guards.world.World`.

    Attributes:
        codes: the code that ran, with its data flow; ``None``: torch's, Python's and this package's machinery.
        says: prints, logs and warnings, with their lines.
        identical: objects that were compared by identity, by id. ``told``: containers, by type and place in code.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.codes: dict[CodeType, DataFlow | None] = {}
        self._frames: dict[FrameType, Frame] = {}
        self._suspended: dict[FrameType, Frame] = {}
        self._ours: set[FrameType] = set()
        self._importing: FrameType | None = None
        self._before_import: dict[tuple, Any] = {}
        self._temporary: set[Any] = set()
        self.says: dict[str, None] = {}
        self.identical: dict[int, Any] = {}
        self.told = defaultdict[type, dict[tuple, tuple[Any, str]]](dict)
        self.pairs: dict[int, tuple[int, Any, Any]] = {}
        self.rebound: list[Any] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """While active, notes the reads of this thread's code; suspends the user's profiler."""
        with self.strangers.lifetimes():
            with audited(self.audit), profiled(self.hear):
                yield
            self.finish()

    def finish(self) -> None:
        """Ends the run: restores replaced functions, and notes the reads that are known only now."""
        self._frames.clear()
        self._suspended.clear()
        self._ours.clear()
        self._importing = None
        self.put_back_functions()
        self._compared_by_identity()
        self._known_before()
        for path in self._temporary if self.refused is None else ():
            os.remove(path)
            self.refuse(f"open({path!s:.80})", "forward", *CHANGES_FILES)
        for times, undo, told in [each for each in self.pairs.values() if each[0] > 0]:
            for _ in range(times):
                undo()
            if self.refused is None:
                self.refuse(*told)
        for key, then in self.first.items() if self.refused is None else ():
            each = self.items[key]
            if is_a(each, Contents) and type(each.value).__name__ in LOCKS and each.differs(then, run=True):
                self.refuse(str(each.place), "forward", *LOCKED)
        self.special_methods(torch.Tensor)
        for kind in {type(module()) for module, _ in self.modules.values()}:
            self.special_methods(kind)
            for name in ("_call_impl", "_wrapped_call_impl"):
                self.class_name(kind, name)

    def mentions(self, *names: str) -> bool:
        """Whether one of these names occurs in code that ran and is not torch's or Python's."""
        own = (code for code, flow in self.codes.items() if flow is not None)
        return any(not is_library(code.co_filename) and not set(names).isdisjoint(code.co_names) for code in own)

    def _known_before(self) -> None:
        """Notes the reads of strangers that existed before the run."""
        found = self.strangers.known_before()
        for value, _ in found:
            self.know(value, Place("", f"{type(value).__name__} that was read"))
        for value, reads in found:
            for what, *given in reads:
                getattr(self, what)(value, *given)

    def _compared_by_identity(self) -> None:
        """Marks places whose objects were compared by identity: there, the guard rejects merely equal objects."""
        for asked in self.told.values() if self.refused is None else ():  # one alone: compared with another type
            for value, where in asked.values() if len(asked) > 1 or not next(iter(asked))[2] else ():
                self.identity_of_passed(value, where, self.containers)
        if not self.identical:
            return
        for key, item in self.items.items():
            if is_a(item, Name) and id(self.original(self.first[key])) in self.identical:
                item.exact = True
        for module, names in [(each(), names) for each, names in self.modules.values()]:
            own = module.__dict__
            for space in (own, *(own[each] for each in REGISTRIES)):
                for name in names & space.keys():
                    if id(space[name]) in self.identical:
                        place = Place("attribute", name, self.place(module).of)
                        self._note(("name", id(space), name), Name(space, name, place)).exact = True
        self.identical.clear()

    def note_rebound(self, modules: Iterable[Any], written: Iterable[tuple[dict, str, list[Any]]]) -> None:
        """Notes the places to which the run bound another container than they held, of equal contents or not.

        ``written``: the attributes of ``modules`` that it set, with their old values in a list.
        """
        spaces = {id(each.__dict__): self.original(each).__dict__ for each in modules}
        self.rebound = [
            Name(spaces[id(own)], name, Place("attribute", name, " of a module"))
            for own, name, held in written
            if held and type(held[0]) in CONTAINERS
        ]
        for key, item in self.items.items():
            if key in self.first and is_a(item, Name | ClassName | ClosureCell | Contents):
                then, now = (_bound(item, each) for each in (self.first[key], item.read(run=True)))
                if any(type(one) in CONTAINERS and other is not one for one, other in zip(then, now, strict=False)):
                    self.rebound.append(item)

    # Events

    def hear(self, frame: FrameType, event: str, arg: Any) -> None:
        """Handles an event of the interpreter's profiler."""
        code = frame.f_code
        if self._importing is not None:  # a module's top-level code runs once in a process, not in a call
            if frame is self._importing and event == "return":
                self._importing = None
                self.imported(self._before_import)
            return
        if code is _IMPORTS and event == "call":
            self._importing, self._before_import = frame, self.state()
            return
        try:
            flow = self.codes[code]
        except KeyError:
            flow = self.codes[code] = _flow(code, frame.f_globals, frame.f_back in self._frames)
        if flow is None:
            if event == "return":
                outer = self._frames.get(frame.f_back)
                ours = code.co_filename.startswith(OWN) and not is_in_its_place(code)
                if outer is not None and not ours:
                    self._returned(outer, outer.flow.at(frame.f_back.f_lasti), arg)
                    self._look(outer)
            elif event == "call" and code.co_name == "handle" and code.co_filename == logging.__file__:
                while frame is not None and frame not in self._frames:
                    frame = frame.f_back
                if frame is not None:
                    self.says.setdefault(f"logs at {frame.f_code.co_filename}:{frame.f_lineno}")
            elif event == "call" and frame.f_back in self._frames:
                if _named(code) in CHANGING_PYTHON:
                    self.refuse(f"{code.co_name}()", f"{code.co_filename}:{code.co_firstlineno}", *CHANGES_FILES)
                elif _named(code) in ASKED_PYTHON:
                    self._ask_python(frame, code)
                elif code.co_filename.startswith(LOOKING):
                    for each in frame.f_locals.values():
                        self.deep(each)
        elif event == "call":
            self._begin(frame, code, flow)
        elif event == "return":
            self._end(frame, arg)
        elif event == "c_call" and (known := self._frames.get(frame)) is not None:
            self._c_call(frame, known, arg)

    def _ask_python(self, frame: FrameType, code: CodeType) -> None:
        """Notes a function of Python's standard library that the guard calls again, whatever state it reads."""
        given = [frame.f_locals[name] for name in code.co_varnames[: code.co_argcount]]
        function = frame.f_globals.get(code.co_name)
        if function is None and given and hasattr(type(given[0]), code.co_name):
            self.know(given[0], Place(type(given[0]).__name__.lower(), getattr(given[0], "name", "")))
            function, given = getattr(given[0], code.co_name, None), given[1:]
        if callable(function) and all(type(each) in PLAIN for each in given):
            self.ask(function, tuple(given), {}, f"{code.co_name}({', '.join(map(repr, given))})")

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Handles an audit event: a file is about to be opened, a process started."""
        frame, temporary = sys._getframe(2), False
        while frame is not None and frame.f_code.co_filename == tempfile.__file__:
            frame, temporary = frame.f_back, True
        if frame not in self._frames or self._importing is not None:  # of machinery
            return
        if temporary and event == OPENS:
            if not os.path.isdir(args[0]):  # a file without a name
                self._temporary.add(args[0])
            return
        if event == "os.remove" and args and args[0] in self._temporary:
            self._temporary.discard(args[0])
            return
        what = f"{event.rpartition('.')[2]}({args[0] if args else ''!s:.80})"
        if changes_files(event, args):
            self.refuse(what, f"{frame.f_code.co_filename}:{frame.f_lineno}", *CHANGES_FILES)
        if args[0] is not None and not is_a(args[0], int):
            self.ask(file_state if event == OPENS else entries_of, (args[0],), {}, what)

    def _begin(self, frame: FrameType, code: CodeType, flow: DataFlow) -> None:
        back = frame.f_back
        outer = self._frames.get(back)
        if outer is not None:
            outer.calls.python.add(outer.flow.at(back.f_lasti))
            self._look(outer)
        elif self._is_ours(back, code):
            self._ours.add(frame)
            return
        if (made := self._suspended.pop(frame, None)) is not None:  # a generator resumes
            made.over, self._frames[frame] = False, made
            self._look(made, everything=made.writes != self.writes)
            return
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        held = frame.f_locals
        given = {name: held[name] for name in code.co_varnames[:count] if name in held}
        args = {name: self._kept(value) for name, value in given.items()}
        cells = {name: held[name] for name in code.co_freevars if name in held}
        made = self._frames[frame] = Frame(frame, flow, args, cells)
        if self._key(made) not in self._followed:
            self._running(made, next(iter(args.values()), None))
            made.args = {name: self._kept(value) for name, value in given.items()}  # defaults are known by now
        self._look(made, everything=True)

    def _running(self, frame: Frame, first: Any) -> None:
        """Notes the place where the running function was found: in the class of its first argument, or as a global."""
        code, name = frame.code, frame.code.co_name
        kind = first.kind if is_a(first, Instance) else type(first)
        for each in (kind, first) if is_a(first, type) else (kind,):
            for called in _methods(each, code) if is_changeable(each) else ():
                self.class_name(each, called)
        found = frame.globals.get(name, ABSENT)
        if is_a(found, FunctionType) and found.__code__ is code:
            if any(type(each) is FunctionType and each.__code__ is code for each in self.passed):
                self._note(("name", id(frame.globals), name), Name(frame.globals, name, Place("global", name)))
            else:
                self.name(frame.globals, name, Place("global", name))

    def _is_ours(self, back: FrameType | None, code: CodeType) -> bool:
        """Whether a library function runs for this package instead of for forward."""
        while back is not None:
            if back in self._ours:
                return True
            file = back.f_code.co_filename
            if file == logging.__file__ and back.f_code.co_name == "handle":  # a handler stores its records
                return True
            if file.startswith(OWN):
                return not is_in_its_place(back.f_code) and is_library(code.co_filename)
            flow = self.codes.get(back.f_code)
            if flow is not None:
                return False
            library = is_pythons_file(code.co_filename) or code.co_filename.startswith(("<frozen", *CALLED))
            if library and back.f_code in self.codes and not file.startswith(CALLING):
                return True
            back = back.f_back
        return False

    def _end(self, frame: FrameType, value: Any) -> None:
        self._ours.discard(frame)
        made = self._frames.pop(frame, None)
        if made is not None:
            made.over = True
            self._look(made, everything=made.flow.by_results)
            if dis.opname[made.code.co_code[frame.f_lasti]] == "YIELD_VALUE":
                self._suspended[frame] = made
        outer = self._frames.get(frame.f_back)
        if made is not None and made.code.co_name == "__init__":
            value = next(iter(made.args.values()), None)
        if outer is not None:
            self._returned(outer, outer.flow.at(frame.f_back.f_lasti), value)
            self._look(outer)  # now: the next instruction may write to the result

    def _returned(self, outer: Frame, place: int, value: Any) -> None:
        """Notes the result of a Python function."""
        if is_a(value, logging.Logger | threading.Thread) or type(value).__module__ == "multiprocessing.process":
            self.know(value, Place("logger" if is_a(value, logging.Logger) else "thread", value.name))
        if type(value) in PLAIN and type(value) is not slice:
            known = outer.calls.plain.setdefault(place, {})
            if value not in known and len(known) <= MOST_RESULTS:
                known[value if len(known) < MOST_RESULTS else ANY] = None
                outer.calls.fresh.add(place)
        elif type(value) not in PLAIN:
            if not self.knows(value):
                self.strangers.note(value)
            self._result(outer, place, value)
            ahead = parts_of(value) if is_iterator(value) and not is_a(value, GeneratorType) else ()
            for each in ahead:  # an exhausted iterator leads to none of its objects
                if type(each) not in PLAIN:
                    self._result(outer, place, each)

    # Sources

    def _look(self, frame: Frame, everything: bool = False) -> None:
        """Follows a function's known reads: the dependents of fresh results, or all reads (``everything``).

        Skips arguments and results followed before (each step of a loop), unless a write may have happened since.
        """
        if not frame.calls.fresh and not everything:
            return
        if (key := self._key(frame)) in self._followed:
            frame.calls.fresh.clear()
            return
        while everything or frame.calls.fresh:
            fresh, frame.calls.fresh = frame.calls.fresh, set()
            frame.memo.clear()
            for part in [frame.flow] if everything else map(frame.flow.about, fresh):
                self._look_at(frame, part)
            everything = False
        frame.writes = self.writes
        if frame.flow.writes:
            self.may_be_written()
        elif key is not None:
            self._followed.add(key)

    def _key(self, frame: Frame) -> tuple | None:
        """A key of all objects that a function may reach; ``None`` where one of them may not stay alive."""
        told: list[Any] = [
            frame.code,
            frame.over,
            reads_later(),
            len(self.raised),
            *frame.calls.python,
            None,
            *frame.calls.heard,
            None,
        ]
        given = [*frame.args.values(), *frame.cells.values()]
        for results in (frame.calls.results, frame.calls.plain):
            told += results
            held = (values if results is frame.calls.plain else values.values() for values in results.values())
            given += [each for values in held for each in (*values, None)]
        while given:
            value = given.pop()
            kind = type(value)
            if kind is Instance:
                told.append(value.kind)
            elif id(value) in self._known:
                told.append(id(value))
            elif kind in _HASHED:
                told.append((kind, value))
            elif kind is tuple:
                told.append((tuple, len(value)))
                given += value
            else:
                return None
        return tuple(told)

    def _look_at(self, frame: Frame, flow: DataFlow) -> None:
        self._assigned(frame, flow)
        for source in flow.reads:
            self._values(frame, source)
        for source in flow.identities:
            self._identity(frame, source)
        for source, compared in flow.wholes.items():
            place = None
            if source[0] == "passed":
                for method in [each for each in self._expanded(frame, [source[1]]) if each[0] == "attr"]:
                    for owner in self._values(frame, method[1]):  # ``append`` of a list, passed as an argument
                        if is_a(owner, CONTAINERS) and callable(getattr(type(owner), method[2], None)):
                            self.whole(owner, frame.where)
                if source[2] in frame.calls.python:
                    continue
                _, source, place = source
            for value in self._values(frame, source):
                if place is None or not self._is_followed(frame, place, value):
                    self.whole(value, frame.where, compared)
        for source in flow.iterated:
            for value in self._values(frame, source):
                self._moves(frame, value)
        for write in flow.writes:
            self._write(frame, write)
        for value, kinds in flow.relations.values():
            self._related(frame, value, kinds)
        for place, call in flow.calls.items():
            for source in self._expanded(frame, call.function) if place not in frame.calls.heard else ():
                for value in self._values(frame, source):
                    if type(value) is MethodDescriptorType:  # the profiler reports its calls
                        continue
                    if place not in frame.calls.python or does(type(value), "gets"):
                        self._called(frame, place, value, call, source)

    def _is_followed(self, frame: Frame, place: int, value: Any) -> bool:
        """Whether a call does not look into an argument: ``isinstance``; for tensors Python code, which is followed."""
        sources = self._expanded(frame, frame.flow.calls[place].function)
        called = [getattr(each, "__func__", each) for one in sources for each in self._values(frame, one)]
        kinds = FunctionType | torch.nn.Module if is_a(value, torch.Tensor) else ()
        return bool(called) and all(is_a(each, kinds) or each in (isinstance, callable, id) for each in called)

    def _write(self, frame: Frame, write: tuple) -> None:
        if write[0] == "global":
            self.name(frame.globals, write[1], Place("global", write[1]))
            return
        for owner in self._values(frame, write[1]) if write[0] in ("attr", "item") else ():
            if write[0] == "attr":
                self._written(owner, write[2])
            else:
                self.whole(owner, frame.where)
                self.written.add(("contents", id(self.original(owner))))


def _bound(item: Any, value: Any) -> list[Any]:
    """A place's value, or the entries of its contents."""
    if not is_a(item, Contents) or type(value) is not list:
        return [value]
    return [part for each in value for part in (each if type(each) is tuple else (each,))]


def _methods(kind: type, code: CodeType) -> Iterator[str]:
    """The names under which a class or its bases hold the function of this code."""
    for base in kind.__mro__:
        held = vars(base)
        names = [code.co_name] if code.co_name in held else held if code.co_name == "<lambda>" else ()
        for name in names:
            if getattr(inner_function(held[name]), "__code__", None) is code:
                yield name


@contextmanager
def profiled(hear: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """While active, a function receives this thread's profiler events; suspends the user's profiler."""
    before = sys.getprofile()
    sys.setprofile(hear)
    try:
        yield
    finally:
        sys.setprofile(None)
        if hasattr(before, "enable"):  # cProfile's profiler is no function that ``setprofile`` accepts
            before.enable()
        else:
            sys.setprofile(before)


def _flow(code: CodeType, namespace: dict[str, Any], called: bool) -> DataFlow | None:
    """The data flow of running code; ``called``: by forward, as by ``exec``, not by ``import``."""
    if is_machinery(code, namespace) or (not code.co_flags & _OPTIMIZED and code.co_name == "<module>" and not called):
        return None
    return flow_of(code)


def _named(code: CodeType) -> tuple[str, str]:
    return code.co_filename, code.co_name
