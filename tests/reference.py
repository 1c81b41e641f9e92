"""API reference: docstrings of the public names → ``docs/reference.md``.

Names and docstrings are read from source text, so nothing is imported. A public name without a docstring is an error.

    python -m tests.reference    # writes docs/reference.md
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference.md"

PUBLIC = {
    "Functions": {
        "bridge/api.py": "add_tvm_dispatch remove_tvm_dispatch stats explain examine lower visualize "
        "save_compiled load_compiled",
    },
    "Results": {
        "bridge/dispatch/entries.py": "DispatchStats",
        "bridge/examine.py": "Coverage",
        "bridge/lower.py": "Lowered",
        "bridge/show/report.py": "Report",
    },
    "Errors": {"bridge/base/errors.py": "UnsupportedModule Unsupported CompilationError DispatchMiss"},
    "Callbacks": {
        "bridge/callbacks/trainer.py": "TrainerDispatch",
        "bridge/callbacks/lightning.py": "LightningDispatch",
    },
}
"""Sections of the page: files and the names in them, in the page's order."""

_ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")
_HEADS = ("Args:", "Attributes:", "Returns:", "Raises:", "Example:", "Yields:")


def _definition(file: str, name: str) -> tuple[str, ast.FunctionDef | ast.ClassDef]:
    text = (ROOT / file).read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return text, node
    raise LookupError(f"{file}: no {name}")


def _header(text: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    """The source of a definition up to its body."""
    lines = text.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]
    return inspect.cleandoc("\n".join(lines)).rstrip()


def _paragraphs(docstring: str) -> Iterator[str]:
    """A docstring in the Google style → Markdown."""
    lines = _ROLE.sub(r"`\1`", docstring).replace("``", "`").splitlines()
    head, body = "", []
    for line in [*lines, "End:"]:
        if line.strip() in _HEADS or line == "End:":
            yield from _section(head, body)
            head, body = line.strip(), []
        else:
            body.append(line)


def _section(head: str, body: list[str]) -> Iterator[str]:
    text = inspect.cleandoc("\n" + "\n".join(body)).strip()
    if head:
        yield f"\n**{head.rstrip(':')}**\n"
    if head == "Example:":
        yield f"```pycon\n{text}\n```"
    elif head in ("Args:", "Attributes:", "Raises:"):
        entries = re.sub(r"\n\s+", " ", text).splitlines()
        yield "\n".join(f"* `{name}`: {words}" for name, _, words in (each.partition(": ") for each in entries if each))
    elif text:
        yield text


def _described(text: str, node: ast.FunctionDef | ast.ClassDef, level: int) -> Iterator[str]:
    docstring = ast.get_docstring(node)
    if not docstring:
        raise LookupError(f"{node.name}: no docstring")
    yield f"\n{'#' * level} `{node.name}`\n\n```python\n{_header(text, node)}\n```\n"
    yield from _paragraphs(docstring)
    for each in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            yield f"\n* `{node.name}.{each.name}`: " + " ".join(
                "\n".join(_paragraphs(ast.get_docstring(each) or "")).split()
            )


def page() -> str:
    """The page's text."""
    found = ["# API reference", "", "Written by `python -m tests.reference` from the docstrings."]
    for section, sources in PUBLIC.items():
        found.append(f"\n## {section}")
        for file, names in sources.items():
            for name in names.split():
                found += _described(*_definition(file, name), level=3)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(found)) + "\n"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
