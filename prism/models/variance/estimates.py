"""Estimates of one component after the other from the strata of a crossed table, and their draws.

What remains when the strata below are subtracted is the component; draws are subtracted alike. A
step that comes out negative is pooled into the stratum below; other negative estimates are cut at
zero.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prism.common.arrays import Array, Flags, Index
from prism.common.means import finite_mean
from prism.models.variance.draws import (
    N_DRAWS,
    heavier,
    interval,
    pivotal_means,
    pivotal_products,
)
from prism.models.variance.effects import (
    Column,
    Component,
    EffectSpread,
    build_effect,
    content_scores,
    excess_kurtosis,
    make_component,
    share_of,
    standardise,
)
from prism.models.variance.factors import explained_share, leading_signs, split_factor
from prism.models.variance.strata import Strata

# ----------------------------------------------------------------- memory of the step effect

NOT_WHITE = 3.84
"""5 % point of chi-square with 1 degree of freedom. The length means nothing without the share,
so no chi-square is exact; white scores pass in 1 to 6 % of simulated tables (six layouts)."""
FEW = 8  # steps below which no memory is looked for
LONGEST = 0.5
"""Of the steps' span: a longer memory looks like a drift. With a third, intervals hold a true
variance in 65 % of the cases where the memory is that long; with all of it estimates are 26 % high
(300 simulated series of eight kinds)."""


class Memory(NamedTuple):
    """How step scores remember each other: ``share exp(-|distance| / steps)``, the rest white."""

    steps: float
    share: float
    variance: float  # marginal variance of the scores over their sample variance
    draws: Array  # [draw] of it: lengths and shares as likely as they are, a chi-square each


def step_memory(
    scores: Array, steps: Index, rng: np.random.Generator, n_draws: int = N_DRAWS
) -> Memory | None:
    """Correlation length of scores at gapped step numbers, by restricted likelihood.

    `scores` [step] scores. `steps` [step] step numbers, different from each other.
    """
    if scores.size < FEW or not np.ptp(scores) > 0.0:
        return None
    lengths, shares = _grid(steps)
    square, fit = _likelihood(scores, steps, lengths, shares)  # [share, length]
    n = scores.size
    sample = float(np.sum((scores - scores.mean()) ** 2))
    best = np.unravel_index(int(np.argmax(fit)), fit.shape)
    if fit[best] + (n - 1) * np.log(sample) + np.log(n) < NOT_WHITE:
        return None
    share, length = float(shares[best[0]]), float(lengths[best[1]])
    likely = np.exp(0.5 * (fit - fit[best])).ravel()
    cell = rng.choice(likely.size, n_draws, p=likely / likely.sum())
    drawn = square.ravel()[cell] / rng.chisquare(n - 1, n_draws)
    return Memory(length, share, float(square[best]) / sample, drawn * (n - 1) / sample)


def _grid(steps: Index) -> tuple[Array, Array]:
    """Lengths and shares among which the most likely is looked for."""
    number = np.sort(steps).astype(np.float64)
    gap, span = float(np.min(np.diff(number))), float(number[-1] - number[0])
    return np.geomspace(0.5 * gap, max(LONGEST * span, gap), 24), np.linspace(0.1, 1.0, 10)


def _likelihood(scores: Array, steps: Index, lengths: Array, shares: Array) -> tuple[Array, Array]:
    """Squares about the mean, and twice the log restricted likelihood, [share, length].

    By a Kalman filter, which has a memory in the form of an exponential for its state: time in
    proportion to the steps. The mean is that of generalised least squares: a series of ones goes
    through the same filter.
    """
    order = np.argsort(steps)
    share = shares[:, None]
    keep = np.exp(-np.diff(steps[order], prepend=steps[order[0]])[:, None] / lengths)
    shape = (shares.size, lengths.size)
    state, one = np.zeros(shape), np.zeros(shape)  # expected of the scores, of the ones
    open_ = np.broadcast_to(share, shape)  # variance of the state
    squares, crossed, told, log_det = np.zeros((4, *shape))
    for score, phi in zip(scores[order], keep, strict=True):
        state, one = phi * state, phi * one
        open_ = phi**2 * open_ + share * (1.0 - phi**2)
        variance = np.maximum(open_ + 1.0 - share, 1e-9)
        gain, miss, missed = open_ / variance, score - state, 1.0 - one
        state, one, open_ = state + gain * miss, one + gain * missed, open_ * (1.0 - gain)
        squares += miss**2 / variance
        crossed += miss * missed / variance
        told += missed**2 / variance
        log_det += np.log(variance)
    square = squares - crossed**2 / told
    return square, -(scores.size - 1) * np.log(square) - log_det - np.log(told)


class Parts(NamedTuple):
    """A component's variance [column], of which some may be negative, and draws of its means."""

    value: Array
    draws: Array  # [draw, op_kind]


class Estimates:
    """Components of one table."""

    def __init__(
        self, table: Array, columns: tuple[Column, ...], body: Flags, strata: Strata, n: int
    ) -> None:
        self.table, self.body, self.s, self.n = table, body, strata, n
        self.stages = np.array([c.stage for c in columns])
        self.kinds = list(dict.fromkeys(c.op_kind for c in columns))
        self.is_kind = np.array([[c.op_kind == kind for c in columns] for kind in self.kinds])
        self.means = self.is_kind / self.is_kind.sum(axis=1, keepdims=True)  # [op_kind, column]
        self.rng = np.random.Generator(np.random.Philox(0))
        self.rest = pivotal_products(strata.rest_products, strata.rest_df, self.rng, n)
        self.cell = pivotal_products(strata.cell_products, strata.cell_df, self.rng, n)

    def over_kinds(self, draws: Array) -> Array:
        """Mean of the diagonal of draws [draw, column, column] over each op_kind."""
        return np.asarray(np.diagonal(draws, axis1=1, axis2=2) @ self.means.T)

    def positions(self) -> tuple[Array, Parts]:
        """Estimate positions [column, microbatch], shrunk, and their mean square."""
        s = self.s
        noise = s.position_noise * np.diag(s.rest_products)
        square = np.mean(s.position**2, axis=1)
        value = np.maximum(square - noise, 0.0)
        error = np.sqrt((4.0 * value * noise + 2.0 * noise**2) / s.position.shape[1])
        z = self.rng.standard_normal((self.n, 1))  # columns move together
        parts = Parts(value, self.means @ value + self.means @ error * z)
        return s.position * share_of(value, square)[:, None], parts

    def rank_step(self, known: bool) -> tuple[Component, Parts, Array]:
        """Estimate what one worker and step have of their own; its covariance."""
        s = self.s
        covariance = s.cell_products - s.per_cell * s.rest_products
        draws = self.over_kinds(self.cell - s.per_cell * self.rest)
        raw = np.where(s.seen.any(axis=2), s.rank_step, np.nan)
        effect = build_effect("rank_step", covariance, raw, np.diag(s.cell_products))
        return effect, Parts(np.diag(covariance), draws if known else draws + np.nan), covariance

    def step(self, numbers: Index) -> tuple[Component, Parts, Array, Memory | None]:
        """Estimate what all workers have in a step; its share of what is seen; its memory."""
        s, seen = self.s, self.s.seen.any(axis=(0, 2))
        products, noise = s.step_products, s.per_step * s.cell_products
        total, raw = np.diag(products), np.where(seen, s.step, np.nan)
        draws = self.over_kinds(pivotal_products(products, s.step_df, self.rng, self.n))
        effect, memory = build_effect("step", products - noise, raw, total), None
        share = share_of(effect.std**2, total)
        if effect.scale > 0.0:
            memory = step_memory(effect.scores[seen], numbers[seen], self.rng, self.n)
        if memory is not None:
            draws = (self.means @ total) * memory.draws[:, None]
            products = products * memory.variance
            effect = build_effect("step", products - noise, raw, total)
            # white noise of the estimates is no part of the effect
            real = float(np.sum(effect.std**2) / np.trace(products))
            memory = memory._replace(share=min(1.0, memory.share / max(real, 0.1)))
        draws = draws - s.per_step * self.over_kinds(self.cell)
        return effect, Parts(np.diag(products - noise), draws), share, memory

    def ranks(self, position: Array) -> tuple[Array, Array, Parts]:
        """Estimate means of the body [column], ranks [column, replica] and their variance."""
        s, body = self.s, self.body
        rest = self.table - position[:, None, None, :] - s.step[:, None, :, None]
        level, n_body = finite_mean(rest, (2, 3)), body.sum(axis=1)
        mean = np.where(body, level, 0.0).sum(axis=1) / np.maximum(n_body, 1)
        raw = np.nan_to_num(level - mean[:, None])
        n_steps = np.isfinite(rest).any(axis=3).sum(axis=2)
        per_rank = float(np.mean(1.0 / n_steps[body]))
        noise = per_rank * s.cell_products
        df, inside = n_body - 1.0, np.where(body, raw, 0.0)
        root = np.sqrt(np.maximum(df, 1.0))
        products = inside @ inside.T / np.outer(root, root)
        value = np.where(df > 0.0, np.diag(products - noise), 0.0)
        draws = np.full((self.n, len(self.means)), np.nan)
        if (df > 0.0).all():
            # workers of all stages vary alike; between stages only the noise is shared
            square = np.diag(products)
            scale = np.sqrt(share_of(self.is_kind.T @ (self.means @ square), square))
            same = self.stages[:, None] == self.stages
            upper = np.where(same, products * np.outer(scale, scale), noise)
            draws = pivotal_means(upper, float(df.mean()), self.means, self.rng, self.n)
            draws = draws - per_rank * self.over_kinds(self.cell)
        spread = np.maximum(self.is_kind.T @ (self.means @ value), 0.0)
        shrunk = raw * share_of(spread, spread + np.diag(noise))[:, None]
        return mean, np.where(body, shrunk, raw), Parts(value, draws)

    def contents(self, cells: Array) -> tuple[Component, Parts, Array, Parts]:
        """Split what cells have left into content shared by all columns, and residuals.

        `cells` [column, replica, step, microbatch] what effects of more than a cell leave.
        """
        products, df = self.s.rest_products, self.s.rest_df
        signs = leading_signs(products)
        signed, own = split_factor(products, df, signs)
        scores = content_scores(signed, own, cells)
        left = cells - signed.reshape(-1, 1, 1, 1) * scores
        residual = np.stack([standardise(column) for column in left])
        drawn, drawn_own = split_factor(self.rest, df, signs)
        n = float(np.isfinite(scores).sum())
        wide = heavier(np.array([excess_kurtosis(scores)]), n, self.rng, self.n)
        content = Parts(signed**2, wide * drawn**2 @ self.means.T)
        wide = heavier(
            np.array([excess_kurtosis(column) for column in residual]), n, self.rng, self.n
        )
        effect = make_component("content", signed, scores, explained_share(products))
        return effect, content, residual, Parts(own, wide * drawn_own @ self.means.T)

    def spreads(self, parts: dict[str, Parts]) -> dict[str, dict[str, EffectSpread]]:
        """Tabulate standard deviations, limits and shares of every op_kind."""
        std = {n: np.sqrt(np.maximum(self.means @ p.value, 0.0)) for n, p in parts.items()}
        ends = {n: np.sqrt(interval(p.draws)) for n, p in parts.items()}
        total = sum((values**2 for values in std.values()), np.zeros(len(self.kinds)))
        out: dict[str, dict[str, EffectSpread]] = {}
        for k, kind in enumerate(self.kinds):
            out[kind] = {}
            for name in ("position", "rank", "step", "rank_step", "content", "residual"):
                share = float(share_of(std[name] ** 2, total)[k])
                low, high = ends[name][:, k]
                out[kind][name] = EffectSpread(float(std[name][k]), float(low), float(high), share)
        return out
