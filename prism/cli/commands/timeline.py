"""``prism timeline``: when every op of a step starts and ends."""

from __future__ import annotations

from typing import Any

import click

from prism.cli.commands.options import (
    Numbers,
    Percentiles,
    common_options,
    set_option,
    skip_option,
    step_range_option,
    steps_option,
)
from prism.cli.commands.outputs import Call


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
@common_options("timeline.json.gz for Perfetto, result, summary.")
def timeline(call: Call, what: tuple[str, ...], **options: Any) -> None:
    """Say when every op of a step runs, and what it waits for.

    WHAT is a job, a model of `prism fit`, a result.nc of `prism estimate` (the median and the p99
    step of its simulation), or a trace (its median step as measured, beside its ideal). Open
    timeline.json.gz in ui.perfetto.dev or chrome://tracing.
    """
    from prism.analyses.timeline import timeline as lay_timeline
    from prism.analyses.timelines.perfetto import to_perfetto

    shown = what[0] if len(what) == 1 else what
    result = call.run("simulating", lay_timeline, shown, **options)
    if call.output is None:
        call.say("the timeline is not kept; -o DIR writes it for Perfetto")
        call.conclude(result)
    else:
        call.conclude(result, {"timeline.json.gz": to_perfetto(result)})
