"""Pictures within a page: SVG whose colours are the page's, light or dark."""

from __future__ import annotations

import re
from functools import lru_cache
from io import BytesIO
from xml.etree import ElementTree as ET

from matplotlib import rc_context, rcParams
from matplotlib.colors import to_hex

from prism.plots.base import style
from prism.present.answer import Picture

SVG = "{http://www.w3.org/2000/svg}"
HREF = "{http://www.w3.org/1999/xlink}href"
_NUMBER = re.compile(r"-?\d+\.\d+")
_COLOUR = re.compile(r"#[0-9a-f]{6}")
_COORDINATES = ("d", "points", "transform", "x", "y", "width", "height")
_PAPER = "#fefefe"  # what is drawn in the paper's colour, and so not white on dark paper


def colours(which: str) -> dict[str, str]:
    """Give a style's colours by the CSS variables that stand for them in a page."""
    with style(which):
        cycle = rcParams["axes.prop_cycle"].by_key()["color"]
        found = {f"--c{i}": colour for i, colour in enumerate(cycle)}
        found |= {
            "--ink": rcParams["text.color"], "--card": rcParams["axes.facecolor"],
            "--grid": rcParams["grid.color"], "--hatch": rcParams["hatch.color"],
        }  # fmt: skip
    return {name: to_hex(c if c.startswith("#") else f"#{c}") for name, c in found.items()}


@lru_cache(maxsize=1)
def _variables() -> dict[str, str]:
    """CSS variable of each colour that pictures of a page are drawn in."""
    return {colour: name for name, colour in (colours("light") | {"--card": _PAPER}).items()}


def to_svg(picture: Picture, name: str) -> str:
    """Draw a picture as an element of a page, with ids of its own, a title and a description."""
    buffer = BytesIO()
    with style(), rc_context({"axes.facecolor": _PAPER}):
        figure = picture.draw().get_figure(root=True)
        assert figure is not None
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    root = ET.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            # a page has rules of its own, and an SVG of a page no metadata
            if child.tag.endswith("}metadata") or child.tag == f"{SVG}style":
                parent.remove(child)
    for element in root.iter():
        for key, text in element.attrib.items():
            if key in _COORDINATES and element.tag != f"{SVG}image":
                element.set(key, _NUMBER.sub(_short, " ".join(text.split())))
            elif key in ("style", "fill", "stroke"):
                element.set(key, _COLOUR.sub(_of_page, text))
    _name(root, name)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    for place, (tag, text) in enumerate((("title", picture.title), ("desc", picture.note))):
        described = ET.Element(f"{SVG}{tag}", {"id": f"{name}-{tag}"})
        described.text = text
        root.insert(place, described)
    root.attrib.update({
        "role": "img", "aria-labelledby": f"{name}-title", "aria-describedby": f"{name}-desc",
    })  # fmt: skip
    ET.register_namespace("", SVG[1:-1])
    return ET.tostring(root, encoding="unicode")


def _name(root: ET.Element, name: str) -> None:
    """Give ids that are referred to a start of their own; take the others away."""
    used = set()
    for element in root.iter():
        for key, value in list(element.attrib.items()):
            used.update(re.findall(r"url\(#([^)]+)\)", value))
            element.set(key, value.replace("url(#", f"url(#{name}-"))
        link = element.attrib.pop(HREF, None)
        if link is not None:  # within the picture, or an image that is written out
            inner = link.startswith("#")
            used.update([link[1:]] * inner)
            element.set("href", f"#{name}-{link[1:]}" if inner else link)
    for element in root.iter():
        own = element.attrib.pop("id", None)
        if own in used:
            element.set("id", f"{name}-{own}")


def _short(found: re.Match[str]) -> str:
    """Write a coordinate to a tenth of a point."""
    return f"{float(found[0]):.1f}".rstrip("0").rstrip(".") or "0"


def _of_page(found: re.Match[str]) -> str:
    """Write a colour of the style by its CSS variable; others are the same on any paper."""
    variable = _variables().get(found[0])
    return found[0] if variable is None else f"var({variable})"
