"""One operator of the special-point sweep: compiled once, run at all points with all upstream gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bridge import add_tvm_dispatch, remove_tvm_dispatch, stats
from tests.bridge.compare import Function
from tests.sweep.special.compare import close_to_exact, same
from tests.sweep.special.operators import Case
from tests.sweep.special.points import UPSTREAM

RAMP = (1.0, 0.5, -2.0, 3.0)
"""The proportions of the upstream gradients in one row."""

SIGN = "the sign of a zero"
"""In a gradient: torch may sum from +0; in a value: two zeros are compared or subtracted."""

Answer = dict[str, Tensor]
"""``value 0``, ``gradient 0``, … by name; the first axis counts the points."""


@dataclass(frozen=True)
class Difference:
    """An operator's and eager's results at a point: the numbers along a row, or one of an element."""

    part: str
    inputs: tuple[tuple[float, ...], ...]
    upstream: float
    eager: tuple[float, ...]
    ours: tuple[float, ...]

    def __str__(self) -> str:
        inputs = ", ".join(map(_text, self.inputs))
        given = f"{self.part} at {inputs}, upstream {self.upstream:g}"
        return f"{given}: eager {_text(self.eager)}, ours {_text(self.ours)}"


@dataclass
class Findings:
    """The points of one operator, the number equal to eager, the justified ones by reason, and the rest."""

    points: int = 0
    equal: int = 0
    justified: dict[str, int] = field(default_factory=dict)
    differing: list[Difference] = field(default_factory=list)


def run(
    case: Case, dtype: torch.dtype, excuse: Callable[[Difference], str | None], reference: Callable | None = None
) -> Findings:
    """Compares an operator with eager.

    Args:
        excuse: a difference → the reason that justifies it, or ``None``.
        reference: the eager function, if it is not the operator.

    Raises:
        UnsupportedModule: it is refused.
        AssertionError: it was added but its calls do not run compiled.
    """
    columns = case.inputs(dtype)
    count = len(columns[0])
    columns = [column.repeat(len(UPSTREAM), *[1] * (column.dim() - 1)) for column in columns]
    upstream = torch.tensor(UPSTREAM, dtype=torch.float64).repeat_interleave(count)
    grads = [column.is_floating_point() and index not in case.constant for index, column in enumerate(columns)]
    sample = [column[0] if case.alone else column for column in columns]
    module = Function(case.function)
    asked = Function(reference or case.function)
    ask = _each if case.alone else _answer
    try:
        wanted = ask(asked, columns, grads, upstream)
    except (RuntimeError, NotImplementedError):  # no derivative in eager: values only
        grads = [False] * len(columns)
        wanted = ask(asked, columns, grads, upstream)
    add_tvm_dispatch(module, tuple(_leaf(tensor, grad) for tensor, grad in zip(sample, grads, strict=True)))
    ours = ask(module, columns, grads, upstream)
    assert stats(module).misses.total() == 0, dict(stats(module).misses)
    remove_tvm_dispatch(module)
    return _judge(case, ours, wanted, asked, columns, grads, upstream, ask, excuse)


def _leaf(tensor: Tensor, grad: bool) -> Tensor:
    return tensor.detach().clone().requires_grad_(grad)


def _answer(
    module: nn.Module, columns: Sequence[Tensor], grads: Sequence[bool], upstream: Tensor, keep: bool = False
) -> Answer:
    """Results and gradients of one call; ``keep`` leaves the inputs' strides as they are."""
    leaves = [
        column.detach().requires_grad_(grad) if keep else _leaf(column, grad)
        for column, grad in zip(columns, grads, strict=True)
    ]
    results = [leaf for leaf in pytree.tree_leaves(module(*leaves)) if isinstance(leaf, Tensor)]
    answer = {f"value {index}": result.detach() for index, result in enumerate(results)}
    roots = [result for result in results if result.requires_grad]
    wanted = [leaf for leaf, grad in zip(leaves, grads, strict=True) if grad]
    if roots:
        outer = [_upstream(result, upstream) for result in roots]
        found = torch.autograd.grad(roots, wanted, outer, allow_unused=True)
        pairs = zip(found, wanted, strict=True)
        answer |= {f"gradient {i}": torch.zeros_like(x) if g is None else g for i, (g, x) in enumerate(pairs)}
    return answer


def _upstream(result: Tensor, upstream: Tensor) -> Tensor:
    """The gradients of the points; along a row in the proportions of :data:`RAMP`."""
    if not result.dim():
        return upstream.reshape(()).to(result.dtype)
    if upstream.numel() == 1:
        ramp = torch.tensor(RAMP, dtype=torch.float64).repeat(result.numel() // len(RAMP) + 1)[: result.numel()]
        return (upstream * (ramp if result.numel() > 1 else 1)).reshape(result.shape).to(result.dtype)
    inner = result[0].numel()
    ramp = torch.tensor(RAMP, dtype=torch.float64).repeat(inner // len(RAMP) + 1)[:inner]
    spread = upstream.reshape(-1, 1) * (ramp if inner > 1 else 1)
    return spread.reshape(result.shape).to(result.dtype)


def _each(
    module: nn.Module, columns: Sequence[Tensor], grads: Sequence[bool], upstream: Tensor, keep: bool = False
) -> Answer:
    answers = [
        _answer(module, [column[index] for column in columns], grads, upstream[index : index + 1], keep)
        for index in range(len(upstream))
    ]
    return {name: torch.stack([answer[name] for answer in answers]) for name in answers[0]}


def _strided(column: Tensor) -> Tensor:
    return torch.stack([column, column], -1)[..., 0]


def _judge(case, ours, wanted, asked, columns, grads, upstream, ask, excuse) -> Findings:
    findings = Findings(points=len(upstream))
    good = {name: same(ours[name], wanted[name]) for name in wanted}
    equal = _all(good)
    findings.equal = int(equal.sum())
    if bool(equal.all()):
        return findings
    others = [wanted, ask(asked, [_strided(column) for column in columns], grads, upstream, keep=True)]
    left = (~equal).nonzero().flatten()
    if ask is _answer:
        others.append(_alone(asked, columns, grads, upstream, left, wanted))
    either = {name: good[name].clone() for name in good}
    for other in others[1:]:
        for name in either:
            either[name] |= same(ours[name], other[name])
    exact = _in_float64(asked, columns, grads, upstream, ask)
    rounding = {
        name: either[name] | (close_to_exact(ours[name], wanted[name], exact[name]) if exact else False)
        for name in either
        if ours[name].is_floating_point()
    }
    rounding |= {name: either[name] for name in either if name not in rounding}
    for index in left.tolist():
        if all(bool(mask[index].all()) for mask in either.values()):
            words = "eager disagrees with itself"
        elif all(bool(mask[index].all()) for mask in rounding.values()):
            words = "as near to float64 as eager"
        else:
            if all(bool((mask | _zeros(ours[name], wanted[name]))[index].all()) for name, mask in rounding.items()):
                where = {name.split()[0] for name, mask in rounding.items() if not bool(mask[index].all())}
                words = SIGN if where == {"gradient"} or case.either_zero else None
                if words:
                    findings.justified[words] = findings.justified.get(words, 0) + 1
                    continue
            differences = [
                _difference(name, ours, wanted, columns, upstream, index)
                for name, mask in rounding.items()
                if not bool(mask[index].all())
            ]
            excuses = [excuse(difference) for difference in differences]
            if None in excuses:
                findings.differing.extend(d for d, excused in zip(differences, excuses, strict=True) if excused is None)
                continue
            words = excuses[0]
        findings.justified[words] = findings.justified.get(words, 0) + 1
    return findings


def _zeros(a: Tensor, b: Tensor) -> Tensor:
    return (a == 0) & (b == 0)


def _alone(asked, columns, grads, upstream, left, wanted) -> Answer:
    """Eager's results at the points ``left``, each in a tensor of its own; elsewhere ``wanted``."""
    answer = {name: value.clone() for name, value in wanted.items()}
    for index in left.tolist():
        part = [column[index : index + 1] for column in columns]
        for name, value in _answer(asked, part, grads, upstream[index : index + 1]).items():
            answer[name][index : index + 1] = value
    return answer


def _in_float64(asked, columns, grads, upstream, ask) -> Answer | None:
    try:
        return ask(asked, [c.double() if c.is_floating_point() else c for c in columns], grads, upstream)
    except RuntimeError:  # an operator with its own mixed types
        return None


def _all(masks: dict[str, Tensor]) -> Tensor:
    return torch.stack([mask.reshape(len(mask), -1).all(1) for mask in masks.values()]).all(0)


def _difference(part, ours, wanted, columns, upstream, index) -> Difference:
    inputs = tuple(_numbers(column[index]) for column in columns)
    return Difference(part, inputs, float(upstream[index]), _numbers(wanted[part][index]), _numbers(ours[part][index]))


def _numbers(value: Tensor) -> tuple[float, ...]:
    return tuple(value.double().flatten().tolist())


def _text(numbers: tuple[float, ...]) -> str:
    written = " ".join(f"{number:.9g}" for number in numbers)
    return written if len(numbers) == 1 else f"[{written}]"
