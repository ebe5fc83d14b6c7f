"""Kinds of value in a job file: counts, shares, lengths of time, dates, lists per stage.

Each is a type for pydantic that is strict where YAML is not: `true` is no count, "8" is no
number, infinity no bandwidth. What leaves here is in SI units.
"""

import datetime
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)

from prism.common.arrays import Index
from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.jobs.hostfiles import read_hosts

MAX_COUNT = 2**31 - 1  # the engine indexes with 32-bit integers
MAX_NUMBER = 1e15  # products of some stay within what 32 bits hold, and cubes within 64
MAX_SLOWDOWN = 1.25  # GPUs slower than this are culled, where neither job nor library says
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
_LENGTH = r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)\s*(s|min|h|d|w)?\s*"


def integral(value: Any) -> Any:
    """Let `1e6` through as an integer; anything else is left for the strict check."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def parse_duration(value: Any) -> float:
    """Return seconds from a positive number, or a text such as "60d", "12h", "90min"."""
    found = re.fullmatch(_LENGTH, str(value).lower())
    seconds = float(found[1]) * _SECONDS[found[2] or "s"] if found else 0.0
    if not 0 < seconds <= MAX_NUMBER:
        raise ValueError(f"expected a length of time, got {value!r}; write 60d, 12h or 3600 (s)")
    return seconds


def parse_date(value: Any) -> datetime.datetime:
    """Return a date, or a date and time, from its ISO 8601 text."""
    if isinstance(value, datetime.datetime):
        return value
    try:
        return datetime.datetime.fromisoformat(value)
    except (TypeError, ValueError):
        way_out = "write 2026-01-31 or 2026-01-31T08:00"
        raise ValueError(f"expected a date, got {value!r}; {way_out}") from None


def duration_or_date(value: Any) -> float | datetime.datetime:
    """Return seconds from a length of time, or the date that a text gives."""
    try:
        return parse_duration(value)
    except ValueError as error:
        if not re.match(r"\s*[0-9]{4}-", str(value)):
            raise ValueError(f"{error}, or a date: 2026-01-31") from None
    return parse_date(value)


def _read_hosts(value: Any) -> Any:
    """Return the nodes that a placement file lists."""
    if not isinstance(value, str):
        return value
    try:
        return read_hosts(value) if value else None
    except PrismError as error:
        raise ValueError(str(error)) from None


def _told(expected: str, way_out: str) -> WrapValidator:
    """Tell in one sentence whatever is wrong with a value of several forms."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"expected {expected}, got {value!r}; {way_out}") from None

    return WrapValidator(validate)


Count = Annotated[int, BeforeValidator(integral), Field(strict=True, ge=1, le=MAX_COUNT)]
Number = Annotated[int, BeforeValidator(integral), Field(strict=True, ge=0, le=MAX_COUNT)]
# A size of the model: 0 stands for "not given", which only explicit durations allow.
Size = Annotated[Number, Field(json_schema_extra={"minimum": 1})]
Positive = Annotated[float, Field(strict=True, gt=0, le=MAX_NUMBER)]
NonNegative = Annotated[float, Field(strict=True, ge=0, le=MAX_NUMBER)]
AtLeastOne = Annotated[float, Field(strict=True, ge=1, le=MAX_NUMBER)]
AboveOne = Annotated[float, Field(strict=True, gt=1, le=MAX_NUMBER)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
# Of what many ops share. More than twice the widest published (0.44, unpacked sequences); beyond, a
# mean of 1 says little of a step: the median lies far below it.
SharedCv = Annotated[float, Field(strict=True, ge=0, le=1)]
# Of what is drawn often: of 10,000 draws the mean is known to a tenth of itself at 10, and not from
# any number that can be drawn far beyond.
MAX_CV = 10.0
WideCv = Annotated[float, Field(strict=True, ge=0, le=MAX_CV)]
Efficiency = Annotated[float, Field(strict=True, gt=0, le=1)]
Seconds = Annotated[
    NonNegative | Annotated[tuple[NonNegative, ...], Field(min_length=1)],
    _told(f"seconds, 0 to {MAX_NUMBER:g}", "write 1.0, or a list with one number per stage"),
    WithJsonSchema({"type": ["number", "array"], "items": {"type": "number", "minimum": 0}}),
]
Split = Annotated[
    Literal["auto"] | Annotated[tuple[Number, ...], Field(min_length=1)],
    _told("auto or a list of layer counts", "leave it out, or give one count per model chunk"),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "array", "items": {"type": "integer"}}]}),
]
Hosts = Annotated[
    tuple[Annotated[int, Field(strict=True, ge=-MAX_COUNT, le=MAX_COUNT)], ...] | None,
    _told(
        "the index of a node for every slot",
        "write [1, 0, 2], the path of a placement file, or leave it out",
    ),
    BeforeValidator(_read_hosts),
    WithJsonSchema({"type": ["array", "string"], "items": {"type": "integer", "minimum": 0}}),
]
GpuFactors = Annotated[
    Annotated[tuple[Positive, ...], Field(min_length=2)] | None,
    _told("a factor for each GPU of a node", "write [1, 1, 1, 1, 1.02, 1.02, 1.02, 1.02]"),
    WithJsonSchema({"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}}),
]
GpuTemperatures = Annotated[
    Annotated[tuple[Annotated[float, Field(strict=True, ge=0, le=100)], ...], Field(min_length=2)]
    | None,
    _told("0 to 100 C for each GPU of a node", "write [60, 60, 60, 60, 76, 76, 76, 76]"),
    WithJsonSchema({"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 100}}),
]
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    WithJsonSchema({"type": ["number", "string"], "examples": ["60d", "12h", 3600]}),
]
Deadline = Annotated[
    float | datetime.datetime,
    BeforeValidator(duration_or_date),
    WithJsonSchema({"type": ["number", "string"], "examples": ["60d", "12h", "2026-01-31"]}),
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

    @classmethod
    def _fill(cls, given: dict[str, Any]) -> dict[str, Any]:
        if not given:
            raise ValueError("says nothing")
        return given


_FACTOR = {"type": "number", "exclusiveMinimum": 0}
_FACTORS = {
    name: {**_FACTOR, "description": field.description}
    for name, field in Slowness.model_fields.items()
}
Slowdown = Annotated[
    Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | Slowness,
    _told(
        f"a factor, more than 0, or factors by kind ({', '.join(_FACTORS)})",
        "1.2 is a node that takes 20 % longer, {network: 1.5} one with slow links",
    ),
    WithJsonSchema(
        {
            "anyOf": [
                _FACTOR,
                {"type": "object", "additionalProperties": False, "properties": _FACTORS},
            ]
        }
    ),
]


def hosts_problem(hosts: Index, n_slots: int, n_nodes: int) -> str | None:
    """Say what is wrong with a map of slots to nodes and what to do, None if nothing is."""
    if hosts.shape != (n_slots,):
        return (
            f"{format_count(hosts.size, 'node')}, expected {format_count(n_slots, 'node')}, one "
            "for each slot that the job's ranks "
            "fill (in rank order); leave it out for the rank order itself"
        )
    if hosts.dtype.kind not in "iu":
        return "expected whole numbers, the index of a node for each slot"
    wrong = np.flatnonzero((hosts < 0) | (hosts >= n_nodes))
    if wrong.size:
        return (
            f"slot {wrong[0]} is on node {hosts[wrong[0]]}, but there is no such node among "
            f"{n_nodes}; indices run from 0 to {n_nodes - 1}: change it, or raise cluster.nodes"
        )
    order = np.argsort(hosts, kind="stable")
    twice = np.flatnonzero(np.diff(hosts[order]) == 0)
    if twice.size:
        a, b = order[twice[0] : twice[0] + 2]
        free = np.setdiff1d(np.arange(n_nodes), hosts)[:4].tolist()
        way_out = f"; free: {', '.join(map(str, free))}" if free else ""
        return f"slots {a} and {b} are both on node {hosts[a]}; a node takes one slot{way_out}"
    return None
