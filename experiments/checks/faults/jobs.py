"""Wrong changes in job files, imports, calibration, model files and columns of tables."""

FAULTS = [
    (
        "a length of time without a unit is taken in minutes",
        'float(found[1]) * _SECONDS[found[2] or "s"] if found',
        'float(found[1]) * _SECONDS[found[2] or "min"] if found',
    ),
    (
        "a list in a job is put behind that of its base",
        "            there = key in old\n            _drop(lower, here)\n",
        "            there = key in old\n"
        "            if isinstance(value, list) and isinstance(old.get(key), list):\n"
        "                value = [*old[key], *value]\n"
        "            _drop(lower, here)\n",
    ),
    (
        "of several overrides of a key the first one wins",
        "    for upper in uppers:\n        layer = merge(layer, upper)\n    settle",
        "    for upper in reversed(uppers):\n        layer = merge(layer, upper)\n    settle",
    ),
    (
        "a global batch is divided over replicas and not over the sequences of a microbatch",
        'for k in ("global_batch", "dp", "microbatch_size")]',
        'for k in ("global_batch", "dp", "global_batch_size")]',
    ),
    (
        "a run of tokens ends a step before they are used up",
        "sum(steps) + max(0, ceil(left / self.tokens_per_step))",
        "sum(steps) + max(0, int(left // self.tokens_per_step))",
    ),
    (
        "the assumed failure rate is that of nodes of 8 GPUs, however many a node has",
        "rate = 1000.0 * FAILURES_PER_GPU_DAY * self.cluster.gpus_per_node",
        "rate = 1000.0 * FAILURES_PER_GPU_DAY * 8",
    ),
    (
        "gbit of an uplink are taken as decimal gigabytes",
        "block.total_gbits_per_s * 0.125e9 * efficiency",
        "block.total_gbits_per_s * 1e9 * efficiency",
    ),
    (
        "query groups of megatron are taken as the heads of a group",
        'd.give("model.n_kv_heads", kv.value, kv)',
        'd.give("model.n_kv_heads", (heads or kv.value) // max(kv.value, 1), kv)',
    ),
    (
        "megatron's gated feed-forward layer without a width is as wide as one without a gate",
        "int(4 * hidden * 2 / 3) // 64 * 64 if gated and megatron else",
        "4 * hidden if gated and megatron else",
    ),
    (
        "replicas of deepspeed are counted without gradient accumulation",
        "return whole.value // (size.value * steps.value) * each",
        "return whole.value // size.value * each",
    ),
    (
        "torchtitan's local batch is the one of all replicas",
        'd.give("parallelism.global_batch", local.value * dp, local)',
        'd.give("parallelism.global_batch", local.value, local)',
    ),
    (
        "samples of a run are taken as its tokens",
        "int(samples.value) * length",
        "int(samples.value)",
    ),
    (
        "a calibration brings the mean step to the measured median",
        "mean_s, n_runs = float(np.nanmean(body)), body.shape[1]",
        "mean_s, n_runs = float(np.nanmedian(body)), body.shape[1]",
    ),
    (
        "stalls of calibrated sizes are counted per node of the last size alone",
        "by_node = hours * nodes * counts.sum() / (hours @ nodes)",
        "by_node = hours * nodes * counts.sum() / (hours.sum() * nodes[-1])",
    ),
    (
        "a calibration's line in microbatches goes through the sizes' means",
        "medians = np.array([float(np.median(s.steps_s)) for s in self.sizes])",
        "medians = np.array([float(np.mean(s.steps_s)) for s in self.sizes])",
    ),
    (
        "the size that a calibration is held against is the last measured one",
        "return min(self.sizes, key=lambda s: abs(math.log(s.world_size / world_size)))",
        "return max(self.sizes, key=lambda s: s.world_size)",
    ),
    (
        "a model of a trace forgets its slow workers in its file",
        'lemons=tuple((int(r), int(s), float(x)) for r, s, x in json.loads(attrs["lemons"])),',
        "lemons=(),",
    ),
    (
        "rates per minute are taken per second",
        '"ns": 1e9, "min": 1.0 / 60.0, "h": 1.0 / 3600.0}',
        '"ns": 1e9, "min": 1.0, "h": 1.0 / 3600.0}',
    ),
    (
        "milliseconds in brackets are taken as seconds",
        "bare = [word for word in words if word not in _STATISTICS | _MEANS]",
        'bare = [word for word in words if word not in _STATISTICS | _MEANS | {"ms"}]',
    ),
    (
        "a warning of memory waits for the estimate to pass the limit by its whole error",
        'memory["p_fits"] < WARNED_P_FITS',
        'memory["p_fits"] <= 0.0',
    ),
    (
        "a job written out gives days for weeks",
        '_UNITS = ((604_800, "w"), (86_400, "d"), (3_600, "h"), (60, "min"))',
        '_UNITS = ((604_800, "d"), (86_400, "d"), (3_600, "h"), (60, "min"))',
    ),
]
