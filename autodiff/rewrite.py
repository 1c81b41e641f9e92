"""Rewriting: a function and rules per operator -> the function after one walk in which rules replace values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from tvm import relax

from autodiff.dce import live_bindings
from autodiff.ir import (
    Constant,
    Expr,
    Function,
    Var,
    bindings,
    op_name,
    results,
    substitute,
    with_outputs,
)

__all__ = ["NameSupply", "Rule", "Scope", "names", "rewrite"]


class Scope:
    """The bindings of the function under construction: what is defined so far, under names used once.

    ``emit`` appends a binding and returns its variable; ``definition`` looks one up.
    """

    def __init__(self, taken: Iterable[str] = ()):
        self.body: list[tuple[Var, Expr]] = []
        self._definitions: dict[Var, Expr] = {}
        self._names = NameSupply(taken)
        self._normalize = relax.BlockBuilder().normalize

    def emit(self, value: Expr, name: str = "lv") -> Var:
        """Bind ``value`` (a call on variables and constants) to a new variable, ``name`` or ``name_<n>``."""
        value = self._normalize(value)
        return self.bind(relax.Var(self._names.fresh(name), value.ty), value)

    def bind(self, var: Var, value: Expr) -> Var:
        """Bind ``value``, whose type is known or can be inferred, to a variable that exists already."""
        value = self._normalize(value)
        self.body.append((var, value))
        self._definitions[var] = value
        return var

    def retract(self) -> Expr:
        """Undo the last binding; returns its value."""
        var, value = self.body.pop()
        del self._definitions[var]
        return value

    def definition(self, value: Expr) -> Expr:
        """What a variable is bound to; anything else (a parameter, a constant) is its own definition."""
        return self._definitions.get(value, value) if isinstance(value, Var) else value


class NameSupply:
    """Hands out names that are used once: ``name``, then ``name_1``, ``name_2``, ..."""

    def __init__(self, taken: Iterable[str] = ()):
        self._taken = set(taken)
        self._count: dict[str, int] = {}

    def fresh(self, name: str) -> str:
        """``name`` if it is free, else the first free ``name_<n>``; taken from now on."""
        new = name
        while new in self._taken:
            self._count[name] = self._count.get(name, 0) + 1
            new = f"{name}_{self._count[name]}"
        self._taken.add(new)
        return new


Rule = Callable[[Expr, Scope], Expr | None]
"""A rule sees a value whose operands are rewritten already. ``None``: keep it. A variable or constant: the binding
disappears, its users read that instead. Any other expression (of the same type): the variable is bound to it."""


def rewrite(
    func: Function,
    rules: dict[str | None, Iterable[Rule]],
    *,
    new_params: Callable[[], Iterable[Var]] = tuple,
) -> Function:
    """Replace values by the rules of their operator, in one walk; the same function if no rule applied.

    What the rules leave unused is dropped.

    ``rules`` maps an operator name to its rules, ``None`` to the rules for tuples and projections; the first that
    answers wins. ``new_params`` gives, after the walk, parameters to append.
    """
    scope = Scope(names(func))
    replaced: dict[Var, Expr] = {}
    changed = False
    for var, value in bindings(func):
        value = substitute(value, replaced)
        emitted = len(scope.body)
        new = _first(rules.get(op_name(value), ()), value, scope)
        if new is None and isinstance(value, Var | Constant):  # a plain copy
            new = value
        if new is None:
            scope.bind(var, value)
            continue
        changed = True
        if len(scope.body) > emitted and isinstance(new, Var) and new.same_as(scope.body[-1][0]):
            new = scope.retract()  # the rule's last binding takes the name of what it replaces
        if isinstance(new, Var | Constant):
            replaced[var] = new
        else:
            scope.bind(var, new)
    if not changed:
        return func
    outputs = [replaced.get(output, output) if isinstance(output, Var) else output for output in results(func)]
    return with_outputs(func, live_bindings(scope.body, outputs), outputs, params=[*func.params, *new_params()])


def names(func: Function) -> Iterator[str]:
    """The names of parameters and bindings, in order."""
    for param in func.params:
        yield param.name
    for var, _ in bindings(func):
        yield var.name


def _first(rules: Iterable[Rule], value: Expr, scope: Scope) -> Expr | None:
    for rule in rules:
        new = rule(value, scope)
        if new is not None:
            return new
    return None
