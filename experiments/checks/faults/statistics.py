"""Wrong changes of summaries, intervals, distances."""

FAULTS = [
    (
        "the 95 % interval of p95 is that of 90 %",
        "reach = float(stdtrit(counts.size - 1, 0.975)) * error",
        "reach = float(stdtrit(counts.size - 1, 0.95)) * error",
    ),
    (
        "the interval of the mean is that of many cluster draws",
        "reach = float(stdtrit(n - 1, 0.95)) * error",
        "reach = 1.645 * error",
    ),
    (
        "the error of the mean takes steps for independent",
        "return float(np.sqrt(n / (n - 1) * (deviations**2).sum()) / counts.sum())",
        "return float(np.sqrt(n / (n - 1) * (deviations**2).sum()) / counts.sum() / 8)",
    ),
    (
        "slow steps are counted against the median",
        "slower = [float((dataset.step_time > t * dataset.ideal_step_time).mean())",
        "slower = [float((dataset.step_time > t * dataset.step_time.median()).mean())",
    ),
    (
        "the error of exposed communication takes both runs for independent",
        "error = float(apart.std(ddof=1)) / mean / math.sqrt(n) if n > 1 else math.nan",
        "error = math.hypot(float(whole.std()), float(rest.std())) / mean / math.sqrt(n)",
    ),
    (
        "the spread between clusters holds the noise within them",
        "return math.sqrt(max(0.0, (found - within) / effective))",
        "return math.sqrt(max(0.0, found / effective))",
    ),
    (
        "allocations differ by the noise of their few steps too",
        "keep = between / seen if between and seen else 0.0",
        "keep = 1.0",
    ),
    (
        "the chance of being done counts runs that are late",
        "probability = float((runs <= deadline).mean())",
        "probability = float((runs > deadline).mean())",
    ),
    (
        "the finish date is the median's whatever probability was asked",
        "seconds = float(np.quantile(runs, probability))",
        "seconds = float(np.quantile(runs, 0.5))",
    ),
    (
        "the errors of mean and p95 of a run leave out the model's",
        'out["mean_se"] = math.hypot(out["mean_se"], std / math.sqrt(runs.size))',
        'out["mean_se"] = out["mean_se"]',
    ),
    (
        "the distance of distributions is of medians brought together by their means",
        "middle_x, middle_y = float(np.median(x)), float(np.median(y))",
        "middle_x, middle_y = float(x.mean()), float(np.median(y))",
    ),
    (
        "an error of prediction has the wrong sign",
        "return found / wanted - 1.0 if wanted != 0.0 else None",
        "return 1.0 - found / wanted if wanted != 0.0 else None",
    ),
    (
        "the floor compares medians",
        "p95 = _relative(float(np.quantile(y, 0.95)), float(np.quantile(x, 0.95)))",
        "p95 = _relative(float(np.quantile(y, 0.5)), float(np.quantile(x, 0.5)))",
    ),
    (
        "correlated steps count as independent",
        "    return n / _inflation(raw, pairs, lag, n)",
        "    return float(n)",
    ),
    (
        "p-values of few resamples may be 0",
        "return float((1 + np.count_nonzero(values >= ks)) / (1 + values.size))",
        "return float(np.count_nonzero(values > ks) / values.size)",
    ),
    (
        "variance shares of terms are of their own variance alone",
        "products = off * np.where(wrong, off, (off @ ~wrong)[:, None])",
        "products = off * off",
    ),
    (
        "the parts of the time of a step leave the optimizer in the bubble",
        "rest = ideal.whole - ideal.optimizer - float(ideal.busy[most] + ideal.idle[most])",
        "rest = ideal.whole - float(ideal.busy[most] + ideal.idle[most])",
    ),
]
