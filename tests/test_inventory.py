"""Inventories of slow nodes: tables, burn-ins, nccl-tests, names of hosts, placement files."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from prism import NodeSlowdown, PrismError, read_inventory
from prism.cluster.nodes.hosts import find_nodes, read_host_list
from prism.cluster.nodes.inventory import merge_inventories
from prism.jobs.hostfiles import as_ranges, host_order, placement_csv, read_hosts
from prism.traces import find_recording
from prism.traces.formats.nccltests import split_hosts

DATA = Path(os.environ.get("PRISM_DATA", Path(__file__).parents[2] / "shared" / "data"))
RUNS = DATA / "gpu_variability" / "runs.parquet"


def write(folder, text, name="nodes.csv"):
    """Write a file and name it."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def read(path, n_nodes=64, gpus_per_node=8, **options):
    return read_inventory(path, n_nodes, gpus_per_node, **options)


def refused(path, *parts, **options):
    """The message of the error, which holds all parts."""
    with pytest.raises(PrismError) as caught:
        read(path, **options)
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    return message


# -------------------------------------------------------------------------------------- factors
def test_a_table_of_slowdowns_gives_the_nodes_that_are_slow(tmp_path):
    found = read(write(tmp_path, "node,slowdown\n3,1.2\n17,1\n5,1.05\n"))
    assert dict(found) == {3: NodeSlowdown(1.2), 5: NodeSlowdown(1.05)}
    assert found.measured == {3, 17, 5}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("network", NodeSlowdown(network=1.2)),
        ("memory", NodeSlowdown(memory=1.2)),
        ("everything", NodeSlowdown(1.2, 1.2, 1.2, 1.2)),
    ],
)
def test_a_plain_slowdown_is_of_the_kind_that_was_asked_for(tmp_path, kind, expected):
    assert dict(read(write(tmp_path, "node,slowdown\n3,1.2\n"), kind=kind)) == {3: expected}


def test_kinds_have_columns_and_empty_cells_are_as_the_others(tmp_path):
    text = "host;compute;network\nn0;1.1;\nn1;;1.3\nn2;;\n"
    found = read(write(tmp_path, text), n_nodes=3)
    assert dict(found) == {0: NodeSlowdown(1.1), 1: NodeSlowdown(network=1.3)}
    assert found.hosts == {0: "n0", 1: "n1", 2: "n2"}


def test_everything_is_what_a_kind_is_that_is_not_given(tmp_path):
    found = read(write(tmp_path, "node,everything,network\n3,1.1,1.5\n"))
    assert found[3] == NodeSlowdown(1.1, 1.1, 1.5, 1.1)


def test_parquet_reads_as_csv_does(tmp_path):
    pytest.importorskip("pyarrow")
    pd.DataFrame({"node": [3, 4], "slowdown": [1.2, 1.1]}).to_parquet(tmp_path / "n.parquet")
    assert dict(read(tmp_path / "n.parquet")) == {3: NodeSlowdown(1.2), 4: NodeSlowdown(1.1)}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("node,slowdown\n3,1.2\n4,0\n", ("nodes.csv:3", "slowdown is 0", "above 0", "1.2 is 20 %")),
        ("node,slowdown\n3,-1.2\n", ("nodes.csv:2", "slowdown is -1.2")),
        ("node,slowdown\n3,inf\n", ("nodes.csv:2", "slowdown is inf")),
        ("node,slowdown\n3,fast\n", ("nodes.csv:2", "'fast'", "expected a number")),
        ("node,slowdown\n99,1.2\n", ("nodes.csv:2", "no node 99", "64 nodes, 0 to 63",
                                     "take it out")),
        ("node,slowdown\n3,1.2\n4,1\n3,1.3\n", ("nodes.csv:4", "node 3 ", "nodes.csv:2")),
        ("node,slowdown\n3,1.2\n03,1.2\n", ("nodes.csv:3", "twice")),
        ("node,slowdown\n,1.2\n", ("nodes.csv:2", "expected a node")),
        ("node,slowdown,compute\n3,1.2,1.3\n", ("both slowdown and compute", "--kind")),
        ("gpu,slowdown\n3,1.2\n", ("no column of nodes", "hostname")),
        ("node,speed\n3,1.2\n", ("neither slowdowns nor measurements", "node, slowdown")),
        ("node,slowdown\n", ("no rows",)),
        ("", ("empty",)),
    ],
)  # fmt: skip
def test_what_is_no_inventory_says_where_and_what_instead(tmp_path, text, parts):
    refused(write(tmp_path, text), *parts)


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    refused(tmp_path / "none.csv", "none.csv: ")


def test_a_node_much_faster_than_the_others_is_remarked_on(tmp_path):
    notes = read(write(tmp_path, "node,slowdown\n3,0.2\n")).notes
    assert any("node 3 " in note and " 0.2" in note and "1.2 is 20 %" in note for note in notes)


# ---------------------------------------------------------------------------------------- names
def test_names_are_looked_up_in_a_list_of_hosts(tmp_path):
    listed = write(tmp_path, "# rack 1\nn10 slots=8\nn11:8\n\nn12\nn12\nn13\n", "hosts")
    hosts = read_host_list(listed, 4)
    assert hosts == ["n10", "n11", "n12", "n13"]
    table = write(tmp_path, "node,slowdown\nn12,1.2\nn10.cluster.local,1.1\n")
    found = read(table, n_nodes=4, hosts=hosts)
    assert dict(found) == {0: NodeSlowdown(1.1), 2: NodeSlowdown(1.2)}
    assert found.hosts[2] == "n12"
    with pytest.raises(PrismError, match="4 hosts.* 8 nodes"):
        read_host_list(listed, 8)
    with pytest.raises(PrismError, match="4 hosts.* 3 nodes.*spares 1"):
        read_host_list(listed, 3)
    assert read_host_list(listed, 3, spares=1) == hosts


def test_names_without_a_list_take_their_order_only_if_every_node_is_named(tmp_path):
    text = "node,slowdown\nb,1.0\na,1.2\n"
    found = read(write(tmp_path, text), n_nodes=2)
    assert dict(found) == {1: NodeSlowdown(1.2)}
    assert any(": b, a" in note for note in found.notes)
    refused(write(tmp_path, text), "names 2 hosts (b, a)", "hosts LIST", "0 to 63")


@pytest.mark.parametrize(
    ("labels", "hosts", "part"),
    [
        (["n1", "3"], None, "node 3 .*n1"),
        (["nod1"], ["node1", "node2"], "mean node1"),
        (["node1", "0"], ["node1", "node2"], "'0' and 'node1' .*node 0"),
    ],
)
def test_names_that_cannot_be_placed_are_errors(labels, hosts, part):
    with pytest.raises(PrismError, match=f"^here .*{part}"):
        find_nodes(labels, 2, hosts, lambda label: f"here {label}")


# -------------------------------------------------------------------------------------- burn-in
def burn_in(slow=(), n_nodes=6, gpus=4, runs=5, unit="ms", names=str, seed=0):
    """Build a table of GEMM times: GPU 2 of each slow node takes longer."""
    generator = np.random.default_rng(seed)
    rows = []
    for node in range(n_nodes):
        for gpu in range(gpus):
            factor = dict(slow).get(node, 1.0) if gpu == 2 else 1.0
            for _ in range(runs):
                noise = 1.0 + 1e-4 * generator.standard_normal()
                rows.append((gpu + gpus * node, names(node), 50.0 * factor * noise))
    frame = pd.DataFrame(rows, columns=["gpu_id", "node", "gemm_ms"])
    if unit == "tflops":
        frame["gemm_tflops"] = 4e4 / frame.pop("gemm_ms")
    return frame


@pytest.mark.parametrize("unit", ["ms", "tflops"])
def test_a_node_is_as_slow_as_its_slowest_gpu(tmp_path, unit):
    burn_in({3: 1.2, 5: 1.07}.items(), unit=unit).to_csv(tmp_path / "b.csv", index=False)
    found = read(tmp_path / "b.csv", n_nodes=6, gpus_per_node=4)
    factors = [found[node].compute for node in range(6)]
    assert factors == pytest.approx([1.0, 1.0, 1.0, 1.2, 1.0, 1.07], abs=1e-3)
    assert any("4 GPUs, 5 runs" in note for note in found.notes)
    assert not any("variability.effects.rank" in note for note in found.notes)


def test_the_median_run_counts_and_not_the_worst(tmp_path):
    table = burn_in({3: 1.2}.items())
    table.loc[0, "gemm_ms"] *= 3.0  # one run of node 0
    table.to_csv(tmp_path / "b.csv", index=False)
    assert read(tmp_path / "b.csv", n_nodes=6)[0].compute == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("factor", [1e300, 1e-300, 2e3, 4e-4])
def test_a_value_of_no_node_that_works_is_refused_with_its_row(tmp_path, factor):
    table = burn_in()
    table.loc[7, "gemm_ms"] *= factor
    refused(write(tmp_path, table.to_csv(index=False)), ":9:", n_nodes=6)


def test_rows_of_no_node_are_left_out_and_counted(tmp_path):
    table = burn_in({3: 1.2}.items())
    table.loc[:3, "node"] = "-1"
    table.to_csv(tmp_path / "b.csv", index=False)
    found = read(tmp_path / "b.csv", n_nodes=6)
    assert any("4 of 120 rows" in note for note in found.notes)
    assert any("4 GPUs" in note and " 8" in note for note in found.notes)


def test_without_a_column_of_gpus_the_answer_says_what_may_hide(tmp_path):
    burn_in().drop(columns="gpu_id").to_csv(tmp_path / "b.csv", index=False)
    found = read(tmp_path / "b.csv", n_nodes=6)
    assert any("identifies the GPU" in note for note in found.notes)


def test_several_measurements_or_groups_are_refused_with_a_choice(tmp_path):
    table = burn_in(names="n{}".format)
    table["matmul_ms"] = 1.0
    table["phase"] = ["day", "night"] * 60
    path = tmp_path / "b.csv"
    table.to_csv(path, index=False)
    refused(path, ": gemm_ms, matmul_ms", "--column", "phase: day, night")
    refused(path, "phase: day, night", "--where", column="gemm_ms")
    options = {"column": "gemm_ms", "where": {"phase": "day"}}
    assert len(read(path, n_nodes=6, **options).measured) == 6
    refused(path, "no column 'gemm'", "gemm_ms", column="gemm")
    refused(path, "phase", "faster", column="phase")
    refused(path, "phase=noon", column="gemm_ms", where={"phase": "noon"})
    table.loc[7, "gemm_ms"] = 0.0
    table.to_csv(path, index=False)
    refused(path, "b.csv:9", "gemm_ms is 0", column="gemm_ms", where={"phase": "*"})


def superbench(n_nodes=12, slow=((3, 5, 1.25),)):
    """Rows of results-summary.jsonl: GEMM at 8 GPUs of a node, others; two nodes failed."""
    generator, rows = np.random.default_rng(1), []
    for node in range(n_nodes):
        row = {"node": f"sb-{node:03}"}
        for gpu in range(8):
            factor = {(a, b): x for a, b, x in slow}.get((node, gpu), 1.0)
            speed = (1.0 + 1e-3 * generator.standard_normal()) / factor
            row |= {f"gemm-flops/fp64_flops:{gpu}": 6e4, f"gemm-flops/fp16_tc_flops:{gpu}": 8e5,
                    f"gemm-flops/bf16_tc_flops:{gpu}": 7e5 * speed,
                    f"kernel-launch/event_time:{gpu}": 0.0056, f"mem-bw/h2d_bw:{gpu}": 25.0,
                    f"gpu-stream:x/STREAM_TRIAD_double_gpu_{gpu}_bw:0": 3e3 * speed}  # fmt: skip
        row |= {f"nccl-bw:default/allreduce_{2**k}_busbw:0": 400.0 * (k > 9) for k in (3, 20, 33)}
        if node == 6:
            row["nccl-bw:default/allreduce_8589934592_busbw:0"] = 200.0
        rows.append(row | {"gemm-flops/return_code": 0, "gpu-burn/time": 600.0})
    rows[7]["gemm-flops/return_code"] = 33  # with numbers, but not to be believed
    rows[9] = {k: v for k, v in rows[9].items() if "gemm" not in k} | {"gemm-flops/return_code": 1}
    return rows


JSON = {
    "lines": lambda rows: "\n".join(map(json.dumps, rows)),
    "list": json.dumps,
    "by name": lambda rows: json.dumps({row.pop("node"): row for row in rows}),
    "nested": lambda rows: "\n".join(
        json.dumps({"host": row["node"], "rc": row["gemm-flops/return_code"], "gpus": [
            {"gemm_tflops": row.get(f"gemm-flops/bf16_tc_flops:{gpu}"), "temp": 60 + gpu}
            for gpu in range(8)
        ]}) for row in rows
    ),
}  # fmt: skip
"""Ways in which tools write rows as JSON."""


@pytest.mark.parametrize("way", JSON)
def test_superbench_as_json(tmp_path, way):
    """The slow GPU counts; nodes whose benchmark failed are named, and not ranked."""
    path = write(tmp_path, JSON[way](superbench()), "results-summary.jsonl")
    found = read(path, n_nodes=12)
    assert found[3].compute == pytest.approx(1.25, rel=0.01)
    assert found.measured == set(range(12)) - {7, 9} and found.hosts[3] == "sb-003"
    assert all(abs(slow.compute - 1.0) < 0.005 for node, slow in found.items() if node != 3)
    for name in ("sb-007", "sb-009"):
        assert any(name in note for note in found.notes)
    assert any("8 GPUs, 1 run" in note and "more is faster" in note for note in found.notes)


def test_a_kind_of_work_has_its_metric(tmp_path):
    path = write(tmp_path, JSON["lines"](superbench()), "results-summary.jsonl")
    for kind, metric, node, factor in (
        ("compute", "gemm-flops/bf16_tc_flops", 3, 1.25),
        ("memory", "gpu-stream:x/STREAM_TRIAD_double_bw", 3, 1.25),
        ("network", "nccl-bw:default/allreduce_8589934592_busbw", 6, 2.0),
    ):
        found = read(path, n_nodes=12, kind=kind)
        assert getattr(found[node], kind) == pytest.approx(factor, rel=0.01)
        assert any(f"{metric} is taken for {kind}" in note for note in found.notes)
    found = read(path, n_nodes=12, column="gemm-flops/fp16_tc_flops")
    assert not found and not any("taken for compute" in note for note in found.notes)
    refused(path, "no column", "fp16_tc_flops", n_nodes=12, column="gemm-flop/fp16_tc_flops")


def test_what_is_no_table_in_json_is_refused(tmp_path):
    refused(write(tmp_path, '{"node": "a", "x_ms": 1}\n{"node":\n', "a.jsonl"), "a.jsonl:2")
    refused(write(tmp_path, '{"traceEvents": []}', "b.json"), "profiler")
    refused(write(tmp_path, '{"items": [1, 2]}', "c.json"), "objects")


WIDE = ["gpu{}_tflops", "gemm_tflops_gpu{}", "gemm_gpu{}_tflops", "GPU {} (TFLOPS)",
        "gemm TFLOP/s {}", "gemm_tflops[{}]", "gemm_tflops.rank{}", "gemm_tflops:{}"]  # fmt: skip


def over_time(n_nodes=6, times=3):
    """GEMM rates by time, node and GPU; GPU 2 of node 4 is slow."""
    generator = np.random.default_rng(2)
    when = pd.date_range("2026-03-01", periods=times, freq="6h").astype(str)
    rows = [(t, f"n{n}", g, 700.0 / (1.2 if (n, g) == (4, 2) else 1.0))
            for t in when for n in range(n_nodes) for g in range(8)]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["timestamp", "hostname", "gpu", "gemm_tflops"])
    frame["gemm_tflops"] *= 1.0 + 1e-3 * generator.standard_normal(len(frame))
    return frame


@pytest.mark.parametrize("named", WIDE)
def test_columns_of_one_gpu_each(tmp_path, named):
    wide = over_time().pivot(index=["timestamp", "hostname"], columns="gpu", values="gemm_tflops")
    wide.rename(columns=named.format).to_csv(tmp_path / "b.csv")
    found = read(tmp_path / "b.csv", n_nodes=6)
    assert found[4].compute == pytest.approx(1.2, rel=0.01)
    assert any("8 GPUs, 3 runs" in note for note in found.notes)
    wide.rename(columns="GPU{}".format).to_csv(tmp_path / "b.csv")
    refused(tmp_path / "b.csv", "--column gpu_tflops", n_nodes=6)
    found = read(tmp_path / "b.csv", n_nodes=6, column="gpu_tflops")
    assert found[4].compute == pytest.approx(1.2, rel=0.01)


@pytest.mark.parametrize("form", ["text", "epoch", "time of day", "parquet", "metrics"])
def test_repeats_over_time(tmp_path, form):
    """When a row was measured is no group, nor are serial numbers and whether it passed."""
    table, path = over_time(), tmp_path / "b.csv"
    serial = [f"S{host}-{gpu}" for host, gpu in zip(table.hostname, table.gpu, strict=True)]
    table = table.assign(Serial=serial, Status="PASS", **{"Temp C": 60.0, "SM Clock MHz": 1900.0})
    table.loc[7, ["Status", "gemm_tflops"]] = ["FAIL", 1.0]
    table = table.rename(columns={"hostname": "Host Name", "gpu": "GPU"})
    if form == "epoch":
        table["timestamp"] = pd.to_datetime(table["timestamp"]).astype("int64") // 10**9
    elif form == "time of day":
        table["timestamp"] = table["timestamp"].str[11:]
    elif form == "metrics":
        table = table.rename(columns={"gemm_tflops": "value"}).assign(metric="gemm", unit="TFLOPS")
        other = table.assign(metric="hbm_copy", unit="GB/s", value=3e3)
        table = pd.concat([table, other], ignore_index=True)
    if form == "parquet":
        pytest.importorskip("pyarrow")
        table["timestamp"] = pd.to_datetime(table["timestamp"])
        table.to_parquet(path)
    else:
        table.to_csv(path, index=False)
    found = read(path, n_nodes=6)
    assert found[4].compute == pytest.approx(1.2, rel=0.01)
    assert all(abs(slow.compute - 1.0) < 0.01 for node, slow in found.items() if node != 4)
    assert any("2 to 3 runs" in note for note in found.notes)


@pytest.mark.parametrize("drift", [0.0, 0.03])
def test_a_gpu_that_changed_is_as_it_was_last(tmp_path, drift):
    """One became slow, one was repaired; what all of them drift by is no change."""
    table = over_time(times=12)
    n_before = table.groupby("timestamp").ngroup()
    rate = table["gemm_tflops"] * (1.0 - drift * (n_before >= 6))
    one = table["gpu"] == 5
    rate = rate / np.where(one & (table["hostname"] == "n1") & (n_before >= 7), 1.3, 1.0)
    rate = rate / np.where(one & (table["hostname"] == "n2") & (n_before < 7), 1.3, 1.0)
    table.assign(gemm_tflops=rate).sample(frac=1.0, random_state=1).sort_values("hostname").to_csv(
        tmp_path / "b.csv", index=False
    )
    found = read(tmp_path / "b.csv", n_nodes=6)
    factors = [found.get(node, NodeSlowdown()).compute for node in range(6)]
    assert factors == pytest.approx([1.0, 1.3, 1.0, 1.0, 1.2, 1.0], abs=0.01)
    (note,) = [note for note in found.notes if "n1 GPU 5" in note and "n2 GPU 5" in note]
    assert "n4" not in note and "n0" not in note


def test_nodes_come_in_the_order_of_their_first_row(tmp_path):
    """Also where the first runs of one failed, or lack a GPU."""
    text = "node,gpu,gemm_ms,status\nb,0,1,fail\na,0,1,ok\nb,1,1,ok\nc,1,1,ok\na,1,2,ok\n"
    found = read(write(tmp_path, text), n_nodes=3, gpus_per_node=2)
    assert list(found.hosts.values()) == ["b", "a", "c"] and max(found, key=found.get) == 1


def test_a_burn_in_of_more_nodes_than_the_job_has(tmp_path):
    over_time().to_csv(tmp_path / "b.csv", index=False)
    found = read(tmp_path / "b.csv", n_nodes=3, hosts=["n4.cluster", "n1", "x0"])
    assert found[0].compute == pytest.approx(1.2, rel=0.01) and found.measured == {0, 1}
    refused(tmp_path / "b.csv", "no host 'n0'", n_nodes=2, hosts=["x0", "x1"])


def test_a_public_burn_in_of_392_gpus_reads():
    pytest.importorskip("pyarrow")
    if not RUNS.is_file():
        pytest.skip(f"no {RUNS}; set PRISM_DATA to its parent's parent")
    refused(RUNS, "workload", "--where")  # the least and the most are no measurements
    where = {"workload": "sgemm_25536"}
    found = read(RUNS, n_nodes=80, gpus_per_node=4, where=where)
    assert len(found.measured) == 80
    assert any("variability.effects.rank" in note for note in found.notes)
    # by hand, from the table itself, whose runs of a GPU differ by far less than its GPUs
    runs = pd.read_parquet(RUNS)
    runs = runs[(runs.workload == "sgemm_25536") & (runs.node >= 0)]
    slowest = runs.groupby(["node", "gpu_id"]).value_ms.median().groupby("node").max()
    for node, factor in (slowest / slowest.median()).items():
        assert found.get(node, NodeSlowdown()).compute == pytest.approx(factor, rel=2e-3)


# ----------------------------------------------------------------------------------- nccl-tests
HEADER = """# nThread 1 nGpus 1 minBytes 1048576 maxBytes 8388608 step: 2(factor) warmup iters: 5
#
# Using devices
{devices}#
#                                                              out-of-place            in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""  # noqa: E501


def nccl(hosts, slowdown, devices=True, redop="sum", small=1.0):
    """Write the output of one test: bus bandwidth 48 GB/s over the slowdown at large sizes."""
    listed = "".join(
        f"#  Rank {8 * i + g:2d} Group  0 Pid  {100 + g} on {host:>10s} device  {g} [0x0{g}] GPU\n"
        for i, host in enumerate(hosts) for g in range(8)
    )  # fmt: skip
    lines = HEADER.format(devices=listed if devices else "")
    for power in range(20, 24):
        bus = 48.0 / slowdown * (small if power < 21 else 1.0)
        row = f"{100.0:8.2f} {bus / 1.875:7.2f} {bus:7.2f}"
        lines += f"{2**power:12d} {2**power // 4:13d}     float {redop:>7s}      -1 {row}      0 "
        lines += f"{row}    N/A\n"
    return lines + "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 20\n#\n"


@pytest.mark.parametrize("spoilt", ["inf", "nan", "1e-308", "1e300", "-1"])
def test_numbers_that_no_test_measures_are_passed_over(tmp_path, spoilt):
    """Of the eight times of a test, one."""
    text = nccl(["n0", "n1"], 1.0)
    path = Path(write(tmp_path, text.replace("100.00", f"{spoilt:>6s}", 1), "one.txt"))
    (test,) = find_recording(path).read().tests
    assert len(test.bus) == 8 and list(test.time.values()) == pytest.approx([1e-4] * 7)
    path = Path(write(tmp_path, text.replace("  48.00", f"{spoilt:>7s}", 1), "one.txt"))
    (test,) = find_recording(path).read().tests
    assert len(test.bus) == (8 if spoilt == "1e-308" else 7)
    path = Path(write(tmp_path, text + "9" * 5000 + text.splitlines()[-4][12:], "one.txt"))
    (test,) = find_recording(path).read().tests
    assert len(test.bus) == 8


def test_pairs_tell_which_node_is_slow(tmp_path):
    """Six nodes in a round robin: every pair of a slow node is slow, and only it is found."""
    truth = [1.0, 1.0, 2.5, 1.0, 1.0, 1.3]
    for i in range(6):
        for j in range(i):
            text = nccl([f"n{i}", f"n{j}"], max(truth[i], truth[j]))
            write(tmp_path, text, f"pair{i}-{j}.txt")
    hosts = [f"n{i}" for i in range(6)]
    found = read(tmp_path, n_nodes=6, hosts=hosts)
    factors = [found.get(node, NodeSlowdown()).network for node in range(6)]
    assert factors == pytest.approx(truth, rel=1e-3)
    assert all(slow.compute == 1.0 for slow in found.values())
    assert any("15 tests of 6 nodes" in note for note in found.notes)


def test_a_slow_pair_of_which_neither_is_known_is_named(tmp_path):
    text = nccl(["n0", "n1"], 1.0) + nccl(["n2", "n3"], 2.0) + nccl(["n4", "n5"], 1.0)
    found = read(write(tmp_path, text, "all.log"), n_nodes=6)
    assert [found[2].network, found[3].network] == pytest.approx([2.0, 2.0])
    assert any("n2 and n3 " in note and "(2)" in note for note in found.notes)
    assert any("n0, n1, n2, n3" in note for note in found.notes)  # the order of appearance


def test_one_node_each_by_file_name_and_small_messages_do_not_count(tmp_path):
    for node in range(11):
        slowdown = 1.5 if node == 10 else 1.0
        text = nccl(["x"], slowdown, devices=False, redop="", small=0.5 if node == 4 else 1.0)
        write(tmp_path, text, f"all_reduce_node{node}.txt")
    found = read(tmp_path, n_nodes=11)  # node10 comes last, not after node1
    assert {node: slow.network for node, slow in found.items()} == pytest.approx({10: 1.5})
    assert found.hosts[10] == "node10"
    assert any("within one node" in note and "NVLink" in note for note in found.notes)


def test_lines_with_the_prefix_of_a_parallel_shell_are_streams_of_their_own(tmp_path):
    blocks = {f"h{i}": nccl(["x"], 1.2 if i == 1 else 1.0, devices=False) for i in range(3)}
    lines = zip(*(text.splitlines() for text in blocks.values()), strict=True)
    mixed = "\n".join(f"{h}: {x}" for row in lines for h, x in zip(blocks, row, strict=True))
    found = read(write(tmp_path, mixed, "clush.log"), n_nodes=3)
    assert {node: slow.network for node, slow in found.items()} == pytest.approx({1: 1.2}, rel=1e-3)
    tagged = re.sub("^", "[1,0]<stdout>:", nccl(["h0", "h1"], 1.0), flags=re.MULTILINE)
    (test,) = find_recording(write(tmp_path, tagged, "mpi.log")).read().tests
    assert test.hosts == ("h0", "h1") and test.n_gpus == 16 and len(test.bus) == 8


def test_a_failed_test_is_left_out_and_said(tmp_path):
    write(tmp_path, HEADER.format(devices="#  Rank  0 Pid 1 on n3 device 0 [0x1] GPU\n"), "3.txt")
    for node in range(3):
        write(tmp_path, nccl([f"n{node}"], 1.0), f"{node}.txt")
    write(tmp_path, "not a test", "README")
    found = read(tmp_path, n_nodes=3)
    assert any("3.txt" in note and "fail" in note for note in found.notes)
    assert any("README" in note and "nccl-tests" in note for note in found.notes)


def test_tests_that_cannot_be_compared_are_refused(tmp_path):
    one = write(tmp_path, nccl(["n0", "n1"], 1.0), "one.txt")
    refused(one, "one.txt:", "only test", "three")
    other = nccl(["n0", "n2"], 1.0)
    other = re.sub(r"^( +)(\d+)( +\d+ +float)", r"\g<1>1\2\3", other, flags=re.MULTILINE)
    both = write(tmp_path, nccl(["n0", "n1"], 1.0) + other, "both.txt")
    refused(both, "no message size", "-b, -e and -f")
    refused(one, "column", column="busbw")
    folder = tmp_path / "folder"
    folder.mkdir()
    refused(folder, f"{folder}: ", "no files")
    (folder / "a.txt").write_text("nothing")
    refused(folder, f"{folder}/a.txt: ", "no rows")


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("node017_node018.txt", ("node017", "node018")),
        ("gpu-a3-17.log", ("gpu-a3-17",)),
        ("nccl_tests_all_gather-10.0.0.1_10.0.0.2.out", ("10.0.0.1", "10.0.0.2")),
        ("dgx1_to_dgx22.txt", ("dgx1", "dgx22")),
    ],
)
def test_file_names_name_one_node_or_two(name, hosts):
    assert split_hosts(name) == hosts


# -------------------------------------------------------------------------------- several, files
def test_gpus_and_network_from_two_files(tmp_path):
    gpus = read(write(tmp_path, "node,slowdown\n3,1.2\n4,1.1\n"))
    network = read(write(tmp_path, "node,network\n3,1.5\n5,2\n", "net.csv"))
    both = merge_inventories({"a": gpus, "b": network})
    assert both[3] == NodeSlowdown(1.2, network=1.5)
    assert list(both) == [3, 4, 5]
    with pytest.raises(PrismError, match="b: node 3: .*compute .* a "):
        merge_inventories({"a": gpus, "b": gpus})


def test_a_placement_reads_back(tmp_path):
    groups = [[(0, 0), (1, 0)], [(2, 0), (3, 0)], [(0, 1), (1, 1)]]
    text = placement_csv([2, 0, 5], groups, 8, {2: "n2", 5: "n5"})
    assert text.splitlines()[3] == "2,5,n5,16,1,0-1"
    assert read_hosts(write(tmp_path, text, "hosts.csv")) == [2, 0, 5]
    head, *rest = text.splitlines()
    shuffled = "\n".join([head, *rest[::-1]])
    assert read_hosts(write(tmp_path, shuffled, "other.csv")) == [2, 0, 5]
    assert host_order([2, 0], {2: "n2"}) == "n2\n0\n"
    assert host_order([2, 0], {2: "n2", 0: "n0"}, 2) == "n2\nn2\nn0\nn0\n"
    assert as_ranges([]) == ""


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("slot,node\n0,3\n0,4\n", ":3: slot 0 .*twice"),
        ("slot,node\n0,3\n2,4\n", "2 slots .*no slot 1"),
        ("slot,node\n0,x\n", ":2: node .*'x'"),
        ("slot,node\n0\n", ":2: node .*''"),
        ("slot,host\n0,a\n", "no column node"),
        ("slot,node\n", "no slot"),
        ("", "column slot and node"),
    ],
)
def test_what_is_no_placement_is_an_error(tmp_path, text, part):
    with pytest.raises(PrismError, match=rf"hosts\.csv.*{part}"):
        read_hosts(write(tmp_path, text, "hosts.csv"))
    with pytest.raises(PrismError, match=r"none\.csv: "):
        read_hosts(tmp_path / "none.csv")
