"""GPUs that are slow by their position in the node: steps, and which stages get the cool ones."""

import json

import numpy as np
import pytest
from drawn_steps import draw_steps

import prism

STEPS, T = 16, 3.0  # microbatches, of 3 s on a stage
DURATIONS = {"durations": {"forward_s": 1.0, "backward_s": 2.0}}
MIXED = {"nodes": 2, "gpus_per_node": 4, "gpu_slowdowns": [1.0, 1.1, 1.0, 1.1]}
JOB = {
    "model": DURATIONS, "parallelism": {"pp": 4, "dp": 2, "microbatches": STEPS},
    "cluster": MIXED, "variability": {"library": "none"}, "run": {"steps": 100},
}  # fmt: skip


def mean(job):
    return float(draw_steps(prism.load_job(job), 64, 1).step_time.mean())


def test_a_position_is_slow_on_every_node():
    uniform = JOB | {"cluster": MIXED | {"gpu_slowdowns": [1.2] * 4}}
    nodes = JOB | {"cluster": {"nodes": 2, "gpus_per_node": 4, "node_slowdowns": {0: 1.2, 1: 1.2}}}
    assert mean(uniform) == mean(nodes) == pytest.approx((STEPS + 3) * T * 1.2, rel=1e-6)
    # every stage has a slow GPU; with a slow node on top it is as slow as both
    assert mean(JOB) == pytest.approx((STEPS + 3) * T * 1.1, rel=1e-6)
    both = JOB | {"cluster": MIXED | {"node_slowdowns": {0: 1.1, 1: 1.1}}}
    assert mean(both) == pytest.approx((STEPS + 3) * T * 1.21, rel=1e-6)


def heated(celsius, **cluster):
    """Step of a stage to a node whose GPUs are so warm, over that of GPUs at 55 C."""
    job = JOB | {"parallelism": {"dp": 2}, "cluster": {"nodes": 1, "gpus_per_node": 2} | cluster}
    warm = JOB | job | {"cluster": job["cluster"] | {"gpu_temperatures": celsius}}
    return mean(warm) / mean(job)


def test_leakage_takes_power_from_the_clock():
    def slower(kelvin, share=1.0):  # H100: what drives the clock to the power of 1 / 2.64
        return ((share - 0.092) / (share - 0.092 - 0.0027 * kelvin)) ** (1 / 2.64)

    assert heated([55, 55]) == 1.0
    assert heated([40, 71]) == pytest.approx(slower(16), rel=1e-6)  # the slower of two decides
    assert heated([45, 45]) == pytest.approx(slower(-10), rel=1e-6)
    assert 1.015 < slower(16) < 1.02
    half = heated([71, 71], power_limit_w=350)
    assert half == pytest.approx(slower(16, 0.5), rel=0.2) and half > slower(16)
    assert heated([71, 71], clock_mhz=1000) == 1.0  # below what the limit leaves
    # beside factors both count
    both = heated([55, 71], gpu_slowdowns=[1.0, 1.1])
    assert both == pytest.approx(slower(16), rel=1e-6)


def test_memory_and_links_do_not_follow_the_clock():
    path = [
        prism.summary(prism.simulate(prism.load_job(modelled(16, **hot)), replicates=64, seed=1))
        for hot in ({}, {"gpu_temperatures": [75] * 8})
    ]
    cool, hot = (found["critical_path"] for found in path)
    computes = sum(cool[name] for name in ("gemm_mlp", "gemm_attention", "attention", "loss"))
    assert computes < 0.9 * sum(cool.values()) and hot["optimizer"] == cool["optimizer"]
    longer = (0.908 / 0.854) ** (1 / 2.64) - 1.0
    more = sum(hot.values()) - sum(cool.values())
    assert more == pytest.approx(longer * computes, rel=0.01)


def test_temperatures_place_as_the_factors_that_they_are():
    def placed(**cluster):
        job = prism.load_job(JOB | {"cluster": {"nodes": 2, "gpus_per_node": 4} | cluster})
        return prism.summary(prism.place(job, heat=True, seed=1))["placements"]

    factor = heated([71, 71])
    same = placed(gpu_slowdowns=[1.0, factor, 1.0, factor])
    rows = placed(gpu_temperatures=[55, 71, 55, 71])
    assert [row["name"] for row in rows] == [row["name"] for row in same]
    assert [row["p50"] for row in rows] == pytest.approx([row["p50"] for row in same], rel=1e-5)


def test_cool_gpus_get_stages_of_their_own():
    result = prism.place(prism.load_job(JOB), heat=True, seed=1)
    rows = {row["name"]: row for row in prism.summary(result)["placements"]}
    current, best = rows["current"], rows[result.attrs["best"]]
    assert current["p50"] == pytest.approx((STEPS + 3) * T * 1.1, rel=1e-6)
    # two of four stages are cool: at least what they save while the pipeline fills
    assert best["p50"] <= ((STEPS - 1) * 1.1 + 4 + 2 * 0.1) * T * (1 + 1e-6)
    assert len({*best["stages"]}) == 2
    # all GPUs once; hosts.csv names them by node and GPU
    order = result["hosts"].sel(placement=result.attrs["best"]).to_numpy()
    assert sorted(order) == list(range(8))
    files = result.host_files()
    assert set(files) == {"hosts.csv"}
    names = [line.split(",")[2] for line in files["hosts.csv"].splitlines()[1:]]
    assert names[0] == f"{order[0] // 4}:{order[0] % 4}"
    cost = prism.summary(result)["healthy"]
    assert cost["p50"] == pytest.approx((STEPS + 3) * T, rel=1e-6)


SIZES = {"n_heads": 64, "hidden_size": 8192, "ffn_size": 28672, "vocab_size": 8000, "seq_len": 2048}


def modelled(layers, split=None, **cluster):
    """A job of two tp groups a node, one cool and one hot."""
    layout = {"tp": 4, "pp": 4, "microbatches": 16, "microbatch_size": 4}
    return {
        "model": SIZES | {"n_layers": layers},
        "parallelism": layout | ({"layer_split": split} if split else {}),
        "cluster": {"nodes": 2, "device": "h200"} | cluster, "variability": {"library": "none"},
    }  # fmt: skip


def test_tensor_parallel_groups_stay_whole():
    job = modelled(16, gpu_slowdowns=[1.0, 1.2] * 4)
    result = prism.place(prism.load_job(job), heat=True, seed=1)
    for order in result["hosts"].to_numpy():
        assert len({node for node in np.reshape(order, (4, 4))[0] // 8}) == 1
    best = result["hosts"].sel(placement=result.attrs["best"]).to_numpy().reshape(4, 4)
    assert all(len(set(group % 2)) == 1 for group in best)  # all cool or all hot
    assert prism.summary(result)["placements"][0]["saved"] > 0.01
    plain = mean(modelled(16))
    assert mean(job) == pytest.approx(result.entry("current")["p50"], rel=1e-4)
    assert mean(job) > 1.1 * plain


def test_the_signs_of_uneven_splits():
    """Of 20 layers a stage one less on slow GPUs helps, of 4 it hurts, as 19/21 and 11/13 did."""
    for layers, gains in ((80, True), (16, False)):
        each = layers // 4
        job = modelled(layers, gpu_slowdowns=[1.0] * 4 + [1.1] * 4)
        even, uneven = (
            mean(job | modelled(layers, split, **job["cluster"]))
            for split in ([each] * 4, [each + 1, each - 1, each + 1, each - 1])
        )
        assert (uneven < even) == gains
        named = prism.summary(prism.place(prism.load_job(job), heat=True, seed=1))["alternatives"]
        assert set(named) == {"fewer_layers"}


@pytest.mark.parametrize("keys, where", [
    ({}, "cluster.gpu_slowdowns"),
    ({"gpu_slowdowns": [1.1] * 8}, "cluster.gpu_slowdowns"),
    ({"gpu_slowdowns": [1.0, 1.1]}, "cluster.gpu_slowdowns"),
    ({"gpu_slowdowns": [1.0] * 7 + [0.0]}, "cluster.gpu_slowdowns"),
    ({"gpu_temperatures": [60, 76]}, "cluster.gpu_temperatures"),
    ({"gpu_temperatures": [60] * 7 + [160]}, "cluster.gpu_temperatures"),
])  # fmt: skip
def test_what_cannot_be_placed_by_heat(run, tmp_path, keys, where):
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(modelled(16, **keys)))
    status, out, err = run("place", path, "--heat")
    assert status == 2 and where in err and not out
    hot = ("--set", f"cluster.gpu_slowdowns={[1.0, 2] * 4}", "--set", "cluster.gpu_temperatures=")
    status, _, err = run("place", path, "--heat", *hot, "--set", "parallelism={tp: 8, pp: 2}")
    assert status == 2 and "parallelism.tp" in err
    status, _, err = run("place", path, "--heat", "--slow-nodes", 1, "--slowdown", 1.2, *hot)
    assert status == 2 and "--heat" in err
