"""``prism compare``: whether two results or measurements differ; or a profile against a job."""

from __future__ import annotations

from typing import Any

import click

from prism.cli.commands.options import (
    NO_EFFECT,
    PLOTS,
    ShareType,
    choose_options,
    common_options,
    rows_of,
    step_range_option,
    steps_option,
)
from prism.cli.commands.outputs import Call, check_file_path, write_text

ALARM = 1


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@choose_options("both")
@click.option(
    "--effect",
    type=ShareType(),
    default="1%",
    show_default=True,
    metavar="SHARE",
    help="Difference to detect: sample sizes are for it, equivalence is to within it.",
)
@click.option(
    "--skip",
    type=click.IntRange(min=0),
    metavar="N",
    help="Drop the first N steps of each measured run or profile.  [default: those that stick out]",
)
@step_range_option
@steps_option
@click.option(
    "--fail-if-slower",
    type=ShareType(least=0.0),
    metavar="SHARE",
    help=f"Exit with status {ALARM} if a mean of B is slower than A's by more than this.",
)
@click.option(
    "--false-alarm",
    type=ShareType(),
    metavar="RATE",
    help="How often that may be where B is no slower than allowed.  [default: 2.5%, so that an "
    "alarm is where all of a 95 % interval lies beyond]",
)
@click.option(
    "--junit", metavar="FILE", type=click.Path(), help="Write what that finds as JUnit XML."
)
@common_options(PLOTS, threads=NO_EFFECT)
def compare(
    call: Call,
    a: str,
    b: str,
    where: tuple[tuple[str, str], ...],
    fail_if_slower: float | None,
    false_alarm: float | None,
    junit: str | None,
    **options: Any,
) -> int:
    """Compare two results or measurements, or a profile with a job.

    A and B are each the folder or result.nc of `prism estimate`, or step times (CSV, parquet, a
    trainer's log); FILE[column=value,...] chooses rows, so that both can be of one file.
    Differences are those of B against A.

    Or A is a profiler's trace with kernels (a file or a folder) and B a job (its file or a shipped
    name): class by class, what the job predicts of a step and the trace measured.
    """
    from prism.analyses.compare import FALSE_ALARM
    from prism.analyses.compare import compare as compare_two

    if junit is not None and fail_if_slower is None:
        raise click.UsageError("--junit FILE holds what --fail-if-slower SHARE finds; add it")
    if false_alarm is not None and fail_if_slower is None:
        raise click.UsageError("--false-alarm RATE is of --fail-if-slower SHARE; add it")
    if junit is not None:
        check_file_path(junit, "--junit")
    with call.progress("comparing") as report:
        result = compare_two(
            a, b, where=rows_of(where), fail_if_slower=fail_if_slower, seed=call.seed,
            false_alarm=FALSE_ALARM if false_alarm is None else false_alarm, progress=report,
            **options,
        )  # fmt: skip
    found = call.conclude(result).figures
    if junit is not None:
        from prism.present.junit import junit_xml

        write_text(junit, junit_xml(found), call.quiet)
    return ALARM if found.get("gate", {}).get("failed") else 0
