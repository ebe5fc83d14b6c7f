"""The commands that take measurements: fit, replay, validate.

As in `prism.cli`, which adds them to its group: one function each, slow imports inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from prism.commands.options import KeyValue, Split, common_options, place_options, rows_of
from prism.commands.outputs import check_model_path, tell_warnings, write_folder
from prism.commands.terminal import answer, progress_line
from prism.errors import PrismError

if TYPE_CHECKING:
    import xarray as xr


@click.command()
@click.argument("inputs", metavar="INPUT...", nargs=-1)
@click.option(
    "-o", "--output", metavar="MODEL.nc", type=click.Path(), help="Where the model is written."
)
@click.option(
    "--calibrate",
    type=KeyValue("job=steps"),
    metavar="JOB=STEPS",
    multiple=True,
    help="Bring JOB's library to the STEPS it took; repeatable, one for each measured size. "
    "FILE[column=value,...] chooses rows of a wider table.",
)
@click.option("--column", metavar="NAME", help="The duration, where step times have several.")
@click.option(
    "--where",
    type=KeyValue(),
    metavar="KEY=VALUE",
    multiple=True,
    help="Keep the step times whose column KEY is VALUE; repeatable.",
)
@click.option("--totals", metavar="FILE:COLUMN", help="Measured totals of the runs.")
@click.option(
    "--first-steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Learn the variation from the first N steps of each run; work by step from all.",
)
@common_options
def fit(
    inputs: tuple[str, ...],
    output: str | None,
    calibrate: tuple[tuple[str, str], ...],
    where: tuple[tuple[str, str], ...],
    as_json: bool,
    quiet: bool,
    seed: int | None,
    threads: int | None,
    **options: Any,
) -> None:
    """Fit distributions and effects to a trace, or to step times.

    INPUT is a table of ops (CSV or parquet), a profiler's JSON, or a folder of these, one file per
    rank; the model stands wherever a JOB does. Or INPUT is step times (CSV, parquet, a Megatron or
    MLPerf log); estimate and validate take the model. Or, without INPUT, jobs and the step times
    they took (--calibrate): the model predicts other sizes and layouts. The number of threads
    changes nothing.
    """
    if calibrate:
        _check_calibration(inputs, calibrate, options)
    elif not inputs:
        raise click.UsageError("Missing argument 'INPUT...'.")
    if output is not None:
        check_model_path(output, [*inputs, *(steps for _, steps in calibrate)])
    from prism.fit import fit as fit_trace
    from prism.fit import summarize_fit
    from prism.results import save
    from prism.views.model import model_view

    with progress_line("fitting", quiet) as report:
        options["where"] = rows_of(where)
        given = {key: value for key, value in options.items() if value}
        if calibrate:
            from prism.fit import fit_calibrated

            model = fit_calibrated(calibrate, seed, threads=threads, progress=report, **given)
        else:
            model = fit_trace(inputs, seed=seed, **given)
    numbers = summarize_fit(model)
    if output is not None:
        save(model, output)
        if not quiet:
            click.echo(f"wrote {output}", err=True)
    elif not quiet:
        click.echo("the model is not kept; -o MODEL.nc writes it", err=True)
    tell_warnings(numbers)
    answer(numbers, as_json, model_view)


def _check_calibration(
    inputs: tuple[str, ...], calibrate: tuple[tuple[str, str], ...], options: Mapping[str, Any]
) -> None:
    """Refuse what says nothing beside --calibrate."""
    if inputs:
        raise click.UsageError(
            f"--calibrate names its step times itself (JOB=STEPS); leave {inputs[0]} out"
        )
    for name in ("totals", "first_steps"):
        if options[name]:
            raise click.UsageError(f"--{name.replace('_', '-')} belongs to INPUT, step times alone")


@click.command()
@click.argument("trace", metavar="TRACE...", nargs=-1, required=True)
@click.option("-o", "--output", metavar="DIR", type=click.Path(), help="Result, summary and plots.")
@common_options
def replay(
    trace: tuple[str, ...],
    output: str | None,
    as_json: bool,
    quiet: bool,
    seed: int | None,
    threads: int | None,
) -> None:
    """Replay a trace's durations through its graph.

    It tells how well the graph reproduces the measured steps, and what stragglers cost. TRACE is a
    table of ops, a profiler's JSON, or a folder of these, one file per rank. Seed and threads
    change nothing.
    """
    from prism.files import check_directory
    from prism.replay import replay as replay_trace
    from prism.replay import summarize_replay
    from prism.views.trace import replay_view

    if output is not None:
        check_directory(output)
    with progress_line("replaying", quiet):
        try:
            result = replay_trace(trace[0] if len(trace) == 1 else list(trace))
        except PrismError as error:
            raise _explained(trace, error) from error
    numbers = summarize_replay(result)
    if output is not None:
        from prism.plots.validation import replay_plots

        write_folder(output, result, numbers, replay_plots, quiet)
    tell_warnings(numbers)
    answer(numbers, as_json, replay_view)


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
@click.option("--column", metavar="NAME", help="The duration, where STEPS has several.")
@click.option(
    "--where",
    type=KeyValue(),
    metavar="KEY=VALUE",
    multiple=True,
    help="Keep the rows of STEPS in which column KEY is VALUE; repeatable.",
)
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
    help="none: every op draws its own effects.  [default: the job's, else full]",
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
@click.option("-o", "--output", metavar="DIR", type=click.Path(), help="Result, summary and plots.")
@common_options
@place_options
def validate(
    job: str | None,
    trace: str | None,
    measured: str | None,
    model: str | None,
    output: str | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Compare a prediction with measurements.

    None of them were fitted on. Either --trace TRACE, whose one part predicts the other; or
    JOB_OR_MODEL (a job file, the name of a shipped job, or what `prism fit` wrote) with --measured
    STEPS.
    """
    _check_usage(job or model, trace, measured, options)
    from prism.files import check_directory
    from prism.validate import summarize_validation
    from prism.views.trace import validation_view

    if output is not None:
        check_directory(output)
    result = _validate(job, model, trace, measured, options, quiet)
    numbers = summarize_validation(result)
    if output is not None:
        from prism.plots.validation import draw_validation

        write_folder(
            output, result, numbers, lambda result: {"validation": draw_validation(result)}, quiet
        )
    tell_warnings(numbers)
    answer(numbers, as_json, validation_view)


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
            if options[name]:
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
    from prism.validate import validate as compare

    options["where"] = rows_of(options["where"])
    only = {"train"} if trace is None else {"totals", "quantity"}
    given = {k: v for k, v in options.items() if v is not None and k not in only}
    if trace is not None and not given["where"]:
        del given["where"]
    with progress_line("validating", quiet) as report:
        return compare(job, model=model, trace=trace, measured=measured, progress=report, **given)


def _explained(inputs: tuple[str, ...], error: PrismError) -> PrismError:
    """Say what can be done with step times, where a trace of ops was expected."""
    from prism.traces.kinds import holds_step_times

    for name in inputs:
        if holds_step_times(name):
            return PrismError(
                f"{name}: holds step times, not ops, and there is nothing to replay; prism fit "
                f"{name} learns from them alone, prism validate JOB --measured {name} compares "
                "them with a prediction"
            )
    return error
