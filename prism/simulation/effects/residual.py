"""The residual: what is left to each kernel, and what an intervention does to its class."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from prism.common.errors import PrismError
from prism.distributions.distribution import (
    CONSTRUCTORS,
    Distribution,
    constant,
    lognormal,
    occasional,
)
from prism.distributions.library import Library
from prism.jobs.jobspec.hardware import HardwareScale
from prism.simulation.effects.effect import Pick
from prism.workload.kernels import LOGNORMAL, MEMORY_CLASSES


class Treatment(NamedTuple):
    """What is done to a kernel class as an intervention; prism rank asks what it would bring."""

    frozen: bool = False  # its own noise at its median
    factor: float = 1.0  # on durations


UNTREATED = Treatment()


@dataclass(frozen=True)
class Residuals:
    """Distributions of kernels' own runtimes, mean 1, by the names that kernels give."""

    library: Library | None = None
    replaced: Distribution | None = None  # by the job, for every kernel
    factor: float = 1.0  # on their spread
    scale: HardwareScale = HardwareScale()  # factors on it by `_part_of`
    one_domain: bool = False  # one NVLink domain has all GPUs
    treatments: Mapping[str, Treatment] = field(default_factory=dict, hash=False)  # by class
    _cache: dict[str, Distribution] = field(default_factory=dict, compare=False, repr=False)

    def distribution(self, entry: str) -> Distribution:
        """Distribution of a kernel's own runtime, mean 1."""
        spread: float = getattr(self.scale, _part_of(entry, self.one_domain)).cv
        if self.replaced is not None:
            return self.replaced.spread_by(spread)
        if entry not in self._cache:
            distribution = constant()
            if entry.startswith(LOGNORMAL):
                distribution = lognormal(float(entry.removeprefix(LOGNORMAL)))
            elif self.library is not None:
                distribution = self.library.distribution(entry)
            scaled = distribution.scaled_to(distribution.cv * self.factor)
            self._cache[entry] = scaled.spread_by(spread)
        return self._cache[entry]

    def treated(
        self, kernel_class: str, entry: str, share: float = 1.0
    ) -> tuple[Distribution, float]:
        """Residual of a kernel of a treated class, mean 1, and the factor on its duration.

        Only a `share` of the steps may have the kernel; frozen, each has as much.
        """
        treatment = self.treatments.get(kernel_class, UNTREATED)
        distribution = self.distribution(entry)
        if treatment.frozen:
            return constant(), treatment.factor * float(distribution.ppf(0.5))
        return occasional(distribution, share), treatment.factor


def resolve(pick: Pick) -> Residuals:
    """Return what the job or its library says."""
    job, block = pick.job, pick.effects.residual
    return Residuals(
        pick.library, _replaced(pick),
        1.0 if block is None or block.scale is None else block.scale,
        job.cluster.scale, job.world_size <= job.cluster.nvlink_domain_gpus,
    )  # fmt: skip


def _replaced(pick: Pick) -> Distribution | None:
    block = pick.effects.residual
    if block is None or (block.cv is None and block.law is None):
        return None
    if block.cv is None:
        raise PrismError(
            f"{pick.job.source}: variability.effects.residual: law = {block.law} without a cv; "
            "give one, or set scale alone"
        )
    return constant() if block.cv == 0.0 else CONSTRUCTORS[block.law or "lognormal"](block.cv)


def _part_of(entry: str, one_domain: bool) -> str:
    """Part of the hardware that a residual distribution speaks of, as in `HardwareScale`.

    Transfers between stages are the network's unless one NVLink domain has all GPUs, and so is a
    spread that a link tier states.
    """
    name = entry.removeprefix("residual/")
    if name.startswith("nvlink") or (name == "p2p" and one_domain):
        return "nvlink"
    if name.startswith(("network", LOGNORMAL)) or name == "p2p":
        return "network"
    return "memory" if name in MEMORY_CLASSES else "compute"
