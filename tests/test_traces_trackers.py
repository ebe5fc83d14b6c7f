"""Step times in TensorBoard's files and in tables that W&B and MLflow export."""

import gzip

import numpy as np
import pandas as pd
import pytest
from events_made import block, event, events, run

from prism import PrismError
from prism.traces import find_recording, read_step_times

VALUES = np.round(5.0 + 0.2 * np.sin(np.arange(12.0)), 1)
TAGS = {
    "iteration-time": (1.0, True), "train/iteration-time": (1.0, True),
    "time_metrics/end_to_end(s)": (1.0, True), "train_step_timing in s": (1.0, False),
    "perf/step_time_seconds": (1.0, False), "perf/iteration_time_ms": (1e3, False),
}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    """Read bytes or a table as step times."""

    def read_it(data, **options):
        path = tmp_path / "file"
        if isinstance(data, pd.DataFrame):
            data = data.to_csv(index=False).encode()
        path.write_bytes(data)
        return read_step_times(path, **options)

    return read_it


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("every", [1, 10])
def test_events_by_the_names_of_the_tools(read, tmp_path, tag, every):
    unit, is_mean = TAGS[tag]
    times = read(events(run(tag, VALUES, every, unit=unit)))
    assert find_recording(tmp_path / "file").reader.name == "tensorboard"
    assert times.seconds == pytest.approx(VALUES, rel=1e-6)
    assert list(times.step) == list(range(every, 13 * every, every))
    assert times.mean_over == (every if is_mean else 1) and times.column == tag


@pytest.mark.parametrize("kind", ["simple", "tensor", "double"])
def test_scalars_however_they_are_written(read, kind):
    rows = [(i, 5.0 * i, "step_s", 5.0, kind) for i in range(1, 9)]
    assert read(events(rows)).seconds == pytest.approx(np.full(8, 5.0))
    assert read(gzip.compress(events(rows))).seconds.size == 8


def test_files_of_a_folder_are_restarts_where_steps_come_again(tmp_path):
    folder = tmp_path / "tb"
    folder.mkdir()
    (folder / "events.1").write_bytes(events(run("iteration-time", VALUES)))
    (folder / "events.0").write_bytes(events(run("iteration-time", VALUES, first=12)))
    (folder / "args.txt").write_text("x")
    times = read_step_times(folder)
    assert times.seconds.size == 24 and set(times.run) == {""}
    (folder / "events.2").write_bytes(events(run("iteration-time", VALUES, first=20)))
    times = read_step_times(folder)
    assert list(dict.fromkeys(times.run)) == ["0", "1"]
    assert any("step 21" in note for note in times.notes)


def test_events_that_are_cut_damaged_or_without_step_times(read):
    whole = events(run("iteration-time", VALUES))
    times = read(whole[:-20])
    assert times.seconds.size == 11 and "inside a record" in times.notes[0]
    assert read(whole + event(2e9, 13, b"\xff\xff")).seconds.size == 12
    with pytest.raises(PrismError, match="file: no scalar.*iteration-time.*log-timers"):
        read(events(run("lm loss", VALUES)))
    with pytest.raises(PrismError, match=r"a_ms \[ms\], b_s \[s\]; .*--column"):
        read(events(run("b_s", VALUES) + run("a_ms", VALUES)))
    two = events(run("b_s", VALUES) + run("a_ms", VALUES, first=12, unit=1e3))
    assert read(two, column="b_s").seconds == pytest.approx(VALUES)
    with pytest.raises(PrismError, match="--unit"):
        read(two, column="lm loss")
    with pytest.raises(PrismError, match="--column"):
        read(two, column="c_s")
    assert read(events([]) + event(1.7e9, 1, block(9, b"x")) + whole).seconds.size == 12


def test_a_wrong_unit_is_found_by_the_clock(read):
    with pytest.raises(PrismError, match="off by"):
        read(events(run("iteration-time", VALUES, unit=1e3)))


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


def test_history_of_a_run_by_wandb(read, tmp_path):
    times = read(history(VALUES))
    assert find_recording(tmp_path / "file").reader.name == "export"
    assert times.seconds == pytest.approx(VALUES) and list(times.step) == list(range(12))
    again = pd.concat([history(VALUES), history(VALUES, first=5)])
    assert list(dict.fromkeys(read(again).run)) == ["0", "1"]
    with pytest.raises(PrismError, match="off by"):
        read(history(1e3 * VALUES).assign(_timestamp=np.repeat(np.cumsum(VALUES), 2)))
    with pytest.raises(PrismError, match=r"file:5: .*-1"):
        read(history([5.0, -1.0, 5.0, 5.0]))


def chart(runs, metric="iteration-time", every=10):
    """Export of a chart: a column for each run, with the least and the largest of its bin."""
    table = pd.DataFrame({"Step": every * (np.arange(len(VALUES)) + 1)})
    for name, values in runs.items():
        table[f"{name} - _step"] = table["Step"]
        for end in ("", "__MIN", "__MAX"):
            table[f"{name} - _step{end}"] = table["Step"]
            table[f"{name} - {metric}{end}"] = values
    return table


def test_chart_of_several_runs_by_wandb(read):
    table = chart({"brisk-pond-1": VALUES, "a - b": VALUES + 1})
    times = read(table)
    assert list(dict.fromkeys(times.run)) == ["brisk-pond-1", "a - b"] and times.mean_over == 10
    assert times.seconds == pytest.approx(np.r_[VALUES, VALUES + 1])
    assert read(table, where={"run": "a - b"}).seconds == pytest.approx(VALUES + 1)
    assert not any("__MIN" in note for note in times.notes)
    table["a - b - iteration-time__MAX"] += 0.5
    assert any("12 values" in note for note in read(table).notes)
    assert set(read(chart({"x": VALUES})).run) == {""}


def test_metrics_by_mlflow(read):
    def metric(run_id, key, values, scale=1e3):
        return pd.DataFrame({
            "run_id": run_id, "key": key, "value": values, "step": np.arange(len(values)),
            "timestamp": np.rint(1.7e12 + scale * np.cumsum(values)).astype(np.int64),
        })  # fmt: skip

    step = metric("a1", "perf/step_time_seconds", VALUES)
    times = read(pd.concat([metric("a1", "loss", VALUES), step]))
    assert times.seconds == pytest.approx(VALUES) and set(times.run) == {""}
    both = pd.concat([step, metric("b2", "perf/step_time_seconds", VALUES + 1)])
    times = read(both)
    assert list(dict.fromkeys(times.run)) == ["a1", "b2"]
    assert read(both, where={"run_id": "b2"}).seconds == pytest.approx(VALUES + 1)
    with pytest.raises(PrismError, match="off by"):
        read(metric("a1", "perf/step_time_seconds", 1e3 * VALUES, scale=1.0))
    with pytest.raises(PrismError, match="no duration.*loss"):
        read(metric("a1", "loss", VALUES))


def test_a_plain_table_by_the_names_of_the_tools(read):
    table = pd.DataFrame({
        "step": 10 * np.arange(1, 13), "iteration-time": VALUES, "data_loading_ms": 3.0,
    })  # fmt: skip
    times = read(table)
    assert times.seconds == pytest.approx(VALUES) and times.mean_over == 10
    assert read(table.rename(columns={"iteration-time": "train_step_timing in s"})).mean_over == 1
