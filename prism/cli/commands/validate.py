"""``prism validate``: a prediction against measurements it has not seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from prism.cli.commands.options import (
    Split,
    choose_options,
    common_options,
    details_option,
    output_option,
    place_options,
    rows_of,
)
from prism.cli.commands.outputs import conclude
from prism.cli.commands.terminal import progress_line
from prism.common.errors import PrismError

if TYPE_CHECKING:
    import xarray as xr


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
@click.option("--totals", metavar="FILE:COLUMN", help="Measured totals of the runs.")
@click.option(
    "--quantity",
    type=click.Choice(["step_time", "time_to_train"]),
    default="step_time",
    show_default=True,
    help="What to compare.",
)
@click.option(
    "--dependence",
    type=click.Choice(["full", "none"]),
    help="none: all ops are drawn independently.  [default: the job's, else full]",
)
@click.option(
    "--bootstrap",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="Refits behind the p-value and the band.",
)
@click.option(
    "--replicates",
    type=click.IntRange(min=1),
    default=20_000,
    show_default=True,
    help="Steps to predict.",
)
@output_option()
@details_option
@common_options()
@place_options
def validate(
    job: str | None,
    trace: str | None,
    measured: str | None,
    model: str | None,
    output: str | None,
    as_json: bool,
    details: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Compare a prediction with held-out measurements.

    None of them were fitted on. Either --trace TRACE, whose one part predicts the other; or
    JOB_OR_MODEL (a job file, the name of a shipped job, or what `prism fit` wrote) with --measured
    STEPS.
    """
    _check_usage(job or model, trace, measured, options)
    from prism.common.files import check_directory

    if output is not None:
        check_directory(output)
    result = _validate(job, model, trace, measured, options, quiet)
    conclude(result, output=output, as_json=as_json, details=details, quiet=quiet)


def _check_usage(
    target: str | None, trace: str | None, measured: str | None, options: Mapping[str, Any]
) -> None:
    """Refuse combinations of options that say nothing, or two things."""
    if trace is None and measured is None:
        raise click.UsageError("give --trace TRACE, or JOB_OR_MODEL with --measured STEPS")
    if trace is not None:
        if measured is not None or target is not None:
            extra = "--measured" if measured is not None else f"JOB_OR_MODEL ({target})"
            raise click.UsageError(f"--trace and {extra} exclude each other")
        from prism.traces.kinds import holds_step_times

        chosen = () if holds_step_times(trace) else ("column", "where")
        for name in (*chosen, "totals"):
            if options[name] is not None and options[name] != ():
                raise click.UsageError(f"--{name} belongs to --measured STEPS, not to --trace")
        if options["quantity"] != "step_time":
            raise PrismError(
                f"--quantity {options['quantity']}: a trace holds steps, not runs; use "
                "JOB_OR_MODEL with --measured STEPS, or leave --quantity out"
            )
        return
    if target is None:
        raise click.UsageError("--measured needs JOB_OR_MODEL, whose prediction is compared")
    if options["train"] is not None:
        raise click.UsageError("--train belongs to --trace; a job or a model is not fitted here")


def _validate(
    job: str | None,
    model: str | None,
    trace: str | None,
    measured: str | None,
    options: dict[str, Any],
    quiet: bool,
) -> xr.Dataset:
    """Run the validation that was asked for."""
    from prism.analyses.validate import validate as compare

    options["where"] = rows_of(options["where"])
    only = {"train"} if trace is None else {"totals", "quantity"}
    given = {k: v for k, v in options.items() if v is not None and k not in only}
    if trace is not None and not given["where"]:
        del given["where"]
    with progress_line("validating", quiet) as report:
        return compare(job, model=model, trace=trace, measured=measured, progress=report, **given)
