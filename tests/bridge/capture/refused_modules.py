"""Modules that are refused, and samples that PyTorch refuses → their output on the error stream and errors, as JSON.

    python -m tests.bridge.capture.refused_modules

A process of its own: torch's log handlers write to the error stream that they found when torch was imported.
"""

from __future__ import annotations

import collections
import ctypes
import json
import os
import sys
import tempfile
import threading
import traceback
from typing import Any

import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch
from bridge.base.log import set_logs


class Block(nn.Module):
    def __init__(self, then: Any):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.then = then

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        return self.then(self, x, self.linear(x), *rest)


class Answer:
    def __init__(self, value: torch.Tensor):
        self.value = value


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * torch.rand_like(grad)


class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function, *weights):
        ctx.function = function
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            y = ctx.function(x := x.detach().requires_grad_())
        found = torch.autograd.grad(y, [x, *weights], grad)
        return found[0], None, *found[1:]


def fails(words: str) -> Any:
    raise ValueError(words)


X = torch.randn(5, 4)


#: Obstacle → (a function of the module, x and linear(x), or a module), further arguments, and words of the refusal.
def written_parts(m, x, y):
    z = torch.complex(x, x)
    real = z.real
    real.mul_(2)
    z.conj().mul_(1j)
    return real.sin()


REFUSED: dict[str, tuple[Any, tuple, str]] = {
    "a number": (lambda m, x, y: y * y.sum().item(), (), r"round it otherwise.*keep it a tensor"),
    "a list": (lambda m, x, y: y * sum(y[0].tolist()), (), r"round it otherwise.*keep it a tensor"),
    "a shape": (lambda m, x, y: y[torch.ops.aten.masked_select(y, y > 0).long()], (), "keep the shape"),
    "a mask of rows": (lambda m, x, y: y[y[:, 0] > 0], (), "the shape of a result depends on numbers"),
    "numbers in a list of a type": (lambda m, x, y: y * torch.LongTensor([x.argmax(), 1]).sum(), (), "torch.tensor"),
    "numbers in a list like another": (lambda m, x, y: y * x.new([x.max(), 1]).sum(), (), "torch.tensor"),
    "numpy": (lambda m, x, y: y + torch.from_numpy(x.detach().cpu().numpy()), (), "compute it with torch"),
    "a generator": (lambda m, x, y: (each for each in [y]), (), "a result of type generator"),
    "an object": (lambda m, x, y: Answer(lambda: y), (), "return tensors, or a tuple, a list"),
    "a set": (lambda m, x, y: {1}, (), "a result of type set|unhashable"),
    "an object's argument": (lambda m, x, y, o: y, (Answer(threading.Lock()),), "pass what forward takes from it"),
    "a function of one's own": (lambda m, x, y: Doubled.apply(y), (), "autograd.Function Doubled"),
    "a checkpoint of one's own": (
        lambda m, x, y: Recomputed.apply(y, m.linear, *m.linear.parameters()),
        (),
        "runs autograd inside forward.*refused_modules.py",
    ),
    "an operator": (lambda m, x, y: y.to_sparse().to_dense(), (), "_to_sparse.default: makes a tensor of layout"),
    "an operator behind a row": (
        lambda m, x, y: (r := y[(x > 9).sum()], r.mul_(2), y.to_sparse().to_dense())[2],
        (),
        "_to_sparse.default: makes a tensor of layout",
    ),
    "a function's derivative": (
        lambda m, x, y: torch.func.grad(lambda t: t.sin().sum())(x * y[:, :4]) + x,
        (),
        "^  torch.func or forward_ad",
    ),
    "a copy": (
        lambda m, x, y: __import__("copy").deepcopy(m.linear)(x),
        (),
        "requires_grad_: makes a tensor inside forward that requires grad by itself",
    ),
    "an address": (
        lambda m, x, y: y + ctypes.c_float.from_address(y.data_ptr()).value,
        (),
        "make a kernel an operator",
    ),
    "a parameter's data": (lambda m, x, y: m.linear.weight.data.clamp_(-1, 1) @ y.T, (), "changes a parameter"),
    "data that is set": (lambda m, x, y: setattr(y, "data", x) or y, (), "Tensor.data ="),
    "an argument in place": (lambda m, x, y, z: z.data.add_(1) * y, (X.clone().requires_grad_(),), "work on a clone"),
    "parts of numbers that are conjugated": (written_parts, (), "cannot make it functional"),
    "lazy": (nn.LazyLinear(4), (), "call the module once on a sample"),
    "scripted": (torch.jit.script(nn.Linear(4, 4)), (), "dispatch the module it was made of"),
}

EAGERS_ERROR: dict[str, tuple[Any, tuple, str]] = {
    "shapes": (lambda m, x, y: y + torch.ones(3, 7), (), "RuntimeError: The size of tensor a"),
    "types": (lambda m, x, y: y @ x.double().T, (), "RuntimeError: expected m1 and m2 to have the same dtype"),
    "the user's": (lambda m, x, y: fails("no such block"), (), "ValueError: no such block"),
    "a product": (nn.Linear(3, 2), (), r"RuntimeError: .*mat1 and mat2 shapes cannot be multiplied \(5x4 and 3x2\)"),
    "a convolution": (nn.Conv2d(3, 4, 3), (), "RuntimeError: .*Conv|RuntimeError: Expected"),
    "an index": (lambda m, x, y: nn.functional.embedding(torch.tensor([9]), y), (), "IndexError: index out of range"),
    "a label": (
        lambda m, x, y, label: nn.functional.cross_entropy(y, label),
        (torch.tensor([0, 1, 2, 3, 7]),),
        "IndexError: Target 7 is out of bounds|RuntimeError",
    ),
    "the signature": (lambda m, x, y: y, (X,), "TypeError: .*positional arguments"),
}


def attempt(module: nn.Module, args: tuple) -> dict[str, Any]:
    """The output of ``add_tvm_dispatch`` on the process's streams, and its error."""
    streams = [os.dup(1), os.dup(2)]
    error: BaseException | None = None
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)
        try:
            add_tvm_dispatch(module, args)
        except Exception as raised:  # noqa: BLE001 - the test compares it
            error = raised
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, stream in enumerate(streams, start=1):
                os.dup2(stream, number)
                os.close(stream)
        written.seek(0)
        output = written.read().decode()
    shown = "".join(traceback.format_exception(error)) if error is not None else ""
    refused = isinstance(error, UnsupportedModule)
    return {"output": output, "shown": shown, "words": str(error), "refused": refused}


def main() -> None:
    found: dict[str, Any] = collections.defaultdict(dict)
    for group, cases in (("refused", REFUSED), ("eagers", EAGERS_ERROR)):
        for name, (then, rest, _) in cases.items():
            module = then if isinstance(then, nn.Module) else Block(then)
            found[group][name] = attempt(module, (X.clone(), *rest))
    module = add_tvm_dispatch(nn.Linear(4, 2), X)
    module(X).sum().backward()
    found["threads"] = [thread.name for thread in threading.enumerate()]
    set_logs("+dispatch")
    found["logged"] = attempt(Block(REFUSED["a shape"][0]), (X,))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
