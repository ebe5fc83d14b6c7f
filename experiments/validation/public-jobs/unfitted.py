"""How wrong predictions are for classes of jobs that nothing was fitted to; write unfitted.csv.

    python experiments/validation/public-jobs/unfitted.py  # after fit.py; 1 min of processor time

A class is a device and a framework, with experts or without. Predicted over measured for

* each class of `jobs.yaml` with products and attention at the speed of their tables; what all
  classes share (cost beside compute, host) stays fitted to it as well;
* one H100 with eager and compiled PyTorch, without sharding (h100_device of the measured data);
* nanotron with ddp and ZeRO-1 on 32 and 64 H100 (layout_sweep), its speed fitted to 8;
* MI300X, products and causal attention of a layer of seven models (kernel_tables).

The spread of a job's class that nobody measured is the root mean square over these classes, each
counting once: `experiments/library/build.py` takes it from unfitted.csv.
"""

import sys
import tempfile
from pathlib import Path

import fit
import numpy as np
import pandas as pd
import run

import prism
from prism.distributions.library import load_library
from prism.workload.build import build_workload

HEADS = {"Llama-2-7B": (32, 32, 4096), "Llama-2-70B": (64, 8, 4096), "Mistral-7B": (32, 8, 4096),
         "Llama-3.1-8B": (32, 8, 8192), "Llama-3.1-405B": (128, 8, 8192),
         "Qwen2.5-7B": (28, 4, 8192), "Qwen2.5-72B": (64, 8, 8192)}  # fmt: skip
"""Heads, key heads and sequence of the models whose kernels were measured on MI300X."""


def published_classes(folder):
    """Give (class, logarithms of predicted over published) as if nothing were fitted to it.

    Products and attention at the speed of their tables; what all share (the cost beside compute,
    the host of experts) stays.
    """
    over = {}
    for row in run.read(run.HERE / "results.csv"):
        over[row["job"], row["precision"], row["gpus"]] = row["mean_s"] / row["ideal_s"]
    groups = dict.fromkeys(
        (*entry.group.split(" ")[:2], " moe" in entry.group) for entry in run.published()
    )
    for device, framework, experts in groups:
        if framework == "own":
            continue
        entries = [entry for entry in run.published()
                   if entry.group.split(" ")[:2] == [device, framework]
                   and (" moe" in entry.group) is experts]  # fmt: skip
        library = fit._library(folder, device, {"derate": 1.0, "fp8_backward": 1.0})
        rows = run.ideal_steps(entries, (f"variability.library={library}",))
        logs = [
            np.log(row["ideal_s"] / row["measured_s"]
                   * over.get((row["job"], row["precision"], row["gpus"]), 1.0))
            for row in rows
        ]  # fmt: skip
        if logs:
            yield f"{device} {framework}{' experts' * experts}", logs


def one_gpu():
    """Give the same of one H100."""
    steps = pd.read_csv(fit.DATA / "h100_device" / "steps.csv")
    for mode, own in steps.groupby("mode"):
        job = prism.load_job(fit.DATA / "h100_device" / "job.yaml", [
            f"parallelism.framework={mode}", "parallelism.attention=cudnn",
            "parallelism.gradient_dtype=bf16", "parallelism.optimizer_dtype=bf16",
        ])  # fmt: skip
        yield (
            f"h100 {mode}, one GPU, no sharding",
            [np.log(run.ideal(job)["ideal_s"] / own.step_s.mean())],
        )


def nanotron():
    """Give the same of nanotron on 4 and 8 nodes: its speed is fitted to one."""
    rows = run.ideal_steps(run.nanotron(fit.DATA, (4, 8)))
    yield "h100 nanotron, 4 and 8 nodes", np.log([r["ideal_s"] / r["measured_s"] for r in rows])


def mi300x():
    """Give the same of a layer's products and attention on MI300X."""
    folder = fit.DATA / "kernel_tables"
    gemm, attention = (pd.read_csv(folder / f"mi300x_{kind}_fwd_bwd.csv").query("run == 1")
                       for kind in ("gemm", "attention"))  # fmt: skip
    gemm, attention = gemm.query("dtype == 'bf16' and mbs == 1"), attention[attention.causal]
    library, logs = load_library("mi300x-healthy"), []
    for name, (heads, kv, seq) in HEADS.items():
        own = gemm[gemm.model == name]
        hidden, ffn = int(own.k.min()), int(own.k.max())
        sizes = {"batch": 1, "heads": heads, "kv_heads": kv, "seq": seq}
        kernels = attention[(attention[list(sizes)] == pd.Series(sizes)).all(axis=1)]
        assert (len(own), len(kernels)) == (4, 1)
        seconds = 1e-3 * sum(rows[["fwd_ms", "bwd_ms"]].sum().sum() for rows in (own, kernels))
        job = prism.load_job({
            "model": {"n_layers": 1, "hidden_size": hidden, "ffn_size": ffn,
                      "n_heads": heads, "n_kv_heads": kv, "vocab_size": 32000, "seq_len": seq},
            "parallelism": {"microbatches": 1},
            "cluster": {"nodes": 1, "gpus_per_node": 1, "device": "mi300x"},
        })  # fmt: skip
        chunk = build_workload(job, library).chunks[0][0]
        predicted = sum(
            k.duration
            for k in (*chunk.forward, *chunk.backward)
            if k.kernel_class in ("gemm_attention", "gemm_mlp", "attention")
        )
        logs.append(np.log(predicted / seconds))
    yield "mi300x megatron, products and attention", logs


def main():
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for found in (published_classes(Path(folder)), one_gpu(), nanotron(), mi300x()):
            for name, logs in found:
                print(f"{name}: {len(logs)}, {np.exp(np.mean(logs)):.3f} +- {np.std(logs):.3f}")
                rows.append({"job": name, "n": len(logs), "mean": float(np.mean(logs)),
                             "sd": float(np.std(logs))})  # fmt: skip
    run.write(run.HERE / "unfitted.csv", rows)
    squares = [row["mean"] ** 2 + row["sd"] ** 2 for row in rows]
    print(f"{len(rows)} classes: rms of the logarithm {np.sqrt(np.mean(squares)):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
