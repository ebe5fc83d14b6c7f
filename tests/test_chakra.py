"""Chakra execution traces: values, ranks, files without times, and broken ones."""

import gzip
import json

import chakra_synth as chakra
import kineto_synth
import numpy as np
import pytest

import prism

PROGRAM = kineto_synth.training_step(n_layers=2, kernels=2)
TIMES = kineto_synth.simulate(PROGRAM, *kineto_synth.draw(PROGRAM, 4, 2, seed=5))
NODES = chakra.rank_nodes(PROGRAM, TIMES, 0)
WHOLE_US = np.floor(TIMES.end - TIMES.start)  # durations are whole microseconds


def place(name):
    return [i for i, call in enumerate(PROGRAM) if call.name.startswith(name)]


def shown(run, path):
    status, out, err = run("show", path, "--json")
    assert status == 0, err
    found = json.loads(out)
    return found, {(row["op_kind"], row["what"]): row for row in found["ops"]}


def test_values_in_are_values_out(run, tmp_path):
    chakra.write(tmp_path, PROGRAM, TIMES)
    found, ops = shown(run, tmp_path)
    assert (found["format"], found["n_ranks"], found["steps"]) == ("chakra", 2, [10, 13])
    for key, name in ((("all_reduce",) * 2, "nccl"), (("compute", "gemm"), "ampere")):
        put_in = 1e-6 * WHOLE_US[:, :, place(name)]
        assert ops[key]["n"] == put_in.size
        assert ops[key]["mean"] == pytest.approx(put_in.mean())
    rows = prism.summary(prism.fit(tmp_path, seed=1))
    (row,) = [row for row in rows["kernels"] if row["op_kind"] == "all_reduce"]
    assert (row["measure"], row["n"]) == ("transfer", 8) and rows["steps"] == 3
    replay = prism.replay(tmp_path)
    assert prism.summary(replay)["max_abs_error"] < 1e-3
    ends = np.nanmax(TIMES.start + WHOLE_US, axis=(1, 2))
    # nodes count whole microseconds, and clocks are aligned by them
    assert replay["measured_step_time"].values == pytest.approx(1e-6 * np.diff(ends), abs=3e-6)


def test_durations_alone_make_a_library(run, tmp_path):
    chakra.write(tmp_path, PROGRAM, TIMES, timed=False)
    model = tmp_path / "library.nc"
    status, out, _ = run("fit", tmp_path, "--json", "-o", model)
    found = json.loads(out)
    assert status == 0 and found["kind"] == "library"
    kernels = {k["name"]: k for k in found["kernels"]}
    put_in = 1e-6 * WHOLE_US[:, :, place("void reduce_metrics")].mean()
    assert kernels["void reduce_metrics<float>"]["mean"] == pytest.approx(put_in)
    assert json.loads(run("show", model, "--json")[1])["kind"] == "library"
    for command, path in (("replay", tmp_path), ("estimate", model)):
        status, out, err = run(command, path)
        assert (status, out) == (2, "") and path.name in err


def test_zeros_are_counted_and_host_nodes_refused(run, tmp_path):
    path = tmp_path / "x.et"
    made = [chakra.node(i, "k", chakra.COMP, i % 2, 10 + i, is_cpu_op=False) for i in range(1, 9)]
    path.write_bytes(chakra.encode(made))
    assert any("4 of 8 " in note for note in shown(run, path)[0]["notes"])
    made = [chakra.node(i, "aten::mm", chakra.COMP, 5, is_cpu_op=True) for i in range(1, 9)]
    path.write_bytes(chakra.encode(made))
    status, _, err = run("fit", path)
    assert status == 2 and "x.et: 8 nodes" in err


@pytest.mark.parametrize(
    ("comm_type", "kind"),
    [(0, "all_reduce"), (2, "all_gather"), (4, "broadcast"), (6, "all_to_all"),
     (7, "reduce_scatter"), (9, "all_reduce")],
)  # fmt: skip
def test_kinds_of_collectives(run, tmp_path, comm_type, kind):
    made = [chakra.node(i, "comm", chakra.COLL, 20 * i, 100 * i, is_cpu_op=False, stream=20,
                        comm_type=comm_type, comm_size=4_000) for i in (1, 2)]  # fmt: skip
    path = tmp_path / "named.csv"  # found by its content, packed or not
    path.write_bytes(gzip.compress(chakra.encode(made)))
    _, ops = shown(run, path)
    assert ops[kind, kind]["mean"] == pytest.approx(30e-6)


@pytest.mark.parametrize(
    ("marks", "steps"),
    [
        (
            [("step 3", 0, 90), ("step 4", 100, 90), ("batch 8", 0, 40), ("batch 9", 100, 40)],
            [3, 4],
        ),
        (
            [("step 3", 0, 30), ("step 4", 100, 30), ("batch 8", 0, 90), ("batch 9", 100, 90)],
            [8, 9],
        ),
        ([("step", 0, 190), ("batch 8", 0, 40), ("batch 9", 100, 40)], [8, 9]),  # one is no rhythm
        ([("train_step", 0, 90), ("train_step", 10, 20), ("train_step", 100, 90)], [0, 1]),
        (
            [("ProfilerStep#12", 0, 90), ("ProfilerStep#13", 100, 90), ("forward 1", 0, 200)],
            [12, 13],
        ),
        ([("global_step: 41", 0, 90), ("global_step: 42", 100, 90)], [41, 42]),
    ],
)
def test_the_family_of_ranges_that_covers_most_is_the_steps(run, tmp_path, marks, steps):
    host = [chakra.node(i, name, 1, length, 1_000 + start, is_cpu_op=True)
            for i, (name, start, length) in enumerate(marks, 1)]  # fmt: skip
    device = [chakra.node(20 + i, "k", chakra.COMP, 10, 1_020 + 100 * i, is_cpu_op=False)
              for i in (0, 1)]  # fmt: skip
    (tmp_path / "x.et").write_bytes(chakra.encode([*host, *device]))
    found, _ = shown(run, tmp_path / "x.et")
    assert found["steps"] == steps and found["n_steps"] == 2


def test_linked_json(run, tmp_path):
    nodes = [{"id": 1, "name": "ProfilerStep#7", "cat": "user_annotation", "ts": 5.0,
              "inclusive_dur": 100.0},
             {"id": 2, "name": "sgemm", "cat": "kernel", "ts": 10.0, "exclusive_dur": 7.5,
              "inclusive_dur": 8.0, "stream": 7},
             {"id": 3, "name": "ncclDevKernel_ReduceScatter_Sum", "cat": "kernel", "ts": 20.0,
              "inclusive_dur": 9.0, "stream": 20}]  # fmt: skip
    path = tmp_path / "linked.json"
    path.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": nodes}))
    found, ops = shown(run, path)
    assert (found["format"], found["steps"]) == ("chakra", [7, 7])
    assert ops["compute", "gemm"]["mean"] == pytest.approx(7.5e-6)
    assert ops["reduce_scatter", "reduce_scatter"]["mean"] == pytest.approx(9e-6)
    nodes = [{"id": 1, "name": "a\nb", "type": 4, "is_cpu_op": True}]
    path.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "nodes": nodes}))
    status, _, err = run("show", path)
    assert status == 2 and err.count("\n") == 1 and r"a\nb" in err


def test_a_file_cut_short_is_read_so_far(run, tmp_path):
    path = tmp_path / "cut.et"
    whole = chakra.encode(NODES)
    path.write_bytes(whole)
    everything, _ = shown(run, path)
    path.write_bytes(whole[: len(whole) * 2 // 3])
    found, _ = shown(run, path)
    assert 0.5 < found["n_ops"] / everything["n_ops"] < 0.8
    assert found["steps"][0] == 10 and len(found["notes"]) > len(everything["notes"])
