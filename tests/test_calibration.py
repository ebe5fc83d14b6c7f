"""Parts of a calibration against exact answers: factors, stretched laws, files, rates, lines."""

import json
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr
from calibration_made import BASE, as_times, small_job
from hypothesis import given
from hypothesis import strategies as st

from prism import PrismError, load_job, load_library
from prism.distributions import distribution as laws
from prism.distributions.library import from_dataset, library_names, library_path, save_library
from prism.models.calibration import model
from prism.models.calibration.fit import stall_rates
from prism.models.calibration.model import (
    Calibration,
    MeasuredSize,
    StepSetting,
    calibrated_to_dataset,
    load_calibration,
    with_factors,
    with_spreads,
    with_steps,
)
from prism.models.calibration.predict import draw_steps
from prism.models.calibration.scales import MODEL_ERROR, RATIOS, fit_scales
from prism.models.calibration.sizes import measure_size
from prism.models.calibration.spreads import Factor, StepSpread, fit_within, memory_s
from prism.simulation.prepare import prepare, prepare_again
from prism.simulation.runs.drift import ar1
from prism.simulation.steps import run_blocks
from prism.workload.build import ChunkWork, build_workload, nominal_step
from prism.workload.kernels import is_compute

QUANTILES = np.array([1e-3, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999])
FACTORS = [0.2, 0.7, 1.4, 2.5]
SETS = [f"{device}-{state}" for device in ("a100", "gb200", "h100")
        for state in ("healthy", "stressed")]  # fmt: skip
STEPS = StepSetting(np.linspace(-1.7, 2.0, 900), 0.01, 0.004, 20.0, 0.1, 0.2, np.array([2.0, 5.0]))
# layouts that between them have every kind of op
LAYOUTS = {
    "zero1 pipeline": (4, 2, 2, 4),
    "tied": (2, 2, 2, 2, "model.tied_embeddings=true"),
    "fsdp": (1, 1, 8, 1, "parallelism.data_parallel=fsdp"),
    "hsdp": (1, 1, 16, 1, "parallelism.data_parallel=hsdp", "parallelism.shard_size=8"),
    "ddp": (2, 1, 4, 1, "parallelism.data_parallel=ddp"),
}


def ops_of(work):
    """Every op of a workload with its path, found by walking all fields."""

    def walk(path, value):
        if isinstance(value, ChunkWork) or isinstance(value, tuple):
            names = [f.name for f in fields(value)] if is_dataclass(value) else None
            names = names or getattr(value, "_fields", None)
            pairs = [(n, getattr(value, n)) for n in names] if names else enumerate(value)
            for name, inner in pairs:
                yield from walk((*path, name), inner)
        elif hasattr(value, "duration"):
            yield path, value

    for field in fields(work):
        yield from walk((field.name,), getattr(work, field.name))


# ------------------------------------------------------------------------------------ factors
@pytest.mark.parametrize("layout", LAYOUTS)
def test_factors_scale_durations_and_nothing_else(layout):
    job, library = small_job(*LAYOUTS[layout]), load_library(BASE)
    plain = build_workload(job, library)
    scaled = build_workload(job, with_factors(library, 1.5, 0.25))
    before, after = dict(ops_of(plain)), dict(ops_of(scaled))
    assert before.keys() == after.keys() and len(before) > 20
    kinds = set()
    for path, op in before.items():
        factor = 1.5 if is_compute(op.kernel_class) else 0.25
        kinds.add(factor)
        assert after[path] == replace(op, duration=op.duration * factor), path
    assert kinds == {1.5, 0.25}
    for name in ("model_flop", "tokens"):
        assert getattr(plain, name) == getattr(scaled, name)
    assert build_workload(job, with_factors(library, 1.0, 1.0)) == plain


def test_factors_reach_explicit_durations():
    job = load_job("pipeline-8x32")
    work = build_workload(job, with_factors(load_library(BASE), 3.0, 7.0))
    assert {op.duration for _, op in ops_of(work)} == {3.0, 6.0}


def test_nominal_step_against_hand_counts():
    job = load_job("pipeline-8x32")
    work = build_workload(job, None)
    # the busiest of 8 equal stages: 32 microbatches, and 7 to fill and drain
    assert nominal_step(work, job.parallelism) == pytest.approx((32 + 7) * 3.0)
    uneven = load_job("pipeline-8x32", ["model.durations.forward_s=[1,1,1,1,1,1,1,4]"])
    assert nominal_step(build_workload(uneven, None), uneven.parallelism) == pytest.approx(39 * 6.0)
    chunked = load_job("pipeline-8x32", ["parallelism.vpp=2", "parallelism.schedule=interleaved"])
    wanted = (32 + 7 / 2) * 3.0
    assert nominal_step(build_workload(chunked, None), chunked.parallelism) == pytest.approx(wanted)
    modelled = small_job(*LAYOUTS["zero1 pipeline"])
    work = build_workload(modelled, load_library(BASE))
    stages = [sum(op.duration for p, op in ops_of(work) if p[:2] == ("chunks", stage))
              for stage in range(2)]  # fmt: skip
    rest = max(op.duration for op in work.optimizer)
    assert nominal_step(work, modelled.parallelism) == pytest.approx(max(stages) * 5 + rest)


# ------------------------------------------------------------------------------------- scales
def made_size(mean_s, n_runs=1):
    return SimpleNamespace(mean_s=mean_s, between_noise=0.0, n_runs=n_runs)


@pytest.mark.parametrize("log_ratio", [-2.5, -0.7, 0.2, 1.0, 2.5])
def test_work_and_messages_that_add_up_are_told_apart_exactly(log_ratio):
    """T = a W + b C: also far beyond the ratios that were simulated."""
    parts = [(10.0, 1.0), (3.0, 2.0), (6.0, 0.2)]
    a, b = 1.3, 1.3 * np.exp(log_ratio)
    sizes = [made_size(a * w + b * c) for w, c in parts]
    means = [w + np.exp(RATIOS) * c for w, c in parts]
    found = fit_scales(sizes, means, [0.0] * 3, [32] * 3)
    # the priors pull by a share of the variance that they still have
    for factor, truth in ((found.compute, a), (found.communication, b)):
        pull = factor.library_share * abs(np.log(truth)) + 3.0 * factor.log_std
        assert abs(np.log(factor.value / truth)) < pull
    at = np.array(parts) * [found.compute.value, found.communication.value]
    gradient = at / at.sum(axis=1, keepdims=True)
    information = gradient.T @ gradient / MODEL_ERROR**2 + np.diag([1 / 0.5**2, 1 / 0.7**2])
    np.testing.assert_allclose(found.covariance, np.linalg.inv(information), rtol=0.01)


def test_an_uncertain_prediction_widens_the_interval():
    sizes, means = [made_size(11.0, 10**9), made_size(5.0, 10**9)], [
        10.0 + np.exp(RATIOS), 3.0 + 2.0 * np.exp(RATIOS)
    ]  # fmt: skip
    few, many = (fit_scales(sizes, means, [0.02, 0.02], [n, n]) for n in (8, 10**9))
    assert few.compute.log_std / many.compute.log_std == pytest.approx(
        np.sqrt(1.0 + 0.02**2 / 8 / MODEL_ERROR**2), rel=0.02
    )


# --------------------------------------------------------------------------------------- laws
LAWS = {
    "lognormal": laws.lognormal(0.08), "normal": laws.normal(0.03), "gamma": laws.gamma(0.05),
    "body": laws.bounded_body(0.015, -0.15),
    "lemons": laws.bounded_body_lemons(0.015, -0.15, 0.0075, 1.1, 1.2),
    "mixture": laws.mixture([0.9, 0.1], [laws.lognormal(0.02), laws.lognormal(0.1).times(1.3)]),
    "empirical": laws.empirical([0.0, 0.4, 0.9, 1.0], [0.95, 0.99, 1.03, 1.2]),
}  # fmt: skip


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("name", LAWS)
def test_stretched_laws_keep_their_mean(name, factor):
    law = LAWS[name]
    wide = law.spread_by(factor)
    assert wide.mean == pytest.approx(1.0, abs=1e-9)
    assert wide.cv == pytest.approx(factor * law.cv, rel=0.01)
    assert law.spread_by(1.0) is law
    assert laws.constant().spread_by(factor) == laws.constant()


@pytest.mark.parametrize("name", SETS)
def test_stretched_sets_keep_all_means(name):
    library = load_library(name)
    wide = with_spreads(library, 1.8, 0.6)
    scaled = set()
    for entry in library.entries:
        if library.entry(entry).law is None:
            assert wide.entry(entry) == library.entry(entry)
            continue
        factor = 1.8 if entry == "rank" else 0.6
        if entry not in ("rank", "microbatch", "call") and not entry.startswith("residual/"):
            factor = 1.0
        scaled.add(factor)
        before, after = library.law(entry), wide.law(entry)
        assert after.mean == pytest.approx(1.0, abs=1e-9), entry
        assert after.cv == pytest.approx(factor * before.cv, rel=0.01), entry
    assert scaled == {1.0, 0.6, 1.8}


@pytest.mark.parametrize("name", SETS)
def test_calibrated_sets_round_trip_through_their_file(name, tmp_path):
    made = with_steps(with_factors(with_spreads(load_library(name), 1.7, 1.3), 0.8, 1.6), STEPS)
    path = tmp_path / "made.nc"
    save_library(made, path)
    again = load_library(path)
    assert list(again.entries) == list(made.entries)
    for entry, before in made.entries.items():
        after = again.entry(entry)
        if before.law is None:
            assert after.number == before.number, entry
            continue
        assert after.law.mean == pytest.approx(before.law.mean, rel=1e-9), entry
        assert after.law.cv == pytest.approx(before.law.cv, rel=1e-6), entry
        np.testing.assert_allclose(
            after.law.ppf(QUANTILES), before.law.ppf(QUANTILES), rtol=1e-6, err_msg=entry
        )


def test_the_sets_that_are_tested_are_those_shipped():
    assert set(SETS) <= set(library_names())


def test_step_effect_and_stalls_replace_the_librarys():
    library = with_steps(load_library(BASE), STEPS)
    assert library.law("step").mean == pytest.approx(1.0)
    assert library.law("step").cv == pytest.approx(STEPS.relative, rel=1e-6)
    # its quantiles are those of the sample, but for the scale
    wanted = np.quantile(STEPS.shape, QUANTILES)
    got = (library.law("step").ppf(QUANTILES) - 1.0) / STEPS.relative
    np.testing.assert_allclose(got, (wanted - STEPS.shape.mean()) / STEPS.shape.std(), atol=0.01)
    figures = {"stall/duration_s": 3.5, "stall/duration_cv": 1.5 / 3.5,
               "step/correlation_time_s": 20.0, "stall/job_rate_per_hour": 0.1}  # fmt: skip
    for name, value in figures.items():
        assert library.value(name) == pytest.approx(value), name


# -------------------------------------------------------------------------------------- rates
def stall_size(hours, nodes, stalls):
    return SimpleNamespace(
        exposure_s=3600.0 * hours, stalls=float(stalls), job=SimpleNamespace(n_nodes=nodes)
    )


rows = st.lists(
    st.tuples(st.floats(0.1, 100.0), st.integers(1, 64), st.integers(0, 30)),
    min_size=2, max_size=4,
)  # fmt: skip


@given(rows)
def test_stall_rates_are_the_likeliest(made):
    """No pair of rates on a fine grid is likelier; the expected number is the counted one."""
    sizes = [stall_size(*row) for row in made]
    job, node = stall_rates(sizes)
    hours, nodes, counts = np.array(made, float).T
    assert job >= 0.0 and node >= 0.0
    assert job * hours.sum() + node * (hours @ nodes) == pytest.approx(counts.sum(), rel=1e-4)
    if counts.sum() == 0.0:
        assert (job, node) == (0.0, 0.0)
        return

    def likelihood(a, b):
        mean = hours * (a + b * nodes)
        return (counts * np.log(np.maximum(mean, 1e-300)) - mean).sum(axis=-1)

    share = np.linspace(0.0, 1.0, 201)[:, None]  # along the line on which the whole is right
    grid = likelihood(
        share * counts.sum() / hours.sum(), (1.0 - share) * counts.sum() / (hours @ nodes)
    )
    if np.ptp(nodes) == 0.0:
        assert job == 0.0
    else:
        assert likelihood(job, node) > grid.max() - 1e-6


def test_stall_rates_of_a_long_record():
    rng = np.random.default_rng(3)
    sizes = [stall_size(h, n, rng.poisson(h * (0.5 + 0.02 * n)))
             for h, n in ((4_000.0, 4), (4_000.0, 64), (2_000.0, 256))]  # fmt: skip
    job, node = stall_rates(sizes)
    assert job == pytest.approx(0.5, rel=0.1) and node == pytest.approx(0.02, rel=0.05)
    only_nodes = [stall_size(4_000.0, n, rng.poisson(4_000.0 * 0.02 * n)) for n in (4, 64)]
    job, node = stall_rates(only_nodes)
    assert job < 0.05 and node == pytest.approx(0.02, rel=0.1)


# ------------------------------------------------------------------------------------- spread
def spread_size(within, mean_s, slow_s, n=1_000):
    return SimpleNamespace(within=within, within_n=100.0, mean_s=mean_s, slow_s=slow_s, n=n)


@pytest.mark.parametrize("tau_s", [0.0, 1.0, 2.0, 30.0, 500.0])
def test_memory_is_that_of_an_ar1_series(tau_s):
    """The long sum of an AR(1) series is in closed form, steps without memory included."""
    step_s, own, shared, factor = 2.0, 0.003, 0.01, 0.5
    r = np.exp(-step_s / tau_s) if tau_s else 0.0
    within = np.hypot(factor * own, shared)
    long_s = step_s * (shared**2 * (1.0 + r) / (1.0 - r) + (factor * own) ** 2)
    size = spread_size(within, step_s, long_s / within**2)
    spread = StepSpread(Factor(factor, 0.1, 0.1), shared, 0.0, (own,))
    assert memory_s([size], spread) == pytest.approx(tau_s, abs=1e-6)


@pytest.mark.parametrize(("own", "within"), [
    ((0.0015, 0.004), (0.0008, 0.0042)), ((0.01, 0.02), (0.01, 0.02)),
    ((0.001, 0.001), (0.01, 0.01)),
])  # fmt: skip
def test_parts_of_a_spread_add_up_to_what_was_measured(own, within):
    lengths, pull = (11.0, 1.6), 0.1  # of the factor's prior
    sizes = [spread_size(w, t, t) for w, t in zip(within, lengths, strict=True)]
    found = fit_within(sizes, [SimpleNamespace(within=o) for o in own])
    for o, w, t in zip(own, within, lengths, strict=True):
        assert np.hypot(found.library.value * o, found.cv(t)) == pytest.approx(w, rel=pull)
    low, high = found.library.ci
    assert low < found.library.value < high


@pytest.mark.parametrize("k", [1, 5])
def test_steps_logged_as_means_of_several_are_measured_as_single_ones(k):
    """Delays and the drift's variance are those of steps, whatever the log averages over."""
    rng, n, own, slow = np.random.default_rng(2), 4_000, 0.01, 0.005
    drift = ar1(np.arange(n) / 200.0, 4, rng).T
    steps = 2.0 * (1.0 + slow * drift + own * rng.standard_normal((4, n)))
    at = rng.integers(500, n, (4, 3))
    for run, hits in zip(steps, at, strict=True):
        run[hits] += 20.0
    times = as_times(steps.reshape(4, n // k, k).mean(axis=2))
    size = measure_size(None, replace(times, mean_over=k), 0)
    assert size.within == pytest.approx(np.hypot(own, slow), rel=0.1)
    assert size.stalls == pytest.approx(12, abs=1)
    assert size.stall_s.sum() == pytest.approx(240.0, rel=0.1)
    assert size.exposure_s == pytest.approx(2.0 * 4 * n, rel=0.05)


# ------------------------------------------------------------------------------- what it says
def measured(label, gpus, microbatches, median):
    return MeasuredSize(label, gpus, microbatches, 3, np.array([0.9, 1.0, 1.3]) * median)


def test_baselines_of_a_calibration():
    sizes = (measured("a", 512, 128, 12.0), measured("b", 4096, 16, 1.92))
    found = Calibration(sizes, {})
    slope = (12.0 - 1.92) / (128 - 16)
    assert found.line(16) == pytest.approx(1.92) and found.line(128) == pytest.approx(12.0)
    assert found.line(64) == pytest.approx(1.92 + 48 * slope)
    # nearest as a ratio: the middle of 512 and 4,096 is 1,448
    assert [found.nearest(n).label for n in (8, 1_400, 1_500, 6_144)] == ["a", "a", "b", "b"]
    flat = Calibration((sizes[0], measured("c", 1024, 128, 12.6)), {})
    assert flat.line(64) == pytest.approx(12.3 / 2)


def test_error_of_a_mean_by_its_make_up():
    scales = {"covariance": [[0.0004, -0.0003], [-0.0003, 0.0009]],
              "prior_covariance": [[0.25, 0.0], [0.0, 0.49]], "model_error": 0.005}  # fmt: skip
    found = Calibration((), {"scales": scales})
    for share in (0.0, 0.3, 1.0):
        own, x = 1.0 - share, share
        variance = 0.0004 * own**2 + 0.0009 * x**2 - 0.0006 * own * x
        assert found.mean_error(share) == pytest.approx(np.sqrt(variance + 0.005**2))
        prior = 0.25 * own**2 + 0.49 * x**2
        assert found.library_share(share) == pytest.approx(variance / prior)


def test_what_a_calibration_rests_on_round_trips(tmp_path, monkeypatch):
    library = with_steps(with_factors(load_library(BASE), 0.9, 1.1), STEPS)
    sizes = [measured("a (16 GPUs)", 16, 8, 2.0),
             MeasuredSize("b (64 GPUs)", 64, 4, 5, np.linspace(1.0, 1.2, 5))]  # fmt: skip
    own = {"covariance": [[0.2, 0.1], [0.1, 0.3]], "prior_covariance": [[0.25, 0.0], [0.0, 0.5]]}
    report, path = {"scales": {"model_error": 0.005, **own}}, tmp_path / "m.nc"
    dataset = calibrated_to_dataset(library, sizes, report, {"model": {}}, {"seed": "1"})
    dataset.to_netcdf(path, engine="h5netcdf")
    found = load_calibration(path)
    assert found.report == report
    for size, wanted in zip(found.sizes, sizes, strict=True):
        np.testing.assert_array_equal(size.steps_s, wanted.steps_s)
        assert replace(size, steps_s=None) == replace(wanted, steps_s=None)
    with xr.open_dataset(path, engine="h5netcdf") as again:
        assert json.loads(again.attrs["job"]) == {"model": {}}
        assert again.attrs["base_library"] == BASE
        assert list(from_dataset(again.load(), "again").entries) == list(library.entries)
    assert load_calibration(library_path(BASE)) is None
    few = replace(library, entries={"step": library.entry("step")})
    for broken in (1.0, [[0.2, 0.3], [0.3, 0.2]], [[0.2, float("nan")], [0.1, 0.3]], "x"):
        report["scales"]["covariance"] = broken
        wrong = calibrated_to_dataset(few, sizes, report, {"model": {}}, {"seed": "1"})
        # as what the file holds: writing each takes longer than all else
        monkeypatch.setattr(model, "read_netcdf", lambda *_, wrong=wrong: wrong)
        with pytest.raises(PrismError, match=f"{path.name}: .*read"):
            load_calibration(path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_over_a_calibrated_library_is_the_one_built_anew(layout):
    """Factors change the order of ops, in which a graph is built, and nothing of its times."""
    job, base = small_job(*LAYOUTS[layout]), load_library(BASE)
    calibrated = with_factors(with_spreads(base, 1.5, 0.5), 0.8, 1.7)
    again = prepare_again(prepare(job, 1, base), calibrated, 2)
    anew = prepare(job, 2, calibrated)
    assert again.workload == anew.workload
    assert again.graph.op_types == anew.graph.op_types
    assert again.graph.nominal_s == anew.graph.nominal_s
    times = [run_blocks(step.program, range(2), 2)[0] for step in (again, anew)]
    assert np.array_equal(*times)


def test_measured_stalls_add_to_the_mean_step():
    """Means are fitted without stalls, so those that were measured come on top."""
    job, seconds = small_job(2, 2, 2, 8), 3.0
    quiet = with_factors(load_library(BASE), 1.0, 1.0)
    lengths = np.full(4, seconds)
    measured = with_steps(quiet, StepSetting(np.zeros(1), 0.0, 0.0, 0.0, 600.0, 0.0, lengths))
    none = with_steps(quiet, StepSetting(np.zeros(1), 0.0, 0.0, 0.0, 0.0, 0.0, lengths))
    calm = draw_steps(job, none, 1, 1)
    stalled = draw_steps(job, measured, 1, 1)
    untouched = stalled < 0.5 * seconds
    assert np.median(stalled[untouched] / calm[untouched]) == pytest.approx(1.0, abs=1e-4)
    share = 1.0 - np.exp(-600.0 / 3600.0 * calm.mean())
    assert (~untouched).mean() == pytest.approx(share, abs=4.0 * np.sqrt(share / calm.size))
