"""Laws against scipy, and the quantile tables against the laws."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from prism import PrismError
from prism.distributions.distribution import (
    Distribution,
    bounded_body,
    bounded_body_lemons,
    constant,
    empirical,
    gamma,
    lognormal,
    mixture,
    normal,
    quantile_table,
    uniform,
)
from prism.distributions.kerneltables import FitTerm, KernelFit, KernelTable, fit_kernel
from prism.distributions.library import load_library, save_library
from prism.distributions.ranges import check_kernels
from prism.distributions.samples import sorted_quantiles
from prism.distributions.tables import LEVELS, N_CELLS, sample_table, table_row

DISTRIBUTIONS: dict[str, Distribution] = {
    "lognormal": lognormal(0.02),
    "normal": normal(0.065),
    "gamma": gamma(0.05),
    "uniform": uniform(0.9, 1.1),
    "bounded_body": bounded_body(0.015, -0.15),
    "bounded_body_lemons": bounded_body_lemons(0.015, -0.15, 0.0075, 1.06, 1.2, 1.25),
    "mixture": mixture([0.97, 0.03], [lognormal(0.05), lognormal(0.05).times(2.0)]),
    "empirical": empirical(
        [0, 0.05, 0.5, 0.95, 0.99, 0.9999, 1], [0.9, 0.97, 1, 1.05, 1.2, 1.5, 3]
    ),
}
ORACLES = {
    "lognormal": stats.lognorm(
        s=math.sqrt(math.log1p(4e-4)), scale=math.exp(-0.5 * math.log1p(4e-4))
    ),
    "normal": stats.norm(1.0, 0.065),
    "gamma": stats.gamma(a=400.0, scale=1 / 400.0),
    "uniform": stats.uniform(0.9, 0.2),
}
CV = {"lognormal": 0.02, "normal": 0.065, "gamma": 0.05, "bounded_body": 0.015}
Q = np.array([1e-6, 1e-3, 0.02, 0.3, 0.5, 0.8, 0.9, 0.97, 0.999, 1 - 1e-6, 1 - 1e-9])


@pytest.fixture(params=DISTRIBUTIONS)
def distribution(request):
    return DISTRIBUTIONS[request.param]


def exact_moments(table):
    """Mean and std of a table over all 2**32 numbers, cell by cell, in float64."""
    mean = second = 0.0
    for first, count, bits in LEVELS:
        m = 2**bits
        value, slope = table[first : first + count].astype(np.float64).T
        share = m / 2.0**32
        mean += share * float(np.sum(value + slope * (m - 1) / 2))
        squares = (m - 1) * (2 * m - 1) / 6
        second += share * float(np.sum(value**2 + value * slope * (m - 1) + slope**2 * squares))
    return mean, math.sqrt(second - mean**2)


@pytest.mark.parametrize("name", ORACLES)
def test_distribution_equals_scipy(name):
    distribution, oracle = DISTRIBUTIONS[name], ORACLES[name]
    assert distribution.mean == pytest.approx(oracle.mean(), rel=1e-10)
    assert distribution.std == pytest.approx(oracle.std(), rel=1e-8)
    np.testing.assert_allclose(distribution.ppf(Q), oracle.ppf(Q), rtol=1e-9)
    np.testing.assert_allclose(distribution.cdf(oracle.ppf(Q)), Q, rtol=1e-7)


def test_mean_is_one_and_cv_as_asked():
    for name, distribution in DISTRIBUTIONS.items():
        assert distribution.mean == pytest.approx(1.0, abs=1e-12)
        if name in CV:
            assert distribution.cv == pytest.approx(CV[name], rel=1e-8)


def test_cdf_inverts_ppf(distribution):
    np.testing.assert_allclose(distribution.cdf(distribution.ppf(Q)), Q, rtol=1e-8, atol=1e-12)
    assert np.all(np.diff(distribution.ppf(Q)) > 0.0)


def test_bounded_body_has_a_smooth_density_and_the_stated_bound():
    distribution = bounded_body(0.015, -0.15)
    top = float(distribution.ppf(1.0))
    spread = (float(distribution.ppf(0.8413447460685429)) - float(distribution.ppf(0.5))) / 0.015
    assert spread == pytest.approx(1.0, abs=0.03)
    assert (top - float(distribution.ppf(0.5))) / (0.015 * spread) == pytest.approx(5.08, abs=0.02)
    x = float(distribution.ppf(0.9)) + np.array([-2e-6, -1e-6, 1e-6, 2e-6])
    below, _, above = np.diff(distribution.cdf(x))
    assert below == pytest.approx(above, rel=1e-3)


def test_lemons_are_relative_to_the_body_and_culled():
    distribution = bounded_body_lemons(0.015, -0.15, 0.03, 1.06, 1.5, 1.25)
    body_mean = distribution.scale  # the body's own mean is 1 before the whole is scaled to mean 1
    assert float(distribution.ppf(1.0)) / body_mean == pytest.approx(1.25, abs=1e-9)
    assert distribution.with_params(max_slowdown=1.5).params[-1] == 1.5
    assert distribution.with_params(lemon_fraction=0.0).cv == pytest.approx(0.015, rel=1e-8)


def test_mixture_moments_equal_a_sum_over_parts():
    distribution = mixture([0.9, 0.1], [normal(0.05), normal(0.1).times(2.0)])
    mean = 1.1
    second = 0.9 * (1 + 0.05**2) + 0.1 * 4 * (1 + 0.1**2)
    assert distribution.std == pytest.approx(math.sqrt(second - mean**2) / mean, rel=1e-9)


@pytest.mark.parametrize("power", [0.67, 1.5, 2.0])
def test_power_moments_by_sampling(distribution, power):
    rng = np.random.default_rng(3)
    x = np.maximum(distribution.ppf(rng.random(50_000)), 1e-9) ** power
    moments = distribution.power_moments(power)
    assert abs(x.mean() - moments.norm) < 5 * x.std() / math.sqrt(x.size)
    y = x / moments.norm
    spread = np.std((y - 1.0) ** 2) / (2 * moments.std * math.sqrt(x.size))
    assert abs(y.std() - moments.std) < 5 * spread + 1e-9


def test_power_of_a_lognormal_is_a_lognormal():
    sigma2 = math.log1p(0.1**2)
    moments = lognormal(0.1).power_moments(1.5)
    assert moments.std == pytest.approx(math.sqrt(math.expm1(2.25 * sigma2)), rel=1e-9)


def test_scaled_to(distribution):
    scaled = distribution.scaled_to(0.04)
    assert scaled.mean == pytest.approx(1.0, abs=1e-10)
    assert scaled.cv == pytest.approx(0.04, rel=1e-8)
    assert distribution.scaled_to(0.0) == constant()


def test_table_is_monotone_and_exact(distribution):
    table = quantile_table(distribution)
    assert table.shape == (N_CELLS, 2) and table.dtype == np.float32
    mean, std = exact_moments(table)
    assert abs(mean) < 1e-6 * distribution.std
    assert std == pytest.approx(distribution.std, rel=1e-6)
    u = np.unique(np.concatenate([np.arange(0, 2**32, 99_991), 2**32 - 2 ** np.arange(33)]))
    y = sample_table(table, u[u < 2**32].astype(np.uint32))
    assert np.all(np.diff(y) >= -1e-6 * distribution.std)


def test_table_of_a_power(distribution):
    table = quantile_table(distribution, 1.5)
    mean, std = exact_moments(table)
    moments = distribution.power_moments(1.5)
    assert abs(mean) < 1e-6 * moments.std
    assert std == pytest.approx(moments.std, rel=1e-6)


def test_two_values_of_which_one_is_nearly_zero_stay_above_it():
    """A jump inside a cell takes spread away; making it up must not take less than no time."""
    distribution = empirical([0, 0.2505, 0.2506, 1], [1e-5, 1e-5, 1.334, 1.334])
    table = quantile_table(distribution)
    mean, std = exact_moments(table)
    assert float(table[:, 0].min()) >= -1.0
    assert abs(mean) < 1e-6
    assert std == pytest.approx(distribution.std, rel=0.01)


def test_table_rows_cover_every_number_once():
    edges = np.array([0, 2**22 - 1, 2**22, 1023 * 2**22 - 1, 1023 * 2**22], dtype=np.uint32)
    row, fraction = table_row(edges)
    assert row.tolist() == [0, 0, 1, 1022, 1024]
    assert fraction.tolist() == [0, 2**22 - 1, 0, 2**22 - 1, 0]
    top = np.array([2**32 - 2**12 - 1, 2**32 - 2**12, 2**32 - 1], dtype=np.uint32)
    row, fraction = table_row(top)
    assert row.tolist() == [2046, 2048, 3071]
    assert fraction.tolist() == [2**12 - 1, 0, 3]


def test_table_draws_follow_the_distribution(distribution):
    u = np.random.default_rng(11).integers(0, 2**32, 100_000, dtype=np.uint32)
    draws = 1.0 + sample_table(quantile_table(distribution), u)
    assert stats.kstest(draws, distribution.cdf, method="asymp").pvalue > 1e-3


def expected_maximum(distribution, n):
    """Integral of ppf(v**(1/n)) over v in (0, 1), on panels that halve towards both ends."""
    low, high = 0.5 ** np.arange(45.0, 0.0, -1.0), 1.0 - 0.5 ** np.arange(2.0, 27.0)
    panels = np.concatenate([low, high])
    nodes, weights = np.polynomial.legendre.leggauss(12)
    half = 0.5 * np.diff(panels)[:, None]
    v = 0.5 * (panels[1:] + panels[:-1])[:, None] + half * nodes
    values = distribution.ppf(np.exp(np.log(v) / n))
    return float(np.sum(values * half * weights) / np.sum(half * weights))


@pytest.mark.parametrize("n", [1_000, 1_000_000])
def test_expected_maximum(distribution, n):
    u = np.random.default_rng(5).random(400) ** (1.0 / n)
    top = 1.0 + sample_table(quantile_table(distribution), np.floor(u * 2.0**32).astype(np.uint32))
    # Bounded laws have an all but certain maximum, with a Monte Carlo error below the error of the
    # table's straight lines (5e-4 std for the law with a gap before its lemons): allow for both.
    error = 5 * top.std() / math.sqrt(top.size) + 1e-3 * distribution.std
    assert abs(top.mean() - expected_maximum(distribution, n)) < error


def test_constant_distribution_gives_an_empty_table():
    assert constant() == lognormal(0.0)
    assert not quantile_table(constant()).any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: lognormal(-0.1),
        lambda: normal(math.nan),
        lambda: bounded_body(0.01, 0.2),
        lambda: bounded_body_lemons(0.01, -0.15, 1.5),
        lambda: bounded_body_lemons(0.01, -0.15, 0.1, 1.06, 1.2, 0.9),
        lambda: mixture([1.0], []),
        lambda: uniform(2.0, 1.0),
        lambda: empirical([0, 1], [2, 1]),
        lambda: empirical([0, 0.5], [1, 2]),
        lambda: lognormal(0.1).with_params(spread=0.2),
    ],
)
def test_wrong_parameters_are_refused(make):
    with pytest.raises(PrismError):
        make()


def test_quantiles_of_sorted_values_are_numpys():
    rng = np.random.default_rng(7)
    for n in (2, 3, 10, 1000, 3001):
        for values in (rng.lognormal(0.0, 0.3, n), rng.integers(0, 9, n) / 3.0):
            values.sort()
            q = np.unique(np.concatenate([[0.0, 1.0], rng.random(200), np.linspace(0, 1, 257)]))
            np.testing.assert_array_equal(sorted_quantiles(values, q), np.quantile(values, q))


# kernels by their sizes
KERNEL_FIT = KernelFit(
    (FitTerm(2e-6), FitTerm(1e-12, {"rows": 1.0, "columns": 1.0}), FitTerm(3e-9, {"rows": 0.5})),
    {"rows": (4.0, 4096.0), "columns": (16.0, 1024.0)},
    "measured", 7, 0.05,
)  # fmt: skip
KERNEL_GRID = KernelTable(
    {"m": np.array([1.0, 2.0]), "n": np.array([4.0]), "k": np.array([8.0, 16.0, 32.0])},
    np.array([[[1e12, 2e12, 3e12]], [[2e12, 3e12, 4e12]]]), source="measured",
)  # fmt: skip


def test_a_fit_finds_the_terms_that_made_its_rows():
    rng = np.random.default_rng(1)
    rows, columns = rng.uniform(4, 4096, 200), rng.uniform(16, 1024, 200)
    seconds = [KERNEL_FIT.seconds(rows=r, columns=c) for r, c in zip(rows, columns, strict=True)]
    powers = [term.powers for term in KERNEL_FIT.terms] + [{"columns": 2.0}]
    found = fit_kernel(powers, {"rows": rows, "columns": columns}, seconds)
    assert [t.powers for t in found.terms][:3] == [t.powers for t in KERNEL_FIT.terms]
    for mine, theirs in zip(found.terms, KERNEL_FIT.terms, strict=False):
        assert mine.coefficient == pytest.approx(theirs.coefficient, rel=1e-3)
    assert found.sd < 1e-3
    assert found.n == 200


def test_a_fit_has_no_mean_error_of_the_logarithm():
    rng = np.random.default_rng(2)
    x = np.geomspace(1, 1e4, 300)
    seconds = (1e-6 + 1e-9 * x) * np.exp(0.2 * rng.standard_normal(300))
    fit = fit_kernel([{}, {"bytes": 1.0}], {"bytes": x}, seconds)
    error = np.log([fit.seconds(bytes=b) for b in x] / seconds)
    assert abs(error.mean()) < 1e-5
    assert fit.sd == pytest.approx(0.2, rel=0.15)


def test_kernels_come_back_from_a_file(tmp_path):
    library = replace(
        load_library("h100-healthy"),
        kernels={
            "rms_norm/te/forward": KERNEL_FIT,
            "gemm/bf16": KERNEL_GRID,
            "layer_norm/te/forward": KERNEL_FIT,
        },
    )
    save_library(library, tmp_path / "made.nc")
    found = load_library(tmp_path / "made.nc").kernels
    assert set(found) == set(library.kernels)
    assert found["rms_norm/te/forward"] == KERNEL_FIT
    np.testing.assert_allclose(found["gemm/bf16"].rate, KERNEL_GRID.rate, rtol=1e-4)
    assert list(found["gemm/bf16"].axes) == ["m", "n", "k"]


@pytest.mark.parametrize(
    "broken",
    [
        {"nothing/bf16": KERNEL_FIT},
        {"gemm/bf16": KERNEL_FIT},
        {"rms_norm/te/forward": replace(KERNEL_FIT, terms=())},
        {"rms_norm/te/forward": replace(KERNEL_FIT, terms=(FitTerm(-1.0),))},
        {"rms_norm/te/forward": replace(KERNEL_FIT, terms=(FitTerm(1.0, {"rows": -1.0}),))},
        {"rms_norm/te/forward": replace(KERNEL_FIT, ends={"rows": (5.0, 4.0)})},
        {"gemm/bf16": replace(KERNEL_GRID, rate=-KERNEL_GRID.rate)},
    ],
)
def test_broken_kernels_are_refused(broken):
    with pytest.raises(ValueError, match=next(iter(broken))):
        check_kernels(broken)
