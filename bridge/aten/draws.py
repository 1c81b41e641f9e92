"""Random draws → parameters that the caller draws, or draws inside the program from a generator's state.

Chained draws (host): draws with computed parameters, and all later ones → library calls, each after the previous one.
Draws with known parameters are made before a program runs. A draw on the host like ``torch.bernoulli(p)`` with a
computed p is made inside, and how far it moves the generator may depend on p; so all later draws of eager are made
inside as well. Each call takes the generator's state and returns the next: a pure function, which draws the same when
recomputed. The first state is an input of the program. The last state is a result, which the generator gets once the
call has succeeded.

In-kernel Philox draws at an offset (GPU): draws with computed parameters → library calls, each from a state.
The distance by which this draw moves a GPU's generator depends on no number: the eager run measures it; for dynamic
sizes a rule gives it for attention. So the state before each draw is known before the program runs, and is an input of
the program; all other draws are made before it, in eager's order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from tvm import relax

from autodiff.extents import Dim, Extent, same, sample_of
from autodiff.ir import Expr, ShapeExpr, StringImm, TensorType, TupleType, Var
from autodiff.library import GENERATOR_STATE
from autodiff.library import call as library_call
from bridge.aten.complex_value import part_type
from bridge.aten.registry import ELEMENT_TYPES, UnsupportedUse, relax_dtype
from bridge.base.devices import HOST
from bridge.base.errors import Unsupported
from bridge.capture import Captured, Draw, Parameter

_PLACE = -1
"""The state's place among the carries of a loop."""


class ChainedDraws:
    """The draws of one function from the first one with computed parameters on."""

    def __init__(self, importer: Any, draws: Sequence[Draw]):
        self._importer = importer
        self._draws = draws
        self._first = next((index for index, draw in enumerate(draws) if draw.is_computed), len(draws))
        self._next = self._first
        self._state: Expr | None = None
        self._loop: tuple[int, Dim, bool] | None = None
        self._carried = False

    def enter(self, loop: int, length: Dim, reverse: bool) -> None:
        """A step of a loop begins: if it draws, it carries the state."""
        self._loop = loop, length, reverse

    def leave(self) -> None:
        """The step ends."""
        if self._carried:
            numbers = map(relax.prim_value, (self._loop[0], _PLACE))
            self._state = self._importer.emit(library_call("loop_last", [self._state, *numbers], self._state.ty))
        self._loop, self._carried = None, False

    def is_chained(self, index: int) -> bool:
        """Whether one of eager's draws is made inside the program."""
        return index >= self._first

    def make(self, index: int, tensors: Sequence[Expr]) -> Expr:
        """The draw of that index, after all of eager's earlier ones, in the type in which eager draws it.

        ``UnsupportedUse`` if it cannot be made in eager's order or layout.
        """
        if index < self._next:
            raise UnsupportedUse("a random draw that the graph makes in another order than eager")
        self._skip_to(index)
        self._next = index + 1
        return self._emit(index, tensors)

    def last_state(self) -> list[Expr]:
        """The generator's state after all of eager's draws, uint8; empty where no draw is made inside the program."""
        if self._first == len(self._draws):
            return []
        self._skip_to(len(self._draws))
        return [self._state]

    def _skip_to(self, index: int) -> None:
        """Makes eager's draws before ``index`` that the graph does not use."""
        for unused in range(self._next, index):
            if self._draws[unused].is_computed:
                drawn = f"a random draw ({self._draws[unused].op}) whose distribution is computed"
                raise UnsupportedUse(f"{drawn}, and whose result is unused", "leave the draw out")
            self._emit(unused, ())

    def _emit(self, index: int, tensors: Sequence[Expr]) -> Expr:
        draw, importer = self._draws[index], self._importer
        if draw.device != HOST or importer.captured.device != HOST:
            drawn = f"a random draw ({draw.op}) on {draw.device}"
            raise UnsupportedUse(f"{drawn} where the distribution of one on the host is computed")
        check_parameters(draw, tensors)
        if self._state is None:
            size = torch.default_generator.get_state().numel()
            self._state = Var(f"draw_{self._first}", TensorType((size,), "uint8"))
            importer.draw_params[self._first] = self._state
        if self._loop is not None and not self._carried:
            loop, length, reverse = self._loop
            numbers = map(relax.prim_value, (loop, _PLACE, length, int(reverse)))
            self._state = importer.emit(library_call("loop_first", [self._state, *numbers], self._state.ty))
            self._carried = True
        types = TupleType([drawn_type(draw), self._state.ty])
        description, sizes = described_draw(draw)
        args = [StringImm(draw.op), StringImm(description), self._state, *tensors]
        args += [ShapeExpr(sizes)] if sizes else []
        made = importer.emit(library_call("draw", args, types))
        self._state = importer.item(made, 1)
        return importer.item(made, 0)


def check_parameters(draw: Draw, tensors: Sequence[Expr]) -> None:
    """``UnsupportedUse`` where a draw's parameters cannot have eager's memory layout."""
    parameters = [arg for arg in draw.args if isinstance(arg, Parameter)]
    if len(parameters) != len(tensors):
        raise UnsupportedUse("a random draw with other parameters than eager's")
    if not all(_is_plain(parameter) for parameter in parameters):
        raise UnsupportedUse("a random draw whose parameters overlap in memory", "call .contiguous() on them")


def drawn_type(draw: Draw) -> TensorType:
    """The type in which eager draws."""
    if draw.dtype not in ELEMENT_TYPES:
        raise UnsupportedUse(f"random numbers of type {draw.dtype}")
    return TensorType(draw.shape, ELEMENT_TYPES[draw.dtype])


def given_type(draw: Draw) -> TensorType:
    """The type of the program's input for a draw that torch makes before the call."""
    if draw.dtype.is_complex:
        return TensorType((*draw.shape, 2), relax_dtype(part_type(draw.dtype)))
    return TensorType(draw.shape, relax_dtype(draw.dtype))


def _is_plain(parameter: Parameter) -> bool:
    """Whether the elements of a parameter do not overlap, except along expanded axes, for all sizes."""
    dims = zip(parameter.shape, parameter.stride, strict=True)
    dims = [(extent, stride) for extent, stride in dims if not same(extent, 1) and not same(stride, 0)]
    span: Dim = 1
    for extent, stride in sorted(dims, key=lambda dim: (sample_of(dim[1]), sample_of(dim[0]))):
        is_static = isinstance(stride, int) and isinstance(span, int)
        if not (stride >= span if is_static else same(stride, span)):
            return False
        span = span + (extent - 1) * stride if is_static and isinstance(extent, int) else stride * extent
    return True


def described_draw(draw: Draw) -> tuple[str, list[Extent]]:
    """Arguments, layout of the result and of the parameters, as JSON: see ``draw`` in :mod:`autodiff.library`.

    ``{"$size": i}`` stands for the i-th of the returned extents.
    """
    count = 0
    sizes: list[Extent] = []

    def written(value: Any) -> Any:
        nonlocal count
        if isinstance(value, Parameter):
            count += 1
            return {
                "$tensor": count - 1,
                "stride": written(value.stride),
                "dtype": str(value.dtype).removeprefix("torch."),
            }
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device | torch.layout | torch.memory_format):
            return None
        if isinstance(value, Extent):
            sizes.append(value)
            return {"$size": len(sizes) - 1}
        return [written(each) for each in value] if isinstance(value, tuple | list) else value

    text = json.dumps(
        {
            "args": [written(arg) for arg in draw.args],
            "kwargs": {name: written(value) for name, value in draw.kwargs},
            "result": [written(draw.shape), written(draw.stride), str(draw.dtype).removeprefix("torch.")],
        },
        sort_keys=True,
    )
    return text, sizes


def unplaced(captured: Captured) -> list[Unsupported]:
    """The in-kernel draws whose generator offset cannot be known before the call, used or not."""
    draws, reason = [draw for draw in captured.draws if draw.is_placed], None
    if any(draw.is_computed for draw in captured.draws):
        reason = "draws inside of the program, as does one on the host whose distribution is computed"
    else:
        draws = [draw for draw in captured.draws if draw.is_placed or draw.is_attention_mask]
        draws = [draw for draw in draws if draw.advance is None]
        reason = "draws inside of a kernel that does not tell how far it moves the generator"
        if captured.sizes.scope is not None:
            reason = (
                "draws inside of a kernel, and how far that moves the generator is known for the sample's sizes alone"
            )
    return [
        Unsupported(op, f"{captured.module_name}.forward", reason) for op in dict.fromkeys(each.op for each in draws)
    ]


def state_before(importer: Any, node: fx.Node) -> tuple[Var, Dim]:
    """The input with the generator's state before the in-kernel draw at a node, and how far the draw moves it.

    ``UnsupportedUse`` if eager made no draw there.
    """
    index = importer.captured.names.draws.get(node.name)
    if index is None or not importer.captured.draws[index].is_placed:
        raise UnsupportedUse("a random draw that was not observed in eager")
    state = importer.draw_params.setdefault(index, Var(f"draw_{index}", TensorType(*GENERATOR_STATE)))
    advance = importer.captured.draws[index].advance
    return state, 0 if advance is None else advance


def draw_at_offset(importer: Any, node: fx.Node, tensors: Sequence[Expr]) -> Expr:
    """A GPU's draw with computed parameters, in eager's type; ``UnsupportedUse`` for a layout that it cannot have."""
    state, advance = state_before(importer, node)
    draw = importer.captured.draws[importer.captured.names.draws[node.name]]
    check_parameters(draw, tensors)
    description, _ = described_draw(draw)
    args = [StringImm(draw.op), StringImm(description), relax.prim_value(advance), state, *tensors]
    return importer.emit(library_call("draw_at_offset", args, drawn_type(draw)))
