"""A compiled program as rows: its steps, what they fuse, cost and come from; and a kernel's source with its origins."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from bridge.compile import Program
from bridge.lowering import Origin, count, megabytes

__all__ = ["ROOT", "ProgramReport", "StepRow"]

#: The path of the dispatched module itself.
ROOT = "(root)"


@dataclass(frozen=True)
class StepRow:
    """One step.

    Attributes:
        kind: ``"kernel"``, ``"library"`` or ``"view"``.
        what: the operators that it fuses; of a matrix product in generated code also its plan, of a kernel on a GPU
            its launches.
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
        parts = [f"{kinds['loop']} loops"] if kinds["loop"] else []
        parts += [f"{kinds['kernel']} kernels", f"{kinds['library']} library calls" + (f" ({calls})" if calls else "")]
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
        """A kernel's source with the modules and lines that its launches come from; ``kernel``: its name or ``k5``.

        ``form``: as of ``Program.source``. ``KeyError``, ``ValueError`` as ``Program.source``.
        """
        found = [row for row in self.steps if row.kind == "kernel" and kernel in (row.name, row.name.split("_")[0])]
        if not found:
            known = ", ".join(dict.fromkeys(row.name for row in self.steps if row.kind == "kernel"))
            raise KeyError(f"no kernel {kernel!r} in the {self.direction}; there are {known}")
        comment = {"llvm": ";", "cuda": "//", "ptx": "//", "sass": "//"}.get(form, "#")
        lines: list[str] = []
        for row in found:
            lines += [f"{row.name}: step {row.index} of the {self.direction}, {row.what}", *map(str, row.origins)]
        return "\n".join([*(f"{comment} {line}" for line in lines), self.program.source(found[0].name, form)])
