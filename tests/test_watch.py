"""prism watch: the forecast of a growing log, departures, and what happens to logs."""

import json
import os
import re
from bisect import bisect_left
from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest
from logs_made import lines, steps

import prism
from prism import Watch
from prism.common import files
from prism.models.changes.find import find_changes, select_steps
from prism.models.changes.spans import FEWEST
from prism.models.steptimes import blocks, departure
from prism.models.steptimes.departure import FALSE_ALARMS, LEAST, find_departure
from prism.models.steptimes.fit import fit_step_times
from prism.models.steptimes.model import load_step_model
from prism.models.steptimes.progress import progress
from prism.models.steptimes.runs import update_on_progress
from prism.models.steptimes.spread import Spread, simulate_body
from prism.simulation.execution.context import RunContext
from prism.simulation.runs.drift import ar1
from prism.simulation.runs.model import simulate_runs
from prism.simulation.runs.parts import RunModel
from prism.traces import StepTimes, read_step_times, readers
from prism.traces import growing as reading
from prism.traces.growing import GrowingLog

AGREED = "time_left", "finish", "finish_by", "finish_date", "departure", "steps"


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(lines(steps(200)))
    return path


def test_what_is_left_is_the_steps_to_come(log):
    found = prism.summary(Watch(log, seed=1).look())
    assert (found["completed_steps"], found["steps"]) == (200, 1000)
    left = found["time_left"]
    assert left["p10"] < left["p50"] < left["p90"]
    assert left["p50"] == pytest.approx(800 * steps(200).mean(), rel=1e-3)
    assert not found["departure"]["departed"]
    again = prism.summary(Watch(log, seed=1).look())
    assert again == found


def test_a_warm_up_is_no_stall_to_come(log):
    seconds = steps(300)
    seconds[:12] *= 1.5
    log.write_text(lines(seconds))
    left = prism.summary(Watch(log, seed=1).look())["time_left"]
    assert left["p50"] == pytest.approx(700 * 2.0, rel=3e-3)
    assert left["p95"] - left["p5"] < 0.02 * left["p50"]


@pytest.mark.parametrize("slower", [1.0, 1.03])
@pytest.mark.parametrize("kind", ["job", "steps"])
def test_watch_and_estimate_are_one_computation(run, log, monkeypatch, few_repeats, kind, slower):
    monkeypatch.chdir(log.parent)
    log.write_text(lines(58.5 * steps(200, 3, slower, 150)))
    held = "pipeline-8x32"
    if kind == "steps":
        held = "model.nc"
        rows = [f"{r},{s},{58.5 * x:.6f}" for r in range(3) for s, x in enumerate(steps(400, r), 1)]
        (log.parent / "known.csv").write_text("run,step,step_s\n" + "\n".join(rows) + "\n")
        assert run("fit", "known.csv", "-o", held, "--seed", "1")[0] == 0
    options = ("--json", "--seed", "1", "--deadline", "33h", "-q")
    code, out, _ = run("watch", log.name, held, "--once", *options)
    looked = json.loads(out)
    whole = json.loads(run("estimate", held, "--progress", log.name, *options)[1])
    assert {name: looked[name] for name in AGREED} == {name: whole[name] for name in AGREED}
    assert looked["completed_steps"] == whole["completed"]["steps"] == 200
    total = looked["elapsed"] + looked["time_left"]["p50"]
    assert whole["time_to_train"]["p50"] == pytest.approx(total, rel=1e-9)
    assert (code, whole["departure"]["departed"]) == ((3, True) if slower > 1.0 else (0, False))
    left = looked["time_left"]
    assert left["p50"] == pytest.approx(800 * 117.0 * slower, rel=0.01)


def test_a_run_under_way_ends_counted_from_its_log(run, log, monkeypatch):
    monkeypatch.chdir(log.parent)
    log.write_text(lines(58.5 * steps(200)))
    os.utime(log, (1.7e9, 1.7e9))
    options = ("estimate", "pipeline-8x32", "--progress", log.name, "--json", "--seed", "1", "-q",
               "--set", "run.start=2020-01-01")  # fmt: skip
    found = json.loads(run(*options)[1])
    end = datetime.fromisoformat(found["finish_date"]["date"]).timestamp()
    assert end == pytest.approx(1.7e9 + found["time_left"]["p90"], abs=1.0)
    job, common = "pipeline-8x32", ("--json", "--seed", "1", "-q", "--steps", "1000")
    for held in (("estimate", job, "--progress", log.name), ("watch", log.name, job, "--once"),
                 ("watch", log.name, "--once")):  # fmt: skip
        for more, sure in ((-3600.0, 0.0), (1800.0, 1.0)):  # a date without a start
            date = datetime.fromtimestamp(end + more).isoformat()
            text = run(*held, "--deadline", date, *common)[1]
            assert json.loads(text)["finish_by"]["probability"] == sure
    found = json.loads(run(*options, "--start", "2020-01-01")[1])
    assert found["finish_date"]["date"].startswith("2020-01-02")  # asked for


@pytest.mark.parametrize("n", [1, 2])
def test_the_first_steps_of_a_run_are_enough(run, tmp_path, n):
    log = tmp_path / "megatron.log"
    log.write_text(lines([120.0, 121.0][:n], total=500))
    options = ("--steps", 500, "--replicates", 128, "--run-replicates", 16, "--seed", 1, "--json")
    code, out, _ = run("estimate", "pipeline-8x32", "--progress", log, *options, "-q")
    assert code == 0
    assert json.loads(out)["completed"]["steps"] == n


@pytest.mark.parametrize("slower", [1.03, 0.97])
def test_a_planted_change_is_found_and_carried_on(run, log, slower):
    log.write_text(lines(steps(200, 3, slower, 150)))
    code, out, err = run("watch", log, "--once", "--json", "--seed", "1")
    found = json.loads(out)
    assert (code, err) == (3, "")
    seen = found["departure"]
    low, high = seen["change_ci"]
    assert low <= slower - 1.0 <= high and seen["p_value"] <= FALSE_ALARMS
    early, late = seen["step_range"]
    assert early <= 151 <= late and late - early < 10
    assert found["time_left"]["p5"] <= 800 * 2.0 * slower <= found["time_left"]["p95"]


def noisy(seed, memory=None, n=300, change=0.0):
    """Steps with white noise, or AR(1) of that memory, which change after 200."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((n, 1)) if memory is None else ar1(np.arange(n) / memory, 1, rng)
    return 2.0 * (1.0 + 0.01 * noise[:, 0]) * np.where(np.arange(n) < 200, 1.0, 1.0 + change)


def first_alarm(run):
    """First of all steps after which it departs: it then goes on to."""
    return 200 + bisect_left(range(200, 300), True, key=lambda n: find_departure(run[:n]).departed)


def test_looks_after_every_step_raise_no_more_alarms(monkeypatch):
    """At most 1 % of runs, within five standard errors; a bound of one look is the control.

    That a run departs says that the bound was crossed at some step up to the last few.
    """
    alarms = []
    for bound in (departure._BOUND, (3.29, 0.0)):  # p = 0.001
        monkeypatch.setattr(departure, "_BOUND", bound)
        found = [
            find_departure(noisy(seed, memory)).p_value <= FALSE_ALARMS
            for seed in range(20) for memory in (None, 9.5)
        ]  # fmt: skip
        alarms.append(sum(found))
    assert alarms[0] <= 40 * 0.01 + 5 * np.sqrt(40 * 0.0099) < 5 <= alarms[1]


def test_a_change_is_found_and_its_interval_holds_it():
    """At the first alarm, of runs that are looked at after every step."""
    delays, inside = [], []
    for seed in range(20):
        run = noisy(seed, change=0.03)
        n = first_alarm(run)
        found = find_departure(run[:n])
        delays.append(n - 200)
        inside.append(found.low <= 0.03 <= found.high)
    assert np.median(delays) <= 20 and np.quantile(delays, 0.9) <= 30
    assert 0.9 - 5 * np.sqrt(0.09 / 20) <= np.mean(inside)


def test_after_an_alarm_the_forecast_holds_what_is_left():
    """80 % intervals at the first alarm, when some three steps tell the level."""
    model = RunModel(np.full((40, 1), 2.0), np.full((40, 1), 0.02))
    inside = []
    for seed in range(15):
        run = noisy(seed, change=0.03)
        n = first_alarm(run)
        times = StepTimes(run[:n], np.arange(1, n + 1), np.full(n, ""), "log", "s")
        left = simulate_runs(
            update_on_progress(model, times, 400, seed).model, 2000, 400, RunContext(seed)
        ).total
        low, high = np.quantile(left, [0.1, 0.9])
        inside.append(low <= 2000 * 2.0 * 1.03 <= high)
    assert 0.8 - 5 * np.sqrt(0.16 / 15) <= np.mean(inside)
    assert (high - low) / 4120 > 0.005  # 1 % of three steps: 1.5 %


def test_a_drift_is_no_change(monkeypatch):
    """White noise alone is the control."""
    spread, at_s, alarms = Spread(0.002, 0.01, 60.0), 2.0 * np.arange(100), [0, 0]
    runs = [1.0 + simulate_body(spread, at_s, 1, np.random.default_rng(i))[:, 0] for i in range(20)]
    for i in range(2):
        alarms[i] = sum(find_departure(run).departed for run in runs)
        white = [departure._NOISES[0]._replace(weight=1.0)]
        monkeypatch.setattr(departure, "_NOISES", white)
    assert alarms[0] <= 1 and alarms[1] >= 15


def test_a_run_that_is_back_at_its_level_does_not_depart():
    slow = noisy(1) * np.where((np.arange(300) >= 150) & (np.arange(300) < 200), 1.03, 1.0)
    assert find_departure(slow[:190]).departed
    found = find_departure(slow)
    assert not found.departed and found.current[:100].all() and not found.current[160:190].any()


def test_a_segment_of_steps_that_are_all_left_out_is_no_warning():
    """The spread changes there alone where the level does: nothing is known of it."""
    run = noisy(27, change=0.03)[:212]
    found = find_changes(StepTimes(run, np.arange(1, 213), np.full(212, ""), "log", "s"))
    assert [row["kind"] for row in found.rows] == ["phase", "ramp"]


def test_few_odd_steps_are_no_change():
    run = noisy(2)
    run[[100, 101, 250]] *= [3.0, 2.0, 0.4]
    assert not find_departure(run).departed
    assert find_departure(np.full(100, 2.0)).p_value == 1.0  # a clock that shows no noise


def test_too_few_values_tell_nothing():
    assert find_departure(np.ones(FEWEST + 2 * LEAST - 1)) is None
    assert find_departure(np.full(50, np.nan)) is None


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
    found = prism.summary(Watch(log, seed=1).look())
    assert found["completed_steps"] == 700
    assert found["time_left"]["p50"] == pytest.approx(600.0, rel=3e-3)


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
        numbers = prism.summary(Watch("train.log", held, seed=1).look())
        assert numbers["time_left"]["mean"] == pytest.approx(200 * 2.0 + 5 * 3.0, rel=2e-3)
        assert not numbers["departure"]["departed"]


def test_past_pauses_are_elapsed_time(log):
    """And as many are to come."""
    seconds = steps(400)
    seconds[49::50] += 30.0
    log.write_text(lines(seconds, total=800))
    found = prism.summary(Watch(log, seed=1).look())
    assert found["elapsed"] == pytest.approx(seconds.sum(), rel=1e-5)
    assert found["time_left"]["p50"] == pytest.approx(seconds.sum(), rel=2e-3)


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


@pytest.mark.parametrize("word", ["nan", "inf", "-NaN"])
def test_a_line_without_a_number_for_its_time_is_left_out(log, word):
    there = log.read_text().splitlines(keepends=True)
    there[20] = re.sub(r"(ms\): )[0-9.]+", rf"\g<1>{word}", there[20])
    log.write_text("".join(there))
    found = prism.summary(Watch(log, seed=1).look())
    assert found["completed_steps"] == 200
    assert found["time_left"]["p50"] == pytest.approx(800 * steps(200).mean(), rel=1e-3)
    growing = GrowingLog(log)
    assert growing.read().times.skipped == (21,)
    more = lines(steps(203)[200:], first=201)
    with log.open("a") as file:
        file.write(re.sub(r"(ms\): )[0-9.]+", rf"\g<1>{word}", more, count=1))
    for last in (203, 204):
        times = growing.read().times
        assert times.skipped == (21, 201) and times.step[-1] == last
        assert [re.findall(r"\d+", x)[-2:] for x in times.notes if "21" in x] == [["21", "201"]]
        with log.open("a") as file:
            file.write(lines(steps(204)[203:], first=204))


def test_a_look_reads_what_is_new(log, monkeypatch):
    """As much as is read again before it, and gives what a look at the whole file gives."""
    seconds, sizes = steps(3000), []
    log.write_text("log_interval ...... 1\n" + lines(seconds[:2000], 9000))
    growing = GrowingLog(log)
    growing.read()
    read = readers.read_step_times
    monkeypatch.setattr(
        reading, "read_step_times",
        lambda what, **options: sizes.append(len(what.files[0].text)) or read(what, **options),
    )  # fmt: skip
    for first, last in ((2000, 2001), (2001, 2100), (2100, 3000)):
        text = lines(seconds[first:last], 9000, first + 1)
        with log.open("a") as file:
            file.write(text)
        sizes.clear()
        found = growing.read()
        assert sum(sizes) < 2 * (1 << 14) + len(text) + 100
    with log.open("a") as file:  # a restart, and half a line
        file.write(lines(1.1 * seconds[2900:2950], 9000, 2901) + " iteration 2951/ 9000 | el")
    found, whole = growing.read(), GrowingLog(log).read()
    assert found.times.seconds.tolist() == whole.times.seconds.tolist()
    assert found.times.step.tolist() == whole.times.step.tolist() == list(range(1, 2951))
    assert found.total == whole.total == 9000


def test_lines_that_contradict_what_is_known_have_the_whole_file_read(log):
    growing = GrowingLog(log)
    growing.read()
    text = log.read_text()
    changed = lines(2.0 * steps(200)) + lines(steps(10, 1), first=201)
    assert len(changed) > len(text)
    log.write_text(changed)  # the same file and first bytes, other steps
    found, whole = growing.read().times, GrowingLog(log).read().times
    assert found.step.tolist() == whole.step.tolist()
    assert found.seconds.tolist() == whole.seconds.tolist()


def test_a_log_beyond_what_is_read_at_once_is_read_in_pieces(log, monkeypatch):
    whole = GrowingLog(log).read()
    monkeypatch.setattr(reading, "_PIECE", 4000)
    monkeypatch.setattr(files, "MOST_TEXT", 1)  # the whole text would be refused
    found = GrowingLog(log).read()
    assert found.times.seconds.tolist() == whole.times.seconds.tolist()
    assert (found.total, found.times.notes) == (whole.total, whole.times.notes)


@pytest.mark.parametrize("change", [None, 300, 900])
@pytest.mark.parametrize("held", [None, "job"])
def test_a_long_run_in_blocks_says_what_all_its_steps_say(log, monkeypatch, change, held):
    """Within a fifth of P10 to P90, six errors of their 1,000 draws; stalls and pauses included."""
    seconds = 58.5 * steps(1000, 5, 1.03, change)
    seconds[99::100] += 5.0
    seconds[450] += 200.0
    log.write_text(lines(seconds, 3000))
    found = []
    for most in (blocks.MOST, 256):
        monkeypatch.setattr(blocks, "MOST", most)
        job = None if held is None else "pipeline-8x32"
        found.append(Watch(log, job, seed=1).look().figures())
    whole, few = found
    apart = [abs(few["time_left"][q] - whole["time_left"][q]) for q in ("p10", "p50", "p90")]
    assert max(apart) < 0.2 * (whole["time_left"]["p90"] - whole["time_left"]["p10"])
    assert few["completed_steps"] == whole["completed_steps"] == 1000
    assert few["elapsed"] == pytest.approx(seconds.sum(), rel=1e-6)
    assert few["last_step_time"] == pytest.approx(seconds[-20:].mean(), rel=1e-6)
    assert few["departure"]["departed"] is whole["departure"]["departed"] is (change is not None)
    if change is not None:
        low, high = few["departure"]["step_range"]
        assert low - 4 <= change + 1 <= high + 4


def test_blocks_hold_all_of_the_time_and_no_stalls(monkeypatch):
    monkeypatch.setattr(blocks, "MOST", 50)
    seconds = steps(400)
    seconds[[100, 101, 300]] += [7.0, 3.0, 5.0]
    found = blocks.in_blocks(seconds)
    assert (found.size, found.means.size) == (8, 50)
    assert found.stall_at.tolist() == [100, 300]
    assert found.stall == pytest.approx([10.0, 5.0], abs=0.2)
    assert 8 * found.means.sum() + found.stall.sum() == pytest.approx(seconds.sum(), rel=1e-12)
    assert np.ptp(found.means) < 0.1
