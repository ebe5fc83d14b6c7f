"""Kinds of option values, and the options that every command takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A duration such as ``60d``, ``12h``, ``90min`` or a number of seconds."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the duration in seconds."""
        from prism.jobvalues import parse_duration

        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Factors(click.ParamType):  # type: ignore[type-arg]
    """Positive numbers with commas between them."""

    name = "a,b,c"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """Return the numbers."""
        if not isinstance(value, str):
            return tuple(value)
        try:
            factors = tuple(float(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 1.05,1.1,1.2", param, ctx)
        if not all(math.isfinite(factor) and factor > 0 for factor in factors):
            self.fail(f"{value!r}: every factor must be a number above 0", param, ctx)
        return factors


class Split(click.ParamType):  # type: ignore[type-arg]
    """Which steps of a trace a model is fitted on: ``first-half``, ``even``, or how many."""

    name = "split"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name, or the number of steps in digits."""
        text = str(value)
        if text in ("first-half", "even"):
            return text
        if not (text.isascii() and text.isdecimal() and int(text) > 0):
            self.fail(f"{text!r} is not first-half, even, or a number of steps", param, ctx)
        return str(int(text))


class Names(click.ParamType):  # type: ignore[type-arg]
    """Some of a few names, with commas between them."""

    name = "a,b,c"

    def __init__(self, *known: str) -> None:
        self.known = known

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """Return the names."""
        if not isinstance(value, str):
            return tuple(value)
        names = tuple(part.strip() for part in value.split(","))
        for name in names:
            if name not in self.known:
                self.fail(f"{name!r} is not one of {', '.join(self.known)}", param, ctx)
        return names


class KeyValue(click.ParamType):  # type: ignore[type-arg]
    """Two words with an equals sign between them: a column and the value its rows must have, ..."""

    def __init__(self, name: str = "column=value") -> None:
        self.name = name

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """Return column and value."""
        if isinstance(value, tuple):
            return value
        key, equals, wanted = str(value).partition("=")
        if not (key and equals):
            self.fail(f"{value!r} is not of the form {self.name}", param, ctx)
        return key, wanted


def rows_of(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Columns and the values that rows must have, from repeated ``--where``."""
    out: dict[str, str] = {}
    for key, value in pairs:
        if out.setdefault(key, value) != value:
            raise click.UsageError(
                f"--where {key}={value}: {key} is to be {out[key]} already; a row has one value"
            )
    return out


def common_options(command: Command) -> Command:
    """Add the options that every command takes."""
    for option in (
        click.option("-q", "--quiet", is_flag=True, help="No progress and no notes."),
        click.option(
            "--threads", type=click.IntRange(min=1), help="Threads to use.  [default: all cores]"
        ),
        click.option(
            "--seed",
            type=click.IntRange(min=0),
            help="Seed of all random draws; the same seed gives the same bits.  [default: fresh]",
        ),
        click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout."),
    ):
        command = option(command)
    return command
