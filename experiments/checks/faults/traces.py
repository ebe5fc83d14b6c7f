"""Wrong changes of readers of recordings, each of which moves what a user is told."""

FAULTS = [
    (
        "microseconds of a table are read as milliseconds",
        'PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6,',
        'PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e3,',
    ),
    (
        "an activity belongs to the step in which it runs, not to that of its launch",
        "step_of(issued(table), steps)",
        'step_of(table["start"].to_numpy(), steps)',
    ),
    (
        "of a file with several ranks the first alone is read",
        "        ranks += found\n        of += [file] * len(found)",
        "        ranks += found[:1]\n        of += [file] * len(found[:1])",
    ),
    (
        "collectives of two ranks are matched though they do not overlap in time",
        "if begin < its_end and until - its_end <= near and of not in ranks:",
        "if until - its_end <= near and of not in ranks:",
    ),
    (
        "collectives are matched by the order of their ends, however far these are apart",
        "room = np.clip(_SHARE * (end[rows] - start[rows]), _WINDOW_S, _FAR_S)",
        "room = np.full(rows.size, 1e9)",
    ),
    (
        "the clocks of ranks are not brought together",
        "zip(1.0 + matched.drift, starts + matched.offset, strict=True)",
        "zip(np.ones(starts.size), starts, strict=True)",
    ),
    (
        "a transfer counts from the first arrival instead of the last",
        "last = np.full(collective.max(initial=-1) + 1, -np.inf)\n"
        "    np.maximum.at(last, collective[rows], start[rows])",
        "last = np.full(collective.max(initial=-1) + 1, np.inf)\n"
        "    np.minimum.at(last, collective[rows], start[rows])",
    ),
    (
        "collectives of different groups of ranks are matched with one another",
        'members.groupby(["op_kind", "group", "size"], sort=False)',
        'members.groupby(["op_kind", "size"], sort=False)',
    ),
    (
        "the elements of a message are counted as its bytes",
        "return number(args.in_elements) * element",
        "return number(args.in_elements)",
    ),
    (
        "a kernel's own name decides its class before the op that launched it",
        "kernel_class = by_op or by_name",
        'kernel_class = by_name if by_name != "elementwise" else by_op or by_name',
    ),
    (
        "launch gaps count idle time whether or not the host was late",
        "late = np.flatnonzero((idle > 0.0) & (issued[order][1:] > until))",
        "late = np.flatnonzero(idle > 0.0)",
    ),
    (
        "the span of a step adds the durations of overlapping streams",
        '    end = (known["start"] + known["duration"]).groupby(known["step"]).max()\n'
        '    return float((end - known["start"].groupby(known["step"]).min()).mean())',
        '    return float(known["duration"].groupby(known["step"]).sum().mean())',
    ),
    (
        "rows of a table of ops that come twice count twice",
        'again = table.frame.duplicated() & np.isfinite(ops["start"])',
        'again = table.frame.duplicated() & np.isnan(ops["start"])',
    ),
    (
        "a rank that is missing from a step of a pipeline trace goes unnoticed",
        "absent = n_ops == 0\n",
        "absent = n_ops < 0\n",
    ),
    (
        "a table without dp_rank takes all its ranks as one replica",
        '["rank"].rank("dense").astype(np.int64) - 1',
        '["rank"].rank("dense").astype(np.int64) * 0',
    ),
    (
        "the runs of a log that starts again are joined into one",
        'back = (rows["step"].diff() <= 0) & ~again',
        'back = (rows["step"].diff() <= -1e15) & ~again',
    ),
    (
        "of several choices of rows only the last counts",
        "keep &= equal[values.codes]",
        "keep = equal[values.codes]",
    ),
    (
        "a rate between lines of a log is per line, not per step",
        'return gap["clock"] / gap["step"]',
        'return gap["clock"]',
    ),
    (
        "the interval of means in a log is the least gap of its step numbers",
        "return int(sizes[np.argmax(counts)]) if sizes.size else 1",
        "return int(sizes[0]) if sizes.size else 1",
    ),
    (
        "totals of runs add means of several steps as single steps",
        "totals = pd.Series(times.seconds * times.mean_over).groupby(",
        "totals = pd.Series(times.seconds).groupby(",
    ),
    (
        "steps to be skipped are skipped once in all, not in each run",
        'place = (frame.groupby("run")["step"].rank(method="first") - 1.0) * recording.mean_over',
        'place = (frame["step"].rank(method="first") - 1.0) * recording.mean_over',
    ),
    (
        "samples of a step over a rate of samples are taken as one",
        'entries["seconds"] = int(batch[1]) / entries["seconds"]',
        'entries["seconds"] = 1.0 / entries["seconds"]',
    ),
    (
        "the step factor of a fitted trace is drawn from all steps alike after conditioning",
        "return replace(model, weight=np.diff(below, axis=1).mean(axis=0))",
        "return replace(model, weight=np.full(n, 1.0 / n))",
    ),
    (
        "drawn ranks of a fitted trace have the spread of the op kind that varies most",
        "values[body] = model.rank_distribution.ppf(middle) ** float(model.rank_power[kind])",
        "values[body] = model.rank_distribution.ppf(middle)",
    ),
]
