"""The public functions have types that mypy accepts, and wrong arguments are errors before anything runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "script.py"
CONFIGURATION = Path(__file__).parent / "mypy.ini"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found():
    """Mypy's findings in the script, as (line, code); the cache beside the checkout makes the second time fast."""
    pytest.importorskip("mypy", reason="mypy is in the extra dev")
    command = [sys.executable, "-m", "mypy", "--config-file", str(CONFIGURATION), "--no-error-summary"]
    done = subprocess.run([*command, str(SCRIPT)], cwd=ROOT, capture_output=True, text=True, check=False)
    errors = re.findall(r"script\.py:(\d+): error: .*\[([\w-]+)\]", done.stdout)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return {(int(line), code) for line, code in errors}


def test_right_uses_are_accepted_and_wrong_ones_are_errors(found):
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    wanted = {(i, line.partition("# error: ")[2]) for i, line in enumerate(lines, 1) if "# error: " in line}
    assert found == wanted and len(wanted) == 9


@pytest.mark.parametrize("package", ["bridge", "autodiff", "partition"])
def test_packages_say_that_they_have_types(package):
    assert (ROOT / package / "py.typed").is_file()
