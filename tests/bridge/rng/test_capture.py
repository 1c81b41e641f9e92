"""Draws during stream capture: calls that read a generator's state run eager, with nothing drawn."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from bridge.base.errors import GuardFailure
from bridge.rng import Draws


@pytest.fixture
def capturing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_states_are_not_read(capturing, monkeypatch):
    """Neither to take draws back nor for recomputed masks; torch's own draws stay in the graph."""
    draws = Draws([], [], [], "Module")
    assert draws.make() == [] and callable(draws.undo())
    draws._on_gpu = True
    assert draws.make() == []
    with pytest.raises(GuardFailure, match="a CUDA graph is being captured"):
        draws.undo()
    draws._reads_state = True
    draws._makers = [(torch.device("cuda"), lambda *_: pytest.fail("drawn"))]
    with pytest.raises(GuardFailure, match="a CUDA graph is being captured"):
        draws.make()


def test_nothing_is_compiled(capturing, monkeypatch):
    module = nn.Linear(4, 4)
    add_tvm_dispatch(module, torch.ones(2, 4), on_miss="compile")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    module(torch.ones(3, 4))
    assert len(stats(module).entries) == 1 and stats(module).misses.total() == 1
