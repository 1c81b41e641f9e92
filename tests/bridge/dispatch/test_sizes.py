"""Conditions on arguments with symbolic extents: every size is read, compared and named; both paths decide alike."""

import pytest
import torch

from autodiff.extents import ExtentScope
from bridge.base.errors import ARGUMENTS, GuardFailure
from bridge.dispatch.guards.sizes import ArgumentSizes
from bridge.dispatch.guards.tensors import MAX_SIZES, SizedTensorGuard


def guard_of(*, grads: bool = False) -> tuple[ExtentScope, SizedTensorGuard]:
    """A guard of ``x: (batch, length, 8)``, ``mask: (batch, length)``, column-major ``twice: (2 * length + 1, 4)``."""
    scope = ExtentScope()
    batch, length = scope.symbol("batch", 3), scope.symbol("length", 10, high=512)
    shapes = [(batch, length, 8), (batch, length), (2 * length + 1, 4)]
    strides = [(8 * length, 8, 1), (length, 1), (1, 2 * length + 1)]
    sizes = ArgumentSizes(scope, shapes, strides, ["x", "mask", "twice"])
    given = {"kinds": [(torch.Tensor,)] * 3, "names": ["x", "mask", "twice"], "stage": ARGUMENTS, "saves": grads}
    guard = SizedTensorGuard(
        tensors(3, 10), sizes, **given, explain_type=lambda name, now: GuardFailure(ARGUMENTS, f"type of {name}")
    )
    return scope, guard


def tensors(batch: int, length: int, **changed: torch.Tensor) -> list[torch.Tensor]:
    found = {
        "x": torch.zeros(batch, length, 8),
        "mask": torch.zeros(batch, length, dtype=torch.bool),
        "twice": torch.zeros(4, 2 * length + 1).t(),
    }
    return [*(found | changed).values()]


@pytest.mark.parametrize(("batch", "length"), [(3, 10), (2, 2), (7, 512), (100, 31)])
def test_sizes_in_the_range_fit(batch, length, monkeypatch):
    """The quick path checks new sizes closely, once, without another check of the module."""
    _, guard = guard_of()
    call = tensors(batch, length)
    assert guard.sizes.of(call) == {"batch": batch, "length": length}
    assert guard.failure(call) is None
    assert guard.alike[False](call)
    monkeypatch.setattr(guard, "failure", None)
    assert guard.alike[False](call) and guard.alike[False](tensors(batch, length))


OTHERS = {
    "the range's end": (
        tensors(3, 513),
        "shape of x: dimension 1 (length) is 513, compiled for 2 <= length <= 512",
    ),
    "one": (tensors(1, 10), "shape of x: dimension 0 (batch) is 1, compiled for 2 <= batch"),
    "none": (tensors(0, 10), "shape of x: dimension 0 (batch) is 0, compiled for 2 <= batch"),
    "another second place": (
        tensors(3, 10, mask=torch.zeros(3, 11, dtype=torch.bool)),
        "shape of mask: compiled for (batch, length), called with (3, 11)",
    ),
    "another expression": (
        tensors(3, 10, twice=torch.zeros(4, 20).t()),
        "shape of twice: compiled for (2*length + 1, 4), called with (20, 4)",
    ),
    "a static extent": (
        tensors(3, 10, x=torch.zeros(3, 10, 9)),
        "shape of x: compiled for (batch, length, 8), called with (3, 10, 9)",
    ),
    "fewer dimensions": (
        tensors(3, 10, x=torch.zeros(3, 10)),
        "shape of x: compiled for (batch, length, 8), called with (3, 10)",
    ),
    "no dimensions": (
        tensors(3, 10, x=torch.zeros(())),
        "shape of x: compiled for (batch, length, 8), called with ()",
    ),
    "strides": (
        tensors(3, 10, x=torch.zeros(10, 3, 8).transpose(0, 1)),
        "strides of x: compiled for (80, 8, 1), called with (8, 24, 1)",
    ),
    "strides of another size": (
        tensors(4, 6, twice=torch.zeros(13, 4)),
        "strides of twice: compiled for (1, 13), called with (4, 1)",
    ),
    "dtype": (
        tensors(4, 6, x=torch.zeros(4, 6, 8, dtype=torch.float64)),
        "dtype of x: compiled for torch.float32, called with torch.float64",
    ),
    "requires_grad": (
        tensors(4, 6, x=torch.zeros(4, 6, 8, requires_grad=True)),
        "requires_grad of x: compiled for False, called with True",
    ),
    "layout": (tensors(3, 10, x=torch.zeros(3, 10, 8).to_sparse()), "layout of x: compiled for torch.strided"),
    "nested": (
        tensors(3, 10, x=torch.nested.nested_tensor([torch.zeros(10, 8)] * 3)),
        "layout of x: a nested tensor",
    ),
    "type": (tensors(3, 10, x=torch.nn.Parameter(torch.zeros(3, 10, 8), requires_grad=False)), "type of x"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_is_named_and_the_quick_path_does_not_take_it(name):
    _, guard = guard_of()
    call, reason = OTHERS[name]
    guard.learn(tensors(4, 6), inference=False)
    failure = guard.failure(call)
    assert failure.stage == ARGUMENTS and failure.reason.startswith(reason)
    if name != "nested":  # which is asked before
        assert not guard.alike[False](call)


def test_conclusions_of_the_lowering_are_conditions():
    scope = ExtentScope()
    batch, length = scope.symbol("batch", 4), scope.symbol("length", 16)
    assert length % 8 == 0 and length != batch and batch < length
    sizes = ArgumentSizes(scope, [(batch, length)], [(length, 1)], ["x"])

    def reason(*shape: int) -> str | None:
        failure = sizes.failure([torch.zeros(shape)])
        return failure and failure.reason

    assert reason(4, 24) is None and reason(23, 24) is None
    assert reason(4, 20) == "shape of x: compiled for ((length) % (8)) == 0, called with length = 20"
    assert reason(8, 8) == "shape of x: compiled for length != batch, called with batch = 8, length = 8"
    assert reason(9, 8) == "shape of x: compiled for length >= batch + 1, called with batch = 9, length = 8"


def test_a_symbol_is_read_from_a_multiple_where_there_is_nothing_else():
    scope = ExtentScope()
    half = scope.symbol("half", 5, high=20)
    sizes = ArgumentSizes(scope, [(2 * half + 1, 3)], [(3, 1)], ["x"])
    assert sizes.of([torch.zeros(15, 3)]) == {"half": 7} and sizes.failure([torch.zeros(15, 3)]) is None
    even = sizes.failure([torch.zeros(14, 3)])
    assert even.reason == "shape of x: compiled for (2*half + 1, 3), called with (14, 3)"
    large = sizes.failure([torch.zeros(43, 3)])
    assert large.reason == "shape of x: dimension 0 (2*half + 1) is 43, compiled for 2 <= half <= 20"


def test_a_symbol_that_no_argument_tells_is_refused():
    scope = ExtentScope()
    rows, columns = scope.symbol("rows", 5), scope.symbol("columns", 6)
    with pytest.raises(ValueError, match="wanted an argument with a dimension that tells columns"):
        ArgumentSizes(scope, [(rows, rows * columns)], [(rows * columns, 1)], ["x"])


def test_the_looks_of_many_sizes_are_bounded(monkeypatch):
    _, guard = guard_of()
    for length in range(2, 302):
        guard.learn(tensors(2, length), inference=False)
    monkeypatch.setattr(guard, "failure", lambda tensors: GuardFailure(ARGUMENTS, "not known"))
    known = [length for length in range(2, 302) if guard.alike[False](tensors(2, length))]
    assert known == [*range(302 - len(known), 302)] and MAX_SIZES * 15 // 16 <= len(known) <= MAX_SIZES


def test_inference_mode_is_known_by_itself(monkeypatch):
    _, guard = guard_of()
    with torch.inference_mode():
        call = tensors(5, 7)
        assert guard.failure(call) is None
        guard.learn(call, inference=True)
        monkeypatch.setattr(guard, "failure", lambda tensors: GuardFailure(ARGUMENTS, "not known"))
        assert guard.alike[True](call) and not guard.alike[False](call)
