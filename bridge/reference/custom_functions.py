"""Custom autograd Functions in an interpreted graph: autograd runs the backward that the graph holds.

Each Function becomes an ``autograd.Function`` of its two parts, so that its gradients can be differentiated again. Its
forward runs without autograd, as in eager; its backward runs on eager's inputs: the Function's arguments and outputs,
which autograd follows, and intermediate values of forward, which are constants. So torch differentiates the operators
of the user's own backward.

Linearity: nodes of a traced graph and some of their inputs → whether the nodes are linear in these inputs.

Autograd calls a backward once for each gradient that arrives in a graph, and sums the results. Where other nodes than
eager's compute a part of the graph, gradients arrive separately that eager adds up first: the same result if the
backward is linear.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from bridge.base.torch_internals import aten
from bridge.capture import CUSTOM_GRADIENT, ONCE, OWN, STOP_GRADIENT, TANGENT, UNKNOWN, WITH_GRADIENT


def _overloads(*names: str) -> frozenset:
    packets = [getattr(aten, name) for name in names if hasattr(aten, name)]
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


_OF_THE_FIRST = _overloads(
    *"neg view reshape _unsafe_view permute transpose t expand squeeze unsqueeze sum mean clone alias slice".split(),
    *"select index index_select gather flip roll cumsum constant_pad_nd tril triu unfold diagonal repeat".split(),
    *"conj real imag view_as_real view_as_complex _conj trace contiguous".split(),
) | {STOP_GRADIENT, operator.getitem}
"""Linear in the first argument, while the others do not depend on it."""
_PRODUCTS = _overloads("mul", "mm", "bmm", "matmul", "mv", "dot", "convolution")
"""Linear in each of two operands."""
_SUMS = _overloads("add", "sub", "rsub")
"""Jointly linear in two operands."""
_QUOTIENTS = _overloads("div")
_CASTS = _overloads("_to_copy")
_CHOICES = frozenset({aten.where.self})
_IGNORED = _overloads("_assert_tensor_metadata")


def is_linear(steps: Sequence[fx.Node], inputs: Iterable[fx.Node], results: Iterable[fx.Node] = ()) -> bool:
    """Whether each of ``steps``, in order, is linear in ``inputs`` or independent; ``results`` must depend on them."""
    depending = set(inputs)
    for node in steps:
        read = [source for source in node.all_input_nodes if source in depending]
        if not read or node.target in _IGNORED:
            continue
        if not _is_linear(node, depending):
            return False
        depending.add(node)
    return all(result in depending for result in results)


def _is_linear(node: fx.Node, depending: set[fx.Node]) -> bool:
    first, *rest = [_depends(arg, depending) for arg in node.args]
    if any(_depends(arg, depending) for arg in node.kwargs.values()):
        return False
    if node.target in _OF_THE_FIRST:
        return first and not any(rest)
    if node.target in _PRODUCTS:
        return [first, *rest].count(True) == 1
    if node.target in _SUMS:
        return first and rest[0]
    if node.target in _QUOTIENTS:  # not a rounded one
        return first and not any(rest) and node.kwargs.get("rounding_mode") is None
    if node.target in _CASTS:
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    if node.target in _CHOICES:
        return not first and all(flag or _is_zero(arg) for flag, arg in zip(rest, node.args[1:], strict=True))
    return False


def _depends(arg: object, depending: set[fx.Node]) -> bool:
    found = []
    fx.node.map_arg(arg, found.append)
    return any(each in depending for each in found)


def _is_zero(arg: object) -> bool:
    if not isinstance(arg, fx.Node):
        return isinstance(arg, int | float) and arg == 0
    if arg.target in _ZEROS:
        return True
    numbers = [each for each in arg.args if isinstance(each, int | float)]
    return arg.target in _FILLED and numbers == [0]


_ZEROS = _overloads("zeros", "zeros_like", "new_zeros")
_FILLED = _overloads("full", "full_like", "scalar_tensor", "new_full")

Evaluate = Callable[[fx.Node, Mapping[fx.Node, Any]], Any]
"""(a node, the values of its inputs) → its value."""


class _With(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grad


def with_own_gradient(output: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """The value of a ``with_gradient`` node."""
    return output.detach().clone() if gradient is None else _With.apply(output, gradient)


class OwnCall:
    """An application of a custom autograd Function.

    ``forward``: its nodes that run before; ``backward``: its nodes that autograd runs; ``outputs``: its results.
    """

    def __init__(
        self, gradient: fx.Node, forward: set[fx.Node], backward: list[fx.Node], again: str, nodes: set[fx.Node]
    ):
        self._inputs, self._gradients, self._tangents = gradient.args
        self._raw = [tangent.args[0] for tangent in self._tangents]
        fields = {user: user.args[1] for user in gradient.users if user.target is operator.getitem}
        self.outputs = {mark: place for field, place in fields.items() for mark in field.users}
        self.forward = forward
        self.backward = {gradient, *fields, *self._tangents, *backward}
        self._steps = [node for node in backward if node not in (gradient, *fields, *self._tangents)]
        own = {*self._steps, *self._tangents}
        sources = [source for node in self._steps for source in node.all_input_nodes]
        reads = dict.fromkeys(each for each in (*sources, *self._gradients) if each not in own)
        self._reads = list(reads)
        self._function = _Once if again == ONCE else _Again
        inside = {*self.forward, *self.backward}
        told_apart = all(raw in self.forward or raw not in reads for raw in self._raw)
        seen = {user for node in inside for user in node.users if user in nodes} - inside
        whole = all(mark.target is WITH_GRADIENT for mark in (*self.outputs, *seen))
        self._problem = None
        if again == UNKNOWN or not (told_apart and whole):
            self._problem = "sets grad modes, applies another one, or returns one of its arguments"
        elif not is_linear(self._steps, self._tangents, self._gradients):
            self._problem = "is not seen to be linear in its gradients"

    def run(self, env: Mapping[fx.Node, Any], evaluate: Evaluate) -> dict[fx.Node, torch.Tensor]:
        """The values of :attr:`outputs`, after forward's; autograd follows them."""
        tensors = [each for each in self._reads if isinstance(env[each], torch.Tensor)]
        plain = {each: env[each] for each in self._reads if each not in tensors}

        def backward(saved: tuple[torch.Tensor, ...], grads: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
            if self._problem is not None and torch.is_grad_enabled():
                reason = f"that {self._problem}: such derivatives would not be eager's"
                raise RuntimeError(f"create_graph=True through the backward of an autograd.Function {reason}")
            values = dict(plain)
            values.update(zip((*tensors, *self._raw), saved, strict=True))
            values.update(zip(self._tangents, grads, strict=True))
            for node in self._steps:
                values[node] = evaluate(node, values)
            return [values[each] for each in self._gradients]

        given = [env[each] for each in (*self._inputs, *tensors)]
        made = self._function.apply(backward, len(self._inputs), [env[each] for each in self._raw], *given)
        return {mark: made[place] for mark, place in self.outputs.items()}


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backward: Callable, count: int, raw: list[torch.Tensor], *given: torch.Tensor) -> Any:
        made = tuple(each.clone() for each in raw)
        ctx.run, ctx.others = backward, len(given) - count
        ctx.save_for_backward(*given[count:], *made)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, None, *ctx.run(ctx.saved_tensors, grads), *[None] * ctx.others


class _Once(_Again):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return _Again.backward(ctx, *grads)


def own_calls(nodes: Collection[fx.Node]) -> list[OwnCall]:
    """The custom autograd Functions among the nodes of a graph that autograd follows.

    A backward whose derivative would not be exactly eager's raises when it is differentiated.

    Raises:
        RuntimeError: the graph does not show the parts of a Function.
    """
    forward: dict[str, set[fx.Node]] = {}
    backward: dict[str, list[fx.Node]] = {}
    gradients: dict[str, tuple[fx.Node, str]] = {}
    for node in nodes:
        told = node.meta.get(OWN)
        if told is None:
            continue
        number, part, again = told.split(":")
        if part == "forward":
            forward.setdefault(number, set()).add(node)
        else:
            backward.setdefault(number, []).append(node)
        if node.target is CUSTOM_GRADIENT:
            gradients[number] = node, again
    made = [
        OwnCall(node, forward.get(number, set()), backward[number], again, set(nodes))
        for number, (node, again) in gradients.items()
    ]
    known = {node for call in made for node in call.backward}
    if any(node.target in (CUSTOM_GRADIENT, TANGENT) and node not in known for node in nodes):
        raise RuntimeError("a second derivative through an autograd.Function whose parts the graph does not tell")
    return made
