"""Changes in the course of a recording: found, named, left out; none where nothing changes."""

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from changes_made import during, noise, step_times, trace

import prism
from prism import PrismError
from prism.models.changes.find import changes_of_step_times, changes_of_trace, choose_steps
from prism.models.changes.fit import fit_steps
from prism.models.changes.segments import find_edges, outliers
from prism.models.steptimes.model import PAUSE, model_from_dataset, model_to_dataset
from prism.models.steptimes.predict import draw_runs, draw_steps
from prism.traces import StepTimes

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments" / "verification"))
import pauses
from changes import CASES, STATIONARY, is_found, rows_of


@pytest.mark.parametrize("name", CASES)
def test_each_case_is_found_with_its_kind_place_and_worker(name):
    make, expected = CASES[name]
    rows = rows_of(make(np.random.default_rng([2, 1])))
    assert all(is_found(rows, one) for one in expected) and len(rows) == len(expected)
    json.dumps(rows)


@pytest.mark.parametrize("name", STATIONARY)
def test_what_does_not_change_raises_no_alarm(name):
    assert rows_of(STATIONARY[name](np.random.default_rng([1, 2]))) == []


def test_ratios_are_those_put_in():
    rng = np.random.default_rng(1)
    slow = changes_of_step_times(step_times(during(120, (40, 80, 1.5)), rng))[0][0]
    assert slow["ratio"] == pytest.approx(1.5, rel=0.02) and slow["n_steps"] == 40
    assert slow["duration_s"] == pytest.approx(40 * 3.0, rel=0.02)
    spread = rows_of(CASES["another spread"][0](np.random.default_rng([2, 1])))[0]
    assert spread["ratio"] == pytest.approx(4.0, rel=0.2)
    pause = changes_of_step_times(CASES["evaluation every 25 steps"][0](rng))[0][0]
    assert (pause["interval_steps"], pause["n"]) == (25, 8)
    assert pause["duration_s"] == pytest.approx(4.0, rel=0.05)


def test_pauses_are_in_runs_and_not_in_the_noise_of_steps():
    """Two intervals, the first hidden in noise: a run's total is the sum that was measured."""
    rng, n = np.random.default_rng(5), 1000
    factors = np.ones(n)
    factors[4::10] += 0.04
    factors[99::100] += 2.0
    times = step_times(factors, rng)
    model = fit_steps(times, None, None, 0, 0)
    assert np.sort(model.pause_interval).tolist() == [10.0, 100.0]
    assert np.sort(model.pause_s) == pytest.approx([0.08, 4.0], rel=0.1)
    assert model.spread.white == pytest.approx(0.02, rel=0.1)
    assert sorted(model.pause_first.tolist()) == [5.0, 100.0]
    for whole in (4, 5, 99, 100, 537, 1000):  # one by one
        each = sum(
            s * ((i - f) % k == 0 and i >= f)
            for i in range(1, whole + 1)
            for k, f, s in zip(model.pause_interval, model.pause_first, model.pause_s, strict=True)
        )
        assert model.paused_s(np.array(whole)) == pytest.approx(each, rel=1e-12, abs=1e-12)
    drawn = draw_runs(model, n, 200, 1)
    assert drawn.total.mean() == pytest.approx(times.seconds.sum(), rel=1e-3)
    assert drawn.terms["pauses"].tolist() == [model.paused_s(np.array(n))] * 200
    drawn_steps = draw_steps(model, np.arange(n), 4, 1)
    at = np.argsort(drawn_steps.mean(axis=0))[-10:]
    assert sorted(at.tolist()) == list(range(99, n, 100))


@pytest.mark.parametrize("name", pauses.CASES)
def test_pauses_are_found_with_interval_and_length(name):
    make, truth = pauses.CASES[name]
    assert pauses.agrees(pauses.pauses_of(make(np.random.default_rng([0, 5]))), truth)


@pytest.mark.parametrize("name", pauses.WITHOUT)
def test_no_pauses_are_found_where_there_are_none(name):
    assert pauses.pauses_of(pauses.WITHOUT[name](np.random.default_rng([0, 6]))) == []


def test_a_model_from_before_pauses_loads():
    model = fit_steps(step_times(np.ones(60), np.random.default_rng(6)), None, None, 0, 0)
    old = model_to_dataset(model, {}).drop_vars(list(PAUSE)).assign_attrs(schema=3)
    assert model_from_dataset(old, "old.nc").paused_s(np.array(60)) == 0.0
    with pytest.raises((PrismError, KeyError)):
        model_from_dataset(old.assign_attrs(schema=4), "old.nc")


def test_what_was_averaged_is_left_out():
    """Slow for a third of the steps: p50 was 14 % high; two phases: a CV of 28 %."""
    rng = np.random.default_rng(3)
    slow = fit_steps(step_times(during(120, (40, 80, 1.5)), rng), None, None, 0, 0)
    assert slow.step_s == pytest.approx(2.0, rel=0.01)
    assert slow.report["step_time"]["cv"] == pytest.approx(0.02, rel=0.3)
    assert slow.report["fail_slow"]["factor"] == pytest.approx(1.5, rel=0.02)
    assert slow.report["fail_slow"]["duration"] == pytest.approx(120.0, rel=0.02)
    phases = fit_steps(step_times(during(120, (0, 60, 0.55)), rng), None, None, 0, 0)
    assert phases.step_s == pytest.approx(2.0, rel=0.01)
    assert phases.report["step_time"]["cv"] == pytest.approx(0.02, rel=0.3)


def test_a_warm_up_is_the_beginning_of_a_run_or_left_out():
    rng = np.random.default_rng(4)
    strong = fit_steps(step_times(np.r_[6, 3, 2.5, 2, 2, np.ones(115)], rng), None, None, 0, 0)
    assert strong.report["changes"][0]["kept"] == "beginning" and strong.beginning_s.shape[1] == 5
    assert strong.report["step_time"]["cv"] == pytest.approx(0.02, rel=0.3)
    weak = fit_steps(step_times(during(300, (0, 30, 1.06)), rng), None, None, 0, 0)
    row = weak.report["changes"][0]
    assert (row["kind"], row["kept"], row["skip"]) == ("warm_up", None, 30)
    assert weak.steps[0] == 30 and weak.step_s == pytest.approx(2.0, rel=0.01)


def test_a_beginning_that_is_slow_then_fast_has_its_largest_ratio():
    factors = np.r_[np.full(6, 1.3), np.full(12, 0.9), np.ones(222)]
    rows, *_ = changes_of_step_times(step_times(factors, np.random.default_rng(8)))
    assert (rows[0]["kind"], rows[0]["skip"]) == ("warm_up", 18)
    assert rows[0]["ratio"] == pytest.approx(1.3, rel=0.05)


def test_nothing_is_left_out_where_too_little_would_remain():
    times = step_times(during(12, (0, 6, 3.0)), np.random.default_rng(5), sd=0.002)
    rows, _, out, _ = changes_of_step_times(times)
    assert rows and rows[0]["kept"] == "too_few" and not out.any()


def test_steps_of_a_trace_are_left_out():
    made = trace(np.random.default_rng(6), factors=during(80, (30, 50, 1.5, 5), workers=8))
    rows, out = changes_of_trace(made)
    assert out.tolist() == list(range(130, 150))
    assert rows[0]["ratio"] == pytest.approx(1.5, rel=0.03)


def test_pauses_between_steps_of_a_trace_are_counted():
    made = trace(np.random.default_rng(7), 60, 2, 1)
    later = 5.0 * ((made.ops["step"].to_numpy() - 100) // 10)
    made.ops["start"] = made.ops["start"] + later
    rows = changes_of_trace(made)[0]
    assert [(row["kind"], row["interval_steps"], row["n"]) for row in rows] == [("pause", 10, 5)]
    assert rows[0]["duration_s"] == pytest.approx(5.0, rel=0.01)


def test_the_first_steps_are_skipped_on_request():
    rng = np.random.default_rng(8)
    times = choose_steps(step_times(np.ones(20), rng, 3), 5)
    assert times.seconds.size == 45 and times.step.min() == 5
    assert np.unique(choose_steps(trace(rng, 10), 4).ops["step"]).tolist() == list(range(104, 110))
    for recording in (times, trace(rng, 10)):
        with pytest.raises(prism.PrismError, match="skip"):
            choose_steps(recording, 20)


def test_a_slow_first_step_hides_no_memory(tmp_path, run, few_repeats):
    """`show` said 1,500 independent steps for a series whose first step took 27 times as long."""
    times = step_times(np.r_[27.0, np.ones(799)], np.random.default_rng(1), memory=0.9)
    path = tmp_path / "steps.csv"
    pd.DataFrame({"step": times.step, "step_s": times.seconds}).to_csv(path, index=False)
    shown = json.loads(run("show", path, "--json")[1])
    fitted = json.loads(run("fit", path, "--json", "--seed", 0)[1])
    assert shown["n_effective"] == pytest.approx(fitted["n_effective"])
    assert 10.0 < shown["n_effective"] < 150.0  # 799 / 19 independent ones
    assert [row["kind"] for row in shown["changes"]] == ["warm_up"]


def test_a_steady_rise_is_no_warm_up():
    """Steps of a host that runs further and further ahead: 22 of 30 would have been left out."""
    seconds = 2.0 * np.arange(1, 31) + 0.05 * np.random.default_rng(1).standard_normal(30)
    times = StepTimes(seconds, np.arange(30), np.full(30, ""), "made", "s")
    assert changes_of_step_times(times)[0] == []


def test_steps_are_taken_by_number():
    rng = np.random.default_rng(8)
    times, ops = step_times(np.ones(20), rng, 3), trace(rng, 10)
    for steps, first, last in (("5:9", 5, 9), ("5:", 5, 19), (":9", 0, 9)):
        found = choose_steps(times, steps=steps).step
        assert (found.min(), found.max(), found.size) == (first, last, 3 * (last - first + 1))
    assert choose_steps(times, 2, "5:9").step.min() == 7
    assert np.unique(choose_steps(ops, 1, "103:106").ops["step"]).tolist() == [104, 105, 106]
    for recording in (times, ops):
        for steps in ("900:", "5", ":", "a:b"):
            with pytest.raises(prism.PrismError, match="steps"):
                choose_steps(recording, steps=steps)


def test_outliers_are_no_segments_and_a_warm_up_is_no_outlier():
    values = np.log(noise(np.random.default_rng(9), (60, 1)))
    values[[20, 21, 40]] += 3.0
    values[:2] += 1.0
    odd, middle = outliers(values, warm=True)
    assert np.flatnonzero(odd).tolist() == [20, 21, 40]
    assert find_edges(np.where(odd, middle, values), 1)[0] == [[2]]


def test_edges_of_long_series_are_placed_to_the_step():
    values = np.log(noise(np.random.default_rng(10), (5000, 1)))
    values[1234:3456] += 0.3
    assert find_edges(values)[0][0] == pytest.approx([1234, 3456], abs=1)


def test_the_commands_warn_and_have_the_changes(tmp_path, run, few_repeats):
    path = tmp_path / "steps.csv"
    times = step_times(during(120, (0, 60, 0.55)), np.random.default_rng(11))
    pd.DataFrame({"step": times.step, "step_s": times.seconds}).to_csv(path, index=False)
    _, out, err = run("fit", path, "--json", "--seed", 0)
    numbers = json.loads(out)
    assert [row["kind"] for row in numbers["changes"]] == ["phase"]
    assert "steps 0 to 59" in numbers["warnings"][0] and "steps 0 to 59" in err
    assert json.loads(run("fit", path, "--json", "--skip", 60)[1])["changes"] == []
    call = ("validate", "--trace", path, "--json", "--bootstrap", 0, "--seed", 0)
    split = json.loads(run(*call)[1])
    assert split["changes"] == [] and split["mean_error"] < -0.4  # one phase each
    split = json.loads(run(*call, "--train", 100)[1])
    assert [row["kind"] for row in split["changes"]] == ["phase"] and split["n_measured"] == 20
    assert abs(split["mean_error"]) < 0.02
