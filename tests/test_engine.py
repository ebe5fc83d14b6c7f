"""The engine: draws against known answers, steps against the plain-Python oracle."""

import naive
import numpy as np
import pytest
from drawn_steps import draw_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from played_ops import play
from scipy.special import ndtr
from test_stepgraph import given as chain_job
from test_stepgraph import sized

import prism
from prism import engine
from prism.distributions import distribution as distributions
from prism.distributions.tables import sample_table
from prism.simulation.effects import EFFECTS
from prism.simulation.execution.context import RunContext
from prism.simulation.prepare import prepare
from prism.simulation.steps import run_blocks

LANES = 64  # replicates of a block, which share a cluster draw


def explicit_job(**changes):
    """Build a small job of explicit durations with every effect that the oracle knows."""
    values = {
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"pp": 3, "dp": 2, "microbatches": 6},
        "variability": {
            "library": None,
            "effects": {
                "rank": {"cv": 0.02, "lemon_fraction": 0.1, "lemon_slowdown": [1.06, 1.2]},
                "step": {"cv": 0.01},
                "microbatch": {"cv": 0.1, "backward_loading": 1.5},
                "residual": {"law": "gamma", "cv": 0.05},
            },
        },
    }
    for block, update in changes.items():
        values[block] = values.get(block, {}) | update
    return prism.load_job(values)


def steps(job, blocks=2, seed=0, **options):
    """Step times [replicate]."""
    return draw_steps(job, LANES * blocks, seed, **options).step_time.values


# ------------------------------------------------------------------------------------- draws
def lanes(counter, key):
    out = np.zeros((4, LANES), np.uint32)
    c0, c1, c2, c3 = (np.uint32(c) for c in counter)
    engine.philox_lanes(c0, c1, c2, c3, np.array(key, np.uint32), out)
    return out


@pytest.mark.nojit
def test_philox_known_answer():
    words = lanes((0, 0, 0, 0), (0, 0))[:, 0]
    assert [f"{w:08x}" for w in words] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


@given(
    counter=st.tuples(*[st.integers(0, 2**32 - 200)] * 4),
    key=st.tuples(*[st.integers(0, 2**32 - 1)] * 2),
)
def test_philox_lanes_against_python(counter, key):
    words = lanes(counter, key)
    for lane in (0, 63):
        expected = naive.philox4x32((*counter[:2], counter[2] + lane, counter[3]), key)
        assert list(words[:, lane]) == expected


@pytest.mark.nojit
def test_lookup_is_the_table():
    tables = np.stack([distributions.quantile_table(distributions.lognormal(0.3))])
    u = np.array(
        [0, 1, 2**22, 2**31, 2**32 - 2**22, 2**32 - 2**12, 2**32 - 5, 2**32 - 1], np.uint32
    )
    values = [engine.lookup(tables, 0, w) for w in u]
    np.testing.assert_allclose(values, sample_table(tables[0], u), rtol=2e-6, atol=1e-7)
    assert np.all(np.diff(values) >= 0) and values[-1] > values[-2]


@given(
    mean=st.lists(st.floats(0.9, 1.3), min_size=1, max_size=8),
    cv=st.floats(0.002, 0.1),
)
@settings(max_examples=40)
def test_group_max_against_fine_quadrature(mean, cv):
    z = np.linspace(-engine.CDF_RANGE, engine.CDF_RANGE, engine.CDF_ROWS)
    m, var = engine.group_max(np.array(mean), cv, engine.cdf_cells(ndtr(z)))
    expected, expected_var = naive.maximum_moments(mean, cv, ndtr)
    assert m == pytest.approx(expected, abs=2e-5 * max(mean))
    assert var**0.5 == pytest.approx(expected_var**0.5, rel=2e-3)


def test_effects_draw_apart():
    """But for what is of fitted traces alone: no job has experts and that."""
    kinds = [effect for name, effect in EFFECTS.items() if name != "rank_step"]
    streams = [stream for effect in kinds for stream in effect.streams]
    own = {engine.RESIDUAL, engine.GLOBAL, engine.POOL}
    assert len(streams) == len(set(streams) - own) and max(streams) < engine.N_STREAMS


# ---------------------------------------------------------------------------------- the oracle
JOBS = {
    "1f1b": {},
    "gpipe": {"parallelism": {"pp": 3, "dp": 2, "microbatches": 5, "schedule": "gpipe"}},
    "interleaved": {"parallelism": {"pp": 2, "vpp": 3, "dp": 2, "microbatches": 4}},
    "blocking": {"parallelism": {"pp": 4, "dp": 2, "microbatches": 7, "p2p": "blocking"}},
    "blocking gpipe": {
        "parallelism": {"pp": 4, "microbatches": 7, "p2p": "blocking", "schedule": "gpipe"}
    },
    "uneven": {"model": {"durations": {"forward_s": [1, 2, 1], "backward_s": [2, 3, 4]}}},
    "hot node": {"cluster": {"gpus_per_node": 2, "node_slowdowns": {1: 1.3}}},
    "very noisy": {"variability": {
        "library": None, "effects": {"residual": {"law": "gamma", "cv": 1.5}}}},
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("seed", [0, 2**40 + 5])
def test_steps_equal_the_oracle(name, seed):
    """Float32 ends of a step of tens of seconds, against float64."""
    job = explicit_job(**JOBS[name])
    v, times = prepare(job, 0).effects, steps(job, seed=seed)
    for replicate in (0, 1, 63, 64, 127):
        expected = naive.step_time(job, v, seed, replicate)
        assert times[replicate] == pytest.approx(expected, rel=3e-6)


@pytest.mark.nojit
def test_oracle_on_one_replicate():
    job = explicit_job(parallelism={"pp": 2, "dp": 1, "microbatches": 2})
    time = run_blocks(prepare(job, 3).program, range(1), RunContext(3))[0][0, 5]
    assert time == pytest.approx(naive.step_time(job, prepare(job, 0).effects, 3, 5), rel=3e-6)


# ------------------------------------------------------------------------- what replicates share
def chain(n, cv, **effects):
    """Step times [block, lane] of n microbatches in turn on one GPU, 3 s each."""
    job = chain_job(effects={"residual": {"law": "gamma", "cv": cv}, **effects}, microbatches=n)
    return steps(job, 800, 5).reshape(800, LANES)


@pytest.mark.parametrize("n", [8, 100], ids=["looked up", "from the pool"])
def test_residuals_of_a_chain_add_up_as_independent_ones_do(n):
    cv = 0.5
    x = chain(n, cv).ravel()
    var = n * 5.0 * cv**2  # of gammas of means 1 and 2
    skew = 2.0 * cv * n * 9.0 * cv**3 / var**1.5  # third cumulants add up
    assert abs(x.mean() - 3.0 * n) < 5.0 * (var / x.size) ** 0.5
    assert x.var() == pytest.approx(var, rel=5.0 * ((2.0 + 2.0 * skew**2) / x.size) ** 0.5)
    z = (x - 3.0 * n) / var**0.5
    assert abs(float((z**3).mean()) - skew) < 5.0 * (6.0 / x.size) ** 0.5 * (1.0 + skew)


def spread_of_blocks(x):
    """Variance of blocks' means over that of as many independent steps [1]."""
    return float(x.mean(axis=1).var(ddof=1) / (x.var(axis=1, ddof=1).mean() / LANES))


def test_replicates_of_a_block_are_as_independent_as_those_of_two():
    """A value of the pool is many lanes' and replicas', also one that decides a maximum."""
    noise = {"residual": {"law": "lognormal", "cv": 1.0}}
    slowest = steps(chain_job(effects=noise, microbatches=1, dp=1024), 400, 8).reshape(400, LANES)
    error = (2.0 / 400) ** 0.5  # of the ratio, which was 7.0 when the tail was shared
    assert abs(spread_of_blocks(slowest) - 1.0) < 5.0 * error
    assert abs(spread_of_blocks(chain(100, 0.5)) - 1.0) < 5.0 * error
    assert spread_of_blocks(chain(100, 0.5, rank={"cv": 0.05})) > 1.0 + 5.0 * error


def test_threads_and_length_change_no_bits_and_seeds_all():
    job = explicit_job()
    one = steps(job, 40, 11, threads=1)
    for threads in (2, 5):
        assert np.array_equal(one, steps(job, 40, 11, threads=threads))
    assert np.array_equal(one[: 7 * LANES], steps(job, 7, 11, threads=2))
    assert not np.any(one == steps(job, 40, 12))


def test_effects_off_leave_other_draws_alone():
    """Switching the step effect off divides every step by it, and changes nothing else."""
    job = explicit_job()
    found = prism.simulate(job, 3 * LANES, seed=4)
    steady = steps(job.replace({"variability.effects.step.cv": 0.0}), 3, 4)
    np.testing.assert_allclose(found.step_time, steady * found.step_effect, rtol=2e-6)


def test_longer_ops_never_shorten_a_step():
    base = steps(explicit_job(), 2, 6)
    for kind in ("forward_s", "backward_s"):
        for s in range(3):
            durations = {"forward_s": [1.0] * 3, "backward_s": [2.0] * 3}
            durations[kind][s] *= 1.1
            longer = steps(explicit_job(model={"durations": durations}), 2, 6)
            assert np.all(longer >= base) and np.any(longer > base)
    double = explicit_job(model={"durations": {"forward_s": 2.0, "backward_s": 4.0}})
    np.testing.assert_allclose(steps(double, 2, 6), 2 * base, rtol=1e-6)


# -------------------------------------------------------------------------------- critical paths
def test_the_critical_path_adds_up_to_the_step():
    found = prism.simulate(explicit_job(), 64, seed=5)
    assert float(found.critical_path_time.sum()) == pytest.approx(
        float(found.step_time.mean()), rel=1e-5
    )


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2, "tp": 2, "dp": 2, "data_parallel": "zero1", "microbatches": 4},
        {"dp": 4, "data_parallel": "fsdp"},
        {"dp": 4, "data_parallel": "ddp", "pp": 4, "microbatches": 4, "schedule": "zb-h1"},
    ],
)
def test_the_critical_path_is_that_of_the_ops(layout):
    """What ends a step is of one class each; a slow node makes replicas differ."""
    job = sized(cluster={"gpus_per_node": 2, "node_slowdowns": {1: 1.2}}, **layout)
    found = prism.simulate(job, 64, seed=1)
    seconds = dict(zip(found.kernel_class.values, found.critical_path_time.values, strict=True))
    ops = {(op.name, op.start): op for op in play(job, ideal=False) if op.critical}
    (kind,) = {op.kind for op in ops.values() if op.name == "gradient_reduce"}
    classes = {
        "gradient_reduce": f"dp_{kind}", "grad_norm_reduce": "world_all_reduce",
        "optimizer": "optimizer",
    }  # fmt: skip
    expected = {
        name: sum(op.duration for op in ops.values() if op.name == text)
        for text, name in classes.items()
    }
    assert {name: seconds[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    whole = sum(op.duration for op in ops.values())
    assert whole == pytest.approx(float(found.step_time[0]), rel=1e-4)
