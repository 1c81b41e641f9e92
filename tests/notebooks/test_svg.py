"""Smaller SVG: the same texts, shapes and colours in fewer bytes."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from notebooks.svg import small_svg

GRAPH = """<?xml version="1.0" encoding="UTF-8" standalone="no"?>
<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd">
<svg width="100pt" height="90pt" viewBox="0.00 0.00 100.00 90.00" xmlns="http://www.w3.org/2000/svg">
<g id="graph0" class="graph" transform="scale(1 1) rotate(0) translate(4 86)">
<polygon fill="white" stroke="transparent" points="-4,4 -4,-86 96,-86 96,4 -4,4"/>
<g id="node1" class="node"><title>a</title>
<polygon fill="#f8d4d0" stroke="#b03a2e" points="30,-80 0,-80 0,-60 30,-60 30,-80"/>
<text text-anchor="start" x="2" y="-70" font-family="Helvetica,sans-Serif" font-size="11.00">a &lt; b</text>
</g>
<g id="node2" class="node">
<polygon fill="#f8d4d0" stroke="#b03a2e" points="30,-20 0,-20 0,0 30,0 30,-20"/>
<text text-anchor="start" x="2" y="-10" font-family="Helvetica,sans-Serif" font-size="11.00">add</text>
</g>
<g id="edge1" class="edge">
<path fill="none" stroke="#777777" d="M15,-60.4C15.2,-50 15.4,-40 15.6,-25.5"/>
<polygon fill="#777777" stroke="#777777" points="17.4,-25.4 15.7,-20.4 13.9,-25.4 17.4,-25.4"/>
</g>
</g>
</svg>"""

PLOT = """<svg xmlns:xlink="http://www.w3.org/1999/xlink" width="9pt" height="9pt" viewBox="0 0 9 9"
 xmlns="http://www.w3.org/2000/svg"><metadata>today</metadata>
<g id="figure_1"><g id="line2d_1"><defs><path id="m12ab" d="M 0 0 L 0 3.5" style="stroke: #000000"/></defs>
<g><use xlink:href="#m12ab" x="47.54321" y="1.0" style="stroke: #000000; fill: #ff0000"/></g></g>
<text style="font-size: 10px; font-family: 'DejaVu Sans'; text-anchor: middle" x="1" y="2"
 transform="rotate(-0 1 2)">loss</text></g></svg>"""


def elements(svg, tag):
    return [element for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("}" + tag)]


def test_a_graph_keeps_texts_and_gathers_shapes_by_style():
    small = small_svg(GRAPH)
    assert len(small) < len(GRAPH) / 2
    assert [text.text for text in elements(small, "text")] == ["a < b", "add"]
    paths = {path.get("fill"): path.get("d") for path in elements(small, "path")}
    assert paths["#f8d4d0"] == "M34 6l-30 0 0 20 30 0zM34 66l-30 0 0 20 30 0z"
    assert paths["none"] == "M19 26c0 10 0 20 1 34"
    assert list(paths) == ["white", "none", "#777777", "#f8d4d0"], "boxes are drawn over arrows"


def test_relative_coordinates_do_not_drift():
    """A hundred steps of 0.4 end at 40, not at 0 or at 100."""
    points = " ".join(f"{0.4 * i:.1f},0" for i in range(101))
    small = small_svg(GRAPH.replace("30,-80 0,-80 0,-60 30,-60 30,-80", points + " 0.0,0"))
    steps = re.search(r"d='M4 86l([^z]*)z", small)[1]
    assert sum(float(step) for step in re.findall(r"-?[\d.]+", steps)[::2]) == 40


def test_a_plot_keeps_what_its_markers_do_not_say():
    small = small_svg(PLOT)
    (use,) = elements(small, "use")
    assert use.attrib == {"href": "#i0", "x": "47.5", "y": "1", "fill": "#ff0000"}
    (text,) = elements(small, "text")
    assert text.text == "loss" and text.attrib == {"x": "1", "y": "2", "font-size": "10px", "text-anchor": "middle"}
    assert elements(small, "path")[0].get("id") == "i0" and "today" not in small


@pytest.mark.parametrize("svg", [GRAPH, PLOT], ids=["graph", "plot"])
def test_quotes_need_no_escape_in_json(svg):
    assert '"' not in small_svg(svg)
