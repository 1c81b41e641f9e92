"""Recordings of a program: inputs, memory of results → a recorded graph that is replayed.

Recorder: a device's interface for recorded graphs; CUDA's is :mod:`bridge.compile.cuda.recorder`. A recording is a
run's launches with all addresses in them; a replay repeats these launches in order on the current stream. The caller
of a replay must ensure that each address still holds the same tensor.

Recordings of one program on one stream: a call's tensors → the recording for their addresses, made when they return.
Memory of results is new at each call, from memory that nothing else takes from (:class:`Memory`). A replay therefore
never overwrites a live tensor, and the allocator knows the streams that use a tensor. Live tensors (a gradient in
``p.grad``, a kept output) change the addresses of the next call; each combination of addresses needs its own recording.
An input or result whose address never returns is copied instead.

Graph inputs of a program: addresses of inputs and results, call by call → which of them a recording contains. A graph
input is *static* while its addresses keep coming back (parameters, saved tensors): they are part of the recording's
key. Otherwise it is *copied*: the recording has the address of a buffer; an input is copied into it before a replay, a
result out of it after the replay. All sizes of a program share their graph inputs.
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
from bridge.base.torch_internals import VF
from bridge.compile.loop_ir.views import dense_strides
from bridge.compile.runtime.instructions import MakeView
from bridge.compile.runtime.layout import Strided
from bridge.compile.runtime.program import Program

__all__ = ["MAX_ADDRESSES", "MAX_LARGE_ADDRESSES", "MAX_MADE", "MAX_OF_A_STREAM", "Form", "GraphRecorder", "Key"]
__all__ += ["GraphInputs", "Memory", "Replay", "ReplayResults", "StreamRecordings", "Timer", "nbytes"]

Key = tuple[int, ...]
"""The addresses of the static graph inputs."""

#: New addresses of a static graph input among the latest calls; with one more it is copied.
MAX_ADDRESSES = 3
#: The same bound for a large tensor, whose copy takes time and memory.
MAX_LARGE_ADDRESSES = 8
_LATEST = 64
"""The number of latest calls. Parameters that rarely move, as when a checkpoint is loaded, stay static."""
_STEADY = 16
"""Replays in a row that reset the count of calls with new addresses."""
_MOST_KNOWN = 64
"""Addresses that are remembered of a graph input, the newest."""
_PATIENCE = 12
"""Calls with new addresses after which small moved tensors are copied; after twice as many, all moved tensors."""
_SMALL = 1 << 20
"""Bytes of a tensor whose copy is negligible."""


class GraphInputs:
    """The graph inputs of a program on one stream: its inputs, then its results' memory.

    Args:
        count: their number.
        on_host: places of host tensors, neither static nor copied: no recording has their addresses.
        copied: places that are copied from the start.

    Attributes:
        static, copied: places of graph inputs.
        version: how often graph inputs became copied; recordings of earlier versions have outdated addresses.
    """

    def __init__(self, count: int, on_host: Collection[int] = (), copied: Collection[int] = ()):
        self._known: list[dict[int, int]] = [{} for _ in range(count)]  # address → number of its first call
        self.copied: tuple[int, ...] = tuple(copied)
        self.version = 0
        self._calls = self._in_a_row = self._strange = 0
        self._choose([place for place in range(count) if place not in on_host and place not in self.copied])

    def key(self, tensors: Sequence[torch.Tensor]) -> Key:
        """The addresses of the static graph inputs among a call's ``tensors``, one for each graph input."""
        return tuple(map(torch.Tensor.data_ptr, self._static(tensors)))

    def replayed(self) -> None:
        """Notes a call that had a recording."""
        self._calls += 1
        self._in_a_row += 1

    def meet(self, tensors: Sequence[torch.Tensor], forgiven: bool = False) -> bool:
        """Notes the addresses of a call without a recording. Graph inputs whose addresses keep moving become copied.

        Args:
            forgiven: if all addresses are known, the call is no sign of moving addresses.

        Returns:
            whether all addresses were known.
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
        """Forgets all addresses."""
        self._strange = 0
        for known in self._known:
            known.clear()

    def _new(self, place: int) -> int:
        """How many addresses were first seen among the latest calls."""
        return sum(self._calls - first < _LATEST for first in self._known[place].values())

    def _buffer_what_moved(self, tensors: Sequence[torch.Tensor], most: int | None) -> None:
        """Copies, from now on, each input with a second recent address, but no tensor of more than ``most`` bytes."""
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
"""Replays a recording: takes inputs and results' memory in a row if the program has host inputs, else nothing."""


def nbytes(form: Form) -> int:
    """Bytes of a tensor's elements."""
    shape, _, dtype = form
    return torch.Size(shape).numel() * dtype.itemsize


class Memory(Protocol):
    """Memory for one purpose alone: freed memory is reused at the next call, at the same addresses for equal requests.
    Its tensors are ordinary ones for their holders and for the allocator.

    Attributes:
        grown: how often larger requests made earlier addresses invalid.
    """

    grown: int

    def __call__(self, forms: Sequence[Form]) -> list[torch.Tensor]:
        """New tensors on the current stream."""

    @property
    def held_bytes(self) -> int:
        """Bytes of device memory reserved for it."""


class Timer(Protocol):
    """Times one run on the host and on the device without waiting for the device.

    Attributes:
        is_disturbed: whether this thread lost its processor during the run; valid after :meth:`stop`.
    """

    is_disturbed: bool

    def stop(self) -> None:
        """Ends the run."""

    def seconds(self) -> tuple[float, float] | None:
        """Host and device seconds; ``None`` while the device is still running."""


class GraphRecorder(Protocol):
    """Recorded graphs of one program on one device."""

    def refusal(self) -> str | None:
        """Why the program cannot be recorded, naming the step; ``None``: no known reason."""

    def spare_bytes(self, wanted: int) -> int:
        """Bytes of results that recordings may still reserve on the device.

        Args:
            wanted: bytes to reserve; later requests do not count them as spare.
        """

    def elsewhere(self) -> AbstractContextManager | None:
        """A context that makes the program's device current; ``None`` if it is."""

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured by other code."""

    def stream(self) -> Hashable:
        """The current stream."""

    def memory(self, varies: bool = False, joined: bool = False) -> Memory:
        """New memory for results.

        Args:
            varies: for a result, or results that are freed together, of any size, at one start address for all sizes.
            joined: for results that are freed together, of one size.
        """

    def empty(self, form: Form) -> torch.Tensor:
        """A tensor on the current stream, in torch's shared memory pool."""

    def timer(self) -> Timer:
        """Starts a timer."""

    def record(
        self, inputs: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor], copies: Sequence[tuple[int, torch.Tensor]]
    ) -> Replay:
        """Records a run with these inputs and this memory of results, for replays on the current stream.

        Computes nothing. Intermediates use memory that the recordings of a stream share; no tensor is kept. Any error
        is raised, and leaves the device as it was.

        Args:
            inputs: dense or not; the recording includes the copies of non-dense inputs.
            fresh: memory of the results in ``layout.fresh``.
            copies: ``(place, memory)`` of other results: the run writes them there, or copies them there at its end.

        Returns:
            the function that replays the recording.
        """


class ReplayResults:
    """Finds the results of a program in a run's inputs and memory.

    A result is in an input, a constant, memory that the run was given, or memory that a library function allocates. In
    the last case the run is given memory as well, and the recording writes or copies the result there.

    Attributes:
        forms: metadata of the memory that a run is given: first of ``layout.fresh``, then of ``copied``.
        copied: places of results that library functions allocate.
        readers: for each of ``forms``, the first result in it.

    Args:
        program: without symbolic extents.
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
        # one call of itemgetter; the few results outside of given memory are replaced afterwards
        self._pick = itemgetter(*[at or 0 for at in memory]) if self.forms and len(memory) > 1 else None
        self._others = [place for place, at in enumerate(memory) if at is None]

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that a run is given."""
        return sum(map(nbytes, self.forms))

    def __call__(self, inputs: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of a run with these inputs and this memory."""
        if self._pick is None:
            return [find(inputs, fresh) for find in self._find]
        results = list(self._pick(fresh))
        for place in self._others:
            results[place] = self._find[place](inputs, fresh)
        return results


def _dense_in_its_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dense strides in the tensor's own order of axes."""
    if tensor.is_contiguous():
        return dense_strides(tensor.shape)
    return VF.empty_like(tensor, device="meta").stride()


def _constant(tensor: torch.Tensor) -> Callable[[Sequence, Sequence], torch.Tensor]:
    return lambda inputs, fresh: tensor


def _found(place: int | None, slot: int, view: MakeView | None) -> Callable[[Sequence, Sequence], torch.Tensor]:
    """A getter of an input, of given memory, or of a view of either."""
    if view is None:
        return (lambda inputs, fresh: inputs[slot]) if place is None else (lambda inputs, fresh: fresh[place])
    shape, strides, offset = view.shape, view.strides, view.offset

    def find(inputs: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]) -> torch.Tensor:
        base = inputs[slot].contiguous() if place is None else fresh[place]
        return base.as_strided(shape, strides, base.storage_offset() + offset)

    return find


#: Recordings of a program for one stream; the least recently used leaves.
MAX_OF_A_STREAM = 8
#: Recordings of a program for one stream over its lifetime.
MAX_MADE = 64


class StreamRecordings:
    """The recordings of a program for one stream. One thread at a time.

    Attributes:
        made: the number of recordings made so far.

    Args:
        inputs: metadata of the inputs; ``on_host``: places of the inputs on the host.
        results: finds the results.
        memories: for each of ``results.forms``, the source of its memory.
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
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @property
    def copied_bytes(self) -> int:
        """Bytes that each replay copies."""
        return sum(nbytes(self._forms[place]) for place in self._graph_inputs.copied)

    def parameter_bytes(self, inputs: Sequence[torch.Tensor]) -> int:
        """Bytes of the buffers of parameters."""
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
        """The recording for these addresses, or ``None``; ``strided``: the strides of inputs that are not dense."""
        return self._recordings.get((strided, self._graph_inputs.key([*inputs, *fresh])))

    def replay(
        self,
        recording: Replay,
        given: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        fresh: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Replays and returns the results; ``given``: the caller's inputs, ``inputs``: as given to :meth:`find`."""
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
        """Whether to record these addresses: they have occurred before. Moving graph inputs become copied.

        For dynamic sizes it suffices that calls of other sizes had these addresses.
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
        """Makes a recording for these addresses and strides; raises any error of it."""
        self.made += 1
        copied, ported = self._results.copied, self._ported(inputs, fresh)
        read, written = ported[: self._inputs], ported[self._inputs :]
        own = len(written) - len(copied)
        replay = self._recorder.record(read, written[:own], list(zip(copied, written[own:], strict=True)))
        return self._recordings.put((strided, self._graph_inputs.key([*inputs, *fresh])), replay)

    def _ported(self, inputs: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of all graph inputs, with buffers in place of copied ones."""
        tensors = [*inputs, *fresh]
        for place, buffer in self._buffers.items():
            tensors[place] = buffer
        return tensors

    def _follow_ports(self) -> None:
        """Drops all recordings if graph inputs became copied: the old addresses are in them."""
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
        """Groups results by the source of their memory; a result that is copied out of a buffer may be anywhere."""
        groups: dict[int, tuple[Callable[[Sequence[Form]], list[torch.Tensor]], list[Form], list[int]]] = {}
        for place, (form, memory) in enumerate(zip(self._results.forms, self._memories, strict=True)):
            # results of dynamic size share a block, each at its own place
            is_copied = place + self._inputs in self._buffers and not self._varies
            make = self._anywhere if is_copied else memory
            _, forms, places = groups.setdefault(0 if is_copied else id(memory), (make, [], []))
            forms.append(form)
            places.append(place)
        self._taken = list(groups.values())

    def _anywhere(self, forms: Sequence[Form]) -> list[torch.Tensor]:
        return list(map(self._recorder.empty, forms))
