"""``prism sweep``: settings of a job side by side."""

from __future__ import annotations

from typing import Any

import click

from prism.cli.commands.options import common_options, set_option
from prism.cli.commands.outputs import Call


@click.command()
@click.argument("job", metavar="JOB_OR_MODEL")
@click.option(
    "--vary",
    metavar="KEY=A,B,C",
    multiple=True,
    help="Values of any key of the job, whole numbers also as first:last:step; repeatable: all "
    "combinations.",
)
@click.option(
    "--layouts",
    is_flag=True,
    help="All layouts that use the job's GPUs, keep its batch and fit the memory; --vary with one "
    "of their sizes says which.",
)
@click.option(
    "--replicates",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Steps of a setting that may be among the best; others run shorter, or not at all.",
)
@click.option(
    "--objective",
    type=click.Choice(["p50", "p95", "mean", "time_to_train", "done_by", "carbon"]),
    help="What settings are sorted by [p50 with --layouts, time_to_train where failures, "
    "checkpoints or the like of the run alone are varied, else p95]; time_to_train is the mean "
    "run, done_by P(done by run.deadline), carbon needs run.grid_intensity or run.region.",
)
@click.option(
    "--min-p-fits",
    type=click.FloatRange(0.0, 1.0),
    default=0.9,
    show_default=True,
    help="Probability of fitting the GPU's memory below which a setting is not chosen.",
)
@set_option
@common_options("Result, summary and plot.", placed=True)
def sweep(
    call: Call,
    job: str,
    vary: tuple[str, ...],
    layouts: bool,
    overrides: tuple[str, ...],
    **options: Any,
) -> None:
    """Simulate settings of a job side by side, p50 against p95.

    JOB_OR_MODEL is a job file, the name of a shipped job, or a model of `prism fit`.
    """
    if not vary and not layouts:
        raise click.UsageError("nothing to vary; give --vary KEY=A,B,C or --layouts")
    from prism.analyses.sweep import sweep as sweep_settings
    from prism.analyses.sweeps.grid import parse_vary
    from prism.jobs.job import load_job

    grid = parse_vary(vary)
    call.conclude(call.run(
        "sweeping", sweep_settings, load_job(job, overrides), grid, layouts=layouts, **options
    ))  # fmt: skip
