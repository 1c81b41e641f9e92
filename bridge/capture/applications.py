"""Applications: a custom ``autograd.Function`` that a program runs as it is, in one library call for its forward and
one for its backward.

State: autograd's graph of the user's Function holds the tensors and numbers for its backward. The last result of the
forward call is a tensor that stands for the graph, which lives as long as the tensor's memory.

Memory: the program reuses the memory of its values, and the Function may keep its arguments. So an argument that is a
part of a storage is copied, as is one that the Function changes in its first application.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from bridge.base.modes import autocast_to
from bridge.base.tensor_properties import laid_out
from bridge.base.torch_autograd import FunctionNode, apply_function
from bridge.base.torch_internals import VF, pytree, storage_id

Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor."""


@dataclass(frozen=True)
class Application:
    """One application of a Function, for all calls with tensors of these forms.

    Attributes:
        kind: the Function.
        spec, constants: the structure of its arguments, and their leaves with ``torch.Tensor`` for tensors.
        given: form of each tensor argument, and whether autograd tracks it.
        grad, casts: grad mode around it, and the device type and dtype of autocast.
        results: form of each result, and whether it has a gradient; ``None`` for a result that is ``None``.
        is_tuple: whether it returns a tuple.
        changed: tensor arguments that its forward changes.
        gradients: whether its backward returns a gradient, for each tensor argument.
    """

    kind: type
    spec: pytree.TreeSpec
    constants: tuple[Any, ...]
    given: tuple[tuple[Form, bool], ...]
    grad: bool
    casts: tuple[str, torch.dtype | None]
    results: tuple[tuple[Form, bool] | None, ...] = ()
    is_tuple: bool = False
    changed: frozenset[int] = frozenset()
    gradients: tuple[bool, ...] = ()

    @property
    def places(self) -> list[int]:
        """Positions of the tensors among the leaves of the arguments."""
        return [place for place, each in enumerate(self.constants) if each is torch.Tensor]

    def run(self, tensors: Sequence[torch.Tensor], kind: type | None = None) -> tuple[Any, Edges]:
        """Applies the Function, or another ``kind``, to tensors outside of autograd → its results, its graph."""
        leaves = list(self.constants)
        followed = [each for each, (_, follows) in zip(tensors, self.given, strict=True) if follows]
        with torch.set_grad_enabled(self.grad), autocast_to(self.casts[1], kind=self.casts[0]):
            if self.grad and followed:
                followed = apply_function(_Entered, (VF.empty(0).requires_grad_(), *followed), {})
            waiting = iter(followed)
            for place, each, (_, follows) in zip(self.places, tensors, self.given, strict=True):
                leaves[place] = next(waiting) if follows else each
            made = apply_function(kind or self.kind, tuple(pytree.tree_unflatten(leaves, self.spec)), {})
        results = enumerate(made if isinstance(made, tuple) else (made,))
        graph = {place: get_gradient_edge(each) for place, each in results if _is_tracked(each)}
        inputs = [get_gradient_edge(each) for each in followed] if graph else []
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, made), Edges(graph, inputs)

    def backward(self, graph: Edges, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Gradients of the results with one → of each tensor argument, where backward returns one."""
        with autocast_to(None, kind=self.casts[0]):
            of = [*graph.outputs.values()], graph.inputs, gradients
            found = iter(torch.autograd.grad(*of, retain_graph=True, allow_unused=True))
        return [next(found) if follows else None for _, follows in self.given]


class Edges(NamedTuple):
    """The graph of one application, without its tensors.

    Attributes:
        outputs: the edges of the results that have a gradient, by their places.
        inputs: the edges of the arguments that autograd tracks.
    """

    outputs: dict[int, GradientEdge]
    inputs: list[GradientEdge]


def _is_tracked(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and isinstance(value.grad_fn, FunctionNode)


_APPLICATIONS: dict[str, Application] = {}
_KEYS: dict[Application, str] = {}
_PROCESS = uuid.uuid4().hex
"""Part of the keys: a program that is kept on disk must not find another process's Function."""
_GRAPHS: dict[int, Edges] = {}
"""The memory of the tensor that stands for an application's graph → the graph."""


class _Entered(torch.autograd.Function):
    """Tensors outside of autograd's graph → the same tensors as inner nodes of a graph that keeps none of them."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        return (None,) * (1 + len(grads))


def form_of(tensor: torch.Tensor) -> Form:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a storage of its own, which no other value of a program shares."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def apply_opaque(key: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Runs the forward of an application → its results, the new values of the arguments that it changes, and the tensor
    for its node.

    Raises:
        RuntimeError: its results have other forms than in the first call.
    """
    application = _APPLICATIONS[key]
    given = [_passed(application, place, tensor) for place, tensor in enumerate(tensors)]
    made, graph = application.run(given)
    results = [each for each in (made if application.is_tuple else (made,)) if each is not None]
    wanted = [each[0] for each in application.results if each is not None]
    if [(tuple(each.shape), each.dtype) for each in results] != [(shape, dtype) for shape, _, dtype in wanted]:
        found, known = (
            [f"{dtype} of shape {list(shape)}" for shape, _, dtype in each] for each in (map(form_of, results), wanted)
        )
        name = application.kind.__name__
        raise RuntimeError(f"autograd.Function {name} returns {found}, and returned {known} in its first call")
    memory = {storage_id(each) for each in given}
    results = [each.clone() if storage_id(each) in memory else each for each in results]
    now = [given[place].clone() for place in sorted(application.changed)]
    return *results, *now, _standing_for(graph, tensors[0].device)


def _passed(application: Application, place: int, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that the user's forward gets for an argument."""
    form, _ = application.given[place]
    own = laid_out(tensor, form[1])
    if own is tensor and (place in application.changed or not _is_whole(tensor)):
        return laid_out(tensor.clone(), form[1])
    return own.data


def _standing_for(graph: Edges, device: torch.device) -> torch.Tensor:
    """A new tensor for the graph of an application, which lives as long as the tensor's memory."""
    state = VF.empty(1, dtype=torch.uint8, device=device)
    storage = state.untyped_storage()
    key = storage_id(state)
    _GRAPHS[key] = graph
    weakref.finalize(storage, _GRAPHS.pop, key, None).atexit = False
    return state


def application_of(key: str) -> Application:
    """The application with this key."""
    return _APPLICATIONS[key]


def key_of_application(application: Application) -> str:
    """The key of an application, one for equal ones."""
    key = _KEYS.get(application)
    if key is None:
        key = _KEYS[application] = f"{_PROCESS}.{len(_KEYS)}"
        _APPLICATIONS[key] = application
    return key


def backward_opaque(key: str, state: torch.Tensor, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Runs the backward of an application → the gradients of the arguments that have one.

    Raises:
        RuntimeError: the tensor that stands for the node was replaced, as by a hook of saved tensors; or an argument
            has a gradient that had none in the first call.
    """
    application = _APPLICATIONS[key]
    name = application.kind.__name__
    graph = _GRAPHS.get(storage_id(state))
    if graph is None:
        raise RuntimeError(f"autograd.Function {name}: the tensor that stands for its saved state is another one")
    found = application.backward(graph, [each.clone() for each in gradients])
    made = []
    for each, has_one, (form, _) in zip(found, application.gradients, application.given, strict=True):
        if each is not None and not has_one:
            raise RuntimeError(f"autograd.Function {name} has a gradient for an argument that had none at first")
        if has_one:
            made.append(VF.zeros(form[0], dtype=form[2], device=state.device) if each is None else each)
    return tuple(made)
