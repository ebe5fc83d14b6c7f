"""Runs of a job: failures, checkpoints, evaluations, slow nodes, a run under way."""

import numpy as np
import pytest

import prism
from prism import estimate, summary

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


def small(effects=None, run=None, **cluster):
    values = SMALL | {"variability": {"effects": effects or {}}, "run": run or {}}
    return prism.load_job(values | {"cluster": SMALL["cluster"] | cluster})


# ------------------------------------------------------------------------------- slow nodes
@pytest.mark.parametrize("kind", ["compute", "network"])
def test_episodes_of_a_slow_node_cost_what_a_known_slow_node_does(kind):
    """All nodes in turn, for a tenth of the time in the mean."""
    quiet = {"rank": {"cv": 0.0, "lemon_fraction": 0.0}}
    steps = 100_000

    def mean(**more):
        found = prism.simulate(small(quiet, None, **more), replicates=640, seed=1)
        return float(found.step_time.mean())

    plain = mean()
    each = [mean(node_slowdowns={node: {kind: 2.0}}) / plain for node in range(8)]
    length = 0.01 * steps * plain
    rate = 0.1 / 8 / length * 86_400 * 1000  # per 1,000 node-days
    slow = {"rate_per_1000_node_days": rate, "kind": kind, "factor": 2.0, "duration": length}
    job = small(quiet | {"fail_slow": slow})
    found = estimate(job, replicates=640, run_replicates=500, steps=steps, seed=1)
    x = found.time_to_train.to_numpy() / steps / plain
    share = 0.1 * (np.mean(each) - 1.0)
    # of the time, so a little less of the steps; overlaps are rare
    assert x.mean() - 1.0 == pytest.approx(share / np.mean(each), rel=0.25)
    assert x.std() > 0.1 * share


def test_a_checkpoint_longer_than_its_interval_is_refused():
    job = small(None, {"checkpoint": {"interval_steps": 2, "write_s": 100, "mode": "async"}})
    with pytest.raises(prism.PrismError, match="run.checkpoint"):
        estimate(job, replicates=64, seed=1)


def test_one_answer_has_one_mean_step_where_leaves_are_congested():
    """A leaf switch of all nodes is congested in 3 of 10 steps, of a step and of a run."""
    regime = {"regime": {"probability": 0.3, "factor": 8.0, "duration_s": 3.0}}
    for n_steps in (2_000, 1_000_000):
        found = estimate(small(regime, leaf_nodes=4), replicates=6400, steps=n_steps, seed=1)
        step, run = found.step_time.to_numpy(), found.time_to_train.to_numpy() / n_steps
        error = np.hypot(step.std() / step.size**0.5, run.std() / run.size**0.5)
        assert step.std() > 0.1 * step.mean()
        assert abs(run.mean() - step.mean()) < 4 * error


# ----------------------------------------------------------------------------------- estimates
@pytest.fixture(scope="module")
def stopped():
    return estimate(small(None, STOPS), replicates=6400, run_replicates=500, seed=1)


def test_the_summary_of_an_interrupted_run(stopped):
    found = summary(stopped)
    total = found["time_to_train"]["mean"]
    terms = stopped.run_term_time.to_numpy()
    np.testing.assert_allclose(terms.sum(axis=1), stopped.time_to_train)
    assert sum(found["variance_by_term"].values()) == pytest.approx(1.0, abs=1e-6)
    ideal = found["steps"] * found["ideal_step_time"]
    assert sum(found["delay_by_term"].values()) == pytest.approx(total - ideal, rel=1e-9)
    rate = 20_000 * 8 / 1000 / 86_400.0
    assert found["failures"] == pytest.approx(rate * total, rel=0.05)
    assert found["delay_by_term"]["evaluations"] == 200.0
    assert found["delay_by_term"]["restarts"] == pytest.approx(15.0 * found["failures"], rel=0.02)
    kept = (
        1.0
        - sum(
            found["delay_by_term"][x]
            for x in ("evaluations", "checkpoints", "lost_work", "restarts")
        )
        / total
    )
    assert found["ettr"] == pytest.approx(kept, abs=0.001)
    assert found["cost"]["mean"] == pytest.approx(total / 3600 * 32 * 2.0)
    assert found["finish_date"]["date"].startswith("2026-03-0")


def test_the_best_checkpoint_interval(stopped):
    found = summary(stopped)
    rate = 20_000 * 8 / 1000 / 86_400.0
    young = np.sqrt(2 * 0.2 / rate)
    assert found["best_checkpoint_interval"] == pytest.approx(young, rel=0.05)
    steps = found["checkpoint"]["best_interval_steps"]
    better = STOPS | {"checkpoint": {"interval_steps": steps, "write_s": 0.2}}
    least = summary(estimate(small(None, better), replicates=6400, run_replicates=500, seed=1))
    saved = found["time_to_train"]["mean"] - least["time_to_train"]["mean"]
    error = np.hypot(found["time_to_train"]["std"], least["time_to_train"]["std"]) / 500**0.5
    assert abs(saved - found["checkpoint"]["costs_more"]) < 4 * error
    assert least["checkpoint"]["costs_more"] == pytest.approx(0.0, abs=1e-6)


def test_an_interval_beyond_the_end_is_no_checkpoint():
    """It costs what the run as a whole loses, and not what a longer run would."""
    few = {"replicates": 640, "run_replicates": 200, "seed": 1}
    rare = {"steps": 1000, "failures": {"per_1000_node_days": 20_000, "restart": "10s"}}
    found = [
        summary(estimate(small(None, rare | {"checkpoint": c}), **few))
        for c in ({"interval_steps": n, "write_s": 0.2} for n in (1000, 10**9))
    ]
    one, never = (x["checkpoint"] for x in found)
    assert one["best_interval_steps"] == never["best_interval_steps"] == 1000
    assert one["costs_more"] == never["costs_more"] == 0.0


def test_an_interrupted_run_can_be_made_again_and_shown(stopped):
    again = estimate(small(None, STOPS), replicates=6400, run_replicates=500, seed=1, threads=1)
    assert np.array_equal(again.time_to_train, stopped.time_to_train)
    assert np.array_equal(again.progress_time, stopped.progress_time)
    answer, numbers = prism.answer(stopped), summary(stopped)
    assert "checkpoint_interval" in [found.code for found in answer.findings]
    values = [getattr(cell, "value", None) for t in answer.tables for row in t.rows for cell in row]
    assert numbers["ettr"] in values and numbers["delay_by_term"]["lost_work"] in values
    ax = prism.plots.plot_progress(stopped)
    assert ax.get_xlabel() == "date" and ax.lines[0].get_ydata()[-1] == 1.0


@pytest.mark.parametrize(("times", "drawn"), [(1.2, 1), (20.0, 0)])
def test_a_far_deadline_leaves_the_run_its_room(stopped, times, drawn):
    last = float(stopped.progress_time.max())
    ax = prism.plots.plot_progress(stopped.assign(deadline=times * last))
    assert sum("deadline" in str(line.get_label()) for line in ax.lines) == drawn
    assert sum("deadline" in text.get_text() for text in ax.texts) == 1 - drawn
    left, right = ax.get_xlim()
    assert (right - left) * 86_400.0 < 1.5 * last


def test_tokens_end_a_run_too():
    job = small(None, {"tokens": 1e9, **{k: v for k, v in STOPS.items() if k != "steps"}})
    found = summary(estimate(job, replicates=640, run_replicates=20, seed=1))
    assert found["steps"] == -(-(10**9) // (8 * 4 * 512)) and found["failures"] > 0


def test_a_run_under_way(tmp_path):
    """Steps 5 % slower than the model has them: the rest is as slow, and surer."""
    job = small(None, {"steps": 20_000, "deadline": "1d"})
    before = estimate(job, replicates=1280, run_replicates=1000, seed=1)
    step_s = float(before.step_time.mean())
    rng = np.random.default_rng(1)
    steps = 1.05 * step_s * (1.0 + 0.01 * rng.standard_normal(4000))
    file = tmp_path / "steps.csv"
    file.write_text("step,step_s\n" + "".join(f"{i},{x!r}\n" for i, x in enumerate(steps.tolist())))
    after = estimate(job, replicates=1280, run_replicates=1000, seed=1, completed=file)
    assert after.time_to_train.mean() == pytest.approx(20_000 * 1.05 * step_s, rel=0.005)
    assert after.time_to_train.std() < before.time_to_train.std()
    assert float(after.progress[0]) == pytest.approx(0.2)
    with pytest.raises(prism.PrismError, match="4,000 steps .*3000"):
        estimate(job, replicates=64, seed=1, steps=3000, completed=file)
