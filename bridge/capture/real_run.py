"""Real run: one call on real numbers, in eager's branches, on a twin of the module → its record and eager metadata."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from bridge.base.errors import CALL_BEFORE, CacheNotFilled, Unsupported, UnsupportedModule, line_of
from bridge.base.modes import modes_put_back
from bridge.base.pytrees import containers_of, is_plain, objects_of, packed, packed_arguments, tensor_leaves, unpacked
from bridge.base.torch_distributed import is_distributed, local_tensor
from bridge.base.torch_internals import python_kernels, pytree, storage_id
from bridge.capture.autograd_uses import AnotherRunError, SavedMemory, leads_out
from bridge.capture.custom_functions import CustomFunctions
from bridge.capture.distributed import distributed_of
from bridge.capture.draws import DrawRecorder, IsolatedRNG
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
    whole_tensors,
    with_wholes,
)
from bridge.capture.prepared_twin import PreparedTwin, Protected, attributes_of, copier, own_leaves, paths_of
from bridge.capture.recorder import OperatorRecorder
from bridge.capture.rows import Record, ValueRef, values_in, written
from bridge.capture.thread_isolation import as_loud_as_eager
from bridge.capture.values import Values
from bridge.guards import ADDRESSES, Place, Reads, recorded_reads, told_otherwise
from bridge.state import ModuleTensor, SampleCall, hooks_of, module_tensors


class Given:
    """Inputs of a run: the module's tensors, the arguments, and tensors that are plain attributes of modules.

    Attributes:
        tensors, real_tensors: the module's parameters and buffers. :meth:`ordered` appends to ``tensors`` the plain
            attributes and free tensors that the run reads.
        buffers: pairs of the run's copy of a buffer and the module's own.
        call: the caller's call, or that of a twin.
        computed: id of a leaf -> the tensor with an autograd graph that it stands for.
        callers: the caller's argument tensors.
        args, kwargs: the run's own arguments; ``leaves``, ``in_spec``, ``arguments``: the same flat, and its tensors.
        owned: the run's tensors in the place of the module's.
        attributes: paths of the tensors that are plain attributes of modules.
        inputs: owned, arguments and attributes, in this order.
        origin: if the module is the twin of an earlier run: id of each of its copies -> the original.
    """

    def __init__(self, call: SampleCall, origin: Mapping[int, Any]):
        self.call, self.origin = call, origin
        self.tensors, self.real_tensors = module_tensors(call.module)
        copied, pairs = copier(), zip(self.tensors, self.real_tensors, strict=True)
        self.buffers = [(copied(each), each) for spec, each in pairs if spec.kind == "buffer"]
        self._copies = {id(each): made for made, each in self.buffers}
        self.computed: dict[int, torch.Tensor] = {}
        self.callers = tensor_leaves((call.args, call.kwargs))
        self.args, self.kwargs = own_leaves(call, self.real_tensors)
        self.leaves, self.in_spec = pytree.tree_flatten((self.args, self.kwargs))
        self.arguments = tensor_leaves(self.leaves)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The run's tensor for a module's: a buffer's copy, a leaf in the memory of a computed tensor, the local tensor
        of a distributed one, or itself."""
        if is_distributed(tensor) and id(tensor) not in self._copies:
            self._copies[id(tensor)] = local_tensor(tensor).detach().requires_grad_(tensor.requires_grad)
        if id(tensor) not in self._copies and not tensor.is_leaf:
            leaf = self._copies[id(tensor)] = tensor.detach().requires_grad_()
            self.computed[id(leaf)] = tensor
        return self._copies.get(id(tensor), tensor)

    def complete(self, twin: nn.Module) -> None:
        """Sets ``owned``, ``attributes`` and ``inputs`` from a twin that was made with :meth:`own`."""
        self.owned = list(map(self.own, self.real_tensors))
        attributes = attributes_of(twin, [*self.owned, *self.arguments])
        self.attributes = list(attributes)
        self.inputs = [*self.owned, *self.arguments, *attributes.values()]

    def originals(self, prepared: PreparedTwin) -> dict[int, Any]:
        """Id of each copy -> its original; computed tensors of the first run stay the originals in all later ones."""
        found = {id(made): each for each in self.real_tensors if (made := self._copies.get(id(each))) is not None}
        copies = [*prepared.twin.originals.items(), *self.computed.items()]
        found |= {made: each for made, each in self.origin.items() if isinstance(each, torch.Tensor) and each.grad_fn}
        return found | {made: self.origin.get(id(each), each) for made, each in copies}

    def protected(self) -> Protected:
        """The memory that the run may write and does not own."""
        inner = [
            leaf
            for each, leaf in zip(self.callers, self.arguments, strict=True)
            if each.requires_grad and not each.is_leaf
        ]
        inner += map(self.own, self.computed.values())
        memory = map(storage_id, (*self.parameters, *self.inputs[len(self.owned) :]))
        return Protected(memory, self.inputs, inner)

    @property
    def constants(self) -> list[Any]:
        """The leaves of the arguments, ``None`` for tensors."""
        return [None if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The run's parameters."""
        return [each for spec, each in zip(self.tensors, self.owned, strict=False) if spec.kind == "parameter"]

    def ordered(self, record: Record, read: Collection[int]) -> list[int]:
        """The values of the compiled code's inputs, in its order: module tensors, attributes that are in ``read``, free
        tensors, arguments. Appends the attributes and free tensors to :attr:`tensors`."""
        behind = len(self.owned) + len(self.arguments)
        used = [place for place in range(behind, len(self.inputs)) if place in read]
        self.tensors += [_spec("attribute", self.attributes[place - behind], self.inputs[place]) for place in used]
        for tensor, row in record.free.values():
            original = self.computed.get(id(tensor), tensor)
            held = weakref.ref(self.origin.get(id(original), original))
            self.tensors.append(_spec("free", _reader(record, row), tensor, held))
        return [*range(len(self.owned)), *used, *record.free, *range(len(self.owned), behind)]


@dataclass
class RealRun:
    """A run on real numbers.

    Attributes:
        record, values: its rows, and the map from tensors to values.
        given: its inputs.
        prepared: the twin that ran, in the state that the run left.
        observation: eager metadata.
        functions: uses of custom autograd Functions.
        integers: globals of code that converted a tensor to an integer or took its length.
        kept: places that it sets, whose values follow its own results; ``left``: their structure and constants.
        order: the values of the compiled code's inputs.
        results: the leaves of its result, values for tensors; the last ones, ``wholes``, are only bases of views.
        final: input of a buffer that is set to another tensor, or of a parameter that is written → its last value.
        loops: its record with the loops rolled up, if it has loops.
    """

    record: Record
    values: Values
    given: Given
    prepared: PreparedTwin
    observation: Observation
    functions: CustomFunctions
    integers: Sequence[dict[str, Any]]
    kept: KeptState | None = None
    left: Any = None
    order: Sequence[int] = ()
    results: Sequence[Any] = ()
    final: dict[int, ValueRef] = field(default_factory=dict)
    wholes: tuple[int, ...] = ()
    loops: Rolled | None = None

    @property
    def twin(self) -> nn.Module:
        return self.prepared.module

    def changed(self) -> list[str]:
        """Names of Python state that it changed, inside and outside of the module: ``"self.log"``, ``"global 'N'"``."""
        attributes = [f"self.{name}" for name in self.prepared.before.changes()]
        return list(dict.fromkeys((*attributes, *self.observation.reads.changes())))

    @property
    def made(self) -> list[Any]:
        """All outputs of the run: results, final values of buffers and parameters, and numbers that are read."""
        return [*self.results, *self.final.values(), *(each.numbers for each in self.record.reads)]

    def reset(self) -> None:
        """Restores the numbers of the twin's buffers from before the run."""
        with torch.no_grad():
            for copy, original in self.given.buffers:
                copy.detach().copy_(original)


def real_run_of(
    call: SampleCall,
    *,
    saves: bool = False,
    differentiates: bool = False,
    kept: KeptState | None = None,
    origin: Mapping[int, Any] = MappingProxyType({}),
    writing: Mapping[type, Any] = MappingProxyType({}),
) -> RealRun:
    """Runs a call on real numbers; neither the module's tensors nor the generators change.

    Args:
        saves: whether autograd saves tensors, as a backward inside forward needs. Without them the run takes no more
            memory than one without grad mode.
        differentiates: whether forward runs a backward.
        kept: places that the call sets (:mod:`bridge.capture.kept_state`), as the module has them.
        origin: if the module is the twin of an earlier run: id of each of its copies -> the original.
        writing: see :class:`bridge.capture.custom_functions.CustomFunctions`.

    Raises:
        AnotherRunError: another run has to begin otherwise.
    """
    given = Given(call, origin)
    prepared = PreparedTwin(call.module, lambda each: each if is_distributed(each) else given.own(each), watched=True)
    given.complete(prepared.module)
    watch, left = _Watch(given, prepared, saves, differentiates, writing), None
    try:
        result = watch.run(call.module)
    except Exception as error:
        watch.explain(error, call.name)
        if (again := watch.another_run()) is not None:
            raise again from error
        raise
    if (again := watch.another_run()) is not None:
        raise again
    if kept is not None:
        kept = kept.of(prepared.twin)
        left = kept.values()
        result, left = (result, left), kept.constants(left)
    watch.cached.check()
    if watch.saved.is_needed:
        raise AnotherRunError(saves=True)
    watch.judge(call.name)
    recorder, integers = watch.recorder, [*watch.calls.integers.values()]
    run = RealRun(
        recorder.record, recorder.values, given, prepared, watch.observation, watch.functions, integers, kept, left
    )
    run.final = watch.finals(is_first=not origin)
    watch.describe(run, result, call.name)
    return run


class _Before(NamedTuple):
    """State that a run may change: geometries of its inputs, buffers by name, the twin's buffer registries."""

    geometry: list[tuple]
    named: dict[str, torch.Tensor]
    registries: list[tuple[dict, dict]]


class _Watch:
    """A run of a twin on real numbers under all recorders.

    Attributes:
        rules, observation: refusals, and eager metadata.
        recorder, functions, calls, draws, saved, cached: recorders of rows, custom autograd Functions, torch's
            functions, draws, tensors that autograd saves, and functions with a cache.
    """

    def __init__(
        self, given: Given, prepared: PreparedTwin, saves: bool, differentiates: bool, writing: Mapping[type, Any]
    ):
        self.given, self.prepared = given, prepared
        inputs, twin = given.inputs, prepared.module
        followed = [each for each in given.parameters if each.requires_grad]
        self.rules = rules = InPlaceRules(given.leaves, followed, inputs)
        self.observation = Observation(unsupported=rules.unsupported)
        geometry = [geometry_of(each) for each in inputs]
        registries = [(each._buffers, dict(each._buffers)) for each in twin.modules()]
        self.before = _Before(geometry, dict(twin.named_buffers(remove_duplicate=False)), registries)
        self.saved = SavedMemory(saves or differentiates)
        self.protected, self.cached = given.protected(), CachedFunctions()
        self.recorder = OperatorRecorder(
            inputs, paths_of(twin), self.observation.draws, self.protected, differentiates=differentiates
        )
        name, recorder = type(twin).__name__, self.recorder
        recorder.values.distributed.own(distributed_of(given.tensors, given.real_tensors, given.owned))
        self.functions = CustomFunctions(name, recorder, writing)
        self.calls = Functions(recorder, rules)
        self.draws = DrawRecorder(self.observation.draws, rules.complain, inputs)
        self.draws.underived, self.functions.opaque.draws = rules.underived, self.draws

    def run(self, module: nn.Module) -> Any:
        """Runs the twin of ``module`` → forward's result."""
        given, prepared, rules, calls = self.given, self.prepared, self.rules, self.calls
        followed = [each for each in given.inputs if each.is_leaf and each.requires_grad]
        self.now: list[tuple] = []
        with ExitStack() as stack:
            stack.callback(self.protected.restore)
            stack.callback(prepared.finish)
            stack.callback(lambda: [each.requires_grad_() for each in followed])
            stack.callback(lambda: self.now.extend(map(geometry_of, given.inputs)))
            self.modes = stack.enter_context(modes_put_back())
            stack.enter_context(IsolatedRNG(run=self.draws.called))
            stack.enter_context(self.functions.traced())
            originals = given.originals(prepared)
            reads = recorded_reads(Reads(originals, prepared.module.named_modules(), self.cached.instead))
            self.observation.reads = reads
            for path, each in module.named_modules():
                for _, hook in hooks_of(each):
                    place = Place("", f"a hook on {f'submodule {path!r}' if path else 'the module'}")
                    reads.know(prepared.twin.in_place_of(hook), place)
            for place, each in enumerate(given.inputs):
                reads.know(each)
                reads.inputs.setdefault(id(each), place)
            self.passed = unpacked((given.args, given.kwargs))
            reads.passed = objects_of(packed_arguments(self.passed))
            reads.containers = containers_of((*self.passed[0], *self.passed[1].values()), (list, tuple, dict))[1:]
            stack.enter_context(generator_watch(rules, reads))
            stack.enter_context(self.saved.noted())
            for each in (calls.active(), python_kernels(), self.recorder):
                stack.enter_context(each)
            torch.clear_autocast_cache()  # casts are made in the same order by each run
            with as_loud_as_eager():
                args, kwargs = self.passed
                result = prepared(*args, **kwargs)
            calls.finish(result)
        return result

    def _told_otherwise(self, module_name: str) -> list[Unsupported]:
        given, first = self.given, len(self.given.owned)
        callers = zip(range(first, first + len(given.arguments)), given.callers, given.arguments, strict=True)
        return [*told_otherwise(self.observation.reads, [*callers], given.real_tensors, module_name)]

    def explain(self, error: Exception, name: str) -> None:
        """Raises a refusal in place of forward's error if an argument told forward something else than in eager."""
        if not isinstance(error, UnsupportedModule) and self.observation.reads and (it := self._told_otherwise(name)):
            raise UnsupportedModule(name, it) from error

    def another_run(self) -> AnotherRunError | None:
        """How another run has to begin, if this one began otherwise."""
        followed = self.rules.derivatives.followed - self.given.call.followed
        differentiates = (
            self.draws.differentiates or self.saved.in_backward
        ) and not self.recorder.record.differentiates
        how = {"differentiates": True} if differentiates else {}
        return AnotherRunError(followed, **how) if followed or how else None

    def judge(self, module_name: str) -> None:
        """Refuses changes by the run to its inputs and to modes."""
        given, rules, observation = self.given, self.rules, self.observation
        before, now = self.before, self.now
        at_first = [  # statistics whose size the first batch sets; a buffer on which forward sets requires_grad
            Unsupported(f"{spec.kind} '{spec.name}'", self._writer(index), f"forward {what}", CALL_BEFORE)
            for index, (spec, then, each) in enumerate(zip(given.tensors, before.geometry, now, strict=False))
            if (what := _SHAPED if then[0] != each[0] else _FOLLOWED if then[:-1] == each[:-1] and then != each else "")
        ]
        if at_first and all(each.reason == SWITCHED for each in rules.unsupported):
            raise CacheNotFilled(module_name, at_first)
        if before.geometry != now and not rules.unsupported:
            reason = "gives a tensor of the module's or the caller's another shape, memory or requires_grad"
            rules.complain(
                "detach_, requires_grad_, set_ or a view in place", reason, "work on a view or a clone of it"
            )
        for changed in self.modes:
            reason = "forward leaves it changed for what comes after the call"
            rules.unsupported.append(Unsupported(changed, "forward", reason, "set it around the call"))
        observation.differentiates, observation.reads_validation = (
            self.draws.differentiates,
            observation.reads.validates,
        )
        observation.reads.note_kin()
        observation.reads.note_rebound(self.prepared.module.modules(), self.prepared.before.written())
        leaves, spec = pytree.tree_flatten(packed_arguments(self.passed))
        if spec != given.in_spec or any(now is not then for now, then in zip(leaves, given.leaves, strict=True)):
            reason = "changes a list, a dict or an object that was passed to the module"
            rules.unsupported.append(Unsupported("an argument", "forward", reason, "work on a copy of it"))

    def _writer(self, index: int) -> str:
        """The line that first writes an input, or that forward does."""
        row = next((row for row in self.recorder.record.rows if index in values_in(written(row))), None)
        return "forward" if row is None else line_of(row.where)

    def finals(self, *, is_first: bool) -> dict[int, ValueRef]:
        """Input of a buffer that forward sets to another tensor, or of a parameter that it writes → its last value.

        Puts the old buffers back, with the new numbers where the shapes are equal. A buffer that was ``None``, or whose
        shape or dtype the first run changes, stays set for the next run.
        """
        inputs, rules, named = self.given.inputs, self.rules, self.before.named
        now = dict(self.prepared.module.named_buffers(remove_duplicate=False))
        found: dict[int, ValueRef] = {}
        for name, before in named.items():
            after = now.get(name)
            if after is before or _is_filled(before, after, is_first):
                continue
            judge_replaced(name, before, after, inputs, rules)
            if any(each is before and now.get(other) is not after for other, each in named.items()):
                reason = "is set to another tensor, where the old one has a second name"
                rules.complain(f"buffer '{name}'", reason, "write into it (copy_)")
            index = next((index for index, each in enumerate(inputs) if each is before), None)
            if isinstance(after, torch.Tensor) and index is not None:
                found[index] = self.recorder.values.of(after)
                if before.shape == after.shape:
                    before.data.copy_(after.detach().clone())
        for registry, before in self.before.registries:
            for name, each in before.items():
                if not _is_filled(each, registry.get(name), is_first):
                    registry[name] = each
        written = enumerate(self.given.owned)
        return found | {n: ValueRef(n) for n, each in written if storage_id(each) in rules.written_parameters}

    def describe(self, run: RealRun, result: Any, module_name: str) -> None:
        """Notes the run's results, and the order of the compiled code's inputs."""
        given, rules, observation, record = self.given, self.rules, self.observation, run.record
        containers, result = containers_of(result), packed(result, given=given.inputs)
        observation.objects = objects_of(result) + containers
        for each in observation.objects:
            if any(each is other for other in (*observation.reads.passed, *observation.reads.containers)):
                reason = "keeps or returns an object that was passed to the module; a compiled call makes another one"
                rules.complain(f"a {type(each).__name__}", reason, "return the tensors in it")
        leaves, observation.out_spec = pytree.tree_flatten(result)
        known = set(map(id, given.inputs))
        for leaf in leaves:
            own = vars(leaf) if type(leaf) is torch.Tensor and id(leaf) not in known else {}
            if not all(map(is_plain, own.values())):
                reason = "sets attributes of a tensor that the module returns; a compiled call makes another tensor"
                rules.complain(f"result.{next(iter(own))}", reason, "return them")
        if unknown := unknown_results(leaves):
            raise UnsupportedModule("", [*observation.unsupported, *unknown])
        wholes = whole_tensors(leaves, self.recorder, given.inputs, rules)
        leaves, observation.out_spec = pytree.tree_flatten(with_wholes(result, wholes.values()))
        given.tensors = self.recorder.values.distributed.with_gradients(given.tensors)
        run.results, run.wholes = values_of(leaves, self.recorder, wholes), tuple(wholes)
        read = {number for row in record.rows for number in values_in((row.args, row.kwargs))}
        read |= {*values_in([*run.results, *run.final.values()]), *observation.reads.tensors.looked}
        run.order = given.ordered(record, read)
        observation.reads.note_properties({id(tensor) for tensor, _ in record.free.values()})
        if not self.calls.reads_addresses:  # mentioned in a branch that did not run
            for each in [each for each in observation.reads.tensors.asked if each[1] in ADDRESSES]:
                del observation.reads.tensors.asked[each]
        rules.unsupported += self._told_otherwise(module_name)
        asked = [place for place, each in enumerate(given.inputs) if id(each) in rules.without_grad]
        observation.reads.tensors.asked.update(((place, "grad"), None) for place in asked)
        described = [record.free[n][0] if n in record.free else given.inputs[n] for n in run.order]
        self._describe_inputs(run, described)
        own = dict(enumerate((*given.real_tensors, *given.callers)))
        own = [own.get(n, each) for n, each in zip(run.order, described, strict=True)]
        if reason := leads_out([given.computed.get(id(each), each) for each in own], observation.derived):
            rules.complain("torch.autograd.grad", reason, "detach the arguments, or dispatch a module inside")
        saved = self.saved.results(leaves)
        describe_outputs(leaves, described, observation, rules, self.functions, saved)
        returned = [pair for pair in zip(leaves, observation.outputs, strict=True) if pair[1].is_tensor]
        observation.unsupported += self.calls.shared_views(returned)
        observation.unsupported += overlaps([leaf for leaf, output in returned if not output.alias_of])

    def _describe_inputs(self, run: RealRun, inputs: Sequence[torch.Tensor]) -> None:
        """Notes the uses of the inputs in the run, by their positions in the compiled code's order."""
        observation, memory, free = self.observation, self.rules.memory, run.record.free
        index_of = {place: index for index, place in enumerate(run.order)}
        observation.derived = frozenset(index_of[n] for n in self.rules.derivatives.derived if n in index_of)
        moved, observation.checkpointed = self.protected.counted, self.rules.checkpointed.of(inputs)
        observation.counted = frozenset(index for index, each in enumerate(inputs) if id(each) in moved)
        observation.saved, observation.saved_views = self.saved.inputs(inputs)
        exchanged, unseen = (
            frozenset(index for index in found if run.order[index] not in free)
            for found in (memory.exchanged(inputs), memory.uncounted(inputs))
        )
        unseen &= observation.saved | observation.saved_views
        observation.overwritten = unseen | exchanged & observation.saved  # a view keeps the memory that was exchanged
        again = {index_of[n] for n, value in run.final.items() if value != ValueRef(n)}
        for index in observation.overwritten & (again | exchanged & observation.saved_views):
            tensors = self.given.tensors
            self.rules.exchanged(tensors[index].name if index < len(tensors) else "an argument")
        asked = observation.reads.tensors.asked
        observation.reads.tensors.asked = {(index_of[n], name): None for n, name in asked if n in index_of}
        for place, draw in enumerate(observation.draws):
            if draw.operand is not None and draw.operand.of is not None:
                operand = replace(draw.operand, of=index_of.get(draw.operand.of))
                observation.draws[place] = replace(draw, operand=operand)


def _spec(kind: str, name: str, tensor: torch.Tensor, held: Any = None) -> ModuleTensor:
    layout = tuple(tensor.shape), tensor.stride(), tensor.dtype
    return ModuleTensor(kind, (name,), *layout, tensor.requires_grad, held)


def _reader(record: Record, row: int) -> str:
    return line_of(record.rows[row].where if row < len(record.rows) else None)


_SHAPED, _FOLLOWED = "gives it another shape", "sets requires_grad of it"


def _is_filled(before: torch.Tensor | None, after: Any, is_first: bool) -> bool:
    """Whether this call initializes a buffer: it was ``None``, or a first call changes its dtype or shape."""
    if before is None or not (is_first and isinstance(after, torch.Tensor)):
        return before is None
    return (before.dtype, before.shape) != (after.dtype, after.shape)
