"""The default generator is moved only if no other thread has drawn: comparison and replacement under its lock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bridge.rng import engine, swap_state, undo_draws

FLOAT64, HAS_FLOAT64, FLOAT32 = 628, 630, 631
"""Where a state has the normal numbers that are kept for later, in words of 64 bits."""


def state_of(seed: int, used: int = 0, kept: int = 0, single: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    torch.rand(used, generator=generator)
    state = generator.get_state()
    state.view(torch.int64)[[FLOAT64, HAS_FLOAT64, FLOAT32]] = torch.tensor(
        [kept, kept > 0, (single > 0) << 32 | single]
    )
    return state


STATES = {
    "fresh": state_of(1),
    "other seed": state_of(2),
    "used": state_of(1, 5),
    "used up": state_of(1, 624),
    "keeps a float64": state_of(1, 5, kept=7),
    "keeps another": state_of(1, 5, kept=8),
    "keeps a float32": state_of(1, 5, single=7),
    "keeps both": state_of(1, 5, kept=7, single=7),
}


@pytest.fixture(params=["under the lock", "without"], autouse=True)
def way(request, monkeypatch):
    if request.param == "without":
        monkeypatch.setattr(engine, "layout_for", lambda hold: None)
    else:
        now = torch.get_rng_state()
        swap_state(now, now)  # tries itself out
        monkeypatch.setattr(engine, "VF", SimpleNamespace(equal=None))  # the other way's
    with torch.random.fork_rng(devices=[]):
        yield


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.tolist() == b.tolist()


@pytest.mark.parametrize("now", STATES)
def test_states(now):
    for before in STATES:
        torch.set_rng_state(STATES[now])
        after = STATES["keeps both"]
        assert swap_state(STATES[before], after) is (now == before)
        assert same(torch.get_rng_state(), after if now == before else STATES[now])


@pytest.mark.parametrize("other", [None, "before", "after", "keeps"])
def test_undo(other):
    """Another thread's numbers do not repeat, including the cached normal number."""

    def draw(generator=None):
        torch.rand(7, generator=generator)
        torch.empty(9).bernoulli_(0.5, generator=generator)

    torch.set_rng_state(STATES["keeps a float64"])
    before = torch.get_rng_state()
    if other == "before":
        torch.rand(1)
    draw()
    if other == "after":
        torch.rand(1)
    if other == "keeps":
        torch.randn(1)
    drawn = torch.get_rng_state()
    undo_draws(before, draw)
    assert same(torch.get_rng_state(), drawn if other else before)
