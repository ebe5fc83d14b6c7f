"""prism against its twin; all jobs with their errors: experiments/checks/against_twin.py."""

import numpy as np
import pytest
import twin
from scipy.stats import ks_2samp
from twin_check import compare, inputs, prism_runs, prism_steps, twin_runs, twin_steps
from twin_jobs import JOBS, RUNS, S

CLUSTERS = 8
# of each kind one, the quickest; what is drawn per op is pooled of few clusters there
DRAWN = (
    "1f1b, blocking", "zb-h1", "ddp", "fsdp", "cp", "experts, uneven", "slow network", "content",
    "stalls", "congested fsdp", "own noise, fsdp",
)  # fmt: skip
CONTROLS = {
    "content": {"variability.effects.microbatch.backward_loading": 1.0},
    "congested fsdp": {"variability.effects.regime.factor": 2.5},
    "own noise, fsdp": {"variability.effects.residual.scale": 0.7},
}


@pytest.mark.parametrize("name", JOBS)
def test_the_ideal_step_is_the_same(name):
    job = JOBS[name]
    expected = twin.ideal(job, *inputs(job))
    # of 32 bits, each addition rounds
    assert prism_steps(job, 1, 1)[0] == pytest.approx(expected, rel=4e-6)


@pytest.mark.parametrize("name", DRAWN)
def test_steps_have_the_same_distribution(name):
    job = JOBS[name]
    _, plain = twin_steps(job, CLUSTERS, 2)
    _, fast = prism_steps(job, 4 * CLUSTERS, 1)
    found = compare(plain, fast)
    assert abs(found.mean) < 4.0 * found.mean_se + 2e-5
    assert found.p_value > 0.005
    if name in CONTROLS:
        _, other = prism_steps(job.replace(CONTROLS[name]), 4 * CLUSTERS, 1)
        assert compare(plain, other).p_value < 0.005


@pytest.mark.parametrize("name", RUNS)
def test_runs_have_the_same_distribution(name):
    plain = twin_runs(RUNS[name], 32, 400, 1)
    fast = prism_runs(RUNS[name], 32, 1024, 2)
    error = np.hypot(plain["total"].std() / 20.0, fast.std() / 32.0)
    assert abs(fast.mean() - plain["total"].mean()) < 4.0 * error
    assert ks_2samp(plain["total"], fast).pvalue > 0.005


def test_runs_tell_restarts_apart():
    """Negative control: restarts of 40 steps for 30."""
    job = RUNS["failures"]
    plain = twin_runs(job, 32, 800, 1)["total"]
    fast = prism_runs(job.replace({"run.failures.restart": 40 * S}), 32, 2048, 2)
    assert ks_2samp(plain, fast).pvalue < 0.005


def test_the_comparison_sees_clusters():
    """Steps of few clusters that differ are no evidence, of many they are."""
    rng = np.random.default_rng(1)

    def steps(clusters, level):
        own = level + 0.01 * rng.standard_normal((clusters, 1))
        return own + 0.001 * rng.standard_normal((clusters, twin.PER_CLUSTER))

    assert compare(steps(4, 1.0), steps(4, 1.0)).p_value > 0.005
    assert compare(steps(60, 1.0), steps(60, 1.01)).p_value < 0.005
