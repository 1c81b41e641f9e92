"""Choices in place of a backend's default numbers; limits and blocks change no bit, orders round."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tvm.relax import op

from bridge.artifact import from_text, to_text
from bridge.compile import (
    LIMITS,
    NO_CHOICES,
    ORDER,
    PARTITION,
    PRODUCTS,
    CompileOptions,
    ProductShape,
    backend_for,
    compile_function,
    load_program,
    products_and_calls,
    same_code,
    save_program,
)
from bridge.compile.schedule.chain_plan import GENERATED, LayoutClass
from tests.bridge.compile_helpers import assert_same, function
from tests.sampling import sampled

HOST = backend_for(None)
SHAPE = ProductShape("float32", 1, 224, 256, 32, LayoutClass("row"), LayoutClass("column"))
EVERY = NO_CHOICES.having(LIMITS, "tasks", 3).having(ORDER, "interleaved", (2, 1)).having(PRODUCTS, SHAPE, "mm")


def compiled(func, choices, deterministic=False):
    options = CompileOptions.current(HOST.choosing(choices))
    return compile_function(func, name="test", options=replace(options, deterministic=deterministic))


def normalized(emit, x, scale):
    """A softmax, sums of rows and of columns, a concatenation."""
    scaled = emit(op.multiply(x, scale))
    soft = emit(op.nn.softmax(scaled, axis=1))
    joined = emit(op.concat([scaled, emit(op.exp(x))], axis=1))
    return [soft, emit(op.sum(emit(op.exp(scaled)), [1])), emit(op.sum(scaled, [0])), joined]


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    inputs = [torch.randn(220, 168), torch.randn(168)]
    func = function([((220, 168), "float32"), ((168,), "float32")], normalized)
    return func, inputs, compile_function(func, name="test")(inputs)


def product(emit, x, weight):
    return [emit(op.matmul(x, emit(op.permute_dims(weight))))]


@pytest.mark.parametrize("place", [0, -1], ids=["first values", "last values"])
def test_limits_that_tuning_tries_change_no_bit(case, place):
    func, inputs, wanted = case
    choices = NO_CHOICES
    for each in HOST.alternatives:
        choices = choices.having(LIMITS, each.name, each.values[place]) if each.part == LIMITS else choices
    assert all(map(torch.equal, compiled(func, choices)(inputs), wanted))


@pytest.mark.parametrize(
    ("name", "value"),
    sampled(
        [(each.name, value) for each in HOST.alternatives if each.part == ORDER for value in each.values],
        [(each.name, each.values[0]) for each in HOST.alternatives if each.part == ORDER],
    ),
)
def test_orders_that_tuning_tries_only_round(case, name, value):
    func, inputs, wanted = case
    for mine, its in zip(compiled(func, NO_CHOICES.having(ORDER, name, value))(inputs), wanted, strict=True):
        assert_same(mine, its, rtol=1e-5, atol=2e-5)


def test_every_way_and_tile_that_tuning_tries():
    """Blocks change no bit of a generated product; other ways round otherwise."""
    func = function([((220, 32), "float32"), ((250, 32), "float32")], product)
    torch.manual_seed(0)
    inputs = [torch.randn(220, 32), torch.randn(250, 32)]
    ((shape, _),), () = products_and_calls(func, CompileOptions.current(HOST))
    assert shape == SHAPE
    policy = HOST.products(1, False)
    ways = policy.ways(shape, tuning=True)
    assert len(ways) > 6 or GENERATED not in ways
    found = {way: compiled(func, NO_CHOICES.having(PRODUCTS, shape, way)) for way in ways}
    (wanted,) = found["mm"](inputs)
    results = {way: program(inputs)[0] for way, program in found.items()}
    for way, result in results.items():
        assert_same(result, wanted, rtol=1e-5, atol=1e-5)
        assert not way.startswith(GENERATED) or torch.equal(result, results[GENERATED])
    assert len({program.backend.key for program in found.values()}) == len(ways)
    blocks = {str(program.steps) for way, program in found.items() if way.startswith(GENERATED)}
    assert len(blocks) > 4 or GENERATED not in ways
    torchs = compiled(func, NO_CHOICES.having(PRODUCTS, shape, ways[-1]), deterministic=True)
    assert "mm" in [step.name for step in torchs.steps]


def test_small_products_are_torchs_until_tuned():
    func = function([((8, 16), "float32"), ((16, 16), "float32")], product)
    ((shape, way),), () = products_and_calls(func, CompileOptions.current(HOST))
    assert way == "mm" and shape.multiplications == 2048
    inputs = [torch.randn(8, 16), torch.randn(16, 16)]
    assert HOST.seconds_of_ways(shape)
    for each in HOST.products(1, False).ways(shape, tuning=True):
        program = compiled(func, NO_CHOICES.having(PRODUCTS, shape, each))
        assert_same(program(inputs)[0], inputs[0] @ inputs[1].T, rtol=1e-5, atol=1e-5)
        assert (each == "mm") == (program.steps == compiled(func, NO_CHOICES).steps)


def test_a_program_with_choices_is_saved_with_them(case, tmp_path):
    func, inputs, _ = case
    program = compiled(func, EVERY)
    save_program(program, tmp_path / "program")
    for backend in (HOST, HOST.choosing(EVERY)):
        loaded = load_program(tmp_path / "program", backend)
        assert loaded == program and loaded.backend.choices == EVERY
        assert all(map(torch.equal, loaded(inputs), program(inputs)))
    other = HOST.choosing(NO_CHOICES.having(LIMITS, "nodes", 5))
    with pytest.raises(ValueError, match="wanted a backend without choices"):
        load_program(tmp_path / "program", other)


def test_code_is_compared_whatever_the_numbers_are(case):
    func, _, _ = case
    ours, theirs, others = (
        compiled(func, choices)
        for choices in (NO_CHOICES, NO_CHOICES.having(LIMITS, "terms", 15), NO_CHOICES.having(LIMITS, "nodes", 2))
    )
    assert same_code(ours, theirs) and ours != theirs and not same_code(ours, others)
    assert {*map(id, ours.code.values())} == {*map(id, theirs.code.values())}, "built once"


def test_choices_are_written_down():
    chosen = EVERY.having(PARTITION, None, 0.5)
    assert from_text(to_text(chosen)) == chosen and hash(from_text(to_text(chosen))) == hash(chosen)
    swapped = NO_CHOICES.having(LIMITS, "nodes", 3).having(LIMITS, "buffers", 4)
    assert swapped == NO_CHOICES.having(LIMITS, "buffers", 4).having(LIMITS, "nodes", 3)
    assert swapped.without(LIMITS, "nodes").without(LIMITS, "buffers") == NO_CHOICES and not NO_CHOICES and swapped
    assert list(chosen.words(HOST.limits, HOST.order)) == [
        "limits.tasks 64 -> 3",
        "order.interleaved (4, 2, 1) -> (2, 1)",
        f"product {SHAPE}: mm",
        "partition: budget 0.5",
    ]


@pytest.mark.parametrize("part", [LIMITS, ORDER])
def test_names_that_there_are_not(part):
    with pytest.raises(ValueError, match=f"{part}: there is no 'colour'"):
        NO_CHOICES.having(part, "colour", 3)
    with pytest.raises(ValueError, match="wanted powers of two"):
        HOST.choosing(NO_CHOICES.having(ORDER, "lanes", 12))
