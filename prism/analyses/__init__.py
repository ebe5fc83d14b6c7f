"""What is asked of a job, a model or recordings: how long, why, where, which, is it right.

Each has a module with its name, and the package that it is made of beside it.
"""

# what rooms above may import, by module
FACE = {
    "compare": "Comparison FALSE_ALARM compare",
    "comparisons.classes": "COPIES ClassTimes IDLE measured_times",
    "comparisons.profile": "ClassComparison has_links",
    "estimate": "estimate",
    "explain": "Explanation explain",
    "kernel": "KernelRates kernel_result",
    "place": "place",
    "placements.placing": "MOST_SLACK NO_SLACK Placing numbered same_work with_place",
    "rank": "CAUSES Ranking rank",
    "rankings.shares": "HALF_WIDTH WIDE_HALF_WIDTH",
    "replay": "FIGURES Replay SPANS replay",
    "sweep": "sweep",
    "sweeps.grid": "parse_vary",
    "sweeps.swept": "CHOICES Sweep key_name label",
    "timeline": "Timeline timeline",
    "timelines.perfetto": "to_perfetto",
    "timelines.waits": "CAUSES",
    "validate": "Validation validate",
    "watch": "Forecast Watch",
}  # fmt: skip
