"""prism watch: the forecast of a growing log, departures, and what happens to logs."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

import prism
from prism.analyses.watch import Watch, _calm, summarize_watch
from prism.models.changes.find import select_steps
from prism.models.steptimes import departure
from prism.models.steptimes.departure import ALARM, find_departure
from prism.models.steptimes.fit import fit_step_times
from prism.models.steptimes.model import load_step_model
from prism.models.steptimes.runs import progress
from prism.models.steptimes.spread import Spread, simulate_body
from prism.traces import StepTimes, read_step_times
from prism.traces.growing import GrowingLog

WHITE = [Spread(0.01)]


def lines(seconds, total=1000, first=1):
    return "".join(
        f" iteration {s:8d}/ {total:7d} | elapsed time per iteration (ms): {1e3 * x:.2f} | lr 0 |\n"
        for s, x in enumerate(seconds, start=first)
    )


def steps(n, seed=0, slower=1.0, since=None):
    level = np.where(np.arange(n) >= (n if since is None else since), slower, 1.0)
    return 2.0 * level * (1.0 + 0.01 * np.random.default_rng(seed).standard_normal(n))


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(lines(steps(200)))
    return path


def test_what_is_left_is_the_steps_to_come(log):
    found = summarize_watch(Watch(log, seed=1).look())
    assert (found["completed_steps"], found["steps"]) == (200, 1000)
    left = found["time_left"]
    assert left["p10"] < left["p50"] < left["p90"]
    assert left["p50"] == pytest.approx(800 * steps(200).mean(), rel=1e-3)
    assert not found["departure"]["departed"]
    again = summarize_watch(Watch(log, seed=1).look())
    assert again == found


def test_a_job_gives_what_estimate_gives(log):
    """The same model, conditioned on the same steps; only the seeds of the draws differ."""
    job = prism.load_job("pipeline-8x32", ["run.steps=1000"])
    found = summarize_watch(Watch(log, job, seed=1, threads=1).look())
    whole = prism.summary(prism.estimate(
        job, replicates=4096, run_replicates=2000, completed=log, seed=1, threads=1
    ))["time_to_train"]  # fmt: skip
    elapsed = np.round(steps(200), 5).sum()
    assert found["time_left"]["mean"] + elapsed == pytest.approx(whole["mean"], rel=1e-4)
    assert found["departure"]["kind"] == "level"  # such steps are not of this job


@pytest.mark.parametrize("slower", [1.03, 0.97])
def test_a_planted_change_is_found_and_carried_on(run, log, slower):
    log.write_text(lines(steps(200, 3, slower, 150)))
    code, out, err = run("watch", log, "--once", "--json", "--seed", "1")
    found = json.loads(out)
    assert (code, err) == (3, "")
    seen = found["departure"]
    low, high = seen["change_ci"]
    assert low <= slower - 1.0 <= high and seen["p_value"] <= ALARM
    early, late = seen["step_range"]
    assert early <= 151 <= late and late - early < 10
    assert found["time_left"]["p50"] == pytest.approx(800 * 2.0 * slower, rel=3e-3)


def test_p_values_of_runs_without_a_change_are_even(monkeypatch):
    """White noise and a drift: at most 10 % are below 0.1, within five standard errors."""
    monkeypatch.setattr(departure, "_DRAWS", 399)
    for spread in (Spread(0.01), Spread(0.01, 0.005, 40.0)):
        at_s, below = 2.0 * np.arange(120), 0
        for seed in range(40):
            body = simulate_body(spread, at_s, 1, np.random.default_rng(seed))[:, 0]
            below += find_departure(1.0 + body, at_s, [spread], seed).p_value < 0.1
        assert below <= 40 * 0.1 + 5 * np.sqrt(40 * 0.09)


def test_a_drift_is_no_change_where_the_model_has_it(monkeypatch):
    monkeypatch.setattr(departure, "_DRAWS", 999)  # as few as reach the alarm
    spread, at_s, alarms = Spread(0.002, 0.01, 60.0), 2.0 * np.arange(100), [0, 0]
    for seed in range(20):
        body = 1.0 + simulate_body(spread, at_s, 1, np.random.default_rng(seed))[:, 0]
        for i, held in enumerate((spread, Spread(0.002))):  # the second is the control
            alarms[i] += find_departure(body, at_s, [held], seed).p_value <= ALARM
    assert alarms[0] <= 1 and alarms[1] >= 15


def test_too_few_values_tell_nothing():
    assert find_departure(np.ones(10), np.arange(10.0), WHITE, 1) is None
    assert find_departure(np.full(50, np.nan), np.arange(50.0), WHITE, 1) is None


def test_a_line_without_an_end_is_no_step(log):
    whole = log.read_text()
    cut = whole[: whole.rindex("(ms): ") + 7]  # the last step would read as 2 ms or so
    log.write_text(cut)
    times = GrowingLog(log).read().times
    assert times.step[-1] == 199 and times.seconds.min() > 1.9


def test_rotated_cut_and_restarted_logs_go_on(log):
    growing, seconds = GrowingLog(log), steps(300)
    assert growing.read().times.step.size == 200
    log.rename(log.with_suffix(".1"))
    log.write_text(lines(seconds[200:250], first=201))  # another file of that name
    assert growing.read().times.step.tolist() == list(range(1, 251))
    log.write_text("again\n" + lines(seconds[250:260], first=251))  # cut in place
    assert growing.read().times.step.tolist() == list(range(1, 261))
    with log.open("a") as file:  # from the checkpoint of step 220
        file.write(lines(1.1 * seconds[220:225], first=221))
    reading = growing.read()
    assert reading.times.step.tolist() == list(range(1, 226)) and reading.total == 1000
    assert reading.times.seconds[220:] == pytest.approx(1.1 * seconds[220:225], abs=1e-4)


def test_a_log_that_begins_late_counts_from_its_numbers(log):
    log.write_text(lines(steps(100), total=1000, first=601))
    found = summarize_watch(Watch(log, seed=1).look())
    assert found["completed_steps"] == 700
    assert found["time_left"]["p50"] == pytest.approx(600.0, rel=3e-3)


@pytest.mark.parametrize(
    ("given", "said"),
    [(("no.log", "--once"), "no.log"), (("no.log",), "no.log"),
     (("train.log", "--once", "--steps", "100"), "--steps"),
     (("train.log", "--once", "--interval", "0"), "--interval"),
     (("train.log", "--once", "--set", "run.steps=9"), "--set"),
     (("train.log", "no-such-job", "--once"), "no-such-job"),
     (("train.log", "--once", "--openmetrics", "no/x.prom"), "no folder")],
)  # fmt: skip
def test_bad_input_is_told(run, log, monkeypatch, given, said):
    monkeypatch.chdir(log.parent)
    code, out, err = run("watch", *given)
    assert (code, out) == (2, "") and said in err


def test_a_run_that_is_done_ends_the_watch(run, log):
    log.write_text(lines(steps(50), total=50))
    code, out, _ = run("watch", log, "--seed", "1", "--json", "--interval", "1h")
    found = json.loads(out)
    assert code == 0 and found["departure"] is None and found["time_left"]["p90"] == 0.0


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT for a child")
def test_an_interrupt_ends_it_quietly(log):
    log.write_text(lines(steps(60), total=100))
    command = [sys.executable, "-m", "prism", "watch", str(log), "--seed", "1", "--json",
               "--interval", "0.2"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        first = json.loads(process.stdout.readline())
        with log.open("a") as file:
            file.write(lines(steps(70)[60:], total=100, first=61))
        end = time.monotonic() + 20
        while first["completed_steps"] == 60 and time.monotonic() < end:
            first = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        error = process.stderr.read()
        assert (process.wait(20), error) == (0, b"") and first["completed_steps"] == 70


def test_an_odd_value_before_all_others_is_left_out():
    values = np.r_[np.nan, 0.7, 1.0 + 0.01 * np.random.default_rng(1).standard_normal(40)]
    assert np.flatnonzero(np.isnan(_calm(values))).tolist() == [0, 1]


def test_pauses_of_a_model_are_to_come(run, tmp_path, monkeypatch, few_repeats):
    monkeypatch.chdir(tmp_path)
    whole = [steps(400, seed) + 3.0 * (np.arange(1, 401) % 40 == 0) for seed in range(4)]
    rows = [f"{r},{s},{x:.6f}" for r in range(3) for s, x in enumerate(whole[r], start=1)]
    (tmp_path / "known.csv").write_text("run,step,step_s\n" + "\n".join(rows) + "\n")
    assert run("fit", "known.csv", "-o", "model.nc", "--seed", "1")[0] == 0
    (tmp_path / "train.log").write_text(lines(whole[3][:200], total=400))
    model = load_step_model("model.nc")
    assert (model.pause_interval, model.pause_first) == ([40.0], [40.0])
    assert model.pause_s == pytest.approx([3.0], abs=0.02)
    found = progress(model, read_step_times("train.log"), 400, 100, 1)
    assert found.elapsed_s == pytest.approx(whole[3][:200].sum(), abs=1e-2)
    for held in ("model.nc", None):
        numbers = summarize_watch(Watch("train.log", held, seed=1).look())
        assert numbers["time_left"]["mean"] == pytest.approx(200 * 2.0 + 5 * 3.0, rel=2e-3)
        assert not numbers["departure"]["departed"]


def test_steps_that_a_fit_left_out_are_elapsed_time():
    """Steps 30 to 49 were no part of the model: 20 of the log's that a profile does not know."""
    known = np.r_[1:30, 50:201]
    work = 1.0 + 0.2 * (np.arange(201) % 3)
    table = [
        StepTimes(work[known] * steps(180, r), known, np.full(180, str(r)), "made", "s")
        for r in range(4)
    ]
    model = fit_step_times(replace(
        table[0], **{name: np.concatenate([getattr(t, name) for t in table])
                     for name in ("seconds", "step", "run")},
    ), repeats=0)  # fmt: skip
    seconds = work[1:101] * steps(100, 9)
    log = StepTimes(seconds, np.arange(1, 101), np.full(100, "log"), "log", "s")
    found = progress(model, log, 180, 100, 1)
    assert found.done == 80 and found.elapsed_s == pytest.approx(seconds.sum(), rel=1e-9)
    with pytest.raises(prism.PrismError):
        progress(model, select_steps(log, (log.step >= 30) & (log.step < 50)), 180, 100, 1)
