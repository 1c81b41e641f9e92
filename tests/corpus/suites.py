"""Suites of the corpus: names of cases, and a name → its case. A suite's modules are imported at its first use."""

from __future__ import annotations

import fnmatch
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.corpus.case import Case

FUZZ_SEEDS = 2000
"""Fuzz seeds of the whole corpus; ``--count`` selects a part of them, and the same part of every other suite."""

FUZZ_SHARES = {"plain": 0.6, "dynamic": 0.2, "loops": 0.2}

OPERATOR_SAMPLES, MODULE_SAMPLES = 2, 4

_OPERATORS = "torch.testing._internal.common_methods_invocations"


@dataclass(frozen=True)
class Suite:
    """Attributes: ``maker``: module and function that make a case; ``names``: all names of a suite without seeds."""

    maker: tuple[str, str]
    names: Callable[[], Sequence[str]] | None = None
    imports: tuple[str, ...] = ()


def _zoo() -> list[str]:
    from tests.sweep.models import MODELS

    return list(MODELS)


def _moduleinfo() -> list[str]:
    from tests.corpus.swept import numbered
    from tests.sweep.moduleinfo import names

    return numbered(names(), MODULE_SAMPLES)


def _opinfo() -> list[str]:
    from tests.corpus.swept import numbered
    from tests.sweep.opinfo import names

    return numbered(names(), OPERATOR_SAMPLES)


def _special() -> list[str]:
    from tests.sweep.special.operators import cases

    return list(cases())


SUITES = {
    **{name: Suite(("tests.corpus.fuzzed", name)) for name in FUZZ_SHARES},
    "zoo": Suite(("tests.corpus.swept", "zoo"), _zoo),
    "moduleinfo": Suite(("tests.corpus.swept", "moduleinfo"), _moduleinfo, ("torch.testing._internal.common_modules",)),
    "special": Suite(("tests.corpus.swept", "special"), _special, (_OPERATORS,)),
    "opinfo": Suite(("tests.corpus.swept", "opinfo"), _opinfo, (_OPERATORS,)),
}


def chosen(only: Sequence[str] = (), count: int = FUZZ_SEEDS, seed: int = 0) -> list[str]:
    """Names of cases, ``suite/name``, suite by suite.

    Args:
        only: suites, or patterns of names such as ``zoo/bert*``; all suites if empty. A pattern applies to all cases of
            its suite.
        count: fuzz seeds of the whole corpus; of the other suites the same part is taken, evenly spread.
        seed: of the first case of each fuzz suite.

    Raises:
        ValueError: an entry of ``only`` matches no suite.
    """
    found: list[str] = []
    for wanted in only or SUITES:
        suite, _, pattern = wanted.partition("/")
        if suite not in SUITES:
            raise ValueError(f"no suite {suite!r}; there are {', '.join(SUITES)}")
        known = SUITES[suite]
        if known.names is None:
            names = [str(seed + i) for i in range(round(count * FUZZ_SHARES[suite]))]
            if pattern.isdigit():
                names = [pattern]
        else:
            names = [*known.names()]
            if not pattern and count < FUZZ_SEEDS:
                names = names[:: math.ceil(FUZZ_SEEDS / count)] if count else []
        found += [f"{suite}/{name}" for name in names if not pattern or fnmatch.fnmatchcase(name, pattern)]
    return list(dict.fromkeys(found))


def make_case(name: str) -> Case | None:
    """The case of a name, ``suite/name``; ``None`` if that sample does not exist."""
    suite, _, rest = name.partition("/")
    module, function = SUITES[suite].maker
    return getattr(importlib.import_module(module), function)(rest)


def imports_of(names: Sequence[str]) -> list[str]:
    """Modules that the processes of these cases need."""
    suites = dict.fromkeys(name.partition("/")[0] for name in names)
    found = [module for suite in suites for module in (SUITES[suite].maker[0], *SUITES[suite].imports)]
    return [*dict.fromkeys(["tests.corpus.record", *found])]
