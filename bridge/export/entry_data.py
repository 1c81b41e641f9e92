"""Entry data: a dispatched module's entry, without its programs ↔ plain data.

It has the guard's expectations (structure of arguments, training flags, modes), the steps of a call, and the inputs
that get gradients. Features that need the user's code, or dynamic shapes, are refused by name.

Structures of arguments and results: pytree specifications ↔ plain data, without the classes of the user's code.
Tuples, lists, dicts, named tuples and ``torch.Size`` are restored. A result of another class (transformers' outputs, a
dataclass) is restored as a :class:`ResultRecord`: values by attribute, name or position.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, namedtuple
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from bridge.artifact import NoFormError, to_text, written, written_as, written_like
from bridge.base.devices import HOST
from bridge.base.errors import Unsupported, UnsupportedModule
from bridge.base.modes import autocast_setting, autocast_to, modes_put_back
from bridge.base.pytrees import Again, ObjectNode, Repeated, WithWholes
from bridge.base.torch_cuda import SETTINGS, meaning_the_same, settle_attention_order
from bridge.base.torch_internals import pytree
from bridge.capture import (
    Captured,
    CapturedArguments,
    CapturedNames,
    Draw,
    DropoutOperand,
    Observation,
    Output,
    Parameter,
)
from bridge.compile import DrawnMask
from bridge.dispatch import STEPS, Backward, CallStep, Entry, MakeDraws, Save
from bridge.rng import checked_gpu, recomputed_mask
from bridge.state import ModuleTensor

__all__ = ["ResultRecord", "SavedCall", "data_of", "modes_of", "refuse_other_draws", "refuse_other_settings"]
__all__ += ["saved_call", "structure_of", "to_structure"]

_LEAF = None
_SEQUENCES = {tuple: "tuple", list: "list"}
_MAPPINGS = {dict: "dict", OrderedDict: "ordered dict"}
_KEYS = (str, int, bool)


class ResultRecord(dict):
    """A result whose class was not saved: ``result.logits``, ``result["logits"]`` and ``result[0]`` are equivalent.

    Positions skip ``None`` values, as in transformers' outputs.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return dict.__getitem__(self, name)
        except KeyError:
            raise AttributeError(f"the record has {', '.join(self)}, no {name!r}") from None

    def __getitem__(self, key: Any) -> Any:
        return dict.__getitem__(self, key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple:
        """The values that are not ``None``."""
        return tuple(value for value in self.values() if value is not None)


def _flatten(record: ResultRecord) -> tuple[list[Any], tuple[str, ...]]:
    return list(record.values()), tuple(record)


def _unflatten(values: Iterable[Any], names: tuple[str, ...]) -> ResultRecord:
    return ResultRecord(zip(names, values, strict=True))


pytree.register_pytree_node(ResultRecord, _flatten, _unflatten, serialized_type_name="tvm_dispatch.Record")


def to_structure(spec: pytree.TreeSpec) -> Any:
    """A pytree specification → plain data. ``NoFormError``: a node cannot be restored without its class."""
    if spec.is_leaf():
        return _LEAF
    children = tuple(to_structure(child) for child in spec.children())
    kind, context = spec.type, spec.context
    if context is WithWholes:
        raise NoFormError("a result whose elements share memory, as expand makes it")
    if kind in _SEQUENCES:
        return {"kind": _SEQUENCES[kind], "children": children}
    if kind in _MAPPINGS:
        if not all(type(key) in _KEYS for key in context):
            raise NoFormError(f"a {kind.__name__} with keys other than texts and integers")
        return {"kind": _MAPPINGS[kind], "keys": tuple(context), "children": children}
    fields = getattr(context if isinstance(context, type) else kind, "_fields", None)
    if fields is not None and len(fields) == len(children):
        named = context if isinstance(context, type) else kind
        return {"kind": "named tuple", "name": named.__name__, "keys": tuple(fields), "children": children}
    if kind is ObjectNode:
        return _of_object(context, children)
    if isinstance(context, list | tuple) and len(context) == len(children) and all(type(k) is str for k in context):
        return {"kind": "record", "keys": tuple(context), "children": children}
    raise NoFormError(f"a result of class {kind.__name__}")


def _of_object(context: tuple, children: tuple) -> Any:
    made, _, layout, is_argument = context
    if is_argument:
        raise NoFormError(f"an argument of class {made.__name__}")
    if made is Repeated or isinstance(made, Again):
        raise NoFormError("a list or dictionary that occurs twice in the result")
    if any(plain is not None for _, plain in layout):
        names = [name for name, plain in layout if plain is not None]
        raise NoFormError(f"an object of class {made.__name__} with values that are no tensors: {', '.join(names)}")
    kind = "size" if made is torch.Size else "record"
    return {"kind": kind, "keys": tuple(str(name) for name, _ in layout), "children": children}


def structure_of(plain: Any) -> pytree.TreeSpec:
    """Plain data of :func:`to_structure` → the pytree specification."""
    return pytree.tree_structure(_skeleton(plain))


def _skeleton(plain: Any) -> Any:
    if plain is _LEAF:
        return 0
    children = [_skeleton(child) for child in plain["children"]]
    kind, keys = plain["kind"], plain.get("keys", ())
    if kind in ("tuple", "list"):
        return tuple(children) if kind == "tuple" else children
    pairs = dict(zip(keys, children, strict=True))
    if kind == "named tuple":
        return namedtuple(plain["name"], keys)(*children)
    if kind == "size":
        return ObjectNode(torch.Size, pairs, {})
    made = {"dict": dict, "ordered dict": OrderedDict, "record": ResultRecord}.get(kind)
    if made is None:
        raise ValueError(f"a structure of unknown kind {kind!r}")
    return made(pairs)


def _parameters(signature: inspect.Signature) -> tuple:
    return (
        tuple(
            (each.name, each.kind.name, () if each.default is each.empty else (each.default,))
            for each in signature.parameters.values()
        ),
    )


def _signature(parameters: tuple) -> inspect.Signature:
    return inspect.Signature([_parameter(*each) for each in parameters])


def _parameter(name: str, kind: str, default: tuple) -> inspect.Parameter:
    value = default[0] if default else inspect.Parameter.empty
    return inspect.Parameter(name, getattr(inspect.Parameter, kind), default=value)


written(*STEPS, Draw, ModuleTensor, DropoutOperand, Output, Parameter)
written_as(inspect.Signature, "signature", ("parameters",), _parameters, _signature)
written_as(pytree.TreeSpec, "structure", ("plain",), lambda spec: (to_structure(spec),), structure_of)
if hasattr(pytree, "LeafSpec"):
    written_like(pytree.LeafSpec, pytree.TreeSpec)


_HINT = "save a submodule that does not contain it"
_AUTOCAST = {HOST.type: "autocast", "cuda": "CUDA autocast"}


@dataclass(frozen=True)
class SavedCall:
    """The call of a loaded entry, in place of a :class:`bridge.lowering.LoweredCall`.

    Attributes:
        captured: the captured call, without a graph.
        wanted: inputs that get a gradient; ``differentiable``: outputs that take a grad_out.
        plan, seconds: unknown.
    """

    captured: Captured
    wanted: tuple[int, ...]
    differentiable: tuple[int, ...]
    plan: None = None
    seconds: float = 0.0


def data_of(entry: Entry, module: nn.Module) -> dict[str, Any]:
    """The plain data of an entry of a module. ``UnsupportedModule``: a part of it cannot be saved."""
    captured, guard = entry.lowered.captured, entry.guard
    name = captured.module_name
    _refuse(entry, module)
    leaves = zip(captured.given.leaves, captured.given.is_tensor, strict=True)
    parts = {
        "the structure of its arguments": captured.given.spec,
        "an argument that is no tensor": tuple(None if is_tensor else leaf for leaf, is_tensor in leaves),
        "its result": tuple(_saved_step(step) for step in entry.steps if not isinstance(step, Backward)),
    }
    for what, part in parts.items():
        try:
            to_text(part)
        except NoFormError as error:
            problem = Unsupported(what, f"{name}.forward", f"{error} means nothing without the code", _HINT)
            raise UnsupportedModule(name, [problem], what="saved") from None
    structure, constants, steps = parts.values()
    arguments = tuple(
        {"shape": each.shape, "stride": each.stride(), "dtype": each.dtype, "requires_grad": each.requires_grad}
        for each in captured.given.tensors
    )
    return {
        "structure": structure,
        "leaves": constants,
        "is_tensor": tuple(captured.given.is_tensor),
        "arguments": arguments,
        "tensors": tuple(spec.name for spec in captured.module_tensors),
        "training": guard.tree.training,
        "modes": _plain_modes(entry),
        "exact_modes": guard.modes.exact,
        "reads_validation": captured.observation.reads_validation,
        "settings": _settings(captured.device),
        "uncounted": () if guard.frozen is None else guard.frozen.uncounted,
        "written": tuple(index for index, _ in captured.mutated),
        "wanted": tuple(entry.lowered.wanted),
        "differentiable": tuple(entry.lowered.differentiable),
        "steps": steps,
        "masks": _masks(entry),
    }


def _saved_step(step: CallStep) -> CallStep:
    """A step without the tensors for eager's operators, which need the traced graph, which is not saved."""
    if not isinstance(step, Save):
        return step
    return replace(step, beside=(), beside_names=(), beside_copied=(), beside_followed=())


def _refuse(entry: Entry, module: nn.Module) -> None:
    """Raises :class:`UnsupportedModule` with each feature of an entry that cannot be saved."""
    captured, guard = entry.lowered.captured, entry.guard
    stale = guard.module_failure(module)
    name = captured.module_name
    where = f"{name}.forward"
    modes = guard.modes.expected
    anew = "call remove_tvm_dispatch, and add the dispatch to the module as it is now"
    is_elsewhere = any(each.device != captured.device for each in captured.given.tensors)
    tensors = *captured.module_tensors, *captured.given.tensors, *(each for each in captured.outputs if each.is_tensor)
    places = [each.name for each in (*captured.state.counters, *captured.state.kept)]
    problems = [
        (f"an entry for the module as it was ({stale})", stale is not None, anew),
        ("sizes that vary", captured.sizes.scope is not None, "add the dispatch for the sizes that are to be saved"),
        (f"numbers that are inputs ({guard.numbers})", bool(guard.numbers), _HINT),
        (f"attributes that a call sets ({', '.join(places)})", guard.tree.sets_attributes, _HINT),
        ("requires_grad of arguments, which forward sets", bool(captured.given.followed), "set it before the call"),
        ("deterministic algorithms", modes["deterministic algorithms"], "switch them off before the dispatch is added"),
        ("arguments on the host beside a GPU's", is_elsewhere, _HINT),
        ("a default device", guard.has_default_device, "add the dispatch without it"),
        ("complex numbers", any(each.dtype.is_complex for each in tensors), _HINT),
        ("collectives, which name process groups", bool(captured.group), _HINT),
        ("an autograd.Function, which is Python code", captured.runs_python, _HINT),
    ]
    found = [Unsupported(what, where, "cannot be saved", hint) for what, holds, hint in problems if holds]
    if found:
        raise UnsupportedModule(name, found, what="saved")


def _plain_modes(entry: Entry) -> dict[str, Any]:
    modes, device = entry.guard.modes.expected, entry.lowered.captured.device
    autocast = modes[_AUTOCAST[device.type]]
    return {
        "grad": modes["grad mode"],
        "autocast": autocast if isinstance(autocast, torch.dtype) else bool(autocast),
        "dtype": modes["default dtype"],
    }


@contextmanager
def modes_of(data: dict[str, Any], device: torch.device) -> Iterator[None]:
    """Context with the modes of a saved entry."""
    modes, casts = data["modes"], isinstance(data["modes"]["autocast"], torch.dtype)
    is_set = casts or autocast_setting(device.type) is not False
    autocast = autocast_to(modes["autocast"] if casts else None, kind=device.type) if is_set else nullcontext()
    with modes_put_back(), torch.inference_mode(False), torch.set_grad_enabled(modes["grad"]), autocast:
        torch.set_default_dtype(modes["dtype"])
        yield


def saved_call(
    data: dict[str, Any], name: str, tensors: tuple[ModuleTensor, ...], device: torch.device
) -> tuple[SavedCall, list[torch.Tensor], tuple]:
    """An entry's data → the call, tensors with the metadata of the sample's arguments, the steps of a call."""
    arguments = [
        torch.empty_strided(form["shape"], form["stride"], dtype=form["dtype"], device=device)
        for form in data["arguments"]
    ]
    for tensor, form in zip(arguments, data["arguments"], strict=True):
        tensor.requires_grad_(form["requires_grad"])
    steps = data["steps"]
    results = next(step for step in steps if step.kind == "results")
    observation = Observation(
        outputs=list(results.outputs), out_spec=results.spec, reads_validation=data["reads_validation"]
    )
    graph = fx.Graph()
    captured = Captured(
        module_name=name,
        graph=graph,
        names=CapturedNames({}, {}, {}),
        module_tensors=tensors,
        given=CapturedArguments(tuple(arguments), data["leaves"], data["is_tensor"], data["structure"]),
        results=(),
        mutated=tuple((index, graph.placeholder(f"buffer_{index}")) for index in data["written"]),
        observation=observation,
        device=device,
    )
    return SavedCall(captured, data["wanted"], data["differentiable"]), arguments, steps


def _settings(device: torch.device) -> dict[str, str]:
    """Torch's CUDA settings as texts, empty on a CPU."""
    if device.type != "cuda":
        return {}
    torch.cuda.init()
    settle_attention_order(device)
    return {name: str(read()) for name, read in SETTINGS.items()}


def refuse_other_settings(data: dict[str, Any], device: torch.device) -> None:
    """Raises ``ValueError`` with the first of torch's settings that differs from a saved entry's."""
    now = _settings(device)
    for name, then in data["settings"].items():
        if now.get(name) not in meaning_the_same(then):
            raise ValueError(f"saved for {name}: {then}, here it is {now.get(name)}")


def _masks(entry: Entry) -> tuple:
    """The place of each recomputed dropout mask, with a text of its drawing rule on this device."""
    draws = next((step for step in entry.steps if isinstance(step, MakeDraws)), None)
    if draws is None:
        return ()
    device = entry.lowered.captured.device
    return tuple((place, _rule(draws.draws[place], device)) for place in draws.computed)


def _rule(draw: Draw, device: torch.device) -> str:
    mask: DrawnMask | None = recomputed_mask(draw, lambda: checked_gpu(device))
    return repr(mask)


def refuse_other_draws(data: dict[str, Any], steps: tuple, device: torch.device) -> None:
    """Raises ``ValueError`` if this GPU draws dropout masks differently from the GPU of a saved entry."""
    draws = next((step for step in steps if isinstance(step, MakeDraws)), None)
    for place, rule in data["masks"]:
        if _rule(draws.draws[place], device) != rule:
            raise ValueError(f"{device} draws dropout masks otherwise than the GPU that this was saved on")
