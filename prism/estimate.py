"""`prism estimate`: step time and time-to-train of a job, with probabilities."""

import datetime
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.errors import PrismError
from prism.job import Job, load_job
from prism.jobvalues import parse_duration
from prism.results import job_of, make_dataset, provenance
from prism.simulate import Progress, fresh_seed, prepare_variability, simulate
from prism.time_to_train import simulate_runs, step_statistics

if TYPE_CHECKING:
    import xarray as xr

MAX_STEPS = 10**15
MAX_RUNS = 10**8  # a run is two numbers of 8 bytes
TAIL_SAMPLES = 10  # samples beyond a quantile below which it is only a guess


def estimate(
    job: Job | str | Path,
    *,
    replicates: int = 10_000,
    run_replicates: int = 1_000,
    steps: int | None = None,
    deadline: float | str | None = None,
    slowdown_thresholds: Sequence[float] | None = None,
    start: str | datetime.datetime | None = None,
    probability: float | None = None,
    price: float | None = None,
    seed: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> "xr.Dataset":
    """Estimate how long a step and the whole run take, with what probability.

    Parameters
    ----------
    job : Job, str or path
        A job, its file, or the name of a shipped one.
    replicates, run_replicates : int
        Monte Carlo repetitions of a step and of the run.
    steps, deadline, slowdown_thresholds, start, probability, price
        Override the job's `run` block: steps of the run [1], time it may take ("60d" or [s]),
        thresholds over the ideal step time [1], start date, probability of the finish date [1],
        price of a GPU-hour.
    seed, threads, progress
        As in `simulate`.

    Returns
    -------
    xarray.Dataset
        See `prism.results.VARIABLES`; `prism.summary` gives the figures the command prints.

    Raises
    ------
    PrismError
        Bad input.
    """
    begin = time.perf_counter()
    job = job if isinstance(job, Job) else load_job(job)
    run = job.run
    start = run.start if start is None else start
    call: dict[str, Any] = {
        "replicates": replicates,
        "run_replicates": run_replicates,
        "steps": job.n_steps if steps is None else steps,
        "deadline": run.deadline if deadline is None else parse_deadline(deadline),
        "slowdown_thresholds": list(
            run.slowdown_thresholds if slowdown_thresholds is None else slowdown_thresholds
        ),
        "start": start.isoformat() if isinstance(start, datetime.datetime) else start,
        "probability": run.probability if probability is None else probability,
        "price": run.price_per_gpu_hour if price is None else price,
        "seed": fresh_seed() if seed is None else seed,
    }
    _check(call)
    dataset = simulate(job, replicates, call["seed"], threads, progress)
    values, n_clusters = _run(job, dataset, call)
    extra = make_dataset(values, {"threshold": call["slowdown_thresholds"]}, {})
    attrs = dataset.attrs | provenance(job, call)
    attrs["steps"] = call["steps"]
    attrs["warnings"] = json.dumps(_warnings(job, call, n_clusters))
    attrs["wall_seconds"] = time.perf_counter() - begin
    return dataset.merge(extra).assign_attrs(attrs)


def _run(job: Job, dataset: "xr.Dataset", call: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return result variables of the run, and how many clusters it draws on."""
    variability = prepare_variability(job)
    statistics = step_statistics(
        np.asarray(dataset.step_time),
        np.asarray(dataset.step_effect),
        np.asarray(dataset.cluster_idx),
        _drift_cv(variability),
        variability.correlation_time_s,
    )
    steps, ideal = call["steps"], float(dataset.ideal_step_time)
    runs, cluster = simulate_runs(statistics, steps, call["run_replicates"], call["seed"])
    values: dict[str, Any] = {
        "time_to_train": runs,
        "run_cluster_idx": cluster,
        "ideal_time_to_train": steps * ideal,
        "slowdown_probability": [
            float((dataset.step_time > t * ideal).mean()) for t in call["slowdown_thresholds"]
        ],
    }
    if call["deadline"] is not None:
        values["deadline"] = call["deadline"]
    if call["price"] is not None:
        values["cost"] = runs / 3600.0 * job.world_size * call["price"]
    return values, statistics.mean.size


def reproduce(dataset: "xr.Dataset", threads: int | None = None) -> "xr.Dataset":
    """Run the call that made a result again, from its own attributes."""
    call = json.loads(dataset.attrs["call"])
    return estimate(job_of(dataset), threads=threads, **call)


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
        raise PrismError(f"--deadline {value}: {error}") from error


def _drift_cv(variability: Any) -> float:
    return float(variability.step.std) if variability.dependence == "full" else 0.0


def _check(call: dict[str, Any]) -> None:
    problems = []
    if not 1 <= call["run_replicates"] <= MAX_RUNS:
        problems.append(
            f"--run-replicates {call['run_replicates']}: expected between 1 and {MAX_RUNS:.0e}"
        )
    if call["steps"] < 1:
        problems.append(f"--steps {call['steps']}: expected at least 1")
    probability, price = call["probability"], call["price"]
    if call["steps"] > MAX_STEPS:
        problems.append(f"--steps {call['steps']}: expected at most {MAX_STEPS:.0e}")
    if not 0.0 < probability < 1.0:
        problems.append(f"--probability {probability:g}: expected between 0 and 1, such as 0.9")
    for t in call["slowdown_thresholds"]:
        if not t >= 1.0:
            problems.append(f"--slowdown-thresholds {t:g}: expected 1 or more, times the ideal")
    if price is not None and not 0.0 <= price < 1e12:
        problems.append(f"--price {price:g}: expected 0 or more, and finite, per GPU-hour")
    if problems:
        raise PrismError("\n".join(problems))


def _warnings(job: Job, call: dict[str, Any], n_clusters: int) -> list[str]:
    """Say which quantiles rest on too few samples, and how many they would need."""
    out = []
    replicates, run_replicates = call["replicates"], call["run_replicates"]
    regime = prepare_variability(job).regime
    if regime.probability > 0.0 and regime.factor > 1.0:
        out.append("congestion: drawn anew for every step, so runs vary less than they would")
        if job.parallelism.cp > 1:
            out.append("congestion: not applied to context-parallel collectives inside ops")
    need = round(TAIL_SAMPLES / 0.01)
    if replicates < need:
        out.append(f"step time p99 rests on {replicates} replicates; --replicates {need} or more")
    if run_replicates < need:
        out.append(f"time-to-train p99 rests on {run_replicates} runs; --run-replicates {need}")
    need95, need99 = (round(TAIL_SAMPLES / tail) for tail in (0.05, 0.01))
    if n_clusters < need95:
        out.append(
            f"time-to-train p95 rests on {n_clusters} cluster draws, {need95} would be enough "
            f"(p99: {need99}): --replicates {64 * need95} ({64 * need99})"
        )
    elif n_clusters < need99:
        out.append(
            f"time-to-train p99 rests on {n_clusters} cluster draws, {need99} would be enough: "
            f"--replicates {64 * need99}"
        )
    return out
