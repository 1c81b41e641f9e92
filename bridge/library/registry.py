"""Library functions: names → functions of decoded arguments that torch's kernels compute.

The calling conventions are those of :mod:`autodiff.library`. A function takes tensors, Python numbers and strings,
lists of integers (shapes) and lists of tensors (tuples); what is no tensor is an attribute of the call. It returns the
result, or a tuple of results; :func:`invoke` puts them in memory of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bridge.base.torch_internals import AbsentOperator, storage_id
from bridge.capture import share_elements

__all__ = ["DRAWS", "DRAWS_AT_OFFSET", "FUNCTIONS", "INTO_GIVEN", "NEVER_RAISE", "OUT_KERNELS", "REDRAWS", "TensorAt"]
__all__ += ["TensorsAt", "dense", "into_given", "invoke", "invoke_into", "library_function", "out_kernel"]

Function = Callable[..., Any]

ALIGNMENT = 16
"""Bytes, of the widest access of a kernel on a GPU."""

FUNCTIONS: dict[str, Function] = {}
"""``library.<name>`` by name: ``function(*arguments)`` returns tensors."""

OUT_KERNELS: dict[str, Function] = {}
"""Kernels that write into given tensors, by name: ``kernel(outs, args, *attributes)``. None is named as a function."""

INTO_GIVEN: dict[str, Function] = {}
"""Of some of these functions, one that writes the very results into tensors that it is given, where it can:
``function(outs, *arguments)`` returns whether it has."""

NEVER_RAISE = frozenset(
    "mm mm_lt mm_wide mm_biased bmm bmm_wide mm_swapped linear packed pad cat stack cumsum cumprod convolution "
    "convolution_last convolution_in_channels_last convolution_by_product max_pool "
    "max_pool_last avg_pool avg_pool_last adaptive_avg_pool adaptive_avg_pool_last attention flip adaptive_max_pool "
    "upsample upsample_last "
    "scaled_dot_product_flash_attention recurrent_layer recurrent_layers sort sorted_keys topk "
    "erfc atan2 ran".split()
)
"""Calls, of functions and of kernels that write into given tensors, that take any numbers."""

DRAWS_AT_OFFSET = frozenset({"draw_at_offset", "dropping_attention"})
"""Calls that draw random numbers of a GPU, from the state of its generator that they are given on the host."""

REDRAWS = frozenset({"dropping_attention_backward"})
"""Calls whose kernel draws again what another's has drawn, from a state on the host or, where a stream is captured, on
the GPU."""

DRAWS = DRAWS_AT_OFFSET | REDRAWS | {"draw"}
"""Calls that draw random numbers."""


def library_function(name: str, *operators: object) -> Callable[[Function], Function]:
    """Registers the function of ``library.<name>``, unless this version of torch lacks one of the ``operators``."""

    def register(function: Function) -> Function:
        if not any(isinstance(operator, AbsentOperator) for operator in operators):
            FUNCTIONS[_unused(name)] = function
        return function

    return register


def into_given(name: str, *operators: object) -> Callable[[Function], Function]:
    """Registers what writes the results of ``library.<name>`` into given tensors, unless this version of torch lacks
    one of the ``operators``."""

    def register(function: Function) -> Function:
        if not any(isinstance(operator, AbsentOperator) for operator in operators):
            INTO_GIVEN[name] = function
        return function

    return register


def out_kernel(name: str) -> Callable[[Function], Function]:
    """Registers a kernel that writes into given tensors; its attributes are plain data."""

    def register(function: Function) -> Function:
        OUT_KERNELS[_unused(name)] = function
        return function

    return register


def _unused(name: str) -> str:
    if name in FUNCTIONS or name in OUT_KERNELS:
        raise ValueError(f"there is a library kernel named {name!r} already")
    return name


@dataclass(frozen=True)
class TensorAt:
    """An argument: one of the call's tensors."""

    position: int

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The argument."""
        return tensors[self.position]

    def __str__(self) -> str:
        return f"#{self.position}"


@dataclass(frozen=True)
class TensorsAt:
    """An argument: a list of the call's tensors."""

    first: int
    count: int

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The argument."""
        return list(tensors[self.first : self.first + self.count])

    def __str__(self) -> str:
        return f"[{', '.join(f'#{self.first + index}' for index in range(self.count))}]"


def invoke(function: Function, arguments: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Runs a library function on tensors.

    Args:
        arguments: in order; :class:`TensorAt` and :class:`TensorsAt` stand for tensors, anything else for itself.

    Returns:
        its results, dense, each in memory of its own: none is part of an input, or of another result.
    """
    made = function(*_decoded(arguments, tensors))
    found: list[torch.Tensor] = []
    for value in made if isinstance(made, tuple) else (made,):
        own = _own(value, tensors)
        found.append(own.clone() if any(_overlap(own, other) for other in found) else own)
    return found


def invoke_into(
    function: Function, outs: Sequence[torch.Tensor], arguments: Sequence[Any], tensors: Sequence[torch.Tensor]
) -> bool:
    """As :func:`invoke`, one of ``INTO_GIVEN`` with dense memory for its results; whether they are there."""
    return function(outs, *_decoded(arguments, tensors))


def _decoded(arguments: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [arg.of(tensors) if isinstance(arg, TensorAt | TensorsAt) else arg for arg in arguments]


def _own(value: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Dense memory that is no input's, as a derivative may be that is a view of the gradient; on a GPU, where kernels
    read vectors, it begins at a multiple of 16 bytes."""
    storage = storage_id(value)
    if any(storage_id(given) == storage for given in inputs):
        return value.clone(memory_format=torch.contiguous_format)
    return dense(value)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    return storage_id(a) == storage_id(b) and share_elements(a, b)


def dense(value: torch.Tensor) -> torch.Tensor:
    """A tensor as kernels read it: the very memory where that is dense and, on a GPU, aligned; else a copy."""
    value = value.contiguous()
    return value.clone() if value.is_cuda and value.data_ptr() % ALIGNMENT else value
