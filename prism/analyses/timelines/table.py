"""A timeline as one dataset: steps, rows, events, messages, and the table of waits.

Events are ops and waits of the chosen rows; no two of one track overlap, since ops of a stream that
run at the same time get tracks of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.analyses.timelines.choose import Chosen, deciding_row
from prism.analyses.timelines.played import Link, PlayedOp, PlayedStep, Row, Stream
from prism.analyses.timelines.waits import CAUSES, EPSILON, Span, Wait, spans_of, waits_of
from prism.common.errors import PrismError
from prism.common.text import format_share

if TYPE_CHECKING:
    import xarray as xr

MOST_EVENTS = 500_000  # events of a timeline; Perfetto still opens as many


class Event(NamedTuple):
    """An op or a wait on a track of a row."""

    row: int
    stream: str
    lane: int  # of the ops of a stream that run at the same time
    start: float  # s
    duration: float  # s
    name: str
    kind: str  # op kind, or cause of a wait
    microbatch: int = -1
    chunk: int = -1
    nominal: float = np.nan  # s, NaN: not known
    critical: bool = False
    waited_for: str = ""  # what ended last before it, or what a wait is for
    classes: str = ""  # kernel classes with their shares


class Waited(NamedTuple):
    """How long a row of the timeline waited for one other, or one kind of op, in its step."""

    row: int
    cause: str
    whom: str  # label of a row, or kind of op
    seconds: float


TEXTS = ("stream", "name", "kind", "waited_for", "classes")
"""Columns of events that are words; the dataset numbers them by its `label`."""
_UNITS = dict.fromkeys(("start", "duration", "nominal", "busy", "wait_seconds"), "s")
_LONG = {
    "start": "from the step's begin", "duration": "of an op or a wait",
    "nominal": "of the op with every effect at 1", "busy": "compute of the row in the step",
    "wait_row": "row that waits", "wait_cause": "why it waits",
    "wait_for": "row or kind of op that it waits for", "wait_seconds": "time that it waits",
    "event_row": "row of an event", "lane": "track among those of its stream",
    "microbatch": "-1: none", "chunk": "-1: none", "critical": "1: on the critical path",
    "flow": "events a message goes from and to", "row_step": "step of a row",
    "replica": "of a row", "stage": "of a row",
    "member": "rank within the group, 0 where they are not distinguished",
}  # fmt: skip


class Sheets:
    """Steps of a timeline, laid out one after another."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.events: list[Event] = []
        self.flows: list[tuple[int, int]] = []  # events that a message goes from and to
        self.waits: list[Waited] = []

    def add(self, step: PlayedStep, chosen: Chosen, short: str, title: str) -> None:
        """Lay out the chosen rows of a step; raises PrismError where events become too many."""
        critical = {(x.op, -1 if step.ops[x.op].is_global else x.replica) for x in step.path}
        by_place, places = _ops_by_place(step), dict[tuple[int, Row], int]()
        for row in chosen.rows:
            k = len(self.rows)
            spans = spans_of(step, row, by_place.get((row.stage, row.member), ()))
            waits = waits_of(step, row, spans)
            if len(self.events) + len(spans) + len(waits) > MOST_EVENTS:
                raise PrismError(
                    f"more than {MOST_EVENTS:,} events; show fewer ranks: --replicas 0, "
                    "--stages 0,1"
                )
            shown = [s for s in spans if step.ops[s.op].is_shown(row.stage)]
            for span, lane in zip(shown, _lanes(step, shown), strict=True):
                places[span.op, row] = len(self.events)
                self.events.append(_op_event(step, k, row, span, lane, critical))
            self.events += [_wait_event(step, k, row, wait) for wait in waits]
            self.waits += _add_up(step, k, row, waits)
            self.rows.append({
                "row_step": len(self.steps), **row._asdict(), "row_label": step.row_label(row),
                "role": chosen.roles.get(row.replica, ""),
                "busy": step.step_time - sum(wait.end - wait.start for wait in waits),
            })  # fmt: skip
        self.flows += _flows(step, places)
        self.steps.append({"short": short, "title": title, **_figures(step, chosen.note)})

    def dataset(self, attrs: Mapping[str, Any]) -> xr.Dataset:
        """Put the steps together."""
        import xarray as xr

        labels: dict[str, int] = {}
        made: dict[str, Any] = {
            "flow": (("message", "side"), np.array(self.flows, np.int64).reshape(-1, 2)),
            **{name: ("row", np.array([row[name] for row in self.rows])) for name in self.rows[0]},
        }
        for name in Event._fields:
            column = [getattr(event, name) for event in self.events]
            if name in TEXTS:
                column = [labels.setdefault(text, len(labels)) for text in column]
            made[f"event_{name}" if name in ("row", *TEXTS) else name] = "event", np.array(column)
        made["critical"] = "event", made["critical"][1].astype(np.int8)
        row, cause, whom, seconds = zip(*self.waits, strict=True) if self.waits else [()] * 4
        made |= {
            "wait_row": ("wait", np.array(row, np.int64)),
            "wait_cause": ("wait", np.array(cause, np.str_)),
            "wait_for": ("wait", np.array(whom, np.str_)),
            "wait_seconds": ("wait", np.array(seconds, np.float64)),
        }
        for name, (dims, values) in made.items():
            about = {"long_name": _LONG.get(name, name.replace("event_", "").replace("_", " "))}
            if values.dtype.kind in "fiu":
                about["units"] = _UNITS.get(name, "1")
            packed = {"zlib": True, "complevel": 4} if values.dtype.kind in "fi" else {}
            made[name] = (dims, values, about, packed)
        coords = {"label": np.array(list(labels), np.str_)}
        return xr.Dataset(made, coords, {**attrs, "steps": json.dumps(self.steps)})


def texts(timeline: xr.Dataset, name: str) -> NDArray[np.str_]:
    """Return a column of `TEXTS` of a timeline, [event]."""
    labels = timeline["label"].values.astype(str)
    return np.asarray(labels[timeline[f"event_{name}"].values])


def _ops_by_place(step: PlayedStep) -> dict[tuple[int, int], list[int]]:
    """Ops that each (stage, member) takes part in."""
    found: dict[tuple[int, int], list[int]] = {}
    for i, op in enumerate(step.ops):
        if op.stream != Stream.JOIN:
            members = range(step.n_members) if op.member < 0 else (op.member,)
            for s in op.stages:
                for m in members:
                    found.setdefault((s, m), []).append(i)
    return found


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


def _op_event(
    step: PlayedStep, k: int, row: Row, span: Span, lane: int, critical: set[tuple[int, int]]
) -> Event:
    op, r = step.ops[span.op], row.replica
    nominal = float(step.nominal[r, span.op]) if step.nominal is not None else np.nan
    before = step.binding(span.op, r)
    classes = ", ".join(
        f"{name} {format_share(share, 2)}" for name, share in op.classes if share >= 0.005
    )
    return Event(
        k, _stream(op), lane, span.start, span.end - span.start, op.label, op.op_kind,
        op.microbatch, op.chunk, nominal, (span.op, -1 if op.is_global else r) in critical,
        _describe(step, before.op, before.replica, row), classes,
    )  # fmt: skip


# -------------------------------------------------------------------------------------- waits
def _wait_event(step: PlayedStep, k: int, row: Row, wait: Wait) -> Event:
    op_kind = step.ops[wait.op].op_kind if wait.op >= 0 else "collective"
    name = CAUSES[wait.cause][1].format(replica=wait.replica, op_kind=op_kind)
    what = _describe(step, wait.op, wait.replica, row)
    length = wait.end - wait.start
    return Event(k, Stream.WAITING, 0, wait.start, length, name, wait.cause, waited_for=what)


def _add_up(step: PlayedStep, k: int, row: Row, waits: Iterable[Wait]) -> list[Waited]:
    """Add up a row's waits by cause and by whom they are for."""
    total: dict[tuple[str, str], float] = {}
    for wait in waits:
        key = wait.cause, _waited_for(step, row, wait)
        total[key] = total.get(key, 0.0) + wait.end - wait.start
    order = list(CAUSES)
    keys = sorted(total, key=lambda key: (order.index(key[0]), -total[key]))
    return [Waited(k, *key, total[key]) for key in keys]


def _waited_for(step: PlayedStep, row: Row, wait: Wait) -> str:
    """Name the row that a wait is for, or the kind of op where the own row takes part in it."""
    op, replica = _worker(step, wait.op, wait.replica)
    if op < 0 or wait.cause in (Stream.HOST, "latency", "stall"):
        return ""
    info = step.ops[op]
    if wait.cause in (Stream.TRANSFER, Stream.COMMUNICATION):
        return "" if info.stream == Stream.COMPUTE else info.op_kind
    return step.row_label(Row(replica, info.stages[0], max(info.member, 0)))


def _worker(step: PlayedStep, op: int, replica: int) -> tuple[int, int]:
    """Return an op and whose it is; where others meet, what they waited for stands for it."""
    ran = (x for x in step.chain(op, replica) if step.ops[x.op].stream != Stream.JOIN)
    found = next(ran, Link(-1, replica, 0.0, 0.0, 0.0))
    return found.op, found.replica


def _describe(step: PlayedStep, op: int, replica: int, row: Row) -> str:
    """Say which op, and whose, seen from a row."""
    op, replica = _worker(step, op, replica)
    if op < 0:
        return ""
    info, whose = step.ops[op], list[str]()
    if step.ranks:
        if row.stage not in info.stages:
            whose.append(step.row_label(Row(0, info.stages[0], 0)))
        return " of ".join([info.label, *whose])
    if replica != row.replica and not info.is_global:
        whose.append(f"replica {replica}")
    if row.stage not in info.stages or (whose and step.n_stages > 1):
        whose.append(f"stage {info.stages[0]}")
    if info.member not in (-1, row.member):
        whose.append(f"rank {info.member}")
    return f"{info.label} of {' '.join(whose)}" if whose else info.label


# ----------------------------------------------------------------------------------- messages
def _flows(step: PlayedStep, places: Mapping[tuple[int, Row], int]) -> list[tuple[int, int]]:
    """Messages between shown rows of one replica, from event to event."""
    found = []
    sources: dict[tuple[int, int], list[int]] = {}
    for (op, row), event in places.items():
        if step.ops[op].stream != Stream.COMPUTE or step.ops[op].is_global or step.ranks:
            continue
        if (op, row.stage) not in sources:
            sources[op, row.stage] = _sources(step, op, row.stage)
        for source in sources[op, row.stage]:
            info = step.ops[source]
            member = row.member if info.member < 0 else info.member
            for stage in info.shown or info.stages:
                sender = places.get((source, Row(row.replica, stage, member)))
                if sender is not None:
                    found.append((sender, event))
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
        mine = info.is_shown(stage)
        if info.stream == Stream.JOIN or (info.stream in (Stream.TRANSFER, Stream.HOST) and mine):
            left += info.preds
        elif info.stream in (Stream.TRANSFER, Stream.COMPUTE) and not mine:
            found.append(p)
    return found


# ------------------------------------------------------------------------------------ figures
def _figures(step: PlayedStep, note: str) -> dict[str, Any]:
    """Figures of one step: its time, its critical path by op kind, who decided."""
    kinds, replicas = dict[str, float](), set[int]()
    for link in step.path:
        info, seconds = step.ops[link.op], max(0.0, link.end - max(0.0, link.start))
        if seconds > 0.0 and info.stream != Stream.JOIN:
            kinds[info.op_kind] = kinds.get(info.op_kind, 0.0) + seconds
            replicas |= set() if info.is_global else {link.replica}
    rest = step.step_time - sum(kinds.values())
    if rest > 1e-6 * step.step_time:
        what = Stream.HOST if step.ranks else "stall"
        kinds[what] = kinds.get(what, 0.0) + rest
    replica, stage, most = deciding_row(step)
    decided: dict[str, Any] = {"share_of_path": most / step.step_time}
    if step.ranks:
        decided |= {"rank": step.ranks[stage]}
    else:
        decided |= {"replica": replica, "stage": stage}
        decided |= {"replicas_on_path": len(replicas), "stages": step.n_stages}
    return step.label | {
        "step_time": step.step_time,
        "critical_path": dict(sorted(kinds.items(), key=lambda x: -x[1])),
        "decided_by": decided, "left_out": note, "notes": list(step.notes),
    }  # fmt: skip
