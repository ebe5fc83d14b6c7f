"""Attribution: shares of known models, agreement with SciPy and SALib, sums that are exact."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from prism.common import attribution as at

LANES = 64


def ishigami(x, a=7.0, b=0.1):
    """Three uniform inputs on [-pi, pi]: one alone, one alone, one only together with the first."""
    return np.sin(x[0]) + a * np.sin(x[1]) ** 2 + b * x[2] ** 4 * np.sin(x[0])


def samples(rng, clusters, d=3):
    return rng.uniform(-np.pi, np.pi, (d, clusters, LANES))


def swapped(x, y, i):
    out = x.copy()
    out[i] = y[i]
    return out


def pick_freeze(f, x, y, i):
    return at.PickFreeze(f(x), f(swapped(x, y, i)), f(y), f(swapped(y, x, i)))


def shares(f, x, y, i):
    first, total = at.partial_variances(pick_freeze(f, x, y, i))
    drawn = at.resample_runs(first.size, f(x), f(y), 1)
    return at.share_interval(first, drawn), at.share_interval(total, drawn)


def test_ishigami_function():
    """Against its closed form (Ishigami & Homma 1990)."""
    x, y = (samples(np.random.default_rng(s), 256) for s in (1, 2))
    a, b = 7.0, 0.1
    v1 = 0.5 * (1 + b * np.pi**4 / 5) ** 2
    v2, v13 = a**2 / 8, b**2 * np.pi**8 * (1 / 18 - 1 / 50)
    v = v1 + v2 + v13
    exact = [(v1 / v, (v1 + v13) / v), (v2 / v, v2 / v), (0.0, v13 / v)]
    for i, (first, total) in enumerate(exact):
        s1, st_ = shares(ishigami, x, y, i)
        assert abs(s1.value - first) < 2.5 * s1.half_width
        assert abs(st_.value - total) < 2.5 * st_.half_width
        assert st_.half_width < 0.03


def test_total_order_is_scipys():
    """Jansen's formula on (A, AB), as `scipy.stats.sobol_indices` has it, and again on (B, BA)."""
    x, y = (samples(np.random.default_rng(s), 64) for s in (3, 4))
    runs = [pick_freeze(ishigami, x, y, i) for i in range(3)]

    def scipy_total(a, b, ab):
        return stats.sobol_indices(
            func={"f_A": a.reshape(1, -1), "f_B": b.reshape(1, -1),
                  "f_AB": np.stack(ab).reshape(3, 1, -1)},
            n=a.size,
        )  # fmt: skip

    there = scipy_total(runs[0].a, runs[0].b, [r.ab for r in runs])
    back = scipy_total(runs[0].b, runs[0].a, [r.ba for r in runs])
    variance = np.concatenate([runs[0].a, runs[0].b]).var()
    mine = [at.partial_variances(r)[1].mean() / variance for r in runs]
    np.testing.assert_allclose(mine, 0.5 * (there.total_order + back.total_order), rtol=1e-6)
    first = [at.partial_variances(r)[0].mean() / variance for r in runs]
    np.testing.assert_allclose(first, there.first_order, atol=0.1)


def test_agreement_with_salib():
    """The same function through SALib's own samples and estimator."""
    sample = pytest.importorskip("SALib.sample.sobol", reason="oracle, in the dev extra")
    from SALib.analyze import sobol

    problem = {"num_vars": 3, "names": list("xyz"), "bounds": [[-np.pi, np.pi]] * 3}
    points = sample.sample(problem, 4096, calc_second_order=False, seed=1)
    oracle = sobol.analyze(problem, ishigami(points.T), calc_second_order=False, seed=1)
    x, y = (samples(np.random.default_rng(s), 256) for s in (5, 6))
    for i in range(3):
        first, total = shares(ishigami, x, y, i)
        assert abs(first.value - oracle["S1"][i]) < 2 * first.half_width + oracle["S1_conf"][i]
        assert abs(total.value - oracle["ST"][i]) < 2 * total.half_width + oracle["ST_conf"][i]


@pytest.mark.parametrize("law", [stats.norm(1.0, 0.02), stats.gamma(4.0, 1.0, 0.01)])
def test_matched_spread_leaves_means_and_mean_squares(law):
    rng = np.random.default_rng(8)
    drawn = [law.rvs((2000, LANES), random_state=rng) for _ in range(2)]
    a, b = at.match_spread(drawn, law.std())
    for new, old in zip((a, b), drawn, strict=True):
        np.testing.assert_allclose(new.mean(axis=1), old.mean(axis=1), rtol=1e-12)
        np.testing.assert_allclose(new.std(axis=1, ddof=1), law.std(), rtol=1e-12)
        assert np.abs(new - old).mean() < 0.2 * law.std()  # moved, not drawn anew
    centred = [x - x.mean(axis=1, keepdims=True) for x in (a, b)]
    np.testing.assert_allclose((centred[0] * centred[1]).sum(axis=1), 0.0, atol=1e-9 * law.var())
    error = {}
    for name, (x, y) in {"matched": (a, b), "drawn": drawn}.items():
        squares = ((x - y) ** 2).mean(axis=1)
        error[name] = squares.std() / squares.size**0.5
        assert abs(squares.mean() - 2.0 * law.var()) < 4.0 * error[name]
    assert error["matched"] < 0.2 * error["drawn"]


def test_draws_that_are_all_alike_stay():
    drawn = [np.full((2, LANES), 1.0), np.random.default_rng(1).normal(1.0, 0.1, (2, LANES))]
    np.testing.assert_array_equal(at.match_spread(drawn, 0.1)[0], drawn[0])
    assert np.isfinite(at.match_spread(drawn, 0.1)[1]).all()


def test_intervals_cover():
    """95 % intervals of a share hold it about that often, with the few clusters of a start too."""
    hits = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        x, y = (rng.standard_normal((2, 8, LANES)) for _ in range(2))
        _, total = shares(lambda z: z[0] + 0.5 * z[1], x, y, 1)
        hits += total.low <= 0.2 <= total.high
    assert 180 <= hits <= 200


def test_shared_by_cluster():
    """An input drawn once per cluster has an interval of clusters, not of lanes."""
    rng = np.random.default_rng(9)
    x, y = (
        np.stack([np.repeat(rng.standard_normal((16, 1)), LANES, 1), rng.standard_normal((16, 64))])
        for _ in range(2)
    )
    _, total = shares(lambda z: z[0] + z[1], x, y, 0)
    assert total.half_width > 0.15
    variance = at.cluster_variance(x.sum(axis=0))
    assert variance.within == pytest.approx(1.0, abs=0.2)
    assert variance.total == variance.within + variance.between


@given(hnp.arrays(np.float64, (4, 3, 5), elements=st.floats(-10, 10, allow_subnormal=False)))
def test_total_is_at_least_first(values):
    a, ab, b, ba = values
    first, total = at.partial_variances(at.PickFreeze(a, ab, b, ba))
    assert np.all(total >= first - 1e-9)


def test_an_input_without_effect_is_exactly_nothing():
    x, y = (samples(np.random.default_rng(s), 4) for s in (1, 2))
    first, total = shares(lambda z: z[0] + z[1], x, y, 2)
    assert (first.value, total.value, total.half_width) == (0.0, 0.0, 0.0)


def test_path_shares_sum_to_one():
    rng = np.random.default_rng(11)
    parts = rng.gamma(2.0, 1.0, (16, 5, LANES)) * np.arange(1.0, 6.0)[:, None]
    found = at.path_shares(parts)
    for values in (found.mean, found.covariance, found.tail):
        assert values.sum() == pytest.approx(1.0, abs=1e-14)
    np.testing.assert_allclose(found.covariance, np.arange(1, 6) ** 2 / 55, atol=0.06)
    for values, ci in ((found.covariance, found.covariance_ci), (found.tail, found.tail_ci)):
        assert np.all(ci[:, 0] <= values) and np.all(values <= ci[:, 1])


def test_intervals_of_tail_shares_cover():
    """Exponential parts of scales 1 and 2: the tail's share in closed form, by many repetitions."""
    rng = np.random.default_rng(12)
    scales = np.array([1.0, 2.0])[:, None]
    truth = at.path_shares(rng.exponential(1.0, (4000, 2, LANES)) * scales).tail[0]
    hits = 0
    for i in range(150):
        ci = at.path_shares(rng.exponential(1.0, (16, 2, LANES)) * scales, i).tail_ci[0]
        hits += ci[0] <= truth <= ci[1]
    assert 132 <= hits <= 150


def test_tail_ranks_differently():
    """A rare, long part has little of the variance and much of the tail."""
    rng = np.random.default_rng(12)
    body = rng.standard_normal((64, LANES)) * 1.0
    rare = np.where(rng.random((64, LANES)) < 0.02, 4.0, 0.0)
    found = at.path_shares(np.stack([body, rare], axis=1))
    assert found.tail[1] > found.covariance[1] + 0.1


def test_reduction_of_half():
    rng = np.random.default_rng(13)
    before = 10.0 + rng.standard_normal((16, LANES))
    found = at.reduction(before, 10.0 + 0.5 * (before - 10.0), 1)
    assert found["std"][1].value == pytest.approx(0.5)
    assert found["std"][1].half_width < 1e-9
    assert found["p95"][0] == pytest.approx(10.0 + 0.5 * (np.quantile(before, 0.95) - 10.0))


@pytest.mark.parametrize("shape", [(5, 7), (3, 1), (1, 40)])
def test_figures_of_resamples_are_those_of_clusters_laid_side_by_side(shape):
    rng = np.random.default_rng(14)
    run = 10.0 + rng.standard_normal(shape).round(1)  # some values are equal
    counts = rng.multinomial(shape[0], np.full(shape[0], 1.0 / shape[0]), 50)
    for times, found in zip(counts, at._compared(run, counts).T, strict=True):
        drawn = np.repeat(run, times, axis=0).ravel()
        quantiles = np.quantile(drawn, [0.5, 0.95, 0.99])
        expected = [drawn.mean(), drawn.std(ddof=1), *quantiles]
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-7)
