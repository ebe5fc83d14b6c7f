"""Variance components: formulas, known truth, missing cells, lemons, real traces."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from campaign import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from prism import PrismError
from prism.models.variance.components import Column, fit_components
from prism.models.variance.draws import interval, pivotal_means, pivotal_products
from prism.models.variance.estimates import step_memory
from prism.models.variance.factors import split_factor
from prism.models.variance.lemons import difference_quantile
from prism.models.variance.strata import _two_way
from prism.models.variance.strata import decompose as take_cells_apart

DATA = Path(os.environ.get("PRISM_DATA", Path(__file__).parents[2] / "shared" / "data"))
FEW = 50  # draws behind intervals, where nobody looks at these
NAMES = ("rank", "step", "rank_step", "content", "residual")


def columns_of(n_stages):
    return [Column(kind, stage) for kind in ("forward", "backward") for stage in range(n_stages)]


def decompose(table):
    return take_cells_apart(table, np.isfinite(table).all(axis=0))


def make_table(
    rng, n_stages=2, n_replicas=4, n_steps=12, n_microbatches=8, rank=0.005, step=0.01,
    rank_step=0.004, content=0.015, residual=0.005,
):  # fmt: skip
    """Table of known components; backward has 1.5 times the forward's shared effects."""
    n_columns = 2 * n_stages
    loading = np.repeat([1.0, 1.5], n_stages)[:, None, None, None]
    shape = (n_replicas, n_steps, n_microbatches)
    table = residual * rng.standard_normal((n_columns, *shape))
    table += content * loading * rng.standard_normal(shape)
    table += rank_step * loading * rng.standard_normal((*shape[:2], 1))
    table += step * loading * rng.standard_normal((n_steps, 1))
    table += rank * rng.standard_normal((n_columns, n_replicas, 1, 1))
    return table - 2.0


TRUTH = {
    "forward": {"rank": 0.005, "step": 0.01, "rank_step": 0.004, "content": 0.015},
    "backward": {"rank": 0.005, "step": 0.015, "rank_step": 0.006, "content": 0.0225},
}


def test_mean_products_are_the_plain_sums():
    rng = np.random.default_rng(1)
    y = rng.standard_normal((2, 3, 4, 5))
    found = decompose(y)
    n_r, n_t, n_m = 3, 4, 5
    triples = list(itertools.product(range(n_r), range(n_t), range(n_m)))

    def mean(j, r=None, t=None, m=None):
        picked = [
            y[j, a, b, c]
            for a, b, c in triples
            if (r is None or a == r) and (t is None or b == t) and (m is None or c == m)
        ]
        return sum(picked) / len(picked)

    for j, k in itertools.product(range(2), range(2)):
        rest = cell = step = 0.0
        for r, t, m in triples:
            part = [y[i, r, t, m] - mean(i, r, t) - mean(i, m=m) + mean(i) for i in (j, k)]
            rest += part[0] * part[1]
        for r, t in itertools.product(range(n_r), range(n_t)):
            part = [mean(i, r, t) - mean(i, r) - mean(i, t=t) + mean(i) for i in (j, k)]
            cell += part[0] * part[1]
        for t in range(n_t):
            step += (mean(j, t=t) - mean(j)) * (mean(k, t=t) - mean(k))
        assert found.rest_products[j, k] == pytest.approx(rest / ((n_r * n_t - 1) * (n_m - 1)))
        assert found.cell_products[j, k] == pytest.approx(cell / ((n_r - 1) * (n_t - 1)))
        assert found.step_products[j, k] == pytest.approx(step / (n_t - 1))
    assert found.position[0, 3] == pytest.approx(mean(0, m=3) - mean(0))


def test_components_are_the_expected_mean_squares():
    table = make_table(np.random.default_rng(2))
    fit, strata = fit_components(table, columns_of(2), np.arange(12) * 9), decompose(table)
    assert fit.step_correlation_steps is None
    rest, cell = np.diag(strata.rest_products), np.diag(strata.cell_products)
    step = np.diag(strata.step_products)
    assert fit.rank_step.std**2 == pytest.approx(cell - rest / 8)
    assert fit.step.std**2 == pytest.approx(step - cell / 4)
    level = table.mean(axis=(2, 3))
    rank = (level.var(axis=1, ddof=1) - cell / 12).reshape(2, 2).mean(axis=1)
    assert [x["rank"].std ** 2 for x in fit.by_op_kind.values()] == pytest.approx(rank)
    assert fit.content.std**2 + fit.residual_std**2 == pytest.approx(rest)
    for effect in (fit.step, fit.rank_step, fit.content):
        assert np.abs(effect.loadings) * effect.scale == pytest.approx(effect.std)
        assert np.mean(effect.scores**2) == pytest.approx(1.0)


def test_least_squares_with_missing_cells_are_those_of_the_design_matrix():
    rng = np.random.default_rng(4)
    table = rng.standard_normal((1, 3, 5, 4))
    table[0, 1, 2] = np.nan  # a worker left this step out
    table[0, :, 3, 2:] = np.nan  # a step with fewer microbatches
    table[0, 0, 0, 1] = np.nan
    found = decompose(table)
    index = np.argwhere(np.isfinite(table[0]))
    values = table[0][tuple(index.T)]
    design = np.zeros((len(values), 15 + 4))
    design[np.arange(len(values)), index[:, 0] * 5 + index[:, 1]] = 1.0
    design[np.arange(len(values)), 15 + index[:, 2]] = 1.0
    fitted = design @ np.linalg.lstsq(design, values, rcond=None)[0]
    assert found.rest[0][tuple(index.T)] == pytest.approx(values - fitted, abs=1e-12)
    assert found.rest_df == len(values) - np.linalg.matrix_rank(design)


def test_workers_and_steps_with_missing_cells_are_those_of_the_design_matrix():
    rng = np.random.default_rng(4)
    cell, used = rng.standard_normal((1, 3, 5)), np.ones((3, 5), dtype=bool)
    used[1, 2] = used[0, 4] = False
    step, rest, df, per_step = _two_way(cell, used)
    index, values = np.argwhere(used), cell[0][used]
    design = np.concatenate([np.eye(3)[index[:, 0]], np.eye(5)[index[:, 1]]], axis=1)
    solution = np.linalg.lstsq(design, values, rcond=None)[0]
    assert rest[0][used] == pytest.approx(values - design @ solution, abs=1e-12)
    assert step[0] == pytest.approx(solution[3:] - solution[3:].mean(), abs=1e-12)
    assert df == len(values) - 7
    noise = np.linalg.pinv(design.T @ design)[3:, 3:]
    assert per_step == pytest.approx((np.trace(noise) - noise.sum() / 5) / 4)


@pytest.mark.parametrize("kind", ["cells", "worker-steps", "short steps"])
def test_missing_cells_leave_components_where_they_are(kind):
    rng = np.random.default_rng(5)
    errors = {name: [] for name in NAMES}
    for _ in range(12):
        table = make_table(rng, n_steps=24)
        whole = fit_components(table, columns_of(2), np.arange(24) * 9, FEW)
        gaps = table.copy()
        if kind == "cells":
            gaps[rng.random(table.shape) < 0.05] = np.nan
        elif kind == "worker-steps":
            gaps[:, rng.random(table.shape[1:3]) < 0.08] = np.nan
        else:
            gaps[:, :, ::3, 5:] = np.nan
        fit = fit_components(gaps, columns_of(2), np.arange(24) * 9, FEW)
        assert any("missing" in warning for warning in fit.warnings)
        for name in NAMES:
            a, b = fit.by_op_kind["forward"][name].std, whole.by_op_kind["forward"][name].std
            errors[name].append((a - b) / TRUTH["forward"].get(name, 0.005))
    for name in NAMES:  # single tables scatter, no bias stays
        assert abs(np.mean(errors[name])) < 0.06, name
        assert np.max(np.abs(errors[name])) < 0.4, name


def coverage(estimates):
    """Share of (std, lo, hi, truth) whose interval holds the truth."""
    return float(np.mean([lo <= true <= hi for lo, hi, true in estimates]))


def test_intervals_cover_and_wrong_degrees_of_freedom_do_not():
    rng = np.random.default_rng(6)
    found = {name: [] for name in NAMES}
    naive, n = [], examples(45)
    for _ in range(n):
        table = make_table(rng, n_replicas=3, n_steps=8, n_microbatches=6)
        fit = fit_components(table, columns_of(2), np.arange(8) * 9)
        for kind, truth in TRUTH.items():
            for name in NAMES:
                spread = fit.by_op_kind[kind][name]
                found[name].append((spread.lo, spread.hi, truth.get(name, 0.005)))
        # all columns show one draw per step: columns x (steps - 1) would be 4 x 7, not 7
        low, high = np.sqrt(fit.step.std[0] ** 2 * 28.0 / chi2.ppf([0.95, 0.05], 28.0))
        naive.append((low, high, 0.01))
    for name in NAMES:  # 90 %, and what chance makes of it
        error = np.sqrt(0.09 / n)
        assert -2.2 * error <= coverage(found[name]) - 0.9 <= 1.9 * error, name
    assert coverage(naive) < 0.75


def test_without_the_rank_stratum_other_components_swell():
    rng = np.random.default_rng(7)
    table = make_table(rng, rank=0.03)
    pooled = table.copy()
    for t in range(table.shape[2]):  # workers that cannot be told apart: labels of each step mixed
        pooled[:, :, t] = table[:, rng.permutation(4), t]
    kept = fit_components(table, columns_of(2), np.arange(12)).by_op_kind["forward"]
    lost = fit_components(pooled, columns_of(2), np.arange(12)).by_op_kind["forward"]
    assert kept["rank_step"].hi < 0.01 < 0.02 < lost["rank_step"].std
    assert lost["rank"].lo == 0.0 < 0.015 < kept["rank"].lo


@pytest.mark.parametrize(
    ("n_stages", "n_replicas", "slow"), [(4, 4, 2.4), (2, 2, 2.4), (4, 2, 1.5), (2, 32, 1.1)]
)
def test_a_slow_worker_is_found_and_kept_out_of_the_body(n_stages, n_replicas, slow):
    rng = np.random.default_rng(8)
    table = make_table(rng, n_stages, n_replicas)
    healthy = fit_components(table, columns_of(n_stages), np.arange(12))
    table[[1, n_stages + 1], 1] += np.log(slow)
    fit = fit_components(table, columns_of(n_stages), np.arange(12))
    assert [(lemon.stage, lemon.replica) for lemon in fit.lemons] == [(1, 1)]
    assert fit.lemons[0].slowdown == pytest.approx({"forward": slow, "backward": slow}, rel=0.03)
    assert fit.rank[1, 1] == pytest.approx(np.log(slow), abs=0.03)
    assert fit.mean == pytest.approx(healthy.mean, abs=0.01)
    assert fit.by_op_kind["forward"]["rank"].std < 0.015
    # its replica is left out of the other strata, or all of it kept where too few are left
    rest = np.delete(table, 1, axis=1) if n_replicas > 2 else table
    others = fit_components(rest, columns_of(n_stages), np.arange(12))
    assert fit.step.std == pytest.approx(others.step.std)
    assert fit.content.std == pytest.approx(others.content.std)


def test_a_worker_slow_in_one_kind_only_is_a_lemon_of_that_kind():
    table = make_table(np.random.default_rng(8), 4, 2)
    table[0, 0] += np.log(2.4)
    fit = fit_components(table, columns_of(4), np.arange(12))
    assert [(lemon.stage, lemon.replica) for lemon in fit.lemons] == [(0, 0)]
    assert fit.lemons[0].slowdown == pytest.approx({"forward": 2.4, "backward": 1.0}, rel=0.03)
    assert fit.mean == pytest.approx(-2.0, abs=0.05)


def test_a_lemon_held_up_for_a_fixed_time_does_not_dilute_the_others():
    """Its content is a smaller share of its time, which is no property of the body."""
    table = make_table(np.random.default_rng(8), 2, 4, 40)
    table[[1, 3], 1] = np.log(np.exp(table[[1, 3], 1]) + 0.3)
    fit = fit_components(table, columns_of(2), np.arange(40))
    assert [(lemon.stage, lemon.replica) for lemon in fit.lemons] == [(1, 1)]
    assert fit.by_op_kind["forward"]["residual"].std == pytest.approx(0.005, rel=0.05)


def test_a_worker_hardly_slower_is_no_lemon_however_alike_the_others_are():
    rng = np.random.default_rng(18)
    for slow, n_lemons in ((1.02, 0), (1.05, 1)):
        table = make_table(rng, 2, 32, rank=0.0005, rank_step=0.0, content=0.002)
        table[[0, 2], 3] += np.log(slow)
        assert len(fit_components(table, columns_of(2), np.arange(12)).lemons) == n_lemons


def test_a_healthy_cluster_has_no_lemons():
    rng = np.random.default_rng(9)
    for n_stages, n_replicas in ((2, 2), (4, 4), (2, 32)):
        for _ in range(examples(8)):
            table = make_table(rng, n_stages, n_replicas, n_steps=4, n_microbatches=4)
            assert not fit_components(table, columns_of(n_stages), np.arange(4), FEW).lemons


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10_000),
    shift=st.floats(-20.0, 5.0),
    missing=st.booleans(),
)
def test_a_shift_moves_the_mean_only_and_labels_do_not_matter(seed, shift, missing):
    rng = np.random.default_rng(seed)
    table = make_table(rng, n_replicas=3, n_steps=5, n_microbatches=4)
    if missing:
        table[rng.random(table.shape) < 0.05] = np.nan
    order = rng.permutation(3)
    steps = np.array([1, 4, 5, 9, 20])
    fit = fit_components(table, columns_of(2), steps, FEW)
    moved = fit_components(table + shift, columns_of(2), steps, FEW)
    mixed = fit_components(table[:, order], columns_of(2), steps, FEW)
    assert moved.mean == pytest.approx(fit.mean + shift)
    assert mixed.mean == pytest.approx(fit.mean)
    assert moved.rank == pytest.approx(fit.rank, abs=1e-8)
    assert mixed.rank == pytest.approx(fit.rank[:, order], abs=1e-8)
    for other in (moved, mixed):
        assert other.residual_std == pytest.approx(fit.residual_std, rel=1e-6, abs=1e-9)
        for name in ("step", "rank_step", "content"):
            a, b = getattr(other, name), getattr(fit, name)
            assert a.std == pytest.approx(b.std, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("rank_step", [0.0, 0.05])
def test_content_keeps_the_sharp_ends_of_its_distribution(rank_step):
    """Two lengths of work, 4 to a step: centring by the step's mean alone would smear them."""
    rng = np.random.default_rng(3)
    long = rng.random((8, 40, 4)) < 0.15
    y = np.stack([0.3 * loading * long for loading in (1.0, 1.4, 0.8, 1.2)])
    y = y + 0.004 * rng.standard_normal(y.shape) + rank_step * rng.standard_normal((8, 40, 1))
    fit = fit_components(y, columns_of(2), np.arange(40))
    score = fit.content.scores
    truth = (long - long.mean()) / long.std()
    # sharp where workers and steps differ by chance alone; else as far as content can be told
    assert np.std(score - truth) < (0.06 if rank_step == 0.0 else 0.45)
    smeared = long - long.mean(axis=2, keepdims=True)
    assert np.std(smeared / smeared.std() - truth) > 0.4
    assert np.nanstd(fit.residual) == pytest.approx(1.0)


def test_workers_slow_in_turn_keep_their_own_variance():
    rng = np.random.default_rng(6)
    n_steps, turn = 60, 0.1
    draw = turn * rng.standard_normal((n_steps, 1))
    table = 0.02 * rng.standard_normal((4, 2, n_steps, 4))
    table[:, 0] += draw  # one worker's delay is the other's gain
    table[:, 1] -= draw
    fit = fit_components(table, columns_of(2), np.arange(n_steps))
    assert not fit.step.std.any()
    assert fit.rank_step.std == pytest.approx(turn, rel=0.2)  # 1.41 of it with the step cut at 0
    table[:, 1] += 2.0 * draw  # slow together: nothing is pooled
    fit = fit_components(table, columns_of(2), np.arange(n_steps))
    assert fit.step.std == pytest.approx(turn, rel=0.2)
    assert fit.rank_step.std.max() < 0.2 * turn


@pytest.mark.parametrize("apart", [True, False])
def test_stages_that_drift_apart_are_told_from_replicas_that_drift(apart):
    rng = np.random.default_rng(5)
    drift = 0.02 * rng.standard_normal((3 if apart else 1, 4, 30, 1))
    drift = np.tile(np.broadcast_to(drift, (3, 4, 30, 1)), (2, 1, 1, 1))
    y = drift + 0.01 * rng.standard_normal((6, 4, 30, 8))
    fit = fit_components(y, columns_of(3), np.arange(30))
    assert fit.rank_step_apart == apart
    assert fit.rank_step.std == pytest.approx(0.02, rel=0.25)


def test_missing_cells_leave_a_small_residual_beside_a_large_content():
    """Products of other cells for each pair of columns would differ by more than the residual."""
    inside, n = 0, examples(25)
    for seed in range(n):
        rng = np.random.default_rng(seed)
        y = make_table(rng, n_replicas=8, n_steps=20, n_microbatches=4, content=0.03)
        y[rng.random(y.shape) < 0.02] = np.nan
        spread = fit_components(y, columns_of(2), np.arange(20)).by_op_kind["forward"]["residual"]
        inside += spread.lo <= 0.005 <= spread.hi
    # 3 standard errors below 90 %; 0.30 by pairs of columns
    assert inside / n > 0.9 - 3.0 * np.sqrt(0.09 / n)


def test_one_microbatch_is_not_counted_twice():
    rng = np.random.default_rng(4)
    y = rng.standard_normal((4, 6, 30, 1)) * 0.01
    scores = fit_components(y, columns_of(2), np.arange(30)).content.scores
    assert scores.std() == pytest.approx(1.0) and abs(scores.mean()) < 1e-9


def test_positions_are_shrunk_by_their_noise():
    rng = np.random.default_rng(10)
    table = make_table(rng)
    table[:2, :, :, 0] -= 0.012
    fit = fit_components(table, columns_of(2), np.arange(12))
    assert np.all(fit.position[:2, 0] < -0.006)
    true = 0.012 * np.sqrt(7.0) / 8.0
    assert fit.by_op_kind["forward"]["position"].std == pytest.approx(true, rel=0.25)
    assert (
        fit.by_op_kind["forward"]["position"].lo < true < fit.by_op_kind["forward"]["position"].hi
    )
    squares = []
    for _ in range(examples(15)):
        table = make_table(rng)
        seen = table.mean(axis=(1, 2)) - table.mean(axis=(1, 2, 3))[:, None]
        none = fit_components(table, columns_of(2), np.arange(12), FEW)
        squares.append(np.mean(none.position**2) / np.mean(seen**2))
    assert np.mean(squares) < 0.15


def test_memory_over_gapped_steps_is_found_and_white_scores_have_none():
    rng = np.random.default_rng(11)
    steps = np.sort(rng.choice(1200, 44, replace=False))
    distance = np.abs(steps[:, None] - steps[None, :])
    root = np.linalg.cholesky(np.exp(-distance / 100.0))
    found = [step_memory(root @ rng.standard_normal(44), steps, rng) for _ in range(examples(30))]
    memories = [memory for memory in found if memory is not None]
    known = [memory.steps for memory in memories]
    assert len(known) > 0.8 * len(found)
    assert 50.0 < np.median(known) < 200.0
    low, high = np.array([interval(memory.draws) for memory in memories]).T
    assert np.all(high / low > chi2.ppf(0.95, 43) / chi2.ppf(0.05, 43))  # of white scores
    n = examples(100)
    white = [step_memory(rng.standard_normal(44), steps, rng) is not None for _ in range(n)]
    assert np.mean(white) < 0.05 + 5.0 * np.sqrt(0.05 * 0.95 / n)


def test_a_step_with_memory_says_so_and_one_without_has_none():
    rng = np.random.default_rng(12)
    steps = np.arange(40) * 5
    slow = np.convolve(rng.standard_normal(55), np.ones(16) / 4.0, mode="valid")
    table = make_table(rng, n_steps=40, step=0.0) + 0.02 * slow[:, None]
    fit = fit_components(table, columns_of(2), steps)
    assert fit.step_correlation_steps > 10.0
    white = fit_components(make_table(rng, n_steps=40), columns_of(2), steps)
    assert white.step_correlation_steps is None


def test_the_factor_is_found_with_its_loadings_and_a_heywood_case_is_guarded():
    loadings, own = np.array([1.0, -0.8, 1.5, 1.2]), np.array([0.2, 0.3, 0.1, 0.4])
    found, left = split_factor(np.outer(loadings, loadings) + np.diag(own), 1e6, np.sign(loadings))
    assert found == pytest.approx(loadings, rel=1e-5)
    assert left == pytest.approx(own, rel=1e-4)
    heywood = np.array([[1.0, 0.9, 0.9], [0.9, 1.0, 0.5], [0.9, 0.5, 1.0]])
    _, left = split_factor(heywood, 200.0, np.ones(3))
    assert np.all(left > 0.0)


def test_few_data_give_equal_shares_and_two_columns_always():
    two = np.array([[1.0, 1.2], [1.2, 4.0]])  # correlation 0.6
    found, _ = split_factor(two, 100.0, np.ones(2))
    assert found**2 == pytest.approx([0.6, 2.4], rel=1e-5)
    three = np.array([[1.0, 0.5, 0.5], [0.5, 1.0, 0.1], [0.5, 0.1, 1.0]])
    few, many = (split_factor(three, df, np.ones(3))[0] for df in (4.0, 1e4))
    assert np.ptp(few) < 0.5 * np.ptp(many)


def test_draws_of_products_cover_variances_and_their_factor():
    rng = np.random.default_rng(14)
    loadings, own = np.array([1.0, 0.8, 1.5, 1.2]), np.array([0.2, 0.3, 0.4, 0.4])
    root = np.linalg.cholesky(np.outer(loadings, loadings) + np.diag(own))
    inside, n = [], examples(100)
    for _ in range(n):
        x = rng.standard_normal((40, 4)) @ root.T
        draws = pivotal_products(x.T @ x / 40, 40.0, rng, 300)
        shared, left = split_factor(draws, 40.0, np.ones(4))
        total = np.diagonal(draws, axis1=1, axis2=2)
        for values, true in (
            (total, loadings**2 + own), (shared**2, loadings**2), (left, own)
        ):  # fmt: skip
            low, high = interval(values)
            inside.append((low <= true) & (true <= high))
    shares = np.mean(np.reshape(inside, (n, 3, 4)), axis=(0, 2))
    assert shares == pytest.approx(0.9, abs=0.05)


def test_draws_of_a_mean_know_whether_columns_move_together():
    rng = np.random.default_rng(15)
    mean = np.full((1, 8), 1.0 / 8.0)
    together = pivotal_means(np.ones((8, 8)), 40.0, mean, rng)
    apart = pivotal_means(np.eye(8), 40.0, mean, rng)
    for draws, df in ((together, 40.0), (apart, 320.0)):
        expected = df / chi2.ppf([0.95, 0.05], df)
        assert np.ravel(interval(draws)) == pytest.approx(expected, rel=0.05)


def test_difference_of_mean_squares_covers():
    rng = np.random.default_rng(16)
    for n1, n2, component in ((7, 21, 0.2), (3, 129, 1.0), (1, 7, 1.0), (7, 21, 0.0)):
        lower = rng.chisquare(n2, 2000) / n2
        upper = (1.0 + component) * rng.chisquare(n1, 2000) / n1
        one = np.ones((1, 1))
        drawn = upper * pivotal_means(one, n1, one, rng) - lower * pivotal_means(one, n2, one, rng)
        low, high = interval(drawn)
        inside = np.mean((low <= component) & (component <= high))
        assert abs(inside - (0.9 if component else 0.95)) < 0.025


def test_what_one_replica_or_one_microbatch_cannot_tell_is_said():
    rng = np.random.default_rng(17)
    one = fit_components(make_table(rng, n_replicas=1), columns_of(2), np.arange(12))
    assert any("one dp replica" in warning for warning in one.warnings)
    assert np.isnan(one.by_op_kind["forward"]["rank"].lo)
    assert np.isnan(one.by_op_kind["forward"]["rank_step"].lo)
    assert not one.rank_step.std.any()
    assert one.by_op_kind["forward"]["step"].std > 0.003
    few = fit_components(make_table(rng, n_microbatches=1), columns_of(2), np.arange(12))
    assert any("one microbatch" in warning for warning in few.warnings)
    assert few.by_op_kind["forward"]["content"].std == pytest.approx(0.0155, rel=0.4)
    single = fit_components(make_table(rng)[:1], columns_of(2)[:1], np.arange(12))
    assert any("columns" in warning for warning in single.warnings)
    assert not single.content.std.any()


def test_a_constant_table_has_no_components():
    fit = fit_components(np.full((4, 3, 5, 4), -1.0), columns_of(2), np.arange(5))
    assert fit.mean == pytest.approx(-1.0)
    assert not any(spread.std for kind in fit.by_op_kind.values() for spread in kind.values())


def test_tables_too_small_are_refused_with_a_way_out():
    with pytest.raises(PrismError, match=r"found 1 step,.*longer trace"):
        fit_components(np.zeros((4, 3, 1, 4)), columns_of(2), np.arange(1))
    table = np.zeros((4, 3, 5, 4))
    table[1] = np.nan
    with pytest.raises(PrismError, match="forward on stage 1"):
        fit_components(table, columns_of(2), np.arange(5))
    with pytest.raises(ValueError, match="is not"):
        fit_components(np.zeros((3, 3, 5, 4)), columns_of(2), np.arange(5))
    with pytest.raises(ValueError, match="infinite"):
        fit_components(np.full((4, 3, 5, 4), -np.inf), columns_of(2), np.arange(5))


def read_table(name):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    path = DATA / "production_traces" / f"ops_{name}.parquet"
    if not path.exists():
        pytest.skip(f"needs {path.name} in PRISM_DATA or ../shared/data")
    ops = pandas.read_parquet(path)
    ops = ops[ops.optype.isin(["forward-compute", "backward-compute"])]
    steps = np.array(sorted(ops.step.unique()))
    n_stages = ops.stage.max() + 1
    column = ops.stage + n_stages * (ops.optype == "backward-compute")
    shape = (2 * n_stages, ops.dp_rank.max() + 1, steps.size, ops.mb_id.max() + 1)
    table = np.full(shape, np.nan)
    table[column, ops.dp_rank, np.searchsorted(steps, ops.step), ops.mb_id] = np.log(ops.duration)
    return table, columns_of(n_stages), steps


@pytest.mark.parametrize(
    ("name", "lemons", "percent"),
    [
        (
            "AR",
            [(0, 0)],
            {"step": (0.56, 0.93), "rank_step": (0.17, 0.34), "content": (1.37, 2.08)},
        ),
        ("ST", [], {"step": (2.10, 2.23), "rank_step": (0.0, 0.0), "content": (1.16, 1.43)}),
        ("SE_first21", [], {"content": (18.4, 28.5), "rank_step": (1.5, 2.6)}),
    ],
)  # fmt: skip
def test_production_traces_have_the_published_components(name, lemons, percent):
    table, columns, steps = read_table(name)
    fit = fit_components(table, columns, steps)
    assert [lemon[:2] for lemon in fit.lemons] == lemons
    strata = decompose(table)
    steps_show = np.diag(strata.step_products - strata.per_step * strata.cell_products)
    for component, pair in percent.items():
        for kind, value in zip(("forward", "backward"), pair, strict=True):
            std = fit.by_op_kind[kind][component].std
            if component == "step":  # published: what these steps show, no memory
                half = np.split(steps_show, 2)[kind == "backward"]
                std = np.sqrt(half.mean())
            assert 100.0 * std == pytest.approx(value, rel=0.2, abs=0.06), (component, kind)
    scores = fit.residual[np.isfinite(fit.residual)]
    healthy = len({replica for replica in range(table.shape[1])} - {x.replica for x in fit.lemons})
    assert scores.size == np.isfinite(table).sum() * healthy / table.shape[1]
    assert scores.std() == pytest.approx(1.0)


def test_quantiles_of_differences_are_those_of_all_pairs():
    rng = np.random.default_rng(1)
    for _ in range(200):
        sizes, digits = rng.integers(0, 12, rng.integers(1, 4)), int(rng.integers(0, 16))
        rows = [rng.normal(size=n).round(digits) for n in sizes]
        pairs = [np.abs(x[:, None] - x)[np.triu_indices(x.size, 1)] for x in rows]
        found = difference_quantile(rows, 0.25)
        if not (every := np.concatenate(pairs)).size:
            assert found is None
            continue
        expected = np.quantile(every, 0.25, method="lower")
        assert found == pytest.approx(expected, rel=1e-12, abs=4e-16)
    many = rng.normal(size=100_000)  # 40 GB as pairs; of two normals, sqrt(2) times 0.3186
    assert difference_quantile([many], 0.25) == pytest.approx(2.0**0.5 * 0.31864, rel=0.01)
