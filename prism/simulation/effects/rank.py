"""The rank effect: GPUs differ, and keep their factor as long as they are in the job."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from prism import engine
from prism.cluster.nodemap import Placement
from prism.common.errors import PrismError
from prism.distributions.distribution import (
    PARAM_NAMES,
    Distribution,
    bounded_body_lemons,
    constant,
    normal,
)
from prism.jobs.jobspec.values import MAX_SLOWDOWN
from prism.simulation.effects.effect import Effect, HeldTables, Int, Pick
from prism.simulation.program import Program, Tables
from prism.workload.kernels import COMPUTE_CLASSES, MEMORY_CLASSES


class RankSpread(NamedTuple):
    """Persistent slowdowns of GPUs, and which kernels follow them."""

    distribution: Distribution = constant()
    node_share: float = 0.0  # of its variance, common to the GPUs of a node
    memory_loading: float = 0.0  # of memory-bound kernels on it, or on a known slow node
    memory_spread: float = 1.0  # factor on the loading of the random part, on a hardware variant

    def loading(self, kernel_class: str) -> float:
        """Exponent on a kernel class."""
        if kernel_class in COMPUTE_CLASSES:
            return 1.0
        if kernel_class in MEMORY_CLASSES:
            return self.memory_loading * self.memory_spread
        return 0.0


def resolve(pick: Pick, spread: float) -> RankSpread:
    """Return what the job or its library says, its distribution stretched by `spread`."""
    return RankSpread(
        _distribution(pick).spread_by(spread),
        pick.value("rank", "node_share"),
        pick.value("rank", "memory_loading"),
        # of a distribution that is stretched already; where nothing is left of it nothing follows
        pick.job.cluster.scale.memory.cv / spread if spread > 0.0 else 1.0,
    )


def lay(
    spread: RankSpread, placement: Placement, exponents: Sequence[float], tables: Tables
) -> engine.Ranks:
    """Lay it into the engine's arrays, a table per loading."""
    index = [tables.optional(spread.distribution, x, "rank") for x in exponents]
    weight = float(np.sqrt(spread.node_share)) if spread.distribution.std > 0.0 else 0.0
    factor = np.ones((len(index), placement.n_gpus), np.float32)
    return engine.Ranks(
        placement.n_gpus, placement.gpus_per_node, weight, tables.add(normal(1.0)),
        np.array(index, np.int32), factor,
    )  # fmt: skip


def has_fixed_ranks(program: Program) -> bool:
    """Tell whether every GPU keeps a factor of its own, such as the one that was measured."""
    ranks, low = program.ranks, program.low
    fixed = (ranks.factor != 1.0).any() and (low.coef_stage >= 0).any()
    return bool(fixed and not (ranks.tables >= 0).any())


class RankEffect(Effect):
    """Persistent differences between GPUs."""

    name = "rank"
    streams = (engine.RANK,)
    term = "slow_steps"

    def tables(self, program: Program) -> Int:
        """One per loading."""
        return program.ranks.tables

    def hold(self, program: Program, held: HeldTables) -> Program:
        """Give all GPUs the same factor; what a measured one adds in seconds goes."""
        ranks, low = program.ranks._replace(tables=held(program.ranks.tables)), program.low
        if has_fixed_ranks(program):
            mean = low.fixed_mean.copy()
            if program.typical is not None:
                mean[:] = program.typical
                own = low.coef_stage < 0  # without a rank effect: as fast as measured
                mean[:, own] = low.fixed_mean[:, own]
            ranks = ranks._replace(factor=np.ones_like(ranks.factor))
            low = low._replace(fixed_mean=mean)
        return replace(program, ranks=ranks, low=low)


def _distribution(pick: Pick) -> Distribution:
    """Body of healthy GPUs plus lemons, bounded by the slowdown at which GPUs are culled.

    What the job does not set stays as the library has it.
    """
    job, effect, library = pick.job, pick.effects.rank, pick.library
    limit = job.cluster.max_slowdown
    distribution = (
        library.distribution("rank") if library is not None and "rank" in library else constant()
    )
    changes: dict[str, float] = {}
    if effect is not None:
        if effect.cv is not None:
            changes["body_cv"] = effect.cv
        if effect.lemon_fraction is not None:
            changes["lemon_fraction"] = effect.lemon_fraction
        if effect.lemon_slowdown is not None:
            changes["lo"], changes["hi"] = effect.lemon_slowdown
    if limit is not None:
        changes["max_slowdown"] = limit
    if not changes or (distribution.std == 0.0 and changes.keys() <= {"max_slowdown"}):
        return distribution
    if distribution.family != "bounded_body_lemons":
        distribution = bounded_body_lemons(distribution.std, max_slowdown=MAX_SLOWDOWN)
    distribution = distribution.with_params(**changes)
    params = dict(zip(PARAM_NAMES[distribution.family], distribution.params, strict=True))
    if "hi" in changes and params["hi"] > params["max_slowdown"]:
        raise PrismError(
            f"{job.source}: variability.effects.rank.lemon_slowdown: reaches {params['hi']:g}, but "
            f"GPUs beyond {params['max_slowdown']:g} are taken out; lower it, or set "
            f"cluster.max_slowdown: {params['hi']:g}"
        )
    return distribution
