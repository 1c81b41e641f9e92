"""Eager run: the sample call once more on real numbers → its observation, and what fake tensors get wrong.

The shape functions behind fake tensors give some results other strides than the kernels do (a normalization of a
transposed tensor, say). Strides decide the order in which a draw fills memory, and the caller sees those of the
results; so both are taken from a run of eager itself. Where the two runs differ in anything else, the graph is not
what eager computes, and the module is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from bridge.base.complex_views import as_parts
from bridge.base.errors import Unsupported, from_user_code, refused_by_eager
from bridge.base.torch_internals import TorchDispatchMode, pytree
from bridge.capture.call_log import differences
from bridge.capture.draw_recorder import UNTOLD
from bridge.capture.isolated_rng import IsolatedRNG
from bridge.capture.number_reader import NumberReader, reading
from bridge.capture.observation import Observation, is_fused_attention
from bridge.capture.observe import observe
from bridge.capture.own_functions import OwnFunctions
from bridge.capture.own_leaves import own_leaves
from bridge.capture.readings import Reading, same_numbers
from bridge.capture.symbolic_capture import strides_of_eager
from bridge.capture.symbolic_sizes import at_sample
from bridge.capture.tracing import eagers_branches, times_asked
from bridge.state import ModuleTensor, once_per_owner

__all__ = ["as_in_eager", "as_in_eager_at_sample", "goes_another_way", "nothing_saved", "owned_state", "real_run"]

OTHER_BRANCH = Unsupported(
    "torch.compiler.is_compiling or is_exporting",
    "forward",
    "eager takes another branch than what is traced, and gets other results",
    "do not ask in forward",
)
"""What forward computes depends on whether it is traced."""
_CHOSEN = "drops inside of a kernel that eager chooses by numbers that it does not read while it is traced"

#: Elements that are compared at a time.
_PIECE = 1 << 20


def real_run(
    module: nn.Module,
    tensors: Sequence[ModuleTensor],
    real_tensors: Sequence[torch.Tensor],
    args: tuple,
    kwargs: dict[str, Any],
    readings: Sequence[Reading] = (),
    *,
    functions: OwnFunctions,
    differentiates: bool,
    written: Collection[int] = (),
) -> tuple[Observation, list[Unsupported]]:
    """What ``module(*args, **kwargs)`` does in eager. Neither tensors nor the generator are changed.

    Parameters and arguments are used as they are, but for copies of the arguments that forward writes (``written``:
    their places among the tensors): the caller has made sure that it writes into no others. Python attributes that
    forward sets are left set.

    ``readings``: what the traced forward was given. ``functions``: the user's own, as they were traced.
    ``differentiates``: whether it ran a backward itself.

    The run takes the branches that tracing takes. If forward asked whether it is traced, another run takes those of
    eager, and what follows from it is a problem if it computes or draws others: :data:`OTHER_BRANCH`. If eager reads
    numbers there, they may choose the kernel of fused attention in another call, whose dropout would be another: that
    is a problem, too (:func:`goes_another_way`). Attention of equal results, but by other arguments, is noted.

    Autograd's graphs are made, as in eager, and hold no numbers where nothing runs backward. So the run takes no more
    memory than a forward under ``no_grad``.

    Raises:
        Exception: whatever forward raises, marked by :func:`bridge.base.errors.refused_by_eager`.
    """

    def call() -> tuple[list[torch.Tensor], tuple]:
        """Tensors of the module's and of the arguments, and what a run is given of them."""
        own_args, own_kwargs = own_leaves(args, kwargs, real_tensors, written)
        owned, state = owned_state(module, tensors, real_tensors)
        parameters = [tensor for spec, tensor in zip(tensors, owned, strict=True) if spec.kind == "parameter"]
        leaves = pytree.tree_leaves((own_args, own_kwargs))
        inputs = owned + [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return inputs, (module, state, parameters, inputs, own_args, own_kwargs, nullcontext())

    asked, reader, graphs = times_asked(), NumberReader(), nullcontext if differentiates else nothing_saved
    try:
        inputs, given = call()
        with IsolatedRNG() as isolated, graphs(), reading(module, reader) if readings else nullcontext():
            run = observe(*given, functions=functions, traced=False, advance=lambda: isolated.advance)
        if not same_numbers(reader.readings, readings):
            hint = "do not let forward depend on what is left of earlier calls"
            return run, [Unsupported("a number that forward reads", "forward", "differs when it is read again", hint)]
        if times_asked() == asked:
            return run, []
        untraced, given = call()
        chosen = NumberReader()
        with eagers_branches(), IsolatedRNG() as isolated, graphs(), reading(module, chosen), _Sizes() as sizes:
            eagers = observe(*given, functions=functions, traced=False, advance=lambda: isolated.advance)
        run.reads_validation |= eagers.reads_validation
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises
        raise refused_by_eager(from_user_code(error)) from error.__cause__
    # half types do not tell other masks from rounding
    if run.draws != eagers.draws or not _all_close([*run.results, *inputs], [*eagers.results, *untraced]):
        return run, [OTHER_BRANCH]
    reads = sizes.read or not same_numbers(chosen.readings, readings)
    drops = next((draw.op for draw in run.draws if is_fused_attention(draw)), None)
    if drops is not None and reads:
        where = next((each.where for each in chosen.readings if each not in readings), "forward")
        return run, [Unsupported(drops, where, _CHOSEN, "spell attention out, or dispatch the layers that attend")]
    run.attends_otherwise = not reads and run.calls.attention != eagers.calls.attention
    return run, []


class _Sizes(TorchDispatchMode):
    """While active, notes whether numbers decide the size of a result.

    Attributes:
        read: whether one did.
    """

    read = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.read |= torch.Tag.dynamic_output_shape in func.tags
        return func(*args, **(kwargs or {}))


def goes_another_way(problems: Sequence[Unsupported]) -> bool:
    """Whether a call is refused because eager does not do what is traced: tracing what eager does may help."""
    return any(problem == OTHER_BRANCH or problem.reason == _CHOSEN for problem in problems)


def nothing_saved() -> saved_tensors_hooks:
    """While active, autograd saves no tensors: its graphs have their nodes, and cannot run backward."""
    return saved_tensors_hooks(lambda tensor: None, _never)


def _never(saved: None) -> torch.Tensor:
    raise RuntimeError("forward runs a backward that it does not run on fake tensors")


def owned_state(
    module: nn.Module, tensors: Sequence[ModuleTensor], real_tensors: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The module's tensors, buffers as copies; parameters and buffers once more by their names."""
    owned = [t.detach().clone() if spec.kind == "buffer" else t for spec, t in zip(tensors, real_tensors, strict=True)]
    return owned, {
        name: tensor
        for spec, tensor in zip(tensors, owned, strict=True)
        if spec.kind != "attribute"
        for name in once_per_owner(module, spec.names)
    }


def _all_close(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two runs got the same, up to the rounding of computing it in another way."""
    if len(some) != len(others):
        return False
    for one, other in zip(some, others, strict=True):
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            if type(one) is not type(other):
                return False
            continue
        if (one.shape, one.dtype, one.requires_grad) != (other.shape, other.dtype, other.requires_grad):
            return False
        if not _same_numbers(one.detach(), other.detach()):
            return False
    return True


def _same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of one shape and type hold the same numbers, up to rounding relative to the largest."""
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    tolerance = min(1e3 * torch.finfo(one.dtype).eps, 0.05)
    flat = [as_parts(tensor).reshape(-1) for tensor in (one, other)]
    # Eight-bit floats have no comparison.
    bits = [tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor for tensor in flat]
    if torch.equal(*bits):
        return True
    largest = [finite.abs().max().item() for _, b in _pieces(flat) if (finite := b[b.isfinite()]).numel()]
    scale = max(largest, default=1.0)
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True) for a, b in _pieces(flat))


def _pieces(flat: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Some elements of each at a time, in float64: a copy of all of them would need more memory than the run."""
    for pieces in zip(*(tensor.split(_PIECE) for tensor in flat), strict=True):
        yield tuple(piece.double() for piece in pieces)


def as_in_eager(fake: Observation, real: Observation) -> tuple[Observation, list[Unsupported]]:
    """The observation of the fake run with the real one's strides, and what else differs between the two."""
    problems = list(differences(fake.calls, real.calls))
    problems += [each for each in real.unsupported if each.reason == UNTOLD]  # its kernel runs here alone
    if problems:  # the others follow from it
        return fake, problems
    for ours, eagers in zip_longest(fake.draws, real.draws):
        if ours is None or eagers is None or replace(ours, stride=eagers.stride) != eagers:
            problems.append(_problem(f"draws {eagers}", f"draws {ours}", "a random draw"))
            break
    if fake.out_spec != real.out_spec:
        problems.append(_problem(f"returns {real.out_spec}", f"returns {fake.out_spec}", "the module's result"))
    for one, other in zip(fake.objects, real.objects, strict=False):
        if one is other:
            reason = "is not made by the call; a compiled call would return a copy of it"
            problems.append(Unsupported(f"a result of type {type(one).__name__}", "the module's result", reason))
    fake.objects.clear()
    real.objects.clear()
    for index, (ours, eagers) in enumerate(zip(fake.outputs, real.outputs, strict=False)):
        if not ours.is_tensor and not _is_same_constant(ours.value, eagers.value):
            problems.append(_problem(f"gives {eagers.value!r}", f"gives {ours.value!r}", f"result {index}"))
        if ours.is_tensor and replace(ours, stride=eagers.stride) != eagers:
            problems.append(_problem(f"gives {eagers}", f"gives {ours}", f"result {index}"))
    return replace(fake, draws=real.draws, outputs=real.outputs), problems


def as_in_eager_at_sample(symbolic: Observation, real: Observation) -> tuple[Observation, list[Unsupported]]:
    """As :func:`bridge.capture.eager_run.as_in_eager`, of an observation with extents; they stay.

    As for :func:`strides_of_eager`.
    """
    observation, problems = as_in_eager(at_sample(symbolic), real)
    if problems:
        return observation, problems
    made, problems = strides_of_eager(symbolic, real)
    return replace(observation, draws=made.draws, outputs=made.outputs), problems


def _is_same_constant(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one is other or one == other or (one != one and other != other))


def _problem(eager: str, traced: str, op: str) -> Unsupported:
    return Unsupported(op, "forward", f"on the sample eager {eager} where its trace {traced}")
