"""Failures after which a job goes on with fewer replicas, until nodes are back."""

import numpy as np
import pytest

import prism

HOUR, DAY = 3600.0, 86400.0
STEP, STEPS, RUNS = 3.0, 400_000, 1000  # two weeks
RATE, REPAIR = 500.0, 4 * HOUR  # of 1,000 node-days


def made(layout, cluster, causes=None, **failures):
    keys = {"per_1000_node_days": RATE, "detection": 0, "restart": 0, "spares": 0,
            "repair": REPAIR, "policy": "shrink", "causes": causes or {}}  # fmt: skip
    return prism.load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"microbatches": 1, **layout}, "cluster": cluster,
        "variability": {"library": "none"},
        "run": {"steps": STEPS, "checkpoint": {"interval_steps": 10, "write_s": 0.0},
                "failures": keys | failures},
    })  # fmt: skip


def terms(job):
    found = prism.estimate(job, replicates=64, run_replicates=RUNS, seed=1)
    dataset = found.to_xarray()
    return {
        str(name): dataset.run_term_time.sel(term=name).to_numpy() for name in dataset.term.values
    } | {"total": found.time_to_train.to_numpy(), "failures": dataset.run_failures.to_numpy()}


def chances(failures, at_once, n_nodes=16):
    """Chance that so many groups of nodes are away: births and deaths, as only those there fail."""
    there = np.maximum(1.0 - np.arange(n_nodes) * at_once / n_nodes, 0.0)
    weight = np.cumprod(np.append(1.0, there * failures * REPAIR / np.arange(1, n_nodes + 1)))
    return weight / weight.sum()


def lost_share(failures, replicas, nodes, at_once=1):
    """Mean share of replicas missing."""
    away = np.arange(17) * at_once
    return float(chances(failures, at_once) @ np.ceil(away / nodes)) / replicas


@pytest.mark.parametrize(
    ("layout", "cluster", "at_once", "replicas", "nodes"),
    [
        ({"dp": 16}, {"nodes": 16, "gpus_per_node": 1}, 1, 16, 1),
        ({"dp": 8, "pp": 2}, {"nodes": 16, "gpus_per_node": 1}, 1, 8, 2),  # two broken: one lost
        ({"dp": 32}, {"nodes": 16, "gpus_per_node": 2}, 1, 32, 0.5),
        ({"dp": 16}, {"nodes": 16, "gpus_per_node": 1}, 3, 16, 1),  # racks
    ],
)
def test_steps_are_longer_by_the_replicas_that_are_missing(
    layout, cluster, at_once, replicas, nodes
):
    causes = {"rack": {"share": 1.0, "nodes": at_once}}
    found = terms(made(layout, cluster, causes))
    share = (found["fewer_replicas"] / (found["total"] - found["lost_work"])).mean()
    expected = lost_share(RATE * 16 / 1000.0 / DAY, replicas, nodes, at_once)
    assert share == pytest.approx(expected, rel=0.03)
    assert at_once > 1 or found["spares"].max() == 0.0


def test_a_replica_more_takes_a_restart_and_loses_nothing():
    layout, cluster = {"dp": 16}, {"nodes": 16, "gpus_per_node": 1}
    found = terms(made(layout, cluster, restart=60.0, per_1000_node_days=50.0))
    assert found["restarts"].mean() == pytest.approx(2 * 60.0 * found["failures"].mean(), rel=0.02)
    assert found["lost_work"].sum() / found["failures"].sum() == pytest.approx(15.0, rel=0.03)
    waits = terms(made(layout, cluster, restart=60.0, per_1000_node_days=50.0, policy="replace"))
    assert "fewer_replicas" not in waits


def test_a_job_waits_until_all_its_nodes_are_there():
    """Nodes go on failing meanwhile: it steps while none is under repair."""
    job = made({"dp": 16}, {"nodes": 16, "gpus_per_node": 1}, policy="replace")
    found = terms(job.replace({"run.steps": STEPS // 4}))
    steps = found["total"] - found["spares"]
    alone = 1.0 / (1.0 + RATE / 1000.0 / DAY * REPAIR)
    assert chances(RATE * 16 / 1000.0 / DAY, 1)[0] == pytest.approx(alone**16)
    assert (steps.sum() / found["total"].sum()) == pytest.approx(alone**16, rel=0.02)


def test_a_node_that_is_away_does_not_fail():
    """A repair longer than the time between failures: one node is up 1 / (1 + rate repair)."""
    job = made({}, {"nodes": 1, "gpus_per_node": 1}, policy="replace", per_1000_node_days=12_000.0)
    found = terms(job.replace({"run.steps": STEPS // 4}))
    up = (found["total"] - found["spares"]).sum() / found["total"].sum()
    assert up == pytest.approx(1.0 / 3.0, rel=0.02)


def test_the_last_replica_waits_for_a_node():
    found = terms(made({"dp": 2}, {"nodes": 2, "gpus_per_node": 1}, per_1000_node_days=5000.0))
    assert found["spares"].mean() > 0.0
    assert np.allclose(
        found["total"], sum(x for n, x in found.items() if n not in ("total", "failures"))
    )


def test_spares_come_first():
    few, many = (
        terms(made({"dp": 16}, {"nodes": 16, "gpus_per_node": 1}, spares=n)) for n in (0, 20)
    )
    assert many["fewer_replicas"].max() == 0.0 < few["fewer_replicas"].min()
