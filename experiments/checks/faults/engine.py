"""Wrong changes of schedules, the step graph, the lowering and the engine."""

FAULTS = [
    (
        "stages of zb-h1 do not put off their weight gradients",
        'return _put_off_weights(row, stage) if name == "zb-h1" else row',
        'return _put_off_weights(row, 0) if name == "zb-h1" else row',
    ),
    (
        "interleaved stages warm up with one microbatch less for each stage behind them",
        "warmup = 2 * (n_stages - 1 - stage) + (n_chunks - 1) * n_stages",
        "warmup = (n_stages - 1 - stage) + (n_chunks - 1) * n_stages",
    ),
    (
        "the idle share of a schedule is over the stages' own ends, not over the step's",
        '"idle_fraction": 1.0 - busy / (max(ends) * len(actions)),',
        '"idle_fraction": 1.0 - busy / sum(ends),',
    ),
    (
        "a blocking transfer does not wait for the stage behind",
        "low, preds = min(meeting.stages), a.last + b.last",
        "low, preds = min(meeting.stages), a.last",
    ),
    (
        "an async transfer holds up the stage that sends it",
        "self.arrived[action.kind, route.virtual, action.microbatch] = end",
        "self.arrived[action.kind, route.virtual, action.microbatch] = end\n"
        "        self.stages[s].last = [end] * len(self.stages[s].last)",
    ),
    (
        "one gather runs ahead, whatever prefetch says",
        "ahead = self.options.prefetch if self.options.overlap else 0",
        "ahead = 1 if self.options.overlap else 0",
    ),
    (
        "gathers and reductions of one group do not take turns",
        "before = stage.reduce_stream, stage.gathered.get(collective.group, START)",
        "before = (stage.reduce_stream,)",
    ),
    (
        "without overlap gradients are still reduced beside the backward",
        "        if self.work.hides_gradients:\n            self._lay_reduces(s)",
        "        self._lay_reduces(s)",
    ),
    (
        "the gradient norm is reduced stage by stage, so that no optimizer waits for all stages",
        "done = [self._collective(0, done, self.work.grad_norm_reduce)] * len(done)",
        "norm = self.work.grad_norm_reduce\n"
        "            done = [self._collective(s, [d], norm) for s, d in enumerate(done)]",
    ),
    (
        "shard groups of hsdp wait for each other at every gather",
        'is_global=collective.group != "shard", stage=s)',
        "is_global=True, stage=s)",
    ),
    (
        "an op of a group has the tail of one rank's, not of the slowest's",
        "largest = [largest_of(distribution_of(s.noise), n_members) for s, _ in op.segments]",
        "largest = [distribution_of(s.noise) for s, _ in op.segments]",
    ),
    (
        "a heavy tail of kernels makes the slowest of a group no later",
        "    if n == 1 or distribution.std == 0.0:\n        return 1.0, 1.0",
        "    if n >= 1 or distribution.std == 0.0:\n        return 1.0, 1.0",
    ),
    (
        "the own noise of kernels does not delay a group that waits for its slowest rank",
        "return top + stretch[0] * later, stretch[1] * variance",
        "return top, stretch[1] * variance",
    ),
    (
        "all microbatches of a replica are equally long",
        'One a microbatch."""\n        return graph.microbatch',
        'One a microbatch."""\n        return 0 * graph.microbatch',
    ),
    (
        "the ideal step keeps its slow nodes",
        "tables=np.full_like(ranks.tables, -1), factor=np.ones_like(ranks.factor)",
        "tables=np.full_like(ranks.tables, -1)",
    ),
    (
        "of the replicas that are not simulated a step waits for one of each level, not for all",
        "total += count[i] * _log_below(sample, mean[i], std[i], middle)",
        "total += _log_below(sample, mean[i], std[i], middle)",
    ),
    (
        "with dependence none a large group is congested no more often than one leaf switch",
        "hit = u < 2.0**32 * (1.0 - (1.0 - links.probability) ** n_leaves)",
        "hit = u < 2.0**32 * links.probability",
    ),
    (
        "like kernels of an op vary together, not each by itself",
        "return self.times * (self.seconds * self.distribution.std) ** 2",
        "return (self.times * self.seconds * self.distribution.std) ** 2",
    ),
    (
        "the idle share of stages is over replicas where each rank is simulated",
        "groups = program.graph.n_replicas * program.n_members",
        "groups = program.graph.n_replicas",
    ),
    (
        "a group of many GPUs stalls no more often than one",
        "probability[s] = -np.expm1(-rate * entities * busy_s)",
        "probability[s] = -np.expm1(-rate * busy_s)",
    ),
]
