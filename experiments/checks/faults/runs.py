"""Wrong changes of the run model: failures, checkpoints, drift, progress, cost."""

FAULTS = [
    (
        "fail-slow episodes have their mean length as the median",
        "np.exp(sigma * rng.standard_normal(runs.size) - 0.5 * sigma**2)",
        "np.exp(sigma * rng.standard_normal(runs.size))",
    ),
    (
        "a failure while a background checkpoint is written goes back to that one",
        "np.minimum(self.clock[FAILURE], ends) - self.time - c.write_s",
        "np.minimum(self.clock[FAILURE], ends) - self.time",
    ),
    (
        "the hour of start is ignored by the daily wave",
        "wave = wave_sum(self.time + self.start_s, n, base, drift.diurnal_peak_s)",
        "wave = wave_sum(self.time, n, base, drift.diurnal_peak_s)",
    ),
    (
        "all causes of failures are equally frequent",
        "np.cumsum([k.share for k in fail.kinds])",
        "np.cumsum([1.0 for k in fail.kinds])",
    ),
    (
        "the fail-slow node is always the first",
        "rng.choice(kind.slowdowns, runs.size)",
        "np.full(runs.size, kind.slowdowns[0])",
    ),
    (
        "a repair takes exactly its mean time",
        "at + rng.standard_exponential(runs.size) * repair_s",
        "at + np.ones(runs.size) * repair_s",
    ),
    (
        "energy leaves out the time that a run stands still",
        'values["gpu_energy"] = power * job.world_size * runs.total',
        'values["gpu_energy"] = power * job.world_size * (runs.total - sum(\n          '
        '  runs.terms.get(x, 0.0) for x in ("restarts", "spares", "lost_work")))',
    ),
    (
        "detection of a failure takes no time",
        "found, gone, wait = at + detection, nodes > 0.0",
        "found, gone, wait = at, nodes > 0.0",
    ),
    (
        "no failure happens during a restart",
        "until = np.minimum(found + wait + restart, np.maximum(clock[runs], at))",
        "until = found + wait + restart\n"
        "        late = failed | (clock[runs] < until)\n"
        "        clock[runs] = np.where(late, until + again - at, clock[runs])",
    ),
    (
        "a failed node is a spare at once",
        "np.broadcast_to(repaired[own][:, None]",
        "np.broadcast_to(at[own][:, None]",
    ),
    (
        "clusters differ by the noise of their few simulated steps too",
        "means = grand + keep * (means - grand)",
        "means = grand + (means - grand)",
    ),
    (
        "time in evaluations counts as effective training",
        '    "stalls",\n    "evaluations",\n    "pauses",',
        '    "stalls",\n    "pauses",',
    ),
    (
        "the best checkpoint interval is that of half the write time",
        "return float((1.0 + lambertw(-np.exp(-x - 1.0)).real) / distribution.rate_per_s)",
        "return float((1.0 + lambertw(-np.exp(-x / 2 - 1.0)).real) / distribution.rate_per_s)",
    ),
    (
        "failures come per GPU, not per node",
        "return self.per_1000_node_days * self.n_nodes / 1000.0 / DAY_S",
        "return self.per_1000_node_days * 8 * self.n_nodes / 1000.0 / DAY_S",
    ),
    (
        "the model's error is half as wide in a run",
        "self.own * np.exp(model.model_error * wrong)",
        "self.own * np.exp(0.5 * model.model_error * wrong)",
    ),
    (
        "a replaced node renews the whole cluster",
        "rng.random(int(gone.sum())) * self.model.n_nodes < nodes[gone]",
        "rng.random(int(gone.sum())) < nodes[gone]",
    ),
    (
        "a run's price counts nodes for GPUs",
        'values["cost"] = runs.total / 3600.0 * job.world_size * call["price"]',
        'values["cost"] = runs.total / 3600.0 * job.n_nodes * call["price"]',
    ),
    (
        "the finish of a run in progress leaves out its elapsed time",
        "runs, total=runs.total + elapsed_s, marks=runs.marks + elapsed_s,",
        "runs, total=runs.total, marks=runs.marks + elapsed_s,",
    ),
    (
        "a fail-slow node is found but never replaced",
        "found = kind.replaced & (length > kind.detection_s)",
        "found = np.zeros(length.shape, bool)",
    ),
    (
        "the noise of steps grows with their number, not its root",
        "std * np.sqrt(n) * self.rng.standard_normal(CHUNK)",
        "std * n * self.rng.standard_normal(CHUNK)",
    ),
    (
        "congestion that changes too often to be followed evens out in a run",
        "np.maximum(0.0, spread) / average**3",
        "0.0 * spread / average**3",
    ),
]
