"""Tables of measurements made up from known laws: nccl-tests' output, HTA's kernels."""

from __future__ import annotations

import numpy as np
import pandas as pd

HEADER = """\
# nThread 1 nGpus 1 minBytes {low} maxBytes {high} step: 4(factor) warmup iters: 5 iters: 20
#
# Using devices
{devices}
#
#                                                       out-of-place               in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""  # noqa: E501


def nccl_tests(
    latency=20e-6, bandwidth=200e9, hosts=("node1", "node2"), per_host=8, noise=0.0, seed=0,
    low=8 << 10, high=2 << 30, name="all_reduce",
):  # fmt: skip
    """Text of one run: time = latency + bytes of the bus / bandwidth, with relative noise."""
    generator = np.random.default_rng(seed)
    n = per_host * len(hosts)
    factor = {"all_reduce": 2.0 * (n - 1) / n}.get(name, (n - 1) / n)
    devices = "\n".join(
        f"#  Rank {i:2d} Group  0 Pid {900 + i} on {host:>8} device {i % per_host} [0x19] NVIDIA"
        for i, host in enumerate(h for h in hosts for _ in range(per_host))
    )
    lines = [f"# Collective test starting: {name}_perf"]
    lines.append(HEADER.format(low=low, high=high, devices=devices).rstrip("\n"))
    size = low
    while size <= high:
        cells = []
        for _ in range(2):
            time = latency + factor * size / bandwidth
            time *= 1.0 + noise * generator.standard_normal()
            algorithm = size / time / 1e9
            cells.append(f"{1e6 * time:10.4f} {algorithm:9.4f} {algorithm * factor:9.4f}      0")
        op = "sum" if name in ("all_reduce", "reduce_scatter") else "none"
        lines.append(f"{size:12d} {size // 4:13d}     float    {op:>4}      -1 {'  '.join(cells)}")
        size *= 4
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1", ""])


def durations(seed=0, n=400, ranks=2):
    """Kernels' durations [us] by name, type and rank, lognormal."""
    generator = np.random.default_rng(seed)
    kernels = (("ampere_bf16_gemm_128x128", "COMPUTATION", 180.0, 0.04),
               ("void at::native::vectorized_elementwise_kernel<4>", "COMPUTATION", 12.0, 0.10),
               ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "COMMUNICATION", 900.0,
                0.30))  # fmt: skip
    rows = []
    for name, kind, mean, cv in kernels:
        sigma = np.sqrt(np.log1p(cv**2))
        for rank in range(ranks):
            draw = mean * (1.0 + 0.02 * rank) * generator.lognormal(-0.5 * sigma**2, sigma, n)
            rows.append((name, kind, rank, draw))
    return rows


def hta_table(rows, unit="us", others=True):
    """The table that HTA makes of such durations; it labels microseconds as ns."""
    found = [
        {"name": name, f"sum ({unit})": x.sum(), f"max ({unit})": x.max(),
         f"min ({unit})": x.min(), "stddev": x.std(ddof=1), f"mean ({unit})": x.mean(),
         "kernel_type": kind, "rank": rank}
        for name, kind, rank, x in rows
    ]  # fmt: skip
    if others:
        extra = {"name": "others", f"sum ({unit})": 900.0, f"max ({unit})": 500.0,
                 f"min ({unit})": 100.0, "stddev": 30.0, f"mean ({unit})": 300.0,
                 "kernel_type": "COMPUTATION", "rank": 0}  # fmt: skip
        found.append(extra)
    return pd.DataFrame(found)
