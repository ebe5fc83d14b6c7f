"""Plots as pictures within a page: SVG whose colours, letters and names are the page's.

Any plot of prism becomes an ``<svg>`` that follows the page's light or dark colours, keeps its text
as text, has a title and a description for those who do not see it, and shares no id with another
one on the page.
"""

from __future__ import annotations

import re
from io import BytesIO
from typing import Any
from xml.etree import ElementTree as ET

from matplotlib import rc_context

from prism.plots.base import no_warnings, show_names
from prism.present.answer import Picture

SVG = "{http://www.w3.org/2000/svg}"
XLINK_HREF = "{http://www.w3.org/1999/xlink}href"

COLOURS = {
    "#000000": "ink",
    "#ffffff": "card",
    "#555555": "grey",
    "#e5e5e5": "grid",
    "#e6e6e6": "grid",
    "#bfbfbf": "faint",
    "#cccccc": "faint",
    "#0072b2": "blue",
    "#e69f00": "orange",
    "#009e73": "green",
    "#d55e00": "red",
    "#cc79a7": "purple",
    "#56b4e9": "sky",
    "#f0e442": "yellow",
}
"""Colours of the plots, by the name of what the page has in their place."""

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "prism",
    "savefig.facecolor": "none",
    "text.parse_math": False,  # a $ in a job's name is a $
}
_NUMBER = re.compile(r"-?\d+\.\d+")
_FONT = re.compile(r"(\bfont:[^;]*?\d+(?:\.\d+)?px)[^;]*")
_FAMILY = re.compile(r"\bfont-family:[^;]*")


def to_svg(picture: Picture, name: str) -> tuple[str, bool]:
    """Draw a picture as an element of a page."""
    buffer = BytesIO()
    with rc_context(_STYLE), no_warnings():
        figure = picture.draw().get_figure(root=True)
        assert figure is not None
        show_names(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    root = ET.fromstring(buffer.getvalue())
    bitmap = root.find(f".//{SVG}image") is not None
    _tidy(root)
    _name(root, name)
    for element in root.iter():
        _dress(element, recolour=not bitmap)
    _describe(root, picture, name)
    ET.register_namespace("", SVG[1:-1])
    return ET.tostring(root, encoding="unicode"), bitmap


def _tidy(root: ET.Element) -> None:
    """Take out what a page has itself (rules of style, metadata) and the size on paper."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith("}metadata") or child.tag == f"{SVG}style":
                parent.remove(child)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)


def _name(root: ET.Element, name: str) -> None:
    """Give ids that are referred to a start of their own; take the others away."""
    used = set()
    for element in root.iter():
        for key, value in element.attrib.items():
            if key == XLINK_HREF and value.startswith("#"):
                used.add(value[1:])
            used.update(re.findall(r"url\(#([^)]+)\)", value))
    for element in root.iter():
        own = element.attrib.pop("id", None)
        if own in used:
            element.set("id", f"{name}-{own}")
        for key, value in list(element.attrib.items()):
            if key == XLINK_HREF:
                del element.attrib[key]
                # within the page, or an image that is written out
                element.set("href", f"#{name}-{value[1:]}" if value[0] == "#" else value)
            elif "url(#" in value:
                element.set(key, value.replace("url(#", f"url(#{name}-"))


def _dress(element: ET.Element, recolour: bool) -> None:
    """Write colours and letters as the page's, and coordinates without needless digits."""
    for key in ("d", "points", "transform", "x", "y", "width", "height"):
        value = element.get(key)
        if value is not None and element.tag != f"{SVG}image":
            element.set(key, _NUMBER.sub(_short, " ".join(value.split())))
    style = element.get("style")
    if style is not None:
        style = _FAMILY.sub("font-family: var(--sans)", _FONT.sub(r"\1 var(--sans)", style))
        element.set("style", style)
    if not recolour:
        return
    for key in ("style", "fill", "stroke"):
        value = element.get(key)
        if value is not None and "#" in value:
            element.set(key, re.sub(r"#[0-9a-f]{6}\b", _colour, value))


def _short(found: re.Match[str]) -> str:
    """Write a coordinate to a hundredth of a point."""
    return f"{float(found[0]):.2f}".rstrip("0").rstrip(".") or "0"


def _colour(found: re.Match[str]) -> str:
    """Name a colour where the page has one for it."""
    name = COLOURS.get(found[0].lower())
    return found[0] if name is None else f"var(--{name})"


def _describe(root: ET.Element, picture: Picture, name: str) -> None:
    """Add what is read out in place of the picture."""
    attributes: dict[str, Any] = {"title": picture.title, "desc": picture.note}
    for place, (tag, text) in enumerate(attributes.items()):
        element = ET.Element(f"{SVG}{tag}", {"id": f"{name}-{tag}"})
        element.text = text
        element.tail = "\n"
        root.insert(place, element)
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title")
    root.set("aria-describedby", f"{name}-desc")
