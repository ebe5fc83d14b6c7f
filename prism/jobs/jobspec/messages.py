"""The words of a job's mistakes: where, what was expected, what came, and a way out.

pydantic finds the mistakes of one block; here they become lines such as
`job.yaml:12: parallelism.tp: expected a whole number, got 'eight'; change it, or leave it out`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from prism.jobs.jobspec.blocks import BLOCKS, UNMODELLED
from prism.jobs.jobspec.effects import Effects
from prism.jobs.jobspec.othernames import key_of, note_of, value_of
from prism.jobs.jobspec.values import MAX_COUNT
from prism.jobs.jobspec.yaml import KeyPath, Layer, is_override, near


class Checked(NamedTuple):
    """A block and its mistakes; `doubtful` are keys whose values stand in for bad ones."""

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
        # A required key that was only misspelt is one mistake, not two.
        if detail["type"] != "missing" or path not in meant:
            found.append((path, _words(kind, path, detail)))
        if detail["type"] == "missing" and path[:-1]:
            doubtful.add(path := path[:-1])  # what lacks a key says nothing
        _drop(data, path)
    if isinstance(data, dict) and ("microbatches",) in doubtful:
        data["microbatches"] = 1
    try:
        return Checked(kind.model_validate(data), found, doubtful)
    except ValidationError:
        return Checked(kind.model_validate({}), found, {()})


def never_legal(layer: Layer) -> list[str]:
    """Say what is wrong with the keys that a layer sets, whatever else a job says."""
    if layer.problems:
        return layer.problems
    wrong = []
    for block, data in layer.values.items():
        if block not in BLOCKS:
            wrong.append(unknown_key(block, BLOCKS, ("base", *BLOCKS)))
            continue
        given = [path[1:] for path in layer.places if path[0] == block]
        for path, text in validate_block(BLOCKS[block], data).found:
            # what is missing may be given elsewhere
            if path in given:
                wrong.append(text)
        for key, values in UNMODELLED.items():
            value = data.get(key) if block == "parallelism" and isinstance(data, Mapping) else None
            if isinstance(value, str) and value in values:
                wrong.append(f"{value} is not modelled yet; take {values[value]}")
    return wrong


def _drop(tree: Any, path: KeyPath) -> None:
    """Remove a key, or the list it is an item of, from nested dicts."""
    for i, key in enumerate(path):
        if not isinstance(tree, dict) or key not in tree:
            return
        if i == len(path) - 1 or not isinstance(tree[key], dict):
            del tree[key]
            return
        tree = tree[key]


def concludes_from(keys: Iterable[str], doubtful: Iterable[str]) -> bool:
    """Return whether any of the dotted keys is doubtful, or lies below one that is."""
    below = tuple(f"{key}." for key in doubtful)
    return any(f"{key}.".startswith(below) for key in keys)


def _copied(data: Any) -> Any:
    """Copy the mappings of a tree, whose keys become text."""
    return {str(k): _copied(v) for k, v in data.items()} if isinstance(data, Mapping) else data


# ------------------------------------------------------------------------------------ messages
def _path(detail: ErrorDetails) -> KeyPath:
    return tuple(str(part) for part in detail["loc"] if part != "[key]")


def _fields(kind: type[BaseModel], path: KeyPath) -> list[str]:
    """Return the legal keys of the block found by walking `path` from `kind`."""
    for key in path:
        if key not in kind.model_fields:  # a name that the user chose, or a place in a list
            continue
        annotation = kind.model_fields[key].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        kind = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return list(kind.model_fields)


def _leaves() -> Iterator[str]:
    for block, kind in BLOCKS.items():
        yield from (f"{block}.{name}" for name in kind.model_fields)
    yield from (f"variability.effects.{name}" for name in Effects.model_fields)


def _meant(word: str, siblings: Iterable[str]) -> list[str]:
    """Return what an unknown key could have meant, the likeliest first: a sibling, or elsewhere."""
    siblings = list(siblings)
    same = [key for key in siblings if key == word.partition(":")[0].strip()]
    foreign = key_of(word)
    if foreign is not None:
        last = foreign.rsplit(".", 1)[1]
        return [last if last in siblings else foreign]
    elsewhere = [leaf for leaf in _leaves() if leaf.rsplit(".", 1)[1] == word]
    return same or near(word, siblings, 1) or elsewhere[:1]


def unknown_key(
    key: str, siblings: Sequence[str] | Mapping[str, Any], listed: Sequence[str]
) -> str:
    """Say what an unknown key could have meant."""
    meant, note = _meant(key, siblings), note_of(key)
    if ":" in key and meant:
        return f"unknown key; write `{meant[0]}: {key.partition(':')[2].strip()}`, with a space"
    if meant:
        return f"unknown key; did you mean {meant[0]}{f' ({note})' if note else ''}?"
    return f"unknown key; expected one of {', '.join(listed)}"


_REQUIRED = {
    "microbatches": "with a pipeline the number per replica and step must be given; "
    "write for example microbatches: 32",
    "forward_s": "expected seconds; give both forward_s and backward_s",
    "backward_s": "expected seconds; give both forward_s and backward_s",
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "dict": "a mapping of keys to values",
    "model": "a block of `key: value`",
}
_LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def _words(kind: type[BaseModel], path: KeyPath, detail: ErrorDetails) -> str:
    """Put one of pydantic's errors as: what was expected, what came, and a way out."""
    what, context = detail["type"], detail.get("ctx", {})
    if what == "extra_forbidden":
        fields = _fields(kind, path[:-1])
        return unknown_key(path[-1], fields, fields)
    if what == "missing":
        return f"missing; {_REQUIRED.get(path[-1], 'give it')}"
    if what == "value_error":
        return str(context.get("error", detail["msg"]))
    got = _shown(detail["input"])
    if what == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        word, key = str(detail["input"]), path[-1]
        modelled = [c for c in choices if c not in UNMODELLED.get(key, {})]
        other = value_of(key, word, modelled)
        meant = [other] if other else near(word, modelled, 1)
        way_out = f"did you mean {meant[0]}?" if meant else "take one of them"
        return f"expected {' or '.join(choices)}, got {got}; {way_out}"
    limits = [
        f"{_LIMITS[key]} {value:,}" if isinstance(value, int) else f"{_LIMITS[key]} {value:g}"
        for key, value in context.items()
        if key in _LIMITS
    ]
    if limits:
        return f"expected {limits[0]}, got {got}; change it, or leave it out"
    if what == "finite_number":
        return f"expected a finite number, got {got}; change it, or leave it out"
    base = what.split("_")[0]
    if base in _KINDS:
        return f"expected {_KINDS[base]}, got {got}; change it, or leave it out"
    return f"{detail['msg']}, got {got}; change it, or leave it out"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def message(layer: Layer, source: str, keys: list[KeyPath], label: str, text: str) -> str:
    """Write "place: label: text", the place being an override if one had a hand in it."""
    places = [layer.places[key] for key in keys if key in layer.places]
    overrides = [place for place in places if is_override(place)]
    place = next(iter(overrides or places), None)
    if place is None:
        below = (p for key, p in layer.places.items() if key[: len(keys[0])] == keys[0])
        place = next(below, None)
    if place is None:
        # The nearest enclosing key that is written somewhere, else the file.
        ancestors = [keys[0][:n] for n in range(len(keys[0]) - 1, 0, -1)]
        place = next((layer.places[a] for a in ancestors if a in layer.places), source)
    return f"{place}: {label}: {text}"


def by_line(text: str) -> tuple[bool, str, int]:
    """Order messages by file and line, those without a line after, overrides last."""
    found = re.match(r"(.*?)(?::(\d+))?: ", text)
    if is_override(text) or found is None:
        return True, "", 0
    return False, found[1], int(found[2] or MAX_COUNT)
