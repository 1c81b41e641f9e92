"""Pictures: boxes, arrows and clusters → a ``graphviz.Digraph``.

The forward runs down on the left, the backward up on the right; saved tensors are arrows between them.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

try:
    import graphviz
except ImportError:  # it comes with the extra ``show``
    graphviz = None


@dataclass(frozen=True)
class BoxStyle:
    """Style of one kind of boxes; ``meaning``: their name in the legend."""

    fill: str
    line: str
    meaning: str
    style: str = "filled"
    shape: str = "box"


KINDS: Mapping[str, BoxStyle] = {
    "forward": BoxStyle("#f8d4d0", "#b03a2e", "forward"),
    "captured": BoxStyle("#bcd9f5", "#1b5e9e", "saved for the backward"),
    "recomputed": BoxStyle("#fde9bd", "#b7791f", "computed again in the backward", "filled,dashed"),
    "backward": BoxStyle("#e4e7ea", "#5f6b76", "backward"),
    "input": BoxStyle("#ffffff", "#444444", "input", "filled,rounded"),
    "result": BoxStyle("#ffffff", "#444444", "result", "filled,rounded,bold"),
    "constant": BoxStyle("#ffffff", "#999999", "constant", "filled,dotted"),
    "view": BoxStyle("#ffffff", "#999999", "view, no data moves", "filled"),
    "node": BoxStyle("#f3f4f6", "#4b5563", "operator"),
    "library": BoxStyle("#d9ead3", "#38761d", "library step (torch's kernel)"),
    "kernel": BoxStyle("#fff2cc", "#7f6000", "generated kernel: its operators"),
}


@dataclass(frozen=True)
class Box:
    """A node; ``rows``: lines under the title; ``upward``: in the backward; ``double``: a product or library call."""

    key: str
    title: str
    kind: str
    rows: tuple[str, ...] = ()
    name: str = ""
    upward: bool = False
    double: bool = False
    cluster: str = ""


@dataclass(frozen=True)
class Arrow:
    """An edge between two boxes; ``label``: the value's shape; ``saved``: from the forward to the backward."""

    tail: str
    head: str
    label: str = ""
    saved: bool = False


@dataclass
class Picture:
    """A graph to draw; ``clusters``: the boxes' cluster names → titles; ``tables``: notes with title and rows."""

    title: str
    boxes: dict[str, Box] = field(default_factory=dict)
    arrows: list[Arrow] = field(default_factory=list)
    clusters: dict[str, str] = field(default_factory=dict)
    tables: list[tuple[str, list[tuple[str, str]]]] = field(default_factory=list)

    def add(self, box: Box) -> None:
        self.boxes[box.key] = box


_GRAPH = {
    "rankdir": "TB",
    "nodesep": "0.1",
    "ranksep": "0.22",
    "fontname": "Helvetica",
    "fontsize": "13",
    "labelloc": "t",
    "labeljust": "l",
    "newrank": "true",
    "splines": "true",
    "remincross": "true",
}
_NODE = {"fontname": "Helvetica", "fontsize": "11", "margin": "0.07,0.03", "height": "0.1", "width": "0.3"}
_EDGE = {"fontname": "Helvetica", "fontsize": "8", "color": "#777777", "fontcolor": "#555555", "arrowsize": "0.5"}


def _label(box: Box) -> str:
    lines = [f"<B>{html.escape(box.title)}</B>"]
    lines += [f'<FONT POINT-SIZE="9">{html.escape(row)}</FONT>' for row in box.rows]
    if box.name:
        lines.append(f'<FONT POINT-SIZE="8" COLOR="#777777">{html.escape(box.name)}</FONT>')
    return f"<{'<BR/>'.join(lines)}>"


def draw(picture: Picture, *, legend: bool = True) -> graphviz.Digraph:
    """The graphviz graph of a picture. ``ImportError`` names the extra if the Python package is missing."""
    if graphviz is None:
        raise ImportError("visualize needs the Python package graphviz: pip install 'tvm-dispatch[show]'")
    dot = Digraph(graph_attr={**_GRAPH, "label": picture.title}, node_attr=_NODE, edge_attr=_EDGE)
    for cluster, title in ({"": ""} | picture.clusters).items():
        members = [box for box in picture.boxes.values() if box.cluster == cluster]
        if not cluster:
            _boxes(dot, members)
            continue
        with dot.subgraph(name=f"cluster_{cluster}") as inner:
            inner.attr(label=title, style="rounded,filled", color="#bbbbbb", fillcolor="#fbfbfb", fontsize="10")
            _boxes(inner, members)
    for arrow in picture.arrows:
        _arrow(dot, picture, arrow)
    for index, (title, rows) in enumerate(picture.tables):
        dot.node(f"table_{index}", _table(title, rows), shape="plain")
    if legend:
        _legend(dot, picture)
    return dot


def _boxes(dot: Any, boxes: list[Box]) -> None:
    for box in boxes:
        kind = KINDS[box.kind]
        dot.node(
            box.key,
            _label(box),
            shape=kind.shape,
            style=kind.style,
            fillcolor=kind.fill,
            color=kind.line,
            peripheries="2" if box.double else "1",
        )


def _arrow(dot: Any, picture: Picture, arrow: Arrow) -> None:
    tail, head = picture.boxes[arrow.tail], picture.boxes[arrow.head]
    label = f" {arrow.label}" if arrow.label else ""
    if tail.upward and head.upward:
        dot.edge(arrow.head, arrow.tail, label=label, dir="back")
    elif arrow.saved:
        line = KINDS["captured"].line
        dot.edge(arrow.tail, arrow.head, label=label, color=line, fontcolor=line, constraint="false")
    else:
        dot.edge(arrow.tail, arrow.head, label=label)


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    cells = "".join(
        f'<TR><TD ALIGN="LEFT"><FONT POINT-SIZE="8">{html.escape(left)}</FONT></TD>'
        f'<TD ALIGN="RIGHT"><FONT POINT-SIZE="8">{html.escape(right)}</FONT></TD></TR>'
        for left, right in rows
    )
    head = f'<TR><TD COLSPAN="2" ALIGN="LEFT"><B>{html.escape(title)}</B></TD></TR>'
    return f'<<TABLE BORDER="1" COLOR="#bbbbbb" CELLBORDER="0" CELLSPACING="0" CELLPADDING="1">{head}{cells}</TABLE>>'


def _texts(picture: Picture) -> list[str]:
    return [arrow.label for arrow in picture.arrows] + [row for box in picture.boxes.values() for row in box.rows]


def _legend(dot: Any, picture: Picture) -> None:
    plain = ("input", "result")
    used = [kind for kind in KINDS if kind not in plain and any(box.kind == kind for box in picture.boxes.values())]
    cells = "".join(
        f'<TR><TD BGCOLOR="{KINDS[kind].fill}" WIDTH="14"> </TD>'
        f'<TD ALIGN="LEFT"><FONT POINT-SIZE="9">{html.escape(KINDS[kind].meaning)}</FONT></TD></TR>'
        for kind in used
    )
    if any("ᵀ" in text for text in _texts(picture)):
        cells += '<TR><TD> </TD><TD ALIGN="LEFT"><FONT POINT-SIZE="9">ᵀ: permuted</FONT></TD></TR>'
    if any(box.double for box in picture.boxes.values()):
        double = '<FONT POINT-SIZE="9">double line: product or library call</FONT>'
        cells += f'<TR><TD BORDER="1"> </TD><TD ALIGN="LEFT">{double}</TD></TR>'
    if cells:
        dot.node("legend", f'<<TABLE BORDER="0" CELLSPACING="2" CELLPADDING="1">{cells}</TABLE>>', shape="plain")


class Digraph(object if graphviz is None else graphviz.Digraph):
    """``graphviz.Digraph`` whose notebook display, without the program ``dot``, is the source and an install hint."""

    def _repr_mimebundle_(self, *args: Any, **kwargs: Any) -> dict[str, str]:
        try:
            return super()._repr_mimebundle_(*args, **kwargs)
        except graphviz.ExecutableNotFound:
            hint = "graphviz (the program dot) is not installed, e.g. apt-get install graphviz. The picture's source:"
            return {"text/plain": f"{hint}\n{self.source}"}
