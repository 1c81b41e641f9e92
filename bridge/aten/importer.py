"""Importer: a traced ATen graph → a Relax function with training semantics, one conversion per operator.

Results whose conversion differs from eager's tensor in shape or element type are refused: on some devices an operator's
results are not as its formula says, for instance the saved statistics of batch normalization.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import fx
from tvm import relax

from autodiff.errors import UnknownShape
from autodiff.extents import Dim, Extent, same_shape
from autodiff.ir import Expr, Function, StringImm, TensorType, Tuple, TupleType, Var, build_function, dtype, shape
from autodiff.library import call as library_call
from autodiff.library import number
from autodiff.scan import from_marks
from autodiff.typed import normalizer
from autodiff.zapp import reshaped
from bridge.aten.any_operator import check_functional, whole
from bridge.aten.complex_arithmetic import COMPLEX, convert_complex, is_complex
from bridge.aten.complex_value import PARTS, Complex, joined, joined_form, separated
from bridge.aten.draws import ChainedDraws, given_type, unplaced
from bridge.aten.number_checks import compared, computed_numbers, first_broken, holds
from bridge.aten.registry import CONVERSIONS, ELEMENT_TYPES, UnsupportedUse, dims, has_extents, relax_dtype
from bridge.aten.shape import is_size, size
from bridge.base.devices import HOST
from bridge.base.errors import CompilationError, Unsupported, UnsupportedModule
from bridge.base.tensor_properties import as_parts
from bridge.base.torch_internals import ELEMENTWISE_TYPE_PROMOTION_KIND, HigherOrderOperator, elementwise_dtypes
from bridge.capture import WHERE, Captured, Output, TensorMetadata


def made_by(node: fx.Node) -> fx.Node:
    """The node of the operator that computes a value; for an item of a tuple, the node that makes the tuple."""
    return node.args[0] if node.target is operator.getitem else node


def other_form(output: Output, node: fx.Node, result: Expr) -> Unsupported | None:
    """A refusal if a result has another shape or element type than eager's on the sample; extents are not compared.

    Args:
        node: the node whose value is returned.
        result: its conversion, with the parts of complex numbers in a last dimension.
    """
    eagers = joined_form(TensorMetadata(output.shape, output.dtype))
    wanted, made = (tuple(eagers.shape), ELEMENT_TYPES[eagers.dtype]), (shape(result), dtype(result))
    extents = zip(made[0], wanted[0], strict=False)
    is_same = len(made[0]) == len(wanted[0]) and wanted[1] in (made[1], "bool")  # masks are numbers up to the end
    if is_same and not any(isinstance(one, int) and one != other for one, other in extents):
        return None
    reason = f"eager returns {wanted[1]}{list(wanted[0])}, its conversion makes {made[1]}{list(made[0])}"
    maker = made_by(node)
    return Unsupported(str(maker.target), maker.meta.get(WHERE, "forward"), reason)


@dataclass(frozen=True)
class Imported:
    """A module's forward as a Relax function.

    Attributes:
        function: parameters are the module's tensors, the argument tensors, then ``draw_<k>`` inputs for random draws
            that are no dropout; results are the computed outputs, then the new values of mutated buffers, then the
            generator's state and the index of a broken check, where the function has them.
        output_of: for each leaf of the module's result, its index among the function's results, ``None`` if the
            leaf is not computed (a constant, or a view of a tensor that the caller has).
        num_outputs: how many results are outputs; those after them belong to ``Captured.mutated``, in order.
        dropout_draws: eager draw of each ``relax.nn.dropout`` binding, in binding order.
        input_draws: eager draw of each ``draw_<k>`` parameter, in parameter order.
        leaves_state: whether the program draws: then the result after the mutated buffers, uint8, is the state that the
            default generator has after the call.
        checks: conditions on numbers, in words: the number's source, and the comparison. If there are any, the
            function's last result, int64 and 0-d, is the index of the first that does not hold, from 1 on, or 0.
    """

    function: Function
    output_of: tuple[int | None, ...]
    num_outputs: int
    dropout_draws: tuple[int, ...]
    input_draws: tuple[int, ...]
    leaves_state: bool = False
    checks: tuple[tuple[str, str], ...] = ()


def unknown_types(captured: Captured) -> list[Unsupported]:
    """Tensors that enter the function with types that Relax does not compute with."""
    nodes = {node.name: node for node in captured.graph.nodes if node.op == "placeholder"}
    entering = [(spec.name, spec.name, spec.dtype) for spec in captured.module_tensors]
    entering += [(f"argument {index}", "forward", fake.dtype) for index, fake in enumerate(captured.given.tensors)]
    for name, value in captured.names.literals.items():
        where = next((each.meta[WHERE] for each in nodes[name].users if WHERE in each.meta), captured.module_name)
        entering.append(("a tensor literal", where, value.dtype))
    return [
        Unsupported(what, at, f"values of type {t}") for what, at, t in entering if t not in (*ELEMENT_TYPES, *PARTS)
    ]


_HALF = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


class Importer:
    """The context of conversions: emission, types, casts, draws.

    Attributes:
        bindings: the emitted bindings, in order.
        assertions: truth values that must hold, or else the call falls back to eager, each with its meaning in words.
    """

    def __init__(self, captured: Captured):
        self.captured = captured
        self.bindings: list[tuple[Var, Expr]] = []
        self.dropout_draws: list[int] = []
        self.draw_params: dict[int, Var] = {}
        self.assertions: list[tuple[Expr, str]] = []
        self.draws = ChainedDraws(self, captured.draws)
        self._normalize = normalizer()
        self._names: dict[str, int] = {}
        self._hint = "v"

    def emit(self, value: Expr) -> Expr:
        """Binds ``value`` to a new variable named after the node that is converted."""
        try:
            value = self._normalize(value)
        except UnknownShape as error:
            raise UnsupportedUse(f"sizes that vary, {error.why}") from error
        if isinstance(value, Var):
            return value
        count = self._names.get(self._hint, 0)
        self._names[self._hint] = count + 1
        name = self._hint if count == 0 else f"{self._hint}__{count}"
        var = Var(name, value.ty)
        self.bindings.append((var, value))
        return var

    def item(self, value: Expr, index: int) -> Expr:
        """Field ``index`` of a tuple-typed variable."""
        return self.emit(relax.TupleGetItem(value, index))

    def library(self, name: str, args: Sequence[Any], result: Any) -> Expr:
        """Emits a library call (see :mod:`autodiff.library`); ``result``: metadata of its result, or of several."""
        ty: Any = (
            self.type_of(result)
            if isinstance(result, torch.Tensor | TensorMetadata)
            else TupleType([self.type_of(field) for field in result])
        )
        return self.emit(library_call(name, [self._library_argument(arg) for arg in args], ty))

    def _library_argument(self, arg: Any) -> Expr:
        if isinstance(arg, bool | int | float):
            return relax.prim_value(int(arg) if isinstance(arg, bool) else arg)
        if isinstance(arg, str):
            return StringImm(arg)
        if isinstance(arg, Extent):
            return relax.prim_value(arg)
        if isinstance(arg, list | tuple) and all(isinstance(item, int | Extent) for item in arg):
            return relax.ShapeExpr(list(arg))
        if isinstance(arg, list | tuple):
            return self.emit(Tuple(list(arg)))
        return arg

    @staticmethod
    def type_of(form: torch.Tensor | TensorMetadata) -> TensorType:
        """The Relax type of a fake tensor, or of TensorMetadata with extents."""
        return TensorType(dims(form.shape), relax_dtype(form.dtype))

    @staticmethod
    def out(node: fx.Node) -> torch.Tensor | TensorMetadata:
        """The metadata of a node's value, which the conversion must produce."""
        return node.meta["val"]

    def out_dtype(self, node: fx.Node) -> str:
        return relax_dtype(self.out(node).dtype)

    def constant(self, value: bool | int | float | Extent | Expr, element_type: str) -> Expr:
        """A 0-d constant; a dynamic size, or a number computed from sizes (:mod:`bridge.aten.shape`), as 0-d tensor."""
        if isinstance(value, Extent):
            return self.emit(number(value, element_type))
        kind = np.iinfo(element_type) if type(value) is int and "int" in element_type else None
        if kind is not None and not kind.min <= value <= kind.max:
            raise UnsupportedUse(f"{value} as {element_type}", "a number that this type holds")
        return self.cast(value, element_type) if isinstance(value, Expr) else relax.const(value, element_type)

    def ratio(self, a: Dim, b: Dim, element_type: str) -> Expr:
        """``a / b`` as Python divides integers, rounded to ``element_type``."""
        if not has_extents((a, b)):
            return self.constant(a / b, element_type)
        quotient = self.emit(relax.op.divide(self.constant(a, "float64"), self.constant(b, "float64")))
        return self.cast(quotient, element_type)

    def filled(self, fake: torch.Tensor, value: bool | int | float) -> Expr:
        """A tensor like ``fake`` with every element ``value``."""
        ty = self.type_of(fake)
        return self.emit(relax.op.full(ty.shape, self.constant(value, str(ty.dtype)), str(ty.dtype)))

    def cast(self, value: Expr | Extent | bool | int | float, element_type: str) -> Expr:
        """``value`` as ``element_type`` with torch's meaning (to bool: is it not zero); numbers become constants."""
        if isinstance(value, bool | int | float | Extent):
            return self.constant(value, element_type)
        if dtype(value) == element_type:
            return value
        if element_type == "bool":
            return self.emit(relax.op.not_equal(value, self.constant(0, dtype(value))))
        return self.emit(relax.op.astype(value, element_type))

    def operands(self, node: fx.Node, *args: Any) -> list[Expr]:
        """``args`` cast to the dtype of the node's result."""
        element_type = self.out_dtype(node)
        return [self.cast(arg, element_type) for arg in args]

    def compared(self, node: fx.Node, *args: Any) -> list[Expr]:
        """``args`` cast to the dtype in which torch compares the node's operands."""
        fakes = [_for_promotion(a) for a in node.args[: len(args)]]
        kind = ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
        _, common = elementwise_dtypes(*fakes, type_promotion_kind=kind)
        return [self.cast(arg, relax_dtype(common)) for arg in args]

    def reshape(self, value: Expr, target: Sequence[int]) -> Expr:
        """``value`` in another shape; itself if it has that shape."""
        target = dims(target)
        if same_shape(shape(value), target):
            return value
        return self.emit(reshaped(value, target))

    def expand(self, value: Expr, target: Sequence[int]) -> Expr:
        """``value`` broadcast to ``target``; itself if it has that shape."""
        target = dims(target)
        return value if same_shape(shape(value), target) else self.emit(relax.op.broadcast_to(value, list(target)))

    def slice(self, value: Expr, axes: Sequence[int], begin: Sequence[Dim], end: Sequence[Dim], step: int = 1) -> Expr:
        """Every ``step``-th from ``begin`` to ``end``, which lie within the axes."""
        steps = [step] * len(axes)
        if not has_extents((shape(value), begin, end)):
            return self.emit(relax.op.strided_slice(value, axes, begin, end, steps))
        return self.emit(relax.op.strided_slice(value, axes, begin, end, steps, assume_inbound=True))

    def in_float32(self, convert: Callable[..., Any], node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of ``convert``; half types are computed in float32, and rounded at the end."""
        wanted = node.meta["val"]
        fakes = wanted if isinstance(wanted, tuple | list) else [wanted]
        if not any(fake.dtype in _HALF for fake in fakes):
            return convert(self, node, *args, **kwargs)

        def widened(value: Any) -> Any:
            if isinstance(value, TensorMetadata) and value.dtype in _HALF:
                return value.to(torch.float32)
            if isinstance(value, torch.Tensor) and value.dtype in _HALF:
                return torch.empty_strided(value.shape, value.stride(), dtype=torch.float32, device="meta")
            if isinstance(value, Expr) and isinstance(value.ty, TensorType) and dtype(value) in _HALF.values():
                return self.cast(value, "float32")
            return torch.float32 if isinstance(value, torch.dtype) and value in _HALF else value

        wide = SimpleNamespace(name=node.name, target=node.target, args=node.args, kwargs=node.kwargs)
        wide.meta = {**node.meta, "val": fx.node.map_aggregate(wanted, widened)}
        args, kwargs = fx.node.map_aggregate((args, kwargs), widened)
        made = convert(self, wide, *args, **kwargs)
        if not isinstance(made, tuple):
            return self.cast(made, relax_dtype(fakes[0].dtype))
        return tuple(self.cast(each, relax_dtype(fake.dtype)) for each, fake in zip(made, fakes, strict=True))

    def parts_of(self, node: fx.Node, value: Expr) -> Expr | Complex:
        """A placeholder's value: its two parts if it is complex and ``value`` holds both, otherwise ``value``."""
        if not self.out(node).dtype.is_complex:
            return value
        self._hint = node.name
        return separated(self, value)

    def whole_of(self, value: Expr | Complex) -> Expr:
        """A result's value: one tensor, with both parts of a complex one."""
        return joined(self, value) if isinstance(value, Complex) else value

    def in_memory(self, value: Expr, index: int, last: bool = False) -> Expr:
        """Marks the content of an input's memory at this point."""
        return self.emit(library_call("overwritten", [value, *map(relax.prim_value, (index, int(last)))], value.ty))

    def draw(self, node: fx.Node) -> Expr:
        """The input with eager's draw at ``node``; the parts of complex numbers are in a last dimension."""
        if node.name not in self.captured.names.draws:
            raise UnsupportedUse("a random draw that was not observed in eager")
        index = self.captured.names.draws[node.name]
        draw = self.captured.draws[index]
        if not same_shape(draw.shape, dims(self.out(node).shape)):
            raise UnsupportedUse(f"eager draws a tensor of shape {draw.shape}, the graph {tuple(self.out(node).shape)}")
        if self.draws.is_chained(index):
            return self.cast(self.draws.make(index, ()), self.out_dtype(node))
        self.draw_params[index] = Var(f"draw_{index}", given_type(draw))
        return self.cast(self.draw_params[index], self.out_dtype(node))

    def _result(self, node: fx.Node, results: Any, index: Any) -> Any:
        """One of the results of an operator; ``None`` for a result that its conversion does not compute."""
        value = results[index]
        if value is None and node.users and isinstance(node.meta.get("val"), torch.Tensor | TensorMetadata):
            raise UnsupportedUse(f"its result {index} is used, which its conversion does not compute")
        return value

    def convert(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        """The Relax value(s) of a ``call_function`` node."""
        args = fx.node.map_arg(node.args, env.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, env.__getitem__)
        if node.target is operator.getitem:
            return self._result(node, *args)
        self._hint = node.name
        if node.target not in CONVERSIONS and is_size(node):
            return size(self, node, args)
        if is_complex(node, args, kwargs):
            return convert_complex(self, node, args, kwargs)
        return CONVERSIONS.get(node.target, whole)(self, node, *args, **kwargs)


def _unsupported(captured: Captured, node: fx.Node, use: UnsupportedUse) -> Unsupported:
    where = node.meta.get(WHERE) or f"inside {captured.module_name} ({node.name})"
    return _explained(str(node.target), where, use)


def _explained(op: str, where: str, use: UnsupportedUse) -> Unsupported:
    return Unsupported(op, where, use.reason, **({"hint": use.hint} if use.hint else {}))


def import_graph(captured: Captured) -> Imported:
    """Converts a traced graph to a Relax function in flat form.

    Raises:
        UnsupportedModule: lists every operator without a conversion and every use that a conversion does not support.
        CompilationError: a conversion failed; names the operator and the user's line.
    """
    unknown = unknown_types(captured)
    problems = [*captured.problems, *computed_numbers(captured), *unplaced(captured), *unknown]
    if unknown:
        raise UnsupportedModule(captured.module_name, problems)
    importer = Importer(captured)
    params, env = _parameters(captured, importer)
    for node in captured.graph.nodes:
        if node.op != "call_function":
            continue
        try:
            if isinstance(node.target, HigherOrderOperator):
                raise UnsupportedUse("a higher-order operator")
            known = node.target is operator.getitem or node.target in CONVERSIONS or node.target in COMPLEX
            if not known and not is_size(node):
                check_functional(node)
            env[node] = importer.convert(node, env)
        except UnsupportedUse as unsupported:
            maker = made_by(node)
            if not any(problem.op == str(maker.target) for problem in problems):
                problems.append(_unsupported(captured, maker, unsupported))
            env[node] = _stand_in(node.meta.get("val"))
        except Exception as error:
            if problems:  # a stand-in for an unsupported value need not suit every operator
                break
            where = node.meta.get(WHERE) or node.format_node()
            raise CompilationError(f"imported ({node.target} at {where})", str(captured.graph), error) from error
    if problems:
        raise UnsupportedModule(captured.module_name, problems)
    return _finish(captured, importer, params, env)


def _stand_in(value: Any) -> Any:
    """A variable in place of an unsupported node's value, so that the walk finds all unsupported nodes."""
    if isinstance(value, tuple | list):
        return tuple(_stand_in(field) for field in value)
    if not isinstance(value, torch.Tensor | TensorMetadata):
        return value
    known = value.dtype if value.dtype in ELEMENT_TYPES else torch.float32
    return Var("unsupported", TensorType(dims(value.shape), ELEMENT_TYPES[known]))


def _for_promotion(arg: Any) -> Any:
    """A stand-in for an operand with its kind, element type and rank, for torch's type promotion."""
    value = arg.meta["val"] if isinstance(arg, fx.Node) else arg
    if isinstance(value, TensorMetadata):
        return torch.empty((1,) * value.dim(), dtype=value.dtype, device="meta")
    return value.sample if isinstance(value, Extent) else value


def _parameters(captured: Captured, importer: Importer) -> tuple[list[Var], dict[fx.Node, Any]]:
    types = [
        (parameter_name(spec.name), importer.type_of(joined_form(TensorMetadata(spec.shape, spec.dtype))))
        for spec in captured.module_tensors
    ]
    nodes = [node for node in captured.graph.nodes if node.op == "placeholder"]
    names = {index: name for name, index in captured.names.placeholders.items()}
    shapes = captured.sizes.shapes or [fake.shape for fake in captured.given.tensors]
    for index, (fake, extents) in enumerate(zip(captured.given.tensors, shapes, strict=True), start=len(types)):
        types.append(
            (
                names.get(index, f"argument_{index}"),
                importer.type_of(joined_form(TensorMetadata(tuple(extents), fake.dtype))),
            )
        )
    params = [Var(name, ty) for name, ty in types]
    env: dict[fx.Node, Any] = {}
    for node in nodes:
        if node.name in captured.names.placeholders:
            param = params[captured.names.placeholders[node.name]]
            env[node] = importer.parts_of(node, param)
        elif node.name in captured.names.literals:
            env[node] = importer.parts_of(node, _lifted_constant(captured, node))
        else:
            env[node] = node.meta.get("val")
    return params, env


def parameter_name(path: str) -> str:
    """The name of the parameter for a module's tensor."""
    return "p_" + "".join(c if c.isalnum() else "_" for c in path)


def _lifted_constant(captured: Captured, node: fx.Node) -> Expr:
    """A tensor literal of the module's code."""
    value = as_parts(captured.names.literals[node.name])
    array = value.detach().to(HOST).contiguous()
    if array.dtype == torch.bfloat16:
        return relax.const(array.float().numpy(), "bfloat16")
    return relax.const(np.asarray(array.numpy()), relax_dtype(array.dtype))


def _finish(captured: Captured, importer: Importer, params: list[Var], env: dict[fx.Node, Any]) -> Imported:
    results: list[Expr] = []
    output_of: list[int | None] = []
    for node, output in zip(captured.results, captured.outputs, strict=True):
        if not output.is_tensor or output.alias_of is not None or node is None:
            output_of.append(None)
            continue
        result = importer.whole_of(env[node])
        if (problem := other_form(output, node, result)) is not None:
            raise UnsupportedModule(captured.module_name, [problem])
        output_of.append(len(results))
        results.append(result)
    num_outputs = len(results)
    for place, (index, node) in enumerate(captured.mutated):
        value = importer.whole_of(env[node])
        results.append(importer.in_memory(value, index, last=True) if place in captured.left else value)
    try:
        state = importer.draws.last_state()
    except UnsupportedUse as unsupported:
        problem = _explained("the generator's state", captured.module_name, unsupported)
        raise UnsupportedModule(captured.module_name, [problem]) from unsupported
    results += state
    checks = [(condition, ("assertion in forward", message)) for condition, message in importer.assertions]
    checks += [
        (holds(importer, env[node], reading), (f"number read at {reading.where}", compared(reading)))
        for node, reading in zip(captured.read, captured.numbers.guards, strict=True)
        if node is not None
    ]
    if checks:
        results.append(first_broken(importer, [condition for condition, _ in checks]))
    used = sorted(importer.draw_params)
    function = build_function([*params, *(importer.draw_params[k] for k in used)], importer.bindings, results)
    function = from_marks(function)
    words = tuple(words for _, words in checks)
    draws = tuple(importer.dropout_draws), tuple(used)
    return Imported(function, tuple(output_of), num_outputs, *draws, bool(state), words)
