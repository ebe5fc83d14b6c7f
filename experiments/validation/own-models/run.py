"""Steps of DLRM-DCNv2 and FLUX.1 from tables of ops, beside those in logs of MLPerf submissions.

    python experiments/validation/own-models/run.py  # 30 s of processor time; writes results.csv

Nothing is fitted: the shipped jobs at a submission's GPUs and batch. `measured.csv` has steps by
the logs of mlcommons/training_results_v3.0 to v5.1; evaluations are not in them. DLRM also with the
sharding that the log of 8 H100 prints.
"""

from pathlib import Path

import pandas as pd

import prism

HERE = Path(__file__).parent
PRECISIONS = ("bf16", "fp8")  # of FLUX: neither logs nor the stored configurations say which
HALVED = 21  # the table of which GPUs 0 and 1 have half of the rows each; 20 is on all GPUs
PLAN = ((), (), (19,), (22, 2), (14, 1), (11, 0), (9, 23), (4, 10))
"""HugeCTR's whole tables on each of 8 GPUs; of small ones each GPU has a copy."""


def sharded(tables: list[dict[str, object]]) -> list[dict[str, object]]:
    """Lay tables as HugeCTR does: copies read what their own GPU's samples need, as rows do."""
    rank_of = {table: rank for rank, own in enumerate(PLAN) for table in own}
    out: list[dict[str, object]] = []
    for i, table in enumerate(tables):
        if i == HALVED:
            rows, lookups = int(str(table["rows"])), float(str(table["lookups"]))
            half = {"rows": rows // 2, "lookups": lookups / 2.0}
            out += [half | {"rank": rank, "shard": "table"} for rank in (0, 1)]
        elif i in rank_of:
            out.append(table | {"rank": rank_of[i], "shard": "table"})
        else:
            out.append(table | {"shard": "row"})
    return out


def job_of(case: str, device: str, gpus: int, batch: int) -> prism.Job:
    """Give the shipped job at other sizes."""
    keys = {
        "parallelism.dp": gpus, "parallelism.microbatch_size": batch // gpus,
        "cluster.device": device, "variability.library": f"{device}-healthy",
    }  # fmt: skip
    if case == "dlrm":
        keys |= {"parallelism.ep": gpus, "cluster.nodes": gpus // 8}
        return prism.load_job("dlrm-dcnv2-h100-8").replace(keys)
    # NeMo's layers are Megatron Core's; a step is a CUDA graph; without recomputation it fits
    keys |= {"cluster.nodes": gpus // 4, "cluster.gpus_per_node": 4,
             "parallelism.framework": "megatron", "parallelism.recompute": "none",
             "variability.host_scale": 1e-6}  # fmt: skip
    return prism.load_job("flux1-b200-64").replace(keys)


def predicted(job: prism.Job) -> float:
    """Median step [s]."""
    found = prism.summary(prism.estimate(job, replicates=512, seed=1))
    return float(found["step_time"]["p50"])


def main() -> None:
    """Predict each measured step."""
    rows = []
    for m in pd.read_csv(HERE / "measured.csv").to_dict("records"):
        job = job_of(m["case"], m["device"], m["gpus"], m["global_batch"])
        if m["case"] == "flux":
            kinds = {p: job.replace({"parallelism.precision": p}) for p in PRECISIONS}
        else:
            kinds = {"even tables": job}
            if m["gpus"] == 8 and m["device"] == "h100":
                layers = job.model_dump()["model"]["layers"]
                bag = layers[0]["ops"][0]
                bag = {**bag, "tables": sharded(list(bag["tables"]))}
                first = {**layers[0], "ops": [bag, *layers[0]["ops"][1:]]}
                kinds["HugeCTR's sharding"] = job.replace({"model.layers": [first, *layers[1:]]})
        for kind, made in kinds.items():
            step = predicted(made)
            rows.append({
                "case": m["case"], "device": m["device"], "gpus": m["gpus"], "as": kind,
                "measured_ms": round(1e3 * m["measured_s"], 4),
                "predicted_ms": round(1e3 * step, 4),
                "error_percent": round(100.0 * (step / m["measured_s"] - 1.0), 1),
            })  # fmt: skip
    found = pd.DataFrame(rows)
    found.to_csv(HERE / "results.csv", index=False)
    print(found.to_string(index=False))


if __name__ == "__main__":
    main()
