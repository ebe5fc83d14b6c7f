"""Whatever a profiler's file holds, fit, replay and validate answer, or refuse it with a reason."""

import contextlib
import gzip
import io
import json
import re
from copy import deepcopy

import kineto_synth as synth
import pytest
from campaign import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prism import __main__ as entry

PROGRAM = synth.training_step(n_layers=2, kernels=2)
TIMES = synth.simulate(PROGRAM, *synth.draw(PROGRAM, 3, 2, seed=5))
RANKS = [json.dumps(synth.events(PROGRAM, TIMES, rank, world=2)) for rank in (0, 1)]
OTHER = synth.simulate(PROGRAM, *synth.draw(PROGRAM, 3, 1, seed=6))


def not_json(constant):
    raise AssertionError(f"{constant} in the JSON")


def run(command, *arguments):
    """Status, JSON and messages of a command; a traceback or a warning would be status 1."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = entry.main([command, *map(str, arguments), "--json", "-q"])
    text = err.getvalue()
    assert status in (0, 2), text
    if status == 0:
        return status, json.loads(out.getvalue(), parse_constant=not_json), text
    assert text.startswith("prism: ") and len(text) < 1_500
    return status, None, text


def answers(path):
    """Statuses of fit and replay; validate never has enough steps."""
    assert run("validate", "--trace", path)[0] == 2
    return run("fit", path)[0], run("replay", path)[0]


def write(folder, *texts):
    for i, text in enumerate(texts):
        path = folder / f"rank{i}.json"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def changed(rank, edit):
    document = json.loads(RANKS[rank])
    edit(document)
    return json.dumps(document)


def test_two_ranks_are_answered(tmp_path):
    assert answers(write(tmp_path, *RANKS)) == (0, 0)


def test_files_beside_a_trace_are_left_out(tmp_path):
    write(tmp_path, *RANKS)
    (tmp_path / "notes.txt").write_text("recorded on Tuesday\n")
    status, found, _ = run("replay", tmp_path)
    assert status == 0 and any("notes.txt: " in note for note in found["notes"])


def test_ranks_of_different_jobs_are_refused(tmp_path):
    sizes = changed(1, lambda d: d["distributedInfo"].update(world_size=8))
    _, _, text = run("replay", write(tmp_path, RANKS[0], sizes))
    assert re.search(r"rank1\.json: .*8 ranks, .*rank0\.json .*2;", text)

    def later(document):
        document["traceEvents"] = [e for e in document["traceEvents"] if "nccl" not in e["name"]]
        for event in document["traceEvents"]:
            event["ts"] += 3_600e6

    _, _, text = run("fit", write(tmp_path, RANKS[0], changed(1, later)))
    assert re.search(r"rank1\.json: .*no collective .*rank0\.json", text)


def test_the_same_rank_twice_is_refused(tmp_path):
    _, _, text = run("fit", write(tmp_path, RANKS[0], RANKS[0]))
    assert re.search(r"rank1\.json: .*rank 0, .*rank0\.json", text)


def test_times_days_away_are_dropped_and_counted(tmp_path):
    def far(document):
        events = document["traceEvents"]
        kernels = [e for e in events if e["cat"] == "kernel"]
        kernels[2]["ts"] = 1e300
        kernels[4]["dur"] = 1e17
        kernels[6]["ts"] = -5e14
        next(e for e in events if e["cat"] == "cuda_runtime")["ts"] = 9e15

    status, found, _ = run("replay", write(tmp_path, changed(0, far)) / "rank0.json")
    notes = " ".join(found["notes"])
    assert status == 0 and found["measured_mean"] < 0.01
    assert "3 device activities" in notes
    assert "1 host event " in notes


@pytest.mark.parametrize("rank", ["x", -3, 10**30, None, 2.5, [1]])
def test_a_rank_that_is_no_rank_is_not_told(tmp_path, rank):
    text = changed(0, lambda d: d.update(distributedInfo={"rank": rank, "world_size": rank}))
    assert answers(write(tmp_path, text) / "rank0.json") == (0, 0)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b'{"traceEvents": []}', b'{"traceEvents": null}', b'{"traceEvents": [{}]}',
     b"[[[[", b"\xff\xfe", gzip.compress(b"", mtime=0), b"null",
     gzip.compress(RANKS[0].encode(), mtime=0)[:20],
     b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1}]}'],
)  # fmt: skip
def test_what_holds_nothing_is_refused(tmp_path, content):
    assert answers(write(tmp_path, content) / "rank0.json") == (2, 2)


_JUNK = st.sampled_from(
    [None, True, -1, 0, 1e308, -1e308, 2**63, 2**64 + 5, -(2**70), 10**400, 1e-320, "", "12", "x",
     "5 us", [], [1, [2]], {}, {"a": {"b": 1}}, "NaN", 3.7, 1e18, 5e15]
)  # fmt: skip
_ARGUMENTS = (
    "correlation", "stream", "grid", "block", "bytes", "Collective name", "In msg nelems", "dtype",
    "Group size", "Process Group Name", "Process Group Ranks", "wait_on_stream", "Input Dims",
    "wait_on_cuda_event_record_corr_id", "Input type", "External id",
)  # fmt: skip
_FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")
_ROW = st.integers(0, 10_000)
_FACTOR = st.sampled_from([-1.0, 0.0, 1e-3, 1e3, 1e6, 1e290])
_CHANGE = st.one_of(
    st.tuples(st.just("field"), _ROW, st.sampled_from(_FIELDS), _JUNK),
    st.tuples(st.just("argument"), _ROW, st.sampled_from(_ARGUMENTS), _JUNK),
    st.tuples(st.just("scale"), _ROW, st.sampled_from(("ts", "dur")), _FACTOR),
    st.tuples(st.just("copy"), _ROW, st.just(""), st.none()),
    st.tuples(st.just("all"), _ROW, st.sampled_from(_FIELDS), _JUNK),
    st.tuples(st.just("without"), _ROW, st.just(""), st.none()),
    st.tuples(st.just("event"), _ROW, st.just(""), _JUNK),
)


def damage(document, change):
    """Spoil one thing of a document."""
    kind, row, name, value = deepcopy(change)  # a value put into itself would be no JSON
    events = document["traceEvents"]
    row %= max(1, len(events))
    event = events[row] if events and isinstance(events[row], dict) else {}
    if kind == "field":
        event[name] = value
    elif kind == "argument" and isinstance(event.get("args"), dict):
        event["args"][name] = value
    elif kind == "scale" and isinstance(event.get(name), float):
        event[name] *= value
    elif kind == "copy" and events:
        events.append(json.loads(json.dumps(events[row])))
    elif kind == "all":
        document["traceEvents"] = [{**e, name: value} for e in events if isinstance(e, dict)]
    elif kind == "without":
        gone = event.get("cat")
        document["traceEvents"] = [
            e for e in events if not (isinstance(e, dict) and e.get("cat") == gone)
        ]
    elif kind == "event" and events:
        events[row] = value


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_CHANGE, max_size=5), st.booleans(), st.floats(0.0, 1.5), st.booleans())
def test_no_change_of_a_trace_is_a_traceback(tmp_path_factory, changes, both, cut, packed):
    document = json.loads(RANKS[0])
    for change in changes:
        damage(document, change)
    text = json.dumps(document).encode()
    text = gzip.compress(text) if packed else text
    text = text[: int(cut * len(text))]
    folder = tmp_path_factory.mktemp("changed")
    write(folder, text, *RANKS[1 : 1 + both])
    answers(folder if both else folder / "rank0.json")
