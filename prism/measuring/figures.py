"""What a measurement's samples say: percentiles, spread, rate, memory, drift, and whether to trust.

Percentiles are numpy's linear ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from prism.cluster.nccl import bus_factor
from prism.common.agreement import effective_n
from prism.common.arrays import Array, Index
from prism.common.text import percent_change
from prism.measuring.samples import MeasuredCase, Samples

ENOUGH = 1_000  # calls from which a p99 is based on ten values or more

DRIFT = 0.03
"""Drift of the median over a session worth a word, where it is beyond three standard errors."""

_QUARTER = 0.25
_GRID = 512
_MODE = 0.05  # least share of the values that makes a second mode
_VALLEY = 0.7  # of the lower peak: between modes the density falls below this
_OUTER = 0.005  # share left out at both ends before modes are looked for
_LOADED = 0.5  # load average a core, above which others work beside the measurement


def summarize_samples(samples: Samples) -> dict[str, Any]:
    """Figures of every case, and warnings."""
    cases = [
        case_figures(case, samples.seconds[i], samples.slowest[i], samples.block[i])
        for i, case in enumerate(samples.cases)
        if samples.seconds[i].size
    ]
    about = samples.attrs
    return {
        "kind": samples.kind, "seed": about.get("plan", {}).get("seed"),
        "machine": about.get("machine", {}), "cases": cases,
        "states": state_spans(about.get("states", [])), "warm_up": about.get("warm_up", []),
        "timer_overhead": about.get("timer_overhead_s"),
        "seconds": max((float(at[-1]) for at in samples.at if at.size), default=0.0),
        "stopped": about.get("stopped", ""), "notes": about.get("notes", []),
        "warnings": _warnings(samples, cases),
    }  # fmt: skip


def case_figures(
    case: MeasuredCase, seconds: Array, slowest: Array, block: Index
) -> dict[str, Any]:
    """Figures of one case: its calls' durations [s], the slowest rank's [s], and their blocks.

    The rate is work over time where there is work, else bytes over time, of a collective on the
    bus.
    """
    mean, p50, (drift, error) = seconds.mean(), np.quantile(seconds, 0.5), session_drift(seconds)
    moved, ranks = case.flop or case.bytes, int(case.settings.get("ranks", 0))
    out = {
        "label": case.label, "family": case.family, "n": int(seconds.size), "mean": float(mean),
        **{f"p{p}": float(np.quantile(seconds, p / 100)) for p in (50, 95, 99)},
        "cv": float(seconds.std() / mean), "autocorrelation": lag_one(seconds, block),
        "n_effective": float(effective_n(seconds)) if seconds.size > 3 else float(seconds.size),
        "drift": drift, "drift_se": error,
        "rate": float(moved * (bus_factor(case.family, ranks) if ranks else 1.0) / p50),
        "rate_units": "flop/s" if case.flop else "byte/s", "modes": count_modes(seconds),
    }  # fmt: skip
    if ranks:
        for p in (50, 99):
            out[f"slowest_p{p}"] = float(np.quantile(slowest, p / 100))
    return out


def lag_one(seconds: Array, block: Index) -> float | None:
    """Correlation of one call with the next of its block, as ranks; None for few or constant ones.

    Ranks, because a few long calls would decide it otherwise (Spearman's coefficient).
    """
    follows = block[1:] == block[:-1]
    if follows.sum() < 10:
        return None
    rank = np.argsort(np.argsort(seconds, kind="stable"), kind="stable").astype(np.float64)
    first, second = rank[:-1][follows], rank[1:][follows]
    if first.std() == 0.0 or second.std() == 0.0 or np.ptp(seconds) == 0.0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def session_drift(seconds: Array) -> tuple[float | None, float | None]:
    """Median of the last quarter of the calls over that of the first, minus 1, and its error.

    Notes
    -----
    The error takes each quarter as eight runs of calls, whose medians tell how much medians of
    such runs differ: memory of up to such a run is in it.
    """
    n = int(_QUARTER * seconds.size)
    if n < 32:
        return None, None
    ends = []
    for part in (seconds[:n], seconds[-n:]):
        runs = np.array([np.median(x) for x in np.array_split(part, 8)])
        ends.append((float(np.median(part)), float(runs.std(ddof=1) / np.sqrt(runs.size))))
    (first, a), (last, b) = ends
    return last / first - 1.0, float(np.hypot(a, b)) / first


def count_modes(seconds: Array) -> int:
    """Count the modes of the durations' density that stand apart.

    Notes
    -----
    A Gaussian kernel density of the logarithm (Silverman's width from the smaller of standard
    deviation and interquartile range), 0.5 % left out at both ends. Neighbouring peaks are one
    mode unless the density between them falls below 0.7 of the lower one and each side holds 5 %.
    """
    if seconds.size < 100:
        return 1
    x = np.log(np.sort(seconds))
    cut = int(_OUTER * x.size)
    x = x[cut : x.size - cut]
    q1, q3 = np.quantile(x, [0.25, 0.75])
    width = 0.9 * min(float(x.std()), float(q3 - q1) / 1.34 or np.inf) * x.size**-0.2
    if not width > 1e-9:
        return 1
    grid = np.linspace(x[0], x[-1], _GRID)
    counts, edges = np.histogram(x, bins=4 * _GRID)
    middles = 0.5 * (edges[1:] + edges[:-1])
    density = np.exp(-0.5 * ((grid[:, None] - middles) / width) ** 2) @ counts
    padded = np.concatenate([[0.0], density, [0.0]])
    peaks = np.flatnonzero((padded[1:-1] >= padded[:-2]) & (padded[1:-1] > padded[2:]))
    modes, last, begin = 1, int(peaks[0]), 0.0
    for peak in map(int, peaks[1:]):
        valley = last + int(np.argmin(density[last : peak + 1]))
        left = float(np.mean(x <= grid[valley])) - begin
        deep = density[valley] < _VALLEY * min(density[last], density[peak])
        if deep and left >= _MODE and 1.0 - begin - left >= _MODE:
            modes, last, begin = modes + 1, peak, begin + left
        elif density[peak] > density[last]:
            last = peak
    return modes


def state_spans(states: list[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Smallest and largest reading of the machine's state over the measurement."""
    names = dict.fromkeys(name for state in states for name in state if name != "time")
    spans = {}
    for name in names:
        values = [s[name] for s in states if isinstance(s.get(name), int | float)]
        if values:
            spans[name] = [float(min(values)), float(max(values))]
    return spans


def _warnings(samples: Samples, cases: list[dict[str, Any]]) -> list[str]:
    """Say what makes figures less than they seem."""
    out, about = [], samples.attrs

    def say(labels: list[str], text: str) -> None:
        if labels:
            more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
            out.append(f"{labels[0]}{more}: {text}")

    few = {row["label"]: row["n"] for row in cases if row["n"] < ENOUGH}
    n = next(iter(few.values()), 0)
    say(list(few), f"{n:,} calls; a p99 asks for {ENOUGH:,} or more (--repetitions)")
    say(
        [row["label"] for row in cases if row["modes"] > 1],
        "durations have several modes; a mean and a CV do not describe them, the distribution "
        "keeps them",
    )
    moved = {
        row["label"]: row["drift"] for row in cases
        if row["drift"] is not None
        and abs(row["drift"]) > max(DRIFT, 3.0 * (row["drift_se"] or 0.0))
    }  # fmt: skip
    text = percent_change(next(iter(moved.values()), 0.0))
    say(list(moved), f"the median moved by {text} over the session; measure longer, or again")
    warm = zip(samples.cases, about.get("warm_up", []), strict=False)
    way = "again" if about.get("plan", {}).get("sustained") else "raise --warm-up"
    say(
        [case.label for case, kept in warm if kept.get("settled") is False],
        f"the rate had not settled when calls began to count; measure longer, or {way}",
    )
    cores = about.get("machine", {}).get("cores", 1)
    loads = [state["load_average"] for state in about.get("states", []) if "load_average" in state]
    if loads and loads[0] > _LOADED * cores:
        out.append(
            f"load average {loads[0]:.1f} on {cores} cores when it began (up to {max(loads):.1f}): "
            "other processes ran, and lengthen the tails"
        )
    return out
