"""Samples of the rules of library functions, which torch computes."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import nn
from tvm import relax
from tvm.relax import ShapeExpr, TupleGetItem, op

from autodiff import library
from autodiff.ir import StringImm
from bridge.base.devices import HOST
from bridge.base.generators import own_at
from bridge.library import FUNCTIONS
from bridge.library.attention import FORMULA, Dropout
from tests.autodiff.evaluate import tensor_type
from tests.autodiff.gradcheck import draw
from tests.autodiff.samples import sample


def _constant(value):
    if isinstance(value, list):
        return ShapeExpr(value)
    return StringImm(value) if isinstance(value, str) else relax.prim_value(value)


def _library(name, reference, tensors, *constants, before=(), **options):
    """A sample of a call of one library function on ``before``, all parameters, then constants, as torch types it."""
    made = reference(*tensors)
    result = relax.TupleType([tensor_type(y) for y in made]) if isinstance(made, tuple) else tensor_type(made)

    def build(scope, *params):
        args = [*map(_constant, before), *params, *map(_constant, constants)]
        value = scope.emit(library.call(name, args, result))
        if not isinstance(made, tuple):
            return value
        return [TupleGetItem(value, index) for index in range(len(made))]

    def listed(*args):
        found = reference(*args)
        return list(found) if isinstance(found, tuple) else found

    sample(f"library.{name}", build, listed, *tensors, **options)


for _padding_idx in (-1, 2):
    for _by_frequency in (0, 1):
        _library(
            "embedding",
            lambda w, i, p=None if _padding_idx < 0 else _padding_idx, f=bool(_by_frequency): F.embedding(
                i, w, p, scale_grad_by_freq=f
            ),
            (draw(5, 4), torch.tensor([[0, 2, 2], [4, 0, 0]])),
            _padding_idx,
            _by_frequency,
        )


def _attention(masked, causal):
    extents = (2, 2, 4, 8)
    mask = torch.where(draw(4, 4) > -1, 0.0, -1e4).double()

    def build(scope, q, k, v):
        more = [relax.const(mask.numpy(), "float64")] if masked else []
        args = [q, k, v, relax.prim_value(len(more)), *more, *map(relax.prim_value, (0.0, causal, 0.25))]
        result = relax.TupleType([q.ty, relax.TensorType(extents[:3], "float64")])
        return [TupleGetItem(scope.emit(library.call("scaled_dot_product_flash_attention", args, result)), 0)]

    def reference(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask if masked else None, is_causal=bool(causal), scale=0.25)

    name = "library.scaled_dot_product_flash_attention"
    sample(name, build, reference, *(draw(*extents, seed=seed) for seed in range(3)))


for _masked, _causal in [(False, 0), (False, 1), (True, 0)]:
    _attention(_masked, _causal)


def _named_attention(masked, causal, rate=0.0):
    """As :func:`_attention`, by a kernel that is named; its output's rows are before its heads."""
    mask = torch.where(draw(4, 4) > -1, 0.0, -1e4).double()

    def build(scope, q, k, v, *state):
        more = [relax.const(mask.numpy(), "float64")] if masked else []
        args = [StringImm("flash"), q, k, v, relax.prim_value(len(more)), *more]
        args += [relax.prim_value(causal), relax.prim_value(0.25)]
        args += [relax.prim_value(rate), relax.prim_value(8), *state] if rate else []
        out = relax.TensorType((2, 4, 2, 8), "float64")
        result = relax.TupleType([out, relax.TensorType((2, 2, 4), "float32")])
        made = scope.emit(library.call(name, args, result))
        return [TupleGetItem(made, 0)]

    def reference(q, k, v, *state):
        bias = mask if masked else None
        if rate:
            dropout = Dropout(rate, *state)
            return FORMULA.forward(q, k, v, bias, bool(causal), 0.25, dropout)[0].transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, bias, is_causal=bool(causal), scale=0.25).transpose(1, 2)

    name = "dropping_attention" if rate else "attention"
    state = [torch.tensor([2**64 - 5, 12], dtype=torch.uint64)] if rate else []
    sample(f"library.{name}", build, reference, *(draw(2, 2, 4, 8, seed=seed) for seed in range(3)), *state)


for _masked, _causal in [(False, 0), (False, 1), (True, 0)]:
    _named_attention(_masked, _causal)
_named_attention(True, 0, rate=0.3)
_named_attention(False, 1, rate=0.3)

for _transposed in (0, 1):
    _geometry = ([2, 2], [1, 0], [1, 2], [1, 0] if _transposed else [0, 0], _transposed, 2)
    _library(
        "convolution",
        lambda x, w, g=_geometry: torch.ops.aten.convolution(x, w, None, *g[:3], bool(g[4]), g[3], g[5]),
        (draw(2, 4, 7, 6), draw(4, 3, 3, 2, seed=1) if _transposed else draw(6, 2, 3, 2, seed=1)),
        *_geometry,
    )
_geometry = ([2, 2], [1, 0], [1, 2], [0, 0], 0, 2)
_library(
    "convolution_last",
    lambda x, w, g=_geometry: torch.ops.aten.convolution(x, w, None, *g[:3], False, g[3], g[5]).permute(0, 2, 3, 1),
    (draw(2, 4, 7, 6), draw(6, 2, 3, 2, seed=1)),
    *_geometry,
)
_image = (draw(2, 3, 7, 6),)
_library("max_pool", lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), _image, [3, 3], [2, 2], [1, 1], [1, 1], 0)
_library(
    "max_pool_last",
    lambda x: tuple(each.permute(0, 2, 3, 1) for each in F.max_pool2d(x, 3, 2, 1, return_indices=True)),
    _image,
    [3, 3],
    [2, 2],
    [1, 1],
    [1, 1],
    0,
)
_library("adaptive_max_pool", lambda x: F.adaptive_max_pool2d(x, (3, 2), return_indices=True), _image, [3, 2])
_average = ([3, 3], [2, 2], [1, 1], 0, 0, 0)
_library("avg_pool", lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), _image, *_average)
_library("adaptive_avg_pool", lambda x: F.adaptive_avg_pool2d(x, (3, 4)), _image, [3, 4])


def _upsampled(x):
    return F.interpolate(x, (14, 9), mode="bilinear", align_corners=True)


_library("upsample", _upsampled, _image, "bilinear2d", [14, 9], 1, 0.0, 0.0)


def _behind(name, build, *options):
    _library(f"{name}_last", lambda x: build(x).permute(0, 2, 3, 1), _image, *options)


_behind("avg_pool", lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), *_average)
_behind("adaptive_avg_pool", lambda x: F.adaptive_avg_pool2d(x, (3, 4)), [3, 4])
_behind("upsample", _upsampled, "bilinear2d", [14, 9], 1, 0.0, 0.0)


def _at(name, extents, accumulate=None):
    """``index`` (without values) or ``index_put`` (with) at dims 0 and 2."""

    def build(scope, x, *rest):
        *values, i, j = rest
        indices = scope.emit(relax.Tuple([i, j]))
        more = [] if accumulate is None else [relax.prim_value(accumulate)]
        ty = relax.TensorType(extents, "float64")
        return library.call(name, [x, *values, ShapeExpr([0, 2]), indices, *more], ty)

    return build


_x, _i, _j, _values = draw(3, 4, 5), torch.tensor([[0], [-1]]), torch.tensor([1, 3]), draw(2, 2, 4, seed=1)
sample("library.index", _at("index", (2, 2, 4)), lambda x, i, j: x[i, :, j], _x, _i, torch.tensor([1, 1]))
for _accumulate in (0, 1):
    sample(
        "library.index_put",
        _at("index_put", (3, 4, 5), _accumulate),
        lambda x, v, i, j, a=bool(_accumulate): torch.ops.aten.index_put(x, [i, None, j], v, a),
        *(_x, _values, _i, _j),
    )


def _along(name, reference, *tensors):
    """``index_select`` and its kin along axis 1."""
    found = reference(*tensors)

    def build(scope, x, *rest):
        return library.call(name, [x, relax.prim_value(1), *rest], tensor_type(found))

    sample(f"library.{name}", build, reference, *tensors)


_along("index_select", lambda x, i: x.index_select(1, i), _x, torch.tensor([3, 0, 3]))
_along("index_add", lambda x, i, s: x.index_add(1, i, s), _x, torch.tensor([3, 0, 3]), draw(3, 3, 5, seed=1))
_along("index_copy", lambda x, i, s: x.index_copy(1, i, s), _x, torch.tensor([3, 0]), draw(3, 2, 5, seed=1))

for _taken in ([3, 0, 3, 1], [1, 3, 2, 0], [2, 2, 2, 2, 2]):  # repeats and gaps; a permutation; one index
    sample(
        "library.index_select",
        lambda scope, x, i=_taken: library.call(
            "index_select",
            [x, relax.prim_value(1), relax.const(i, "int64")],
            tensor_type(_x[:, i]),
        ),
        lambda x, i=_taken: x.index_select(1, torch.tensor(i)),
        _x,
    )

for _name in ("log1p", "expm1", "exp2", "erfc"):
    _library(_name, getattr(torch, _name), (draw(3, 4, low=-0.9),))
_matrices = (draw(6, 4), draw(4, 5, seed=1), draw(5, seed=2))
_library("matmul_bias", lambda x, w, b: (x @ w + b).view(2, 3, 5), _matrices, [2, 3, 5])
_library("overwritten", lambda x: x, (draw(3, 4),), 0, 0)
_library("with_derivative", lambda value, linear: value.detach() + linear - linear.detach(), (draw(3, 4), draw(3, 4)))
_pair = (draw(3, 4, low=0.2, seed=1), draw(3, 4, low=0.2, seed=2))
for _name in ("atan2", "fmod", "remainder"):
    _library(_name, getattr(torch, _name), _pair)
for _mode in ("floor", "trunc"):
    _library(f"divide_{_mode}", lambda a, b, m=_mode: torch.div(a, b, rounding_mode=m), _pair)
_library(
    "binary_cross_entropy",
    lambda x, t: F.binary_cross_entropy(x, t, reduction="none"),
    (draw(3, 4, low=0.1, high=0.9), draw(3, 4, low=0.1, high=0.9, seed=1)),
)

_square = (draw(3, 5),)
_library("sort", lambda x: tuple(torch.sort(x, dim=1, descending=True, stable=True)), _square, 1, 1, 1)
_library("topk", lambda x: tuple(torch.topk(x, 2, 0)), _square, 0, 2, 1, 1)
_library("kthvalue", lambda x: tuple(torch.kthvalue(x, 2, 1, keepdim=True)), _square, 1, 2)
for _name in ("max", "min", "median", "nanmedian", "mode"):
    _theirs = getattr(torch, _name)
    _library(f"{_name}_dim", lambda x, f=_theirs: tuple(f(x, 1, keepdim=True)), _square, 1)
for _name in ("cummax", "cummin"):
    _theirs = getattr(torch, _name)
    _library(_name, lambda x, f=_theirs: tuple(f(x, 1)), _square, 1)


def _operator(name, reference, tensors):
    arguments = json.dumps([[{"$tensor": index} for index in range(len(tensors))], {}, []])
    _library("operator", reference, tensors, before=(name, arguments))


_operator("aten.lgamma.default", torch.lgamma, (draw(3, low=0.5),))
_operator("aten.linalg_slogdet.default", lambda x: tuple(torch.linalg.slogdet(x)), (draw(3, 3) + 3 * torch.eye(3),))
_operator("aten.xlogy.Tensor", torch.xlogy, _pair)


class _Skewed(torch.autograd.Function):
    """The sine, with its argument (clipped) in the place of its derivative."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x.sin(), w.exp()

    @staticmethod
    def backward(ctx, first, second):
        (x,) = ctx.saved_tensors
        return (first * x).clamp(-1, 1), second + first


def _skewed(scope, x, w):
    x_stopped, w_stopped = (scope.emit(op.grad.no_grad(each)) for each in (x, w))
    outputs = scope.emit(op.sin(x_stopped)), scope.emit(op.exp(w_stopped))
    numbers = [relax.prim_value(index) for index in range(2)]
    first, second = (
        scope.emit(library.call("tangent", [scope.emit(op.grad.no_grad(y)), numbers[0], index], y.ty))
        for y, index in zip(outputs, numbers, strict=True)
    )
    dx = scope.emit(op.clip(scope.emit(op.multiply(first, x_stopped)), -1, 1))
    dw = scope.emit(op.add(second, first))
    stopped = [scope.emit(op.grad.no_grad(each)) for each in (dx, dw)]
    args = [relax.prim_value(2), x, w, *stopped, first, second]
    gradients = scope.emit(library.call("custom_gradient", args, relax.TupleType([x.ty, w.ty])))
    fields = [scope.emit(TupleGetItem(gradients, index)) for index in range(2)]
    return [library.call("with_derivative", pair, x.ty) for pair in zip(outputs, fields, strict=True)]


sample("library.custom_gradient", _skewed, lambda *args: list(_Skewed.apply(*args)), draw(3, 4), draw(3, 4, seed=1))


def _normalized(centre):
    def build(scope, x):
        c = scope.emit(op.subtract(x, scope.emit(op.mean(x, [1], keepdims=True)))) if centre else x
        moment = scope.emit(op.mean(scope.emit(op.square(c)), [1], keepdims=True))
        rstd = scope.emit(op.rsqrt(scope.emit(op.add(moment, relax.const(1e-3, "float64")))))
        return op.multiply(c, rstd)

    def reference(x):
        c = x - x.mean(1, keepdim=True) if centre else x
        return c * (c.square().mean(1, keepdim=True) + 1e-3).rsqrt()

    sample("library.normalize", build, reference, draw(3, 5))


_normalized(True)
_normalized(False)


def _recurrent(cell, kind, options, fused=False):
    """One layer in one direction, beside ``torch.nn``'s; the sample does not return the backward's operands."""
    reverse = options.pop("reverse", False)
    layer = kind(4, 5, bidirectional=reverse, **options, dtype=torch.float32 if fused else torch.float64)
    names = [name for name, _ in layer.named_parameters() if name.endswith("_reverse") == reverse]
    states = 2 if cell == "lstm" else 1
    sizes = [layer.proj_size or 5, 5][:states]
    shapes = [(3, 2, 4), *(layer.get_parameter(name).shape for name in names), *((2, size) for size in sizes)]
    tensors = [draw(*extents, seed=seed).to(layer.weight_ih_l0.dtype) for seed, extents in enumerate(shapes)]
    text = json.dumps({"cell": cell, "reverse": reverse, "biases": layer.bias, "fused": fused})
    made = FUNCTIONS["recurrent_layer"](text, states, *tensors)

    def build(scope, *params):
        result = relax.TupleType([tensor_type(each) for each in made])
        args = [StringImm(text), relax.prim_value(states), *params]
        value = scope.emit(library.call("recurrent_layer", args, result))
        return [TupleGetItem(value, index) for index in range(1 + states)]

    def reference(x, *rest):
        weights, first = dict(zip(names, rest, strict=False)), rest[len(names) :]
        if reverse:  # the other direction's results are not looked at
            weights |= {name.removesuffix("_reverse"): weights[name] for name in names}
            first = [torch.stack([state, state]) for state in first]
        else:
            first = [state[None] for state in first]
        first = tuple(first) if cell == "lstm" else first[0]
        y, last = torch.func.functional_call(layer, weights, (x, first))
        last = last if cell == "lstm" else (last,)
        return [y[..., -sizes[0] :], *(state[-1] for state in last)]

    sample("library.recurrent_layer", build, reference, *tensors, **({"rtol": 1e-4} if fused else {}))


_recurrent("lstm", nn.LSTM, {}, fused=True)
_recurrent("lstm", nn.LSTM, {"bias": False, "reverse": True}, fused=True)
_recurrent("lstm", nn.LSTM, {})
_recurrent("lstm", nn.LSTM, {"proj_size": 2, "bias": False, "reverse": True})
_recurrent("gru", nn.GRU, {"reverse": True})
_recurrent("gru", nn.GRU, {"bias": False})
_recurrent("rnn_tanh", nn.RNN, {"reverse": True})
_recurrent("rnn_relu", nn.RNN, {"nonlinearity": "relu", "bias": False})


def _recurrent_layers(cell, kind, **options):
    """Layers and directions in one call, beside ``torch.nn``'s."""
    layer = kind(4, 5, 2, dtype=torch.float64, **options)
    names = [name for name, _ in layer.named_parameters()]
    states, both_ways = 2 if cell == "lstm" else 1, layer.bidirectional
    shapes = [(3, 2, 4), *(each.shape for each in layer.parameters()), *[(4 if both_ways else 2, 2, 5)] * states]
    tensors = [draw(*extents, seed=seed) for seed, extents in enumerate(shapes)]
    text = json.dumps({"cell": cell, "layers": 2, "both_ways": both_ways, "biases": layer.bias})
    made = FUNCTIONS["recurrent_layers"](text, states, *tensors)

    def build(scope, *params):
        result = relax.TupleType([tensor_type(each) for each in made])
        args = [StringImm(text), relax.prim_value(states), *params]
        value = scope.emit(library.call("recurrent_layers", args, result))
        return [TupleGetItem(value, index) for index in range(1 + states)]

    def reference(x, *rest):
        first = rest[len(names) :]
        weights = dict(zip(names, rest, strict=False))
        y, last = torch.func.functional_call(layer, weights, (x, first if cell == "lstm" else first[0]))
        return [y, *(last if cell == "lstm" else (last,))]

    sample("library.recurrent_layers", build, reference, *tensors)


_recurrent_layers("lstm", nn.LSTM, bidirectional=True)
_recurrent_layers("gru", nn.GRU, bias=False)
_recurrent_layers("rnn_relu", nn.RNN, nonlinearity="relu")


def _gamma(state, concentration):
    generator = torch.Generator()
    generator.set_state(state)
    return torch._standard_gamma(concentration, generator=generator)


def _drawn_gamma(scope, state, concentration):
    tensor = {"$tensor": 0, "stride": [4, 1], "dtype": "float64"}
    description = json.dumps({"args": [tensor], "kwargs": {}, "result": [[3, 4], [4, 1], "float64"]})
    args = [StringImm("aten._standard_gamma.default"), StringImm(description), state, concentration]
    made = scope.emit(library.call("draw", args, relax.TupleType([concentration.ty, state.ty])))
    return [TupleGetItem(made, 0)]


_state = torch.Generator().manual_seed(0).get_state()
sample("library.draw", _drawn_gamma, _gamma, _state, draw(3, 4, low=0.3))


def _placed_gamma(scope, state, concentration):
    tensor = {"$tensor": 0, "stride": [4, 1], "dtype": "float64"}
    description = json.dumps({"args": [tensor], "kwargs": {}, "result": [[3, 4], [4, 1], "float64"]})
    args = [StringImm("aten._standard_gamma.default"), StringImm(description), relax.prim_value(4)]
    return [scope.emit(library.call("draw_at_offset", [*args, state, concentration], concentration.ty))]


_place = torch.tensor([2**64 - 5, 12], dtype=torch.uint64)
sample(
    "library.draw_at_offset",
    _placed_gamma,
    lambda state, concentration: torch._standard_gamma(concentration, generator=own_at(HOST, state)),
    _place,
    draw(3, 4, low=0.3),
)

_library("collective", lambda x: x, (draw(3, 4),), "copy", "copy", 0, "0")  # operators with other processes need some
