"""The order of the backward: recomputation late, buffers dying early."""

from __future__ import annotations

from autodiff.ir import bindings, used_vars
from partition import MinCut, build_graph, partition
from partition.cut import backward_order, peak_bytes
from partition.plan import backward_reads
from tests.partition.backprop import bert
from tests.partition.joints import Builder, op


def test_recomputation_waits_for_its_first_reader():
    joint, num_primals, num_outputs = bert(3, 2, 16, 32, 4)
    graph = build_graph(joint, num_primals, num_outputs)
    choice = MinCut().choose(graph)
    computed = set(backward_reads(graph, choice).computed)
    order = backward_order(graph, computed | graph.adjoint)
    position = {name: index for index, name in enumerate(order)}
    assert set(order) == computed | graph.adjoint
    for name in computed:
        first = min(position[user] for user in graph.users[name] if user in position)
        between = order[position[name] + 1 : first]
        assert all(other in computed for other in between), f"{name} is computed long before {order[first]}"
    early = [name for name in graph.nodes if name in position]
    assert peak_bytes(graph, order) < peak_bytes(graph, early)


def test_order_is_valid_and_deterministic():
    made = bert(2, 2, 16, 32, 4)
    joint, num_primals, num_outputs = made
    texts = set()
    for _ in range(2):
        backward = partition(joint, num_primals=num_primals, num_outputs=num_outputs).backward
        known = set(backward.params)
        for var, value in bindings(backward):
            assert known.issuperset(used_vars(value))
            known.add(var)
        texts.add(str(backward))
    assert len(texts) == 1


def late_reductions(count: int):
    """A joint function that first makes every large gradient and only then sums each to a small one."""
    b = Builder()
    x = b.param("x", (8,))
    g = b.param("grad_out", (64, 8))
    large = [b.let(f"large{i}", op.multiply(g, x)) for i in range(count)]
    small = [b.let(f"small{i}", op.sum(value, axis=[0])) for i, value in enumerate(large)]
    return b.build(b.let("y", op.exp(x)), *small), 1, 1


def test_buffers_die_early():
    joint, num_primals, num_outputs = late_reductions(5)
    graph = build_graph(joint, num_primals, num_outputs)
    order = backward_order(graph, graph.adjoint)
    large, small = 64 * 8 * 4, 8 * 4
    assert peak_bytes(graph, [name for name in graph.nodes if name in graph.adjoint]) == 5 * large + small
    assert peak_bytes(graph, order) == large + 5 * small
    assert order[:2] == ["large0", "small0"]


def test_a_view_lives_in_its_base():
    b = Builder()
    x, g = b.param("x", (8, 4)), b.param("grad_out", (8, 4))
    d = b.let("d", op.multiply(g, x))
    t = b.let("t", op.reshape(d, (4, 8)))
    e = b.let("e", op.exp(t))
    graph = build_graph(b.build(b.let("y", op.exp(x)), e), 1, 1)
    assert peak_bytes(graph, ["d", "t", "e"]) == 2 * 8 * 4 * 4
