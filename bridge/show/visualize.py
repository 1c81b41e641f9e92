"""``visualize``: a graphviz picture of a stage, a Relax function or a compiled program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autodiff.ir import Function, bindings
from bridge.compile import Launch, Program, compile_function
from bridge.lowering import LoweredCall, Stage
from bridge.show.picture import Picture, draw
from bridge.show.program_picture import kernel_picture, program_picture
from bridge.show.relax_picture import FunctionNotes, add_function, function_picture

if TYPE_CHECKING:
    import graphviz


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
    captured = {saved.name for saved in plan.captures} if plan else set()

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
