"""Fit step times without what changes in them."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

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
    rows, out, warm = changes_of_step_times(times)
    model = fit_step_times(select_steps(times, ~out), totals, first, seed, repeats)
    late = select_steps(times, ~out & ~warm)
    if warm.any():
        of_run = np.unique(times.run[warm], return_counts=True)[1]
        kept = "beginning" if model.beginning_s.shape[1] >= np.median(of_run) else None
        kept = "too_few" if np.unique(late.step).size < FEWEST else kept
        if kept is None:
            model = fit_step_times(late, totals, first, seed, repeats)
        rows = [{**row, "kept": kept} if row["kind"] == "warm_up" else row for row in rows]
    report = report_changes(model.report, rows, float(times.seconds.sum()) * times.mean_over)
    if any(row["kept"] == "beginning" for row in rows):
        seconds = late.seconds
        found = {f"p{q}": float(np.quantile(seconds, q / 100.0)) for q in (5, 50, 95, 99)}
        found |= {"mean": float(seconds.mean()), "std": float(seconds.std(ddof=1))}
        found["cv"] = found["std"] / found["mean"]
        report["step_time"] = report["step_time"] | found
    return replace(model, report=report)
