"""The composition table: ``composes`` markers on tests → ``docs/composes.md``.

A test that backs a row of the table carries the row's name; one of them also carries the result and the section:

    @pytest.mark.composes("`pickle`, `torch.save`", "loads without this package", section="The module stays the user's")
    def test_pickle(): ...

    @pytest.mark.composes("`pickle`, `torch.save`")
    def test_torch_save_and_load(): ...

``pytestmark = pytest.mark.composes("…")`` stands for all tests of a file. Markers are read from source text, so nothing
is imported; a row that no test or more than one test describes is an error.

    python -m tests.composes    # writes docs/composes.md
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "composes.md"

SECTIONS = (
    "The module stays the user's",
    "Guards",
    '`on_miss="compile"`',
    "Precision",
    "Autograd, memory, threads",
    "Distributed",
    '`torch.compile(model, backend="tvm_dispatch")`',
    "HuggingFace",
)
"""In the order of the page; inside a section, rows stand in the order of files and lines."""

HEAD = """\
# Composition

Written by `python -m tests.composes` from the `composes` markers on tests: the tests in a row's last
column assert it. Do not edit; mark a test instead ([how](contributing.md#a-row-of-the-composition-table)).
"""


@dataclass
class Row:
    """One row: a feature used with a dispatched module, the result, and the tests (file, function) of it."""

    name: str
    happens: str = ""
    section: str = ""
    tests: list[tuple[Path, str]] = field(default_factory=list)


def rows(files: Sequence[Path] | None = None) -> list[Row]:
    """All rows that the markers in ``files`` (by default every ``test_*.py`` of this folder) make, in page order.

    Raises:
        ValueError: a marker with other arguments than literals, a row described twice or never, an unknown section.
    """
    found: dict[str, Row] = {}
    for path in sorted(TESTS.rglob("test_*.py")) if files is None else files:
        for test, marker in _markers(ast.parse(path.read_text(encoding="utf-8"))):
            _add(found, path, test, marker)
    for row in found.values():
        if row.section not in SECTIONS:
            raise ValueError(f"composes({row.name!r}): section {row.section!r}, wanted one of {SECTIONS}")
    return sorted(found.values(), key=lambda row: SECTIONS.index(row.section))


def _add(found: dict[str, Row], path: Path, test: str, marker: ast.Call) -> None:
    """Enters one marker; the one with two arguments describes its row."""
    name, *happens = (ast.literal_eval(argument) for argument in marker.args)
    keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in marker.keywords}
    row = found.setdefault(name, Row(name))
    row.tests.append((path, test))
    if happens:
        if row.happens:
            raise ValueError(f"composes({name!r}) is described twice: {row.happens!r}, {happens[0]!r} in {path.name}")
        row.happens, row.section = happens[0], keywords.get("section", "")


def _markers(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """``(test name, marker)`` in the order of the file; the name is empty for a ``pytestmark``."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marks = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
            yield from (("", mark) for mark in marks if _composes(mark))
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield from ((node.name, mark) for mark in node.decorator_list if _composes(mark))


def _composes(mark: ast.expr) -> bool:
    return isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.composes"


def page() -> str:
    """The whole page as Markdown."""
    parts = [HEAD]
    found = rows()
    for section in SECTIONS:
        parts.append(f"\n## {section}\n\n| with | result | tests |\n|---|---|---|\n")
        parts += [f"| {row.name} | {row.happens} | {_links(row)} |\n" for row in found if row.section == section]
    return "".join(parts)


def _links(row: Row) -> str:
    """The tests of a row, file by file, each file a link."""
    files: dict[Path, list[str]] = {}
    for path, test in row.tests:
        files.setdefault(path, []).append(test)
    cells = []
    for path, tests in files.items():
        inside = path.relative_to(TESTS).with_suffix("").as_posix().removeprefix("bridge/")
        link = f"[{inside}](../tests/{path.relative_to(TESTS).as_posix()})"
        cells.append(": ".join([link, ", ".join(f"`{test}`" for test in tests)]) if any(tests) else link)
    return "; ".join(cells)


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
