"""YAML text as trees that know the place of every key ("job.yaml:12" or "--set key=value").

YAML is version 1.2: `1e-3` is a number, `yes` is text, a key given twice is an error.
"""

import copy
import difflib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from prism.common.errors import PrismError, option
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
class ConfigLayer:
    """A tree of keys, the place of each, and the errors seen so far (one line each)."""

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
        return as_text(path.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return as_text(path)


def as_text(name: str | Path) -> str:
    """Return the name of a file as text: bytes that are no UTF-8 by their codes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def is_override(place: str) -> bool:
    """Tell the place of a value that was set over a job."""
    return place.startswith(OVERRIDES)


def _at_line(shown: str, line: int) -> str:
    return shown if is_override(shown) else f"{shown}:{line + 1}"


def read_text(path: Path) -> str:
    """Read a small UTF-8 file, refusing a large or binary one before it costs anything."""
    shown, way_out = display_path(path), "give a YAML job, not a trace, model or result"
    try:
        text = read_bytes(path, shown, MAX_BYTES, way_out).decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise PrismError(f"{shown}: is not UTF-8 text, expected a YAML job file; {way_out}")
    return text


@lru_cache(maxsize=32)  # shipped jobs and settings come again and again, and are only read
def _compose(text: str, shown: str) -> Node | None:
    """Parse YAML to nodes (they know their lines); a syntax error becomes a PrismError."""
    try:
        node: Node | None = YAML(typ="safe", pure=True).compose(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = shown if mark is None else _at_line(shown, mark.line)
        lines = (getattr(error, "problem", None) or str(error)).splitlines()
        reason = f": {lines[0][:200] if lines else 'cannot be parsed'}"
    except (RecursionError, ValueError, AttributeError, AssertionError) as error:
        # ruamel.yaml lets a few of these out on hostile input (deep nesting, odd directives).
        place, reason = shown, f" ({type(error).__name__})"
    else:
        return node
    way_out = "expected `key: value` lines, blocks indented by spaces"
    raise PrismError(f"{place}: not valid YAML{reason}; {way_out}")


def _scalar(node: Node) -> Any:
    """Return the Python value of a scalar; dates stay text, an unknown tag is an error."""
    kind, text = str(node.tag).rsplit(":", 1)[-1], str(node.value)
    plain = text.replace("_", "").lower()
    if kind == "null":
        return None
    if kind == "bool":
        return plain in ("true", "yes", "on")
    if kind == "int":
        if len(plain) > 40:  # beyond any size; Python refuses some thousands of digits anyway
            raise ValueError(f"a whole number of {len(plain)} digits; give a smaller one")
        return int(plain, 0 if plain.lstrip("+-")[:2] in ("0x", "0o", "0b") else 10)
    if kind == "float":
        return float(plain.replace(".inf", "inf").replace(".nan", "nan"))
    if kind in ("str", "timestamp", "merge", "value"):
        return text
    raise ValueError(f"tag {node.tag} is not supported; write a plain value")


class _Walker:
    """Turns nodes into a ConfigLayer, one visit per node, collecting errors with their lines."""

    def __init__(self, shown: str) -> None:
        self.shown, self.layer, self.nodes = shown, ConfigLayer(), 0

    def walk(self, node: Node, path: KeyPath) -> Any:
        """Return the value of a node and note the place of everything below it."""
        self.nodes += 1
        place = _at_line(self.shown, node.start_mark.line)
        if path:
            self.layer.places.setdefault(path, place)
        if self.nodes > MAX_NODES or len(path) > MAX_DEPTH:
            raise PrismError(
                f"{place}: more than {MAX_NODES:,} values or {MAX_DEPTH} levels "
                "(a repeating alias?), expected a job; write the values out"
            )
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self.walk(item, (*path, str(i))) for i, item in enumerate(node.value)]
        try:
            return _scalar(node)
        except ValueError as error:
            self.layer.problems.append(f"{place}: {'.'.join(path)}: {error}")
            return None

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = _at_line(self.shown, key_node.start_mark.line)
            # Keys are text throughout (node 3 of node_slowdowns is "3"), as in JSON.
            key = str(key_node.value)
            here = (*path, key)
            if not isinstance(key_node, ScalarNode):
                self.layer.problems.append(f"{place}: a key must be a word; quote it or rename it")
            elif key in out:
                first = self.layer.places[here]
                twice = f"{place}: {'.'.join(here)}: given twice, first at {first}; keep one"
                self.layer.problems.append(twice)
            else:
                self.layer.places[here] = place
                out[key] = self.walk(value_node, here)
        return out


def parse_yaml(text: str, shown: str, start: str = "", items: str = "") -> ConfigLayer:
    """Parse one YAML mapping into a ConfigLayer whose places are "shown:line"; `start`: what to do.

    A list, where it may be one, is that of the key `items`.
    """
    node = _compose(text, shown)
    start = start or "start with `base: NAME`, NAME one of " + ", ".join(shipped_jobs())
    if node is None:
        raise PrismError(f"{shown}: is empty, expected a job; {start}")
    walker = _Walker(shown)
    if items and isinstance(node, SequenceNode):
        walker.layer.values = {items: walker.walk(node, (items,))}
        return walker.layer
    if not isinstance(node, MappingNode):
        kind = "a list" if isinstance(node, SequenceNode) else "plain text"
        raise PrismError(f"{shown}:1: holds {kind}, expected blocks of `key: value`; {start}")
    walker.layer.values = walker.walk(node, ())
    return walker.layer


def override_layer(text: str) -> ConfigLayer:
    """Turn one `key=value` of `--set` into a ConfigLayer; errors are in its `problems`."""
    if not isinstance(text, str):
        raise PrismError(f"{option('overrides')} {text!r}: expected text such as parallelism.dp=64")
    key, equals, value = text.partition("=")
    walker = _Walker(_shown(text))
    try:
        node = _compose(value, walker.shown)
        path = _key_path(key if equals else "", walker.shown)
        inner = None if node is None else walker.walk(node, path)
    except PrismError as error:
        return ConfigLayer(problems=list(error.args))
    return _at(path, inner, walker.shown, walker.layer.problems)


def set_layer(key: str, value: Any) -> ConfigLayer:
    """Turn a dotted key and its value into a ConfigLayer; errors are in its `problems`."""
    shown = _shown(f"{key}={value}")
    try:
        return _at(_key_path(key, shown), copy.deepcopy(value), shown, [])
    except PrismError as error:
        return ConfigLayer(problems=list(error.args))


def key_paths(tree: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Key paths of everything in a tree."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in pairs:
        yield (*path, str(key))
        if isinstance(value, dict | list):
            yield from key_paths(value, (*path, str(key)))


def drop(tree: Any, path: KeyPath) -> KeyPath:
    """Remove a key, or the list it is an item of, from nested dicts; return what went."""
    for i, key in enumerate(path):
        if not isinstance(tree, dict) or key not in tree:
            break
        if i == len(path) - 1 or not isinstance(tree[key], dict):
            del tree[key]
            return path[: i + 1]
        tree = tree[key]
    return path


def _shown(text: str) -> str:
    return f"{option('overrides')} {text if len(text) <= 100 else text[:97] + '...'}"


def _key_path(key: str, shown: str) -> KeyPath:
    path = tuple(part.strip() for part in key.split("."))
    if not all(path):
        way_out = f"write for example {_shown('parallelism.dp=64')}"
        raise PrismError(f"{shown}: expected block.key=value; {way_out}")
    if path == ("base",):
        way_out = "load that job, or write a file with `base:`"
        raise PrismError(f"{shown}: a base cannot be set here; {way_out}")
    return path


def _at(path: KeyPath, value: Any, shown: str, problems: list[str]) -> ConfigLayer:
    """Make a layer of the value of a key: the place of all keys but the block's is `shown`."""
    for part in reversed(path):
        value = {part: value}
    own = key_paths(value) if len(path) == 1 else islice(key_paths(value), 1, None)
    return ConfigLayer(value, dict.fromkeys(own, shown), problems)
