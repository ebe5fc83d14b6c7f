"""Changes in the course of a recording: found, named, left out; none where nothing changes."""

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import prism

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments" / "checks"))
import pauses
from changes import CASES, STATIONARY, is_found, rows_of
from changes_made import during, noise

STEP_S = 2.0


@pytest.fixture
def recorded(tmp_path, few_repeats):
    """Fit steps of 2 s times factors [step] and noise: what `fit` finds, and its model."""

    def fit(factors, seed=1, runs=1, **options):
        rng, n = np.random.default_rng(seed), len(factors)
        kind = {key: options.pop(key) for key in ("memory", "sd") if key in options}
        seconds = STEP_S * np.asarray(factors)[:, None] * noise(rng, (n, runs), **kind)
        table = {"step": np.tile(np.arange(n), runs), "step_s": seconds.T.ravel()}
        if runs > 1:
            table["run"] = np.repeat([f"r{i}" for i in range(runs)], n)
        path = tmp_path / "steps.csv"
        pd.DataFrame(table).to_csv(path, index=False)
        model = prism.fit(path, 0, **options)
        return prism.summary(model), model, path

    return fit


@pytest.mark.parametrize("name", CASES)
def test_each_case_is_found_with_its_kind_place_and_worker(name):
    make, expected = CASES[name]
    rows = rows_of(make(np.random.default_rng([2, 1])))
    assert all(is_found(rows, one) for one in expected) and len(rows) == len(expected)
    json.dumps(rows)


@pytest.mark.parametrize("name", STATIONARY)
def test_what_does_not_change_raises_no_alarm(name):
    assert rows_of(STATIONARY[name](np.random.default_rng([1, 2]))) == []


@pytest.mark.parametrize("name", pauses.CASES)
def test_pauses_are_found_with_interval_and_length(name):
    make, truth = pauses.CASES[name]
    assert pauses.agrees(pauses.pauses_of(make(np.random.default_rng([0, 5]))), truth)


@pytest.mark.parametrize("name", pauses.WITHOUT)
def test_no_pauses_are_found_where_there_are_none(name):
    assert pauses.pauses_of(pauses.WITHOUT[name](np.random.default_rng([0, 6]))) == []


def test_ratios_are_those_put_in(recorded):
    (slow,) = recorded(during(120, (40, 80, 1.5)))[0]["changes"]
    assert slow["ratio"] == pytest.approx(1.5, rel=0.02) and slow["n_steps"] == 40
    assert slow["duration_s"] == pytest.approx(40 * 3.0, rel=0.02)
    factors = np.ones(200)
    factors[24::25] += 2.0
    (pause,) = recorded(factors)[0]["changes"]
    assert (pause["interval_steps"], pause["n"]) == (25, 8)
    assert pause["duration_s"] == pytest.approx(4.0, rel=0.05)


def test_pauses_are_in_runs_and_not_in_the_noise_of_steps(recorded, tmp_path):
    """Two intervals, the first hidden in noise: a run's total is the sum that was measured."""
    factors = np.ones(1000)
    factors[4::10] += 0.04
    factors[99::100] += 2.0
    found, model, path = recorded(factors, 5)
    rows = {row["interval_steps"]: row["duration_s"] for row in found["changes"]}
    assert rows.keys() == {10, 100}
    assert [rows[10], rows[100]] == pytest.approx([0.08, 4.0], rel=0.1)
    assert found["effects"]["white"]["cv"] == pytest.approx(0.02, rel=0.1)
    prism.save(model, tmp_path / "m.nc")
    for n in (4, 99, 100, 537, 1000):
        run = prism.estimate(tmp_path / "m.nc", replicates=64, run_replicates=200, steps=n, seed=1)
        expected = (n // 10 + (n % 10 >= 5)) * rows[10] + n // 100 * rows[100]
        pauses_s = run.run_term_time.sel(term="pauses").values
        assert pauses_s == pytest.approx(np.full(200, expected), rel=1e-6)
    measured = pd.read_csv(path).step_s.sum()
    assert float(run.time_to_train.mean()) == pytest.approx(measured, rel=1e-3)


def test_what_was_averaged_is_left_out(recorded):
    """Slow for a third of the steps: p50 was 14 % high; two phases: a CV of 28 %."""
    slow = recorded(during(120, (40, 80, 1.5)), 3)[0]
    phases = recorded(during(120, (0, 60, 0.55)), 3)[0]
    for found in (slow, phases):
        assert found["step_time"]["mean"] == pytest.approx(2.0, rel=0.01)
        assert found["step_time"]["cv"] == pytest.approx(0.02, rel=0.3)
    assert slow["fail_slow"]["factor"] == pytest.approx(1.5, rel=0.02)
    assert slow["fail_slow"]["duration"] == pytest.approx(120.0, rel=0.02)


def test_a_warm_up_is_the_beginning_of_a_run_or_left_out(recorded):
    strong = recorded(np.r_[6, 3, 2.5, 2, 2, np.ones(115)], 4)[0]
    assert strong["changes"][0]["kept"] == "beginning" and strong["beginning"]["steps"] == 5
    assert strong["step_time"]["cv"] == pytest.approx(0.02, rel=0.3)
    weak = recorded(during(300, (0, 30, 1.06)), 4)[0]
    row = weak["changes"][0]
    assert (row["kind"], row["kept"]) == ("warm_up", None) and abs(row["skip"] - 30) <= 1
    assert weak["step_time"]["mean"] == pytest.approx(2.0, rel=0.01)
    (first,) = recorded(np.r_[np.full(6, 1.3), np.full(12, 0.9), np.ones(222)], 8)[0]["changes"]
    assert (first["kind"], first["skip"]) == ("warm_up", 18)
    assert first["ratio"] == pytest.approx(1.3, rel=0.05)


def test_nothing_is_left_out_where_too_little_would_remain(recorded):
    found = recorded(during(12, (0, 6, 3.0)), 5, sd=0.002)[0]
    assert found["changes"][0]["kept"] == "too_few" and found["n"] == 12


def test_steps_are_taken_by_number(recorded):
    ones = np.ones(40)
    assert recorded(ones, 8, 3, skip=5)[0]["n"] == 3 * 35
    for steps, n in (("5:19", 15), ("5:", 35), (":9", 10)):
        assert recorded(ones, 8, 3, steps=steps)[0]["n"] == 3 * n
    assert recorded(ones, 8, 3, skip=2, steps="5:")[0]["n"] == 3 * 33
    for wrong in ({"skip": 40}, *({"steps": x} for x in ("900:", "5", ":", "a:b"))):
        with pytest.raises(prism.PrismError, match=next(iter(wrong))):
            recorded(ones, 8, 3, **wrong)


def test_a_slow_first_step_hides_no_memory(recorded, run):
    """`show` said 1,500 independent steps for a series whose first step took 27 times as long."""
    fitted, _, path = recorded(np.r_[27.0, np.ones(799)], memory=0.9)
    shown = json.loads(run("show", path, "--json")[1])
    assert shown["n_effective"] == pytest.approx(fitted["n_effective"])
    assert 10.0 < shown["n_effective"] < 150.0  # 799 / 19 independent ones
    assert [row["kind"] for row in shown["changes"]] == ["warm_up"]


def test_a_steady_rise_is_no_warm_up(recorded):
    """Steps of a host that runs further and further ahead: 22 of 30 would have been left out."""
    assert recorded(np.arange(1, 31), 1, sd=0.001)[0]["changes"] == []


def test_edges_of_long_series_are_placed_to_the_step(recorded):
    (row,) = recorded(during(5000, (1234, 3456, 1.35)), 10)[0]["changes"]
    assert row["n_steps"] == pytest.approx(2222, abs=2)


def test_the_commands_warn_and_have_the_changes(recorded, run):
    _, _, path = recorded(during(120, (0, 60, 0.55)), 11)
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
