"""How much of what tests draw at random: PRISM_CAMPAIGN=10 takes ten times as much."""

import os


def examples(n: int) -> int:
    """Examples of a run of the suite, more in a campaign."""
    return n * int(os.environ.get("PRISM_CAMPAIGN", "1"))


def some(values, step):
    """Every so many of what a test goes through; all of it in a campaign."""
    return list(values)[:: max(1, step // examples(1))]
