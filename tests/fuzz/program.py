"""A random module as source text, so that a failure prints as a runnable script."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.device import DEVICE, forked_generators
from tests.fuzz.caches import CACHES
from tests.fuzz.functions import FUNCTIONS
from tests.fuzz.placed import placed

IMPORTS = """\
import contextvars
import functools
import math
import threading
import weakref
from collections import namedtuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as mapped
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

Pair = namedtuple("Pair", "first second")


"""

MODULES = '''\
class Cell(nn.Module):
    """A gate, a normalization, a residual; counts its calls in a buffer."""

    def __init__(self, width, dtype):
        super().__init__()
        self.gate, self.value = nn.Linear(width, width, dtype=dtype), nn.Linear(width, width, dtype=dtype)
        self.norm, self.drop = nn.LayerNorm(width, dtype=dtype), nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.norm(x + self.drop(torch.sigmoid(self.gate(x)) * self.value(x).tanh()))


class Stack(nn.Module):
    """Cells in a list, the first one used twice."""

    def __init__(self, width, dtype):
        super().__init__()
        self.cells = nn.ModuleList([Cell(width, dtype) for _ in range(2)])
        self.cells.append(self.cells[0])

    def forward(self, x):
        states = []
        for cell in self.cells:
            x = cell(x)
            states.append(x)
        return torch.stack(states).mean(0)


class Heads(nn.Module):
    """Causal attention of two heads, by hand, with dropped probabilities."""

    def __init__(self, width, dtype):
        super().__init__()
        self.project, self.out = nn.Linear(width, 12, bias=False, dtype=dtype), nn.Linear(4, width, dtype=dtype)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 2)).transpose(-2, -3) for t in self.project(x).chunk(3, -1))
        scores = q @ k.mT / math.sqrt(2)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = F.dropout(scores.masked_fill(future, float("-inf")).softmax(-1), 0.1, self.training)
        return x + self.out((weights @ v).transpose(-2, -3).flatten(-2))


class Recurrent(nn.Module):
    """An unrolled cell with normalization, its state written into a tensor step by step."""

    def __init__(self, width, dtype):
        super().__init__()
        self.input, self.state = nn.Linear(width, 6, dtype=dtype), nn.Linear(3, 6, bias=False, dtype=dtype)
        self.norm = nn.LayerNorm(6, dtype=dtype)

    def forward(self, x):
        state, states = x.new_zeros(x.shape[1:-1] + (3,)), x.new_zeros(x.shape[:-1] + (3,))
        for step in range(len(x)):
            update, new = self.norm(self.input(x[step]) + self.state(state)).chunk(2, -1)
            state = torch.lerp(state, new.tanh(), update.sigmoid())
            states[step] = state
        return states


def halve(module, args, result):
    """A forward hook that changes the result."""
    return tuple(t * 0.5 for t in result) if isinstance(result, tuple) else result * 0.5


def shift(module, args):
    """A forward pre-hook that changes the arguments."""
    return tuple(t + 0.25 if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args)


def look(module, args, result):
    """A forward hook that changes nothing."""


class Adapter:
    """A forward hook with a parameter of its module: a low-rank adapter."""

    def __call__(self, module, args, result):
        return result + (args[0] * module.adapter).sum(-1, keepdim=True)


class Gate(nn.Module):
    """Its way depends on numbers."""

    def forward(self, x):
        return x * 2 if x.mean() > 0 else x - 1


class Keep:
    """An object that is no tensor, number or string."""
'''

PREAMBLE = IMPORTS + FUNCTIONS + "\n\n" + CACHES + "\n\n" + MODULES
"""The beginning of every program's text."""


def run_preamble(dtype: str) -> dict[str, Any]:
    """The names available to a program's lines."""
    names: dict[str, Any] = {"__name__": "tests.fuzz.generated"}
    exec(PREAMBLE, names)
    names["D"] = getattr(torch, dtype)
    return names


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call and the leaves that may get a gradient."""

    args: tuple
    kwargs: dict[str, Any]
    leaves: tuple[Tensor, ...]


@dataclass(frozen=True)
class Program:
    """A module and its sample call.

    Attributes:
        dtype: name of its main element type, ``D`` in the text.
        init: lines of ``__init__``.
        arguments: ``(name, expression, by keyword)`` of each argument of ``forward``; an expression may use the names
            before it.
        body: statements of ``forward``, each of one or several lines.
        training: the module's mode.
        before: lines of ``prepare``, which a training loop runs before each call: they compute attributes.
    """

    seed: int
    dtype: str
    init: tuple[str, ...]
    arguments: tuple[tuple[str, str, bool], ...]
    body: tuple[str, ...]
    result: str
    training: bool = True
    before: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """A self-contained script: the class, ``make_module()`` and ``make_arguments()``."""
        names = [name for name, _, keyword in sorted(self.arguments, key=lambda argument: argument[2])]
        complex_type = "complex128" if self.dtype == "float64" else "complex64"
        lines = [
            PREAMBLE,
            f"\nD, C = torch.{self.dtype}, torch.{complex_type}\n\n",
            "class Random(nn.Module):",
            "    def __init__(self):",
        ]
        lines += ["        super().__init__()", *_indented(self.init, 8), ""]
        if self.before:
            lines += ["    def prepare(self):", *_indented(self.before, 8), ""]
        lines += [f"    def forward({', '.join(['self', *names])}):", *_indented(self.body, 8)]
        lines += [f"        return {self.result}", "", "", "def make_module():", "    torch.manual_seed(0)"]
        lines += [f"    return Random().train({self.training})", "", "", "def make_arguments(seed=0):"]
        lines += ["    torch.manual_seed(seed)"]
        lines += [f"    {name} = {text}" for name, text, _ in self.arguments]
        positional = "".join(f"{name}, " for name, _, keyword in self.arguments if not keyword)
        keywords = ", ".join(f"{name!r}: {name}" for name, _, keyword in self.arguments if keyword)
        lines += [f"    return ({positional}), {{{keywords}}}", ""]
        return "\n".join(lines)

    def load(self, device: torch.device = DEVICE) -> Mapping[str, Any]:
        """Runs the script; returns its names. Tracebacks show its lines; its tensors lie on the device."""
        filename = f"<fuzz/{self.seed}-{hash(self.source) & 0xFFFFFF:06x}-{device.type}.py>".strip("<>")
        source = placed(self.source, device)
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        names: dict[str, Any] = {"__name__": "tests.fuzz.generated", "DEVICE": device}
        exec(compile(source, filename, "exec"), names)
        return names

    def without(self, index: int) -> Program:
        """The program without one statement."""
        return replace(self, body=self.body[:index] + self.body[index + 1 :])


def make_arguments(names: Mapping[str, Any], seed: int) -> Arguments:
    """New arguments for a call of a loaded program; the default generator is left alone."""
    with forked_generators(), names["DEVICE"]:
        args, kwargs = names["make_arguments"](seed)
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves((args, kwargs)):
        base = leaf._base if isinstance(leaf, Tensor) and leaf._base is not None else leaf
        if isinstance(base, Tensor) and base.is_leaf and base.requires_grad and all(base is not f for f in found):
            found.append(base)
    return Arguments(args, kwargs, tuple(found))


def make_module(names: Mapping[str, Any]) -> nn.Module:
    """A new module of a loaded program, always with the same numbers; the default generator is left alone."""
    with forked_generators(), names["DEVICE"]:
        return prepared(names["make_module"]())


def prepared(module: nn.Module) -> nn.Module:
    """The module, with the attributes that a training loop computes before each call."""
    if hasattr(module, "prepare"):
        module.prepare()
    return module


def _indented(lines: tuple[str, ...], width: int) -> list[str]:
    return [" " * width + line for statement in lines for line in statement.splitlines()]
