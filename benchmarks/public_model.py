"""One public model in a process of its own: first steps, gradients, times, peaks of all peers → a row, part by part.

The process sends its parent, :mod:`benchmarks.public`, results as lines of JSON. Before a timing it asks the parent and
waits for a line; until it reports the end, the processes of other models are stopped.
"""

from __future__ import annotations

import gc
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_clock import Step, by_turns, in_a_row, interrupted_after
from benchmarks.gpu_peers import OURS, PRECISIONS, Batch, Peer, Precision, prepared, settle
from benchmarks.peak import arena_bytes, peak_of
from benchmarks.public_models import PublicModel
from benchmarks.results import Row
from bridge import UnsupportedModule, stats

PRECISION_NAMES = {"float32": "fp32", "amp": "amp"}
_JUDGES = {"float32": ("float64", Precision(torch.float64)), "amp": ("float32", PRECISIONS["fp32"])}
_FLOOR = {"float32": 1e-6, "amp": 2.0**-8}
"""The always accepted distance of a number from the judge's, relative to its size."""
_FURTHER = 2
_ROUNDS = (3, 15)
_ROUNDS_IN_A_ROW, _IN_A_ROW = 3, (3, 20)


@dataclass
class Parent:
    """The process that started this one.

    Attributes:
        events: the pipe for lines of JSON.
        pauses: a file with the seconds of each stop of this process; ``None``: it is never stopped.
        waits: whether it answers.
    """

    events: IO[str]
    pauses: Path | None = None
    waits: bool = True

    def tell(self, **event: Any) -> None:
        """Sends a line."""
        print(json.dumps(event), file=self.events, flush=True)

    def stopped(self) -> float:
        """Seconds for which this process has been stopped."""
        if self.pauses is None or not self.pauses.exists():
            return 0.0
        return sum(map(float, self.pauses.read_text().split()))

    def clock(self) -> float:
        """Seconds without stops."""
        return time.monotonic() - self.stopped()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While active, no other process runs."""
        self.tell(wants="alone")
        if self.waits and not sys.stdin.readline():
            raise EOFError("the parent has gone")
        try:
            yield
        finally:
            self.tell(leaves="alone")


@dataclass
class Memory:
    """Bytes that each peer holds between steps and at its peak; on a GPU by torch's allocator, which all peers share.

    Garbage is collected before each count: one peer's garbage would be freed in another's step.

    Attributes:
        excess: the most bytes that a step takes beyond the bytes before it.
        peak: the excess, and the bytes that are free when the peer has gone: parameters, gradients, moments, recorded
            graphs' memory.
    """

    device: torch.device
    excess: Counter[str] = field(default_factory=Counter)
    peak: Counter[str] = field(default_factory=Counter)

    def count(self, name: str, step: Step) -> None:
        """Runs a step and counts its excess."""
        if self.device.type != "cuda":
            step()
            return
        before = _allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        self.excess[name] = max(self.excess[name], torch.cuda.max_memory_allocated() - before)

    def free(self, peers: dict[str, Peer], name: str) -> None:
        """Frees a peer; on a GPU, counts its memory."""
        if self.device.type != "cuda":
            del peers[name]
            return
        before = _allocated()
        del peers[name]
        self.peak[name] = before - _allocated() + self.excess[name]

    def profiled(self, name: str, peer: Peer) -> None:
        """On a CPU: counts one more step, by torch's profiler, with the arenas of our programs."""
        tensors = [*peer.module.parameters(), *peer.module.buffers(), *peer.batch.tensors]
        if peer.optimizer is not None:
            tensors += [each for state in peer.optimizer.state.values() for each in state.values()]
        for leaf in peer.leaves:
            leaf.grad = None
        arenas = arena_bytes([peer.module]) if name in OURS else 0
        self.peak[name] = sum({each.data_ptr(): each.nbytes for each in tensors}.values()) + peak_of(peer.step) + arenas


@dataclass
class Judge:
    """Loss and gradients of a first step in a better precision, and the peers' distances from them.

    Attributes:
        gradients: by the parameter's name, on the CPU.
        distances: of each peer's gradients, by the parameter's name; ``None`` where only one of the two has one.
    """

    loss: float
    gradients: dict[str, Tensor | None]
    floor: float
    distances: dict[str, dict[str, float | None]] = field(default_factory=dict)

    def look_at(self, name: str, peer: Peer) -> Row:
        """The row's fields about a peer after its first step; :attr:`distances` must already have eager's."""
        parameters = peer.module.parameters()  # in the same order: a compiled module's names have a prefix
        found = {key: _distance(p.grad, self.gradients[key]) for key, p in zip(self.gradients, parameters, strict=True)}
        self.distances[name] = found
        row: Row = {f"{name}_from_judge": self._whole(name)}
        row[f"{name}_loss_from_judge"] = abs(float(peer.result) - self.loss) / max(abs(self.loss), 1e-30)
        if name == "eager" or "eager" not in self.distances:
            return row
        further = {key: words for key in found if (words := self._further(name, key))}
        if self._whole(name) > _FURTHER * self._whole("eager") + self.floor:
            further = {"all together": f"{self._whole(name):.1e}, eager {self._whole('eager'):.1e}"} | further
        row[f"{name}_further"] = len(further)
        if further:
            row[f"{name}_furthest"] = "; ".join(f"{key}: {words}" for key, words in list(further.items())[:3])
        return row

    @cached_property
    def _norms(self) -> dict[str, float]:
        return {key: 0.0 if g is None else float(g.norm()) for key, g in self.gradients.items()}

    def _whole(self, name: str) -> float:
        """The distance of all gradients together, relative to their norm."""
        return math.hypot(*(d or 0.0 for d in self.distances[name].values())) / (math.hypot(*self._norms.values()) or 1)

    def _further(self, name: str, key: str) -> str:
        """The reason why a gradient is too far from the judge; empty: it is near enough.

        Where rounding decides the side of a kink, a single gradient of eager's is nearer or further by chance: so the
        limit of each is the relative distance of all of eager's together.
        """
        own, eager, norm = self.distances[name][key], self.distances["eager"][key], self._norms[key]
        if own is None or eager is None:
            return "" if own is eager else "None on one side only"
        if not math.isfinite(eager):
            return ""
        usual = math.hypot(*self._norms.values()) / math.sqrt(len(self._norms))
        share = max(self.floor, _FURTHER * self._whole("eager"))
        allowed = _FURTHER * eager + share * max(norm, 1e-3 * usual)
        return "" if own <= allowed else f"{own:.1e} from the judge, eager {eager:.1e}, of {norm:.1e}"


def _distance(gradient: Tensor | None, judge: Tensor | None) -> float | None:
    if gradient is None or judge is None:
        return 0.0 if gradient is judge else None
    return float((gradient.detach().double() - judge.to(gradient.device).double()).norm())


@dataclass(frozen=True)
class Model:
    """A model to measure, and the settings.

    Attributes:
        precision: a name of :data:`PRECISION_NAMES`.
        patience: seconds for a peer's first step; 0: no limit.
        parent: receives the results.
        has_room: whether the device is otherwise unused, so that a lack of memory is the model's own.
    """

    listed: PublicModel
    rows: int
    peers: Sequence[str]
    device: torch.device
    precision: str
    patience: float
    seconds: float
    parent: Parent
    has_room: bool

    def made(self) -> tuple[nn.Module, Batch]:
        """The module and its batch, with equal numbers each time; cheap to repeat."""
        torch.manual_seed(0)
        with self.device:
            return self.listed.make(), self.listed.batch(self.rows)

    def prepared(self, name: str, module: nn.Module, batch: Batch, whole: bool | None = None) -> Peer:
        """A peer before its first step."""
        precision = PRECISIONS[PRECISION_NAMES[self.precision]]
        return prepared(name, lambda: module, batch, precision, self.device, optimizes=True, whole=whole)

    def judge(self) -> Judge | str:
        """The judge, or the reason why there is none."""
        name, precision = _JUDGES[self.precision]
        try:
            module, batch = self.made()
            peer = prepared("eager", lambda: module, batch, precision, self.device)
            peer.step()
        except Exception as error:
            if _lacks_room(error) and not self.has_room:
                raise
            return f"no judge in {name}: {_words(error)}"
        gradients = {key: None if p.grad is None else p.grad.cpu() for key, p in peer.module.named_parameters()}
        return Judge(float(peer.result), gradients, _FLOOR[self.precision])


def measure(model: Model) -> None:
    """Measures and reports the row of a model; if memory does not suffice on an unused device, with one peer after
    another, then with half of the rows, and so on."""
    together, rows = True, model.rows
    while True:
        row: Row = {"rows": rows, "listed_rows": model.listed.rows, "turns": together}
        lacking = ""
        try:
            _measured(replace(model, rows=rows), [model.peers] if together else [[each] for each in model.peers], row)
        except Exception as error:
            if not _lacks_room(error):
                raise
            lacking = _words(error)
        if lacking and not model.has_room:
            model.parent.tell(no_room=lacking)
            return
        if not lacking or (rows == 1 and not together):
            row["errors"] |= {"eager": f"no room for one row: {lacking}"} if lacking else {}
            model.parent.tell(row=row, finished=True)
            return
        _emptied()
        together, rows = False, rows if together else rows // 2


def _measured(model: Model, groups: Sequence[Sequence[str]], row: Row) -> None:
    """Fills a row; peers of one group take turns, and are freed before the next group."""
    row["errors"], memory = {}, Memory(model.device)
    with PRECISIONS[PRECISION_NAMES[model.precision]].switched():
        judge = model.judge()
        if isinstance(judge, str):
            row["errors"]["judge"] = judge
        _emptied()
        for names in groups:
            peers: dict[str, Peer] = {}
            for name in names:
                if name != "eager" and "eager" in row["errors"]:
                    continue  # eager does not train it: nothing to compare
                peers |= _first_step(model, name, judge, row)
            if not peers:
                continue
            try:
                with model.parent.alone():
                    row.update(_times(peers, model, memory))
            except Exception as error:
                if not _lacks_room(error) or _is_everybodys(model, row, names[0]):
                    raise
                row["errors"][names[0]] = _words(error)
            for name in peers.keys() & OURS.keys():
                row.update(_calls(peers[name]))
            for name in list(peers):
                memory.free(peers, name)
                row[f"{name}_peak_bytes"] = memory.peak[name]
            model.parent.tell(row=row)
            _emptied()


def _first_step(model: Model, name: str, judge: Judge | str, row: Row) -> dict[str, Peer]:
    """A peer by its name after one step; the row gets its seconds and distance from the judge; empty if it raised."""
    for whole in (None, False) if name in OURS else (None,):
        try:
            module, batch = model.made()
            begun = model.parent.clock()
            with interrupted_after(model.patience, model.parent.stopped):
                peer = model.prepared(name, module, batch, whole)
                peer.step()
                if model.device.type == "cuda":
                    torch.cuda.synchronize()
            row[f"{name}_first_s"] = model.parent.clock() - begun
            del module, batch
        except UnsupportedModule as refusal:
            row["refused" if whole is None else "parts_refused"] = _words(refusal)
            continue
        except Exception as error:
            if _lacks_room(error) and _is_everybodys(model, row, name):
                raise
            row["errors"][name] = _words(error)
            break
        if isinstance(judge, Judge):
            row.update(judge.look_at(name, peer))
        for leaf in peer.leaves:  # other models compile meanwhile
            leaf.grad = None
        _emptied()
        model.parent.tell(row=row)
        return {name: peer}
    return {}


def _is_everybodys(model: Model, row: Row, name: str) -> bool:
    """Whether a lack of memory is not this peer's own: others were there, or eager has no room either."""
    return name == "eager" or not model.has_room or row["turns"]


def _times(peers: Mapping[str, Peer], model: Model, memory: Memory) -> Row:
    """Milliseconds of a step, synchronised and in a run of steps, and peaks; as many turns as time allows."""
    steps: dict[str, Step] = {name: peer.step for name, peer in peers.items()}
    if model.device.type == "cuda":
        settle(steps)
    for name, peer in peers.items():
        for _ in range(2):  # the first may allocate memory again that the turns of others have moved
            memory.count(name, peer.step)
        if model.device.type != "cuda":
            memory.profiled(name, peer)
    turn = sum(by_turns(steps, 1, ahead=False, warm_up=1).values())
    half = model.seconds * 500
    single = by_turns(steps, _between(_ROUNDS, half / turn), ahead=False, warm_up=0)
    length = _between(_IN_A_ROW, half / turn / _ROUNDS_IN_A_ROW)
    runs = {name: in_a_row(step, length) for name, step in steps.items()}
    many = by_turns(runs, _ROUNDS_IN_A_ROW, ahead=False, warm_up=0)
    row: Row = {f"{name}_ms": spent for name, spent in single.items()}
    return row | {f"{name}_run_ms": spent / length for name, spent in many.items()}


def _between(bounds: tuple[int, int], wanted: float) -> int:
    return min(max(bounds[0], int(wanted)), bounds[1])


def _calls(peer: Peer) -> Row:
    """Hits, misses by their reasons, and parts of ours."""
    counted = stats(peer.module)
    misses: Counter[str] = Counter()
    for why, count in counted.misses.items():
        misses[_shown(why)] += count
    row: Row = {"hits": counted.hits, "misses": dict(misses)}
    parts = getattr(counted, "parts", None)
    if parts is not None:
        row |= {"parts": len(parts), "coverage": counted.coverage}
    return row


def _allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def _emptied() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _lacks_room(error: BaseException) -> bool:
    words = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(each in str(error) for each in words)


def _words(error: BaseException) -> str:
    return _shown(f"{type(error).__name__}: {error}")


def _shown(words: str) -> str:
    """The text in a line, without this machine's folders."""
    return re.sub(r"[^\s\"']*/(?:site|dist)-packages/", "", " ".join(words.split()))[:400]
