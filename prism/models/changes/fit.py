"""Fit step times without what changes in them."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from prism.common.agreement import effective_n
from prism.models.changes.find import Changes, find_changes
from prism.models.changes.report import report_changes
from prism.models.steptimes.fit import fit_step_times
from prism.models.steptimes.likelihood import N_REPEATS
from prism.models.steptimes.model import StepModel
from prism.traces import StepTimes


def fit_steps(
    times: StepTimes, totals: Mapping[str, float] | None = None, first: int | None = None,
    seed: int = 0, repeats: int = N_REPEATS,
) -> StepModel:  # fmt: skip
    """Fit step times without what changes; a warm-up stays where it is the model's beginning."""
    found = find_changes(times).settled()
    pauses = [row for row in found.rows if row["kind"] == "pause" and row["kept"] is None]
    totals = _without(totals, found)
    model = fit_step_times(found.body, totals, first, seed, repeats)
    if found.warm.any():
        if model.beginning_s.shape[1] >= np.median(found.warm_up_of_run):
            found = found.keep("warm_up", "beginning")
        else:
            model = fit_step_times(found.late, totals, first, seed, repeats)
    rows = found.keep("pause", "pause").rows
    whole = float(times.seconds.sum()) * times.mean_over
    report = report_changes(model.report, rows, whole)
    if any(row["kept"] == "beginning" for row in rows):
        late = found.late
        seconds = late.seconds
        figures = {f"p{q}": float(np.quantile(seconds, q / 100.0)) for q in (5, 50, 95, 99)}
        figures |= {"mean": float(seconds.mean()), "std": float(seconds.std(ddof=1))}
        figures["cv"] = figures["std"] / figures["mean"]
        report["step_time"] = report["step_time"] | figures
        report["n_effective"] = effective_n(seconds, late.step, late.run)
    after = [(row["at_step"] - int(model.steps[0])) % row["interval_steps"] for row in pauses]
    k = times.mean_over
    return replace(
        model, report=report,
        pause_interval=np.array([float(row["interval_steps"]) for row in pauses]),
        pause_first=np.array([float(k * (n // k + 1)) for n in after]),
        pause_s=np.array([float(row["duration_s"]) for row in pauses]),
    )  # fmt: skip


def _without(totals: Mapping[str, float] | None, found: Changes) -> Mapping[str, float] | None:
    """Take pauses out of measured totals: they are drawn apart."""
    if totals is None:
        return None
    times = found.times
    gone = times.mean_over * (times.seconds - found.calm.seconds)
    return {name: total - float(gone[times.run == name].sum()) for name, total in totals.items()}
