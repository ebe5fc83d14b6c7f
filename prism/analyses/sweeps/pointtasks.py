"""Settings of a sweep as tasks: built and run whole on a worker, from the job and its library.

What is wrong with a setting comes back as text, so that the others go on.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.analyses.placements.screen import Screen
from prism.common.errors import PrismError
from prism.distributions.library import Library, load_library
from prism.jobs.job import Job
from prism.simulation.draws import cluster_times
from prism.simulation.execution.content import content_hash
from prism.simulation.execution.tasks import Arrays, Shared, Task, as_arrays, run_tasks
from prism.simulation.prepare import Prepared, prepare
from prism.simulation.program import ideal_program
from prism.simulation.results import library_hash
from prism.simulation.steps import Exposed, find_exposed, run_blocks

Array = NDArray[np.float64]
TASK_CLUSTERS = 8
"""Clusters of a setting in one task."""
KEPT_STEPS = 8
"""Settings that a worker keeps ready."""


class Ideal(NamedTuple):
    """A setting without anything random."""

    seconds: float
    model_flop: float
    n_draws: int


class Start(NamedTuple):
    """What a setting's first clusters tell: quiet times [s], exposed communication."""

    quiet: Array
    exposed: Exposed


NO_START = Start(np.empty(0), Exposed(0.0, 0.0))


def find_ideal(step: Prepared, threads: int = 1) -> Ideal:
    """Run a setting with every effect at 1."""
    program = ideal_program(step.program)
    seconds = float(Screen(program, threads).times([program])[0])
    flop = 0.0 if step.workload is None else step.workload.model_flop
    return Ideal(seconds, flop, step.program.n_draws)


def find_steps(
    step: Prepared, clusters: range, seed: int, threads: int, n_quiet: int
) -> tuple[Array, Start]:
    """Simulate some clusters; with the very first, free communication and many clusters' ranks."""
    program, quiet = step.program, np.empty(0)
    times = run_blocks(program, clusters, seed, threads)[0]
    if clusters.start > 0:
        return times, NO_START
    exposed = find_exposed(step, times[:1], seed, threads)
    if (program.ranks.tables >= 0).any():
        quiet = cluster_times(program, range(n_quiet), seed, threads).astype(np.float64)
    return times, Start(quiet, exposed)


def library_of(job: Job) -> Library | None:
    """Return the library of a job, if it names one."""
    return None if job.variability.library is None else load_library(job.variability.library)


@dataclass(frozen=True)
class Setting:
    """What a worker builds a setting from."""

    job: Job
    library: Library | None
    seed: int
    content: str

    def step(self) -> Prepared:
        """Return it ready to run, from among the latest if it is there."""
        with _lock:
            found = _built.pop(self.content, None)
        if found is None:
            found = prepare(self.job, self.seed, self.library)
        with _lock:
            _built[self.content] = found
            while len(_built) > KEPT_STEPS:
                _built.popitem(last=False)
        return found


_built: OrderedDict[str, Prepared] = OrderedDict()
_lock = threading.Lock()


def share(job: Job, seed: int) -> Shared:
    """Return a setting as the data of its tasks, named by its job and by the files it rests on."""
    model = job.variability.model
    files = "" if model is None else content_hash(Path(model).read_bytes())
    content = content_hash(job.model_dump_json(), library_hash(job), files, seed)
    return Shared(Setting(job, library_of(job), seed, content), content)


def ideal_task(setting: Setting) -> Arrays:
    """Task: `find_ideal`, and what was wrong."""
    try:
        return as_arrays(*find_ideal(setting.step()), "")
    except PrismError as error:
        return as_arrays(np.nan, 0.0, 0, str(error))


def steps_task(setting: Setting, first: int, n: int, n_quiet: int) -> Arrays:
    """Task: `find_steps` of n clusters from a first one; the error."""
    try:
        clusters = range(first, first + n)
        times, start = find_steps(setting.step(), clusters, setting.seed, 1, n_quiet)
        return as_arrays(times, *start, "")
    except PrismError as error:
        return as_arrays(np.empty((0, engine.LANES)), *NO_START, str(error))


def run_ideals(settings: Sequence[Shared]) -> list[Ideal | str]:
    """Find the ideal steps of settings on workers; a text says what is wrong with one."""
    found: dict[int, Arrays] = {}
    run_tasks([Task(ideal_task, setting) for setting in settings], found.__setitem__)
    return [
        str(error) or Ideal(float(seconds), float(flop), int(n_draws))
        for seconds, flop, n_draws, error in (found[i] for i in range(len(settings)))
    ]


def run_steps(
    settings: Sequence[Shared], spans: Sequence[range], n_quiet: int
) -> list[tuple[Array, Start] | str]:
    """Simulate a span of clusters of each setting on workers; a text says what is wrong."""
    found: dict[int, Arrays] = {}
    tasks = [
        Task(steps_task, setting, (first, min(TASK_CLUSTERS, span.stop - first), n_quiet))
        for setting, span in zip(settings, spans, strict=True) for first in span[::TASK_CLUSTERS]
    ]  # fmt: skip
    run_tasks(tasks, found.__setitem__)
    in_order = iter(range(len(tasks)))
    out: list[tuple[Array, Start] | str] = []
    for span in spans:
        rows = [found[next(in_order)] for _ in span[::TASK_CLUSTERS]]
        errors = [str(row[3]) for row in rows if str(row[3])]
        times = np.concatenate([row[0] for row in rows]).astype(np.float64)
        start = Start(rows[0][1], Exposed(*map(float, rows[0][2])))
        out.append(errors[0] if errors else (times, start))
    return out
