"""Functions as text: TVMScript, in which a scan names its body, and the bodies behind it."""

from __future__ import annotations

import re

from autodiff.ir import Function, bindings
from autodiff.scan import Scan, is_scan, scan_of

__all__ = ["script"]

_OPTIONS = re.compile(r'R\.str\("\{\\"body\\": .*?[^\\]"\)')


def script(function: Function) -> str:
    """A function in flat form as TVMScript. The options of a scan are told in words; its body, without how it is
    differentiated, comes behind the function, under the name that stands in the call."""
    scans = [scan_of(value)[0] for _, value in bindings(function) if is_scan(value)]
    if not scans:
        return function.script()
    names = {body: f"step_{index}" for index, body in enumerate(dict.fromkeys(scan.body for scan in scans))}
    told = iter([f'R.str("{_words(scan, names[scan.body])}")' for scan in scans])
    text = _OPTIONS.sub(lambda _: next(told), function.script())
    bodies = [f"# {name}\n{script(scan.function)}" for scan in scans if (name := names.pop(scan.body, None))]
    return "\n\n".join([text, *bodies])


def _words(scan: Scan, name: str) -> str:
    order = ", last first" if scan.reverse else ""
    return f"{name}, {scan.length} times{order}: {scan.carries} carries, {scan.xs} xs, {scan.constants} constants"
