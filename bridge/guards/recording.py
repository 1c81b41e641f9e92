"""Recorded reads: forward runs under a profiler → the state outside of the call that its code read.

The profiler of this thread hears of each Python function that runs and of each function in C that is called. What the
code of the former reads (:mod:`bridge.guards.dataflow`) is followed on the real objects (:mod:`bridge.guards.world`)
when the function begins, and again when it has the result of another one: names of files and closures, attributes of
modules, classes and objects, entries of containers.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from bridge.base.errors import TORCH_DIR
from bridge.guards.dataflow import Call, Flow, Source, flow_of
from bridge.guards.kinds import ASKED, PLAIN, contents_of, effect_of, is_a
from bridge.guards.watched import ABSENT, Place, class_entry
from bridge.guards.world import FrameOf, Instance, World, dict_of, inner_function, is_changeable

__all__ = ["Reads", "profiled"]

_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCHS = ("_ops.py", "overrides.py", "_library", "_subclasses", "fx", "_prims", "_prims_common", "_refs", "_decomp")
_TORCHS += ("_meta_registrations.py", "_higher_order_ops", "_functorch", "_dispatch", "_jit_internal.py", "_logging")
_TORCHS += ("utils/_python_dispatch.py", "utils/_pytree.py", "utils/_contextlib.py", "utils/_config_module.py")
_TORCHS += ("utils/_device.py", "utils/_cxx_pytree.py", "_compile.py", "_dynamo", "_inductor", "_C", "utils/_stats.py")
_TORCHS += ("autograd", "jit", "_export", "export", "_weights_only_unpickler.py", "storage.py", "types.py")
_TORCHS += (
    "nn/modules/module.py",
    "_linalg_utils.py",
    "_classes.py",
    "_vmap_internals.py",
    "hub.py",
    "package",
    "utils/_typing_utils.py",
)
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PYTHONS = (
    "logging",
    "warnings.py",
    "importlib",
    "re",
    "sre_",
    "inspect.py",
    "linecache.py",
    "traceback.py",
    "tokenize",
)
_PYTHONS += ("typing.py", "abc.py", "_collections_abc.py", "copyreg.py", "functools.py", "dis.py", "ast.py", "tempfile.py")
_UNREAD = (
    *(os.path.join(TORCH_DIR, each) for each in _TORCHS),
    *(_LIBRARY + each for each in _PYTHONS),
    _OWN,
    "<frozen importlib",
    "<frozen zipimport",
    "<frozen abc",
    "<frozen _collections_abc",
)
_ASKED_PYTHON = frozenset(
    [
        (_LIBRARY + os.path.join("logging", "__init__.py"), name)
        for name in ("isEnabledFor", "getEffectiveLevel", "hasHandlers")
    ]
    + [(_LIBRARY + os.path.join("importlib", "util.py"), "find_spec"), ("<frozen importlib.util>", "find_spec")]
)
_RUN_FORWARD = ("unwatched.py", "prepared_twin.py", "derived_attributes.py")
"""Files of this package that call what forward calls."""
_OPTIMIZED = 0x2
_METHODS_IN_C = ("cython_function_or_method", "wrapper_descriptor", "method_descriptor")
_TAKE = ("next", "sum", "max", "min", "any", "all", "sorted")
_TAKING = (list, tuple, dict, set, frozenset, zip, enumerate, map, filter)
"""Functions and classes that take values of iterators."""
_MOST_RESULTS = 64


class _Frame:
    """A function that runs.

    Attributes:
        args, cells: its arguments and the variables around it, when it begins.
        results, plain: what functions in Python gave it, by the offset of the call: objects, and plain values.
        called: likewise what functions in C may have given it.
        python: offsets of calls of functions in Python.
        new: whether there are results that were not followed yet.
        over: whether it has returned.
    """

    __slots__ = (
        "args",
        "builtins",
        "called",
        "cells",
        "code",
        "flow",
        "globals",
        "memo",
        "new",
        "over",
        "plain",
        "python",
        "results",
    )

    def __init__(self, frame: FrameType, flow: Flow, args: dict[str, Any], cells: dict[str, Any]):
        self.flow, self.args, self.cells, self.code = flow, args, cells, frame.f_code
        self.globals, self.builtins = frame.f_globals, frame.f_builtins
        self.results: dict[int, list[Any]] = {}
        self.plain: dict[int, list[Any]] = {}
        self.called: dict[int, list[Any]] = {}
        self.python: set[int] = set()
        self.memo: dict[Source, list[Any]] = {}
        self.new = self.over = False

    @property
    def where(self) -> str:
        return f"{self.code.co_filename}:{self.code.co_firstlineno}"


class Reads(World):
    """What a run of forward reads; the arguments are those of :class:`bridge.guards.world.World`.

    Attributes:
        codes: the code that ran, with its data flow; ``None``: torch's, Python's and this package's machinery.
    """

    def __init__(self, originals: Mapping[int, Any], modules: Iterable[tuple[str, nn.Module]] = ()):
        super().__init__(originals, modules)
        self.codes: dict[CodeType, Flow | None] = {}
        self._operators: set[str] = set()
        self._loose: set[str] = set()
        self._frames: dict[FrameType, _Frame] = {}
        self._ours: set[FrameType] = set()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """While active, notes what code of this thread reads; a profiler of the user's pauses."""
        with profiled(self.hear):
            yield
        self.finish()

    def finish(self) -> None:
        """The run is over."""
        self._frames.clear()
        self._ours.clear()
        for name in self._loose:  # attributes of values from nowhere known: of all objects that have one of that name
            for value in list(self._known.values()):
                held = (
                    None
                    if is_a(value, ModuleType | type | torch.Tensor | nn.Module | FunctionType)
                    else dict_of(value)
                )
                if held is not None and name in held:
                    self.attribute(value, name)
        for name in sorted(self._operators):
            self.class_name(torch.Tensor, name)
        for kind in {type(module) for module, _ in self.modules.values()}:
            for name in ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__"):
                self.class_name(kind, name)

    def mentions(self, *names: str) -> bool:
        """Whether one of these names occurs in code that ran and is not torch's or Python's."""
        own = (code for code, flow in self.codes.items() if flow is not None)
        return any(not code.co_filename.startswith((TORCH_DIR, _LIBRARY)) and _mentions(code, names) for code in own)

    # Events

    def hear(self, frame: FrameType, event: str, arg: Any) -> None:
        """An event of the interpreter's profiler."""
        code = frame.f_code
        try:
            flow = self.codes[code]
        except KeyError:
            flow = self.codes[code] = _flow(code, frame.f_globals)
        if flow is None:
            if event == "return":
                outer = self._frames.get(frame.f_back)
                if outer is not None and arg is not None and not code.co_filename.startswith(_OWN):
                    self._returned(outer, outer.flow.at(frame.f_back.f_lasti), arg)
            elif event == "call" and (code.co_filename, code.co_name) in _ASKED_PYTHON and frame.f_back in self._frames:
                self._ask_python(frame, code)
        elif event == "call":
            self._begin(frame, code, flow)
        elif event == "return":
            self._end(frame, arg)
        elif event == "c_call" and (known := self._frames.get(frame)) is not None:
            self._c_call(frame, known, arg)

    def _begin(self, frame: FrameType, code: CodeType, flow: Flow) -> None:
        back = frame.f_back
        outer = self._frames.get(back)
        if outer is not None:
            outer.python.add(outer.flow.at(back.f_lasti))
            if outer.new:
                self._look(outer)
        elif self._is_ours(back, code):
            self._ours.add(frame)
            return
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        held = frame.f_locals
        args = {name: self._kept(held[name]) for name in code.co_varnames[:count] if name in held}
        cells = {name: held[name] for name in code.co_freevars if name in held}
        made = self._frames[frame] = _Frame(frame, flow, args, cells)
        self._running(made, next(iter(args.values()), None))
        self._look(made)

    def _running(self, frame: _Frame, first: Any) -> None:
        """Notes where the function that runs was found: as a method of its first argument, or as a global."""
        code, name = frame.code, frame.code.co_name
        kind = first.kind if is_a(first, Instance) else type(first)
        for each in (kind, first) if is_a(first, type) else (kind,):
            raw = class_entry(each, name) if is_changeable(each) else ABSENT
            if getattr(inner_function(raw), "__code__", None) is code:
                self.class_name(each, name)
        found = frame.globals.get(name, ABSENT)
        if is_a(found, FunctionType) and found.__code__ is code:
            self.name(frame.globals, name, Place("global", name))

    def _is_ours(self, back: FrameType | None, code: CodeType) -> bool:
        """Whether a function runs for this package, not for forward: one of Python's or torch's that it calls."""
        while back is not None:
            if back in self._ours:
                return True
            file = back.f_code.co_filename
            if file.startswith(_OWN):
                return not file.endswith(_RUN_FORWARD) and code.co_filename.startswith((_LIBRARY, TORCH_DIR))
            if self.codes.get(back.f_code) is not None:
                return False
            back = back.f_back
        return False

    def _end(self, frame: FrameType, value: Any) -> None:
        self._ours.discard(frame)
        made = self._frames.pop(frame, None)
        if made is not None and (made.new or made.flow.by_results):
            made.over = True
            self._look(made)
        outer = self._frames.get(frame.f_back)
        if outer is not None and value is not None:
            self._returned(outer, outer.flow.at(frame.f_back.f_lasti), value)

    def _returned(self, outer: _Frame, place: int, value: Any) -> None:
        """A function in Python has returned."""
        if is_a(value, logging.Logger):
            self.know(value, Place("logger", value.name))
        if type(value) in (str, bytes, int):
            known = outer.plain.setdefault(place, [])
            if value not in known and len(known) < _MOST_RESULTS:
                known.append(value)
                outer.new = True
        elif type(value) not in PLAIN:
            self._result(outer.results, place, value, outer)

    def _result(self, results: dict[int, list[Any]], place: int, value: Any, outer: _Frame) -> None:
        value = _frame_of(value) if is_a(value, FrameType) else value
        kept, known = self._kept(value), results.setdefault(place, [])
        same = kept.__eq__ if type(kept) is Instance else lambda each: each is kept
        if len(known) < _MOST_RESULTS and not any(same(each) is True for each in known):
            known.append(kept)
            outer.new = True

    def _kept(self, value: Any) -> Any:
        """A value, or its class alone, if it is a tensor of the call's own."""
        return Instance(type(value)) if is_a(value, torch.Tensor) and not self.knows(value) else value

    def _ask_python(self, frame: FrameType, code: CodeType) -> None:
        """A function of Python's own library that is asked again, whatever it reads."""
        given = [frame.f_locals[name] for name in code.co_varnames[: code.co_argcount]]
        function = frame.f_globals.get(code.co_name)
        if function is None and given:
            self.know(given[0], Place("logger", getattr(given[0], "name", "")))
            function, given = getattr(given[0], code.co_name, None), given[1:]
        if callable(function) and all(type(each) in PLAIN for each in given):
            self.ask(function, tuple(given), {}, f"{code.co_name}({', '.join(map(repr, given))})")

    def _c_call(self, frame: FrameType, known: _Frame, function: Any) -> None:
        place = known.flow.at(frame.f_lasti)
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        call = known.flow.calls.get(place)
        known.called.setdefault(place, [])
        if owner is None or is_a(owner, ModuleType):
            module = function.__module__ if is_a(function.__module__, str) else ""
            if module == "builtins":
                if call is not None and call.args:
                    self._builtin(known, place, name, call)
                elif name == "globals":
                    self.know(known.globals, Place("global", known.globals.get("__name__", "")))
                    self._result(known.called, place, known.globals, known)
            elif (module, name) == ("sys", "_getframe"):
                self._result(known.called, place, _frame_of(frame), known)
            elif (module, name) in ASKED:
                self._ask(known, place, function, call, f"{module}.{name}()")
            return
        self._method(known, place, owner, name, call, f"{frame.f_code.co_filename}:{frame.f_lineno}")

    def _method(self, known: _Frame, place: int, owner: Any, name: str, call: Call | None, where: str) -> None:
        """A method in C of an object is about to be called."""
        kind = type(owner)
        if is_changeable(kind):
            self.class_name(kind, name)
        if not self.knows(owner):
            return
        if reason := effect_of(owner, name):
            self.refuse(f"{self.place(owner)}.{name}()", where, *reason)
        if (kind.__name__, name) in ASKED or (issubclass(kind, type) and ("type", name) in ASKED):
            self._ask(known, place, getattr(owner, name), call, f"{self.place(owner)}.{name}()")
        elif contents_of(owner) is not None:
            keys = self._constants(known, call.args[0]) if kind is dict and name == "get" and call and call.args else []
            for key in keys:
                self.entry(owner, key)
            if not keys:
                self.whole(owner, known.where)
        for each in self.inside(owner, 2):
            self._result(known.called, place, each, known)

    def _builtin(self, known: _Frame, place: int, name: str, call: Call) -> None:
        """Functions of Python's own that read names, attributes, classes or iterators."""
        owners = [value for source in call.args[0] for value in self._values(known, source)]
        if name in ("getattr", "hasattr", "setattr", "delattr") and len(call.args) > 1:
            names = [each for each in self._constants(known, call.args[1]) if type(each) is str]
            for owner in owners:
                for each in names if name in ("setattr", "delattr") else ():
                    self._written(owner, each)
                for each in names:
                    for value in self.attribute(owner, each):
                        self._result(known.called, place, value, known)
                if not names:
                    self.all(owner)
        elif name in ("vars", "dir"):
            for owner in owners:
                self.all(owner)
                held = dict_of(owner)
                if held is not None and self.knows(owner):
                    self.know(held, self.place(owner))
                    self._result(known.called, place, held, known)
        elif name in _TAKE:
            for each in owners:
                self.moved(each, known.where)
        elif name in ("isinstance", "issubclass") and len(call.args) == 2:
            kinds = [each for value in self._constants(known, call.args[1]) for each in _classes(value)]
            for value in owners:
                one = value.kind if is_a(value, Instance) else value if name == "issubclass" else type(value)
                if is_a(one, type):
                    self._relation(one, kinds)
                if id(value) in self.inputs and torch.Tensor not in kinds:
                    self.tensors.setdefault((self.inputs[id(value)], "__class__"))
        elif name == "id":
            for source in call.args[0]:
                self._identity(known, source)
        elif name == "callable":
            for value in owners:
                self.attribute(value, "__call__")

    def _relation(self, one: type, kinds: Iterable[type]) -> None:
        """It is asked whether a class is one of these."""
        if is_changeable(one):
            self.bases.setdefault(one)
        for kind in kinds:
            own = class_entry(type(kind), "__subclasscheck__") is not class_entry(type, "__subclasscheck__")
            if own and not issubclass(one, torch.Tensor) and not kind.__module__.startswith("torch"):
                self.ask(issubclass, (one, kind), {}, f"issubclass({one.__name__}, {kind.__name__})")

    def _ask(self, known: _Frame, place: int, function: Any, call: Call | None, words: str) -> None:
        """Notes a call of a function that tells hidden state, if its arguments are known."""
        if call is None or call.args is None:
            return
        given = [self._constants(known, each) for each in call.args]
        named = {name: self._constants(known, each) for name, each in call.kwargs}
        if not all(len(each) == 1 for each in (*given, *named.values())):
            return
        args, kwargs = tuple(each[0] for each in given), {name: each[0] for name, each in named.items()}
        self.ask(function, args, kwargs, words)
        try:
            found = function(*args, **kwargs)
        except Exception:  # noqa: BLE001 - as forward is about to meet it
            return
        if type(found) not in PLAIN:
            self.know(found, Place("", words))
            self._result(known.called, place, found, known)

    def _identity(self, frame: _Frame, source: Source) -> None:
        """A value is compared by identity."""
        self.identities |= any(id(value) in self.inputs for value in self._values(frame, source))
        if source[0] == "attr":
            name = source[2]
            for owner in self._values(frame, source[1]):
                own = None if is_a(owner, Instance | FrameOf) or not self.knows(owner) else self.original(owner)
                held = dict_of(own)
                registries = (
                    [held[each] for each in ("_parameters", "_buffers", "_modules")]
                    if is_a(own, nn.Module)
                    else []
                )
                for space in (held, *registries) if held is not None else ():
                    if name in space and type(space[name]) not in PLAIN:
                        self.exactly(space, name, Place("attribute", name, self.place(owner).of))
        elif source[0] == "global" and type(frame.globals.get(source[1])) not in PLAIN:
            self.exactly(frame.globals, source[1], Place("global", source[1]))

    # Sources

    def _look(self, frame: _Frame) -> None:
        """Follows what the function reads, as far as it is known."""
        for _ in range(4):
            frame.new = False
            self._look_once(frame)
            if not frame.new:
                break

    def _look_once(self, frame: _Frame) -> None:
        frame.memo.clear()
        flow = frame.flow
        for source in flow.reads:
            self._values(frame, source)
        for source in flow.identities:
            self._identity(frame, source)
        for source in flow.wholes:
            if source[0] == "passed":
                if source[2] in frame.python or source[2] in frame.called:
                    continue
                source = source[1]
            for value in self._values(frame, source):
                self.whole(value, frame.where)
        for source in flow.iterated:
            for value in self._values(frame, source):
                self.moved(value, frame.where)
        for write in flow.writes:
            self._write(frame, write)
        for place, call in flow.calls.items():
            if place not in frame.python and place not in frame.called:
                for source in call.function:
                    for value in self._values(frame, source):
                        self._called(frame, place, value, call, source)
        self._operators |= flow.operators
        self._loose |= flow.loose

    def _write(self, frame: _Frame, write: tuple) -> None:
        """Notes a place that is about to be written."""
        if write[0] == "global":
            self.name(frame.globals, write[1], Place("global", write[1]))
            return
        for owner in self._values(frame, write[1]) if write[0] in ("attr", "item") else ():
            if write[0] == "attr":
                self._written(owner, write[2])
            else:
                self.whole(owner, frame.where)

    def _written(self, owner: Any, name: str) -> None:
        """An attribute is about to be set."""
        if is_a(owner, torch.Tensor) and self.knows(owner):
            own = self.original(owner)
            place = Place("attribute", name, f" of {self.place(own)}")
            self.name(own.__dict__, name, place, None if own is owner else owner.__dict__)
        else:
            self.attribute(owner, name)

    def _called(self, frame: _Frame, place: int, value: Any, call: Call, source: Source) -> None:
        """An object that is called without an event: by a slot in C."""
        if is_changeable(type(value)) and not is_a(value, type):
            self.attribute(value, "__call__")
        if is_a(value, weakref.ref):
            self.ask(value, (), {}, f"{self.place(value)}()")
            if (found := value()) is not None:
                self.know(found, self.place(value))
                self._result(frame.results, place, found, frame)
        elif value is type and call.args is not None and len(call.args) == 1:
            for owner in (each for one in call.args[0] for each in self._values(frame, one)):
                kind = owner.kind if is_a(owner, Instance) else type(owner)
                self.know(kind, Place("class", kind.__name__))
                self._result(frame.results, place, kind, frame)
        elif is_a(value, type) and value in _TAKING:
            for given in call.arguments:
                for each in self._values(frame, given):
                    self.moved(each, frame.where)
        elif type(value) is types.MethodWrapperType:
            self.know(value.__self__, self.place(value))
            self.whole(value.__self__, frame.where)
        elif type(value) is types.WrapperDescriptorType and value.__name__ == "__getattribute__" and call.args:
            names = self._constants(frame, call.args[1]) if len(call.args) > 1 else []
            for owner in (each for one in call.args[0] for each in self._values(frame, one)):
                for name in names:
                    for each in self.attribute(owner, name):
                        self._result(frame.results, place, each, frame)
        elif source[0] == "attr" and type(value).__name__ in _METHODS_IN_C:
            for owner in self._values(frame, source[1]):
                if not is_a(owner, ModuleType | type | Instance | FrameOf):
                    self._method(frame, place, owner, source[2], call, frame.where)
        elif type(value) is functools._lru_cache_wrapper:
            self.function(value.__wrapped__, self.place(value))
            args = [self._constants(frame, each) for each in call.args or ()]
            owners = self._values(frame, source[1]) if source[0] == "attr" else ()
            bound = any(not is_a(each, ModuleType | type) for each in owners)
            if not bound and call.args is not None and not call.kwargs and all(len(each) == 1 for each in args):
                self.ask(value, tuple(each[0] for each in args), {}, f"{self.place(value)}()")

    def _constants(self, frame: _Frame, sources: Iterable[Source]) -> list[Any]:
        """The values of sources, plain ones, too."""
        return [value for source in sources for value in self._plain(frame, source)]

    def _plain(self, frame: _Frame, source: Source) -> list[Any]:
        kind = source[0]
        if kind == "const":
            return [source[1]]
        if kind in ("arg", "cell"):
            value = (frame.args if kind == "arg" else frame.cells).get(source[1], ABSENT)
            return [] if value is ABSENT or is_a(value, Instance) else [value]
        if kind == "global":
            return next(([space[source[1]]] for space in (frame.globals, frame.builtins) if source[1] in space), [])
        if kind == "attr":
            owners = self._plain(frame, source[1])
            return [value for owner in owners if (value := _peek(owner, source[2])) is not ABSENT]
        if kind == "item":
            found = []
            for owner in self._plain(frame, source[1]):
                for key in self._constants(frame, (source[2],)) if type(owner) in (dict, list, tuple) else ():
                    try:
                        found.append(owner[key])
                    except (KeyError, IndexError, TypeError):
                        continue
            return found
        if kind == "result":
            return [*frame.plain.get(source[1], ()), *frame.results.get(source[1], ())]
        return self._values(frame, source)

    def _values(self, frame: _Frame, source: Source) -> list[Any]:
        """The objects that a source may be; what is read on the way is noted."""
        found = frame.memo.get(source)
        if found is None:
            frame.memo[source] = []  # while it is looked for
            found = frame.memo[source] = self._find(frame, source)
        return found

    def _find(self, frame: _Frame, source: Source) -> list[Any]:
        kind, of = source[0], source[1] if len(source) > 1 else None
        if kind in ("arg", "cell"):
            value = (frame.args if kind == "arg" else frame.cells).get(of, ABSENT)
            return [] if value is ABSENT or type(value) in PLAIN else [value]
        if kind == "global":
            value = self.name(frame.globals, of, Place("global", of))
            if value is ABSENT:
                value = self.name(frame.builtins, of, Place("builtin", of))
            return [] if value is ABSENT or type(value) in PLAIN else [value]
        if kind == "attr":
            return [value for owner in self._values(frame, of) for value in self.attribute(owner, source[2])]
        if kind == "import":
            return self._import(frame, *source[1:])
        if kind in ("result", "called"):
            return (frame.results if kind == "result" else frame.called).get(of, [])
        if kind == "held" or (kind in ("each", "item", "in") and of[0] == "held"):
            return self._values(frame, of)
        if kind == "each":
            return [value for owner in self._values(frame, of) for value in self._each(frame, owner)]
        if kind in ("item", "in"):
            keys = self._constants(frame, (source[2],))
            owners = self._values(frame, of)
            if not keys:
                kind, place = source[2][0], source[2][1]
                if kind == "called" and place not in frame.called:
                    return []
                if kind == "result" and not (frame.over and place in frame.python):
                    return []
                return [value for owner in owners for value in self._each(frame, owner)]
            return [value for owner in owners for key in keys for value in self.entry(owner, key)]
        return []

    def _each(self, frame: _Frame, owner: Any) -> list[Any]:
        self.whole(owner, frame.where)
        return self.inside(owner, 1)

    def _import(self, frame: _Frame, name: str, level: int, several: bool) -> list[Any]:
        package = frame.globals.get("__package__") or ""
        for _ in range(level - 1):
            package = package.rpartition(".")[0]
        full = f"{package}.{name}".strip(".") if level else name
        full = full if several or level else full.partition(".")[0]
        value = self.name(sys.modules, full, Place("module", full))
        return [] if value is ABSENT or value is None else [value]


@contextmanager
def profiled(hear: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """While active, a function hears of this thread's events; a profiler of the user's pauses."""
    before = sys.getprofile()
    sys.setprofile(hear)
    try:
        yield
    finally:
        sys.setprofile(None)
        if hasattr(before, "enable"):  # cProfile's profiler is no function that could be set again
            before.enable()
        else:
            sys.setprofile(before)


def _flow(code: CodeType, namespace: dict[str, Any]) -> Flow | None:
    if code.co_filename.startswith(_UNREAD) or str(namespace.get("__name__")).startswith("bridge."):
        return None
    if not code.co_flags & _OPTIMIZED and code.co_name == "<module>" and not code.co_filename.startswith("<"):
        return None
    return flow_of(code)


def _mentions(code: CodeType, names: Iterable[str]) -> bool:
    return not set(names).isdisjoint(code.co_names)


def _peek(owner: Any, name: str) -> Any:
    """An attribute's value, with none of the owner's code run."""
    if is_a(owner, Instance | FrameOf):
        return ABSENT
    held = vars(owner) if is_a(owner, ModuleType) else dict_of(owner)
    if held is not None and name in held:
        return held[name]
    raw = class_entry(owner if is_a(owner, type) else type(owner), name)
    if is_a(raw, types.MemberDescriptorType):
        try:
            return raw.__get__(owner)
        except AttributeError:
            return ABSENT
    return ABSENT if raw is ABSENT or hasattr(type(raw), "__get__") else raw


def _classes(value: Any) -> list[type]:
    if is_a(value, tuple):
        return [each for part in value for each in _classes(part)]
    return [value] if is_a(value, type) else []


def _frame_of(frame: FrameType | None, deep: int = 4) -> FrameOf | None:
    return None if frame is None or not deep else FrameOf(frame.f_globals, _frame_of(frame.f_back, deep - 1))
