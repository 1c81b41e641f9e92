"""Two records of one case → their differences, in words; many pairs → a report."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.corpus.numbers import apart, unpack_text
from tests.corpus.record import CRASH, OK, REFUSED

Record = Mapping[str, Any]

FAILURES = ("worse status", "wrong numbers", "other form", "generator", "fewer hits")
"""Kinds of differences that fail; ``tests.corpus compare`` exits 1 for them."""
CHANGES = (
    "bits within tolerance",
    "program text",
    "names in programs",
    "captured graph only",
    "counts",
    "refusal text",
    "eager's error text",
    "fell away",
    "other status",
    "another case",
)
"""The other kinds, in the order of the report."""
COUNTS = ("entries", "kernels", "steps", "saved", "hits", "misses")
MOST_LISTED = 40


@dataclass(frozen=True)
class Difference:
    """A difference of one case: its kind, of :data:`FAILURES` or :data:`CHANGES`, and a text."""

    kind: str
    words: str

    @property
    def is_failure(self) -> bool:
        return self.kind in FAILURES


def differences(now: Record, before: Record) -> list[Difference]:
    """All differences of a case's record from an earlier one; empty if they are equal."""
    if "about" in now and "about" in before and now["about"] != before["about"]:
        return [Difference("another case", "what makes the case has changed: freeze it anew with the earlier tree")]
    return [*_of_status(now, before), *_of_values(now, before), *_of_texts(now, before), *_of_counts(now, before)]


def _of_status(now: Record, before: Record) -> Iterator[Difference]:
    one, other = now["status"], before["status"]
    said, was = now.get("reason", ""), before.get("reason", "")
    if one != other:
        words = f"{other} -> {one}: {_brief(said or was)}"
        if one == OK and other == REFUSED:
            yield Difference("fell away", _brief(was))
        elif OK in (one, other) or one == CRASH:
            yield Difference("worse status" if one in (REFUSED, CRASH) or other == OK else "other status", words)
        else:
            yield Difference("other status", words)
    elif said != was:
        kind = "refusal text" if one == REFUSED else "eager's error text"
        yield Difference(kind, f"{_brief(was)}\n      -> {_brief(said)}")


def _of_values(now: Record, before: Record) -> Iterator[Difference]:
    """Differing values; a refused case has eager's values, which a dispatch must now match."""
    if "values" not in now or "values" not in before:
        return
    mine, its = now["values"], before["values"]
    if mine.keys() != its.keys():
        names = ", ".join(sorted(mine.keys() ^ its.keys())[:5])
        yield Difference("wrong numbers", f"results that only one of them has: {names}")
    within = []
    for name in (name for name in its if name in mine):
        found = apart(mine[name], its[name])
        if found is None:
            continue
        words, wrong = f"{name}: {found[0]}", found[1]
        if name.endswith(("generator", "generator at the end")):
            yield Difference("generator", f"{name}: another state")
        elif wrong:
            yield Difference("wrong numbers", words)
        else:
            within.append(words)
    if within:
        more = f"; {len(within)} in all" if len(within) > 3 else ""
        yield Difference("bits within tolerance", "; ".join(within[:3]) + more)
    if now["status"] == before["status"] == OK and now["form"]["sha"] != before["form"]["sha"]:
        yield Difference("other form", " | ".join(_changed(unpack_text(before["form"]), unpack_text(now["form"]))))


def _of_texts(now: Record, before: Record) -> Iterator[Difference]:
    mine, its = now.get("texts"), before.get("texts")
    if mine is None or its is None:
        return
    names = [name for name in {**its, **mine} if mine.get(name, {}).get("sha") != its.get(name, {}).get("sha")]
    programs = [name for name in names if "captured" not in name]
    if programs:
        pairs = [[unpack_text(texts[name]) for texts in (mine, its) if name in texts] for name in programs]
        only_names = all(len(pair) == 2 and _numbered(pair[0]) == _numbered(pair[1]) for pair in pairs)
        yield Difference("names in programs" if only_names else "program text", ", ".join(programs))
    elif names:
        yield Difference("captured graph only", ", ".join(names))


def _numbered(program: str) -> str:
    """A program's text with numbered names of values, in the order of their first use."""
    numbers: dict[str, str] = {}

    def renamed(words: str) -> str:
        return re.sub(r"[A-Za-z_]\w*", lambda found: numbers.setdefault(found[0], f"%{len(numbers)}"), words)

    steps, _, rest = program.partition("\nresults ")
    results, _, others = rest.partition("\n")
    told: list[str] = []
    for line in steps.splitlines():
        made, equals, step = line.partition("  # ")[0].partition(" = ")
        operation, _, operands = step.partition("(")
        read, _, constants = operands.partition(";")
        told += [operation, renamed(read), constants, renamed(made) if equals else line]
    return "\n".join([*told, renamed(results), others])


def _of_counts(now: Record, before: Record) -> Iterator[Difference]:
    if now["status"] != OK or before["status"] != OK:
        return
    changed = [f"{name} {before[name]} -> {now[name]}" for name in COUNTS if now[name] != before[name]]
    if changed:
        fewer = now["hits"] < before["hits"]
        yield Difference("fewer hits" if fewer else "counts", "; ".join(changed))


def _brief(reason: str) -> str:
    """The line of a refusal that names the refused part."""
    lines = [line.strip() for line in reason.splitlines()] or [""]
    return (lines[1] if len(lines) > 1 and "cannot be dispatched" in lines[0] else lines[0])[:200]


def _changed(before: str, now: str) -> list[str]:
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), lineterm="", n=0)
    return [line[:200] for line in lines if not line.startswith(("---", "+++", "@@"))][:4]


def text_diff(now: Record, before: Record) -> str:
    """A unified diff of all texts of a case: reason, form, programs, captured graphs."""
    pairs = [("reason", now.get("reason", ""), before.get("reason", ""))]
    mine, its = _texts(now), _texts(before)
    for name in {**its, **mine}:
        pairs.append((name, *(unpack_text(texts[name]) if name in texts else "" for texts in (mine, its))))
    parts = []
    for name, one, other in pairs:
        titles = f"before: {name}", f"now: {name}"
        parts.extend(difflib.unified_diff(other.splitlines(), one.splitlines(), *titles, lineterm=""))
    return "\n".join(parts)


def _texts(record: Record) -> Mapping[str, Any]:
    return {**({"form": record["form"]} if "form" in record else {}), **record.get("texts", {})}


@dataclass
class Report:
    """The result of the compared cases; ``print`` it."""

    equal: int = 0
    cases: int = 0
    found: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    forwards: Counter[tuple[int, int]] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, now: Record, before: Record) -> list[Difference]:
        """Adds a pair; returns its differences."""
        found = differences(now, before)
        self.cases += 1
        self.equal += not found
        self.statuses[now["status"]] += 1
        for each in found:
            self.found.setdefault(each.kind, []).append((now["case"], each.words))
        counts = before.get("forwards"), now.get("forwards")
        if None not in counts:
            self.forwards[counts] += 1
        if "worked" in before and "worked" in now:
            for place, record in enumerate((before, now)):
                self.seconds[place] += record["worked"]
        return found

    @property
    def failed(self) -> bool:
        return any(kind in self.found for kind in FAILURES)

    def __str__(self) -> str:
        lines = []
        for kind in (*CHANGES, *FAILURES):
            pairs = self.found.get(kind, [])
            if pairs:
                cases = len({case for case, _ in pairs})
                lines.append(f"{'FAILURE: ' * (kind in FAILURES)}{kind}: {cases} cases")
                most = len(pairs) if kind in FAILURES else MOST_LISTED
                lines += [f"  {case}: {words}" for case, words in pairs[:most]]
                lines += [f"  and {len(pairs) - most} more"] * (len(pairs) > most)
        moved = {counts: number for counts, number in self.forwards.items() if counts[0] != counts[1]}
        total = [sum(counts[place] * number for counts, number in self.forwards.items()) for place in (0, 1)]
        lines.append(f"runs of forward while dispatch is added: {total[0]} -> {total[1]}")
        lines += [
            f"  {before} -> {now}: {number} cases"
            for (before, now), number in sorted(moved.items(), key=lambda item: -item[1])
        ]
        statuses = ", ".join(f"{number} {status}" for status, number in self.statuses.most_common())
        lines.append(f"{self.cases} cases ({statuses}), {self.equal} equal, {self.cases - self.equal} differ")
        lines.append(f"processor seconds: {self.seconds[0]:.0f} -> {self.seconds[1]:.0f}")
        return "\n".join(lines)
