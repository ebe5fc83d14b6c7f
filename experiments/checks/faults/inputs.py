"""Wrong changes of what is read: traces, logs, columns, jobs."""

FAULTS = [
    (
        "ranks of a trace keep their own clocks",
        "np.asarray(base * 1e-9 + origins * 1e-6)",
        "np.asarray(0.0 * base + origins * 1e-6)",
    ),
    (
        "times of MLPerf logs are a thousandth",
        'return _plain(event.get("time_ms")) * 1e-3, _plain(count)',
        'return _plain(event.get("time_ms")) * 1e-6, _plain(count)',
    ),
    (
        "nccl-tests' microseconds are milliseconds",
        "run.time[size, place] = 1e-6 * float(time_us)",
        "run.time[size, place] = 1e-3 * float(time_us)",
    ),
]
