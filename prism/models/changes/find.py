"""Find what changes in step times and traces, and leave steps out.

Each run of step times, each worker of a trace and the job as a whole is a series of steps.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.common.arrays import Array, Flags, Index
from prism.common.errors import PrismError, option
from prism.common.means import median
from prism.common.text import format_count
from prism.models.changes.pauses import Pause, find_pauses
from prism.models.changes.report import Row
from prism.models.changes.segments import LEAST, outliers
from prism.models.changes.spans import FEWEST, Span, find_spans
from prism.simulation.tracemodel.graph import COMPUTE
from prism.traces import StepTimes, Trace
from prism.traces.kernelnames import COLLECTIVES
from prism.traces.table import LEFT_OUT

MANY = 3  # series whose median is what they have in common


# ------------------------------------------------------------------------------ step times
@dataclass(frozen=True)
class _Runs:
    """Step times side by side."""

    names: NDArray[np.str_]  # [run]
    steps: Index  # [position] numbers; the place in a run where runs have other steps each
    number: Index  # [position, run] of the step
    seconds: Array  # [position, run] not-a-number where nothing was measured
    at: tuple[Index, Index]  # [value] position and run
    aligned: bool
    mean_over: int

    @classmethod
    def of(cls, times: StepTimes) -> "_Runs":
        names, run = np.unique(times.run, return_inverse=True)
        steps, at = np.unique(times.step // times.mean_over, return_inverse=True)
        aligned = bool(steps.size * names.size <= 2 * at.size)
        if not aligned:
            begin = np.flatnonzero(np.r_[True, run[1:] != run[:-1]])
            at = np.arange(run.size) - np.repeat(begin, np.diff(np.r_[begin, run.size]))
            steps = np.arange(at.max() + 1)
        seconds = np.full((steps.size, names.size), np.nan)
        number = np.zeros(seconds.shape, np.int64)
        seconds[at, run], number[at, run] = times.seconds, times.step
        return cls(names, steps, number, seconds, (at, run), aligned, times.mean_over)

    def row(self, span: Span) -> Row:
        """Describe a change."""
        at = slice(span.begin, span.end), span.series
        known = np.isfinite(self.seconds[at])
        number, k = self.number[at][known], self.mean_over
        row: Row = {
            "kind": span.kind, "first_step": int(number.min()), "last_step": int(number.max()),
            "n_steps": number.size * k,
            "of_steps": int(np.isfinite(self.seconds[:, span.series]).sum()) * k,
            "ratio": span.ratio, "duration_s": float(self.seconds[at][known].sum()) * k,
            "kept": None,
        }  # fmt: skip
        row |= {"run": str(self.names[span.series])} if self.names.size > 1 else {}
        return row | ({"skip": span.end * k} if span.kind == "warm_up" else {})


@dataclass(frozen=True)
class Changes:
    """What changes in step times: found once, for all that fit, show or compare them."""

    rows: list[Row]  # one for each pause and change
    times: StepTimes  # as they were given
    calm: StepTimes  # the same without their periodic pauses
    # [value] values of other levels and odd pauses, to leave out; those of a warm-up
    out: Flags
    warm: Flags

    @property
    def body(self) -> StepTimes:
        """The steps of the level that counts, with a warm-up."""
        return select_steps(self.calm, ~self.out)

    @property
    def late(self) -> StepTimes:
        """The steps of the level that counts, without a warm-up."""
        return select_steps(self.calm, ~self.out & ~self.warm)

    @property
    def without_warm_up(self) -> StepTimes:
        """All steps, as they were given, but those of a warm-up."""
        return select_steps(self.times, ~self.warm)

    @property
    def warm_up_of_run(self) -> Index:
        """Values of the warm-up of each run that has one."""
        return np.unique(self.times.run[self.warm], return_counts=True)[1]

    def keep(self, kind: str, why: str | None) -> "Changes":
        """Say why changes of a kind are kept, where nothing else keeps them."""
        rows = [{**r, "kept": r["kept"] or why} if r["kind"] == kind else r for r in self.rows]
        return replace(self, rows=rows)

    def settled(self) -> "Changes":
        """Keep a warm-up where too few steps rest without it."""
        if np.unique(self.late.step).size >= FEWEST:
            return self
        rows = [{**r, "kept": "too_few"} if r["kind"] == "warm_up" else r for r in self.rows]
        return replace(self, rows=rows, warm=np.zeros_like(self.warm))


def find_changes(times: StepTimes) -> Changes:
    """Find what changes in step times.

    What three or more runs of one schedule have in common is work by step, but for a warm-up.
    """
    runs = _Runs.of(times)
    pauses = find_pauses(np.log(runs.seconds), runs.steps)
    ends = int(times.step.min()), int(times.step.max())
    rows = [_pause(p, runs.steps, ends, times.mean_over) for p in pauses]
    seconds, paused = _without(runs.seconds, pauses)
    values = np.log(np.where(paused, np.nan, seconds))
    common: list[Span] = []
    own, first = values, 1
    if runs.names.size >= MANY and runs.aligned:
        middle = median(values, axis=1)
        common = [s for s in find_spans(middle[:, None], 1)[0] if s.kind == "warm_up"]
        for span in common:
            middle[: span.end] = np.nanmedian(middle[span.end : 2 * span.end])
        own, first = values - middle[:, None], LEAST
    spans, out = find_spans(own, first)
    early = [s for s in spans if s.kind == "warm_up"]
    warm = np.zeros(values.shape, bool)
    for span in early:
        warm[: span.end, span.series] = True
    for span in common:
        warm[: span.end] = True
    if len(early) > 1 or common:  # one row for all runs
        row = runs.row(max([*early, *common], key=lambda s: s.end))
        del row["run"]
        rows.append({**row, "runs": int(warm.any(axis=0).sum())})
        early = []
    rows += [runs.row(s) for s in spans if s in early or s.kind != "warm_up"]
    out = ((out & ~warm) | paused)[runs.at]
    if np.unique(times.step[~out]).size < FEWEST:
        rows = [row if row["kind"] == "warm_up" else {**row, "kept": "too_few"} for row in rows]
        return Changes(rows, times, times, np.zeros_like(out), warm[runs.at])
    calm = replace(times, seconds=seconds[runs.at])
    return Changes(rows, times, calm, out, warm[runs.at])


def _without(seconds: Array, pauses: list[Pause]) -> tuple[Array, Flags]:
    """Take pauses out of their steps; flag those whose own length is another [step, run]."""
    out, odd = seconds.copy(), np.zeros(seconds.shape, bool)
    for pause in pauses:
        at = np.broadcast_to(pause.steps[:, None], seconds.shape) & np.isfinite(seconds)
        odd |= at & (out <= pause.extra)
        out = np.where(at & ~odd, out - pause.extra, out)
    if not pauses:
        return out, odd
    paused = np.array([p.steps for p in pauses]).any(axis=0)
    far, _ = outliers(np.log(np.where(odd, np.nan, out)), warm=True)
    odd |= np.asarray(far) & np.asarray(paused)[:, None]
    return np.where(odd, seconds, out), odd


def _pause(found: Pause, steps: Index, ends: tuple[int, int], k: int = 1) -> Row:
    return {
        "kind": "pause", "interval_steps": found.interval * k, "n": found.n,
        "duration_s": found.extra * k, "at_step": int(steps[found.steps][0]) * k,
        "first_step": ends[0], "last_step": ends[1], "kept": None,
    }  # fmt: skip


# ----------------------------------------------------------------------------------- traces
def changes_of_trace(trace: Trace) -> tuple[list[Row], Index]:
    """Find what changes in a trace: rows, and the steps to leave out.

    A worker's step is the median of its computing ops' durations over what each usually takes.
    """
    ops = trace.ops[(trace.ops["step"] >= 0) & (trace.ops["op_kind"] != "launch_gap")]
    periods = {number: end - begin for number, begin, end in trace.meta.get("periods", ())}
    if periods:
        ops = ops[ops["step"].isin(list(periods))]
    begin = ops["start"].groupby(ops["step"]).min()
    end = (ops["start"] + ops["duration"]).groupby(ops["step"]).max()
    steps, seconds = begin.index.to_numpy(), (end - begin).to_numpy()
    seconds = np.array([periods.get(step, own) for step, own in zip(steps, seconds, strict=True)])
    workers, values = _workers(ops, trace.has_kernels, steps)
    rows: list[Row] = []

    def add(spans: list[Span], at: Index, where: list[Row]) -> None:
        for s in spans:
            span = at[s.begin : s.end]
            row = {
                "kind": s.kind, **where[s.series], "first_step": int(steps[span].min()),
                "last_step": int(steps[span].max()), "n_steps": span.size,
                "of_steps": steps.size, "ratio": s.ratio,
                "duration_s": float(np.nansum(seconds[span])), "kept": None,
            }  # fmt: skip
            rows.append(row | ({"skip": int(span[-1]) + 1} if s.kind == "warm_up" else {}))

    out = np.zeros(steps.size, bool)
    if len(workers) > 1:
        if len(workers) >= MANY:
            values = values - median(values, axis=1, keepdims=True)
        spans, odd = find_spans(values, LEAST)
        odd &= ~odd.all(axis=1, keepdims=True)  # of all alike: the job's
        spans = [s for s in spans if odd[s.begin : s.end, s.series].any()]
        add(spans, np.arange(steps.size), workers)
        out = np.asarray(odd.any(axis=1))
    at = np.flatnonzero(~out & (seconds > 0.0))
    spans, odd = find_spans(np.log(seconds[at])[:, None], 1)
    add(spans, at, [{}])
    out[at[odd[:, 0]]] = True
    gaps = _gaps(begin.to_numpy(), end.to_numpy(), steps)
    rows += [_pause(gap, steps[1:], (int(steps[0]), int(steps[-1]))) for gap in gaps]
    # a profile's few steps are too few to leave some out
    if (~out).sum() < (FEWEST if trace.has_kernels else min(FEWEST, steps.size // 2)):
        rows, out = [{**row, "kept": "too_few"} for row in rows], np.zeros_like(out)
    return rows, steps[out]


def _workers(ops: pd.DataFrame, kernels: bool, steps: Index) -> tuple[list[Row], Array]:
    """Name the workers of a trace; give the logarithm of each one's steps, [step, worker]."""
    keys = ["rank"] if kernels else ["dp_rank", "stage"]
    columns = [*keys, "op_kind", "name", "chunk", "microbatch", *(["shape"] if kernels else [])]
    kind = ops["op_kind"].astype(str)
    chosen = ~kind.isin([*COLLECTIVES]) if kernels else kind.isin(COMPUTE)
    part = ops[chosen & (ops["duration"] > 0.0)]
    usual = part.groupby(columns, observed=True)["duration"].transform("median")
    ratio = np.log(part["duration"] / usual).groupby([part["step"], *(part[k] for k in keys)])
    table = ratio.median().unstack(keys).reindex(steps)
    names = [key if isinstance(key, tuple) else (key,) for key in table.columns]
    workers = [{k: int(v) for k, v in zip(keys, name, strict=True)} for name in names]
    return workers, table.to_numpy(np.float64)


def _gaps(begin: Array, end: Array, steps: Index) -> list[Pause]:
    """Find pauses between steps that follow each other, at regular distance."""
    gap, follows = begin[1:] - end[:-1], np.diff(steps) == 1
    if not follows.any() or not (gap[follows] > 0.0).all():  # steps overlap, or each begins at 0
        return []
    values = np.log(np.where(follows, gap + float(np.median(end - begin)), np.nan))
    return find_pauses(values[:, None], steps[1:])


# ---------------------------------------------------------------------------------- actions
def choose_steps(recording: Any, skip: int | None = None, steps: str | None = None) -> Any:
    """Keep the steps numbered ``A:B`` of step times or a trace, less each run's first `skip`.

    Raises PrismError: nothing is left, or `steps` is no range.
    """
    return _skip(recording if steps is None else _numbered(recording, steps), skip)


def _numbered(recording: Any, steps: str) -> Any:
    """Keep the steps of a range of numbers."""
    found = re.fullmatch(r"(\d*):(\d*)", steps.strip())
    if found is None or steps.strip() == ":":
        raise PrismError(
            f"{option('steps')} {steps}: expected A:B, the numbers of the first and the last step, "
            "such as 100:500"
        )
    is_trace = isinstance(recording, Trace)
    number = recording.ops["step"].to_numpy() if is_trace else recording.step
    number = np.unique(number[number >= 0]) if is_trace else number
    keep = np.ones(number.size, bool)
    keep &= number >= int(found[1] or 0)
    keep &= number <= int(found[2] or number.max(initial=0))
    if not keep.any():
        raise PrismError(
            f"{recording.source}: {option('steps')} {steps}: no such step; found "
            f"{number.min()} to {number.max()}"
        )
    return without_steps(recording, number[~keep]) if is_trace else select_steps(recording, keep)


def _skip(recording: Any, n: int | None) -> Any:
    """Leave out the first `n` steps of each run."""
    if n is None:
        return recording
    left: Trace | StepTimes
    if isinstance(recording, Trace):
        steps = np.unique(recording.ops["step"][recording.ops["step"] >= 0])
        whole, left = int(steps.size), without_steps(recording, steps[:n])
    else:
        frame = pd.DataFrame({"run": recording.run, "step": recording.step})
        place = (frame.groupby("run")["step"].rank(method="first") - 1.0) * recording.mean_over
        whole = int(place.max()) + recording.mean_over
        left = select_steps(recording, (place >= n).to_numpy())
    if n >= whole:
        raise PrismError(
            f"{recording.source}: {option('skip')} {n} leaves nothing of "
            f"{format_count(whole, 'step')}; expected "
            "fewer"
        )
    return left


def without_steps(trace: Trace, steps: Index) -> Trace:
    """Leave out some steps of a trace; of a profiler's the rows stay, as others wait for them."""
    if not steps.size:
        return trace
    if trace.has_kernels:
        ops = trace.ops.assign(
            step=trace.ops["step"].where(~trace.ops["step"].isin(steps), LEFT_OUT)
        )
        periods = [row for row in trace.meta.get("periods", ()) if row[0] not in steps]
        return replace(trace, ops=ops, meta=trace.meta | {"periods": periods})
    ops = trace.ops[~trace.ops["step"].isin(steps)].reset_index(drop=True)
    return replace(trace, ops=ops)


def select_steps(times: StepTimes, keep: Flags) -> StepTimes:
    """Keep some of the step times."""
    return replace(times, seconds=times.seconds[keep], step=times.step[keep], run=times.run[keep])
