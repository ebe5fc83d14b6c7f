"""What repeated measurements say of nodes apart from their noise, and what a slow node costs."""

import json

import numpy as np
import pytest

from prism import NodeSlowdown, PrismError, read_inventory
from prism.cluster.nodes.shrinkage import LIKELY, separate


def node_times(seed, n_nodes=48, repeats=5, slow=1.025, noise=0.01, spread=0.0):
    """Logarithms of a benchmark's times and their nodes; node 7 is slow."""
    generator = np.random.default_rng(seed)
    node = np.repeat(np.arange(n_nodes), repeats)
    levels = spread * generator.standard_normal(n_nodes)
    levels[7] += np.log(slow)
    return levels[node] + noise * generator.standard_normal(node.size), node


def test_noise_and_spread_are_told_apart_by_repeats():
    found = [separate(*node_times(seed, 200, 4, 1.0, 0.01, 0.02)) for seed in range(20)]
    assert np.mean([levels.noise for levels in found]) == pytest.approx(0.01, rel=0.03)
    assert np.mean([levels.spread for levels in found]) == pytest.approx(0.02, rel=0.05)
    truth = [node_times(seed, 200, 1, 1.0, 0.0, 0.02)[0] for seed in range(20)]
    errors = [x.level - y for x, y in zip(found, truth, strict=True)]  # k times the noise
    kept = 0.02**2 / (0.02**2 + 0.01**2 / 4)
    assert np.std(errors) == pytest.approx(0.01 / 2 * np.sqrt(kept), rel=0.1)


def test_one_slow_node_of_48_is_found_and_noise_is_not():
    """The verification script shrinkage.py has the rates; without repeats few are found."""
    alone = [separate(*node_times(seed, repeats=5), 8) for seed in range(40)]
    assert np.mean([x.p_slow[7] >= LIKELY for x in alone]) >= 0.9
    assert np.mean([np.delete(x.p_slow, 7).max() >= LIKELY for x in alone]) <= 0.1
    assert np.mean([x.level[7] for x in alone]) == pytest.approx(np.log(1.025), rel=0.1)
    once = [separate(*node_times(seed, repeats=1), 8) for seed in range(40)]
    assert np.mean([x.p_slow[7] >= LIKELY for x in once]) <= 0.5
    none = [separate(*node_times(seed, slow=1.0), 8) for seed in range(40)]
    assert np.mean([x.p_slow.max() >= LIKELY for x in none]) <= 0.1
    assert max(np.abs(x.level).max() for x in none) < 0.02


def test_measurements_all_alike_have_no_slow_node():
    found = separate(np.zeros(6), np.arange(6))
    assert found.level == pytest.approx(0.0, abs=1e-12) and found.p_slow.max() < LIKELY
    found = separate(np.array([0.0] * 5 + [0.2]), np.arange(6))
    assert found.level == pytest.approx([0.0] * 5 + [0.2], abs=1e-6)


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
