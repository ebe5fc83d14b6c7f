"""Wrong changes of draws, distributions and effects."""

FAULTS = [
    (
        "GPUs of a node differ too little: their own part has the wrong weight",
        "own_weight = math.sqrt(max(0.0, 1.0 - ranks.node_weight**2))",
        "own_weight = 1.0 - ranks.node_weight",
    ),
    (
        "a transfer is congested only where two of its leaves are",
        "out[lane] *= congested if n > 0 else quiet",
        "out[lane] *= congested if n > 1 else quiet",
    ),
    (
        "congestion of a link that touches many leaves is normalised by one leaf",
        "hit = 1.0 - (1.0 - self.probability) ** n_leaves",
        "hit = 1.0 - (1.0 - self.probability) ** np.minimum(n_leaves, 1)",
    ),
    (
        "the loss does not follow its own microbatch loading",
        "return loading * (self.loss_loading if kernel_class in LOSS_CLASSES else 1.0)",
        "return loading",
    ),
    (
        "an effect raised to a power spreads as it was",
        "        x = np.maximum(x, POSITIVE) ** power\n    total = weights.sum()",
        "        x = np.maximum(x, POSITIVE)\n    total = weights.sum()",
    ),
    (
        "stalls all have their mean length",
        "tables.add(lognormal(stall.duration_cv)), ptr.astype(np.int32),",
        "tables.add(lognormal(0.0)), ptr.astype(np.int32),",
    ),
    (
        "stalls of nodes come as often as those of ranks",
        'if entity == "rank":',
        'if entity != "job":',
    ),
    (
        "work between stalls is not faster: stalls come on top of the mean step",
        "quiet[here] = 1.0 - probability[s] / entities * length / busy_s",
        "quiet[here] = 1.0",
    ),
    (
        "an hour of stalls has 60 seconds",
        "rate, length = stall.rate_per_hour / 3600.0, stall.duration_s",
        "rate, length = stall.rate_per_hour / 60.0, stall.duration_s",
    ),
    (
        "a gamma has the CV of its square",
        "    shape = params[0] ** -2\n    return gammaincinv(shape, q) / shape",
        "    shape = params[0] ** -1\n    return gammaincinv(shape, q) / shape",
    ),
    (
        "the job's own cv of an effect gives way to the library's",
        "return distribution if cv is None else distribution.scaled_to(cv)",
        "return distribution",
    ),
    (
        "stalls per node count once for the whole job",
        'of_job += pick.job.n_nodes * pick.value("stall", "node_rate_per_hour")',
        'of_job += pick.value("stall", "node_rate_per_hour")',
    ),
    (
        "experts are uneven without a library too",
        'pick.distribution("expert", 0.0 if pick.library is None else EXPERT_CV)',
        'pick.distribution("expert", EXPERT_CV)',
    ),
    (
        "a shard group is as slow as the mean of its ranks, not the slowest",
        "x = distribution.ppf(ndtr(z)).reshape(draws, n, -1).max(axis=2)",
        "x = distribution.ppf(ndtr(z)).reshape(draws, n, -1).mean(axis=2)",
    ),
]
