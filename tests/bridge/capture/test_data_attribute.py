"""``tensor.data`` in forward: read as ``detach()``; a buffer's or parameter's is written back, others are refused."""

import copy

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, lower, stats
from tests.sampling import sampled


class Block(nn.Module):
    def __init__(self, then):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("mean", torch.ones(4))
        self.then = then

    def forward(self, x):
        return self.then(self, x, self.linear(x))


def moving_average(m, x, y):
    m.mean.data.mul_(0.9).add_(y.data.mean(0), alpha=0.1)
    return y * m.mean


def own_copy(m, x, y):
    z = 2 * x
    z.data.add_(1)
    return m.linear(z) * y


def straight_through(m, x, y):
    return y + (y.round() - y).data


def is_a_leaf(m, x, y):
    return y * y.data if y.data.is_leaf and not y.data.requires_grad else y


def binarized(m, x, y):
    y = nn.functional.hardtanh(y)
    y.data = y.data.sign()
    with torch.no_grad():
        z = m.linear(y)
        z.data = z + 1
    return m.linear(y) * y + z


def set_twice(m, x, y):
    y = y.exp()
    y.data = y.data + 1
    y.data = y.data * 3
    return y[:2].sum() * y


def clipped(m, x, y):
    m.scale.data.clamp_(-1, 1)
    return y * m.scale


def normalized(m, x, y):
    norm = m.scale.data.norm()
    m.scale.data = m.scale.data / norm
    return y * m.scale * norm + m.scale.exp()


def masked_twice(m, x, y):
    with torch.no_grad():
        m.scale[1:].mul_(0.5)
        scale = m.scale.add_(x.mean(0))
    return (y * m.scale * m.scale.data).exp() + scale, m.scale, m.scale.data


def halved(m, x, y):
    with torch.no_grad():
        m.scale.mul_(0.5)
    return y.sin() * m.scale


def followed_then_copied(m, x, y):
    with torch.no_grad():
        m.scale.copy_(m.linear.weight[0])
    return m.linear(y) * m.scale


READ = [
    binarized,
    set_twice,
    moving_average,
    own_copy,
    straight_through,
    is_a_leaf,
    lambda m, x, y: nn.functional.linear(y, m.linear.weight.data, m.linear.bias),
    lambda m, x, y: (y, y.data, m.scale.data),
    lambda m, x, y: y / m.linear.weight.data.norm() * m.scale,
    clipped,
    halved,
    normalized,
    masked_twice,
    followed_then_copied,
]


@pytest.mark.parametrize("then", sampled(READ, READ[:8] + READ[9:]))
def test_reading_data(then):
    module = Block(then).double()
    eager, x = copy.deepcopy(module), torch.randn(5, 4, dtype=torch.float64)
    add_tvm_dispatch(module, x)
    for _ in range(3):
        mine, theirs = (each(x) for each in (module, eager))
        torch.testing.assert_close(mine, theirs)
        for result in (mine, theirs):
            (result[0] if isinstance(result, tuple) else result).square().sum().backward()
        if isinstance(mine, tuple):
            assert [each.requires_grad for each in mine] == [each.requires_grad for each in theirs]
    assert stats(module).hits == 3
    torch.testing.assert_close(module.state_dict(), eager.state_dict())
    for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def with_other_numbers(m, y):
    """A quantized weight, which is put back."""
    before, m.scale.data = m.scale.data, m.scale.data.round()
    y = y * m.scale
    m.scale.data = before
    return y


def new_numbers(m):
    before, m.mean.data = m.mean.detach(), m.mean.data * 0.5
    return m.mean - before


WRITTEN = {
    "a parameter's": (lambda m, x, y: (y * m.scale, m.scale.data.clamp_(-1, 1))[0], "clamp_.*: changes a parameter"),
    "put back": (lambda m, x, y: with_other_numbers(m, y), "Tensor.data =: what had the old memory"),
    "a buffer's old": (lambda m, x, y: new_numbers(m) * y, "Tensor.data =: what had the old memory"),
    "a view's": (lambda m, x, y: (m.scale[1:], m.scale.data.clamp_(-1, 1))[0].sum() * y, "clamp_.*a parameter"),
    "an argument's": (lambda m, x, y: (x.data.add_(1), y)[1], "changes a tensor that was passed"),
    "what autograd reads": (lambda m, x, y: (y.data.add_(1), y * y)[1], "autograd sees under another name"),
    "set": (lambda m, x, y: (setattr(y, "data", x), y)[1], "Tensor.data ="),
    "set, read before": (lambda m, x, y: (y.square(), setattr(y, "data", y.data * 2))[0] * y, "Tensor.data ="),
    "set, then written": (lambda m, x, y: (setattr(y, "data", y.data * 2), y.mul_(2))[1], "mul_"),
    "a parameter's set": (lambda m, x, y: (setattr(m.scale, "data", x[0]), y * m.scale)[1], "Tensor.data ="),
    "a gradient set": (lambda m, x, y: (setattr(m.scale, "grad", None), y * m.scale)[1], "Tensor.grad ="),
}


@pytest.mark.parametrize(("then", "words"), WRITTEN.values(), ids=WRITTEN)
def test_writing_data_is_refused(then, words):
    module, x = Block(then), torch.randn(5, 4)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(UnsupportedModule, match=words):
        add_tvm_dispatch(module, x.clone().requires_grad_())
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


def to_the_same(m, x, y):
    m.scale.data = m.scale.data.to(x.device)
    m.linear.weight.data = m.linear.weight.data.to(x.dtype)
    return y * m.scale


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_data_that_is_set_to_itself_is_no_change(mode):
    module, x = getattr(Block(to_the_same), mode)(), torch.randn(3, 4)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, x)
    for each in (module, eager):
        each(x).square().sum().backward()
    torch.testing.assert_close(module.scale.grad, eager.scale.grad)
    assert stats(module).hits == 1


@pytest.mark.composes(
    "forward writes a parameter (weight clipping, max-norm, weights of EMA)",
    "works where the write comes before all that autograd follows of it; else refused by name",
    section="The module stays the user's",
)
@pytest.mark.parametrize("grad", [True, False])
def test_a_parameter_that_is_written_keeps_its_gradient(grad):
    """Also with two calls before a backward: a write through ``.data`` is not counted."""
    module, x = Block(clipped), torch.randn(3, 4)
    eager = copy.deepcopy(module)
    with torch.set_grad_enabled(grad):
        add_tvm_dispatch(module, x)
        assert torch.equal(module.scale, torch.full((4,), 2.0))
        found = []
        for each in (module, eager):
            first, second = each(x), each(2 * x)
            if grad:
                (first + second.exp()).sum().backward()
            found.append([first, second, each.scale, each.scale.grad, each.linear.weight.grad])
    torch.testing.assert_close(*[[each for each in some if each is not None] for some in found])
    assert stats(module).hits == 2
    assert lower(Block(halved), (x,)).check().ok


def counted(m, x, y):
    with torch.no_grad():
        m.scale[1:].mul_(0.5)
        m.scale.clamp_(-1, 1)
        m.mean.mul_(0.9)
    return y * m.scale * m.mean


WRITING = [(Block(counted), torch.ones(3, 4)), (nn.Embedding(4, 3, max_norm=0.1), torch.arange(2))]


@pytest.mark.parametrize("example", WRITING, ids=["no_grad", "max_norm"])
def test_adding_does_not_count_as_a_write(example):
    module, x = example
    before = [each._version for each in (*module.parameters(), *module.buffers(), x)]
    add_tvm_dispatch(module, x)
    assert [each._version for each in (*module.parameters(), *module.buffers(), x)] == before


def halves(m, x, y):
    m.scale.data.mul_(0.5)
    return y * m.scale[None] + m.scale.exp()


def read_before(m, x, y):
    y = y * m.mean[1:3].sum() * m.mean + m.mean.exp()
    m.mean.data.lerp_(x.mean(0), 0.3)
    return y


def written_with_a_result(m, x, y):
    mean = x.mean(0)
    m.mean.data.copy_(mean)
    return y * m.mean[None] + m.scale * mean, mean


def codebook(m, x, y):
    nearest = (y[:, None] - m.codes).square().sum(2).argmin(1)
    codes = m.codes[nearest]
    m.codes.data[nearest] = y.detach()
    return y + (codes - y).detach() + (y - codes).square() + y @ m.codes.t()


def shifted(m, x, y):
    y = y[:, m.places].square()
    m.places.data.copy_((m.places + 1) % 4)
    return y


def twice_in_a_loop(m, x, y):
    for _ in range(6):
        y = torch.tanh(y * m.mean)
        m.mean.data.mul_(0.9)
    return y


def own_argument(m, x, y):
    x.data.mul_(0.5)
    return m.linear(x) * x


def complex_numbers(m, x, y):
    m.waves.data.mul_(0.5)
    return torch.view_as_real(y * m.waves)


def data_behind_a_view(m, x, y):
    y = y * m.mean[None]
    m.mean.data = m.mean * 0.9
    return y


def data_before_a_view(m, x, y):
    m.mean.data = m.mean * 0.9 + x.mean(0)
    return y * m.mean[None]


def copied_before_a_view(m, x, y):
    """The same rows as the case before."""
    m.mean.data.copy_(m.mean * 0.9 + x.mean(0))
    return y * m.mean[None]


def data_before_itself(m, x, y):
    m.mean.data = m.mean * 0.9 + x.mean(0)
    return y * m.mean


def distances(m, x, y):
    y = torch.cdist(y, m.codes)
    m.codes.data.mul_(0.5)
    return y


def codebook_averages(m, x, y):
    """Nothing reads the names that are written; the gradient of the written values ends there."""
    codes = m.codes[(y[:, None] - m.codes).square().sum(2).argmin(1)]
    m.mean.data.lerp_(y.mean(0), 0.3)
    m.scaled.data[:2].add_(y[:2] * m.scale)
    m.codes.data.copy_(m.codes * m.mean + m.scaled)
    y.mul_(2)
    return y @ m.scaled * m.mean + codes


OVERWRITTEN = [
    halves,
    read_before,
    codebook_averages,
    written_with_a_result,
    codebook,
    shifted,
    twice_in_a_loop,
    own_argument,
]
OVERWRITTEN += [distances, clipped, normalized, moving_average, complex_numbers]
EXCHANGED = [data_behind_a_view, data_before_a_view, copied_before_a_view, data_before_itself]


class Written(Block):
    def __init__(self, then):
        super().__init__(then)
        self.register_buffer("codes", torch.randn(4, 4))
        self.register_buffer("scaled", torch.zeros(4, 4))
        self.register_buffer("places", torch.tensor([0, 1, 2, 3]))
        self.register_buffer("waves", torch.randn(4, dtype=torch.complex64))


@pytest.mark.parametrize("order", [(0,), (0, 1), (1, 0)])
@pytest.mark.parametrize("function", [*sampled(OVERWRITTEN, OVERWRITTEN[:6]), *EXCHANGED])
def test_a_backward_reads_what_data_has_written(function, order):
    """Autograd saves a tensor, not its numbers, and a write through ``.data`` is not counted: also a later call's."""
    module = Written(function).double()
    eager, xs = copy.deepcopy(module), torch.randn(3, 5, 4, dtype=torch.float64)
    add_tvm_dispatch(module, xs[2].clone(), partition="recompute_all" if len(order) == 1 else "min_cut")
    found = []
    for each in (module, eager):
        results = [each(xs[place].clone()) for place in range(len(order))]
        results = [result[0] if isinstance(result, tuple) else result for result in results]
        for place in order:
            results[place].square().sum().backward()
        found.append([[p.grad for p in each.parameters() if p.grad is not None], results, each.state_dict()])
    torch.testing.assert_close(*found)
    assert stats(module).hits == len(order)


@pytest.mark.parametrize("function", [read_before, codebook, shifted])
def test_a_second_derivative_reads_what_data_has_written(function):
    module, x = Written(function).double(), torch.randn(5, 4, dtype=torch.float64)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, x)
    found = []
    for each in (module, eager):
        first, _ = each(x), each(2 * x)
        gradients = torch.autograd.grad(first.square().sum(), [*each.linear.parameters()], create_graph=True)
        sum(each.square().sum() for each in gradients).backward()
        found.append([p.grad for p in each.linear.parameters()])
    torch.testing.assert_close(*found)
    assert stats(module).eager_backwards


def rows(m, x, y):
    """Autograd saves the rows' means beside the rows."""
    y = y + nn.functional.layer_norm(m.codes, (4,), m.linear.bias)[0]
    m.codes.data.mul_(0.5)
    return y


def data_and_itself(m, x, y):
    """Autograd saves a view, which keeps the old memory, and the buffer itself, which gives the new one."""
    y = y * m.mean[None] + y.exp() * m.mean
    m.mean.data = m.mean * 0.9
    return y


def another_buffer(m, x, y):
    y = y * m.mean
    m.mean.data.mul_(0.5)
    m.mean = m.mean * 0.9
    return y


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (rows, r"it reads memory that forward overwrites by .data"),
        (another_buffer, r"'mean': is set to another tensor, where autograd saves"),
        (data_and_itself, r"'mean': is set to another tensor, where autograd saves"),
    ],
)
def test_memory_that_a_backward_cannot_read_again_is_refused(function, words):
    with pytest.raises(UnsupportedModule, match=words):
        add_tvm_dispatch(Written(function), torch.randn(5, 4))


@pytest.mark.parametrize("function", [read_before, halves])
def test_overwritten_memory_in_each_stage(function):
    assert lower(Block(function), (torch.randn(3, 4),)).check().ok


def test_a_second_derivative_through_a_written_parameter_is_told():
    module, x = Block(halves), torch.randn(3, 4)
    add_tvm_dispatch(module, x)
    with pytest.raises(RuntimeError, match=r"whose forward writes scale by .data"):
        torch.autograd.grad(module(x).square().sum(), [module.linear.weight], create_graph=True)


class Versioned(nn.Module):
    """Keeps a tensor's version beside the tensor, as a cache does."""

    def __init__(self, of):
        super().__init__()
        self.linear, self.of, self.kept = nn.Linear(4, 4), of, None
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        found = self.of(self, x)
        self.kept = found * 2, found._version
        return self.linear(x)


@pytest.mark.parametrize("of", [lambda m, x: (x * 2).view(-1), lambda m, x: (m.linear.weight * 2)[1]])
def test_the_version_of_a_view_that_forward_makes(of):
    module, x = Versioned(of).double(), torch.randn(3, 4, dtype=torch.float64)
    add_tvm_dispatch(module, (x,))
    for _ in range(2):
        module(x)
        assert module.kept[1] == 0
    assert stats(module).hits == 2


@pytest.mark.parametrize(
    "of", [lambda m, x: m.linear.weight.t(), lambda m, x: m.seen[:2], lambda m, x: m.seen.add_(1)[:2]]
)
def test_the_version_of_a_view_of_state_is_refused(of):
    module = Versioned(of)
    module.seen.add_(1)  # its copies, which are recorded, have another version
    with pytest.raises(UnsupportedModule, match="returns something else each time"):
        add_tvm_dispatch(module, (torch.randn(3, 4),))
