"""Autocast as casts: every cast that eager makes under ``torch.autocast`` → a node of the training graph.

The record is made above autocast's dispatch key: it has operators with the arguments that the module gave them. Here
each operator runs once more on fake tensors under the autocast setting of its row, which shows the casts that autocast
puts before it; they become ``_to_copy`` nodes. Then the operator runs on the cast arguments without autocast, and must
do the very same. Operators of which a GPU's autocast asks for results in float32 instead (sums, norms, softmaxes) are
given that ``dtype``. A composite operator inside which autocast goes on casting (a recurrent layer, ``einsum``) is
taken apart (:mod:`bridge.capture.passes.autocast`); any other one is refused by name.

Eager keeps the cast of a float32 parameter until the outermost autocast context ends, so that its gradients are added
up in the lower precision: the record says of each row which parameters were cast there, anew. Anything else, or with
``cache_enabled=False``, is cast at each use.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from bridge.base.errors import Unsupported, user_line
from bridge.base.modes import autocast_to
from bridge.base.torch_fakes import fake_mode
from bridge.base.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    aten,
    implements_composite,
    python_kernels,
    pytree,
    schema,
)
from bridge.base.torch_shapes import fixed
from bridge.capture.isolated_rng import watched_operators
from bridge.capture.passes.alias_analysis import AUTOCAST, MEMORY, ROW, STOPPED, memory_at, told
from bridge.capture.rows import Row, at_hints, key_of, memory_of

__all__ = ["AutocastState", "autocast_of_row", "expand", "spell_out_casts", "without_casts"]

#: The user's own casts: autocast leaves them alone.
_CONVERSIONS = (aten.to, aten._to_copy, aten.type_as)


def autocast_of_row(row: Row, cast: Collection[fx.Node]) -> AutocastState:
    """What autocast does to a row; ``cast``: the placeholders that it cast there, since it had kept no cast of them."""
    return AutocastState(*row.autocast, frozenset(cast))


def without_casts(node: fx.Node) -> None:
    """Marks an operator that runs without autocast, wherever it stands: one of a backward."""
    node.meta[AUTOCAST] = AutocastState(None)


@dataclass(frozen=True)
class AutocastState:
    """What autocast does to an operator, by where the operator stands.

    Attributes:
        dtype: what autocast casts to, ``None`` if it is off.
        caches: whether it keeps the casts of parameters.
        anew: parameters that it cast here although it keeps casts: for the first time, or since it lost those it had.
    """

    dtype: torch.dtype | None
    caches: bool = False
    anew: frozenset[fx.Node] = frozenset()


def spell_out_casts(graph: fx.Graph, requires_grad: Callable[[fx.Node], bool]) -> list[Unsupported]:
    """Rewrites a training graph in place as described above, each node as :func:`autocast_of_row` says of its row.

    Args:
        requires_grad: whether a placeholder's tensor requires grad.
    """
    problems: list[Unsupported] = []
    shared: dict[fx.Node, tuple[fx.Node, int | None]] = {}
    known = _KnownCasts()
    lowered: dict[fx.Node, torch.dtype] = {}

    def cast(node: fx.Node, source: fx.Node, dtype: torch.dtype, place: AutocastState) -> fx.Node:
        """``source`` in another element type, for ``node``."""
        is_parameter = source.op == "placeholder" and requires_grad(source)
        if not is_parameter or dtype is not place.dtype or source.meta["val"].dtype is not torch.float32:
            return _insert_cast(node, source, dtype)
        if lowered.setdefault(source, dtype) is not dtype:
            reason = f"autocast to {dtype} of what is cast to {lowered[source]} too: torch's cache may mix them up"
            _refuse(node, reason, problems)
        if not place.caches:
            return _insert_cast(node, source, dtype)
        made, made_for = shared.get(source, (None, None))
        if made is None or (source in place.anew and made_for != node.meta.get(ROW)):
            made = _insert_cast(node, source, dtype)
            made.meta.pop(STOPPED, None)  # autograd follows a cast that is kept, wherever it was made
            shared[source] = made, node.meta.get(ROW)
        return made

    for node in list(graph.nodes):
        place = node.meta.get(AUTOCAST)
        if place is None or place.dtype is None or not isinstance(node.target, OpOverload):
            continue
        done = known.of(node, place.dtype, problems)
        if done is None:
            values = _tensors(node)
            made = expand(node, values, place.dtype) if _may_expand(node, values, place.dtype) else None
            if made is None:
                _refuse(node, "autocast casts inside of this operator", problems)
            for each in [each for each in made or () if _is_cast(each)]:
                each.replace_all_uses_with(cast(each, each.args[0], each.kwargs["dtype"], place))
                graph.erase_node(each)
            continue
        if done.form is not None:
            node.target, node.args, node.kwargs = done.form.target, done.form.args, done.form.kwargs
        replaced = {source: cast(node, source, dtype, place) for source, dtype in done.casts.items()}
        if replaced:
            node.args = fx.map_arg(node.args, lambda source, to=replaced: to.get(source, source))
            node.kwargs = fx.map_arg(node.kwargs, lambda source, to=replaced: to.get(source, source))
    return problems


@dataclass(frozen=True)
class _Form:
    """An operator and its arguments, as a node has them."""

    target: OpOverload
    args: tuple
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class _Done:
    """What autocast does to a call.

    Attributes:
        casts: the element types that it gives to arguments.
        form: the call that asks for results of another type, if it becomes one.
    """

    casts: dict[fx.Node, torch.dtype]
    form: _Form | None = None


class _KnownCasts:
    """:func:`_done_to`, asked once of calls that are alike: autocast looks at operators and element types.

    It is asked at the sample's sizes: for symbolic ones Python kernels take the place of some operators that autocast
    casts.
    """

    def __init__(self) -> None:
        self._places: dict[tuple, list[tuple[int, torch.dtype]]] = {}
        self._mode = fake_mode(allow_non_fake_inputs=True, static_shapes=True)

    def of(self, node: fx.Node, setting: torch.dtype, problems: list[Unsupported]) -> _Done | None:
        sources = node.all_input_nodes

        def tensor(source: fx.Node) -> tuple:
            if not isinstance(value := source.meta.get("val"), FakeTensor):
                raise TypeError
            layout = tuple(map(fixed, value.shape)), tuple(map(fixed, value.stride()))
            return sources.index(source), *layout, value.dtype, value.device

        try:
            operands = key_of((node.args, node.kwargs), fx.Node, tensor)
            key = node.target, operands, setting, *_dtypes(node.meta.get("val"))
        except TypeError:
            key = None
        if key is not None and key in self._places:
            return _Done({sources[place]: dtype for place, dtype in self._places[key]})
        count = len(problems)
        done = _done_to(node, _tensors(node, self._mode), setting, problems)
        if key is not None and done is not None and done.form is None and len(problems) == count:
            self._places[key] = [(sources.index(source), dtype) for source, dtype in done.casts.items()]
        return done


def _may_expand(node: fx.Node, values: dict[fx.Node, FakeTensor], setting: torch.dtype) -> bool:
    """Whether an operator is composite, and was traced with the element types that it gives."""
    return is_composite(node) and _dtypes(_run(_form_of(node), values, setting)[0]) == _dtypes(node.meta.get("val"))


def _tensors(node: fx.Node, mode: FakeTensorMode | None = None) -> dict[fx.Node, FakeTensor]:
    """Fake tensors like those among an operator's arguments; none if autocast has nothing to cast.

    ``mode``: what they are made in, at the sample's sizes; ``None``: that of the arguments.
    """
    sources = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), FakeTensor)]
    if not any(source.meta["val"].is_floating_point() for source in sources):
        return {}
    return {source: _stand_in(source.meta["val"], mode=mode) for source in sources}


def _is_cast(node: fx.Node) -> bool:
    return node.target is aten._to_copy.default and set(node.kwargs) == {"dtype"}


def _insert_cast(node: fx.Node, source: fx.Node, dtype: torch.dtype) -> fx.Node:
    with node.graph.inserting_before(node):
        cast = node.graph.call_function(aten._to_copy.default, (source,), {"dtype": dtype})
    cast.meta = told(node)
    cast.meta["val"] = _stand_in(source.meta["val"], dtype)
    return cast


def _done_to(
    node: fx.Node, plain: dict[fx.Node, FakeTensor], setting: torch.dtype, problems: list[Unsupported]
) -> _Done | None:
    """What autocast does to an operator; ``None`` if it casts inside of it."""
    if not plain or node.target.overloadpacket in _CONVERSIONS:
        return _Done({})
    form = _form_of(node)
    result, under = _run(form, plain, setting)
    casts = next((casts for casts in _guesses(plain, under, setting) if _explains(form, plain, casts, under)), None)
    widened = None
    if casts is None:
        widened = next((each for each in _widened(form) if _explains(each, plain, {}, under)), None)
    if (casts is None and widened is None) or (casts and schema(node.target).is_mutable):
        return None
    if _dtypes(result) != _dtypes(node.meta.get("val")):
        _refuse(node, f"autocast to {setting} gave {_dtypes(node.meta.get('val'))}, alone {_dtypes(result)}", problems)
    return _Done(casts or {}, widened)


def _form_of(node: fx.Node) -> _Form:
    return _Form(node.target, node.args, dict(node.kwargs))


def _widened(form: _Form) -> Iterator[_Form]:
    """The call, asked for results in float32 by an argument that it has, or that an overload of the operator has."""
    own = schema(form.target).arguments
    given = {argument.name: value for argument, value in zip(own, form.args, strict=False)} | form.kwargs
    if given.get("dtype") is not None:
        return
    values = {each.name: given[each.name] if each.name in given else each.default_value for each in own}
    names = {*values, "dtype"}
    packet = form.target.overloadpacket
    for target in (form.target, *(getattr(packet, name) for name in packet.overloads())):
        arguments = schema(target).arguments
        if {each.name for each in arguments} == names and not schema(target).is_mutable:
            args = tuple(values[each.name] for each in arguments if not each.kwarg_only and each.name != "dtype")
            kwargs = {each.name: values[each.name] for each in arguments if each.kwarg_only and each.name != "dtype"}
            yield _Form(target, args, {**kwargs, "dtype": torch.float32})


def _guesses(
    plain: dict[fx.Node, FakeTensor], under: list[_Call], setting: torch.dtype
) -> Iterator[dict[fx.Node, torch.dtype]]:
    """Which of the first calls may be autocast's casts: an operator may begin with casts of its own."""
    of = {id(value): source for source, value in plain.items()}
    leading = {of[call.cast_of]: call.dtype for call in takewhile(lambda call: call.cast_of in of, under)}
    lower = {source: dtype for source, dtype in leading.items() if dtype is setting}
    if lower:
        yield lower
    if len(leading) > len(lower):
        yield leading
    yield {}


def _explains(
    form: _Form, plain: dict[fx.Node, FakeTensor], casts: dict[fx.Node, torch.dtype], under: list[_Call]
) -> bool:
    """Whether the operator does without autocast, on arguments cast like that, what it did under it."""
    given = {source: _stand_in(value, casts.get(source)) for source, value in plain.items()}
    try:
        _, alone = _run(form, given, None)
    except RuntimeError:  # types that do not go together
        return False
    made = {(id(plain[source]), dtype) for source, dtype in casts.items()}
    return [call.what for call in alone] == [call.what for call in under if (call.cast_of, call.dtype) not in made]


def _refuse(node: fx.Node, reason: str, problems: list[Unsupported]) -> None:
    where = user_line(node.meta.get("stack_trace")) or "a line that is not known"
    problem = Unsupported(str(node.target), where, reason, "disable autocast around it")
    if problem not in problems:
        problems.append(problem)


class _Call:
    """An operator as the dispatcher saw it: what was computed, and, of a cast, which tensor it casts to what."""

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any):
        leaves = pytree.tree_leaves((args, kwargs))
        forms = [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
        self.what = (str(func), forms, _dtypes(result))
        is_cast = func is aten._to_copy.default and set(kwargs) <= {"dtype"}
        self.cast_of = id(args[0]) if is_cast else None
        self.dtype = kwargs.get("dtype")


def _run(form: _Form, values: dict[fx.Node, FakeTensor], setting: torch.dtype | None) -> tuple[Any, list[_Call]]:
    """Runs one operator on fake tensors; casts made by autocast show among the calls."""
    mode = next(iter(values.values())).fake_mode

    def given(source: fx.Node) -> Any:
        value = values.get(source, source.meta.get("val"))
        return value if mode.shape_env else at_hints(value)

    args, kwargs = fx.map_arg((form.args, form.kwargs), given)
    calls: list[_Call] = []

    def watch(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func.namespace != "prim":  # questions about a tensor's device
            calls.append(_Call(func, args, kwargs, result))
        return result

    kernels = python_kernels() if mode.shape_env else nullcontext()
    with mode, kernels, watched_operators(watch), torch.no_grad(), autocast_to(setting, cache_enabled=False):
        result = form.target(*args, **kwargs)
    return result, calls


def _stand_in(value: FakeTensor, dtype: torch.dtype | None = None, mode: FakeTensorMode | None = None) -> FakeTensor:
    """A tensor of this layout; cast to another element type, in the layout that the cast gives it."""
    with mode or value.fake_mode, torch.no_grad():
        shape, stride = tuple(value.shape), value.stride()
        if mode is not None:
            shape, stride = at_hints((shape, stride))
        like = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
        return like if dtype is None else like.to(dtype)


def _dtypes(value: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


# Composite operators inside which autocast casts → the operators that they are made of.
#
# A recurrent layer, ``einsum`` or ``multi_dot`` reaches autocast only through the products that it calls. Run on fake
# tensors under the autocast setting of its place, such an operator shows what it does there, casts included; that takes
# its place in the graph.


def is_composite(node: fx.Node) -> bool:
    """Whether an operator is defined, derivative included, by the operators that it calls."""
    return implements_composite(node.target)


def expand(node: fx.Node, values: dict[fx.Node, torch.Tensor], setting: torch.dtype | None) -> list[fx.Node] | None:
    """Replaces a call of a composite operator by what it does, and returns the new nodes in order.

    Args:
        node: a call in a training-IR graph; it is erased.
        values: fake tensors for the tensors among its arguments.
        setting: what autocast casts to where it stands, ``None`` if it is off.

    ``None``, and nothing is changed, if part of what it does is out of sight below autograd: a ``detach``, or nothing
    taken apart at all.
    """
    sources = list(values)
    mode = next(iter(values.values())).fake_mode

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        of = dict(zip(sources, tensors, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: of.get(source, source.meta.get("val")))
        return pytree.tree_leaves(node.target(*args, **kwargs))

    autocast = autocast_to(setting, cache_enabled=False)
    with mode, torch.no_grad(), autocast:
        inner = make_fx(run)(*values.values()).graph
    memory = {memory_of(value): memory_at(source)[0] for source, value in values.items()}
    calls = [each for each in inner.nodes if each.op == "call_function"]
    if any(each.target in (aten.detach.default, node.target) for each in calls):
        return None
    if any(each.op not in ("placeholder", "call_function", "output") for each in inner.nodes):
        return None
    returned = [each for result in inner.output_node().args[0] for each in memory_at(result)]
    memory = {**dict(zip(returned, memory_at(node), strict=True)), **memory}
    return _put_in_place(node, inner, sources, memory)


def _put_in_place(node: fx.Node, inner: fx.Graph, sources: list[fx.Node], memory: dict) -> list[fx.Node]:
    """``memory``: of what is returned, and of arguments, the memory there → that in the graph."""
    copied: dict[fx.Node, fx.Node] = {}
    remaining = iter(sources)
    with node.graph.inserting_before(node):
        for each in inner.nodes:
            if each.op == "placeholder":
                copied[each] = next(remaining)
            elif each.op == "call_function":
                copied[each] = made = node.graph.node_copy(each, copied.__getitem__)
                made.meta = {"val": each.meta.get("val"), **told(node)}
                made.meta[MEMORY] = [memory.get(known, known) for known in memory_at(made)]
    results = [copied[result] for result in inner.output_node().args[0]]
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])
            node.graph.erase_node(user)
    node.replace_all_uses_with(results[0])
    node.graph.erase_node(node)
    return [each for each in copied.values() if each not in sources]
