"""Power limits and heat: what they cost in time, in spread, and what energy they save."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import prism
from prism import NodeSlowdown, PrismError, estimate, load_library, sweep
from prism.cluster.nodemap import Placement
from prism.cluster.power import (
    AMPERE,
    CURVES,
    HOPPER,
    LEAST_SHARE,
    PowerCurve,
    gpu_power,
    throttled_nodes,
)
from prism.jobs.job import job_from_dict
from prism.simulation.variability import resolve_variability
from prism.workload.build import build_workload
from prism.workload.energy import mean_power
from prism.workload.kernels import COMPUTE_CLASSES, MEMORY_CLASSES

SHARES = st.floats(LEAST_SHARE, 1.0)
SCRIPT = Path(__file__).parents[1] / "experiments" / "library" / "power.py"


def made(device="h100", **cluster):
    """Four nodes, two stages of a transformer."""
    values = {
        "model": {"n_layers": 4, "hidden_size": 4096, "ffn_size": 16384, "n_heads": 32,
                  "vocab_size": 32000, "seq_len": 2048},
        "parallelism": {"tp": 4, "pp": 2, "dp": 4, "microbatches": 4, "data_parallel": "zero1"},
        "cluster": {"nodes": 4, "device": device, **cluster},
    }  # fmt: skip
    return job_from_dict(values, "made")


def kernel_times(job, classes):
    work = build_workload(job, load_library("h100-healthy"))
    kernels = [k for row in work.chunks for c in row for k in (*c.forward, *c.backward)]
    return np.array([k.duration for k in kernels if k.kernel_class in classes])


# --------------------------------------------------------------------------------- the curve
def test_closed_forms():
    curve = PowerCurve(floor=0.1, exponent=3.0, knee=0.5)
    assert curve.speed(1.0) == 1.0
    assert curve.speed(0.1 + 0.9 * 0.512) == pytest.approx(0.8)  # dynamic power is speed cubed
    assert curve.speed(0.1 + 0.9 * 0.125 / 2) == pytest.approx(0.25)  # half of that at the knee
    assert curve.spread(0.8) == pytest.approx(1.0)
    assert curve.spread(0.15) == pytest.approx(3.0)  # the exponent, far below the knee


@pytest.mark.parametrize("curve", [AMPERE, HOPPER])
@given(SHARES, SHARES)
def test_less_power_is_slower_and_spreads_more(curve, a, b):
    low, high = sorted((a, b))
    assert curve.speed(low) <= curve.speed(high) <= 1.0
    assert curve.spread(low) >= curve.spread(high) * (1.0 - 1e-9) >= 1.0 - 1e-8
    # never slower than if all power were dynamic and its voltage fixed
    assert curve.speed(low) >= (low - curve.floor) / (1.0 - curve.floor) - 1e-12
    # without jumps: 1 % more power is never much more speed
    assert curve.speed(min(1.0, 1.01 * low)) <= 1.03 * curve.speed(low)


def test_the_curves_are_what_published_points_give():
    script = runpy.run_path(str(SCRIPT))
    found = script["fits"]()
    assert [found[k][0] for k in ("floor", "exponent", "knee")] == pytest.approx(
        [AMPERE.floor, AMPERE.exponent, AMPERE.knee], abs=0.006
    )
    exponent, low, high = found["hopper_exponent"]
    assert HOPPER.exponent == pytest.approx(exponent, abs=0.006)
    assert low < AMPERE.exponent < high
    assert HOPPER.knee == pytest.approx(found["hopper_knee"][0], abs=0.001)
    points = script["points"]()
    rms = {
        name: float(np.sqrt(np.mean(script["errors"](rows, CURVES.get(name[1], AMPERE)) ** 2)))
        for name, rows in points.groupby(["use", "device"])
    }
    assert rms["fit", "a100"] < 0.01
    assert rms["test", "a100"] < 0.05  # another model's stages
    assert rms["test", "v100-pcie"] < 0.05  # another device
    assert script["left_out"]() < 0.06  # H100, each point from the others
    memory = points[points.use == "memory"]
    assert memory.ratio.max() < 1.03 and memory.share.min() == 0.5


# ------------------------------------------------------------------------------------- the job
def test_a_limit_slows_compute_and_nothing_else():
    plain, capped = made(), made(power_limit_w=500)
    slowdown = 1.0 / HOPPER.speed(500 / 700)
    assert gpu_power(capped).slowdown == slowdown == pytest.approx(1.154, abs=0.002)
    ratio = kernel_times(capped, COMPUTE_CLASSES) / kernel_times(plain, COMPUTE_CLASSES)
    assert ratio.max() == pytest.approx(slowdown)
    assert np.median(ratio) == pytest.approx(slowdown)  # but for products that wait for memory
    assert np.array_equal(kernel_times(capped, MEMORY_CLASSES), kernel_times(plain, MEMORY_CLASSES))
    assert gpu_power(made(power_limit_w=700)) == gpu_power(plain)


def test_a_memory_bound_job_is_hardly_slowed():
    narrow = {
        "model": {"n_layers": 2, "hidden_size": 256, "ffn_size": 1024, "n_heads": 4,
                  "vocab_size": 8000, "seq_len": 512},
        "parallelism": {"dp": 8, "data_parallel": "zero1"},
        "cluster": {"nodes": 1, "scale": {"compute": {"time": 0.01}}},
    }  # fmt: skip
    times = []
    for limit in (700, 350):
        job = job_from_dict(narrow | {"cluster": narrow["cluster"] | {"power_limit_w": limit}}, "x")
        times.append(kernel_times(job, COMPUTE_CLASSES | MEMORY_CLASSES).sum())
    assert times[1] / times[0] < 1.02 < 1.3 < 1.0 / HOPPER.speed(0.5)


def test_gpus_differ_more_where_the_limit_is_below_the_knee():
    library = load_library("h100-healthy")
    plain, capped, low = (
        resolve_variability(made(**more), library)
        for more in ({}, {"power_limit_w": 600}, {"power_limit_w": 200})
    )
    assert capped.rank.cv == pytest.approx(plain.rank.cv)
    assert low.rank.cv == pytest.approx(HOPPER.exponent * plain.rank.cv, rel=0.01)
    # what memory-bound kernels take of it stays
    spreads = [v.rank_loading("memory") * v.rank.cv for v in (plain, low)]
    assert spreads[1] == pytest.approx(spreads[0], rel=0.01)


@pytest.mark.parametrize("watts", [701, 174])
def test_limits_that_no_gpu_takes_are_refused(watts):
    with pytest.raises(PrismError, match=r"power_limit_w.*175.*700 W"):
        build_workload(made(power_limit_w=watts), None)


@pytest.mark.parametrize(
    ("cluster", "key"),
    [
        ({"throttled_share": 0.5}, "throttled_share"),
        ({"throttled_share": 0.1, "throttled_power_w": 300}, "throttled_share"),
        ({"throttled_power_w": 600, "power_limit_w": 500}, "throttled_power_w"),
    ],
)
def test_throttling_that_says_too_little_is_refused(cluster, key):
    with pytest.raises(PrismError, match=key):
        made(**cluster)


def test_throttled_nodes_are_slow_nodes():
    job = made(throttled_share=0.5, throttled_power_w=300, power_limit_w=600)
    assert throttled_nodes(job) == [1, 3]
    slow = HOPPER.speed(600 / 700) / HOPPER.speed(300 / 700)
    found = Placement(job).slowdowns()
    assert list(found) == [1, 3]
    assert all(node == NodeSlowdown(pytest.approx(slow), memory=1.0) for node in found.values())
    known = job.replace("cluster.node_slowdowns={3: 2.0}")
    assert Placement(known).slowdowns()[3].compute == 2.0
    assert throttled_nodes(made()) == []


@given(st.integers(1, 300), st.floats(0.0, 1.0))
def test_throttled_nodes_are_as_many_as_asked(n, share):
    job = made().replace(f"cluster.nodes={4}")
    object.__setattr__(job.cluster, "nodes", n)
    object.__setattr__(job.cluster, "throttled_share", share)
    found = throttled_nodes(job)
    assert len(set(found)) == len(found) == round(share * n)
    assert all(0 <= node < n for node in found)


# ---------------------------------------------------------------------------------- the energy
def test_power_is_that_of_the_parts():
    job = made()
    work = build_workload(job, load_library("h100-healthy"))
    alone = mean_power(job, work, 1e-9)
    assert alone == pytest.approx(700.0)  # nothing but compute
    assert mean_power(job, work, 1e6) == pytest.approx(0.21 * 700.0, rel=1e-3)  # nothing but waits
    capped = job.replace("cluster.power_limit_w=300")
    work = build_workload(capped, load_library("h100-healthy"))
    assert mean_power(capped, work, 1e-9) == pytest.approx(300.0)
    hot = job.replace("cluster.throttled_share=1.0", "cluster.throttled_power_w=350")
    assert mean_power(hot, work, 1e-9) == pytest.approx(350.0)
    assert mean_power(job, None, 1.0) is None


def test_an_estimate_has_the_energy_of_its_run():
    result = estimate(made(), replicates=128, steps=1000, seed=1)
    found, run = (prism.summary(result)[k] for k in ("energy", "time_to_train"))
    assert 0.21 * 700 < found["gpu_power_w"] < 700
    for name in ("mean", "p50", "p95"):
        joules = found["gpu_power_w"] * 32 * run[name]
        assert found[f"gpu_mwh_{name}"] == pytest.approx(joules / 3.6e9)
    assert result.gpu_energy.attrs["units"] == "J"
    assert "energy" not in prism.summary(estimate(made(), replicates=128, seed=1))


def test_durations_tell_of_energy_only_under_a_limit():
    given_s = {"model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
               "parallelism": {"dp": 2}}  # fmt: skip
    jobs = (
        job_from_dict(given_s | more, "x") for more in ({}, {"cluster": {"power_limit_w": 350}})
    )
    plain, capped = (prism.summary(estimate(job, replicates=64, steps=10, seed=1)) for job in jobs)
    assert "energy" not in plain
    assert capped["energy"]["gpu_power_w"] == pytest.approx(350.0, rel=0.02)
    ratio = capped["ideal_step_time"] / plain["ideal_step_time"]
    assert ratio == pytest.approx(1.0 / HOPPER.speed(0.5), rel=1e-4)


def test_a_sweep_says_what_a_limit_costs_and_saves():
    limits = [350, 500, 700]
    found = prism.summary(sweep(made(), {"cluster.power_limit_w": limits}, replicates=256, seed=2))
    rows = sorted(found["rows"], key=lambda row: row["cluster.power_limit_w"])
    assert [row["cluster.power_limit_w"] for row in rows] == limits
    for measure in ("p50", "p95"):
        times = [row[measure] for row in rows]
        assert times == sorted(times, reverse=True)
    energies = [row["gpu_kwh"] for row in rows]
    assert energies == sorted(energies)
    assert not any(row["own"] for row in rows)
    for row in rows:
        assert row["gpu_power_w"] <= row["cluster.power_limit_w"]
        assert row["gpu_kwh"] == pytest.approx(row["gpu_power_w"] * 32 * row["mean"] / 3.6e6)
