"""A program and a seed → dynamic extents of its arguments, its arguments at other sizes, ``dynamic_shapes=``.

A size is changed where an argument's expression spells it, so that values derived from it (a transpose, a slice, a
second argument of the first) follow. The dynamic dimensions of tensors are read off the arguments at two sizes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from tests.device import DEVICE
from tests.fuzz.program import Arguments, Program, make_arguments

PRIMES = (5, 7, 11, 13)
DRAWN = (PRIMES, (24, 33, 40, 65), (2, 3, 4, 6, 8, 19), (3, 4, 16, 33))
"""Choices for each independent size: primes, large ones, small ones, and sizes of other dimensions."""
END = 80
"""The end of the range for sizes taken from everywhere."""
_SHAPE = re.compile(r"\((\d+(?:, \d+)*,?)\)")

Spot = tuple[int, int]
"""An argument, and a position in the shape in its expression."""


@dataclass(frozen=True)
class Variation:
    """Spots of a program that vary together, in one or two groups.

    Attributes:
        groups: the spots of each group, which share one size.
        sample: the size of each group in the compiled call: the program's own, or another.
        sizes: of each group in the calls within its range, the sample's first.
        outside: of each group in a call outside of the range: 0, 1, or above the largest size.
        kind: ``"named"``, ``"dynamic"``, ``"auto"``, or ``"automatic"``: no specification.
    """

    program: Program
    groups: tuple[tuple[Spot, ...], ...]
    sample: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    outside: tuple[int, ...]
    kind: str

    def __str__(self) -> str:
        names = ["+".join(f"{self.program.arguments[i][0]}[{j}]" for i, j in group) for group in self.groups]
        return f"{self.kind} {', '.join(names)} in {self.sizes}"

    def at(self, sizes: tuple[int, ...]) -> Program:
        """The program with the arguments of these sizes."""
        arguments = list(self.program.arguments)
        for group, size in zip(self.groups, sizes, strict=True):
            for index, position in group:
                name, text, keyword = arguments[index]
                arguments[index] = (name, _resized(text, position, size), keyword)
        return replace(self.program, arguments=tuple(arguments))

    def arguments(self, sizes: tuple[int, ...], seed: int, device: torch.device = DEVICE) -> Arguments:
        """New arguments of these sizes."""
        return make_arguments(self.at(sizes).load(device), seed)

    def dynamic_shapes(self) -> dict[str, Any] | None:
        """The specification by argument and dimension; dimensions that always have equal sizes share a ``Dim``."""
        if self.kind == "automatic":
            return None
        names = [name for name, _, keyword in sorted(self.program.arguments, key=lambda argument: argument[2])]
        calls = [_by_name(self.arguments(sizes, 0), names) for sizes in self.sizes]
        dims: dict[tuple[int, ...], Any] = {}
        found: dict[str, Any] = {}
        for name in names:
            values = [call[name] for call in calls]
            found[name] = None
            if not isinstance(values[0], Tensor):
                continue
            extents = list(zip(*(value.shape for value in values), strict=True))
            varying = {i: sizes for i, sizes in enumerate(extents) if len(set(sizes)) > 1 and sizes[0] > 1}
            found[name] = {i: self._dim(sizes, dims) for i, sizes in varying.items()} or None
        return found

    def _dim(self, sizes: tuple[int, ...], dims: dict[tuple[int, ...], Any]) -> Any:
        if self.kind != "named":
            return Dim.DYNAMIC if self.kind == "dynamic" else Dim.AUTO
        return dims.setdefault(sizes, Dim(f"size{len(dims)}", min=2, max=max(sizes)))


def variations(program: Program, kind: str | None = None) -> Iterator[Variation]:
    """Variations of a program's sizes, in a random order; eager may refuse them.

    ``kind``: see :class:`Variation`; by default the program's seed chooses.
    """
    rng = random.Random(program.seed)
    spelled: dict[int, list[Spot]] = {}
    for index, (_, text, _) in enumerate(program.arguments):
        found = _SHAPE.search(text)
        for position, size in enumerate(_sizes(found)) if found else ():
            spelled.setdefault(size, []).append((index, position))
    groups = [(size, tuple(spots)) for size, spots in spelled.items() if size > 1]
    groups += [(size, (spot,)) for size, spots in spelled.items() if size > 1 and len(spots) > 1 for spot in spots]
    rng.shuffle(groups)
    pairs = [(one, other) for one in groups for other in groups if not set(one[1]) & set(other[1])]
    chosen = [(group,) for group in groups]
    if pairs:
        chosen.insert(0 if rng.random() < 0.3 else len(chosen), rng.choice(pairs))
    chosen_kind = rng.choice(["named", "named", "dynamic", "auto", "automatic"])
    for parts in chosen:
        count = len(parts)
        own, equal = tuple(size for size, _ in parts), (rng.choice(PRIMES),) * count
        drawn = [tuple(rng.choice(sizes) for _ in parts) for sizes in DRAWN]
        sample = rng.choice([own, own, *drawn])
        others = [each for each in dict.fromkeys([(2,) * count, own, equal, *drawn]) if each != sample]
        rng.shuffle(others)
        outside = rng.choice([0, 1, 1, 71])
        apart = (outside, *(rng.choice([size, outside]) for size in sample[1:]))
        yield Variation(program, tuple(g for _, g in parts), sample, (sample, *others[:4]), apart, kind or chosen_kind)


def everywhere(variation: Variation, count: int = 24) -> Variation:
    """A variation at sizes that test its guards: the smallest, primes, the range's end, neighbours of the sample's,
    sizes of other dimensions, and pairs of equal sizes."""
    texts = (*(text for _, text, _ in variation.program.arguments), *variation.program.init)
    others = {int(number) for text in texts for number in re.findall(r"\b\d+\b", text)}
    near = {size + step for size in variation.sample for step in (-1, 1)}
    sizes = [*sorted({2, 3, 7, 13, *near, *(each for each in others if each < END)} - {0, 1}), END]
    rng = random.Random(variation.program.seed)
    pairs = [tuple(rng.choice(sizes) for _ in variation.sample) for _ in range(count)]
    equal = [(size,) * len(variation.sample) for size in sizes]
    found = dict.fromkeys([variation.sample, *rng.sample(pairs, len(pairs) // 2), *equal, *pairs])
    return replace(variation, sizes=tuple(found)[:count], outside=(END + 1, *variation.outside[1:]))


def _by_name(given: Arguments, names: list[str]) -> Mapping[str, Any]:
    return {**dict(zip(names, given.args, strict=False)), **given.kwargs}


def _sizes(found: re.Match[str]) -> list[int]:
    return [int(word) for word in found[1].rstrip(",").split(", ")]


def _resized(text: str, position: int, size: int) -> str:
    """An expression with one size of its shape changed, also where it repeats that shape."""
    found = _SHAPE.search(text)
    sizes = _sizes(found)
    sizes[position] = size
    return text.replace(found[0], str(tuple(sizes)))
