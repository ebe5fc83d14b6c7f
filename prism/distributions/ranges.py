"""What the figures of a library or model may be: a range for each kind, looked up by name.

What a job may set itself has the job's range.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, get_args

import numpy as np

from prism.common.arrays import Array
from prism.distributions.distribution import PARAM_NAMES, Distribution
from prism.distributions.kerneltables import KernelFit, KernelTable
from prism.jobs.jobspec import values
from prism.jobs.jobspec.effects import Effects


class Range(NamedTuple):
    """Lowest and highest value of a figure; a NaN is outside of each."""

    low: float
    high: float = values.MAX_NUMBER
    above: bool = False  # whether the lowest itself is outside

    def __str__(self) -> str:
        """Say what is expected."""
        return f"{'more than ' if self.above else ''}{self.low:g} and at most {self.high:g}"

    def check(self, name: str, found: Any) -> None:
        """Refuse a number, or an array that holds one, outside: ValueError."""
        x = np.asarray(found, np.float64)
        inside = ((x > self.low) if self.above else (x >= self.low)) & (x <= self.high)
        if not inside.all():
            raise ValueError(f"{name} is {x[~inside].flat[0]:g}, expected {self}")


def range_of(kind: Any) -> Range:
    """Range of a kind of value in a job, as `prism.jobs.jobspec.values` has it."""
    given = get_args(kind)[-1].metadata
    limits = {k: getattr(m, k) for m in given for k in ("ge", "gt", "le") if hasattr(m, k)}
    return Range(limits["gt" if "gt" in limits else "ge"], limits["le"], "gt" in limits)


FINITE = Range(-values.MAX_NUMBER)
COUNT, NUMBER = range_of(values.Count), range_of(values.Number)
SHARE, POSITIVE, NON_NEGATIVE = map(
    range_of, (values.Share, values.Positive, values.NonNegative)
)  # fmt: skip
FACTOR = Range(1e-3, 1e3)  # as slowdowns of nodes, which the engine holds in 32 bits
KINDS = {
    "nominal/*efficiency*": Range(1e-9, 1.0),  # what is slower than that is broken
    "nominal/overlap_cost": SHARE,
    "nominal/derate": FACTOR,
    "nominal/speed_*": FACTOR,
    "nominal/fp8_backward": FACTOR,
    "nominal/*_factor": FACTOR,
    "nominal/*_ratio": FACTOR,
    "run/model_error*": SHARE,
    "run/largest_gpus*": COUNT,
}
"""Kinds of figures by name, the first that fits; others are 0 or more."""
POWER = Range(0.0, 4.0, above=True)  # of a size in a duration: never falling
KERNEL_SIZE = Range(0.0, 1e24, above=True)  # of a kernel, its flop among them
RATE = Range(1.0, 1e24)  # flop or bytes a second: far beyond any device on both sides
SAME = 1e-6  # of moments that were computed again: rounding, far below what an effect's CV is


def figure_range(name: str) -> Range:
    """Range of a library's figure."""
    effect, _, key = name.partition("/")
    if effect in Effects.model_fields:
        block = get_args(Effects.model_fields[effect].annotation)[0]
        if key in block.model_fields:
            return range_of(get_args(block.model_fields[key].annotation)[0])
    return next((r for pattern, r in KINDS.items() if fnmatchcase(name, pattern)), NON_NEGATIVE)


def check_distribution(distribution: Distribution, mean: float, std: float) -> None:
    """Refuse a distribution that is not of mean 1, or not the one that was written: ValueError."""
    for name, value, written in (
        ("mean", distribution.mean, mean),
        ("standard deviation", distribution.std, std),
    ):
        if not abs(value - written) <= SAME * max(1.0, abs(written)):
            raise ValueError(f"its {name} is {value:g}, and {written:g} by the file")
    if not abs(distribution.mean - 1.0) <= SAME:
        raise ValueError(f"its mean is {distribution.mean:g}, expected 1")


def used_part(row: Array) -> list[float]:
    """Numbers of a row that is filled up with NaN at its end; ValueError where one is within."""
    n = int(np.flatnonzero(~np.isnan(row)).max(initial=-1)) + 1
    FINITE.check("a parameter or knot", row[:n])
    return [float(x) for x in row[:n]]


def check_params(family: str, params: list[float]) -> None:
    """Refuse another number of parameters than the family has: ValueError."""
    names = PARAM_NAMES.get(family)
    if names is not None and len(params) != len(names):
        raise ValueError(f"{len(params)} parameters of {family}, expected {len(names)}")


TABLE_AXES = {
    "gemm": ("m", "n", "k"),
    "attention": ("batch", "heads", "seq", "dim"),
    "nvlink": ("ranks", "bytes"),
}
"""Sizes by which tables tell kernels of a family apart; or by their flop alone."""


def check_tables(tables: Mapping[str, KernelTable], sizes: Collection[str] | None = None) -> None:
    """Refuse tables of unknown sizes, that do not rise from above 0, or with rates of none.

    Raises ValueError.
    """
    for name, table in tables.items():
        family = name.partition("/")[0].removesuffix("_backward")
        known = set(sizes or {"flop", "head_dim", *TABLE_AXES.get(family, ())})
        if unknown := set(table.axes) - known:
            raise ValueError(f"{name}: unknown size {min(unknown)}; known: {sorted(known)}")
        RATE.check(f"a rate of {name}", table.rate)
        for axis, grid in table.axes.items():
            POSITIVE.check(f"{name}: {axis}", grid)
            if not grid.size or (np.diff(grid) <= 0.0).any():
                raise ValueError(f"{name}: {axis} does not rise")


KERNEL_SIZES = {
    "gemm": ("m", "n", "k"),
    "grouped_gemm": ("experts", "m", "n", "k"),
    "attention": ("batch", "heads", "kv_heads", "seq", "head_dim", "v_head_dim"),
    "rms_norm": ("rows", "columns"),
    "layer_norm": ("rows", "columns"),
    "memory": ("bytes",),
    "gated_delta": ("tokens", "seq", "heads", "head_dim"),
    "kda": ("tokens", "seq", "heads", "head_dim"),
    "mamba2": ("tokens", "seq", "heads", "head_dim", "state", "groups"),
}
"""Sizes of each kind of kernel; fits may go by the flop and the elements of the scores beside."""


def check_kernels(kernels: Mapping[str, KernelTable | KernelFit]) -> None:
    """Refuse kernels of unknown kinds or sizes, and durations that fall with a size: ValueError."""
    for name, table in kernels.items():
        kind = name.partition("/")[0]
        if kind not in KERNEL_SIZES:
            raise ValueError(f"{name}: unknown kind; known: {sorted(KERNEL_SIZES)}")
        known = {"flop", "scores", *KERNEL_SIZES[kind]}
        if isinstance(table, KernelTable):
            check_tables({name: table}, known)
            continue
        if unknown := {*table.ends, *(k for t in table.terms for k in t.powers)} - known:
            raise ValueError(f"{name}: unknown size {min(unknown)}; known: {sorted(known)}")
        if not table.terms:
            raise ValueError(f"{name}: no term")
        for term in table.terms:
            POSITIVE.check(f"{name}: a coefficient", term.coefficient)
            POWER.check(f"{name}: a power", list(term.powers.values()))
        for size, (low, high) in table.ends.items():
            KERNEL_SIZE.check(f"{name}: {size}", (low, high))
            if low > high:
                raise ValueError(f"{name}: {size} from {low:g} to {high:g}")
        NON_NEGATIVE.check(f"{name}: sd", table.sd)
