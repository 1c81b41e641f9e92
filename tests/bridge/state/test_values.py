"""Equal values: two are equal if no operator can tell them apart, whatever ``==`` says."""

import itertools
from collections import deque

import pytest
import torch

from bridge.guards.watched import alike, nested
from bridge.state.values import constant_key, same


def same_inside(now, then):
    return same(nested(now), nested(then))


NAN = float("nan")
DIFFERENT = [
    *(0, 1, 0.0, -0.0, 1.0, NAN, True, False, None, "1", b"1", 1j, complex(0.0, -0.0), complex(0.0, 0.0)),
    *(torch.float32, torch.float64, torch.device("cpu"), torch.strided, torch.channels_last),
]


@pytest.mark.parametrize("compare", [same, same_inside])
def test_values_that_an_operator_can_tell_apart_are_not_the_same(compare):
    for (i, one), (j, other) in itertools.product(enumerate(DIFFERENT), repeat=2):
        assert compare(one, other) == (i == j), (one, other)


PLAIN = {str: "a", int: 1, float: 1, complex: 1, bytes: b"a", tuple: (1,), frozenset: (1,)}


@pytest.mark.parametrize("base", PLAIN)
def test_objects_of_a_users_class_of_plain_values_are_compared_with_their_attributes(base):
    own = type("Own", (base,), {})
    one, other = own(PLAIN[base]), own(PLAIN[base])
    one.scale, other.scale = 2.0, 3.0
    for compare in (same, alike):
        assert not compare(one, other) and not compare([one], [other]) and not compare((0, one), (0, other))
    other.scale = 2.0
    assert same(one, other) and alike(one, other) and alike({"a": one}, {"a": other})


def test_their_own_comparison_is_not_asked():
    told = {"__eq__": lambda *_: True, "__hash__": lambda _: 1, "__repr__": lambda _: "1"}
    for base in (str, int, float):
        own = type("Own", (base,), told)
        assert not same(own(1), own(2)) and same(own(1), own(1))


def test_keys_are_equal_where_values_are_the_same():
    for one, other in itertools.product(DIFFERENT, repeat=2):
        keys = constant_key(one), constant_key(other)
        if None not in keys:
            assert (keys[0] == keys[1]) == same(one, other), (one, other)
    assert constant_key(NAN) == constant_key(float("nan"))


@pytest.mark.parametrize("value", [[1], {}, object(), torch.zeros(1), (1,)], ids=lambda value: type(value).__name__)
def test_what_is_no_constant_has_no_key(value):
    assert constant_key(value) is None


CONTAINERS = {
    "list": lambda x: [x, [x]],
    "tuple": lambda x: (x, (x,)),
    "deque": lambda x: deque([x]),
    "dict": lambda x: {"a": {"b": [x]}},
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_entries_are_compared_however_deep(make):
    assert same_inside(make(1.0), make(1.0)) and same_inside(make(NAN), make(float("nan")))
    assert not same_inside(make(1.0), make(1)) and not same_inside(make(0.0), make(-0.0))
    tensor = torch.zeros(2)
    assert same_inside(make(tensor), make(tensor)) and not same_inside(make(tensor), make(tensor.clone()))


def test_order_length_and_kind_count():
    assert not same_inside({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not same_inside([1], [1, 1]) and not same_inside([1], (1,)) and not same_inside({1}, {1, 2})


def test_guards_compare_lists_and_tuples_by_entries_and_other_objects_by_identity():
    assert same([1, (2.0, [3])], [1, (2.0, [3])]) and not same([1, (2.0, [3])], [1, (2.0, [4])])
    one = {"a": 1}
    assert same(one, one) and not same(one, {"a": 1}) and not same({1}, {1})
