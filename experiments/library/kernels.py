"""Check nominal durations of kernels against measured ones: `python kernels.py`.

Predicted over measured by device and kernel, each of some sequence length, model or width by a fit
that knows none of it. Writes kernels.csv, and uneven.csv: what experts of unequal load cost.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import kernelrows
import numpy as np
import pandas as pd
from fits import gemm_points
from kernelfits import Carried, Group, predicted

from prism.distributions.kerneltables import KernelTable
from prism.distributions.library import load_library
from prism.workload.kernelcost import kernel_cost

HERE = Path(__file__).resolve().parent
DEVICES = ("a100", "h100", "h200", "b200", "gb200", "mi300x")
WITHIN, SPREAD = 0.08, 0.15  # of the geometric mean; sd of the log
FOLDS = 8
STRIDE = 7  # of the grid's points that are checked


def _row(gpu: str, name: str, left_out: str, error: np.ndarray, inside: float) -> dict[str, object]:
    mean, sd = float(np.exp(error.mean())), float(error.std())
    return {
        "device": gpu, "kernel": name, "n": len(error), "left_out": left_out, "fitted_sd": inside,
        "mean": mean, "sd": sd, "met": abs(mean - 1.0) <= WITHIN and sd <= SPREAD,
    }  # fmt: skip


def check(group: Group) -> dict[str, object]:
    """Return a row of the table: a fit's own error, and that of shapes it does not know."""
    rows = group.rows.reset_index(drop=True)
    values = sorted(rows[group.folds].unique())
    fold = rows[group.folds].map({v: i % FOLDS for i, v in enumerate(values)})
    error = np.full(len(rows), np.nan)
    for i in sorted(fold.unique()):
        part = (fold == i).to_numpy()
        error[part] = np.log(group.predict(rows[~part], rows[part]) / rows.seconds[part])
    inside = np.log(group.predict(rows, rows) / rows.seconds)
    return _row(group.gpu, group.name, group.folds, error, float(inside.std()))


def check_grid(gpu: str, name: str, table: KernelTable) -> list[dict[str, object]]:
    """Rows of a grid: every second value of one size left out, and interpolated."""
    out = []
    for at, axis in enumerate(table.axes):
        grid = np.asarray(table.axes[axis])
        dropped = np.arange(1, grid.size - 1, 2)
        axes = {**table.axes, axis: np.delete(grid, dropped)}
        coarse = replace(table, axes=axes, rate=np.delete(table.rate, dropped, at))
        index = np.argwhere(np.isin(np.indices(table.rate.shape)[at], dropped))[::STRIDE]
        error = np.array([
            np.log(table.rate[tuple(i)] / coarse(**{n: float(g[j]) for (n, g), j in
                                                    zip(table.axes.items(), i, strict=True)}))
            for i in index
        ])  # fmt: skip
        out.append(_row(gpu, name, f"{axis} between others", error, 0.0))
    return out


def check_carried(data: Carried) -> list[dict[str, object]]:
    """Rows of what H100 and H200 have of relatives, by what was measured on them."""
    out = []
    rows = kernelrows.h100_attention(data.folder)
    for backward, part in rows.groupby("backward"):
        name = f"attention/cudnn/bf16/causal/{'backward' if backward else 'forward'}"
        error = np.log(predicted(data.kernels("h100")[name], part) / part.seconds.to_numpy())
        out.append(_row("h100", name, "nothing", error, float(error.std())))
    for way, part in kernelrows.h100_norms().groupby("way"):
        name = f"rms_norm/eager/{way}"
        error = np.log(predicted(data.kernels("h100")[name], part) / part.seconds.to_numpy())
        out.append(_row("h100", name, "nothing", error, float(error.std())))
    for backend, column in (("fa2", "flash"), ("efficient", "efficient")):
        rows = data.step_rows(column)
        both = sum(
            predicted(data.kernels("h200")[f"attention/{backend}/bf16/causal/{way}"],
                      data.with_work(rows, way == "backward"))
            for way in ("forward", "backward")
        )  # fmt: skip
        error = np.log(np.asarray(both) / rows.seconds.to_numpy())
        name = f"attention/{backend}/bf16/causal/both"
        out.append(_row("h200", name, "nothing", error, float(error.std())))
    return out


def check_others(folder: Path) -> list[dict[str, object]]:
    """Rows of products by sources that no table rests on."""
    series = pd.read_parquet(folder / "h100_device" / "kernel_series.parquet")
    series = series[(series.kind == "gemm") & (series.call % 64 != 0) & (series.data == "normal")]
    keys = ["gpu", "m", "n", "k", "dtype"]
    long = series.groupby(keys, observed=True).duration_us.median().reset_index()
    long = long[long.m >= 2048].assign(seconds=long.duration_us * 1e-6)
    points = gemm_points(folder).rename(columns={"num_tokens": "m"})
    points = points[(points.flop >= 1e10) & (points[["m", "n", "k"]].min(axis=1) >= 128)]
    points = points.assign(seconds=points.median_ms * 1e-3).iloc[::STRIDE]
    checks = [
        ("h100", f"gemm/{dtype}", False, own, "none: sustained at the power limit (h100_device)")
        for dtype, own in long.groupby("dtype", observed=True)
    ]
    checks += [
        (gpu, "gemm/bf16", False, points[points.gpu == gpu], "none: fp16 (kernel_profiles)")
        for gpu in ("h100", "a100")
    ]
    linear = kernelrows.a100_linear(folder)
    checks += [
        ("a100", f"gemm/bf16{'/backward' if backward else ''}", bool(backward), own.iloc[::STRIDE],
         "none: fp16 (estimate-train-time)")
        for backward, own in linear.groupby("backward")
    ]  # fmt: skip
    out = []
    for gpu, name, backward, rows, what in checks:
        library, dtype = load_library(f"{gpu}-healthy"), name.split("/")[1]
        error = np.array([
            np.log(kernel_cost(library, "gemm", m=float(m), n=float(n), k=float(k), dtype=dtype,
                               backward=backward).seconds / seconds)
            for m, n, k, seconds in zip(rows.m, rows.n, rows.k, rows.seconds, strict=True)
        ])  # fmt: skip
        out.append(_row(gpu, name, what, error, 0.0))
    return out


def uneven(data: Carried) -> pd.DataFrame:
    """Time of experts with unequal load over equal, median by tokens an expert; no ep."""
    keys = ["sweep", "num_tokens", "dtype", "m", "moe_ep_size"]
    out = []
    for gpu in ("h100", "h200", "b200", "gb200"):
        rows = kernelrows.expert_layers(data.folder, gpu)
        wide = rows.pivot_table(index=keys, columns="distribution", values="seconds").reset_index()
        wide = wide[wide.moe_ep_size == 1]
        tokens = np.exp2(np.log2(wide.m).round()).astype(int)
        for distribution in ("power_law_1.01", "power_law_1.2"):
            ratio = wide[distribution] / wide.balanced
            for (dtype, m), part in ratio.groupby([wide.dtype, tokens]):
                out.append((gpu, dtype, distribution, m, len(part), round(float(part.median()), 3)))
    names = ["device", "dtype", "distribution", "tokens_per_expert", "n", "factor"]
    return pd.DataFrame(out, columns=names)


def main() -> int:
    data = Carried(Path(os.environ.get("PRISM_DATA", HERE.parents[2] / "shared" / "data")))
    rows = [check(group) for gpu in DEVICES for group in data.groups(gpu)]
    for gpu in kernelrows.COLLECTED:
        for name, table in data.singles(gpu).items():
            rows += check_grid(gpu, name, table)
    rows += check_carried(data) + check_others(data.folder)
    table = pd.DataFrame(rows).round({"fitted_sd": 3, "mean": 3, "sd": 3})
    table.to_csv(HERE / "kernels.csv", index=False)
    print(table.to_string(index=False))
    print(f"{int(table.met.sum())} of {len(table)} within {WITHIN:.0%} and sd {SPREAD}")
    factors = uneven(data)
    factors.to_csv(HERE / "uneven.csv", index=False)
    print(factors.pivot_table(index=["dtype", "distribution", "tokens_per_expert"],
                              columns="device", values="factor").to_string())  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
