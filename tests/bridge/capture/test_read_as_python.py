"""Numbers that forward reads as text, arrays, sizes and positions, in eager's branches; others are refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.bridge.compare import Call, assert_same, run

F64 = torch.float64
X = torch.randn(5, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
N, M = torch.tensor(2), torch.tensor(3)
LIST, OTHER = torch.tensor([1, 3]), torch.tensor([1, 4])
MASK = torch.tensor([True, False, True, True, False])
SAME_COUNT = torch.tensor([True, True, True, False, False])
FEWER = torch.tensor([True, True, False, False, False])

pytestmark = pytest.mark.cpu("numpy reads the memory of the host, and the text of a tensor names its device")


class Layer(nn.Module):
    """A linear layer before a function of its result and a tensor, which may read numbers."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.function = function

    def forward(self, x, *others):
        return self.function(self.linear(x), *others)


def check(function, *calls, hits):
    """The first call is the sample; every one is eager's, ``hits`` of them compiled."""
    eager = Layer(function).double()
    module = add_tvm_dispatch(copy.deepcopy(eager), calls[0])
    for args in calls:
        assert_same(run(module, Call(args)), run(eager, Call(args)))
    assert stats(module).hits == hits, stats(module)
    return module


def printed(y, n):
    print("n is", n)
    return y * 2


TEXTS = {
    "f-string": lambda y, n: y * len(f"{n}!"),
    "f-string with a form": lambda y, n: y * float(f"{n:.2f}"),
    "format": lambda y, n: y * len(f"{n} of {y.shape}"),
    "str": lambda y, n: y * len(str(n)),
    "repr": lambda y, n: y * float(repr(n)[7:-1]),
    "print": printed,
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_a_number(name):
    check(TEXTS[name], (X, N), (X, M), (X, N), hits=2)


@pytest.mark.parametrize("name", ["str", "f-string", "print"])
def test_the_text_of_several_numbers(name):
    check(TEXTS[name], (X, LIST), (X, OTHER), (X, LIST), hits=2)


def test_what_was_printed_is_eagers(capsys):
    add_tvm_dispatch(Layer(printed).double(), (X, N))
    lines = capsys.readouterr().out.splitlines()
    assert lines and set(lines) == {"n is tensor(2)"}


def test_the_text_of_a_large_tensor_is_refused_where_it_is_no_constant():
    large = torch.zeros(40, 30, dtype=torch.long)
    with pytest.raises(UnsupportedModule, match=r"(?s)the text of a tensor: too many numbers.*len\(str\(t\)\)"):
        add_tvm_dispatch(Layer(lambda y, t: y * len(str(t))).double(), (X, large))
    check(lambda y: y * len(str(torch.zeros(40, 30))), (X,), (X * 2,), hits=2)


def test_the_text_of_what_parameters_decide_is_refused():
    with pytest.raises(UnsupportedModule, match=r"(?s)round it otherwise.*f\"\{y\.sum\(\)\}\""):
        add_tvm_dispatch(Layer(lambda y: y * len(f"{y.sum()}")).double(), (X,))


def by_check(y, n):
    torch._check(n.item() > 0, lambda: f"{n} is too small")
    return y * 2


def by_check_of_all(y, n):
    torch._check_tensor_all(n > 0, lambda: "too small")
    return y * 2


def by_size(y, n):
    torch._check_is_size(n.item())
    return y[: n.item()].sum(0)


@pytest.mark.parametrize(("function", "hits"), [(by_check, 2), (by_check_of_all, 3), (by_size, 2)])
def test_torchs_checks(function, hits):
    module = check(function, (X, N), (X, M), (X, N), hits=hits)
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        module(X, -N)


def test_transformers_check():
    check_that = pytest.importorskip("transformers.utils.import_utils").torch_compilable_check

    def features(y, mask):
        count = mask.sum()
        check_that(count == 3, f"{count} places for 3 features", ValueError)
        check_that(lambda: y.shape[0] == 5, lambda: f"{y.shape}")
        return y[mask] * 2

    module = check(features, (X, MASK), (X, SAME_COUNT), hits=2)
    with pytest.raises(ValueError, match="2 places for 3 features"):
        module(X, FEWER)


def as_it_is(y):
    """Eager's branch."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.jit.is_scripting():
        return y * 3
    return y * 5 if isinstance(y, torch._subclasses.FakeTensor) else y * 2


def test_branches_on_whether_it_is_traced():
    check(as_it_is, (X,), (X * 2,), hits=2)


ARRAYS = {
    "numpy": lambda y: y * float(torch.linspace(0, 1, 5, dtype=F64).numpy().sum()),
    "numpy, kept a tensor": lambda y: y + torch.from_numpy(np.flip(torch.arange(3.0).numpy()).copy()).to(y.dtype),
    "asarray": lambda y: y + torch.as_tensor(np.asarray(torch.ones(3)) * 2),
    "a function of numpy's": lambda y: y * np.sin(torch.ones(3, dtype=F64)),
    "large": lambda y: y * float(torch.arange(200).numpy().sum()),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_a_constant(name):
    module = check(ARRAYS[name], (X,), (X * 2,), hits=2)
    (entry,) = stats(module).entries
    assert not {"numbers", "checks"} & {step.kind for step in entry.steps}


def written_array(y):
    zeros = torch.zeros(3, dtype=F64)
    zeros.numpy()[1] = 4.0
    return y * zeros


def written_tensor(y):
    zeros = torch.zeros(3, dtype=F64)
    array = zeros.numpy()
    zeros += 1
    return y * float(array.sum())


REFUSED = {
    "of an argument": (lambda y, t: y * float(t.numpy().sum()), "Tensor.numpy: NumPy's results are not in a graph"),
    "computed of parameters": (lambda y, t: y * float(y.detach().numpy().sum()), "Tensor.numpy"),
    "an array that is written": (lambda y, t: written_array(y), "Tensor.numpy: an array that shares memory"),
    "a tensor that is written": (lambda y, t: written_tensor(y), "Tensor.numpy: an array that shares memory"),
    "dlpack": (lambda y, t: y * float(np.from_dlpack(t).sum()), "Tensor.__dlpack__"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_arrays_are_refused(name):
    function, words = REFUSED[name]
    with pytest.raises(UnsupportedModule, match=words) as raised:
        add_tvm_dispatch(Layer(function).double(), (X, torch.arange(200)))
    assert "test_read_as_python.py" in str(raised.value)


MADE = {
    "tensor": (lambda y, n: y * torch.tensor([n, 2 * n]).sum(), 3),
    "tensor, nested": (lambda y, n: y * torch.tensor([[n, 1.5], [2, n]], dtype=F64).sum(), 3),
    "tensor of a type": (lambda y, n: y * torch.tensor([n.float(), 1]).sum(), 3),
    "as_tensor": (lambda y, n: y * torch.as_tensor([n, n]).sum(), 3),
    "new_tensor": (lambda y, n: y * y.new_tensor([n, n]).sum(), 3),
    "arange": (lambda y, n: y * torch.arange(n).sum(), 2),
    "int": (lambda y, n: y[: int(n)] * torch.full((), int(n)), 2),
    "reshape": (lambda y, n: y.reshape(-1)[: 3 * n].reshape(n, -1), 2),
    "repeat": (lambda y, n: y.repeat(n, 1), 2),
    "an element of a list": (lambda y, n: y * [1, 2, 3, 5][n], 2),
    "slice": (lambda y, n: y[n - 1 :] * 2, 2),
    "narrow": (lambda y, n: y.narrow(0, n, 1) * 2, 2),
}


@pytest.mark.parametrize("name", MADE)
def test_sizes_and_tensors_made_of_numbers(name):
    function, hits = MADE[name]
    check(function, (X, N), (X, M), (X, N), hits=hits)


def as_no_number(y):
    """An error of eager's that forward catches."""
    try:
        return y * 3 if y > 0 else y
    except RuntimeError:
        return y * 2


def test_several_numbers_are_no_flag():
    check(as_no_number, (X,), (X * 2,), hits=2)


def of_what_was_selected(y, mask):
    rows, kept = y[mask], (mask.long().cumsum(0) % 2 == 1)[mask]
    return rows[kept] * 2


@pytest.mark.parametrize("function", [of_what_was_selected, lambda y, mask: y[mask][mask[mask]] * 2])
def test_a_mask_of_what_a_mask_selected(function):
    check(function, (X, MASK), (X, SAME_COUNT), (X, FEWER), (X, MASK), hits=3)


def plus(y, t):
    y = y * 1
    y[t] += y[0]
    return y


def read_after_a_write(y, t):
    y = y * 1
    part = y[t]
    y.mul_(2)
    return part * y[0]


def written_through(y, t):
    y = y * 1
    part = y[t]
    y.mul_(2)
    part.mul_(2)
    other = y[t - 1]
    other.add_(part)
    y[t].zero_()
    return y * y[0].sum(), other * 1


def swapped(y, t):
    y = y * 1
    y[t], y[t - 1] = y[t - 1].clone(), y[t].clone()
    return y


def of_a_selection(y, t):
    y = (y * 1).expand(2, 5, 3).clone()
    y[t % 2, :, t % 3] = 1.0
    y[0][t][t % 3] += 3
    return y


def copied_column(y, t):
    """A column is no rows in memory: reshape copies it, and a write there is not seen."""
    y = y * 1
    column = y[:, t % 3].reshape(-1)
    column.mul_(3)
    return y, column * 1


POSITIONS = [plus, read_after_a_write, written_through, swapped, of_a_selection, copied_column]


@pytest.mark.parametrize("function", POSITIONS)
def test_what_is_written_at_a_position_that_a_tensor_gives(function):
    check(function, (X, N), (X, M), (X, -N), (X, torch.tensor(0)), hits=4)


@pytest.mark.parametrize("function", [lambda y, t: y[t.byte()] * 2, lambda y, t: y[t > 2] * 2])
def test_a_number_that_is_a_mask_is_read(function):
    check(function, (X, N), (X, M), (X, N), hits=2)


def test_a_parameter_in_a_position_gets_its_gradient():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Parameter(torch.arange(12.0, dtype=F64).reshape(4, 3))

        def forward(self, x, t):
            return (x * self.rows[t] + self.rows[..., t, :1]).sin()

    eager = Table()
    module = add_tvm_dispatch(copy.deepcopy(eager), (X, N))
    for t in (0, 3, -1):
        call = Call((X, torch.tensor(t)))
        assert_same(run(module, call), run(eager, call))
    assert stats(module).hits == 3


def test_numbers_that_differ_from_run_to_run_are_refused():
    calls = []

    def function(y):
        calls.append(None)
        return y * torch.tensor(float(len(calls)))

    with pytest.raises(UnsupportedModule):
        add_tvm_dispatch(Layer(function).double(), (X,))
