"""Collectives: measured tables inside an NVLink domain, NCCL's algorithms beyond it, no jumps."""

import csv
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tables_made import nccl_tests

from prism import kernel, load_job, load_library
from prism.cluster.machine import OPS, Link, build_cluster
from prism.cluster.nccl import STEP_OF_HOP, bus_factor
from prism.cluster.transports import (
    ALGORITHMS,
    FULL_BYTES,
    OVERLAP_DOMAINS,
    TRANSPORTS,
    Algorithms,
)

MIB = 2**20
DATA = Path(os.environ.get("PRISM_DATA", Path(__file__).parents[2] / "shared" / "data"))
HOP_S = TRANSPORTS["infiniband"].hop_s
BYTES = st.floats(0.0, 37.0).map(lambda x: 2.0**x)
DEVICES = ("a100", "h100", "b200", "gb200")
KINDS = st.sampled_from(OPS)


def make_cluster(dp, device="h100", domain=8, links=None, **parallelism):
    layout = {"dp": dp, "data_parallel": "zero1"} | parallelism
    n_gpus = dp * layout.get("tp", 1)
    job = load_job({
        "model": {"name": "llama3-8b"}, "parallelism": layout,
        "cluster": {"nodes": n_gpus, "gpus_per_node": 1, "device": device,
                    "nvlink_domain_gpus": domain, "links": links or {}},
    })  # fmt: skip
    return build_cluster(job, load_library(f"{device}-healthy"))


def smallest_step(device):
    """Duration of the shortest measured all-gather of the most GPUs, over their steps."""
    table = load_library(f"{device}-healthy").tables["nvlink/all_gather"]
    ranks, n_bytes = table.axes["ranks"][-1], table.axes["bytes"][0]
    return n_bytes / table(ranks=ranks, bytes=n_bytes) / (ranks - 1)


HELD = 2e-4  # logarithms of rates are held to 1e-4
# NVLink in a node and the network between nodes were measured apart: from 2 GiB on an H100 node's
# all-reduce is up to 3.2 % slower than that of two nodes.
APART = 0.05


def seconds(cluster, op_kind, n_bytes):
    return cluster.collective_time(op_kind, n_bytes, cluster.group("dp_cp"))


@pytest.mark.parametrize(
    ("device", "op_kind", "ranks", "n_bytes", "measured_us"),
    [
        ("h100", "all_gather", 8, 512 * MIB, 1401.5),
        ("h100", "all_reduce", 4, 512 * MIB, 2299.7),
        ("h100", "all_reduce", 8, 512 * MIB, 2111.1),  # added up in the switch
        ("h100", "reduce_scatter", 8, 2 * MIB, 17.9),
        ("h100", "all_to_all", 2, 64 * MIB, 139.8),
        ("b200", "all_gather", 8, 16 * MIB, 103.9),
        ("gb200", "all_reduce", 2, 128 * MIB, 269.9),
    ],
)
def test_inside_a_domain_as_measured(device, op_kind, ranks, n_bytes, measured_us):
    found = seconds(make_cluster(ranks, device), op_kind, n_bytes)
    assert found == pytest.approx(measured_us * 1e-6, rel=2e-3)


@pytest.mark.parametrize("op_kind", OPS)
@pytest.mark.parametrize(("device", "each"), [("a100", 8), ("h100", 8), ("gb200", 4)])
@pytest.mark.parametrize("nodes", [1, 2, 48])
def test_a_job_s_collective_is_what_the_command_gives(op_kind, device, each, nodes):
    domain = 8 if each == 8 else 72 if nodes < 18 else 64
    cluster = make_cluster(nodes * each, device, domain)
    for n_bytes in (4096.0, 2.0**24, 2.0**31):
        found = kernel("collective", device=device, op=op_kind, bytes=n_bytes, nodes=nodes)
        assert found["mean"] == pytest.approx(seconds(cluster, op_kind, n_bytes))


def test_a_job_s_own_figures_replace_the_table():
    own = {"nvlink": {"bandwidth_gbytes_per_s": 400, "efficiency": 1, "latency_us": 2}}
    cluster, f = make_cluster(8, links=own), ALGORITHMS
    grown = f.least + (1.0 - f.least) * (1.25e8 / (1.25e8 + FULL_BYTES)) ** f.power
    expected = 2e-6 * (1.0 + 7 * STEP_OF_HOP * f.within * grown) + 7e9 / 8 / 400e9
    assert seconds(cluster, "all_gather", 1e9) == pytest.approx(expected)
    assert not make_cluster(8, "a100").measured


def test_a_hardware_variant_scales_the_table():
    plain = make_cluster(8)
    slow = replace(plain, nvlink_factor=1.5)
    for op_kind in OPS:
        assert seconds(slow, op_kind, 1e8) == pytest.approx(1.5 * seconds(plain, op_kind, 1e8))


def test_a_hardware_variant_scales_the_network():
    job = {
        "model": {"name": "llama3-8b"}, "parallelism": {"dp": 16, "data_parallel": "zero1"},
        "cluster": {"nodes": 16, "gpus_per_node": 1, "scale": {"network": {"time": 1.5}}},
    }  # fmt: skip
    slow = build_cluster(load_job(job), load_library("h100-healthy"))
    for op_kind in OPS:
        plain = seconds(make_cluster(16, domain=1), op_kind, 1e8)
        assert seconds(slow, op_kind, 1e8) == pytest.approx(1.5 * plain)


def test_weights_gathered_over_2048_gpus_by_hand():
    """FSDP's all-gather of a 7B model's layer: a ring of 2,047 steps, 255 of them between nodes."""
    cluster, f, x = make_cluster(2048), ALGORITHMS, 4e8 / 2048
    step = smallest_step("h100")
    grown = f.least + (1.0 - f.least) * (x / (x + FULL_BYTES)) ** f.power
    steps = grown * (1792 * step * f.beyond + 255 * HOP_S) / math.sqrt(1.0 + 255 / OVERLAP_DOMAINS)
    moved = 4e8 * 2047 / 2048
    wires = moved / 8 / cluster.network.bytes_per_s, moved / f.channels_bytes_per_s
    expected = HOP_S + steps + math.hypot(*wires)
    assert seconds(cluster, "all_gather", 4e8) == pytest.approx(expected, rel=1e-6)
    assert seconds(make_cluster(128), "all_gather", 4e8) < 0.45 * expected


def test_short_sums_climb_a_tree_and_large_ones_of_two_domains_stay_in_the_switch():
    f = ALGORITHMS
    step = smallest_step("h100")
    small = HOP_S * (1.0 + 9.0 * f.level * (1.0 / (1.0 + FULL_BYTES)) ** f.power)
    found = seconds(make_cluster(2048), "all_reduce", 1.0)
    assert found == pytest.approx(small + 14.0 * step * f.chain, rel=1e-6)
    alone, two = (seconds(make_cluster(n), "all_reduce", 2**34) for n in (8, 16))
    assert two == pytest.approx(alone, rel=0.1)  # the network has room for 1.5 times as much


@given(
    device=st.sampled_from(DEVICES), domain=st.sampled_from([1, 4, 8, 72]),
    dp=st.integers(2, 300), op_kind=KINDS, n_bytes=BYTES, more=st.floats(1.0, 4.0),
)  # fmt: skip
@settings(deadline=None, max_examples=200)
def test_more_bytes_take_longer_without_jumps(device, domain, dp, op_kind, n_bytes, more):
    """Also at the tables' borders and where NCCL changes its algorithm."""
    cluster = make_cluster(dp, device, domain)
    short = seconds(cluster, op_kind, n_bytes)
    assert 0.0 < short <= seconds(cluster, op_kind, more * n_bytes) * (1.0 + HELD)
    near = seconds(cluster, op_kind, n_bytes * (1.0 + 1e-7))
    assert near <= short * (1.0 + 1e-6)


@given(
    dp=st.integers(2, 256), domain=st.sampled_from([1, 8, 72]), op_kind=KINDS, n_bytes=BYTES,
    slower=st.floats(1.0, 100.0), farther=st.floats(1.0, 100.0),
)  # fmt: skip
@settings(deadline=None, max_examples=100)
def test_slower_links_take_longer(dp, domain, op_kind, n_bytes, slower, farther):
    cluster = replace(make_cluster(dp, domain=domain), measured={})
    base = seconds(cluster, op_kind, n_bytes)
    for tier in ("nvlink", "network"):
        link = getattr(cluster, tier)
        for other in (
            Link(link.bytes_per_s / slower, link.latency_s),
            Link(link.bytes_per_s, link.latency_s * farther),
        ):
            found = seconds(replace(cluster, **{tier: other}), op_kind, n_bytes)
            assert found >= base * (1.0 - 1e-12)


@given(
    device=st.sampled_from(("h100", "gb200")), n=st.integers(2, 511), more=st.integers(1, 512),
    op_kind=KINDS, n_bytes=BYTES,
)  # fmt: skip
@settings(deadline=None, max_examples=150)
def test_more_ranks_take_longer(device, n, more, op_kind, n_bytes):
    """One rank to a domain at the same bytes; in one domain beyond the measured ranks."""
    apart = [seconds(make_cluster(x, device, 1), op_kind, n_bytes) for x in (n, n + more)]
    assert apart[0] <= apart[1] * (1.0 + HELD)
    assume(n >= 8)
    wide = [seconds(make_cluster(x, device, 1024), op_kind, n_bytes) for x in (n, n + more)]
    assert wide[0] <= wide[1] * (1.0 + HELD)


@given(
    device=st.sampled_from(DEVICES), nodes=st.integers(1, 400), more=st.integers(1, 400),
    op_kind=KINDS, n_bytes=BYTES,
)  # fmt: skip
@settings(deadline=None, max_examples=150)
def test_more_nodes_take_longer(device, nodes, more, op_kind, n_bytes):
    few, many = (
        seconds(make_cluster(8 * k, device), op_kind, n_bytes) for k in (nodes, nodes + more)
    )
    assert few <= many * (1.0 + (HELD if nodes > 1 else APART))


@pytest.mark.parametrize("op_kind", OPS)
def test_ranks_beyond_the_table_follow_it(op_kind):
    """One rank more than measured adds a step, and sends as much as the ring's share grows."""
    at, beyond = (seconds(make_cluster(n, domain=72), op_kind, 64 * MIB) for n in (8, 9))
    assert at < beyond < at * 1.1
    small = [seconds(make_cluster(n, domain=72), op_kind, 1.0) for n in (8, 64)]
    doublings = math.log2(64 / 8) if op_kind == "all_reduce" else 56 / 4
    before = seconds(make_cluster(4, domain=72), op_kind, 1.0)
    assert small[1] - small[0] == pytest.approx(max(small[0] - before, 0.0) * doublings, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "n_hosts", "latency", "bandwidth"),
    [("all_reduce", 2, 45e-6, 350e9), ("all_gather", 4, 90e-6, 300e9),
     ("reduce_scatter", 2, 60e-6, 40e9), ("all_reduce", 1, 25e-6, 250e9)],
)  # fmt: skip
def test_a_job_with_the_links_takes_what_was_measured(
    name, n_hosts, latency, bandwidth, tmp_path, run
):
    """The smallest message and the largest."""
    low, high, n = 8 << 10, 8 << 30, 8 * n_hosts
    hosts = [f"n{i}" for i in range(n_hosts)]
    text = nccl_tests(latency, bandwidth, hosts, low=low, high=high, name=name)
    (tmp_path / "run.txt").write_text(text)
    links = json.loads(run("fit", tmp_path / "run.txt", "--json", "-q")[1])["links"]
    cluster = make_cluster(n, links=links)
    for n_bytes in (low, 2**33):
        expected = latency + bus_factor(name, n) * n_bytes / bandwidth
        found = seconds(cluster, name, n_bytes)
        assert found == pytest.approx(expected, rel=0.02)


# ------------------------------------------------------------- against public nccl-tests results
LIBRARY = Path(__file__).parents[1] / "experiments" / "library"


def test_records_are_the_fitted_figures():
    """`python experiments/library/collectives.py --fit` writes the file."""
    with open(LIBRARY / "transports.csv") as file:
        rows = {(r["transport"], r["figure"]): r for r in csv.DictReader(file)}
    held = {("all", name): value for name, value in ALGORITHMS._asdict().items()}
    for name, each in TRANSPORTS.items():
        held |= {(name, "hop_s"): each.hop_s, (name, "efficiency"): each.efficiency}
    assert held.keys() == rows.keys() and len(Algorithms._fields) == 9
    for key, value in held.items():
        assert value == pytest.approx(float(rows[key]["value"])), key
        assert float(rows[key]["low"]) <= value <= float(rows[key]["high"]), key


@pytest.mark.skipif(
    not (DATA / "collectives_multinode").is_dir(), reason=f"no measured data in {DATA}"
)
def test_bands_of_sizes_are_as_measured(monkeypatch):
    """Geometric mean within 10 % from 1 MiB on, sd of the log under .2; below within 25 %."""
    monkeypatch.syspath_prepend(str(LIBRARY))
    import collectives

    rows = collectives.calibrating(DATA)
    found = collectives.bands(rows, collectives.Between(rows).seconds(collectives.shipped()))
    checked = 0
    for (network, _, _, size), band in found[found.n >= 5].iterrows():
        if network != "slingshot":
            near, small = network == "infiniband, roce", size == "< 1 MiB"
            most = 0.25 if small or not near else 0.1
            assert abs(band.gm - 1.0) < most, (network, size)
            assert band.sd < 0.2 or not near
            checked += 1
    assert checked >= 15
