"""Splitting by binding times: a function with frozen parameters -> a function that runs once, and one for each call."""

from __future__ import annotations

from dataclasses import dataclass

from autodiff.body import Binding, Body
from autodiff.ir import (
    Call,
    Constant,
    Expr,
    Function,
    TensorType,
    Tuple,
    Var,
    build_function,
    library_name,
    op_name,
    substitute,
)
from autodiff.ops import having, traits
from autodiff.redundancy import live_bindings
from autodiff.typed import reads_extents


def static_bindings(body: Body, frozen: int) -> set[Binding]:
    """The first ``frozen`` parameters, and the bindings that read nothing but static ones (or nothing at all).

    Values with a symbolic extent, which a call decides, and random draws are not static.
    """
    found = set(body.parameters()[:frozen])
    for binding in body.bindings:
        if all(read in found for read in binding.reads) and not _varies(binding):
            found.add(binding)
    return found


def hoist_static(body: Body, frozen: int) -> set[Binding]:
    """Moves the static bindings to the front, each group in its order; returns them with the frozen parameters."""
    found = static_bindings(body, frozen)
    ordered = sorted(body.bindings, key=lambda binding: binding not in found)
    if ordered != body.bindings:
        body.bindings = ordered
        body.edits += 1
    return found


def _varies(binding: Binding) -> bool:
    return "random" in traits(binding.op or "") or reads_extents(binding.var) or reads_extents(binding.value)


_FILLS = frozenset({"relax.zeros", "relax.ones", "relax.full"})
_VIEWS = having("view", "plain")


@dataclass(frozen=True)
class Frozen:
    """A function split by binding times: ``function(*frozen, *rest)`` is ``call(*rest, *constants(*frozen))``.

    Attributes:
        constants: frozen parameters -> the static values that calls read, frozen parameters included.
        call: the other parameters, then the results of ``constants`` -> the function's results.
        weights: indices of the results of ``constants`` that are computed factors of products and convolutions.
    """

    constants: Function
    call: Function
    weights: tuple[int, ...]


def split_static(func: Function, frozen: int) -> Frozen:
    """Splits a function into static and dynamic bindings; the first ``frozen`` parameters are static.

    The call makes views and fills of static values itself, at no cost. Safe: bindings are pure.
    """
    body = Body.of(func)
    static = static_bindings(body, frozen)
    needed = _Needed(body, static)
    dynamic = [binding for binding in body.bindings if binding not in static]
    for binding in dynamic:
        for read in binding.reads:
            needed.ask(read)
    for output in body.outputs:
        if isinstance(output, Var):
            needed.ask(body.binding(output))
    new = {given.var: Var(given.name, given.var.ty) for given in needed.given}
    pairs = [(binding.var, substitute(binding.value, new)) for binding in (*needed.again, *dynamic)]
    outputs = [substitute(output, new) for output in body.outputs]
    params = [*body.params[frozen:], *new.values()]
    made = [given.var for given in needed.given]
    computed = live_bindings([(each.var, each.value) for each in body.bindings if each in static], made)
    weights = _weights(pairs, dict(pairs), {new[given.var]: place for place, given in enumerate(needed.given)})
    is_computed = [given.value is not None for given in needed.given]
    return Frozen(
        build_function(body.params[:frozen], computed, made),
        build_function(params, pairs, outputs, body.attrs),
        tuple(sorted(place for place in weights if is_computed[place])),
    )


class _Needed:
    """The static values that the dynamic bindings read.

    Attributes:
        given: values that are computed once, in the order of the requests.
        again: static bindings that the call computes itself, in order.
    """

    def __init__(self, body: Body, static: set[Binding]):
        self._body, self._static = body, static
        self._given: dict[Binding, None] = {}
        self._again: set[Binding] = set()

    def ask(self, binding: Binding) -> None:
        """Requests a value that the call reads; ignores dynamic ones."""
        if binding not in self._static or binding in self._given or binding in self._again:
            return
        if binding.value is None or not _is_free(binding):
            self._given[binding] = None
            return
        self._again.add(binding)
        for read in binding.reads:
            self.ask(read)

    @property
    def given(self) -> list[Binding]:
        return list(self._given)

    @property
    def again(self) -> list[Binding]:
        return [binding for binding in self._body.bindings if binding in self._again]


def _is_free(binding: Binding) -> bool:
    """Whether a value costs a call nothing: a view, a fill with one number, no tensor."""
    if not isinstance(binding.var.ty, TensorType) or isinstance(binding.value, Constant | Tuple):
        return True
    return binding.op in _VIEWS or (binding.op in _FILLS and not binding.reads)


def _weights(pairs: list[tuple[Var, Expr]], definitions: dict[Var, Expr], place: dict[Var, int]) -> set[int]:
    """Indices of the given values that products and convolutions read, directly or through views."""
    found = set()
    for _, value in pairs:
        is_product = "product" in traits(op_name(value) or "") or library_name(value) == "library.convolution"
        if is_product and isinstance(value, Call):
            for arg in value.args:
                while isinstance(arg, Var) and arg in definitions and op_name(definitions[arg]) in _VIEWS:
                    arg = definitions[arg].args[0]
                if isinstance(arg, Var) and arg in place:
                    found.add(place[arg])
    return found
