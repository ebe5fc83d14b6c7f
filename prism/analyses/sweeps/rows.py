"""What a sweep found, as rows for JSON: the figures of every setting [s], and the best ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from prism import engine
from prism.analyses.differences import difference, standard_error
from prism.analyses.sweeps.points import Point
from prism.analyses.sweeps.swept import MEASURES, of_step, plain_value
from prism.simulation.summary import spread

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
    change, error, alike = None, None, False
    if best is not None and point is not best and min(point.n, best.n) > 1:
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
    return sorted(run, key=lambda p: (not p.fits, -(p.p_done or 0.0), p.figure(measure))) + others


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
