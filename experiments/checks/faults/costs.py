"""Faults in what kernels, messages and memory cost, and in which node holds what."""

FAULTS = [
    (
        "MFU of a job in 8 bits is taken of the 16-bit peak",
        "peak = DEVICES[step.job.cluster.device].flop_per_s(step.job.parallelism.precision)",
        "peak = DEVICES[step.job.cluster.device].bf16_flop_per_s",
    ),
    (
        "attention counts the whole square of a sequence, not the half under the causal mask",
        "return n_sequences * (2.0 * s * seen - seen**2) * width",
        "return n_sequences * 2.0 * s * seen * width",
    ),
    (
        "attention's backward takes twice the forward's flop, without its recomputed product",
        "ATTENTION_BACKWARD_FLOP = 2.5",
        "ATTENTION_BACKWARD_FLOP = 2.0",
    ),
    (
        "keys and values are as wide as queries where heads are grouped",
        "n_keys = max(1.0, model.n_kv_heads / layout.tp)",
        "n_keys = max(1.0, model.n_heads / layout.tp)",
    ),
    (
        "full recomputation leaves the feed-forward half out",
        '"selective": self._selected, "full": self.layer_forward}',
        '"selective": self._selected, "full": self.attention_forward}',
    ),
    (
        "a ring's all-reduce passes its data once, not twice",
        'phases = 2.0 if op_kind == "all_reduce" else 1.0',
        "phases = 1.0",
    ),
    (
        "a ring sends all bytes over the network, also the part that its domain has",
        "crossing = n_bytes * (domains - 1) / domains",
        "crossing = n_bytes",
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
        "return max((_peak(job, s, rows[s], schedule) for s in stages), key=lambda memory: memory",
        "return min((_peak(job, s, rows[s], schedule) for s in stages), key=lambda memory: memory",
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
        "return group * p.dp, group\n",
        "return group, group * p.pp\n",
    ),
    (
        "a list of hosts is read as the slot of each node, not as the node of each slot",
        "return np.asarray((self.slots[:, None] * n + np.arange(n)).ravel()[ranks], np.int64)",
        "return np.asarray((np.argsort(self.slots)[:, None] * n + np.arange(n)).ravel()[ranks])",
    ),
    (
        "numbers in a compressed list of hosts lose their leading zeros",
        "found += [str(k).zfill(len(low)) for k in range(int(low), int(high) + 1)]",
        "found += [str(k) for k in range(int(low), int(high) + 1)]",
    ),
]
