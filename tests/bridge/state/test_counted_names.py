"""Names behind counted dictionaries: every change is seen, and nothing is looked at while no dictionary is written."""

from operator import attrgetter, itemgetter

import pytest

from bridge.state import write_counts
from bridge.state.counted_names import CountedNames, dicts_of_class, dicts_of_namespace, steady_names


class Looking:
    """``attrgetter``, counting."""

    def __init__(self, *names):
        self.get, self.looks = attrgetter(*names), 0

    def __call__(self, source):
        self.looks += 1
        return self.get(source)


class Computed:
    def __get__(self, instance, owner):
        return 1.0


class Meta(type):
    @property
    def told(cls):
        return 2.0


def family():
    class Mixin:
        scale, shift = 2.0, 3.0

    class Base:
        gain = 4.0

    class Kind(Mixin, Base):
        def forward(self):
            return self.scale

    return Mixin, Base, Kind


NAMES = "scale", "gain", "forward"


@pytest.fixture
def names():
    mixin, base, kind = family()
    found, read = CountedNames(), Looking(*NAMES)
    found.add(read, kind, attrgetter(*NAMES)(kind), dicts_of_class(kind))
    assert found.unchanged() and read.looks == 1
    return found, read, mixin, base, kind


def test_what_is_not_written_is_not_looked_at(names):
    found, read, mixin, *_ = names
    assert all(found.unchanged() for _ in range(5)) and read.looks == 1
    mixin.shift = 5.0  # somebody else's
    assert all(found.unchanged() for _ in range(5)) and read.looks == 2


CHANGES = {
    "a base's attribute": lambda mixin, base, kind: setattr(base, "gain", 5.0),
    "one that covers it": lambda mixin, base, kind: setattr(mixin, "gain", 5.0),
    "its own": lambda mixin, base, kind: setattr(kind, "scale", 5.0),
    "a method": lambda mixin, base, kind: setattr(kind, "forward", lambda self: 1),
    "one that is gone": lambda mixin, base, kind: delattr(mixin, "scale"),
    "other bases": lambda mixin, base, kind: setattr(kind, "__bases__", (family()[0], base)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_at_every_look(names, name):
    found, _, *classes = names
    CHANGES[name](*classes)
    assert not any(found.unchanged() for _ in range(3))


def test_names_of_a_file_and_a_change_that_is_undone():
    space = {"scale": 2.0, "step": 0}
    found, scale = CountedNames(), space["scale"]
    found.add(itemgetter("scale", "step"), space, space.values(), dicts_of_namespace(space))
    assert found.unchanged()
    space["scale"] = 3.0
    assert not found.unchanged()
    space["scale"] = scale
    assert found.unchanged()
    del space["step"]
    assert not found.unchanged()


def test_what_is_computed_is_left_to_others():
    class Kind(metaclass=Meta):
        computed, told, plain = Computed(), 3.0, 4.0
        by_class = classmethod(lambda cls: 1)
        static = staticmethod(lambda: 1)
        read = property(lambda self: 1)

    names = ["computed", "told", "plain", "by_class", "static", "read", "absent"]
    assert steady_names(Kind, names) == ["plain", "static", "read"]


def test_a_class_whose_class_computes_attributes_is_left_to_others():
    class Strange(type):
        def __getattribute__(cls, name):
            return super().__getattribute__(name)

    assert dicts_of_class(Strange("Kind", (), {})) is None


def test_without_counts_nothing_is_counted(names, monkeypatch):
    found, read, *_, kind = names
    monkeypatch.setattr(write_counts, "_version", lambda: None)
    assert dicts_of_class(kind) is None and dicts_of_namespace({}) is None
    assert found.unchanged() and found.unchanged() and read.looks == 3
