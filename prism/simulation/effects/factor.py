"""Factors on ops that several have in common: what one of them says of itself."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from prism.cluster.nodemap import Placement
from prism.distributions.distribution import Distribution, constant
from prism.simulation.effects.effect import FactorEffect, Pick
from prism.simulation.effects.rank import RankSpread
from prism.simulation.program import Tables
from prism.workload.kernels import Kernel
from prism.workload.opgraph import StepGraph
from prism.workload.work import Collective


class Laying(NamedTuple):
    """What a job's factors are laid into."""

    tables: Tables
    placement: Placement  # the default order
    rank: RankSpread


@dataclass(frozen=True)
class Factor(ABC):
    """A factor on ops, and what it is drawn from: by default it is 1."""

    name: ClassVar[str]
    stream: ClassVar[int]  # of its draws: the next that no other has
    by_replica: ClassVar[bool] = True  # each has draws of its own
    effect: ClassVar[type[FactorEffect]] = FactorEffect  # what a ranking sees of it
    distribution: Distribution = constant()

    @classmethod
    @abstractmethod
    def resolve(cls, pick: Pick) -> Self:
        """Return what the job or its library says."""

    @abstractmethod
    def loading(self, op_kind: str, part: Kernel | Collective) -> float:
        """Exponent with which a part of an op of that kind follows it; 0: not at all."""

    @abstractmethod
    def draws(self, graph: StepGraph) -> NDArray[np.int32]:
        """Return the number of each op's draw [op]: equal ones are one, -1 is none."""

    def table(self, loading: float, laying: Laying) -> int:
        """Index of its quantile table under a loading; -1 where it is off."""
        return laying.tables.optional(self.distribution, loading, self.name)
