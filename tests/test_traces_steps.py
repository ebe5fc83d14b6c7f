"""Step times and totals from tables and logs."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism import PrismError
from prism.traces import StepTimes, read_step_times, read_totals, total_per_run


@pytest.fixture
def read(tmp_path):
    """Read a text as step times."""

    def read_text(text, **options):
        path = tmp_path / "steps.csv"
        path.write_text(text)
        return read_step_times(path, **options)

    return read_text


@pytest.mark.parametrize(
    ("column", "value", "seconds"),
    [
        ("step_s", "1.5", 1.5),
        ("step_ms", "1500", 1.5),
        ("step_us", "15", 15e-6),
        ("step_time_s", "2", 2.0),
        ("delta_ms", "111", 0.111),
        ("time_seconds", "3", 3.0),
        ("Step_MS", "1", 0.001),
    ],
)
def test_the_unit_is_the_last_word_of_the_name(read, column, value, seconds):
    times = read(f"{column}\n{value}\n{value}\n")
    assert list(times.seconds) == [seconds, seconds]
    assert times.column == column and times.mean_over == 1 and len(times.notes) == 1
    assert list(times.step) == [0, 1] and list(times.run) == ["", ""]


def test_runs_and_steps(read):
    times = read("run,step,step_s\nb,2,1\na,1,2\nb,1,3\na,2,4\n")
    assert list(times.run) == ["b", "b", "a", "a"]
    assert list(times.step) == [1, 2, 1, 2]
    assert list(times.seconds) == [3, 1, 2, 4]
    assert total_per_run(times) == {"b": 4.0, "a": 6.0}
    assert list(total_per_run(times)) == ["b", "a"]


def test_steps_are_numbered_per_run_where_they_are_not(read):
    times = read("run_id,step_s\n01,1\n1,2\n01,3\n")
    assert list(times.run) == ["01", "01", "1"]  # not the same run
    assert list(times.step) == [0, 1, 0]


def test_several_durations_are_listed_with_the_groups(read):
    text = "t_s,step_s,system\n0,1,x\n1,2,y\n2,3,x\n3,4,y\n"
    with pytest.raises(
        PrismError, match=r"t_s \[s\], step_s \[s\]; .*--column .*--where .*system: x, y"
    ):
        read(text)
    times = read(text, column="step_s", where={"system": "y"})
    assert list(times.seconds) == [2, 4]


def test_several_groups_are_listed_with_their_values(read):
    text = "trace,gpu kind,step_s\n" + "A,h 100,1\nA,h 100,2\nB,a100,3\nB,h 100,4\n" * 3
    with pytest.raises(PrismError, match="trace: A, B; gpu kind: a100, h 100; .*--where"):
        read(text)
    assert list(read(text, where={"trace": "A"}).seconds) == [1, 2] * 3
    with pytest.raises(PrismError, match=": gpu kind: a100, h 100; "):
        read(text, where={"trace": "B"})
    assert len(read(text, where={"trace": "*", "gpu kind": "*"}).seconds) == 12


def test_remarks_of_single_rows_are_no_groups(read):
    rows = "".join(f"{i},file{i}.log\n" for i in range(1, 9))
    assert len(read("step_s,file\n" + rows).seconds) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "step"}, "'step' .*unit"),
        ({"column": "stepp_s"}, "'stepp_s'.* mean step_s"),
        ({"where": {"syst": "a"}}, "'syst'.* mean system"),
        ({"where": {"system": "c"}}, "--where system=c: .* a, b"),
        ({"where": {"system": "a", "step": "2"}}, "--where system=a --where step=2: "),
    ],
)
def test_choices_that_are_not_there(read, options, message):
    with pytest.raises(PrismError, match=message):
        read("step,step_s,system\n1,1,a\n2,1,b\n3,1,a\n4,1,b\n", **options)


@pytest.mark.parametrize(("name", "per_second"), [("seconds", 1.0), ("Sec", 1.0), ("ms", 1e3)])
def test_a_unit_alone_is_a_name(read, name, per_second):
    np.testing.assert_allclose(read(f"step,{name}\n1,2\n2,4\n").seconds * per_second, [2, 4])
    with pytest.raises(PrismError, match=rf": {name} \[m?s\], step_s \[s\]"):
        read(f"step,{name},step_s\n1,2,3\n2,4,5\n")


def test_a_minimum_is_no_duration(read):
    assert list(read("min,step_s\n1,2\n1,4\n").seconds) == [2, 4]
    with pytest.raises(PrismError, match="'min' .*unit; .*--unit .* min_s "):
        read("min,step_s\n1,2\n1,4\n", column="min")


@pytest.mark.parametrize("name", ["tokens_per_s", "train/samples_per_second", "Tokens per sec"])
def test_a_rate_is_no_duration(read, name):
    """Tokens in a second are not a step of so many seconds."""
    assert list(read(f"step,{name},step_s\n1,9,2\n2,9,4\n").seconds) == [2, 4]
    for options in ({}, {"column": name}):
        with pytest.raises(PrismError, match=f"{name}.* rate.* step_s"):
            read(f"step,{name}\n1,2\n2,4\n", **options)
    assert list(read("step,time_per_step_s\n1,2\n2,4\n").seconds) == [2, 4]


def test_choices_are_compared_as_numbers_where_no_text_is_equal(read):
    text = "gpus,warm,step_s\n512,True,1\n1024,False,2\n512,False,3\n"
    assert list(read(text, where={"gpus": "512.0"}).seconds) == [1, 3]
    assert list(read(text, where={"warm": "false"}).seconds) == [2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step_s\n1\nx\n2\n", r"steps\.csv:3: step_s .*'x'"),
        ("step_s\n1\n-1\n2\n", r"steps\.csv:3: step_s .*1e-09 and 1e\+09 s;.*unit.* 1 of 3"),
        ("step_s\n1\n2e9\n2\n", r"steps\.csv:3: step_s .*1e\+09 s"),
        ("step_us\n1\n1e-4\n2\n", r"steps\.csv:3: step_us .*1e-09"),
        ("step,step_s\n1,1\n1.5,1\n", r"steps\.csv:3: step .*1\.5,"),
        ("a,b\n1,2\n", "duration .* a, b"),
        ("step_s\n", "and no rows"),
        ("n_avg,step_s\n1,2\n10,2\n", "n_avg, .* 1, 10"),
        ("run,step,step_s\na,1,1\na,1,2\na,2,3\na,2,4\n", r"steps\.csv:3: .*twice; (?!.*--where)"),
        ("gpus,step,step_s\n8,1,1\n9,1,2\n8,2,3\n9,2,4\n", "--where .*gpus"),
        ("step,min\n1,1\n2,1\n", "duration .* step, min; .* seconds"),
        ('{"step_s": 1}', "JSON"),
    ],
)
def test_broken_tables(read, text, message):
    with pytest.raises(PrismError, match=message):
        read(text)


def test_few_bad_values_are_dropped_and_copies_too(read):
    rows = [f"{i},{1 + i / 1000}" for i in range(300)]
    rows[7] = "7,-1"
    rows[9] = "9,"
    times = read("\n".join(["step,step_s", *rows, *rows[100:110]]))
    assert times.seconds.size == 298
    dropped = [re.match(r"(\d+) of 310 rows", note)[1] for note in times.notes[:-1]]
    assert dropped == ["1", "1", "10"]


def test_means_over_steps_count_as_many(read):
    times = read("mean_over,step_s\n10,2\n10,3\n")
    assert times.mean_over == 10 and "10 steps" in times.notes[0]
    assert total_per_run(times) == {"": 50.0}


def line(step, ms):
    return (
        f" iteration {step:8d}/    1000 | consumed samples: 8 | elapsed time per iteration (ms): "
        f"{ms} | learning rate: 1.5E-04 | number of skipped iterations:   0 |\n"
    )


def test_megatron_every_step(read):
    times = read("preamble\n" + "".join(line(i, 100 + i) + "time (ms)\n" for i in (1, 2, 3)))
    assert times.seconds == pytest.approx([0.101, 0.102, 0.103])
    assert list(times.step) == [1, 2, 3] and times.mean_over == 1 and set(times.run) == {""}
    assert times.taken["unit"] == "ms" and len(times.notes) == 1


def test_megatron_log_interval_is_the_difference_of_steps(read):
    times = read("".join(line(10 * i, 50) for i in (1, 2, 3, 5, 6)))
    assert times.mean_over == 10
    assert "10, 20 steps apart" in times.notes[0] and "sqrt(10) = 3.2" in times.notes[1]
    assert total_per_run(times)[""] == pytest.approx(5 * 10 * 0.05)


def test_megatron_one_line_takes_the_interval_from_the_arguments(read):
    assert read("  log_interval .................... 25\n" + line(25, 50)).mean_over == 25
    assert "taken as 1" in read(line(25, 50)).notes[0]


def test_megatron_newer_lines_seconds_and_prefixes(read):
    text = (
        "0: [2024-01-01 00:00:00] iteration 5/ 10 | elapsed time per iteration (s): 2.5 | x\n"
        "0: [2024-01-01 00:00:02] iteration 6/ 10 | elapsed time per iteration (s): 2.25 | x\n"
    )
    assert list(read(text).seconds) == [2.5, 2.25]


def test_megatron_restarts_are_runs_and_copies_are_left_out(read):
    steps = [1, 2, 3, 3, 2, 3, 4]
    times = read("".join(line(step, 10) for step in steps))
    assert list(times.run) == ["0"] * 3 + ["1"] * 3
    assert list(times.step) == [1, 2, 3, 2, 3, 4]
    assert "1 line " in times.notes[0] and "csv:5" in times.notes[1] and "2 runs" in times.notes[1]


@pytest.mark.parametrize("value", ["fast", "-1.0", "nan", "inf", ""])
def test_megatron_bad_number_names_its_line(read, value):
    with pytest.raises(PrismError, match=rf"steps\.csv:3: .*'{value}', .*1e-09"):
        read("x\n" + line(1, 10) + line(2, value))


def test_logs_have_no_columns(read):
    with pytest.raises(PrismError, match="log.*column"):
        read(line(1, 10), column="step_s")


def mllog(key, value, time_ms=0, **metadata):
    event = {"time_ms": time_ms, "key": key, "value": value, "metadata": metadata}
    return f":::MLLOG {json.dumps(event)}\n"


def mlperf(n_values, every=1, value=0.5, unit=8 * 16, key="train_step_timing"):
    """Log with a value each `every` steps of 0.5 s; the batch has 8 samples of 16 tokens."""
    text = mllog("global_batch_size", 8) + mllog("max_sequence_length", 16)
    text += mllog("run_start", None)
    for i in range(1, n_values + 1):
        stats = {key: value, "loss": 3.0}
        clock = round(i * every * value * 1000) + (1000 if i > n_values / 2 else 0)
        text += mllog("tracked_stats", stats, clock, step=i * every * unit)
        text += mllog("tracked_stats", {"validation_step_timing": 9.0}, clock)
    return text


@pytest.mark.parametrize("unit", [8 * 16, 8, 1])
def test_mlperf_steps(read, unit):
    times = read(mlperf(12, unit=unit))
    assert list(times.seconds) == [0.5] * 12 and times.column == "train_step_timing"
    assert list(times.step) == list(range(1, 13))
    assert times.mean_over == 1 and "1 step (" in times.notes[0]


def test_mlperf_values_over_several_steps(read):
    times = read(mlperf(12, every=10, key="train_step_time"))
    assert times.mean_over == 10 and "10 steps (" in times.notes[0]
    assert list(times.step) == list(range(10, 130, 10))


def test_mlperf_runs_and_broken_lines(read):
    text = mlperf(3) + ':::MLLOG {"key": "tracked_st\n' + mlperf(4)
    times = read(text)
    assert list(times.run) == ["0"] * 3 + ["1"] * 4
    assert list(times.step) == [1, 2, 3, 1, 2, 3, 4]
    assert any("1 broken :::MLLOG" in note for note in times.notes)


def test_mlperf_without_step_times_says_what_it_has(read):
    with pytest.raises(PrismError, match="tracked_stats .*throughput; .*train_step_tim"):
        read(mllog("tracked_stats", {"throughput": 3.0}))
    with pytest.raises(PrismError, match="no tracked_stats"):
        read(mllog("run_start", None))


@pytest.mark.parametrize("value", ["fast", -1, None, True, [1]])
def test_mlperf_bad_value_names_its_line(read, value):
    with pytest.raises(PrismError, match=r"steps\.csv:2: .*1e-09"):
        read("\n" + mllog("tracked_stats", {"train_step_timing": value}))


@pytest.fixture
def runs(tmp_path):
    frame = pd.DataFrame({"run_id": [7, 8, 9], "total_s": [10.0, 12.0, np.nan], "n": [1, 2, 3]})
    frame.to_csv(tmp_path / "runs.csv", index=False)
    return tmp_path / "runs.csv"


def test_totals(runs):
    assert read_totals(f"{runs}:total_s") == {"7": 10.0, "8": 12.0}
    assert read_totals(f"{runs}:total_s", {"run_id": "8", "trace": "A"}) == {"8": 12.0}


def test_totals_and_steps_name_runs_alike(runs, read):
    times = read("run_id,step_ms\n7,10\n8,11\n")
    assert set(total_per_run(times)) == set(read_totals(f"{runs}:total_s"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{}", "expected FILE:COLUMN"),
        ("{}:", "expected FILE:COLUMN"),
        ("{}:total", "'total'.* mean total_s"),
        ("{}:n", "'n' .*unit"),
        ("{}x:total_s", "runs.csvx: "),
    ],
)
def test_totals_that_are_not_there(runs, spec, message):
    with pytest.raises(PrismError, match=message):
        read_totals(spec.format(runs))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run,t_s\na,1\na,2\n", r"t\.csv:3: run a .*second total; (?!.*--where)"),
        ("run,sys,t_s\na,x,1\na,y,2\n", "run a .*second total; .*--where .*sys: x, y"),
        ("run,t_s\na,-1\n", r"t\.csv:2: t_s .*-1, .* 0"),
        ("t_s\n1\n2\n", "2 totals .*run or run_id"),
        ("run,t_s\na,\n", "t_s .*empty"),
    ],
)
def test_broken_totals(tmp_path, text, message):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(PrismError, match=message):
        read_totals(f"{path}:t_s")


PIECES = st.sampled_from(
    [
        "iteration 1/ 9 |",
        " iteration 20/ 9 | elapsed time per iteration (ms): 5.5 |",
        "elapsed time per iteration (s): ",
        "elapsed time per iteration (",
        ":::MLLOG ",
        mllog("tracked_stats", {"train_step_timing": 1.5}, 3, step=4).strip(),
        mllog("tracked_stats", {"train_step_timing": 1e300}, 1e300, samples_count=-7).strip(),
        mllog("global_batch_size", 0).strip(),
        mllog("run_start", [1]).strip(),
        ':::MLLOG {"key": "tracked_stats", "value": 3, "metadata": []}',
        ':::MLLOG {"key": ["a"], "time_ms": NaN, "value": {"train_step_timing": Infinity}}',
        "9" * 400,
        "\n",
        "\n",
        " 12 ",
        "é",
    ]
)


@given(st.lists(PIECES, max_size=12).map("".join))
def test_any_log_gives_step_times_or_an_error(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("log") / "log"
    path.write_text(text)
    try:
        times = read_step_times(path)
    except PrismError as error:
        assert str(path) in str(error)
    else:
        assert isinstance(times, StepTimes) and (times.seconds > 0).all()
        assert times.seconds.shape == times.step.shape == times.run.shape


CELL = st.sampled_from(["", "0", "1", "2", "1.5", "a", "b", "nan", "inf", "-1", "True", "é"])


@given(st.lists(st.lists(CELL, min_size=4, max_size=4), min_size=1, max_size=8), st.booleans())
def test_any_table_gives_step_times_or_an_error(tmp_path_factory, rows, choose):
    path = tmp_path_factory.mktemp("table") / "steps.csv"
    path.write_text("\n".join(["run,step,step_s,trace", *(",".join(row) for row in rows)]))
    try:
        times = read_step_times(path, where={"trace": "a"} if choose else None)
    except PrismError as error:
        assert str(path) in str(error)
    else:
        assert (times.seconds > 0).all() and np.isfinite(times.seconds).all()
        assert times.seconds.shape == times.step.shape == times.run.shape
        assert sum(total_per_run(times).values()) == pytest.approx(times.seconds.sum())


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=20))
def test_values_come_back_as_written(tmp_path_factory, milliseconds):
    path = tmp_path_factory.mktemp("table") / "steps.csv"
    pd.DataFrame({"step_ms": milliseconds}).to_csv(path, index=False)
    assert list(read_step_times(path).seconds) == [value / 1000 for value in milliseconds]
