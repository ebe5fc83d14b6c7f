"""Fit step times without what changes in them."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from prism.common.agreement import effective_n
from prism.models.changes.find import changes_of_step_times, select_steps
from prism.models.changes.report import report_changes
from prism.models.changes.spans import FEWEST
from prism.models.steptimes.fit import fit_step_times
from prism.models.steptimes.likelihood import N_REPEATS
from prism.models.steptimes.model import StepModel
from prism.traces import StepTimes


def fit_steps(
    times: StepTimes, totals: Mapping[str, float] | None = None, first: int | None = None,
    seed: int = 0, repeats: int = N_REPEATS,
) -> StepModel:  # fmt: skip
    """Fit step times without what changes; a warm-up stays where it is the model's beginning."""
    rows, calm, out, warm = changes_of_step_times(times)
    pauses = [row for row in rows if row["kind"] == "pause" and row["kept"] is None]
    totals = _without(totals, times, calm)
    whole, times = float(times.seconds.sum()) * times.mean_over, calm
    model = fit_step_times(select_steps(times, ~out), totals, first, seed, repeats)
    late = select_steps(times, ~out & ~warm)
    if warm.any():
        of_run = np.unique(times.run[warm], return_counts=True)[1]
        kept = "beginning" if model.beginning_s.shape[1] >= np.median(of_run) else None
        kept = "too_few" if np.unique(late.step).size < FEWEST else kept
        if kept is None:
            model = fit_step_times(late, totals, first, seed, repeats)
        rows = [{**row, "kept": kept} if row["kind"] == "warm_up" else row for row in rows]
    rows = [{**row, "kept": "pause"} if row in pauses else row for row in rows]
    report = report_changes(model.report, rows, whole)
    if any(row["kept"] == "beginning" for row in rows):
        seconds = late.seconds
        found = {f"p{q}": float(np.quantile(seconds, q / 100.0)) for q in (5, 50, 95, 99)}
        found |= {"mean": float(seconds.mean()), "std": float(seconds.std(ddof=1))}
        found["cv"] = found["std"] / found["mean"]
        report["step_time"] = report["step_time"] | found
        report["n_effective"] = effective_n(seconds, late.step, late.run)
    after = [(row["at_step"] - int(model.steps[0])) % row["interval_steps"] for row in pauses]
    k = times.mean_over
    return replace(
        model, report=report,
        pause_interval=np.array([float(row["interval_steps"]) for row in pauses]),
        pause_first=np.array([float(k * (n // k + 1)) for n in after]),
        pause_s=np.array([float(row["duration_s"]) for row in pauses]),
    )  # fmt: skip


def _without(
    totals: Mapping[str, float] | None, times: StepTimes, calm: StepTimes
) -> Mapping[str, float] | None:
    """Take pauses out of measured totals: they are drawn apart."""
    if totals is None:
        return None
    gone = times.mean_over * (times.seconds - calm.seconds)
    return {name: total - float(gone[times.run == name].sum()) for name, total in totals.items()}
