"""Leaving replicas out: the same clusters, and nearly the same steps as with all simulated."""

from functools import cache

import numpy as np
import pytest
from scipy.stats import ks_2samp
from test_stepgraph import given, sized

import prism

QUIET = {
    "rank": {"cv": 0.02, "node_share": 0.05},
    "microbatch": {"cv": 0.006},
    "step": {"cv": 0.002},
}
NOISY = {
    "rank": {"cv": 0.003, "lemon_fraction": 0.0075}, "microbatch": {"cv": 0.15},
    "residual": {"law": "gamma", "cv": 0.1}, "step": {"cv": 0.0115},
}  # fmt: skip
EFFECTS = {"quiet": QUIET, "noisy": NOISY}
CLUSTERS = 120


def make_job(dp, effects, slow=None, **layout):
    """Build a small job whose replicas meet at the end of the step."""
    layout = {"tp": 2, "pp": 2, "dp": dp, "data_parallel": "ddp", "microbatches": 4} | layout
    machine = {"gpus_per_node": 4, "node_slowdowns": slow or {}}
    return sized({"n_layers": 4, "vocab_size": 4096}, machine, effects, **layout)


@cache
def simulated(dp, effects, engine, clusters=CLUSTERS):
    return prism.simulate(make_job(dp, EFFECTS[effects]), 64 * clusters, seed=5, engine=engine)


def steps(*args):
    """Step times [cluster, draw]."""
    return simulated(*args).step_time.values.reshape(-1, 64)


def replicas(result):
    return prism.summary(result)["replicas"]


@pytest.mark.parametrize("effects", EFFECTS)
@pytest.mark.parametrize("dp", [192, 400])
def test_steps_of_the_exact_engine(effects, dp):
    """Draws are keyed, so that most steps are the same ones; the others follow the same law."""
    exact, found = (steps(dp, effects, engine) for engine in ("exact", "exchangeable"))
    about = replicas(simulated(dp, effects, "exchangeable"))
    assert (about["engine"], about["replicas"], about["simulated"]) == ("exchangeable", dp, 129)
    unseen = about["slowest_unseen"]
    assert np.mean(found != exact) < 1.5 * unseen + 0.02  # 0.006 by chance alone
    if effects == "noisy":  # what is left out decides
        assert unseen > 0.2
    assert ks_2samp(found.ravel(), exact.ravel(), method="asymp").statistic < 0.025
    assert np.quantile(found, 0.99) == pytest.approx(np.quantile(exact, 0.99), rel=0.005)
    assert found.std() == pytest.approx(exact.std(), rel=0.05)
    assert found.mean() == pytest.approx(exact.mean(), rel=5e-4)
    between = [x.mean(axis=1).std() for x in (found, exact)]
    if effects == "quiet":  # lasting differences between GPUs are there
        assert between[0] == pytest.approx(between[1], rel=0.02)
        assert between[1] > 3 * exact.std(axis=1).mean() / 8


def test_replicas_that_are_simulated_alone_are_too_fast():
    """Negative control: as many replicas as are simulated of 400, and no others."""
    exact, few = steps(400, "noisy", "exact"), steps(129, "noisy", "exact")
    found = steps(400, "noisy", "exchangeable")
    apart = [ks_2samp(x.ravel(), exact.ravel(), method="asymp").statistic for x in (few, found)]
    assert apart[0] > 0.15 and apart[1] < 0.1 * apart[0]


def test_threads_and_length_change_nothing():
    job = make_job(192, QUIET)
    one, three, few = (
        prism.simulate(job, n, seed=5, threads=t, engine="exchangeable").step_time.values
        for n, t in ((768, 1), (768, 3), (448, 2))
    )
    assert np.array_equal(one, three) and np.array_equal(one[:448], few)
    assert np.array_equal(one, steps(192, "quiet", "exchangeable").ravel()[:768])


def test_a_slow_node_is_always_simulated():
    """Of any replica; every step waits for it."""
    job = make_job(192, QUIET, {100: 1.3})
    exact, found = (prism.simulate(job, 640, seed=5, engine=e) for e in ("exact", "exchangeable"))
    assert replicas(found)["simulated"] == 129
    assert np.array_equal(found.step_time.values, exact.step_time.values)


def test_replicas_without_noise_take_what_the_ideal_step_does():
    job = given(1.0, 0.01, dp=200, microbatches=2)
    found = prism.simulate(job, 128, seed=1, engine="exchangeable")
    assert replicas(found)["engine"] == "exchangeable"
    assert found.step_time.values == pytest.approx(2.02, rel=1e-6)


@pytest.mark.parametrize(
    ("dp", "layout", "effects"),
    [
        (192, {"data_parallel": "fsdp", "reshard_after_forward": True}, QUIET),
        (192, {}, QUIET | {"stall": {"rate_per_hour": 60.0, "duration_s": 1.0}}),
        (129, {}, QUIET),
    ],
    ids=["meet within a step", "stalls", "few"],
)
def test_all_replicas_are_simulated_where_some_would_not_do(dp, layout, effects):
    found = prism.simulate(make_job(dp, effects, **layout), 64, seed=1, engine="exchangeable")
    about = replicas(found)
    assert (about["engine"], about["simulated"]) == ("exact", dp) and about["reason"]


@pytest.mark.parametrize(("dp", "engine"), [(1024, "exact"), (1025, "exchangeable")])
def test_auto_is_exact_up_to_a_thousand_replicas(dp, engine):
    job = given(effects={"residual": {"cv": 0.1}}, dp=dp, microbatches=1)
    assert replicas(prism.simulate(job, 64, seed=1))["engine"] == engine


@pytest.mark.parametrize("framework", ["megatron", "eager"])
@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_what_is_hidden_of_gradients_and_parameters_leaves_replicas_out(mode, framework):
    """Gathers begin with the step and reductions end it: replicas meet nowhere between."""
    layout = {"data_parallel": mode, "framework": framework, "overlap": True}
    exact, found = (
        prism.simulate(make_job(192, QUIET, **layout), 640, seed=5, engine=engine)
        for engine in ("exact", "exchangeable")
    )
    assert replicas(found)["simulated"] == 129
    assert float(found.step_time.mean()) == pytest.approx(float(exact.step_time.mean()), rel=2e-4)


def test_shares_of_the_step_are_those_of_all_replicas():
    """Half of the replicas that are simulated are the slowest, which idle least."""
    job = make_job(192, {"rank": {"cv": 0.1}})
    exact, found = (prism.simulate(job, 256, seed=1, engine=e) for e in ("exact", "exchangeable"))
    assert found.idle_fraction.values == pytest.approx(exact.idle_fraction.values, abs=0.001)
    for name in ("exposed_communication", "critical_path_time"):
        np.testing.assert_allclose(found[name], exact[name], rtol=0.05)


def test_estimate_says_what_it_simulated():
    numbers = prism.summary(prism.estimate(
        make_job(192, QUIET), replicates=256, run_replicates=50, steps=10, seed=1,
        engine="exchangeable",
    ))  # fmt: skip
    about = numbers["replicas"]
    assert (about["engine"], about["simulated"]) == ("exchangeable", 129)
    assert 0.0 <= about["slowest_unseen"] < 0.5
    mean = float(steps(192, "quiet", "exact").mean())
    assert numbers["step_time"]["mean"] == pytest.approx(mean, rel=2e-2)


def test_an_engine_of_no_such_name_is_refused():
    with pytest.raises(prism.PrismError, match="exact"):
        prism.simulate("pipeline-8x32", 64, seed=1, engine="x")
