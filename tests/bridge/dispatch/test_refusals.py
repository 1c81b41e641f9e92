"""Code that cannot be compiled exactly is refused by name and source line, and the module is then as it was."""

import copy
import pathlib
import random

import pytest
import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

from bridge import CompilationError, UnsupportedModule, add_tvm_dispatch, stats
from bridge.aten.registry import CONVERSIONS
from bridge.base.session import SESSION
from tests.bridge.models import MLP
from tests.sampling import sampled

FILE = pathlib.Path(__file__).name


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.5)


class UnsupportedOperator(Base):
    def forward(self, x):
        values = (self.linear(x).T @ x).to_sparse().to_dense()
        return self.dropout(x) * values


class TwoUnsupportedOperators(Base):
    def forward(self, x):
        values = (self.linear(x).T @ x).to_sparse().to_dense()
        return self.dropout(x) * values + torch.view_as_complex(x.half().reshape(-1, 2)).real.sum()


class DataDependentShape(Base):
    def forward(self, x):
        x = self.dropout(self.linear(x))
        return x[x > 0]


class ReadsValue(Base):
    def forward(self, x):
        y = self.dropout(self.linear(x))
        return y * y.abs().max().item()


class MutatesInput(Base):
    def forward(self, x):
        y = self.dropout(self.linear(x))
        x.add_(y)
        return y


class MutatesInputByIndex(Base):
    def forward(self, x):
        y = self.dropout(self.linear(x))
        x[0] = y[0]
        return y


class MutatesParameter(Base):
    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.linear.weight.mul_(0.9)
        return self.dropout(y)


class CountsCalls(Base):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.dropout(self.linear(x)) * self.calls


class ClippedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad_out):
        return grad_out * torch.rand_like(grad_out)  # draws: the Function cannot run as it is


class CustomFunction(Base):
    def forward(self, x):
        return ClippedGradient.apply(self.dropout(self.linear(x)))


class GradientHook(Base):
    """A tensor hook scales the gradient; dropping it would be silently wrong."""

    def forward(self, x):
        y = self.dropout(self.linear(x))
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 0.5)
        return y * 2


class UnsupportedDraw(Base):
    def forward(self, x):
        return nn.functional.rrelu(self.linear(x), 0.2, 0.2, training=True)


class OwnGenerator(Base):
    """Draws from a generator of the module's own, whose draws the package cannot put into eager's order."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x):
        return self.linear(x) + torch.randn(x.shape, generator=self.generator)

    def __deepcopy__(self, memo):
        copied = type(self)()
        copied.load_state_dict(self.state_dict())
        copied.generator.set_state(self.generator.get_state())
        return copied


class Reseeds(Base):
    """Seeds the default generator in the middle of forward, which no graph records."""

    def forward(self, x):
        y = self.linear(x)
        torch.manual_seed(42)
        return self.dropout(y)


_PRIVATE = random.Random(0)


def noisy(x):
    """A function that modes and subclasses of torch may override, as torch's own; it is the user's code still."""
    if has_torch_function((x,)):
        return handle_torch_function(noisy, (x,), x)
    return x + _PRIVATE.random()


class DrawsInOverridable(Base):
    def forward(self, x):
        return noisy(self.linear(x))


class LeavesForNumpy(Base):
    def forward(self, x):
        y = self.dropout(self.linear(x))
        return y + torch.from_numpy(y.detach().numpy() * 2)


class HalfComplexNumbers(Base):
    def forward(self, x):
        return torch.view_as_complex(self.dropout(self.linear(x)).half().reshape(-1, 2)).real


class NamesItsOwn(Base):
    """Parameters by names that lead to no module, as tensordict's TensorDictParams has them."""

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        for name, each in super().named_parameters(prefix, recurse, remove_duplicate):
            yield name.replace("linear.", "linear.0."), each

    def forward(self, x):
        return self.linear(x)


REFUSED = [
    (NamesItsOwn, "linear.0.weight", ""),
    (UnsupportedOperator, "_to_sparse", "(self.linear(x).T @ x).to_sparse()"),
    (DataDependentShape, "", "return x[x > 0]"),
    (ReadsValue, "", "return y * y.abs().max().item()"),
    (MutatesInput, "", "x.add_(y)"),
    (MutatesInputByIndex, "", "x[0] = y[0]"),
    (MutatesParameter, "", ""),
    (CountsCalls, "calls", ""),
    (CustomFunction, "ClippedGradient", "ClippedGradient.apply"),
    (GradientHook, "hook", ""),
    (UnsupportedDraw, "rrelu", "nn.functional.rrelu(self.linear(x), 0.2, 0.2, training=True)"),
    (OwnGenerator, "generator", ""),
    (Reseeds, "seed", "torch.manual_seed(42)"),
    (LeavesForNumpy, "", ""),
    (HalfComplexNumbers, "", "torch.view_as_complex"),
]


OF_THE_CPU = {LeavesForNumpy: "numpy takes no tensor of a GPU", OwnGenerator: "its generator is the CPU's"}
MARKS = [[pytest.mark.cpu(OF_THE_CPU[kind])] if kind in OF_THE_CPU else [] for kind, _, _ in REFUSED]
NAMES = [kind.__name__ for kind, _, _ in REFUSED]


@pytest.mark.parametrize(
    ("kind", "name", "source"),
    [pytest.param(*case, marks=marks, id=name) for case, marks, name in zip(REFUSED, MARKS, NAMES, strict=True)],
)
def test_refused_by_name_and_line(kind, name, source):
    torch.manual_seed(0)
    module = kind()
    x = torch.randn(6, 6)
    with pytest.raises(UnsupportedModule) as caught:
        add_tvm_dispatch(module, x, whole=True)
    text = str(caught.value)
    assert caught.value.ops
    assert name in text, f"{name!r} is not named in:\n{text}"
    if source:
        assert any(FILE in op.where and source in op.where for op in caught.value.ops), (
            f"no operation stands at {source!r} in:\n{text}"
        )
        assert source in text and FILE in text


def test_a_draw_inside_of_a_function_that_modes_override():
    with pytest.raises(UnsupportedModule, match=r"(?s)random.*return x \+ _PRIVATE.random\(\)"):
        add_tvm_dispatch(DrawsInOverridable(), torch.randn(6, 6), whole=True)


TOUCHES = (MutatesInputByIndex, MutatesParameter, CountsCalls, CustomFunction)
TOUCHES += (GradientHook, OwnGenerator, Reseeds, LeavesForNumpy, ReadsValue)
"""Refused modules with side effects, and one for each place that refuses."""


@pytest.mark.parametrize(
    "kind", sampled([pytest.param(case[0], marks=marks) for case, marks in zip(REFUSED, MARKS, strict=True)], TOUCHES)
)
def test_module_is_untouched_after_a_refusal(kind):
    torch.manual_seed(0)
    module = kind()
    reference = copy.deepcopy(module)
    x = torch.randn(6, 6)
    given = x.clone()
    keys = list(module.__dict__)
    generator = torch.get_rng_state()
    flags = {name: child.training for name, child in module.named_modules()}
    parameters = dict(module.named_parameters())

    with pytest.raises(UnsupportedModule):
        add_tvm_dispatch(module, x, whole=True)

    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(x, given), "the sample input was changed"
    assert list(module.__dict__) == keys
    assert module._compiled_call_impl is None
    assert flags == {name: child.training for name, child in module.named_modules()}
    assert all(parameter is parameters[name] for name, parameter in module.named_parameters())
    assert all(parameter.grad is None for parameter in module.parameters())
    _assert_equal_state(module, reference)
    for attribute in ("calls",):
        assert getattr(module, attribute, None) == getattr(reference, attribute, None)

    torch.manual_seed(5)
    actual = module(x.clone())
    torch.manual_seed(5)
    expected = reference(x.clone())
    assert torch.equal(actual, expected)
    _assert_equal_state(module, reference)


def _assert_equal_state(module, reference):
    state, wanted = module.state_dict(), reference.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[key], wanted[key]) for key in wanted)


def test_every_unsupported_operator_is_listed():
    with pytest.raises(UnsupportedModule) as caught:
        add_tvm_dispatch(TwoUnsupportedOperators(), torch.randn(6, 6))
    named = " ".join(str(op.op) for op in caught.value.ops)
    assert "_to_sparse" in named
    assert "view_as_complex" in named


def test_refusal_names_what_to_do():
    with pytest.raises(UnsupportedModule) as caught:
        add_tvm_dispatch(UnsupportedOperator(), torch.randn(6, 6))
    (op,) = [op for op in caught.value.ops if "_to_sparse" in op.op]
    assert op.op.startswith("aten.")
    assert op.reason or op.hint


def test_a_refused_submodule_leaves_dispatch_of_its_siblings():
    """The model around a refused part still trains with the parts that were accepted."""
    torch.manual_seed(0)
    model = nn.Sequential(MLP(6, 10, 6), UnsupportedOperator())
    x = torch.randn(6, 6)
    add_tvm_dispatch(model[0], x)
    with pytest.raises(UnsupportedModule):
        add_tvm_dispatch(model[1], x)
    model(x).sum().backward()
    assert stats(model[0]).hits == 1


def test_a_refused_second_entry_keeps_the_first():
    class Either(Base):
        def forward(self, x):
            return self.linear(x) if x.shape[0] == 4 else self.linear(x).to_sparse().to_dense()

    module = Either()
    add_tvm_dispatch(module, torch.randn(4, 6))
    keys = list(module.__dict__)
    with pytest.raises(UnsupportedModule):
        add_tvm_dispatch(module, torch.randn(6, 6))
    assert list(module.__dict__) == keys
    module(torch.randn(4, 6))
    assert stats(module).hits == 1
    assert len(stats(module).entries) == 1


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((torch.nn.functional.relu, torch.randn(7, 6)), {}, TypeError),
        ((MLP(), 3), {}, TypeError),
        ((MLP(), [torch.randn(7, 6)]), {}, TypeError),
        ((MLP(), torch.randn(7, 6)), {"partition": "none"}, ValueError),
        ((MLP(), torch.randn(7, 6)), {"on_miss": "retry"}, ValueError),
        ((MLP(), torch.randn(7, 6)), {"sample_kwargs": 3}, TypeError),
        ((MLP(), (torch.randn(7, 6), torch.randn(7, 6))), {}, TypeError),
    ],
    ids=["no module", "number", "list", "partition", "on_miss", "sample_kwargs", "too many arguments"],
)
def test_wrong_arguments(arguments, options, error):
    module = arguments[0]
    keys = list(module.__dict__)
    with pytest.raises(error):
        add_tvm_dispatch(*arguments, **options)
    assert list(module.__dict__) == keys


def test_a_sample_that_eager_refuses_names_the_shapes():
    module = MLP()
    keys = list(module.__dict__)
    with pytest.raises(RuntimeError, match=r"7.{1,3}5.*6.{1,3}10"):
        add_tvm_dispatch(module, torch.randn(7, 5))
    assert list(module.__dict__) == keys


def test_mixed_types_are_reported_in_eagers_words():
    """Fake tensors let a product of two types pass; eager does not."""
    module = nn.Linear(3, 2).double()
    with pytest.raises(RuntimeError, match="dtype") as eager:
        module(torch.randn(4, 3))
    with pytest.raises(RuntimeError) as raised:
        add_tvm_dispatch(module, torch.randn(4, 3))
    assert str(raised.value) == str(eager.value)


def test_a_failing_conversion_names_operator_and_line(monkeypatch):
    def broken(importer, node, x):
        raise ValueError("broken")

    monkeypatch.setitem(CONVERSIONS, torch.ops.aten.tanh.default, broken)
    sequence = nn.Sequential(MLP(), nn.Tanh())
    with pytest.raises(CompilationError, match=r"aten.tanh.default at .*ValueError: broken"):
        add_tvm_dispatch(sequence, torch.randn(7, 6))


@pytest.mark.parametrize(
    "where",
    [
        "bridge.dispatch.executable.Compilation",
        pytest.param("bridge.compile.cpu.backend.CpuLibraries", marks=pytest.mark.cpu("its libraries")),
    ],
)
def test_a_failing_compiler_names_the_direction(monkeypatch, where):
    """Machine code is made in the background: its errors are raised when the dispatch is added, and not kept."""

    def broken(*args, **options):
        raise ValueError("broken")

    SESSION.reset("programs")
    module = MLP()
    with monkeypatch.context() as patched:
        patched.setattr(where, broken)
        with pytest.raises(CompilationError, match="compile forward") as raised:
            add_tvm_dispatch(module, torch.randn(7, 6))
    assert "R.function" in raised.value.ir
    x = torch.randn(7, 6)
    expected = module(x)
    torch.testing.assert_close(add_tvm_dispatch(module, x)(x), expected)
    assert "R.function" in raised.value.ir


def test_an_argument_that_is_written_into_is_reported_once():
    class Overwrites(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            x += self.weight
            return x * 2

    with pytest.raises(UnsupportedModule) as caught:
        add_tvm_dispatch(Overwrites(), torch.ones(3))
    (problem,) = caught.value.ops
    assert problem.op == "add_" and "x += self.weight" in problem.where and "clone" in problem.hint
