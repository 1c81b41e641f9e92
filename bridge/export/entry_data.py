"""Entry data: a dispatched module's entry ↔ plain data; its programs are files beside it.

What is written: the guard's expectations by structure (arguments, training flags, modes), the steps of a call, which
inputs get gradients. What cannot be told without the user's code or for other sizes is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn.functional import scaled_dot_product_attention

from bridge.base.devices import HOST
from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.base.modes import autocast_setting
from bridge.base.torch_cuda import SETTINGS, meaning_the_same
from bridge.capture import Captured, Draw, Observation
from bridge.compile import DrawnMask
from bridge.dispatch import Backward, CallStep, Entry, MakeDraws, Save
from bridge.export.structure import from_plain, to_plain
from bridge.rng import checked_gpu, computed_mask
from bridge.state import ModuleTensor

__all__ = ["SavedCall", "data_of", "modes_of", "refuse_other_draws", "refuse_other_settings", "saved_call"]

_HINT = "save a submodule that does not contain it"
_AUTOCAST = {HOST.type: "autocast", "cuda": "CUDA autocast"}


@dataclass(frozen=True)
class SavedCall:
    """What an entry knows of its call; in the place of :class:`bridge.lowering.LoweredCall`.

    Attributes:
        captured: without a graph.
        wanted: inputs that get a gradient; ``differentiable``: outputs that take one.
        plan, seconds: not known.
    """

    captured: Captured
    wanted: tuple[int, ...]
    differentiable: tuple[int, ...]
    plan: None = None
    seconds: float = 0.0


def data_of(entry: Entry, module: nn.Module) -> dict[str, Any]:
    """The plain data of an entry of a module.

    Raises:
        UnsupportedModule: something in it cannot be saved.
    """
    captured, guard = entry.lowered.captured, entry.guard
    name = captured.module_name
    _refuse(entry, module)
    leaves = zip(captured.argument_leaves, captured.argument_is_tensor, strict=True)
    parts: dict[str, Callable[[], Any]] = {
        "the structure of its arguments": lambda: to_plain(captured.in_spec),
        "an argument that is no tensor": lambda: [None if is_tensor else to_plain(leaf) for leaf, is_tensor in leaves],
        "its result": lambda: [to_plain(_saved_step(step)) for step in entry.steps if not isinstance(step, Backward)],
    }
    made = {}
    for what, make in parts.items():
        try:
            made[what] = make()
        except TypeError as error:
            problem = Unsupported(what, f"{name}.forward", f"{error} means nothing without the code", _HINT)
            raise UnsupportedModule(name, [problem], what="saved") from None
    structure, constants, steps = made.values()
    arguments = [
        {
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "dtype": to_plain(tensor.dtype),
            "requires_grad": tensor.requires_grad,
        }
        for tensor in captured.arguments
    ]
    return {
        "structure": structure,
        "leaves": constants,
        "is_tensor": list(captured.argument_is_tensor),
        "arguments": arguments,
        "tensors": [spec.name for spec in captured.module_tensors],
        "training": guard.training,
        "modes": _plain_modes(entry),
        "exact_modes": guard.modes.exact,
        "reads_validation": captured.observation.reads_validation,
        "settings": _settings(captured.device),
        "uncounted": [] if guard.frozen is None else guard.frozen.uncounted,
        "written": [index for index, _ in captured.mutated],
        "wanted": list(entry.lowered.wanted),
        "differentiable": list(entry.lowered.differentiable),
        "steps": steps,
        "masks": _masks(entry),
    }


def _saved_step(step: CallStep) -> CallStep:
    """A step without what only eager's operators need: the traced graph is not saved."""
    if not isinstance(step, Save):
        return step
    return replace(step, beside=(), beside_names=(), beside_copied=(), beside_followed=())


def _refuse(entry: Entry, module: nn.Module) -> None:
    captured, guard = entry.lowered.captured, entry.guard
    stale = guard.module_failure(module)
    name = captured.module_name
    where = f"{name}.forward"
    modes = guard.modes.expected
    anew = "call remove_tvm_dispatch, and add the dispatch to the module as it is now"
    is_elsewhere = any(each.device != captured.device for each in captured.arguments)
    problems = [
        (f"an entry for the module as it was ({stale})", stale is not None, anew),
        ("sizes that vary", captured.extents is not None, "add the dispatch for the sizes that are to be saved"),
        (f"numbers that are inputs ({guard.numbers})", bool(guard.numbers), _HINT),
        (f"attributes that a call sets ({captured.counters or guard.derived})", guard.sets_attributes, _HINT),
        ("deterministic algorithms", modes["deterministic algorithms"], "switch them off before the dispatch is added"),
        ("arguments on the host beside a GPU's", is_elsewhere, _HINT),
        ("a default device", guard.has_default_device, "add the dispatch without it"),
    ]
    found = [Unsupported(what, where, "cannot be saved", hint) for what, holds, hint in problems if holds]
    if found:
        raise UnsupportedModule(name, found, what="saved")


def _plain_modes(entry: Entry) -> dict[str, Any]:
    modes, device = entry.guard.modes.expected, entry.lowered.captured.device
    autocast = modes[_AUTOCAST[device.type]]
    return {
        "grad": modes["grad mode"],
        "autocast": to_plain(autocast) if isinstance(autocast, torch.dtype) else bool(autocast),
        "dtype": to_plain(modes["default dtype"]),
        "validation": modes["validation of distributions"],
    }


@contextmanager
def modes_of(data: dict[str, Any], device: torch.device) -> Iterator[None]:
    """The modes that a saved entry was made under."""
    modes = data["modes"]
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(modes["grad"]))
        wanted = from_plain(modes["autocast"])
        casts = isinstance(wanted, torch.dtype)
        if casts or autocast_setting(device.type) is not False:
            stack.enter_context(torch.autocast(device.type, wanted if casts else None, enabled=casts))
        torch.set_default_dtype(from_plain(modes["dtype"]))
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def saved_call(
    data: dict[str, Any], name: str, tensors: tuple[ModuleTensor, ...], device: torch.device
) -> tuple[SavedCall, list[torch.Tensor], tuple]:
    """What an entry is made of again: the call, tensors that look like the sample's arguments, the steps of a call."""
    arguments = [
        torch.empty_strided(form["shape"], form["stride"], dtype=from_plain(form["dtype"]), device=device)
        for form in data["arguments"]
    ]
    for tensor, form in zip(arguments, data["arguments"], strict=True):
        tensor.requires_grad_(form["requires_grad"])
    steps = tuple(map(from_plain, data["steps"]))
    results = next(step for step in steps if step.kind == "results")
    observation = Observation(
        outputs=list(results.outputs), out_spec=results.spec, reads_validation=data["reads_validation"]
    )
    graph = fx.Graph()
    captured = Captured(
        module_name=name,
        graph=graph,
        placeholders={},
        module_tensors=tensors,
        arguments=tuple(arguments),
        argument_leaves=tuple(map(from_plain, data["leaves"])),
        argument_is_tensor=tuple(data["is_tensor"]),
        in_spec=from_plain(data["structure"]),
        results=(),
        mutated=tuple((index, graph.placeholder(f"buffer_{index}")) for index in data["written"]),
        observation=observation,
        draw_of={},
        literals={},
        device=device,
    )
    return SavedCall(captured, tuple(data["wanted"]), tuple(data["differentiable"])), arguments, steps


def _settings(device: torch.device) -> dict[str, str]:
    """Torch's settings that programs on a GPU were chosen by, as texts; after torch has put its attention kernels in
    order, which it does when it is first asked for one."""
    if device.type == "cuda":
        heads = torch.zeros(1, 1, 8, 64, dtype=torch.float16, device=device)
        with torch.no_grad():
            scaled_dot_product_attention(heads, heads, heads)
    return {name: str(read()) for name, read in SETTINGS.items()} if device.type == "cuda" else {}


def refuse_other_settings(data: dict[str, Any], device: torch.device) -> None:
    """``ValueError`` naming a setting of torch that is not as it was when an entry was saved."""
    now = _settings(device)
    for name, then in data["settings"].items():
        if now.get(name) not in meaning_the_same(then):
            raise ValueError(f"saved for {name}: {then}, here it is {now.get(name)}")


def _masks(entry: Entry) -> list[list[Any]]:
    """How kernels compute masks: the place of each draw, and the rule in words."""
    draws = next((step for step in entry.steps if isinstance(step, MakeDraws)), None)
    if draws is None:
        return []
    device = entry.lowered.captured.device
    return [[place, _rule(draws.draws[place], device)] for place in draws.computed]


def _rule(draw: Draw, device: torch.device) -> str:
    mask: DrawnMask | None = computed_mask(draw, lambda: checked_gpu(device))
    return repr(mask)


def refuse_other_draws(data: dict[str, Any], steps: tuple, device: torch.device) -> None:
    """``ValueError`` where this GPU draws masks otherwise than the one that an entry was saved on."""
    draws = next((step for step in steps if isinstance(step, MakeDraws)), None)
    for place, rule in data["masks"]:
        if _rule(draws.draws[place], device) != rule:
            raise ValueError(f"{device} draws dropout masks otherwise than the GPU that this was saved on")
