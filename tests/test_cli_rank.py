"""prism rank: what reaches the ranking, what is printed, drawn and written.

The ranking itself is stood in for, but in the last tests; its own say whether it is right.
"""

import importlib
import json
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from prism.common.labels import label, short_label
from prism.common.resultfiles import save
from prism.plots.rank import plot_interventions, plot_path, plot_ranking
from prism.present.answer import Figure as Number
from prism.present.answer import words
from prism.present.answers import rank as module
from prism.present.answers.rank import rank_answer
from prism.present.terminal import WIDTH, render
from prism.simulation.results import VARIABLES, make_dataset

KEYS = {"name", "time_share", "cv", "first_order", "total_order", "total_order_ci",
        "covariance_share", "tail_share", "std_if_frozen", "p95_if_frozen", "p95_reduction",
        "critical_path_share"}  # fmt: skip


def row(name, first, total, std=None, p95=None, half=0.01, **more):
    """One cause, with intervals of one half-width."""
    out = {"name": name, "cv": 0.02, "time_share": None, "critical_path_share": None}
    out |= {"covariance_share": None, "tail_share": None, "first_order": first}
    out |= {"first_order_ci": [first - half, first + half], "total_order": total}
    out |= {"total_order_ci": [total - half, total + half]}
    out |= {"std_if_frozen": None, "p95_if_frozen": None, "p95_reduction": None}
    if std is not None:
        out |= {"std_if_frozen": 0.36 * (1 - std), "p95_if_frozen": 10.2 * (1 - p95)}
        out |= {"std_reduction": std, "std_reduction_ci": [std - half, std + half]}
        out |= {"p95_reduction": p95, "p95_reduction_ci": [p95 - 0.001, p95 + 0.001]}
    return out | more


def ranking(kernels=None, effects=None, **more):
    """A summary of a ranking, as the ranking itself gives it."""
    kernels = kernels or [
        row("dp_reduce_scatter", 0.60, 0.61, 0.41, 0.013, critical_path_share=0.3,
            covariance_share=0.7, tail_share=0.55),
        row("gemm_mlp", 0.0001, 0.0001, 0.01, 0.03, critical_path_share=0.7,
            covariance_share=0.3, tail_share=0.45),
        row("optimizer", 0.0, 0.0, 0.0, 0.0, 1e-5, critical_path_share=0.0,
            covariance_share=0.0, tail_share=0.0),
    ]  # fmt: skip
    effects = effects if effects is not None else [row("rank", 0.2, 0.36, 0.1, 0.002)]
    return {"job": "made-up", "target": "step_time", "seed": 3, "mean": 9.75,
            "std": 0.36, "p95": 10.2, "within_cluster_std": 0.19, "between_cluster_std": 0.27,
            "kernels": kernels, "effects": effects, "findings": [], "speed_up": 0.1,
            "wall_seconds": 2.0} | more  # fmt: skip


def dataset():
    """A ranking of four causes; what the plots are drawn from."""
    n = 4
    share = np.array([0.6, 0.3, 0.1, np.nan])
    values = {
        "time_share": share, "input_cv": np.full(n, 0.02), "critical_path_share": share,
        "covariance_share": share, "tail_share": share[[1, 0, 2, 3]],
        "first_order": np.array([0.3, 0.1, 0.0, 0.4]),
        "total_order": np.array([0.35, 0.1, 1e-6, 0.5]),
        "within_cluster_std": 0.1, "between_cluster_std": 0.2, "target_mean": 10.0,
        "target_std": 0.22, "target_p95": 10.4,
    }  # fmt: skip
    figures = [name for name in ("mean", "std", "p50", "p95", "p99") if f"{name}_if" in VARIABLES]
    spread = np.array([-0.02, 0.02])
    values["total_order_ci"] = values["total_order"][:, None] + spread
    values["first_order_ci"] = values["first_order"][:, None] + spread
    for name in figures:
        values[f"{name}_if"] = np.full((2, n), 5.0)
    for name in (f"{figure}_reduction" for figure in figures):
        values[name] = np.array([[0.4, 0.1, 0.0, 0.5]] * 2)
        values[f"{name}_ci"] = values[name][..., None] + spread
    coords = {
        "input": ["gemm_mlp", "dp_all_gather", "optimizer", "rank"],
        "input_kind": ("input", ["kernels"] * 3 + ["effects"]),
        "bound": ["low", "high"], "intervention": ["freeze", "speed"],
    }  # fmt: skip
    call = {"target": "step_time", "speed_up": 0.1, "seed": 1}
    attrs = {"job_name": "made-up", "call": json.dumps(call), "seed": "1", "job": "{}"}
    return make_dataset(values, coords, attrs | {"wall_seconds": 1.0})


@pytest.fixture
def asked(monkeypatch):
    """Stand in for the ranking; gives what it was asked."""
    importlib.import_module("prism.analyses.rank")
    calls = []
    module = sys.modules["prism.analyses.rank"]  # the name in the package may be the function

    def rank(job, target, **options):
        calls.append((job, target, options))
        return dataset()

    monkeypatch.setattr(module, "rank", rank)
    return calls


@pytest.fixture
def answer(monkeypatch):
    """Make the answer of a summary."""

    def make(numbers):
        monkeypatch.setattr(module, "summarize_rank", lambda _: numbers)
        return rank_answer(None)

    return make


def told(answer, code):
    """Texts of the findings of a code."""
    return [found.text for found in answer.findings if found.code == code]


def table_of(answer, title=""):
    """Rows of a table by their label, as texts; nothing where there is no such table."""
    rows = (table.rows for table in answer.tables if table.title.startswith(title))
    return {row[0]: [words(cell) for cell in row[1:]] for row in next(rows, ())}


def lines_of(answer, details=False):
    console = Console(width=WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(render(answer, details))
    return [line.rstrip() for line in capture.get().splitlines()]


# ------------------------------------------------------------------------------ the command
def test_options_reach_the_ranking(run, asked):
    command = ("rank", "pipeline-8x32", "--target", "time_to_train", "--seed", "0", "--threads")
    status, _, err = run(*command, "1", "--set", "run.steps=77")
    assert status == 0, err
    job, target, options = asked[0]
    assert (job.name, job.n_steps, target) == ("pipeline-8x32", 77, "time_to_train")
    assert (options["seed"], options["threads"]) == (0, 1)
    run("rank", "pipeline-8x32")
    assert asked[1][1] == "step_time" and asked[1][2]["speed_up"] is None
    assert asked[1][2]["seed"] is None


def test_how_much_faster(run, asked):
    status, _, err = run("rank", "pipeline-8x32", "--speed-up", "25")
    assert status == 0, err
    assert asked[0][2]["speed_up"] == pytest.approx(0.25)
    status, out, err = run("rank", "pipeline-8x32", "--speed-up", "100")
    assert (status, out) == (2, "") and "--speed-up" in err


def test_json_is_one_object(run, asked):
    status, out, err = run("rank", "pipeline-8x32", "--json")
    found = json.loads(out)
    assert (status, out.count("\n"), err) == (0, 1, "")
    assert found["target"] == "step_time"
    for kind in ("kernels", "effects"):
        assert all(set(cause) >= KEYS for cause in found[kind])
    assert [cause["name"] for cause in found["kernels"]] == [
        "gemm_mlp", "dp_all_gather", "optimizer"
    ]  # fmt: skip
    assert found["warnings"] == [] and found["findings"]


def test_folder_holds_result_summary_and_plots(run, asked, tmp_path):
    status, _, err = run("rank", "pipeline-8x32", "-o", tmp_path / "out")
    plots = {f"{stem}.{kind}" for stem in ("ranking", "critical_path") for kind in ("png", "svg")}
    names = plots | {"result.nc", "summary.json"}
    assert status == 0 and {file.name for file in (tmp_path / "out").iterdir()} == names
    assert "ranking.png" in err
    written = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert written["kernels"][0]["name"] == "gemm_mlp"
    status, out, _ = run("show", tmp_path / "out" / "result.nc")
    assert status == 0 and "GEMM MLP" in out
    shown = json.loads(run("show", tmp_path / "out" / "result.nc", "--json")[1])
    assert shown["kind"] == "ranking" and shown["summary"] == written


def test_a_ranking_of_bounds_is_not_shown(run, tmp_path):
    """`--quick` of earlier versions saved upper bounds that did not hold."""
    old = dataset().drop_vars("total_order_ci")
    call = json.loads(old.attrs["call"]) | {"quick": True}
    save(old.assign_attrs(call=json.dumps(call), kind="ranking"), tmp_path / "old.nc")
    status, out, err = run("show", tmp_path / "old.nc")
    assert (status, out) == (2, "") and "--quick" in err and "Traceback" not in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--quick",), "--quick"),
        (("--target", "loss"), "step_time"),
        (("--seed", "-1"), "--seed"),
        (("--set", "variability.dependence=none"), "dependence"),
        (("--set", "parallelism.pq=3"), "pp"),
        (("--frozen",), "frozen"),
    ],
)
def test_mistakes_are_told(run, arguments, message):
    status, out, err = run("rank", "pipeline-8x32", *arguments)
    assert (status, out) == (2, "")
    assert message in err and "Traceback" not in err


def test_no_job_is_told(run, tmp_path):
    assert run("rank")[0] == 2
    status, _, err = run("rank", "pipelin-8x32")
    assert status == 2 and "pipeline-8x32" in err
    (tmp_path / "job.yaml").write_text("base: pipeline-8x32\nvariability: {librari: none}\n")
    status, _, err = run("rank", tmp_path / "job.yaml")
    assert status == 2 and "job.yaml:2" in err


def test_a_folder_that_cannot_be_is_told_before_any_work(run, asked, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = run("rank", "pipeline-8x32", "-o", tmp_path / "file")
    assert status == 2 and "file" in err and not asked


# --------------------------------------------------------------------------------- findings
def test_labels_are_those_of_a_performance_engineer():
    assert short_label("dp_cp_reduce_scatter") == "dp-cp reduce_scatter"
    assert short_label("tp_all_reduce") == "tp all_reduce"
    assert label("gemm_attention") == "GEMM attention projections"
    assert label("memory", "kernels") == "norm and elementwise"
    assert label("regime", "effects") == "congestion (links)"
    assert label("factor", "effects") == "factor effect"
    assert label("void gemm<float [4]>", "kernels") == "void gemm<float [4]>"


def test_the_largest_cause_comes_first_with_what_fixing_it_brings(answer):
    found = answer(ranking())
    first = found.findings[0]
    assert (first.code, first.severity) == ("largest_cause", "answer")
    for part in ("dp reduce_scatter", "61 ± 1 %", "-41.0 ± 1.0 %", "-1.3 ± 0.1 %"):
        assert part in first.text
    fact = dict(found.facts)["largest cause, dp reduce_scatter"]
    assert fact.value == found.json()["kernels"][0]["total_order"]


def test_causes_that_are_indistinguishable_are_named_together(answer):
    found = answer(ranking(effects=[row("rank", 0.6, 0.605)]))
    (text,) = told(found, "largest_cause")
    assert "dp reduce_scatter" in text and "rank effect" in text and "indistinguishable" in text
    assert "rank effect" not in told(answer(ranking()), "largest_cause")[0]


def test_a_change_that_is_not_distinguishable_is_only_bounded(answer):
    still = row("stall", 0.9, 0.9, 0.5, 0.0005)
    (text,) = told(answer(ranking([], [still])), "largest_cause")
    assert "-50.0 ± 1.0 %" in text and "within 0.15 %" in text and "median" not in text


def test_another_cause_that_p95_gains_more_from(answer):
    (text,) = told(answer(ranking()), "largest_for_p95")
    assert "GEMM MLP" in text and "-3.0 ± 0.1 %" in text
    assert not told(answer(ranking([row("p2p", 0.9, 0.9, 0.5, 0.02)], [])), "largest_for_p95")
    # a kernel class at its median has no effects on it either: no rival of an effect
    effect = row("step", 0.9, 0.9, 0.5, 0.002)
    assert not told(answer(ranking(effects=[effect])), "largest_for_p95")


def of_a_run(**parts):
    errors = dict.fromkeys(parts, 1e-4)
    return {"target": "time_to_train", "variance_by_term": parts, "variance_by_term_se": errors}


def test_other_terms_of_a_run_are_causes(answer):
    """What helps p95 most is named even where no cause of steps makes much of the variance."""
    small = row("rank", 0.002, 0.002, 0.02, 0.03, half=1e-4)
    terms = of_a_run(slow_steps=0.002, model_error=0.9, lost_work=0.098)
    calm = [row("compute", 0.0, 0.0, 0.0, 0.0, half=0.0)]
    found = answer(ranking(calm, [small], **terms))
    assert list(table_of(found))[:3] == ["model error", "work lost to failures",
                                         "rank effect (GPU speed)"]  # fmt: skip
    (text,) = told(found, "largest_cause")
    assert "90 %" in text and "--calibrate" in text and "GPUs" not in text
    (text,) = told(found, "largest_for_p95")
    assert "rank effect" in text and "-3.0" in text and "slowest GPUs" in text
    assert "100 %" in told(found, "additivity")[0]
    still = row("rank", 0.002, 0.002, 0.0, 0.001, half=1e-4)
    assert not told(answer(ranking(calm, [still], **terms)), "largest_for_p95")


def test_a_remedy_is_named_only_where_it_helps(answer):
    gains, none = row("rank", 0.9, 0.9, 0.5, 0.002), row("rank", 0.9, 0.9, 0.001, 0.0005)
    texts = [told(answer(ranking([], [one])), "largest_cause")[0] for one in (gains, none)]
    assert ["prism place" in text for text in texts] == [True, False]


def test_additivity(answer):
    (text,) = told(answer(ranking()), "additivity")
    assert "20 ± 2 %" in text  # what arises only where causes meet
    (text,) = told(answer(ranking(effects=[row("rank", 0.4, 0.4)])), "additivity")
    assert "100 ± 2 %" in text


def test_faster_kernels_have_a_table(answer):
    changed = {"std_reduction_faster": 0.1, "p95_reduction_faster": -0.002}
    numbers = ranking([row("p2p", 0.9, 0.95, **changed)], [])
    found = answer(numbers | {"speed_up": 0.25})
    faster = next(table.title for table in found.tables if "25 %" in table.title)
    assert table_of(found, faster) == {"p2p (between stages)": ["-10.0 %", "+0.20 %"]}
    # nothing was held at its median
    assert "median" not in " ".join(lines_of(found))


def test_warnings(answer):
    assert answer(ranking()).warnings == ()
    (warning,) = answer(ranking(effects=[row("rank", 0.3, 0.4, half=0.2)])).warnings
    assert "rank effect 40 ± 20 %" in warning
    # above one half a wider interval will do
    assert answer(ranking(effects=[row("rank", 0.6, 0.7, half=0.055)])).warnings == ()


def test_nothing_varies(answer):
    calm = [row("compute", 0.0, 0.0, 0.0, 0.0, 0.0)]
    found = answer(ranking(calm, [], std=0.0, within_cluster_std=0.0, between_cluster_std=0.0))
    assert [finding.code for finding in found.findings] == ["no_variance"]
    assert any("compute" in line for line in lines_of(found))


# ----------------------------------------------------------------------------------- tables
def test_tables_fit_and_causes_are_sorted(answer):
    found = answer(ranking())
    assert max(map(len, lines_of(found, details=True))) <= WIDTH
    shown = table_of(found)
    assert list(shown) == ["dp reduce_scatter", "rank effect (GPU speed)", "GEMM MLP"]
    assert shown["dp reduce_scatter"] == ["60 %", "61 ± 1 %", "-41.0 ± 1.0 %", "-1.3 ± 0.1 %", ""]
    assert list(table_of(found, "Smaller causes")) == ["optimizer"]


def test_figures_are_those_of_the_json(answer):
    numbers = ranking()
    listed = {v for rows in (numbers["kernels"], numbers["effects"]) for r in rows
              for v in r.values() if isinstance(v, float)}  # fmt: skip
    listed |= {v for v in numbers.values() if isinstance(v, float)}
    cells = [c for t in answer(numbers).tables for r in t.rows for c in r if isinstance(c, Number)]
    assert len(cells) > 20 and {cell.value for cell in cells} <= listed


def test_wide_figures_fit(answer):
    kernels = [row("k" * 60, 0.6, 0.9, 0.99, 0.95, 0.4, critical_path_share=1.0,
                   covariance_share=-0.999, tail_share=-0.999)]  # fmt: skip
    numbers = ranking(kernels, [row("microbatch", 0.0, 1.0, 0.999, 0.999, 1.0)])
    assert max(map(len, lines_of(answer(numbers), details=True))) <= WIDTH


def test_many_causes_take_a_screen(answer):
    kernels = [row(f"kernel_{i}", 0.05, 0.05, 0.02, 0.01) for i in range(20)]
    found = answer(ranking(kernels))
    assert len(lines_of(found)) <= 35 < len(lines_of(found, details=True))


# ------------------------------------------------------------------------------------ plots
def test_plot_has_a_bar_per_cause_that_matters():
    ax = plot_ranking(dataset())
    names = [text.get_text() for text in ax.get_yticklabels()]
    assert names == ["rank effect (GPU speed)", "GEMM MLP", "dp all_gather"]
    assert sorted(bar.get_width() for bar in ax.patches) == pytest.approx([0.1, 0.35, 0.5])
    (first,) = (line for line in ax.lines if line.get_label() == "first-order")
    assert list(first.get_xdata()) == pytest.approx([0.4, 0.3, 0.1])
    assert ax.figure.axes == [ax]
    changed = plot_interventions(dataset())
    assert sorted(bar.get_width() for bar in changed.patches)[0] == pytest.approx(-0.5)
    assert "frozen" in changed.get_xlabel()


def test_plots_use_given_axes():
    for plot in (plot_ranking, plot_interventions, plot_path):
        ax = Figure().add_subplot()
        assert plot(dataset(), ax) is ax
        assert ax.figure.axes == [ax]
    assert "10 %" in plot_interventions(dataset(), intervention="speed").get_xlabel()


def test_the_path_has_kernel_classes_only():
    names = [text.get_text() for text in plot_path(dataset()).get_yticklabels()]
    assert "GEMM MLP" in names and not any("effect" in name for name in names)


# ---------------------------------------------------------------------------------- for real
SMALL = """
model: {durations: {forward_s: [1.0, 1.2], backward_s: [2.0, 2.4]}}
parallelism: {pp: 2, microbatches: 4, dp: 2}
variability:
  library: none
  effects: {rank: {cv: 0.02}, step: {cv: 0.01}, residual: {cv: 0.05}}
run: {steps: 1000}
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def test_a_small_job_end_to_end(run, small, tmp_path, empty_pictures, few_clusters):
    out = tmp_path / "out"
    status, first, err = run("rank", small, "--seed", 4, "--json", "-q", "-o", out,
                             "--speed-up", "10")  # fmt: skip
    assert status == 0, err
    found = json.loads(first)
    assert found["target"] == "step_time" and found["seed"] == 4
    rows = found["kernels"] + found["effects"]
    assert {r["name"] for r in rows} >= {"compute", "rank", "step"}
    assert all(set(r) >= KEYS for r in rows)
    for kind in ("kernels", "effects"):
        totals = [r["total_order"] for r in found[kind]]
        assert totals == sorted(totals, reverse=True)
    assert sum(r["covariance_share"] for r in found["kernels"]) == pytest.approx(1.0)
    assert found["findings"][0]["code"] == "largest_cause"
    assert json.loads((out / "summary.json").read_text()) == found
    status, text, _ = run("show", out / "result.nc")
    assert status == 0 and max(map(len, text.splitlines())) <= WIDTH


def test_a_job_that_does_not_vary(run, small):
    off = ["-q"]
    for name in ("rank", "step", "residual"):
        off += ["--set", f"variability.effects.{name}.cv=0"]
    status, out, err = run("rank", small, "--seed", 1, *off)
    assert status == 0, err
    assert "does not vary" in out
    found = json.loads(run("rank", small, "--seed", 1, *off, "--json")[1])
    assert [finding["code"] for finding in found["findings"]] == ["no_variance"]


def test_a_run_is_ranked(run, small, few_clusters):
    few = ("--set", "run.steps=100")
    status, out, err = run("rank", small, "--seed", 1, "--target", "time_to_train", "-q", *few)
    assert status == 0, err
    assert "time-to-train" in out


def test_a_broken_ranking_is_told(run, tmp_path):
    save(dataset().drop_vars("target_mean"), tmp_path / "half.nc")
    status, _, err = run("show", tmp_path / "half.nc")
    assert status == 2 and "half.nc" in err
