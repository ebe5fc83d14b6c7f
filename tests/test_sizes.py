"""Sizes are refused before any work, with the figure, and large jobs that fit are not."""

import importlib
import resource
import subprocess
import sys

import numpy as np
import pytest
from timing import least_seconds

from prism import PrismError, engine, load_job, make_schedule, sweep
from prism.common import sizes
from prism.simulation.prepare import prepare
from prism.simulation.program import make_keys, thread_bytes
from prism.simulation.steps import settle_call

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
    monkeypatch.setattr(sizes, "free_bytes", lambda: 8e9)

    def call():
        status, out, err = run(*words, "--json")
        assert (status, out) == (2, "")
        assert "GB" in err and "lower" in err

    assert least_seconds(call, 2) < 3.0


def test_little_memory_refuses_what_much_takes(monkeypatch):
    settle_call(10_000, 1, 1)
    monkeypatch.setattr(sizes, "free_bytes", lambda: 1e5)
    with pytest.raises(PrismError, match="lower replicates"):
        settle_call(10_000, 1, 1)


def test_buffers_of_threads_are_counted(monkeypatch):
    job = load_job("llama3-70b-fsdp-512")
    prepare(job, 1)
    monkeypatch.setattr(sizes, "free_bytes", lambda: 8e6)  # half is less than 4.7 MB
    with pytest.raises(PrismError, match="buffers"):
        prepare(job, 1)


@pytest.mark.parametrize("name", ["llama3-405b-16k", "llama3-70b-fsdp-512", "gpt3-175b-10752"])
def test_buffers_of_a_thread_are_those_that_it_makes(name):
    program = prepare(load_job(name), 1).program
    step, n = program.arrays(track=True), program.graph.n_replicas
    work = engine.new_work(step, make_keys(1), np.arange(n))
    slow = engine.draw_clusters(step.ranks, step.tables, 0, 1, make_keys(1).stream[engine.RANK])
    made = sum(x.nbytes for x in (*work, *engine.room_for_coefs(step.low, n), slow))
    assert thread_bytes(program) == pytest.approx(made, rel=0.05)


def test_the_largest_shipped_job_needs_less_than_a_gigabyte():
    job = load_job("llama3-405b-1m")
    counts = {"GPUs": (job.world_size, sizes.GPU)}
    sizes.check_size("job", counts, "dp")
    assert job.world_size * sizes.GPU.n_bytes < 1e9


def test_a_limit_of_the_process_is_what_is_free():
    text = (
        "import resource; from prism.common.sizes import free_bytes; a = free_bytes();"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); print(free_bytes())"
    )
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert 0.0 < float(found.stdout) < 1 << 30
    assert resource.RLIM_INFINITY == resource.getrlimit(resource.RLIMIT_AS)[0]


def test_printing_a_schedule_takes_time_in_proportion(run):
    def seconds(n):
        words = ("schedule", "1f1b", "--stages", 4, "--microbatches", n, "--json")
        return least_seconds(lambda: run(*words))

    assert run("schedule", "1f1b", "--stages", 4, "--microbatches", 10, "--json")[0] == 0
    assert seconds(4000) < 10.0 * max(seconds(1000), 0.01)  # 4.3 times; 16 if quadratic


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_schedule_of_too_many_actions_is_refused_before_it_is_made(name):
    def call():
        with pytest.raises(PrismError, match="lower stages"):
            make_schedule(name, 10_000, 40_000)

    assert least_seconds(call) < 1.0


def test_settings_of_a_sweep_are_counted_before_the_first_is_built(monkeypatch):
    built = []
    module = importlib.import_module("prism.analyses.sweep")
    monkeypatch.setattr(module, "job_at", lambda *args: built.append(args))
    monkeypatch.setattr(sizes, "free_bytes", lambda: 1e6)
    vary = {"run.steps": list(range(1, 101))}
    with pytest.raises(PrismError, match="100 settings"):
        sweep("pipeline-8x32", vary, replicates=64)
    assert not built


def test_a_sweep_tells_how_far_it_is_while_settings_are_built():
    told = []
    vary = {"variability.effects.residual.cv": [0.01, 0.02, 0.03, 0.04]}
    sweep("pipeline-8x32", vary, replicates=64, seed=1, progress=lambda *at: told.append(at))
    shares = [done / total for done, total in told]
    assert sum(share < 0.1 for share in shares) == 4
    assert shares == sorted(shares) and shares[-1] == 1.0
