"""Views with symbolic extents: at every size that their guards accept, the elements that torch's operations give."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch

from autodiff.extents import Dim, Extent, ExtentScope, minimum, sample_of
from bridge.compile.loop_ir import views

Values = Callable[[list[Dim]], list[int]]
Operation = Callable[[torch.Tensor, Values], torch.Tensor]


def permuted(rng: random.Random, view: views.View, extents: list[Extent]) -> tuple[views.View | None, Operation]:
    axes = rng.sample(range(len(view.shape)), len(view.shape))
    return views.permute(view, axes), lambda x, values: x.permute(axes)


def sliced(rng: random.Random, view: views.View, extents: list[Extent]) -> tuple[views.View | None, Operation]:
    axis, step, begin = rng.randrange(len(view.shape)), rng.choice([1, 1, 2, 3]), rng.choice([0, 0, 1, 2])
    extent = view.shape[axis]
    end = rng.choice([extent, extent - 1, extent // 2, minimum(extent, 4), extents[0]])
    begin = begin if begin <= end else 0

    def operation(x: torch.Tensor, values: Values) -> torch.Tensor:
        (last,) = values([end])
        return x.index_select(axis, torch.arange(begin, max(begin, min(last, x.shape[axis])), step))

    return views.slice_view(view, axis, begin, end, step), operation


def reshaped(rng: random.Random, view: views.View, extents: list[Extent]) -> tuple[views.View | None, Operation]:
    axis, other = rng.randrange(len(view.shape)), rng.choice([1, 2, 3, *extents])
    extent = view.shape[axis]
    if rng.random() < 0.4 and axis:
        shape = [*view.shape[: axis - 1], view.shape[axis - 1] * extent, *view.shape[axis + 1 :]]
    elif sample_of(extent) % sample_of(other) == 0 and extent % other == 0:
        shape = [*view.shape[:axis], *rng.sample([other, extent // other], 2), *view.shape[axis + 1 :]]
    else:
        shape = [*view.shape, 1]
    return views.reshape(view, shape), lambda x, values: x.reshape(values(shape))


def expanded(rng: random.Random, view: views.View, extents: list[Extent]) -> tuple[views.View | None, Operation]:
    shape = [3, *(extents[0] if isinstance(extent, int) and extent == 1 else extent for extent in view.shape)]
    return views.expand(view, shape), lambda x, values: x.expand(values(shape))


@pytest.mark.parametrize("seed", range(40))
def test_a_chain_of_operations_is_a_view_of_those_elements_at_every_size(seed):
    rng = random.Random(seed)
    scope = ExtentScope()
    extents = [scope.symbol(name, rng.randrange(2, 7), high=rng.choice([None, 9])) for name in "nm"]
    shape = [rng.choice([*extents, 1, 2, 3, 4, extents[0] * 2, extents[1] + 1]) for _ in range(rng.randrange(1, 4))]
    view, operations = views.dense(shape), []
    for _ in range(5):
        found, operation = rng.choice([permuted, sliced, reshaped, reshaped, expanded])(rng, view, extents)
        if found is not None:
            view = found
            operations.append(operation)
    box = views.box(view, shape)
    is_dense, merged = views.is_dense(view), views.merged(view)
    broken = scope.broken()
    assert broken({symbol.name: sample for symbol, sample in scope.samples.items()}) is None
    for sizes in itertools.product([2, 3, 4, 5, 8, 12], repeat=2):
        given = dict(zip("nm", sizes, strict=True))
        if broken(given) is not None:
            continue

        def values(dims: list[Dim], given: dict[str, int] = given) -> list[int]:
            return list(scope.compiled(list(dims))(given))

        base = torch.arange(math.prod(values(shape)))
        wanted = base.reshape(values(shape))
        for operation in operations:
            wanted = operation(wanted, values)
        assert values(view.shape) == list(wanted.shape), (sizes, scope.guards)
        if not wanted.numel():
            continue
        (offset,) = values([view.offset])
        strided = base.as_strided(values(view.shape), values(view.strides), offset)
        fewest = base.as_strided(values([extent for extent, _ in merged]), values([s for _, s in merged]), offset)
        assert torch.equal(strided, wanted), (sizes, view, scope.guards)
        assert torch.equal(fewest.flatten(), wanted.flatten()), (sizes, merged)
        assert not is_dense or torch.equal(wanted.flatten(), offset + torch.arange(wanted.numel())), (sizes, view)
        if box is not None:
            cut = tuple(slice(at, at + extent) for at, extent in zip(values(box), wanted.shape, strict=True))
            assert torch.equal(base.reshape(values(shape))[cut], wanted), (sizes, view, box)
