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
# # Your own recurrent cell
#
# `nn.LSTM` is fast because it is one hand-written operator. Change a line of the cell, and that operator is gone: your
# loop calls a dozen small operators per time step. This notebook writes an LSTM with layer normalization in plain
# PyTorch (Ba, Kiros and Hinton, 2016) and follows its loop through the compiler.

# %%
import copy
import statistics
import time
from collections import Counter

import matplotlib.pyplot as plt
import torch
from matplotlib_inline.backend_inline import set_matplotlib_formats
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bridge import add_tvm_dispatch, lower, stats, visualize

set_matplotlib_formats("svg")
plt.rcParams["svg.fonttype"], plt.rcParams["svg.hashsalt"] = "none", "notebook"


class LayerNormLSTM(nn.Module):
    """States of shape [batch, steps, width] for inputs of that shape."""

    def __init__(self, width):
        super().__init__()
        self.from_input = nn.Linear(width, 4 * width, bias=False)
        self.from_state = nn.Linear(width, 4 * width, bias=False)
        self.norm_input, self.norm_state = nn.LayerNorm(4 * width), nn.LayerNorm(4 * width)
        self.norm_cell = nn.LayerNorm(width)

    def forward(self, x):
        state = cell = x.new_zeros(x.shape[0], x.shape[2])
        states = []
        for step in range(x.shape[1]):
            gates = self.norm_input(self.from_input(x[:, step])) + self.norm_state(self.from_state(state))
            enter, forget, new, leave = gates.chunk(4, dim=-1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
            state = torch.sigmoid(leave) * torch.tanh(self.norm_cell(cell))
            states.append(state)
        return torch.stack(states, dim=1)


torch.manual_seed(0)
BATCH, STEPS, WIDTH = 8, 8, 64
module = LayerNormLSTM(WIDTH).train()
x = torch.randn(BATCH, STEPS, WIDTH, requires_grad=True)

# %% [markdown]
# ## Unrolling
#
# The number of time steps is a shape, and shapes are static. The graph of three steps has no loop: it is the loop's
# body, once per time step, one straight line of code.


# %%
def calls_in(lowered):
    return Counter(str(node.target) for node in lowered["captured"].ir.nodes if "aten" in str(node.target))


lowered = lower(module, x[:, :3])
print(lowered)
print(dict(calls_in(lowered).most_common(5)))
assert calls_in(lowered)["aten.tanh.default"] == 2 * 3

# %% [markdown]
# A call runs in eager first. Four steps or more that are proven to be equal there are captured once, and their body is
# differentiated and compiled once, so that a thousand of them take hardly longer than ten.

# %%
lowered = lower(module, x)
print(dict(calls_in(lowered).most_common(5)))
assert calls_in(lowered)["aten.tanh.default"] == 2

# %% [markdown]
# ## Fusion
#
# Three time steps are enough to see the pattern. Matrix products stay products. Between two of them are two kernels:
# both LayerNorms of the gates with their sum, over rows of four times the width, and then, over rows of the width, the
# sigmoids and tanhs, the new cell, its LayerNorm and the new state.

# %%
from bridge.base.session import SESSION
from bridge.compile import CallLibrary, Launch, RunLoop, compile_function

with torch.no_grad():  # nothing is saved for a backward: fewer arrows
    program = compile_function(lower(module, x[:, :3]).forward, name="three_steps")
visualize(program)

# %% [markdown]
# Inside the second of them:

# %%
kernels = [step for step in program.steps if isinstance(step, Launch)]
cell = next(step for step in kernels if any(operation.op == "sigmoid" for operation in step.contents.operations))
print(f"{len(cell.contents.operations)} operations, {cell.contents.bytes / 1024:.1f} KiB read and written")
visualize(program, kernel=cell.name)

# %% [markdown]
# ## How many calls
#
# For a small cell the number of calls through Python and the dispatcher counts. Eager's calls are counted as they
# happen, forward and backward; the program's are its steps.


# %%
class Counting(TorchDispatchMode):
    """Counts operators that reach a kernel; views cost nothing and are left out."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += not func.is_view
        return func(*args, **(kwargs or {}))


def eager_calls(module, x):
    x = x.detach().requires_grad_()
    with Counting() as counting:
        module(x).sum().backward()
    module.zero_grad()
    return counting.calls


def program_steps(module, x):
    lowered = lower(module, x.detach().requires_grad_())
    programs = [compile_function(part, name="cell") for part in (lowered.forward, lowered.backward)]
    return sum(calls_of(step) for program in programs for step in program.steps)


def calls_of(step):
    """Kernels and library calls of a step; a loop counts its body as often as it is run."""
    if isinstance(step, RunLoop):
        return step.length * sum(map(calls_of, step.steps))
    return int(isinstance(step, Launch | CallLibrary))


lengths = (2, 4, 8)
eager = [eager_calls(module, x[:, :length]) for length in lengths]
steps = [program_steps(module, x[:, :length]) for length in lengths]
figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
axes.plot(lengths, eager, "o-", label="eager: operators")
axes.plot(lengths, steps, "o-", label="compiled: kernels and library calls")
axes.set(xlabel="time steps", ylabel="calls, forward + backward", ylim=(0, None))
axes.legend()
for length, before, after in zip(lengths, eager, steps, strict=True):
    print(f"{length:>2} time steps: {before:>4} operators in eager, {after:>3} compiled ({after / before:.2f})")
assert steps[-1] < eager[-1] / 2

# %% [markdown]
# ## One product for all time steps
#
# Both weights are used in every time step, so by the chain rule each gradient is a sum of one small product per step.
# A sum of products is one product of joined matrices, $\sum_t A_t^\top B_t = [A_1; \dots; A_T]^\top [B_1; \dots;
# B_T]$, and that is far better use of a matrix multiplier. Three unrolled steps show it; a loop does the same with the
# saved results of its steps.

# %%
from autodiff.ir import bindings, op_name


def products(function):
    return sum(op_name(value) == "relax.matmul" for _, value in bindings(function))


short = lower(module, x[:, :3])
joint, forward, after = (products(short[name].function) for name in ("cleaned", "split forward", "split backward"))
print(f"products in the joint graph: {forward} forward + {joint - forward} backward; after joining {after} backward")
assert after < joint - forward

# %% [markdown]
# ## The same numbers
#
# A toy task: predict at every time step the running mean of the inputs so far. Eager and dispatched from the same seed.

# %%
torch.manual_seed(1)
inputs = torch.randn(6, BATCH, STEPS, WIDTH)
targets = inputs.cumsum(dim=2) / torch.arange(1, STEPS + 1)[:, None]


def train(module, epochs=12):
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for x, y in list(zip(inputs, targets, strict=True)) * epochs:
        loss = nn.functional.mse_loss(module(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


plain, twin = copy.deepcopy(module), copy.deepcopy(module)
add_tvm_dispatch(twin, inputs[0])
eager_losses, tvm_losses = train(plain), train(twin)
print(stats(twin))
apart = max(abs(a - b) for a, b in zip(eager_losses, tvm_losses, strict=True))
print(f"loss {tvm_losses[0]:.3f} -> {tvm_losses[-1]:.3f}, at most {apart:.1e} apart")
figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
axes.plot(eager_losses, label="eager", linewidth=4, alpha=0.35)
axes.plot(tvm_losses, label="dispatched", linewidth=1)
axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
axes.legend()
assert stats(twin).hits == len(tvm_losses) and apart < 1e-3 and tvm_losses[-1] < tvm_losses[0] / 2

# %% [markdown]
# In float32 a recurrence amplifies rounding, so `1e-6` proves little. `check` runs every stage against autograd, in
# float32 and in float64:

# %%
lower(module, x[:, :4].detach().requires_grad_()).check()

# %% [markdown]
# ## Beside `nn.LSTM`
#
# Forward and backward, taking turns. `nn.LSTM` has no layer normalization: it shows the cost of a hand-optimized cell.
# `python -m benchmarks recurrent` also measures `torch.compile`, which unrolls the same loop.


# %%
def step(module, x):
    started = time.perf_counter()
    y = module(x)
    (y[0] if isinstance(y, tuple) else y).sum().backward()
    seconds = time.perf_counter() - started
    module.zero_grad()
    return seconds


x = inputs[0]
candidates = {"nn.LSTM, eager": nn.LSTM(WIDTH, WIDTH, batch_first=True), "LayerNorm-LSTM, eager": plain}
SESSION.reset("programs")  # the kernels of this cell were compiled above; a first step has to compile them
started = time.perf_counter()
candidates["LayerNorm-LSTM, dispatched"] = add_tvm_dispatch(copy.deepcopy(plain), x)
step(candidates["LayerNorm-LSTM, dispatched"], x)
print(f"dispatched: first step after {time.perf_counter() - started:.1f} s")

seconds = {name: [] for name in candidates}
for turn in range(30):
    for name, candidate in candidates.items():
        spent = step(candidate, x)
        if turn >= 5:
            seconds[name].append(spent)
took = {name: statistics.median(spent) for name, spent in seconds.items()}
for name, median in took.items():
    print(f"{name:<30} {median / took['LayerNorm-LSTM, eager']:.2f} of the same loop in eager")
