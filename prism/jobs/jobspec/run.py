"""The run (`run`): its length, what interrupts it, what it costs.

What the interruptions do to a run is `prism.simulation.runs.model`'s.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, StrictBool, Tag, WithJsonSchema

from prism.jobs.jobspec.values import (
    MAX_COUNT,
    AtLeastOne,
    Block,
    Count,
    Date,
    Deadline,
    Duration,
    NonNegative,
    Positive,
    WideCv,
    key,
    parse_duration,
)
from prism.jobs.regions import REGIONS

# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv:2407.21783, section
# 3.3.4), 3.79 per 1,000 days of a node of 8; Meta's research clusters had 6.50 and 2.34 (HPCA'25,
# arXiv:2410.21680).
FAILURES_PER_GPU_DAY = 419 / (16_384 * 54)
FAILURES_SOURCE = "Llama 3 405B: 419 in 54 days on 16,384 GPUs, arXiv:2407.21783"
RESTART_S = 600.0  # within the 5 to 20 min of arXiv:2410.21680, which hold the detection
# With the two above, what leaves the over 90 % of effective time that Llama 3 405B had
# (experiments/studies/llama3-54-days); of few GPUs any interval costs little.
CHECKPOINT_S = 600.0
REPAIR_S = 86_400.0  # assumption: a node is back after a day


def _pause(value: Any) -> float:
    """Return seconds from a length of time, or 0."""
    return 0.0 if value == 0 and value is not False else parse_duration(value)


Pause = Annotated[
    float,
    BeforeValidator(_pause),
    WithJsonSchema({"type": ["number", "string"], "examples": [0, "90s", "10min"]}),
]
Intensity = Annotated[float, Field(strict=True, ge=0, le=2000)]  # peat emits 1,200 g/kWh
Pue = Annotated[float, Field(strict=True, ge=1, le=5)]
if TYPE_CHECKING:
    RegionName = str
else:
    RegionName = Literal[tuple(REGIONS)]
Stock = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]


class CheckpointBlock(Block):
    """Checkpoints: how often, and what one takes."""

    interval: Duration | None = key(
        "Time between two checkpoints [s, or 30min, 1h]; or give interval_steps."
    )
    interval_steps: Count | None = key("Steps between two checkpoints.")
    write_s: NonNegative | None = key(
        "Time to write one [14 bytes per parameter at 0.122 GB/s per GPU: weights and Adam's "
        "state, arXiv:1910.02054; 2 TB/s for 16,384 GPUs, arXiv:2407.21783; s]."
    )
    mode: Literal["blocking", "async"] = key(
        "blocking: the job stands still meanwhile; async: written in the background, good for a "
        "restart once it is whole.",
        "blocking",
    )


class FailureCause(Block):
    """A cause of failures."""

    share: Positive = Field(description="Its share of the failures, relative to the others'.")
    detection: Pause | None = key("Time until it is noticed [failures'; s].")
    restart: Pause | None = key("Time from there to a step [failures'; s].")
    replace: StrictBool = key("Whether the node is replaced.", True)
    nodes: Count = key(
        "Nodes that fail together, as those of a rack that loses its power: as many spares are "
        "needed at once, and all are repaired together.",
        1,
    )
    repair: Duration | None = key("Mean time until they are spares again [failures'; s].")


class FailuresBlock(Block):
    """Failures of nodes: each stops the job, which goes on from its last checkpoint."""

    per_1000_node_days: NonNegative | None = key(
        "Failures per 1,000 node-days [Llama 3 405B's, 3.79 of nodes of 8 GPUs, arXiv:2407.21783; "
        "Meta's research clusters: 2.3 and 6.5]."
    )
    detection: Pause = key(
        "Time until a failure is noticed [s, or 10min; the restart holds it].", 0.0
    )
    restart: Pause = key("Time from there to the next step [s, or 10min; 5 to 20 min].", RESTART_S)
    restart_success: Annotated[float, Field(strict=True, ge=0.01, le=1)] = key(
        "Share of restarts that work; after another one as much time goes by again [1; a third of "
        "12 automatic ones on record].",
        1.0,
    )
    policy: Literal["replace", "shrink"] = key(
        "Without a spare: replace waits for one; shrink goes on with fewer replicas, until nodes "
        "are back for one more and it restarts again.",
        "replace",
    )
    spares: Stock | None = key("Nodes at hand to replace failed ones [always enough].")
    repair: Duration | None = key(
        "Mean time until a failed node is a spare again [1d, with spares; s]."
    )
    causes: dict[str, FailureCause] = key(
        "Failures by cause: {gpu: {share: 0.6}, software: {share: 0.4, ...}}.", {}
    )


Failures = Annotated[
    Annotated[FailuresBlock, Tag("[block]")] | Annotated[Literal["none"], Tag("[word]")],
    Discriminator(lambda value: "[word]" if isinstance(value, str) else "[block]"),
]


class RampPhase(Block):
    """A part of the run with another batch than the job's."""

    tokens: Positive = Field(description="Tokens of the run until which it lasts.")
    global_batch: Count = Field(description="Sequences of a step until then.")


class EvaluationBlock(Block):
    """Evaluations between steps."""

    interval_steps: Count = Field(description="Steps between two evaluations.")
    duration: Duration = Field(description="What one takes [s, or 10min].")


class LoaderBlock(Block):
    """Loading of batches: no step is shorter than its batch takes to load."""

    samples_per_s: Positive = Field(description="Sequences loaded for the whole job [1/s].")
    cv: WideCv = key("CV of a batch's time to load, lognormal.", 0.0)
    prefetch: Annotated[int, Field(strict=True, ge=0, le=10_000)] = key(
        "Batches loaded ahead of the step [2, PyTorch's prefetch_factor]; 0: none is loaded while "
        "a step runs.",
        2,
    )
    stalls_per_hour: NonNegative = key("Stops of the loader per hour of loading.", 0.0)
    stall_s: NonNegative = key("Mean length of one, exponential [s].", 0.0)


class RunBlock(Block):
    """The run: how long, by when, at what price, and what interrupts it."""

    steps: Count | None = key("Steps of the run [1000, if it is asked for].")
    tokens: Positive | None = key("Tokens of the run, instead of steps.")
    deadline: Deadline | None = key(
        "Time the run may take: 60d, 12h, or seconds [s]; or the date by which it must be done, "
        "with start."
    )
    start: Date = key("Date the run starts.")
    price_per_gpu_hour: NonNegative | None = key("Price of a GPU for an hour, in any currency.")
    probability: Annotated[float, Field(strict=True, gt=0, lt=1)] = key(
        "Probability asked of the finish date.", 0.9
    )
    slowdown_thresholds: tuple[AtLeastOne, ...] = key(
        "Report P(step slower than this times the ideal).", (1.05, 1.1, 1.2)
    )
    start_up: Pause = key(
        "Time from the GPUs to the first step, once a run: a restart holds its own [s, or 12min; a "
        "cluster spent over 3.5 % of its GPU time so, arXiv:2507.12619].",
        0.0,
    )
    checkpoint: CheckpointBlock | None = key(
        "Checkpoints: {interval: 30min, write_s: 60, mode: blocking} [with failures: every 10min, "
        "async]."
    )
    failures: Failures | None = key(
        "Failures of nodes: {per_1000_node_days: 3.8, restart: 10min}, or none [these, unless "
        "model.durations are given]."
    )
    batch_ramp: tuple[RampPhase, ...] | None = key(
        "Smaller batches at the beginning: [{tokens: 252e6, global_batch: 512}, ...]."
    )
    loader: LoaderBlock | None = key("Data loading: {samples_per_s: 500, prefetch: 2}.")
    grid_intensity: Intensity | None = key(
        "Carbon intensity of the electricity, for the run's carbon [region's; g CO2e/kWh]."
    )
    region: RegionName | None = key(
        "Country, by ISO 3166-1 alpha-3 code, whose grid's mean intensity is taken; or WORLD."
    )
    pue: Pue = key(
        "Power usage effectiveness: energy of the facility over that of its machines [1.1, as of "
        "large operators' own].",
        1.1,
    )
    evaluation: EvaluationBlock | None = key("Evaluations: {interval_steps: 1000, duration: 2min}.")
