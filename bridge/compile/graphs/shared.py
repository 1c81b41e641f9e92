"""What the recorded programs of all sizes of one program share: whether graphs pay, which addresses come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable

from bridge.base.lru import LeastRecentlyUsed
from bridge.compile.graphs.ports import Ports
from bridge.compile.graphs.worth import LaunchCost, Verdicts

__all__ = ["STREAMS", "Shared"]

#: Streams on which a program stays recorded; those used last.
STREAMS = 4


class Shared:
    """Of one program. One thread at a time is in it.

    Attributes:
        varies: whether there are several sizes.
        verdicts: whether graphs pay; ``cost``: what the first runs have taken.
        is_warm: whether some size has run often enough to be recorded: kernels are loaded.
        lock: held by whoever runs it.

    Args:
        moves: how often results' memory had to move, for all sizes, because a larger one came.
        buffered: places of inputs that are copied for each replay, wherever they lie.
    """

    def __init__(
        self,
        varies: bool = False,
        moves: Callable[[], int] = lambda: 0,
        verdicts: Verdicts | None = None,
        buffered: Collection[int] = (),
    ):
        self.varies = varies
        self.verdicts = Verdicts() if verdicts is None else verdicts
        self.cost = LaunchCost()
        self.is_warm = False
        self.lock = threading.Lock()
        self._moves, self._moved, self._buffered = moves, 0, buffered
        self._ports: LeastRecentlyUsed[Hashable, Ports] = LeastRecentlyUsed(STREAMS)

    def ports(self, stream: Hashable, count: int, on_host: Collection[int]) -> Ports:
        """The ports on a stream."""
        return self._ports.get(stream) or self._ports.put(stream, Ports(count, on_host, self._buffered))

    def follow_memory(self) -> None:
        """Addresses that memory for results has left do not count any more."""
        moves = self._moves()
        if moves != self._moved:
            self._moved = moves
            for _, ports in self._ports.items():
                ports.forget()
