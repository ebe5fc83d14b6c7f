"""Grids of settings: what `--vary key=a,b,c` says, and a job with other values of some keys.

What a job was not given follows from what it is given, also at another setting.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from prism.common.errors import PrismError, option
from prism.common.text import format_count
from prism.jobs.job import Job, job_from_dict
from prism.jobs.jobspec.layers import merge
from prism.jobs.jobspec.messages import never_legal
from prism.jobs.jobspec.yaml import ConfigLayer, override_layer
from prism.jobs.pipelineshape import TRAITS

MOST_POINTS = 20_000
"""Settings of one sweep at most; more is a slip of the pen rather than a question."""

_RANGE = re.compile(r"\s*(-?\d+):(-?\d+)(?::(-?\d+))?\s*")

Setting = dict[str, str]  # values, as they would be written after ``--set``, by key


def parse_vary(texts: Sequence[str]) -> dict[str, list[str]]:
    """Read grids as they are given to ``--vary``: values by key.

    Each is ``key=a,b,c``; commas inside brackets and quotes belong to a value. ``a:b`` and
    ``a:b:step`` are whole numbers from a up to b. A key or value that is there twice is an error.

    Examples
    --------
    >>> parse_vary(["parallelism.dp=8:24:8", "parallelism.layer_split=[1, 2],[2, 1]"])
    {'parallelism.dp': ['8', '16', '24'], 'parallelism.layer_split': ['[1, 2]', '[2, 1]']}
    """
    grid: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        if not (key and equals and values):
            raise PrismError(
                f"{option('vary')} {text}: expected key=value,value,..., for example "
                "parallelism.dp=64,128"
            )
        if key in grid:
            raise PrismError(
                f"{option('vary')} {text}: {key} is varied twice; put its values together"
            )
        grid[key] = [each for value in _split(values) for each in _expand(value, text)]
    return _checked(grid)


def grid_of(vary: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
    """Write values given in Python as they would be given to ``--vary``."""
    grid: dict[str, list[str]] = {}
    for key, values in vary.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise PrismError(f"vary: {key}: expected a list of values, got {values!r}")
        grid[key] = [v if isinstance(v, str) else json.dumps(v) for v in values]
    return _checked(grid)


def _checked(grid: dict[str, list[str]]) -> dict[str, list[str]]:
    for key, values in grid.items():
        if not values:
            raise PrismError(f"{option('vary')} {key}: no values; expected one or more")
        twice = next((v for v, times in Counter(values).items() if times > 1), None)
        if twice is not None:
            raise PrismError(f"{option('vary')} {key}: the value {twice} is there twice; keep one")
    if (n := math.prod(map(len, grid.values()))) > MOST_POINTS:
        raise PrismError(
            f"{option('vary')}: {format_count(n, 'setting')}, at most {MOST_POINTS:,}; vary fewer "
            "keys"
        )
    return grid


def _split(text: str) -> list[str]:
    """Split at commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
        depth += (letter in "[{(") - (letter in "]})") if not quote else 0
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _expand(value: str, text: str) -> list[str]:
    """Write a range of whole numbers out; any other value is itself."""
    found = _RANGE.fullmatch(value)
    if found is None:
        if not value:
            raise PrismError(f"{option('vary')} {text}: an empty value; take a comma out")
        return [value]
    first, last = int(found[1]), int(found[2])
    step = int(found[3]) if found[3] else 1
    if step < 1 or last < first:
        raise PrismError(
            f"{option('vary')} {text}: {value} has no end; expected first:last:step, upwards"
        )
    if (last - first) // step >= MOST_POINTS:
        raise PrismError(f"{option('vary')} {text}: {value} has more than {MOST_POINTS:,} values")
    return [str(n) for n in range(first, last + 1, step)]


def check_values(grid: Mapping[str, Sequence[str]]) -> None:
    """Refuse values that no setting could have, whatever the other keys say."""
    wrong = [
        f"{option('vary')} {key}={value}: {text}"
        for key, values in grid.items() for value in values
        for text in never_legal(override_layer(f"{key}={value}"))
    ]  # fmt: skip
    if wrong:
        raise PrismError(*dict.fromkeys(wrong))


def settings(grid: Mapping[str, Sequence[str]]) -> Iterator[Setting]:
    """Give every combination of the values of a grid, the last key fastest."""
    for values in product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def job_at(
    values: Mapping[str, Any], setting: Mapping[str, str], drop: Sequence[str], name: str
) -> Job:
    """Build a job from what it is given (`prism.jobs.job.given_values`) and keys that differ.

    Those of `drop` follow from the others instead; PrismError where a rule is broken.
    """
    return job_from_dict(merged(values, setting, drop), name)


def merged(
    values: Mapping[str, Any], setting: Mapping[str, str], drop: Sequence[str] = ()
) -> dict[str, Any]:
    """Put a setting over what a job is given; see `job_at`."""
    layer = ConfigLayer(copy.deepcopy(dict(values)))
    for key in drop:
        block, _, last = key.partition(".")
        if isinstance(layer.values.get(block), dict):
            layer.values[block].pop(last, None)
    for key, value in setting.items():
        layer = merge(layer, override_layer(f"{key}={value}"))
    if layer.problems:
        raise PrismError(*layer.problems)
    return layer.values


def follow_schedule(
    values: Mapping[str, Any], found: Sequence[Setting]
) -> list[tuple[Setting, tuple[str, ...]]]:
    """Let the chunks per stage follow a schedule that is varied, where they are not.

    The job's own where the schedule takes them, else the fewest that it takes. Settings, with
    ``parallelism.vpp`` where it is not the job's own everywhere, so that rows say what was taken;
    and the keys that are to follow from it.
    """
    own = (values.get("parallelism") or {}).get("vpp", 1)
    chunks = [_chunks_for(values, setting, own) for setting in found]
    if set(chunks) <= {own}:
        return [(setting, ()) for setting in found]
    split = ("parallelism.layer_split",)
    return [
        ({**setting, "parallelism.vpp": str(vpp)}, () if vpp == own else split)
        for setting, vpp in zip(found, chunks, strict=True)
    ]


def _chunks_for(values: Mapping[str, Any], setting: Setting, own: int) -> int:
    """Chunks per stage that the schedule of a setting takes."""
    traits = TRAITS.get(setting.get("parallelism.schedule", ""))
    stages = (merged(values, setting).get("parallelism") or {}).get("pp", 1)
    if traits is None or "parallelism.vpp" in setting or stages == 1 or traits.allow_chunks(own):
        return own
    return 2 if traits.chunks is None else traits.chunks
