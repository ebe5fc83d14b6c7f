"""Chakra execution traces: values, ranks, files without times, and broken ones."""

import gzip
import json
import re

import chakra_synth as chakra
import kineto_synth
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_kineto_commands import run

from prism import PrismError
from prism.traces import read_trace
from prism.traces.rare.chakraproto import is_proto

PROGRAM = kineto_synth.training_step(n_layers=2, kernels=2)
TIMES = kineto_synth.simulate(PROGRAM, *kineto_synth.draw(PROGRAM, 4, 2, seed=5))
NODES = chakra.rank_nodes(PROGRAM, TIMES, 0)


def test_values_in_are_values_out(tmp_path):
    chakra.write(tmp_path, PROGRAM, TIMES)
    trace = read_trace(tmp_path)
    assert trace.format == "chakra" and trace.meta["n_ranks"] == 2
    for rank in (0, 1):
        ops = trace.ops[(trace.ops["rank"] == rank) & (trace.ops["op_kind"] != "launch_gap")]
        known = np.isfinite(TIMES.start[:, rank]).ravel()
        put_in = (TIMES.end - TIMES.start)[:, rank].ravel()[known].astype(np.int64)
        assert sorted(np.rint(ops["duration"] * 1e6).astype(int)) == sorted(put_in)
        assert set(ops["step"]) == {10, 11, 12, 13}
    coll = trace.ops[trace.ops["op_kind"] == "all_reduce"]
    assert (coll["collective"] >= 0).all() and set(coll["group"].astype(str)) == {"0"}
    assert coll["bytes"].min() >= 4_000 and set(coll["stream"]) == {21}


def test_fit_and_replay(tmp_path):
    chakra.write(tmp_path, PROGRAM, TIMES)
    status, found, _ = run("fit", tmp_path)
    assert status == 0 and found["kind"] == "trace" and found["steps"] == 4
    status, found, _ = run("replay", tmp_path)
    assert status == 0 and abs(found["mean_error"]) < 0.01


def test_durations_alone_make_a_library(tmp_path):
    chakra.write(tmp_path, PROGRAM, TIMES, timed=False)
    model = tmp_path / "library.nc"
    status, found, text = run("fit", tmp_path, "-o", model)
    assert status == 0 and found["kind"] == "library" and "start times" in text
    kernels = {k["name"]: k for k in found["kernels"]}
    place = next(i for i, c in enumerate(PROGRAM) if c.name.startswith("void reduce_metrics"))
    put_in = (TIMES.end - TIMES.start)[:, :, place].astype(int)
    assert kernels["void reduce_metrics<float>"]["mean"] == pytest.approx(put_in.mean() * 1e-6)
    assert "start times" in run("replay", tmp_path)[2]
    assert run("show", model)[1]["kind"] == "library"
    status, _, text = run("estimate", model)
    assert status == 2 and "library.nc: " in text and "variability.library=" in text


def test_zeros_are_counted_and_host_nodes_refused(tmp_path):
    path = tmp_path / "x.et"
    made = [chakra.node(i, "k", chakra.COMP, i % 2, 10 + i, is_cpu_op=False) for i in range(1, 9)]
    path.write_bytes(chakra.encode(made))
    assert any("4 of 8 device nodes" in note for note in read_trace(path).notes)
    made = [chakra.node(i, "aten::mm", chakra.COMP, 5, is_cpu_op=True) for i in range(1, 9)]
    path.write_bytes(chakra.encode(made))
    assert "x.et: 8 nodes" in run("fit", path)[2]


def test_found_by_content_and_gzipped(tmp_path):
    path = tmp_path / "anything.json"
    path.write_bytes(gzip.compress(chakra.encode(NODES)))
    assert read_trace(path).format == "chakra"
    assert is_proto(chakra.encode(NODES)[:300])
    for other in (b"step,step_s\n1,2\n", b"\n\n\n\n", b"\x00" * 64, b'{"schema": 1}', b""):
        assert not is_proto(other)


def test_linked_json(tmp_path):
    nodes = [{"id": 1, "name": "ProfilerStep#7", "cat": "user_annotation", "ts": 5.0,
              "inclusive_dur": 100.0},
             {"id": 2, "name": "sgemm", "cat": "kernel", "ts": 10.0, "exclusive_dur": 7.5,
              "stream": 7},
             {"id": 3, "name": "ncclDevKernel_ReduceScatter_Sum", "cat": "kernel", "ts": 20.0,
              "inclusive_dur": 9.0, "stream": 20}]  # fmt: skip
    path = tmp_path / "linked.json"
    path.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": nodes}))
    trace = read_trace(path)
    ops = trace.ops[trace.ops["op_kind"] != "launch_gap"]
    assert trace.format == "chakra" and list(ops["op_kind"]) == ["compute", "reduce_scatter"]
    assert list(ops["duration"]) == pytest.approx([7.5e-6, 9e-6]) and set(ops["step"]) == {7}


def test_a_file_cut_short_is_read_so_far(tmp_path):
    path = tmp_path / "cut.et"
    whole = chakra.encode(NODES)
    path.write_bytes(whole[: len(whole) * 2 // 3])
    kept = re.search(r"([\d,]+) nodes", " ".join(read_trace(path).notes))[1]
    assert 0 < int(kept.replace(",", "")) < len(NODES)


def test_a_name_with_a_line_break_stays_on_the_line_of_the_error(tmp_path):
    path = tmp_path / "x.json"
    node = {"id": 1, "name": "a\nb", "type": 4, "is_cpu_op": True}
    path.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "nodes": [node]}))
    with pytest.raises(PrismError) as error:
        read_trace(path)
    assert "\n" not in str(error.value) and r"a\nb" in str(error.value)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_broken_files_are_one_message(tmp_path_factory, data):
    content = bytearray(chakra.encode(NODES))
    for _ in range(data.draw(st.integers(0, 20))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("broken") / "x.et"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        read_trace(path)
    except PrismError as error:
        assert str(path) in str(error) and "\n" not in str(error)
