"""Warnings of jobs that run, but perhaps not as meant."""

import re

import pytest

import prism

SMALL = {
    "model": {"n_layers": 2, "hidden_size": 512, "ffn_size": 2048, "n_heads": 8, "seq_len": 512,
              "vocab_size": 8000},
    "parallelism": {"tp": 8, "dp": 2},
    "cluster": {"nodes": 2, "device": "h100"},
}  # fmt: skip


def warnings(job, *changes):
    """Give what an estimate of a job warns of, but for few replicates."""
    made = prism.estimate(prism.load_job(job, changes), replicates=64, seed=1)
    found = prism.summary(made)
    return found, [text for text in found["warnings"] if "replicates" not in text]


def test_a_job_without_doubts_raises_none():
    assert warnings("pipeline-8x32")[1] == []  # explicit durations know no memory


def test_a_job_beyond_its_memory_says_so_and_what_would_help():
    found, said = warnings("llama3-70b-fsdp-512", "parallelism.dp=16", "cluster.nodes=2")
    memory = found["memory"]
    assert memory["gib"] > memory["limit_gib"] and memory["p_fits"] < 0.5
    (text,) = (text for text in said if "GiB" in text)
    assert f"{memory['gib']:.0f} GiB" in text and "--layouts" in text
    assert not [text for text in warnings("llama3-70b-fsdp-512")[1] if "GiB" in text]


HSDP = "parallelism.data_parallel=hsdp"
TIER = "cluster.tiers={{zone: {{gpus: {}, distance_km: 1}}}}"


@pytest.mark.parametrize(
    ("without", "with_effect", "words"),
    [
        ([HSDP], [HSDP, "parallelism.shard_size=2"], "hsdp"),
        ([TIER.format(16)], [TIER.format(8)], "zone.*16"),
        (["cluster.device=gb200", "cluster.power_limit_w=900"], ["cluster.power_limit_w=600"],
         "power_limit_w"),
    ],
)  # fmt: skip
def test_a_setting_without_effect_says_so(without, with_effect, words):
    assert [text for text in warnings(SMALL, *without)[1] if re.search(words, text)]
    for quiet in (with_effect, []):
        assert not [text for text in warnings(SMALL, *quiet)[1] if re.search(words, text)]
