"""Fit step times: from a table or log to a model, with what it shows and what it cannot.

Takes the series apart, fits the spread by time scale, finds what measured totals hold beside the
steps, and reports intervals, goodness of fit, and what cannot be learnt from what is there.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import uniform_filter1d

from prism.common.agreement import effective_n
from prism.common.errors import PrismError
from prism.common.text import format_duration
from prism.models.steptimes.model import PARTS, StepModel
from prism.models.steptimes.predict import WIDER, open_drift, widest, work_of
from prism.models.steptimes.series import Series, first_steps, take_apart
from prism.models.steptimes.spread import (
    MIN_BLOCKS,
    BlockVariances,
    Spread,
    block_variances,
    model_variances,
)
from prism.models.steptimes.spreadfit import (
    MIN_STEPS,
    N_REPEATS,
    allowed_drift,
    fit_spread,
    intervals,
    repeat_fit,
)
from prism.traces import StepTimes

Array = NDArray[np.float64]
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
    """Learn body, stalls, drift and run effect from step times.

    Parameters
    ----------
    times : StepTimes
        Of one job on one system, of one or several runs.
    totals : mapping of str to float, optional
        Measured total of each run [s].
    first : int, optional
        Learn the variation from this many first steps of each run alone; work by step comes
        from all.
    seed : int
        Of the repetitions behind the intervals.
    repeats : int, optional
        Their number; 0 leaves the intervals out.

    Raises
    ------
    PrismError
        There are too few steps.
    """
    _check_enough(times)
    series = take_apart(times, seed)
    seen = _first(series, first, times.source)
    blocks = block_variances(seen.body, seen.profile_share)
    # gaps in the step numbers are time too
    stride = float(np.median(np.diff(series.steps))) if series.steps.size > 1 else 1.0
    step_s = float(series.work.mean())
    gap_s = step_s * max(stride, series.mean_over)
    value_spread = fit_spread(blocks, gap_s)
    again: list[Spread] = []
    allowed: list[Spread] = []
    if repeats != 0:
        again = repeat_fit(
            value_spread, seen.body.shape, gap_s, seen.profile_share, seed + 1, repeats
        )
        if value_spread.drift == 0.0:
            allowed = allowed_drift(blocks, gap_s)
    again, allowed = ([_per_step(s, series) for s in rows] for rows in (again, allowed))
    offset = _offset(series, times, totals)
    n_runs = len(series.runs)
    counts, exposure = _exposure(seen)
    mean_variance = float(model_variances(value_spread, seen.steps.size, gap_s)) / n_runs
    error = np.sqrt(mean_variance + value_spread.run**2 / n_runs)
    model = StepModel(
        series.steps, series.work, series.has_profile, series.mean_over,
        _per_step(value_spread, series), _rows(again), _rows(allowed),
        _residuals(seen.body, value_spread, gap_s),
        seen.stall_s[seen.stall_position >= seen.beginning], counts, exposure,
        seen.excess[: seen.beginning].T, *offset, n_runs, int(seen.steps.size), float(error),
        n_runs > 1, series.threshold, series.grain_s, {},
    )  # fmt: skip
    return replace(model, report=_report(model, times, seen, blocks, gap_s, again))


def _check_enough(times: StepTimes) -> None:
    """Refuse too few steps to learn from; raises PrismError."""
    if times.seconds.size < MIN_VALUES:
        raise PrismError(
            f"{times.source}: {times.seconds.size} step times; expected at least {MIN_VALUES} to "
            "learn a spread from; log more steps"
        )
    if np.unique(times.step).size < MIN_BLOCKS:
        raise PrismError(
            f"{times.source}: runs of {np.unique(times.step).size} steps; expected at least "
            f"{MIN_BLOCKS} steps of a run, to separate its own spread from that between runs; "
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
    return replace(spread, white=spread.white * np.sqrt(k), clock=spread.clock * k)


def _exposure(series: Series) -> tuple[Array, Array]:
    """Stalls after the beginning and the time behind them, by run."""
    late = series.stall_position >= series.beginning
    counts = np.bincount(series.stall_run[late], minlength=len(series.runs)).astype(np.float64)
    known = np.isfinite(series.body[series.beginning :])
    seconds = (known * series.work[series.beginning :, None]).sum(axis=0) * series.mean_over
    return counts, seconds


def _residuals(body: Array, spread: Spread, gap_s: float) -> Array:
    """Distribution of a step's own noise [sample]: level of the neighbourhood out, unit spread."""
    own = float(np.hypot(spread.white, spread.clock))
    known = np.isfinite(body)
    means = np.where(known, body, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    filled = np.where(known, body, means)
    if spread.drift > 0.0:
        window = int(np.clip(spread.tau_s / gap_s, 5, body.shape[0]))
        level = uniform_filter1d(filled, window, axis=0, mode="nearest")
    else:
        level = np.broadcast_to(filled.mean(axis=0), body.shape)
    values = (body - level)[known]
    values = values - values.mean()
    scale = float(values.std())
    if own <= 0.0 or scale <= 0.0:
        return np.zeros(1)
    if values.size > _SAMPLES:
        values = np.quantile(values, (np.arange(_SAMPLES) + 0.5) / _SAMPLES)
    values = values - values.mean()
    return np.asarray(values / values.std())


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
    model: StepModel, times: StepTimes, series: Series, blocks: BlockVariances, gap_s: float,
    again: list[Spread],
) -> dict[str, Any]:  # fmt: skip
    """Collect what a fit found, as plain values."""
    bounds = intervals(model.spread, again) if again else {}
    if model.allowed.size:
        bounds["drift"] = (0.0, float(model.allowed[:, PARTS.index("drift")].max()))
    if not model.run_known:
        bounds.pop("run", None)  # one run bounds nothing
    fitted = model_variances(model.spread, blocks.length * model.mean_over, model.step_s)
    n, m = blocks.length, blocks.n_blocks
    ends = model_variances(model.spread, n * m * model.mean_over, model.step_s)
    expected = (fitted - ends) * m / (m - 1.0)
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
            for name in ("clock", "white", "drift", "run")
        },
        "drift_memory": {
            "tau_s": model.spread.tau_s or None,
            "ci": list(bounds["tau_s"]) if "tau_s" in bounds and model.spread.tau_s else None,
        },
        "drift_not_excluded": _not_excluded(model),
        "stalls": _stalls(model, series),
        "beginning": {
            "steps": int(model.beginning_s.shape[1]),
            "mean_s": float(model.beginning_s.sum(axis=1).mean()),
            "std_s": float(model.beginning_s.sum(axis=1).std(ddof=1)) if model.n_runs > 1 else 0.0,
        },
        "offset": {
            "mean_s": model.offset_s, "std_s": model.offset_std_s, "skips": model.offset_skips,
        },
        "block_variances": [
            {"steps": int(b * model.mean_over), "measured": float(v), "fitted": float(f)}
            for b, v, f in zip(blocks.length, blocks.within, expected, strict=True)
        ],
        "not_identifiable": _not_identifiable(model, series),
        "warnings": _warnings(model, series, gap_s),
        "notes": list(times.notes),
    }  # fmt: skip


def _not_excluded(model: StepModel) -> dict[str, Any]:
    """Say how much wider a drift that was not found could make totals of as many steps."""
    ratio, tau_s = widest(model, work_of(model, model.n_steps * model.mean_over))
    return {"total_std_ratio": ratio, "tau_s": tau_s or None}


def _share(model: StepModel, name: str) -> float:
    """Share of a part in the variance of single steps without stalls."""
    parts = {k: v**2 for k, v in model.spread.as_dict().items() if k != "tau_s"}
    return parts[name] / max(sum(parts.values()), 1e-300)


def _total_shares(model: StepModel) -> dict[str, float]:
    """Share of each part in the variance of a run of as many steps as were seen, no stalls."""
    n, s = model.n_steps * model.mean_over, model.spread
    only = {
        "clock": Spread(clock=s.clock), "white": Spread(white=s.white),
        "drift": Spread(drift=s.drift, tau_s=s.tau_s),
    }  # fmt: skip
    parts = {k: float(model_variances(v, n, model.step_s)) for k, v in only.items()}
    parts["run"] = s.run**2
    whole = max(sum(parts.values()), 1e-300)
    return {k: v / whole for k, v in parts.items()}


def _stalls(model: StepModel, series: Series) -> dict[str, Any]:
    """Rate with its 90 % interval (Garwood), and lengths."""
    from scipy.stats import chi2

    n, exposure = float(model.stall_counts.sum()), float(model.exposure_s.sum())
    low = chi2.ppf(0.05, 2 * n) / 2.0 if n else 0.0
    ci = [low / exposure, chi2.ppf(0.95, 2 * n + 2) / 2.0 / exposure] if exposure else [None, None]
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


def _not_identifiable(model: StepModel, series: Series) -> list[str]:
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
    if series.steps.size < MIN_STEPS:
        out.append(
            f"slow drift: {series.steps.size} steps of a run; {MIN_STEPS} or more are needed"
        )
    ratio, tau_s = widest(model, work_of(model, model.n_steps * model.mean_over))
    if ratio > WIDER:
        out.append(f"slow drift: {open_drift(ratio, tau_s)} a run as long")
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


def _warnings(model: StepModel, series: Series, gap_s: float) -> list[str]:
    """Say what rests on little."""
    out = []
    length_s = series.steps.size * gap_s
    if model.spread.drift > 0.0 and model.spread.tau_s > 0.25 * length_s:
        what = "is hardly separable from the run effect" if model.n_runs > 1 else "is uncertain"
        out.append(
            f"drift: its memory ({format_duration(model.spread.tau_s)}) is as long as the runs "
            f"({format_duration(length_s)}); it {what}"
        )
    if 1 < model.n_runs < FEW_RUNS_FOR_SPREAD:
        out.append(f"run effect: rests on {model.n_runs} runs")
    if 0 < model.stall_counts.sum() < 10:
        out.append(f"stalls: rate and lengths rest on {int(model.stall_counts.sum())}")
    if model.beginning_s.shape[1] and model.n_runs < FEW_RUNS_FOR_SPREAD:
        out.append(f"the beginning is that of {model.n_runs} measured run(s), drawn as it was")
    return out
