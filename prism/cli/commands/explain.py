"""``prism explain``: the gap between two jobs, or a claim and a measurement, term by term."""

from __future__ import annotations

import click

from prism.cli.commands.options import common_options, details_option, output_option
from prism.cli.commands.outputs import conclude
from prism.cli.commands.terminal import progress_line

_MEASURED = "Measured or claimed of {}: TFLOP/s of a GPU (420TFLOP/s) or a step time (9.1s)."


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--measured-a", metavar="FIGURE", help=_MEASURED.format("A"))
@click.option("--measured-b", metavar="FIGURE", help=_MEASURED.format("B"))
@click.option(
    "--set-b",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Value of any key of job B; repeatable.",
)
@click.option(
    "--replicates",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    help="Steps of each job on the way from A to B.",
)
@output_option("Result and summary.")
@details_option
@common_options()
def explain(
    a: str,
    b: str,
    measured_a: str | None,
    measured_b: str | None,
    overrides: tuple[str, ...],
    replicates: int,
    output: str | None,
    as_json: bool,
    details: bool,
    quiet: bool,
    seed: int | None,
    threads: int | None,
) -> None:
    """Explain the gap between two jobs, or a claim and a measurement.

    A and B are job files or names of shipped jobs. Their GPU time for the same useful work is split
    by where it goes, and by what is changed on the way from A to B. With --measured-a and
    --measured-b it also says what of either is not predicted.
    """
    from prism.analyses.explain import explain as explain_gap
    from prism.common.files import check_directory
    from prism.jobs.job import load_job

    if output is not None:
        check_directory(output)
    second = load_job(b, overrides)
    with progress_line("explaining", quiet) as report:
        result = explain_gap(
            a, second, measured_a=measured_a, measured_b=measured_b, replicates=replicates,
            seed=seed, threads=threads, progress=report,
        )  # fmt: skip
    conclude(result, output=output, as_json=as_json, details=details, quiet=quiet)
