"""Interrupts at random moments while a module is compiled: ``python -m tests.interrupts --count 500``.

Each is a SIGINT sent by another thread. It has to come out as ``KeyboardInterrupt`` and nothing else, unless the
compiling was over, and to leave the module, the generators and torch's process-wide state as they were.
"""

from __future__ import annotations

import argparse
import builtins
import math
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bridge import add_tvm_dispatch, examine, lower, remove_tvm_dispatch
from bridge.base.modes import autocast_setting
from bridge.base.torch_internals import has_saved_tensors_hooks, len_dispatch_stack, len_function_stack
from tests.bridge.models import bert_layer


class Recorded(nn.Module):
    """Buffers, attributes that forward sets, a draw, a submodule that is called twice, a hook of its own."""

    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Tanh())
        self.seen, self.width = {}, None
        self.register_forward_hook(_tell)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.width = x.shape[-1]
        return self.body(self.body(x)).softmax(-1)


def _tell(module: nn.Module, args: tuple, result: torch.Tensor) -> None:
    module.seen["shape"] = tuple(result.shape)


def convolutional(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))


def modules(rng: random.Random) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """Modules with samples, of ever new widths, so that nothing is found in a cache."""
    while True:
        width = rng.randrange(5, 200)
        yield Recorded(width), torch.randn(4, width)
        yield bert_layer(dropout=rng.random() / 2), torch.randn(2, rng.randrange(3, 40), 24)
        conv, image = convolutional(width), torch.randn(2, 3, 8, 8)
        conv(image)
        yield conv, image
        yield nn.GRU(width, 7), torch.randn(3, 2, width)


def by_miss(module: nn.Module, sample: torch.Tensor) -> None:
    """An entry added by a call that misses."""
    add_tvm_dispatch(module, sample[:2].clone(), on_miss="compile")
    module(sample)


def by_dynamo(module: nn.Module, sample: torch.Tensor) -> None:
    torch.compiler.reset()
    torch.compile(module, backend="tvm_dispatch")(sample)


WAYS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "add_tvm_dispatch": add_tvm_dispatch,
    "examine": examine,
    "lower": lower,
    "on_miss": by_miss,
}


def _autocast_depth() -> int:
    """How many autocast contexts this place is in: torch tells only where one is left."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def process_state() -> dict[str, Any]:
    """State of torch, Python and this package for the process or the thread."""
    return {
        "generators": (torch.get_rng_state().tolist(), random.getstate()),
        "grad mode": torch.is_grad_enabled(),
        "modes": (len_function_stack(), len_dispatch_stack(), has_saved_tensors_hooks()),
        "autocast": (autocast_setting(), _autocast_depth()),
        "flags": (
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.compiler.is_compiling(),
            torch.jit.is_tracing(),
        ),
        "globals": (nn.Module.__call__, nn.Module.__getattr__, nn.Module._call_impl, max, min, builtins.max, math.pow),
        "hooks": [len(hooks) for name, hooks in vars(nn.modules.module).items() if name.endswith("_hooks")],
        "warnings": list(warnings.filters),
        "handler": signal.getsignal(signal.SIGINT),
        "profile": sys.getprofile(),
    }


def module_state(module: nn.Module) -> list[Any]:
    """Everything on a module and inside it: tensors by their numbers, the rest by identity."""
    found: list[Any] = []
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if isinstance(value, dict):  # registries of tensors, hooks, submodules; attributes
                value = (type(value), [(key, id(held)) for key, held in value.items()])
            found.append((path, name, value))
    found += [
        (name, tensor.tolist(), tensor.requires_grad) for name, tensor in module.state_dict(keep_vars=True).items()
    ]
    return found


def interrupted(compiling: Callable[[], Any], delay: float, send: Callable[[], Any]) -> str:
    """Compiles with one SIGINT after ``delay`` seconds → ``"interrupted"``, ``"over"``, or another error."""
    timer = threading.Timer(delay, send)
    is_over = False
    try:
        try:
            timer.start()
            compiling()
            is_over = True
        finally:
            timer.cancel()
            timer.join()
    except KeyboardInterrupt:
        return "over" if is_over else "interrupted"
    except BaseException as error:  # noqa: BLE001 - to be told
        return f"{type(error).__name__}: {error}"
    return "over"


def by_kill() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def by_raise() -> None:
    signal.raise_signal(signal.SIGINT)


@contextmanager
def heard() -> Iterator[None]:
    """While active, SIGINT raises ``KeyboardInterrupt``, also in a shell's background job, which ignores it."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def series(count: int, seed: int, seconds: float) -> tuple[Counter[str], list[str]]:
    """``count`` interrupts → counts of the outcomes, and problems, a line each.

    They come at moments up to ``seconds`` after the start, until an uninterrupted one tells how long compiling takes.
    """
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    problems: list[str] = []
    known: dict[str, float] = {}
    made = modules(rng)
    while sum(outcomes.values()) - outcomes["over"] < count:
        module, sample = next(made)
        name = rng.choice(list(WAYS))
        kind = f"{type(module).__name__} by {name}"
        delay = rng.uniform(0, known.get(kind, seconds))
        before, process = module_state(module), process_state()
        started = time.perf_counter()
        outcome = interrupted(lambda: WAYS[name](module, sample), delay, rng.choice([by_kill, by_raise]))  # noqa: B023
        outcomes[outcome] += 1
        if outcome == "over":
            known[kind] = time.perf_counter() - started
            continue
        where = f"{kind} after {delay:.3f} s: {outcome}"
        if outcome != "interrupted":
            problems.append(where)
        if name == "on_miss":
            remove_tvm_dispatch(module)
        if name != "on_miss" and module_state(module) != before:
            problems.append(f"{where}: the module is changed")
        problems += [f"{where}: {what} changed" for what, now in process_state().items() if now != process[what]]
        small, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh()), torch.randn(4, 3)
        wanted = small(x)
        if not torch.allclose(add_tvm_dispatch(small, x, on_miss="error")(x), wanted):
            problems.append(f"{where}: adding afterwards is wrong")
    return outcomes, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with heard():
        outcomes, problems = series(options.count, options.seed, seconds=5)
    print(*(f"{count:5} {outcome}" for outcome, count in outcomes.most_common()), *problems, sep="\n")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
