"""Train a small BERT twice from one seed, in eager PyTorch and dispatched through TVM, and compare the two.

    make train                                    # or: python -m benchmarks.train_bert
    make train ARGS="--layers 4 --dispatch layers --plot out/train.png"
    python -m benchmarks.train_bert --device cuda # with a torch that sees a GPU

``BertForMaskedLM`` with random initial weights and dropout learns masked words of text that ships with CPython. Two
copies of one model see the same batches; each has its own random state, set before its step and saved after it. So the
two runs equal two separate trainings, although their steps alternate (eager, dispatched, eager, dispatched, …), which
exposes both to the same disturbances and makes their times comparable.

The exit status is 1 if the loss curves differ by more than ``--tolerance``, or if a training step after the first was
not dispatched.
"""

from __future__ import annotations

import argparse
import copy
import pathlib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from tqdm import tqdm
from transformers import BertConfig, BertForMaskedLM

from benchmarks.saved_bytes import saved_for_backward
from benchmarks.text import build_tokenizer, corpus, masked_batches
from bridge import add_tvm_dispatch, stats

Batch = dict[str, Tensor]

TOLERANCE = {"float32": 1e-4, "float64": 1e-9}
"""The largest difference of two losses that counts as rounding, over some fifty steps."""

AUTOCAST_TOLERANCE = 0.05
"""The same under autocast: a step rounds to 8 or 11 bits, and the roundings of fifty steps add up."""

CPU = torch.device("cpu")

TABLE_ROWS = 12
"""The approximate number of steps in the table of losses."""


@dataclass
class Training:
    """One of the two trainings: a model, its optimizer, its random state, and the results of its steps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    generator: list[Tensor]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    autocast: torch.dtype | None = None
    device: torch.device = CPU

    def step(self, batch: Batch) -> None:
        """One optimizer step on ``batch``, under this training's own random state."""
        set_generators(self.generator, self.device)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        with casting(self.autocast, self.device):
            loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)
        self.generator = generators(self.device)


def generators(device: torch.device) -> list[Tensor]:
    """The states of the generators of a training on a device."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_generators(states: list[Tensor], device: torch.device) -> None:
    """Sets the states of :func:`generators`."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


def casting(dtype: torch.dtype | None, device: torch.device) -> torch.autocast:
    """The device's autocast to ``dtype``; no autocast if it is ``None``."""
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


@dataclass(frozen=True)
class Counts:
    """Calls of the dispatched modules, added up."""

    hits: int
    misses: Counter[str]


@dataclass(frozen=True)
class Result:
    """All data of the report."""

    eager: Training
    dispatched: Training
    modules: list[nn.Module]
    counts: Counts
    undispatched_steps: list[int]
    setup_seconds: float
    compile_seconds: float
    saved_eager: int
    saved_dispatched: int

    @property
    def difference(self) -> float:
        """The largest difference of the losses of one step; NaN if any is."""
        own, other = (torch.tensor(run.losses, dtype=torch.float64) for run in (self.eager, self.dispatched))
        return (own - other).abs().max().item()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line. A combination that no BERT can have is an error."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_bert", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--layers", type=int, default=4, help="encoder layers (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=256, help="width (default %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (default %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=4000, help="tokens (default %(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps of each run (default %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step (default %(default)s)")
    parser.add_argument("--seq", type=int, default=96, help="tokens per sequence (default %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.1, help="every dropout (default %(default)s)")
    parser.add_argument("--lr", type=float, default=5e-4, help="AdamW's learning rate (default %(default)s)")
    parser.add_argument("--dispatch", choices=["model", "layers"], default="model", help="what is dispatched")
    parser.add_argument("--partition", default="min_cut", choices=["min_cut", "save_all", "recompute_all"])
    parser.add_argument("--attention", choices=["eager", "sdpa"], default="eager", help="BERT's implementation of it")
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="float32")
    parser.add_argument("--autocast", choices=["bfloat16", "float16"], help="run forward under torch.autocast")
    parser.add_argument("--tolerance", type=float, help="on the losses (default 1e-4; float64 1e-9, autocast 0.05)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default=CPU, help="cpu (default), cuda, cuda:1, ...")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="draw the two curves into an image")
    options = parser.parse_args(arguments)
    for name in ("layers", "hidden", "heads", "steps", "batch"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)} is given, wanted at least 1")
    if options.hidden % options.heads:
        parser.error(f"--hidden {options.hidden} is not a multiple of --heads {options.heads}")
    if options.seq < 3:
        parser.error(f"--seq {options.seq} has no room for a word between [CLS] and [SEP]")
    if options.device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {options.device} is given, and torch {torch.__version__} sees no GPU")
    if options.tolerance is None:
        options.tolerance = AUTOCAST_TOLERANCE if options.autocast else TOLERANCE[options.dtype]
    options.autocast = getattr(torch, options.autocast) if options.autocast else None
    return options


def make_model(options: argparse.Namespace, vocabulary_size: int) -> BertForMaskedLM:
    """The model in train mode, initialized under the seed."""
    config = BertConfig(
        vocab_size=vocabulary_size,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        intermediate_size=4 * options.hidden,
        max_position_embeddings=max(options.seq, 16),
        hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.dropout,
    )
    config._attn_implementation = options.attention
    torch.manual_seed(options.seed)
    return BertForMaskedLM(config).to(options.device, getattr(torch, options.dtype)).train()


def make_training(model: nn.Module, options: argparse.Namespace) -> Training:
    """A training that starts at the seed's random state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    torch.manual_seed(options.seed)
    return Training(model, optimizer, generators(options.device), autocast=options.autocast, device=options.device)


def dispatch(model: BertForMaskedLM, batch: Batch, options: argparse.Namespace) -> list[nn.Module]:
    """Dispatch the model, or each of its encoder layers; returns the dispatched modules."""
    if options.dispatch == "model":
        return [add_tvm_dispatch(model, batch, partition=options.partition)]
    layers = list(model.bert.encoder.layer)
    samples = layer_samples(model, layers, batch)
    for layer, (args, kwargs) in zip(layers, samples, strict=True):
        add_tvm_dispatch(layer, args, sample_kwargs=kwargs, partition=options.partition)
    return layers


def layer_samples(model: nn.Module, layers: list[nn.Module], batch: Batch) -> list[tuple[tuple, dict[str, Any]]]:
    """The positional and keyword arguments of each layer in one eager call of the model, detached."""
    seen: list[tuple[tuple, dict[str, Any]]] = []

    def record(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        seen.append((args, kwargs))

    def detach(leaf: Any) -> Any:
        return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    model(**batch)
    for handle in handles:
        handle.remove()
    return pytree.tree_map(detach, seen)


def count(modules: list[nn.Module]) -> Counts:
    """Hits and misses of all dispatched modules."""
    counted = [stats(module) for module in modules]
    return Counts(sum(each.hits for each in counted), sum((Counter(each.misses) for each in counted), Counter()))


def train(eager: Training, dispatched: Training, modules: list[nn.Module], batches: list[Batch]) -> list[int]:
    """Alternate the steps of the two trainings; returns the steps in which a dispatched module fell back to eager."""
    undispatched = []
    progress = tqdm(batches, desc="eager and dispatched, alternating", unit="step")
    for step, batch in enumerate(progress):
        eager.step(batch)
        before = count(modules)
        dispatched.step(batch)
        after = count(modules)
        if after.hits - before.hits != len(modules) or after.misses != before.misses:
            undispatched.append(step)
        progress.set_postfix(eager=f"{eager.losses[-1]:.4f}", dispatched=f"{dispatched.losses[-1]:.4f}")
    return undispatched


def measure_saved(training: Training, batch: Batch) -> int:
    """Bytes that one forward of the trained model saves; its random state and statistics stay out of the training."""
    set_generators(training.generator, training.device)
    with casting(training.autocast, training.device):
        return saved_for_backward(training.model, lambda: training.model(**batch), batch)


def train_both(options: argparse.Namespace) -> Result:
    """Both trainings from model to measurements."""
    documents = corpus()
    tokenizer = build_tokenizer(documents, options.vocabulary)
    batches = masked_batches(
        tokenizer, documents, steps=options.steps, batch=options.batch, length=options.seq, seed=options.seed
    )
    batches = [{name: tensor.to(options.device) for name, tensor in batch.items()} for batch in batches]
    model = make_model(options, len(tokenizer))
    copied = copy.deepcopy(model)
    start = time.perf_counter()
    with casting(options.autocast, options.device):
        modules = dispatch(copied, batches[0], options)
    setup_seconds = time.perf_counter() - start
    eager, dispatched = make_training(model, options), make_training(copied, options)
    undispatched = train(eager, dispatched, modules, batches)
    return Result(
        eager=eager,
        dispatched=dispatched,
        modules=modules,
        counts=count(modules),
        undispatched_steps=undispatched,
        setup_seconds=setup_seconds,
        compile_seconds=sum(entry.compile_seconds for module in modules for entry in stats(module).entries),
        saved_eager=measure_saved(eager, batches[-1]),
        saved_dispatched=measure_saved(dispatched, batches[-1]),
    )


def loss_table(result: Result) -> Iterator[str]:
    """Both loss curves side by side, a row every few steps."""
    steps = len(result.eager.losses)
    every = max(1, steps // TABLE_ROWS)
    yield "| step | eager loss | dispatched loss | difference |"
    yield "|---:|---:|---:|---:|"
    for step in sorted({*range(0, steps, every), steps - 1}):
        own, other = result.eager.losses[step], result.dispatched.losses[step]
        yield f"| {step + 1} | {own:.6f} | {other:.6f} | {abs(own - other):.1e} |"


def summary(result: Result, options: argparse.Namespace) -> Iterator[str]:
    """The cost of the run, and its comparison with eager."""
    eager, ours = median_ms(result.eager), median_ms(result.dispatched)
    yield "| | eager | dispatched | ratio |"
    yield "|---|---:|---:|---:|"
    yield f"| ms per step (median, without the first) | {eager:.1f} | {ours:.1f} | {ours / eager:.2f} |"
    saved, saved_ours = result.saved_eager / 2**20, result.saved_dispatched / 2**20
    yield f"| saved for backward, MiB | {saved:.2f} | {saved_ours:.2f} | {saved_ours / saved:.2f} |"
    yield ""
    yield f"largest difference of the losses: {result.difference:.2e} (tolerance {options.tolerance:.0e})"
    yield f"{len(result.modules)} dispatched module(s): {result.counts.hits} hits, {misses_text(result.counts)}"
    yield f"compilation: {result.compile_seconds:.1f} s, add_tvm_dispatch in all {result.setup_seconds:.1f} s"
    plan = stats(result.modules[0]).entries[0].plan
    yield (
        f"plan ({options.partition}) of the first module: {plan.bytes / 2**20:.2f} MiB captured, "
        f"{plan.total_bytes / 2**20:.2f} MiB with the parameters, inputs and masks that backward reads"
    )


def misses_text(counts: Counts) -> str:
    reasons = "; ".join(f"{n} x {reason}" for reason, n in counts.misses.most_common())
    return f"{sum(counts.misses.values())} misses" + (f" ({reasons})" if reasons else "")


def median_ms(training: Training) -> float:
    """Median step in milliseconds; the first, which warms caches up, is left out if there are others."""
    return 1e3 * statistics.median(training.seconds[1:] or training.seconds)


def header(options: argparse.Namespace) -> str:
    autocast = f" under autocast to {options.autocast}" if options.autocast else ""
    return (
        f"BertForMaskedLM, {options.layers} layers x {options.hidden}, {options.heads} heads, {options.attention} "
        f"attention, dropout {options.dropout}, {options.dtype}{autocast}; batches of "
        f"{options.batch} x {options.seq} tokens, AdamW, seed {options.seed}, "
        f"{where(options)}, torch {torch.__version__}; dispatched: "
        f"{options.dispatch}. Steps of the two runs alternate in one process, each under its own random state."
    )


def where(options: argparse.Namespace) -> str:
    """The device, in words."""
    if options.device.type == "cuda":
        return torch.cuda.get_device_name(options.device)
    return f"{torch.get_num_threads()} threads"


def failures(result: Result, options: argparse.Namespace) -> list[str]:
    """The reasons why the run does not count as equal to eager's; empty if it does."""
    found = []
    if not result.difference <= options.tolerance:  # NaN is a failure as well
        found.append(f"the loss curves differ by {result.difference:.2e}, wanted at most {options.tolerance:.0e}")
    late = [step + 1 for step in result.undispatched_steps if step > 0]
    if late:
        found.append(f"{len(late)} steps after the first were not dispatched: {late[:10]}")
    return found


def plot(result: Result, path: pathlib.Path) -> None:
    """Draws both curves above, their difference below, into an image file of the type in its name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, differences) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1))
    steps = range(1, len(result.eager.losses) + 1)
    curves.plot(steps, result.eager.losses, linewidth=4, alpha=0.4, label="eager PyTorch")
    curves.plot(steps, result.dispatched.losses, linewidth=1.2, label="dispatched through TVM")
    curves.set_ylabel("masked language modelling loss")
    curves.legend()
    pairs = zip(result.eager.losses, result.dispatched.losses, strict=True)
    differences.plot(steps, [abs(own - other) for own, other in pairs], linewidth=1)
    differences.set_yscale("symlog", linthresh=1e-8)
    differences.set_ylabel("difference")
    differences.set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Run, report, and judge; returns the exit status."""
    options = parse(arguments)
    print(header(options), flush=True)
    result = train_both(options)
    print()
    for line in (*loss_table(result), "", *summary(result, options)):
        print(line)
    if options.plot:
        plot(result, options.plot)
        print(f"curves drawn in {options.plot}")
    found = failures(result, options)
    for failure in found:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
