"""What families of models leave unsaid, by the names that their tools give them."""

MEGATRON = ("megatron", "nemo", "bridge")
GATED = ("swiglu", "geglu", "silu", "fastswiglu", "fastgeglu", "reglu", "llama", "gelupytorchtanh")
UNGATED = ("relu2", "squaredrelu", "xielu")
ROTARY = ("rope", "mrope", "yarn", "rotary")
UNROTATED_FAMILIES = ("gpt2", "opt", "bloom", "mpt", "nemotronh", "jamba", "gptbigcode", "gptneo",
                       "openaigpt", "biogpt", "xglm")  # fmt: skip
UNGATED_FAMILIES = ("gpt2", "gptneox", "gptj", "bloom", "opt", "falcon", "mpt", "phi",
                     "starcoder2", "gptbigcode", "gptneo", "codegen", "gptneoxjapanese",
                     "openaigpt", "biogpt", "xglm", "nemotron", "arcee", "apertus", "persimmon",
                     "jais2", "nanochat")  # fmt: skip
GATED_ATTENTION = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "afmoe", "beam", "muse_glimmer")
TIED_FAMILIES = ("bloom", "cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "falcon",
                  "gemma", "gemma2", "gemma3", "gpt2", "gpt_bigcode", "gpt_neo", "granite_swa",
                  "minicpm3", "mpt", "openai-gpt", "opt", "smollm3", "starcoder2", "vaultgemma",
                  "youtu")  # fmt: skip
DEFAULTS = {
    "gemma3": {"vocab_size": 262_208, "n_heads": 8, "n_kv_heads": 4, "head_size": 256},
    "gemma gemma2": {"head_size": 256},
    "qwen3 ernie4_5 ernie4_5_moe mellum solar_open hy_v3": {"head_size": 128},
}  # fmt: skip
"""What transformers 5.24 takes where published configurations of a family leave it out."""
REFUSED = {
    "zamba zamba2": "attention blocks that many layers share",
    "lfm2 lfm2_moe": "short convolutions between its attention layers",
    "recurrent_gemma": "linear recurrent units",
    "hymba": "attention and Mamba heads in one projection",
    "mamba falcon_mamba": "layers of Mamba-1 alone", "mamba2": "layers of Mamba-2 alone",
    "rwkv rwkv7": "RWKV layers", "xlstm": "xLSTM layers",
    "gemma3n gemma4 gemma4_unified": "embeddings of each layer, and keys that layers share",
    "arctic": "dense and routed feed-forward parts side by side",
    "openelm": "layers of different widths", "longcat_flash": "two attentions a layer",
    "deepseek_v4": "hyper-connections, and compressed keys",
    "minimax_m3 minimax_m3_vl": "sparse layers with an indexer of their own",
    "step3p5 step3p7": "two numbers of heads among its layers",
    "mllama mllama_text_model idefics": "cross attention to images",
    "jetmoe": "experts of attention", "cpmant ctrl xlm": "layers of its own",
    "doge": "experts without matrices",
    "hrm": "stacks of layers that it passes again", "moshi": "two transformers",
    "muse_spark": "experts of another width than its own",
    "bert roberta roberta-prelayernorm electra ernie roformer xlm-roberta xlm-roberta-xl xlnet git "
    "megatron-bert rembert big_bird camembert data2vec-text bert-generation xmod roc_bert":
        "an encoder's layers",
    "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp plbart trocr whisper "
    "pegasus prophetnet t5 mt5 kosmos-2 kosmos-2.5": "an encoder and a decoder",
}  # fmt: skip
REFUSED_SETTINGS = {
    "block_configs": "layers of different widths", "is_encoder_decoder": "an encoder and a decoder",
    "num_kv_shared_layers use_cla": "keys that layers share",
    "attn_res_block_size": "attention over the residuals of blocks of layers",
    "hidden_size_per_layer_input": "embeddings of each layer",
    "num_mem_blocks": "blocks that many layers share",
    "swa_num_attention_heads": "two numbers of heads among its layers",
    "ssm_cfg.layer": "layers of Mamba alone",
}  # fmt: skip
"""What no table of ops is for, by families of models and by settings."""
# vocabularies by words in tokenizers' names, without padding: of GPT-2, Llama 2 and GPT-NeoX-20B
VOCABULARIES = {"gpt2": 50_257, "llama2tokenizer": 32_000, "20btokenizer": 50_277}
EXPERTS = ("n_experts", "experts_per_token", "expert_ffn_size")
SPARSE = ("experts_per_token", "expert_ffn_size", "expert_latent_size", "n_shared_experts",
           "shared_ffn_size", "n_dense_layers", "moe_layer_interval")  # fmt: skip
MAMBA = ("mamba_heads", "mamba_head_size", "mamba_groups", "mamba_state_size")
LINEAR = ("linear_heads", "linear_key_heads", "linear_head_size")
