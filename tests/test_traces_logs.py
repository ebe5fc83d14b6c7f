"""Step times in the logs of trainers: each tool's lines, launchers' prefixes, restarts, units."""

import itertools
import json

import numpy as np
import pytest
from logs_made import (
    TOOLS,
    at,
    automodel,
    bar,
    bridge,
    iso,
    levanter,
    llama_factory,
    log_of,
    maxtext,
    megatron,
    nemo,
    nemo_bar,
    swift,
    torchtitan,
)

VALUES = np.round(5.0 + 0.2 * np.sin(np.arange(12.0)), 1)
MEANS = ("megatron", "primus", "deepspeed pipe", "torchtitan", "nanotron", "mmengine", "ms-swift",
         "olmo-core", "automodel")  # fmt: skip
RATES = ("torchtitan", "ms-swift", "olmo-core", "automodel")  # read by the time between lines
BATCH = "train_batch_size ............. 64\n"


@pytest.fixture
def shown(run, tmp_path):
    """What `prism show` says of a log: its JSON, or the message of a refusal."""

    def show(text, *options):
        path = tmp_path / "run.out"
        path.write_bytes(text.encode())
        status, out, err = run("show", path, "--json", *options)
        assert status in (0, 2) and (status == 0) == bool(out), err
        return json.loads(out) if status == 0 else err

    return show


def same(found, values, n_runs=1, mean_over=1):
    """Whether these are the step times, by number and by their spread."""
    assert (found["n"], found["n_runs"], found["mean_over"]) == (len(values), n_runs, mean_over)
    spread = {"mean": np.mean(values), "std": np.std(values, ddof=1), "p50": np.median(values)}
    for name, value in spread.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=2e-3), name
    return True


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("before", ["", "[default0]:", "0: ", "worker-1: ", "run/a.log:", "17:"])
def test_lines_of_each_tool_behind_any_prefix(shown, name, before):
    text = "preamble\n" + log_of(TOOLS[name], VALUES)
    if "\r" not in text:
        text = "".join(before + line for line in text.splitlines(keepends=True))
    first = name in RATES
    assert same(shown(BATCH + text), VALUES[first:])
    assert same(shown(BATCH + text, "--steps", "4:9"), VALUES[3:9])


@pytest.mark.parametrize("name", TOOLS)
def test_means_and_single_steps_of_a_log_interval(shown, name):
    text = BATCH + log_of(TOOLS[name], VALUES, every=10)
    over = 10 if name in MEANS else 1
    assert same(shown(text), VALUES[name in RATES :], mean_over=over)
    assert same(shown(text, "--steps", "40:90"), VALUES[3:9], mean_over=over)


def behind(prefixes, *logs):
    """Lines of logs in turn, each behind its prefix, which may count."""
    rows = [log.splitlines(keepends=True) for log in logs]
    return "".join(p.format(7 * i + 3) + line for i, row in enumerate(zip(*rows, strict=True))
                   for p, line in zip(prefixes, row, strict=True))  # fmt: skip


def test_what_grep_and_launchers_put_before_lines(shown):
    one = log_of(megatron, VALUES)
    for prefix in ("{}:", "a.log:{}:"):  # line numbers are no ranks
        assert same(shown(behind([prefix], one)), VALUES)
    ranks = [log_of(maxtext, VALUES + 0.1 * r) for r in range(4)]  # one of several is read
    assert same(shown(behind(["[0]:", "[1]:", "[2]:", "[3]:"], *ranks)), VALUES)
    more = log_of(megatron, VALUES + 1.0, begin=20)  # another rank after a restart goes on
    text = behind(["[7]:"], one) + behind(["[3]:"], more)
    assert same(shown(text), np.r_[VALUES, VALUES + 1.0])


def test_lines_without_step_numbers_and_bars(shown):
    assert same(shown(log_of(bridge, VALUES)), VALUES)
    found = shown(log_of(bar, np.r_[VALUES, 0.5]))
    assert same(found, np.r_[VALUES, 0.5]) and any("smooths" in note for note in found["notes"])
    evaluation = log_of(bar, np.full(5, 0.1), total=5)
    assert same(shown(log_of(bar, VALUES) + evaluation + log_of(bar, VALUES, begin=12)),
                np.r_[VALUES, VALUES])  # fmt: skip
    # beside a tool's own lines a bar is nothing
    assert same(shown(log_of(bar, VALUES + 1.0) + "\n" + log_of(megatron, VALUES)), VALUES)


def test_a_time_since_the_start_is_a_clock(shown):
    values = np.full(12, 10_000.0)  # 100,000 s each ten steps: more than a day
    values[5] = 12_000.0
    text = log_of(llama_factory, values, every=10)
    evaluation = '{"current_steps": 30, "total_steps": 3235, "eval_loss": 1.5, "epoch": 0.2}'
    lines = text.splitlines()
    found = shown("\n".join([*lines[:3], evaluation, *lines[3:]]))
    assert same(found, values[1:], mean_over=10)
    assert any("whole seconds" in note for note in found["notes"])
    status = shown('{"current_steps": 30, "total_steps": 3235, "loss": 1.5, "epoch": 0.2}\n' * 3)
    assert "elapsed_time" in status


def test_an_evaluations_line_is_no_step(shown, run, tmp_path):
    """torchtitan's `validate step`: one run, and the time between lines has its pause."""
    clock, text = 0.0, ""
    for step in range(1, 61):
        clock += 2.0
        text += torchtitan(step, 2.0, clock)
        if step % 10 == 0:
            clock += 7.5
            text += torchtitan(step, 2.0, clock).replace("step:", "validate step:")
    found = shown(text)
    assert (found["n"], found["n_runs"], found["p50"]) == (59, 1, 2.0)
    assert not any("skipped" in note for note in found["notes"])
    path = tmp_path / "titan.log"
    path.write_text(text)
    status, out, err = run("fit", path, "-o", tmp_path / "m.nc", "--json", "-q")
    assert status == 0 and "every 10 steps 7.5 s more" in err


def test_a_step_number_that_is_rounded_is_the_bars(shown):
    """NeMo's bar has `global_step=1.1e+4` from 10,000 on, and counts in front."""

    def line(step, seconds, clock):
        text = nemo_bar(step, seconds, clock).replace(f"| {step}/1000", f"| {step - 1}/77225")
        return text.replace(f"={step}.00,", f"={step:.1e},") if step >= 10_000 else text

    values = np.tile(VALUES, 2)
    found = shown(log_of(line, values, begin=9_990))
    assert same(found, values)
    assert same(shown(log_of(line, values, begin=9_990), "--steps", "10000:10011"), values[9:21])
    assert same(shown(log_of(line, VALUES, begin=10_950)), VALUES)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("tool", [torchtitan, megatron])
def test_ranks_without_names_that_write_each_step_are_one_run(shown, tool, ranks):
    rng, text, clock = np.random.default_rng(1), "", 0.0
    for i, seconds in enumerate(np.tile(VALUES, 3)):
        clock += seconds
        for _ in range(ranks):
            own = tool(i + 1, seconds * (1 + 1e-3 * rng.random()), clock + 1e-3 * rng.random())
            text += own.replace("[rank0]:", "").replace(
                "tps: 7,034", f"tps: {rng.integers(7030, 7040)}"
            )
    found = shown(text)
    first = tool is torchtitan
    assert (found["n"], found["n_runs"]) == (36 - first, 1)
    assert found["mean"] == pytest.approx(np.tile(VALUES, 3)[first:].mean(), rel=2e-3)
    # a restart repeats steps at another time: two runs
    again = shown(log_of(tool, VALUES) + log_of(tool, VALUES, begin=4))
    assert again["n_runs"] == 2


def test_files_that_grep_names_are_runs(shown):
    text = behind(["a/1.log:"], log_of(maxtext, VALUES))
    text += behind(["a/2.log:"], log_of(maxtext, VALUES + 1))
    assert same(shown(text), np.r_[VALUES, VALUES + 1], n_runs=2)
    assert same(shown(text, "--where", "run=a/2.log"), VALUES + 1)
    assert "a/1.log, a/2.log" in shown(text, "--where", "run=b")


def test_restarts_are_runs(shown):
    text = log_of(nemo, VALUES) + log_of(nemo, VALUES + 1, begin=5)
    assert same(shown(text), np.r_[VALUES, VALUES + 1], n_runs=2)
    assert same(shown(text, "--where", "run=1"), VALUES + 1)
    assert same(shown(text, "--steps", ":6"), np.r_[VALUES[:6], VALUES[:1] + 1], n_runs=2)
    assert same(shown(text, "--skip", "10"), np.r_[VALUES[10:], VALUES[10:] + 1], n_runs=2)
    assert any("run.out:13" in note for note in shown(text)["notes"])


def test_runs_of_several_jobs_are_refused_until_one_is_chosen(shown):
    text = log_of(megatron, VALUES, batch=256) + log_of(megatron, VALUES + 1, batch=512)
    found = shown(text)
    assert "256 (run 0); 512 (run 1)" in found and "--where run=0" in found
    assert same(shown(text, "--where", "run=1"), VALUES + 1)
    # a batch that grows is a schedule, not another job
    growing = log_of(megatron, VALUES, batch=256) + log_of(megatron, VALUES, begin=12, batch=512)
    assert same(shown(growing), np.r_[VALUES, VALUES])
    longer = log_of(megatron, VALUES, total=20) + log_of(megatron, VALUES, begin=5, total=1000)
    assert any("20 (run 0); 1000 (run 1)" in note for note in shown(longer)["notes"])


def test_interleaved_runs_come_apart_or_are_refused(shown):
    a, b = (log_of(megatron, VALUES + n, total=100 * n).splitlines(True) for n in (1, 2))
    text = "".join(itertools.chain(*zip(a, b, strict=True)))
    for n in (0, 1):
        assert same(shown(text, "--where", f"run={n}"), VALUES + 1 + n)
    b = log_of(megatron, VALUES + 2, total=100).splitlines(True)
    assert "run.out:1: " in shown("".join(itertools.chain(*zip(a, b, strict=True))))


@pytest.mark.parametrize(("wrong", "factor"), [("ms", 1.0), ("s", 1e3)])
def test_a_wrong_unit_is_found_by_the_clock(shown, wrong, factor):
    text = log_of(megatron, VALUES)
    for value in set(VALUES):
        text = text.replace(f" (ms): {1e3 * value:.1f} ", f" ({wrong}): {factor * value:.1f} ")
    assert "off by" in shown(text)


@pytest.mark.parametrize("pause", [0.0, 50.0])
def test_pauses_and_coarse_clocks_are_no_wrong_unit(shown, pause):
    rng = np.random.default_rng(1)
    lines, clock = [], 0.0
    for i in range(200):
        seconds = 0.2 + 0.01 * rng.random()
        clock += seconds + pause * (i % 50 == 49)
        lines.append(megatron(i + 1, seconds, float(int(clock))))
    assert shown("".join(lines))["n"] == 200


def test_lines_that_cannot_be_used(shown):
    bare = "".join("step:" + line.split("step:")[1]
                   for line in log_of(torchtitan, VALUES).splitlines(True))  # fmt: skip
    assert "run.out:1: " in shown(bare)  # a rate, and no clock
    text = log_of(maxtext, VALUES)
    found = shown(text + "completed step: 99, secon\n")
    assert same(found, VALUES) and any(note.startswith("1 line ") for note in found["notes"])
    assert "completed step: 10" in shown("completed step: 99, secon\n")  # what was expected
    assert "--where system" in shown(text, "--where", "system=a")
    assert "run.out:2: " in shown(text.replace("seconds: 5.200", "seconds: fast"))
    both = shown(log_of(megatron, VALUES) + text)  # of two tools one is read
    assert same(both, VALUES) and any("MaxText" in note for note in both["notes"])


def own_log(step, seconds, clock):
    """Lines of no tool."""
    return (
        f"{iso(clock)} train.py INFO finished step {step}: loss 2.31, {seconds:.1f} sec, "
        f"{1e3 * seconds:.0f} millis, {1 / seconds:.6f} steps/s, after {clock:.1f}\n"
    )


STEP = r"step (?P<step>\d+): "


@pytest.mark.parametrize(
    ("pattern", "first"),
    [
        (STEP + r".*?, (?P<s>\S+) sec", 0), (STEP + r".*?(?P<ms>\d+) millis", 0),
        (STEP + r".* (?P<rate>\S+) steps/s", 0), (STEP + r".*after (?P<elapsed>\S+)", 1),
        (STEP, 1), (r"loss \S+, (?P<s>\S+) sec", 0), ("(?P<elapsed>[0-9:]{8}),", 1),
    ],
)  # fmt: skip
def test_a_pattern_reads_any_log(shown, pattern, first):
    values = np.tile([5.0, 5.0, 6.0, 5.0], 3)
    text = "preamble\n" + log_of(own_log, values) + "the end\n"
    assert same(shown(text, "--pattern", pattern), values[first:])
    # also in lines that a tool would read otherwise
    text = "".join(a + b for a, b in zip(log_of(own_log, values).splitlines(True),
                   log_of(megatron, values + 1).splitlines(True), strict=True))  # fmt: skip
    assert same(shown(text, "--pattern", pattern), values[first:])


def test_a_pattern_of_json_lines_and_of_means(shown):
    text = "".join(
        json.dumps({"i": 10 * i, "t": {"total": v}}) + "\n" for i, v in enumerate(VALUES)
    )
    pattern = r'"i": (?P<step>\d+).*"total": (?P<s>[\d.]+)'
    assert same(shown(text, "--pattern", pattern), VALUES)
    text = log_of(own_log, VALUES, every=10)
    assert same(shown(text, "--pattern", STEP), VALUES[1:], mean_over=10)


@pytest.mark.parametrize(
    "pattern",
    ["(", "step", r"(?P<loss>\d+)", r"(?P<s>\d+) (?P<ms>\d+)", "(?P<s>nothing)", r"(?P<s>\w+)",
     r"loss (?P<step>\d)"],
)  # fmt: skip
def test_a_pattern_that_finds_no_step_times_is_refused(shown, pattern):
    found = shown(log_of(own_log, VALUES), "--pattern", pattern)
    assert isinstance(found, str) and found.count("\n") == 1


def test_a_pattern_that_never_ends_is_stopped(shown, monkeypatch):
    monkeypatch.setattr("prism.traces.logs.patterns._LONGEST_S", 0.2)
    text = log_of(own_log, VALUES)
    assert "(?:[a-z: ]+)+" in shown(text, "--pattern", "(?:[a-z: ]+)+(?P<s>@)")
    assert same(shown(text, "--pattern", STEP + r".*?, (?P<s>\S+) sec"), VALUES)  # and again
    long = "x" * 10_000_000 + "\n"  # of a line the beginning alone is looked at
    assert same(shown(long + text, "--pattern", STEP + r".*?, (?P<s>\S+) sec"), VALUES)


def test_commands_take_a_pattern(run, tmp_path):
    rng, log, other = np.random.default_rng(1), tmp_path / "a.log", tmp_path / "b.log"
    for path, mean in ((log, 5.0), (other, 6.0)):
        path.write_text(log_of(own_log, mean + 0.1 * rng.standard_normal(60)))
    pattern = ("--pattern", STEP + r".*?, (?P<s>\S+) sec", "--json", "-q", "--seed", 1)
    model, job = tmp_path / "m.nc", "llama3-70b-fsdp-512"

    def found(*args):
        status, out, err = run(*args, *pattern)
        assert status == 0, err
        return json.loads(out)

    assert found("fit", log, "-o", model)["step_time"]["mean"] == pytest.approx(5.0, abs=0.1)
    ends = found("compare", log, other)["quantities"]["step_time"]["figures"]["mean"]
    assert ends["a"] == pytest.approx(5.0, abs=0.1) and ends["b"] == pytest.approx(6.0, abs=0.1)
    assert found("validate", job, "--measured", log, "--bootstrap", 0)["n_measured"] == 60
    assert found("validate", "--trace", log, "--bootstrap", 0)["n_measured"] == 30
    assert found("watch", log, "--steps", 100, "--once")["completed_steps"] == 60
    past = found("estimate", model, "--progress", log, "--steps", 100)["completed"]
    assert past["steps"] == 60
    assert run("fit", log, other, *pattern)[0] == 2
    assert run("estimate", job, *pattern)[0] == 2


UNKNOWN = {
    "log": (log_of(own_log, VALUES), "finished step 1: loss 2.31"),
    "json": ('{"loss": 1.5, "lr": 0.1}\n', "loss, lr"),
    "json lines": ('{"loss": 1.5, "lr": 0.1}\n{"loss": 1.5, "lr": 0.1}\n', "loss, lr"),
    "csv": ("epoch,loss\n1,2.5\n2,2.4\n", "epoch, loss"),
    "numbers": ("1 2.5\n2 2.4\n", "1 2.5"),
    "commas": (
        "on 8 GPUs, 2 nodes, 100 ms\n" + "loading shard 1 took 3.5 s\n" * 5,
        "loading shard 1",
    ),
    "seconds": ("warm-up took 12 s\n" + "then step 1 is done\n" * 5, "then step 1 is done"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_no_reader_knows_is_described_alike(run, tmp_path, name):
    text, told = UNKNOWN[name]
    path, known = tmp_path / "run.out", tmp_path / "known.log"
    path.write_text(text)
    known.write_text(log_of(megatron, np.tile(VALUES, 3)))
    job, said = "llama3-70b-fsdp-512", set()
    for command in (
        ("fit", path), ("show", path), ("replay", path), ("compare", path, known),
        ("compare", known, path), ("validate", job, "--measured", path),
        ("validate", "--trace", path), ("watch", path, "--once"), ("timeline", path),
    ):  # fmt: skip
        status, out, err = run(*command)
        assert (status, out) == (2, ""), err
        assert told in err and err.count("\n") <= 2
        assert "--pattern" in err and "step_s" in err and "torchtitan" in err and "Nsight" in err
        said.add(err.splitlines()[-1].partition(". A job is")[0])
    assert len(said) == 1
    wide = tmp_path / "wide.csv"
    wide.write_text("".join(["epoch,loss\n", *(f"{i},{5 + i % 3}\n" for i in range(12))]))
    status, out, err = run("fit", wide, "--column", "loss", "--unit", "s", "--json", "-q")
    assert status == 0 and json.loads(out)["step_time"]["mean"] == pytest.approx(6.0), err


def test_bars_that_round_the_step(shown):
    """tqdm-loggable writes 2,604 as 2.60k; a bar of an evaluation has fewer steps."""
    values = np.repeat(np.round(76.8 + np.arange(12.0) / 10, 1), 10)
    text = log_of(levanter, values, begin=2_595)
    evaluation = "Progress on:eval 3.00it/8.00it rate:5.1it/s remaining:00:01 elapsed:00:00\n"
    found = shown(text + evaluation)
    assert found["n_runs"] == 1 and found["mean"] == pytest.approx(values.mean(), rel=2e-3)
    short = "".join(f"Progress on:train {i}.0it/70.0it rate:4.0it/s remaining:?\n"
                    for i in range(10, 22))  # fmt: skip
    assert same(shown(short), np.full(12, 0.25))


@pytest.mark.parametrize("quote", ["'", '"'])
@pytest.mark.parametrize("key", ["global_step/max_steps", "iteration"])
def test_ms_swift_without_a_clock_is_read_by_its_elapsed_time(shown, quote, key):
    text, clock = "", 0
    for i in range(1, 13):
        clock += 50 + 10 * (i % 3)
        line = swift(10 * i, 5.0, 0.0).partition(" ")[2].replace("global_step/max_steps", key)
        text += line.replace("25m 37s", f"{clock // 60}m {clock % 60}s").replace("'", quote)
        text += line.replace("'loss'", "'eval_loss'").replace("'", quote)
    values = 5.0 + np.arange(2, 13) % 3
    assert same(shown(text), values, mean_over=10)


def test_evaluations_of_automodel_are_no_steps(shown):
    lines = log_of(automodel, VALUES).splitlines(True)
    evaluation = lines[4].replace("root | step", "root | [val] name | step")
    assert same(shown("".join([*lines[:5], evaluation, *lines[5:]])), VALUES[1:])


@pytest.mark.parametrize("tool", [nemo, nemo_bar])
def test_times_of_microbatches_are_added(shown, tool):
    """NeMo with a Hugging Face model: lines count microbatches, global_step the steps."""
    text, clock = "", 0.0
    for i in range(4 * 30 + 2):  # the last step is not whole
        clock += 2.2
        line = tool(i // 4 + 1, 2.2, clock)
        line = line.replace(f"iteration {i // 4 + 1}/", f"iteration {i}/")
        text += line.replace(f"| {i // 4 + 1}/1000", f"| {i + 1}/1000")
    assert same(shown(text), np.full(30, 8.8))
    assert any("microbatch" in note for note in shown(text)["notes"])


def state(entry, **last):
    """A Trainer's state, its history of an entry each ten steps."""
    history = [{"epoch": 0.1, "loss": 1.2, "step": 10 * i, **entry(i)} for i in range(1, 41)]
    history += [{"eval_loss": 1.1, "eval_runtime": 7.5, "step": 400},
                {"step": 400, "train_loss": 1.0, **last}]  # fmt: skip
    return json.dumps({"epoch": 1.0, "global_step": 400, "log_history": history}, indent=2)


def test_the_state_of_a_trainer(shown):
    values = 5.0 + np.arange(1, 41) % 3
    last = {"train_runtime": 2021.4, "train_steps_per_second": 0.198}
    for entry in (lambda i: {"step_time": values[i - 1]},
                  lambda i: {"elapsed_time": 10 * float(values[:i].sum())}):  # fmt: skip
        found = shown(state(entry, **last))
        first = found["taken"]["column"] != "step_time"
        assert same(found, values[first:], mean_over=10 if first else 1)
    assert "5.054 s" in shown(state(lambda i: {}, **last))  # the mean alone
    assert "0.198" not in shown(state(lambda i: {}, **last))
    console = "{'loss': 1.2, 'epoch': 0.1}\n" * 9 + str(last)
    assert "5.051 s" in shown(console) and "5.051 s" in shown(json.dumps(last))
    assert "Trainer" in shown(state(lambda i: {}))


def test_lines_of_json_are_a_table(shown):
    lines = [json.dumps({"step": i, "loss": 2.3, "timing": {}, "step_time_s": v})
             for i, v in enumerate(VALUES)]  # fmt: skip
    lines.insert(4, json.dumps({"step": 3, "eval_loss": 2.2}))
    text = "\n".join(lines)
    assert same(shown(text + "\n"), VALUES)
    assert same(shown(text[:-5]), VALUES[:-1])  # its last line is being written
    assert same(shown(json.dumps([json.loads(line) for line in lines])), VALUES)
    clocks = [json.dumps({"step": i, "timestamp": f"{at(t):%Y-%m-%dT%H:%M:%S.%f}"})
              for i, t in enumerate(np.cumsum(VALUES))]  # fmt: skip
    assert same(shown("\n".join(clocks)), VALUES[1:])
