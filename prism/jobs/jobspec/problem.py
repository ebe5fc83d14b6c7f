"""What a check of a job works on, and how it says what it found.

`prism.jobs.jobspec.check` and `prism.jobs.jobspec.runcheck` hold the checks;
`prism.jobs.jobspec.messages` puts file and line to what they find.
"""

from dataclasses import dataclass
from typing import NamedTuple

from prism.jobs.jobspec.blocks import (
    ClusterBlock,
    ModelBlock,
    ParallelismBlock,
    RunBlock,
    VariabilityBlock,
)


class Problem(NamedTuple):
    """A mistake: what it is called, the keys that cause it (the likeliest first), the words."""

    label: str
    keys: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Blocks:
    """The blocks of a job; one that was not valid by itself is None."""

    model: ModelBlock | None
    parallelism: ParallelismBlock | None
    cluster: ClusterBlock | None
    variability: VariabilityBlock | None
    run: RunBlock | None


def unmodelled(label: str, what: object, nearest: str, *keys: str) -> Problem:
    """Say that a legal setting is not modelled yet, and which one comes nearest."""
    text = f"{what} is not modelled yet; the nearest supported setting: {nearest}"
    return Problem(label, keys or (label,), text)
