"""Fixtures of the tests of compiled draws."""

from __future__ import annotations

import pytest

from bridge.rng import cpu as mt19937


@pytest.fixture(scope="session")
def kernels() -> mt19937.Kernels:
    """The compiled draws, where this build of torch draws by the rule that they follow."""
    found = mt19937.compiled()
    if found is None:
        pytest.skip("this build of torch draws Bernoulli masks by another rule")
    return found
