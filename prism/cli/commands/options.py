"""Kinds of option values, and the options that every command takes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from prism.cli.commands.outputs import Call
from prism.cli.commands.terminal import say
from prism.common.compiled import start_compiling
from prism.common.files import check_directory

Command = TypeVar("Command", bound=Callable[..., Any])
NO_EFFECT = "Accepted by every command; no effect here."
ALARM = 3  # exit status where the answer is the one that was to be guarded against
PLOTS = "Result, summary and plots."
MOST_NUMBERS = 10_000_000  # that a range of numbers counts up to


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A duration such as ``60d``, ``12h``, ``90min`` or a number of seconds."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the duration in seconds."""
        from prism.jobs.jobspec.values import parse_duration

        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Figures(click.ParamType):  # type: ignore[type-arg]
    """Figures with commas between them, each within bounds."""

    what = "list of numbers such as 1,2"
    bound = "every number must be finite"

    def is_within(self, figure: float) -> bool:
        """Tell whether a figure is one of those that are meant."""
        return math.isfinite(figure)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """Return the figures."""
        if not isinstance(value, str):
            return tuple(value)
        try:
            figures = tuple(float(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a {self.what}", param, ctx)
        if not all(map(self.is_within, figures)):
            self.fail(f"{value!r}: {self.bound}", param, ctx)
        return figures


class Factors(_Figures):
    """Positive numbers with commas between them."""

    name = "a,b,c"
    what = "list of numbers such as 1.05,1.1,1.2"
    bound = "every factor must be a number above 0"

    def is_within(self, figure: float) -> bool:
        """Tell whether a factor is finite and above 0."""
        return math.isfinite(figure) and figure > 0.0


class Percentiles(_Figures):
    """Percentiles with commas between them."""

    name = "p,q"
    what = "list of percentiles such as 50,99"
    bound = "every percentile must lie between 0 and 100"

    def is_within(self, figure: float) -> bool:
        """Tell whether a percentile is from 0 to 100."""
        return 0.0 <= figure <= 100.0


class ShareType(click.ParamType):  # type: ignore[type-arg]
    """A share above 0, or from `least` on, and below 1, such as ``0.1%`` or ``0.001``."""

    name = "share"

    def __init__(self, least: float | None = None) -> None:
        self.least = least

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the share [1]."""
        text = str(value).strip()
        try:
            share = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
        except ValueError:
            self.fail(f"{value!r} is not a share such as 0.1% or 0.001", param, ctx)
        if not 0.0 < share < 1.0 and share != self.least:
            from_ = "more than 0" if self.least is None else f"at least {100.0 * self.least:g}"
            self.fail(f"{value!r}: expected {from_} and less than 100 %", param, ctx)
        return share


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


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers from 0 with commas between them, and ranges ``first:last`` of them."""

    name = "a,b:c"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the numbers, each once, in rising order."""
        if not isinstance(value, str):
            return tuple(value)
        found: set[int] = set()
        for part in value.split(","):
            first, _, last = part.strip().partition(":")
            ends = (first, last or first)
            if not all(end.isascii() and end.isdecimal() for end in ends):
                self.fail(f"{value!r} is not a list of numbers such as 0,3 or 0:7", param, ctx)
            found.update(range(int(ends[0]), min(int(ends[1]), MOST_NUMBERS) + 1))
        return tuple(sorted(found))


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


set_option = click.option(
    "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Any key of the job."
)


step_range_option = click.option(
    "--step-range",
    metavar="NAME",
    help="What NVTX ranges (or Chakra nodes) that are one step are called, a regular expression; a "
    "number in the name is the step's.  [default: step N, iteration N and the like]",
)


dependence_option = click.option(
    "--dependence",
    type=click.Choice(["full", "none"]),
    help="none: all ops are drawn independently.  [default: the job's, else full]",
)


gpus_option = click.option(
    "--gpus",
    type=click.IntRange(min=1),
    help="GPUs of a model of step times, which knows none: their failures.",
)


probability_option = click.option(
    "--probability",
    type=click.FloatRange(0.0, 1.0, min_open=True, max_open=True),
    help="Of the end date.  [default: the job's, else 0.9]",
)


totals_option = click.option("--totals", metavar="FILE:COLUMN", help="Measured totals of the runs.")


skip_option = click.option(
    "--skip", type=click.IntRange(min=1), metavar="N", help="Leave out the first N steps of runs."
)


steps_option = click.option(
    "--steps", metavar="A:B", help="Take the steps numbered A to B; either may be left out."
)


def output_option(what: str, metavar: str = "DIR") -> Callable[[Command], Command]:
    """Add the folder, or the file, that a command writes to, and say what goes there."""
    return click.option("-o", "--output", metavar=metavar, type=click.Path(), help=what)


def choose_options(
    table: str = "step times", column: str = "duration", unit: bool = True
) -> Callable[[Command], Command]:
    """Add what chooses from a table that is wider than needed: its column and its rows.

    With `unit`, also the unit of the column, and what finds step times in lines.
    """

    def choosing(command: Command) -> Command:
        command = click.option(
            "--where",
            type=KeyValue(),
            metavar="KEY=VALUE",
            multiple=True,
            help=f"Keep the rows of {table} whose column KEY is VALUE; repeatable.",
        )(command)
        if unit:
            units = click.Choice(["s", "ms", "us", "ns", "min", "h"])
            text = "Its unit, where its name has none or another."
            command = click.option("--unit", type=units, help=text)(command)
            text = "Regular expression for lines of any log, with a group s, ms, rate (steps per "
            text += "second) or elapsed, and step."
            command = click.option("--pattern", metavar="REGEX", help=text)(command)
        text = f"The {column}, where {table} have several columns that could be it."
        return click.option("--column", metavar="NAME", help=text)(command)

    return choosing


def common_options(
    output: str = "", *, details: bool = True, draws: bool = True, placed: bool = False,
    threads: str = "Threads to use.  [default: all cores]",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
    """Add the options that every command takes, which it gets as its `call`.

    `output` is what goes into a folder, where one can be written; without `draws` the seed has no
    effect, and says so; `placed` work may be done elsewhere.
    """
    seed = "Seed of all random draws; the same seed gives the same bits.  [default: fresh]"
    every = [
        click.option("-q", "--quiet", is_flag=True, help="No progress and no notes."),
        click.option("--threads", type=click.IntRange(min=1), help=threads),
        click.option("--seed", type=click.IntRange(min=0), help=seed if draws else NO_EFFECT),
        click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout."),
        *[click.option("--details", is_flag=True, help="Show all tables, not a screen of them.")]
        * details,
        *[output_option(output)] * bool(output),
    ]
    names = ["as_json", "seed", "threads", "quiet", *["details"] * details]
    names += ["output"] * bool(output)

    def adding(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def called(**options: Any) -> Any:
            call = Call(**{name: options.pop(name) for name in names})
            if call.output is not None:
                check_directory(call.output)
            return command(call, **options)

        found = _place_options(called) if placed else called
        for option in every:
            found = option(found)
        return found

    return adding


def _place_options(command: Command) -> Command:
    """Add the options that say where a command's work is done, and where finished parts are kept.

    The command itself stays as it is: it is called with the seed of the interrupted one where it
    goes on with that, and everything it calls runs at that place.
    """

    @functools.wraps(command)
    def placed(**options: Any) -> Any:
        where = {name: options.pop(name) for name in PLACE_OPTIONS}
        if where["scheduler"] is where["scheduler_file"] is None:
            start_compiling()  # before the command imports anything
        if all(value is None for value in where.values()):
            return command(**options)
        return _run_placed(command, where, options)

    for option in (
        click.option(
            "--resume",
            metavar="DIR",
            type=click.Path(),
            help="Keep finished parts in DIR, and go on with those of the same command if it was "
            "interrupted; DIR is removed when the result is written.",
        ),
        click.option(
            "--scheduler-timeout",
            type=Duration(),
            help="How long to wait for it and for workers.  [default: 30s]",
        ),
        click.option(
            "--scheduler-file", metavar="FILE", help="The same, by the file the scheduler writes."
        ),
        click.option(
            "--scheduler",
            metavar="ADDRESS",
            help="Dask scheduler, as tcp://host:port, whose workers do the work.",
        ),
    ):
        placed = option(placed)
    return placed  # type: ignore[return-value]


PLACE_OPTIONS = "scheduler", "scheduler_file", "scheduler_timeout", "resume"
_SAME_RESULT = "seed", "threads", "quiet", "as_json", "output"  # whatever they say


def _run_placed(command: Callable[..., Any], where: dict[str, Any], options: dict[str, Any]) -> Any:
    """Run a command at a place."""
    from pathlib import Path

    from prism.simulation.execution.context import fresh_seed
    from prism.simulation.execution.executor import run_on
    from prism.simulation.execution.remote import TIMEOUT_S

    if where["scheduler"] is not None and where["scheduler_file"] is not None:
        raise click.UsageError("--scheduler and --scheduler-file say the same; leave one out")
    timeout_s = where.pop("scheduler_timeout")
    if timeout_s is not None and where["scheduler"] is where["scheduler_file"] is None:
        raise click.UsageError("--scheduler-timeout belongs to --scheduler or --scheduler-file")

    output = options.get("output")
    if output and where["resume"] and Path(output) == Path(where["resume"]):
        raise click.UsageError(f"--resume needs its own folder, such as {output}/.parts")

    def tell(text: str) -> None:
        if not options["quiet"]:
            say(f"prism: {text}")

    with run_on(
        **where, timeout_s=TIMEOUT_S if timeout_s is None else timeout_s, command=_asked(options),
        seed=options["seed"], fresh_seed=fresh_seed, tell=tell,
    ) as place:  # fmt: skip
        try:
            if place.store is not None:
                options["seed"] = place.store.seed
            return command(**options)
        except KeyboardInterrupt:
            if place.store is not None and place.store.kept:
                tell(
                    f"{place.store.kept} finished parts are kept in {where['resume']}; the same "
                    "command goes on from there"
                )
            raise


def _asked(options: dict[str, Any]) -> dict[str, Any]:
    """Return what a command was asked, with hashes of the files it names."""
    import hashlib

    from prism.common.pipes import held

    asked: dict[str, Any] = {"command": click.get_current_context().info_name}
    for name, value in options.items():
        if name in _SAME_RESULT or value is None or value is False or value == ():
            continue
        asked[name] = list(value) if isinstance(value, tuple) else value
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and (path := held(text)).is_file():
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                asked[f"content of {text}"] = content[:16]
    return asked
