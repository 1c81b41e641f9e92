"""``autodiff`` and ``partition`` know nothing of PyTorch or ``bridge``, and ``autodiff`` nothing of ``partition``.

``tvm_ffi`` imports torch if it can, so looking for torch in ``sys.modules`` would blame the wrong package. Instead a
finder hides torch and the forbidden packages from a fresh interpreter: everything must import without them.
"""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

IMPORT_WITHOUT = """
import importlib, importlib.abc, pkgutil, sys

package, hidden = sys.argv[1], sys.argv[2].split(",")

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"{name} is hidden", name=name)

sys.meta_path.insert(0, Hide())
root = importlib.import_module(package)
names = [package, *(m.name for m in pkgutil.walk_packages(root.__path__, package + "."))]
for name in names:
    importlib.import_module(name)
assert not [name for name in sys.modules if name.partition(".")[0] in hidden]
print(len(names))
"""

FORBIDDEN = [
    ("autodiff", {"torch", "bridge", "partition", "transformers"}),
    ("partition", {"torch", "bridge", "transformers"}),
]


@pytest.mark.parametrize(("package", "forbidden"), FORBIDDEN, ids=[package for package, _ in FORBIDDEN])
def test_imports_where_torch_is_absent(package, forbidden):
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT, package, ",".join(sorted(forbidden))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 1, "no module was found"


@pytest.mark.parametrize(("package", "forbidden"), FORBIDDEN, ids=[package for package, _ in FORBIDDEN])
def test_no_source_file_names_them(package, forbidden):
    """Also inside functions, where an import would only happen at a call."""
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = {(str(path.relative_to(ROOT)), name) for path in files for name in imported(path) if name in forbidden}
    assert not found


def imported(path: pathlib.Path) -> set[str]:
    """The top-level packages that a file imports absolutely."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names


def test_the_finder_would_notice():
    """Guards the test: a package that does import torch fails under it."""
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT, "bridge", "torch"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "torch is hidden" in result.stderr
