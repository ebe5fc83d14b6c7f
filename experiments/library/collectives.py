"""NCCL's collectives: tables of those in an NVLink domain, figures of those between domains.

    python experiments/library/collectives.py             # errors of the tables and the figures
    python experiments/library/collectives.py --sources   # each source predicted by the others
    python experiments/library/collectives.py --fit       # write transports.csv (5 min)

What --fit finds goes into `prism.cluster.transports` by hand; a test holds them together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from fits import Fit
from kernelrows import COLLECTOR, collected
from numpy.typing import NDArray
from scipy.optimize import least_squares

from prism.cluster.nccl import STEP_OF_HOP, measured_time, smallest_step, sum_per_byte
from prism.cluster.nccl import Path as Wires
from prism.cluster.transports import ALGORITHMS, TRANSPORTS, Algorithms
from prism.distributions.kerneltables import KernelTable
from prism.distributions.library import load_library
from prism.jobs.devices import DEVICES

Array = NDArray[np.float64]
Links = dict[str, tuple[float, float]]  # latency of a hop [s] and efficiency [1] by transport

SOURCE = f"{COLLECTOR}, NCCL 2.29.2"
LINKS = ("h100", "h200", "b200", "b300", "gb200")
OPS = {"all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce",
       "alltoall": "all_to_all"}  # fmt: skip
# Whose ranks beyond those of its own file a device is given: the same GPU on the same NVLink.
WIDER = {"gb200": "b200"}
OPS_BETWEEN = OPS | {"sendrecv": "p2p"}
FIGURES_CSV = Path(__file__).with_name("transports.csv")
EDGES = 2.0**20, 2.0**25, 2.0**29  # of bands of message sizes [byte]
SIZES = "< 1 MiB", "1 to 32 MiB", "32 to 512 MiB", ">= 512 MiB"
OWN_TABLES = "h100", "h200", "b200"
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


def network_efficiency() -> Fit:
    """Share of the network's bandwidth that large messages reach over InfiniBand."""
    rows = pd.read_csv(FIGURES_CSV)
    row = rows[(rows.transport == "infiniband") & (rows.figure == "efficiency")].iloc[0]
    return Fit(float(row.value), int(row.n), f"measured: {row.source}")


def between_domains(folder: Path) -> pd.DataFrame:
    """Rows of public nccl-tests results between NVLink domains, of devices that a job can name."""
    rows = pd.read_csv(folder / "collectives_multinode" / "collectives.csv")
    notes, rows = rows.notes.fillna(""), rows.assign(seconds=1e-6 * rows.time_us)
    names = {"RoCE": "roce", "EFA": "efa", "TCPX": "tcpx", "Slingshot": "slingshot"}
    transport = [next((v for k, v in names.items() if k in x), "infiniband") for x in rows.network]
    each = (
        notes.str.extract(r"NVLink domains? of (\d+)")[0].astype(float).fillna(rows.gpus_per_node)
    )
    rows = rows.assign(
        transport=transport, ranks=rows.nodes * rows.gpus_per_node, op=rows.op.map(OPS_BETWEEN),
        suspect=notes.str.contains("suspect"), forced=notes.str.contains("NCCL_ALGO"),
    )  # fmt: skip
    rows["domains"] = np.ceil(rows.ranks / each).astype(int)
    return rows[rows.device.isin(list(DEVICES)) & (rows.domains > 1)].reset_index(drop=True)


class Between:
    """Rows with the links under them, predicted by any figures."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self.rows, self.calls = rows, []
        libraries = {gpu: load_library(f"{gpu}-healthy") for gpu in rows.device.unique()}
        for r in rows.itertuples():
            library, device = libraries[r.device], DEVICES[r.device]
            inside, tables = r.ranks / r.domains, library.tables
            step = device.nvlink_latency_s * STEP_OF_HOP
            if "nvlink/all_gather" in tables:
                step = smallest_step(tables["nvlink/all_gather"])
            summed = 0.0
            if inside > 1 and "nvlink/all_reduce" in tables:
                summed = sum_per_byte(tables["nvlink/all_reduce"], inside)
            nvlink = device.nvlink_bytes_per_s * library.value("nominal/nvlink_efficiency")
            wire = r.nic_gbit_per_gpu * 0.125e9 * inside
            path = Wires(r.ranks, r.domains, 0.0, step, nvlink, wire, sum_s=summed)
            self.calls.append((r.op, float(r.size_bytes), r.transport, path))

    def seconds(self, transports: Links, algorithms: Algorithms = ALGORITHMS) -> Array:
        """Duration of every row [s]."""
        out = []
        for op, n_bytes, name, path in self.calls:
            hop_s, share = transports[name]
            wire = path.network_bytes_per_s * share
            path = path._replace(hop_s=hop_s, network_bytes_per_s=wire, figures=algorithms)
            out.append(path.seconds(op, n_bytes))
        return np.array(out)


def shipped() -> Links:
    """Latency of a hop and efficiency of every transport."""
    return {name: (each.hop_s, each.efficiency) for name, each in TRANSPORTS.items()}


def fit_between(rows: pd.DataFrame) -> tuple[Algorithms, Links]:
    """Figures of the algorithms from InfiniBand and RoCE, then hop and share of the others.

    Least squares of the log, of the first so that sick clusters count less; every source
    counts the same. InfiniBand's hop is NCCL's, and what the other figures are relative to;
    RoCE shares its efficiency.
    """
    links = shipped()
    start = [*ALGORITHMS[1:], links["infiniband"][1], links["roce"][0]]

    def taken(x: Array) -> tuple[Algorithms, Links]:
        *values, share, hop_s = [float(v) for v in np.exp(x)]
        own = {"infiniband": (links["infiniband"][0], share), "roce": (hop_s, share)}
        return Algorithms(ALGORITHMS.within, *values), own

    near = rows[rows.transport.isin(["infiniband", "roce"])]
    solved = _least(near, lambda m, x: m.seconds(*taken(x)[::-1]), start, 0.3)
    algorithms, found = taken(solved)
    for name, own in rows.groupby("transport"):
        if name not in found:
            found[name] = _fit_link(own, name, links[name], algorithms)
    return algorithms, found


def fit_within(folder: Path, gpus: Sequence[str], algorithms: Algorithms) -> float:
    """Time of a ring's step inside a domain over the smallest, from tables of gathers."""
    paths, measured = [], []
    for gpu in gpus:
        tables, nvlink = collective_tables(folder, gpu), DEVICES[gpu].nvlink_bytes_per_s
        step = smallest_step(tables["nvlink/all_gather"])
        rate = nvlink * nvlink_efficiency(folder, gpu).number
        for op in ("all_gather", "reduce_scatter"):
            table = tables[f"nvlink/{op}"]
            for ranks, n_bytes in itertools.product(table.axes["ranks"], table.axes["bytes"]):
                hop_s = DEVICES[gpu].nvlink_latency_s
                paths.append((Wires(int(ranks), 1, hop_s, step, rate, math.inf), n_bytes))
                measured.append(n_bytes / table(ranks=ranks, bytes=n_bytes))

    def error(x: Array) -> Array:
        figures = algorithms._replace(within=float(x[0]))
        found = [path._replace(figures=figures).ring(n_bytes, 1.0) for path, n_bytes in paths]
        return np.log(np.array(found) / measured)

    return float(least_squares(error, [algorithms.within]).x[0])


def _fit_link(
    rows: pd.DataFrame, name: str, start: tuple[float, float], algorithms: Algorithms
) -> tuple[float, float]:
    """Fit one transport's hop and efficiency."""
    x = _least(rows, lambda m, x: m.seconds({name: tuple(np.exp(x))}, algorithms), start)
    return float(np.exp(x[0])), float(np.exp(x[1]))


def _least(
    rows: pd.DataFrame, predict: Callable[[Between, Array], Array], start: Sequence[float],
    outlying: float = 1.0,
) -> Array:  # fmt: skip
    """Logarithms of the figures that miss the rows least."""
    model, seconds = Between(rows), rows.seconds.to_numpy()
    weight = rows.groupby("id").id.transform("size").to_numpy() ** -0.5
    x0 = np.log(start)
    return least_squares(
        lambda x: np.log(predict(model, x) / seconds) * weight, x0, bounds=(x0 - 3.0, x0 + 3.0),
        loss="soft_l1", f_scale=outlying,
    ).x  # fmt: skip


def write_figures(folder: Path, repeats: int = 60) -> pd.DataFrame:
    """Fit, with intervals of 90 % from sources drawn with replacement, to transports.csv."""
    rows = pd.concat([calibrating(folder), floors()], ignore_index=True)
    fitted, generator, draws = fit_between(rows), np.random.default_rng(1), []
    for _ in range(repeats):
        drawn = []
        for _, own in rows.groupby("transport"):
            ids = own.id.unique()
            for i, name in enumerate(generator.choice(ids, ids.size)):
                drawn.append(own[own.id == name].assign(id=f"{name} {i}"))
        draws.append(fit_between(pd.concat(drawn, ignore_index=True)))

    def flat(fit: tuple[Algorithms, Links]) -> dict[tuple[str, str], float]:
        out = {("all", name): value for name, value in fit[0]._asdict().items()}
        for name, (hop, share) in fit[1].items():
            out |= {(name, "hop_s"): hop, (name, "efficiency"): share}
        return out

    spread = pd.DataFrame([flat(draw) for draw in draws]).quantile([0.05, 0.95])
    inside = [fit_within(folder, [gpu], fitted[0]) for gpu in OWN_TABLES]
    spread["all", "within"] = min(inside), max(inside)
    fitted = fitted[0]._replace(within=fit_within(folder, OWN_TABLES, fitted[0])), fitted[1]
    out = []
    for (name, figure), value in flat(fitted).items():
        own = rows if name == "all" else rows[rows.transport == name]
        if name == "all":
            own = own[own.transport.isin(["infiniband", "roce"])]
        source = f"{own.id.nunique()} public nccl-tests results, {len(own)} times"
        if name == "slingshot":
            source += ", all suspect"
        if (name, figure) == ("infiniband", "hop_s"):
            source = "tuning.cc of NCCL 2.27; the other figures are relative to it"
        if figure == "within":
            source = f"gathers and scatters inside a domain, {', '.join(OWN_TABLES)} (range)"
        low, high = spread[(name, figure)]
        out.append(
            (name, figure, *(float(f"{x:.3g}") for x in (value, low, high)), len(own), source)
        )
    table = pd.DataFrame(
        out, columns=["transport", "figure", "value", "low", "high", "n", "source"]
    )
    table.to_csv(FIGURES_CSV, index=False)
    return table


def calibrating(folder: Path) -> pd.DataFrame:
    """Rows that figures are fitted to: none suspect nor forced to an algorithm.

    All of Slingshot are suspect; its all-to-alls, at a fifth of the line rate, stay out.
    """
    rows = between_domains(folder)
    slingshot = (rows.transport == "slingshot") & (rows.op != "all_to_all")
    return rows[(~rows.suspect | slingshot) & ~rows.forced]


def floors() -> pd.DataFrame:
    """Smallest messages of 16 H100 on two nodes, from the README of collectives_multinode."""
    rows = [("all_reduce", 37e-6), ("all_to_all", 38.5e-6)]
    return pd.DataFrame([
        {"id": f"floor of {op}", "device": "h100", "transport": "infiniband", "op": op,
         "ranks": 16, "domains": 2, "nic_gbit_per_gpu": 400, "size_bytes": 1024, "seconds": t}
        for op, t in rows
    ])  # fmt: skip


def bands(rows: pd.DataFrame, seconds: Array) -> pd.DataFrame:
    """Predicted over measured by network, op, domains and size: geometric mean, sd of log, n."""
    wide = ["infiniband, roce" if t in ("infiniband", "roce") else t for t in rows.transport]
    keys = [
        pd.Series(wide, rows.index, name="network"), rows.op,
        pd.cut(rows.domains, [1, 2, 16, np.inf], labels=["2", "3 to 16", "more"]),
        pd.cut(rows.size_bytes, [0, *EDGES, np.inf], labels=SIZES, right=False),
    ]  # fmt: skip
    log = pd.Series(np.log(seconds / rows.seconds.to_numpy()), rows.index)
    grouped = log.groupby(keys, observed=True)
    table = grouped.agg(mean="mean", sd="std", n="size")
    table["gm"] = np.exp(table.pop("mean"))
    return table[["gm", "sd", "n"]]


def leave_out(folder: Path) -> pd.DataFrame:
    """Predicted over measured of each source, by figures from all the others."""
    rows, out = calibrating(folder), []
    for name in rows[rows.transport != "slingshot"].id.unique():
        own, others = rows[rows.id == name], rows[rows.id != name]
        algorithms, links = fit_between(pd.concat([others, floors()], ignore_index=True))
        log = np.log(Between(own).seconds(shipped() | links, algorithms) / own.seconds)
        out.append((name, own.transport.iloc[0], np.exp(log.mean()), log.std(), len(own)))
    return pd.DataFrame(out, columns=["source", "transport", "gm", "sd", "n"])


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
    import sys

    data = Path(os.environ.get("PRISM_DATA", "../shared/data"))
    if "--fit" in sys.argv:
        print(write_figures(data).to_string())
    elif "--sources" in sys.argv:
        print(leave_out(data).round(2).to_string())
    else:
        for gpu in LINKS:
            told = {k: round(100.0 * v, 2) for k, v in errors(data, gpu).items()}
            print(gpu, told, "% rms;", nvlink_efficiency(data, gpu).source)
        some = calibrating(data)
        print(bands(some, Between(some).seconds(shipped())).unstack().round(2).to_string())
