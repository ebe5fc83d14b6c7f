"""Pictures within a page: SVG in the light and in the dark style, of which the page shows one."""

from __future__ import annotations

import re
from io import BytesIO
from xml.etree import ElementTree as ET

from prism.plots.base import STYLES, style
from prism.present.answer import Picture

SVG = "{http://www.w3.org/2000/svg}"
HREF = "{http://www.w3.org/1999/xlink}href"
_NUMBER = re.compile(r"-?\d+\.\d+")
_COORDINATES = ("d", "points", "transform", "x", "y", "width", "height")


def to_svg(picture: Picture, name: str) -> str:
    """Draw a picture in both styles, as elements of a page."""
    return "\n".join(_element(picture, f"{name}-{which}", which) for which in STYLES)


def _element(picture: Picture, name: str, which: str) -> str:
    """Draw a picture in a style, with ids of its own, a title and a description."""
    buffer = BytesIO()
    with style(which):
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
        for key in _COORDINATES:
            if key in element.attrib and element.tag != f"{SVG}image":
                text = " ".join(element.attrib[key].split())
                element.set(key, _NUMBER.sub(_short, text))
    _name(root, name)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    for place, (tag, text) in enumerate((("title", picture.title), ("desc", picture.note))):
        described = ET.Element(f"{SVG}{tag}", {"id": f"{name}-{tag}"})
        described.text = text
        root.insert(place, described)
    root.attrib.update({"class": which, "role": "img", "aria-labelledby": f"{name}-title",
                        "aria-describedby": f"{name}-desc"})  # fmt: skip
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
