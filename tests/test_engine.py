"""The engine: draws against known answers, steps against the plain-Python oracle."""

import dataclasses

import naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_jobs import small
from scipy.special import ndtr

import prism
from prism import engine, load_job
from prism.analyses.timelines.jobs import record
from prism.distributions import distribution as laws
from prism.distributions.tables import sample_table
from prism.engine.arrays import DRAW, EXPORT
from prism.simulation.prepare import prepare, prepare_variability
from prism.simulation.steps import run_blocks, run_each


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
    return load_job(values)


def lanes(counter, key):
    out = np.zeros((4, engine.LANES), np.uint32)
    c0, c1, c2, c3 = (np.uint32(c) for c in counter)
    engine.philox_lanes(c0, c1, c2, c3, np.array(key, np.uint32), out)
    return out


@pytest.mark.nojit
def test_philox_known_answer():
    words = lanes((0, 0, 0, 0), (0, 0))[:, 0]
    assert [f"{w:08x}" for w in words] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def test_philox_against_randomgen():
    randomgen = pytest.importorskip("randomgen", reason="oracle, in the dev extra")
    key, counter = 0x1234567_89ABCDEF, (7, 11, 13, 17)
    oracle = randomgen.Philox(key=key, number=4, width=32)
    state = oracle.state
    state["state"]["counter"][:] = np.array(counter, state["state"]["counter"].dtype)
    state["buffer_pos"] = 4
    oracle.state = state
    # randomgen counts up before it draws
    expected = naive.philox4x32((8, 11, 13, 17), (key & naive.MASK, key >> 32))
    assert list(lanes((8, 11, 13, 17), (key & naive.MASK, key >> 32))[:, 0]) == expected
    drawn = oracle.random_raw(2)
    packed = [int(drawn[0]) & naive.MASK, int(drawn[0]) >> 32, int(drawn[1]) & naive.MASK]
    assert expected[:3] == packed or expected[:2] == [int(d) for d in drawn]


@given(
    counter=st.tuples(*[st.integers(0, 2**32 - 200)] * 4),
    key=st.tuples(*[st.integers(0, 2**32 - 1)] * 2),
)
@settings(max_examples=50)
def test_philox_lanes_against_python(counter, key):
    words = lanes(counter, key)
    for lane in (0, 63):
        expected = naive.philox4x32((*counter[:2], counter[2] + lane, counter[3]), key)
        assert list(words[:, lane]) == expected


@pytest.mark.nojit
def test_lookup_is_the_table():
    tables = np.stack([laws.quantile_table(laws.lognormal(0.3))])
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


def test_group_max_of_one_is_itself():
    m, var = engine.group_max(np.array([2.0]), 0.05, engine.cdf_cells(np.zeros(engine.CDF_ROWS)))
    assert (m, var) == (2.0, pytest.approx(0.01))


JOBS = {
    "1f1b": {},
    "gpipe": {"parallelism": {"pp": 3, "dp": 2, "microbatches": 5, "schedule": "gpipe"}},
    "interleaved": {"parallelism": {"pp": 2, "vpp": 3, "dp": 2, "microbatches": 4}},
    "uneven": {"model": {"durations": {"forward_s": [1, 2, 1], "backward_s": [2, 3, 4]}}},
    "hot node": {"cluster": {"gpus_per_node": 2, "node_slowdowns": {1: 1.3}}},
}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("seed", [0, 2**40 + 5])
def test_steps_equal_the_oracle(name, seed):
    job = explicit_job(**JOBS[name])
    v = prepare_variability(job)
    program = prepare(job, seed).program
    times = run_blocks(program, range(2), seed)[0]
    for replicate in (0, 1, 63, 64, 127):
        expected = naive.step_time(job, v, seed, replicate)
        assert times.reshape(-1)[replicate] == pytest.approx(expected, rel=3e-6)


@pytest.mark.nojit
def test_oracle_on_one_replicate():
    job = explicit_job(parallelism={"pp": 2, "dp": 1, "microbatches": 2})
    program = prepare(job, 3).program
    time = run_blocks(program, range(1), 3)[0][0, 5]
    assert time == pytest.approx(naive.step_time(job, prepare_variability(job), 3, 5), rel=3e-6)


def chain(n: int, cv: float, **effects: dict[str, float]) -> np.ndarray:
    """Step times [block, lane] of n microbatches in turn on one GPU, 3 s each."""
    job = load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"microbatches": n},
        "variability": {"library": None, "effects": {
            "residual": {"law": "gamma", "cv": cv}, **effects}},
    })  # fmt: skip
    return run_blocks(prepare(job, 5).program, range(800), 5)[0].astype(np.float64)


@pytest.mark.parametrize("n", [8, 100], ids=["looked up", "from the pool"])
def test_residuals_of_a_chain_add_up_as_independent_ones_do(n: int) -> None:
    cv = 0.5
    x = chain(n, cv).ravel()
    var = n * 5.0 * cv**2  # of gammas of means 1 and 2
    skew = 2.0 * cv * n * 9.0 * cv**3 / var**1.5  # third cumulants add up
    assert abs(x.mean() - 3.0 * n) < 5.0 * (var / x.size) ** 0.5
    assert x.var() == pytest.approx(var, rel=5.0 * ((2.0 + 2.0 * skew**2) / x.size) ** 0.5)
    z = (x - 3.0 * n) / var**0.5
    assert abs(float((z**3).mean()) - skew) < 5.0 * (6.0 / x.size) ** 0.5 * (1.0 + skew)


def spread_of_blocks(x: np.ndarray) -> float:
    """Variance of blocks' means over that of as many independent steps [1]."""
    return float(x.mean(axis=1).var(ddof=1) / (x.var(axis=1, ddof=1).mean() / engine.LANES))


def test_replicates_of_a_block_are_as_independent_as_those_of_two() -> None:
    """A value of the pool is many lanes' and replicas', also one that decides a maximum."""
    job = load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"microbatches": 1, "dp": 1024},
        "cluster": {"nodes": 128},
        "variability": {"library": None, "effects": {"residual": {"law": "lognormal", "cv": 1.0}}},
    })  # fmt: skip
    slowest = run_blocks(prepare(job, 8).program, range(400), 8)[0].astype(np.float64)
    error = (2.0 / 400) ** 0.5  # of the ratio, which was 7.0 when the tail was shared
    assert abs(spread_of_blocks(slowest) - 1.0) < 5.0 * error
    assert abs(spread_of_blocks(chain(100, 0.5)) - 1.0) < 5.0 * error
    assert spread_of_blocks(chain(100, 0.5, rank={"cv": 0.05})) > 1.0 + 5.0 * error


def test_threads_and_prefix_do_not_change_bits():
    program = prepare(explicit_job(), 11).program
    one = run_blocks(program, range(40), 11, threads=1)[0]
    for threads in (2, 5):
        assert np.array_equal(one, run_blocks(program, range(40), 11, threads=threads)[0])
    assert np.array_equal(one[:7], run_blocks(program, range(7), 11, threads=2)[0])
    assert np.array_equal(one[9:13], run_blocks(program, range(9, 13), 11)[0])


def test_runs_side_by_side_are_those_alone():
    one, two = (prepare(explicit_job(parallelism={"pp": pp}), 11).program for pp in (2, 3))
    runs = [(one, range(5), 11), (two, range(3, 4), 12), (one, range(0), 11)]
    for threads in (1, 2):
        for run, found in zip(runs, run_each(runs, threads, track=True), strict=True):
            for a, b in zip(found, run_blocks(*run, track=True), strict=True):
                np.testing.assert_array_equal(a, b, strict=True)


def test_seeds_differ():
    program = prepare(explicit_job(), 0).program
    a, b = (run_blocks(program, range(2), seed)[0] for seed in (0, 1))
    assert not np.any(a == b)


def test_effects_off_leave_other_draws_alone():
    """Switching the step effect off divides every step by it, and changes nothing else."""
    job = explicit_job()
    calm = explicit_job(variability={"effects": job.variability.effects.model_dump(
        exclude_none=True) | {"step": {"cv": 0.0}}})  # fmt: skip
    times, effect, _, _ = run_blocks(prepare(job, 4).program, range(3), 4)
    steady = run_blocks(prepare(calm, 4).program, range(3), 4)[0]
    np.testing.assert_allclose(times, steady * effect, rtol=2e-6)


def test_longer_ops_never_shorten_a_step():
    program = prepare(explicit_job(), 6).program
    base = run_blocks(program, range(2), 6)[0]
    for c in range(program.low.seg_mean.shape[0]):
        longer = program.low.seg_mean.copy()
        longer[c] *= 1.1
        slower = dataclasses.replace(program, low=program.low._replace(seg_mean=longer))
        assert np.all(run_blocks(slower, range(2), 6)[0] >= base)


def test_scaling_durations_scales_time():
    job = explicit_job()
    double = explicit_job(model={"durations": {"forward_s": 2.0, "backward_s": 4.0}})
    a, b = (run_blocks(prepare(j, 8).program, range(2), 8)[0] for j in (job, double))
    np.testing.assert_allclose(b, 2 * a, rtol=1e-6)


def test_zero_variance_is_exact():
    job = load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"pp": 8, "microbatches": 32}, "variability": {"library": None},
    })  # fmt: skip
    times = run_blocks(prepare(job, 1).program, range(1), 1)[0]
    assert np.all(times == 117.0)


def test_critical_path_sums_to_the_step():
    program = prepare(explicit_job(), 5).program
    times, _, path, busy = run_blocks(program, range(3), 5, track=True)
    np.testing.assert_allclose(path.sum(axis=1), times, rtol=1e-5)
    assert np.array_equal(times, run_blocks(program, range(3), 5)[0])
    assert np.all(busy > 0)


def walked_path(program, ends):
    """Seconds by class on the critical path, op after op from recorded ends [class]."""
    step = program.arrays(True)
    ops, graph, share = step.ops, step.graph, step.share.astype(float)
    never = 0.0, np.zeros(share.shape[1])
    of_all = {}
    rows = [dict() for _ in range(graph.n_replicas)]
    for phase, is_global in enumerate(graph.phase_global):
        for r in range(1 if is_global else graph.n_replicas):
            for i in range(graph.phase_lo[phase], graph.phase_hi[phase]):
                slots = [int(s[i]) for s in (ops.pred0, ops.pred1, ops.out)]
                held = [of_all if slot >= graph.n_slots else rows[r] for slot in slots]
                a, b = (held[k].get(slots[k], never) for k in range(2))
                later = a if a[0] > b[0] else b
                if ops.kind[i] == EXPORT:
                    now = held[2].get(slots[2], never)
                    held[2][slots[2]] = a if a[0] > now[0] else now
                    continue
                end = float(ends[r, i])
                path = later[1] + share[ops.coef[i]] * (end - later[0]) * (ops.kind[i] == DRAW)
                held[2][slots[2]] = end, path
    return of_all[graph.final_slot][1]


STALL = {"entity": "rank", "rate_per_hour": 3600.0, "duration_s": 0.1, "duration_cv": 0.5}


@pytest.mark.parametrize("stall", [None, STALL])
@pytest.mark.parametrize(("pp", "data_parallel", "kept"), [(2, "zero1", 1), (1, "fsdp", 2)])
def test_critical_path_is_the_chain_of_later_predecessors(pp, data_parallel, kept, stall):
    effects = {"rank": {"cv": 0.03}, "residual": {"cv": 0.1}, "step": {"cv": 0.01}}
    effects |= {"stall": stall} if stall else {}
    job = small(pp=pp, data_parallel=data_parallel, **effects)
    program = prepare(job, 3).program
    assert program.graph.n_state == kept  # replicas whose slots are kept: where phases alternate
    path = run_blocks(program, range(1), 3, track=True)[2][0]
    assert np.count_nonzero(path.max(axis=1)) >= 4
    for lane in range(engine.LANES):
        walked = walked_path(program, record(program, 3, lane).end)
        np.testing.assert_allclose(path[:, lane], walked, rtol=2e-5, atol=1e-6)


def test_float32_lanes_are_close_enough():
    """Ends in float32: 3 us on a step of tens of seconds, against the float64 oracle."""
    job = explicit_job()
    times = run_blocks(prepare(job, 21).program, range(1), 21)[0][0]
    v = prepare_variability(job)
    errors = [abs(times[r] - naive.step_time(job, v, 21, r)) for r in range(0, 64, 16)]
    assert max(errors) < 3e-5


@pytest.mark.parametrize("engine_name", ["exact", "exchangeable"])
def test_jitter_adds_the_same_seconds_to_a_short_step_and_to_a_long_one(engine_name: str) -> None:
    def steps(forward_s: float, n: int, **jitter: float) -> np.ndarray:
        job = load_job({
            "model": {"durations": {"forward_s": forward_s, "backward_s": 2.0}},
            "parallelism": {"dp": 200, "microbatches": 2},
            "cluster": {"nodes": 200, "gpus_per_node": 1},
            "variability": {"library": None, "effects": {
                "rank": {"cv": 0.01}, "jitter": jitter}},
        })  # fmt: skip
        result = prism.simulate(job, n, seed=3, engine=engine_name)
        np.testing.assert_allclose(result.ideal_step_time, 2 * (forward_s + 2.0), rtol=1e-6)
        return result.step_time.values

    quiet = steps(1.0, 12_800)
    short = steps(1.0, 12_800, mean_s=0.5, cv=0.4) - quiet
    long = steps(3.0, 640, mean_s=0.5, cv=0.4) - steps(3.0, 640)
    np.testing.assert_allclose(short[:640], long, atol=2e-6)
    q = np.array([0.05, 0.5, 0.95])
    quantiles = 0.5 * laws.lognormal(0.4).ppf(q)
    np.testing.assert_allclose(np.quantile(short, q), quantiles, rtol=0.02)
    assert abs(short.mean() - 0.5) < 5 * 0.5 * 0.4 / short.size**0.5
    assert abs(np.corrcoef(short[:-1], short[1:])[0, 1]) < 0.04
    constant = steps(1.0, 640, mean_s=0.5, cv=0.0) - quiet[:640]
    np.testing.assert_allclose(constant, 0.5, atol=2e-6)


def test_jitter_is_a_row_of_the_ranking_and_a_part_of_runs_that_averages_out() -> None:
    effects = {"microbatch": {"cv": 0.02}, "residual": {"law": "gamma", "cv": 0.05}}
    job = explicit_job(variability={"effects": effects})
    noisy = job.replace("variability.effects.jitter={mean_s: 0.5, cv: 1.0}")
    rows = {row["name"]: row for row in prism.summary(prism.rank(noisy, seed=1))["effects"]}
    plain, more = (prism.estimate(j, replicates=6_400, steps=25, seed=1) for j in (job, noisy))
    var = [float(r.step_time.var()) for r in (plain, more)]
    assert var[1] - var[0] == pytest.approx(0.25, rel=0.1)
    assert rows["jitter"]["total_order"] == pytest.approx(0.25 / var[1], abs=0.05)
    assert rows["jitter"]["std_if_frozen"] == pytest.approx(var[0] ** 0.5, rel=0.1)
    added = float(more.time_to_train.mean() - plain.time_to_train.mean())
    assert added == pytest.approx(25 * 0.5, rel=0.05)
    assert float(more.time_to_train.std()) == pytest.approx(5 * var[1] ** 0.5, rel=0.15)


def test_stalls_come_at_their_rate():
    """A stall on every rank and step delays; on the critical path of one stage it adds fully."""
    job = load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"microbatches": 10},
        "variability": {"library": None, "effects": {"stall": {
            "entity": "rank", "rate_per_hour": 12.0, "duration_s": 30.0, "duration_cv": 0.0}}},
    })  # fmt: skip
    times = run_blocks(prepare(job, 2).program, range(400), 2)[0].reshape(-1)
    p = 1 - np.exp(-12 / 3600 * 30)
    hit = times > 40
    assert abs(hit.mean() - p) < 5 * np.sqrt(p * (1 - p) / times.size)
    quiet = 30 - p * 30  # so that the mean stays 30
    assert abs(float(times.mean()) - 30) < 5 * float(times.std()) / times.size**0.5
    np.testing.assert_allclose(times[~hit], quiet, rtol=1e-6)
    np.testing.assert_allclose(times[hit], quiet + 30, rtol=1e-6)
