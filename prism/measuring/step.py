"""`prism measure step`: a small real training job on this machine, recorded op by op.

Processes train a small transformer, data parallel or as a pipeline, and time their own ops; the
result is a folder with a trace that `prism fit`, `replay` and `validate --trace` take, the step
times beside it, and the profiler's own traces where asked for. Left out: jobs of one's own, whose
profiler traces prism reads (`prism fit FOLDER`).
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.measuring.figures import load_warning, state_spans, time_figures
from prism.measuring.machine import describe_machine, read_state
from prism.measuring.session import Progress, check_threads
from prism.measuring.tinymodel import Sizes
from prism.measuring.torchlib import choose_device

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


TRACE, STEPS = "trace.csv", "steps.csv"
PARALLEL = ("ddp", "pipeline")
SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True)
class StepJob:
    """A training job to run.

    Attributes
    ----------
    ranks : int
        Processes.
    parallel : str
        ``ddp``: each trains the whole model on its own microbatches. ``pipeline``: each is a
        stage.
    microbatches : int
        Of one rank (ddp) or of the pipeline, in each step.
    sizes : Sizes
        Of the model and a microbatch.
    schedule : str
        ``1f1b`` or ``gpipe``.
    dtype : str
        Number format by its torch name.
    bucket_bytes : int
        Gradients that are reduced together [byte].

    Examples
    --------
    >>> import prism
    >>> prism.StepJob(ranks=4, parallel="pipeline", microbatches=8).schedule
    '1f1b'
    """

    ranks: int = 2
    parallel: str = "ddp"
    microbatches: int = 4
    sizes: Sizes = Sizes()
    schedule: str = "1f1b"
    dtype: str = "float32"
    bucket_bytes: int = 4 * 2**20


def measure_step(
    output: str | os.PathLike[str] | None = None,
    job: StepJob | None = None,
    *,
    steps: int = 200,
    warm_up: int = 10,
    profile: int = 0,
    device: str | None = None,
    limit_s: float | None = None,
    seed: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Train a small job and record it.

    Parameters
    ----------
    output : path, optional
        Folder for ``trace.csv`` (the tidy table of ops), ``steps.csv``, ``summary.json`` and, with
        `profile`, ``kineto/rank0.json`` and so on.
    job : StepJob, optional
    steps, warm_up : int
        Steps that are recorded, and steps before them.
    profile : int
        Further steps that run under torch's profiler.
    device, limit_s, seed, threads, progress
        As of `prism.measure`; one thread a rank where None.

    Returns
    -------
    xarray.Dataset
        ``step_time`` [step; s]; ``prism.summary`` gives the figures.

    Raises
    ------
    PrismError
        The layout is impossible, torch is missing, or a rank failed.

    Examples
    --------
    >>> import prism
    >>> recorded = prism.measure_step("out", prism.StepJob(ranks=2), steps=20)  # doctest: +SKIP
    """
    from prism.measuring.ranks import choose_backend, launch, under_launcher
    from prism.measuring.steptrace import read_ops
    from prism.simulation.steps import fresh_seed

    job = job or StepJob()
    check_job(job)
    where = choose_device(device)
    if under_launcher():
        raise PrismError(
            "measure step starts its ranks itself, whose clocks have to be one machine's; run it "
            "without a launcher, or profile the job and give its traces to prism fit"
        )
    threads = check_threads(threads)
    backend = choose_backend(where, job.ranks)
    states = [read_state(where)]
    with tempfile.TemporaryDirectory(prefix="prism-step-") as folder:
        spec: dict[str, Any] = {
            "task": "step", "ranks": job.ranks, "backend": backend, "device": where,
            "threads": threads, "parallel": job.parallel, "microbatches": job.microbatches,
            "sizes": job.sizes._asdict(), "schedule": job.schedule, "dtype": job.dtype,
            "bucket_bytes": job.bucket_bytes, "steps": steps + profile, "warm_up": warm_up,
            "profile": profile, "limit_s": limit_s, "folder": folder,
            "seed": fresh_seed() if seed is None else seed,
        }  # fmt: skip
        launch(spec, progress)
        states.append(read_state(where))
        table = read_ops(Path(folder), job.ranks, job.parallel == "pipeline")
        about = {
            "machine": describe_machine(where), "date": date.today().isoformat(),
            "threads": threads, "backend": backend, "states": states, "seed": spec["seed"],
            "job": {**spec["sizes"], "ranks": job.ranks, "parallel": job.parallel,
                    "microbatches": job.microbatches, "schedule": job.schedule,
                    "dtype": job.dtype, "bucket_bytes": job.bucket_bytes,
                    "parameters": count_parameters(job.sizes)},
        }  # fmt: skip
        result = _dataset(table, about)
        if output is not None:
            _write(output, table, result, Path(folder) / "kineto")
    return result


def check_job(job: StepJob) -> None:
    """Refuse a job that cannot run.

    Raises
    ------
    PrismError
    """
    s = job.sizes
    if job.parallel not in PARALLEL:
        raise PrismError(f"--parallel {job.parallel}: expected one of {', '.join(PARALLEL)}")
    if job.schedule not in SCHEDULES:
        raise PrismError(f"--schedule {job.schedule}: expected one of {', '.join(SCHEDULES)}")
    if job.ranks < 2:
        raise PrismError(f"--ranks {job.ranks}: expected 2 or more, which is what takes part")
    if s.hidden % s.heads:
        raise PrismError(
            f"--hidden {s.hidden} does not divide over --heads {s.heads}; change one of them"
        )
    if job.parallel == "pipeline" and s.layers < job.ranks:
        raise PrismError(
            f"--layers {s.layers} over {format_count(job.ranks, 'stage')} leaves one without; "
            "use --layers "
            f"{job.ranks} or more, or fewer --ranks"
        )


def count_parameters(sizes: Sizes) -> int:
    """Count the parameters of the small model.

    Examples
    --------
    >>> count_parameters(Sizes(layers=1, hidden=8, heads=2, vocab=10))
    976
    """
    layer = 12 * sizes.hidden**2 + 4 * sizes.hidden
    return sizes.layers * layer + 2 * sizes.vocab * sizes.hidden + 2 * sizes.hidden


def summarize_step(dataset: xr.Dataset) -> dict[str, Any]:
    """Figures of a measured job: its step time, its ops, the machine, warnings."""
    import json

    about = json.loads(dataset.attrs["about"])
    seconds = np.asarray(dataset["step_time"].values, dtype=np.float64)
    figures = time_figures(seconds, np.zeros(seconds.size, np.int64))
    figures |= {"std": float(seconds.std()), "p5": float(np.quantile(seconds, 0.05))}
    warnings = []
    cores, ranks = about["machine"]["cores"], about["job"]["ranks"]
    if about["machine"]["device_kind"] == "cpu" and ranks * about["threads"] > cores:
        warnings.append(
            f"{format_count(ranks, 'rank')} of {format_count(about['threads'], 'thread')} on "
            f"{cores} cores: they wait for each "
            "other's turn, which is in every duration"
        )
    warnings += load_warning(about["machine"], about["states"])
    return {
        "kind": "step", "seed": about["seed"], "machine": about["machine"], "job": about["job"],
        "step_time": figures, "ops": json.loads(dataset.attrs["ops"]),
        "states": state_spans(about["states"]), "warnings": warnings,
    }  # fmt: skip


def _dataset(table: pd.DataFrame, about: dict[str, Any]) -> xr.Dataset:
    """Step times as a dataset, with the ops' figures."""
    import json

    import xarray as xr

    from prism.measuring.steptrace import step_times, summarize_ops

    steps = step_times(table)
    units = {"long_name": "first op's begin to last op's end, over all ranks", "units": "s"}
    return xr.Dataset(
        {"step_time": ("step", steps["step_s"].to_numpy(), units)},
        {"step": steps["step"].to_numpy()},
        {
            "kind": "measured_step",
            "about": json.dumps(about),
            "ops": json.dumps(summarize_ops(table)),
        },
    )


def _write(
    output: str | os.PathLike[str], table: pd.DataFrame, result: xr.Dataset, kineto: Path
) -> None:
    """Write the folder: trace, steps, summary, and the profiler's traces where there are some."""
    import json
    import shutil

    from prism.common.files import atomic_files
    from prism.measuring.steptrace import step_times

    with atomic_files(output) as folder:
        table.to_csv(folder / TRACE, index=False, float_format="%.9f")
        step_times(table).to_csv(folder / STEPS, index=False, float_format="%.9f")
        summary = json.dumps(summarize_step(result), indent=2)
        (folder / "summary.json").write_text(summary + "\n", encoding="utf-8")
    if kineto.is_dir():
        with atomic_files(Path(output) / "kineto") as folder:
            for file in sorted(kineto.iterdir()):
                shutil.copy(file, folder / file.name)
