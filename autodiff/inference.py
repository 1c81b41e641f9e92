"""Inference: a forward function whose first parameters are frozen -> a function of the rest and of constants.

Partial evaluation by binding times (N. D. Jones, C. K. Gomard, P. Sestoft, 1993): values that depend on the frozen
parameters alone are *static* and computed once; a call computes the *dynamic* rest. Functions are in flat form and
simplified; they must not be differentiated afterwards. Attention in float32 or float64 may be spelled out before
(:mod:`autodiff.attention`).

Scale folding: a convolution or product with a frozen weight, then an affine map of channels -> other weights.
Evaluation-mode BatchNorm is an affine map (B. Jacob et al., "Quantization and Training of Neural Networks", 2018, 3.2):
``(conv(x, W) + b - mean) * rstd * gamma + beta`` is ``conv(x, W * s) + t`` with ``s = rstd * gamma`` for each channel.

Merging of parallel products: several products of one input with frozen weights -> one product and its slices.
The projections of an attention (Q, K, V) are the usual case: one call instead of three reads the input once.

Splitting: one function -> ``constants(frozen)``, which runs once, and ``call(rest, constants)``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tvm.relax import op

from autodiff.body import Binding, Body, BodyScope, const, on_functions, walk
from autodiff.extents import same, same_shape
from autodiff.ir import (
    Call,
    Constant,
    Expr,
    Function,
    TensorType,
    Tuple,
    Var,
    build_function,
    dtype,
    library_name,
    numel,
    op_name,
    shape,
    substitute,
)
from autodiff.ops import having, traits
from autodiff.products import concatenated
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


_TYPES = ("float32", "float64")
_MAPS = {"relax.add": op.add, "relax.subtract": op.subtract, "relax.multiply": op.multiply, "relax.divide": op.divide}
_SHIFTS = ("relax.add", "relax.subtract")


@on_functions
def fold_scales(body: Body, frozen: int) -> None:
    """``(x @ W) * s + t`` becomes ``x @ (W * s) + t`` for ``W``, ``s``, ``t`` of the first ``frozen`` parameters.

    ``s`` and ``t`` have one element, or one per output channel. A map that only shifts, or scales by a literal, stays.

    Safe: real arithmetic's distributive law, term by term; in floating point the weights are rounded once more, so
    results differ at rounding level. float32 and float64 only: half types round the value between product and map.
    Where ``s`` is not finite the law does not hold; the new weights are not finite then, and the caller must check.
    """
    static = hoist_static(body, frozen)
    returned = body.returned()
    chains = [_chain(binding, static, returned, body) for binding in body.bindings if binding not in static]
    ends = {chain.end: chain for chain in chains if chain is not None}
    for binding, scope in walk(body):
        if binding in ends:
            body.assign(binding, _folded(ends[binding], scope))


@dataclass(frozen=True)
class _Chain:
    """A product and the affine maps that follow it.

    Attributes:
        weight: place of the weight among the call's arguments; ``axis``: its axis of output channels.
        axis_from_end: the result's axis of channels, negative.
        maps: operator and operand, in order.
        end: the last map's binding.
    """

    product: Binding
    weight: int
    axis: int
    axis_from_end: int
    maps: Sequence[tuple[str, Expr]]
    end: Binding


def _chain(product: Binding, static: set[Binding], returned: set[Binding], body: Body) -> _Chain | None:
    place = _weight(product, static, body)
    if place is None:
        return None
    weight, axis, channel = place
    current, maps, end, scales = product, [], product, False
    while len(current.users) == 1 and current not in returned:
        (user,) = current.users
        if _keeps_channels(user, current, channel):
            current = user
            continue
        operand = _operand(user, current, static, body, channel)
        if operand is None:
            break
        maps.append((user.op, operand))
        scales |= user.op not in _SHIFTS and isinstance(operand, Var)
        current = end = user
    return _Chain(product, weight, axis, channel, maps, end) if scales else None


def _weight(product: Binding, static: set[Binding], body: Body) -> tuple[int, int, int] | None:
    """Index of the frozen weight among the arguments, its axis of output channels, the result's axis from the end."""
    value = product.value
    if product.op is None or not isinstance(value, Call) or not _is_tensor_of(product.var, _TYPES):
        return None
    if product.op == "relax.matmul":
        x, weight = value.args
        if len(shape(weight)) != 2 or body.binding(weight) not in static or body.binding(x) in static:
            return None
        return (1, 1, -1) if dtype(x) == dtype(weight) == dtype(product.var) else None
    if library_name(value) != "library.convolution":
        return None
    _, _, weight, *_, transposed, groups = value.args
    if body.binding(weight) not in static or len(shape(weight)) != len(shape(product.var)):
        return None
    if int(transposed.value) and int(groups.value) != 1:
        return None
    return 2, int(transposed.value), 1 - len(shape(weight))


def _is_tensor_of(value: Expr, types: Sequence[str]) -> bool:
    return isinstance(value.ty, TensorType) and dtype(value) in types


def _keeps_channels(user: Binding, current: Binding, channel: int) -> bool:
    """Whether a binding is a reshape that keeps the channels as the last axis."""
    if user.op != "relax.reshape" or channel != -1:
        return False
    before, after = shape(current.var), shape(user.var)
    return len(after) > 0 and same(before[-1], after[-1])


def _operand(user: Binding, current: Binding, static: set[Binding], body: Body, channel: int) -> Expr | None:
    """The static operand of an affine map of channels whose other operand is ``current``."""
    if user.op not in _MAPS or not same_shape(shape(user.var), shape(current.var)):
        return None
    left, right = user.value.args
    operand, is_left = (right, False) if body.binding(left) is current else (left, True)
    if is_left and user.op in ("relax.subtract", "relax.divide"):
        return None
    known = body.binding(operand)
    if (isinstance(operand, Var) and known not in static) or dtype(operand) != dtype(current.var):
        return None
    extents = shape(operand)
    rank = len(extents)
    others = [extent for axis, extent in enumerate(extents) if axis - rank != channel]
    return operand if all(same(extent, 1) for extent in others) else None


def _folded(chain: _Chain, scope: BodyScope) -> Expr:
    """The last map's value: the product with scaled weights, plus one shift."""
    product, end, name = chain.product, chain.end, chain.product.name
    scale: Expr = const(1, product.var)
    shift: Expr | None = None
    for kind, operand in chain.maps:
        vector = _flat(operand, scope, name)
        apply = _MAPS[kind]
        if kind not in _SHIFTS:
            scale = scope.emit(apply(scale, vector), f"{name}_scale")
        if shift is not None:
            shift = scope.emit(apply(shift, vector), f"{name}_shift")
        elif kind in _SHIFTS:
            shift = vector if kind == "relax.add" else scope.emit(op.negative(vector), f"{name}_shift")
    args = list(product.value.args)
    args[chain.weight] = _scaled(args[chain.weight], scale, chain.axis, scope, name)
    made = Call(product.value.op, args, product.value.attrs, product.value.ty_args, ret_ty=product.var.ty)
    if shift is None and same_shape(shape(product.var), shape(end.var)):
        return made
    made = scope.emit(made, name)
    if not same_shape(shape(product.var), shape(end.var)):
        reshaped = op.reshape(made, shape(end.var))
        if shift is None:
            return reshaped
        made = scope.emit(reshaped, name)
    return op.add(made, _along(shift, chain.axis_from_end, scope, name))


def _scaled(weight: Expr, scale: Expr, axis: int, scope: BodyScope, name: str) -> Expr:
    """The weight times the scale of each output channel; a transposed matrix stays a transpose."""
    source = scope.definition(weight)
    if op_name(source) == "relax.permute_dims" and len(shape(weight)) == 2 and axis == 1:
        inner = _scaled(source.args[0], scale, 0, scope, name)
        return scope.emit(op.permute_dims(inner), f"{name}_weight")
    return scope.emit(op.multiply(weight, _along(scale, axis - len(shape(weight)), scope, name)), f"{name}_weight")


def _flat(operand: Expr, scope: BodyScope, name: str) -> Expr:
    """An operand of a map: one number per channel as a vector, a single number as a 0-d tensor."""
    extents = shape(operand)
    wanted = [] if all(same(extent, 1) for extent in extents) else [numel(operand)]
    return operand if same_shape(extents, wanted) else scope.emit(op.reshape(operand, wanted), f"{name}_channels")


def _along(vector: Expr, axis: int, scope: BodyScope, name: str) -> Expr:
    """A vector reshaped so that it broadcasts along ``axis``, which counts from the end."""
    if axis == -1 or not shape(vector):
        return vector
    return scope.emit(op.reshape(vector, [*shape(vector), *[1] * (-axis - 1)]), f"{name}_channels")


@on_functions
def merge_products(body: Body, frozen: int) -> None:
    """``x @ A``, ``x @ B`` become slices of ``x @ [A B]`` for matrices of the first ``frozen`` parameters.

    Frozen vectors added to each product, through equal reshapes, are merged as well. Safe: every element is the same
    sum; a library may add a wider matrix in another order, so results differ at rounding level.
    """
    static = hoist_static(body, frozen)
    groups: defaultdict[tuple, list[Binding]] = defaultdict(list)
    for binding in body.bindings:
        if binding not in static and binding.op == "relax.matmul" and (key := _key(binding, static, body)) is not None:
            groups[key].append(binding)
    merged = {group[0]: group for group in groups.values() if len(group) > 1}
    returned = body.returned()
    for binding, scope in walk(body):
        if binding in merged:
            _merge(merged[binding], static, returned, body, scope)


def _key(product: Binding, static: set[Binding], body: Body) -> tuple | None:
    """The merge key of a product: its input and the types; ``None`` where the second factor is no frozen matrix."""
    x, weight = product.value.args
    if len(shape(weight)) != 2 or len(shape(x)) < 2 or body.binding(weight) not in static:
        return None
    return body.binding(x), dtype(x), dtype(weight), dtype(product.var)


def _merge(
    group: Sequence[Binding], static: set[Binding], returned: set[Binding], body: Body, scope: BodyScope
) -> None:
    """Emits the merged product and makes the products slices of it, in place."""
    x = group[0].value.args[0]
    weight = concatenated([each.value.args[1] for each in group], 1, scope, "merged_weight")
    width = shape(weight)[1]
    made = scope.emit(op.matmul(x, weight, out_dtype=dtype(group[0].var)), "merged")
    ends = [_shifted(each, static, returned, body) for each in group]
    if all(end is not None and same_shape(shape(end[0].var)[:-1], shape(ends[0][0].var)[:-1]) for end in ends):
        extents = [*shape(ends[0][0].var)[:-1], width]
        if not same_shape(extents, shape(made)):
            made = scope.emit(op.reshape(made, extents), "merged")
        shifts = scope.emit(op.concat(Tuple([shift for _, shift in ends]), axis=0), "merged_shift")
        made = scope.emit(op.add(made, shifts), "merged")
        group = [end for end, _ in ends]
    begin = 0
    for each in group:
        end = begin + shape(each.var)[-1]
        body.assign(each, op.strided_slice(made, [len(shape(made)) - 1], [begin], [end]))
        begin = end


def _shifted(product: Binding, static: set[Binding], returned: set[Binding], body: Body) -> tuple[Binding, Expr] | None:
    """The binding that adds a frozen vector to the product, perhaps after a reshape, and the vector."""
    current = product
    while len(current.users) == 1 and current not in returned:
        (user,) = current.users
        if user.op == "relax.reshape" and shape(user.var) and same(shape(user.var)[-1], shape(product.var)[-1]):
            current = user
            continue
        if user.op != "relax.add" or not same_shape(shape(user.var), shape(current.var)):
            return None
        left, right = user.value.args
        shift = right if body.binding(left) is current else left
        fits = same_shape(shape(shift), shape(product.var)[-1:]) and dtype(shift) == dtype(user.var)
        is_static = not isinstance(shift, Var) or body.binding(shift) in static
        return (user, shift) if fits and is_static else None
    return None


PASSES = (fold_scales, merge_products)
"""Passes for every device: (body, number of frozen parameters), edits the body. ``split_static`` comes last."""
