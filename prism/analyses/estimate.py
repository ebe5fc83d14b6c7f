"""`prism estimate`: step time and time-to-train of a job, with probabilities."""

import datetime
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from prism.common import sizes
from prism.common.errors import PrismError, named
from prism.distributions.library import load_library
from prism.engine import LANES
from prism.jobs.job import Job, load_job
from prism.jobs.jobspec.frommodel import is_step_model
from prism.jobs.jobspec.values import parse_date, parse_duration
from prism.models.calibration.model import Calibration, communication_share, load_calibration
from prism.simulation.jobwarnings import job_doubts, replica_doubts
from prism.simulation.prepare import Prepared, prepare
from prism.simulation.results import TAIL_SAMPLES, job_of, make_dataset, provenance
from prism.simulation.runs.build import build_run_model, marks_of, mean_step
from prism.simulation.runs.checkpointing import FailureLaw, best_steps, expected_time
from prism.simulation.runs.model import simulate_runs
from prism.simulation.runs.parts import RunModel, Runs
from prism.simulation.runs.ramp import step_work
from prism.simulation.steps import (
    REPLICATES,
    Progress,
    check_whole,
    fresh_seed,
    settle_call,
    simulate_step,
)
from prism.simulation.summary import summarize_simulation
from prism.simulation.variability import model_error_kind

if TYPE_CHECKING:
    import xarray as xr

    from prism.models.steptimes.runs import UnderWay

MAX_STEPS = 10**15
CLUSTERS_UNDER_WAY = 1024  # draws of how fast a run under way is, given its steps so far
RUN_REPLICATES = 1_000
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)  # of the time of progress
# Terms of a run in which nothing is learnt for good.
PAUSES = ("stalls", "evaluations", "checkpoints", "lost_work", "restarts", "spares")


def estimate(
    job: Job | str | Path,
    *,
    replicates: int = REPLICATES,
    run_replicates: int | None = None,
    steps: int | None = None,
    deadline: float | str | None = None,
    slowdown_thresholds: Sequence[float] | None = None,
    start: str | datetime.datetime | None = None,
    probability: float | None = None,
    price: float | None = None,
    under_way: str | Path | None = None,
    column: str | None = None,
    where: Mapping[str, str] | None = None,
    seed: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    engine: str = "auto",
) -> "xr.Dataset":
    """Estimate how long a step and the whole run take, with what probability.

    Parameters
    ----------
    job : Job, str or path
        A job, its file, the name of a shipped one, or a fitted model.
    replicates, run_replicates : int
        Monte Carlo repetitions of a step and of the run, of which there are 1,000 unless told.
    steps, deadline, slowdown_thresholds, start, probability, price
        Override the job's `run` block: steps of the run [1], time it may take ("60d" or [s]),
        thresholds over the ideal step time [1], start date, probability of the finish date [1],
        price of a GPU-hour. Without these, and with a job that says nothing of its run, none is
        drawn.
    under_way : path, optional
        Step times so far of a run under way, which the rest is conditioned on.
    column, where
        Which of its columns is the duration, and which rows to keep.
    seed, threads, progress, engine
        As in `simulate`.

    Returns
    -------
    xarray.Dataset
        See `prism.simulation.results.VARIABLES`; `prism.summary` gives the figures the command
        prints.

    Raises
    ------
    PrismError
        Bad input.
    """
    begin = time.perf_counter()
    if not isinstance(job, Job) and is_step_model(job):
        return _from_step_times(
            job, replicates=replicates, run_replicates=run_replicates, steps=steps,
            deadline=deadline, slowdown_thresholds=slowdown_thresholds, start=start,
            probability=probability, price=price, under_way=under_way, column=column, where=where,
            seed=seed,
        )  # fmt: skip
    job = job if isinstance(job, Job) else load_job(job)
    run = job.run
    asked = (run_replicates, steps, deadline, start, price, under_way)
    has_run = job.has_run or any(value is not None for value in asked)
    start = run.start if start is None else start
    call: dict[str, Any] = {
        "replicates": replicates,
        "run_replicates": None,
        "steps": None,
        "deadline": run.deadline if deadline is None else parse_deadline(deadline),
        "slowdown_thresholds": list(
            run.slowdown_thresholds if slowdown_thresholds is None else slowdown_thresholds
        ),
        "start": start.isoformat() if isinstance(start, datetime.datetime) else start,
        "probability": run.probability if probability is None else probability,
        "price": run.price_per_gpu_hour if price is None else price,
        "seed": fresh_seed() if seed is None else seed,
        "engine": engine,
    }
    if has_run:
        call["run_replicates"] = RUN_REPLICATES if run_replicates is None else run_replicates
        call["steps"] = job.n_steps if steps is None else steps
    if under_way is not None:
        call |= {"under_way": str(under_way), "column": column, "where": dict(where or {})}
    _check(call)
    _, threads = settle_call(replicates, call["seed"], threads)
    step = prepare(job, call["seed"], engine=engine)
    dataset = simulate_step(step, replicates, call["seed"], threads, progress)
    drawn = _run(step, dataset, call, threads, progress) if has_run else _Run({}, {}, {}, 0, ())
    attrs = dataset.attrs | provenance(job, call) | drawn.attrs
    attrs |= {"kind": "estimate"}
    replicas = json.loads(dataset.attrs["replicas"])
    warnings = [
        *job_doubts(job), *drawn.notes, *_warnings(step, call, drawn.n_clusters),
        *replica_doubts(replicas),
    ]  # fmt: skip
    calibrated = _calibration(job)
    if calibrated is not None:
        attrs["data_error"] = json.dumps(calibrated.error(communication_share(dataset)))
        warnings += [f"calibration: {text}" for text in calibrated.report["warnings"]]
    attrs["warnings"] = json.dumps(warnings)
    attrs["wall_seconds"] = time.perf_counter() - begin
    thresholds = call["slowdown_thresholds"]
    slower = [float((dataset.step_time > t * dataset.ideal_step_time).mean()) for t in thresholds]
    values = drawn.values | {"slowdown_probability": slower}
    coords = drawn.coords | {"threshold": thresholds}
    return dataset.merge(make_dataset(values, coords, {})).assign_attrs(attrs)


def _calibration(job: Job) -> Calibration | None:
    """Return what the job's library was calibrated on; None for another library."""
    library = job.variability.library
    return load_calibration(library) if library is not None else None


class _Run(NamedTuple):
    """Result variables of the run, their coordinates, its attributes, clusters and notes."""

    values: dict[str, Any]
    coords: dict[str, Any]
    attrs: dict[str, Any]
    n_clusters: int
    notes: tuple[str, ...]


def _run(
    step: Prepared,
    dataset: "xr.Dataset",
    call: dict[str, Any],
    threads: int,
    progress: Progress | None,
) -> _Run:
    """Draw runs over the simulated steps."""
    job = step.job
    model = build_run_model(step, dataset, call["seed"], threads)
    steps, ideal = call["steps"], float(dataset.ideal_step_time)
    done, elapsed_s = 0, 0.0
    work, notes = step_work(job, steps, call["seed"], threads)
    model = replace(model, profile=work)
    attrs: dict[str, Any] = {"steps": steps}
    if model.model_error > 0.0 and "under_way" not in call:
        attrs["model_error"] = json.dumps(_about_error(job, model.model_error))
    if "under_way" in call:
        past = _past(job, model, call, communication_share(dataset))
        model, done, elapsed_s, notes = past.model, past.done, past.elapsed_s, notes + past.notes
        attrs["so_far"] = json.dumps({
            "steps": done, "seconds": elapsed_s, "level": past.level, "level_std": past.level_std,
        })  # fmt: skip
    marks = done + marks_of(steps - done)
    runs = simulate_runs(
        model, steps - done, call["run_replicates"], call["seed"],
        start_s=_time_of_day(call["start"]) + elapsed_s, progress=progress,
        marks=(marks - done).astype(int).tolist(),
    )  # fmt: skip
    if done:
        so_far = {"steps_so_far": np.full_like(runs.total, elapsed_s)}
        runs = replace(
            runs, total=runs.total + elapsed_s, marks=runs.marks + elapsed_s,
            terms=so_far | runs.terms,
        )  # fmt: skip
    values: dict[str, Any] = {
        "time_to_train": runs.total,
        "run_cluster_idx": runs.cluster,
        "ideal_time_to_train": (steps if work is None else work.sum()) * ideal * step.period_ratio,
        "run_term_time": np.column_stack(list(runs.terms.values())),
        "progress_time": np.quantile(runs.marks, QUANTILES, axis=0),
    }
    if call["deadline"] is not None:
        values["deadline"] = call["deadline"]
    if call["price"] is not None:
        values["cost"] = runs.total / 3600.0 * job.world_size * call["price"]
    values |= _interruptions(model, runs, steps - done)
    coords = {
        "term": list(runs.terms),
        "quantile": list(QUANTILES),
        "progress": marks / steps,
    }
    return _Run(values, coords, attrs, model.mean.shape[0], notes)


def _about_error(job: Job, error: float) -> dict[str, Any]:
    """Say how large the model's error is, for which class of jobs, and where that comes from."""
    if job.variability.model_error is not None:
        return {"spread": error, "class": "", "source": "variability.model_error"}
    library, kind = load_library(job.variability.library or ""), model_error_kind(job)
    name = library.device + (", weights gathered layer by layer" if kind else "")
    source, gpus = library.source(f"run/model_error{kind}"), f"run/largest_gpus{kind}"
    if gpus in library and job.world_size > library.value(gpus):
        source += f"; more beyond {library.value(gpus):,.0f} GPUs, the largest published"
    return {"spread": error, "class": name, "source": source}


def _past(job: Job, model: RunModel, call: dict[str, Any], share: float) -> "UnderWay":
    """Return the rest of a run under way, given its steps so far."""
    from prism.models.steptimes.runs import NOMINAL_ERROR, condition
    from prism.traces import read_step_times

    times = read_step_times(call["under_way"], column=call["column"], where=call["where"] or None)
    found, draws = _calibration(job), max(CLUSTERS_UNDER_WAY, model.mean.shape[0])
    nominal = model.model_error or NOMINAL_ERROR
    nominal = nominal if found is None else found.mean_error(share)
    past = condition(model, times, draws, call["seed"], nominal)
    if past.done >= call["steps"]:
        raise PrismError(
            f"{call['under_way']}: {past.done} steps are done, and the run has {call['steps']}; "
            f"nothing is left to estimate, or {named('steps')} (run.steps) is too small"
        )
    return past


def _from_step_times(
    path: str | Path, *, price: float | None, seed: int | None, **options: Any
) -> "xr.Dataset":
    """Estimate from a model of step times, which knows neither GPUs nor their price."""
    if price is not None:
        raise PrismError(
            f"{path}: a model of step times knows no GPUs, so no cost; drop {named('price')}"
        )
    start, deadline = options["start"], options["deadline"]
    options["start"] = start.isoformat() if isinstance(start, datetime.datetime) else start
    options["deadline"] = None if deadline is None else parse_deadline(deadline)
    for name in ("slowdown_thresholds", "probability"):
        if options[name] is None:
            del options[name]
    if options["run_replicates"] is None:
        options["run_replicates"] = RUN_REPLICATES
    usual = {"steps": 1, "price": None, "probability": 0.9, "slowdown_thresholds": ()}
    _check(usual | {key: value for key, value in options.items() if value is not None})
    from prism.models.steptimes.estimate import estimate_steps

    return estimate_steps(path, seed=fresh_seed() if seed is None else seed, **options)


def summarize_estimate(dataset: "xr.Dataset") -> dict[str, Any]:
    """Return the figures of an estimate, of a job or of a model of step times."""
    if dataset.attrs.get("kind") == "steps_estimate":
        from prism.models.steptimes.estimate import summarize_steps

        return summarize_steps(dataset)
    return summarize_simulation(dataset)


def _interruptions(model: RunModel, runs: Runs, n_steps: int) -> dict[str, Any]:
    """Return the effective share of the time and the best interval of checkpoints.

    What an interval costs is that of the `n_steps` still to come.
    """
    out: dict[str, Any] = {}
    c, fail = model.checkpoints, model.interruptions
    if (c, fail, model.evaluations) == (None, None, None):
        return out
    counts = [runs.terms[name] for name in runs.terms if name not in PAUSES]
    out |= {"ettr": np.sum(counts, axis=0) / runs.total, "run_failures": runs.failures}
    if c is None:
        return out
    step_s = mean_step(model)
    out |= {
        "checkpoint_interval": c.interval_steps * step_s,
        "checkpoint_steps": c.interval_steps,
        "checkpoint_write_time": c.write_s,
    }
    if fail is None or fail.rate_per_s == 0.0:
        return out
    waits = float(runs.terms["spares"].sum()) / max(1, int(runs.failures.sum()))
    law = FailureLaw(fail.rate_per_s, fail.mean_down_s + waits)
    # an interval beyond the end of the run is no checkpoint at all
    best = min(best_steps(step_s, c.write_s, law, c.blocking), n_steps)
    ahead = [runs.terms[name] for name in runs.terms if name not in (*PAUSES, "steps_so_far")]
    work = float(np.sum([*ahead, runs.terms["stalls"]], axis=0).mean())
    times = [
        expected_time(work, n * step_s, c.write_s, law, c.blocking)
        for n in (min(c.interval_steps, n_steps), best)
    ]
    return out | {
        "best_checkpoint_interval": best * step_s,
        "best_checkpoint_steps": best,
        "checkpoint_excess": times[0] - times[1],
    }


def _time_of_day(start: str | None) -> float:
    """Seconds from midnight to the start; 0 where no start is given."""
    if start is None:
        return 0.0
    at = datetime.datetime.fromisoformat(start)
    return at.hour * 3600.0 + at.minute * 60.0 + at.second


def reproduce(dataset: "xr.Dataset", threads: int | None = None) -> "xr.Dataset":
    """Run the call that made a result again, from its own attributes."""
    call = json.loads(dataset.attrs["call"])
    again = estimate(job_of(dataset), threads=threads, **call)
    # a job that is rebuilt has no file that its values came from
    return again.assign_attrs({k: v for k, v in dataset.attrs.items() if k == "job_sources"})


def parse_deadline(value: float | str) -> float:
    """Read a length of time [s]: "60d", "12h", or seconds.

    Raises
    ------
    PrismError
        With what is understood.
    """
    try:
        return parse_duration(value)
    except ValueError as error:
        raise PrismError(f"{named('deadline')} {value}: {error}") from error


def _check(call: dict[str, Any]) -> None:
    """Refuse arguments out of range, all at once."""
    problems = []

    def check(name: str, value: Any, expected: str, low: float, high: float = np.inf) -> None:
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not number or not low <= value <= high:
            problems.append(f"{named(name)} {value!r}: expected {expected}")

    for name in ("replicates", "run_replicates", "steps"):
        try:
            if call[name] is not None:
                check_whole(name, call[name], 1, MAX_STEPS)
        except PrismError as error:
            problems.append(str(error))
    tiny = float(np.finfo(float).tiny)
    check("probability", call["probability"], "between 0 and 1, such as 0.9", tiny, 1.0 - 1e-16)
    for t in call["slowdown_thresholds"]:
        check("slowdown_thresholds", t, "1 or more, times the ideal", 1.0)
    if call["price"] is not None:
        check("price", call["price"], "0 or more, and finite, per GPU-hour", 0.0, 1e12)
    if call.get("start") is not None:
        try:
            parse_date(call["start"])
        except ValueError as error:
            problems.append(f"{named('start')}: {error}")
    if problems:
        raise PrismError("\n".join(problems))
    runs = {"runs": (call["run_replicates"] or 0, sizes.RUN)}
    sizes.check_size(named("run_replicates"), runs, named("run_replicates"))


def _warnings(step: Prepared, call: dict[str, Any], n_clusters: int) -> list[str]:
    """Say which quantiles rest on too few samples, and how many they would need."""
    out = []
    replicates, run_replicates = call["replicates"], call["run_replicates"]
    job, effects = step.job, step.effects
    ratio = 1.0 if run_replicates is None else step.period_ratio
    if round(ratio, 2) != 1.0:
        out.append(
            f"runs: measured steps follow each other in {ratio:.2f} of a step's own time, host "
            "begin to last GPU end, as steps overlap or leave pauses; time-to-train counts that"
        )
    regime = effects.regime
    if regime.probability > 0.0 and regime.factor > 1.0:
        if regime.duration_s <= 0.0 and effects.dependence == "full":
            out.append(
                "congestion: drawn anew for every step, so runs vary less than they would; set "
                "variability.effects.regime.duration_s"
            )
        if job.parallelism.cp > 1:
            out.append("congestion: not applied to context-parallel collectives inside ops")
    need = round(TAIL_SAMPLES / 0.01)
    if replicates < need:
        out.append(
            f"step time p99 rests on {replicates} replicates; {named('replicates')} {need} or more"
        )
    if run_replicates is None:
        return out
    if run_replicates < need:
        out.append(
            f"time-to-train p99 rests on {run_replicates} runs; {named('run_replicates')} {need}"
        )
    # p99 is printed with enough draws alone; a finish date may ask for more than p95
    asked = max(0.95, call["probability"]) if call["start"] else 0.95
    need = math.ceil(TAIL_SAMPLES / (1.0 - asked) - 1e-9)
    if n_clusters < need:
        out.append(
            f"time-to-train p{100.0 * asked:g} rests on {n_clusters} cluster "
            f"draw{'s' if n_clusters != 1 else ''}, {need} would be enough: "
            f"{named('replicates')} {LANES * need}"
        )
    return out
