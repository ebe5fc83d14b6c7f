"""`prism timeline`: the median and the p99 step, or a measured one beside its ideal, op by op.

Of a simulated job the replicates nearest the percentiles are run again with the same keys, so that
their step times are the sampled ones; of a trace the median measured step replays through its
graph. Left out: the file for Perfetto (`prism.analyses.timelines.perfetto`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import prism
from prism.analyses.timelines.choose import Wanted, choose_rows
from prism.analyses.timelines.jobs import JobPlayer, check_size
from prism.analyses.timelines.played import PlayedStep, Row
from prism.analyses.timelines.table import Sheets
from prism.analyses.timelines.traces import play_trace
from prism.cluster.nodemap import Placement
from prism.common.arrays import Array
from prism.common.errors import PrismError, option
from prism.common.netcdf import wrap_corrupt_file
from prism.common.resultfiles import load_dataset
from prism.common.results import Columns, Field, Result, pack_texts, read_texts
from prism.common.text import time_unit
from prism.engine import LANES
from prism.jobs.job import Job, load_job
from prism.jobs.jobspec.frommodel import model_attrs
from prism.jobs.jobspec.yaml import shipped_jobs
from prism.models.changes.find import choose_steps
from prism.simulation.execution.context import Progress, make_context
from prism.simulation.prepare import Prepared, prepare
from prism.simulation.results import job_of, provenance
from prism.simulation.steps import run_blocks
from prism.traces import Trace, find_recording, read_trace

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

REPLICATES = 4096
"""Steps that percentiles are taken of, where no result has its own: 41 of them lie beyond p99."""
PERCENTILES = (50.0, 99.0)

MODELS = ("trace", "calibrated", "steps")
"""Kinds of files that are models; the last has no steps to show, and `load_job` says so."""

What = Job | str | Path | Sequence[str | Path]


def timeline(
    what: What,
    *,
    percentiles: Sequence[float] | None = None,
    ideal: bool = False,
    step: int | None = None,
    step_range: str | None = None,
    skip: int | None = None,
    steps: str | None = None,
    replicates: int | None = None,
    seed: int | None = None,
    threads: int | None = None,
    ranks: Sequence[int] | None = None,
    replicas: Sequence[int] | None = None,
    stages: Sequence[int] | None = None,
    overrides: Sequence[str] = (),
    progress: Progress | None = None,
) -> Timeline:
    """Say when every op of some steps starts and ends, and what ranks wait for meanwhile.

    Parameters
    ----------
    what : Job, str, path or sequence of paths
        A job, its file, the name of a shipped one, a fitted trace or calibrated model, a result of
        ``estimate``, or a trace (a file, a folder, or files of one job's ranks).
    percentiles : sequence of float, optional
        Of the simulated step time [percent]; 50 and 99 where None.
    ideal : bool
        Of a job also the step with every effect at 1.
    step : int, optional
        Of a trace: which step; the median measured one where None.
    step_range : str, optional
        Of a profiler's trace: what the ranges that are steps are called; see
        `prism.analyses.replay`.
    skip, steps
        Of a trace: first steps to leave out; ``A:B``, the first and the last number to choose from.
    replicates, seed, threads
        Of a job as in ``simulate``; 4,096 replicates, of a result those that it has of them.
    ranks, replicas, stages : sequence of int, optional
        Which to show; all where they are few, else some replicas.
    overrides : sequence of str
        ``key=value`` settings of a job.
    progress : callable, optional
        Called with (blocks done, blocks asked for).

    Returns
    -------
    Timeline
        ``start``, ``duration``, ``nominal`` [event] in s, ``busy`` [row] in s, and more; table
        ``waits``. `prism.to_perfetto` gives the file.

    Raises
    ------
    PrismError
        Bad input, or a step too large.

    Examples
    --------
    >>> import prism
    >>> steps = prism.timeline("experiments/samples/trace.csv", step=3)
    >>> steps.start.dims, steps.start.attrs["units"]
    (('event',), 's')
    """
    wanted = Wanted(*(None if x is None else tuple(x) for x in (replicas, stages, ranks)))
    if not isinstance(what, Job | str | Path) and len(what) == 1:
        what = what[0]
    trace = _read(what, step_range)
    if trace is not None:
        given = {
            "percentiles": percentiles if percentiles is None else tuple(percentiles),
            "replicates": replicates, "ideal": ideal, "overrides": tuple(overrides),
        }  # fmt: skip
        _refuse(trace.source, "a trace, whose steps were measured", given)
        played = play_trace(choose_steps(trace, skip, steps), step)
        about = {"source": trace.source, "prism_version": prism.__version__}
        return Timeline(_lay_out(played, wanted, about, trace.notes))
    of_trace = {"step": step, "step_range": step_range, "skip": skip, "steps": steps}
    _refuse(str(what), "a job, whose steps are simulated", of_trace)
    job, n, seed = _job(what, replicates, seed, overrides)
    context = make_context(seed, threads, progress, n)
    prepared = prepare(job, context.seed, engine="exact")
    check_size(prepared)
    blocks = range(-(-n // LANES))
    times = run_blocks(prepared.program, blocks, context)[0]
    shown_steps = _play(
        JobPlayer(prepared, context.seed), times.reshape(-1)[:n].astype(np.float64),
        PERCENTILES if percentiles is None else percentiles, ideal,
    )  # fmt: skip
    call = {"replicates": n, "seed": context.seed}
    attrs = provenance(job, call) | {"replicates": n, "source": job.name}
    return Timeline(_lay_out(shown_steps, wanted, attrs, (), _rank_rows(prepared)))


WAITS = Columns("wait", (
    Field("step", "text", "title of the step"),
    Field("row", "text", "who waits"),
    Field("cause", "text", "why"),
    Field("for", "text", "for whom, or for which kind of op"),
    Field("seconds", "s", "how long"),
    Field("share", "1", "share of the step"),
), numbered=True)  # fmt: skip


class Timeline(Result):
    """When every op of some steps starts and ends, and who waits for whom."""

    def is_whole(self) -> bool:
        """See `Result.is_whole`."""
        return "wait_seconds" in self and "notes" not in self.attrs

    def figures(self) -> dict[str, Any]:
        """Give all figures, see `Result.figures`."""
        return _figures(self.dataset)

    @cached_property
    def waits(self) -> pd.DataFrame:
        """Who waits for whom, why and how long [s], the longest of each step first."""
        rows = [
            {"step": step["title"], **wait}
            for step in self.figures()["steps"]
            for wait in sorted(step["waits"], key=lambda wait: -wait["seconds"])
        ]
        return WAITS.frame(rows)


def _figures(timeline: xr.Dataset) -> dict[str, Any]:
    def columns(*names: str) -> Iterator[tuple[Any, ...]]:
        return zip(*(timeline[name].values.tolist() for name in names), strict=True)

    steps, rows = json.loads(timeline.attrs["steps"]), list[dict[str, Any]]()
    events = np.bincount(timeline["row_step"].values[timeline["event_row"].values])
    for about, n in zip(steps, events.tolist(), strict=True):
        about |= {"events": n, "rows": [], "waits": []}
    places = columns("row_step", "row_label", "role", "replica", "stage", "member", "busy")
    for i, label, role, replica, stage, member, busy in places:
        rows.append({
            "label": label, "role": role or None, "replica": replica, "stage": stage,
            "member": member, "busy": busy, "busy_share": busy / steps[i]["step_time"], "waits": {},
        })  # fmt: skip
        steps[i]["rows"].append(rows[-1])
    of_row = timeline["row_step"].values
    for k, cause, whom, seconds in columns("wait_row", "wait_cause", "wait_for", "wait_seconds"):
        about = steps[of_row[k]]
        length = {"seconds": seconds, "share": seconds / about["step_time"]}
        of_cause = rows[k]["waits"].setdefault(cause, dict.fromkeys(length, 0.0))
        of_cause.update({name: of_cause[name] + value for name, value in length.items()})
        wait = {"row": rows[k]["label"], "cause": cause, "for": whom or None}
        about["waits"].append(wait | length)
    numbers = ("seed", "replicates")
    return {
        "source": timeline.attrs["source"],
        **{name: int(timeline.attrs[name]) for name in numbers if name in timeline.attrs},
        "events": int(timeline.sizes["event"]), "flows": int(timeline.sizes["message"]),
        "steps": steps, "notes": read_texts(timeline, "notes"),
    }  # fmt: skip


def _refuse(source: str, kind: str, given: dict[str, Any]) -> None:
    """Refuse options that say nothing about what is at hand."""
    for argument, value in given.items():
        if value is not None and value is not False and value != ():  # 0 is a choice
            raise PrismError(
                f"{source}: is {kind}: {option(argument)} does not apply to it; leave it out"
            )


# ------------------------------------------------------------------------------------------ traces
def _read(what: What, step_range: str | None) -> Trace | None:
    """Read a trace; None for all else."""
    if isinstance(what, Job):
        return None
    if not isinstance(what, str | Path):
        return read_trace([str(x) for x in what], step_range)
    path = Path(what)
    known = str(what) in shipped_jobs() or path.suffix in (".yaml", ".yml", ".nc")
    if known or not path.exists():
        return None
    found = find_recording(path)
    if found.holds == "step_times":
        raise PrismError(
            f"{what}: step times alone, without the ops in them; give a job, a trace of ops, or "
            "what prism fit made of one"
        )
    return read_trace(found, step_range) if found.holds == "trace" else None


# -------------------------------------------------------------------------------------------- jobs
def _job(
    what: Any, replicates: int | None, seed: int | None, overrides: Sequence[str]
) -> tuple[Job, int, int | None]:
    """Find the job, and how many replicates are drawn with which seed: a result has its own."""
    is_file = isinstance(what, str | Path) and Path(what).suffix == ".nc" and Path(what).is_file()
    if isinstance(what, Job) or not is_file or model_attrs(what).get("kind") in MODELS:
        job = what if isinstance(what, Job) else load_job(what, overrides)
        return job, REPLICATES if replicates is None else replicates, seed
    given = {"replicates": replicates, "seed": seed, "overrides": tuple(overrides)}
    _refuse(str(what), "a result, which has its own call", given)
    result = load_dataset(what)
    with wrap_corrupt_file(what, "a result.nc that prism estimate JOB -o DIR wrote"):
        call = json.loads(result.attrs.get("call", "{}"))
        steps = {"step_time", "replicate"} <= {*result, *result.dims} and "job" in result.attrs
        if not steps or "seed" not in call:
            raise PrismError(
                f"{what}: holds no simulated steps of a job; give a result.nc that "
                "prism estimate JOB -o DIR wrote"
            )
        return job_of(result), min(result.sizes["replicate"], REPLICATES), int(call["seed"])


def _play(
    player: JobPlayer, times: Array, percentiles: Sequence[float], ideal: bool
) -> Iterator[PlayedStep]:
    """Play the replicates nearest the percentiles, and the step with every effect at 1."""
    for percentile in dict.fromkeys(percentiles):
        if not 0.0 <= percentile <= 100.0:
            raise PrismError(f"percentile {percentile:g}, expected between 0 and 100")
        away = np.abs(times - np.quantile(times, percentile / 100.0))
        replicate = int(np.argmin(away))  # the first of equals
        yield player.play(replicate, kind="replicate", percentile=percentile, replicate=replicate)
    if ideal:
        yield player.play(None, kind="ideal")


def _rank_rows(step: Prepared) -> dict[int, Row] | None:
    """Row of every rank of a job; None for a fitted trace, which numbers none."""
    if step.workload is None:
        return None
    ranks, apart = Placement(step.job).ranks(), step.program.n_members > 1
    return {int(rank): Row(r, s, m if apart else 0) for (r, s, m), rank in np.ndenumerate(ranks)}


# ------------------------------------------------------------------------------------ both
def _lay_out(
    steps: Iterable[PlayedStep], wanted: Wanted, attrs: Mapping[str, Any], notes: Sequence[str],
    of_rank: dict[int, Row] | None = None,
) -> xr.Dataset:  # fmt: skip
    """Lay played steps into one dataset; an ideal step, in which all are alike, by the same rows.

    `of_rank` is the row of every rank, where the steps do not number them themselves.
    """
    sheets, chosen = Sheets(), None
    for step in steps:
        if step.ranks:
            of_rank = {rank: Row(0, i, 0) for i, rank in enumerate(step.ranks)}
        if chosen is None or step.label["kind"] != "ideal":
            chosen = choose_rows(step, wanted, of_rank)
        else:
            chosen = chosen._replace(roles={})
        sheets.add(step, chosen, *_titles(step))
    said = [*notes, *(note for one in sheets.steps for note in one["notes"])]
    said += _left_out(sheets.steps)
    found = sheets.dataset({**attrs, "kind": "timeline"})
    return found.merge(pack_texts(notes=list(dict.fromkeys(said))))


def _titles(step: PlayedStep) -> tuple[str, str]:
    """Name a step in short, and with its time."""
    about, seconds = step.label, _seconds(step.step_time)
    if about["kind"] == "replicate":
        short = f"p{about['percentile']:g}"
        return short, f"{short} step: {seconds} (replicate {about['replicate']})"
    if "step" not in about:
        return "ideal", f"ideal step: {seconds}"
    short = f"step {about['step']}"
    if about["kind"] == "replayed":
        measured = _seconds(about["measured_step_time"])
        return short, f"{short} as measured, replayed: {seconds} (measured {measured})"
    mean = "with every op at its mean" if step.ranks else "ideal"
    return "ideal", f"{short} {mean}: {seconds}"


def _left_out(steps: Sequence[dict[str, Any]]) -> list[str]:
    """Say what of each step is not shown."""
    notes = [(step["short"], step["left_out"]) for step in steps if step["left_out"]]
    way = "--replicas, --stages and --ranks choose others"
    if len({note for _, note in notes}) == 1:
        return [f"{notes[0][1]}; {way}"]
    return [f"{short}: {note}; {way}" for short, note in notes]


def _seconds(seconds: float) -> str:
    """Write a step time with digits that tell steps apart."""
    unit, scale = time_unit(seconds)
    return f"{seconds / scale:.5g} {unit}"
