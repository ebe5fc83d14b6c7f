"""Recordings with known changes, and stationary ones: step times, traces of ops, of kernels."""

import numpy as np
from scipy.signal import lfilter

from prism.traces import StepTimes, make_trace

STEP_S = 2.0


def noise(rng, shape, memory=0.0, sd=0.02, stalls=0.0):
    """Relative step times [step, series]: AR(1) in the logarithm, and stalls at a rate."""
    shocks = rng.standard_normal(shape)
    shocks[1:] *= np.sqrt(1.0 - memory**2)
    out = np.exp(sd * lfilter([1.0], [1.0, -memory], shocks, axis=0))
    return out + (rng.random(shape) < stalls) * rng.exponential(2.0, shape)


def step_times(factors, rng, runs=1, run_sd=0.0, **kind):
    """Step times of runs, [step] or [step, run] factors times noise."""
    factors = np.asarray(factors, float)
    if factors.ndim == 1:
        factors = np.repeat(factors[:, None], runs, axis=1)
    runs = factors.shape[1]
    seconds = STEP_S * factors * noise(rng, factors.shape, **kind)
    seconds = seconds * np.exp(run_sd * rng.standard_normal(runs))
    n = factors.shape[0]
    names = np.repeat([f"r{i}" for i in range(runs)], n)
    return StepTimes(seconds.T.ravel().copy(), np.tile(np.arange(n), runs), names, "made", "s")


def trace(
    rng, n=80, replicas=4, stages=2, factors=None, microbatches=4, memory=0.9, kernels=False,
    first=100, step_sd=0.01,
):  # fmt: skip
    """Trace of workers whose steps take [step, worker] factors times effects of all kinds."""
    workers = replicas * stages
    factors = np.ones((n, workers)) if factors is None else np.asarray(factors, float)
    rank = np.exp(0.01 * rng.standard_normal(workers))
    shared = noise(rng, (n, 1), memory, step_sd)
    own = noise(rng, (n, workers), 0.5, 0.005)
    content = np.repeat(np.exp(0.03 * rng.standard_normal((microbatches, n, replicas))), stages, 2)
    shape = (2, microbatches, n, workers)
    seconds = np.array([0.1, 0.2])[:, None, None, None] * content * (factors * rank * shared * own)
    seconds = seconds * np.exp(0.01 * rng.standard_normal(shape))
    flat = seconds.transpose(1, 0, 2, 3).reshape(-1, n, workers)
    ends = np.cumsum(flat, axis=0)
    starts = ends - flat
    last = ends[-1].max(axis=1) + 0.05 * noise(rng, (n, 1), 0.0, 0.05)[:, 0]
    starts, flat = np.vstack([starts, ends[-1:]]), np.vstack([flat, last[:, None] - ends[-1:]])
    starts = starts + (np.cumsum(last + 0.01) - last)[:, None]
    op, step, worker = (x.ravel() for x in np.indices(flat.shape))
    what = np.array([*["forward", "backward"] * microbatches, "all_reduce"])
    columns = {
        "op_kind": what[op], "name": what[op], "step": first + step, "start": starts.ravel(),
        "duration": flat.ravel(), "rank": worker,
    }  # fmt: skip
    if kernels:
        kinds = np.where(what == "all_reduce", "all_reduce", "compute")
        columns |= {"op_kind": kinds[op], "shape": np.full(op.size, "")}
        return make_trace(columns, "made", "kineto")
    columns |= {
        "dp_rank": worker // stages, "stage": worker % stages,
        "microbatch": np.where(op < 2 * microbatches, op // 2, -1),
    }  # fmt: skip
    return make_trace(columns, "made", "pipeline")


def during(n, *spans, workers=0):
    """Factors [step] or [step, worker]: 1, but (begin, end, factor[, worker]) in spans."""
    out = np.ones((n, workers)) if workers else np.ones(n)
    for begin, end, factor, *worker in spans:
        out[(slice(begin, end), *worker)] = factor
    return out
