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
from prism.common import sizes
from prism.common.errors import PrismError, option
from prism.common.sizes import check_size
from prism.engine import LANES
from prism.jobs.devices import DEVICES
from prism.jobs.job import Job, load_job
from prism.simulation.estimated import Estimate
from prism.simulation.execution.tasks import (
    TASK_S,
    Arrays,
    Shared,
    Task,
    begun,
    cores,
    is_remote,
    keeps_tasks,
    n_threads,
    run_tasks,
)
from prism.simulation.prepare import Prepared, check_threads, prepare, silence
from prism.simulation.program import (
    Program,
    check_finite,
    ideal_program,
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

Progress = Callable[[int, int], None]
Run = tuple[Program, range, int | engine.Keys]  # blocks of a program, under a seed or keys
PATH_SHARE, PATH_BLOCKS = 16, 4  # one cluster in 16 has its critical path followed, at most 4
EXPOSED_BLOCKS = 16  # clusters simulated again with communication of zero cost, group by group
SECONDS_PER_SAMPLE, BLOCK_S = 2e-9, 1e-5  # of an op-sample and of a block, one core, about
CHUNK_S = 0.04  # of one call into the engine [s]
MOST_BLOCKS = 1 << 14  # of a task that is sent away or kept: 8 MB of step times
REPLICATES = 12_800  # 200 cluster draws: ten beyond p95 of the time-to-train
MAX_SEED = 1 << 63


class Exposed(NamedTuple):
    """Exposed communication as a share of the step, and its standard error by cluster [1]."""

    share: float
    error: float  # NaN for one cluster


def fresh_seed() -> int:
    """Return a seed from fresh entropy, below 2**53 so that every JSON reader keeps it whole."""
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0] >> np.uint64(11))


def default_threads() -> int:
    """Processors this process may use."""
    return cores()


def run_blocks(
    program: Program,
    blocks: range,
    seed: int | engine.Keys,
    threads: int = 1,
    track: bool = False,
    progress: Progress | None = None,
) -> Arrays:
    """Run blocks of 64 replicates; keys instead of a seed draw some of the inputs anew.

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
    return run_each([(program, blocks, seed)], threads, track, progress)[0]


def run_each(
    runs: Sequence[Run],
    threads: int = 1,
    track: bool = False,
    progress: Progress | None = None,
) -> list[Arrays]:
    """Do several runs side by side; gives what `run_blocks` gives of each."""
    out: list[Arrays] = []
    tasks: list[Task] = []
    places: list[tuple[int, range]] = []  # of a task: its run, and which of its blocks
    for program, blocks, seed in runs:
        keys = seed if isinstance(seed, engine.Keys) else make_keys(seed)
        if needs_fit(program):
            program = fit_unseen(program, keys, threads).program
        n, step = len(blocks), program.arrays(track)
        check_finite(step)
        each = count_draws(program) * LANES * SECONDS_PER_SAMPLE + BLOCK_S  # of a block [s]
        size = min(CHUNK_S / each, -(-n // (4 * threads)))
        size = max(1, int(min(TASK_S / each, MOST_BLOCKS) if keeps_tasks() else size))
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

    report = None if progress is None else lambda: progress(finished, n_blocks)
    run_tasks(tasks, take, threads, report)
    return out


def settle_call(replicates: int, seed: int | None, threads: int | None) -> tuple[int, int]:
    """Return the seed and the threads of a call, fresh or as many as there are where not given.

    Raises
    ------
    PrismError
        A number is out of range; it names the number and its range.
    """
    seed = fresh_seed() if seed is None else seed
    threads = default_threads() if threads is None else threads
    check_whole("replicates", replicates, 1)
    check_whole("seed", seed, 0, MAX_SEED - 1)
    check_whole("threads", threads, 1)
    name = option("replicates")
    check_size(name, {"replicates": (replicates, sizes.REPLICATE)}, name)
    return seed, threads


def check_whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Refuse an argument that is no whole number within its bounds."""
    text = f"at least {low}" if high is None else f"between {low} and {high:.0e}"
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise PrismError(f"{option(name)} = {value!r}: expected a whole number, {text}")
    if value < low or (high is not None and value > high):
        raise PrismError(f"{option(name)} = {value}: expected {text}")


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
    seed, threads = settle_call(replicates, seed, threads)
    found = simulate_step(prepare(job, seed, engine=engine), replicates, seed, threads, progress)
    return Estimate(found.assign_attrs(wall_seconds=time.perf_counter() - begin))


def simulate_step(
    step: Prepared,
    replicates: int,
    seed: int,
    threads: int,
    progress: Progress | None = None,
    parts: bool = True,
    meanwhile: "Callable[[xr.Dataset], None] | None" = None,
) -> "xr.Dataset":
    """Simulate a step that was prepared under the same seed; see `simulate`.

    Where the time of the step goes, the parts, takes longer than a few replicates. `meanwhile` is
    called with the result without them, beside their search where there are threads for both.
    """
    begin, job = time.perf_counter(), step.job
    n_blocks = -(-replicates // LANES)
    if not is_remote():
        check_threads(step, min(threads, n_blocks))
    ideal, _, ideal_path, _ = run_blocks(ideal_program(step.program), range(1), seed, track=True)
    warm_up(step.program, seed)
    started = time.perf_counter()
    unseen = fit_unseen(step.program, seed, threads) if needs_fit(step.program) else None
    step = step if unseen is None else replace(step, program=unseen.program)
    times, effects, _, _ = run_blocks(
        step.program, range(n_blocks), seed, threads, progress=progress
    )
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
    attrs = provenance(job, {"replicates": replicates, "seed": seed})
    samples = count_draws(step.program) * n_blocks * LANES + (unseen.n_draws if unseen else 0)
    values |= of_job
    attrs |= _engine_figures(samples, seconds, threads, n_blocks) | {"kind": "simulation"}

    def find(beat: Progress | None) -> dict[str, Any]:
        return _find_parts(step, times, seed, threads, beat) if parts else {}

    with begun(find, 1 if meanwhile is None else threads) as finish:
        if meanwhile is not None:
            meanwhile(make_dataset(values, coords, attrs))
        values |= finish()
    if parts:
        coords |= {"stage": np.arange(step.graph.n_stages), "part": values.pop("part")}
    return make_dataset(values, coords, attrs | {"wall_seconds": time.perf_counter() - begin})


def _find_parts(
    step: Prepared, times: NDArray[np.float32], seed: int, threads: int, beat: Progress | None
) -> dict[str, Any]:
    """Find where the time of steps [cluster, lane] goes; "part": the names of the parts."""
    n = min(max(1, len(times) // PATH_SHARE), PATH_BLOCKS)
    run = partial(run_blocks, seed=seed, threads=threads, progress=beat)
    path, idle = _critical_path(step.program, range(n), run)
    first, classes = times[:EXPOSED_BLOCKS], freed_classes(step.program.classes)
    silent = {
        group: run(silence(step, seed, freed), range(len(first)))[0]
        for group, freed in classes.items()
    }
    exposed = _exposed(times, list(silent.values())[-1]) if silent else Exposed(0.0, 0.0)
    loss = find_time_loss(step, first, silent, seed, run)
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


def _engine_figures(samples: int, seconds: float, threads: int, blocks: int) -> dict[str, float]:
    """Cost of the run; ns per op-sample is that of one of the threads that had work."""
    working = n_threads(threads)
    each = seconds * min(working, blocks) / samples * 1e9 if samples else 0.0
    threads = working if is_remote() else threads
    found = {"op_samples": samples, "seconds": seconds, "ns_per_op_sample": each}
    return {f"{ENGINE}{name}": x for name, x in {**found, "threads": threads}.items()}


def warm_up(program: Program, seed: int) -> None:
    """Compile (or load) the engine, so that its time is not counted as work."""
    if is_remote():  # workers compile for themselves
        return
    none = np.zeros_like(program.graph.phase_lo)
    empty = program.graph._replace(phase_lo=none, phase_hi=none, n_state=1)
    run_blocks(ignore_unseen(replace(program, graph=empty)), range(1), seed)


def _critical_path(
    program: Program, blocks: range, run: Callable[..., Arrays]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean seconds of each class on the critical path, and mean idle share of each stage."""
    times, _, path, busy = run(program, blocks, track=True)
    groups = program.graph.n_replicas * program.n_members
    idle = 1.0 - busy / groups / times[:, None, :]
    return path.mean(axis=(0, 2), dtype=np.float64), idle.mean(axis=(0, 2), dtype=np.float64)


def find_exposed(step: Prepared, times: NDArray[Any], seed: int, threads: int) -> Exposed:
    """Find the share of the step that communication of zero cost would save.

    The first clusters of `times` [cluster, lane] are simulated once more with the same keys, so
    that the two differ by communication alone.
    """
    silent = _run_silent(step, min(len(times), EXPOSED_BLOCKS), seed, threads)
    return Exposed(0.0, 0.0) if silent is None else _exposed(times, silent)


def _run_silent(step: Prepared, n: int, seed: int, threads: int) -> NDArray[Any] | None:
    """Run the first clusters with communication of zero cost; None where there is none."""
    if not any(map(is_communication, step.program.classes)):
        return None
    return run_blocks(silence(step, seed), range(n), seed, threads)[0]


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
