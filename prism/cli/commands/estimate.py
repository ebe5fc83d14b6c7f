"""``prism estimate``: how long a step and the run take, with what probability."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from prism.cli.commands.nodes import (
    measured_nodes_options,
    read_host_names,
    read_measured_nodes,
)
from prism.cli.commands.options import (
    PLOTS,
    Factors,
    choose_options,
    common_options,
    dependence_option,
    gpus_option,
    probability_option,
    rows_of,
    set_option,
)
from prism.cli.commands.outputs import Call, check_file_path, openmetrics_option, write_text
from prism.common.errors import PrismError

if TYPE_CHECKING:
    from prism.jobs.job import Job


@click.command()
@click.argument("job")
@click.option(
    "--replicates",
    type=click.IntRange(min=1),
    default=12_800,
    show_default=True,
    help="Steps to simulate; 64 of them share one draw of the cluster.",
)
@click.option(
    "--run-replicates",
    type=click.IntRange(min=1),
    help="Whole runs to simulate.  [default: 1000 where a run is asked for]",
)
@click.option("--steps", type=click.IntRange(min=1), help="Steps of the run, instead of the job's.")
@click.option(
    "--deadline",
    metavar="TIME",
    help="Give P(done within this): 60d, 12h, ..., or by a date, with --start.",
)
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
@probability_option
@click.option("--price", type=click.FloatRange(min=0.0), help="Of one GPU for one hour.")
@gpus_option
@click.option(
    "--progress",
    "--completed",
    "completed",
    metavar="STEPS",
    help="Completed steps of a run in progress; predicts the rest.",
)
@measured_nodes_options
@choose_options("these steps, or of the measured nodes")
@dependence_option
@click.option(
    "--resolution",
    type=click.Choice(["op", "kernel"]),
    help="What one draw covers: an op or a kernel.  [default: the job's, else op]",
)
@click.option(
    "--no-model-error",
    is_flag=True,
    help="Run times without model error (variability.model_error).",
)
@click.option(
    "--engine",
    type=click.Choice(["auto", "exact", "exchangeable"]),
    default="auto",
    show_default=True,
    help="exchangeable: of many replicas simulate the slowest and a sample.",
)
@set_option
@openmetrics_option
@common_options(PLOTS, placed=True)
def estimate(
    call: Call,
    job: str,
    completed: str | None,
    files: tuple[str, ...],
    hosts: str | None,
    where: tuple[tuple[str, str], ...],
    dependence: str | None,
    resolution: str | None,
    no_model_error: bool,
    overrides: tuple[str, ...],
    openmetrics: str | None,
    **options: Any,
) -> None:
    """Estimate how long a step and the run take, as probabilities.

    JOB is a YAML file or the name of a shipped job; `prism show --jobs` lists those.
    """
    from prism.analyses.estimate import estimate as estimate_job
    from prism.common.results import pack_texts, read_texts
    from prism.jobs.job import load_job
    from prism.jobs.jobspec.frommodel import is_step_model

    chosen = bool(where) or options["column"] is not None
    for name in ("unit", "pattern"):
        if options[name] is not None and completed is None:
            raise click.UsageError(f"--{name} is of the steps of --progress STEPS")
    if chosen and (completed is None) == (not files):
        raise click.UsageError(
            "--column and --where choose from the steps of --progress STEPS, or from "
            "--measured-nodes FILE; give one of the two"
        )
    if hosts is not None and not files:
        raise click.UsageError("--hosts names the nodes of --measured-nodes FILE")
    if openmetrics is not None:
        check_file_path(openmetrics, "--openmetrics")
    for key, value in (("dependence", dependence), ("resolution", resolution)):
        if value is not None:
            overrides = (*overrides, f"variability.{key}={value}")
    if no_model_error and not is_step_model(job):  # which has none
        overrides = (*overrides, "variability.model_error=0")
    if options["start"] is not None:
        options["start"] = options["start"].isoformat()
    from_steps = is_step_model(job)
    if from_steps and (overrides or files):
        given = overrides[0] if overrides else "--measured-nodes"
        raise PrismError(f"{job}: a model of step times has no job; leave {given} out")
    loaded = job if from_steps else load_job(job, overrides)
    notes: list[str] = []
    if files and not isinstance(loaded, str):
        loaded, notes = _with_nodes(loaded, files, hosts, options["column"], rows_of(where))
        options["column"], where = None, ()
    options |= {"completed": completed, "where": rows_of(where) or None}
    result = call.run("simulating", estimate_job, loaded, **options)
    if notes:
        notes = [*read_texts(result.dataset, "warnings"), *notes]
        rest = result.dataset.drop_dims("warnings", errors="ignore")
        result = type(result)(rest.merge(pack_texts(warnings=notes)))
    found = call.conclude(result)
    if openmetrics is not None:
        from prism.present.openmetrics import openmetrics_text

        write_text(openmetrics, openmetrics_text(found.figures), call.quiet)


def _with_nodes(
    job: Job, files: Sequence[str], hosts: str | None, column: str | None, where: dict[str, str]
) -> tuple[Job, list[str]]:
    """Return the job with its nodes as slow as files say, and what was noted while reading."""
    from prism.cluster.nodemap import slowdown_keys

    found = read_measured_nodes(job, files, read_host_names(job, hosts), column, where)
    known = {str(node): slow for node, slow in slowdown_keys(found.nodes).items()}
    return job.replace({"cluster.node_slowdowns": known}), list(found.notes)
