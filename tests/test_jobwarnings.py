"""Warnings of jobs that run, but perhaps not as meant."""

import pytest

from prism import estimate, load_job, summary
from prism.simulation.jobwarnings import job_doubts
from prism.workload.memory import estimate_memory, memory_limit


def doubts(job, *changes):
    return list(job_doubts(load_job(job, changes)))


def test_the_jobs_that_fit_raise_none():
    assert doubts("llama3-405b-16k") == []
    assert doubts("pipeline-8x32") == []  # explicit durations know no memory


def test_a_job_beyond_its_memory_says_so_and_what_would_help():
    job = load_job("llama3-405b-16k", ("parallelism.tp=4", "parallelism.dp=256"))
    memory = estimate_memory(job)
    assert memory.total > memory_limit(job)
    (text,) = job_doubts(job)
    assert f"{memory.gib:.0f} GiB" in text and f"stage {memory.stage}" in text
    assert "--layouts" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [((), True), (("parallelism.shard_size=4",), False)],
    ids=["no shard size", "shard size"],
)
def test_hsdp_that_shards_nothing_says_so(changes, said):
    found = doubts("llama3-405b-16k", "parallelism.data_parallel=hsdp", *changes)
    assert any(text.startswith("hsdp:") for text in found) is said


def test_a_tier_as_large_as_the_job_says_that_it_does_nothing():
    small, large = (f"cluster.tiers={{zone: {{gpus: {n}, distance_km: 1}}}}" for n in (256, 512))
    assert not [text for text in doubts("gpt3-175b-512", small) if "zone" in text]
    (text,) = (text for text in doubts("gpt3-175b-512", large) if "zone" in text)
    assert "512 GPUs" in text and "no effect" in text


def test_a_power_limit_of_a_device_without_a_curve_is_doubted():
    limit = "cluster.power_limit_w=600"
    assert doubts("llama3-405b-16k", limit) == []
    found = doubts("llama31-405b-gb200-512", "cluster.power_limit_w=900")
    assert [text for text in found if "power_limit_w" in text and "gb200" in text]
    assert not [text for text in doubts("llama31-405b-gb200-512") if "power" in text]


def test_an_estimate_tells_its_jobs_doubts():
    job = load_job("llama3-70b-fsdp-512", ("parallelism.dp=16", "cluster.nodes=2"))
    assert list(job_doubts(job))
    found = summary(estimate(job, replicates=64, run_replicates=8, seed=1))["warnings"]
    assert set(job_doubts(job)) <= set(found)
