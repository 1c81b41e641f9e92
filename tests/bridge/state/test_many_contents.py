"""Many contents: changes of any of them are seen, lists that are what they were are looked at together."""

from __future__ import annotations

import pytest

from bridge.state.many_contents import ManyContents
from bridge.state.reachable import Contents, Reached
from tests.bridge.state.test_reachable import CHANGES


def found(*values) -> list[Contents]:
    reached = Reached()
    for value in values:
        reached.add("value", value)
    return reached.contents


@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_a_change_of_one_among_others_is_seen(make, change):
    value, others = make(), [[], ["a", "b"], {"c": 1}, ["d"]]
    many = ManyContents(found(*others, value))
    assert many and many.unchanged()
    change(value)
    assert not many.unchanged()


def test_an_element_that_another_list_has_now():
    first, second = ["a", "b"], ["c"]
    many = ManyContents(found(first, second))
    second.insert(0, first.pop())
    assert [*first, *second] == ["a", "b", "c"] and not many.unchanged()


def test_equal_plain_values_are_no_change():
    held = ["".join(("a", "bc")), 2.5]
    many = ManyContents(found(held))
    held[0] = "".join(("ab", "c"))
    assert many.unchanged()
    held[0] = 2.5
    assert not many.unchanged()


def test_lists_are_not_asked_one_by_one(monkeypatch):
    contents = found(*([name] for name in "abc"))
    many, asked = ManyContents(contents), []
    monkeypatch.setattr(Contents, "unchanged", lambda each: asked.append(each) or True)
    assert many.unchanged() and not asked


def test_nothing():
    assert not ManyContents([]) and ManyContents([]).unchanged()
