"""Torch's private names about the backward that is on its way in this thread."""

from __future__ import annotations

from collections.abc import Callable

from bridge.base.torch_internals import find

__all__ = ["keeps_graph"]

keeps_graph: Callable[[], bool] = find("torch._C._autograd._get_current_graph_task_keep_graph")
"""Whether the graph is retained; true outside of a backward."""
