"""No answer depends on the order in which Python's sets give their members."""

import os
import re
import subprocess
import sys

COMMANDS = """
import sys
from prism.__main__ import main
for line in open(sys.argv[1]):
    status = main([*line.split(), "--json", "-q"])
    assert status in (0, None), line
"""
LINES = """
sweep a.yaml --vary parallelism.microbatches=4,8 --replicates 64 --seed 1
place pipeline-8x32 --slow-nodes 1 --slowdown 1.2 --spares 1 --seed 1
import megatron.sh --set cluster.device=h100
schedule interleaved --stages 4 --microbatches 8 --chunks 2
show llama3-70b-fsdp-512
explain a.yaml b.yaml --replicates 64 --seed 1
"""
A = """
model: {n_layers: 8, hidden_size: 1024, ffn_size: 4096, n_heads: 16, vocab_size: 32000,
        seq_len: 2048}
parallelism: {tp: 2, pp: 2, dp: 2, microbatches: 4}
cluster: {nodes: 1, gpus_per_node: 8, device: h100}
variability: {library: h100-healthy}
"""
B = """
base: a.yaml
model: {n_layers: 12, hidden_size: 2048, n_kv_heads: 8}
parallelism: {pp: 1, dp: 4, microbatches: 8, data_parallel: fsdp, precision: fp8}
variability: {library: h100-production}
"""
SCRIPT = """
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 \\
  --num-attention-heads 32 --seq-length 4096 --tensor-model-parallel-size 2 \\
  --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 64 \\
  --swiglu --bf16 --vocab-size 32000 \\
  --use-distributed-optimizer --recompute-granularity full --moe-unknown 3
"""


def test_every_command_prints_the_same_under_three_hash_seeds(tmp_path):
    (tmp_path / "lines").write_text(LINES.strip() + "\n")
    for name, text in (("megatron.sh", SCRIPT), ("a.yaml", A), ("b.yaml", B)):
        (tmp_path / name).write_text(text)
    printed = set()
    for seed in "012":
        found = subprocess.run(
            [sys.executable, "-c", COMMANDS, "lines"], capture_output=True, text=True,
            cwd=tmp_path, env=os.environ | {"PYTHONHASHSEED": seed}, check=False,
        )  # fmt: skip
        assert found.returncode == 0, found.stderr
        assert found.stdout.count("\n") >= 6
        printed.add(re.sub(r'"(wall|cpu)_seconds": [^,}]+', "", found.stdout))
    assert len(printed) == 1
