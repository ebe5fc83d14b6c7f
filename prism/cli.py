"""The commands: one function each, which calls what a notebook would call.

Imports of anything slow stand inside the functions, so that ``prism --help`` is instant.
The answer goes to stdout, everything else to stderr; with ``--json`` the answer is one object.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import prism as package
from prism.errors import PrismError
from prism.options import Duration, Factors, KeyValue, common_options, place_options, rows_of
from prism.outputs import tell_warnings, write_folder
from prism.placecommand import place
from prism.rankcommand import rank
from prism.sweepcommand import sweep
from prism.terminal import answer, progress_line
from prism.tracecommands import fit, replay, validate

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package.__version__, prog_name="prism")
def prism() -> None:
    """How long a distributed training run takes, with what probability, and why that varies."""


@prism.command()
@click.argument("job")
@click.option(
    "--replicates",
    type=click.IntRange(min=1),
    default=10_000,
    show_default=True,
    help="Steps to simulate; 64 of them share one draw of the cluster.",
)
@click.option(
    "--run-replicates",
    type=click.IntRange(min=1),
    default=1_000,
    show_default=True,
    help="Whole runs to simulate.",
)
@click.option("--steps", type=click.IntRange(min=1), help="Steps of the run, instead of the job's.")
@click.option("--deadline", type=Duration(), help="Give P(done within this): 60d, 12h, ...")
@click.option(
    "--slowdown-thresholds",
    type=Factors(),
    help="Give P(step time > x ideal) for each x.  [default: the job's, else 1.05,1.1,1.2]",
)
@click.option(
    "--start",
    type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"]),
    help="When the run starts; gives the date it ends by.",
)
@click.option(
    "--probability",
    type=click.FloatRange(0.0, 1.0, min_open=True, max_open=True),
    help="Of the end date.  [default: the job's, else 0.9]",
)
@click.option("--price", type=click.FloatRange(min=0.0), help="Of one GPU for one hour.")
@click.option(
    "--progress",
    "under_way",
    metavar="STEPS",
    help="Steps so far of a run under way: for the rest.",
)
@click.option("--column", metavar="NAME", help="The duration, where these have several.")
@click.option(
    "--where",
    type=KeyValue(),
    metavar="KEY=VALUE",
    multiple=True,
    help="Keep those of these steps whose column KEY is VALUE; repeatable.",
)
@click.option(
    "--dependence",
    type=click.Choice(["full", "none"]),
    help="none: every op draws its own effects.  [default: the job's, else full]",
)
@click.option(
    "--resolution",
    type=click.Choice(["op", "kernel"]),
    help="What one draw stands for.  [default: the job's, else op]",
)
@click.option(
    "--engine",
    type=click.Choice(["auto", "exact", "exchangeable"]),
    default="auto",
    show_default=True,
    help="exchangeable: of many replicas simulate the slowest and a sample.",
)
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Any key of the job.")
@click.option("-o", "--output", metavar="DIR", type=click.Path(), help="Result, summary and plots.")
@common_options
@place_options
def estimate(
    job: str,
    replicates: int,
    run_replicates: int,
    under_way: str | None,
    where: tuple[tuple[str, str], ...],
    dependence: str | None,
    resolution: str | None,
    overrides: tuple[str, ...],
    output: str | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Estimate how long a step and the run take, with what probability.

    JOB is a YAML file or the name of a shipped job; `prism show --jobs` lists those.
    """
    from prism.estimate import estimate as estimate_job
    from prism.estimate import summarize_estimate
    from prism.files import check_directory
    from prism.job import load_job
    from prism.steptimes.model import is_step_model
    from prism.views import estimate_view

    if under_way is None and (where or options["column"]):
        raise click.UsageError("--column and --where choose from the steps of --progress STEPS")
    if output is not None:
        check_directory(output)
    for key, value in (("dependence", dependence), ("resolution", resolution)):
        if value is not None:
            overrides = (*overrides, f"variability.{key}={value}")
    if options["start"] is not None:
        options["start"] = options["start"].isoformat()
    from_steps = is_step_model(job)
    if from_steps and overrides:
        raise PrismError(f"{job}: a model of step times has no job; leave {overrides[0]} out")
    loaded = job if from_steps else load_job(job, overrides)
    with progress_line("simulating", quiet) as report:
        result = estimate_job(
            loaded,
            replicates=replicates,
            run_replicates=run_replicates,
            progress=report,
            under_way=under_way,
            where=rows_of(where) or None,
            **options,
        )
    numbers = summarize_estimate(result)
    if output is not None:
        write_folder(output, result, numbers, _draw_estimate, quiet)
    tell_warnings(numbers)
    answer(numbers, as_json, lambda numbers: estimate_view(numbers, result))


def _draw_estimate(result: xr.Dataset) -> dict[str, Axes]:
    """Draw the plots of an estimate, by the stem of their files."""
    from prism import plots
    from prism.runplot import plot_progress

    axes = {"step_time": plots.plot_step_time(result)}
    if "time_to_train" in result:
        axes["time_to_train"] = plots.plot_time_to_train(result)
    if "progress_time" in result:
        axes["progress"] = plot_progress(result)
    return axes


for _command in (fit, replay, validate, rank, place, sweep):
    prism.add_command(_command)


@prism.command()
@click.argument("name")
@click.option("--stages", type=click.IntRange(min=1), help="Pipeline stages (pp).")
@click.option("--microbatches", type=click.IntRange(min=1), help="Microbatches per step.")
@click.option(
    "--chunks",
    type=click.IntRange(min=1),
    help="Model chunks per stage (vpp)  [default: 2 in a V, else 1]",
)
@click.option("--csv", "csv_file", metavar="FILE", type=click.Path(), help="Write it as CSV.")
@click.option("--plot", "plot_file", metavar="FILE", type=click.Path(), help="Draw it (png, svg).")
@common_options
def schedule(
    name: str,
    stages: int | None,
    microbatches: int | None,
    chunks: int | None,
    csv_file: str | None,
    plot_file: str | None,
    as_json: bool,
    quiet: bool,
    seed: int | None,
    threads: int | None,
) -> None:
    """Print a pipeline schedule, write it as CSV, or draw it.

    NAME is gpipe, 1f1b, interleaved, zb-h1, zb-v or dualpipe-v, or a CSV file of actions. Seed and
    threads change nothing.
    """
    from prism.files import atomic_write
    from prism.schedule import (
        Slots,
        action_letter,
        action_times,
        format_schedule,
        make_schedule,
        play_schedule,
        schedule_to_csv,
    )

    if name.lower().endswith(".csv"):
        if any(count is not None for count in (stages, microbatches, chunks)):
            raise click.UsageError(
                f"{name} says its stages, microbatches and chunks itself; leave --stages, "
                "--microbatches and --chunks out"
            )
        actions = _read_schedule(name)
    else:
        if stages is None or microbatches is None:
            raise click.UsageError("a generated schedule needs --stages and --microbatches")
        actions = make_schedule(name, stages, microbatches, chunks)
    if plot_file is not None and Path(plot_file).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise PrismError(f"{plot_file}: unknown format; the name must end in .png, .svg or .pdf")
    if csv_file is not None:
        with atomic_write(csv_file) as file:
            file.write_text(schedule_to_csv(actions))
    if plot_file is not None:
        _draw_schedule(actions, Path(plot_file))
    slots = Slots()
    starts, lengths = play_schedule(actions, *slots), action_times(actions, slots)
    ends = [s[-1] + length[-1] for s, length in zip(starts, lengths, strict=True)]
    busy = sum(map(sum, lengths))
    numbers = {
        "schedule": name,
        "stages": len(actions),
        "microbatches": 1 + max(action.microbatch for row in actions for action in row),
        "chunks": 1 + max(action.chunk for row in actions for action in row),
        "slots": {
            "F": slots.forward,
            "B": slots.backward,
            "I": slots.backward - slots.weight,
            "W": slots.weight,
            "step": max(ends),
        },
        "idle_fraction": 1.0 - busy / (max(ends) * len(actions)),
        "actions": [
            [[action_letter(a, actions.split_of(stage)), a.chunk, a.microbatch] for a in row]
            for stage, row in enumerate(actions)
        ],
    }
    answer(numbers, as_json, lambda _: format_schedule(actions))
    for path in (csv_file, plot_file):
        if path is not None and not quiet:
            click.echo(f"wrote {path}", err=True)


def _read_schedule(name: str) -> Any:
    """Read a schedule from a CSV file."""
    from prism.schedule import schedule_from_csv

    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise PrismError(f"{name}: {reason}; expected a CSV of actions such as 0F0") from error
    return schedule_from_csv(text, name)


def _draw_schedule(actions: Any, path: Path) -> None:
    """Draw a schedule into a file, in the format its suffix names."""
    from prism.files import atomic_write
    from prism.plots import plot_schedule, save_figure

    with atomic_write(path) as file:
        save_figure(plot_schedule(actions), file)


@prism.command()
@click.argument("what", required=False)
@click.option("--jobs", is_flag=True, help="List the jobs that ship with prism.")
@click.option("--libraries", is_flag=True, help="List the distribution sets that ship with prism.")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Any key of the job.")
@click.option("--column", metavar="NAME", help="The duration, where step times have several.")
@click.option(
    "--where",
    type=KeyValue(),
    metavar="KEY=VALUE",
    multiple=True,
    help="Keep the step times whose column KEY is VALUE; repeatable.",
)
@common_options
def show(
    what: str | None,
    jobs: bool,
    libraries: bool,
    overrides: tuple[str, ...],
    column: str | None,
    where: tuple[tuple[str, str], ...],
    as_json: bool,
    quiet: bool,
    seed: int | None,
    threads: int | None,
) -> None:
    """Print what a file or a shipped name holds.

    WHAT is a file or the name of a shipped job or library. A job is shown resolved, each value
    with where it came from; a trace by its kinds of ops, step times by their spread. Seed, threads
    and quiet change nothing.
    """
    from prism.show import describe, describe_jobs, describe_libraries

    if jobs + libraries + (what is not None) != 1:
        raise click.UsageError("give one of: a file or name, --jobs, --libraries")
    if jobs:
        found, view = describe_jobs()
    elif libraries:
        found, view = describe_libraries()
    else:
        assert what is not None
        found, view = describe(what, overrides, column, rows_of(where))
    answer(found, as_json, lambda _: view)
