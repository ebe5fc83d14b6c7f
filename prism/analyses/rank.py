"""`prism rank`: which kernels and effects make the time vary, and what fixing each would bring.

Shares of the critical path, of its covariance with the step time and of the tail come from one run,
first and total order of independent inputs from pick-freeze, and interventions are run under common
random numbers.
"""

import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.analyses.rankings.interventions import COMPARED_BLOCKS, compare_interventions
from prism.analyses.rankings.shares import (
    Sampler,
    list_inputs,
    sample_shares,
    tracked_variances,
)
from prism.analyses.rankings.target import TARGETS, Case, Target, Weights
from prism.common.attribution import (
    COMPARED,
    TAIL,
    Array,
    Estimate,
    path_shares,
    spread_clusters,
)
from prism.common.errors import PrismError, named
from prism.jobs.job import Job, load_job
from prism.simulation.causes import class_cvs, effect_cv, measure_residuals, time_shares
from prism.simulation.classops import split_classes
from prism.simulation.prepare import prepare
from prism.simulation.results import make_dataset, provenance
from prism.simulation.steps import Progress, run_blocks, settle_call, warm_up

if TYPE_CHECKING:
    import xarray as xr

PATH_BLOCKS = 16  # clusters of the run whose critical path is followed


def rank(
    job: Job | str,
    target: str = "step_time",
    *,
    speed_up: float | None = None,
    seed: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> "xr.Dataset":
    """Rank kernel classes and effects by what they contribute to variance and tail.

    Parameters
    ----------
    job : Job or str
        A job, its file, the name of a shipped one, or a job over a fitted trace.
    target : str
        ``step_time``, or ``time_to_train`` of the job's number of steps.
    speed_up : float, optional
        Each kernel class is also made faster by this share of its time, above 0 and below 1 [1].
    seed, threads, progress
        As in `simulate`.

    Returns
    -------
    xarray.Dataset
        By ``input``, kernel classes first, and ``intervention``: ``freeze`` (at the median;
        congestion, which is on or off, at its mean) and ``speed``; `prism.summary` gives sorted
        lists.

    Raises
    ------
    PrismError
        The job cannot be built, or a number or name is out of range.

    Examples
    --------
    >>> import prism
    >>> ranking = prism.rank("pipeline-8x32", seed=1)
    >>> row = prism.summary(ranking)["kernels"][0]
    >>> row["name"], round(row["total_order"], 1)
    ('compute', 1.0)
    """
    begin = time.perf_counter()
    job = job if isinstance(job, Job) else load_job(job)
    seed, threads = settle_call(1, seed, threads)
    if target not in TARGETS:
        raise PrismError(f"target {target}: expected {' or '.join(TARGETS)}")
    if speed_up is not None and not 0.0 < speed_up < 1.0:
        raise PrismError(
            f"{named('speed_up')} {speed_up:g}: expected a share of the time, above 0 and below 1"
        )
    case = _prepare(job, target, seed, threads, progress)
    values = _one_run(case)
    asked = ("freeze",) if speed_up is None else ("freeze", "speed")
    coords: dict[str, Any] = {
        "input": [entry.name for entry in case.inputs],
        "input_kind": ("input", [entry.kind for entry in case.inputs]),
        "bound": ["low", "high"], "intervention": list(asked),
    }  # fmt: skip
    case.sampler.planned = len(asked) * sum(COMPARED_BLOCKS[e.kind] for e in case.inputs)
    values |= _orders(case)
    values |= compare_interventions(case, asked, values, speed_up or 0.0)
    call = {"target": target, "speed_up": speed_up, "seed": seed}
    attrs = provenance(job, call)
    attrs |= {"kind": "ranking", "wall_seconds": time.perf_counter() - begin}
    return make_dataset(values, coords, attrs)


def _prepare(job: Job, target: str, seed: int, threads: int, progress: Progress | None) -> Case:
    """Build what the parts of a ranking share."""
    if job.variability.dependence == "none":
        raise PrismError(
            f"{job.source}: variability.dependence: none leaves no effects to rank; set full"
        )
    step = prepare(job, seed)
    v = step.effects
    warm_up(step.program, seed)
    residuals = measure_residuals(step, seed)
    ranked = Target(target, job.n_steps, v.step.std, v.correlation_time_s, seed, step.period_ratio)
    ops = split_classes(step)
    sampler = Sampler(ops.program, step.program, seed, threads, progress)
    return Case(step, residuals, list_inputs(step, residuals, ops), sampler, ranked)


def _one_run(case: Case) -> dict[str, Any]:
    """Figures that a single run with its critical path gives."""
    program, sampler = case.step.program, case.sampler
    n_classes = len(program.classes)
    effects = case.inputs[n_classes:]
    tracked = tracked_variances(program, case.residuals)
    drawn = run_blocks(tracked, range(PATH_BLOCKS), sampler.seed, sampler.threads, track=True)
    steps, effect, path = (x.astype(np.float64) for x in drawn[:3])
    bound = path[:, n_classes:].mean(axis=(0, 2))
    sampler.first, sampler.bounds, sampler.whole = (steps, effect), bound, float(steps.var())
    shares = path_shares(path[:, :n_classes], sampler.seed)

    def with_effects(x: Array) -> Array:  # which have no time of their own
        return np.concatenate([x, np.full((len(effects), *x.shape[1:]), np.nan)])

    cvs = [effect_cv(program, entry.name) for entry in effects]
    return {
        "time_share": with_effects(time_shares(program)),
        "input_cv": np.append(class_cvs(program, case.residuals), cvs),
        "critical_path_share": with_effects(shares.mean),
        "covariance_share": with_effects(shares.covariance),
        "covariance_share_ci": with_effects(shares.covariance_ci),
        "tail_share": with_effects(shares.tail),
        "tail_share_ci": with_effects(shares.tail_ci),
        **_describe(case.target.times(steps, effect)),
    }


def _describe(times: Array) -> dict[str, Any]:
    return {"target_mean": times.mean(), "target_p95": np.quantile(times, TAIL)}


def _orders(case: Case) -> dict[str, Any]:
    """First and total order of every input, of the step or of the run."""
    shares = sample_shares(case.sampler, case.inputs)
    variance, mean = case.sampler.variance, float(case.sampler.a.mean())
    first, total = np.array([s.variances for s in shares]).T
    weights = case.target.weigh([s.entry.name for s in shares], first, variance, mean)
    first_share, total_share = weights.shares(first, total)
    return {
        "first_order": first_share, "total_order": total_share,
        "first_order_ci": _bounds(first_share, [s.first for s in shares]),
        "total_order_ci": _bounds(total_share, [s.total for s in shares]),
        "n_clusters": [len(s.ab) for s in shares], **_whole(case, weights),
    }  # fmt: skip


def _whole(case: Case, weights: Weights) -> dict[str, Any]:
    """Figures of the target from all clusters that the shares rest on, as far as they tell them."""
    sampler, parts = case.sampler, weights.variance
    values = {
        "target_std": parts.total**0.5, "within_cluster_std": parts.within**0.5,
        "between_cluster_std": parts.between**0.5,
    }  # fmt: skip
    if sampler.rare is None:
        runs, effects = list(sampler.runs), np.concatenate(sampler.effects)
        if sampler.control is not None and sampler.control.variance > 0.0:
            quiet = sampler.control.times
            runs = [spread_clusters(run, own) for run, own in zip(runs, quiet, strict=True)]
        steps = np.concatenate(runs)
        effects = np.tile(effects, steps.shape[1] // effects.shape[1])
        return values | _describe(case.target.times(steps, effects))
    if case.target.name == "step_time":  # the runs lack stalls, but for what these add to the mean
        mean = np.mean([run.mean() for run in sampler.runs])
        values["target_mean"] = float(mean) + sampler.rare.mean
    return values


def _bounds(values: Array, estimates: list[Estimate]) -> Array:
    """Intervals of shares, as wide in relation to them as those of estimates [input, bound]."""
    own = np.array([e.value for e in estimates])
    ratio = np.divide(values, own, out=np.ones_like(own), where=own != 0.0)
    return np.asarray(np.array([[e.low, e.high] for e in estimates]) * ratio[:, None])


def summarize_rank(dataset: "xr.Dataset") -> dict[str, Any]:
    """Summarise a ranking as the JSON object the command prints; times in seconds."""
    rows = [_row(dataset, i) for i in range(dataset.sizes["input"])]
    rows.sort(key=lambda row: -(row["total_order"] or 0.0))
    call = json.loads(dataset.attrs["call"])
    if call.get("quick"):
        raise PrismError(
            "a ranking of an earlier version's --quick, whose upper bounds did not hold; "
            "make it anew with `prism rank`"
        )
    kinds = dict(zip(dataset.input.values, dataset.input_kind.values, strict=True))
    kernels = [row for row in rows if kinds[row["name"]] == "kernels"]
    return {
        "job": dataset.attrs["job_name"], "target": call["target"], "seed": call["seed"],
        "mean": float(dataset.target_mean), "std": float(dataset.target_std),
        "p95": float(dataset.target_p95),
        "within_cluster_std": float(dataset.within_cluster_std),
        "between_cluster_std": float(dataset.between_cluster_std),
        "kernels": kernels,
        "effects": [row for row in rows if kinds[row["name"]] == "effects"],
        "speed_up": call["speed_up"],
        "wall_seconds": float(dataset.attrs["wall_seconds"]),
    }  # fmt: skip


def _row(dataset: "xr.Dataset", i: int) -> dict[str, Any]:
    here = dataset.isel(input=i)
    row: dict[str, Any] = {"name": str(here.input.values), "cv": _number(here, "input_cv")}
    for name in ("time_share", "critical_path_share", "covariance_share", "tail_share",
                 "first_order", "total_order"):  # fmt: skip
        row[name] = _number(here, name)
    for name in ("first_order_ci", "total_order_ci", "covariance_share_ci", "tail_share_ci"):
        values = here[name].values.tolist() if name in here else []
        row[name] = values if values and np.all(np.isfinite(values)) else None
    row["n_clusters"] = int(here.n_clusters) if "n_clusters" in here else None
    for what in dataset.intervention.values if "std_if" in dataset else ():
        changed = here.sel(intervention=what)
        suffix, tail = ("frozen", "") if what == "freeze" else ("faster", "_faster")
        for name in COMPARED:
            row[f"{name}_if_{suffix}"] = _number(changed, f"{name}_if")
            row[f"{name}_reduction{tail}"] = _number(changed, f"{name}_reduction")
            row[f"{name}_reduction{tail}_ci"] = changed[f"{name}_reduction_ci"].values.tolist()
    for name in ("std_if_frozen", "p95_if_frozen", *(f"{n}_reduction" for n in COMPARED)):
        row.setdefault(name, None)
    return row


def _number(dataset: "xr.Dataset", name: str) -> float | None:
    if name not in dataset:
        return None
    value = float(dataset[name])
    return value if np.isfinite(value) else None
