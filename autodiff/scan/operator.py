"""Scan: a body that runs once for each step of a sequence, as a pure Relax call, and as data.

``library.scan(options, initial carries.., xs.., constants..) -> tuple (last carries.., ys..)``. The body is a function
in flat form, ``(carries.., xs.., constants..) -> (next carries.., ys..)``. It is run ``length`` times: the carries of a
step are the results of the step before, an ``x`` is the step's part of a tensor with the steps in front, and a ``y`` is
stacked into a tensor of this kind. ``reverse`` runs the last part first; ys keep the order of the xs. Every step reads
the constants. The options are JSON with the body in it, so equal scans are equal text, in any process.

Every type of a body is static: it is compiled once, whatever the length. The length may be a symbolic extent; then it
is an argument of the call after the options, which hold no length.
Unrolling: a function with scans -> the same function with their steps one after the other.

Marked loops: a function with one step of a loop between marks -> the same function with scans.

    library.loop_first(first, loop, place, length, reverse)    a carry as the step sees it
    library.loop_part(whole, loop, place)                      the step's part of a tensor with the steps in front
    library.loop_last(next, loop, place)                       the carry after the last step
    library.loop_steps(y, loop, place, length)                 a result of all steps, the steps in front

The values that depend on the first two marks of a ``loop``, and that the last two read, are its body.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax
from tvm.relax import op
from tvm_ffi import structural_equal
from tvm_ffi.serialization import from_json_graph_str

from autodiff import library
from autodiff.body import Scope
from autodiff.extents import Dim, Extent, from_tir
from autodiff.ir import (
    Call,
    Expr,
    Function,
    StringImm,
    TensorType,
    Tuple,
    TupleGetItem,
    TupleType,
    Var,
    bindings,
    build_function,
    dtype,
    library_name,
    results,
    shape,
    substitute,
    used_vars,
    with_outputs,
)

NAME = "library.scan"
"""The library function's name."""


@dataclass(frozen=True)
class Scan:
    """The options of a scan.

    Attributes:
        body: TVM's JSON of the function.
        carries, xs: numbers of carries and xs; the body's further parameters are constants.
        length: the number of steps, at least 1; ``None`` in options if the call has it as an argument.
        reverse: whether the last step comes first.
        gradient: the backward step as JSON data (:mod:`autodiff.scan.reverse`); ``None``: no gradient.
    """

    body: str
    carries: int
    xs: int
    length: Dim
    reverse: bool = False
    gradient: Any = None

    @property
    def function(self) -> Function:
        """The body."""
        return parsed(self.body)

    @property
    def constants(self) -> int:
        """The number of tensors that every step reads."""
        return len(self.function.params) - self.carries - self.xs

    @property
    def options(self) -> str:
        """The options as text, equal for equal scans; without a symbolic length."""
        length = None if isinstance(self.length, Extent) else self.length
        given = {"carries": self.carries, "xs": self.xs, "length": length, "reverse": self.reverse}
        return json.dumps({**given, "gradient": self.gradient, "body": self.body}, sort_keys=True)

    @property
    def type(self) -> TupleType:
        """The type of the call's result."""
        made = results(self.function)
        last = [TensorType(shape(value), dtype(value)) for value in made[: self.carries]]
        return TupleType([*last, *(stacked(self.length, value) for value in made[self.carries :])])


def stacked(length: Dim, value: Expr) -> TensorType:
    """The type of a value stacked over all steps, ``(length, *shape)``."""
    return TensorType((length, *shape(value)), dtype(value))


def body_text(body: Function) -> str | None:
    """A function as JSON that gives the same function back; ``None`` if TVM's JSON cannot hold a literal in it."""
    text = tvm.ir.save_json(body)
    return text if structural_equal(parsed(text), body, map_free_vars=True) else None


@functools.lru_cache(maxsize=64)
def parsed(text: str) -> Function:
    """The function in a text of :func:`body_text`; ``tvm.ir.load_json`` would first try to upgrade older versions."""
    return from_json_graph_str(text)


def scan_call(scan: Scan, tensors: Sequence[Expr]) -> Call:
    """The call, on initial carries, xs with the steps in front, and constants; ``ValueError`` for other types."""
    params = list(scan.function.params)
    if len(tensors) != len(params):
        raise ValueError(f"scan: the body takes {len(params)} tensors, got {len(tensors)}")
    for index, (param, tensor) in enumerate(zip(params, tensors, strict=True)):
        extents = shape(param)
        if scan.carries <= index < scan.carries + scan.xs:
            extents = (scan.length, *extents)
        if (shape(tensor), dtype(tensor)) != (extents, dtype(param)):
            raise ValueError(f"scan: wanted {extents} {dtype(param)} for {param.name}, got {tensor.ty}")
    length = [relax.prim_value(scan.length)] if isinstance(scan.length, Extent) else []
    return library.call("scan", [StringImm(scan.options), *length, *tensors], scan.type)


def is_scan(value: Expr) -> bool:
    """Whether a value is a call of a scan."""
    return library_name(value) == NAME


def scan_of(call: Call) -> tuple[Scan, list[Expr]]:
    """The scan that a call runs, and its tensors; also for a call as a gradient rule gets it."""
    place = next(index for index, arg in enumerate(call.args) if isinstance(arg, StringImm))
    scan, rest = read(str(call.args[place].value)), list(call.args[place + 1 :])
    if scan.length is None:
        scan = dataclasses.replace(scan, length=from_tir(rest.pop(0)))
    return scan, rest


@functools.lru_cache(maxsize=64)
def read(options: str) -> Scan:
    """A call's options as JSON text -> the scan."""
    return Scan(**json.loads(options))


def unroll(func: Function) -> Function:
    """The function without scans, nested scans included; the same object if there are none.

    Safe: the steps are the scan's definition. ``ValueError`` for a scan of symbolic length.
    """
    if not any(is_scan(value) for _, value in bindings(func)):
        return func
    scope = Scope(var.name for var in (*func.params, *(var for var, _ in bindings(func))))
    made: dict[Var, list[Expr]] = {}
    replaced: dict[Var, Expr] = {}
    for var, value in bindings(func):
        value = substitute(value, replaced)
        if is_scan(value):
            made[var] = _steps(value, scope)
        elif isinstance(value, TupleGetItem) and value.tuple_value in made:
            replaced[var] = made[value.tuple_value][value.index]
        else:
            scope.bind(var, value)
    outputs = [replaced.get(output, output) if isinstance(output, Var) else output for output in results(func)]
    return with_outputs(func, scope.body, outputs)


def _steps(call: Call, scope: Scope) -> list[Expr]:
    """The results of a scan, from its steps."""
    scan, tensors = scan_of(call)
    if isinstance(scan.length, Extent):
        raise ValueError(f"a scan of {scan.length} steps, which vary, cannot be unrolled")
    body = unroll(scan.function)
    carries: Sequence[Expr] = tensors[: scan.carries]
    xs, constants = tensors[scan.carries : scan.carries + scan.xs], tensors[scan.carries + scan.xs :]
    ys: dict[int, list[Expr]] = {}
    for step in reversed(range(scan.length)) if scan.reverse else range(scan.length):
        given = [*carries, *(_part(x, step, scope) for x in xs), *constants]
        known: dict[Var, Expr] = dict(zip(body.params, given, strict=True))
        for var, value in bindings(body):
            known[var] = scope.emit(substitute(value, known), var.name)
        after = [known[value] if isinstance(value, Var) else value for value in results(body)]
        carries, ys[step] = after[: scan.carries], after[scan.carries :]
    columns = zip(*(ys[step] for step in range(scan.length)), strict=True)
    return [*carries, *(_stacked(column, scope) for column in columns)]


def _part(x: Expr, step: int, scope: Scope) -> Var:
    value = scope.emit(op.strided_slice(x, [0], [step], [step + 1], [1]), "part")
    return scope.emit(op.reshape(value, shape(x)[1:]), "part")


def _stacked(parts: Sequence[Expr], scope: Scope) -> Var:
    rows = [scope.emit(op.expand_dims(each, 0), "row") for each in parts]
    return scope.emit(op.concat(Tuple(rows), 0), "rows")


_GIVEN, _MADE = ("library.loop_first", "library.loop_part"), ("library.loop_last", "library.loop_steps")


@dataclass
class _Marked:
    """The marks of one loop: by kind and place, the mark's variable and its operand."""

    first: dict[int, tuple[Var, Expr]] = field(default_factory=dict)
    part: dict[int, tuple[Var, Expr]] = field(default_factory=dict)
    last: dict[int, tuple[Var, Expr]] = field(default_factory=dict)
    steps: dict[int, tuple[Var, Expr]] = field(default_factory=dict)
    length: Dim = 0
    reverse: bool = False


def from_marks(func: Function) -> Function:
    """The function with a scan for each marked loop; the same object if there are none.

    ``ValueError`` if marks are missing, a value between them is a result, or TVM's JSON cannot hold a body.
    """
    marked = _marked(func)
    if not marked:
        return func
    scope = Scope(var.name for var in (*func.params, *(var for var, _ in bindings(func))))
    depending = {number: _depending(func, loop) for number, loop in marked.items()}
    of_steps = set().union(*depending.values())
    values = dict(bindings(func))
    replaced: dict[Var, Expr] = {}
    done: set[int] = set()
    for var, value in bindings(func):
        name = library_name(value)
        if var in of_steps:
            continue
        if name in _MADE:
            number = _number(value, 1)
            if number not in done:
                done.add(number)
                body = _body(marked[number], [(each, values[each]) for each in values if each in depending[number]])
                replaced.update(_scanned(marked[number], body, replaced, scope))
            continue
        scope.bind(var, substitute(value, replaced))
    if any(output in of_steps for output in results(func)):
        raise ValueError("a step of a loop is a result")
    outputs = [replaced.get(output, output) if isinstance(output, Var) else output for output in results(func)]
    return with_outputs(func, scope.body, outputs)


def _marked(func: Function) -> dict[int, _Marked]:
    found: dict[int, _Marked] = {}
    for var, value in bindings(func):
        name = library_name(value)
        if name not in _GIVEN and name not in _MADE:
            continue
        loop, kind = found.setdefault(_number(value, 1), _Marked()), name.removeprefix("library.loop_")
        getattr(loop, kind)[_number(value, 2)] = var, value.args[1]
        if kind == "first":
            loop.length, loop.reverse = from_tir(value.args[4]), bool(_number(value, 4))
    return found


def _number(call: Call, place: int) -> int:
    """The integer argument of a library call at an index."""
    return int(call.args[1 + place].value)


def _depending(func: Function, loop: _Marked) -> dict[Var, None]:
    """The variables that depend on a step's inputs, up to the marks of its results; in order."""
    found = dict.fromkeys(var for var, _ in (*loop.first.values(), *loop.part.values()))
    for var, value in bindings(func):
        if library_name(value) not in _MADE and any(read in found for read in used_vars(value)):
            found[var] = None
    return found


def _body(loop: _Marked, depending: list[tuple[Var, Expr]]) -> list[tuple[Var, Expr]]:
    """The bindings among ``depending`` that the results of a step need."""
    needed = {value for _, value in (*loop.last.values(), *loop.steps.values())}
    body = []
    for var, value in reversed(depending):
        if var in needed and library_name(value) not in _GIVEN:
            needed.update(used_vars(value))
            body.append((var, value))
    return body[::-1]


def _scanned(loop: _Marked, body: list[tuple[Var, Expr]], replaced: dict[Var, Expr], scope: Scope) -> dict[Var, Expr]:
    """Emits the scan; returns the replacements of the marks after the step."""
    places = sorted(loop.first), sorted(loop.last)
    if loop.length < 1 or places[0] != places[1]:
        raise ValueError("marks of a loop are missing")
    first, part = ([marks[place] for place in sorted(marks)] for marks in (loop.first, loop.part))
    made = [marks[place] for marks in (loop.last, loop.steps) for place in sorted(marks)]
    own = {var for var, _ in (*body, *first, *part)}
    read = [each for _, value in body for each in used_vars(value)] + [value for _, value in made]
    constants = [each for each in dict.fromkeys(read) if isinstance(each, Var) and each not in own]
    params = {var: Var(var.name, var.ty) for var in (*(var for var, _ in (*first, *part)), *constants)}
    pairs = [(var, substitute(value, params)) for var, value in body]
    outputs = [params.get(value, value) if isinstance(value, Var) else value for _, value in made]
    text = body_text(build_function(list(params.values()), pairs, outputs))
    if text is None:
        raise ValueError("a literal in the body of a loop cannot be written down")
    scan = Scan(text, len(first), len(part), loop.length, loop.reverse)
    given = [*(value for _, value in (*first, *part)), *constants]
    given = [replaced.get(value, value) if isinstance(value, Var) else value for value in given]
    call = scope.emit(scan_call(scan, given), "scan")
    return {var: scope.emit(TupleGetItem(call, place), var.name) for place, (var, _) in enumerate(made)}
