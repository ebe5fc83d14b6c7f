"""Wrong changes to models made of traces, to replays, timelines and where the time goes."""

FAULTS = [
    (
        "replicas no longer wait for each other in a stage's collectives when a trace is replayed",
        'return self.scope.name in ("stage", "world")',
        'return self.scope.name in ("world",)',
    ),
    (
        "the published straggler-free step puts computing ops at their median, not their mean",
        "ideal[nodes] = durations[nodes].mean() if local else np.median(durations[nodes])",
        "ideal[nodes] = np.median(durations[nodes])",
    ),
    (
        "a straggler-free step of the same work keeps a share of its slow workers' slowness",
        "    mean = model.mean.mean(axis=1)[:, None, None]",
        "    mean = np.nan_to_num(finite_mean(simple.durations, (1, 2)))[:, None, None]",
    ),
    (
        "a replay gives every worker the slowdown of its whole stage",
        '("worker", r, s): (stage_of == s) & (replica_of == r) for r, s in places',
        '("worker", r, s): (stage_of == s) & (replica_of >= 0) for r, s in places',
    ),
    (
        "a kernel trace's ideal step takes each kernel at the median of its steps, not the mean",
        "        mean = finite_mean(graph.durations, axis=(1, 2))\n        mean = steady",
        "        mean = np.nanmedian(graph.durations, axis=(1, 2))\n        mean = steady",
    ),
    (
        "an effect's share in a fit is of standard deviations, not of variances",
        '"share": sum(r.std**2 for r in rows.values()) / max(sum(totals.values()), 1e-300),',
        '"share": sum(r.std for r in rows.values())\n            '
        "/ sum(s.std for spreads in kinds.values() for s in spreads.values()),",
    ),
    (
        "persistent differences between workers are reported and drawn as an effect of the step",
        '    mean, rank, parts["rank"] = estimates.ranks(position)',
        '    mean, rank, parts["rank"] = estimates.ranks(position)\n'
        '    parts["rank"], parts["step"] = parts["step"], parts["rank"]',
    ),
    (
        "loadings of an effect are inverted: ops that follow it most are said to follow it least",
        "loadings = signed / first if first else np.ones(signed.size)",
        "known = signed != 0.0\n"
        "    loadings = np.ones(signed.size)\n"
        "    if first:\n"
        "        loadings = np.divide(first, signed, out=np.zeros(signed.size), where=known)",
    ),
    (
        "a slow worker's slowdown counts from the mean of all workers, itself among them",
        "    away = level - finite_mean(np.where(body, level, np.nan), 1)[:, None]",
        "    away = level - finite_mean(level, 1)[:, None]",
    ),
    (
        "a step's compute is that of its median stage, not the mean over stages",
        "    work, most = float(ideal.busy.mean()), int(ideal.busy.argmax())",
        "    work, most = float(np.median(ideal.busy)), int(ideal.busy.argmax())",
    ),
    (
        "the optimizer of a traced step counts to its compute too, and is missing from the bubble",
        "return _Ideal(whole, float(optimizer.max()), busy - optimizer, idle, pipelined)",
        "return _Ideal(whole, float(optimizer.max()), busy, idle, pipelined)",
    ),
    (
        "what one group's communication exposes is counted again in the next group's",
        '        parts[f"exposed_{name}" if name in GROUPS else name] = left - rest',
        '        parts[f"exposed_{name}" if name in GROUPS else name] = whole - rest',
    ),
    (
        "launch gaps are where the host was early, not late",
        "(issued[order][1:] > until)",
        "(issued[order][1:] < until)",
    ),
    (
        "the mean of a collective's kernel holds its waiting for other ranks",
        'duration = np.where(matched, transfer, ops["duration"])',
        'duration = ops["duration"].to_numpy().copy()',
    ),
    (
        "a kernel trace's step lasts from its begin on the host, not from the step before's end",
        "    begin, end = np.array([known[number] for number in steps]).T",
        "    begin, end = np.array([known[number] for number in steps]).T\n"
        "    begin = np.array([min(views[n, r].begin for r in ranks) for n in steps])",
    ),
    (
        "a kernel trace's step lasts from its own first start, not from the end of the one before",
        "    found = [(k, known[k - 1], known[k]) for k in numbers",
        '    own = of_step["start"]\n    found = [(k, own[k], known[k]) for k in numbers',
    ),
    (
        "the first step of a recording counts, from its first start",
        "    found = [(k, known[k - 1], known[k]) for k in numbers",
        '    known.setdefault(numbers[0] - 1, float(of_step["start"].iloc[0]))\n'
        "    found = [(k, known[k - 1], known[k]) for k in numbers",
    ),
    (
        "a recording's unfinished last step counts",
        "    if unfinished is not None:",
        "    if unfinished is not None and unfinished < 0:",
    ),
    (
        "a host's lead stays as it was recorded when kernels or host change",
        "    lead = steady(model.nodes, mean.mean(axis=1), model.most_lead)",
        "    lead = mean.mean(axis=1)",
    ),
    (
        "what the host waits for a full queue counts as its own time",
        "max(0.0, until - since - (queued[there] - counted)) * share",
        "max(0.0, until - since) * share",
    ),
    (
        "an optimizer's annotation ends a step where it begins",
        "(ranges.end if is_update else ranges.start)[rows]",
        "ranges.start[rows]",
    ),
    (
        "what has no launch belongs to the step that its start lies in",
        'np.asarray(before.where(~never, table["start"]))',
        'np.asarray(table["launch"].fillna(table["start"]))',
    ),
    (
        "the host's time after its last call of a step is lost",
        "                edges = [(host, 0.0), *((device[j], 0.0) for j in awaited)]",
        "                last_call = self.rows[host].edges[0][0] if view.sync[i] == END else host\n"
        "                edges = [(last_call, 0.0), *((device[j], 0.0) for j in awaited)]",
    ),
    (
        "a model's host may lead its device without end: its queue has no depth",
        "lead = np.maximum(ends[before, 0, 0] - step_times(nodes, ends), -most_lead)",
        "lead = ends[before, 0, 0] - step_times(nodes, ends)",
    ),
    (
        "a timeline shows the replicate beside the one nearest the percentile",
        "        replicate = int(np.argmin(away))  # the first of equals",
        "        replicate = int(np.argmin(away)) ^ 1",
    ),
    (
        "a timeline's critical path follows the earliest of what an op waited for, not the latest",
        "            if start > best.start or best.op < 0:",
        "            if start < best.start or best.op < 0:",
    ),
    (
        "a timeline counts what one row waits for another replica as the pipeline's bubble",
        '            add(begin, "replica", ran.op, ran.replica)',
        '            add(begin, "bubble", ran.op, ran.replica)',
    ),
    (
        "slices of a timeline's file last a thousand times too short",
        '"dur": (event.end - event.begin) / 1e3,',
        '"dur": (event.end - event.begin) / 1e6,',
    ),
]
