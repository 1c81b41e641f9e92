"""Distributed tensors of a run (DTensor) → operators on this rank's local tensors, and collectives.

The recorder sees operators above DTensor. Here each DTensor has a *local tensor* that the run's operators made. torch's
own sharding rules tell for an operator which arguments change placements and how its results are placed; then the
operator runs on local tensors, as a row like any other. Gradients are the local operators':

* an argument that is replicated has a *partial* gradient where a result is not replicated: each rank has its part's
  contribution, and the sum over the ranks is the gradient;
* any other argument has a gradient that is placed like itself; a partial value's gradient is replicated.

A change of placements is one operator, ``tvm_dispatch::collective``, which names its move and its gradient's move.
Which of the two gradients a value gets is known when it is used, so its tensor is made then: where all uses of a
gathered sequence have partial gradients, the backward is one reduce-scatter, as in eager.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch

from bridge.base.errors import Unsupported, UnsupportedModule, failed_together
from bridge.base.torch_distributed import (
    FROM_LOCAL,
    REDISTRIBUTE,
    TO_LOCAL,
    changes_dtype,
    gathered,
    group_of,
    is_distributed,
    is_plain_sum,
    is_special,
    local_shape,
    output_sharding,
    own_part,
    partial_sum,
    reduced,
    scattered,
    shard_axis,
    size_of,
    spec_of_local,
    with_sharding,
)
from bridge.base.torch_internals import aten, pytree
from bridge.base.torch_recording import composite_kernel, own_operator
from bridge.capture.rows import Record, may_write
from bridge.state import ModuleTensor

_MOVES: dict[str, Callable[[torch.Tensor, int, str], torch.Tensor]] = {
    "copy": lambda x, axis, group: x.clone(memory_format=torch.contiguous_format),
    "share": lambda x, axis, group: x / size_of(group),
    "reduce": reduced,
    "gather": gathered,
    "scatter": scattered,
    "slice": own_part,
}
"""Collectives by name: the operation on a local tensor."""


def exchange(x: torch.Tensor, does: str, undoes: str, axis: int, group: str, *before: torch.Tensor) -> torch.Tensor:
    """``tvm_dispatch::collective``: ``does`` along an axis, over the ranks of a process group; its gradient ``undoes``.

    ``before``: results of earlier collectives, which have run by then.
    """
    try:
        return _MOVES[does](x, axis, group)
    except RuntimeError as error:
        failed_together(error)
        raise


def _moved_form(x: torch.Tensor, does: str, undoes: str, axis: int, group: str) -> torch.Tensor:
    shape, size = list(x.shape), size_of(group)
    if does == "gather":
        shape[axis] *= size
    elif does in ("scatter", "slice"):
        shape[axis] //= size
    return x.new_empty(shape)


COLLECTIVE = own_operator(
    "collective(Tensor x, str does, str undoes, int axis, str group) -> Tensor", exchange, _moved_form
)


def _note_options(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.options = inputs[1:]


def _undone(ctx: Any, grad: torch.Tensor) -> tuple:
    does, undoes, axis, group = ctx.options
    return COLLECTIVE(grad, undoes, does, axis, group), None, None, None, None


torch.library.register_autograd("tvm_dispatch::collective", _undone, setup_context=_note_options)


@dataclass
class _Known:
    """A DTensor of the run.

    Attributes:
        tensor: the DTensor; ``name``: of a module's tensor, else empty.
        make: whether its gradient is partial → its local tensor.
        made: the local tensors that were made, by the same.
        is_source: whether another DTensor's local tensor is made of its own later.
    """

    tensor: Any
    make: Callable[[bool], torch.Tensor]
    name: str = ""
    made: dict[bool, torch.Tensor] = field(default_factory=dict)
    is_source: bool = False

    @property
    def placement(self) -> Any:
        return self.tensor._spec.placements[0]

    def local(self, partial: bool = False) -> torch.Tensor:
        """The local tensor whose gradient is partial, or placed like the DTensor."""
        partial = partial and self.placement.is_replicate() and self.tensor.requires_grad
        if partial not in self.made:
            self.made[partial] = self.make(partial)
        return self.made[partial]


class DistributedTensors:
    """The DTensors of a run and their local tensors.

    Args:
        recorder: the run's recorder.
    """

    def __init__(self, recorder: Any):
        self._held = weakref.ref(
            recorder
        )  # the recorder has this object: a run's reads end with it, not at a collection
        self._known: dict[int, _Known] = {}
        self._inside: dict[int, torch.Tensor] = {}

    @property
    def _recorder(self) -> Any:
        return self._held()

    def own(self, tensors: Iterable[tuple[str, Any, torch.Tensor]]) -> None:
        """Notes the module's DTensors and their local tensors, which are inputs of the run."""
        for name, tensor, local in tensors:
            what, spec = f"parameter '{name}'", tensor._spec
            if len(spec.placements) != 1:
                self._refuse(what, f"{_words(spec)} on a mesh of several dimensions", _ONE)
            if shard_axis(spec.placements[0]) is None and not spec.placements[0].is_replicate():
                self._refuse(what, f"is {_words(spec)}", _PLAIN)
            self._check_even(what, spec)
            self._known[id(tensor)] = _Known(tensor, lambda partial, local=local: local, name)

    def with_gradients(self, tensors: Sequence[ModuleTensor]) -> list[ModuleTensor]:
        """The module's tensors with the placements of the distributed ones' gradients.

        Raises:
            UnsupportedModule: some uses of one have a partial gradient and others a replicated one.
        """
        found = {}
        for each in filter(attrgetter("name"), self._known.values()):
            if len(each.made) > 1:
                reason = "has a partial gradient from one use and a replicated one from another"
                self._refuse(f"parameter '{each.name}'", reason, _PLAIN)
            found[each.name] = partial_sum() if True in each.made else each.tensor._spec.placements
        return [
            replace(each, sharding=each.sharding._replace(gradient=found[each.name])) if each.name in found else each
            for each in tensors
        ]

    def concerns(self, tensors: Iterable[Any]) -> bool:
        """Whether an operator takes DTensors.

        Raises:
            UnsupportedModule: it takes a tensor inside of one, which is only made where it is needed.
        """
        found = False
        for each in tensors:
            found = found or is_distributed(each)
            if id(each) in self._inside:
                self._refuse("DTensor._local_tensor", "reads a DTensor's part past its methods", "use to_local()")
        return found

    # Operators

    def called(self, op: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs an operator on DTensors as operators on local tensors → its result, DTensors."""
        with self._recorder:
            if (made := composite_kernel(op, *args, **kwargs)) is not NotImplemented:
                return made
            return self._called(op, args, kwargs)

    def _called(self, op: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if any(map(is_distributed, pytree.tree_leaves(kwargs))):
            self._refuse(str(op), "takes a DTensor by name", _LOCAL)
        flat, spec = pytree.tree_flatten(args)
        known = [self._of(op, each) if isinstance(each, torch.Tensor) else None for each in flat]
        if is_special(op):
            self._refuse(str(op), "torch draws, or computes it in another way, where tensors are distributed", _LOCAL)
        sharding = output_sharding(op, args, kwargs)
        schema, wanted = sharding.redistribute_schema, flat
        if sharding.needs_redistribute:
            op, wanted = schema.op, pytree.tree_leaves(schema.args_schema, is_leaf=lambda each: hasattr(each, "mesh"))
            if not sharding.use_val_from_redistribute_schema:
                pairs = zip(wanted, known, flat, strict=True)
                wanted = [value if one is None else each for each, one, value in pairs]
        outs = sharding.output_spec if isinstance(sharding.output_spec, tuple | list) else [sharding.output_spec]
        whole = {each.placements[0].is_replicate() for each in outs if each is not None}
        if len(whole) != 1:
            self._refuse(str(op), "returns numbers to Python, or results of which some are replicated", _LOCAL)
        given = [self._placed(op, value, one, whole == {True}) for value, one in zip(wanted, known, strict=False)]
        given += wanted[len(given) :]

        def run(partial: bool) -> Any:
            flat = [each.local(partial) if isinstance(each, _Known) else each for each in given]
            return op(*(pytree.tree_unflatten(flat, spec) if len(flat) == len(known) else flat), **kwargs)

        if may_write(op):
            return self._written(op, args[0], (given, kwargs), outs[0])
        follows = [each.tensor for each in given if isinstance(each, _Known) and each.tensor.requires_grad]
        is_one = not isinstance(sharding.output_spec, tuple | list) and outs[0].tensor_meta.dtype.is_floating_point
        if whole == {True} and follows and is_one and op is not aten.detach.default and torch.is_grad_enabled():
            for each in given:
                if isinstance(each, _Known):
                    each.is_source = True
            self._check(outs[0])
            return self._noted(run, outs[0], follows[0])
        made = run(whole == {False})
        if isinstance(made, torch.Tensor):
            return self._result(made, outs[0])
        return type(made)(each if at is None else self._result(each, at) for each, at in zip(made, outs, strict=True))

    def _placed(self, op: Any, value: Any, one: _Known | None, whole: bool) -> Any:
        """An operand in the placement that the operator wants; ``whole``: its results are replicated."""
        if one is None:
            return value
        placement = value._spec.placements[0] if is_distributed(value) else value.placements[0]
        if whole and not placement.is_replicate():
            self._refuse(str(op), f"makes a replicated result of one that is {placement}", _LOCAL)
        return self._moved(one, placement)

    def _written(self, op: Any, tensor: Any, operands: tuple, spec: Any) -> Any:
        """Runs an operator that writes its first operand in place → that DTensor."""
        (one, *others), kwargs = operands
        is_own = isinstance(one, _Known) and one.tensor is tensor and not one.name and not one.is_source
        if not is_own or spec.placements != tensor._spec.placements or spec.shape != tensor._spec.shape:
            self._refuse(str(op), "writes a DTensor in place that is the module's, or changes its placements", _LOCAL)
        local, partial = one.local(), not one.placement.is_replicate()
        made = op(local, *(each.local(partial) if isinstance(each, _Known) else each for each in others), **kwargs)
        if made is not local or made.requires_grad != tensor.requires_grad:
            self._refuse(str(op), "writes a tensor that requires grad into a DTensor that does not", _LOCAL)
        one.made = {False: made}
        return tensor

    def _result(self, local: torch.Tensor, spec: Any) -> Any:
        self._check(spec)
        group = group_of(spec.mesh)

        def make(partial: bool) -> torch.Tensor:
            return COLLECTIVE(local, "copy", "reduce", 0, group) if partial else local

        return self._noted(make, spec, local)

    def _of(self, op: Any, tensor: torch.Tensor) -> _Known | None:
        if not is_distributed(tensor):
            if tensor.requires_grad:
                self._refuse(str(op), "takes a DTensor and another tensor", "make it one: DTensor.from_local")
            return None
        if id(tensor) not in self._known:
            self._refuse(str(op), "takes a DTensor that no layer's plan has made", _LOCAL)
        return self._known[id(tensor)]

    def _moved(self, one: _Known, to: Any) -> _Known:
        """A DTensor with another placement; its local tensor is made where it is needed."""
        have, spec = one.placement, one.tensor._spec
        if have == to:
            return one
        group, a, b = group_of(spec.mesh), shard_axis(have), shard_axis(to)
        into, from_sum, to_sum = to.is_replicate(), is_plain_sum(have), is_plain_sum(to)
        self._check_even(f"a change from {have} to {to}", spec, to)

        one.is_source = True

        def make(partial: bool) -> torch.Tensor:
            x = one.local()
            if a is not None and b is not None:
                return COLLECTIVE(COLLECTIVE(x, "gather", "slice", a, group), "slice", "gather", b, group)
            if b is not None:
                return COLLECTIVE(x, *(("scatter", "gather") if from_sum else ("slice", "gather")), b, group)
            if a is not None:
                return COLLECTIVE(x, "gather", "scatter" if partial else "slice", a, group)
            if to_sum:
                return COLLECTIVE(x, "share", "copy", 0, group)
            return COLLECTIVE(x, "reduce", "reduce" if partial else "copy", 0, group)

        is_known = (a is not None and (into or b is not None)) or (from_sum and (into or b is not None))
        if not (is_known or (have.is_replicate() and (b is not None or to_sum))):
            self._refuse(f"a change from {have} to {to}", "is no collective of a compiled call", _LOCAL)
        return self._known[id(self._noted(make, spec, one.tensor, (to,)))]

    # Functions that make them, change their placements and take them apart

    def applied(self, kind: type, args: tuple) -> Any:
        """Applies torch's Function of a DTensor's border or change of placements → its result; ``NotImplemented`` for
        another Function."""
        act = {FROM_LOCAL: self._from_local, REDISTRIBUTE: self._redistribute, TO_LOCAL: self._to_local}
        found = act.get(kind.__name__) if kind.__module__.startswith("torch.distributed.tensor.") else None
        return NotImplemented if found is None else found(*args)

    def _from_local(self, local, mesh, placements, run_check, shape=None, stride=None, grad_placements=None) -> Any:
        if run_check or shape is not None or (grad_placements is not None and tuple(grad_placements) != placements):
            self._refuse("DTensor.from_local", "with run_check, shape or grad_placements", "leave them out")
        if len(placements) != 1:
            self._refuse("DTensor.from_local", "on a mesh of several dimensions", _ONE)
        return self._result(local, spec_of_local(local, mesh, placements))

    def _redistribute(self, tensor, mesh, placements, async_op, *options) -> Any:
        one = self._of("DTensor.redistribute", tensor)
        if len(placements) != 1 or mesh != tensor._spec.mesh or changes_dtype(options, tensor.dtype):
            self._refuse("DTensor.redistribute", "to another mesh or another dtype", _LOCAL)
        moved, one.is_source = self._moved(one, placements[0]), True
        return moved.tensor if moved is not one else self._noted(one.local, tensor._spec, tensor)

    def _to_local(self, tensor, grad_placements) -> torch.Tensor:
        one, partial = self._of("DTensor.to_local", tensor), False
        if grad_placements is not None and tuple(grad_placements) != tensor._spec.placements:
            partial = one.placement.is_replicate() and is_plain_sum(grad_placements[0])
            if not partial:
                reason = f"with grad_placements={list(grad_placements)} of {_words(tensor._spec)}"
                self._refuse("DTensor.to_local", reason, "leave grad_placements out")
        local = one.local(partial)
        return local.view_as(local)

    # Making DTensors

    def _noted(self, make: Callable, spec: Any, like: torch.Tensor, placements: Any = None) -> Any:
        """A DTensor whose local tensor is made where it is needed; ``like``: a tensor that requires grad if it does."""
        follows = like.requires_grad and torch.is_grad_enabled()
        to = spec.placements if placements is None else placements
        if follows:  # its part is in autograd's graph, and the part in here is not: no operator may take it
            with self._recorder.pause(), torch.no_grad():
                inside = torch.empty(local_shape(spec, to), dtype=spec.tensor_meta.dtype, device=like.device)
            self._inside[id(inside)] = inside
        else:
            local = make(False)
            inside = local if torch.is_grad_enabled() else local.detach()
        with self._recorder.pause():
            made = with_sharding(inside, spec, placements, follows)
        self._known[id(made)] = _Known(made, make, made={} if follows else {False: local})
        return made

    def _check(self, spec: Any) -> None:
        if len(spec.placements) != 1:
            self._refuse("a DTensor", "on a mesh of several dimensions", _ONE)
        placement = spec.placements[0]
        if not (placement.is_replicate() or is_plain_sum(placement) or shard_axis(placement) is not None):
            self._refuse(f"a DTensor that is {placement}", "is not computed by compiled calls", _LOCAL)
        self._check_even("a DTensor", spec)

    def _check_even(self, what: str, spec: Any, to: Any = None) -> None:
        for placement in (spec.placements[0], to):
            axis = None if placement is None else shard_axis(placement)
            if axis is not None and spec.shape[axis] % spec.mesh.size():
                reason = f"{spec.shape[axis]} elements of axis {axis} are split over {spec.mesh.size()} ranks unevenly"
                self._refuse(what, reason, "choose a size that the number of ranks divides")

    def _refuse(self, op: str, reason: str, hint: str) -> None:
        raise UnsupportedModule("", [Unsupported(op, self._recorder.line(), reason, hint)])


def collective_problems(record: Record) -> Iterator[Unsupported]:
    """Refusals of a call with collectives, in which processes could decide apart."""
    groups = dict.fromkeys(row.args[-1] for row in record.rows if row.op is COLLECTIVE)
    if len(groups) > 1:
        reason = f"exchanges tensors with {len(groups)} process groups"
        yield Unsupported("collectives", "forward", reason, "dispatch the modules of each group")
    if groups and record.reads:
        where, reason = record.reads[0].reading.where, "each process would decide alone in a call with collectives"
        yield Unsupported("a number that forward reads", where, reason, "dispatch the modules around it")


def distributed_of(
    specs: Sequence[ModuleTensor], tensors: Iterable[torch.Tensor], owned: Iterable[torch.Tensor]
) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """Name, DTensor and local tensor of each distributed tensor, of a module's tensors and a run's."""
    for spec, tensor, local in zip(specs, tensors, owned, strict=False):
        if spec.sharding is not None:
            yield spec.name, tensor, local


def _words(spec: Any) -> str:
    return ", ".join(map(str, spec.placements))


_ONE = "use one dimension of the mesh: mesh['tp']"
_LOCAL = "use local tensors there (to_local, use_local_output=True), or dispatch the modules around it"
_PLAIN = "leave this module to PyTorch, and dispatch the modules inside"
