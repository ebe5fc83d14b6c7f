"""Wrong changes of what is read: traces, logs, columns, jobs."""

FAULTS = [
    (
        "ranks of a trace keep their own clocks",
        "(rank.base_time_ns - first.base_time_ns) * 1e-9 + (rank.origin_us",
        "0.0 * (rank.origin_us",
    ),
    (
        "times of MLPerf logs are a thousandth",
        'return _plain(event.get("time_ms")) * 1e-3, _plain(count)',
        'return _plain(event.get("time_ms")) * 1e-6, _plain(count)',
    ),
    (
        "nccl-tests' microseconds are milliseconds",
        "seconds = 1e-6 * number_at(time[place])",
        "seconds = 1e-3 * number_at(time[place])",
    ),
]
