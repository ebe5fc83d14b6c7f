"""``prism replay``: how well a trace's graph gives its steps back, and what stragglers cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from prism.cli.commands.options import NO_EFFECT, common_options, output_option, step_range_option
from prism.cli.commands.outputs import conclude_view
from prism.cli.commands.recordings import explained
from prism.cli.commands.terminal import progress_line
from prism.common.errors import PrismError

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes


@click.command()
@click.argument("trace", metavar="TRACE...", nargs=-1, required=True)
@output_option()
@step_range_option
@common_options(draws=False, threads=NO_EFFECT)
def replay(
    trace: tuple[str, ...],
    output: str | None,
    step_range: str | None,
    as_json: bool,
    quiet: bool,
    seed: int | None,
    threads: int | None,
) -> None:
    """Replay a trace's durations through its graph.

    It tells how well the graph reproduces the measured steps, and what stragglers cost. TRACE is a
    table of ops, what a profiler wrote (PyTorch's JSON, Nsight Systems SQLite, Chakra), or a folder
    of these, one file per rank.
    """
    from prism.analyses.replay import replay as replay_trace
    from prism.analyses.replay import summarize_replay
    from prism.common.files import check_directory
    from prism.present.views.trace import replay_view

    if output is not None:
        check_directory(output)
    with progress_line("replaying", quiet):
        try:
            chosen = {} if step_range is None else {"step_range": step_range}
            result = replay_trace(trace[0] if len(trace) == 1 else list(trace), **chosen)
        except PrismError as error:
            raise explained(trace, error) from error
    numbers = summarize_replay(result)
    conclude_view(result, numbers, replay_view, _draw, output=output, as_json=as_json, quiet=quiet)


def _draw(result: xr.Dataset) -> dict[str, Axes]:
    """Draw the plots of a replay, by the stem of their files."""
    from prism.plots.validation import replay_plots

    return replay_plots(result)
