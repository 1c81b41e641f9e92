"""Arena pool: one block for runs in turn, one for each concurrent run, none when no run needs it."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from tvm.relax import op as R

from bridge.compile import Program
from bridge.compile.runtime import executor
from bridge.compile.runtime import layout as pools
from bridge.compile.runtime.layout import ARENAS, ArenaPool, PoolUser
from tests.bridge.compile_helpers import program
from tests.threads import together


def enrolled(pool: ArenaPool, *sizes: int) -> list[PoolUser]:
    return [pool.enroll(size) for size in sizes]


def softmax_of_products(rows: int, columns: int = 32) -> Program:
    """Intermediates of some kilobytes for a few rows."""
    params = [((rows, columns), "float32"), ((columns, columns), "float32")]

    def body(emit, x, w):
        y = emit(R.nn.softmax(emit(R.matmul(emit(R.matmul(x, w)), w))))
        return [emit(R.matmul(y, w)), emit(R.sum(y, axis=0))]

    return program(params, body)


def inputs(rows: int, columns: int = 32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, columns, generator=generator), torch.randn(columns, columns, generator=generator)]


@pytest.mark.parametrize("sizes", [(10, 20, 30), (30, 20, 10), (10, 30, 20, 30, 10)])
def test_runs_in_turn_share_the_largest_block(sizes):
    pool = ArenaPool()
    _users = enrolled(pool, *sizes)
    for size in sizes:
        block = pool.take(size)
        assert block.size >= size and len(block.memory) == block.size and not block.memory.data_ptr() % 64
        pool.give(block)
        del block
    assert pool.held_bytes == pool.free_bytes == max(sizes)


@pytest.mark.parametrize("sizes", itertools.permutations((10, 20, 30)))
def test_runs_under_way_together_have_blocks_of_their_own(sizes):
    pool = ArenaPool()
    _users = enrolled(pool, *sizes)
    for _ in range(2):
        blocks = [pool.take(size) for size in sizes]
        assert len(set(map(id, blocks))) == len(sizes)
        assert pool.free_bytes == 0
        for block in blocks:
            pool.give(block)
    del block, blocks
    assert pool.held_bytes == sum(sizes)


def test_blocks_that_stay_free_are_let_go(monkeypatch):
    monkeypatch.setattr(pools, "_USES", 8)
    pool = ArenaPool()
    _users = enrolled(pool, 10, 20, 30)
    for block in [pool.take(size) for size in (10, 20, 30)]:
        pool.give(block)
    for _ in range(8):  # two at a time: one is left over
        pair = [pool.take(30), pool.take(20)]
        for block in pair:
            pool.give(block)
    del block, pair
    assert pool.held_bytes == 50
    for _ in range(16):
        pool.give(pool.take(30))
    assert pool.held_bytes == 30


def test_memory_goes_with_its_users():
    pool = ArenaPool()
    small, large = enrolled(pool, 10, 30)
    pool.give(pool.take(30))
    del large
    assert pool.held_bytes == 0, "nobody needs as much"
    block = pool.take(10)
    block.bound[small.key] = "kept"
    del small
    assert not block.bound
    pool.give(block)
    pool.clear()
    del block
    assert pool.held_bytes == 0


def test_eight_programs_keep_the_arena_of_the_largest(monkeypatch):
    pool = ArenaPool()  # programs of other tests that are still alive, in a process that many share, need theirs
    monkeypatch.setattr(executor, "ARENAS", pool)
    programs = {rows: softmax_of_products(rows) for rows in (3, 40, 7, 6400, 12, 31, 5, 9)}
    serial = {rows: compiled(inputs(rows)) for rows, compiled in programs.items()}
    for rows, compiled in programs.items():
        assert all(map(torch.equal, compiled(inputs(rows)), serial[rows])), "results are nobody else's"
    sizes = [compiled.arena_bytes for compiled in programs.values()]
    assert pool.held_bytes == max(sizes)
    del programs, compiled
    assert pool.held_bytes == 0, "without the garbage collector"


def test_a_program_that_runs_inside_itself(monkeypatch):
    compiled = softmax_of_products(8)
    expected, given = compiled(inputs(8)), inputs(8)
    executor = compiled.executor
    inner: list[list[torch.Tensor]] = []

    def between(registers):
        if len(inner) < 3:
            inner.append([])
            inner[-1] = compiled(given)

    woven = tuple(itertools.chain.from_iterable(((between, ()), action) for action in executor.actions))
    monkeypatch.setattr(executor, "actions", woven)
    outer = compiled(given)
    assert len(inner) == 3
    for results in (*inner, outer):
        assert all(map(torch.equal, results, expected))


def test_threads_compute_what_one_does_alone():
    sizes = (5, 64, 17, 33)
    programs = {rows: softmax_of_products(rows) for rows in sizes}
    expected = {rows: compiled(inputs(rows)) for rows, compiled in programs.items()}
    wrong: list[int] = []

    def work(first: int) -> None:
        for index in range(first, first + 200):
            rows = sizes[index % len(sizes)]
            if not all(map(torch.equal, programs[rows](inputs(rows)), expected[rows])):
                wrong.append(rows)

    together(*(partial(work, first) for first in range(4)))
    assert not wrong
    assert ARENAS.held_bytes == ARENAS.free_bytes
