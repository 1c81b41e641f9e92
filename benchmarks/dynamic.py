"""The cost of dynamic sizes: binding a size, a call of a known size, and a step beside a static entry's.

    bind       seconds until a call of a new size can run: forward and backward bound, medians
    call       a call of a known size beside a call of a static entry, on modules with next to no work; also after a
               call of another known size
    step       forward and backward of the blocks of :mod:`benchmarks.train_blocks`, with a dynamic batch and with a
               dynamic sequence, beside a static entry of the same size; both are timed at their second size. Counts
               the kernels of both
    --trainer  epochs over real text, each batch padded to its longest: see :mod:`benchmarks.dynamic_epochs`

Peers take turns in one process; medians. Shared machines: read the ratios.

    python -m benchmarks.dynamic --trainer --inductor --json benchmarks/results/dynamic.json
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertEncoder, BertLayer

from benchmarks.dynamic_epochs import epochs
from benchmarks.results import Results, Row, machine, versions
from benchmarks.tables import FORMS, header, line
from benchmarks.train_blocks import BLOCKS, step
from bridge import add_tvm_dispatch, stats
from bridge.compile.runtime.instructions import Launch
from bridge.dispatch.entry import Entry


def _config(**options: int) -> BertConfig:
    small = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    return BertConfig(attn_implementation="eager", **small, **options)


#: Modules to bind: widths are small, since binding does not depend on numbers.
BOUND: dict[str, Callable[[], nn.Module]] = {
    "BertLayer": lambda: BertLayer(_config()),
    "BertEncoder of 12 layers": lambda: BertEncoder(_config(num_hidden_layers=12)),
}

#: Modules to call, with next to no work.
CALLED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Tanh": (nn.Tanh, (4, 4)),
    "Linear, GELU, Dropout, Linear": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.1), nn.Linear(4, 4)),
        (4, 4),
    ),
    "BertLayer of width 8": (BOUND["BertLayer"], (2, 3, 8)),
}

#: By block, the dynamic dimensions by their names in the table.
VARYING = {
    "BertLayer (8, 128)": {"batch": 0, "sequence": 1},
    "GPT-2 block (4, 128)": {"batch": 0, "sequence": 1},
    "LLaMA block (4, 128)": {"batch": 0, "sequence": 1},
    "GELU-MLP (1024)": {"batch": 0},
    "ConvNeXt block (4, 96, 56, 56)": {"batch": 0},
}


def dispatched(module: nn.Module, x: Tensor, dims: tuple[int, ...]) -> nn.Module:
    """A copy of a module with one entry, in which dimensions ``dims`` of ``x`` are dynamic."""
    copied = copy.deepcopy(module)
    return add_tvm_dispatch(copied, x, dynamic_shapes=({dim: Dim.DYNAMIC for dim in dims},) if dims else None)


def bind(name: str, sizes: int) -> Row:
    """Median milliseconds to bind a new (batch, length), and their share of processor time."""
    module = BOUND[name]().train()
    ours = dispatched(module, torch.randn(3, 17, 8, requires_grad=True), (0, 1))
    (entry,) = stats(ours).entries
    symbols = [symbol.name for symbol in entry.lowered.captured.sizes.scope.samples]
    walls, works = [], []
    for count in range(sizes):
        given = {symbol: 4 + (count * 7 + place) % 97 for place, symbol in enumerate(symbols)}
        started, work = time.perf_counter(), time.thread_time()
        bound = entry.bound.bind(given)
        bound.programs.backward_for(entry.lowered.expected).wait()
        works.append(time.thread_time() - work)
        walls.append(time.perf_counter() - started)
    steps = len(entry.forward.steps) + len(entry.backward.steps)
    return {
        "module": f"{name}: bind",
        "steps": steps,
        "bind_ms": 1e3 * statistics.median(walls),
        "bind_work_ms": 1e3 * statistics.median(works),
    }


def call(name: str, rounds: int) -> Row:
    """Median microseconds of forward and backward of a known size, and the excess over a static entry's."""
    make, shape = CALLED[name]
    module, x = make().train(), torch.randn(shape, requires_grad=True)
    grad = torch.randn_like(x)
    dims = (0, 1)[: len(shape) - 1]
    other = torch.randn([size + (dim in dims) for dim, size in enumerate(shape)], requires_grad=True)
    peers = {
        "static": dispatched(module, x, ()),
        "dynamic": dispatched(module, x, dims),
        "turns": dispatched(module, x, dims),
    }
    times = by_turns(peers, x, grad, rounds, {"turns": other})
    differences = [ours - other for ours, other in zip(times["dynamic"], times["static"], strict=True)]
    return {
        "module": f"{name}: call",
        **{f"{peer}_us": 1e6 * statistics.median(values) for peer, values in times.items()},
        "more_us": 1e6 * statistics.median(differences),
    }


def by_turns(
    peers: dict[str, nn.Module],
    x: Tensor,
    grad: Tensor,
    rounds: int,
    others: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, list[float]]:
    """Seconds of each peer's steps, without the first tenth; every call hits the peer's entry.

    ``others``: peers whose steps each follow an untimed step with another input.
    """
    times: dict[str, list[float]] = {peer: [] for peer in peers}
    for _ in range(rounds + rounds // 10 + 1):
        for peer, module in peers.items():
            if peer in others:
                step(module, others[peer], torch.ones_like(others[peer]))
            times[peer].append(step(module, x, grad))
    for module in peers.values():
        assert not stats(module).misses, stats(module)
    return {peer: values[rounds // 10 + 1 :] for peer, values in times.items()}


def block(name: str, kind: str, rounds: int, quick: bool = False) -> Row:
    """Median milliseconds of a step of both entries, and the numbers of kernels and steps of their programs."""
    make, shape = BLOCKS[name]
    dim = VARYING[name][kind]
    if quick:
        shape = tuple(6 if place in VARYING[name].values() else size for place, size in enumerate(shape))
    torch.manual_seed(0)
    module, x = make().train(), torch.randn(shape, requires_grad=True)
    grad = torch.randn(shape)
    sample = torch.randn([size + 3 * (place == dim) for place, size in enumerate(shape)], requires_grad=True)
    peers = {"static": dispatched(module, x, ()), "dynamic": dispatched(module, sample, (dim,))}
    times = by_turns(peers, x, grad, rounds)
    row: Row = {"module": f"{name}: {kind}"}
    for peer, values in times.items():
        (entry,) = stats(peers[peer]).entries
        row |= {f"{peer}_ms": 1e3 * statistics.median(values), f"{peer}_counts": counts(entry)}
    return row


def counts(entry: Entry) -> str:
    """Launches and steps of forward and backward."""
    programs = [program for program in (entry.forward, entry.backward) if program is not None]
    return " + ".join(f"{sum(isinstance(s, Launch) for s in each.steps)}/{len(each.steps)}" for each in programs)


def measures(part: str, given: argparse.Namespace) -> Iterator[Callable[[], Row]]:
    """Functions that measure the rows of a part, one by one."""
    few = 1 if given.quick else None
    match part:
        case "bind":
            yield from (partial(bind, name, given.sizes) for name in list(BOUND)[:few])
        case "call":
            yield from (partial(call, name, 20 * given.rounds) for name in list(CALLED)[:few])
        case "step":
            kinds = [(name, kind) for name, varying in VARYING.items() for kind in varying if given.only in name]
            yield from (partial(block, name, kind, given.rounds, given.quick) for name, kind in kinds)
        case _:
            yield partial(epochs, quick=given.quick, with_inductor=given.inductor, count=given.batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="bind,call,step", help="which of bind, call, step, trainer, by commas")
    parser.add_argument("--trainer", action="store_true", help="epochs over real text, too")
    parser.add_argument("--inductor", action="store_true", help="there also torch.compile(dynamic=True)")
    parser.add_argument("--batches", type=int, help="of an epoch there; 41 unless given")
    parser.add_argument("--only", default="", help="blocks whose name contains this")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, default=100, help="how many sizes are bound")
    parser.add_argument("--quick", action="store_true", help="the smallest of each, two rounds: does it work")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.quick:
        options.only, options.rounds, options.sizes = options.only or "GELU-MLP", 2, 3
    parts = dict.fromkeys([*options.parts.split(","), *(["trainer"] if options.trainer else [])])
    print(f"sizes that vary; {versions()}; {machine()}\n")
    rows: list[Row] = []
    for part in parts:
        columns = FORMS[f"dynamic_{part}"]
        print(header(columns))
        for measure in measures(part, options):
            rows.append(measure())
            print(line(columns, rows[-1]), flush=True)
        print()
    if options.json:
        command = " ".join(["python -m benchmarks.dynamic", *sys.argv[1:]])
        Results.of("dynamic", command, rows).save(options.json)


if __name__ == "__main__":
    main()
