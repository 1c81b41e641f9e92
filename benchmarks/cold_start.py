"""First and second start of the same script: seconds of ``add_tvm_dispatch`` and of the first step, by turns.

Every measurement is a process of its own. A first start finds an empty disk cache, the second one the cache of the
first; "off" is a start with BRIDGE_CACHE=0. The three take turns; the table shows medians. Loss and gradients must be
equal to the bit, and the second start must neither capture nor compile. The import of TVM, otherwise part of the first
call, is left out.

    python -m benchmarks cold_start --runs 3 --only BERT-base --json cold_start.json
    python -m benchmarks cold_start --runs 1 --only BERT-base --device cuda --starts first,second

``examples.trainer_bert`` compiles during its calls: their compile time counts as ``add_tvm_dispatch``, the rest of the
training as the step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.cold_processes import asked, environment_of, options_of, print_table

TRAINER = "examples.trainer_bert"
NAMES = ("BertLayer (1, 128)", "BERT-base (1, 128)", "GPT-2 small (1, 128)", TRAINER)
STARTS = ("first", "second", "off")


def measure(name: str, quick: bool, device: str = "cpu") -> dict[str, Any]:
    """Seconds of a start in this process, and the bits of a step's results."""
    if name == TRAINER:
        return measure_trainer(quick, device)
    import torch

    import bridge.dispatch  # and TVM with it, before the clock starts: the same at every start
    from benchmarks.models import MODELS, loss_of

    model = MODELS[name]
    torch.manual_seed(0)
    module = model.make(quick)
    batch = {key: value.to(device) for key, value in model.sample(module.to(device), quick, 0).items()}
    finish(device)
    started = time.perf_counter()
    bridge.add_tvm_dispatch(module, batch)
    added = time.perf_counter()
    loss = loss_of(module(**batch))
    loss.backward()
    finish(device)
    stepped = time.perf_counter()
    if bridge.stats(module).hits != 1:
        raise RuntimeError(f"not dispatched: {bridge.stats(module)}")
    left = [loss.detach(), *(each.grad for each in module.parameters() if each.grad is not None)]
    bits = hashlib.sha256(b"".join(each.cpu().contiguous().numpy().tobytes() for each in left)).hexdigest()
    return {"add": added - started, "step": stepped - added, "bits": bits}


def measure_trainer(quick: bool, device: str) -> dict[str, Any]:
    """Seconds of all compilations of the example's training, and of the rest; its log serves as the bits."""
    from bridge.dispatch import dispatcher
    from examples.trainer_bert import fine_tune, losses

    seconds, compile_entry = [], dispatcher.compile_entry

    def timed(*args: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return compile_entry(*args, **options)
        finally:
            seconds.append(time.perf_counter() - started)

    dispatcher.compile_entry = timed
    size = {"layers": 2, "hidden": 24 if quick else 128}
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        run = fine_tune(Path(folder), dispatch=True, size=size, length=16 if quick else 64, device=device)
        whole = time.perf_counter() - started
    if run.misses:
        raise RuntimeError(f"not every call was dispatched: {run.misses}")
    return {"add": sum(seconds), "step": whole - sum(seconds), "bits": repr(losses(run))}


def finish(device: str) -> None:
    """Waits for the device."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize(device)


def start(name: str, quick: bool, folder: Path, threads: int | None, off: bool, device: str = "cpu") -> dict[str, Any]:
    """The measurement in a new process with a cache in a folder."""
    variables = {"BRIDGE_CACHE": str(int(not off)), "BRIDGE_CACHE_DIR": str(folder)}
    return asked("cold_start", name, ["--here", "--device", device], quick, environment_of(threads, **variables))


def row_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of alternating starts."""
    found: dict[str, list[dict[str, Any]]] = {which: [] for which in options.starts}
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "cache"
            for which in options.starts:
                off = which == "off"
                found[which].append(start(name, options.quick, folder, options.threads, off, options.device))
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if found["first"][-1]["bits"] != found["second"][-1]["bits"]:
            raise RuntimeError(f"{name}: a cached program left other bits")
    row: dict[str, Any] = {"module": name, "cache_bytes": size}
    for which, runs in found.items():
        for part in ("add", "step"):
            row[f"{which}_{part}_s"] = statistics.median(run[part] for run in runs)
    row["second_to_first"] = row["second_add_s"] / row["first_add_s"]
    return row


def main() -> None:
    parser = options_of(__doc__, "rounds of three processes")
    parser.add_argument("--here", action="store_true", help="measure in this process and print JSON")
    parser.add_argument("--device", default="cpu", help="cpu, cuda")
    parser.add_argument("--starts", default=",".join(STARTS), help="the first, the second, one without a cache")
    options = parser.parse_args()
    options.starts = options.starts.split(",")
    warnings.simplefilter("ignore")
    names = [name for name in NAMES if options.only in name]
    if options.here:
        print(json.dumps(measure(names[0], options.quick, options.device)))
        return
    print_table("cold_start", "cold_start", names, row_of, options)


if __name__ == "__main__":
    main()
