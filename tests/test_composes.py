"""The composition table: the page equals the markers' rows, and markers that contradict each other are errors."""

from __future__ import annotations

import pytest

from tests.composes import PAGE, page, rows


def test_the_page_is_what_the_markers_say():
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.composes"


def test_rows_name_what_happens_and_tests():
    assert len(rows()) > 60
    assert all(row.happens and row.tests for row in rows())


def written(folder, *markers):
    path = folder / "test_one.py"
    path.write_text("".join(f"@pytest.mark.composes({each})\ndef test_{i}(): ...\n" for i, each in enumerate(markers)))
    return [path]


def test_tests_of_one_row_are_gathered(tmp_path):
    files = written(tmp_path, '"b"', '"a", "works", section="Guards"', '"b", "fails", section="Precision"')
    assert [(row.name, row.happens, [test for _, test in row.tests]) for row in rows(files)] == [
        ("a", "works", ["test_1"]),
        ("b", "fails", ["test_0", "test_2"]),
    ]


def test_a_mark_of_a_file_stands_for_its_tests(tmp_path):
    path = tmp_path / "test_one.py"
    path.write_text('pytestmark = [pytest.mark.slow, pytest.mark.composes("a", "works", section="Guards")]\n')
    assert rows([path])[0].tests == [(path, "")]


CONTRADICTIONS = {
    "described twice": ('"a", "works", section="Guards"', '"a", "fails", section="Guards"'),
    "section ''": ('"a"',),
    "section 'Elsewhere'": ('"a", "works", section="Elsewhere"',),
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_contradictions_are_errors(tmp_path, message):
    with pytest.raises(ValueError, match=message):
        rows(written(tmp_path, *CONTRADICTIONS[message]))
