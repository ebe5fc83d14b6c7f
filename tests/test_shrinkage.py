"""What repeated measurements say of nodes apart from their noise, and what a slow node costs."""

import json

import numpy as np
import pytest

from prism import NodeSlowdown, PrismError, read_inventory


@pytest.fixture
def measured(tmp_path):
    """Read what repeated measurements [node, repeat] of 48 nodes say: relative slowness."""

    def read(seed, repeats=5, slow=1.025, noise=0.01, spread=0.0):
        rng, n = np.random.default_rng(seed), 48
        levels = spread * rng.standard_normal(n)
        levels[7] += np.log(slow)
        times = np.exp(levels[:, None] + noise * rng.standard_normal((n, repeats)))
        rows = [f"{node},{1000.0 * x:.6f}" for node in range(n) for x in times[node]]
        (tmp_path / "nodes.csv").write_text("\n".join(["node,gemm_ms", *rows]))
        found = read_inventory(tmp_path / "nodes.csv", n, 8)
        return np.array([found.get(k, NodeSlowdown()).compute for k in range(n)]), levels

    return read


def test_one_slow_node_of_48_is_found_and_noise_is_not(measured):
    """experiments/checks/shrinkage.py has the rates; without repeats few are found."""
    found = np.array([measured(seed)[0] for seed in range(15)])
    others = np.delete(found, 7, axis=1)
    assert found[:, 7].mean() == pytest.approx(1.025, abs=0.004)
    assert np.abs(others - 1.0).mean() < 0.001  # their noise is 0.0045
    once = np.array([measured(seed, repeats=1)[0][7] for seed in range(15)])
    assert once.mean() < 1.018  # not believed at once
    none = np.array([measured(seed, slow=1.0)[0] for seed in range(15)])
    assert np.abs(none - 1.0).max() < 0.02 and np.abs(none - 1.0).mean() < 0.001


def test_nodes_that_differ_keep_their_differences(measured):
    found, levels = measured(3, repeats=4, slow=1.0, noise=0.01, spread=0.03)
    kept = 0.03**2 / (0.03**2 + 0.01**2 / 4)
    errors = np.log(found) - (levels - np.median(levels))
    assert np.std(errors) < 1.4 * 0.01 / 2 * np.sqrt(kept)
    assert np.corrcoef(np.log(found), levels)[0, 1] > 0.97


def test_measurements_all_alike_have_no_slow_node(measured):
    found, _ = measured(1, repeats=2, slow=1.2, noise=0.0)
    assert found[7] == pytest.approx(1.2, rel=1e-3)
    assert np.delete(found, 7) == pytest.approx(1.0, abs=1e-6)


PRIMUS = """node,host,gemm_min,gemm_med,gemm_max,hbm_tbps_min,hbm_tbps_max,rccl_GBps
0,h0,756.5,760.0,762.1,4.40,4.45,268.6
1,h1,748.5,762.7,764.7,4.39,4.53,271.1
2,h2,700.0,757.9,764.4,4.35,4.42,269.9
3,h3,752.1,763.7,769.6,4.40,4.43,270.0
4,h4,754.2,762.5,767.3,4.36,4.47,268.8
5,h5,749.4,765.8,768.5,4.40,4.44,268.8
"""


def test_least_and_most_of_a_node_give_its_slowest_gpu(tmp_path):
    path = tmp_path / "primus.csv"
    path.write_text(PRIMUS, encoding="utf-8")
    with pytest.raises(PrismError, match=r"rccl_GBps, gemm, hbm_tbps.*--column"):
        read_inventory(path, 6, 8)
    with pytest.raises(PrismError, match=r"'gemm'.*gemm_tflops"):
        read_inventory(path, 6, 8, column="gemm")
    found = read_inventory(path, 6, 8, column="gemm_tflops")
    assert found[2].compute == pytest.approx(753.15 / 700.0, rel=0.01)
    assert all(abs(found.get(node, NodeSlowdown()).compute - 1.0) < 0.005 for node in (0, 1, 3))
    as_times = read_inventory(path, 6, 8, column="gemm_ms")  # then the slowest is the most
    assert as_times.get(2, NodeSlowdown()).compute == pytest.approx(1.0, abs=0.005)
    assert read_inventory(path, 6, 8, column="hbm_tbps", kind="memory").measured == set(range(6))


def test_estimate_takes_measured_nodes(tmp_path, run):
    """A slow node of an inventory costs what it costs as a key of the job."""
    path, named = tmp_path / "nodes.csv", tmp_path / "named.csv"
    path.write_text("node,slowdown\n3,1.5\n", encoding="utf-8")
    named.write_text("node,slowdown\nb3,1.5\n", encoding="utf-8")
    given = ["estimate", "pipeline-8x32", "--replicates", "64", "--seed", "1", "--json", "-q",
             "--set", "cluster={gpus_per_node: 1, nodes: 8}"]  # fmt: skip

    def mean(*more, code=0):
        status, out, err = run(*given, *more)
        assert status == code and "Traceback" not in err, err
        return None if code else json.loads(out)["step_time"]["mean"]

    key = mean("--set", "cluster.node_slowdowns={3: 1.5}")
    assert mean("--measured-nodes", path) == key > 1.2 * mean()
    assert mean("--measured-nodes", named, "--hosts", "b[0-7]") == key
    mean("--measured-nodes", named, code=2)
    mean("--hosts", "b[0-7]", code=2)
    mean("--measured-nodes", path, "--progress", path, "--where", "node=3", code=2)
