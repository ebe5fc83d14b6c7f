"""``prism timeline``: when every op of a step starts and ends."""

from __future__ import annotations

from typing import Any

import click

from prism.cli.commands.options import (
    Numbers,
    Percentiles,
    common_options,
    details_option,
    output_option,
    set_option,
    skip_option,
    step_range_option,
    steps_option,
)
from prism.cli.commands.outputs import conclude
from prism.cli.commands.terminal import progress_line, say


@click.command()
@click.argument("what", nargs=-1, required=True)
@click.option(
    "--percentiles",
    type=Percentiles(),
    metavar="P,Q",
    help="Steps of a job: those nearest these percentiles of its step time.  [default: 50,99]",
)
@click.option("--ideal", is_flag=True, help="Of a job also the step with every effect at 1.")
@click.option("--step", type=int, help="Of a trace: which.  [default: the median measured one]")
@click.option(
    "--replicates",
    type=click.IntRange(min=1),
    help="Steps to simulate for the percentiles.  [default: 4096, or the result's]",
)
@click.option("--ranks", type=Numbers(), metavar="A,B:C", help="Show these ranks.")
@click.option("--replicas", type=Numbers(), metavar="A,B:C", help="Show these dp replicas.")
@click.option("--stages", type=Numbers(), metavar="A,B:C", help="Show these pipeline stages.")
@step_range_option
@skip_option
@steps_option
@set_option
@output_option("timeline.json.gz for Perfetto, result, summary.")
@details_option
@common_options()
def timeline(
    what: tuple[str, ...],
    output: str | None,
    details: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Say when every op of a step runs, and what it waits for.

    WHAT is a job, a model of `prism fit`, a result.nc of `prism estimate` (the median and the p99
    step of its simulation), or a trace (its median step as measured, beside its ideal). Open
    timeline.json.gz in ui.perfetto.dev or chrome://tracing.
    """
    from prism.analyses.timeline import timeline as lay_timeline
    from prism.analyses.timelines.perfetto import to_perfetto
    from prism.common.files import check_directory

    if output is not None:
        check_directory(output)
    with progress_line("simulating", quiet) as report:
        result = lay_timeline(what[0] if len(what) == 1 else what, progress=report, **options)
    if output is None and not quiet:
        say("the timeline is not kept; -o DIR writes it for Perfetto")
    texts = None if output is None else {"timeline.json.gz": to_perfetto(result)}
    conclude(result, output=output, as_json=as_json, details=details, quiet=quiet, texts=texts)
