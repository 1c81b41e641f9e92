"""Source of typical custom autograd Functions, for random modules to apply."""

from __future__ import annotations

FUNCTIONS = '''\
def slope(x, y, again=True):
    """The derivative of a function of y with respect to x, or x where there is none."""
    if not (x.requires_grad and y.requires_grad):
        return x
    of = [(y * y).sum()]
    found = torch.autograd.grad(of, [x], create_graph=again, retain_graph=True, allow_unused=True)[0]
    return x if found is None else found


def at_leaf(x, function, again=True):
    """The derivative of a function at the numbers of x."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        found = torch.autograd.grad(function(leaf).sum(), leaf, create_graph=again and x.requires_grad)[0]
    return (found if x.requires_grad else found.detach()) * x


class Doubled(torch.autograd.Function):
    """A custom function whose backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad_out):
        return grad_out * 3


class Squashed(torch.autograd.Function):
    """Saves its result, and keeps a number."""

    @staticmethod
    def forward(ctx, x, scale):
        y = torch.tanh(x * scale)
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, grad_out):
        (y,) = ctx.saved_tensors
        return grad_out * (1 - y * y) * ctx.scale * 0.9, None


class Straight(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, grad_out):
        return grad_out


class Pairwise(torch.autograd.Function):
    """Two arguments, two results, one of which has no gradient."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        larger = x > y
        ctx.mark_non_differentiable(larger)
        return x * y.sin(), larger

    @staticmethod
    def backward(ctx, grad_out, _):
        x, y = ctx.saved_tensors
        return grad_out * y.sin() + 0.1 * grad_out, grad_out * x * y.cos()


class Inner(torch.autograd.Function):
    """Keeps what it computes on its way, which is a constant to a second derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.slope = x.cos()
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad_out):
        (x,) = ctx.saved_tensors
        return grad_out * ctx.slope * (1 + 0.1 * x)


class Once(torch.autograd.Function):
    """Its backward has no derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out):
        (x,) = ctx.saved_tensors
        return grad_out * x * 2


class Weighted(torch.autograd.Function):
    """With a context of its own step; asks which gradients are wanted, and has none for a number."""

    @staticmethod
    def forward(x, y, power):
        return x * y**power

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, y, ctx.power = inputs
        ctx.save_for_backward(x, y)

    @staticmethod
    def backward(ctx, grad_out):
        x, y = ctx.saved_tensors
        by_x = grad_out * y**ctx.power if ctx.needs_input_grad[0] else None
        by_y = grad_out * x * y * ctx.power if ctx.needs_input_grad[1] else None
        return by_x, by_y, None


class Reversed(torch.autograd.Function):
    """Its argument as it is, with a gradient turned round."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_out):
        return grad_out.neg() * ctx.factor, None


class Parted(torch.autograd.Function):
    """Two results whose gradients may be missing."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.sin(), x.square()

    @staticmethod
    def backward(ctx, one, other):
        (x,) = ctx.saved_tensors
        found = torch.zeros_like(x)
        if one is not None:
            found = found + one * x.cos()
        if other is not None:
            found = found + other * x * 2.5
        return found


class Written(torch.autograd.Function):
    """Writes its argument in place."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(1.5)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad_out):
        return grad_out * 1.25


class Masked(torch.autograd.Function):
    """Writes a copy of its gradient in place, and clips it."""

    @staticmethod
    def forward(ctx, x):
        ctx.negative = x < 0
        return x.relu()

    @staticmethod
    def backward(ctx, grad_out):
        found = grad_out.clone()
        found[ctx.negative] = 0.01
        return found.clamp(-2, 2)


class Sized(torch.autograd.Function):
    """The size of a complex number, with a gradient in PyTorch's convention."""

    @staticmethod
    def forward(ctx, z):
        size = z.abs() + 0.5
        ctx.save_for_backward(z, size)
        return size

    @staticmethod
    def backward(ctx, grad_out):
        z, size = ctx.saved_tensors
        return grad_out * z / size


class Turned(torch.autograd.Function):
    """A complex factor, whose gradient is turned back and halved."""

    @staticmethod
    def forward(ctx, z, factor):
        ctx.factor = factor
        return z * factor

    @staticmethod
    def backward(ctx, grad_out):
        return grad_out * complex(ctx.factor).conjugate() * 0.5, None
'''
