"""Ports of a program: addresses of inputs and results, call by call → which are recorded as they are.

A recording has addresses in it. A port is *direct* while the addresses of its tensors keep coming back (parameters,
what the forward hands to the backward): they are part of the recording's key. Else it is *buffered*: the recording has
the address of a buffer, into which an input is copied before a replay, or out of which a result is copied after it.

Where sizes vary, the programs of all of them share their ports: what one size has shown of addresses holds for others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from bridge.base.pytrees import picker

__all__ = ["MAX_ADDRESSES", "MAX_LARGE_ADDRESSES", "Key", "Ports"]

Key = tuple[int, ...]
"""The addresses of the direct ports."""

#: New addresses of a direct port among the latest calls; with one more it is buffered.
MAX_ADDRESSES = 3
#: Likewise, of a large tensor, whose copy takes time and memory: there may be a recording for each address.
MAX_LARGE_ADDRESSES = 8
_LATEST = 64
"""Calls. Parameters that move now and then, as when a checkpoint is loaded, stay direct."""
_STEADY = 16
"""Replays in a row after which the calls with new addresses are counted anew: few are."""
_MOST_KNOWN = 64
"""Addresses of a port that are known, the newest."""
_PATIENCE = 12
"""Calls with new addresses after which small tensors that have moved are buffered; after twice as many, all that have.
"""
_SMALL = 1 << 20
"""Bytes of a tensor whose copy is of no account."""


class Ports:
    """The ports of a program on one stream: its inputs, then the memory that it is given for results.

    Args:
        count: how many there are.
        on_host: places of those that are neither: no recording has their addresses.
        buffered: places of those that are buffered from the start.

    Attributes:
        direct, buffered: places of ports.
        version: how often ports were buffered: recordings made before have other addresses in them.
    """

    def __init__(self, count: int, on_host: Collection[int] = (), buffered: Collection[int] = ()):
        self._known: list[dict[int, int]] = [{} for _ in range(count)]  # the number of the first call, by address
        self.buffered: tuple[int, ...] = tuple(buffered)
        self.version = 0
        self._calls = self._in_a_row = self._strange = 0
        self._choose([place for place in range(count) if place not in on_host and place not in self.buffered])

    def key(self, tensors: Sequence[torch.Tensor]) -> Key:
        """The addresses of a call's direct ports; ``tensors`` are those of all ports."""
        return tuple(map(torch.Tensor.data_ptr, self._direct(tensors)))

    def replayed(self) -> None:
        """There was a recording for a call."""
        self._calls += 1
        self._in_a_row += 1

    def meet(self, tensors: Sequence[torch.Tensor], forgiven: bool = False) -> bool:
        """Notes the addresses of a call that there is no recording for. If they keep moving, ports are buffered.

        Args:
            forgiven: known addresses without a recording are no sign that they keep moving.

        Returns:
            whether all of them were known.
        """
        if self._in_a_row >= _STEADY:
            self._strange = 0
        self._calls += 1
        self._in_a_row = 0
        are_known, moved = True, []
        for place in self.direct:
            known, address = self._known[place], tensors[place].data_ptr()
            if address in known:
                continue
            are_known = False
            known[address] = self._calls
            if len(known) > _MOST_KNOWN:
                del known[next(iter(known))]
            most = MAX_ADDRESSES if tensors[place].nbytes <= _SMALL else MAX_LARGE_ADDRESSES
            if self._new(place) > most:
                moved.append(place)
        self._buffer(moved)
        if not (forgiven and are_known):
            self._strange += 1
            if self._strange in (_PATIENCE, 2 * _PATIENCE):
                self._buffer_what_moved(tensors, _SMALL if self._strange == _PATIENCE else None)
        return are_known

    def forget(self) -> None:
        """Nothing is known of addresses any more."""
        self._strange = 0
        for known in self._known:
            known.clear()

    def _new(self, place: int) -> int:
        """How many addresses are new, among the latest calls."""
        return sum(self._calls - first < _LATEST for first in self._known[place].values())

    def _buffer_what_moved(self, tensors: Sequence[torch.Tensor], most: int | None) -> None:
        """Buffers every port that has had a second address lately, but for tensors of more than ``most`` bytes."""
        moved = [place for place in self.direct if self._new(place) > 1]
        self._buffer([place for place in moved if most is None or tensors[place].nbytes <= most])

    def _buffer(self, places: Sequence[int]) -> None:
        if places:
            self.version += 1
            self.buffered = tuple(sorted({*self.buffered, *places}))
            self._choose([place for place in self.direct if place not in self.buffered])

    def _choose(self, places: Sequence[int]) -> None:
        self.direct = tuple(places)
        self._direct = picker(places)
