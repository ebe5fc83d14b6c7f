"""The estimate of `prism.workload.memory` against every published peak whose layout is given.

Prints the table of the README, with the error as it is and with a loss computed in place, as
Megatron's fused one is. ``python experiments/layouts/memory.py``, a second. Sources: torchtitan,
``benchmarks/llama3_h100_202412_torchtitan.md``, tables 1 to 6 (peaks that the allocator reserved,
with torch.compile; selective recomputation by op in tables 1 and 3, full in the others);
arXiv:2407.21783, section 3.3.
"""

from prism.jobs.job import load_job
from prism.workload import memory

FUSED_LOSS = 4.0
"""Bytes of a logit beside the four that are kept, in Megatron's cross entropy: the logits and their
gradient in bfloat16."""

TITAN = {"schedule": "1f1b", "vpp": 1, "microbatch_size": 1, "recompute": "full"}
ONE = {**TITAN, "pp": 1, "microbatches": 1, "reshard_after_forward": "true"}
# eight microbatches, one per stage, is what torchtitan took where no number was given
FOUR = {**TITAN, "tp": 8, "pp": 8, "microbatches": 8}
SELECTIVE = {**ONE, "tp": 1, "microbatch_size": 2, "recompute": "selective"}
ROWS = [
    ("8B, fsdp 8, batch 2, selective", "llama3-8b", {**SELECTIVE, "dp": 8}, 1, 8192, 77.0),
    ("8B, fsdp 128, batch 2, selective", "llama3-8b", {**SELECTIVE, "dp": 128}, 16, 8192, 62.0),
    *(
        ("8B, fsdp 8, cp", "llama3-8b", {**ONE, "tp": 1, "dp": 8 // cp, "cp": cp}, 1,
         32768 * cp, gib)
        for cp, gib in ((1, 83.9), (2, 84.2), (4, 84.0), (8, 84.5))
    ),
    ("70B, fsdp 32, tp 8, batch 16", "llama3-70b",
     {**ONE, "tp": 8, "dp": 32, "microbatch_size": 16}, 32, 8192, 71.9),
    ("405B, fsdp 8, tp 8, pp 8", "llama3-405b",
     {**FOUR, "dp": 8, "microbatch_size": 4}, 64, 8192, 82.5),
    ("the same, interleaved, 2 chunks", "llama3-405b",
     {**FOUR, "dp": 8, "microbatch_size": 4, "vpp": 2, "schedule": "interleaved"}, 64, 8192, 72.7),
    *(
        ("405B, tp 8, pp 8, cp", "llama3-405b", {**FOUR, "dp": 8 // cp, "cp": cp}, 64,
         32768 * cp, gib)
        for cp, gib in ((1, 75.3), (2, 75.9), (4, 77.1), (8, 84.9))
    ),
]  # fmt: skip


def estimate(name, keys, nodes, seq_len):
    """Estimated GiB, as it is and with a fused loss."""
    given = [f"parallelism.{key}={value}" for key, value in keys.items()]
    given += [f"model.name={name}", f"model.seq_len={seq_len}", f"cluster.nodes={nodes}"]
    given += ["parallelism.layer_split=auto"]
    job = load_job("llama3-405b-16k", given)
    plain = memory.estimate_memory(job)
    kept, memory.LOSS_BYTES = memory.LOSS_BYTES, FUSED_LOSS
    try:
        return plain, memory.estimate_memory(job)
    finally:
        memory.LOSS_BYTES = kept


def main():
    print("| job | sequence | reserved | estimate | with a fused loss | of which, per GPU |")
    print("|---|---|---|---|---|---|")
    for label, name, keys, nodes, seq_len, gib in ROWS:
        plain, loss = estimate(name, keys, nodes, seq_len)
        label = f"{label} {keys['cp']}" if label.endswith("cp") else label
        parts = (("state", plain.weights + plain.gradients + plain.optimizer),
                 ("activations", plain.activations), ("workspace", plain.workspace))  # fmt: skip
        told = ", ".join(f"{part} {n / memory.GIB:.0f}" for part, n in parts)
        print(
            f"| {label} | {seq_len:,} | {gib} GiB | {plain.gib:.1f} ({plain.gib / gib - 1:+.0%}) | "
            f"{loss.gib:.1f} ({loss.gib / gib - 1:+.0%}) | {told} |"
        )


if __name__ == "__main__":
    main()
