"""Workers of a trace at other places, and replicas with fewer microbatches."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_placement import EFFECTS, make_job, times
from test_tracearrays import CASES, fitted, program_of

from prism.cluster.nodemap import NodeSlowdown, slow_node
from prism.common.errors import PrismError
from prism.jobs.job import job_from_dict
from prism.simulation.othernodes import limit_microbatches, relocate
from prism.simulation.prepare import Prepared, prepare


# -------------------------------------------------------------------------------------- traces
def traced(model):
    """A step of a fitted trace; node = slot = stage * replicas + replica."""
    job = job_from_dict(
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


# --------------------------------------------------------------------------- fewer microbatches
def pipeline(microbatches, forward=1.0, backward=2.0, **parallelism):
    given = {"pp": 4, "dp": 2, "microbatches": microbatches} | parallelism
    return job_from_dict(
        {
            "model": {"durations": {"forward_s": forward, "backward_s": backward}},
            "parallelism": given,
            "cluster": {"gpus_per_node": 1},
            "variability": {"library": None},
        }
    )


def shorter(job, microbatches):
    blocks = job.model_dump(exclude={"name", "source"})
    blocks["parallelism"]["microbatches"] = microbatches
    return job_from_dict(blocks)


durations = st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4)


@given(
    forward=durations, backward=durations, m=st.integers(5, 12), fewer=st.integers(1, 8),
    p2p=st.sampled_from(["async", "blocking"]), schedule=st.sampled_from(["1f1b", "gpipe"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_empty_microbatches_are_as_a_shorter_schedule(forward, backward, m, fewer, p2p, schedule):
    """Stages of any durations: the empty places at the end of 1F1B and GPipe add nothing."""
    fewer = max(1, m - fewer)
    job = pipeline(m, forward, backward, p2p=p2p, schedule=schedule)
    found = times(limit_microbatches(prepare(job, 1), [fewer, fewer]))[0, 0]
    exact = times(prepare(shorter(job, fewer), 1).program)[0, 0]
    assert found == pytest.approx(exact, rel=1e-6)


@given(forward=durations, backward=durations, rounds=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_empty_microbatches_of_interleaved_chunks(forward, backward, rounds):
    """Interleaved, an empty place may hold up a stage: at most 1.5 % in 100 random pipelines."""
    job = pipeline(16, forward, backward, vpp=2)
    found = times(limit_microbatches(prepare(job, 1), [4 * rounds] * 2))[0, 0]
    exact = times(prepare(shorter(job, 4 * rounds), 1).program)[0, 0]
    assert exact * (1 - 1e-6) <= found <= 1.05 * exact


@pytest.mark.parametrize("p2p", ["async", "blocking"])
@pytest.mark.parametrize("fewer", [1, 3, 6, 11])
def test_equal_stages_lose_nothing(p2p, fewer):
    """1F1B with equal stages takes (m + p - 1)(t_f + t_b), whatever the schedule's m."""
    step = prepare(pipeline(12, p2p=p2p), 1)
    assert times(limit_microbatches(step, [fewer, fewer]))[0, 0] == pytest.approx((fewer + 3) * 3.0)


def test_the_fullest_replica_decides():
    step = prepare(pipeline(12), 1)
    assert times(limit_microbatches(step, [6, 12]))[0, 0] == pytest.approx(45.0)
    # a replica half as fast with half the work is no longer the last
    slow = relocate(step, range(8), dict.fromkeys([0, 2, 4, 6], slow_node(1.5)))
    assert times(slow)[0, 0] == pytest.approx(1.5 * 45.0)
    assert times(limit_microbatches(step, [7, 12], slow))[0, 0] == pytest.approx(45.0)


def test_no_count_below_the_schedule_s_changes_nothing():
    step = prepare(make_job(EFFECTS), 1)
    assert limit_microbatches(step, [4] * 4) is step.program


@pytest.mark.parametrize("parallelism", [{}, {"data_parallel": "fsdp"}, {"vpp": 1}])
def test_other_replicas_keep_their_draws(parallelism):
    """A replica that loses work changes nothing where it is not the last."""
    job = make_job({**EFFECTS, "rank": {"cv": 0.0}}, parallelism)
    step = prepare(job, 1)
    slow = relocate(step, range(8), {2: slow_node(3.0), 6: slow_node(3.0)})  # replica 2
    cut = limit_microbatches(step, [3, 2, 4, 4], slow)
    assert np.array_equal(times(cut, 2), times(slow, 2))
    assert times(limit_microbatches(step, [4, 4, 2, 4], slow)).mean() < 0.8 * times(slow).mean()


def test_transfers_of_empty_microbatches_take_no_time():
    """A later stage reduces its gradients after its last, empty backward: 40 ns more here."""
    job = make_job(parallelism={"dp": 4, "vpp": 1})
    step = prepare(job, 1)
    one = limit_microbatches(step, [1] * 4)
    exact = prepare(shorter(job, 1), 1).program
    assert times(one)[0, 0] == pytest.approx(times(exact)[0, 0], rel=1e-5)
    transfer = max(t.collective.duration for t in step.graph.op_types if t.link >= 0)
    assert 3 * transfer > 1e-2 * times(exact)[0, 0]  # three transfers more would be seen


@pytest.mark.parametrize("counts", [[4, 4, 4], [0, 4, 4, 4], [5, 4, 4, 4], [1.5, 4, 4, 4]])
def test_counts_that_do_not_fit(counts):
    step = prepare(make_job(), 1)
    with pytest.raises(PrismError, match=" 4 .*microbatches = 4"):
        limit_microbatches(step, counts)
