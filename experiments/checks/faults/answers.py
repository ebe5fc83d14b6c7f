"""Wrong changes of rank, place, sweep, compare and validate."""

FAULTS = [
    (
        "sweep keeps layouts a quarter over the memory",
        'fits = memory is None or memory["p_fits"] >= min_p_fits',
        'fits = memory is None or memory["gib"] <= 1.25 * memory["limit_gib"]',
    ),
    (
        "robust is chosen by p50",
        'names = {"fastest": "p50", "robust": "p95", "best": objective}',
        'names = {"fastest": "p50", "robust": "p50", "best": objective}',
    ),
    (
        "sweep's objective is ignored",
        'names = {"fastest": "p50", "robust": "p95", "best": objective}',
        'names = {"fastest": "p50", "robust": "p95", "best": "p50"}',
    ),
    (
        "spares replace the least slow nodes",
        "key=lambda n: (-worst_factor(slowness(problem, n)), n))",
        "key=lambda n: (worst_factor(slowness(problem, n)), n))",
    ),
    (
        "spares are taken from the slowest of them",
        "free.sort(key=lambda n: worst_factor(slowness(problem, n)))",
        "free.sort(key=lambda n: -worst_factor(slowness(problem, n)))",
    ),
    (
        "compare --fail-if-slower decides on the point estimate",
        'verdict = "slower" if low > limit else',
        'verdict = "slower" if row["relative"] > limit else',
    ),
    (
        "a comparison is the same wherever it is not different",
        'return "same" if -effect / (1.0 + effect) <= low and high <= effect else "open"',
        'return "same"',
    ),
    (
        "tests are not corrected for their number",
        "adjusted = holm(np.ravel(tests)).reshape(len(tests), -1)",
        "adjusted = np.ravel(tests).reshape(len(tests), -1)",
    ),
    (
        "first-order shares are total ones and the other way round",
        "return 0.5 * (d * e).mean(axis=1), 0.25 * (d * d + e * e).mean(axis=1)",
        "return 0.25 * (d * d + e * e).mean(axis=1), 0.5 * (d * e).mean(axis=1)",
    ),
    (
        "differences of programs are taken between independent runs",
        "return Difference(float(d.mean()), standard_error(d), n)\n\n\ndef standard_error",
        "return Difference(float(d.mean()), math.hypot(standard_error(a.values(measure, n)), "
        "standard_error(b.values(measure, n))), n)\n\n\ndef standard_error",
    ),
    (
        "dropping nodes is compared as if the batch stayed whole",
        'return Alternative("drop_nodes", label, step.program, kept / n)',
        'return Alternative("drop_nodes", label, step.program, 1.0)',
    ),
    (
        "the replicas with the fewest slow nodes are dropped",
        'kept = np.sort(np.argsort(-slow, kind="stable")[before - n :])',
        'kept = np.sort(np.argsort(slow, kind="stable")[before - n :])',
    ),
    (
        "place is content with what gains less than the tolerance",
        "if gain.mean <= 0.5 * case.tolerance * best.figure(measure):",
        "if gain.mean <= 50.0 * case.tolerance * best.figure(measure):",
    ),
    (
        "the worst placement is the first that was looked at",
        "worst = max(candidates, key=lambda c: c.arm.values(case.objective, FIRST_BLOCKS).mean())",
        "worst = candidates[0]",
    ),
    (
        "what a placement saves has the wrong sign",
        "saved = float(1.0 - then.mean() / now.mean())",
        "saved = float(then.mean() / now.mean() - 1.0)",
    ),
    (
        "the slack of a stage is what slowness costs anywhere",
        "growth = times / times[0] - 1.0 - free * GRID - ROUNDING",
        "growth = times / times[0] - 1.0 - ROUNDING",
    ),
    (
        "layouts lose the batch: microbatches stay those of the job",
        "sizes = (tp, cp, pp, vpp, dp, batch // dp)",
        "sizes = (tp, cp, pp, vpp, dp, job.parallelism.microbatches)",
    ),
    (
        "a frozen effect is at its mean, not its median",
        "out[:, 0] = sample_table(table, np.array([1 << 31], np.uint32))[0]",
        "out[:, 0] = 0.0",
    ),
    (
        "settings of unequal work are compared by step, not by work",
        "return (self.least if self.ideal is None else self.ideal) / self.work",
        "return self.least if self.ideal is None else self.ideal",
    ),
]
