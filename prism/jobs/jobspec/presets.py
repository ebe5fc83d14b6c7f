"""Sizes of public models by name, as their papers or checkpoints give them.

Each can be overridden beside `model.name`; `seq_len` is that of pre-training where it is published,
else the context length. Left out: what does not train in every step (DeepSeek-V3's multi-token
prediction module, 11.5 billion parameters beside the 671 billion), encoders of images, and what
``tests/test_presets.py`` shows to be small (biases, norms of queries and keys).
"""

from typing import Any

SIZES = ("n_layers", "hidden_size", "ffn_size", "n_heads", "n_kv_heads", "vocab_size", "seq_len")


def _sizes(*values: float, **more: Any) -> dict[str, Any]:
    return dict(zip((*SIZES, "gated_mlp", "tied_embeddings"), values, strict=True)) | more


_LLAMA3, _LLAMA2 = (8, 128_256, 8_192, True, False), (32_000, 4_096, True, False)
_QWEN3, _MPT = (151_936, 4_096, True, False), (50_368, 2_048, False, True)
_UNROTATED = {"rope": False}
_NEMOTRON4 = (8, 256_000, 4_096, False, False)
_LATENTS = {
    "head_size": 192, "rope_head_size": 64, "v_head_size": 128, "q_lora_rank": 1_536,
    "kv_lora_rank": 512,
}  # fmt: skip


def _experts(n: int, per_token: int, width: int, shared: int = 0, **more: Any) -> dict[str, Any]:
    sizes = {"n_experts": n, "experts_per_token": per_token, "expert_ffn_size": width}
    return sizes | ({"n_shared_experts": shared} if shared else {}) | more


def _mamba(pattern: str, heads: int, state: int) -> dict[str, Any]:
    return {
        "layer_pattern": pattern, "mamba_heads": heads, "mamba_head_size": 64, "mamba_groups": 8,
        "mamba_state_size": state,
    }  # fmt: skip


PRESETS: dict[str, dict[str, Any]] = {
    # arXiv:2407.21783, Table 3
    "llama3-405b": _sizes(126, 16_384, 53_248, 128, *_LLAMA3),
    "llama3-70b": _sizes(80, 8_192, 28_672, 64, *_LLAMA3),
    "llama3-8b": _sizes(32, 4_096, 14_336, 32, *_LLAMA3),
    # checkpoints meta-llama/Llama-3.2-1B and -3B; the sequence is Llama 3's
    "llama3.2-3b": _sizes(28, 3_072, 8_192, 24, 8, 128_256, 8_192, True, True),
    "llama3.2-1b": _sizes(16, 2_048, 8_192, 32, 8, 128_256, 8_192, True, True),
    # arXiv:2307.09288, and its checkpoints
    "llama2-70b": _sizes(80, 8_192, 28_672, 64, 8, *_LLAMA2),
    "llama2-13b": _sizes(40, 5_120, 13_824, 40, 40, *_LLAMA2),
    "llama2-7b": _sizes(32, 4_096, 11_008, 32, 32, *_LLAMA2),
    # arXiv:2005.14165, Table 2.1, learned positions; vocabulary padded, and sequence, as in
    # MLPerf Training's GPT-3
    "gpt3-175b": _sizes(96, 12_288, 49_152, 96, 96, 51_200, 2_048, False, True, **_UNROTATED),
    # checkpoints mosaicml/mpt-7b and -30b (ALiBi); mosaicml/llm-foundry, scripts/train/benchmarking
    "mpt-70b": _sizes(80, 8_192, 32_768, 64, 64, *_MPT, **_UNROTATED),
    "mpt-30b": _sizes(48, 7_168, 28_672, 64, 64, *_MPT, **_UNROTATED),
    "mpt-13b": _sizes(40, 5_120, 20_480, 40, 40, *_MPT, **_UNROTATED),
    "mpt-7b": _sizes(32, 4_096, 16_384, 32, 32, *_MPT, **_UNROTATED),
    # arXiv:2402.16819, Table 1, and arXiv:2406.11704, Table 1: squared ReLU
    "nemotron4-340b": _sizes(96, 18_432, 73_728, 96, *_NEMOTRON4),
    "nemotron4-15b": _sizes(32, 6_144, 24_576, 48, *_NEMOTRON4),
    # arXiv:2505.09388, Tables 1 and 2, section 3.2 (sequence), and its checkpoints
    "qwen3-235b-a22b": _sizes(
        94, 4_096, 12_288, 64, 4, *_QWEN3, head_size=128, **_experts(128, 8, 1_536)
    ),
    "qwen3-30b-a3b": _sizes(
        48, 2_048, 6_144, 32, 4, *_QWEN3, head_size=128, **_experts(128, 8, 768)
    ),
    "qwen3-32b": _sizes(64, 5_120, 25_600, 64, 8, *_QWEN3, head_size=128),
    "qwen3-14b": _sizes(40, 5_120, 17_408, 40, 8, *_QWEN3),
    "qwen3-8b": _sizes(36, 4_096, 12_288, 32, 8, *_QWEN3),
    # arXiv:2408.00118, Table 1, and arXiv:2503.19786; windows in between as their checkpoints
    "gemma3-27b": _sizes(
        62, 5_376, 21_504, 32, 16, 262_144, 32_768, True, True, head_size=128,
        window=1_024, full_attention_interval=6,
    ),
    "gemma2-27b": _sizes(
        46, 4_608, 36_864, 32, 16, 256_000, 8_192, True, True, head_size=128,
        window=4_096, full_attention_interval=2,
    ),
    "gemma2-9b": _sizes(
        42, 3_584, 14_336, 16, 8, 256_000, 8_192, True, True, head_size=256,
        window=4_096, full_attention_interval=2,
    ),
    # arXiv:2412.19437, sections 4.2 (sizes, sequence of pre-training) and 2.1 (latent attention);
    # the vocabulary is that of the published checkpoint
    "deepseek-v3": _sizes(
        61, 7_168, 18_432, 128, 128, 129_280, 4_096, True, False, n_dense_layers=3,
        **_experts(256, 8, 2_048, 1), **_LATENTS,
    ),
    # arXiv:2507.20534, Table 2, and section 2.4 (sequence)
    "kimi-k2": _sizes(
        61, 7_168, 18_432, 64, 64, 163_840, 4_096, True, False, n_dense_layers=1,
        **_experts(384, 8, 2_048, 1), **_LATENTS,
    ),
    # arXiv:2508.10925, section 2, and its checkpoints; the sequence is that of YaRN's base
    "gpt-oss-120b": _sizes(
        36, 2_880, 2_880, 64, 8, 201_088, 4_096, True, False, head_size=64, window=128,
        full_attention_interval=2, **_experts(128, 4, 2_880),
    ),
    "gpt-oss-20b": _sizes(
        24, 2_880, 2_880, 64, 8, 201_088, 4_096, True, False, head_size=64, window=128,
        full_attention_interval=2, **_experts(32, 4, 2_880),
    ),
    # arXiv:2401.04088, Table 1, and checkpoint mistralai/Mixtral-8x22B-v0.1; sequence: context
    "mixtral-8x22b": _sizes(
        56, 6_144, 16_384, 48, 8, 32_000, 65_536, True, False, **_experts(8, 2, 16_384)
    ),
    "mixtral-8x7b": _sizes(
        32, 4_096, 14_336, 32, 8, 32_000, 32_768, True, False, **_experts(8, 2, 14_336)
    ),
    # checkpoints meta-llama/Llama-4-Maverick-17B-128E and -Scout-17B-16E; the sequence is the chunk
    # that attention sees in three of four layers
    "llama4-maverick": _sizes(
        48, 5_120, 16_384, 40, 8, 202_048, 8_192, True, False, moe_layer_interval=2,
        **_experts(128, 1, 8_192, 1),
    ),
    "llama4-scout": _sizes(
        48, 5_120, 16_384, 40, 8, 202_048, 8_192, True, False, **_experts(16, 1, 8_192, 1)
    ),
    # xai-org/grok-1, run.py and model.py
    "grok-1": _sizes(
        64, 6_144, 32_768, 48, 8, 131_072, 8_192, True, True, **_experts(8, 2, 32_768)
    ),
    # arXiv:2504.03624, Table 1, and checkpoint nvidia/Nemotron-H-8B-Base-8K: squared ReLU, no
    # positions
    "nemotron-h-8b": _sizes(
        52, 4_096, 21_504, 32, 8, 131_072, 8_192, False, False, head_size=128, **_UNROTATED,
        **_mamba("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 128, 128),
    ),
    # checkpoint nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base; no positions; a shared
    # expert of twice the width
    "nemotron3-nano-30b-a3b": _sizes(
        52, 2_688, 1_856, 32, 2, 131_072, 8_192, False, False, head_size=128, **_UNROTATED,
        **_experts(128, 6, 1_856, 2),
        **_mamba("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 64, 128),
    ),
}  # fmt: skip
