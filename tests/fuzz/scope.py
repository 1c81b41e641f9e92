"""The variables of a growing program, with their values in eager PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.program import run_preamble

LARGEST = 50.0
"""Statements with larger numbers (or nan) are rejected: the program would be all rounding."""


def is_float(value: Tensor) -> bool:
    return value.is_floating_point()


def is_int(value: Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool


class Scope:
    """Runs a program line by line as it grows; rejects lines that eager refuses or that overflow."""

    def __init__(self, rng: random.Random, dtype: str):
        self.rng = rng
        self.names = run_preamble(dtype)
        self.dtype = self.names["D"]
        self.names["C"] = torch.complex128 if self.dtype is torch.float64 else torch.complex64
        self.module = nn.Module()
        self.names["self"] = self.module
        self.init: list[str] = []
        self.before: list[str] = []
        self.body: list[str] = []
        self.arguments: list[tuple[str, str, bool]] = []
        self.variables: list[str] = []
        self._count = 0

    def __getitem__(self, name: str) -> Any:
        return self.names[name]

    def fresh(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def argument(self, text: str, keyword: bool = False) -> str:
        """Adds an argument made by an expression; returns its name."""
        name = self.fresh("x")
        self.names[name] = eval(text, self.names)
        self.arguments.append((name, text, keyword))
        if isinstance(self.names[name], Tensor):
            self.variables.append(name)
        return name

    def define(self, text: str, kind: str = "") -> str:
        """Adds a line to ``__init__`` that sets an attribute; returns the attribute as an expression.

        ``kind``: ``"parameter"``, ``"buffer"`` or nothing for a submodule or a plain value.
        """
        name = self.fresh("m")
        line = {
            "parameter": f"self.{name} = nn.Parameter({text})",
            "frozen": f"self.{name} = nn.Parameter({text}, requires_grad=False)",
            "buffer": f"self.register_buffer({name!r}, {text})",
        }.get(kind, f"self.{name} = {text}")
        exec(line, self.names)
        self.init.append(line)
        return f"self.{name}"

    def extend(self, line: str) -> None:
        """Adds a line to ``__init__`` that changes the last definition."""
        exec(line, self.names)
        self.init[-1] += "\n" + line

    def compute(self, text: str) -> str:
        """Adds an attribute that the training loop computes before each call; returns it as an expression."""
        name = self.fresh("m")
        exec(f"self.{name} = {text}", self.names)
        self.before.append(f"self.{name} = {text}")
        return f"self.{name}"

    @property
    def defined(self) -> tuple[int, int]:
        """The numbers of lines that define attributes, in ``__init__`` and before each call."""
        return len(self.init), len(self.before)

    def undefine(self, defined: tuple[int, int]) -> None:
        """Removes the definitions after the first lines."""
        for lines, count in zip((self.init, self.before), defined, strict=True):
            for line in lines[count:]:
                name = line.split("'")[1] if "register_buffer" in line else line.split(" = ")[0].removeprefix("self.")
                if "." not in name:
                    delattr(self.module, name)
            del lines[count:]

    def emit(self, statement: str, *, checked: bool = True) -> bool:
        """Runs a statement and appends it to the body if eager accepts it and its numbers are of a sensible size."""
        before = dict(self.names)
        try:
            exec(statement, self.names)
        except Exception:  # noqa: BLE001 - eager PyTorch decides which proposals are valid
            self._forget(before)
            return False
        if checked and not self._differentiable():
            self._forget(before)
            return False
        new = [n for n, v in self.names.items() if n not in before or before[n] is not v]
        if checked and not all(_sensible(self.names[n]) for n in {*new, *self.variables}):
            self._forget(before)
            return False
        self.variables += [n for n in new if isinstance(self.names[n], Tensor) and n not in self.variables]
        self.body.append(statement)
        return True

    def _differentiable(self) -> bool:
        """Whether eager accepts the backward so far: in-place writes may have overwritten its saved tensors."""
        tensors = [self.names[name] for name in self.variables]
        leaves = [t for t in (*tensors, *self.module.parameters()) if t.requires_grad]
        try:
            followed = [t for t in tensors if t.requires_grad and t.grad_fn is not None]
            sums = [(t.abs() if t.is_complex() else t).sum() for t in followed]
            if sums:
                torch.autograd.grad(sums, leaves, retain_graph=True, allow_unused=True)
        except RuntimeError:
            return False
        return True

    def _forget(self, before: dict[str, Any]) -> None:
        self.names.clear()
        self.names.update(before)

    def pick(self, wanted: Callable[[Tensor], bool] = is_float) -> str | None:
        """A variable with a suitable tensor, mostly a recent one; ``None`` if there is none."""
        fitting = [name for name in self.variables if wanted(self.names[name])]
        if not fitting:
            return None
        recent = fitting[-5:] if self.rng.random() < 0.7 else fitting
        return self.rng.choice(recent)

    def partner(self, of: str) -> str | None:
        """A float variable that broadcasts with another."""
        shape = self.names[of].shape
        return self.pick(lambda t: t.is_floating_point() and _broadcast(t.shape, shape))

    def choice(self, options: Sequence[Any]) -> Any:
        return self.rng.choice(options)

    def number(self, low: float = -2.0, high: float = 2.0) -> str:
        return repr(round(self.rng.uniform(low, high), 3))

    def integer(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability


def _sensible(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return True
    if value.numel() > 40000:
        return False
    if value.numel() == 0 or not (value.is_floating_point() or value.is_complex()):
        return True
    magnitude = value.detach().abs().max()
    return bool(torch.isfinite(magnitude)) and float(magnitude) <= LARGEST


def _broadcast(one: Sequence[int], other: Sequence[int]) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(one), reversed(other), strict=False))
