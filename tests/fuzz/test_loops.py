"""Random modules with loops over time: each matches eager, or is refused (more: ``python -m tests.fuzz --loops``)."""

import ast

import pytest

from bridge.base.session import SESSION
from tests.fuzz.loops import check_loop, generate_loop

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seeds", [(5, 13), pytest.param((16, 27), marks=pytest.mark.sweep)])
def test_random_loops(seeds):
    SESSION.reset("programs")
    found = {seed: check_loop(generate_loop(seed)) for seed in seeds}
    assert not [verdict for verdict in found.values() if verdict.is_bug], found
    assert any(verdict.status == "same (a loop)" for verdict in found.values()), found


def test_the_generator_is_deterministic_and_uses_its_vocabulary():
    sources = [generate_loop(seed).source for seed in range(150)]
    assert sources == [generate_loop(seed).source for seed in range(150)] and len(set(sources)) == len(sources)
    for source in sources:
        ast.parse(source)
    text = "\n".join(sources)
    for word in ("nn.GRUCell", "nn.ModuleList", "reversed(", "unbind(", "copy_(", "torch.full(", "[::-1]", "argmax"):
        assert word in text, word
