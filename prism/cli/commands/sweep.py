"""``prism sweep``: settings of a job side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from prism.cli.commands.options import common_options, output_option, place_options, set_option
from prism.cli.commands.outputs import conclude_view
from prism.cli.commands.terminal import progress_line

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes


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
    help="All tp, cp, pp, vpp, dp and microbatches that use the job's GPUs, keep its batch and fit "
    "the memory; --vary with one of these says which.",
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
    type=click.Choice(["p50", "p95", "mean"]),
    default="p95",
    show_default=True,
    help="What settings are sorted by.",
)
@set_option
@output_option("Result, summary and plot.")
@common_options()
@place_options
def sweep(
    job: str,
    vary: tuple[str, ...],
    layouts: bool,
    replicates: int,
    objective: str,
    overrides: tuple[str, ...],
    output: str | None,
    as_json: bool,
    quiet: bool,
    seed: int | None,
    threads: int | None,
) -> None:
    """Simulate settings of a job side by side, p50 against p95.

    JOB_OR_MODEL is a job file, the name of a shipped job, or a model of `prism fit`.
    """
    if not vary and not layouts:
        raise click.UsageError("nothing to vary; give --vary KEY=A,B,C or --layouts")
    from prism.analyses.sweep import summarize_sweep
    from prism.analyses.sweep import sweep as sweep_settings
    from prism.analyses.sweeps.grid import parse_vary
    from prism.analyses.texts.sweep import in_words
    from prism.common.files import check_directory
    from prism.jobs.job import load_job
    from prism.present.views.sweep import sweep_view

    grid = parse_vary(vary)
    if output is not None:
        check_directory(output)
    loaded = load_job(job, overrides)
    with progress_line("sweeping", quiet) as report:
        result = sweep_settings(
            loaded,
            grid,
            layouts=layouts,
            replicates=replicates,
            objective=objective,
            seed=seed,
            threads=threads,
            progress=report,
        )
    numbers = in_words(summarize_sweep(result))
    conclude_view(result, numbers, sweep_view, _draw, output=output, as_json=as_json, quiet=quiet)


def _draw(result: xr.Dataset) -> dict[str, Axes]:
    """Draw the plot of a sweep, by the stem of its files."""
    from prism.plots.sweep import plot_sweep

    return {"sweep": plot_sweep(result)}
