"""Kinds of samples, signature binding of calls, and a dispatch that learns the first call."""

import collections
import copy
import enum
import sys

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, examine, lower, stats
from bridge.capture import normalize_sample
from partition import MinCut
from tests.bridge.compare import Call, assert_same, run
from tests.device import DEVICE

pytestmark = pytest.mark.usefixtures("lowered_once")

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
Batch = collections.namedtuple("Batch", "x mask")


def tensor(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)).requires_grad_()


X, MASK = tensor(0), tensor(1)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 3))

    def forward(self, x, mask):
        return torch.tanh(x * self.weight) * mask


class Optional(Masked):
    def forward(self, x, mask=None, power: int = 1, *, flip=False):
        y = torch.tanh(x * self.weight) * power
        y = y.flip(0) if flip else y
        return y if mask is None else y * mask


class OneDict(Masked):
    def forward(self, batch):
        return torch.tanh(batch["x"] * self.weight) * batch["mask"]


class OneSequence(Masked):
    def forward(self, batch):
        return torch.tanh(batch[0] * self.weight) * batch[1]


class Anything(Masked):
    def forward(self, *args, **kwargs):
        x, mask = (*args, *kwargs.values())
        return torch.tanh(x * self.weight) * mask


def encoding() -> collections.abc.Mapping:
    from transformers import BatchEncoding

    return BatchEncoding({"x": X, "mask": MASK})


@pytest.mark.parametrize(
    ("kind", "sample", "call"),
    [
        (Masked, [X, MASK], Call((X, MASK))),
        (Masked, Batch(X, MASK), Call((X, MASK))),
        (Masked, collections.OrderedDict(x=X, mask=MASK), Call((), {"x": X, "mask": MASK})),
        (Masked, collections.UserDict(x=X, mask=MASK), Call((), {"x": X, "mask": MASK})),
        (Masked, encoding, Call((), {"x": X, "mask": MASK})),
        (OneDict, {"x": X, "mask": MASK}, Call(({"x": X, "mask": MASK},))),
        (OneSequence, [X, MASK], Call(([X, MASK],))),
        (OneSequence, Batch(X, MASK), Call((Batch(X, MASK),))),
        (Anything, {"x": X, "mask": MASK}, Call((), {"x": X, "mask": MASK})),
    ],
    ids=["list", "namedtuple", "OrderedDict", "UserDict", "BatchEncoding", "one dict", "one list", "one tuple", "**"],
)
def test_a_sample_is_what_forward_takes(kind, sample, call):
    sample = sample() if callable(sample) else sample
    module = kind()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, sample)
    assert_same(run(module, call), run(eager, call), **CLOSE)
    assert stats(module).hits == 1, stats(module)
    assert examine(module, sample).percentage == 100
    assert lower(eager, sample).check().ok


@pytest.mark.parametrize(
    ("kind", "sample", "words"),
    [
        (Optional, [X, MASK], r"sample_input=tuple\(sample\).*sample_input=\(sample,\)"),
        (Optional, Batch(X, MASK), r"Batch of 2.*sample_input=tuple\(sample\).*sample_input=\(sample,\)"),
        (Optional, {"x": X, "masc": MASK}, r"masc.*sample_input=\(sample,\)"),
        (nn.Tanh, 3.0, "wanted a tensor.*got float"),
    ],
)
def test_a_sample_that_can_be_two_calls_is_refused_with_both_spellings(kind, sample, words):
    with pytest.raises(TypeError, match=words):
        add_tvm_dispatch(kind(), sample)


def test_keyword_arguments_that_only_a_variadic_forward_takes_are_ambiguous_beside_one_argument():
    class Either(nn.Module):
        def forward(self, batch=None, **options):
            return batch

    with pytest.raises(TypeError, match=r"sample_kwargs=dict\(sample\).*sample_input=\(sample,\)"):
        normalize_sample(Either(), {"x": X}, None)
    assert normalize_sample(Either(), {"batch": X}, None) == ((), {"batch": X})


SPELLINGS = {
    "position": Call((X, MASK)),
    "name": Call((), {"mask": MASK, "x": X}),
    "both": Call((X,), {"mask": MASK}),
    "a default spelled out": Call((X, MASK, 1), {"flip": False}),
}


@pytest.mark.parametrize("sample", SPELLINGS)
def test_a_call_is_matched_however_it_is_spelled(sample):
    """Each binding of the arguments twice: the second time on the quick path."""
    module = Optional()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, SPELLINGS[sample].args, sample_kwargs=SPELLINGS[sample].kwargs)
    (guard,) = [entry.guard for entry in stats(module).entries]
    for call in SPELLINGS.values():
        for _ in range(2):
            assert_same(run(module, call), run(eager, call), **CLOSE)
        assert guard.check(module, call.args, call.kwargs) is not None
    assert stats(module).hits == 2 * len(SPELLINGS) and not stats(module).misses
    others = [Call((X, MASK, 2)), Call((X, MASK), {"flip": True}), Call((X,)), Call((X, None)), Call((X, MASK, True))]
    for call in others:
        assert_same(run(module, call), run(eager, call), rtol=0, atol=0)
    assert stats(module).hits == 2 * len(SPELLINGS) and stats(module).misses.total() == len(others)
    for bad in (Call((X, MASK), {"x": X}), Call(), Call((X, MASK), {"unknown": 1})):
        with pytest.raises(TypeError):
            bad(module)


def test_a_variadic_forward_is_matched_as_it_is_spelled():
    module = add_tvm_dispatch(Anything(), (X, MASK))
    module(X, mask=MASK)
    assert not stats(module).hits
    module(X, MASK)
    assert stats(module).hits == 1


def test_hooks_and_eager_see_the_call_as_it_is_spelled():
    module = add_tvm_dispatch(Optional(), (X, MASK))
    seen = []
    module.register_forward_pre_hook(lambda _, args, kwargs: seen.append((len(args), *kwargs)), with_kwargs=True)
    module(X, mask=MASK)
    module(x=X)
    assert seen == [(1, "mask"), (0, "x")]
    assert stats(module).hits == 1


@pytest.mark.parametrize("on_miss", [None, "eager", "compile", "error"])
def test_without_a_sample_the_first_call_is_learned(on_miss):
    module = Optional()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, **({"on_miss": on_miss} if on_miss else {}))
    assert stats(module).entries == []
    for call in (Call((X, MASK)), Call((X,), {"mask": MASK})):
        assert_same(run(module, call), run(eager, call), **CLOSE)
    assert stats(module).hits == 2
    if on_miss == "error":
        with pytest.raises(RuntimeError, match="Optional"):
            module(X)
    else:
        module(X)
        assert stats(module).hits == (2 if on_miss == "eager" else 3)


def test_a_first_call_that_gives_lazy_parameters_their_shapes_is_eagers():
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Dropout(0.3)).to(DEVICE))
    eager, module = made
    add_tvm_dispatch(module)
    for _ in range(3):
        assert_same(run(module, Call((X,))), run(eager, Call((X,))), **CLOSE)
    assert stats(module).hits == 2
    assert dict(stats(module).misses) == {"lazy parameters: this call gives them their shapes": 1}


def test_a_first_call_that_is_unsupported_runs_eager_and_says_so(caplog):
    class Sorted(nn.Module):
        def forward(self, x):
            return x * (x.T @ x).to_sparse().to_dense().sum(0)

    module = add_tvm_dispatch(Sorted())
    for _ in range(2):
        torch.testing.assert_close(module(X), Sorted()(X), rtol=0, atol=0)
    (record,) = [each for each in caplog.records if "runs eager from now on" in each.getMessage()]
    assert "_to_sparse" in record.getMessage()
    strict = add_tvm_dispatch(Sorted(), on_miss="error")
    with pytest.raises(UnsupportedModule, match="_to_sparse"):
        strict(X)


def test_keyword_arguments_alone_are_a_sample():
    module = add_tvm_dispatch(Masked(), sample_kwargs={"x": X, "mask": MASK})
    module(X, MASK)
    assert stats(module).hits == 1
    with pytest.raises(TypeError, match="dynamic_shapes"):
        add_tvm_dispatch(Masked(), dynamic_shapes={"x": {0: 4}})


def test_stats_of_a_module_without_dispatch_names_what_is_dispatched_inside():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh()))
    with pytest.raises(ValueError, match="not dispatched: call add_tvm_dispatch"):
        stats(model)
    add_tvm_dispatch(model[1][0], X)
    with pytest.raises(ValueError, match=r"inside it that are: 1\.0; as in stats\(module.get_submodule\('1\.0'\)\)"):
        stats(model)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"sample_kwargs": [1]}, TypeError, "sample_kwargs: wanted a mapping of keyword arguments, got list"),
        ({"freeze": "yes"}, TypeError, "freeze: wanted True or False, got 'yes'"),
        ({"whole": 0}, TypeError, "whole: wanted True or False, got 0"),
        ({"partition": MinCut}, TypeError, "a partition strategy is a name or an object with a choose method"),
        ({"target": "gpu"}, ValueError, "target: wanted .*, got 'gpu', none of TVM's"),
    ],
)
def test_an_option_of_another_kind_is_named(options, error, words):
    with pytest.raises(error, match=words):
        add_tvm_dispatch(nn.Linear(6, 4), torch.randn(3, 6), **options)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes since Python 3.11")
def test_a_misspelled_keyword_is_told():
    with pytest.raises(TypeError) as caught:
        add_tvm_dispatch(nn.Linear(6, 4), {"inputs": torch.randn(3, 6)})
    assert any("name no parameters of forward" in note for note in caught.value.__notes__)


class Counting(nn.Module):
    """Its own ``__call__`` fills in a missing argument of forward, as PyTorch Geometric's aggregations do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def __call__(self, x, size=None):
        return super().__call__(x, size=2 * x.shape[0] if size is None else size)

    def forward(self, x, size=None):
        return self.linear(x).sum(0) + x.new_ones(size, 3)


def test_a_sample_is_what_the_module_is_called_with():
    module, x = Counting(), torch.randn(2, 4)
    assert not examine(module, x).unsupported
    add_tvm_dispatch(module, x)
    torch.testing.assert_close(module(x), module.forward(x, 4))
    assert (stats(module).hits, stats(module).misses.total()) == (1, 0)
    add_tvm_dispatch(module, (x, 5))
    torch.testing.assert_close(module(x, 5), module.forward(x, 5))
    assert stats(module).hits == 2


class Kind(enum.Enum):
    PLAIN, SCALED = 1, {"by": 2.0}


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, kind=Kind.PLAIN, dtype=torch.float32):
        y = self.linear(x)
        return (y if kind is Kind.PLAIN else y * kind.value["by"]).to(dtype)


def test_enums_and_dtypes_are_conditions(monkeypatch):
    """Also values that forward reads from an enum's member, which may change."""
    module = Chooses().to(DEVICE)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, (X, Kind.SCALED), on_miss="compile")
    calls = [(Kind.SCALED,), (Kind.PLAIN,), (Kind.SCALED, torch.float64), (Kind.SCALED,), (Kind.SCALED,)]
    for place, call in enumerate(calls):
        if place == 4:
            monkeypatch.setitem(Kind.SCALED.value, "by", 3.0)
        torch.testing.assert_close(module(X, *call), eager(X, *call), **CLOSE)
    assert stats(module).hits == 5 and len(stats(module).entries) == 4
    with pytest.raises(UnsupportedModule, match="not a tensor, number"):
        add_tvm_dispatch(module, (X, Kind))
