"""Samples of the rules of gathering and scattering."""

from __future__ import annotations

import torch
from tvm.relax import op

from tests.autodiff.gradcheck import draw
from tests.autodiff.samples import integers, sample

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
