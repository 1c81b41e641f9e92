"""What the nodes of a training graph are told of the rows that they are from: keys of ``meta`` that passes hand on."""

from __future__ import annotations

from typing import Any

from torch import fx

__all__ = ["AUTOCAST", "ROW", "STOPPED", "told"]

ROW = "row"
"""The index of the row."""
STOPPED = "stopped"
"""Present where autograd does not follow an operator that it would follow, since grad mode is off."""
AUTOCAST = "autocast"
"""What autocast does where the operator stands."""

_KEYS = ("stack_trace", "nn_module_stack", ROW, STOPPED, AUTOCAST)


def told(node: fx.Node) -> dict[str, Any]:
    """What a node that stands in the place of another one, or before it, has of that one's ``meta``."""
    return {key: node.meta[key] for key in _KEYS if key in node.meta}
