"""Public configurations, imported and predicted, beside what was published where it was.

    python experiments/validation/public-configs/run.py [-k NAME]  # 40 s: results.csv, models.csv

`models.jsonl` has the settings of models' config.json that concern sizes, each with its address,
the published parameters, and those of parts beside the language model that are among them.
`SOURCES` says for each file what the import cannot know: GPUs, device, what the program decides.
`PUBLISHED` has seconds per step.
"""

import argparse
import csv
import json
import tempfile
from pathlib import Path

import prism
from prism.common.errors import PrismError
from prism.jobs.importing.imported import import_job
from prism.workload.modelsize import count_parameters

HERE = Path(__file__).resolve().parent
REPLICATES, SEED = 64, 1
NETWORK = "cluster.links.network.bandwidth_gbytes_per_s=6.25"  # Omni-Path of Jean Zay
SOURCES = {
    "megatron-gpt3-175b.sh": (1024, "a100", ()),
    "megatron-llama3-8b-h100-fp8.sh": (None, None, ()),
    "bigscience-bloom-176b.slurm": (None, None, (NETWORK,)),
    "llm-jp-13b-a100.sh": (None, None, ()),
    "slime-qwen3-30b-a3b.sh": (64, "h100", ("model.seq_len=4096", "parallelism.ep=8",
                                            "parallelism.global_batch=512")),
    "neox-gpt-neox-20b.yml": (96, "a100", ()),
    "pythia-12b.yml": (256, "a100", ()),
    "pythia-6.9b.yml": (128, "a100", ()),
    "primus-llama3.1-70b.yaml": (8, "mi300x", ()),
    "nemo-gpt3-5b.yaml": (None, "a100", ()),
    "nemo-gpt3-175b.yaml": (None, "a100", ()),
    "nemo-llama3.1-70b.yaml": (None, "h100", ()),
    "bridge-deepseek-v3-h100.yaml": (1024, None, ("parallelism.global_batch=8192",)),
    "torchtitan-llama3-8b.toml": (64, "a100", ()),
    "torchtitan-llama3-70b.toml": (64, "a100", ()),
    "torchtitan-llama3-405b.toml": (128, "h100", ()),
    "torchtitan-deepseek-v3-671b.toml": (512, "h100", ()),
    "deepspeed-llama-70b.json": (None, "a100", ("model.name=llama2-70b",)),
    "huggingface-mixtral-8x7b.json": (64, "h100", ("model.seq_len=4096",)),
    "huggingface-llama3.2-1b.json": (8, "h100", ()),
}  # fmt: skip
"""By file: GPUs and device where it does not say them, and settings that the program has."""
PUBLISHED = {
    # 150 TFLOP/s per GPU (bigscience.notion.site, "BigScience 176B Model"), by equation 3 of
    # arXiv:2104.04473, which counts recomputation
    "bigscience-bloom-176b.slurm": 104.5,
    # NVIDIA-NeMo/Megatron-Bridge (Apache-2.0), docs/performance-summary-archive.md, 25.09, FP8-SC
    "bridge-deepseek-v3-h100.yaml": 25.877,
    # NVIDIA/dgxc-benchmarking (MIT), release 25.05, same layout but 5 chunks a stage
    "nemo-llama3.1-70b.yaml": 14.65,
}
"""Seconds per step as published, for the same layout."""


def predict(name):
    """Give a row: the job, what was understood, the step [s]."""
    gpus, device, overrides = SOURCES[name]
    found = import_job(HERE / "configs" / name, None, gpus, device, overrides)
    job = found.job
    row = {"file": name, "format": found.source.format, "gpus": job.world_size,
           "model": job.model.name or f"{job.model.n_layers} x {job.model.hidden_size}",
           "understood": len(found.given), "assumed": len(found.assumed),
           "not_modelled": len(found.unmodelled), "not_understood": len(found.unknown)}  # fmt: skip
    result = prism.estimate(job, replicates=REPLICATES, seed=SEED)
    steps = result["step_time"].to_numpy()
    row["p50_s"] = float(sorted(steps.ravel())[steps.size // 2])
    row["published_s"] = PUBLISHED.get(name, "")
    row["ratio"] = row["p50_s"] / PUBLISHED[name] if name in PUBLISHED else ""
    return row


def count_models():
    """Give a row for each model: parameters as imported and as published, or why it is refused."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        for line in (HERE / "models.jsonl").read_text(encoding="utf-8").splitlines():
            model = json.loads(line)
            path.write_text(json.dumps(model["config"]), encoding="utf-8")
            row = dict.fromkeys(("model", "published", "beside", "total", "error", "active",
                                 "active_published", "not_modelled", "refused"), "")  # fmt: skip
            row |= {"model": model["name"], "published": f"{model['published']:.0f}"}
            beside = sum(model.get("beside", {}).values())
            row["beside"] = f"{beside:.0f}" if beside else ""
            row["active_published"] = f"{model['active']:.3g}" if "active" in model else ""
            try:
                job = (found := import_job(path, None, 8, "h100")).job
            except PrismError as error:
                row["refused"] = str(error).partition(": ")[2].partition(";")[0]
                yield row
                continue
            total, active = (count_parameters(job.model, active=on) for on in (False, True))
            row |= {
                "total": f"{total:.0f}", "active": f"{active:.4g}",
                "error": f"{total / (model['published'] - beside) - 1:+.4f}",
                "not_modelled": " ".join(s.path[-1] for s, _ in found.unmodelled),
            }  # fmt: skip
            yield row


def write(name, rows):
    """Write a table."""
    with (HERE / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-k", default="", metavar="NAME")
    chosen = parser.parse_args().k
    rows = []
    for name in SOURCES:
        if chosen in name:
            try:
                rows.append(predict(name))
            except PrismError as error:
                print(f"{name}: {error}")
                continue
            print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}"
                           for k, v in rows[-1].items()), flush=True)  # fmt: skip
    if not chosen:
        write("results.csv", rows)
        models = list(count_models())
        write("models.csv", models)
        right = sum(row["error"] != "" and abs(float(row["error"])) < 0.01 for row in models)
        refused = sum(row["refused"] != "" for row in models)
        print(f"{len(models)} models: {right} within 1 % of the published count, {refused} refused")


if __name__ == "__main__":
    main()
