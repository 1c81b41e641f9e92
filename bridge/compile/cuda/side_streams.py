"""Side streams of a capture: the branches of a recording → streams captured together, with events between them.

Each stream is nobody else's, and has what torch's kernels work in (cuBLAS's workspace, temporaries) to itself: two
library calls that run side by side never share it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bridge.compile.graphs.branches import Place

__all__ = ["SideStreams"]


class SideStreams:
    """One recording's. What a step frees may be somebody else's at once, on its stream: tensors that another stream
    reads are to live until all have come together.

    Args:
        streams: the captured one, then one for each further branch.
        places: of the program's steps.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream], places: Sequence[Place]):
        self._streams, self._places = streams, places
        self._awaited = {index for place in places for index in place.waits}
        self._done: dict[int, torch.cuda.Event] = {}

    def begin(self) -> None:
        """From here on, the other streams are captured as well."""
        main, *others = self._streams
        for other in others:
            other.wait_event(_event(main))

    def act(self, index: int, action: Callable[[list], None], registers: list) -> None:
        """Runs a step on its stream, behind what it waits for."""
        place = self._places[index]
        stream = self._streams[place.branch]
        for earlier in place.waits:
            stream.wait_event(self._done[earlier])
        if place.branch:
            with torch.cuda.stream(stream):
                action(registers)
        else:
            action(registers)
        if index in self._awaited:
            self._done[index] = _event(stream)

    def end(self) -> None:
        """What comes next on the captured stream waits for all that was launched."""
        main, *others = self._streams
        for other in others:
            main.wait_event(_event(other))


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """All that the stream has been given so far."""
    event = torch.cuda.Event()
    event.record(stream)
    return event
