"""GraphInputs: which addresses are part of a recording's key, which tensors are copied; bounds of recordings."""

from __future__ import annotations

import pytest
import torch

from bridge.compile.cuda.memory import bytes_of, pieces_of, places_of, rooms_of
from bridge.compile.graphs import control as control_module
from bridge.compile.graphs.control import RecordedGraphs
from bridge.compile.graphs.recordings import MAX_ADDRESSES, MAX_LARGE_ADDRESSES, GraphInputs
from tests.bridge.compile.host_recorder import HostSlots


def tensors(count=3):
    return [torch.empty(4) for _ in range(count)]


def test_what_never_returns_is_copied():
    graph_inputs, given, kept = GraphInputs(3), tensors(), []
    for _ in range(MAX_ADDRESSES + 1):
        assert graph_inputs.static == (0, 1, 2) and not graph_inputs.version
        kept.append(torch.empty(4))
        graph_inputs.meet([given[0], kept[-1], given[2]])
    assert graph_inputs.copied == (1,) and graph_inputs.static == (0, 2) and graph_inputs.version == 1
    assert graph_inputs.key(given) == (given[0].data_ptr(), given[2].data_ptr())


def test_large_tensors_may_have_more_addresses():
    """Parameters that FSDP gathers: the allocator takes a few places in turns."""
    graph_inputs, small, large = (
        GraphInputs(2),
        torch.empty(4),
        [torch.empty(1 << 19) for _ in range(MAX_LARGE_ADDRESSES + 1)],
    )
    for count, each in enumerate(large):
        assert not graph_inputs.copied, count
        graph_inputs.meet([small, each])
    assert graph_inputs.copied == (1,)


def test_what_moves_now_and_then_is_not():
    """Parameters move when a checkpoint is loaded: between two moves there are many replays."""
    graph_inputs, given, kept = GraphInputs(3), tensors(), []
    for _ in range(4 * MAX_ADDRESSES):
        kept.append(torch.empty(4))
        assert not graph_inputs.meet([kept[-1], *given[1:]]) and graph_inputs.meet(
            [kept[-1], *given[1:]], forgiven=True
        )
        for _ in range(40):
            graph_inputs.replayed()
    assert not graph_inputs.copied and graph_inputs.meet([kept[0], *given[1:]], forgiven=True)


def test_known_addresses_of_other_sizes_are_no_sign_that_they_move():
    graph_inputs, given = GraphInputs(3), tensors()
    assert not graph_inputs.meet(given, forgiven=True)
    for _ in range(50):
        assert graph_inputs.meet(given, forgiven=True)
    graph_inputs.forget()
    assert not graph_inputs.meet(given, forgiven=True) and not graph_inputs.copied


def rooms(sizes, before=()):
    return rooms_of(bytes_of([((each,), (1,), torch.uint8) for each in sizes]), before)


@pytest.mark.parametrize("sizes", [[3, 5, 1000], [1], [512, 513, 0, 7]])
def test_pieces_of_a_block_lie_apart_and_aligned(sizes):
    made = rooms(sizes)
    places, size = places_of(made), sum(made)
    ends = [place + each for place, each in zip(places, sizes, strict=True)]
    assert all(place % 512 == 0 for place in places) and all(map(int.__le__, ends, [*places[1:], size]))


def test_pieces_of_a_block_are_tensors_of_their_forms():
    whole, empty, row = ((3, 4), (4, 1), torch.float64), ((0,), (1,), torch.int64), ((5,), (1,), torch.float32)
    forms = [whole, empty, row, ((), (), torch.bool)]
    sizes = bytes_of(forms)
    block = torch.zeros(sum(sizes), dtype=torch.uint8)
    pieces = pieces_of(block, forms, places_of(sizes))
    assert [(tuple(each.shape), each.stride(), each.dtype) for each in pieces] == forms
    for number, each in enumerate(pieces, start=1):
        each.fill_(number)
    assert [each.unique().tolist() for each in pieces] == [[1], [], [3], [True]]
    assert len({each.untyped_storage().data_ptr() for each in pieces}) == 1


def test_rooms_of_pieces_grow_together_and_seldom():
    """A short size leaves all where they are; a long one moves them; the room of a static size stays bounded."""
    made = rooms([1000, 100_000, 700])
    assert rooms([900, 3, 700], made) == made
    seen = {made}
    for size in range(1000, 40_000, 100):
        made = rooms([size, 100 * size, 700], made)
        assert made[0] >= size and made[1] >= 100 * size and 700 <= made[2] <= 2048
        seen.add(made)
    assert len(seen) < 12 and sum(made) < 2 * 101 * 40_000
    assert rooms([5, 5], made) == (512, 512)


def test_all_sizes_begin_where_the_largest_did():
    memory = HostSlots()
    (large,) = memory([((50,), (1,), torch.float32)])
    address = large.data_ptr()
    (second,) = memory([((2,), (1,), torch.float32)])
    assert second.data_ptr() != address and not memory.grown
    del large, second
    for rows in (3, 50, 7):
        (made,) = memory([((rows,), (1,), torch.float32)])
        assert made.data_ptr() == address
        del made
    assert not memory.grown


def test_no_piece_moves_with_the_size_of_another():
    memory, seen = HostSlots(), set()
    for rows in (50, 3, 50, 7, 49):
        forms = [((rows,), (1,), torch.float32), ((rows, 200), (200, 1), torch.int64), ((rows,), (1,), torch.bool)]
        made = memory(forms)
        seen.add(tuple(each.data_ptr() for each in made))
        del made
    assert len(seen) == 1 and not memory.grown


class _Member:
    """So many recordings of ten bytes each."""

    held_bytes, recording_bytes = 0, 10

    def __init__(self, count, last_used):
        self.count, self.last_used = count, last_used

    def __len__(self):
        return self.count

    @property
    def graph_bytes(self):
        return 10 * self.count

    def drop(self):
        self.count = 0


@pytest.mark.parametrize(("name", "most"), [("MAX_GRAPH_BYTES", 65), ("MAX_RECORDINGS", 7)])
def test_recordings_are_bounded_in_number_and_in_bytes(monkeypatch, name, most):
    """The least recently used recordings leave; the one that asks for room stays."""
    monkeypatch.setattr(control_module, name, most)
    control, members = RecordedGraphs(True), [_Member(3, last_used) for last_used in (5, 2, 9, 1)]
    for each in members:
        control.enroll(each)
    control.make_room(members[3])
    assert [len(each) for each in members] == [0, 0, 3, 3]
    for _ in range(3):  # the second fits without a look at the others
        control.make_room(members[3])
        members[3].count += 1
        assert sum(map(len, members)) <= 7
    assert [len(each) for each in members] == [0, 0, 0, 6]
