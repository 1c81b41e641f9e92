"""Rewriting: a body and rules per operator -> the body after one walk in which rules replace values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from tvm import relax

from autodiff.body import Binding, Body
from autodiff.ir import Constant, DataflowVar, Expr, Function, Var, bindings
from autodiff.typed import normalizer

__all__ = ["BodyScope", "NameSupply", "Rule", "Scope", "names", "rewrite"]


class Scope:
    """The bindings of the function under construction: what is defined so far, under names used once.

    ``emit`` appends a binding and returns its variable; ``definition`` looks one up.
    """

    def __init__(self, taken: Iterable[str] = ()):
        self.body: list[tuple[Var, Expr]] = []
        self._definitions: dict[Var, Expr] = {}
        self._names = NameSupply(taken)
        self._normalize = normalizer()

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


def rewrite(body: Body, rules: Mapping[str | None, Iterable[Rule]], since: int = 0) -> None:
    """Replace values by the rules of their operator, in one walk; what the rules leave unused is dropped.

    Args:
        rules: by operator name, under ``None`` those for tuples and projections; the first that answers wins.
        since: the clock of the last such walk: what has not changed since is not looked at.
    """
    started = body.edits
    scope = BodyScope(body)
    replaced: dict[Binding, Expr] = {}
    for binding in body.bindings:
        if binding.changed < since:
            scope.bindings.append(binding)
            continue
        if replaced:
            body.substitute(binding, replaced)
        applicable = rules.get(binding.op, ())
        body.counts.visits += bool(applicable)
        new = scope.apply(applicable, binding.value)
        if new is None and isinstance(binding.value, Var | Constant):  # a plain copy
            new = binding.value
        if isinstance(new, Var | Constant):
            replaced[binding] = new
            body.touch(binding)
        else:
            if new is not None:
                body.assign(binding, new)
            scope.bindings.append(binding)
        body.counts.rewrites += new is not None
    if body.edits != started:
        body.finish(scope.bindings, replaced)
        body.prune()


class BodyScope(Scope):
    """The bindings of a body as far as a walk has come: what rules see, and where they emit."""

    def __init__(self, body: Body, before: Iterable[Binding] = ()):
        self.bindings = list(before)
        self._body = body
        self._supply: NameSupply | None = None

    def emit(self, value: Expr, name: str = "lv") -> Var:
        if self._supply is None:
            self._supply = NameSupply(self._body.names())
        value = self._body.normalize(value)
        return self.bind(DataflowVar(self._supply.fresh(name), value.ty), value)

    def bind(self, var: Var, value: Expr) -> Var:
        self.bindings.append(self._body.define(var, value))
        return var

    def definition(self, value: Expr) -> Expr:
        found = self._body.binding(value)
        return value if found is None or found.value is None else found.value

    def apply(self, rules: Iterable[Rule], value: Expr) -> Expr | None:
        """What the first rule that answers says; its last binding takes the name of what it replaces."""
        emitted = len(self.bindings)
        new = next((new for rule in rules if (new := rule(value, self)) is not None), None)
        if new is None:
            while len(self.bindings) > emitted:  # of a rule that thought better of it
                self._body.undefine(self.bindings.pop())
        elif len(self.bindings) > emitted and isinstance(new, Var) and new.same_as(self.bindings[-1].var):
            last = self.bindings.pop()
            self._body.undefine(last)
            return last.value
        return new


def names(func: Function) -> Iterator[str]:
    """The names of parameters and bindings, in order."""
    for param in func.params:
        yield param.name
    for var, _ in bindings(func):
        yield var.name
