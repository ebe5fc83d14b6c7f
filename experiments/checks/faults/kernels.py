"""Wrong changes of geometry and of what kernels, collectives and memory cost."""

FAULTS = [
    (
        "the backward of attention has two products, not five halves",
        "ATTENTION_BACKWARD_FLOP = 2.5",
        "ATTENTION_BACKWARD_FLOP = 2.0",
    ),
    (
        "causal attention computes the whole square",
        "return n_sequences * (2.0 * s * seen - seen**2) * width",
        "return n_sequences * 2.0 * s * seen * width",
    ),
    (
        "keys and values are as wide as queries: grouped queries are forgotten",
        "n_keys = max(1.0, model.n_kv_heads / layout.tp)",
        "n_keys = model.n_heads / layout.tp",
    ),
    (
        "where tp exceeds the key heads they are divided all the same",
        "n_keys = max(1.0, model.n_kv_heads / layout.tp)",
        "n_keys = model.n_kv_heads / layout.tp",
    ),
    (
        "an all-reduce takes as long as a reduce-scatter",
        'phases = 2.0 if op_kind == "all_reduce" else 1.0',
        "phases = 1.0",
    ),
    (
        "a ring across nodes sends the whole buffer from each",
        "crossing = n_bytes * (domains - 1) / domains\n        path",
        "crossing = n_bytes\n        path",
    ),
    (
        "oversubscription slows all of an all-to-all, not what leaves",
        "factor = max(factor, tier.oversubscription * leaving)",
        "factor = max(factor, tier.oversubscription)",
    ),
    (
        "a link's bandwidth in gigabytes is taken as gigabits",
        "bytes_per_s = given.bandwidth_gbytes_per_s * 1e9",
        "bytes_per_s = given.bandwidth_gbytes_per_s * 1e9 / 8.0",
    ),
    (
        "a link's efficiency is not applied",
        "return Link(bytes_per_s * efficiency / time, latency_s * time), efficiency",
        "return Link(bytes_per_s / time, latency_s * time), efficiency",
    ),
    (
        "a sequence-parallel reduction moves as an all-reduce",
        'op_kind = "reduce_scatter" if self.layout.sequence_parallel else "all_reduce"',
        'op_kind = "all_reduce"',
    ),
    (
        "hidden tensor-parallel reductions cost nothing",
        "visible = max(k.duration - hidden_s, TP_OVERLAP_COST * k.duration)",
        "visible = max(k.duration - hidden_s, 0.0)",
    ),
    (
        "full recomputation runs nothing again",
        '"full": self.layer_forward}',
        '"full": ()}',
    ),
    (
        "the norms of the whole sequence are computed on each rank with sequence parallelism",
        "resident=tokens / layout.tp if layout.sequence_parallel else tokens,",
        "resident=tokens,",
    ),
    (
        "tied embeddings count twice",
        "embeddings = (1.0 if model.tied_embeddings else 2.0) * model.vocab_size",
        "embeddings = 2.0 * model.vocab_size",
    ),
    (
        "active parameters count all experts",
        "n_experts = model.experts_per_token if active else model.n_experts",
        "n_experts = model.n_experts",
    ),
    (
        "the MFU of an FP8 job is against the bf16 peak",
        "    peak = DEVICES[step.job.cluster.device].flop_per_s(step.job.parallelism.precision)",
        '    peak = DEVICES[step.job.cluster.device].flop_per_s("bf16")',
    ),
    (
        "tokens of a step leave the replicas out",
        "return p.dp * p.microbatches * p.microbatch_size * self.model.seq_len",
        "return p.microbatches * p.microbatch_size * self.model.seq_len",
    ),
    (
        "zero1 keeps the optimizer's state whole",
        'whole = p.data_parallel in ("ddp", "none")',
        'whole = p.data_parallel in ("ddp", "none", "zero1")',
    ),
    (
        "a pipeline's first stage holds one microbatch's activations",
        "microbatches = min(microbatches, STEADY_ROUNDS * p.pp)",
        "microbatches = 1",
    ),
    (
        "with full recomputation all activations are kept",
        '"selective": stream + products + scattered, "full": stream}',
        '"selective": stream + products + scattered, "full": whole}',
    ),
    (
        "a driver offers all of a card's memory",
        "return DRIVER_SHARE * GIB * find_device(job.cluster.device).memory_bytes / 1e9",
        "return GIB * find_device(job.cluster.device).memory_bytes / 1e9",
    ),
    (
        "GPUs draw their busy power while they wait",
        "joules = cool.wait_w * step_s + memory_s * (cool.memory_w - cool.wait_w)",
        "joules = cool.compute_w * step_s + memory_s * (cool.memory_w - cool.wait_w)",
    ),
]
