"""Step times in the logs of trainers: each tool's lines, launchers' prefixes, restarts, units."""

import itertools

import numpy as np
import pytest
from logs_made import TOOLS, log_of, maxtext, megatron, nemo, torchtitan

from prism import PrismError
from prism.traces import find_recording, read_step_times

VALUES = np.round(5.0 + 0.2 * np.sin(np.arange(12.0)), 1)
MEANS = ("megatron", "primus", "deepspeed pipe", "torchtitan")


@pytest.fixture
def read(tmp_path):
    """Read a text as step times."""

    def read_text(text, **options):
        path = tmp_path / "run.out"
        path.write_bytes(text.encode())
        return read_step_times(path, **options)

    return read_text


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("before", ["", "[default0]:", "0: ", "worker-1: ", "run/a.log:", "17:"])
def test_lines_of_each_tool_behind_any_prefix(read, tmp_path, name, before):
    text = "preamble\n" + log_of(TOOLS[name], VALUES)
    if "\r" not in text:
        text = "".join(before + line for line in text.splitlines(keepends=True))
    times = read("train_batch_size ............. 64\n" + text)
    assert find_recording(tmp_path / "run.out").reader.name == "log"
    first = 1 if name == "torchtitan" else 0  # the time between lines
    assert times.seconds == pytest.approx(VALUES[first:], rel=1e-6, abs=1e-3)
    assert list(times.step) == list(range(1 + first, 13))
    assert times.mean_over == 1 and set(times.run) == {""}


@pytest.mark.parametrize("name", TOOLS)
def test_means_and_single_steps_of_a_log_interval(read, name):
    times = read("train_batch_size ... 64\n" + log_of(TOOLS[name], VALUES, every=10))
    assert times.mean_over == (10 if name in MEANS else 1)
    assert times.step[-1] == 120
    assert times.seconds[-1] == pytest.approx(VALUES[-1], rel=1e-3)


def test_line_numbers_by_grep_are_no_ranks(read):
    lines = log_of(megatron, VALUES).splitlines(keepends=True)
    times = read("".join(f"{7 * i + 3}:{line}" for i, line in enumerate(lines)))
    assert times.seconds == pytest.approx(VALUES) and set(times.run) == {""}
    times = read("".join(f"a.log:{7 * i + 3}:{line}" for i, line in enumerate(lines)))
    assert set(times.run) == {""}


def test_one_of_several_ranks_is_read(read):
    ranks = [log_of(maxtext, VALUES + 0.1 * r).splitlines(keepends=True) for r in range(4)]
    text = "".join(
        f"[{i}]:{line}" for row in zip(*ranks, strict=True) for i, line in enumerate(row)
    )
    times = read(text)
    assert times.seconds == pytest.approx(VALUES) and set(times.run) == {""}
    assert any("4 ranks" in note for note in times.notes)


def test_another_rank_after_a_restart_goes_on(read):
    text = "".join("[7]:" + x for x in log_of(megatron, VALUES).splitlines(keepends=True))
    more = log_of(megatron, VALUES, begin=20).splitlines(keepends=True)
    assert read(text + "".join("[3]:" + x for x in more)).seconds.size == 24


def test_files_that_grep_names_are_runs(read):
    parts = [("a/1.log", VALUES), ("a/2.log", VALUES + 1)]
    text = "".join(
        f"{name}:{line}" for name, values in parts
        for line in log_of(maxtext, values).splitlines(keepends=True)
    )  # fmt: skip
    times = read(text)
    assert list(dict.fromkeys(times.run)) == ["a/1.log", "a/2.log"]
    assert read(text, where={"run": "a/2.log"}).seconds == pytest.approx(VALUES + 1)
    with pytest.raises(PrismError, match=r"run=b.*a/1\.log, a/2\.log"):
        read(text, where={"run": "b"})


def test_restarts_are_runs_and_are_said(read):
    text = log_of(nemo, VALUES) + log_of(nemo, VALUES, begin=5)
    times = read(text)
    assert list(dict.fromkeys(times.run)) == ["0", "1"] and times.step[12] == 6
    assert any("goes back 1 time " in note and ":13)" in note for note in times.notes)


def test_runs_of_several_jobs_are_refused_until_one_is_chosen(read):
    text = log_of(megatron, VALUES, batch=256) + log_of(megatron, VALUES + 1, batch=512)
    with pytest.raises(PrismError, match=r"256 \(run 0\); 512 \(run 1\).*--where run=0"):
        read(text)
    assert read(text, where={"run": "1"}).seconds == pytest.approx(VALUES + 1)
    growing = log_of(megatron, VALUES, batch=256) + log_of(megatron, VALUES, begin=12, batch=512)
    assert read(growing).seconds.size == 24  # a schedule, not another job
    longer = log_of(megatron, VALUES, total=20) + log_of(megatron, VALUES, begin=5, total=1000)
    assert any("20 (run 0); 1000 (run 1)" in note for note in read(longer).notes)


def test_interleaved_runs_come_apart_or_are_refused(read):
    a, b = (log_of(megatron, VALUES + n, total=100 * n).splitlines(True) for n in (1, 2))
    times = read("".join(itertools.chain(*zip(a, b, strict=True))))
    assert times.seconds[times.run == "0"] == pytest.approx(VALUES + 1)
    assert times.seconds[times.run == "1"] == pytest.approx(VALUES + 2)
    b = log_of(megatron, VALUES + 2, total=100).splitlines(True)
    with pytest.raises(PrismError, match="interleaved"):
        read("".join(itertools.chain(*zip(a, b, strict=True))))


@pytest.mark.parametrize(("wrong", "factor"), [("ms", 1e-3), ("s", 1e3)])
def test_a_wrong_unit_is_found_by_the_clock(read, wrong, factor):
    text = log_of(megatron, VALUES)
    for value in set(VALUES):
        text = text.replace(f" (ms): {1e3 * value:.1f} ", f" ({wrong}): "
                            f"{value if wrong == 'ms' else 1e3 * value:.1f} ")  # fmt: skip
    with pytest.raises(PrismError, match="off by"):
        read(text)


@pytest.mark.parametrize("pause", [0.0, 50.0])
def test_pauses_and_coarse_clocks_are_no_wrong_unit(read, pause):
    rng = np.random.default_rng(1)
    lines, clock = [], 0.0
    for i in range(200):
        seconds = 0.2 + 0.01 * rng.random()
        clock += seconds + pause * (i % 50 == 49)
        lines.append(megatron(i + 1, seconds, float(int(clock))))
    assert read("".join(lines)).seconds.size == 200


def test_rates_without_a_clock_say_what_is_missing(read):
    text = log_of(torchtitan, VALUES)
    bare = "".join("step:" + line.split("step:")[1] for line in text.splitlines(True))
    with pytest.raises(PrismError, match=r"out:1: torchtitan .*TensorBoard"):
        read(bare)


def test_damaged_lines_are_counted_and_columns_refused(read):
    text = log_of(maxtext, VALUES)
    assert any("1 line " in n for n in read(text + "completed step: 99, secon\n").notes)
    with pytest.raises(PrismError, match="MaxText.*completed step: 10"):
        read("completed step: 99, secon\n")
    with pytest.raises(PrismError, match="no column system"):
        read(text, where={"system": "a"})
    with pytest.raises(PrismError, match=r"out:2: .*'fast'"):
        read(text.replace("seconds: 5.200", "seconds: fast"))


def test_other_tools_in_the_same_file_are_said(read):
    times = read(log_of(megatron, VALUES) + log_of(maxtext, VALUES))
    assert times.seconds.size == 12 and any("MaxText" in note for note in times.notes)
