"""Rooms of the tree: their files, their sizes and the import edges between them; ``python -m tests.rooms`` prints them.

Reads source text only. Every import statement counts, also those inside functions and under ``TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parent.parent
PACKAGES = ("bridge", "autodiff", "partition")
MOST_LINES = 500
_MOST_CODE_LINES, _MOST_FIELDS = 60, 14
_TEXTS_OF_CALLS = ("autodiff", "bridge.aten", "bridge.library")
_CLOCKS = ("perf_counter", "process_time", "thread_time", "elapsed_time")
BOUNDS = {
    "files": 336,
    "lines": 77_090,
    "class names of several files": 0,
    "functions of over 60 code lines": 0,
    "classes of over 14 fields": 0,
    "loop provers": 1,
    "trial services": 1,
    "serializers": 1,
}
"""Sizes of the product as a whole: lower a bound when the tree has shrunk; take something out rather than raise one."""

BRIDGE = (
    "base",
    "artifact",
    "trials",
    "state",
    "guards",
    "capture",
    "aten",
    "library",
    "compile",
    "reference",
    "lowering",
    "rng",
    "dispatch",
    "export",
    "dynamo",
    "verify",
    "show",
    "callbacks",
    "lower",
    "ways",
    "examine",
    "cache",
    "quirks",
    "api",
    "__init__",
)
"""Rooms and loose files of ``bridge/``; each imports only from earlier ones, through their ``__init__``."""

COMPILE = (
    *(
        "loop_ir",
        "codegen",
        "schedule",
        "backend",
        "passes",
        "translate",
        "options",
        "runtime",
        "graphs",
        "cpu",
        "cuda",
    ),
    *("targets", "signature", "kept_function", "chosen_chains", "pipeline", "__init__"),
)
"""Rooms of ``bridge/compile/``, likewise."""


@dataclass(frozen=True)
class Tree:
    """Modules by dotted name, with their line counts and imports.

    Attributes:
        lines: number of lines of each module's file.
        imports: ``(importing module, imported module)`` pairs inside the three packages.
        classes: public names of classes, once for each module that defines one.
        long_functions: functions of more code lines than are wanted (docstring, comments and blank lines do not count).
        wide_classes: classes of more fields than are wanted, declared or set by ``__init__``.
        provers: modules that look for loops: they ask for the periods of rows.
        trials: modules that read a clock themselves, to choose; base's stopwatch is for logs and reports.
        serializers: modules that import json or pickle. The texts that calls of the library have as arguments, whose
            grammar :mod:`autodiff.library` states, are the IR's.
    """

    lines: dict[str, int]
    imports: tuple[tuple[str, str], ...]
    classes: tuple[str, ...]
    long_functions: tuple[str, ...]
    wide_classes: tuple[str, ...]
    provers: tuple[str, ...]
    trials: tuple[str, ...]
    serializers: tuple[str, ...]

    def sizes(self) -> dict[str, int]:
        """The tree → the measures of :data:`BOUNDS`."""
        shared = [name for name, modules in Counter(self.classes).items() if modules > 1]
        counts = (
            len(self.lines),
            sum(self.lines.values()),
            len(shared),
            len(self.long_functions),
            len(self.wide_classes),
            len(self.provers),
            len(self.trials),
            len(self.serializers),
        )
        return dict(zip(BOUNDS, counts, strict=True))

    def room(self, module: str) -> str:
        """``bridge.capture.passes.decompositions`` → ``capture``; a package of its own stands for itself."""
        first, *rest = module.split(".")
        return (rest[0] if rest else "__init__") if first == "bridge" else first

    def backward(self, prefix: str, order: Sequence[str]) -> list[str]:
        """Imports that run against ``order``, of the rooms directly below ``prefix``, as ``"a imports b"``."""
        found = []
        for importer, imported in self.imports:
            if importer.startswith(prefix) and imported.startswith(prefix):
                ranks = [order.index(_part(name, prefix)) for name in (importer, imported)]
                if ranks[1] > ranks[0]:
                    found.append(f"{importer} imports {imported}")
        return found

    def past_a_face(self) -> list[str]:
        """Imports from another room of ``bridge/`` that do not go through its ``__init__``, except imports of base."""
        return [
            f"{importer} imports {imported}"
            for importer, imported in self.imports
            if imported.count(".") > 1 and self.room(importer) != self.room(imported) != "base"
            if imported.startswith("bridge.")
        ]

    def circles(self) -> list[list[str]]:
        """Groups of modules that import one another."""
        graph = nx.DiGraph(self.imports)
        return [sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1]


def _part(module: str, prefix: str) -> str:
    return module.removeprefix(prefix).lstrip(".").split(".")[0] or "__init__"


@cache
def tree() -> Tree:
    """The packages of this checkout."""
    files = {_dotted(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}
    lines = {name: len(path.read_text().splitlines()) for name, path in files.items()}
    pairs = {(name, other) for name, path in files.items() for other in _imported(name, path, files) if other != name}
    found = [[], [], [], [], [], []]
    for name, path in files.items():
        text = path.read_text()
        nodes, of_code = _nodes(path), _code_lines(text)
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        found[0] += [node.name for node in classes if node in nodes[0].body and not node.name.startswith("_")]
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        long = [node for node in functions if _count(node, of_code) > _MOST_CODE_LINES]
        found[1] += [f"{name}.{node.name}" for node in long]
        found[2] += [f"{name}.{node.name}" for node in classes if len(_fields(node)) > _MOST_FIELDS]
        calls = [node.func for node in nodes if isinstance(node, ast.Call)]
        found[3] += [name] * any(isinstance(func, ast.Name) and func.id == "periodic" for func in calls)
        clocks = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr in _CLOCKS]
        found[4] += [name] * (bool(clocks) and not name.startswith("bridge.base"))
        found[5] += [name] * (_writes(nodes) and not name.startswith(_TEXTS_OF_CALLS))
    return Tree(lines, tuple(sorted(pairs)), *map(tuple, found))


@cache
def _nodes(path: Path) -> list[ast.AST]:
    """The nodes of a file, the module first."""
    return list(ast.walk(ast.parse(path.read_text())))


def _writes(nodes: list[ast.AST]) -> bool:
    """Whether a module imports a serializer."""
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return not {"json", "pickle", "marshal"}.isdisjoint(names)


def _code_lines(text: str) -> set[int]:
    """Numbers of the lines that are neither blank nor a comment."""
    lines = [line.strip() for line in text.splitlines()]
    return {number for number, line in enumerate(lines, 1) if line and not line.startswith("#")}


def _count(function: ast.FunctionDef, of_code: set[int]) -> int:
    first = function.body[0]
    has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = range(first.lineno, first.end_lineno + 1) if has_docstring else ()
    return len(of_code.intersection(range(function.lineno, function.end_lineno + 1)).difference(docstring))


def _fields(node: ast.ClassDef) -> set[str]:
    """Attributes that a class declares, or that its ``__init__`` sets."""
    declared = [each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
    inits = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    stores = [each for init in inits for each in ast.walk(init) if isinstance(each, ast.Attribute)]
    return {each.target.id for each in declared if "ClassVar" not in ast.unparse(each.annotation)} | {
        each.attr for each in stores if isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
    }


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(importer: str, path: Path, files: dict[str, Path]) -> Iterator[str]:
    package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                module = ".".join([*base, *([module] if module else [])])
            for alias in node.names:
                name = f"{module}.{alias.name}"
                if name in files and alias.name not in _offered(files[module]):
                    yield name
                elif module in files:
                    yield module


@cache
def _offered(package: Path) -> set[str]:
    """The names in a package's ``__all__``: one of them may be a function called like its file."""
    if package.name != "__init__.py":
        return set()
    return {
        entry
        for node in _nodes(package)[0].body
        if isinstance(node, ast.Assign | ast.AugAssign) and ast.unparse(node).startswith("__all__ ")
        for entry in ast.literal_eval(node.value)
    }


def main() -> int:
    """Prints rooms, sizes and edges, then violations. Returns 1 if there are any."""
    found = tree()
    by_room: dict[str, list[str]] = {}
    for module in found.lines:
        by_room.setdefault(found.room(module), []).append(module)
    edges = {(found.room(a), found.room(b)) for a, b in found.imports if found.room(a) != found.room(b)}
    order = ["autodiff", "partition", *BRIDGE]
    for room in order:
        modules = by_room.get(room, [])
        if not modules:
            continue
        lines = [found.lines[module] for module in modules]
        needs = " ".join(other for other in order if (room, other) in edges)
        sizes = f"{len(modules):>3} files {sum(lines):>6} lines, longest {max(lines):>4}"
        print(f"{room:<10} {sizes}  imports {needs or '-'}")
    print(", ".join(f"{count} {what}" for what, count in found.sizes().items()))
    problems = [
        *found.backward("bridge", BRIDGE),
        *found.backward("bridge.compile", COMPILE),
        *(f"{line}, past its room's face" for line in found.past_a_face()),
        *(f"a circle: {' '.join(circle)}" for circle in found.circles()),
        *(f"{module} has {n} lines" for module, n in found.lines.items() if n > MOST_LINES),
    ]
    for problem in problems:
        print(f"! {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
