"""The words of a job's errors: where, what was expected, what came, how to correct it.

pydantic finds the errors of one block; here they become lines such as
`job.yaml:12: parallelism.tp: expected a whole number, got 'eight'; change it, or leave it out`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from prism.jobs.jobspec.blocks import BLOCKS, UNMODELLED
from prism.jobs.jobspec.effects import Effects
from prism.jobs.jobspec.othernames import key_of, note_of, value_of
from prism.jobs.jobspec.values import MAX_COUNT
from prism.jobs.jobspec.yaml import ConfigLayer, KeyPath, drop, is_override, near


class Checked(NamedTuple):
    """A block and its errors; `doubtful` are keys whose values stand in for bad ones."""

    block: Any
    found: list[tuple[KeyPath, str]]
    doubtful: set[KeyPath]


def validate_block(kind: type[BaseModel], data: Any) -> Checked:
    """Validate a block by itself, with defaults for its bad keys.

    What is left lets the checks between keys run as well, so that a misspelt word does not
    hide that the sizes do not fit. Nothing may be concluded from a doubtful key.
    """
    data = _copied(data)
    try:
        return Checked(kind.model_validate(data), [], set())
    except ValidationError as error:
        details = error.errors()
    unknown = [_path(d) for d in details if d["type"] == "extra_forbidden"]
    meant = {
        (*path[:-1], word)
        for path in unknown
        for word in _meant(path[-1], _fields(kind, path[:-1]))
    }
    found, doubtful = [], set(meant)
    for detail in details:
        path = _path(detail)
        if detail["type"] != "extra_forbidden":
            doubtful.add(path)
        # A required key that was only misspelt is one error, not two.
        if detail["type"] != "missing" or path not in meant:
            found.append((path, _words(kind, path, detail)))
        if detail["type"] == "missing" and path[:-1]:
            doubtful.add(path := path[:-1])  # what lacks a key says nothing
        doubtful.add(drop(data, path))
    if isinstance(data, dict) and {("microbatches",), ("global_batch",)} & doubtful:
        data["microbatches"] = 1
    try:
        return Checked(kind.model_validate(data), found, doubtful)
    except ValidationError:
        return Checked(kind.model_validate({}), found, {()})


def never_legal(layer: ConfigLayer) -> list[str]:
    """Say what is wrong with the keys that a layer sets, whatever else a job says."""
    if layer.problems:
        return layer.problems
    wrong = []
    for block, data in layer.values.items():
        if block not in BLOCKS:
            wrong.append(unknown_key(block, BLOCKS))
            continue
        # what is missing may be given elsewhere
        found = validate_block(BLOCKS[block], data).found
        wrong += [text for path, text in found if (block, *path) in layer.places]
        for key, values in UNMODELLED.items():
            value = data.get(key) if block == "parallelism" and isinstance(data, Mapping) else None
            if isinstance(value, str) and value in values:
                wrong.append(f"{value} is not modelled yet; take {values[value]}")
    return wrong


def concludes_from(keys: Iterable[str], doubtful: Iterable[str]) -> bool:
    """Return whether any of the dotted keys is doubtful, or lies below one that is."""
    below = tuple(f"{key}." for key in doubtful)
    return any(f"{key}.".startswith(below) for key in keys)


def _copied(data: Any) -> Any:
    """Copy the mappings of a tree, whose keys become text."""
    return {str(k): _copied(v) for k, v in data.items()} if isinstance(data, Mapping) else data


def _path(detail: ErrorDetails) -> KeyPath:
    return tuple(str(part) for part in detail["loc"] if part not in ("[key]", "[block]", "[word]"))


def _fields(kind: type[BaseModel], path: KeyPath) -> list[str]:
    """Return the legal keys of the block found by walking `path` from `kind`."""
    for key in path:
        if key not in kind.model_fields:  # a name that the user chose, or a place in a list
            continue
        kind = next(_blocks_in(kind.model_fields[key].annotation))
    return list(kind.model_fields)


def _blocks_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Find the blocks in a field's type, however it is wrapped."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _blocks_in(part)


def _meant(word: str, siblings: Iterable[str]) -> list[str]:
    """Return what an unknown key could have meant: a sibling, or a key elsewhere."""
    same = [key for key in siblings if key == word.partition(":")[0].strip()]
    foreign = key_of(word)
    if foreign is not None:
        last = foreign.rsplit(".", 1)[1]
        return [last if last in siblings else foreign]
    elsewhere = dotted_key(word)
    return same or near(word, siblings, 1) or ([elsewhere] if elsewhere else [])


def dotted_key(word: str) -> str | None:
    """Return the key of a job that a word stands for, here or in another framework."""
    known: dict[str, type[BaseModel]] = {**BLOCKS, "variability.effects": Effects}
    own = (f"{block}.{word}" for block, kind in known.items() if word in kind.model_fields)
    return key_of(word) or next(own, None)


def unknown_key(key: str, siblings: Iterable[str]) -> str:
    """Say what an unknown key could have meant."""
    meant, note = _meant(key, siblings), note_of(key)
    if ":" in key and meant:
        return f"unknown key; write `{meant[0]}: {key.partition(':')[2].strip()}`, with a space"
    if meant:
        return f"unknown key; did you mean {meant[0]}{f' ({note})' if note else ''}?"
    return f"unknown key; expected one of {', '.join(siblings)}"


_REQUIRED = {
    "microbatches": "with a pipeline the number per replica and step must be given; "
    "write for example microbatches: 32, or global_batch: 256, the sequences of a step",
    "forward_s": "expected seconds; give both forward_s and backward_s",
    "backward_s": "expected seconds; give both forward_s and backward_s",
}
# What was expected, by the first word of pydantic's type of error, or by the limit in its context.
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "dict": "a mapping of keys to values",
    "model": "a block of `key: value`",
    "finite": "a finite number",
}
_LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def _words(kind: type[BaseModel], path: KeyPath, detail: ErrorDetails) -> str:
    """Put one of pydantic's errors as: what was expected, what came, and how to correct it."""
    what, context = detail["type"], detail.get("ctx", {})
    if what == "extra_forbidden":
        return unknown_key(path[-1], _fields(kind, path[:-1]))
    if what == "missing":
        return f"missing; {_REQUIRED.get(path[-1], 'give it')}"
    if what == "value_error":
        return str(context["error"])
    value, way_out = detail["input"], "change it, or leave it out"
    got = "a mapping" if isinstance(value, Mapping) else repr(value)
    got = got if len(got) <= 60 else f"{got[:57]}..."
    limit = next((key for key in _LIMITS if key in context), None)
    if what == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        word, key = str(value), path[-1]
        modelled = [c for c in choices if c not in UNMODELLED.get(key, {})]
        meant = value_of(key, word, modelled) or next(iter(near(word, modelled, 1)), None)
        expected = f"expected {' or '.join(choices)}"
        way_out = f"did you mean {meant}?" if meant else "take one of them"
    elif limit is not None:
        number = context[limit]
        shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
        expected = f"expected {_LIMITS[limit]} {shown}"
        if path[-1] == "cv" and limit == "le" and 1 < value <= 100:
            way_out = f"a ratio: {value:g} % is {value / 100:g}"
    else:
        known = _KINDS.get(what.split("_")[0])
        expected = f"expected {known}" if known else detail["msg"]
    return f"{expected}, got {got}; {way_out}"


def message(layer: ConfigLayer, source: str, keys: Sequence[KeyPath], text: str) -> str:
    """Write "place: key: text", the place being an override if one had a hand in it."""
    first, places = keys[0], layer.places
    given = [places[key] for key in keys if key in places]
    overrides = [place for place in given if is_override(place)]
    below = (place for key, place in places.items() if key[: len(first)] == first)
    # The nearest enclosing key that is written somewhere, else the file.
    above = (places[first[:n]] for n in range(len(first) - 1, 0, -1) if first[:n] in places)
    place = next(chain(overrides, given, below, above, [source]))
    return f"{place}: {'.'.join(first)}: {text}"


def by_line(text: str) -> tuple[bool, str, int]:
    """Order messages by file and line, those without a line after, overrides last."""
    found = re.match(r"(.*?)(?::(\d+))?: ", text)
    if is_override(text) or found is None:
        return True, "", 0
    return False, found[1], int(found[2] or MAX_COUNT)
