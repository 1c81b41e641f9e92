"""A dispatched module is still the user's module: attributes, copies, pickles, hooks, parameters, and the way back."""

import copy
import cProfile
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, remove_tvm_dispatch, stats
from tests.bridge.compare import Call, assert_same, run
from tests.bridge.models import MLP, Counting, Tied, bert_layer

pytestmark = pytest.mark.usefixtures("lowered_once")

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def rows() -> torch.Tensor:
    return torch.randn(7, 6, generator=torch.Generator().manual_seed(3)).requires_grad_()


def check_as_eager(module: nn.Module, eager: nn.Module, *, hits: int) -> None:
    """One step of both agrees, and ``hits`` calls of the module have been dispatched by then."""
    assert_same(run(module, Call((rows(),))), run(eager, Call((rows(),))), **CLOSE)
    assert stats(module).hits == hits, dict(stats(module).misses)


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return MLP(dropout=0.5)


def test_add_returns_the_module(module):
    assert add_tvm_dispatch(module, rows()) is module


@pytest.mark.composes(
    "`state_dict` keys, `named_parameters`, `repr`, `isinstance`",
    "unchanged",
    section="The module stays the user's",
)
def test_what_a_user_sees_is_unchanged(module):
    text, keys, kind = repr(module), list(module.state_dict()), type(module)
    parameters = {name: id(parameter) for name, parameter in module.named_parameters()}
    children = list(module.named_modules())
    forward = type(module).forward
    add_tvm_dispatch(module, rows())
    module(rows()).sum().backward()
    assert repr(module) == text
    assert list(module.state_dict()) == keys
    assert type(module) is kind and isinstance(module, MLP)
    assert {name: id(parameter) for name, parameter in module.named_parameters()} == parameters
    assert list(module.named_modules()) == children
    assert type(module).forward is forward and "forward" not in module.__dict__
    assert [name for name, _ in module.named_buffers()] == []


def test_add_leaves_no_trace_in_gradients_buffers_or_sample():
    module = Counting()
    before = copy.deepcopy(module.state_dict())
    x = rows()
    version, generator = x._version, torch.get_rng_state()
    add_tvm_dispatch(module, x)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert x.grad is None and x._version == version
    assert torch.equal(torch.get_rng_state(), generator)
    assert stats(module).hits == 0 and not stats(module).misses


def test_remove_restores_exactly(module):
    eager = copy.deepcopy(module)
    before = dict(module.__dict__)
    instance_keys = {name: list(child.__dict__) for name, child in module.named_modules()}
    add_tvm_dispatch(module, rows())
    module(rows()).sum().backward()
    module.zero_grad(set_to_none=True)
    assert remove_tvm_dispatch(module) is module
    assert list(module.__dict__) == list(before)
    assert all(module.__dict__[key] is value for key, value in before.items())
    assert {name: list(child.__dict__) for name, child in module.named_modules()} == instance_keys
    assert_same(run(module, Call((rows(),))), run(eager, Call((rows(),))), rtol=0, atol=0)


def test_remove_keeps_what_training_changed(module):
    add_tvm_dispatch(module, rows())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(rows()).square().sum().backward()
    optimizer.step()
    trained = copy.deepcopy(module.state_dict())
    remove_tvm_dispatch(module)
    assert all(torch.equal(value, trained[name]) for name, value in module.state_dict().items())


def test_remove_of_a_module_never_dispatched_says_so_or_does_nothing(module):
    keys = list(module.__dict__)
    try:
        remove_tvm_dispatch(module)
    except ValueError as error:
        assert "dispatch" in str(error)
    assert list(module.__dict__) == keys


def test_add_again_after_remove(module):
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    remove_tvm_dispatch(module)
    add_tvm_dispatch(module, rows())
    check_as_eager(module, eager, hits=1)


def test_call_methods_that_users_call_directly(module):
    """``module.forward`` stays eager's forward, as with hooks."""
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    torch.manual_seed(0)
    actual = module.forward(rows())
    torch.manual_seed(0)
    torch.testing.assert_close(actual, eager.forward(rows()), **CLOSE)


@pytest.mark.composes(
    "`deepcopy`, also of a trained module",
    "the copy computes with its own weights, eager until dispatched itself",
    section="The module stays the user's",
)
def test_deepcopy_is_independent(module):
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    module(rows())
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    torch.manual_seed(0)
    changed = copied(rows())
    torch.manual_seed(0)
    original = module(rows())
    assert not torch.allclose(changed, original), "the copy reads the original's parameters"
    changed.sum().backward()
    assert all(parameter.grad is None for parameter in module.parameters())
    torch.manual_seed(0)
    torch.testing.assert_close(original, eager(rows()), **CLOSE)


@pytest.mark.composes("`deepcopy`, also of a trained module")
def test_deepcopy_can_be_dispatched_on_its_own(module):
    add_tvm_dispatch(module, rows())
    copied = copy.deepcopy(module)
    reference = MLP(dropout=0.5)
    reference.load_state_dict(module.state_dict())
    add_tvm_dispatch(copied, rows())
    hits = stats(copied).hits
    assert_same(run(copied, Call((rows(),))), run(reference, Call((rows(),))), **CLOSE)
    assert stats(copied).hits == hits + 1
    assert stats(module).hits == 0


@pytest.mark.composes(
    "`pickle`, `torch.save`",
    "the dispatch is dropped; loads without this package",
    section="The module stays the user's",
)
def test_pickle(module):
    reference = copy.deepcopy(module)
    plain = len(pickle.dumps(module))
    add_tvm_dispatch(module, rows())
    module(rows())
    data = pickle.dumps(module)
    assert len(data) < plain + 2000, "the pickle carries what was compiled"
    loaded = pickle.loads(data)
    assert type(loaded) is MLP
    assert list(loaded.__dict__) == list(pickle.loads(pickle.dumps(reference)).__dict__)
    assert_same(run(loaded, Call((rows(),))), run(reference, Call((rows(),))), **CLOSE)


@pytest.mark.composes("`pickle`, `torch.save`")
def test_torch_save_and_load(module):
    reference = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_same(run(loaded, Call((rows(),))), run(reference, Call((rows(),))), **CLOSE)


def test_state_dict_travels_both_ways(module):
    other = MLP(dropout=0.5)
    add_tvm_dispatch(module, rows())
    other.load_state_dict(module.state_dict())
    check_as_eager(module, other, hits=1)
    fresh = MLP(dropout=0.5)
    module.load_state_dict(fresh.state_dict())
    check_as_eager(module, fresh, hits=2)


def test_optimizer_steps_are_seen(module):
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (module, eager)]
    for step in range(3):
        check_as_eager(module, eager, hits=step + 1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _change_in_place(module):
    with torch.no_grad():
        module.first.weight.mul_(-2)


def _change_data(module):
    module.first.weight.data = module.first.weight.data * -2


def _change_parameter(module):
    module.first.weight = nn.Parameter(module.first.weight.detach() * -2)


def _assign(module):
    module.load_state_dict({key: value * -2 for key, value in module.state_dict().items()}, assign=True)


@pytest.mark.composes("`load_state_dict`, optimizer steps, weights replaced")
@pytest.mark.parametrize("change", [_change_in_place, _change_data, _change_parameter, _assign])
def test_changed_parameters_are_seen(module, change):
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    check_as_eager(module, eager, hits=1)
    change(module), change(eager)
    check_as_eager(module, eager, hits=2)


def test_swapped_buffer_is_seen():
    module = Counting()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    module.mean = torch.ones(5)
    eager.mean = torch.ones(5)
    check_as_eager(module, eager, hits=1)


def test_parameter_of_another_shape_is_not_dispatched(module):
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    torch.manual_seed(0)
    module.second = nn.Linear(10, 3)
    eager.second = copy.deepcopy(module.second)
    check_as_eager(module, eager, hits=0)


def test_weights_untied_later():
    module = Tied()
    index = torch.arange(6).reshape(2, 3)
    add_tvm_dispatch(module, index)
    module.output.weight = nn.Parameter(module.embedding.weight.detach().clone() * 2)
    eager = Tied()
    eager.output.weight = nn.Parameter(torch.empty_like(eager.output.weight))
    eager.load_state_dict(module.state_dict())
    assert_same(run(module, Call((index,))), run(eager, Call((index,))), **CLOSE)


@pytest.mark.composes(
    "hooks on the dispatched module, forward and backward; global hooks",
    "run as in eager",
    section="The module stays the user's",
)
@pytest.mark.parametrize("always", [False, True])
def test_forward_hooks_run_as_in_eager(module, always):
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    seen = {module: [], eager: []}
    for each in (module, eager):
        each.register_forward_pre_hook(lambda m, args: (seen[m].append("before"), (args[0] * 2,))[1])
        each.register_forward_hook(
            lambda m, args, out: (seen[m].append(tuple(out.shape)), out * 3)[1], always_call=always
        )
    assert_same(run(module, Call((rows(),))), run(eager, Call((rows(),))), **CLOSE)
    assert seen[module] == seen[eager] == ["before", (7, 4)]


def test_hooks_with_keyword_arguments(module):
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, {"x": rows()})
    seen = []
    for each in (module, eager):
        each.register_forward_pre_hook(lambda m, args, kwargs: seen.append((args, list(kwargs))), with_kwargs=True)
    call = Call(kwargs={"x": rows()})
    assert_same(run(module, call), run(eager, call), **CLOSE)
    assert seen == [((), ["x"])] * 2


@pytest.mark.composes("hooks on the dispatched module, forward and backward; global hooks")
def test_backward_hooks_run_as_in_eager(module):
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    seen = {module: [], eager: []}
    for each in (module, eager):
        each.register_full_backward_pre_hook(lambda m, grad_outs: seen[m].append(len(grad_outs)))
        each.register_full_backward_hook(
            lambda m, grad_ins, grad_outs: (seen[m].append("after"), tuple(g * 2 for g in grad_ins))[1]
        )
    assert_same(run(module, Call((rows(),))), run(eager, Call((rows(),))), **CLOSE)
    assert seen[module] == seen[eager] == [1, "after"]


@pytest.mark.composes("hooks on the dispatched module, forward and backward; global hooks")
def test_global_hooks_run_as_in_eager(module):
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(m))
    try:
        actual = run(module, Call((rows(),)))
        count = len(seen)
        expected = run(eager, Call((rows(),)))
    finally:
        handle.remove()
    assert_same(actual, expected, **CLOSE)
    assert count == len(seen) - count, "a global hook sees every submodule of an eager call"


@pytest.mark.composes("`train()`, `eval()`", "an entry each", section="The module stays the user's")
def test_train_and_eval(module):
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    module.eval(), eager.eval()
    check_as_eager(module, eager, hits=0)
    module.train(), eager.train()
    check_as_eager(module, eager, hits=1)


@pytest.mark.composes(
    "`.to(dtype)`",
    "eager, with a reason; back again: dispatched",
    section="The module stays the user's",
)
def test_to_another_dtype_and_back(module):
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, rows())
    module.double(), eager.double()
    x = rows().detach().double().requires_grad_()
    assert_same(run(module, Call((x,))), run(eager, Call((x,))), **CLOSE)
    assert stats(module).hits == 0
    module.float(), eager.float()
    check_as_eager(module, eager, hits=1)


def test_submodules_of_a_model():
    """The dispatched layers of a stack count their own calls; equal layers keep their own parameters and masks."""
    torch.manual_seed(0)
    model = nn.ModuleList([bert_layer() for _ in range(3)])
    eager = copy.deepcopy(model)
    x = torch.randn(2, 5, 24, requires_grad=True)
    for layer in model:
        add_tvm_dispatch(layer, x)

    def step(layers):
        torch.manual_seed(0)
        y = x
        for layer in layers:
            y = layer(y)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layers.parameters()])]

    torch.testing.assert_close(step(model), step(eager), rtol=1e-4, atol=1e-3)
    assert [stats(layer).hits for layer in model] == [1, 1, 1]


def test_dispatched_inside_a_dispatched_parent():
    """Adding dispatch to a parent afterwards either works or is refused; the numbers are eager's in both cases."""
    torch.manual_seed(0)
    model = nn.Sequential(MLP(6, 10, 6), nn.Linear(6, 3))
    eager = copy.deepcopy(model)
    add_tvm_dispatch(model[0], rows())
    try:
        add_tvm_dispatch(model, rows())
    except UnsupportedModule:
        pass
    assert_same(run(model, Call((rows(),))), run(eager, Call((rows(),))), **CLOSE)


def test_stats_of_a_module_never_dispatched(module):
    with pytest.raises(ValueError, match="dispatch"):
        stats(module)


def test_entries_report_compilation_and_saved_bytes(module):
    add_tvm_dispatch(module, rows())
    (entry,) = stats(module).entries
    assert entry.compile_seconds > 0
    assert entry.plan is not None


def test_adding_under_a_profiler(module):
    """Capture listens to the interpreter's calls for a moment; a running profiler goes on afterwards."""
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        add_tvm_dispatch(module, rows())
        module(rows())
    finally:
        profiler.disable()
    assert stats(module).hits == 1
    seen = {entry.code.co_name for entry in profiler.getstats() if not isinstance(entry.code, str)}
    assert "dispatch" in seen, "the profiler stopped at add_tvm_dispatch"


def test_parameters_can_be_swapped(module):
    """torch swaps the contents of two tensors only if nothing, garbage included, has a weak reference to them."""
    eager = copy.deepcopy(module)
    gc.disable()
    try:
        add_tvm_dispatch(module, rows())
        assert not [each for each in module.parameters() if weakref.getweakrefs(each)]
    finally:
        gc.enable()
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for each in (module, eager):
            each.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    check_as_eager(module, eager, hits=1)


def test_a_copy_that_takes_over_the_dict_computes_with_its_own_weights(module):
    """As learn2learn's ``clone_module`` and DataParallel's replicas do: the dispatcher comes along."""
    module.eval()
    add_tvm_dispatch(module, rows())
    cloned = type(module).__new__(type(module))
    cloned.__dict__ = module.__dict__.copy()
    cloned._modules = {name: copy.deepcopy(child) for name, child in module._modules.items()}
    with torch.no_grad():
        for parameter in cloned.parameters():
            parameter.mul_(2)
    expected = cloned.forward(rows())
    torch.testing.assert_close(cloned(rows()), expected, rtol=0, atol=0)
    assert stats(module).hits == 0
    module(rows())
    assert stats(module).hits == 1
    del module
    torch.testing.assert_close(cloned(rows()), expected, rtol=0, atol=0)
