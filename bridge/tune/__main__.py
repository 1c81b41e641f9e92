"""``python -m bridge.tune script.py``: runs a script and tunes each call before it is compiled.

    python -m bridge.tune --minutes 2 --log bert.jsonl train.py --epochs 1

A call is tuned when the script passes it to ``add_tvm_dispatch`` as a sample, or makes it as a first call. Later runs
of the script, without this command, use the stored results. Equal calls (twelve equal layers) are tuned once. The same
log resumes an interrupted run.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from bridge.base.errors import UnsupportedModule
from bridge.dispatch import EntryOptions, before_compiling
from bridge.state import SampleCall
from bridge.tune.tuning import Means, tune_call

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; exit status 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m bridge.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="for each call (default 2)")
    parser.add_argument("--log", type=Path, default=None, help="file of trials, to go on with after an interruption")
    parser.add_argument("--memory", type=float, default=1.0, help="times the bytes saved for the backward (default 1)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    options = parser.parse_args(arguments)
    if not options.script.is_file():
        parser.error(f"there is no file {options.script}")
    try:
        means = Means(options.minutes, options.log, options.memory, progress=not options.quiet)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    sys.argv = [str(options.script), *options.arguments]
    sys.path.insert(0, str(options.script.absolute().parent))
    with before_compiling(_EachOnce(means)):
        runpy.run_path(str(options.script), run_name="__main__")
    return 0


class _EachOnce:
    """Tunes each call once; a call that cannot be tuned is compiled by default."""

    def __init__(self, means: Means):
        self._means = means
        self._done: set[str] = set()

    def __call__(self, call: SampleCall, options: EntryOptions) -> None:
        try:
            result = tune_call(call, options, means=self._means, done=self._done)
        except UnsupportedModule:  # the following compilation reports it
            return
        if result is not None:
            print(result, file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
