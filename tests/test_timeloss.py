"""Where the time of a step goes: closed forms of a pipeline, and the same step taken apart."""

import math

import numpy as np
import pytest

from prism import engine, load_job, simulate, summary
from prism.simulation.prepare import prepare, silence, treat_classes
from prism.simulation.program import ideal_program
from prism.simulation.steps import run_blocks
from prism.simulation.timeloss import freed_classes
from prism.simulation.variability import Treatment, is_communication
from prism.workload.kernels import is_compute

P, M, F, B = 4, 6, 1.0, 2.0
QUIET = {"library": None}


def parts_of(job, replicates=64, seed=1):
    """Parts of a step as name: (share of the mean, share of the variance)."""
    numbers = summary(simulate(job, replicates=replicates, seed=seed))
    return {
        p["name"]: (p["mean_share"], p["variance_share"]) for p in numbers["time_loss"]
    }, numbers


def pipeline(effects=None, **durations):
    return load_job({
        "model": {"durations": {"forward_s": F, "backward_s": B} | durations},
        "parallelism": {"pp": P, "microbatches": M, "schedule": "1f1b"},
        "variability": QUIET | ({"effects": effects} if effects else {}),
    })  # fmt: skip


def test_bubble_of_a_pipeline_without_noise_is_the_closed_form():
    parts, numbers = parts_of(pipeline())
    step = (M + P - 1) * (F + B)
    assert numbers["step_time"]["mean"] == pytest.approx(step, rel=1e-6)
    assert parts["bubble"][0] == pytest.approx((P - 1) / (M + P - 1), rel=1e-5)
    assert parts["compute"][0] == pytest.approx(M / (M + P - 1), rel=1e-5)
    rest = [share for name, (share, _) in parts.items() if name not in ("bubble", "compute")]
    assert np.allclose(rest, 0.0, atol=1e-6)
    assert all(variance is None for _, variance in parts.values())


def test_a_long_last_stage_is_imbalance_not_bubble():
    long = [B, B, B, 2.0 * B]
    parts, numbers = parts_of(pipeline(backward_s=long))
    step = numbers["step_time"]["mean"]
    most, mean = M * (F + 2.0 * B), M * (F + np.mean(long))
    assert parts["stage_imbalance"][0] == pytest.approx((most - mean) / step, rel=1e-5)
    assert parts["bubble"][0] == pytest.approx(1.0 - most / step, rel=1e-5)


def laid_out(**parallelism):
    """A small transformer on as many GPUs of one node as its layout takes."""
    p = {"microbatches": 4, "data_parallel": "none"} | parallelism
    n = math.prod(p.get(name, 1) for name in ("tp", "cp", "pp", "dp"))
    return load_job({
        "model": {"n_layers": 4, "hidden_size": 1024, "n_heads": 8, "ffn_size": 4096,
                  "seq_len": 1024, "vocab_size": 32000},
        "parallelism": p,
        "cluster": {"nodes": 1, "gpus_per_node": n, "device": "h100"},
        "variability": {"library": "h100-healthy"},
    })  # fmt: skip


LAYOUTS = [
    {}, {"tp": 2}, {"cp": 2}, {"dp": 4, "data_parallel": "ddp"},
    {"dp": 4, "data_parallel": "fsdp"}, {"pp": 2}, {"pp": 2, "dp": 2, "data_parallel": "zero1"},
    {"pp": 4, "schedule": "zb-h1"},
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_optimizer_has_its_row_and_one_stage_no_bubble(layout):
    job, step = laid_out(**layout), prepare(laid_out(**layout), 1)
    parts, numbers = parts_of(job)
    mean = numbers["step_time"]["mean"]
    seconds = {name: share * mean for name, (share, _) in parts.items()}
    assert sum(seconds.values()) == pytest.approx(mean, rel=1e-12)
    optimizer = max(op.duration for op in step.workload.optimizer)
    assert seconds["optimizer"] == pytest.approx(optimizer, rel=1e-9) and optimizer > 0.01 * mean
    kernels = [
        [k for c in row for k in (*c.forward, *c.backward) if is_compute(k.kernel_class)]
        for row in step.workload.chunks
    ]
    work = np.array([sum(k.duration for k in row) for row in kernels])
    work *= job.parallelism.microbatches
    near = 1e-5 * mean
    assert seconds["compute"] == pytest.approx(work.mean(), abs=near)
    assert seconds["stage_imbalance"] == pytest.approx(work.max() - work.mean(), abs=near)
    whole = run_blocks(ideal_program(silence(step, 1)), range(1), 1)[0][0, 0]
    assert seconds["bubble"] == pytest.approx(whole - optimizer - work.max(), abs=near)
    if job.parallelism.pp == 1:
        assert seconds["bubble"] == 0.0
    else:
        assert seconds["bubble"] > 0.01 * mean


@pytest.mark.parametrize(
    ("schedule", "vpp", "bubble"),
    [("gpipe", 1, (P - 1) * (F + B)), ("1f1b", 1, (P - 1) * (F + B)),
     ("interleaved", 2, (P - 1) * (F + B) / 2), ("zb-h1", 1, (P - 1) * F)],
)  # fmt: skip
def test_the_bubble_is_the_schedules_published_one(schedule, vpp, bubble):
    own = {"schedule": schedule, "vpp": vpp, "microbatches": 2 * P}
    job = load_job({
        "model": {"durations": {"forward_s": F, "backward_s": B}},
        "parallelism": {"pp": P} | own, "variability": QUIET,
    })  # fmt: skip
    parts, numbers = parts_of(job)
    assert parts["bubble"][0] * numbers["step_time"]["mean"] == pytest.approx(bubble, rel=1e-5)
    assert parts["optimizer"][0] == 0.0


def test_every_collective_counts_to_its_group():
    """First and last stage share the embedding; what all ranks share is of the widest group."""
    classes = ["tp_all_reduce", "p2p", "embedding_all_reduce", "world_all_reduce", "attention"]
    found = {group: set(freed) for group, freed in freed_classes(classes).items()}
    assert found == {"pp": set(classes[1:4]), "tp": set(classes[:4])}
    traced = ["layernorm_all_reduce", "transfer", "all_reduce", "dp_reduce_scatter"]
    found = {group: set(freed) for group, freed in freed_classes(traced).items()}
    assert found == {"dp": set(traced[2:]), "pp": set(traced[1:]), "tp": set(traced)}
    assert freed_classes(["broadcast"]) == {"dp": ["broadcast"]}
    parts, _ = parts_of(laid_out(pp=2, tp=2))
    assert "exposed_dp" not in parts and {"exposed_pp", "exposed_tp"} < set(parts)


def test_jitter_is_what_it_adds():
    parts, numbers = parts_of(pipeline({"jitter": {"mean_s": 3.0, "cv": 0.5}}), 6400)
    step = numbers["step_time"]
    assert parts["step_jitter"][0] == pytest.approx(3.0 / step["mean"], rel=0.02)
    # 1,024 replicates stand behind the variance of the step here
    assert parts["step_jitter"][1] == pytest.approx(1.0, abs=0.2)


def test_errors_of_variance_shares_hold_what_other_seeds_find():
    job = pipeline(
        {"rank": {"cv": 0.05}, "residual": {"cv": 0.03}} | {"jitter": {"mean_s": 0.5, "cv": 1}}
    )
    found = [parts_of(job, 1024, seed)[1]["time_loss"][-1] for seed in range(12)]
    shares, errors = (np.array([row[f"variance_share{of}"] for row in found]) for of in ("", "_se"))
    assert found[0]["name"] == "step_jitter"
    assert 0.1 < shares.mean() < 0.9
    assert 0.5 < shares.std(ddof=1) / np.sqrt((errors**2).mean()) < 1.6
    single = parts_of(job, 64)[1]["time_loss"][-1]
    assert single["variance_share_se"] is None


def test_noise_is_the_stragglers_part():
    parts, _ = parts_of(pipeline({"rank": {"cv": 0.05}, "residual": {"cv": 0.03}}), 256)
    assert parts["stragglers"][0] > 0.01
    assert parts["stragglers"][1] == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "dp", "microbatches"),
    [("llama3-70b-fsdp-512", 64, None), ("gpt3-175b-512", 1, 32), ("deepseek-v3-2048", 64, 32)],
)
def test_parts_add_up_and_exposure_is_the_one_of_the_summary(name, dp, microbatches):
    p = load_job(name).parallelism
    nodes = dp * p.tp * p.cp * p.pp // 8
    own = f"parallelism.microbatches={microbatches or p.microbatches}"
    job = load_job(name, [f"parallelism.dp={dp}", f"cluster.nodes={nodes}", own])
    parts, numbers = parts_of(job, 256)
    means, variances = (np.array([part[i] for part in parts.values()]) for i in (0, 1))
    assert means.sum() == pytest.approx(1.0, abs=1e-9)
    assert variances.sum() == pytest.approx(1.0, abs=1e-9)
    assert means.min() > -1e-4
    exposed = sum(share for part, (share, _) in parts.items() if part.startswith("exposed"))
    assert exposed == pytest.approx(numbers["exposed_communication"], abs=1e-6)
    by_group = {f"exposed_{group}" for group in freed_classes(list(numbers["critical_path"]))}
    assert by_group == {part for part in parts if part.startswith("exposed")}


STALLS = ["variability.effects.stall.rate_per_hour=3", "variability.effects.stall.duration_s=2"]


@pytest.mark.parametrize("stalls", [[], STALLS], ids=["quiet", "stalls of ranks"])
def test_transfers_that_take_no_time_are_joins_with_the_same_times(stalls):
    step = prepare(
        load_job("llama3-405b-16k", ["parallelism.dp=2", "cluster.nodes=32", *stalls]), 1
    )
    classes = [c for c in step.program.classes if is_communication(c)]
    plain = treat_classes(step, {c: Treatment(factor=0.0) for c in classes}, 1)
    joined = silence(step, 1)
    kinds = [(program.ops.kind == engine.JOIN).sum() for program in (plain, joined)]
    assert kinds[1] > 2 * kinds[0]
    times = [run_blocks(program, range(2), 1, track=True) for program in (plain, joined)]
    for a, b in zip(*times, strict=True):
        assert a.tobytes() == b.tobytes()
