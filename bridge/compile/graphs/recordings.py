"""Recordings of one program on one stream: a call's tensors → the recording for their addresses, made when they return.

Memory of results is new at each call, from memory that nothing else takes from (:class:`~.recorder.Memory`), so a
replay never writes where somebody still holds a tensor, and the allocator knows what streams a tensor is used on.
Holders change which addresses a call gets: a gradient that stays in ``p.grad``, an output that is kept. There are as
many recordings as there are such patterns; a port whose address never returns is buffered (:mod:`.ports`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from bridge.base.lru import LeastRecentlyUsed
from bridge.compile.graphs.ports import Key, Ports
from bridge.compile.graphs.recorder import Form, Memory, Recorder, Replay, nbytes
from bridge.compile.graphs.results import ReplayResults
from bridge.compile.runtime.forms import Strided

__all__ = ["MAX_MADE", "MAX_OF_A_STREAM", "StreamRecordings"]

#: Recordings of a program for one stream; the one that was used the longest ago leaves.
MAX_OF_A_STREAM = 8
#: Recordings that are made before none is made any more.
MAX_MADE = 64


class StreamRecordings:
    """What of a program is recorded for one stream. One thread at a time.

    Attributes:
        made: how many recordings were made so far.

    Args:
        inputs: forms of the inputs; ``on_host``: places of those that lie on the host.
        results: where results are.
        memories: of each form of ``results``, where it is taken from.
        ports: shared with other sizes if ``varies``.
    """

    def __init__(
        self,
        recorder: Recorder,
        inputs: Sequence[Form],
        results: ReplayResults,
        memories: Sequence[Memory],
        ports: Ports,
        on_host: Collection[int] = (),
        varies: bool = False,
    ):
        self._recorder, self._results, self._inputs = recorder, results, len(inputs)
        self._forms = [*inputs, *results.forms]
        self._ports, self._on_host, self._varies = ports, on_host, varies
        self._version = ports.version
        self.made = 0
        self._buffers: dict[int, torch.Tensor] = {}
        self._memories = memories
        self._recordings: LeastRecentlyUsed[tuple[Strided, Key], Replay] = LeastRecentlyUsed(MAX_OF_A_STREAM)
        self._seen: LeastRecentlyUsed[tuple[Strided, Key], bool] = LeastRecentlyUsed(4 * MAX_OF_A_STREAM)
        self._renew()

    def __len__(self) -> int:
        return len(self._recordings)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @property
    def copied_bytes(self) -> int:
        """That each replay copies."""
        return sum(nbytes(self._forms[place]) for place in self._ports.buffered)

    def parameter_bytes(self, inputs: Sequence[torch.Tensor]) -> int:
        """Bytes of buffers for parameters."""
        places = (place for place in self._ports.buffered if place < self._inputs)
        return sum(inputs[place].nbytes for place in places if isinstance(inputs[place], nn.Parameter))

    def fresh(self) -> list[torch.Tensor]:
        """Memory for the results of a call."""
        self._follow_ports()
        made: list[Any] = [None] * len(self._results.forms)
        for make, forms, places in self._taken:
            for place, tensor in zip(places, make(forms), strict=True):
                made[place] = tensor
        return made

    def find(self, inputs: Sequence[torch.Tensor], strided: Strided, fresh: Sequence[torch.Tensor]) -> Replay | None:
        """The recording for inputs, those that are not dense with these strides, and memory of results, if there is
        one."""
        return self._recordings.get((strided, self._ports.key([*inputs, *fresh])))

    def replay(
        self,
        recording: Replay,
        given: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        fresh: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """The results; ``given`` are the caller's inputs, ``inputs`` what :meth:`find` was asked for."""
        self._ports.replayed()
        first, buffers = self._inputs, self._buffers
        for place in self._ports.buffered:
            if place < first:
                buffers[place].copy_(inputs[place])
        recording(self._ported(inputs, fresh) if self._on_host else ())
        for place in self._ports.buffered:
            if place >= first:
                fresh[place - first].copy_(buffers[place])
        return self._results(given, fresh)

    def is_due(self, inputs: Sequence[torch.Tensor], strided: Strided, fresh: Sequence[torch.Tensor]) -> bool:
        """Whether addresses without a recording have been here before. If they keep moving, ports are buffered.

        A size that varies is recorded when it comes back, if calls of other sizes had these addresses.
        """
        tensors = [*inputs, *fresh]
        are_known = self._ports.meet(tensors, forgiven=self._varies and self.made < MAX_OF_A_STREAM)
        self._follow_ports()
        key = strided, self._ports.key(tensors)
        if self._seen.get(key) or (self._varies and are_known):
            return True
        self._seen.put(key, True)
        return False

    def record(self, inputs: Sequence[torch.Tensor], strided: Strided, fresh: Sequence[torch.Tensor]) -> Replay:
        """Makes a recording for these addresses and strides; raises what goes wrong."""
        self.made += 1
        copied, ported = self._results.copied, self._ported(inputs, fresh)
        read, written = ported[: self._inputs], ported[self._inputs :]
        own = len(written) - len(copied)
        replay = self._recorder.record(read, written[:own], list(zip(copied, written[own:], strict=True)))
        return self._recordings.put((strided, self._ports.key([*inputs, *fresh])), replay)

    def _ported(self, inputs: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of all ports as recordings know them."""
        tensors = [*inputs, *fresh]
        for place, buffer in self._buffers.items():
            tensors[place] = buffer
        return tensors

    def _follow_ports(self) -> None:
        """Begins anew with other ports: recordings have the addresses of the old ones."""
        if self._version != self._ports.version:
            self._version = self._ports.version
            self._renew()

    @torch.inference_mode(False)  # buffers serve calls of any mode
    def _renew(self) -> None:
        self._recordings.clear()
        self._seen.clear()
        for place in self._ports.buffered:
            if place not in self._buffers:
                self._buffers[place] = self._recorder.empty(self._forms[place])
        self._plan_memory()

    def _plan_memory(self) -> None:
        """Where memory of results is taken from: what is copied out of a buffer may lie anywhere."""
        groups: dict[int, tuple[Callable[[Sequence[Form]], list[torch.Tensor]], list[Form], list[int]]] = {}
        for place, (form, memory) in enumerate(zip(self._results.forms, self._memories, strict=True)):
            # those of several sizes lie in one block, in which each has its own place
            is_buffered = place + self._inputs in self._buffers and not self._varies
            make = self._anywhere if is_buffered else memory
            _, forms, places = groups.setdefault(0 if is_buffered else id(memory), (make, [], []))
            forms.append(form)
            places.append(place)
        self._taken = list(groups.values())

    def _anywhere(self, forms: Sequence[Form]) -> list[torch.Tensor]:
        return list(map(self._recorder.empty, forms))
