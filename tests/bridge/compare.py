"""Comparison of a dispatched module with the module that PyTorch runs: values, gradients, buffers, random state.

Everything is compared inside one process and one seed, on the device of :mod:`tests.device`. In float64 the numbers
must agree to ``rtol=1e-10``. In float32 the dispatched numbers may be no further from the float64 result than twice the
distance of eager's own, plus a floor of a few units of rounding; float64 and float32 share their dropout masks, because
the CPU generator's Bernoulli bits do not depend on the element type.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bridge import add_tvm_dispatch, stats
from tests.device import DEVICE, generators, moved

FLOOR_ULPS = 8
"""Rounding units (of the tensor's largest element) that float32 may be off where eager happens to be exact."""

SMALL_GRADIENT = 0.01
"""A gradient below this share of the largest one is judged at that share: the bias of an attention key has gradient
zero up to rounding, and the ratio of two roundings says nothing."""

NONE_OF_NOTHING = torch.__version__ < torch.torch_version.TorchVersion("2.12")
"""Whether an empty tensor may have no gradient in eager: ``linalg.det`` gives it none."""


class Function(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


@dataclass(frozen=True)
class Call:
    """The arguments of one module call."""

    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, module: nn.Module) -> Any:
        return module(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Run:
    """Results and state of one forward and backward: tensors are detached copies."""

    outputs: tuple
    spec: pytree.TreeSpec
    differentiable: tuple[bool, ...]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    generator: Tensor


def as_call(sample: Any) -> Call:
    """A sample input of ``add_tvm_dispatch`` (tensor, tuple or dict) as a :class:`Call`."""
    if isinstance(sample, Call):
        return sample
    if isinstance(sample, tuple):
        return Call(args=sample)
    if isinstance(sample, dict):
        return Call(kwargs=sample)
    return Call(args=(sample,))


def clone_tree(tree: Any, dtype: torch.dtype | None = None) -> Any:
    """New leaves of the same values and ``requires_grad``; floating point ones in ``dtype`` if it is given.

    A tensor that occurs twice occurs twice in the copy; strides of dense tensors are kept.
    """
    seen: dict[int, Tensor] = {}

    def clone(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in seen:
            to = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
            seen[id(leaf)] = leaf.detach().to(to, copy=True).requires_grad_(leaf.requires_grad)
        return seen[id(leaf)]

    return pytree.tree_map(clone, tree)


def run(module: nn.Module, call: Call, *, seed: int = 0, process: Callable[[Any], Any] | None = None) -> Run:
    """One forward under ``seed`` and one backward with random cotangents for every differentiable output.

    Args:
        module: run as it is; its parameters' gradients are reset first.
        call: arguments; their gradients are reported as ``input 0``, ``input 1``, ….
        process: applied to the result before it is differentiated (a sign convention, for example).

    Cotangents come from a generator of their own, so that the default generator shows the module's draws.
    """
    leaves = [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    for tensor in (*module.parameters(), *leaves):
        tensor.grad = None
    torch.manual_seed(seed)
    np.random.seed(seed)
    result = call(module)
    generator = generators()
    if process is not None:
        result = process(result)
    outputs, spec = pytree.tree_flatten(result)
    differentiable = [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, cotangents(differentiable, seed))
    gradients = {f"parameter {name}": parameter.grad for name, parameter in module.named_parameters()}
    gradients |= {f"input {i}": leaf.grad for i, leaf in enumerate(leaves) if leaf.is_leaf and leaf.requires_grad}
    return Run(
        outputs=tuple(_copy(output) for output in outputs),
        spec=spec,
        differentiable=tuple(isinstance(output, Tensor) and output.requires_grad for output in outputs),
        gradients={name: _copy(gradient) for name, gradient in gradients.items()},
        buffers={name: _copy(buffer) for name, buffer in module.named_buffers()},
        generator=generator,
    )


def cotangents(outputs: list[Tensor], seed: int) -> list[Tensor]:
    """A random gradient for each output, the same numbers (up to rounding) for every element type."""
    generator = torch.Generator().manual_seed(seed + 1)
    drawn = (torch.randn(output.shape, generator=generator, dtype=torch.float64) for output in outputs)
    return [value.to(output.device, output.dtype) for value, output in zip(drawn, outputs, strict=True)]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def assert_same(actual: Run, expected: Run, *, rtol: float = 1e-10, atol: float = 1e-12) -> None:
    """Two runs agree: structure, types, values, which gradients are ``None``, buffers, and the generator bit by bit.

    ``atol`` is relative to the largest gradient (at least 1): a gradient that cancels is as inexact as its terms.
    """
    _assert_same_form(actual, expected)
    scale = _largest_gradient(expected)
    for name, got, want in _pairs(actual, expected):
        close = {"rtol": rtol, "atol": atol * scale} if want.is_floating_point() or want.is_complex() else {}
        got, want = _dense(got), _dense(want)
        torch.testing.assert_close(got, want, **(close or {"rtol": 0, "atol": 0}), equal_nan=True, msg=_prefix(name))


def assert_as_close_as_eager(actual: Run, eager: Run, exact: Run) -> None:
    """``actual`` is no further from ``exact`` (float64) than twice eager's distance plus a floor at rounding level."""
    _assert_same_form(actual, eager)
    gradients = {id(gradient) for gradient in eager.gradients.values()}
    scale = SMALL_GRADIENT * _largest_gradient(exact, at_least=0.0)
    for (name, got, own), (_, _, true) in zip(_pairs(actual, eager), _pairs(eager, exact), strict=True):
        if not own.is_floating_point():
            torch.testing.assert_close(got, own, rtol=0, atol=0, msg=_prefix(name))
            continue
        largest = max(_magnitude(true), scale if id(own) in gradients else 0.0)
        allowed = 2 * _distance(own, true) + FLOOR_ULPS * torch.finfo(own.dtype).eps * largest
        distance = _distance(got, true)
        assert distance <= allowed, f"{name}: {distance:.3e} from float64, allowed {allowed:.3e}"


def _assert_same_form(actual: Run, expected: Run) -> None:
    assert actual.spec == expected.spec, f"structure {actual.spec}, eager's is {expected.spec}"
    assert actual.differentiable == expected.differentiable, (
        f"outputs that require grad: {actual.differentiable}, eager's are {expected.differentiable}"
    )
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, want in expected.gradients.items():
        got = actual.gradients[name]
        if want is None and got is not None and not got.numel() and NONE_OF_NOTHING:
            actual.gradients[name] = got = None
        assert (got is None) == (want is None), f"gradient of {name}: {_describe(got)}, eager's is {_describe(want)}"
    assert actual.buffers.keys() == expected.buffers.keys()
    assert len(actual.outputs) == len(expected.outputs)
    for i, (got, want) in enumerate(zip(actual.outputs, expected.outputs, strict=True)):
        assert type(got) is type(want), f"output {i} is a {type(got)}, eager's is a {type(want)}"
        if not isinstance(want, Tensor):
            assert got == want or (got != got and want != want), f"output {i} is {got}, eager's is {want}"
    for name, got, want in _pairs(actual, expected):
        assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, eager's is {tuple(want.shape)}"
        assert got.dtype == want.dtype, f"{name}: {got.dtype}, eager's is {want.dtype}"
        assert got.layout == want.layout, f"{name}: {got.layout}, eager's is {want.layout}"
    assert torch.equal(actual.generator, expected.generator), "the generator's state is not eager's"


def _pairs(actual: Run, expected: Run) -> list[tuple[str, Tensor, Tensor]]:
    """Corresponding tensors of two runs by name."""
    outputs = zip(actual.outputs, expected.outputs, strict=True)
    pairs = [(f"output {i}", got, want) for i, (got, want) in enumerate(outputs) if isinstance(want, Tensor)]
    for name, want in expected.gradients.items():
        if want is not None:
            pairs.append((f"gradient of {name}", actual.gradients[name], want))
    pairs += [(f"buffer {name}", actual.buffers[name], want) for name, want in expected.buffers.items()]
    return pairs


def _dense(tensor: Tensor) -> Tensor:
    """A strided tensor of the same elements."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _largest_gradient(result: Run, at_least: float = 1.0) -> float:
    return max([at_least, *(_magnitude(g) for g in result.gradients.values() if g is not None)])


def _magnitude(tensor: Tensor) -> float:
    """The largest finite absolute value, zero for an empty tensor."""
    tensor = _dense(tensor)
    finite = tensor[tensor.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _distance(tensor: Tensor, exact: Tensor) -> float:
    """The root mean square of the difference, in float64; infinite where one is finite and the other is not."""
    both = tensor.isfinite() & exact.isfinite()
    same = both | (tensor.double() == exact.double()) | (tensor.isnan() & exact.isnan())
    if not bool(same.all()):
        return float("inf")
    difference = (tensor.double() - exact.double())[both]
    return float(difference.square().mean().sqrt()) if difference.numel() else 0.0


def _describe(gradient: Tensor | None) -> str:
    return "None" if gradient is None else f"a tensor of shape {tuple(gradient.shape)}"


def _prefix(name: str) -> Callable[[str], str]:
    return lambda message: f"{name}: {message}"


def check_module(
    make_module: Callable[[], nn.Module],
    make_inputs: Callable[[], Any],
    *,
    dtype: torch.dtype = torch.float64,
    rtol: float = 1e-10,
    atol: float = 1e-12,
    calls: int = 2,
    seed: int = 0,
    process: Callable[[Any], Any] | None = None,
    kernels: Callable[[], AbstractContextManager] = nullcontext,
    **options: Any,
) -> nn.Module:
    """Dispatch a copy of a module and compare ``calls`` steps with eager under one seed each; returns the copy.

    Args:
        make_module: builds the module, under a fixed seed; it is then cast to ``dtype``. Of a lazy one no sample is
            taken, and one call more may be eager's: it gives it its shapes.
        make_inputs: draws the sample input (tensor, tuple, dict or :class:`Call`); leaves cast to ``dtype``.
        kernels: makes the mode that eager runs in.
        dtype: float64 compares to ``rtol``; lower precisions by :func:`assert_as_close_as_eager`.
        options: passed to ``add_tvm_dispatch``.

    Raises:
        AssertionError: a difference, a generator moved by ``add_tvm_dispatch``, or a call that was not dispatched.
    """
    torch.manual_seed(seed)
    double = make_module().double().to(DEVICE)
    inputs = as_call(make_inputs())
    inputs = Call(*moved((inputs.args, inputs.kwargs)))
    eager = copy.deepcopy(double).to(dtype)
    dispatched = copy.deepcopy(eager)

    def arguments(to: torch.dtype) -> Call:
        args, kwargs = clone_tree((inputs.args, inputs.kwargs), to)
        return Call(args, kwargs)

    sample = arguments(dtype)
    before = generators()
    lazy = any(map(nn.parameter.is_lazy, (*double.parameters(), *double.buffers())))
    if not lazy:
        options |= {"sample_input": sample.args, "sample_kwargs": sample.kwargs or None}
    add_tvm_dispatch(dispatched, **options)
    assert torch.equal(generators(), before), "add_tvm_dispatch moved the default generator"

    for step in range(calls + lazy):
        actual = run(dispatched, arguments(dtype), seed=seed + step, process=process)
        with kernels():
            expected = run(eager, arguments(dtype), seed=seed + step, process=process)
        if dtype == torch.float64:
            assert_same(actual, expected, rtol=rtol, atol=atol)
        else:
            exact = run(double, arguments(torch.float64), seed=seed + step, process=process)
            assert_as_close_as_eager(actual, expected, exact)
    counted = stats(dispatched)
    assert counted.hits >= calls, f"{counted.hits} of {calls} calls were dispatched; misses: {dict(counted.misses)}"
    return dispatched
