"""Library functions: names → functions of decoded arguments that torch's kernels compute.

The calling conventions are described in :mod:`autodiff.library`. A function takes tensors, Python numbers and strings,
lists of integers (shapes) and lists of tensors (tuples); arguments other than tensors are attributes of the call. It
returns the result, or a tuple of results; :func:`invoke` puts them in memory of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bridge.base.torch_internals import AbsentOperator, storage_id

Function = Callable[..., Any]

ALIGNMENT = 16
"""Bytes of the widest access of a GPU kernel."""

FUNCTIONS: dict[str, Function] = {}
"""``library.<name>`` by name: ``function(*arguments)`` returns tensors."""

OUT_KERNELS: dict[str, Function] = {}
"""Kernels that write into given tensors, by name: ``kernel(outs, args, *attributes)``; disjoint from the functions."""

OUT_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {}
"""The kernels that are a function of torch: ``function(*args, out=out)``."""

INTO_GIVEN: dict[str, Function] = {}
"""For some of these functions, a variant that writes the same results into given tensors, where it can:
``function(outs, *arguments)`` returns whether it has."""

NEVER_RAISE = frozenset(
    "mm mm_lt mm_biased bmm mm_swapped linear pad cat cumsum cumprod convolution "
    "convolution_last max_pool max_pool_last avg_pool avg_pool_last adaptive_avg_pool adaptive_avg_pool_last "
    "attention flip adaptive_max_pool "
    "upsample upsample_last "
    "scaled_dot_product_flash_attention recurrent_layer recurrent_layers sort sorted_keys topk "
    "erfc atan2 ran".split()
)
"""Calls of functions and kernels that raise for no numbers in their arguments."""

DRAWS_AT_OFFSET = frozenset({"draw_at_offset", "dropping_attention"})
"""Calls that draw random numbers of a GPU, from a generator state that they take on the host."""

REDRAWS = frozenset({"dropping_attention_backward"})
"""Calls whose kernel repeats another call's draws, from a generator state on the host or, under stream capture, on the
GPU."""

DRAWS = DRAWS_AT_OFFSET | REDRAWS | {"draw"}
"""Calls that draw random numbers."""


def library_function(name: str, *operators: object) -> Callable[[Function], Function]:
    """Registers the function of ``library.<name>``, unless this version of torch lacks one of the ``operators``."""
    return _added(FUNCTIONS, _unused(name), operators)


def into_given(name: str, *operators: object) -> Callable[[Function], Function]:
    """Registers a variant of ``library.<name>`` that writes into given tensors, if torch has the ``operators``."""
    return _added(INTO_GIVEN, name, operators)


def out_kernel(name: str) -> Callable[[Function], Function]:
    """Registers a kernel that writes into given tensors; its attributes are plain data."""
    return _added(OUT_KERNELS, _unused(name))


def _added(table: dict[str, Function], name: str, operators: Sequence[object] = ()) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        if not any(isinstance(operator, AbsentOperator) for operator in operators):
            table[name] = function
        return function

    return register


def out_function(name: str, function: Callable[..., torch.Tensor]) -> None:
    """Registers a function of torch that writes into ``out=``, as a kernel without attributes."""
    out_kernel(name)(lambda outs, args: function(*args, out=outs[0]))
    OUT_FUNCTIONS[name] = function


def _unused(name: str) -> str:
    if name in FUNCTIONS or name in OUT_KERNELS:
        raise ValueError(f"there is a library kernel named {name!r} already")
    return name


@dataclass(frozen=True)
class TensorAt:
    """An argument that is one of the call's tensors."""

    position: int

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The argument."""
        return tensors[self.position]

    def __str__(self) -> str:
        return f"#{self.position}"


@dataclass(frozen=True)
class TensorsAt:
    """An argument that is a list of the call's tensors."""

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
        arguments: in order; :class:`TensorAt` and :class:`TensorsAt` stand for tensors, other values for themselves.

    Returns:
        its results, dense, each in memory of its own: none shares memory with an input or another result.
    """
    made = function(*_decoded(arguments, tensors))
    found: list[torch.Tensor] = []
    for value in made if isinstance(made, tuple) else (made,):
        own = _own(value, tensors)
        found.append(own.clone() if any(storage_id(own) == storage_id(other) for other in found) else own)
    return found


def invoke_into(
    function: Function, outs: Sequence[torch.Tensor], arguments: Sequence[Any], tensors: Sequence[torch.Tensor]
) -> bool:
    """Runs an ``INTO_GIVEN`` variant, as :func:`invoke`, into dense memory; returns whether it wrote the results."""
    return function(outs, *_decoded(arguments, tensors))


def _decoded(arguments: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [arg.of(tensors) if isinstance(arg, TensorAt | TensorsAt) else arg for arg in arguments]


def _own(value: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The value in dense memory shared with no input (a derivative may be a view of the gradient), aligned to 16 bytes
    on a GPU, whose kernels read vectors."""
    storage = storage_id(value)
    if any(storage_id(given) == storage for given in inputs):
        return value.clone(memory_format=torch.contiguous_format)
    return dense(value)


def dense(value: torch.Tensor) -> torch.Tensor:
    """A tensor in dense memory and, on a GPU, aligned: itself, or a copy."""
    value = value.contiguous()
    return value.clone() if value.is_cuda and value.data_ptr() % ALIGNMENT else value
