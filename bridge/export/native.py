"""Native form: a forward → a library for TVM's runtime, without Python: in C++ or any other language of the runtime.

The forward's Relax function, with the parameters bound and library calls decomposed into Relax operators, is compiled
by TVM's default pipeline: portable rather than quick; results equal eager's up to rounding. It runs on the device that
the module was compiled for. ``main`` takes the argument tensors in order and returns the array of the forward's
results; ``inputs`` allocates argument tensors to fill (``examples/run_compiled.cc``).

A library function has a rule for the results that a forward uses (positions and log-sums are for a backward only): the
operator's definition. Indexing by tensors, ``x[indices]``, is one gather along a flat axis. Eager raises for an index
out of range; here the element is NaN, or for integers the nearest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import tvm
from torch import nn
from tvm import relax
from tvm.relax import op

from autodiff import Body
from autodiff.attention import attended
from autodiff.body import Binding, BodyScope, Scope, const
from autodiff.extents import broadcast
from autodiff.ir import (
    Call,
    Expr,
    Function,
    IRModule,
    TupleGetItem,
    Var,
    build_function,
    dtype,
    is_float,
    library_name,
    shape,
)
from autodiff.scan import unroll
from autodiff.typed import normalizer
from bridge.base.devices import HOST
from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.compile import Backend
from bridge.dispatch import Entry
from bridge.lowering import LoweredCall

__all__ = ["NoRelaxForm", "gathered", "indexed", "native_module", "save_native", "without_library_calls"]


def gathered(x: Expr, places: Expr, axis: int) -> Expr:
    """The slices of ``x`` at ``places`` along an axis; out of range: NaN, or clipped for integers."""
    return op.take(x, places, axis=axis, mode="nan" if is_float(x) else "clip")


def indexed(x: Expr, dims: Sequence[int], indices: Sequence[Expr], scope: Scope) -> Expr:
    """``x`` indexed by integer tensors, one for each of ``dims``; negative indices count from the end."""
    extents, rank = shape(x), len(shape(x))
    others = [axis for axis in range(rank) if axis not in dims]
    counts = [extents[axis] for axis in dims]
    order = [*dims, *others]
    if order != sorted(order):
        x = scope.emit(op.permute_dims(x, order), "moved")
    kept = [extents[axis] for axis in others]
    flat = scope.emit(op.reshape(x, [math.prod(counts), *kept]), "flat")
    at = broadcast([shape(index) for index in indices])
    place = scope.emit(op.reshape(_flat_place(counts, indices, scope), [-1]), "place")
    taken = scope.emit(op.reshape(scope.emit(gathered(flat, place, 0), "taken"), [*at, *kept]), "taken")
    first = dims[0] if list(dims) == [*range(dims[0], dims[0] + len(dims))] else 0
    moved = [*range(len(at), len(at) + first), *range(len(at)), *range(len(at) + first, len(at) + len(kept))]
    return op.permute_dims(taken, moved)


def _flat_place(counts: Sequence[int], indices: Sequence[Expr], scope: Scope) -> Expr:
    """Each element's index along the flat axis; beyond its end if one of the indices is out of range."""
    total: Expr = const(0, "int64")
    outside: Expr = const(0, "bool")
    for position, (count, index) in enumerate(zip(counts, indices, strict=True)):
        wide = scope.emit(op.astype(index, "int64"), "index") if dtype(index) != "int64" else index
        negative = scope.emit(op.less(wide, const(0, "int64")), "negative")
        wrapped = scope.emit(op.add(wide, const(count, "int64")), "wrapped")
        place = scope.emit(op.where(negative, wrapped, wide), "place")
        for wrong in (op.less(place, const(0, "int64")), op.greater_equal(place, const(count, "int64"))):
            outside = scope.emit(op.logical_or(outside, scope.emit(wrong, "wrong")), "outside")
        step = math.prod(counts[position + 1 :])
        total = scope.emit(op.add(total, scope.emit(op.multiply(place, const(step, "int64")), "step")), "total")
    return scope.emit(op.where(outside, const(math.prod(counts), "int64"), total), "total")


Rule = Callable[[Sequence[Expr], Scope], Expr]
"""Arguments of a call → its result, the first one if there are several."""


class NoRelaxForm(ValueError):
    """A library function, or a use of one, without a decomposition into Relax operators."""


def without_library_calls(function: Function) -> Function:
    """Decomposes library calls into Relax operators; unrolls scans. ``NoRelaxForm``: names an unsupported call."""
    body = Body.of(unroll(function))
    scope = BodyScope(body)
    first: dict[Binding, Expr] = {}  # first results of calls with several
    replaced: dict[Binding, Expr] = {}
    for binding in body.bindings:
        body.substitute(binding, replaced)
        value, name = binding.value, library_name(binding.value)
        source = body.binding(value.tuple_value) if isinstance(value, TupleGetItem) else None
        if name is not None:
            made = _spelled(name, value, scope)
            (first if isinstance(binding.var.ty, relax.TupleType) else replaced)[binding] = made
        elif source in first and value.index == 0:
            replaced[binding] = first[source]
        scope.bindings.append(binding)
    body.finish([each for each in scope.bindings if each not in replaced], replaced)
    body.prune()
    left = next((library_name(each.value) for each in body.bindings if library_name(each.value) is not None), None)
    if left is not None:
        raise NoRelaxForm(f"a second result of {left}")
    return body.function()


def _spelled(name: str, call: Call, scope: Scope) -> Expr:
    rule = _RULES.get(name.removeprefix("library."))
    if rule is None:
        raise NoRelaxForm(str(call.args[1].value) if name == "library.operator" else name)
    return scope.emit(rule(call.args[1:], scope), "spelled")


def _numbers(value: Expr) -> list[int]:
    return [int(extent) for extent in value.values]


def _number(value: Expr) -> int | float:
    return value.value


def _index(args: Sequence[Expr], scope: Scope) -> Expr:
    x, dims, indices = args
    return indexed(x, _numbers(dims), list(scope.definition(indices).fields), scope)


def _convolution(args: Sequence[Expr], scope: Scope) -> Expr:
    x, weight, stride, padding, dilation, output_padding, transposed, groups, *bias = args
    rank = len(shape(weight)) - 2
    if len(shape(x)) != rank + 2 or rank not in (1, 2, 3):
        raise NoRelaxForm("library.convolution without a batch")
    given = {
        "strides": _numbers(stride),
        "padding": _numbers(padding) * 2,
        "dilation": _numbers(dilation),
        "groups": int(_number(groups)),
    }
    if _number(transposed):
        given["output_padding"] = _numbers(output_padding)
    convolve = getattr(op.nn, f"conv{rank}d{'_transpose' if _number(transposed) else ''}")
    if not bias:
        return convolve(x, weight, **given)
    return _biased(convolve(x, weight, **given, out_dtype="float32"), bias[0], [-1, *[1] * rank], scope)


def _matmul_bias(args: Sequence[Expr], scope: Scope) -> Expr:
    x, matrix, bias, extents = args
    return op.reshape(scope.emit(_biased(op.matmul(x, matrix, "float32"), bias, [-1], scope)), extents)


def _biased(wide: Expr, bias: Expr, extents: Sequence[int], scope: Scope) -> Expr:
    """A product in float32 plus a bias, rounded to the bias's type."""
    addend = scope.emit(op.reshape(scope.emit(op.astype(bias, "float32")), extents))
    return op.astype(scope.emit(op.add(scope.emit(wide), addend)), dtype(bias))


def _last(rule: Rule) -> Rule:
    """A rule with a channels-first result → the rule with channels last."""
    return lambda args, scope: op.permute_dims(scope.emit(rule(args, scope)), [0, 2, 3, 1])


def _max_pool(args: Sequence[Expr], scope: Scope) -> Expr:
    x, *geometry, ceil_mode = args
    kernel, stride, padding, dilation = map(_numbers, geometry)
    pool = getattr(op.nn, f"max_pool{len(kernel)}d")
    return pool(x, kernel, stride, padding * 2, dilation, ceil_mode=bool(_number(ceil_mode)))


def _avg_pool(args: Sequence[Expr], scope: Scope) -> Expr:
    x, kernel, stride, padding, ceil_mode, include_pad, divisor = args
    if _number(ceil_mode) or _number(divisor):
        raise NoRelaxForm("library.avg_pool with a divisor, or windows that end outside")
    kernel, stride, padding = map(_numbers, (kernel, stride, padding))
    pool = getattr(op.nn, f"avg_pool{len(kernel)}d")
    return pool(x, kernel, stride, padding * 2, count_include_pad=bool(_number(include_pad)))


def _adaptive_avg_pool(args: Sequence[Expr], scope: Scope) -> Expr:
    size = _numbers(args[1])
    return getattr(op.nn, f"adaptive_avg_pool{len(size)}d")(args[0], size)


def _flash_attention(args: Sequence[Expr], scope: Scope) -> Expr:
    *tensors, dropout, causal, scale = args
    if _number(dropout):
        raise NoRelaxForm("library.scaled_dot_product_flash_attention with dropout")
    return _attended(tensors, causal, scale, scope)


def _attention(args: Sequence[Expr], scope: Scope) -> Expr:
    _, *tensors, causal, scale = args
    return op.permute_dims(scope.emit(_attended(tensors, causal, scale, scope), "attended"), [0, 2, 1, 3])


def _attended(tensors: Sequence[Expr], causal: Expr, scale: Expr, scope: Scope) -> Expr:
    q, k, v, has_mask, *mask = tensors
    if shape(q)[:-2] != shape(k)[:-2]:
        raise NoRelaxForm("attention of heads in groups")
    masks = mask[0] if _number(has_mask) else None
    return attended(q, k, v, masks, scope, scale=float(_number(scale)), causal=bool(_number(causal)))


_RULES: dict[str, Rule] = {
    "adaptive_avg_pool": _adaptive_avg_pool,
    "adaptive_avg_pool_last": _last(_adaptive_avg_pool),
    "attention": _attention,
    "avg_pool": _avg_pool,
    "avg_pool_last": _last(_avg_pool),
    "convolution": _convolution,
    "convolution_last": _last(_convolution),
    "embedding": lambda args, scope: gathered(args[0], args[1], 0),
    "index": _index,
    "index_select": lambda args, scope: gathered(args[0], args[2], int(_number(args[1]))),
    "matmul_bias": _matmul_bias,
    "max_pool": _max_pool,
    "max_pool_last": _last(_max_pool),
    "scaled_dot_product_flash_attention": _flash_attention,
}

_EVALUATION = "add an entry under module.eval()"
_NO_NUMBERS = (
    "let forward read no numbers (transformers looks at attention masks of two dimensions, not at those of four)"
)


def save_native(module: nn.Module, entries: Sequence[Entry], path: Path) -> dict[str, Any]:
    """Writes the library of the newest entry that has a native form → the entry's number, its inputs.

    Raises:
        UnsupportedModule: no entry has a native form, each with its reason; or there is no C++ compiler.
    """
    problems = []
    for number in reversed(range(len(entries))):
        entry = entries[number]
        captured = entry.lowered.captured
        where = f"{captured.module_name}.forward"
        if not isinstance(entry.lowered, LoweredCall):
            problems.append(Unsupported("a loaded call", where, "has no native form", "save it from its source"))
            continue
        imported = entry.lowered.imported
        if captured.draws or captured.mutated or imported.checks or captured.numbers.expressions:
            what, hint = "checks", _NO_NUMBERS
            if captured.draws or captured.mutated:
                what, hint = "random draws" if captured.draws else "new values of buffers", _EVALUATION
            problems.append(Unsupported(what, where, "has no native form", hint))
            continue
        try:
            function = without_library_calls(entry.lowered["forward"].function)
        except NoRelaxForm as error:
            problems.append(Unsupported(str(error), where, "is torch's kernel: no native form"))
            continue
        _build(function, entry.guard.tensors(module), path, captured.module_name, entry.options.backend)
        inputs = function.params[len(captured.module_tensors) :]
        return {"entry": number, "inputs": [[str(each.name), list(shape(each)), dtype(each)] for each in inputs]}
    raise UnsupportedModule(type(module).__name__, problems, what="saved in a native form")


def _build(function: Function, owned: Sequence[torch.Tensor], path: Path, name: str, backend: Backend) -> None:
    try:
        backend.executable(native_module(function, owned)).export_library(str(path))
    except (RuntimeError, FileNotFoundError) as error:
        problem = Unsupported("a native form", name, f"it could not be linked: {error}", "install a C++ compiler")
        raise UnsupportedModule(name, [problem], what="saved in a native form") from error


def native_module(function: Function, owned: Sequence[torch.Tensor]) -> IRModule:
    """A forward, without library calls, and the module's tensors → ``main`` and ``inputs``."""
    numbers = {
        param.name: tvm.runtime.from_dlpack(tensor.detach().to(HOST).contiguous())
        for param, tensor in zip(function.params, owned, strict=False)
    }
    functions = {"main": function, "inputs": _new(function.params[len(owned) :])}
    functions = {name: each.with_attr("global_symbol", name) for name, each in functions.items()}
    return relax.transform.BindParams("main", numbers)(IRModule(functions))


def _new(params: Sequence[Var]) -> Function:
    """A function that allocates tensors with the parameters' types.

    They are no constants: TVM would fold their fill, and share one tensor between equal inputs and all calls.
    """
    allocate = relax.op.builtin.alloc_tensor
    made = [normalizer()(allocate(relax.ShapeExpr(shape(each)), dtype(each), 0)) for each in params]
    tensors = [Var(f"{param.name}_input", param.ty) for param in params]
    return build_function([], zip(tensors, made, strict=True), tensors)
