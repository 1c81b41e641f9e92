"""Marked loops: a function with one step of a loop between marks -> the same function with scans.

    library.loop_first(first, loop, place, length, reverse)    a carry as the step sees it
    library.loop_part(whole, loop, place)                      the step's part of a tensor with the steps in front
    library.loop_last(next, loop, place)                       the carry after the last step
    library.loop_steps(y, loop, place, length)                 a result of all steps, the steps in front

The values that depend on the first two marks of a ``loop``, and that the last two read, are its body.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autodiff.body import Scope
from autodiff.extents import Dim, from_tir
from autodiff.ir import (
    Call,
    Expr,
    Function,
    TupleGetItem,
    Var,
    bindings,
    build_function,
    library_name,
    results,
    substitute,
    used_vars,
    with_outputs,
)
from autodiff.scan.operator import Scan, body_text, scan_call

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
