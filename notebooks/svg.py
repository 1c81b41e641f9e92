"""Smaller SVG: a picture by graphviz or matplotlib → the same picture in a quarter of the bytes.

Shapes of one layer and one style become one path with relative coordinates, texts of one style one group, so that
colours and fonts stand once. Order is kept where it shows: clusters under arrows under boxes under texts. Lines move by
half a point at most; no text changes. Attributes alone are used, because viewers of notebooks remove style sheets.
Attributes are in single quotes, which JSON does not escape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

_NUMBER = re.compile(r"-?\d*\.?\d+(?:e-?\d+)?")
_XLINK = "{http://www.w3.org/1999/xlink}href"
#: Attributes that decide how a shape or a text looks.
_SHAPE = ("fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "opacity", "clip-path")
_TEXT = ("fill", "font-size", "font-weight", "text-anchor", "transform")
_LAYERS = ("background", "cluster", "edge", "node", "text")


def small_svg(svg: str) -> str:
    """The picture with fewer bytes.

    Args:
        svg: text of a whole SVG document as graphviz (``class="graph"``) or matplotlib writes it.
    """
    root = ElementTree.fromstring(re.sub(r"<!DOCTYPE[^>]*>", "", svg))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    graph = root.find("g[@class='graph']")
    return _graph(root, graph) if graph is not None else _plot(root)


def _graph(root: Element, graph: Element) -> str:
    """Graphviz: a layer for each class of groups, inside a layer one path for each style."""
    dx, dy = (float(found) for found in _NUMBER.findall(graph.get("transform", "").partition("translate")[2]))
    layers: dict[str, dict[tuple[str, ...], list[str]]] = {name: {} for name in _LAYERS}
    for layer, element in _elements(graph, "background"):
        if element.tag == "text":
            if text := "".join(element.itertext()).strip():
                place = f"x='{_short(float(element.get('x')) + dx, 0)}' y='{_short(float(element.get('y')) + dy, 0)}'"
                layers["text"].setdefault(_style(element, _TEXT), []).append(
                    f"<text {place}>{escape(text, quote=False)}</text>"
                )
        elif (element.get("fill"), element.get("stroke")) != ("none", "transparent"):
            layers[layer].setdefault(_style(element, _SHAPE), []).append(_outline(element, dx, dy, layer == "edge"))
    body = []
    for name, styles in layers.items():
        for style, parts in styles.items():
            attributes = " ".join(style)
            if name == "text":
                body.append(f"<g {attributes}>{''.join(parts)}</g>")
            else:
                body.append(f"<path {attributes} d='{''.join(parts)}'/>")
    return _document(root, "font-family='Helvetica,Arial,sans-serif'", body)


def _elements(group: Element, layer: str) -> Iterator[tuple[str, Element]]:
    """Shapes and texts in the order of the document, each with the layer of the innermost group that names one."""
    for element in group:
        if element.tag in ("g", "a"):
            inner = element.get("class", layer)
            yield from _elements(element, inner if inner in _LAYERS else layer)
        elif element.tag != "title":
            yield layer, element


def _style(element: Element, names: tuple[str, ...]) -> tuple[str, ...]:
    """The attributes that are not as SVG has them anyway, as text."""
    defaults = {"font-size": "14.00", "text-anchor": "start"}
    found = {name: element.get(name) for name in names if element.get(name) not in (None, defaults.get(name))}
    if found.get("stroke") == "transparent":
        del found["stroke"]
    if "font-size" in found:
        found["font-size"] = found["font-size"].removesuffix(".00")
    return tuple(f"{name}='{value}'" for name, value in found.items())


def _outline(element: Element, dx: float, dy: float, fine: bool) -> str:
    """A polygon, polyline or path → path data; arrow heads (``fine``) to a tenth of a point, the rest to whole ones."""
    numbers = [float(found) for found in _NUMBER.findall(element.get("d") or element.get("points") or "")]
    points = [(x + dx, y + dy) for x, y in zip(numbers[::2], numbers[1::2], strict=True)]
    if element.tag == "path":
        return _relative([("M", points[:1]), ("C", points[1:])], 0)
    closed = element.tag == "polygon"
    return _relative([("M", points[:1]), ("L", points[1 : len(points) - closed])], 1 if fine else 0) + "z" * closed


def _relative(commands: list[tuple[str, list[tuple[float, float]]]], digits: int) -> str:
    """Path data with relative coordinates; each is taken from where rounding has left the pen, so none drifts."""
    pen, text = (0.0, 0.0), []
    for command, points in commands:
        start, each = pen, 3 if command == "C" else 1
        numbers = []
        for index, (x, y) in enumerate(points):
            if index % each == 0:
                start = pen
            pen = (round(x, digits), round(y, digits))
            pair = (pen[0] - start[0], pen[1] - start[1]) if command != "M" else pen
            numbers += [_short(value, digits) for value in pair]
        text.append((command if command == "M" else command.lower()) + _joined(numbers))
    return "".join(text)


def _joined(numbers: list[str]) -> str:
    """Numbers as path data; a minus sign separates as well as a space."""
    return re.sub(r" (?=-)", "", " ".join(numbers))


def _short(value: float, digits: int = 1) -> str:
    """As few characters as ``digits`` decimals need: ``0.50`` → ``.5``, ``3.0`` → ``3``, ``-0.0`` → ``0``."""
    text = f"{value:.{digits}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    text = "0" if text in ("-0", "") else text
    return re.sub(r"^(-?)0\.", r"\1.", text)


def _plot(root: Element) -> str:
    """Matplotlib: styles as attributes, ids only where they are used, one family of fonts, numbers to a tenth."""
    used = set(re.findall(r'(?:href="|url\()#(\w+)', ElementTree.tostring(root, encoding="unicode")))
    short = {name: f"i{index}" for index, name in enumerate(sorted(used))}
    styled = {f"#{element.get('id')}": _styles(element) for element in root.iter("path")}
    for element in root.iter("use"):  # its uses cannot change a marker's own attributes
        fixed = styled[element.get(_XLINK)]
        own = [f"{name}:{value}" for name, value in _styles(element).items() if name not in fixed]
        element.set("style", ";".join(own))
    return _document(root, "font-family='DejaVu Sans,Verdana,sans-serif'", [_plotted(e, short) for e in root])


def _styles(element: Element) -> dict[str, str]:
    """The ``style`` attribute, property by property."""
    return dict(re.findall(r"([\w-]+)\s*:\s*([^;]+)", element.get("style", "")))


def _plotted(element: Element, ids: dict[str, str]) -> str:
    if element.tag in ("metadata", "style", "title"):
        return ""
    attributes = {name: value for name, value in element.attrib.items() if name not in ("style", "id")}
    attributes |= _styles(element)
    attributes.pop("font-family", None)
    if element.get("id") in ids:
        attributes["id"] = ids[element.get("id")]
    if _XLINK in attributes:
        attributes["href"] = "#" + ids[attributes.pop(_XLINK)[1:]]
    if "clip-path" in attributes:
        attributes["clip-path"] = re.sub(r"#(\w+)", lambda found: "#" + ids[found[1]], attributes["clip-path"])
    for name in ("d", "x", "y", "width", "height", "transform", "font-size"):
        if name in attributes:
            text = " ".join(attributes[name].split())
            attributes[name] = _NUMBER.sub(lambda found: _short(float(found[0])), text)
    if attributes.get("transform", "").startswith("rotate(0 "):
        del attributes["transform"]
    inside = "".join(_plotted(child, ids) for child in element)
    inside = escape((element.text or "").strip(), quote=False) + inside
    if element.tag in ("g", "defs") and not inside:
        return ""
    if element.tag == "g" and not attributes:
        return inside
    written = "".join(f" {name}='{escape(value)}'" for name, value in attributes.items())
    return f"<{element.tag}{written}>{inside}</{element.tag}>" if inside else f"<{element.tag}{written}/>"


def _document(root: Element, fonts: str, body: list[str]) -> str:
    size = f"width='{root.get('width')}' height='{root.get('height')}' viewBox='{root.get('viewBox')}'"
    inside = "\n".join(part for part in body if part)
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size} {fonts}>\n{inside}\n</svg>\n"
