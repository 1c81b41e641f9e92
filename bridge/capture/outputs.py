"""Output metadata: the result of a run → each leaf's aliases, layout and the inputs that its autograd graph reaches.

Also checks for inputs whose geometry changed and for buffers that forward replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.base.pytrees import WithWholes, is_plain
from bridge.base.tensor_properties import is_parts_view, offset_in
from bridge.base.torch_autograd import GENERATED, FunctionNode
from bridge.base.torch_distributed import is_distributed
from bridge.base.torch_internals import is_dense, storage_id
from bridge.capture.custom_functions import CustomFunctions
from bridge.capture.inplace_rules import InPlaceRules, overlaps, overlaps_itself
from bridge.capture.observation import Observation, Output
from bridge.capture.recorder import OperatorRecorder
from bridge.capture.refusals import CACHES, NO_CACHE
from bridge.capture.rows import Form, ValueRef

_CONTENTS = "return tensors, or a tuple, a list, a dict or a dataclass of them"


def unknown_results(leaves: Sequence[Any]) -> list[Unsupported]:
    """Refusals of result leaves that a compiled call cannot make: opaque objects, tensors that are not dense."""
    where, reason = "the module's result", "not a type that a compiled call can make anew"
    others = [leaf for leaf in leaves if not (is_plain(leaf) or isinstance(leaf, torch.Tensor))]
    found = [Unsupported(f"a result of type {each.__name__}", where, reason, _hint(each)) for each in map(type, others)]
    if any(map(is_distributed, leaves)):
        reason, hint = "a compiled call makes local tensors", "return x.to_local(), or dispatch the module around it"
        found.append(Unsupported("a result that is a DTensor", where, reason, hint))
    layouts = [leaf.layout for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided]
    reason, hint = "a compiled call makes dense tensors", "return it dense: .to_dense()"
    return found + [Unsupported(f"a result of layout {layout}", where, reason, hint) for layout in layouts]


def _hint(kind: type) -> str:
    return NO_CACHE if kind.__module__ == CACHES else _CONTENTS


def describe_outputs(
    leaves: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    observation: Observation,
    rules: InPlaceRules,
    functions: CustomFunctions,
    saved: tuple[Collection[int], Collection[int]],
) -> None:
    """Appends an :class:`Output` for each leaf of a result, and refusals, to the observation.

    Args:
        leaves: the leaves of the result.
        inputs: the module's tensors and the arguments, in the order that indices refer to.
        functions: the custom autograd Functions of the run.
        saved: (indices of leaves whose memory autograd saves, indices of leaves that it saves themselves).
    """
    by_storage = {storage_id(tensor): ("input", index) for index, tensor in reversed(list(enumerate(inputs)))}
    index_of = {id(tensor): index for index, tensor in enumerate(inputs)}
    first_outputs: dict[int, int] = {}
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            observation.outputs.append(Output(value=leaf))
            continue
        alias, same = None, False
        if id(leaf) in index_of:
            alias, same = ("input", index_of[id(leaf)]), True
        elif id(leaf) in first_outputs:
            alias, same = ("output", first_outputs[id(leaf)]), True
        elif storage_id(leaf) in by_storage and leaf.numel():
            alias = by_storage[storage_id(leaf)]
        elif leaf.numel():
            alias = _spanning_output(leaf, index, leaves)
        first_outputs.setdefault(id(leaf), index)
        base = (inputs if alias[0] == "input" else leaves)[alias[1]] if alias else leaf
        observation.unsupported += _refused(leaf, base, bool(alias), same, functions)
        reaches, edges = _reachable(leaf, inputs, rules, functions)
        through = _others_at(edges, index, leaves)
        observation.outputs.append(
            Output(
                is_tensor=True,
                alias_of=alias,
                is_same_object=same,
                shape=tuple(leaf.shape),
                stride=leaf.stride(),
                offset=offset_in(leaf, base),
                dtype=leaf.dtype,
                is_conjugate=leaf.is_conj() != base.is_conj(),
                requires_grad=leaf.requires_grad,
                reaches=reaches,
                through=through,
                is_saved=index in saved[0],
                is_held=index in saved[1],
            )
        )
    observation.unsupported += _looked_through(observation.outputs)


def _refused(
    leaf: torch.Tensor, base: torch.Tensor, is_alias: bool, same: bool, functions: CustomFunctions
) -> list[Unsupported]:
    """Refusals of a leaf; ``base``: the tensor that it is a view of, or the leaf itself."""
    found: list[tuple[str, ...]] = []
    if leaf.requires_grad and leaf.grad_fn is None and not same:
        found.append(("requires_grad_", "returns a new leaf that requires grad"))
    elif leaf.requires_grad and not (same or torch.is_grad_enabled()):
        hint = "call it where gradients are on, or detach what it returns"
        found.append(("torch.enable_grad", "returns a tensor that requires grad, called where gradients are off", hint))
    if leaf.dtype != base.dtype and not is_parts_view(leaf, base):
        found.append(("view_dtype", "returns a view of another dtype of something that the caller can see"))
    if leaf.is_neg() != base.is_neg():
        found.append(("neg_view", "returns a view with other signs of something that the caller can see"))
    if is_alias and not same and storage_id(leaf) in functions.shared:
        reason = "returns a view that an autograd.Function has made; its gradient is another than a view's"
        found.append(("a view", reason, "clone it"))
    return [Unsupported(name, "the module's result", *words) for name, *words in found]


def whole_tensors(
    leaves: Sequence[Any], recorder: OperatorRecorder, inputs: Sequence[torch.Tensor], rules: InPlaceRules
) -> dict[int, torch.Tensor]:
    """The tensors, by value, that are not returned and in which result leaves overlap (``expand``, sliding windows). A
    compiled call returns the leaves as views of them, so that a write to one leaf shows in the others."""
    given, record, found = set(map(storage_id, inputs)), recorder.record, {}
    parts: dict[int, dict[int, torch.Tensor]] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.numel() and storage_id(leaf) not in given:
            parts.setdefault(storage_id(leaf), {})[id(leaf)] = leaf
    for group in map(list, map(dict.values, parts.values())):
        if any(map(_spans, group)) or not (any(map(overlaps_itself, group)) or overlaps(group)):
            continue
        of = next((leaf for leaf in group if leaf.requires_grad), group[0])
        number = recorder.values.number_of(of)
        first = -1 if number is None else record.memory[number]
        if first < 0 or first in record.free or not _is_whole(record.forms[first], of):
            reason = "returns a tensor whose elements share memory, of which the whole is not known"
            rules.complain("a view", reason, "return a clone")
            continue
        form, base = record.forms[first], of if of._base is None else of._base
        found[first] = base.as_strided(form.shape, form.stride, form.offset)
    return found


def _is_whole(form: Form, part: torch.Tensor) -> bool:
    """Whether a tensor with this metadata is dense and spans the whole memory of ``part``."""
    plain = form.dtype == part.dtype and not (form.is_conj or form.is_neg)
    size = torch.Size(form.shape).numel() * form.dtype.itemsize
    dense = is_dense(torch.empty_strided(form.shape, form.stride, device="meta"))
    return plain and dense and form.offset == 0 and size == part.untyped_storage().nbytes()


def with_wholes(result: Any, wholes: Collection[Any], dims: Sequence[Any] = ()) -> Any:
    """A result with whole tensors beside it, if there are any; refused if ``dims`` has dynamic dimensions."""
    if wholes and dims:
        reason = "returns a tensor whose elements share memory, of a size that varies"
        raise UnsupportedModule("", [Unsupported("a view", "the module's result", reason, "return a clone")])
    return WithWholes(result, list(wholes)) if wholes else result


def values_of(leaves: Sequence[Any], recorder: OperatorRecorder, wholes: Collection[int]) -> list[Any]:
    """Leaves of a result with values for tensors; ``wholes``: the values of the last leaves, whole tensors."""
    own = leaves[: len(leaves) - len(wholes)]
    return [
        *(recorder.values.of(each) if isinstance(each, torch.Tensor) else each for each in own),
        *map(ValueRef, wholes),
    ]


def _spanning_output(leaf: torch.Tensor, position: int, leaves: Sequence[Any]) -> tuple[str, int] | None:
    """The output that spans the memory of ``leaf``, as ``("output", index)``, so that ``leaf`` is a view of it.

    Prefers outputs that require grad, then the first. ``None`` if there is none, or if it is ``leaf`` itself.
    """
    group = [
        (index, other)
        for index, other in enumerate(leaves)
        if isinstance(other, torch.Tensor) and storage_id(other) == storage_id(leaf) and _spans(other)
    ]
    for index, other in sorted(group, key=lambda pair: (not pair[1].requires_grad, pair[0])):
        if index == position:
            return None
        if other.dtype == leaf.dtype and (other.requires_grad or not leaf.requires_grad):
            return "output", index
    return None


def _spans(tensor: torch.Tensor) -> bool:
    covers = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return covers and tensor.storage_offset() == 0 and is_dense(tensor)


def _reachable(
    leaf: torch.Tensor, inputs: Sequence[torch.Tensor], rules: InPlaceRules, functions: CustomFunctions
) -> tuple[frozenset[int], set[tuple[Any, int]]]:
    """Indices of the inputs whose gradient ``leaf`` contributes to, and the edges of its autograd graph.

    Refuses Functions that were not traced. A tensor that forward itself makes require grad (wav2vec2's encoder, for its
    checkpoints) has an invisible gradient; it is refused only if the result reaches no input.
    """
    index_of = {id(tensor): index for index, tensor in enumerate(inputs)}
    computed = {_edge_of(tensor): index for index, tensor in enumerate(inputs) if tensor.grad_fn is not None}
    found: set[int] = set()
    seen: set[Any] = set()
    edges: set[tuple[Any, int]] = set()
    makes_leaf = False
    stack = [_edge_of(leaf)] if leaf.grad_fn is not None else []
    while stack:
        node = (edge := stack.pop())[0]
        if edge in computed:  # an input that the caller's graph computes
            found.add(computed[edge])
            continue
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and id(node.variable) in index_of:
            found.add(index_of[id(node.variable)])
        elif hasattr(node, "variable"):
            makes_leaf = True
        if type(node).__name__ == "NotImplemented":
            rules.not_differentiated()
        is_operators = type(node).__name__.startswith(GENERATED)
        use = functions.nodes.get(node)
        if isinstance(node, FunctionNode) and use is None and not is_operators:
            name = type(node).__name__.removesuffix("Backward")
            rules.custom_function(name, functions.lines.get(name, "forward"))
        without = use.without if use is not None else ()
        ways = [each for place, each in enumerate(node.next_functions) if each[0] is not None and place not in without]
        edges.update(ways)
        stack.extend(ways)
    if makes_leaf and not found:
        rules.new_leaf()
    return frozenset(found), edges


def _edge_of(tensor: torch.Tensor) -> tuple[Any, int]:
    return tensor.grad_fn, tensor.output_nr


def _others_at(edges: set[tuple[Any, int]], index: int, leaves: Sequence[Any]) -> frozenset[int]:
    """Indices of the other leaves of a result on these edges."""
    return frozenset(
        other
        for other, each in enumerate(leaves)
        if other != index and isinstance(each, torch.Tensor) and _edge_of(each) in edges
    )


def _looked_through(outputs: Sequence[Output]) -> list[Unsupported]:
    """Refusals of results that are views and from which other results are computed."""
    read = {leaf for output in outputs for leaf in output.through}
    if not any(outputs[leaf].alias_of and not outputs[leaf].is_same_object for leaf in read):
        return []
    reason = "returns a view from which it computes another result, whose gradient a hook on it would want"
    return [Unsupported("a view", "the module's result", reason, "return a clone, or what is computed alone")]


def judge_replaced(
    name: str, before: torch.Tensor, after: Any, inputs: Sequence[torch.Tensor], rules: InPlaceRules
) -> None:
    """Refuses a buffer that forward sets to another tensor (``self.mean = self.mean * 0.9``) if dtype or shape change,
    or if the old or new memory has a second name: a compiled call writes the numbers into the old memory."""
    others = {storage_id(each) for each in inputs if each is not before}
    if not isinstance(after, torch.Tensor) or (before.dtype, before.shape) != (after.dtype, after.shape):
        form = f"{after.dtype} of shape {tuple(after.shape)}" if isinstance(after, torch.Tensor) else repr(after)
        reason = f"becomes {form}, was {before.dtype} of shape {tuple(before.shape)}"
        rules.complain(f"buffer '{name}'", reason, "keep its form")
    elif storage_id(before) in others:
        reason = "is set to another tensor, where the old one has a second name"
        rules.complain(f"buffer '{name}'", reason, "write into it (copy_)")
    elif storage_id(after) in others:
        reason = "is set to memory that has another name, of an argument or of the module's"
        rules.complain(f"buffer '{name}'", reason, "clone it")


def geometry_of(tensor: torch.Tensor) -> tuple:
    """A tensor's shape, strides, offset, memory, and whether it is a leaf that requires grad, to detect changes."""
    is_leaf_with_grad = tensor.grad_fn is None and tensor.requires_grad
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), storage_id(tensor), is_leaf_with_grad
