"""Masks by compiled code are torch's, bit for bit, and so is the generator afterwards."""

from __future__ import annotations

import copy
import ctypes
import itertools
import logging
import math
import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bridge import add_tvm_dispatch, stats
from bridge.compile import Built
from bridge.compile.cpu import mt19937 as code
from bridge.compile.cpu import mt19937 as draw_code
from bridge.compile.cpu.backend import host_backend
from bridge.compile.cpu.mt19937 import STATE_WORDS
from bridge.rng import cpu as mt19937
from bridge.rng import engine
from bridge.rng.cpu import Mask, stream

EDGES = [*range(1, 34), 155, 156, 157, *range(308, 318), *range(620, 630), 935, 936, 937, 4096]


def flat(count: int, probability: float = 0.9) -> Mask:
    return Mask((count,), (1,), probability)


def draw(kernels: mt19937.Kernels, masks: list[Mask], generator: torch.Generator | None = None) -> list[Tensor]:
    return mt19937.MaskRun(kernels, masks).draw(generator)


def assert_draws_alike(kernels: mt19937.Kernels, masks: list[Mask], generator: torch.Generator) -> None:
    """Draws from the generator, and as torch does from its twin; compares masks and states. Leaves it advanced."""
    twin = torch.Generator()
    twin.set_state(generator.get_state())
    drawn = draw(kernels, masks, generator)
    for mask, ours in zip(masks, drawn, strict=True):
        theirs = torch.empty_strided(mask.shape, mask.stride, dtype=torch.float32)
        theirs.bernoulli_(mask.probability, generator=twin)
        assert ours.dtype == torch.bool and ours.stride() == theirs.stride()
        assert torch.equal(ours, theirs.to(torch.bool)), mask
    assert torch.equal(generator.get_state(), twin.get_state()), masks


@pytest.mark.parametrize("probability", [0.9, 0.5, 1 / 3, 1e-9, 0.0, 1.0])
def test_sizes_from_a_fresh_seed(kernels, probability):
    for count in EDGES:
        assert_draws_alike(kernels, [flat(count, probability)], torch.Generator().manual_seed(count))


@pytest.mark.parametrize("count", [100_000, 10_000_000 + 1])
def test_large_sizes(kernels, count):
    generator = torch.Generator().manual_seed(3)
    torch.rand(17, generator=generator)
    assert_draws_alike(kernels, [flat(count)], generator)


def test_every_position_in_the_block(kernels):
    sizes = random.Random(0)
    for used in range(626):
        generator = torch.Generator().manual_seed(used)
        torch.rand(used, generator=generator)  # one output an element
        for _ in range(2):
            assert_draws_alike(kernels, [flat(sizes.choice(EDGES), sizes.random())], generator)


OTHERS = {
    "rand": lambda g, n: torch.rand(n, generator=g),
    "rand float64": lambda g, n: torch.rand(n, dtype=torch.float64, generator=g),
    "randn": lambda g, n: torch.randn(n, generator=g),  # below 16 elements one by one, a number kept for the next call
    "randn float64": lambda g, n: torch.randn(n, dtype=torch.float64, generator=g),
    "normal_": lambda g, n: torch.empty(n).normal_(1.0, 2.0, generator=g),
    "bernoulli_": lambda g, n: torch.empty(n).bernoulli_(0.4, generator=g),
    "bernoulli of a tensor": lambda g, n: torch.bernoulli(torch.full((n,), 0.4), generator=g),
    "randint": lambda g, n: torch.randint(0, 1000, (n,), generator=g),
    "randperm": lambda g, n: torch.randperm(n, generator=g),
    "exponential_": lambda g, n: torch.empty(n).exponential_(generator=g),
}


def test_between_draws_of_torch(kernels):
    """Masks go on after torch's draws, and torch's draws go on after masks."""
    choose = random.Random(1)
    ours, theirs = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    for name, count in itertools.product(OTHERS, (1, 3, 15, 16, 17, 333)):
        assert torch.equal(OTHERS[name](ours, count), OTHERS[name](theirs, count)), f"{name} after a mask"
        mask = flat(choose.choice(EDGES))
        drawn = draw(kernels, [mask], ours)[0]
        assert torch.equal(drawn, torch.empty(mask.count, dtype=torch.bool).bernoulli_(0.9, generator=theirs)), name
        assert torch.equal(ours.get_state(), theirs.get_state()), f"a mask after {name}"


def test_a_normal_number_kept_for_later_survives(kernels):
    ours, theirs = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    for generator in (ours, theirs):
        torch.randn(1, generator=generator)
        torch.randn(1, dtype=torch.float64, generator=generator)
    draw(kernels, [flat(500)], ours)
    torch.empty(500).bernoulli_(0.9, generator=theirs)
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(torch.randn(1, generator=ours, dtype=dtype), torch.randn(1, generator=theirs, dtype=dtype))


def test_several_masks_in_any_layout(kernels):
    permuted = torch.empty(4, 5, 6, 7).permute(2, 0, 3, 1)
    masks = [
        flat(311, 0.1),
        Mask((3, 1, 5), (5, 99, 1), 0.5),  # the stride of a dimension of one element says nothing
        Mask(permuted.shape, permuted.stride(), 0.25),
        Mask((), (), 0.5),
        Mask((3, 0, 2), (0, 2, 1), 0.5),
        flat(1, 0.7),
    ]
    assert all(mask.dense for mask in masks)
    generator = torch.Generator().manual_seed(11)
    for _ in range(5):
        assert_draws_alike(kernels, masks, generator)


@pytest.mark.parametrize("shape, stride", [((4,), (2,)), ((3, 4), (0, 1)), ((2, 3), (4, 1)), ((2, 2), (1, 1))])
def test_memory_with_gaps_or_overlaps_is_not_dense(shape, stride):
    assert not Mask(shape, stride, 0.5).dense


def test_the_threshold_is_exact(kernels):
    """An element is kept iff its number is less than the probability: no rounding in between."""
    for seed in range(200):
        number = torch.rand(1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).item()
        for probability, kept in (
            (number, False),
            (math.nextafter(number, 1), True),
            (math.nextafter(number, 0), False),
        ):
            generator = torch.Generator().manual_seed(seed)
            assert draw(kernels, [flat(1, probability)], generator)[0].item() is kept
    for probability in (5e-324, 2**-53, 2**-53 * 1.5, 1 - 2**-53):
        assert_draws_alike(kernels, [flat(2000, probability)], torch.Generator().manual_seed(0))


def test_a_probability_outside_0_and_1_is_refused():
    for probability in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"in \[0, 1\]"):
            flat(3, probability)


@pytest.mark.parametrize("left, following", [(0, 0), (625, 1), (300, 400), (-1, 0), (1, 2**32 - 1)])
def test_an_engine_in_no_valid_state_is_not_followed(kernels, left, following):
    generator = torch.Generator().manual_seed(0)
    _, engine = kernels.layout.addresses(generator)
    head = (ctypes.c_uint32 * 3).from_address(engine + 8)
    before = head[0], head[2]
    head[0], head[2] = left % 2**32, following
    mask, state = flat(10).empty().fill_(True), generator.get_state()
    assert not kernels.fill(generator, [mask], stream([(10, 0)], 1))
    assert mask.all() and torch.equal(generator.get_state(), state)
    head[0], head[2] = before
    assert_draws_alike(kernels, [flat(10)], generator)


# Where torch draws by another rule


@pytest.fixture
def unchecked():
    """Clears compiled and checked functions, before and after."""

    def forget() -> None:
        draw_code.bernoulli_function.cache_clear()
        engine.functions.cache_clear()
        engine.layout_for.cache_clear()
        mt19937._checked.cache_clear()
        mt19937._same_bits.cache_clear()

    forget()
    yield
    forget()


def test_the_check_finds_another_generator_and_says_so_once(unchecked, monkeypatch, caplog):
    monkeypatch.setattr(code, "_MATRIX", code._MATRIX ^ 1)
    with caplog.at_level(logging.INFO, "bridge.mt19937"):
        assert mt19937.compiled() is None
        assert mt19937.compiled() is None
    assert len(caplog.records) == 1 and "rule of its own" in caplog.text


@pytest.mark.parametrize("wrong", ["bits", "state", "refused"])
def test_the_check_compares_bits_and_states(kernels, wrong):
    def bernoulli(lock, engine, masks, chunks, segments, terms, count):
        if wrong == "bits":
            threshold = ctypes.c_int64.from_address(segments + 24)
            threshold.value = min(threshold.value, 2**52)
        if wrong == "state":
            room = ctypes.create_string_buffer(ctypes.string_at(engine, 4 * STATE_WORDS))
            engine = ctypes.addressof(room)
        return wrong != "refused" and kernels.serial.function(lock, engine, masks, chunks, segments, terms, count)

    assert mt19937._draws_as_torch(kernels)
    assert not mt19937._draws_as_torch(mt19937.Kernels(Built(lambda: bernoulli), kernels.layout))


class Drops(nn.Module):
    """Masks large and small, other draws between them, an unused mask, a mask of floats."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(40, 40, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.linear(x), 0.3) + F.dropout(x, 0.5)
        y = F.dropout(y + torch.randn_like(y), 0.1)
        F.dropout(y, 0.2)
        y = F.dropout(y.transpose(0, 1), 0.4).transpose(0, 1) * torch.empty(3, 20, 1).bernoulli_(0.5)
        y = y * torch.rand(3, 1, 1)
        return F.dropout1d(y, 0.5)


def check_module(calls: int) -> nn.Module:
    """Compares outputs, gradients and the generator with eager's over some calls."""
    eager = Drops().train()
    ours = add_tvm_dispatch(copy.deepcopy(eager), torch.randn(3, 20, 40, dtype=torch.float64))
    x = torch.randn(3, 20, 40, dtype=torch.float64)
    results = []
    for module in (eager, ours):
        torch.manual_seed(9)
        outputs = [module(x) for _ in range(calls)]
        sum(output.square().sum() for output in outputs).backward()
        results.append((outputs, module.linear.weight.grad, torch.get_rng_state()))
    (expected, gradient, state), (got, our_gradient, our_state) = results
    assert torch.equal(state, our_state)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(our_gradient, gradient, rtol=1e-10, atol=1e-12)
    assert stats(ours).hits == calls
    return ours


def test_a_module_draws_its_masks_by_compiled_code(kernels, monkeypatch):
    runs = []
    draw = mt19937.MaskRun.draw

    def counting(run: mt19937.MaskRun, generator: torch.Generator | None) -> list[Tensor]:
        runs.append([mask.shape for mask in run._masks])
        return draw(run, generator)

    monkeypatch.setattr(mt19937.MaskRun, "draw", counting)
    monkeypatch.setattr("bridge.dispatch.dispatcher.measure_profitability", lambda *_: None)  # calls of its own
    check_module(calls=3)
    full, turned, path = (3, 20, 40), (20, 3, 40), (3, 20, 1)
    assert runs == [[full, full], [full, full, turned, path]] * 3, "the last mask, of a few elements, is left to torch"


FAULTS = {
    "another rule": (mt19937, "_draws_as_torch", lambda kernels: False),
    "no layout": (engine, "find_layout", lambda: None),
    "not the lock": (engine, "is_the_lock", lambda hold, layout: False),
    "lock elsewhere": (engine, "_LOCK", 24),
    "lock in the engine": (engine, "_LOCK", 104),
    "object elsewhere": (engine, "_HANDLE", 8),
    "no memory": (engine, "_read", lambda address, size: b""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_module_where_the_check_fails_draws_by_torch(kernels, unchecked, fault, monkeypatch, caplog):
    monkeypatch.setattr(*FAULTS[fault])
    monkeypatch.setattr(mt19937, "MaskRun", None)
    with caplog.at_level(logging.INFO, "bridge.mt19937"):
        check_module(calls=2)
    (told,) = (each for each in caplog.records if each.name == "bridge.mt19937")  # other channels may log timings
    assert "left to it" in told.getMessage()


def test_masks_of_a_rule_that_depends_on_the_dtype(monkeypatch):
    monkeypatch.setattr(mt19937, "_same_bits", lambda dtype: False)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.manual_seed(3)
        drawn = mt19937.draw_by_torch(Mask((4, 50), (1, 4), 0.6, dtype))
        torch.manual_seed(3)
        expected = torch.empty_strided((4, 50), (1, 4), dtype=dtype).bernoulli_(0.6)
        assert drawn.dtype == torch.bool and drawn.stride() == (1, 4)
        assert torch.equal(drawn, expected.to(torch.bool))


def test_kernels_are_built_once(kernels):
    engine.functions.cache_clear()  # another test may have cleared the compiler's cache since
    kernels = mt19937.compiled()
    (built,) = host_backend().build([("another_name", draw_code.bernoulli_function(False))])
    assert built is kernels.serial
    assert mt19937.compiled() == kernels
