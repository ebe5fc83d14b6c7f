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
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from prism.analyses.timelines.played import Stream
from prism.analyses.timelines.table import TEXTS, texts
from prism.common.resultfiles import dataset_of
from prism.common.results import Result

if TYPE_CHECKING:
    import xarray as xr

INSIDE = 0.01  # of an op: how far inside it a flow begins or ends, so that it belongs to that op
NUMBERS = ("lane", "microbatch", "chunk", "nominal", "critical", "duration")


def to_perfetto(timeline: Result | xr.Dataset) -> bytes:
    """Export a timeline as Chrome trace events, which ui.perfetto.dev opens.

    Returns
    -------
    bytes
        JSON compressed by gzip, for a file whose name ends in ``.json.gz``: rows are processes,
        their streams threads, ops and waits slices, messages arrows.

    Examples
    --------
    >>> import prism
    >>> content = prism.to_perfetto(prism.timeline("experiments/samples/trace.csv"))
    >>> import gzip, json
    >>> "X" in {event["ph"] for event in json.loads(gzip.decompress(content))["traceEvents"]}
    True
    """
    timeline = dataset_of(timeline)
    steps, events = json.loads(timeline.attrs["steps"]), _events(timeline)
    found = (*_names(timeline, steps, events), *_slices(events), *_flows(timeline, events))
    lines = ",\n".join(json.dumps(e, ensure_ascii=False, allow_nan=False) for e in found)
    about = {k: v for k, v in timeline.attrs.items() if k in ("source", "seed", "prism_version")}
    about["steps"] = "; ".join(step["title"] for step in steps)
    rest = json.dumps({"displayTimeUnit": "ms", "otherData": about}, ensure_ascii=False)
    text = f'{{"traceEvents": [\n{lines}\n], {rest[1:]}\n'
    return gzip.compress(text.encode(), 6, mtime=0)  # no date: the same bytes


def _events(timeline: xr.Dataset) -> pd.DataFrame:
    """Columns of the events, with process and thread; begin and end are whole nanoseconds.

    So neighbours meet exactly. Threads are numbered from top to bottom; no two have one number.
    """
    events = pd.DataFrame({name: timeline[name].values for name in ("event_row", *NUMBERS)})
    events = events.assign(**{name: texts(timeline, name) for name in TEXTS})
    start = timeline["start"].values
    events["begin"] = np.rint(1e9 * start).astype(np.int64)
    events["end"] = np.rint(1e9 * (start + events["duration"])).astype(np.int64)
    place = {str(stream): float(i) for i, stream in enumerate(Stream)}
    events["place"] = events["stream"].map(place).fillna(place[Stream.WAITING] - 0.5)
    events["pid"] = events["event_row"] + 1
    track = events.groupby(["event_row", "place", "stream", "lane"]).ngroup()
    return events.assign(tid=track + timeline.sizes["row"] + 1)


def _names(
    timeline: xr.Dataset, steps: list[dict[str, Any]], events: pd.DataFrame
) -> Iterator[dict[str, Any]]:
    """Metadata: names and order of processes and threads."""

    def tell(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}

    columns = (timeline[name].values.tolist() for name in ("row_step", "row_label", "role"))
    for row, (i, label, role) in enumerate(zip(*columns, strict=True)):
        name = f"{steps[i]['short']} | {label}" + (f" ({role})" if role else "")
        yield tell("process_name", row + 1, 0, name=name)
        yield tell("process_sort_index", row + 1, 0, sort_index=row)
        yield tell("process_labels", row + 1, 0, labels=steps[i]["title"])
    tracks = events.drop_duplicates("tid").sort_values("tid")
    for order, track in enumerate(tracks.itertuples()):
        name = "transfers" if track.stream == "transfer" else track.stream
        name += f" {track.lane + 1}" if track.lane else ""
        yield tell("thread_name", track.pid, track.tid, name=name)
        yield tell("thread_sort_index", track.pid, track.tid, sort_index=order)


def _slices(events: pd.DataFrame) -> Iterator[dict[str, Any]]:
    for event in events.sort_values(["event_row", "begin"], kind="stable").itertuples():
        args: dict[str, Any] = {"kind": event.kind}
        if event.stream != Stream.WAITING:
            args["critical path"] = bool(event.critical)
        for name in ("microbatch", "chunk"):
            if getattr(event, name) >= 0:
                args[name] = getattr(event, name)
        if math.isfinite(event.nominal) and event.nominal > 0.0:
            args["nominal [us]"] = round(1e6 * event.nominal, 3)
            args["slowdown"] = round(event.duration / event.nominal, 6)
        for name, text in (("waited for", event.waited_for), ("kernel classes", event.classes)):
            if text:
                args[name] = text
        yield {
            "ph": "X", "name": event.name, "cat": event.stream, "pid": event.pid,
            "tid": event.tid, "ts": event.begin / 1e3, "dur": (event.end - event.begin) / 1e3,
            "args": args,
        }  # fmt: skip


def _flows(timeline: xr.Dataset, events: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Pairs of flow events, from the end of what sends to the begin of what waited."""
    inside = INSIDE * (events["end"] - events["begin"])
    when = np.rint([events["end"] - inside, events["begin"] + inside]) / 1e3
    pid, tid = events["pid"].tolist(), events["tid"].tolist()
    for number, (a, b) in enumerate(timeline["flow"].values.tolist(), start=1):
        about = {"name": "message", "cat": "message", "id": number}
        yield {"ph": "s", **about, "pid": pid[a], "tid": tid[a], "ts": when[0, a]}
        yield {"ph": "f", **about, "pid": pid[b], "tid": tid[b], "ts": when[1, b], "bp": "e"}
