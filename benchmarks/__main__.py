"""One entry: ``python -m benchmarks`` lists the benchmarks, ``python -m benchmarks NAME [options]`` runs one."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path


def scripts() -> dict[str, str]:
    """Each benchmark's name → the first line of its docstring; imports none of them."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        text = path.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in text:
            found[path.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found


def main(arguments: list[str]) -> int:
    known = scripts()
    if not arguments or arguments[0] not in known:
        width = max(map(len, known))
        print("\n".join(f"{name:<{width}}  {line}" for name, line in known.items()))
        if arguments and not arguments[0].startswith("-"):
            print(f"\nno benchmark {arguments[0]!r}", file=sys.stderr)
            return 2
        return 0
    sys.argv = [f"python -m benchmarks {arguments[0]}", *arguments[1:]]
    runpy.run_module(f"benchmarks.{arguments[0]}", run_name="__main__", alter_sys=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
