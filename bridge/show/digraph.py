"""A ``graphviz.Digraph`` whose display says what to install where the ``dot`` program is missing."""

from __future__ import annotations

from typing import Any

import graphviz

__all__ = ["Digraph"]


class Digraph(graphviz.Digraph):
    """As ``graphviz.Digraph``; without the program ``dot``, a notebook shows the source and what to install."""

    def _repr_mimebundle_(self, *args: Any, **kwargs: Any) -> dict[str, str]:
        try:
            return super()._repr_mimebundle_(*args, **kwargs)
        except graphviz.ExecutableNotFound:
            hint = "graphviz (the program dot) is not installed, e.g. apt-get install graphviz. The picture's source:"
            return {"text/plain": f"{hint}\n{self.source}"}
