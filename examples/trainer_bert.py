"""Fine-tune a BERT with HuggingFace's ``Trainer``, its encoder layers dispatched to TVM, and compare with eager.

    python -m examples.trainer_bert [--device cuda]

A script only needs ``callbacks=[TrainerDispatch()]``: the ``Trainer`` is unchanged, with gradient accumulation,
clipping, evaluation, checkpoints, and a second run that resumes from one.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Any

from transformers import Trainer, TrainingArguments

from bridge import stats
from bridge.callbacks import TrainerDispatch
from examples.layers import make_examples, make_model

STEPS, EVERY, BATCH = 30, 10, 4


@dataclass(frozen=True)
class Run:
    """The log of one fine-tuning (a training loss per step, an evaluation every ``EVERY``) and its dispatch counts."""

    log: list[dict[str, float]]
    hits: list[int]
    misses: Counter[str]


def fine_tune(
    folder: pathlib.Path,
    *,
    dispatch: bool,
    resume: bool = False,
    size: dict[str, int],
    length: int,
    device: str = "cpu",
) -> Run:
    """``STEPS`` optimizer steps of two micro-batches; with ``resume``, only the steps after the checkpoint half-way."""
    model = make_model(**size)
    examples, held_out = make_examples(64, length), make_examples(2 * BATCH, length, seed=1)
    callback = TrainerDispatch("BertLayer")
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        learning_rate=1e-3,
        warmup_steps=3,
        eval_strategy="steps",
        eval_steps=EVERY,
        save_steps=EVERY,
        logging_steps=1,
        seed=0,
        use_cpu=device == "cpu",
        disable_tqdm=True,
        report_to=[],
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=examples,
        eval_dataset=held_out,
        callbacks=[callback] if dispatch else [],
    )
    half_way = str(folder / f"checkpoint-{STEPS - EVERY}")
    trainer.train(resume_from_checkpoint=half_way if resume else None)
    counted = [stats(layer) for layer in callback.dispatched.values()]
    misses = sum((Counter(each.misses) for each in counted), Counter())
    return Run(trainer.state.log_history, [each.hits for each in counted], misses)


def losses(run: Run) -> list[tuple[int, str, float]]:
    """Every logged loss and gradient norm, with its step."""
    names = ("loss", "eval_loss", "grad_norm")
    return [(entry["step"], name, float(entry[name])) for entry in run.log for name in names if name in entry]


def largest_difference(run: Run, other: Run) -> float:
    """The largest difference of the values in :func:`losses`; infinite if the two runs logged different keys."""
    mine, theirs = losses(run), losses(other)
    if [entry[:2] for entry in mine] != [entry[:2] for entry in theirs]:
        return float("inf")
    return max(abs(a[2] - b[2]) for a, b in zip(mine, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: the Trainer's first GPU")
    options = parser.parse_args()
    if options.device == "cuda":  # with several GPUs, Trainer would copy the model to each at every step
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    size: dict[str, Any] = {"layers": options.layers, "hidden": options.hidden}
    with tempfile.TemporaryDirectory() as folder:
        for resume in (False, True):
            runs = {}
            for name in ("eager", "dispatched"):
                path = pathlib.Path(folder) / name
                runs[name] = fine_tune(
                    path,
                    dispatch=name == "dispatched",
                    resume=resume,
                    size=size,
                    length=options.length,
                    device=options.device,
                )
            mine, eager = runs["dispatched"], runs["eager"]
            print(
                f"{'resumed' if resume else 'from the start'}: largest difference {largest_difference(mine, eager):.1e}"
            )
            print(f"  hits per layer {mine.hits}, misses {dict(mine.misses)}")


if __name__ == "__main__":
    main()
