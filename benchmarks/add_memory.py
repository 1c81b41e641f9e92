"""Peak resident memory of a process that adds a whole model and trains it, beside one that trains it eagerly.

Every row is a process of its own: the model and its AdamW optimizer, ``add_tvm_dispatch`` (or nothing), some steps.
The measure is the kernel's high-water mark of resident pages (``VmHWM``), imports included.

    python -m benchmarks.add_memory --model bert --batch 8 --seq 256
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

PEERS = ("eager", "ours")
PHASES = ("model", "add", "train")


def measure(peer: str, options: argparse.Namespace) -> dict[str, float]:
    """The peak resident MiB at the end of each phase, in this process."""
    import torch

    torch.manual_seed(0)
    model, batch = _model(options)
    optimizer = torch.optim.AdamW(model.parameters())
    peaks = {"model": _high_water()}
    if peer == "ours":
        from bridge import add_tvm_dispatch

        add_tvm_dispatch(model, batch)
    peaks["add"] = _high_water()
    for _ in range(options.steps):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    if peer == "ours":
        from bridge import stats

        if stats(model).hits != options.steps:
            raise RuntimeError(f"not every step was dispatched: {stats(model)}")
    peaks["train"] = _high_water()
    return peaks


def _model(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """A model of random parameters, of its usual size but for the number of layers, and a batch of ids and labels."""
    import torch
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    if options.model == "bert":
        model = BertForMaskedLM(BertConfig(num_hidden_layers=options.layers))
    else:
        model = GPT2LMHeadModel(GPT2Config(n_layer=options.layers))
    ids = torch.randint(0, model.config.vocab_size, (options.batch, options.seq))
    return model.train(), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _high_water() -> float:
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**10


def _in_a_process(peer: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.add_memory", *sys.argv[1:], "--peer", peer]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("bert", "gpt2"), default="bert")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--peer", choices=PEERS, help="measure in this process and print JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.peer:
        print(json.dumps(measure(options.peer, options)))
        return
    print(f"{options.model}, {options.layers} layers, {options.batch} x {options.seq} tokens, {options.steps} steps\n")
    print("| most resident MiB by the end of | " + " | ".join(PHASES) + " | / eager |\n|---" + "|---:" * 4 + "|")
    eager = None
    for peer in PEERS:
        peaks = _in_a_process(peer)
        eager = eager or peaks["train"]
        cells = [*(f"{peaks[phase]:.0f}" for phase in PHASES), f"{peaks['train'] / eager:.3f}"]
        print("| " + " | ".join([peer, *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
