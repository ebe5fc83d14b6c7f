"""``prism show``: what a file or a shipped name holds."""

from __future__ import annotations

import click

from prism.cli.commands.options import (
    NO_EFFECT,
    choose_options,
    common_options,
    rows_of,
    set_option,
    skip_option,
    step_range_option,
    steps_option,
)
from prism.cli.commands.outputs import Call, check_picture_path
from prism.cli.commands.terminal import print_answer, to_json


@click.command()
@click.argument("what", required=False)
@click.option("--jobs", is_flag=True, help="List the jobs that ship with prism.")
@click.option("--libraries", is_flag=True, help="List the distribution sets that ship with prism.")
@set_option
@choose_options()
@step_range_option
@skip_option
@steps_option
@click.option("--yaml", "as_yaml", is_flag=True, help="A job as a commented file to start from.")
@click.option(
    "--plot", metavar="FILE.png", help="Draw a library's matrix products by size (or .svg)."
)
@common_options(draws=False, threads=NO_EFFECT)
def show(
    call: Call,
    what: str | None,
    jobs: bool,
    libraries: bool,
    overrides: tuple[str, ...],
    column: str | None,
    unit: str | None,
    pattern: str | None,
    where: tuple[tuple[str, str], ...],
    step_range: str | None,
    skip: int | None,
    steps: str | None,
    as_yaml: bool,
    plot: str | None,
) -> None:
    """Print what a file or a shipped name holds.

    WHAT is a file or the name of a shipped job or library. A job is shown resolved, each value
    with its source; a trace by its kinds of ops, step times by their spread. With --yaml a
    job is a file to start from: prism show NAME --yaml > my-job.yaml.
    """
    from prism.present.show import describe, describe_jobs, describe_libraries

    if jobs + libraries + (what is not None) != 1:
        raise click.UsageError("give one of: a file or name, --jobs, --libraries")
    if as_yaml:
        if what is None or call.as_json:
            raise click.UsageError("--yaml writes one job: prism show NAME --yaml")
        from prism.jobs.job import load_job
        from prism.present.jobtemplate import job_yaml

        click.echo(job_yaml(load_job(what, overrides)), nl=False)
        return
    if jobs:
        shown = describe_jobs()
    elif libraries:
        shown = describe_libraries()
    else:
        assert what is not None
        shown = describe(
            what, overrides, column, rows_of(where), step_range, unit, skip, steps, pattern
        )
    if plot is not None:
        from prism.plots.base import save_figure

        check_picture_path(plot)
        if not shown.pictures:
            raise click.UsageError(
                "--plot draws libraries with tables of products, such as h100-healthy"
            )
        save_figure(shown.pictures[0].draw(), plot)
    if call.as_json:
        click.echo(to_json(shown.figures))
    else:
        print_answer(shown, False, call.details)
