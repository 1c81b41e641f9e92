"""Forward hooks on modules inside a dispatched one: traced where they are functions of tensors, guarded, or refused."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, examine, lower, stats
from tests.bridge.compare import check_module
from tests.sampling import sampled


class Low(nn.Module):
    """A low-rank adapter, as a hook."""

    def __init__(self):
        super().__init__()
        self.down, self.up, self.scale = nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False), 0.5

    def __call__(self, layer, args, result):
        return result + self.scale * self.up(self.down(args[0]))


SETTINGS = {"scale": 3.0}


def doubled(layer, args):
    return (2 * args[0],)


def scaled(layer, args, result):
    return SETTINGS["scale"] * result


def with_noise(layer, args, kwargs, result):
    return result + torch.randn_like(result)


def net():
    return nn.Sequential(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)), nn.Tanh())


def hooked(**hooks):
    module = net()
    for kind, hook in hooks.items():
        getattr(module[0][0], f"register_{kind}")(hook)
    return module


def rows():
    return torch.randn(4, 6)


PURE = {
    "pre-hook": partial(hooked, forward_pre_hook=doubled),
    "hook": partial(hooked, forward_hook=scaled),
    "both": partial(hooked, forward_pre_hook=doubled, forward_hook=scaled),
}


@pytest.mark.composes("hooks on modules inside")
@pytest.mark.parametrize("make", sampled([pytest.param(make, id=name) for name, make in PURE.items()], [PURE["both"]]))
def test_a_hook_that_is_a_function_of_tensors_is_traced(make):
    check_module(make, rows)


class Collecting(nn.Module):
    """As transformers' models with ``output_hidden_states``: hooks of this name put results of layers into a list."""

    def __init__(self):
        super().__init__()
        self.layers, self.found = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5)), []

        def output_capturing_hook(layer, args, result):
            self.found.append(result)

        for layer in self.layers:
            layer.register_forward_hook(output_capturing_hook)

    def forward(self, x):
        self.found.clear()
        result = self.layers(x), *self.found
        self.found.clear()
        return result


def test_hooks_that_collect_what_the_same_call_returns_are_traced():
    module = Collecting().double()
    x, layers = rows().double(), copy.deepcopy(module.layers)
    for layer in layers:
        layer._forward_hooks.clear()
    add_tvm_dispatch(module, x)
    actual = module(x)
    expected = [layers[:count](x) for count in (3, 1, 2, 3)]
    assert stats(module).hits == 1
    torch.testing.assert_close(list(actual), expected, rtol=1e-10, atol=1e-12)


class CollectingSinceTheFirstCall(nn.Module):
    """As transformers' install theirs: in the first call that wants them, and note it on the module."""

    def __init__(self, is_refused: bool):
        super().__init__()
        self.layers, self.is_refused = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5)), is_refused

    def forward(self, x):
        found = []
        if not getattr(self, "is_installed", False):
            for layer in self.layers:
                layer.register_forward_hook(self.output_capturing_hook)
            self.is_installed = True
        self.found = found
        result = self.layers(x)
        del self.found
        return result[result > 0] if self.is_refused else result, *found

    def output_capturing_hook(self, layer, args, result):
        self.found.append(result)


def hooks_of(module):
    return [len(layer._forward_hooks) for layer in module.layers]


@pytest.mark.composes("hooks on modules inside")
def test_hooks_that_the_first_call_registers_are_registered_once():
    """Each capture runs forward: hooks that stayed would collect everything once more."""
    torch.manual_seed(0)
    module = CollectingSinceTheFirstCall(False).double()
    twin, x = copy.deepcopy(module), rows().double()
    add_tvm_dispatch(module, x)
    for given in (x, x + 1, x[:2], x):  # a miss is eager's
        torch.testing.assert_close(module(given), twin(given), rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 3
    assert hooks_of(module) == hooks_of(twin) == [1, 1, 1]


@pytest.mark.parametrize("ask", [add_tvm_dispatch, lower])
def test_hooks_that_a_refused_call_registers_are_removed(ask):
    torch.manual_seed(0)
    module = CollectingSinceTheFirstCall(True).double()
    twin, x = copy.deepcopy(module), rows().double()
    with pytest.raises(UnsupportedModule):
        ask(module, x)
    assert examine(module, x).unsupported
    assert hooks_of(module) == [0, 0, 0]
    torch.testing.assert_close(module(x), twin(x), rtol=1e-10, atol=1e-12)
    assert hooks_of(module) == [1, 1, 1]


@pytest.mark.composes("hooks on modules inside")
def test_a_hook_that_draws_follows_the_generator():
    def make():
        module = net()
        module[0][0].register_forward_hook(with_noise, with_kwargs=True)
        return module

    check_module(make, rows)


def test_a_low_rank_adapter_in_the_module_is_trained():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.adapter = nn.Linear(6, 5), Low()
            self.layer.register_forward_hook(self.adapted)

        def adapted(self, layer, args, result):
            return self.adapter(layer, args, result)

        def forward(self, x):
            return self.layer(x).tanh()

    check_module(Adapted, rows)


def changed_setting(module):
    SETTINGS["scale"] = 7.0


def removed(module):
    module[0][0]._forward_hooks.clear()


def another(module):
    removed(module)
    module[0][0].register_forward_hook(lambda layer, args, result: 5 * result)


def one_more(module):
    module[0][0].register_forward_hook(scaled)


@pytest.mark.parametrize("change", [changed_setting, removed, another, one_more])
def test_what_changes_later_is_seen(change, monkeypatch):
    monkeypatch.setitem(SETTINGS, "scale", 3.0)
    module, x = hooked(forward_hook=scaled).double(), rows().double()  # normalized rows of float32 may cancel
    twin = copy.deepcopy(module)
    add_tvm_dispatch(module, x)
    assert torch.allclose(module(x), twin(x))
    assert torch.allclose(module(x), twin(x))
    assert stats(module).hits == 2
    for each in (module, twin):
        change(each)
    assert torch.allclose(module(x), twin(x))
    assert stats(module).hits == 2
    assert len(stats(module).misses) == 1


def test_what_is_inserted_by_itself_has_its_own_numbers():
    """Equal modules share programs, but not with one that has a hook."""
    x, plain, other = rows().double(), net().double(), hooked(forward_hook=scaled).double()
    other.load_state_dict(plain.state_dict())
    wanted = [copy.deepcopy(each)(x) for each in (plain, other)]
    for each, result in zip((plain, other), wanted, strict=True):
        assert torch.allclose(add_tvm_dispatch(each, x)(x), result)


REFUSED = {
    "backward": (partial(hooked, full_backward_hook=lambda *_: None), "backward_hooks on '0.0'"),
}


@pytest.mark.composes("hooks on modules inside")
@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_others_are_refused_by_name(make, words):
    module, x = make(), rows()
    with pytest.raises(UnsupportedModule, match=words):
        add_tvm_dispatch(module, x)
    assert examine(module, x).unsupported
    assert "_compiled_call_impl" not in vars(module)


def test_a_call_that_misses_is_torchs_whole_call(monkeypatch):
    """A replaced ``nn.Module._call_impl`` runs for the dispatched module, as for the modules inside of it."""
    x, module = torch.ones(2, 3), nn.Sequential(nn.Linear(3, 3))
    add_tvm_dispatch(module, x)
    own = nn.Module._call_impl
    monkeypatch.setattr(nn.Module, "_call_impl", lambda self, *args, **kwargs: 2 * own(self, *args, **kwargs))
    assert torch.allclose(module(x), 4 * nn.functional.linear(x, module[0].weight, module[0].bias))
