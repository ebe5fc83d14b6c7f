"""Step times and totals from tables, Megatron's and MLPerf's logs: which values, of which unit."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import prism


@pytest.fixture
def shown(run, tmp_path):
    """What `prism show` says of a text: its JSON, or the message of a refusal."""

    def show(text, *options):
        path = tmp_path / "steps.csv"
        path.write_text(text)
        status, out, err = run("show", path, "--json", *options)
        assert status in (0, 2) and (status == 0) == bool(out), err
        return json.loads(out) if status == 0 else err

    return show


def where(**choices):
    return [x for name, value in choices.items() for x in ("--where", f"{name}={value}")]


def figures(found):
    """Values, runs, steps of a value, mean [s]."""
    return found["n"], found["n_runs"], found["mean_over"], pytest.approx(found["mean"])


@pytest.mark.parametrize(
    ("column", "second", "unit"),
    [
        ("step_s", 1.0, "s"), ("step_ms", 1e-3, "ms"), ("step_us", 1e-6, "us"),
        ("step_ns", 1e-9, "ns"), ("step_time_s", 1.0, "s"), ("delta_ms", 1e-3, "ms"),
        ("time_seconds", 1.0, "s"), ("Step_MS", 1e-3, "ms"), ("seconds", 1.0, "s"),
        ("Sec", 1.0, "s"), ("ms", 1e-3, "ms"), ("step_minutes", 60.0, "min"),
        ("time_per_step_s", 1.0, "s"),
    ],
)  # fmt: skip
def test_the_unit_is_the_last_word_of_the_name(shown, column, second, unit):
    found = shown(f"{column}\n12\n18\n")
    assert figures(found) == (2, 1, 1, 15.0 * second)
    assert found["taken"]["column"] == column and found["taken"]["unit"] == unit
    given = shown("step,x\n1,12\n2,18\n", "--column", "x", "--unit", unit)
    assert figures(given) == (2, 1, 1, 15.0 * second)


@pytest.mark.parametrize("seed", range(3))
def test_the_spread_is_that_of_the_values_as_written(shown, seed):
    ms = np.random.default_rng(seed).lognormal(6.0, 0.2, 200)
    found = shown("step_ms\n" + "\n".join(map(repr, ms.tolist())))
    assert found["std"] == pytest.approx(1e-3 * ms.std(ddof=1))
    for q in (5, 50, 95, 99):
        assert found[f"p{q}"] == pytest.approx(1e-3 * np.quantile(ms, 0.01 * q))


@pytest.mark.parametrize(
    ("text", "choices", "expected"),
    [
        ("run,step,step_s\nb,2,1\na,1,2\nb,1,3\na,2,6\n", {}, (4, 2, 1, 3.0)),
        ("run,step,step_s\nb,2,1\na,1,2\nb,1,3\na,2,6\n", {"run": "a"}, (2, 1, 1, 4.0)),
        ("run_id,step_s\n01,1\n1,2\n01,3\n", {"run_id": "01"}, (2, 1, 1, 2.0)),
        ("t_s,step_s,system\n0,1,x\n1,2,y\n2,3,x\n3,4,y\n", {"system": "y"}, None),
        ("gpus,kind,step_s\n512,a,1\n1024,a,2\n512,a,3\n512,b,8\n", {"gpus": "512", "kind": "a"},
         (2, 1, 1, 2.0)),
        ("gpus,kind,step_s\n512,a,1\n1024,a,2\n512,a,3\n512,b,8\n", {"kind": "a", "gpus": "512"},
         (2, 1, 1, 2.0)),
        ("gpus,warm,step_s\n512,True,1\n1024,False,2\n512,False,3\n", {"gpus": "512.0",
         "warm": "*"}, (2, 1, 1, 2.0)),
        ("gpus,warm,step_s\n512,True,1\n1024,False,2\n512,False,4\n", {"warm": "false"},
         (2, 1, 1, 3.0)),
        ("trace,step_s\nA,1\nB,2\nA,1\nB,2\n", {"trace": "*"}, (4, 1, 1, 1.5)),
        ("min,step_s\n1,2\n1,4\n", {}, (2, 1, 1, 3.0)),  # a minimum is no duration
        ("tokens_per_s,step,step_s\n9,1,2\n9,2,4\n", {}, (2, 1, 1, 3.0)),  # nor a rate
        ("step,samples_per_second,global_batch_size\n1,4,8\n2,8,8\n", {}, (2, 1, 1, 1.5)),
        ("step,tokens_per_s,tokens_per_step\n1,4,8\n2,8,8\n", {}, (2, 1, 1, 1.5)),
        ("step,tokens_per_s,global_batch_size,seq_len\n1,4,2,4\n2,8,2,4\n", {}, (2, 1, 1, 1.5)),
        ("step,steps_per_second\n1,4\n2,8\n", {}, (2, 1, 1, 0.1875)),
        ("mean_over,step_s\n10,2\n10,3\n", {}, (2, 1, 10, 2.5)),
        ("step,iteration-time\n10,5\n20,6\n30,7\n50,8\n", {}, (4, 1, 10, 6.5)),
        ("step,train_step_timing in s\n10,5\n20,6\n30,7\n", {}, (3, 1, 1, 6.0)),
        # a tool's own name before others, values before means, times before rates
        ("step,step_time_s,iteration-time\n10,1,5\n20,2,6\n", {}, (2, 1, 10, 5.5)),
        ("step,avg_step_time_s,step_time_s\n1,9,2\n2,9,4\n", {}, (2, 1, 1, 3.0)),
        ("step,steps_per_second,avg_step_time_s\n1,9,2\n2,9,4\n", {}, (2, 1, 1, 3.0)),
        ("step,forward_s,step_time_s,data_ms\n1,9,2,7\n2,9,4,7\n", {}, (2, 1, 1, 3.0)),
        ("step_s,file\n" + "".join(f"{i},f{i}.log\n" for i in range(1, 9)), {}, (8, 1, 1, 4.5)),
    ],
)  # fmt: skip
def test_rows_runs_and_counts(shown, text, choices, expected):
    found = shown(text, *where(**choices))
    if expected is None:  # two durations
        assert "t_s [s], step_s [s]" in found and "system" not in found.split("--where")[0]
        found = shown(text, *where(**choices), "--column", "step_s")
        expected = (2, 1, 1, 3.0)
    assert figures(found) == expected


@pytest.mark.parametrize(
    ("options", "mean", "n"),
    [
        (["--skip", "2"], (3 + 4 + 30 + 40) / 4, 4), (["--steps", "2:3"], (2 + 3 + 20 + 30) / 4, 4),
        (["--steps", ":1"], 5.5, 2), (["--steps", "4:"], 22.0, 2),
        (["--steps", "2:", "--skip", "1", "--where", "run=b"], 35.0, 2),
    ],
)  # fmt: skip
def test_steps_that_are_left_out_are_so_in_every_run(shown, options, mean, n):
    rows = [f"a,{i},{i}" for i in range(1, 5)] + [f"b,{i},{10 * i}" for i in range(1, 5)]
    found = shown("\n".join(["run,step,step_s", *rows, ""]), *options)
    assert (found["n"], found["mean"]) == (n, pytest.approx(mean))


def test_first_steps_of_means_are_those_of_their_steps(shown):
    text = "mean_over,step,step_s\n" + "".join(f"10,{10 * i},{i}\n" for i in range(1, 7))
    assert shown(text, "--skip", "20")["mean"] == pytest.approx(np.mean([3, 4, 5, 6]))


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("step_s\n1\nx\n2\n", (), ["steps.csv:3: step_s", "'x'"]),
        ("step_s\n1\n-1\n2\n", (), ["steps.csv:3: step_s", "1 of 3"]),
        ("step_s\n1\n2e9\n2\n", (), ["steps.csv:3: step_s"]),
        ("step_us\n1\n1e-4\n2\n", (), ["steps.csv:3: step_us"]),
        ("step,step_s\n1,1\n1.5,1\n", (), ["steps.csv:3: step", "1.5,"]),
        ("a,b\n1,2\n", (), ["steps.csv"]),
        ("step_s\n", (), ["steps.csv"]),
        ("n_avg,step_s\n1,2\n10,2\n", (), ["n_avg", "1, 10"]),
        ("run,step,step_s\na,1,1\na,1,2\na,2,3\na,2,4\n", (), ["steps.csv:3: "]),
        ("gpus,step,step_s\n8,1,1\n9,1,2\n8,2,3\n9,2,4\n", (), ["--where", "gpus"]),
        ("step,tokens_per_s\n1,2\n2,4\n", (), ["tokens_per_s"]),
        ("step,x\n1,500\n2,600\n", ("--column", "x"), ["--unit"]),
        ("step,step time\n1,500\n2,600\n", (), ["--unit ms"]),  # seconds beyond any step
        ("step,ms,step_s\n1,2,3\n2,4,5\n", (), ["ms [ms], step_s [s]"]),
        ("kind,step_s\na,1\nb,2\n", (), ["kind: a, b", "--where"]),
        ("step,step_s,kind\n1,1,a\n2,1,b\n", ("--column", "stepp_s"), ["'stepp_s'", "step_s?"]),
        ("step,step_s,kind\n1,1,a\n2,1,b\n", where(kin="a"), ["'kin'", "kind?"]),
        ("step,step_s,kind\n1,1,a\n2,1,b\n", where(kind="c"), ["kind=c", "a, b"]),
        ("step,step_s,kind\n1,1,a\n2,1,b\n", where(kind="a", step="2"), ["kind=a", "step=2"]),
        ("step,t_s\n" + "".join(f"{i},{i}\n" for i in range(1, 20)), (), ["'t_s'"]),  # a clock
    ],
)  # fmt: skip
def test_tables_and_choices_that_are_wrong(shown, text, options, words):
    found = shown(text, *options)
    assert isinstance(found, str) and all(word in found for word in words)


def test_few_bad_values_are_dropped_and_copies_too(shown):
    rows = [f"{i},{1 + i / 1000}" for i in range(300)]
    seconds = [1 + i / 1000 for i in range(300) if i not in (7, 9)]
    rows[7] = "7,-1"
    rows[9] = "9,"
    found = shown("\n".join(["step,step_s", *rows, *rows[100:110]]))
    assert figures(found) == (298, 1, 1, np.mean(seconds))
    counts = [re.match(r"(\d+) of 310 ", note) for note in found["notes"]]
    assert [int(c[1]) for c in counts if c] == [1, 1, 10]


# ---------------------------------------------------------------------------------------- logs
def line(step, ms, unit="ms"):
    return (
        f" iteration {step:8d}/    1000 | consumed samples: 8 | elapsed time per iteration "
        f"({unit}): {ms} | learning rate: 1.5E-04 | number of skipped iterations:   0 |\n"
    )


def lines(*steps):
    return "".join(line(step, 100 + step) for step in steps)


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("preamble\n" + lines(1, 2, 3).replace("|\n", "|\ntime (ms)\n"), (), (3, 1, 1, 0.102)),
        (lines(10, 20, 30, 50, 60), (), (5, 1, 10, 0.134)),  # the log interval, one line lost
        (lines(10, 30, 40, 50, 60), (), (5, 1, 10, 0.138)),
        (lines(10, 20, 25, 35, 45), (), (5, 1, 10, 0.127)),  # as most are
        ("  log_interval .................... 25\n" + line(25, 50), (), (1, 1, 25, 0.05)),
        (line(25, 50), (), (1, 1, 1, 0.05)),
        (line(5, 2.5, "s") + line(6, 2.25, "s"), (), (2, 1, 1, 2.375)),
        (lines(1, 2, 3, 3, 2, 3, 4), (), (6, 2, 1, 0.1025)),  # copied, then begun anew
        (lines(1, 2, 3, 3, 2, 3, 4), where(run="1"), (3, 1, 1, 0.103)),
    ],
)  # fmt: skip
def test_megatron_s_lines(shown, text, options, expected):
    found = shown(text, *options)
    assert figures(found) == expected
    assert found["taken"]["unit"] == ("s" if "(s)" in text else "ms")


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_step_that_took_no_number_is_left_out(shown, value):
    """Whoever follows a log that grows cannot mend it; a record of MLPerf is whole."""
    steps = [line(step, value if step == 2 else 10) for step in range(1, 6)]
    assert shown("".join(steps))["n"] == 4
    event = {"key": "tracked_stats", "value": {"train_step_timing": value}}
    assert "steps.csv:2: " in shown("\n:::MLLOG " + json.dumps(event))


@pytest.mark.parametrize("value", ["fast", "-1.0", ""])
def test_a_bad_number_of_a_log_names_its_line(shown, value):
    assert f"steps.csv:3: the step time is '{value}'" in shown("x\n" + line(1, 10) + line(2, value))
    assert "column" in shown(line(1, 10), "--column", "step_s")
    event = {"key": "tracked_stats", "value": {"train_step_timing": value}}
    assert "steps.csv:2: " in shown("\n:::MLLOG " + json.dumps(event))


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


@pytest.mark.parametrize("unit", [8 * 16, 8, 1])  # steps, samples or tokens are counted
def test_mlperf_s_lines(shown, unit):
    found = shown(mlperf(12, unit=unit))
    assert figures(found) == (12, 1, 1, 0.5) and found["column"] == "train_step_timing"
    assert shown(mlperf(12, unit=unit), "--steps", "3:6")["n"] == 4
    found = shown(mlperf(12, every=10, key="train_step_time"), "--steps", "30:60")
    assert figures(found) == (4, 1, 10, 0.5)
    text = mlperf(3) + ':::MLLOG {"key": "tracked_st\n' + mlperf(4, value=0.7)
    found = shown(text)
    assert figures(found) == (7, 2, 1, (1.5 + 2.8) / 7)
    assert figures(shown(text, *where(run="1"))) == (4, 1, 1, 0.7)
    assert any(note.startswith("1 broken") for note in found["notes"])
    assert "throughput" in shown(mllog("tracked_stats", {"throughput": 3.0}))


# -------------------------------------------------------------------------------------- totals
@pytest.mark.parametrize("mean_over", [1, 10])
def test_the_offset_is_what_totals_have_beyond_the_steps(run, tmp_path, mean_over):
    rng = np.random.default_rng(1)
    steps = pd.DataFrame({"run_id": np.repeat([7, 8, 9], 40), "mean_over": mean_over,
                          "step_ms": 500.0 * (1.0 + 0.01 * rng.standard_normal(120))})  # fmt: skip
    sums = 1e-3 * mean_over * steps.groupby("run_id")["step_ms"].sum()
    beyond = {9: 30.0, 7: 32.0, 8: 34.0}
    total = [sums[run] + more for run, more in beyond.items()]
    totals = pd.DataFrame({"run_id": [*beyond, 6], "total_s": [*total, 5.0], "n": 1})
    steps.to_csv(tmp_path / "steps.csv", index=False)
    totals.to_csv(tmp_path / "runs.csv", index=False)

    def offset(column="total_s"):
        spec = f"{tmp_path / 'runs.csv'}:{column}"
        status, out, err = run("fit", tmp_path / "steps.csv", "--totals", spec, "--json")
        return json.loads(out)["offset"]["mean_s"] if status == 0 else err

    assert offset() == pytest.approx(32.0, abs=0.5)
    totals.assign(total_ms=1e3 * totals["total_s"]).to_csv(tmp_path / "runs.csv", index=False)
    assert offset("total_ms") == pytest.approx(32.0, abs=0.5)
    for column, word in (("total", "total_s?"), ("n", "'n'"), ("", "FILE:COLUMN")):
        assert word in offset(column)


def test_a_run_is_as_long_as_the_steps_that_its_means_cover(tmp_path):
    """Six runs of 100 steps of 15.1 s, as means of ten, held against a job of 15 s and more."""
    job = prism.load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"pp": 2, "dp": 2, "microbatches": 4},
        "cluster": {"nodes": 1, "gpus_per_node": 4},
        "variability": {"effects": {"rank": {"cv": 0.01}}}, "run": {"steps": 100},
    })  # fmt: skip
    run = np.repeat(np.arange(6), 10)
    steps = pd.DataFrame({"run": run, "mean_over": 10, "step_s": 15.05 + 0.02 * run})
    steps.to_csv(tmp_path / "steps.csv", index=False)
    found = prism.validate(job, measured=tmp_path / "steps.csv", quantity="time_to_train", seed=1)
    summary = prism.summary(found)
    assert summary["n_measured"] == 6 and abs(summary["mean_error"]) < 0.03


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run,t_s\na,1\na,2\n", ["t.csv:3: run a"]),
        ("run,sys,t_s\na,x,1\na,y,2\n", ["run a", "--where", "sys: x, y"]),
        ("run,t_s\na,-1\n", ["t.csv:2: t_s", "-1, "]),
        ("t_s\n1\n2\n", ["2 totals"]),
        ("run,t_s\na,\n", ["t_s"]),
    ],
)
def test_broken_totals(run, tmp_path, text, words):
    (tmp_path / "t.csv").write_text(text)
    (tmp_path / "steps.csv").write_text("run,step_s\n" + "a,1\na,1.1\n" * 8 + "b,1\nb,1.1\n" * 8)
    status, _, err = run("fit", tmp_path / "steps.csv", "--totals", f"{tmp_path / 't.csv'}:t_s")
    assert status == 2 and all(word in err for word in words)


# ---------------------------------------------------------------------------------------- any
PIECES = st.sampled_from(
    [
        "iteration 1/ 9 |", " iteration 20/ 9 | elapsed time per iteration (ms): 5.5 |",
        "elapsed time per iteration (s): ", ":::MLLOG ", line(3, 5.5), line(4, 5.25),
        mllog("tracked_stats", {"train_step_timing": 1.5}, 3, step=4).strip(),
        mllog("tracked_stats", {"train_step_timing": 1e300}, 1e300, samples_count=-7).strip(),
        mllog("run_start", [1]).strip(), mllog("global_batch_size", 0).strip(),
        ':::MLLOG {"key": "tracked_stats", "value": 3, "metadata": []}',
        ':::MLLOG {"key": ["a"], "time_ms": NaN, "value": {"train_step_timing": Infinity}}',
        "9" * 400, "\n", "\n", " 12 ", "é",
    ]
)  # fmt: skip
CELL = st.sampled_from(["", "0", "1", "2", "1.5", "a", "b", "nan", "inf", "-1", "True", "é"])
TABLES = st.lists(st.lists(CELL, min_size=4, max_size=4), min_size=1, max_size=8).map(
    lambda rows: "\n".join(["run,step,step_s,trace", *(",".join(row) for row in rows)])
)


@given(st.lists(PIECES, max_size=12).map("".join) | TABLES)
def test_any_text_gives_an_answer_or_a_reason(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("any") / "steps"
    path.write_text(text)
    try:
        found = prism.summary(prism.fit(path, seed=1))
    except prism.PrismError as error:
        assert str(path) in str(error)
    else:
        json.dumps(found, allow_nan=False)
        assert found["step_time"]["mean"] > 0.0
