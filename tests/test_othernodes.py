"""Workers of a trace at other places, and replicas with fewer microbatches."""

import dataclasses

import numpy as np
import pytest
from test_placement import times
from test_tracearrays import CASES, fitted, program_of

from prism import NodeSlowdown, PrismError, load_job, slow_node
from prism.simulation.othernodes import relocate
from prism.simulation.prepare import Prepared


# -------------------------------------------------------------------------------------- traces
def traced(model):
    """A step of a fitted trace; node = slot = stage * replicas + replica."""
    job = load_job(
        {
            "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
            "parallelism": {
                "pp": model.n_stages, "dp": model.n_replicas, "microbatches": 4,
                "data_parallel": "ddp" if model.n_replicas > 1 else "none",
            },
            "cluster": {"gpus_per_node": 1},
            "variability": {"library": None},
        }
    )  # fmt: skip
    program, graph = program_of(model)
    return Prepared(job, None, graph, program)


def moved(model, hosts):
    """The model of the same workers at other places."""

    def move(a):
        return a.reshape(len(a), -1)[:, hosts].reshape(a.shape)  # [op_kind, stage, replica]

    return dataclasses.replace(model, rank=move(model.rank), follows=move(model.follows))


@pytest.mark.parametrize("name", ["lemon", "delay", "1f1b", "interleaved", "no pipeline"])
def test_workers_take_what_was_measured_along(name):
    model = fitted(*CASES[name])
    step = traced(model)
    n = model.n_stages * model.n_replicas
    hosts = np.random.default_rng(3).permutation(n)
    found = relocate(step, hosts, {})
    anew = program_of(moved(model, hosts))[0]
    assert np.array_equal(times(found, 4), times(anew, 4))
    assert not np.array_equal(times(found, 4), times(step.program, 4))
    assert np.array_equal(times(relocate(step, range(n), {}), 4), times(step.program, 4))
    # twice the way is the way of both
    twice = relocate(step, hosts[hosts], {})
    assert np.array_equal(times(twice), times(program_of(moved(model, hosts[hosts]))[0]))


def test_a_spare_takes_the_slow_worker_s_place():
    model = fitted(*CASES["lemon"])
    step, n = traced(model), model.n_stages * model.n_replicas
    slow = int(np.argmax(model.rank[0].ravel()))
    hosts = [n if node == slow else node for node in range(n)]
    replaced = relocate(step, hosts, {}, n_nodes=n + 1)
    assert times(replaced, 4).mean() < 0.8 * times(step.program, 4).mean()
    rank, follows = model.rank.copy(), model.follows.copy()
    stage, replica = divmod(slow, model.n_replicas)
    rank[:, stage, replica] = follows[:, stage, replica] = 1.0
    anew = program_of(dataclasses.replace(model, rank=rank, follows=follows))[0]
    assert np.array_equal(times(replaced, 4), times(anew, 4))


def test_slowdowns_of_workers_come_on_top():
    model = fitted(*CASES["lemon"])
    step, n = traced(model), model.n_stages * model.n_replicas
    every = relocate(step, range(n), dict.fromkeys(range(n), slow_node(2.0)))
    anew = program_of(dataclasses.replace(model, rank=2.0 * model.rank))[0]
    assert times(every, 2) == pytest.approx(times(anew, 2), rel=1e-6)
    with pytest.raises(PrismError, match="node 3: .*compute"):
        relocate(step, range(n), {3: slow_node(1.2, "network")})
    with pytest.raises(PrismError, match=f"no node {n} among {n}"):
        relocate(step, range(n), {n: NodeSlowdown(1.2)})
