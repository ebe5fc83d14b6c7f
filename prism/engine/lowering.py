"""Lowering: the kernels of every GPU between two barriers to one op of their group."""

import math
from typing import Any

import numpy as np

from prism.engine.arrays import CDF_RANGE, CDF_ROWS, Array, Lowering
from prism.engine.cache import inlined, inner, jit

Room = tuple[Any, ...]
PLAIN = np.ones(2)  # nothing is stretched
QUADRATURE_NODES = 20  # trapezoid nodes of the maximum over a group


def cdf_cells(cdf: Array) -> Array:
    """Lay a standardised cdf [..., knot], linear between its knots, as the engine looks it up.

    That is float64[..., knot, 2]: its value, and how much more the next one is; 1 from the last on.
    """
    cells = np.stack([cdf, np.diff(cdf, append=1.0)], axis=-1)
    cells[..., -1, :] = 1.0, 0.0
    return cells


def room_for_nodes() -> Room:
    """Make room for the nodes of a maximum; made in compiled code it takes long to compile."""
    n = QUADRATURE_NODES
    return np.empty(n), np.empty(n), np.empty(n, np.int32)


def room_to_lower(low: Lowering) -> Room:
    """Make room for what `lower_block` works out of a group and of an op."""
    n_segments, n_members, n_terms = len(low.seg_cv), low.member.shape[2], low.call_cv.shape[1]
    moments, stamp = np.empty((n_segments, 2)), np.empty(n_segments, np.int64)
    means = np.full((n_segments, max(1, n_members)), np.nan)
    return means, np.empty(n_terms), moments, stamp, room_for_nodes()


@inner
def _largest(mean, n, cv, cdf, stretch, room):
    """`group_max` of the first n, with `room_for_nodes`."""
    top = mean[0]
    for i in range(1, n):
        top = max(top, mean[i])
    if n == 1 or cv <= 0.0:
        return top, (top * cv) ** 2
    low, high = top * (1.0 - 6.0 * cv), top * (1.0 + 7.0 * cv)
    step, last = (high - low) / (QUADRATURE_NODES - 1), CDF_ROWS - 1.0
    per_sd = last / (2.0 * CDF_RANGE)  # knots
    below, part, cell = room
    for k in range(QUADRATURE_NODES):
        below[k] = 1.0
    for i in range(n):
        slope = per_sd / (mean[i] * cv)
        for k in range(QUADRATURE_NODES):  # without a branch or a look-up: vector operations
            at = (low + np.float64(np.int32(k)) * step - mean[i]) * slope + CDF_RANGE * per_sd
            at = at if at > 0.0 else 0.0
            at = at if at < last else last
            cell[k] = np.int32(at)
            part[k] = at - cell[k]
        for k in range(QUADRATURE_NODES):
            j, so_far = np.uint64(cell[k]), below[k]
            one = cdf[j, 0] + part[k] * cdf[j, 1]
            below[k] = so_far if so_far < 1e-12 else so_far * one
    first, second = 0.0, 0.0
    for k in range(QUADRATURE_NODES):
        t = low + k * step
        weight = 0.5 * step if k == 0 or k == QUADRATURE_NODES - 1 else step
        first += weight * (1.0 - below[k])
        second += weight * 2.0 * (t - low) * (1.0 - below[k])
    second += step * step / 6.0  # Euler-Maclaurin: the integrand's slope at `low` is 2, not 0
    later, variance = low + first - top, max(0.0, second - first * first)
    return top + stretch[0] * later, stretch[1] * variance


@jit
def _group_max(mean, cv, cdf, stretch, room):
    return _largest(mean, mean.shape[0], cv, cdf, stretch, room)


def group_max(mean: Array, cv: float, cdf: Array, stretch: Array = PLAIN) -> tuple[float, float]:
    """Mean and variance of the maximum of independent times mean[i] * (1 + cv * z_i).

    cdf[knot, 2] is that of z, see `cdf_cells`, `stretch` that of `Lowering`: nodes are two thirds
    of a standard deviation apart, and none is beyond the seventh.
    """
    mean_s, variance = _group_max(mean, cv, cdf, stretch, room_for_nodes())
    return mean_s, variance


@inlined
def lower_block(low, x, chosen, room, coef_a, coef_r):
    """Lower kernels to ops: coef_a[row, coef, term] seconds, coef_r[row, coef].

    A row is the replica chosen[row], whose GPUs are as slow as x[loading, gpu] says. coef_r scales
    the op's residual table, so that its standard deviation is that of the sum of maxima over the
    group (x known) together with the call effect.
    """
    n_coefs, n_terms = low.call_cv.shape
    n_segments, n_loadings = low.seg_mean.shape
    member, (n_stages, n_members) = low.member, low.member.shape[1:]
    means, term, moments, stamp, nodes = room
    for s in range(n_segments):
        stamp[s] = -1
    for i in range(chosen.shape[0]):
        replica = chosen[i]
        row = replica % low.fixed_mean.shape[0]
        for c in range(n_coefs):
            stage, who = low.coef_stage[c], low.coef_member[c]
            for t in range(n_terms):
                term[t] = low.fixed_mean[row, c, t]
            var = low.fixed_var[row, c]
            first, n = (who, 1) if who >= 0 else (0, n_members)
            group = (replica * n_stages + stage) * (n_members + 1) + who + 1
            for e in range(low.coef_seg_ptr[c], low.coef_seg_ptr[c + 1]):
                s = low.coef_seg[e]
                if stamp[s] != group:  # ops of a group have segments in common
                    stamp[s] = group
                    mean, is_new = means[s], False
                    for k in range(means.shape[1]):
                        one = 0.0
                        for j in range(n_loadings if k < n else 0):
                            one += low.seg_mean[s, j] * x[j, member[replica, stage, first + k]]
                        is_new |= mean[k] != one
                        mean[k] = one
                    if is_new:  # not where all groups are as slow as each other
                        cdf, stretch = low.cdf[low.seg_cdf[s]], low.seg_stretch[s]
                        found = _largest(mean, n, low.seg_cv[s], cdf, stretch, nodes)
                        moments[s, 0], moments[s, 1] = found
                m, v = moments[s, 0], moments[s, 1]
                for t in range(n_terms):
                    term[t] += low.coef_count[e] * m * low.quiet[c] * low.coef_split[e, t]
                var += low.coef_count[e] * v * low.quiet[c] ** 2
            total = called = 0.0
            for t in range(n_terms):
                total += term[t]
                called += low.call_cv[c, t] * term[t]  # one draw for all terms of the op
                coef_a[i, c, t] = term[t]
            var += called**2
            coef_r[i, c] = 0.0
            if total > 0.0 and low.table_std[c] > 0.0:
                coef_r[i, c] = math.sqrt(var) / (total * low.table_std[c])


@jit
def lower_replicas(low, x, chosen, room, coef_a, coef_r):
    """`lower_block` of several cluster draws: x[block, loading, gpu], coef_a[block, row, ...]."""
    for i in range(x.shape[0]):
        lower_block(low, x[i], chosen, room, coef_a[i], coef_r[i])
