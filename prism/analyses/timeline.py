"""`prism timeline`: the median and the p99 step, or a measured one beside its ideal, op by op.

Of a simulated job the replicates nearest the percentiles are run again with the same keys, so that
their step times are the sampled ones; of a trace the median measured step replays through its
graph. Left out: the pictures and files (`prism.plots.gantt`, `prism.analyses.timelines.chrome`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import prism
from prism.analyses.timelines.choose import Wanted, choose_rows
from prism.analyses.timelines.jobs import JobPlayer, check_size
from prism.analyses.timelines.played import PlayedStep, Row
from prism.analyses.timelines.table import Sheet, lay_out, make_timeline
from prism.analyses.timelines.traces import play_trace
from prism.cluster.nodemap import Placement
from prism.common.errors import PrismError, named
from prism.common.resultfiles import load
from prism.common.text import time_unit
from prism.engine import LANES
from prism.jobs.job import Job, load_job
from prism.jobs.jobspec.frommodel import model_attrs
from prism.jobs.jobspec.yaml import shipped_jobs
from prism.simulation.prepare import Prepared, prepare
from prism.simulation.results import job_of, provenance
from prism.simulation.steps import Progress, run_blocks, settle_call
from prism.traces import Trace, read_trace
from prism.traces.kinds import recording_kind

if TYPE_CHECKING:
    import xarray as xr

REPLICATES = 4096
"""Steps that percentiles are taken of, where no result has its own: 41 of them lie beyond p99."""
PERCENTILES = (50.0, 99.0)

MODELS = ("trace", "calibrated", "steps")
"""Kinds of files that are models; the last has no steps to show, and `load_job` says so."""

What = Job | str | Path | Sequence[str | Path]


class Sampled(NamedTuple):
    """Sampled steps of a job."""

    job: Job
    step: Prepared
    seed: int
    step_time: NDArray[np.float64]  # [replicate] s
    notes: list[str]


def timeline(
    what: What,
    *,
    percentiles: Sequence[float] | None = None,
    ideal: bool = False,
    step: int | None = None,
    step_range: str | None = None,
    replicates: int | None = None,
    seed: int | None = None,
    threads: int | None = None,
    ranks: Sequence[int] | None = None,
    replicas: Sequence[int] | None = None,
    stages: Sequence[int] | None = None,
    overrides: Sequence[str] = (),
    progress: Progress | None = None,
) -> xr.Dataset:
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
    replicates, seed, threads
        Of a job as in ``simulate``; 4,096 replicates, or those of the result.
    ranks, replicas, stages : sequence of int, optional
        Which to show; all where they are few, else some replicas.
    overrides : sequence of str
        ``key=value`` settings of a job.
    progress : callable, optional
        Called with (blocks done, blocks in all).

    Returns
    -------
    xarray.Dataset
        ``start``, ``duration``, ``nominal`` [event] in s, ``busy`` [row] and ``wait`` [row, cause]
        in s, and more; `summarize_timeline` gives the figures the command prints.

    Raises
    ------
    PrismError
        Bad input, or a step too large.
    """
    wanted = Wanted(*(None if x is None else tuple(x) for x in (replicas, stages, ranks)))
    trace = _read(what, step_range)
    if trace is not None:
        given = {
            "percentiles": percentiles if percentiles is None else tuple(percentiles),
            "replicates": replicates, "ideal": ideal,
            "overrides": tuple(overrides),
        }  # fmt: skip
        _refuse(trace.source, "a trace, whose steps were measured", given)
        played = play_trace(trace, step)
        return _lay_trace(trace, played, wanted)
    _refuse(str(what), "a job, whose steps are simulated", {"step": step, "step_range": step_range})
    sampled = _sample(what, replicates, seed, threads, overrides, progress)
    return _lay_job(sampled, PERCENTILES if percentiles is None else percentiles, ideal, wanted)


def summarize_timeline(timeline: xr.Dataset) -> dict[str, Any]:
    """Give a timeline's figures, as `prism timeline --json` prints them; times in seconds."""
    steps = []
    of_event = timeline["row_step"].values[timeline["event_row"].values]
    for i, about in enumerate(json.loads(timeline.attrs["steps"])):
        total, rows = about["step_time"], []
        for k in np.flatnonzero(timeline["row_step"].values == i):
            waits = {
                str(cause): {"seconds": float(s), "share": float(s) / total}
                for cause, s in zip(
                    timeline["cause"].values, timeline["wait"].values[k], strict=True
                )
                if s > 0.0
            }
            rows.append({
                "label": str(timeline["row_label"].values[k]),
                "role": str(timeline["role"].values[k]) or None,
                **{n: int(timeline[n].values[k]) for n in ("replica", "stage", "member")},
                "busy": float(timeline["busy"].values[k]),
                "busy_share": float(timeline["busy"].values[k]) / total, "waits": waits,
            })  # fmt: skip
        steps.append({**about, "events": int((of_event == i).sum()), "rows": rows})
    out: dict[str, Any] = {"source": timeline.attrs["source"]}
    for name in ("seed", "replicates"):
        if name in timeline.attrs:
            out[name] = int(timeline.attrs[name])
    return out | {
        "events": int(timeline.sizes["event"]), "flows": int(timeline.sizes["message"]),
        "steps": steps, "notes": json.loads(timeline.attrs["notes"]),
    }  # fmt: skip


def _refuse(source: str, kind: str, given: dict[str, Any]) -> None:
    """Refuse options that say nothing about what is at hand."""
    for argument, value in given.items():
        if value is not None and value is not False and value != ():  # 0 is a choice
            raise PrismError(
                f"{source}: is {kind}: {named(argument)} does not apply to it; leave it out"
            )


# ------------------------------------------------------------------------------------------ traces
def _read(what: What, step_range: str | None) -> Trace | None:
    """Read a trace; None for all else."""
    if isinstance(what, Job):
        return None
    if not isinstance(what, str | Path):
        if len(what) == 1:
            return _read(what[0], step_range)
        return read_trace([str(x) for x in what], step_range)
    path = Path(what)
    known = str(what) in shipped_jobs() or path.suffix in (".yaml", ".yml", ".nc")
    if known or not path.exists():
        return None
    kind = recording_kind(str(what))
    if kind == "step_times":
        raise PrismError(
            f"{what}: step times alone, without the ops in them; give a job, a trace of ops, or "
            "what prism fit made of one"
        )
    return read_trace(str(what), step_range) if kind == "trace" else None


def _lay_trace(trace: Trace, played: list[PlayedStep], wanted: Wanted) -> xr.Dataset:
    of_rank = None
    if played[0].between == "rank":
        of_rank = {rank: Row(0, i, 0) for i, rank in enumerate(played[0].label["ranks"])}
    sheets, chosen = [], choose_rows(played[0], wanted, of_rank)
    for one in played:
        about = one.label
        kind, number = str(about["kind"]), int(about["step"])
        short = f"step {number}" if kind == "replayed" else "ideal"
        mean = "with every op at its mean" if one.between == "rank" else "ideal"
        title = f"step {number} {'as measured, replayed' if kind == 'replayed' else mean}"
        title += f": {_seconds(one.step_time)}"
        if kind == "replayed":
            title += f" (measured {_seconds(about['measured_step_time'])})"
        # of an ideal step, in which all are alike, the same rows
        sheets.append(_titled(lay_out(one, chosen), short, title))
        chosen = chosen._replace(roles={})
    notes = [*trace.notes, *sheets[0].figures["notes"], *_left_out(sheets)]
    attrs = {
        "kind": "timeline", "source": trace.source, "prism_version": prism.__version__,
        "notes": json.dumps(list(dict.fromkeys(notes))),
    }  # fmt: skip
    return make_timeline(sheets, attrs)


# -------------------------------------------------------------------------------------------- jobs
def _sample(
    what: What, replicates: int | None, seed: int | None, threads: int | None,
    overrides: Sequence[str], progress: Progress | None,
) -> Sampled:  # fmt: skip
    """Simulate a job's steps, or take those of a result."""
    if not isinstance(what, Job | str | Path):
        if len(what) != 1:
            raise PrismError("one job, model or result at a time; only a trace is several files")
        what = what[0]
    if isinstance(what, str | Path) and Path(what).suffix == ".nc" and Path(what).is_file():
        if model_attrs(what).get("kind") not in MODELS:
            given = {"replicates": replicates, "seed": seed, "overrides": tuple(overrides)}
            return _of_result(what, given, threads, progress)
    job = what if isinstance(what, Job) else load_job(what, overrides)
    n = REPLICATES if replicates is None else replicates
    seed, threads = settle_call(n, seed, threads)
    step = prepare(job, seed, engine="exact")
    check_size(step)
    times = _run(step, n, seed, threads, progress)
    return Sampled(job, step, seed, times, [])


def _run(
    step: Prepared, n: int, seed: int, threads: int, progress: Progress | None
) -> NDArray[np.float64]:
    """Step times of n replicates [s]."""
    blocks = range(-(-n // LANES))
    times = run_blocks(step.program, blocks, seed, threads, progress=progress)[0]
    return times.reshape(-1)[:n].astype(np.float64)


def _of_result(
    path: str | Path, given: dict[str, Any], threads: int | None, progress: Progress | None
) -> Sampled:
    """Rebuild the call of a result, whose step times are taken as they are."""
    _refuse(str(path), "a result, which has its own call", given)
    result = load(path)
    call = json.loads(result.attrs.get("call", "{}"))
    steps = {"step_time", "replicate"} <= {*result, *result.dims} and "job" in result.attrs
    if not steps or "seed" not in call:
        raise PrismError(
            f"{path}: holds no simulated steps of a job; give a result.nc that "
            "prism estimate JOB -o DIR wrote"
        )
    job, times = job_of(result), result["step_time"].to_numpy()
    seed, threads = settle_call(times.size, int(call["seed"]), threads)
    step = prepare(job, seed, engine="exact")
    check_size(step)
    replicas = json.loads(result.attrs.get("replicas", "{}"))
    if replicas.get("engine") != "exchangeable":
        return Sampled(job, step, seed, times, [])
    n = min(times.size, REPLICATES)
    note = (
        f"{path} simulated {replicas['simulated']:,} of {replicas['replicas']:,} replicas; here "
        f"all of them were, in {n:,} steps of the same clusters: percentiles differ a little"
    )
    return Sampled(job, step, seed, _run(step, n, seed, threads, progress), [note])


def nearest_replicate(step_time: NDArray[np.float64], percentile: float) -> int:
    """Return the replicate whose step time is nearest a percentile, the first of equals."""
    return int(np.argmin(np.abs(step_time - np.quantile(step_time, percentile / 100.0))))


def _lay_job(
    sampled: Sampled, percentiles: Sequence[float], ideal: bool, wanted: Wanted
) -> xr.Dataset:
    job, step, seed, times, _ = sampled
    sheets, of_rank, player = [], _rank_rows(step), JobPlayer(step, seed)
    for percentile in dict.fromkeys(percentiles):
        if not 0.0 <= percentile <= 100.0:
            raise PrismError(f"percentile {percentile:g}, expected between 0 and 100")
        replicate = nearest_replicate(times, percentile)
        played = player.play(replicate)
        if np.float32(played.step_time) != np.float32(times[replicate]):
            raise PrismError(
                f"{job.source}: replicate {replicate} took {times[replicate]!r} s and now takes "
                f"{played.step_time!r} s: made by another version or library; run prism estimate "
                "again"
            )
        played.label.update(kind="replicate", percentile=percentile, replicate=replicate)
        short = f"p{percentile:g}"
        title = f"{short} step: {_seconds(played.step_time)} (replicate {replicate})"
        chosen = choose_rows(played, wanted, of_rank)
        sheets.append(_titled(lay_out(played, chosen), short, title))
    if ideal:
        played = player.play(None)
        played.label.update(kind="ideal")
        title = f"ideal step: {_seconds(played.step_time)}"
        chosen = chosen._replace(roles={})
        sheets.append(_titled(lay_out(played, chosen), "ideal", title))
    notes = [*sampled.notes, *_left_out(sheets)]
    attrs = provenance(job, {"replicates": int(times.size), "seed": seed}) | {
        "kind": "timeline", "source": job.name, "replicates": int(times.size),
        "notes": json.dumps(notes),
    }  # fmt: skip
    return make_timeline(sheets, attrs)


def _rank_rows(step: Prepared) -> dict[int, Row] | None:
    """Row of every rank of a job; None for a fitted trace, which numbers none."""
    if step.workload is None:
        return None
    ranks, apart = Placement(step.job).ranks(), step.program.n_members > 1
    return {int(rank): Row(r, s, m if apart else 0) for (r, s, m), rank in np.ndenumerate(ranks)}


def _titled(sheet: Sheet, short: str, title: str) -> Sheet:
    return sheet._replace(figures={"short": short, "title": title} | sheet.figures)


def _left_out(sheets: Sequence[Sheet]) -> list[str]:
    """Say what of each step is not shown."""
    notes = [(s.figures["short"], s.figures["left_out"]) for s in sheets if s.figures["left_out"]]
    if not notes:
        return []
    way = "--replicas, --stages and --ranks choose others"
    if len({note for _, note in notes}) == 1:
        return [f"{notes[0][1]}; {way}"]
    return [f"{short}: {note}; {way}" for short, note in notes]


def _seconds(seconds: float) -> str:
    """Write a step time with digits that tell steps apart."""
    unit, scale = time_unit(seconds)
    return f"{seconds / scale:.5g} {unit}"
