"""Light body: a function in flat form -> its bindings with a def/use index, which passes edit in place.

Each read of a TVM object is slow, and simplification reads every binding many times. A body reads each value once. Its
index gives the users of each binding, and the changes since a pass. At the end a function is built from the body.

Rewriting: a body and rules per operator -> the body after one walk in which rules replace values.
Constants and splats: a number -> a 0-d tensor; a tensor -> the one number it holds everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

from tvm import relax
from tvm.relax import op

from autodiff.extents import Dim, Extent
from autodiff.ir import (
    VARS,
    Constant,
    DataflowVar,
    Expr,
    Function,
    Var,
    bindings,
    build_function,
    dtype,
    numpy_value,
    op_name,
    results,
    substitute,
    used_vars,
)
from autodiff.library import number
from autodiff.ops import having
from autodiff.typed import normalizer

#: Operators that :func:`autodiff.body.splat` looks through: a rule may depend on their operands.
_LOOKED_THROUGH = having("view", "plain") | {"relax.full", "relax.full_like"}


class Binding:
    """``var = value`` in a body; a parameter has no value.

    Attributes:
        name, op: the variable's name; the operator, ``None`` where the value is no call of one.
        reads: the bindings (and parameters) that the value reads, each once, in order.
        users: the bindings that read this one, in no order.
        changed: the body's clock when the value, or a value that it is read through, changed last.
        key: a number, equal for equal values; see :mod:`autodiff.redundancy`. ``None``: not known.
    """

    __slots__ = ("changed", "key", "name", "op", "reads", "users", "value", "var")

    def __init__(self, var: Var, value: Expr | None):
        self.var, self.value = var, value
        self.name: str = var.name
        self.op = op_name(value)
        self.reads: tuple[Binding, ...] = ()
        self.users: dict[Binding, None] = {}
        self.changed = 0
        self.key: int | None = None


class Body:
    """The bindings of a function in flat form, in order.

    Attributes:
        params, outputs, attrs: the function's; outputs are variables or constants.
        bindings: in order.
        clock, edits: the time of edits, advanced by :meth:`tick`; the number of edits.
    """

    def __init__(
        self,
        params: Iterable[Var],
        pairs: Iterable[tuple[Var, Expr]] = (),
        outputs: Iterable[Expr] = (),
        attrs: Mapping | None = None,
    ):
        self.params, self.outputs, self.attrs = list(params), list(outputs), dict(attrs or {})
        self.clock = self.edits = 0
        self._index = {param: Binding(param, None) for param in self.params}
        self._numbers: dict[Hashable, int] = {}
        self.normalize = normalizer()
        self.bindings = [self.define(var, value) for var, value in pairs]
        self.edits = 0

    @classmethod
    def of(cls, func: Function) -> Body:
        """The body of a function."""
        return cls(func.params, bindings(func), results(func), dict(func.attrs.items()) if func.attrs else None)

    def function(self) -> Function:
        """The function, normalized."""
        return build_function(self.params, [(each.var, each.value) for each in self.bindings], self.outputs, self.attrs)

    def tick(self) -> int:
        """The time of the edits from now on."""
        self.clock += 1
        return self.clock

    def names(self) -> set[str]:
        """The names of parameters and bindings."""
        return {binding.name for binding in self._index.values()}

    def number_of(self, key: Hashable) -> int:
        """The same small number for equal keys."""
        return self._numbers.setdefault(key, len(self._numbers))

    def add_param(self, param: Var) -> None:
        """Appends a parameter."""
        self.edits += 1
        self.params.append(param)
        self._index[param] = Binding(param, None)

    def parameters(self) -> list[Binding]:
        """The parameters, which have users as bindings do."""
        return [self._index[param] for param in self.params]

    def rename(self, names: Mapping[Binding, str]) -> None:
        """Gives parameters or bindings other names: new variables replace the old ones wherever they are read."""
        new: dict[Var, Expr] = {}
        for binding, name in names.items():
            old, binding.var, binding.name = binding.var, type(binding.var)(name, binding.var.ty), name
            self._index[binding.var] = self._index.pop(old)
            new[old] = binding.var
        for user in dict.fromkeys(user for binding in names for user in binding.users):
            user.value = substitute(user.value, new)
        self.params = [new.get(param, param) for param in self.params]
        self.outputs = [new.get(output, output) if isinstance(output, Var) else output for output in self.outputs]
        self.edits += len(names)

    def binding(self, value: Expr) -> Binding | None:
        """The binding (or parameter) of a variable; ``None`` for anything else."""
        return self._index.get(value) if type(value) in VARS else None

    def define(self, var: Var, value: Expr) -> Binding:
        """A new binding, which the caller puts in its place; the value is typed or can be."""
        value = self.normalize(value)
        self.edits += 1
        binding = self._index[var] = Binding(var, value)
        binding.changed = self.clock
        self._read(binding)
        return binding

    def undefine(self, binding: Binding) -> None:
        """Removes an unread binding from the index; the caller removes it from ``bindings``."""
        del self._index[binding.var]
        for read in binding.reads:
            read.users.pop(binding, None)

    def assign(self, binding: Binding, value: Expr) -> None:
        """Gives a binding another value of the same type."""
        for read in binding.reads:
            read.users.pop(binding, None)
        binding.value = self.normalize(value)
        binding.op, binding.key = op_name(binding.value), None
        self._read(binding)
        self.touch(binding)

    def touch(self, binding: Binding) -> None:
        """Marks a binding as changed now, and its users, through operators that :func:`splat` looks through."""
        self.edits += 1
        binding.changed = self.clock
        stack = [binding]
        while stack:
            for user in stack.pop().users:
                if user.changed != self.clock:
                    user.changed = self.clock
                    if user.op in _LOOKED_THROUGH:
                        stack.append(user)

    def substitute(self, binding: Binding, replaced: Mapping[Binding, Expr]) -> None:
        """Replaces the operands of a binding by the given values."""
        needed = {read.var: replaced[read] for read in binding.reads if read in replaced}
        if needed:
            self.assign(binding, substitute(binding.value, needed))

    def finish(self, remaining: list[Binding], replaced: Mapping[Binding, Expr]) -> None:
        """Ends a walk: sets the remaining bindings, and replaces results that were replaced."""
        self.bindings = remaining
        if replaced:
            self.outputs = [replaced.get(self.binding(output), output) for output in self.outputs]
            for binding in replaced:
                self.undefine(binding)

    def returned(self) -> set[Binding]:
        """The bindings and parameters that are results."""
        return {self._index[output] for output in self.outputs if isinstance(output, Var)}

    def prune(self) -> None:
        """Drops the bindings that no result needs."""
        returned = self.returned()
        alive = []
        for binding in reversed(self.bindings):
            if binding.users or binding in returned:
                alive.append(binding)
            else:
                self.undefine(binding)
                self.edits += 1
        self.bindings = alive[::-1]

    def _read(self, binding: Binding) -> None:
        index = self._index
        value = binding.value
        binding.reads = (
            () if isinstance(value, Constant) else tuple([index[used] for used in used_vars(value) if used in index])
        )
        for read in binding.reads:
            read.users[binding] = None


def on_functions(apply: Callable[..., None]) -> Callable[..., Function]:
    """Decorator: a pass that edits a :class:`Body` -> one for a function (the same object if unchanged) or a body."""

    @functools.wraps(apply)
    def on_either(func: Function | Body, *args, **options) -> Function | Body:
        body = func if isinstance(func, Body) else Body.of(func)
        before = body.edits
        apply(body, *args, **options)
        return func if body is func or body.edits == before else body.function()

    others = {name: kind for name, kind in apply.__annotations__.items() if name not in ("body", "return")}
    on_either.__annotations__ = {"func": "Function", **others, "return": "Function"}
    return on_either


class Scope:
    """Builder of bindings under unique names: ``emit`` appends a binding, ``definition`` looks a variable up."""

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
        """The value of a variable; a parameter or constant is its own definition."""
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
    """Replaces values by the rules of their operator in one walk, and drops the bindings that become unused.

    Args:
        rules: by operator name; rules for tuples and projections are under ``None``; the first answer wins.
        since: the clock of the last walk with these rules: older bindings are skipped.
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
        applicable = rules.get(binding.op)
        new = scope.apply(applicable, binding.value) if applicable else None
        if new is None and isinstance(binding.value, Var | Constant):  # a plain copy
            new = binding.value
        if isinstance(new, Var | Constant):
            replaced[binding] = new
            body.touch(binding)
        else:
            if new is not None:
                body.assign(binding, new)
            scope.bindings.append(binding)
    if body.edits != started:
        body.finish(scope.bindings, replaced)
        body.prune()


def walk(body: Body) -> Iterator[tuple[Binding, BodyScope]]:
    """Yields each binding, which may be assigned, with the scope that emits bindings before it.

    At the end, drops the bindings that became unused.
    """
    started, scope = body.edits, BodyScope(body)
    for binding in body.bindings:
        yield binding, scope
        scope.bindings.append(binding)
    if body.edits != started:
        body.finish(scope.bindings, {})
        body.prune()


def without(body: Body, replacement: Callable[[Binding], Expr | None]) -> None:
    """Removes the bindings for which there is a replacement, an operand; their users read that instead."""
    remaining: list[Binding] = []
    replaced: dict[Binding, Expr] = {}
    for binding in body.bindings:
        body.substitute(binding, replaced)
        instead = replacement(binding)
        if instead is None:
            remaining.append(binding)
        else:
            replaced[binding] = instead
    body.finish(remaining, replaced)


class BodyScope(Scope):
    """Scope of a walk over a body: rules look up definitions in it and emit bindings at the walk's position."""

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
        """The first rule's answer that is not ``None``; its last binding takes the name of the replaced binding."""
        emitted = len(self.bindings)
        new = next((new for rule in rules if (new := rule(value, self)) is not None), None)
        if new is None:
            while len(self.bindings) > emitted:  # emitted by rules that answered ``None``
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


_FILLS = {"relax.zeros": 0, "relax.zeros_like": 0, "relax.ones": 1, "relax.ones_like": 1}
_PRESERVE_SPLAT = having("view", "plain")


def const(value: float | int | bool, like: Expr | str) -> Constant:
    """A 0-d constant of the element type of ``like`` (a tensor expression, or an element type)."""
    return relax.const(value, like if isinstance(like, str) else dtype(like))


def size(value: Dim, like: Expr) -> Expr:
    """A size as a 0-d tensor of the element type of ``like``."""
    return number(value, dtype(like))


def ratio(numerator: int, denominator: Dim, like: Expr) -> Expr:
    """A quotient of sizes in float64, rounded to the type of ``like``: an extent gives the bits of its number."""
    if not isinstance(denominator, Extent):
        return const(numerator / denominator, like)
    exact = op.divide(const(numerator, "float64"), number(denominator, "float64"))
    return exact if dtype(like) == "float64" else op.astype(exact, dtype(like))


def splat(value: Expr, scope: Scope) -> float | int | None:
    """The number that every element of ``value`` is known to be, or ``None``.

    Known are zeros/ones/full and their ``_like`` variants, constants of one repeated number, and their reshapes.
    """
    value = scope.definition(value)
    if isinstance(value, Constant):
        array = numpy_value(value)
        if array.size == 0:
            return None
        first = array.flat[0]
        return first.item() if array.size == 1 or (array == first).all() else None
    name = op_name(value)
    if name in _FILLS:
        return _FILLS[name]
    if name in ("relax.full", "relax.full_like"):
        return splat(value.args[1], scope)
    if name in _PRESERVE_SPLAT:
        return splat(value.args[0], scope)
    return None
