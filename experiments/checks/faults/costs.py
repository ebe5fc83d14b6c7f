"""Faults in what kernels, messages and memory cost, and in which node holds what."""

FAULTS = [
    (
        "MFU of a job in 8 bits is taken of the 16-bit peak",
        "peak = DEVICES[step.job.cluster.device].flop_per_s(step.job.parallelism.precision)",
        "peak = DEVICES[step.job.cluster.device].bf16_flop_per_s",
    ),
    (
        "attention counts the whole square of a sequence, not the half under the causal mask",
        "return self.sequences * (2.0 * self.seq * seen - seen**2) * width / self.shards",
        "return self.sequences * 2.0 * self.seq * seen * width / self.shards",
    ),
    (
        "attention's backward takes twice the forward's flop, without its recomputed product",
        '_attention_flop, _attention_bytes, 2.5, "residual/attention",',
        '_attention_flop, _attention_bytes, 2.0, "residual/attention",',
    ),
    (
        "keys and values are as wide as queries where heads are grouped",
        "kv_heads=max(1.0, model.n_kv_heads / share.tp),",
        "kv_heads=max(1.0, model.n_heads / share.tp),",
    ),
    (
        "full recomputation leaves the feed-forward half out",
        "again = self._whole_again(ops)",
        "again = self._whole_again(halves[0])",
    ),
    (
        "a ring's all-reduce passes its data once, not twice",
        "return min(self.ring(n_bytes, 2.0), self.tree(n_bytes))",
        "return min(self.ring(n_bytes, 1.0), self.tree(n_bytes))",
    ),
    (
        "a ring brings over the network only what its domain lacks",
        "moved = n_bytes * (n - 1) / n",
        "moved = n_bytes * (self.domains - 1) / self.domains",
    ),
    (
        "an NVLink domain that joins several nodes is taken for one node",
        "nvlink_gpus=block.nvlink_domain_gpus",
        "nvlink_gpus=block.gpus_per_node",
    ),
    (
        "a link's efficiency is left out of its rate",
        "return Link(bytes_per_s * efficiency / time, latency_s * time), efficiency",
        "return Link(bytes_per_s / time, latency_s * time), efficiency",
    ),
    (
        "members of a ring in one pod do not share the ring's way out of it",
        "slow = tier.oversubscription / max(1.0, group.members(tier.gpus) / inside)",
        "slow = tier.oversubscription",
    ),
    (
        "with the distributed optimizer every rank holds the whole optimizer state",
        'whole = p.data_parallel in ("ddp", "none")',
        'whole = p.data_parallel in ("ddp", "none", "zero1")',
    ),
    (
        "memory is that of the emptiest stage",
        "fullest, limit = max(found, key=lambda stage: stage.total), memory_limit(job)",
        "fullest, limit = min(found, key=lambda stage: stage.total), memory_limit(job)",
    ),
    (
        "tokens of a step leave out the sequences of a microbatch",
        "return p.dp * p.microbatches * p.microbatch_size * self.model.seq_len",
        "return p.dp * p.microbatches * self.model.seq_len",
    ),
    (
        "a GPU's energy is that of all stages together",
        "stages, m = len(workload.chunks), job.parallelism.microbatches",
        "stages, m = 1, job.parallelism.microbatches",
    ),
    (
        "a measured node is as slow as the mean of its GPUs, not as the slowest",
        'slowdown = np.exp(by_node["level"].max() - by_node["level"].max().median())',
        'slowdown = np.exp(by_node["level"].mean() - by_node["level"].mean().median())',
    ),
    (
        "a healthy node that was tested beside a slow one counts as slow",
        "factors[host] = min(factors.get(host, np.inf), y)",
        "factors[host] = max(factors.get(host, 0.0), y)",
    ),
    (
        "replicas of Megatron's rank order lie as far apart as stages do",
        "return p.stage_gpus * p.dp, p.stage_gpus\n",
        "return p.stage_gpus, p.stage_gpus * p.pp\n",
    ),
    (
        "a list of hosts is read as the slot of each node, not as the node of each slot",
        "return np.asarray((self.slots[:, None] * n + np.arange(n)).ravel()[ranks], np.int64)",
        "return np.asarray((np.argsort(self.slots)[:, None] * n + np.arange(n)).ravel()[ranks])",
    ),
    (
        "numbers in a compressed list of hosts lose their leading zeros",
        "str(k).zfill(len(low)) for k in range(",
        "str(k) for k in range(",
    ),
    (
        "eager frameworks multiply q, k and v as one",
        "if self.framework.fused_products or len(op.parts) == 1:",
        "if True:",
    ),
    (
        "gradients of an operand by several products are not summed",
        "for _ in parts[1:]\n        )",
        "for _ in parts[:0]\n        )",
    ),
    (
        "weight gradients are added to earlier ones for nothing",
        "if self.framework.fused_sums or p.data_parallel in",
        "if True or p.data_parallel in",
    ),
    (
        "the first microbatch's gradients in bf16 are added to nothing",
        "each *= 1.0 - 1.0 / p.microbatches",
        "each *= 1.0",
    ),
    (
        "kernels follow each other without gaps",
        "gap_s += self._between(k) + k.launches * late_s",
        "gap_s += k.launches * late_s",
    ),
    (
        "recomputation in PyTorch runs the layer's last product too",
        "kernels = kernels[: products[-1]] if products else kernels",
        "kernels = kernels",
    ),
    (
        "selective recomputation runs the products that it keeps",
        "if (number + i) % 2 == 0]",
        "if (number + i) % 2 == 1]",
    ),
    (
        "gradients of norms are not summed over a tensor-parallel group",
        "if isinstance(op, Norm) or (isinstance(op, Product) and op.resident):",
        "if isinstance(op, Product) and op.resident:",
    ),
    (
        "a step under its limit attends as fast as the tables say",
        "attention = math.pow(of.attention_phi / phi, 1.0 / GEMM_EXPONENT)",
        "attention = math.pow(of.table_phi / phi, 1.0 / GEMM_EXPONENT)",
    ),
    (
        "a locked clock leaves the speed of products",
        "high = most = of.table_phi if locked is None else locked",
        "high = most = of.table_phi",
    ),
    (
        "an optimizer with states in bf16 has a master copy of the weights",
        'return DTYPE_BYTES["fp32"] if layout.optimizer_dtype == "fp32" else 0.0',
        'return DTYPE_BYTES["fp32"]',
    ),
    (
        "an update made orthogonal takes one product fewer",
        "(gram.duration + square.duration + apply.duration)",
        "(gram.duration + apply.duration)",
    ),
    (
        "a job's own attention is left for its framework's",
        "if job.parallelism.attention is not None:",
        "if False:",
    ),
]
