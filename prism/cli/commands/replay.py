"""``prism replay``: how well a trace's graph gives its steps back, and what stragglers cost."""

from __future__ import annotations

from typing import Any

import click

from prism.cli.commands.options import (
    NO_EFFECT,
    common_options,
    details_option,
    output_option,
    skip_option,
    step_range_option,
    steps_option,
)
from prism.cli.commands.outputs import conclude
from prism.cli.commands.recordings import explained
from prism.cli.commands.terminal import progress_line
from prism.common.errors import PrismError


@click.command()
@click.argument("trace", metavar="TRACE...", nargs=-1, required=True)
@output_option()
@details_option
@step_range_option
@skip_option
@steps_option
@common_options(draws=False, threads=NO_EFFECT)
def replay(
    trace: tuple[str, ...],
    output: str | None,
    step_range: str | None,
    skip: int | None,
    steps: str | None,
    as_json: bool,
    details: bool,
    quiet: bool,
    seed: int | None,
    threads: int | None,
) -> None:
    """Replay a trace's durations through its graph.

    It says how well the graph reproduces the measured steps, and what stragglers cost. TRACE is a
    table of ops, what a profiler wrote (PyTorch's JSON, Nsight Systems SQLite, Chakra), or a folder
    of these, one file per rank.
    """
    from prism.analyses.replay import replay as replay_trace
    from prism.common.files import check_directory

    if output is not None:
        check_directory(output)
    with progress_line("replaying", quiet):
        try:
            what = trace[0] if len(trace) == 1 else list(trace)
            given: dict[str, Any] = {"step_range": step_range, "skip": skip, "steps": steps}
            given = {key: value for key, value in given.items() if value is not None}
            result = replay_trace(what, **given)
        except PrismError as error:
            raise explained(trace, error) from error
    conclude(result, output=output, as_json=as_json, details=details, quiet=quiet)
