"""Symbolic sizes of torch: ``SymInt``, its expression, and the environment with the conclusions about sizes.

Like :mod:`bridge.base.torch_internals`, and for the same lint test: no other file names what is private here. The
expressions are sympy's, of torch's own classes among others; who reads them goes by the classes' names.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from traceback import FrameSummary
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from bridge.base.modes import replaced
from bridge.base.quirks import applies, quirk
from bridge.base.torch_internals import PROBES, MissingInternalError, find

__all__ = ["SYMBOLIC", "Conclusion", "check_places", "conclusions", "environment", "expression"]
__all__ += ["fake_results_not_kept", "fixed", "hint", "is_decided", "pooled_by_division", "range_of"]
__all__ += ["size_environment", "symbolic_fake", "upsampled_sizes"]

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

_USED = ("guards", "var_to_range", "replace", "backed_var_to_val")

Conclusion = tuple[Any, FrameSummary | None]

upsampled_sizes = find("torch._decomp.decompositions.upsample_compute_output_size")
"""Sizes of what is interpolated, those that are asked for or ``None``, factors → those of the result."""


def expression(value: Any, *, original: bool = False) -> Any:
    """The sympy expression of a symbolic number, with what is known to be equal replaced; or as it was made."""
    return value.node._expr if original else value.node.expr


def hint(value: Any) -> Any:
    """A number for the sample's sizes: of a symbolic one, without a guard; ``None`` if sizes do not decide it."""
    return value.node.hint if isinstance(value, SYMBOLIC) else value


def fixed(value: Any) -> Any:
    """A number as it is; of a symbolic one the expression, which hashes and compares without a guard."""
    return value.node.expr if isinstance(value, SYMBOLIC) else value


def size_environment() -> ShapeEnv:
    """A new environment, in which each size that varies has a symbol of its own."""
    return ShapeEnv(duck_shape=False)


def symbolic_fake(mode: Any, tensor: torch.Tensor, dynamic: Collection[int], name: str) -> torch.Tensor:
    """A fake tensor like this one with a symbol for the size of each given dimension, in a mode with an environment."""
    kinds = [DimDynamic.DYNAMIC if dim in dynamic else DimDynamic.STATIC for dim in range(tensor.dim())]
    context = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(tensor, static_shapes=False, symbolic_context=context, source=_source(name))


@contextmanager
def fake_results_not_kept() -> Iterator[None]:
    """While active, fake modes that are made run an operator anew each time instead of keeping its result by its form.

    Of forms that have symbols, keeping and looking up takes longer than running: capturing an attention for all sizes
    takes six tenths of the time without.
    """
    config = importlib.import_module("torch._dynamo.config")
    with config.patch(fake_tensor_cache_enabled=False):
        yield


@quirk(
    "poolings",
    reason="their sizes ask for a remainder, which changes nothing, and is fixed where sizes vary",
    test="tests/bridge/capture/test_symbolic_run.py",
    until="2.13",
)
@contextmanager
def pooled_by_division() -> Iterator[None]:
    """While active, the size of what a pooling makes is a quotient that is rounded down: the same number, unasked."""
    if not applies(until="2.13"):
        yield
        return
    with replaced(importlib.import_module("torch._meta_registrations"), div_rtn=operator.floordiv):
        yield


def environment(value: Any) -> Any:
    """The ``ShapeEnv`` that a symbolic number belongs to."""
    found = value.node.shape_env
    for name in _USED:
        PROBES[f"ShapeEnv.{name}"] = hasattr(found, name)
        if not PROBES[f"ShapeEnv.{name}"]:
            raise MissingInternalError(f"ShapeEnv.{name}")
    return found


def is_decided(env: Any, expr: Any) -> bool:
    """Whether the sizes of the arguments decide an expression: no number of it is one that a tensor gives."""
    return expr.free_symbols <= env.backed_var_to_val.keys()


def range_of(env: Any, symbol: Any) -> tuple[int | None, int | None]:
    """The least and the greatest value of a symbol, ``None`` where there is no bound."""
    bounds = env.var_to_range[symbol]
    low, high = (int(each) if each.is_Integer else None for each in (bounds.lower, bounds.upper))
    return low, high


def conclusions(env: Any) -> Iterator[Conclusion]:
    """What was answered for the sample's sizes: the condition that held, and the frame that asked, if known.

    What could be proven for the range is none of them. Conditions on numbers that tensors give are assertions in the
    graph.
    """
    for guard in env.guards:
        yield guard.expr, guard.sloc.maybe_user_loc or guard.sloc.framework_loc


def check_places(x: torch.Tensor, size: Any, stride: Any, offset: Any = None) -> None:
    """Asks, as eager's kernels do and those on fake tensors do not, whether strided places lie in ``x``'s memory."""
    end = x.storage_offset() if offset is None else offset
    for count, step in zip(size, stride, strict=True):
        if count == 0:
            return
        end += (count - 1) * step
    if (end + 1) * x.itemsize > x.untyped_storage().nbytes():
        raise RuntimeError("strided places out of the memory of their tensor")


def _source(name: str) -> Any:
    """Where a symbol is from, in Dynamo's form; Dynamo is imported at first use."""
    return find("torch._dynamo.source.ConstantSource")(name)
