"""Which nodes are placed: more slow ones than can be, most of them slow, fast in one thing only."""

import numpy as np
import pytest
from place_jobs import problem_of, small

import prism
from prism import NodeSlowdown
from prism.analyses.placements.alternatives import drop_nodes, list_alternatives, use_spares
from prism.analyses.placements.problem import MOST_PLACED, slowest_of, worst_factor
from prism.analyses.placements.search import find_placements
from prism.analyses.placements.slack import level, slot_cost, stage_slack
from prism.cluster.nodemap import Placement


def test_all_slow_nodes_are_left_out_not_only_those_placed():
    slow = {n: 1.2 + 0.001 * n for n in range(70)}
    problem = problem_of(small(dp=30), slow)
    assert len(problem.placed) == MOST_PLACED
    assert problem.slow == set(slow)
    without = drop_nodes(problem, 1)
    assert without.work == pytest.approx((120 - 70) // 4 / 30)
    assert "18 replicas fewer" in without.label
    assert (without.program.ranks.factor == 1.0).all()


@pytest.fixture
def short_search(monkeypatch):
    """Few placements looked at: what is told here is which nodes are placed."""
    for name, n in (("LIMIT", 100), ("LEAST", 30)):
        monkeypatch.setattr(f"prism.analyses.placements.search.{name}", n)


@pytest.mark.usefixtures("short_search")
def test_where_most_nodes_are_slow_the_others_are_placed():
    problem = problem_of(small(dp=24), dict.fromkeys(range(70), 1.2))
    assert problem.placed == tuple(range(70, 96))
    assert problem.slow == set(range(70))
    assert slowest_of(problem) == NodeSlowdown(1.2)
    found = find_placements(problem, 1)
    best = problem.realise(found.patterns[0])
    assert sorted(best) == list(range(96))
    assert found.times[0] <= problem.times([problem.hosts])[0] * (1.0 + 1e-6)
    others = {a.name: a for a in list_alternatives(problem, best, 1)}
    assert others["drop_nodes"].work == 6 / 24  # 26 nodes hold six replicas of four
    assert others["fewer_layers"].impossible == "every stage has a slow node"


@pytest.mark.usefixtures("short_search")
def test_spares_replace_the_slow_nodes_where_most_are():
    job = small(dp=24, cluster={"nodes": 100, "hosts": list(range(96))})
    problem = problem_of(job, dict.fromkeys(range(70), 1.2))
    assert problem.placed == tuple(range(70, 96))  # spares stay spares
    program = use_spares(problem).program
    slow = np.unique(program.low.member) // job.cluster.gpus_per_node
    assert len(set(slow.tolist()) & set(range(70))) == 66
    assert Placement(job).spares == [96, 97, 98, 99]


@pytest.mark.usefixtures("free_beside")
def test_slow_in_one_thing_and_fast_in_another():
    mixed = NodeSlowdown(compute=1.1, network=0.5)
    assert worst_factor(mixed) == 1.1
    assert worst_factor(NodeSlowdown(compute=0.8)) == 0.8
    assert worst_factor(NodeSlowdown()) == 1.0
    problem = problem_of(small(), {3: mixed})
    alike = level(problem)
    rows = stage_slack(alike, slowest_of(problem))
    assert rows == stage_slack(alike, NodeSlowdown(1.1))  # a fast network hides no slow compute
    assert rows[3].slack < 1e-3 < 0.5 < rows[2].slack < 1.0
    cost = slot_cost(alike, mixed)
    assert [row.cost for row in rows] == pytest.approx(cost[:, 0].tolist(), abs=1e-9)
    assert (cost > 0.0).any()


def test_names_to_call_place_with():
    assert prism.NodeSlowdown is NodeSlowdown
    assert prism.slow_node(1.2, "network").network == 1.2
