"""Collectives: measured tables inside an NVLink domain, NCCL's algorithms beyond it, no jumps."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prism import kernel, load_job, load_library
from prism.cluster.devices import HOPS_S
from prism.cluster.machine import OPS, Link, build_cluster

MIB = 2**20
NVLINK_HOP_S, NETWORK_HOP_S = HOPS_S
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


HELD = 2e-4  # logarithms of rates are held to 1e-4


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
    cluster = make_cluster(8, links=own)
    assert seconds(cluster, "all_gather", 1e9) == pytest.approx(8.4e-6 + 7 * 2e-6 + 7e9 / 8 / 400e9)
    assert not make_cluster(8, "a100").measured


def test_a_hardware_variant_scales_the_table():
    plain = make_cluster(8)
    slow = replace(plain, nvlink_factor=1.5)
    for op_kind in OPS:
        assert seconds(slow, op_kind, 1e8) == pytest.approx(1.5 * seconds(plain, op_kind, 1e8))


def test_weights_gathered_over_2048_gpus_by_hand():
    """FSDP's all-gather of a 7B model's layer: a ring of 2,047 steps, 255 of them between nodes."""
    cluster = make_cluster(2048)
    sending = 4e8 / 8 * 255 / 256 / cluster.network.bytes_per_s
    simple = 8.4e-6 + 1792 * NVLINK_HOP_S + 255 * NETWORK_HOP_S + sending
    ll128 = 14e-6 + 1792 * 1.9e-6 + 255 * 4.0e-6 + sending / 0.92
    found = seconds(cluster, "all_gather", 4e8)
    assert found == pytest.approx(ll128) and found < 0.6 * simple
    assert seconds(make_cluster(128), "all_gather", 4e8) < 0.35 * found
    # sixteen times the bytes are long enough for the protocol with the higher rate
    assert seconds(cluster, "all_gather", 6.4e10) == pytest.approx(simple + 159 * sending)


def test_short_sums_climb_a_tree_and_lone_ranks_gather_by_pat():
    tree = 6.8e-6 + 2 * (8 * NETWORK_HOP_S * 5 / 14 + 7 * NVLINK_HOP_S * 0.6 / 3.4)
    assert seconds(make_cluster(2048), "all_reduce", 1.0) == pytest.approx(tree, rel=1e-3)
    lone = make_cluster(256, tp=8)
    pat = 8e-6 + (8 / 3.5 + 256 * 0.2) * NETWORK_HOP_S
    found = seconds(lone, "all_gather", 1e7)
    sending = 1e7 * 255 / 256 / (0.75 * lone.network.bytes_per_s)
    assert found == pytest.approx(pat + sending, rel=1e-6)


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


@pytest.mark.parametrize("op_kind", OPS)
def test_ranks_beyond_the_table_follow_it(op_kind):
    """One rank more than measured adds a step, and sends as much as the ring's share grows."""
    at, beyond = (seconds(make_cluster(n, domain=72), op_kind, 64 * MIB) for n in (8, 9))
    assert at < beyond < at * 1.1
    small = [seconds(make_cluster(n, domain=72), op_kind, 1.0) for n in (8, 64)]
    doublings = math.log2(64 / 8) if op_kind == "all_reduce" else 56 / 4
    before = seconds(make_cluster(4, domain=72), op_kind, 1.0)
    assert small[1] - small[0] == pytest.approx(max(small[0] - before, 0.0) * doublings, rel=1e-6)
