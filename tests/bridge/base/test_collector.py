"""Collections are cheap while a model is added, and as before afterwards."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch
from bridge.base import collector
from bridge.base.collector import collection_paused, only_new_objects_collected
from bridge.lowering import reuse

_HAS_FROZEN = collector.has_frozen


@pytest.fixture(autouse=True, scope="module")
def nothing_is_frozen():
    """The collector's state as in a user's process; conftest.py freezes the objects of the test process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collector, "has_frozen", _HAS_FROZEN)
        gc.unfreeze()
        yield
    gc.collect()
    gc.freeze()


class Cycle:
    def __init__(self):
        self.itself = self


def test_what_was_there_is_passed_over_and_collected_afterwards():
    gc.collect()  # Python 3.12 has frozen objects of its own after it
    with collection_paused():  # no automatic collection
        old = weakref.ref(Cycle())
        with only_new_objects_collected():
            new = weakref.ref(Cycle())
            gc.collect()
            assert old() is not None and new() is None
        assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("stay", [True, False])
def test_imported_objects_are_passed_over(stay):
    gc.collect()  # as above
    with collection_paused(), only_new_objects_collected():
        before = gc.get_freeze_count()
        with collection_paused(objects_stay=stay):
            made = [Cycle() for _ in range(1000)]
        assert (gc.get_freeze_count() >= before + len(made)) == stay
    assert gc.get_freeze_count() == 0


def test_objects_that_the_user_froze_stay_frozen():
    """A garbage cycle stays: the number of frozen objects shrinks whenever one of them is freed by its count."""
    with collection_paused():
        frozen = weakref.ref(Cycle())
        gc.freeze()
        try:
            with only_new_objects_collected():
                pass
            gc.collect()
            assert frozen() is not None
        finally:
            gc.unfreeze()
    gc.collect()
    assert frozen() is None


@pytest.mark.parametrize("enabled", [True, False])
def test_a_pause_leaves_the_setting_as_it_was(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with collection_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_adding_a_module_walks_through_no_old_objects(monkeypatch):
    seen = []

    def noted(*args, **kwargs):
        seen.append(gc.get_freeze_count())
        return original(*args, **kwargs)

    original = reuse.record_call
    monkeypatch.setattr(reuse, "record_call", noted)
    gc.collect()  # as above
    with collection_paused():
        add_tvm_dispatch(nn.Linear(3, 2), torch.randn(4, 3))
        assert seen[0] > 10_000 and gc.get_freeze_count() == 0
