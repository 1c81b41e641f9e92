"""Lifetimes of the objects that a dispatched module keeps alive."""

import copy
import gc
import multiprocessing
import time
import weakref
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from benchmarks.flat_memory import ALLOWED, WORKLOADS, measure
from bridge import add_tvm_dispatch, remove_tvm_dispatch, stats
from bridge.base.session import SESSION
from bridge.compile import Built
from bridge.compile.pipeline import _PROGRAMS
from bridge.compile.runtime import executor
from bridge.compile.runtime.build import _KERNELS, WeakCache
from bridge.compile.runtime.layout import ARENAS, ArenaPool
from tests.bridge.models import MLP, TwoOutputs

pytestmark = pytest.mark.slow

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def rows(count: int = 7) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(count)).requires_grad_()


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return add_tvm_dispatch(MLP(dropout=0.5), rows())


@contextmanager
def reference_counts_only():
    """Without the garbage collector, only unreferenced objects are freed, at once."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


BATCHES = {name: {"rows": 128, "width": 64} for name in WORKLOADS}
"""So large that memory may not grow by as much as one buffer for each step."""
BATCHES["misses"] = {"rows": 16, "width": 256}  # sizes vary: of many, the allocator alone keeps ever more
BATCHES["entries"] = {"rows": 11, "width": 16, "early": 20, "late": 36}  # compiles at every other step


@pytest.mark.composes("300 steps", "flat memory", section="Autograd, memory, threads")
def test_resident_memory_is_flat():
    """The process imports the measured workloads, and none of the tests."""
    process = {"mp_context": multiprocessing.get_context("spawn"), "initializer": torch.set_num_threads}
    with ProcessPoolExecutor(1, **process, initargs=(1,)) as pool:
        each = {name: pool.submit(measure, name, **BATCHES[name]) for name in WORKLOADS}
        measured = {name: future.result() for name, future in each.items()}
    assert all(hits >= 36 for _, _, hits in measured.values())
    growth = {name: last / first - 1 for name, (first, last, _) in measured.items()}
    assert max(growth.values()) <= ALLOWED, growth


@pytest.mark.composes("`del module`")
def test_a_step_leaves_nothing_behind(module):
    """Result, graph, argument and grad_out are gone when their last name is, as in eager: no cycle holds them."""
    module(rows()).sum().backward()
    with reference_counts_only():
        x = rows()
        y = module(x)
        grad_out = torch.ones_like(y)
        node = y.grad_fn
        alive = [weakref.ref(thing) for thing in (x, y, grad_out)] + [weakref.ref(node)]
        torch.autograd.backward(y, grad_out)
        del x, y, grad_out, node
        assert [reference() for reference in alive] == [None] * 4


def test_a_step_by_torchs_operators_leaves_nothing_behind():
    """The same where the program calls an operator of torch's as it is, and its gradient."""

    class Sorts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return torch.logcumsumexp(self.layer(x), -1)

    module = add_tvm_dispatch(Sorts(), rows())
    module(rows()).sum().backward()
    with reference_counts_only():
        module(rows()).sum().backward()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            assert not [each for each in gc.garbage if issubclass(type(each), torch.Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
    assert stats(module).hits == 2


def test_a_result_dropped_before_its_backward_frees_the_graph(module):
    with reference_counts_only():
        x = rows()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(weakref.ref(t)) or t, lambda t: t):
            y = module(x)
        node = weakref.ref(y.grad_fn)
        del y, x
        assert node() is None
        own = {id(parameter) for parameter in module.parameters()}
        assert [t for t in (reference() for reference in saved) if t is not None and id(t) not in own] == []


def test_a_result_outlives_its_graph(module):
    y = module(rows())
    expected = y.detach().clone()
    y.sum().backward()
    module(rows(7) * 2).sum().backward()
    torch.testing.assert_close(y.detach(), expected, rtol=0, atol=0)


@pytest.mark.composes(
    "`del module`",
    "frees its code; nothing keeps it, a graph or a grad_out alive",
    section="Autograd, memory, threads",
)
def test_the_module_dies_with_its_last_name():
    module = add_tvm_dispatch(MLP(dropout=0.5), rows())
    module(rows()).sum().backward()
    child, own = weakref.ref(module.first), weakref.ref(module)
    del module
    gc.collect()
    assert own() is None and child() is None


@pytest.mark.composes("`del module`")
def test_compiled_code_dies_with_the_last_module_that_uses_it(monkeypatch):
    monkeypatch.setattr("bridge.compile.runtime.build.Built", Built)  # conftest.py keeps built code alive
    SESSION.reset("programs")
    first = add_tvm_dispatch(MLP(6, 11), rows())
    second = add_tvm_dispatch(MLP(6, 11), rows())
    assert len(_PROGRAMS) == 2 and len(_KERNELS) > 0, "equal modules share one forward and one backward"
    program = weakref.ref(stats(first).entries[0].forward)
    kernels = [weakref.ref(built) for built in stats(first).entries[0].forward.code.values()]
    first(rows()).sum().backward()
    del first
    gc.collect()
    assert program() is not None and len(_PROGRAMS) == 2
    second(rows()).sum().backward()
    del second
    gc.collect()
    assert program() is None and all(kernel() is None for kernel in kernels)
    assert len(_PROGRAMS) == 0 and len(_KERNELS) == 0


def test_an_evicted_entry_frees_its_programs(monkeypatch):
    monkeypatch.setattr("bridge.dispatch.dispatcher.MAX_ENTRIES", 2)
    SESSION.reset("programs")
    module = add_tvm_dispatch(MLP(6, 12), rows(3), on_miss="compile")
    for count in (3, 3, 4, 1):
        module(rows(count)).sum().backward()
    gc.collect()
    assert len(stats(module).entries) == 2
    assert len(_PROGRAMS) == 4


def test_a_graph_outlives_its_module():
    torch.manual_seed(0)
    module = MLP(dropout=0.5)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    x, expected = rows(), rows()
    torch.manual_seed(1)
    y = module(x)
    torch.manual_seed(1)
    eager(expected).sum().backward()
    weights = [parameter for parameter in module.parameters()]
    del module
    gc.collect()
    SESSION.reset("programs")
    y.sum().backward()
    torch.testing.assert_close(x.grad, expected.grad, **CLOSE)
    for weight, other in zip(weights, eager.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad, **CLOSE)


@pytest.mark.cpu("arenas of the CPU")
def test_eight_lengths_keep_the_arena_of_the_largest(monkeypatch):
    SESSION.reset("programs")
    pool = ArenaPool()  # no other test's programs need any of it
    monkeypatch.setattr(executor, "ARENAS", pool)
    module = MLP(6, 11)
    for count in (4, 9, 40, 5, 64, 17, 33, 8):
        add_tvm_dispatch(module, rows(count))
        module(rows(count)).sum().backward()
    entries = stats(module).entries
    sizes = [program.arena_bytes for entry in entries for program in (entry.forward, entry.backward)]
    assert len(entries) == 8 and pool.held_bytes == max(sizes) < sum(sizes) / 4
    del module, entries
    gc.collect()
    assert pool.held_bytes == 0


class Interrupted(KeyboardInterrupt):
    pass


def fail(*_):
    raise Interrupted


def taken() -> int:
    """Bytes of arenas in use."""
    return ARENAS.held_bytes - ARENAS.free_bytes


@pytest.mark.parametrize("where", ["after", "before"])
def test_an_exception_in_the_backward(module, where):
    """Raised on either side of our node; the next step is right and nothing stays behind."""
    eager = copy.deepcopy(module)
    module(rows()).sum().backward()
    module.zero_grad()
    x = rows()
    given = x * 1
    y = module(given)
    (given if where == "after" else y).register_hook(fail)
    node = weakref.ref(y.grad_fn)
    with pytest.raises(Interrupted):
        y.sum().backward()
    del y, given
    gc.collect()
    for _ in range(100):  # a GPU's backward ran in autograd's thread, which may let go a moment later
        if node() is None:
            break
        time.sleep(0.01)
    assert node() is None and taken() == 0
    module.zero_grad()
    for each in (module, eager):
        torch.manual_seed(4)
        each(rows()).square().sum().backward()
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, **CLOSE)


@pytest.mark.cpu("actions of the CPU's executor")
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_exception_inside_a_program(module, direction, monkeypatch):
    """The frame goes back to the pool without a tensor of the failed call in it."""
    module(rows()).sum().backward()
    entry = stats(module).entries[0]
    executor = getattr(entry, direction).executor
    actions = executor.actions
    monkeypatch.setattr(executor, "actions", (*actions[:1], (fail, ()), *actions[1:]))
    x = rows()
    alive = weakref.ref(x)
    with pytest.raises(Interrupted):
        module(x).sum().backward()
    monkeypatch.setattr(executor, "actions", actions)
    del x
    gc.collect()
    assert alive() is None and taken() == 0
    eager = copy.deepcopy(module)
    module.zero_grad()
    for each in (module, eager):
        torch.manual_seed(4)
        each(rows()).square().sum().backward()
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, **CLOSE)


def test_a_backward_of_parts_then_of_all():
    """A retained graph: some outputs, then the others, then a third time is an error, as in eager."""
    torch.manual_seed(0)
    module = TwoOutputs()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    for each in (module, eager):
        left, right = each(rows())
        left.sum().backward(retain_graph=True)
        (left.sum() + right.square().sum()).backward()
        with pytest.raises(RuntimeError, match="second time"):
            right.sum().backward()
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, **CLOSE)


def test_removal_while_another_module_uses_the_same_code():
    first = add_tvm_dispatch(MLP(), rows())
    second = add_tvm_dispatch(MLP(), rows())
    remove_tvm_dispatch(first)
    gc.collect()
    second(rows()).sum().backward()
    assert stats(second).hits == 1


def test_weak_cache():
    class Made:
        pass

    cache: WeakCache[str, Made] = WeakCache(lambda a, b: a.lower() == b.lower())
    one, two = Made(), Made()
    cache.put(1, "a", one)
    cache.put(1, "b", two)
    assert cache.get(1, "A") is one and cache.get(1, "B") is two and cache.get(2, "a") is None and len(cache) == 2
    del one
    assert cache.get(1, "a") is None and cache.get(1, "b") is two and len(cache) == 1
    cache.clear()
    assert cache.get(1, "b") is None and len(cache) == 0
