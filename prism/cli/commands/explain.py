"""``prism explain``: the gap between two jobs, or a claim and a measurement, term by term."""

from __future__ import annotations

from typing import Any

import click

from prism.cli.commands.options import common_options
from prism.cli.commands.outputs import Call

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
@common_options("Result and summary.")
def explain(
    call: Call,
    a: str,
    b: str,
    overrides: tuple[str, ...],
    **options: Any,
) -> None:
    """Explain the gap between two jobs, or a claim and a measurement.

    A and B are job files or names of shipped jobs. Their GPU time for the same useful work is split
    by where it goes, and by what is changed on the way from A to B. With --measured-a and
    --measured-b it also says what of either is not predicted.
    """
    from prism.analyses.explain import explain as explain_gap
    from prism.jobs.job import load_job

    call.conclude(call.run("explaining", explain_gap, a, load_job(b, overrides), **options))
