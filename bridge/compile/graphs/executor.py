"""Graphed executor: a program and its executor → the same results by replays of recorded graphs, where that is exact.

The first calls run kernel by kernel; they are timed, and show which memory holds each result. Then each call gets
memory of its own for results, and the second call with the same addresses (of inputs and results' memory) is recorded;
later calls with these addresses are one launch. All other calls run kernel by kernel, counted by reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.autograd import profiler

from autodiff.lazy import cached_property
from bridge.base.errors import swallowed
from bridge.base.lru import LeastRecentlyUsed
from bridge.compile.graphs.control import STREAMS, RecordedGraphs, Shared
from bridge.compile.graphs.recordings import (
    MAX_MADE,
    Form,
    GraphRecorder,
    Memory,
    Replay,
    ReplayResults,
    StreamRecordings,
)
from bridge.compile.runtime.layout import InputForms, Strided
from bridge.compile.runtime.program import Program

__all__ = ["MAX_ALONE_BYTES", "MAX_HELD_BYTES", "MAX_PARAMETER_BYTES", "EntryGraphs", "GraphedExecutor"]


#: Bytes of one run's results for which a program may hold memory under ``"auto"``.
MAX_HELD_BYTES = 1 << 32
#: The same for a forward whose backward is not recorded. Saved tensors of a recorded forward are freed all at once, so
#: a backward with memory of its own needs more at its peak than both need without graphs.
MAX_ALONE_BYTES = 1 << 28
#: Bytes of parameters that a program may hold a second time under ``"auto"``, if their addresses never return: a
#: trainer that moves parameters (FSDP gathers them for each call) does so to save memory.
MAX_PARAMETER_BYTES = 1 << 20
_BYTES_OF_A_GRAPH, _BYTES_OF_A_LAUNCH = 100_000, 2_600
"""Measured on an H200."""

_MOST_LEFT = 3
"""Times that a program makes room for others; then it is not recorded any more."""

Execute = Callable[..., list[torch.Tensor]]


class GraphedExecutor:
    """Runs one program of one entry; thread-safe.

    Attributes:
        last_used: the control's clock at the last replay.

    Args:
        program: without symbolic extents.
        execute: runs the program kernel by kernel: ``(inputs, *, consume, fresh)``.
        memory_of: a result's place → the source of its memory.
        shared: with other sizes of the program.
    """

    def __init__(
        self,
        program: Program,
        execute: Execute,
        recorder: GraphRecorder,
        control: RecordedGraphs,
        memory_of: Callable[[int], Memory],
        shared: Shared | None = None,
    ):
        self._program, self._execute, self._recorder, self._control = program, execute, recorder, control
        self._memory_of, self._shared = memory_of, Shared() if shared is None else shared
        self._forms = InputForms(program.name, program.layout.params, program.backend.device)
        self._streams: LeastRecentlyUsed[Hashable, StreamRecordings] = LeastRecentlyUsed(STREAMS)
        self._results: ReplayResults | None = None
        self._is_warm = False
        self._here = threading.local()
        self._left = 0
        self._refused: str | None = None
        self.last_used = 0
        control.enroll(self)
        if (reason := recorder.refusal()) is not None:
            self._refuse(reason)

    @cached_property
    def _inputs(self) -> list[Form]:
        return [(*each.given_form, each.torch_dtype) for each in self._program.layout.params]

    @cached_property
    def _on_host(self) -> tuple[int, ...]:
        return tuple(place for place, each in enumerate(self._program.layout.params) if each.lies_on_host)

    def __len__(self) -> int:
        return sum(map(len, self._streams.values()))

    @property
    def recording_bytes(self) -> int:
        """Estimated bytes of device memory of one recording."""
        return _BYTES_OF_A_GRAPH + _BYTES_OF_A_LAUNCH * len(self._program.steps)

    @property
    def graph_bytes(self) -> int:
        """Estimated bytes of device memory of all recordings."""
        return len(self) * self.recording_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of buffers; the owner of results' memory counts that."""
        return sum(recordings.buffer_bytes for recordings in self._streams.values())

    def drop(self) -> None:
        """Drops all recordings, to make room for other programs'."""
        self._left += 1
        self._streams.clear()

    def __call__(self, inputs: Sequence[torch.Tensor], *, consume: bool = False) -> list[torch.Tensor]:
        """See :meth:`bridge.compile.runtime.program.Program.__call__`."""
        mode = self._control.mode
        if mode is False:
            return self._execute(inputs, consume=consume)
        if self._refused is not None:
            return self._by_itself(self._refused, inputs, consume)
        elsewhere = self._recorder.elsewhere()
        if elsewhere is not None:
            with elsewhere:
                return self(inputs, consume=consume)
        if self._recorder.is_capturing():
            return self._by_itself("somebody records a graph of his own", inputs, consume)
        if not self._shared.lock.acquire(blocking=False):
            return self._by_itself("another thread is in the program", inputs, consume)
        try:
            if not self._is_warm:
                return self._warm_up(inputs, consume, mode is True)
            if not torch.is_grad_enabled():
                return self._graphed(inputs, consume)
            with torch.no_grad():
                return self._graphed(inputs, consume)
        finally:
            self._shared.lock.release()

    def _by_itself(self, reason: str, inputs: Sequence[torch.Tensor], consume: bool, **given: Any) -> list:
        self._control.count(reason)
        return self._by_kernels(inputs, consume=consume, **given)

    def _by_kernels(self, inputs: Sequence[torch.Tensor], **given: Any) -> list[torch.Tensor]:
        """Runs kernel by kernel. A thread's first run makes per-thread library state, which stream capture forbids."""
        results = self._execute(inputs, **given)
        self._here.has_run = True
        return results

    def _refuse(self, reason: str) -> None:
        self._refused, self._shared.pays = reason, False
        self._control.refuse(self._program.name, reason)
        self._streams.clear()

    def _warm_up(self, inputs: Sequence[torch.Tensor], consume: bool, forced: bool) -> list[torch.Tensor]:
        """A call before there are recordings; timed under ``"auto"``."""
        shared, has_run = self._shared, self._results is not None
        timer = shared.cost.timer(self._recorder) if has_run else None
        results = self._by_itself("warm-up", inputs, consume)
        if not has_run:
            self._results = ReplayResults(self._program, results)
        if timer is not None:
            shared.cost.stop(timer, self._work)
        pays = (has_run or shared.is_warm) if forced else self._pays()
        if pays is False and not forced:
            self._refuse("the device has more to do than the host: a graph does not pay")
        elif pays and not forced:
            pays = self._may_hold(self._results.nbytes)
            if pays is False:
                self._refuse(f"memory of results would be held: {self._results.nbytes} bytes")
        shared.pays = pays
        self._is_warm = bool(pays)
        self._shared.is_warm |= self._is_warm
        return results

    def _may_hold(self, nbytes: int) -> bool | None:
        """Whether recordings may hold so much memory of results; ``None``: too early."""
        beside = nbytes <= MAX_ALONE_BYTES or self._shared.backward_pays()
        if not beside:
            return beside
        return nbytes <= MAX_HELD_BYTES and nbytes <= self._recorder.spare_bytes(nbytes)

    def _pays(self) -> bool | None:
        """Whether a graph pays, from other sizes' verdicts or this size's runs; ``None``: too early."""
        known = self._shared.verdicts.of(self._work)
        if known is None:
            self._shared.cost.teach(self._shared.verdicts)
            known = self._shared.verdicts.of(self._work)
        return known

    @property
    def _work(self) -> int:
        """A measure of work that grows with sizes, as the device's time does."""
        return self._results.nbytes + self._program.arena_bytes

    def _graphed(self, inputs: Sequence[torch.Tensor], consume: bool) -> list[torch.Tensor]:
        stream = self._recorder.stream()
        recordings = self._streams.get(stream) or self._streams.put(stream, self._new(stream))
        (given, strided), fresh = self._forms.as_they_lie(inputs), recordings.fresh()
        recording = recordings.find(given, strided, fresh)
        if recording is None:
            recording = self._recorded(recordings, given, strided, fresh)
        if recording is None:
            return self._into(fresh, inputs, consume)
        if profiler._is_profiler_enabled:
            with profiler.record_function(f"tvm: {self._program.name}, recorded"):
                results = recordings.replay(recording, inputs, given, fresh)
        else:
            results = recordings.replay(recording, inputs, given, fresh)
        if consume:
            inputs.clear()
        self.last_used = next(self._control.clock)
        self._control.replays += 1
        return results

    def _recorded(
        self,
        recordings: StreamRecordings,
        inputs: Sequence[torch.Tensor],
        strided: Strided,
        fresh: Sequence[torch.Tensor],
    ) -> Replay | None:
        """A new recording; ``None`` if these addresses are not due, or if the program is refused."""
        self._shared.follow_memory()
        if not recordings.is_due(inputs, strided, fresh):
            self._control.count("addresses that are new")
            return None
        if not getattr(self._here, "has_run", False):
            self._control.count("the first run of a thread")
            return None
        if self._control.mode == "auto" and not self._shared.verdicts.copies_pay(recordings.copied_bytes):
            self._refuse("tensors lie elsewhere at each call, and to copy them takes as long as the launches do")
        elif self._control.mode == "auto" and recordings.parameter_bytes(inputs) > MAX_PARAMETER_BYTES:
            self._refuse("parameters lie elsewhere at each call, and a copy of them would be held")
        elif recordings.made >= MAX_MADE:
            self._refuse("addresses keep changing")
        elif self._left > _MOST_LEFT:
            self._refuse("the module's other programs and sizes have more use of graphs")
        else:
            self._control.make_room(self)
            try:
                return recordings.record(inputs, strided, fresh)
            except Exception as error:  # noqa: BLE001   whatever it is, kernel-by-kernel launches do without
                swallowed(error)
                first = next(iter(str(error).splitlines()), "")
                self._refuse(f"recording failed: {type(error).__name__}: {first}")
        self._control.count(self._refused)
        return None

    def _into(self, fresh: list[torch.Tensor], inputs: Sequence[torch.Tensor], consume: bool) -> list[torch.Tensor]:
        """A kernel-by-kernel run into a replay's memory, where later programs expect the results."""
        copied = self._results.copied
        own = len(fresh) - len(copied)
        results = self._by_kernels(inputs, consume=consume, fresh=fresh[:own])
        for place, memory in zip(copied, fresh[own:], strict=True):
            results[place] = memory.copy_(results[place])
        return results

    def _new(self, stream: Hashable) -> StreamRecordings:
        memories = [self._memory_of(reader) for reader in self._results.readers]
        graph_inputs = self._shared.graph_inputs(stream, len(self._inputs) + len(memories), self._on_host)
        varies = self._shared.varies
        return StreamRecordings(
            self._recorder, self._inputs, self._results, memories, graph_inputs, self._on_host, varies
        )


class EntryGraphs:
    """State that the recorded programs of an entry share, for all sizes.

    Each use (outputs, gradients, …) has its own memory, so a kept output does not move the addresses of gradients; so
    has each result of dynamic size. Tensors that are freed together share a block: buffers' new values; saved tensors.
    """

    def __init__(self, control: RecordedGraphs):
        self._control = control
        self._memories: dict[Hashable, Memory] = {}
        self._shared: dict[Program, Shared] = {}
        self._backwards: set[Program] = set()

    def forward(self, program: Program, execute: Execute, whole: Program, outputs: int, saved_tensors: int) -> Execute:
        """The executor of a forward program.

        Args:
            program: without symbolic extents; ``whole``: the program of all sizes, or ``program`` itself.
            execute: runs it kernel by kernel.
            outputs: the number of leading results that the caller gets.
            saved_tensors: the place of the first saved tensor; results in between are the call's own.
        """
        return self._graphed(program, execute, whole, "outputs", (outputs, saved_tensors))

    def backward(self, program: Program, execute: Execute, whole: Program, grad_outs: int) -> Execute:
        """The executor of a backward program, whose last ``grad_outs`` inputs are gradients of outputs.

        Each replay copies scalar gradients (a loss's), whose addresses vary: a recording for each would cost more.
        """
        params = program.layout.params
        first = len(params) - grad_outs
        numbers = [place for place, each in enumerate(params) if place >= first and each.numel == 1]
        self._backwards.add(whole)
        return self._graphed(program, execute, whole, "gradients", (len(program.layout.results),) * 2, numbers)

    def _graphed(
        self,
        program: Program,
        execute: Execute,
        whole: Program,
        use: str,
        bounds: tuple[int, int],
        copied: Sequence[int] = (),
    ) -> Execute:
        recorder = program.backend.recorder(program)
        if recorder is None:
            return execute
        shared = self._shared.get(whole)
        if shared is None:
            backward_pays = self._backward_pays if use == "outputs" else lambda: True
            made = Shared(program is not whole, self._moves, copied=copied, backward_pays=backward_pays)
            shared = self._shared.setdefault(whole, made)
        dynamic = _dynamic(whole) if shared.varies else ()

        def memory_of(result: int) -> Memory:
            if result >= bounds[1]:
                return self._memory("saved tensors", recorder, shared.varies, joined=True)
            if result >= bounds[0]:
                return self._memory("buffers", recorder, shared.varies, joined=True)
            if result in dynamic:
                return self._memory((whole, result), recorder, varies=True)
            return self._memory(use, recorder)

        return GraphedExecutor(program, execute, recorder, self._control, memory_of, shared)

    def _memory(self, use: Hashable, recorder: GraphRecorder, varies: bool = False, joined: bool = False) -> Memory:
        found = self._memories.get(use)
        if found is None:
            found = self._memories.setdefault(use, recorder.memory(varies, joined))
            self._control.hold(found)
        return found

    def _backward_pays(self) -> bool | None:
        """Whether all parts of the backward are worth recording; ``None``: too early."""
        found = [shared.pays for program, shared in tuple(self._shared.items()) if program in self._backwards]
        return False if False in found else None if not found or None in found else True

    def _moves(self) -> int:
        return sum(memory.grown for memory in tuple(self._memories.values()))


def _dynamic(program: Program) -> frozenset[int]:
    """Places of the results that are not in fresh memory of static size."""
    layout = program.layout
    fixed = {made.slot for made in layout.fresh if all(type(extent) is int for extent in made.shape)}
    return frozenset(place for place, slot in enumerate(layout.memory) if slot not in fixed)
