"""Cases of ``docs/limits.md``: a row's first cell → a function that returns the words of its refusal, miss or error."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import queue
import random
import sys
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import Dim
from torch.testing._internal.logging_tensor import LoggingTensorMode
from torch.utils.checkpoint import checkpoint

from bridge import UnsupportedModule, add_tvm_dispatch, load_compiled, save_compiled, stats

X = torch.randn(4, 4)
ROWS, MORE = torch.tensor([True, True, False, False]), torch.tensor([True, True, True, False])


class Of(nn.Module):
    """A linear layer, attributes, and a forward that is a function of the module and one argument or more."""

    def __init__(self, then: Callable[..., Any], **attributes: Any):
        super().__init__()
        self.linear, self.then = nn.Linear(4, 4), then
        for name, value in attributes.items():
            (self.register_buffer if isinstance(value, torch.Tensor) else self.__setattr__)(name, value)

    def forward(self, x, *more):
        return self.then(self, x, *more)


class OfOne(Of):
    def forward(self, x):
        return self.then(self, x)


class Batch:
    def __init__(self, x: torch.Tensor):
        self.x = x


def refused(then: Any, *args: Any, held: dict[str, Any] | None = None, **options: Any) -> str:
    module = then if isinstance(then, nn.Module) else Of(then, **(held or {}))
    try:
        add_tvm_dispatch(module, args or (X.clone(),), **options)
    except (UnsupportedModule, ValueError) as error:
        return str(error)
    return "it was added"


def varying(then: Callable, x: torch.Tensor = X, axis: int = 0, **held: Any) -> str:
    module = then if isinstance(then, nn.Module) else OfOne(then, **held)
    return refused(module, x, dynamic_shapes=({axis: Dim.DYNAMIC},))


def missed(then: Any, first: Any, call: Callable[[nn.Module], Any], **options: Any) -> str:
    module = then if isinstance(then, nn.Module) else Of(then)
    add_tvm_dispatch(module, first, **options)
    call(module)
    return str(stats(module).misses)


def raised(act: Callable[[], Any], kind: type[Exception] = RuntimeError) -> str:
    try:
        act()
    except kind as error:
        return str(error)
    return "nothing was raised"


def saved(then: Callable, given: Any = X, native: bool = False, **held: Any) -> str:
    module = then if isinstance(then, nn.Module) else Of(then, **held)
    with torch.set_grad_enabled(not native):
        add_tvm_dispatch(module, given)
    with tempfile.TemporaryDirectory() as folder:
        return raised(lambda: save_compiled(module, os.path.join(folder, "saved"), native=native), UnsupportedModule)


def loaded(act: Callable[[nn.Module], Any]) -> str:
    module = add_tvm_dispatch(nn.Linear(4, 4), X)
    with tempfile.TemporaryDirectory() as folder:
        save_compiled(module, os.path.join(folder, "saved"))
        back = load_compiled(os.path.join(folder, "saved"))
        return raised(lambda: act(back), Exception)


def saved_varying() -> str:
    module = add_tvm_dispatch(nn.Linear(4, 4), X, dynamic_shapes=({0: Dim.DYNAMIC},))
    with tempfile.TemporaryDirectory() as folder:
        return raised(lambda: save_compiled(module, os.path.join(folder, "saved")), UnsupportedModule)


def followed() -> torch.Tensor:
    return X.clone().requires_grad_()


def twice(module: nn.Module) -> str:
    x = followed()
    add_tvm_dispatch(module, x)

    def act():
        (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        gradient.sum().backward()

    return raised(act)


def function(forward: Callable = lambda x: x.clone(), backward: Callable = lambda g: g, prepare: Any = None) -> type:
    """An ``autograd.Function`` of one tensor."""

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if prepare is not None:
                prepare(ctx)
            return forward(x)

        @staticmethod
        def backward(ctx, *gradients):
            return backward(*gradients)

    return Custom


Numpys = function(lambda x: torch.from_numpy(x.detach().numpy() * 2), lambda g: torch.from_numpy(g.numpy() * 2))
Noisy = function(backward=lambda g: g * torch.rand_like(g))
Writes = function(backward=lambda g: g.mul_(2))
Clamps = function(backward=lambda g: g.clamp(-1, 1))
Several = function(lambda x: (x.clone(), x * 2), lambda g, h: g, lambda ctx: ctx.set_materialize_grads(False))


@functools.lru_cache
def drawn(count: int) -> torch.Tensor:
    return torch.randn(count)


def under_a_mode() -> str:
    with LoggingTensorMode():
        return refused(nn.Linear(4, 4))


def in_inference_mode() -> str:
    with torch.inference_mode():
        module = nn.Linear(4, 4)
    return refused(module)


def gradients_inside() -> str:
    def then(m, x):
        with torch.enable_grad():
            return m.linear(x)

    with torch.no_grad():
        return refused(then)


def with_hooks(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return m.linear(x).exp()


def many_at_once(m, x):
    y = m.linear(x.requires_grad_())
    return torch.autograd.grad(y, x, torch.eye(16).view(16, 4, 4), is_grads_batched=True)[0]


def follows_late(m, x):
    y = m.linear(x)
    x.requires_grad_(True)
    return torch.autograd.grad(m.linear(x).sum(), x)[0] + y


def solved(m, x):
    return torch.autograd.grad(torch.linalg.solve(m.linear.weight @ x + 9 * torch.eye(4), x).sum(), x)[0]


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].register_full_backward_hook(lambda *_: None)
    return module


def frozen(module: nn.Module) -> str:
    with torch.no_grad():
        return refused(module, freeze=True)


def broken_statistics() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    module[1].running_var.fill_(-1)
    return module


def changed_weight(m: nn.Module) -> None:
    m.weight.add_(1)
    m(X)


def frozen_weight() -> str:
    with torch.no_grad():
        return missed(nn.Linear(4, 4), X, changed_weight, freeze=True)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(4, 4))


def compiled_itself() -> nn.Module:
    module = nn.Linear(4, 4)
    module.compile(backend="eager")
    return module


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


def packed(m, x):
    return nn.utils.rnn.pack_padded_sequence(m.linear(x)[None].repeat(2, 1, 1), torch.tensor([4, 3]), batch_first=True)


def nested(m, x):
    return torch.nested.nested_tensor([x[:2], x]).to_padded_tensor(0.0).sum() * m.linear(x)


def written(m, x):
    with open(os.path.join(tempfile.gettempdir(), "of_a_limit"), "a") as file:
        file.write("x")
    return m.linear(x)


def holds_a_function(m, x):
    answer = Batch(m.linear(x))
    answer.of = lambda: 3
    return answer


def view_of_a_result(m, x):
    z = m.linear(x)
    return z, (w := z.view(-1)), w.sin()


def scaled_weight(m, x):
    y = m.linear(x)
    with torch.no_grad():
        m.linear.weight.mul_(0.9)
    return y


def in_channels_last(m: nn.Module) -> None:
    m(torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last))


def quantized(m, x):
    return torch.quantize_per_tensor(m.linear(x), 0.1, 0, torch.qint8).dequantize()


def shared_memory(m: nn.Module) -> None:
    t = torch.ones(4, 4)
    m(t, t)


CASES: dict[str, Callable[[], str]] = {
    "`torch.cond`, `while_loop`, `scan`, `map` in a form that eager's Dynamo does not take (a result that is an "
    "operand)": lambda: refused(lambda m, x: torch.cond(x.sum() > 0, lambda t: t, torch.cos, (m.linear(x),))),
    "these operators inside of `vmap`, other higher-order operators": lambda: refused(
        lambda m, x: torch.vmap(lambda y: torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)))(m.linear(x))
    ),
    "a flag or integer that forward reads (`if mask.any():`) has another value": lambda: missed(
        lambda m, x, mask: m.linear(x) if mask.any() else x, (X, ~MORE & ROWS), lambda m: m(X, MORE)
    ),
    "a floating point number that forward computes and reads (`loss.item()`)": lambda: refused(
        lambda m, x: (y := m.linear(x)) * y.sum().item()
    ),
    "`torch.LongTensor([t])`, `x.new([t])`": lambda: refused(
        lambda m, x: m.linear(x) * torch.LongTensor([x.argmax(), 1]).sum()
    ),
    "another number of rows in `x[mask]`, `nonzero`, `unique` of integers": lambda: missed(
        lambda m, x, mask: m.linear(x)[mask], (X, ROWS), lambda m: m(X, MORE)
    ),
    "a mask that depends on parameters or draws": lambda: refused(lambda m, x: (y := m.linear(x))[y[:, 0] > 0]),
    "`unique` of floats or along a dimension": lambda: refused(lambda m, x: m.linear(x).unique()),
    "the same, by `random` or NumPy": lambda: refused(
        lambda m, x: m.linear(x) if random.random() < 2 else x, whole=True
    ),
    "sparse tensors: results, attributes, `torch.sparse.mm`": lambda: refused(
        lambda m, x: torch.sparse.mm(x.to_sparse(), m.linear(x))
    ),
    "`nn.Embedding(sparse=True)`": lambda: refused(nn.Embedding(5, 3, sparse=True), torch.tensor([1, 2])),
    "nested tensors": lambda: refused(nested),
    "a packed sequence as an argument or result, or read by anything but recurrent layers": lambda: refused(packed),
    "complex numbers of half precision": lambda: refused(
        lambda m, x: torch.view_as_complex(m.linear(x).half().reshape(-1, 2)).real
    ),
    "float8": lambda: refused(lambda m, x: m.linear(x).to(torch.float8_e5m2).float()),
    "quantized tensors": lambda: refused(quantized),
    "quantized modules (`torch.ao.nn.quantized`)": lambda: refused(torch.ao.nn.quantized.dynamic.Linear(4, 4)),
    "`x[t]` by a 0-d tensor, returned beside `x` or read by `as_strided`": lambda: refused(
        lambda m, x, t: x[t], X.clone(), torch.tensor(1)
    ),
    "`as_strided` of memory outside of its view": lambda: refused(
        lambda m, x: m.linear(x)[1:].as_strided((2, 2), (4, 1), 0)
    ),
    "`torch.ops.aten.as_strided_scatter`": lambda: refused(
        lambda m, x: torch.ops.aten.as_strided_scatter(m.linear(x), x[:2, :2], (2, 2), (4, 1), 0)
    ),
    "a write through windows (`unfold`) that overlap or leave a rest": lambda: refused(
        lambda m, x: (y := m.linear(x).clone(), y.unfold(0, 3, 1).mul_(2))[0]
    ),
    "a write through an expanded tensor (`expand`, `meshgrid`)": lambda: refused(
        lambda m, x: (y := m.linear(x)[:, :1], y.expand(4, 4)[:, 0].mul_(2))[0]
    ),
    "`torch.linalg.lstsq(...).residuals`": lambda: refused(
        lambda m, x: torch.linalg.lstsq(x[:, :2], m.linear(x)).residuals
    ),
    "the gradient of `vector_norm` of order 0": lambda: refused(
        lambda m, x: torch.linalg.vector_norm(m.linear(x), 0), followed()
    ),
    "an address (`data_ptr()`, a Triton kernel launched in forward)": lambda: refused(
        lambda m, x: (y := m.linear(x)) * (y.data_ptr() > 0)
    ),
    "functions of C libraries by `ctypes`": lambda: refused(
        lambda m, x: m.linear(x) * (1 + bool(ctypes.CDLL(None).getenv(b"OF_A_LIMIT")))
    ),
    "a tensor on `meta`, or on two devices": lambda: refused(nn.Linear(4, 4), X.to("meta")),
    "the same, differentiated again": lambda: twice(Of(lambda m, x: Numpys.apply(m.linear(x)))),
    "the same, with sizes that vary": lambda: varying(lambda m, x: Numpys.apply(m.linear(x))),
    "a custom Function whose backward draws": lambda: refused(lambda m, x: Noisy.apply(m.linear(x))),
    "one whose backward writes into its gradient": lambda: refused(lambda m, x: Writes.apply(m.linear(x))),
    "one with several outputs and `set_materialize_grads(False)`": lambda: refused(
        lambda m, x: Several.apply(m.linear(x))[0]
    ),
    "`create_graph=True` through a Function that is not linear in its gradients (`clamp`, rounding)": lambda: twice(
        Of(lambda m, x: Clamps.apply(m.linear(x)).tanh())
    ),
    "`is_grads_batched=True` inside forward": lambda: refused(many_at_once),
    "`torch.func.grad`, `jvp`, dual numbers in forward": lambda: refused(
        lambda m, x: torch.func.grad(lambda t: t.sin().sum())(m.linear(x))
    ),
    "`.backward()` inside forward (reversible blocks)": lambda: refused(
        lambda m, x: (y := m.linear(x), y.sum().backward())[0]
    ),
    "`requires_grad_` in forward on a tensor that it has read": lambda: refused(follows_late),
    "derivatives in forward, of checked linear algebra (`linalg.solve`)": lambda: refused(solved, followed()),
    "`.grad` read or set in forward": lambda: refused(
        lambda m, x: (setattr(m.linear.weight, "grad", None), m.linear(x))[1]
    ),
    "a hook on a tensor in forward": lambda: refused(
        lambda m, x: (y := m.linear(x), y.register_hook(lambda g: g * 2), y * 2)[2]
    ),
    "a backward hook on a module inside": lambda: refused(hooked()),
    "`saved_tensors_hooks` in forward": lambda: refused(with_hooks),
    "`checkpoint(..., use_reentrant=True)` in forward": lambda: refused(
        lambda m, x: checkpoint(m.linear, x, use_reentrant=True), followed()
    ),
    "a checkpointed function that reads a buffer it writes (BatchNorm)": lambda: refused(
        lambda m, x: checkpoint(m.norm, m.linear(x), use_reentrant=False), followed(), held={"norm": nn.BatchNorm1d(4)}
    ),
    "`return z, head(z)` where `z` is a view of an input or result": lambda: refused(view_of_a_result),
    "a result that requires grad, of a call without gradients": gradients_inside,
    "an argument written in place that autograd follows": lambda: refused(
        lambda m, x: (y := m.linear(x), x.add_(y))[0]
    ),
    "a written argument that shares memory with another": lambda: missed(
        lambda m, x, s: (s.mul_(2), m.linear(x))[1], (X, torch.ones(4, 4)), shared_memory
    ),
    "a buffer set to an argument or to another buffer": lambda: refused(
        lambda m, x: (setattr(m, "kept", x), m.linear(x))[1], held={"kept": torch.ones(4, 4)}
    ),
    "a buffer on which forward sets `requires_grad`, with a sample": lambda: refused(
        lambda m, x: (m.kept.requires_grad_(True), m.linear(x) * m.kept)[1], held={"kept": torch.ones(4)}
    ),
    "a parameter changed after a use that autograd follows": lambda: refused(scaled_weight),
    "`y.data = x`": lambda: refused(lambda m, x: (y := m.linear(x), setattr(y, "data", x))[0]),
    "a counter that forward reads and changes": lambda: refused(
        lambda m, x: (setattr(m, "count", m.count + 1), m.linear(x) * m.count)[1], held={"count": 0}
    ),
    "a number that forward leaves in state, with `dynamic_shapes=`": lambda: varying(
        lambda m, x: (setattr(m, "count", x.shape[0]), m.linear(x))[1], count=0
    ),
    "files, processes, the environment": lambda: refused(written),
    "queues": lambda: refused(lambda m, x: (m.held.put(1), m.linear(x))[1], held={"held": queue.SimpleQueue()}),
    "hashes, streams": lambda: refused(
        lambda m, x: (m.held.update(b"x"), m.linear(x))[1], held={"held": hashlib.sha256()}
    ),
    "iterators from outside": lambda: refused(lambda m, x: m.linear(x) * next(m.held), held={"held": iter(range(100))}),
    "locks that stay acquired": lambda: refused(
        lambda m, x: (m.held.acquire(False), m.linear(x))[1], held={"held": threading.Lock()}
    ),
    "`os.urandom`, counts of references": lambda: refused(lambda m, x: m.linear(x) * sys.getrefcount(m.linear)),
    "clocks": lambda: refused(lambda m, x: m.linear(x) * time.perf_counter()),
    "objects in C without readable state (`zlib`, parsers)": lambda: refused(
        lambda m, x: (m.held.copy(), m.linear(x))[1], held={"held": zlib.decompressobj()}
    ),
    "threads started in forward": lambda: refused(
        lambda m, x: (threading.Thread(target=X.clone).start(), m.linear(x))[1]
    ),
    "NumPy on tensors in forward": lambda: refused(
        lambda m, x: (y := m.linear(x)) + torch.from_numpy(y.detach().numpy())
    ),
    "`lru_cache` over a function that draws": lambda: refused(lambda m, x: m.linear(x) * drawn(4)),
    "lazy modules (`nn.LazyLinear`), with a sample": lambda: refused(nn.LazyLinear(4)),
    "an object argument that forward keeps or returns": lambda: refused(
        lambda m, b: (setattr(m, "kept", b), m.linear(b.x))[1], Batch(X)
    ),
    "`is`, `id()` of an object argument": lambda: refused(lambda m, b: m.linear(b.x) * (b is m), Batch(X)),
    "a method, a function in C, a lock or a `torch.Size` as an argument": lambda: refused(
        lambda m, x, f: f(m.linear(x)), X, torch.relu
    ),
    "a NumPy array or number as an argument": lambda: refused(lambda m, x, y: m.linear(x) * y, X, np.float32(2)),
    "a result that is a generator, a set, or an object with functions in it": lambda: refused(holds_a_function),
    "a result from before the call": lambda: refused(lambda m, x: (m.linear(x), m.kept), held={"kept": Batch(X)}),
    "`torch.jit` modules": lambda: refused(scripted()),
    "parameters made under `inference_mode`": in_inference_mode,
    "adding under a `TorchDispatchMode`": under_a_mode,
    "sizes of 0 and 1": lambda: varying(lambda m, x: m.linear(x), X[:1]),
    "`math.log(n)`, `float(n)`, a `for` over a dimension; `linspace`, `logspace`, `hann_window`, `triu_indices`, "
    "`kron`, `affine_grid` of a size": lambda: varying(lambda m, x: m.linear(x) * math.log(x.shape[0])),
    "`topk`, `kthvalue` with a k made of sizes": lambda: varying(
        lambda m, x: m.linear(x).topk(x.shape[0] - 2, 0).values
    ),
    "`as_strided` with a size that varies": lambda: varying(
        lambda m, x: m.linear(x).as_strided((x.shape[0], 2), (4, 1)) * 2
    ),
    "`F.interpolate` by a factor that is no multiple of a power of two (1.3)": lambda: varying(
        lambda m, x: nn.functional.interpolate(x, scale_factor=1.3) * 2, torch.randn(2, 3, 10), axis=2
    ),
    "the length of an `nn.LSTM` in float32 of under 256 columns": lambda: varying(
        Recurrent(), torch.randn(3, 6, 4), axis=1
    ),
    "a comparison of sizes in forward": lambda: missed(
        OfOne(lambda m, x: m.linear(x) * (2 if x.shape[0] > 3 else 3)),
        X,
        lambda m: m(X[:3]),
        dynamic_shapes=({0: Dim.DYNAMIC},),
    ),
    "inputs in channels_last, where the sample was dense": lambda: missed(
        nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8), in_channels_last, dynamic_shapes=({0: Dim.DYNAMIC},)
    ),
    "a `torch.Generator` of the module's own": lambda: refused(
        lambda m, x: m.linear(x) + torch.randn(4, generator=m.held), held={"held": torch.Generator()}, whole=True
    ),
    "`torch.manual_seed` in forward": lambda: refused(
        lambda m, x: (torch.manual_seed(3), nn.functional.dropout(m.linear(x)))[1]
    ),
    "a computed draw (`torch.bernoulli(p)`, `multinomial`) whose result is unused": lambda: refused(
        lambda m, x: (torch.bernoulli(x.sigmoid()), m.linear(x))[1]
    ),
    "`rrelu` in training with bounds closer than 1e-5": lambda: refused(
        lambda m, x: nn.functional.rrelu(m.linear(x), 0.2, 0.2, training=True)
    ),
    "`torch.bernoulli(x, p)` of a tensor that needs a gradient": lambda: refused(
        lambda m, x: torch.bernoulli(m.linear(x).sigmoid(), 0.5)
    ),
    "`nn.DataParallel`": lambda: refused(nn.DataParallel(nn.Linear(4, 4))),
    "`freeze=True` in train mode, BatchNorm": lambda: frozen(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))),
    "`freeze=True` in train mode, dropout": lambda: frozen(nn.Dropout(0.5)),
    "a frozen weight that changes in place": frozen_weight,
    "a folded weight that is not finite": lambda: frozen(broken_statistics()),
    "`save_compiled` of sizes that vary": saved_varying,
    "`save_compiled` of attributes that a call sets": lambda: saved(
        lambda m, x: (setattr(m, "loss", m.linear(x).sum()), m.linear(x))[1], loss=None
    ),
    "`save_compiled` of complex numbers": lambda: saved(lambda m, x: torch.complex(m.linear(x), x)),
    "`save_compiled` of a custom Function run as it is": lambda: saved(lambda m, x: Numpys.apply(m.linear(x))),
    "`save_compiled` of a call with an object argument": lambda: saved(lambda m, b: m.linear(b.x), Batch(X)),
    "`save_compiled(native=True)` with torch's own kernels": lambda: saved(
        lambda m, x: torch.linalg.svdvals(m.linear(x)), native=True
    ),
    "`save_compiled(native=True)` with draws": lambda: saved(nn.Dropout(0.5), native=True),
    "a loaded module, called otherwise": lambda: loaded(lambda m: m(X[[0, 1, 2, 3, 0]])),
    "a loaded module, differentiated again": lambda: loaded(
        lambda m: torch.autograd.grad(m(X).sum(), [*m.parameters()], create_graph=True)
    ),
    "a module under `module.compile()`": lambda: refused(compiled_itself()),
}
