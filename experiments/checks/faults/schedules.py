"""Wrong changes of schedules, the step graph, the walk over it."""

FAULTS = [
    (
        "1f1b warms up with one forward too many on every stage",
        'warmup = n_microbatches if name == "gpipe" else min(n_microbatches, n_stages - 1 - stage)',
        'warmup = n_microbatches if name == "gpipe" else min(n_microbatches, n_stages - stage)',
    ),
    (
        "gpipe runs as 1f1b",
        'warmup = n_microbatches if name == "gpipe" else min(n_microbatches, n_stages - 1 - stage)',
        "warmup = min(n_microbatches, n_stages - 1 - stage)",
    ),
    (
        "dualpipe-v splits one backward fewer",
        "c if k <= s else c.replace",
        "c if k <= s + 1 else c.replace",
    ),
    (
        "zb-v idles before its weight gradients: they come last",
        'row.add("F0 I0 W0 F1 I1 W1", m + s + 1 - 2 * p)',
        'row.add("F0 I0 F1 I1 W0 W1", m + s + 1 - 2 * p)',
    ),
    (
        "an op does not wait for the second of its inputs",
        "        start = a if a > b else b\n        time = a0",
        "        start = a\n        time = a0",
    ),
    (
        "layers beyond an even division all go to the first chunks",
        "first = (n_chunks - extra) // 2",
        "first = 0",
    ),
    (
        "the weight half of a split backward is sent on as if it were the input half",
        'if kind == ("W" if split else "B"):',
        'if kind == "B":',
    ),
    (
        "gradients are reduced after every microbatch, resharded or not",
        "if stage.pending[chunk] > 0 and not self.options.reshard_after_forward:",
        "if False:",
    ),
    (
        "transfers out of a site do not queue behind each other",
        "queued = i == 0 and link in self.work.far_transfers",
        "queued = False",
    ),
    (
        "the exposed share of a stage's time counts its idle replicas as busy",
        "idle = 1.0 - busy / groups / times[:, None, :]",
        "idle = 1.0 - busy / times[:, None, :]",
    ),
]
