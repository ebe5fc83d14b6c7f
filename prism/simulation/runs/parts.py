"""The parts of a run: what its steps take, and everything that comes between them.

Clusters differ for good; all steps of a run drift together, with a memory in seconds; congestion
and fail-slow episodes come and go; stalls, evaluations, checkpoints and interruptions take time of
their own. Parameters only. Left out: drawing runs (`prism.simulation.runs.model`), and where the
parts come from (a job's simulated steps, or fitted step times).
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
DAY_S = 86_400.0
HOUR_S = 3_600.0


def _nothing() -> Array:
    return np.empty(0)


@dataclass(frozen=True)
class StallProcess:
    """Rare stops of the whole job: a compound Poisson process.

    Attributes
    ----------
    rate_per_s : float
        Stalls per second of stepping, of the job as a whole [1/s].
    lengths : float64 [sample]
        What a stall adds to the run [s]; drawn with replacement.
    """

    rate_per_s: float
    lengths: Array


@dataclass(frozen=True)
class Drift:
    """What slows all steps together: a Gaussian AR(1) series in seconds, and a daily wave.

    Attributes
    ----------
    cv, tau_s : float
        Spread of a step's relative drift [1] and its correlation time [s]; 0 s: new in every step.
    diurnal_cv, diurnal_peak_s : float
        Spread over a day of a cosine [1], and the time of day when it is highest [s].
    initial : float64 [cluster], optional
        Drift at the start, in units of ``cv`` [1], where it is known; drawn where None.
    """

    cv: float
    tau_s: float
    diurnal_cv: float = 0.0
    diurnal_peak_s: float = 0.0
    initial: Array | None = None


@dataclass(frozen=True)
class CongestionStates:
    """A Markov process over the states of `RunModel.mean`, on through interruptions.

    Attributes
    ----------
    rates : float64 [state, state]
        Transition rates [1/s]; the diagonal is ignored.
    """

    rates: Array


@dataclass(frozen=True)
class Cause:
    """A kind of failure: its share of all [1], its own times [s], and if a node is replaced."""

    name: str
    share: float
    detection_s: float
    restart_s: float
    replaces: bool = True


@dataclass(frozen=True)
class Interruptions:
    """Failures of any node, a Poisson process in time; each stops the whole job.

    Attributes
    ----------
    per_1000_node_days : float
        Failures per 1,000 days of one node.
    n_nodes : int
        Nodes of the job.
    detection_s, restart_s : float
        From a failure to its detection, and from there to the first step [s].
    spares : int or None
        Nodes at hand to replace failed ones; None: always enough.
    repair_s : float
        Mean time, exponential, until a replaced node is a spare again [s].
    causes : tuple of Cause
        Kinds of failure; none: all alike, a node replaced each time.
    """

    per_1000_node_days: float
    n_nodes: int
    detection_s: float = 0.0
    restart_s: float = 0.0
    spares: int | None = None
    repair_s: float = 0.0
    causes: tuple[Cause, ...] = ()

    @property
    def rate_per_s(self) -> float:
        """Failures of the whole job [1/s]."""
        return self.per_1000_node_days * self.n_nodes / 1000.0 / DAY_S

    @property
    def kinds(self) -> tuple[Cause, ...]:
        """The causes; one that stands for all where none are told apart."""
        return self.causes or (Cause("failure", 1.0, self.detection_s, self.restart_s),)

    @property
    def mean_down_s(self) -> float:
        """Mean time from a failure to the next step, where spares are at hand [s]."""
        shares = np.array([k.share for k in self.kinds])
        down = np.array([k.detection_s + k.restart_s for k in self.kinds])
        return float(shares @ down / shares.sum())


@dataclass(frozen=True)
class Episodes:
    """Fail-slow episodes: a node, or its links, slow for a while.

    Attributes
    ----------
    rate_per_node_hour : float
        Episodes per node and hour [1/h].
    n_nodes : int
    mean_s, cv : float
        Mean length [s] and its coefficient of variation [1]; lognormal.
    slowdowns : float64 [sample]
        The job's step time meanwhile over that without [1], drawn with replacement; of
        several episodes at a time the worst counts.
    name : str
        The term they are reported under.
    detection_s : float
        Time until the node is found [s].
    replaced : bool
        A found node is replaced: the job goes back to its last checkpoint and restarts.
    """

    rate_per_node_hour: float
    n_nodes: int
    mean_s: float
    cv: float
    slowdowns: Array
    name: str = "fail_slow"
    detection_s: float = np.inf
    replaced: bool = False

    @property
    def rate_per_s(self) -> float:
        """Episodes of the whole job [1/s]."""
        return self.rate_per_node_hour * self.n_nodes / HOUR_S


@dataclass(frozen=True)
class Checkpoints:
    """A checkpoint after every so many steps.

    Attributes
    ----------
    interval_steps : int
    write_s : float
        Time to write one [s]: the job stands still if ``blocking``, else the checkpoint counts
        from when it is written.
    blocking : bool
    """

    interval_steps: int
    write_s: float
    blocking: bool = True


@dataclass(frozen=True)
class Evaluations:
    """An evaluation of some seconds after every so many steps."""

    interval_steps: int
    duration_s: float


@dataclass(frozen=True)
class RunModel:
    """All that a run is made of.

    Attributes
    ----------
    mean, std : float64 [cluster, state]
        A step's mean and spread at drift 1, stalls taken out [s]; state 0 is the undisturbed one.
    ideal_s : float or None
        Step time with every effect at 1 [s]; what is beyond is told apart in the terms.
    profile : float64 [step], optional
        Relative work by step, mean 1, where a schedule makes steps differ.
    run_cv : float
        Spread between runs that nothing else explains, on all steps of a run [1].
    model_error : float
        Standard deviation of the logarithm of what all steps of a run may be wrong by, as the model
        sees them; the factor's median is 1.
    residuals : float64 [sample]
        Steps less their mean [s], for short runs that are walked step by step.
    n_nodes : int
        Nodes of which a replacement renews one.
    """

    mean: Array
    std: Array
    ideal_s: float | None = None
    profile: Array | None = None
    run_cv: float = 0.0
    model_error: float = 0.0
    drift: Drift = field(default_factory=lambda: Drift(0.0, 0.0))
    stalls: StallProcess | None = None
    regime: CongestionStates | None = None
    episodes: tuple[Episodes, ...] = ()
    interruptions: Interruptions | None = None
    checkpoints: Checkpoints | None = None
    evaluations: Evaluations | None = None
    residuals: Array = field(default_factory=_nothing)
    n_nodes: int = 1


@dataclass(frozen=True)
class Runs:
    """Runs that were drawn.

    Attributes
    ----------
    total : float64 [run]
        Time of the whole run [s].
    cluster : int64 [run]
        The cluster it starts on.
    terms : dict of str to float64 [run]
        Seconds by term; they add up to the total.
    marks : float64 [run, mark]
        When so many steps were done for good [s]; of the first runs, where there are many.
    failures : int64 [run]
        Interruptions by failures.
    """

    total: Array
    cluster: NDArray[np.int64]
    terms: dict[str, Array]
    marks: Array
    failures: NDArray[np.int64]
