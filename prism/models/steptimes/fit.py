"""Fit step times: from a table or log to a model, with what it shows and what it cannot.

Takes the series apart, fits the spread by time scale, finds what measured totals hold beside the
steps, and reports intervals, goodness of fit, and what cannot be learnt from what is there.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from prism.common.agreement import effective_n
from prism.common.arrays import Array
from prism.common.errors import PrismError
from prism.common.means import poisson_interval
from prism.common.text import format_count, format_duration
from prism.models.steptimes.likelihood import (
    N_REPEATS,
    Observed,
    fit_spread,
    intervals,
    no_drift_p_value,
    own_noise,
    repeat_fits,
)
from prism.models.steptimes.model import PARTS, StepModel
from prism.models.steptimes.series import Series, decompose, first_steps
from prism.models.steptimes.spread import Spread, mean_variance
from prism.traces import StepTimes

MIN_STEPS = 4  # of a run, to separate its own spread from that between runs
MIN_VALUES = 8  # step times a fit can start from
_SAMPLES = 4096  # residuals kept: quantiles to 1/4096
_MOST_SKIPPED = 100  # first steps that totals may leave out
_CLEARLY = 0.5  # skipping them must at least halve the spread of the offset
FEW_RUNS_FOR_SPREAD = 5


def fit_step_times(
    times: StepTimes,
    totals: Mapping[str, float] | None = None,
    first: int | None = None,
    seed: int = 0,
    repeats: int = N_REPEATS,
) -> StepModel:
    """Learn body, stalls, drift and run effect from step times of one job on one system.

    `totals` are measured totals of runs [s]. From the `first` steps of each run alone variation is
    learnt, work by step from all. `repeats` are behind the intervals; 0 leaves these out.
    """
    _check_enough(times)
    series = decompose(times, seed)
    seen = _first(series, first, times.source)
    elapsed_s = seen.elapsed * float(series.work.mean())
    by_step = seen.has_profile
    observed = Observed.of(seen.body, elapsed_s, by_step)
    of_values = fit_spread(observed)
    again = repeat_fits(of_values, seen.body, elapsed_s, by_step, seed + 1, repeats)
    p_value = no_drift_p_value(observed, of_values)
    n_runs = len(series.runs)
    counts, exposure = _exposure(seen)
    gap_s = float(elapsed_s[-1]) / max(elapsed_s.size - 1, 1)
    own = mean_variance(of_values, seen.steps.size, gap_s)
    model = StepModel(
        series.steps, series.work, series.has_profile, series.mean_over,
        _per_step(of_values, series), _rows([_per_step(s, series) for s in again]),
        _residuals(own_noise(seen.body, elapsed_s, of_values)),
        seen.stall_s[seen.stall_position >= seen.beginning], counts, exposure,
        seen.excess[: seen.beginning].T, *_offset(series, times, totals), n_runs,
        int(seen.steps.size), float(np.sqrt((own + of_values.run**2) / n_runs)),
        series.threshold, series.grain_s, {},
    )  # fmt: skip
    return replace(model, report=_report(model, times, seen, elapsed_s, p_value))


def _check_enough(times: StepTimes) -> None:
    """Refuse too few steps to learn from; raises PrismError."""
    if times.seconds.size < MIN_VALUES:
        raise PrismError(
            f"{times.source}: {times.seconds.size} step times; expected at least {MIN_VALUES} to "
            "learn a spread from; log more steps"
        )
    if np.unique(times.step).size < MIN_STEPS:
        raise PrismError(
            f"{times.source}: runs of {format_count(np.unique(times.step).size, 'step')}; "
            "expected at least "
            f"{MIN_STEPS} steps of a run, to separate its own spread from that between runs; "
            "log longer runs"
        )


def _rows(spreads: list[Spread]) -> Array:
    """Lay spreads out [spread, part]."""
    return np.array([list(s.as_dict().values()) for s in spreads]).reshape(len(spreads), len(PARTS))


def _first(series: Series, first: int | None, source: str) -> Series:
    """Keep the first steps of the series, where that was asked for."""
    if first is None or first >= series.steps.size:
        return series
    if first < MIN_VALUES:
        raise PrismError(f"{source}: the first {first} steps; expected at least {MIN_VALUES}")
    return first_steps(series, first)


def _per_step(spread: Spread, series: Series) -> Spread:
    """Bring the spread of values that are means of several steps to single steps."""
    k = series.mean_over
    return replace(spread, white=spread.white * float(np.sqrt(k)))


def _exposure(series: Series) -> tuple[Array, Array]:
    """Stalls after the beginning and the time behind them, by run."""
    late = series.stall_position >= series.beginning
    counts = np.bincount(series.stall_run[late], minlength=len(series.runs)).astype(np.float64)
    known = np.isfinite(series.body[series.beginning :])
    seconds = (known * series.work[series.beginning :, None]).sum(axis=0) * series.mean_over
    return counts, seconds


def _residuals(values: Array) -> Array:
    """Distribution of a step's own noise [sample]: quantiles where there are many, unit spread."""
    if values.size > _SAMPLES:
        at = (np.arange(_SAMPLES) + 0.5) / _SAMPLES * (values.size - 1)
        values = np.interp(at, np.arange(values.size), np.sort(values))
    values = values - values.mean()
    scale = float(values.std())
    return np.asarray(values / scale) if scale > 0.0 else np.zeros(1)


def _offset(
    series: Series, times: StepTimes, totals: Mapping[str, float] | None
) -> tuple[float, float, int]:
    """Mean and spread of total less sum of steps [s], and the first steps a total leaves out."""
    if totals is None:
        return 0.0, 0.0, 0
    known = [(r, totals[name]) for r, name in enumerate(series.runs) if name in totals]
    if not known:
        raise PrismError(
            f"{times.source}: none of its runs ({', '.join(series.runs[:4])}, ...) has a total; "
            f"the totals are of {', '.join(list(totals)[:4])}, ...; the names must agree"
        )
    runs = np.array([r for r, _ in known])
    total = np.array([t for _, t in known])
    whole = np.where(np.isfinite(series.body), series.work[:, None] * (1.0 + series.body), 0.0)
    events = np.isnan(series.body)
    whole = np.where(events, series.work[:, None] + series.excess, whole) * series.mean_over
    most = min(_MOST_SKIPPED, series.steps.size // 4) if runs.size > 2 else 0
    before = np.vstack([np.zeros(len(series.runs)), np.cumsum(whole, axis=0)])[: most + 1, runs]
    offsets = total - (whole[:, runs].sum(axis=0) - before)  # [skipped, run]
    spread = offsets.std(axis=1, ddof=1) if runs.size > 1 else np.zeros(1)
    best = int(spread.argmin())
    skips = best if spread[best] < _CLEARLY * spread[0] else 0
    return float(offsets[skips].mean()), float(spread[skips]), skips


# ------------------------------------------------------------------------------------- report
def _report(
    model: StepModel, times: StepTimes, series: Series, elapsed_s: Array, p_value: float
) -> dict[str, Any]:
    """Collect what a fit found, as plain values."""
    again = [Spread(*map(float, row)) for row in model.repeats]
    bounds = intervals(model.spread, again) if again else {}
    if not model.run_known:
        bounds.pop("run", None)  # one run bounds nothing
    if p_value > 0.05 and bounds:  # what noise shows as well may be none
        bounds["drift"] = 0.0, bounds["drift"][1]
        bounds.pop("tau_s")
    values = times.seconds
    total = _total_shares(model)
    return {
        "inputs": [times.source], "n": int(values.size), "runs": model.n_runs,
        "steps": int(series.steps.size), "mean_over": model.mean_over,
        "step_time": {
            "mean": float(values.mean()), "std": float(values.std(ddof=1)),
            "cv": float(values.std(ddof=1) / values.mean()),
            **{f"p{q}": float(np.quantile(values, q / 100.0)) for q in (5, 50, 95, 99)},
            "mean_se": model.step_error * model.step_s,
        },
        "n_effective": effective_n(values, times.step, times.run),
        "work_by_step": {
            "found": model.has_profile, "cv": float(model.work.std() / model.step_s),
        },
        "effects": {
            name: {
                "cv": getattr(model.spread, name),
                "ci": list(bounds[name]) if name in bounds else [None, None],
                "share_of_step": _share(model, name), "share_of_run": total.get(name),
            }
            for name in ("white", "drift", "run")
        },
        "drift_memory": {
            "tau_s": model.spread.tau_s or None,
            "ci": list(bounds["tau_s"]) if "tau_s" in bounds and model.spread.tau_s else None,
            "no_drift_p_value": p_value,
        },
        "stalls": _stalls(model, series),
        "beginning": {
            "steps": int(model.beginning_s.shape[1]),
            "mean_s": float(model.beginning_s.sum(axis=1).mean()),
            "std_s": float(model.beginning_s.sum(axis=1).std(ddof=1)) if model.n_runs > 1 else 0.0,
        },
        "offset": {
            "mean_s": model.offset_s, "std_s": model.offset_std_s, "skips": model.offset_skips,
        },
        "not_identifiable": _not_identifiable(model, series, p_value),
        "warnings": _warnings(model, bounds, float(elapsed_s[-1])),
        "taken": times.taken, "notes": list(times.notes),
    }  # fmt: skip


def _share(model: StepModel, name: str) -> float:
    """Share of a part in the variance of single steps without stalls."""
    parts = {k: v**2 for k, v in model.spread.as_dict().items() if k != "tau_s"}
    return parts[name] / max(sum(parts.values()), 1e-300)


def _total_shares(model: StepModel) -> dict[str, float]:
    """Share of each part in the variance of a run of as many steps as were seen, no stalls."""
    n, s = model.n_steps * model.mean_over, model.spread
    white = s.white**2 / n
    slow = mean_variance(s, n, model.step_s) - white
    parts = {"white": white, "drift": slow, "run": s.run**2}
    whole = max(sum(parts.values()), 1e-300)
    return {k: v / whole for k, v in parts.items()}


def _stalls(model: StepModel, series: Series) -> dict[str, Any]:
    """Rate with its 90 % interval (Garwood), and lengths."""
    n, exposure = float(model.stall_counts.sum()), float(model.exposure_s.sum())
    ci = [end / exposure for end in poisson_interval(n)] if exposure else [None, None]
    lengths = model.stall_s
    return {
        "n": int(n), "rate_per_h": 3600.0 * model.stall_rate,
        "rate_per_h_ci": [None if x is None else 3600.0 * float(x) for x in ci],
        "mean_s": float(lengths.mean()) if n else None,
        "p95_s": float(np.quantile(lengths, 0.95)) if n else None,
        "longest_s": float(lengths.max()) if n else None,
        "beyond": 1.0 + model.stall_threshold,
        "in_beginning": int((series.stall_position < series.beginning).sum()),
    }  # fmt: skip


def _not_identifiable(model: StepModel, series: Series, p_value: float) -> list[str]:
    """Say what these step times cannot tell."""
    out = []
    if model.n_runs == 1:
        out.append(
            "run effect: one run does not show how much runs differ; taken as 0, so the spread of "
            "time-to-train is a lower bound"
        )
        out.append("work by step: in one run, work that a schedule changes looks like drift")
    elif model.n_runs < 3:
        out.append("work by step: fewer than 3 runs do not show it")
    if p_value > 0.05:
        out.append(
            f"slow drift: {format_count(series.steps.size, 'step')} of a run: too few to tell one "
            f"from noise (p-value {p_value:.2g})"
        )
    if not model.stall_counts.sum():
        exposure = float(model.exposure_s.sum())
        bound = f"; below {3.0 / exposure * 3600.0:.3g} per hour at 95 %" if exposure else ""
        out.append(f"stalls after the beginning: none in {format_duration(exposure)}{bound}")
    if model.mean_over > 1:
        out.append(
            f"single steps: each value is the mean of {model.mean_over}; their own spread is taken "
            "as that of independent steps, and short stalls are not seen"
        )
    out.append("failures, checkpoints, evaluations: step times do not hold them")
    out.append("what causes the spread, rank by rank or kernel by kernel: needs a trace of ops")
    return out


def _warnings(
    model: StepModel, bounds: Mapping[str, tuple[float, float]], length_s: float
) -> list[str]:
    """List what is estimated from few data."""
    out = []
    if model.spread.drift > 0.0 and bounds.get("tau_s", (0.0, 0.0))[1] >= length_s:
        what = "is hardly separable from the run effect" if model.n_runs > 1 else "is uncertain"
        out.append(
            f"drift: its memory may be as long as the runs ({format_duration(length_s)}); it {what}"
        )
    if 1 < model.n_runs < FEW_RUNS_FOR_SPREAD:
        out.append(f"run effect: based on {format_count(model.n_runs, 'run')}")
    if 0 < model.stall_counts.sum() < 10:
        out.append(f"stalls: rate and lengths rest on {int(model.stall_counts.sum())}")
    if model.beginning_s.shape[1] and model.n_runs < FEW_RUNS_FOR_SPREAD:
        out.append(f"the beginning is that of {model.n_runs} measured run(s), drawn as it was")
    return out
