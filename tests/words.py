"""Words of docstrings, comments and pages: files → phrases to rewrite, and old words that have a new one.

    python -m tests.words [PATH ...]    # a line for each; exit status 1 if there is one

The table of renamed words is docs/glossary.md's.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent

PHRASES = {
    "a clause as a noun": r"\bwhat\b(?! to\b)(?!['\u2019]s)(?!`|:)",
    "those without a noun": r"\bthose (that|of|which|whose|who|in|with|from|at|to|on|for|before)\b",
    "a person for code": r"\b(who|whoever|whom|nobody|somebody|everybody|anybody|no one|someone|anyone)\b",
    "a bare such": r"\bsuch\b(?! as\b)",
    "too at the end": r", too\b",
    "a bare pronoun": r"\b(these|those)[.,;:)]",
}
OLD = {
    "dry run": r"\bfirst looks?\b",
    "pre-call guard expression": r"\brecomputed numbers?\b",
    "dynamic scalars": r"\bnumber inputs?\b",
    "automatic dynamic shapes": r"\bgeneralizations?\b",
    "custom autograd Function": r"(?-i:\bown Functions?\b)",
    "signature binding": r"\bspellings? of (a|the) calls?\b",
    "layout propagation": r"\b(channels|heads) behind\b",
    "cross-entropy fusion": r"\bpicked rows\b",
    "bias epilogue": r"\bbiased products?\b",
    "saved-tensor heuristics": r"\brows again\b|\bshort chains?\b|\bkept casts?\b|\bjoined behind\b",
    "layout-agnostic graph": r"\bneutral (graph|node)s?\b",
    "lanes of a split reduction": r"\bstrands?\b",
    "in-kernel Philox draw at an offset": r"\bplaced draws?\b",
    "recomputed dropout mask": r"(?<!re)\bcomputed masks?\b",
    "static and copied graph inputs": r"\bbuffered ports?\b|\bdirect ports?\b|\btest ports\b",
    "saved tensors": r"\.captures\b|\bcaptures[=:]|\bcaptured set\b",
}
"""New word → the old one, in prose and identifiers."""

ALLOWED = 10
"""Phrases in all files, each of them read: a question, a quotation. A parameter may be called ``what``."""

_PAGES = ("CHANGELOG.md", "docs/glossary.md")
_ITSELF = ("tests/words.py",)


class Hit(tuple):
    """(file, line, kind, text)."""

    __slots__ = ()

    def __str__(self) -> str:
        file, line, kind, text = self
        return f"{file}:{line}: {kind}: {text}"


def _files(paths: Sequence[str]) -> Iterator[str]:
    listed = subprocess.run(["git", "ls-files", *paths], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    yield from (each for each in listed.split() if each.endswith((".py", ".md")) and each not in _ITSELF)


def _prose(text: str) -> dict[int, str]:
    """Line number → docstring or comment of Python source."""
    found, lines = {}, text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found |= {number: lines[number - 1] for number in range(node.lineno, node.end_lineno + 1)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            found[token.start[0]] = token.string
    return found


def _blocks_removed(text: str) -> dict[int, str]:
    """Line number → line of a page outside of its code blocks."""
    inside, found = False, {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            found[number] = line
    return found


def found(kinds: dict[str, str], paths: Sequence[str] = (), *, code: bool = False) -> list[Hit]:
    """The lines that match; ``code``: names of files and whole Python files, not their prose alone; identifiers are
    read as words."""
    hits, any_kind = [], re.compile("|".join(kinds.values()), re.I)
    for file in _files(paths):
        text = (ROOT / file).read_text(encoding="utf-8")
        if code:
            text = f"{file}\n{text}".replace("_", " ")
        if file in _PAGES or not any_kind.search(text):
            continue
        if file.endswith(".py"):
            lines = dict(enumerate(text.splitlines())) if code else _prose(text)
        else:
            lines = {number - code: line for number, line in _blocks_removed(text).items()}
        for number, line in sorted(lines.items()):
            hits += [Hit((file, number, k, line.strip())) for k, of in kinds.items() if re.search(of, line, re.I)]
    return hits


def main(paths: Sequence[str] = ()) -> int:
    hits = [*found(PHRASES, paths), *found(OLD, paths, code=True)]
    print(*hits, f"{len(hits)} to rewrite", sep="\n")
    return bool(hits)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
