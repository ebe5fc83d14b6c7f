"""Faults of what varies: distributions, effects, congestion, experts, tiers, power."""

FAULTS = [
    (
        "the step effect forgets its correlation time over a run, so that a drift averages out",
        "        effects.step.correlation_time_s,\n    )\n    wave",
        "        0.0,\n    )\n    wave",
    ),
    (
        "gpus of a node are drawn apart whatever the node share",
        'pick.value("rank", "node_share"),',
        "0.0,",
    ),
    (
        "the node share is taken for a correlation's root, not for a share of the variance",
        "weight = float(np.sqrt(spread.node_share)) if",
        "weight = float(spread.node_share) if",
    ),
    (
        "congestion is normalised for one leaf where a message touches several",
        "mean = 1.0 + hit * (self.factor - 1.0)",
        "mean = 1.0 + self.probability * (self.factor - 1.0)",
    ),
    (
        "stalls of the job are added to the nominal step instead of being part of its mean",
        "job_quiet = 1.0 - probability[0] * length / graph.nominal_s",
        "job_quiet = 1.0",
    ),
    (
        "stalls of nodes come as often as if every rank were a node",
        "node = np.sort(ranks // placement.gpus_per_node, axis=2)",
        "node = np.sort(ranks, axis=2)",
    ),
    (
        "a jitter of which only the mean is given is the same in every step",
        'pick.distribution("jitter", JITTER_CV)',
        'pick.distribution("jitter")',
    ),
    (
        "the jitter of a step takes the draw of its step effect",
        "draw(each.stream)",
        "draw(engine.STEP)",
    ),
    (
        "backward follows the microbatch effect as forward does",
        'loading = self.backward_loading if op_kind.startswith("backward") else 1.0',
        "loading = 1.0",
    ),
    (
        "lemons slower than the slowdown at which gpus are culled stay in the cluster",
        "top = min(hi, max_slowdown)",
        "top = hi",
    ),
    (
        "a lognormal takes its coefficient of variation for the deviation of the logarithm",
        "return math.sqrt(math.log1p(params[0] * params[0]))",
        "return params[0]",
    ),
    (
        "gpus that are memory-bound follow the rank effect in full",
        "return self.memory_loading * self.memory_spread",
        "return 1.0",
    ),
    (
        "between measured sizes a kernel has the rate of the nearest one",
        "weight *= part if side else 1.0 - part",
        "weight *= round(part) if side else 1.0 - round(part)",
    ),
    (
        "a message between sites takes the way there and back",
        "own_s = latency_s + (block.distance_km or 0.0) * SECONDS_PER_KM",
        "own_s = latency_s + 2.0 * (block.distance_km or 0.0) * SECONDS_PER_KM",
    ),
    (
        "a site's uplink carries its full rate whatever part of it messages reach",
        "return bytes_per_s * block.gpus / (block.total_gbits_per_s * 0.125e9 * efficiency)",
        "return bytes_per_s * block.gpus / (block.total_gbits_per_s * 0.125e9)",
    ),
    (
        "a capacity of experts drops no token of the busiest rank",
        "return min(busiest, layout.expert_capacity or busiest)",
        "return busiest",
    ),
    (
        "all microbatches of a step share one draw of the experts' load",
        'the same in every layer."""\n        return graph.microbatch',
        'the same in every layer."""\n        return 0 * graph.microbatch',
    ),
    (
        "without dependence ops forget that gpus differ",
        "part = pooled_a[pick, c, t].astype(np.float64)",
        "part = np.full(POOL_SAMPLES, float(pooled_a[:, c, t].mean()))",
    ),
    (
        "the model's error grows with the nodes beyond the largest published job, not its gpus",
        "beyond = math.log(max(1.0, job.world_size / largest))",
        "beyond = math.log(max(1.0, job.n_nodes / largest))",
    ),
    (
        "a throttled node is slowed twice, by the limit of all and by its own",
        "hot = gpu_power(self.job, throttled=True).slowdown / gpu_power(self.job).slowdown",
        "hot = gpu_power(self.job, throttled=True).slowdown",
    ),
]
