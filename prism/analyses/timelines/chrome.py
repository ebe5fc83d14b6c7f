"""A timeline as Chrome trace events, which Perfetto and chrome://tracing open.

Ranks are processes and streams threads; the steps of a timeline are groups of processes below each
other, on one clock. Messages are flow events. Times are microseconds with three decimals.

References
----------
.. [1] Trace Event Format, Google, 2016:
   docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prism.analyses.timelines.table import ORDER, TEXTS, WAITING, texts

if TYPE_CHECKING:
    import xarray as xr

INSIDE = 0.01  # of an op: how far inside it a flow begins or ends, so that it belongs to that op


def chrome_trace(timeline: xr.Dataset) -> dict[str, Any]:
    """Turn what ``prism.timeline`` returns into a JSON object of trace events [1]."""
    steps = json.loads(timeline.attrs["steps"])
    tids = _tracks(timeline)
    events = _names(timeline, steps, tids) + _slices(timeline, tids) + _flows(timeline, tids)
    about = {
        k: timeline.attrs[k] for k in ("source", "seed", "prism_version") if k in timeline.attrs
    }
    about["steps"] = "; ".join(s["title"] for s in steps)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def chrome_bytes(timeline: xr.Dataset) -> bytes:
    """Give the same as JSON, one event a line, compressed."""
    trace = chrome_trace(timeline)
    events = trace.pop("traceEvents")
    lines = ",\n".join(json.dumps(e, ensure_ascii=False, allow_nan=False) for e in events)
    rest = json.dumps(trace, ensure_ascii=False, allow_nan=False)
    text = f'{{"traceEvents": [\n{lines}\n], {rest[1:]}\n'
    return gzip.compress(text.encode(), 6, mtime=0)  # no date: the same bytes


def _pid(row: int) -> int:
    return row + 1


Track = tuple[int, str, int]  # row, stream, lane


def _tracks(timeline: xr.Dataset) -> dict[Track, int]:
    """Thread of every track, numbered from top to bottom; no two in the file have one number."""
    rows, lanes = timeline["event_row"].values, timeline["lane"].values
    streams = texts(timeline, "stream")
    keys = sorted(
        set(zip(rows.tolist(), streams.tolist(), lanes.tolist(), strict=True)), key=_order
    )
    first = timeline.sizes["row"] + 1
    return {key: first + i for i, key in enumerate(keys)}


def _order(track: Track) -> tuple[int, float, str, int]:
    row, stream, lane = track
    place = ORDER.index(stream) if stream in ORDER else ORDER.index(WAITING) - 0.5
    return row, place, stream, lane


def _names(
    timeline: xr.Dataset, steps: list[dict[str, Any]], tids: dict[Track, int]
) -> list[dict[str, Any]]:
    """Metadata: names and order of processes and threads."""
    found = []

    def tell(what: str, pid: int, tid: int, **args: Any) -> None:
        found.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args})

    for row in range(timeline.sizes["row"]):
        step = steps[int(timeline["row_step"][row])]
        role = str(timeline["role"].values[row])
        label = f"{step['short']} | {timeline['row_label'].values[row]}"
        tell("process_name", _pid(row), 0, name=label + (f" ({role})" if role else ""))
        tell("process_sort_index", _pid(row), 0, sort_index=row)
        tell("process_labels", _pid(row), 0, labels=step["title"])
    for order, ((row, stream, lane), tid) in enumerate(tids.items()):
        name = "transfers" if stream == "transfer" else stream
        tell("thread_name", _pid(row), tid, name=name + (f" {lane + 1}" if lane else ""))
        tell("thread_sort_index", _pid(row), tid, sort_index=order)
    return found


def _times(timeline: xr.Dataset) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Start and end of every event in whole nanoseconds, so that neighbours meet exactly."""
    start = timeline["start"].values
    end = start + timeline["duration"].values
    return np.rint(start * 1e9).astype(np.int64), np.rint(end * 1e9).astype(np.int64)


def _slices(timeline: xr.Dataset, tids: dict[Track, int]) -> list[dict[str, Any]]:
    start, end = _times(timeline)
    column = {
        name: timeline[name].values.tolist()
        for name in (
            "event_row", "lane", "microbatch", "chunk", "nominal", "critical", "duration",
        )
    }  # fmt: skip
    column |= {f"event_{name}": texts(timeline, name).tolist() for name in TEXTS}
    found = []
    for i in np.lexsort((start, column["event_row"])).tolist():
        kind, stream = column["event_kind"][i], column["event_stream"][i]
        args: dict[str, Any] = {"kind": kind}
        if stream != WAITING:
            args["critical path"] = bool(column["critical"][i])
        for name in ("microbatch", "chunk"):
            if column[name][i] >= 0:
                args[name] = column[name][i]
        nominal = column["nominal"][i]
        if math.isfinite(nominal) and nominal > 0.0:
            args["nominal [us]"] = round(1e6 * nominal, 3)
            args["slowdown"] = round(column["duration"][i] / nominal, 6)
        for name, text in (("waited for", "waited_for"), ("kernel classes", "classes")):
            if column[f"event_{text}"][i]:
                args[name] = column[f"event_{text}"][i]
        row = column["event_row"][i]
        found.append({
            "ph": "X", "name": column["event_name"][i], "cat": stream, "pid": _pid(row),
            "tid": tids[row, stream, column["lane"][i]], "ts": start[i] / 1e3,
            "dur": (end[i] - start[i]) / 1e3, "args": args,
        })  # fmt: skip
    return found


def _flows(timeline: xr.Dataset, tids: dict[Track, int]) -> list[dict[str, Any]]:
    """Pairs of flow events, from the end of what sends to the begin of what waited."""
    start, end = _times(timeline)
    rows, lanes = timeline["event_row"].values, timeline["lane"].values
    streams = texts(timeline, "stream")
    found = []
    for number, (a, b) in enumerate(timeline["flow"].values.tolist(), start=1):
        for phase, i, at in (
            ("s", a, end[a] - INSIDE * (end[a] - start[a])),
            ("f", b, start[b] + INSIDE * (end[b] - start[b])),
        ):
            row = int(rows[i])
            event = {
                "ph": phase, "name": "message", "cat": "message", "id": number, "pid": _pid(row),
                "tid": tids[row, str(streams[i]), int(lanes[i])], "ts": round(at) / 1e3,
            }  # fmt: skip
            found.append(event | ({"bp": "e"} if phase == "f" else {}))
    return found
