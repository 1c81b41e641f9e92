"""Fake run: the call of a real run once more, on fake tensors, in the state that it left → its record; and a comparison
of the two records → refusals.

The fake run sees only the numbers that the real run read: equal rows mean that no other number decided them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from bridge.base.errors import Unsupported, line_of
from bridge.base.log import channel
from bridge.base.modes import modes_put_back
from bridge.base.pytrees import containers_of, objects_of, packed
from bridge.base.tensor_properties import bits_of
from bridge.base.torch_distributed import of_local
from bridge.base.torch_fakes import clear_fake_memo, fake_mode
from bridge.base.torch_internals import FakeTensor, FakeTensorMode, aten, python_kernels, pytree, set_version_counters
from bridge.base.torch_shapes import SYMBOLIC, fake_results_not_kept, hint, size_environment
from bridge.capture.autograd_uses import saved_here
from bridge.capture.counted_dims import CountedDims, integers_as_symbols
from bridge.capture.custom_functions import CustomFunctions
from bridge.capture.distributed import distributed_of
from bridge.capture.functions import Functions
from bridge.capture.outputs import values_of, with_wholes
from bridge.capture.prepared_twin import PreparedTwin, attributes_of, own_leaves, paths_of, with_attributes
from bridge.capture.real_run import RealRun
from bridge.capture.recorder import OperatorRecorder
from bridge.capture.rows import Form, Record, Row, ValueRef, at_hints, mapped, renamed, values_in
from bridge.capture.sample import ALL_COUNTS, DynamicDim
from bridge.capture.symbolic_run import Symbols, symbolic_leaf
from bridge.capture.thread_isolation import quiet
from bridge.capture.twin import Twin
from bridge.state import SampleCall

log = channel("dispatch")

_SLICE = aten.slice.Tensor
_DEPENDS = "do not let it depend on the numbers in tensors, or on anything that changes in between (a clock, a counter)"
_NOTHING = object()
_NO_VERSION = 2**30
"""A version of fake inputs that no tensor reaches: a value that forward makes of the version of a view differs."""


@dataclass
class FakeRecord:
    """A run on fake tensors: its record and mode, the leaves and objects of its result, and its twin."""

    record: Record
    mode: FakeTensorMode
    results: Sequence[Any]
    arguments: Sequence[torch.Tensor]
    out_spec: Any = None
    leaves: Sequence[Any] = ()
    symbols: Symbols | None = None
    objects: Sequence[Any] = ()
    twin: Twin | None = None
    changed: Sequence[str] = ()


def mode_of(real: RealRun, dims: Sequence[DynamicDim]) -> tuple[FakeTensorMode, Symbols | None]:
    """The fake tensor mode of a run, and the manager of its symbols for dynamic sizes (else ``None``)."""
    with fake_results_not_kept() if dims else nullcontext():
        sizes = {"shape_env": size_environment()} if dims else {}
        mode = fake_mode(allow_non_fake_inputs=True, static_shapes=True, **sizes)
    counts = None
    if ALL_COUNTS in dims:
        trains = [place for place, each in zip(real.order, real.given.tensors, strict=False) if each.requires_grad]
        counts = CountedDims(mode, real.record, trains)
    return mode, Symbols(real.record, mode, counts) if dims else None


def faking(mode: FakeTensorMode) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function: tensor → its fake tensor in a mode, one for each tensor object."""
    fakes: dict[int, torch.Tensor] = {}
    kept: list[torch.Tensor] = []

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            kept.append(tensor)
            made = mode.from_tensor(tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad))
            fakes[id(tensor)] = with_attributes(made, tensor)
        return fakes[id(tensor)]

    return fake


def fake_leaves(mode: FakeTensorMode, call: SampleCall, real: RealRun) -> tuple[list[Any], Any]:
    """The leaves of a call's arguments with fake tensors, as the runs have them, and their structure."""
    leaves, spec = pytree.tree_flatten(own_leaves(call, real.given.real_tensors))
    for index, each in enumerate(leaves):
        if isinstance(each, torch.Tensor):
            leaves[index] = with_attributes(symbolic_leaf(mode, each, index, call.dims), each)
    return leaves, spec


def fake_run_of(real: RealRun, change: Callable[[nn.Module], Any] = lambda twin: None) -> FakeRecord:
    """Runs the twin of a real run once more, on fake tensors, in the state that the real run left.

    Args:
        change: called with this run's own twin before it runs.
    """
    call, dims = real.given.call, real.given.call.dims
    mode, symbols = mode_of(real, dims)
    fake = faking(mode)
    try:
        owned = [fake(each) for each in real.given.inputs[: len(real.given.real_tensors)]]
        given, spec = fake_leaves(mode, call, real)
        fake_args, fake_kwargs = pytree.tree_unflatten(given, spec)
        arguments = [each for each in given if isinstance(each, torch.Tensor)]
        shards = [*distributed_of(real.given.tensors, real.given.real_tensors, owned)]
        placed = {id(tensor): of_local(local, tensor) for _, tensor, local in shards}
        prepared = PreparedTwin(
            real.twin, lambda each: placed[id(each)] if id(each) in placed else fake(each), watched=bool(dims)
        )
        twin = prepared.module
        places = None if real.kept is None else real.kept.of(prepared.twin)
        if places is not None:
            places.empty()
        change(twin)
        attributes = attributes_of(twin, [*owned, *arguments])
        inputs = [*owned, *arguments, *attributes.values()]
        draws: list[Any] = [] if symbols is None else symbols.draws
        replays = symbols is None and not real.observation.differentiates
        answers = {
            "answers": real.record,
            "symbols": symbols,
            "mode": mode if replays else None,
            "differentiates": real.observation.differentiates,
        }
        recorder = OperatorRecorder(inputs, paths_of(twin), draws, **answers)
        recorder.values.distributed.own((name, placed[id(tensor)], local) for name, tensor, local in shards)
        functions = CustomFunctions(
            type(real.twin).__name__, recorder, real.functions.writing, real.functions.opaque.applied
        )
        functions_called = Functions(recorder)
        drawing = nullcontext() if symbols is None else symbols.recording(inputs)
        modes = modes_put_back(), quiet(), saved_here(), functions.traced(), mode, drawing, python_kernels(), recorder
        for tensor, _ in real.record.free.values():  # the same tensor object in both runs
            recorder.expect(tensor, fake(tensor))
        from_outside = [*inputs, *(fake(tensor) for tensor, _ in real.record.free.values())]
        versioned = [each for each in from_outside if type(each) is FakeTensor and not each.is_inference()]
        set_version_counters(versioned, [_NO_VERSION] * len(versioned))
        symbolic, asked = symbols is not None, functions_called.integer
        integers = integers_as_symbols(real.integers, asked) if symbolic else nullcontext()
        with ExitStack() as stack:
            for each in (integers, functions_called.active(), *modes):
                stack.enter_context(each)
            result = prepared(*fake_args, **fake_kwargs)
        if places is not None:
            result = result, places.values()
        if symbols is not None and symbols.counts is not None:
            symbols.counts.end()
        made = packed(result, given=inputs)
        leaves, out_spec = pytree.tree_flatten(with_wholes(made, real.wholes, dims))
        results = values_of(leaves, recorder, real.wholes)
        run = recorder.record, mode, results, arguments, out_spec, given, symbols
        changed = () if prepared.before is None else prepared.before.changes()
        return FakeRecord(*run, objects_of(made) + containers_of(result), prepared.twin, changed)
    finally:
        clear_fake_memo(mode)


# Differences: the records of the real run and of the fake run → refusals.


def differences(real: RealRun, fake: FakeRecord) -> Iterator[Unsupported]:
    """Compares the two runs → a refusal for the first row that differs, or for the results."""
    ours, theirs = real.record, fake.record
    rows = [row for row in theirs.rows if row.op is not _SLICE or row.results.number not in theirs.same]
    for index, (a, b) in enumerate(zip(ours.rows, rows, strict=False)):
        if a is not b and not _is_same(ours, a, theirs, b):
            where = line_of(a.where)
            there = "has other operands" if a.op is b.op else f"is {b.op}"
            log.debug("row %d: %s\n%s", index, a, b)
            if _is_same(ours, a, theirs, b, given=True):
                reason = f"on the sample eager gives {_results(ours, a)}, and torch's formula {_results(theirs, b)}"
                yield Unsupported(str(a.op), where, reason)
                return
            reason = f"forward differs between two runs of the same call: in the second, on fake tensors, it {there}"
            yield Unsupported(str(a.op), where, reason, _DEPENDS)
            return
    if len(ours.rows) != len(rows):
        reason = f"forward makes {len(rows)} calls on fake tensors and {len(ours.rows)} on real ones"
        yield Unsupported("forward", "forward", reason, _DEPENDS)
    else:
        yield from _result(real, fake)


def _result(real: RealRun, fake: FakeRecord) -> Iterator[Unsupported]:
    """Compares the results of two runs with equal rows → at most one refusal."""
    ours, theirs = real.record, fake.record
    objects = list(zip(real.observation.objects, fake.objects, strict=False))
    real.observation.objects, fake.objects = [], []
    for one, other in objects:
        if one is other or real.prepared.twin.has_copied(one) or fake.twin.has_copied(other):
            reason = "is not made by the call; a compiled call would return a copy of it"
            yield Unsupported(f"a result of type {type(one).__name__}", "the module's result", reason)
            return
    found = at_hints(renamed(fake.results, theirs))
    pairs = zip_longest(real.results, found, fillvalue=_NOTHING)
    if not all(_is_same_constant(*pair) for pair in pairs) or real.observation.out_spec != fake.out_spec:
        reason = "forward returns something else each time: a time, a counter, a number from elsewhere"
        yield Unsupported("a result", "the module's result", reason, "return tensors")
        return
    if fake.symbols is None and not _same_literals(ours, theirs):
        reason = "a tensor is made of numbers in Python that are others each time that forward runs"
        yield Unsupported("a tensor of numbers", "forward", reason, "pass the numbers to forward, or keep them")


def _is_same_constant(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one is other or one == other or (one != one and other != other))


def _same_literals(ours: Record, theirs: Record) -> bool:
    """Whether two runs made the same tensors from Python numbers, bit by bit."""
    pairs = ((literal, theirs.literals.get(number)) for number, literal in ours.literals.items())
    return all(other is not None and same_numbers(literal, other) for literal, other in pairs)


def same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors made from Python numbers are equal in dtype, shape and bits."""
    return one.dtype == other.dtype and one.shape == other.shape and _bits(one) == _bits(other)


def _bits(tensor: torch.Tensor) -> bytes:
    known = getattr(tensor, "constant", None) if isinstance(tensor, FakeTensor) else tensor
    return b"" if known is None else bits_of(known)


def _is_same(ours: Record, a: Row, theirs: Record, b: Row, *, given: bool = False) -> bool:
    """Whether two rows are the same at the sample's sizes; ``given``: compare all but their results.

    A slice that spans the whole dimension equals ``alias``, which torch's indexing calls for static sizes.
    """
    op, args, kwargs = b.op, b.args, b.kwargs
    if a.op is aten.alias.default and op is _SLICE and _form(theirs, args[0]).shape == _form(theirs, b.results).shape:
        op, args, kwargs = aten.alias.default, args[:1], {}
    if a.op is not op or a.grad != b.grad:
        return False
    results = (None, None) if given else (a.results, b.results)
    return _told(ours, (a.args, a.kwargs, results[0])) == _told(theirs, (args, kwargs, results[1]))


def _told(record: Record, tree: Any) -> str:
    """Operands or results as text: equal for equal constants, and values with equal numbers, shapes and dtypes."""

    def told(leaf: Any) -> Any:
        if type(leaf) is ValueRef:
            form = _form(record, leaf)
            return ValueRef, renamed(leaf, record).number, form.shape, form.dtype
        return hint(leaf) if type(leaf) in SYMBOLIC else id(leaf)

    return repr(mapped(tree, (ValueRef, *SYMBOLIC, torch.UntypedStorage), told))


def _results(record: Record, row: Row) -> str:
    forms = [record.forms[number] for number in values_in(renamed(row.results, record))]
    return ", ".join(f"{form.dtype} of shape {list(form.shape)}" for form in forms) or repr(row.results)


def _form(record: Record, value: ValueRef) -> Form:
    return record.forms[renamed(value, record).number]
