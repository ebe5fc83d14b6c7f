"""Small jobs with experts, for tests."""

from prism import load_job
from prism.simulation.steps import run_blocks

MODEL = {
    "n_layers": 4, "hidden_size": 1024, "ffn_size": 4096, "n_heads": 8, "vocab_size": 8000,
    "seq_len": 1024, "n_experts": 16, "experts_per_token": 2, "expert_ffn_size": 1408,
    "n_shared_experts": 1, "n_dense_layers": 1,
}  # fmt: skip
LATENT = {
    "head_size": 96, "v_head_size": 64, "rope_head_size": 32, "q_lora_rank": 384,
    "kv_lora_rank": 128,
}  # fmt: skip
OFF = {
    "rank": {"cv": 0.0}, "step": {"cv": 0.0}, "microbatch": {"cv": 0.0}, "call": {"cv": 0.0},
    "residual": {"cv": 0.0},
}  # fmt: skip


def make_job(effects=None, model=None, cluster=None, variability=None, **parallelism):
    """Build a job of 16 GPUs on 4 nodes unless told: two ep groups of 8, nothing random."""
    layout = {"dp": 16, "ep": 8, "microbatches": 2, "expert_imbalance": 1.0} | parallelism
    if layout["ep"] == 1:
        del layout["expert_imbalance"]
    gpus = layout["dp"] * layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1)
    nodes = {"nodes": max(1, gpus // 4), "gpus_per_node": min(4, gpus)}
    return load_job(
        {
            "model": MODEL | (model or {}),
            "parallelism": layout,
            "cluster": nodes | (cluster or {}),
            "variability": {"library": None, "effects": OFF if effects is None else effects}
            | (variability or {}),
        }
    )


def times(program, blocks=1, seed=1):
    """Step times [block, lane] in double precision."""
    return run_blocks(program, range(blocks), seed, 2)[0].astype(float)
