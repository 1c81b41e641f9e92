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
# # BERT on TVM
#
# A whole BERT for inference, compiled through TVM; then one of its layers under the microscope: the effects of the
# classic graph passes, which of them this bridge uses, and which it leaves out on purpose.

# %%
import copy
import statistics
import time

import matplotlib.pyplot as plt
import torch
from matplotlib_inline.backend_inline import set_matplotlib_formats
from torch.nn import functional as F
from transformers import BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertLayer

from bridge import add_tvm_dispatch, explain, lower, stats, visualize

set_matplotlib_formats("svg")
plt.rcParams["svg.fonttype"], plt.rcParams["svg.hashsalt"] = "none", "notebook"

torch.manual_seed(0)
config = BertConfig(vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)
model = BertModel(config).eval()
batch = {"input_ids": torch.randint(0, 1000, (2, 32)), "attention_mask": torch.ones(2, 32, dtype=torch.long)}
batch["attention_mask"][1, 20:] = 0  # the second sentence is shorter

# %% [markdown]
# ## Parity
#
# `add_tvm_dispatch` compiles the call in the mode it finds: evaluation mode, no gradients. The result is the class
# that the model returns anyway, and a call that was not compiled still works: it runs eager, and is counted.

# %%
with torch.no_grad():
    wanted = model(**batch)
    add_tvm_dispatch(model, batch)
    found = model(**batch)
    model(batch["input_ids"][:, :7])

print(type(found).__name__)
for name in ("last_hidden_state", "pooler_output"):
    off = (found[name] - wanted[name]).abs().max()
    print(f"{name}: off by {off:.1e} where values reach {wanted[name].abs().max():.1f}")
    assert off < 1e-5
print(stats(model))
assert stats(model).hits == 1 and sum(stats(model).misses.values()) == 1

# %% [markdown]
# Is `1e-6` rounding, or a small mistake? Float32 cannot tell. Run the same in float64: rounding shrinks by nine orders
# of magnitude, a mistake stays.

# %%
double = BertModel(config).eval().double()
double.load_state_dict(model.state_dict())
with torch.no_grad():
    wanted = double(**batch).last_hidden_state
    found = add_tvm_dispatch(double, batch)(**batch).last_hidden_state
print(f"in float64: off by {(found - wanted).abs().max():.1e}")
assert (found - wanted).abs().max() < 1e-12

# %% [markdown]
# ## Exact GELU, by the same trick
#
# BERT's GELU is $x\,\Phi(x)$ with the error function. The usual shortcut, a tanh formula, looks the same in a plot.
# TVM knows both; which one is compiled shows in float64.

# %%
grid = torch.linspace(-6, 6, 4001, dtype=torch.float64)
exact = F.gelu(grid)
with torch.no_grad():
    gelu = add_tvm_dispatch(torch.nn.GELU(), grid)
    ours = gelu(grid)
shortcut = F.gelu(grid, approximate="tanh")
narrow = F.gelu(grid.float()).double()
errors = {"tanh formula": shortcut - exact, "PyTorch in float32": narrow - exact, "compiled, float64": ours - exact}

figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
for name, error in errors.items():
    print(f"{name:<20} off by at most {error.abs().max():.1e}")
    axes.semilogy(grid[::80], error.abs().clamp(min=1e-18)[::80], ".", markersize=3, label=name)
axes.set(xlabel="x", ylabel="|error of GELU|")  # no error at all is drawn at 1e-18
axes.legend(loc="center left", fontsize=8)
assert stats(gelu).hits == 1 and errors["compiled, float64"].abs().max() < 1e-14

# %% [markdown]
# ## One layer under the microscope
#
# `lower` keeps every stage and compiles nothing. Without gradients the story is short.

# %%
layer = BertLayer(BertConfig(**config.to_diff_dict() | {"attn_implementation": "eager"})).eval()
x = torch.randn(2, 32, 128)
with torch.no_grad():
    lowered = lower(layer, x)
lowered

# %%
visualize(lowered)

# %% [markdown]
# **Common subexpressions.** A graph that was traced from Python computes some things twice. Query, key and value each
# flatten the same input:

# %%
import autodiff
from autodiff.ir import IRModule, bindings, op_name
from bridge.lowering.text import function_lines

imported = lowered["imported"].function
once = autodiff.common_subexpression_elimination(imported)
gone = set(function_lines(imported)) - set(function_lines(once))
print(f"{lowered['imported'].size} -> {sum(1 for _ in bindings(once))} bindings")
print(*sorted(line for line in gone if "reshape(hidden_states" in line), sep="\n")

# %% [markdown]
# **Bound parameters and folded constants.** For inference TVM can make the parameters constants of the function
# (`BindParams`) and fold expressions of constants (`FoldConstant`): here, the transposed weights.

# %%
import tvm
from tvm import relax

function = lowered["forward"].function
owned = dict(layer.named_parameters())
names = [param.name for param in function.params[: len(lowered.captured.module_tensors)]]
values = {
    name: tvm.runtime.tensor(owned[spec.name].detach().numpy())
    for name, spec in zip(names, lowered.captured.module_tensors, strict=True)
}
bound = relax.transform.BindParams("main", values)(IRModule({"main": function}))
folded = autodiff.clean(relax.transform.FoldConstant()(bound)["main"])


def count(function, op):
    return sum(op_name(value) == op for _, value in bindings(function))


print(f"parameters: {len(function.params)} -> {len(folded.params)}")
print(f"permute_dims: {count(function, 'relax.permute_dims')} -> {count(folded, 'relax.permute_dims')}")
assert len(folded.params) == 1 and count(folded, "relax.permute_dims") < count(function, "relax.permute_dims")

# %% [markdown]
# Unless it is asked to, this bridge does neither. A folded function computes with the weights of the day it was
# compiled; the dispatched layer reads the module's parameters at every call, and a transposed weight costs nothing
# there: it is a stride.

# %%
from bridge.compile import compile_function

frozen = compile_function(folded, name="frozen")
dispatched = copy.deepcopy(layer)
with torch.no_grad():
    add_tvm_dispatch(dispatched, x)
    before = layer(x)
    for module in (layer, dispatched):
        module.output.dense.weight.mul_(1.5)  # as an optimizer, or load_state_dict, does
    eager = layer(x)
    print(f"eager, before and after the change:  {(eager - before).abs().max():.1e} apart")
    print(f"dispatched: off by {(dispatched(x) - eager).abs().max():.1e}")
    stale = frozen([x])[0]
    print(
        f"folded:     off by {(stale - eager).abs().max():.1e}; it still agrees with the weights of before, to", end=" "
    )
    print(f"{(stale - before).abs().max():.1e}")
    assert (dispatched(x) - eager).abs().max() < 1e-5 < (stale - eager).abs().max()

# %% [markdown]
# **Merged parallel products.** Query, key and value are three products with the same left side; TVM's
# `CombineParallelMatmul` makes one of them:

# %%
merged = relax.transform.CombineParallelMatmul()(IRModule({"main": function}))["main"]
print(f"matmul: {count(function, 'relax.matmul')} -> {count(merged, 'relax.matmul')}")
print(*[line for line in function_lines(merged) if line.startswith("lv")], sep="\n")

# %% [markdown]
# The price is the `concat`: the weights are joined at every call, unless they were constants. Is it worth it? Both
# functions, compiled alike, take turns; and so do the products alone, with the weights joined beforehand.


# %%
def medians(candidates, turns=40):
    """Median seconds of functions that take turns, so that all see the same machine."""
    seconds = {name: [] for name in candidates}
    for turn in range(turns):
        for name, run in candidates.items():
            started = time.perf_counter()
            run()
            if turn >= 5:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(spent) for name, spent in seconds.items()}


inputs = lowered.inputs("forward")
apart, joined = compile_function(function, name="apart"), compile_function(merged, name="joined")
a, weights = torch.randn(64, 128), [torch.randn(128, 128) for _ in range(3)]
whole = torch.cat(weights, dim=0)
with torch.no_grad():
    assert torch.allclose(apart(inputs)[0], joined(inputs)[0], atol=1e-5)
    took = medians({"apart": lambda: apart(inputs), "joined": lambda: joined(inputs)})
    print(f"layer, products joined / apart: {took['joined'] / took['apart']:.2f}")
    took = medians({"three": lambda: [a @ w.T for w in weights], "one": lambda: a @ whole.T})
    print(f"products alone, one / three, weights joined beforehand: {took['one'] / took['three']:.2f}")

# %% [markdown]
# ## Frozen, stage by stage
#
# `freeze=True` asks for it: the parameters become constants of calls without gradients. The forward is split in two.
# Expressions of the parameters alone are computed once, here the joined weights; a call computes the rest. A guard
# compares the parameters with the frozen ones, by torch's count of changes.

# %%
frozen_layer = copy.deepcopy(layer)
add_tvm_dispatch(frozen_layer, x, freeze=True, on_miss="compile")
(entry,) = stats(frozen_layer).entries
stages = entry.programs.frozen
print(stages)
print(*function_lines(stages.constants), sep="\n")
print(f"matmul: {count(function, 'relax.matmul')} -> {count(stages.call, 'relax.matmul')}")
print(f"steps of a call: {len(apart.steps)} -> {len(entry.forward.steps)}")

# %% [markdown]
# A parameter that changes makes the next call a miss, with its reason; under `on_miss="compile"` the constants are
# computed again, and nothing is compiled.

# %%
with torch.inference_mode():
    print(f"frozen: off by {(frozen_layer(x) - layer(x)).abs().max():.1e}")
with torch.no_grad():
    for module in (layer, frozen_layer):
        module.attention.self.query.weight.mul_(0.5)
    started = time.perf_counter()
    found = frozen_layer(x)
    print(f"after a change: off by {(found - layer(x)).abs().max():.1e}", end=", ")
    print(f"the first call took {1e3 * (time.perf_counter() - started):.1f} ms")
assert torch.allclose(found, layer(x), atol=1e-5) and stats(frozen_layer).hits == 2

# %% [markdown]
# A BatchNorm in evaluation mode is a scale and a shift of each channel: the scale goes into the convolution's weights.

# %%
block = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).eval()
image = torch.randn(1, 3, 16, 16)
add_tvm_dispatch(block, image, freeze=True)
(entry,) = stats(block).entries
print(*function_lines(entry.programs.frozen.call), sep="\n")

# %% [markdown]
# ## The compiled program
#
# The compiled layer is a flat list of steps. Amber: generated kernels, with the operators that they fuse. Green: calls
# of torch's own kernels, where they are faster.

# %%
visualize(apart)

# %% [markdown]
# Inside the kernel that holds the GELU: bias, error function and scaling in one pass over memory.

# %%
from bridge.compile import Launch

kernels = [step for step in apart.steps if isinstance(step, Launch)]
holds = next(step.name for step in kernels if any(operation.op == "erf" for operation in step.contents.operations))
visualize(apart, kernel=holds)

# %%
explain(model)

# %% [markdown]
# ## Beside eager and `torch.compile`
#
# One layer, inference, no gradients. Small sizes like this one measure overhead as much as arithmetic; `benchmarks/`
# has the large ones. Read the ratios: the machine is shared.

# %%
from bridge.base.session import SESSION

SESSION.reset("lowerings")  # this layer was lowered and compiled above; a first call has to do that
SESSION.reset("programs")
started = time.perf_counter()
with torch.no_grad():
    modes = {"eager": layer, "dispatched": add_tvm_dispatch(copy.deepcopy(layer), x)}
    modes["frozen"] = add_tvm_dispatch(copy.deepcopy(layer), x, freeze=True)
    modes["dispatched"](x)
print(f"dispatched: first call {time.perf_counter() - started:.1f} s", end="; ")
started = time.perf_counter()
try:
    inductor = torch.compile(copy.deepcopy(layer))
    with torch.no_grad():
        inductor(x)
    modes["torch.compile"] = inductor
    print(f"torch.compile: first call {time.perf_counter() - started:.1f} s")
except torch._dynamo.exc.TorchDynamoException as error:  # no C++ compiler here
    print(f"torch.compile does not run on this machine: {type(error).__name__}")
with torch.no_grad():
    took = medians({name: lambda module=module: module(x) for name, module in modes.items()}, turns=80)
for name, seconds in took.items():
    print(f"{name:<14} {seconds / took['eager']:.2f} of eager")
