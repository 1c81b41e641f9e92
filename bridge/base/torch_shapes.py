"""Symbolic sizes of torch: ``SymInt``, its expression, and the environment with the guards on sizes.

The expressions are sympy's, some of torch's own classes; consumers dispatch on the class names.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from traceback import FrameSummary
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from bridge.base.torch_internals import PROBES, MissingInternalError, find

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

_USED = ("guards", "var_to_range", "replace", "backed_var_to_val")

Conclusion = tuple[Any, FrameSummary | None]

upsampled_sizes = find("torch._decomp.decompositions.upsample_compute_output_size")
"""(sizes of an interpolation's input, requested sizes or ``None``, factors) → sizes of the result."""


def expression(value: Any, *, original: bool = False) -> Any:
    """The sympy expression of a symbolic number, simplified by known equalities; ``original``: as it was made."""
    return value.node._expr if original else value.node.expr


def hint(value: Any) -> Any:
    """A symbolic number's value for the sample's sizes, without a guard; ``None`` if sizes do not decide it."""
    return value.node.hint if isinstance(value, SYMBOLIC) else value


def fixed(value: Any) -> Any:
    """A symbolic number's expression, which hashes and compares without a guard; a number as it is."""
    return value.node.expr if isinstance(value, SYMBOLIC) else value


def size_environment() -> ShapeEnv:
    """A new environment, in which each dynamic size has a symbol of its own."""
    return ShapeEnv(duck_shape=False)


def symbolic_fake(mode: Any, tensor: torch.Tensor, dynamic: Collection[int], name: str) -> torch.Tensor:
    """A fake tensor like ``tensor``, with a symbol for the size of each ``dynamic`` dimension."""
    kinds = [DimDynamic.DYNAMIC if dim in dynamic else DimDynamic.STATIC for dim in range(tensor.dim())]
    context = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(tensor, static_shapes=False, symbolic_context=context, source=_source(name))


@contextmanager
def fake_results_not_kept() -> Iterator[None]:
    """While active, new fake modes do not cache operator results by tensor metadata.

    With symbolic sizes, the cache takes longer than the operators: without it, capturing an attention for all sizes
    takes six tenths of the time.
    """
    config = importlib.import_module("torch._dynamo.config")
    with config.patch(fake_tensor_cache_enabled=False):
        yield


def environment(value: Any) -> Any:
    """The ``ShapeEnv`` of a symbolic number."""
    found = value.node.shape_env
    for name in _USED:
        PROBES[f"ShapeEnv.{name}"] = hasattr(found, name)
        if not PROBES[f"ShapeEnv.{name}"]:
            raise MissingInternalError(f"ShapeEnv.{name}")
    return found


def is_decided(env: Any, expr: Any) -> bool:
    """Whether the arguments' sizes decide an expression: it has no symbol for a number in a tensor."""
    return expr.free_symbols <= env.backed_var_to_val.keys()


def range_of(env: Any, symbol: Any) -> tuple[int | None, int | None]:
    """The least and the greatest value of a symbol, ``None`` where there is no bound."""
    bounds = env.var_to_range[symbol]
    low, high = (int(each) if each.is_Integer else None for each in (bounds.lower, bounds.upper))
    return low, high


def conclusions(env: Any) -> Iterator[Conclusion]:
    """The guards of the sample's sizes: the condition that held, and the frame that asked, if known.

    Omits conditions that the range proves. Conditions on numbers in tensors are assertions in the graph.
    """
    for guard in env.guards:
        yield guard.expr, guard.sloc.maybe_user_loc or guard.sloc.framework_loc


def check_places(x: torch.Tensor, size: Any, stride: Any, offset: Any = None) -> None:
    """Raises if strided places exceed ``x``'s memory, as eager's kernels do but fake ones do not."""
    end = x.storage_offset() if offset is None else offset
    for count, step in zip(size, stride, strict=True):
        if count == 0:
            return
        end += (count - 1) * step
    if (end + 1) * x.itemsize > x.untyped_storage().nbytes():
        raise RuntimeError("strided places out of the memory of their tensor")


def _source(name: str) -> Any:
    """A symbol's source in Dynamo's form; imports Dynamo at first use."""
    return find("torch._dynamo.source.ConstantSource")(name)
