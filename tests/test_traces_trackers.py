"""Step times in TensorBoard's files and in tables that W&B and MLflow export."""

import gzip
import json

import numpy as np
import pandas as pd
import pytest
from events_made import block, event, events
from events_made import run as scalars
from test_traces_logs import VALUES, same

TAGS = {
    "iteration-time": (1.0, True), "train/iteration-time": (1.0, True),
    "time_metrics/end_to_end(s)": (1.0, True), "train_step_timing in s": (1.0, False),
    "perf/step_time_seconds": (1.0, False), "perf/iteration_time_ms": (1e3, False),
}  # fmt: skip


@pytest.fixture
def shown(run, tmp_path):
    """What `prism show` says of bytes, a table or a folder; the message of a refusal."""

    def show(what, *options):
        path = what if not isinstance(what, bytes | pd.DataFrame) else tmp_path / "file"
        if isinstance(what, pd.DataFrame):
            what = what.to_csv(index=False).encode()
        if isinstance(what, bytes):
            path.write_bytes(what)
        status, out, err = run("show", path, "--json", *options)
        assert status in (0, 2) and (status == 0) == bool(out), err
        return json.loads(out) if status == 0 else err

    return show


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("every", [1, 10])
def test_events_by_the_names_of_the_tools(shown, tag, every):
    unit, is_mean = TAGS[tag]
    data = events(scalars(tag, VALUES, every, unit=unit))
    over = every if is_mean else 1
    assert same(shown(data), VALUES, mean_over=over) and shown(data)["column"] == tag
    some = shown(data, "--steps", f"{4 * every}:{9 * every}")
    assert same(some, VALUES[3:9], mean_over=over)


@pytest.mark.parametrize("kind", ["simple", "tensor", "double"])
def test_scalars_however_they_are_written(shown, kind):
    rows = [(i, 5.0 * i, "step_s", 4.5 + i % 3, kind) for i in range(1, 9)]
    for data in (events(rows), gzip.compress(events(rows))):
        assert same(shown(data), [4.5 + i % 3 for i in range(1, 9)])


def test_files_of_a_folder_are_restarts_where_steps_come_again(shown, tmp_path):
    folder = tmp_path / "tb"
    folder.mkdir()
    (folder / "events.1").write_bytes(events(scalars("iteration-time", VALUES)))
    later = scalars("iteration-time", VALUES + 1, first=12)
    (folder / "events.0").write_bytes(events(later))
    (folder / "args.txt").write_text("x")
    assert same(shown(folder), np.r_[VALUES, VALUES + 1])
    (folder / "events.2").write_bytes(events(scalars("iteration-time", VALUES + 3, first=20)))
    found = shown(folder)
    assert same(found, np.r_[VALUES, VALUES + 1, VALUES + 3], n_runs=2)
    assert same(shown(folder, "--where", "run=1"), VALUES + 3)
    assert any("step 21" in note for note in found["notes"])


def test_events_that_are_cut_or_damaged(shown):
    whole = events(scalars("iteration-time", VALUES))
    assert same(shown(whole[:-20]), VALUES[:11])
    assert len(shown(whole[:-20])["notes"]) == len(shown(whole)["notes"]) + 1
    for data in (whole + event(2e9, 13, b"\xff\xff"),
                 events([]) + event(1.7e9, 1, block(9, b"x")) + whole):  # fmt: skip
        assert same(shown(data), VALUES)


def test_scalars_to_choose_among(shown):
    assert "iteration-time" in shown(events(scalars("lm loss", VALUES)))
    both = events(scalars("b_s", VALUES) + scalars("a_ms", VALUES + 1, first=12, unit=1e3))
    found = shown(both)
    assert "a_ms [ms], b_s [s]" in found and "--column" in found
    assert same(shown(both, "--column", "b_s"), VALUES)
    assert same(shown(both, "--column", "a_ms"), VALUES + 1)
    assert "'c_s'" in shown(both, "--column", "c_s")
    loss = events(scalars("b_s", VALUES) + scalars("x", VALUES))
    assert "--unit" in shown(loss, "--column", "x")
    assert same(shown(loss, "--column", "x", "--unit", "s"), VALUES)
    assert "off by" in shown(events(scalars("iteration-time", VALUES, unit=1e3)))


def history(values, tag="train_step_timing in s", first=0):
    """Export of a run's history: other metrics have rows of their own."""
    n = len(values)
    clock = 1.7e9 + np.cumsum(values)
    return pd.DataFrame({
        "_step": np.arange(2 * n) + 100, "_timestamp": np.repeat(clock, 2),
        "trainer/global_step": np.repeat(np.arange(n) + first, 2),
        "val_loss": np.where(np.arange(2 * n) % 2, np.nan, 1.0),
        "validation_step_timing in s": 1.0,
        tag: [x for v in values for x in (np.nan, v)],
    })  # fmt: skip


def test_history_of_a_run_by_wandb(shown):
    assert same(shown(history(VALUES)), VALUES)
    assert same(shown(history(VALUES), "--steps", "3:8"), VALUES[3:9])
    again = pd.concat([history(VALUES), history(VALUES + 1, first=5)])
    assert same(shown(again), np.r_[VALUES, VALUES + 1], n_runs=2)
    slow = history(1e3 * VALUES).assign(_timestamp=np.repeat(np.cumsum(VALUES), 2))
    assert "off by" in shown(slow)
    assert "file:5: " in shown(history([5.0, -1.0, 5.0, 5.0]))


def chart(runs, metric="iteration-time", every=10):
    """Export of a chart: a column for each run, with the least and the largest of its bin."""
    table = pd.DataFrame({"Step": every * (np.arange(len(VALUES)) + 1)})
    for name, values in runs.items():
        for end in ("", "__MIN", "__MAX"):
            table[f"{name} - _step{end}"] = table["Step"]
            table[f"{name} - {metric}{end}"] = values
    return table


def test_chart_of_several_runs_by_wandb(shown):
    table = chart({"brisk-pond-1": VALUES, "a - b": VALUES + 1})
    assert same(shown(table), np.r_[VALUES, VALUES + 1], n_runs=2, mean_over=10)
    assert same(shown(table, "--where", "run=a - b"), VALUES + 1, mean_over=10)
    notes = shown(table)["notes"]
    table["a - b - iteration-time__MAX"] += 0.5  # a point is the mean of several
    more = shown(table)
    assert same(more, np.r_[VALUES, VALUES + 1], n_runs=2, mean_over=10)
    assert [note[:3] for note in more["notes"] if note not in notes] == ["12 "]
    assert same(shown(chart({"x": VALUES})), VALUES, mean_over=10)


def mlflow(run_id, key, values, scale=1e3):
    return pd.DataFrame({
        "run_id": run_id, "key": key, "value": values, "step": np.arange(len(values)),
        "timestamp": np.rint(1.7e12 + scale * np.cumsum(values)).astype(np.int64),
    })  # fmt: skip


def test_metrics_by_mlflow(shown):
    step = mlflow("a1", "perf/step_time_seconds", VALUES)
    assert same(shown(pd.concat([mlflow("a1", "loss", VALUES), step])), VALUES)
    both = pd.concat([step, mlflow("b2", "perf/step_time_seconds", VALUES + 1)])
    assert same(shown(both), np.r_[VALUES, VALUES + 1], n_runs=2)
    assert same(shown(both, "--where", "run_id=b2"), VALUES + 1)
    assert "off by" in shown(mlflow("a1", "perf/step_time_seconds", 1e3 * VALUES, scale=1.0))
    assert "loss" in shown(mlflow("a1", "loss", VALUES))


def test_a_scalar_by_tensorboard(shown):
    clock = 1.7e9 + 10 * np.cumsum(VALUES)
    table = pd.DataFrame({"Wall time": clock, "Step": 10 * np.arange(1, 13), "Value": VALUES})
    found = shown(table, "--column", "Value", "--unit", "s")
    assert same(found, VALUES)
    assert "off by" in shown(table.assign(Value=1e4 * VALUES), "--column", "Value", "--unit", "s")


def test_a_plain_table_by_the_names_of_the_tools(shown):
    table = pd.DataFrame({
        "step": 10 * np.arange(1, 13), "iteration-time": VALUES, "data_loading_ms": 3.0,
    })  # fmt: skip
    assert same(shown(table), VALUES, mean_over=10)
    assert same(shown(table.rename(columns={"iteration-time": "train_step_timing in s"})), VALUES)
