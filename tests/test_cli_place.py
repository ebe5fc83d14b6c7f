"""prism place: what reaches the analysis, what is said, drawn and written.

The analysis itself is stood in for, but in the last tests; its own say whether it is right.
"""

import importlib
import json
import sys

import numpy as np
import pytest
import xarray as xr
from placement_made import placement
from rich.console import Console

from prism import NodeSlowdown, load_job
from prism.analyses.placements.rows import rows
from prism.cli.commands.options import Share
from prism.cluster.nodemap import Placement
from prism.common.text import percent_change
from prism.jobs.hostfiles import read_hosts
from prism.present.answer import Figure, words
from prism.present.answers.place import place_answer
from prism.present.terminal import WIDTH, render
from prism.simulation.results import provenance

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


def dataset(job, **more):
    """A made-up answer for a job of 32 nodes; the best exchanges nodes 0 and 24."""
    hosts = np.tile(np.arange(32), (3, 1))
    hosts[1, [0, 24]] = hosts[1, [24, 0]]
    numbers = placement(**more)
    call = {"seed": 3}
    attrs = provenance(job, call) | {"kind": "placement", "summary": json.dumps(numbers)}
    attrs |= {which: numbers[which] for which in ("best", "worst", "current", "objective")}
    data = {"hosts": (("placement", "slot"), hosts)}
    return xr.Dataset(data, {"placement": ["p0", "p1", "p2"]}, attrs)


@pytest.fixture
def asked(monkeypatch):
    """Stand in for the analysis; gives what it was asked."""
    importlib.import_module("prism.analyses.place")
    calls = []
    module = sys.modules["prism.analyses.place"]  # the name in the package may be the function

    def place(job, **options):
        calls.append((job, options))
        return dataset(job)  # of host names and notes: test_place.py

    monkeypatch.setattr(module, "place", place)
    return calls


def answer(**more):
    """Answer of a made-up placement."""
    return place_answer(xr.Dataset(attrs={"summary": json.dumps(placement(**more))}))


def told(answer, code):
    """Texts of the findings of a code."""
    return [found.text for found in answer.findings if found.code == code]


def table_of(answer, title=""):
    """Rows of a table by their label, as texts; nothing where there is no such table."""
    rows = next((table.rows for table in answer.tables if table.title == title), ())
    return {row[0]: [words(cell) for cell in row[1:]] for row in rows}


def lines_of(answer, details=True):
    console = Console(width=WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(render(answer, details))
    return [line.rstrip() for line in capture.get().splitlines()]


# ------------------------------------------------------------------------------ the command
def test_options_reach_the_analysis(run, asked, job):
    more = ("--kind", "network", "--spares", "4", "--objective", "p99")
    rest = ("--tolerance", "0.2%", "--seed", "0", "--threads", "1", "--set", "run.steps=77")
    status, _, err = run("place", job, *SLOW, *more, *rest)
    assert status == 0, err
    given, options = asked[0]
    assert given.n_steps == 77
    assert options.pop("progress") is None
    assert options == {
        "slow_nodes": 2, "slowdown": 1.2, "kind": "network", "spares": 4,
        "objective": "p99", "tolerance": 0.002, "seed": 0, "threads": 1, "hosts": {},
    }  # fmt: skip
    run("place", job, *SLOW)
    assert asked[1][1]["kind"] == "compute" and asked[1][1]["objective"] == "p95"
    assert asked[1][1]["tolerance"] == 0.001 and asked[1][1]["seed"] is None
    run("place", job)  # the job's own slow nodes
    assert not {"nodes", "slow_nodes"} & set(asked[2][1])


def test_nodes_are_named_by_number_or_by_host(run, asked, job, tmp_path):
    status, _, err = run("place", job, "--at", "3, 17", "--slowdown", "1.5", "--kind", "memory")
    assert status == 0, err
    slow = NodeSlowdown(memory=1.5)
    assert dict(asked[0][1]["nodes"]) == {3: slow, 17: slow}
    (tmp_path / "hosts").write_text("".join(f"h{i}\n" for i in range(32)))
    run("place", job, "--at", "h17", "--slowdown", "1.5", "--hosts", tmp_path / "hosts")
    assert dict(asked[1][1]["nodes"]) == {17: NodeSlowdown(1.5)}


def test_measured_nodes_are_read_and_their_notes_told(run, asked, job, tmp_path):
    table = tmp_path / "nodes.csv"
    table.write_text("node,batch,slowdown\n3,a,1.2\n5,a,0.1\n3,b,1.4\n")
    measured = ("--measured-nodes", table, "--where", "batch=a")
    status, out, err = run("place", job, *measured, "--json")
    assert status == 0, err
    assert dict(asked[0][1]["nodes"]) == {3: NodeSlowdown(1.2), 5: NodeSlowdown(0.1)}
    (note,) = asked[0][1]["nodes"].notes
    assert note.startswith(str(table)) and "node 5" in note


def test_several_files_say_different_things(run, asked, job, tmp_path):
    (tmp_path / "a.csv").write_text("node,slowdown\n3,1.2\n")
    (tmp_path / "b.csv").write_text("node,network\n3,1.4\n")
    files = [x for name in "ab" for x in ("--measured-nodes", tmp_path / f"{name}.csv")]
    status, _, err = run("place", job, *files)
    assert status == 0, err
    assert dict(asked[0][1]["nodes"]) == {3: NodeSlowdown(1.2, network=1.4)}


def test_folder_holds_result_plots_and_hosts(run, asked, job, tmp_path):
    (tmp_path / "hosts").write_text("".join(f"h{i}\n" for i in range(32)))
    out = tmp_path / "out"
    status, _, err = run("place", job, *SLOW, "--hosts", tmp_path / "hosts", "-o", out)
    assert status == 0, err
    plots = {f"{stem}.{kind}" for stem in ("alternatives", "slots") for kind in ("png", "svg")}
    names = {"hosts.csv", "hostfile.txt", "slurm_hostfile.txt", "openmpi_hostfile.txt"}
    names |= {"mpich_hostfile.txt", "rankfile.txt", "result.nc", "summary.json"}
    assert {file.name for file in out.iterdir()} == plots | names
    best = [24, *range(1, 24), 0, *range(25, 32)]
    assert read_hosts(out / "hosts.csv") == best
    for name in ("hostfile.txt", "slurm_hostfile.txt"):  # one GPU per node: one line each
        assert (out / name).read_text().split() == [f"h{i}" for i in best]
    slot = (out / "hosts.csv").read_text().splitlines()[1 + 9]
    assert slot == "9,9,h9,9,1,1"  # the second stage begins at rank 8
    assert asked[0][1]["hosts"][24] == "h24"
    # what was written is a placement that a job takes
    moved = load_job(str(job), [f"cluster.hosts={out / 'hosts.csv'}", "cluster.nodes=32"])
    assert Placement(moved).members()[0, 0, 0] == 24


def test_json_is_one_object(run, asked, job):
    status, out, err = run("place", job, *SLOW, "--json")
    found = json.loads(out)
    assert (status, out.count("\n"), err) == (0, 1, "")
    assert set(found) >= KEYS
    assert (found["findings"][0]["code"], found["warnings"]) == ("better_alternative", [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--slow-nodes", "0", "--slowdown", "1.2"), "--slow-nodes"),
        (("--slow-nodes", "2"), "need --slowdown X"),
        (("--slowdown", "1.2"), "need --slow-nodes K, or --at"),
        (("--kind", "compute"), "need --slow-nodes K, or --at"),
        (("--slow-nodes", "2", "--slowdown", "nan"), "nan"),
        (("--slow-nodes", "2", "--slowdown", "0"), "more than 0"),
        (("--at", "3", "--slowdown", "-1"), "more than 0"),
        (("--at", "99", "--slowdown", "1.2"), "--at 99: no node 99: the cluster has 32 nodes"),
        (("--at", "3,3", "--slowdown", "1.2"), "node 3 is there twice"),
        (("--at", "a", "--slowdown", "1.2"), "--hosts LIST"),
        (("--at", "3,4", *SLOW[:1], "3", "--slowdown", "1.2"), "disagree"),
        ((*SLOW, "--measured-nodes", "x.csv"), "leave out --slow-nodes"),
        ((*SLOW, "--where", "a=b"), "choose from --measured-nodes"),
        (("--measured-nodes", "none.csv"), "none.csv"),
        ((*SLOW, "--tolerance", "0"), "more than 0"),
        ((*SLOW, "--tolerance", "much"), "0.1% or 0.001"),
        ((*SLOW, "--objective", "p90"), "p95"),
        ((*SLOW, "--hosts", "none.txt"), "none.txt"),
        ((*SLOW, "--kind", "disk"), "network"),
        ((*SLOW, "--set", "parallelism.pq=3"), "pp"),
        (("--slow-nodes", "33", "--slowdown", "1.2"), "32"),
    ],
)
def test_mistakes_are_told(run, job, arguments, message):
    status, out, err = run("place", job, *arguments)
    assert (status, out) == (2, ""), err
    assert message in err and "Traceback" not in err


def test_without_slow_nodes_there_is_nothing_to_place(run, job):
    status, _, err = run("place", job)
    assert status == 2 and "--slow-nodes" in err and "--measured-nodes" in err


def test_a_folder_that_cannot_be_is_told_before_any_work(run, asked, job, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = run("place", job, *SLOW, "-o", tmp_path / "file")
    assert status == 2 and "file" in err and not asked


def test_a_tolerance_is_a_share_with_or_without_percent():
    kind = Share()
    assert kind.convert("0.5 %", None, None) == pytest.approx(0.005)
    assert kind.convert(0.001, None, None) == 0.001


# --------------------------------------------------------------------------------- findings
def test_the_best_that_can_be_done_comes_first():
    found = answer()
    codes = ["better_alternative", "cost_now", "move", "stage_cost", "selection"]
    assert [finding.code for finding in found.findings] == codes
    assert found.findings[0].severity == "answer"
    (text,) = told(found, "better_alternative")
    assert "3 spare nodes: p95 10.40 s -> 9.60 s (-7.7 ± 0.1 %)" in text
    (text,) = told(found, "move")
    moved = "nodes 24, 25, 26 from stage 3 to stage 0 of replicas 0-2: p95 10.40 s -> 9.80 s "
    assert moved + "(-5.8 ± 0.1 %)" in text
    (text,) = told(found, "selection")
    assert "9 placements" in text and "97 %" in text and "0.1 %" in text
    facts = dict(found.facts)
    assert facts["change"].value == found.json()["alternatives"]["spares"]["saved"]
    # without alternatives the move leads
    alternatives = {"fewer_layers": placement()["alternatives"]["fewer_layers"]}
    found = answer(alternatives=alternatives)
    assert (found.findings[0].code, found.findings[0].severity) == ("move", "answer")
    assert found.findings[1].code == "cost_now"
    assert dict(found.facts)["change"].value == found.json()["placements"][1]["saved"]


def test_what_slow_nodes_cost_now_is_over_healthy_ones():
    (text,) = told(answer(), "cost_now")
    assert "+11.1 ± 0.1 %" in text and "10.40 s instead of 9.36 s" in text  # 1 / 0.9
    assert "stage 3, replicas 0-2" in text and "24, 25, 26" in text
    assert any("-10.0 ± 0.1 %" in cells for cells in table_of(answer()).values())


def test_an_alternative_within_the_tolerance_is_not_better():
    found = answer(tolerance=0.03)
    assert found.findings[0].code == "move" and not told(found, "better_alternative")


def test_what_may_as_well_be_worse_is_not_called_better():
    """An interval that spans zero tells nothing: 1.7 ± 3.1 % is no reason to buy nodes."""
    alternatives = placement()["alternatives"]
    row = next(r for r in alternatives.values() if "3 spare nodes" in str(r.get("label")))
    row["saved_ci"] = [row["saved"] - 2 * row["saved"], 3 * row["saved"]]
    found = answer(alternatives=alternatives)
    assert told(found, "no_better_alternative") and not told(found, "better_alternative")


def test_what_does_not_help_is_said():
    alternatives = placement()["alternatives"]
    del alternatives["spares"]
    assert told(answer(alternatives=alternatives), "no_better_alternative")


def test_nodes_that_change_replica_or_leave():
    nodes = placement()["slow_nodes"][:2]
    nodes[0] = nodes[0] | {"after": {"slot": 5, "stages": [0], "replicas": [5]}, "host": "n24"}
    nodes[1] = nodes[1] | {"after": None}
    (line,) = told(answer(slow_nodes=nodes), "move")
    assert "move node n24 from stage 3 of replica 0 to stage 0 of replica 5" in line
    assert "; take node 25 out: p95" in line


def test_a_gain_below_the_tolerance_is_no_reason_to_move():
    for more in ({"tolerance": 0.1}, {"best": "p0"}, {"best": "p0", "n_screened": 1}):
        found = answer(**more)
        assert found.findings[0].severity == "answer"
        lead = "leave" if "tolerance" in more else "better_alternative"  # 7.7 %
        assert found.findings[0].code == lead
        assert told(found, "leave") and not told(found, "move")
    assert "-5.8 ± 0.1 %" in told(answer(tolerance=0.1), "leave")[0]


def test_a_choice_that_is_none_is_warned_of():
    assert answer().warnings == ()
    (warning,) = answer(p_correct=0.33).warnings
    assert "33 %" in warning and "--tolerance" in warning
    assert answer(p_correct=0.33).json()["warnings"] == [warning]


def test_stages_are_compared_by_what_a_slow_node_costs():
    found = answer()
    (text,) = told(found, "stage_cost")
    assert "-0.1 % to the step on stage 0" in text and "3 % on stage 3" in text
    assert table_of(found, "Slack by stage") == {
        "0-1": ["31 %", "-0.1 %"], "2": ["8 %", "2.2 %"], "3": ["none", "3 %"]
    }  # fmt: skip
    same = [{"stage": i, "slack": 1.0, "cost": None} for i in range(3)]
    found = answer(stage_slack=same)
    assert table_of(found, "Slack by stage") == {"0-2": ["100 % or more", ""]}
    assert not told(found, "stage_cost")
    alike = [{"stage": i, "slack": 0.0, "cost": 0.5} for i in range(3)]
    assert told(answer(stage_slack=alike), "stage_cost")[0].count("5 %") == 1


def test_which_nodes_are_slow_is_said():
    assert "nodes 24, 25, 26 (compute 1.2x)" in answer().head
    still = {"memory": None, "network": 1.0, "other": 1.0}
    nodes = [{"node": i, "compute": 1.0 + 0.01 * i, **still} for i in range(1, 9)]
    head = answer(slow_nodes=nodes).head
    assert "8 nodes" in head and "8 (1.08x), 7 (1.07x)" in head
    whole = nodes[0] | {"compute": 1.1, "memory": 1.1, "network": 1.1, "other": 1.1}
    assert "node 1 (everything 1.1x)" in answer(slow_nodes=[whole]).head


def test_changes_have_as_many_digits_as_they_are_known_to():
    assert percent_change(-0.0008, [0.0007, 0.0009]) == "-0.08 ± 0.01 %"
    assert percent_change(0.0291) == "+2.9 %"
    assert percent_change(-0.095, [0.054, 0.136]) == "-9.5 ± 4.1 %"


# ---------------------------------------------------------------------------------- tables
def test_table_has_placements_and_alternatives_and_fits():
    found = answer(notes=["a note"])
    lines = lines_of(found)
    assert max(map(len, lines)) <= WIDTH and len(lines_of(found, details=False)) <= 35
    shown = table_of(found)
    assert shown["best: stage 3, replicas 0-2"] == ["9.40 s", "9.80 s", "-5.8 ± 0.1 %"]
    # its own step, and for equal work
    dropped = shown["without the slow nodes, 3 replicas fewer"]
    assert dropped == ["9.30 s", "9.70 s", "+49.2 ± 0.2 %"]
    assert table_of(found, "Impossible for this job") == {
        "fewer layers": ["explicit durations have no layers"]
    }
    assert "9.85 s to 10.45 s" in " ".join(lines)
    assert found.json()["assumptions"] == ["a note"]


def test_figures_are_those_of_the_json():
    numbers = placement()
    rows = [
        *numbers["placements"],
        numbers["healthy"],
        *numbers["alternatives"].values(),
        *numbers["stage_slack"],
    ]
    listed = {value for row in rows for value in row.values() if isinstance(value, float)}
    cells = [c for t in answer().tables for r in t.rows for c in r if isinstance(c, Figure)]
    assert len(cells) > 20 and {cell.value for cell in cells} <= listed


def test_the_objective_has_a_column():
    for objective, n in (("time_to_train", 4), ("p99", 4), ("p95", 3), ("p50", 3)):
        found = answer(objective=objective)
        assert len(table_of(found)["as is: stage 3, replicas 0-2"]) == n
        assert max(map(len, lines_of(found))) <= WIDTH


def test_one_node_cannot_be_all_in_one_replica():
    alternatives = placement()["alternatives"] | {"all_in_one_replica": {"p95": 1.0}}
    more = placement(alternatives=alternatives)
    assert any(row["name"] == "all_in_one_replica" for row in rows(more))
    one = placement(alternatives=alternatives, slow_nodes=placement()["slow_nodes"][:1])
    assert not any(row["name"] == "all_in_one_replica" for row in rows(one))


# ---------------------------------------------------------------------------------- for real
def test_a_small_job_end_to_end(run, job, tmp_path, empty_pictures):
    out = tmp_path / "out"
    command = ("place", job, "--at", "24,25", "--slowdown", "1.3", "--seed", 4, "--json", "-q",
               "--spares", 2, "--tolerance", "1%")  # fmt: skip
    status, first, err = run(*command, "-o", out)
    assert status == 0, err
    found = json.loads(first)
    assert set(found) >= KEYS and "drop_nodes" in found["alternatives"]
    assert {node["node"] for node in found["slow_nodes"]} == {24, 25}
    # the last stage is the longest: a slow node there costs most
    costs = [row["cost"] for row in found["stage_slack"]]
    assert int(np.argmax(costs)) == 3
    assert found["findings"][0]["code"] == "better_alternative"  # the spares
    assert found["action"] == "spares"
    best = {row["name"]: row for row in found["placements"]}[found["best"]]
    assert best["saved"] > 0.05 and 3 not in best["stages"]
    hosts = read_hosts(out / "hosts.csv")
    assert sorted(hosts.index(node) // 8 for node in (24, 25)) == best["stages"]
    assert json.loads((out / "summary.json").read_text()) == found
    again = json.loads(run(*command, "--threads", 1)[1])
    assert again | {"wall_seconds": 0} == found | {"wall_seconds": 0}
    status, text, err = run("show", out / "result.nc")
    assert status == 0, err
    assert "nodes 24, 25 from stage 3 " in text and max(map(len, text.splitlines())) <= WIDTH


def test_changes_have_the_digits_that_their_interval_allows():
    assert percent_change(9.4798, [9.279, 9.681]) == "+948 ± 20 %"
    assert percent_change(0.0321, [0.031, 0.0335]) == "+3.2 ± 0.1 %"
    assert percent_change(-0.0009, [-0.0015, -0.0003]) == "-0.09 ± 0.06 %"
