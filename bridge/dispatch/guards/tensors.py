"""Conditions on tensors: each property that compiled code relies on, for arguments and module tensors alike.

The fast check compares a list of tensors in one call (:mod:`bridge.base.tensor_properties`).

:class:`FrozenTensors`: a call's module tensors → whether they are unchanged since they were frozen, by version counts.
Optimizers, ``load_state_dict`` and all other in-place operations count, except a batch norm's update of its running
statistics. Torch's own layers count batches in a buffer instead; otherwise the statistics themselves are compared. Not
detected: other changes without a version count (through ``.data``, NumPy or another process).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from bridge.base.errors import MODULE, GuardFailure
from bridge.base.lru import LeastRecentlyUsed
from bridge.base.tensor_properties import PROPERTIES, Property, TensorChecks, is_nested, tensor_checks
from bridge.base.torch_distributed import Sharding, entering, is_distributed, sharding_of
from bridge.base.torch_internals import VF, OpOverload
from bridge.capture import Captured
from bridge.dispatch.guards.condition import CheckSource, differs
from bridge.dispatch.guards.sizes import ArgumentSizes

__all__ = ["FrozenTensors", "LocalTensors", "SizedTensorGuard", "TensorGuard", "uncounted_statistics"]

#: Most combinations of sizes for which tensors have a fast check; other calls take the thorough one.
MAX_SIZES = 64


class TensorGuard:
    """The conditions of one entry on a list of tensors.

    Args:
        tensors: the sample's tensors.
        kinds: the allowed types of each.
        names: of the tensors, for messages.
        stage: the stage of a failure.
        saves: whether autograd saves them, which it refuses for inference tensors.
        explain_type: name and value → the failure of a value of another type.

    Attributes:
        alike: whether inference mode is on → fast check of a list of tensors, none of them nested
            (:func:`bridge.base.tensor_properties.is_nested`).
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        kinds: Sequence[tuple[type, ...]],
        names: Sequence[str],
        stage: int,
        saves: bool,
        explain_type: Callable[[str, Any], GuardFailure],
    ):
        self._expected = [[each.read(tensor) for each in PROPERTIES] for tensor in tensors]
        self._kinds = kinds
        self._names = names
        self._stage = stage
        self._saves = saves
        self._explain_type = explain_type
        self.alike = {torch.is_inference_mode_enabled(): tensor_checks(tensors)}  # metadata differs in inference mode

    def write(self, source: CheckSource, tensors: str, inference: str, nested: str = "") -> None:
        """Writes the condition that the tensors of an expression have exactly the expected metadata.

        ``inference``: expression for whether inference mode is on; ``nested``: expression for the tensors that may be
        nested by now, or no tensors at all.
        """
        if not self._names:
            return
        failure, otherwise = source.name(self._closer, "look closer at"), ""
        if nested:
            source.add("try:", f"    nested = any(map({source.name(is_nested, 'is nested')}, {nested}))")
            source.add("except AttributeError:  # no tensor", "    nested = True")
            otherwise = "nested or "
        source.refuse(f"{otherwise}{self._unlike(source, tensors, inference)}", f"{failure}({tensors}, {inference})")

    def _unlike(self, source: CheckSource, tensors: str, inference: str) -> str:
        source.add(f"looks = {source.name(self.alike, 'alike')}.get({inference})")
        return f"looks is None or not (looks.exact(*{tensors}) or looks.again({tensors}))"

    def _closer(self, tensors: Sequence[Any], inference: bool) -> GuardFailure | None:
        """:meth:`failure`; caches the metadata of equivalent tensors for the fast check."""
        failure = self.failure(tensors)
        if failure is None:
            self.learn(tensors, inference)
        return failure

    def failure(self, tensors: Sequence[Any]) -> GuardFailure | None:
        """The first property of a tensor that differs from the expected one, or ``None``."""
        return self._other_type(tensors) or self._difference(tensors, self._expected)

    def _other_type(self, tensors: Sequence[Any]) -> GuardFailure | None:
        for tensor, kinds, name in zip(tensors, self._kinds, self._names, strict=True):
            if type(tensor) not in kinds:
                return self._explain_type(name, tensor)
        return None

    def _difference(self, tensors: Sequence[torch.Tensor], rows: Sequence[Sequence[Any]]) -> GuardFailure | None:
        """The first property that differs from the rows of expected values."""
        for tensor, name, expected in zip(tensors, self._names, rows, strict=True):
            for each, then in zip(PROPERTIES, expected, strict=True):
                now = each.read(tensor)
                if now != then and not (each.same and each.same(now, then, tensor.shape)):
                    return _explain(each, self._stage, name, then, now)
            if self._saves and tensor.is_inference():
                return GuardFailure(self._stage, f"inference tensor {name}", "autograd cannot save it")
        return None

    def learn(self, tensors: Sequence[torch.Tensor], inference: bool) -> None:
        """In inference mode, caches the metadata of matching tensors."""
        if inference:
            self.alike[True] = tensor_checks(tensors)


class SizedTensorGuard(TensorGuard):
    """The conditions of one entry on argument tensors with symbolic extents.

    The expected layouts follow from the sizes of the call. The thorough check evaluates them; the fast check has the
    tensors' metadata for the latest sizes, and takes the thorough one for other sizes.

    Args:
        sizes: the tensors' extents.
        given: further arguments of :class:`TensorGuard`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], sizes: ArgumentSizes, **given: Any):
        super().__init__(tensors, **given)
        self.sizes = sizes
        self._looks = {inference: LeastRecentlyUsed[tuple, TensorChecks](MAX_SIZES) for inference in (False, True)}
        self.alike = {mode: partial(self._looks_as_known, looks) for mode, looks in self._looks.items()}
        self.learn(tensors, torch.is_inference_mode_enabled())

    def _unlike(self, source: CheckSource, tensors: str, inference: str) -> str:
        return f"not {source.name(self.alike, 'looks by sizes')}[{inference}]({tensors})"

    def _looks_as_known(self, looks: LeastRecentlyUsed[tuple, TensorChecks], tensors: Sequence[torch.Tensor]) -> bool:
        try:
            key = self.sizes.key(tensors)
        except IndexError:  # another number of dimensions
            return False
        alike = looks.get(key)
        if alike is not None:
            return alike(tensors)
        if self.failure(tensors) is not None:
            return False
        looks.put(key, tensor_checks(tensors))
        return True

    def failure(self, tensors: Sequence[Any]) -> GuardFailure | None:
        nested = (name for tensor, name in zip(tensors, self._names, strict=True) if is_nested(tensor))
        failure = self._other_type(tensors)
        if failure is None and (name := next(nested, None)) is not None:
            failure = _explain(_NESTED, self._stage, name, False, True)
        if failure is not None or (failure := self.sizes.failure(tensors)) is not None:
            return failure
        layouts = self.sizes.layouts(tensors)
        return self._difference(tensors, list(map(_laid_out, self._expected, layouts)))

    def learn(self, tensors: Sequence[torch.Tensor], inference: bool) -> None:
        """Caches the metadata of matching tensors of these sizes."""
        self._looks[inference].put(self.sizes.key(tensors), tensor_checks(tensors))


class LocalTensors:
    """The conditions of one entry on distributed tensors: a module's tensors → tensors with this rank's parts in their
    place.

    Args:
        names, shardings: of all tensors; ``None`` for one that is not distributed.
    """

    def __init__(self, names: Sequence[str], shardings: Sequence[Sharding | None]):
        self._expected = [(i, names[i], each) for i, each in enumerate(shardings) if each is not None]

    def __bool__(self) -> bool:
        return bool(self._expected)

    def of(self, tensors: Sequence[Any]) -> list[Any] | None:
        """The tensors of a compiled call; ``None`` if one is distributed in another way."""
        if self.failure(tensors) is not None:
            return None
        found = list(tensors)
        for place, _, then in self._expected:
            found[place] = entering(tensors[place], then.gradient)
        return found

    def failure(self, tensors: Sequence[Any]) -> GuardFailure | None:
        """The first tensor that is distributed in another way, or ``None``."""
        for place, name, then in self._expected:
            if not is_distributed(tensors[place]):
                return differs(MODULE, f"placements of {name}", then.placements, "a tensor of one process")
            now = sharding_of(tensors[place])
            if now.placements != then.placements:
                return differs(MODULE, f"placements of {name}", then.placements, now.placements)
            if now.mesh is not then.mesh and now.mesh != then.mesh:
                return differs(MODULE, f"mesh of {name}", then.mesh, now.mesh)
        return None


_NAMES = [each.name for each in PROPERTIES]
_NESTED, _SHAPE, _STRIDES = PROPERTIES[_NAMES.index("nested")], _NAMES.index("shape"), _NAMES.index("strides")


def _laid_out(expected: Sequence[Any], layout: tuple[tuple[int, ...], tuple[int, ...]]) -> list[Any]:
    """A tensor's expected properties with another layout."""
    row = list(expected)
    row[_SHAPE], row[_STRIDES] = layout
    return row


def _explain(each: Property, stage: int, what: str, then: Any, now: Any) -> GuardFailure:
    field = f"{each.field or each.name} of {what}"
    if each.words:
        return GuardFailure(stage, field, each.words)
    return differs(stage, field, each.show(then), each.show(now))


_STATISTICS = {"running_mean", "running_var"}
_REWRITTEN = "changed in place since it was frozen"
_FROZEN = (
    (object.__hash__, "another tensor took its place since it was frozen"),  # ``id`` is an audit event
    (attrgetter("_version"), _REWRITTEN),
    (torch.Tensor.data_ptr, "moved in memory since it was frozen"),
)
"""The properties of a frozen tensor that must be equal, and the words for another value."""


class FrozenTensors:
    """The tensors with which one entry was frozen; keeps them alive.

    Args:
        tensors: the module's tensors, in the order of the guard's inputs.
        names: of the tensors, for messages.
        uncounted: places of tensors that eager writes without a version count.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], names: Sequence[str], uncounted: Collection[int] = ()):
        self.tensors, self._names = list(tensors), list(names)
        self._then = [list(map(read, tensors)) for read, _ in _FROZEN]
        self._numbers = {place: tensors[place].detach().clone() for place in uncounted}

    @property
    def uncounted(self) -> list[int]:
        """Places of tensors that eager writes without a version count."""
        return list(self._numbers)

    def renewed(self, tensors: Sequence[torch.Tensor]) -> FrozenTensors:
        """The conditions for other tensors of the same names, or for the current values of the same ones."""
        return FrozenTensors(tensors, self._names, self._numbers)

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the frozen tensors, unchanged."""
        same = all(list(map(read, tensors)) == then for (read, _), then in zip(_FROZEN, self._then, strict=True))
        return same and (not self._numbers or self._rewritten(tensors) is None)

    def failure(self, tensors: Sequence[torch.Tensor]) -> GuardFailure:
        """The failure of the first tensor that was replaced or changed, if :meth:`holds` is false."""
        for now, name, *then in zip(tensors, self._names, *self._then, strict=True):
            for (read, words), before in zip(_FROZEN, then, strict=True):
                if read(now) != before:
                    return GuardFailure(MODULE, f"frozen {name}", words)
        return GuardFailure(MODULE, f"frozen {self._names[self._rewritten(tensors)]}", _REWRITTEN)

    def _rewritten(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """The first place whose values changed without a version count, or ``None``."""
        others = (place for place, then in self._numbers.items() if not VF.equal(tensors[place], then))
        return next(others, None)


def uncounted_statistics(module: nn.Module, captured: Captured) -> list[int]:
    """Places of module tensors that are running statistics of a batch norm without a batch counter.

    Torch's own layers count batches in ``num_batches_tracked``, which is frozen as well.
    """
    found: set[int] = set()
    for node in captured.graph.nodes:
        if isinstance(node.target, OpOverload):
            names = (argument.name for argument in node.target._schema.arguments)
            given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
            nodes = (each for name, each in given.items() if name in _STATISTICS and isinstance(each, fx.Node))
            found |= {captured.names.placeholders[each.name] for each in nodes if each.op == "placeholder"}
    tensors = [tensor for layer in module.modules() if _counts(layer) for tensor in layer.buffers(recurse=False)]
    names = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
    owned = {index: names.get(spec.name) for index, spec in enumerate(captured.module_tensors)}
    counted = {id(tensor) for tensor in tensors}
    return sorted(index for index in found if index in owned and id(owned[index]) not in counted)


def _counts(layer: nn.Module) -> bool:
    """Whether the layer's forward is torch's own and counts its batches."""
    is_torchs = type(layer).__module__.startswith("torch.nn.modules.")
    return is_torchs and getattr(layer, "num_batches_tracked", None) is not None
