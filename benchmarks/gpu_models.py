"""Time of a training step of blocks and a ResNet-50 on a GPU: ours beside eager and torch.compile, by turns.

    python -m benchmarks gpu_models                                    # all cases beside eager and torch.compile
    python -m benchmarks gpu_models --only LLaMA ResNet --peers eager graph default recorded reduce-overhead
    python -m benchmarks gpu_models --only "GPT-2" --peers eager max-autotune --kernels 12

A step is forward and backward with new gradients. Attention is transformers' default (``sdpa``). ``gpu`` and ``wall``
as in ``gpu_step``; peers: :mod:`benchmarks.gpu_peers`. A peer that raises is reported by its error, and the others go
on. Whole models with an optimizer: ``public``.

Also reports each first step with its compilation; later peers find libraries loaded by earlier ones. ``--cold``: only
first steps, each after eager's step in a process of its own with empty caches. ``--patience S``: leaves out peers with
longer first steps. ``--quick``: tiny models, also without a GPU, as a smoke test.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.cold_processes import cold
from benchmarks.gpu_clock import AHEAD_CYCLES, Step, by_turns, interrupted_after, show_kernels
from benchmarks.gpu_peers import OURS, PEERS, PRECISIONS, Batch, peer, settle
from benchmarks.train_blocks import LlamaBlock, bert_layer, gpt2_block
from bridge import stats


@dataclass(frozen=True)
class Case:
    """A module to train.

    Attributes:
        make: ``make(quick)``: a module of random parameters.
        batch: ``batch(quick)``: arguments of a call.
        precision: one of :data:`benchmarks.gpu_peers.PRECISIONS`.
        memory_format: of parameters and images.
        ahead: the GPU's sleep while the host launches a step, in :data:`~benchmarks.gpu_clock.AHEAD_CYCLES`.
    """

    make: Callable[[bool], nn.Module]
    batch: Callable[[bool], Batch]
    precision: str
    memory_format: torch.memory_format = torch.contiguous_format
    ahead: int = 1


def _hidden(rows: int, length: int) -> Callable[[bool], Batch]:
    def made(quick: bool) -> Batch:
        return Batch((torch.randn(*((1, 4) if quick else (rows, length)), 768, requires_grad=True),))

    return made


def _images(count: int) -> Callable[[bool], Batch]:
    def made(quick: bool) -> Batch:
        rows, size = (2, 32) if quick else (count, 224)
        labels = torch.randint(0, 1000, (rows,))
        return Batch(kwargs={"pixel_values": torch.randn(rows, 3, size, size), "labels": labels})

    return made


def _resnet(quick: bool) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    tiny = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    return ResNetForImageClassification(ResNetConfig(num_labels=1000, **(tiny if quick else {})))


CASES = {
    "GPT-2 block (4, 1024) bf16": Case(lambda quick: gpt2_block("sdpa"), _hidden(4, 1024), "bf16"),
    "LLaMA block (4, 1024) bf16": Case(lambda quick: LlamaBlock("sdpa"), _hidden(4, 1024), "bf16"),
    "BertLayer (32, 328) bf16": Case(lambda quick: bert_layer("sdpa"), _hidden(32, 328), "bf16"),
    "ResNet-50 (64, 224 x 224) channels_last amp": Case(_resnet, _images(64), "amp", torch.channels_last, ahead=5),
}


def measure(name: str, options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Prints first steps at once, then the times of all peers, then their kernels; returns seconds of first steps."""
    case = CASES[name]
    precision, batch = PRECISIONS[case.precision], case.batch(options.quick)
    runs: dict[str, Step] = {}
    modules: dict[str, nn.Module] = {}
    first: dict[str, float] = {}
    with precision.switched():
        for each in options.peers:
            started = time.perf_counter()
            try:
                with interrupted_after(options.patience):
                    run, module = peer(
                        each,
                        lambda: case.make(options.quick),
                        batch,
                        precision,
                        device,
                        memory_format=case.memory_format,
                    )
            except Exception as error:  # noqa: BLE001   one of several peers
                print(f"{name} {each}: {type(error).__name__}: {str(error).strip()[:300]}", flush=True)
                continue
            if device.type == "cuda":
                torch.cuda.synchronize()
            first[each] = time.perf_counter() - started
            print(f"{name} {each} first step: {first[each]:.1f} s", flush=True)
            if each in OURS and stats(module).misses:
                print(f"{name} {each}: {stats(module)}", flush=True)
            runs[each], modules[each] = run, module
        if options.rounds and device.type == "cuda":
            settle(runs)
        for clock, ahead in (("gpu", True), ("wall", False)) if options.rounds else ():
            spent = by_turns(runs, options.rounds, ahead, cycles=case.ahead * AHEAD_CYCLES)
            others = [each for each in spent if each not in OURS]
            for ours in [each for each in OURS if each in spent]:
                ratios = ", ".join(f"/{each} {spent[ours] / spent[each]:.2f}" for each in others)
                print(f"{name} {clock}: {ours} {spent[ours]:.3f} ms; {ratios}", flush=True)
        for each in runs.keys() & OURS.keys():
            print(f"{name} {each}: {stats(modules[each]).graphs}", flush=True)
        for each, run in runs.items() if options.kernels else ():
            show_kernels(f"{name} {each}", run, options.kernels)
    return first


def measure_cold(name: str, options: argparse.Namespace) -> None:
    """Prints the first step of each peer in a process of its own."""
    first: dict[str, float] = {}
    for each in options.peers:
        which = ["--peers", *dict.fromkeys(("eager", each)), "--rounds", "0", "--json-last"]
        found = cold("gpu_models", name, [*which, "--patience", str(options.patience)], options.quick)
        if each in found:  # otherwise the process has reported the reason
            first[each] = found[each]
    for ours in first.keys() & OURS.keys():
        ratios = ", ".join(f"/{each} {first[ours] / first[each]:.2f}" for each in first if each not in OURS)
        print(f"{name} cold first step: {ours} {first[ours]:.1f} s; {ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these")
    parser.add_argument("--peers", nargs="+", choices=("ours", *PEERS), default=("eager", "ours", "default"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="also the N longest kernels of each peer")
    parser.add_argument("--patience", type=int, default=0, metavar="S", help="seconds for a peer's first step")
    parser.add_argument("--cold", action="store_true", help="first steps, each in a process of its own")
    parser.add_argument("--json-last", action="store_true", help="a last line: seconds of first steps, as JSON")
    parser.add_argument("--quick", action="store_true", help="tiny modules, one round: does it work")
    options = parser.parse_args()
    options.rounds = min(options.rounds, 1) if options.quick else options.rounds
    warnings.simplefilter("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    what = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU"
    print(f"{what}, torch {torch.__version__}", flush=True)
    for name in CASES:
        if not any(part in name for part in options.only):
            continue
        if options.cold:
            measure_cold(name, options)
            continue
        first = measure(name, options, device)
        if options.json_last:
            print(json.dumps(first))


if __name__ == "__main__":
    main()
