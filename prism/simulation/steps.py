"""Run the engine: replicate ranges as tasks, one dataset out.

One block of 64 replicates is one cluster; blocks are independent and keyed, so the same seed gives
the same bits for any number of threads, and the first n of N replicates do not change with N.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.common.errors import PrismError
from prism.engine import LANES
from prism.jobs.devices import DEVICES
from prism.jobs.job import Job, load_job
from prism.simulation.estimated import Estimate
from prism.simulation.execution.context import Progress, RunContext, make_context
from prism.simulation.execution.tasks import TASK_S, Arrays, Shared, Task, begun, run_tasks
from prism.simulation.prepare import Prepared, check_threads, prepare, silence
from prism.simulation.program import (
    Program,
    check_finite,
    ideal_program,
    join_idle,
    make_keys,
    make_room,
    run_chunk,
)
from prism.simulation.results import ENGINE, job_values, make_dataset, provenance
from prism.simulation.sampledreplicas import (
    count_draws,
    describe_replicas,
    fit_unseen,
    ignore_unseen,
    needs_fit,
)
from prism.simulation.timeloss import find_time_loss, freed_classes
from prism.simulation.variability import is_communication

if TYPE_CHECKING:
    import xarray as xr

Run = tuple[Program, range, int | engine.Keys]  # blocks of a program, under a seed or keys
PATH_SHARE, PATH_BLOCKS = 16, 4  # one cluster in 16 has its critical path followed, at most 4
EXPOSED_BLOCKS = 16  # clusters simulated again with communication of zero cost, group by group
SECONDS_PER_SAMPLE, BLOCK_S = 2e-9, 1e-5  # of an op-sample and of a block, one core, about
CHUNK_S = 0.04  # of one call into the engine [s]
MOST_BLOCKS = 1 << 14  # of a task that is sent away or kept: 8 MB of step times
REPLICATES = 12_800  # 200 cluster draws: ten beyond p95 of the time-to-train


class Exposed(NamedTuple):
    """Exposed communication as a share of the step, and its standard error by cluster [1]."""

    share: float
    error: float  # NaN for one cluster


def run_blocks(
    program: Program,
    blocks: range,
    context: RunContext,
    track: bool = False,
) -> Arrays:
    """Run blocks of 64 replicates.

    A program that leaves replicas out, without a pilot yet, runs its pilot first.

    Returns
    -------
    time, effect : float32 [block, lane]
        Step time [s] and step effect [1].
    path : float32 [block, class, lane]
        Seconds on the critical path; no classes unless ``track``.
    busy : float32 [block, stage, lane]
        Seconds of local ops over all replicas; zero unless ``track``.
    """
    return run_each([(program, blocks, context.seed)], context, track)[0]


def run_each(
    runs: Sequence[Run],
    context: RunContext,
    track: bool = False,
) -> list[Arrays]:
    """Do several runs side by side, each under its own seed or keys, which draw some inputs anew.

    Gives what `run_blocks` gives of each.
    """
    out: list[Arrays] = []
    tasks: list[Task] = []
    places: list[tuple[int, range]] = []  # of a task: its run, and which of its blocks
    for program, blocks, seed in runs:
        keys = seed if isinstance(seed, engine.Keys) else make_keys(seed)
        if needs_fit(program):
            program = fit_unseen(program, context, keys).program
        n, step = len(blocks), program.arrays(track)
        check_finite(step, program.added)
        each = count_draws(program) * LANES * SECONDS_PER_SAMPLE + BLOCK_S  # of a block [s]
        size = min(CHUNK_S / each, -(-n // (4 * context.threads)))
        size = max(1, int(min(TASK_S / each, MOST_BLOCKS) if context.keeps_tasks else size))
        shared = Shared(program.work(track))
        for chunk in (range(i, min(i + size, n)) for i in range(0, n, size)):
            args = blocks[chunk.start], len(chunk), keys
            tasks.append(Task(run_chunk, shared, args, len(chunk) * each))
            places.append((len(out), chunk))
        out.append(make_room(step, n))
    finished, n_blocks = 0, sum(len(blocks) for _, blocks, _ in runs)

    def take(i: int, found: Arrays) -> None:
        nonlocal finished
        run, chunk = places[i]
        for whole, part in zip(out[run], found, strict=track):
            whole[chunk.start : chunk.stop] = part
        finished += len(chunk)

    run_tasks(tasks, take, context, lambda: context.report(finished, n_blocks))
    return out


def simulate(
    job: Job | str | Path,
    replicates: int = REPLICATES,
    seed: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    engine: str = "auto",
) -> "Estimate":
    """Simulate one training step many times.

    Parameters
    ----------
    job : Job, str or path
        A job, its file, or the name of a shipped one.
    replicates : int
        Repetitions of the step; every 64 share one cluster (one draw of all persistent effects).
    seed : int, optional
        None takes fresh entropy and records it.
    threads : int, optional
        None takes all processors. The result does not depend on it.
    progress : callable, optional
        Called with (blocks done, blocks).
    engine : str
        ``exact`` simulates every replica, ``exchangeable`` the slowest and a sample of the others
        where that holds (see `prism.simulation.sampledreplicas`), ``auto`` every one of up to
        1,024.

    Returns
    -------
    Estimate
        ``step_time`` [s] and more by replicate, see `prism.simulation.results.VARIABLES`; tables
        ``quantities`` and ``parts``.

    Raises
    ------
    PrismError
        The job cannot be built, or a number is out of range.

    Examples
    --------
    >>> import prism
    >>> result = prism.simulate("pipeline-8x32", replicates=256, seed=1)
    >>> round(float(result.step_time.quantile(0.95)), 1)  # s
    121.5
    >>> result.step_time.attrs["units"]
    's'
    """
    begin = time.perf_counter()
    job = job if isinstance(job, Job) else load_job(job)
    context = make_context(seed, threads, progress, replicates)
    found = simulate_step(prepare(job, context.seed, engine=engine), replicates, context)
    return Estimate(found.assign_attrs(wall_seconds=time.perf_counter() - begin))


def simulate_step(
    step: Prepared,
    replicates: int,
    context: RunContext,
    parts: bool = True,
    meanwhile: "Callable[[xr.Dataset], None] | None" = None,
) -> "xr.Dataset":
    """Simulate a step that was prepared under the same seed; see `simulate`.

    Where the time of the step goes, the parts, takes longer than a few replicates. `meanwhile` is
    called with the result without them, beside their search where there are threads for both.
    """
    begin, job, quiet = time.perf_counter(), step.job, context.quiet
    n_blocks = -(-replicates // LANES)
    if not context.is_remote:
        check_threads(step, min(context.threads, n_blocks))
    ideal, _, ideal_path, _ = run_blocks(ideal_program(step.program), range(1), quiet, track=True)
    warm_up(step.program, context)
    started = time.perf_counter()
    unseen = fit_unseen(step.program, quiet) if needs_fit(step.program) else None
    step = step if unseen is None else replace(step, program=unseen.program)
    times, effects, _, _ = run_blocks(step.program, range(n_blocks), context)
    seconds = time.perf_counter() - started
    step_time = times.reshape(-1)[:replicates].astype(np.float64)
    if not (np.all(np.isfinite(step_time)) and np.all(step_time > 0.0)):
        raise PrismError(
            f"{job.source}: steps take 0 s, or longer than 32 bits hold; durations and slowdowns "
            "must stay within 1e-30 and 1e30 s: check their units"
        )
    values = {
        "step_time": step_time,
        "step_effect": effects.reshape(-1)[:replicates].astype(np.float64),
        "cluster_idx": np.arange(replicates) // LANES,
        "ideal_step_time": float(ideal[0, 0]),
        "ideal_critical_path_time": ideal_path[0, :, 0].astype(np.float64),
        **_efficiency(step, float(step_time.mean())),
        "replicas": describe_replicas(step.choice, unseen),
    }
    of_job, coords = job_values(job)
    coords |= {"kernel_class": list(step.program.classes)}
    attrs = provenance(job, {"replicates": replicates, "seed": context.seed})
    samples = count_draws(step.program) * n_blocks * LANES + (unseen.n_draws if unseen else 0)
    values |= of_job
    attrs |= _engine_figures(samples, seconds, context, n_blocks) | {"kind": "simulation"}

    if parts and meanwhile is None:
        values |= _find_parts(step, times, quiet)
    elif meanwhile is not None:
        with begun(partial(_find_parts, step, times), context) as finish:
            meanwhile(make_dataset(values, coords, attrs))
            values |= finish()
    if parts:
        coords |= {"stage": np.arange(step.graph.n_stages), "part": values.pop("part")}
    return make_dataset(values, coords, attrs | {"wall_seconds": time.perf_counter() - begin})


def _find_parts(step: Prepared, times: NDArray[np.float32], context: RunContext) -> dict[str, Any]:
    """Find where the time of steps [cluster, lane] goes; "part": the names of the parts."""
    n = min(max(1, len(times) // PATH_SHARE), PATH_BLOCKS)
    run, seed = partial(run_blocks, context=context), context.seed
    path, idle = _critical_path(step.program, range(n), run)
    first, classes = times[:EXPOSED_BLOCKS], freed_classes(step.program.classes)
    free, silent = join_idle(step.program), dict[str, NDArray[Any]]()
    late = [x for x in step.program.added if x.moments() is None]
    exposed = find_exposed(step, times, context) if late else None
    added = step.program.added
    for each in late:  # what steps wait for comes first: what is free would only wait longer
        added = tuple(x for x in added if x is not each)
        silent[each.part] = run(replace(step.program, added=added), range(len(first)))[0]
    for group, freed in classes.items():
        free = replace(silence(step, seed, freed), added=added)
        silent[group] = run(free, range(len(first)))[0]
    if exposed is None:
        exposed = _exposed(times, list(silent.values())[-1]) if silent else Exposed(0.0, 0.0)
    loss = find_time_loss(step, first, silent, free, run)
    return {
        "critical_path_time": path,
        "idle_fraction": idle,
        "exposed_communication": exposed.share,
        "exposed_communication_se": exposed.error,
        "time_loss_mean_share": loss.mean,
        "time_loss_mean_share_se": loss.mean_error,
        "time_loss_variance_share": loss.variance,
        "time_loss_variance_share_se": loss.variance_error,
        "part": loss.names,
    }


def _engine_figures(
    samples: int, seconds: float, context: RunContext, blocks: int
) -> dict[str, float]:
    """Cost of the run; ns per op-sample is that of one of the threads that had work."""
    working = context.n_working
    each = seconds * min(working, blocks) / samples * 1e9 if samples else 0.0
    threads = working if context.is_remote else context.threads
    found = {"op_samples": samples, "seconds": seconds, "ns_per_op_sample": each}
    return {f"{ENGINE}{name}": x for name, x in {**found, "threads": threads}.items()}


def warm_up(program: Program, context: RunContext) -> None:
    """Compile (or load) the engine, so that its time is not counted as work."""
    if context.is_remote:  # workers compile for themselves
        return
    none = np.zeros_like(program.graph.phase_lo)
    empty = program.graph._replace(phase_lo=none, phase_hi=none, n_state=1)
    run_blocks(ignore_unseen(replace(program, graph=empty)), range(1), context.quiet)


def _critical_path(
    program: Program, blocks: range, run: Callable[..., Arrays]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean seconds of each class on the critical path, and mean idle share of each stage."""
    times, _, path, busy = run(program, blocks, track=True)
    groups = program.graph.n_replicas * program.n_members
    idle = 1.0 - busy / groups / times[:, None, :]
    return path.mean(axis=(0, 2), dtype=np.float64), idle.mean(axis=(0, 2), dtype=np.float64)


def find_exposed(step: Prepared, times: NDArray[Any], context: RunContext) -> Exposed:
    """Find the share of the step that communication of zero cost would save.

    The first clusters of `times` [cluster, lane] are simulated once more with the same keys, so
    that the two differ by communication alone.
    """
    silent = _run_silent(step, min(len(times), EXPOSED_BLOCKS), context)
    return Exposed(0.0, 0.0) if silent is None else _exposed(times, silent)


def _run_silent(step: Prepared, n: int, context: RunContext) -> NDArray[Any] | None:
    """Run the first clusters with communication of zero cost; None where there is none."""
    if not any(map(is_communication, step.program.classes)):
        return None
    return run_blocks(silence(step, context.seed), range(n), context.quiet)[0]


def _exposed(times: NDArray[Any], silent: NDArray[Any]) -> Exposed:
    n = len(silent)
    whole, rest = (x.mean(axis=1, dtype=np.float64) for x in (times[:n], silent))
    mean = float(whole.mean())
    left = float(rest.mean()) / mean
    apart = rest - left * whole
    error = float(apart.std(ddof=1)) / mean / math.sqrt(n) if n > 1 else math.nan
    return Exposed(max(0.0, 1.0 - left), error)


def _efficiency(step: Prepared, mean_step_time: float) -> dict[str, Any]:
    """Model flop per second and GPU, and its share of the device's peak, where there is a model."""
    if step.workload is None or step.workload.model_flop <= 0.0:
        return {}
    rate = step.workload.model_flop / mean_step_time / step.job.world_size
    peak = DEVICES[step.job.cluster.device].flop_per_s(step.job.parallelism.precision)
    return {"model_flops_per_gpu": rate, "mfu": rate / peak}
