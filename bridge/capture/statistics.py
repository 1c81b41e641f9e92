"""Statistics for tracing: ``torch.cov``, ``torch.corrcoef`` and ``torch.combinations`` → whole operators.

torch asks whether weights are negative and whether there are more observations than degrees of freedom, and selects
combinations by a mask that is in the size alone. What they return has a shape that no number decides.
"""

from __future__ import annotations

import math

import torch

from bridge.base.torch_internals import aten
from bridge.capture.whole_functions import HANDLERS, WholeFunction, define_whole

__all__: list[str] = []


def _covariances(input, correction, fweights, aweights):
    dtype = input.dtype
    for weights in (fweights, aweights):
        dtype = dtype if weights is None else torch.promote_types(dtype, weights.dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.get_default_dtype()
    variables = input.shape[0] if input.dim() == 2 else 1
    return input.new_empty((variables, variables), dtype=dtype).squeeze()


def _correlations(input):
    return _covariances(input, 1, None, None)


def _chosen(input, r, with_replacement):
    count = input.shape[0]
    choices = math.comb(count + r - 1, r) if with_replacement and count else math.comb(count, r)
    return input.new_empty((choices, r) if r else (0,))


_cov = define_whole(
    "cov(Tensor input, int correction, Tensor? fweights, Tensor? aweights) -> Tensor",
    WholeFunction(aten.cov.default, ("correction", "fweights", "aweights")),
    _covariances,
)
_corrcoef = define_whole("corrcoef(Tensor input) -> Tensor", WholeFunction(aten.corrcoef.default), _correlations)
_combinations = define_whole(
    "combinations(Tensor input, int r, bool with_replacement) -> Tensor",
    WholeFunction(aten.combinations.default),
    _chosen,
)


def _traced_cov(input, *, correction=1, fweights=None, aweights=None):
    return _cov(input, correction, fweights, aweights)


def _traced_combinations(input, r=2, with_replacement=False):
    if type(input.shape[0]) is not int or input.dim() != 1:
        return torch.combinations(input, r, with_replacement)
    return _combinations(input, r, with_replacement)


for _function in (torch.cov, torch.Tensor.cov):
    HANDLERS[_function] = _traced_cov
for _function in (torch.corrcoef, torch.Tensor.corrcoef):
    HANDLERS[_function] = lambda input: _corrcoef(input)
HANDLERS[torch.combinations] = _traced_combinations
