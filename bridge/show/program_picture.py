"""Pictures of a compiled program: its steps with what each kernel fuses, or the inside of one kernel."""

from __future__ import annotations

from collections import Counter

from bridge.compile import CallLibrary, Launch, MakeView, Operation, Program, RunLoop
from bridge.lowering import count, megabytes
from bridge.show.picture import Arrow, Box, Picture

__all__ = ["kernel_picture", "program_picture"]

_PER_ROW = 4  # operators on one line of a kernel's box
_WEIGHT_LIKE = "p_"
_HOW = {"~": " broadcast", "^": " ᵀ", "/": " in part"}  # by the marks of :class:`.contents.Operation`
_MARKS = "".join(_HOW)


def program_picture(program: Program) -> Picture:
    """A box per step in the order of execution; views are part of the arrows."""
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
    """Whether a result is the gradient of a parameter of the module: its step says so."""
    return name.startswith(f"grad_{_WEIGHT_LIKE}")


def kernel_picture(program: Program, kernel: str) -> Picture:
    """The operations of a kernel's first launch. ``KeyError`` names the kernels if there is none of that name."""
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
