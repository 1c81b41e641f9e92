"""A call whose forward program raises runs in eager: eager's error, or its result, with a counted reason."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge import DispatchMiss, add_tvm_dispatch, stats
from bridge.dispatch.call_run import CallRun
from bridge.dynamo import graphs
from tests.bridge.compare import Call, assert_same, run
from tests.bridge.dynamo_helpers import made_since
from tests.device import ASSERTS

pytestmark = ASSERTS


class Classifier(nn.Module):
    """Writes, draws, and looks things up in that order."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, tokens, labels):
        self.calls += 1
        x = F.dropout(self.embedding(tokens), 0.5)
        return F.cross_entropy(x.flatten(0, 1), labels) + torch.rand(())


def sample(last_token: int = 0, last_label: int = 1) -> Call:
    return Call((torch.tensor([[1, 2, last_token]]), torch.tensor([3, 0, last_label])))


BAD = {"label": sample(last_label=7), "negative label": sample(last_label=-3), "token": sample(last_token=5)}


def outcome(module: nn.Module, call: Call) -> tuple:
    """The error of a call that fails, the counter after it, the next draw, and the error's context."""
    torch.manual_seed(3)
    with pytest.raises(Exception) as caught:
        call(module)
    return type(caught.value), str(caught.value), int(module.calls), torch.rand(()), caught.value.__context__


def dispatched(**options) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    module = Classifier().double()
    return copy.deepcopy(module), add_tvm_dispatch(module, sample().args, **options)


@pytest.mark.parametrize("on_miss", ["eager", "compile"])
@pytest.mark.parametrize("bad", BAD)
def test_an_index_out_of_range_raises_eagers_error_and_leaves_what_eager_leaves(bad, on_miss):
    eager, module = dispatched(on_miss=on_miss)
    assert outcome(module, BAD[bad]) == outcome(eager, BAD[bad])
    assert stats(module).hits == 0 and len(stats(module).entries) == 1
    ((reason, count),) = stats(module).misses.items()
    assert count == 1 and reason.startswith("error in the compiled forward: "), reason
    assert_same(run(module, sample()), run(eager, sample()))
    assert stats(module).hits == 1 and stats(module).entries[0].hits == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    torch.manual_seed(0)
    module = Classifier()
    eager = copy.deepcopy(module)
    with mode():
        add_tvm_dispatch(module, sample().args)
        assert outcome(module, BAD["label"]) == outcome(eager, BAD["label"])
        assert_same(run(module, sample()), run(eager, sample()))
    assert (stats(module).hits, stats(module).misses.total()) == (1, 1)


def test_on_miss_error_names_the_error_and_changes_nothing():
    _, module = dispatched(on_miss="error")
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with pytest.raises(DispatchMiss, match=r"error in the compiled forward: .*7") as caught:
        BAD["label"](module)
    assert isinstance(caught.value.__cause__, Exception)
    assert int(module.calls) == 0 and torch.equal(torch.get_rng_state(), state)


def test_hooks_run_once():
    _, module = dispatched()
    seen = []
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module.register_forward_hook(lambda *_: seen.append("after"))
    outcome(module, BAD["label"])
    assert seen == ["before"]
    sample()(module)
    assert seen == ["before", "before", "after"]


def fail(module, error):
    """From now on the forward program of the only entry raises."""

    def fails(_):
        raise error

    (entry,) = stats(module).entries
    entry.programs.forward.run = fails
    entry.run = CallRun(entry.steps, entry.programs, entry.guard, entry.lowered.captured)


def test_a_program_that_fails_where_eager_does_not_gives_eagers_result():
    torch.manual_seed(0)
    eager, module = dispatched()
    fail(module, ArithmeticError("for a test"))
    assert_same(run(module, sample()), run(eager, sample()))
    assert dict(stats(module).misses) == {"error in the compiled forward: ArithmeticError: for a test": 1}


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")],
    ids=["interrupt", "memory", "torch's memory"],
)
def test_what_is_no_error_of_the_call_is_raised_as_it_is(error):
    _, module = dispatched()
    fail(module, error)
    with pytest.raises(type(error)) as caught:
        sample()(module)
    assert caught.value is error and int(module.calls) == 0 and not stats(module).misses


def test_torch_compile():
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Classifier().double()
    eager = copy.deepcopy(module)
    known = graphs()
    module.compile(backend="tvm_dispatch")
    assert_same(run(module, sample()), run(eager, sample()))
    (graph,) = made_since(known)
    assert graph.stats.hits == 1
    for call in BAD.values():
        assert outcome(module, call)[:4] == outcome(eager, call)[:4]
    assert (graph.stats.hits, graph.stats.misses.total()) == (1, len(BAD))
    assert_same(run(module, sample()), run(eager, sample()))
    torch._dynamo.reset()
