"""Runs of a sweep's settings, and the failure rate at which another setting becomes the best."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from prism.analyses.differences import difference
from prism.analyses.estimate import estimate_whole
from prism.analyses.sweeps.points import Bench, Point
from prism.analyses.sweeps.swept import label, plain_value
from prism.common.errors import PrismError
from prism.jobs.job import Job
from prism.simulation.steps import simulate_step
from prism.simulation.summary import run_spread

BETWEEN_STEPS = ("failures", "checkpoint", "evaluation", "start_up")
"""Keys of the block `run` that leave steps as they are."""
RUN_KEYS = (*BETWEEN_STEPS, "loader")
"""Keys of the block `run` on which its length hangs, beside its number of steps."""
RATE = "run.failures.per_1000_node_days"
DAY_S = 86_400.0


def of_run(key: str) -> bool:
    """Tell whether a key of a job says what comes between the steps of a run, or feeds them."""
    block, name, *_ = *key.split("."), ""
    return block == "run" and name in RUN_KEYS


def same_steps(points: Sequence[Point]) -> dict[Point, list[Point]]:
    """Group settings whose steps are the same, by the first of each."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        values = point.job.model_dump(
            mode="json", exclude={"source": True, "run": set(BETWEEN_STEPS)}
        )
        groups.setdefault(json.dumps(values, sort_keys=True), []).append(point)
    return {group[0]: group for group in groups.values()}


def draw_runs(groups: Mapping[Point, Sequence[Point]], job: Job, bench: Bench) -> dict[Point, str]:
    """Draw the runs of settings, for the work of the job's; returns what is wrong with some."""
    wrong, context = {}, bench.context.quiet
    for first, group in groups.items():
        if not first.done:
            continue
        step = bench.step(first)
        steps = simulate_step(step, first.times.size, context, parts=False)
        for point in group:
            given = point.job.run.tokens or "run.steps" in point.setting
            n_steps = point.job.n_steps if given else max(1, round(job.n_steps / point.work))
            try:
                own = replace(step, job=point.job)
                runs = estimate_whole(own, True, context, steps, n_steps)
            except PrismError as error:  # such as a checkpoint that takes longer than its interval
                wrong[point] = str(error)
                continue
            total = np.asarray(runs.time_to_train)
            point.time_to_train = run_spread(runs, total)
            cluster = np.asarray(runs.run_cluster_idx)
            point.runs_by_cluster = np.bincount(cluster, total) / np.bincount(cluster)
            if "deadline" in runs:
                point.p_done = float((total <= float(runs.deadline)).mean())
    return wrong


def break_evens(points: Sequence[Point], varied: Sequence[str]) -> list[dict[str, Any]]:
    """Find the rates at which another setting of the other keys has the shortest mean run.

    Between two rates a paired difference of mean runs is taken as linear, as it is to first order
    in the rate; a setting follows another one where it is better beyond the error (95 %).
    """
    others = [key for key in varied if key != RATE]
    if RATE not in varied or not others:
        return []
    table: dict[str, dict[float, Point]] = {}
    for point in points:
        values = {name: plain_value(text) for name, text in point.setting.items()}
        known = point.fits and point.runs_by_cluster.size > 1
        if known and isinstance(values[RATE], int | float) and values[RATE] > 0.0:
            table.setdefault(label(values, others), {})[values[RATE]] = point
    if len(table) < 2:
        return []
    rates = sorted(set.intersection(*(set(row) for row in table.values())))
    found: list[dict[str, Any]] = []
    best = ""
    for k, rate in enumerate(rates):
        rival = min(table, key=lambda name: table[name][rate].of_run("time_to_train"))
        best = best or rival
        apart = [difference(table[best][r], table[rival][r], "time_to_train") for r in rates]
        if apart[k].mean > apart[k].half_widths[0]:
            bands = [(d.mean - h, d.mean, d.mean + h) for d in apart for h in d.half_widths[:1]]
            at, low, high = _crossing(rates, np.array(bands), k)
            nodes = table[rival][rate].job.n_nodes
            found.append({
                "below": best, "above": rival, "rate": at, "rate_low": low,
                "rate_high": high, "mttf": 1000.0 * DAY_S / (at * nodes),
            })  # fmt: skip
            best = rival
    if not found and len(rates) > 1:
        found = [{
            "below": best, "above": best, "rate": None, "rate_low": rates[0],
            "rate_high": rates[-1], "mttf": None,
        }]  # fmt: skip
    return found


def _crossing(
    rates: Sequence[float], apart: np.ndarray, k: int
) -> tuple[float, float | None, float]:
    """Find where low, mean and high of a difference [rate, bound] come to 0 up to the k-th rate.

    The interval is open below (None) where the first setting is nowhere better beyond the error.
    """
    low, mean, high = apart.T

    def zero(values: np.ndarray, i: int) -> float:
        a, b = values[i : i + 2]
        return float(rates[i] - a / (b - a) * (rates[i + 1] - rates[i]))

    j = max(i for i in range(k) if mean[i] <= 0.0)
    before = [i for i in range(j + 1) if high[i] < 0.0]
    after = min(i for i in range(j + 1, k + 1) if low[i] > 0.0)
    return zero(mean, j), zero(high, before[-1]) if before else None, zero(low, after - 1)
