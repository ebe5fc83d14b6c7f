"""``prism validate``: a prediction against measurements it has not seen."""

from __future__ import annotations

from typing import Any

import click

from prism.cli.commands.options import (
    PLOTS,
    Split,
    choose_options,
    common_options,
    dependence_option,
    rows_of,
    skip_option,
    steps_option,
    totals_option,
)
from prism.cli.commands.outputs import Call


@click.command()
@click.argument("job", metavar="[JOB_OR_MODEL]", required=False)
@click.option("--trace", metavar="TRACE", help="Fit on a part of this trace, predict the rest.")
@click.option(
    "--train",
    type=Split(),
    metavar="SPLIT",
    help="What to fit on: first-half, even, or a number of steps.  [default: first-half]",
)
@click.option("--measured", metavar="STEPS", help="Compare with these step times (CSV, log, ...).")
@click.option("--model", metavar="MODEL.nc", help="Effects of JOB, or instead of it.")
@choose_options("STEPS")
@totals_option
@click.option("--quantity", type=click.Choice(["step_time", "time_to_train"]), default="step_time",
              show_default=True, help="What to compare.")  # fmt: skip
@dependence_option
@click.option("--bootstrap", type=click.IntRange(min=0), default=100, show_default=True,
              help="Refits behind the p-value and the band.")  # fmt: skip
@click.option("--replicates", type=click.IntRange(min=1), default=20_000, show_default=True,
              help="Steps to predict.")  # fmt: skip
@skip_option
@steps_option
@common_options(PLOTS, placed=True)
def validate(call: Call, job: str | None, **options: Any) -> None:
    """Compare a prediction with held-out measurements.

    None of them were fitted on. Either --trace TRACE, whose one part predicts the other; or
    JOB_OR_MODEL (a job file, the name of a shipped job, or what `prism fit` wrote) with --measured
    STEPS.
    """
    from prism.analyses.validate import validate as compare

    options["where"] = rows_of(options["where"]) or None
    call.conclude(call.run("validating", compare, job, **options))
