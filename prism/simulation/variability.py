"""All effects of a job, resolved over its library: parameters only, each with mean 1."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from prism.cluster.power import gpu_power
from prism.distributions.distribution import Distribution
from prism.distributions.library import Library
from prism.jobs.job import Job
from prism.simulation.added import Added
from prism.simulation.effects import ADDED, FACTORS, congestion, rank, residual, run, stall
from prism.simulation.effects.call import Call
from prism.simulation.effects.effect import Pick
from prism.simulation.effects.factor import Factor
from prism.simulation.effects.rank import RankSpread
from prism.simulation.effects.residual import Residuals, Treatment
from prism.simulation.effects.run import RunSpread
from prism.simulation.effects.stall import StallRates
from prism.simulation.effects.step import StepFactor
from prism.workload.work import Workload

# What the names of classes that are time on links hold, in workloads and in traces.
LINK_WORDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p",
              "transfer", "send_recv")  # fmt: skip


F = TypeVar("F", bound=Factor)


@dataclass(frozen=True)
class Variability:
    """All effects of a job; what one is not given is off."""

    rank: RankSpread = RankSpread()
    factors: tuple[Factor, ...] = ()
    residual: Residuals = Residuals()
    regime: congestion.LeafCongestion = congestion.LeafCongestion()
    stall: StallRates = StallRates()
    added: tuple[Added, ...] = ()
    run: RunSpread = RunSpread()
    dependence: str = "full"
    library: Library | None = None
    lowered: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Ops that `Lowerer` has lowered, of this and of what `treat` made of it."""

    def factor(self, kind: type[F]) -> F:
        """Return one of the factors; one that is not there is off."""
        return next((x for x in self.factors if isinstance(x, kind)), kind())

    @property
    def step(self) -> StepFactor:
        """What all GPUs of a step share."""
        return self.factor(StepFactor)

    @property
    def call(self) -> Distribution:
        """What the kernels of a pass share."""
        return self.factor(Call).distribution

    def treat(self, treatments: Mapping[str, Treatment]) -> "Variability":
        """Return the same with some kernel classes treated."""
        return replace(self, residual=replace(self.residual, treatments=treatments))


def is_communication(kernel_class: str) -> bool:
    """Tell whether a class of a result is time on links, as compute and host gaps are not."""
    return any(word in kernel_class for word in LINK_WORDS)


def resolve_variability(
    job: Job, library: Library | None, workload: Workload | None = None
) -> Variability:
    """Resolve a job's effects: what the job sets, else the library's, else off.

    The workload is that of the job, built anew where it is needed and None.

    Raises
    ------
    PrismError
        An effect is set without what it needs.
    """
    pick = Pick(job, library, workload)
    # of what GPUs differ in, as compute follows it
    spread = job.cluster.scale.compute.cv * gpu_power(job).spread
    return Variability(
        rank=rank.resolve(pick, spread),
        factors=tuple(kind.resolve(pick) for kind in FACTORS),
        residual=residual.resolve(pick),
        regime=congestion.resolve(pick),
        stall=stall.resolve(pick),
        added=tuple(x for kind in ADDED if (x := kind.resolve(pick)) is not None),
        run=run.resolve(pick),
        dependence=job.variability.dependence,
        library=library,
    )
