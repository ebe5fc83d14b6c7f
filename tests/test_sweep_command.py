"""prism sweep: the command, its words, its table and its plot."""

import json

import matplotlib.pyplot as plt
import numpy as np
import pytest
from rich.console import Console

from prism.analyses.sweep import summarize_sweep, sweep
from prism.analyses.texts.sweep import findings, in_words, label, refusals, sweep_warnings
from prism.plots.sweep import plot_sweep
from prism.present.views.sweep import WIDTH, shown_rows, sweep_view

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
    row |= {"figures": figures, "own": own, "world_size": 16, "memory_gib": 40.0, "work": 1.0,
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
        made_row(10.4, 10.8, tp=8), made_row(10.2, 10.9, tp=4), made_row(10.0, 11.2, tp=2),
        made_row(11.0, 11.0, tp=1, own=True), made_row(12.0, 12.5, "screen", tp=16),
        made_row(None, None, "ideal", tp=32),
    ]  # fmt: skip
    reasons = ["needs 95 GiB, more than the 74.5 GiB of h100"] * 2 + ["heads"]
    reasons += ["needs 99 GiB, more than the 74.5 GiB of h100"]
    return {
        "job": "made", "seed": 1, "objective": "p95", "layouts": True,
        "varied": ["parallelism.tp"], "rows": rows, "fastest": 2, "robust": 0, "best": 0,
        "frontier": [2, 1, 0], "p_correct": {"fastest": 0.99, "robust": 0.5, "best": 0.5},
        "refused": [{"parallelism.tp": "64", "reason": reason} for reason in reasons],
        "notes": ["a note"], "warnings": [], "wall_seconds": 3.0, "rank_clusters": 256,
    }  # fmt: skip


def text_of(numbers):
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(sweep_view(numbers))
    return capture.get()


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
    assert {"step_time", "p50", "p95", "p50_se", "p95_se", "memory_gib", "ideal_step_time",
            "exposed_communication", *numbers["varied"]} <= set(row)  # fmt: skip
    assert {"mean", "std", "p5", "p99", "p95_ci", "between_cluster_std"} <= set(row["step_time"])
    asked = {"parallelism.schedule": ["1f1b", "gpipe"], "parallelism.microbatches": ["4", "8"]}
    alone = summarize_sweep(sweep(job, asked, replicates=1024, seed=3))
    assert [r["p95"] for r in alone["rows"]] == [r["p95"] for r in numbers["rows"]]


def test_a_folder_is_whole_and_show_tells_it(run, job, tmp_path):
    out = tmp_path / "out"
    status, text, err = run("sweep", job, *VARY, "--replicates", 1024, "--seed", 3, "-o", out)
    assert status == 0
    assert err == f"wrote {out}: result.nc, summary.json, sweep.png, sweep.svg\n"
    assert (out / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    status, shown, _ = run("show", out / "result.nc")
    assert status == 0
    assert shown == text
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


# ------------------------------------------------------------------------------ words and table
def test_fastest_and_robust_are_both_named_when_they_differ(made):
    told = findings(made)
    assert told[0].startswith("Fastest (least p50) is tp 2: p50 10.00 s, p95 11.20 s (-9.1 ± 0.2 %")
    assert told[1].startswith("Robust (least p95) is tp 8: p50 10.40 s")
    assert told[2].startswith("1 more on the frontier")
    assert told[3].startswith("The job's own, tp 1: p50 11.00 s")
    made["fastest"] = 0
    assert findings(made)[0].startswith("Fastest and robust is tp 8")


def test_a_choice_that_is_not_sure_is_a_warning(made):
    (told,) = sweep_warnings(made)
    assert "better by 0.1 % than the robust one is certain to 50 % only" in told
    assert in_words(made)["warnings"] == [told]


def test_refusals_that_differ_in_numbers_are_one(made):
    assert refusals(made) == ["3: need more than the 74.5 GiB of h100", "1: heads"]


def test_labels_leave_out_what_is_one_or_the_same():
    assert label(LAYOUT, list(LAYOUT)) == "tp 8 pp 16 dp 128"
    assert label({"cluster.links.network.latency_us": 5}, ["cluster.links.network.latency_us"]) == (
        "links.network.latency_us 5"
    )


def test_the_table_has_marks_and_says_what_is_left_out(made):
    text = text_of(made)
    lines = {line.split()[0]: line for line in text.splitlines() if " s  " in line}
    assert lines["2"].rstrip().endswith("fastest")
    assert lines["8"].rstrip().endswith("robust")
    assert lines["4"].rstrip().endswith("frontier")
    assert lines["1"].rstrip().endswith("the job's own")
    assert lines["16"].rstrip().endswith("screened")
    assert "32" not in lines
    assert "1 layout was not simulated" in text
    assert "come from the ranks of 256 clusters" in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= WIDTH
    assert 5 not in shown_rows(made)


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
