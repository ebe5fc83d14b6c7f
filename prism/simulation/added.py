"""Effects that add a time to every step of the job: what one of them says of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from prism.jobs.jobspec.effects import WORDS

if TYPE_CHECKING:
    import xarray as xr

    from prism.simulation.effects.effect import Pick

Array = NDArray[np.float64]
Words = NDArray[np.uint32]


class Added(ABC):
    """A time added to every step; a dataclass of figures, none where the job has none of it."""

    name: ClassVar[str]
    stream: ClassVar[int]  # of its draws: the next that no other has
    part: ClassVar[str]  # its row of `time_loss`

    def __init_subclass__(cls) -> None:
        cls.part = WORDS[cls.name].name.replace(" ", "_")

    @classmethod
    @abstractmethod
    def resolve(cls, pick: Pick) -> Self | None:
        """Return what the job or its library says."""

    @abstractmethod
    def draw(self, words: Words, steps: Array) -> Array:
        """Seconds added to steps [block, lane], from words[4, block, lane]."""

    @abstractmethod
    def held(self) -> Self:
        """Return it with the same for every step."""

    def moments(self) -> tuple[float, float] | None:
        """Mean [s] and CV [1]; None where they follow from the steps it is added to."""
        return None

    def doubts(self, dataset: xr.Dataset) -> Iterator[str]:
        """Say what a user should know before trusting an estimate."""
        yield from ()
