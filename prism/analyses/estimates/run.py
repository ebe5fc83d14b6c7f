"""The run of a job, drawn over its simulated steps."""

import datetime
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from prism.common.errors import PrismError, option
from prism.common.text import format_count, format_share
from prism.distributions.library import load_library
from prism.jobs.job import Job
from prism.jobs.jobspec.run import FAILURES_SOURCE
from prism.models.calibration.model import Calibration, communication_share, load_calibration
from prism.simulation.effects.run import UNMEASURED, model_error_entry
from prism.simulation.execution.context import RunContext
from prism.simulation.prepare import Prepared
from prism.simulation.runs.build import (
    PAUSES,
    START_UP,
    build_run_model,
    describe_failures,
    effective_share,
    marks_of,
    mean_step,
)
from prism.simulation.runs.checkpointing import FailureDistribution, best_steps, expected_time
from prism.simulation.runs.model import simulate_runs
from prism.simulation.runs.parts import RunModel, Runs
from prism.simulation.runs.ramp import step_work
from prism.simulation.tracemodel.model import TraceModel
from prism.workload.carbon import footprint
from prism.workload.energy import mean_power

if TYPE_CHECKING:
    import xarray as xr

    from prism.models.steptimes.runs import ProgressPosterior
    from prism.traces.growing import Reading

CLUSTERS_IN_PROGRESS = 1024  # draws of how fast a run in progress is, given its completed steps
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)  # of the time of progress


class DrawnRun(NamedTuple):
    """Result variables of the run, their coordinates, its attributes, clusters and notes."""

    values: dict[str, Any]
    coords: dict[str, Any]
    attrs: dict[str, Any]
    n_clusters: int
    notes: tuple[str, ...]


def draw_run(
    step: Prepared,
    dataset: "xr.Dataset",
    call: dict[str, Any],
    context: RunContext,
    reading: "Reading | None" = None,
) -> DrawnRun:
    """Draw runs over the simulated steps; their rest, given the steps that were read."""
    job = step.job
    model = build_run_model(step, dataset, context)
    steps, ideal = call["steps"], float(dataset.ideal_step_time)
    done, elapsed_s, start_s = 0, 0.0, _time_of_day(call["start"])
    work, notes = step_work(job, steps, context)
    model = replace(model, profile=work)
    figures: dict[str, Any] = {}
    if model.model_error > 0.0 and reading is None:
        about = _about_error(step, model.model_error)
        figures["model_error"] = about
        if not about.get("measured", True):
            notes = (*notes, (
                f"model error: nothing was fitted to a job of this class ({about['class']}), so "
                f"that run times may be off by {format_share(about['spread'])} (standard "
                f"deviation); calibrate it by measured steps ({option('calibrate')} of prism fit), "
                "or set variability.model_error"
            ))  # fmt: skip
    if reading is not None:
        past = _past(job, model, reading, call, communication_share(dataset))
        model, done, elapsed_s = past.model, past.done, past.elapsed_s
        notes += tuple(note for note in past.notes if note != reading.times.said)  # in `completed`
        figures |= past.figures() | reading.figures()
        start_s += elapsed_s
        if call["start"] is None:
            start_s = _time_of_day(reading.written.isoformat())
    if not done:
        elapsed_s = job.run.start_up
        start_s += elapsed_s
    marks = done + marks_of(steps - done)
    runs = simulate_runs(
        model, steps - done, call["run_replicates"], context, start_s=start_s,
        marks=(marks - done).astype(int).tolist(),
    )  # fmt: skip
    left = {"time_left": runs.total} if done else {}
    if elapsed_s:
        before = {"completed_steps" if done else START_UP: np.full_like(runs.total, elapsed_s)}
        runs = replace(
            runs, total=runs.total + elapsed_s, marks=runs.marks + elapsed_s,
            terms=before | runs.terms,
        )  # fmt: skip
    whole_steps = steps if work is None else float(work.sum())
    values: dict[str, Any] = {
        "time_to_train": runs.total,
        "run_cluster_idx": runs.cluster,
        "ideal_time_to_train": whole_steps * ideal,
        "run_term_time": np.column_stack(list(runs.terms.values())),
        "progress_time": np.quantile(runs.marks, QUANTILES, axis=0),
    } | left
    if call["deadline"] is not None:
        values["deadline"] = call["deadline"]
    if call["price"] is not None:
        values["cost"] = runs.total / 3600.0 * job.world_size * call["price"]
    power = mean_power(job, step.workload, float(runs.total.mean()) / whole_steps)
    if power is not None:
        values["gpu_power"] = power
        values["gpu_energy"] = power * job.world_size * runs.total
        beside = footprint(job)
        values["host_energy"] = beside.beside_w * runs.total
        if beside.g_per_kwh is not None:
            machines = values["gpu_energy"] + values["host_energy"]
            values["carbon"] = beside.operational_kg(machines)
            values["carbon_embodied"] = beside.embodied_kg_per_s * runs.total
            figures["grid"] = {"g_per_kwh": beside.g_per_kwh, "pue": beside.pue}
    elif job.run.grid_intensity is not None or job.run.region is not None:
        notes = (*notes, (
            "carbon: what the GPUs draw is not known of model.durations; cluster.power_limit_w "
            "says it"
        ))  # fmt: skip
    values |= _interruptions(job, model, runs, steps - done)
    values |= figures | {
        "failure_model": describe_failures(model, _failure_source(job), _assumed(job))
    }
    coords = {
        "term": list(runs.terms),
        "quantile": list(QUANTILES),
        "progress": marks / steps,
    }
    return DrawnRun(values, coords, {"steps": steps}, model.mean.shape[0], notes)


def _about_error(step: Prepared, error: float) -> dict[str, Any]:
    """Say how large the model's error is, for which class of jobs, and where that comes from."""
    job = step.job
    if job.variability.model_error is not None:
        return {"spread": error, "class": "", "source": "variability.model_error"}
    if isinstance(step.source, TraceModel):
        n = format_count(step.source.report["step_time"]["n"], "measured step")
        return {"spread": error, "class": "", "source": f"the mean of {n} of the trace"}
    library = load_library(job.variability.library or "")
    entry = f"run/{model_error_entry(job, library)}"
    source, gpus = library.source(entry), entry.replace("model_error", "largest_gpus")
    if gpus in library and job.world_size > library.value(gpus):
        source += f"; more beyond {format_count(library.value(gpus), 'GPU')}, the largest published"
    p, experts = job.parallelism, ", experts" * bool(job.model.n_experts)
    name = f"{job.cluster.device.upper()}, {p.framework}, {p.data_parallel}{experts}"
    measured = not entry.endswith(UNMEASURED)
    return {"spread": error, "class": name, "measured": measured, "source": source}


def _failure_source(job: Job) -> str:
    """Say where the rate of failures is from, or why there are none."""
    given = job.run.failures
    if given is not None and (given == "none" or given.per_1000_node_days is not None):
        return "run.failures"
    return "model.durations" if job.failures is None else FAILURES_SOURCE


def _assumed(job: Job) -> list[str]:
    """Name what a job leaves open of its failures and checkpoints."""
    r, out = job.run, []
    if r.failures is None or (r.failures != "none" and r.failures.per_1000_node_days is None):
        out.append("rate")
    if r.failures is None:
        out.append("down")
    if r.checkpoint is None:
        out.append("checkpoint")
    elif r.checkpoint.write_s is None:
        out.append("write")
    return out


def _past(
    job: Job, model: RunModel, reading: "Reading", call: dict[str, Any], share: float
) -> "ProgressPosterior":
    """Return the rest of a run in progress, given its completed steps."""
    from prism.models.steptimes.runs import NOMINAL_ERROR, update_on_progress

    found, draws = calibration_of(job), max(CLUSTERS_IN_PROGRESS, model.mean.shape[0])
    nominal = model.model_error or NOMINAL_ERROR
    nominal = nominal if found is None else found.mean_error(share)
    past = update_on_progress(model, reading.times, draws, call["seed"], nominal)
    if past.done >= call["steps"]:
        raise PrismError(
            f"{reading.times.source}: {format_count(past.done, 'step')} done, and the run has "
            f"{call['steps']}; "
            f"nothing is left to estimate, or {option('steps')} (run.steps) is too small"
        )
    return past


def calibration_of(job: Job) -> Calibration | None:
    """Return what the job's library was calibrated on; None for another library."""
    library = job.variability.library
    return load_calibration(library) if library is not None else None


def _interruptions(job: Job, model: RunModel, runs: Runs, n_steps: int) -> dict[str, Any]:
    """Return the effective share of the time and the best interval of checkpoints.

    What an interval costs is that of the `n_steps` still to come; no interval is best where nobody
    says what a checkpoint costs.
    """
    out: dict[str, Any] = {}
    c, fail = model.checkpoints, model.interruptions
    if (c, fail, model.evaluations) == (None, None, None):
        return out
    out |= {"ettr": effective_share(runs.terms, runs.total), "run_failures": runs.failures}
    if c is None:
        return out
    step_s = mean_step(model)
    out["checkpoint"] = {
        "interval": c.interval_steps * step_s,
        "interval_steps": c.interval_steps,
        "write": c.write_s,
    }
    stated = job.run.checkpoint is not None and job.run.checkpoint.write_s is not None
    if fail is None or fail.rate_per_s == 0.0 or not stated:
        return out
    waits = float(runs.terms["spares"].sum()) / max(1, int(runs.failures.sum()))
    distribution = FailureDistribution(fail.rate_per_s, fail.mean_down_s + waits)
    # an interval beyond the end of the run is no checkpoint at all
    best = min(best_steps(step_s, c.write_s, distribution), n_steps)
    ahead = [runs.terms[name] for name in runs.terms if name not in (*PAUSES, "completed_steps")]
    work = float(np.sum([*ahead, runs.terms["stalls"]], axis=0).mean())
    times = [
        expected_time(work, n * step_s, c.write_s, distribution, c.blocking)
        for n in (min(c.interval_steps, n_steps), best)
    ]
    out["checkpoint"] |= {
        "best_interval": best * step_s,
        "best_interval_steps": best,
        "costs_more": times[0] - times[1],
    }
    return out


def _time_of_day(start: str | None) -> float:
    """Seconds from midnight to the start; 0 where no start is given."""
    if start is None:
        return 0.0
    at = datetime.datetime.fromisoformat(start)
    return at.hour * 3600.0 + at.minute * 60.0 + at.second
