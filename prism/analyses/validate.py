"""`prism validate`: predict what was held out, and say how far off the prediction is.

Each kind of input gives a prediction, its baselines and how the comparison is repeated in
simulation (`prism.analyses.validation`); one procedure compares them and finds the p-value.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism.analyses.validation.against_measured import (
    CHANGES,
    ERRORS,
    FIGURES,
    TAKEN,
    TESTED,
    TEXTS,
    Call,
    ValidationCase,
    compare_to_measured,
)
from prism.analyses.validation.jobs import job_case
from prism.analyses.validation.steps import model_case, split_case
from prism.analyses.validation.trace import trace_case
from prism.common.errors import PrismError, option
from prism.common.results import Result, read_figures, read_texts
from prism.jobs.job import Job, load_job
from prism.jobs.jobspec.frommodel import is_step_model, model_attrs
from prism.models.calibration.model import is_calibrated
from prism.models.changes.find import choose_steps, find_changes
from prism.models.changes.report import Row, warn
from prism.models.steptimes.model import load_step_model
from prism.simulation.execution.context import Progress, make_context
from prism.traces import StepTimes, find_recording, read_step_times, read_totals, read_trace

if TYPE_CHECKING:
    import pandas as pd

_BASELINE = frozenset(f.name for f in ERRORS.fields) - {
    "name", "n_runs", *(f"{name}_detectable_80" for name in TESTED)
}  # fmt: skip
QUANTITIES = ("step_time", "time_to_train")


def validate(
    job: Job | str | Path | None = None,
    *,
    trace: str | Path | Sequence[str | Path] | None = None,
    train: str | int | None = None,
    measured: str | Path | None = None,
    model: str | Path | None = None,
    column: str | None = None,
    unit: str | None = None,
    pattern: str | None = None,
    where: Mapping[str, str] | None = None,
    totals: str | None = None,
    quantity: str = "step_time",
    dependence: str | None = None,
    replicates: int = 20_000,
    bootstrap: int = 100,
    skip: int | None = None,
    steps: str | None = None,
    seed: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> "Validation":
    """Compare a prediction with measurements that it was not fitted on.

    Parameters
    ----------
    job : Job, str or path, optional
        A job or a fitted model, with `measured`.
    trace : path or sequence of paths, optional
        A trace, or step times, whose one part is fitted and the other predicted; excludes `job`.
    train : str or int, optional
        Which part of the trace is fitted: ``first-half`` (the default), ``even``, or a number of
        steps.
    measured : path, optional
        Measured step times.
    model : path, optional
        A fitted model, alone or as the variability of `job`.
    column, unit, pattern, where
        Choose from a wider table, say the unit, or find step times in a log's lines; see
        `prism.traces.read_step_times`.
    totals : str, optional
        "FILE:COLUMN" with measured totals per run [s].
    quantity : str
        ``step_time``, or with `measured` also ``time_to_train`` (one value per run).
    dependence : str, optional
        ``full``, or ``none`` for ops independent of each other; the job's own where None.
    replicates : int
        Predicted values.
    bootstrap : int
        Repetitions of the comparison in simulation behind the p-value; 0 for none.
    skip : int, optional
        First steps to leave out, of each run.
    steps : str, optional
        ``A:B``, the numbers of the first and the last step to take.
    seed, threads, progress
        As in `simulate`.

    Returns
    -------
    Validation
        Samples [s], and with refits the band of the predicted CDF; table ``errors``.

    Raises
    ------
    PrismError
        Neither or both of `trace` and `measured` are given, or bad input.

    Examples
    --------
    >>> import prism
    >>> found = prism.validate(trace="experiments/samples/trace.csv", bootstrap=19, seed=1)
    >>> found.measured.size, float(found.errors.p50_error["prediction"].round(2))
    (4, 0.0)
    """
    target = job if job is not None else model
    if trace is None and (measured is None or target is None):
        raise PrismError(f"give {option('trace')}, or a job or a model with {option('measured')}")
    if trace is not None and (measured is not None or target is not None):
        raise PrismError(
            f"{option('trace')} excludes a job, a model and {option('measured')}: its one part "
            "predicts the other"
        )
    if dependence not in (None, "full", "none"):
        raise PrismError(f"dependence: {dependence!r}; expected full or none")
    if bootstrap < 0:
        raise PrismError(f"bootstrap: {bootstrap} repetitions; expected 0 (no p-value) or more")
    if quantity not in QUANTITIES:
        raise PrismError(f"quantity: {quantity!r}; expected {' or '.join(QUANTITIES)}")
    context = make_context(seed, threads, progress, replicates)
    call = Call(quantity, dependence, replicates, bootstrap, context)
    if trace is not None:
        if quantity != "step_time" or totals is not None:
            raise PrismError(
                f"{option('trace')} holds steps, not runs: {option('quantity')} time_to_train and "
                f"{option('totals')} need a job or a model with {option('measured')}"
            )
        chosen = {"column": column, "unit": unit, "pattern": pattern, "where": where}
        case = _split(trace, str(train or "first-half"), chosen, skip, steps, call)
        return Validation(compare_to_measured(case, call))
    if train is not None:
        raise PrismError(f"{option('train')} belongs to {option('trace')}: nothing is fitted here")
    assert measured is not None
    target = _with_model(job, model)
    per_step = target.work_per_step if isinstance(target, Job) else None
    times = read_step_times(
        measured, column=column, where=where, unit=unit, per_step=per_step, pattern=pattern
    )
    times = choose_steps(times, skip, steps)
    by_run = quantity == "time_to_train" and totals is not None
    known = read_totals(str(totals), where=where) if by_run else None
    times, changes = (times, []) if quantity == "time_to_train" else _settled(times, target)
    case = (
        job_case(target, times, known, call) if isinstance(target, Job)
        else model_case(target, times, known, call)
    )  # fmt: skip
    warnings = [*map(warn, changes), *case.facts.get("warnings", ())]
    return Validation(
        compare_to_measured(case, call, source=str(measured), changes=changes, warnings=warnings)
    )


def _settled(times: StepTimes, target: Job | str | Path) -> tuple[StepTimes, list[Row]]:
    """Leave a warm-up out, as `fit` does, unless it is the model's beginning; say what changes."""
    found = find_changes(times).settled()
    early = found.warm_up_of_run.max(initial=0)
    has_beginning = not isinstance(target, Job) and (
        load_step_model(target).beginning_s.shape[1] >= early
    )
    kept = {"warm_up": "beginning" if has_beginning else None}
    rows = [{**r, "kept": r["kept"] or kept.get(r["kind"], "compared")} for r in found.rows]
    return (times if has_beginning else found.without_warm_up), rows


def _split(
    trace: str | Path | Sequence[str | Path], train: str, chosen: Mapping[str, Any],
    skip: int | None, steps: str | None, call: Call,
) -> ValidationCase:  # fmt: skip
    """Fit one part of a recording and predict the other."""
    found = find_recording(trace, chosen["pattern"])
    if found.has_steps(chosen["column"]):
        times = choose_steps(read_step_times(found, **chosen), skip, steps)
        return split_case(times, str(trace), train, call)
    if any(chosen.values()):
        names = f"{option('column')}, {option('unit')} and {option('where')}"
        raise PrismError(f"{names} choose among step times; a trace of ops has none")
    return trace_case(choose_steps(read_trace(found), skip, steps), train, call)


def _with_model(job: Job | str | Path | None, model: str | Path | None) -> Job | str | Path:
    """Return the job, with the model's effects where one is given; a model of steps as it is."""
    if job is None or model is None:
        target = model if job is None else job
        assert target is not None
        return target if isinstance(target, Job) or is_step_model(target) else load_job(target)
    if not isinstance(job, Job):
        return load_job(job, [f"variability.model={model}"])
    key = "library" if is_calibrated(model) else "model"
    base, named_ = model_attrs(model).get("base_library"), job.variability.library
    if key == "library" and named_ not in (None, base, str(model)):
        raise PrismError(
            f"{job.source}: variability.library: {named_}, but {model} was calibrated over {base}; "
            f"expected {base}, or a calibration over {named_}"
        )
    variability = job.variability.model_copy(update={key: str(model)})
    return job.model_copy(update={"variability": variability})


class Validation(Result):
    """A prediction against measurements that it has not seen."""

    _needs = ("ks",)

    def figures(self) -> dict[str, Any]:
        """Give all figures, see `Result.figures`."""
        data = self.dataset
        first, *others = ERRORS.rows(data)
        unknown = {"copy": None, "independent": None}
        baselines = {
            row["name"]: {k: v for k, v in row.items() if k in _BASELINE} for row in others
        }
        first.pop("name")
        seen = {name: first.pop(f"{name}_detectable_80", None) for name in TESTED}
        found = {**first, "detectable_80": seen, "baselines": unknown | baselines}
        found |= read_figures(FIGURES, data) | {name: read_texts(data, name) for name in TEXTS}
        if "source" in found:
            found["measured"] = found.pop("source")
        if taken := read_figures(TAKEN, data, "taken_"):
            found["taken"] = taken
        found["changes"] = [
            {k: v for k, v in row.items() if v is not None or k == "kept"}
            for row in CHANGES.rows(data)
        ]
        return found

    @cached_property
    def errors(self) -> "pd.DataFrame":
        """Errors of the prediction and of the baselines: relative errors and distances [1]."""
        return ERRORS.frame(ERRORS.rows(self.dataset))
