"""``visualize``: a graphviz picture of a stage, a Relax function in flat form or a compiled program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autodiff.ir import (
    Constant,
    Expr,
    Function,
    TensorType,
    Tuple,
    TupleGetItem,
    Var,
    bindings,
    library_name,
    op_name,
    results,
    used_vars,
)
from autodiff.ops import having
from bridge.compile import Launch, Program, compile_function
from bridge.lowering import LoweredCall, Stage, attributes, short_op, value_text
from bridge.show.picture import Arrow, Box, Picture, draw
from bridge.show.program_picture import kernel_picture, program_picture

if TYPE_CHECKING:
    import graphviz


_VIEWS = having("view", "plain")
_LIBRARY = frozenset(("relax.matmul", "relax.concat", "relax.take"))
_LONGEST = 27  # characters of a row
_BACKWARD = ("bw", "grad_")


@dataclass(frozen=True)
class FunctionNotes:
    """Annotations of a function for its picture.

    Attributes:
        captured: names of the values saved for the backward.
        recomputed: names of bindings recomputed in the backward.
        display: parameter name → the user's name.
        folded: names of the parameters to write into their consumers' boxes.
        modules: variable → module path.
        clusters: variable → cluster.
        views: whether reshapes and permutations are boxes; otherwise they are part of the arrows.
        training: whether the picture has a forward and a backward side.
        alias: parameter → key of its existing box.
    """

    captured: Collection[str] = ()
    recomputed: Collection[str] = ()
    display: Mapping[str, str] = field(default_factory=dict)
    folded: Collection[str] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    clusters: Mapping[str, str] = field(default_factory=dict)
    views: bool = False
    training: bool = False
    alias: Mapping[str, str] = field(default_factory=dict)


def function_picture(function: Function, title: str, reading: FunctionNotes) -> Picture:
    """One function as a picture."""
    picture = Picture(title)
    add_function(picture, function, reading)
    return picture


def add_function(picture: Picture, function: Function, reading: FunctionNotes, *, prefix: str = "") -> None:
    """Adds a function's boxes and arrows; their keys start with ``prefix``."""
    _Painter(picture, function, reading, prefix).paint()


class _Painter:
    """Adds a function's boxes and arrows to a picture."""

    def __init__(self, picture: Picture, function: Function, reading: FunctionNotes, prefix: str) -> None:
        self.picture, self.function, self.reading, self.prefix = picture, function, reading, prefix
        self.body = list(bindings(function))
        self.value_of = dict(self.body)
        self.returned = {result.name for result in results(function) if isinstance(result, Var)}
        self.params = {param.name for param in function.params}
        floats = Counter(str(var.ty.dtype) for var, _ in self.body if isinstance(var.ty, TensorType))
        self.usual = floats.most_common(1)[0][0] if floats else ""
        self.upward = self._upward()
        #: A backward without its forward: its inputs are drawn below their consumers, as its grad_outs are.
        self.alone = not reading.alias and all(var.name in self.upward for var, _ in self.body)
        self.boxed = {var.name for var, value in self.body if not self._is_folded_view(var, value)}
        self.gradient_of = self._gradients()
        self.labelled: set[tuple[str, str]] = set()

    def _upward(self) -> set[str]:
        """Names of the backward's values: named so, dependent on a grad_out, or recomputed; empty outside training."""
        found = {param.name for param in self.function.params if param.name.startswith("grad_out_")}
        for var, value in self.body:
            if var.name.startswith(_BACKWARD) or any(used.name in found for used in used_vars(value)):
                found.add(var.name)
        return found | set(self.reading.recomputed) if self.reading.training else set()

    def paint(self) -> None:
        for param in self.function.params:
            if param.name not in self.reading.folded and param.name not in self.reading.alias:
                self._input(param)
        for var, value in self.body:
            if not self._is_folded_view(var, value):
                self._operation(var, value)
        for index, result in enumerate(results(self.function)):
            self._result(index, result)

    def _is_folded_view(self, var: Var, value: Expr) -> bool:
        if self.reading.views or var.name in self.returned or var.name in self.reading.captured:
            return False
        return op_name(value) in _VIEWS or isinstance(value, TupleGetItem | Var)

    def _input(self, param: Var) -> None:
        kind = "captured" if param.name in self.reading.captured else "input"
        name = self.reading.display.get(param.name, param.name)
        upward = self.alone or param.name in self.upward
        self.picture.add(Box(self._key(param.name), name, kind, (self._type(param.ty),), upward=upward))

    def _operation(self, var: Var, value: Expr) -> None:
        """Adds an operator's box, and the arrows from its arguments; folded parameters are rows of the box."""
        name = var.name
        upward = name in self.upward
        rows = _attribute_rows(var, value)
        sources: list[Expr] = []
        for arg in _arguments(value):
            base, how = self._base(arg)
            if isinstance(base, Var) and base.name not in self.reading.folded:
                sources.append(arg)
            elif isinstance(base, Var):
                rows.append(_short(self.reading.display.get(base.name, base.name), keep_end=True) + how)
            elif isinstance(base, Constant):
                rows.append(value_text(base))
        kind = self._kind(name, upward)
        double = op_name(value) in _LIBRARY or library_name(value) is not None
        module = self.reading.modules.get(name, "")
        if name in self.gradient_of:
            rows += ["gradient of", _short(self.gradient_of[name], keep_end=True)]
        if any(row.startswith(module) or row.endswith(module) for row in rows):
            module = ""
        if kind == "captured":
            rows.append(self._type(var.ty))
        cluster = self.reading.clusters.get(name, "")
        self.picture.add(
            Box(self._key(name), short_op(value), kind, tuple(rows), _short(module, True), upward, double, cluster)
        )
        for arg in sources:
            self._arrow(arg, self._key(name), upward)

    def _kind(self, name: str, upward: bool) -> str:
        if name in self.reading.captured:
            return "captured"
        if name in self.reading.recomputed:
            return "recomputed"
        if upward:
            return "backward"
        return "forward" if self.reading.training else "node"

    def _arrow(self, arg: Expr, head: str, upward: bool) -> None:
        base, how = self._base(arg)
        tail = self._key(base.name)
        if tail not in self.picture.boxes:
            return
        saved = upward and not self.picture.boxes[tail].upward
        label = self._type(arg.ty) + how
        if (tail, label) in self.labelled or (saved and self._type(base.ty) == label):
            label = ""  # one label for all arrows that carry the same value in the same shape
        self.labelled.add((tail, label))
        arrow = Arrow(tail, head, label, saved)
        if arrow not in self.picture.arrows:
            self.picture.arrows.append(arrow)

    def _base(self, arg: Expr) -> tuple[Expr, str]:
        """An argument → its base behind views without a box, and ``" ᵀ"`` if these permute."""
        permuted = False
        while isinstance(arg, Var) and arg in self.value_of and self._is_folded_view(arg, self.value_of[arg]):
            value = self.value_of[arg]
            permuted ^= op_name(value) == "relax.permute_dims"
            arg = value if isinstance(value, Var) else _arguments(value)[0]
        return arg, " ᵀ" if permuted else ""

    def _gradients(self) -> dict[str, str]:
        """Result name → parameter's name, for gradients of folded parameters, which are named in the result's box."""
        owners = {name: name.removeprefix("grad_") for name in self.returned if name.startswith("grad_")}
        return {
            name: self.reading.display.get(owner, owner)
            for name, owner in owners.items()
            if owner in self.reading.folded and name in self.boxed
        }

    def _result(self, index: int, result: Expr) -> None:
        """Adds a result's box, except for saved intermediates and for gradients named in their operator's box."""
        if not isinstance(result, Var) or result.name in self.gradient_of:
            return
        name = result.name
        if name in self.params:
            title = f"result {index}"
        elif name.startswith("grad_"):
            owner = name.removeprefix("grad_")
            title = f"gradient of {self.reading.display.get(owner, owner)}"
        elif name in self.reading.captured and index >= self._num_outputs():
            return
        else:
            title = f"output {index}"
        key = f"{self.prefix}result {index}"
        upward = name in self.upward
        self.picture.add(Box(key, _short(title, True), "result", (self._type(result.ty),), upward=upward))
        base, _ = self._base(result)
        if isinstance(base, Var) and self._key(base.name) in self.picture.boxes:
            self.picture.arrows.append(Arrow(self._key(base.name), key, ""))

    def _num_outputs(self) -> int:
        """Number of results without the saved intermediates at the end."""
        names = [result.name if isinstance(result, Var) else "" for result in results(self.function)]
        count = len(names)
        while count and names[count - 1] in self.reading.captured:
            count -= 1
        return max(count, 1)

    def _key(self, name: str) -> str:
        return self.reading.alias.get(name, f"{self.prefix}{name}")

    def _type(self, ty: object) -> str:
        if not isinstance(ty, TensorType):
            return ""
        extents = "x".join(str(int(extent)) for extent in ty.shape) or "scalar"
        return extents if str(ty.dtype) == self.usual else f"{ty.dtype} {extents}"


def _arguments(value: Expr) -> list[Expr]:
    """Tensor arguments, tuples flattened."""
    if isinstance(value, TupleGetItem):
        return [value.tuple_value]
    if isinstance(value, Var | Constant):
        return [value]
    args = value.fields if isinstance(value, Tuple) else value.args
    found: list[Expr] = []
    for arg in args:
        if isinstance(arg, Tuple):
            found += arg.fields
        elif isinstance(arg, Var) or (isinstance(arg, Constant) and isinstance(arg.ty, TensorType)):
            found.append(arg)
    return found


def _attribute_rows(var: Var, value: Expr) -> list[str]:
    if op_name(value) == "relax.astype":
        return [str(var.ty.dtype)]
    held = {name: text for name, text in attributes(value).items() if name not in ("dtype", "out_dtype")}
    keeps = held.pop("keepdims", "False")
    line = ", ".join(f"{name}={text}" for name, text in held.items()) + (", kept" if keeps == "True" else "")
    return [_short(line)] if line else []


def _short(text: str, keep_end: bool = False) -> str:
    if len(text) <= _LONGEST:
        return text
    return "…" + text[1 - _LONGEST :] if keep_end else text[: _LONGEST - 1] + "…"


SPLIT = "split"


def visualize(
    what: LoweredCall | Stage | Function | Program,
    stage: str | None = None,
    *,
    kernel: str | None = None,
    kernels: bool = False,
    views: bool = False,
    legend: bool = True,
) -> graphviz.Digraph:
    """Implements :func:`bridge.visualize`."""
    if isinstance(what, LoweredCall):
        picture = _lowered(what, stage, views, kernels)
    elif isinstance(what, Program):
        picture = program_picture(what) if kernel is None else kernel_picture(what, kernel)
    elif isinstance(what, Stage):
        picture = function_picture(what.function, what.provenance, _plain(what.function, views))
    elif isinstance(what, Function):
        picture = function_picture(what, "", _plain(what, views))
    else:
        raise TypeError(
            f"visualize: wanted a Lowered, a Stage, a Relax function or a Program, got {type(what).__name__}"
        )
    return draw(picture, legend=legend)


def _plain(function: Function, views: bool) -> FunctionNotes:
    names = [param.name for param in function.params]
    training = any(name.startswith("grad_out_") for name in names)
    folded = [name for name in names if name.startswith("p_")]
    return FunctionNotes(folded=folded, views=views, training=training)


def _lowered(lowered: LoweredCall, stage: str | None, views: bool, kernels: bool) -> Picture:
    """The picture of a stage, or of forward and backward together (``"split"``)."""
    if stage is None:
        stage = "cleaned" if lowered.plan else "forward"
    origins = lowered.origins()
    tensors = lowered.captured.module_tensors
    params = lowered["imported"].function.params
    display = {param.name: spec.name for param, spec in zip(params, tensors, strict=False)}
    plan = lowered.plan
    recomputed = set(plan.recomputed) if plan else set()
    captured = {saved.name for saved in plan.saved_tensors} if plan else set()

    def reading(again: set[str], clusters: dict[str, str], alias: dict[str, str] | None = None) -> FunctionNotes:
        return FunctionNotes(
            captured=captured,
            recomputed=again,
            display=display,
            folded=set(display),
            modules={name: origin.module for name, origin in origins.items()},
            clusters=clusters,
            views=views,
            training=plan is not None,
            alias=alias or {},
        )

    name = lowered.captured.module_name
    if stage != SPLIT:
        function = lowered[stage].function
        again = recomputed if stage == "split backward" else set()
        picture = Picture(f"{name}: {lowered[stage].provenance}")
        add_function(picture, function, reading(again, _groups(picture, function, stage) if kernels else {}))
    elif plan is None:
        raise KeyError("nothing requires grad: there is no split")
    else:
        picture = Picture(f"{name}: forward and backward, {plan.strategy}")
        forward, backward = lowered.forward, lowered.backward
        groups = [_groups(picture, f, d) if kernels else {} for f, d in ((forward, "forward"), (backward, "backward"))]
        add_function(picture, forward, reading(set(), groups[0]), prefix="forward/")
        names = [param.name for param in backward.params]
        alias = {name: f"forward/{name}" for name in names if f"forward/{name}" in picture.boxes}
        add_function(picture, backward, reading(recomputed, groups[1], alias), prefix="backward/")
    rows = [(spec.name, "x".join(map(str, spec.shape)) or "scalar") for spec in tensors]
    if rows:
        picture.tables.append(("parameters and buffers", rows))
    return picture


def _groups(picture: Picture, function: Function, prefix: str) -> dict[str, str]:
    """Variable → cluster, for variables that share a kernel; a variable of several kernels is in the first one's."""
    program = compile_function(function, name=prefix.replace(" ", "_"))
    own = [var.name for var in function.params] + [var.name for var, _ in bindings(function)]
    name_of = dict(zip(program.variables, own, strict=True))
    found: dict[str, str] = {}
    for index, step in enumerate(program.steps):
        if isinstance(step, Launch):
            fresh = [name_of.get(name, name) for name in step.contents.bindings]
            fresh = [name for name in fresh if name not in found]
            if len(fresh) > 1:
                cluster = f"{prefix} {index} {step.name.split('_')[0]}"
                picture.clusters[cluster] = cluster
                found.update(dict.fromkeys(fresh, cluster))
    return found
