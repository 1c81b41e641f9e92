"""Runs the notebooks top to bottom, without a display, and writes the ``.ipynb`` beside each ``.py``.

The ``.py`` in jupytext's percent format is the source; the ``.ipynb`` holds the same cells with their texts and
pictures. Outputs are made small and free of addresses and folders, which differ between machines, so that running a
notebook again changes only its measurements.

    python -m notebooks.run                          # all of them
    python -m notebooks.run bert_on_tvm --to /tmp    # one, elsewhere
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from notebooks.svg import small_svg

HERE = Path(__file__).parent
#: In reading order.
NAMES = ("bert_on_tvm", "training_through_tvm", "your_own_recurrent_cell", "when_it_does_not_work")
#: Seconds for one cell: a guard against a kernel that hangs, not a limit of speed.
CELL_LIMIT = 600


def source(name: str) -> NotebookNode:
    """The notebook that ``<name>.py`` describes, without outputs; its cells' ids are their numbers."""
    notebook = jupytext.read(HERE / f"{name}.py", fmt="py:percent")
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index}"
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return notebook


def pair(name: str) -> Path:
    """Where the notebook with outputs lies."""
    return HERE / f"{name}.ipynb"


def execute(notebook: NotebookNode, **variables: str) -> NotebookNode:
    """Runs all cells in a fresh kernel, in this folder, and returns the notebook with their outputs.

    Args:
        notebook: its outputs are replaced.
        variables: environment variables of the kernel, beside this process's own.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised; the message holds the cell and the traceback.
    """
    root = str(HERE.parent)
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "PYDEVD_DISABLE_FILE_VALIDATION": "1", **variables}
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        extra_arguments=["--IPKernelApp.log_level=40"],
        timeout=CELL_LIMIT,
        startup_timeout=CELL_LIMIT,
        resources={"metadata": {"path": str(HERE)}},
        record_timing=False,
        coalesce_streams=True,
    )
    with tempfile.TemporaryDirectory() as cache:  # a cache of earlier runs would make torch.compile's first call free
        return client.execute(env={**environment, "TORCHINDUCTOR_CACHE_DIR": cache})


def tidy(notebook: NotebookNode) -> NotebookNode:
    """Makes outputs small and the same on every machine, in place."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            if output.output_type == "stream":
                output.text = _without_machine(output.text)
            data = output.get("data", {})
            if "image/svg+xml" in data:
                data["image/svg+xml"] = small_svg(data["image/svg+xml"])
            if len(data) > 1:  # the richest form is the one that is shown
                data.pop("text/plain", None)
            for kind in ("text/plain", "text/html"):
                if kind in data:
                    data[kind] = _without_machine(data[kind])
    return notebook


def _without_machine(text: str) -> str:
    """Cells go by ``<cell>``, files of this repository and of packages by their path in it, objects without address."""
    text = re.sub(r"[^\s'\"(]*ipykernel_\d+/\d+\.py", "<cell>", text)
    text = re.sub(r"[^\s'\"(]*/site-packages/", "", text)
    text = text.replace(f"{HERE.parent}{os.sep}", "")
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], help="which notebooks; all unless given")
    parser.add_argument("--to", type=Path, default=HERE, help="folder of the .ipynb files")
    options = parser.parse_args()
    if shutil.which("dot") is None:
        sys.exit("pictures would be texts: the program dot is wanted, e.g. apt-get install graphviz")
    for name in options.names or NAMES:
        started = time.perf_counter()
        notebook = tidy(execute(source(name)))
        target = options.to / pair(name).name
        nbformat.write(notebook, target, indent=0)
        print(f"{target.name}: {time.perf_counter() - started:.0f} s, {target.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
