"""Calibrations of made-up machines: what is known is found, within the intervals that are given.

Factors are drawn from their priors anew for each repetition, sizes are off by the model error that
a calibration reckons with, and steps, stalls and what ranks share are drawn without prism: then
90 % intervals hold in 90 % of the repetitions, no more and no less.
"""

from dataclasses import replace

import numpy as np
import pytest
from calibration_made import Truth, as_times, small_job, steps_of
from campaign import examples
from scipy.stats import binom, chi2

from prism import load_library
from prism.models.calibration import fit
from prism.models.calibration.model import Calibration, communication_share
from prism.models.calibration.predict import predict_size, prepare_quiet
from prism.models.calibration.scales import COMMUNICATION_PRIOR, COMPUTE_PRIOR, MODEL_ERROR
from prism.models.calibration.sizes import measure_size
from prism.models.calibration.spreads import fit_between
from prism.simulation.prepare import prepare
from prism.simulation.steps import simulate_step

REPETITIONS = 6
RARE = 1e-4  # probability of a false alarm of one check
# lemons make a cluster's mean far from normal, which the spread between runs is taken to be
NO_LEMONS = "variability.effects.rank.lemon_fraction=0"
RELATIVE, FIXED_S, RATE = 0.01, 0.002, 30.0  # RATE: stalls per node and hour
FACTORS = {"compute": "compute", "communication": "communication", "between_runs": "between",
           "within_run": "within"}  # fmt: skip


def calibrated(measured, seed=0):
    """Library, measured sizes and report of a calibration, before they become a data set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "calibrated_to_dataset", lambda *made: made[:3])
        return fit.calibrate(measured, {}, seed, 1)


def deviation(factor, truth):
    """Standard deviations that a factor's logarithm is from the truth, by its 90 % interval."""
    low, high = factor["ci"]
    return np.log(factor["value"] / truth) / (np.log(high / low) / 2.0 / 1.645)


def drawn_truth(rng):
    return Truth(
        float(np.exp(COMPUTE_PRIOR * rng.standard_normal())),
        float(np.exp(COMMUNICATION_PRIOR * rng.standard_normal())),
        float(np.exp(rng.uniform(-0.7, 0.7))), 1.0, RELATIVE, FIXED_S, RATE, MODEL_ERROR,
    )  # fmt: skip


LAYOUTS = [(1, 2, 8, 8), (8, 2, 2, 8), (4, 2, 4, 8)]
"""Two sizes of unlike make-up (messages take 2 % and 24 % of the step), and one to predict."""


def one_repetition(seed, jobs):
    """Calibrate a made-up machine on two sizes, and predict the third."""
    rng = np.random.default_rng([11, seed])
    truth = drawn_truth(rng)
    made = [steps_of(truth, job, rng) for job in jobs[:2]]
    steps = [s for s, _ in made]
    library, sizes, report = calibrated(
        [(j, as_times(s)) for j, s in zip(jobs, steps, strict=False)], seed
    )
    out = {name: deviation(report["factors"][name], getattr(truth, of))
           for name, of in FACTORS.items()}  # fmt: skip
    out |= {name: report["step"][name] for name in ("relative", "fixed_s")}
    hours = np.array([s.sum() for s in steps]) / 3600.0
    nodes = np.array([job.n_nodes for job in jobs[:2]])
    stalls = report["stalls"]
    out |= {
        "stalls": sum(lengths.size for _, lengths in made), "found": stalls["n"],
        "wanted": RATE * float(hours @ nodes),
        "given": float(hours @ (stalls["job_rate_per_hour"]
                                + stalls["node_rate_per_hour"] * nodes)),
    }  # fmt: skip
    calm = replace(truth, stalls_per_node_hour=0.0)
    true = steps_of(calm, jobs[2], rng, 32)[0]
    drawn = simulate_step(prepare(jobs[3], seed, library), 64 * 64, seed, 1)
    predicted = drawn.step_time.values.reshape(64, 64)
    error = Calibration(sizes, report).mean_error(communication_share(drawn))
    chance = [s.mean(axis=1).std() / s.mean() / np.sqrt(len(s)) for s in (true, predicted)]
    (p50, p95), (own50, own95) = (np.quantile(s, [0.5, 0.95]) for s in (true, predicted))
    out["third"] = np.log(own50 / p50) / np.hypot(error, np.hypot(*chance))
    out["third_p95"] = np.log(own95 / p95) / np.hypot(error, np.hypot(*chance))
    out["third_error"] = np.log(own50 / p50)
    out["tail"] = (own95 / own50) / (p95 / p50) - 1.0
    return out


def spread_holds(z):
    """Whether deviations have mean square 1, and 90 % of them lie within 1.645, but for chance."""
    low, high = chi2.ppf([RARE, 1.0 - RARE], z.size) / z.size
    fewest = binom.ppf(RARE, z.size, 0.9)
    return bool(low < np.mean(z**2) < high and np.sum(np.abs(z) < 1.645) >= fewest)


@pytest.mark.slow
def test_known_figures_are_recovered():
    jobs = [small_job(*layout, NO_LEMONS) for layout in LAYOUTS]
    jobs.append(small_job(*LAYOUTS[2], NO_LEMONS, "variability.effects.stall.rate_per_hour=0"))
    rows = [one_repetition(seed, jobs) for seed in range(REPETITIONS)]
    found = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    for name in ("compute", "communication", "between_runs", "third"):
        z = found[name]
        assert spread_holds(z), name
        assert not spread_holds(4.0 * z)  # intervals a quarter as wide
        assert not spread_holds(0.1 * z)  # ten times as wide
        assert abs(z.mean()) < 4.0 / np.sqrt(z.size), name
    # a spread of kernels that hides behind what ranks share is the prior's
    assert np.all(np.abs(found["within_run"]) < 1.645)
    assert np.mean(found["relative"]) == pytest.approx(RELATIVE, rel=0.05)
    assert np.mean(found["fixed_s"]) == pytest.approx(FIXED_S, rel=0.1)
    stalls, seen = found["stalls"], found["found"]
    assert np.all(seen <= stalls) and seen.sum() > 0.95 * stalls.sum()  # side by side: one
    np.testing.assert_allclose(found["given"], seen, rtol=0.25)  # hours without the stalls
    wanted = found["wanted"].sum()
    assert abs(seen.sum() - wanted) < 4.0 * np.sqrt(wanted)
    assert np.sqrt(np.mean(found["third_error"] ** 2)) < 0.015
    # p95 is no further off than the median may be, and its place over the median is right
    high = chi2.ppf(1.0 - RARE, REPETITIONS) / REPETITIONS
    assert np.mean(found["third_p95"] ** 2) < high < np.mean((5.0 * found["third_p95"]) ** 2)
    assert np.median(np.abs(found["tail"])) < 0.005


# ------------------------------------------------------------------------- what tells nothing
@pytest.fixture(scope="module")
def alike():
    """Sizes of the same make-up, more replicas of the same pipeline, and what they tell."""
    rng = np.random.default_rng(5)
    jobs = [small_job(8, 2, dp, 32, NO_LEMONS) for dp in (8, 16)]
    truth = Truth(1.3, 0.6, relative=RELATIVE)
    steps = [steps_of(truth, job, rng)[0] for job in jobs]
    return jobs, steps, report_of(jobs, steps)


def report_of(jobs, steps):
    return calibrated([(j, as_times(s)) for j, s in zip(jobs, steps, strict=True)])[2]


def test_sizes_of_like_make_up_leave_communication_to_the_library(alike):
    jobs, steps, report = alike
    rng = np.random.default_rng(6)
    unlike = small_job(*LAYOUTS[0], NO_LEMONS)
    other = steps_of(Truth(1.3, 0.6, relative=RELATIVE), unlike, rng)[0]
    assert report["factors"]["communication"]["library_share"] > 0.8
    assert any(line.startswith("communication:") for line in report["not_identifiable"])
    told = report_of([jobs[0], unlike], [steps[0], other])
    assert told["factors"]["communication"]["library_share"] < 0.1
    assert not any(line.startswith("communication:") for line in told["not_identifiable"])


def test_one_run_per_size_tells_nothing_of_the_spread_between_runs(alike):
    jobs, steps, several = alike
    report = report_of(jobs, [s[:1] for s in steps])
    between = report["factors"]["between_runs"]
    assert between["value"] == pytest.approx(1.0, abs=1e-9)
    assert between["library_share"] == pytest.approx(1.0, abs=1e-9)
    assert any("between runs" in line for line in report["not_identifiable"])
    assert several["factors"]["between_runs"]["library_share"] < 0.2


def test_two_factors_cannot_bring_contradictory_sizes_together(alike):
    jobs, steps, report = alike

    def contradictions(report):
        return [line for line in report["warnings"] if "no two factors" in line]

    assert not contradictions(report)
    assert len(contradictions(report_of(jobs, [steps[0], 1.3 * steps[1]]))) == 2


# ------------------------------------------------------------------------------------- lemons
def test_a_few_slow_clusters_widen_the_interval_between_runs():
    """Where some clusters have a lemon, a variance of ten means is worth far fewer of them."""
    base = "h100-uncurated"
    jobs = [small_job(*layout, f"variability.library={base}") for layout in LAYOUTS[:2]]
    library = load_library(base)
    steps = [prepare_quiet(job, library, 0) for job in jobs]
    kept, naive = [], []
    for seed in range(examples(10)):
        rng = np.random.default_rng([13, seed])
        between = float(np.exp(rng.uniform(-0.7, 0.7)))
        truth = Truth(between=between, relative=RELATIVE, base=base)
        sizes = [measure_size(job, as_times(steps_of(truth, job, rng)[0]), seed) for job in jobs]
        found = [predict_size(step, library, seed, 1) for step in steps]
        normal = [replace(p, excess=0.0, clusters=10**9) for p in found]
        for rows, predicted in ((kept, found), (naive, normal)):
            factor = fit_between(sizes, predicted)
            rows.append(np.log(factor.value / truth.between) / factor.log_std)
    kept, naive = np.array(kept), np.array(naive)
    assert spread_holds(kept)
    assert not spread_holds(naive)
    assert np.mean(np.abs(kept) < 1.645) > np.mean(np.abs(naive) < 1.645)
