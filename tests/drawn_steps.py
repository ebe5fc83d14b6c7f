"""Steps of a job without where their time goes."""

from pathlib import Path

import prism
from prism.simulation.execution.context import make_context
from prism.simulation.prepare import prepare
from prism.simulation.steps import simulate_step


def draw_steps(job, replicates, seed, threads=None, engine="auto"):
    """Dataset of the steps that `prism.simulate` gives, without a step's parts.

    Those take five times as long where clusters are few: each group's communication is made free in
    turn. `test_results.py` holds the two against each other.
    """
    job = prism.load_job(job) if isinstance(job, str | Path) else job
    context = make_context(seed, threads, None, replicates)
    return simulate_step(prepare(job, seed, engine=engine), replicates, context, parts=False)
