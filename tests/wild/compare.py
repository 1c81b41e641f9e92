"""A family's steps in float32, eager beside dispatched, with eager in float64 as the judge → a verdict, and a text."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from bridge.base.pytrees import packed
from bridge.base.torch_internals import pytree
from bridge.dispatch import PartStats
from tests.wild.families import Call, Family

STEPS = 5
ENTRIES = 2
"""One for the sample's sizes, one for all others."""
LIKE_EAGER = 20.0
"""The allowed distance of ours from float64, in multiples of eager's, for each kind of results."""
ROUNDING = 2e-5
"""The difference of other orders of sums, relative to the largest number of a result, or of all gradients."""
OTHER = 0.05
"""Where eager's float32 is farther from float64, float64 is no judge: mostly, it drew other numbers."""


def _step(module: nn.Module, call: Call, i: int) -> dict[str, Any]:
    """The comparable results of one training step."""
    args, kwargs = call
    given = [each for each in pytree.tree_leaves(call) if isinstance(each, torch.Tensor)]
    torch.manual_seed(i)
    out = module(*args, **kwargs)
    leaves = [each for each in pytree.tree_leaves(packed(out)) if isinstance(each, torch.Tensor)]
    found: dict[str, Any] = {f"result {k}": each.detach().clone() for k, each in enumerate(leaves)}
    found["generator"] = torch.get_rng_state()
    weights = torch.Generator().manual_seed(i)
    loss = [
        (each * torch.randn(each.shape, generator=weights).to(each)).sum() / each.numel() ** 0.5
        for each in (torch.view_as_real(each) if each.is_complex() else each for each in leaves if each.requires_grad)
        if each.numel()
    ]
    if loss:
        sum(loss).backward()
    found |= {f"gradient of argument {k}": each.grad for k, each in enumerate(given) if each.is_leaf}
    found |= {f"gradient of {name}": each.grad for name, each in module.named_parameters()}
    with torch.no_grad():
        for each in module.parameters():
            if each.grad is not None:
                each -= 0.01 * each.grad.clamp(-1, 1)
                each.grad = None
    found |= {
        f"state {name}": each.clone() for name, each in module.state_dict().items() if isinstance(each, torch.Tensor)
    }
    return found


def _wide(tree: Any) -> Any:
    def wide(each: Any) -> Any:
        if not isinstance(each, torch.Tensor) or not each.is_floating_point():
            return each
        return each.detach().double().requires_grad_(each.requires_grad)

    return pytree.tree_map(wide, tree)


def _differ(
    eager: dict[str, Any], ours: dict[str, Any], exact: dict[str, Any], rounding: float, other: float = OTHER
) -> str | None:
    """The first wrong result of a step, in words, or ``None``."""
    if list(eager) != list(ours):
        return f"{sorted(set(eager) ^ set(ours))[:3]} only in one"
    kinds: dict[str, float] = {}
    for name, each in eager.items():
        if isinstance(each, torch.Tensor) and each.is_floating_point() and each.numel():
            kind = name.split()[0]
            kinds[kind] = max(kinds.get(kind, 0.0), float(each.nan_to_num().abs().max()))
    for name, each in eager.items():
        got = ours[name]
        if each is None or got is None:
            if each is not got:
                return f"{name}: None {'here' if got is None else 'in eager'} alone"
            continue
        if (each.shape, each.dtype) != (got.shape, got.dtype):
            return f"{name}: {tuple(got.shape)} {got.dtype}, eager's {tuple(each.shape)} {each.dtype}"
        if not each.is_floating_point() and not each.is_complex():
            if not torch.equal(each, got) and not name.startswith("result"):  # an index of a largest number
                return f"{name}: another than eager's"
            continue
        if not each.numel():
            continue
        scale = max(float(each.abs().nan_to_num().max()), kinds.get(name.split()[0], 0.0))
        judge = exact.get(name)
        if judge is None or judge.shape != each.shape or _off(each, judge) > other * scale:
            judge = each
        bound = rounding * scale * (1 if judge is exact.get(name) else 10)
        off, eagers = _off(got, judge), _off(each, judge)
        if off > max(bound, LIKE_EAGER * eagers) + 1e-12:
            return f"{name}: off by {off:.2g} of {scale:.2g}, eager by {eagers:.2g}"
    return None


def _off(each: torch.Tensor, judge: torch.Tensor) -> float:
    kind = torch.complex128 if each.is_complex() else torch.float64
    each, judge = each.to(kind), judge.to(kind)
    same = (each == judge) | (each.isnan() & judge.isnan())
    return float(torch.where(same, 0.0, (each - judge).abs()).nan_to_num(torch.inf).max())


def _moved_by_rounding(module: nn.Module) -> nn.Module:
    """The module with parameters moved by rounding errors: its results differ as far as rounding alone moves them.

    A batch normalization of two values, for example, multiplies rounding errors of float64 by 1e11 in two steps.
    """
    with torch.no_grad():
        for each in module.parameters():
            each *= 1 + torch.finfo(each.dtype).eps * torch.randint_like(each, -1, 2)
    return module


def verdict_on(family: Family) -> tuple[str, str]:
    """The verdict on a family, and a text."""

    begun: dict[str, Any] = {}  # the first module's state (with its versions): others may have uninitialized parameters

    def made() -> tuple[nn.Module, Any]:
        nonlocal begun
        torch.manual_seed(0)
        module, calls = family.build()
        begun = begun or copy.deepcopy(module.state_dict())
        module.load_state_dict(begun)
        return module, calls

    try:
        eager, calls = made()
        wanted = [_step(eager, calls(i), i) for i in range(STEPS)]
        if words := _differ(wanted[0], _step(made()[0], calls(0), 0), {}, ROUNDING):
            return "left out", f"eager beside eager, {words}"  # transformers' Reformer reseeds torch by the clock
    except Exception as error:  # noqa: BLE001 - eager's, which is reported
        return "left out", f"{type(error).__name__}: {error}"
    try:
        judge = made()[0].double()
        exact = [_step(judge, _wide(calls(i)), i) for i in range(STEPS)]
    except Exception:  # noqa: BLE001 - a module that itself makes float32
        exact = [{}] * STEPS
    module = made()[0]
    refused, is_added = _added(module, *calls(0))
    if not is_added:
        return "refused", refused
    words = [_differ(wanted[i], _step(module, calls(i), i), exact[i], ROUNDING) for i in range(STEPS)]
    if any(words):  # float32 may take another branch of a ReLU, float64 seldom does
        wide = _wide if exact[0] else lambda tree: tree
        twin, same, moved = (made()[0].to(torch.float64 if exact[0] else None) for _ in range(3))
        _added(twin, *wide(calls(0)))
        words = []
        for i in range(2 if exact[0] else STEPS):  # each from one state: errors of the step before are no fault of it
            for each in (same, moved):
                each.load_state_dict(twin.state_dict())
            steps = [_step(each, wide(calls(i)), i) for each in (_moved_by_rounding(moved), twin, same)]
            words.append(_differ(*steps, ROUNDING / 10 if exact[0] else ROUNDING, math.inf))
    for i, each in enumerate(words):
        if each:
            return "WRONG", f"step {i}: {each}"
    found = stats(module)
    told = f"{found.hits} hits, {len(found.entries)} entries"
    if isinstance(found, PartStats):
        return "parts", f"{refused}; {told}, {100 * found.coverage:.0f} %"
    if found.misses:
        return "misses", f"{told}: {next(iter(found.misses))}"
    return ("hit" if len(found.entries) <= ENTRIES else "entries"), told


def _added(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[str, bool]:
    """Dispatches the module, whole or in parts; returns the refusal of the whole, and whether a part is dispatched."""
    if not args and not kwargs:
        add_tvm_dispatch(module)
        return "", True
    try:
        add_tvm_dispatch(module, args or None, sample_kwargs=kwargs or None, on_miss="compile")
    except UnsupportedModule as error:
        words = str(error.ops[0]).splitlines()[0]
        try:
            add_tvm_dispatch(module, args or None, sample_kwargs=kwargs or None, on_miss="compile", whole=False)
        except UnsupportedModule:
            return words, False
        return words, True
    found = stats(module)
    eager = found.eager if isinstance(found, PartStats) else ()
    return next((str(each.problems[0]).splitlines()[0] for each in eager), ""), True
