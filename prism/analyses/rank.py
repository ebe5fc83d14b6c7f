"""`prism rank`: which kernels and effects make the time vary, and what fixing each would bring.

Shares of the critical path, of its covariance with the step time and of the tail come from one run,
first and total order of independent inputs from pick-freeze, and interventions are run under common
random numbers.
"""

import json
import math
import time
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from prism import engine
from prism.analyses.estimate import estimate_whole
from prism.analyses.rankings.interventions import COMPARED, compare_interventions
from prism.analyses.rankings.shares import (
    Sampler,
    Shares,
    sample_shares,
    tracked_variances,
)
from prism.analyses.rankings.target import TARGETS, RankingCase, Target, rest_of_runs
from prism.common.attribution import PathShares, path_shares
from prism.common.errors import PrismError, option
from prism.common.results import Columns, Field, Result, pack_figures, read_figures
from prism.jobs.job import Job, load_job
from prism.simulation.classops import split_classes
from prism.simulation.effects import EFFECTS
from prism.simulation.estimated import TERMS
from prism.simulation.execution.context import Progress, RunContext, make_context
from prism.simulation.prepare import prepare
from prism.simulation.results import provenance
from prism.simulation.runs.parts import OF_STEPS
from prism.simulation.steps import run_blocks, warm_up
from prism.simulation.summary import summarize_simulation
from prism.simulation.variance_inputs import (
    class_cvs,
    measure_residuals,
    partition,
    time_shares,
)

if TYPE_CHECKING:
    import pandas as pd

PATH_BLOCKS = 16  # clusters of the run whose critical path is followed
LEAST_PART = 1e-9
STANDARD_ERRORS = 1.96  # half of a 95 % interval
FIGURES = (
    Field("mean", "s", "mean of what is ranked"),
    Field("std", "s", "standard deviation of what is ranked"),
    Field("p95", "s", "p95 of what is ranked"),
    Field("within_cluster_std", "s", "standard deviation of it within a cluster draw"),
    Field("between_cluster_std", "s", "standard deviation of the cluster draws' means of it"),
    Field("std_with_rare_stalls", "s", "standard deviation with stalls that few steps meet"),
)
_TEXTS = {"mean": "the mean", "std": "the standard deviation", "p50": "p50", "p95": "p95",
          "p99": "p99"}  # fmt: skip
_SHOWN = {"p50": "p50", "p95": "p95", "run": "run"}


def _gains(suffix: str, tail: str, how: str) -> list[Field]:
    """Fields of what is left, and of what is gained, where causes are changed in one way."""
    left = [Field(f"{n}_if_{suffix}", "s", f"{_TEXTS[n]} {how}") for n in COMPARED]
    texts = _TEXTS | {"run": "the mean time-to-train"}
    return left + [
        Field(f"{name}_reduction{tail}", "1", f"relative gain of {text} {how}",
              _SHOWN.get(name, ""), how, "gain", interval=True)
        for name, text in texts.items()
    ]  # fmt: skip


CAUSES = Columns("cause", (
    Field("name", "text", title="cause"),
    Field("kind", "text", "kernel class, effect, or term of the run"),
    Field("recurrence", "text", "whether it is always the same GPUs, new ones in every step, or "
          "few steps", "recurs"),
    Field("lasting_share", "1", "covariance of what it does to two steps of a cluster draw, over "
          "the mean square"),
    Field("few_steps_share", "1", "share of its variance in the 5 % of steps that it moves most"),
    Field("first_order", "1", "first-order share of the variance", "first-order", "variance",
          "share", interval=True),
    Field("total_order", "1", "total-order share of the variance", "total-order", "variance",
          "share", interval=True),
    *_gains("frozen", "", "at its median"),
    *_gains("faster", "_faster", "if faster"),
    Field("cv", "1", "coefficient of variation of one draw", "own CV", form="share"),
    Field("time_share", "1", "share of all ranks' busy time"),
    Field("critical_path_share", "1", "share of the mean critical path", "mean", "critical path",
          "share"),
    Field("covariance_share", "1", "share of the covariance with the step", "spread",
          "critical path", "share", interval=True),
    Field("tail_share", "1", "share of the excess of the slowest 5 % of steps", "slowest 5 %",
          "critical path", "share", interval=True),
    Field("n_clusters", "count", "cluster draws that its shares rest on"),
))  # fmt: skip


class Ranking(Result):
    """Kernel classes and effects by what they contribute to the variance of a time."""

    _needs = ("mean", "std", "p95", "cause", "recurrence")

    def figures(self) -> dict[str, Any]:
        """Give all figures, see `Result.figures`."""
        call, rows = json.loads(self.attrs["call"]), CAUSES.rows(self.dataset)
        lists: dict[str, Any] = {"kernels": [], "effects": []}
        for row in rows:
            if (kind := f"{row.pop('kind')}s") in lists:
                lists[kind].append(row)
        keys = {"delay": "delay_by_term", "delay_se": "delay_by_term_se",
                "variance": "variance_by_term", "variance_se": "variance_by_term_se"}  # fmt: skip
        terms = TERMS.rows(self.dataset)
        by_term = {key: {t["name"]: t[name] for t in terms} for name, key in keys.items() if terms}
        found = read_figures(FIGURES, self.dataset)
        return {
            "job": self.attrs["job_name"], "target": call["target"], "seed": call["seed"],
            **dict.fromkeys(field.name for field in FIGURES), **found, **by_term, **lists,
            "speed_up": call["speed_up"], "wall_seconds": float(self.attrs["wall_seconds"]),
        }  # fmt: skip

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of `causes`, with their intervals."""
        return CAUSES.rows(self.dataset)

    @cached_property
    def causes(self) -> "pd.DataFrame":
        """Kernel classes, effects and terms of the run, the largest total-order share first."""
        return CAUSES.frame(self.rows)


def rank(
    job: Job | str,
    target: str = "step_time",
    *,
    speed_up: float | None = None,
    seed: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Ranking:
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
        Table ``causes``, sorted by total-order share, with what each would gain at its median
        (congestion, which is on or off, at its mean).

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
    context = make_context(seed, threads, progress)
    if target not in TARGETS:
        raise PrismError(f"target {target}: expected {' or '.join(TARGETS)}")
    if speed_up is not None and not 0.0 < speed_up < 1.0:
        raise PrismError(
            f"{option('speed_up')} {speed_up:g}: expected a share of the time, above 0 and below 1"
        )
    case, whole = _prepare(job, target, context)
    figures = {name: whole[target][name] for name in ("mean", "std", "p95", "within_cluster_std",
                                                      "between_cluster_std")}  # fmt: skip
    path = _follow_path(case)
    shares = sample_shares(case.sampler, case.inputs, partial(split_classes, case.step))
    known = {name: figures[name] for name in ("mean", "std", "p95")}
    if target == "step_time" and case.sampler.stall_delays is not None:
        known["std"] = figures["std_with_rare_stalls"] = case.sampler.variance.total**0.5
    asked = ("freeze",) if speed_up is None else ("freeze", "speed")
    gains = compare_interventions(case, asked, path.mean, known, speed_up or 0.0)
    terms = _terms(whole) if target == "time_to_train" else []
    rows = _cause_rows(case, shares, path, terms)
    rows = [row | gains.get(row["name"], {}) for row in rows]
    rows.sort(key=lambda row: -row["total_order"])
    call = {"target": target, "speed_up": speed_up, "seed": context.seed}
    found = CAUSES.pack(rows).merge(pack_figures(FIGURES, figures)).merge(TERMS.pack(terms))
    attrs = provenance(job, call) | {"kind": "ranking", "wall_seconds": time.perf_counter() - begin}
    return Ranking(found.assign_attrs(attrs))


def _prepare(job: Job, target: str, context: RunContext) -> tuple[RankingCase, dict[str, Any]]:
    """Build what the parts of a ranking share, and the summary of the job's estimate."""
    if job.variability.dependence == "none":
        raise PrismError(
            f"{job.source}: variability.dependence: none leaves no effects to rank; set full"
        )
    of_run, seed = target == "time_to_train", context.seed
    step = prepare(job, seed, engine="auto")
    whole = estimate_whole(step, of_run or job.has_run, context)
    every = step if step.program.sample is None else prepare(job, seed)  # each replica counts
    warm_up(every.program, context)
    v, residuals, ops = every.effects, measure_residuals(every, seed), split_classes(every)
    rest = rest_of_runs(whole) if of_run or job.has_run else None
    ranked = Target(
        target,
        job.n_steps,
        v.step.distribution.std,
        v.step.correlation_time_s,
        context.quiet,
        rest if of_run else None,
    )
    sampler = Sampler(every.program, ops.program, context)
    if every is step and sampler.often is None:
        sampler.first = np.asarray(whole["step_time"], np.float64).reshape(-1, engine.LANES)
        sampler.step.a = sampler.first
    per_step = None if rest is None else rest.per_step
    case = RankingCase(
        every, residuals, partition(every.program, residuals, ops.owner), sampler, ranked, per_step
    )
    return case, summarize_simulation(whole)


def _follow_path(case: RankingCase) -> PathShares:
    """Shares of the classes on the critical path; bounds of their variance for the sampler."""
    program, sampler = case.step.program, case.sampler
    n_classes = len(program.classes)
    tracked = tracked_variances(program, case.residuals)
    drawn = run_blocks(tracked, range(PATH_BLOCKS), sampler.context.quiet, track=True)
    steps, _, path = (x.astype(np.float64) for x in drawn[:3])
    sampler.bounds, sampler.whole = path[:, n_classes:].mean(axis=(0, 2)), float(steps.var())
    return path_shares(path[:, :n_classes], sampler.context.seed)


def _terms(whole: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the terms of a run."""
    return [
        {"name": name, "variance": share, "variance_se": whole["variance_by_term_se"][name],
         "delay": whole["delay_by_term"].get(name), "delay_se": whole["delay_by_term_se"].get(name)}
        for name, share in (whole.get("variance_by_term") or {}).items()
    ]  # fmt: skip


def _cause_rows(
    case: RankingCase, shares: list[Shares], path: PathShares, terms: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Shares of every cause, and of the terms of a run that are not of its steps."""
    program = case.step.program
    cvs, busy = class_cvs(program, case.residuals), time_shares(program)
    first, total = np.array([s.variances for s in shares]).T
    orders = case.target.share([s.entry.name for s in shares], first, total, case.sampler.variance)
    # causes keep their order where chance has steps make nothing of the run's variance
    part = max(LEAST_PART, sum(t["variance"] for t in terms if t["name"] in OF_STEPS))
    scale, rows = part if terms else 1.0, list[dict[str, Any]]()
    for i, s in enumerate(shares):
        row: dict[str, Any] = {"name": s.entry.name, "kind": s.entry.kind.removesuffix("s")}
        for order, values, own in (
            ("first_order", orders.first, s.first), ("total_order", orders.total, s.total)
        ):  # fmt: skip
            value, error = float(values[i]), STANDARD_ERRORS * float(orders.error[i])
            ratio = value / own.value if own.value != 0.0 else 1.0  # as wide as the estimate's own
            bounds = [own.low * ratio, own.high * ratio]
            if not math.isnan(error):
                bounds = [value - error, value + error]
            row |= {order: scale * value, f"{order}_ci": [scale * bound for bound in bounds]}
        row |= {"lasting_share": s.lasting, "few_steps_share": s.in_few, "recurrence": recurs(s)}
        if i < len(program.classes):
            row |= {
                "time_share": busy[i], "cv": cvs[i], "critical_path_share": path.mean[i],
                "covariance_share": path.covariance[i], "tail_share": path.tail[i],
                "covariance_share_ci": path.covariance_ci[i].tolist(),
                "tail_share_ci": path.tail_ci[i].tolist(),
            }  # fmt: skip
        else:
            row["cv"] = EFFECTS[s.entry.name].cv(program)
        rows.append(row | {"n_clusters": len(s.ab)})
    for term in terms:
        if term["name"] not in OF_STEPS:
            share, half = term["variance"], STANDARD_ERRORS * (term["variance_se"] or 0.0)
            row = {"name": term["name"], "kind": "term"}
            for order in ("first_order", "total_order"):
                row |= {order: share, f"{order}_ci": [share - half, share + half]}
            rows.append(row)
    return rows


def recurs(shares: Shares) -> str | None:
    """Tell whether a cause is most of all the same GPUs, few steps, or new in every step."""
    if shares.entry.name == "rank" and shares.entry.is_constant:  # GPUs as they were measured
        return "persistent"
    if math.isnan(shares.lasting):
        return None
    if shares.lasting > 0.5:
        return "persistent"
    return "occasional" if shares.in_few > 0.5 else "rotating"
