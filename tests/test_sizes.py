"""Sizes are refused before any work, with the figure, and large jobs that fit are not."""

import subprocess
import sys

import pytest
from timing import least_seconds

import prism

FREE = "prism.common.sizes.free_bytes"
REFUSED = [
    ("schedule", "1f1b", "--stages", "1000", "--microbatches", "100000"),
    ("estimate", "pipeline-8x32", "--replicates", "1000000000"),
    ("estimate", "pipeline-8x32", "--run-replicates", "1000000000"),
    ("estimate", "gpt3-175b-512", "--set", "parallelism.microbatches=100000"),
    ("estimate", "llama3-405b-1m", "--set", "parallelism.dp=131072", "--set",
     "cluster.nodes=2097152"),
    ("schedule", "zb-v", "--stages", "10000", "--microbatches", "8"),
    ("estimate", "pipeline-8x32", "--set", "parallelism.pp=10000"),
    ("sweep", "pipeline-8x32", "--vary", "run.steps=1:20000", "--replicates", "100000"),
]  # fmt: skip


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: " ".join(words[:4]))
def test_what_is_too_large_is_refused_at_once(run, monkeypatch, words):
    monkeypatch.setattr(FREE, lambda: 8e9)

    def call():
        status, out, err = run(*words, "--json")
        assert (status, out) == (2, "")
        assert "GB" in err and "lower" in err

    assert least_seconds(call, 2) < 3.0


@pytest.mark.parametrize(
    ("job", "most", "call"),
    [
        ("pipeline-8x32", 1e5, {"replicates": 10_000}),
        ("llama3-70b-fsdp-512", 8e6, {"replicates": 64}),  # half is less than its 4.7 MB of buffers
    ],
)
def test_little_memory_refuses_what_much_takes(monkeypatch, job, most, call):
    prism.simulate(job, **call, seed=1)
    monkeypatch.setattr(FREE, lambda: most)
    with pytest.raises(prism.PrismError, match="lower|buffers"):
        prism.simulate(job, **call, seed=1)


LARGE = """
import resource, prism
job = prism.load_job("llama3-405b-16k")
{limit}
def stop(*_):
    raise KeyboardInterrupt
prism.simulate(job, 40_000_000, seed=1, progress=stop)
"""


def test_a_limit_of_the_process_is_what_is_free():
    """Not what the machine has: 2 GB of results do not fit a process of 3 GiB."""
    limit = "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))"
    done = subprocess.run(
        [sys.executable, "-c", LARGE.format(limit=limit)], capture_output=True, text=True
    )
    assert "PrismError" in done.stderr and "GB" in done.stderr


def test_printing_a_schedule_takes_time_in_proportion(run):
    def seconds(n):
        words = ("schedule", "1f1b", "--stages", 4, "--microbatches", n, "--json")
        return least_seconds(lambda: run(*words))

    assert run("schedule", "1f1b", "--stages", 4, "--microbatches", 10, "--json")[0] == 0
    assert seconds(4000) < 10.0 * max(seconds(1000), 0.01)  # 4.3 times; 16 if quadratic


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_schedule_of_too_many_actions_is_refused_before_it_is_made(name):
    def call():
        with pytest.raises(prism.PrismError, match="lower stages"):
            prism.make_schedule(name, 10_000, 40_000)

    assert least_seconds(call) < 1.0


def test_settings_of_a_sweep_are_counted_before_the_first_is_built(monkeypatch):
    built = []
    monkeypatch.setattr("prism.analyses.sweep.job_at", lambda *args: built.append(args))
    monkeypatch.setattr(FREE, lambda: 1e6)
    vary = {"run.steps": list(range(1, 101))}
    with pytest.raises(prism.PrismError, match="100 settings"):
        prism.sweep("pipeline-8x32", vary, replicates=64)
    assert not built


def test_a_sweep_tells_how_far_it_is_while_settings_are_built():
    told = []
    vary = {"variability.effects.residual.cv": [0.01, 0.02, 0.03, 0.04]}
    prism.sweep("pipeline-8x32", vary, replicates=64, seed=1, progress=lambda *at: told.append(at))
    shares = [done / total for done, total in told]
    assert sum(share < 0.1 for share in shares) == 4
    assert shares == sorted(shares) and shares[-1] == 1.0
