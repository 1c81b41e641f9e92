"""Dispatched modules called from several threads, and in a process that forks workers."""

import copy
import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from autodiff.lazy import cached_property
from bridge import add_tvm_dispatch, stats
from tests.bridge.models import MLP
from tests.threads import together

ROUNDS = 30


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))


def check_rounds(module: nn.Module, eager: nn.Module, count: int) -> None:
    """Outputs and gradients of many calls; gradients by ``torch.autograd.grad``, which shares nothing."""
    for seed in range(ROUNDS):
        x = rows(count, seed).requires_grad_()
        actual = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
        expected = torch.autograd.grad(eager(x).square().sum(), [x, *eager.parameters()])
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.composes(
    "two threads: two modules, one module; adding beside them",
    "works",
    section="Autograd, memory, threads",
)
def test_two_modules_from_two_threads():
    """Equal modules share one compiled program; each call has a frame of its own."""
    torch.manual_seed(0)
    pairs = []
    for _ in range(2):
        eager = MLP()
        module = copy.deepcopy(eager)
        add_tvm_dispatch(module, rows(7).requires_grad_())
        pairs.append((module, eager))
    together(*[lambda pair=pair: check_rounds(*pair, 7) for pair in pairs])
    assert [stats(module).hits for module, _ in pairs] == [ROUNDS, ROUNDS]


@pytest.mark.composes("two threads: two modules, one module; adding beside them")
def test_one_module_from_two_threads():
    torch.manual_seed(0)
    eager = MLP()
    module = copy.deepcopy(eager)
    add_tvm_dispatch(module, rows(7).requires_grad_())
    add_tvm_dispatch(module, rows(5).requires_grad_())
    together(*[lambda count=count: check_rounds(module, eager, count) for count in (7, 5, 7)])
    assert stats(module).hits == 3 * ROUNDS and not stats(module).misses


def test_grad_mode_is_the_threads_own():
    module = MLP()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows(7).requires_grad_())

    def without_grad() -> None:
        with torch.no_grad():
            for seed in range(ROUNDS):
                torch.testing.assert_close(module(rows(7, seed).requires_grad_()), eager(rows(7, seed)))

    together(without_grad, lambda: check_rounds(module, eager, 7))
    assert stats(module).hits == ROUNDS
    assert list(stats(module).misses) == ["grad mode: compiled for True, called with False"]


class Rows(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return rows(7, index)


class Transformed(Rows):
    """Calls a dispatched module in the worker, on a copy of the parent's memory."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.no_grad():
            return self.module(super().__getitem__(index))


@pytest.mark.cpu("CUDA does not outlive a fork")
@pytest.mark.composes("forked DataLoader workers", "works", section="Autograd, memory, threads")
@pytest.mark.parametrize("context", ["fork"])
def test_data_loader_workers_of_a_process_with_a_dispatched_module(context):
    """The parent has compiled and called its module; workers are forked and the training goes on."""
    torch.manual_seed(0)
    eager = MLP()
    module = copy.deepcopy(eager)
    add_tvm_dispatch(module, rows(7))
    module(rows(7)).sum().backward()
    loader = DataLoader(Rows(), batch_size=None, num_workers=2, multiprocessing_context=context)
    seen = 0
    for x in loader:
        torch.testing.assert_close(module(x), eager(x), rtol=1e-5, atol=1e-5)
        seen += 1
    assert seen == 8 and stats(module).hits == 9


@pytest.mark.cpu("CUDA does not outlive a fork")
@pytest.mark.composes("forked DataLoader workers")
def test_dispatched_module_inside_forked_workers():
    torch.manual_seed(0)
    eager = MLP()
    module = copy.deepcopy(eager)
    with torch.no_grad():
        add_tvm_dispatch(module, rows(7))
    loader = DataLoader(Transformed(module), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60)
    results = list(loader)
    with torch.no_grad():
        for index, result in enumerate(results):
            torch.testing.assert_close(result, eager(rows(7, index)), rtol=1e-5, atol=1e-5)
    assert stats(module).hits == 0, "the workers counted in their own memory"


def child_ends_well(action: Callable[[], None]) -> bool:
    """Forks, runs ``action`` in the child on one thread, as a DataLoader does, and gives up after a while."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            action()
            code = 0
        finally:
            os._exit(code)
    watch = threading.Timer(60, os.kill, (pid, signal.SIGKILL))
    watch.start()
    status = os.waitpid(pid, 0)[1]
    watch.cancel()
    return status == 0


@pytest.mark.cpu("CUDA does not outlive a fork")
@pytest.mark.composes(
    "a train step and adding in a forked child",
    "works with one thread, as in eager",
    section="Autograd, memory, threads",
)
def test_a_train_step_in_a_forked_child():
    """The parent has used its OpenMP threads, which the child does not have."""
    torch.manual_seed(0)
    eager = MLP(dropout=0.5).double()
    module = copy.deepcopy(eager)
    x = rows(7).double()
    add_tvm_dispatch(module, x)
    module(x).sum().backward()
    module.zero_grad()

    def step() -> None:
        for each in (module, eager):
            torch.manual_seed(3)
            optimizer = torch.optim.AdamW(each.parameters())
            each(x).square().sum().backward()
            optimizer.step()
        torch.testing.assert_close(
            dict(module.named_parameters()), dict(eager.named_parameters()), rtol=1e-9, atol=1e-9
        )
        assert stats(module).hits == 2

    assert child_ends_well(step)


class Slow(nn.Module):
    """Lets another thread run while it is traced."""

    def __init__(self, reached: threading.Event):
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.__dict__["reach"] = reached.set

    def forward(self, x):
        self.reach()
        threading.Event().wait(0.2)
        return self.linear(x)


@pytest.mark.cpu("CUDA does not outlive a fork")
@pytest.mark.composes("a train step and adding in a forked child")
def test_a_fork_in_the_middle_of_another_threads_capture():
    """It waits for the capture: the child would find the process half changed and the lock held by no thread."""
    reached = threading.Event()
    adder = threading.Thread(target=lambda: add_tvm_dispatch(Slow(reached), rows(7)), daemon=True)
    adder.start()
    assert reached.wait(60)
    assert child_ends_well(lambda: add_tvm_dispatch(MLP(), rows(5)))
    adder.join(60)


@pytest.mark.cpu("CUDA does not outlive a fork")
def test_a_fork_while_another_thread_computes_a_property():
    reached, done = threading.Event(), threading.Event()

    class Slow:
        @cached_property
        def value(self):
            if threading.current_thread() is reader:
                reached.set()
                done.wait(60)
            return 3

    reader = threading.Thread(target=lambda: Slow().value, daemon=True)
    reader.start()
    assert reached.wait(60)
    assert child_ends_well(lambda: Slow().value)
    done.set()
    reader.join(60)


class SlowInEager(nn.Module):
    """Refused, so that its calls run eager; one in a thread of its own waits."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.__dict__["waiting"], self.__dict__["done"] = threading.Event(), threading.Event()

    def forward(self, x):
        if threading.current_thread().name == "caller":
            self.waiting.set()
            self.done.wait(60)
        return self.linear(x).unique()


@pytest.mark.cpu("CUDA does not outlive a fork")
@pytest.mark.composes("a train step and adding in a forked child")
def test_a_fork_in_the_middle_of_another_threads_call():
    module = add_tvm_dispatch(SlowInEager(), on_miss="compile")
    module(rows(7))  # refused after a run of the sample, for which a fork waits: the thread's call runs eager at once
    caller = threading.Thread(target=lambda: module(rows(7)), name="caller", daemon=True)
    caller.start()
    assert module.waiting.wait(60)
    assert child_ends_well(lambda: module(rows(9)))
    module.done.set()
    caller.join(60)
