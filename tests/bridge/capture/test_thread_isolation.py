"""Thread isolation: other threads work while an entry is added; they see nothing of it, and the entry is right.

The traced forward itself stops in the middle and lets another thread act before it goes on.
"""

import builtins
import copy
import math
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.fx import _symbolic_trace

from bridge import UnsupportedModule, add_tvm_dispatch, lower, stats
from bridge.capture.draws import IsolatedRNG
from bridge.capture.thread_isolation import is_capturing
from bridge.dispatch import options
from tests.bridge.models import MLP

pytestmark = pytest.mark.composes("two threads: two modules, one module; adding beside them")

PATIENCE = 60
EXACT = {"rtol": 1e-10, "atol": 1e-12}


class Stops(nn.Module):
    """Its forward, while it is traced, waits for others to be done: for ``then`` at each of the runs of a capture."""

    def __init__(self, then: Callable[[], None] = lambda: None):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 5), nn.Tanh()).double()
        self.norm = nn.BatchNorm1d(5, momentum=None).double()
        self.__dict__["then"] = then.__call__  # not a Python function: its changes are not taken for forward's

    def __deepcopy__(self, memo):
        twin = Stops()
        twin.load_state_dict(self.state_dict())
        return twin

    def forward(self, x):
        if is_capturing():
            then = self.then
            then()
        return self.norm(self.inner(x)) * 2.0


def rows(count: int = 7) -> torch.Tensor:
    return torch.randn(count, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(count))


def unheard(action: Callable[[], None]) -> Callable[[], None]:
    """Runs ``action`` hidden from the capture, as if in another thread: threads that forward starts are refused."""

    def run() -> None:
        hear = sys.getprofile()
        sys.setprofile(None)
        try:
            action()
        finally:
            sys.setprofile(hear)

    return run


def in_another_thread(action: Callable[[], None]) -> Callable[[], None]:
    """Runs ``action`` to its end in a thread of its own, and raises its error here."""

    def run() -> None:
        errors: list[BaseException] = []

        def guarded() -> None:
            try:
                action()
            except BaseException as error:  # noqa: BLE001 — whatever it is, the test has to see it
                errors.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the other thread waits for the capture"
        if errors:
            raise errors[0]

    return unheard(run)


def gradients(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(module(x).square().sum(), list(module.parameters()))


def check(module: nn.Module, eager: nn.Module) -> None:
    """Two training calls of a dispatched module beside eager, buffers included."""
    for count in (7, 7):
        torch.testing.assert_close(gradients(module, rows(count)), gradients(eager, rows(count)), **EXACT)
    torch.testing.assert_close(module.state_dict(), eager.state_dict(), **EXACT)
    assert stats(module).hits == 2 and not stats(module).misses


@contextmanager
def process_unchanged() -> Iterator[None]:
    def state() -> tuple:
        compiler = torch.compiler
        return (
            *(nn.Module.__call__, nn.Module.__getattr__, _symbolic_trace._Patcher, torch._C._get_mkldnn_enabled),
            *(compiler._is_compiling_flag, compiler._is_exporting_flag, _symbolic_trace.is_fx_tracing()),
            *(builtins.max, builtins.min, math.pow, tuple(warnings.filters), torch.backends.mkldnn.enabled),
        )

    before = state()
    yield
    assert state() == before


def train(module: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = module(rows(step + 2)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.relu(self.conv(x.float()[None, None])).mean((2, 3)))


def test_eager_training_beside_a_capture_is_the_same_to_the_bit():
    """Optimizers ask ``torch.compiler.is_compiling()``, convolutions whether oneDNN is on."""
    torch.manual_seed(0)
    eager = Convolved()
    expected = train(copy.deepcopy(eager))
    seen: SimpleQueue[torch.Tensor] = SimpleQueue()

    @in_another_thread
    def other() -> None:
        assert not torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        assert not _symbolic_trace.is_fx_tracing() and torch._C._get_mkldnn_enabled()
        assert max(3, 1, key=lambda value: -value) == 1 and type(math.pow(2, 3)) is float
        for loss in train(copy.deepcopy(eager)):
            seen.put(loss)

    module = Stops(other)
    twin = copy.deepcopy(module)
    with process_unchanged():
        add_tvm_dispatch(module, rows())
    count = seen.qsize()
    assert count >= 2 * len(expected) and all(torch.equal(seen.get(), loss) for loss in expected * (count // 3))
    check(module, twin)


def test_dispatched_calls_beside_a_capture_are_dispatched():
    torch.manual_seed(0)
    hot = MLP().double()
    eager = copy.deepcopy(hot)
    add_tvm_dispatch(hot, rows())
    calls: SimpleQueue[None] = SimpleQueue()

    @in_another_thread
    def other() -> None:
        calls.put(None)
        torch.testing.assert_close(gradients(hot, rows()), gradients(eager, rows()), **EXACT)

    module = Stops(other)
    twin = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    assert stats(hot).hits == calls.qsize() > 0
    check(module, twin)


def test_the_captured_module_keeps_its_tensors_for_others():
    """Saving, loading, copying and zeroing the module that is being captured; loaded values are there afterwards."""
    torch.manual_seed(0)
    weights = {name: torch.randn_like(value) for name, value in Stops().inner.state_dict().items()}

    @in_another_thread
    def other() -> None:
        own = [*module.parameters(), *module.buffers()]
        assert all(type(tensor) in (nn.Parameter, torch.Tensor) for tensor in own)
        assert all(type(tensor) is torch.Tensor for tensor in module.state_dict().values())
        module.inner.load_state_dict(weights)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        module.zero_grad()
        assert type(module.inner[0].weight) is nn.Parameter
        copied = copy.deepcopy(module.inner)
        assert all(type(layer.__dict__["_parameters"]) is dict for layer in copied.modules())
        torch.testing.assert_close(copied.state_dict(), weights, rtol=0, atol=0)

    module = Stops(other)
    add_tvm_dispatch(module, rows())
    torch.testing.assert_close(dict(module.inner.state_dict()), weights, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in module.parameters())
    module.__dict__["then"] = lambda: None
    twin = copy.deepcopy(module)
    torch.testing.assert_close(gradients(module, rows()), gradients(twin, rows()), **EXACT)


@pytest.mark.parametrize("path", ["", "inner"])
def test_a_call_of_the_captured_module_waits(path):
    """Made in the middle of the capture, by another thread, it goes on afterwards and is right."""
    torch.manual_seed(0)
    results: SimpleQueue[torch.Tensor] = SimpleQueue()
    called = threading.Event()

    def call() -> None:
        results.put(module.get_submodule(path)(rows()).detach())

    caller = threading.Thread(target=call, daemon=True)

    @unheard
    def then() -> None:
        if not called.is_set():
            called.set()
            caller.start()
            caller.join(0.2)
            assert results.empty()

    module = Stops(then)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    caller.join(PATIENCE)
    torch.testing.assert_close(results.get(timeout=0), eager.get_submodule(path)(rows()).detach(), **EXACT)


@pytest.mark.cpu("numbers of mt19937, the generator of the CPU")
def test_draws_of_other_threads_do_not_come_again():
    drawn: SimpleQueue[torch.Tensor] = SimpleQueue()
    module = Stops(in_another_thread(lambda: drawn.put(torch.rand(5))))
    torch.manual_seed(3)
    add_tvm_dispatch(module, rows())
    theirs = [drawn.get() for _ in range(drawn.qsize())]
    everything = torch.rand(5 * (len(theirs) + 1), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close([*theirs, torch.rand(5)], list(everything.split(5)), rtol=0, atol=0)


def test_pythons_generator_goes_on_in_other_threads():
    """Their draws are not taken for forward's, and do not come again."""
    drawn: SimpleQueue[float] = SimpleQueue()
    module = Stops(in_another_thread(lambda: drawn.put(random.random())))
    random.seed(3)
    over = threading.Event()
    idle = threading.Thread(target=over.wait, args=(PATIENCE,), daemon=True)
    idle.start()
    add_tvm_dispatch(module, rows())
    over.set()
    expected = random.Random(3)
    assert all(drawn.get() == expected.random() for _ in range(drawn.qsize())) and random.random() == expected.random()


@pytest.mark.cpu("numbers of mt19937, the generator of the CPU")
def test_a_seed_set_by_a_refused_forward_is_undone():
    """Also beside other threads, whose draws are told apart."""
    over = threading.Event()
    idle = threading.Thread(target=over.wait, args=(PATIENCE,), daemon=True)
    idle.start()
    module = Stops(lambda: torch.manual_seed(3) and torch.manual_seed(4))
    torch.manual_seed(3)
    with pytest.raises(UnsupportedModule, match="manual_seed"):
        add_tvm_dispatch(module, rows())
    over.set()
    assert torch.equal(torch.rand(5), torch.rand(5, generator=torch.Generator().manual_seed(3)))


def test_an_isolated_rng_leaves_the_default_generator_alone():
    before = torch.get_rng_state()
    with IsolatedRNG():
        x = torch.randn(4, 5) + torch.rand_like(torch.empty(4, 5)) + torch.randint(0, 5, (4, 5))
        nn.LSTM(5, 5, 2, dropout=0.5)(nn.functional.dropout(x, 0.5)[None])
        torch.native_dropout(x, 0.5, True)
        torch.randperm(4), torch.multinomial(x.exp(), 2), x.normal_()
    assert torch.equal(torch.get_rng_state(), before)


def test_errors_inside_forward_leave_the_process_as_it_was():
    class Wrong(Exception):
        pass

    def then() -> None:
        raise Wrong

    module = Stops(then)
    with process_unchanged(), pytest.raises((UnsupportedModule, Wrong)):
        add_tvm_dispatch(module, rows())
    assert all(type(layer.__dict__["_parameters"]) is dict for layer in module.modules())
    assert "forward" not in module.norm.__dict__


def test_two_threads_add_the_first_entries():
    """The second thread adds to the first one's dispatcher."""
    second = threading.Event()

    @unheard
    def then() -> None:
        if not second.is_set():
            second.set()
            other.start()

    module = Stops(then)
    other = threading.Thread(target=lambda: add_tvm_dispatch(module, rows(5)), daemon=True)
    add_tvm_dispatch(module, rows(7))
    other.join(PATIENCE)
    assert sorted(entry.lowered.captured.given.tensors[0].shape[0] for entry in stats(module).entries) == [5, 7]


def test_a_dispatcher_is_not_taken_off_by_who_has_seen_none(monkeypatch):
    """Another thread puts its own there right after this one has looked: at the second use of the place's name."""
    uses: list[None] = []

    class Place(str):
        def __hash__(self) -> int:
            if threading.current_thread() is threading.main_thread():
                uses.append(None)
                if len(uses) == 2:
                    other.start()
                    other.join(0.3)  # it waits for this thread, or has been
            return super().__hash__()

        __eq__ = str.__eq__

    def stand_in() -> SimpleNamespace:
        entries = SimpleNamespace(all=[object()])
        return SimpleNamespace(budget={}, learns=False, entries=entries, adopt=entries.all.extend)

    module, ours, theirs = MLP(), stand_in(), stand_in()
    monkeypatch.setattr(options, "COMPILED_CALL", Place(options.COMPILED_CALL))
    monkeypatch.setattr(options, "mark", lambda module: None)
    other = threading.Thread(target=lambda: options.install(module, theirs), daemon=True)
    options.install(module, ours)
    other.join(PATIENCE)
    entries = module.__dict__.pop(str(options.COMPILED_CALL)).entries.all
    assert len(uses) >= 2 and len(entries) == 2


def test_a_forward_that_calls_its_parts_in_threads_does_not_hang():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(6, 5).double()

        def forward(self, x):
            results = []
            thread = threading.Thread(target=lambda: results.append(self.one(x)), daemon=True)
            thread.start()
            thread.join(PATIENCE)
            return results[0]

    with pytest.raises(UnsupportedModule):
        lower(Branches(), rows())


def test_recurrent_layers_keep_what_they_note_of_their_weights():
    """Another thread's running call uses the list that tracing would fill with stand-ins."""
    torch.manual_seed(0)

    class Recurrent(Stops):
        def __init__(self, then=lambda: None):
            super().__init__(then)
            self.inner = nn.LSTM(6, 5, 2).double()
            self.norm = nn.Identity()

        def forward(self, x):
            y = self.inner(x)[0]
            if is_capturing():
                self.then()
            return y

    @in_another_thread
    def other() -> None:
        assert all(map(lambda held: type(held) is nn.Parameter, module.inner._flat_weights))

    module = Recurrent(other)
    add_tvm_dispatch(module, rows())
    assert all(map(lambda held: type(held) is nn.Parameter, module.inner._flat_weights))


def test_hooks_of_a_module_in_two_threads():
    """Both are inside the pre-hook at once: each goes on with its own arguments, and both are dispatched."""
    torch.manual_seed(0)
    module = MLP().double()
    eager = copy.deepcopy(module)
    inside = threading.Barrier(2)
    seen = []

    def pre_hook(hooked: nn.Module, args: tuple) -> tuple:
        seen.append(hooked)
        inside.wait(PATIENCE)
        return (args[0] * 2,)

    add_tvm_dispatch(module, rows())
    add_tvm_dispatch(module, rows(5))
    module.register_forward_pre_hook(pre_hook)
    module.register_forward_hook(lambda hooked, args, result: seen.append(hooked) or result + 1)
    results = {}
    calls = [
        threading.Thread(target=lambda count=count: results.update({count: module(rows(count))}), daemon=True)
        for count in (7, 5)
    ]
    for call in calls:
        call.start()
    for call in calls:
        call.join(PATIENCE)
    for count in (7, 5):
        torch.testing.assert_close(results[count], eager(rows(count) * 2) + 1, **EXACT)
    assert stats(module).hits == 2 and not stats(module).misses and "forward" not in module.__dict__
    assert len(seen) == 4 and all(hooked is module for hooked in seen)


class TestWarnings:
    """A user's filters that make errors of warnings: of eager's warnings alone."""

    @staticmethod
    @contextmanager
    def errors():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield

    @staticmethod
    def module(warns: Callable[[torch.Tensor], None]) -> nn.Module:
        class Warns(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(6, 5).double()

            def forward(self, x):
                warns(x)
                return self.inner(x)

        return Warns()

    def test_of_other_runs_than_eagers_none_is_raised(self):
        def warns(x):
            if torch.is_grad_enabled() and type(x) is not torch.Tensor:
                warnings.warn("of a fake tensor", stacklevel=1)

        module = self.module(warns)
        with self.errors():
            add_tvm_dispatch(module, rows())
            module(rows())
        assert stats(module).hits == 1

    def test_eagers_are_raised_and_the_filters_stay(self):
        module = self.module(lambda x: warnings.warn("of the user's", stacklevel=1))
        with self.errors():
            before = list(warnings.filters)
            with pytest.raises(UserWarning, match="of the user's"):
                add_tvm_dispatch(module, rows())
            assert warnings.filters == before

    def test_what_forward_collects_it_collects_in_each_run(self):
        def warns(x):
            with warnings.catch_warnings(record=True) as found:
                warnings.warn("of the user's", stacklevel=1)
            assert len(found) == 1

        module = self.module(warns)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            add_tvm_dispatch(module, rows())
            module(rows())
        assert stats(module).hits == 1

    def test_another_thread_is_warned(self):
        seen = []

        def then():
            try:
                warnings.warn("of another thread", stacklevel=1)
            except UserWarning as error:
                seen.append(str(error))

        module = Stops(in_another_thread(then))
        with self.errors():
            add_tvm_dispatch(module, rows())
        assert seen and set(seen) == {"of another thread"}


@pytest.mark.parametrize("while_compiled", ["all", "another backward"])
def test_compiled_code_is_of_torchs_functions(while_compiled, monkeypatch):
    """A method of tensors that the user replaced and forward does not call has no part in constants: neither in an
    entry that is added meanwhile, nor in a backward that is compiled later, for other outputs. Both would stay, in this
    process and in the disk cache."""
    monkeypatch.setenv("BRIDGE_CACHE", "0")
    torch.manual_seed(0)
    module, x = nn.LSTMCell(3, 5).double(), torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    twin, own = copy.deepcopy(module), torch.Tensor.clone

    def gradients(called, result):
        return torch.autograd.grad(result, [x, *called.parameters()])

    wanted = gradients(twin, twin(x)[0].sum())
    if while_compiled != "all":
        add_tvm_dispatch(module, x)
        result = module(x)[0].sum()
    with monkeypatch.context() as replaced:
        replaced.setattr(torch.Tensor, "clone", lambda *args, **kwargs: 1.25 * own(*args, **kwargs))
        if while_compiled == "all":
            lowered = lower(module, x)
        else:
            gradients(module, result)
    if while_compiled == "all":
        assert lowered.check().ok
        return
    for _ in range(2):
        assert all(map(torch.allclose, gradients(module, module(x)[0].sum()), wanted))
    assert stats(module).hits >= 2
