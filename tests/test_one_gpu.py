"""One GPU predicted as measured: a job of the project's own, and 18 steps of Llama 3.2 1B."""

import csv
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from drawn_steps import draw_steps

import prism

DATA = Path(os.environ.get("PRISM_DATA", Path(__file__).parents[2] / "shared" / "data"))
OURS, LLAMA = DATA / "h100_device", DATA / "attention_training" / "llama32_1b_h200_steps.csv"
with_ours = pytest.mark.skipif(not OURS.is_dir(), reason=f"no {OURS}")
BF16 = {"gradient_dtype": "bf16", "optimizer_dtype": "bf16"}
MOVED = ("elementwise", "norm", "loss", "embedding")
# step [s], products, attention, what moves bytes, optimizer [ms], idle, peak memory [GiB]
MEASURED = {
    "eager": (0.2704, 140.4, 33.8, 84.4, 7.2, 0.017, 24.04),
    "compiled": (0.2278, 147.7, 35.8, 33.5, 7.5, 0.015, 19.73),
}


@cache
def ours(framework):
    job = prism.load_job(OURS / "job.yaml")
    return job.replace({"parallelism": BF16 | {"framework": framework, "attention": "cudnn"}})


def ideal(job):
    return float(draw_steps(job, 64, 1).ideal_step_time)


@with_ours
@pytest.mark.parametrize("framework", MEASURED)
def test_our_job_on_an_h100_by_class(framework):
    step, gemm, attention, moved, optimizer, idle, _ = MEASURED[framework]
    # any profile: of a job's classes only what is predicted is read
    found = prism.summary(prism.compare(OURS / "eager_trace.json.gz", ours(framework)))
    seconds = {row["name"]: row["predicted"] for row in found["classes"]}
    period = found["period"]["predicted"]
    assert period == pytest.approx(step, rel=0.05)
    assert period == pytest.approx(ideal(ours(framework)), rel=1e-6)
    assert sum(seconds.values()) == pytest.approx(period)
    of = (seconds["gemm"], seconds["attention"], sum(map(seconds.get, MOVED)), seconds["optimizer"])
    assert [1e3 * x for x in of] == pytest.approx([gemm, attention, moved, optimizer], rel=0.1)
    assert seconds["idle"] / period == pytest.approx(idle, abs=0.01)


@with_ours
@pytest.mark.parametrize("framework", MEASURED)
def test_our_jobs_peak_memory(framework):
    peak = prism.memory(ours(framework))["allocated_gib"]
    assert peak == pytest.approx(MEASURED[framework][-1], rel=0.05)


def llama(row):
    """Everything in bfloat16, plain SGD, at a locked clock; Hugging Face's modules."""
    backend = {"flash": "fa2"}.get(row["backend"], row["backend"])
    layout = BF16 | {"framework": "transformers", "optimizer": "sgd", "attention": backend,
                     "microbatch_size": int(row["batch_size"])}  # fmt: skip
    sizes = {"n_layers": 16, "hidden_size": 2048, "ffn_size": 8192, "n_heads": 32, "n_kv_heads": 8,
             "vocab_size": 128_256, "tied_embeddings": True,
             "seq_len": int(row["seq_len"])}  # fmt: skip
    machine = {"device": row["device"], "nodes": 1, "gpus_per_node": 1,
               "clock_mhz": float(row["clock_mhz"])}  # fmt: skip
    return prism.load_job({"model": sizes, "parallelism": layout, "cluster": machine})


@pytest.mark.skipif(not LLAMA.is_file(), reason=f"no {LLAMA}")
@pytest.mark.parametrize("backend", ["cudnn", "efficient", "flash"])
def test_steps_of_llama_on_an_h200_by_attentions_backend(backend):
    lines = LLAMA.read_text().splitlines()
    rows = [row for row in csv.DictReader(lines) if row["backend"] == backend]
    errors = np.log([ideal(llama(row)) / float(row["step_s"]) for row in rows])
    assert len(errors) == 6
    assert abs(errors.mean()) < np.log(1.06) and errors.std(ddof=1) < 0.06
