"""Which column of a table is the step time, in which unit: names as tools and people write them."""

import json

import numpy as np
import pandas as pd
import pytest
from events_made import events
from events_made import run as tags

STEP_S = 2.0  # in every table; what is not the step time has other values
N = 12
I = np.arange(N)  # noqa: E741
STEP, CLOCK, SINCE = I + 1.0, 1.7e9 + STEP_S * I, 5.0 + STEP_S * I

# what wrote it, its columns, the column to be taken with its unit; None: to be refused
TABLES = {
    # ------------------------------------------------- statistics beside the step time
    "step time, min, max": (dict(step=STEP, step_time=2.0, step_time_min=1.8, step_time_max=2.4),
                            ("step_time", "s")),
    "seconds, min, max": (dict(step=STEP, step_s=2.0, step_s_min=1.8, step_s_max=2.4),
                          ("step_s", "s")),
    "only statistics": (dict(step=STEP, step_time_min=1.8, step_time_max=2.4), None),
    "mean of steps": ({"step": STEP, "step_time/mean": 2.0, "step_time/max": 2.4},
                      ("step_time/mean", "s")),
    "mean, in its unit": (dict(step=STEP, step_time_mean_ms=2e3, step_time_p95_ms=2.4e3),
                          ("step_time_mean_ms", "ms")),
    "a sweep's table": (dict(step=STEP, Avg_Step_Time_s=2.0, Total_Throughput_tokens_s=4e6),
                        ("Avg_Step_Time_s", "s")),
    "p95 alone": (dict(step=STEP, step_time_p95_ms=2.4e3), None),
    "step_min": (dict(step=STEP, step_min=1.9), None),
    "iter_time_min": (dict(step=STEP, iter_time_min=1.9), None),
    "time_min": (dict(step=STEP, time_min=1.9), None),
    "latency_min": (dict(step=STEP, latency_min=1.9), None),
    "minutes": (dict(step=STEP, step_minutes=2.0 / 60.0), ("step_minutes", "min")),
    "us": (dict(step=STEP, step_us=2e6), ("step_us", "us")),
    "camel case": (dict(step=STEP, stepTimeMs=2e3, tokensPerSecond=1e6), ("stepTimeMs", "ms")),
    "in brackets": ({"Step": STEP, "step time [ms]": 2e3}, ("step time [ms]", "ms")),
    # ------------------------------------------------- never step times
    "gpu_mem_min": (dict(step=STEP, gpu_mem_min=40.0), None),
    "lr_min": (dict(step=STEP, lr_min=1e-5), None),
    "loss_min": (dict(step=STEP, loss_min=2.0), None),
    "eta_h": (dict(step=STEP, eta_h=30.0), None),
    "tflops_s": (dict(step=STEP, tflops_s=400.0), None),
    "allreduce_gb_s": (dict(step=STEP, allreduce_gb_s=300.0), None),
    "elapsed_s": (dict(step=STEP, elapsed_s=SINCE), None),
    "total_time_s": (dict(step=STEP, total_time_s=SINCE), None),
    "cumulative": (dict(step=STEP, cumulative_seconds=SINCE), None),
    "ms per token": (dict(step=STEP, ms_per_token=0.4), None),
    "rising time_s": (dict(step=STEP, time_s=SINCE), None),
    "start and end": (dict(step=STEP, step_start_s=CLOCK, step_end_s=CLOCK + 2.0), None),
    "start and duration": (dict(step=STEP, start_s=CLOCK, duration_s=2.0), ("duration_s", "s")),
    "hours of GPUs": (dict(step=STEP, gpu_hours=3.0), None),
    "a height": (dict(step=STEP, h=3.0), None),
    "parts of a step": (dict(step=STEP, forward_ms=600.0, compute_s=1.5, nccl_s=0.3, gc_s=0.1),
                        None),
    "worst and sum": (dict(step=STEP, step_time_sum_s=24.0, worst_step_s=2.4), None),
    "frames_s": (dict(step=STEP, frames_s=900.0), None),
    "imgs/s": ({"step": STEP, "imgs/s": 256.0, "global_batch_size": 512}, ("imgs/s", "samples/s")),
    "sec/step (avg)": ({"step": STEP, "sec/step (avg)": 2.0}, ("sec/step (avg)", "s")),
    "steptime": (dict(step=STEP, steptime=2.0), ("steptime", "s")),
    "an epoch": (dict(epoch=STEP, epoch_time_s=900.0), None),
    # ------------------------------------------------- rates
    "tokens_s": (dict(step=STEP, tokens_s=1e6), None),
    "tokens_s, tokens of a step": (dict(step=STEP, tokens_s=1e6, tokens_per_step=2e6),
                                   ("tokens_s", "tokens/s")),
    "tok_s, batch and length": (dict(step=STEP, tok_s=1e6, global_batch_size=500, seq_len=4000),
                                ("tok_s", "tokens/s")),
    "tokens/s, tokens so far": ({"step": STEP, "tokens/s": 1e6, "consumed_tokens": 2e6 * STEP},
                                ("tokens/s", "tokens/s")),
    "samples_s": (dict(step=STEP, samples_s=256.0), None),
    "samples_sec": (dict(step=STEP, samples_sec=256.0, global_batch_size=512),
                    ("samples_sec", "samples/s")),
    "steps_s": (dict(step=STEP, steps_s=0.5), ("steps_s", "steps/s")),
    "it_s": (dict(step=STEP, it_s=0.5), ("it_s", "steps/s")),
    "it/s": ({"step": STEP, "it/s": 0.5}, ("it/s", "steps/s")),
    "steps_per_min": (dict(step=STEP, steps_per_min=30.0), ("steps_per_min", "steps/min")),
    "of one GPU": (dict(step=STEP, tok_per_s_per_gpu=1e4, tokens_per_step=2e6), None),
    "sec/it": ({"step": STEP, "Sec/it": 2.0}, ("Sec/it", "s")),
    "a duration wins": (dict(step=STEP, steps_s=0.4, step_ms=2e3), ("step_ms", "ms")),
    # ------------------------------------------------- trackers
    "W&B chart, one run": ({"Step": STEP, "brisk-1 - step_time": 2.0,
                            "brisk-1 - step_time__MIN": 2.0, "brisk-1 - step_time__MAX": 2.0},
                           ("step_time", "s")),
    "W&B chart without a run": ({"Step": STEP, "step_time": 2.0, "step_time__MIN": 1.9,
                                 "step_time__MAX": 2.1}, ("step_time", "s")),
    "W&B chart by another axis": ({"train/global_step": STEP, "a - train/step_ms": 2e3,
                                   "a - train/step_ms__MIN": 2e3, "a - train/step_ms__MAX": 2e3},
                                  ("train/step_ms", "ms")),
    "W&B history": ({"_step": STEP, "_timestamp": CLOCK, "_runtime": SINCE, "train/loss": 2.5,
                     "perf/step_time": 2.0}, ("perf/step_time", "s")),
    "W&B history without step times": ({"_step": STEP, "_timestamp": CLOCK, "_runtime": SINCE,
                                        "train/loss": 2.5}, None),
    "TensorBoard CSV": ({"Wall time": CLOCK, "Step": STEP, "Value": 2.0}, None),
    "TensorFlow": ({"Wall time": CLOCK, "step": STEP, "global_step/sec": 0.5},
                   ("global_step/sec", "steps/s")),
    "Keras": ({"step": STEP, "batch_steps_per_second": 0.5},
              ("batch_steps_per_second", "steps/s")),
    # ------------------------------------------------- trainers
    "Lightning": ({"epoch": 0, "step": STEP, "train/time": SINCE, "train/batches": STEP,
                   "train/device/batches_per_sec": 0.5, "train/device/samples_per_sec": 8.0}, None),
    "Lightning with its timer": ({"epoch": 0, "step": STEP, "lr-AdamW": 1e-4,
                                  "train_step_timing in s": 2.0,
                                  "validation_step_timing in s": 9.0},
                                 ("train_step_timing in s", "s")),
    "HF Trainer by W&B": ({"_step": STEP, "_runtime": SINCE, "train/global_step": STEP,
                           "train/train_runtime": 24.0, "train/train_steps_per_second": 0.5,
                           "train/train_samples_per_second": 256.0,
                           "eval/steps_per_second": 3.0},
                          ("train/train_steps_per_second", "steps/s")),
    "HF Trainer's evaluations": ({"step": STEP, "eval_runtime": 9.0,
                                  "eval_samples_per_second": 90.0,
                                  "eval_steps_per_second": 3.0}, None),
    "TRL": ({"step": STEP, "loss": 2.5, "step_time": 2.0, "num_tokens": 1e6 * STEP},
            ("step_time", "s")),
    "Ray Train": (dict(training_iteration=STEP, time_this_iter_s=2.0, time_total_s=SINCE,
                       time_since_restore=SINCE, timestamp=CLOCK, loss=2.5),
                  ("time_this_iter_s", "s")),
    "Megatron by W&B": ({"_step": STEP, "iteration-time": 2.0, "throughput": 400.0,
                         "samples vs steps": STEP, "learning-rate": 1e-4, "batch-size": 512},
                        ("iteration-time", "s")),
    "Megatron with timers": ({"step": STEP, "iteration-time": 2.0, "forward-backward-time": 1.7,
                              "optimizer-time": 0.2, "iteration-time vs samples": 2.0},
                             ("iteration-time", "s")),
    "Megatron-DeepSpeed": ({"step": STEP, "iteration-time/iteration-time": 2.0,
                            "iteration-time/iteration-time vs samples": 2.0,
                            "throughput/samples_per_sec": 250.0},
                           ("iteration-time/iteration-time", "s")),
    "Megatron Bridge": ({"step": STEP, "perf/iteration_time_ms": 2e3,
                         "throughput/tokens_per_sec": 1e6, "time/remaining_estimate": 9e3},
                        ("perf/iteration_time_ms", "ms")),
    "DeepSpeed's monitor": ({"step": STEP, "Train/Samples/elapsed_time_ms_forward": 700.0,
                             "Train/Samples/elapsed_time_ms_step": 100.0}, None),
    "NeMo": ({"step": STEP, "global_step": STEP, "train_step_timing in s": 2.0,
              "consumed_samples": 512 * STEP}, ("train_step_timing in s", "s")),
    "NeMo RL": ({"step": STEP, "timing/train/total_step_time": 2.0,
                 "timing/train/generation": 1.1, "performance/tokens_per_sec_per_gpu": 900.0},
                ("timing/train/total_step_time", "s")),
    "torchtitan": ({"step": STEP, "time_metrics/end_to_end(s)": 2.0,
                    "time_metrics/data_loading(s)": 0.1, "time_metrics/data_loading(%)": 5.0,
                    "throughput(tps)": 7e3, "mfu(%)": 40.0, "memory/max_active(GiB)": 60.0},
                   ("time_metrics/end_to_end(s)", "s")),
    "MaxText": ({"step": STEP, "perf/step_time_seconds": 2.0, "perf/per_device_tflops": 800.0,
                 "perf/per_device_tokens_per_sec": 1e4}, ("perf/step_time_seconds", "s")),
    "nanotron": ({"step": STEP, "elapsed_time_per_iteration_ms": 2e3, "tokens_per_sec": 1e6,
                  "model_tflops_per_gpu": 400.0, "eta": 0},
                 ("elapsed_time_per_iteration_ms", "ms")),
    "levanter": ({"step": STEP, "throughput/duration": 2.0, "throughput/loading_time": 0.1,
                  "throughput/examples_per_second": 250.0, "throughput/hook_time": 0.1},
                 ("throughput/duration", "s")),
    "verl": ({"step": STEP, "timing_s/step": 2.0, "timing_s/gen": 1.1,
              "timing_s/update_actor": 0.6, "timing_per_token_ms/gen": 0.01,
              "perf/throughput": 900.0}, ("timing_s/step", "s")),
    "slime": ({"step": STEP, "perf/step_time": 2.0, "perf/train_wait_time": 0.3,
               "perf/rollout_time": 1.0}, ("perf/step_time", "s")),
    "Composer": ({"step": STEP, "throughput/batches_per_sec": 0.5, "time/train": SINCE / 3600,
                  "throughput/device/tokens_per_sec": 9e3}, None),
    "OLMo": ({"step": STEP, "throughput/device/tokens_per_second": 9e3,
              "throughput/total_tokens": 2e6 * STEP}, None),
    "T5X": ({"step": STEP, "timing/seconds": 200.0, "timing/steps_per_second": 0.5,
             "timing/seqs_per_second_per_core": 4.0}, ("timing/steps_per_second", "steps/s")),
    "fairseq": (dict(step=STEP, wps=1e6, ups=0.5, wpb=2e6, bsz=512, train_wall=SINCE),
                ("ups", "steps/s")),
    "MMEngine": (dict(step=STEP, lr=1e-4, data_time=0.1, time=2.0, memory=4e4), None),
    "Detectron2": (dict(iteration=STEP, eta_seconds=900.0, data_time=0.1, time=2.0), None),
    "ms-swift": ({"step": STEP, "train_speed(s/it)": 2.1, "memory(GiB)": 60.0}, None),
    "own timer": ({"step": STEP, "timing/iter": 2.0, "timing/forward": 0.6}, ("timing/iter", "s")),
    "PyTorch's example": (dict(step=STEP, batch_time=2.0, data_time=0.1), ("batch_time", "s")),
    # ------------------------------------------------- several that may be it
    "two durations": (dict(step=STEP, step_s=2.0, iter_ms=2e3), None),
    "two tools": ({"step": STEP, "iteration-time": 2.0, "train_step_timing in s": 2.1}, None),
    "no unit, milliseconds": (dict(step=STEP, step_time=2e3), None),
}  # fmt: skip


def written(path, columns):
    pd.DataFrame({name: np.broadcast_to(x, N) for name, x in columns.items()}).to_csv(
        path, index=False
    )
    return path


@pytest.fixture
def show(tmp_path, run):
    """Show a table: what was taken and the median [s], or None where it is refused."""

    def call(columns, *options):
        path = written(tmp_path / "table.csv", columns)
        status, out, err = run("show", path, *options, "--json", "-q")
        assert status in (0, 2) and "Traceback" not in err
        return None if status else json.loads(out)

    return call


def taken(found):
    return found["taken"]["column"], found["taken"]["unit"]


@pytest.mark.parametrize("name", TABLES)
def test_the_column_and_its_unit(show, name):
    columns, expected = TABLES[name]
    found = show(columns)
    if expected is None:
        assert found is None
    else:
        assert taken(found) == expected
        assert found["p50"] == pytest.approx(STEP_S)


@pytest.mark.parametrize(
    ("columns", "options", "unit"),
    [
        (dict(step=STEP, step_time_min=2.0 / 60.0), "--column step_time_min --unit min", "min"),
        (dict(step=STEP, step_time=2e3), "--unit ms", "ms"),
        (dict(step=STEP, step_time=2e6), "--unit us", "us"),
        (dict(step=STEP, step_time=2e3, steps_s=0.5), "--column steps_s", "steps/s"),
        ({"Wall time": CLOCK, "Step": STEP, "Value": 2.0}, "--column Value --unit s", "s"),
        (dict(step=STEP, step_time_max_ms=2e3), "--column step_time_max_ms", "ms"),
        (dict(step=STEP, step_s=2.0, iter_ms=3e3), "--column step_s", "s"),
    ],
)
def test_what_a_user_says_wins(show, columns, options, unit):
    found = show(columns, *options.split())
    assert found["p50"] == pytest.approx(STEP_S) and found["taken"]["unit"] == unit


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        (dict(step=STEP, step_time=2.0), "--unit days"),
        (dict(step=STEP, start_s=CLOCK), "--column start_s"),
        ({"Wall time": CLOCK, "Step": STEP, "Value": 2e3}, "--column Value --unit s"),
        ({"_step": STEP, "_runtime": SINCE, "step_time": 200.0}, ""),
        (dict(step=STEP, tokens_s=1e6), ""),
        (dict(step=STEP, tokens_s=1e6), "--column tokens_s"),
    ],
)
def test_what_a_user_says_wrongly(show, columns, options):
    assert show(columns, *options.split()) is None


def test_rows_of_a_group_are_chosen(show):
    columns = dict(step=STEP, step_s=np.where(I % 2, 2.0, 5.0), kind=np.where(I % 2, "a", "b"))
    assert show(columns, "--where", "kind=a")["p50"] == 2.0
    assert show(columns, "--where", "kind=b")["p50"] == 5.0
    assert show(columns, "--where", "kind=c") is None


def test_scalars_of_tensorboard_by_the_same_names(tmp_path, run):
    path = tmp_path / "events"
    noise = ("step_time_min", "memory_s", "eta_seconds", "tokens_s")
    for tag, per_second, unit in (
        ("steps_per_sec", 0.25, "steps/s"), ("train/step_time", 1.0, "s"),
        ("train/step_time_ms", 1e3, "ms"),
    ):  # fmt: skip
        path.write_bytes(events(tags(tag, np.full(N, STEP_S), unit=per_second, noise=noise)))
        found = json.loads(run("show", path, "--json", "-q")[1])
        assert taken(found) == (tag, unit) and found["p50"] == pytest.approx(STEP_S)


@pytest.mark.parametrize("command", ["show", "fit", "validate", "compare", "watch"])
def test_commands_say_what_they_took(tmp_path, run, few_repeats, command):
    path, n = tmp_path / "t.csv", np.arange(40)
    pd.DataFrame({
        "step": n, "step_time": 2.0 + 0.01 * np.sin(n), "step_time_min": 1.9,
    }).to_csv(path, index=False)  # fmt: skip
    after = {
        "show": (path,), "fit": (path, "--seed", 0), "compare": (path, path, "--seed", 0),
        "validate": ("--trace", path, "--train", 8, "--bootstrap", 0, "--seed", 0),
        "watch": (path, "--once", "--steps", 100, "--seed", 0),
    }  # fmt: skip
    status, out, err = run(command, *after[command], "--json", "-q")
    found = json.loads(out)
    assert status == 0
    assert taken(found["a"] if command == "compare" else found) == ("step_time", "s")
    assert "step_time" in run(command, *after[command], "-q")[1]


def test_an_estimate_says_what_it_took_of_a_run_in_progress(tmp_path, run, few_repeats):
    n = np.arange(1, 41)
    table = pd.DataFrame({"step": n, "step_time": 120.0 + 0.5 * np.sin(n)})
    table.to_csv(tmp_path / "t.csv", index=False)
    run("fit", tmp_path / "t.csv", "-o", tmp_path / "model.nc", "--seed", 0, "-q")
    for what in ("pipeline-8x32", tmp_path / "model.nc"):
        call = ("estimate", what, "--replicates", 64, "--run-replicates", 64, "--steps", 100,
                "--seed", 1, "-q", "--progress", tmp_path / "t.csv")  # fmt: skip
        found = json.loads(run(*call, "--json")[1])
        assert found["completed"]["taken"]["column"] == "step_time"


@pytest.mark.parametrize("command", ["show", "fit", "validate", "replay", "timeline", "compare"])
def test_steps_are_chosen_by_number_or_the_first_left_out(tmp_path, run, few_repeats, command):
    steps, trace = tmp_path / "t.csv", "experiments/samples/trace.csv"
    n = np.arange(60)
    table = pd.DataFrame({"step": n, "step_s": np.where(n < 20, 9.0, 2.0 + 0.01 * np.sin(n))})
    table.to_csv(steps, index=False)
    after, where, seen = {
        "show": ((steps,), "20:59", lambda found: found["p50"]),
        "fit": ((steps, "--seed", 0), "20:", lambda found: found["step_time"]["mean"]),
        "compare": ((steps, steps), "20:", lambda found: found["quantities"]["step_time"]
                    ["figures"]["mean"]["a"]),
        "validate": (("--trace", steps, "--bootstrap", 0), "20:",
                     lambda found: 2.0 * (1.0 + found["p50_error"])),
        "replay": ((trace,), "2:4", lambda found: found["steps"] - 1),
        "timeline": ((trace,), "2:2", lambda found: found["steps"][0]["step"]),
    }[command]  # fmt: skip
    for chosen in (("--steps", where), ("--skip", 20))[: 2 - (command in ("replay", "timeline"))]:
        status, out, err = run(command, *after, *chosen, "--json", "-q")
        assert status == 0, err
        assert seen(json.loads(out)) == pytest.approx(2.0, rel=0.01)
    assert run(command, *after, "--steps", "1000:", "-q")[0] == 2


def test_the_unit_is_an_option_of_the_commands(tmp_path, run, few_repeats):
    path = written(tmp_path / "t.csv", {"step": np.arange(N), "step_time_min": 2.0 + 0.01 * I % 3})
    _, out, err = run("show", path, "--column", "step_time_min", "--unit", "min", "--json")
    assert json.loads(out)["p50"] == pytest.approx(60.0 * np.median(2.0 + 0.01 * I % 3))
    assert run("show", path)[0] == 2
