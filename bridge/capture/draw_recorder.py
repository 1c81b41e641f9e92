"""Recorder of random draws: operators that run → a :class:`Draw` for each that draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from bridge.base.errors import Unsupported, line_of
from bridge.base.torch_internals import FakeTensor, OpOverload, aten, current_graph_task_id, schema, storage_id
from bridge.base.torch_recording import unrecorded
from bridge.base.torch_shapes import hint
from bridge.capture.autograd_uses import DRAWS_ANEW, draws_anew
from bridge.capture.generator_watch import unwatched
from bridge.capture.isolated_rng import TORCHS, IsolatedRNG, draws, with_generator
from bridge.capture.observation import Draw, DropoutOperand, Parameter
from bridge.capture.passes.alias_analysis import ROW
from bridge.capture.passes.attention import (
    attends_by_products,
    attention_advance,
    attention_rate,
    is_attention,
)
from bridge.capture.passes.preserved_ops import COMPUTED_DRAWS, CUDA_ATTENTION, SLOPE_DRAWS
from bridge.capture.rows import Row, form_of

__all__ = ["UNTOLD", "DrawRecorder", "draws_at", "match_draws"]

_OWN_GENERATOR = "draw from torch's default generator, or outside of the module and pass the numbers in"


_DEVICE = torch.ops.prim.device.default

UNTOLD = "draws random numbers, and has no tag that says so"


class DrawRecorder:
    """While active, appends a :class:`Draw` for every random operator that runs; tells what it cannot express.

    ``differentiates``: whether one ran in a backward.
    ``inputs``: module tensors and arguments, in whose memory a dropout may read. ``real``: whether operators compute;
    then draws come from generators of their own, and operators that are not torch's, whose tags may say too little, are
    watched. ``on_cast``: called with each tensor that is about to be cast.
    """

    def __init__(
        self,
        draws: list[Draw],
        complain: Callable[[str, str], None],
        inputs: Sequence[torch.Tensor] = (),
        real: bool = False,
        on_cast: Callable[[torch.Tensor], None] = lambda tensor: None,
    ):
        self._real, self._on_cast = real, on_cast
        self._mode: IsolatedRNG | None = None
        self._inputs: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for index, tensor in enumerate(inputs):
            self._inputs.setdefault(storage_id(tensor), []).append((index, tensor))
        self.draws = draws
        self.complain = complain
        self.underived: Callable[[str], None] = lambda op: None
        self.differentiates = False
        self.in_backward = False

    def __enter__(self) -> DrawRecorder:
        self._mode = IsolatedRNG(self._called, self._real).__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        mode, self._mode = self._mode, None
        mode.__exit__(*raised)

    def _advance(self) -> int | None:
        """How far the last draw moved its generator, if that can be told."""
        return self._mode.advance

    def _called(self, call: Callable[..., Any], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func is _DEVICE:  # two of three calls: torch asks fake tensors for it all the time
            (tensor,) = args
            if type(tensor) is FakeTensor and not tensor.fake_mode.in_kernel_invocation:
                return tensor.fake_device
            with unwatched():
                return func(*args)
        if func is aten._to_copy.default:
            self._on_cast(args[0])
        before = None if func.namespace in TORCHS or not self._real else self._mode.states()
        if before is not None and schema(func).is_mutable:
            self.complain(str(func), "writes into its arguments, by an operator that is not torch's")
        result = unrecorded(call, args, kwargs)
        if before is not None and not all(map(torch.equal, before, self._mode.states())):
            self.complain(str(func), UNTOLD)
        if current_graph_task_id() != -1:
            self.differentiates = True
            if not torch.is_grad_enabled() and not self.in_backward:
                self.in_backward = True  # said once
                reason = "runs autograd inside forward: its result is a constant"
                self.complain("torch.autograd.grad or backward", reason)
        if draws(func) and not _draws_nothing(func, args, kwargs):
            self.record(func, args, kwargs, result)
        return result

    def record(self, func, args, kwargs, result) -> None:
        """Appends the draw of an operator that has run."""
        if draws_anew():
            self.complain(str(func), DRAWS_ANEW)
        if func in CUDA_ATTENTION:
            self._record_attention(func, *args[:3], attention_rate(func, args, kwargs), result[0])
            return
        if func in _OF_CUDNN:
            self.complain(*_DROPPED_BY_CUDNN)
            return
        if func in SLOPE_DRAWS:
            self._record_slopes(func, *args[:4])
            return
        operand = None
        if func is aten.native_dropout.default:  # on a GPU, or called by name: the mask is what was drawn
            if not 0 < args[1] < 1:  # torch.nn.functional.dropout does not get here
                self.complain(str(func), f"draws a mask for the rate {args[1]}, which says what it is")
                return
            operand = self._operand(args[0])
        elif with_generator(func) is None:
            self.complain(str(func), "draws inside of a kernel that takes no generator")
            return
        if isinstance(result, tuple):
            result = result[0 if operand is None else 1]
        # the dispatcher drops arguments that equal their default
        defaults = [a.default_value for a in schema(func).arguments[len(args) :] if not a.kwarg_only]
        args = (*args, *(value for value in defaults if value is not None))
        if str(func) == "aten.bernoulli.p" and args[0].requires_grad:
            self.underived(str(func))
        rest = args[1:] if _only_filled(func) else args
        if kwargs.get("generator") is not None:
            self.complain(str(func), "a random draw from a generator of its own", _OWN_GENERATOR)
            return
        if any(isinstance(value, torch.Tensor) for value in (*rest, *kwargs.values())):
            if func not in COMPUTED_DRAWS:
                self.complain(str(func), "a random draw whose distribution is computed")
                return
            rest = [_parameter(value) if isinstance(value, torch.Tensor) else value for value in rest]
        shape, given = tuple(result.shape), tuple(kwargs.items())
        form = str(func), shape, result.stride(), result.dtype, tuple(rest), given, result.device, operand
        self.draws.append(Draw(*form, advance=self._advance()))

    def _record_attention(self, func, query, key, value, rate, out) -> None:
        """The state that its kernel begins with; where products take the kernel's place, the mask of the weights."""
        shape, stride, dtype = tuple(out.shape), (), out.dtype
        if attends_by_products(func, query, key, value, rate):
            _, heads, rows, columns = shape = (*query.shape[:3], key.shape[2])
            stride, dtype = (heads * rows * columns, rows * columns, columns, 1), torch.bool
        measured = self._advance()
        advance = attention_advance(func, query, key) if measured is None else measured
        self.draws.append(Draw(str(func), shape, stride, dtype, (rate,), (), out.device, advance=advance))

    def _record_slopes(self, func, x, slopes, lower, upper) -> None:
        """What was drawn is what the operator multiplies by, which it writes into its second argument."""
        if not slopes.is_contiguous():
            self.complain(str(func), "draws slopes into memory that is not contiguous")
            return
        form = tuple(slopes.shape), slopes.stride(), slopes.dtype, (_parameter(x), lower, upper, True), ()
        self.draws.append(Draw(str(SLOPE_DRAWS[0]), *form, slopes.device, advance=self._advance()))

    def _operand(self, tensor: torch.Tensor) -> DropoutOperand:
        """Where a tensor lies: behind the beginning of the input that begins last before it, of those in its memory."""
        offset = tensor.storage_offset() * tensor.element_size()
        inputs = self._inputs.get(storage_id(tensor), [])
        begins = [(first.storage_offset() * first.element_size(), -index) for index, first in inputs]
        if not begins:
            return DropoutOperand(tensor.dtype, tensor.stride(), offset, None)
        begin, index = max((each for each in begins if each[0] <= offset), default=min(begins))
        return DropoutOperand(tensor.dtype, tensor.stride(), offset - begin, -index)


_OF_CUDNN = (aten._cudnn_rnn.default, aten._cudnn_init_dropout_state.default)
_DROPPED_BY_CUDNN = (
    "a recurrent layer with dropout between its layers",
    "on a GPU its numbers are cuDNN's own, which nothing else computes alike",
    "compute the layer in float32, outside of autocast, with dropout in a module of its own",
)


def _parameter(value: torch.Tensor) -> Parameter:
    return Parameter(tuple(value.shape), value.dtype, value.stride())


def _only_filled(func) -> bool:
    """Whether the operator's first tensor only says what to fill, and is no parameter of the distribution."""
    _, packet, _ = str(func).split(".")
    return packet.endswith(("_", "_like", "dropout")) or str(func) == "aten.bernoulli.p"


def _draws_nothing(func, args, kwargs) -> bool:
    if func is aten.native_dropout.default:  # train=None is true
        return args[2] is False or args[0].numel() == 0
    if func is aten._cudnn_rnn.default:  # layers, dropout, training
        return args[9] == 1 or not (args[11] and args[12])
    if func is aten._cudnn_init_dropout_state.default:
        return not (args[0] and args[1])
    if func in SLOPE_DRAWS:  # training is the fifth argument
        return not any(args[4:5])
    return is_attention(func) and not attention_rate(func, args, kwargs)


# Draws of a record: each node of the functional graph that draws → which of eager's draws it makes.
#
# The nodes that come from one row draw in the order in which that row drew.


def match_draws(
    drawing: Sequence[fx.Node], rows: Sequence[Row], made: Sequence[Draw], forward: str
) -> tuple[dict[str, int], list[Unsupported]]:
    """The draw of every node that draws, by its name; and what was drawn otherwise.

    Args:
        drawing: the nodes, in order, those among them whose numbers nobody reads.
        made: eager's draws.
        forward: what to name where no source line is known, as in ``"Block.forward"``.
    """
    nodes_of: dict[int, list[fx.Node]] = {}
    for node in drawing:
        nodes_of.setdefault(node.meta[ROW], []).append(node)
    draw_of: dict[str, int] = {}
    problems = []
    for index, row in enumerate(rows):
        nodes, own = nodes_of.get(index, []), range(*row.draws)
        if len(nodes) != len(own) or not all(map(_may_be, nodes, (made[draw] for draw in own))):
            where = forward if row.where is None else line_of(row.where)
            eager = [made[draw] for draw in own]
            reason = f"{len(nodes)} random nodes in the graph for what eager draws: {eager}"
            problems.append(Unsupported(str(row.op), where, reason))
        draw_of.update((node.name, draw) for node, draw in zip(nodes, own, strict=False))
    return draw_of, problems


def _may_be(node: fx.Node, draw: Draw) -> bool:
    """Whether a node may make a draw: it gives as many numbers."""
    value: Any = node.meta["val"]
    return not isinstance(value, torch.Tensor) or form_of(value).shape == tuple(map(hint, draw.shape))


def draws_at(node: fx.Node) -> bool:
    """Whether a node draws."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if node.target is aten.native_dropout.default:
        value, rate, train = node.args
        return bool(train) and 0 < rate < 1 and value.meta["val"].numel() > 0
    if node.target in SLOPE_DRAWS:
        return any(node.args[4:5])
    return not is_attention(node.target) or attention_rate(node.target, node.args, node.kwargs) > 0
