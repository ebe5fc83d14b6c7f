"""`prism rank`: which kernels and effects make the time vary, and what fixing each would bring.

Kernel classes and shared effects in one table: shares of the critical path, of its covariance with
the step time and of the tail (one run); first and total order on the partition into independent
inputs (pick-freeze); and interventions with common random numbers. Ranked is the step time or the
time of the run. Left out: plots and the command.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from prism import engine
from prism.attribution import (
    TAIL,
    Array,
    Estimate,
    PathShares,
    Reduction,
    Variance,
    path_shares,
    reduction,
    spread_clusters,
)
from prism.clustertimes import cluster_times
from prism.errors import PrismError
from prism.inputs import Input, Residuals, class_cvs, effect_cv, time_shares
from prism.job import Job, load_job
from prism.program import Program
from prism.ranking import (
    Sampler,
    intervene,
    list_inputs,
    measure_residuals,
    sample_quickly,
    sample_shares,
    tracked_variances,
)
from prism.ranktarget import TARGETS, Target
from prism.results import make_dataset, provenance
from prism.simulate import (
    Progress,
    Step,
    check_counts,
    default_threads,
    fresh_seed,
    prepare,
    prepare_variability,
    run_blocks,
    warm_up,
)
from prism.variability import Variability

if TYPE_CHECKING:
    import xarray as xr

PATH_BLOCKS, QUICK_BLOCKS = 16, 8  # clusters of the run whose critical path is followed
QUICK_REPEATS = 4  # of them repeated with each effect redrawn
COMPARED_BLOCKS = {"kernels": 8, "effects": 16}  # clusters of an intervention
FIGURES = ("mean", "std", "p50", "p95", "p99")
REDUCTIONS = ("mean_reduction", "std_reduction", "p95_reduction")
NOTABLE_CLUSTERS = 0.1  # share between clusters from which those compared are spread
KERNEL_CONTROL = 128  # clusters that comparisons of a kernel class are spread over
NOTABLE = 0.02  # a share of the tail that much apart from that of the variance is said


@dataclass
class _Case:
    """Everything that the parts of a ranking share."""

    step: Step
    v: Variability
    residuals: Residuals
    inputs: list[Input]
    sampler: Sampler
    target: Target


def rank(
    job: Job | str,
    target: str = "step_time",
    *,
    quick: bool = False,
    interventions: Sequence[str] = ("freeze",),
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
    quick : bool
        One run only: shares of the critical path; the total order of a kernel class is then an
        upper bound, first orders are those of step and rank, and nothing is frozen.
    interventions : sequence of str
        Of ``freeze`` (at the median), ``cut`` (tails at p95) and ``speed`` (10 % faster).
    seed, threads, progress
        As in `simulate`.

    Returns
    -------
    xarray.Dataset
        By ``input``, kernel classes first; `summarize_rank` gives sorted lists.

    Raises
    ------
    PrismError
        The job cannot be built, or a number or name is out of range.
    """
    begin = time.perf_counter()
    job = load_job(job) if isinstance(job, str) else job
    seed = fresh_seed() if seed is None else seed
    threads = default_threads() if threads is None else threads
    check_counts(1, seed, threads)
    if target not in TARGETS:
        raise PrismError(f"target {target}: expected {' or '.join(TARGETS)}")
    if job.variability.dependence == "none":
        raise PrismError(
            f"{job.source}: variability.dependence: none leaves no effects to rank; set full"
        )
    step = prepare(job, seed)
    v = prepare_variability(job)
    warm_up(step.program, seed)
    residuals = measure_residuals(step, v, seed)
    inputs = list_inputs(step, residuals)
    sampler = Sampler(step.program, seed, threads, progress)
    ranked = Target(target, job.n_steps, v.step.std, v.correlation_time_s, seed)
    case = _Case(step, v, residuals, inputs, sampler, ranked)
    values = _one_run(case, quick)
    asked = () if quick else tuple(interventions)
    if not quick:
        sampler.planned = len(asked) * sum(COMPARED_BLOCKS[entry.kind] for entry in inputs)
        values |= _shares(case)
        values |= _interventions(case, asked, values)
    coords = {
        "input": [entry.name for entry in inputs],
        "input_kind": ("input", [entry.kind for entry in inputs]),
        "bound": ["low", "high"], "intervention": list(asked),
    }  # fmt: skip
    call = {"target": target, "quick": quick, "interventions": list(asked), "seed": seed}
    attrs = provenance(job, call)
    attrs["wall_seconds"] = time.perf_counter() - begin
    return make_dataset(values, coords, attrs)


def _one_run(case: _Case, quick: bool) -> dict[str, Any]:
    """Figures that a single run with its critical path gives."""
    step, n_classes = case.step, len(case.step.program.classes)
    program = tracked_variances(step.program, case.residuals) if quick else step.program
    drawn = run_blocks(
        program,
        range(QUICK_BLOCKS if quick else PATH_BLOCKS),
        case.sampler.seed,
        case.sampler.threads,
        track=True,
    )
    steps, effect, path = (x.astype(np.float64) for x in drawn[:3])
    shares: PathShares = path_shares(path[:, :n_classes], case.sampler.seed)
    blank = np.full(len(case.inputs) - n_classes, np.nan)
    bounds = np.stack([shares.covariance_low, shares.covariance_high], axis=1)
    cv = class_cvs(step.program, case.residuals)
    values = {
        "time_share": np.append(time_shares(step.program), blank),
        "input_cv": np.append(
            cv, [effect_cv(step.program, e.name) for e in case.inputs[n_classes:]]
        ),
        "critical_path_share": np.append(shares.mean, blank),
        "covariance_share": np.append(shares.covariance, blank),
        "covariance_share_ci": np.concatenate([bounds, np.full((blank.size, 2), np.nan)]),
        "tail_share": np.append(shares.tail, blank),
    }
    values |= _describe(case.target.times(steps, effect))
    if quick:
        bound = path[:, n_classes:].mean(axis=(0, 2))
        values |= _quick_orders(case, steps, effect, bound)
    return values


def _describe(times: Array) -> dict[str, Any]:
    return {
        "target_mean": times.mean(), "target_std": times.std(ddof=1),
        "target_p95": np.quantile(times, TAIL),
    }  # fmt: skip


def _quick_orders(case: _Case, steps: Array, effect: Array, bound: Array) -> dict[str, Any]:
    """Orders as far as one run tells: bounds of classes, correlation of step, spread of rank."""
    variance, total = sample_quickly(case.sampler, case.inputs, steps, QUICK_REPEATS)
    first = np.full(len(case.inputs), np.nan)
    total[: bound.size] = bound
    names = [entry.name for entry in case.inputs]
    if "step" in names and effect.std() > 0.0:
        own = steps - steps.mean(axis=1, keepdims=True)
        r = np.corrcoef(own.ravel(), (effect - effect.mean(axis=1, keepdims=True)).ravel())[0, 1]
        i = names.index("step")
        first[i] = r**2 * variance.within
        total[i] = np.fmax(total[i], first[i])
    if "rank" in names:
        first[names.index("rank")] = variance.between
    first_share, total_share = case.target.shares(names, first, total, variance, steps.mean())
    return {
        "first_order": first_share, "total_order": total_share,
        "total_order_within": _within(case, total, variance), **_spread(variance),
    }  # fmt: skip


def _shares(case: _Case) -> dict[str, Any]:
    """First and total order of every input, of the step or of the run."""
    shares = sample_shares(case.sampler, case.inputs)
    variance, mean = case.sampler.variance, float(case.sampler.a.mean())
    first, total = np.array([s.variances for s in shares]).T
    names = [entry.name for entry in case.inputs]
    first_share, total_share = case.target.shares(names, first, total, variance, mean)
    ratio_first = _ratio(first_share, [s.first for s in shares])
    ratio_total = _ratio(total_share, [s.total for s in shares])
    return {
        "first_order": first_share, "total_order": total_share,
        "first_order_ci": _bounds([s.first for s in shares], ratio_first),
        "total_order_ci": _bounds([s.total for s in shares], ratio_total),
        "total_order_within": _within(case, total, variance),
        "n_clusters": [len(s.ab) for s in shares], **_spread(variance),
        **_whole(case, variance),
    }  # fmt: skip


def _whole(case: _Case, variance: Variance) -> dict[str, Any]:
    """Figures of the target from all clusters of both runs."""
    sampler = case.sampler
    steps = np.concatenate([sampler.a, sampler.b])
    values = _describe(case.target.times(steps, np.concatenate(sampler.effects)))
    if case.target.name == "step_time":
        values["target_std"] = variance.total**0.5
    return values


def _spread(variance: Variance) -> dict[str, float]:
    return {
        "within_cluster_std": variance.within**0.5, "between_cluster_std": variance.between**0.5
    }  # fmt: skip


def _within(case: _Case, total: Array, variance: Variance) -> Array:
    """Total order over the variance within a cluster; none for what is drawn once per cluster."""
    persistent = [engine.RANK in entry.streams for entry in case.inputs]
    return np.where(persistent, np.nan, total / (variance.within or np.inf))


def _ratio(values: Array, estimates: list[Estimate]) -> Array:
    own = np.array([e.value for e in estimates])
    return np.asarray(np.divide(values, own, out=np.ones_like(own), where=own != 0.0))


def _bounds(estimates: list[Estimate], ratio: Array) -> Array:
    return np.array([[e.low, e.high] for e in estimates]) * ratio[:, None]


def _interventions(case: _Case, asked: Sequence[str], whole: dict[str, Any]) -> dict[str, Any]:
    """Spread and quantiles with each input frozen, cut or made faster.

    Reductions are those of the clusters compared; what they leave is taken of all clusters' mean,
    spread and p95, which few of them would not tell.
    """
    shape = (len(asked), len(case.inputs))
    out = {f"{n}_if": np.full(shape, np.nan) for n in FIGURES}
    for name in REDUCTIONS:
        out |= {name: np.full(shape, np.nan), f"{name}_ci": np.full((*shape, 2), np.nan)}
    quiet = _quiet_times(case)
    before = {
        kind: _compared(case, case.step.program, blocks, quiet.get(kind))
        for kind, blocks in COMPARED_BLOCKS.items()
    }
    for i, what in enumerate(asked):
        for j, entry in enumerate(case.inputs):
            program = intervene(case.step, case.v, entry, what, case.sampler.seed)
            if program is None:
                continue
            steady = what == "freeze" and entry.name == "step"
            own = _quiet_after(case, entry, what, program, quiet)
            after = _compared(case, program, COMPARED_BLOCKS[entry.kind], own, steady)
            found: Reduction = reduction(before[entry.kind], after, case.sampler.seed)
            for name in FIGURES:
                out[f"{name}_if"][i, j] = getattr(found, name)
            for name in REDUCTIONS:
                estimate: Estimate = getattr(found, name)
                out[name][i, j] = estimate.value
                out[f"{name}_ci"][i, j] = estimate.low, estimate.high
                figure = name.removesuffix("_reduction")
                out[f"{figure}_if"][i, j] = whole[f"target_{figure}"] * (1.0 - estimate.value)
    return out


def _quiet_times(case: _Case) -> dict[str, Array]:
    """Quiet times to spread the clusters of a comparison by; none where clusters matter little."""
    control, variance = case.sampler.control, case.sampler.variance
    if control is None or control.variance == 0.0:
        return {}
    if case.target.name == "step_time" and variance.between < NOTABLE_CLUSTERS * variance.total:
        return {}
    return {"kernels": control.times[0][:KERNEL_CONTROL], "effects": control.times[0]}


def _quiet_after(
    case: _Case, entry: Input, what: str, program: Program, quiet: dict[str, Array]
) -> Array | None:
    """Quiet times under an intervention: a class's own; effects other than ranks leave them."""
    if entry.kind not in quiet:
        return None
    before = quiet[entry.kind]
    if entry.kind == "effects" and engine.RANK not in entry.streams:
        return before
    if entry.kind == "effects" and what == "freeze":
        return np.zeros_like(before)
    sampler = case.sampler
    times = cluster_times(program, range(before.size), sampler.seed, sampler.threads)
    return times.astype(np.float64)


def _compared(
    case: _Case, program: Program, n: int, quiet: Array | None, steady: bool = False
) -> Array:
    """Target under a changed program [cluster, replicate], with the base's keys."""
    sampler = case.sampler
    times, effect, _, _ = run_blocks(program, range(n), sampler.seed, sampler.threads)
    sampler.advance(n)
    steps, effects = times.astype(np.float64), effect.astype(np.float64)
    if quiet is not None:
        steps = spread_clusters(steps, quiet)
        effects = np.tile(effects, steps.shape[1] // effects.shape[1])
    return case.target.times(steps, effects, steady)


def summarize_rank(dataset: "xr.Dataset") -> dict[str, Any]:
    """Summarise a ranking as the JSON object the command prints; times in seconds."""
    rows = [_row(dataset, i) for i in range(dataset.sizes["input"])]
    rows.sort(key=lambda row: -(row["total_order"] or 0.0))
    kinds = dict(zip(dataset.input.values, dataset.input_kind.values, strict=True))
    kernels = [row for row in rows if kinds[row["name"]] == "kernels"]
    call = json.loads(dataset.attrs["call"])
    by = {s: [r["name"] for r in sorted(kernels, key=lambda r, s=s: -r[s])][:5]  # type: ignore[misc]
          for s in ("covariance_share", "tail_share")}  # fmt: skip
    apart = [
        row["name"] for row in kernels
        if abs(row["tail_share"] - row["covariance_share"]) > NOTABLE
    ]  # fmt: skip
    return {
        "job": dataset.attrs["job_name"], "target": call["target"], "quick": call["quick"],
        "seed": call["seed"], "mean": float(dataset.target_mean), "std": float(dataset.target_std),
        "p95": float(dataset.target_p95),
        "within_cluster_std": float(dataset.within_cluster_std),
        "between_cluster_std": float(dataset.between_cluster_std),
        "kernels": kernels,
        "effects": [row for row in rows if kinds[row["name"]] == "effects"],
        "tail_order_differs": by["covariance_share"] != by["tail_share"],
        "tail_differs": apart,
        "wall_seconds": float(dataset.attrs["wall_seconds"]),
    }  # fmt: skip


def _row(dataset: "xr.Dataset", i: int) -> dict[str, Any]:
    """Figures of one input; None where there is none."""
    here = dataset.isel(input=i)
    row: dict[str, Any] = {"name": str(here.input.values), "cv": _number(here, "input_cv")}
    for name in ("time_share", "critical_path_share", "covariance_share", "tail_share",
                 "first_order", "total_order", "total_order_within"):  # fmt: skip
        row[name] = _number(here, name)
    for name in ("first_order_ci", "total_order_ci", "covariance_share_ci"):
        values = here[name].values.tolist() if name in here else []
        row[name] = values if values and np.all(np.isfinite(values)) else None
    row["n_clusters"] = int(here.n_clusters) if "n_clusters" in here else None
    for what in dataset.intervention.values if "std_if" in dataset else ():
        changed = here.sel(intervention=what)
        suffix = {"freeze": "frozen", "cut": "cut", "speed": "faster"}[str(what)]
        for name in FIGURES:
            row[f"{name}_if_{suffix}"] = _number(changed, f"{name}_if")
        tail = "" if what == "freeze" else f"_{suffix}"
        for name in REDUCTIONS:
            row[name + tail] = _number(changed, name)
            row[f"{name}{tail}_ci"] = changed[f"{name}_ci"].values.tolist()
    for name in ("std_if_frozen", "p95_if_frozen", *REDUCTIONS):
        row.setdefault(name, None)
    return row


def _number(dataset: "xr.Dataset", name: str) -> float | None:
    if name not in dataset:
        return None
    value = float(dataset[name])
    return value if np.isfinite(value) else None
