"""``prism watch``: when a run in progress will be done, and whether its step time changed."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from prism.cli.commands.options import (
    ALARM,
    Duration,
    choose_options,
    common_options,
    gpus_option,
    probability_option,
    rows_of,
    set_option,
)
from prism.cli.commands.outputs import Call, check_file_path, openmetrics_option, write_text
from prism.cli.commands.terminal import say
from prism.common.errors import PrismError

if TYPE_CHECKING:
    from prism.analyses.watch import Watch
    from prism.present.answer import Answer


@click.command()
@click.argument("log")
@click.argument("job", required=False)
@click.option("--steps", type=click.IntRange(min=1), help="Steps of the run.  [default: the log's, "
              "else the job's]")  # fmt: skip
@click.option(
    "--deadline", metavar="TIME", help="Give P(done within this): 60d, 12h, ..., or by a date."
)
@probability_option
@gpus_option
@click.option(
    "--interval",
    type=Duration(),
    default="60s",
    show_default=True,
    help="How long to wait between two looks.",
)
@click.option(
    "--once",
    is_flag=True,
    help=f"Look once, for cron; status {ALARM} where the step time changed.",
)
@choose_options("the log")
@set_option
@openmetrics_option
@common_options()
def watch(
    call: Call,
    log: str,
    job: str | None,
    interval: float,
    once: bool,
    where: tuple[tuple[str, str], ...],
    overrides: tuple[str, ...],
    openmetrics: str | None,
    **options: Any,
) -> int:
    """Say when a run will be done, from its growing log.

    JOB is a job file, the name of a shipped job, or a model of `prism fit`, which the steps are
    held against; without it the completed steps are the model. Interrupt (Ctrl-C) ends it.
    """
    from prism.analyses.watch import Watch
    from prism.jobs.job import load_job
    from prism.jobs.jobspec.frommodel import is_step_model

    if not interval > 0.0:
        raise click.UsageError("--interval 0: expected more than 0, such as 60s")
    if openmetrics is not None:
        check_file_path(openmetrics, "--openmetrics")
    from_steps = job is not None and is_step_model(job)
    if overrides and (job is None or from_steps):
        raise click.UsageError("--set changes a key of a job; name the JOB, or leave it out")
    held = job if job is None or from_steps else load_job(job, overrides)
    options = {name: value for name, value in options.items() if value is not None}
    watched = call.run("simulating", Watch, log, held, where=rows_of(where) or None, **options)

    def show(answer: Answer) -> None:
        if sys.stdout.isatty() and not once and not call.as_json:
            click.clear()  # in place
        call.print(answer)
        sys.stdout.flush()
        if openmetrics is not None:
            from prism.present.openmetrics import openmetrics_text

            write_text(openmetrics, openmetrics_text(answer.figures), call.quiet or not once)

    if once:
        found = _look(watched)
        show(found)
        return ALARM if (found.figures["departure"] or {}).get("departed") else 0
    _go_on(watched, interval, show)
    return 0


def _look(watched: Watch) -> Answer:
    """Read the log and make the answer."""
    from prism.common.resultfiles import answer

    found: Answer = answer(watched.look())
    return found


def _go_on(watched: Watch, interval: float, show: Any) -> None:
    """Look again and again, until the run is done or the user has seen enough."""
    said, first = "", True
    try:
        while True:
            try:
                found = _look(watched)
                show(found)
            except PrismError as error:
                if first and not watched.exists():
                    raise
                # a log may be rotated or have no step yet, a folder may be away for a while
                if str(error) != said:
                    say(f"prism: {error}; looking again every {interval:g} s")
                said = str(error)
            else:
                said = ""
                if found.figures["completed_steps"] >= found.figures["steps"]:
                    return
            first = False
            time.sleep(interval)
    except KeyboardInterrupt:
        return  # as it is meant to end
