"""Sizes of public models by name, as their papers or checkpoints give them.

A job's `model.name` takes these; each can be overridden beside it. Left out: what follows from
sizes (`prism.workload.modelsize`), and parts that do not train in every step (DeepSeek-V3's
multi-token prediction module, 11.5 billion parameters beside the 671 billion).
"""

from typing import Any

# Layer counts and widths. llama3: arXiv:2407.21783, Table 3; gpt3: arXiv:2005.14165, Table 2.1,
# with the vocabulary padded to 51,200 and sequence 2,048 as in MLPerf Training's GPT-3.
_LLAMA = {
    "n_kv_heads": 8,
    "vocab_size": 128_256,
    "seq_len": 8_192,
    "gated_mlp": True,
    "tied_embeddings": False,
}
_GPT3 = {"vocab_size": 51_200, "seq_len": 2_048, "gated_mlp": False, "tied_embeddings": True}

# arXiv:2412.19437, sections 4.2 (sizes, sequence of pre-training) and 2.1 (latent attention);
# the vocabulary is that of the published checkpoint.
_DEEPSEEK_V3 = {
    "vocab_size": 129_280,
    "seq_len": 4_096,
    "gated_mlp": True,
    "tied_embeddings": False,
    "n_experts": 256,
    "experts_per_token": 8,
    "expert_ffn_size": 2_048,
    "n_shared_experts": 1,
    "n_dense_layers": 3,
    "head_size": 192,
    "rope_head_size": 64,
    "v_head_size": 128,
    "q_lora_rank": 1_536,
    "kv_lora_rank": 512,
}
# arXiv:2401.04088, Table 1; the sequence is its context length.
_MIXTRAL = {
    "n_kv_heads": 8,
    "vocab_size": 32_000,
    "seq_len": 32_768,
    "gated_mlp": True,
    "tied_embeddings": False,
    "n_experts": 8,
    "experts_per_token": 2,
    "expert_ffn_size": 14_336,
}


def _sizes(n_layers: int, hidden: int, ffn: int, heads: int) -> dict[str, Any]:
    names = ("n_layers", "hidden_size", "ffn_size", "n_heads", "n_kv_heads")
    return dict(zip(names, (n_layers, hidden, ffn, heads, heads), strict=True))


PRESETS: dict[str, dict[str, Any]] = {
    "llama3-405b": _sizes(126, 16_384, 53_248, 128) | _LLAMA,
    "llama3-70b": _sizes(80, 8_192, 28_672, 64) | _LLAMA,
    "llama3-8b": _sizes(32, 4_096, 14_336, 32) | _LLAMA,
    "gpt3-175b": _sizes(96, 12_288, 49_152, 96) | _GPT3,
    "deepseek-v3": _sizes(61, 7_168, 18_432, 128) | _DEEPSEEK_V3,
    "mixtral-8x7b": _sizes(32, 4_096, 14_336, 32) | _MIXTRAL,
}
