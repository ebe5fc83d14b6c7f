"""Link tiers of a job file (`cluster.tiers`): what joins racks, pods, zones and sites.

A tier is a kind of unit, each of n GPUs, and what messages meet that leave such a unit. What
they take is `prism.cluster.linktiers` and `prism.cluster.machine`.
"""

from typing import Annotated, Literal

from pydantic import Field

from prism.jobs.jobspec.values import (
    AtLeastOne,
    Block,
    Count,
    Efficiency,
    NonNegative,
    Positive,
    WideCv,
    key,
)

SECONDS_PER_KM = 5e-6
"""One way through fibre, of refractive index 1.468 (ITU-T G.652, Corning SMF-28): 4.9 us/km."""

TierName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9 _-]*$", max_length=40)]


class TierBlock(Block):
    """A tier of units, and the uplink of one of them."""

    gpus: Count = Field(description="GPUs of one unit.")
    oversubscription: AtLeastOne | None = key(
        "The GPUs' network bandwidth over that out of a unit [1]."
    )
    bandwidth_gbytes_per_s: Positive | None = key(
        "Bandwidth out of a unit per GPU in it, one direction [GB/s]."
    )
    total_gbits_per_s: Positive | None = key(
        "Total bandwidth of a unit's uplinks, one direction [Gbit/s]."
    )
    efficiency: Efficiency | None = key(
        "Share of bandwidth_gbytes_per_s or total_gbits_per_s that large messages reach [the "
        "network's]."
    )
    latency_us: NonNegative | None = key(
        "Latency of a message that leaves its unit, one way [the next inner's]."
    )
    distance_km: NonNegative | None = key(
        "Instead: length of the fibre between two units; 5 us/km are added."
    )
    collectives: Literal["ring", "hierarchical"] | None = key(
        "ring: in rank order through all units; hierarchical: each unit sends what it has to, once "
        "[hierarchical where a latency or a distance is given, else ring]."
    )
    cv: WideCv | None = key(
        "Spread of what leaves a unit, lognormal [the network's distributions]."
    )

    sync_every: Count = key(
        "Replicas in different units exchange parameters once in this many steps, as in local SGD "
        "and DiLoCo; gradients stay inside a unit. Two units or more, of whole replicas.",
        1,
    )
    sync_overlap: Annotated[int, Field(strict=True, ge=0)] = key(
        "Steps of sync_every beside which that exchange runs, a part of it beside each [0: all of "
        "it after a step].",
        0,
    )

    @property
    def syncs_apart(self) -> bool:
        """Whether units do not wait for each other's gradients in every step."""
        return self.sync_every > 1 or self.sync_overlap > 0

    @property
    def is_far(self) -> bool:
        """Whether what leaves a unit is on its way for longer than inside it."""
        return self.latency_us is not None or self.distance_km is not None

    @property
    def is_hierarchical(self) -> bool:
        """Whether collectives reduce inside units first."""
        if self.collectives is not None:
            return self.collectives == "hierarchical"
        return self.is_far
