"""Uses of modules: nested dispatch, a layer used twice, averaged copies, instance forwards, odd tensors."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bridge import UnsupportedModule, add_tvm_dispatch, remove_tvm_dispatch, stats
from tests.bridge.compare import Call, assert_same, run
from tests.bridge.models import MLP, Counting

pytestmark = pytest.mark.usefixtures("lowered_once")

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def rows(count: int = 7) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(count)).requires_grad_()


def check(module: nn.Module, eager: nn.Module, *args: torch.Tensor) -> None:
    assert_same(run(module, Call(args)), run(eager, Call(args)), **CLOSE)


class Outer(nn.Module):
    """Uses one inner module twice."""

    def __init__(self):
        super().__init__()
        self.inner = MLP(6, 10, 6, dropout=0.5)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.inner(torch.tanh(self.inner(x))))


@pytest.fixture
def pair():
    torch.manual_seed(0)
    module = Outer()
    return module, copy.deepcopy(module)


@pytest.mark.composes("nested dispatch (outer and inner), a layer used twice in one forward")
def test_a_layer_used_twice_in_one_forward(pair):
    module, eager = pair
    add_tvm_dispatch(module.inner, rows())
    check(module, eager, rows())
    assert stats(module.inner).hits == 2


@pytest.mark.composes(
    "nested dispatch (outer and inner), a layer used twice in one forward",
    "works",
    section="The module stays the user's",
)
def test_inner_then_outer(pair):
    """The outer call runs the whole; when it misses, the inner dispatch takes its part."""
    module, eager = pair
    add_tvm_dispatch(module.inner, rows())
    add_tvm_dispatch(module, rows())
    check(module, eager, rows())
    assert stats(module).hits == 1 and stats(module.inner).hits == 0
    module.last.eval(), eager.last.eval()
    check(module, eager, rows())
    assert stats(module).hits == 1 and stats(module.inner).hits == 2
    remove_tvm_dispatch(module)
    module.last.train(), eager.last.train()
    check(module, eager, rows())
    assert stats(module.inner).hits == 4


@pytest.mark.composes("nested dispatch (outer and inner), a layer used twice in one forward")
def test_outer_then_inner(pair):
    module, eager = pair
    add_tvm_dispatch(module, rows())
    check(module, eager, rows())
    add_tvm_dispatch(module.inner, rows())
    check(module, eager, rows())
    assert stats(module).hits == 2 and stats(module.inner).hits == 0
    remove_tvm_dispatch(module.inner)
    check(module, eager, rows())
    assert stats(module).hits == 3


@pytest.mark.composes(
    "adding twice, removing twice, removing while a graph is alive",
    "works",
    section="The module stays the user's",
)
def test_add_twice_and_remove_twice(pair):
    module, eager = pair
    add_tvm_dispatch(module, rows())
    add_tvm_dispatch(module, rows())
    check(module, eager, rows())
    assert stats(module).hits == 1
    assert remove_tvm_dispatch(module) is remove_tvm_dispatch(module) is module
    check(module, eager, rows())


@pytest.mark.composes("adding twice, removing twice, removing while a graph is alive")
def test_remove_while_a_graph_is_alive(pair):
    module, eager = pair
    x, y = rows(), rows()
    add_tvm_dispatch(module, x)
    torch.manual_seed(0)
    result = module(x)
    remove_tvm_dispatch(module)
    gc.collect()
    result.square().sum().backward()
    torch.manual_seed(0)
    eager(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, **CLOSE)


def test_removal_frees_what_was_compiled(pair):
    module, _ = pair
    add_tvm_dispatch(module, rows())
    module(rows()).sum().backward()
    entry = weakref.ref(stats(module).entries[0])
    remove_tvm_dispatch(module)
    gc.collect()
    assert entry() is None


@pytest.mark.composes(
    "a `forward` set on the instance",
    "dispatched as it is when added",
    section="The module stays the user's",
)
def test_forward_set_on_the_instance_before():
    """The capture is of the function that ``module(x)`` runs, also one set on the instance."""
    torch.manual_seed(0)
    module = MLP()
    original = module.forward
    module.forward = lambda x: original(x) * 2
    eager = MLP()
    eager.load_state_dict(module.state_dict())
    kept = module.forward
    add_tvm_dispatch(module, rows())
    torch.testing.assert_close(module(rows()), eager(rows()) * 2, **CLOSE)
    assert stats(module).hits == 1
    handle = module.register_forward_hook(lambda m, args, out: out + 1)
    torch.testing.assert_close(module(rows()), eager(rows()) * 2 + 1, **CLOSE)
    handle.remove()
    assert module.__dict__["forward"] is kept
    module.forward = lambda x: original(x) * 5
    torch.testing.assert_close(module(rows()), eager(rows()) * 5, rtol=0, atol=0)
    assert list(stats(module).misses) == ["forward of the module was replaced"]


@pytest.mark.composes("EMA copies, `AveragedModel`")
def test_averaged_model(pair):
    """The average is a plain copy with weights of its own; it can be evaluated at any time."""
    module, eager = pair
    add_tvm_dispatch(module, rows())
    averages = [AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for each in (module, eager)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, eager)]
    for _ in range(3):
        check(module, eager, rows())
        for optimizer, average, each in zip(optimizers, averages, (module, eager), strict=True):
            optimizer.step()
            average.update_parameters(each)
    check(averages[0].eval(), averages[1].eval(), rows())
    assert stats(module).hits == 3


def test_backward_hooks_change_gradients_as_in_eager(pair):
    module, eager = pair
    add_tvm_dispatch(module, rows())
    for each in (module, eager):
        each.register_full_backward_hook(lambda m, grad_ins, grad_outs: tuple(grad * 2 for grad in grad_ins))
        each.register_full_backward_pre_hook(lambda m, grad_outs: tuple(grad * 3 for grad in grad_outs))
    check(module, eager, rows())
    assert stats(module).hits == 1


def test_forward_hook_of_all_modules(pair):
    """A global hook sees every inner module, so the call has to run eager."""
    module, eager = pair
    add_tvm_dispatch(module, rows())
    seen = []
    handle = nn.modules.module.register_module_forward_pre_hook(lambda m, args: seen.append(type(m).__name__))
    try:
        check(module, eager, rows())
    finally:
        handle.remove()
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :] and "MLP" in seen
    assert list(stats(module).misses) == ["global module hooks: compiled for False, called with True"]


class Mixes(nn.Module):
    """Reads its arguments in several ways, so that a wrong stride shows."""

    def forward(self, a, b):
        return torch.tanh(a) * 2 + b.sum(-1, keepdim=True), a - b


def _overlapping() -> torch.Tensor:
    return torch.arange(20.0).as_strided((5, 6), (2, 1))


INPUTS = {
    "expanded": lambda: (torch.randn(6).expand(5, 6), torch.randn(5, 1).expand(5, 6)),
    "sliced": lambda: (torch.randn(5, 12)[:, ::2], torch.randn(10, 6)[::2]),
    "transposed": lambda: (torch.randn(6, 5).t(), torch.randn(6, 5).t()),
    "overlapping": lambda: (_overlapping(), _overlapping()),
    "offset view of one tensor": lambda: (lambda base: (base[:5], base[1:]))(torch.randn(6, 6)),
    "the same tensor twice": lambda: (lambda x: (x, x))(torch.randn(5, 6, requires_grad=True)),
    "views that require grad": lambda: tuple(x.view(5, 6) for x in torch.randn(2, 30, requires_grad=True)),
    "empty": lambda: (torch.randn(0, 6, requires_grad=True), torch.randn(0, 6)),
    "zero-dimensional": lambda: (torch.tensor(1.5, requires_grad=True), torch.randn(5, 6)),
}


@pytest.mark.composes(
    "views, overlapping, expanded, strided, empty and 0-d inputs and grad_outs",
    "works, or eager with a reason",
    section="Guards",
)
@pytest.mark.parametrize("name", list(INPUTS))
def test_arguments_of_every_layout(name):
    torch.manual_seed(0)
    module, eager = Mixes(), Mixes()
    args = INPUTS[name]()
    add_tvm_dispatch(module, args)
    check(module, eager, *args)
    assert stats(module).hits == 1, stats(module)


@pytest.mark.parametrize("name", ["expanded", "sliced", "transposed"])
def test_dense_sample_other_layout_misses(name):
    module, eager = Mixes(), Mixes()
    add_tvm_dispatch(module, (torch.randn(5, 6), torch.randn(5, 6)))
    check(module, eager, *INPUTS[name]())
    (reason,) = stats(module).misses
    assert reason.startswith("strides of args[0]: compiled for (6, 1), called with")


GRAD_OUTS = {
    "zero strides": lambda: torch.tensor(2.0).expand(7, 4),
    "transposed": lambda: torch.randn(4, 7).t(),
    "sliced": lambda: torch.randn(7, 8)[:, ::2],
    "offset": lambda: torch.randn(9, 4)[2:],
}


@pytest.mark.composes("views, overlapping, expanded, strided, empty and 0-d inputs and grad_outs")
@pytest.mark.parametrize("name", list(GRAD_OUTS))
def test_grad_outs_of_every_layout(name):
    torch.manual_seed(0)
    module = MLP()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    grad_out = GRAD_OUTS[name]()
    for each in (module, eager):
        each(rows()).backward(grad_out)
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, **CLOSE)
    assert stats(module).hits == 1


def test_inference_tensor_is_left_to_eager():
    module = Mixes()
    add_tvm_dispatch(module, (torch.ones(5, 6), torch.ones(5, 6, requires_grad=True)))
    with torch.inference_mode():
        x = torch.ones(5, 6)
    module(x, torch.ones(5, 6, requires_grad=True))
    assert list(stats(module).misses) == ["inference tensor args[0]: autograd cannot save it"]


@pytest.mark.composes(
    "`load_state_dict`, optimizer steps, weights replaced",
    "seen by the next call",
    section="The module stays the user's",
)
def test_load_state_dict_reaches_buffers_and_parameters():
    torch.manual_seed(0)
    module, other = Counting(), Counting()
    add_tvm_dispatch(module, rows())
    other(rows())
    module.load_state_dict(other.state_dict())
    check(module, other, rows())
    assert stats(module).hits == 1


def test_to_another_type_is_a_reasoned_miss(pair):
    module, eager = pair
    add_tvm_dispatch(module, rows())
    module.double(), eager.double()
    check(module, eager, rows().detach().double().requires_grad_())
    assert list(stats(module).misses) == ["dtype of args[0]: compiled for torch.float32, called with torch.float64"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_left_to_eager():
    """It has neither sizes nor strides; to ask for them ends the process."""
    module = MLP(6, 10, 4)
    add_tvm_dispatch(module, rows())
    nested = torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(3, 6)])
    assert module(nested).is_nested
    assert list(stats(module).misses) == ["layout of args[0]: a nested tensor"]
    with pytest.raises(UnsupportedModule, match="nested tensor"):
        add_tvm_dispatch(module, nested)


def test_a_batch_norm_in_eager_beside_a_compiled_one():
    """Eager saves its running statistics for the backward, and does not count the writes to them: nor may ours."""
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows().double().detach())
    counts = []
    for each in (module, eager):
        before = [buffer._version for buffer in each.buffers()]
        results = [each(rows(count).double().detach()) for count in (9, 7, 8, 7)]
        sum(result.square().sum() * (k + 1) for k, result in enumerate(results)).backward()
        counts.append([buffer._version - then for buffer, then in zip(each.buffers(), before, strict=True)])
    assert counts[0] == counts[1] and stats(module).hits == 2
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)
