"""Runs of simulated jobs: congestion that lasts, slow nodes, stalls, and what is said of them."""

import numpy as np
import pytest
from drawn_steps import draw_steps

import prism
from prism.plots import plot_progress

SMALL = {
    "model": {
        "n_layers": 4, "hidden_size": 512, "ffn_size": 2048, "n_heads": 8, "n_kv_heads": 8,
        "vocab_size": 1024, "seq_len": 512,
    },
    "parallelism": {"tp": 2, "pp": 2, "dp": 8, "microbatches": 4},
    "cluster": {"nodes": 8, "gpus_per_node": 4, "leaf_nodes": 1},
}  # fmt: skip
STOPS = {
    "steps": 2_000_000,  # two hours
    "checkpoint": {"interval_steps": 20_000, "write_s": 0.2},
    "failures": {"per_1000_node_days": 20_000, "detection": "5s", "restart": "10s"},
    "evaluation": {"interval_steps": 50_000, "duration": "5s"},
    "start": "2026-03-01T06:00",
    "price_per_gpu_hour": 2.0,
}
QUIET = {"rank": {"cv": 0.0, "lemon_fraction": 0.0}, "stall": {"rate_per_hour": 0.0}}
CONGESTED = {"probability": 0.1, "factor": 8.0, "duration_s": 300.0}


def small(effects=None, run=None, **cluster):
    return prism.load_job(SMALL | {
        "cluster": SMALL["cluster"] | cluster,
        "variability": {"effects": effects or {}, "host_scale": 1e-9, "model_error": 0.0},
        "run": {"failures": "none", **(run or {})},
    })  # fmt: skip


def estimate(job, replicates=6400, runs=1000):
    return prism.estimate(job, replicates=replicates, run_replicates=runs, seed=1)


def same_mean_step(found, n_steps):
    """The mean step of a run is that of the steps, as far as either is known."""
    step, run = found.step_time.values, found.time_to_train.values / n_steps
    means = step.reshape(-1, 64).mean(axis=1)
    error = np.hypot(means.std() / means.size**0.5, run.std() / run.size**0.5)
    assert abs(run.mean() - step.mean()) < 4.5 * error + 1e-3 * step.mean()


def test_lasting_congestion_keeps_the_mean_and_widens_runs():
    fleeting, lasting = (
        estimate(small({"regime": CONGESTED | {"duration_s": s}}, {"steps": 20_000}))
        for s in (1e-3, 300.0)
    )
    a, b = (x.time_to_train.values for x in (fleeting, lasting))
    error = np.hypot(b.std() / b.size**0.5, 20_000 * lasting.step_time.std() / 6400**0.5)
    assert abs(b.mean() - a.mean()) < 5 * error
    assert b.std() > 2.0 * a.std()
    assert prism.summary(lasting)["variance_by_term"]["congestion"] > 0.5


@pytest.mark.parametrize("n_steps", [2_000, 1_000_000])
def test_one_answer_has_one_mean_step(n_steps):
    """A leaf switch of all nodes is congested in 3 of 10 steps, of a step and of a run."""
    regime = {"probability": 0.3, "factor": 8.0, "duration_s": 3.0}
    found = estimate(small({"regime": regime}, {"steps": n_steps}, leaf_nodes=4))
    assert found.step_time.std() > 0.1 * found.step_time.mean()
    same_mean_step(found, n_steps)


@pytest.mark.parametrize("entity", ["rank", "node", "job"])
@pytest.mark.parametrize("n_steps", [1_000, 50_000])
def test_stalls_taken_apart_and_put_together_are_the_same_step(entity, n_steps):
    stall = {"entity": entity, "rate_per_hour": 360.0, "duration_s": 0.2, "duration_cv": 1.0}
    found = estimate(small(QUIET | {"stall": stall}, {"steps": n_steps}))
    same_mean_step(found, n_steps)
    term = found.run_term_time.sel(term="stalls").values / found.time_to_train.values
    assert term.mean() > 0.01


@pytest.mark.parametrize("cv", [0.0, 1.0])
def test_stalls_of_the_job_have_their_rate_and_lengths(cv):
    """Compound Poisson: the mean n l, the variance n l^2 (1 + cv^2)."""
    stall = {"entity": "job", "rate_per_hour": 36.0, "duration_s": 5.0, "duration_cv": cv}
    found = estimate(small(QUIET | {"stall": stall}, {"steps": 100_000}), runs=4000)
    stalls = found.run_term_time.sel(term="stalls").values
    count = 36.0 / 3600.0 * float(found.time_to_train.mean())
    assert stalls.mean() == pytest.approx(5.0 * count, rel=0.05)
    assert stalls.var() == pytest.approx(25.0 * (1.0 + cv**2) * count, rel=0.12)


@pytest.mark.parametrize("kind", ["compute", "network"])
def test_a_slow_node_of_a_run_costs_what_it_costs_in_a_job(kind):
    """A fail-slow node all the time is `cluster.node_slowdowns`, over all nodes in turn."""
    calm = float(draw_steps(small(QUIET), 1024, 1).step_time.mean())
    ratios = [
        float(draw_steps(small(QUIET, node_slowdowns={n: {kind: 3.0}}), 1024, 1)
              .step_time.mean()) / calm
        for n in (0, 7)
    ]  # fmt: skip
    slow = {"rate_per_1000_node_days": 2e5, "duration": "10s", "duration_cv": 0.0, "factor": 3.0,
            "kind": kind}  # fmt: skip
    found = estimate(small(QUIET | {"fail_slow": slow}, {"steps": 200_000}), 640)
    lost = found.run_term_time.sel(term="fail_slow").values.sum()
    covered = -np.expm1(-2e5 * 8 / 1000 / 86_400 * 10.0) * found.time_to_train.values.sum()
    assert lost / covered == pytest.approx(np.mean([1.0 - 1.0 / r for r in ratios]), rel=0.15)


def test_what_is_not_said_is_filled_with_published_figures():
    run = {"failures": {}, "checkpoint": {"interval": "10min", "mode": "async"},
           "steps": 1000}  # fmt: skip
    found = prism.summary(estimate(small(None, run), 640, 100))
    # 419 failures of 2,048 nodes of 8 in 54 days; these have 4 GPUs
    assert found["failure_model"]["per_1000_node_days"] == pytest.approx(1000 * 419 / 2048 / 54 / 2)
    assert found["failure_model"]["down"] == 600.0
    # 14 bytes a parameter at 2 TB/s for 16,384 GPUs
    n_parameters = 4 * (4 * 512**2 + 3 * 512 * 2048 + 2 * 512) + 2 * 1024 * 512 + 512
    expected = 14 * n_parameters / (32 * 2e12 / 16_384)
    assert found["checkpoint"]["write"] == pytest.approx(expected, rel=0.35)


# ----------------------------------------------------------------------------------- estimates
@pytest.fixture(scope="module")
def stopped():
    return estimate(small(None, STOPS), runs=500)


def test_the_summary_of_an_interrupted_run(stopped):
    found = prism.summary(stopped)
    total = found["time_to_train"]["mean"]
    rate = 20_000 * 8 / 1000 / 86_400.0
    assert found["failures"] == pytest.approx(rate * total, rel=0.05)
    delay = found["delay_by_term"]
    assert delay["evaluations"] == 200.0
    assert delay["restarts"] == pytest.approx(15.0 * found["failures"], rel=0.02)
    stops = sum(delay[x] for x in ("evaluations", "checkpoints", "lost_work", "restarts"))
    assert found["ettr"] == pytest.approx(1.0 - stops / total, abs=0.001)
    assert found["cost"]["mean"] == pytest.approx(total / 3600 * 32 * 2.0)
    assert found["finish_date"]["date"].startswith("2026-03-0")


def test_the_best_checkpoint_interval_saves_what_is_said(stopped):
    found = prism.summary(stopped)
    steps = found["checkpoint"]["best_interval_steps"]
    better = STOPS | {"checkpoint": {"interval_steps": steps, "write_s": 0.2}}
    least = prism.summary(estimate(small(None, better), runs=500))
    saved = found["time_to_train"]["mean"] - least["time_to_train"]["mean"]
    error = np.hypot(found["time_to_train"]["std"], least["time_to_train"]["std"]) / 500**0.5
    assert abs(saved - found["checkpoint"]["costs_more"]) < 4 * error
    assert least["checkpoint"]["costs_more"] == pytest.approx(0.0, abs=1e-6)


def test_an_interval_beyond_the_end_is_no_checkpoint():
    """It costs what the run as a whole loses, and not what a longer run would."""
    rare = {"steps": 1000, "failures": {"per_1000_node_days": 20_000, "restart": "10s"}}
    one, never = (
        prism.summary(estimate(small(None, rare | {"checkpoint": c}), 640, 200))["checkpoint"]
        for c in ({"interval_steps": n, "write_s": 0.2} for n in (1000, 10**9))
    )
    assert one["best_interval_steps"] == never["best_interval_steps"] == 1000
    assert one["costs_more"] == never["costs_more"] == 0.0


@pytest.mark.parametrize(("times", "drawn"), [(1.2, 1), (20.0, 0)])
def test_a_far_deadline_leaves_the_run_its_room(stopped, times, drawn):
    last = float(stopped.progress_time.max())
    ax = plot_progress(stopped.to_xarray().assign(deadline=times * last))
    assert ax.get_xlabel() == "date" and ax.lines[0].get_ydata()[-1] == 1.0
    assert sum("deadline" in str(line.get_label()) for line in ax.lines) == drawn
    assert sum("deadline" in text.get_text() for text in ax.texts) == 1 - drawn
    left, right = ax.get_xlim()
    assert (right - left) * 86_400.0 < 1.5 * last
