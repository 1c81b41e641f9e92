"""``explain``: a dispatched module → a report as plain data, which prints as text and, in notebooks, as HTML."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from torch import nn

from autodiff.extents import Extent
from autodiff.ir import Function, bindings
from bridge.compile import CallLibrary, Instruction, Launch, Program, RunLoop
from bridge.dispatch import CallStep, Entry, PartStats, stats
from bridge.lowering import LoweredCall, Origin, folded, megabytes
from bridge.show.program_picture import ROOT, ProgramReport, StepRow
from partition import Plan, bytes_text, columns

#: Characters of a line, and of a cell, in the short form.
WIDTH, _CELL = 118, 34


def more(everything: Sequence, shown: Sequence, what: str) -> list[str]:
    """A line with the number of omitted rows; no line if there are none."""
    left = len(everything) - len(shown)
    return [f"    ... {left} more {what}"] if left else []


def cut(line: str, full: bool) -> str:
    """A line of at most ``WIDTH`` characters unless ``full``."""
    return line if full or len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def table(head: tuple[str, ...], rows: list[tuple[str, ...]], full: bool, right: tuple[int, ...]) -> list[str]:
    """Rows under a head, columns aligned (``right``: to the right); long cells keep their ends unless ``full``."""
    if not rows:
        return []
    if not full:
        tails = [[cell if len(cell) <= _CELL else "..." + cell[3 - _CELL :] for cell in row[:-1]] for row in rows]
        rows = [(*tail, row[-1]) for tail, row in zip(tails, rows, strict=True)]
    return [cut(f"    {line}", full) for line in columns([head, *rows], right)]


_STATE_BYTES = 16
"""Bytes of a generator state: a seed and an offset."""


def kept_bytes(lowered: LoweredCall, plan: Plan | None = None, computed: Collection[int] = ()) -> int:
    """Bytes of saved intermediates and draws (masks) under a plan, which a dispatched call keeps alive.

    ``plan``: by default the lowered call's. ``computed``: places of recomputed dropout masks, whose generator state is
    kept instead.
    """
    given = len(lowered.captured.module_tensors) + len(lowered.captured.given.tensors)
    plan = plan or lowered.plan
    primals = zip(plan.saved_primals, plan.free, strict=False)  # free lists the primals first, then the outputs
    return plan.bytes + sum(
        _STATE_BYTES if index in computed else saved.bytes for index, saved in primals if index >= given
    )


_PRODUCTS = frozenset(["mm", "mm_lt", "mm_biased", "mm_swapped", "linear", "bmm"])
"""Names of the library kernels of matrix products."""


def choices_of(entry: Entry) -> Iterator[str]:
    """Yields a line for each choice, or kind of choices, of an entry."""
    if layers := sum(step.name == "recurrent_layers" for step in entry.forward.steps):
        calls = "1 call" if layers == 1 else f"{layers} calls"
        yield f"{calls} of recurrent layers: cuDNN's kernels, by sizes for which these were measured to be quicker"
    products = sum(_products(program.steps) for program in (entry.forward, entry.backward) if program is not None)
    if products:
        ways = (
            "measured at first use, small ones the library's"
            if entry.options.backend.measures_products
            else "the library's"
        )
        yield f"{products} matrix products: {ways}"


def _products(steps: tuple[Instruction, ...]) -> int:
    count = 0
    for step in steps:
        if isinstance(step, RunLoop):
            count += _products(step.steps)
        elif isinstance(step, Launch):
            count += any(operation.op == "matmul" for operation in step.contents.operations)
        elif isinstance(step, CallLibrary):
            count += step.name in _PRODUCTS
    return count


#: Compile stage → its group in the short form; all others are lowering.
_PARTS = {
    "captured": "capture",
    "translate": "kernels",
    "fuse": "kernels",
    "generate": "kernels",
    "build": "LLVM",
    "plan": "kernels",
}
#: Rows of the short form's tables.
FEW_STEPS, FEW_SAVED, FEW_MISSES, FEW_GUARDS, MOST_LISTED = 5, 6, 5, 5, 50


@dataclass(frozen=True)
class EntryReport:
    """One entry.

    Attributes:
        title: the call, hits and compile seconds.
        guards: the entry's guards, in words.
        call: the steps of a call, with their tensors.
        programs: forward, then backward if there is one.
        plan: the saved tensors, with a reason each; ``None`` if nothing requires grad.
        kept_bytes: saved intermediates and random draws, kept from forward to backward.
        seconds: compile time by stage.
        lowered: every stage.
        sizes: with dynamic shapes, the symbols, their guards, and the sizes for which the entry is bound.
        choices: the compilation's choices and their sources: default, measured at first use.
        reads: places outside the module's tensors and attributes that forward read.
        check: the source of the generated guard function.
    """

    title: str
    guards: tuple[str, ...]
    call: tuple[CallStep, ...]
    programs: tuple[ProgramReport, ...]
    plan: Plan | None
    kept_bytes: int
    seconds: Mapping[str, float]
    lowered: LoweredCall = field(repr=False)
    sizes: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    check: str = ""

    def lines(self, full: bool) -> list[str]:
        """The entry as text."""
        return [self.title, *chain.from_iterable(self._sections(full).values())]

    def html(self) -> str:
        """The full text with a collapsible part for each section; it lists the first reads only."""
        parts = (
            folded("\n".join([head, *lines])) for head, lines in self._sections(True, MOST_LISTED).items() if lines
        )
        return f"<p>{html.escape(self.title)}</p>{''.join(parts)}"

    def _sections(self, full: bool, most: int | None = None) -> dict[str, list[str]]:
        """Title → lines; ``most``: the number of reads in the full form, by default all."""
        few = None if full else FEW_GUARDS
        reads = "reads" if most is None else "reads: print(report.full)"
        return {
            "guards": self._few("guard", self.guards, "guards", few),
            "what forward read": self._few("read", self.reads, reads, most if full else 0),
            "check": [f"  check     {line}" for line in self.check.splitlines()] if full else [],
            "sizes that vary": self._few("sizes", self.sizes, "sizes", few),
            "choices": [cut(f"  choices   {each}", full) for each in self.choices],
            "a call": [cut(f"  call      {step}", full) for step in self.call],
            "compile time": [f"  compiled  {1e3 * sum(self.seconds.values()):.0f} ms: {self._spent(full)}"],
            "programs": self._programs(full),
            "saved for the backward": self._saved(full),
        }

    def _programs(self, full: bool) -> list[str]:
        """Lines on the programs: summaries, a table of steps."""
        out = [cut(f"  {program.summary(full)}", full) for program in self.programs]
        rows = [row for program in self.programs for row in program.table()]
        if not full:
            steps = [step for program in self.programs for step in program.steps if step.kind != "view"]
            order = sorted(range(len(steps)), key=lambda i: -steps[i].bytes)[:FEW_STEPS]
            out.append(f"  the {len(order)} steps that move most, of {len(rows)}")
            rows = [rows[i] for i in order]
        return out + table(("step", "name", "flop", "moved", "module", "operators"), rows, full, right=(2, 3))

    @staticmethod
    def _few(head: str, lines: Sequence[str], what: str, most: int | None) -> list[str]:
        shown = lines[:most]
        return [cut(f"  {head:<9} {each}", most is None) for each in shown] + more(lines, shown, what)

    def _spent(self, full: bool) -> str:
        parts: dict[str, float] = {}
        for name, seconds in self.seconds.items():
            part = name if full else _PARTS.get(name, "lowering")
            parts[part] = parts.get(part, 0.0) + seconds
        return ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in parts.items())

    def _saved(self, full: bool) -> list[str]:
        """Lines on the saved tensors: totals, a table, notes."""
        if self.plan is None:
            return ["  nothing requires grad: forward only, nothing is saved"]
        plan = self.plan
        share = f", {plan.bytes / plan.save_all_bytes:.2f} of save_all" if plan.save_all_bytes else ""
        out = [
            f"  saved     {len(plan.saved_tensors)} saved tensors, {_saved_bytes(plan)} ({plan.strategy}{share}); "
            f"draws {megabytes(self.kept_bytes - plan.bytes)}; {len(plan.recomputed)} operations computed again"
        ]
        rows = saved_rows(plan)
        if full:
            out += table(("value", "module", "tensor", "bytes", "kind", "why"), rows, full, right=(3,))
        else:
            rows = rows[: min(FEW_SAVED, len(plan.saved_tensors))]
            lines = table(("value", "module", "tensor", "bytes"), [row[:4] for row in rows], full, right=(3,))
            out += lines[:1]
            for line, row in zip(lines[1:], rows, strict=True):
                out += [line, cut(f"        {row[-1]}", full)]
            left = plan.by_size[len(rows) : len(plan.saved_tensors)]
            if left:
                rest = megabytes(sum(saved.bytes for saved in left))
                out.append(f"    ... {len(left)} more, {rest}; and {len(plan.free)} values that live anyway")
        return out + [f"  note: {note}" for note in plan.notes]


def _saved_bytes(plan: Plan) -> str:
    """``"1.2 MB"``, for the sample's sizes; with dynamic shapes followed by the formula."""
    formula = f" = {plan.size} bytes" if isinstance(plan.size, Extent) else ""
    return f"{megabytes(plan.bytes)}{formula}"


def saved_rows(plan: Plan) -> list[tuple[str, ...]]:
    """A row per saved tensor, largest intermediate first: value, module, shape with dtype, bytes, kind, reason."""
    return [
        (
            saved.name,
            saved.module_path or ROOT,
            f"{saved.dtype} {'x'.join(map(str, saved.shape)) or 'scalar'}",
            bytes_text(saved),
            saved.kind,
            saved.reason,
        )
        for saved in plan.by_size
    ]


@dataclass(frozen=True)
class Report:
    """Report on a dispatched module: entries, saved tensors, misses. ``print`` it, or ``print(report.full)``.

    Attributes:
        module_name: class of the module.
        hits: calls that ran in TVM.
        misses: calls that ran eager, by reason.
        entries: a report per entry; for a model dispatched in parts, of all parts.
        complete: whether printing shows everything.
        graphs: statistics of CUDA graphs, in words; empty if there are none.
        parts: of a model dispatched in parts, the dispatched and the eager modules, in words.
        eager_backwards: backwards of hits that eager's operators computed, by reason.
    """

    module_name: str
    hits: int
    misses: Counter[str]
    entries: tuple[EntryReport, ...]
    complete: bool = False
    graphs: tuple[str, ...] = ()
    eager_backwards: Counter[str] = field(default_factory=Counter)
    parts: tuple[str, ...] = ()

    @property
    def full(self) -> Report:
        """The same report that prints every step, guard, saved tensor and miss."""
        return replace(self, complete=True)

    def head(self) -> str:
        """One line of totals."""
        entries = f"{len(self.entries)} {'entry' if len(self.entries) == 1 else 'entries'}"
        return f"{self.module_name}: {entries}, {self.hits} hits, {sum(self.misses.values())} misses"

    def __str__(self) -> str:
        lines = [self.head(), *(cut(f"part: {line}", self.complete) for line in self.parts)]
        for entry in self.entries:
            lines += entry.lines(self.complete)
        lines += self._counts()
        if not self.complete:
            rows = self.entries[0].programs[0].steps if self.entries else ()
            name = next((row.name.split("_")[0] for row in rows if row.kind == "kernel"), None)
            hint = f"; a kernel: report.entries[0].programs[0].source({name!r})" if name else ""
            lines.append(f"everything: print(report.full){hint}")
        return "\n".join(lines)

    def _counts(self) -> list[str]:
        """Lines on recorded graphs, backwards by eager's operators, misses."""
        lines = [cut(line, self.complete) for line in self.graphs]
        lines += [
            cut(f"backward: {number} x {reason}", self.complete) for reason, number in self.eager_backwards.items()
        ]
        misses = self.misses.most_common(None if self.complete else FEW_MISSES)
        lines += [cut(f"miss: {number} x {reason}", self.complete) for reason, number in misses]
        return lines + more(list(self.misses), misses, "reasons")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Totals, then collapsible parts."""
        rest = folded(
            "\n".join(["parts, recorded graphs, backwards by eager's operators, misses", *self.parts, *self._counts()])
        )
        return f"<b>{html.escape(self.head())}</b>{''.join(entry.html() for entry in self.entries)}{rest}"


def explain(module: nn.Module, *, full: bool = False) -> Report:
    """Implements :func:`bridge.explain`."""
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
    """The dispatched and the eager modules of a model, a line each."""
    shares = counted.shares
    told = [f"an eager forward spends {100 * counted.coverage:.0f}% of its time in {len(counted.parts)} parts"]
    for path, each in counted.parts.items():
        share = f"{100 * shares[path]:.0f}%" if path in shares else "not in the latest sample"
        told.append(f"{path or 'the model'}: {share}; {each.hits} hits, {sum(each.misses.values())} misses")
    return (*told, *(f"eager: {each}" for each in counted.eager))


def _entry(entry: Entry, module: nn.Module) -> EntryReport:
    """The report of one entry."""
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
    """The conditions of :class:`bridge.dispatch.guards.EntryGuard`, in words."""
    captured = lowered.captured
    names = {index: name for name, index in captured.names.placeholders.items()}
    first = len(captured.module_tensors)
    found = []
    shapes = captured.sizes.shapes or [tensor.shape for tensor in captured.given.tensors]
    strides = captured.sizes.strides or [tensor.stride() for tensor in captured.given.tensors]
    for position, (tensor, shape, stride) in enumerate(zip(captured.given.tensors, shapes, strides, strict=True)):
        name = names.get(first + position, f"argument {position}")
        kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(shape)}, strides {tuple(stride)}"
        found.append(f"{name}: {kind}{', requires grad' if tensor.requires_grad else ''}")
    leaves = zip(captured.given.leaves, captured.given.is_tensor, strict=True)
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
    found += [f"{each.field}: {each.words}" for each in captured.numbers.expressions]
    found += [": ".join(check).partition(", called with")[0] for check in lowered.imported.checks]
    return tuple(found)


def _frozen(entry: Entry) -> tuple[str, ...]:
    if not entry.is_frozen:
        return ()
    count = len(entry.lowered.captured.module_tensors)
    return (f"{count} parameters and buffers are the tensors that were frozen, unchanged since",)


def program_report(lowered: LoweredCall, direction: str, function: Function, program: Program) -> ProgramReport:
    """The steps of the program compiled from ``function``, with this lowering's names.

    Equal functions share a program, which has the first function's names; they are translated here.
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
    """The row of one step, with the names of ``name_of``."""
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
