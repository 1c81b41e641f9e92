"""Recorded reads: forward runs under a profiler → the state outside of the call that its code read.

The profiler of this thread hears of each Python function that runs and of each function in C that is called. What the
code of the former reads (:mod:`bridge.guards.dataflow`) is followed on the real objects, with no code of theirs run:
names of files and closures, attributes of modules, classes and objects, entries of containers. It is noted *where*
something was read, not its value: that is what it is when the guard is made.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from bridge.base.errors import TORCH_DIR
from bridge.guards.dataflow import Flow, Source, flow_of
from bridge.guards.kinds import ASKED, CONTAINERS, PLAIN, contents_of, effect_of

__all__ = ["ABSENT", "Asked", "Reads", "slot_of"]

ABSENT = object()
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCHS = ("_ops.py", "overrides.py", "_library", "_subclasses", "fx", "_prims", "_prims_common", "_refs", "_decomp")
_TORCHS += ("_meta_registrations.py", "_higher_order_ops", "_functorch", "_dispatch", "_jit_internal.py", "_logging")
_TORCHS += ("utils/_python_dispatch.py", "utils/_pytree.py", "utils/_contextlib.py", "utils/_config_module.py")
_TORCHS += ("utils/_device.py", "utils/_cxx_pytree.py", "_compile.py", "_dynamo", "_inductor", "_C", "utils/_stats.py")
_TORCHS += ("autograd", "jit", "_export", "export", "_weights_only_unpickler.py", "storage.py", "types.py")
_TORCHS += ("nn/modules/module.py", "_linalg_utils.py", "_classes.py", "_vmap_internals.py", "hub.py", "package", "utils/_typing_utils.py")
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PYTHONS = ("logging", "warnings.py", "importlib", "re", "sre_", "inspect.py", "linecache.py", "traceback.py", "tokenize")
_PYTHONS += ("typing.py", "abc.py", "_collections_abc.py", "copyreg.py", "functools.py", "dis.py", "ast.py")
_UNREAD = (*(os.path.join(TORCH_DIR, each) for each in _TORCHS), *(_LIBRARY + each for each in _PYTHONS), _OWN, "<frozen importlib", "<frozen zipimport", "<frozen abc", "<frozen _collections_abc")
_ASKED_PYTHON = frozenset(
    [(_LIBRARY + os.path.join("logging", "__init__.py"), name) for name in ("isEnabledFor", "getEffectiveLevel", "hasHandlers")]
    + [(_LIBRARY + os.path.join("importlib", "util.py"), "find_spec"), ("<frozen importlib.util>", "find_spec")]
)
_RUN_FORWARD = ("unwatched.py", "prepared_twin.py")
"""Files of this package that call what forward calls."""
_LOCAL = threading.local
_HEAP_TYPE = 1 << 9
_OPTIMIZED = 0x2


@dataclass(frozen=True)
class Instance:
    """In the place of a value that is not kept: a tensor, say, that the call computes."""

    kind: type


@dataclass(frozen=True)
class _FrameOf:
    """In the place of a frame object: what can be read through it."""

    globals: Any
    back: Any


@dataclass
class Asked:
    """A function in C that tells hidden state: it is called again, and has to give the same."""

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    words: str


@dataclass
class Names:
    """Names that were looked up in one namespace.

    Attributes:
        owner: the namespace (a dict), or a class.
        names: with the words for each.
    """

    owner: Any
    names: dict[str, str] = field(default_factory=dict)


class _Frame:
    """A function that runs."""

    __slots__ = ("args", "builtins", "called", "cells", "flow", "globals", "memo", "new", "plain", "python", "results", "where")

    def __init__(self, frame: FrameType, flow: Flow, args: dict[str, Any], cells: dict[str, Any]):
        self.flow, self.args, self.cells = flow, args, cells
        self.globals, self.builtins = frame.f_globals, frame.f_builtins
        self.results: dict[int, list[Any]] = {}
        self.called: dict[int, list[Any]] = {}
        self.plain: dict[int, list[Any]] = {}
        self.python: set[int] = set()
        self.memo: dict[Source, list[Any]] = {}
        self.new = False
        self.where = frame.f_code


class Reads:
    """What a run of forward reads.

    Args:
        originals: of objects that are copies for the run, by id: what they are copies of.
        known: further objects that were there before: the module, its tensors, the arguments' tensors.

    Attributes:
        names: by id of the namespace, names looked up in it: a module's, a file's, an object's attributes, a dict's items.
        classes: by id of the class, names looked up in it and its bases.
        types: objects whose class decided what was found.
        contents: objects whose contents were looked at, with words.
        functions: Python functions that may have run, with words.
        asked: functions in C that told hidden state.
        slots: objects and names of attributes that lie in no dictionary, with words.
        modules: by id of an ``nn.Module``, names of its attributes that were looked up.
        effects: what forward was about to do to something outside.
        exact: names whose values are compared by identity, by id of the namespace.
    """

    def __init__(self, originals: Mapping[int, Any], known: Iterable[tuple[Any, str]] = ()):
        self._originals = originals
        self._known: dict[int, Any] = {}
        self._words: dict[int, tuple[str, str]] = {}
        self.names: dict[int, Names] = {}
        self.classes: dict[int, Names] = {}
        self.types: dict[int, tuple[Any, str]] = {}
        self.contents: dict[int, tuple[Any, str]] = {}
        self.functions: dict[int, tuple[FunctionType, str]] = {}
        self.asked: dict[tuple, Asked] = {}
        self.slots: dict[tuple[int, str], tuple[Any, str]] = {}
        self.modules: dict[int, tuple[nn.Module, set[str]]] = {}
        self.operators: set[str] = set()
        self.effects: list[tuple[str, str]] = []
        self.exact: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self.codes: dict[CodeType, Flow | None] = {}
        self.loose: set[str] = set()
        self._frames: dict[FrameType, _Frame] = {}
        self._ours: set[FrameType] = set()
        for value, words in known:
            self._know(value, ("", words))

    def know(self, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors were there before the call."""
        for each in tensors:
            self._know(each, ("", "a tensor"))

    # Events

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """While active, notes what code of this thread reads; a profiler of the user's pauses."""
        before = sys.getprofile()
        sys.setprofile(self.hear)
        try:
            yield
        finally:
            sys.setprofile(before)
            self.finish()

    def finish(self) -> None:
        """The run is over."""
        for each in list(self._frames.values()):
            self._look(each)
        self._frames.clear()
        self._ours.clear()
        self._settle()
        for name in sorted(self.operators):
            self._class_name(torch.Tensor, name)

    def hear(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        try:
            flow = self.codes[code]
        except KeyError:
            flow = self.codes[code] = _flow(code, frame)
        if flow is None:
            if event == "return":
                back = frame.f_back
                if back in self._frames and arg is not None and not code.co_filename.startswith(_OWN):
                    self._returned(self._frames[back], back.f_lasti, arg)
            elif event == "call" and (code.co_filename, code.co_name) in _ASKED_PYTHON and frame.f_back in self._frames:
                self._ask_python(frame, code)
            return
        if event == "call":
            self._begin(frame, code, flow)
        elif event == "return":
            self._end(frame, arg)
        elif event == "c_call":
            known = self._frames.get(frame)
            if known is not None:
                self._c_call(frame, known, arg)

    def _begin(self, frame: FrameType, code: CodeType, flow: Flow) -> None:
        back = frame.f_back
        outer = self._frames.get(back) if back is not None else None
        if outer is None and self._is_ours(back, code):
            self._ours.add(frame)
            return
        if outer is not None:
            outer.python.add(back.f_lasti)
            if outer.new:
                self._look(outer)
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        held = frame.f_locals
        args = {name: self._kept(held[name]) for name in code.co_varnames[:count] if name in held}
        cells = {name: held[name] for name in code.co_freevars if name in held}
        made = self._frames[frame] = _Frame(frame, flow, args, cells)
        self._look(made)

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
        if made is not None and made.new:
            self._look(made)
        back = frame.f_back
        outer = self._frames.get(back) if back is not None else None
        if outer is not None and value is not None:
            self._returned(outer, back.f_lasti, value)

    def _returned(self, outer: _Frame, place: int, value: Any) -> None:
        """A function in Python has returned."""
        if isinstance(value, logging.Logger):
            self._know(value, ("logger", value.name))
        if type(value) in (str, bytes, int):
            known = outer.plain.setdefault(place, [])
            if value not in known and len(known) < 64:
                known.append(value)
                outer.new = True
        elif type(value) not in PLAIN:
            self._result(outer.results, place, value, outer)

    def _ask_python(self, frame: FrameType, code: CodeType) -> None:
        """A function of Python's own library that is asked again, whatever it reads."""
        count = code.co_argcount
        given = [frame.f_locals[name] for name in code.co_varnames[:count]]
        function = frame.f_globals.get(code.co_name)
        if function is None and given:
            self._know(given[0], ("logger", getattr(given[0], "name", "")))
            function, given = getattr(given[0], code.co_name, None), given[1:]
        if callable(function) and all(type(each) in PLAIN for each in given):
            self._ask_for(function, tuple(given), {}, f"{code.co_name}({', '.join(map(repr, given))})")

    def _result(self, results: dict[int, list[Any]], place: int, value: Any, outer: _Frame) -> None:
        kept, known = self._kept(value), results.setdefault(place, [])
        if len(known) < 64 and not any(each is kept or each == kept for each in known if type(each) is type(kept) is Instance) and not any(each is kept for each in known):
            known.append(kept)
            outer.new = True

    def _kept(self, value: Any) -> Any:
        """A value, or its class alone, if it is a tensor of the call's own."""
        return Instance(type(value)) if isinstance(value, torch.Tensor) and id(value) not in self._known else value

    def _c_call(self, frame: FrameType, known: _Frame, function: Any) -> None:
        place = frame.f_lasti
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        call = known.flow.calls.get(place)
        if owner is None or isinstance(owner, ModuleType):
            module = function.__module__ if isinstance(function.__module__, str) else ""
            if module == "builtins":
                self._builtin(known, place, name, call)
            elif (module, name) == ("sys", "_getframe"):
                self._result(known.called, place, _frame_of(frame), known)
            elif (module, name) in ASKED:
                self._ask(known, place, function, call, f"{module}.{name}()")
            known.called.setdefault(place, [])
            return
        kind = type(owner)
        if kind.__flags__ & _HEAP_TYPE:
            self._class_name(kind, name)
        if not self._is_known(owner):
            known.called.setdefault(place, [])
            return
        effect = effect_of(owner, name)
        if effect and known.flow is not None:
            self.effects.append((f"{self._said(owner)}.{name}()", _line(frame)))
        if (kind.__name__, name) in ASKED or (issubclass(kind, type) and ("type", name) in ASKED):
            self._ask(known, place, function, call, f"{self._said(owner)}.{name}()")
        elif contents_of(owner) is not None:
            if kind is dict and name == "get" and call is not None and call.args:
                for key in self._constants(known, call.args[0]):
                    self._item(owner, key)
            else:
                self._whole(owner)
        for each in self._inside(owner, 2):
            self._result(known.called, place, each, known)

    def _builtin(self, known: _Frame, place: int, name: str, call: Any) -> None:
        """Functions of Python's own that read names, attributes or iterators."""
        if name in ("getattr", "hasattr") and call is not None and call.args and len(call.args) > 1:
            names = [each for each in self._constants(known, call.args[1]) if type(each) is str]
            for source in call.args[0]:
                for owner in self._values(known, source):
                    for each in names:
                        for value in self._attribute(owner, each):
                            self._result(known.called, place, value, known)
                    if not names:
                        self._all(owner)
        elif name in ("globals", "vars", "dir", "locals"):
            if name == "globals":
                self._know(known.globals, ("global", known.globals.get("__name__", "")))
                self._result(known.called, place, known.globals, known)
            elif call is not None and call.args:
                for source in call.args[0]:
                    for owner in self._values(known, source):
                        self._all(owner)
                        held = _dict_of(owner)
                        if held is not None:
                            self._know(held, self._words.get(id(owner), ("", "")))
                            self._result(known.called, place, held, known)
        elif name == "next" and call is not None and call.args:
            for source in call.args[0]:
                for each in self._values(known, source):
                    if self._is_known(each) and effect_of(each, "__next__"):
                        self.effects.append((f"next({self._said(each)})", _where(known.where)))
        elif name in ("isinstance", "issubclass") and call is not None and call.args and len(call.args) == 2:
            kinds = [each for value in self._constants(known, call.args[1]) for each in _classes(value)]
            for source in call.args[0]:
                for value in self._values(known, source):
                    one = value.kind if isinstance(value, Instance) else value if name == "issubclass" else type(value)
                    if isinstance(one, type):
                        self._relation(one, kinds)
        elif name == "id" and call is not None and call.args:
            for source in call.args[0]:
                self._identity(known, source)
        elif name == "callable" and call is not None and call.args:
            for source in call.args[0]:
                for value in self._values(known, source):
                    self._attribute(value, "__call__")
        elif name == "len" and call is not None and call.args:
            for source in call.args[0]:
                for value in self._values(known, source):
                    self._whole(value)

    def _relation(self, one: type, kinds: Iterable[type]) -> None:
        """It is asked whether a class is one of these."""
        if one.__flags__ & _HEAP_TYPE:
            self._class_name(one, "__class__")
        for kind in kinds:
            if type(kind) is not type and _raw(type(kind), "__subclasscheck__") is not _raw(type, "__subclasscheck__"):
                if not issubclass(one, torch.Tensor) and not kind.__module__.startswith("torch"):
                    self._ask_for(issubclass, (one, kind), {}, f"issubclass({one.__name__}, {kind.__name__})")

    def _identity(self, frame: _Frame, source: Source) -> None:
        """A value is compared by identity: where it lies, nothing that is merely equal may lie."""
        if source[0] == "attr":
            for owner in self._values(frame, source[1]):
                held = None if isinstance(owner, Instance) else _dict_of(self._original(owner))
                if held is not None and self._is_known(owner) and source[2] in held and type(held[source[2]]) not in PLAIN:
                    self.exact[id(held), source[2]] = held, f"attribute '{source[2]}'"
                elif isinstance(owner, nn.Module):
                    for registry in ("_parameters", "_buffers", "_modules"):
                        names = self._original(owner).__dict__.get(registry, {})
                        if source[2] in names and self._is_known(owner):
                            self.exact[id(names), source[2]] = names, f"attribute '{source[2]}'"
        elif source[0] == "global" and source[1] in frame.globals and type(frame.globals[source[1]]) not in PLAIN:
            self.exact[id(frame.globals), source[1]] = frame.globals, f"global '{source[1]}'"

    # Values

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
        for source in flow.identities:
            self._identity(frame, source)
        for source in flow.reads:
            self._values(frame, source)
        for source in flow.wholes:
            if source[0] == "passed":
                if source[2] in frame.python:
                    continue
                source = source[1]
            for value in self._values(frame, source):
                self._whole(value)
        for place, call in flow.calls.items():
            if place not in frame.python and place not in frame.called:
                for source in call.function:
                    for value in self._values(frame, source):
                        self._called(frame, place, value, call, source)
        self.operators |= flow.operators
        self.loose |= flow.loose

    def _called(self, frame: _Frame, place: int, value: Any, call: Any, source: Source) -> None:
        """An object that is called without an event: by a slot in C."""
        if type(value).__flags__ & _HEAP_TYPE and not isinstance(value, type):
            self._attribute(value, "__call__")
        if isinstance(value, weakref.ref):
            self._ask_for(value, (), {}, f"{self._said(value)}()")
            if (found := value()) is not None:
                self._know(found, self._words.get(id(value), ("", "")))
                self._result(frame.results, place, found, frame)
        elif type(value) is types.MethodWrapperType:
            self._know(value.__self__, self._words.get(id(value), ("", "")))
            self._whole(value.__self__)
        elif type(value) is functools._lru_cache_wrapper:
            self._function(value.__wrapped__, self._words.get(id(value), ("", "")))
            args = [self._constants(frame, each) for each in call.args or ()]
            bound = source[0] == "attr" and any(not isinstance(o, ModuleType | type) for o in self._values(frame, source[1]))
            if not bound and call.args is not None and not call.kwargs and all(len(each) == 1 for each in args):
                given = tuple(each[0] for each in args)
                self._ask_for(value, given, {}, f"{self._said(value)}()")
        elif type(value) is functools.partial and self._is_known(value):
            self._whole(value)

    def _constants(self, frame: _Frame, sources: Iterable[Source]) -> list[Any]:
        """The values of sources: plain ones, too."""
        found = []
        for source in sources:
            if source[0] == "const":
                found.append(source[1])
            else:
                found += self._plain(frame, source)
        return found

    def _plain(self, frame: _Frame, source: Source) -> list[Any]:
        kind = source[0]
        if kind == "arg":
            value = frame.args.get(source[1], ABSENT)
            return [] if value is ABSENT or isinstance(value, Instance) else [value]
        if kind == "cell":
            return [frame.cells[source[1]]] if source[1] in frame.cells else []
        if kind == "global":
            for space in (frame.globals, frame.builtins):
                if source[1] in space:
                    return [space[source[1]]]
            return []
        if kind == "attr":
            owners = self._plain(frame, source[1])
            return [value for owner in owners if (value := _peek(owner, source[2])) is not ABSENT]
        if kind == "item":
            found = []
            for owner in self._plain(frame, source[1]):
                for key in self._constants(frame, (source[2],)):
                    if type(owner) in (dict, list, tuple):
                        try:
                            found.append(owner[key])
                        except (KeyError, IndexError, TypeError):
                            continue
            return found
        if kind == "result":
            return [*frame.plain.get(source[1], ()), *frame.results.get(source[1], ())]
        return list(self._values(frame, source)) if kind != "unknown" else []

    def _values(self, frame: _Frame, source: Source) -> list[Any]:
        """The objects that a source may be; what is read on the way is noted."""
        found = frame.memo.get(source)
        if found is None:
            frame.memo[source] = []  # while it is looked for
            found = frame.memo[source] = self._find(frame, source)
        return found

    def _find(self, frame: _Frame, source: Source) -> list[Any]:
        kind = source[0]
        if kind == "arg":
            value = frame.args.get(source[1], ABSENT)
            return [] if value is ABSENT or type(value) in PLAIN else [value]
        if kind == "global":
            return self._global(frame, source[1])
        if kind == "cell":
            value = frame.cells.get(source[1], ABSENT)
            return [] if value is ABSENT or type(value) in PLAIN else [value]
        if kind == "attr":
            return [value for owner in self._values(frame, source[1]) for value in self._attribute(owner, source[2])]
        if kind == "import":
            return self._import(frame, *source[1:])
        if kind == "result":
            return frame.results.get(source[1], [])
        if kind == "called":
            return frame.called.get(source[1], [])
        if kind == "held":
            return self._values(frame, source[1])
        if kind in ("each", "item", "in"):
            return self._entries(frame, source)
        return []

    def _entries(self, frame: _Frame, source: Source) -> list[Any]:
        kind, of = source[0], source[1]
        owners = self._values(frame, of)
        if of[0] == "held":
            return owners
        found = []
        for owner in owners:
            if kind == "each":
                self._whole(owner)
                found += self._inside(owner, 1)
                continue
            keys = self._constants(frame, (source[2],))
            for key in keys:
                found += self._item(owner, key)
            if not keys:
                self._whole(owner)
                found += self._inside(owner, 1)
        return found

    def _global(self, frame: _Frame, name: str) -> list[Any]:
        space = frame.globals
        module = space.get("__name__", "")
        value = self._name(space, name, "global", name, module)
        if value is ABSENT:
            value = self._name(frame.builtins, name, "builtin", name)
        return self._interesting(value)

    def _import(self, frame: _Frame, name: str, level: int, several: bool) -> list[Any]:
        package = frame.globals.get("__package__") or ""
        for _ in range(level - 1):
            package = package.rpartition(".")[0]
        full = f"{package}.{name}".strip(".") if level else name
        full = full if several or level else full.partition(".")[0]
        value = self._name(sys.modules, full, "module", full)
        return self._interesting(value)

    def _name(self, space: dict[str, Any], name: Any, kind: str, words: str, of: str = "") -> Any:
        """Notes that a name was looked up in a namespace."""
        value = space.get(name, ABSENT)
        noted = self.names.get(id(space))
        if noted is None:
            noted = self.names[id(space)] = Names(space)
        noted.names.setdefault(name, f"{kind} '{words}'")
        if value is not ABSENT:
            self._know(value, (kind, words))
        return value

    def _interesting(self, value: Any) -> list[Any]:
        return [] if value is ABSENT or type(value) in PLAIN else [value]

    def _is_known(self, value: Any) -> bool:
        return id(value) in self._known

    def _know(self, value: Any, words: tuple[str, str]) -> None:
        """This object was there before the call."""
        if type(value) in PLAIN or id(value) in self._known:
            return
        self._known[id(value)] = value
        self._words[id(value)] = words
        if isinstance(value, FunctionType):
            self._function(value, words)
        elif isinstance(value, types.MethodType):
            self._know(value.__func__, words)
            self._know(value.__self__, words)
        elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            if not isinstance(value.__self__, ModuleType | type(None)):
                self._know(value.__self__, words)
        elif isinstance(value, functools.partial):
            for each in (value.func, *value.args, *value.keywords.values()):
                self._know(each, words)
            self._whole(value)

    def _function(self, function: Any, words: tuple[str, str]) -> None:
        if not isinstance(function, FunctionType) or id(function) in self.functions:
            return
        self.functions[id(function)] = function, words[1] or function.__qualname__
        name = function.__qualname__
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._know(value, ("default argument of", name))
        for cell_name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                self._know(cell.cell_contents, ("variable", cell_name))
            except ValueError:
                continue

    def _original(self, value: Any) -> Any:
        return self._originals.get(id(value), value)

    def _attribute(self, owner: Any, name: str) -> list[Any]:
        """The values of an attribute."""
        if isinstance(owner, _FrameOf):
            found = {"f_globals": owner.globals, "f_back": owner.back}.get(name)
            if name == "f_globals":
                self._know(found, ("global", found.get("__name__", "")))
            return [] if found is None else [found]
        if name == "__class__" and not isinstance(owner, Instance):
            self._know(type(owner), ("class", type(owner).__name__))
            if self._is_known(owner):
                self.types.setdefault(id(owner), (self._original(owner), self._words.get(id(owner), ("", ""))[1]))
            return [type(owner)]
        if name == "__dict__" and not isinstance(owner, Instance | ModuleType):
            self._all(owner)
        if isinstance(owner, Instance):
            if owner.kind.__flags__ & _HEAP_TYPE:
                self._class_name(owner.kind, name)
            return []
        kind, words = type(owner), self._words.get(id(owner), ("", ""))
        told = f"{words[1]}.{name}" if words[1] else name
        if issubclass(kind, ModuleType):
            value = self._name(owner.__dict__, name, "global", f"{owner.__name__}.{name}")
            return self._interesting(value)
        if issubclass(kind, type):
            if kind is not type:
                self._class_name(kind, name)
            return self._interesting(self._class_name(owner, name))
        raw = self._class_name(kind, name) if kind.__flags__ & _HEAP_TYPE else _raw(kind, name)
        if issubclass(kind, nn.Module):
            return self._module_attribute(owner, name, raw)
        known = self._is_known(owner)
        held = _dict_of(owner)
        if raw is not ABSENT and hasattr(type(raw), "__set__"):  # a property, a slot: it comes before the dictionary
            if known and isinstance(raw, types.MemberDescriptorType):
                return self._slot(owner, name, raw, told)
            computed = isinstance(raw, property) or isinstance(_raw(type(raw), "__get__"), FunctionType)
            if known and not computed and not isinstance(owner, torch.Tensor) and name not in ("__dict__", "__class__"):
                return self._slot(owner, name, raw, told)
            return []
        if known and isinstance(owner, _LOCAL):
            return self._slot(owner, name, raw, told)
        if known:
            self.types.setdefault(id(owner), (self._original(owner), words[1]))
        if held is not None:
            original = _dict_of(self._original(owner)) if known else None
            if original is not None:
                self._name(original, name, words[0] or "attribute", told)
            value = held.get(name, ABSENT)
            if value is not ABSENT:
                if known:
                    self._know(value, (words[0], told))
                return self._interesting(value)
        return self._bound(owner, raw)

    def _bound(self, owner: Any, raw: Any) -> list[Any]:
        if isinstance(raw, staticmethod | classmethod):
            raw = raw.__func__
        return self._interesting(raw)

    def _module_attribute(self, owner: nn.Module, name: str, raw: Any) -> list[Any]:
        self.modules.setdefault(id(self._original(owner)), (self._original(owner), set()))[1].add(name)
        held = owner.__dict__
        if name in held:
            value = held[name]
        else:
            value = next((held[each][name] for each in ("_parameters", "_buffers", "_modules") if name in held.get(each, ())), raw)
        if value is not raw and type(value) not in PLAIN:
            self._know(value, ("attribute", name))
        return self._bound(owner, value)

    def _slot(self, owner: Any, name: str, raw: Any, told: str) -> list[Any]:
        self.slots.setdefault((id(owner), name), (self._original(owner), told))
        value = slot_of(owner, name)
        if value is ABSENT:
            return []
        self._know(value, ("attribute", told))
        return self._interesting(value)

    def _class_name(self, kind: type, name: str) -> Any:
        noted = self.classes.get(id(kind))
        if noted is None:
            noted = self.classes[id(kind)] = Names(kind)
        value = _raw(kind, name)
        if name not in noted.names:
            noted.names[name] = f"attribute '{name}' of class {kind.__name__}"
            inner = value
            if isinstance(inner, staticmethod | classmethod):
                inner = inner.__func__
            if isinstance(inner, property):
                for each in (inner.fget,):
                    self._know(each, ("", f"{kind.__name__}.{name}"))
            elif value is not ABSENT:
                self._know(value, ("attribute", f"{kind.__name__}.{name}"))
                self._know(inner, ("", f"{kind.__name__}.{name}"))
        return value

    def _item(self, owner: Any, key: Any) -> list[Any]:
        """An entry of a container by its key."""
        if isinstance(owner, Instance):
            return []
        if not self._is_known(owner):
            return self._inside(owner, 1)
        words = self._words.get(id(owner), ("", ""))
        if isinstance(owner, dict) and isinstance(key, str | int | bytes | tuple):
            if type(owner) is not dict:
                self.types.setdefault(id(owner), (self._original(owner), words[1]))
            try:
                return self._interesting(self._name(self._original(owner), key, words[0] or "attribute", f"{words[1]}[{key!r}]"))
            except TypeError:
                pass
        self._whole(owner)
        return self._inside(owner, 1)

    def _inside(self, owner: Any, deep: int) -> list[Any]:
        """What a container holds."""
        if isinstance(owner, types.MappingProxyType):
            values: Iterable[Any] = owner.values()
        elif isinstance(owner, dict):
            values = dict.values(owner)
        elif isinstance(owner, CONTAINERS):
            values = list(type(owner).__mro__[-2].__iter__(owner)) if not isinstance(owner, deque) else list(owner)
        else:
            return []
        known, words = self._is_known(owner), self._words.get(id(owner), ("", ""))
        found = []
        for value in list(values):
            if type(value) in PLAIN:
                continue
            if known:
                self._know(value, words)
            found.append(value)
            if deep > 1:
                found += self._inside(value, deep - 1)
        return found

    def _whole(self, value: Any) -> None:
        """The contents of an object are looked at."""
        if isinstance(value, Instance) or not self._is_known(value) or id(value) in self.contents:
            return
        if isinstance(value, torch.Tensor | nn.Module | type | ModuleType | FunctionType):
            return
        original = self._original(value)
        if contents_of(original) is not None:
            self.contents[id(value)] = original, self._said(value)
            for each in self._inside(value, 1):
                if isinstance(each, CONTAINERS):
                    self._whole(each)

    def _all(self, owner: Any) -> None:
        """All attributes of an object."""
        if isinstance(owner, Instance) or not self._is_known(owner):
            return
        held = _dict_of(self._original(owner))
        if held is not None and not isinstance(owner, ModuleType):
            for name in list(held):
                self._attribute(owner, name)
            if isinstance(owner, nn.Module):
                self.modules.setdefault(id(self._original(owner)), (self._original(owner), set()))[1].add("*")

    def _ask(self, known: _Frame, place: int, function: Any, call: Any, words: str) -> None:
        """Notes a call of a function that tells hidden state, if its arguments are known."""
        args, kwargs = [], {}
        if call is None or call.args is None:
            return
        if call.args or call.kwargs:
            given = [self._constants(known, each) for each in call.args]
            named = {name: self._constants(known, each) for name, each in call.kwargs}
            if all(len(each) == 1 for each in (*given, *named.values())):
                args, kwargs = [each[0] for each in given], {name: each[0] for name, each in named.items()}
            else:
                return
        key = self._ask_for(function, tuple(args), kwargs, words)
        try:
            found = function(*args, **kwargs)
        except Exception:  # noqa: BLE001 - as forward is about to meet it
            return
        if type(found) not in PLAIN and self.asked[key].function is function:
            self._know(found, ("", words))
            self._result(known.called, place, found, known)

    def _ask_for(self, function: Any, args: tuple, kwargs: dict[str, Any], words: str) -> tuple:
        owner = getattr(function, "__self__", None)
        key = id(owner) if owner is not None else id(function), getattr(function, "__name__", ""), repr(args), repr(kwargs)
        if key not in self.asked:
            self.asked[key] = Asked(function, args, kwargs, words)
        return key

    def _said(self, value: Any) -> str:
        kind, words = self._words.get(id(value), ("", ""))
        return f"{kind} '{words}'" if kind else words or type(value).__name__

    def _settle(self) -> None:
        """Attributes of values from nowhere known: of all objects that are known and have one of that name."""
        for name in self.loose:
            for value in list(self._known.values()):
                held = None if isinstance(value, ModuleType | type | torch.Tensor | nn.Module) else _dict_of(value)
                if held is not None and name in held and not isinstance(value, FunctionType):
                    self._attribute(value, name)


def _flow(code: CodeType, frame: FrameType) -> Flow | None:
    if code.co_filename.startswith(_UNREAD):
        return None
    if not code.co_flags & _OPTIMIZED and code.co_name == "<module>" and not code.co_filename.startswith("<"):
        return None
    return flow_of(code)


def slot_of(value: Any, name: str) -> Any:
    """The value of an attribute that lies in no dictionary; ``ABSENT``: there is none."""
    try:
        if isinstance(value, _LOCAL):
            return _LOCAL.__getattribute__(value, name)
        raw = _raw(type(value), name)
        return ABSENT if raw is ABSENT else raw.__get__(value)
    except AttributeError:
        return ABSENT


def _classes(value: Any) -> list[type]:
    if isinstance(value, tuple):
        return [each for part in value for each in _classes(part)]
    return [value] if isinstance(value, type) else []


def _frame_of(frame: FrameType | None, deep: int = 4) -> _FrameOf | None:
    return None if frame is None or not deep else _FrameOf(frame.f_globals, _frame_of(frame.f_back, deep - 1))


def _raw(kind: type, name: str) -> Any:
    for base in kind.__mro__:
        held = base.__dict__
        if name in held:
            return held[name]
    return ABSENT


def _dict_of(value: Any) -> dict[str, Any] | None:
    try:
        held = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return held if isinstance(held, dict) else None


def _peek(owner: Any, name: str) -> Any:
    """An attribute's value, with none of the owner's code run."""
    if isinstance(owner, Instance):
        return ABSENT
    held = vars(owner) if isinstance(owner, ModuleType) else _dict_of(owner)
    if held is not None and name in held:
        return held[name]
    raw = _raw(owner if isinstance(owner, type) else type(owner), name)
    if isinstance(raw, types.MemberDescriptorType):
        try:
            return raw.__get__(owner)
        except AttributeError:
            return ABSENT
    return ABSENT if raw is ABSENT or hasattr(type(raw), "__get__") else raw


def _where(code: CodeType) -> str:
    return f"{code.co_filename}:{code.co_firstlineno}"


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"

