"""Recurrent networks, forward and backward: our loops beside eager, torch's own layers, torch.compile, steps unrolled.

All peers are in one process, each on a copy of one module (torch's layer has the same weights), and take turns in
alternating order. Reports each peer's median and the median, over rounds, of ours divided by the fastest other peer's
time in that round. Results are compared with float64 before the timing. A peer that does not run is left out, and
named.

    python -m benchmarks recurrent --json benchmarks/results/recurrent.json
    python -m benchmarks recurrent --only "LSTM by hand" --peers eager,layer,compile --shape 64,100,512
    python -m benchmarks recurrent --device cuda --precision tf32 --only "LSTM by hand" --peers layer,launched

Peers: ``layer`` is ``nn.LSTM`` or ``nn.GRU``; ``unrolled`` is ours with Python's loop unrolled (not for torch's
layers); ``compile`` and ``reduce-overhead`` are modes of ``torch.compile``, which takes minutes for a hundred steps. On
a GPU ours is recorded as CUDA graphs, ``launched`` is ours without them, ``graphed`` is eager recorded by
``make_graphed_callables``.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.inference import finish
from benchmarks.lstm import LayerNormLSTM
from benchmarks.recurrent_cells import GRU, LSTM, SelectiveScan
from benchmarks.results import Results, Row, machine, versions
from benchmarks.tables import FORMS, header, line
from bridge import add_tvm_dispatch, stats
from bridge.base.session import SESSION

WARM_UP = 4
MOST_ROUNDING = 3
"""The largest distance of a peer's results from float64, in multiples of eager's."""
FEWEST, MOST = 5, 100
"""Bounds of the number of rounds."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Network:
    """A row of the table.

    Attributes:
        make: its width → the module.
        shape: the default shape of its input: batch, steps, width.
        layer: torch's own layer of the same cell.
    """

    make: Callable[[int], nn.Module]
    shape: Shape
    layer: type[nn.RNNBase] | None = None


NETWORKS = {
    "LSTM by hand": Network(LSTM, (16, 100, 256), nn.LSTM),
    "nn.LSTM": Network(lambda width: nn.LSTM(width, width, batch_first=True), (16, 100, 256)),
    "LayerNorm-LSTM": Network(LayerNormLSTM, (16, 100, 256)),
    "GRU by hand": Network(GRU, (16, 100, 256), nn.GRU),
    "selective scan": Network(SelectiveScan, (4, 512, 64)),
}


def ours(module: nn.Module, x: Tensor, graphs: bool = True) -> nn.Module:
    return add_tvm_dispatch(module, x, cuda_graphs=graphs and x.is_cuda)


def unrolled(module: nn.Module, x: Tensor) -> nn.Module:
    with _no_loops():
        return ours(module, x)


@contextmanager
def _no_loops() -> Iterator[None]:
    """While active, dispatch does not look for loops, and does not reuse calls that were lowered with loops."""
    SESSION.reset("lowerings")
    with mock.patch("bridge.capture.steady_call._find_loops", lambda *_: None):
        yield
    SESSION.reset("lowerings")


def layer(kind: type[nn.RNNBase], module: nn.Module, x: Tensor) -> nn.Module:
    """torch's layer, with the module's weights."""
    made = kind(x.shape[-1], x.shape[-1], batch_first=True).to(x.device)
    own = module.from_input.weight, module.from_state.weight, module.from_input.bias, module.from_state.bias
    with torch.no_grad():
        for parameter, given in zip(made.parameters(), own, strict=True):
            parameter.copy_(given)
    return made


def compiled(mode: str | None) -> Callable[[nn.Module, Tensor], nn.Module]:
    return lambda module, x: torch.compile(module, mode=mode)


PEERS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "ours": ours,
    "launched": partial(ours, graphs=False),
    "unrolled": unrolled,
    "eager": lambda module, x: module,
    "compile": compiled(None),
    "reduce-overhead": compiled("reduce-overhead"),
    "graphed": lambda module, x: torch.cuda.make_graphed_callables(module, (x,)),
}
"""By name, functions that make a peer of a module; ``layer`` comes in addition."""

OF_OURS = ("ours", "launched", "unrolled")


class Peer:
    """One peer on a module and a leaf of its own; ``first_seconds``: from the plain module to its first gradients."""

    def __init__(self, make: Callable[[nn.Module, Tensor], nn.Module], module: nn.Module, x: Tensor, grad: Tensor):
        self.x, self.grad = x.detach().clone().requires_grad_(), grad
        started = time.perf_counter()
        self.module = make(module, self.x)
        self.first = self.step().detach().clone()
        finish(x.device)
        self.first_seconds = time.perf_counter() - started

    def step(self) -> Tensor:
        """Forward and backward; gradients are new at each step, as after ``optimizer.zero_grad()``."""
        self.module.zero_grad()
        self.x.grad = None
        y = self.module(self.x)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(self.grad)
        return y

    def seconds(self) -> float:
        """Seconds of a step, by the host's clock, from an idle device to an idle device."""
        finish(self.grad.device)
        started = time.perf_counter()
        self.step()
        finish(self.grad.device)
        return time.perf_counter() - started


def made(network: Network, names: list[str], module: nn.Module, x: Tensor) -> dict[str, Peer]:
    """The peers that run, after their first step, with results as near to float64 as eager's.

    Not compared with eager's results: in a cell that is sensitive to its state (a LayerNorm-LSTM after its
    initialization), another TF32 rounding in the first steps changes all numbers by the hundredth step.
    """
    ways: dict[str, Any] = {**PEERS, "layer": network.layer and partial(layer, network.layer)}
    if isinstance(module, nn.RNNBase):
        ways["unrolled"] = None
    exact = _result(copy.deepcopy(module).double(), x.double())
    allowed = MOST_ROUNDING * float((_result(module, x) - exact).norm()) + 1e-5 * float(exact.norm())
    grad, found = torch.randn_like(exact, dtype=x.dtype), {}
    for name in names:
        if ways[name] is None:
            continue
        try:
            peer = Peer(ways[name], copy.deepcopy(module), x, grad)
            if not (distance := float((peer.first - exact).norm())) <= allowed:
                raise ValueError(f"results are {distance:.2e} from float64, {allowed:.2e} are allowed")
        except Exception as error:
            if name in OF_OURS:
                raise
            print(f"{name} is left out: {type(error).__name__}: {str(error).partition(chr(10))[0]}", flush=True)
            continue
        found[name] = peer
    return found


def _result(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        made = module(x)
    return made[0] if isinstance(made, tuple) else made


def by_turns(peers: dict[str, Peer], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each peer's steps, round by round, for about ``seconds``."""
    times: dict[str, list[float]] = {name: [] for name in peers}
    names = list(peers)
    for name in names:
        for _ in range(WARM_UP):
            peers[name].step()
    begun = time.perf_counter()
    for turn in range(MOST):
        if turn >= FEWEST and time.perf_counter() - begun > seconds:
            break
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(1e3 * peers[name].seconds())
    return times


def measure(name: str, options: argparse.Namespace) -> Row:
    """One row of the table."""
    network = NETWORKS[name]
    shape = options.shape or network.shape
    torch.manual_seed(0)
    torch.compiler.reset()
    module = network.make(shape[-1]).to(options.device).train()
    peers = made(network, options.peers, module, torch.randn(shape, device=options.device))
    times = by_turns(peers, options.seconds)
    for each in {*peers}.intersection(OF_OURS):
        if stats(peers[each].module).misses:
            raise RuntimeError(f"not every call was dispatched: {stats(peers[each].module)}")
    row: Row = {"module": f"{name} {shape}", "rounds": len(times["ours"])}
    row |= {f"{peer}_ms": statistics.median(spent) for peer, spent in times.items()}
    row |= {f"{peer}_first_s": peers[peer].first_seconds for peer in times}
    row |= {f"ours_to_{peer}": _ratio(times["ours"], spent) for peer, spent in times.items() if peer != "ours"}
    others = [peer for peer in times if peer not in OF_OURS]
    if others:
        row["best"] = min(others, key=lambda peer: row[f"{peer}_ms"])
        row["ours_to_best"] = row[f"ours_to_{row['best']}"]
    return row


def _ratio(mine: list[float], others: list[float]) -> float:
    return statistics.median(own / other for own, other in zip(mine, others, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="networks whose name contains this: " + ", ".join(NETWORKS))
    parser.add_argument("--peers", default="unrolled,eager,layer", help=f"of {', '.join(PEERS)}, layer")
    parser.add_argument("--shape", help="batch, steps and width, as in 64,100,512")
    parser.add_argument("--seconds", type=float, default=20.0, help="of rounds, for each network")
    parser.add_argument("--threads", type=int, help="torch.set_num_threads")
    parser.add_argument("--device", default="cpu", help="cpu, cuda")
    parser.add_argument("--precision", choices=("fp32", "tf32"), default="fp32", help="of products, on a GPU")
    parser.add_argument("--quick", action="store_true", help="tiny networks, few rounds: does it work")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    options.peers = ["ours", *(peer for peer in options.peers.split(",") if peer != "ours")]
    if unknown := sorted({*options.peers} - {*PEERS, "layer"}):
        parser.error(f"no peer {', '.join(unknown)}; there are {', '.join(PEERS)}, layer")
    options.shape = options.shape and tuple(int(extent) for extent in options.shape.split(","))
    if options.quick:
        options.seconds, options.shape = 0.0, options.shape or (2, 9, 8)
    if options.threads:
        torch.set_num_threads(options.threads)
    os.environ["BRIDGE_CACHE"] = "0"  # its key ignores the switches of ``unrolled``
    if options.device != "cpu":
        tf32 = options.precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    print(f"forward + backward, {options.precision}, on {options.device}; {versions()}; {machine()}\n", flush=True)
    columns = FORMS["recurrent"]
    print(header(columns))
    rows = []
    for name in NETWORKS:
        if options.only in name:
            rows.append(measure(name, options))
            print(line(columns, rows[-1]), flush=True)
    if options.json:
        given = [f" --{key} {getattr(options, key)}" for key in ("device", "precision") if options.device != "cpu"]
        Results.of("recurrent", f"python -m benchmarks recurrent{''.join(given)}", rows).save(options.json)


if __name__ == "__main__":
    main()
