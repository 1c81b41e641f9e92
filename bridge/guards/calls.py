"""Calls without Python code: a function, method or class in C that forward calls → the places that it reads."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import sys
import types
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from bridge.base.errors import TORCH_DIR
from bridge.guards.bytecode import CallSite, Source
from bridge.guards.functions import CLOCKS, USES, does, effect_of_function, is_asked
from bridge.guards.kinds import (
    CONTAINERS,
    PLAIN,
    RAISING_WARNINGS,
    contents_of,
    effect_of,
    is_a,
    is_key,
    paired,
)
from bridge.guards.machinery import is_library
from bridge.guards.objects import (
    ANY,
    FrameOf,
    Instance,
    binds,
    class_entry,
    classes_in,
    identity_of,
    interesting,
    is_alive,
    is_changeable,
    is_held,
    is_in_function,
)
from bridge.guards.sources import MOST_RESULTS, Frame, Sources
from bridge.guards.watched import Place

__all__ = ["CallAnalysis"]

_IN_C = "cython_function_or_method instancemethod wrapper_descriptor method_descriptor classmethod_descriptor".split()
_KNOWN_PACKAGES = sys.stdlib_module_names | {"torch", "numpy", "math", "builtins", ""}
_UNKNOWN = "its arguments are not known before the call: what it gives cannot be watched", "do it outside of forward"
_MOST_ASKED = 16
"""The choices of possible arguments for which a function is asked."""
_CALLS_FIRST = ("map", "filter", "filterfalse", "takewhile", "dropwhile", "starmap")
"""Classes that call their first argument with elements of the others."""
Given = list[list[Any]]


def _hand_on_showing(args: Iterable[list[Any]]) -> bool:
    """Whether an argument is itself a function that shows or compares its arguments (``map(str, values)``)."""
    kinds = (types.BuiltinFunctionType, type, types.WrapperDescriptorType, types.MethodDescriptorType)
    return any(is_a(each, kinds) and each.__name__ in USES["shows"] for arg in args for each in arg)


class CallAnalysis(Sources):
    """Call analysis: profiler events of calls and returns → the reads of the called functions, noted in the world."""

    def _c_call(self, frame: FrameType, known: Frame, function: Any) -> None:
        place = known.flow.at(frame.f_lasti)
        call = known.flow.calls.get(place)
        self._look(known)
        known.calls.heard.add(place)
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if not where.startswith(TORCH_DIR) and (pair := paired(function)) and self.knows(function.__self__):
            self._pair(function, *pair, where)
        known.locals = frame.f_locals
        self._invoke(known, place, function, call, where)
        known.locals = {}
        self._look(known)

    def _pair(self, function: Any, times: int, undo: Any, told: tuple[str, str], where: str) -> None:
        """Counts a call whose effect another call ends; refuses the other one where it comes first."""
        what, key = f"{self.place(function.__self__)}.{function.__name__}()", id(function.__self__)
        times += self.pairs.get(key, (0,))[0]
        self.pairs[key] = times, undo, (what, where, *told)
        if times < 0:
            self.refuse(what, where, *told)

    def _invoke(
        self, known: Frame, place: int, function: Any, call: CallSite | None, where: str, given: Any = None
    ) -> None:
        """Notes the reads of a function in C before its call.

        ``given``: the possible values of each argument, and of each keyword by name; ``None``: taken from ``call``.
        """
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        bound = type(owner).__name__ == "PyCapsule" or type(owner).__module__ == "pybind11_builtins"
        plain = owner is None or is_a(owner, ModuleType) or bound
        module = function.__module__ if plain and is_a(function.__module__, str) else ""
        if plain and not bound and module.startswith("torch") and not is_asked(module, name):
            return
        known.calls.unknown.add(place)
        if given is None:
            is_tensors = call is None or is_a(owner, torch.Tensor)
            given = ([], {}) if is_tensors else self._given_to(known, call)
        if bound and call is not None:  # a pybind11 function, or a method of a pybind11 class
            sources = [each[1] for each in self._expanded(known, call.function) if each[0] == "attr"]
            for each in [each for one in sources for each in self._values(known, one)]:
                if not is_a(each, ModuleType | type | Instance | FrameOf):
                    self._method(known, place, each, function, name, where, given)
        if name in USES["shows"] or _hand_on_showing([*given[0], *given[1].values()]):
            self._shown([[owner], *given[0]], where)
        if plain:
            self._function(known, place, function, (module, name), call, where, given)
        else:
            self._method(known, place, owner, function, name, where, given)

    def _shown(self, args: Given, where: str) -> None:
        for each in (each for arg in args for each in arg):
            self.whole(each, where, compared=True)

    def _given_to(self, frame: Frame, call: CallSite) -> tuple[Given, dict[str, list[Any]]]:
        """The possible values of a call's arguments; ``f(*args)`` counts as one argument."""
        args = call.args or ((call.spread,) if call.spread else ())
        words = {name: self._given(frame, each) for name, each in call.kwargs}
        return [self._given(frame, each) for each in args], words

    def _function(
        self, known: Frame, place: int, function: Any, of: tuple, call: CallSite | None, where: str, given: Any
    ) -> None:
        """Notes the reads of a module's function in C, which is about to be called."""
        (module, name), (args, kwargs) = of, given
        count = 1 if len(args) == 2 and args[1] == [None] else len(args)
        for stream in kwargs.get("file") or [None]:
            if reason := effect_of_function(module, name, count, stream):
                self.refuse(f"{name}()", where, *reason)
        if of == ("builtins", "print"):
            self.says.setdefault(f"prints at {where}")
        if of == ("sys", "_getframe"):
            self._result(known, place, FrameOf.of(known.frame))
        elif module == "_warnings" and name in ("warn", "warn_explicit"):
            self.says.setdefault(f"warns at {where}")
            self.ask(RAISING_WARNINGS[0], (), {}, RAISING_WARNINGS[1])
        elif module == "time" and name in CLOCKS:
            if ("result", place) in known.flow.compared:
                self._ask(known, place, function, call, given, f"{module}.{name}()", where)
        elif is_asked(module, name):
            self._ask(known, place, function, call, given, f"{module}.{name}()", where)
        elif name == "hash":
            for each in (each for given in args for each in given):
                self.identity_of_passed(each, where)
        elif name in ("id", "is_", "is_not") and call is not None:
            for source in call.arguments:
                self._identity(known, source, name != "id")
        elif name == "globals":
            self.know(known.globals, Place("global", known.globals.get("__name__", "")))
            self._result(known, place, known.globals)
        elif name == "__import__" and args:
            for each in args[0]:
                self._result(known, place, self.name(sys.modules, each, Place("module", each)))
        elif name in USES["finds"] and module == "_operator" and len(args) > 1:
            self._entries(known, place, args[0], args[1])
        elif module == "builtins" and args:
            self._builtin(known, place, name, given)
        everything = [each for arg in (*args, *kwargs.values()) for each in arg if type(each) not in PLAIN]
        if name in USES["searches"] or module.partition(".")[0] not in _KNOWN_PACKAGES:
            for each in everything:
                self.deep(each)
        if name not in USES["tells"] and not module.startswith("torch"):
            names = args[1] if of == ("builtins", "getattr") and len(args) > 1 else ()
            for value in everything:
                if not (names and all(is_held(value, each) for each in names)):
                    self._handed_on(known, place, value, 2)

    def _handed_on(self, known: Frame, place: int, value: Any, deep: int) -> None:
        """Notes an argument and its contents as possible results of a function in C."""
        for each in (value, *self.inside(value, deep)):
            if type(each) not in PLAIN and not is_a(each, torch.Tensor | Instance):
                self._result(known, place, each)

    def _entries(self, known: Frame, place: int, owners: Iterable[Any], keys: Sequence[Any]) -> None:
        for owner in owners:
            found = [value for key in keys for value in self.entry(owner, key)]
            for value in found if keys else self._each(known, owner):
                self._result(known, place, value)

    def _moves(self, frame: Frame, value: Any) -> None:
        """Notes that an iterator advances; iterators in globals of torch's and Python's own files do not count."""
        file = frame.code.co_filename
        held = list(frame.globals.values()) if is_library(file) or file.startswith("<frozen") else ()
        if not any(value is each or getattr(each, "__self__", None) is value for each in held):
            self.moved(value, frame.where)

    def _method(self, known: Frame, place: int, owner: Any, function: Any, name: str, where: str, given: tuple) -> None:
        """Notes the reads of an object's method in C, which is about to be called."""
        known.calls.unknown.add(place)
        owner = owner.__self__ if type(owner) is super else owner
        kind, (args, _) = type(owner), given
        if is_changeable(kind):
            self.class_name(kind, name)
        if is_a(owner, torch.UntypedStorage) and (reason := effect_of(owner, name)):
            self.refuse(f"untyped_storage().{name}()", where, *reason)
        if name == "__new__" and args:
            for made in [each for each in args[0] if is_a(each, type)]:
                self._result(known, place, Instance(made))
        if is_a(owner, weakref.ref) and name == "__call__":
            self._reference(known, place, owner)
        elif name in ("__getattribute__", "__getattr__") and args:
            if not args[0]:
                self.all(owner)
            for value in [each for word in args[0] for each in self.attribute(owner, word)]:
                self._result(known, place, value)
        elif self.knows(owner):
            for each in (each for arg in args if is_a(owner, CONTAINERS) for each in arg):
                self.identity_of_passed(each, where)
            if reason := effect_of(owner, name):
                self.refuse(f"{self.place(owner)}.{name}()", where, *reason)
            if name == "__next__":
                return self._moves(known, owner)
            if name == "__dir__":
                self.all(owner)
            if is_asked(kind.__name__, name) or (issubclass(kind, type) and is_asked("type", name)):
                self._ask(known, place, getattr(owner, name), None, given, f"{self.place(owner)}.{name}()", where)
            elif name in USES["finds"] and is_a(owner, dict | types.MappingProxyType) and args:
                if name not in USES["reads"] or hasattr(kind, "__missing__"):
                    self.may_be_written()
                self._entries(known, place, [owner], args[0])
                return
            elif name in USES["searches"]:
                self.deep(owner)
            elif contents_of(owner) is not None:
                if name not in USES["reads"]:
                    self.may_be_written()
                self.whole(owner, known.where)
            elif not is_a(owner, torch.Tensor | nn.Module | type | ModuleType):
                self.refuse_unwatched(owner, str(self.place(owner)), where)
        else:
            keys = args[0] if name in USES["finds"] and args else ()
            plain = tuple(each[0] for each in args if each and type(each[0]) in PLAIN)
            asked = [("ask_method", name, *plain)] if is_asked(kind.__name__, name) else []
            self.strangers.note(owner, ("whole", where), *asked, *(("entry", each) for each in keys if is_key(each)))
        if is_a(owner, torch.Tensor | nn.Module):
            return
        foreign = str(kind.__module__).partition(".")[0] not in _KNOWN_PACKAGES and not is_a(function, FunctionType)
        for each in [each for arg in args for each in arg] if foreign else ():
            self.deep(each)
        for each in self.inside(owner, 2):
            if len(known.calls.results.get(place, ())) >= MOST_RESULTS:
                break
            self._result(known, place, each)

    def ask_method(self, owner: Any, name: str, *args: Any) -> None:
        """Notes a method in C that returns hidden state."""
        self.ask(getattr(owner, name), args, {}, f"{self.place(owner)}.{name}()")

    def _reference(self, known: Frame, place: int, reference: Any) -> None:
        """Notes a dereference of a weak reference: whether it is alive, and its object."""
        if self.knows(reference):
            self.ask(is_alive, (reference,), {}, f"{self.place(reference)}()")
        found = weakref.ref.__call__(reference)
        if found is not None:
            if self.knows(reference):
                self.know(found, self.place(reference))
            self._result(known, place, found)

    def _builtin(self, known: Frame, place: int, name: str, given: Any) -> None:
        """Notes the reads of a builtin that looks up names, attributes, classes or iterators."""
        args, kwargs = given
        owners = [each for each in args[0] if type(each) not in PLAIN]
        owners += [each.__func__ for each in owners if is_a(each, types.MethodType)]  # has its function's attributes
        if name in ("getattr", "hasattr", "setattr", "delattr") and len(args) > 1:
            names = [] if any(each is ANY for each in args[1]) else [each for each in args[1] if type(each) is str]
            for owner in owners:
                for each in names if name in ("setattr", "delattr") else ():
                    self._written(owner, each)
                    self.may_be_written()
                for each in names:
                    for value in self.attribute(owner, each):
                        self._result(known, place, value)
                for value in () if names else self.any_attribute(owner):
                    self._result(known, place, value)
            for each in interesting(args[2][0]) if len(args) > 2 and args[2] else ():
                self._result(known, place, each)
        elif name in ("vars", "dir"):
            for owner in owners:
                if name == "dir":
                    self.all(owner)
                for held in self.attribute(owner, "__dict__"):
                    self._result(known, place, held)
        elif name in USES["takes"]:
            for each in owners:
                self._moves(known, each)
            for function in kwargs.get("key", ()):
                self._apply(known, place, function, ([self._elements(args)], {}))
        elif name in ("isinstance", "issubclass") and len(args) == 2:
            kinds = [each for value in args[1] for each in classes_in(value)]
            for value in owners:
                one = value.kind if is_a(value, Instance) else value if name == "issubclass" else type(value)
                if name == "isinstance" and not (torch.Tensor in kinds and is_a(value, torch.Tensor)):
                    self._class(value)
                if is_a(one, type):
                    self._relation(one, kinds)
        elif name == "callable":
            for value in owners:
                self.attribute(value, "__call__")

    def _related(self, frame: Frame, value: frozenset, sources: frozenset) -> None:
        """Notes the class tests of ``match`` and ``except``; for ``raise``, the bases of the raised classes."""
        kinds = [each for found in self._constants(frame, sources) for each in classes_in(found)]
        for each in () if value else (each for source in sources for each in self._values(frame, source)):
            made = Instance(each) if is_a(each, type) else each
            self.raised.setdefault(identity_of(made), made)
        for kind in kinds:
            self.bases.setdefault(kind)
        for owner in (each for source in value for each in self._values(frame, source)):
            self._class(owner)
            self._relation(owner.kind if is_a(owner, Instance) else type(owner), kinds)

    def _relation(self, one: type, kinds: Iterable[type]) -> None:
        """Notes an ``isinstance`` or ``issubclass`` test of a class against others."""
        if is_changeable(one):
            self.bases.setdefault(one)
        for kind in kinds:
            if is_changeable(type(kind)) and not kind.__module__.startswith("torch"):
                self.class_name(type(kind), "__instancecheck__")
            own = class_entry(type(kind), "__subclasscheck__") is not class_entry(type, "__subclasscheck__")
            if own and not issubclass(one, torch.Tensor) and not kind.__module__.startswith("torch"):
                self.ask(issubclass, (one, kind), {}, f"issubclass({one.__name__}, {kind.__name__})")

    def _ask(
        self, known: Frame, place: int, function: Any, call: CallSite | None, given: tuple, words: str, where: str
    ) -> None:
        """Notes a call of a function that returns hidden state, for each choice of its possible arguments."""
        args, kwargs = given
        lists = [*args, *kwargs.values()]
        is_known = (call is None or call.args is not None) and math.prod(map(len, lists)) in range(1, _MOST_ASKED)
        if not is_known or any(each is ANY for one in lists for each in one):
            if function.__module__ in ("posix", "nt"):
                self.refuse(words, where, *_UNKNOWN)
            if not is_a(getattr(function, "__self__", None), ContextVar):
                return
            lists, args, kwargs = [], [], {}  # the variable's value, whatever the default
        if any(is_a(each, torch.Tensor | tuple) for one in lists for each in one):
            return
        for chosen in itertools.product(*lists):
            given = chosen[: len(args)], dict(zip(kwargs, chosen[len(args) :], strict=True))
            self.ask(function, *given, words)
            with suppress(Exception):  # forward is about to meet it
                found = function(*given[0], **given[1])
                if type(found) not in PLAIN:
                    self.know(found, Place("", words))
                    self._result(known, place, found)

    def _called(
        self, frame: Frame, place: int, value: Any, call: CallSite, source: Source, known: tuple | None = None
    ) -> None:
        """Notes a call that the profiler does not report: a slot in C (``ref()``, ``list(it)``, ``partial(n)``).

        ``known``: the possible values of its arguments; ``None``: taken from ``call``.
        """
        value = self.cached_function(value)
        kind = type(value)
        if is_changeable(kind) and not is_a(value, type):
            self.attribute(value, "__call__")
            reason = effect_of(value, "__call__") if callable(value) else None
            if reason is not None and not is_in_function(frame.frame):
                self.refuse(str(self.place(value)) or kind.__name__, frame.where, *reason)
        if is_a(value, nn.Module):  # its forward is profiled code, or machinery
            return
        given = functools.cache(lambda: known or self._given_to(frame, call))  # most calls ask for no argument
        if is_a(value, weakref.ref):
            self._reference(frame, place, value)
        elif kind is functools.partial:
            self._partial(frame, place, value, given())
        elif does(kind, "gets"):
            self._getter(frame, place, value, given()[0])
        elif value is super:
            pair = given()[0] or [[frame.cells.get("__class__")], [next(iter(frame.args.values()), None)]]
            for owner in pair[1] if len(pair) > 1 else ():
                kinds = [each for each in pair[0] if is_a(each, type) and not is_a(owner, Instance)]
                for each in kinds:
                    if issubclass(type(owner), each) or (is_a(owner, type) and issubclass(owner, each)):
                        self._result(frame, place, super(each, owner))
        elif value is type and call.args is not None and len(call.args) == 1:
            for owner in given()[0][0]:
                one = owner.kind if is_a(owner, Instance) else type(owner)
                self.know(one, Place("class", one.__name__))
                if not is_a(owner, Instance):
                    self._class(owner)
                self._result(frame, place, one)
        elif is_a(value, type):
            self._made(frame, place, value, given(), call.args is not None)
        elif kind is types.MethodWrapperType or (kind is types.MethodType and type(value.__func__).__name__ in _IN_C):
            self._method(frame, place, value.__self__, value, value.__name__, frame.where, given())
        elif kind.__name__ in _IN_C:
            owners = self._values(frame, source[1]) if source[0] == "attr" else []
            for owner in owners:
                if not is_a(owner, ModuleType | type | Instance | FrameOf):
                    self._method(frame, place, owner, value, source[2], frame.where, given())
            args, words = given()
            unbound = args[0] if args and all(is_a(each, ModuleType | type) for each in owners) else ()
            for owner in unbound:  # the first argument is the method's object
                if type(owner) not in PLAIN and not is_a(owner, Instance | FrameOf):
                    self._method(frame, place, owner, value, value.__name__, frame.where, (args[1:], words))
        elif kind is functools._lru_cache_wrapper:
            self._cached(frame, place, value, call, source, given())

    def _cached(self, frame: Frame, place: int, value: Any, call: CallSite, source: Source, given: tuple) -> None:
        """Notes the call of a function under ``lru_cache``, and the result that it keeps."""
        wrapped = value.__wrapped__
        self.know(wrapped, self.place(value))
        if is_a(wrapped, types.BuiltinFunctionType):
            self._invoke(frame, place, wrapped, call, frame.where, given)
        elif not is_a(wrapped, FunctionType):
            self._called(frame, place, wrapped, call, source)
        owners = self._values(frame, source[1]) if source[0] == "attr" else ()
        bound = next(([each] for each in owners if binds(each, source[2], value)), [])
        args, words = [*([bound] if bound else []), *given[0]], given[1]
        if call.args is not None and all(len(each) == 1 for each in (*args, *words.values())):
            named = {name: each[0] for name, each in words.items()}
            for each in interesting(self.kept(value, tuple(each[0] for each in args), named).read()):
                self._result(frame, place, each)

    def _made(self, frame: Frame, place: int, kind: type, given: tuple, one_by_one: bool) -> None:
        """Notes the call of a class: its constructors, and the arguments that the new object may hold."""
        args, words = given
        if is_changeable(kind):
            for name in ("__new__", "__init__"):
                self.class_name(kind, name)
            self.special_methods(kind)
            self._result(frame, place, Instance(kind))
        if is_changeable(type(kind)):
            self.class_name(type(kind), "__call__")
        if kind is str or _hand_on_showing(args):
            self._shown(args, frame.where)
        if does(kind, "takes") or kind.__module__ in ("itertools", "_collections"):
            for each in (each for arg in args for each in arg):
                self._moves(frame, each)
        if kind.__name__ in _CALLS_FIRST or kind.__name__ == "groupby":
            functions, others = (args[:1], args[1:]) if kind.__name__ in _CALLS_FIRST else (args[1:], args[:1])
            elements = [self._elements([arg]) for arg in others]
            for each in elements[0] if kind.__name__ == "starmap" and elements else ():
                self.deep(each)
            for function in (each for arg in functions for each in arg):
                self._apply(frame, place, function, (elements, {}))
        if does(kind, "binds") and one_by_one and all(len(each) == 1 for each in args) and args:
            named = {name: each[0] for name, each in words.items() if len(each) == 1}
            for made in interesting(frame.calls.bound(kind, [each[0] for each in args], named)):
                self._result(frame, place, made)
        elif not is_changeable(kind) and kind not in PLAIN:
            for value in (value for arg in args for value in arg if type(value) not in PLAIN):
                self._handed_on(frame, place, value, 1)

    def _partial(self, frame: Frame, place: int, value: functools.partial, given: tuple) -> None:
        """Notes the call of a ``functools.partial``."""
        for each in (*value.args, *value.keywords.values()):
            self.whole(each, frame.where)
        named = {name: [each] for name, each in value.keywords.items()}
        self._apply(frame, place, value.func, ([*([each] for each in value.args), *given[0]], named | given[1]))

    def _elements(self, args: Given) -> list[Any]:
        """The possible elements of arguments: of a container that the call makes, they are its possible values."""
        return [each for arg in args for value in arg for each in (value, *self.inside(value, 1))]

    def _apply(self, frame: Frame, place: int, function: Any, given: tuple) -> None:
        """Notes that a function in C calls another one; ``given``: the possible values of its arguments."""
        if is_a(function, types.BuiltinFunctionType):
            self._invoke(frame, place, function, None, frame.where, given)
        else:
            self._called(frame, place, function, CallSite(frozenset(), ()), ("made",), given)

    def _getter(self, frame: Frame, place: int, getter: Any, args: Given) -> None:
        """Notes the lookups of an ``attrgetter``, ``itemgetter`` or ``methodcaller``."""
        names = getter.__reduce__()[1]
        for owner in (each for each in (args[0] if args else ()) if type(each) not in PLAIN):
            if type(getter) is operator.itemgetter:
                self._entries(frame, place, [owner], names)
            elif type(getter) is operator.attrgetter:
                for path in names:
                    found = [owner]
                    for name in path.split("."):
                        found = [value for each in found for value in self.attribute(each, name)]
                    for value in found:
                        self._result(frame, place, value)
            else:
                self.attribute(owner, names[0])
                self._method(frame, place, owner, None, names[0], frame.where, ([[each] for each in names[1:]], {}))
