"""`prism sweep`: settings of a job side by side, p50 of the step against p95.

All are simulated under the same random numbers, longer those that may be best.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prism import engine
from prism.analyses.differences import difference, probability_best, standard_error
from prism.analyses.sweeps.grid import (
    Setting,
    check_values,
    follow_schedule,
    grid_of,
    job_at,
    settings,
)
from prism.analyses.sweeps.layouts import (
    KEYS,
    LAYOUT_KEYS,
    SIZES,
    base_of,
    follow_sizes,
    global_batch,
    layouts,
)
from prism.analyses.sweeps.points import (
    BUILT,
    TOLERANCE,
    Bench,
    Point,
    least_seconds,
    simulate_points,
)
from prism.analyses.sweeps.runs import break_evens, draw_runs, of_run, same_steps
from prism.analyses.sweeps.swept import (
    BY_RUN,
    CHOICES,
    MEASURES,
    OBJECTIVES,
    Sweep,
    choose,
    make_sweep,
    of_step,
    plain_value,
)
from prism.common import sizes
from prism.common.errors import PrismError, option
from prism.common.text import format_count, format_share
from prism.distributions.library import load_library
from prism.jobs.job import Job, given_values, load_job
from prism.simulation.execution.context import Progress, RunContext, make_context
from prism.simulation.results import job_of, provenance
from prism.simulation.summary import spread
from prism.workload.memory import LEAST_P_FITS, memory_figures

REPLICATES = 4096  # steps of a setting that goes on to the end: 64 clusters


def sweep(
    job: Job | str | Path,
    vary: Mapping[str, Sequence[Any]] | None = None,
    *,
    layouts: bool = False,
    replicates: int = REPLICATES,
    objective: str | None = None,
    min_p_fits: float = LEAST_P_FITS,
    seed: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Simulate settings of a job side by side.

    Parameters
    ----------
    job : Job, str or path
        A job, its file, the name of a shipped one, or a fitted model.
    vary : mapping of str to sequence, optional
        Values by key of the job (``parallelism.dp``); all combinations are taken.
    layouts : bool
        Take all layouts on the job's GPUs that keep its batch and fit the memory, each with all
        combinations of `vary`; those of a layout's keys there say which layouts are taken.
    replicates : int
        Steps of a setting that goes on to the end; 64 of them share one draw of the cluster.
    objective : str, optional
        ``p50``, ``p95`` or ``mean`` of the step, ``time_to_train`` (the mean run) or ``done_by``
        (P(the run is done by its deadline)), both of settings that may have the least mean step, or
        ``carbon``: what rows are sorted by, and ``best`` in; p50 of layouts, time_to_train where
        failures, checkpoints, evaluations or the like alone are varied, else p95.
    min_p_fits : float
        Probability that a setting's memory fits [1] below which it is not chosen, and not simulated
        where it is a layout that prism proposes.
    seed, threads, progress
        As in `prism.simulate`.

    Returns
    -------
    Sweep
        Tables ``settings`` and ``refused``; `prism.summary` gives the figures the command
        prints.

    Raises
    ------
    PrismError
        Nothing is varied, no setting can be built, or a number is out of range.

    Examples
    --------
    >>> import prism
    >>> vary = {"parallelism.microbatches": [16, 32]}
    >>> rows = prism.sweep("pipeline-8x32", vary, replicates=128, seed=1).settings
    >>> rows["parallelism.microbatches"].tolist(), rows.p50.round().tolist()  # s
    ([32, 16], [121.0, 71.0])
    """
    begin, cpu = time.perf_counter(), time.process_time()
    job = job if isinstance(job, Job) else load_job(job)
    grid = grid_of(vary or {})
    if not grid and not layouts:
        raise PrismError(
            f"nothing to vary; give {option('vary')} (key and values) or {option('layouts')}"
        )
    run_alone = not layouts and all(map(of_run, grid))
    objective = objective or ("p50" if layouts else "time_to_train" if run_alone else "p95")
    if objective not in OBJECTIVES:
        raise PrismError(f"objective {objective}: expected one of {', '.join(OBJECTIVES)}")
    if objective == "carbon":
        _check_carbon(job, grid)
    if not 0.0 <= min_p_fits <= 1.0:
        raise PrismError(f"{option('min_p_fits')} {min_p_fits}: expected a probability, 0 to 1")
    context = make_context(seed, threads, progress, replicates)
    _check_size(math.prod(map(len, grid.values())), replicates)
    check_values(grid)
    points, refused = _points(job, grid, layouts, replicates, min_p_fits, context)
    if not points:
        raise PrismError(_all_refused(job, refused))
    if objective == "done_by" and any(point.job.run.deadline is None for point in points):
        where = f"{job.source or job.name}: {option('objective')} done_by"
        raise PrismError(f"{where}: no deadline; set run.deadline")
    clusters = -(-replicates // engine.LANES)
    bench = Bench(context)
    skip = layouts and objective != "carbon"  # bounds are of times
    groups = same_steps(points)
    wrong = simulate_points(list(groups), bench, clusters, of_step(objective), skip)
    for first, group in groups.items():
        wrong |= dict.fromkeys(group, wrong[first]) if first in wrong else {}
        for point in group:
            point.take_steps(first)
    if objective in BY_RUN or any(map(of_run, grid)):
        wrong |= draw_runs(groups, job, bench)
    refused += [
        {**point.setting, "reason": reason.removeprefix(f"{job.name}: ")}
        for point, reason in wrong.items()
    ]
    points = [point for point in points if point not in wrong]
    if not points:
        raise PrismError(_all_refused(job, refused))
    rows, warnings = make_rows(points, objective), []
    if refused and not layouts:
        asked = len(rows) + len(refused)
        warnings = [
            f"refused: {len(refused):,} of {format_count(asked, 'setting')}; the answer says why"
        ]
    figures = {
        "objective": objective, "layouts": layouts, "min_p_fits": min_p_fits,
        "world_size": job.world_size, "tokens_per_step": job.tokens_per_step,
        "clusters": bench.done, "rank_clusters": bench.n_quiet,
        "wall_seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu,
        **_how_sure(points, rows, objective),
    }  # fmt: skip
    texts = {
        "varied": list(points[0].setting), "warnings": warnings,
        "by_hand": [key for key in grid if layouts and key not in LAYOUT_KEYS],
        "notes": _followed(points, grid) + _notes(points, rows),
    }  # fmt: skip
    call = {"vary": grid, "layouts": layouts, "replicates": replicates, "objective": objective,
            "min_p_fits": min_p_fits}  # fmt: skip
    call["seed"] = context.seed
    evens = break_evens(points, texts["varied"])
    return make_sweep(rows, refused, figures, texts, provenance(job, call), evens)


def _check_carbon(job: Job, grid: Mapping[str, Any]) -> None:
    """Refuse to choose by carbon where no intensity is stated, or no power is known."""
    where = f"{job.source or job.name}: {option('objective')} carbon"
    stated = job.run.grid_intensity is not None or job.run.region is not None
    if not stated and not {"run.region", "run.grid_intensity"} & grid.keys():
        raise PrismError(f"{where}: no carbon intensity; set run.grid_intensity or run.region")
    if job.model.durations is not None and job.cluster.power_limit_w is None:
        raise PrismError(
            f"{where}: what the GPUs draw is not known of model.durations; set "
            "cluster.power_limit_w, or take another objective"
        )


def reproduce(result: Sweep, threads: int | None = None) -> Sweep:
    """Run the call that made a sweep again, from its own attributes."""
    data = result.to_xarray()
    return sweep(job_of(data), threads=threads, **json.loads(data.attrs["call"]))


# ----------------------------------------------------------------------------------- the settings
def _points(
    job: Job, grid: Mapping[str, Sequence[str]], all_layouts: bool, replicates: int,
    min_p_fits: float, context: RunContext,
) -> tuple[list[Point], list[dict[str, Any]]]:  # fmt: skip
    """Build every setting; those that break a rule or do not fit are refused, with the reason."""
    values, as_it_is = given_values(job), _as_it_is(job)
    points: list[Point] = []
    refused: list[dict[str, Any]] = []

    def add(setting: Setting, follows: Sequence[str], group: tuple[str, ...], own: bool) -> None:
        context.report(BUILT * (len(points) + len(refused)) // asked, 1000)
        try:
            made = job_at(values, setting, follows, job.name)
            is_job = _as_it_is(made) == as_it_is
            memory = memory_figures(made, every=False)
            fits = memory is None or memory["p_fits"] >= min_p_fits
            if memory is not None and all_layouts and not (own or fits):
                raise PrismError(
                    f"needs {memory['gib']:.0f} GiB: P(fits) below {format_share(min_p_fits)} of "
                    f"{memory['limit_gib']:.1f} GiB of {made.cluster.device}"
                )
            points.append(
                Point(
                    setting=setting, job=made, group=group, own=own or is_job,
                    is_job=is_job, memory=memory, fits=fits,
                    work=_work(made) / _work(job),
                    least=least_seconds(made) if all_layouts else 0.0,
                )
            )  # fmt: skip
        except PrismError as error:
            refused.append({**setting, "reason": _reason(error, job)})

    held = {key: set(grid[key]) for key in LAYOUT_KEYS if all_layouts and key in grid}
    every = list(settings({key: grid[key] for key in grid if key not in held}))
    asked = len(every)
    if not all_layouts:
        sized, drops = zip(*follow_sizes(job, values, every), strict=True)
        for (setting, follows), drop in zip(follow_schedule(values, sized), drops, strict=True):
            add(setting, (*follows, *drop), (), False)
        return points, refused
    for setting in every:
        try:
            base = base_of(values, setting, job.name)
            if base.variability.library is not None:
                load_library(base.variability.library)  # wrong in any layout: once
            found = list(layouts(base, global_batch(job)))
        except PrismError as error:
            refused.append({**setting, "reason": _reason(error, job)})
            continue
        asked = len(every) * len(found)
        _check_size(asked, replicates)
        for layout, follows in found:
            if any(layout[key] not in held[key] for key in held):
                continue
            # the job's own keeps all it was given, an uneven split of its layers too
            own = all(f"{getattr(job.parallelism, d)}" == layout[f"parallelism.{d}"] for d in KEYS)
            add({**setting, **layout}, () if own else follows, tuple(setting.values()), own)
    return points, refused


def _check_size(settings: int, replicates: int) -> None:
    """Refuse more settings than their rows and steps have room for."""
    steps = (8 * settings * replicates, sizes.BYTE)
    counts = {"settings": (settings, sizes.SETTING), "bytes of their steps": steps}
    sizes.check_size("sweep", counts, f"{option('vary')} or {option('replicates')}")


def _as_it_is(job: Job) -> dict[str, Any]:
    """Give all values of a job; a global batch is what the microbatches make it."""
    return job.model_dump(exclude={"source": True, "parallelism": {"global_batch"}})


def _work(job: Job) -> float:
    """Work of a step: its tokens, or its sequences where no length is known."""
    return float(job.tokens_per_step or global_batch(job))


def _reason(error: PrismError, job: Job) -> str:
    """Give what a job's check found, without the name of the job."""
    return "; ".join(line.removeprefix(f"{job.name}: ") for line in error.args)


def _all_refused(job: Job, refused: Sequence[Mapping[str, Any]]) -> str:
    """Say why nothing is left: the commonest reasons, each with a setting."""
    if not refused:
        return (
            f"{job.source or job.name}: no layout of those asked for has its GPUs and its batch; "
            "vary fewer keys of the layout, or change parallelism.microbatches or the nodes"
        )
    first = {row["reason"]: row for row in reversed(refused)}
    lines = []
    for reason, count in Counter(row["reason"] for row in refused).most_common(3):
        setting = ", ".join(f"{k}={v}" for k, v in first[reason].items() if k != "reason")
        more = f" (and {count - 1} more)" if count > 1 else ""
        lines.append(f"{setting}{more}: {reason}")
    head = f"{job.source or job.name}: no setting of {len(refused)} can be built:"
    return "\n".join([head, *lines])


# ------------------------------------------------------------------------------------- the answer
def _notes(points: Sequence[Point], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say how settings are compared, and what is assumed."""
    notes = []
    unequal = any(abs(point.work - 1.0) > 1e-9 for point in points)
    if len({row["world_size"] for row in rows}) > 1:
        notes.append("settings take different numbers of GPUs" + (
            "; they are compared per token, for the work of one step of the job" if unequal
            else " for the same tokens of a step"
        ))  # fmt: skip
    elif unequal:
        notes.append("steps have different numbers of tokens; they are compared per token")
    return notes


def _followed(points: Sequence[Point], grid: Mapping[str, Sequence[str]]) -> list[str]:
    """Say which sizes follow those that are varied."""
    sizes = ("parallelism.dp", "parallelism.microbatches")
    keys = [key for key in sizes if key not in grid and key in points[0].setting]
    if not keys or not SIZES & set(grid):
        return []
    return [f"{' and '.join(keys)} follow, for all GPUs and the job's global batch"]


def _how_sure(
    points: Sequence[Point], rows: Sequence[dict[str, Any]], objective: str
) -> dict[str, float]:
    """Probability that no setting is better than a chosen one by more than the tolerance."""
    found, in_order = choose(rows, objective), ordered(points, objective)
    rivals = [point for point in in_order if point.n and point.fits]
    return {
        f"p_correct_{name}": probability_best(
            in_order[found[name]], rivals, measure, TOLERANCE
        )
        for name, measure in {**CHOICES, "best": of_step(objective)}.items()
        if found[name] is not None and not (name == "best" and objective in BY_RUN)
    }  # fmt: skip


# -------------------------------------------------------------------------------------- rows
JOULES_PER_KWH = 3.6e6


def make_rows(points: Sequence[Point], objective: str) -> list[dict[str, Any]]:
    """Put settings into rows, see `ordered`."""
    own = {point.group: point for point in reversed(points) if point.own and point.n}
    the_job = next((point for point in points if point.is_job and point.n), None)
    if the_job is not None:
        own = dict.fromkeys(own, the_job)
    any_own = next(iter(own.values()), None)
    found = ordered(points, objective)
    best = next((p for p in found if p.done and p.fits and objective != "done_by"), None)
    return [
        _row(point, own.get(point.group, any_own), the_job) | _from_best(point, best, objective)
        for point in found
    ]


def _from_best(point: Point, best: Point | None, objective: str) -> dict[str, Any]:
    """Compare a setting with the best one: the change, its error, whether it may be none."""

    def n_draws(point: Point) -> int:
        return point.runs_by_cluster.size if objective == "time_to_train" else point.n

    change, error, alike = None, None, False
    if best is not None and point is not best and min(map(n_draws, (point, best))) > 1:
        apart = difference(point, best, objective)
        change, error, alike = apart.share, apart.share_error, not apart.is_clear
    return {
        "best_change": change, "best_change_se": error, "indistinguishable_from_best": alike,
    }  # fmt: skip


def ordered(points: Sequence[Point], objective: str) -> list[Point]:
    """Sort settings by the objective: those that may be chosen, those not likely to fit, others."""
    run, others = [p for p in points if p.n], [p for p in points if not p.n]
    others.sort(key=lambda point: point.bound)
    measure = of_step(objective)
    return sorted(run, key=lambda p: (not p.fits, p.of_run(objective), p.figure(measure))) + others


def _row(point: Point, own: Point | None, the_job: Point | None) -> dict[str, Any]:
    """Give a setting's figures, compared with its own layout where the job is not among them."""
    row: dict[str, Any] = {key: plain_value(text) for key, text in point.setting.items()}
    row |= {
        "figures": "full" if point.done else "screen" if point.n else "bound",
        "own": point.own if the_job is None else point is the_job,
        "world_size": point.job.world_size,
        "memory": point.memory,
        "likely_fits": point.fits,
        "work": point.work,
        "at_least": point.bound,
        "ideal_step_time": point.ideal,
        "clusters": point.n,
        "replicates": point.times.size,
        "time_to_train": point.time_to_train,
    }
    if not point.n:
        empty = ("step_time", *MEASURES, *(f"{m}_se" for m in MEASURES))
        return row | dict.fromkeys(empty)
    cluster = np.repeat(np.arange(point.n), engine.LANES)
    row["step_time"] = spread(point.times.ravel(), cluster)
    share, error = point.exposed
    row |= {"mfu": point.mfu, "exposed_communication": share}
    row["exposed_communication_se"] = _known(error)
    for measure in MEASURES:
        row[f"{measure}_same_work"] = point.figure(measure)
        row[measure] = row[f"{measure}_same_work"] * point.work
        row[f"{measure}_se"] = _known(standard_error(point.values(measure)) * point.work)
        apart = None if own in (None, point) else difference(point, own, measure)
        row[f"{measure}_change"] = apart and apart.share
        row[f"{measure}_change_se"] = apart and _known(apart.share_error)
    if point.gpu_power is not None:
        row["gpu_power_w"] = point.gpu_power
        row["gpu_kwh"] = point.gpu_power * point.job.world_size * row["mean"] / JOULES_PER_KWH
    if point.kg_per_s:
        row["carbon_same_work"] = point.figure("carbon")
    if point.p_done is not None:
        row["p_done"] = point.p_done
    if point.job.tokens_per_step:
        row["tokens_per_second"] = point.job.tokens_per_step / row["mean"]
    return row


def _known(error: float) -> float | None:
    """Give a standard error; None for one cluster draw."""
    return None if math.isnan(error) else error
