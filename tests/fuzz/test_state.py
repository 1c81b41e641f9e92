"""Random Python state that changes between calls: each call is eager's (more: ``python -m tests.fuzz --state``)."""

import ast

import pytest

from tests.fuzz.state import check_state, generate_state


@pytest.mark.parametrize("seeds", [(0, 16), pytest.param((16, 120), marks=pytest.mark.sweep)])
def test_random_state(seeds):
    found = {seed: check_state(generate_state(seed)) for seed in range(*seeds)}
    assert not {seed: verdict for seed, verdict in found.items() if verdict.is_bug}
    assert sum(verdict.status == "same" for verdict in found.values()) > 0.7 * len(found), found


def test_the_generator_is_deterministic_and_uses_its_vocabulary():
    sources = [generate_state(seed).source for seed in range(200)]
    assert sources == [generate_state(seed).source for seed in range(200)] and len(set(sources)) == len(sources)
    for source in sources:
        ast.parse(source)
    text = "\n".join(source.partition("class Net")[2] for source in sources)
    for word in ("weakref.ref(", "ContextVar(", "lru_cache(", "MappingProxyType(", "__closure__", "# then: "):
        assert word in text, word
