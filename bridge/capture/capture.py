"""From a module and a sample call to a functional ATen graph with everything that training needs beside it.

``torch.export`` traces the module in its current mode. Its training IR still has ``detach`` and ``no_grad`` regions;
the functional IR has lost them, so they are first rewritten into an operator of ours, ``tvm_dispatch::stop_gradient``.
Every node remembers which training-IR node it came from: that is how a random draw in the functional graph finds its
place among the draws that eager makes (:mod:`bridge.capture.fake_observation`), unused draws included.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from bridge.base.errors import Unsupported, UnsupportedModule, refused_by_eager, user_line
from bridge.base.torch_internals import FakeTensor, FakeTensorMode, OpOverload, aten, pytree
from bridge.capture import fake_observation as _witness
from bridge.capture.eager_run import as_in_eager, real_run
from bridge.capture.fake_observation import Draw, Output, Witness
from bridge.capture.fake_run import fake_run, forget_real_tensors
from bridge.capture.free_tensors import outside_tensors
from bridge.capture.isolated_rng import OwnDraws
from bridge.capture.passes.autocast import GradModesInRegions, ambient_autocast, spell_out_casts
from bridge.capture.passes.decompose import decompose
from bridge.capture.passes.recurrent import lstm_as_in_eager
from bridge.capture.passes.stop_gradient import origin_of, prepare
from bridge.capture.preconditions import CACHES, NO_CACHE, check_call
from bridge.capture.thread_isolation import capturing
from bridge.state.snapshot import PythonState, generators_put_back, modes_put_back
from bridge.state.tensors import ModuleTensor, module_tensors

__all__ = [
    "Captured",
    "ModuleTensor",
    "capture",
    "explain_error",
    "normalize_sample",
    "raise_if_eager_raises",
]


@dataclass(frozen=True)
class Captured:
    """A module's sample call as a graph.

    Attributes:
        module_name: class name of the module.
        graph: functional ATen graph; placeholders are bound by ``placeholders``.
        placeholders: name of each placeholder -> index into ``module_tensors + arguments`` (tied ones share one).
        module_tensors: what the module owns, each once.
        arguments: the argument leaves that are tensors (fake), in pytree order.
        argument_leaves: all leaves of the arguments, tensors replaced by ``None``.
        argument_is_tensor: which of them are tensors.
        in_spec: pytree structure of ``(args, kwargs)``.
        results: for each leaf of the module's result, the graph node that computes it (``None``: not computed).
        mutated: ``(index of a module tensor, node of its new value)`` pairs.
        witness: what eager does, see :mod:`bridge.capture.fake_observation`.
        seen: the same as fake tensors have it; other strides, at most (:mod:`bridge.capture.eager_run`).
        draw_of: name of each node that draws -> index into ``witness.draws``.
        literals: tensor literals of the module's code, by placeholder name.
    """

    module_name: str
    graph: fx.Graph
    placeholders: dict[str, int]
    module_tensors: tuple[ModuleTensor, ...]
    arguments: tuple[torch.Tensor, ...]
    argument_leaves: tuple[Any, ...]
    argument_is_tensor: tuple[bool, ...]
    in_spec: pytree.TreeSpec
    results: tuple[fx.Node | None, ...]
    mutated: tuple[tuple[int, fx.Node], ...]
    witness: Witness
    draw_of: dict[str, int]
    literals: dict[str, torch.Tensor]
    seen: Witness

    @property
    def problems(self) -> list[Unsupported]:
        return self.witness.unsupported

    @property
    def draws(self) -> list[Draw]:
        return self.witness.draws

    @property
    def outputs(self) -> list[Output]:
        return self.witness.outputs


def normalize_sample(sample_input: Any, sample_kwargs: dict[str, Any] | None) -> tuple[tuple, dict[str, Any]]:
    """``(args, kwargs)`` of the sample call: a tensor is one argument, a tuple the positional, a dict the keyword ones.

    Raises:
        TypeError: for anything else, or keyword arguments given twice.
    """
    kwargs = dict(sample_kwargs or {})
    if isinstance(sample_input, torch.Tensor):
        return (sample_input,), kwargs
    if isinstance(sample_input, tuple):
        return sample_input, kwargs
    if isinstance(sample_input, dict):
        twice = sorted(set(sample_input) & set(kwargs))
        if twice:
            raise TypeError(f"sample_kwargs repeats what sample_input gives: {', '.join(map(str, twice))}")
        return (), {**sample_input, **kwargs}
    raise TypeError(
        "sample_input: wanted a tensor (one positional argument), a tuple (positional arguments) or a dict "
        f"(keyword arguments), got {type(sample_input).__name__}"
    )


@generators_put_back()
def capture(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Captured:
    """Captures the call ``module(*args, **kwargs)`` in the module's current mode.

    Python attributes that its forward sets are left set: callers that need the
    module as it was take a :class:`bridge.state.snapshot.PythonState`.

    What the graph does not hold exactly (custom autograd functions, mutated arguments or Python state, ...) is listed
    in ``problems``; importing the graph refuses them together with the operators that have no conversion.

    Raises:
        UnsupportedModule: where no graph can be had: data-dependent control flow, hooks on submodules, ...
    """
    name = type(module).__name__
    check_call(module, args, kwargs)
    # Where forward sets Python attributes, it is captured once more from the state that it left. An attribute that the
    # second run leaves alone (a window size that is clipped once) is a constant from then on; a counter is refused.
    for settled in (False, True):
        before = PythonState(module)
        try:
            with capturing(module):
                seen = _see(module, args, kwargs, name)
        except _NotExportedError as failure:
            with capturing(module, fakes=False):
                raise_if_eager_raises(module, args, kwargs)
            raise UnsupportedModule(name, [explain_error(failure.__cause__)]) from failure.__cause__
        before.restore_caches()
        changed = before.changes()
        if not changed or settled or seen.witness.unsupported:
            break
    reason = "Python state that forward changes at every call; a compiled call runs no Python"
    hint = "keep it in a buffer, or change it outside of forward"
    seen.witness.unsupported += [Unsupported(what, f"{name}.forward", reason, hint) for what in changed]
    captured = seen.captured()
    traced = [node.meta["val"] for node in captured.graph.nodes if node.op == "placeholder"]
    forget_real_tensors([fake for fake in (*traced, *captured.arguments) if isinstance(fake, FakeTensor)])
    if captured.problems:
        return captured
    before = PythonState(module)
    try:
        with capturing(module, fakes=False):
            real, differing = real_run(module, seen.tensors, seen.real_tensors, args, kwargs)
    finally:
        before.restore()
    witness, differences = as_in_eager(captured.witness, real)
    witness.unsupported += [*differing, *differences]
    return replace(captured, witness=witness, seen=captured.witness)


def _see(module: nn.Module, args: tuple, kwargs: dict[str, Any], name: str) -> _Seen:
    exported = _export(module, args, kwargs, name)
    try:
        return _Seen(module, args, kwargs, exported)
    except UnsupportedModule:
        raise
    except Exception as error:  # the witness runs the user's code, whatever that raises on fake tensors
        raise UnsupportedModule(name, [explain_error(error)]) from error


class _NotExportedError(Exception):
    """What torch.export raised is the cause."""


@modes_put_back()
def _export(module: nn.Module, args: tuple, kwargs: dict[str, Any], name: str) -> torch.export.ExportedProgram:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    # one object per leaf: export would otherwise identify arguments that happen to be the same tensor today
    leaves = [_stand_in(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    stand_in_args, stand_in_kwargs = pytree.tree_unflatten(leaves, spec)
    try:
        with lstm_as_in_eager():
            return torch.export.export(module, stand_in_args, stand_in_kwargs, strict=False)
    except Exception as error:
        signature = inspect.signature(type(module).forward)
        try:
            signature.bind(module, *args, **kwargs)
        except TypeError as mismatch:
            unfit = TypeError(f"the sample does not fit {name}.forward{signature}: {mismatch}")
            raise refused_by_eager(unfit) from None
        raise _NotExportedError from error


def raise_if_eager_raises(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """A sample that PyTorch itself refuses (shapes that do not fit) is reported in PyTorch's words.

    Runs the module once, on copies of its tensors and of the sample, without moving the generator.
    """
    copies = {name: tensor.detach().clone() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    leaves, spec = pytree.tree_flatten((args, kwargs))
    leaves = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    copied_args, copied_kwargs = pytree.tree_unflatten(leaves, spec)
    try:
        with OwnDraws(), torch.no_grad():
            torch.func.functional_call(module, copies, copied_args, copied_kwargs)
    except Exception as error:
        refused_by_eager(error)
        raise


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same layout; the tracing never looks at its numbers."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return like.requires_grad_(tensor.requires_grad)


def explain_error(error: BaseException) -> Unsupported:
    """What tracing a module, or running it on fake tensors, stumbled over."""
    where = user_line(error) or "see the exception above"
    kind = type(error).__name__
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), kind)
    if kind in ("GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException"):
        return Unsupported(
            "data-dependent control flow or shape",
            where,
            "what happens next depends on the numbers in a tensor",
            "use torch.where, or dispatch the submodules on either side of it",
        )
    if unknown := re.match(r"Found <class '([\w.]+)'> in output, which is not a known type", first_line):
        home, _, name = unknown[1].rpartition(".")
        hint = NO_CACHE if home == CACHES else "return tensors, or a tuple, a list or a dict of them"
        return Unsupported(
            f"a result of type {name}", "the module's result", "not a type that torch.export knows", hint
        )
    if kind == "UnsupportedOperatorException":
        return Unsupported(str(error).splitlines()[0], where, "an operator that torch.export cannot trace")
    return Unsupported("torch.export", where, f"{kind}: {first_line}")


class _Seen:
    """The exported program and the witness, brought together."""

    def __init__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], exported: torch.export.ExportedProgram):
        self.name = type(module).__name__
        self.unsupported: list[Unsupported] = []
        self.tensors, self.real_tensors = module_tensors(module, _constants(exported))
        self.unsupported += outside_tensors(exported, {name for tensor in self.tensors for name in tensor.names})
        requiring = _requiring_grad(exported, self.tensors, pytree.tree_leaves((args, kwargs)))
        needs_grad = functools.partial(_is_named, requiring)
        self.unsupported += spell_out_casts(exported.graph_module, ambient_autocast(), needs_grad)
        self.unsupported += prepare(exported.graph_module, needs_grad)
        with GradModesInRegions() as grad_modes:
            self.run = fake_run(module, self.tensors, self.real_tensors, args, kwargs)
        self.unsupported += grad_modes.problems
        self.witness = self.run.witness
        with torch.autocast("cpu", enabled=False):  # its casts are in the graph by now
            draws_by_origin = self._draws_byorigin_of(exported)
            self.exported = decompose(exported)
        self.draw_of = self._match_draws(draws_by_origin)
        self.witness.unsupported += self.unsupported

    def _draws_byorigin_of(self, exported: torch.export.ExportedProgram) -> dict[str, list[int]]:
        """Which eager draws each training-IR node makes, checked against what the witness saw."""
        draws: list[Draw] = []
        by_origin: dict[str, list[int]] = {}

        class Counting(fx.Interpreter):
            def run_node(self, node: fx.Node) -> Any:
                start = len(draws)
                result = _witness.record_draws(lambda: fx.Interpreter.run_node(self, node), draws)
                if len(draws) > start:
                    by_origin[origin_of(node)] = list(range(start, len(draws)))
                return result

        if not self.witness.draws and not self.witness.unsupported:
            return {}
        fakes = [_fake_placeholder(self.run.mode, node) for node in exported.graph.nodes if node.op == "placeholder"]
        with self.run.mode:
            Counting(exported.graph_module).run(*fakes)
        if draws != self.witness.draws and not self.witness.unsupported:
            self.unsupported.append(
                Unsupported(
                    "random draws",
                    f"{self.name}.forward",
                    f"eager draws {_draw_list(self.witness.draws)}; the exported graph {_draw_list(draws)}",
                )
            )
        return by_origin

    def _match_draws(self, by_origin: dict[str, list[int]]) -> dict[str, int]:
        """Gives every random node of the functional graph its eager draw; unused draws stay without a node."""
        nodes_of: dict[str, list[fx.Node]] = {}
        first_of: dict[str, fx.Node] = {}
        for node in self.exported.graph.nodes:
            first_of.setdefault(origin_of(node), node)
            if _is_random(node):
                nodes_of.setdefault(origin_of(node), []).append(node)
        # a call that draws and is still in the graph without its draws was decomposed wrongly
        nodes_of.update({origin: [] for origin in by_origin if origin in first_of and origin not in nodes_of})
        draw_of = {}
        for origin, nodes in nodes_of.items():
            draws = by_origin.get(origin, [])
            if len(draws) != len(nodes):
                first = nodes[0] if nodes else first_of[origin]
                where = user_line(first.meta.get("stack_trace")) or f"{self.name}.forward"
                reason = f"{len(nodes)} random nodes in the graph for {len(draws)} draws of eager"
                self.unsupported.append(Unsupported(str(first.target) if nodes else origin, where, reason))
                continue
            draw_of.update((node.name, draw) for node, draw in zip(nodes, draws, strict=True))
        return draw_of

    def captured(self) -> Captured:
        signature = self.exported.graph_signature
        index_of = {name: i for i, tensor in enumerate(self.tensors) for name in tensor.names}
        placeholders: dict[str, int] = {}
        literals: dict[str, torch.Tensor] = {}
        argument = len(self.tensors)
        is_tensor = iter(self.run.argument_is_tensor)
        for spec in signature.input_specs:
            if spec.kind == InputKind.USER_INPUT:
                if next(is_tensor):
                    placeholders[spec.arg.name] = argument
                    argument += 1
            elif spec.target in index_of:
                placeholders[spec.arg.name] = index_of[spec.target]
            elif spec.kind == InputKind.CONSTANT_TENSOR:
                literals[spec.arg.name] = self.exported.constants[spec.target]
        nodes = {node.name: node for node in self.exported.graph.nodes}
        results, mutated = [], []
        for spec in signature.output_specs:
            if spec.kind == OutputKind.USER_OUTPUT:
                results.append(nodes[spec.arg.name] if isinstance(spec.arg, TensorArgument) else None)
                continue
            if spec.kind == OutputKind.TOKEN:  # orders side effects; the operator that has one is refused by name
                continue
            if spec.kind == OutputKind.USER_INPUT_MUTATION:
                if any(known.reason == _witness.CHANGES_ARGUMENT for known in self.witness.unsupported):
                    continue  # said already, with the line
            if spec.kind != OutputKind.BUFFER_MUTATION:
                reason = f"changes '{spec.target}' in place ({spec.kind.name.lower()})"
                self.witness.unsupported.append(Unsupported(spec.kind.name.lower(), f"{self.name}.forward", reason))
                continue
            index, node = index_of[spec.target], nodes[spec.arg.name]
            before, after = self.tensors[index], node.meta["val"]
            if (before.dtype, before.shape) != (after.dtype, tuple(after.shape)):
                reason = f"becomes {after.dtype} of shape {tuple(after.shape)}, was {before.dtype} {before.shape}"
                problem = Unsupported(f"buffer '{spec.target}'", f"{self.name}.forward", reason, "keep its form")
                self.witness.unsupported.append(problem)
            mutated.append((index, node))
        if len(results) != len(self.witness.outputs):
            reason = f"the exported graph returns {len(results)} values, eager {len(self.witness.outputs)}"
            raise UnsupportedModule(self.name, [Unsupported("torch.export", f"{self.name}.forward", reason)])
        return Captured(
            module_name=self.name,
            graph=self.exported.graph,
            placeholders=placeholders,
            module_tensors=tuple(self.tensors),
            arguments=self.run.arguments,
            argument_leaves=self.run.argument_leaves,
            argument_is_tensor=self.run.argument_is_tensor,
            in_spec=self.run.in_spec,
            results=tuple(results),
            mutated=tuple(mutated),
            witness=self.witness,
            seen=self.witness,
            draw_of=self.draw_of,
            literals=literals,
        )


def _is_named(names: Collection[str], node: fx.Node) -> bool:
    return node.name in names


def _requiring_grad(
    exported: torch.export.ExportedProgram, tensors: Sequence[ModuleTensor], leaves: Sequence[Any]
) -> set[str]:
    """Names of the placeholders whose tensor requires grad."""
    own = {name for tensor in tensors if tensor.requires_grad for name in tensor.names}
    remaining = iter(leaves)
    found = set()
    for spec in exported.graph_signature.input_specs:
        leaf = next(remaining) if spec.kind == InputKind.USER_INPUT else None
        if spec.target in own or (isinstance(leaf, torch.Tensor) and leaf.requires_grad):
            found.add(spec.arg.name)
    return found


def _is_random(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if node.target is aten.native_dropout.default:
        value, rate, train = node.args
        return bool(train) and 0 < rate < 1 and value.meta["val"].numel() > 0
    return "scaled_dot_product" not in str(node.target)


def _constants(exported: torch.export.ExportedProgram) -> list[str]:
    """Names of what export lifted: tensors that are plain attributes, and literals."""
    specs = exported.graph_signature.input_specs
    return [spec.target for spec in specs if spec.kind == InputKind.CONSTANT_TENSOR]


def _draw_list(draws: Sequence[Draw]) -> str:
    return "[" + ", ".join(f"{draw.op}{list(draw.shape)}{draw.args}" for draw in draws) + "]"


def _fake_placeholder(mode: FakeTensorMode, node: fx.Node) -> Any:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
