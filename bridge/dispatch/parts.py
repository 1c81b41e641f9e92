"""Parts: a module that cannot be captured whole, and a sample → dispatchers on the largest modules inside that can be.

From the outside in: a module that a refused one calls is tried with what it is called with; where it is refused too,
what it calls is. A module that several call is dispatched once. Code between parts runs as Python runs it.

Statistics of a model that is dispatched in parts: those of its parts, summed, and what stays eager.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bridge.base.devices import working_for
from bridge.base.errors import BY_DRAWS, GuardFailure, Unsupported, UnsupportedModule, is_refused_by_eager
from bridge.base.log import channel
from bridge.base.threads import raise_deferred
from bridge.base.torch_internals import pytree
from bridge.capture import device_of_call
from bridge.compile import RecordedGraphs
from bridge.dispatch.dispatcher import Dispatcher, DispatchOptions
from bridge.dispatch.entries import DispatchStats
from bridge.dispatch.entry import Entry
from bridge.dispatch.options import dispatcher_of, install, options_of, uninstall
from bridge.dispatch.sample_run import InnerCall, inner_calls, shares_of
from bridge.state import SampleCall, own_attributes

__all__ = ["DispatchedParts", "Eager", "PartStats", "add_parts", "parts_of", "remove_parts"]

log = channel("dispatch")

_DRAWN = "%s: draws decide what runs, at %s. That stays eager, and %d modules inside are dispatched by themselves%s"
_ONE_DECISION = " (whole=True: it is compiled for the decisions of one call)"
_PLAIN = (int, float, str, bool, type(None))
_ALONE = Unsupported("one operator without parameters", "forward", "eager runs it as well", "nothing is to be done")


@dataclass(frozen=True)
class Eager:
    """A module whose own code stays eager.

    Attributes:
        path: inside the model; empty for the model itself.
        module_name: its class.
        problems: why.
    """

    path: str
    module_name: str
    problems: tuple[Unsupported, ...]

    def __str__(self) -> str:
        reasons = dict.fromkeys(f"{each.op}: {each.reason}, at {each.where}" for each in self.problems)
        return f"{self.path or 'the model'} ({self.module_name}): {'; '.join(reasons)}"


@dataclass
class DispatchedParts:
    """What is dispatched inside one model, and what is not.

    Attributes:
        shares: by the path of a dispatched module, the share of an eager forward's time that is spent inside of it.
        eager: modules whose own code stays eager, outermost first.
        dispatchers: by path, those that were put there for this.
    """

    shares: dict[str, float] = field(default_factory=dict)
    eager: tuple[Eager, ...] = ()
    dispatchers: dict[str, weakref.ref[Dispatcher]] = field(default_factory=dict)

    @property
    def paths(self) -> set[str]:
        """Of all modules that are dispatched, for this or by the user."""
        return {*self.shares, *self.dispatchers}

    @property
    def coverage(self) -> float:
        """The share of an eager forward's time that is spent inside of dispatched modules."""
        return min(1.0, sum(self.shares.values()))


_PARTS: weakref.WeakKeyDictionary[nn.Module, DispatchedParts] = weakref.WeakKeyDictionary()
"""A registry: of each model that was dispatched in parts."""


def parts_of(module: nn.Module) -> DispatchedParts | None:
    """The parts of a model that was dispatched so, or ``None``."""
    return _PARTS.get(module)


def remove_parts(module: nn.Module) -> None:
    """Takes off the dispatchers that :func:`add_parts` has put on."""
    parts = _PARTS.pop(module, None)
    for path, known in parts.dispatchers.items() if parts is not None else ():
        child = _inside(module, path)
        if child is not None and dispatcher_of(child) is known():
            remove_parts(child)
            uninstall(child)


def _inside(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:  # taken out since
        return None


def add_parts(call: SampleCall, refused: UnsupportedModule, options: DispatchOptions) -> None:
    """Dispatches the largest modules inside of one that was refused.

    Raises:
        UnsupportedModule: ``refused``, where none can be dispatched.
        CompilationError: a bug of this package; nothing is dispatched then.
    """
    module = call.module
    with ExitStack() as undone:  # on any error, existing dispatchers are as they were
        chosen = _Chosen(module, inner_calls(call, refused.is_of_draws), refused, options, undone)
        chosen.descend("")
        if not chosen.found:
            raise refused
        paths = list(chosen.found)
        shares = shares_of(call, paths)
        raise_deferred()  # before modules are changed, not after it
        undone.pop_all()
    parts = _PARTS.setdefault(module, DispatchedParts())
    for path, dispatcher in chosen.found.items():
        child = module.get_submodule(path)
        if dispatcher_of(child) is None:
            install(child, dispatcher)
            parts.dispatchers[path] = weakref.ref(dispatcher)
    parts.shares, parts.eager = shares, tuple(chosen.eager())
    log.info("%s: %d parts, %.0f%% of an eager forward", type(module).__name__, len(paths), 100 * parts.coverage)
    if refused.is_of_draws:
        first = next(each for each in refused.ops if each.reason.startswith(BY_DRAWS))
        more = _ONE_DECISION if first.reason.startswith(BY_DRAWS[0]) else ""
        log.warning(_DRAWN, call.name, first.where, len(paths), more)


class _Chosen:
    """The search: from the outside in, which modules can be dispatched.

    Attributes:
        found: by path, the dispatchers with their entries; those that lie on their modules already among them.
    """

    def __init__(
        self,
        root: nn.Module,
        calls: Iterable[InnerCall],
        refused: UnsupportedModule,
        options: DispatchOptions,
        undone: ExitStack,
    ):
        self.found: dict[str, Dispatcher] = {}
        self._root, self._options, self._undone = root, options, undone
        self._refused: dict[str, tuple[Unsupported, ...]] = {"": refused.ops}
        self._alike: dict[Any, tuple[Unsupported, ...]] = {}
        self._calls: dict[str, dict[str, list[InnerCall]]] = defaultdict(lambda: defaultdict(list))
        for call in calls:
            self._calls[call.parent][call.path].append(call)

    def descend(self, parent: str) -> None:
        """Tries what a refused module calls."""
        for path, calls in self._calls[parent].items():
            if path in self.found or path in self._refused:
                continue
            problems = self._problems(path, calls)
            if problems:
                self._refused[path] = problems
                self.descend(path)

    def eager(self) -> list[Eager]:
        """The modules that are refused, with what is not told of one inside."""
        found = []
        for path, problems in self._refused.items():
            inner = [
                (each.op, each.where)
                for other, others in self._refused.items()
                if other != path and (not path or other.startswith(path + "."))
                for each in others
            ]
            own = tuple(each for each in problems if (each.op, each.where) not in inner)
            if own:
                found.append(Eager(path, type(self._root.get_submodule(path)).__name__, own))
        return found

    def _problems(self, path: str, calls: list[InnerCall]) -> tuple[Unsupported, ...]:
        """Why a module cannot be dispatched; nothing if it is."""
        module, problems = self._root.get_submodule(path), ()
        own = dispatcher_of(module)
        dispatcher = own or Dispatcher(module, self._options)
        if own is not None:
            if path not in _known(self._root):
                self.found[path] = dispatcher  # the user's own
                return ()
            self._undone.callback(dispatcher.take, dispatcher.options)
        for call in calls:
            key = _key(module, call)
            problems = self._alike.get(key) or self._added(dispatcher, module, call)
            if problems:
                self._alike[key] = problems
                break
            self.found[path] = dispatcher
        return () if path in self.found else problems

    def _added(self, dispatcher: Dispatcher, module: nn.Module, call: InnerCall) -> tuple[Unsupported, ...]:
        before, entry = list(dispatcher.entries.all), None
        sample = SampleCall(module, call.args, call.kwargs)
        try:
            with ExitStack() as stack:
                stack.enter_context(working_for(device_of_call(sample)))
                stack.enter_context(call.modes())
                stack.enter_context(options_of(dispatcher, self._options))
                if self._options.freeze:
                    stack.enter_context(torch.no_grad())
                entry = dispatcher.add(sample)
                with entry.guard.trial():
                    entry.guard.match(sample)
            if _is_alone(entry, module):
                dispatcher.entries.drop(entry)
                return (_ALONE,)
        except UnsupportedModule as error:
            return error.ops
        except GuardFailure as error:
            dispatcher.entries.drop(entry)
            return (Unsupported("its call", call.path, f"would never be dispatched: {error.reason}"),)
        except Exception as error:
            if not is_refused_by_eager(error):
                raise
            first = (str(error).splitlines() or [""])[0]
            return (Unsupported(type(error).__name__, call.path, f"eager's own, called by itself: {first}"),)
        if entry not in before:
            self._undone.callback(dispatcher.entries.drop, entry)
        return ()


def _known(root: nn.Module) -> Mapping[str, Any]:
    parts = _PARTS.get(root)
    return {} if parts is None else parts.dispatchers


def _is_alone(entry: Entry, module: nn.Module) -> bool:
    """Whether there is nothing to fuse: one operator, and no parameters."""
    captured = entry.lowered.captured
    calls = [node for node in captured.graph.nodes if node.op == "call_function"]
    operators = [node for node in calls if node.target is not operator.getitem]
    return len(operators) <= 1 and not captured.module_tensors and not list(module.children())


def _key(module: nn.Module, call: InnerCall) -> Any:
    """What two calls have in common that are refused alike."""
    modules = tuple(
        (path, type(child), child.training, tuple((name, _plain(value)) for name, value in own_attributes(child)))
        for path, child in module.named_modules()
    )
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    return modules, tuple(map(_layout, leaves)), str(spec), call.grad, call.autocast


def _plain(value: Any) -> Any:
    return (type(value), value) if type(value) in _PLAIN else id(value)


def _layout(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad
    return _plain(leaf)


class PartStats(DispatchStats):
    """What became of the calls of the modules inside of one that are dispatched; sums are those of now.

    Args:
        module: the model.
        parts: what is dispatched in it.
    """

    def __init__(self, module: nn.Module, parts: DispatchedParts):
        self._module, self._parts = module, parts

    @property
    def parts(self) -> dict[str, DispatchStats]:
        """The statistics of each dispatched module, by its path; the model's own, if it is one, by ``""``."""
        found = {}
        for path, child in self._module.named_modules():
            dispatcher = dispatcher_of(child)
            if dispatcher is not None and (not path or path in self._parts.paths):
                found[path] = dispatcher.stats
        return found

    @property
    def shares(self) -> dict[str, float]:
        """By its path, the share of an eager forward's time, of the sample, that is spent inside of each part."""
        return dict(self._parts.shares)

    @property
    def coverage(self) -> float:
        """The share of an eager forward's time that is spent inside of parts: 0 to 1."""
        return self._parts.coverage

    @property
    def eager(self) -> tuple[Eager, ...]:
        """The modules whose own code stays eager, and why."""
        return self._parts.eager

    @property
    def hits(self) -> int:
        """Calls of parts that ran in TVM."""
        return sum(each.hits for each in self.parts.values())

    @property
    def misses(self) -> Counter[str]:
        """Calls of parts that ran eager, by path and reason."""
        found: Counter[str] = Counter()
        for path, each in self.parts.items():
            found.update({f"{path}: {reason}": count for reason, count in each.misses.items()})
        return found

    @property
    def eager_backwards(self) -> Counter[str]:
        """As of :class:`DispatchStats`, of all parts."""
        return sum((each.eager_backwards for each in self.parts.values()), Counter())

    @property
    def entries(self) -> list[Entry]:
        """The compiled calls of all parts."""
        return [entry for each in self.parts.values() for entry in each.entries]

    @property
    def graphs(self) -> RecordedGraphs:
        """Of the first part; each has its own (:attr:`parts`)."""
        return next((each.graphs for each in self.parts.values()), RecordedGraphs(False))

    def __repr__(self) -> str:
        parts = self.parts
        head = f"DispatchStats(hits={self.hits}, misses={sum(self.misses.values())}) in {len(parts)} parts"
        lines = [f"{head}, in which an eager forward spends {100 * self.coverage:.0f}% of its time"]
        for path, each in parts.items():
            share = self._parts.shares.get(path, 0.0)
            first, *rest = repr(each).splitlines()
            lines.append(f"  {path or 'the model'} ({100 * share:.0f}%): {first}")
            lines += [f"  {line}" for line in rest]
        return "\n".join([*lines, *(f"  eager: {each}" for each in self.eager)])
