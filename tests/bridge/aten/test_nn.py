"""Embeddings, dropouts and other draws, losses, einsum, sorting, triangles; refusals."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, examine, stats
from bridge.base.session import SESSION
from bridge.compile.translate import TRANSLATIONS
from tests.bridge.compare import Call, Function, check_module
from tests.device import ASSERTS, DEVICE
from tests.sampling import sampled


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def check(function, *args, calls=1):
    check_module(lambda: Function(function), lambda: args, calls=calls)


@pytest.mark.parametrize(
    ("shape", "options"),
    sampled(
        itertools.product(
            ((), (5,), (2, 3, 4)), ({}, {"padding_idx": 2}, {"padding_idx": -1}, {"scale_grad_by_freq": True})
        ),
        lambda case: not case[1] or len(case[0]) == 3,
    ),
    ids=str,
)
def test_embedding(shape, options):
    check_module(lambda: nn.Embedding(7, 3, **options), lambda: torch.randint(0, 7, shape), calls=1)


def test_embedding_with_a_largest_norm():
    """Rows are scaled down in the weight before they are looked up."""
    eager = nn.Embedding(7, 3, max_norm=1.0).double()
    ours = copy.deepcopy(eager)
    add_tvm_dispatch(ours, torch.tensor([1, 2]))
    for step in range(3):
        found = []
        for module in (ours, eager):
            y = module(torch.tensor([step, step + 2]))
            (gradient,) = torch.autograd.grad(y.square().sum(), module.weight)
            found.append([y.detach(), gradient, module.weight.detach().clone()])
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    assert stats(ours).hits == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Embedding(7, 3, sparse=True),
        lambda: nn.EmbeddingBag(7, 3, sparse=True),
        lambda: nn.EmbeddingBag(7, 3, mode="sum", sparse=True, padding_idx=2),
        lambda: Gather(sparse_grad=True),
    ],
)
def test_sparse_gradients_are_refused_in_advance(make):
    """Also by ``examine``: the backward would be the first to fail."""
    index = torch.tensor([[0, 3, 2]])
    with pytest.raises(UnsupportedModule, match=r"sparse gradients(.|\n)*set sparse(_grad)?=False"):
        add_tvm_dispatch(make(), index)
    assert "sparse gradients" in str(examine(make(), index))


def test_sparse_gradients_of_computed_weights_are_refused():
    with pytest.raises(UnsupportedModule, match="sparse gradients"):
        add_tvm_dispatch(ComputedBag("sum", sparse=True), (torch.arange(5), torch.arange(0, 5, 2)))


class Gather(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options
        self.weight = nn.Parameter(torch.randn(4, 5))

    def forward(self, index):
        return self.weight.gather(0, index, **self.options)


BAGS = ("sum", "mean", "max")


@pytest.mark.parametrize(
    ("frozen", "mode"),
    sampled(itertools.product((False, True), BAGS), lambda case: not case[0] or case[1] == "max"),
)
def test_embedding_bag(frozen, mode):
    check_module(
        lambda: nn.EmbeddingBag(7, 3, mode=mode, padding_idx=2).requires_grad_(not frozen),
        lambda: (torch.tensor([0, 3, 2, 2, 6]), torch.tensor([0, 1, 3])),
        calls=1,
    )


class ComputedBag(nn.Module):
    """The trace takes the operator without a gradient for a weight that is computed."""

    def __init__(self, mode, sparse=False):
        super().__init__()
        self.mode, self.sparse = mode, sparse
        self.weight = nn.Parameter(torch.randn(7, 3))

    def forward(self, index, offsets):
        return F.embedding_bag(index, self.weight.sin(), offsets, mode=self.mode, sparse=self.sparse)


@pytest.mark.parametrize(
    ("count", "mode"), sampled(itertools.product((0, 5), BAGS), lambda case: case[0] or case[1] == "mean")
)
def test_embedding_bag_of_computed_weights(count, mode):
    check_module(lambda: ComputedBag(mode), lambda: (torch.arange(count), torch.arange(0, count, 2)), calls=1)


class LaidOutBag(nn.Module):
    """Sums of bags; in eager the order of axes of weights and factors decides the kernel and its saved tensors."""

    def __init__(self, layout, dtype):
        super().__init__()
        self.layout = layout
        shape = {"every second column": (7, 6), "turned": (3, 7), "turned and computed": (3, 7)}.get(layout, (7, 3))
        weight = torch.randint(-3, 4, shape).to(dtype)  # sums without rounding
        self.weight = nn.Parameter(weight.t().clone().t() if layout == "a turned parameter" else weight)
        self.factors = nn.Parameter(torch.randint(-1, 2, (12, 2)).to(dtype))

    def forward(self, index):
        weight, factors = self.weight, None
        if self.layout.startswith("turned"):
            weight = weight.t() * 2 if "computed" in self.layout else weight.t()
        if self.layout == "every second column":
            weight = weight[:, ::2]
        if "factors" in self.layout:
            factors = self.factors[:, 1] if self.layout == "strided factors" else self.factors[:, 1] * 2
        ends = torch.tensor([0, 2, 5, 12] if self.layout == "ends" else [0, 2, 5])
        options = {"per_sample_weights": factors, "include_last_offset": self.layout == "ends"}
        return F.embedding_bag(index, weight, ends, mode="sum", **options).sin()


LAYOUTS = ("dense", "turned", "a turned parameter", "turned and computed", "every second column", "ends")
LAYOUTS += ("dense factors", "strided factors")
HALF_TYPES = (torch.bfloat16, torch.float32, torch.float16)


@pytest.mark.parametrize(
    ("dtype", "layout"),
    sampled(itertools.product(HALF_TYPES, LAYOUTS), lambda case: case[0] is torch.bfloat16),
    ids=str,
)
def test_bags_of_half_types(dtype, layout):
    if DEVICE.type == "cuda" and dtype is torch.bfloat16 and "factors" in layout:
        pytest.skip("torch has no such kernel for a GPU")
    eager, index = LaidOutBag(layout, dtype), torch.randint(0, 7, (12,))
    for options in ({}, {"dynamic_shapes": ({0: torch.export.Dim.DYNAMIC},)}):
        if options and "factors" in layout:
            continue  # one factor for each index
        module = add_tvm_dispatch(copy.deepcopy(eager), index, partition="save_all", **options)
        found = [(each(index), *torch.autograd.grad(each(index).sum(), each.weight)) for each in (module, eager)]
        torch.testing.assert_close(*found)
        assert stats(module).hits == 2


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("leading", [(), (2, 3)])
def test_linear_with_a_vector_for_its_weight(bias, leading):
    class Weighs(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.bias = nn.Parameter(torch.randn(())) if bias else None

        def forward(self, x):
            return F.linear(x, self.weight, self.bias)

    check_module(Weighs, lambda: leaf(*leading, 4), calls=1)


@ASSERTS
def test_one_hot_keeps_its_check():
    module = check_module(
        lambda: Function(lambda i, x: F.one_hot(i, 4) * x), lambda: (torch.tensor([0, 3, 1]), leaf(3, 4)), calls=1
    )
    for classes in ([0, 4, 1], [0, -1, 1]):
        with pytest.raises(RuntimeError) as eager:
            F.one_hot(torch.tensor(classes), 4)
        with pytest.raises(RuntimeError) as ours:
            module(torch.tensor(classes), leaf(3, 4))
        assert str(ours.value) == str(eager.value)


@pytest.mark.parametrize(
    ("layer", "p"),
    sampled(
        itertools.product(
            (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
            (0.0, 0.3, 1.0),
        ),
        lambda case: (
            case[0] in (nn.Dropout, nn.FeatureAlphaDropout)
            or (case[1] == 0.3 and case[0] not in (nn.Dropout1d, nn.Dropout3d))
        ),
    ),
    ids=str,
)
def test_dropouts(layer, p):
    shape = {nn.Dropout1d: (3, 4, 5), nn.Dropout3d: (3, 4, 2, 3, 2)}.get(layer, (3, 4, 2, 5))
    check_module(lambda: layer(p), lambda: leaf(*shape), calls=2)


class Branches(nn.Module):
    """Two independent branches that draw, an unused draw, and stochastic depth."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        torch.rand(3)
        left = F.dropout(self.left(x), 0.4)
        right = F.dropout(torch.tanh(self.right(x)), 0.2) + torch.randn_like(x)
        keep = torch.rand(x.shape[0], 1) < 0.7
        return right + left * keep + F.dropout(x, 0.5) + F.dropout(x, 0.5)


def test_draws_of_branches_in_eager_order():
    check_module(Branches, lambda: leaf(6, 4), calls=3)


@pytest.mark.parametrize("hard", sampled([False, True], [True]))
def test_gumbel_softmax(hard):
    check(lambda x: F.gumbel_softmax(x, tau=0.7, hard=hard), leaf(5, 4), calls=2)


class NormalizedLSTM(nn.Module):
    """A loop over time steps written by hand."""

    def __init__(self):
        super().__init__()
        self.gates = nn.Linear(3 + 4, 16)
        self.norm = nn.LayerNorm(16)
        self.cell_norm = nn.LayerNorm(4)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        hidden = cell = x.new_zeros(x.shape[0], 4)
        outputs = []
        for step in range(x.shape[1]):
            gates = self.norm(self.gates(torch.cat([x[:, step], hidden], dim=1)))
            i, f, g, o = gates.chunk(4, dim=1)
            cell = f.sigmoid() * cell + i.sigmoid() * self.dropout(g.tanh())
            hidden = o.sigmoid() * self.cell_norm(cell).tanh()
            outputs.append(hidden)
        return torch.stack(outputs, dim=1), cell


@pytest.mark.parametrize(
    ("of_x", "of_flags", "reduction"),
    sampled(
        [
            (*types, reduction)
            for types in (
                (torch.float64, torch.float32),
                (torch.float32, torch.float64),
                (torch.bfloat16, torch.float32),
            )
            for reduction in ("mean", "none")
        ],
        lambda case: (case[2] == "none") == (case[0] == torch.float32),
    ),
    ids=str,
)
def test_the_loss_of_logits_has_the_type_of_its_flags(of_x, of_flags, reduction):
    flags, found = torch.rand(4, 5).to(of_flags), []
    module = Function(lambda x, flags: F.binary_cross_entropy_with_logits(x, flags, reduction=reduction))
    values = torch.randn(4, 5).to(of_x)
    for dispatched in (False, True):
        x = values.clone().requires_grad_()
        if dispatched:
            try:
                add_tvm_dispatch(module, (x, flags))
            except UnsupportedModule as error:  # torch 2.11 traces another type than it computes: refused, never wrong
                assert "on the sample eager gives" in str(error)
                pytest.skip("torch's trace has another type")
        loss = module(x, flags)
        found.append((loss.detach(), *torch.autograd.grad(loss.sum(), x)))
    assert stats(module).hits == 1
    wide = 1e-2 if of_x == torch.bfloat16 else 1e-5
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=wide, atol=wide)  # also types


@pytest.mark.sweep  # tests of loops have norms, gates and dropout in steps
def test_recurrence_written_by_hand():
    check_module(NormalizedLSTM, lambda: leaf(2, 20, 3), calls=1)


def test_losses():
    weight, labels = torch.rand(5, dtype=torch.float64), torch.tensor([0, 4, -100, 2])
    flags = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0]] * 4, dtype=torch.float64)

    def losses(x, y, weight, labels, flags):
        return (
            F.cross_entropy(x, labels, weight, label_smoothing=0.1),
            F.cross_entropy(x, labels, reduction="none"),
            F.cross_entropy(x, y.softmax(1), weight),
            F.nll_loss(F.log_softmax(x, 1), labels.clamp(0), weight, reduction="sum"),
            F.binary_cross_entropy_with_logits(x, flags, weight, pos_weight=weight),
            F.binary_cross_entropy(x.sigmoid(), flags, reduction="sum"),
            F.smooth_l1_loss(x, y, beta=0.5) + F.huber_loss(x, y) + F.mse_loss(x, y) + F.l1_loss(x, y),
            F.kl_div(F.log_softmax(x, 1), y.softmax(1), reduction="batchmean"),
            F.kl_div(F.log_softmax(x, 1), F.log_softmax(y, 1), log_target=True, reduction="sum"),
            F.cosine_embedding_loss(x, y, torch.tensor([1, -1, 1, -1])),
            F.triplet_margin_loss(x, y, x.flip(0)),
            F.hinge_embedding_loss(x, flags * 2 - 1),
            F.margin_ranking_loss(x, y, flags * 2 - 1),
            F.multi_margin_loss(x, labels.clamp(0)),
            F.multilabel_soft_margin_loss(x, flags, weight),
            F.soft_margin_loss(x, flags * 2 - 1),
            F.poisson_nll_loss(x, flags),
        )

    check(losses, leaf(4, 5), leaf(4, 5), weight, labels, flags)


def test_einsum_sorting_and_triangles():
    def functions(x, y):
        return (
            torch.einsum("bij,bjk->bik", x, y),
            torch.einsum("bij,bkj->ik", x, x),
            torch.einsum("bii->b", x),
            x.sort(dim=1, descending=True).values,
            x.topk(2, dim=-1).values,
            x.gather(2, x.argsort(2)),
            x.tril(-1) + x.triu(1),
            torch.tril(y[0]) @ y[1].triu(),
            torch.linalg.solve_triangular(y[0].tril() + 3 * torch.eye(3, dtype=y.dtype), y[1], upper=False),
            torch.where(x[:, :1] > 0, x, y[0]),
            torch.take_along_dim(x, x.argmax(1, keepdim=True), 1),
            x.flip(0)[::2],
        )

    check(functions, leaf(2, 3, 3), leaf(2, 3, 3))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: torch.view_as_complex(x.half().reshape(-1, 2)).real, "view_as_complex"),
        (lambda x: x.to_sparse().to_dense(), "_to_sparse"),
    ],
    ids=["half complex", "sparse"],
)
def test_refused_by_name(function, name):
    class Here(Function):
        def forward(self, x):
            return self.function(x)  # the line that is named

    with pytest.raises(UnsupportedModule, match=name) as refusal:
        add_tvm_dispatch(Here(function), leaf(4, 4))
    assert any("test_nn.py" in op.where for op in refusal.value.ops)


def test_masked_write():
    check_module(
        lambda: Function(lambda x, m: x.clone().index_put((m,), torch.tensor(2.0, dtype=x.dtype)).exp()),
        lambda: Call((leaf(3, 4), torch.rand(3, 4) > 0.5)),
        calls=1,
    )


def test_an_operator_without_a_kernel_is_refused_by_name(monkeypatch):
    def nothing(builder, call):
        raise NotImplementedError("no kernel for the operator relax.erf: none")

    monkeypatch.setitem(TRANSLATIONS, "relax.erf", nothing)
    SESSION.reset("programs")
    with pytest.raises(UnsupportedModule, match=r"relax\.erf"):
        add_tvm_dispatch(Function(torch.erf), leaf(7))


@pytest.mark.parametrize("variance", [[0.5, 1.0, 2.0], [0.0, 1e-9, float("inf")], [1.0]])
def test_gaussian_nll_passes_the_gradient_through_its_clamp(variance):
    """It clamps the variance in place, hidden from autograd: the gradient there is not 0."""
    variance = torch.tensor(variance, dtype=torch.float64).expand(2, -1).clone().requires_grad_()
    check(lambda x, y, v: F.gaussian_nll_loss(x, y, v, reduction="none", full=True), leaf(2, 3), leaf(2, 3), variance)


class ReadsTheMask(nn.Module):
    """A dropout's mask is read as a number and as a flag, and returned."""

    def forward(self, x):
        y, mask = torch.native_dropout(x, 0.3, True)
        return y, mask.type_as(x) * 1.5, torch.where(mask, x, -x), mask


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_mask_of_a_dropout_is_read_by_other_operators(dtype):
    check_module(ReadsTheMask, lambda: torch.randn(5, 4, requires_grad=True), dtype=dtype)
