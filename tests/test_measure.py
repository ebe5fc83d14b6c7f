"""What `prism measure` learns from samples, and, where torch is installed, the measuring itself."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from click.testing import CliRunner

import prism
from prism import PrismError, load_job, load_library, measure
from prism.cli.app import prism as command_line
from prism.measuring import figures, machine
from prism.measuring.collectives import collective_cases, parse_size
from prism.measuring.command import check_time, samples_path, write_library
from prism.measuring.entries import CARRIED, entry_name, pooled_distribution
from prism.measuring.kernels import kernel_cases, parse_sizes
from prism.measuring.samples import Samples, load_samples, save_samples, to_dataset
from prism.measuring.session import Block, CpuTimer, Plan, is_settled, run_session
from prism.plots import plot_measurement

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch (extra: measure) is not installed"
)
MACHINE = {"device": "NVIDIA H100 80GB HBM3", "device_kind": "cuda", "torch": "2.13", "cores": 8,
           "cpu": "x", "system": "Linux"}  # fmt: skip


WAYS = ("forward", "backward")


class MadeBench:
    """Calls of known durations: lognormal about a mean, the first of a case slower."""

    def __init__(self, means, cv=0.05, drift=0.0):
        self.means, self.cv, self.drift = means, cv, drift
        self.rng = np.random.default_rng(3)
        self.now, self.order = 0.0, []

    def block(self, case, n):
        self.order.append(case)
        cold = 2.0 if self.order.count(case) == 1 else 1.0
        factor = cold * (1.0 + self.drift * self.now)
        seconds = self.means[case] * factor * np.exp(self.cv * self.rng.standard_normal(n))
        at = self.now + np.cumsum(seconds)
        self.now = float(at[-1])
        return Block(seconds, at)

    def agree(self, value):
        return value


def made(means=(1e-3, 2e-3), repetitions=400, **changes):
    cases = tuple(
        kernel_cases("gemm", [f"{256 * (i + 1)}x256x256" for i in range(len(means))], "bfloat16")
    )
    samples = Samples.empty("gemm", cases, {"machine": MACHINE, "date": "2026-01-01"})
    bench = MadeBench(means, **changes)
    return run_session(bench, samples, Plan(repetitions=repetitions, seed=5)), bench


def test_session_interleaves_in_random_order_and_leaves_warm_up_out():
    samples, bench = made()
    assert samples.counts() == [400, 400]
    assert samples.attrs["warm_up"][0]["first_s"] > 1.7 * samples.attrs["warm_up"][0]["last_s"]
    assert samples.seconds[0].max() < 1.7e-3  # the slow first call is not among those that count
    starts = [blocks[0] for blocks in samples.block]
    assert abs(starts[0] - starts[1]) == 1  # both cases in the first round
    rounds = np.array(bench.order[-16:]).reshape(-1, 2)[:, 0]
    assert 0 < rounds.sum() < 8  # neither case always comes first


def test_the_first_calls_of_a_block_do_not_count():
    bench = MadeBench((1e-3,), cv=0.0)
    block = bench.block

    def slow_first(case, n):
        made = block(case, n)
        made.seconds[:2] = 1.0
        return made

    bench.block = slow_first
    for sustained in (False, True):
        samples = Samples.empty("gemm", tuple(kernel_cases("gemm", ["8x8x8"], "bfloat16")), {})
        run_session(bench, samples, Plan(repetitions=120, sustained=sustained))
        assert samples.seconds[0] == pytest.approx(np.full(120, 1e-3))


def test_sustained_cases_run_back_to_back_until_they_settle(monkeypatch):
    class Slowing(MadeBench):
        """Faster in the first 0.6 s of a case, as a GPU before its power limit acts."""

        since = None

        def block(self, case, n):
            if not self.order or self.order[-1] != case:
                self.since = self.now
            made = super().block(case, n)
            made.seconds[made.at - self.since < 0.6] *= 0.8
            return made

    bench = Slowing((1e-3, 5e-3), cv=0.01)
    monkeypatch.setattr("time.perf_counter", lambda: bench.now)
    samples = Samples.empty(
        "gemm", tuple(kernel_cases("gemm", ["8x8x8", "16x8x8"], "bfloat16")), {}
    )
    run_session(bench, samples, Plan(repetitions=300, sustained=True))
    assert samples.counts() == [300, 300]
    assert (np.diff(bench.order) != 0).sum() == 1  # one case after the other
    assert [x.mean() for x in samples.seconds] == pytest.approx([1e-3, 5e-3], rel=0.01)
    assert all(warm["settled"] for warm in samples.attrs["warm_up"])
    began = bench.now
    samples = Samples.empty("gemm", samples.cases, {})
    run_session(bench, samples, Plan(repetitions=10**6, sustained=True, limit_s=10.0))
    assert 10.0 <= bench.now - began < 11.0 and samples.attrs["stopped"]
    assert min(samples.counts()) > 500


def test_a_limit_holds_before_long_calls(monkeypatch):
    cases = kernel_cases("gemm", ["512x512x512", "16384x16384x16384"], "float32")
    with pytest.raises(PrismError, match="16384/float32 is expected to take 90 s here"):
        check_time(cases, [0.01, 90.0], Plan(limit_s=5.0))
    assert "20 calls" in check_time(cases, [0.01, 90.0], Plan(limit_s=100.0))
    assert "2,000 calls" in check_time(cases, [0.01, 90.0], Plan())
    assert check_time(cases, [1e-4, 1e-3], Plan()) == ""
    bench = MadeBench((1.0, 1.0))
    monkeypatch.setattr("time.perf_counter", lambda: bench.now)
    samples = Samples.empty("gemm", tuple(cases), {})
    run_session(bench, samples, Plan(limit_s=20.0))
    assert 20.0 <= bench.now < 23.0  # blocks of 50 calls, and warm-up of 10, would go far beyond
    assert sum(samples.counts()) > 5


def test_figures_of_known_samples():
    samples, _ = made(repetitions=1_000)
    numbers = figures.summarize_samples(samples)
    row = numbers["cases"][0]
    assert row["p50"] == pytest.approx(1e-3, rel=0.01)
    assert row["cv"] == pytest.approx(0.05, rel=0.1)
    assert row["rate"] == pytest.approx(2.0 * 256**3 / row["p50"])
    assert row["modes"] == 1
    assert abs(row["autocorrelation"]) < 0.1
    assert not [w for w in numbers["warnings"] if "load average" not in w]  # of this machine


def test_warns_of_drift_two_modes_and_few_calls():
    drifting, _ = made(repetitions=400, drift=0.3)
    told = " ".join(figures.summarize_samples(drifting)["warnings"])
    assert "moved by +" in told and "400 calls" in told
    rng = np.random.default_rng(0)
    body = 1e-3 * np.exp(0.02 * rng.standard_normal(2_000))
    assert figures.count_modes(body) == 1
    body[rng.random(2_000) < 0.3] *= 1.3
    assert figures.count_modes(body) == 2
    same, faster = [np.full(5, 1.0)] * 2, [np.full(5, 0.9)] * 2
    assert is_settled(same, same)
    assert not is_settled(same, faster) and not is_settled(faster, same)


def test_autocorrelation_counts_within_blocks_only():
    rng = np.random.default_rng(0)
    level = np.repeat(rng.standard_normal(40), 50)
    block = np.repeat(np.arange(40), 50)
    assert figures.lag_one(level + 0.1 * rng.standard_normal(2_000), block) > 0.9
    assert figures.lag_one(rng.random(5), np.arange(5)) is None


def test_rare_calls_have_ticks_that_can_be_told_apart():
    seconds = np.linspace(1e-3, 2e-3, 2_000)
    result = xr.Dataset(
        {"case_idx": ("call", np.zeros(2_000, int)), "duration": ("call", seconds)},
        {"case": ["gemm"]},
    )
    ticks = plot_measurement(result).yaxis.get_major_formatter()
    assert [ticks(share) for share in (0.001, 0.01, 1.0)] == ["0.1 %", "1 %", "100 %"]


def test_library_holds_distributions_and_keeps_what_was_not_measured(tmp_path):
    file = tmp_path / "here.nc"
    samples, _ = made((2e-3, 5e-3), repetitions=2_000)
    write_library(samples, file)
    library = load_library(file)
    assert library.device == "h100"  # the name by which a job finds its measured table
    distribution = library.entry("residual/gemm_large")
    assert distribution.n == 4_000 and distribution.distribution.cv == pytest.approx(0.05, rel=0.05)
    assert "NVIDIA H100 80GB HBM3" in distribution.source and "2026-01-01" in distribution.source
    assert library.value("kernel/gemm/256x256x256/bfloat16/mean_s") == pytest.approx(2e-3, rel=0.01)
    assert library.source("step").startswith(CARRIED)
    table = library.tables["gemm/bf16"]
    assert table.rate[0] == pytest.approx(2.0 * 256**3 / 2e-3, rel=0.01)
    again = made((2e-3,), repetitions=50)[0]
    again.cases = tuple(kernel_cases("attention", ["1x2x64x32"], "bfloat16", backend="fa2")[:1])
    again.kind = "attention"
    write_library(again, file)
    both = load_library(file)
    assert both.entry("residual/gemm_large").n == 4_000  # of the first measurement
    assert both.entry("residual/attention").n == 50
    assert both.tables["gemm/bf16"].source == table.source


def test_other_kinds_leave_the_shipped_tables(tmp_path):
    file = tmp_path / "here.nc"
    samples = made((2e-3,), repetitions=50)[0]
    samples.cases = tuple(kernel_cases("attention", ["1x2x64x32"], "bfloat16", backend="fa2")[:1])
    samples.kind = "attention"
    write_library(samples, file)
    shipped = load_library("h100-healthy").tables  # products were not measured
    assert load_library(file).tables["gemm/bf16"].source == shipped["gemm/bf16"].source
    samples.attrs["machine"] = MACHINE | {"device": "CPU x", "device_kind": "cpu"}
    samples.attrs["threads"] = 1
    with pytest.raises(PrismError, match="holds measurements of h100, this is CPU x"):
        write_library(samples, file)
    write_library(samples, tmp_path / "cpu.nc", str(file))
    assert load_library(tmp_path / "cpu.nc").device == "CPU x"


def test_attention_by_backend_has_tables_by_name(tmp_path):
    shapes = [f"{b}x16x{s}x128" for b in (1, 2) for s in (1024, 4096)]
    samples = made((1e-3,) * 8, repetitions=50, cv=0.01)[0]
    samples.cases = tuple(kernel_cases("attention", shapes, "bfloat16", backend="cudnn"))
    samples.kind = "attention"
    write_library(samples, tmp_path / "here.nc")
    library = load_library(tmp_path / "here.nc")
    tables = library.kernels
    forward, backward = (tables[f"attention/cudnn/bf16/causal/{way}"] for way in WAYS)
    assert {axis: grid.tolist() for axis, grid in forward.axes.items()} == {
        "batch": [1, 2], "heads": [16], "seq": [1024, 4096], "head_dim": [128],
    }  # fmt: skip
    sizes = {"batch": 2, "heads": 16, "seq": 4096, "head_dim": 128}
    assert forward(**sizes) == pytest.approx(2.0 * 2 * 16 * 4096**2 * 128 / 1e-3, rel=0.01)
    assert backward(**sizes) > 2.0 * forward(**sizes)
    assert not any(name.startswith("attention/") for name in library.tables)
    cost = prism.kernel("attention", library=library, backend="cudnn", **sizes)
    assert cost["mean"] == pytest.approx(1e-3, rel=0.01) and not cost["extrapolated"]
    assert "prism measure attention" in cost["source"]
    with pytest.raises(PrismError, match="cudnn, fa2"):
        kernel_cases("attention", shapes, "bfloat16", backend="fa9")
    for kind, options in (("gemm", {"backend": "fa2"}), ("collective", {"sustained": True})):
        with pytest.raises(PrismError):
            measure(kind, device="cpu", **options)


def test_copies_give_the_time_of_moved_bytes(tmp_path):
    samples = made((1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 6e-4, 7e-4, 8e-4), repetitions=50, cv=0.0)[0]
    samples.cases, samples.kind = (
        tuple(kernel_cases("memory", ["512x512", "1024x512"], "bfloat16")),
        "memory",
    )
    write_library(samples, tmp_path / "here.nc")
    library = load_library(tmp_path / "here.nc")
    copies = [(c.bytes, s[0]) for c, s in zip(samples.cases, samples.seconds, strict=True)
              if c.label.startswith("copy/")]  # fmt: skip
    assert len(copies) == 2
    for n_bytes, seconds in copies:
        found = prism.kernel("memory", library=library, bytes=n_bytes)
        assert found["mean"] == pytest.approx(seconds, rel=1e-3)
        assert "prism measure memory" in found["source"]
    gone = {"gemm_efficiency_max", "memory_efficiency", "attention_efficiency"}
    assert not gone & {name.partition("/")[2] for name in library.entries}


def test_another_device_has_the_base_s_kernels_by_its_data_sheet(tmp_path):
    """A job's device that the library's is not, too: its kernels are those of its own set."""
    samples = made((2e-3, 5e-3), repetitions=50, cv=0.01)[0]
    libraries = {}
    for name, device in (("v100", "Tesla V100-SXM2-32GB"), ("cpu", "CPU x")):
        samples.attrs["machine"] = MACHINE | {"device": device}
        write_library(samples, tmp_path / f"{name}.nc")
        libraries[name] = load_library(tmp_path / f"{name}.nc")
    sizes = {"rows": 8192, "columns": 4096}
    slow = prism.kernel("rms_norm", library=libraries["v100"], **sizes)
    fast = prism.kernel("rms_norm", device="h100", **sizes)
    assert slow["mean"] == pytest.approx(fast["mean"] * 3350 / 900, rel=1e-3)
    assert slow["source"].startswith("assumption") and slow["extrapolated"]
    made_here = prism.kernel("gemm", library=libraries["cpu"], m=256, n=256, k=256)
    assert made_here["mean"] == pytest.approx(2e-3, rel=0.01)
    with pytest.raises(PrismError, match="no table of rms_norm"):
        prism.kernel("rms_norm", library=libraries["cpu"], **sizes)
    ideal = [
        prism.summary(prism.simulate(load_job({
            "model": {"name": "llama3-8b", "n_layers": 2, "seq_len": 512},
            "parallelism": {"microbatches": 2},
            "cluster": {"nodes": 1, "gpus_per_node": 1, "device": "h100"},
            "variability": {"library": name},
        }), replicates=64, seed=1))["ideal_step_time"]
        for name in (str(tmp_path / "cpu.nc"), "h100-healthy")
    ]  # fmt: skip
    assert ideal[0] == pytest.approx(ideal[1], rel=1e-6)


@pytest.mark.parametrize(("op", "nodes", "times"), [
    ("all_gather", 4, (60e-6, 3e-3)), ("all_reduce", 16, (90e-6, 30e-3)), ("p2p", 2, (3e-5, 7e-3)),
])  # fmt: skip
def test_a_network_that_was_measured_is_what_jobs_then_take(
    op, nodes, times, tmp_path, monkeypatch
):
    """Between nodes the smallest and the largest message take as long as they did."""
    ranks, sizes = 16, (16 * 2048, 16 * 2**22)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks // nodes))
    samples = made(times, repetitions=50, cv=0.0)[0]
    messages = [(op, n_bytes) for n_bytes in sizes]
    samples.cases = tuple(collective_cases(messages, ranks, "nccl", "bfloat16", "network"))
    samples.kind, samples.attrs["machine"] = "collective", MACHINE | {"device": "NVIDIA A100"}
    write_library(samples, tmp_path / "net.nc")
    library = load_library(tmp_path / "net.nc")
    asked = {"op": op, "ranks": nodes if op == "p2p" else ranks, "nodes": nodes}
    for n_bytes, seconds in zip(sizes, times, strict=True):
        found = prism.kernel("collective", library=library, bytes=n_bytes, **asked)
        assert found["mean"] == pytest.approx(seconds, rel=0.02)
        assert "prism measure collective" in found["source"]


def test_pooled_distribution_takes_the_median_spread():
    rng = np.random.default_rng(1)
    parts = [m * np.exp(cv * rng.standard_normal(4_000)) for m, cv in
             ((1.0, 0.02), (3.0, 0.03), (2.0, 0.4))]  # fmt: skip
    distribution, n = pooled_distribution(parts)
    assert n == 12_000 and distribution.mean == pytest.approx(1.0)
    assert distribution.cv == pytest.approx(0.03, rel=0.15)


def test_samples_come_back_as_they_were(tmp_path):
    samples, _ = made()
    save_samples(samples, tmp_path / "s.samples.nc")
    back = load_samples(tmp_path / "s.samples.nc")
    assert [c.label for c in back.cases] == [c.label for c in samples.cases]
    assert all(np.array_equal(a, b) for a, b in zip(back.seconds, samples.seconds, strict=True))
    run_session(MadeBench((1e-3, 2e-3)), back, Plan(repetitions=450))
    assert back.counts() == [450, 450]
    assert np.array_equal(back.seconds[1][:400], samples.seconds[1])  # goes on, loses nothing


def test_sizes_and_classes():
    assert parse_size("1.5MB") == 1_500_000
    cases = collective_cases(
        [("all_reduce", 1_000_001), ("p2p", 7)], 3, "gloo", "float32", "nvlink"
    )
    assert [c.bytes for c in cases] == [999_996.0, 4.0]
    assert entry_name(cases[0], 1e-3) == "residual/nvlink_small"
    assert entry_name(cases[1], 1e-3) == "residual/p2p"
    for bad in ("12x3", "axbxc", "0x1x2"):
        with pytest.raises(PrismError, match="MxNxK"):
            parse_sizes(bad, "MxNxK")
    with pytest.raises(PrismError, match="4KiB"):
        parse_size("big")


def test_without_torch_it_says_how_to_get_it(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(machine.importlib, "import_module", missing)
    done = CliRunner().invoke(command_line, ["measure", "gemm"], standalone_mode=False)
    assert isinstance(done.exception, PrismError)
    assert "pip install" in str(done.exception)


def test_clock_cost_is_subtracted():
    timer = CpuTimer()
    assert 0.0 < timer.overhead_s < 1e-4
    assert np.median(timer.block(lambda: None, 200).seconds) < 5.0 * timer.overhead_s


@needs_torch
def test_gemm_command_writes_a_library_that_jobs_take(tmp_path):
    file = tmp_path / "here.nc"
    command = ["measure", "gemm", "--shape", "32x32x32", "--shape", "48x32x32", "-o", str(file),
               "--repetitions", "60", "--seed", "1", "--device", "cpu", "--json", "-q"]  # fmt: skip
    done = CliRunner().invoke(command_line, command, catch_exceptions=False)
    numbers = json.loads(done.stdout)
    assert [row["n"] for row in numbers["cases"]] == [60, 60]
    assert samples_path(file).is_file()
    assert load_library(file).entry("residual/gemm_small").n == 120
    more = CliRunner().invoke(command_line, [*command, "--resume"], catch_exceptions=False)
    assert [row["n"] for row in json.loads(more.stdout)["cases"]] == [60, 60]
    job = ["estimate", "pipeline-8x32", "--set", f"variability.library={file}", "--replicates",
           "128", "--run-replicates", "8", "--seed", "1", "--json", "-q"]  # fmt: skip
    assert json.loads(CliRunner().invoke(command_line, job, catch_exceptions=False).stdout)[
        "step_time"
    ]


@needs_torch
def test_attention_command_takes_a_backend_and_sustains(tmp_path):
    file = tmp_path / "here.nc"
    command = ["measure", "attention", "--shape", "1x2x16x8", "--shape", "1x2x32x8", "--backend",
               "math", "--sustained", "--limit", "4s", "-o", str(file), "--repetitions", "30",
               "--seed", "1", "--device", "cpu", "--json", "-q"]  # fmt: skip
    done = CliRunner().invoke(command_line, command, catch_exceptions=False)
    numbers = json.loads(done.stdout)
    assert len(numbers["cases"]) == 4 and all(row["n"] > 0 for row in numbers["cases"])
    assert all(row["label"].endswith("/math") for row in numbers["cases"])
    assert "attention/math/fp32/causal/backward" in load_library(file).kernels
    command[command.index("math")] = "cudnn"
    refused = CliRunner().invoke(command_line, command, standalone_mode=False)
    assert isinstance(refused.exception, PrismError)


@pytest.mark.slow
@needs_torch
def test_one_gpu_experiment_runs_on_a_processor(tmp_path):
    script = Path(__file__).parents[1] / "experiments" / "validation" / "one-gpu" / "run.py"
    command = [sys.executable, str(script), "--device", "cpu", "--quick", "-o", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    kernels, steps = (pd.read_csv(tmp_path / f"{name}.csv") for name in ("kernels", "steps"))
    assert len(kernels) > 5 and (kernels["mean_s"] > 0.0).all()
    assert (kernels["n"][0], kernels["calls"].max()) == (64, 500)
    assert steps["model"][0] == "1.1b-eager" and steps["n"][0] > 0
    assert (tmp_path / "traces" / "1.1b-eager.json.gz").is_file()
    assert load_job(str(tmp_path / "1.1b-eager.yaml")).parallelism.framework == "eager"


def test_the_seed_of_the_order_is_fresh_and_kept_when_gone_on_with(monkeypatch, tmp_path):
    def no_calls(samples, plan, flush_l2, file, *rest):
        samples.attrs["timer_overhead_s"] = 0.0
        seeds.append(plan.seed)
        save_samples(samples, file)

    seeds, library, module = [], tmp_path / "here.nc", sys.modules["prism.measuring.command"]
    monkeypatch.setattr(module, "_measure_kernels", no_calls)
    monkeypatch.setattr(module, "write_library", lambda *a: None)
    monkeypatch.setattr(module, "choose_device", lambda device: "cpu")
    monkeypatch.setattr(module, "describe_machine", lambda device: MACHINE)
    for options in ({}, {}, {"resume": True}, {"resume": True, "seed": 0}):
        found = module.measure("gemm", library, shapes=["8x8x8"], **options)
        assert prism.summary(found)["seed"] == seeds[-1]
    assert seeds[0] != seeds[1] == seeds[2] and seeds[3] == 0


def test_what_was_measured_is_told_with_the_numbers_of_the_json():
    answer = prism.answer(to_dataset(made()[0]))
    table = answer.tables[0]
    cases = answer.figures["cases"]
    assert [row[0] for row in table.rows] == [case["label"] for case in cases]
    assert [row[2].value for row in table.rows] == [case["p50"] for case in cases]
    assert [found.code for found in answer.findings] == ["spread"]
    assert answer.pictures[0].draw().lines


def test_a_measured_step_of_an_earlier_version_is_told_the_way(tmp_path, run):
    file = tmp_path / "result.nc"
    dataset = xr.Dataset({"step_time": ("step", np.ones(3))}, attrs={"kind": "measured_step"})
    prism.save(dataset, file)
    for command in (
        ["show", file], ["report", file, "-o", tmp_path / "r.html"], ["timeline", file],
        ["measure", "step", "--parallel", "pipeline", "-o", tmp_path],
        ["measure", "step", "--help"],
    ):  # fmt: skip
        status, _, told = run(*map(str, command))
        assert status == 2 and "torch.profiler" in told and "prism fit TRACE" in told
        assert command[0] == "measure" or str(file) in told
    for look in (prism.summary, prism.answer):
        with pytest.raises(PrismError, match="prism fit TRACE"):
            look(dataset)
    with pytest.raises(PrismError, match="result.nc: prism measure step"):
        prism.load(file)
