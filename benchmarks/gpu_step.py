"""GPU time of a block's forward and backward: step times by turns, and the kernels of a step with their bandwidth.

    python -m benchmarks gpu_step                                   # BertLayer, the shapes and precisions of the table
    python -m benchmarks gpu_step --shape 8,128 --precision amp tf32 --peers eager default graph
    python -m benchmarks gpu_step --block "GPT-2" --kernels 30

All peers are in one process, each on a copy of one module, and take turns; medians over the rounds. ``gpu``: between
two CUDA events, with the host so far ahead that no launch is waited for. ``wall``: the host's clock from an idle GPU to
an idle GPU.
Kernels: of one step by torch's profiler, summed by name. Of our generated ones the bytes that they have to move are
known: inputs and results, once each; ``of copy`` compares what they reach with a ``copy_`` of the same machine.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.train_blocks import BLOCKS
from bridge import add_tvm_dispatch, explain, stats

WARM_UP = 5
AHEAD_CYCLES = 16_000_000
"""Of the GPU's clock, during which the host launches a step: some 8 ms."""
SHAPES = ("32,328", "8,128")
PEERS = {"default": None, "reduce-overhead": "reduce-overhead", "max-autotune": "max-autotune"}
"""``torch.compile`` by mode."""

Step = Callable[[], None]


@dataclass(frozen=True)
class Precision:
    """What all numbers of a run are, and what is switched on around its steps."""

    dtype: torch.dtype = torch.float32
    tf32: bool = False
    autocast: torch.dtype | None = None

    @contextlib.contextmanager
    def switched(self) -> Iterator[None]:
        """The settings, restored afterwards."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        try:
            with torch.autocast("cuda", self.autocast, enabled=self.autocast is not None):
                yield
        finally:
            torch.set_float32_matmul_precision(before)


PRECISIONS = {
    "fp32": Precision(),
    "tf32": Precision(tf32=True),
    "amp": Precision(autocast=torch.bfloat16),
    "amp16": Precision(autocast=torch.float16),
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16),
}


class Peer:
    """One peer: a module that trains on its own leaf with one cotangent."""

    def __init__(self, module: nn.Module, x: Tensor, precision: Precision):
        self.module, self.precision = module, precision
        self.x = x.detach().clone().requires_grad_()
        self.leaves = [self.x, *module.parameters()]
        self.grad = torch.randn_like(self._forward())

    def _forward(self) -> Tensor:
        y = self.module(self.x)
        return y[0] if isinstance(y, tuple) else y

    def step(self) -> None:
        """Forward and backward; gradients are new at each step, as after ``optimizer.zero_grad()``."""
        for leaf in self.leaves:
            leaf.grad = None
        self._forward().backward(self.grad)

    def graphed(self) -> Step:
        """The step's replay as one CUDA graph: its gradients lie where they lay."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        for leaf in self.leaves:
            leaf.grad = None
        with torch.cuda.graph(graph):
            self._forward().backward(self.grad)
        return graph.replay


def peers(name: str, make: Callable[[], nn.Module], x: Tensor, precision: Precision) -> tuple[Step, nn.Module]:
    """A peer's step, which has run once, and its module."""
    torch.manual_seed(0)
    module = make().to(x.device, precision.dtype).train()
    if name == "ours":
        add_tvm_dispatch(module, x.detach().clone().requires_grad_())
    elif name in PEERS:
        module = torch.compile(module, mode=PEERS[name])
    peer = Peer(module, x, precision)
    run = peer.graphed() if name == "graph" else peer.step
    run()
    return run, module


def by_turns(runs: dict[str, Step], rounds: int, ahead: bool) -> dict[str, float]:
    """Milliseconds of a step, medians: the GPU's with the host ahead of it, or the host's."""
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + WARM_UP):
        for name, run in runs.items():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            if ahead:
                torch.cuda._sleep(AHEAD_CYCLES)
            started = time.perf_counter()
            first.record()
            run()
            last.record()
            torch.cuda.synchronize()
            if turn >= WARM_UP:
                spent[name].append(first.elapsed_time(last) if ahead else (time.perf_counter() - started) * 1e3)
    return {name: statistics.median(values) for name, values in spent.items()}


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large ``copy_`` reads and writes."""
    source = torch.empty(2**27, device=device)
    target = torch.empty_like(source)
    spent = by_turns({"copy": lambda: target.copy_(source)}, 20, ahead=True)["copy"]
    return 2 * source.nbytes / (spent * 1e-3)


def kernels_of(run: Step, repeats: int = 5) -> list[tuple[str, float, float]]:
    """Name, microseconds and calls of each kernel of a step, the longest first."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as found:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in found.events():
        if event.device_type is torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            spent[event.name] += event.time_range.elapsed_us()
            calls[event.name] += 1
    return [(name, spent[name] / repeats, calls[name] / repeats) for name, _ in spent.most_common()]


def bytes_of(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Of each generated kernel of a dispatched module: bytes moved in a step, and launches, by its name."""
    found: dict[str, tuple[int, int]] = {}
    for entry in explain(module).entries:
        for program in entry.programs:
            for row in program.steps:
                if row.kind == "kernel":
                    moved, count = found.get(row.name, (0, 0))
                    found[row.name] = (moved + row.bytes, count + 1)
    return found


def told(name: str) -> str:
    """A kernel's name without what all have."""
    name = re.sub(r"^void |at::native::|\(anonymous namespace\)::|cutlass::", "", name)
    return name if len(name) <= 88 else f"{name[:60]}...{name[-25:]}"


def show_kernels(peer: str, run: Step, module: nn.Module, most: int, bandwidth: float) -> None:
    """Prints a table of kernels."""
    found = kernels_of(run)
    total = sum(spent for _, spent, _ in found)
    known = bytes_of(module) if peer == "ours" else {}
    own = 0.0
    lines = []
    for name, spent, calls in found:
        kernel, at = _generated(name, known)
        if kernel is not None:
            own += spent
        reached = ""
        if kernel is not None and at == 0:
            share = sum(other for twin, other, _ in found if _generated(twin, known)[0] == kernel)
            moved = known[kernel][0]
            reached = f"{moved / 1e6:8.1f} MB {moved / (share * 1e-6) / bandwidth:5.2f} of copy"
        lines.append(f"  {spent:8.1f} us {calls:4.1f} x  {told(name)}  {reached}")
    print(
        f" {peer}: {total:.0f} us in {sum(calls for *_, calls in found):.0f} kernels"
        + (f", generated {own:.0f} us" if own else "")
    )
    print("\n".join(lines[:most]), flush=True)


def _generated(name: str, known: dict[str, tuple[int, int]]) -> tuple[str | None, int]:
    """Which of the known kernels this is, and which of its launches."""
    match = re.fullmatch(r"(.+?)_kernel(?:_(\d+))?", name)
    if match is None or match[1] not in known:
        return None, 0
    return match[1], int(match[2] or 0)


def measure(block: str, shape: tuple[int, ...], name: str, options: argparse.Namespace, bandwidth: float) -> None:
    """Prints the times of all peers, then their kernels."""
    precision, (make, _) = PRECISIONS[name], BLOCKS[block]
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda", dtype=precision.dtype)
    with precision.switched():
        runs, modules, first = {}, {}, {}
        for peer in ["ours", *options.peers]:
            started = time.perf_counter()
            runs[peer], modules[peer] = peers(peer, make, x, precision)
            torch.cuda.synchronize()
            first[peer] = time.perf_counter() - started
        head = f"{block.partition(' (')[0]} {shape} {name}"
        for clock, ahead in (("gpu", True), ("wall", False)):
            spent = by_turns(runs, options.rounds, ahead)
            ratios = [f"ours/{peer} {spent['ours'] / spent[peer]:.2f}" for peer in options.peers]
            times = [f"{peer} {value:.3f} ms" for peer, value in spent.items()]
            print(f"{head} {clock}: {', '.join(ratios)}; {', '.join(times)}", flush=True)
        print(f"{head} first step: {', '.join(f'{peer} {value:.1f} s' for peer, value in first.items())}", flush=True)
        if options.kernels:
            for peer, run in runs.items():
                most = options.kernels if peer == "ours" else options.kernels // 2
                show_kernels(peer, run, modules[peer], most, bandwidth)
    assert not stats(modules["ours"]).misses, stats(modules["ours"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block", default="BertLayer", help="the first block of train_blocks whose name contains this")
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="its leading extents, as in 32,328")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=("fp32", "tf32", "amp"))
    parser.add_argument("--peers", nargs="+", choices=("eager", "graph", *PEERS), default=("eager",))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--kernels", type=int, default=0, metavar="N", help="also ours' N longest kernels, half as many of others"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    block = next(name for name in BLOCKS if options.block in name)
    tail = BLOCKS[block][1]
    bandwidth = copy_bandwidth(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    for text in options.shape:
        leading = tuple(int(extent) for extent in text.split(","))
        for name in options.precision:
            measure(block, (*leading, *tail[len(leading) :]), name, options, bandwidth)


if __name__ == "__main__":
    main()
