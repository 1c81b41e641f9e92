"""Samples of the rules of reductions, matrix products, and operators that move elements."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tvm import relax
from tvm.relax import TupleGetItem, op

from tests.autodiff.gradcheck import draw
from tests.autodiff.samples import integers, sample, stops

__all__ = []


def _prod(x, dims, keepdims):
    for dim in sorted((d % 3 for d in dims), reverse=True):
        x = x.prod(dim, keepdim=keepdims)
    return x


for _keep in (False, True):
    for _axes in (None, [0], [-1], [0, 2], [1]):
        _dims = tuple(range(3)) if _axes is None else tuple(_axes)
        for _name, _theirs in {
            "sum": lambda x, d=_dims, k=_keep: x.sum(d, keepdim=k),
            "mean": lambda x, d=_dims, k=_keep: x.mean(d, keepdim=k),
            "max": lambda x, d=_dims, k=_keep: x.amax(d, keepdim=k),
            "min": lambda x, d=_dims, k=_keep: x.amin(d, keepdim=k),
            "variance": lambda x, d=_dims, k=_keep: x.var(d, correction=0, keepdim=k),
            "std": lambda x, d=_dims, k=_keep: x.std(d, correction=0, keepdim=k),
            "prod": lambda x, d=_dims, k=_keep: _prod(x, d, k),
        }.items():
            _ours = getattr(op, _name)
            sample(f"relax.{_name}", lambda s, p, f=_ours, a=_axes, k=_keep: f(p, a, k), _theirs, draw(2, 3, 4))
sample("relax.sum", lambda s, p: op.sum(p, [1]), lambda x: x.sum(1), draw(3, 1))
sample("relax.max", lambda s, p: op.max(p, [1]), lambda x: x.amax(1), draw(3, 1))
sample("relax.sum", lambda s, p: op.sum(p), torch.sum, draw())
_ties = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]).double()  # share the gradient
sample("relax.max", lambda s, p: op.max(p, [1]), lambda x: x.amax(1), _ties)
sample("relax.min", lambda s, p: op.min(p, [1]), lambda x: x.amin(1), _ties)
_equal = torch.ones(2, 3, dtype=torch.float64)  # the deviation is 0, and so is its gradient
sample("relax.std", lambda s, p: op.std(p, [1]), lambda x: x.std(1, correction=0), _equal)

for _zeros in (0, 1, 2):
    _x = draw(2, 4)
    _x[0, :_zeros] = 0
    sample("relax.prod", lambda s, p: op.prod(p, [1]), lambda x: x.prod(1), _x)
    sample("relax.cumprod", lambda s, p: op.cumprod(p, 1), lambda x: x.cumprod(1), _x)
sample(
    "relax.cumprod",
    lambda s, p: op.cumprod(p, 1, exclusive=True),
    lambda x: torch.cat([torch.ones(2, 1).double(), x.cumprod(1)[:, :-1]], 1),
    draw(2, 4),
)
for _axis in (0, 1, -1, None):
    _flat, _dim = (lambda x: x.reshape(-1), 0) if _axis is None else (lambda x: x, _axis)
    for _name, _theirs in {"cumsum": torch.cumsum, "cumprod": torch.cumprod}.items():
        _ours = getattr(op, _name)
        sample(
            f"relax.{_name}",
            lambda s, p, f=_ours, a=_axis: f(p, a),
            lambda x, f=_theirs, flat=_flat, d=_dim: f(flat(x), d),
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
stops("relax.argmax", lambda s, p: op.argmax(p, 1), lambda x: x.argmax(1), draw(2, 3))
stops("relax.argmin", lambda s, p: op.argmin(p, 1), lambda x: x.argmin(1), draw(2, 3))
stops("relax.argsort", lambda s, p: op.argsort(p, 1, False, "int64"), lambda x: x.argsort(1), draw(2, 3))

for _shapes in [
    ((3,), (3,)), ((3,), (3, 4)), ((2, 3), (3,)), ((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((5, 2, 3), (3,)),
    ((3,), (5, 3, 4)), ((2, 3), (5, 3, 4)), ((5, 2, 3), (5, 3, 4)), ((6, 5, 2, 3), (3, 4)), ((6, 5, 2, 3), (5, 3, 4)),
    ((1, 5, 2, 3), (6, 1, 3, 4)), ((5, 1, 3), (3, 4)),
]:  # fmt: skip
    sample("relax.matmul", lambda s, a, b: op.matmul(a, b), torch.matmul, draw(*_shapes[0]), draw(*_shapes[1], seed=1))
sample("relax.outer", lambda s, a, b: op.outer(a, b), torch.outer, draw(3), draw(4))
for _text in "ij,jk->ik ij,ij-> bij,bjk->bik ij,k->ik ij->ji i,j->ij ij->i ij,jk".split():
    _sizes = dict(i=2, j=3, k=4, b=5)
    _operands = _text.split("->")[0].split(",")
    sample(
        "relax.einsum",
        lambda s, *p, text=_text: op.einsum(list(p), text),
        lambda *x, text=_text: torch.einsum(text, *x),
        *(draw(*(_sizes[letter] for letter in letters), seed=seed) for seed, letters in enumerate(_operands)),
    )

MOVES = [
    ("reshape", lambda p: op.reshape(p, (4, 6)), lambda x: x.reshape(4, 6)),
    ("flatten", op.flatten, torch.flatten),
    ("nn.batch_flatten", op.nn.batch_flatten, lambda x: x.flatten(1)),
    ("expand_dims", lambda p: op.expand_dims(p, [0, -1]), lambda x: x[None, ..., None]),
    ("permute_dims", lambda p: op.permute_dims(p, [2, 0, -2]), lambda x: x.permute(2, 0, 1)),
    ("permute_dims", lambda p: op.permute_dims(p), lambda x: x.permute(2, 1, 0)),
    ("broadcast_to", lambda p: op.broadcast_to(p, (5, 2, 3, 4)), lambda x: x.expand(5, 2, 3, 4)),
    ("collapse_sum_to", lambda p: op.collapse_sum_to(p, (3, 1)), lambda x: x.sum_to_size(3, 1)),
    ("tril", lambda p: op.tril(p, 1), lambda x: x.tril(1)),
    ("triu", lambda p: op.triu(p, -1), lambda x: x.triu(-1)),
    ("flip", lambda p: op.flip(p, 1), lambda x: x.flip(1)),
    ("tile", lambda p: op.tile(p, (2, 1, 3)), lambda x: x.tile(2, 1, 3)),
    ("tile", lambda p: op.tile(p, (2, 1, 1, 2)), lambda x: x.tile(2, 1, 1, 2)),
    ("repeat", lambda p: op.repeat(p, 3, 1), lambda x: x.repeat_interleave(3, 1)),
    ("repeat", lambda p: op.repeat(p, 2), lambda x: x.repeat_interleave(2)),
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
sample(
    "relax.collapse_sum_like",
    lambda s, p, q: op.multiply(q, s.emit(op.collapse_sum_like(p, q))),
    lambda x, y: y * x.sum_to_size(3, 1),
    draw(2, 3, 4),
    draw(3, 1, seed=1),
)


def _items(scope, value, *indices):
    value = scope.emit(value)
    return [TupleGetItem(value, index) for index in indices]


sample(
    "relax.topk",
    lambda s, p: _items(s, op.topk(p, 2, 2, "both", True, "int64"), 0, 1),
    lambda x: list(x.topk(2, 2)),
    draw(2, 3, 4),
)
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
        "relax.stack",
        lambda s, p, q, a=_axis: op.stack([p, q, p], a),
        lambda x, y, a=_axis: torch.stack([x, y, x], a),
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
sample(  # TVM gives the results of "xy" the shapes of "ij", so that there is nothing to differentiate
    "relax.meshgrid",
    lambda s, p, q: _items(s, op.meshgrid([p, q], "ij"), 0, 1),
    lambda x, y: list(torch.meshgrid(x, y, indexing="ij")),
    draw(2),
    draw(3),
)
sample(
    "relax.slice_scatter",
    lambda s, p, q: op.slice_scatter(p, q, 1, 4, 2, 1),
    lambda x, y: torch.slice_scatter(x, y, 1, 1, 4, 2),
    draw(2, 5),
    draw(2, 2),
)


def _reversed_rows(x, lengths):
    rows = [torch.cat([row[:length].flip(0), row[length:]]) for row, length in zip(x, lengths.tolist(), strict=True)]
    return torch.stack(rows)


sample(
    "relax.reverse_sequence",
    lambda s, p, n: op.reverse_sequence(p, n, 1, 0),
    _reversed_rows,
    draw(3, 4, 2),
    torch.tensor([4, 1, 3]),
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
sample(
    "relax.one_hot",
    lambda s, p, i: op.multiply(
        p, s.emit(op.astype(s.emit(op.one_hot(i, relax.prim_value(1.0), relax.prim_value(0.0), 4)), "float64"))
    ),
    lambda x, i: x * F.one_hot(i, 4),
    draw(3, 4),
    integers(3, below=4),
)
stops(
    "relax.bucketize",
    lambda s, p, edges: op.bucketize(p, edges),
    torch.bucketize,
    draw(3, 4),
    torch.tensor([-1.0, 0.0, 1.0]).double(),
)
