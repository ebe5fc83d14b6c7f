"""Fifty small jobs of every kind, for the twin."""

from __future__ import annotations

from typing import Any

from prism import Job, load_job

DENSE = {
    "n_layers": 8, "hidden_size": 1024, "ffn_size": 2816, "n_heads": 8, "vocab_size": 8000,
    "seq_len": 1024,
}  # fmt: skip
LARGE = DENSE | {"vocab_size": 160_000}  # whose tables are several buckets
EXPERTS = DENSE | {"n_experts": 8, "experts_per_token": 2, "expert_ffn_size": 512}
PIPELINE = {"pp": 4, "microbatches": 8}
GRID = {"dp": 2, "tp": 2, "pp": 2, "microbatches": 4}
QUIET = {
    "rank": {"cv": 0.0}, "step": {"cv": 0.0}, "jitter": {"mean_s": 0.0}, "call": {"cv": 0.0},
    "regime": {"probability": 0.0}, "stall": {"rate_per_hour": 0.0}, "microbatch": {"cv": 0.0},
}  # fmt: skip
"""Nothing but the kernels' own noise."""
CONGESTED = {"regime": {"probability": 0.1, "factor": 3.0}}
SMALL_NODES = {"gpus_per_node": 4, "leaf_nodes": 1}


def make_job(
    layout: dict[str, Any], *, model: dict[str, Any] = DENSE, cluster: dict[str, Any] | None = None,
    effects: dict[str, Any] | None = None, library: str = "h100-healthy", **variability: Any,
) -> Job:  # fmt: skip
    """A job on as many nodes as its layout fills."""
    world = 1
    for size in ("tp", "cp", "pp", "dp"):
        world *= layout.get(size, 1)
    machine = {"gpus_per_node": min(8, world), **(cluster or {})}
    machine.setdefault("nodes", world // machine["gpus_per_node"])
    spread = {"library": library, "effects": effects or {}, **variability}
    return load_job(
        {"model": model, "parallelism": layout, "cluster": machine, "variability": spread}
    )


def _jobs() -> dict[str, Job]:
    fsdp = {"data_parallel": "fsdp"}
    hsdp = {"data_parallel": "hsdp", "shard_size": 4}
    blocking = {"p2p": "blocking"}
    own = {"effects": QUIET, "library": "h100-stressed"}
    stall = {"rate_per_hour": 2000.0, "duration_s": 0.05, "duration_cv": 1.0}
    return {
        "one GPU": make_job({"microbatches": 2}),
        "1f1b": make_job({**PIPELINE, "dp": 2}),
        "1f1b, blocking": make_job({**PIPELINE, **blocking, "dp": 2}),
        "gpipe": make_job({**PIPELINE, "tp": 2, "schedule": "gpipe"}),
        "interleaved": make_job({**PIPELINE, "tp": 2, "vpp": 2}),
        "zb-h1": make_job({**PIPELINE, "tp": 2, "schedule": "zb-h1"}),
        "zb-v": make_job({**PIPELINE, "tp": 2, "schedule": "zb-v"}),
        "dualpipe-v": make_job({**PIPELINE, "tp": 2, "schedule": "dualpipe-v"}),
        "ddp": make_job({"dp": 8, "tp": 2, "microbatches": 2}),
        "ddp, nothing overlaps": make_job({"dp": 8, "overlap": False}),
        "zero1": make_job({"dp": 4, "tp": 2, "pp": 2, "microbatches": 4, "data_parallel": "zero1"}),
        **{
            f"{mode}, {framework}{'' if overlap else ', nothing overlaps'}": make_job(
                {"dp": 2, "tp": 2, "pp": 2, "vpp": 2, "microbatches": 4, "data_parallel": mode,
                 "framework": framework, "overlap": overlap}, model=LARGE,
            )
            for mode in ("ddp", "zero1")
            for framework in ("megatron", "eager", "nanotron")
            for overlap in (True, False)
        },
        "fsdp": make_job({"dp": 16, "microbatches": 2, **fsdp}),
        "fsdp, prefetch 2": make_job({"dp": 16, "prefetch": 2, **fsdp}),
        "fsdp, pipeline": make_job({"dp": 4, "pp": 2, "microbatches": 4, **fsdp}),
        "fsdp, tp": make_job({"dp": 4, "tp": 4, **fsdp}),
        "hsdp": make_job({"dp": 16, **hsdp}),
        "hsdp, tp": make_job({"dp": 8, "tp": 2, **hsdp}),
        "cp": make_job(
            {"dp": 2, "tp": 2, "cp": 2, "pp": 2, "microbatches": 4}, host_scale=1e-9
        ),
        "tp without sequence parallelism": make_job({**GRID, "sequence_parallel": False}),
        "recompute": make_job({**GRID, "recompute": "full"}),
        "experts": make_job({"dp": 4, "tp": 2, "pp": 2, "ep": 4, "microbatches": 4}, model=EXPERTS),
        "experts, whole": make_job({"dp": 4, "tp": 2, "ep": 4, "expert_tp": 1}, model=EXPERTS),
        "experts, uneven": make_job(
            {"dp": 8, "ep": 4}, model=EXPERTS, effects={"expert": {"cv": 0.3}}
        ),
        "experts, fsdp": make_job({"dp": 8, "ep": 4, **fsdp}, model=EXPERTS),
        "slow node": make_job({**GRID, "dp": 8}, cluster={"node_slowdowns": {1: 1.2}}),
        "slow network": make_job(
            {**GRID, "dp": 8}, cluster={"node_slowdowns": {1: {"network": 2.0}}}
        ),
        "moved": make_job(
            {**GRID, "dp": 8}, cluster={"hosts": [3, 0, 2, 1], "node_slowdowns": {3: 1.3}}
        ),
        "stages before replicas": make_job({**GRID, "dp": 4}, cluster={"placement": "tp-cp-pp-dp"}),
        "fast and slow GPUs": make_job(
            {**GRID, "dp": 4, "tp": 4}, effects={"rank": {"cv": 0.03, "node_share": 0.5}}
        ),
        "content": make_job(GRID, effects={"microbatch": {"cv": 0.3}}),
        "calls": make_job(GRID, effects={"call": {"cv": 0.05}}),
        "stalls": make_job(GRID, effects={"stall": stall}),
        "jitter": make_job(GRID, effects={"jitter": {"mean_s": 0.01, "cv": 1.0}}),
        "congested pipeline": make_job(
            {**PIPELINE, "tp": 4, "dp": 2}, cluster=SMALL_NODES, effects=CONGESTED
        ),
        "congested fsdp": make_job({"dp": 32, **fsdp}, cluster=SMALL_NODES, effects=CONGESTED),
        "own noise, pipeline": make_job({**PIPELINE, "tp": 4, "dp": 2}, **own),
        "own noise, fsdp": make_job({"dp": 64, **fsdp}, **own),
        "own noise, every kernel": make_job({"dp": 16, **fsdp}, resolution="kernel", **own),
        "every kernel": make_job(GRID, resolution="kernel"),
        "each op by itself": make_job({**GRID, "dp": 4}, dependence="none"),
        "each op by itself, fsdp": make_job({"dp": 8, **fsdp}, dependence="none"),
        "two tiers": make_job(
            {"dp": 16, "tp": 2, "pp": 2, "microbatches": 4},
            cluster={"tiers": {"rack": {"gpus": 16}, "pod": {"gpus": 32, "oversubscription": 4.0}}},
        ),
    }  # fmt: skip


JOBS = _jobs()

S = 0.00883  # a step of `GRID` [s], so that what comes between steps is of their size
OFTEN = 1000 * 86_400 / (100 * S)  # per 1,000 node-days: one in 100 steps of the one node
CHECKPOINT = {"interval_steps": 20, "write_s": 2 * S}


def _runs() -> dict[str, Job]:
    def run(
        effects: dict[str, Any] | None = None, cluster: dict[str, Any] | None = None, **block: Any
    ) -> Job:
        alike = {"rank": {"cv": 0.0}}  # else runs on the same GPUs are not independent
        job = make_job(GRID, effects=alike | (effects or {}), cluster=cluster)
        block = {"steps": 400, "failures": "none", **block}
        return job.replace({f"run.{key}": value for key, value in block.items()})

    slow = {"rate_per_1000_node_days": OFTEN, "factor": 1.5, "duration": 50 * S}
    causes = {
        "gpu": {"share": 3, "restart": 5 * S},
        "software": {"share": 1, "detection": 9 * S, "restart": 60 * S, "replace": False},
    }
    return {
        "steps alone": run(),
        "drift": run({"step": {"cv": 0.05, "correlation_time_s": 100 * S}}),
        "hour of the day": run(
            {"step": {"cv": 0.01, "diurnal_cv": 0.2}}, start="2026-01-31T08:00"
        ),
        "evaluations": run(evaluation={"interval_steps": 7, "duration": 3 * S}),
        "failures": run(
            failures={"per_1000_node_days": OFTEN, "restart": 30 * S}, checkpoint=CHECKPOINT
        ),
        "background checkpoints": run(
            failures={"per_1000_node_days": OFTEN, "restart": 30 * S, "detection": 5 * S},
            checkpoint={"interval_steps": 20, "write_s": 10 * S, "mode": "async"},
        ),
        "causes": run(
            failures={"per_1000_node_days": OFTEN, "causes": causes}, checkpoint=CHECKPOINT
        ),
        "few spares": run(
            failures={
                "per_1000_node_days": OFTEN, "restart": 5 * S, "spares": 1, "repair": 200 * S,
            },
            checkpoint=CHECKPOINT,
        ),
        "slow nodes": run({"fail_slow": slow}),
        "slow nodes of two stages": run(
            {"fail_slow": slow | {"factor": 3.0, "rate_per_1000_node_days": OFTEN / 4}},
            {"gpus_per_node": 4},
        ),
        "slow nodes taken out": run(
            {"fail_slow": slow | {"detection": 20 * S, "replace": True}},
            failures={"per_1000_node_days": 1e-9, "restart": 10 * S}, checkpoint=CHECKPOINT,
        ),
        "stalls of the job": run(
            {"stall": {"entity": "job", "rate_per_hour": 3600 / (100 * S), "duration_s": 10 * S}}
        ),
    }  # fmt: skip


RUNS = _runs()
"""Runs of 400 steps, but for one on a node alone."""
