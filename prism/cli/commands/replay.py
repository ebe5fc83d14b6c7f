"""``prism replay``: how well a trace's graph gives its steps back, and what stragglers cost."""

from __future__ import annotations

from typing import Any

import click

from prism.cli.commands.options import (
    NO_EFFECT,
    PLOTS,
    common_options,
    skip_option,
    step_range_option,
    steps_option,
)
from prism.cli.commands.outputs import Call
from prism.common.errors import PrismError


@click.command()
@click.argument("trace", metavar="TRACE...", nargs=-1, required=True)
@step_range_option
@skip_option
@steps_option
@common_options(PLOTS, draws=False, threads=NO_EFFECT)
def replay(call: Call, trace: tuple[str, ...], **options: Any) -> None:
    """Replay a trace's durations through its graph.

    It says how well the graph reproduces the measured steps, and what stragglers cost. TRACE is a
    table of ops, what a profiler wrote (PyTorch's JSON, Nsight Systems SQLite, Chakra), or a folder
    of these, one file per rank.
    """
    from prism.analyses.replay import replay as replay_trace

    with call.progress("replaying"):
        try:
            result = replay_trace(trace[0] if len(trace) == 1 else list(trace), **options)
        except PrismError as error:
            raise _explained(trace, error) from error
    call.conclude(result)


def _explained(inputs: tuple[str, ...], error: PrismError) -> PrismError:
    """Say what can be done with step times, where a trace of ops was expected."""
    from prism.traces import holds

    for name in inputs:
        if holds(name) == "step_times":
            return PrismError(
                f"{name}: holds step times, not ops, and there is nothing to replay; prism fit "
                f"{name} learns from them alone, prism validate JOB --measured {name} compares "
                "them with a prediction"
            )
    return error
