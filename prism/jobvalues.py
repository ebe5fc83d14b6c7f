"""Kinds of value in a job file: counts, shares, lengths of time, dates, lists per stage.

Each is a type for pydantic that is strict where YAML is not: `true` is no count, "8" is no
number, infinity no bandwidth. What leaves here is in SI units.
"""

import datetime
import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
)

MAX_COUNT = 2**31 - 1  # the engine indexes with 32-bit integers
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
    if not 0 < seconds < float("inf"):
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
        if not good or not 0 <= item < float("inf"):
            way_out = "write 1.0, or a list with one number per stage"
            raise ValueError(f"expected seconds, at least 0, got {item!r}; {way_out}")
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


Count = Annotated[int, BeforeValidator(integral), Field(strict=True, ge=1, le=MAX_COUNT)]
# A size of the model: 0 stands for "not given", which only explicit durations allow.
Size = Annotated[
    int,
    BeforeValidator(integral),
    Field(strict=True, ge=0, le=MAX_COUNT, json_schema_extra={"minimum": 1}),
]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
AtLeastOne = Annotated[float, Field(strict=True, ge=1, allow_inf_nan=False)]
AboveOne = Annotated[float, Field(strict=True, gt=1, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
_SECONDS_SCHEMA = {"type": ["number", "array"], "items": {"type": "number", "minimum": 0}}
Seconds = Annotated[
    float | tuple[float, ...], BeforeValidator(per_stage), WithJsonSchema(_SECONDS_SCHEMA)
]
Split = Annotated[
    Literal["auto"] | tuple[int, ...],
    BeforeValidator(parse_split),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "array", "items": {"type": "integer"}}]}),
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


class Block(BaseModel):
    """What all blocks share: unknown keys are errors, and a loaded job does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)
