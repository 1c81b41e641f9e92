"""Vocabulary: statements. In-place writes, state, control flow, submodules; statements that cannot be dispatched."""

from __future__ import annotations

import math

import torch
from torch import nn

from tests.fuzz.scope import Scope, is_int

IN_PLACE = r"""
{x}.add_({c})
{x}.mul_({c})
{x}.add_({y})
{x}.mul_({y})
{x}.sub_({y}, alpha=0.5)
{x}[...] = {c}
{x}[0] = {c}
{x}[..., 0] += 1
{x}[..., -1] = {x}[..., 0]
{x}[1:] *= 0.5
{x}[:, 0] = {y}[:, 0]
{x}[{x} > 0.3] = 0.1
{x}[torch.arange(len({x}))] = 0.5
{x}.relu_()
{x}.tanh_()
{x}.clamp_(-1, 1)
{x}.zero_()
{x}.fill_({c})
{x}.copy_({y})
{x}.masked_fill_({x} < 0, 0.2)
{x}.neg_().add_(1)
{x}.view(-1)[0] = 2.0
{x}.flatten()[0] = 2.0
{x}.t().mul_(2)
{x}.transpose(0, -1)[0].add_(1)
{x}.narrow(0, 0, 1).zero_()
{x}.diagonal().add_(1)
{x}.select(0, 0).copy_({x}.select(0, -1))
{x}.unsqueeze_(0)
{x}.squeeze_()
{x}.t_()
{x}.exp_().div_(3)
{x}.addcmul_({y}, {y}, value=0.1)
{x}.index_add_(0, torch.tensor([0]), {x}[:1] * 2)
{x}.index_fill_(0, torch.tensor([0]), 0.5)
{x}.scatter_(0, torch.zeros_like({x}, dtype=torch.long), 0.3)
{x} += {y}
{x} *= 0.5
{x} -= {x}.mean()
{x} /= 2
F.relu({x}, inplace=True)
F.dropout({x}, 0.3, self.training, inplace=True)
{x}.bernoulli_(0.5)
{x}.uniform_()
torch.nn.functional.leaky_relu_({x}, 0.1)
{x}.detach_()
{x}.unbind(0)[0].mul_(3)
{x}.chunk(2, 0)[0].add_(0.1)
with torch.no_grad():\n    {x}.mul_(0.5)
"""

CONTROL = r"""
if self.training:\n    {v} = {x} * 2\nelse:\n    {v} = {x} - 1
if {x}.shape[0] > 2:\n    {v} = {x}[1:]\nelse:\n    {v} = {x}.sin()
if {x}.dim() == 2 and {x}.dtype == D:\n    {v} = {x} + 1\nelse:\n    {v} = {x}
{v} = {x}\nfor step in range(3):\n    {v} = {v} * 0.9 + step
{v} = torch.stack([row.sin() * i for i, row in enumerate({x})])
{v} = [{x}, {y}]\n{v}.append({v}[0] * 2)\n{v} = sum({v})
{v} = dict(a={x}, b={y})\n{v} = {v}["a"] * {v}["b"].tanh()
with torch.no_grad():\n    {v} = {x} * 2
with torch.no_grad():\n    {v} = {x}.mean()\n{v} = {x} - {v}
with torch.enable_grad():\n    {v} = {x} * 2
{v} = (lambda t: t.tanh() + t)({x})
assert {x}.dim() >= 0\n{v} = {x} + 1
{v} = torch.zeros({x}.shape, dtype={x}.dtype)\nfor i in range(len({x})):\n    {v}[i] = {x}[i] * i
{v} = torch.empty({x}.shape, dtype={x}.dtype)\n{v}[:] = {x}\n{v}[:1] = 0
{v} = {x}.new_zeros({x}.shape)\n{v}[..., ::2] = {x}[..., ::2]
{v} = {x}.clone()\n{v}[0], {v}[-1] = {x}[-1], {x}[0]
{v}, other = {x}.max(-1)\n{v} = {v} + other
{v} = torch.zeros(2, dtype=D).index_put((torch.tensor([0]),), {x}.mean())
{v} = torch.arange({x}.numel(), dtype=D).view({x}.shape) * {x}
{v} = torch.linspace(0, 1, {x}.shape[-1], dtype=D) * {x}
{v} = torch.tensor([1.0, 2.0, 3.0], dtype=D)[:1] * {x}
{v} = torch.eye(3, dtype=D)[0, 0] * {x}
{v} = checkpoint(torch.tanh, {x}, use_reentrant=False)
{v} = {x}.detach()\n{v} = {v}.exp().clamp(max=3) * {x}
{v} = {x} * float(math.pi)
{v} = torch.func.vmap(torch.sin)({x})
{v} = torch.as_tensor(0.5, dtype=D) * {x}
{v} = {x}.to("cpu", non_blocking=True) + 1
{v} = {x}[None][:, 0] if {x}.dim() else {x}
{v} = {x}.split({x}.shape[0] // 2 + 1)[0].sum(0)
{v} = torch.cat([{x}.flatten(), {y}.flatten()])
{v} = ({x}, {y})[0] * 1.5
{v} = torch.broadcast_tensors({x}, {y})[1]
{v} = torch.broadcast_tensors({x}, {y})[1] * 2
{v} = F.dropout({x}, self.p if hasattr(self, "p") else 0.2, self.training)
{v} = torch.cond({x}.shape[0] > 1, torch.sin, torch.cos, ({x},))
{v} = torch.cond({x}.isnan().any(), lambda t: t * 2, lambda t: t * {y}.mean(), ({x},))
{v} = torch._higher_order_ops.map(lambda t, u: t.sin() * u.mean(), {x}, {y})
{v} = torch._higher_order_ops.scan(lambda h, t: (h + t, h * t), torch.zeros_like({x}[0]), {x})[1]
{v} = torch._higher_order_ops.scan(lambda h, t: (h * t.cos(), h + {y}.mean()), {x}[0], {x}, reverse=True)[0]
{v} = torch._higher_order_ops.while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, t.sin()), (torch.tensor(0), {x}))[1]
{v} = torch._higher_order_ops.associative_scan(lambda s, t: s * t.cos(), {x}, 0, combine_mode="generic")
"""

STATE = r"""
{b}.add_(1)
{b}.mul_(0.9).add_({x}.detach().mean())
{b} += {x}.detach().sum() * 0.1
{b}.copy_({b} * 2 + 1)
{b}.zero_()
{b}[0] = {x}.detach().mean()
{b}[...] = 0.5
with torch.no_grad():\n    {b}.lerp_({x}.mean().expand({b}.shape), 0.1)
{v} = {b} * {x}.mean()\n{b}.add_(1)
{b}.add_(1)\n{v} = {b} * {x}.mean()
{b} = {b} * 0.5 + 0.1
{v} = {b}.clone()\n{b}.mul_(2)\n{v} = {v} + {b}
{b}.bernoulli_(0.5)
{b}.view(-1)[0] += 1
"""

SUBMODULES = r"""
nn.Linear({n}, {k}, dtype=D)
nn.Linear({n}, {k}, bias=False, dtype=D)
nn.LayerNorm({n}, dtype=D)
nn.LayerNorm({n}, elementwise_affine=False)
nn.RMSNorm({n}, dtype=D)
nn.BatchNorm1d({c}, dtype=D)
nn.BatchNorm1d({c}, momentum=None, dtype=D)
nn.BatchNorm1d({c}, track_running_stats=False, dtype=D)
nn.BatchNorm1d({c}, affine=False, dtype=D)
nn.BatchNorm2d({c}, dtype=D)
nn.InstanceNorm1d({c}, affine=True, track_running_stats=True, dtype=D)
nn.GroupNorm(1, {c}, dtype=D)
nn.Dropout(0.2)
nn.Dropout1d(0.3)
nn.AlphaDropout(0.2)
nn.Dropout(0.3, inplace=True)
nn.ReLU(inplace=True)
nn.GELU()
nn.PReLU(dtype=D)
nn.Softmax(-1)
nn.Conv1d({c}, 3, 1, dtype=D)
nn.Conv1d({c}, 3, 2, padding=1, padding_mode="circular", dtype=D)
nn.ConvTranspose1d({c}, 2, 2, stride=2, dtype=D)
nn.Conv2d({c}, 2, 1, bias=False, dtype=D)
nn.MaxPool1d(2, 1)
nn.AdaptiveAvgPool1d(2)
nn.Flatten()
nn.Identity()
nn.Sequential(nn.Linear({n}, 6, dtype=D), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, {n}, dtype=D))
nn.MultiheadAttention({n}, 1, dropout=0.1, batch_first=True, dtype=D)
nn.GRU({n}, 3, batch_first=True, dtype=D)
nn.LSTM({n}, 3, dtype=D)
nn.RNN({n}, 2, dtype=D)
nn.LSTMCell({n}, 3, dtype=D)
nn.GRUCell({n}, 3, dtype=D)
nn.TransformerEncoderLayer({n}, 1, 8, dropout=0.1, batch_first=True, dtype=D)
nn.Embedding(5, 3, dtype=D)
nn.Embedding(5, 3, padding_idx=0, dtype=D)
nn.EmbeddingBag(5, 3, mode="mean", dtype=D)
nn.utils.parametrizations.weight_norm(nn.Linear({n}, {k}, dtype=D))
nn.utils.parametrizations.spectral_norm(nn.Linear({n}, {k}, dtype=D))
nn.ParameterList([torch.randn({n}, dtype=D)])
nn.Bilinear({n}, {n}, 2, dtype=D)
nn.LocalResponseNorm(2)
nn.Hardtanh(-0.5, 0.5)
nn.CosineSimilarity(-1)
Cell({n}, D)
Stack({n}, D)
Heads({n}, D)
Recurrent({n}, D)
nn.Sequential(Cell({n}, D), nn.ReLU(inplace=True), Heads({n}, D))
nn.Sequential(nn.BatchNorm1d({c}, dtype=D), nn.Dropout(0.0), nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True))
nn.TransformerDecoderLayer({n}, 1, 8, dropout=0.1, batch_first=True, dtype=D)
nn.LSTM({n}, 3, num_layers=2, bidirectional=True, dropout=0.2, dtype=D)
nn.SyncBatchNorm({c}, dtype=D)
nn.Upsample(scale_factor=2)
nn.Conv3d({c}, 2, 1, dtype=D)
nn.ConvTranspose2d({c}, 2, 2, dtype=D)
nn.MultiheadAttention({n}, 1, add_bias_kv=True, dtype=D)
nn.AdaptiveLogSoftmaxWithLoss({n}, 6, cutoffs=[2, 4], dtype=D)
nn.utils.weight_norm(nn.Linear({n}, {k}, dtype=D))
nn.utils.spectral_norm(nn.Linear({n}, {k}, dtype=D))
nn.TransformerEncoder(nn.TransformerEncoderLayer({n}, 1, 8, dropout=0.1, batch_first=True, dtype=D), 2)
"""

RARE = r"""
{v} = {x} * {x}.mean().item()
if {x}.sum() > 0:\n    {v} = {x} * 2\nelse:\n    {v} = {x} * 3
{v} = Gate()({x})
{v} = torch.cond({x}.sum() > 0, lambda t: t * 2, lambda t: t * {y}.mean(), ({x},))
if {x}.isnan().any():\n    raise ValueError("nan")\n{v} = {x} * 2
assert {x}.isfinite().all(), "not finite"\n{v} = {x} + 1
torch._assert({x}.max() < 1e6, "too large")\n{v} = {x} - 1
{v} = torch.distributions.Normal({x}, 1.0).log_prob({x} * 0.5).sum() * {x}
{v} = torch.distributions.Categorical(logits={x}).entropy()
{v} = {x}[{x} > 0]
{v} = Doubled.apply({x})
{v} = torch.view_as_complex(torch.stack([{x}, {x}], -1)).abs()
{v} = torch.fft.rfft({x}).abs()
{v} = {x}.nonzero().sum() * {x}.mean()
{v} = torch.unique({x}.detach()).sum() + {x}
{v} = {x} * float({x}.detach().max())
self.calls = getattr(self, "calls", 0) + 1\n{v} = {x} * self.calls
self.last = {x}\n{v} = self.last * 2
torch.manual_seed(3)\n{v} = {x} + torch.rand_like({x})
{x}.register_hook(lambda g: g * 2)\n{v} = {x} * 1.0
{v} = {x}.tolist()\n{v} = torch.tensor({v}, dtype=D) * {x}
{v} = torch.from_numpy({x}.detach().numpy()) * {x}
{v} = torch.linalg.eigh({y} @ {y}.mT)[0].sum() * {x}
{v} = torch.linalg.svd({x})[1].sum()
{v} = torch.autograd.grad({x}.pow(2).sum(), {x})[0]
{v} = {x}.detach().requires_grad_()\n{v} = {v} * 2
{x}.data.mul_(2)\n{v} = {x} + 1
{v} = torch.poisson({x}.abs())
{v} = torch.multinomial(torch.full((4,), 0.25), 2)
{v} = torch.normal({x}, 0.1)
{v} = torch.bernoulli(torch.sigmoid({x})) * {x}
{v} = torch.rand(3, generator=torch.Generator().manual_seed(0)).to(D)
{v} = {x}.to_sparse().to_dense()
{v} = torch.quantize_per_tensor({x}.detach().float(), 0.1, 0, torch.qint8).dequantize().to(D)
{v} = {x}.histc(3)
{v} = torch.bincount(({x}.detach() > 0).long().flatten()).sum() * {x}
while 1000 < {x}.abs().sum() < math.inf:\n    {x} = {x} / 2\n{v} = {x} + 1
try:\n    {v} = {x}.view(7, 7, 7)\nexcept RuntimeError:\n    {v} = {x} * 2
{v} = getattr({x}, "grad", None)\n{v} = {x} if {v} is None else {v}
{v} = {x} * ({x}.requires_grad + 1)
{v} = {x} * (2 if torch.is_grad_enabled() else 3)
{v} = {x} * {x}.data_ptr() ** 0
{v} = torch.compile(torch.sin, backend="eager")({x})
print({x}.shape)\n{v} = {x} + 1
{v} = [t.item() for t in {x}.detach().flatten()[:2]]\n{v} = {x} * sum({v})
{v} = torch.utils.dlpack.from_dlpack({x}.detach()) * {x}
{v} = {x}.resize_(1)
{v} = {x}.storage_offset() + {x}
{v} = {x} * {x}.stride(0)
{v} = torch.func.grad(lambda t: t.sin().sum())({x})
{v} = torch.func.jvp(torch.sin, ({x},), ({x},))[1]
{v} = checkpoint(lambda t: F.dropout(t, 0.3), {x}, use_reentrant=False)
{v} = {x}.masked_select({x} > 0).sum()
with torch.random.fork_rng():\n    {v} = {x} + torch.rand_like({x})
with torch.autocast("cpu", torch.bfloat16):\n    {v} = {x} * 2
{v} = torch.tensor({x}.shape[0]).to(D) * {x}
{v} = {x}.is_contiguous() * {x}
{v} = torch.einsum("i,i->", {x}.flatten(), {x}.flatten().to(torch.cfloat)).real
{v} = sorted([{x}.mean(), {y}.mean()], key=lambda t: t.item())[0]
"""


def _lines(table: str) -> list[str]:
    return [line.replace("\\n", "\n") for line in table.strip().splitlines()]


def _statements(table: str):
    templates = _lines(table)

    def propose(scope: Scope) -> str | None:
        template = scope.choice(templates)
        x = scope.pick()
        if table is IN_PLACE and x in {name for name, _, _ in scope.arguments} and scope.chance(0.9):
            return None  # writing into an argument is refused: seldom is enough
        y = scope.partner(x) if x else None
        if x is None or y is None:
            return None
        return template.format(x=x, y=y, c=scope.number(), v=scope.fresh("v"))

    return propose


def state(scope: Scope) -> str | None:
    """A read or write of a buffer."""
    buffers = [name for name, _ in scope.module.named_buffers(recurse=False)]
    x = scope.pick()
    if x is None:
        return None
    if not buffers or scope.chance(0.4):
        shape = scope.choice(["()", "(1,)", "(3,)"])
        kinds = [f"torch.ones({shape}, dtype=D)", f"torch.zeros({shape})", f"torch.zeros({shape}, dtype=torch.long)"]
        name = scope.define(scope.choice(kinds), "buffer")
    else:
        name = f"self.{scope.choice(buffers)}"
    return scope.choice(_lines(STATE)).format(b=name, x=x, v=scope.fresh("v"))


def submodule(scope: Scope) -> str | None:
    """A call of a submodule: mostly a new one, sometimes a repeated one."""
    template = scope.choice(_lines(SUBMODULES))
    wanted = is_int if "Embedding" in template else lambda t: t.dtype == scope.dtype and t.dim() >= 1
    x = scope.pick(wanted)
    if x is None or math.prod(scope[x].shape) == 0:
        return None
    shape = scope[x].shape
    known = [name for name, child in scope.module.named_children() if not isinstance(child, nn.ParameterList)]
    if known and scope.chance(0.2):
        name = f"self.{scope.choice(known)}"
    else:
        channels = shape[1] if len(shape) > 1 else 1
        sizes = {"n": shape[-1] if shape else 1, "k": scope.integer(1, 6), "c": channels}
        name = scope.define(template.format(**sizes))
        if scope.chance(0.1):
            _hook(scope, name, sizes)
    value = f"{x}.clamp(0, 4)" if "Embedding" in template else x
    call = f"{name}({value})"
    if "Attention" in template or "Decoder" in template:
        call = f"{name}({x}, {x}, {x})[0]" if "Attention" in template else f"{name}({x}, {x} * 0.5)"
    elif template.startswith(("nn.GRU(", "nn.LSTM", "nn.RNN(")):
        call = f"{name}({x})[0]"
    elif "ParameterList" in template:
        call = f"{name}[0] * {x}"
    elif "Bilinear" in template or "Cosine" in template:
        call = f"{name}({x}, {x} + 1)"
    return f"{scope.fresh('v')} = {call}"


def _hook(scope: Scope, name: str, sizes: dict[str, int]) -> None:
    hook = scope.choice(HOOKS)
    if "Adapter" in hook:
        scope.extend(f"{name}.adapter = nn.Parameter(torch.randn({sizes['n']}, dtype=D) * 0.3)")
    scope.extend(f"{name}.{hook}")


HOOKS = (
    "register_forward_hook(halve)",
    "register_forward_hook(look)",
    "register_forward_pre_hook(shift)",
    "register_forward_hook(Adapter())",
    "register_forward_hook(lambda m, args, kwargs, result: halve(m, args, result), with_kwargs=True)",
)


def number(scope: Scope) -> str | None:
    """A number in an attribute, which a call may change."""
    x = scope.pick()
    if x is None:
        return None
    value, use = scope.choice(NUMBERS)
    return f"{scope.fresh('v')} = {use.format(x=x, k=scope.define(value))}"


NUMBERS = (
    *(("0.5", "{x} * {k}"), ("0.5", "{x} + {k} * {x}.tanh()"), ("2", "{x} / {k}"), ("1.5", "{x}.clamp(max={k})")),
    *(("2", "sum({x}.sin() for _ in range({k}))"), ("True", "{x} * 2 if {k} else {x} + 1"), ("1", "{x}[:{k}]")),
    *(("0.1", "F.dropout({x}, {k})"), ("0.1", "F.leaky_relu({x}, {k})"), ("3", "{x} ** {k}"), ("1", "{x} - {k}")),
    *(("0.3", "{x} * torch.tensor({k}, dtype=D)"), ("2.0", "torch.full_like({x}, {k}) * {x}"), ("0.0", "{x} * {k}")),
    *(("1", "{x}.roll({k}, 0)"), ("0.1", "torch.lerp({x}, {x}.detach(), {k})")),
)
"""A first value, and its use as ``{k}``."""


def parameter(scope: Scope) -> str | None:
    """Arithmetic with a parameter, a buffer or a tied one."""
    x = scope.pick()
    if x is None:
        return None
    shape = tuple(scope[x].shape)
    extents = shape[scope.integer(0, len(shape)) :]
    text = f"torch.randn({extents}, dtype=D) * 0.5"
    kinds = ["parameter", "parameter", "frozen", "buffer", ""]
    owned = [n for n, p in scope.module.named_parameters(recurse=False) if p.shape == torch.Size(extents)]
    name = f"self.{scope.choice(owned)}" if owned and scope.chance(0.5) else scope.define(text, scope.choice(kinds))
    if scope.chance(0.15):
        name = scope.define(name)  # a second name for the same tensor
    operation = scope.choice(
        ["{x} * {p}", "{x} + {p}", "{x} + {p}.tanh()", "torch.where({p} > 0, {x}, {p})", "{p} - {x}"]
    )
    return f"{scope.fresh('v')} = {operation.format(x=x, p=name)}"


STATEMENTS = {
    _statements(IN_PLACE): 3.0,
    _statements(CONTROL): 2.0,
    state: 1.0,
    submodule: 4.0,
    parameter: 2.0,
    number: 1.0,
}
"""Functions that propose a statement, with their weights."""

RARE_STATEMENTS = _statements(RARE)
"""Proposes one of the statements that mostly cannot be dispatched."""
