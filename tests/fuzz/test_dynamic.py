"""Random modules with dynamic sizes: each is eager's at every size, or refused or missed with a reason."""

from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.export import Dim

from bridge.base.session import SESSION
from tests.fuzz.calls import Call
from tests.fuzz.dynamic import _Watch, calls_of, check_dynamic, vary
from tests.fuzz.generate import generate
from tests.fuzz.program import Program
from tests.fuzz.sizes import Variation, everywhere, variations
from tests.fuzz.verdict import Wrong
from tests.sampling import sampled

ARGUMENTS = (
    ("x", "torch.randn((3, 4), dtype=D).requires_grad_()", False),
    ("y", "torch.randn((3, 4), dtype=D)[1:]", False),
)


pytestmark = pytest.mark.slow


def program(*body: str, seed: int = 7) -> Program:
    return Program(seed, "float64", (), ARGUMENTS, body, "z")


def variation(kind: str, *body: str) -> Variation:
    sizes = ((3,), (7,), (40,), (2,), (5,))
    return Variation(program(*body), (((0, 0), (1, 0)),), (3,), sizes, (71,), kind)


@pytest.mark.parametrize("first", sampled(range(0, 8, 2), (0,)))
def test_random_modules_of_any_size(first):
    SESSION.reset("programs")
    found = {seed: check_dynamic(generate(seed)) for seed in range(first, first + 2)}
    bugs = {seed: verdict for seed, verdict in found.items() if verdict.is_bug}
    assert not bugs, f"{bugs}\npython -m tests.fuzz --dynamic --show SEED --shrink prints a program"
    if first == 0 and torch.__version__ >= "2.13":  # operators of older versions fix more sizes
        assert any(verdict.status == "same" and "5 of 6 served" in verdict.detail for verdict in found.values()), found


def test_what_is_made_of_a_size_follows_it():
    given = variation("named", "z = x[1:] * y").arguments((9,), 0)
    assert [tuple(tensor.shape) for tensor in given.args] == [(9, 4), (8, 4)]


def test_dimensions_that_always_have_the_same_size_share_a_name():
    found = variation("named", "z = x[1:] * y").dynamic_shapes()
    assert found["x"].keys() == found["y"].keys() == {0}
    assert found["x"][0].__name__ != found["y"][0].__name__
    assert (found["x"][0].min, found["x"][0].max, found["y"][0].max) == (2, 40, 39)
    assert variation("auto", "z = x * 2").dynamic_shapes() == {"x": {0: Dim.AUTO}, "y": {0: Dim.AUTO}}


def test_variations_are_of_sizes_that_arguments_spell():
    for each in variations(program("z = x * 2")):
        for group in each.groups:
            assert len({(3, 4)[position] for _, position in group}) == 1
        assert len(set(each.sizes)) == len(each.sizes) >= 4 and each.sizes[0] == each.sample


def test_the_sample_may_be_of_another_size():
    """Another size in the compiled call: accidental equalities of the sample's sizes must not be assumed."""
    found = [next(variations(program("z = x * 2", seed=seed))) for seed in range(8)]
    own = [tuple((3, 4)[group[0][1]] for group in each.groups) for each in found]
    assert 0 < sum(each.sample == size for each, size in zip(found, own, strict=True)) < 8


def test_what_eager_takes_at_one_size_only_does_not_vary():
    assert vary(program("z = x.reshape(12) * y.reshape(8).sum()")) is None
    assert vary(program("z = x * 2")) is not None


@pytest.mark.parametrize("seed", sampled(range(6), range(3)))
def test_a_wrong_number_at_another_size_is_reported(monkeypatch, seed):
    """The dispatched module divides by the sample's size."""
    written = program("z = x.sum() / x.numel()", seed=seed)

    def add(module, sample, **options):
        count = sample[0].numel()
        module.__dict__["_compiled_call_impl"] = lambda x, y: x.sum() / count

    monkeypatch.setattr("tests.fuzz.sample.add_tvm_dispatch", add)
    monkeypatch.setattr("tests.fuzz.sample._attributes", lambda module: {})
    monkeypatch.setattr("tests.fuzz.dynamic.stats", lambda module: SimpleNamespace(hits=0, entries=[]))
    monkeypatch.setattr("tests.fuzz.check.stats", lambda module: SimpleNamespace(hits=9, misses=Counter()))
    verdict = check_dynamic(written)
    changed = any(index == 0 for group in vary(written).groups for index, _ in group)
    assert verdict.status == ("wrong" if changed else "same") and ("output 0" in verdict.detail) == changed, verdict


def test_what_is_dispatched_above_the_range_is_reported():
    watch = _Watch(variation("named", "z = x * 2"))
    with mock.patch("tests.fuzz.dynamic.stats", lambda module: SimpleNamespace(hits=1, entries=[])):
        with pytest.raises(Wrong, match="above the range"):
            watch(nn.Module(), Call("at (71,)", None, None, None))


def test_calls_are_of_six_sizes():
    calls = calls_of(variation("named", "z = x * 2"))
    sizes = [call.arguments().args[0].shape[0] for call in calls]
    assert sizes[:7] == [3, 7, 40, 2, 5, 3, 71] and set(sizes[7:]) <= {3, 7, 40, 2, 5}


@pytest.mark.parametrize("seed", [50011])
def test_guards_are_sound_far_from_the_sample(seed):
    verdict = check_dynamic(generate(seed), far=True)
    assert not verdict.is_bug, f"{verdict}\npython -m tests.fuzz --everywhere --show {seed} prints the program"


@pytest.mark.parametrize("accepted", [False, True])
def test_a_guard_that_is_missing_is_reported(monkeypatch, accepted):
    """Forward, and so a guard, tells the size 4 from others; without guards that goes wrong."""
    monkeypatch.setattr("tests.fuzz.dynamic.vary", lambda program, kind: variation("dynamic", *program.body))
    if accepted:
        monkeypatch.setattr("autodiff.extents.ExtentScope.broken", lambda self, guards=None: lambda sizes: None)
    verdict = check_dynamic(program("z = x * (3 if x.shape[0] == x.shape[1] else 2)"), far=True)
    assert verdict.status == ("wrong" if accepted else "same"), verdict
    assert accepted or "compiled for x_0 != 4, called with x_0 = 4" in verdict.detail


def test_sizes_everywhere_are_the_ends_those_of_other_dimensions_and_equal_pairs():
    spots = (((0, 0),), ((0, 1),))
    two = everywhere(Variation(program("z = x * 2"), spots, (3, 4), ((3, 4), (7, 9)), (71, 4), "named"))
    assert two.sizes[0] == (3, 4) and two.outside == (81, 4)
    assert {(2, 2), (3, 3), (4, 4), (80, 80)} <= set(two.sizes) and len(set(two.sizes)) == len(two.sizes)
