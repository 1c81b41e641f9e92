"""A module that is dispatched and run: its compiled functions, and the bits of its outputs, gradients and buffers.

:func:`main` prints them as JSON; :func:`in_children` returns them for forked processes with nothing compiled.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import bridge
from bridge.base.session import SESSION
from bridge.capture import RecordedCall
from bridge.compile import pipeline
from bridge.compile.cpu import build
from bridge.compile.cpu.threads import CONNECT
from bridge.rng.engine import functions
from tests.unclocked import choose_without_clock


class Block(nn.Module):
    """A block with products, reductions, a mask, a column sum and a buffer that changes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 64)
        self.norm, self.drop, self.batch = nn.LayerNorm(64), nn.Dropout(0.2), nn.BatchNorm1d(64)

    def forward(self, x):
        hidden = torch.nn.functional.gelu(self.first(self.norm(x)))
        return self.batch(self.drop(self.second(hidden)) + x).softmax(-1) * torch.sin(x)


def digest(tensors) -> str:
    return hashlib.sha256(b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()


@contextmanager
def captures() -> Iterator[list[int]]:
    """While active, captured calls are counted; a call that is found by its record key is not captured."""
    captured: list[int] = []
    capture = RecordedCall.captured

    def count(call):
        captured.append(1)
        return capture(call)

    RecordedCall.captured = count
    try:
        yield captured
    finally:
        RecordedCall.captured = capture


def counted(rows: int = 48) -> dict[str, Any]:
    """Two steps of the block: names of the functions that LLVM compiled for them, and all bits that they left."""
    given: list[str] = []
    compiled = build._compiled

    def count(functions, target):
        given.extend(sorted(name for name in functions if name != CONNECT))
        return compiled(functions, target)

    build._compiled = count
    translate, translated = pipeline.translate, []

    def count_translations(function, *rest):
        translated.append(1)
        return translate(function, *rest)

    pipeline.translate = count_translations
    torch.manual_seed(0)
    module, x = Block(), torch.randn(rows, 64, requires_grad=True)
    with captures() as captured:
        bridge.add_tvm_dispatch(module, x)
    found = []
    for _ in range(2):
        inputs = x.detach().clone().requires_grad_()
        result = module(inputs)
        result.square().sum().backward()
        found += [result, inputs.grad]
    found += [parameter.grad for parameter in module.parameters()] + list(module.buffers())
    build._compiled, pipeline.translate = compiled, translate
    told = {"built": given, "translated": len(translated), "captured": len(captured), "hits": bridge.stats(module).hits}
    return {**told, "bits": digest(found), "rng": digest([torch.rand(3)])}


def forget_all() -> None:
    """Makes this process one in which nothing is compiled."""
    SESSION.reset("lowerings", "programs", "choices")
    functions.cache_clear()  # of draws, which an earlier test may have wanted
    SESSION.reset("complaints")


def in_children(count: int, work: Callable[[], Any] = counted) -> list[Any]:
    """Results of ``work`` in processes that begin at once and in which nothing is compiled."""
    forget_all()
    started = []
    for _ in range(count):
        end, begin = os.pipe()
        child = os.fork()
        if child == 0:
            gc.freeze()  # collecting inherited objects would copy their pages
            try:
                os.close(end)
                with open(begin, "w") as file:
                    try:
                        told = {"returned": work()}
                    except BaseException:  # noqa: BLE001 - told to the test
                        told = {"raised": traceback.format_exc()}
                    file.write(json.dumps(told))
            finally:
                os._exit(0)
        os.close(begin)
        started.append((child, end))
    told = []
    for child, end in started:
        with open(end) as file:
            told.append(file.read())
        os.waitpid(child, 0)
    results = [json.loads(text) for text in told]
    for result in results:
        assert "returned" in result, result["raised"]
    return [result["returned"] for result in results]


def main() -> None:
    """Prints the result of :func:`counted`."""
    choose_without_clock()
    json.dump(counted(), sys.stdout)
