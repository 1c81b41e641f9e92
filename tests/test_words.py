"""Docstrings, comments and pages are in the field's words: few phrases without a noun, no word that was renamed."""

import re
from functools import cache

import pytest

from tests.words import ALLOWED, OLD, PHRASES, ROOT, found


def test_prose_has_nouns_and_no_persons_for_code():
    hits = found(PHRASES)
    assert len(hits) < ALLOWED, "\n".join(map(str, hits))


@cache
def old_words():
    return found(OLD, code=True)


@pytest.mark.parametrize("new", OLD)
def test_renamed_words_are_gone(new):
    """From code as well; string literals that users read included."""
    hits = [hit for hit in old_words() if hit[2] == new]
    assert not hits, "\n".join(map(str, hits))


def test_the_glossary_has_the_table():
    table = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("## Renamed words")[2]
    words = {each.lower() for each in re.findall(r"\w+", table)}
    assert all({*new.lower().replace("-", " ").split()} <= words | {"in", "an", "a", "of", "and"} for new in OLD)
