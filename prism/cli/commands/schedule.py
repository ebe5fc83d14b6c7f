"""``prism schedule``: a pipeline schedule as text, CSV or picture."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

import click

from prism.cli.commands.options import NO_EFFECT, common_options
from prism.cli.commands.outputs import Call, check_picture_path
from prism.cli.commands.terminal import to_json
from prism.common.text import visible

if TYPE_CHECKING:
    from prism.jobs.schedule import Schedule


@click.command()
@click.argument("name")
@click.option("--stages", type=click.IntRange(min=1), required=True, help="Pipeline stages (pp).")
@click.option(
    "--microbatches", type=click.IntRange(min=1), required=True, help="Microbatches per step."
)
@click.option("--chunks", type=click.IntRange(min=1),
              help="Model chunks per stage (vpp)  [default: 2 in a V, else 1]")  # fmt: skip
@click.option("--csv", "csv_file", metavar="FILE", type=click.Path(), help="Write it as CSV.")
@click.option("--plot", "plot_file", metavar="FILE", type=click.Path(), help="Draw it (png, svg).")
@common_options(details=False, draws=False, threads=NO_EFFECT)
def schedule(
    call: Call,
    name: str,
    stages: int,
    microbatches: int,
    chunks: int | None,
    csv_file: str | None,
    plot_file: str | None,
) -> None:
    """Print a pipeline schedule, write it as CSV, or draw it.

    NAME is gpipe, 1f1b, interleaved, zb-h1, zb-v or dualpipe-v.
    """
    from prism.common import sizes
    from prism.common.files import atomic_write
    from prism.jobs.schedule import format_schedule, make_schedule, schedule_to_csv

    counts = {"actions": (3 * stages * microbatches * (chunks or 2), sizes.ACTION)}
    sizes.check_size(f"schedule {name}", counts, "--stages, --microbatches or --chunks")
    actions = make_schedule(name, stages, microbatches, chunks)
    if plot_file is not None:
        check_picture_path(plot_file)
    if csv_file is not None:
        with atomic_write(csv_file) as file:
            file.write_text(schedule_to_csv(actions))
    if plot_file is not None:
        from prism.plots.base import save_figure
        from prism.plots.schedule import plot_schedule

        with atomic_write(plot_file) as file:
            save_figure(plot_schedule(actions), file)
    if call.as_json:
        click.echo(to_json(_numbers(name, actions)))
    else:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        click.echo(visible(format_schedule(actions, columns)))
    for path in (csv_file, plot_file):
        if path is not None:
            call.say(f"wrote {path}")


def _numbers(name: str, actions: Schedule) -> dict[str, Any]:
    """Figures of a schedule; times in slots, of which a forward pass takes `Slots.forward`."""
    from prism.jobs.schedule import Slots, action_times, play_schedule

    slots = Slots()
    starts, lengths = play_schedule(actions, *slots), action_times(actions, slots)
    ends = [s[-1] + length[-1] for s, length in zip(starts, lengths, strict=True)]
    busy = sum(map(sum, lengths))
    return {
        "schedule": name, "stages": len(actions),
        "microbatches": 1 + max(action.microbatch for row in actions for action in row),
        "chunks": 1 + max(action.chunk for row in actions for action in row),
        "slots": {
            "F": slots.forward, "B": slots.backward, "I": slots.backward - slots.weight,
            "W": slots.weight, "step": max(ends),
        },
        "idle_fraction": 1.0 - busy / (max(ends) * len(actions)),
        "actions": [
            [[letter, a.chunk, a.microbatch] for a, letter in zip(*rows, strict=True)]
            for rows in zip(actions, actions.letters, strict=True)
        ],
    }  # fmt: skip
