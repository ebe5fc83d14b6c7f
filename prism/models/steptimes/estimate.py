"""`prism estimate` of a model of step times: a step and the run, from scratch or in progress.

The result has the variables of any estimate, as far as step times tell them; GPUs, their price and
what happens on them are not known here, but for the failures of a given number. Left out:
evaluations.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import prism
from prism.common.arrays import Array
from prism.common.errors import PrismError, option
from prism.common.results import pack_texts, read_texts
from prism.common.text import format_count
from prism.jobs.jobspec.run import FAILURES_SOURCE
from prism.models.steptimes.model import StepModel, load_step_model
from prism.models.steptimes.predict import (
    Drawn,
    draw_runs,
    draw_steps,
    generator,
    total_cv,
    work_of,
)
from prism.models.steptimes.progress import progress, steps_known
from prism.models.steptimes.runs import ProgressPosterior
from prism.simulation.estimated import Estimate
from prism.simulation.results import SCHEMA, make_dataset, read_group
from prism.simulation.runs.build import describe_failures, effective_share
from prism.simulation.runs.parts import RunModel
from prism.simulation.summary import run_end, run_progress, run_terms, spread
from prism.traces.growing import Reading, count_done, read_log

if TYPE_CHECKING:
    import xarray as xr

KIND = "steps_estimate"
DRAWS = 4096  # of level and drift of a run in progress at most
LANES = 64  # step replicates of one run, as those of one cluster elsewhere
_MOST_PLACES = 256  # sets of places; runs share one where there are more


def estimate_steps(
    path: str | Path,
    *,
    replicates: int,
    run_replicates: int,
    seed: int,
    steps: int | None = None,
    deadline: float | None = None,
    slowdown_thresholds: Sequence[float] = (1.05, 1.1, 1.2),
    start: str | None = None,
    probability: float = 0.9,
    completed: str | Path | Reading | None = None,
    column: str | None = None,
    unit: str | None = None,
    pattern: str | None = None,
    where: Mapping[str, str] | None = None,
    gpus: int | None = None,
) -> "xr.Dataset":
    """Estimate a step and the whole run from a model of step times.

    Options are those of `prism.estimate`; 64 steps share a run. A run has as many steps as a log of
    `completed` ones says, else as were seen; `gpus`, where known, fail at a published rate.
    """
    begin = time.perf_counter()
    model, reading = load_step_model(path), None
    if completed is not None:
        reading = read_log(completed, column=column, where=where, unit=unit, pattern=pattern)
        steps = steps or reading.total
    n_steps = model.n_steps * model.mean_over if steps is None else steps
    if n_steps < 1:
        raise PrismError(
            f"{option('steps')} {n_steps}: expected at least 1; leave it out for as many as seen"
        )
    if reading is None:
        drawn, past = draw_runs(model, n_steps, run_replicates, seed, None, gpus), None
    else:
        drawn, past = _draw_rest(model, reading, steps, (n_steps, run_replicates, seed), gpus)
    found = lay_out(
        model, n_steps, drawn, past, reading, replicates=replicates, seed=seed, gpus=gpus,
        deadline=deadline, slowdown_thresholds=slowdown_thresholds, start=start,
        probability=probability, warnings=_warnings(model, n_steps),
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    return found.assign_attrs(job_name=Path(path).stem, wall_seconds=seconds)


def lay_out(
    model: StepModel, n_steps: int, drawn: Drawn, past: ProgressPosterior | None,
    reading: Reading | None, *, replicates: int, seed: int, gpus: int | None = None,
    deadline: float | None = None, slowdown_thresholds: Sequence[float] = (),
    start: str | None = None, probability: float = 0.9, warnings: Sequence[str] = (),
) -> "xr.Dataset":  # fmt: skip
    """Lay out drawn runs, and draw steps beside them; options as in `estimate_steps`."""
    sample = _sample_steps(model, n_steps, replicates, seed)
    values = _values(model, n_steps, sample, drawn, slowdown_thresholds, deadline)
    notes: tuple[str, ...] = ()
    if past is not None:
        assert reading is not None
        notes = reading.times.notes
        warnings = [*past.notes[len(notes) :], *warnings]
        values |= past.figures() | reading.figures()
        values["time_left"] = drawn.total - past.elapsed_s - drawn.terms["offset"]
    if gpus is not None:
        values |= {
            "ettr": effective_share(drawn.terms, drawn.total), "run_failures": drawn.failures
        }  # fmt: skip
    call = {"steps": n_steps, "probability": probability, "start": start, "seed": seed}
    values |= {
        "data_error": data_error(model, n_steps),
        "failure_model": failures_of(drawn.model, gpus),
    }
    attrs = {
        "kind": KIND, "schema": SCHEMA, "prism_version": prism.__version__, "seed": str(seed),
        "call": json.dumps(call), "steps": n_steps,
    }  # fmt: skip
    coords = {"threshold": list(slowdown_thresholds), "term": list(drawn.terms)}
    return make_dataset(values, coords, attrs).merge(pack_texts(notes=notes, warnings=warnings))


def failures_of(model: RunModel, gpus: int | None) -> dict[str, Any]:
    """Say what stops a run of this many GPUs, or that their number is not known."""
    if gpus is None:
        return {"per_1000_node_days": 0.0, "source": "gpus"}
    return describe_failures(model, FAILURES_SOURCE, ("rate", "down", "checkpoint"))


def _draw_rest(
    model: StepModel, reading: Reading, steps: int | None, call: tuple[int, int, int],
    gpus: int | None,
) -> tuple[Drawn, ProgressPosterior]:  # fmt: skip
    """Draw what is left of a run in progress; steps that the fit left out are as long as others."""
    (n_steps, n_runs, seed), done = call, count_done(reading.times)[1]
    known = n_steps if steps is None else steps_known(model, steps)
    past = progress(model, reading.times, known, min(n_runs, DRAWS), seed)
    drawn = draw_runs(model, known, n_runs, seed, past, gpus)
    out = 0 if steps is None else max(0, steps - done - (known - past.done))
    left = drawn.total - past.elapsed_s - drawn.terms["offset"]
    left_out = out / (known - past.done) * left
    terms = drawn.terms | ({"left_out": left_out} if out else {})
    return replace(drawn, total=drawn.total + left_out, terms=terms), replace(past, done=done)


def _values(
    model: StepModel, n_steps: int, sample: Array, drawn: Drawn, thresholds: Sequence[float],
    deadline: float | None,
) -> dict[str, Any]:  # fmt: skip
    """Lay out result variables of drawn steps [replicate; s] and runs, by name."""
    ideal = model.step_s
    values: dict[str, Any] = {
        "step_time": sample, "cluster_idx": np.arange(sample.size) // LANES,
        "time_to_train": drawn.total, "run_cluster_idx": np.arange(drawn.total.size),
        "run_term_time": np.column_stack(list(drawn.terms.values())),
        "ideal_step_time": ideal, "ideal_time_to_train": _typical(model, n_steps),
        "slowdown_probability": [float((sample > t * ideal).mean()) for t in thresholds],
    }  # fmt: skip
    return values if deadline is None else values | {"deadline": deadline}


def _typical(model: StepModel, n_steps: int) -> float:
    """Sum of the steps' typical times [s]."""
    mean, profile = work_of(model, 0, n_steps)
    return mean * (n_steps if profile is None else float(profile.sum()))


def _sample_steps(model: StepModel, n_steps: int, replicates: int, seed: int) -> Array:
    """Draw steps at places spread over runs, 64 from each [replicate; s]."""
    n_runs = -(-replicates // LANES)
    n_values = max(1, n_steps // model.mean_over)
    rng = generator(seed, 30)
    at_once = -(-n_runs // _MOST_PLACES)
    out = []
    for lo in range(0, n_runs, at_once):
        places = ((np.arange(LANES) + rng.random(LANES)) * (n_values / LANES)).astype(np.int64)
        out.append(draw_steps(model, places, min(at_once, n_runs - lo), seed + 7919 * lo))
    return np.concatenate(out).reshape(-1)[:replicates]


def data_error(model: StepModel, n_steps: int) -> dict[str, float]:
    """Say what the fit leaves open.

    Returns relative errors of the mean total and of its standard deviation, and how many times as
    large that may be (95 %) [1].
    """
    fitted = total_cv(model, model.spread, n_steps)
    std = np.array([total_cv(model, s, n_steps) for s in model.spreads()])
    most = float(np.quantile(std, 0.95)) / fitted if fitted > 0.0 else 1.0
    return {
        "mean": model.step_error,
        "std": float(std.std() / std.mean()) if std.size > 1 and std.mean() > 0.0 else 0.0,
        "std_at_most": max(1.0, most),
    }


def _warnings(model: StepModel, n_steps: int) -> list[str]:
    """Say what the prediction takes for granted."""
    out = []
    seen = model.n_steps * model.mean_over
    whole = model.work.size * model.mean_over
    if model.has_profile and n_steps > whole:
        out.append(
            f"work by step is known for {format_count(whole, 'step')}; later ones are assumed "
            "like the last "
            "fifth of them: a schedule that changes further is not modelled"
        )
    if n_steps > 3 * seen:
        out.append(
            f"prediction of {format_count(n_steps, 'step')} from runs of {seen}: what varies "
            "more slowly than "
            "these runs last is not in the model"
        )
    if not model.run_known:
        out.append("one run was fitted: how much runs differ is not in the spread")
    return out


class StepsEstimate(Estimate):
    """An estimate from a model of step times, which knows no kernels."""

    def figures(self) -> dict[str, Any]:
        """Give all figures, see `Result.figures`."""
        return summarize_steps(self.dataset)


def summarize_steps(dataset: "xr.Dataset") -> dict[str, Any]:
    """Figures of an estimate from step times, as `prism estimate --json` prints them."""
    call = json.loads(dataset.attrs["call"])
    runs = np.asarray(dataset.time_to_train, np.float64)
    total = spread(runs, np.arange(runs.size))
    total["within_cluster_std"], total["between_cluster_std"] = 0.0, total["std"]
    out: dict[str, Any] = {
        "job": dataset.attrs["job_name"], "seed": int(dataset.attrs["seed"]),
        "replicates": int(dataset.sizes["replicate"]), "run_replicates": int(runs.size),
        "steps": int(call["steps"]), "ideal_step_time": float(dataset.ideal_step_time),
        "step_time": spread(
            np.asarray(dataset.step_time, np.float64), np.asarray(dataset.cluster_idx)
        ),
        "time_to_train": total,
        "slowdown": {
            f"{t:.10g}": float(p) for t, p in zip(
                dataset.threshold.values, dataset.slowdown_probability.values, strict=True)
        },
        **run_terms(dataset, runs), **run_end(dataset, call, runs), **run_progress(dataset),
        "data_error": read_group(dataset, "data_error"),
        **{name: read_texts(dataset, name) for name in ("notes", "warnings")},
    }  # fmt: skip
    out["wall_seconds"] = float(dataset.attrs["wall_seconds"])
    return out
