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
# # Training through TVM
#
# PyTorch records a graph while the forward runs and walks it backwards. Here both directions are compiled before the
# first step: the forward is traced, differentiated as a graph, cleaned, and cut in two. This notebook follows one
# BertLayer through every stage, with a picture of each, and ends in a training loop that does not know about any of
# it.

# %%
import copy
import statistics
import time
import warnings

import matplotlib.pyplot as plt
import torch
from matplotlib_inline.backend_inline import set_matplotlib_formats
from transformers import BertConfig, BertForMaskedLM
from transformers.models.bert.modeling_bert import BertLayer

from bridge import add_tvm_dispatch, lower, stats, visualize

set_matplotlib_formats("svg")
plt.rcParams["svg.fonttype"], plt.rcParams["svg.hashsalt"] = "none", "notebook"
warnings.filterwarnings("ignore", category=FutureWarning)

torch.manual_seed(0)
config = BertConfig(hidden_size=64, num_attention_heads=4, intermediate_size=256, attn_implementation="eager")
layer = BertLayer(config).train()
x = torch.randn(2, 16, 64, requires_grad=True)

# %% [markdown]
# ## The stages
#
# `lower` does everything but compile, changes nothing, and keeps the input and output of every pass.

# %%
lowered = lower(layer, x, partition="save_all")
lowered

# %% [markdown]
# `captured` is the ATen graph of the recorded run; `imported` is the same in Relax, TVM's graph language.
# Operators are boxes, small constants and parameters stand in the boxes that read them, reshapes and permutations are
# part of the arrows. The three masks are inputs: torch draws them before the forward, in eager's order, from eager's
# generator.

# %%
visualize(lowered["forward"])

# %% [markdown]
# TVM cannot differentiate LayerNorm, so it is spelled out: mean, variance, normalize, scale. GELU stays whole: it has
# a gradient rule of its own.

# %%
print(lowered.diff("masked", "spelled").text(lines=18))

# %% [markdown]
# ## The joint graph
#
# TVM's `Gradient` differentiates a *scalar*. A layer returns a tensor $y$, and autograd asks for the vector-Jacobian
# product with the incoming gradient $\bar y$. Both meet in $\operatorname{root} = \sum_i y_i \bar y_i$: its gradient
# with respect to any input *is* that product. So the function is *seeded* with a parameter `grad_out_0` and a first
# result. On a small function:

# %%
import autodiff
from autodiff.ir import IRModule, bindings, results
from bridge.lowering.text import function_lines

small = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh())
tiny = lower(small, torch.randn(2, 3))["forward"].function
seeded = autodiff.seed_vjp(tiny, outputs=[0])
print(*function_lines(seeded), sep="\n")

# %% [markdown]
# TVM's own pass, applied directly. It is correct, and it computes more than necessary: ones that are the seed of the
# chain rule, sums that collapse nothing, products with one.

# %%
from tvm import relax

scalar = relax.Function(
    seeded.params, relax.SeqExpr(seeded.body.blocks, results(seeded)[0]), relax.TensorType((), "float32")
)
module = relax.transform.Normalize()(IRModule({"main": scalar}))
adjoint = relax.transform.Gradient("main")(module)["main_adjoint"]
print(*function_lines(adjoint), sep="\n")

# %% [markdown]
# **Zapping** removes that. `zapp_like` turns `ones_like`, `broadcast_to`, `collapse_sum_to` of known shapes into
# plain operations or nothing, `one_zapp` drops products with one, `zero_zapp` sums with zero. There is no rule for $x
# \cdot 0$: it is not zero for infinities and NaN. `differentiate` is `seed_vjp`, reverse
# accumulation by rules of its own (TVM's where there is none), and forgetting the scalar; here is its result on the
# same function, before and after `clean`, which runs all the small passes to a fixed point.

# %%
joint = autodiff.differentiate(tiny, outputs=[0], require_grads=[0, 1])
cleaned = autodiff.clean(joint)
visualize(joint, legend=False)

# %%
visualize(cleaned, legend=False)

# %% [markdown]
# The same on the BertLayer, one pass at a time. Passes that are not printed found nothing to do.

# %%
from autodiff.clean import PASSES


def size(function):
    return sum(1 for _ in bindings(function))


function, turn = lowered["joint"].function, 0
while True:
    before, turn = function, turn + 1
    for apply in PASSES:
        old, function = function, apply(function)
        if function is not old:
            print(f"turn {turn}: {apply.__name__:<34} {size(old):>4} -> {size(function)} bindings")
    if function is before:
        break
assert size(function) == lowered["cleaned"].size

# %% [markdown]
# ## Two colours
#
# In the joint graph the forward runs down and the backward up. A forward value is **red**; the moment a backward
# operation reads it, it turns **blue**: it has to survive until then. That is the two-colouring of the literature,
# the strategy `"save_all"`. Parameters and inputs are free, they are alive anyway.

# %%
from collections import Counter

from partition import build_graph, coloring

graph = build_graph(lowered["cleaned"].function, lowered.num_primals, lowered.num_results)
print(Counter(coloring(graph).values()))

# %% [markdown]
# Drawn for the second half of the layer, where it fits a screen:

# %%
half = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64), torch.nn.Dropout(0.1))
visualize(lower(half, x, partition="save_all"), "cleaned")

# %% [markdown]
# ## The split, and the saved tensors
#
# Cut along the colour: the forward returns its output *and* the blue values, the saved tensors ("residuals" in the
# literature); the backward takes them and the `grad_out`.

# %%
for name, part in (("forward", lowered.forward), ("backward", lowered.backward)):
    print(f"{name}: {len(part.params)} parameters, {size(part)} operations, {len(results(part))} results")
saved_tensors = lowered.plan.saved_tensors
print(f"{len(saved_tensors)} saved tensors, {lowered.plan.bytes:,} bytes; the largest:")
for saved in sorted(saved_tensors, key=lambda saved: -saved.bytes)[:4]:
    print(f"  {saved.name:<24} {saved.dtype} {saved.shape}: {saved.reason}")
assert len(results(lowered.forward)) == lowered.num_results + len(saved_tensors)

# %% [markdown]
# ## The autograd Function by hand
#
# PyTorch's autograd only requires two functions and a contract. `compile_function` makes a program of each: a flat
# list of fused kernels and library calls over torch's memory.

# %%
from bridge.compile import compile_function

run_forward = compile_function(lowered.forward, name="layer_forward")
run_backward = compile_function(lowered.backward, name="layer_backward")
owned = dict(layer.named_parameters())
tensors = [owned[spec.name] for spec in lowered.captured.module_tensors]
masks = lowered.forward.params[len(tensors) + 1 :]
print([f"{mask.name}: {mask.ty.dtype} {[int(extent) for extent in mask.ty.shape]}" for mask in masks])


class Layer(torch.autograd.Function):
    """Primals are the layer's parameters, its input and the masks; ``lower`` was told which of them get gradients."""

    @staticmethod
    def forward(ctx, *primals):
        values = run_forward(list(primals))
        saved = [primals[index] for index in lowered.plan.saved_primals]
        saved += [values[index] for index in lowered.plan.saved_outputs]
        ctx.save_for_backward(*saved, *values[lowered.num_results :])
        ctx.count = len(primals)
        return values[0]

    @staticmethod
    def backward(ctx, grad_out):
        computed = run_backward([*ctx.saved_tensors, grad_out.contiguous()])
        gradients = [None] * ctx.count
        for index, gradient in zip(lowered.wanted, computed, strict=True):
            gradients[index] = gradient
        return tuple(gradients)


def by_hand(x):
    drawn = [torch.empty([int(extent) for extent in mask.ty.shape], dtype=torch.bool).bernoulli_(0.9) for mask in masks]
    return Layer.apply(*tensors, x, *drawn)


# %% [markdown]
# The same seed, once through PyTorch and once through the two programs: output, gradients, and the generator's state.


# %%
grad_out = torch.randn(2, 16, 64)


def gradients(call):
    torch.manual_seed(1)
    y = call(x)
    return y.detach(), torch.autograd.grad(y, [x, *layer.parameters()], grad_out), torch.get_rng_state()


(y, eager, state), (mine, compiled, my_state) = gradients(layer), gradients(by_hand)
off = max((a - b).abs().max().item() for a, b in zip(eager, compiled, strict=True))
largest = max(gradient.abs().max().item() for gradient in eager)
print(f"output: off by {(y - mine).abs().max():.1e}")
print(f"{len(eager)} gradients: off by {off:.1e} at most, where the largest element is {largest:.1f}")
print("generator in the same state:", torch.equal(state, my_state))
assert torch.allclose(y, mine, atol=1e-5) and off < 1e-5 * largest and torch.equal(state, my_state)

# %% [markdown]
# This is the program of the forward. Amber boxes are generated kernels with the operators that they fuse (the matrix
# products too, where that is faster than a call), green ones are calls of torch's own kernels.

# %%
visualize(run_forward)

# %% [markdown]
# ## `add_tvm_dispatch`
#
# The part that must never be wrong is still missing: guards that decide whether a call is the compiled one, buffers
# that change, outputs without gradient, missing `grad_out`s. One line does all of it, in place; the loop stays as it
# was.

# %%
tokens = torch.randint(0, 200, (4, 8, 24), generator=torch.Generator().manual_seed(2))
batches = [{"input_ids": ids, "labels": ids} for ids in tokens]
torch.manual_seed(3)
model = BertForMaskedLM(
    BertConfig(
        vocab_size=200,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=32,
    )
).train()


def train(model, steps=60):
    torch.manual_seed(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        loss = model(**batches[step % len(batches)]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


twin = add_tvm_dispatch(copy.deepcopy(model), batches[0])
plain = copy.deepcopy(model)
eager_losses, tvm_losses = train(plain), train(twin)
print(stats(twin))
assert stats(twin).hits == len(tvm_losses) and not stats(twin).misses

# %% [markdown]
# Dropout is on, and still the curves lie on each other: the masks are the same bits.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot(eager_losses, label="eager", linewidth=4, alpha=0.35)
left.plot(tvm_losses, label="dispatched", linewidth=1)
left.set(xlabel="step", ylabel="loss")
left.legend()
apart = [abs(a - b) for a, b in zip(eager_losses, tvm_losses, strict=True)]
right.plot(apart, color="tab:red", linewidth=1)
right.set(xlabel="step", ylabel="difference of the losses")
print(f"loss {tvm_losses[0]:.3f} -> {tvm_losses[-1]:.3f}; largest difference {max(apart):.1e}")
assert tvm_losses[-1] < tvm_losses[0] and max(apart) < 1e-2

# %% [markdown]
# ## Time and memory
#
# Steps take turns (eager, dispatched, eager, ...), the table shows medians. The layer is small, so that this runs
# anywhere; `benchmarks/` measures real sizes. Bytes saved for the backward are counted alike for all: storages that
# live only for it.


# %%
def step_seconds(model, batch):
    started = time.perf_counter()
    model(**batch).loss.backward()
    seconds = time.perf_counter() - started
    model.zero_grad()
    return seconds


spent = {"eager": [], "dispatched": []}
for turn in range(24):
    for name, candidate in (("eager", plain), ("dispatched", twin)):
        seconds = step_seconds(candidate, batches[turn % 4])
        if turn >= 4:
            spent[name].append(seconds)
median = {name: statistics.median(seconds) for name, seconds in spent.items()}
print(f"forward + backward, dispatched / eager: {median['dispatched'] / median['eager']:.2f}")
print(f"compiled once, in {stats(twin).entries[0].compile_seconds:.1f} s")

# %%
from benchmarks.saved_bytes import saved_bytes

smaller = lower(layer, x)
print(saved_bytes(smaller, layer, (x,)))

# %% [markdown]
# ## The effect of the minimum cut
#
# `save_all` saves every value that the backward reads. But GELU's input gives GELU's output back in one cheap kernel,
# and a mask of bytes the same mask in floats. `"min_cut"`, the default, weighs every value by its bytes and cuts where
# the sum is least; matrix products and reductions are never computed twice. The rest is recomputed in the backward.

# %%
print(f"save_all {lowered.plan.bytes:,} bytes in {len(lowered.plan.saved_tensors)} saved tensors")
print(f"min_cut  {smaller.plan.bytes:,} bytes in {len(smaller.plan.saved_tensors)} saved tensors,", end=" ")
print(f"{len(smaller.plan.recomputed)} operations recomputed")
still = {saved.name for saved in smaller.plan.saved_tensors}
gone = [f"{saved.name} ({saved.op})" for saved in saved_tensors if saved.name not in still]
print("no longer saved:", *gone, sep="\n  ")
assert smaller.plan.bytes < lowered.plan.bytes

# %% [markdown]
# The same half of the layer: red runs forward, blue is saved, amber is recomputed in the backward.

# %%
visualize(lower(half, x), "split")

# %% [markdown]
# Every saved value has a reason:

# %%
for saved in smaller.plan.saved_tensors:
    print(f"{saved.bytes:>7,}  {saved.module_path or '(root)'}: {saved.reason}")

# %% [markdown]
# A budget goes further: fewer bytes, more work. (`partition=MinCut(budget=0.3)` for a fraction of `save_all`'s bytes.)

# %%
from partition import curve
from partition.cost import flops

points = curve(smaller["cleaned"].function, num_primals=smaller.num_primals, num_outputs=smaller.num_results)
work = sum(flops(graph, node) for node in graph.forward)
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
ordered = sorted(points, key=lambda point: (point.flops, -point.bytes))
axes.step([100 * p.flops / work for p in ordered], [p.bytes / 1024 for p in ordered], "o-", where="post", markersize=4)
for point in points:
    if point.budget is None:
        at = (100 * point.flops / work, point.bytes / 1024)
        axes.annotate(point.strategy, at, xytext=(6, 4), textcoords="offset points")
axes.set(
    xlabel="work done again, % of the forward's flops",
    ylabel="saved tensors, KiB",
    ylim=(0, 1.15 * points[0].bytes / 1024),
    xlim=(-3, 130),
)
for point in points:
    print(f"{point.strategy:<19} {point.bytes:>8,} bytes, {100 * point.flops / work:5.1f}% of the forward again")
