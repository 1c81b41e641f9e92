"""Custom autograd Functions for tests, each used by a dispatched and an eager module."""

from __future__ import annotations

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Product(Function):
    """Saves tensors, keeps a number, has a no_grad region and a backward that is differentiable once."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.factor = 3.0
        with torch.no_grad():
            doubled = x * 2
        return doubled * w

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return (grad * w * ctx.factor).clamp(-1, 1), (grad * x * 2).sum(0)


class Reversed(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.factor * grad, None


class Identity(Function):
    """Returns its argument as it is."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


class Rounded(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Clipped(Function):
    """Its backward writes into a copy of its gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        found = grad.clone()
        found[x < 0] = 0.1
        return found


class Several(Function):
    """Three outputs, one of which has no gradient; saves an output; the new way of writing."""

    @staticmethod
    def forward(x, w):
        return x * w, x + w, x > 0, "a word"

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[0])
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx, first, second, third, word):
        assert word is None and third.dtype == torch.bool
        x, w, product = ctx.saved_tensors
        return first * w * 2 + second * product, (first * x).sum(0) + second.sum(0)


class OneOfTwo(Function):
    """``None`` for an argument that is a tensor, and more of them than there are arguments."""

    @staticmethod
    def forward(ctx, x, w):
        return x * w

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None, None


class PerInput(Function):
    """Computes only the gradients asked for, one in another shape (to be summed) and one in another type."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        found = [None, None]
        if ctx.needs_input_grad[0]:
            found[0] = (grad * w).round().to(torch.int32)
        if ctx.needs_input_grad[1]:
            found[1] = grad * x * 7
        return tuple(found)


class Undefined(Function):
    """Takes undefined gradients; with one output, they are always defined."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        return None if grad is None else grad * 5


class Few(Function):
    """Two outputs; its backward gets None for the gradient of an unused one."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x.exp(), x.sin()

    @staticmethod
    def backward(ctx, first, second):
        return first if second is None else second


class Nested(Function):
    """Applies another Function inside, whose backward does not run."""

    @staticmethod
    def forward(ctx, x):
        return Identity.apply(x) * 2

    @staticmethod
    def backward(ctx, grad):
        return Identity.apply(grad) * 4


class Noisy(Function):
    """Draws in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.rand_like(grad)


class Reads(Function):
    """Its backward depends on a number that it reads."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad / grad.norm() if grad.norm() > 1 else grad


class Writes(Function):
    """Its backward writes into its argument."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad.mul_(2)


class Put(Function):
    """Writes behind the version counter into an argument, and returns it (torchdiffeq's Runge-Kutta steps)."""

    @staticmethod
    def forward(ctx, rows, value, index):
        ctx.index, rows.data[index] = index, value
        return rows

    @staticmethod
    def backward(ctx, grad):
        return grad, grad[ctx.index], None


class Overwrites(Function):
    """Writes its argument, as TabNet's sparsemax does, and may return it."""

    @staticmethod
    def forward(ctx, x, w, returned):
        x -= x.max()
        if returned:
            ctx.mark_dirty(x)
        ctx.save_for_backward(x, w)
        return x if returned else x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w * 3, (grad * x).sum(0), None


class Called(torch.autograd.Function):
    """Calls a function: autograd follows the tensors that it is applied to, not tensors that it finds elsewhere."""

    @staticmethod
    def forward(ctx, function, *given):
        return function(*given)

    @staticmethod
    def backward(ctx, grad):
        return None, grad * 1.5


class Sizes(torch.autograd.Function):
    """Complex numbers -> their sizes and they turned, with gradients that are not autograd's."""

    @staticmethod
    def forward(ctx, z, factor):
        ctx.save_for_backward(z)
        ctx.factor = factor
        return z.abs(), z * factor

    @staticmethod
    def backward(ctx, sizes, turned):
        (z,) = ctx.saved_tensors
        return sizes * z * 0.7 + turned * complex(ctx.factor).conjugate() * 0.5, None


class Constant(torch.autograd.Function):
    """Its gradient is a number, whatever the gradient of its output is."""

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, 2.0)
