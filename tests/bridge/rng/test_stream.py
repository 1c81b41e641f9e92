"""A stream of masks on many threads: jump polynomials, chunks; bits and state equal one thread's, and torch's."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from bridge.compile import DEGREE, PER_BLOCK
from bridge.rng import cpu
from bridge.rng import cpu as mt19937
from bridge.rng import cpu as streams
from tests.sampling import sampled

BLOCK = 2 * PER_BLOCK


@pytest.fixture(scope="module")
def words() -> np.ndarray:
    """Untempered words of a stream, by numpy's twister."""
    twister, blocks = np.random.RandomState(5), []
    for _ in range(70):
        blocks.append(twister.get_state()[1])
        twister.random_sample(PER_BLOCK)
    return np.concatenate(blocks[1:])  # the state before the first draw has no block yet


def test_the_characteristic_polynomial(words):
    (terms,) = np.nonzero(cpu._characteristic())
    assert terms[-1] == DEGREE
    for k in (1, 2, 623, 5000):
        assert np.bitwise_xor.reduce(words[k + terms]) == 0


@pytest.mark.parametrize("distance", [0, 1, 5, 623, DEGREE - 1, DEGREE, DEGREE + 1, 20000, 21217])
def test_powers(words, distance):
    terms, places = cpu.terms([cpu.power(distance)])
    assert places == [0, len(terms)]
    for k in (1, 2, 600):
        assert np.bitwise_xor.reduce(words[k + terms]) == words[k + distance]


def test_products():
    a, b = (cpu.power(distance) for distance in (10**6, 54321))
    assert np.array_equal(cpu.times(a, b), cpu.power(10**6 + 54321))


def test_chunks_cover_the_stream():
    for threads in (1, 2, 3, 8, 64):
        for elements in (1, 10**5, 10**6, 1_248_000, 1_248_001, 3 * 10**6 + 1, 10**7):
            begins = streams.chunks_of(elements, threads)
            sizes = np.diff([*begins, -(-elements // PER_BLOCK)])
            assert begins[0] == 0 and (sizes > 0).all() and len(sizes) <= threads
            assert len(sizes) == 1 or sizes[0] >= sizes[1:].max(), "the first thread jumps nowhere"


def test_masks_of_many_sizes_share_jumps():
    """Dynamic sizes need few new jump polynomials, which are slow to find."""
    assert len({tuple(streams.chunks_of(elements, 2)) for elements in range(4 * 10**6, 8 * 10**6, 10**4)}) <= 10


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(streams, "_JUMP", 2)
    monkeypatch.setattr(streams, "_LEAST", 1)


def flat(count, probability=0.9):
    return mt19937.Mask((count,), (1,), probability)


MASKS = {
    "one": [flat(50 * PER_BLOCK + 17)],
    "whole blocks": [flat(16 * PER_BLOCK, 0.5)],
    "one of three spans chunks": [flat(500, 0.3), flat(30 * PER_BLOCK), flat(1, 0.5)],
    "many small": [flat(count, 0.7) for count in range(300, 340)],
    "empty ones": [flat(0), flat(7000, 0.2), flat(0), flat(0), flat(3000), flat(0)],
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("threads", sampled([2, 3, 7, 16], [3, 16]))
def test_bits_and_state_on_many_threads(kernels, small_chunks, monkeypatch, masks, threads):
    """From every kind of position in the block, a fresh seed and a used-up block among them."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    run = mt19937.MaskRun(kernels, masks)
    for used in (0, 1, 2, 300, 311, 622, 623, 624, 625):
        ours, theirs = (torch.Generator().manual_seed(used) for _ in range(2))
        for generator in (ours, theirs):
            torch.rand(used, generator=generator)
        for _ in range(2):
            for mask, drawn in zip(masks, run.draw(ours), strict=True):
                expected = torch.empty(mask.count, dtype=torch.bool).bernoulli_(mask.probability, generator=theirs)
                assert torch.equal(drawn, expected), used
            assert torch.equal(ours.get_state(), theirs.get_state()), used
    assert run._stream(threads).count > 1


def test_large_masks(kernels, monkeypatch):
    masks, rates = [flat(count, random.Random(count).random()) for count in (3_000_001, 77, 2_000_000)], (1, 2, 5)
    drawn = []
    for threads in rates:
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        generator = torch.Generator().manual_seed(1)
        run = mt19937.MaskRun(kernels, masks)
        drawn.append([*run.draw(generator), generator.get_state()])
        assert run._stream(threads).count == threads
    assert all(map(torch.equal, *drawn[:2])) and all(map(torch.equal, *drawn[1:]))


def test_small_masks_stay_on_one_thread():
    assert streams.chunks_of(1_000_000, 64) == [0]


def test_chunks_that_do_not_fit_together_are_found(kernels, small_chunks, monkeypatch, caplog):
    """With a wrong polynomial one thread draws, and the bits are right."""
    monkeypatch.setattr(cpu, "power", lambda distance, power=cpu.power: power(distance + 1))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    streams._terms.cache_clear()
    run, generator = mt19937.MaskRun(kernels, [flat(5000)]), torch.Generator().manual_seed(1)
    (drawn,) = run.draw(generator)
    streams._terms.cache_clear()
    twin = torch.Generator().manual_seed(1)
    assert torch.equal(drawn, torch.empty(5000, dtype=torch.bool).bernoulli_(0.9, generator=twin))
    assert run._stream(4).count == 1 and "one draws them" in caplog.text
