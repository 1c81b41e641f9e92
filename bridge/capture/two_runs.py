"""Two runs: a call is made once on real numbers and once on fake tensors → its record, if both did the same.

The first run is eager, in eager's branches, on a twin of the module. The second one begins in the state that the first
left, and sees no numbers but those that the first one read: equal rows mean that nothing else decided about them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from bridge.base.errors import CALL_BEFORE, CacheNotFilled, Unsupported, UnsupportedModule, line_of
from bridge.base.modes import modes_put_back
from bridge.base.pytrees import objects_of, packed
from bridge.base.torch_fakes import clear_fake_memo, fake_mode
from bridge.base.torch_internals import FakeTensorMode, python_kernels, pytree, storage_id
from bridge.base.torch_internals import saved_tensors_hooks as hooks_of_saved
from bridge.base.torch_shapes import fake_results_not_kept, size_environment
from bridge.capture.autograd_uses import SavedMemory, SavedTensorsNeededError
from bridge.capture.counted_dims import CountedDims, integers_as_symbols
from bridge.capture.draw_recorder import DrawRecorder
from bridge.capture.functions import Functions
from bridge.capture.generator_watch import CachedFunctions, generator_watch
from bridge.capture.inplace_rules import SWITCHED, InPlaceRules, overlaps
from bridge.capture.kept_state import KeptState
from bridge.capture.loops.rolled import Rolled
from bridge.capture.observation import Observation
from bridge.capture.outputs import (
    describe_outputs,
    geometry_of,
    judge_replaced,
    unknown_results,
    values_of,
    version_of,
    whole_tensors,
    with_wholes,
)
from bridge.capture.own_functions import OwnFunctions
from bridge.capture.prepared_twin import PreparedTwin, Protected, copier, own_leaves, with_attributes
from bridge.capture.quiet import quiet
from bridge.capture.recorder import OperatorRecorder
from bridge.capture.rows import Record, ValueRef, values_in
from bridge.capture.sample import ALL_COUNTS, DynamicDim
from bridge.capture.symbolic_run import Symbols, symbolic_leaf
from bridge.capture.twin import Twin
from bridge.guards import Place, Reads, recorded_reads, told_otherwise
from bridge.state import ModuleTensor, hooks_of, module_tensors, own_attributes

__all__ = ["FakeRecord", "RealRun", "fake_run_of", "real_run_of"]


@dataclass
class RealRun:
    """A run on real numbers.

    Attributes:
        record: its rows.
        twin: the module that ran, in the state that the run left.
        tensors: the tensors that the compiled code takes beside the arguments: parameters and buffers, then plain
            attributes and free tensors that are read.
        order: the values of these, and of the arguments behind them.
        real_tensors: the module's parameters and buffers; in the run, buffers are copies.
        attributes: paths of the tensors among the attributes of modules, which are the inputs behind all others.
        inputs: the run's: the module's tensors, the arguments, the attributes.
        results: the leaves of its result, values for tensors.
        observation: what eager does.
        loops: its record with loops rolled up, if it has some.
        kept: places that it sets, whose values are results behind its own; ``left``: their structure and constants.
        wholes: values that are results only for others to be views of them, the last of the results.
        integers: the global names of code that made an integer of a tensor or asked for its length.
    """

    record: Record
    twin: nn.Module
    tensors: Sequence[ModuleTensor]
    order: Sequence[int]
    real_tensors: Sequence[torch.Tensor]
    attributes: Sequence[str]
    inputs: Sequence[torch.Tensor]
    results: Sequence[Any]
    observation: Observation
    functions: OwnFunctions
    argument_leaves: Sequence[Any]
    in_spec: Any
    final: dict[int, ValueRef] = field(default_factory=dict)
    prepared: Any = None
    before: Any = None
    number_of: Callable[[torch.Tensor], int | None] = lambda tensor: None
    buffers: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    loops: Rolled | None = None
    kept: KeptState | None = None
    left: Any = None
    wholes: tuple[int, ...] = ()
    integers: Sequence[dict[str, Any]] = ()

    def changed(self) -> list[str]:
        """What it changed of the module's Python state, and outside of the module: ``"self.log"``, ``"global 'N'"``."""
        attributes = [f"self.{name}" for name in self.before.changes()]
        return list(dict.fromkeys((*attributes, *self.observation.reads.changes())))

    @property
    def made(self) -> list[Any]:
        """All that the run gives: results, buffers that are set to another tensor, and numbers that are read."""
        return [*self.results, *self.final.values(), *(each.numbers for each in self.record.reads)]

    def reset(self) -> None:
        """Buffers of the twin hold the numbers that they had before the run."""
        with torch.no_grad():
            for copy, original in self.buffers:
                copy.detach().copy_(original)


@contextmanager
def _nothing_saved(note: Callable[[torch.Tensor], None]) -> Iterator[list[bool]]:
    """While active, autograd saves no tensors; the list is empty as long as none is asked for."""
    asked: list[bool] = []

    def unpack(saved: None) -> torch.Tensor:
        asked.append(True)
        raise SavedTensorsNeededError

    with saved_tensors_hooks(note, unpack):
        yield asked


@contextmanager
def _saved_here() -> Iterator[None]:
    """While active, what autograd saves is no concern of a checkpoint around the call, which counts that."""
    with nullcontext() if hooks_of_saved() is None else saved_tensors_hooks(_itself, _itself):
        yield


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def paths_of(module: nn.Module) -> dict[int, str]:
    return {id(each): path for path, each in module.named_modules()}


def attributes_of(module: nn.Module, known: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that are plain attributes of modules, by path; each once."""
    seen = set(map(id, known))
    found: dict[str, torch.Tensor] = {}
    for path, each in module.named_modules():
        for name, value in own_attributes(each):
            if isinstance(value, torch.Tensor) and id(value) not in seen:
                seen.add(id(value))
                found[f"{path}.{name}" if path else name] = value
    return found


def real_run_of(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    saves: bool = False,
    kept: KeptState | None = None,
    origin: Mapping[int, Any] = MappingProxyType({}),
    writing: Mapping[type, Any] = MappingProxyType({}),
) -> RealRun:
    """Runs ``module(*args, **kwargs)`` on real numbers; neither its tensors nor the generators change.

    Args:
        saves: whether autograd saves tensors, as it has to where forward runs a backward. Else its graphs have their
            nodes alone, and the run takes no more memory than one without grad mode.

        kept: places that the call sets (:mod:`bridge.capture.kept_state`), as the module has them.
        origin: where the module is the twin of an earlier run: of its copies, by id, what they are copies of.
        writing: of Functions that write what autograd follows, see :class:`bridge.capture.own_functions.OwnFunctions`.

    Raises:
        SavedTensorsNeededError: without them forward may have gone another way.
    """
    tensors, real_tensors = module_tensors(module)
    buffers = {id(each) for spec, each in zip(tensors, real_tensors, strict=True) if spec.kind == "buffer"}
    copied = copier()
    copies = {id(each): copied(each) for each in real_tensors if id(each) in buffers}
    computed: dict[int, torch.Tensor] = {}
    left: Any = None

    def own(tensor: torch.Tensor) -> torch.Tensor:
        """What the twin has: a tensor that was computed with a gradient is an input, a leaf over the same memory."""
        if id(tensor) not in copies and not tensor.is_leaf:
            leaf = copies[id(tensor)] = tensor.detach().requires_grad_()
            computed[id(leaf)] = tensor
        return copies.get(id(tensor), tensor)

    prepared = PreparedTwin(module, own, watched=True)
    twin = prepared.module
    owned = list(map(own, real_tensors))
    own_args, own_kwargs = own_leaves(args, kwargs, real_tensors)
    leaves, in_spec = pytree.tree_flatten((own_args, own_kwargs))
    arguments = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    attributes = attributes_of(twin, [*owned, *arguments])
    inputs = [*owned, *arguments, *attributes.values()]
    parameters = [each for spec, each in zip(tensors, owned, strict=True) if spec.kind == "parameter"]
    named = dict(twin.named_buffers(remove_duplicate=False))
    registries = [(each._buffers, dict(each._buffers)) for each in twin.modules()]

    rules = InPlaceRules(leaves, [each for each in parameters if each.requires_grad], inputs)
    observation = Observation(unsupported=rules.unsupported)
    functions = OwnFunctions(type(module).__name__, writing)
    now: list[tuple] = []
    geometry, versions = [geometry_of(each) for each in inputs], [version_of(each) for each in inputs]
    given = zip(_tensors((args, kwargs)), arguments, strict=True)
    inner = [leaf for each, leaf in given if each.requires_grad and not each.is_leaf]
    inner += map(own, computed.values())
    saved_of = SavedMemory(saves)
    protected = Protected({storage_id(each) for each in parameters}, [*arguments, *attributes.values()], inner)
    recorder = OperatorRecorder(inputs, paths_of(twin), observation.draws, protected)
    draws = DrawRecorder(observation.draws, rules.complain, inputs, True, recorder.note_cast)
    draws.underived = rules.underived
    followed = [each for each in inputs if each.is_leaf and each.requires_grad]
    with ExitStack() as stack:
        stack.callback(protected.restore)
        stack.callback(prepared.finish)
        stack.callback(lambda: now.extend(map(geometry_of, inputs)) or [each.requires_grad_() for each in followed])
        changed_modes = stack.enter_context(modes_put_back())
        stack.enter_context(draws)
        stack.enter_context(functions.traced())
        originals = {id(made): each for each in real_tensors if (made := copies.get(id(each))) is not None}
        originals |= {made: origin.get(id(each), each) for made, each in prepared.twin.originals.items()}
        cached = CachedFunctions()
        observation.reads = recorded_reads(Reads(originals, twin.named_modules(), cached.instead))
        for path, each in module.named_modules():
            for _, hook in hooks_of(each):
                place = Place("", f"a hook on {f'submodule {path!r}' if path else 'the module'}")
                observation.reads.know(prepared.twin.in_place_of(hook), place)
        for place, each in enumerate(inputs):
            observation.reads.know(each)
            observation.reads.inputs.setdefault(id(each), place)
        stack.enter_context(generator_watch(rules, observation.reads))
        saved = stack.enter_context(_saved_here() if saves else _nothing_saved(saved_of.note))
        functions_called = Functions(recorder, rules)
        own = functions_called.scripts(), functions_called.parameters(), functions_called, python_kernels(), recorder
        for each in own:
            stack.enter_context(each)
        result = prepared(*own_args, **own_kwargs)
        functions_called.finish(result)
    if kept is not None:
        kept = kept.of(prepared.twin)
        left = kept.values()
        result, left = (result, left), kept.constants(left)
    cached.check()
    if saved:
        raise SavedTensorsNeededError
    applied = functions.applied
    rules.shared_by_functions |= applied.shared
    moved = zip(inputs, versions, strict=True)
    observation.counted = frozenset(index for index, (tensor, then) in enumerate(moved) if version_of(tensor) != then)
    at_first = [  # statistics that the first batch gives a size; a buffer whose gradient forward asks for
        Unsupported(f"{spec.kind} '{spec.name}'", "forward", f"forward {what}", CALL_BEFORE)
        for spec, then, each in zip(tensors, geometry, now, strict=False)
        if (what := _SHAPED if then[0] != each[0] else _FOLLOWED if then[:-1] == each[:-1] and then != each else "")
    ]
    if at_first and all(each.reason == SWITCHED for each in rules.unsupported):
        raise CacheNotFilled(type(module).__name__, at_first)
    if geometry != now and not rules.unsupported:
        reason = "gives a tensor of the module's or the caller's another shape, memory or requires_grad"
        rules.complain("detach_, requires_grad_, set_ or a view in place", reason, "work on a view or a clone of it")
    for changed in changed_modes:
        reason = "forward leaves it changed for what comes after the call"
        rules.unsupported.append(Unsupported(changed, "forward", reason, "set it around the call"))
    observation.checkpointed = rules.checkpointed.of(inputs)
    observation.saved, observation.saved_views = saved_of.inputs(inputs)
    observation.differentiates, observation.reads_validation = draws.differentiates, observation.reads.validates
    leaves_now, spec_now = pytree.tree_flatten((own_args, own_kwargs))
    if spec_now != in_spec or any(now is not then for now, then in zip(leaves_now, leaves, strict=True)):
        reason = "changes a list, a dict or an object that was passed to the module"
        rules.unsupported.append(Unsupported("an argument", "forward", reason, "work on a copy of it"))
    final = _finals(twin, named, registries, inputs, recorder, observation, rules, not origin)
    final |= {n: ValueRef(n) for n, each in enumerate(owned) if storage_id(each) in rules.written_parameters}
    result = packed(result)
    observation.objects = objects_of(result)
    result_leaves, observation.out_spec = pytree.tree_flatten(result)
    known = set(map(id, inputs))
    for leaf in result_leaves:
        if type(leaf) is torch.Tensor and leaf.__dict__ and id(leaf) not in known:
            reason = "sets attributes of a tensor that the module returns; a compiled call makes another tensor"
            rules.complain(f"result.{next(iter(leaf.__dict__))}", reason, "return them")
    if unknown := unknown_results(result_leaves):
        raise UnsupportedModule("", [*observation.unsupported, *unknown])
    wholes = whole_tensors(result_leaves, recorder, inputs, rules)
    result_leaves, observation.out_spec = pytree.tree_flatten(with_wholes(result, wholes.values()))
    results = values_of(result_leaves, recorder, wholes)
    read = {number for row in recorder.record.rows for number in values_in((row.args, row.kwargs))}
    read.update(values_in([*results, *final.values()]))
    behind = len(owned) + len(arguments)
    used = [place for place in range(behind, len(inputs)) if place in read]
    free = list(recorder.record.free)
    order = [*range(len(owned)), *used, *free, *range(len(owned), behind)]
    paths = list(attributes)
    tensors += [_spec("attribute", paths[place - behind], inputs[place]) for place in used]
    for number in free:
        tensor, row = recorder.record.free[number]
        held = weakref.ref(computed.get(id(tensor), tensor))
        tensors.append(_spec("free", _reader(recorder.record, row), tensor, held))
    described = [*owned, *(inputs[n] for n in used), *(recorder.record.free[n][0] for n in free), *arguments]
    given = zip(range(len(owned), behind), _tensors((args, kwargs)), arguments, strict=True)
    rules.unsupported += told_otherwise(observation.reads, list(given), real_tensors, str(type(module).__name__))
    asked = [place for place, each in enumerate(inputs) if id(each) in rules.without_grad]
    observation.reads.tensors.update(((place, "grad"), None) for place in asked)
    _in_order(observation, {place: index for index, place in enumerate(order)})
    describe_outputs(result_leaves, described, observation, rules, applied, saved_of.results(result_leaves))
    returned = [pair for pair in zip(result_leaves, observation.outputs, strict=True) if pair[1].is_tensor]
    observation.unsupported += functions_called.shared_views(returned)
    observation.unsupported += overlaps([leaf for leaf, output in returned if not output.alias_of])
    given = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    made = recorder.record, twin, tensors, order, real_tensors, list(attributes), inputs, results
    pairs = [(copies[id(each)], each) for each in real_tensors if id(each) in buffers]
    integers = [*functions_called.integers.values()]
    state = final, prepared, prepared.before, recorder.number_of, pairs
    places = {"kept": kept, "left": left, "wholes": tuple(wholes), "integers": integers}
    return RealRun(*made, observation, functions, given, in_spec, *state, **places)


def _spec(kind: str, name: str, tensor: torch.Tensor, held: Any = None) -> ModuleTensor:
    layout = tuple(tensor.shape), tensor.stride(), tensor.dtype
    return ModuleTensor(kind, (name,), *layout, tensor.requires_grad, held)


def _reader(record: Record, row: int) -> str:
    """What a free tensor is called: the line that reads it first."""
    where = record.rows[row].where if row < len(record.rows) else None
    return "forward" if where is None else line_of(where)


def _in_order(observation: Observation, index_of: dict[int, int]) -> None:
    """Inputs that an observation speaks of, by their places in the run → by those in the compiled code's order."""
    reads = observation.reads
    reads.tensors = {(index_of[place], name): None for place, name in reads.tensors if place in index_of}
    for name in ("counted", "saved", "saved_views"):
        places = getattr(observation, name)
        setattr(observation, name, frozenset(index_of[each] for each in places if each in index_of))
    observation.checkpointed = {
        index_of[each]: line for each, line in observation.checkpointed.items() if each in index_of
    }
    for place, draw in enumerate(observation.draws):
        if draw.operand is not None and draw.operand.of is not None:
            operand = replace(draw.operand, of=index_of.get(draw.operand.of))
            observation.draws[place] = replace(draw, operand=operand)


_SHAPED, _FOLLOWED = "gives it another shape", "sets requires_grad of it"


def _finals(twin, named, registries, inputs, recorder, observation, rules, is_first) -> dict[int, ValueRef]:
    """Buffers that forward sets to another tensor: what becomes of each; the old one is put back, with its numbers.

    One that was none before, or that the first run gives another form, stays as it is for the next run.
    """
    now = dict(twin.named_buffers(remove_duplicate=False))
    found: dict[int, ValueRef] = {}
    for name, before in named.items():
        after = now.get(name)
        if after is before or _is_filled(before, after, is_first):
            continue
        observation.replaced.append(name)
        judge_replaced(name, before, after, inputs, rules)
        if any(each is before and now.get(other) is not after for other, each in named.items()):
            reason = "is set to another tensor, where the old one has a second name"
            rules.complain(f"buffer '{name}'", reason, "write into it (copy_)")
        index = next((index for index, each in enumerate(inputs) if each is before), None)
        if isinstance(after, torch.Tensor) and index is not None:
            found[index] = recorder.value_of(after)
            if before.shape == after.shape:
                before.data.copy_(after.detach().clone())
    for registry, before in registries:
        for name, each in before.items():
            if not _is_filled(each, registry.get(name), is_first):
                registry[name] = each
    return found


def _is_filled(before: torch.Tensor | None, after: Any, is_first: bool) -> bool:
    """Whether it is a first call that sets a buffer: it was none, or has another form from then on."""
    if before is None or not (is_first and isinstance(after, torch.Tensor)):
        return before is None
    return (before.dtype, before.shape) != (after.dtype, after.shape)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@dataclass
class FakeRecord:
    """A run on fake tensors: its record, the mode; the objects in its result, and what the twin has copied."""

    record: Record
    mode: FakeTensorMode
    results: Sequence[Any]
    arguments: Sequence[torch.Tensor]
    twin: nn.Module
    out_spec: Any = None
    leaves: Sequence[Any] = ()
    symbols: Symbols | None = None
    objects: Sequence[Any] = ()
    copies: Twin | None = None


def _fake_mode(real: RealRun, dims: Sequence[DynamicDim]) -> tuple[FakeTensorMode, Symbols | None]:
    """The mode of a run on fake tensors, and where sizes vary, what takes care of their symbols."""
    with fake_results_not_kept() if dims else nullcontext():
        sizes = {"shape_env": size_environment()} if dims else {}
        mode = fake_mode(allow_non_fake_inputs=True, static_shapes=True, **sizes)
    counts = None
    if ALL_COUNTS in dims:
        trains = [place for place, each in zip(real.order, real.tensors, strict=False) if each.requires_grad]
        counts = CountedDims(mode, real.record, trains)
    return mode, Symbols(real.record, mode, counts) if dims else None


def _faking(mode: FakeTensorMode) -> Callable[[torch.Tensor], torch.Tensor]:
    """A tensor → its fake one in a mode, the same for the same tensor."""
    fakes: dict[int, torch.Tensor] = {}
    kept: list[torch.Tensor] = []

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            kept.append(tensor)
            made = mode.from_tensor(tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad))
            fakes[id(tensor)] = with_attributes(made, tensor)
        return fakes[id(tensor)]

    return fake


def fake_run_of(
    real: RealRun,
    args: tuple,
    kwargs: dict[str, Any],
    change: Callable[[nn.Module], Any] = lambda twin: None,
    dims: Sequence[DynamicDim] = (),
) -> FakeRecord:
    """Runs the twin of a real run once more, on fake tensors, in the state that it was left in.

    Args:
        change: called with this run's own twin before it runs.
        dims: dimensions of the arguments that have symbols for sizes.
    """
    mode, symbols = _fake_mode(real, dims)
    fake = _faking(mode)
    try:
        owned = [fake(each) for each in real.inputs[: len(real.real_tensors)]]
        own_args, own_kwargs = own_leaves(args, kwargs, real.real_tensors)
        given, spec = pytree.tree_flatten((own_args, own_kwargs))
        given = [
            with_attributes(symbolic_leaf(mode, each, index, dims), each) if isinstance(each, torch.Tensor) else each
            for index, each in enumerate(given)
        ]
        fake_args, fake_kwargs = pytree.tree_unflatten(given, spec)
        arguments = [each for each in given if isinstance(each, torch.Tensor)]
        prepared = PreparedTwin(real.twin, fake)
        twin = prepared.module
        places = None if real.kept is None else real.kept.of(prepared.twin)
        if places is not None:
            places.empty()
        change(twin)
        attributes = attributes_of(twin, [*owned, *arguments])
        inputs = [*owned, *arguments, *attributes.values()]
        functions = OwnFunctions(type(real.twin).__name__, real.functions.writing)
        draws: list[Any] = [] if symbols is None else symbols.draws
        replays = symbols is None and not real.observation.differentiates
        answers = {"answers": real.record, "symbols": symbols, "mode": mode if replays else None}
        recorder = OperatorRecorder(inputs, paths_of(twin), draws, **answers)
        functions_called = Functions(recorder)
        drawing = nullcontext() if symbols is None else symbols.recording(inputs)
        modes = modes_put_back(), quiet(), _saved_here(), functions.traced(), mode, drawing, python_kernels(), recorder
        for tensor, _ in real.record.free.values():  # the very tensor in both runs
            recorder.expect(tensor, fake(tensor))
        symbolic, asked = symbols is not None, functions_called.integer
        integers = integers_as_symbols(real.integers, asked) if symbolic else nullcontext()
        with ExitStack() as stack:
            watching = functions_called.of_fakes(), functions_called.scripts(), functions_called.parameters()
            for each in (*watching, integers, functions_called, *modes):
                stack.enter_context(each)
            result = prepared(*fake_args, **fake_kwargs)
        if places is not None:
            result = result, places.values()
        if symbols is not None and symbols.counts is not None:
            symbols.counts.end()
        made = packed(result)
        leaves, out_spec = pytree.tree_flatten(with_wholes(made, real.wholes, dims))
        results = values_of(leaves, recorder, real.wholes)
        run = recorder.record, mode, results, arguments, twin, out_spec, given, symbols
        return FakeRecord(*run, objects_of(made), prepared.twin)
    finally:
        clear_fake_memo(mode)
