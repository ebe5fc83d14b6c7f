"""What a job's step would take with the other shipped libraries of its device, about."""

from typing import TYPE_CHECKING, Any

import numpy as np

from prism.analyses.differences import Candidate, difference
from prism.common.errors import PrismError
from prism.distributions.library import library_names, load_library
from prism.engine import LANES
from prism.simulation.execution.context import RunContext
from prism.simulation.prepare import Prepared, prepare_again
from prism.simulation.steps import run_blocks

if TYPE_CHECKING:
    import xarray as xr

DRAWS, LEAST = 8, 128
"""Cluster draws with each library, and the least that a job has: they cost some percent of it."""


def other_libraries(step: Prepared, dataset: "xr.Dataset", context: RunContext) -> list[Any]:
    """Simulate a few of a job's cluster draws with each other library of its device.

    Returns name, p95 and mean of the step over the job's own on the same draws, and half of the
    95 % interval of the first [1]; none where the job has effects of its own, few draws, or more
    replicas than are simulated.
    """
    v, size = step.job.variability, DRAWS * LANES
    own = v.library or ""
    plain = v.dependence == "full" and not v.effects.model_dump(exclude_none=True)
    sampled = step.choice is not None and step.choice.engine != "exact"  # each needs a pilot
    few = dataset.step_time.size < LEAST * LANES
    if few or own not in library_names() or step.workload is None or sampled or not plain:
        return []
    times = np.asarray(dataset.step_time[:size], np.float64).reshape(DRAWS, LANES)
    base, found = Candidate(times=times), []
    for name in library_names():
        if name.partition("-")[0] != own.partition("-")[0] or name == own:
            continue
        try:
            program = prepare_again(step, load_library(name), context.seed).program
        except PrismError:  # what the job sets does not go with that library
            continue
        drawn = run_blocks(program, range(DRAWS), context.quiet)[0].astype(np.float64)
        gap = difference(Candidate(times=drawn), base, "p95")
        mean = float(drawn.mean() / times.mean())
        found.append((name, 1.0 + gap.share, mean, gap.half_widths[1]))
    return found
