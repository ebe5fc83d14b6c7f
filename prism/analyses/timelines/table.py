"""A timeline as one dataset: rows, events, flows, and figures of every step.

Events are ops and waits of the chosen rows; no two of one track overlap, since ops of a stream that
run at the same time get tracks of their own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.analyses.timelines.choose import Chosen, deciding_row
from prism.analyses.timelines.played import (
    COMMUNICATION,
    COMPUTE,
    HOST,
    JOIN,
    TRANSFER,
    PlayedOp,
    PlayedStep,
    Row,
)
from prism.analyses.timelines.waits import CAUSES, EPSILON, Span, Wait, spans_of, waits_of
from prism.common.errors import PrismError
from prism.common.text import format_share

if TYPE_CHECKING:
    import xarray as xr

MOST_EVENTS = 500_000
"""Events of a timeline; Perfetto still opens as many."""
WAITING = "waiting"
ORDER = (COMPUTE, WAITING, COMMUNICATION, TRANSFER, HOST)
"""Streams from top to bottom; those with names of their own come between."""

TEXTS = ("stream", "name", "kind", "waited_for", "classes")
"""Columns of events that are words; the dataset numbers them by its `label`."""

NUMBERS = ("lane", "start", "duration", "nominal", "critical", "microbatch", "chunk")
"""Columns of events that are numbers."""

Place = tuple[int, int, int, int]  # op, replica, stage, member


class Event(NamedTuple):
    """An op or a wait on a track of a row."""

    row: int
    stream: str
    lane: int  # of the ops of a stream that run at the same time
    start: float  # s
    duration: float  # s
    name: str
    kind: str  # op kind, or cause of a wait
    microbatch: int
    chunk: int
    nominal: float  # s, NaN: not known
    critical: bool
    waited_for: str  # what ended last before it, or what a wait is for
    classes: str  # kernel classes with their shares


_UNITS = {"start": "s", "duration": "s", "nominal": "s", "busy": "s", "wait": "s"}
_LONG = {
    "start": "from the step's begin", "duration": "of an op or a wait",
    "nominal": "of the op with every effect at 1", "busy": "compute of the row in the step",
    "wait": "time in which the row computes nothing, by cause", "event_row": "row of an event",
    "lane": "track among those of its stream", "microbatch": "-1: none", "chunk": "-1: none",
    "critical": "1: on the critical path", "flow": "events a message goes from and to",
    "row_step": "step of a row", "replica": "of a row", "stage": "of a row",
    "member": "rank within the group, 0 where they are not distinguished",
}  # fmt: skip


class Sheets:
    """Steps of a timeline, laid out one after another."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.events: list[Event] = []
        self.flows: list[tuple[int, int]] = []  # events that a message goes from and to

    def add(self, step: PlayedStep, chosen: Chosen, short: str, title: str) -> None:
        """Lay out the chosen rows of a step; raises PrismError where events become too many."""
        path = step.path()
        critical = {(i, -1 if step.ops[i].is_global else r) for i, r, *_ in path}
        by_place = _ops_by_place(step)
        places: dict[Place, int] = {}
        for row in chosen.rows:
            k = len(self.rows)
            spans = spans_of(step, row, by_place.get((row.stage, row.member), ()))
            mine = waits_of(step, row, spans)
            if len(self.events) + len(spans) + len(mine) > MOST_EVENTS:
                raise PrismError(
                    f"more than {MOST_EVENTS:,} events; show fewer ranks: --replicas 0, "
                    "--stages 0,1"
                )
            shown = [s for s in spans if _is_shown(step.ops[s.op], row)]
            for span, lane in zip(shown, _lanes(step, shown), strict=True):
                places[(span.op, *row)] = len(self.events)
                self.events.append(_op_event(step, k, row, span, lane, critical))
            self.events += [_wait_event(step, k, row, wait) for wait in mine]
            total: dict[str, float] = {}
            for wait in mine:
                total[wait.cause] = total.get(wait.cause, 0.0) + wait.end - wait.start
            self.rows.append({
                "row_step": len(self.steps), **row._asdict(), "row_label": row_label(step, row),
                "role": chosen.roles.get(row.replica, ""),
                "busy": step.step_time - sum(total.values()), "wait": total,
            })  # fmt: skip
        self.flows += _flows(step, places)
        figures = {"short": short, "title": title} | _figures(step, path, chosen.note)
        self.steps.append(figures)

    def dataset(self, attrs: dict[str, Any]) -> xr.Dataset:
        """Put the steps together."""
        import xarray as xr

        events, rows = self.events, self.rows
        causes = [cause for cause in CAUSES if any(cause in row["wait"] for row in rows)]
        labels: dict[str, int] = {}
        made: dict[str, Any] = {
            "event_row": ("event", np.array([e.row for e in events])),
            **{n: ("event", np.array([getattr(e, n) for e in events])) for n in NUMBERS},
            "flow": (("message", "side"), np.array(self.flows, np.int64).reshape(-1, 2)),
            **{n: ("row", np.array([row[n] for row in rows])) for n in rows[0] if n != "wait"},
        }
        for name in TEXTS:
            found = [labels.setdefault(getattr(e, name), len(labels)) for e in events]
            made[f"event_{name}"] = ("event", np.array(found))
        made["critical"] = ("event", made["critical"][1].astype(np.int8))
        waits = [[row["wait"].get(cause, 0.0) for cause in causes] for row in rows]
        size = len(rows), len(causes)
        made["wait"] = (("row", "cause"), np.array(waits, np.float64).reshape(size))
        for name, (dims, values) in made.items():
            about = {"long_name": _LONG.get(name, name.replace("event_", "").replace("_", " "))}
            if values.dtype.kind in "fiu":
                about["units"] = _UNITS.get(name, "1")
            made[name] = (dims, values, about)
        coords = {"cause": np.array(causes, np.str_), "label": np.array(list(labels), np.str_)}
        dataset = xr.Dataset(made, coords, attrs | {"steps": json.dumps(self.steps)})
        for variable in dataset.data_vars.values():
            if variable.dtype.kind in "fi":
                variable.encoding = {"zlib": True, "complevel": 4}
        return dataset


def row_label(step: PlayedStep, row: Row) -> str:
    """Name a row."""
    if step.between == "rank":
        return f"rank {step.label['ranks'][row.stage]}"
    parts = [f"replica {row.replica}"] if step.n_replicas > 1 else []
    parts += [f"stage {row.stage}"] if step.n_stages > 1 or not parts else []
    parts += [f"rank {row.member}"] if step.n_members > 1 else []
    return " ".join(parts)


def _ops_by_place(step: PlayedStep) -> dict[tuple[int, int], list[int]]:
    """Ops that each (stage, member) takes part in."""
    found: dict[tuple[int, int], list[int]] = {}
    for i, op in enumerate(step.ops):
        if op.stream != JOIN:
            members = range(step.n_members) if op.member < 0 else (op.member,)
            for s in op.stages:
                for m in members:
                    found.setdefault((s, m), []).append(i)
    return found


def _is_shown(op: PlayedOp, row: Row) -> bool:
    return row.stage in (op.shown or op.stages)


def _lanes(step: PlayedStep, spans: Sequence[Span]) -> list[int]:
    """Track of every op among those of its stream, so that none overlap."""
    ends: dict[str, list[float]] = {}
    lanes = []
    for span in spans:
        busy = ends.setdefault(_stream(step.ops[span.op]), [])
        lane = next((k for k, end in enumerate(busy) if end <= span.start + EPSILON), len(busy))
        busy[lane : lane + 1] = [span.end]
        lanes.append(lane)
    return lanes


def _stream(op: PlayedOp) -> str:
    return op.track or op.stream


def op_name(op: PlayedOp) -> str:
    """Name an op: its kind, microbatch and chunk, or what it was recorded as."""
    if op.track:
        return op.name or op.op_kind
    parts = [op.op_kind if op.microbatch >= 0 or not op.name else op.name]
    if op.microbatch >= 0:
        parts.append(str(op.microbatch))
    if op.chunk > 0:
        parts.append(f"chunk {op.chunk}")
    return " ".join(parts)


def _op_event(
    step: PlayedStep, k: int, row: Row, span: Span, lane: int, critical: set[tuple[int, int]]
) -> Event:
    op, r = step.ops[span.op], row.replica
    nominal = float(step.nominal[r, span.op]) if step.nominal is not None else float("nan")
    before = step.binding(span.op, r)
    classes = ", ".join(
        f"{name} {format_share(share, 2)}" for name, share in op.classes if share >= 0.005
    )
    return Event(
        k, _stream(op), lane, span.start, span.end - span.start, op_name(op), op.op_kind,
        op.microbatch, op.chunk, nominal, (span.op, -1 if op.is_global else r) in critical,
        describe(step, before.op, before.replica, row), classes,
    )  # fmt: skip


def _wait_event(step: PlayedStep, k: int, row: Row, wait: Wait) -> Event:
    what = describe(step, wait.op, wait.replica, row)
    name = {
        "bubble": "bubble", "replica": f"waiting for replica {wait.replica}",
        "stall": "stall or jitter of the job",
        "transfer": "waiting for transfer", "host": "launch gap", "latency": "launch latency",
        "group": "waiting for its group", "rank": "waiting for another rank",
        "communication": f"waiting for {step.ops[wait.op].op_kind}" if wait.op >= 0 else "",
    }[wait.cause]  # fmt: skip
    nan = float("nan")
    length = wait.end - wait.start
    return Event(k, WAITING, 0, wait.start, length, name, wait.cause, -1, -1, nan, False, what, "")


def describe(step: PlayedStep, op: int, replica: int, row: Row) -> str:
    """Say which op, and whose, seen from a row; the ops that a join waits for stand for it."""
    while op >= 0 and step.ops[op].stream == JOIN:
        before = step.binding(op, replica)
        op, replica = before.op, before.replica
    if op < 0:
        return ""
    info, parts = step.ops[op], [op_name(step.ops[op])]
    if step.between == "rank":
        where = "" if row.stage in info.stages else row_label(step, Row(0, info.stages[0], 0))
        return f"{parts[0]} of {where}" if where else parts[0]
    if replica != row.replica and not info.is_global:
        parts.append(f"replica {replica}")
    if row.stage not in info.stages or (len(parts) > 1 and step.n_stages > 1):
        parts.append(f"stage {info.stages[0]}")
    if info.member not in (-1, row.member):
        parts.append(f"rank {info.member}")
    return " of ".join([parts[0], " ".join(parts[1:])]) if len(parts) > 1 else parts[0]


def _flows(step: PlayedStep, places: dict[Place, int]) -> list[tuple[int, int]]:
    """Messages between shown rows of one replica, from event to event."""
    found = []
    sources: dict[tuple[int, int], list[int]] = {}
    for (op, r, s, m), event in places.items():
        if step.ops[op].stream != COMPUTE or step.ops[op].is_global or step.between == "rank":
            continue
        if (op, s) not in sources:
            sources[op, s] = _sources(step, op, s)
        for source in sources[op, s]:
            info = step.ops[source]
            for stage in info.shown or info.stages:
                member = m if info.member < 0 else info.member
                if (source, r, stage, member) in places:
                    found.append((places[source, r, stage, member], event))
    return found


def _sources(step: PlayedStep, op: int, stage: int) -> list[int]:
    """Ops of other stages whose message an op of a stage waits for, looking through joins."""
    found, left, seen = [], list(step.ops[op].preds), set[int]()
    while left:
        p = left.pop()
        info = step.ops[p]
        if p in seen or info.is_global:
            continue
        seen.add(p)
        shown = info.shown or info.stages
        if info.stream == JOIN or (info.stream == TRANSFER and stage in shown):
            left += info.preds
        elif info.stream in (TRANSFER, COMPUTE) and stage not in shown:
            found.append(p)
        elif info.stream == HOST and stage in shown:
            left += info.preds
    return found


def _figures(step: PlayedStep, path: list[tuple[int, int, float, float]], note: str) -> Any:
    """Figures of one step: its time, its critical path by op kind, who decided."""
    kinds, replicas = dict[str, float](), set[int]()
    for op, replica, start, end in path:
        info, seconds = step.ops[op], max(0.0, end - max(0.0, start))
        if seconds > 0.0 and info.stream != JOIN:
            kinds[info.op_kind] = kinds.get(info.op_kind, 0.0) + seconds
            replicas |= set() if info.is_global else {replica}
    rest = step.step_time - sum(kinds.values())
    if rest > 1e-6 * step.step_time:
        what = "stall" if step.between != "rank" else "host"
        kinds[what] = kinds.get(what, 0.0) + rest
    replica, stage, most = deciding_row(step)
    decided: dict[str, Any] = {"share_of_path": most / step.step_time}
    if step.between == "rank":
        decided |= {"rank": step.label["ranks"][stage]}
    else:
        decided |= {"replica": replica, "stage": stage}
        decided |= {"replicas_on_path": len(replicas), "stages": step.n_stages}
    label = {k: v for k, v in step.label.items() if k not in ("notes", "ranks")}
    return label | {
        "step_time": step.step_time,
        "critical_path": dict(sorted(kinds.items(), key=lambda x: -x[1])),
        "decided_by": decided, "left_out": note, "notes": step.label.get("notes", []),
    }  # fmt: skip


def texts(timeline: xr.Dataset, name: str) -> NDArray[np.str_]:
    """Return a column of `TEXTS` of a timeline, [event]."""
    labels = timeline["label"].values.astype(str)
    return np.asarray(labels[timeline[f"event_{name}"].values])
