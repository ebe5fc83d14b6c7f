"""``prism fit``: distributions and effects from traces, tables or step times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from prism.cli.commands.options import (
    KeyValue,
    choose_options,
    common_options,
    output_option,
    rows_of,
    skip_option,
    step_range_option,
    steps_option,
    totals_option,
)
from prism.cli.commands.outputs import Call, check_model_path


@click.command()
@click.argument("inputs", metavar="INPUT...", nargs=-1)
@output_option("Where the model is written.", "MODEL.nc")
@click.option(
    "--calibrate",
    type=KeyValue("job=steps"),
    metavar="JOB=STEPS",
    multiple=True,
    help="Calibrate JOB on its measured STEPS; repeatable, one for each measured size. "
    "FILE[column=value,...] chooses rows of a wider table.",
)
@choose_options()
@totals_option
@click.option(
    "--first-steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Fit the variation to the first N steps of each run; work by step to all.",
)
@step_range_option
@skip_option
@steps_option
@common_options(threads="Threads of --calibrate.  [default: all cores]")
def fit(
    call: Call,
    inputs: tuple[str, ...],
    output: str | None,
    calibrate: tuple[tuple[str, str], ...],
    where: tuple[tuple[str, str], ...],
    **options: Any,
) -> None:
    """Fit distributions and effects to a trace, or to step times.

    INPUT is a table of ops (CSV or parquet), what a profiler wrote (PyTorch's JSON, Nsight Systems
    SQLite, Chakra), or a folder of these, one file per rank; the model stands wherever a JOB does.
    Without steps, or of HTA's kernel tables and of nccl-tests, it is a library of distributions.
    Or INPUT is step times (CSV, parquet, a trainer's log); estimate and validate take the
    model. Or, without INPUT, jobs and the step times they took (--calibrate): the model predicts
    other sizes and layouts.
    """
    if calibrate:
        _check_calibration(inputs, calibrate, options)
    elif not inputs:
        raise click.UsageError("Missing argument 'INPUT...'.")
    if output is not None:
        check_model_path(output, [*inputs, *(steps for _, steps in calibrate)])
    from prism.common.resultfiles import save
    from prism.models.fit import fit as fit_trace
    from prism.present.answers.fit import fit_answer

    options["where"] = rows_of(where)
    given = {key: value for key, value in options.items() if value is not None}
    if calibrate:
        from prism.models.fit import fit_calibrated

        model = call.run("fitting", fit_calibrated, calibrate, **given)
    else:
        with call.progress("fitting"):
            model = fit_trace(inputs, seed=call.seed, **given)
    if output is not None:
        save(model, output)
    kept = f"wrote {output}" if output else "the model is not kept; -o MODEL.nc writes it"
    call.say(kept)
    call.print(fit_answer(model))


def _check_calibration(
    inputs: tuple[str, ...], calibrate: tuple[tuple[str, str], ...], options: Mapping[str, Any]
) -> None:
    """Refuse what says nothing beside --calibrate."""
    if inputs:
        raise click.UsageError(
            f"--calibrate names its step times itself (JOB=STEPS); leave {inputs[0]} out"
        )
    for name in ("totals", "first_steps", "step_range"):
        if options[name] is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} belongs to INPUT")
