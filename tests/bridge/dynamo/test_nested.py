"""``torch.compile`` around dispatched layers, and dispatch around compiled ones: each compiler runs its own module."""

import copy
import io
import pickle
from collections import Counter, OrderedDict

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, remove_tvm_dispatch, stats
from bridge.dynamo.backend import graphs
from tests.bridge.dynamo_helpers import CLOSE, made_since, outcome, total, x


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def nested():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 4)), nn.Tanh()]
    return nn.Sequential(*layers).double()


class Around(nn.Module):
    """A layer between two others, in a forward without a loop: Dynamo leaves one with a break in its loop to eager."""

    def __init__(self):
        super().__init__()
        self.before, self.layer, self.after = nested()

    def forward(self, a):
        return self.after(self.layer(self.before(a))) * 2


def assert_same(function, eager, data, seeds=(0, 1)):
    """The same results, gradients of data and parameters, and generator state."""
    models = [getattr(function, "_orig_mod", function), eager]
    for model in models:
        model.zero_grad()
    for seed in seeds:
        for seen, expected in zip(outcome(function, [data], seed), outcome(eager, [data], seed), strict=True):
            torch.testing.assert_close(seen, expected, **CLOSE)
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, **CLOSE)


# a dispatched layer inside of a compiled model


@pytest.mark.composes(
    "a dispatched layer inside a model compiled afterwards, by any backend",
    "runs its own code, a graph break on either side; under `fullgraph=True` a clear error",
    section='`torch.compile(model, backend="tvm_dispatch")`',
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "tvm_dispatch"])
def test_a_dispatched_layer_runs_its_own_code_inside_a_compiled_model(backend):
    model, eager, data = Around(), Around(), x(5, 4)
    add_tvm_dispatch(model.layer, data)
    known = graphs()
    assert_same(torch.compile(model, backend=backend), eager, data)
    assert stats(model.layer).hits == 2 and not stats(model.layer).misses
    if backend == "tvm_dispatch":  # the layers before and after it are graphs of their own
        found = made_since(known)
        assert len(found) == 2 and total(found) == (4, Counter())


def test_a_dispatched_model_that_is_compiled_itself_is_dispatched():
    for kind in (nested, Around):
        model, eager, data = kind(), kind(), x(5, 4)
        add_tvm_dispatch(model, data)
        assert_same(torch.compile(model, backend="eager"), eager, data)
        assert stats(model).hits == 2 and not stats(model).misses


def test_a_loop_over_dispatched_layers_inside_a_compiled_model():
    class Looped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)) for _ in range(3)])

        def forward(self, a):
            for layer in self.layers:
                a = a + layer(a)
            return a

    torch.manual_seed(0)
    model, data = Looped().double(), x(5, 4)
    eager = copy.deepcopy(model)
    for layer in model.layers:
        add_tvm_dispatch(layer, data)
    assert_same(torch.compile(model, backend="tvm_dispatch"), eager, data)
    assert [stats(layer).hits for layer in model.layers] == [2, 2, 2]


def test_misses_inside_a_compiled_model_are_counted_and_compiled_when_asked():
    model, eager = Around(), Around()
    add_tvm_dispatch(model.layer, x(5, 4), on_miss="compile")
    compiled = torch.compile(model, backend="eager")
    for rows in (5, 3, 7):
        assert_same(compiled, eager, x(rows, 4), seeds=(0,))
    assert stats(model.layer).hits == 3 and len(stats(model.layer).entries) == 1
    add_tvm_dispatch(model.layer, x(5, 4), on_miss="eager")
    assert_same(compiled, eager, x(1, 4), seeds=(0,))
    assert [reason.split(":")[0] for reason in stats(model.layer).misses] == ["shape of args[0]"]


def test_hooks_on_a_dispatched_layer_inside_a_compiled_model():
    model, eager, data = Around(), Around(), x(5, 4)
    add_tvm_dispatch(model.layer, data)
    for each in (model, eager):
        each.layer.register_forward_hook(lambda module, args, kwargs, result: result * 2, with_kwargs=True)
    assert_same(torch.compile(model, backend="eager"), eager, data)
    assert stats(model.layer).hits == 2


@pytest.mark.composes("a dispatched layer inside a model compiled afterwards, by any backend")
def test_one_graph_around_a_dispatched_layer_is_refused_and_says_what_to_do():
    model, data = Around(), x(5, 4)
    add_tvm_dispatch(model.layer, data)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"dispatched to TVM.*remove_tvm_dispatch"):
        torch.compile(model, backend="eager", fullgraph=True)(data)


def test_after_the_dispatch_is_removed_the_outer_compiler_takes_the_layer():
    model, eager, data = Around(), Around(), x(5, 4)
    add_tvm_dispatch(model.layer, data)
    remove_tvm_dispatch(model.layer)
    known = graphs()
    assert_same(torch.compile(model, backend="tvm_dispatch", fullgraph=True), eager, data)
    assert total(made_since(known)) == (2, Counter())


@pytest.mark.parametrize("strict", [False, True])
def test_export_sees_the_module_that_the_user_wrote(strict):
    model, data = Around().eval(), x(5, 4, grad=False)
    add_tvm_dispatch(model.layer, data)
    exported = torch.export.export(model, (data,), strict=strict)
    torch.testing.assert_close(exported.module()(data), Around().eval()(data), **CLOSE)
    assert stats(model.layer).hits == 0


def test_what_dynamo_sees_of_a_dispatch_is_in_no_copy():
    layer = nested()[1]
    layer.register_forward_hook(lambda module, args, kwargs, result: None, with_kwargs=True)
    before = dict(layer._forward_hooks_with_kwargs)
    layer._forward_hooks.clear()  # the hook itself cannot be pickled
    add_tvm_dispatch(layer, x(5, 4))
    assert layer._forward_hooks_with_kwargs != before
    file = io.BytesIO()
    torch.save(layer, file)
    assert b"bridge" not in file.getvalue() and b"tvm" not in file.getvalue()
    file.seek(0)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)]
    for other in (*copies, remove_tvm_dispatch(layer)):
        assert type(other._forward_hooks_with_kwargs) is OrderedDict
        assert other._forward_hooks_with_kwargs == before


def test_a_dispatched_layer_kept_out_of_the_outer_graph_runs_its_own_code():
    class Outer(Around):
        @torch.compiler.disable
        def inner(self, a):
            return self.layer(a)

        def forward(self, a):
            return self.after(self.inner(self.before(a)))

    model, eager, data = Outer(), Outer(), x(5, 4)
    add_tvm_dispatch(model.layer, data)
    assert_same(torch.compile(model, backend="eager"), eager, data, seeds=(0,))
    assert stats(model.layer).hits == 1


# a compiled layer inside of a dispatched model


@pytest.mark.parametrize("how", ["module.compile", "torch.compile", "Inductor", "itself"])
def test_dispatch_takes_a_compiled_module_over(how):
    model, eager, data = nested(), nested(), x(5, 4)
    if how == "module.compile":
        model[1].compile(backend="eager")
    elif how == "torch.compile":
        model[1] = torch.compile(model[1], backend="eager")
    elif how == "Inductor":
        model[1] = torch.compile(model[1])
    else:
        model = torch.compile(model, backend="eager")
    add_tvm_dispatch(model, data)
    for seen, expected in zip(outcome(model, [data], 3), outcome(eager, [data], 3), strict=True):
        torch.testing.assert_close(seen, expected, **CLOSE)
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, **CLOSE)
    assert stats(model).hits == 1


@pytest.mark.composes(
    "dispatching a module after its own `module.compile()`",
    "refused",
    section='`torch.compile(model, backend="tvm_dispatch")`',
)
def test_a_module_whose_own_call_is_compiled_is_refused():
    model = nested()
    model.compile(backend="eager")
    with pytest.raises(ValueError, match=r"module\.compile"):
        add_tvm_dispatch(model, x(5, 4))


# a function that is compiled, inside of a dispatched module


@pytest.mark.composes(
    "a compiled function inside a dispatched module",
    "captured as eager goes; called elsewhere, it stays compiled",
    section='`torch.compile(model, backend="tvm_dispatch")`',
)
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("is_used_before", [False, True])
def test_a_compiled_function_inside_stays_compiled(is_used_before, fullgraph):
    built = []

    def backend(graph, _):
        built.append(graph)
        return graph.forward

    compiled = torch.compile(lambda a: a.sin() * 2, backend=backend, fullgraph=fullgraph)

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, a):
            return compiled(self.layer(a))

    module, data = Calls().double(), x(5, 4)
    eager = copy.deepcopy(module)
    eager.forward = lambda a: eager.layer(a).sin() * 2
    if is_used_before:
        compiled(x(5, 4))
    add_tvm_dispatch(module, data)
    assert_same(module, eager, data)
    assert stats(module).hits == 2
    known = len(built)
    compiled(torch.ones(3, 2, 2))
    assert len(built) == known + 1


def test_higher_order_operators_run_after_a_refusal():
    class Conditional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, a):
            dropped = lambda h: nn.functional.dropout(h.sin(), 0.5, self.training)  # noqa: E731
            return torch.cond(a.sum() > 0, dropped, torch.cos, (self.layer(a),))

    module, data = Conditional().double(), x(5, 4).abs()
    with pytest.raises(UnsupportedModule, match="draws random numbers"):
        add_tvm_dispatch(module, data)
    module.eval()
    torch.testing.assert_close(module(data), module.layer(data).sin())
