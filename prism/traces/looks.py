"""What a file looks like, for messages about one that no reader knows."""

from __future__ import annotations

import json
import re
from collections import Counter

from prism.traces.file import RecordedFile, header_of, is_number

_KEY = re.compile(r'"([^"\\]{1,60})"\s*:')
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SHOWN, _LONGEST = 8, 120  # names, characters of a line


def what_is(file: RecordedFile) -> str:
    """Say what a file looks like: its lines, the keys of its JSON, the columns of its table."""
    if file.kind in ("binary", "sqlite"):
        return {"binary": "binary", "sqlite": "an SQLite database"}[file.kind]
    if file.kind == "json":
        keys, is_lines = _keys(file.head.decode("utf-8", "replace"))
        return f"{'lines of ' * is_lines}JSON with {_listed('key', keys)}"
    if is_table(file):
        kind = "a parquet table" if file.kind == "parquet" else "CSV"
        return f"{kind} with {_listed('column', file.columns)}"
    lines = [_COLOUR.sub("", line).strip() for line in file.lines]
    shapes = [re.sub(r"\d+", "0", line) for line in lines]
    usual = Counter(shapes).most_common(1)[0][0]
    line = lines[shapes.index(usual)]
    return f"text of lines such as {line[:_LONGEST] + ' ...' * (len(line) > _LONGEST)!r}"


def is_table(file: RecordedFile) -> bool:
    """Tell a table: its first line names columns, of which one at least holds numbers."""
    if file.kind != "text":
        return file.kind == "parquet"
    delimiter = header_of(file.head)[1]
    rows = [line.split(delimiter) for line in file.lines[1:]]
    whole = [row for row in rows if len(row) == len(file.columns)]
    return 2 * len(whole) > len(rows) and any(
        2 * sum(map(is_number, cells)) >= len(cells) for cells in zip(*whole, strict=True)
    )


def _keys(text: str) -> tuple[list[str], bool]:
    """Find the keys of a JSON's (first) object, and whether more objects follow, line by line."""
    try:
        found, end = json.JSONDecoder().raw_decode(text.lstrip().lstrip("["))
    except (ValueError, RecursionError):  # a head of a long file, or none
        return list(dict.fromkeys(_KEY.findall(text))), False
    is_lines = text.lstrip()[end:].lstrip().startswith("{")
    return (list(found) if isinstance(found, dict) else []), is_lines


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return f"no {what}s"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    s = "s" * (len(names) > 1)
    return f"the {what}{s} {', '.join(name[:60] for name in names[:_SHOWN])}{more}"
