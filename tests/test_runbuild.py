"""The run model of a job: states measured beside the calm step, what the file says, the results."""

import json

import numpy as np
import pytest
from scipy.stats import binom

import prism
from prism import PrismError, estimate, simulate, summary
from prism.analyses.estimate import reproduce
from prism.jobs.job import job_from_dict
from prism.plots import plot_progress
from prism.simulation.prepare import prepare
from prism.simulation.runs.build import build_run_model, mean_step
from prism.simulation.runs.rates import stationary
from prism.simulation.runs.states import (
    Simulator,
    congested_leaves,
    find_congestion,
    find_slowdowns,
    find_stalls,
    stalls_in,
)

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


def small(effects=None, run=None, **variability):
    values = SMALL | {"variability": {"effects": effects or {}, **variability}}
    return job_from_dict(values | ({"run": run} if run else {}), "small")


def simulator(job, seed=1):
    return Simulator(prepare(job, seed), seed, 2)


# ------------------------------------------------------------------------------------- states
CONGESTED = {"regime": {"probability": 0.1, "factor": 8.0, "duration_s": 300.0}}


def test_congestion_by_the_number_of_leaves_gives_the_mean_of_the_engine():
    """Steps that draw congestion anew have the mean of the states' ratios."""
    job = small(CONGESTED)
    sim = simulator(job)
    found = find_congestion(sim)
    times = simulate(job, 6400, 1).step_time.to_numpy()
    count = congested_leaves(sim.program, range(100), 1).ravel()
    assert abs(count.mean() - 0.8) < 5 * np.sqrt(8 * 0.09 / 6400)  # 8 leaves, a tenth of the time
    assert found.ratio[0] == 1.0 and found.ratio[1] > 1.02 and np.all(np.diff(found.ratio) > -1e-3)
    for m in range(3):
        here = times[count == m].mean() / times[count == 0].mean()
        assert here == pytest.approx(found.ratio[m], abs=0.01)
    # on and off at rates that make a leaf congested in a tenth of the steps, for 300 s on average
    m, time = np.arange(found.ratio.size), stationary(found.rates)
    steps = time / found.ratio / (time / found.ratio).sum()
    assert steps == pytest.approx(binom.pmf(m, 8, 0.1), rel=1e-4)
    freed = time[1:] @ np.diag(found.rates, -1)  # leaves per second
    assert time @ m / freed == pytest.approx(300.0)
    assert time @ m > 1.01 * (steps @ m)  # a larger share of the time than of the steps


def test_lasting_congestion_keeps_the_mean_and_widens_runs():
    fleeting = estimate(small({"regime": CONGESTED["regime"] | {"duration_s": 1e-3}}),
                        replicates=6400, steps=20_000, seed=1)  # fmt: skip
    lasting = estimate(small(CONGESTED), replicates=6400, steps=20_000, seed=1)
    a, b = (x.time_to_train.to_numpy() for x in (fleeting, lasting))
    error = np.hypot(b.std() / b.size**0.5, 20_000 * lasting.step_time.std() / 6400**0.5)
    assert abs(b.mean() - a.mean()) < 5 * error
    assert b.std() > 2.0 * a.std()
    assert summary(lasting)["variance_by_term"]["congestion"] > 0.5
    assert not any("congestion: drawn" in w for w in json.loads(lasting.attrs["warnings"]))


@pytest.mark.parametrize("n_steps", [2_000, 1_000_000])
def test_one_answer_has_one_mean_step(n_steps):
    """A leaf switch of all nodes is congested in 3 of 10 steps, of a step and of a run."""
    regime = {"probability": 0.3, "factor": 8.0, "duration_s": 3.0}
    values = SMALL | {"variability": {"effects": {"regime": regime}}}
    values["cluster"] = SMALL["cluster"] | {"leaf_nodes": 4, "nodes": 8}
    found = estimate(job_from_dict(values, "small"), replicates=6400, steps=n_steps, seed=1)
    step, run = found.step_time.to_numpy(), found.time_to_train.to_numpy() / n_steps
    error = np.hypot(step.std() / step.size**0.5, run.std() / run.size**0.5)
    assert step.std() > 0.1 * step.mean()
    assert abs(run.mean() - step.mean()) < 4 * error


@pytest.mark.parametrize("kind", ["compute", "network"])
def test_a_slow_node(kind):
    """All of one node's work twice as long: the step is up to twice as long; more is slower."""
    sim = simulator(small({"rank": {"cv": 0.0, "lemon_fraction": 0.0}}))
    same, double, triple = (find_slowdowns(sim, kind, f) for f in (1.0, 2.0, 3.0))
    assert same == pytest.approx(1.0, abs=1e-5)
    assert np.all(double <= 2.001) and double.mean() > (1.2 if kind == "compute" else 1.01)
    assert np.all(triple > double)


def test_a_slow_node_hits_no_harder_than_a_job_that_says_so():
    """The states' ratio is that of `cluster.node_slowdowns` with the same node."""
    values = SMALL | {"variability": {}}
    values["cluster"] = SMALL["cluster"] | {"node_slowdowns": {0: 1.5}}
    ratios = []
    for seed in (1, 2):
        slow = simulate(job_from_dict(values, "slow"), 2048, seed).step_time.mean()
        calm = simulate(small(), 2048, seed).step_time.mean()
        ratios.append(float(slow / calm))
    found = find_slowdowns(simulator(small()), "compute", 1.5)
    # nodes of the first and the last stage differ; all nodes are tried
    assert found.min() - 0.01 < np.mean(ratios) < found.max() + 0.01


def test_stalls_are_found_with_their_rate_and_length():
    stall = {"entity": "node", "rate_per_hour": 3600.0, "duration_s": 0.02, "duration_cv": 1.0}
    job = small({"stall": stall})
    sim = simulator(job)
    dataset = simulate(job, 12_800, 1)
    step_s = float(np.median(dataset.step_time))
    found = find_stalls(sim, step_s)
    count, length = stalls_in(sim.program, range(200), 1)
    expected = count.mean() / step_s
    error = count.std() / 12_800**0.5 / step_s
    assert abs(found.rate_per_s - expected) < 5 * error
    assert 0.01 < found.lengths.mean() <= 0.0201  # slack in the pipeline hides part of some
    assert abs(length.sum() / count.sum() - 0.02) < 5 * 0.02 / count.sum() ** 0.5
    model = build_run_model(prepare(job, 1), dataset, 1, 2)
    # taken apart and put together again, a step is as long as it was
    assert mean_step(model) == pytest.approx(float(dataset.step_time.mean()), rel=0.03)
    assert model.std.mean() < 0.5 * float(dataset.step_time.std())


def test_stalls_of_the_job_delay_a_run_by_their_lengths():
    stall = {"entity": "job", "rate_per_hour": 360.0, "duration_s": 0.5, "duration_cv": 1.0}
    lengths = find_stalls(simulator(small({"stall": stall})), 0.05).lengths
    assert lengths.mean() == pytest.approx(0.5, rel=1e-3)
    assert (lengths**2).mean() == pytest.approx(2.0 * 0.5**2, rel=0.01)


def test_stalls_in_most_steps_stay_part_of_the_step():
    stall = {"entity": "node", "rate_per_hour": 1e5, "duration_s": 1e-3, "duration_cv": 1.0}
    assert find_stalls(simulator(small({"stall": stall})), 0.05) is None


# ------------------------------------------------------------------------------ what a job says
def test_what_the_file_says_arrives():
    run = {
        "steps": 1000,
        "checkpoint": {"interval": "1min", "mode": "async"},
        "failures": {"detection": "2min", "spares": 3, "causes": {
            "gpu": {"share": 3}, "software": {"share": 1, "restart": "1min", "replace": False}}},
        "evaluation": {"interval_steps": 100, "duration": "90s"},
    }  # fmt: skip
    effects = {
        "fail_slow": {"rate_per_1000_node_days": 24.0, "kind": "network", "replace": True,
                      "detection": "10min"},
        "step": {"diurnal_cv": 0.01},
    }  # fmt: skip
    job = small(effects, run)
    model = build_run_model(prepare(job, 1), simulate(job, 640, 1), 1, 2)
    fail, slow = model.interruptions, model.episodes
    # 419 failures of 2,048 nodes of 8 in 54 days; these have 4 GPUs
    assert fail.rate_per_s == pytest.approx(419 / 2048 / 54 / 2 * 8 / 86_400)
    assert [(k.name, k.share, k.detection_s, k.restart_s, k.replaces) for k in fail.kinds] == [
        ("gpu", 3.0, 120.0, 600.0, True), ("software", 1.0, 120.0, 60.0, False)]  # fmt: skip
    assert (fail.spares, fail.repair_s) == (3, 86_400.0)
    assert fail.mean_down_s == pytest.approx(0.75 * 720 + 0.25 * 180)
    assert slow.rate_per_node_hour == pytest.approx(0.001)
    assert (slow.mean_s, slow.detection_s, slow.replaced, slow.cv) == (1440.0, 600.0, True, 1.0)
    assert model.checkpoints.interval_steps == round(60.0 / mean_step(model))
    assert not model.checkpoints.blocking
    # 14 bytes a parameter at 2 TB/s for 16,384 GPUs
    n_parameters = 4 * (4 * 512**2 + 3 * 512 * 2048 + 2 * 512) + 2 * 1024 * 512 + 512
    expected = 14 * n_parameters / (32 * 2e12 / 16_384)
    assert model.checkpoints.write_s == pytest.approx(expected, rel=0.35)
    assert model.evaluations.interval_steps == 100 and model.evaluations.duration_s == 90.0
    assert (model.drift.diurnal_cv, model.drift.diurnal_peak_s) == (0.01, 15 * 3600.0)
    assert model.n_nodes == 8


def test_a_checkpoint_longer_than_its_interval_is_refused():
    job = small(None, {"checkpoint": {"interval_steps": 2, "write_s": 100, "mode": "async"}})
    with pytest.raises(PrismError, match=r"run.checkpoint: .* 100 s to write, .*\(2 steps\)"):
        estimate(job, replicates=64, seed=1)


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
    again = reproduce(stopped, threads=1)
    assert np.array_equal(again.time_to_train, stopped.time_to_train)
    assert np.array_equal(again.progress_time, stopped.progress_time)
    answer = prism.answer(stopped)
    assert "checkpoint_interval" in [found.code for found in answer.findings]
    rows = {row[0]: row[1] for table in answer.tables for row in table.rows}
    numbers = summary(stopped)
    (ettr,) = (cell for name, cell in rows.items() if "(ETTR)" in name)
    assert ettr.value == numbers["ettr"]
    assert numbers["delay_by_term"]["lost_work"] in [
        cell.value for name, cell in rows.items() if "lost" in name
    ]
    ax = plot_progress(stopped)
    assert ax.get_xlabel() == "date" and ax.lines[0].get_ydata()[-1] == 1.0


@pytest.mark.parametrize(("times", "drawn"), [(1.2, 1), (20.0, 0)])
def test_a_far_deadline_leaves_the_run_its_room(stopped, times, drawn):
    last = float(stopped.progress_time.max())
    ax = plot_progress(stopped.assign(deadline=times * last))
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
    assert np.array_equal(reproduce(after).time_to_train, after.time_to_train)
    assert float(after.progress[0]) == pytest.approx(0.2)
    with pytest.raises(PrismError, match="4,000 steps .*3000"):
        estimate(job, replicates=64, seed=1, steps=3000, completed=file)
