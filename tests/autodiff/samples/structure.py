"""Samples of the rules of reductions, matrix products, and operators that move elements."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tvm import relax
from tvm.relax import TupleGetItem, op

from tests.autodiff.gradcheck import draw
from tests.autodiff.samples import sample

for _keep in (False, True):
    for _axes in (None, [0], [-1], [0, 2], [1]):
        _dims = tuple(range(3)) if _axes is None else tuple(_axes)
        for _name, _theirs in {
            "sum": lambda x, d=_dims, k=_keep: x.sum(d, keepdim=k),
            "mean": lambda x, d=_dims, k=_keep: x.mean(d, keepdim=k),
            "max": lambda x, d=_dims, k=_keep: x.amax(d, keepdim=k),
            "min": lambda x, d=_dims, k=_keep: x.amin(d, keepdim=k),
        }.items():
            _ours = getattr(op, _name)
            sample(f"relax.{_name}", lambda s, p, f=_ours, a=_axes, k=_keep: f(p, a, k), _theirs, draw(2, 3, 4))
sample("relax.sum", lambda s, p: op.sum(p, [1]), lambda x: x.sum(1), draw(3, 1))
sample("relax.max", lambda s, p: op.max(p, [1]), lambda x: x.amax(1), draw(3, 1))
sample("relax.sum", lambda s, p: op.sum(p), torch.sum, draw())
_ties = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]).double()  # share the gradient
sample("relax.max", lambda s, p: op.max(p, [1]), lambda x: x.amax(1), _ties)
sample("relax.min", lambda s, p: op.min(p, [1]), lambda x: x.amin(1), _ties)
for _axis in (0, 1, -1, None):
    _flat, _dim = (lambda x: x.reshape(-1), 0) if _axis is None else (lambda x: x, _axis)
    sample(
        "relax.cumsum",
        lambda s, p, a=_axis: op.cumsum(p, a),
        lambda x, flat=_flat, d=_dim: flat(x).cumsum(d),
        draw(2, 3),
    )
    sample(
        "relax.cumsum",
        lambda s, p, a=_axis: op.cumsum(p, a, exclusive=True),
        lambda x, flat=_flat, d=_dim: flat(x).cumsum(d) - flat(x),
        draw(2, 3),
    )
for _axis in (-1, 0, 1):
    _x = draw(2, 3, 4)
    sample("relax.nn.softmax", lambda s, p, a=_axis: op.nn.softmax(p, a), lambda x, a=_axis: x.softmax(a), _x)
    sample(
        "relax.nn.log_softmax", lambda s, p, a=_axis: op.nn.log_softmax(p, a), lambda x, a=_axis: x.log_softmax(a), _x
    )
for _shapes in [
    ((3,), (3,)), ((3,), (3, 4)), ((2, 3), (3,)), ((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((5, 2, 3), (3,)),
    ((3,), (5, 3, 4)), ((2, 3), (5, 3, 4)), ((5, 2, 3), (5, 3, 4)), ((6, 5, 2, 3), (3, 4)), ((6, 5, 2, 3), (5, 3, 4)),
    ((1, 5, 2, 3), (6, 1, 3, 4)), ((5, 1, 3), (3, 4)),
]:  # fmt: skip
    sample("relax.matmul", lambda s, a, b: op.matmul(a, b), torch.matmul, draw(*_shapes[0]), draw(*_shapes[1], seed=1))
MOVES = [
    ("reshape", lambda p: op.reshape(p, (4, 6)), lambda x: x.reshape(4, 6)),
    ("flatten", op.flatten, torch.flatten),
    ("nn.batch_flatten", op.nn.batch_flatten, lambda x: x.flatten(1)),
    ("expand_dims", lambda p: op.expand_dims(p, [0, -1]), lambda x: x[None, ..., None]),
    ("permute_dims", lambda p: op.permute_dims(p, [2, 0, -2]), lambda x: x.permute(2, 0, 1)),
    ("permute_dims", lambda p: op.permute_dims(p), lambda x: x.permute(2, 1, 0)),
    ("broadcast_to", lambda p: op.broadcast_to(p, (5, 2, 3, 4)), lambda x: x.expand(5, 2, 3, 4)),
    ("flip", lambda p: op.flip(p, 1), lambda x: x.flip(1)),
    ("nn.pad", lambda p: op.nn.pad(p, [0, 1, 2, 0, 1, 1]), lambda x: F.pad(x, (1, 1, 2, 0, 0, 1))),
    ("strided_slice", lambda p: op.strided_slice(p, [1], [1], [3]), lambda x: x[:, 1:3]),
    ("strided_slice", lambda p: op.strided_slice(p, [0, 2], [0, 0], [2, 4], [1, 3]), lambda x: x[:, :, ::3]),
    ("strided_slice", lambda p: op.strided_slice(p, [2], [1], [4], [2]), lambda x: x[:, :, 1:4:2]),
    ("strided_slice", lambda p: op.strided_slice(p, [2], [3], [4], [5]), lambda x: x[:, :, 3:4]),
    ("strided_slice", lambda p: op.strided_slice(p, [-1], [-3], [-1]), lambda x: x[..., -3:-1]),
    ("strided_slice", lambda p: op.strided_slice(p, [1], [1], [100]), lambda x: x[:, 1:]),
]
for _name, _ours, _theirs in MOVES:
    sample(f"relax.{_name}", lambda s, p, ours=_ours: ours(p), _theirs, draw(2, 3, 4))
sample(
    "relax.strided_slice",
    lambda s, p: op.strided_slice(p, [2], [3], [-5], [-2]),
    lambda x: x[..., [3, 1]],
    draw(2, 3, 4),
    compiled=True,
)
for _axis in (None, [0], [0, 2], [-1]):
    _theirs = torch.squeeze if _axis is None else lambda x, a=tuple(_axis): x.squeeze(a)
    sample("relax.squeeze", lambda s, p, a=_axis: op.squeeze(p, a), _theirs, draw(1, 3, 1))


def _items(scope, value, *indices):
    value = scope.emit(value)
    return [TupleGetItem(value, index) for index in indices]


for _axis in (0, 1, -1):
    _x, _y = draw(2, 4), draw(2, 4, seed=1)
    sample(
        "relax.concat",
        lambda s, p, q, a=_axis: op.concat([p, q, p], a),
        lambda x, y, a=_axis: torch.cat([x, y, x], a),
        _x,
        _y,
    )
    sample(
        "relax.split",
        lambda s, p, a=_axis: op.tanh(s.emit(_items(s, op.split(p, 2, a), 1)[0])),
        lambda x, a=_axis: x.chunk(2, a)[1].tanh(),
        _x,
    )
    sample(
        "relax.split",
        lambda s, p, a=_axis: _items(s, op.split(p, [1], a), 0, 1),
        lambda x, a=_axis: list(x.tensor_split([1], a)),
        _x,
    )
_shape_of = {"zeros_like": 0.0, "ones_like": 1.0, "full_like": 3.0}
for _name, _number in _shape_of.items():
    _more = (relax.const(3.0, "float64"),) if _name == "full_like" else ()
    _ours = getattr(op, _name)
    sample(
        f"relax.{_name}",
        lambda s, p, f=_ours, more=_more: op.multiply(p, s.emit(f(s.emit(op.exp(p)), *more))),
        lambda x, number=_number: x * number,
        draw(2, 3),
    )
