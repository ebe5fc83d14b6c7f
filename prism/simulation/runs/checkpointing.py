"""How often to write checkpoints: expected time of a run under failures, in closed form.

Failures are a Poisson process; one loses the work since the last checkpoint, and during a restart
the job may fail again. Left out: all else (`prism.simulation.runs.model` simulates it).
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class FailureDistribution:
    """Failures of the whole job [1/s], more than none; mean time from one to the next step [s]."""

    rate_per_s: float
    down_s: float


def expected_time(
    work_s: float,
    interval_s: float,
    write_s: float,
    distribution: FailureDistribution,
    blocking: bool = True,
) -> float:
    """Return the expected time of a run [s].

    Parameters
    ----------
    work_s : float
        Time of its steps, each counted once [s].
    interval_s, write_s : float
        Work between two checkpoints, and time to write one [s].
    blocking : bool
        The job stands still while a checkpoint is written.

    Notes
    -----
    Blocking: every interval takes e^(r R) (e^(r (tau + w)) - 1) / r, with r the rate and R the time
    down [1]_, equation 20. In the background a failure within w of a checkpoint loses the interval
    before it too, tau with a chance of w / tau: as if it took w longer to be back.

    References
    ----------
    .. [1] Daly (2006), "A higher order estimate of the optimum checkpoint interval for restart
       dumps", doi:10.1016/j.future.2004.11.016.
    """
    rate, n = distribution.rate_per_s, work_s / interval_s
    pause_s, down_s = (
        (write_s, distribution.down_s) if blocking else (0.0, distribution.down_s + write_s)
    )
    with np.errstate(over="ignore"):
        each = np.exp(rate * down_s) * np.expm1(rate * (interval_s + pause_s)) / rate
    return float(n * each)


def best_interval(write_s: float, distribution: FailureDistribution) -> float:
    """Return the work between two blocking checkpoints that makes the run shortest [s].

    Notes
    -----
    The minimum of (e^(r (tau + w)) - 1) / tau is at r tau = 1 + W(-e^(-r w - 1)), W Lambert's;
    for small r w it is Young's sqrt(2 w / r), doi:10.1145/361147.361115.
    """
    from scipy.special import lambertw

    x = distribution.rate_per_s * write_s
    if x < 1e-9:  # where the branch point swallows the digits
        return float(np.sqrt(2.0 * write_s / distribution.rate_per_s))
    return float((1.0 + lambertw(-np.exp(-x - 1.0)).real) / distribution.rate_per_s)


def best_steps(step_s: float, write_s: float, distribution: FailureDistribution) -> int:
    """Return the number of steps, with what stalls them, that is the best interval.

    One that is written in the background counts as if the job stood still meanwhile, the most that
    it can cost; and none begins before the last is written.
    """
    low = max(1, int(best_interval(write_s, distribution) / step_s))
    times = [expected_time(1.0, n * step_s, write_s, distribution) for n in (low, low + 1)]
    return max(low + int(times[1] < times[0]), int(np.ceil(write_s / step_s)))
