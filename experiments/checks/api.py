"""docs/api.md: every public function and class of prism, from its docstring.

    python experiments/checks/api.py

Writes the page; `tests/test_documentation.py` holds it against the docstrings.
"""

import inspect
import re
import textwrap
from pathlib import Path

import prism
import prism.plots
from prism.common.resultfiles import KINDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "api.md"
ROOMS = {
    "jobs": "Jobs", "simulation": "Simulation", "analyses": "Analyses", "models": "Models",
    "cluster": "Nodes", "distributions": "Libraries", "measuring": "Measurements",
    "common": "Results", "present": "Reports",
}  # fmt: skip
"""Parts of the page, by the package that their names are in."""

HEAD = """# Python API

What the commands call; times are in seconds, probabilities in [0, 1]. Results have
labelled arrays and tables with units. [Commands](../README.md#commands),
[glossary](glossary.md). Made from the docstrings by `experiments/checks/api.py`; the tests
run the examples, in a checkout, but for those that need torch or take long.
"""


def public(package):
    """Give room and name of everything that a package's stub makes public."""
    stub = Path(package.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    yield from re.findall(r"^from \.(\w+)\S* import \w+ as (\w+)$", stub, re.M)


def signature(thing):
    """Give what is called, without types, which the parameters have."""
    if thing is prism.PrismError:
        return ""
    found = inspect.signature(thing)
    bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=found.empty))


def plain(text):
    """Make Markdown of a docstring's text."""
    text = re.sub(r"\.\. \[(\d)\]", r"* \\[\1\\]", text.replace("``", "`"))
    return re.sub(r"\[(\d)\]_", r"\\[\1\\]", text).replace("*options", r"\*options")


def entries(body):
    """Make a list of numpydoc entries: a name and its type, and what is said of it below."""
    for entry in re.split(r"\n(?=\S)", body):
        head, _, text = entry.partition("\n")
        name, _, kind = head.partition(" : ")
        shown = ", ".join(f"`{part}`" for part in name.split(", ")) + (f" ({kind})" if kind else "")
        text = textwrap.dedent(text).strip()
        yield f"* {shown}" + (": " + text.replace("\n", "\n  ") if text else "")


def section(title, body):
    """Write one part of a docstring."""
    if title == "Examples":
        body = re.sub(r" *# doctest: .*", "", body)
        return f"```python\n{body}\n```"
    if title in ("Parameters", "Attributes", "Returns", "Yields", "Raises"):
        return f"**{title}**\n\n" + plain("\n".join(entries(body)))
    return f"**{title}**\n\n" + plain(body)


def describe(name, thing):
    """Write one function, class or method."""
    call = name + ("" if thing is prism.Result else signature(thing))
    text = inspect.getdoc(thing)
    first, *rest = re.split(r"\n\n(?=\w+\n-+\n)", text)
    parts = [re.match(r"(\w+)\n-+\n(.*)", part, re.S).groups() for part in rest]
    call = "\n    ".join(textwrap.wrap(call, 96, break_long_words=False, break_on_hyphens=False))
    yield f"### {name}\n\n```text\n{call}\n```\n\n{plain(first)}"
    yield from (section(title, body.strip("\n")) for title, body in parts)
    if thing is prism.Job:
        fields = [f"* `{key}`: {field.description}" for key, field in thing.model_fields.items()]
        own = {k: v for k, v in vars(thing).items() if not k.startswith(("_", "model_"))}
        for member, value in own.items():
            if isinstance(value, property):
                fields.append(f"* `{member}`: {plain(inspect.getdoc(value))}")
        yield "**Attributes**\n\n" + "\n".join(fields)
        yield from describe(f"{name}.replace", thing.replace)
    if thing is prism.Result:
        yield "**Attributes**\n\n" + "\n".join(members(thing))
        yield "**Kinds of results**"
        kinds = dict.fromkeys(kind.result_class() for kind in KINDS.values())
        for kind in kinds:
            own = [line for line in members(kind) if not line.startswith("* `figures")]
            if own:
                yield f"`{kind.__name__}`: {inspect.getdoc(kind).splitlines()[0]}\n\n" + "\n".join(
                    own
                )


def members(kind):
    """List what a class of results has itself: tables and methods."""
    for member, value in vars(kind).items():
        if member.startswith("_") or member == "is_whole" or not inspect.getdoc(value):
            continue
        called = f"{member}{signature(value)}" if inspect.isfunction(value) else member
        called = called.replace("(self, ", "(").replace("(self)", "()")
        yield f"* `{called}`: {plain(inspect.getdoc(value).splitlines()[0])}"


def page():
    """Write the whole page."""
    parts = [HEAD.strip()]
    names = list(public(prism))
    for room, title in ROOMS.items():
        parts.append(f"## {title}")
        for name in (name for of, name in names if of == room):
            parts += describe(f"prism.{name}", getattr(prism, name))
    parts.append("## Plots\n\nEach draws a result, on `ax` or in a new figure, and returns axes.")
    for _, name in public(prism.plots):
        parts += describe(f"prism.plots.{name}", getattr(prism.plots, name))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
