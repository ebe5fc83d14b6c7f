"""Which effect multiplies which op, and how strongly: parameters only.

Resolves the job's `variability` block over its library into distributions of mean 1 and loadings
per kernel class and op_kind.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.cluster.devices import device_key
from prism.cluster.power import gpu_power
from prism.common.errors import PrismError
from prism.distributions import distribution as distributions
from prism.distributions.distribution import Distribution
from prism.distributions.library import Library
from prism.jobs.job import Job
from prism.jobs.jobspec.hardware import HardwareScale
from prism.jobs.jobspec.values import MAX_SLOWDOWN
from prism.workload.build import build_workload, nominal_step
from prism.workload.frameworks import family
from prism.workload.kernels import COMPUTE_CLASSES, LOGNORMAL, MEMORY_CLASSES, is_compute
from prism.workload.work import Workload

# What the names of classes that are time on links hold, in workloads and in traces.
LINK_WORDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p",
              "transfer", "send_recv")  # fmt: skip
LOSS_CLASSES = frozenset({"loss", "embedding"})
JITTER_CV = 1.0  # of a jitter of which the mean alone is known
EXPERT_CV = 0.05
"""CV of the busiest expert-parallel rank's load between microbatches, where a library is used and
neither it nor the job says. An assumption: half of what that rank has over its share by
`prism.workload.experts.DEFAULT_IMBALANCE`; measurements of single microbatches are not public."""


class CongestionEffect(NamedTuple):
    """Congestion of leaf switches."""

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


class StallEffect(NamedTuple):
    """Rare stops, part of the mean step unless they add to it, as those measured apart do."""

    entity: str = "rank"
    rate_per_hour: float = 0.0  # per entity
    duration_s: float = 0.0
    duration_cv: float = 0.0
    adds: bool = False


class Treatment(NamedTuple):
    """What is done to a kernel class as an intervention; prism rank asks what it would bring."""

    frozen: bool = False  # its own noise at its median
    factor: float = 1.0  # on durations


UNTREATED = Treatment()


@dataclass(frozen=True)
class Variability:
    """All effects of a job, each with mean 1 over its population; loadings are exponents."""

    rank: Distribution  # persistent GPU slowdown
    step: Distribution
    microbatch: Distribution  # of forward
    call: Distribution
    regime: CongestionEffect
    stall: StallEffect
    dependence: str
    node_share: float = 0.0  # of the rank effect's variance, common to the GPUs of a node
    memory_loading: float = 0.0  # of memory-bound kernels on the rank effect, or a known slow node
    memory_spread: float = 1.0  # factor on the loading of the random part, on a hardware variant
    correlation_time_s: float = 0.0  # of the step effect
    backward_loading: float = 1.5  # on the microbatch effect
    loss_loading: float = 1.0  # on the microbatch effect
    replaced_residual: Distribution | None = None
    residual_scale: float = 1.0
    scale: HardwareScale = HardwareScale()  # factors on the spread of residuals by `residual_part`
    one_domain: bool = False  # one NVLink domain has all GPUs
    library: Library | None = None
    # busiest rank of an ep group, over its mean
    expert: Distribution = field(default_factory=distributions.constant)
    # shape of the time added to every step
    jitter: Distribution = field(default_factory=distributions.constant)
    jitter_s: float = 0.0  # and its mean, which the ideal step is without
    run_cv: float = 0.0  # between runs on the same nodes
    model_error: float = 0.0  # of a whole run, standard deviation of the logarithm
    treatments: Mapping[str, Treatment] = field(default_factory=dict, hash=False)  # by class
    _cache: dict[str, Distribution] = field(default_factory=dict, compare=False, repr=False)

    def residual(self, entry: str) -> Distribution:
        """Distribution of a kernel's own runtime, mean 1."""
        spread: float = getattr(self.scale, residual_part(entry, self.one_domain)).cv
        if self.replaced_residual is not None:
            return self.replaced_residual.spread_by(spread)
        if entry not in self._cache:
            distribution = distributions.constant()
            if entry.startswith(LOGNORMAL):
                distribution = distributions.lognormal(float(entry.removeprefix(LOGNORMAL)))
            elif self.library is not None:
                distribution = self.library.distribution(entry)
            self._cache[entry] = distribution.scaled_to(
                distribution.cv * self.residual_scale
            ).spread_by(spread)
        return self._cache[entry]

    def treatment(self, kernel_class: str) -> Treatment:
        """Return what is done to a kernel class."""
        return self.treatments.get(kernel_class, UNTREATED)

    def treated_residual(self, kernel_class: str, entry: str) -> tuple[Distribution, float]:
        """Residual of a kernel of a treated class, mean 1, and the factor on its duration."""
        treatment, distribution = self.treatment(kernel_class), self.residual(entry)
        if treatment.frozen:
            return distributions.constant(), treatment.factor * float(distribution.ppf(0.5))
        return distribution, treatment.factor

    def rank_loading(self, kernel_class: str) -> float:
        """Exponent of the rank effect on a kernel class."""
        if kernel_class in COMPUTE_CLASSES:
            return 1.0
        if kernel_class in MEMORY_CLASSES:
            return self.memory_loading * self.memory_spread
        return 0.0

    def microbatch_loading(self, op_kind: str, kernel_class: str) -> float:
        """Exponent of the microbatch effect on a kernel class within forward or backward."""
        if not is_compute(kernel_class) or kernel_class == "optimizer":
            return 0.0
        loading = self.backward_loading if op_kind.startswith("backward") else 1.0
        return loading * (self.loss_loading if kernel_class in LOSS_CLASSES else 1.0)


def residual_part(entry: str, one_domain: bool) -> str:
    """Part of the hardware that a library's residual distribution speaks of, as in `HardwareScale`.

    Transfers between stages are the network's unless one NVLink domain has all GPUs, and so is a
    spread that a link tier states.
    """
    name = entry.removeprefix("residual/")
    if name.startswith("nvlink") or (name == "p2p" and one_domain):
        return "nvlink"
    if name.startswith(("network", LOGNORMAL)) or name == "p2p":
        return "network"
    return "memory" if name in MEMORY_CLASSES else "compute"


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
    pick, scale = _Pick(job, library), job.cluster.scale
    residual, power = job.variability.effects.residual, gpu_power(job)
    spread = scale.compute.cv * power.spread  # of what GPUs differ in, as compute follows it
    return Variability(
        rank=_rank_distribution(job, library).spread_by(spread),
        step=_step_distribution(job, pick, workload),
        microbatch=pick.distribution("microbatch"),
        expert=_expert_distribution(job, pick),
        call=pick.distribution("call"),
        regime=_regime(job, pick),
        stall=_stall(job, pick),
        jitter=pick.distribution("jitter", JITTER_CV),
        jitter_s=pick.value("jitter", "mean_s"),
        run_cv=pick.value("run", "cv"),
        model_error=_model_error(job, pick),
        dependence=job.variability.dependence,
        node_share=pick.value("rank", "node_share"),
        memory_loading=pick.value("rank", "memory_loading"),
        # of a distribution that is stretched already; where nothing is left of it nothing follows
        memory_spread=scale.memory.cv / spread if spread > 0.0 else 1.0,
        correlation_time_s=pick.value("step", "correlation_time_s"),
        backward_loading=pick.value("microbatch", "backward_loading", 1.5),
        loss_loading=pick.value("microbatch", "loss_loading", 1.0),
        replaced_residual=_replaced_residual(job),
        residual_scale=1.0 if residual is None or residual.scale is None else residual.scale,
        scale=scale,
        one_domain=job.world_size <= job.cluster.nvlink_domain_gpus,
        library=library,
    )


class _Pick:
    """Values and distributions of effects: the job's, else the library's, else a default."""

    def __init__(self, job: Job, library: Library | None) -> None:
        self.effects, self.library = job.variability.effects, library

    def value(self, effect: str, name: str, default: float = 0.0) -> float:
        given = getattr(getattr(self.effects, effect), name, None)
        if given is not None:
            return float(given)
        entry = f"{effect}/{name}"
        if self.library is not None and entry in self.library:
            return self.library.value(entry)
        return default

    def distribution(self, effect: str, default_cv: float = 0.0) -> Distribution:
        cv = getattr(getattr(self.effects, effect), "cv", None)
        if self.library is not None and effect in self.library:
            distribution = self.library.distribution(effect)
            return distribution if cv is None else distribution.scaled_to(cv)
        return distributions.lognormal(default_cv if cv is None else cv)


def _regime(job: Job, pick: _Pick) -> CongestionEffect:
    p, f = pick.value("regime", "probability"), pick.value("regime", "factor", 1.0)
    return CongestionEffect(p, f, pick.value("regime", "duration_s"), job.cluster.scale.network.cv)


UNMEASURED = "unmeasured"
"""Class of the model's error of jobs that nothing like was published."""


def model_error_kind(job: Job) -> str:
    """Class of a job by what was published: a framework, experts, or `UNMEASURED`.

    Published jobs of Megatron and nanotron do not gather their weights layer by layer, those of
    eager and compiled PyTorch do; experts are Megatron's, and there is no hybrid model
    (``experiments/public-jobs``).
    """
    p, model = job.parallelism, job.model
    kind, again = family(p.framework), p.data_parallel in ("fsdp", "hsdp")
    if kind in ("megatron", "nanotron"):
        again = not (again and p.reshard_after_forward)
    if model.layer_pattern or not again or (model.n_experts and kind != "megatron"):
        return UNMEASURED
    return "experts" if model.n_experts else kind


def model_error_entry(job: Job, library: Library) -> str:
    """Name of a library's entry on the model's error of a job, without its effect."""
    same = device_key(library.device) in ("", job.cluster.device)
    kind = model_error_kind(job) if same else UNMEASURED
    return f"model_error_{kind if f'run/model_error_{kind}' in library else UNMEASURED}"


def _model_error(job: Job, pick: _Pick) -> float:
    """Error of the model: the job's, else that of the library for jobs of its kind and size."""
    if job.variability.model_error is not None:
        return job.variability.model_error
    if pick.library is None:
        return 0.0
    name = model_error_entry(job, pick.library)
    error = pick.value("run", name)
    if error == 0.0:
        return 0.0
    largest = pick.value("run", name.replace("model_error", "largest_gpus"), math.inf)
    beyond = math.log(max(1.0, job.world_size / largest))
    return math.hypot(error, pick.value("run", "model_error_growth") * beyond)


def _step_distribution(job: Job, pick: _Pick, workload: Workload | None) -> Distribution:
    """Distribution of the step effect; a calibrated library has a part that is a time."""
    block, distribution = job.variability.effects.step, pick.distribution("step")
    fixed_s = pick.value("step", "fixed_s")
    if (block is not None and block.cv is not None) or fixed_s == 0.0:
        return distribution
    workload = build_workload(job, pick.library) if workload is None else workload
    step_s = nominal_step(workload, job.parallelism)
    return distribution.scaled_to(math.hypot(pick.value("step", "relative"), fixed_s / step_s))


def _expert_distribution(job: Job, pick: _Pick) -> Distribution:
    """Distribution of the expert effect; nothing is out of balance within one rank."""
    if job.parallelism.ep == 1:
        return distributions.constant()
    return pick.distribution("expert", 0.0 if pick.library is None else EXPERT_CV)


def _stall(job: Job, pick: _Pick) -> StallEffect:
    """Stalls; a calibrated library counts those that delay the whole job, by job and by node."""
    block = job.variability.effects.stall
    entity = "rank" if block is None or block.entity is None else block.entity
    rate, adds = pick.value("stall", "rate_per_hour"), False
    if block is None or (block.entity is None and block.rate_per_hour is None):
        of_job = pick.value("stall", "job_rate_per_hour")
        of_job += job.n_nodes * pick.value("stall", "node_rate_per_hour")
        if of_job > 0.0:
            entity, rate, adds = "job", of_job, True
    duration, cv = pick.value("stall", "duration_s"), pick.value("stall", "duration_cv")
    return StallEffect(entity, rate, duration, cv, adds)


def _replaced_residual(job: Job) -> Distribution | None:
    residual = job.variability.effects.residual
    if residual is None or (residual.cv is None and residual.law is None):
        return None
    if residual.cv is None:
        raise PrismError(
            f"{job.source}: variability.effects.residual: law = {residual.law} without a cv; "
            "give one, or set scale alone"
        )
    if residual.cv == 0.0:
        return distributions.constant()
    return distributions.CONSTRUCTORS[residual.law or "lognormal"](residual.cv)


def _rank_distribution(job: Job, library: Library | None) -> Distribution:
    """Body of healthy GPUs plus lemons, bounded by the slowdown at which GPUs are culled.

    What the job does not set stays as the library has it.
    """
    effect, limit = job.variability.effects.rank, job.cluster.max_slowdown
    distribution = (
        library.distribution("rank")
        if library is not None and "rank" in library
        else distributions.constant()
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
        distribution = distributions.bounded_body_lemons(
            distribution.std, max_slowdown=MAX_SLOWDOWN
        )
    distribution = distribution.with_params(**changes)
    params = dict(
        zip(distributions.PARAM_NAMES[distribution.family], distribution.params, strict=True)
    )
    if "hi" in changes and params["hi"] > params["max_slowdown"]:
        raise PrismError(
            f"{job.source}: variability.effects.rank.lemon_slowdown: reaches {params['hi']:g}, but "
            f"GPUs beyond {params['max_slowdown']:g} are taken out; lower it, or set "
            f"cluster.max_slowdown: {params['hi']:g}"
        )
    return distribution
