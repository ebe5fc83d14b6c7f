"""The parts of a run: what its steps take, and everything that comes between them.

Parameters only; `prism.simulation.runs.build` takes them from a job's simulated steps,
`prism.simulation.runs.model` draws runs.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.int64]
DAY_S = 86_400.0
HOUR_S = 3_600.0
OF_STEPS = ("ideal_steps", "slow_steps", "step_noise", "congestion", "drift", "stalls")
"""Terms that a run's steps consist of, but for what multiplies all of them."""
_PLAIN = ("ideal_steps", "slow_steps", "step_noise", "run_effect", "model_error", "congestion")
STOPS = ("lost_work", "restarts", "spares")
PER_TIME = ("fail_slow", "fewer_replicas", *STOPS)
"""Terms as many of which come as a run is long."""


@dataclass(frozen=True)
class StallProcess:
    """Rare stops of the whole job: a compound Poisson process."""

    rate_per_s: float | Array  # stalls of the job per second of stepping, or [cluster]
    lengths: Array  # [sample] what a stall adds to the run [s], drawn with replacement; not empty
    seen: float = 1.0  # stalls that the rate is worth, against those measured in a run

    @property
    def per_second(self) -> float | Array:
        """Mean seconds of stalls in a second of stepping [1]."""
        return self.rate_per_s * float(self.lengths.mean())


@dataclass(frozen=True)
class Drift:
    """What slows all steps together: a lognormal AR(1) series in seconds, and a daily wave."""

    cv: float | Array  # spread of a step's relative drift [1], or [cluster]
    tau_s: float | Array  # its correlation time; 0: new in every step
    diurnal_cv: float = 0.0  # spread over a day of a cosine [1]
    diurnal_peak_s: float = 0.0  # time of day when it is highest
    initial: Array | None = None  # [cluster] drift at the start over `cv` [1]; None: drawn


@dataclass(frozen=True)
class Cause:
    """A kind of failure."""

    name: str
    share: float  # of all failures, relative to the other causes'
    detection_s: float
    restart_s: float
    nodes: int = 1  # that go at once, and as many spares come
    repair_s: float = 0.0  # mean time, exponential, until these are spares again, together


class Shrink(NamedTuple):
    """A job that goes on with fewer replicas while nodes are missing."""

    replicas: int
    nodes: float  # of one replica


@dataclass(frozen=True)
class Interruptions:
    """Failures of any node, a Poisson process in time; each stops the whole job."""

    per_1000_node_days: float
    n_nodes: int
    detection_s: float = 0.0  # from a failure to its detection
    restart_s: float = 0.0  # from there to the first step
    spares: int | None = None  # nodes at hand to replace failed ones; None: always enough
    repair_s: float = 0.0  # mean time, exponential, until a replaced node is a spare again
    causes: tuple[Cause, ...] = ()  # none: all failures alike, a node replaced each time
    shrink: Shrink | None = None  # instead of waiting for spares
    restart_success: float = 1.0  # share of restarts that work; the others are tried again

    @property
    def rate_per_s(self) -> float:
        """Failures of the whole job [1/s]."""
        return self.per_1000_node_days * self.n_nodes / 1000.0 / DAY_S

    @property
    def kinds(self) -> tuple[Cause, ...]:
        """The causes; one that stands for all where none are distinguished."""
        alike = Cause("failure", 1.0, self.detection_s, self.restart_s, repair_s=self.repair_s)
        return self.causes or (alike,)

    @property
    def mean_down_s(self) -> float:
        """Mean time from a failure to the next step, where spares are at hand [s]."""
        shares = np.array([k.share for k in self.kinds])
        each = self.restart_success
        down = np.array([k.detection_s + k.restart_s / each for k in self.kinds])
        return float(shares @ down / shares.sum())


@dataclass(frozen=True)
class Episodes:
    """Fail-slow episodes: a node, or its links, slow for a while."""

    rate_per_node_hour: float
    n_nodes: int
    mean_s: float  # of a lognormal length
    cv: float
    slowdowns: Array  # [sample] step time meanwhile over that without [1], drawn with replacement
    detection_s: float = np.inf  # until the node is found
    replaced: bool = False  # once found, and the job goes back to its last checkpoint

    @property
    def rate_per_s(self) -> float:
        """Episodes of the whole job [1/s]."""
        return self.rate_per_node_hour * self.n_nodes / HOUR_S


@dataclass(frozen=True)
class Checkpoints:
    """A checkpoint after every `interval_steps`."""

    interval_steps: int
    write_s: float
    blocking: bool = True  # the job stands still; else a checkpoint counts from when it is written


@dataclass(frozen=True)
class Evaluations:
    """An evaluation after every `interval_steps`."""

    interval_steps: int
    duration_s: float


@dataclass(frozen=True)
class RunModel:
    """All that a run is made of."""

    mean: Array  # [cluster, state] a step at drift 1 without stalls [s]; state 0 is undisturbed
    std: Array  # [cluster, state] its spread [s]
    ideal_s: float | None = None  # step with every effect at 1; the terms tell what is beyond
    profile: Array | None = None  # [step] relative work, mean 1, where steps differ
    run_cv: float = 0.0  # spread between runs that nothing else explains [1]
    model_error: float = 0.0  # std of the log of what all steps may be wrong by; its median is 1
    drift: Drift = field(default_factory=lambda: Drift(0.0, 0.0))
    stalls: StallProcess | None = None
    regime: Array | None = None  # [state, state] rates of change [1/s], 0 on the diagonal
    episodes: Episodes | None = None
    interruptions: Interruptions | None = None
    checkpoints: Checkpoints | None = None
    evaluations: Evaluations | None = None
    residuals: Array = field(default_factory=lambda: np.empty(0))  # [sample] steps less their mean
    n_nodes: int = 1  # of which a replacement renews one

    @property
    def pauses(self) -> dict[str, tuple[int, float]]:
        """Interval [step] and length [s] of what pauses the run regularly, by term."""
        found, c, e = {}, self.checkpoints, self.evaluations
        if c is not None and c.blocking:
            found["checkpoints"] = c.interval_steps, c.write_s
        if e is not None:
            found["evaluations"] = e.interval_steps, e.duration_s
        return found


@dataclass(frozen=True)
class Runs:
    """Runs that were drawn; run i starts on cluster i modulo their number."""

    total: Array  # [run] seconds
    cluster: Index  # [run]
    terms: dict[str, Array]  # [run] seconds by term, which add up to the total
    marks: Array  # [run, mark] when that many steps were done for good [s]; of the first runs
    failures: Index  # [run]


class RunChunk(NamedTuple):
    """What the runs of one chunk come to; arrays as in `Runs`."""

    total: Array
    cluster: Index
    terms: Array  # [term, run]
    marks: Array
    failures: Index


def term_names(model: RunModel) -> tuple[str, ...]:
    """Names of the terms a run of this model consists of."""
    slow = () if model.episodes is None else ("fail_slow",)
    fail = model.interruptions
    fewer = () if fail is None or fail.shrink is None else ("fewer_replicas",)
    return (*_PLAIN, *slow, *fewer, "drift", "stalls", "evaluations", "checkpoints", *STOPS)
