"""The estimate of `prism.workload.memory` against published peaks and against layouts that ran.

``python experiments/studies/layouts/memory.py``, half a minute, prints the README's tables.
Sources:

* torchtitan, ``benchmarks/llama3_h100_202412_torchtitan.md``, tables 1 to 6: what the allocator had
  reserved, with torch.compile; selective recomputation by op in tables 1 and 3, full in the others.
* bigscience-workshop/bigscience, ``train/tr11-176B-ml/chronicles-prequel.md``: nvidia-smi during
  runs of Megatron-DeepSpeed (public_jobs/bigscience_throughput.csv of the measured data, in the
  folder PRISM_DATA or in ../shared/data beside the checkout). Full recomputation, no sequence
  parallelism; gradients in float16, from the section on rebalancing on in float32.
* InternLM/InternEvo, ``doc/en/train_performance.md``, "GPU Memory Usage Test" (public_jobs).
* Layouts that ran: ``experiments/validation/public-jobs/jobs.yaml``.
"""

import csv
import os
import re
import sys
from pathlib import Path

import numpy as np

from prism.common.errors import PrismError
from prism.jobs.job import load_job
from prism.workload.memory import NORMAL_95, SPREAD, memory_figures

HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("PRISM_DATA", HERE.parents[3] / "shared" / "data")) / "public_jobs"
CLOSE = 0.15
STATE = ("parameters", "gradients", "optimizer", "gathered")

# ------------------------------------------------------------------------------- published peaks
TITAN = {"schedule": "1f1b", "vpp": 1, "microbatch_size": 1, "recompute": "full",
         "layer_split": "auto", "framework": "compiled-2024"}  # fmt: skip
ONE = {**TITAN, "pp": 1, "microbatches": 1, "reshard_after_forward": "true"}
# eight microbatches, one per stage, is what torchtitan took where no number was given
FOUR = {**TITAN, "tp": 8, "pp": 8, "microbatches": 8}
SELECTIVE = {**ONE, "tp": 1, "microbatch_size": 2, "recompute": "selective"}
TITAN_ROWS = [
    ("8B, fsdp 8, batch 2, selective", "llama3-8b", {**SELECTIVE, "dp": 8}, 1, 8192, 77.0),
    ("8B, fsdp 128, batch 2, selective", "llama3-8b", {**SELECTIVE, "dp": 128}, 16, 8192, 62.0),
    *(
        (f"8B, fsdp 8, cp {cp}, {32 * cp}k", "llama3-8b",
         {**ONE, "tp": 1, "dp": 8 // cp, "cp": cp}, 1, 32768 * cp, gib)
        for cp, gib in ((1, 83.9), (2, 84.2), (4, 84.0), (8, 84.5))
    ),
    ("70B, fsdp 32, tp 8, batch 16", "llama3-70b",
     {**ONE, "tp": 8, "dp": 32, "microbatch_size": 16}, 32, 8192, 71.9),
    ("405B, fsdp 8, tp 8, pp 8", "llama3-405b",
     {**FOUR, "dp": 8, "microbatch_size": 4}, 64, 8192, 82.5),
    ("405B, the same, interleaved", "llama3-405b",
     {**FOUR, "dp": 8, "microbatch_size": 4, "vpp": 2, "schedule": "interleaved"}, 64, 8192, 72.7),
    *(
        (f"405B, tp 8, pp 8, cp {cp}, {32 * cp}k", "llama3-405b",
         {**FOUR, "dp": 8 // cp, "cp": cp}, 64, 32768 * cp, gib)
        for cp, gib in ((1, 75.3), (2, 75.9), (4, 77.1), (8, 84.9))
    ),
]  # fmt: skip
# layers and hidden size by the size that bigscience gives, from the heads of its tables
GPT = {"20B": (8, 14400), "176B": (70, 14336), "177B": (96, 12288), "178B": (82, 13312),
       "181B": (72, 14336), "182B": (78, 13824), "184B": (100, 12288), "187B": (80, 13824),
       "195B": (106, 12288), "196B": (84, 13824), "200B": (80, 14400), "203B": (94, 13312),
       "206B": (82, 14336)}  # fmt: skip
UNSTATED = "Choosing the fastest 3D Topology"  # whose layers the source does not give
INTERN = {"7B": (32, 4096, 11008, 32), "20B": (60, 5120, 13824, 40)}


def titan_peaks():
    """Give (label, job, GiB) of torchtitan's runs."""
    for label, name, keys, nodes, seq_len, gib in TITAN_ROWS:
        given = [f"parallelism.{key}={value}" for key, value in keys.items()]
        given += [f"model.name={name}", f"model.seq_len={seq_len}", f"cluster.nodes={nodes}"]
        yield label, load_job("llama3-405b-16k", given), gib


def bigscience_peaks():
    """Give the same of bigscience's, infinite where memory ran out."""
    seen = set()
    with open(DATA / "bigscience_throughput.csv", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found = re.fullmatch(r"(\d+)GB|OOM", row["Mem"])
            if not found or row["section"] == UNSTATED or not (row["Size"] in GPT or row["Layers"]):
                continue
            layers, hidden = GPT.get(row["Size"]) or (int(row["Layers"]), 14336)
            tp, pp, dp, mbs = (int(float(row[key] or 1)) for key in ("TP", "PP", "DP", "MBS"))
            late = row["section"].startswith("Rebalancing")
            zero = "ddp" if row["ZS"] in ("0", "0.0") else "zero1"
            key = row["Size"], layers, tp, pp, dp, mbs, late, zero, row["Mem"]
            if key in seen:
                continue
            seen.add(key)
            parallelism = {
                "tp": tp, "pp": pp, "dp": dp, "microbatch_size": mbs, "data_parallel": zero,
                "microbatches": max(1, int(float(row["GBS"] or 2048)) // (dp * mbs)),
                "recompute": "full", "sequence_parallel": False, "framework": "megatron-2022",
                "gradient_dtype": "fp32" if late else "bf16", "layer_split": _split(layers, pp),
            }  # fmt: skip
            model = {"n_layers": layers, "hidden_size": hidden, "ffn_size": 4 * hidden,
                     "n_heads": 64, "vocab_size": 250880, "seq_len": 2048, "gated_mlp": False,
                     "tied_embeddings": True}  # fmt: skip
            label = f"{row['Size']}, dp {dp}, tp {tp}, pp {pp}, batch {mbs}"
            label += ", float32 gradients" if late else ", no ZeRO" if zero == "ddp" else ""
            yield label, _job(model, parallelism), float(found[1] or "inf")


def intern_peaks():
    """Give the same of InternEvo's."""
    text = (DATA / "InternLM__InternEvo__train_performance.md").read_text(encoding="utf-8")
    pattern = r"\| (7B|20B) \| (\d+) \| -1 \| (\d+) \| (\d+) \|\s*(True|False)\s*\| (\d+) \|"
    for size, gpus, tp, pp, fsdp, gb in re.findall(pattern, text):
        layers, hidden, ffn, heads = INTERN[size]
        dp = int(gpus) // (int(tp) * int(pp))
        parallelism = {
            "tp": int(tp), "pp": int(pp), "dp": dp, "microbatches": 4, "recompute": "full",
            "data_parallel": "fsdp" if fsdp == "True" else "zero1" if dp > 1 else "none",
            "sequence_parallel": False, "gradient_dtype": "bf16", "framework": "megatron-2022",
            "fused_loss": False,
            "layer_split": _split(layers, int(pp)),
        }  # fmt: skip
        model = {"n_layers": layers, "hidden_size": hidden, "ffn_size": ffn, "n_heads": heads,
                 "vocab_size": 103168, "seq_len": 2048}  # fmt: skip
        label = f"{size}, tp {tp}, pp {pp}, dp {dp}{', fsdp' if fsdp == 'True' else ''}"
        yield label, _job(model, parallelism), float(gb)


def _split(layers, pp):
    """Split layers evenly, with or without the two ends, else with the rest on the last stage."""
    if pp == 1 or layers % pp == 0 or (layers + 2) % pp == 0:
        return "auto"
    most = -(-layers // pp)
    split = [most] * (layers // most) + [layers % most] * (layers % most > 0)
    return (
        split if len(split) == pp else [layers // pp + (i >= pp - layers % pp) for i in range(pp)]
    )


def _job(model, parallelism):
    """Make a job of A100s."""
    gpus = int(np.prod([parallelism[key] for key in ("tp", "pp", "dp")]))
    cluster = {"nodes": max(1, gpus // 8), "gpus_per_node": min(8, gpus), "device": "a100"}
    return load_job({"model": model, "parallelism": parallelism, "cluster": cluster})


# --------------------------------------------------------------------------- layouts that ran
def layouts():
    """Give (row, name, job) of every published layout; the reason where there is no job."""
    sys.path.insert(0, str(HERE.parents[1] / "validation" / "public-jobs"))
    from run import job_of, published

    for entry in {e.key: e for e in published()}.values():
        row, name = entry.row, f"{entry.row['name']}, {entry.precision}"
        try:
            job = job_of(entry)
        except PrismError as error:
            yield row, name, str(error)
            continue
        if "A100 40 GB" in name:
            job = job.replace("cluster.memory_gib=39.5")
        elif row["source"].startswith("torchtitan") and job.cluster.device == "h100":
            job = job.replace("cluster.memory_gib=95")  # HBM2e of 96 GB
        yield row, f"{name}, {entry.gpus:,} GPUs", job


def offloads(row):
    """Whether the source's recipe offloads activations, which a job cannot say."""
    return "stay on the GPU" in row.get("assumed", "")


def print_peaks():
    """Print published peaks, and the error by source."""
    print("| source | job | published | estimate | of which, per GPU |\n|---|---|---|---|---|")
    errors = {}
    sources = {"torchtitan": titan_peaks, "bigscience": bigscience_peaks, "InternEvo": intern_peaks}
    for source, peaks in sources.items():
        for label, job, gib in peaks():
            memory = memory_figures(job)
            parts, found = memory["parts"], memory["gib"]
            state = sum(parts[name] for name in STATE)
            kept = memory["allocated_gib"] - state - parts["workspace"]
            shown = (("state", state), ("activations", kept), ("workspace", parts["workspace"]),
                     ("fragmentation", parts["fragmentation"]))  # fmt: skip
            held = ", ".join(f"{part} {n:.0f}" for part, n in shown if round(n))
            error = f" ({found / gib - 1:+.0%})" if np.isfinite(gib) else ""
            peak = f"{gib:g}" if np.isfinite(gib) else "ran out"
            print(f"| {source} | {label} | {peak} | {found:.1f}{error} | {held} |")
            kind = source + (", float32 gradients" if "float32" in label else "")
            if np.isfinite(gib):
                errors.setdefault(kind, []).append(np.log(found / gib))
    print("\n| source | n | mean error | rms of logarithm | within 15 % |\n|---|---|---|---|---|")
    errors["torchtitan and bigscience"] = errors["torchtitan"] + errors.get("bigscience", [])
    for kind, each in errors.items():
        each = np.array(each)
        close = np.sum(np.abs(np.expm1(each)) <= CLOSE)
        print(f"| {kind} | {each.size} | {np.expm1(each.mean()):+.1%} | "
              f"{np.sqrt(np.mean(each**2)):.3f} | {close} |")  # fmt: skip


def print_layouts():
    """Print how full published layouts are, by source, and those beyond the limit."""
    sources, full = {}, []
    for row, name, job in layouts():
        source = row["source"]
        memory = None if isinstance(job, str) else memory_figures(job)
        share = None if memory is None else memory["gib"] / memory["limit_gib"]
        sources.setdefault(source, []).append(share)
        if share is not None and share > 1.0:
            which = f"{source}: {name}{', offloads' if offloads(row) else ''}"
            full.append((share, which, memory))
    print("\n| source | layouts | no job | fullest | above the limit | P(fits) below 5 % |")
    print("|---|---|---|---|---|---|")
    for source, shares in sources.items():
        known = [share for share in shares if share is not None]
        above = [sum(np.log(share) > z for share in known) for z in (0.0, NORMAL_95 * SPREAD)]
        most = f"{max(known):.2f}" if known else ""
        print(f"| {source} | {len(shares)} | {len(shares) - len(known)} | {most} | {above[0]} | "
              f"{above[1]} |")  # fmt: skip
    print("\n| published layout | estimate | limit | P(fits) |\n|---|---|---|---|")
    for _, which, memory in sorted(full, key=lambda x: -x[0]):
        print(f"| {which} | {memory['gib']:.0f} | {memory['limit_gib']:.0f} | "
              f"{memory['p_fits']:.2f} |")  # fmt: skip


if __name__ == "__main__":
    if not DATA.is_dir():
        sys.exit(f"no published peaks in {DATA}; set PRISM_DATA to the folder above it")
    print_peaks()
    print_layouts()
