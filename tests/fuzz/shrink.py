"""A smaller program with the same fault: drops parts as long as the verdict stays."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.check import check
from tests.fuzz.program import Program
from tests.fuzz.verdict import Verdict


def shrink(program: Program, verdict: Verdict, check: Callable[[Program], Verdict] = check) -> tuple[Program, Verdict]:
    """Drops results, statements and lines of ``__init__`` while the status stays; compiles once for each attempt."""
    candidates = _smaller(program)
    while (candidate := next(candidates, None)) is not None:
        try:
            found = check(candidate)
        except Exception:  # noqa: BLE001 - other lines need the dropped one
            continue
        if found.status == verdict.status and found.detail[:40] == verdict.detail[:40]:
            program, verdict = candidate, found
            candidates = _smaller(program)
    return program, verdict


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with one part less, in the order of their trials."""
    for text in dict.fromkeys(_results(program.result)):
        if len(text) < len(program.result):
            yield replace(program, result=text)
    for index in reversed(range(len(program.body))):
        yield program.without(index)
    for line in program.init:
        yield replace(program, init=tuple(other for other in program.init if other is not line))
    for line in program.before:
        yield replace(program, before=tuple(other for other in program.before if other is not line))


def _results(result: str) -> Iterator[str]:
    names = re.findall(r"\b[xv]\d+\b", result)
    yield from names
    found = re.search(r"sum\(t\.to\(D\)\.sin\(\)\.sum\(\) for t in \(((?:\w+, ?)*\w+,)\)\)", result)
    if not found:
        return
    yield found.group(0)
    summed = re.findall(r"\w+", found.group(1))
    for name in summed:
        rest = [other for other in summed if other != name]
        if rest:
            yield result.replace(found.group(1), ", ".join(rest) + ",")
