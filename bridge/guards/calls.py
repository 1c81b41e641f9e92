"""Calls without Python code: a function, method or class in C that forward calls → the places that it reads."""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections.abc import Iterable
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch import nn

from bridge.base.errors import TORCH_DIR
from bridge.guards.flow import Call, Source
from bridge.guards.kinds import ASKED, PLAIN, contents_of, effect_of, effect_of_function, is_a
from bridge.guards.machinery import LIBRARY
from bridge.guards.objects import FrameOf, Instance, dict_of, is_changeable
from bridge.guards.sources import Frame, Sources
from bridge.guards.watched import Place, class_entry
from bridge.guards.world import REGISTRIES

__all__ = ["Calls"]

_METHODS_IN_C = ("cython_function_or_method", "wrapper_descriptor", "method_descriptor")
_TAKE = ("next", "sum", "max", "min", "any", "all", "sorted")
_TAKING = (list, tuple, dict, set, frozenset, zip, enumerate, map, filter)
"""Functions and classes that take values of iterators."""
_MOST_RESULTS = 64
_ACTING = (("_io", "open"), ("io", "open"), ("builtins", "print"))
"""Functions that have effects by their arguments."""


class Calls(Sources):
    """A world in which functions run and call others."""

    def _c_call(self, frame: FrameType, known: Frame, function: Any) -> None:
        place = known.flow.at(frame.f_lasti)
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        call = known.flow.calls.get(place)
        known.called.setdefault(place, [])
        if owner is None or is_a(owner, ModuleType):
            module = function.__module__ if is_a(function.__module__, str) else ""
            if (module, name) in _ACTING or module == "posix":
                self._acts(known, module, name, call, f"{frame.f_code.co_filename}:{frame.f_lineno}")
            if module == "builtins":
                known.locals = frame.f_locals
                if call is not None and call.args:
                    self._builtin(known, place, name, call)
                elif name == "globals":
                    self.know(known.globals, Place("global", known.globals.get("__name__", "")))
                    self._result(known.called, place, known.globals, known)
            elif (module, name) == ("sys", "_getframe"):
                self._result(known.called, place, _frame_of(frame), known)
            elif (module, name) in ASKED:
                known.locals = frame.f_locals
                self._ask(known, place, function, call, f"{module}.{name}()")
            known.locals = {}
            return
        self._method(known, place, owner, name, call, f"{frame.f_code.co_filename}:{frame.f_lineno}")

    def _moves(self, frame: Frame, value: Any) -> None:
        """The next value of an iterator is about to be taken; counters of Python's and torch's own do not count."""
        library = frame.code.co_filename.startswith((LIBRARY, TORCH_DIR, "<frozen"))
        if not (library and any(value is each for each in list(frame.globals.values()))):
            self.moved(value, frame.where)

    def _acts(self, known: Frame, module: str, name: str, call: Call | None, where: str) -> None:
        """A function in C that may have an effect is about to be called."""
        modes, streams = ["r"], [None]
        if call is not None:
            given = dict(call.kwargs)
            mode = given.get("mode") or (call.args[1] if call.args and len(call.args) > 1 else None)
            modes = [each for each in self._constants(known, mode or ()) if type(each) is str] or modes
            streams = self._constants(known, given.get("file", ())) or streams
        for mode in modes:
            for stream in streams:
                if reason := effect_of_function(module, name, mode, stream):
                    self.refuse(f"{name}()", where, *reason)

    def _method(self, known: Frame, place: int, owner: Any, name: str, call: Call | None, where: str) -> None:
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
            self._followed.clear()  # it may be written
            keys = self._constants(known, call.args[0]) if kind is dict and name == "get" and call and call.args else []
            for key in keys:
                self.entry(owner, key)
            if not keys:
                self.whole(owner, known.where)
        for each in self.inside(owner, 2):
            self._result(known.called, place, each, known)

    def _builtin(self, known: Frame, place: int, name: str, call: Call) -> None:
        """Functions of Python's own that read names, attributes, classes or iterators."""
        owners = [value for source in call.args[0] for value in self._values(known, source)]
        if name in ("getattr", "hasattr", "setattr", "delattr") and len(call.args) > 1:
            names = [each for each in self._constants(known, call.args[1]) if type(each) is str]
            for owner in owners:
                for each in names if name in ("setattr", "delattr") else ():
                    self._written(owner, each)
                    self._followed.clear()
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
                self._moves(known, each)
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
        """Notes what ``isinstance`` or ``issubclass`` asks: a class, and the classes that it is compared with."""
        if is_changeable(one):
            self.bases.setdefault(one)
        for kind in kinds:
            own = class_entry(type(kind), "__subclasscheck__") is not class_entry(type, "__subclasscheck__")
            if own and not issubclass(one, torch.Tensor) and not kind.__module__.startswith("torch"):
                self.ask(issubclass, (one, kind), {}, f"issubclass({one.__name__}, {kind.__name__})")

    def _ask(self, known: Frame, place: int, function: Any, call: Call | None, words: str) -> None:
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

    def _identity(self, frame: Frame, source: Source) -> None:
        """A value is compared by identity."""
        self.identities |= any(id(value) in self.inputs for value in self._values(frame, source))
        if source[0] == "attr":
            name = source[2]
            for owner in self._values(frame, source[1]):
                own = None if is_a(owner, Instance | FrameOf) or not self.knows(owner) else self.original(owner)
                held = dict_of(own)
                registries = [held[each] for each in REGISTRIES] if is_a(own, nn.Module) else []
                for space in (held, *registries) if held is not None else ():
                    if name in space and type(space[name]) not in PLAIN:
                        self.exactly(space, name, Place("attribute", name, self.place(owner).of))
        elif source[0] == "global" and type(frame.globals.get(source[1])) not in PLAIN:
            self.exactly(frame.globals, source[1], Place("global", source[1]))

    def _written(self, owner: Any, name: str) -> None:
        """An attribute is about to be set."""
        if is_a(owner, torch.Tensor) and self.knows(owner):
            own = self.original(owner)
            place = Place("attribute", name, f" of {self.place(own)}")
            self.name(own.__dict__, name, place, None if own is owner else owner.__dict__)
        else:
            self.attribute(owner, name)

    def _called(self, frame: Frame, place: int, value: Any, call: Call, source: Source) -> None:
        """Notes a call of which the profiler hears nothing: a slot in C (``ref()``, ``list(it)``, ``cached(n)``)."""
        if is_changeable(type(value)) and not is_a(value, type):
            self.attribute(value, "__call__")
        if is_a(value, weakref.ref):
            self.ask(value, (), {}, f"{self.place(value)}()")
            if (found := value()) is not None:
                self.know(found, self.place(value))
                self._result(frame.results, place, found, frame)
        elif type(value) is functools.partial:
            for each in (*value.args, *value.keywords.values()):
                self.whole(each, frame.where)
        elif value is type and call.args is not None and len(call.args) == 1:
            for owner in (each for one in call.args[0] for each in self._values(frame, one)):
                kind = owner.kind if is_a(owner, Instance) else type(owner)
                self.know(kind, Place("class", kind.__name__))
                self._result(frame.results, place, kind, frame)
        elif is_a(value, type) and value in _TAKING:
            for given in call.arguments:
                for each in self._values(frame, given):
                    self._moves(frame, each)
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

    def _ask_python(self, frame: FrameType, code: CodeType) -> None:
        """A function of Python's own library that is asked again, whatever it reads."""
        given = [frame.f_locals[name] for name in code.co_varnames[: code.co_argcount]]
        function = frame.f_globals.get(code.co_name)
        if function is None and given and is_a(given[0], logging.Logger):
            self.know(given[0], Place("logger", getattr(given[0], "name", "")))
            function, given = getattr(given[0], code.co_name, None), given[1:]
        if callable(function) and all(type(each) in PLAIN for each in given):
            self.ask(function, tuple(given), {}, f"{code.co_name}({', '.join(map(repr, given))})")

    def _result(self, results: dict[int, list[Any]], place: int, value: Any, outer: Frame) -> None:
        value = _frame_of(value) if is_a(value, FrameType) else value
        kept, known = self._kept(value), results.setdefault(place, [])
        same = kept.__eq__ if type(kept) is Instance else lambda each: each is kept
        if len(known) < _MOST_RESULTS and not any(same(each) is True for each in known):
            known.append(kept)
            outer.new = True

    def _kept(self, value: Any) -> Any:
        """A value, or its class alone, if it is a tensor of the call's own."""
        return Instance(type(value)) if is_a(value, torch.Tensor) and not self.knows(value) else value


def _classes(value: Any) -> list[type]:
    if is_a(value, tuple):
        return [each for part in value for each in _classes(part)]
    return [value] if is_a(value, type) else []


def _frame_of(frame: FrameType | None, deep: int = 4) -> FrameOf | None:
    return None if frame is None or not deep else FrameOf(frame.f_globals, _frame_of(frame.f_back, deep - 1))
