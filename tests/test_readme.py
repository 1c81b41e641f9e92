"""README and docs are true: links and paths exist, examples run, generated parts are up to date, sizes hold."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

import bridge
from benchmarks.__main__ import scripts
from benchmarks.results import FOLDER, Results
from benchmarks.tables import FORMS, PAGES, markdown, written
from bridge.compile.pipeline import PASSES
from tests import reference

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "notebooks" / "README.md"])
YOURS = {"idempotent.py"}
"""Files that the reader makes."""
TOP = "bridge autodiff partition tests docs benchmarks examples notebooks".split()


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def code_blocks(path: Path) -> list[str]:
    """The Python blocks at the margin of a page."""
    return re.findall(r"^```python\n(.*?)^```$", text_of(path), re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", text_of(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_paths_and_modules_exist(path):
    text = re.sub(r"^ *```.*?^ *```$", "", text_of(path), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://")):
            file, _, anchor = target.partition("#")
            linked = (path.parent / file).resolve() if file else path
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target
    for named in re.findall(rf"`((?:{'|'.join(TOP)})/[\w./]*)`", text):
        assert (ROOT / named).exists(), named
    short = {file.name for top in TOP for file in (ROOT / top).rglob("*.py")}
    assert {*re.findall(r"`(\w+\.py)`", text)} - short <= YOURS, "a file that is named without its folder"
    for module in re.findall(rf"python -m ((?:{'|'.join(TOP)})[\w.]*)", text_of(path)):
        assert importlib.util.find_spec(module), module
    targets = re.findall(r"^([\w-]+):", text_of(ROOT / "Makefile"), re.MULTILINE)
    assert set(re.findall(r"(?:`|^    )make ([\w-]+)", text, re.MULTILINE)) <= set(targets)


def rows_of(page: str, name: str) -> list[list[str]]:
    """The cells of the table between two markers of a page, without its head."""
    table = re.search(rf"<!-- {name}: .*?\n(.*?)<!-- end of {name} -->", text_of(ROOT / "docs" / page), re.DOTALL)[1]
    return [[cell.strip().strip("`") for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[2:]]


def stages() -> list[tuple[str, str]]:
    """The stages of the lowering pipeline, from its source: names, and the passes that make them."""
    tree, texts, found = ast.parse(text_of(ROOT / "bridge" / "lowering" / "pipeline.py")), {}, []
    nodes = [each for each in ast.walk(tree) if isinstance(each, ast.Assign | ast.Call)]
    for node in sorted(nodes, key=lambda each: (each.lineno, each.col_offset)):
        if isinstance(node, ast.Assign):
            texts[ast.unparse(node.targets[0])] = node.value
        elif ast.unparse(node.func) in ("lowered.run", "Stage"):
            name, made_by = (texts.get(ast.unparse(each), each) for each in node.args[:2])
            first = made_by.values[0] if isinstance(made_by, ast.JoinedStr) else made_by
            found.append((name.value, first.value.removesuffix(" (")))
    return found


def test_the_tables_of_passes_are_those_of_the_pipelines():
    assert [tuple(row[:2]) for row in rows_of("architecture.md", "stages")] == stages()
    assert [row[0] for row in rows_of("compiler.md", "passes")] == [each.__name__ for each in PASSES]


SIZES = {"architecture.md": 12_000, "numbers.md": 16_000, "CHANGELOG.md": 10_000, "limits.md": 25_000}


@pytest.mark.parametrize("page", SIZES)
def test_pages_are_short(page):
    path = ROOT / page if (ROOT / page).exists() else ROOT / "docs" / page
    assert len(path.read_bytes()) < SIZES[page]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) < 8000


def test_every_page_is_reached_from_the_readme():
    reached, new = set(), {ROOT / "README.md"}
    while new:
        page = new.pop()
        reached.add(page)
        linked = {(page.parent / file).resolve() for file in re.findall(r"\]\(([\w./]+\.md)", text_of(page))}
        new |= linked - reached
    assert set((ROOT / "docs").glob("*.md")) <= reached


def test_the_example_of_the_readme_trains():
    names: dict = {}
    exec(compile(code_blocks(ROOT / "README.md")[0], "README.md", "exec"), names)
    found = names["stats"](names["model"])
    assert (found.hits, sum(found.misses.values())) == (10, 0)


RUN = ["seeing_inside.md", "first_steps.md", "sizes.md", "draws.md", "torch_compile.md"]


@pytest.mark.parametrize("page", RUN)
def test_the_examples_of_a_page_run(page):
    names: dict = {}
    for block in code_blocks(ROOT / "docs" / page):
        exec(compile(block, page, "exec"), names)


@pytest.mark.parametrize("page", ["trainers.md"])
def test_the_examples_of_a_page_name_what_there_is(page):
    """Examples with a trainer around them: they are Python, and the names that they import exist."""
    for block in code_blocks(ROOT / "docs" / page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("bridge"):
                assert {each.name for each in node.names} <= {*importlib.import_module(node.module).__all__}


def test_every_page_with_python_is_run():
    """But for walk-throughs, which have a test of their own, and the reference, which is generated."""
    with_python = {path.name for path in DOCUMENTS if re.search(r"^ *```python$", text_of(path), re.MULTILINE)}
    assert with_python == {"README.md", *RUN, "trainers.md", "contributing.md", "reference.md"}


def test_the_reference_is_that_of_the_docstrings():
    assert text_of(reference.PAGE) == reference.page(), "python -m tests.reference"
    names = [name for sources in reference.PUBLIC.values() for each in sources.values() for name in each.split()]
    assert {*bridge.__all__} - {"__version__"} <= {*names}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_tables_are_those_of_the_results(path):
    assert "<!-- table: " in text_of(path)
    assert written(text_of(path)) == text_of(path), "python -m benchmarks.tables"


def test_results_come_back_as_they_were_saved(tmp_path):
    results = Results.of("train_blocks", "python -m benchmarks.train_blocks", [{"block": "one", "eager_ms": 2.0}])
    results.save(tmp_path / "one.json")
    assert Results.load(tmp_path / "one.json") == results
    assert {Results.load(path).benchmark for path in FOLDER.glob("*.json")} <= scripts().keys()


def test_a_table_leaves_out_what_was_not_measured():
    rows = [{"block": "one", "eager_ms": 2.0, "ours_ms": 1.0}, {"block": "two", "eager_ms": 2.0, "ours_ms": None}]
    table = markdown("short", Results("train_blocks", "command", "machine", "versions", rows)).splitlines()
    assert table[0] == "| block | eager ms | ours ms | ours / eager |"
    assert table[2:4] == ["| one | 2.00 | 1.00 | **0.50** |", "| two | 2.00 | - | - |"]
    assert set(FORMS) >= {form for page in PAGES for form in re.findall(r"<!-- table: (\w+)", text_of(page))}


def test_sizes():
    """A GPU machine takes 64 MiB a call: TVM's library (55) and the tree in one call; notebooks stay light to show."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    sizes = {name: (ROOT / name).stat().st_size for name in listed.stdout.split("\0") if (ROOT / name).is_file()}
    assert sum(sizes.values()) < 8 * 2**20
    assert sum(size for name, size in sizes.items() if name.endswith(".ipynb")) < 300_000
