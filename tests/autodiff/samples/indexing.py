"""Samples of the rules of gathering, scattering, losses, convolutions and pooling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tvm import relax
from tvm.relax import op

from tests.autodiff.gradcheck import draw
from tests.autodiff.samples import integers, sample

__all__ = []


def _taken(x, i, axis):
    picked = x.index_select(axis % 3, i.reshape(-1))
    return picked.reshape(*x.shape[: axis % 3], *i.shape, *x.shape[axis % 3 + 1 :])


for _indices in [(), (1,), (5,), (2, 3)]:
    for _axis in (0, 1, -1):
        sample(
            "relax.take",
            lambda s, p, i, a=_axis: op.take(p, i, a),
            lambda x, i, a=_axis: _taken(x, i, a),
            draw(3, 4, 5),
            integers(*_indices, below=3),
        )
sample("relax.take", lambda s, p, i: op.take(p, i), lambda x, i: x[i], draw(6), integers(4, below=6))
_wild = torch.tensor([-4, 0, 2, 9])
for _mode, _theirs in {"clip": lambda x, i: x[i.clamp(0, 2)], "wrap": lambda x, i: x[i % 3]}.items():
    _build = lambda s, p, i, m=_mode: op.take(p, i, 0, m)  # noqa: E731
    sample("relax.take", _build, _theirs, draw(3, 2), _wild, compiled=True)

_updates, _permuted = draw(2, 3, seed=1), torch.tensor([[0, 1, 2], [1, 2, 0]])
for _axis in (0, 1):
    sample(
        "relax.gather_elements",
        lambda s, p, i, a=_axis: op.gather_elements(p, i, a),
        lambda x, i, a=_axis: x.gather(a, i),
        draw(3, 4),
        integers(2, 3, below=3),
    )
    sample(
        "relax.scatter_elements",
        lambda s, p, i, u, a=_axis: op.scatter_elements(p, i, u, a, "add"),
        lambda x, i, u, a=_axis: x.scatter_add(a, i, u),
        *(draw(3, 4), integers(2, 3, below=3), _updates),
    )
    sample(  # 'update' is defined where indices do not collide
        "relax.scatter_elements",
        lambda s, p, i, u, a=_axis: op.scatter_elements(p, i, u, a, "update"),
        lambda x, i, u, a=_axis: x.scatter(a, i, u),
        *(draw(3, 4), _permuted, _updates),
    )
_rows = torch.tensor([[0, 1], [2, 3], [0, 1]])
sample("relax.gather_nd", lambda s, p, i: op.gather_nd(p, i), lambda x, i: x[i[:, 0], i[:, 1]], draw(3, 4, 2), _rows)
for _mode, _where in {"add": _rows, "update": _rows[:2]}.items():
    sample(
        "relax.scatter_nd",
        lambda s, p, i, u, m=_mode: op.scatter_nd(p, i, u, m),
        lambda x, i, u, m=_mode: x.index_put((i[:, 0], i[:, 1]), u, accumulate=m == "add"),
        *(draw(3, 4, 2), _where, draw(len(_where), 2, seed=1)),
    )
sample(
    "relax.index_tensor",
    lambda s, p, i, j: op.index_tensor(p, [i, j]),
    lambda x, i, j: x[i, j],
    *(draw(3, 4, 2), torch.tensor([[0, 2], [1, 0]]), torch.tensor([1, 3])),
)
for _accumulate in (True, False):
    sample(
        "relax.index_put",
        lambda s, p, i, v, a=_accumulate: op.index_put(p, (i,), v, a),
        lambda x, i, v, a=_accumulate: x.index_put((i,), v, accumulate=a),
        *(draw(5), torch.tensor([3, 0, 1]), draw(3, seed=1)),
    )

_weights = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
for _reduction in ("mean", "sum", "none"):
    for _extents in [(4, 3), (2, 3, 5)]:
        for _weighted in (False, True):
            _targets = integers(_extents[0], *_extents[2:], below=3)
            _targets.view(-1)[1] = 2
            _constant = relax.const(_weights.numpy(), "float64") if _weighted else None
            sample(
                "relax.nn.nll_loss",
                lambda s, p, t, c=_constant, r=_reduction: op.nn.nll_loss(p, t, c, r, 2),
                lambda x, t, w=_weights if _weighted else None, r=_reduction: F.nll_loss(
                    x, t, w, reduction=r, ignore_index=2
                ),
                draw(*_extents),
                _targets,
            )
sample(
    "relax.nn.cross_entropy_with_logits",
    lambda s, p, q: op.nn.cross_entropy_with_logits(p, q),
    lambda x, y: -(x * y).sum() / x.shape[0],
    draw(3, 4),
    draw(3, 4, seed=1),
)

for _k in [
    dict(stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1),
    dict(stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=1),
    dict(stride=(2, 2), padding=(1, 1), dilation=(1, 1), groups=2),
]:
    sample(
        "relax.nn.conv2d",
        lambda s, x, w, k=_k: op.nn.conv2d(x, w, k["stride"], k["padding"], k["dilation"], k["groups"]),
        lambda x, w, k=_k: F.conv2d(x, w, None, **k),
        draw(2, 4, 7, 6),
        draw(6, 4 // _k["groups"], 3, 2, seed=1),
    )
for _name, _ours, _theirs, _x, _w in [
    ("conv1d", lambda x, w: op.nn.conv1d(x, w, 2, 1), lambda x, w: F.conv1d(x, w, None, 2, 1), (2, 3, 7), (4, 3, 3)),
    ("conv3d", op.nn.conv3d, F.conv3d, (1, 2, 4, 4, 4), (3, 2, 2, 2, 2)),
    (
        "conv1d_transpose",
        lambda x, w: op.nn.conv1d_transpose(x, w, 2, 1, 1),
        lambda x, w: F.conv_transpose1d(x, w, None, 2, 1, 1),
        (2, 3, 4),
        (3, 4, 3),
    ),
    (
        "conv2d_transpose",
        lambda x, w: op.nn.conv2d_transpose(x, w, (2, 2), (1, 1), (1, 1)),
        lambda x, w: F.conv_transpose2d(x, w, None, 2, 1, 1),
        (2, 3, 4, 4),
        (3, 4, 3, 3),
    ),
    (
        "conv3d_transpose",
        lambda x, w: op.nn.conv3d_transpose(x, w, (2, 2, 2), (1, 1, 1)),
        lambda x, w: F.conv_transpose3d(x, w, None, 2, 1),
        (1, 2, 3, 3, 3),
        (2, 3, 2, 2, 2),
    ),
]:
    sample(f"relax.nn.{_name}", lambda s, x, w, ours=_ours: ours(x, w), _theirs, draw(*_x), draw(*_w, seed=1))

for _name, _ours, _theirs, _x in [
    ("max_pool2d", lambda p: op.nn.max_pool2d(p, (2, 2), (2, 2)), lambda x: F.max_pool2d(x, 2), (2, 3, 6, 6)),
    (
        "max_pool2d",
        lambda p: op.nn.max_pool2d(p, (3, 3), (2, 2), (1, 1)),
        lambda x: F.max_pool2d(x, 3, 2, 1),
        (2, 3, 6, 6),
    ),
    ("avg_pool2d", lambda p: op.nn.avg_pool2d(p, (2, 2), (2, 2)), lambda x: F.avg_pool2d(x, 2), (2, 3, 6, 6)),
    (
        "adaptive_avg_pool1d",
        lambda p: op.nn.adaptive_avg_pool1d(p, 3),
        lambda x: F.adaptive_avg_pool1d(x, 3),
        (2, 3, 6),
    ),
    (
        "adaptive_avg_pool2d",
        lambda p: op.nn.adaptive_avg_pool2d(p, (1, 1)),
        lambda x: F.adaptive_avg_pool2d(x, 1),
        (2, 3, 6, 6),
    ),
    (
        "adaptive_avg_pool2d",
        lambda p: op.nn.adaptive_avg_pool2d(p, (3, 2)),
        lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
        (2, 3, 6, 6),
    ),
    (
        "adaptive_avg_pool3d",
        lambda p: op.nn.adaptive_avg_pool3d(p, (2, 1, 2)),
        lambda x: F.adaptive_avg_pool3d(x, (2, 1, 2)),
        (1, 2, 4, 2, 4),
    ),
]:
    sample(f"relax.nn.{_name}", lambda s, p, ours=_ours: ours(p), _theirs, draw(*_x))
