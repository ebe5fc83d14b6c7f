"""Runs from event to event: against runs step by step, closed forms, and their own bookkeeping."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from brute_runs import BruteRuns
from campaign import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from scipy.stats import ks_2samp

from prism import PrismError
from prism.simulation.runs import model as runmodel
from prism.simulation.runs.checkpointing import FailureLaw, best_interval, best_steps, expected_time
from prism.simulation.runs.drift import decay_sum, drift_sum, drift_variance, wave_sum
from prism.simulation.runs.model import simulate_runs
from prism.simulation.runs.parts import (
    Cause,
    Checkpoints,
    Drift,
    Episodes,
    Evaluations,
    Interruptions,
    RunModel,
    StallProcess,
)
from prism.simulation.runs.rates import expected_events, stationary

MEAN = 1.0 * (1.0 + 0.005 * default_rng(0).standard_normal((50, 1)))
OWN = 0.02 * default_rng(2).standard_normal(4096)
PLAIN = RunModel(MEAN, 0.02 + 0.0 * MEAN, ideal_s=0.9, n_nodes=8, residuals=OWN - OWN.mean())
N_BRUTE = examples(200)  # runs step by step
N_RUNS = examples(2048)  # from event to event: their chance is small beside that of the others
LENGTHS = default_rng(1).exponential(5.0, 500)
# eight nodes that fail every 22 minutes on average: many failures in a short run
FAILING = Interruptions(8000.0, 8, 30.0, 120.0)


def model(**changes):
    return replace(PLAIN, **changes)


# ---------------------------------------------------------------------------------- sums of drift
@given(n=st.integers(1, 400), rate=st.floats(1e-9, 20.0))
@settings(max_examples=60)
def test_the_law_of_sum_and_last_is_that_of_the_series(n, rate):
    """Against the AR(1) matrix: coefficients of the start and of every shock."""
    r, i = np.exp(-rate), np.arange(n + 1)
    shock = np.sqrt(-np.expm1(-2 * rate)) * r ** np.clip(np.subtract.outer(i, i[1:]), 0, None)
    shock[np.subtract.outer(i, i[1:]) < 0] = 0.0  # shock j enters value i from j on
    total, last = shock[:-1].sum(axis=0), shock[-1]
    one, zero = np.ones(1), np.zeros(1)

    def at(start, a, b):
        z = np.array([[a], [b]], float)
        return [float(x[0]) for x in drift_sum(start, n * one, rate * one, z)]

    from_start, first, second = at(one, 0, 0), at(zero, 1, 0), at(zero, 0, 1)
    assert from_start == pytest.approx([(r ** i[:-1]).sum(), r**n], rel=1e-6, abs=1e-12)
    scale = np.sqrt((total**2).sum()) + 1e-300
    assert np.hypot(first[0], second[0]) == pytest.approx(scale, rel=2e-6, abs=1e-9)
    assert first[1] ** 2 == pytest.approx((last**2).sum(), rel=1e-6)
    assert first[0] * first[1] == pytest.approx((total * last).sum(), rel=2e-6, abs=1e-9)
    assert second[1] == 0.0


@given(parts=st.lists(st.integers(0, 50), min_size=1, max_size=6), rate=st.floats(1e-8, 5.0))
@settings(max_examples=40)
def test_sums_in_parts_have_the_variance_of_the_whole(parts, rate):
    """The law goes on from where it is: linear in the draws, so variances add exactly."""
    n_draws = 1 + 2 * len(parts)
    unit = np.eye(n_draws)  # one column per independent draw
    drift, total = unit[0].copy(), np.zeros(n_draws)
    for i, n in enumerate(parts):
        size = np.full(n_draws, float(n))
        part, drift = drift_sum(drift, size, np.full(n_draws, rate), unit[1 + 2 * i : 3 + 2 * i])
        total += part
    n = sum(parts)
    expected = drift_variance(n, rate, 1.0) if n else 0.0
    assert (total**2).sum() == pytest.approx(expected, rel=1e-5, abs=1e-12)
    assert (drift**2).sum() == pytest.approx(1.0)


def test_no_memory_and_a_daily_wave():
    one = np.ones(1)
    assert decay_sum(5 * one, np.inf * one)[0] == 1.0 and decay_sum(5 * one, 0 * one)[0] == 5.0
    steps = 10.0 + 7.0 * np.arange(1000)
    direct = np.cos(2 * np.pi * (steps - 3e4) / 86_400.0).sum()
    assert wave_sum(10.0 * one, 1000 * one, 7.0 * one, 3e4)[0] == pytest.approx(direct, rel=1e-9)


# ----------------------------------------------------------------------- against step by step
CASES = {
    "white": {},
    "slow drift": {"drift": Drift(0.02, 2000.0)},
    "daily wave and run effect": {"drift": Drift(0.01, 200.0, 0.03, 5e4), "run_cv": 0.01},
    "stalls and failures": {
        "drift": Drift(0.02, 2000.0), "stalls": StallProcess(1e-3, LENGTHS),
        "interruptions": FAILING,
        "checkpoints": Checkpoints(300, 20.0), "evaluations": Evaluations(500, 30.0),
    },
    "in the background, causes, few spares": {
        "interruptions": Interruptions(8000.0, 8, 30.0, 120.0, 1, 1800.0, (
            Cause("gpu", 0.7, 60.0, 180.0), Cause("software", 0.3, 30.0, 60.0, False))),
        "checkpoints": Checkpoints(300, 100.0, False),
    },
    "congestion": {
        "mean": MEAN * [1.0, 1.2, 1.5], "std": 0.02 * MEAN * [1.0, 1.2, 3.0],
        "regime": np.array([[0, 1e-3, 0], [2e-3, 0, 1e-3], [0, 4e-3, 0]]),
    },
    "slow nodes": {
        "interruptions": FAILING, "checkpoints": Checkpoints(200, 10.0),
        "episodes": Episodes(0.2, 8, 1000.0, 1.0, np.array([1.1, 1.4])),
    },
    "slow nodes, some replaced": {
        "interruptions": FAILING, "checkpoints": Checkpoints(200, 10.0),
        "episodes": Episodes(0.1, 8, 400.0, 0.5, np.array([1.2, 1.8]), 200.0, True),
    },
    "work by step": {
        "profile": np.linspace(0.5, 1.5, 2500), "interruptions": FAILING,
        "checkpoints": Checkpoints(300, 20.0),
    },
}  # fmt: skip


def distance(a, b):
    """Difference of means and of spreads, in standard errors."""

    def spread_error(x):
        centred = x - x.mean()
        return np.sqrt((centred**4).mean() / (centred**2).mean() - x.var()) / (2 * x.size**0.5)

    mean = (a.mean() - b.mean()) / np.hypot(a.std() / a.size**0.5, b.std() / b.size**0.5)
    return abs(mean), abs((a.std() - b.std()) / np.hypot(spread_error(a), spread_error(b)))


@cache
def step_by_step(name):
    """Times and failures of runs of a case."""
    brute = BruteRuns(model(**CASES[name]), 2500, N_BRUTE, 1)
    return brute.run(), brute.failures


@pytest.mark.parametrize("most", [0, 2500], ids=["sums", "steps"])
@pytest.mark.parametrize("name", CASES)
def test_events_agree_with_steps_one_by_one(name, most, monkeypatch):
    monkeypatch.setattr(runmodel, "STEP_BY_STEP", most)
    expected, failures = step_by_step(name)
    runs = simulate_runs(model(**CASES[name]), 2500, N_RUNS, 2)
    assert max(distance(runs.total, expected)) < 4.5
    assert ks_2samp(runs.total, expected).pvalue > 1e-4
    error = np.hypot(runs.failures.std() / N_RUNS**0.5, failures.std() / N_BRUTE**0.5)
    assert abs(runs.failures.mean() - failures.mean()) <= 4.5 * error


def test_the_comparison_notices_what_is_wrong():
    """Negative controls: independent steps, a cheaper restart, work not lost."""
    slow, _ = step_by_step("slow drift")
    independent = simulate_runs(model(drift=Drift(0.02, 0.0)), 2500, N_RUNS, 2).total
    assert distance(independent, slow)[1] > 10
    case = CASES["stalls and failures"]
    failing, _ = step_by_step("stalls and failures")
    for wrong in (
        {"interruptions": Interruptions(8000.0, 8, 30.0, 20.0)},
        {"checkpoints": Checkpoints(30, 2.0)},
    ):
        runs = simulate_runs(model(**{**case, **wrong}), 2500, N_RUNS, 2)
        assert distance(runs.total, failing)[0] > 4.5


def test_congestion_too_quick_to_follow_counts_by_its_long_run_spread(monkeypatch):
    case = model(**CASES["congestion"])
    followed = simulate_runs(case, 200_000, 1000, 1)
    monkeypatch.setattr(runmodel, "SWITCHES", 1.0)
    averaged = simulate_runs(case, 200_000, 1000, 1)
    assert max(distance(averaged.total, followed.total)) < 4.5
    # beyond its mean, which is part of the steps', it adds nothing to that of the run
    for runs in (followed, averaged):
        term = runs.terms["congestion"]
        assert abs(term.mean()) < 4.5 * term.std() / term.size**0.5 + 1e-9 * runs.total.mean()
    assert followed.terms["slow_steps"].mean() == pytest.approx(averaged.terms["slow_steps"].mean())


def test_congestion_comes_and_goes_between_steps_as_well():
    """Else a run of long evaluations follows every change, for minutes instead of a second."""
    case = model(**CASES["congestion"])
    rate = expected_events(case, 1000) / 1000 / case.mean[:, 0].mean()
    idle = replace(case, evaluations=Evaluations(10, 3600.0), checkpoints=Checkpoints(100, 60.0))
    more = expected_events(idle, 1000) - expected_events(case, 1000)
    assert more == pytest.approx(rate * (100 * 3600.0 + 10 * 60.0))
    assert runmodel._averaged(case, 1000) is case
    assert runmodel._averaged(idle, 10_000).mean.shape[1] < case.mean.shape[1]


THREE = [1, 2, 3]
RARE = default_rng(5).lognormal(-1.5, 1.7, 20_000)  # a jitter of CV 4 or so
RARE_STEPS = RunModel(
    np.full((1, 1), 5.0 + RARE.mean()), np.full((1, 1), RARE.std()), residuals=RARE - RARE.mean()
)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"evaluations": Evaluations(3, 1e-3)}, {"episodes": Episodes(1e-6, 8, 60.0, 1.0,
                                                                         np.array([1.1]))},
        {"interruptions": Interruptions(3.8, 2), "checkpoints": Checkpoints(2, 0.0, False)},
        {"regime": np.array([[0.0, 1e-9], [1e-3, 0.0]]), "mean": RARE_STEPS.mean * [1.0, 1.2],
         "std": RARE_STEPS.std * [1.0, 1.2]},
    ],
    ids=["alone", "evaluation", "episodes", "failures", "congestion"],
)  # fmt: skip
def test_three_steps_have_the_tail_of_three_steps(changes):
    """Against the sum of three draws, whatever else could happen and hardly does."""
    runs = simulate_runs(replace(RARE_STEPS, **changes), 3, 20_000, 4, marks=THREE)
    steps = 5.0 + default_rng(6).choice(RARE, (400_000, 3))
    for i in range(3):
        direct = steps[:, : i + 1].sum(axis=1)
        for q in (0.5, 0.95, 0.99):
            wanted, n = np.quantile(direct, q), min(runs.total.size, runs.marks.shape[0])
            share = (runs.marks[:, i] <= wanted).mean()
            assert abs(share - q) < 5.0 * np.sqrt(q * (1.0 - q) / n)


def test_a_failure_finds_the_step_that_is_going_on():
    """Long steps fail more often than short ones, and are drawn anew."""
    fail = Interruptions(8.64e7 / 20.0 / 8.0, 8)  # one every 20 s
    long = np.where(default_rng(7).random(4000) < 0.1, 30.0, 2.0)
    case = RunModel(np.full((1, 1), long.mean()), np.full((1, 1), long.std()),
                    residuals=long - long.mean(), interruptions=fail)  # fmt: skip
    # with q the chance that a step is done before a failure, E T = (1 - q) / (r q)
    q = np.exp(-long / 20.0).mean()
    wanted = 20.0 * (1.0 - q) / q
    runs = simulate_runs(case, 1, 20_000, 3)
    assert abs(runs.total.mean() - wanted) < 5.0 * runs.total.std() / 20_000**0.5


def test_short_runs_are_walked_as_long_ones_sum():
    case = model(
        drift=Drift(0.02, 300.0, 0.01, 4e4), stalls=StallProcess(1e-3, LENGTHS), run_cv=0.01,
        profile=np.linspace(0.5, 1.5, 2001),
    )  # fmt: skip
    walked, summed = (simulate_runs(case, n, N_RUNS, 3).total / n for n in (2000, 2001))
    assert max(distance(walked, summed)) < 4.5


# ------------------------------------------------------------------------------- closed forms
def test_failures_only_have_the_closed_form_of_the_effective_time():
    """Steps and failures alone: E T = intervals x e^(r R) (e^(r (tau + w)) - 1) / r (Daly 2006)."""
    flat = RunModel(np.full((1, 1), 2.0), np.zeros((1, 1)), n_nodes=100)
    fail = Interruptions(50.0, 100, 120.0, 480.0)  # one every 4.8 h
    for interval, write in ((300, 0.0), (300, 60.0), (1200, 60.0)):
        case = replace(flat, interruptions=fail, checkpoints=Checkpoints(interval, write))
        runs = simulate_runs(case, 120_000, N_RUNS, interval)
        law = FailureLaw(fail.rate_per_s, 600.0)
        wanted = expected_time(240_000.0, interval * 2.0, write, law)
        error = runs.total.std() / N_RUNS**0.5
        # the step in which a failure falls is lost whole, in the formula only what was done of it
        assert abs(runs.total.mean() - wanted) < 4.5 * error + 1e-5 * wanted
        ettr = 240_000.0 / wanted
        assert (240_000.0 / runs.total).mean() == pytest.approx(ettr, abs=0.003)
        # Meta's approximation (HPCA'25), to first order in the rate
        first = (1 - fail.rate_per_s * (600.0 + interval)) / (1 + write / (interval * 2.0))
        assert ettr == pytest.approx(first, abs=0.005)


@given(rate=st.floats(1e-8, 1e-3), write=st.floats(0.01, 100.0))
def test_the_best_interval_is_the_least_of_the_expected_time(rate, write):
    law = FailureLaw(rate, 300.0)
    best = best_interval(write, law)
    at = expected_time(1e6, best, write, law)
    assert at <= min(expected_time(1e6, best * f, write, law) for f in (0.97, 1.03)) * (1 + 1e-12)
    if rate * write < 1e-3:
        assert best == pytest.approx(np.sqrt(2 * write / rate), rel=0.03)  # Young
    steps = best_steps(7.0, write, law)
    around = [
        expected_time(1e6, n * 7.0, write, law) for n in (max(1, steps - 1), steps, steps + 1)
    ]
    assert around[1] <= min(around) * (1 + 1e-12)


def test_simulated_runs_are_shortest_at_the_best_interval():
    fail = Interruptions(500.0, 100, 0.0, 60.0)
    law = FailureLaw(fail.rate_per_s, 60.0)
    best = best_steps(2.0, 20.0, law)
    assert best * 2.0 == pytest.approx(np.sqrt(2 * 20.0 / law.rate_per_s), rel=0.06)
    flat = RunModel(np.full((1, 1), 2.0), np.zeros((1, 1)), interruptions=fail)
    times = [
        simulate_runs(replace(flat, checkpoints=Checkpoints(n, 20.0)), 40_000, 2048, 5).total.mean()
        for n in (best // 3, best, best * 3)
    ]
    assert times[1] < min(times[0], times[2])


def test_waiting_for_the_only_spare():
    """One spare, long repairs: a stock of one, as in a loss queue with backlog."""
    fail = Interruptions(100.0, 10, 0.0, 0.0, 1, 40_000.0)
    flat = RunModel(np.ones((1, 1)), np.zeros((1, 1)), interruptions=fail,
                    checkpoints=Checkpoints(10, 0.0))  # fmt: skip
    runs = simulate_runs(flat, 500_000, 500, 1)
    none = simulate_runs(
        replace(flat, interruptions=Interruptions(100.0, 10, spares=None)), 500_000, 500, 1
    )
    assert none.terms["spares"].sum() == 0.0 < runs.terms["spares"].mean()
    always = simulate_runs(
        replace(flat, interruptions=Interruptions(100.0, 10, 0.0, 0.0, 0, 40_000.0)),
        500_000, 500, 1,
    )  # fmt: skip
    # without spares every failure waits for its repair; one meanwhile starts another
    assert always.terms["spares"].mean() > runs.terms["spares"].mean()


def test_replaced_nodes_renew_the_cluster():
    """A run whose nodes were replaced many times forgets its cluster; another does not."""
    mean = np.array([[1.0], [1.2]])
    fail = Interruptions(20_000.0, 4, 0.0, 0.0)
    base = RunModel(mean, 0.0 * mean, n_nodes=4, checkpoints=Checkpoints(10, 0.0))
    runs = simulate_runs(replace(base, interruptions=fail), 200_000, 400, 1)
    # 185 failures renew 46 times: the share of time on each is half, give or take
    assert runs.total.std() < 0.25 * simulate_runs(base, 200_000, 400, 1).total.std()
    kept = replace(
        base, interruptions=Interruptions(20_000.0, 4, causes=(Cause("x", 1.0, 0.0, 0.0, False),))
    )
    assert simulate_runs(kept, 200_000, 400, 1).total.std() > 10_000.0


def test_stationary_shares():
    rates = np.array([[0, 1e-3, 0], [2e-3, 0, 1e-3], [0, 4e-3, 0]])
    share = stationary(rates)
    flow = rates - np.diag(rates.sum(axis=1))
    assert share.sum() == pytest.approx(1.0) and np.allclose(share @ flow, 0.0, atol=1e-15)


# -------------------------------------------------------------------------------- bookkeeping
EVERYTHING = model(
    drift=Drift(0.02, 500.0, 0.01, 4e4), run_cv=0.01, stalls=StallProcess(1e-4, LENGTHS),
    evaluations=Evaluations(700, 30.0), **CASES["slow nodes, some replaced"],
)  # fmt: skip


def test_terms_add_up_and_marks_rise():
    marks = [0, 1, 1000, 2500, 5000]
    for case in (EVERYTHING, model(**CASES["in the background, causes, few spares"]), PLAIN):
        for n_steps in (5000, 1500):
            wanted = [m for m in marks if m < n_steps] + [n_steps]
            runs = simulate_runs(case, n_steps, 200, 1, marks=wanted)
            assert sum(runs.terms.values()) == pytest.approx(runs.total, rel=1e-10)
            assert np.all(np.diff(runs.marks, axis=1) > 0.0) and np.all(runs.marks[:, 0] == 0.0)
            np.testing.assert_allclose(runs.marks[:, -1], runs.total)
            assert np.allclose(runs.terms["ideal_steps"], 0.9 * n_steps)
    assert set(simulate_runs(EVERYTHING, 5000, 10, 1).terms) >= {"fail_slow", "lost_work"}


@pytest.mark.parametrize(
    "changes", [{}, {"interruptions": FAILING, "checkpoints": Checkpoints(300, 2.0)}]
)
@pytest.mark.parametrize("n_steps", [400, 4_000])
def test_what_the_model_is_wrong_by_is_one_factor_on_a_run(changes, n_steps):
    right, wrong = (
        simulate_runs(model(model_error=e, run_cv=0.01, **changes), n_steps, 2_000, 7)
        for e in (0.0, 0.1)
    )
    assert not right.terms["model_error"].any()
    stepping = wrong.total - sum(wrong.terms[k] for k in ("lost_work", "restarts", "checkpoints"))
    own = stepping - wrong.terms["model_error"]
    logs = np.log(stepping / own)
    assert logs.std() == pytest.approx(0.1, rel=0.05)
    assert abs(np.median(logs)) < 4 * 1.25 * 0.1 / logs.size**0.5
    assert abs(np.corrcoef(logs, own)[0, 1]) < 0.1
    np.testing.assert_allclose(sum(wrong.terms.values()), wrong.total, rtol=1e-9)
    if not changes:  # nothing else is drawn anew
        np.testing.assert_allclose(own, right.total, rtol=2e-3)


def test_lost_work_is_done_again():
    """Steps that count take what they would without failures: the rest is lost or waited for."""
    runs = simulate_runs(model(**CASES["stalls and failures"]), 5000, 4000, 1)
    calm = simulate_runs(model(drift=Drift(0.02, 2000.0), stalls=StallProcess(1e-3, LENGTHS),
                               evaluations=Evaluations(500, 30.0)), 5000, 4000, 1)  # fmt: skip
    assert np.all(runs.terms["evaluations"] == 300.0)
    assert np.all(runs.terms["checkpoints"] == (5000 // 300) * 20.0)
    for name in ("slow_steps", "stalls", "drift", "step_noise"):
        a, b = runs.terms[name], calm.terms[name]
        error = np.hypot(a.std(), b.std()) / 4000**0.5
        assert abs(a.mean() - b.mean()) < 5 * error + 2e-3 * abs(b.mean())


@pytest.mark.parametrize("changes", [{}, {"interruptions": FAILING}], ids=["walked", "events"])
def test_runs_that_differ_by_half_of_their_mean_still_take_time(changes):
    stalls = StallProcess(1e-3, LENGTHS)
    runs = simulate_runs(model(run_cv=0.5, stalls=stalls, **changes), 400, 1_000, 7)
    assert runs.total.min() > 0.04 * 400 and runs.total.std() > 0.4 * 400
    steady = sum(runs.terms[name] for name in ("ideal_steps", "slow_steps", "run_effect"))
    assert (steady > 0.0).all()


def test_the_first_runs_do_not_change_with_their_number():
    for case, n_many in ((EVERYTHING, 1500), (PLAIN, 5000)):
        for n_steps in (3000, 1500):
            few = simulate_runs(case, n_steps, 30, 9, marks=[100, 1000])
            many = simulate_runs(case, n_steps, n_many, 9, marks=[100, 1000])
            assert np.array_equal(few.total, many.total[:30])
            assert np.array_equal(few.marks, many.marks[:30])
            assert not np.any(few.total == simulate_runs(case, n_steps, 30, 10).total)
    assert np.unique(simulate_runs(PLAIN, 3000, 3000, 9).total).size == 3000


def test_a_known_drift_at_the_start():
    start = Drift(0.05, 1e9, initial=np.repeat([-1.0, 1.0], 25))
    for n_steps in (1000, 3000):
        runs = simulate_runs(model(drift=start), n_steps, 1000, 1)
        slow = runs.cluster >= 25
        ratio = runs.total[slow].mean() / runs.total[~slow].mean()
        assert ratio == pytest.approx(1.05 / 0.95, rel=0.01)


def test_runs_that_cannot_end_are_refused():
    fail = Interruptions(8000.0, 800)  # one every 13 s
    with pytest.raises(PrismError, match=r"no checkpoint.*run.checkpoint.interval"):
        simulate_runs(model(interruptions=fail), 3000, 10, 1)
    with pytest.raises(PrismError, match=r"checkpoint takes 3[0-9.]+ s"):
        case = model(interruptions=fail, checkpoints=Checkpoints(300, 5.0))
        simulate_runs(case, 3000, 10, 1)
    with pytest.raises(PrismError, match="restart .*per_1000_node_days"):
        case = model(interruptions=Interruptions(8000.0, 800, 0.0, 600.0),
                     checkpoints=Checkpoints(1, 0.0))  # fmt: skip
        simulate_runs(case, 3000, 10, 1)
    with pytest.raises(PrismError, match="can be followed"):
        case = model(interruptions=Interruptions(100.0, 8), checkpoints=Checkpoints(10, 0.0))
        simulate_runs(case, 10**12, 10, 1)
