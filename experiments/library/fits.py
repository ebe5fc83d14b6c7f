"""What the measured data say about the distributions of the library; every function names its data.

Each fit reads one folder of the data directory (its README there says where the data come from) and
returns a `Fit`: a distribution of mean 1 or a figure, the number of observations, and how it was
made.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from prism.distributions.distribution import Distribution, empirical

Array = NDArray[np.float64]

# Knots of an empirical distribution: every 5 %, closer in both tails; those beyond the sample are
# left out.
_BODY = np.arange(0.05, 0.951, 0.05)
_TAIL = np.array([0.02, 0.01, 0.005, 0.002, 0.001, 0.0005, 0.0002, 0.0001])
GRID = np.concatenate([[0.0], _TAIL[::-1], _BODY, 1.0 - _TAIL, [1.0]])


class Fit(NamedTuple):
    """A fitted distribution or figure, with its sample size and its story."""

    value: Distribution | float
    n: int
    source: str
    device: str = ""  # what was measured

    @property
    def distribution(self) -> Distribution:
        """The distribution; only for fits of distributions."""
        assert isinstance(self.value, Distribution)
        return self.value

    @property
    def number(self) -> float:
        """The figure; only for fits of figures."""
        assert isinstance(self.value, float)
        return self.value


def empirical_distribution(sample: ArrayLike) -> Distribution:
    """Quantile distribution of a sample > 0, scaled to mean 1; its ends are the extremes."""
    values = np.asarray(sample, dtype=np.float64)
    inside = (
        (GRID == 0.0) | (GRID == 1.0) | ((GRID > 1 / values.size) & (GRID < 1 - 1 / values.size))
    )
    return empirical(list(GRID[inside]), list(np.quantile(values, GRID[inside])))


def _read(path: Path) -> pd.DataFrame:
    frame = pd.read_parquet(path)
    for name in frame.columns:
        if isinstance(frame[name].dtype, pd.CategoricalDtype):
            frame[name] = frame[name].astype(str)
    return frame


def rank_body(data: Path) -> dict[str, Fit]:
    """Per-GPU medians of SGEMM on 392 V100s: body CV, tail shape, lemons, temporal CV."""
    from scipy.stats import genpareto

    runs = _read(data / "gpu_variability" / "runs.parquet")
    runs = runs[runs.workload == "sgemm_25536"]
    medians = runs.groupby("gpu_id").value_ms.median()
    relative = medians / medians.median()
    lemons = relative[relative > 1.06]
    body = relative[relative <= 1.06]
    body = body / body.mean()
    threshold = body.quantile(0.9)
    excess = (body[body > threshold] - threshold).to_numpy()
    shape, _, _ = genpareto.fit(excess, floc=0.0)
    by_gpu = runs.groupby("gpu_id").value_ms
    temporal = float((by_gpu.std() / by_gpu.mean()).median())
    n = len(medians)
    source = f"measured: SGEMM 25536 on {n} V100 (gpu_variability)"
    return {
        "body_cv": Fit(float(body.std()), len(body), source + ", without those above 1.06"),
        "gpd_shape": Fit(float(shape), len(excess), source + ", maximum likelihood above p90"),
        "lemon_fraction": Fit(len(lemons) / n, n, source + f", {len(lemons)} above 1.06"),
        "lemon_max": Fit(float(lemons.max()), n, source),
        "temporal_cv": Fit(temporal, len(runs), source + ", spread within a GPU"),
    }


def node_share(data: Path) -> Fit:
    """Share of the between-GPU variance of SGEMM that GPUs of one node have in common.

    Not the variance of node means over that of GPUs (0.26): with four GPUs a node that is 0.25
    where nodes have nothing in common. The share is small and uncertain: F-test p 0.13, 0 to 0.16.
    """
    runs = _read(data / "gpu_variability" / "runs.parquet")
    runs = runs[(runs.workload == "sgemm_25536") & (runs.node >= 0)]
    gpus = runs.groupby(["node", "gpu_id"]).value_ms.median().rename("t").reset_index()
    gpus["t"] /= gpus.t.median()
    gpus = gpus[gpus.t <= 1.06]
    grouped = gpus.groupby("node").t
    gpus = gpus[grouped.transform("size") >= 2]
    grouped = gpus.groupby("node").t
    sizes, means = grouped.size(), grouped.mean()
    n, k = len(gpus), len(sizes)
    within = float(((gpus.t - grouped.transform("mean")) ** 2).sum()) / (n - k)
    between = float((sizes * (means - gpus.t.mean()) ** 2).sum()) / (k - 1)
    typical = (n - float((sizes**2).sum()) / n) / (k - 1)
    variance = max(0.0, (between - within) / typical)
    return Fit(
        variance / (variance + within),
        n,
        f"measured: one-way analysis of variance of {n} V100 in {k} nodes (gpu_variability), "
        "95 % interval 0 to 0.16",
        "V100",
    )


def gemm_points(data: Path) -> pd.DataFrame:
    """Profiled matrix products with n, k, flop, throughput [flop/s] and cv."""
    gemm = _read(data / "kernel_profiles" / "gemm_ops.parquet")
    head = gemm.n_embd / gemm.n_head
    columns = {
        "attn_pre_proj": (gemm.n_embd + 2 * gemm.n_kv_head * head) / gemm.tp,
        "attn_post_proj": gemm.n_embd,
        "mlp_up_proj": np.where(gemm.gated, 2, 1) * gemm.n_ff / gemm.tp,
        "mlp_down_proj": gemm.n_embd,
    }
    depth = {
        "attn_pre_proj": gemm.n_embd,
        "attn_post_proj": gemm.n_embd / gemm.tp,
        "mlp_up_proj": gemm.n_embd,
        "mlp_down_proj": gemm.n_ff / gemm.tp,
    }
    which = [gemm.op == op for op in columns]
    n, k = np.select(which, list(columns.values())), np.select(which, list(depth.values()))
    gemm["n"], gemm["k"] = n, k
    gemm["flop"] = 2.0 * gemm.num_tokens.astype(float) * n * k
    gemm = gemm[(gemm.flop > 0) & (gemm.median_ms > 0)].copy()
    gemm["throughput"] = gemm.flop / (gemm.median_ms.astype(float) * 1e-3)
    gemm["cv"] = (gemm.std_ms / gemm.mean_ms).astype(float)
    return gemm


def gemm_cv(gemm: pd.DataFrame, gpu: str, low_ms: float, high_ms: float) -> Fit:
    """Median over shapes of the CV between about 20 repetitions of one product.

    The median, because a few shapes were disturbed. Points are chosen by length only: choosing by
    std > 0.05 ms would keep the disturbed ones of the short products (median CV 4 %).
    """
    points = gemm[(gemm.gpu == gpu) & (gemm.mean_ms >= low_ms) & (gemm.mean_ms < high_ms)]
    span = f"over {low_ms:g} ms" if high_ms == np.inf else f"{low_ms:g}-{high_ms:g} ms"
    source = f"{len(points)} GEMM shapes {span} on {gpu.upper()} (kernel_profiles), median CV"
    return Fit(float(points.cv.median()), len(points), source, gpu.upper())


def kernel_shape(data: Path, kinds: list[str]) -> tuple[Fit, Fit]:
    """Distribution and typical CV of repeats of one kernel in profiler traces (A100 and V100).

    Groups of one name, grid and block with 10 repeats or more, 100 us or longer, CV below 5 %
    (a larger one mixes different problem sizes). The distribution pools values standardised per
    group.
    """
    kernels = _read(data / "kineto_kernels" / "kernels.parquet")
    kernels = kernels[kernels.kind.isin(kinds) & kernels.trace.str.contains("100_")]
    keys = ["trace", "name", "grid", "block"]
    grouped = kernels.groupby(keys).dur_us
    kernels = kernels.assign(
        n=grouped.transform("size"),
        mean=grouped.transform("mean"),
        median=grouped.transform("median"),
        cv=grouped.transform("std") / grouped.transform("mean"),
    )
    kept = kernels[(kernels.n >= 10) & (kernels["median"] >= 100.0) & (kernels.cv < 0.05)]
    groups = kept.drop_duplicates(keys)
    z = (kept.dur_us / kept["mean"] - 1.0) / kept.cv * np.sqrt(kept.n / (kept.n - 1.0))
    story = f"{len(kept)} repeats of {len(groups)} {'/'.join(kinds)} kernels (kineto_kernels)"
    distribution = empirical_distribution(1.0 + 0.02 * z.to_numpy(dtype=np.float64))
    typical = float(groups.cv.median())
    device = "A100, V100"
    return Fit(distribution, len(kept), story, device), Fit(typical, len(kept), story, device)


def back_to_back_gap(data: Path) -> Fit:
    """Gap between kernels queued behind each other on one stream of an A100 [s]."""
    kernels = _read(data / "kineto_kernels" / "kernels.parquet")
    stream = kernels[(kernels.trace == "a100_w2_r0") & (kernels.stream == 7)].sort_values("ts_us")
    gaps = (stream.ts_us.shift(-1) - stream.ts_us - stream.dur_us).dropna()
    queued = gaps[(gaps > 0.0) & (gaps < 5.0)]
    story = "measured: median gap below 5 us between kernels of one A100 stream (kineto_kernels)"
    return Fit(float(queued.median()) * 1e-6, len(queued), story, "A100")


def collective(
    data: Path, net: str, across_nodes: bool, low: float, high: float, cap: float
) -> Fit:
    """Distribution of all-reduce durations of one size class about their mean, per point.

    A point has 3 repetitions, so minimum, median and maximum are all of them. Points whose
    extremes are further than `cap` from their median are left out. That is a choice, and matters
    below 1 MB: the order of the repetitions is unknown, so first-call costs are not separable from
    noise. The source gives the share left out and the CV with them.
    """
    table = _read(data / "kernel_profiles" / "collectives.parquet")
    crosses = table.num_workers > table.devices_per_node
    chosen = table[
        table.net.str.startswith(net)
        & (table.op == "all_reduce")
        & (crosses == across_nodes)
        & (table.size_bytes >= low)
        & (table.size_bytes < high)
    ]
    steady = (chosen.max_ms < cap * chosen.median_ms) & (chosen.median_ms < cap * chosen.min_ms)
    every = chosen[["min_ms", "median_ms", "max_ms"]].to_numpy(dtype=np.float64)
    all_residuals = (every / every.mean(axis=1, keepdims=True) - 1.0) * np.sqrt(1.5)
    residual = 1.0 + all_residuals[steady.to_numpy()]
    dropped = 100.0 * (1.0 - steady.mean())
    story = (
        f"measured: {len(residual)} all-reduce points x 3 on {net}, "
        f"{'two nodes' if across_nodes else 'one node'} (kernel_profiles); "
        f"{dropped:.1f} % of points spread beyond {cap:g}x left out (CV with them "
        f"{100 * all_residuals.std():.1f} %)"
    )
    return Fit(empirical_distribution(residual.ravel()), residual.size, story, net[:4].upper())


def dp_transfer(data: Path) -> Fit:
    """Distribution of data-parallel collectives' transfer part in two healthy production jobs.

    Transfer = last end - last start of the group; relative to the median of its stage.
    """
    parts: list[Array] = []
    for trace in ("AR", "ST"):
        ops = _read(data / "production_traces" / f"ops_{trace}.parquet")
        ops["end"] = ops.start_ts + ops.duration
        for op in ("grads-reduce-scatter", "params-all-gather"):
            groups = ops[ops.optype == op].groupby(["stage", "step", "seq_id", "mc"])
            transfer = groups.end.max() - groups.start_ts.max()
            relative = transfer / transfer.groupby("stage").transform("median")
            parts.append(relative.to_numpy(dtype=np.float64))
    sample = np.concatenate(parts)
    story = (
        "measured: DP reduce-scatter and all-gather transfers of traces AR and ST "
        "(production_traces; GPU model not stated); SE, with 2x outliers, not used"
    )
    return Fit(empirical_distribution(sample), sample.size, story)


def p2p(data: Path, low: float, high: float) -> Fit:
    """Quantile distribution of 4-16 MB transfers between two nodes: the median run of a p99/p50."""
    quantiles = pd.read_csv(data / "network_noise" / "netnoise_quantiles.csv")
    rows = quantiles[(quantiles.test == "netnoise_mpi_bw")]
    rows = rows[(rows.p99_us >= low * rows.p50_us) & (rows.p99_us <= high * rows.p50_us)]
    names = ["min", "p5", "p25", "p50", "p75", "p90", "p95", "p99", "p999", "p9999", "max"]
    q = [0.0, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 0.9999, 1.0]
    relative = rows[[f"{name}_us" for name in names]].div(rows.p50_us, axis=0)
    values = relative.median().to_numpy(dtype=np.float64)
    story = f"measured: median of {len(rows)} runs' 4-16 MB transfers (network_noise)"
    return Fit(empirical(q, list(values)), int(rows.n.sum()), story, "CPU nodes")


def content(data: Path, trace: str, without_replica: int | None) -> tuple[Fit, Fit, Fit]:
    """Microbatch content and op residual of a production trace, and the backward loading.

    Logs of compute durations, worker-step means and microbatch positions taken out; the content
    is the first principal component over the stages, the residual what is left, without values
    beyond 8 robust standard deviations: those are events of their own, not the body.
    """
    ops = _read(data / "production_traces" / f"ops_{trace}.parquet")
    if without_replica is not None:
        ops = ops[ops.dp_rank != without_replica]
    scores: dict[str, Array] = {}
    residuals = []
    for op in ("forward-compute", "backward-compute"):
        wide = ops[ops.optype == op].pivot_table(
            index=["dp_rank", "step", "mb_id"], columns="stage", values="duration"
        )
        logs = np.log(wide.dropna())
        logs = logs - logs.groupby(level=[0, 1]).transform("mean")
        logs = logs - logs.groupby(level=2).transform("mean")
        matrix = logs.to_numpy(dtype=np.float64)
        _, vectors = np.linalg.eigh(np.cov(matrix.T))
        first = vectors[:, -1] * np.sign(vectors[:, -1].sum())
        scores[op] = matrix @ first / np.sqrt(first.size)
        degrees = np.sqrt(first.size / (first.size - 1.0))
        residuals.append((matrix - np.outer(matrix @ first, first)).ravel() * degrees)
    forward, backward = scores["forward-compute"], scores["backward-compute"]
    pooled = np.concatenate(residuals)
    body = np.abs(pooled) < 8.0 * 1.4826 * np.median(np.abs(pooled))
    residual = np.exp(pooled[body])
    left = f", what content leaves, {pooled.size - residual.size} outliers taken out"
    story = f"measured: compute ops of trace {trace} (production_traces)"
    return (
        Fit(
            empirical_distribution(np.exp(forward)),
            forward.size,
            story + ", content over the stages",
        ),
        Fit(empirical_distribution(residual), residual.size, story + left),
        Fit(float(backward.std() / forward.std()), forward.size, story + ", backward over forward"),
    )


def slow_transfers(data: Path) -> tuple[float, float, float, str]:
    """Reduce-scatters of trace SE: CV of the body, factor of the outliers, their share, the story.

    In the 21 steps at hand 2 of 42 are outliers; the published CV over all 43 steps is 18 %, which
    fixes the share.
    """
    ops = _read(data / "production_traces" / "ops_SE_first21.parquet")
    ops["end"] = ops.start_ts + ops.duration
    groups = ops[ops.optype == "grads-reduce-scatter"].groupby(["stage", "step", "seq_id", "mc"])
    transfer = groups.end.max() - groups.start_ts.max()
    relative = transfer / transfer.groupby("stage").transform("median")
    body, slow = relative[relative < 1.5], relative[relative >= 1.5]
    cv, factor = float(body.std() / body.mean()), float(slow.mean() / body.mean())
    shares = np.linspace(0.0, 0.1, 1001)
    mean = 1.0 + shares * (factor - 1.0)
    second = (1.0 + cv * cv) * (1.0 + shares * (factor * factor - 1.0))
    share = float(shares[np.argmin(np.abs(np.sqrt(second / mean**2 - 1.0) - 0.18))])
    story = (
        f"measured: reduce-scatters of trace SE (production_traces), body CV {100 * cv:.1f} %, "
        f"{len(slow)} of {len(relative)} at {factor:.2f}x; {100 * share:.1f} % of them gives the "
        "18 % of all 43 steps"
    )
    return cv, factor, share, story


def step_memory(data: Path) -> Fit:
    """Correlation time of step times [s]: lag-1 autocorrelation of MLPerf runs, median system."""
    floor = pd.read_csv(data / "mlperf" / "ks_floor.csv")
    systems = pd.read_csv(data / "mlperf" / "systems.csv")
    both = floor.merge(systems[["round", "submitter", "system", "benchmark", "p50_s"]])
    rho = both.lag1_autocorr.clip(0.01, 0.99)
    tau = (-both.p50_s / np.log(rho)).to_numpy(dtype=np.float64)
    story = f"measured: lag-1 autocorrelation of {len(both)} MLPerf systems, median (mlperf)"
    return Fit(float(np.median(tau)), len(both), story)
