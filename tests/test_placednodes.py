"""Nodes placed elsewhere: what a node draws goes with it, everything else stays in its place."""

import numpy as np
import pytest
from drawn_steps import draw_steps

import prism

EFFECTS = {
    "rank": {"cv": 0.03}, "step": {"cv": 0.01}, "microbatch": {"cv": 0.05},
    "residual": {"law": "lognormal", "cv": 0.03},
}  # fmt: skip


def made(effects=None, hosts=None, slow=None, nodes=8, **cluster):
    """Two stages, four replicas, a node of two GPUs to each tp group."""
    return prism.load_job({
        "model": {"n_layers": 4, "hidden_size": 1024, "ffn_size": 4096, "n_heads": 8,
                  "vocab_size": 8000, "seq_len": 1024},
        "parallelism": {"tp": 2, "pp": 2, "dp": 4, "microbatches": 4, "data_parallel": "zero1"},
        "cluster": {"nodes": nodes, "gpus_per_node": 2, "placement": "tp-cp-pp-dp",
                    "node_slowdowns": slow or {}, **({"hosts": hosts} if hosts else {}), **cluster},
        "variability": {"library": None, "effects": EFFECTS if effects is None else effects},
    })  # fmt: skip


def steps(job, n=256):
    return draw_steps(job, n, 4, threads=1).step_time.values


SLOWNESS = {
    "compute": {1: 1.2, 6: 1.2},
    "memory": {1: {"memory": 1.2}, 2: {"compute": 1.4}},
    "network": {1: {"network": 1.3}},
    "everything": {6: {"compute": 1.3, "memory": 1.3, "network": 1.3, "other": 1.3}},
}
POD = {"pod_gpus": 8, "oversubscription": 8.0}


@pytest.mark.parametrize("cluster", [{}, POD, {"nvlink_domain_gpus": 4}], ids=["", "pod", "wide"])
@pytest.mark.parametrize("kind", SLOWNESS)
def test_a_placement_that_place_simulates_is_the_job_that_says_so(kind, cluster):
    """`place` moves nodes of a program; a job file with those hosts is built from the start."""
    job = made(slow=SLOWNESS[kind], **cluster)
    found = prism.place(job, seed=4, threads=1)
    rows = prism.summary(found)["placements"]
    for k, row in enumerate(rows[:3]):
        placed = steps(
            made(slow=SLOWNESS[kind], hosts=found["hosts"].values[k].tolist(), **cluster), 4096
        )
        assert row["p50"] == pytest.approx(np.quantile(placed, 0.5), rel=3e-3), row["name"]
        assert row["mean"] == pytest.approx(placed.mean(), rel=3e-3)
    assert rows[0]["p50"] <= max(row["p50"] for row in rows)


def test_identical_nodes_swapped_give_the_same_bits():
    """Without persistent differences a swap of healthy nodes changes nothing."""
    effects = {**EFFECTS, "rank": {"cv": 0.0}}
    base, swapped = (
        steps(made(effects, hosts=hosts, slow={5: 1.3}))
        for hosts in ([0, 1, 2, 3, 4, 5, 6, 7], [1, 0, 2, 7, 4, 5, 6, 3])
    )
    assert np.array_equal(base, swapped)
    moved = steps(made(effects, hosts=[5, 1, 2, 3, 4, 0, 6, 7], slow={5: 1.3}))
    assert not np.array_equal(base, moved)


def test_a_node_takes_its_own_speed_along():
    """With nothing but the GPUs random, nodes that change replicas change nothing over all."""
    effects = {"rank": {"cv": 0.05}}
    order = [2, 3, 0, 1, 4, 5, 6, 7]  # replicas 0 and 1 exchange their nodes, stage by stage
    assert np.allclose(steps(made(effects)), steps(made(effects, hosts=order)), rtol=1e-6)
    other = [1, 0, *range(2, 8)]  # two nodes of one replica exchange their stages
    assert not np.allclose(steps(made(effects)), steps(made(effects, hosts=other)), rtol=1e-4)


def test_spares_take_the_place_of_slow_nodes():
    hosts = [0, 1, 9, 3, 4, 5, 6, 8]
    effects = {"step": {"cv": 0.01}}
    without = steps(made(effects))
    assert np.array_equal(
        steps(made(effects, hosts=hosts, slow={2: 2.0, 7: 1.5}, nodes=10)), without
    )
    assert steps(made(effects, hosts=hosts, slow={8: 1.1}, nodes=10)).mean() > without.mean()


def test_the_ideal_step_has_no_slow_nodes():
    plain, slow = (
        float(draw_steps(made(slow=s), 64, 1).ideal_step_time) for s in ({}, SLOWNESS["everything"])
    )
    assert slow == pytest.approx(plain, rel=1e-6)
    with pytest.raises(prism.PrismError):
        prism.place(made(slow={1: 1.2}).replace("variability.dependence=none"), seed=1)
