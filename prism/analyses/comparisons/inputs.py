"""What is compared: a result of `prism estimate`, or measured step times.

Each becomes samples by quantity, with what is independent in them, and notes on what was left out:
a slow start, steps that only one side has. Left out: any statistics.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.common.arrays import Flags
from prism.common.errors import PrismError, option
from prism.common.netcdf import read_netcdf, wrap_corrupt_file
from prism.common.resampling import LEAST_STEPS, Pairing, Sample
from prism.common.text import format_count
from prism.jobs.job import flatten
from prism.models.changes.find import choose_steps, find_changes
from prism.models.steptimes.series import clock_grain
from prism.simulation.summary import model_error_time
from prism.traces import StepTimes, read_step_times
from prism.traces.choose import rows_in_name

if TYPE_CHECKING:
    import xarray as xr


STEPS, RUNS = "step_time", "time_to_train"
_COMMON = 0.8  # of the steps of either run that both must have to be paired
_FEW_REPLICATES = 2  # clusters
_EXPECTED = "a result.nc, which prism estimate JOB -o DIR writes"


@dataclass(frozen=True)
class Input:
    """One side of a comparison."""

    name: str  # as the user named it
    source: str  # simulated or measured
    samples: dict[str, Sample]  # by quantity: step_time, time_to_train
    job: str = ""  # that was simulated
    seed: int | None = None  # of the simulation
    keys: dict[str, Any] = field(default_factory=dict)  # values of its job by dotted key
    mean_over: int = 1  # steps that one value is the mean of
    start: int = 0  # steps at the beginning of each run that are slower than the rest
    figures: dict[str, Any] = field(default_factory=dict)  # what else a summary tells
    notes: list[str] = field(default_factory=list)


def read_input(source: Any, options: Mapping[str, Any], steps: str | None, seed: int) -> Input:
    """Read one side; `options` are those of `read_step_times`."""
    if not isinstance(source, (str, os.PathLike)):
        return _simulated(source, str(source.attrs.get("job_name", "a result")))
    path = Path(source)
    if path.is_dir():
        path = path / "result.nc"
        if not path.exists():
            raise PrismError(
                f"{source}: a folder without result.nc; expected one that prism estimate JOB -o "
                "DIR wrote, its result.nc, or a file of step times"
            )
    if path.suffix == ".nc":
        with wrap_corrupt_file(path, _EXPECTED):
            return _simulated(_open_result(path), str(source))
    if not path.exists() and path.suffix in ("", ".yaml", ".yml") and "[" not in str(source):
        raise PrismError(
            f"{source}: no such file or folder; compare takes results and step times: to compare "
            f"jobs, run prism estimate {source} -o DIR on each and compare the folders"
        )
    if path.suffix in (".yaml", ".yml"):
        raise PrismError(
            f"{source}: a job; expected a result or step times: run prism estimate {source} -o DIR "
            "and compare DIR"
        )
    name, rows = rows_in_name(str(source), options["where"])
    times = choose_steps(read_step_times(name, **{**options, "where": rows}), steps=steps)
    return _measured(times, str(source), seed)


def _open_result(path: Path) -> "xr.Dataset":
    """Read a result of prism estimate."""
    if not path.is_file():
        raise PrismError(f"{path}: no such file; prism estimate JOB -o DIR writes result.nc")
    found = read_netcdf(path, _EXPECTED)
    kind = str(found.attrs.get("kind", ""))
    if kind in ("trace", "calibrated", "steps"):
        raise PrismError(
            f"{path}: a model of prism fit, not a result; run prism estimate {path} -o DIR on each "
            "and compare the folders"
        )
    simulated = kind in ("", "simulation", "estimate", "steps_estimate")
    if not simulated or STEPS not in found or "seed" not in found.attrs:
        what = f"a {kind}" if kind else "a netCDF file without simulated steps"
        raise PrismError(f"{path}: {what}; expected a result of prism estimate, or step times")
    return found


def _simulated(result: "xr.Dataset", name: str) -> Input:
    """Take the samples of a result, by cluster."""
    if STEPS not in result or "cluster_idx" not in result:
        raise PrismError(f"{name}: holds no simulated steps; expected what prism.estimate returns")
    samples = {STEPS: _clustered(result[STEPS], result["cluster_idx"])}
    if RUNS in result:
        # what the model may be wrong by is wrong of both, and no difference between them
        runs = _clustered(result[RUNS] - model_error_time(result), result["run_cluster_idx"])
        if runs.n_units >= _FEW_REPLICATES:
            samples[RUNS] = runs
    if samples[STEPS].n_units < _FEW_REPLICATES:
        raise PrismError(
            f"{name}: {format_count(samples[STEPS].values.size, 'replicate')} on one draw of the "
            "cluster; expected "
            "two draws at least: run prism estimate with --replicates 128 or more"
        )
    if not all((sample.values > 0.0).all() for sample in samples.values()):
        raise PrismError(f"{name}: holds times that are not above 0; run prism estimate again")
    figures = {"replicates": int(samples[STEPS].values.size), "clusters": samples[STEPS].n_units}
    if RUNS in samples:
        figures |= {"run_replicates": int(samples[RUNS].values.size),
                    "steps_per_run": int(result.attrs.get("steps", 0))}  # fmt: skip
    job = json.loads(result.attrs.get("job", "{}"))
    keys = {key: value for key, value in job.items() if key not in ("name", "source")}
    return Input(
        name, "simulated", samples, str(result.attrs.get("job_name", "")),
        int(result.attrs["seed"]) if "seed" in result.attrs else None,
        keys=dict(flatten(keys)), figures=figures,
    )  # fmt: skip


def _clustered(values: "xr.DataArray", cluster: "xr.DataArray") -> Sample:
    draw = np.sort(np.asarray(cluster, np.int64), kind="stable")
    order = np.argsort(np.asarray(cluster), kind="stable")
    unit = np.unique(draw, return_inverse=True)[1]
    return Sample(np.asarray(values, np.float64)[order], unit, draw, "clusters")


def _measured(times: StepTimes, name: str, seed: int) -> Input:
    """Take measured steps, by run; or the totals of runs, where each has one value."""
    names, first, unit = np.unique(times.run, return_index=True, return_inverse=True)
    place = np.argsort(np.argsort(first, kind="stable"), kind="stable")[unit]
    order = np.lexsort((times.step, place))
    seconds, notes = times.seconds[order], list(times.notes)
    grain = clock_grain(seconds[:, None])
    if grain > 0.0:
        # the same draws for either side, so that equal files stay equal
        seconds = seconds + grain * (np.random.default_rng([seed, 21]).random(seconds.size) - 0.5)
        notes.append(f"the clock shows steps of {grain:g} s; values are spread evenly over them")
    sample = Sample(
        seconds, place[order], times.step[order],
        "runs" if names.size > 1 else "steps",
    )  # fmt: skip
    figures = {"steps": int(seconds.size), "runs": int(names.size), "taken": times.taken}
    if names.size > 1 and names.size == seconds.size:
        return Input(name, "measured", {RUNS: sample}, figures=figures, notes=notes)
    if seconds.size < LEAST_STEPS:
        raise PrismError(
            f"{name}: {format_count(seconds.size, 'step')}; expected at least {LEAST_STEPS}, or "
            "several runs with "
            "a total each"
        )
    warm_up = int(find_changes(times).warm_up_of_run.max(initial=0))
    return Input(
        name, "measured", {STEPS: sample}, mean_over=times.mean_over, start=warm_up,
        figures=figures, notes=notes,
    )  # fmt: skip


def brought_together(
    a: Input, b: Input, skip: int | None
) -> tuple[Input, Input, Pairing, list[str]]:
    """Make two sides comparable: the same start left out, the same steps where they are paired."""
    notes: list[str] = []
    if a.mean_over != b.mean_over:
        finer, coarser = (a, b) if a.mean_over < b.mean_over else (b, a)
        raise PrismError(
            f"{coarser.name}: values are means over {format_count(coarser.mean_over, 'step')}, "
            "those of "
            f"{finer.name} over {finer.mean_over}: their spread and percentiles say different "
            "things; log both alike"
        )
    if {a.source, b.source} == {"measured"}:
        left_out = max(a.start, b.start) if skip is None else skip
        if left_out and STEPS in a.samples and STEPS in b.samples:
            a, b = _without_start(a, left_out), _without_start(b, left_out)
            why = "slower than the rest" if skip is None else "as asked"
            what = (
                "step of each run is"
                if left_out == 1
                else f"{format_count(left_out, 'step')} of each run are"
            )
            notes.append(f"the first {what} left out ({why}); {option('skip')} N sets it")
    elif skip is not None:
        a, b = (_without_start(x, skip) if x.source == "measured" else x for x in (a, b))
    if not a.samples.keys() & b.samples.keys():
        raise PrismError(
            f"{a.name} holds {' and '.join(a.samples)}, {b.name} {' and '.join(b.samples)}: "
            "nothing to compare; one value per run is a total, several are steps"
        )
    if a.source == b.source == "simulated":
        if a.seed is None or a.seed != b.seed:
            return a, b, None, notes
        for name in a.samples.keys() & b.samples.keys():
            a, b, kept = _in_common(a, b, name)
            if kept is not None and name == STEPS:
                notes.append(
                    f"only {format_count(kept, 'cluster draw')} compared: those that both have"
                )
        return a, b, "cluster", notes
    first, second = a.samples.get(STEPS), b.samples.get(STEPS)
    if first is None or second is None or not first.kind == second.kind == "steps":
        return a, b, None, notes
    common = np.intersect1d(first.step, second.step).size
    if common < max(LEAST_STEPS, _COMMON * max(first.values.size, second.values.size)):
        return a, b, None, notes
    a, b, kept = _in_common(a, b, STEPS)
    if kept is not None:
        notes.append(f"only {format_count(kept, 'step')} compared: those that both runs have")
    return a, b, "step", notes


def _in_common(a: Input, b: Input, name: str) -> tuple[Input, Input, int | None]:
    """Keep the steps or cluster draws that both have; how many, where one has more."""
    of_a, of_b = (np.unique(x.samples[name].step) for x in (a, b))
    common = np.intersect1d(of_a, of_b)
    a, b = (_with(x, np.isin(x.samples[name].step, common), name) for x in (a, b))
    return a, b, None if common.size == max(of_a.size, of_b.size) else int(common.size)


def _without_start(side: Input, skip: int) -> Input:
    """Leave out the first steps of each run."""
    sample = side.samples.get(STEPS)
    if sample is None:
        return side
    kept = sample.place_in_unit() >= skip
    if kept.sum() < LEAST_STEPS:
        raise PrismError(
            f"{option('skip')} {skip}: leaves {format_count(int(kept.sum()), 'step')} of "
            f"{side.name}; "
            f"expected at least {LEAST_STEPS}"
        )
    return _with(side, kept)


def _with(side: Input, kept: Flags, name: str = STEPS) -> Input:
    """Keep some of the values."""
    left = side.samples[name].select(kept)
    count = {"steps": int(kept.sum())} if side.source == "measured" else {}
    return replace(side, samples=side.samples | {name: left}, figures=side.figures | count)


def job_differences(a: Input, b: Input) -> list[dict[str, Any]]:
    """Keys in which the jobs of two results differ, with both values; None where one has none."""
    if not a.keys or not b.keys:
        return []
    pairs = ((key, a.keys.get(key), b.keys.get(key)) for key in dict.fromkeys([*a.keys, *b.keys]))
    return [{"key": key, "a": old, "b": new} for key, old, new in pairs if old != new]


def describe(side: Input) -> dict[str, Any]:
    """Figures of one side that a summary tells."""
    known = {"job": side.job, "seed": side.seed} if side.source == "simulated" else {}
    return {"name": side.name, "source": side.source, **known, **side.figures}
