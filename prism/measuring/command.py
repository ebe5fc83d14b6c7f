"""`prism measure`: distributions measured on the machine at hand, into a library with its sources.

Matrix products, attention and memory-bound kernels on one device, and collectives between ranks.
Returned are the samples themselves; `prism.summary` gives the figures that the command prints.
Left out: whole steps, effects between GPUs and over days, which need traces of the job itself
(`prism fit`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prism.common.errors import PrismError, option
from prism.common.results import Columns, Field, Result
from prism.common.text import format_count, format_duration
from prism.measuring.collectives import OPS, SIZES, collective_cases, parse_size
from prism.measuring.entries import FEWEST, base_library, build_library
from prism.measuring.figures import summarize_samples
from prism.measuring.kernels import KERNELS, build_call, expect_seconds, kernel_cases
from prism.measuring.machine import choose_device, describe_machine, load_torch
from prism.measuring.ranks import choose_backend, measure_ranks, world_size
from prism.measuring.samples import (
    MeasuredCase,
    Samples,
    from_dataset,
    load_samples,
    save_samples,
    to_dataset,
)
from prism.measuring.session import Bench, Plan, Progress, make_timer, run_session

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["gemm", "attention", "memory", "collective"]

SAMPLES = ".samples.nc"  # ending of the file with every call's duration, beside the library

_LONG_S = 600.0  # of a measurement without a limit, above which it says so before it begins


def measure(
    kind: Kind,
    output: str | os.PathLike[str] | None = None,
    *,
    shapes: Sequence[str] = (),
    sizes: Sequence[str] = (),
    ops: Sequence[str] = (),
    job: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    ranks: int = 2,
    tier: str = "nvlink",
    repetitions: int = 2_000,
    warm_up: int = 200,
    flush_l2: bool = False,
    backend: str | None = None,
    sustained: bool = False,
    limit_s: float | None = None,
    base: str | None = None,
    resume: bool = False,
    seed: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    tell: Callable[[str], None] | None = None,
) -> Measurement | None:
    """Measure kernels or collectives on this machine.

    Parameters
    ----------
    kind : str
        ``gemm``, ``attention``, ``memory`` or ``collective``.
    output : path, optional
        Library to write; one that exists keeps its other entries. Every call's duration goes to
        ``NAME.samples.nc`` beside it.
    shapes : sequence of str
        ``MxNxK``; ``BATCHxHEADSxSEQxDIM``; ``ROWSxWIDTH``, by kind; some of each size where empty.
    sizes, ops : sequence of str
        Messages of collectives (``4KiB``, ``1MB``) and which collectives; all where empty.
    job : str, optional
        Take the shapes or messages of this job's ranks.
    dtype : str, optional
        Number format by its torch name; bfloat16 on a GPU, float32 on a processor where None.
    device : str, optional
        ``cpu`` or ``cuda``; the GPU where there is one.
    ranks : int
        Processes of a collective.
    tier : str
        ``nvlink`` (inside a node) or ``network``: what the ranks are joined by.
    repetitions, warm_up : int
        Calls of a case that count, and the most that come before them.
    flush_l2 : bool
        Empty the L2 cache before each call on a GPU.
    backend : str, optional
        Of attention: ``cudnn``, ``fa2``, ``efficient`` or ``math``; where None what torch picks, on
        a processor ``math``.
    sustained : bool
        Run each kernel back to back until its rate settles, as at a GPU's power limit, then count.
    limit_s : float, optional
        Stop after this long [s].
    base : str, optional
        Set that gives what is not measured; see `prism.measuring.entries.base_library`.
    resume : bool
        Go on with the calls in ``NAME.samples.nc``.
    seed : int, optional
        Of the order; that of the calls gone on with, else fresh, where None.
    threads : int, optional
        Of each process on a CPU; one where None, since several wait for each other where others
        use the cores too.
    progress : callable, optional
        Called with calls made and their final number.
    tell : callable, optional
        Called before the first large call with a warning, where it will take long.

    Returns
    -------
    Measurement or None
        Duration [s] of every call; None on ranks but the first under a launcher.

    Raises
    ------
    PrismError
        Bad input, no torch, no such device, the device does not run a kernel, or one call of each
        size takes longer than `limit_s`.

    Examples
    --------
    >>> import prism
    >>> measured = prism.measure("gemm", "mine.nc", shapes=["512x512x512"])  # doctest: +SKIP
    """
    kinds = (*KERNELS, "collective")
    if kind not in kinds:
        raise PrismError(f"measure: kind {kind!r}; expected one of {', '.join(kinds)}")
    where = choose_device(device)
    number = dtype or ("bfloat16" if where == "cuda" else "float32")
    from prism.simulation.execution.context import fresh_seed

    if backend is not None and kind != "attention":
        raise PrismError(f"{option('backend')} {backend}: is of attention, not of {kind}")
    if sustained and kind == "collective":
        raise PrismError(f"{option('sustained')}: is of kernels of one device; leave it out")
    if threads is not None and threads < 1:
        raise PrismError(f"{option('threads')} {threads}: expected 1 or more")
    if kind == "collective":
        world, network = world_size(ranks), choose_backend(where, ranks)
        cases = collective_cases(_messages(sizes, ops, job, where), world, network, number, tier)
    else:
        cases = kernel_cases(kind, _shapes(kind, shapes, job, where), number, where, backend)
    about = {
        "machine": describe_machine(where), "date": date.today().isoformat(),
        "threads": threads or 1, "flush_l2": flush_l2,
    }  # fmt: skip
    samples = Samples.empty(kind, tuple(cases), about)
    file = None if output is None else samples_path(output)
    if resume:
        samples = _resumed(samples, file)
    if seed is None:
        seed = samples.attrs["plan"]["seed"] if "plan" in samples.attrs else fresh_seed()
    plan = Plan(repetitions, warm_up, limit_s=limit_s, device=where, sustained=sustained, seed=seed)
    samples.attrs["plan"] = asdict(plan)
    if kind != "collective":
        _measure_kernels(samples, plan, flush_l2, file, progress, tell)
    elif (found := measure_ranks(samples, file, progress)) is None:
        return None
    else:
        samples = found
    if output is not None:
        write_library(samples, output, base)
    return Measurement(to_dataset(samples))


CASES = Columns("case", (
    Field("label", "text"),
    Field("n", "count", "calls"),
    Field("mean", "s", "mean duration"),
    Field("p50", "s", "median"), Field("p95", "s", "95 % quantile"),
    Field("p99", "s", "99 % quantile"),
    Field("cv", "1", "coefficient of variation"),
    Field("rate", "1/s", "flop or bytes over the median, in rate_units"),
    Field("rate_units", "text", "flop/s or byte/s"),
    Field("n_effective", "1", "independent calls that these are worth"),
    Field("drift", "1", "change of the median over the session"),
))  # fmt: skip


class Measurement(Result):
    """Durations of kernels or collectives, measured on this machine."""

    def figures(self) -> dict[str, Any]:
        """Give all figures, see `Result.figures`."""
        return summarize_samples(from_dataset(self.dataset))

    @cached_property
    def cases(self) -> pd.DataFrame:
        """Duration, spread and rate of every size."""
        return CASES.frame(self.figures()["cases"])


def samples_path(library: str | os.PathLike[str]) -> Path:
    """File with every call's duration, beside a library.

    Examples
    --------
    >>> samples_path("here.nc").name
    'here.samples.nc'
    """
    return Path(library).with_suffix(SAMPLES)


def write_library(
    samples: Samples, output: str | os.PathLike[str], base: str | None = None
) -> None:
    """Lay samples over a base set and write the library."""
    from prism.distributions.library import save_library

    under = base_library(output, base, samples.attrs["machine"]["device"])
    save_library(build_library(samples, under, Path(output).stem), output)


def _shapes(kind: str, shapes: Sequence[str], job: str | None, device: str) -> Sequence[str]:
    """Shapes that were asked for: named, those of a job, or some of each size."""
    if job is not None:
        from prism.measuring.jobsizes import job_shapes

        return (*shapes, *job_shapes(job, kind))
    return shapes or KERNELS[kind].shapes[device]


def _messages(
    sizes: Sequence[str], ops: Sequence[str], job: str | None, device: str
) -> list[tuple[str, int]]:
    """List the collectives and message sizes that were asked for."""
    for op in ops:
        if op not in OPS:
            raise PrismError(f"{option('ops')} {op}: expected one of {', '.join(OPS)}")
    if job is not None:
        from prism.measuring.jobsizes import job_messages

        return [(op, n) for op, n in job_messages(job) if not ops or op in ops]
    numbers = [parse_size(text) for text in sizes or SIZES[device]]
    return [(op, n) for op in ops or OPS for n in numbers]


def _resumed(samples: Samples, file: Path | None) -> Samples:
    """Return the samples to go on with: those of the file, if they are of the same cases."""
    if file is None:
        raise PrismError(f"{option('resume')} goes on with NAME.samples.nc; give -o NAME.nc")
    if not file.is_file():
        return samples
    found = load_samples(file)
    refused = {note.partition(": left out: ")[0] for note in found.attrs.get("notes", ())}
    asked = [case.label for case in samples.cases if case.label not in refused]
    if [case.label for case in found.cases] != asked:
        raise PrismError(
            f"{file}: holds {len(found.cases)} other cases ({found.cases[0].label}, ...); expected "
            f"those of this command; give the same options, or leave {option('resume')} out"
        )
    if found.attrs["machine"]["device"] != samples.attrs["machine"]["device"]:
        raise PrismError(
            f"{file}: was measured on {found.attrs['machine']['device']}, not on "
            f"{samples.attrs['machine']['device']}; leave {option('resume')} out, or choose "
            "another -o"
        )
    found.attrs.pop("stopped", None)
    return found


def _measure_kernels(
    samples: Samples, plan: Plan, flush_l2: bool, file: Path | None,
    progress: Progress | None, tell: Callable[[str], None] | None,
) -> None:  # fmt: skip
    """Measure on this process's device."""
    torch = load_torch()
    before = torch.get_num_threads()
    torch.set_num_threads(samples.attrs["threads"])
    try:
        began = time.perf_counter()
        timer = make_timer(plan.device, torch)
        seconds = expect_seconds(samples.cases, torch, plan.device, timer)
        warning = check_time(samples.cases, seconds, plan)
        if warning and tell is not None:
            tell(warning)
        if flush_l2 and plan.device == "cuda":
            timer.before = _flush(torch)
        samples.attrs["timer_overhead_s"] = timer.overhead_s
        bench = Bench([build_call(case, torch, plan.device) for case in samples.cases], timer)
        keep = None if file is None else lambda now: save_samples(now, file)
        run_session(bench, samples, plan, progress, keep, began)
    finally:
        torch.set_num_threads(before)


def _flush(torch: Any) -> Callable[[], Any]:
    """Return the call that writes a buffer of twice the L2 cache."""
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    flush: Callable[[], Any] = torch.empty(2 * int(l2), dtype=torch.int8, device="cuda").zero_
    return flush


def check_time(cases: Sequence[MeasuredCase], seconds: Sequence[float], plan: Plan) -> str:
    """Say how long a measurement will take where that is long; refuse one beyond its limit.

    `seconds` are what one call of each case may take.
    """
    once, longest = sum(seconds), max(range(len(cases)), key=lambda i: seconds[i])
    sizes = f"{format_count(len(cases), 'size')}"
    what = (
        f"one call of {cases[longest].label} is expected to take {_about_s(seconds[longest])} here"
    )
    if plan.limit_s is not None and once > plan.limit_s:
        raise PrismError(
            f"{option('limit_s')} {plan.limit_s:g}s: {what}, of each of {sizes} "
            f"{_about_s(once)}; give "
            f"{option('limit_s')} {20 * max(1, round(once))}s or more for a distribution of each, "
            "or smaller sizes with --shape"
        )
    if plan.limit_s is not None and FEWEST * once > plan.limit_s:
        return (
            f"{what}: {option('limit_s')} {plan.limit_s:g}s ends before every size has the "
            f"{FEWEST} calls of a distribution, which take {_about_s(FEWEST * once)}"
        )
    whole = plan.repetitions * once
    if plan.limit_s is None and whole > _LONG_S:
        return (
            f"{plan.repetitions:,} calls of each of {sizes} are expected to take "
            f"{_about_s(whole)}; {option('limit_s')} 5m ends earlier with what there is"
        )
    return ""


def _about_s(seconds: float) -> str:
    """Two digits of a time that is an estimate."""
    return format_duration(float(f"{seconds:.2g}"))
