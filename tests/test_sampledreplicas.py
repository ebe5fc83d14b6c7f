"""Leaving replicas out: the same cluster, the same step where few are left out, the same law."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import ks_2samp, norm

import prism
from prism import engine, estimate, load_job, simulate
from prism.simulation.prepare import prepare
from prism.simulation.program import make_keys, make_room
from prism.simulation.sampledreplicas import (
    choose_engine,
    fit_unseen,
    ignore_unseen,
    sample_replicas,
)
from prism.simulation.steps import run_blocks
from prism.simulation.summary import spread
from prism.simulation.unseenlaw import noise_table, widen

QUIET = {
    "rank": {"cv": 0.02, "node_share": 0.05},
    "microbatch": {"cv": 0.006},
    "step": {"cv": 0.002},
}
NOISY = {
    "rank": {"cv": 0.003, "lemon_fraction": 0.0075}, "microbatch": {"cv": 0.15},
    "residual": {"law": "gamma", "cv": 0.1}, "step": {"cv": 0.0115},
}  # fmt: skip
CLUSTERS = 400


def make_job(dp, effects, **layout):
    """Build a small transformer job whose replicas meet at the end of the step."""
    layout = {"tp": 2, "pp": 2, "dp": dp, "data_parallel": "ddp", "microbatches": 4} | layout
    return load_job(
        {
            "model": {
                "n_layers": 4, "hidden_size": 1024, "ffn_size": 4096, "n_heads": 8,
                "vocab_size": 4096, "seq_len": 1024,
            },
            "parallelism": layout,
            "cluster": {"gpus_per_node": 4, "nodes": dp},
            "variability": {"library": None, "effects": effects},
        }
    )  # fmt: skip


def run(program, n=CLUSTERS, seed=5):
    """Step times [cluster, lane] in s."""
    return run_blocks(program, range(n), seed, 2)[0].astype(float)


def between(times):
    """Spread between clusters [s]."""
    return spread(times.ravel(), np.repeat(np.arange(len(times)), 64))["between_cluster_std"]


def test_all_but_none_left_out_is_the_exact_engine_to_the_bit():
    program = prepare(make_job(24, QUIET), 1).program
    assert sample_replicas(program, 10, 13) is program  # with replica 0 they are 24
    some = ignore_unseen(sample_replicas(program, 10, 12))  # one is left out
    exact, times = run(program, 30), run(some, 30)
    assert np.all(times <= exact)
    assert np.mean(times == exact) > 0.95  # a step that waits for the one alone may differ


@pytest.mark.parametrize(("effects", "dp"), [(QUIET, 64), (NOISY, 96)])
def test_law_of_the_exact_engine(effects, dp):
    program = prepare(make_job(dp, effects), 1).program
    exact = run(program)
    found = run(fit_unseen(sample_replicas(program, 8, 16), 5).program)
    assert ks_2samp(found.ravel(), exact.ravel(), method="asymp").statistic < 0.03
    assert np.quantile(found, 0.99) == pytest.approx(np.quantile(exact, 0.99), rel=0.004)
    assert found.std() == pytest.approx(exact.std(), rel=0.05)
    if effects is QUIET:
        assert between(found) == pytest.approx(between(exact), rel=0.05)


def test_simulated_replicas_alone_are_too_fast():
    """The negative control of the law: noise decides who is slowest, so the rest matters."""
    program = prepare(make_job(192, NOISY), 1).program
    exact, seen = run(program, 100), run(ignore_unseen(sample_replicas(program, 16, 32)), 100)
    assert ks_2samp(seen.ravel(), exact.ravel(), method="asymp").statistic > 0.2


def test_without_levels_clusters_are_all_alike():
    """The negative control of the spread: replicas drawn anew every step have no slow cluster."""
    program = prepare(make_job(192, QUIET), 1).program
    exact = run(program)
    shuffled = np.random.default_rng(1).permutation(exact.ravel()).reshape(exact.shape)
    assert between(shuffled) < 0.5 * between(exact)


def test_chunks_threads_and_length_change_nothing():
    program = fit_unseen(sample_replicas(prepare(make_job(192, QUIET), 1).program, 16, 32), 5)
    unfitted = sample_replicas(prepare(make_job(192, QUIET), 1).program, 16, 32)
    whole = run_blocks(program.program, range(12), 5, 1)[0]
    assert np.array_equal(whole, run_blocks(program.program, range(12), 5, 3)[0])
    assert np.array_equal(whole[:7], run_blocks(unfitted, range(7), 5, 2)[0])
    assert np.array_equal(whole[7:], run_blocks(unfitted, range(7, 12), 5, 2)[0])


def test_levels_order_the_replicas_of_the_exact_engine():
    """The replica that all of a quiet cluster's steps wait for is among the slowest levels."""
    program = sample_replicas(prepare(make_job(192, QUIET), 1).program, 16, 32)
    step, n = program.arrays(track=False), 192
    [time], _, *rest = make_room(step, 1)
    told = engine.run_sampled(0, make_keys(3), step, program.sample.alone(), (time[None], *rest))
    level, chosen, own = told.level[0], told.chosen[0], told.own[0]
    assert chosen[0] == 0 and chosen[-1] == n and np.all(np.diff(chosen) > 0)
    assert np.isin(np.argsort(-level)[:16], chosen).all()
    assert np.allclose(own[:-1].max(axis=0), time, rtol=1e-6)
    mean = own[:-1].mean(axis=1)
    assert np.corrcoef(level[chosen[:-1]], mean)[0, 1] > 0.95


def test_slow_node_is_always_simulated():
    job = make_job(192, QUIET)
    slow = job.model_copy(
        update={"cluster": job.cluster.model_copy(update={"node_slowdowns": {100: 1.3}})}
    )
    program = prepare(slow, 1).program
    exact = run(program, 20)
    assert np.array_equal(exact, run(fit_unseen(sample_replicas(program, 8, 16), 5).program, 20))


def test_noise_table_reads_a_normal_law_and_its_tail():
    rng = np.random.default_rng(2)
    first, width, log_cdf = noise_table(np.sort(rng.standard_normal(132_096)))
    grid = first + width * np.arange(log_cdf.size)
    for z, within in ((0.0, 0.02), (2.0, 0.02), (3.5, 0.2), (4.5, 0.4)):
        assert np.interp(norm.logcdf(z), log_cdf, grid) == pytest.approx(z, abs=within)


def test_noise_table_of_steps_has_no_endless_tail():
    rng = np.random.default_rng(2)
    noise = np.sort(rng.integers(0, 4, (132_096, 6)).sum(axis=1) + 0.1 * rng.random(132_096))
    first, width, log_cdf = noise_table(noise)
    grid = first + width * np.arange(log_cdf.size)
    assert np.interp(np.log1p(-1e-6), log_cdf, grid) < 18.1 + noise.std()  # it is at most 18.1


@pytest.mark.parametrize("noise", [np.zeros(132_096), np.repeat([0.0, 1.0], 66_048)])
def test_noise_whose_largest_values_are_alike_ends_with_them(noise):
    first, width, log_cdf = noise_table(noise)
    assert np.isfinite(log_cdf).all() and log_cdf[-1] == 0.0
    assert first + width * log_cdf.size == pytest.approx(noise[-1], abs=1e-3)


def test_replicas_without_noise_take_what_the_ideal_step_does():
    job = load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 0.01}},
        "parallelism": {"dp": 200, "microbatches": 2},
        "variability": {"library": None},
    })  # fmt: skip
    found = simulate(job, 128, seed=1, engine="exchangeable")
    assert json.loads(found.attrs["replicas"])["engine"] == "exchangeable"
    assert found.step_time.values == pytest.approx(2.02, rel=1e-6)


@pytest.mark.parametrize(
    ("layout", "effects", "reason"),
    [
        ({"data_parallel": "fsdp", "reshard_after_forward": True}, QUIET, "mid-step"),
        ({}, QUIET | {"stall": {"rate_per_hour": 60.0, "duration_s": 1.0}}, "stalls"),
    ],
)
def test_says_why_all_replicas_are_simulated(layout, effects, reason):
    step = prepare(make_job(192, effects, **layout), 1, engine="exchangeable")
    assert step.program.sample is None
    assert reason in step.choice.reason


def test_auto_is_exact_for_few_replicas():
    program = prepare(make_job(192, QUIET), 1).program
    assert choose_engine(program, "auto")[1].engine == "exact"
    assert choose_engine(program, "auto", limit=150)[1].engine == "exchangeable"
    assert choose_engine(replace(program), "exact", limit=150)[0].sample is None


def test_estimate_says_what_it_simulated():
    job = make_job(192, QUIET)
    numbers = prism.summary(
        estimate(job, replicates=256, run_replicates=50, steps=10, seed=1, engine="exchangeable")
    )
    assert numbers["replicas"]["engine"] == "exchangeable"
    assert numbers["replicas"]["simulated"] == 129 and numbers["replicas"]["replicas"] == 192
    assert 0.0 <= numbers["replicas"]["slowest_unseen"] < 0.5
    exact = simulate(job, 256, seed=1, engine="exact")
    assert json.loads(exact.attrs["replicas"])["engine"] == "exact"
    assert numbers["step_time"]["mean"] == pytest.approx(float(exact.step_time.mean()), rel=2e-3)
    # shares of the critical path are those of the same steps
    assert numbers["exposed_communication"] == pytest.approx(
        float(exact.exposed_communication), rel=0.05
    )
    few = estimate(make_job(16, QUIET), replicates=64, run_replicates=10, steps=10, seed=1,
                   engine="exchangeable")  # fmt: skip
    assert any("all 16 replicas" in text for text in prism.summary(few)["warnings"])


def test_idle_share_is_that_of_all_replicas():
    """Half of the replicas that are simulated are the slowest, which idle least."""
    job = make_job(192, {"rank": {"cv": 0.1}})
    exact, found = (simulate(job, 256, seed=1, engine=e) for e in ("exact", "exchangeable"))
    assert json.loads(found.attrs["replicas"])["simulated"] == 129
    assert found.idle_fraction.values == pytest.approx(exact.idle_fraction.values, abs=0.001)


@pytest.mark.parametrize("less", [0.0, 0.5])
def test_draws_of_microbatches_mend_the_tail_of_a_small_pilot(less):
    """Noise that is mostly microbatches, the longest of which may delay a step less."""
    rng = np.random.default_rng(3)

    def draw(n):
        told = np.sort(rng.gamma(4.0, 0.25, (n, 8)), axis=1)[:, [3, -1]]
        known = told @ [0.5, 1.0]
        known -= less * np.maximum(0.0, known - 2.9)  # of 1 in 10
        return told, known + 0.1 * rng.standard_normal(n)

    (told, noise), (many, truth) = draw(10_000), draw(1_000_000)
    found, exact = widen(noise, told, many), np.sort(truth)
    assert found.size == 1_000_000
    for share in (0.5, 1e-2, 1e-3, 1e-4):
        assert np.quantile(found, 1.0 - share) == pytest.approx(
            np.quantile(exact, 1.0 - share), abs=0.05 * exact.std()
        )
    free = rng.standard_normal(10_000)  # nothing to do with them: left as it is
    assert np.array_equal(widen(free, told, many), np.sort(free))
