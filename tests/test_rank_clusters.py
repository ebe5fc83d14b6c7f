"""Ranking: many clusters from few, ranks that stay, stalls, and fitted traces."""

import math

import numpy as np
import pytest
from pipeline_synth import Effects, Layout, as_production, make_trace
from rank_jobs import chain, sampled, small

import prism
from prism import fit, load_job, rank, save
from prism.analyses.rankings.freezing import treat_ops
from prism.analyses.rankings.rarestalls import find_rare_stalls
from prism.analyses.rankings.shares import Sampler
from prism.common.attribution import cluster_variance, run_variance
from prism.simulation.causes import stall_bound
from prism.simulation.draws import cluster_times
from prism.simulation.prepare import prepare
from prism.simulation.steps import run_blocks
from prism.simulation.variability import Treatment


def fitted_job(folder, seed=1, layout=None, **effects):
    frame, _ = make_trace(layout or Layout(2, 2, 4, 24), Effects(**effects), seed)
    as_production(frame).to_csv(folder / "ops.csv", index=False)
    save(fit(folder / "ops.csv", 0), folder / "m.nc")
    return load_job(str(folder / "m.nc"))


@pytest.mark.usefixtures("few_clusters")
def test_a_fitted_trace_is_ranked(tmp_path):
    """A slow worker, as it was measured, explains the mean but not the variance."""
    job = fitted_job(tmp_path, residual_sd=0.01, step_sd=0.01, lemons={(1, 1): 1.7})
    assert not job.has_run  # a trace says nothing of the run that follows
    values = prism.summary(rank(job, seed=1))
    assert {"forward", "backward", "p2p"} <= {r["name"] for r in values["kernels"]}
    assert sum(r["covariance_share"] for r in values["kernels"]) == pytest.approx(1.0)
    rows = {r["name"]: r for r in values["effects"]}
    assert rows["rank"]["mean_reduction"] > 0.25 > rows["rank"]["std_reduction"] - 0.25
    assert rows["rank"]["total_order"] == 0.0
    assert rows["step"]["total_order"] > 0.5
    assert abs(rows["step"]["mean_reduction"]) < 0.02
    step = prepare(job, 1)
    every = np.ones(step.program.shares.shape[0], bool)
    frozen = run_blocks(treat_ops(step.program, every, Treatment(frozen=True)), range(2), 1)[0]
    assert frozen.std() < 1e-5 * frozen.mean()


@pytest.mark.usefixtures("few_clusters")
@pytest.mark.parametrize(("effect", "name"), [("content_sd", "microbatch"), ("step_sd", "step")])
def test_what_a_trace_was_made_with_comes_out_on_top(tmp_path, effect, name):
    job = fitted_job(tmp_path, residual_sd=0.01, **{effect: 0.1})
    values = prism.summary(rank(job, seed=2))
    best = max(values["effects"] + values["kernels"], key=lambda r: r["total_order"])
    assert best["name"] == name
    assert best["total_order"] > 0.7


@pytest.mark.parametrize("dp", [1, 3])
@pytest.mark.parametrize("resolution", ["op", "kernel"])
def test_quiet_times_are_those_of_a_step_with_ranks_alone(dp, resolution):
    effects = {"rank": {"cv": 0.1}, "step": {"cv": 0.1}, "microbatch": {"cv": 0.1},
               "call": {"cv": 0.1}, "residual": {"cv": 0.1}}  # fmt: skip
    data = small(resolution, **effects).model_dump(exclude={"source", "name"}, exclude_none=True)
    data["parallelism"]["dp"] = dp
    data["cluster"] = {"nodes": dp, "gpus_per_node": 4}
    calm = {k: {"cv": 0.0} for k in effects if k != "rank"}
    quiet = data | {"variability": data["variability"] | {"effects": effects | calm}}
    noisy, quiet = (prepare(load_job(d), 1).program for d in (data, quiet))
    times = cluster_times(quiet, range(2, 70), 5, 2)
    assert times.shape == (68,)
    np.testing.assert_allclose(times[:5], run_blocks(quiet, range(2, 7), 5)[0][:, 0], rtol=1e-6)
    noise = cluster_times(noisy, range(2, 70), 5)
    assert np.corrcoef(times, noise)[0, 1] > 0.95


def test_rare_slow_ranks_are_told_from_few_clusters(monkeypatch):
    """A slow rank in one cluster of ten: the variance between clusters from a few of them."""
    effects = {"rank": {"cv": 0.01, "lemon_fraction": 0.013, "lemon_slowdown": [1.2, 1.21]},
               "step": {"cv": 0.05}, "residual": {"cv": 0.02}}  # fmt: skip
    monkeypatch.setattr("prism.analyses.rankings.shares.MAX_CONTROL", 1024)
    job = small(**effects)
    program = prepare(job, 1).program
    exact = cluster_variance(run_blocks(program, range(3000), 11, 2)[0].astype(float))
    errors = {True: [], False: []}
    for seed in range(12):
        found = Sampler(program, program, seed, 2)
        found.extend([], 8)
        control = found.extend_control()
        for use in errors:
            got = run_variance((found.a, found.b), control if use else None)
            errors[use].append(got.between / exact.between - 1.0)
    assert np.std(errors[True]) < 0.4 * np.std(errors[False])
    assert abs(np.mean(errors[True])) < 0.15


@pytest.mark.parametrize("entity", ["rank", "job"])
@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_stalls_too_rare_to_be_seen_have_their_share(entity, noise):
    """One step in 60,000 stalls for half a minute: never met, yet what it adds is known."""
    stall = {"rate_per_hour": 0.02, "duration_s": 30, "duration_cv": 0.5, "entity": entity}
    job = chain(m=1, residual={"law": "normal", "cv": 0.05 * noise}, stall=stall)
    found, sampler = sampled(job)
    assert stall_bound(sampler.program)[1] == 0.0  # the program that is run has none
    rate, bound = stall_bound(prepare(job, 1).program)
    assert rate == pytest.approx(0.02 / 3600 * 3, rel=0.05)
    assert bound == pytest.approx(rate * 900 * 1.25, rel=0.01)
    exact = bound / (bound + 5 * (0.05 * noise) ** 2)
    for estimate in (found["stall"].first, found["stall"].total):
        assert abs(estimate.value - exact) < 2 * estimate.half_width
        assert 0 < estimate.half_width <= 0.06
    assert found["compute"].total.value == pytest.approx(1 - exact, abs=0.05)
    whole = prism.summary(rank(job, seed=1))
    values = {r["name"]: r for r in whole["effects"]}
    low, high = values["stall"]["std_reduction_ci"]
    assert abs(values["stall"]["std_reduction"] - (1 - math.sqrt(1 - exact))) < high - low
    low, high = values["stall"]["mean_reduction_ci"]
    assert abs(values["stall"]["mean_reduction"] - rate * 30 / 3) < high - low
    assert values["stall"]["total_order"] == pytest.approx(exact, abs=0.05)
    exact_std = (bound + 5 * (0.05 * noise) ** 2) ** 0.5
    assert whole["std_with_rare_stalls"] == pytest.approx(exact_std, rel=0.15)


def test_weights_of_stalls_are_a_likelihood():
    """Mean 1, and the rate of stalls comes back; two per step included."""
    stall = {"rate_per_hour": 4, "duration_s": 3, "duration_cv": 0.5}
    program = prepare(small(stall=stall), 1).program
    rare = find_rare_stalls(program, (1, 2))
    w = rare.weights(200, 1)
    assert w.mean() == pytest.approx(1.0, abs=5 * w.std() / w.size**0.5)
    calm, often = (run_blocks(p, range(200), 1, 2)[0] for p in (rare.calm, rare.often))
    delay = w * (often.astype(float) - calm)
    plain = run_blocks(program, range(2000), 5, 2)[0].mean() - calm.mean()
    error = delay.std() / w.size**0.5 + 3.0 * (stall_bound(program)[0] / 128_000) ** 0.5
    assert abs(delay.mean() - plain) < 4 * error
    assert delay.mean() > 5 * delay.std() / w.size**0.5


def test_frequent_stalls_have_their_share():
    stall = {"rate_per_hour": 60, "duration_s": 1, "duration_cv": 0.5, "entity": "job"}
    job = chain(m=1, residual={"law": "normal", "cv": 0.1}, stall=stall)
    found, sampler = sampled(job)
    rate = stall_bound(sampler.program)[0]
    part = rate * 1.25 - rate**2
    share = part / (part + 5 * 0.1**2)
    assert abs(found["stall"].total.value - share) < 2 * found["stall"].total.half_width
