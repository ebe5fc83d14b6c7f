"""Nsight Systems exports: what is read is what was put in, whatever the files are called."""

import contextlib
import json
import sqlite3

import kineto_synth
import nsys_synth
import numpy as np
import pytest

import prism

PROGRAM = kineto_synth.training_step(n_layers=2, kernels=2)
TIMES = kineto_synth.simulate(PROGRAM, *kineto_synth.draw(PROGRAM, 4, 2, seed=5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The times of two ranks as nsys writes them, a file each."""
    made = tmp_path_factory.mktemp("nsys")
    nsys_synth.write(made, PROGRAM, TIMES)
    return made


def asked(run, command, *arguments):
    """JSON of a command that answers."""
    status, out, err = run(command, *arguments, "--json")
    assert status == 0, err
    return json.loads(out)


def spans(found):
    return {(row["step"], row["rank"]): row["measured"] for row in found["gpu_spans"]}


def edited(folder, *statements):
    """The first rank's export, changed by SQL."""
    path = folder / "edited.sqlite"
    export = nsys_synth.Export(path)
    nsys_synth.add_rank(export, PROGRAM, TIMES, 0)
    for statement in statements:
        export.db.execute(statement)
    return export.close()


def test_the_same_is_said_as_of_the_profiler_s_files(run, folder, tmp_path):
    kineto_synth.write(tmp_path, PROGRAM, TIMES, recorded=True)
    nsys, kineto = (asked(run, "show", path) for path in (folder, tmp_path))
    assert (nsys["format"], kineto["format"]) == ("nsys", "kineto")
    for name in ("n_ops", "steps", "n_ranks", "n_streams"):
        assert nsys[name] == kineto[name], name
    for mine, theirs in zip(nsys["ops"], kineto["ops"], strict=True):
        assert mine == {key: pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
                        for key, value in theirs.items()}  # fmt: skip
    nsys, kineto = (asked(run, "replay", path) for path in (folder, tmp_path))
    # kineto's files round start and duration apart
    assert spans(nsys) == pytest.approx(spans(kineto), abs=2e-9)
    assert nsys["edges_recorded"] == kineto["edges_recorded"] > 0
    assert nsys["max_abs_error"] < 0.01
    for (step, rank), seconds in spans(nsys).items():
        assert seconds == pytest.approx(1e-6 * TIMES.span(step - 10, rank), abs=2e-9)
    fits = [prism.summary(prism.fit(path, seed=1))["kernels"] for path in (folder, tmp_path)]
    for mine, theirs in zip(*fits, strict=True):
        assert (mine["name"], mine["measure"], mine["n"]) == (
            theirs["name"], theirs["measure"], theirs["n"]
        )  # fmt: skip
        assert mine["mean"] == pytest.approx(theirs["mean"], rel=1e-4)


@pytest.mark.parametrize("options", [{"together": True}, {"offsets_us": [0.0, 300.0]}])
def test_processes_in_one_file_and_clocks_apart(run, folder, tmp_path, options):
    nsys_synth.write(tmp_path, PROGRAM, TIMES, **options)
    found = asked(run, "replay", tmp_path)
    assert spans(found) == pytest.approx(spans(asked(run, "replay", folder)), abs=2e-9)
    assert asked(run, "show", tmp_path)["n_ranks"] == 2
    apart = [prism.replay(path)["measured_step_time"].values for path in (tmp_path, folder)]
    assert apart[0] == pytest.approx(apart[1], abs=2e-6)  # all ranks on one clock


def test_ranks_are_those_of_mpi(run, tmp_path):
    pid = "SELECT DISTINCT globalPid, 6 FROM CUPTI_ACTIVITY_KIND_KERNEL"
    path = edited(tmp_path, "CREATE TABLE MPI_RANKS (globalPid INTEGER, rank INTEGER)",
                  f"INSERT INTO MPI_RANKS {pid}")  # fmt: skip
    found = spans(asked(run, "replay", path))
    assert found == pytest.approx(
        {(10 + step, 6): 1e-6 * TIMES.span(step, 0) for step in range(1, 4)}, abs=2e-9
    )


def test_ranges_that_are_steps(run, tmp_path):
    nsys_synth.write(tmp_path, PROGRAM, TIMES, step_name="myloop <{}>")
    # by the rhythm of its kernels, and numbered from 0
    assert asked(run, "fit", tmp_path / "report.0.sqlite")["kind"] == "trace"
    apart = asked(run, "replay", tmp_path)
    for name, steps in ((r"myloop <(\d+)>", [10, 13]), ("myloop .*", [10, 13])):
        assert asked(run, "show", tmp_path, "--step-range", name)["steps"] == steps
    named = prism.summary(prism.replay(tmp_path, step_range="myloop .*"))
    assert named["steps"] == apart["steps"] == 3
    assert apart["measured_mean"] == pytest.approx(named["measured_mean"], rel=1e-9)
    for wrong in ("none", "("):
        status, _, err = run("fit", tmp_path, "--step-range", wrong)
        assert status == 2 and f"--step-range {wrong}: " in err


@pytest.mark.parametrize(
    ("step_name", "steps"),
    [("step {}", [10, 13]), ("iteration {}", [10, 13]), ("train_step_{}", [10, 13]),
     ("train_step", [0, 3]), ("forward", []), (None, [])],
)  # fmt: skip
def test_names_of_steps_that_are_guessed(run, tmp_path, step_name, steps):
    nsys_synth.write(tmp_path, PROGRAM, TIMES, step_name=step_name)
    found = asked(run, "show", tmp_path / "report.0.sqlite")
    assert found["steps"] == (steps or [0, 3])  # unnamed ones are those in which kernels repeat


@pytest.mark.parametrize(
    "statements",
    [
        ["DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL"],
        ["DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL"],
        ["ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME COLUMN streamId TO x"],
        [f"DROP TABLE {t}" for t in ("CUPTI_ACTIVITY_KIND_KERNEL", "StringIds", "NVTX_EVENTS",
                                     "META_DATA_EXPORT")],
    ],
)  # fmt: skip
def test_exports_that_lack_their_kernels(run, tmp_path, statements):
    status, out, err = run("fit", edited(tmp_path, *statements))
    assert (status, out) == (2, "") and "edited.sqlite" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("statement", "lost"),
    [
        ("DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME", 0),
        ("DROP TABLE CUPTI_ACTIVITY_KIND_MEMCPY", 8),
        ("DROP TABLE NVTX_EVENTS", 0),
        ("DROP TABLE StringIds", 0),
        ("UPDATE NVTX_EVENTS SET globalTid = NULL, text = NULL", 0),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET correlationId = NULL, demangledName = 'x'", 0),
        ("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE streamId = 23", 4),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = start - 5 WHERE streamId = 23", 4),
        ("UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET start = 9e18", 0),
    ],
)
def test_what_is_missing_is_done_without(run, tmp_path, statement, lost):
    found = asked(run, "show", edited(tmp_path, statement))
    kept = sum(row["n"] for row in found["ops"] if row["op_kind"] != "launch_gap")
    assert kept == int(np.isfinite(TIMES.start[:, 0]).sum()) - lost


def test_files_of_two_profilers(run, folder, tmp_path):
    (tmp_path / "a.csv").write_bytes((folder / "report.0.sqlite").read_bytes())  # by its content
    other = tmp_path / "b.json"
    other.write_text(json.dumps(kineto_synth.events(PROGRAM, TIMES, 1)))
    status, _, err = run("fit", tmp_path)
    assert status == 2 and "a.csv" in err and "b.json" in err
    other.write_text("a note")
    found = asked(run, "show", tmp_path)
    assert found["format"] == "nsys" and any("b.json" in note for note in found["notes"])


def test_reading_leaves_the_folder_alone(run, folder):
    before = sorted(folder.iterdir())
    asked(run, "show", folder)
    assert sorted(folder.iterdir()) == before
    with contextlib.closing(sqlite3.connect(folder / "report.0.sqlite")) as db:
        assert db.execute("SELECT count(*) FROM StringIds").fetchone()[0] > 0
