"""A strict reader of the Trace Event Format: what Perfetto would leave out is an error here.

Written from the format's description, not from what prism writes. Covers the phases M, X, s and f.
"""

import math
from collections import defaultdict

METADATA = {
    "process_name": ("name", str), "process_sort_index": ("sort_index", int),
    "process_labels": ("labels", str), "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}  # fmt: skip
SLACK_US = 2e-3  # two nanoseconds: times are rounded to one


class BadTrace(AssertionError):
    """What a viewer would refuse, drop or draw in a wrong place."""


def need(condition, text):
    if not condition:
        raise BadTrace(text)


def check_trace(trace):
    """Check a parsed trace; returns its complete events by (pid, tid), by start."""
    need(isinstance(trace, dict) and isinstance(trace["traceEvents"], list), "no traceEvents")
    need(trace.get("displayTimeUnit") in ("ms", "ns"), "displayTimeUnit")
    slices, flows = defaultdict(list), defaultdict(list)
    processes, threads = {}, {}
    for event in trace["traceEvents"]:
        need(isinstance(event.get("name"), str) and event["name"], f"name of {event}")
        for key in ("pid", "tid"):
            number = event.get(key)
            need(type(number) is int and 0 <= number < 2**31, f"{key} of {event}")
        ts = event.get("ts")
        need(type(ts) in (int, float) and math.isfinite(ts) and ts >= 0, f"ts of {event}")
        phase, place = event.get("ph"), (event["pid"], event["tid"])
        if phase == "M":
            need(event["name"] in METADATA, f"metadata {event['name']}")
            key, kind = METADATA[event["name"]]
            need(type(event["args"][key]) is kind, f"args of {event}")
            named = {"process_name": processes, "thread_name": threads}.get(event["name"])
            if named is not None:
                at = event["pid"] if named is processes else place
                need(at not in named, f"named twice: {event}")
                named[at] = event["args"]["name"]
        elif phase == "X":
            dur = event.get("dur")
            need(type(dur) in (int, float) and math.isfinite(dur) and dur >= 0, f"dur of {event}")
            need(isinstance(event.get("args", {}), dict), f"args of {event}")
            slices[place].append(event)
        elif phase in ("s", "f"):
            need(phase == "s" or event.get("bp") == "e", f"bp of {event}")
            need(isinstance(event.get("cat"), str), f"cat of {event}")
            flows[event["cat"], event["id"]].append(event)
        else:
            raise BadTrace(f"phase {phase}")
    _check_tracks(slices, processes, threads)
    _check_flows(slices, flows)
    return slices


def _check_tracks(slices, processes, threads):
    tids = [tid for _, tid in slices]
    need(len(set(tids)) == len(tids), "a tid in two processes")
    for (pid, tid), events in slices.items():
        need(pid in processes, f"process {pid} has no name")
        need((pid, tid) in threads, f"thread {tid} has no name")
        events.sort(key=lambda e: (e["ts"], -e["dur"]))
        open_ends = []
        for event in events:  # nested slices are right, crossing ones are not
            end = event["ts"] + event["dur"]
            while open_ends and open_ends[-1] <= event["ts"] + SLACK_US:
                open_ends.pop()
            need(not open_ends or end <= open_ends[-1] + SLACK_US, f"crosses another: {event}")
            open_ends.append(end)


def _check_flows(slices, flows):
    for number, events in flows.items():
        need([e["ph"] for e in events] == ["s", "f"], f"flow {number} is not one s and one f")
        need(events[0]["ts"] <= events[1]["ts"], f"flow {number} goes back in time")
        for event in events:
            around = slices.get((event["pid"], event["tid"]), ())
            need(
                any(x["ts"] <= event["ts"] <= x["ts"] + x["dur"] for x in around),
                f"no slice around {event}",
            )
