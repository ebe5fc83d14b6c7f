"""Runs of known steps: what each key of `run` and each effect on a run adds, in closed form.

Steps take 3 s to the bit, so that all that a run has beyond them is what the test says. The twin's
runs (test_twin.py) have everything at once; this has one thing at a time.
"""

import json
import math

import numpy as np
import pytest

import prism

STEP_S, NODES, DAY_S = 3.0, 8, 86_400.0
MODEL = {
    "n_layers": 2, "hidden_size": 256, "ffn_size": 512, "n_heads": 4, "vocab_size": 512,
    "seq_len": 128,
}  # fmt: skip


def job(run, effects=None, **blocks):
    """Eight nodes of one GPU each: steps of 3 s, or what the blocks say."""
    return prism.load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"dp": NODES, "microbatches": 1},
        "cluster": {"nodes": NODES, "gpus_per_node": 1},
        "variability": {"library": None, "effects": effects or {}}, "run": run,
    } | blocks)  # fmt: skip


def runs_of(made, replicates=64, runs=2000, **options):
    """Runs of a job: the dataset, its figures, terms [s] by name."""
    found = prism.estimate(made, replicates=replicates, run_replicates=runs, seed=1, **options)
    terms = found.run_term_time.to_dataset("term")
    return found, prism.summary(found), {name: terms[name].values for name in terms}


def close(sample, expected, sigmas=4.5, rel=0.0):
    """Check the mean of a sample against a figure."""
    error = sample.std() / sample.size**0.5
    assert abs(sample.mean() - expected) < sigmas * error + rel * abs(expected) + 1e-9


# -- steps, pauses, what they cost -------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 7, 100, 12_345])
def test_a_run_is_its_steps(n):
    found, figures, _ = runs_of(job({"steps": n}), runs=8)
    np.testing.assert_allclose(found.time_to_train, n * STEP_S, rtol=1e-6)
    assert figures["steps"] == n and figures["time_to_train"]["std"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("run", "seconds", "term"),
    [
        ({"evaluation": {"interval_steps": 30, "duration": "90s"}}, 3 * 90.0, "evaluations"),
        ({"checkpoint": {"interval_steps": 40, "write_s": 7.0, "mode": "blocking"}}, 14.0,
         "checkpoints"),
        ({"checkpoint": {"interval": "2min", "write_s": 7.0, "mode": "blocking"}}, 14.0,
         "checkpoints"),
        ({"checkpoint": {"interval_steps": 40, "write_s": 7.0, "mode": "async"}}, 0.0, None),
    ],
)  # fmt: skip
def test_pauses_add_up(run, seconds, term):
    found, figures, terms = runs_of(job({"steps": 100, "failures": "none", **run}), runs=8)
    np.testing.assert_allclose(found.time_to_train, 100 * STEP_S + seconds, rtol=1e-6)
    if term:
        assert figures["delay_by_term"][term] == pytest.approx(seconds)
    rare = runs_of(job({"steps": 100, "failures": {"per_1000_node_days": 1e-6}} | run), runs=8)[1]
    assert rare["ettr"] == pytest.approx(300.0 / (300.0 + seconds), rel=1e-3)


def test_price_deadline_and_dates():
    made = job({"steps": 1200, "price_per_gpu_hour": 2.5, "start": "2026-01-05T06:00",
                "deadline": "1h"})  # fmt: skip
    _, figures, _ = runs_of(made, runs=8)
    assert figures["cost"]["mean"] == pytest.approx(NODES * 2.5)  # one hour
    two_nodes = made.replace("cluster.nodes=2", "cluster.gpus_per_node=4")
    assert runs_of(two_nodes, runs=8)[1]["cost"]["mean"] == pytest.approx(NODES * 2.5)
    assert figures["finish_date"]["date"].startswith("2026-01-05T07:00:0")
    for deadline, probability in (("59min", 0.0), ("61min", 1.0)):
        found = runs_of(made, runs=8, deadline=deadline)[1]["finish_by"]
        assert found["probability"] == probability


def test_probabilities_of_dates_are_quantiles_of_runs():
    made = job({"steps": 1000, "start": "2026-01-05"}, {"run": {"cv": 0.1}})
    found, _, _ = runs_of(made)
    runs = found.time_to_train.values
    for q in (0.5, 0.9, 0.99):
        date = prism.summary(prism.estimate(made, replicates=64, run_replicates=2000, seed=1,
                                            probability=q))["finish_date"]["date"]  # fmt: skip
        seconds = (np.datetime64(date) - np.datetime64("2026-01-05")) / np.timedelta64(1, "s")
        assert seconds == pytest.approx(np.quantile(runs, q), abs=1.0)


@pytest.mark.parametrize(("tokens", "steps"), [(1, 1), (1024, 1), (1025, 2), (10_240, 10)])
def test_a_run_for_tokens_has_whole_steps(tokens, steps):
    made = job({"tokens": tokens}, model=MODEL)  # 8 replicas of one sequence of 128 tokens
    assert made.n_steps == steps
    assert runs_of(made, runs=2)[1]["steps"] == steps


# -- what all steps share ----------------------------------------------------------------------


def drift_std(n, cv, tau):
    """Spread of n steps whose relative effect is an AR(1) series [s], from its covariances."""
    lags = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    r = math.exp(-STEP_S / tau) if tau else 0.0
    return STEP_S * cv * math.sqrt(float((r**lags if tau else lags == 0).sum()))


@pytest.mark.parametrize("tau", [0.0, 30.0, 900.0, 1e7])
@pytest.mark.parametrize("n", [50, 2500])
def test_the_step_effect_lasts_as_long_as_it_says(tau, n):
    made = job({"steps": n}, {"step": {"cv": 0.02, "correlation_time_s": tau}})
    found, _, _ = runs_of(made, replicates=6400, runs=4000)
    assert float(found.time_to_train.std()) == pytest.approx(drift_std(n, 0.02, tau), rel=0.06)
    close(found.time_to_train.values, n * STEP_S, rel=1e-3)


@pytest.mark.parametrize("n", [400, 3000])  # drawn one by one, and in sums
@pytest.mark.parametrize(("start", "phase"), [("15:00", 0.0), ("03:00", math.pi), ("21:00", None)])
def test_the_daily_wave_is_at_its_hour(start, phase, n):
    made = job({"steps": n, "start": f"2026-01-05T{start}"}, {"step": {"diurnal_cv": 0.05}})
    if phase is None:  # its peak six hours later
        made, phase = made.replace("variability.effects.step.diurnal_peak_h=21"), 0.0
    found, _, _ = runs_of(made, runs=8)
    at = phase + 2.0 * math.pi * STEP_S * np.arange(n) / DAY_S
    wave = 1.0 + math.sqrt(2.0) * 0.05 * np.cos(at)
    np.testing.assert_allclose(found.time_to_train, STEP_S * wave.sum(), rtol=1e-3)


def test_a_day_of_the_wave_is_no_delay():
    made = job({"steps": 28_800}, {"step": {"diurnal_cv": 0.05}})
    found, _, _ = runs_of(made, runs=8)
    # slow hours last a little longer: cv^2 fewer
    np.testing.assert_allclose(found.time_to_train, DAY_S, rtol=2 * 0.05**2)


@pytest.mark.parametrize("n", [10, 5000])
def test_runs_differ_by_their_own_level(n):
    found, figures, _ = runs_of(job({"steps": n}, {"run": {"cv": 0.03}}), runs=4000)
    times = found.time_to_train.values / (n * STEP_S)
    assert times.std() == pytest.approx(0.03, rel=0.06)
    close(times, 1.0)
    assert figures["variance_by_term"]["run_effect"] == pytest.approx(1.0, abs=0.01)


def test_the_model_s_error_is_a_factor_on_a_run():
    made = job({"steps": 500}).replace("variability.model_error=0.1")
    found, figures, _ = runs_of(made, runs=4000)
    logs = np.log(found.time_to_train.values / (500 * STEP_S))
    assert logs.std() == pytest.approx(0.1, rel=0.06)
    assert abs(np.median(logs)) < 4.5 * 1.25 * 0.1 / logs.size**0.5
    assert figures["model_error"]["spread"] == 0.1
    assert figures["variance_by_term"]["model_error"] == pytest.approx(1.0, abs=0.01)


def test_the_error_of_a_mean_holds_the_model_s():
    """Its draws are one per run: of 400 runs a twentieth of its spread."""
    made = job({"steps": 1000}, variability={"library": None, "model_error": 0.1, "effects": {
        "rank": {"cv": 0.001}}})  # fmt: skip
    figures = runs_of(made, replicates=640, runs=400)[1]["time_to_train"]
    assert figures["mean_se"] == pytest.approx(0.1 * 1000 * STEP_S / 20.0, rel=0.2)


@pytest.mark.parametrize("n", [100, 4000])
def test_the_noise_of_steps_evens_out_over_a_run(n):
    made = job({"steps": n}, {"jitter": {"mean_s": 0.5, "cv": 1.0}})
    found, _, _ = runs_of(made, replicates=6400, runs=2000)
    close(found.time_to_train.values, n * (STEP_S + 0.5), rel=0.01)
    assert float(found.time_to_train.std()) == pytest.approx(0.5 * n**0.5, rel=0.15)


# -- failures ----------------------------------------------------------------------------------

OFTEN = 2000.0  # failures per 1,000 node-days: one of the eight nodes fails every 1.5 hours
RATE = OFTEN * NODES / 1000.0 / DAY_S


def failing(checkpoint=None, steps=20_000, effects=None, rate=OFTEN, **failures):
    """Runs of 17 hours with a failure every 1.5 hours."""
    stop = {"per_1000_node_days": rate, "restart": 0, **failures}
    every = {"interval_steps": 100, "write_s": 0.0, "mode": "blocking"} | (checkpoint or {})
    return job({"steps": steps, "failures": stop, "checkpoint": every}, effects)


def daly(work_s, interval_s, write_s, down_s):
    """Expected time of a run with failures (Daly, 2006, equation 20) [s]."""
    each = math.exp(RATE * down_s) * math.expm1(RATE * (interval_s + write_s)) / RATE
    return work_s / interval_s * each


@pytest.mark.parametrize(
    ("checkpoint", "failures", "interval_s", "write_s", "down_s"),
    [
        ({}, {}, 300.0, 0.0, 0.0),
        ({}, {"restart": "8min"}, 300.0, 0.0, 480.0),
        ({}, {"restart": "5min", "detection": "3min"}, 300.0, 0.0, 480.0),
        ({"interval_steps": 400, "write_s": 60.0}, {"restart": "1min"}, 1200.0, 60.0, 60.0),
        # in the background a failure within 150 s of a checkpoint loses the interval before it
        ({"write_s": 150.0, "mode": "async"}, {}, 300.0, 0.0, 150.0),
        ({}, {"causes": {"gpu": {"share": 3, "restart": "10min"},
                         "software": {"share": 1, "restart": "2min"}}}, 300.0, 0.0, 480.0),
        ({}, {"causes": {"gpu": {"share": 1, "restart": "2min", "detection": "6min"},
                         "network": {"share": 2, "restart": "8min", "detection": 0}}},
         300.0, 0.0, 480.0),
    ],
)  # fmt: skip
def test_failures_have_the_closed_form(checkpoint, failures, interval_s, write_s, down_s):
    found, figures, terms = runs_of(failing(checkpoint, **failures))
    expected = daly(60_000.0, interval_s, write_s, down_s)
    # a step in which a failure falls is lost whole
    close(found.time_to_train.values, expected, rel=1e-3)
    assert expected > 61_000.0
    failed = found.run_failures.values
    close(failed, RATE * found.time_to_train.values.mean())
    if checkpoint.get("mode") != "async":
        restarts = failed.mean() * down_s
        close(terms["restarts"], restarts, rel=0.05)
    down = sum(terms.get(x, 0.0) for x in ("restarts", "lost_work", "spares", "checkpoints"))
    assert figures["ettr"] == pytest.approx((1.0 - down / found.time_to_train.values).mean())
    wrong = daly(60_000.0, interval_s, write_s, down_s + 60.0)  # negative control
    error = float(found.time_to_train.std()) / 2000**0.5
    assert abs(found.time_to_train.mean() - wrong) > 4.5 * error


def test_shares_of_variance_are_covariances_with_the_run():
    """Restarts and lost work rise together: each has half of what they share."""
    found, figures, terms = runs_of(failing({"interval_steps": 500}, restart="5min"))
    total = found.time_to_train.values
    for name in ("restarts", "lost_work"):
        share = np.cov(terms[name], total)[0, 1] / total.var(ddof=1)
        assert figures["variance_by_term"][name] == pytest.approx(share, rel=0.02)
    assert np.corrcoef(terms["restarts"], terms["lost_work"])[0, 1] > 0.3


def test_a_failure_during_a_restart_starts_it_again():
    """Restarts of a third of the time between failures: e^(r R) of them, not one each."""
    found, _, terms = runs_of(failing(restart="30min"), runs=2000)
    down_s = math.expm1(RATE * 1800.0) / RATE  # of each failure that stops steps
    stops = found.run_failures.values.mean() / math.exp(RATE * 1800.0)
    assert terms["restarts"].mean() == pytest.approx(stops * down_s, rel=0.03)
    assert math.exp(RATE * 1800.0) > 1.35


def test_failures_come_by_nodes_and_days():
    one, two = (runs_of(failing(rate=r, restart="1min"))[0].run_failures.values
                for r in (OFTEN / 2, OFTEN))  # fmt: skip
    assert two.mean() == pytest.approx(2.0 * one.mean(), rel=0.05)
    assert two.var() == pytest.approx(two.mean(), rel=0.15)  # a Poisson process


def test_repairs_are_exponential_and_a_run_waits_for_them():
    """No spare: each failure waits for its own repair."""
    made = failing(spares=0, repair="20min", rate=OFTEN / 4)
    found, figures, terms = runs_of(made, runs=6000)
    failed, waits = found.run_failures.values, terms["spares"]
    once = waits[failed == 1]
    close(once, 1200.0, rel=0.12)  # a second failure meanwhile makes it two
    assert once.std() == pytest.approx(1200.0, rel=0.15)
    assert figures["delay_by_term"]["spares"] == pytest.approx(waits.mean())


def test_spares_save_waiting_until_they_are_used_up():
    waits = [
        runs_of(failing(repair="5h", **more))[2]["spares"].mean()
        for more in ({"spares": 0}, {"spares": 1}, {"spares": 4})
    ]
    assert waits[0] > 1.2 * waits[1] > 2.4 * waits[2] > 0.0
    assert "spares" not in runs_of(failing(restart="1min"))[1]["delay_by_term"]


@pytest.mark.parametrize(("spares", "waits"), [(0, 1.0), (7, 1.0), (8, 0.0)])
def test_nodes_that_fail_together_need_as_many_spares(spares, waits):
    """A rack of eight: seven spares are none, and it waits once for all of them."""
    rack = {"rack": {"share": 1.0, "nodes": 8, "repair": "20min"}}
    made = failing(rate=OFTEN / 16, causes=rack, spares=spares)
    found, _, terms = runs_of(made, runs=6000)
    once = found.run_failures.values == 1
    waited = terms.get("spares", np.zeros(once.size))[once]
    close(waited, 1200.0 * waits, rel=0.12)
    assert once.mean() > 0.05


@pytest.mark.parametrize("cause, more", [
    ({"nodes": 2}, {}), ({"repair": "1h"}, {}), ({"nodes": 2, "replace": False}, {"spares": 1}),
    ({"nodes": 0}, {"spares": 1}),
])  # fmt: skip
def test_causes_without_effect_are_refused(cause, more):
    with pytest.raises(prism.PrismError, match="causes.rack."):
        failing(causes={"rack": {"share": 1.0} | cause}, **more)


def test_a_rack_comes_back_together():
    """Beside single failures it takes the spares that these would have had."""
    alone, both = (
        runs_of(failing(spares=8, repair="30min", rate=OFTEN / 4,
                        causes={"node": {"share": 1.0}} | rack), runs=3000)[2]
        for rack in ({}, {"rack": {"share": 1.0, "nodes": 8}})
    )  # fmt: skip
    assert both["spares"].mean() > 5.0 * alone["spares"].mean()


def test_causes_that_replace_no_node_need_no_spare():
    causes = {"software": {"share": 1, "replace": False}}
    _, _, terms = runs_of(failing(spares=0, repair="5h", causes=causes))
    assert terms.get("spares", np.zeros(1)).mean() == 0.0


@pytest.mark.parametrize("write_s", [5.0, 60.0])
def test_the_best_checkpoint_interval_is_that_of_least_time(write_s):
    made = failing({"interval_steps": 1000, "write_s": write_s}, restart="5min")
    _, figures, _ = runs_of(made)
    assert figures["best_checkpoint_interval"] == pytest.approx(
        math.sqrt(2.0 * write_s / RATE), rel=0.12
    )  # Young (1974)
    best = figures["checkpoint"]["best_interval_steps"]
    expected = {n: daly(60_000.0, 3.0 * n, write_s, 300.0) for n in (best - 20, best, best + 20)}
    assert expected[best] == min(expected.values())
    more = daly(60_000.0, 3000.0, write_s, 300.0) - expected[best]
    assert figures["checkpoint"]["costs_more"] == pytest.approx(more, rel=0.1)


def test_replaced_nodes_are_drawn_anew_one_by_one():
    """Clusters of a run's nodes differ; each failure renews one node of eight."""
    ranks = {"rank": {"cv": 0.05}}
    calm, failed = (
        float(runs_of(failing(effects=ranks, rate=rate), replicates=6400, runs=4000)[0]
              .time_to_train.std())
        for rate in (1.0, OFTEN)
    )  # fmt: skip
    # 12 failures leave a share x of (1 - x) / k of it, k = 12 / 8, after a time constant of 8
    k = RATE * 61_000.0 / NODES
    kept = math.sqrt(2.0 * (k - 1.0 + math.exp(-k)) / k**2)
    assert failed / calm == pytest.approx(kept, rel=0.12)


def test_a_gpu_costs_less_while_it_waits_and_not_nothing():
    """Energy has the time that a run stands still, at less than the power of a step."""
    stops = {"per_1000_node_days": 2e5, "restart": "30s"}
    made = job({"steps": 2_000_000, "failures": "none"}, model=MODEL,
               variability={"library": "h100-healthy", "model_error": 0.0,
                            "host_scale": 1e-9})  # fmt: skip
    every = {"interval_steps": 1000, "write_s": 0, "mode": "blocking"}
    failed = made.replace({"run.failures": stops, "run.checkpoint": every})
    calm, found = (runs_of(each, runs=200)[1] for each in (made, failed))
    more_s = found["time_to_train"]["mean"] - calm["time_to_train"]["mean"]
    more_j = 3.6e9 * (found["energy"]["gpu_mwh_mean"] - calm["energy"]["gpu_mwh_mean"])
    watts = more_j / more_s / NODES
    assert more_s > 0.1 * calm["time_to_train"]["mean"]
    assert 60.0 < watts < 0.95 * calm["energy"]["gpu_power_w"]
    for each in (calm, found):
        energy = each["energy"]["gpu_power_w"] * NODES * each["time_to_train"]["mean"] / 3.6e9
        assert each["energy"]["gpu_mwh_mean"] == pytest.approx(energy)


# -- fail-slow nodes ---------------------------------------------------------------------------


def slow(**more):
    given = {"rate_per_1000_node_days": 1000.0, "factor": 2.0, "duration": "20min",
             "duration_cv": 1.0, "kind": "compute", **more}  # fmt: skip
    return {"fail_slow": given}


def test_a_slow_node_slows_the_job_for_as_long_as_it_says():
    """Seconds in episodes, times what is lost of each: half at a factor of two."""
    found, _, terms = runs_of(job({"steps": 20_000, "failures": "none"}, slow()), runs=4000)
    total = float(found.time_to_train.mean())
    share = 1000.0 * NODES / 1000.0 / DAY_S * 1200.0  # in episodes, one at a time
    covered = -math.expm1(-share)  # several at once are as slow as one
    close(terms["fail_slow"], total * covered * 0.5, rel=0.03)


def test_an_episode_is_as_long_in_the_mean_whatever_its_spread():
    narrow, wide = (
        runs_of(job({"steps": 20_000, "failures": "none"}, slow(duration_cv=cv)), runs=4000)[2]
        for cv in (0.0, 2.0)
    )
    assert wide["fail_slow"].mean() == pytest.approx(narrow["fail_slow"].mean(), rel=0.06)
    assert wide["fail_slow"].std() > 1.3 * narrow["fail_slow"].std()


def test_any_node_may_be_the_slow_one():
    """One stage has slack: half of the nodes cost nothing there."""
    model = {"durations": {"forward_s": [0.1, 0.025], "backward_s": [0.2, 0.05]}}
    layout = {"pp": 2, "dp": NODES // 2, "microbatches": 64}
    made = job({"steps": 3000, "failures": "none"}, slow(), model=model, parallelism=layout)
    found, _, terms = runs_of(made, runs=4000)
    share = 1000.0 * NODES / 2 / 1000.0 / DAY_S * 1200.0
    expected = float(found.time_to_train.mean()) * -math.expm1(-share) * 0.5
    assert terms["fail_slow"].mean() == pytest.approx(expected, rel=0.12)


def test_a_slow_node_that_is_found_is_replaced():
    """After its detection, with a restart and the work since the last checkpoint."""
    run = {"steps": 20_000, "failures": {"per_1000_node_days": 0.001, "restart": "2min"},
           "checkpoint": {"interval_steps": 100, "write_s": 0, "mode": "blocking"}}  # fmt: skip
    left, found = (
        runs_of(job(run, slow(duration_cv=0.0, **more)), runs=2000)[2]
        for more in ({}, {"detection": "4min", "replace": True})
    )
    episodes = NODES * sum(found.values()).mean() / DAY_S
    # half of the four minutes, or all since the last checkpoint, at most 300 s of steps
    lost = (found["fail_slow"] + found["lost_work"]).mean() / episodes
    assert 120.0 < lost < 300.0 + 120.0
    assert found["restarts"].mean() / episodes == pytest.approx(120.0, rel=0.1)
    assert left["fail_slow"].mean() > 3.0 * found["fail_slow"].mean()
    assert left["restarts"].mean() < 1.0


# -- a run in progress -------------------------------------------------------------------------


@pytest.fixture
def half_done(tmp_path):
    """A log of 500 steps that took 5 % longer than the job says."""
    path = tmp_path / "steps.csv"
    rng = np.random.default_rng(1)
    steps = 1.05 * STEP_S * (1.0 + 0.01 * rng.standard_normal(500))
    path.write_text("step,step_s\n" + "".join(f"{i},{x:.6f}\n" for i, x in enumerate(steps)))
    return path, steps


def test_completed_steps_condition_the_rest(half_done):
    path, steps = half_done
    made = job({"steps": 1000, "deadline": "1h"}, {"run": {"cv": 0.1}, "step": {"cv": 0.01}})
    before = runs_of(made)[0]
    found, figures, _ = runs_of(made, completed=path)
    total = found.time_to_train.values
    close(total, steps.sum() + 500 * 1.05 * STEP_S, rel=2e-3)
    assert total.std() < 0.2 * float(before.time_to_train.std())
    np.testing.assert_allclose(total - found.time_left.values, steps.sum(), rtol=1e-6)
    assert figures["finish_by"]["probability"] == (total <= 3600.0).mean()
    with pytest.raises(prism.PrismError):
        prism.estimate(made, replicates=64, seed=1, steps=400, completed=path)


# -- bookkeeping -------------------------------------------------------------------------------

EVERYTHING = job(
    {"steps": 5000, "evaluation": {"interval_steps": 700, "duration": "30s"},
     "failures": {"per_1000_node_days": OFTEN, "restart": "2min", "spares": 1, "repair": "1h"},
     "checkpoint": {"interval_steps": 300, "write_s": 20, "mode": "blocking"}},
    {"rank": {"cv": 0.01}, "step": {"cv": 0.02, "correlation_time_s": 500.0, "diurnal_cv": 0.01},
     "run": {"cv": 0.01}, "jitter": {"mean_s": 0.1, "cv": 1.0}, **slow()},
)  # fmt: skip


@pytest.mark.parametrize("steps", [1500, 5000])
def test_terms_add_up_and_progress_rises(steps):
    made = EVERYTHING.replace(f"run.steps={steps}")
    found, figures, terms = runs_of(made, replicates=640, runs=500)
    np.testing.assert_allclose(sum(terms.values()), found.time_to_train, rtol=1e-9)
    assert sum(figures["variance_by_term"].values()) == pytest.approx(1.0, abs=1e-6)
    delay = figures["time_to_train"]["mean"] - steps * figures["ideal_step_time"]
    assert sum(figures["delay_by_term"].values()) == pytest.approx(delay, rel=1e-6)
    np.testing.assert_allclose(terms["ideal_steps"], steps * STEP_S, rtol=1e-6)
    progress = found.progress_time.values
    assert (np.diff(progress, axis=1) >= 0.0).all() and (progress[:, 0] == 0.0).all()


def test_short_runs_end_when_all_that_are_left_wait_for_a_repair():
    """Other clocks run out meanwhile: under this seed for most runs of a chunk that are left."""
    made = EVERYTHING.replace("run.steps=1500")
    found = prism.estimate(made, replicates=640, run_replicates=8192, seed=3)
    assert float(found.time_to_train.min()) > 1500 * STEP_S


def test_the_first_runs_do_not_change_with_their_number():
    few, many = (runs_of(EVERYTHING, replicates=640, runs=n)[0].time_to_train.values
                 for n in (30, 1500))  # fmt: skip
    assert np.array_equal(few, many[:30])
    assert np.unique(many).size == many.size
    other = prism.estimate(EVERYTHING, replicates=640, run_replicates=30, seed=2)
    assert not np.any(other.time_to_train.values == few)


@pytest.mark.parametrize(
    ("run", "word"),
    [
        ({"steps": 3000, "failures": {"per_1000_node_days": 1e6}}, "checkpoint"),
        ({"steps": 3000, "failures": {"per_1000_node_days": 1e6, "restart": "10min"},
          "checkpoint": {"interval_steps": 1, "write_s": 0}}, "restart"),
        ({"steps": 10, "checkpoint": {"interval_steps": 2, "write_s": 100, "mode": "async"}},
         "run.checkpoint"),
        ({"steps": 2 * 10**9, "failures": {"per_1000_node_days": 1000},
          "checkpoint": {"interval_steps": 10, "write_s": 0}}, "followed"),
    ],
)  # fmt: skip
def test_runs_that_cannot_end_are_refused(run, word):
    with pytest.raises(prism.PrismError, match=word):
        prism.estimate(job(run), replicates=64, seed=1)


def test_a_run_may_be_shown_as_it_was_made(run, tmp_path):
    prism.save(runs_of(EVERYTHING, replicates=640, runs=100)[0], tmp_path / "result.nc")
    status, out, _ = run("show", tmp_path / "result.nc", "--json")
    shown = json.loads(out)["summary"]
    assert status == 0 and shown["failures"] > 0.0 and 0.0 < shown["ettr"] < 1.0
    ax = prism.plots.plot_progress(prism.load(tmp_path / "result.nc"))
    assert ax.lines[0].get_ydata()[-1] == 1.0
