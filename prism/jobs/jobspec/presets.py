"""Sizes of public models by name, as their papers or checkpoints give them.

Each can be overridden beside `model.name`. Left out: parts that do not train in every step
(DeepSeek-V3's multi-token prediction module, 11.5 billion parameters beside the 671 billion).
"""

from typing import Any

SIZES = ("n_layers", "hidden_size", "ffn_size", "n_heads", "n_kv_heads", "vocab_size", "seq_len")


def _sizes(*values: float, **more: int) -> dict[str, Any]:
    return dict(zip((*SIZES, "gated_mlp", "tied_embeddings"), values, strict=True)) | more


_LLAMA3 = (8, 128_256, 8_192, True, False)

PRESETS: dict[str, dict[str, Any]] = {
    # arXiv:2407.21783, Table 3
    "llama3-405b": _sizes(126, 16_384, 53_248, 128, *_LLAMA3),
    "llama3-70b": _sizes(80, 8_192, 28_672, 64, *_LLAMA3),
    "llama3-8b": _sizes(32, 4_096, 14_336, 32, *_LLAMA3),
    # arXiv:2005.14165, Table 2.1; vocabulary padded, and sequence, as in MLPerf Training's GPT-3
    "gpt3-175b": _sizes(96, 12_288, 49_152, 96, 96, 51_200, 2_048, False, True),
    # arXiv:2412.19437, sections 4.2 (sizes, sequence of pre-training) and 2.1 (latent attention);
    # the vocabulary is that of the published checkpoint
    "deepseek-v3": _sizes(
        61, 7_168, 18_432, 128, 128, 129_280, 4_096, True, False,
        n_experts=256, experts_per_token=8, expert_ffn_size=2_048, n_shared_experts=1,
        n_dense_layers=3, head_size=192, rope_head_size=64, v_head_size=128,
        q_lora_rank=1_536, kv_lora_rank=512,
    ),
    # arXiv:2401.04088, Table 1; the sequence is its context length
    "mixtral-8x7b": _sizes(
        32, 4_096, 14_336, 32, 8, 32_000, 32_768, True, False,
        n_experts=8, experts_per_token=2, expert_ffn_size=14_336,
    ),
}  # fmt: skip
