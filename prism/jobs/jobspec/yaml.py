"""YAML text as trees that know the place of every key: what a job file says, line by line.

What comes out is a `Layer`: keys and, for each key path, the place it came from ("job.yaml:12" or
"--set key=value"). YAML is version 1.2: `1e-3` is a number, `yes` is text, a key given twice is a
mistake. Left out: which file is read, and layers upon each other (`prism.jobs.jobspec.layers`).
"""

import copy
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from prism.common.errors import PrismError, named
from prism.common.files import read_bytes
from prism.common.shipped import data_path

KeyPath = tuple[str, ...]

OVERRIDES = "--set ", "overrides "  # how places of overrides begin, typed or from Python
# The shipped jobs are about 2 kB; a megabyte is some other file, and YAML is slow to say so.
MAX_BYTES = 1 << 20
# Aliases may repeat a node without end: stop long before memory does.
MAX_NODES = 50_000
MAX_DEPTH = 40


@dataclass
class Layer:
    """A tree of keys, the place of each, and the mistakes seen so far (one line each)."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def near(word: str, choices: Iterable[str], n: int = 3) -> list[str]:
    """Return up to `n` of `choices` that begin with `word`, then those that look like it."""
    by_lower, wanted = {choice.lower(): choice for choice in choices}, word.lower()
    begin = [choice for choice in by_lower if wanted and choice.startswith(wanted)]
    alike = difflib.get_close_matches(wanted, by_lower, n=n, cutoff=0.6)
    return [by_lower[match] for match in dict.fromkeys([*begin, *alike])][:n]


def shipped_jobs() -> list[str]:
    """Return the names of the jobs that ship with prism, sorted."""
    return sorted(path.stem for path in data_path("jobs").glob("*.yaml"))


def display_path(path: Path) -> str:
    """Return a path as messages show it: relative when it lies below the working folder."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def read_text(path: Path) -> str:
    """Read a small UTF-8 file, refusing a large or binary one before it costs anything."""
    shown, way_out = display_path(path), "give a YAML job, not a trace, model or result"
    raw = read_bytes(path, shown, MAX_BYTES, way_out)
    try:
        text = raw.decode("utf-8-sig")
        wrong = "\0" in text
    except UnicodeDecodeError:
        wrong = True
    if wrong:
        raise PrismError(
            f"{shown}: is not UTF-8 text, expected a YAML job file; "
            "give a job, not a trace, model or result"
        )
    return text


def _compose(text: str, shown: str) -> Node | None:
    """Parse YAML to nodes (they know their lines); a syntax error becomes a PrismError."""
    try:
        node: Node | None = YAML(typ="safe", pure=True).compose(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = shown if mark is None or is_override(shown) else f"{shown}:{mark.line + 1}"
        lines = (getattr(error, "problem", None) or str(error)).splitlines()
        reason = (lines[0] if lines else "cannot be parsed")[:200]
        raise PrismError(
            f"{place}: not valid YAML: {reason}; expected `key: value` lines, "
            "blocks indented by spaces"
        ) from None
    except (RecursionError, ValueError, AttributeError, AssertionError) as error:
        # ruamel.yaml lets a few of these out on hostile input (deep nesting, odd directives).
        raise PrismError(
            f"{shown}: not valid YAML ({type(error).__name__}); expected `key: value` lines, "
            "blocks indented by spaces"
        ) from None
    return node


def _scalar(node: Node) -> Any:
    """Return the Python value of a scalar; dates stay text, an unknown tag is an error."""
    kind = str(node.tag).rsplit(":", 1)[-1]
    text = str(node.value)
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() in ("true", "yes", "on")
    if kind == "int":
        digits = text.replace("_", "").lower()
        if len(digits) > 40:  # beyond any size; Python refuses some thousands of digits anyway
            raise ValueError(f"a whole number of {len(digits)} digits; give a smaller one")
        return int(digits, 0 if digits.lstrip("+-")[:2] in ("0x", "0o", "0b") else 10)
    if kind == "float":
        return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    if kind in ("str", "timestamp", "merge", "value"):
        return text
    raise ValueError(f"tag {node.tag} is not supported; write a plain value")


class _Walker:
    """Turns nodes into a Layer, one visit per node, collecting mistakes with their lines."""

    def __init__(self, shown: str, fixed_place: bool) -> None:
        self.shown, self.fixed_place = shown, fixed_place
        self.layer = Layer()
        self.nodes = 0

    def place(self, node: Node) -> str:
        """Return "file:line" of a node, or the override's own text."""
        return self.shown if self.fixed_place else f"{self.shown}:{node.start_mark.line + 1}"

    def walk(self, node: Node, path: KeyPath) -> Any:
        """Return the value of a node and note the place of everything below it."""
        self.nodes += 1
        if self.nodes > MAX_NODES or len(path) > MAX_DEPTH:
            raise PrismError(
                f"{self.place(node)}: more than {MAX_NODES:,} values or {MAX_DEPTH} levels "
                "(a repeating alias?), expected a job; write the values out"
            )
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            items = []
            for i, item in enumerate(node.value):
                self.layer.places[(*path, str(i))] = self.place(item)
                items.append(self.walk(item, (*path, str(i))))
            return items
        try:
            return _scalar(node)
        except ValueError as error:
            self.layer.problems.append(f"{self.place(node)}: {'.'.join(path)}: {error}")
            return None

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = self.place(key_node)
            if not isinstance(key_node, ScalarNode):
                self.layer.problems.append(f"{place}: a key must be a word; quote it or rename it")
                continue
            # Keys are text throughout (node 3 of node_slowdowns is "3"), as in JSON.
            key = str(key_node.value)
            here = (*path, key)
            if key in out:
                self.layer.problems.append(
                    f"{place}: {'.'.join(here)}: given twice, first at "
                    f"{self.layer.places[here]}; keep one"
                )
                continue
            self.layer.places[here] = place
            out[key] = self.walk(value_node, here)
        return out


def parse_yaml(text: str, shown: str) -> Layer:
    """Parse one YAML mapping into a Layer whose places are "shown:line"."""
    node = _compose(text, shown)
    start = "start with `base: NAME`, NAME one of " + ", ".join(shipped_jobs())
    if node is None:
        raise PrismError(f"{shown}: is empty, expected a job; {start}")
    if not isinstance(node, MappingNode):
        kind = "a list" if isinstance(node, SequenceNode) else "plain text"
        raise PrismError(f"{shown}:1: holds {kind}, expected blocks of `key: value`; {start}")
    walker = _Walker(shown, fixed_place=False)
    walker.layer.values = walker.walk(node, ())
    return walker.layer


def override_layer(text: str) -> Layer:
    """Turn one `key=value` of `--set` into a Layer; mistakes are in its `problems`."""
    if not isinstance(text, str):
        raise PrismError(f"{named('overrides')} {text!r}: expected text such as parallelism.dp=64")
    shown = _shown(text)
    key, equals, value = text.partition("=")
    walker = _Walker(shown, fixed_place=True)
    try:
        node = _compose(value, shown)
        path = _key_path(key if equals else "", shown)
        inner = None if node is None else walker.walk(node, path)
    except PrismError as error:
        return Layer(problems=[str(error)])
    return _at(path, inner, shown, walker.layer)


def set_layer(key: str, value: Any) -> Layer:
    """Turn a dotted key and its value into a Layer; mistakes are in its `problems`."""
    shown = _shown(f"{key}={value}")
    try:
        path = _key_path(key, shown)
    except PrismError as error:
        return Layer(problems=[str(error)])
    layer = _at(path, copy.deepcopy(value), shown, Layer())
    if isinstance(value, dict):
        layer.places.update(dict.fromkeys(key_paths(value, path), shown))
    return layer


def key_paths(tree: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Key paths of everything in a tree."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in pairs:
        yield (*path, str(key))
        if isinstance(value, dict | list):
            yield from key_paths(value, (*path, str(key)))


def is_override(place: str) -> bool:
    """Tell the place of a value that was set over a job."""
    return place.startswith(OVERRIDES)


def _shown(text: str) -> str:
    return f"{named('overrides')} {text if len(text) <= 100 else text[:97] + '...'}"


def _key_path(key: str, shown: str) -> KeyPath:
    path = tuple(part.strip() for part in key.split("."))
    if not all(path):
        way_out = f"write for example {_shown('parallelism.dp=64')}"
        raise PrismError(f"{shown}: expected block.key=value; {way_out}")
    if path == ("base",):
        way_out = "load that job, or write a file with `base:`"
        raise PrismError(f"{shown}: a base cannot be set here; {way_out}")
    return path


def _at(path: KeyPath, inner: Any, shown: str, layer: Layer) -> Layer:
    """Put a value at a key, the place of all keys on the way to it."""
    for i in range(2, len(path) + 1):
        layer.places[path[:i]] = shown
    if len(path) == 1:
        layer.places[path] = shown
    for part in reversed(path):
        inner = {part: inner}
    layer.values = dict(inner or {})
    return layer
