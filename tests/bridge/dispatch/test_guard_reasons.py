"""Differences of a call from its entry: each one is seen, named, and the call runs eager.

Every case changes one thing after the dispatch was added. The quick guard must not take the call, the thorough one must
name the difference, and the result is eager's.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, parametrize

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from bridge.base.errors import ARGUMENTS, INTERPRETER, MODULE, STRUCTURE, GuardFailure
from bridge.dispatch.guards import EntryGuard, interpreter_state
from bridge.state import SampleCall
from tests.bridge.models import MLP, Tied
from tests.device import AUTOCAST, DEVICE

FLAGS = {"double": False}
FACTOR = 2.0


def halve(x):
    return x * 0.5 if FLAGS["double"] else x


class Reads(nn.Module):
    """Reads all kinds of Python state: attributes, nested containers, the class, globals, a helper, children."""

    factor = 3.0

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.plain = nn.Linear(6, 6, bias=False)
        self.scale = 2.0
        self.offset = 0.0
        self.options = {"outer": {"inner": 2.0}, "list": [[1.0, 2.0]]}
        self.table = torch.ones(6)

    def forward(self, x):
        x = self.plain(self.layers(x)) * self.scale * self.factor * FACTOR * self.table
        x = x * self.options["outer"]["inner"] + self.options["list"][0][1] + self.shift(x)
        return halve(x) * math.copysign(1.0, self.offset) * getattr(self, "extra", 1.0)

    def shift(self, x):
        return x + 1


def rows() -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(3)).requires_grad_()


def set_item(container, key, value):
    before = container[key]
    container[key] = value
    return lambda: container.__setitem__(key, before)


def set_attribute(owner, name, value):
    missing = name not in vars(owner)
    before = getattr(owner, name, None)
    setattr(owner, name, value)
    return lambda: delattr(owner, name) if missing else setattr(owner, name, before)


def append(module):
    module.layers.append(copy.deepcopy(module.layers[0]).requires_grad_(False))
    return lambda: module.layers.pop(2)


def reorder(module):
    module.layers._modules["0"] = module.layers._modules.pop("0")

    def undo():
        module.layers._modules["1"] = module.layers._modules.pop("1")

    return undo


def give_bias(module):
    module.plain.bias = nn.Parameter(torch.ones(6))
    return lambda: setattr(module.plain, "bias", None)


def add_parameter(module):
    module.plain.register_parameter("more", nn.Parameter(torch.ones(1)))
    return lambda: module.plain._parameters.pop("more")


def other_class(module):
    kind = type("Doubling", (nn.Linear,), {"forward": lambda self, x: 2 * nn.Linear.forward(self, x)})
    module.plain.__class__ = kind
    return lambda: setattr(module.plain, "__class__", nn.Linear)


def parametrized(module):
    parametrize.register_parametrization(module.plain, "weight", nn.Tanh())
    return lambda: parametrize.remove_parametrizations(module.plain, "weight", leave_parametrized=False)


def plain_weight(module):
    kept = module.plain._parameters["weight"]
    module.plain._parameters["weight"] = kept.detach().clone().requires_grad_()
    return lambda: module.plain._parameters.__setitem__("weight", kept)


def inner_forward(module):
    module.plain.forward = lambda x: x * 7
    return lambda: delattr(module.plain, "forward")


def other_weight(module):
    kept = module.plain.weight
    module.plain.weight = nn.Parameter(kept.detach().t().contiguous().t())
    return lambda: setattr(module.plain, "weight", kept)


CHANGES = {
    "attribute": (lambda m: set_attribute(m, "scale", 5.0), "attribute 'scale' of the module changed"),
    "sign of zero": (lambda m: set_attribute(m, "offset", -0.0), "attribute 'offset' of the module changed"),
    "number of another type": (lambda m: set_attribute(m, "scale", 2), "attribute 'scale' of the module changed"),
    "new attribute": (lambda m: set_attribute(m, "extra", 2.0), "attribute 'extra' was added to the module"),
    "attribute of a class": (
        lambda m: set_attribute(Reads, "factor", 4.0),
        "attribute 'factor' of class Reads changed",
    ),
    "method of a class": (
        lambda m: set_attribute(Reads, "shift", lambda self, x: x - 1),
        "attribute 'shift' of class Reads changed",
    ),
    "forward of a class": (
        lambda m: set_attribute(nn.Tanh, "forward", lambda self, x: x),
        "forward of class Tanh changed",
    ),
    "nested dict": (lambda m: set_item(m.options["outer"], "inner", 9.0), "attribute 'options' of the module changed"),
    "nested list": (lambda m: set_item(m.options["list"][0], 1, 9.0), "attribute 'options' of the module changed"),
    "global": (lambda m: set_item(globals(), "FACTOR", 8.0), "global 'FACTOR' changed"),
    "global of a helper": (lambda m: set_item(FLAGS, "double", True), "global 'FLAGS['double']' changed"),
    "helper": (lambda m: set_item(globals(), "halve", lambda x: x * 4), "global 'halve' changed"),
    "added child": (append, "submodule 'layers.2' was added"),
    "order of children": (reorder, "order of the submodules of submodule 'layers' changed"),
    "child by assignment": (
        lambda m: set_item(m.layers._modules, "1", nn.ReLU()),
        "submodule 'layers.1' was replaced",
    ),
    "class of a child": (other_class, "type of submodule 'plain': compiled for Linear, called with Doubling"),
    "parametrization": (parametrized, "type of submodule 'plain'"),
    "bias where there was none": (give_bias, "parameter 'plain.bias' was None"),
    "parameter added": (add_parameter, "number of parameters of submodule 'plain': compiled for 2, called with 3"),
    "tensor for a parameter": (plain_weight, "parameter 'plain.weight' is a plain tensor, not a Parameter"),
    "strides of a parameter": (other_weight, "strides of parameter 'plain.weight'"),
    "forward of a child": (inner_forward, "forward of submodule 'plain' was replaced"),
    "tensor attribute gone": (lambda m: set_attribute(m, "table", 2.0), "attribute"),
}


@pytest.fixture(scope="module")
def pair():
    """A dispatched module and its eager twin; every test undoes its changes."""
    torch.manual_seed(0)
    module = Reads()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    return module, eager


@pytest.mark.composes("attributes, globals, closures, code that forward reads")
@pytest.mark.parametrize("name", list(CHANGES))
def test_a_change_is_seen_and_named(pair, name):
    module, eager = pair
    change, reason = CHANGES[name]
    guard = stats(module).entries[0].guard
    x = rows()
    assert guard.check(module, (x,), {}) is not None
    undo = [change(module), change(eager)]
    try:
        assert guard.check(module, (x,), {}) is None
        with pytest.raises(GuardFailure) as caught:
            guard.match(SampleCall(module, (x,), {}))
        assert caught.value.reason.startswith(reason), caught.value.reason
        assert caught.value.stage == MODULE
        before = stats(module).misses[caught.value.reason]
        torch.testing.assert_close(module(x), eager(x), rtol=0, atol=0)
        assert stats(module).misses[caught.value.reason] == before + 1
    finally:
        for step in reversed(undo):
            step()
    assert guard.check(module, (x,), {}) is not None, "the change was undone"


def test_what_makes_no_difference_is_allowed(pair):
    """Equal values in other objects: the thorough check accepts them where the quick one does not."""
    module, eager = pair
    guard = stats(module).entries[0].guard
    hits = stats(module).hits
    undo = set_attribute(module, "scale", float("2.0"))  # an equal number, another object
    torch.testing.assert_close(module(rows()), eager(rows()))
    undo()
    module.plain.weight.data = module.plain.weight.data.clone()
    assert guard.check(module, (rows(),), {}) is not None
    assert stats(module).hits == hits + 1


def _dual():
    return forward_ad.dual_level()


class _Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class _deterministic:
    def __enter__(self):
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_):
        torch.use_deterministic_algorithms(False)


class _default_dtype:
    def __enter__(self):
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_):
        torch.set_default_dtype(torch.float32)


STATES = {
    "grad mode: compiled for True, called with False": torch.no_grad,
    f"{AUTOCAST}: compiled for False, called with torch.bfloat16": lambda: torch.autocast(DEVICE.type, torch.bfloat16),
    f"{AUTOCAST}: compiled for False, called with torch.float16": lambda: torch.autocast(DEVICE.type, torch.float16),
    "default dtype: compiled for torch.float32, called with torch.float64": _default_dtype,
    "deterministic algorithms: compiled for False, called with True": _deterministic,
    "forward-mode differentiation: compiled for False, called with True": _dual,
    "torch dispatch mode: compiled for False, called with True": _Mode,
    "torch function mode: compiled for False, called with True": torch.overrides.BaseTorchFunctionMode,
    "torch function mode: compiled for False, called with default device meta": lambda: torch.device("meta"),
    "parametrize.cached(): compiled for False, called with True": parametrize.cached,
}


@pytest.mark.composes(
    "autocast, grad mode, inference mode, default dtype, deterministic algorithms",
    "eager, with a reason that names it",
    section="Guards",
)
@pytest.mark.parametrize("reason", list(STATES))
def test_interpreter_state(pair, reason):
    module, eager = pair
    x = rows()
    with STATES[reason]():
        actual, expected = module(x), eager(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert stats(module).misses[reason] == 1


@pytest.mark.composes("the order of the checks", "the cheap and global first", section="Guards")
def test_the_cheap_and_global_comes_first(pair):
    """A call that differs in everything is named by the first stage; each stage hides the later ones."""
    module, _ = pair
    guard = stats(module).entries[0].guard
    module.scale = 7.0
    try:
        for args, context, stage in (
            ((3,), torch.no_grad, INTERPRETER),
            ((3,), torch.enable_grad, STRUCTURE),
            ((torch.ones(2),), torch.enable_grad, ARGUMENTS),
            ((rows(),), torch.enable_grad, MODULE),
        ):
            with context(), pytest.raises(GuardFailure) as caught:
                guard.match(SampleCall(module, args, {}))
            assert caught.value.stage == stage
    finally:
        module.scale = 2.0


@pytest.mark.composes("the order of the checks")
def test_order_of_the_checks_on_a_tensor(pair):
    """Shape before type before gradient before strides."""
    module, _ = pair
    guard = stats(module).entries[0].guard
    wrong = torch.ones(6, 5, dtype=torch.float64).t()
    for argument, reason in (
        (torch.ones(2, dtype=torch.int64), "shape of args[0]: compiled for (5, 6), called with (2,)"),
        (wrong, "dtype of args[0]: compiled for torch.float32, called with torch.float64"),
        (wrong.float(), "requires_grad of args[0]: compiled for True, called with False"),
        (wrong.float().requires_grad_(), "strides of args[0]: compiled for (6, 1), called with (1, 5)"),
    ):
        with pytest.raises(GuardFailure) as caught:
            guard.match(SampleCall(module, (argument,), {}))
        assert caught.value.reason == reason


def test_state_is_named():
    assert dict(interpreter_state())["autocast"] is False
    assert len({name for name, _ in interpreter_state()}) == len(interpreter_state())


@pytest.mark.composes(
    "`torch.func.functional_call`, transforms",
    "parameters are dispatched, also another module's; plain tensors and transforms: eager, with a reason",
    section="The module stays the user's",
)
def test_functional_call_misses(pair):
    module, eager = pair
    parameters = {name: (parameter * 2) for name, parameter in eager.named_parameters()}
    actual = torch.func.functional_call(module, parameters, (rows(),))
    torch.testing.assert_close(actual, torch.func.functional_call(eager, parameters, (rows(),)), rtol=0, atol=0)
    assert any("functional_call" in reason for reason in stats(module).misses)


@pytest.mark.composes("`torch.func.functional_call`, transforms")
@pytest.mark.parametrize("change", [lambda p: p, lambda p: nn.Parameter(p.detach() / 2)], ids=["own", "others"])
def test_functional_call_with_parameters_is_dispatched(pair, change):
    """Parameters are looked up at every call, so any of the same layout will do, and get the gradients.

    Smaller ones: where tanh is near 1, its derivative has few digits left.
    """
    module, eager = pair
    x, results, before = rows(), [], stats(module).hits
    for each in (module, eager):
        torch.manual_seed(3)
        parameters = {name: change(parameter) for name, parameter in each.named_parameters()}
        result = torch.func.functional_call(each, parameters, (x,))
        results.append((result, *torch.autograd.grad(result.sum(), list(parameters.values()))))
    for ours, eagers in zip(*results, strict=True):
        torch.testing.assert_close(ours, eagers)
    assert stats(module).hits == before + 1


@pytest.mark.composes("`torch.func.functional_call`, transforms")
def test_functional_call_with_frozen_parameters_misses(pair):
    module, eager = pair
    x = rows()
    frozen = {name: nn.Parameter(p.detach(), requires_grad=False) for name, p in module.named_parameters()}
    wanted = torch.func.functional_call(eager, frozen, (x,))
    torch.testing.assert_close(torch.func.functional_call(module, frozen, (x,)), wanted, rtol=0, atol=0)
    assert any("requires_grad" in reason for reason in stats(module).misses)


@pytest.mark.composes("`torch.func.functional_call`, transforms")
def test_functorch_transforms_miss(pair):
    module, eager = pair
    batch = rows().detach()[None].expand(3, 5, 6)
    actual = torch.func.vmap(module)(batch)
    torch.testing.assert_close(actual, torch.func.vmap(eager)(batch), rtol=0, atol=0)
    x = rows().detach()
    actual = torch.func.grad(lambda x: module(x).sum())(x)
    torch.testing.assert_close(actual, torch.func.grad(lambda x: eager(x).sum())(x), rtol=0, atol=0)
    assert stats(module).misses["functorch transform: compiled for False, called with True"] == 2


@pytest.mark.composes(
    "parametrizations (`weight_norm`, `spectral_norm`)",
    "dispatched as they are when added",
    section="The module stays the user's",
)
def test_weight_norm_is_dispatched_as_it_is_when_added():
    torch.manual_seed(0)
    module = parametrizations.weight_norm(nn.Linear(6, 4))
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    torch.testing.assert_close(module(rows()), eager(rows()))
    assert stats(module).hits == 1


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(6))
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(2)
        return self.linear(x) * self.mean


@pytest.mark.composes(
    "inputs that alias each other, a parameter or a buffer",
    "works, or eager with a reason",
    section="Guards",
)
def test_input_that_aliases_a_buffer_which_the_call_changes():
    """Eager reads the changed values through the argument; a compiled call would read the old ones."""
    torch.manual_seed(0)
    module = Writes()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, torch.ones(5, 6).expand(5, 6))
    add_tvm_dispatch(module, torch.ones(6).expand(5, 6))
    torch.testing.assert_close(module(module.mean.expand(5, 6)), eager(eager.mean.expand(5, 6)), rtol=0, atol=0)
    assert list(stats(module).misses) == ["args[0] shares memory with buffer 'mean', which the call changes"]
    torch.testing.assert_close(module(torch.ones(6).expand(5, 6)), eager(torch.ones(6).expand(5, 6)))
    assert stats(module).hits == 1


@pytest.mark.composes("inputs that alias each other, a parameter or a buffer")
def test_parameter_as_an_argument():
    torch.manual_seed(0)
    module = MLP(6, 6, 6)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, torch.randn(6, 6, requires_grad=True))
    for each in (module, eager):
        each(each.first.weight).square().sum().backward()
    assert stats(module).hits == 1
    torch.testing.assert_close(module.first.weight.grad, eager.first.weight.grad)


def test_tie_that_is_cut_is_named():
    module = Tied()
    index = torch.arange(6).reshape(2, 3)
    add_tvm_dispatch(module, index)
    module.output.weight = nn.Parameter(module.embedding.weight.detach().clone())
    module(index)
    assert list(stats(module).misses) == ["parameter 'embedding.weight' is no longer tied to 'weight'"]


class Unregistered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(6, 6)]

    def forward(self, x):
        return self.layers[0](x)


class ReadsListed(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = [torch.ones(6)]

    def forward(self, x):
        return x * self.tables[0] + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def test_free_tensors_that_no_guard_sees_are_refused():
    """Gradients of a layer in a list would go nowhere."""
    with pytest.raises(UnsupportedModule, match="free tensor"):
        add_tvm_dispatch(Unregistered(), rows())


def test_a_listed_tensor_is_read_anew_as_is_another_one():
    module, x = add_tvm_dispatch(ReadsListed(), rows()), rows()
    module.tables[0].mul_(2)
    torch.testing.assert_close(module(x), module.forward(x))
    assert stats(module).hits == 1
    module.tables[0] = torch.full((6,), 5.0)
    torch.testing.assert_close(module(x), module.forward(x))
    assert stats(module).hits == 2 and not stats(module).misses


def test_a_listed_tensor_that_is_nested_by_now_is_told():
    """The quick comparison of tensors would end the process over it."""
    module = add_tvm_dispatch(ReadsListed(), rows())
    module.tables[0] = torch.nested.nested_tensor([torch.ones(6)])
    with pytest.raises(RuntimeError, match="nested"):  # eager's
        module(rows())
    assert dict(stats(module).misses) == {"layout of attribute 'tables[0]': a nested tensor": 1}


def test_quick_is_never_more_than_match():
    """The thorough check accepts every call that the quick one accepts, and returns the same tensors."""
    torch.manual_seed(0)
    module = Reads()
    add_tvm_dispatch(module, rows())
    guard = stats(module).entries[0].guard
    assert isinstance(guard, EntryGuard)
    for args in ((rows(),), (rows()[:3],), (3,), (), (rows(), rows())):
        quick = guard.check(module, args, {})
        if quick is not None:
            assert all(a is b for a, b in zip(quick, guard.match(SampleCall(module, args, {})), strict=True))
        else:
            with pytest.raises(GuardFailure):
                guard.match(SampleCall(module, args, {}))
