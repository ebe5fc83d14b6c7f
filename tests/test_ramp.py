"""Runs whose global batch grows: steps of each phase, and how long they take."""

from math import ceil

import numpy as np
import pytest

import prism
from prism import PrismError

SMALL = {
    "model": {"name": "llama3-8b", "seq_len": 2048},
    "parallelism": {"dp": 8, "microbatches": 4, "microbatch_size": 1, "recompute": "full"},
    "cluster": {"nodes": 1, "device": "h100"},
    "run": {"tokens": 3e7, "batch_ramp": [{"tokens": 1e7, "global_batch": 8},
                                          {"tokens": 2e7, "global_batch": 16}]},
}  # fmt: skip


def job_of(**run):
    return prism.load_job({**SMALL, "run": {**SMALL["run"], **run}})


def test_steps_are_those_of_going_through_the_tokens_one_step_at_a_time() -> None:
    job, done, counts = job_of(), 0, [0, 0, 0]
    for i, (end, batch) in enumerate(((1e7, 8), (2e7, 16), (3e7, 32))):
        while done < end:
            done += batch * 2048
            counts[i] += 1
    assert job.ramp_steps == tuple(counts[:2])
    assert job.n_steps == sum(counts)
    assert job_of(batch_ramp=None).n_steps == ceil(3e7 / (32 * 2048))
    # a run that ends within the ramp
    assert job_of(tokens=1.5e7).ramp_steps == (counts[0], ceil((1.5e7 - counts[0] * 16384) / 32768))
    assert job_of(tokens=5e6).ramp_steps == (ceil(5e6 / 16384), 0)


def test_llama_3_has_a_fifth_more_steps_for_its_ramp() -> None:
    job = prism.load_job("llama3-405b-16k")
    first = ceil(252e6 / (512 * 8192))
    second = ceil((2.87e12 - first * 512 * 8192) / (1024 * 8192))
    rest = 15.6e12 - (first * 512 + second * 1024) * 8192
    assert job.n_steps == first + second + ceil(rest / (2048 * 8192))
    assert job.n_steps == pytest.approx(1.18 * 15.6e12 / job.tokens_per_step, rel=0.01)


def test_a_phase_takes_the_steps_of_its_batch() -> None:
    """The run is its phases, each with as many microbatches as its batch has."""
    job = job_of()
    expected, ideal, left = 0.0, 0.0, job.n_steps
    for count, steps in zip((1, 2, 4), (*job.ramp_steps, None), strict=True):
        steps = left if steps is None else steps
        found = prism.simulate(
            job.replace({"parallelism.microbatches": count, "run.batch_ramp": None}), 1024, 1
        )
        expected += steps * float(found.step_time.mean())
        ideal += steps * float(found.ideal_step_time)
        left -= steps
    result = prism.estimate(job, replicates=1024, seed=1)
    calm = result.run_term_time.drop_sel(term="model_error").sum("term")
    assert float(calm.mean()) == pytest.approx(expected, rel=2e-3)
    assert float(result.ideal_time_to_train) == pytest.approx(ideal, rel=5e-3)
    assert prism.summary(result)["warnings"] == [
        text for text in prism.summary(result)["warnings"] if "idle" not in text
    ]


def test_replicas_stand_idle_where_the_schedule_has_no_fewer_microbatches() -> None:
    settings = {"parallelism.pp": 2, "parallelism.vpp": 2, "parallelism.dp": 4,
                "parallelism.microbatches": 2, "run.tokens": None, "run.steps": 100}  # fmt: skip
    job = job_of(batch_ramp=None).replace(settings)
    ramp = [{"tokens": 50 * 4 * 2048, "global_batch": 4}]
    with_ramp = prism.estimate(job.replace({"run.batch_ramp": ramp}), replicates=64, seed=1)
    without = prism.estimate(job, replicates=64, seed=1)
    np.testing.assert_allclose(with_ramp.time_to_train, without.time_to_train, rtol=1e-12)
    assert any("2 of 4 replicas" in text for text in prism.summary(with_ramp)["warnings"])


@pytest.mark.parametrize(
    ("run", "key"),
    [
        ({"batch_ramp": [{"tokens": 2e7, "global_batch": 16}, {"tokens": 1e7, "global_batch": 8}]},
         "run.batch_ramp"),
        ({"batch_ramp": [{"tokens": 1e7}]}, "global_batch"),
        ({"batch_ramp": [{"tokens": 1e7, "global_batch": 0}]}, "global_batch"),
        ({"batch_ramp": [{"tokens": -1.0, "global_batch": 8}]}, "tokens"),
    ],
)  # fmt: skip
def test_ramps_that_cannot_be_are_refused_when_a_job_is_read(run, key) -> None:
    with pytest.raises(PrismError, match=key):
        job_of(**run)


def test_a_batch_larger_than_the_job_s_is_refused() -> None:
    job = job_of(batch_ramp=[{"tokens": 1e7, "global_batch": 33}])
    with pytest.raises(PrismError, match="larger"):
        prism.estimate(job, replicates=64, seed=1)


def test_durations_and_fitted_models_have_no_ramp() -> None:
    with pytest.raises(PrismError, match="durations"):
        prism.load_job({
            "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}, "seq_len": 8},
            "run": {"steps": 10, "batch_ramp": [{"tokens": 1e3, "global_batch": 8}]},
        })  # fmt: skip
