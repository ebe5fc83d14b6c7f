"""A library of links from output of nccl-tests: latency, bandwidth and spread of each collective.

A collective's time over its size is a line, latency and bytes over the bandwidth of the bus; it is
fitted to relative errors, so that small and large messages count alike. Left out: changes of NCCL's
protocol between sizes, which show as what the line leaves.

References
----------
.. [1] Hockney, R. W., "The communication challenge for MPP", Parallel Computing 20 (1994),
   doi:10.1016/S0167-8191(06)80021-9: t = latency + size / bandwidth.
.. [2] nccl-tests, doc/PERFORMANCE.md, https://github.com/NVIDIA/nccl-tests: the bus bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import nnls
from scipy.special import stdtrit

from prism.cluster.nccl import solve_link
from prism.common.arrays import Array, Index
from prism.common.errors import PrismError
from prism.common.text import format_count, format_share
from prism.distributions.library import Entry
from prism.distributions.samples import sample_distribution
from prism.jobs.devices import DEVICES, device_key
from prism.models.kernellibraries.pack import make_library
from prism.traces.formats.nccltests import BandwidthTest, BandwidthTests

if TYPE_CHECKING:
    import xarray as xr


_SIZES = {"small": (0.0, 1e6), "medium": (1e6, 1e8), "large": (1e8, math.inf)}
"""Sizes of message [byte] by which libraries name spreads."""

NCCL_TESTS = {
    "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all",
    "sendrecv": "p2p",
}  # fmt: skip
"""Kinds of collectives by the tests' names; others count as all-reduces."""

_OFF = 0.25  # of the time: a line that misses a size by more says so


@dataclass(frozen=True)
class LinkFit:
    """Line of one collective: time = latency + bus bytes / bandwidth."""

    name: str  # of the collective
    n_hosts: int
    n_gpus: int
    n_runs: int  # of the test
    latency: float  # s
    bandwidth: float  # of the bus, byte/s; infinite where time does not grow with size
    latency_se: float  # standard errors: between three or more runs, else of the line's fit
    bandwidth_se: float
    dof: int  # degrees of freedom behind the errors
    residual: Array  # [time] over the line, less 1
    size: Array  # [time] byte
    repeats: Array  # times over the mean of their size; empty where each size was timed once
    ends: tuple[tuple[float, float], tuple[float, float]]
    """Smallest and largest size [byte], each with its mean time [s]."""
    device: str = ""  # product name of the GPUs

    @property
    def n_domains(self) -> int:
        """NVLink domains that the test spans: a rack of NVL72 is one, as far as it is as fast.

        More than twice what the hosts' network cards carry is NVLink.
        """
        key = device_key(self.device)
        if self.n_hosts < 2 or self.n_gpus > (DEVICES[key].rack_gpus if key else 0):
            return max(1, self.n_hosts)
        cards = self.n_gpus / self.n_hosts * DEVICES[key].network_bytes_per_s
        return 1 if self.bandwidth > 2.0 * cards else self.n_hosts

    @property
    def n(self) -> int:
        """Number of times."""
        return int(self.size.size)


def library_of_collectives(measured: BandwidthTests, source: str) -> xr.Dataset:
    """Make a library of the tests in a file or folder."""
    tests, notes = measured.tests, list(measured.notes)
    kinds: dict[tuple[str, int, int], list[BandwidthTest]] = {}
    for test in tests:
        kinds.setdefault((test.name, len(test.hosts), test.n_gpus), []).append(test)
    fits = []
    for (name, hosts, gpus), runs in kinds.items():
        if len({size for run in runs for size, _ in run.time}) < 2:
            notes.append(f"{runs[0].where}: times of fewer than two sizes: no line through them")
            continue
        fits.append(fit_line(name or "collective", hosts, gpus, runs))
    if not fits:
        raise PrismError(
            f"{source}: no test has the times of two sizes or more; run with several: -b 8 -e 8G "
            "-f 2"
        )
    return make_library(_entries(fits, source), _report(fits, source, notes), source)


def fit_line(name: str, n_hosts: int, n_gpus: int, runs: Sequence[BandwidthTest]) -> LinkFit:
    """Fit time over size for runs of one test.

    Least squares of the relative errors, ``t_i`` by ``(a + b s_i)``, a and b not negative. The bus
    moves ``k s`` bytes, k being the ratio of bus to algorithm bandwidth that the test prints.
    """
    size, time, bus, run = _points(runs)
    k = float(np.median(bus * time / size))
    a, b = _line(size, time)
    line = a + b * size
    residual = time / line - 1.0
    dof = len(runs) - 1 if len(runs) >= 3 else max(1, time.size - 2)
    if len(runs) >= 3:
        each = np.array([_line(size[run == r], time[run == r]) for r in np.unique(run)])
        a_se, b_se = each.std(axis=0, ddof=1) / math.sqrt(len(each))
    else:
        matrix = np.stack([1.0 / time, size / time], axis=1)
        noise = float(((matrix @ [a, b] - 1.0) ** 2).sum()) / dof
        a_se, b_se = np.sqrt(np.diag(np.linalg.pinv(matrix.T @ matrix)) * noise)
    repeats = [time[size == s] / time[size == s].mean() for s in np.unique(size)]
    several = [values for values in repeats if values.size > 1]
    return LinkFit(
        name, n_hosts, n_gpus, len(runs), a, k / b if b > 0.0 else math.inf, float(a_se),
        k * float(b_se) / b**2 if b > 0.0 else math.inf, dof, residual, size,
        np.concatenate(several) if several else np.zeros(0),
        (_mean_at(size.min(), size, time), _mean_at(size.max(), size, time)), runs[0].device,
    )  # fmt: skip


def _mean_at(at: float, size: Array, time: Array) -> tuple[float, float]:
    """One size [byte] and its mean time [s]."""
    return float(at), float(time[size == at].mean())


def _points(runs: Sequence[BandwidthTest]) -> tuple[Array, Array, Array, Index]:
    """Size [byte], time [s], bus bandwidth [byte/s] and run of every time of some size."""
    rows = [
        (size, seconds, run.bus[size, column] * 1e9, number)
        for number, run in enumerate(runs)
        for (size, column), seconds in run.time.items()
        if size > 0
    ]
    size, time, bus, number = (np.array(column) for column in zip(*rows, strict=True))
    return size.astype(np.float64), time, bus, number.astype(np.int64)


def _line(size: Array, time: Array) -> tuple[float, float]:
    """Latency [s] and time per byte [s/byte] that miss times least, in relative terms."""
    scale = float(size.max())
    matrix = np.stack([1.0 / time, size / scale / time], axis=1)
    unit = float(time.mean())
    (a, b), _ = nnls(matrix * unit, np.ones(time.size))
    return float(a) * unit, float(b) * unit / scale


def _entries(fits: Sequence[LinkFit], source: str) -> list[Entry]:
    """Entries of the library: figures of each collective, and the spread of its repeats."""
    entries = []
    for fit in fits:
        where = f"{fit.name}/{fit.n_hosts}x{fit.n_gpus // max(1, fit.n_hosts)}"
        told = (
            f"{source}: nccl-tests, {format_count(fit.n_runs, 'run')}, "
            f"{format_count(fit.n, 'time')}"
        )
        entries.append(Entry(f"{where}/latency", told, "time of a message of size 0",
                             number=fit.latency, units="s", n=fit.n))  # fmt: skip
        if math.isfinite(fit.bandwidth):
            entries.append(Entry(f"{where}/bus_bandwidth", told, "bandwidth of large messages",
                                 number=fit.bandwidth, units="byte/s", n=fit.n))  # fmt: skip
        distribution = sample_distribution(fit.repeats)
        if fit.repeats.size > 1 and distribution.std > 0.0:
            entries.append(Entry(f"{where}/spread", told, "time over the mean of its size",
                                 distribution=distribution, n=int(fit.repeats.size)))  # fmt: skip
    return entries


def _report(fits: Sequence[LinkFit], source: str, notes: list[str]) -> dict[str, Any]:
    """Collect what the lines are, as plain values."""
    rows, warnings = [], []
    for fit in fits:
        worst = int(np.argmax(np.abs(fit.residual)))
        if abs(fit.residual[worst]) > _OFF:
            warnings.append(
                f"{fit.name} on {fit.n_gpus or 'some'} GPUs: the line is off by up to "
                f"{format_share(abs(fit.residual[worst]), 2)} (messages of {fit.size[worst]:,.0f} "
                "bytes): NCCL changes its protocol between sizes; latency and bandwidth hold at "
                "the ends"
            )
        rows.append(_row(fit))
    if not any(fit.repeats.size for fit in fits):
        notes.append("every size was timed once: no spread; repeat the test, or run out of and in "
                     "place")  # fmt: skip
    return {
        "inputs": [source],
        "collectives": rows,
        "links": suggest_links(fits),
        "not_identifiable": [
            "waiting for other ranks, contention with other jobs and with compute: nccl-tests "
            "runs alone",
            "how links vary within a run: each time is a mean over the test's iterations",
        ],
        "warnings": warnings,
        "notes": notes,
    }


def _row(fit: LinkFit) -> dict[str, Any]:
    """One collective of the report."""
    spread = {
        name: float(np.sqrt(np.mean(fit.residual[inside] ** 2)))
        for name, (low, high) in _SIZES.items()
        if (inside := (fit.size >= low) & (fit.size < high)).any()
    }
    finite = math.isfinite(fit.bandwidth)
    wide = float(stdtrit(fit.dof, 0.95))  # two-sided 90 %
    return {
        "name": fit.name, "hosts": fit.n_hosts, "gpus": fit.n_gpus, "runs": fit.n_runs, "n": fit.n,
        "latency_s": fit.latency,
        "latency_ci": [max(0.0, fit.latency - wide * fit.latency_se),
                       fit.latency + wide * fit.latency_se],
        "bus_bytes_per_s": fit.bandwidth if finite else None,
        "bus_ci": [max(0.0, fit.bandwidth - wide * fit.bandwidth_se),
                   fit.bandwidth + wide * fit.bandwidth_se] if finite else [None, None],
        "half_size_bytes": fit.latency * fit.bandwidth if finite else None,
        "off_the_line": spread,
        "repeat_cv": float(fit.repeats.std()) if fit.repeats.size else None,
    }  # fmt: skip


def suggest_links(fits: Sequence[LinkFit]) -> dict[str, dict[str, float]]:
    """Turn the lines into keys of a job's ``cluster.links``.

    Tests in one NVLink domain tell ``nvlink``, in several ``network``; of
    several tests that of the largest bandwidth counts, of a rank's link. With bandwidth and latency
    a job's collective takes what the smallest and the largest message took, see
    `prism.cluster.nccl.solve_link`. The bandwidth is what large messages reached, so that
    efficiency is 1; NVLink's own limit, as of an all-reduce over H100 nodes, counts as the network.
    """
    found: dict[str, dict[str, float]] = {}
    for tier in ("nvlink", "network"):
        solved = [
            solve_link(
                NCCL_TESTS.get(fit.name, "all_reduce"), fit.n_gpus, fit.n_domains, *fit.ends
            )
            for fit in fits
            if (fit.n_domains > 1) == (tier == "network") and math.isfinite(fit.bandwidth)
            and fit.n_gpus > 1
        ]  # fmt: skip
        if solved:
            rate, hop_s = max(solved)
            found[tier] = {
                "bandwidth_gbytes_per_s": float(f"{rate * 1e-9:.4g}"),
                "latency_us": float(f"{1e6 * hop_s:.3g}"),
                "efficiency": 1.0,
            }
    return found
