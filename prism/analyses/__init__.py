"""What is asked of a job, a model or recordings: how long, why, where, which, is it right.

Each has a module with its name, and the package that it is made of beside it.
"""

# modules that rooms above may import
FACE = (
    "compare", "estimate", "place", "placements.rows", "rank", "rankings.shares", "replay",
    "sweep", "sweeps.grid", "sweeps.rows", "timeline", "timelines.chrome", "timelines.table",
    "timelines.waits", "validate",
)  # fmt: skip
