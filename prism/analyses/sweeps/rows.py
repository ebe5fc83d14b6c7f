"""What a sweep found, as rows for JSON: the figures of every setting [s], and the best ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prism import engine
from prism.analyses.differences import difference, pareto, probability_best, standard_error
from prism.analyses.sweeps.points import TOLERANCE as TOLERANCE
from prism.analyses.sweeps.points import Point
from prism.simulation.summary import spread

MEASURES = ("p50", "p95", "mean")
JOULES_PER_KWH = 3.6e6
BARE = ("data_parallel", "schedule")
"""Keys whose values say what they are."""


def make_rows(points: Sequence[Point], objective: str) -> list[dict[str, Any]]:
    """Put settings into rows, see `_ordered`."""
    own = {point.group: point for point in reversed(points) if point.own and point.n}
    any_own = next(iter(own.values()), None)
    ordered = _ordered(points, objective)
    best = min(
        (p for p in ordered if p.done and p.fits), key=lambda p: p.figure(objective), default=None
    )
    return [
        _row(point, own.get(point.group, any_own)) | _from_best(point, best, objective)
        for point in ordered
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


def _ordered(points: Sequence[Point], objective: str) -> list[Point]:
    """Sort settings by the objective: those that may be chosen, those not likely to fit, others."""
    run, others = [p for p in points if p.n], [p for p in points if not p.n]
    others.sort(key=lambda point: point.bound)
    return sorted(run, key=lambda p: (not p.fits, p.figure(objective))) + others


def _row(point: Point, own: Point | None) -> dict[str, Any]:
    row: dict[str, Any] = {key: plain_value(text) for key, text in point.setting.items()}
    row |= {
        "figures": "full" if point.done else "screen" if point.n else "bound",
        "own": point.own,
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
    if point.job.tokens_per_step:
        row["tokens_per_second"] = point.job.tokens_per_step / row["mean"]
    return row


def _known(error: float) -> float | None:
    """Give a standard error; None for one cluster draw."""
    return None if math.isnan(error) else error


def plain_value(text: str) -> Any:
    """Give a value as a number or a word where its text is one, else its text.

    Examples
    --------
    >>> plain_value("8"), plain_value("1e-3"), plain_value("fsdp"), plain_value("[1, 2]")
    (8, 0.001, 'fsdp', '[1, 2]')
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def choose(
    points: Sequence[Point], objective: str, group: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """Say which settings are fastest, robust, best by the objective, and on the frontier.

    Of those that are likely to fit; None where none is.
    """
    rows = _ordered(points, objective)
    simulated = [point for point in rows if point.n and group in (None, point.group)]
    final = [point for point in simulated if point.done and point.fits]
    chosen: dict[str, Any] = {"p_correct": {}}
    names = {"fastest": "p50", "robust": "p95", "best": objective}
    if not final:
        return chosen | dict.fromkeys(names) | {"frontier": []}
    simulated = [point for point in simulated if point.fits]
    for name, measure in names.items():
        point = min(final, key=lambda point: point.figure(measure))
        chosen[name] = rows.index(point)
        chosen["p_correct"][name] = probability_best(point, simulated, measure, TOLERANCE)
    figures = np.array([[point.figure(m) for m in ("p50", "p95")] for point in final])
    chosen["frontier"] = [rows.index(final[i]) for i in pareto(figures)]
    return chosen


def same_work_differs(numbers: Mapping[str, Any]) -> bool:
    """Whether steps do unequal work, so that times are compared per token."""
    return any(abs(row["work"] - 1.0) > 1e-9 for row in numbers["rows"])


def key_name(key: str) -> str:
    """Name a key of the job without its block: ``vpp``, ``network.latency_us``, ``step.cv``."""
    return ".".join(key.split(".")[1:][-2:]) or key


def label(row: Mapping[str, Any], varied: Sequence[str]) -> str:
    """Name a setting: ``tp 8 pp 16 dp 128``; a 1 is left out where many keys vary."""
    words = []
    for key in varied:
        if row[key] == 1 and len(varied) > 3 and key.startswith("parallelism."):
            continue
        name = key_name(key)
        words.append(str(row[key]) if name in BARE else f"{name} {row[key]}")
    return " ".join(words) or "as is"
