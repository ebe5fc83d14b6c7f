"""Hardware variants (`cluster.scale`), power limits and heat: means, spreads and energy."""

import functools
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import yaml
from drawn_steps import draw_steps
from hypothesis import given, settings
from hypothesis import strategies as st

import prism

PARTS = ("compute", "memory", "nvlink", "network")
OFF = {"rank": {"cv": 0.0, "lemon_fraction": 0.0}, "step": {"cv": 0.0}, "microbatch": {"cv": 0.0},
       "call": {"cv": 0.0}, "residual": {"cv": 0.0}, "regime": {"probability": 0.0},
       "stall": {"rate_per_hour": 0.0}}  # fmt: skip
ONE_GPU = {"tp": 1, "pp": 1, "dp": 1, "data_parallel": "none", "microbatches": 1}
NODES = {"nodes": 4}
WAIT = 126.0  # W: what an idle H100 draws


@functools.cache
def _job(text):
    return prism.load_job(json.loads(text))


def made(scale=None, effects=None, cluster=None, parallelism=None, variability=None):
    """A small transformer over four nodes with every kind of kernel and message."""
    layout = {"tp": 4, "pp": 2, "dp": 4, "microbatches": 4, "data_parallel": "zero1"}
    nodes = NODES if cluster is None else cluster
    return _job(json.dumps({
        "model": {"n_layers": 4, "hidden_size": 2048, "ffn_size": 8192, "n_heads": 16,
                  "vocab_size": 32000, "seq_len": 2048},
        "parallelism": layout | (parallelism or {}),
        "cluster": nodes | ({} if scale is None else {"scale": scale}),
        "variability": {"library": "h100-healthy", "host_scale": 1e-9,
                        "effects": OFF | (effects or {})}
        | (variability or {}),
    }))  # fmt: skip


def lasting(cluster=None, effects=None, **layout):
    """Stages that take 1 s forward and 2 s backward."""
    return _job(json.dumps({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}}, "parallelism": layout,
        "cluster": cluster or {}, "variability": {"library": "none", "effects": effects or {}},
    }))  # fmt: skip


@functools.cache
def figures(job):
    return prism.summary(prism.simulate(job, replicates=64, seed=1))


def ideal(job):
    return figures(job)["ideal_step_time"]


def steps(job, n=640):
    return draw_steps(job, n, 3).step_time.to_numpy().astype(float)


def spread(job, n=4096):
    x = steps(job, n)
    return x.std() / x.mean()


# ------------------------------------------------------------------------------------------ means
@pytest.mark.parametrize("resolution", ["op", "kernel"])
def test_a_machine_with_all_parts_alike_scales_the_step(resolution):
    more = {"variability": {"resolution": resolution}}
    plain, every = ideal(made(**more)), {part: {"time": 0.5} for part in PARTS}
    assert ideal(made(every, **more)) == pytest.approx(0.5 * plain, rel=1e-6)
    assert steps(made(every, **more), 64) == pytest.approx(0.5 * plain, rel=1e-6)
    # negative control: each part alone brings less, and something
    alone = [plain - ideal(made({part: {"time": 0.5}}, **more)) for part in PARTS]
    assert all(0.0 < saved < 0.5 * plain for saved in alone)
    assert sum(alone) < 0.5 * plain * 1.05  # nothing waits longer for the other's half than both


@pytest.mark.parametrize(
    ("part", "own", "other"),
    [
        ("compute", "attention", "memory"), ("memory", "memory", "attention"),
        ("nvlink", "tp_all_gather", "p2p"), ("network", "p2p", "tp_all_gather"),
    ],
)  # fmt: skip
def test_a_part_scales_its_own_durations_alone(part, own, other):
    def found(scale):
        # blocking: transfers are as many on the path whatever they take
        path = figures(made(scale, parallelism={"p2p": "blocking"}))["critical_path"]
        return np.array([path[own], path[other]])

    ratio = found({part: {"time": 3.0}}) / found(None)
    assert ratio == pytest.approx([3.0, 1.0], rel=1e-3)


def test_memory_does_not_follow_and_a_sweep_varies_each_part():
    every = {part: {"time": 0.5, "cv": 2.0} for part in PARTS}
    assert figures(made(every))["memory"] == figures(made())["memory"]
    vary = {"cluster.scale.compute.time": [1, 0.5], "cluster.scale.compute.cv": [1, 3]}
    effects = {"rank": {"cv": 0.02}, "residual": {}}
    rows = prism.summary(prism.sweep(made(None, effects), vary, replicates=512, seed=1))["rows"]
    row = {(r["cluster.scale.compute.time"], r["cluster.scale.compute.cv"]): r for r in rows}
    assert row[0.5, 1]["ideal_step_time"] < 0.85 * row[1, 1]["ideal_step_time"]
    assert row[1, 3]["ideal_step_time"] == row[1, 1]["ideal_step_time"]
    assert row[1, 3]["step_time"]["cv"] > 2.0 * row[1, 1]["step_time"]["cv"]


# ---------------------------------------------------------------------------------------- spreads
@pytest.mark.parametrize(
    ("part", "effects", "layout", "nodes"),
    [
        ("compute", {"rank": {"cv": 0.01, "memory_loading": 0.0}}, ONE_GPU, {"nodes": 1}),
        ("compute", {"residual": {}}, ONE_GPU, {"nodes": 1}),
        ("memory", {"residual": {}}, ONE_GPU, {"nodes": 1}),
        ("nvlink", {"residual": {}}, {"tp": 4, "pp": 1, "dp": 1}, {"nodes": 1}),
        # one domain has all GPUs, so that transfers between stages are NVLink's
        ("nvlink", {"residual": {}}, {"tp": 1, "pp": 2, "dp": 1}, {"nodes": 1}),
        ("network", {"residual": {}}, {"tp": 8, "pp": 2, "dp": 1}, {"nodes": 2}),
        ("network", {"residual": {}}, ONE_GPU | {"dp": 16, "data_parallel": "ddp"}, {"nodes": 2}),
        (
            "network", {"regime": {"probability": 0.2, "factor": 2.0}},
            ONE_GPU | {"dp": 16, "data_parallel": "zero1", "overlap": False}, {"nodes": 2},
        ),
    ],
)  # fmt: skip
def test_the_step_spreads_by_the_factor_of_its_only_part(part, effects, layout, nodes):
    still = {other: {"cv": 0.0} for other in PARTS if other != part}
    nodes = nodes | ({"gpus_per_node": 1} if layout == ONE_GPU else {})
    if nodes["nodes"] == 1 and layout != ONE_GPU:
        nodes = nodes | {"gpus_per_node": layout["tp"] * layout["pp"]}

    def at(cv):
        return steps(made(still | {part: {"cv": cv}}, effects, nodes, layout), 4096)

    one, two = at(1.0), at(2.0)
    assert one.std() > 1e-5 * one.mean()
    assert two.std() / one.std() == pytest.approx(2.0, rel=0.06)
    assert two.mean() == pytest.approx(one.mean(), abs=5.0 * two.std() / 8.0)
    assert at(0.0).std() < 1e-6 * one.mean()


def test_memory_bound_kernels_follow_gpus_by_their_own_factor():
    rank = {"rank": {"cv": 0.01, "memory_loading": 0.5, "lemon_fraction": 0.0}}

    def at(compute, memory):
        scale = {"compute": {"cv": compute}, "memory": {"cv": memory}}
        return spread(made(scale, rank, {"nodes": 1, "gpus_per_node": 1}, ONE_GPU), 64 * 400)

    one = at(1, 1)
    of_compute, of_memory = at(2, 1) - one, at(1, 2) - one
    assert of_compute > 2 * of_memory > 0.0
    assert of_compute + of_memory == pytest.approx(one, rel=0.01)
    assert at(2, 2) == pytest.approx(2 * one, rel=0.01)
    assert at(0, 1) == pytest.approx(0.0, abs=1e-7)  # nothing is left to follow


def test_what_a_part_does_not_own_keeps_its_spread():
    effects = {"step": {"cv": 0.01}, "microbatch": {"cv": 0.01}, "call": {"cv": 0.01}}
    every = {part: {"cv": 5.0} for part in PARTS}
    np.testing.assert_array_equal(steps(made(None, effects)), steps(made(every, effects)))
    same = {part: {"time": 1.0, "cv": 1.0} for part in PARTS}
    some = {"rank": {"cv": 0.02}, "residual": {}, "regime": {"probability": 0.1, "factor": 2.0}}
    np.testing.assert_array_equal(steps(made(None, some)), steps(made(same, some)))
    # nor do known slow nodes follow
    slow = NODES | {"node_slowdowns": {0: 1.3}}
    still = {"rank": {"cv": 0.0, "memory_loading": 0.5, "lemon_fraction": 0.0}}
    scale = {"compute": {"cv": 3.0}, "memory": {"cv": 2.0}}
    plain, other = (steps(made(x, still, slow), 64) for x in (None, scale))
    np.testing.assert_array_equal(plain, other)
    assert plain.mean() > 1.02 * ideal(made())


def test_lemons_and_the_limit_of_slow_gpus_move_with_compute():
    """A lemon 10 to 20 % slower becomes one that is 20 to 40 % slower."""
    lemons = {"rank": {"cv": 1e-3, "lemon_fraction": 0.2, "lemon_slowdown": [1.1, 1.2]}}
    x = steps(lasting({"nodes": 1, "gpus_per_node": 1, "scale": {"compute": {"cv": 2.0}}}, lemons),
              64 * 500)[::64] / 3.0  # fmt: skip
    assert x.max() == pytest.approx(1.4 / (1.0 + 0.2 * 0.3), rel=0.01)
    assert np.median(x) == pytest.approx(1.0 / 1.06, rel=0.01)


def test_what_has_no_such_part_says_so(tmp_path):
    halved = lasting({"scale": {"compute": {"time": 0.5}}}, pp=2, microbatches=4)
    assert ideal(halved) == pytest.approx(0.5 * ideal(lasting(pp=2, microbatches=4)))
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"pp": 2, "microbatches": 4},
        "cluster": {"scale": {"network": {"time": 0.5}}}, "variability": {"library": "none"},
    }))  # fmt: skip
    with pytest.raises(prism.PrismError, match=r"job\.yaml:\d+: cluster\.scale\.network"):
        prism.load_job(path)
    for scale, key in (
        ({"compute": {"time": 0.0}}, "compute.time"), ({"compute": {"cv": -1.0}}, "compute.cv"),
        ({"nvlnik": {"time": 1.0}}, "nvlink"),
    ):  # fmt: skip
        with pytest.raises(prism.PrismError, match=key):
            made(scale)


# ------------------------------------------------------------------------------------- power limits
CURVES = {"a100": (400, 0.092, 2.78, 0.879), "h100": (700, 0.092, 2.64, 0.673)}
"""TDP [W], its share that does not follow the clock, exponent, knee (experiments/library)."""


def speed(device, watts):
    """Speed of compute under a limit: dynamic power is a power of it, below a knee linear in it."""
    tdp, floor, exponent, knee = CURVES[device]
    dynamic = (watts / tdp - floor) / (1.0 - floor)
    if dynamic >= knee**exponent:
        return dynamic ** (1.0 / exponent)
    return dynamic * knee ** (1.0 - exponent)


@settings(max_examples=20)
@given(device=st.sampled_from(sorted(CURVES)), share=st.floats(0.26, 1.0))
def test_a_limit_slows_compute_by_the_device_s_curve(device, share):
    watts = share * CURVES[device][0]
    found = ideal(lasting({"power_limit_w": watts, "device": device}))
    assert found == pytest.approx(3.0 / speed(device, watts), rel=1e-5)


def test_the_curves_are_what_published_points_give():
    script = runpy.run_path(str(Path(__file__).parents[1] / "experiments" / "library" / "power.py"))
    found = script["fits"]()
    floor, exponent, knee = CURVES["a100"][1:]
    assert [found[k][0] for k in ("floor", "exponent", "knee")] == pytest.approx(
        [floor, exponent, knee], abs=0.006
    )
    middle, low, high = found["hopper_exponent"]
    assert CURVES["h100"][2] == pytest.approx(middle, abs=0.006) and low < exponent < high
    assert CURVES["h100"][3] == pytest.approx(found["hopper_knee"][0], abs=0.001)
    assert script["left_out"]() < 0.06  # H100, each point from the others


@pytest.mark.parametrize("clock", [700.0, 1365.0, 1500.0])
def test_compute_follows_a_locked_clock(clock):
    job = made(cluster=NODES | {"clock_mhz": clock})
    plain, locked = (figures(j)["critical_path"] for j in (made(), job))
    # this step waits, so that without a lock power leaves it 1.14 times the speed of products back
    # to back, to which their tables belong; attention's belong to 1.10, and to 1,770 MHz if locked
    own = 1770 / clock * (1.14 / 1.10) ** (1 / 0.95)
    assert locked["attention"] == pytest.approx(own * plain["attention"], rel=1e-3)
    gemm = (clock / 1365) ** -0.95
    assert locked["gemm_mlp"] == pytest.approx(1.14 * gemm * plain["gemm_mlp"], rel=0.05)
    assert locked["memory"] == pytest.approx(plain["memory"], rel=1e-6)
    given = lasting({"clock_mhz": clock})
    assert ideal(given) == pytest.approx(3.0 * max(gemm, 1.0), rel=1e-5)


def test_a_locked_clock_gives_way_to_the_limit():
    limits = ({"power_limit_w": 400}, {"power_limit_w": 400, "clock_mhz": 1980.0})
    free, locked = (ideal(made(cluster=NODES | c)) for c in limits)
    assert locked == pytest.approx(free, rel=1e-6)
    assert locked > ideal(made(cluster=NODES | {"clock_mhz": 1980.0}))


def test_two_steps_of_an_h100_have_the_speed_that_their_mix_gives():
    """Eager steps' products are 5.2 % faster than compiled ones', of denser work."""
    script = runpy.run_path(str(Path(__file__).parents[1] / "experiments" / "library" / "power.py"))
    found = script["two_steps"]()
    eager, compiled = (found[name] for name in ("eager", "compiled"))
    assert eager["predicted"] / compiled["predicted"] == pytest.approx(751 / 714, abs=0.01)
    for each in (eager, compiled):
        low, high = sorted(x for name, x in each.items() if name.startswith("measured"))
        assert low - 0.01 < each["predicted"] < high + 0.01


@pytest.mark.parametrize(("watts", "factor"), [(600, 1.0), (200, 2.64)])
def test_gpus_differ_more_where_the_limit_is_below_the_knee(watts, factor):
    rank = {"rank": {"cv": 0.01}}
    plain, capped = (spread(lasting(c, rank), 6400) for c in ({}, {"power_limit_w": watts}))
    assert capped / plain == pytest.approx(factor, rel=0.01)


@pytest.mark.parametrize(("share", "nodes"), [(0.25, [2]), (0.5, [1, 3]), (0.0, [])])
def test_throttled_nodes_are_slow_nodes(share, nodes):
    """Of the limit on all; memory-bound work is as fast as ever."""
    limit = {"power_limit_w": 600}
    hot = {"throttled_share": share, "throttled_power_w": 300} if share else {}
    slow = {"compute": speed("h100", 600) / speed("h100", 300), "memory": 1.0}
    still = {"rank": {"cv": 0.0, "lemon_fraction": 0.0, "memory_loading": 0.7}}
    found, stated = (
        steps(made(None, still, NODES | limit | more), 64)
        for more in (hot, {"node_slowdowns": dict.fromkeys(nodes, slow)})
    )
    assert found == pytest.approx(stated, rel=1e-6)
    if share == 0.5:  # what is known of a node counts
        known = {"node_slowdowns": {1: 2.0, 3: 2.0}}
        both, alone = (
            steps(made(None, still, NODES | limit | more), 64) for more in (hot | known, known)
        )
        assert np.array_equal(both, alone)


@pytest.mark.parametrize(
    ("cluster", "key"),
    [
        ({"throttled_share": 0.5}, "throttled_share"),
        ({"throttled_share": 0.1, "throttled_power_w": 300}, "throttled_share"),
        ({"throttled_power_w": 600, "power_limit_w": 500}, "throttled_power_w"),
        ({"power_limit_w": 701}, "power_limit_w"), ({"power_limit_w": 174}, "power_limit_w"),
        ({"clock_mhz": 2500}, "clock_mhz"), ({"clock_mhz": 1.98}, "clock_mhz"),
    ],
)  # fmt: skip
def test_limits_and_heat_that_no_gpu_takes_are_refused(cluster, key):
    with pytest.raises(prism.PrismError, match=key):
        steps(made(cluster=NODES | cluster), 64)


# ---------------------------------------------------------------------------------- the energy
def run_of(job, n=100):
    return prism.summary(prism.estimate(job, replicates=64, steps=n, run_replicates=64, seed=1))


@pytest.mark.parametrize(("pp", "busy"), [(1, 1.0), (2, 0.5), (4, 0.25)])
@pytest.mark.parametrize("watts", [350, 700])
def test_gpus_draw_their_limit_at_work_and_less_while_they_wait(pp, busy, watts):
    job = lasting({"power_limit_w": watts, "nodes": 1, "gpus_per_node": pp}, pp=pp, microbatches=1)
    found = run_of(job)
    expected = busy * watts + (1.0 - busy) * WAIT
    assert found["energy"]["gpu_power_w"] == pytest.approx(expected, rel=0.01)
    joules = found["energy"]["gpu_power_w"] * pp * found["time_to_train"]["mean"]
    assert found["energy"]["gpu_mwh_mean"] == pytest.approx(joules / 3.6e9)


def test_gpus_draw_what_was_measured_in_training():
    """MLPerf's Llama 2 70B LoRA on 2 and 16 nodes of 4 H100 (arXiv:2604.07345): 548 W per GPU over
    41 runs, and 2,632 and 2,402 W per node with its CPUs. Here all weights learn."""
    few, many = (
        run_of({
            "model": {"name": "llama2-70b", "seq_len": 8192},
            "parallelism": {"tp": 4, "dp": n, "data_parallel": "zero1", "microbatches": 4,
                            "precision": "fp8"},
            "cluster": {"nodes": n, "gpus_per_node": 4, "device": "h100"},
        })["energy"]["gpu_power_w"]
        for n in (2, 16)
    )  # fmt: skip
    assert (few + many) / 2.0 == pytest.approx(548.0, rel=0.1)
    assert 4.0 * (few - many) == pytest.approx(2632.0 - 2402.0, rel=0.2)


def test_throttled_nodes_draw_less_for_longer():
    hot = {"power_limit_w": 700, "throttled_share": 0.5, "throttled_power_w": 350,
           "nodes": 2, "gpus_per_node": 1}  # fmt: skip
    found = run_of(lasting(hot, dp=2))["energy"]["gpu_power_w"]
    # the fast half works for its share of the step, and waits for the other
    fast = speed("h100", 350)
    expected = 0.5 * 350 + 0.5 * (fast * 700 + (1.0 - fast) * WAIT)
    assert found == pytest.approx(expected, rel=0.01)


def test_throttled_nodes_that_wait_draw_less_than_heat_leaves_them():
    hot = {"power_limit_w": 700, "throttled_share": 1.0, "throttled_power_w": 350,
           "nodes": 1, "gpus_per_node": 2}  # fmt: skip
    found = run_of(lasting(hot, pp=2, microbatches=1))["energy"]["gpu_power_w"]
    assert found == pytest.approx(0.5 * 350 + 0.5 * WAIT, rel=0.01)


def test_a_sweep_says_what_a_limit_costs_and_saves():
    limits = [350, 500, 700]
    found = prism.sweep(made(), {"cluster.power_limit_w": limits}, replicates=128, seed=2)
    rows = sorted(prism.summary(found)["rows"], key=lambda row: row["cluster.power_limit_w"])
    assert [row["cluster.power_limit_w"] for row in rows] == limits
    assert [r["p50"] for r in rows] == sorted((r["p50"] for r in rows), reverse=True)
    assert [r["gpu_kwh"] for r in rows] == sorted(r["gpu_kwh"] for r in rows)
    for row in rows:
        assert row["gpu_power_w"] <= row["cluster.power_limit_w"]
        assert row["gpu_kwh"] == pytest.approx(row["gpu_power_w"] * 32 * row["mean"] / 3.6e6)
