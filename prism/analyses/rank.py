"""`prism rank`: which kernels and effects make the time vary, and what fixing each would bring.

Shares of the critical path, of its covariance with the step time and of the tail come from one run,
first and total order of independent inputs from pick-freeze, and interventions are run under common
random numbers.
"""

import json
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from prism import engine
from prism.analyses.estimate import estimate_whole
from prism.analyses.rankings.interventions import COMPARED_BLOCKS, compare_interventions
from prism.analyses.rankings.shares import (
    Sampler,
    list_inputs,
    sample_shares,
    tracked_variances,
)
from prism.analyses.rankings.target import TARGETS, Case, Target, rest_of_runs
from prism.common.attribution import COMPARED, Array, Estimate, path_shares
from prism.common.errors import PrismError, named
from prism.common.results import Columns, Field, Result
from prism.jobs.job import Job, load_job
from prism.simulation.causes import class_cvs, effect_cv, measure_residuals, time_shares
from prism.simulation.classops import split_classes
from prism.simulation.prepare import prepare
from prism.simulation.results import make_dataset, provenance
from prism.simulation.runs.parts import OF_STEPS
from prism.simulation.steps import Progress, run_blocks, settle_call, warm_up
from prism.simulation.summary import summarize_simulation

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

PATH_BLOCKS = 16  # clusters of the run whose critical path is followed
LEAST_PART = 1e-9
STANDARD_ERRORS = 1.96  # half of a 95 % interval
TERMS = "variance_by_term", "variance_by_term_se", "delay_by_term", "delay_by_term_se"


def rank(
    job: Job | str,
    target: str = "step_time",
    *,
    speed_up: float | None = None,
    seed: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> "Ranking":
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
    Ranking
        Table ``causes``, sorted by total-order share; arrays by ``input``, kernel classes first,
        and ``intervention``: ``freeze`` (at the median; congestion, which is on or off, at its
        mean) and ``speed``.

    Raises
    ------
    PrismError
        The job cannot be built, or a number or name is out of range.

    Examples
    --------
    >>> import prism
    >>> ranking = prism.rank("pipeline-8x32", seed=1)
    >>> ranking.causes.total_order.round(1).head(1).to_dict()
    {'compute': 1.0}
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
    case, whole = _prepare(job, target, seed, threads, progress)
    values = _one_run(case) | _whole(whole[target])
    asked = ("freeze",) if speed_up is None else ("freeze", "speed")
    coords: dict[str, Any] = {
        "input": [entry.name for entry in case.inputs],
        "input_kind": ("input", [entry.kind for entry in case.inputs]),
        "bound": ["low", "high"], "intervention": list(asked),
    }  # fmt: skip
    case.sampler.planned = len(asked) * sum(COMPARED_BLOCKS[e.kind] for e in case.inputs)
    values |= _orders(case)
    before, more = values, {}
    if target == "step_time" and case.sampler.rare is not None:  # an estimate seldom meets them
        std = case.sampler.variance.total**0.5
        before, more = values | {"target_std": std}, {"std_with_rare_stalls": std}
    values |= compare_interventions(case, asked, before, speed_up or 0.0)
    call = {"target": target, "speed_up": speed_up, "seed": seed}
    terms = {key: whole[key] for key in TERMS if key in whole}
    attrs = provenance(job, call) | {"kind": "ranking", "terms": json.dumps(terms)} | more
    found = _with_terms(make_dataset(values, coords, attrs), terms)
    return Ranking(found.assign_attrs(wall_seconds=time.perf_counter() - begin))


def _prepare(
    job: Job, target: str, seed: int, threads: int, progress: Progress | None
) -> tuple[Case, dict[str, Any]]:
    """Build what the parts of a ranking share, and the summary of the job's estimate."""
    if job.variability.dependence == "none":
        raise PrismError(
            f"{job.source}: variability.dependence: none leaves no effects to rank; set full"
        )
    of_run = target == "time_to_train"
    step = prepare(job, seed, engine="auto")
    whole = estimate_whole(step, of_run, seed, threads, progress)
    every = step if step.program.sample is None else prepare(job, seed)  # each replica counts
    warm_up(every.program, seed)
    v, residuals = every.effects, measure_residuals(every, seed)
    ranked = Target(
        target, job.n_steps, v.step.std, v.correlation_time_s, seed,
        rest_of_runs(whole) if of_run else None,
    )  # fmt: skip
    ops = split_classes(every)
    sampler = Sampler(ops.program, every.program, seed, threads, progress)
    if every is step:
        steps, effects = (
            np.asarray(whole[name], np.float64).reshape(-1, engine.LANES)
            for name in ("step_time", "step_effect")
        )
        sampler.first = steps, effects
    case = Case(every, residuals, list_inputs(every, residuals, ops), sampler, ranked)
    return case, summarize_simulation(whole)


def _whole(spread: dict[str, Any]) -> dict[str, Any]:
    """Figures of the target as its estimate has them."""
    figures = {f"target_{name}": spread[name] for name in ("mean", "std", "p95")}
    for name in ("within_cluster_std", "between_cluster_std"):
        figures[name] = np.nan if spread[name] is None else spread[name]
    return figures


def _with_terms(found: "xr.Dataset", terms: dict[str, Any]) -> "xr.Dataset":
    """Make orders of causes, which are of steps, shares of the run, and its other terms causes."""
    shares, errors = (terms.get(f"variance_by_term{of}") or {} for of in ("", "_se"))
    if not shares:
        return found
    others = [name for name in shares if name not in OF_STEPS]
    # causes keep their order where chance has steps make nothing of the run's variance
    part = max(LEAST_PART, sum(share for name, share in shares.items() if name in OF_STEPS))
    names = [*found.input.values, *others]
    kinds = [*found.input_kind.values, *["terms"] * len(others)]
    found = (
        found.drop_vars("input_kind")
        .reindex(input=names)
        .assign_coords(input_kind=("input", kinds))
    )
    for order in ("first_order", "total_order"):
        found[order] *= part
        found[f"{order}_ci"] *= part
        for name in others:
            half = STANDARD_ERRORS * (errors[name] or 0.0)
            found[order].loc[{"input": name}] = shares[name]
            found[f"{order}_ci"].loc[{"input": name}] = shares[name] + np.array([-half, half])
    return found


def _one_run(case: Case) -> dict[str, Any]:
    """Figures that a single run with its critical path gives."""
    program, sampler = case.step.program, case.sampler
    n_classes = len(program.classes)
    effects = case.inputs[n_classes:]
    tracked = tracked_variances(program, case.residuals)
    drawn = run_blocks(tracked, range(PATH_BLOCKS), sampler.seed, sampler.threads, track=True)
    steps, effect, path = (x.astype(np.float64) for x in drawn[:3])
    bound = path[:, n_classes:].mean(axis=(0, 2))
    if not len(sampler.first[0]):
        sampler.first = steps, effect
    sampler.bounds, sampler.whole = bound, float(steps.var())
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
    }


def _orders(case: Case) -> dict[str, Any]:
    """First and total order of every input, of the step or of the run."""
    shares = sample_shares(case.sampler, case.inputs)
    first, total = np.array([s.variances for s in shares]).T
    names = [s.entry.name for s in shares]
    orders = case.target.share(names, first, total, case.sampler.variance)
    return {
        "first_order": orders.first, "total_order": orders.total,
        "first_order_ci": _bounds(orders.first, [s.first for s in shares], orders.error),
        "total_order_ci": _bounds(orders.total, [s.total for s in shares], orders.error),
        "n_clusters": [len(s.ab) for s in shares],
    }  # fmt: skip


def _bounds(values: Array, estimates: list[Estimate], errors: Array) -> Array:
    """Intervals of shares from standard errors, as wide as an estimate's own where NaN."""
    own = np.array([e.value for e in estimates])
    ratio = np.divide(values, own, out=np.ones_like(own), where=own != 0.0)
    found = np.array([[e.low, e.high] for e in estimates]) * ratio[:, None]
    half = STANDARD_ERRORS * errors[:, None] * np.array([-1.0, 1.0])
    return np.asarray(np.where(np.isnan(half), found, values[:, None] + half))


CAUSES = Columns("input", (
    Field("name", "text", title="cause"),
    Field("kind", "text", "kernel class, effect, or term of the run"),
    Field("first_order", "1", "first-order share of the variance", interval=True),
    Field("total_order", "1", "total-order share of the variance", interval=True),
    Field("std_reduction", "1", "relative gain of the standard deviation", interval=True),
    Field("p50_reduction", "1", "relative gain of the median", interval=True),
    Field("p95_reduction", "1", "relative gain of p95", interval=True),
    Field("mean_reduction", "1", "relative gain of the mean", interval=True),
    Field("cv", "1", "coefficient of variation of one draw"),
    Field("time_share", "1", "share of all ranks' busy time"),
    Field("critical_path_share", "1", "share of the mean critical path"),
    Field("covariance_share", "1", "share of the covariance with the step", interval=True),
    Field("tail_share", "1", "share of the excess of the slowest 5 % of steps", interval=True),
))  # fmt: skip


class Ranking(Result):
    """Kernel classes and effects by what they contribute to the variance of a time."""

    def figures(self) -> dict[str, Any]:
        """Give all figures, see `Result.figures`."""
        return _figures(self.dataset)

    @cached_property
    def causes(self) -> "pd.DataFrame":
        """Kernel classes, effects and terms of the run, the largest total-order share first."""
        found = self.figures()
        rows = [
            {**row, "kind": kind.removesuffix("s")}
            for kind in ("kernels", "effects") for row in found[kind]
        ]  # fmt: skip
        named = {row["name"] for row in rows}
        shares = found.get("variance_by_term") or {}
        rows += [
            {"name": name, "kind": "term", "first_order": share, "total_order": share}
            for name, share in shares.items() if name not in named and name not in OF_STEPS
        ]  # fmt: skip
        return CAUSES.frame(sorted(rows, key=lambda row: -(row["total_order"] or 0.0)))


def _figures(dataset: "xr.Dataset") -> dict[str, Any]:
    call = json.loads(dataset.attrs["call"])
    if call.get("quick"):
        raise PrismError(
            "a ranking of an earlier version's --quick, whose upper bounds did not hold; "
            "make it anew with `prism rank`"
        )
    order, rows = np.argsort(-dataset.total_order.values, kind="stable"), {}
    for kind in ("kernels", "effects"):
        rows[kind] = [_row(dataset, int(i)) for i in order if dataset.input_kind[i] == kind]
    return {
        "job": dataset.attrs["job_name"], "target": call["target"], "seed": call["seed"],
        "mean": float(dataset.target_mean), "std": float(dataset.target_std),
        "p95": float(dataset.target_p95),
        "within_cluster_std": _number(dataset, "within_cluster_std"),
        "between_cluster_std": _number(dataset, "between_cluster_std"),
        "std_with_rare_stalls": dataset.attrs.get("std_with_rare_stalls"),
        **json.loads(dataset.attrs.get("terms", "{}")), **rows, "speed_up": call["speed_up"],
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
