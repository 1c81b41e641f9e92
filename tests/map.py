"""Map from product files to tests: ``python -m tests.map bridge/capture/twin.py ...`` -> test files, nearest first.

In this order: tests that import a name from the file (also through a package that offers the name); tests that a quirk
of the file names; tests of the mirrored folder that share a word with the file's name; tests whose helpers import it;
tests that import a module which imports it; the whole folder. ``--run`` runs the nearest kind with pytest.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT, TESTS = ("bridge", "autodiff", "partition", "benchmarks"), "tests"
_ENOUGH, _LEAST = 2, 4
"""Nearer tests after which no further ones are listed; letters that two words share."""


def module_of(path: Path) -> str:
    """The dotted name of a file below the root."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def files() -> dict[str, Path]:
    """All modules of the product and of the tests -> their files."""
    return {module_of(path): path for top in (*PRODUCT, TESTS) for path in sorted((ROOT / top).rglob("*.py"))}


@cache
def imports(module: str) -> frozenset[str]:
    """The modules from which a module imports names: the defining ones, where a package only offers the name."""
    return frozenset(_imports(module))


def _imports(module: str) -> Iterator[str]:
    for node in _import_statements(module):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in files())
        elif isinstance(node, ast.ImportFrom) and node.module in files() and not node.level:
            yield from (defining(node.module, each.name) for each in node.names)


@cache
def _import_statements(module: str) -> list[ast.Import | ast.ImportFrom]:
    found = _statements(ast.parse(files()[module].read_text(encoding="utf-8")).body)
    return [each for each in found if isinstance(each, ast.Import | ast.ImportFrom)]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements, without the expressions in them, which are most of a file."""
    for each in body:
        yield each
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _statements(getattr(each, part, ()))


@cache
def defining(package: str, name: str) -> str:
    """The module in which a name that a package offers is defined."""
    if f"{package}.{name}" in files():
        return f"{package}.{name}"
    for node in _import_statements(package):
        if isinstance(node, ast.ImportFrom) and node.module in files() and node.module != package:
            if any((each.asname or each.name) == name for each in node.names):
                return defining(node.module, name)
    text = files()[package].read_text(encoding="utf-8")
    late = re.search(rf'["\']{re.escape(name)}["\']: ["\']([\w.]+)["\']', text)  # a package that imports on first use
    return late[1] if late and late[1] in files() else package


def related_tests(path: Path) -> dict[Path, str]:
    """A product file -> its test files with the reason, nearest first.

    Raises:
        ValueError: the path is no Python file of the product.
    """
    path = path.resolve()
    if path not in files().values() or module_of(path).split(".")[0] not in PRODUCT:
        raise ValueError(f"{path}: no Python file below {', '.join(PRODUCT)}")
    module, found = module_of(path), {}
    tests = [name for name in files() if name.startswith("tests.") and ".test_" in name]
    for name in tests:
        if module in imports(name):
            found[files()[name]] = f"imports {module}"
    for row in re.findall(r'test="([\w/.]+\.py)', path.read_text(encoding="utf-8")):
        found.setdefault(ROOT / row, "named by a quirk of the file")
    folder = next(each for each in (ROOT / TESTS / module.replace(".", "/")).parents if any(each.glob("test_*.py")))
    parts = (ROOT / TESTS / module.replace(".", "/")).relative_to(folder).parts  # a file, or folders without tests
    words = {word for part in parts for word in part.split("_")}
    for each in sorted(folder.glob("test_*.py")):
        if shared := sorted(word for word in words if any(_are_alike(word, of) for of in each.stem.split("_")[1:])):
            found.setdefault(each, f"named like it: {shared[0]}")
    helpers = {name for name in files() if name.startswith("tests.") and name not in tests and module in imports(name)}
    users = {name for name in files() if not name.startswith("tests.") and module in imports(name)}
    for kind in (helpers, users) if len(found) < _ENOUGH else ():
        for name in tests:
            if between := sorted(kind & imports(name)):
                found.setdefault(files()[name], f"through {between[0]}")
    for each in sorted(folder.glob("test_*.py")) if not found else ():
        found[each] = "in its folder"
    return found


def _are_alike(one: str, other: str) -> bool:
    """Whether two words are forms of one: their first letters agree, all but an ending."""
    short, long = sorted((one, other), key=len)
    return len(short) >= _LEAST and long.startswith(short[: max(_LEAST, len(short) - 2)])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.map", description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="files of the product")
    parser.add_argument("--run", action="store_true", help="runs the nearest tests with pytest")
    given = parser.parse_args(arguments)
    nearest: dict[Path, None] = {}
    for path in given.files:
        try:
            found = related_tests(path)
        except ValueError as error:
            parser.error(str(error))
        for test, reason in found.items():
            print(f"{test.relative_to(ROOT)}  ({reason})")
        kind = next(iter(found.values()), "").split()[0]
        nearest |= dict.fromkeys(test for test, reason in found.items() if reason.startswith(kind))
    if given.run and nearest:
        return subprocess.run([sys.executable, "-m", "pytest", *map(str, nearest)], check=False).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
