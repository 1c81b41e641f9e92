"""Recordings of a program: inputs, memory of results -> a recorded graph that is replayed.

Recorder: what a device does for recorded graphs, as an interface; CUDA's is :mod:`bridge.compile.cuda.recorder`.
A recording is a run's launches with all addresses in them; replaying it makes the same launches again, on the current
stream and in its order. Whoever replays sees to it that the addresses mean what they meant.

Recordings of one program on one stream: a call's tensors → the recording for their addresses, made when they return.
Memory of results is new at each call, from memory that nothing else takes from (:class:`~.recorder.Memory`), so a
replay never writes where somebody still holds a tensor, and the allocator knows what streams a tensor is used on.
Holders change which addresses a call gets: a gradient that stays in ``p.grad``, an output that is kept. There are as
many recordings as there are such patterns; a port whose address never returns is copied (:mod:`.graph_inputs`).

GraphInputs of a program: addresses of inputs and results, call by call → which are recorded as they are.

A recording has addresses in it. A port is *static* while the addresses of its tensors keep coming back (parameters,
what the forward hands to the backward): they are part of the recording's key. Else it is *copied*: the recording has
the address of a buffer, into which an input is copied before a replay, or out of which a result is copied after it.

Where sizes vary, the programs of all sizes share their graph inputs: the addresses seen at one size hold for others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import nn

from bridge.base.lru import LeastRecentlyUsed
from bridge.base.pytrees import picker
from bridge.compile.loop_ir.views import dense_strides
from bridge.compile.runtime.instructions import MakeView
from bridge.compile.runtime.layout import Strided
from bridge.compile.runtime.program import Program

__all__ = ["MAX_ADDRESSES", "MAX_LARGE_ADDRESSES", "MAX_MADE", "MAX_OF_A_STREAM", "Form", "GraphRecorder", "Key"]
__all__ += ["GraphInputs", "Memory", "Replay", "ReplayResults", "StreamRecordings", "Timer", "nbytes"]

Key = tuple[int, ...]
"""The addresses of the static graph_inputs."""

#: New addresses of a static port among the latest calls; with one more it is copied.
MAX_ADDRESSES = 3
#: Likewise, of a large tensor, whose copy takes time and memory: there may be a recording for each address.
MAX_LARGE_ADDRESSES = 8
_LATEST = 64
"""Calls. Parameters that move now and then, as when a checkpoint is loaded, stay static."""
_STEADY = 16
"""Replays in a row after which the calls with new addresses are counted anew: few are."""
_MOST_KNOWN = 64
"""Addresses of a port that are known, the newest."""
_PATIENCE = 12
"""Calls with new addresses after which small tensors that have moved are copied; after twice as many, all that have.
"""
_SMALL = 1 << 20
"""Bytes of a tensor whose copy is of no account."""


class GraphInputs:
    """The graph_inputs of a program on one stream: its inputs, then the memory that it is given for results.

    Args:
        count: how many there are.
        on_host: places of those that are neither: no recording has their addresses.
        copied: places of those that are copied from the start.

    Attributes:
        static, copied: places of graph_inputs.
        version: how often graph_inputs were copied: recordings made before have other addresses in them.
    """

    def __init__(self, count: int, on_host: Collection[int] = (), copied: Collection[int] = ()):
        self._known: list[dict[int, int]] = [{} for _ in range(count)]  # the number of the first call, by address
        self.copied: tuple[int, ...] = tuple(copied)
        self.version = 0
        self._calls = self._in_a_row = self._strange = 0
        self._choose([place for place in range(count) if place not in on_host and place not in self.copied])

    def key(self, tensors: Sequence[torch.Tensor]) -> Key:
        """The addresses of a call's static graph_inputs; ``tensors`` are those of all graph_inputs."""
        return tuple(map(torch.Tensor.data_ptr, self._static(tensors)))

    def replayed(self) -> None:
        """There was a recording for a call."""
        self._calls += 1
        self._in_a_row += 1

    def meet(self, tensors: Sequence[torch.Tensor], forgiven: bool = False) -> bool:
        """Notes the addresses of a call that there is no recording for. If they keep moving, graph_inputs are copied.

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
        for place in self.static:
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
        moved = [place for place in self.static if self._new(place) > 1]
        self._buffer([place for place in moved if most is None or tensors[place].nbytes <= most])

    def _buffer(self, places: Sequence[int]) -> None:
        if places:
            self.version += 1
            self.copied = tuple(sorted({*self.copied, *places}))
            self._choose([place for place in self.static if place not in self.copied])

    def _choose(self, places: Sequence[int]) -> None:
        self.static = tuple(places)
        self._static = picker(places)


Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and element type of a dense tensor."""

Replay = Callable[[Sequence[torch.Tensor]], Any]
"""Replays a recording; it is given what the recording was made with, inputs and memory of results in a row, where the
program has inputs on the host, which have no part in addresses; else nothing."""


def nbytes(form: Form) -> int:
    """Bytes of a tensor."""
    shape, _, dtype = form
    return torch.Size(shape).numel() * dtype.itemsize


class Memory(Protocol):
    """Memory that nothing else on the device takes from: what was given back is there again at the next call, at the
    same addresses if the same is asked for. Tensors in it are like any others, to their holders and to the allocator.

    Attributes:
        grown: how often addresses that were given before will not return, because more was asked for.
    """

    grown: int

    def __call__(self, forms: Sequence[Form]) -> list[torch.Tensor]:
        """New tensors on the current stream."""

    @property
    def held_bytes(self) -> int:
        """Bytes that the device has set aside for it."""


class Timer(Protocol):
    """Time of one run, on the host and on the device, taken without waiting for the device.

    Attributes:
        is_disturbed: whether this thread has not had a processor for all of it; known once it has stopped.
    """

    is_disturbed: bool

    def stop(self) -> None:
        """The end of the run."""

    def seconds(self) -> tuple[float, float] | None:
        """The host's and the device's; ``None`` while the device is at work on it."""


class GraphRecorder(Protocol):
    """Recorded graphs of one program on one device."""

    def refusal(self) -> str | None:
        """Why the program cannot be recorded, naming the step; ``None`` if nothing is known against it."""

    @property
    def overlaps(self) -> bool:
        """Whether a replay takes the device less time than the run, for steps run at the same time."""

    def spare_bytes(self, wanted: int) -> int:
        """Bytes of results that recordings may set aside on the device, all others' counted.

        Args:
            wanted: by who asks; it is not spare for those who ask next.
        """

    def elsewhere(self) -> AbstractContextManager | None:
        """What makes the program's device the current one; ``None`` if it is."""

    def is_capturing(self) -> bool:
        """Whether somebody records the current stream into a graph of his own."""

    def stream(self) -> Hashable:
        """The current stream."""

    def memory(self, varies: bool = False, joined: bool = False) -> Memory:
        """New memory for results.

        Args:
            varies: for one, or for several that are let go together, of any size: it begins at the same address
                whatever the size.
            joined: for several that are let go together, of one size.
        """

    def empty(self, form: Form) -> torch.Tensor:
        """A tensor on the current stream, in memory that all share."""

    def timer(self) -> Timer:
        """A timer that begins now."""

    def record(
        self, inputs: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor], copies: Sequence[tuple[int, torch.Tensor]]
    ) -> Replay:
        """Records a run on these inputs with this memory for results, for replays on the current stream.

        Nothing is computed. Intermediates lie in memory that the recordings of a stream share; no tensor is kept.
        Whatever goes wrong is raised, and leaves the device as it was.

        Args:
            inputs: dense or not; copies of those that are not belong to the run.
            fresh: memory of the results in ``layout.fresh``.
            copies: places of other results, with memory that they are written into, or copied to at the end of the run.

        Returns:
            what replays it.
        """


class ReplayResults:
    """Where the results of a program are.

    A result lies in an input, in a constant, in memory that the run was given, or in memory of a library function's
    own: then the run is given memory for it as well, and what is recorded writes it there, or copies it at the end.

    Attributes:
        forms: of the memory that a run is given: first that of ``layout.fresh``, then that of ``copied``.
        copied: places of results that library functions allocate.
        readers: of each form, the first result that lies in it.

    Args:
        program: any, of numbers only.
        results: of a run.
    """

    def __init__(self, program: Program, results: Sequence[torch.Tensor]):
        layout = program.layout
        fresh = {made.slot: place for place, made in enumerate(layout.fresh)}
        self.forms: list[Form] = [
            (tuple(made.shape), dense_strides(made.shape), made.torch_dtype) for made in layout.fresh
        ]
        params, constants = len(layout.params), {slot for slot, _ in program.constants}
        views = {step.writes[0]: step for step in (*program.steps, *layout.views) if isinstance(step, MakeView)}
        self.copied: list[int] = []
        self.readers = [layout.memory.index(made.slot) for made in layout.fresh]
        self._find: list[Callable[[Sequence, Sequence], torch.Tensor]] = []
        memory: list[int | None] = []
        for place, (slot, base, seen) in enumerate(zip(layout.results, layout.memory, results, strict=True)):
            if base in constants:
                self._find.append(_constant(seen))
                memory.append(None)
                continue
            if base not in fresh and base >= params:
                fresh[slot] = len(self.forms)
                self.forms.append((tuple(seen.shape), _dense_in_its_order(seen), seen.dtype))
                self.copied.append(place)
                self.readers.append(place)
                base = slot
            view = views.get(slot) if slot != base else None
            self._find.append(_found(fresh.get(base), base, view))
            memory.append(fresh.get(base) if view is None else None)
        # at once, in the place of those that are no given memory as well: they are few
        self._pick = itemgetter(*[at or 0 for at in memory]) if self.forms and len(memory) > 1 else None
        self._others = [place for place, at in enumerate(memory) if at is None]

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that a run is given."""
        return sum(map(nbytes, self.forms))

    def __call__(self, inputs: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of a run on these inputs in this memory."""
        if self._pick is None:
            return [find(inputs, fresh) for find in self._find]
        results = list(self._pick(fresh))
        for place in self._others:
            results[place] = self._find[place](inputs, fresh)
        return results


def _dense_in_its_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides with the axes in the order in which they lie, and nothing in between."""
    if tensor.is_contiguous():
        return dense_strides(tensor.shape)
    return torch.empty_like(tensor, device="meta").stride()


def _constant(tensor: torch.Tensor) -> Callable[[Sequence, Sequence], torch.Tensor]:
    return lambda inputs, fresh: tensor


def _found(place: int | None, slot: int, view: MakeView | None) -> Callable[[Sequence, Sequence], torch.Tensor]:
    """What finds an input, given memory, or a view of one."""
    if view is None:
        return (lambda inputs, fresh: inputs[slot]) if place is None else (lambda inputs, fresh: fresh[place])
    shape, strides, offset = view.shape, view.strides, view.offset

    def find(inputs: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]) -> torch.Tensor:
        base = inputs[slot].contiguous() if place is None else fresh[place]
        return base.as_strided(shape, strides, base.storage_offset() + offset)

    return find


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
        graph_inputs: shared with other sizes if ``varies``.
    """

    def __init__(
        self,
        recorder: GraphRecorder,
        inputs: Sequence[Form],
        results: ReplayResults,
        memories: Sequence[Memory],
        graph_inputs: GraphInputs,
        on_host: Collection[int] = (),
        varies: bool = False,
    ):
        self._recorder, self._results, self._inputs = recorder, results, len(inputs)
        self._forms = [*inputs, *results.forms]
        self._graph_inputs, self._on_host, self._varies = graph_inputs, on_host, varies
        self._version = graph_inputs.version
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
        return sum(nbytes(self._forms[place]) for place in self._graph_inputs.copied)

    def parameter_bytes(self, inputs: Sequence[torch.Tensor]) -> int:
        """Bytes of buffers for parameters."""
        places = (place for place in self._graph_inputs.copied if place < self._inputs)
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
        return self._recordings.get((strided, self._graph_inputs.key([*inputs, *fresh])))

    def replay(
        self,
        recording: Replay,
        given: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        fresh: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """The results; ``given`` are the caller's inputs, ``inputs`` what :meth:`find` was asked for."""
        self._graph_inputs.replayed()
        first, buffers = self._inputs, self._buffers
        for place in self._graph_inputs.copied:
            if place < first:
                buffers[place].copy_(inputs[place])
        recording(self._ported(inputs, fresh) if self._on_host else ())
        for place in self._graph_inputs.copied:
            if place >= first:
                fresh[place - first].copy_(buffers[place])
        return self._results(given, fresh)

    def is_due(self, inputs: Sequence[torch.Tensor], strided: Strided, fresh: Sequence[torch.Tensor]) -> bool:
        """Whether addresses without a recording have been here before. If they keep moving, graph_inputs are copied.

        A size that varies is recorded when it comes back, if calls of other sizes had these addresses.
        """
        tensors = [*inputs, *fresh]
        are_known = self._graph_inputs.meet(tensors, forgiven=self._varies and self.made < MAX_OF_A_STREAM)
        self._follow_ports()
        key = strided, self._graph_inputs.key(tensors)
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
        return self._recordings.put((strided, self._graph_inputs.key([*inputs, *fresh])), replay)

    def _ported(self, inputs: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of all graph_inputs as recordings know them."""
        tensors = [*inputs, *fresh]
        for place, buffer in self._buffers.items():
            tensors[place] = buffer
        return tensors

    def _follow_ports(self) -> None:
        """Begins anew with other graph_inputs: recordings have the addresses of the old ones."""
        if self._version != self._graph_inputs.version:
            self._version = self._graph_inputs.version
            self._renew()

    @torch.inference_mode(False)  # buffers serve calls of any mode
    def _renew(self) -> None:
        self._recordings.clear()
        self._seen.clear()
        for place in self._graph_inputs.copied:
            if place not in self._buffers:
                self._buffers[place] = self._recorder.empty(self._forms[place])
        self._plan_memory()

    def _plan_memory(self) -> None:
        """Where memory of results is taken from: what is copied out of a buffer may lie anywhere."""
        groups: dict[int, tuple[Callable[[Sequence[Form]], list[torch.Tensor]], list[Form], list[int]]] = {}
        for place, (form, memory) in enumerate(zip(self._results.forms, self._memories, strict=True)):
            # those of several sizes lie in one block, in which each has its own place
            is_copied = place + self._inputs in self._buffers and not self._varies
            make = self._anywhere if is_copied else memory
            _, forms, places = groups.setdefault(0 if is_copied else id(memory), (make, [], []))
            forms.append(form)
            places.append(place)
        self._taken = list(groups.values())

    def _anywhere(self, forms: Sequence[Form]) -> list[torch.Tensor]:
        return list(map(self._recorder.empty, forms))
