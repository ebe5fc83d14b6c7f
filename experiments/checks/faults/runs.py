"""Wrong changes of the run model: failures, checkpoints, drift, progress, cost."""

FAULTS = [
    (
        "fail-slow episodes have their mean length as the median",
        "length = kind.mean_s * np.exp(sigma * z - 0.5 * sigma**2)",
        "length = kind.mean_s * np.exp(sigma * z)",
    ),
    (
        "a failure while a background checkpoint is written goes back to that one",
        "fresh &= lost >= c.write_s  # else",
        "fresh &= lost >= 0.0  # else",
    ),
    (
        "the hour of start is ignored by the daily wave",
        "wave = wave_sum(self.time + self.start_s, n, base, drift.diurnal_peak_s)",
        "wave = wave_sum(self.time, n, base, drift.diurnal_peak_s)",
    ),
    (
        "all causes of failures are equally frequent",
        "self.share = np.cumsum([k.share for k in kinds])",
        "self.share = np.cumsum([1.0 for k in kinds])",
    ),
    (
        "the fail-slow node is always the first",
        "kind.slowdowns[self.rng.integers(0, kind.slowdowns.size, n)]",
        "kind.slowdowns[np.zeros(n, int)]",
    ),
    (
        "a repair takes exactly its mean time",
        "repaired = at + self.rng.standard_exponential(runs.size) * self.repair_s",
        "repaired = at + self.repair_s",
    ),
    (
        "energy leaves out the time that a run stands still",
        'values["gpu_energy"] = power * job.world_size * runs.total',
        'values["gpu_energy"] = power * job.world_size * (runs.total - sum(\n          '
        '  runs.terms.get(x, 0.0) for x in ("restarts", "spares", "lost_work")))',
    ),
    (
        "detection of a failure takes no time",
        "found = ready[again] + detection",
        "found = ready[again]",
    ),
    (
        "no failure happens during a restart",
        "struck = self.clock[who] < end",
        "struck = np.zeros(end.shape, bool)",
    ),
    (
        "a failed node is a spare at once",
        "held[rows, first] = held[:, -1]",
        "held[rows, first] = at",
    ),
    (
        "clusters differ by the noise of their few simulated steps too",
        "means = grand + keep * (means - grand)",
        "means = grand + (means - grand)",
    ),
    (
        "time in evaluations counts as effective training",
        'PAUSES = ("stalls", "evaluations", "pauses",',
        'PAUSES = ("stalls", "pauses",',
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
        "return np.asarray(np.exp(model.model_error * z))",
        "return np.asarray(np.exp(0.5 * model.model_error * z))",
    ),
    (
        "a replaced node renews the whole cluster",
        "new = u[0] * self.model.n_nodes < 1.0",
        "new = u[0] < 1.0",
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
        "noise = std * np.sqrt(n * (1.0 + drift.cv**2)) * z[0]",
        "noise = std * n * np.sqrt(1.0 + drift.cv**2) * z[0]",
    ),
    (
        "congestion that changes too often to be followed evens out in a run",
        "np.maximum(0.0, spread) / average**3",
        "0.0 * spread / average**3",
    ),
]
