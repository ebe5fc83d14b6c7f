"""Write the shipped distribution sets, distributions/*.nc, from measured data and literature.

Run from anywhere: `python experiments/library/build.py`. The measured data are looked for in the
folder of the environment variable PRISM_DATA, or in ../shared/data beside the checkout; what was
fitted to published jobs comes from experiments/validation/public-jobs/fitted.csv. A healthy set is
a cluster after its burn-in that trains on sequences of one length; an uncurated set has the GPUs of
a cluster without burn-in; a stressed set changes what `stressed` names on top; a production set is
a healthy one with what `production` names. Entries are fitted where there are data, and taken from
the literature or assumed where not. Every entry says which in its source.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import deepep
import numpy as np
import pandas as pd
from collectives import LINKS as MEASURED_LINKS
from collectives import collective_tables, network_efficiency, nvlink_efficiency
from fits import (
    Fit,
    back_to_back_gap,
    collective,
    content,
    dp_transfer,
    gemm_cv,
    gemm_points,
    kernel_shape,
    node_share,
    p2p,
    rank_body,
    slow_transfers,
    step_memory,
)
from kernelfits import Carried
from kernelrows import COLLECTED
from production import production_steps
from tables import cast_efficiency, gemm_tables

from prism.distributions.distribution import Distribution, bounded_body_lemons, lognormal, mixture
from prism.distributions.kerneltables import KernelTable
from prism.distributions.library import Entry, Library, save_library
from prism.jobs.devices import DEVICES

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "distributions"
FITTED = ROOT / "experiments" / "validation" / "public-jobs" / "fitted.csv"
UNFITTED = FITTED.with_name("unfitted.csv")
MODEL_CLASSES = {
    "megatron": "Megatron", "compiled": "torch.compile, sharded", "eager": "eager PyTorch, sharded",
    "experts": "Megatron with experts", "nanotron": "nanotron",
}  # fmt: skip
DATE = "2026-11-28"  # of the figures below; raise it with them

# Where a spread is assumed, its range and its origin are in the README of this folder.
OSDI = "arXiv:2505.05713 (OSDI'25) traces"
NAMES = {
    "h100": "NVIDIA H100 SXM", "a100": "NVIDIA A100 SXM", "gb200": "NVIDIA GB200",
    "h200": "NVIDIA H200 SXM", "b200": "NVIDIA B200 SXM", "b300": "NVIDIA B300 SXM",
    "gb300": "NVIDIA GB300", "mi300x": "AMD MI300X",
}  # fmt: skip
STATES = ("healthy", "production", "uncurated", "stressed")
SETS = {gpu: STATES if gpu in ("h100", "a100", "gb200") else STATES[:2] for gpu in NAMES}
SLOW_MACHINES = 0.005  # arXiv:2402.15627 (MegaScale): about 0.5 % of machines, about 10 % slower
NODE_GPUS = 8
# Whose figures a device without its own is given: fits of repeats, and what published jobs tell.
REPEATS = {gpu: "a100" if gpu == "a100" else "h100" for gpu in NAMES}
JOBS = {
    "h200": ("h100",), "mi300x": ("h100",), "b200": ("gb200",), "b300": ("b200", "gb200"),
    "gb300": ("gb200",),
}  # fmt: skip
PRODUCTS = {gpu: gpu for gpu in COLLECTED} | {"b300": "b200", "gb300": "gb200"}

# Slope of time over bytes, large 8-GPU all-reduces of kernel_profiles, over the data sheet's rate.
NVLINK = {"a100": Fit(0.66, 0, "kernel_profiles, a100_dgx: slope 197 of 300 GB/s")}
CAST = {"b300": "b200", "gb300": "gb200", "a100": "h100", "mi300x": "h100"}
LINKS = {gpu: gpu for gpu in MEASURED_LINKS} | {"gb300": "gb200"}
ASSUMED = {"nominal/derate": Fit(1.0, 0, "assumption: the tables' speed")}
OTHER_NVLINK = Fit(0.80, 0, "assumption: a little below H100's 0.84")


def distribution_entry(
    name: str, distribution: Distribution, source: str, long_name: str, n: int = 0
) -> Entry:
    return Entry(name, source, long_name, distribution=distribution, n=n)


def fitted(
    name: str, fit: Fit, long_name: str, distribution: Distribution | None = None, source: str = ""
) -> Entry:
    """Return the entry of a fit, its distribution and source replaced where given."""
    row = Entry(
        name,
        source or fit.source,
        long_name,
        distribution=distribution or fit.distribution,
        n=fit.n,
    )
    return replace(row, device=fit.device)


def figure(name: str, number: float, units: str, source: str, long_name: str, n: int = 0) -> Entry:
    return Entry(name, source, long_name, number=float(number), units=units, n=n)


class Data:
    """All fits that do not depend on the device, made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = rank_body(folder)
        self.node_share = node_share(folder)
        self.jobs = pd.read_csv(FITTED).set_index(["device", "entry"])
        self.gemm = gemm_points(folder)
        self.gemm_shape, _ = kernel_shape(folder, ["gemm"])
        self.memory_shape, self.memory_cv = kernel_shape(folder, ["elementwise", "norm"])
        self.gap = back_to_back_gap(folder)
        self.dp = dp_transfer(folder)
        self.p2p = p2p(folder, 1.1, 1.5)
        self.p2p_bad = p2p(folder, 2.5, 9.0)
        self.content, self.op_residual, self.loading = content(folder, "AR", without_replica=0)
        self.content_bad, _, self.loading_bad = content(folder, "SE_first21", None)
        self.slow = slow_transfers(folder)
        self.tau = step_memory(folder)
        self.production = production_steps(folder)
        found = {gpu: gemm_tables(folder, gpu) for gpu in COLLECTED}
        self.gemms = {gpu: tables for gpu, (tables, _) in found.items()}
        self.cast = {gpu: cast_efficiency(gpu, each) for gpu, (_, each) in found.items() if each}
        self.kernels = Carried(folder)


def from_jobs(data: Data, gpu: str, entry: str) -> Fit:
    """Return a figure that was fitted to published jobs, its interval in the source."""
    owner = next((g for g in (gpu, *JOBS.get(gpu, ())) if (g, entry) in data.jobs.index), gpu)
    if (owner, entry) not in data.jobs.index and entry in ASSUMED:
        return ASSUMED[entry]
    row, carried = data.jobs.loc[owner, entry], ""
    if owner != gpu:
        carried = f"assumption, carried over from {owner.upper()}: "
    told = f" (90 %: {row.low:.3g} to {row.high:.3g})" if row.low == row.low else ""
    return Fit(float(row.value), int(row.n), f"{carried}{row.source}{told}")


def to_tail(fit: Fit, p99_p50: float) -> Distribution:
    """Stretch a distribution about its median until p99 / median is as asked; shape kept."""
    p50, p99 = fit.distribution.ppf([0.5, 0.99])
    ratio = (p99_p50 - 1.0) / (p99 / p50 - 1.0)
    values = np.maximum(
        1.0 + ratio * (np.asarray(fit.distribution.knots_x) * fit.distribution.scale / p50 - 1.0),
        0.5,
    )
    distribution = replace(fit.distribution, knots_x=tuple(float(v) for v in values), scale=1.0)
    return replace(distribution, scale=1.0 / distribution.mean)


def kernel_distributions(data: Data, gpu: str) -> list[Entry]:
    """Distributions of kernels' repeats on one GPU."""
    shape, memory = data.gemm_shape, data.memory_shape
    told = f"; shape: {shape.source}"
    memory_distribution = memory.distribution.scaled_to(data.memory_cv.number)
    memory_told = f"measured: {memory.source}, median CV"
    entries = []
    for name, low, high in (("gemm_large", 1.0, np.inf), ("gemm_small", 0.3, 1.0)):
        cv = gemm_cv(data.gemm, gpu, low, high)
        text = f"matrix product {'of 1 ms or more' if low == 1.0 else 'below 1 ms'}"
        distribution = shape.distribution.scaled_to(cv.number)
        entries.append(
            fitted(f"residual/{name}", cv, text, distribution, f"measured: {cv.source}{told}")
        )
    attention = "assumption: 1 %, as matrix products (too few repeats in kineto_kernels)"
    optimizer = f"assumption: as memory-bound kernels; {memory_told}"
    text = "a whole forward or backward"
    return [
        *entries,
        distribution_entry(
            "residual/attention", shape.distribution.scaled_to(0.01), attention + told, "attention"
        ),
        fitted(
            "residual/memory",
            memory,
            "elementwise and norm kernels",
            memory_distribution,
            memory_told,
        ),
        distribution_entry(
            "residual/optimizer", memory_distribution, optimizer, "optimizer kernels"
        ),
        fitted("residual/compute", data.op_residual, text),
    ]


def communication_distributions(data: Data, gpu: str) -> list[Entry]:
    """Distributions of transfers, without waiting, by tier and message size."""
    sizes = {
        "small": (0.0, 1e6, 1.5, "below 1 MB"),
        "medium": (1e6, 1e8, 1.25, "1-100 MB"),
        "large": (1e8, 1e12, 1.25, "100 MB and more"),
    }
    entries = []
    for tier in ("nvlink", "network"):
        where = "inside a node" if tier == "nvlink" else "across nodes"
        for name, (low, high, cap, span) in sizes.items():
            if (tier, name) == ("network", "large"):
                continue  # production jobs have these
            net = f"{gpu}_dgx" if tier == "nvlink" else "a100_dgx"
            if (tier, name) == ("nvlink", "large"):
                net = "a100_pairwise"
            fit = collective(data.folder, net, tier == "network", low, high, cap)
            carried = "" if net.startswith(gpu) else "assumption: carried over from A100; "
            text = f"collective {where}, {span}"
            entries.append(fitted(f"residual/{tier}_{name}", fit, text, None, carried + fit.source))
    p2p_told = (
        f"{data.p2p.source} with p99/p50 1.1-1.5; stretched to p99/p50 1.3, the middle of healthy "
        f"jobs' 1.1-1.5 ({OSDI})"
    )
    return [
        *entries,
        fitted("residual/network_large", data.dp, "collective across nodes, 100 MB and more"),
        fitted(
            "residual/p2p", data.p2p, "transfer between stages", to_tail(data.p2p, 1.3), p2p_told
        ),
    ]


def effect_entries(data: Data, gpu: str) -> list[Entry]:
    """Shared effects: rank, step, microbatch, call, run."""
    body, share = (from_jobs(data, gpu, f"rank/{name}") for name in ("body_cv", "node_share"))
    step, shape = from_jobs(data, gpu, "step/cv"), data.op_residual.distribution
    carried = "assumption, carried over from H100: " if gpu == "a100" else ""
    return [
        fitted(
            "rank",
            body,
            "GPU of a cluster, compute-bound kernels, after burn-in",
            bounded_body_lemons(body.number, data.rank["gpd_shape"].number, 0.0, 1.06, 1.2, 1.25),
            f"{body.source}; tail of the body: {data.rank['gpd_shape'].source}",
        ),
        figure(
            "rank/node_share",
            round(share.number, 2),
            "1",
            share.source,
            "share of the body's variance common to a node",
            share.n,
        ),
        figure(
            "rank/memory_loading",
            0.0,
            "1",
            "memory-bound work varied 0.04-1.1 % between V100 where SGEMM varied 2 % "
            "(gpu_variability); rounded to none",
            "power of the rank effect on memory-bound kernels",
        ),
        fitted(
            "step",
            step,
            "one step, all ranks together",
            lognormal(step.number),
            f"{carried}{step.source}",
        ),
        figure(
            "step/correlation_time_s",
            round(data.tau.number, 0),
            "s",
            data.tau.source,
            "time over which the step effect's correlation falls to 1/e",
            data.tau.n,
        ),
        figure(
            "microbatch/backward_loading",
            1.5,
            "1",
            f"{data.loading.source}: {data.loading.number:.2f}; another job "
            f"{data.loading_bad.number:.2f}; rounded",
            "power of the content on backward ops",
            data.loading.n,
        ),
        figure(
            "microbatch/loss_loading",
            0.67,
            "1",
            f"last stage over first in two of three jobs, 0.65-0.69 ({OSDI})",
            "power of the content on the loss layer",
        ),
        distribution_entry(
            "call",
            shape.scaled_to(0.005),
            f"assumption: 0.5 % within 0.3-1 %; shape: {data.op_residual.source}",
            "one forward or backward on one rank: what its kernels share",
        ),
        *run_entries(data, gpu, carried),
    ]


def run_entries(data: Data, gpu: str, carried: str) -> list[Entry]:
    """Spread between runs, and what the model may be wrong by."""
    rows = [
        ("run/cv", carried, "spread between runs on the same nodes"),
        ("run/model_error_growth", "", "growth of the model's error per factor of e in GPUs"),
    ]
    for kind, what in MODEL_CLASSES.items():
        if (gpu, f"run/model_error_{kind}") in data.jobs.index:  # never carried over
            text = f"standard deviation of the logarithm of predicted over true, {what}"
            rows.append((f"run/model_error_{kind}", "", text))
            rows.append((f"run/largest_gpus_{kind}", "", f"GPUs of the largest of them, {what}"))
    out = []
    for name, told, text in rows:
        fit = from_jobs(data, gpu, name)
        number = float(f"{fit.number:.3g}") if "gpus" not in name else fit.number
        out.append(figure(name, number, "1", told + fit.source, text, fit.n))
    classes = pd.read_csv(UNFITTED)
    error = float(np.sqrt((classes["mean"] ** 2 + classes.sd**2).mean()))
    told = f"rms of {len(classes)} classes of jobs as if nothing had been fitted to them, each"
    told += f" counting once (experiments/validation/public-jobs/unfitted.csv): {error:.2g}; no"
    told += " less than that of any class with jobs"
    kinds = data.jobs.index.get_level_values(1)
    error = max(error, *data.jobs[kinds.str.startswith("run/model_error_")
                                  & (kinds != "run/model_error_growth")].value)  # fmt: skip
    text = "the same of a class without published jobs"
    n = int(classes.n.sum())
    return [*out, figure("run/model_error_unmeasured", float(f"{error:.3g}"), "1", told, text, n)]


# Share of a job's steps in which any of its leaf switches is congested, in a shared cluster
HIT, HIT_GPUS = 0.4, 768  # of jobs of 512 to 1,024 GPUs
LEAF_GPUS = 128  # assumption: 16 nodes of 8, as a job's cluster.leaf_nodes


def regime_entries(shared: bool) -> list[Entry]:
    """Congestion of leaf switches, in a shared cluster, and stalls."""
    greyhound = "Greyhound, ATC'25 (shared cluster)"
    probability, why = 0.0, "assumption: none in a dedicated cluster"
    if shared:
        leaves = HIT_GPUS / LEAF_GPUS
        probability = float(f"{1.0 - (1.0 - HIT) ** (1.0 / leaves):.3g}")
        why = (
            f"assumption: {100 * HIT:.0f} % of a job's steps, by {leaves:.0f} leaf switches of "
            f"{LEAF_GPUS} GPUs that are congested independently; {greyhound}: 16 of 27 jobs of 512 "
            "to 1,024 GPUs fail-slow for any reason and delayed by 34.6 %, at 1.4 to 1.85 times "
            "the step 24 to 51 % of the steps"
        )
    stall = "assumption: none; a job that has stalls states rate and entity"
    text = "share of steps in which a leaf switch is congested"
    return [
        figure("regime/probability", probability, "1", why, text),
        figure(
            "regime/factor",
            1.6,
            "1",
            f"assumption: {greyhound} saw a job's throughput fall by 28 to 46 %, 1.4-1.85 times "
            "the step; here 1.6 times the communication, so less of the step",
            "duration of communication under congestion over without",
        ),
        figure(
            "regime/duration_s",
            2880.0,
            "s",
            f"{greyhound}: mean 24 min of network episodes, 72 min of all; middle",
            "mean length of an episode",
        ),
        figure("stall/rate_per_hour", 0.0, "1/h", stall, "stalls per entity and hour"),
        figure("stall/duration_s", 10.0, "s", "assumption", "mean length of a stall"),
        figure("stall/duration_cv", 1.0, "1", "assumption: exponential", "spread of a stall"),
    ]


OLDER = {
    "megatron-2022": "Megatron-LM of 2021 to 2023 over the present one",
    "eager-2023": "eager PyTorch 1.13 to 2.5 over the present one",
    "compiled-2024": "torch.compile of PyTorch 2.5 to 2.8 over the present one",
    "nanotron": "nanotron of 2024 over eager PyTorch of 2026",
}
FP8_BACKWARD = (
    (
        "fp8_backward",
        "1",
        "time of gradients' products in fp8, whose sums are promoted, over the table",
    ),
)


def nominal_entries(data: Data, gpu: str) -> list[Entry]:
    """Figures behind nominal durations, beside the kernels' tables."""
    network, nvlink = network_efficiency(), NVLINK.get(gpu, OTHER_NVLINK)
    if gpu in LINKS:
        nvlink = nvlink_efficiency(data.folder, LINKS[gpu])
    rows = [
        ("cast_efficiency", *data.cast[CAST.get(gpu, gpu)],
         "share of the memory bandwidth that quantizing reaches"),
        ("nvlink_efficiency", round(nvlink.number, 3), "1", nvlink.source,
         "share of the NVLink bandwidth"),
        ("network_efficiency", round(network.number, 3), "1", network.source,
         "share of the network bandwidth"),
        ("kernel_launch_s", round(data.gap.number, 7), "s", data.gap.source, "gap per kernel"),
        *deepep.figures(data.folder, gpu),
    ]  # fmt: skip
    for name, units, text in (
        ("derate", "1", "speed of products and attention in training over the tables"),
        ("overlap_cost", "1", "share of hidden transfers by which compute beside is longer"),
        ("expert_layer_s", "s", "a pass of a layer with experts, beyond its kernels"),
        *((f"speed_{name}", "1", f"speed of {about}") for name, about in OLDER.items()),
        *(FP8_BACKWARD if REPEATS[gpu] == "h100" and gpu in ("h100", "h200") else ()),
    ):
        fit = from_jobs(data, gpu, f"nominal/{name}")
        rows.append((name, float(f"{fit.number:.3g}"), units, fit.source, text))
    return [figure(f"nominal/{name}", *rest) for name, *rest in rows]


def kernel_tables(data: Data, gpu: str) -> dict[str, KernelTable]:
    """Measured tables by size, its own or those of a device of the same chip."""
    out = {}
    if gpu in PRODUCTS:
        out |= _carry(data.gemms[PRODUCTS[gpu]], PRODUCTS[gpu], gpu)
    if gpu in LINKS:
        out |= _carry(collective_tables(data.folder, LINKS[gpu]), LINKS[gpu], gpu)
    return out


def _carry(tables: dict[str, KernelTable], source: str, gpu: str) -> dict[str, KernelTable]:
    """Carry tables over to a device: 4-bit products by the ratio of the data sheets' peaks."""
    if source == gpu:
        return tables
    told, out = f"assumption, carried over from {source.upper()}: ", {}
    for name, table in tables.items():
        kind, _, precision = name.partition("/")
        ratio = 1.0
        if kind != "nvlink":
            ratio = DEVICES[gpu].flop_per_s(precision) / DEVICES[source].flop_per_s(precision)
        out[name] = replace(table, rate=table.rate * ratio, source=told + table.source)
    return out


def stressed(entry: Entry, data: Data) -> Entry:
    """Return the entry of a stressed set; the same where nothing is known to be worse."""
    cv, factor, share, slow = data.slow
    twice = mixture([1.0 - share, share], [lognormal(cv), lognormal(cv).times(factor)])
    shared = f"stressed end of the range of {OSDI}"
    changes: dict[str, tuple[Distribution | float, str]] = {
        "step": (lognormal(0.0225), f"{shared}: 2.1-2.2 %"),
        "call": (
            data.op_residual.distribution.scaled_to(0.02),
            "assumption: 2 %, four times healthy",
        ),
        "residual/compute": (
            data.op_residual.distribution.scaled_to(0.05),
            f"{shared}: 5.0-5.5 % where stages' content loadings are taken as equal",
        ),
        "residual/network_medium": (twice, slow),
        "residual/network_large": (twice, slow),
        "residual/network_small": (twice, "assumption: as larger messages; " + slow),
        "residual/p2p": (
            to_tail(data.p2p_bad, 3.0),
            f"{data.p2p_bad.source} with p99/p50 above 2.5; stretched to 3",
        ),
    }
    kernels = ("gemm_large", "gemm_small", "attention", "memory", "optimizer")
    if entry.distribution is not None and entry.name.removeprefix("residual/") in kernels:
        text = "arXiv:2510.15596v2: temporal GEMM variation 0.98-6.46 %, upper end"
        return replace(
            entry, distribution=entry.distribution.scaled_to(0.065), source=text, n=0, device=""
        )
    if entry.name not in changes:
        return entry
    value, source = changes[entry.name]
    if isinstance(value, Distribution):
        return replace(entry, distribution=value, source=source, n=0, device="")
    return replace(entry, number=value, source=source, n=0, device="")


def uncurated(entry: Entry, data: Data) -> Entry:
    """Return the entry of a cluster without burn-in; the same where none is known."""
    rank, share = data.rank, data.node_share
    if entry.name == "rank/node_share":
        return replace(entry, number=round(share.number, 2), source=share.source, n=share.n)
    if entry.name != "rank":
        return entry
    distribution = bounded_body_lemons(
        rank["body_cv"].number, rank["gpd_shape"].number, rank["lemon_fraction"].number, 1.06,
        rank["lemon_max"].number, 1.25,
    )  # fmt: skip
    told = (
        f"{rank['body_cv'].source}: body CV {100 * rank['body_cv'].number:.2f} %, "
        f"{100 * rank['lemon_fraction'].number:.2f} % lemons up to {rank['lemon_max'].number:.2f}"
    )
    name = "GPU of a cluster, compute-bound kernels, no burn-in; lemons culled above 1.25"
    return replace(
        entry,
        distribution=distribution,
        source=told,
        long_name=name,
        n=rank["body_cv"].n,
        device="V100",
    )


def production(entries: list[Entry], data: Data, gpu: str) -> list[Entry]:
    """Return the entries of a production cluster: slow machines, and what its steps vary by."""
    step, jitter = data.production
    healthy, share = from_jobs(data, gpu, "step/cv"), SLOW_MACHINES / NODE_GPUS
    body = from_jobs(data, gpu, "rank/body_cv")
    rank = bounded_body_lemons(body.number, data.rank["gpd_shape"].number, share, 1.05, 1.15, 1.25)
    slow = (
        f"arXiv:2402.15627 (MegaScale): {100 * SLOW_MACHINES:.1f} % of machines about 10 % slow; "
        f"assumption: one GPU of {NODE_GPUS}, 5 to 15 %; body: {body.source}"
    )
    changed = {"rank": (rank, slow)}
    if step.number > healthy.number:  # no steadier than a healthy one
        changed["step"] = (lognormal(step.number), step.source)
    out = [
        replace(e, distribution=changed[e.name][0], source=changed[e.name][1], n=0, device="")
        if e.name in changed else e
        for e in entries
    ]  # fmt: skip
    added = "mean time added to a step"
    return [*out, figure("jitter/mean_s", jitter.number, "s", jitter.source, added, jitter.n)]


def unpacked(data: Data) -> Entry:
    """Return the content of microbatches where sequences of all lengths are not packed."""
    distribution, source = data.content_bad.distribution, data.content_bad.source
    told = f"{source}: bimodal, CV {100 * distribution.cv:.0f} % (17-44 % seen), set to 25 %"
    text = "content of a microbatch, shared by stages, forward and backward"
    return distribution_entry("microbatch", distribution.scaled_to(0.25), told, text)


def build_set(data: Data, gpu: str, state: str) -> Library:
    """Assemble one set."""
    base = REPEATS[gpu]
    entries = (
        kernel_distributions(data, base)
        + communication_distributions(data, base)
        + effect_entries(data, gpu)
    )
    if base != gpu:
        text = f"assumption: carried over from {base.upper()}; "
        entries = [
            replace(e, source=text + e.source) if e.name.startswith("residual/") else e
            for e in entries
        ]
    entries += regime_entries(shared=state == "stressed")
    entries += nominal_entries(data, gpu)
    if state == "production":
        entries = production(entries, data, gpu)
    elif state != "healthy":
        entries = [uncurated(entry, data) for entry in entries]
    if state == "stressed":
        entries = [*(stressed(entry, data) for entry in entries), unpacked(data)]
    title = f"{NAMES[gpu]}, {state} cluster"
    return Library(
        f"{gpu}-{state}",
        NAMES[gpu],
        {entry.name: entry for entry in entries},
        DATE,
        kernel_tables(data, gpu),
        attrs={"title": title, "generator": "experiments/library/build.py"},
        kernels=data.kernels.kernels(gpu),
    )


def main() -> int:
    default = ROOT.parent / "shared" / "data"
    folder = Path(os.environ.get("PRISM_DATA", default))
    if not (folder / "kernel_profiles").is_dir():
        print(f"no measured data in {folder}; set PRISM_DATA to their folder", file=sys.stderr)
        return 2
    data = Data(folder)
    OUT.mkdir(exist_ok=True)
    for gpu, states in SETS.items():
        for state in states:
            library = build_set(data, gpu, state)
            save_library(library, OUT / f"{library.name}.nc")
            print(f"{library.name}: {len(library.entries)} entries; prism show {library.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
