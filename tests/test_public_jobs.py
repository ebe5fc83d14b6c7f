"""Published jobs, from their files alone: experiments/public-jobs with few replicates."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import prism

SCRIPT = Path(__file__).parents[1] / "experiments" / "public-jobs" / "run.py"
SMALL = 128  # GPUs up to which jobs are simulated here


@pytest.fixture(scope="module")
def public():
    spec = importlib.util.spec_from_file_location("public_jobs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_published_layout_is_a_job_of_its_gpus(public) -> None:
    entries = public.published()
    assert len(entries) == 85
    for row, _, gpus, seconds in entries:
        job = public.job_of(row, gpus)
        assert job.world_size == gpus == job.n_nodes * job.cluster.gpus_per_node
        assert seconds > 0.0


def test_ideal_steps_of_megatron_jobs_on_h100_are_near_the_published(public) -> None:
    ratios = []
    for row, _, gpus, seconds in public.published():
        if (row["device"], row["framework"]) == ("h100", "megatron") and gpus <= SMALL:
            result = prism.simulate(public.job_of(row, gpus), replicates=64, seed=0)
            ratios.append(float(result.ideal_step_time) / seconds)
    assert len(ratios) == 25
    assert np.exp(np.mean(np.log(ratios))) == pytest.approx(1.0, abs=0.05)
    assert np.ptp(ratios) < 0.15


def test_growth_and_agreement_are_computed_as_they_say(public) -> None:
    rows = [
        {"job": "a", "release": "1", "class": "x", "gpus": g, "measured_s": m, "ideal_s": 1.0,
         "mean_s": p, "mean_se_s": 0.01 * p}
        for g, m, p in ((64, 10.0, 11.0), (8, 8.0, 10.0))
    ]  # fmt: skip
    ((job, _, first, last, measured, found, error),) = public.growth(rows)
    assert (job, first, last) == ("a", 8, 64)
    assert (measured, found) == pytest.approx((0.25, 0.1))
    assert error == pytest.approx(0.01 * np.sqrt(2.0))
    (_, key, n, mean, *_) = public.classes(rows)[1]
    assert (key, n) == ("mean_s", 2)
    assert mean == pytest.approx(np.sqrt(1.1 * 1.25))
