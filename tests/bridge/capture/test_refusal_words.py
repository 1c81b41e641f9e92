"""Words of a refusal: short, without torch's exceptions above them; eager's own error where eager refuses too."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, lower, stats
from bridge.capture.refusals import explain_error
from tests.bridge.capture.refused_modules import EAGERS_ERROR, REFUSED

pytestmark = [pytest.mark.slow, pytest.mark.cpu("modules of a process of its own")]

ROOT = Path(__file__).parents[3]

#: Torch's advice to authors of exporters, which is no use to users of add_tvm_dispatch.
ADVICE = ("github", "TORCH_LOGS", "torch._logging", "torch._check", "torch._dynamo", "pytorch.org", "graph():")


@pytest.fixture(scope="module")
def seen():
    """Each module's output on the streams and error, in a process that dispatches them one after the other."""
    variables = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.bridge.capture.refused_modules"],
        cwd=ROOT,
        env={**variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_nothing_else(case, most_lines):
    """Asserts no output, and an error of one traceback without frames of torch's tracer."""
    assert case["output"] == "" and case["shown"]
    assert case["shown"].count("Traceback (most recent call last):") == 1, "a chain of exceptions above it"
    assert len(case["words"].splitlines()) <= most_lines and len(case["words"]) < 1000
    assert "/_export/" not in case["shown"] and "/fx/" not in case["shown"]
    assert not [word for word in ADVICE if word in case["words"]]


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_a_few_lines_and_says_what_helps(seen, name):
    case = seen["refused"][name]
    assert_nothing_else(case, most_lines=8)
    assert case["refused"] and "cannot be dispatched to TVM; it was left as it was." in case["words"]
    assert re.search(REFUSED[name][2], case["words"], re.DOTALL | re.MULTILINE), case["words"]
    if name != "a set":  # torch 2.11 does not tell where it came upon it
        assert ".cause" not in case["words"], "no line of the user's or of a module's is named"


@pytest.mark.parametrize("name", EAGERS_ERROR)
def test_an_error_of_eagers_is_all_there_is(seen, name):
    case = seen["eagers"][name]
    assert_nothing_else(case, most_lines=2)
    *_, error, note = case["shown"].splitlines()
    assert not case["refused"] and re.search(EAGERS_ERROR[name][2], error) and "the sample that was given" in note


def test_the_log_has_the_chain_on_request(seen):
    assert "[bridge.dispatch] Block cannot be run on fake tensors" in seen["logged"]["output"]
    assert "DynamicOutputShapeException" in seen["logged"]["output"]


def test_no_thread_is_left_behind(seen):
    """torch.fx leaves the thread of a progress bar: from then on, Python warns of every fork."""
    assert seen["threads"] == ["MainThread"]


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        ("Nothing fits. Please file an issue on github.", "RuntimeError: Nothing fits."),
        ("No kernel. Set TORCH_LOGS=+dynamo for more. It is.", "RuntimeError: No kernel."),
        ("Please file an issue on github.", "RuntimeError: no more is known; .cause of this exception is torch's"),
    ],
)
def test_torchs_advice_is_left_out(message, kept):
    assert explain_error(RuntimeError(message)).reason == kept


def test_a_generator_of_ones_own_is_named():
    class Draws(nn.Module):
        def forward(self, x):
            return x + torch.randn(4, generator=own)

    own = torch.Generator()
    with pytest.raises(
        UnsupportedModule,
        match=r"randn\.generator: draws from a generator of its own[\s\S]*randn\(4, ",
    ):
        add_tvm_dispatch(Draws(), torch.ones(2, 4))


class Calls(nn.Module):
    def __init__(self, then):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.then = then

    def forward(self, *args):
        return self.then(self.linear(args[0]), *args[1:])


def by_numbers(y):
    return torch.ops.aten.nonzero(y)


def test_the_cause_is_torchs_exception():
    with pytest.raises(UnsupportedModule) as caught:
        add_tvm_dispatch(Calls(by_numbers), torch.randn(5, 4))
    error = caught.value
    assert type(error.cause).__name__ == "DynamicOutputShapeException" and error.cause.__traceback__ is not None
    assert error.__cause__ is None and error.__context__ is None


def test_a_refusal_of_ours_has_no_cause():
    with pytest.raises(UnsupportedModule) as caught:
        add_tvm_dispatch(Calls(lambda x: x.to_sparse().to_dense()), torch.randn(4, 4))
    assert caught.value.cause is None


def loss(y, labels):
    return nn.functional.cross_entropy(y.view(-1, 4), labels.view(-1))


def write_in_place(y):
    y.t_().view(-1)
    return y


class Leaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        self.scale.mul_(2)
        return x * self.scale


ROWS = torch.arange(10).remainder(4).reshape(2, 5)
EAGERS = {
    "labels sliced": (Calls(loss), (torch.randn(2, 4, 4), ROWS[:, 1:]), "view size is not compatible"),
    "labels expanded": (Calls(loss), (torch.randn(2, 4, 4), ROWS[:, :1].expand(2, 4)), "view size is not compatible"),
    "a transposed result": (Calls(write_in_place), (torch.randn(5, 4),), "view size is not compatible"),
    "a leaf": (Leaf(), (torch.randn(5, 4),), "a leaf Variable that requires grad"),
}


@pytest.mark.parametrize(("module", "args", "words"), EAGERS.values(), ids=EAGERS)
def test_eagers_error_is_the_one_that_is_raised(module, args, words):
    with pytest.raises(RuntimeError, match=words) as eagers:
        result = module(*args)
        result.sum().backward()
    module.zero_grad()
    before = {name: (tensor, tensor.detach().clone()) for name, tensor in module.state_dict(keep_vars=True).items()}
    attributes, values = dict(vars(module)), [arg.clone() for arg in args]
    generator = torch.get_rng_state()
    for refuse in (add_tvm_dispatch, lower):
        with pytest.raises(RuntimeError, match=words) as caught:
            refuse(module, args)
        assert type(caught.value) is type(eagers.value) and str(caught.value) == str(eagers.value)
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert vars(module) == attributes and torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(now, then) for now, then in zip(args, values, strict=True))
    for name, tensor in module.state_dict(keep_vars=True).items():
        assert tensor is before[name][0] and torch.equal(tensor, before[name][1]) and tensor.grad is None


class Remembers(nn.Module):
    """Changes its state at every call, and then runs an operation that cannot be captured."""

    def __init__(self):
        super().__init__()
        self.state = None
        self.calls = [0]

    def forward(self, x):
        self.state = x if self.state is None else self.state + x
        self.calls[0] += 1
        return by_numbers(self.state)


def test_state_is_put_back_where_a_call_is_refused():
    module = Remembers()
    with pytest.raises(UnsupportedModule, match=r"self\.state: Python state that forward changes at every call"):
        add_tvm_dispatch(module, torch.randn(5, 4))
    assert module.state is None and module.calls == [0]


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_result_is_a_refusal_not_an_error_of_eagers(make):
    with pytest.raises(UnsupportedModule, match=r"a result of layout torch\.sparse_(coo|csr)"):
        add_tvm_dispatch(Calls(make), torch.randn(3, 4))


def test_a_length_that_numbers_decide_can_be_given():
    with pytest.raises(UnsupportedModule, match="output_size="):
        add_tvm_dispatch(Calls(lambda y: y.repeat_interleave((y[:, 0] > 0).long(), dim=0)), torch.randn(3, 4))


def test_a_call_that_eager_refuses_is_no_entry_under_on_miss_compile():
    module = Calls(lambda y: y + torch.ones(5, 4))
    add_tvm_dispatch(module, torch.randn(5, 4), on_miss="compile")
    with pytest.raises(RuntimeError, match="must match the size"):
        module(torch.randn(3, 4))
    assert len(stats(module).entries) == 1


def test_higher_order_operators_are_refused_by_name():
    module = Calls(lambda y: torch.vmap(lambda y: torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)))(y))
    with pytest.raises(UnsupportedModule, match=r"cond: a higher-order operator[\s\S]*test_refusal_words.py:\d+: "):
        add_tvm_dispatch(module, torch.ones(2, 4))


MAKE_NESTED = {
    "jagged": lambda y: torch.nested.nested_tensor([y[:2].detach(), y.detach()], layout=torch.jagged).values() * y[:1],
    "from jagged": lambda y: torch.nested.nested_tensor_from_jagged(y, torch.tensor([0, 1, 3])).sin().values(),
    "strided": lambda y: torch.nested.nested_tensor([y[:2].detach(), y.detach()]).to_padded_tensor(0.0) * y,
    "of tensors": lambda y: torch.nested.as_nested_tensor([y[:2], y]).to_padded_tensor(0.0),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", MAKE_NESTED)
def test_nested_tensors_made_in_forward_are_refused_by_name(kind):
    module = Calls(MAKE_NESTED[kind])
    with pytest.raises(UnsupportedModule, match=r"nested tensor[\s\S]*test_refusal_words.py:\d+: "):
        add_tvm_dispatch(module, torch.randn(3, 4))


class ReadsSparse(torch.nn.Module):
    def __init__(self, where, sparse):
        super().__init__()
        self.linear, self.where = torch.nn.Linear(4, 4), where
        self.held = {"an attribute": sparse, "a list": [sparse], "a closure": lambda: sparse}[where]

    def forward(self, x):
        held = self.held
        return (held[0] if self.where == "a list" else held() if self.where == "a closure" else held) @ self.linear(x)


@pytest.mark.parametrize("where", ["an attribute", "a list", "a closure"])
@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc])
def test_a_sparse_tensor_from_elsewhere_is_refused_by_its_layout(where, make):
    with pytest.raises(UnsupportedModule, match="layout torch"):
        add_tvm_dispatch(ReadsSparse(where, make(torch.eye(3))), torch.randn(3, 4), whole=True)
