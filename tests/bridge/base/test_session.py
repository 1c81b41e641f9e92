"""The session owns the caches of this process; one reset forgets them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import bridge
from bridge import add_tvm_dispatch, stats
from bridge.base.session import SESSION, Session

TABLES = "a table that decorators or imports fill, and nothing else"
ACTIVE = "what is active at the moment, or in this thread"
PYTHON = "Functions of the user's that programs run"
OTHERS = {
    "aten.complex_arithmetic.COMPLEX": TABLES,
    "aten.registry.CONVERSIONS": TABLES,
    "base.collector._OURS": ACTIVE,
    "base.quirks.QUIRKS": TABLES,
    "base.threads._DEFERRED": ACTIVE,
    "artifact.codec._FORMS": TABLES,
    "artifact.codec._NAMES": TABLES,
    "base.threads._LOCKS": TABLES,
    "base.threads._SERVING": ACTIVE,
    "base.threads._RENEWED": TABLES,
    "base.threads._held": ACTIVE,
    "base.torch_internals.PROBES": TABLES,
    **{f"capture.applications.{name}": PYTHON for name in ("_APPLICATIONS", "_KEYS")},
    "capture.applications._GRAPHS": "saved state of calls whose backward may come",
    "capture.opaque_functions._OPAQUE": PYTHON,
    "capture.whole_functions.HANDLERS": TABLES,
    "capture.whole_functions.SHAPES": TABLES,
    "compile.cpu.threads._FORKED": ACTIVE,
    "compile.cuda.build._HELD": "libraries that kernels in use need",
    "compile.cuda.build._REPLACED": "what was replaced in TVM, for good",
    "compile.cuda.memory._MEMORIES": "memory in use",
    "compile.cuda.memory._SPARE": "memory in use",
    "compile.runtime.build._RUNNING": ACTIVE,
    "compile.translate.builder.TRANSLATIONS": TABLES,
    "dispatch.parts._PARTS": "models of the user's, dispatched in parts",
    "dynamo.backend._GRAPHS": "graphs of the user's, as long as Dynamo has them",
    "guards.functions._hearing": ACTIVE,
    "guards.objects._frozen": ACTIVE,
    "guards.watched._REFILLED": "sets of the user's, as long as they live",
    "library.registry.FUNCTIONS": TABLES,
    "library.registry.INTO_GIVEN": TABLES,
    "library.registry.OUT_FUNCTIONS": TABLES,
    "library.registry.OUT_KERNELS": TABLES,
    "rng.computed._BEGUN": "compilations that are on their way",
}
"""Module-level containers that are no caches, and why."""

MADE_EMPTY = {"set", "dict", "list", "Counter", "deque", "OrderedDict", "WeakSet", "WeakKeyDictionary"}
MADE_EMPTY |= {"WeakValueDictionary", "WeakIdKeyDictionary"}
CACHES = {"LeastRecentlyUsed", "WeakCache", "ArenaPool", "defaultdict"}
"""Empty whatever they are given."""


def containers() -> Iterator[str]:
    """The names of each module of ``bridge`` that begin as an empty container."""
    root = Path(bridge.__file__).parent
    for path in sorted(root.rglob("*.py")):
        home = ".".join(path.relative_to(root).with_suffix("").parts)
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.Assign | ast.AnnAssign) and _is_empty(statement.value):
                target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
                if (name := ast.unparse(target)) != "__all__":
                    yield f"{home}.{name}"


def _is_empty(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Dict | ast.List):
        return not (value.keys if isinstance(value, ast.Dict) else value.elts)
    if not isinstance(value, ast.Call):
        return False
    made = value.func.value if isinstance(value.func, ast.Subscript) else value.func
    name = ast.unparse(made).rpartition(".")[2]
    return name in CACHES or (name in MADE_EMPTY and not value.args)


def test_every_cache_is_the_sessions():
    assert set(containers()) == set(OTHERS)


def test_a_reset_forgets_and_what_is_in_use_goes_on():
    module, x = nn.Sequential(nn.Linear(3, 5), nn.Tanh()), torch.randn(2, 3)
    wanted = module(x)
    add_tvm_dispatch(module, x)
    SESSION.reset()
    torch.testing.assert_close(module(x), wanted)
    other = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
    add_tvm_dispatch(other, x)
    assert stats(module).hits == 1 and stats(other).entries[0].lowered is not stats(module).entries[0].lowered


def test_kinds_are_reset_one_by_one():
    session = Session()
    one, two = session.cache("one", {1: 1}), session.cache("two", [2])
    session.reset("one")
    assert not one and two
    with pytest.raises(KeyError):
        session.reset("three")
    Session("later").reset("later")  # of a room that is not imported yet
