"""Kinds of value in a job file: counts, shares, lengths of time, dates, lists per stage.

Each is a type for pydantic that is strict where YAML is not: `true` is no count, "8" is no
number, infinity no bandwidth. What leaves here is in SI units.
"""

import datetime
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from prism.common.errors import PrismError
from prism.jobs.hostfiles import read_hosts

MAX_COUNT = 2**31 - 1  # the engine indexes with 32-bit integers
MAX_NUMBER = 1e15  # products of some stay within what 32 bits hold, and cubes within 64
MAX_SLOWDOWN = 1.25  # GPUs slower than this are culled, where neither job nor library says
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}


def integral(value: Any) -> Any:
    """Let `1e6` through as an integer; anything else is left for the strict check."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def parse_duration(value: Any) -> float:
    """Return seconds from a number of seconds or a text such as "60d", "12h", "90min".

    Raises
    ------
    ValueError
        If it is neither, or not positive.
    """
    seconds = float("nan")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(s|min|h|d|w)\s*", value.lower())
        try:
            seconds = float(found[1]) * _SECONDS[found[2]] if found else float(value)
        except ValueError:
            seconds = float("nan")
    if not 0 < seconds <= MAX_NUMBER:
        raise ValueError(f"expected a length of time, got {value!r}; write 60d, 12h or 3600 (s)")
    return seconds


def parse_date(value: Any) -> datetime.datetime | None:
    """Return a date, or a date and time, from its ISO 8601 text."""
    if value is None or isinstance(value, datetime.datetime):
        return value
    try:
        return datetime.datetime.fromisoformat(value)
    except (TypeError, ValueError):
        way_out = "write 2026-01-31 or 2026-01-31T08:00"
        raise ValueError(f"expected a date, got {value!r}; {way_out}") from None


def per_stage(value: Any) -> float | tuple[float, ...]:
    """Return seconds, one number or one per stage, refusing negative ones."""

    def number(item: Any) -> float:
        good = isinstance(item, (int, float)) and not isinstance(item, bool)
        if not good or not 0 <= item <= MAX_NUMBER:
            way_out = "write 1.0, or a list with one number per stage"
            raise ValueError(f"expected seconds, 0 to {MAX_NUMBER:g}, got {item!r}; {way_out}")
        return float(item)

    if isinstance(value, (list, tuple)):
        return tuple(number(item) for item in value)
    return number(value)


def parse_split(value: Any) -> Literal["auto"] | tuple[int, ...]:
    """Return "auto" or a tuple of layer counts."""
    if value == "auto":
        return "auto"
    good = isinstance(value, (list, tuple)) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= MAX_COUNT for n in value
    )
    if not good:
        way_out = "leave it out, or give one count per model chunk"
        raise ValueError(f"expected auto or a list of layer counts, got {value!r}; {way_out}")
    return tuple(value)


def parse_hosts(value: Any) -> tuple[int, ...] | None:
    """Return the node of every slot, from a list or a placement file."""
    if value is None or (isinstance(value, str) and not value):
        return None
    if isinstance(value, str):
        try:
            return tuple(read_hosts(value))
        except PrismError as error:
            raise ValueError(str(error)) from None
    good = isinstance(value, (list, tuple)) and all(
        isinstance(n, int) and not isinstance(n, bool) and abs(n) <= MAX_COUNT for n in value
    )
    if not good:
        way_out = "write [1, 0, 2], the path of a placement file, or leave it out"
        raise ValueError(f"expected the index of a node for every slot, got {value!r}; {way_out}")
    return tuple(value)


Count = Annotated[int, BeforeValidator(integral), Field(strict=True, ge=1, le=MAX_COUNT)]
# A size of the model: 0 stands for "not given", which only explicit durations allow.
Size = Annotated[
    int,
    BeforeValidator(integral),
    Field(strict=True, ge=0, le=MAX_COUNT, json_schema_extra={"minimum": 1}),
]
Number = Annotated[int, BeforeValidator(integral), Field(strict=True, ge=0, le=MAX_COUNT)]
Positive = Annotated[float, Field(strict=True, gt=0, le=MAX_NUMBER)]
NonNegative = Annotated[float, Field(strict=True, ge=0, le=MAX_NUMBER)]
AtLeastOne = Annotated[float, Field(strict=True, ge=1, le=MAX_NUMBER)]
AboveOne = Annotated[float, Field(strict=True, gt=1, le=MAX_NUMBER)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Efficiency = Annotated[float, Field(strict=True, gt=0, le=1)]
_SECONDS_SCHEMA = {"type": ["number", "array"], "items": {"type": "number", "minimum": 0}}
Seconds = Annotated[
    float | tuple[float, ...], BeforeValidator(per_stage), WithJsonSchema(_SECONDS_SCHEMA)
]
Split = Annotated[
    Literal["auto"] | tuple[int, ...],
    BeforeValidator(parse_split),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "array", "items": {"type": "integer"}}]}),
]
Hosts = Annotated[
    tuple[int, ...] | None,
    BeforeValidator(parse_hosts),
    WithJsonSchema({"type": ["array", "string"], "items": {"type": "integer", "minimum": 0}}),
]
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    WithJsonSchema({"type": ["number", "string"], "examples": ["60d", "12h", 3600]}),
]
Date = Annotated[
    datetime.datetime | None,
    BeforeValidator(parse_date),
    WithJsonSchema({"type": "string", "examples": ["2026-01-31"]}),
]


def key(meaning: str, default: Any = None) -> Any:
    """Field of a key that may be left out."""
    return Field(default, description=meaning)


class Block(BaseModel):
    """What all blocks share: unknown keys are errors, and a loaded job does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        # A known key without a value has its default; an unknown one is an error all the same.
        known = cls.model_fields
        given = {str(k): v for k, v in data.items() if v is not None or str(k) not in known}
        return cls._fill(given)

    @classmethod
    def _fill(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Add the defaults that follow from other keys."""
        return given


class Slowness(Block):
    """How slow a node is, by kind of work: factors on durations."""

    compute: Positive | None = key("On compute-bound kernels [everything, or 1].")
    memory: Positive | None = key(
        "On memory-bound kernels [everything, or as they follow compute]."
    )
    network: Positive | None = key(
        "On collectives and transfers over the network [everything, or 1]."
    )
    other: Positive | None = key("On NVLink collectives and host gaps [everything, or 1].")
    everything: Positive | None = key("On all of these [1].")


def parse_slowdown(value: Any) -> float | Slowness:
    """Return how slow a node is: a factor on compute, or factors by kind of work."""
    if isinstance(value, Slowness):
        return value
    kinds = ", ".join(Slowness.model_fields)
    if isinstance(value, Mapping):
        unknown = [str(key) for key in value if str(key) not in Slowness.model_fields]
        given = {str(key): number for key, number in value.items() if number is not None}
        if unknown:
            raise ValueError(f"no kind of slowness {unknown[0]!r}; expected one of {kinds}")
        if not given:
            raise ValueError(f"says nothing; write a factor, or factors by kind: {kinds}")
        for key, number in given.items():
            _check_factor(number, f"{key}: ")
        return Slowness(**given)
    _check_factor(value, "")
    return float(value)


def _check_factor(value: Any, label: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and 0 < value < float("inf"):
        return
    way_out = "1.2 is a node that takes 20 % longer, {network: 1.5} one with slow links"
    raise ValueError(f"{label}expected a factor, more than 0, got {value!r}; {way_out}")


_FACTOR_SCHEMA = {"type": "number", "exclusiveMinimum": 0}
Slowdown = Annotated[
    float | Slowness,
    BeforeValidator(parse_slowdown),
    WithJsonSchema(
        {
            "anyOf": [
                _FACTOR_SCHEMA,
                {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        name: {
                            **(
                                _FACTOR_SCHEMA if name != "cv" else {"type": "number", "minimum": 0}
                            ),
                            "description": field.description,
                        }
                        for name, field in Slowness.model_fields.items()
                    },
                },
            ]
        }
    ),
]


def hosts_problem(hosts: NDArray[np.int64], n_slots: int, n_nodes: int) -> str | None:
    """Say what is wrong with a map of slots to nodes and what to do, None if nothing is."""
    if hosts.ndim != 1 or hosts.size != n_slots:
        many = "one node" if n_slots == 1 else f"{n_slots} nodes"
        return (
            f"{hosts.size} nodes, expected {many}, one for each slot that the job's ranks fill "
            "(in rank order); leave it out for the rank order itself"
        )
    if hosts.dtype.kind not in "iu":
        return "expected whole numbers, the index of a node for each slot"
    wrong = np.flatnonzero((hosts < 0) | (hosts >= n_nodes))
    if wrong.size:
        slot = int(wrong[0])
        return (
            f"slot {slot} is on node {hosts[slot]}, but there is no such node among {n_nodes}; "
            f"indices run from 0 to {n_nodes - 1}: change it, or raise cluster.nodes"
        )
    order = np.argsort(hosts, kind="stable")
    twice = np.flatnonzero(np.diff(hosts[order]) == 0)
    if twice.size:
        a, b = (int(order[twice[0] + k]) for k in (0, 1))
        free = np.setdiff1d(np.arange(n_nodes), hosts)
        way_out = f"; free: {', '.join(map(str, free[:4].tolist()))}" if free.size else ""
        return f"slots {a} and {b} are both on node {hosts[a]}; a node takes one slot{way_out}"
    return None
