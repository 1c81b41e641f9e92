"""A user's script for the type checker: never run. A line that must be an error says which."""

from collections import Counter

import torch
from torch import nn
from typing_extensions import assert_type

from bridge import (
    Coverage,
    DispatchStats,
    Lowered,
    Report,
    UnsupportedModule,
    __version__,
    add_tvm_dispatch,
    examine,
    explain,
    load_compiled,
    lower,
    remove_tvm_dispatch,
    save_compiled,
    stats,
    visualize,
)
from partition import MinCut

model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
x = torch.randn(2, 4)

assert_type(add_tvm_dispatch(model, x), nn.Sequential)
add_tvm_dispatch(model, (x,), sample_kwargs={"scale": 2.0}, partition=MinCut(budget=0.5), on_miss="compile")
add_tvm_dispatch(model, {"input": x}, partition="save_all", target={"kind": "llvm"})
add_tvm_dispatch(model, x, freeze=True)
assert_type(remove_tvm_dispatch(model), nn.Sequential)
save_compiled(model, "model.tvm", native=True)
assert_type(load_compiled("model.tvm"), nn.Module)
assert_type(stats(model), DispatchStats)
assert_type(stats(model).hits, int)
assert_type(stats(model).misses, Counter[str])
assert_type(examine(model, x), Coverage)
assert_type(explain(model, full=True), Report)
assert_type(lower(model, x, partition="recompute_all"), Lowered)
assert_type(UnsupportedModule.__name__, str)
assert_type(__version__, str)
visualize(lower(model, x), "split", kernels=True)

add_tvm_dispatch(x, x)  # error: type-var
add_tvm_dispatch()  # error: call-arg
add_tvm_dispatch(model, x, on_miss="sometimes")  # error: arg-type
add_tvm_dispatch(model, x, partition=0.5)  # error: arg-type
add_tvm_dispatch(model, x, sample_kwargs=[x])  # error: arg-type
examine("model", x)  # error: arg-type
lower("model", x)  # error: arg-type
explain(model, full="yes")  # error: arg-type
stats()  # error: call-arg
