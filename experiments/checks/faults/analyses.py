"""Wrong changes in rank, place, sweep, compare and validate."""

FAULTS = [
    # rank
    (
        "rank swaps first-order and total-order shares",
        '("first_order", orders.first, s.first), ("total_order", orders.total, s.total)',
        '("first_order", orders.total, s.total), ("total_order", orders.first, s.first)',
    ),
    (
        "shares of a ranking are of the standard deviation, not of the variance",
        "return Orders(first / whole, total / whole, np.full(first.size, np.nan))",
        "return Orders(np.sqrt(np.abs(first) / whole), np.sqrt(total / whole),"
        " np.full(first.size, np.nan))",
    ),
    (
        "a frozen cause is held at its mean, not at its median",
        "sample_table(self.tables[i], np.array([1 << 31], np.uint32))[0]",
        "sample_table(self.tables[i], np.linspace(0, 2**32 - 1, 4096).astype(np.uint32)).mean()",
    ),
    (
        "frozen congestion is held at the quiet level, not at the mean",
        "return replace(program, links=engine.NO_LINKS)",
        "return replace(program, links=program.links._replace(congested=program.links.quiet))",
    ),
    (
        "causes are sorted by their first order",
        'rows.sort(key=lambda row: -row["total_order"])',
        'rows.sort(key=lambda row: -row["first_order"])',
    ),
    (
        "a class made faster by a share has its speed, not its time, changed by it",
        "Treatment(factor=1.0 - speed_up)",
        "Treatment(factor=1.0 / (1.0 + speed_up))",
    ),
    (
        "intervals of shares and savings are of 90 %, not of 95 %",
        "LEVEL = 0.95\nTAIL = 0.95",
        "LEVEL = 0.90\nTAIL = 0.95",
    ),
    (
        "covariance shares of the critical path are of the mean",
        "_normalise(mean), _normalise(products.mean(axis=0)), bounds[0],",
        "_normalise(mean), _normalise(mean), bounds[0],",
    ),
    # place
    (
        "spares replace the least slow nodes",
        "slow = sorted(problem.slow & used, key=lambda n: (-factor[n], n))",
        "slow = sorted(problem.slow & used, key=lambda n: (factor[n], n))",
    ),
    (
        "differences of placements and of settings are not of the same cluster draws",
        "mine, base = a.values(measure, n), b.values(measure, n)",
        "mine, base = a.values(measure, n), np.roll(b.values(measure, n), 1)",
    ),
    (
        "the slack of a stage leaves out what its beginning and end always cost",
        "growth = times / times[0] - 1.0 - free * GRID - ROUNDING",
        "growth = times / times[0] - 1.0 - ROUNDING",
    ),
    (
        "nodes are moved for gains within the tolerance",
        "if gain.mean <= 0.5 * case.tolerance * best.figure(measure):",
        "if gain.mean <= 0.0:",
    ),
    (
        "the probability of a correct choice counts rivals within the tolerance as better",
        "delta = tolerance * best.figure(measure)\n    rivals",
        "delta = -tolerance * best.figure(measure)\n    rivals",
    ),
    (
        "placements are chosen by p50 whatever the objective",
        "measure = case.objective\n    budget",
        'measure = "p50"\n    budget',
    ),
    (
        "a job without its slow nodes counts as doing the whole batch",
        'return Alternative("drop_nodes", label, step.program, kept / n)',
        'return Alternative("drop_nodes", label, step.program)',
    ),
    (
        "what a placement saves is over its own time, not over the current one's",
        "saved, half = 0.0 - apart.share, apart.half_widths[1]",
        "saved, half = 0.0 - apart.share / (1.0 + apart.share), apart.half_widths[1]",
    ),
    # sweep
    (
        "sweep --layouts keeps layouts that need a quarter more than the memory",
        "if memory is not None and all_layouts and not (own or fits):",
        "if memory is not None and all_layouts and not (own or fits) and (\n"
        '                memory["gib"] > 1.25 * memory["limit_gib"]\n            ):',
    ),
    (
        "the robust setting of a sweep is chosen by p50",
        '{**CHOICES, "best": of_step(objective)}.items()',
        '{**CHOICES, "robust": "p50", "best": of_step(objective)}.items()',
    ),
    (
        "rows of a sweep are sorted by p95 whatever the objective",
        "key=lambda p: (not p.fits, p.of_run(objective), p.figure(measure))",
        'key=lambda p: (not p.fits, p.of_run(objective), p.figure("p95"))',
    ),
    (
        "settings that do unequal work are compared step by step",
        "return steps / self.work",
        "return steps",
    ),
    (
        "the frontier of a sweep is of the mean and p95",
        'both = np.array([[rows[i][f"{m}_same_work"] for m in CHOICES.values()] for i in final])',
        'both = np.array([[rows[i][f"{m}_same_work"] for m in ("mean", "p95")] for i in final])',
    ),
    # compare
    (
        "compare --fail-if-slower decides on the point estimate",
        'verdict = "slower" if low > limit else',
        'verdict = "slower" if row["relative"] > limit else',
    ),
    (
        "p-values of a comparison are one-sided",
        "p_value = 2.0 * t.sf(np.abs(ratio) / error, dof)",
        "p_value = t.sf(np.abs(ratio) / error, dof)",
    ),
    (
        "the detectable difference leaves out the power",
        "np.expm1(error * (limit + t.isf(1.0 - POWERS[0], dof)))",
        "np.expm1(error * limit)",
    ),
    (
        "results of one seed are compared as if their draws were independent",
        'return a, b, "cluster", notes',
        "return a, b, None, notes",
    ),
    # validate
    (
        "the p-value of steps counts measured steps that remember each other as independent",
        "null = clusters_anew(drawn, max(1, round(n)), call.context.seed, error)",
        "null = clusters_anew(drawn, times.seconds.size, call.context.seed, error)",
    ),
    (
        "the floor of a validation is that of the prediction",
        "measures.floor(case.training, case.measured)",
        "measures.floor(case.predicted, case.measured)",
    ),
    (
        "errors of percentiles have the opposite sign",
        "float(np.quantile(y, percentile / 100.0)), float(np.quantile(x, percentile / 100.0))",
        "float(np.quantile(x, percentile / 100.0)), float(np.quantile(y, percentile / 100.0))",
    ),
    (
        "the aligned KS distance divides both samples by one median",
        "ks_statistic(np.float32(x / middle_x), np.float32(y / middle_y))",
        "ks_statistic(np.float32(x / middle_x), np.float32(y / middle_x))",
    ),
    (
        "first-half trains on every second step",
        "part = np.arange(n // 2)",
        "part = np.arange(1, n, 2)",
    ),
]
