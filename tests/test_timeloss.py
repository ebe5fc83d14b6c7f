"""Where the time of a step goes: closed forms of pipelines, layouts, and traced steps."""

import math
from itertools import pairwise

import numpy as np
import pytest
from pipeline_synth import Effects, Layout, make_trace, run, write_tidy

import prism
from prism import load_job

P, M, F, B = 4, 6, 1.0, 2.0
QUIET = {"library": None}


def parts_of(job, replicates=64, seed=1):
    """Parts of a step as name: (share of the mean, share of the variance); all figures."""
    found = prism.summary(prism.simulate(job, replicates=replicates, seed=seed))
    parts = {p["name"]: (p["mean_share"], p["variance_share"]) for p in found["time_loss"]}
    return parts, found


def seconds_of(job, **options):
    parts, found = parts_of(job, **options)
    return {name: share * found["step_time"]["mean"] for name, (share, _) in parts.items()}, found


def pipeline(effects=None, layout=None, **durations):
    return load_job({
        "model": {"durations": {"forward_s": F, "backward_s": B} | durations},
        "parallelism": {"pp": P, "microbatches": M, "schedule": "1f1b"} | (layout or {}),
        "variability": QUIET | ({"effects": effects} if effects else {}),
    })  # fmt: skip


# ----------------------------------------------------------------------------- closed forms
@pytest.mark.parametrize(
    ("schedule", "vpp", "bubble"),
    [("gpipe", 1, (P - 1) * (F + B)), ("1f1b", 1, (P - 1) * (F + B)),
     ("interleaved", 2, (P - 1) * (F + B) / 2), ("zb-h1", 1, (P - 1) * F)],
)  # fmt: skip
def test_the_bubble_is_the_schedules_published_one(schedule, vpp, bubble):
    own = {"schedule": schedule, "vpp": vpp, "microbatches": 2 * P}
    seconds, found = seconds_of(pipeline(layout=own))
    work = 2 * P * (F + B)
    assert found["step_time"]["mean"] == pytest.approx(work + bubble, rel=1e-6)
    assert seconds.pop("bubble") == pytest.approx(bubble, rel=1e-5)
    assert seconds.pop("compute") == pytest.approx(work, rel=1e-5)
    assert list(seconds.values()) == pytest.approx([0.0] * len(seconds), abs=1e-4)
    assert all(row["variance_share"] is None for row in found["time_loss"])


def test_a_long_last_stage_is_imbalance_not_bubble():
    long = [B, B, B, 2.0 * B]
    seconds, found = seconds_of(pipeline(backward_s=long))
    most, mean = M * (F + 2.0 * B), M * (F + np.mean(long))
    assert seconds["compute"] == pytest.approx(mean, rel=1e-5)
    assert seconds["stage_imbalance"] == pytest.approx(most - mean, rel=1e-5)
    assert seconds["bubble"] == pytest.approx(found["step_time"]["mean"] - most, rel=1e-5)


def test_jitter_is_what_it_adds():
    parts, found = parts_of(pipeline({"jitter": {"mean_s": 3.0, "cv": 0.5}}), 6400)
    assert parts["step_jitter"][0] == pytest.approx(3.0 / found["step_time"]["mean"], rel=0.02)
    # 1,024 replicates stand behind the variance of the step here
    assert parts["step_jitter"][1] == pytest.approx(1.0, abs=0.2)


def test_noise_is_the_stragglers_part():
    job = pipeline({"rank": {"cv": 0.05}, "residual": {"cv": 0.03}})
    parts, found = parts_of(job, 256)
    step, ideal = found["step_time"]["mean"], found["ideal_step_time"]
    assert ideal == pytest.approx((M + P - 1) * (F + B), rel=1e-6) and step > 1.01 * ideal
    assert parts["stragglers"][0] == pytest.approx(1.0 - ideal / step, rel=1e-3)
    assert parts["stragglers"][1] == pytest.approx(1.0, abs=1e-9)


def test_errors_of_variance_shares_hold_what_other_seeds_find():
    noise = {"rank": {"cv": 0.05}, "residual": {"cv": 0.03}, "jitter": {"mean_s": 0.5, "cv": 1}}
    job = pipeline(noise)
    found = [parts_of(job, 1024, seed)[1]["time_loss"][-1] for seed in range(12)]
    shares, errors = (np.array([row[f"variance_share{of}"] for row in found]) for of in ("", "_se"))
    assert found[0]["name"] == "step_jitter"
    assert 0.1 < shares.mean() < 0.9
    assert 0.5 < shares.std(ddof=1) / np.sqrt((errors**2).mean()) < 1.6
    assert parts_of(job, 64)[1]["time_loss"][-1]["variance_share_se"] is None


# ---------------------------------------------------------------------------------- layouts
def laid_out(library=None, **parallelism):
    """A small transformer on as many GPUs of one node as its layout takes."""
    p = {"microbatches": 4, "data_parallel": "none"} | parallelism
    n = math.prod(p.get(name, 1) for name in ("tp", "cp", "pp", "dp"))
    return load_job({
        "model": {"n_layers": 4, "hidden_size": 1024, "n_heads": 8, "ffn_size": 4096,
                  "seq_len": 1024, "vocab_size": 32000},
        "parallelism": p, "cluster": {"nodes": 1, "gpus_per_node": n, "device": "h100"},
        "variability": {"library": library, "host_scale": 1e-9},
    })  # fmt: skip


LAYOUTS = [
    {}, {"tp": 2}, {"cp": 2}, {"dp": 4, "data_parallel": "ddp"},
    {"dp": 4, "data_parallel": "fsdp"}, {"pp": 2}, {"pp": 2, "dp": 2, "data_parallel": "zero1"},
    {"pp": 4, "schedule": "zb-h1"}, {"pp": 2, "tp": 2}, {"tp": 2, "dp": 2, "data_parallel": "ddp"},
]  # fmt: skip
GROUPS = ("tp", "cp", "pp", "dp")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_parts_of_a_quiet_step(layout):
    seconds, found = seconds_of(laid_out(**layout))
    mean, path = found["step_time"]["mean"], found["critical_path"]
    near = 1e-5 * mean
    assert sum(seconds.values()) == pytest.approx(mean, rel=1e-9)
    assert min(seconds.values()) > -near
    assert seconds["optimizer"] == pytest.approx(path["optimizer"], rel=1e-5)
    assert seconds["optimizer"] > 0.01 * mean
    exposed = {name: x for name, x in seconds.items() if name.startswith("exposed_")}
    whole = found["exposed_communication"] * mean
    assert sum(exposed.values()) == pytest.approx(whole, abs=near)
    sizes = {g: layout.get(g, 1) for g in GROUPS}
    sizes["dp"] *= sizes["cp"]  # which hold the same parameters
    assert set(exposed) == {f"exposed_{g}" for g in GROUPS if sizes[g] > 1}
    assert all(x > 0.0 for x in exposed.values())
    for name, group in (("tp", "tp"), ("p2p", "pp")):  # on the path it is exposed, if alone
        if group in layout and len(exposed) == 1:
            on_path = sum(x for kind, x in path.items() if kind.startswith((name, "world")))
            assert seconds[f"exposed_{group}"] == pytest.approx(on_path, rel=1e-3)
    idle = seconds["bubble"] + seconds["stage_imbalance"]
    if layout.get("pp", 1) == 1:
        assert idle == pytest.approx(0.0, abs=near) and seconds["bubble"] == 0.0
    else:
        assert seconds["bubble"] > 0.01 * mean
    if layout in ({}, {"tp": 2}):  # nothing beside, so all compute is on the path
        computes = [x for kind, x in path.items()
                    if not kind.startswith(("tp", "world", "optimizer"))]  # fmt: skip
        work = seconds["compute"] + seconds["launch_gaps"]
        assert work == pytest.approx(sum(computes), rel=1e-5)
        assert seconds["launch_gaps"] == pytest.approx(path["launch_gaps"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "dp", "microbatches"),
    [("llama3-70b-fsdp-512", 64, None), ("gpt3-175b-512", 1, 32), ("deepseek-v3-2048", 64, 32)],
)
def test_parts_add_up_and_exposure_is_the_one_of_the_summary(name, dp, microbatches):
    p = load_job(name).parallelism
    nodes = dp * p.tp * p.cp * p.pp // 8
    own = f"parallelism.microbatches={microbatches or p.microbatches}"
    job = load_job(name, [f"parallelism.dp={dp}", f"cluster.nodes={nodes}", own])
    parts, found = parts_of(job, 256)
    means, variances = (np.array([part[i] for part in parts.values()]) for i in (0, 1))
    assert means.sum() == pytest.approx(1.0, abs=1e-9)
    assert variances.sum() == pytest.approx(1.0, abs=1e-9)
    assert means.min() > -1e-4
    exposed = [share for part, (share, _) in parts.items() if part.startswith("exposed")]
    assert sum(exposed) == pytest.approx(found["exposed_communication"], abs=1e-6)
    assert len(exposed) > 0


# ------------------------------------------------------------------------------ traced steps
FREED = (
    ("exposed_dp", ("grads-reduce-scatter", "params-all-gather", "optimizer-clip-main-grad")),
    ("exposed_pp", ("transfer", "embedding-grads-all-reduce")),
    ("exposed_tp", ("layernorm-grads-all-reduce",)),
)


@pytest.mark.parametrize("p2p", ["blocking", "async"])
@pytest.mark.parametrize(("stages", "gap_s"), [(4, 0.0), (3, 0.004), (1, 0.01)])
def test_the_parts_of_a_traced_step_are_those_of_the_job(tmp_path, stages, gap_s, p2p):
    """One group's communication after the other takes no time in the event loop, too."""
    layout = Layout(3, stages, 6, 3, p2p=p2p)
    effects = Effects(
        residual_sd=0.0, other_sd=0.0, stage=(1.0, 1.5, 1.2)[:stages], transfer_s=0.02,
        collective_s=0.3, optimizer_s=0.4, gap_s=0.0, lemons={(1, 0): 1.4},
    )  # fmt: skip
    _, truth = make_trace(layout, effects, 1)
    durations = dict(truth.durations)
    for key in durations:  # of every worker the same gaps in every step
        if key[0] == "gap" and key[3] > 0:
            durations[key] = np.full(3, gap_s)
    frame, times = run(layout, effects, durations)
    prism.save(prism.fit(write_tidy(frame, tmp_path / "ops.csv"), 1), tmp_path / "model.nc")
    seconds, found = seconds_of(load_job(tmp_path / "model.nc"))
    assert found["step_time"]["mean"] == pytest.approx(times[0], rel=1e-6)
    assert sum(seconds.values()) == pytest.approx(times[0], rel=1e-6)
    assert sum(found["critical_path"].values()) == pytest.approx(times[0], rel=1e-5)
    assert found["critical_path"]["optimizer"] == pytest.approx(0.4, rel=1e-5)
    steps = [times[0]]
    for _, names in FREED:
        durations |= {k: 0.0 * v for k, v in durations.items() if k[0] in names}
        steps.append(run(layout, effects, durations)[1][0])
    for (name, _), (before, after) in zip(FREED, pairwise(steps), strict=True):
        if name != "exposed_pp" or stages > 1:
            assert seconds[name] == pytest.approx(before - after, abs=1e-5), name
    assert found["exposed_communication"] == pytest.approx(1.0 - steps[-1] / times[0], rel=1e-5)
    durations |= {k: v / (1.4 if k[1:3] == (1, 0) else 1.0) for k, v in durations.items()
                  if k[0] in ("forward", "backward")}  # fmt: skip
    quiet = run(layout, effects, durations)[1][0]
    assert seconds["stragglers"] == pytest.approx(steps[-1] - quiet, abs=1e-5)
    work = 6 * 0.6 * np.array([1.0, 1.5, 1.2, 1.0])[:stages]
    assert seconds["compute"] == pytest.approx(work.mean(), abs=1e-5)
    assert seconds["optimizer"] == pytest.approx(0.4, abs=1e-5)
    rest = quiet - 0.4 - work.mean()
    idle = [seconds[name] for name in ("stage_imbalance", "bubble", "launch_gaps")]
    assert sum(idle) == pytest.approx(rest, abs=1e-5)
    assert seconds["stage_imbalance"] == pytest.approx(work.max() - work.mean(), abs=1e-5)
    if stages == 1:
        assert seconds["launch_gaps"] == pytest.approx(rest, abs=1e-5) and rest > 0.1
    if gap_s == 0.0:
        assert seconds["launch_gaps"] == pytest.approx(0.0, abs=1e-5) and seconds["bubble"] > 1.0
