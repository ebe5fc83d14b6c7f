"""What a check of a job works on, and how it says what it found.

The checks are generators of problems; `prism.jobs.jobspec.messages` puts file and line to them.
"""

from typing import NamedTuple

from prism.jobs.jobspec.blocks import (
    ClusterBlock,
    ModelBlock,
    ParallelismBlock,
    RunBlock,
    VariabilityBlock,
)

Problem = tuple[str, ...]
"""A mistake: the words, then the keys that cause it, the likeliest first."""


class Blocks(NamedTuple):
    """The blocks of a job, each valid by itself."""

    model: ModelBlock
    parallelism: ParallelismBlock
    cluster: ClusterBlock
    variability: VariabilityBlock
    run: RunBlock


def unmodelled(what: str, nearest: str, *keys: str) -> Problem:
    """Say that a legal setting is not modelled yet, and which one comes nearest."""
    return f"{what} is not modelled yet; the nearest supported setting: {nearest}", *keys


def undivided(n: int, name: str, whole: int, *keys: str) -> Problem:
    """Say that `n` does not divide a number, and what does."""
    divisors = ", ".join(str(k) for k in range(1, whole + 1) if whole % k == 0)
    return f"{n} does not divide {name} = {whole}; take one of {divisors}", *keys
