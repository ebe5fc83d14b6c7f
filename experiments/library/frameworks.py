"""Measure the passes of eager PyTorch's ops in a profile, as prism/jobs/frameworks.py has them.

    python experiments/library/frameworks.py     # needs h100_device of the measured data; 20 s

A pass is one read or write of an op's values in bfloat16 at the rate of a copy: a kernel
whose access is slower has more. A launch takes the host what the first microbatch's passes
do over their launches: later ones wait for the full queue. Prints what the profile of a
training step says beside the record, and writes passes.csv.
"""

import gzip
import json
import os
from collections import defaultdict
from functools import cache
from itertools import groupby
from pathlib import Path

import pandas as pd
import yaml

from prism.jobs.frameworks import FRAMEWORKS

HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("PRISM_DATA", HERE.parents[2] / "shared" / "data")) / "h100_device"
STEPS, MICROBATCHES = 8, 2
SHORT = 100  # launches of a thread in a row that are no pass


def copy_rate():
    """Bytes per second that a copy of 8,192 x 16,384 numbers reads and writes."""
    rows = pd.read_parquet(DATA / "kernel_series.parquet")
    rows = rows[(rows.kind == "copy") & (rows.call % 64 != 0)]
    return 2 * 2 * 8192 * 16384 / (rows.duration_us.median() * 1e-6)


@cache
def events():
    """Complete events of the profile."""
    with gzip.open(DATA / "eager_trace.json.gz") as file:
        return [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]


def launch_us():
    """Time of the host from launch to launch in the first forward and backward [us]."""
    launches = sorted(
        (e["ts"], e["dur"], e["tid"]) for e in events()
        if e.get("cat") in ("cuda_runtime", "cuda_driver")
        and any(word in e["name"] for word in ("LaunchKernel", "Memset"))
    )  # fmt: skip
    threads = [list(own) for _, own in groupby(launches, key=lambda launch: launch[2])]
    passes = [own for own in threads if len(own) > SHORT][:2]
    return [(own[-1][0] + own[-1][1] - own[0][0]) / len(own) for own in passes]


def activities():
    """(op, shape of its first input, on the thread of backward, kernel's name, seconds)."""
    ops = {e["args"].get("External id"): e for e in events() if e.get("cat") == "cpu_op"}
    forward = next(e["tid"] for e in ops.values() if e["name"] == "aten::_fused_rms_norm")
    for event in events():
        op = ops.get(event.get("args", {}).get("External id"))
        if event.get("cat") == "kernel" and op is not None:
            shapes = op["args"].get("Input Dims") or [[]]
            shape = shapes[0][0] if shapes[0] and isinstance(shapes[0][0], list) else shapes[0]
            backward = op["tid"] != forward
            yield op["name"][6:], tuple(shape), backward, event["name"], event["dur"] * 1e-6


def kind_of(op, shape, backward, name, model):
    """Kind of op that a kernel belongs to; empty: a product, or what is no layer's."""
    head = model["hidden_size"] // model["n_heads"]
    if op == "mm":
        return ""
    if "rms_norm" in op:
        return "norm"
    if "attention" in op:
        return "helpers" if "cudnn::fusion" in name else "attention"
    if "embedding" in op:
        return "embedding"
    if "softmax" in op or "nll" in op:
        return "loss"
    if model["vocab_size"] in shape:
        return "logits" if len(shape) < 3 or shape[-1] == model["vocab_size"] else ""
    if len(shape) == 3 and shape[-1] == model["ffn_size"]:
        return "swiglu"
    if len(shape) == 3 and shape[-1] == model["hidden_size"]:
        return "residual"
    if len(shape) == 5 and shape[-1] == head:
        return "repeat"
    if len(shape) == 4 and shape[1] == model["seq_len"] and shape[-1] == head:
        return "layout"
    if len(shape) >= 4 and shape[-1] in (1, head // 2, head):
        return "rope"
    return ""


def main():
    job = yaml.safe_load((DATA / "job.yaml").read_text())
    model, rate = job["model"], copy_rate()
    tokens = model["seq_len"] * job["parallelism"]["microbatch_size"]
    head = model["hidden_size"] // model["n_heads"]
    query, key = model["hidden_size"], model["n_kv_heads"] * head
    layers, seconds = model["n_layers"], defaultdict(float)
    for op, shape, backward, name, duration in activities():
        seconds[kind_of(op, shape, backward, name, model), backward] += duration
    # width of an op's values, and how many of it a layer has: forward and backward
    widths = {
        "swiglu": (model["ffn_size"], 1, 1), "rope": (query + key, 1, 1),
        "repeat": (2 * query, 1, 1), "layout": (query + 2 * key, 1, 1), "norm": (query, 2, 2),
        "residual": (query, 2, 5), "helpers": (query, 1, 1),
    }  # fmt: skip
    rows, record = [], FRAMEWORKS["eager"].passes
    passes_per_step = STEPS * MICROBATCHES
    for kind, (width, *counts) in widths.items():
        for backward, count in zip((False, True), counts, strict=True):
            each = seconds[kind, backward] / passes_per_step / layers / count
            own = record.get(kind)
            rows.append({
                "kind": kind, "pass": ("forward", "backward")[backward], "us": each * 1e6,
                "passes": each * rate / (2.0 * tokens * width),
                "record": own[backward] if own else float("nan"),
            })  # fmt: skip
    eager = FRAMEWORKS["eager"]
    for kind, width, own in (
        ("loss", model["vocab_size"], eager.loss_bytes),
        ("logits", model["vocab_size"], eager.cast_bytes),
        ("embedding", query, eager.embedding_bytes),
    ):
        for backward in (False, True):
            each = seconds[kind, backward] / passes_per_step
            rows.append({
                "kind": f"{kind}, bytes a value", "pass": ("forward", "backward")[backward],
                "us": each * 1e6, "passes": each * rate / (tokens * width), "record": own[backward],
            })  # fmt: skip
    for name, each, own in zip(("forward", "backward"), launch_us(), eager.launch_s, strict=True):
        rows.append({"kind": "host, a launch", "pass": name, "us": each, "passes": each,
                     "record": own * 1e6})  # fmt: skip
    table = pd.DataFrame(rows)
    print(f"copy: {rate * 1e-12:.2f} TB/s")
    print(table.round(2).to_string(index=False))
    table.to_csv(HERE / "passes.csv", index=False, float_format="%.5g")


if __name__ == "__main__":
    main()
