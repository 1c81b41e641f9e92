"""Python objects as arguments: taken apart, given to forward as objects of their class, compared field by field."""

from __future__ import annotations

import collections
import functools
from dataclasses import dataclass, field, replace
from types import CellType, FunctionType, SimpleNamespace

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.bridge.beside import beside, double


@dataclass
class Batch:
    x: torch.Tensor
    scale: float = 2.0
    mask: torch.Tensor | None = None
    factor = 3

    @property
    def masked(self):
        return self.x if self.mask is None else self.x * self.mask

    def scaled(self):
        return self.masked * self.scale * self.factor


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    flag: bool = True


@dataclass(slots=True)
class Slots:
    x: torch.Tensor
    name: str = "relu"


@dataclass
class Nested:
    batch: Batch
    more: list = field(default_factory=list)
    words: dict = field(default_factory=dict)


class Plain:
    """Tensors and a number of its own; no dataclass."""

    kinds = ("a", "b")

    def __init__(self, x):
        self.x, self.count = x, 3

    def __len__(self):
        return self.count


class Output(dict):
    """A mapping whose keys are also attributes."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Net(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.linear, self.run = nn.Linear(4, 4).double(), run

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


def x(seed):
    return double(seed, 3, 4)


FORMS = {
    "a dataclass": (lambda m, b: m.linear(b.scaled()), lambda i: Batch(x(i))),
    "with a mask": (lambda m, b: m.linear(b.scaled()), lambda i: Batch(x(i), 0.5, x(i + 50) > 0)),
    "frozen": (lambda m, b: m.linear(b.x).relu() if b.flag else b.x, lambda i: Frozen(x(i))),
    "with slots": (lambda m, b: getattr(torch, b.name)(m.linear(b.x)), lambda i: Slots(x(i))),
    "nested": (
        lambda m, b: m.linear(b.batch.scaled()) + b.more[0] * b.words["y"].x,
        lambda i: Nested(Batch(x(i)), [x(i + 10), 2], {"y": Frozen(x(i + 20))}),
    ),
    "no dataclass": (lambda m, b: m.linear(b.x) * len(b) * len(b.kinds), lambda i: Plain(x(i))),
    "a mapping": (lambda m, b: m.linear(b.x) + b["y"], lambda i: Output(x=x(i), y=x(i + 30))),
    "a UserDict": (lambda m, b: m.linear(b["x"]), lambda i: collections.UserDict(x=x(i))),
    "a namespace": (lambda m, b: m.linear(b.x) * b.k, lambda i: SimpleNamespace(x=x(i), k=2)),
    "replaced": (lambda m, b: m.linear(replace(b, scale=b.scale + 1).scaled()), lambda i: Batch(x(i))),
    "a new one as result": (lambda m, b: Batch(m.linear(b.x), b.scale), lambda i: Batch(x(i))),
    "isinstance": (lambda m, b: m.linear(b.x) if isinstance(b, Batch) else b.x, lambda i: Batch(x(i))),
}


def tensors(result):
    return [result.x, result.scale] if isinstance(result, Batch) else [result]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("sample", [True, False])
def test_training_is_eagers(form, keyword, sample):
    run, make = form

    def step(m, own, i):
        given = make(i)
        result = tensors(m(b=given) if keyword else m(given))
        result[0].square().sum().backward()
        return [each.detach() if isinstance(each, torch.Tensor) else each for each in result]

    if sample and keyword:
        beside(lambda: (Net(run), None), step, lambda m, own: (), sample_kwargs={"b": make(9)})
    else:
        beside(lambda: (Net(run), None), step, (lambda m, own: (make(9),)) if sample else None)


def test_the_gradient_of_a_tensor_in_it():
    def step(m, own, i):
        b = Batch(x(i).requires_grad_(), mask=x(i + 5).requires_grad_())
        m(b).sin().sum().backward()
        return b.x.grad, b.mask.grad

    sample = Batch(x(8).requires_grad_(), mask=x(9).requires_grad_())
    beside(lambda: (Net(lambda m, b: m.linear(b.scaled())), None), step, lambda m, own: sample)


CHANGES = {
    "another number": lambda b: setattr(b, "scale", 3.5),
    "an integer": lambda b: setattr(b, "scale", 2),
    "negative zero": lambda b: setattr(b, "scale", -0.0),
    "None to a tensor": lambda b: setattr(b, "mask", x(77)),
    "an attribute of its own": lambda b: setattr(b, "factor", 5),
    "another shape": lambda b: setattr(b, "x", double(3, 5, 4)),
    "another class": lambda b: setattr(b, "__class__", type("Other", (Batch,), {"factor": 7})),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("first", [2.0, 0.0])
def test_a_changed_object_is_another_call(change, first):
    module = Net(lambda m, b: m.linear(b.scaled() / b.scale))
    dispatched = add_tvm_dispatch(Net(module.run), Batch(x(1), first))
    dispatched.load_state_dict(module.state_dict())
    for seed in (2, 3):
        given = Batch(x(seed), first)
        if seed == 3:
            change(given)
        torch.testing.assert_close(dispatched(given), module(given), rtol=1e-12, atol=0, equal_nan=True)


def numbers(batch, name):
    return 5 if name == "scale" else object.__getattribute__(batch, name)


WATCHED = {
    "factor": 7,
    "scaled": lambda self: self.x - 1,
    "masked": property(lambda self: self.x * 9),
    "__getattribute__": numbers,
}


@pytest.mark.parametrize("name", WATCHED)
def test_class_attributes_and_methods_are_watched(name, monkeypatch):
    module = Net(lambda m, b: m.linear(b.scaled()))
    dispatched = add_tvm_dispatch(Net(module.run), Batch(x(1)))
    dispatched.load_state_dict(module.state_dict())
    torch.testing.assert_close(dispatched(Batch(x(2))), module(Batch(x(2))))
    assert stats(dispatched).hits == 1
    monkeypatch.setattr(Batch, name, WATCHED[name])
    torch.testing.assert_close(dispatched(Batch(x(2))), module(Batch(x(2))))
    monkeypatch.undo()
    torch.testing.assert_close(dispatched(Batch(x(2))), module(Batch(x(2))))
    assert stats(dispatched).hits == 2


def sets(m, b):
    b.scale = 4.0
    return m.linear(b.x)


def adds(m, b):
    b.seen = m.linear(b.x)
    return b.seen * 2


def grows(m, b):
    b.more.append(m.linear(b.x))
    return b.more[-1] * 2


def keeps(m, b):
    m.last = b
    return m.linear(b.x)


REFUSED = {
    "an attribute is set": (sets, "an object that was passed"),
    "a tensor is added": (adds, "an object that was passed"),
    "it is returned": (lambda m, b: (m.linear(b.x), b), "an object that was passed"),
    "it is kept": (keeps, "an object that was passed"),
    "a list in it is returned": (lambda m, b: (m.linear(b.x), b.more), "an object that was passed"),
    "a list in it is kept": (lambda m, b: keeps(m, SimpleNamespace(x=b.x, more=b.more)), "an object that was passed"),
    "a list in it grows": (grows, "an object that was passed"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_a_compiled_call_cannot_do_is_refused(case):
    run, words = case
    given = Plain(x(1)) if run is grows else Batch(x(1))
    given.more = [x(2)]
    before, more = dict(vars(given)), [*given.more]
    with pytest.raises(UnsupportedModule, match=words):
        add_tvm_dispatch(Net(run), given)
    assert vars(given) == before and given.more == more


class Key:
    """Compared by identity, and hashed by it."""

    def __init__(self, x):
        self.x = x


IDENTITIES = {
    "is": lambda m, b: b is m.kept,
    "is of an attribute": lambda m, b: m.holder["kept"] is b,
    "id": lambda m, b: id(b) == m.number,
    "==": lambda m, b: b == m.kept,
    "in a list": lambda m, b: b in m.several,
    "in a set": lambda m, b: b in m.hashed,
    "a key": lambda m, b: m.table.get(b, False),
    "index": lambda m, b: m.several.count(b) > 0,
    "hash": lambda m, b: hash(b) == m.hash,
    "repr": lambda m, b: repr(b) == m.text,
    "a helper": lambda m, b: any(each is b for each in m.several),
}


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("asks", IDENTITIES.values(), ids=IDENTITIES)
def test_which_object_it_is(asks, same):
    """Eager's numbers, or a refusal: a compiled call has another object of the same contents."""
    module = Net(lambda m, b: m.linear(b.x) if asks(m, b) else b.x * 3)
    module.kept = kept = Key(x(1))
    module.holder, module.several, module.hashed, module.table = {"kept": kept}, [kept], {kept}, {kept: True}
    module.number, module.hash, module.text = id(kept), hash(kept), repr(kept)
    other, wanted = Key(x(1)), (module.linear(x(1)), x(1) * 3)
    try:
        add_tvm_dispatch(module, kept if same else other)
    except UnsupportedModule:
        return
    torch.testing.assert_close((module(kept), module(other)), wanted)


USES = {
    "vars": lambda m, b: m.linear(vars(b)["x"]) * vars(b)["scale"],
    "__dict__": lambda m, b: sum(v for k, v in sorted(b.__dict__.items()) if k == "x") + m.linear(b.x),
    "getattr": lambda m, b: m.linear(b.x) * getattr(b, "none", 4),
    "hasattr": lambda m, b: m.linear(b.x) if hasattr(b, "late") else b.x,
    "copy": lambda m, b: m.linear(__import__("copy").copy(b).scaled()),
    "fields": lambda m, b: m.linear(b.x) * len(__import__("dataclasses").fields(b)),
    "a number as text": lambda m, b: m.linear(b.x) * len(f"{b.scale}"),
    "a number decides": lambda m, b: m.linear(b.x) if b.scale > 2.5 else b.x,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_what_forward_asks_of_it(use):
    module = Net(use)
    dispatched = add_tvm_dispatch(Net(use), Batch(x(1)))
    dispatched.load_state_dict(module.state_dict())
    for seed, scale in ((2, 2.0), (3, 12.25), (4, 2.0), (5, 3.0)):
        given = Batch(x(seed), scale)
        if seed == 5:
            given.late = None
        torch.testing.assert_close(dispatched(given), module(given), rtol=1e-12, atol=1e-12)
    assert stats(dispatched).hits


FACTOR = 3.0


def tripled(v):
    return v * FACTOR


def of_tensor(w):
    return lambda v: v * w


def of_number(number):
    return lambda v: v * number


def scaled(w, v, factor=2):
    return w * v * factor


def with_defaults(w, number):
    def function(v, w=w, *, number=number):
        return v * w + number

    return function


def with_attribute(w):
    def function(v):
        return v * 2

    function.shift = w
    return function


def together(*functions):
    return lambda v: sum(each(v) for each in functions)


@dataclass
class WithFunction:
    x: torch.Tensor
    function: object


def call(m, function):
    return function(m.linear(torch.ones(3, 4).double()))


FUNCTIONS = {
    "of the module's code": (call, lambda i: tripled),
    "made anew": (call, lambda i: lambda v: v * 5),
    "of torch's": (call, lambda i: nn.functional.silu),
    "of a tensor": (call, lambda i: of_tensor(x(i))),
    "of a number": (call, lambda i: of_number(2.5)),
    "with defaults": (call, lambda i: with_defaults(x(i), 4)),
    "with an attribute": (lambda m, f: call(m, f) + f.shift, lambda i: with_attribute(x(i))),
    "partial": (call, lambda i: functools.partial(scaled, x(i), factor=3)),
    "of functions": (call, lambda i: together(of_tensor(x(i)), functools.partial(scaled, x(i)), tripled)),
    "of one function twice": (call, lambda i: (lambda f: together(f, f))(of_tensor(x(i)))),
    "in a dataclass": (lambda m, b: b.function(m.linear(b.x)), lambda i: WithFunction(x(i), of_tensor(x(i + 50)))),
    "twice": (lambda m, b: call(m, b[0]) + call(m, b[1]["f"]), lambda i: (lambda f: [f, {"f": f}])(of_tensor(x(i)))),
    "an object twice": (lambda m, b: m.linear(b[0].x) + b[1].x, lambda i: (lambda b: [b, b])(Batch(x(i)))),
}


@pytest.mark.composes(
    "functions, and objects that hold functions, among the arguments",
    "tensors that they close over are inputs; their code and plain values are conditions",
    section="Guards",
)
@pytest.mark.parametrize("case", FUNCTIONS)
def test_functions_are_compared_by_code_and_closure(case):
    run, make = FUNCTIONS[case]
    module = Net(run)
    dispatched = add_tvm_dispatch(Net(run), (make(1),))
    dispatched.load_state_dict(module.state_dict())
    for seed in (2, 3):
        found = [each(make(seed)) for each in (dispatched, module)]
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    assert stats(dispatched).hits == 2, stats(dispatched)


def test_the_gradient_of_a_tensor_that_a_function_closes_over():
    module = Net(call)
    w = x(1).requires_grad_()
    add_tvm_dispatch(module, (of_tensor(x(2).requires_grad_()),))
    module(of_tensor(w)).sum().backward()
    torch.testing.assert_close(w.grad, module.linear(torch.ones(3, 4).double()).detach())
    assert stats(module).hits == 1


OTHERS = {
    "code": lambda: lambda v: v * 4,
    "a number": lambda: of_number(4.0),
    "a type": lambda: of_number(2),
    "global names": lambda: FunctionType(of_number(2.0).__code__, {"FACTOR": 7}, "<lambda>", None, (CellType(2.0),)),
    "a partial": lambda: functools.partial(of_number(2.0)),
    "a class": lambda: nn.Softplus(),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_function_is_another_call(case):
    module = Net(call)
    add_tvm_dispatch(module, (of_number(2.0),))
    other = OTHERS[case]()
    wanted = other(module.linear(torch.ones(3, 4).double()))
    torch.testing.assert_close(module(other), wanted)
    assert stats(module).misses.total() == 1 and not stats(module).hits


def test_what_a_function_reads_is_a_condition(monkeypatch):
    module = Net(call)
    add_tvm_dispatch(module, (tripled,))
    monkeypatch.setitem(globals(), "FACTOR", 8.0)
    torch.testing.assert_close(module(tripled), module.linear(torch.ones(3, 4).double()) * 8)
    assert stats(module).misses.total() == 1


def test_a_function_of_what_no_graph_holds_is_refused():
    module = Net(call)

    def recursive(v):
        return recursive(v)

    for function in (of_tensor(module), of_number(object()), recursive):
        with pytest.raises(UnsupportedModule, match="not a tensor, number, string, flag, enum, dtype, device or None"):
            add_tvm_dispatch(module, (function,))


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("asks", IDENTITIES.values(), ids=IDENTITIES)
def test_which_function_it_is(asks, same):
    module = Net(lambda m, f: call(m, f) if asks(m, f) else m.linear(torch.zeros(3, 4).double()))
    module.kept, other = kept, _ = of_number(3.0), of_number(3.0)
    module.holder, module.several, module.hashed, module.table = {"kept": kept}, [kept], {kept}, {kept: True}
    module.number, module.hash, module.text = id(kept), hash(kept), repr(kept)
    wanted = call(module, kept), module.linear(torch.zeros(3, 4).double())
    try:
        add_tvm_dispatch(module, (kept if same else other,))
    except UnsupportedModule:
        return
    torch.testing.assert_close((module(kept), module(other)), wanted)


@pytest.mark.parametrize("same", [True, False])
def test_whether_two_functions_are_one(same):
    module = Net(lambda m, f, g: call(m, f) if f is g else m.linear(torch.zeros(3, 4).double()))
    one, two = of_number(3.0), of_number(3.0)
    wanted = call(module, one), module.linear(torch.zeros(3, 4).double())
    add_tvm_dispatch(module, (one, one if same else two))
    torch.testing.assert_close((module(one, one), module(one, two)), wanted)


ALIKE = {
    "two lists": lambda m, a, b: a is b,
    "of the module": lambda m, a, b: b is m.kept,
    "a helper": lambda m, a, b: not (lambda one, other: one is not other)(a, b),
    "id": lambda m, a, b: id(b) == m.number,
}


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("kind", [list, tuple, dict])
@pytest.mark.parametrize("asks", ALIKE.values(), ids=ALIKE)
def test_which_container_it_is(asks, kind, same):
    """Eager's numbers, or a refusal: a compiled call has another container of the same contents."""
    made = [{"x": x(1), "k": 2.0} if kind is dict else kind([x(1), 2.0]) for _ in range(2)]
    module = Net(lambda m, a, b: m.linear(x(1)) * (2 if asks(m, a, b) else 3))
    module.forward = lambda a, b: module.run(module, a, b)
    module.kept, module.number = made[0], id(made[0])
    wanted = module.linear(x(1))
    try:
        add_tvm_dispatch(module, (made[0], made[0] if same else made[1]))
    except UnsupportedModule as error:
        assert "forward asks which object it is given" in str(error)
        return
    torch.testing.assert_close((module(made[0], made[0]), module(*made)), (wanted * 2, wanted * 3))


def test_a_container_that_is_compared_with_other_types_hits():
    """A list is never the sentinel that a default is."""
    module = Net(None)
    module.forward = lambda a=FACTOR, b=FACTOR: module.linear(b[0] if a is not FACTOR and b is not FACTOR else x(1))
    add_tvm_dispatch(module, ([x(1)], (x(2),)))
    torch.testing.assert_close(module([x(3)], (x(4),)), module.linear(x(4)))
    assert stats(module).hits == 1


def test_an_equal_container_is_not_the_default():
    default = (1.0,)
    module = Net(None)
    module.run = lambda x, scale=default: module.linear(x) * (2 if scale is default else 3)
    module.forward = module.run
    add_tvm_dispatch(module, x(1))
    wanted = module.linear(x(1))
    torch.testing.assert_close((module(x(1)), module(x(1), default)), (wanted * 2, wanted * 2))
    torch.testing.assert_close(module(x(1), tuple([1.0])), wanted * 3)
    assert stats(module).hits == 2


@pytest.mark.parametrize("on_miss", ["eager", "compile"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_order_of_collected_keywords(wrapped, on_miss):
    """``**kwargs`` tells the order of its keywords, which parameters by name do not."""

    def first(x, **more):
        found = module.linear(x)
        for name, each in more.items():
            found = found * each if name == "a" else found + each
        return found

    module, given = Net(None), {"x": x(1), "a": x(2), "b": x(3)}
    module.forward = functools.wraps(first)(lambda *args, **kwargs: first(*args, **kwargs)) if wrapped else first
    add_tvm_dispatch(module, given, on_miss=on_miss)
    for names in ("xab", "xba", "bxa", "xab", "axb"):
        call = {name: given[name] for name in names}
        torch.testing.assert_close(module(**call), first(**call), rtol=1e-12, atol=1e-12)
    assert stats(module).hits == (5 if on_miss == "compile" else 2 if wrapped else 3)


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, lambda d: [d]])
@pytest.mark.parametrize("other", [True, 1.0], ids=repr)
def test_keys_that_are_equal_and_look_otherwise(kind, other):
    """Beside another argument as well, whose form is bound to the signature."""
    module = Net(lambda m, b: next(m.linear(v) * len(repr(k)) for k, v in (b[0] if type(b) is list else b).items()))
    add_tvm_dispatch(module, (kind({1: x(1)}),))
    for keywords in (False, True):
        given = kind({other: x(2)})
        result = module(b=given) if keywords else module(given)
        torch.testing.assert_close(result, module.linear(x(2)) * len(repr(other)))
    assert stats(module).hits == 0
    module(kind({1: x(3)}))
    assert stats(module).hits == 1
