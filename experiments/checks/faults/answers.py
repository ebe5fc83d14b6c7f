"""Wrong changes of rank, place, sweep, compare and validate."""

FAULTS = [
    (
        "sweep keeps layouts a quarter over the memory",
        'fits = memory is None or memory["p_fits"] >= min_p_fits',
        'fits = memory is None or memory["gib"] <= 1.25 * memory["limit_gib"]',
    ),
    (
        "spares are taken from the slowest of them",
        "free = sorted(set(factor) - used, key=lambda n: (factor[n], n))",
        "free = sorted(set(factor) - used, key=lambda n: (-factor[n], n))",
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
        "share_error = standard_error(d - share * base) / level\n"
        "    return Difference(float(d.mean()), standard_error(d), share, share_error, n)",
        "apart = math.hypot(standard_error(mine), standard_error(base))\n"
        "    return Difference(float(d.mean()), apart, share, apart / level, n)",
    ),
    (
        "the replicas with the fewest slow nodes are dropped",
        'kept = np.sort(np.argsort(-slow, kind="stable")[before - n :])',
        'kept = np.sort(np.argsort(slow, kind="stable")[before - n :])',
    ),
    (
        "the worst placement is the first that was looked at",
        "worst = max(candidates, key=lambda c: c.values(case.objective, FIRST_BLOCKS).mean())",
        "worst = candidates[0]",
    ),
    (
        "layouts lose the batch: microbatches stay those of the job",
        '"dp": dp, "microbatches": batch // dp}',
        '"dp": dp, "microbatches": job.parallelism.microbatches}',
    ),
    (
        "settings of unequal work are compared by step, not by work",
        "return (self.least if self.ideal is None else self.ideal) / self.work",
        "return self.least if self.ideal is None else self.ideal",
    ),
]
