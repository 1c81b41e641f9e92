"""Attention with a learned bias (relative positions, say): the fused operator → what eager makes of it.

The CPU's fused kernel has no gradient for its mask, so eager takes the plain operators where the mask requires grad; on
a GPU it may take the one kernel that has it. What ``torch.export`` decomposes has forgotten what requires grad, and
would take another one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from autodiff.extents import sample_of
from bridge.base.devices import current_device
from bridge.base.torch_cuda import attention_may_be_formula, memory_of
from bridge.base.torch_fakes import stand_in
from bridge.base.torch_internals import OpOverload, aten, schema
from bridge.base.torch_shapes import hint
from bridge.capture.isolated_rng import watched_operators
from bridge.capture.passes.alias_analysis import Aliases, told

__all__ = ["attends_by_products", "attention_advance", "attention_rate", "choose_for_learned_masks", "is_attention"]

_EFFICIENT = aten._scaled_dot_product_efficient_attention.default
_POSITIONAL = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False}


def choose_for_learned_masks(graph: fx.Graph, requires_grad: Callable[[fx.Node], bool]) -> None:
    """Makes attention whose mask autograd follows what eager takes, in a training-IR graph, in place."""
    calls = [node for node in graph.nodes if node.target is aten.scaled_dot_product_attention.default]
    if not calls:
        return
    aliases = Aliases(graph.nodes, requires_grad, cut=lambda node: False)
    for node in calls:
        given = dict(zip(_POSITIONAL, node.args[3:], strict=False))
        mask, rate, causal = ({**_POSITIONAL, **given, **node.kwargs}[name] for name in _POSITIONAL)
        if not isinstance(mask, fx.Node) or not mask.meta["val"].is_floating_point() or not aliases.followed(mask):
            continue  # a mask of truth values, computed from whatever, requires no grad
        options = {name: node.kwargs[name] for name in ("scale", "enable_gqa") if name in node.kwargs}
        with graph.inserting_before(node):
            if _takes_the_efficient_kernel(node, mask):
                options.pop("enable_gqa", None)
                args = (*node.args[:3], _of_all_scores(node, mask), True, rate, causal)
                pair = graph.call_function(_EFFICIENT, args, options)
            else:
                args = (*node.args[:3], mask, rate, causal, None)
                pair = graph.call_function(aten._scaled_dot_product_attention_math.default, args, options)
            result = graph.call_function(operator.getitem, (pair, 0))
        for made in (pair, result):
            made.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _takes_the_efficient_kernel(node: fx.Node, mask: fx.Node) -> bool:
    """Whether eager does on tensors like these, of which the mask requires grad. Not where sizes vary."""
    values = {each: each.meta["val"] for each in node.all_input_nodes}
    tensors = [each for each in values.values() if isinstance(each, torch.Tensor)]
    if current_device().type != "cuda" or any(type(size) is not int for each in tensors for size in each.shape):
        return False
    seen: list[OpOverload] = []

    def watch(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        seen.append(func)
        return func(*args, **kwargs)

    mode = mask.meta["val"].fake_mode
    with mode, torch.enable_grad():
        values = {source: stand_in(value, mode) for source, value in values.items()}
        values[mask].requires_grad_()
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        with watched_operators(watch):
            node.target(*args, **kwargs)
    return _EFFICIENT in seen


def _of_all_scores(node: fx.Node, mask: fx.Node) -> fx.Node:
    """The mask as the kernel takes it: of each batch and head."""
    query, key = (each.meta["val"] for each in node.args[:2])
    extents = [*query.shape[:3], key.shape[2]]
    expanded = node.graph.call_function(aten.expand.default, (mask, extents))
    expanded.meta = {**told(node), "val": mask.meta["val"].expand(extents)}
    return expanded


# Fused attention of CUDA: a call of a torch operator → its rate of dropout, how far its kernel moves a generator, and
# whether it is computed by products, as a formula, in the kernel's place.


_RATE = "dropout_p"
_MOST_WEIGHTS = 2
"""Bytes of attention's weights, as a part of those of queries, keys, values and results, up to which products take
less time and their memory is no matter: 512 rows of 64 elements each."""
_PART_OF_MEMORY = 256
"""Of the GPU, that the weights of one attention take at most."""
_FLASH = 32
"""How far flash attention moves a generator for each head of each element of a batch."""


def is_attention(operator: Any) -> bool:
    """Whether it is tagged as random, and is only where it is asked for dropout."""
    return "scaled_dot_product" in str(operator)


def attention_rate(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The rate of a call of an operator that :func:`is_attention`."""
    names = [argument.name for argument in schema(operator).arguments]
    place = names.index(_RATE) if _RATE in names else len(args)
    return args[place] if place < len(args) else kwargs.get(_RATE, 0.0)


def attention_advance(operator: Any, query: torch.Tensor, key: torch.Tensor) -> int | torch.SymInt:
    """How far one of CUDA's kernels that drops moves its generator's offset: the rule that was seen to hold.

    For sizes that vary. At the sample it is compared with what was measured, and in each call with where the kernel
    leaves the generator.
    """
    heads = query.shape[0] * query.shape[1]
    if "flash" in str(operator):
        return heads * _FLASH
    return (heads * query.shape[2] * key.shape[2] + 3) // 4 * 4


def attends_by_products(operator: Any, query: Any, key: Any, value: Any, rate: float = 0.0) -> bool:
    """Whether the weights are computed: two products and a softmax take the efficient kernel's place.

    In float32 they take less time, in TF32 a third, and the kernel's dropout is known by a rule
    (:mod:`bridge.rng.computed`); but the weights lie in memory. Where sizes vary, those of the sample decide:
    either is right. Who forbids torch the formula (``torch.backends.cuda.enable_math_sdp``, ``sdpa_kernel``) gets the
    kernel.

    Args:
        query, key, value: tensors or their forms, of (batch, head, row, column).
        rate: of its dropout.
    """
    if operator is not _EFFICIENT or query.dtype != torch.float32 or query.device.type != "cuda":
        return False
    if np.float32(rate) == 1:  # the kernel divides by zero
        return False
    sizes = [[sample_of(hint(extent)) for extent in each.shape] for each in (query, key, value)]
    if any(len(each) != 4 or None in each for each in sizes) or len({tuple(each[:2]) for each in sizes}) > 1:
        return False
    (batch, heads, rows, depth), (*_, columns, _), (*_, width) = sizes
    weights, others = rows * columns, rows * (depth + width) + columns * (depth + width)
    if not 0 < weights <= _MOST_WEIGHTS * others or not attention_may_be_formula():
        return False
    total = memory_of(query.device)
    return total is None or 4 * batch * heads * weights <= total // _PART_OF_MEMORY
