"""A calibrated library: a set of distributions fitted to measured step times, and its file.

The set that the measured jobs name, with two factors on nominal durations, its spreads scaled, the
step effect and the stalls replaced by measured ones; and beside it the measured steps of each size,
which validation compares with. It stands wherever a library does.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.common.arrays import Array
from prism.common.netcdf import read_netcdf, wrap_corrupt_file
from prism.distributions.distribution import Distribution, constant, empirical
from prism.distributions.library import Entry, Library, to_dataset
from prism.distributions.modelfile import json_of
from prism.jobs.jobspec.frommodel import CALIBRATED as KIND
from prism.jobs.jobspec.frommodel import model_attrs
from prism.simulation.variability import is_communication
from prism.workload.work import COMMUNICATION_FACTOR, COMPUTE_FACTOR

if TYPE_CHECKING:
    import xarray as xr

_KNOTS = 513  # of a distribution kept as quantiles


@dataclass(frozen=True)
class StepSetting:
    """What measurements put in the place of the library's step effect and stalls."""

    shape: Array  # [sample] deviations of steps, unit standard deviation
    relative: float  # what all ranks share, as a share of the step [1]
    # the same, as a time whatever the step's length, in the seconds of `nominal_step`: a job's mean
    # step is known only once it is simulated [s]
    fixed_s: float
    memory_s: float  # correlation time [s]
    # stalls of the job per hour, and per hour and node [1/h]
    job_rate: float
    node_rate: float
    stall_s: Array  # [stall] what each adds [s]


def with_factors(library: Library, compute: float, communication: float) -> Library:
    """Return the library with factors on nominal durations."""
    return _with(library, {
        COMPUTE_FACTOR: Entry(
            COMPUTE_FACTOR, "calibration", "factor on the nominal time of kernels", number=compute
        ),
        COMMUNICATION_FACTOR: Entry(
            COMMUNICATION_FACTOR, "calibration", "factor on the nominal time of messages",
            number=communication,
        ),
    })  # fmt: skip


def with_spreads(library: Library, between: float, within: float) -> Library:
    """Return the library with its rank effect and its spreads within a run scaled."""
    entries = {}
    for name, entry in library.entries.items():
        factor = {"rank": between, "microbatch": within, "call": within}.get(name)
        factor = within if name.startswith("residual/") else factor
        if factor is not None and entry.distribution is not None:
            source = f"{entry.source}; spread x {factor:.3g} by calibration"
            entries[name] = replace(
                entry, distribution=entry.distribution.spread_by(factor), source=source
            )
    return _with(library, entries)


def with_steps(library: Library, s: StepSetting) -> Library:
    """Return the library with the step effect and the stalls that were measured."""
    lengths = s.stall_s if s.stall_s.size else np.zeros(1)
    mean = float(lengths.mean())
    errors = [name for name in library.entries if name.startswith("run/model_error")]
    figures: dict[str, tuple[float, str, str]] = {
        "step/relative": (s.relative, "1", "spread that is a share of the step"),
        "step/fixed_s": (s.fixed_s, "s", "spread that is a time, whatever the step's length"),
        "step/correlation_time_s": (s.memory_s, "s", "memory of the step effect"),
        "jitter/mean_s": (0.0, "s", "time added to every step: in the step effect here"),
        **dict.fromkeys(errors, (0.0, "1", "model error: a calibration has its own")),
        "stall/job_rate_per_hour": (s.job_rate, "1/h", "stalls of the job"),
        "stall/node_rate_per_hour": (s.node_rate, "1/h", "stalls of the job, for each node"),
        "stall/duration_s": (mean, "s", "what a stall adds"),
        "stall/duration_cv": (float(lengths.std()) / mean if mean else 0.0, "1", "its CV"),
    }
    entries = {
        name: Entry(name, "calibration", text, number=value, units=units)
        for name, (value, units, text) in figures.items()
    }
    cv = max(s.relative, 1e-6 if s.fixed_s > 0.0 else 0.0)
    distribution = _distribution_of(s.shape).scaled_to(cv)
    entries["step"] = Entry(
        "step", "calibration", "what all ranks share in a step", distribution=distribution
    )
    return _with(library, entries)


def _with(library: Library, entries: Mapping[str, Entry]) -> Library:
    return replace(library, entries={**library.entries, **entries})


def _distribution_of(shape: Array) -> Distribution:
    """Distribution of mean 1 from deviations of unit spread, narrow enough to stay above 0.5."""
    if shape.size < 2 or np.ptp(shape) == 0.0:
        return constant()
    q = np.linspace(0.0, 1.0, min(_KNOTS, shape.size))
    values = np.quantile(shape, q)
    unit = 0.5 / max(1.0, -float(values.min()))
    return empirical(q.tolist(), (1.0 + unit * values).tolist())


# ---------------------------------------------------------------------------------------- file
@dataclass(frozen=True)
class MeasuredSize:
    """One size that a library was calibrated on."""

    label: str
    # GPUs, microbatches of a replica, measured steps
    world_size: int
    microbatches: int
    n: int
    steps_s: Array  # [sample] quantiles of the measured steps [s]


def calibrated_to_dataset(
    library: Library, sizes: list[MeasuredSize], report: dict[str, Any], job: dict[str, Any],
    attrs: dict[str, Any],
) -> "xr.Dataset":  # fmt: skip
    """Lay a calibrated library out: as a library's file, with what it is based on."""
    dataset = to_dataset(library)
    most = max(s.steps_s.size for s in sizes)
    steps = np.full((len(sizes), most), np.nan)
    for row, size in zip(steps, sizes, strict=True):
        row[: size.steps_s.size] = size.steps_s
    what = {"units": "s", "long_name": "measured steps, ascending"}
    dataset["measured_steps"] = (("size", "sample"), steps, what)
    for name in ("world_size", "microbatches", "n"):
        values = [getattr(s, name) for s in sizes]
        dataset[f"size_{name}"] = ("size", values, {"units": "1", "long_name": name})
    dataset.coords["size"] = [s.label for s in sizes]
    text = {"units": "1", "long_name": "what the fit printed"}
    dataset["report"] = ((), json.dumps(report), text)
    return dataset.assign_attrs(
        {**attrs, "kind": KIND, "base_library": library.name, "job": json.dumps(job)}
    )


@dataclass(frozen=True)
class Calibration:
    """What a calibrated library says of itself: the sizes it is based on, and its report."""

    sizes: tuple[MeasuredSize, ...]
    report: dict[str, Any]

    def nearest(self, world_size: int) -> MeasuredSize:
        """Return the size with the nearest number of GPUs, as a ratio."""
        return min(self.sizes, key=lambda s: abs(math.log(s.world_size / world_size)))

    def line(self, microbatches: int) -> float:
        """Median step on a straight line in microbatches [s]; of one count, in proportion."""
        counts = np.array([s.microbatches for s in self.sizes], np.float64)
        medians = np.array([float(np.median(s.steps_s)) for s in self.sizes])
        if np.ptp(counts) == 0.0:
            return float(medians.mean() / counts[0] * microbatches)
        return float(np.polyval(np.polyfit(counts, medians, 1), microbatches))

    def error(self, share: float) -> dict[str, float]:
        """Relative error of a predicted mean, and what of the library's own is left in it."""
        return {"mean": self.mean_error(share), "library_share": self.library_share(share)}

    def mean_error(self, share: float) -> float:
        """Relative error of a predicted mean step, of a `communication_share` on its path [1]."""
        own = float(self.report["scales"]["model_error"])
        return math.sqrt(self._variance("covariance", share) + own**2)

    def library_share(self, share: float) -> float:
        """Share of the library's own uncertainty of that mean that is left [1]."""
        prior = self._variance("prior_covariance", share)
        return min(1.0, self._variance("covariance", share) / prior)

    def _variance(self, name: str, share: float) -> float:
        gradient = np.array([1.0 - share, share])
        return float(gradient @ np.array(self.report["scales"][name]) @ gradient)


def communication_share(dataset: "xr.Dataset") -> float:
    """Share of the mean critical path that is communication [1].

    It says how the mean step follows a small change of all communication, which is what an error of
    its factor is; exposed communication is what a change by the whole of it saves.
    """
    path = dataset.critical_path_time
    links = [is_communication(str(name)) for name in path.kernel_class.values]
    total = float(path.sum())
    return float(path.values[links].sum()) / total if total > 0.0 else 0.0


def load_calibration(path: str | Path) -> Calibration | None:
    """Read what a calibrated library is based on; None for another library.

    Raises PrismError: the file is calibrated, but not whole.
    """
    if not is_calibrated(path):
        return None
    expected = "a calibrated model, which prism fit --calibrate JOB=STEPS -o MODEL.nc makes"
    with wrap_corrupt_file(path, expected):
        dataset = read_netcdf(path, expected)
        steps = np.asarray(dataset["measured_steps"].values, np.float64)
        gpus, microbatches, n = (
            np.asarray(dataset[f"size_{k}"]) for k in ("world_size", "microbatches", "n")
        )
        sizes = tuple(
            MeasuredSize(
                str(label), int(gpus[i]), int(microbatches[i]), int(n[i]), row[np.isfinite(row)]
            )
            for i, (label, row) in enumerate(zip(dataset["size"].values, steps, strict=True))
        )
        report = json_of(dataset, "report")
        for name, bound in (("covariance", -1e-12), ("prior_covariance", 0.0)):
            matrix = np.array(report["scales"][name], np.float64)
            if not (np.isfinite(matrix).all() and np.linalg.eigvalsh(matrix).min() > bound):
                raise ValueError(f"{name} {report['scales'][name]}")
        return Calibration(sizes, report)


def is_calibrated(path: str | Path) -> bool:
    """Say whether a file is a calibrated model, by its attribute ``kind``."""
    return model_attrs(path).get("kind") == KIND


__all__ = [
    "Calibration", "MeasuredSize", "StepSetting", "calibrated_to_dataset",
    "is_calibrated", "load_calibration", "with_factors", "with_spreads", "with_steps",
]  # fmt: skip
