"""Random joint functions: the cut is minimal, the halves are right, and the same input always gives the same plan."""

from __future__ import annotations

import itertools
import random

import networkx
import numpy as np
import pytest

from partition import STRATEGIES, MinCut, budget, build_graph, fewest_bytes, partition, rebuild_backward
from partition.budget import minimum_cut
from partition.cost import product, save_cost
from partition.min_cut import Costs, candidate_costs
from tests.partition.evaluate import evaluate, random_args, run_backward, run_both_halves
from tests.partition.random_joints import KINDS, random_joint
from tests.sampling import sampled

SMALL = tuple(kind for kind in KINDS if kind != "gelu")  # whose derivative alone has eight nodes


def cost_of(graph, costs, free, saved) -> int | None:
    """The stated cost of saving exactly ``saved``, ``None`` if a must-save value would be recomputed."""
    total = sum(costs.save[name] for name in saved)
    seen, stack = set(), [name for name in graph.required]
    while stack:
        name = stack.pop()
        if name in seen or name in free or name in saved or graph.nodes[name].value is None:
            continue
        seen.add(name)
        if costs.recompute[name] is None:
            return None
        total += costs.recompute[name]
        stack.extend(graph.nodes[name].inputs)
    return total


def cheapest(graph, costs, free) -> int | None:
    """The cost of the best of all subsets."""
    choices = [name for name in graph.candidates if name not in free and costs.save[name] is not None]
    assert len(choices) <= 12
    subsets = itertools.chain.from_iterable(itertools.combinations(choices, k) for k in range(len(choices) + 1))
    totals = [cost_of(graph, costs, free, set(saved)) for saved in subsets]
    return min((cost for cost in totals if cost is not None), default=None)


@pytest.mark.parametrize("seed", sampled(range(50), range(12)))
def test_cut_is_minimal_for_the_stated_costs(seed):
    graph = build_graph(*random_joint(seed, nodes=3 + seed % 4, outputs=1, kinds=SMALL))
    costs, free = candidate_costs(graph), set(graph.output_index)
    cut = minimum_cut(graph, costs.save, costs.recompute, free)
    assert not cut.blocked
    assert cut.cost == cheapest(graph, costs, free)
    assert cost_of(graph, costs, free, set(cut.saved)) == cut.cost


@pytest.mark.parametrize("seed", sampled(range(150), range(40)))
def test_cut_is_minimal_for_any_costs(seed):
    """Costs, must-save and free values drawn at random: also the cases that no operator produces today."""
    rng = random.Random(seed)
    graph = build_graph(*random_joint(seed, nodes=3 + seed % 4, outputs=1, kinds=SMALL))
    save = {name: None if rng.random() < 0.3 else rng.randrange(9) for name in graph.candidates}
    recompute = {name: None if rng.random() < 0.3 else rng.randrange(4) for name in graph.candidates}
    costs = Costs(save, recompute, {})
    free = {name for name in graph.candidates if rng.random() < 0.1}
    cut = minimum_cut(graph, save, recompute, free)
    best = cheapest(graph, costs, free)
    if best is None:
        assert cut.blocked
        assert all(save[name] is None or recompute[name] is None for name in cut.blocked)
    else:
        assert not cut.blocked
        assert cut.cost == best == cost_of(graph, costs, free, set(cut.saved))


@pytest.mark.parametrize("seed", sampled(range(30), range(10)))
def test_fewest_bytes_is_the_least_allowed(seed):
    graph = build_graph(*random_joint(seed, nodes=3 + seed % 4, outputs=1, kinds=SMALL))
    savable = {name for name in graph.candidates if save_cost(graph, name) is not None}
    sizes = {name: graph.nodes[name].bytes if name in savable else None for name in graph.candidates}
    must_save = {name for name in graph.forward if product(graph.nodes[name]) is not None}
    costs = Costs(sizes, {name: None if name in must_save else 0 for name in graph.candidates}, {})
    saved = fewest_bytes(graph, savable)
    assert sum(sizes[name] for name in saved) == cheapest(graph, costs, set(graph.output_index))


STRATEGY_OBJECTS = [
    *STRATEGIES,
    *(MinCut(budget=budget, allow_matmul_recompute=True) for budget in (0.8, 0.5, 0.3, 0.1, 0)),
    MinCut(budget=0.2),
    MinCut(policy=lambda node: "save" if "tanh" in node.op else None),
    MinCut(policy=lambda node: "recompute", allow_matmul_recompute=True),
]


@pytest.mark.parametrize("seed", sampled(range(25), range(0, 25, 8)))
def test_every_strategy_gives_the_same_numbers(seed):
    joint, num_primals, num_outputs = random_joint(seed, nodes=6 + 2 * seed)
    args = random_args(joint.params, seed)
    expected = evaluate(joint, args)
    for strategy in STRATEGY_OBJECTS:
        parts = partition(joint, num_primals=num_primals, num_outputs=num_outputs, strategy=strategy)
        outputs, gradients = run_both_halves(parts, num_primals, num_outputs, args)
        for found, wanted in zip([*outputs, *gradients], expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("seed", sampled(range(20), range(2)))
def test_large_graphs_are_valid_deterministic_and_never_worse_than_save_all(seed):
    arguments = dict(seed=1000 + seed, nodes=150)
    joint, num_primals, num_outputs = random_joint(**arguments)
    first = partition(joint, num_primals=num_primals, num_outputs=num_outputs)
    repeated, *_ = random_joint(**arguments)
    second = partition(repeated, num_primals=num_primals, num_outputs=num_outputs)
    assert first.plan == second.plan
    assert str(first.forward) == str(second.forward) and str(first.backward) == str(second.backward)
    assert first.plan.bytes <= first.plan.save_all_bytes
    args = random_args(joint.params, seed)
    with np.errstate(all="ignore"):  # deep random graphs overflow; both sides alike
        expected = evaluate(joint, args)
        outputs, gradients = run_both_halves(first, num_primals, num_outputs, args)
    for found, wanted in zip([*outputs, *gradients], expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("seed", sampled(range(15), range(2)))
def test_rebuilt_backward_reads_the_same_saved_values(seed):
    joint, num_primals, num_outputs = random_joint(seed, nodes=14)
    args = random_args(joint.params, seed)
    for strategy in STRATEGY_OBJECTS:
        parts = partition(joint, num_primals=num_primals, num_outputs=num_outputs, strategy=strategy)
        found = evaluate(parts.forward, args[:num_primals])
        for given in ((0,), (1,), (0, 1)):
            partial, *_ = random_joint(seed, nodes=14, given=given)
            backward = rebuild_backward(partial, parts.plan, num_primals=num_primals, num_outputs=num_outputs)
            grad_outs = [args[num_primals + index] for index in given]
            gradients = run_backward(parts.plan, backward, args[:num_primals], found, num_outputs, grad_outs)
            expected = evaluate(partial, args[:num_primals] + grad_outs)[num_outputs:]
            for value, wanted in zip(gradients, expected, strict=True):
                np.testing.assert_array_equal(value, wanted)


@pytest.mark.parametrize("seed", range(20))
def test_the_cut_of_a_piece_is_the_one_nearest_to_the_sink(seed):
    rng = random.Random(seed)
    nodes = range(rng.choice([6, 30, 200]))
    capacities = {
        (tail, head): rng.choice([1, 2, 3, 1000])
        for tail, head in ((rng.choice(nodes), rng.choice(nodes)) for _ in range(3 * len(nodes)))
        if tail != head and tail != 1 and head != 0
    }
    piece = networkx.DiGraph()
    piece.add_nodes_from((0, 1))
    for (tail, head), capacity in capacities.items():
        piece.add_edge(tail, head, capacity=capacity)
    value, (_, side) = networkx.minimum_cut(piece, 0, 1)
    assert budget._solve(tuple((*ends, capacity) for ends, capacity in capacities.items())) == (value, side)
