"""Eager with torch's control-flow operators written out, for second derivatives.

Eager's second derivatives through ``scan`` and ``while_loop`` lack terms, and through ``torch.cond`` there is none;
compiled code's are the gradients of the control flow written out (``docs/limits.md``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bridge.base.torch_higher_order import no_frames_compiled
from bridge.capture import as_python


@contextmanager
def written_out() -> Iterator[None]:
    """While active, control-flow operators run as Python."""
    with no_frames_compiled(), as_python():
        yield
