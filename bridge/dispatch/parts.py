"""Parts: a module that cannot be captured whole + a sample → dispatchers on the largest submodules that can be.

The search goes from the outside in: each module that a refused module calls is tried with its arguments in a run of the
sample; if it is refused as well, its own callees are tried. A shared module is dispatched once. The code between parts
runs eager. :class:`PartStats` sums the statistics of the parts.

Where random draws select the code that runs, the sample shows the calls of a few selections. Parts compile the
calls of others when they come, also modules that no selection of the sample called.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
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
from bridge.state import SampleCall, constant_key, own_attributes

__all__ = ["DispatchedParts", "Eager", "PartStats", "add_parts", "parts_of", "remove_parts"]

log = channel("dispatch")

_DRAWN = "%s: draws decide what runs, at %s. That stays eager, and %d modules inside are dispatched by themselves%s"
_ONE_DECISION = " (whole=True: it is compiled for the decisions of one call)"
_ALONE = Unsupported("one operator without parameters", "forward", "eager runs it as well", "nothing is to be done")


@dataclass(frozen=True)
class Eager:
    """A module whose own code stays eager.

    Attributes:
        path: its path inside the model; empty for the model itself.
        module_name: its class.
        problems: the reasons.
    """

    path: str
    module_name: str
    problems: tuple[Unsupported, ...]

    def __str__(self) -> str:
        reasons = dict.fromkeys(f"{each.op}: {each.reason}, at {each.where}" for each in self.problems)
        return f"{self.path or 'the model'} ({self.module_name}): {'; '.join(reasons)}"


@dataclass
class DispatchedParts:
    """The dispatched and the eager modules of one model.

    Attributes:
        shares: path of a dispatched module → the share of an eager forward's time spent inside it.
        eager: modules whose own code stays eager, outermost first.
        dispatchers: path → dispatcher, for dispatchers that :func:`add_parts` installed.
    """

    shares: dict[str, float] = field(default_factory=dict)
    eager: tuple[Eager, ...] = ()
    dispatchers: dict[str, weakref.ref[Dispatcher]] = field(default_factory=dict)

    def has(self, path: str) -> bool:
        """Whether a path is a part's, or inside a part that was divided at a call."""
        return any(f"{path}.".startswith(f"{each}.") for each in (*self.shares, *self.dispatchers))

    @property
    def coverage(self) -> float:
        """The share of an eager forward's time spent inside dispatched modules."""
        return min(1.0, sum(self.shares.values()))


_PARTS: weakref.WeakKeyDictionary[nn.Module, DispatchedParts] = weakref.WeakKeyDictionary()
"""Registry: a model dispatched in parts → its parts."""


def parts_of(module: nn.Module) -> DispatchedParts | None:
    """The parts of a model that was dispatched in parts, or ``None``."""
    return _PARTS.get(module)


def remove_parts(module: nn.Module) -> None:
    """Removes the dispatchers that :func:`add_parts` installed."""
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


def add_parts(
    call: SampleCall, refused: UnsupportedModule, options: DispatchOptions, compiles_selected: bool = False
) -> None:
    """Dispatches the largest possible submodules of a module that was refused.

    Args:
        compiles_selected: ``on_miss="compile"`` for the parts if random draws select the code that runs.

    Raises:
        UnsupportedModule: ``refused``, if no submodule can be dispatched.
        CompilationError: a bug of this package; nothing is dispatched.
    """
    module = call.module
    if compiles_selected and refused.is_of_draws:
        options = replace(options, on_miss="compile")
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
    later = chosen.uncalled() if refused.is_of_draws and options.on_miss == "compile" else ()
    for path, dispatcher in chain(chosen.found.items(), later):
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
    """Search for the modules that can be dispatched, from the outside in.

    Attributes:
        found: path → dispatcher with its entries, including dispatchers that are already installed.
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
        """Tries the modules that a refused module calls."""
        for path, calls in self._calls[parent].items():
            if path in self.found or path in self._refused:
                continue
            problems = self._problems(path, calls)
            if problems:
                self._refused[path] = problems
                self.descend(path)

    def eager(self) -> list[Eager]:
        """The refused modules, each with the problems that no module inside it has."""
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

    def uncalled(self) -> Iterator[tuple[str, Dispatcher]]:
        """Paths and new dispatchers of modules that refused modules hold and no run of the sample called."""
        called = {self._root.get_submodule(path) for calls in self._calls.values() for path in calls}
        holders = list(self._refused)
        for path in holders:
            for name, child in self._root.get_submodule(path).named_children():
                inner = f"{path}.{name}" if path else name
                if child in called:
                    continue
                if type(child).forward is nn.Module.forward or any(each in called for each in child.modules()):
                    holders.append(inner)  # a list of modules
                elif next(child.parameters(), None) is not None and dispatcher_of(child) is None:
                    yield inner, Dispatcher(child, self._options)

    def _problems(self, path: str, calls: list[InnerCall]) -> tuple[Unsupported, ...]:
        """Adds entries for a module's calls; returns the problems if there is no entry."""
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
        """Adds an entry for a call to a dispatcher; returns the problems if that fails."""
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
    """Whether there is nothing to fuse: at most one operator, no parameters, no submodules."""
    captured = entry.lowered.captured
    calls = [node for node in captured.graph.nodes if node.op == "call_function"]
    operators = [node for node in calls if node.target is not operator.getitem]
    return len(operators) <= 1 and not captured.module_tensors and not list(module.children())


def _key(module: nn.Module, call: InnerCall) -> Any:
    """Key under which calls share a refusal: module tree, plain attributes, metadata of arguments, modes."""
    modules = tuple(
        (path, type(child), child.training, tuple((name, _plain(value)) for name, value in own_attributes(child)))
        for path, child in module.named_modules()
    )
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    return modules, tuple(map(_layout, leaves)), str(spec), call.grad, call.autocast


def _plain(value: Any) -> Any:
    return constant_key(value) or id(value)


def _layout(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad
    return _plain(leaf)


class PartStats(DispatchStats):
    """Statistics of a model dispatched in parts: live sums over the parts.

    Args:
        module: the model.
        parts: its parts.
    """

    def __init__(self, module: nn.Module, parts: DispatchedParts):
        self._module, self._parts = module, parts

    @property
    def parts(self) -> dict[str, DispatchStats]:
        """Path → statistics of each dispatched module; ``""`` is the model itself, if it has compiled calls."""
        found = {}
        for path, child in self._module.named_modules():
            dispatcher = dispatcher_of(child)
            if dispatcher is not None and (not path or self._parts.has(path)):
                if path in self._parts.shares or dispatcher.entries.all or dispatcher.entries.misses:
                    found[path] = dispatcher.stats
        return found

    @property
    def shares(self) -> dict[str, float]:
        """Path → the share of the sample's eager forward time spent inside each part."""
        return dict(self._parts.shares)

    @property
    def coverage(self) -> float:
        """The share of the sample's eager forward time spent inside parts: 0 to 1."""
        return self._parts.coverage

    @property
    def eager(self) -> tuple[Eager, ...]:
        """The modules whose own code stays eager, with reasons, also inside parts that were divided at a call."""
        inner = [(path, parts_of(child)) for path, child in self._module.named_modules() if self._parts.has(path)]
        divided = [(path, each) for path, parts in inner if parts is not None for each in parts.eager]
        return (*self._parts.eager, *(replace(each, path=f"{path}.{each.path}".strip(".")) for path, each in divided))

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
        """Backwards that eager's operators computed, by reason, in all parts."""
        return sum((each.eager_backwards for each in self.parts.values()), Counter())

    @property
    def entries(self) -> list[Entry]:
        """The compiled calls of all parts."""
        return [entry for each in self.parts.values() for entry in each.entries]

    @property
    def graphs(self) -> RecordedGraphs:
        """Statistics of the first part's CUDA graphs; each part has its own (:attr:`parts`)."""
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
