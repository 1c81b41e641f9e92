"""A compiled program → a picture of its steps or of one kernel, or a table of its steps.

A step has the operators that it fuses, its cost, and its origins in the user's code.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from bridge.compile import CallLibrary, Launch, MakeView, Operation, Program, RunLoop
from bridge.lowering import Origin, count, megabytes
from bridge.show.picture import Arrow, Box, Picture

_PER_ROW = 4  # operators on one line of a kernel's box
_WEIGHT_LIKE = "p_"
_HOW = {"~": " broadcast", "^": " ᵀ", "/": " in part"}  # by the marks of :class:`.contents.Operation`
_MARKS = "".join(_HOW)


def program_picture(program: Program) -> Picture:
    """A picture with a box per step, in the order of execution; views are part of the arrows."""
    steps = [step for step in program.steps if isinstance(step, Launch | CallLibrary | RunLoop)]
    flops = sum(step.contents.flops for step in steps)
    moved = sum(step.contents.bytes for step in steps)
    title = f"program {program.name}: {len(steps)} steps, {count(flops)}flop, {megabytes(moved)} moved"
    picture = Picture(title)
    shapes = _shapes(program)
    maker: dict[str, str] = {}
    params = {value.name for value in program.layout.params}
    for index, step in enumerate(steps):
        key = f"step {index}"
        small = [name for name in step.contents.reads if name.startswith(_WEIGHT_LIKE) and name in params]
        picture.add(_box(key, index, step, small))
        for name in step.contents.reads:
            if name in small:
                continue
            if name not in maker:
                maker[name] = f"input {name}"
                picture.add(Box(maker[name], name, "input", (shapes.get(name, ""),)))
            picture.arrows.append(Arrow(maker[name], key, shapes.get(name, "")))
        maker.update(dict.fromkeys(step.outputs, key))
    for name in dict.fromkeys(program.results):
        if name in maker and not _is_gradient(name):
            title = name.replace("grad_", "gradient of ") if name.startswith("grad_") else name
            picture.add(Box(f"result {name}", title, "result", (shapes.get(name, ""),)))
            picture.arrows.append(Arrow(maker[name], f"result {name}", ""))
    return picture


def _box(key: str, index: int, step: Launch | CallLibrary | RunLoop, small: list[str]) -> Box:
    cost = f"{count(step.contents.flops)}flop, {megabytes(step.contents.bytes)}"
    rows = [name.removeprefix(_WEIGHT_LIKE) for name in small]
    for name in filter(_is_gradient, step.outputs):
        rows.append(f"gradient of {name.removeprefix('grad_' + _WEIGHT_LIKE)}")
    if isinstance(step, CallLibrary):
        return Box(key, f"{index}  {step.name}", "library", (*rows, cost))
    if isinstance(step, RunLoop):
        inside = [each.name.removeprefix("loop") for each in step.steps if not isinstance(each, MakeView)]
        title = f"{index}  {step.name} of {step.length} steps"
        return Box(key, title, "kernel", (*inside, *rows, cost))
    words = [operation.op.removeprefix("relax.").removeprefix("nn.") for operation in step.contents.operations]
    lines = [" · ".join(words[i : i + _PER_ROW]) for i in range(0, len(words), _PER_ROW)]
    return Box(key, f"{index}  {step.name.split('_')[0]}", "kernel", (*lines, *rows, cost))


def _shapes(program: Program) -> dict[str, str]:
    made = {
        operation.result: (operation.shape, operation.dtype)
        for step in program.steps
        if isinstance(step, Launch | CallLibrary | RunLoop)
        for operation in step.contents.operations
    }
    made.update({value.name: (value.shape, value.dtype) for value in program.layout.params})
    usual = Counter(dtype for _, dtype in made.values() if "float" in dtype).most_common(1)
    return {name: _shape(shape, dtype, usual[0][0] if usual else "") for name, (shape, dtype) in made.items()}


def _shape(shape: tuple[int, ...], dtype: str, usual: str) -> str:
    text = "x".join(map(str, shape)) or "scalar"
    return text if dtype == usual else f"{dtype} {text}"


def _is_gradient(name: str) -> bool:
    """Whether a result is the gradient of a parameter of the module, which is shown in its step's box."""
    return name.startswith(f"grad_{_WEIGHT_LIKE}")


def kernel_picture(program: Program, kernel: str) -> Picture:
    """A picture of the operations in a kernel's first launch. ``KeyError`` lists the kernels if the name is unknown."""
    steps = [step for step in program.steps if isinstance(step, Launch)]
    found = [step for step in steps if kernel in (step.name, step.name.split("_")[0])]
    if not found:
        known = ", ".join(dict.fromkeys(step.name for step in steps))
        raise KeyError(f"no kernel {kernel!r} in {program.name}; there are {known}")
    step = found[0]
    picture = Picture(
        f"{step.name}: {count(step.contents.flops)}flop, {megabytes(step.contents.bytes)} read and written"
    )
    shapes = _shapes(program)
    for name in step.contents.reads:
        picture.add(Box(name, name.removeprefix(_WEIGHT_LIKE), "input", (shapes.get(name, ""),)))
    usual = Counter(operation.dtype for operation in step.contents.operations).most_common(1)[0][0]
    shapes |= {each.result: _shape(each.shape, each.dtype, usual) for each in step.contents.operations}
    for operation in step.contents.operations:
        _operation(picture, operation, shapes)
    for name in step.outputs:
        picture.add(Box(f"result {name}", name, "result", (shapes.get(name, ""),)))
        picture.arrows.append(Arrow(name, f"result {name}", ""))
    return picture


def _operation(picture: Picture, operation: Operation, shapes: dict[str, str]) -> None:
    numbers = [name for name in operation.operands if name.rstrip(_MARKS) not in picture.boxes]
    picture.add(Box(operation.result, operation.op, "node", tuple(numbers), operation.binding))
    for name in dict.fromkeys(operation.operands):
        base = name.rstrip(_MARKS)
        if base in picture.boxes and base != operation.result:
            how = _HOW.get(name[-1], "")
            picture.arrows.append(Arrow(base, operation.result, shapes.get(base, "") + how))


#: The path of the dispatched module itself.
ROOT = "(root)"


@dataclass(frozen=True)
class StepRow:
    """One step.

    Attributes:
        kind: ``"kernel"``, ``"library"``, ``"loop"`` or ``"view"``.
        what: the fused operators; for a generated matrix product also its plan, for a GPU kernel its launches.
        origins: of its operations, in order, each once.
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
        """The module paths of the step's operations."""
        return ", ".join(dict.fromkeys(origin.module or ROOT for origin in self.origins))


@dataclass(frozen=True)
class ProgramReport:
    """One program of an entry; its steps have the names of the entry's module."""

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
        """One line: number of steps by kind, flops, bytes moved."""
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
        """A kernel's source with the modules and lines of its launches; ``kernel``: its name, or ``k5``.

        ``form``, and errors: as for ``Program.source``.
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
