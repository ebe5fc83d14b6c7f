"""Congestion of leaf switches, on or off: a transfer is hit while any leaf it touches is."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.cluster.groups import Ends
from prism.cluster.linkcongestion import congested_links
from prism.cluster.nodemap import Placement
from prism.common.errors import PrismError
from prism.simulation.effects.effect import Effect, HeldTables, Pick
from prism.simulation.program import Program


class LeafCongestion(NamedTuple):
    """How often leaves are congested, and what that does to a transfer."""

    probability: float = 0.0  # share of steps in which a leaf is congested
    factor: float = 1.0  # a transfer that is hit over one that is not
    duration_s: float = 0.0  # mean
    spread: float = 1.0  # factor on what the levels are off their mean

    @property
    def acts(self) -> bool:
        """Tell whether any transfer is ever slower than another."""
        return self.probability > 0.0 and self.factor > 1.0 and self.spread > 0.0

    def levels(self, n_leaves: NDArray[np.int32]) -> tuple[NDArray[np.float32], ...]:
        """Multipliers of links that touch n leaves, not hit and hit, of mean 1."""
        hit = 1.0 - (1.0 - self.probability) ** n_leaves
        mean = 1.0 + hit * (self.factor - 1.0)
        levels = (1.0 + self.spread * (x / mean - 1.0) for x in (1.0, self.factor))
        return tuple(x.astype(np.float32) for x in levels)


def resolve(pick: Pick) -> LeafCongestion:
    """Return what the job or its library says."""
    return LeafCongestion(
        pick.value("regime", "probability"), pick.value("regime", "factor", 1.0),
        pick.value("regime", "duration_s"), pick.job.cluster.scale.network.cv,
    )  # fmt: skip


def lay(congestion: LeafCongestion, placement: Placement, links: Sequence[Ends]) -> engine.Links:
    """Lay links of the default order: nominal times are means over their congestion."""
    if not congestion.acts:
        return engine.NO_LINKS
    touched = congested_links(placement, links)
    quiet, congested = congestion.levels(touched.n_touched)
    if quiet.min(initial=1.0) <= 0.0:
        job = placement.job
        raise PrismError(
            f"{job.source or job.name}: cluster.scale.network.cv: {congestion.spread:g} leaves a "
            "link that is not congested no time; take less than "
            f"{congestion.spread / (1.0 - quiet.min()):.3g}, or set variability.effects.regime"
        )
    return engine.Links(*touched, quiet, congested, congestion.probability)


class CongestionEffect(Effect):
    """Congestion of links."""

    name = "regime"
    streams = (engine.REGIME,)
    term = "congestion"

    def acts(self, program: Program) -> bool:
        """Tell whether any leaf may be congested."""
        return program.links.n_leaves > 0

    def cv(self, program: Program) -> float:
        """Return that of two levels of mean 1; none where nothing is sent."""
        links, at = program.links, np.unique(program.bank.link[program.bank.link >= 0])
        quiet, congested = (x[:, at].astype(np.float64) for x in (links.quiet, links.congested))
        return float(np.sqrt((1.0 - quiet) * (congested - 1.0)).max(initial=0.0))

    def hold(self, program: Program, held: HeldTables) -> Program:
        """Hold it at its mean, 1, so that it neither delays nor saves: there is no level between.

        Links take the times that they have over all of their states.
        """
        return replace(program, links=engine.NO_LINKS)
