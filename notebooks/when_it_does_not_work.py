# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # When it does not work
#
# A compiler for training has one duty above speed: never to be silently wrong. It says no by name, it runs eager and
# counts why, and when a number looks odd it can be asked which stage, which operation, and whether it is rounding.

# %%
import copy
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib_inline.backend_inline import set_matplotlib_formats
from torch import nn
from torch.nn import functional as F

from bridge import DispatchMiss, UnsupportedModule, add_tvm_dispatch, examine, explain, lower, stats, visualize

torch.manual_seed(0)
set_matplotlib_formats("svg")
plt.rcParams["svg.fonttype"], plt.rcParams["svg.hashsalt"] = "none", "notebook"

# %% [markdown]
# ## Before compiling: `examine`
#
# It captures and lowers, compiles nothing, changes nothing, and lists the unsupported parts, with your line.


# %%
class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        values = (self.linear(x).T @ x).to_sparse().to_dense()
        return self.drop(x) * values


x = torch.randn(6, 6)
print(examine(Sparse(), x))

# %% [markdown]
# ## Unsupported modules
#
# Code that a graph cannot hold is refused when the dispatch is added, not discovered in epoch three: a shape that
# numbers decide, Python state that `forward` changes. The module is then exactly as it was.
# (A branch on a number is compiled as the sample takes it, and checked at every call; a counter is counted on.)


# %%
class Selects(Sparse):
    def forward(self, x):
        x = self.drop(self.linear(x))
        return x[x.sum(-1) > 0]


class Remembers(Sparse):
    shape = None

    def forward(self, x):
        self.shape = [x.shape, self.shape]
        return self.drop(self.linear(x))


for kind in (Selects, Remembers):
    module = kind().train()
    before = dict(vars(module))
    try:
        add_tvm_dispatch(module, x.clone())
    except UnsupportedModule as unsupported:
        print(kind.__name__, *unsupported.ops, sep="\n  ", end="\n\n")
    assert dict(vars(module)) == before

# %% [markdown]
# The way out is usually in the message: dispatch the part that is fine, and leave the rest to PyTorch.


# %%
class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 6), nn.Dropout(0.1))

    def forward(self, x):
        y = self.body(x)
        return y[y.sum(-1) > y.sum(-1).median()]


model = Gated().train()
add_tvm_dispatch(model.body, x)
model(x).sum().backward()
print(stats(model.body))
assert stats(model.body).hits == 1

# %% [markdown]
# ## Misses
#
# A call runs compiled only if everything it was compiled for still holds. Otherwise it runs eager, correctly, and is
# counted under a reason that names the difference. So a training that is slower than expected starts with one line:
# `print(stats(module))`.

# %%
body = model.body
body(torch.randn(5, 6))  # another batch size
body(torch.randn(6, 6, dtype=torch.float64).float().T)  # other strides
body.eval()(x)
with torch.no_grad():
    body.train()(x)
body[0].bias.requires_grad_(False)
body(x)
body[0].bias.requires_grad_(True)
handle = body[1].register_forward_hook(lambda module, args, result: None)
body(x)
handle.remove()
body(x)
print(stats(body))
assert stats(body).hits == 2 and len(stats(body).misses) == 6

# %% [markdown]
# What to do about them: call `add_tvm_dispatch` again with the other sample or in the other mode, which adds an
# entry; let misses compile (`on_miss="compile"`: the second batch size is compiled for all of them); or make them loud.

# %%
flexible = add_tvm_dispatch(copy.deepcopy(body), x, on_miss="compile")
flexible(torch.randn(5, 6))
print(stats(flexible))

strict = add_tvm_dispatch(copy.deepcopy(body), x, on_miss="error")
try:
    strict(torch.randn(5, 6))
except DispatchMiss as miss:
    print("DispatchMiss:", miss)

# %% [markdown]
# ## A number looks odd: which stage?
#
# Plant a bug: tanh's gradient, a tenth of a per cent too large. TVM keeps one rule per operator; a registration at a
# higher level replaces it.

# %%
import itertools
from contextlib import contextmanager

import tvm
from tvm import relax

levels = itertools.count(100)


@contextmanager
def planted(op, change):
    """Replaces an operator's gradient rule by one whose first partial derivative goes through ``change``."""
    right = tvm.ir.Op.get(op).get_attr("FPrimalGradient")

    def wrong(var, call, grad, context):
        first, *others = right(var, call, grad, context)
        return [change(first, lambda value: relax.const(value, str(var.ty.dtype))), *others]

    relax.op.register_gradient(op, wrong, level=next(levels))
    try:
        yield
    finally:
        relax.op.register_gradient(op, right, level=next(levels))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(6, 8), nn.Linear(8, 3), nn.Dropout(0.2)

    def forward(self, x):
        return torch.tanh(self.second(self.drop(F.gelu(self.first(x)))))


net, sample = Net().train(), torch.randn(5, 6, requires_grad=True)
with planted("relax.tanh", lambda partial, const: partial * const(1.001)):
    wrong = lower(net, sample)
    found = wrong.check()
found

# %% [markdown]
# Every stage ran on the same inputs, and was held against eager and autograd. The forward stages agree; `joint` is
# the first that deviates, so it is the differentiation; and the culprit is named with the line of *your* code it
# comes from. In the picture the planted factor stands above the derivative of tanh.

# %%
print(found.first.name, "/", found.first.culprit.op, "/", found.first.culprit.origin.line)
assert found.first.name == "joint" and found.first.culprit.op == "tanh"
visualize(wrong, "joint")

# %% [markdown]
# A bug report without your model is a script that holds the stage, its inputs, and autograd's results. It exits with
# 1 as long as rebuilding the stage gives the wrong numbers. The process that runs it here has the right rule, so it
# passes: the bug is fixed.

# %%
with planted("relax.tanh", lambda partial, const: partial * const(1.001)), tempfile.TemporaryDirectory() as folder:
    script = lower(net, sample).save_repro(folder)
    print("files:", *sorted(path.name for path in Path(folder).iterdir()))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
print(done.stdout.replace(folder, "<folder>"), "exit code", done.returncode)
assert done.returncode == 0

# %% [markdown]
# ## Rounding or error?
#
# A relative error of $10^{-6}$ is hidden by rounding in float32, and float64 still shows it. The other way round, a
# rule that loses digits (by adding a large number and subtracting it again) is off by far more, and is *not* wrong: in
# float64 the difference disappears. `check` tells them apart in this way by itself.

# %%
with planted("relax.tanh", lambda partial, const: partial * const(1 + 1e-6)):
    small_error = lower(net, sample).check()
with planted("relax.tanh", lambda partial, const: (partial + const(1e5)) - const(1e5)):
    cancellation = lower(net, sample).check()

for name, check in (("an error of 1e-6", small_error), ("lost digits", cancellation)):
    (joint,) = [stage for stage in check.stages if stage.name == "joint"]
    print(f"{name:<17}", *(f"{kind}: {off:.0e}" for kind, off in joint.deviations.items()), "->", joint.verdict)
assert not small_error.ok and small_error.first.culprit.op == "tanh"
assert cancellation.ok
print("and without either:", lower(net, sample).check().headline())

# %% [markdown]
# A stage can also be run by itself, on your own numbers:

# %%
lowered = lower(net, sample)
inputs = lowered.inputs("forward")
(y,) = lowered["forward"].run(inputs)
(z,) = lowered["imported"].run(inputs)
print("imported and forward, on the same inputs:", (y - z).abs().max().item(), "apart")
assert torch.allclose(y, z)

# %% [markdown]
# ## Memory
#
# Too much is saved for the backward? `explain` lists the saved tensors with their reasons. A budget, a fraction of
# `"save_all"`'s bytes, makes the backward recompute more; if it cannot be reached, a note says so. Results do not
# change: the forward is the same under every strategy, bit for bit.

# %%
from benchmarks.saved_bytes import eager_saved_bytes
from partition import MinCut

block = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(0.1)).train()
x = torch.randn(32, 64, requires_grad=True)
strategies = {
    "save_all": "save_all",
    "min_cut": "min_cut",
    "budget 0.2": MinCut(budget=0.2),
    "budget 0.2, products too": MinCut(budget=0.2, allow_matmul_recompute=True),
    "recompute_all": "recompute_all",
}
saved, outputs = {"eager": eager_saved_bytes(block, (x,))}, []
for name, strategy in strategies.items():
    dispatched = add_tvm_dispatch(copy.deepcopy(block), x, partition=strategy)
    torch.manual_seed(0)
    outputs.append(dispatched(x).detach())
    entry = explain(dispatched).entries[0]
    saved[name] = entry.kept_bytes
    print(f"{name:<25} {entry.plan.bytes:>7,} bytes saved, {len(entry.plan.recomputed):>2} operations again")
    for note in entry.plan.notes:
        print(f"  note: {note.split('. ')[0]}")
figure, axes = plt.subplots(figsize=(6, 2.4), layout="constrained")
axes.barh(list(saved), [count / 1024 for count in saved.values()], color=["tab:gray"] + ["tab:blue"] * len(strategies))
axes.invert_yaxis()
axes.set(xlabel="KiB saved for the backward, masks included")
assert all(torch.equal(outputs[0], other) for other in outputs)
assert saved["min_cut"] < saved["save_all"] and saved["recompute_all"] < saved["budget 0.2, products too"]

# %% [markdown]
# A *policy* decides about single values: it is asked about each, and answers `"save"`, `"recompute"` or nothing.

# %%
policy = MinCut(policy=lambda node: "save" if node.op == "relax.nn.gelu" else None)
plan = lower(block, x, partition=policy).plan
for saved in plan.saved_tensors:
    print(f"{saved.bytes:>7,}  {saved.name} ({saved.op}): {saved.reason}")
assert any(saved.op == "relax.nn.gelu" for saved in plan.saved_tensors)
