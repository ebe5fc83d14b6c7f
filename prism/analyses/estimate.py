"""`prism estimate`: step time and time-to-train of a job, with probabilities."""

import datetime
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.analyses.estimates.libraries import other_libraries
from prism.analyses.estimates.run import DrawnRun, calibration_of, draw_run
from prism.common import sizes
from prism.common.errors import PrismError, option
from prism.common.results import pack_texts
from prism.common.text import format_count
from prism.engine import LANES
from prism.jobs.job import Job, load_job
from prism.jobs.jobspec.frommodel import is_step_model
from prism.jobs.jobspec.values import duration_or_date, parse_date
from prism.models.calibration.model import communication_share
from prism.simulation.estimated import Estimate
from prism.simulation.execution.context import (
    Progress,
    RunContext,
    check_whole,
    fresh_seed,
    make_context,
)
from prism.simulation.jobwarnings import job_doubts, mean_doubts, replica_doubts
from prism.simulation.prepare import Prepared, prepare
from prism.simulation.results import (
    OTHER_LIBRARIES,
    TAIL_SAMPLES,
    job_of,
    make_dataset,
    provenance,
    read_group,
)
from prism.simulation.steps import (
    REPLICATES,
    simulate_step,
)
from prism.workload.described import framework_figures

if TYPE_CHECKING:
    import xarray as xr

    from prism.traces.growing import Reading

Simulated = tuple[Prepared, "xr.Dataset"]
"""A job that was prepared, and its simulated steps."""
MAX_STEPS = 10**15
RUN_REPLICATES = 1_000
_FRAMEWORK = ("framework_name", "framework_named", "framework_others")
_CHOICE = ("column", "unit", "pattern", "where")  # of completed steps


def estimate(
    job: Job | str | Path,
    *,
    replicates: int = REPLICATES,
    run_replicates: int | None = None,
    steps: int | None = None,
    deadline: float | str | datetime.datetime | None = None,
    slowdown_thresholds: Sequence[float] | None = None,
    start: str | datetime.datetime | None = None,
    probability: float | None = None,
    price: float | None = None,
    gpus: int | None = None,
    completed: "str | Path | Reading | None" = None,
    column: str | None = None,
    unit: str | None = None,
    pattern: str | None = None,
    where: Mapping[str, str] | None = None,
    seed: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    engine: str = "auto",
) -> Estimate:
    """Estimate how long a step and the whole run take, with what probability.

    Parameters
    ----------
    job : Job, str or path
        A job, its file, the name of a shipped one, or a fitted model.
    replicates, run_replicates : int
        Monte Carlo repetitions of a step and of the run, of which there are 1,000 by default.
    steps, deadline, slowdown_thresholds, start, probability, price
        Override the job's `run` block: steps of the run [1], time it may take ("60d" or [s]) or the
        date by which it must be done ("2026-01-31", with `start`), thresholds over the ideal step
        time [1], start date, probability of the finish date [1], price of a GPU-hour. Without
        these, and with a job that says nothing of its run, none is drawn.
    gpus : int, optional
        GPUs of a model of step times, which knows none: they fail at a published rate.
    completed : path, optional
        Completed steps of a run in progress, which the rest is conditioned on. Its number of steps
        is then the log's rather than the job's; it ends counted from when the log was written,
        unless `start` is given.
    column, unit, pattern, where
        Which of its columns is the duration, its unit, what finds it in the lines of a log
        (`prism.traces.find_recording`), and which rows to keep.
    seed, threads, progress, engine
        As in `simulate`.

    Returns
    -------
    Estimate
        Samples by replicate, see `prism.simulation.results.VARIABLES`; tables ``quantities``,
        ``parts`` and ``terms``; `prism.summary` gives the figures the command prints.

    Raises
    ------
    PrismError
        Bad input.

    Examples
    --------
    >>> import prism
    >>> result = prism.estimate("pipeline-8x32", replicates=256, steps=1000, deadline="34h", seed=1)
    >>> figures = prism.summary(result)
    >>> round(figures["step_time"]["p95"], 1), round(figures["time_to_train"]["mean"] / 3600, 1)
    (121.5, 33.5)
    >>> figures["finish_by"]["probability"]
    1.0
    """
    options = gather_options(
        replicates, run_replicates, steps=steps, deadline=deadline, start=start, price=price,
        slowdown_thresholds=slowdown_thresholds, probability=probability, seed=seed,
    )  # fmt: skip
    past: dict[str, Any] = {}
    if completed is not None:
        past = {
            "completed": completed, "column": column, "unit": unit, "pattern": pattern,
            "where": dict(where or {}),
        }  # fmt: skip
    if not isinstance(job, Job) and is_step_model(job):
        from prism.models.steptimes.estimate import StepsEstimate

        return StepsEstimate(_from_step_times(job, options | past | {"gpus": gpus}))
    refuse_gpus(gpus)
    job = job if isinstance(job, Job) else load_job(job)
    context = make_context(options["seed"], threads, progress, replicates)
    return Estimate(estimate_job(job, options, past, context, engine))


def refuse_gpus(gpus: int | None) -> None:
    """Refuse GPUs of a job; raises PrismError."""
    if gpus is not None:
        raise PrismError(
            f"{option('gpus')} {gpus}: is for a model of step times; a job has those of its layout"
        )


def gather_options(
    replicates: int = REPLICATES, run_replicates: int | None = None, *, steps: int | None = None,
    deadline: float | str | datetime.datetime | None = None,
    start: str | datetime.datetime | None = None,
    price: float | None = None, slowdown_thresholds: Sequence[float] | None = None,
    probability: float | None = None, seed: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Options of any estimate, as one form of each."""
    return {
        "replicates": replicates, "run_replicates": run_replicates, "steps": steps,
        "deadline": None if deadline is None else parse_deadline(deadline),
        "slowdown_thresholds": slowdown_thresholds,
        "start": start.isoformat() if isinstance(start, datetime.datetime) else start,
        "probability": probability, "price": price,
        "seed": fresh_seed() if seed is None else seed,
    }  # fmt: skip


def estimate_job(
    job: Job, options: dict[str, Any], past: dict[str, Any],
    context: RunContext, engine: str = "auto",
    simulated: Simulated | None = None,
) -> "xr.Dataset":  # fmt: skip
    """Estimate a job, from its simulated steps where they are at hand.

    `past` are the options of completed steps, or none.
    """
    begin, reading = time.perf_counter(), None
    if past:
        from prism.traces.growing import read_log

        choice = {name: past[name] for name in _CHOICE}
        reading = read_log(past["completed"], **choice, per_step=job.work_per_step)
        known = job.n_steps if job.has_run else None
        options = options | {"steps": reading.length(options["steps"], known)}
        past = past | {"completed": reading.times.source}
    call = _settle(job, options, reading) | {"engine": engine} | past
    _check(call)
    drawn = DrawnRun({}, {}, {}, 0, ())

    def draw(found: Simulated) -> None:
        nonlocal drawn
        if call["steps"] is not None:
            drawn = draw_run(*found, call, context, reading)

    # completed steps are judged by the step's parts, so after it
    early = draw if reading is None else None
    if simulated is None:
        simulated = simulate_job(job, call["replicates"], context, engine, early)
    if early is None:
        draw(simulated)
    step, dataset = simulated
    attrs = dataset.attrs | provenance(job, call) | drawn.attrs | {"kind": "estimate"}
    warnings = [
        *job_doubts(job), *drawn.notes, *_warnings(step, call, drawn.n_clusters),
        *replica_doubts(read_group(dataset, "replicas")),
        *(text for x in step.program.added for text in x.doubts(dataset)),
        *mean_doubts(dataset, step.effects.rank.distribution.std),
    ]  # fmt: skip
    if (calibrated := calibration_of(job)) is not None:
        drawn.values["data_error"] = calibrated.error(communication_share(dataset))
        warnings += [f"calibration: {text}" for text in calibrated.report["warnings"]]
    if (framework := framework_figures(job, step.workload)) is not None:
        others = framework.pop("others")
        drawn.coords["framework"] = list(others)
        drawn.values.update(framework=framework, framework_others=list(others.values()))
    if (library := step.effects.library) is not None:
        drawn.values["library"] = {"name": library.name, "kind": library.kind}
    if others := other_libraries(step, dataset, context):
        names, *ratios = zip(*others, strict=True)
        drawn.coords["other_library"] = list(names)
        drawn.values.update(zip(OTHER_LIBRARIES, map(list, ratios), strict=True))
    attrs["wall_seconds"] = time.perf_counter() - begin
    thresholds = call["slowdown_thresholds"]
    slower = [float((dataset.step_time > t * dataset.ideal_step_time).mean()) for t in thresholds]
    values = drawn.values | {"slowdown_probability": slower}
    coords = drawn.coords | {"threshold": thresholds}
    found = make_dataset(values, coords, attrs).merge(pack_texts(warnings=warnings))
    return dataset.merge(found).assign_attrs(attrs)


def simulate_job(
    job: Job, replicates: int, context: RunContext, engine: str = "auto",
    meanwhile: Callable[[Simulated], None] | None = None,
) -> Simulated:  # fmt: skip
    """Simulate the step of a job; `meanwhile` is called with it while its parts are looked for."""
    step = prepare(job, context.seed, engine=engine)
    tell = None if meanwhile is None else lambda dataset: meanwhile((step, dataset))
    return step, simulate_step(step, replicates, context, meanwhile=tell)


def estimate_whole(
    step: Prepared, run: bool, context: RunContext,
    dataset: "xr.Dataset | None" = None, steps: int | None = None,
) -> "xr.Dataset":  # fmt: skip
    """Estimate as `estimate` does by default, without where the time of a step goes.

    From its simulated steps where they are at hand. With `run` the run is drawn also where the job
    says nothing of it.
    """
    job = step.job
    options = dict.fromkeys(("deadline", "slowdown_thresholds", "start", "probability", "price"))
    options |= {"run_replicates": None, "steps": steps or job.n_steps if run else None}
    call = _settle(job, options | {"replicates": REPLICATES, "seed": context.seed})
    if dataset is None:
        dataset = simulate_step(step, REPLICATES, context, parts=False)
    attrs = dataset.attrs | provenance(job, call)
    if not run:
        return dataset.assign_attrs(attrs)
    drawn = draw_run(step, dataset, call, context)
    return dataset.merge(make_dataset(drawn.values, drawn.coords, {})).assign_attrs(
        attrs | drawn.attrs
    )


def _settle(job: Job, options: dict[str, Any], reading: "Reading | None" = None) -> dict[str, Any]:
    """Take from a job's `run` block what was not asked for; no steps where no run is drawn."""
    run = job.run
    usual: dict[str, Any] = {
        "deadline": run.deadline, "slowdown_thresholds": run.slowdown_thresholds,
        "start": None if run.start is None or reading else run.start.isoformat(),
        "probability": run.probability, "price": run.price_per_gpu_hour,
    }  # fmt: skip
    about_run = ("run_replicates", "steps", "deadline", "start", "price")
    if job.has_run or reading or any(options[name] is not None for name in about_run):
        usual |= {"run_replicates": RUN_REPLICATES, "steps": job.n_steps}
    call: dict[str, Any] = {k: usual.get(k) if v is None else v for k, v in options.items()}
    call["deadline"] = seconds_until(call["deadline"], call["start"], reading)
    return call | {"slowdown_thresholds": list(call["slowdown_thresholds"])}


def _from_step_times(path: str | Path, options: dict[str, Any]) -> "xr.Dataset":
    """Estimate from a model of step times, which knows neither GPUs nor their price."""
    if options.pop("price") is not None:
        raise PrismError(
            f"{path}: a model of step times knows no GPUs, so no cost; drop {option('price')}"
        )
    given = {"run_replicates": RUN_REPLICATES} | {k: v for k, v in options.items() if v is not None}
    if given.get("completed") is not None:
        from prism.traces.growing import read_log

        choice = {name: given.pop(name, None) for name in _CHOICE}
        given["completed"] = read_log(given["completed"], **choice)
    given["deadline"] = seconds_until(
        given.get("deadline"), given.get("start"), given.get("completed")
    )
    _check({"steps": 1, "price": None, "probability": 0.9, "slowdown_thresholds": ()} | given)
    from prism.models.steptimes.estimate import estimate_steps

    return estimate_steps(path, **given)


def reproduce(result: Estimate, threads: int | None = None) -> Estimate:
    """Run the call that made a result again, from its own attributes."""
    dataset = result.to_xarray()
    call = json.loads(dataset.attrs["call"])
    again = estimate(job_of(dataset), threads=threads, **call)
    # a job that is rebuilt has no file that its values came from
    sources = {key: value for key, value in dataset.attrs.items() if key == "job_sources"}
    found = again.to_xarray().drop_dims("framework", errors="ignore").assign_attrs(sources)
    return Estimate(found.assign({x: dataset[x] for x in _FRAMEWORK if x in dataset}))


def parse_deadline(value: float | str | datetime.datetime) -> float | datetime.datetime:
    """Read a length of time [s], as "60d", "12h" or a number of seconds; or a date."""
    try:
        found = duration_or_date(value)
        if isinstance(value, str) and re.fullmatch(r"[0-9.e+ ]+", value.lower()):
            raise ValueError(f"has no unit; write {value.strip()}d, {value.strip()}h, or a date")
    except ValueError as error:
        raise PrismError(f"{option('deadline')} {value}: {error}") from error
    return found


def seconds_until(
    deadline: float | datetime.datetime | None, start: str | None, reading: "Reading | None" = None
) -> float | None:
    """Return the time from the start of a run to its deadline [s].

    Of a run in progress without a start that is the time of its steps, and from then on.
    """
    if not isinstance(deadline, datetime.datetime):
        return deadline
    if start is None and reading is not None:
        begun = reading.begun if deadline.tzinfo else reading.begun.replace(tzinfo=None)
        return max((deadline - begun).total_seconds(), 0.0)
    place = f"{option('deadline')} {deadline.isoformat()}"
    if start is None:
        raise PrismError(
            f"{place}: a date needs to know when the run begins; give {option('start')} DATE "
            "(run.start in a job), or the time that it may take, such as 60d"
        )
    begin = parse_date(start)
    if (begin.tzinfo is None) != (deadline.tzinfo is None):
        raise PrismError(f"{place}: one of it and the start {start} has a time zone; give both one")
    if deadline <= begin:
        raise PrismError(f"{place}: is not after the start, {start}; give a later one")
    return (deadline - begin).total_seconds()


def _check(call: dict[str, Any]) -> None:
    """Refuse arguments out of range, all at once."""
    problems = []

    def check(name: str, value: Any, expected: str, low: float, high: float = np.inf) -> None:
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not number or not low <= value <= high:
            problems.append(f"{option(name)} {value!r}: expected {expected}")

    for name in ("replicates", "run_replicates", "steps", "gpus"):
        try:
            if call.get(name) is not None:
                check_whole(name, call[name], 1, MAX_STEPS)
        except PrismError as error:
            problems.append(str(error))
    tiny = float(np.finfo(float).tiny)
    check("probability", call["probability"], "between 0 and 1, such as 0.9", tiny, 1.0 - 1e-16)
    for t in call["slowdown_thresholds"]:
        check("slowdown_thresholds", t, "1 or more, times the ideal", 1.0)
    if call["price"] is not None:
        check("price", call["price"], "0 or more, and finite, per GPU-hour", 0.0, 1e12)
    if call.get("start") is not None:
        try:
            parse_date(call["start"])
        except ValueError as error:
            problems.append(f"{option('start')}: {error}")
    if problems:
        raise PrismError(*problems)
    runs = {"runs": (call["run_replicates"] or 0, sizes.RUN)}
    sizes.check_size(option("run_replicates"), runs, option("run_replicates"))


def _warnings(step: Prepared, call: dict[str, Any], n_clusters: int) -> list[str]:
    """Say which quantiles rest on too few samples, and how many they would need."""
    out = []
    replicates, run_replicates = call["replicates"], call["run_replicates"]
    job, effects = step.job, step.effects
    regime = effects.regime
    if regime.acts:
        if regime.duration_s <= 0.0 and effects.dependence == "full":
            out.append(
                "congestion: drawn anew for every step, so runs vary less than they would; set "
                "variability.effects.regime.duration_s"
            )
        if job.parallelism.token_shards > 1:
            out.append("congestion: not applied to collectives among a sequence's ranks")
    need = round(TAIL_SAMPLES / 0.01)
    if replicates < need:
        out.append(
            f"step time p99: only {format_count(replicates, 'replicate')}, {need:,} needed; "
            f"raise {option('replicates')}"
        )
    if run_replicates is None:
        return out
    if run_replicates < need:
        out.append(
            f"time-to-train p99: only {format_count(run_replicates, 'simulated run')}, {need:,} "
            f"needed: {option('run_replicates')} {need}"
        )
    # p99 is printed with enough draws alone; a finish date may ask for more than p95
    asked = max(0.95, call["probability"]) if call["start"] else 0.95
    need = math.ceil(TAIL_SAMPLES / (1.0 - asked) - 1e-9)
    if n_clusters < need:
        out.append(
            f"time-to-train p{100.0 * asked:g}: only {format_count(n_clusters, 'cluster draw')}, "
            f"{need:,} needed: {option('replicates')} {LANES * need}"
        )
    return out
