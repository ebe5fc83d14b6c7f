"""Wrong changes of geometry and of what kernels, collectives and memory cost."""

FAULTS = [
    (
        "the host's lead from backward is lost before the next forward",
        "own, behind = [max(0.0, each) for each in span], max(0.0, sum(span))",
        "own, behind = (each := [max(0.0, x) for x in span]), sum(each)",
    ),
    (
        "gradients go in one message, whatever the bucket",
        "messages = max(1.0, n_bytes / most)",
        "messages = 1.0",
    ),
    (
        "every framework hides the reduction of gradients",
        "return self.layout.overlap and (self.is_full or self.framework.hides_gradients)",
        "return self.layout.overlap",
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
        "a sequence-parallel reduction moves as an all-reduce",
        'op_kind = "reduce_scatter" if self.layout.sequence_parallel else "all_reduce"',
        'op_kind = "all_reduce"',
    ),
    (
        "hidden tensor-parallel reductions cost nothing",
        "shown = [exposed(k.duration, beside_s, self.costs.overlap_cost) for k in kernels]",
        "shown = [exposed(k.duration, beside_s, 0.0) for k in kernels]",
    ),
    (
        "full recomputation runs nothing again",
        "again = self._whole_again(ops)",
        "again = ()",
    ),
    (
        "the norms of the whole sequence are computed on each rank with sequence parallelism",
        "resident=tokens / share.tp if share.sequence_parallel else tokens,",
        "resident=tokens,",
    ),
    (
        "tied embeddings count twice",
        'if op.name != "logits" or not model.tied_embeddings]',
        "]",
    ),
    (
        "active parameters count all experts",
        "passed = model.experts_per_token / model.n_experts if active and",
        "passed = 1.0 if active and",
    ),
    (
        "a pipeline's first stage holds one microbatch's activations",
        "microbatches = min(microbatches, STEADY_ROUNDS * p.pp)",
        "microbatches = 1",
    ),
    (
        "with full recomputation all activations are kept",
        'kept = whole if p.recompute == "none" else again',
        'kept = again if p.recompute == "selective" else whole',
    ),
    (
        "a driver offers all of a card's memory",
        "return DRIVER_SHARE * GIB * find_device(job.cluster.device).memory_bytes / 1e9",
        "return GIB * find_device(job.cluster.device).memory_bytes / 1e9",
    ),
    (
        "GPUs draw their busy power while they wait",
        "wait_s = mix.wait_s if step_s is None else max(step_s - seconds, 0.0)",
        "wait_s = 0.0 if step_s is None else 4.0 * max(step_s - seconds, 0.0)",
    ),
]
