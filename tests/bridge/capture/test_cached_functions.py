"""Functions that cache their results: computed by the compiled call; no run of a capture fills the user's caches."""

from __future__ import annotations

import functools
import threading
import weakref

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, examine, stats


@functools.lru_cache
def mask(count, kind):
    return torch.ones(count, count).tril() / count + (kind == "plus")


@functools.cache
def drawn(count):
    return torch.rand(count)


@functools.lru_cache(maxsize=4)
def of_tensor(x):
    return x * 2


def compatible(function):
    """A decorator as transformers has one."""
    cached = functools.lru_cache(maxsize=10)(function)

    @functools.wraps(function)
    def wrapper(*args):
        return cached(*args)

    wrapper.cached = cached
    return wrapper


class Net(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way

    def forward(self, x):
        return self.way(self, x)

    @functools.lru_cache  # noqa: B019 - as users have it
    def places(self, count):
        return torch.arange(count)[:, None].to(torch.float32)

    @compatible
    def bias(self, count):
        return torch.arange(count).float().cos()[:, None]


def test_an_element_that_a_full_cache_uses_again_is_no_kept_result():
    scale = [2.0]
    cached = functools.lru_cache(maxsize=1)(lambda index: scale[0])
    cached(1)
    module, x = Net(lambda m, x: m.linear(x) * cached(1)), torch.randn(3, 4)
    add_tvm_dispatch(module, x)
    module(x)
    assert stats(module).hits == 1
    scale[0] = 3.0
    for index in (2, 1):
        cached(index)
    for _ in range(2):
        torch.testing.assert_close(module(x), module.linear(x) * 3.0)
    assert stats(module).hits == 1


def masked(m, x):
    return mask(x.shape[0], "plus") @ (mask(x.shape[0], "plus") @ m.linear(x))


WAYS = {
    "function": masked,
    "method": lambda m, x: m.linear(x) + m.places(x.shape[0]),
    "decorated method": lambda m, x: m.linear(x) * m.bias(x.shape[0]),
}
CACHES = (mask, drawn, of_tensor, Net.places, Net.bias.cached)


@pytest.fixture(autouse=True)
def empty():
    for each in CACHES:
        each.cache_clear()


@pytest.mark.parametrize("act", [add_tvm_dispatch, examine])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_they_give_is_computed_and_the_caches_hold_eagers(way, act):
    module, x = Net(way), torch.randn(3, 4)
    act(module, x)
    assert not any(each.cache_info().currsize for each in CACHES), "a small call would be timed beside eager's"
    got = module(x)
    if act is add_tvm_dispatch:
        assert stats(module).hits == 1
    torch.testing.assert_close(got, module.forward(x))
    assert type(mask(3, "plus")) is torch.Tensor
    torch.testing.assert_close(Net(way)(x).shape, got.shape)


def written(m, x):
    return m.linear(x) + mask(4, "minus").mul_(2)[0]


REFUSED = {
    "numbers that were drawn": lambda m, x: m.linear(x) * drawn(4),
    "that forward writes": written,
    "by tensors": lambda m, x: m.linear(x) + of_tensor(x),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_cache_would_keep_besides_is_refused(words):
    module, x = Net(REFUSED[words]), torch.randn(3, 4)
    state = torch.get_rng_state()
    with pytest.raises(UnsupportedModule, match=words):
        add_tvm_dispatch(module, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert [each.cache_info().currsize for each in CACHES] == [0] * len(CACHES)


def test_a_model_of_transformers_that_caches_its_positions():
    from transformers import BeitConfig, BeitModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = BeitConfig(image_size=32, patch_size=8, use_relative_position_bias=True, **sizes)
    module, x = BeitModel(config), torch.randn(1, 3, 32, 32)
    wanted = module(x)[0]
    add_tvm_dispatch(module, x)
    torch.testing.assert_close(module(x)[0], wanted, rtol=1e-4, atol=1e-4)
    assert stats(module).hits == 1
    assert type(BeitModel(config)(x)[0]) is torch.Tensor


def around(value):
    def get():
        return value

    return get


def of_file(n):
    if n not in TABLE:
        TABLE[n] = torch.arange(n)[:, None] + 1.0
    return TABLE[n]


def of_thread(n):
    if not hasattr(THREAD, "kept"):
        THREAD.kept = torch.arange(n)[:, None] + 1.0
    return THREAD.kept


def of_function(n):
    if not hasattr(of_function, "kept"):
        of_function.kept = torch.arange(n)[:, None] + 1.0
    return of_function.kept


TABLE, THREAD = {}, threading.local()
PLACES = {
    "a dictionary": (of_file, TABLE.get, TABLE.clear),
    "a thread-local": (of_thread, lambda n: getattr(THREAD, "kept", None), THREAD.__dict__.clear),
    "a function's attribute": (
        of_function,
        lambda n: getattr(of_function, "kept", None),
        lambda: vars(of_function).pop("kept", None),
    ),
}


@pytest.mark.parametrize("act", ["add", "add without a sample", "examine"])
@pytest.mark.parametrize("place", PLACES)
def test_what_the_first_call_keeps_is_eagers_wherever_it_is_kept(place, act):
    function, kept, clear = PLACES[place]
    clear()
    module, x = Net(lambda m, x: m.linear(x) * function(x.shape[0])), torch.randn(3, 4)
    if act == "examine":
        examine(module, x)
    else:
        add_tvm_dispatch(module, *[x] * (act == "add"))
    assert kept(3) is None
    for _ in range(3):
        torch.testing.assert_close(module(x), module.linear(x) * torch.tensor([[1.0], [2.0], [3.0]]))
        assert type(kept(3)) is torch.Tensor
    assert act == "examine" or stats(module).hits == 2


def test_a_table_by_the_module_itself_is_refused():
    """The run is of a copy, which is another key."""
    table = weakref.WeakKeyDictionary()

    def way(m, x):
        if m not in table:
            table[m] = torch.ones(4)
        return m.linear(x) * table[m]

    module, x = Net(way), torch.randn(3, 4)
    with pytest.raises(UnsupportedModule, match="Python state that forward changes"):
        add_tvm_dispatch(module, x)
    assert not len(table)


READS = {
    "a global": lambda f, holder: f(0),
    "an attribute": lambda f, holder: holder.f(0),
    "a variable around another function": lambda f, holder: holder.get()(0),
    "the contents of a cell": lambda f, holder: holder.get.__closure__[0].cell_contents(0),
}
RESULTS = {"a number": (float, float), "a dictionary": (lambda n: {"v": n}, lambda found: found["v"])}


@pytest.mark.parametrize("on_miss", ["eager", "compile"])
@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_a_cache_holds_is_what_eager_finds_in_it(read, result, on_miss):
    made, number = result
    items = [made(2.0)]
    cached = functools.lru_cache(lambda index: items[index])
    holder = nn.Module()
    holder.f, holder.get = cached, around(cached)
    module = Net(lambda m, x: m.linear(x) * number(read(cached, holder)))
    x = torch.randn(3, 4)
    module.forward(x)
    add_tvm_dispatch(module, x, on_miss=on_miss)

    def changed(value):
        items[0] = made(value)

    for change in (lambda: None, lambda: changed(3.0), cached.cache_clear, lambda: changed(4.0), cached.cache_clear):
        change()
        wanted = module.forward(x)
        torch.testing.assert_close(module(x), wanted)
        torch.testing.assert_close(module(x), wanted)
