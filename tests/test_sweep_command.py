"""prism sweep: the command, its answer and its plot."""

import json

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr

import prism
from prism import load_job, sweep
from prism.analyses.sweeps.points import Point
from prism.analyses.sweeps.rows import label, make_rows
from prism.plots import plot_sweep
from prism.present.answer import words

JOB = """
model: {durations: {forward_s: 1.0, backward_s: 2.0}}
parallelism: {pp: 4, dp: 2, microbatches: 8}
variability:
  library: none
  effects: {rank: {cv: 0.02}, step: {cv: 0.01}, residual: {law: lognormal, cv: 0.05}}
run: {steps: 1000}
"""
VARY = ("--vary", "parallelism.schedule=1f1b,gpipe", "--vary", "parallelism.microbatches=4,8")
LAYOUT = {"parallelism.tp": 8, "parallelism.pp": 16, "parallelism.cp": 1, "parallelism.dp": 128}


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def made_row(p50, p95, figures="full", own=False, **setting):
    row = {f"parallelism.{k}": v for k, v in setting.items()}
    row |= {"figures": figures, "own": own, "world_size": 16, "work": 1.0,
            "memory": {"gib": 40.0, "limit_gib": 80.0, "p_fits": 0.99},
            "at_least": 0.9 * (p50 or 10), "ideal_step_time": 0.9 * (p50 or 10),
            "clusters": 8 if figures == "screen" else 64}  # fmt: skip
    for name, value in (("p50", p50), ("p95", p95), ("mean", p50)):
        row |= {name: value, f"{name}_same_work": value, f"{name}_se": 0.01,
                f"{name}_change": None if own or value is None else value / 11.0 - 1.0,
                f"{name}_change_se": 0.001}  # fmt: skip
    return row | {"exposed_communication": 0.1}


@pytest.fixture
def made():
    """A made-up sweep: fastest and robust differ, one between them, one left out."""
    rows = [
        made_row(10.4, 10.8, tp=8),
        made_row(10.2, 10.9, tp=4) | {"indistinguishable_from_best": True},
        made_row(10.0, 11.2, tp=2),
        made_row(11.0, 11.0, tp=1, own=True), made_row(12.0, 12.5, "screen", tp=16),
        made_row(None, None, "bound", tp=32),
    ]  # fmt: skip
    reasons = ["needs 95 GiB: P(fits) below 50 % of 74.5 GiB of h100"] * 2 + ["heads"]
    reasons += ["needs 99 GiB: P(fits) below 50 % of 74.5 GiB of h100"]
    return {
        "job": "made", "seed": 1, "objective": "p95", "layouts": True,
        "varied": ["parallelism.tp"], "rows": rows, "fastest": 2, "robust": 0, "best": 0,
        "frontier": [2, 1, 0], "p_correct": {"fastest": 0.99, "robust": 0.5, "best": 0.5},
        "refused": [{"parallelism.tp": "64", "reason": reason} for reason in reasons],
        "notes": ["a note"], "warnings": [], "wall_seconds": 3.0, "rank_clusters": 256,
    }  # fmt: skip


def answer_of(numbers):
    attrs = {"kind": "sweep", "summary": json.dumps(numbers), "call": "{}"}
    return prism.answer(xr.Dataset(attrs=attrs))


def table_of(numbers, title="Settings"):
    """Rows of a table as text, by the first column."""
    (table,) = [table for table in answer_of(numbers).tables if table.title.startswith(title)]
    return {words(row[0]): [words(cell) for cell in row[1:]] for row in table.rows}


# ------------------------------------------------------------------------------ the command
def test_json_is_one_object_with_what_was_promised(run, job):
    status, out, err = run("sweep", job, *VARY, "--replicates", 1024, "--seed", 3, "--json", "-q")
    assert (status, err) == (0, "")
    numbers = json.loads(out)
    assert {"job", "seed", "varied", "rows", "refused", "fastest", "robust", "frontier"} <= set(
        numbers
    )
    assert numbers["varied"] == ["parallelism.schedule", "parallelism.microbatches"]
    row = numbers["rows"][0]
    assert {"step_time", "p50", "p95", "p50_se", "p95_se", "memory", "ideal_step_time",
            "exposed_communication", *numbers["varied"]} <= set(row)  # fmt: skip
    assert {"mean", "std", "p5", "p99", "p95_ci", "between_cluster_std"} <= set(row["step_time"])
    asked = {"parallelism.schedule": ["1f1b", "gpipe"], "parallelism.microbatches": ["4", "8"]}
    alone = prism.summary(sweep(job, asked, replicates=1024, seed=3))
    assert [r["p95"] for r in alone["rows"]] == [r["p95"] for r in numbers["rows"]]


def test_a_folder_is_whole_and_show_tells_it(run, job, tmp_path):
    out = tmp_path / "out"
    asked = ("--replicates", 1024, "--seed", 3, "--details", "-o", out)
    status, text, err = run("sweep", job, *VARY, *asked)
    assert status == 0
    assert err == f"wrote {out}: result.nc, summary.json, sweep.png, sweep.svg\n"
    assert (out / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    status, shown, _ = run("show", out / "result.nc", "--details")
    assert status == 0
    assert shown.rstrip() == text.rpartition("elapsed")[0].rstrip()
    status, shown, _ = run("show", out / "result.nc", "--json")
    assert json.loads(shown)["kind"] == "sweep"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "nothing to vary"),
        (("--vary", "parallelism.dp"), "expected key=value"),
        (("--vary", "parallelism.dq=1,2"), "dq"),
        (("--vary", "parallelism.recompute=none,attention"), "attention"),
        (("--layouts",), "--layouts needs a model's sizes"),
        (("--vary", "parallelism.pp=4", "--objective", "p42"), "p42"),
        (("--vary", "parallelism.pp=4", "--set", "parallelism.pp=x"), "parallelism.pp"),
    ],
)
def test_bad_input_is_told_without_a_traceback(run, job, options, words):
    status, out, err = run("sweep", job, *options)
    assert (status, out) == (2, "")
    assert words in err
    assert "Traceback" not in err


def test_a_place_that_cannot_be_written_is_told_first(run, job, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = run("sweep", job, *VARY, "-o", tmp_path / "file")
    assert status == 2
    assert "is a file" in err


# ------------------------------------------------------------------------------ the answer
def test_fastest_and_robust_are_both_named_when_they_differ(made):
    found = {finding.code: finding for finding in answer_of(made).findings}
    assert list(found) == ["fastest", "robust", "indistinguishable"]
    assert found["fastest"].severity == found["robust"].severity == "answer"
    for code, figures in (("fastest", ("tp 2", "10.00 s", "11.20 s")), ("robust", ("tp 8",))):
        assert all(text in found[code].text for text in figures)
    assert "tp 4" in found["indistinguishable"].text
    made["fastest"] = 0
    codes = [finding.code for finding in answer_of(made).findings]
    assert codes == ["fastest_and_robust", "indistinguishable"]


def test_a_choice_that_is_not_sure_is_a_warning(made):
    assert len(answer_of(made).warnings) == 1
    assert len(answer_of(made | {"p_correct": {"fastest": 0.99, "robust": 0.99}}).warnings) == 0
    assert len(answer_of(made | {"warnings": ["refused"]}).json()["warnings"]) == 2


def test_refusals_that_differ_in_numbers_are_one(made):
    reasons = table_of(made, "Refused")
    assert list(reasons) == ["3", "1"] and reasons["1"] == ["heads"]


def test_labels_leave_out_what_is_one_and_keep_whole_names():
    assert label(LAYOUT, list(LAYOUT)) == "tp 8 pp 16 dp 128"
    key = "cluster.links.network.latency_us"
    assert label({key: 5}, [key]) == "network.latency_us 5"
    keys = {"parallelism.schedule": "1f1b", "parallelism.vpp": 2}
    assert label(keys, list(keys)) == "1f1b vpp 2"


def test_the_table_has_marks_and_says_what_is_left_out(made):
    rows = table_of(made)
    marks = {"2": "fastest", "8": "robust", "4": "indistinguishable", "1": "job's own", "16": ""}
    assert {tp: row[-1] for tp, row in rows.items()} == marks
    (table,) = [table for table in answer_of(made).tables if table.title == "Settings"]
    titles = [column.title for column in table.columns]
    assert titles == ["tp", "GiB", "P(fits)", "p50", "p95", "± 95 %", "p95 vs own", ""]
    for row, given in zip(table.rows, made["rows"], strict=False):
        assert [row[3].value, row[4].value] == [given["p50"], given["p95"]]
    assert any("1 not simulated" in note for note in table.notes)


def test_settings_beyond_a_screen_are_details(made):
    made["rows"][4:5] = [made_row(12.0 + i, 12.5 + i, "screen", tp=100 + i) for i in range(20)]
    tables = {table.title: table for table in answer_of(made).tables}
    assert len(tables["Settings"].rows) == 12 and not tables["Settings"].details
    assert len(tables["Other simulated settings"].rows) == 12
    assert tables["Other simulated settings"].details


def test_keys_that_are_the_same_in_all_rows_stand_in_a_note(made):
    made["varied"].append("parallelism.vpp")
    for row in made["rows"]:
        row["parallelism.vpp"] = 2
    (table,) = [table for table in answer_of(made).tables if table.title == "Settings"]
    assert "vpp" not in [column.title for column in table.columns]
    assert "vpp 2" in table.notes[0]


def test_settings_within_the_error_of_the_difference_are_marked(job):
    """Independent noise of 1 % of 64 clusters: 0.1 % is within the error, 2 % is not."""
    rng = np.random.default_rng(2)
    points = [
        Point(
            setting={"run.steps": str(k)}, job=load_job(job), done=True,
            times=level * np.exp(0.01 * rng.standard_normal((64, 1)) + np.zeros(64)),
        )
        for k, level in enumerate((1.0, 1.001, 1.02))
    ]  # fmt: skip
    rows = make_rows(points, "mean")
    assert [row["indistinguishable_from_best"] for row in rows] == [False, True, False]
    assert rows[0]["best_change"] is None
    for row in rows[1:]:
        change = row["mean"] / rows[0]["mean"] - 1.0
        assert row["best_change"] == pytest.approx(change)
        assert row["best_change_se"] == pytest.approx(0.01 * np.sqrt(2 / 64), rel=0.4)


# ------------------------------------------------------------------------------ the plot
def test_the_plot_has_the_frontier_and_names(made):
    ax = plot_sweep(made)
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert {"frontier", "fastest: tp 2", "robust: tp 8", "the job's own: tp 1"} <= set(names)
    (line,) = [line for line in ax.lines if line.get_label() == "frontier"]
    np.testing.assert_allclose(line.get_xydata(), [[10.0, 11.2], [10.2, 10.9], [10.4, 10.8]])
    assert ax.get_xlabel() == "p50 of the step [s]"
    made["rows"][1]["work"] = 2.0
    assert "same tokens" in plot_sweep(made).get_xlabel()
    assert not plt.get_fignums()


def test_far_settings_are_told_and_not_drawn(made):
    made["rows"][4] |= {"p50_same_work": 30.0, "p95_same_work": 31.0}
    ax = plot_sweep(made)
    assert ax.get_xlim()[1] < 15
    assert any("1 slower setting not shown" in text.get_text() for text in ax.texts)
