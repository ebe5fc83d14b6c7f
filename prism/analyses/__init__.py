"""What is asked of a job, a model or recordings: how long, why, where, which, is it right.

Each has a module with its name, and the package that it is made of beside it.
"""

# modules that rooms above may import; *: each analysis
FACE = (
    "*", "comparisons.classes", "comparisons.profile", "placements.rows", "rankings.shares",
    "sweeps.grid", "sweeps.rows", "timelines.perfetto", "timelines.waits",
)  # fmt: skip
