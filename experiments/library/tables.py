"""Tables of matrix products by size, and what quantizing their operands takes.

`python experiments/library/tables.py` prints their errors.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from kernelrows import COLLECTED, COLLECTOR, DTYPES, collected
from numpy.typing import NDArray

from prism.distributions.kerneltables import KernelTable
from prism.jobs.devices import DEVICES
from prism.workload.kernelcost import NUMBER_BYTES
from prism.workload.kernels import SCALE_BYTES

Array = NDArray[np.float64]

BACK_TO_BACK = "back to back in short loops"
SUSTAINED = {"h100": "; sustained at its limit of 700 W 1.14 times as long (h100_device)"}
SMALLEST = 128  # rows, columns and depth of the smallest product kept: training has none below
WIDE = 4096  # from here on quantizing an operand takes little time beside the product
# What the collected quantization moves per number [byte]: per tensor it reads twice, to find the
# largest magnitude first.
QUANTIZATION_BYTES = {
    p: (4.0 if p == "fp8" else 2.0) + NUMBER_BYTES[p] + SCALE_BYTES.get(p, 0.0)
    for p in ("fp8", "fp8_block", "nvfp4")
}


def grid(rows: pd.DataFrame, axes: tuple[str, ...], work: Array) -> tuple[dict[str, Array], Array]:
    """Rates on the grid of all sizes [*axes]; what was not collected takes its neighbour's."""
    sizes = {axis: np.array(sorted(rows[axis].unique()), np.float64) for axis in axes}
    rate = np.full([len(x) for x in sizes.values()], np.nan)
    at = tuple(np.searchsorted(sizes[axis], rows[axis].to_numpy(np.float64)) for axis in axes)
    rate[at] = work / rows.seconds.to_numpy()
    for axis in range(rate.ndim):  # one after the other, from below and from above
        for flip in (False, True):
            values = np.moveaxis(np.flip(rate, axis) if flip else rate, axis, 0)
            for i in range(1, len(values)):
                hole = np.isnan(values[i])
                values[i][hole] = values[i - 1][hole]
    return sizes, rate


def quantization(rows: pd.DataFrame, dtype: str) -> tuple[float, float]:
    """Time of quantizing an operand in the collected products: fixed [s], and per number [s].

    From products so thin that all else is reading the operand, which takes half as long in 8 bits
    as the same product in 16.
    """
    thin = rows[(rows.n <= 128) & (rows.m >= 1024) & (rows.k >= 1024)]
    wide = thin.pivot_table(index=["m", "k", "n"], columns="gemm_dtype", values="seconds").dropna(
        subset=[dtype, "bfloat16"]
    )
    numbers = (wide.index.get_level_values("m") * wide.index.get_level_values("k")).to_numpy(float)
    reading = 0.5 * NUMBER_BYTES[DTYPES[dtype]] * wide["bfloat16"].to_numpy()
    seconds = wide[dtype].to_numpy() - reading
    design = np.c_[np.ones_like(numbers), numbers] / seconds[:, None]
    fixed, each = np.linalg.lstsq(design, np.ones_like(numbers), rcond=None)[0]
    least = float(rows[rows.gemm_dtype == dtype].seconds.min())
    return min(max(float(fixed), 0.0), 0.5 * least), float(each)


def gemm_tables(folder: Path, gpu: str) -> tuple[dict[str, KernelTable], dict[str, float]]:
    """Products by m, n, k, and what quantizing takes per number [s], by precision."""
    rows = collected(folder, gpu, "gemm")
    rows = rows[rows.gemm_dtype.isin(DTYPES)]
    tables, casts = {}, {}
    for dtype, own in rows.groupby("gemm_dtype"):
        precision = DTYPES[str(dtype)]
        inside = own[(own.m >= SMALLEST) & (own.n >= SMALLEST) & (own.k >= SMALLEST)]
        what = ""
        if precision != "bf16":
            fixed, each = quantization(rows, str(dtype))
            casts[precision] = each
            alone = inside.seconds - fixed - each * inside.m * inside.k
            # of thin products nearly all is quantizing: no rate is above the best wide one
            flop = 2.0 * inside.m.astype(float) * inside.n * inside.k
            wide = inside[["m", "n", "k"]].min(axis=1) >= WIDE
            inside = inside.assign(seconds=np.maximum(alone, flop / (flop / alone)[wide].max()))
            what = f", less quantizing ({fixed * 1e6:.1f} us and {each * 1e12:.2f} ps per number)"
        even = inside[inside.m % 2 == 0]
        device = f"{gpu.upper()}, {BACK_TO_BACK}{SUSTAINED.get(gpu, '')}"
        work = 2.0 * (even.m.astype(float) * even.n * even.k).to_numpy()
        axes, rate = grid(even, ("m", "n", "k"), work)
        tables[f"gemm/{precision}"] = KernelTable(
            axes,
            rate,
            source=f"measured: {len(even)} products on {device}{what}; {COLLECTOR}",
        )
    return tables, casts


def cast_efficiency(gpu: str, each: dict[str, float]) -> tuple[float, str, str]:
    """Share of the memory's bandwidth that quantizing reaches: value, units, source."""
    device = DEVICES[gpu]
    shares = [QUANTIZATION_BYTES[p] / s / device.memory_bytes_per_s for p, s in each.items()]
    told = ", ".join(f"{p} {s * 1e12:.2f}" for p, s in each.items())
    source = (
        f"measured: ps per number quantized before a product on {gpu.upper()}, {told}; {COLLECTOR}"
    )
    return round(float(np.mean(shares)), 2), "1", source


def compression(folder: Path, gpu: str) -> dict[str, float]:
    """Error of the tables on everything collected in their range: rms of the logarithm."""
    tables, casts = gemm_tables(folder, gpu)
    rows = collected(folder, gpu, "gemm")
    rows = rows[rows.gemm_dtype.isin(DTYPES)]
    out = {}
    for dtype, own in rows.groupby("gemm_dtype"):
        precision, table = DTYPES[str(dtype)], tables[f"gemm/{DTYPES[str(dtype)]}"]
        own = own[(own.m >= SMALLEST) & (own.n >= SMALLEST) & (own.k >= SMALLEST)]
        fixed, each = (0.0, 0.0) if precision == "bf16" else quantization(rows, str(dtype))
        for name, part in (("kept", own[own.m % 2 == 0]), ("left out", own[own.m % 2 == 1])):
            part = part.sample(2000, random_state=1)
            seconds = [
                2.0 * m * n * k / table(m=m, n=n, k=k) + fixed + each * m * k
                for m, n, k in zip(part.m, part.n, part.k, strict=True)
            ]
            errors = np.log(np.array(seconds) / part.seconds.to_numpy())
            out[f"{precision}, {name}"] = float(np.sqrt(np.mean(errors**2)))
    return out


if __name__ == "__main__":
    import os

    data = Path(os.environ.get("PRISM_DATA", "../shared/data"))
    for gpu in COLLECTED:
        print(gpu, {k: round(100.0 * v, 2) for k, v in compression(data, gpu).items()}, "% rms")
