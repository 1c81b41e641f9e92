"""``explain``: what a dispatched module compiled to, what it saves, what it missed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from torch import nn

from autodiff.ir import Function, bindings
from bridge.compile import CallLibrary, Instruction, Launch, Program, RunLoop
from bridge.dispatch import Entry, PartStats, stats
from bridge.lowering import LoweredCall, Origin
from bridge.show.memory import kept_bytes
from bridge.show.program_picture import ProgramReport, StepRow
from bridge.show.report import EntryReport, Report, choices_of

__all__ = ["explain", "program_report"]


def explain(module: nn.Module, *, full: bool = False) -> Report:
    """As :func:`bridge.explain`, which tells what it takes, returns and raises."""
    counted = stats(module)
    if not all(isinstance(entry.lowered, LoweredCall) for entry in counted.entries):
        name = type(module).__name__
        raise ValueError(
            f"{name} was loaded: its stages stayed behind; print(stats(module).entries[0].forward) is here"
        )
    entries = tuple(_entry(entry, module) for entry in counted.entries)
    told = repr(counted.graphs).splitlines() if counted.graphs.recordings or counted.graphs.refused else ()
    name, replaced = type(module).__name__, counted.eager_backwards.copy()
    report = Report(name, counted.hits, counted.misses.copy(), entries, full, tuple(told), replaced)
    return report if not isinstance(counted, PartStats) else replace(report, parts=_parts(counted))


def _parts(counted: PartStats) -> tuple[str, ...]:
    """What is dispatched in a model and what is not, a line each."""
    shares = counted.shares
    told = [f"an eager forward spends {100 * counted.coverage:.0f}% of its time in {len(counted.parts)} parts"]
    for path, each in counted.parts.items():
        share = f"{100 * shares[path]:.0f}%" if path in shares else "not in the latest sample"
        told.append(f"{path or 'the model'}: {share}; {each.hits} hits, {sum(each.misses.values())} misses")
    return (*told, *(f"eager: {each}" for each in counted.eager))


def _entry(entry: Entry, module: nn.Module) -> EntryReport:
    lowered = entry.lowered
    programs = [program_report(lowered, "forward", entry.programs.forward.function, entry.forward)]
    if entry.backward is not None:
        programs.append(program_report(lowered, "backward", lowered.expected_backward, entry.backward))
    seconds = {stage.name: stage.seconds for stage in lowered.stages}
    seconds["split"] = seconds.pop("split forward", 0.0) + seconds.pop("split backward", 0.0)
    if entry.is_frozen:
        seconds |= {stage.name: stage.seconds for stage in entry.programs.frozen}
    for report in programs:
        for stage, spent in report.program.timings.items():
            seconds[stage] = seconds.get(stage, 0.0) + spent
    return EntryReport(
        repr(entry),
        (*_guards(lowered, module), *_frozen(entry)),
        entry.steps,
        tuple(programs),
        lowered.plan,
        kept_bytes(lowered, computed=entry.programs.masks.forward) if lowered.plan else 0,
        seconds,
        lowered,
        () if entry.bound is None else tuple(str(entry.bound).splitlines()),
        tuple(choices_of(entry)),
        entry.guard.tree.reads.places,
        entry.guard.check.source,
    )


def _guards(lowered: LoweredCall, module: nn.Module) -> tuple[str, ...]:
    """What :class:`bridge.dispatch.guards.EntryGuard` compares, in words."""
    captured = lowered.captured
    names = {index: name for name, index in captured.placeholders.items()}
    first = len(captured.module_tensors)
    found = []
    shapes = captured.argument_shapes or [tensor.shape for tensor in captured.arguments]
    strides = captured.argument_strides or [tensor.stride() for tensor in captured.arguments]
    for position, (tensor, shape, stride) in enumerate(zip(captured.arguments, shapes, strides, strict=True)):
        name = names.get(first + position, f"argument {position}")
        kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(shape)}, strides {tuple(stride)}"
        found.append(f"{name}: {kind}{', requires grad' if tensor.requires_grad else ''}")
    leaves = zip(captured.argument_leaves, captured.argument_is_tensor, strict=True)
    constants = [leaf for leaf, is_tensor in leaves if not is_tensor and leaf is not None]
    if constants:
        found.append(f"arguments that are no tensors: {', '.join(map(repr, constants))}")
    modes = {child.training for child in module.modules()}
    mode = "train" if modes == {True} else "eval" if modes == {False} else "mixed train and eval"
    wants = sum(tensor.requires_grad for tensor in captured.module_tensors)
    gradients = "grad mode on" if lowered.plan else "nothing that requires grad reaches a result, or grad mode off"
    found.append(
        f"{len(list(module.modules()))} modules (now {mode}): types, train or eval, plain attributes, no hooks inside"
    )
    found.append(
        f"{first} parameters and buffers, {wants} with gradient: shapes, strides, dtypes, requires_grad, which are tied"
    )
    found.append(f"{gradients}; autocast, default dtype, deterministic algorithms and torch modes as at capture")
    found += [f"{each.field}: {each.words}" for each in captured.recomputed]
    found += [": ".join(check).partition(", called with")[0] for check in lowered.imported.checks]
    return tuple(found)


def _frozen(entry: Entry) -> tuple[str, ...]:
    if not entry.is_frozen:
        return ()
    count = len(entry.lowered.captured.module_tensors)
    return (f"{count} parameters and buffers are the tensors that were frozen, unchanged since",)


def program_report(lowered: LoweredCall, direction: str, function: Function, program: Program) -> ProgramReport:
    """The steps of a program that ``function``, of this lowering, was compiled to.

    Equal functions share a program, which has the names of the first of them: they are translated here.
    """
    own = [var.name for var in function.params] + [var.name for var, _ in bindings(function)]
    name_of = dict(zip(program.variables, own, strict=True))
    origins = lowered.origins_in(function)
    rows = []
    for index, step in enumerate(program.steps):
        rows.append(_row(program, index, step, name_of, origins))
    return ProgramReport(direction, program, tuple(rows))


def _row(
    program: Program, index: int, step: Instruction, name_of: dict[str, str], origins: dict[str, Origin]
) -> StepRow:
    outputs = tuple(name_of.get(name, name) for name in step.outputs)
    if isinstance(step, RunLoop):
        kinds = Counter("kernels" if isinstance(each, Launch) else "library calls" for each in step.steps)
        what = f"{step.length} times: {', '.join(f'{number} {kind}' for kind, number in kinds.items())}"
        known = tuple(filter(None, [origins.get(name) for name in dict.fromkeys(outputs)]))
        return StepRow(index, "loop", step.name, what, outputs, step.contents.flops, step.contents.bytes, known)
    if not isinstance(step, Launch | CallLibrary):
        return StepRow(index, "view", step.name, "view", outputs, 0, 0, ())
    inside = step.contents
    found = [origins.get(name_of.get(name, name)) for name in inside.bindings]
    kind = "kernel" if isinstance(step, Launch) else "library"
    what = " ".join(operation.op.removeprefix("relax.").removeprefix("nn.") for operation in inside.operations)
    told = (*filter(None, [inside.plan]), *(program.launches(step) if isinstance(step, Launch) else ()))
    if told:
        what = f"{what} ({', '.join(told)})"
    known = tuple(dict.fromkeys(origin for origin in found if origin is not None))
    return StepRow(index, kind, step.name, what, outputs, inside.flops, inside.bytes, known)
