"""``torch.compile(backend="tvm_dispatch")``: Dynamo's graphs run in TVM, or eager for a reason that is counted."""

import copy
import gc
import itertools
import logging
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import ResNetConfig, ResNetForImageClassification

from bridge.compile import Launch
from bridge.compile.runtime.executor import Executor
from bridge.dispatch.dispatcher import MAX_ENTRIES
from bridge.dynamo.backend import graphs
from tests.bridge.dynamo_helpers import CLOSE, compare, made_since, outcome, total, x
from tests.bridge.models import classifier
from tests.sampling import sampled


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# training


def batches_of(kind, count=20):
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        labels = torch.randint(0, 3, (4,), generator=generator)
        if kind == "bert":
            ids = torch.randint(0, 50, (4, 6), generator=generator)
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        else:
            pixels = torch.randn(4, 3, 16, 16, generator=generator, dtype=torch.float64)
            yield {"pixel_values": pixels, "labels": labels}


def make(kind):
    torch.manual_seed(0)
    if kind == "bert":
        return classifier(layers=1).double()
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3)
    return ResNetForImageClassification(config).double().train()


def train(model, call, kind):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for batch in batches_of(kind):
        loss = call(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, torch.get_rng_state()


@pytest.mark.composes(
    "BERT, ResNet in training",
    "works, forward and backward in TVM",
    section='`torch.compile(model, backend="tvm_dispatch")`',
)
@pytest.mark.parametrize("kind", sampled(["bert", "resnet"], ["resnet"]))
def test_trains_with_eagers_losses_forward_and_backward_in_tvm(kind, monkeypatch):
    runs = []
    call = Executor.__call__

    def counted(program, *args, **kwargs):
        runs.append(program)
        return call(program, *args, **kwargs)

    monkeypatch.setattr(Executor, "__call__", counted)
    known = graphs()
    model, eager = make(kind), make(kind)
    losses, generator = train(model, torch.compile(model, backend="tvm_dispatch"), kind)
    expected, expected_generator = train(eager, eager, kind)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(generator, expected_generator)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, eager.state_dict()[name], rtol=1e-8, atol=1e-10)
    found = made_since(known)
    assert total(found) == (20, Counter())
    for direction in ("forward", "backward"):
        programs = [program for program in runs if program.name == f"DynamoGraph_{direction}"]
        assert len(programs) == 20
        assert all(any(isinstance(step, Launch) for step in program.steps) for program in programs)


def test_dropout_draws_what_eager_draws():
    assert total(compare(lambda a: F.dropout(F.dropout(a, 0.3).tanh(), 0.6), x(5, 4), calls=2)) == (2, Counter())


def test_without_grad_only_a_forward():
    with torch.no_grad():
        (graph,) = compare(lambda a: a.sin() * 2, x(3, 4, grad=False))
    assert graph.stats.hits == 1 and graph.stats.entries[0].backward is None


@pytest.mark.composes("autocast, `no_grad` regions, inference mode")
def test_inference_mode_between_training_steps():
    """Results are inference tensors, and so are the arguments of the graph behind the break."""

    class Model(nn.Sequential):
        def forward(self, a):
            a = self[1](self[0](a).relu())
            torch._dynamo.graph_break()
            return self[2](a), a[0]

    model = Model(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    eager, known, data = copy.deepcopy(model), graphs(), x(6, 4)
    compiled = torch.compile(model, backend="tvm_dispatch")
    for training, inference in ((True, False), (False, True), (True, True), (True, False), (False, True)):
        results = []
        for call, module in ((compiled, model), (eager, eager)):
            module.train(training)
            with torch.inference_mode(inference):
                result = call(data)
            assert all(each.is_inference() == inference for each in result)
            if not inference:
                sum(each.sum() for each in result).backward()
            results.append([each.clone() for each in result])
        torch.testing.assert_close(*results, **CLOSE)
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), **CLOSE)
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()], **CLOSE)
    assert total(made_since(known)) == (10, Counter())


def test_eval_and_train_of_one_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="tvm_dispatch")
    known = graphs()
    data = x(6, 4)
    for training in (True, False, True):
        model.train(training), eager.train(training)
        for seen, expected in zip(outcome(compiled, [data], 0), outcome(eager, [data], 0), strict=True):
            torch.testing.assert_close(seen, expected, **CLOSE)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, eager.state_dict()[name], **CLOSE)
    assert total(made_since(known)) == (3, Counter())


@pytest.mark.composes("graph breaks", "works", section='`torch.compile(model, backend="tvm_dispatch")`')
def test_each_side_of_a_graph_break_is_a_graph():
    def function(a):
        b = a.sin()
        torch._dynamo.graph_break()
        return F.dropout(b.cos())

    found = compare(function, x(3, 4))
    assert [graph.stats.hits for graph in found] == [1, 1]


@pytest.mark.composes(
    "changing sizes",
    'one entry from the second on; where that is refused an entry each, eight (`options={"max_entries": …}`)',
    section='`torch.compile(model, backend="tvm_dispatch")`',
)
@pytest.mark.parametrize("varies", [True, False])
def test_sizes_that_become_symbolic(varies, caplog):
    """One entry for all; where that is refused, which is tried once, one for each."""

    def function(a):
        return F.dropout(a.softmax(-1) if varies else a.softmax(-1).clamp(max=a.shape[0] / 99)) * a.shape[0]

    known = graphs()
    compiled = torch.compile(function, backend="tvm_dispatch")
    caplog.set_level(logging.INFO, "bridge.dynamo")
    for rows in (3, 5, 7, 5):
        torch.manual_seed(rows)
        data = x(rows, 4)
        torch.manual_seed(0)
        actual = compiled(data)
        torch.manual_seed(0)
        torch.testing.assert_close(actual, function(data), **CLOSE)
    found = made_since(known)
    assert total(found) == (4, Counter())
    assert sum(len(graph.stats.entries) for graph in found) == (2 if varies else 3)
    words = "is compiled for sizes that vary" if varies else "every size gets an entry of its own"
    assert sum(words in record.getMessage() for record in caplog.records) == 1


def test_more_sizes_than_are_kept_run_eager(caplog):
    options = {"max_entries": 2}
    compiled = torch.compile(lambda a: a.clamp(max=a.shape[0]), backend="tvm_dispatch", dynamic=True, options=options)
    known = graphs()
    with caplog.at_level(logging.WARNING, "bridge.dynamo"):
        for rows in (3, 4, 5, 6, 3):
            data = x(rows, 4)
            torch.testing.assert_close(compiled(data), data.clamp(max=rows), **CLOSE)
    hits, misses = total(made_since(known))
    assert hits == 3 and sum(misses.values()) == 2 and "more than 2" in next(iter(misses))
    assert len(caplog.records) == 1


@pytest.mark.composes(
    "autocast, `no_grad` regions, inference mode",
    "works",
    section='`torch.compile(model, backend="tvm_dispatch")`',
)
def test_autocast_around_the_call():
    def function(a):
        return (a @ a.T).double() * 2

    data, known, seen = torch.randn(3, 4), graphs(), []
    for call in (torch.compile(function, backend="tvm_dispatch"), function):
        leaf = data.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            result = call(leaf)
        result.sum().backward()
        seen.append((result, leaf.grad))
    for actual, expected in zip(*seen, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert total(made_since(known)) == (1, Counter())


@pytest.mark.composes("autocast, `no_grad` regions, inference mode")
def test_regions_without_grad_and_with_autocast():
    def function(a):
        with torch.no_grad():
            b = a * 2
            with torch.enable_grad():
                c = a.exp()
        with torch.autocast("cpu", torch.bfloat16):
            d = a.float() @ a.float().T
        return (a * b * c).sum(1) + d.double().sum(1)

    assert total(compare(function, x(3, 4), calls=2)) == (2, Counter())


def test_equal_graphs_are_lowered_once():
    def first(a):
        return F.dropout(a.sin() * a, 0.3)

    def second(a):
        return F.dropout(a.sin() * a, 0.3)

    known = graphs()
    for function in (first, second):
        torch.compile(function, backend="tvm_dispatch")(x(3, 4))
    entries = [entry for graph in made_since(known) for entry in graph.stats.entries]
    assert len(entries) == 2 and entries[0].lowered is entries[1].lowered


def test_a_graph_that_holds_a_tensor_of_its_own():
    table = torch.arange(4.0, dtype=torch.float64)
    assert sum(total(compare(lambda a: a * table + torch.tensor([1.0, 2.0, 3.0, 4.0]), x(3, 4)))[1].values()) == 0


# graphs that run eager


def only_miss(found):
    (graph,) = found
    ((reason, count),) = graph.stats.misses.items()
    assert graph.stats.hits == 0 and count == 1 and reason in repr(graph)
    return reason


@pytest.mark.composes(
    "unsupported operators",
    "that graph runs eager, with a reason (`bridge.dynamo.backend.graphs()`)",
    section='`torch.compile(model, backend="tvm_dispatch")`',
)
def test_a_graph_that_is_not_supported_runs_eager_and_says_why(caplog):
    with caplog.at_level(logging.WARNING, "bridge.dynamo"):
        found = compare(lambda a: torch.view_as_complex(torch.stack([a, a], -1).half()).real.float().sum() * a, x(3, 3))
    assert "view_as_complex" in only_miss(found)
    (record,) = caplog.records
    assert "view_as_complex" in record.getMessage() and "test_backend.py" in record.getMessage()


def test_a_fallback_leaves_the_other_graphs_in_tvm():
    def function(a):
        b = torch.view_as_complex(torch.stack([a, a], -1).half()).real.float().sum() * a
        torch._dynamo.graph_break()
        return b.sin() * 2

    hits, misses = total(compare(function, x(3, 3), calls=2))
    assert hits == 2 and sum(misses.values()) == 2


def test_an_in_place_change_of_what_requires_grad_runs_eager():
    only_miss(compare(lambda a: a.mul_(2).sin(), x(3, 4)))


def test_an_in_place_change_of_an_argument_without_grad_is_written_back():
    def function(a, b):
        b.add_(1)
        return a * b

    assert total(compare(function, x(3, 4), x(3, 4, grad=False), calls=2)) == (2, Counter())


def test_tensor_data_is_the_tensor_without_its_gradient():
    average = torch.zeros(4, dtype=torch.float64)

    def function(a, average):
        average.data.mul_(0.9).add_(a.data.mean(0), alpha=0.1)
        return a * average.data

    assert total(compare(function, x(3, 4), average, calls=2)) == (2, Counter())


def test_a_tensor_on_another_device_runs_eager():
    known = graphs()
    result = torch.compile(lambda a: a * 2, backend="tvm_dispatch")(torch.ones(3, 4, device="meta"))
    assert result.device.type == "meta" and "device meta" in only_miss(made_since(known))


def test_an_in_place_change_that_another_input_sees_runs_eager():
    def function(a, b, c):
        b.add_(1)
        return a * c

    known = graphs()
    compiled = torch.compile(function, backend="tvm_dispatch")
    base, data = torch.ones(3, 4), torch.ones(3, 4)
    torch.testing.assert_close(compiled(data, base, base.view(3, 4)), torch.full((3, 4), 2.0))
    assert "shares memory with" in only_miss(made_since(known))
    torch.testing.assert_close(compiled(data, base, torch.ones(3, 4)), torch.ones(3, 4))
    assert total(made_since(known))[0] == 1


def test_a_checkpointed_region_is_part_of_the_graph():
    def region(a, scale):
        return F.dropout(checkpoint(lambda b: F.dropout(b.sin()), a, use_reentrant=False)) * scale

    found = compare(lambda a: checkpoint(region, a, scale=2.0, use_reentrant=False).sum(0), x(3, 4), calls=2)
    assert total(found) == (2, Counter())


def test_a_checkpointed_region_keeps_its_masks_where_it_runs_eager():
    def region(a):
        return F.dropout(torch.view_as_complex(torch.stack([a, a], -1).half()).real.float().sum() * a)

    assert "view_as_complex" in only_miss(compare(lambda a: checkpoint(region, a, use_reentrant=False) * 2, x(3, 3)))


# numbers among the arguments


@pytest.mark.composes(
    "numbers that change at every call",
    "one entry where that is exact, otherwise constants",
    section='`torch.compile(model, backend="tvm_dispatch")`',
)
@pytest.mark.parametrize(
    ("dynamic", "dtype"),
    sampled(
        itertools.product((None, True), (torch.float32, torch.float64)), ((None, torch.float32), (True, torch.float64))
    ),
)
def test_a_number_that_changes_at_every_call_is_compiled_once(dynamic, dtype):
    def function(a, weight, step):
        return (1 - weight) * a.sin() / weight + a * (weight / 3) - step * a

    known = graphs()
    compiled = torch.compile(function, backend="tvm_dispatch", dynamic=dynamic)
    for step in range(2, 2 + MAX_ENTRIES + 4):
        data = torch.randn(3, 4, dtype=dtype)
        actual, expected = (
            outcome(partial(f, weight=0.3 + 0.1 * step, step=step), [data], 0) for f in (compiled, function)
        )
        torch.testing.assert_close(actual[0], expected[0], rtol=2e-6 if dtype is torch.float32 else 1e-12, atol=1e-6)
    found = made_since(known)
    assert total(found) == (MAX_ENTRIES + 4, Counter())
    assert all(len(graph.stats.entries) == 1 for graph in found)


def test_a_number_that_becomes_an_input_takes_no_further_entry():
    known, options = graphs(), {"max_entries": 1}
    compiled = torch.compile(lambda a, weight: a * weight, backend="tvm_dispatch", dynamic=True, options=options)
    for step in range(4):
        data = x(3, 4)
        torch.testing.assert_close(compiled(data, 0.5 + step), data * (0.5 + step), **CLOSE)
    assert total(made_since(known)) == (4, Counter())


def test_a_number_that_is_no_factor_is_a_constant_of_each_entry():
    def function(a, rate, exponent):
        return F.dropout(a.abs() ** exponent, rate)

    known = graphs()
    compiled = torch.compile(function, backend="tvm_dispatch", dynamic=True)
    for rate, exponent in ((0.1, 2.5), (0.1, 1.5), (0.5, 1.5), (0.1, 2.5), (0.1, float("nan")), (0.1, float("nan"))):
        data = x(3, 4)
        calls = [partial(f, rate=rate, exponent=exponent) for f in (compiled, function)]
        for seen, expected in zip(*(outcome(call, [data], 1) for call in calls), strict=True):
            torch.testing.assert_close(seen, expected, equal_nan=True, **CLOSE)
    found = made_since(known)
    assert total(found) == (6, Counter()) and sum(len(graph.stats.entries) for graph in found) == 4


def test_the_numbers_of_a_module_when_everything_is_dynamic():
    """The momentum and the epsilon of a normalization are then inputs of the graph."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
    eager, known = copy.deepcopy(model), graphs()
    compiled = torch.compile(model, backend="tvm_dispatch", dynamic=True)
    for rows in (3, 5, 3):
        data = x(rows, 4)
        for seen, expected in zip(outcome(compiled, [data], 0), outcome(eager, [data], 0), strict=True):
            torch.testing.assert_close(seen, expected, **CLOSE)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, eager.state_dict()[name], **CLOSE)
    assert total(made_since(known)) == (3, Counter())


def test_a_number_read_from_a_tensor_that_the_graph_computes_runs_eager():
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        found = compare(lambda a: a * a.sum().item(), x(3, 4, grad=False))
    assert "reads numbers" in only_miss(found)


# torch.func inside


@pytest.mark.composes(
    "`torch.func` inside",
    "that graph runs eager",
    section='`torch.compile(model, backend="tvm_dispatch")`',
)
@pytest.mark.parametrize(
    "function",
    [
        lambda a: torch.func.grad(lambda b: b.sin().sum())(a),
        lambda a: torch.func.jvp(torch.sin, (a,), (a,))[1],
        lambda a: torch.func.jacrev(lambda b: b.sin() * b.sum())(a[0]),
    ],
)
def test_a_transform_runs_eager_and_leaves_nothing_behind(function):
    """Tracing one that fails half-way would leave a level of differentiation, and saved tensors' hooks disabled."""
    assert "torch.func transform" in only_miss(compare(function, x(3, 4, grad=False)))
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()
    assert torch.func.jvp(torch.sin, (torch.zeros(2),), (torch.ones(2),))[1].sum() == 2


def test_an_optimizers_step_changes_its_parameters():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 2)).sum().backward()
    expected = [p.detach() - 0.1 * p.grad for p in model.parameters()]
    known = graphs()
    torch.compile(optimizer.step, backend="tvm_dispatch")()
    torch.testing.assert_close([p.detach() for p in model.parameters()], expected)
    (graph,) = made_since(known)
    assert (graph.stats.hits, graph.stats.misses) == (1, {})


# the backend


def test_the_backend_is_registered():
    assert "tvm_dispatch" in torch.compiler.list_backends()


def test_reset_lets_go_of_the_graphs():
    compiled = torch.compile(lambda a: a.sin() * 2, backend="tvm_dispatch")
    gc.collect()  # graphs of the tests before
    known = len(graphs())
    compiled(x(2, 2))
    assert len(graphs()) == known + 1
    del compiled
    torch.compiler.reset()
    gc.collect()
    assert len(graphs()) == known


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": {"partitions": "save_all"}}, "partitions"),
        ({"options": {"partition": "save_some"}}, "save_some"),
        ({"options": {"max_entries": 0}}, "max_entries"),
        ({"mode": "max-autotune"}, "max-autotune"),
    ],
)
def test_wrong_options_are_refused(arguments, message):
    compiled = torch.compile(lambda a: a * 2, backend="tvm_dispatch", **arguments)
    with pytest.raises(Exception, match=message):
        compiled(x(2, 2))


def test_the_partition_is_an_option():
    known = graphs()
    function = torch.compile(
        lambda a: a.sin().exp().sum(), backend="tvm_dispatch", options={"partition": "recompute_all"}
    )
    function(x(3, 4)).backward()
    (graph,) = made_since(known)
    assert graph.stats.entries[0].plan.strategy == "recompute_all"


class Doubles(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.tanh else result


def test_what_a_function_mode_does_is_done_once():
    module, known = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), graphs()
    x = torch.randn(3, 4)
    compiled = torch.compile(module, backend="tvm_dispatch")
    with Doubles():
        wanted = module(x)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), wanted)
    torch.testing.assert_close(compiled(x), wanted / 2)
    assert all(each.stats.hits and not each.stats.misses for each in graphs() if each not in known)
