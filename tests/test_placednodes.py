"""Siting: relocated programs equal those built anew; what a node draws goes where it goes."""

import naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_placement import EFFECTS, make_job, times

from prism import PrismError, load_job, slow_node
from prism.simulation.draws import draw_ranks, lower, seed_key
from prism.simulation.othernodes import relocate
from prism.simulation.prepare import prepare, prepare_variability
from prism.simulation.program import ideal_program


def with_keys(job, hosts, slowdowns, nodes=None):
    """Build the job that says by keys what `relocate` is told."""
    blocks = job.model_dump(exclude={"name", "source"})
    given = {
        str(n): {k: x for k, x in s._asdict().items() if x is not None}
        for n, s in slowdowns.items()
    }
    blocks["cluster"] |= {"hosts": list(map(int, hosts)), "node_slowdowns": given}
    blocks["cluster"]["nodes"] = nodes or job.n_nodes
    return load_job(blocks)


# --------------------------------------------------------------------------------- relocation
@given(
    hosts=st.permutations(range(3)),
    slots=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=12, deadline=None)
def test_hosts_against_the_oracle(hosts, slots, seed):
    """A rank's draws follow its GPU, everything else its place."""
    gpus, pp = (1, 3) if slots == 1 else (2, 3)
    job = load_job(
        {
            "model": {"durations": {"forward_s": 1.0, "backward_s": [2.0, 1.9, 2.2]}},
            "parallelism": {"pp": pp, "dp": gpus, "microbatches": 4},
            "cluster": {"gpus_per_node": gpus, "hosts": list(hosts), "node_slowdowns": {1: 1.3}},
            "variability": {
                "library": None,
                "effects": {
                    "rank": {"cv": 0.02}, "step": {"cv": 0.01}, "microbatch": {"cv": 0.1},
                    "residual": {"cv": 0.05},
                },
            },
        }
    )  # fmt: skip
    v = prepare_variability(job)
    found = times(prepare(job, seed).program, seed=seed).reshape(-1)
    for replicate in (0, 63):
        expected = naive.step_time(job, v, seed, replicate)
        assert found[replicate] == pytest.approx(expected, rel=2e-6)


POD = {"pod_gpus": 8, "oversubscription": 8.0}
CASES = {
    "compute": (dict.fromkeys([1, 6], slow_node(1.2)), {}, {}),
    "memory": ({1: slow_node(1.2, "memory"), 2: slow_node(1.4)}, {}, {}),
    "network, pods": ({1: slow_node(1.3, "network")}, POD, {}),
    "everything": ({6: slow_node(1.3, "everything")}, POD, {}),
    "wide domains": ({6: slow_node(1.3, "everything")}, {"nvlink_domain_gpus": 4}, {}),
    "congestion": (
        {1: slow_node(1.1)}, {}, {"regime": {"probability": 0.2, "factor": 3.0}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_relocated_is_built_anew(name):
    slowdowns, cluster, effects = CASES[name]
    job = make_job(EFFECTS | effects, **cluster)
    hosts = [4, 0, 2, 3, 1, 7, 6, 5]
    # from another placement with other slow nodes: nothing of it may stay
    start = prepare(with_keys(job, [1, 0, *range(2, 8)], {7: slow_node(1.5)}), 1)
    found = relocate(start, hosts, slowdowns)
    anew = prepare(with_keys(job, hosts, slowdowns), 1).program
    assert np.array_equal(times(found, 4), times(anew, 4))
    assert not np.array_equal(times(found, 4), times(start.program, 4))
    assert np.array_equal(
        times(relocate(start, range(8), {}), 4), times(prepare(job, 1).program, 4)
    )


def test_relocation_to_spares():
    job = make_job(EFFECTS)
    hosts, slow = [0, 1, 9, 3, 4, 5, 6, 8], {2: slow_node(2.0), 8: slow_node(1.1)}
    found = relocate(prepare(job, 1), hosts, slow, n_nodes=10)
    anew = prepare(with_keys(job, hosts, slow, nodes=10), 1)
    assert anew.job.n_nodes == 10
    assert np.array_equal(times(found, 2), times(anew.program, 2))


def test_identical_nodes_swapped_give_the_same_bits():
    """Without persistent differences a swap of healthy nodes changes nothing."""
    effects = {**EFFECTS, "rank": {"cv": 0.0}}
    step = prepare(make_job(effects), 1)
    slow = {5: slow_node(1.3)}
    swapped = relocate(step, [1, 0, 2, 7, 4, 5, 6, 3], slow)
    assert np.array_equal(times(swapped, 2), times(relocate(step, range(8), slow), 2))


def test_a_swap_changes_only_what_it_should():
    """Common random numbers: other groups keep their draws to the bit."""
    step = prepare(make_job(EFFECTS), 1)
    swapped = relocate(step, [1, 0, *range(2, 8)], {})
    a, b = seconds_of_cluster(step.program), seconds_of_cluster(swapped)
    stage = np.array([t.stage if t.kernels else -1 for t in step.graph.op_types])
    assert np.array_equal(a[2:], b[2:]) and np.array_equal(a[:, stage == 1], b[:, stage == 1])
    assert np.array_equal(a[0, stage == 0], b[1, stage == 0])
    assert not np.array_equal(a[0, stage == 0], b[0, stage == 0])


def seconds_of_cluster(program, cluster=0):
    return lower(program.low, draw_ranks(program.ranks, program.tables, cluster, seed_key(1)))[
        0
    ].sum(axis=2)


def test_independent_ops_have_no_places():
    blocks = make_job(EFFECTS).model_dump(exclude={"name", "source"})
    blocks["variability"]["dependence"] = "none"
    step = prepare(load_job(blocks), 1)
    with pytest.raises(PrismError, match="forgets which node"):
        relocate(step, range(8), {})


def test_ideal_has_no_slow_nodes():
    step = prepare(make_job(EFFECTS), 1)
    slow = relocate(step, range(8), {5: slow_node(1.5, "everything")})
    healthy = times(ideal_program(step.program))[0, 0]
    assert times(ideal_program(slow))[0, 0] == pytest.approx(healthy, rel=1e-6)
