"""Custom ``autograd.Function``: its forward and its backward in the compiled programs, equal to eager's."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bridge import UnsupportedModule, add_tvm_dispatch, lower, stats
from bridge.verify import check
from tests.bridge.capture import custom_functions as own
from tests.bridge.compare import Call, assert_same, check_module, run
from tests.device import DEVICE, moved
from tests.sampling import sampled, spread

FACTOR = 2.0


def product(x, w):
    return own.Product.apply(x, w)


class Block(nn.Module):
    """Returns ``then(module, x)``."""

    def __init__(self, then):
        super().__init__()
        self.then = then
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x):
        return self.then(self, x)


def rows(*extents):
    return torch.randn(*(extents or (3, 4)), dtype=torch.float64, requires_grad=True)


def several(m, x):
    first, second, mask, word = own.Several.apply(m.linear(x), m.weight)
    return first.tanh(), second.tanh(), torch.where(mask, first, second), word


def turned(m, x):
    sizes, z = own.Sizes.apply(torch.complex(m.linear(x), x.sin()), 1 - 2j)
    return sizes * z.real + own.Sizes.apply(z, 1j)[1].imag * m.weight


def steps(m, x):
    return functools.reduce(lambda h, _: product(m.linear(h), m.weight).tanh(), range(5), x)


class OfAGlobal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * FACTOR


def overwrites(returned, view):
    def run(m, x):
        h = m.linear(x) * 2
        y = own.Overwrites.apply(h[:, 1:] if view else h, m.weight[1:] if view else m.weight, returned)
        return y.tanh().sum() * h + h.sin()

    return run


USES = {
    "saved tensors": lambda m, x: product(m.linear(x), m.weight).exp(),
    "a view": lambda m, x: own.Reversed.apply(m.linear(x), 0.5).tanh(),
    "the argument itself": lambda m, x: own.Identity.apply(m.linear(x)).tanh() * m.weight,
    "straight through": lambda m, x: own.Rounded.apply(m.linear(x) * 3) * m.weight,
    "writes into a copy": lambda m, x: own.Clipped.apply(m.linear(x)),
    "several outputs": several,
    "one output of several": lambda m, x: own.Several.apply(m.linear(x), m.weight)[1].tanh(),
    "no gradient": lambda m, x: own.OneOfTwo.apply(m.linear(x), m.weight),
    "no gradient from one of two": lambda m, x: own.OneOfTwo.apply(m.linear(x), m.weight) * m.weight,
    "an argument that needs none": lambda m, x: own.PerInput.apply(x.detach(), m.weight).sin(),
    "sums and casts": lambda m, x: own.PerInput.apply(m.linear(x) * 9, m.weight).sin(),
    "undefined gradients": lambda m, x: own.Undefined.apply(m.linear(x)),
    "one inside another": lambda m, x: own.Nested.apply(m.linear(x)).cos(),
    "one after another": lambda m, x: own.Reversed.apply(product(own.Identity.apply(m.linear(x)), m.weight), 2.0).sum(),
    "the same twice": lambda m, x: own.Reversed.apply(m.linear(x), 0.5) * own.Reversed.apply(m.linear(x), 0.5),
    "in a loop": steps,
    "without gradients": lambda m, x: m.linear(x) * own.Rounded.apply(m.weight.detach()),
    "complex numbers": turned,
    "a constant gradient": lambda m, x: own.Constant.apply(m.linear(x)).tanh(),
    "tensors in a list": lambda m, x: own.Called.apply(sum, [h := m.linear(x), m.weight]) * h,
    "tensors of a closure": lambda m, x: own.Called.apply(functools.partial(product, h := m.linear(x)), x.data) + h,
    "under no_grad": lambda m, x: m.linear(x) * torch.no_grad()(own.Rounded.apply)(m.weight),
    "in a checkpoint": lambda m, x: checkpoint(lambda v: product(m.linear(v), m.weight).exp(), x, use_reentrant=False),
    "a global": lambda m, x: OfAGlobal.apply(m.linear(x)),
    "writes its argument": overwrites(False, False),
    "writes a view that it is given": overwrites(False, True),
    "mark_dirty": overwrites(True, False),
    "mark_dirty of a view": overwrites(True, True),
    "a number read in backward": lambda m, x: own.Reads.apply(m.linear(x)),
}


@pytest.mark.parametrize("use", sampled(USES, spread(USES)))
def test_training_is_eagers(use):
    torch.manual_seed(0)
    check_module(lambda: Block(USES[use]), lambda: Call((rows(),)), calls=2, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_large", [lambda h: (h > 9).any(), lambda h: int((h > 9).sum()) > 3])
def test_forward_decides_by_what_it_makes(is_large):
    def then(m, x):
        return own.Called.apply(lambda h: h * 2 if is_large(h) else h, m.linear(x))

    check_module(lambda: Block(then), lambda: Call((rows(),)), calls=2, rtol=1e-10, atol=1e-12)
    module = Block(then).double()
    add_tvm_dispatch(module, rows())
    x = 1000 * rows()
    torch.testing.assert_close(module(x), then(module, x), rtol=1e-10, atol=1e-12)
    assert (stats(module).hits, sum(stats(module).misses.values())) == (0, 1)


def saved_and_written(m, x):
    y = m.linear(x).exp()
    z = product(y, m.weight)
    y.add_(1)
    return z.sum() + y.sum()


kept = []


class Leaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        doubled = x * 2
        kept.append(doubled)
        return doubled + 1

    @staticmethod
    def backward(ctx, grad):
        return grad


def puts(m, x):
    y, found = m.linear(x), torch.zeros(2, *x.shape).to(x)
    for i in range(2):
        found = own.Put.apply(found, y.tanh(), i)
    return found


def leaks(m, x):
    y = Leaks.apply(m.linear(x))
    return y * kept.pop()


REFUSED = {
    "a draw in backward": (lambda m, x: own.Noisy.apply(m.linear(x)), "random draws|draw"),
    "a write into the gradient": (lambda m, x: own.Writes.apply(m.linear(x)), "Function Writes: its backward changes"),
    "undefined gradients of two": (lambda m, x: own.Few.apply(m.linear(x))[0], "Function Few: has several outputs"),
    "what it saves is written": (saved_and_written, "Function Product: its backward reads a tensor that forward"),
    "what it makes is used elsewhere": (leaks, "Function Leaks: a tensor that its forward or backward makes"),
    "an argument that another made": (puts, "Function Put: changes its arguments in place"),
    "a view of an argument": (lambda m, x: own.Reversed.apply(x, 2.0), "clone it"),
    "a view beside what it is of": (
        lambda m, x: (lambda h: (h, own.Reversed.apply(h, 2.0)))(m.linear(x)),
        "returns a view that an autograd.Function has made",
    ),
}


@pytest.mark.parametrize("use", REFUSED)
def test_refused_by_name(use):
    kept.clear()
    then, words = REFUSED[use]
    with pytest.raises(UnsupportedModule, match=words):
        add_tvm_dispatch(Block(then).double(), rows())


def test_two_with_one_forward_and_two_backwards():
    """The operators of forward are the same: neither is taken for the other."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.round()

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    for kind in (own.Rounded, Twice):
        check_module(lambda kind=kind: Block(lambda m, x: kind.apply(m.linear(x))), lambda: Call((rows(),)), calls=1)


def test_a_global_that_backward_reads_is_guarded(monkeypatch):
    module = add_tvm_dispatch(Block(USES["a global"]).double(), moved(rows()))
    monkeypatch.setattr(f"{__name__}.FACTOR", 5.0)
    x = moved(rows())
    y = module(x)
    y.backward(torch.ones_like(y))
    assert torch.allclose(x.grad, 5 * (torch.ones_like(y) @ module.linear.weight))
    assert stats(module).hits == 0 and any("FACTOR" in reason for reason in stats(module).misses)


class Holds(Block):
    """Has a Function's ``apply`` as an attribute."""

    def __init__(self):
        super().__init__(lambda m, x: m.apply_it(m.linear(x)))
        self.apply_it = own.Rounded.apply


looked_up = own.Product.apply
IN_PYTHON = isinstance(vars(torch.autograd.Function).get("apply"), classmethod)


@pytest.mark.skipif(not IN_PYTHON, reason="this torch's apply is C code: refused by name")
def test_an_apply_that_was_looked_up_before():
    then = Block(lambda m, x: looked_up(m.linear(x), m.weight))
    check_module(lambda: then, lambda: Call((rows(),)), calls=1)


@pytest.mark.skipif(not IN_PYTHON, reason="this torch's apply is C code: refused by name")
def test_a_backward_that_is_replaced_is_guarded(monkeypatch):
    module = add_tvm_dispatch(Holds().double(), moved(rows()))
    module(moved(rows()))
    assert stats(module).hits == 1
    monkeypatch.setattr(own.Rounded, "backward", staticmethod(lambda ctx, grad: 2 * grad))
    x = moved(rows())
    y = module(x)
    y.backward(torch.ones_like(y))
    assert torch.allclose(x.grad, 2 * (torch.ones_like(y) @ module.linear.weight))
    assert stats(module).hits == 1


@pytest.mark.parametrize("use", sampled(USES, lambda use: use in ("saved tensors", "several outputs")))
def test_sizes_that_vary(use):
    module, reference = (Block(USES[use]).double() for _ in range(2))
    reference.load_state_dict(module.state_dict())
    if use == "a number read in backward":
        with pytest.raises(UnsupportedModule, match="cannot be traced"):
            add_tvm_dispatch(module, rows(), dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}})
        return
    add_tvm_dispatch(module, rows(), dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}})
    for size in (3, 2, 7):
        x = rows(size, 4).detach()
        mine, eagers = (Call((x.clone().requires_grad_(),)) for _ in range(2))
        assert_same(run(module, mine), run(reference, eagers), rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 3


def test_inference_computes_no_backward():
    module = Block(USES["saved tensors"]).double().eval()
    x = rows().detach()
    with torch.no_grad():
        wanted = module(x)
        add_tvm_dispatch(module, x)
        assert torch.allclose(module(x), wanted)
    (entry,) = stats(module).entries
    assert "clamp" not in str(entry.lowered["forward"].function) and "clip" not in str(
        entry.lowered["forward"].function
    )


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_ends_before_backward(inside):
    def then(m, x):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=inside):
            return Multiplied.apply(m.linear(x), m.linear.weight)

    class Multiplied(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x.float() @ w

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return (grad.float() @ w.T).to(x.dtype), x.float().T @ grad.float()

    torch.manual_seed(0)
    eager = Block(then)
    module = Block(then)
    module.load_state_dict(eager.state_dict())
    x = torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        add_tvm_dispatch(module, x)
        found, wanted = module(x), eager(x)
    assert stats(module).hits == 1
    assert found.dtype == wanted.dtype
    wanted.float().sum().backward()
    found.float().sum().backward()
    for mine, its in zip(module.parameters(), eager.parameters(), strict=True):
        assert mine.grad is its.grad or torch.allclose(mine.grad, its.grad, rtol=2e-2, atol=2e-2)


def test_every_stage_is_eagers():
    found = check(lower(Block(USES["saved tensors"]).double(), rows()))
    assert found.ok, str(found)


def second_derivatives(module, x):
    """Gradients of a module, and of a sum of their squares; or torch's error."""
    wanted = [x, *module.parameters()]
    found = module(x)
    tensors = [each for each in (found if isinstance(found, tuple) else [found]) if isinstance(each, torch.Tensor)]
    value = sum(each.sin().sum() for each in tensors)
    first = torch.autograd.grad(value, wanted, create_graph=True, allow_unused=True)
    squares = sum(each.square().sum() for each in first if each is not None)
    try:
        second = torch.autograd.grad(squares, wanted, allow_unused=True)
    except RuntimeError as error:
        return str(error)
    zeros = [torch.zeros_like(each) for each in wanted]
    return [zero if each is None else each.detach() for each, zero in zip((*first, *second), zeros * 2, strict=True)]


NOT_AGAIN = {
    "sums and casts": "not seen to be linear",
    "writes into a copy": "not seen to be linear",
    "a constant gradient": "not seen to be linear",
    "one inside another": "applies another one",
    "writes its argument": "would not be eager's",
    "writes a view that it is given": "would not be eager's",
    "a number read in backward": "cannot be traced",
}
"""Uses whose backward is eager's once, and an error by name when it is differentiated again."""


@pytest.mark.composes("`create_graph=True`: gradient penalties, PINNs, MAML, Hessian-vector products")
@pytest.mark.parametrize("use", sampled(USES, lambda use: use in NOT_AGAIN or [*USES].index(use) % 3 == 0))
def test_second_derivatives_are_eagers(use):
    """The user's backward is differentiated: arguments and outputs are followed, other kept tensors are constants."""
    eager = moved(Block(USES[use]).double())
    module, x = add_tvm_dispatch(copy.deepcopy(eager), moved(rows())), moved(rows())
    if use in NOT_AGAIN:
        with pytest.raises(RuntimeError, match=NOT_AGAIN[use]):
            second_derivatives(module, x)
        return
    mine, eagers = second_derivatives(module, x), second_derivatives(eager, x)
    if DEVICE.type != "cpu" and "a second time" in eagers:
        pytest.skip("eager frees what a GPU's second backward reads")
    assert isinstance(mine, str) == isinstance(eagers, str), (mine, eagers)
    if isinstance(eagers, str):
        assert "once_differentiable" in eagers and mine == eagers
    else:
        torch.testing.assert_close(mine, eagers, rtol=1e-10, atol=1e-12)
    assert stats(module).eager_backwards.total() == 1


class SetsModes(torch.autograd.Function):
    """Part of its backward is a constant to a second derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            slope = x.cos()
        return grad * slope


def test_a_second_derivative_of_a_backward_that_sets_modes_is_an_error():
    module = add_tvm_dispatch(Block(lambda m, x: SetsModes.apply(m.linear(x))).double(), moved(rows()))
    x = moved(rows())
    module(x).sum().backward()
    with pytest.raises(RuntimeError, match="sets grad modes"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)
