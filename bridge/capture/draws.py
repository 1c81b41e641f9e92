"""Random draws of a run: operators → records of their draws, without moving the default generators of CPU and GPUs.

Restoring a default generator's state after the run would be enough in a process with one thread. If another thread
draws meanwhile, restoring the state would repeat its numbers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import fx

from autodiff.extents import sample_of
from bridge.base.devices import HOST, current_device
from bridge.base.errors import BY_DRAWS, Unsupported, line_of
from bridge.base.generators import default_generator, generator_device, offset_of, on_side_states
from bridge.base.torch_cuda import attention_may_be_formula, memory_of
from bridge.base.torch_internals import (
    OpOverload,
    aten,
    current_graph_task_id,
    has_storage,
    overload_packet,
    pytree,
    schema,
    storage_id,
)
from bridge.base.torch_recording import DispatchMode, unrecorded
from bridge.base.torch_shapes import hint
from bridge.capture.autograd_uses import DRAWS_ANEW, draws_anew
from bridge.capture.observation import Draw, DropoutOperand, Parameter, is_fused_attention
from bridge.capture.passes.alias_analysis import ROW
from bridge.capture.passes.decompositions import COMPUTED_DRAWS, CUDA_ATTENTION, SLOPE_DRAWS
from bridge.capture.rows import Row, form_of, written_operands
from bridge.guards import in_its_place

TORCHS = ("aten", "prims", "tvm_dispatch")
"""Namespaces of operators whose tags say whether they draw."""


class IsolatedRNG(DispatchMode):
    """While active, this thread's draws from a default generator come from a private generator with the same state.

    Args:
        restores: whether memory that operators write is restored at the end.
        run: runs each operator, as ``run(mode, call, func, args, kwargs)``: :meth:`DrawRecorder.called`. It gets the
            mode, since one that it refers to would be a cycle, in which the run's tensors outlive the run.

    An operator that takes no generator (``native_dropout``, which is a GPU's dropout) moves the default one, whose
    state is restored. At the end, the state of a generator that the code itself passes to an operator is restored.

    Attributes:
        advance: how far the last draw moved a GPU's offset.
        passed: generators that were passed to operators, and their states before.
    """

    advance: int | None = None

    def __init__(self, *, restores: bool = False, run: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self._restores, self._run = restores, run
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        # the current states, so that a branch on a draw goes as in eager's next call
        self._generators = {device: _twin(device) for device in {HOST, generator_device(current_device())}}
        self.passed: list[tuple[torch.Generator, torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        call = func
        for tensor in written_operands(func, args, kwargs) if self._restores else ():
            if isinstance(tensor, torch.Tensor) and has_storage(tensor) and storage_id(tensor) not in self._before:
                storage = tensor.untyped_storage()
                self._before[storage_id(tensor)] = storage, storage.clone()
        if draws(func) or func.namespace not in TORCHS:
            call = partial(self._drawn if draws(func) else self._on_side, func)
        return call(*args, **kwargs) if self._run is None else self._run(self, call, func, args, kwargs)

    def _drawn(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if (passed := kwargs.get("generator")) is not None:
            self.passed.append((passed, passed.get_state()))
            return func(*args, **kwargs)
        device = generator_device(_device(args, kwargs))
        if device not in self._generators:
            self._generators[device] = _twin(device)
        generator = self._generators[device]
        before = offset_of(generator)
        if (taker := with_generator(func)) is not None:
            result = taker(*args, **{**kwargs, "generator": generator})
        else:
            with on_side_states(default_generator(device), generator):
                result = func(*args, **kwargs)
        self.advance = None if before is None else offset_of(generator) - before
        return result

    def _on_side(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's operator, which may draw without a tag."""
        with ExitStack() as stack:
            for device, generator in self._generators.items():
                stack.enter_context(on_side_states(default_generator(device), generator))
            return func(*args, **kwargs)

    def states(self) -> list[torch.Tensor]:
        """The states of the private generators."""
        return [generator.get_state() for generator in self._generators.values()]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for generator, state in reversed(self.passed):
            generator.set_state(state)
        for storage, numbers in self._before.values():
            storage.copy_(numbers)


def _twin(device: torch.device) -> torch.Generator:
    twin = torch.Generator(device)
    twin.set_state(default_generator(device).get_state())
    return twin


def _device(args: tuple, kwargs: dict[str, Any]) -> torch.device:
    """The device on which an operator draws: its ``device`` argument, or its first tensor's device."""
    if (told := kwargs.get("device")) is not None:
        return torch.device(told)
    tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return next((tensor.device for tensor in tensors), HOST)


@functools.cache
def draws(func: Any) -> bool:
    """Whether an operator's tag says that it draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


@functools.cache
def with_generator(func: Any) -> Any:
    """The operator, or its overload with only a generator argument more; ``None`` if neither takes a generator."""

    def arguments(operator: Any) -> list[tuple[str, str]]:
        return [(argument.name, str(argument.type)) for argument in schema(operator).arguments]

    generator, wanted = ("generator", "Optional[Generator]"), arguments(func)
    if generator in wanted:
        return func
    packet = overload_packet(func)
    for overload in map(partial(getattr, packet), packet.overloads()):
        found = arguments(overload)
        if generator in found and [argument for argument in found if argument != generator] == wanted:
            return overload
    return None


class unwatched:
    """While active, suspends the interpreter's profiler that watches forward (:mod:`bridge.capture.generator_watch`).

    It would be called for each of the thousands of calls inside of torch and the bridge.
    """

    __slots__ = ("_listener",)

    def __enter__(self) -> unwatched:
        listener = sys.getprofile()  # the user's profiler, which may be no function, stays
        self._listener = listener if str(getattr(listener, "__module__", "")).startswith("bridge.") else None
        if self._listener is not None:
            sys.setprofile(None)
        return self

    def __exit__(self, *error: object) -> None:
        if self._listener is not None:
            sys.setprofile(self._listener)

    @in_its_place
    def call(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls ``func`` with the profiler on, because the user's code may run in it → its result."""
        if self._listener is None:
            return func(*args, **kwargs)
        sys.setprofile(self._listener)
        try:
            return func(*args, **kwargs)
        finally:
            sys.setprofile(None)


# Recorder of random draws: operators that run → a :class:`Draw` for each random one.


_OWN_GENERATOR = "draw from torch's default generator, or outside of the module and pass the numbers in"


UNTOLD = "draws random numbers, and has no tag that says so"


class DrawRecorder:
    """Appends a :class:`Draw` for every random operator; calls ``complain`` for draws that it cannot express.

    Args:
        inputs: module tensors and arguments, in whose memory a dropout may read.

    Attributes:
        differentiates: whether an operator ran in a backward.
        inside: runs the operators of an opaque Function (:mod:`bridge.capture.opaque_functions`), while it runs.
    """

    inside: Any = None

    def __init__(
        self, draws: list[Draw], complain: Callable[[str, str], None], inputs: Sequence[torch.Tensor] = ()
    ) -> None:
        self._inputs: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for index, tensor in enumerate(inputs):
            self._inputs.setdefault(storage_id(tensor), []).append((index, tensor))
        self.draws = draws
        self.complain = complain
        self.underived: Callable[[str], None] = lambda op: None
        self.differentiates = False

    def called(self, mode: IsolatedRNG, call: Callable, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs an operator → its result. Operators that are not torch's are watched, because their tags may be
        incomplete."""
        before = None if func.namespace in TORCHS else mode.states()
        if before is not None and schema(func).is_mutable:
            self.complain(str(func), "writes into its arguments, by an operator that is not torch's")
        run = partial(unrecorded, call, args, kwargs)
        result = run() if self.inside is None else self.inside.called(run, args, kwargs)
        if before is not None and not all(map(torch.equal, before, mode.states())):
            self.complain(str(func), UNTOLD)
        self._ran(func, args, kwargs, result, mode.advance)
        return result

    def on_fakes(self, mode: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs an operator on the fake tensors of a mode → its result."""
        result = unrecorded(mode.alone, (func, *args), kwargs)
        self._ran(func, args, kwargs, result, None)
        return result

    def _ran(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any, advance: int | None) -> None:
        if current_graph_task_id() != -1 and self.inside is None:
            self.differentiates = True
        if draws(func) and not _draws_nothing(func, args, kwargs):
            self.record(func, args, kwargs, result, advance)

    def record(self, func, args, kwargs, result, advance) -> None:
        """Appends the draw of an operator that has run; ``advance``: as in :class:`IsolatedRNG`."""
        if draws_anew():
            self.complain(str(func), DRAWS_ANEW)
        if func in CUDA_ATTENTION:
            self._record_attention(func, *args[:3], attention_rate(func, args, kwargs), result[0], advance)
            return
        if func in _OF_CUDNN:
            self.complain(*_DROPPED_BY_CUDNN)
            return
        if func is aten._standard_gamma.default and result.device.type == "cuda":
            self.complain(str(func), "draws on a GPU, where its numbers have not been shown to be eager's")
            return
        if func in SLOPE_DRAWS:
            self._record_slopes(func, *args[:4], advance)
            return
        operand = None
        if func is aten.native_dropout.default:  # on a GPU, or called by name: the draw is the mask
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
        if func in _UNDERIVED and args[0].requires_grad and torch.is_grad_enabled():
            self.underived(str(func))
        rest = args[1:] if _only_filled(func) else args
        if kwargs.get("generator") is not None:
            self.complain(str(func), BY_DRAWS[2], _OWN_GENERATOR)
            return
        if any(isinstance(value, torch.Tensor) for value in (*rest, *kwargs.values())):
            if func not in COMPUTED_DRAWS:
                self.complain(str(func), "a random draw whose distribution is computed")
                return
            rest = [_parameter(value) if isinstance(value, torch.Tensor) else value for value in rest]
        shape, given = tuple(result.shape), tuple(kwargs.items())
        form = str(func), shape, result.stride(), result.dtype, tuple(rest), given, result.device, operand
        self.draws.append(Draw(*form, advance=advance))

    def _record_attention(self, func, query, key, value, rate, out, measured) -> None:
        """Appends the draw of a fused attention kernel, or of the weights' mask if products replace the kernel."""
        shape, stride, dtype = tuple(out.shape), (), out.dtype
        if attends_by_products(func, query, key, value, rate):
            _, heads, rows, columns = shape = (*query.shape[:3], key.shape[2])
            stride, dtype = (heads * rows * columns, rows * columns, columns, 1), torch.bool
        advance = attention_advance(func, query, key) if measured is None else measured
        self.draws.append(Draw(str(func), shape, stride, dtype, (rate,), (), out.device, advance=advance))

    def _record_slopes(self, func, x, slopes, lower, upper, advance) -> None:
        """Appends the draw of random slopes, which the operator writes into its second argument (``rrelu``)."""
        if not slopes.is_contiguous():
            self.complain(str(func), "draws slopes into memory that is not contiguous")
            return
        form = tuple(slopes.shape), slopes.stride(), slopes.dtype, (_parameter(x), lower, upper, True), ()
        self.draws.append(Draw(str(SLOPE_DRAWS[0]), *form, slopes.device, advance=advance))

    def _operand(self, tensor: torch.Tensor) -> DropoutOperand:
        """The place of a dropout's operand: relative to the last input in its memory that begins at or before it."""
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


_UNDERIVED = (aten.bernoulli.p, aten._sample_dirichlet.default)
"""Draws of a tensor whose derivative torch does not have."""


def _parameter(value: torch.Tensor) -> Parameter:
    return Parameter(tuple(value.shape), value.dtype, value.stride())


def _only_filled(func) -> bool:
    """Whether the operator's first tensor only gives memory or a shape, and is no parameter of the distribution."""
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
    return is_fused_attention(func) and not attention_rate(func, args, kwargs)


# Draws of a record: each node of the functional graph that draws → which of eager's draws it makes.
#
# The nodes that come from one row draw in the order in which that row drew.


def match_draws(
    drawing: Sequence[fx.Node], rows: Sequence[Row], made: Sequence[Draw], forward: str
) -> tuple[dict[str, int], list[Unsupported]]:
    """Matches nodes that draw with eager's draws → (node name → index of its draw, refusals of rows that differ).

    Args:
        drawing: the nodes, in order, unused ones included.
        made: eager's draws.
        forward: the name for messages without a line, as in ``"Block.forward"``.
    """
    nodes_of: dict[int, list[fx.Node]] = {}
    for node in drawing:
        nodes_of.setdefault(node.meta[ROW], []).append(node)
    draw_of: dict[str, int] = {}
    problems = []
    for index, row in enumerate(rows):
        nodes, own = nodes_of.get(index, []), range(*row.draws)
        if len(nodes) != len(own) or not all(map(_may_be, nodes, (made[draw] for draw in own))):
            where = line_of(row.where, forward)
            eager = [made[draw] for draw in own]
            reason = f"{len(nodes)} random nodes in the graph for what eager draws: {eager}"
            problems.append(Unsupported(str(row.op), where, reason))
        draw_of.update((node.name, draw) for node, draw in zip(nodes, own, strict=False))
    return draw_of, problems


def _may_be(node: fx.Node, draw: Draw) -> bool:
    """Whether a node's result has the shape of a draw."""
    value: Any = node.meta["val"]
    return not isinstance(value, torch.Tensor) or form_of(value).shape == tuple(map(hint, draw.shape))


def draws_at(node: fx.Node) -> bool:
    """Whether a node draws."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or not draws(node.target):
        return False
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    is_known = node.target is aten.native_dropout.default and not 0 < args[1] < 1  # eager's dropout does not draw it
    return not (is_known or _draws_nothing(node.target, args, kwargs))


# Fused attention on CUDA: a call of a torch operator → its dropout rate, how far its kernel moves the generator's
# offset, and whether matrix products compute it instead of the kernel.


_EFFICIENT = aten._scaled_dot_product_efficient_attention.default


_RATE = "dropout_p"
_MOST_WEIGHTS = 2
"""The largest ratio of the attention weights' size to the size of queries, keys, values and results at which products
are faster and their memory does not matter: 512 rows of 64 elements each."""
_PART_OF_MEMORY = 256
"""One attention's weights take at most this fraction (1 / 256) of the GPU's memory."""
_FLASH = 32
"""How far flash attention moves a generator for each head of each element of a batch."""


def attention_rate(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The dropout rate of a call of fused attention."""
    names = [argument.name for argument in schema(operator).arguments]
    place = names.index(_RATE) if _RATE in names else len(args)
    return args[place] if place < len(args) else kwargs.get(_RATE, 0.0)


def attention_advance(operator: Any, query: torch.Tensor, key: torch.Tensor) -> int | torch.SymInt:
    """How far one of CUDA's attention kernels with dropout moves its generator's offset, by an observed rule.

    For dynamic sizes. The capture compares it with the sample's offset, each call with the kernel's.
    """
    heads = query.shape[0] * query.shape[1]
    if "flash" in str(operator):
        return heads * _FLASH
    return (heads * query.shape[2] * key.shape[2] + 3) // 4 * 4


def attends_by_products(operator: Any, query: Any, key: Any, value: Any, rate: float = 0.0) -> bool:
    """Whether two products and a softmax replace the efficient attention kernel.

    In float32 they take less time, in TF32 a third, and a rule gives the kernel's dropout mask
    (:mod:`bridge.rng.computed`); but the weights need memory. For dynamic sizes the sample decides: either way is
    exact. The kernel stays if the user forbids the formula (``torch.backends.cuda.enable_math_sdp``, ``sdpa_kernel``).

    Args:
        query, key, value: tensors or their metadata, of shape (batch, head, row, column).
        rate: the dropout rate.
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
