"""Fit speed against power (`prism.cluster.power`) to published points, and test it on others.

Then the energy of kernels, the clocks of products at the cap, and a check on two steps of an H100.

`power_points.csv` has one line per measured point: power is the measured draw (stages of Perseus,
epochs of Zeus) or the limit (the rest), and seconds are of one unit of work. Times are compared
with the time at the device's TDP, or at the largest power where that is less.

    python experiments/library/power.py
"""

import os
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import brentq, least_squares
from scipy.stats import t as student

from prism.cluster.power import AMPERE, CURVES, SILICON, Mix, PowerCurve, step_joules
from prism.jobs.devices import find_device

HERE = Path(__file__).resolve().parent


def points() -> pd.DataFrame:
    """Points with their power over the reference's (`share`) and time over its (`ratio`)."""
    table = pd.read_csv(HERE / "power_points.csv")
    out = []
    for _, rows in table.groupby(["device", "workload"], sort=False):
        rows = rows.sort_values("power_w")
        most = min(rows.tdp_w.iloc[0], rows.power_w.max())
        at = np.interp(most, rows.power_w, rows.seconds)
        rows = rows.assign(share=rows.power_w / most, ratio=rows.seconds / at)
        out.append(rows[rows.share < 1.0])
    return pd.concat(out)


def errors(rows: pd.DataFrame, curve: PowerCurve) -> np.ndarray:
    """Logarithm of predicted over measured time."""
    predicted = [1.0 / curve.speed(share) for share in rows.share]
    return np.log(predicted) - np.log(rows.ratio.to_numpy())


def fit_ampere(rows: pd.DataFrame) -> np.ndarray:
    """Floor, exponent and knee."""
    bounds = ([0.0, 1.0, 0.5], [0.4, 6.0, 1.0])
    start = [0.1, 2.5, 0.85]
    return least_squares(lambda p: errors(rows, PowerCurve(*p)), start, bounds=bounds).x


def fit_hopper(rows: pd.DataFrame, floor: float) -> np.ndarray:
    """Exponent of each point alone: six workloads with one limit each."""
    dynamic = (rows.share - floor) / (1.0 - floor)
    return -np.log(dynamic.to_numpy()) / np.log(rows.ratio.to_numpy())


def fits() -> dict[str, tuple[float, float, float]]:
    """Fit what `prism.cluster.power` has, each figure with its interval.

    Ampere's are the ranges over four curves, of two models' forward and backward: points of one
    curve err together. Hopper's exponent has its 95 % interval over workloads.
    """
    table = points()
    a100 = table[table.device == "a100"]
    found = fit_ampere(a100[a100.use == "fit"])
    parts = np.array([fit_ampere(rows) for _, rows in a100.groupby("workload")])
    h100 = table[table.device == "h100"]
    each = fit_hopper(h100, found[0])
    reach = student.isf(0.025, each.size - 1) * each.std(ddof=1) / each.size**0.5
    ranges = zip(found, parts.min(axis=0), parts.max(axis=0), strict=True)
    out = dict(zip(("floor", "exponent", "knee"), ranges, strict=True))
    mean, slowest = each.mean(), 1.0 / h100.ratio.max()
    return out | {
        "hopper_exponent": (mean, mean - reach, mean + reach), "hopper_knee": (slowest, 0, slowest)
    }  # fmt: skip


def left_out() -> float:
    """Root mean square error of H100's points, each from the exponent of the others."""
    rows, floor = points().query("device == 'h100'"), fits()["floor"][0]
    each = fit_hopper(rows, floor)
    wrong = [
        errors(rows.iloc[[i]], PowerCurve(floor, float(np.delete(each, i).mean()), 0.5))[0]
        for i in range(each.size)
    ]
    return float(np.sqrt(np.mean(np.square(wrong))))


def spread_of_clocks() -> dict[str, float]:
    """Spread of V100s' clocks, of the logarithm: at their limit and far below it."""
    runs = pd.read_parquet(data() / "gpu_variability" / "runs.parquet")
    runs = runs[runs.cluster == "longhorn"]
    found = {}
    for work, rows in runs.groupby("workload"):
        each = rows.groupby("gpu_id")[["sm_clock_mhz", "power_w"]].median().dropna()
        found[f"{work} at {each.power_w.median():.0f} W"] = float(np.log(each.sm_clock_mhz).std())
    return found


# ------------------------------------------------------------------------- energy of work, clocks
IDLE_W = {"h100": 126.0, "h200": 126.0, "b200": 206.0}
"""Idle draw of H200 and B200 as kernel_power's README gives it; H100's is H200's. A cold H100
reads 76 W (`cold_idle`), one that communicates more than that: it bounds the interval."""
OPERAND_BYTES = {"bf16": 2.0, "bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5}


def data() -> Path:
    """Folder of the measurements."""
    return Path(os.environ.get("PRISM_DATA", HERE.parents[2] / "shared" / "data"))


def h100_series() -> pd.DataFrame:
    """Each kernel of card A from 1.1 s after its start, when NVML's mean over 1 s is of it alone.

    Median power, clock and duration; of kernels that a card repeats for less than that, nothing.
    """
    calls = pd.read_parquet(data() / "h100_device" / "kernel_series.parquet")
    calls = calls[(calls.gpu == "A") & (calls.call % 64 != 0)]
    since = calls.end_s - calls.groupby("kernel").end_s.transform("min")
    names = ["kernel", "kind", "dtype", "data", "m", "n", "k"]
    found = calls[since > 1.1].groupby(names)[["power_w", "sm_clock_mhz", "duration_us"]].median()
    found = found.reset_index()
    whole = 2.0 * found.m * found.n * found.k
    causal = 4.0 * 16 * 8192.0**2 / 2 * 128  # of attention's one shape
    found["flop"] = np.where(found.kind == "gemm", whole, np.where(found.kind == "attn", causal, 0))
    found["bytes"] = np.where(found.kind == "gemm", traffic(found), 2 * 2.0 * 8192 * 16384)
    found.loc[found.kind == "attn", "bytes"] = 4 * 2.0 * 16 * 8192 * 128
    return found.assign(seconds=1e-6 * found.duration_us)


def traffic(rows: pd.DataFrame) -> pd.Series:
    """Least bytes of products: operands in their precision, results in bfloat16."""
    operands = rows.dtype.map(OPERAND_BYTES).astype(float)
    return operands * (rows.m * rows.k + rows.k * rows.n) + 2.0 * rows.m * rows.n


def at_cap(device: str) -> pd.DataFrame:
    """Large products of H200 and B200 that read at least 97 % of the limit.

    Others were repeated too briefly for NVML's mean. Slow ones (below 0.75 of the fastest of their
    precision) are left out: launches and small tiles, not arithmetic.
    """
    rows = pd.read_parquet(data() / "kernel_power" / f"{device}_gemm.parquet")
    rows = rows.assign(flop=2.0 * rows.m * rows.n * rows.k, seconds=1e-3 * rows.latency_ms)
    rows = rows.assign(bytes=traffic(rows), rate=rows.flop / rows.seconds)
    rows = rows[(rows.power_w > 0.97 * rows.power_limit_w) & (rows.seconds > 1e-4)]
    return rows[rows.rate > 0.75 * rows.groupby("dtype").rate.transform("max")]


def attention(device: str) -> pd.DataFrame:
    """Causal attention with heads of 128 on H200 and B200 that reads 97 % of the limit."""
    rows = pd.read_parquet(data() / "kernel_power" / f"{device}_attention.parquet")
    rows = rows[(rows.window_size == 0) & (rows.head_dim == 128) & (rows.isl >= 4096)]
    pairs = rows.batch_size * rows.num_heads * rows.isl.astype(float) ** 2 / 2
    heads = rows.num_heads + rows.num_key_value_heads
    moved = 2.0 * 2.0 * rows.batch_size * rows.isl * rows.head_dim * heads
    rows = rows.assign(flop=4.0 * 128 * pairs, bytes=moved, seconds=1e-3 * rows.latency_ms)
    rows = rows[(rows.power_w > 0.97 * rows.power_limit_w) & (rows.seconds > 1e-3)]
    return rows[rows.dtype == "bfloat16"]


def per_flop(rows: pd.DataFrame, idle_w: float, byte_pj: float) -> tuple[float, float, float]:
    """Picojoules per flop over idle draw and traffic: median, 5 and 95 % over shapes."""
    joules = (rows.power_w - idle_w) * rows.seconds - 1e-12 * byte_pj * rows.bytes
    middle, low, high = np.quantile(1e12 * joules / rows.flop, [0.5, 0.05, 0.95])
    return float(middle), float(low), float(high)


def energy_fits() -> dict[str, tuple[float, float, float]]:
    """Fit picojoules per flop and byte over the idle draw, each with its interval."""
    series = h100_series()
    copy = series[series.kind == "copy"].iloc[0]
    rate = copy.bytes / copy.seconds
    byte = tuple(1e12 * (copy.power_w - w) / rate for w in (IDLE_W["h100"], 147.0, cold_idle()))
    out = {"h100 byte": byte}
    normal = series[(series.data == "normal") & (series.power_w > 0.97 * 700)]
    for dtype in ("bf16", "fp8"):
        rows = normal[(normal.kind == "gemm") & (normal.dtype == dtype)]
        out[f"h100 {dtype}"] = per_flop(rows, IDLE_W["h100"], byte[0])
    out["h100 attention"] = per_flop(normal[normal.kind == "attn"], IDLE_W["h100"], byte[0])
    for device in ("h200", "b200"):
        for dtype, rows in at_cap(device).groupby("dtype"):
            name = "bf16" if dtype == "bfloat16" else dtype
            out[f"{device} {name} ({len(rows)})"] = per_flop(rows, IDLE_W[device], byte[0])
        rows = attention(device)
        found = per_flop(rows, IDLE_W[device], byte[0])
        out[f"{device} attention ({len(rows)})"] = found
    return out


def cold_idle() -> float:
    """Least power of card A before its first kernels show in the mean [W]."""
    calls = pd.read_parquet(data() / "h100_device" / "kernel_series.parquet")
    return float(calls[calls.gpu == "A"].power_w.min())


def cap_clocks() -> dict[str, tuple[float, float, float]]:
    """Clocks of products back to back at the limit [MHz]: median, least and most.

    H100 over shapes. A100: 1,410 MHz times the speed at 400 W of stages that draw 475 W and more
    there, over stages. V100: over GPUs.
    """
    series = h100_series()
    rows = series[(series.kind == "gemm") & (series.data == "normal") & (series.power_w > 679)]
    a100 = pd.read_csv(HERE / "power_points.csv").query("device == 'a100'")
    slower = []
    for _, one in a100.groupby("workload"):
        one = one.sort_values("power_w")
        slower.append(one.seconds.min() / np.interp(400.0, one.power_w, one.seconds))
    runs = pd.read_parquet(data() / "gpu_variability" / "runs.parquet")
    runs = runs[(runs.cluster == "longhorn") & runs.workload.str.contains("gemm", case=False)]
    v100 = runs.groupby("gpu_id").sm_clock_mhz.median().dropna()
    found = {"h100": rows.sm_clock_mhz, "a100": 1410.0 * pd.Series(slower), "v100": v100}
    return {name: (float(x.median()), float(x.min()), float(x.max())) for name, x in found.items()}


# ms of a step: products, kernels that move bytes, idle; GB moved, TFLOP/s of products
STEPS = {
    "eager": (140.4, 91.6, 4.6, 202.0, 751.0),
    "compiled": (147.7, 41.0, 3.3, 93.0, 714.0),
}
GEMM_TFLOP, ATTENTION_TFLOP, GEMM_GB = 105.4, 15.4, 80.6
BACK_TO_BACK = 670.0, 700.0
"""TFLOP/s of the steps' shapes back to back at the cap (H200's nearest shapes; their spread)."""


def two_steps() -> dict[str, dict[str, float]]:
    """Phi predicted and measured of an H100's steps, eager and compiled (h100_device, card B).

    Bytes are its README's passes; attention is 276 and 779 us for 64 kernels, at phi = 1.
    """
    device, of, out = find_device("h100"), SILICON["h100"], {}
    rate = sum(BACK_TO_BACK) / 2
    for name, (_, memory_ms, idle_ms, moved, measured) in STEPS.items():
        mix = Mix(
            gemm_s=GEMM_TFLOP / rate,
            gemm_j=GEMM_TFLOP * of.bf16_pj + 1e-3 * GEMM_GB * of.byte_pj,
            attention_s=0.0338 * 751.0 / rate,
            attention_j=ATTENTION_TFLOP * of.attention_pj,
            memory_s=1e-3 * memory_ms,
            memory_j=1e-3 * moved * of.byte_pj,
            wait_s=1e-3 * idle_ms,
        )

        def excess(phi: float, mix: Mix = mix) -> float:
            joules, seconds = step_joules(device, mix, phi, 700.0)
            return joules - 697.0 * seconds

        phi = brentq(excess, 0.5, 2.0)
        out[name] = {"predicted": phi, "clamped": min(phi, of.table_phi)}
        out[name] |= {f"measured over {r:.0f}": measured / r for r in BACK_TO_BACK}
    return out


def main() -> None:
    """Print fits, tests and spreads."""
    for name, (value, low, high) in fits().items():
        print(f"{name:16} {value:.3f}, {low:.3f} to {high:.3f}")
    for (use, device, work), rows in points().groupby(["use", "device", "workload"], sort=False):
        wrong = errors(rows, CURVES.get(device, AMPERE))
        rms, most = np.sqrt(np.mean(wrong**2)), rows.ratio.max()
        name = f"{use:6} {device:9} {work:28}"
        if use == "memory":
            print(f"{name} {len(rows):2} points, slowed at most {most - 1.0:.1%}")
            continue
        deep = wrong[rows.share.to_numpy() < 0.8]
        print(
            f"{name} {len(rows):2} points to {most:4.2f} times the time: rms {rms:.1%}, "
            f"below 0.8 of the power {deep.mean():+.1%}"
        )
    print(f"H100, each point from the others: rms {left_out():.1%}")
    print("clocks of V100:", {k: f"{v:.2%}" for k, v in spread_of_clocks().items()})
    for name, (value, low, high) in energy_fits().items():
        print(f"{name:24} {value:.3f} pJ, {low:.3f} to {high:.3f}")
    for name, (value, low, high) in cap_clocks().items():
        print(f"{name:24} {value:.0f} MHz, {low:.0f} to {high:.0f}")
    for name, found in two_steps().items():
        print(name, {key: f"{x:.3f}" for key, x in found.items()})


if __name__ == "__main__":
    main()
