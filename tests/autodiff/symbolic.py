"""Helpers for functions with symbolic extents: a function and its dynamic sizes → asserts that the symbolic pipeline's
result equals the static pipeline's at each size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autodiff import clean, differentiate, join_products, mask_dropout, spell_out
from autodiff.body import Scope
from autodiff.extents import Dim, ExtentScope
from autodiff.ir import (
    Constant,
    Function,
    TensorType,
    Var,
    bindings,
    build_function,
    dtype,
    is_float,
    results,
    shape,
)
from bridge.reference.relax import interpret
from partition import Partitioned, partition
from tests.autodiff.instantiate import instantiate

Places = Mapping[tuple[int, int], str]
"""By argument and axis: the symbol that stands there."""


def extents_of_size(args: Sequence[torch.Tensor], argument: int, axis: int, everywhere: bool) -> dict:
    """One symbol at an axis, and ``everywhere`` at all axes of the same size."""
    size = args[argument].shape[axis]
    if not everywhere:
        return {(argument, axis): "n"}
    return {(i, a): "n" for i, arg in enumerate(args) for a, extent in enumerate(arg.shape) if extent == size}


def function_of(
    build: Callable,
    args: Sequence[torch.Tensor],
    places: Places | None = None,
    scope: ExtentScope | None = None,
    high: int | None = None,
) -> Function:
    """The function of ``build(scope, *params)``, with symbols of ``scope``, at most ``high``, at ``places``."""
    places = places or {}
    symbols: dict[str, Dim] = {}
    for (argument, axis), name in places.items():
        if name not in symbols:
            symbols[name] = scope.symbol(name, args[argument].shape[axis], high=high)
    params = []
    for index, arg in enumerate(args):
        extents = [symbols[places[index, axis]] if (index, axis) in places else n for axis, n in enumerate(arg.shape)]
        params.append(Var(f"p{index}", TensorType(extents, str(arg.dtype).removeprefix("torch."))))
    emitter = Scope([param.name for param in params])
    outputs = build(emitter, *params)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    bound = [out if isinstance(out, Var | Constant) else emitter.emit(out, f"y{i}") for i, out in enumerate(outputs)]
    return build_function(params, emitter.body, bound)


@dataclass(frozen=True)
class Pipeline:
    """A function's joint function, cleaned, and the two halves; primals include dropout masks."""

    joint: Function
    parts: Partitioned
    primals: int
    outputs: int

    def at(self, sizes: Mapping[str, int]) -> Pipeline:
        """The same for given sizes."""
        forward, backward = (instantiate(half, sizes) for half in (self.parts.forward, self.parts.backward))
        parts = Partitioned(self.parts.plan, forward, backward)
        return Pipeline(instantiate(self.joint, sizes), parts, self.primals, self.outputs)

    def run(self, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Results and gradients of the joint function; asserts that the halves' are equal."""
        draws = torch.Generator().manual_seed(5)
        masks = [torch.rand(shape(mask), generator=draws) > 0.3 for mask in self.joint.params[len(args) : self.primals]]
        primals = [*args, *masks]
        kinds = [(shape(param), getattr(torch, dtype(param))) for param in self.joint.params[self.primals :]]
        grad_outs = [torch.randn(extents, generator=draws, dtype=torch.float64).to(kind) for extents, kind in kinds]
        wanted = interpret(self.joint, [*primals, *grad_outs]).results
        plan = self.parts.plan
        found = interpret(self.parts.forward, primals).results
        saved = [primals[i] for i in plan.saved_primals] + [found[i] for i in plan.saved_outputs]
        gradients = interpret(self.parts.backward, [*saved, *found[self.outputs :], *grad_outs]).results
        for one, other in zip([*found[: self.outputs], *gradients], wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10, equal_nan=True)
        return wanted

    def bindings(self) -> tuple[int, int, int]:
        """How many the joint function, the forward and the backward have."""
        return tuple([len(list(bindings(each))) for each in (self.joint, self.parts.forward, self.parts.backward)])


def pipeline(func: Function) -> Pipeline:
    """A function all of whose float results are differentiated with respect to all of its float parameters."""
    outputs = [index for index, output in enumerate(results(func)) if is_float(output)]
    required = [index for index, param in enumerate(func.params) if is_float(param)]
    primal = clean(spell_out(mask_dropout(func)), merge_casts=False)
    joint = clean(differentiate(primal, outputs, required))
    count = len(results(func))
    parts = partition(joint, num_primals=len(primal.params), num_outputs=count)
    parts = Partitioned(parts.plan, parts.forward, join_products(parts.backward))
    return Pipeline(joint, parts, len(primal.params), count)


def resized(args: Sequence[torch.Tensor], places: Places, sizes: Mapping[str, int]) -> list[torch.Tensor]:
    """The arguments with elements repeated, a little changed, or dropped; indices stay below the smallest size."""
    least = min(sizes.values())
    made = []
    for index, arg in enumerate(args):
        for (argument, axis), name in places.items():
            if argument == index:
                arg = arg.index_select(axis, torch.arange(sizes[name]) % arg.shape[axis])
        if arg.is_floating_point():
            arg = arg + 1e-3 * torch.arange(arg.numel(), dtype=arg.dtype).reshape(arg.shape)
        elif arg.dtype != torch.bool and least < 5:
            arg = arg % least
        made.append(arg.contiguous())
    return made


def compare(
    build: Callable,
    args: Sequence[torch.Tensor],
    places: Places,
    sizes: Sequence[Mapping[str, int]] = (),
    high: int | None = None,
    apart: int = 0,
) -> ExtentScope:
    """Makes the pipeline of symbolic extents once, and holds it against the static one of each size: values and
    gradients in float64, and the numbers of bindings, which may be ``apart`` (of the halves, which are cut where it is
    best for the sample, at the sample's size).

    ``sizes``: by default 2, 7 and the sample's; sizes that a guard excludes are left out. Returns the scope.
    """
    scope = ExtentScope()
    made = pipeline(function_of(build, args, places, scope, high))
    sample = {name: args[argument].shape[axis] for (argument, axis), name in places.items()}
    sizes = sizes or [dict.fromkeys(sample, 2), dict.fromkeys(sample, 7), sample]
    broken = scope.broken()
    for each in [size for size in sizes if broken(size) is None]:
        given = resized(args, places, each)
        static = pipeline(function_of(build, given))
        wanted, symbolic = static.run(given), made.at(each)
        for one, other in zip(symbolic.run(given), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10, equal_nan=True)
        ours, theirs = (found.bindings()[: None if each == sample else 1] for found in (symbolic, static))
        assert all(abs(a - b) <= apart for a, b in zip(ours, theirs, strict=True)), f"{each}: {ours}, static {theirs}"
    return scope
