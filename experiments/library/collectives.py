"""Tables of NCCL's collectives in an NVLink domain, and what links reach with large messages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from fits import Fit
from kernelrows import COLLECTOR, collected
from numpy.typing import NDArray

from prism.cluster.devices import DEVICES
from prism.cluster.nccl import measured_time
from prism.distributions.kerneltables import KernelTable

Array = NDArray[np.float64]

SOURCE = f"{COLLECTOR}, NCCL 2.29.2"
LINKS = ("h100", "h200", "b200", "b300", "gb200")
OPS = {"all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce",
       "alltoall": "all_to_all"}  # fmt: skip
# Whose ranks beyond those of its own file a device is given: the same GPU on the same NVLink.
WIDER = {"gb200": "b200"}
LARGE = 64 * 2**20  # bytes from which on time is a rate and little else


def read(folder: Path, gpu: str) -> pd.DataFrame:
    """Return the runtimes of one device: op, dtype, ranks, bytes of the whole buffer, seconds."""
    rows = collected(folder, gpu, "nccl")
    size = rows.nccl_dtype.map({"half": 2, "int8": 1})  # message_size counts elements
    return pd.DataFrame({
        "op": rows.op_name.map(OPS), "dtype": rows.nccl_dtype, "ranks": rows.num_gpus,
        "bytes": rows.message_size * size, "seconds": rows.seconds,
    })  # fmt: skip


def rising(seconds: Array) -> Array:
    """Durations that no larger message undercuts: disturbances only lengthen a measurement."""
    return np.minimum.accumulate(seconds[::-1])[::-1]


def collective_tables(folder: Path, gpu: str) -> dict[str, KernelTable]:
    """Rates by ranks and bytes of each op in 16 bits, which NVLink SHARP adds up."""
    rows, told = read(folder, gpu), ""
    if gpu in WIDER:
        other = read(folder, WIDER[gpu])
        wider = other[~other.ranks.isin(rows.ranks)]
        rows = pd.concat([rows, wider])
        told = f"; {', '.join(map(str, wider.ranks.unique()))} ranks are {WIDER[gpu].upper()}'s"
    tables = {}
    for op, own in rows[rows.dtype == "half"].groupby("op"):
        wide = own.pivot_table(index="ranks", columns="bytes", values="seconds")
        sizes = wide.columns.to_numpy(float)
        rate = sizes / np.apply_along_axis(rising, 1, wide.to_numpy())
        axes = {"ranks": wide.index.to_numpy(float), "bytes": sizes}
        source = f"measured: {len(own)} runs on {gpu.upper()}{told}; {SOURCE}"
        tables[f"nvlink/{op}"] = KernelTable(axes, rate, "byte/s", source)
    return tables


def nvlink_efficiency(folder: Path, gpu: str) -> Fit:
    """Share of NVLink's bandwidth: slope of time over what a rank receives in gathers."""
    rows = read(folder, gpu)
    rows = rows[rows.op.isin(["all_gather", "reduce_scatter"]) & (rows.dtype == "half")]
    rows = rows[(rows.bytes >= LARGE) & (rows.ranks == rows.ranks.max())]
    received = rows.bytes * (1.0 - 1.0 / rows.ranks)
    design = np.c_[np.ones(len(rows)), received] / rows.seconds.to_numpy()[:, None]
    slope = np.linalg.lstsq(design, np.ones(len(rows)), rcond=None)[0][1]
    source = (
        f"measured: slope {1e-9 / slope:.0f} of {DEVICES[gpu].nvlink_bytes_per_s / 1e9:.0f} GB/s, "
        f"gathers and scatters of 64 MiB and more among {rows.ranks.max()} {gpu.upper()}; {SOURCE}"
    )
    return Fit(1.0 / slope / DEVICES[gpu].nvlink_bytes_per_s, len(rows), source)


def network_efficiency(folder: Path) -> Fit:
    """Share of the network's bandwidth that rings between nodes reach with endless messages.

    The geometric mean of two clusters of 400 Gbit/s per GPU: all-reduces of 2 to 8 GH200, one to a
    node, and gathers and scatters of 2 to 64 nodes of 8 H100, at the 95th percentile. There the
    inverse of the bandwidth grows linearly with the nodes, as a ring's latency does; its intercept
    counts.
    """
    link = DEVICES["h100"].network_bytes_per_s
    shares = []
    for n in (2, 4, 8):
        names = [f"Vista__NVIDIAGH200120GB_allreduce{x}_fp16_{n}_1.csv" for x in ("", "_large")]
        rows = pd.concat([pd.read_csv(folder / "kernel_tables" / "ett" / x) for x in names])
        sent, seconds = 2.0 * rows["shape"] * 2.0 * (n - 1) / n, rows["dur(us)"] * 1e-6
        bins = pd.qcut(sent, 30, duplicates="drop")
        sent, seconds = (x.groupby(bins, observed=True).median() for x in (sent, seconds))
        shares.append(1.0 / np.polyfit(sent, seconds, 1, w=1.0 / seconds)[0] / link)
    rows = pd.read_csv(folder / "kernel_tables" / "collective_bandwidth_by_nodes.csv")
    rows = rows[rows.op.isin(["AllGather", "ReduceScatter"]) & (rows.nodes > 1)]
    inverse = 1.0 / rows.p95_GBps
    intercept = np.polyfit(rows.nodes, inverse, 1, w=1.0 / inverse)[1]
    low, high = 1e9 / intercept / 8 / link, float(np.mean(shares))
    source = (
        f"measured: {low:.2f} on 2 to 64 nodes of 8 H100 (nanotron), {high:.2f} on 2 to 8 GH200 "
        "(estimate-train-time); geometric mean"
    )
    return Fit(float(np.sqrt(low * high)), len(rows) + 3, source)


def errors(folder: Path, gpu: str) -> dict[str, float]:
    """Errors of the tables, rms of the logarithm from 1 MiB on.

    ``kept`` is on what they were made of, ``8 bits`` on gathers and all-to-alls of another dtype,
    which move bytes the same way, and ``between`` on every other size, left out of the table.
    """
    rows, tables = read(folder, gpu), collective_tables(folder, gpu)
    rows = rows[rows.bytes >= 2**20]
    half, moved = rows[rows.dtype == "half"], rows.op.isin(["all_gather", "all_to_all"])
    thin = {}
    for name, t in tables.items():
        keep = slice(0, None, 2)
        axes = {"ranks": t.axes["ranks"], "bytes": t.axes["bytes"][keep]}
        thin[name] = KernelTable(axes, t.rate[:, keep], t.units)
    left = tables["nvlink/all_gather"].axes["bytes"][1:-1:2]
    parts = {
        "kept": (half, tables),
        "8 bits": (rows[(rows.dtype == "int8") & moved], tables),
        "between": (half[half.bytes.isin(left)], thin),
    }
    out = {}
    for name, (part, by) in parts.items():
        each = [
            np.log(measured_time(by[f"nvlink/{r.op}"], r.op, r.bytes, r.ranks) / r.seconds)
            for r in part.itertuples()
        ]
        out[name] = float(np.sqrt(np.mean(np.square(each))))
    return out


if __name__ == "__main__":
    import os

    data = Path(os.environ.get("PRISM_DATA", "../shared/data"))
    for gpu in LINKS:
        told = {k: round(100.0 * v, 2) for k, v in errors(data, gpu).items()}
        print(gpu, told, "% rms;", nvlink_efficiency(data, gpu).source)
    network = network_efficiency(data)
    print(round(network.number, 3), network.source)
