"""Objects that forward makes and returns: dataclasses, mappings, distributions; new at every call, as eager's."""

import collections
import copy
import dataclasses
import itertools
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from bridge.base.torch_internals import pytree
from tests.sampling import sampled


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    hidden: Any = None
    name: str = "block"


@dataclasses.dataclass(frozen=True)
class Frozen:
    loss: torch.Tensor


@dataclasses.dataclass(slots=True)
class Slots:
    loss: torch.Tensor
    count: int = 3


class Answer:
    """Its attributes are not the arguments of ``__init__``."""

    def __init__(self, loss, *rest):
        self.both = [loss, *rest]
        self.__dict__["shown"] = "beside the property of that name"

    @property
    def shown(self):
        return "by the property"


class Items(Mapping):
    def __init__(self, **items):
        self.items_by_name = items

    def __getitem__(self, key):
        return self.items_by_name[key]

    def __iter__(self):
        return iter(self.items_by_name)

    def __len__(self):
        return len(self.items_by_name)


class Named(dict):
    def __init__(self, name, **items):
        super().__init__(**items)
        self.name = name


class ByName(collections.OrderedDict):
    """Its items are attributes as well; it counts values that are set and doubles values that are read."""

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        vars(self)["count"] = vars(self).get("count", 0) + 1

    def __getitem__(self, name):
        value = super().__getitem__(name)
        return value if value is None else value * 2

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


Pair = collections.namedtuple("Pair", "loss rest")


class Block(nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.answer = answer

    def forward(self, x):
        hidden = self.linear(x).tanh()
        return self.answer(hidden.square().sum(), hidden, self)


def marked(tensor, **attributes):
    """transformers' caches mark their tensors for torch.compile."""
    vars(tensor).update(attributes)
    return tensor


RESULTS = {
    "tensors with attributes": lambda loss, hidden, m: (
        *(marked(loss, unit="nats", order=3), hidden, Answer(marked(hidden, layer=1))),
        *(marked(hidden.view(-1), flat=True), m.linear.weight),
    ),
    "a dataclass": lambda loss, hidden, m: Output(loss, hidden),
    "with None": lambda loss, hidden, m: Output(loss),
    "nested": lambda loss, hidden, m: Output(loss, Output(loss * 2, [hidden, Frozen(hidden + 1)], "inner")),
    "frozen": lambda loss, hidden, m: Frozen(loss),
    "with slots": lambda loss, hidden, m: Slots(loss),
    "in a dict": lambda loss, hidden, m: {"out": [Output(loss), Output(loss, hidden)], "plain": hidden},
    "a view of another": lambda loss, hidden, m: (loss, Output(loss, hidden), hidden.t(), hidden),
    "a mapping": lambda loss, hidden, m: Items(loss=loss, hidden=hidden),
    "a dict of one's own": lambda loss, hidden, m: Named("n", loss=loss, hidden=hidden),
    "an object": lambda loss, hidden, m: Answer(loss, hidden, {"hidden": hidden}),
    "a distribution": lambda loss, hidden, m: torch.distributions.Normal(hidden, hidden.exp(), validate_args=False),
    "categorical": lambda loss, hidden, m: torch.distributions.Categorical(logits=hidden, validate_args=False),
    "a namedtuple": lambda loss, hidden, m: Pair(loss, None),
    "an ordered dict": lambda loss, hidden, m: collections.OrderedDict(loss=loss, none=None, hidden=hidden),
    "an ordered dict of one's own": lambda loss, hidden, m: ByName(loss=loss, none=None, hidden=hidden),
    "sizes": lambda loss, hidden, m: (loss, hidden.shape, {"size": hidden.t().size(), "all": [hidden.shape]}),
    "a parameter": lambda loss, hidden, m: Output(loss, m.linear.weight),
}


def described(value, path=""):
    """Every type, constant and tensor in a result, with its place."""
    if isinstance(value, torch.Tensor):
        return [(path, value, dict(vars(value)))]
    found = [(path, type(value))]
    if isinstance(value, dict):
        found += [each for key, item in value.items() for each in described(item, f"{path}[{key!r}]")]
    elif isinstance(value, list | tuple):
        found += [each for index, item in enumerate(value) for each in described(item, f"{path}[{index}]")]
    slots = [name for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)]
    attributes = {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}
    if len(found) == 1 and not attributes:
        return [(path, type(value), value)]
    return found + [each for name, item in attributes.items() for each in described(item, f"{path}.{name}")]


@pytest.mark.parametrize(
    "answer",
    sampled(
        [pytest.param(answer, id=name) for name, answer in RESULTS.items()],
        lambda answer: answer not in (RESULTS["nested"], RESULTS["categorical"]),
    ),
)
def test_a_result_has_eagers_types_attributes_and_tensors(answer):
    module = Block(answer)
    eager, x = copy.deepcopy(module), torch.randn(3, 4)
    add_tvm_dispatch(module, x)
    known = {Output, Frozen, Slots, Answer, Items, Named} & set(pytree.SUPPORTED_NODES)
    assert not known, "a class of the user's was registered"
    for _ in range(2):
        results = module(x), eager(x)
        mine, theirs = (described(result) for result in results)
        assert [entry[0] for entry in mine] == [entry[0] for entry in theirs]
        for (_, *one), (_, *other) in zip(mine, theirs, strict=True):
            if isinstance(other[0], torch.Tensor):
                torch.testing.assert_close(one[0], other[0])
                assert one[1] == other[1]
                assert one[0].requires_grad == other[0].requires_grad and one[0].stride() == other[0].stride()
            else:
                assert one == other
        for found in (mine, theirs):
            total = sum(entry[1].sum() for entry in found if isinstance(entry[1], torch.Tensor))
            total.backward()
        ids = [id(entry[1]) for entry in mine if isinstance(entry[1], torch.Tensor)]
        eagers = [id(entry[1]) for entry in theirs if isinstance(entry[1], torch.Tensor)]
        assert [ids.index(each) for each in ids] == [eagers.index(each) for each in eagers], "one tensor in two places"
        for one, other in zip(module.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    assert stats(module).hits == 2


def test_each_call_makes_an_object_of_its_own():
    module, x = Block(RESULTS["nested"]), torch.randn(3, 4)
    add_tvm_dispatch(module, x)
    first, second = module(x), module(x)
    assert first is not second and first.hidden is not second.hidden
    first.hidden.hidden.append("mine")
    assert len(second.hidden.hidden) == len(module(x).hidden.hidden) == 2


KEPT, LISTED = Answer(1), ["a", "b"]


def stamped(loss, hidden, m):
    made = Answer(loss)
    made.at = time.perf_counter()
    return made


def of_itself(loss, hidden, m):
    made = Answer(loss)
    made.me = made
    return made


def twice(loss, hidden, m):
    made = Answer(loss)
    return made, made


def counted(loss, hidden, m, counts=itertools.count()):  # noqa: B008 - it is to be the same in each call
    return marked(loss, count=next(counts))


def alternating(loss, hidden, m, flags=iter([True, 1] * 50)):  # noqa: B008 - it is to be the same in each call
    return hidden, next(flags)


REFUSED = {
    "a count at a tensor": (counted, "takes the next value of an iterator"),
    "the time at a tensor": (
        lambda loss, hidden, m: marked(loss, at=time.perf_counter()),
        "returns something else each time",
    ),
    "a tensor at a tensor": (lambda loss, hidden, m: marked(loss, of=hidden), "sets attributes of a tensor"),
    "another type of number": (alternating, "takes the next value of an iterator"),
    "a set of its own": (lambda loss, hidden, m: (loss, {1}), "a result of type set"),
    "one that holds a tensor": (lambda loss, hidden, m: (loss, m.holds), "is not made by the call"),
    "one that was there before": (lambda loss, hidden, m: (loss, KEPT), "is not made by the call"),
    "one of the module's": (lambda loss, hidden, m: Output(loss, m.kept), "is not made by the call"),
    "the time": (stamped, "returns something else each time"),
    "a list of the module's": (lambda loss, hidden, m: (loss, m.names), "is not made by the call"),
    "a dictionary of the module's": (
        lambda loss, hidden, m: {"of": [m.table], "loss": loss},
        "is not made by the call",
    ),
    "a list from elsewhere": (lambda loss, hidden, m: Answer(loss, LISTED), "is not made by the call"),
    "a cycle": (of_itself, "a result of type Answer"),
    "in two places": (twice, "a result of type Answer"),
    "a function in it": (lambda loss, hidden, m: Answer(loss, lambda: 3), "a result of type Answer"),
    "a generator": (lambda loss, hidden, m: (each for each in (loss, hidden)), "a result of type generator"),
}


@pytest.mark.parametrize(("answer", "words"), REFUSED.values(), ids=REFUSED)
def test_what_a_call_does_not_make_is_refused(answer, words):
    module = Block(answer)
    module.kept, module.names, module.table = Answer(1), ["a"], {"a": torch.ones(2)}
    module.holds = Answer(module.linear.weight)
    with pytest.raises(UnsupportedModule, match=words):
        add_tvm_dispatch(module, torch.randn(3, 4))
    with pytest.raises(ValueError, match="not dispatched"):
        stats(module)


def shared(loss, hidden, m):
    several, own = [hidden], {"loss": loss}
    m.aux = own
    return [several, own, {"again": several, "answer": Answer(loss, several)}], own, several


def places(value, path=""):
    """The place of each list and dictionary in a result, by identity."""
    found = [(id(value), path)] if isinstance(value, list | dict) else []
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    inside = vars(value).items() if isinstance(value, Answer) else inside
    return found + [each for key, item in inside for each in places(item, f"{path}/{key}")]


def test_a_container_in_several_places_is_one():
    modules, x = [Block(shared), Block(shared)], torch.randn(3, 4)
    modules[1].load_state_dict(modules[0].state_dict())
    add_tvm_dispatch(modules[0], x)
    for _ in range(2):
        told = []
        for module in modules:
            result = module(x)
            groups = {}
            for of, path in places((result, module.aux)):
                groups.setdefault(of, []).append(path)
            result[1]["mine"] = 1
            told.append((sorted(groups.values()), sorted(module.aux)))
        assert told[0] == told[1]
        torch.testing.assert_close(*[each(x)[2][0] for each in modules])
    assert stats(modules[0]).hits == 4
