"""The overhead of a dispatched call: forward and backward of modules with next to no work.

Ours, eager and, on request, torch.compile take turns in one process; medians. The second table divides our call:

    guard      the guard's check (:meth:`bridge.dispatch.guards.EntryGuard.check`)
    draws      random numbers, with their arithmetic; zero where there are none
    function   an ``autograd.Function`` with the same tensors that computes nothing, forward and backward
    steps      the two programs with kernels and library calls, and the forward's saved tensors
    rest       the remainder: finding the entry, building the result, autograd's engine adding up gradients

The third table is the guard alone, of modules small and large:

    decision   the check of every call of a loop after the first
    after train()  the same after ``module.train()``, which writes to every submodule
    closer look  an argument of equivalent strides (:meth:`bridge.dispatch.guards.EntryGuard.match`)

    python -m benchmarks.overhead --compile
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import tvm
from torch import Tensor, nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertEncoder, BertLayer

from bridge import add_tvm_dispatch, stats
from bridge.capture import capture
from bridge.dispatch.call_run import Action, CallValues
from bridge.dispatch.entry import Entry
from bridge.dispatch.guards import EntryGuard
from bridge.state import SampleCall


def tiny_bert_config(**options: int) -> BertConfig:
    config = BertConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8, **options)
    config._attn_implementation = "eager"
    return config


def tiny_bert_layer() -> nn.Module:
    return BertLayer(tiny_bert_config())


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Tanh": (nn.Tanh, (4, 4)),
    "Linear, Tanh": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (4, 4)),
    "Linear, Linear": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (4, 4)),
    "Linear, GELU, Dropout, Linear": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.1), nn.Linear(4, 4)),
        (4, 4),
    ),
    "LayerNorm, Linear": (lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), (4, 4)),
    "BertLayer of width 8": (tiny_bert_layer, (1, 2, 8)),
}


#: Modules for the decision have width 8, since it does not depend on numbers.
DECISIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(8, 8), (1, 2, 8)),
    "Linear, GELU, Dropout, Linear": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 8)),
        (1, 2, 8),
    ),
    "BertLayer": (tiny_bert_layer, (1, 2, 8)),
    "50 Linear": (lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(50))), (1, 2, 8)),
    "100 Linear": (lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(100))), (1, 2, 8)),
    "BertEncoder of 4 layers": (lambda: BertEncoder(tiny_bert_config(num_hidden_layers=4)), (1, 2, 8)),
    "BertEncoder of 12 layers": (lambda: BertEncoder(tiny_bert_config(num_hidden_layers=12)), (1, 2, 8)),
}


class Nothing(torch.autograd.Function):
    """Takes and saves tensors as a dispatched call does, and returns existing ones."""

    @staticmethod
    def forward(ctx, results: tuple[Tensor, ...], saved: list[Tensor], gradients: list[Tensor], *wanted: Tensor):
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        return tuple(result.detach() for result in results)

    @staticmethod
    def backward(ctx, *grad_outs: Tensor | None):
        list(ctx.saved_tensors)  # unpacking them is part of the cost
        ctx.maybe_clear_saved_tensors()
        return (None, None, None, *ctx.gradients)


def interleaved(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median microseconds of each action, one call of each in turn."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            started = time.perf_counter()
            action()
            times[name].append(time.perf_counter() - started)
    return {name: 1e6 * statistics.median(values[rounds // 10 :]) for name, values in times.items()}


def step(module: nn.Module, x: Tensor) -> Callable[[], None]:
    """One forward and backward; gradients accumulate, as between two optimizer steps."""
    grad = torch.randn(_first(module(x)).shape)
    return lambda: _first(module(x)).backward(grad)


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def parts(module: nn.Module, x: Tensor) -> dict[str, Callable[[], object]]:
    """The parts of a dispatched call, to be timed separately."""
    (entry,) = stats(module).entries
    inputs = entry.guard.match(SampleCall(module, (x,), {}))
    call = CallValues()
    call.inputs = call.primals = inputs
    with torch.no_grad():
        for act in (*entry.run.before, *entry.run.forward):
            act(call)
        saved = call.saved
        results = tuple(call.values[: entry.programs.num_outputs])
        grad_outs = [torch.randn_like(results[i]) for i in entry.lowered.differentiable]
        gradients = entry.programs.backward_for(entry.lowered.differentiable)(saved + grad_outs)
    wanted = [inputs[i] for i in entry.lowered.wanted]
    return {
        "guard": lambda: entry.guard.check(module, (x,), {}),
        "draws": lambda: _draw(entry.run.before, call),
        "function": lambda: _function(results, saved, gradients, wanted, grad_outs),
        "forward steps": lambda: _without_grad(_act, entry.run.forward, call),
        "backward steps": lambda: _without_grad(_backward, entry, saved + grad_outs),
    }


def _function(
    results: tuple[Tensor, ...], saved: list[Tensor], gradients: list, wanted: list[Tensor], grad_outs: list[Tensor]
) -> None:
    made = Nothing.apply(results, saved, gradients, *wanted)
    torch.autograd.backward(made[: len(grad_outs)], grad_outs)


def _act(actions: list[Action], call: CallValues) -> None:
    for act in actions:
        act(call)


def _draw(actions: list[Action], call: CallValues) -> None:
    call.primals = call.inputs  # draws are appended to them
    _act(actions, call)


def _without_grad(run: Callable, *args: object) -> None:
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    run(*args)
    torch._C._set_grad_enabled(before)


def _backward(entry: Entry, inputs: list[Tensor]) -> None:
    entry.programs.backward_for(entry.lowered.differentiable)(inputs)


def measure(name: str, rounds: int, with_compile: bool) -> tuple[dict[str, float], dict[str, float], str]:
    """Microseconds of a whole call per peer and of its parts, and the number of the programs' steps."""
    make, shape = MODULES[name]
    torch.manual_seed(0)
    eager = make().train()
    x = torch.randn(shape, requires_grad=True)
    ours = copy.deepcopy(eager)
    add_tvm_dispatch(ours, x)
    peers = {"eager": step(eager, x), "ours": step(ours, x)}
    if with_compile:
        peers["torch.compile"] = step(torch.compile(copy.deepcopy(eager)), x)
    times = interleaved(peers | parts(ours, x), rounds)
    counted = stats(ours)
    assert not counted.misses, counted
    (entry,) = counted.entries
    whole = {peer: times.pop(peer) for peer in peers}
    return whole, times, f"{len(entry.forward.steps)} + {len(entry.backward.steps)}"


def decisions(name: str, rounds: int) -> list[str]:
    """Microseconds of the guard alone."""
    make, shape = DECISIONS[name]
    module = make().train()
    x = torch.randn(shape, requires_grad=True)
    other = x.detach().as_strided(shape, (7, *x.stride()[1:])).requires_grad_()
    guard = EntryGuard(module, capture(SampleCall(module, (x,), {})), [x])
    module.__dict__["_compiled_call_impl"] = None  # the dispatcher's place
    assert guard.check(module, (x,), {}) is not None and guard.check(module, (other,), {}) is None
    times: dict[str, list[float]] = {"decision": [], "after train()": [], "closer look": []}

    def timed(kind: str, decide: Callable, argument: Tensor) -> None:
        started = time.perf_counter()
        decide(module, (argument,), {})
        times[kind].append(time.perf_counter() - started)

    for _ in range(rounds):
        module.train()
        timed("after train()", guard.check, x)
        timed("decision", guard.check, x)
        timed("closer look", lambda *sample: guard.match(SampleCall(*sample)), other)
    medians = [f"{1e6 * statistics.median(values[rounds // 10 :]):.1f}" for values in times.values()]
    counts = [len(list(module.modules())), len(list(module.parameters())) + len(list(module.buffers()))]
    return [name, *map(str, counts), *medians]


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="modules whose name contains this")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--compile", action="store_true", help="torch.compile as a third peer")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    wholes, pieces = [], []
    decided = [decisions(name, options.rounds) for name in DECISIONS if options.only in name]
    for name in MODULES:
        if options.only not in name:
            continue
        whole, part, steps = measure(name, options.rounds, options.compile)
        difference = whole["ours"] - whole["eager"]
        wholes.append([name, steps, *(f"{time:.1f}" for time in whole.values()), f"{difference:.1f}"])
        rest = whole["ours"] - sum(part.values())
        pieces.append([name, *(f"{time:.1f}" for time in part.values()), f"{rest:.1f}"])
    versions = f"torch {torch.__version__}, TVM {tvm.__version__}, {torch.get_num_threads()} threads"
    print(f"forward + backward in µs, float32, medians of {options.rounds}; {versions}, {platform.machine()}\n")
    peers = ["eager", "ours"] + (["torch.compile"] if options.compile else [])
    print(table(["module", "steps", *peers, "ours - eager"], wholes))
    print()
    print(table(["module", "guard", "draws", "function", "forward steps", "backward steps", "rest"], pieces))
    print("\nthe decision alone, µs\n")
    print(table(["module", "modules", "tensors", "decision", "after train()", "closer look"], decided))


if __name__ == "__main__":
    main()
