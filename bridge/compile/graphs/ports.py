"""Ports of a program: addresses of inputs and results, call by call → which are recorded as they are.

A recording has addresses in it. A port is *direct* while the addresses of its tensors keep coming back (parameters,
what the forward hands to the backward): they are part of the recording's key. Else it is *buffered*: the recording has
the address of a buffer, into which an input is copied before a replay, or out of which a result is copied after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import itemgetter

import torch

from bridge.compile.graphs.recorder import Form, nbytes

__all__ = ["MAX_ADDRESSES", "Key", "Ports"]

Key = tuple[int, ...]
"""The addresses of the direct ports."""

#: Addresses of a direct port; with one more it is buffered.
MAX_ADDRESSES = 3


class Ports:
    """The ports of a program on one stream: its inputs, then the memory that it is given for results.

    Attributes:
        direct, buffered: places of ports.

    Args:
        forms: of all ports.
        on_host: places of those that are neither: no recording has their addresses.
    """

    def __init__(self, forms: Sequence[Form], on_host: Collection[int] = ()):
        self._bytes = list(map(nbytes, forms))
        self._known: list[dict[int, None]] = [{} for _ in forms]
        self.buffered: tuple[int, ...] = ()
        self._choose([place for place in range(len(forms)) if place not in on_host])

    def key(self, tensors: Sequence[torch.Tensor]) -> Key:
        """The addresses of a call's direct ports; ``tensors`` are those of all ports."""
        return tuple(map(torch.Tensor.data_ptr, self._direct(tensors)))

    def note(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Remembers addresses that no recording has; returns whether a port is buffered from now on."""
        moved = []
        for place in self.direct:
            known = self._known[place]
            known[tensors[place].data_ptr()] = None
            if len(known) > MAX_ADDRESSES:
                moved.append(place)
        self._buffer(moved)
        return bool(moved)

    def forget(self) -> None:
        """Old addresses do not count any more."""
        for known in self._known:
            known.clear()

    def buffer_what_moved(self, most: int | None = None) -> bool:
        """Buffers every port that has had a second address; returns whether there was one.

        Args:
            most: bytes of a port; larger ones stay as they are.
        """
        moved = [
            place
            for place in self.direct
            if len(self._known[place]) > 1 and (most is None or self._bytes[place] <= most)
        ]
        self._buffer(moved)
        return bool(moved)

    @property
    def copied_bytes(self) -> int:
        """That each replay copies."""
        return sum(self._bytes[place] for place in self.buffered)

    def _buffer(self, places: Sequence[int]) -> None:
        if places:
            self.buffered = tuple(sorted({*self.buffered, *places}))
            self._choose([place for place in self.direct if place not in self.buffered])

    def _choose(self, places: Sequence[int]) -> None:
        self.direct = tuple(places)
        self._direct: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] = (
            itemgetter(*places)
            if len(places) > 1
            else itemgetter(slice(places[0], places[0] + 1) if places else slice(0))
        )
