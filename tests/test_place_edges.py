"""Questions of placement at the edges: fast nodes, all nodes slow, what shares are shares of."""

import pytest
from place_jobs import small

import prism
from prism import PrismError, load_job, place, slow_node


def eight_stages():
    job = prism.load_job("pipeline-8x32")
    values = job.model_dump(mode="json", exclude={"name", "source"})
    values["cluster"] |= {"gpus_per_node": 1, "nodes": 8}
    return load_job(values)


def test_fast_node_goes_where_every_place_was_simulated_to_be_best():
    """Noise adds unequally to places: the deterministic best, stage 7, is not the best."""
    found = prism.summary(place(eight_stages(), nodes={3: slow_node(0.8)}, seed=1))
    by_name = {row["name"]: row for row in found["placements"]}
    assert by_name[found["best"]]["stages"] == [5]
    assert by_name[found["worst"]]["objective"] == max(r["objective"] for r in by_name.values())
    assert found["stage_slack"] == []  # no node is slower than the others


def test_costs_are_shares_of_the_step_without_a_slow_node():
    found = prism.summary(place(eight_stages(), nodes={3: slow_node(1.2)}, seed=1))
    assert found["alike_step"] == pytest.approx(117.0, rel=1e-5)
    assert found["slot_cost"][0][0] == pytest.approx(132.0 - 117.0, rel=1e-4)


def test_slow_nodes_that_are_spares():
    """Nothing can be done about a node that no rank is on, though layers could move."""
    cluster = {"nodes": 3, "hosts": [1], "gpus_per_node": 2}
    job = small(dp=1, pp=2, tp=1, cluster=cluster, layer_split=[5, 3])
    found = prism.summary(place(job, nodes={0: slow_node(1.1)}, seed=1))
    assert found["best"] == found["current"]
    reasons = [a["impossible"] for a in found["alternatives"].values() if "impossible" in a]
    assert reasons == ["no slow node takes part in the job: all are spares"] * 3


def test_all_nodes_slow_alike():
    found = prism.summary(place(eight_stages(), slow_nodes=8, slowdown=1.2, spares=1, seed=1))
    assert found["best"] == found["current"]
    assert "p95" in found["alternatives"]["spares"]
    with pytest.raises(PrismError, match="as fast as the others"):
        place(eight_stages(), slow_nodes=1, slowdown=1.0)
