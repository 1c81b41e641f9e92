"""Guard conditions on forward's reads: the places that a run noted → whether a call would read the same.

The guard reads the places when it is made, after forward's last run. The quick path compares by identity, and where
writes are counted (names in dictionaries, code, classes, bases), only the places written to since. The thorough path
accepts equal values and gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, methodcaller, ne
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any

from torch import nn

from bridge.base.errors import MODULE, GuardFailure, Unsupported, UnsupportedModule
from bridge.base.tensor_properties import properties_of
from bridge.guards.kinds import CONTAINERS, is_a
from bridge.guards.modules import ModulePlace, walks
from bridge.guards.objects import is_changeable, names_of, special_methods_of
from bridge.guards.recording import Reads
from bridge.guards.watched import (
    ABSENT,
    Answer,
    Class,
    ClassName,
    ClosureCell,
    Code,
    Contents,
    Name,
    Place,
    Slot,
    Watched,
    class_entry,
    contents_at,
    entry_of,
)
from bridge.state import dict_behind, write_counter

__all__ = ["ReadGuard"]

_PARTS = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_HELD, _CALL = attrgetter("cell_contents"), methodcaller("__call__")
_ITEMS = methodcaller("items")
_FIXED = (ModuleType, type)
"""Objects whose dictionary Python code cannot replace."""


class _Names:
    """Names in one namespace, or in a class and its bases, with their expected values."""

    is_counted = True

    def __init__(self, items: Sequence[Name | ClassName]):
        self.items, first = items, items[0]
        self._names = [item.name for item in items]
        self.values = [item.read() for item in items]
        if isinstance(first, Name):
            exact = type(first.space) is dict
            of: tuple = (first.space.get, self._names, repeat(ABSENT))
            self._of = of if exact else (entry_of, repeat(first.space), self._names)
        else:
            self._of = (class_entry, repeat(first.kind), self._names)

    def unchanged(self) -> bool:
        return all(map(is_, map(*self._of), self.values))


class _Held:
    """The contents of a dictionary, or all entries of a class and its bases; write counts decide only while all entries
    are the expected objects."""

    def __init__(self, item: Contents | Answer):
        self.items, self.values, self.is_counted = [item], [item.read()], True

    def unchanged(self) -> bool:
        (item,), (then,) = self.items, self.values
        now, each = item.read(), iter if getattr(item, "table", False) else chain.from_iterable
        self.is_counted = len(now) == len(then) and all(map(is_, each(now), each(then)))
        return self.is_counted or item.same(now, then)

    @staticmethod
    def may_hold(item: Any) -> bool:
        """Whether all writes to it are counted: a dictionary that is noted without the containers in it, or a class."""
        if isinstance(item, Answer):
            return item.function in (names_of, special_methods_of)
        is_dict = isinstance(item, Contents) and type(item.value) is dict
        return is_dict and not (item.table and any(isinstance(each, CONTAINERS) for each in item.read()))


class _Module:
    """A module with its expected values; write counts decide while the module's dictionaries are the same ones.

    Attributes:
        dicts: the registries with entries, except of hooks; ``None`` if nothing counts their writes.
        hooked: the registries of hooks with entries: no count tells the order of an ``OrderedDict``.
        empty: the registries that have to stay empty.
    """

    def __init__(self, item: ModulePlace):
        self.items, self.values, self.is_counted = [item], [item.expected()], True
        self._registries = [*item.registries, *item.registries_of_hooks]
        held, self.hooked = list(filter(None, item.registries)), list(filter(None, item.registries_of_hooks))
        self.dicts = held if write_counter() is not None and all(isinstance(each, dict) for each in held) else None
        self.empty = [each for each in self._registries if not each]

    def unchanged(self) -> bool:
        (item,), (then,) = self.items, self.values
        same = all(map(is_, (*item.registries, *item.registries_of_hooks), self._registries))
        self.is_counted = same and self.dicts is not None
        return item.unchanged(then)


class _Bindings:
    """The classes of objects, the bases of classes, and the code and defaults of functions, with their expected values.

    Args:
        typed: of objects, with their classes and dictionaries. bases: classes whose bases decided a branch.

    Attributes:
        having, held: the objects whose dictionaries can be replaced, which nothing counts, and these dictionaries.
    """

    def __init__(
        self, typed: Sequence[tuple[Class, Any]], bases: Iterable[type], functions: Sequence[FunctionType] = ()
    ):
        self.bases, self.typed, self._functions = [(kind, kind.__mro__) for kind in bases], typed, functions
        self._parts = list(chain.from_iterable(map(_PARTS, functions)))
        self.having: list[Callable[[], Any]] = []
        self.held: list[dict] = []
        self._note_living()

    def _note_living(self) -> None:
        """Notes the objects that are still alive; no call can meet a dead one."""
        alive = [(item.value, item.value(), then) for item, then in self.typed if then is not None]
        noted = [(of, then) for of, value, then in alive if value is not None and not is_a(value, _FIXED)]
        self.having[:] = [of for of, (_, held) in noted if held is not None]
        self.held[:] = [held for _, (_, held) in noted if held is not None]

    def unchanged(self) -> bool:
        self._note_living()
        if not all(map(is_, chain.from_iterable(map(_PARTS, self._functions)), self._parts)):
            return False
        alive = [(item.value(), then) for item, then in self.typed if then is not None]
        if any(type(value) is not then[0] for value, then in alive if value is not None):
            return False
        return all(kind.__mro__ is then for kind, then in self.bases)


class _Namespaces:
    """Names, contents of dictionaries and modules, which are compared only after a write to their dictionaries.

    Args:
        tree: the modules of the tree, whose own dictionaries come first among the write counts.
        others: modules outside of it.

    Attributes:
        groups: all of them, by namespace. ``uncounted``: the ones in namespaces whose writes Python does not count.
        dicts: their dictionaries, besides the own ones of the tree's modules.
        hooked: the registries of hooks with entries, whose order no count tells.
        versions: the write counts at the last comparison.
        empty: dictionaries that were empty then: Python 3.12 does not count the first write to one by update.
    """

    def __init__(self, items: Sequence[Any], tree: Sequence[ModulePlace] = (), others: Sequence[ModulePlace] = ()):
        spaces: dict[int, list[Any]] = {}
        for item in items:
            if isinstance(item, Name | ClassName):
                spaces.setdefault(id(item.space if isinstance(item, Name) else item.kind), []).append(item)
        self.tree = list(map(_Module, tree))
        modules = [*self.tree, *map(_Module, others)]
        self.groups: list[_Names | _Held | _Module] = [*modules, *(_Names(each) for each in spaces.values())]
        self.groups += [_Held(item) for item in items if _Held.may_hold(item)]
        self.dicts: list[dict] = []
        by_dict: dict[int, list[_Names | _Held | _Module]] = {}
        self.uncounted: list[_Names | _Held | _Module] = []
        for group in self.groups:
            dicts = _dicts_of(group)
            if dicts is None and group not in self.tree:
                self.uncounted.append(group)
            for each in dicts or ():
                if id(each) not in by_dict:
                    self.dicts.append(each)
                by_dict.setdefault(id(each), []).append(group)
        self._counted = [each for each in self.groups if each not in self.uncounted]
        self._by_place = [[group] for group in self.tree] + [by_dict[id(each)] for each in self.dicts]
        self.hooked = [each for group in modules for each in group.hooked]
        self.versions: list[int] | None = None
        self._stay_empty = [each for group in modules for each in group.empty]
        self.empty: list[dict] = self._stay_empty

    def unchanged(self, versions: list[int] | None, everything: bool) -> bool:
        """Compares the groups of the dictionaries that were written, or all; ``versions``: from before the
        comparison, so that a concurrent write is seen later."""
        then, written = None if everything or any(self.empty) else self.versions, self._counted
        if versions is not None and then is not None:
            changed = [groups for groups, *counts in zip(self._by_place, versions, then, strict=True) if ne(*counts)]
            written = {id(group): group for groups in changed for group in groups}.values()
        if not all([group.unchanged() for group in written]):
            return False
        for place, groups in enumerate(self._by_place) if versions is not None else ():
            if not all(group.is_counted for group in groups):
                versions[place] = -1
        self.versions, self.empty = versions, [*self._stay_empty, *(each for each in self.dicts if not each)]
        return True


class ReadGuard:
    """The conditions of one entry on the state that its forward read.

    Args:
        modules: the modules of the tree.
        but: places that forward sets before it reads them: their holder, and the key there.

    Attributes:
        spaces: the places whose writes are counted, with their dictionaries.
    """

    def __init__(self, reads: Reads, modules: Sequence[ModulePlace] = (), but: Collection[tuple[Any, Any]] = ()):
        registered = [each.module() for each in modules]
        tree = {id(each) for each in registered} | {id(each.__dict__) for each in registered}
        tree |= {id(held) for each in modules for held in (*each.registries, *each.registries_of_hooks)}
        items = [
            item
            for (kind, of, *_), item in reads.items.items()
            if of not in tree or (kind == "name" and item.exact) or kind == "class"
        ]
        items += [Answer(contents_at, (item,), {}, item.place) for item in reads.rebound if _without(item, but)]
        items = [each for item in items if (each := _without(item, but)) is not None] if but else items
        outside = []
        for reference, names in reads.modules.values():
            if (module := reference()) is not None and id(module) not in tree:
                place, own = reads.place(module), module.__dict__
                outside.append(ModulePlace(module, None, names, [key for holder, key in but if holder is own], place))
                items += _walked(module, names, place)
        again = {**reads.attributes, **{key: item for key, item in reads.items.items() if key in reads.later}}
        later = [item for key, item in again.items() if key not in reads.written]
        self._later = [(item, item.read()) for item in later]
        self.spaces = _Namespaces(items, modules, outside)
        self._hooks = _entries(self.spaces.hooked)
        codes = [item for item in items if isinstance(item, Code)]
        typed = [item for item in items if isinstance(item, Class)]
        functions = [item.function for item in codes]
        self._bindings = _Bindings([(item, item.read()) for item in typed], reads.bases, functions)
        cells = [(item, item.read()) for item in items if isinstance(item, ClosureCell)]
        self._cells, self._in_cells = [item.cell for item, _ in cells], [value for _, value in cells]
        known = {id(item) for group in self.spaces.groups for item in group.items}
        known.update(map(id, (*codes, *typed, *(item for item, _ in cells))))
        others = [(item, item.read()) for item in items if id(item) not in known]
        slots = [(item, then) for item, then in others if isinstance(item, Slot) and item.get is not None]
        slots = [(item, then) for item, then in slots if then is not ABSENT]
        self._slots, self._slotted = [item.get for item, _ in slots], [item.value for item, _ in slots]
        self._in_slots, fast = [then for _, then in slots], {id(item) for item, _ in slots}
        self._slow = [(item, then) for item, then in others if id(item) not in fast]
        self._all = [*((item, item.read()) for item in (*typed, *codes)), *cells, *others]

    @property
    def places(self) -> tuple[str, ...]:
        """The places, in words."""
        items = chain((item for item, _ in self._all), *(group.items for group in self.spaces.groups))
        return tuple(dict.fromkeys(str(item.place) for item in items))

    @property
    def modules(self) -> list[tuple[ModulePlace, Any]]:
        """The modules of the tree, with their expected values."""
        return [(group.items[0], group.values[0]) for group in self.spaces.tree]

    def unchanged(self, versions: list[int] | None, is_rebound: bool) -> bool:
        """The quick path after a counted write: whether every place with counted writes holds the very same object.

        Args:
            versions: counts, read before, of the own dictionaries of the tree's modules, then of ``spaces.dicts``; -1
                replaces counts that do not tell all writes.
            is_rebound: whether the count of :func:`bridge.guards.functions.rebound_count` is another one.
        """
        return (not is_rebound or self._bindings.unchanged()) and self.spaces.unchanged(versions, is_rebound)

    @property
    def uncounted(self) -> Callable[[], bool] | None:
        """The quick path at each call: whether the places whose writes nothing counts hold the very same objects, or
        contents that mean the same; ``None``: there are none."""
        parts = (self._bindings.having, self._cells, self._slots, self._slow, self.spaces.uncounted, self._hooks)
        return self._uncounted_unchanged if any(parts) else None

    def _uncounted_unchanged(self) -> bool:
        having, held = self._bindings.having, self._bindings.held
        try:
            if not all(map(is_, map(object.__getattribute__, map(_CALL, having), repeat("__dict__")), held)):
                return False
            if not all(map(is_, map(_HELD, self._cells), self._in_cells)):
                return False
            if not all(map(is_, map(MemberDescriptorType.__get__, self._slots, self._slotted), self._in_slots)):
                return False
        except (ValueError, AttributeError):  # an empty cell, an empty slot, an object that is gone
            return None in map(_CALL, having) and self._bindings.unchanged() and self._uncounted_unchanged()
        for item, then in self._slow:
            if item.differs(then):
                return False
        for group in self.spaces.uncounted:
            if not group.unchanged():
                return False
        if self._hooks:
            now = _entries(self.spaces.hooked)
            return len(now) == len(self._hooks) and all(map(is_, now, self._hooks))
        return True

    @property
    def later(self) -> Callable[[], None] | None:
        """The check before a backward: whether eager's backward would read the same; ``None``: it reads nothing.

        Raises :class:`UnsupportedModule`: forward has run, so a fallback to eager's operators is no longer possible.
        """
        return self._check_later if self._later else None

    def _check_later(self) -> None:
        for item, then in self._later:
            now = item.read()
            if now is not then and not item.same(now, then):
                reason = "eager's backward reads it (of a Function or a checkpoint), and it changed after forward"
                hint = "change it before forward, or after backward"
                raise UnsupportedModule("", [Unsupported(str(item.place), "backward", reason, hint)])

    def match(self, versions: list[int] | None = None, is_rebound: bool = True) -> None:
        """Raises :class:`GuardFailure`, naming the first place that changed; arguments as in :meth:`unchanged`."""
        if self.unchanged(versions, is_rebound) and self._uncounted_unchanged():
            return
        for failure in self.failures():
            raise failure

    def failures(self) -> Iterator[GuardFailure]:
        """The places that changed."""
        found, groups = False, self.spaces.groups
        pairs = (pair for group in groups for pair in zip(group.items, group.values, strict=True))
        for item, then in sorted(chain(self._all, pairs), key=lambda pair: not isinstance(pair[0], ModulePlace)):
            if item.differs(then):
                found = True
                yield from item.failures(then)
        for kind, bases in () if found else self._bindings.bases:
            if kind.__mro__ != bases:
                yield GuardFailure(MODULE, f"bases of class {kind.__name__} changed")


def _entries(dicts: Iterable[dict]) -> list[Any]:
    """The keys and values of dictionaries, in one list."""
    return [*chain.from_iterable(chain.from_iterable(map(_ITEMS, dicts)))]


def _without(item: Any, but: Collection[tuple[Any, Any]]) -> Any:
    """A place without the keys that forward sets before it reads them; ``None`` where nothing is left."""
    if isinstance(item, Contents):
        keys = [key for holder, key in but if holder is item.value]
        return item if not keys else item.without(keys) if type(item.value) is dict else None
    held = getattr(item, "space", getattr(item, "cell", getattr(item, "value", None)))
    return None if any(held is holder and getattr(item, "name", None) == key for holder, key in but) else item


def _dicts_of(group: _Names | _Held | _Module) -> list[dict] | None:
    """The dictionaries whose writes can change a group's values; ``None`` where their writes are not counted."""
    if isinstance(group, _Module):
        return group.dicts
    item = group.items[0]
    if isinstance(item, Contents):
        found = [dict_behind(item.value)]
    elif isinstance(item, Name):
        found = [dict_behind(item.space) if type(item.space) is dict else None]
    else:
        kind = item.args[0] if isinstance(item, Answer) else item.kind
        found = [dict_behind(vars(base)) for base in kind.__mro__ if is_changeable(base)]
    return None if None in found else found


def _walked(module: nn.Module, names: Collection[str], place: Place) -> Iterator[Watched]:
    """The places that were read inside of a module outside of the tree, where forward walks through it."""
    for inner in module.modules() if walks(names) else ():
        held = [inner.__dict__[each] for each in ("_parameters", "_buffers", "_modules")]
        yield from (Contents(each, place) for each in held)
        for tensor in (*inner.parameters(recurse=False), *inner.buffers(recurse=False)):
            yield Answer(properties_of, (tensor,), {}, Place("", f"a property of a tensor in {place}"))
