"""``freeze=True``: parameters as constants of calls without gradients; eager's numbers, and a miss when one changes."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from autodiff.ir import bindings, op_name
from bridge import UnsupportedModule, add_tvm_dispatch, explain, stats
from tests.bridge.models import bert_layer
from tests.device import DEVICE, moved
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("lowered_once")

TOLERANCE = {torch.float64: {"rtol": 1e-10, "atol": 1e-10}, torch.float32: {"rtol": 2e-5, "atol": 2e-5}}


def lively(module: nn.Module) -> nn.Module:
    """In evaluation mode, with statistics other than zeros and ones."""
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.running_mean is not None:
            nn.init.normal_(child.running_mean)
            nn.init.uniform_(child.running_var, 0.5, 2.0)
            if child.affine:
                nn.init.normal_(child.weight)
                nn.init.normal_(child.bias)
    return module.eval()


def images(channels: int = 3) -> torch.Tensor:
    return torch.randn(2, channels, 7, 6)


class Masked(nn.Module):
    """A causal attention whose mask and positions come from sizes alone."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.positions = nn.Embedding(16, 8)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        x = x + self.positions(places)
        mask = torch.where(places[:, None] >= places[None], 0.0, -torch.inf).to(x.dtype)
        scores = self.q(x) @ self.k(x).mT / 8**0.5 + mask
        return scores.softmax(-1) @ self.v(x)


class Fused(nn.Module):
    """A fused attention whose first query sees no key."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], device=x.device).tril(-1).bool()
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


class Branches(nn.Module):
    """Products of one input: some with a bias, one without, one weight twice; a result that is a parameter's."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 4), nn.Linear(6, 5, bias=False), nn.Linear(6, 4)
        self.register_buffer("table", torch.randn(6, 3))

    def forward(self, x):
        return self.a(x), self.b(x) * 2, self.c(x) + self.a(x), x @ self.table, self.a.weight.exp(), self.table


class Scaled(nn.Module):
    """Maps of channels that are no BatchNorm: a layer scale, a quotient, a shift before a scale."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.gamma, self.beta = (nn.Parameter(torch.rand(4) + 0.5) for _ in range(2))

    def forward(self, x):
        return x[:, :4] + ((self.inner(x) - self.beta) / self.gamma * 3 + self.beta) * self.gamma


MODULES = {
    "convolution, BatchNorm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), images),
    "no bias, no affine": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, affine=False)),
        images,
    ),
    "groups": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8)), lambda: images(4)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(4)), images),
    "transposed groups": (
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 8, 2, groups=2), nn.BatchNorm2d(8)),
        lambda: images(4),
    ),
    "one axis": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)), lambda: torch.randn(2, 3, 9)),
    "BatchNorm first": (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)), images),
    "linear, BatchNorm": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.GELU()),
        lambda: torch.randn(5, 6),
    ),
    "masked": (Masked, lambda: torch.randn(2, 5, 8)),
    "fused attention": (Fused, lambda: torch.randn(2, 5, 8)),
    "branches": (Branches, lambda: torch.randn(2, 3, 6)),
    "scaled": (Scaled, lambda: torch.randn(5, 6)),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 4)), lambda: torch.randn(5, 6)),
    "BertLayer": (bert_layer, lambda: torch.randn(2, 5, 24)),
}


IN_FLOAT32 = ("convolution, BatchNorm", "fused attention", "scaled", "BertLayer")
ALWAYS = {
    torch.float64: MODULES.keys()
    - {"no bias, no affine", "transposed groups", "groups", "one axis", "linear, BatchNorm", "BertLayer"},
    torch.float32: ("convolution, BatchNorm",),
}


def frozen(module: nn.Module, x: torch.Tensor, **options) -> nn.Module:
    return add_tvm_dispatch(module, x, freeze=True, **options)


def entry_of(module: nn.Module):
    (entry,) = stats(module).entries
    return entry


@pytest.mark.parametrize(
    ("name", "dtype"),
    sampled(
        [*((name, torch.float64) for name in MODULES), *((name, torch.float32) for name in IN_FLOAT32)],
        lambda case: case[0] in ALWAYS[case[1]],
    ),
)
def test_numbers_are_eagers(name, dtype):
    if name == "weight norm" and DEVICE.type == "cuda":
        pytest.skip("eager's kernel has constants of float32")
    make, sample = MODULES[name]
    torch.manual_seed(0)
    module, x = moved(lively(make()).to(dtype)), moved(sample().to(dtype))
    eager = copy.deepcopy(module)
    assert frozen(module, x) is module
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(module(x + 1), eager(x + 1), **TOLERANCE[dtype])
    assert (stats(module).hits, stats(module).misses) == (2, {})
    assert entry_of(module).is_frozen and entry_of(module).backward is None


def operators(function) -> list[str]:
    return [op_name(value) for _, value in bindings(function)]


def test_a_batch_norm_leaves_one_shift():
    module, x = lively(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))), images()
    found = entry_of(frozen(module, x)).programs.frozen
    assert operators(found.call) == ["relax.reshape", "relax.call_pure_packed", "relax.add"]
    assert len(found.call.params) == 3


def test_products_of_one_input_are_one():
    entry = entry_of(frozen(Masked().eval(), torch.randn(2, 5, 8)))
    names = operators(entry.programs.frozen.call)
    assert names.count("relax.matmul") == 3 and names.count("relax.strided_slice") == 3
    assert not {"relax.arange", "relax.greater_equal", "relax.where", "relax.take"} & set(names)


def test_half_types_are_not_folded():
    module = lively(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).bfloat16()
    x, plain = images().bfloat16(), copy.deepcopy(module)
    frozen(module, x)
    with torch.no_grad():
        assert torch.equal(module(x), add_tvm_dispatch(plain, x)(x))
    assert "relax.subtract" in operators(entry_of(module).programs.frozen.call)


def test_casts_of_autocast_are_made_once():
    module, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).eval(), torch.randn(5, 6)
    plain = copy.deepcopy(module)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        frozen(module, x)
        with torch.no_grad():
            assert torch.equal(module(x), add_tvm_dispatch(plain, x)(x))
    assert stats(module).hits == 1
    assert all(str(param.ty.dtype) == "bfloat16" for param in entry_of(module).programs.frozen.call.params[1:])


def test_equal_modules_share_programs():
    x = torch.randn(2, 5, 8)
    one, other = (Masked().eval() for _ in range(2))
    eager = copy.deepcopy(other)
    frozen(one, x), frozen(other, x)
    assert entry_of(one).forward is entry_of(other).forward
    with torch.no_grad():
        torch.testing.assert_close(other(x), eager(x), rtol=1e-5, atol=1e-5)


def test_sizes_that_vary():
    batch = torch.export.Dim("batch", min=2)
    module, eager = (lively(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).double() for _ in range(2))
    eager.load_state_dict(module.state_dict())
    frozen(module, images().double(), dynamic_shapes=({0: batch},))
    for count in (2, 3, 5):
        x = torch.randn(count, 3, 7, 6, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(module(x), eager(x), rtol=1e-10, atol=1e-10)
    assert stats(module).hits == 3
    assert operators(entry_of(module).programs.frozen.call)[-1] == "relax.add"


def in_place(module):
    with torch.no_grad():
        module[0].weight.mul_(1.5)


def by_an_optimizer(module):
    module[0].weight.grad = torch.ones_like(module[0].weight)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    module[0].weight.grad = None


def loaded(module):
    module.load_state_dict({name: value * 1.5 for name, value in module.state_dict().items()})


def replaced(module):
    module[0].weight = nn.Parameter(module[0].weight.detach() + 1)


def other_memory(module):
    module[0].weight.data = module[0].weight.data + 1


def a_buffer(module):
    module[1].running_var.add_(1)


CHANGES = {
    in_place: "frozen parameter '0.weight': changed in place",
    by_an_optimizer: "frozen parameter '0.weight': changed in place",
    loaded: "frozen parameter '0.weight': changed in place",
    replaced: "frozen parameter '0.weight': another tensor",
    other_memory: "frozen parameter '0.weight': moved in memory",
    a_buffer: "frozen buffer '1.running_var': changed in place",
}


@pytest.fixture
def changing():
    torch.manual_seed(0)
    return lively(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))).double(), torch.randn(5, 6, dtype=torch.float64)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_tensor_is_a_miss_with_its_reason(changing, change):
    module, x = changing
    frozen(module, x)
    change(module)
    with torch.no_grad():
        torch.testing.assert_close(module(x), copy.deepcopy(module)(x), rtol=1e-10, atol=1e-10)
    ((reason, count),) = stats(module).misses.items()
    assert count == 1 and reason.startswith(CHANGES[change])


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_it_is_frozen_anew_if_misses_compile(changing, change):
    module, x = changing
    frozen(module, x, on_miss="compile")
    forward = entry_of(module).forward
    for _ in range(3):
        change(module)
        with torch.inference_mode():
            torch.testing.assert_close(module(x), copy.deepcopy(module)(x), rtol=1e-10, atol=1e-10)
    assert (stats(module).hits, stats(module).misses) == (3, {})
    assert entry_of(module).forward is forward


class Uncounted(nn.BatchNorm1d):
    """Updates its statistics without counting the batch."""

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_running_statistics_that_a_batch_norm_writes_uncounted(compiles):
    torch.manual_seed(0)
    module, x = lively(nn.Sequential(nn.Linear(6, 4), Uncounted(4))).double(), torch.randn(5, 6, dtype=torch.float64)
    frozen(module, x)
    if compiles:
        add_tvm_dispatch(module.train(), x)
    module.train()(x)
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(x), copy.deepcopy(module)(x), rtol=1e-10, atol=1e-10)
    assert stats(module).misses["frozen buffer '1.running_mean': changed in place since it was frozen"] == 1


def test_what_torch_does_not_count_is_seen_when_added_again(changing):
    module, x = changing
    frozen(module, x)
    module[0].weight.data.mul_(2)
    frozen(module, x)
    with torch.no_grad():
        torch.testing.assert_close(module(x), copy.deepcopy(module)(x), rtol=1e-10, atol=1e-10)
    assert stats(module).hits == 1 and len(stats(module).entries) == 1


def test_other_parameters_by_functional_call(changing):
    module, x = changing
    wanted = {name: value * 2 for name, value in module.named_parameters()}
    eager = functional_call(copy.deepcopy(module), wanted, x)
    frozen(module, x)
    with torch.no_grad():
        torch.testing.assert_close(functional_call(module, wanted, x), eager)
        torch.testing.assert_close(module(x), copy.deepcopy(module)(x), rtol=1e-10, atol=1e-10)
    assert stats(module).hits == 1 and stats(module).misses.total() == 1


def test_training_goes_on_beside_it(changing):
    module, x = changing
    eager = copy.deepcopy(module)
    frozen(module, x, on_miss="compile")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, eager)]
    for _ in range(3):
        for each, optimizer in zip((module, eager), optimizers, strict=True):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(module(x), eager(x), rtol=1e-10, atol=1e-10)
    kinds = sorted((entry.is_frozen, entry.hits) for entry in stats(module).entries)
    assert kinds == [(False, 3), (True, 1)] and stats(module).hits == 6


def test_a_call_with_gradients_runs_eager(changing):
    module, x = changing
    frozen(module, x)
    module(x).sum().backward()
    assert dict(stats(module).misses) == {"grad mode: compiled for False, called with True": 1}


def test_the_first_call_is_the_sample(changing):
    module, x = changing
    add_tvm_dispatch(module, freeze=True)
    with torch.no_grad():
        module(x)
    assert entry_of(module).is_frozen and stats(module).hits == 1


def test_frozen_and_not_take_each_others_place(changing):
    module, x = changing
    for freeze in (True, False, True):
        with nullcontext() if freeze else torch.no_grad():
            add_tvm_dispatch(module, x, freeze=freeze)
        assert entry_of(module).is_frozen is freeze


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), "buffer '1.running_mean'.*a call changes it"),
        (lambda: nn.Dropout(0.5), "random draws"),
    ],
    ids=["BatchNorm", "dropout"],
)
def test_training_mode_is_refused(make, words):
    module = make()
    with pytest.raises(UnsupportedModule, match=f"(?s){words}.*eval"):
        frozen(module.train(), torch.randn(5, 6))


def test_what_is_not_finite_is_refused(changing):
    module, x = changing
    frozen(module, x)
    module[1].running_var.fill_(-1e-5)  # the root's reciprocal is infinite
    with pytest.raises(UnsupportedModule, match="not finite"):
        frozen(module, x)
    with torch.no_grad():
        torch.testing.assert_close(module(x), copy.deepcopy(module)(x), equal_nan=True)
    assert stats(module).misses.total() == 1


def test_explain_says_what_is_frozen(changing):
    module, x = changing
    told = str(explain(frozen(module, x)).full)
    assert "7 parameters and buffers are the tensors that were frozen" in told and "fold scales" in told


def test_the_check_is_compiled_without_a_warning(changing, recwarn):
    module, x = changing
    compile(entry_of(frozen(module, x)).guard.check.source, "<check>", "exec")
    assert not [each for each in recwarn if each.category is SyntaxWarning]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="memory is the host's")
def test_nothing_but_what_is_folded_is_copied():
    module, x = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8)).eval(), torch.randn(5, 64)
    bound = entry_of(frozen(module, x)).programs.forward.bound
    addresses = {tensor.data_ptr() for tensor in module.parameters()}
    assert {tensor.data_ptr() for _, tensor in bound.constants} == addresses


def test_functions_of_parameters_alone():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x):
            return F.softplus(self.weight), self.weight

    module, x = Alone(), torch.randn(2)
    frozen(module, x)
    with torch.no_grad():
        first, second = module(x)
        first.zero_()  # the caller's own
        torch.testing.assert_close(module(x)[0], F.softplus(module.weight))
    assert second is module.weight and stats(module).hits == 2
