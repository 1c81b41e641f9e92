"""A compiled call runs no Python: forward's changes outside of tensors are refused by name, and undone."""

import collections
import copy
import random
import threading
import types

import numpy as np
import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, examine, stats
from bridge.compile.runtime.build import Build
from tests.bridge import settings

pytestmark = pytest.mark.composes(
    "Python state that forward changes, Python's or numpy's randomness in it",
    "refused by name",
    section="The module stays the user's",
)

COUNT = 0
LOG = []
CACHE = {}


def _counting():
    calls = 0

    def forward(self, x):
        nonlocal calls
        calls += 1
        return self.linear(x)

    forward.calls = lambda: calls
    return forward


class Holds(nn.Module):
    total = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.state = types.SimpleNamespace(calls=0, log=[])
        self.nested = {"log": []}
        self.array = np.zeros(3)
        self.recent = collections.deque(maxlen=3)
        self.generator = random.Random(0)


def field(self, x):
    self.state.calls += 1
    return self.linear(x)


def list_in_an_object(self, x):
    self.state.log.append(1)
    return self.linear(x)


def list_in_a_dict(self, x):
    self.nested["log"].append(1)
    return self.linear(x)


def array(self, x):
    self.array[0] += 1
    return self.linear(x)


def recent(self, x):
    self.recent.append(1)
    return self.linear(x)


def global_number(self, x):
    global COUNT
    COUNT += 1
    return self.linear(x)


def global_list(self, x):
    LOG.append(1)
    return self.linear(x)


def class_number(self, x):
    type(self).total += 1
    return self.linear(x)


def other_file(self, x):
    settings.SCALE += 1
    return self.linear(x)


def activation(self, x):
    y = self.linear(x)
    self.state.last = y.detach()
    return y


STATE = {
    field: "self.state",
    array: "self.array",
    recent: "self.recent",
    global_number: "global 'COUNT'",
    class_number: "attribute 'total' of class",
    other_file: "global 'tests.bridge.settings.SCALE'",
    _counting(): "variable 'calls' around",
}


def _seen(module):
    return (
        (COUNT, list(LOG), type(module).total, settings.SCALE, vars(module.state), module.nested, list(module.recent)),
        module.array.tolist(),
    )


def refused(forward, name, sample=None, **options):
    module = type("Changes", (Holds,), {"forward": forward})()
    before = str(_seen(module))
    with pytest.raises(UnsupportedModule) as caught:
        add_tvm_dispatch(module, torch.ones(2, 6) if sample is None else sample, **options)
    assert [op.op for op in caught.value.ops if op.op.startswith(name)], str(caught.value)
    assert str(_seen(module)) == before, "tracing left its mark"
    return caught.value


@pytest.mark.parametrize("forward", list(STATE), ids=lambda forward: forward.__name__)
def test_state_that_every_call_changes_is_refused_and_put_back(forward):
    refused(forward, STATE[forward])
    if hasattr(forward, "calls"):
        assert forward.calls() == 0


@pytest.mark.parametrize(
    "forward", [list_in_an_object, list_in_a_dict, global_list, activation], ids=lambda forward: forward.__name__
)
def test_what_each_call_appends_or_sets_anew_is_done_by_hits(forward):
    kind = type("Changes", (Holds,), {"forward": forward})
    x, seen = torch.ones(2, 6), []
    for is_dispatched in (False, True):
        torch.manual_seed(0)
        module = kind()
        before = str(_seen(module))
        if is_dispatched:
            add_tvm_dispatch(module, x)
        assert str(_seen(module)) == before
        for _ in range(2):
            module(x)
        seen.append(str(_seen(module)))
        LOG.clear()
    assert seen[0] == seen[1] and stats(module).hits == 2


TOTAL = torch.zeros(4)


class Accumulates(nn.Module):
    """Writes into tensors that are not registered, one of them uncounted by torch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.sum, self.seen = torch.zeros(4), [torch.zeros(())]
        self.mean, self.variance = torch.zeros(4), torch.ones(4)

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.sum += y.sum(0)
            self.seen[0].add_(1)
            TOTAL.add_(1)
        return nn.functional.batch_norm(y, self.mean, self.variance, training=True)


def test_tensors_that_are_not_registered_are_put_back_and_then_written_as_by_eager():
    module, x = Accumulates(), torch.randn(3, 6)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, x)
    for tensor in (module.sum, *module.seen, module.mean, TOTAL):
        assert not tensor.any()
    assert bool((module.variance == 1).all())
    written = []
    for each in (module, eager):
        each(x), each(x + 1)
        written.append([tensor.clone() for tensor in (each.sum, *each.seen, each.mean, each.variance, TOTAL)])
        TOTAL.zero_()
    assert stats(module).hits == 2
    torch.testing.assert_close(*written)


def test_examine_lists_it():
    module = type("Changes", (Holds,), {"forward": field})()
    assert "self.state" in str(examine(module, torch.ones(2, 6)))
    assert module.state.calls == 0


def test_a_cache_that_is_filled_once_is_fine():
    def forward(self, x):
        if x.shape not in CACHE:
            CACHE[x.shape] = 2.0
        self.nested.setdefault("scale", 3.0)
        return self.linear(x) * CACHE[x.shape] * self.nested["scale"]

    module = type("Caches", (Holds,), {"forward": forward})()
    add_tvm_dispatch(module, torch.ones(2, 6))
    torch.testing.assert_close(module(torch.ones(2, 6)), module.forward(torch.ones(2, 6)))
    assert stats(module).hits == 1


def test_containers_stay_the_objects_that_they_were():
    """torch.export puts copies of lists and dicts into the module; their other holders would be cut off."""

    class Shares(Holds):
        def forward(self, x):
            return self.linear(x)

    module = Shares()
    before = dict(module.__dict__)
    add_tvm_dispatch(module, torch.ones(2, 6))
    for name in ("state", "nested", "array", "recent", "generator", "_parameters", "_modules", "_forward_hooks"):
        assert module.__dict__[name] is before[name], name
    assert module.nested["log"] is before["nested"]["log"]


def python_draw(self, x):
    return self.linear(x) * random.uniform(0.5, 1.0)


def layer_drop(self, x):
    return self.linear(x) if random.random() < 0.9 else x


def own_python_draw(self, x):
    return self.linear(x) * self.generator.choice([1, 2])


def numpy_draw(self, x):
    return self.linear(x) * float(np.random.rand())


DRAWS = {python_draw: "random", layer_drop: "random", own_python_draw: "random", numpy_draw: "numpy.random"}


@pytest.mark.parametrize("forward", list(DRAWS), ids=lambda forward: forward.__name__)
def test_draws_from_other_generators_are_refused_and_undone(forward):
    random.seed(3)
    np.random.seed(3)
    refusal = refused(forward, DRAWS[forward], whole=True)
    assert "not torch's" in str(refusal)
    drawn = random.random(), np.random.rand()
    random.seed(3)
    np.random.seed(3)
    assert drawn == (random.random(), np.random.rand()), "adding moved the program's own generators"


def test_such_draws_are_undone_while_machine_code_is_in_the_making():
    over = threading.Event()
    build = Build(over.wait)
    try:
        test_draws_from_other_generators_are_refused_and_undone(python_draw)
    finally:
        over.set()
    assert build.result()


def test_an_argument_that_collects_results_is_refused():
    def into_dict(self, x):
        x["out"] = self.linear(x["in"])
        return x["out"]

    def into_list(self, x):
        x.append(1)
        return self.linear(x[0])

    sample = {"in": torch.ones(2, 6)}
    refused(into_dict, "an argument", (sample,))
    assert list(sample) == ["in"]
    refused(into_list, "an argument", ([torch.ones(2, 6)],))


def test_a_forward_that_leaves_a_mode_changed_is_refused():
    def forward(self, x):
        torch.set_grad_enabled(False)
        return self.linear(x)

    refused(forward, "grad mode")
    assert torch.is_grad_enabled()
