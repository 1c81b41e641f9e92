"""Helpers of the tests of ``torch.compile(backend="tvm_dispatch")``."""

from collections import Counter

import torch

from bridge.dynamo.backend import graphs

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def made_since(known):
    return [graph for graph in graphs() if graph not in known]


def compare(function, *args, calls=1):
    """Compiled and plain function agree on values, gradients, arguments afterwards and generator; the graphs."""
    known = graphs()
    compiled = torch.compile(function, backend="tvm_dispatch")
    for call in range(calls):
        seen = [outcome(f, args, seed=call) for f in (compiled, function)]
        for actual, expected in zip(*seen, strict=True):
            torch.testing.assert_close(actual, expected, **CLOSE)
    return made_since(known)


def outcome(function, args, seed):
    leaves = [arg.clone().detach().requires_grad_(arg.requires_grad) for arg in args]
    torch.manual_seed(seed)
    result = function(*(leaf * 1 if leaf.requires_grad else leaf for leaf in leaves))
    if result.requires_grad:
        result.square().sum().backward()
    return result.detach(), *(leaf.grad if leaf.requires_grad else leaf for leaf in leaves), torch.get_rng_state()


def total(found):
    return sum(graph.stats.hits for graph in found), sum((graph.stats.misses for graph in found), Counter())


def x(*shape, grad=True):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)
