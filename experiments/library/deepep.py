"""Experts' tokens sent by DeepEP: figures fitted to measured kernels and to published bandwidths.

`python experiments/library/deepep.py` prints the fit and its errors. Data: ``*deepep*.parquet`` of
kernel_tables, one node of 8; dispatch in FP8 with scales (1 + 4 / 128 bytes a value), combine in
bfloat16. Where a token reaches r ranks and has h values of b bytes, both take
``start + tokens (h b local + r copy + r 7/8 h b / rate)``: bytes of a rank's own tokens, what each
copy costs whatever its size, and bytes on NVLink, at most at the data sheet's rate.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import lsq_linear

from prism.cluster.dispatch import distinct_parts
from prism.jobs.devices import DEVICES

TABLES = "{}_sxm__comm__sglang__0.5.12__wideep_deepep_normal_perf.parquet"
MULTIPROCESSORS = 20  # that DeepEP takes: Megatron-LM's default, moe_deepep_num_sms
TOKENS = 512  # from which on: a training step sends more
FP8, BF16 = 1.0 + 4.0 / 128.0, 2.0  # bytes of a value
OF = {"h100": "h100", "h200": "h100"} | dict.fromkeys(("b200", "b300", "gb200", "gb300"), "b200")
# deepseek-ai/DeepEP, Hybrid-EP_Implementation.md: HybridEP on B200 with its calls, dispatch in
# bfloat16 and combine, 16 multiprocessors, bytes per second of all copies.
SHAPE = (4_096, 7_168, 8, 64, 8)  # tokens, width, experts per token, experts, ranks
HYBRID_B200 = (535.94e9, 530.86e9)
# Bytes per second of a rank's tokens to the nodes they reach, its own included, by ranks on nodes
# of 8 H800 or H100 with 400 Gbit/s each: dispatch and combine of DeepEP (docs/legacy.md there) and
# of HybridEP's kernels (the same, 16 multiprocessors). On two nodes DeepEP is bound by NVLink.
INTERNODE = {32: (58e9, 57e9, 57.69e9, 57.46e9), 64: (51e9, 50e9, 49.97e9, 49.77e9)}
NETWORK = 50e9


class Deepep(NamedTuple):
    """Fit of one device, its errors, and the measured times behind it."""

    start_s: float
    local_s_per_byte: float
    copy_s: float
    bytes_per_s: float
    n: int
    rms: float  # of the logarithm of fitted over measured, each shape left out in turn
    pair_rms: float  # the same of a dispatch and a combine together

    def seconds(self, tokens: float, width: float, copies: float, value_bytes: float) -> float:
        """Time of one call in a node of 8 [s]."""
        n_bytes = tokens * width * value_bytes
        sent = copies * (7.0 / 8.0) * n_bytes / self.bytes_per_s
        return self.start_s + n_bytes * self.local_s_per_byte + tokens * copies * self.copy_s + sent


def measured(folder: Path, gpu: str) -> pd.DataFrame:
    """Return one row a call: shape, bytes of a value, ranks reached, seconds."""
    table = pd.read_parquet(folder / "kernel_tables" / TABLES.format(gpu))
    table = table[(table.dispatch_sms == MULTIPROCESSORS) & (table.num_token >= TOKENS)]
    shape = table[["hidden_size", "num_token", "num_topk", "num_experts"]]
    shape.columns = ["width", "tokens", "per_token", "experts"]
    shape = shape.assign(
        copies=[
            distinct_parts(k, n, 8) for k, n in zip(shape.per_token, shape.experts, strict=True)
        ]
    )
    calls = (("dispatch", FP8), ("combine", BF16))
    return pd.concat(
        [
            shape.assign(call=call, value_bytes=b, seconds=1e-6 * table[f"{call}_transmit_us"])
            for call, b in calls
        ],
        ignore_index=True,
    )


def _solve(rows: pd.DataFrame, slowest: float) -> np.ndarray:
    """Least squares of relative errors, no figure below 0, no byte faster than the link."""
    n_bytes = rows.tokens * rows.width * rows.value_bytes
    terms = np.array(
        [1e-6 + 0 * n_bytes, n_bytes, rows.tokens * rows.copies, rows.copies * n_bytes * 7 / 8]
    )
    scaled = (terms * np.array([1.0, 1e-12, 1e-9, 1e-12])[:, None] / rows.seconds.values).T
    low = [0.0, 0.0, 0.0, slowest * 1e12]
    found = lsq_linear(scaled, np.ones(len(rows)), (low, np.inf)).x
    return np.asarray(found * np.array([1e-6, 1e-12, 1e-9, 1e-12]))


def _error(rows: pd.DataFrame, found: np.ndarray) -> pd.Series:
    fit = Deepep(*found[:3], 1.0 / found[3], 0, 0.0, 0.0)
    columns = zip(rows.tokens, rows.width, rows.copies, rows.value_bytes, strict=True)
    return pd.Series([fit.seconds(*each) for each in columns], rows.index) - rows.seconds


def fit(folder: Path, gpu: str) -> Deepep:
    """Fit a device's figures; errors are those of shapes that were left out of the fit."""
    rows, slowest = measured(folder, gpu), 1.0 / DEVICES[gpu].nvlink_bytes_per_s
    shapes = ["width", "per_token", "experts"]
    left_out = []
    for _, shape in rows.groupby(shapes):
        left_out.append(_error(shape, _solve(rows.drop(shape.index), slowest)))
    error = pd.concat(left_out).reindex(rows.index)
    pairs = rows.assign(error=error).groupby([*shapes, "tokens"])[["error", "seconds"]].sum()
    one, two = (np.log1p(x.error / x.seconds) for x in (rows.assign(error=error), pairs))
    found = _solve(rows, slowest)
    rms = [float(np.sqrt((x**2).mean())) for x in (one, two)]
    return Deepep(*map(float, found[:3]), 1.0 / float(found[3]), len(rows), *rms)


def hybrid_ratio(folder: Path) -> float:
    """Time of HybridEP over DeepEP's, of a dispatch and a combine in bfloat16, on B200."""
    tokens, width, per_token, experts, ranks = SHAPE
    copies = distinct_parts(per_token, experts, ranks)
    published = sum(tokens * copies * width * BF16 / rate for rate in HYBRID_B200)
    return published / (2.0 * fit(folder, "b200").seconds(tokens, width, copies, BF16))


def network_efficiency() -> tuple[float, int]:
    """Share of the network's rate that what leaves the node reaches, mean and number."""
    shares = [x * (1 - 8 / n) / NETWORK for n, rates in INTERNODE.items() for x in rates]
    return float(np.mean(shares)), len(shares)


def figures(folder: Path, gpu: str) -> list[tuple[str, float, str, str, str, int]]:
    """Library figures of a device, ``nominal/`` left off: name, number, unit, source, what, n."""
    if gpu not in OF:
        return []
    found, of = fit(folder, OF[gpu]), OF[gpu].upper()
    ratio, (network, n) = hybrid_ratio(folder), network_efficiency()
    told = "" if gpu == OF[gpu] else f"assumption, carried over from {of}: "
    told += (
        f"DeepEP kernels in a node of 8 {of}, {MULTIPROCESSORS} multiprocessors, 18 shapes of "
        f"{TOKENS} and more tokens; rms {100 * found.rms:.1f} %, dispatch and combine together "
        f"{100 * found.pair_rms:.1f} % on shapes left out"
    )
    between = "published bandwidth on 4 and 8 nodes of H800 and H100 (DeepEP and HybridEP)"
    published = "published bandwidth on 8 B200 (HybridEP) over the fit of DeepEP"
    if gpu not in ("b200", "gb200"):
        published = f"assumption, carried over from B200: {published}"
    share = found.bytes_per_s / DEVICES[OF[gpu]].nvlink_bytes_per_s
    return [
        ("deepep_start_s", found.start_s, "s", told, "DeepEP: start of a call", found.n),
        ("deepep_local_s_per_byte", found.local_s_per_byte, "s/B", told, "own tokens", found.n),
        ("deepep_copy_s", found.copy_s, "s", told, "a token's copy, of any width", found.n),
        ("deepep_nvlink_efficiency", share, "1", told, "share of NVLink's rate", found.n),
        ("deepep_network_efficiency", network, "1", between, "share of the network's rate", n),
        ("hybridep_ratio", ratio, "1", published, "HybridEP's time over DeepEP's in a node", 2),
    ]


def main() -> int:
    default = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ.get("PRISM_DATA", default))
    for gpu in ("h100", "b200"):
        found = fit(folder, gpu)
        print(
            f"{gpu}: start {1e6 * found.start_s:.1f} us, own bytes "
            f"{1e-9 / found.local_s_per_byte:.0f} GB/s, copy {1e9 * found.copy_s:.2f} ns, NVLink "
            f"{1e-9 * found.bytes_per_s:.0f} GB/s; rms {100 * found.rms:.1f} %, pairs "
            f"{100 * found.pair_rms:.1f} % (shapes left out, n = {found.n})"
        )
    print(f"network: {100 * network_efficiency()[0]:.1f} % of {1e-9 * NETWORK:.0f} GB/s")
    print(f"HybridEP over DeepEP on B200: {hybrid_ratio(folder):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
