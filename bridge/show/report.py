"""What ``explain`` returns: plain data about a dispatched module, and how it prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bridge.compile import Program
from bridge.lowering.lowered import Lowered
from bridge.lowering.origin import Origin
from bridge.lowering.text import count, megabytes
from partition import Plan

__all__ = ["EntryReport", "ProgramReport", "Report", "StepRow"]

WIDTH = 118
#: The path of the dispatched module itself.
ROOT = "(root)"
_CELL = 34  # characters of a cell in the short form
#: Compile stages as the short form sums them up; every other one is lowering.
_PARTS = {
    "captured": "capture",
    "translate": "kernels",
    "fuse": "kernels",
    "generate": "kernels",
    "build": "LLVM",
    "plan": "kernels",
}
#: Rows of the short form's tables.
FEW_STEPS, FEW_SAVED, FEW_MISSES, FEW_GUARDS = 5, 6, 5, 5


@dataclass(frozen=True)
class StepRow:
    """One step.

    Attributes:
        kind: ``"kernel"``, ``"library"`` or ``"view"``.
        what: the operators that it fuses.
        origins: of what it computes, in order, each once.
    """

    index: int
    kind: str
    name: str
    what: str
    outputs: tuple[str, ...]
    flops: int
    bytes: int
    origins: tuple[Origin, ...]

    @property
    def modules(self) -> str:
        """The module paths in which the step's operations stand."""
        return ", ".join(dict.fromkeys(origin.module or ROOT for origin in self.origins))


@dataclass(frozen=True)
class ProgramReport:
    """One program of an entry: its steps as the entry's module knows them."""

    direction: str
    program: Program = field(repr=False)
    steps: tuple[StepRow, ...]

    @property
    def flops(self) -> int:
        return sum(step.flops for step in self.steps)

    @property
    def bytes(self) -> int:
        return sum(step.bytes for step in self.steps)

    def summary(self, full: bool = False) -> str:
        """One line: how many steps of which kind, arithmetic and traffic."""
        kinds = Counter(step.kind for step in self.steps)
        library = Counter(step.name for step in self.steps if step.kind == "library")
        named = library.most_common(None if full else 3)
        calls = " ".join(f"{number} {name}" for name, number in named) + " ..." * (len(named) < len(library))
        parts = [f"{kinds['kernel']} kernels", f"{kinds['library']} library calls" + (f" ({calls})" if calls else "")]
        cost = f"{count(self.flops)}flop, {megabytes(self.bytes)} moved, arena {megabytes(self.program.arena_bytes)}"
        return f"{self.direction:<8}  {', '.join(parts)}; {cost}"

    def table(self) -> list[tuple[str, ...]]:
        """A row per step: number, kind, name, flops, bytes, module, operators."""
        return [
            (
                f"{self.direction[0]}{step.index}",
                step.name.split("_")[0] if step.kind == "kernel" else step.name,
                count(step.flops).strip(),
                megabytes(step.bytes),
                step.modules,
                step.what,
            )
            for step in self.steps
            if step.kind != "view"
        ]

    def source(self, kernel: str, form: str = "tvmscript") -> str:
        """A kernel's source with the modules and lines that it comes from; ``kernel``: its name, or its ``k5``.

        ``form``: ``"tvmscript"``, ``"llvm"`` or ``"asm"``. ``KeyError``, ``ValueError`` as ``Program.source``.
        """
        found = [row for row in self.steps if row.kind == "kernel" and kernel in (row.name, row.name.split("_")[0])]
        if not found:
            known = ", ".join(row.name for row in self.steps if row.kind == "kernel")
            raise KeyError(f"no kernel {kernel!r} in the {self.direction}; there are {known}")
        (row,) = found
        comment = {"tvmscript": "#", "llvm": ";", "asm": "#"}.get(form, "#")
        lines = [f"{row.name}: step {row.index} of the {self.direction}, {row.what}", *map(str, row.origins)]
        return "\n".join([*(f"{comment} {line}" for line in lines), self.program.source(row.name, form)])


@dataclass(frozen=True)
class EntryReport:
    """One entry.

    Attributes:
        title: the call, hits and compile seconds.
        guards: what a call must have to run here, in words.
        programs: forward, then backward if there is one.
        plan: what is saved for the backward, with a reason each; ``None`` where nothing requires grad.
        kept_bytes: captures and random draws: what the entry keeps from forward to backward.
        seconds: compile time by stage.
        lowered: every stage, for a closer look.
    """

    title: str
    guards: tuple[str, ...]
    programs: tuple[ProgramReport, ...]
    plan: Plan | None
    kept_bytes: int
    seconds: Mapping[str, float]
    lowered: Lowered = field(repr=False)

    def lines(self, full: bool) -> list[str]:
        """The entry as text."""
        out = [self.title]
        guards = self.guards if full else self.guards[:FEW_GUARDS]
        out += [_cut(f"  guard     {guard}", full) for guard in guards] + _more(self.guards, guards, "guards")
        out.append(f"  compiled  {1e3 * sum(self.seconds.values()):.0f} ms: {self._spent(full)}")
        for program in self.programs:
            out.append(_cut(f"  {program.summary(full)}", full))
        rows = [row for program in self.programs for row in program.table()]
        if not full:
            steps = [step for program in self.programs for step in program.steps if step.kind != "view"]
            order = sorted(range(len(steps)), key=lambda i: -steps[i].bytes)[:FEW_STEPS]
            out.append(f"  the {len(order)} steps that move most, of {len(rows)}")
            rows = [rows[i] for i in order]
        out += _table(("step", "name", "flop", "moved", "module", "operators"), rows, full, right=(2, 3))
        return out + self._saved(full)

    def _spent(self, full: bool) -> str:
        parts: dict[str, float] = {}
        for name, seconds in self.seconds.items():
            part = name if full else _PARTS.get(name, "lowering")
            parts[part] = parts.get(part, 0.0) + seconds
        return ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in parts.items())

    def _saved(self, full: bool) -> list[str]:
        if self.plan is None:
            return ["  nothing requires grad: forward only, nothing is saved"]
        plan = self.plan
        share = f", {plan.bytes / plan.save_all_bytes:.2f} of save_all" if plan.save_all_bytes else ""
        out = [
            f"  saved     {len(plan.captures)} captures, {megabytes(plan.bytes)} ({plan.strategy}{share}); draws "
            f"{megabytes(self.kept_bytes - plan.bytes)}; {len(plan.recomputed)} operations computed again"
        ]
        rows = saved_rows(plan)
        if full:
            out += _table(("value", "module", "tensor", "bytes", "kind", "why"), rows, full, right=(3,))
        else:
            rows = rows[: min(FEW_SAVED, len(plan.captures))]
            table = _table(("value", "module", "tensor", "bytes"), [row[:4] for row in rows], full, right=(3,))
            out += table[:1]
            for line, row in zip(table[1:], rows, strict=True):
                out += [line, _cut(f"        {row[-1]}", full)]
            left = _ordered(plan)[len(rows) : len(plan.captures)]
            if left:
                rest = megabytes(sum(saved.bytes for saved in left))
                out.append(f"    ... {len(left)} more captures, {rest}; and {len(plan.free)} values that live anyway")
        return out + [f"  note: {note}" for note in plan.notes]


def _ordered(plan: Plan) -> list:
    return [*sorted(plan.captures, key=lambda saved: -saved.bytes), *plan.free]


def saved_rows(plan: Plan) -> list[tuple[str, ...]]:
    """A row per saved tensor, largest capture first: value, module, shape with dtype, bytes, kind, reason."""
    return [
        (
            saved.name,
            saved.module_path or ROOT,
            f"{saved.dtype} {'x'.join(map(str, saved.shape)) or 'scalar'}",
            f"{saved.bytes:,}",
            saved.kind,
            saved.reason,
        )
        for saved in _ordered(plan)
    ]


@dataclass(frozen=True)
class Report:
    """A dispatched module: what runs where, what is saved and why. ``print`` it, or ``print(report.full)``.

    Attributes:
        module_name: class of the module.
        hits: calls that ran in TVM.
        misses: calls that ran eager, by reason.
        entries: a report per compiled call.
        complete: whether printing shows everything.
    """

    module_name: str
    hits: int
    misses: Counter[str]
    entries: tuple[EntryReport, ...]
    complete: bool = False

    @property
    def full(self) -> Report:
        """The same report that prints every step, guard, saved tensor and miss."""
        return replace(self, complete=True)

    def head(self) -> str:
        """One line of totals."""
        entries = f"{len(self.entries)} {'entry' if len(self.entries) == 1 else 'entries'}"
        return f"{self.module_name}: {entries}, {self.hits} hits, {sum(self.misses.values())} misses"

    def __str__(self) -> str:
        lines = [self.head()]
        for entry in self.entries:
            lines += entry.lines(self.complete)
        misses = self.misses.most_common(None if self.complete else FEW_MISSES)
        lines += [_cut(f"miss: {number} x {reason}", self.complete) for reason, number in misses]
        lines += _more(list(self.misses), misses, "reasons")
        if not self.complete:
            lines.append("everything: print(report.full); a kernel: report.entries[0].programs[0].source('k0')")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from bridge.show.report_html import report_html

        return report_html(self)


def _more(everything: object, shown: object, what: str) -> list[str]:
    left = len(everything) - len(shown)
    return [f"    ... {left} more {what}"] if left else []


def _cut(line: str, full: bool) -> str:
    return line if full or len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _tail(cell: str) -> str:
    return cell if len(cell) <= _CELL else "..." + cell[3 - _CELL :]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]], full: bool, right: tuple[int, ...]) -> list[str]:
    if not rows:
        return []
    if not full:
        last = len(head) - 1
        rows = [tuple(cell if i == last else _tail(cell) for i, cell in enumerate(row)) for row in rows]
    everything = [head, *rows]
    widths = [max(len(row[column]) for row in everything) for column in range(len(head))]
    widths[-1] = 0
    lines = []
    for row in everything:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append(_cut(f"    {'  '.join(cells)}".rstrip(), full))
    return lines
