"""prism place: the command, its files, its answer and its pictures, of small jobs."""

import json

import numpy as np
import pytest

import prism
from prism import plots

JOB = """
model: {durations: {forward_s: [1.0, 1.0, 1.0, 1.2], backward_s: [2.0, 2.0, 2.0, 2.4]}}
parallelism: {pp: 4, dp: 8, microbatches: 8, schedule: 1f1b}
cluster: {gpus_per_node: 1}
variability:
  library: none
  effects: {rank: {cv: 0.02}, step: {cv: 0.01}, residual: {cv: 0.05}}
run: {steps: 1000}
"""
SLOW = ("--slow-nodes", "2", "--slowdown", "1.2")
KEYS = {"placements", "best", "worst", "current", "worst_over_best_p50", "worst_over_best_p95",
        "objective", "tolerance", "p_correct", "stage_slack", "alternatives"}  # fmt: skip


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def pipeline(schedule="1f1b", cluster=None):
    return prism.load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"pp": 4, "dp": 4, "microbatches": 8, "schedule": schedule},
        "cluster": {"gpus_per_node": 1, "placement": "tp-cp-pp-dp", **(cluster or {})},
        "variability": {"library": None},
    })  # fmt: skip


@pytest.fixture(scope="module")
def moved():
    """Two nodes of the last stage of a 1F1B pipeline, in two replicas; no noise, no spare."""
    nodes = {3: prism.slow_node(1.2), 7: prism.slow_node(1.2)}
    return prism.place(pipeline(), nodes=nodes, seed=1)


def codes(result):
    return [finding.code for finding in prism.answer(result).findings]


# -------------------------------------------------------------------------------- the command
@pytest.mark.usefixtures("empty_pictures")
def test_a_small_job_end_to_end(run, job, tmp_path):
    (tmp_path / "hosts").write_text("".join(f"h{i}\n" for i in range(34)))
    out = tmp_path / "out"
    command = ("place", job, "--at", "h24,25", "--slowdown", "1.3", "--seed", 4, "--json", "-q",
               "--spares", 2, "--tolerance", "1%", "--objective", "p99",
               "--hosts", tmp_path / "hosts")  # fmt: skip
    status, first, err = run(*command, "-o", out)
    assert status == 0, err
    found = json.loads(first)
    assert first.count("\n") == 1 and set(found) >= KEYS
    assert (found["objective"], found["tolerance"], found["seed"]) == ("p99", 0.01, 4)
    nodes = {node["node"]: (node["compute"], node["host"]) for node in found["slow_nodes"]}
    assert nodes == {24: (1.3, "h24"), 25: (1.3, "h25")}
    # the last stage is the longest: a slow node there costs most
    assert int(np.argmax([row["cost"] for row in found["stage_slack"]])) == 3
    assert found["findings"][0]["code"] == "better_alternative" and found["action"] == "spares"
    rows = {row["name"]: row for row in found["placements"]}
    best = rows[found["best"]]
    assert best["saved"] > 0.05 and 3 not in best["stages"]
    # the files hold the best placement; one GPU per node: a line each
    names = {"hosts.csv", "hostfile.txt", "slurm_hostfile.txt", "openmpi_hostfile.txt",
             "mpich_hostfile.txt", "rankfile.txt", "result.nc", "summary.json"}  # fmt: skip
    names |= {f"{stem}.{kind}" for stem in ("alternatives", "slots") for kind in ("png", "svg")}
    assert {file.name for file in out.iterdir()} == names
    hosts = [line.split(",")[2] for line in (out / "hosts.csv").read_text().splitlines()[1:]]
    assert sorted(hosts.index(node) // 8 for node in ("h24", "h25")) == sorted(best["stages"])
    for name in ("hostfile.txt", "slurm_hostfile.txt"):
        assert (out / name).read_text().split() == hosts
    kept = prism.load(out / "result.nc")
    order = kept["hosts"].sel(placement=kept.attrs["best"]).to_numpy()
    assert [f"h{n}" for n in order] == hosts
    # what was written is a placement that a job takes, and its step is as long as was said
    slowdowns = {"cluster.node_slowdowns": {24: 1.3, 25: 1.3}}
    as_best = prism.load_job(job).replace(
        {"cluster.nodes": 34, "cluster.hosts": order.tolist()}, slowdowns
    )
    steps = prism.simulate(as_best, replicates=64 * 64, seed=4).step_time
    assert float(np.quantile(steps, 0.5)) == pytest.approx(best["p50"], rel=0.003)
    assert json.loads((out / "summary.json").read_text()) == found
    again = json.loads(run(*command, "--threads", 1)[1])
    assert again | {"wall_seconds": 0} == found | {"wall_seconds": 0}
    status, text, _ = run("show", out / "result.nc")
    assert status == 0 and max(map(len, text.splitlines())) <= 110


def test_which_nodes_are_slow_and_in_what(run, job, tmp_path):
    table = tmp_path / "nodes.csv"
    table.write_text("node,batch,slowdown\n3,a,1.2\n5,a,0.1\n3,b,1.4\n")
    (tmp_path / "net.csv").write_text("node,network\n3,1.4\n")
    rows = ({"node": f"h{n}", "gemm-flops/bf16_tc_flops:0": 500.0 if n == 9 else 700.0}
            for n in range(32))  # fmt: skip
    summary = tmp_path / "results-summary.jsonl"
    summary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ("--set", "cluster.node_slowdowns={7: 1.5}")
    for arguments, nodes in (
        (("--at", "3, 17", "--slowdown", "1.5", "--kind", "memory"),
         {3: (1.0, 1.5, 1.0), 17: (1.0, 1.5, 1.0)}),
        (("--measured-nodes", table, "--where", "batch=b"), {3: (1.4, None, 1.0)}),
        (("--measured-nodes", table, "--where", "batch=a", "--measured-nodes",
          tmp_path / "net.csv"), None),
        (("--measured-nodes", summary), {9: (pytest.approx(1.4, rel=1e-3), None, 1.0)}),
        (own, {7: (1.5, None, 1.0)}),
    ):  # fmt: skip
        status, out, err = run("place", job, *arguments, "--json", "-q", "--seed", 1)
        if nodes is None:
            assert status == 2 and "batch" in err
            continue
        assert status == 0, err
        found = json.loads(out)["slow_nodes"]
        assert {n["node"]: (n["compute"], n["memory"], n["network"]) for n in found} == nodes
    status, out, _ = run("place", job, *SLOW, "--kind", "network", "--json", "-q", "--seed", 0)
    found = json.loads(out)
    assert [node["network"] for node in found["slow_nodes"]] == [1.2, 1.2]
    assert len(found["notes"]) == 1 and found["objective"] == "p95"
    assert (found["tolerance"], found["seed"]) == (0.001, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--measured-nodes"),
        (("--slow-nodes", "0", "--slowdown", "1.2"), "--slow-nodes"),
        (("--slow-nodes", "2"), "--slowdown"),
        (("--slowdown", "1.2"), "--slow-nodes"),
        (("--kind", "compute"), "--slow-nodes"),
        (("--slow-nodes", "2", "--slowdown", "nan"), "nan"),
        (("--slow-nodes", "2", "--slowdown", "0"), "0"),
        (("--at", "3", "--slowdown", "-1"), "-1"),
        (("--at", "99", "--slowdown", "1.2"), "32 nodes"),
        (("--at", "3,3", "--slowdown", "1.2"), "3"),
        (("--at", "a", "--slowdown", "1.2"), "--hosts"),
        (("--at", "3,4", "--slow-nodes", "3", "--slowdown", "1.2"), "--at"),
        ((*SLOW, "--measured-nodes", "x.csv"), "--slow-nodes"),
        ((*SLOW, "--where", "a=b"), "--measured-nodes"),
        (("--measured-nodes", "none.csv"), "none.csv"),
        ((*SLOW, "--tolerance", "0"), "0"),
        ((*SLOW, "--tolerance", "much"), "0.1%"),
        ((*SLOW, "--objective", "p90"), "p95"),
        ((*SLOW, "--hosts", "none.txt"), "none.txt"),
        ((*SLOW, "--kind", "disk"), "network"),
        ((*SLOW, "--set", "parallelism.pq=3"), "pp"),
        (("--slow-nodes", "33", "--slowdown", "1.2"), "32"),
        ((*SLOW, "-o", "{file}"), "file"),
    ],
)
def test_mistakes_are_told(run, job, tmp_path, arguments, message):
    (tmp_path / "file").write_text("")
    status, out, err = run("place", job, *(x.format(file=tmp_path / "file") for x in arguments))
    assert (status, out) == (2, ""), err
    assert message in err and "Traceback" not in err


# ------------------------------------------------------------------------------- what is found
def test_findings_follow_from_what_is_best(moved):
    assert codes(moved) == ["move", "cost_now", "no_better_alternative", "stage_cost", "selection"]
    answer, found = prism.answer(moved), prism.summary(moved)
    rows = {row["name"]: row for row in found["placements"]}
    facts = dict(answer.facts)
    assert facts["change"].value == rows[found["best"]]["saved"] > 0.01
    assert answer.warnings == () and found["action"] == found["best"]
    nodes = {3: prism.slow_node(1.2), 7: prism.slow_node(1.2)}
    # a gain below the tolerance is no reason to move; nor is there one where all places are alike
    for job, options in ((pipeline(), {"tolerance": 0.2}), (pipeline("gpipe"), {})):
        first = prism.answer(prism.place(job, nodes=nodes, seed=1, **options)).findings[0]
        assert (first.code, first.severity) == ("leave", "answer")
    # spares are better than any placement, unless by less than the tolerance
    for tolerance, code in ((0.001, "better_alternative"), (0.2, "leave")):
        made = prism.place(pipeline(), nodes=nodes, spares=2, seed=1, tolerance=tolerance)
        assert codes(made)[0] == code
        assert prism.summary(made)["action"] == ("spares" if tolerance < 0.1 else "current")


def test_a_choice_that_is_a_guess_is_warned_of(moved):
    """Of made-up sureness: the rest of the answer is that of a placement."""
    made = prism.answer(moved.to_xarray().assign(p_correct=0.33))
    assert len(made.warnings) == 1


def test_tables_show_the_figures_of_the_json(moved):
    found, answer = prism.summary(moved), prism.answer(moved)
    rows = [*found["placements"], found["healthy"], *found["alternatives"].values()]
    rows += found["stage_slack"]
    listed = {value for row in rows for value in row.values() if isinstance(value, float)}
    cells = [c.value for t in answer.tables for r in t.rows for c in r if hasattr(c, "value")]
    assert len(cells) > 15 and set(cells) <= listed
    healthy = {row["name"]: row for row in found["placements"]}[found["current"]]
    assert found["healthy"]["saved"] == pytest.approx(1 - 33.0 / healthy["p95"], abs=1e-5)


# ---------------------------------------------------------------------------------- in pictures
def test_alternatives_are_points_at_p50_and_p95_for_the_same_work(moved):
    found = prism.summary(moved)
    ax = plots.plot_alternatives(moved)
    points = {
        round(float(x), 3)
        for line in ax.lines if line.get_marker() == "o"
        for x, _ in line.get_xydata()
    }  # fmt: skip
    rows = {row["name"]: row for row in found["placements"]}
    drop = found["alternatives"]["drop_nodes"]
    assert drop["work"] == 0.75 and round(drop["p95"] / 0.75, 3) in points
    for which in ("best", "current", "worst"):
        assert round(rows[found[which]]["p95"], 3) in points
    possible = [a for a in found["alternatives"].values() if "impossible" not in a]
    assert len(ax.get_yticklabels()) == 3 + 1 + len(possible) - (rows["worst"] is rows["current"])


def test_costs_are_bars_by_stage_or_a_map(moved):
    found = prism.summary(moved)
    cost = np.array(found["slot_cost"])
    bars = plots.plot_slots(moved)
    shown = [bar.get_width() for bar in bars.patches]
    assert shown == pytest.approx(100 * cost[:, 0] / found["alike_step"])
    differ = cost + np.arange(4)
    data = moved.to_xarray()
    ax = plots.plot_slots(data.assign(slot_cost=data.slot_cost + np.arange(4)))
    assert np.asarray(ax.images[0].get_array()) == pytest.approx(100 * differ / found["alike_step"])
    now, best = (line.get_xydata().tolist() for line in ax.lines)
    assert now == [[0.0, 3.0], [1.0, 3.0]]  # replica, stage
    assert sorted(best) != now
    # many replicas share columns, and the worst of each is shown
    many = np.zeros((4, 300))
    many[1, 123] = 1.0
    ax = plots.plot_slots(data.drop_vars("slot_cost").assign(slot_cost=(("stage", "many"), many)))
    image = np.asarray(ax.images[0].get_array())
    assert image.shape == (4, 60) and image[1, 24] > 0 and (image > 0).sum() == 1
    for plot in (plots.plot_slots, plots.plot_alternatives):
        assert plot(moved, ax) is ax
