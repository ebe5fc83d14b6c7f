"""The effects a job file may set (`variability.effects`); what is left out is the library's.

The meaning of each, and what it is drawn once per, is `prism.simulation.effects`'s. `WORDS` are
what tables and answers call them.
"""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, StrictBool

from prism.jobs.jobspec.values import (
    AtLeastOne,
    Block,
    Duration,
    NonNegative,
    Positive,
    Share,
    SharedCv,
    WideCv,
    key,
)

# An exponent of slowdowns, of nodes from 1e-3 to 1e3, which the engine holds in 32 bits.
Loading = Annotated[float, Field(strict=True, ge=0, le=10)]


class RankEffectBlock(Block):
    """Persistent differences between GPUs."""

    cv: SharedCv | None = key("CV of the body of healthy GPUs.")
    lemon_fraction: Share | None = key("Share of GPUs that are lemons.")
    lemon_slowdown: tuple[AtLeastOne, AtLeastOne] | None = key(
        "Slowdown of a lemon, [lowest, highest]."
    )
    node_share: Share | None = key("Share of the variance common to a node's GPUs.")
    memory_loading: Loading | None = key(
        "How far memory-bound kernels follow the effect (compute-bound: 1)."
    )


class StepEffectBlock(Block):
    """What slows the whole job together."""

    cv: SharedCv | None = key("CV between steps.")
    correlation_time_s: NonNegative | None = key("Correlation time of the drift [s].")
    # beyond 0.707 a sine wave of that CV would take no time, or less, at its trough
    diurnal_cv: Annotated[float, Field(strict=True, ge=0, le=0.7)] | None = key(
        "CV over a day of a daily wave on top [0; Llama 3 405B saw 1-2 %]."
    )
    diurnal_peak_h: Annotated[float, Field(strict=True, ge=0, le=24)] | None = key(
        "Hour of the day when steps are slowest [15]."
    )


class MicrobatchEffectBlock(Block):
    """Differences in the work itself, one draw for all stages, forward and backward."""

    cv: SharedCv | None = key("CV of forward.")
    backward_loading: Loading | None = key("How far backward follows the effect (forward: 1).")
    loss_loading: Loading | None = key("How far the loss layer follows the effect (a layer: 1).")


class ExpertEffectBlock(Block):
    """How the load of the busiest expert-parallel rank varies, between microbatches."""

    cv: WideCv | None = key("CV between microbatches of an expert group [0.05, an assumption].")


class CallEffectBlock(Block):
    """What all kernels of one forward or backward share."""

    cv: WideCv | None = key("CV between calls.")


class ResidualEffectBlock(Block):
    """What is left to each kernel."""

    law: Literal["lognormal", "normal", "gamma"] | None = key(
        "Family of the distribution for every kernel class [lognormal, with cv]."
    )
    cv: WideCv | None = key("CV of the distribution, for every kernel class [the library's].")
    scale: NonNegative | None = key("Factor on the spread of the library's residual distributions.")


class RegimeEffectBlock(Block):
    """Congestion of leaf switches, on or off, persisting over steps.

    A transfer is hit while any leaf that it touches is congested; its mean stays nominal.
    """

    probability: Share | None = key("Share of steps in which a leaf switch is congested.")
    factor: AtLeastOne | None = key("A transfer that is hit over one that is not.")
    duration_s: Positive | None = key(
        "Mean length of a congestion; it persists over the steps of a run [s]."
    )


class StallEffectBlock(Block):
    """Rare, long stops."""

    entity: Literal["rank", "node", "job"] | None = key(
        "What stops: one GPU, one node, or the job."
    )
    rate_per_hour: NonNegative | None = key("Stalls per entity and hour.")
    duration_s: NonNegative | None = key("Mean length of a stall [s].")
    duration_cv: WideCv | None = key("CV of that length.")


class JitterEffectBlock(Block):
    """A time added to every step, whatever its length: pauses of hosts, late collectives."""

    mean_s: NonNegative | None = key("Mean time added to a step [s].")
    cv: WideCv | None = key("CV of that time from step to step [1, lognormal].")


class RunEffectBlock(Block):
    """What all steps of a run share, from run to run on the same nodes."""

    # normal: beyond 0.2 one in 3.5 million runs would take no time, or less
    cv: Annotated[float, Field(strict=True, ge=0, le=0.2)] | None = key("CV between runs.")


class FailSlowEffectBlock(Block):
    """Episodes in which a node, or its links, are slow: they come and go within a run.

    Lengths: means of compute and of network events in Greyhound (ATC'25).
    """

    rate_per_1000_node_days: NonNegative | None = key("Episodes per 1,000 node-days.")
    kind: Literal["compute", "network"] = key(
        "What is slow: the GPUs of a node, or its links.", "compute"
    )
    factor: AtLeastOne | None = key("Factor on compute [1.2, a hot node], or on transfers [3].")
    duration: Duration | None = key(
        "Mean length of an episode [10min of compute, 24min of network; s]."
    )
    duration_cv: WideCv = key("CV of that length.", 1.0)
    detection: Duration | None = key(
        "Time until a slow node is found, to be replaced [s, or 10min]."
    )
    replace: StrictBool = key(
        "Replace the node that was found: back to the last checkpoint, restart.", False
    )


class Effects(Block):
    """Effects set by the job; one left out is the library's, or off without a library."""

    rank: RankEffectBlock | None = key("Differences between GPUs.")
    step: StepEffectBlock | None = key("What all ranks share in a step.")
    microbatch: MicrobatchEffectBlock | None = key("Differences in the work.")
    expert: ExpertEffectBlock | None = key("Differences in experts' load.")
    call: CallEffectBlock | None = key("What kernels of a call share.")
    residual: ResidualEffectBlock | None = key("What is left per kernel.")
    regime: RegimeEffectBlock | None = key("Congestion of leaf switches.")
    stall: StallEffectBlock | None = key("Rare, long stops.")
    jitter: JitterEffectBlock | None = key("A time added to every step.")
    run: RunEffectBlock | None = key("What all steps of a run share.")
    fail_slow: FailSlowEffectBlock | None = key("Episodes of a slow node.")


class VariabilityBlock(Block):
    """How durations vary: from which library, with which effects, how dependent."""

    library: str | None = key(
        "Distribution set: a shipped one (h100-healthy), a .nc file, or none [<device>-healthy]."
    )
    model: str | None = key("A fitted model (.nc of `prism fit`): its graph and effects are used.")
    dependence: Literal["full", "none"] = key(
        "full: effects are shared as modelled; none: every op on its own.", "full"
    )
    ranks: Literal["drawn", "measured"] | None = key(
        "Rank effects of a random cluster, or those a model measured [measured with a model of the "
        "same layout, else drawn]."
    )
    kernel_scale: Positive = key(
        "What-if of a fitted trace: its kernels and transfers take this many times as long.", 1.0
    )
    host_scale: Positive = key(
        "The host takes this many times as long for a launch, in a fitted trace from launch to "
        "launch: 2 is a host half as fast.",
        1.0,
    )
    resolution: Literal["op", "kernel"] = key(
        "One op per forward or backward, or one per kernel and rank.", "op"
    )
    effects: Effects = key("Effects that differ from the library's.", Effects())
    model_error: Share | None = key(
        "What a predicted run may be wrong by, one draw per run: standard deviation of the "
        "logarithm; 0 leaves it out [the library's, by device and framework: wide where no such "
        "job was published, more on more GPUs than any published one]."
    )

    @classmethod
    def _fill(cls, given: dict[str, Any]) -> dict[str, Any]:
        if "model" not in given:
            given.setdefault("ranks", "drawn")
        if given.get("library") == "none":
            del given["library"]
        return given


class Words(NamedTuple):
    """How an effect is spoken of as a cause of variance."""

    name: str
    what: str  # it is drawn for, or acts on
    cause: str  # in a sentence
    remedy: str
    held: str = "Held at its median"  # what a ranking does to see what it brings


WORDS = {
    "rank": Words(
        "rank effect", "GPU speed", "GPUs' own speed",
        "replace or regroup the slowest GPUs (prism place)",
    ),
    "step": Words(
        "step effect", "all GPUs", "variation common to all GPUs of a step",
        "look at what they share: power, cooling, fabric, storage",
    ),
    "microbatch": Words(
        "microbatch effect", "work", "uneven work of microbatches",
        "pack sequences to microbatches of equal work",
    ),
    "expert": Words(
        "expert effect", "routing", "uneven routing to experts",
        "balance it: auxiliary loss, capacity factor",
    ),
    "tables": Words(
        "uneven tables", "ranks' work", "embedding tables of unequal work",
        "spread the largest by rows or columns", "With equal shares",
    ),
    "call": Words(
        "call effect", "one pass", "variation common to the kernels of a forward or backward",
        "look at the host: launch delays, other processes",
    ),
    "rank_step": Words(
        "rank-step effect", "one step", "variation of single GPUs between steps",
        "look at clocks, throttling and the host",
    ),
    "regime": Words(
        "congestion", "links", "congestion of links", "keep other traffic off them",
        "Held at its mean",
    ),
    "stall": Words(
        "stalls", "rare stops", "stalling",
        "find what stops ranks: data loading, garbage collection, storage", "Without it",
    ),
    "jitter": Words(
        "step jitter", "added time", "time added between steps",
        "look at data loading, logging and synchronisation",
    ),
    "loader": Words(
        "data loading", "batches", "batches that load late", "prefetch more, or load faster",
        "Held at its mean",
    ),
}  # fmt: skip
"""By name; `rank_step` is an effect of fitted traces alone, `tables` of model.layers."""
