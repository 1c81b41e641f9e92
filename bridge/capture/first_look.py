"""First look: forward on fake tensors, before anything is traced → in which branches it is to be traced.

Libraries ask whether they are traced, and make attention a mask of ones then where eager gives it none. What is to be
captured is what eager does (:func:`bridge.capture.pipeline.capture`), and a trace is dear. So forward runs as far as
its first attention; if it has asked before, it runs once more in eager's branches, which tells whether attention is
given something else there. A run that comes to its end is an observation, which the trace needs anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from bridge.base.errors import Unsupported
from bridge.base.torch_internals import pytree
from bridge.base.torch_shapes import hint
from bridge.capture.call_log import ATTENTION
from bridge.capture.counters import may_be_counters
from bridge.capture.fake_run import FakeRun, fake_run
from bridge.capture.own_functions import OwnFunctions
from bridge.capture.passes.regions import GradModesInRegions
from bridge.capture.symbolic_sizes import SymbolicSizes
from bridge.capture.thread_isolation import capturing
from bridge.capture.tracing import eagers_branches, times_forward_asked
from bridge.state import ModuleTensor, PythonState, constant_key, module_tensors

__all__ = ["Attention", "FirstLook", "Observed", "first_look", "observed"]

_RATE = 4
"""The place of attention's rate of dropout among its arguments."""


class Attention(NamedTuple):
    """What forward gives its first attention.

    Attributes:
        arguments: the plain constants, among them ``None`` for no mask.
        drops: whether it drops inside of a kernel, which eager may choose by numbers.
    """

    arguments: tuple
    drops: bool


class Observed(NamedTuple):
    """A call on fake tensors.

    Attributes:
        tensors, real_tensors: what the module owns, see :func:`bridge.state.tensors.module_tensors`.
        run: what it did.
        problems: what no trace of it holds.
    """

    tensors: Sequence[ModuleTensor]
    real_tensors: Sequence[torch.Tensor]
    run: FakeRun
    problems: Sequence[Unsupported]

    def is_of(self, tensors: Sequence[ModuleTensor], real_tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the module owned these and no others."""
        if self.tensors != tensors:
            return False
        return all(ours is theirs for ours, theirs in zip(self.real_tensors, real_tensors, strict=True))


class FirstLook(NamedTuple):
    """How forward went.

    Attributes:
        observed: the whole call, if forward came to its end and left the module as it was.
        left: the state that it left, if it has set Python attributes that no later call counts up.
        attention: the first one, if forward was ended there.
        failed: what it raised on fake tensors, where numbers decide, say.
    """

    observed: Observed | None = None
    left: PythonState | None = None
    attention: Attention | None = None
    failed: Exception | None = None


class _EndedError(Exception):
    """Forward has come to an attention, at which it ends."""

    def __init__(self, attention: Attention):
        super().__init__("ended at its first attention")
        self.attention = attention


class _Watch(TorchFunctionMode):
    """While active, raises :class:`_EndedError` at the first attention, where ``ends(arguments)``."""

    def __init__(self, ends: Callable[[tuple], bool]):
        super().__init__()
        self.ends: Callable[[tuple], bool] | None = ends

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.ends is not None and getattr(func, "__name__", "") == ATTENTION:
            ends, self.ends = self.ends, None
            arguments = _plain(args, kwargs)
            if ends(arguments):
                raise _EndedError(Attention(arguments, _drops_inside(*args, **kwargs)))
        return func(*args, **kwargs)


def _plain(args: tuple, kwargs: dict[str, Any]) -> tuple:
    leaves = pytree.tree_leaves((args, kwargs))
    return tuple(constant_key(hint(leaf)) for leaf in leaves if not isinstance(leaf, torch.Tensor))


def _drops_inside(query: torch.Tensor, *args: Any, dropout_p: float = 0.0, **_: Any) -> bool:
    """Whether attention drops inside of one of a GPU's kernels, as far as that is known before it runs."""
    rate = args[_RATE - 1] if len(args) >= _RATE else dropout_p
    kernels = torch.backends.cuda
    is_fused = kernels.flash_sdp_enabled() or kernels.mem_efficient_sdp_enabled() or kernels.cudnn_sdp_enabled()
    return query.device.type == "cuda" and rate > 0 and query.dtype is not torch.float64 and is_fused


def first_look(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], first: PythonState, traced: Attention | None = None
) -> FirstLook:
    """Runs ``module(*args, **kwargs)`` on fake tensors; ``first``, the module's state, is put back.

    It ends at the first attention if that could be another in eager's branches: forward has asked before whether it is
    traced. ``traced``: the run is in eager's branches, and ends at the first attention if that is given the same as
    this one, of the other branches.
    """
    asked = times_forward_asked()

    def ends(arguments: tuple) -> bool:
        return times_forward_asked() != asked if traced is None else arguments == traced.arguments

    in_branches = nullcontext() if traced is None else eagers_branches()
    try:
        with in_branches, capturing(module):
            seen = observed(module, *module_tensors(module), args, kwargs, modes=[_Watch(ends)])
        first.restore_caches()
        changed = first.changes()
        if not changed:
            return FirstLook(seen)
        return FirstLook(left=None if may_be_counters(module, changed) else PythonState(module))
    except _EndedError as ended:
        return FirstLook(attention=ended.attention)
    except Exception as error:  # noqa: BLE001 - of the user's code, on fake tensors; a trace meets it again
        return FirstLook(failed=error.with_traceback(None))
    finally:
        first.restore()


def observed(
    module: nn.Module,
    tensors: Sequence[ModuleTensor],
    real_tensors: Sequence[torch.Tensor],
    args: tuple,
    kwargs: dict[str, Any],
    sizes: SymbolicSizes | None = None,
    functions: OwnFunctions | None = None,
    modes: Sequence[AbstractContextManager] = (),
) -> Observed:
    """:func:`bridge.capture.fake_run.fake_run` of a call that is traced; ``modes``: what it runs under besides."""
    grad_modes = GradModesInRegions()
    run = fake_run(module, tensors, real_tensors, args, kwargs, sizes, functions, modes=[*modes, grad_modes])
    return Observed(tensors, real_tensors, run, grad_modes.problems)
