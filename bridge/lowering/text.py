"""Pretty printing: a binding of a Relax function → one line; functions as TVMScript with their scans' bodies."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

from tvm.tirx import FloatImm, IntImm

from autodiff.ir import (
    Call,
    Constant,
    Expr,
    ExternFunc,
    Function,
    ShapeExpr,
    StringImm,
    TensorType,
    Tuple,
    TupleGetItem,
    TupleType,
    Var,
    bindings,
    library_name,
    numpy_value,
    op_name,
)
from autodiff.scan import Scan, is_scan, scan_of

_OPTIONS = re.compile(r'R\.str\("\{\\"body\\": .*?[^\\]"\)')


def script(function: Function) -> str:
    """A function in flat form as TVMScript. A scan's options are printed in words; its body, without its gradient,
    follows the function, under the name that stands in the call."""
    scans = [scan_of(value)[0] for _, value in bindings(function) if is_scan(value)]
    if not scans:
        return function.script()
    names = {body: f"step_{index}" for index, body in enumerate(dict.fromkeys(scan.body for scan in scans))}
    told = iter([f'R.str("{_words(scan, names[scan.body])}")' for scan in scans])
    text = _OPTIONS.sub(lambda _: next(told), function.script())
    bodies = [f"# {name}\n{script(scan.function)}" for scan in scans if (name := names.pop(scan.body, None))]
    return "\n\n".join([text, *bodies])


def _words(scan: Scan, name: str) -> str:
    order = ", last first" if scan.reverse else ""
    return f"{name}, {scan.length} times{order}: {scan.carries} carries, {scan.xs} xs, {scan.constants} constants"


_FEW = 6  # elements up to which a constant is printed


def type_text(ty: object) -> str:
    """``float32[3, 17]``, or several in parentheses for a tuple."""
    if isinstance(ty, TensorType) and ty.shape is not None:
        return f"{ty.dtype}[{', '.join(str(int(extent)) for extent in ty.shape)}]"
    if isinstance(ty, TupleType):
        return f"({', '.join(type_text(field) for field in ty.fields)})"
    return str(ty)


def short_op(value: Expr) -> str:
    """A short name for a binding's operation: the operator, the library function, or ``item`` for a tuple's field.

    A whole ATen operator (``library.operator``) has its ATen name.
    """
    library = library_name(value)
    if library in ("library.operator", "library.operator_vjp"):
        name = str(value.args[1].value).removeprefix("aten.").removesuffix(".default")
        return name + ("_vjp" if library.endswith("vjp") else "")
    if library is not None:
        return library.removeprefix("library.")
    name = op_name(value)
    if name is not None:
        return name.removeprefix("relax.").removeprefix("nn.")
    if isinstance(value, TupleGetItem):
        return "item"
    if isinstance(value, Tuple):
        return "tuple"
    if isinstance(value, Constant):
        return "constant"
    return "same" if isinstance(value, Var) else type(value).__name__


def attributes(value: Expr) -> dict[str, str]:
    """The attributes of a call as text, without unset ones."""
    if isinstance(value, TupleGetItem):
        return {"index": str(value.index)}
    if not isinstance(value, Call) or value.attrs is None or library_name(value) is not None:
        return {}
    fields = type(value.attrs).__tvm_ffi_type_info__.fields
    found = {field.name: getattr(value.attrs, field.name) for field in fields}
    return {
        name: _attribute(held) for name, held in found.items() if held is not None and str(held) not in ("", "void")
    }


def _attribute(held: object) -> str:
    if isinstance(held, Iterable) and not isinstance(held, str):
        return f"[{', '.join(map(str, held))}]"
    return str(held)


def value_text(expr: Expr) -> str:
    """An argument: a variable's name, a number, a shape, a string."""
    if isinstance(expr, Var):
        return expr.name
    if isinstance(expr, Constant):
        return _constant(expr)
    if isinstance(expr, ShapeExpr):
        return f"({', '.join(str(int(extent)) for extent in expr.values)})"
    if isinstance(expr, Tuple):
        return f"({', '.join(map(value_text, expr.fields))})"
    if isinstance(expr, IntImm | FloatImm):
        return f"{expr.value:.6g}" if isinstance(expr, FloatImm) else str(expr.value)
    if isinstance(expr, StringImm):
        return expr.value if len(expr.value) <= 60 else expr.value[:57] + "..."
    if isinstance(expr, Call | TupleGetItem):
        return call_text(expr)
    return str(expr)


def _constant(constant: Constant) -> str:
    if str(constant.ty.dtype) == "bfloat16":  # numpy has none
        return f"constant {type_text(constant.ty)}"
    held = numpy_value(constant)
    if held.size == 1:
        number = held.item()
        return f"{number:.6g}" if isinstance(number, float) else str(number)
    if held.size <= _FEW:
        return str(held.tolist())
    return f"constant {type_text(constant.ty)}"


def call_text(value: Expr) -> str:
    """``sum(x, axis=[0, 1], keepdims=False)``."""
    if isinstance(value, TupleGetItem):
        return f"{value_text(value.tuple_value)}[{value.index}]"
    if not isinstance(value, Call):
        return value_text(value)
    arguments = [value_text(arg) for arg in value.args if not isinstance(arg, ExternFunc)]
    arguments += [f"{name}={held}" for name, held in attributes(value).items()]
    return f"{short_op(value)}({', '.join(arguments)})"


def binding_line(var: Var, value: Expr) -> str:
    """``name: type = op(arguments, attributes)``."""
    return f"{var.name}: {type_text(var.ty)} = {call_text(value)}"


def function_lines(function: Function) -> list[str]:
    """A line per binding of a function in flat form."""
    return [binding_line(var, value) for var, value in bindings(function)]


def count(number: int | float) -> str:
    """A count with a decimal prefix, such as ``1.23 G``."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor:
            return f"{number / factor:.2f} {unit}"
    return f"{number:.0f} "


def megabytes(number: int) -> str:
    """A number of bytes in the unit that fits, such as ``1.2 MiB``."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number} B"


def folded(text: str) -> str:
    """Text → a collapsible HTML element, whose summary is the first line."""
    head, _, rest = html.escape(text).partition("\n")
    return f"<details><summary>{head.removeprefix('# ')}</summary><pre>{rest}</pre></details>"


class Foldable:
    """A report that prints as text, and in notebooks as the same text, folded."""

    def _repr_html_(self) -> str:
        return folded(str(self))
