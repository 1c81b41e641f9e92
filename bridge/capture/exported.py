"""Exported program: what ``torch.export`` gives for a call, read: constants, what requires grad, inputs, results."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from bridge.base.errors import Unsupported, refused_by_eager
from bridge.base.modes import modes_put_back
from bridge.base.objects import packed
from bridge.base.torch_internals import pytree, tracers_hooks_removed
from bridge.base.torch_shapes import fake_results_not_kept
from bridge.capture.data_attribute import DataIsDetached
from bridge.capture.dynamic_shapes import DynamicDim
from bridge.capture.inplace_rules import CHANGES_ARGUMENT
from bridge.capture.module_calls import forward_here
from bridge.capture.number_index import SymbolicNumberIndices
from bridge.capture.own_functions import OwnFunctions
from bridge.capture.recurrent_formulas import lstm_as_in_eager
from bridge.capture.symbolic_formulas import SymbolicFormulas
from bridge.capture.upsample_casts import upsamples_cast
from bridge.capture.whole_functions import WholeFunctions
from bridge.state import ModuleTensor

__all__ = [
    "NotExportedError",
    "argument_values",
    "constants",
    "export",
    "placeholders",
    "requiring_grad",
    "results_and_mutations",
]


class NotExportedError(Exception):
    """torch.export gave no graph: what it raised is the cause."""


@modes_put_back()
def export(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], dims: Sequence[DynamicDim], functions: OwnFunctions
) -> ExportedProgram:
    """``module(*args, **kwargs)`` in the module's current mode → a program in torch.export's training IR.

    Args:
        dims: dimensions whose sizes are symbols in it.
        functions: where the applications of the user's own Functions are noted.

    Raises:
        TypeError: the sample does not fit the signature of ``forward``.
        NotExportedError: it cannot be traced.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    # one object per leaf: export would otherwise identify arguments that happen to be the same tensor today
    leaves = [_stand_in(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    stand_in_args, stand_in_kwargs = pytree.tree_unflatten(leaves, spec)
    try:
        with (
            lstm_as_in_eager(),
            tracers_hooks_removed(),
            functions.traced(),
            fake_results_not_kept() if dims else nullcontext(),
            _forward_as_exported(module, _spelled_out(module, args, kwargs) if dims else None, bool(dims)),
        ):
            return torch.export.export(
                module, stand_in_args, stand_in_kwargs, dynamic_shapes=_shapes(dims, leaves), strict=False
            )
    except Exception as error:
        signature = inspect.signature(type(module).forward)
        try:
            signature.bind(module, *args, **kwargs)
        except TypeError as mismatch:
            unfit = TypeError(f"the sample does not fit {type(module).__name__}.forward{signature}: {mismatch}")
            raise refused_by_eager(unfit) from None
        raise NotExportedError from error


@contextmanager
def _forward_as_exported(module: nn.Module, signature: inspect.Signature | None, dims: bool) -> Iterator[None]:
    """While active, for this thread alone: objects that forward returns are the pytree nodes that they are observed as.

    ``signature``: what forward says that it takes; ``None``: its own. ``dims``: whether sizes are symbols.

    Modes for what forward does are entered here: the one for number indices has to come before torch.export's own, and
    torch.export's work on the module's tensors before forward begins is not to pass through the others.
    """
    forward = module.forward

    @functools.wraps(forward)
    def packing(*args: Any, **kwargs: Any) -> Any:
        with (
            DataIsDetached(),
            WholeFunctions(),
            upsamples_cast(),
            SymbolicFormulas() if dims else nullcontext(),
            SymbolicNumberIndices(),
            _replaced_buffers_written(module),
        ):
            return packed(forward(*args, **kwargs))

    if signature is not None:
        packing.__signature__ = signature
    with forward_here(module, packing):
        yield


@contextmanager
def _replaced_buffers_written(root: nn.Module) -> Iterator[None]:
    """What forward sets a buffer to, ``self.mean = self.mean * 0.9``, is written into the old one.

    torch.export notes what becomes of the outermost module's own buffers where they are set as attributes, and loses,
    silently, what becomes of others: those of inner modules, and what is put into ``_buffers``.
    """
    modules = list(root.modules())
    before = [(each, name, buffer) for each in modules for name, buffer in each._buffers.items() if buffer is not None]
    yield
    for each, name, buffer in before:
        value = each._buffers.get(name)
        if value is buffer:
            continue
        is_alike = isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (buffer.shape, buffer.dtype)
        if each._buffers is root._buffers:
            if is_alike:
                nn.Module.__setattr__(each, name, value)  # torch.export hears of it
            continue
        if is_alike:
            with torch.no_grad():  # of another form, it is refused by name
                buffer.copy_(value)
        each._buffers[name] = buffer


def _spelled_out(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> inspect.Signature | None:
    """The signature of forward with a parameter for each keyword of the call that it takes in ``**kwargs``.

    torch.export cannot tell which of these vary; ``None`` where there are none.
    """
    signature = inspect.signature(module.forward)
    known = signature.parameters
    others = next((name for name, each in known.items() if each.kind is each.VAR_KEYWORD), None)
    more = [name for name in kwargs if name not in known]
    if others is None or not more:
        return None
    kept = [each for each in known.values() if each.name != others]
    return signature.replace(
        parameters=[*kept, *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in more)]
    )


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same layout; the tracing never looks at its numbers."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return like.requires_grad_(tensor.requires_grad)


def _shapes(dims: Sequence[DynamicDim], leaves: Sequence[Any]) -> ShapesCollection | None:
    """What varies and how far, in torch's words. Of a named dimension too: what is equal, torch finds out itself."""
    if not dims:
        return None
    shapes = ShapesCollection()
    for index in dict.fromkeys(each.leaf for each in dims):
        own = [each for each in dims if each.leaf == index]
        shapes[leaves[index]] = {each.dimension: Dim.AUTO(min=each.low, max=each.high) for each in own}
    return shapes


def argument_values(exported: ExportedProgram) -> list[Any]:
    """For each leaf of the arguments, what stands for it in the graph: of a tensor a fake one."""
    values = {node.name: node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"}
    specs = exported.graph_signature.input_specs
    return [values.get(spec.arg.name) for spec in specs if spec.kind == InputKind.USER_INPUT]


def constants(exported: ExportedProgram) -> list[str]:
    """Names of what export lifted: tensors that are plain attributes, and literals."""
    specs = exported.graph_signature.input_specs
    return [spec.target for spec in specs if spec.kind == InputKind.CONSTANT_TENSOR]


def requiring_grad(exported: ExportedProgram, tensors: Sequence[ModuleTensor], leaves: Sequence[Any]) -> set[str]:
    """Names of the placeholders whose tensor requires grad; ``leaves`` are the arguments'."""
    own = {name for tensor in tensors if tensor.requires_grad for name in tensor.names}
    remaining = iter(leaves)
    found = set()
    for spec in exported.graph_signature.input_specs:
        leaf = next(remaining) if spec.kind == InputKind.USER_INPUT else None
        if spec.target in own or (isinstance(leaf, torch.Tensor) and leaf.requires_grad):
            found.add(spec.arg.name)
    return found


def placeholders(
    exported: ExportedProgram, tensors: Sequence[ModuleTensor], argument_is_tensor: Sequence[bool]
) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """Name of each placeholder → index into module tensors and tensor arguments; of the others, the literal's value."""
    index_of = _index_of(tensors)
    bound: dict[str, int] = {}
    literals: dict[str, torch.Tensor] = {}
    argument = len(tensors)
    is_tensor = iter(argument_is_tensor)
    for spec in exported.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            if next(is_tensor):
                bound[spec.arg.name] = argument
                argument += 1
        elif spec.target in index_of:
            bound[spec.arg.name] = index_of[spec.target]
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            literals[spec.arg.name] = exported.constants[spec.target]
    return bound, literals


def results_and_mutations(
    exported: ExportedProgram,
    tensors: Sequence[ModuleTensor],
    bound: Mapping[str, int],
    forward: str,
    problems: list[Unsupported],
) -> tuple[list[fx.Node | None], list[tuple[int, fx.Node]]]:
    """The node of each leaf of the result, and ``(index, node of its new value)`` pairs of what is written in place.

    Args:
        bound: name of each placeholder → index into module tensors and tensor arguments.
        forward: where problems are, as in ``"Block.forward"``.
        problems: what is known so far; what the program changes and a compiled call cannot is appended.
    """
    index_of = _index_of(tensors)
    nodes = {node.name: node for node in exported.graph.nodes}
    results: list[fx.Node | None] = []
    mutated: list[tuple[int, fx.Node]] = []
    for spec in exported.graph_signature.output_specs:
        if spec.kind == OutputKind.USER_OUTPUT:
            results.append(nodes[spec.arg.name] if isinstance(spec.arg, TensorArgument) else None)
            continue
        if spec.kind == OutputKind.TOKEN:  # orders side effects; the operator that has one is refused by name
            continue
        if spec.kind == OutputKind.USER_INPUT_MUTATION and any(known.reason == CHANGES_ARGUMENT for known in problems):
            continue  # said already, with the line
        if spec.kind not in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
            reason = f"changes '{spec.target}' in place ({spec.kind.name.lower()})"
            problems.append(Unsupported(spec.kind.name.lower(), forward, reason))
            continue
        node = nodes[spec.arg.name]
        if spec.kind == OutputKind.USER_INPUT_MUTATION:
            mutated.append((bound[spec.target], node))
            continue
        index = index_of[spec.target]
        before, after = tensors[index], node.meta["val"]
        if (before.dtype, before.shape) != (after.dtype, tuple(after.shape)):
            reason = f"becomes {after.dtype} of shape {tuple(after.shape)}, was {before.dtype} {before.shape}"
            problems.append(Unsupported(f"buffer '{spec.target}'", forward, reason, "keep its form"))
        mutated.append((index, node))
    return results, mutated


def _index_of(tensors: Sequence[ModuleTensor]) -> Mapping[str, int]:
    return {name: index for index, tensor in enumerate(tensors) for name in tensor.names}
