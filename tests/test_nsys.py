"""Nsight Systems exports: what is read is what was put in, whatever the files are called."""

import json
import sqlite3

import kineto_synth
import nsys_synth
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_kineto_commands import run

from prism import PrismError
from prism.traces import read_trace
from prism.traces.kineto.stepmarks import NamedRanges, find_steps

PROGRAM = kineto_synth.training_step(n_layers=2, kernels=2)
TIMES = kineto_synth.simulate(PROGRAM, *kineto_synth.draw(PROGRAM, 4, 2, seed=5))


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The same times by PyTorch's profiler and by nsys."""
    folder = tmp_path_factory.mktemp("nsys")
    kineto = read_trace(kineto_synth.write(folder, PROGRAM, TIMES, recorded=True))
    for path in folder.glob("*.json"):
        path.unlink()
    nsys_synth.write(folder, PROGRAM, TIMES)
    return kineto, read_trace(folder), folder


def test_as_kineto(both):
    kineto, nsys, _ = both
    assert nsys.format == "nsys" and len(nsys.ops) == len(kineto.ops)
    for name in ("op_kind", "kernel_class", "name"):
        assert (nsys.ops[name].astype(str) == kineto.ops[name].astype(str)).all(), name
    # a collective's launch grid stays, as nsys does not know the size of its message
    alone = (nsys.ops["op_kind"] != "all_reduce").to_numpy()
    shapes = [trace.ops["shape"].astype(str)[alone] for trace in (nsys, kineto)]
    assert (shapes[0] == shapes[1]).all()
    for name in ("rank", "step", "stream", "thread", "correlation", "copy_back"):
        assert (nsys.ops[name].to_numpy() == kineto.ops[name].to_numpy()).all(), name
    # kineto's files round start and duration apart, so that ends differ by a nanosecond
    for name in ("start", "duration", "launch", "launch_end", "transfer"):
        a, b = nsys.ops[name].to_numpy(), kineto.ops[name].to_numpy()
        assert (np.isnan(a) == np.isnan(b)).all() and np.nanmax(np.abs(a - b)) < 1.5e-9, name
    for mine, theirs in zip(nsys.meta["ranks"], kineto.meta["ranks"], strict=True):
        for name in ("kind", "on_stream"):
            assert mine["calls"][name] == theirs["calls"][name], name


def test_values_in_are_values_out(both):
    _, nsys, _ = both
    ops = nsys.ops[nsys.ops["op_kind"] != "launch_gap"]
    for rank in (0, 1):
        mine = ops[ops["rank"] == rank].sort_values("start")
        start, end = TIMES.start[:, rank].ravel(), TIMES.end[:, rank].ravel()
        known = np.isfinite(start)
        first = np.array([nsys_synth.ns(x) for x in start[known]])
        last = np.array([nsys_synth.ns(x) for x in end[known]])
        put_in = np.sort((last - first)[np.argsort(first, kind="stable")])
        assert (np.sort(np.rint(mine["duration"].to_numpy() * 1e9)) == put_in).all()
    assert set(ops["step"]) == {10, 11, 12, 13}


def test_two_processes_in_one_file_and_clocks_apart(both, tmp_path):
    _, apart, _ = both
    together = read_trace(nsys_synth.write(tmp_path, PROGRAM, TIMES, together=True)[0])
    assert together.meta["n_ranks"] == 2
    assert (together.ops["duration"].to_numpy() == apart.ops["duration"].to_numpy()).all()
    shifted = read_trace(nsys_synth.write(tmp_path, PROGRAM, TIMES, offsets_us=[0.0, 300.0]))
    assert shifted.meta["clock_offset_s"][1] == pytest.approx(-300e-6, abs=2e-6)


def test_found_by_content(both, tmp_path):
    _, nsys, folder = both
    path = tmp_path / "trace.csv"
    path.write_bytes((folder / "report.0.sqlite").read_bytes())
    assert read_trace(path).format == "nsys"


def test_fit_replay_and_estimate(both, tmp_path):
    _, _, folder = both
    status, found, _ = run("fit", folder)
    assert status == 0 and found["kind"] == "trace" and found["steps"] == 4
    assert found["edges_recorded"] > 0
    mean = {k["name"]: k["mean"] for k in found["kernels"]}["void reduce_metrics<float>"]
    place = next(i for i, c in enumerate(PROGRAM) if c.name.startswith("void reduce_metrics"))
    put_in = (TIMES.end - TIMES.start)[:, :, place].mean() * 1e-6
    assert mean == pytest.approx(put_in, rel=1e-4)
    status, found, _ = run("replay", folder)
    assert status == 0 and found["max_abs_error"] < 0.01
    assert run("validate", "--trace", folder)[0] == 2


def test_other_step_names(tmp_path):
    nsys_synth.write(tmp_path, PROGRAM, TIMES, step_name="myloop <{}>")
    status, found, _ = run("fit", tmp_path)
    assert status == 0 and found["kind"] == "library"
    assert any("myloop <10>" in n or "c10d::allreduce_" in n for n in found["notes"])
    assert "nothing to replay" in run("replay", tmp_path)[2]
    for name in (r"myloop <(\d+)>", "myloop .*"):
        assert run("fit", tmp_path, "--step-range", name)[1]["steps"] == 4
    assert run("show", tmp_path, "--step-range", "myloop .*")[1]["steps"] == [10, 13]
    assert "--step-range none: " in run("fit", tmp_path, "--step-range", "none")[2]
    assert "no regular expression" in run("fit", tmp_path, "--step-range", "(")[2]


def test_step_names_that_are_guessed():
    def numbers(*labels):
        starts = np.arange(len(labels)) * 10.0
        different = list(dict.fromkeys(labels))
        index = np.array([different.index(label) for label in labels])
        steps, name = find_steps(NamedRanges(different, index, starts, starts + 8.0))
        return [n for n, _, _ in steps], name

    assert numbers("ProfilerStep#3", "ProfilerStep#4") == ([3, 4], "ProfilerStep#N")
    assert numbers("iteration 12", "iteration 13") == ([12, 13], "iteration N")
    assert numbers("train_step", "train_step", "x") == ([0, 1], "train_step")
    assert numbers("Optimizer.step#Adam.step", "forward", "optimizer_step") == ([], "")


def edited(folder, *statements):
    path = folder / "edited.sqlite"
    export = nsys_synth.Export(path)
    nsys_synth.add_rank(export, PROGRAM, TIMES, 0)
    for statement in statements:
        export.db.execute(statement)
    return export.close()


@pytest.mark.parametrize(
    ("statements", "text"),
    [
        (["DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL"], "has no rows"),
        (["DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL"], "--trace=cuda,nvtx"),
        (["ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME COLUMN streamId TO x"], "lacks streamId"),
        (
            [f"DROP TABLE {t}" for t in ("CUPTI_ACTIVITY_KIND_KERNEL", "StringIds",
             "NVTX_EVENTS", "META_DATA_EXPORT")],
            "Nsight",
        ),
    ],
)  # fmt: skip
def test_refused(tmp_path, statements, text):
    _, _, found = run("fit", edited(tmp_path, *statements))
    assert text in found and found.count("\n") == 1


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME",
        "DROP TABLE CUPTI_ACTIVITY_KIND_MEMCPY",
        "DROP TABLE NVTX_EVENTS",
        "DROP TABLE StringIds",
        "UPDATE NVTX_EVENTS SET globalTid = NULL, text = NULL",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET correlationId = NULL, demangledName = 'x'",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = start - 5 WHERE correlationId % 3",
        "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET start = 9e18",
    ],
)
def test_what_is_missing_is_done_without(tmp_path, statement):
    path = edited(tmp_path, statement)
    assert run("show", path)[0] == 0
    assert run("fit", path)[0] in (0, 2)


def test_mixed_kinds(both, tmp_path):
    _, _, folder = both
    report = (folder / "report.0.sqlite").read_bytes()
    (tmp_path / "a.sqlite").write_bytes(report)
    made = kineto_synth.events(PROGRAM, TIMES, 1)
    (tmp_path / "b.json").write_text(json.dumps(made))
    assert "one profiler" in run("fit", tmp_path)[2]
    (tmp_path / "b.json").write_text("a note")
    assert any("left out" in note for note in run("fit", tmp_path)[1]["notes"])


RAW = {}


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_broken_files_are_one_message(tmp_path_factory, data):
    if not RAW:
        RAW["bytes"] = edited(tmp_path_factory.mktemp("raw")).read_bytes()
    content = bytearray(RAW["bytes"])
    for _ in range(data.draw(st.integers(0, 30))):
        content[data.draw(st.integers(16, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("broken") / "x.sqlite"
    path.write_bytes(content[: data.draw(st.integers(16, len(content)))])
    try:
        read_trace(path)
    except PrismError as error:
        assert str(path) in str(error) and "\n" not in str(error)


def test_reading_leaves_the_folder_alone(both):
    _, _, folder = both
    before = sorted(folder.iterdir())
    read_trace(folder)
    assert sorted(folder.iterdir()) == before
    with sqlite3.connect(folder / "report.0.sqlite") as db:
        assert db.execute("SELECT count(*) FROM StringIds").fetchone()[0] > 0
    db.close()
