"""Higher-order operators: ``torch.cond``, ``while_loop``, ``scan``, ``map`` → the Python control flow that they mean.

In eager, Dynamo traces their functions, and an ``autograd.Function`` runs the graphs. A recorded run calls the
functions directly: it reads predicates as numbers, records loops step by step, and notes the functions' reads as
forward's. Two facts come from Dynamo's trace, which the real run makes
(:func:`bridge.base.torch_higher_order.lifted_operands`): the functions that Dynamo refuses, and the operands of eager's
Function. Operands that the taken branch does not use get zero gradients, and make the results require grad.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from bridge.base.errors import Unsupported, UnsupportedModule, line_of_forward, swallowed
from bridge.base.modes import while_active
from bridge.base.torch_higher_order import (
    OUTPUT_ALONE,
    flex_attention_casts,
    indexing_by_tensors,
    is_check_of_devices,
    is_indexing,
    lifted_operands,
    no_score_mod,
    returns_output_alone,
)
from bridge.base.torch_internals import HigherOrderOperator, aten, find, innermost_transform, no_torch_function, pytree
from bridge.capture.custom_functions import functions_of_torchs
from bridge.capture.draws import unwatched
from bridge.capture.thread_isolation import own_function

if TYPE_CHECKING:
    from bridge.capture.recorder import OperatorRecorder


class _NotExactError(Exception):
    """A call cannot be recorded exactly; the message is the reason."""


@dataclass(frozen=True)
class ClosedFunction:
    """A function of a graph that Dynamo made: it has no free variables, and Dynamo has accepted it.

    Attributes:
        is_identity: whether it returns its first argument, and does nothing else.
    """

    call: Callable[..., Any]
    is_identity: bool = False

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


def _cond(_: bool | None, pred: Any, true_fn: Callable, false_fn: Callable, operands: Sequence) -> Any:
    return true_fn(*operands) if pred else false_fn(*operands)


def _while_loop(
    is_followed: bool | None, cond_fn: Callable, body_fn: Callable, carried: Sequence, additional: Sequence, **_: Any
) -> Any:
    """``while_loop`` as a loop; eager's backward treats carries without ``requires_grad`` as constants at each step."""
    values, is_run, grads = carried, False, torch.is_grad_enabled()
    constant = [grads and isinstance(each, torch.Tensor) and not each.requires_grad for each in carried]
    while cond_fn(*values, *additional):
        given = (each.detach() if is_one else each for each, is_one in zip(values, constant, strict=True))
        values, is_run = body_fn(*given, *additional), True
    if is_run and not is_followed:
        return values
    if grads and not is_run and is_followed is not False:
        raise _NotExactError("its body does not run, where eager's backward is that of one step")
    form = torch.contiguous_format if is_followed else torch.preserve_format  # eager returns a row of a stack
    return tuple(each.clone(memory_format=form) if isinstance(each, torch.Tensor) else each for each in values)


def _map(_: bool | None, function: Callable, xs: Sequence[torch.Tensor], others: Sequence) -> Any:
    return _stacked([function(*(each.select(0, step) for each in xs), *others) for step in range(len(xs[0]))])


def _scan(
    _: bool | None, combine_fn: Callable, init: Sequence, xs: Sequence[torch.Tensor], additional_inputs: Sequence = ()
) -> Any:
    carry, outs, is_flat = init, [], isinstance(combine_fn, ClosedFunction)
    for step in range(len(xs[0])):
        given = (*pytree.tree_leaves(carry), *(each.select(0, step) for each in xs), *additional_inputs)
        made = combine_fn(*given)
        carry, out = (made[: len(init)], made[len(init) :]) if is_flat else made
        outs.append(out)
    stacked = pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, _stacked(outs))
    return (*carry, *stacked) if is_flat else (carry, stacked)


def _stacked(trees: Sequence[Any]) -> Any:
    leaves = zip(*map(pytree.tree_leaves, trees), strict=True)
    return pytree.tree_unflatten([torch.stack(each) for each in leaves], pytree.tree_structure(trees[0]))


# ``flex_attention``: the operands of torch's higher-order operator → attention written out, which autograd follows.
#
# torch's operator on a CPU has a forward alone, by the same formula. Scores are float32, of float64 tensors float64.
# Four nested ``vmap`` (batch, head, query, key) call ``score_mod`` and ``mask_mod``, in which indices that are tensors
# take elements. Rows that are masked completely give zeros, -inf for their logsumexp, and no gradient.
#
# Where there is a mask alone, and nothing reads logsumexp and maximum, a GPU's kernel of
# ``scaled_dot_product_attention`` computes the output of narrow types: it holds a tile of the scores.


_attention = find("torch._C._nn.scaled_dot_product_attention")
"""torch's own, where a user has replaced ``F.scaled_dot_product_attention``."""

_INDICES = (None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)
"""The axis over which each ``vmap`` goes of batch, head, query and key; the innermost one first."""


def attention(
    _: bool | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    block_mask: Sequence[Any],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: Sequence[Any] = (),
    mask_mod_other_buffers: Sequence[Any] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator's results.

    Args:
        query: ``(B, Hq, L, E)``.
        key: ``(B or 1, Hkv, S, E)``, Hkv a divisor of Hq.
        value: ``(B or 1, Hkv, S, Ev)``.
        score_mod: a score, four indices and ``score_mod_other_buffers`` → a score.
        block_mask: of ``BlockMask.as_tuple()``, whose last element takes four indices and ``mask_mod_other_buffers``.
        scale: of the products of queries and keys.
        kernel_options: of a GPU's kernels.

    Returns:
        The output ``(B, Hq, L, Ev)``, whose axes lie in memory as ``query``'s axes; logsumexp and maximum of the
        scores ``(B, Hq, L)``, divided by ln 2; both empty where nothing reads them.
    """
    kind, dtype = query.device.type, query.dtype
    if torch.is_autocast_enabled(kind) and flex_attention_casts(kind):
        given = (_cast(each, kind) for each in (query, key, value))
        rest = kernel_options, score_mod_other_buffers, mask_mod_other_buffers
        with torch.autocast(kind, enabled=False):
            return attention(_, *given, score_mod, block_mask, scale, *rest)
    batch, heads, rows, _ = query.shape
    working = torch.float64 if dtype == torch.float64 else torch.float32
    key, value = (_of_all_heads(each, batch, heads) for each in (key, value))
    places = [torch.arange(size, device=query.device) for size in (batch, heads, rows, key.shape[2])]
    with indexing_by_tensors():
        is_seen = _over_all(block_mask[-1], (), mask_mod_other_buffers)(*places, *mask_mod_other_buffers)
    if _is_of_kernels(query, score_mod) and (OUTPUT_ALONE in kernel_options or returns_output_alone()):
        made = _laid_out(_by_kernel(query, key, value, is_seen, scale), query)
        return made, made.new_empty(0, dtype=working), made.new_empty(0, dtype=working)
    scores = (query.to(working) @ key.to(working).transpose(-2, -1) * scale).to(working)
    with indexing_by_tensors():
        scores = _over_all(score_mod, (0,), score_mod_other_buffers)(scores, *places, *score_mod_other_buffers)
    scores = torch.where(is_seen, scores, torch.full((), -math.inf, dtype=working, device=query.device))
    made = aten._safe_softmax.default(scores, -1).to(dtype) @ value.to(dtype)
    top = scores.detach().amax(-1, keepdim=True)
    shift = torch.where(top == -math.inf, 0.0, top)
    total = (scores - shift).exp().sum(-1)
    is_empty = total == 0
    logsumexp = torch.where(is_empty, -math.inf, torch.where(is_empty, 1.0, total).log() + shift.squeeze(-1))
    return _laid_out(made, query), logsumexp / math.log(2), top.squeeze(-1) / math.log(2)


def _is_of_kernels(query: torch.Tensor, score_mod: Callable) -> bool:
    """Whether a GPU's attention kernel computes the output: of bfloat16 or float16, without a ``score_mod``."""
    is_identity = score_mod is no_score_mod or (isinstance(score_mod, ClosedFunction) and score_mod.is_identity)
    return is_identity and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _by_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """The output by ``scaled_dot_product_attention``; ``is_seen``, the mask, is ``(B, Hq, L, S)``.

    Axes on which the mask does not depend, along which ``vmap`` has expanded it, are held once. A row without a key
    sees all keys, and becomes zero: so no gradient of it is NaN.
    """
    for axis in (0, 1):
        is_seen = is_seen.narrow(axis, 0, 1) if is_seen.stride(axis) == 0 else is_seen
    has_key = is_seen.any(-1, keepdim=True)
    made = _attention(query, key, value, is_seen | ~has_key, scale=scale)
    return torch.where(has_key, made, 0.0)


def _cast(x: torch.Tensor, kind: str) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(kind))


def _of_all_heads(x: torch.Tensor, batch: int, heads: int) -> torch.Tensor:
    if heads != x.shape[1]:
        x = x[:, :, None].expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)
    return x.expand(batch, -1, -1, -1)


def _over_all(function: Callable[..., Any], first: tuple, others: Sequence[Any]) -> Callable[..., Any]:
    """A function of four indices → the same, of all batches, heads, queries and keys at once."""
    for axes in _INDICES:
        function = torch.vmap(function, in_dims=(*first, *axes, *(None for _ in others)))
    return function


def _laid_out(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor whose axes lie in memory as another one's do, where its last axis then is dense; else that innermost."""
    order = sorted(range(x.ndim), key=like.stride, reverse=True)
    last = x.ndim - 1
    if any(x.shape[axis] != 1 for axis in order[order.index(last) + 1 :]):
        order = [*(axis for axis in order if axis != last), last]
    return torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device).copy_(x)


# Operators


_NOTHING_WRITTEN = "mutated_arg_indices", ""
"""An argument that ``map`` has since torch 2.14; its own Dynamo takes none."""

_FORMS: dict[str, Callable[..., Any]] = {"cond": _cond, "while_loop": _while_loop, "map_impl": _map, "scan": _scan}
_FORMS["flex_attention"] = attention
"""Name of a higher-order operator → its replacement, which takes whether autograd tracks the operator (``None``: it is
inside of another one) and the operator's arguments."""
_FOLLOWED = {"flex_attention": 2}
"""Name of a higher-order operator → how many of its results autograd tracks, where that is not all."""


def has_form(op: Any) -> bool:
    """Whether a recorded run can hold a higher-order operator."""
    return op.name() in _FORMS


class TorchFunctions(TorchFunctionMode):
    """While active, this thread's torch functions are calls of ``handle(mode, call, func, types, args, kwargs)``.

    ``call`` calls a function that may run the user's code; others run unwatched. The mode itself is an argument, since
    one that its handler refers to would be a cycle, in which weak references to parameters outlive the run.
    """

    def __init__(self, handle: Callable[..., Any]) -> None:
        super().__init__()
        self._handle = handle

    def __torch_function__(self, func, types, args=(), kwargs=None):
        with unwatched() as quiet:
            return self._handle(self, quiet.call, own_function(func), types, args, kwargs or {})


def as_python() -> TorchFunctions:
    """While active, higher-order operators run as Python control flow, without Dynamo."""
    return TorchFunctions(_as_python)


def _as_python(mode: TorchFunctions, call: Callable, func: Any, _: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    if is_check_of_devices(func):
        return False
    if isinstance(func, HigherOrderOperator) and is_indexing(func, args):
        return call(aten.index.Tensor, args[1:], {})
    if not isinstance(func, HigherOrderOperator) or func.name() not in _FORMS:
        return call(func, args, kwargs)
    with mode:
        return call(_FORMS[func.name()], (None, *args), kwargs)


class Followed(torch.autograd.Function):
    """Results of a higher-order operator → the same, with zero gradients for its unused operands."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unused = [(each.shape, each.dtype, each.device) for each in tensors[count:]]
        return tuple(each.clone() for each in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.unused)
        return None, *grads, *zeros


class HigherOrder:
    """Runs the higher-order operators of a run as Python control flow; ``recorder``: the run's."""

    def __init__(self, recorder: OperatorRecorder) -> None:
        self._recorder, self._is_inside = recorder, False

    def called(
        self, mode: TorchFunctions, call: Callable[..., Any], op: Any, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Runs an operator's replacement by ``call(form, args, kwargs)`` in the run's ``mode`` → its result.

        Raises:
            UnsupportedModule: the operator is unknown or inside of a transform, Dynamo refuses its functions, or its
                backward in eager differs from its forward.
        """

        def run(*given: Any) -> Any:
            with mode:
                return call(*given)

        if is_indexing(op, args):
            return run(aten.index.Tensor, args[1:], {})
        reason = "a higher-order operator, whose function torch traces by itself"
        if op.name() in _FORMS and innermost_transform() is None:
            try:
                return self._call(op, args, kwargs, run)
            except _NotExactError as error:
                reason = str(error)
        where = line_of_forward()
        raise UnsupportedModule("", [Unsupported(op.name(), where, reason)])

    def _call(self, op: Any, args: tuple, kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        form, record, answers = _FORMS[op.name()], self._recorder.record, self._recorder.answers
        kwargs = {name: value for name, value in kwargs.items() if (name, value) != _NOTHING_WRITTEN}
        if self._is_inside:
            return run(form, (None, *args), kwargs)
        operands = _traced(op, args, kwargs) if answers is None else []
        is_followed = torch.is_grad_enabled() and any(each.requires_grad for each in operands)
        numbers = answers.followed[len(record.followed)] if answers is not None else [] if is_followed else None
        start = len(record.rows)
        with while_active(self, _is_inside=True):
            result = run(form, (numbers is not None, *args), kwargs)
        record.followed.append(numbers)
        with no_torch_function():
            return result if numbers is None else self._followed(op, result, operands, numbers, start)

    def _followed(self, op: Any, result: Any, operands: Sequence[torch.Tensor], numbers: list[int], start: int) -> Any:
        """The result of an operator that autograd tracks, linked to its unused operands.

        Args:
            op: the operator.
            operands: in the real run, the tensors that eager's Function takes.
            numbers: values of operands with zero gradients; the real run appends them.
            start: the first row of its functions.
        """
        recorder, is_first = self._recorder, self._recorder.answers is None
        leaves, spec = pytree.tree_flatten(result)
        places = [n for n, each in enumerate(leaves) if isinstance(each, torch.Tensor) and each.is_floating_point()]
        places = places[: _FOLLOWED.get(op.name())]
        results = [leaves[n] for n in places]
        if is_first:
            if any(row.draws[0] != row.draws[1] for row in recorder.record.rows[start:]):
                raise _NotExactError("draws random numbers, and eager draws others when its backward runs it again")
            operands = [each for each in operands if each.requires_grad and each.is_floating_point()]
            with recorder.pause():
                unused = _unreached(results, operands)
            if not unused and not all(each.requires_grad for each in results):
                unused = operands[:1]
            numbers += [recorder.values.of(each).number for each in unused]
        else:
            unused = [recorder.told(number) for number in numbers]
        if unused and results:
            for n, each in zip(places, Followed.apply(len(results), *results, *unused), strict=True):
                leaves[n] = each
        return pytree.tree_unflatten(leaves, spec)


_INSIDE = re.compile(r"with fake tensors: .*: got (\w+\(.*\))$", re.DOTALL | re.MULTILINE)
"""The error of an operator that Dynamo runs on fake tensors, in the text of Dynamo's own."""


def _traced(op: Any, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((args, kwargs))
    if any(isinstance(each, ClosedFunction) for each in leaves):
        return [each for each in leaves if isinstance(each, torch.Tensor)]
    try:
        with functions_of_torchs():
            return lifted_operands(op, args, kwargs)
    except Exception as error:  # Dynamo may raise any error for a user's function
        swallowed(error)
        first, *rest = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        said = f"{first} {rest[0]}" if first.endswith(":") and rest else first
        said += "".join(f": {each}" for each in _INSIDE.findall(str(error)))
        raise _NotExactError(f"is refused by Dynamo, by which eager runs it: {type(error).__name__}: {said}") from error


def _unreached(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The operands that the results' autograd graphs do not reach."""
    edge_of = torch.autograd.graph.get_gradient_edge
    wanted = {(each.node, each.output_nr): operand for operand in operands for each in [edge_of(operand)]}
    edges = [(each.node, each.output_nr) for result in results if result.requires_grad for each in [edge_of(result)]]
    seen = set()
    while edges and wanted:
        edge = edges.pop()
        if wanted.pop(edge, None) is None and edge[0] not in seen:
            seen.add(edge[0])
            edges += [each for each in edge[0].next_functions if each[0] is not None]
    return [*wanted.values()]
