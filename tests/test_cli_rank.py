"""prism rank: the command, its answer and its pictures, of small jobs that are really ranked."""

import json

import numpy as np
import pytest

import prism
from prism import plots

JOB = """
model: {durations: {forward_s: [1.0, 1.2], backward_s: [2.0, 2.4]}}
parallelism: {pp: 2, microbatches: 4, dp: 2}
variability:
  library: none
  effects: {rank: {cv: 0.02}, step: {cv: 0.01}, residual: {cv: 0.05}}
run: {steps: 1000}
"""
KEYS = {"name", "time_share", "cv", "first_order", "total_order", "total_order_ci",
        "covariance_share", "tail_share", "std_if_frozen", "p95_if_frozen", "p95_reduction",
        "critical_path_share"}  # fmt: skip


def strictly(out):
    """One JSON object, without what no other reader of JSON takes."""

    def refuse(word):
        raise ValueError(word)

    assert out.count("\n") == 1
    return json.loads(out, parse_constant=refuse)


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(JOB)
    return path


def chain(of_run=None, model_error=None, dp=1, **effects):
    variability = {"library": None, "effects": effects}
    return prism.load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"microbatches": 4, "dp": dp}, "run": of_run or {},
        "variability": variability | ({"model_error": model_error} if model_error else {}),
    })  # fmt: skip


@pytest.fixture(scope="module")
def ranking():
    job = chain(step={"cv": 0.03}, residual={"law": "normal", "cv": 0.03}, rank={"cv": 0.004})
    return prism.rank(job, seed=1, speed_up=0.2)


@pytest.mark.usefixtures("few_clusters", "empty_pictures")
def test_a_small_job_end_to_end(run, small, tmp_path):
    out = tmp_path / "out"
    asked = ("--seed", 0, "--speed-up", "10", "--threads", 1, "--set", "run.steps=77")
    status, first, err = run("rank", small, *asked, "--json", "-q", "-o", out)
    assert status == 0, err
    found = strictly(first)
    assert (found["target"], found["seed"], found["speed_up"]) == ("step_time", 0, 0.1)
    rows = found["kernels"] + found["effects"]
    assert {row["name"] for row in rows} >= {"compute", "rank", "step"}
    assert all(set(row) >= KEYS for row in rows)
    assert found["kernels"][0]["mean_reduction_faster"] == pytest.approx(0.1, abs=0.03)
    assert found["findings"][0]["code"] == "largest_cause"
    # intervals of these few clusters are wider than was aimed at
    assert len(found["warnings"]) == 1 < max(np.ptp(row["total_order_ci"]) for row in rows) / 0.06
    names = {f"{stem}.{kind}" for stem in ("ranking", "critical_path") for kind in ("png", "svg")}
    assert {file.name for file in out.iterdir()} == names | {"result.nc", "summary.json"}
    assert json.loads((out / "summary.json").read_text()) == found
    status, text, _ = run("show", out / "result.nc")
    assert status == 0 and max(map(len, text.splitlines())) <= 110
    shown = json.loads(run("show", out / "result.nc", "--json")[1])
    assert (shown["kind"], shown["summary"]) == ("ranking", found)
    again = strictly(run("rank", small, *asked, "--json", "-q")[1])
    assert again | {"wall_seconds": 0} == found | {"wall_seconds": 0}
    job = prism.load_job(small, ["run.steps=77"])
    same = prism.summary(prism.rank(job, seed=0, speed_up=0.1))["effects"]
    assert [row["p95_reduction"] for row in same] == [r["p95_reduction"] for r in found["effects"]]


@pytest.mark.usefixtures("few_clusters")
def test_a_run_is_ranked_by_what_it_consists_of():
    """The model's error makes the variance, a rank effect the time that p95 can be rid of."""
    job = chain({"steps": 100, "failures": "none"}, 0.05, 8, rank={"cv": 0.02})
    made = prism.rank(job, "time_to_train", seed=1)
    found, answer = prism.summary(made), prism.answer(made)
    terms = found["variance_by_term"]
    assert terms["model_error"] > 0.9
    codes = [finding.code for finding in answer.findings]
    assert codes[:2] == ["largest_cause", "largest_for_p95"]
    fact = answer.facts[-1][1]
    assert fact.value == pytest.approx(terms["model_error"])
    gain = found["effects"][0]["p95_reduction"]
    assert gain > 0.01  # eight GPUs wait for the slowest: 1.4 standard deviations of 2 %


def test_a_job_that_does_not_vary(run, small):
    off = [f"variability.effects.{name}.cv=0" for name in ("rank", "step", "residual")]
    sets = [word for key in off for word in ("--set", key)]
    status, out, err = run("rank", small, "--seed", 1, "-q", "--json", *sets)
    assert status == 0, err
    found = strictly(out)
    assert [finding["code"] for finding in found["findings"]] == ["no_variance"]
    assert found["std"] == 0.0 and {row["total_order"] for row in found["kernels"]} == {0.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--quick",), "--quick"),
        (("--target", "loss"), "step_time"),
        (("--seed", "-1"), "--seed"),
        (("--speed-up", "100"), "--speed-up"),
        (("--set", "variability.dependence=none"), "dependence"),
        (("--set", "parallelism.pq=3"), "pp"),
        (("-o", "{file}"), "file"),
        (("--set", "variability.librari=none"), "library"),
    ],
)
def test_mistakes_are_told(run, tmp_path, arguments, message):
    (tmp_path / "file").write_text("")
    arguments = [x.format(file=tmp_path / "file") for x in arguments]
    status, out, err = run("rank", "pipeline-8x32", *arguments)
    assert (status, out) == (2, "") and message in err and "Traceback" not in err


def test_rankings_that_cannot_be_shown(run, ranking, tmp_path):
    """One of an earlier version, and one with a figure missing."""
    for left_out in ("recurrence", "mean"):
        path = tmp_path / f"{left_out}.nc"
        prism.save(ranking.to_xarray().drop_vars(left_out), path)
        status, out, err = run("show", path)
        assert (status, out) == (2, "") and "prism rank" in err and "Traceback" not in err


# -------------------------------------------------------------------------------- what is shown
def test_tables_show_the_figures_of_the_json_sorted(ranking):
    found, answer = prism.summary(ranking), prism.answer(ranking)
    rows = found["kernels"] + found["effects"]
    first = answer.tables[0].rows
    totals = sorted((row["total_order"] for row in rows), reverse=True)
    assert [row[3].value for row in first] == [x for x in totals if x >= 0.005]
    numbers = [*rows, found]
    listed = {value for row in numbers for value in row.values() if isinstance(value, float)}
    cells = [c for table in answer.tables for row in table.rows for c in row[1:] if c]
    cells = [c.value for c in cells if not isinstance(c, str)]
    assert len(cells) > 20 and set(cells) - {None} <= listed
    assert answer.facts[-1][1].value == totals[0]
    assert [finding.code for finding in answer.findings] == ["largest_cause", "additivity"]


def test_pictures_show_the_causes_that_matter(ranking):
    rows = {row["name"]: row for k in ("kernels", "effects") for row in prism.summary(ranking)[k]}
    ax = plots.plot_ranking(ranking)
    widths = sorted(bar.get_width() for bar in ax.patches)
    matter = sorted(row["total_order"] for row in rows.values() if row["total_order"] >= 0.005)
    assert widths == pytest.approx(matter) and len(ax.get_yticklabels()) == len(matter)
    (first,) = (line for line in ax.lines if line.get_label() == "first-order")
    orders = sorted(rows.values(), key=lambda row: -row["total_order"])
    shown = [row["first_order"] for row in orders[: len(widths)]]
    assert list(first.get_xdata()) == pytest.approx(shown)
    for intervention, name in (("freeze", "std_reduction"), ("speed", "std_reduction_faster")):
        bars = plots.plot_interventions(ranking, intervention=intervention).patches
        shown = [-bar.get_width() for bar in bars]
        assert max(shown) == pytest.approx(max(row[name] or 0.0 for row in rows.values()))
    path = [text.get_text() for text in plots.plot_path(ranking).get_yticklabels()]
    assert len(path) == 1  # kernel classes alone
    for plot in (plots.plot_ranking, plots.plot_interventions, plots.plot_path):
        ax = plots.plot_ranking(ranking).figure.add_subplot()
        assert plot(ranking, ax) is ax
