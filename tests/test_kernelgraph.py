"""Step graphs of generated traces: edges recovered, what-ifs as in the true graph."""

import json

import kineto_synth as synth
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.common.errors import PrismError
from prism.models.kerneltrace.graph import EDGE_KINDS, NODE_KINDS, KernelGraph, replay
from prism.models.kerneltrace.infer import infer_graph
from prism.models.kerneltrace.laws import kernel_table, step_laws
from prism.models.kerneltrace.replay import node_durations, replay_trace, typical_step
from prism.models.kerneltrace.steps import split_steps
from prism.traces.kineto import read_kineto
from prism.traces.table import make_trace

PROGRAM = synth.training_step()
STEP = 13
NEVER_BINDING = (94, 97)
"""A wait of the program whose awaited kernel always ends long before: no trace can show it."""


def make(folder, n_ranks, recorded=False, seed=3, program=PROGRAM, n_steps=8):
    duration, host = synth.draw(program, n_steps, n_ranks, seed=seed)
    times = synth.simulate(program, duration, host)
    offsets = 12_345.0 * np.arange(n_ranks)
    paths = synth.write(folder, program, times, offsets_us=offsets, recorded=recorded)
    return read_kineto(paths), times, duration, host


@pytest.fixture(
    scope="module", params=[(1, False), (4, False), (2, True), (2, False, 11), (3, False, 12)]
)
def made(request, tmp_path_factory):
    return *make(tmp_path_factory.mktemp("trace"), *request.param), request.param[1]


def wait_edges(graph, rank=0):
    """Waits of a graph in numbers of the program's calls."""
    calls = [i for i, call in enumerate(PROGRAM) if call.do != "wait"]
    kinds = [EDGE_KINDS.index("recorded"), EDGE_KINDS.index("inferred")]
    found = set()
    for i in np.flatnonzero(graph.rank == rank):
        for e in range(graph.pred_ptr[i], graph.pred_ptr[i + 1]):
            if graph.edge_kind[e] in kinds:
                found.add((calls[graph.event[graph.pred[e]]], calls[graph.event[i]]))
    return found


def test_edges_are_recovered_and_none_is_made_up(made):
    trace, times, *_, recorded = made
    graph = infer_graph(trace, STEP)
    found = wait_edges(graph)
    assert NEVER_BINDING in times.edges and len(times.edges) == 14
    assert found == (times.edges if recorded else times.edges - {NEVER_BINDING})
    kind, other = ("recorded", "inferred") if recorded else ("inferred", "recorded")
    assert graph.count_edges(kind) == len(found) * len(set(graph.rank) - {-1})
    assert graph.count_edges(other) == 0


def test_replay_of_every_step_is_its_measured_span(made):
    found = replay_trace(made[0])
    assert len(found["steps"]) == 8 * len(made[0].meta["ranks"])
    assert found["max_abs_error"] < 0.002
    assert found["unexplained_starts"] <= 0.01 * max(1, found["late_starts"])


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_changing_a_kernel_moves_the_step_as_the_true_graph_does(made, factor):
    trace, times, duration, host, _ = made
    graph = infer_graph(trace, STEP)
    moved = []
    for name in sorted({call.name for call in PROGRAM if call.name}):
        calls = [i for i, call in enumerate(PROGRAM) if call.name == name]
        changed = duration.copy()
        changed[:, :, calls] *= factor
        true = synth.simulate(PROGRAM, changed, host).span(STEP - 10, 0) * 1e-6
        keys = [i for i, key in enumerate(graph.keys) if key.name == name]
        what_if = np.where(np.isin(graph.key, keys), factor, 1.0) * graph.duration
        assert replay(graph, what_if).gpu_span[0] == pytest.approx(true, rel=0.01)
        moved.append(abs(true / (times.span(STEP - 10, 0) * 1e-6) - 1.0))
    assert max(moved) > 0.03


def test_without_its_inferred_edges_the_graph_fails(made):
    # negative control: the edges carry the what-if, not slack in the check
    trace, _, duration, host, recorded = made
    graph = infer_graph(trace, STEP)
    kinds = [EDGE_KINDS.index("recorded"), EDGE_KINDS.index("inferred")]
    lag = np.where(np.isin(graph.edge_kind, kinds), -np.inf, graph.lag)
    cut = KernelGraph(**{**vars(graph), "lag": lag})
    calls = [i for i, call in enumerate(PROGRAM) if call.do == "collective"]
    changed = duration.copy()
    changed[:, :, calls] *= 2.0
    true = synth.simulate(PROGRAM, changed, host).span(STEP - 10, 0) * 1e-6
    keys = [i for i, key in enumerate(graph.keys) if key.op_kind == "all_reduce"]
    what_if = np.where(np.isin(graph.key, keys), 2.0, 1.0) * graph.duration
    assert abs(replay(cut, what_if).gpu_span[0] / true - 1.0) > 0.02


def test_edges_come_from_the_other_steps_only(tmp_path):
    trace, times, *_ = make(tmp_path, 1, n_steps=3)
    steps = split_steps(trace)
    alone = infer_graph(steps, 11, from_steps=[11])
    assert alone.count_edges("inferred") == 0
    one = infer_graph(steps, 11, from_steps=[10])
    assert 0 < one.count_edges("inferred") <= 13 and wait_edges(one) <= times.edges
    one_step, *_ = make(tmp_path, 1, n_steps=1)
    assert any("one step" in note for note in replay_trace(one_step)["notes"])


def test_collective_starts_with_its_last_member(tmp_path):
    trace, times, *_ = make(tmp_path, 2)
    graph = infer_graph(trace, STEP)
    assert graph.nodes("join").size == 6 and graph.nodes("arrival").size == 12
    # a slow rank holds the other one up through the collective
    slow = graph.duration.copy()
    mine = (graph.rank == 1) & (graph.kind == NODE_KINDS.index("device"))
    mine &= np.array([key.op_kind not in ("all_reduce",) for key in graph.keys])[graph.key]
    slow[mine] *= 2.0
    base, held = replay(graph), replay(graph, slow)
    assert held.gpu_span[0] > 1.3 * base.gpu_span[0]
    assert held.span >= held.gpu_span[1] >= held.gpu_span[0] * 0.9


def test_replicates_are_columns(tmp_path):
    trace, *_ = make(tmp_path, 2)
    graph = infer_graph(trace, typical_step(trace))
    many = graph.duration[:, None] * np.array([1.0, 2.0, 1.0])
    spans = replay(graph, many)
    assert spans.start.shape == (graph.duration.size, 3)
    assert spans.gpu_span[0][0] == spans.gpu_span[0][2] == replay(graph).gpu_span[0]
    assert spans.gpu_span[0][1] > 1.9 * spans.gpu_span[0][0]
    with pytest.raises(PrismError, match="node"):
        replay(graph, np.ones(3))


def test_longer_nodes_never_shorten_the_step(tmp_path):
    trace = make(tmp_path, 1)[0]
    graph = infer_graph(trace, typical_step(trace))
    end = replay(graph).end.max()
    generator = np.random.default_rng(0)
    for _ in range(20):
        longer = graph.duration * (1.0 + generator.exponential(0.2, graph.duration.size))
        assert replay(graph, longer).end.max() >= end


def test_step_laws_rebuild_the_measured_steps(tmp_path):
    trace, *_ = make(tmp_path, 2)
    laws = step_laws(trace)
    steps = split_steps(trace)
    assert laws.graph.step == typical_step(steps) and len(laws.steps) == 8
    assert laws.step_effect.mean() == pytest.approx(1.0, abs=1e-9)
    graphs = [infer_graph(steps, step) for step in steps.steps]
    durations = node_durations(steps, laws.graph, graphs)
    assert np.allclose(np.nanmean(durations, axis=1), laws.nominal)
    spans = replay(laws.graph, durations).gpu_span[0]
    measured = [graph.measured_span(0) for graph in graphs]
    assert spans == pytest.approx(measured, rel=0.01)


def test_kernel_table_has_counts_laws_and_the_host(tmp_path):
    trace, times, *_ = make(tmp_path, 2)
    table = kernel_table(trace)
    named = table[table["name"].str.startswith("nccl")]
    assert named["measure"].tolist() == ["transfer"] and named["n"].tolist() == [6 * 8 * 2]
    assert named["waiting_share"].iloc[0] > 0.0
    # six transfers of 330 us x the larger of two factors of CV 10 %, each seen on both ranks
    assert named["cv"].iloc[0] == pytest.approx(0.083, rel=0.25)
    gap = table[table["op_kind"] == "launch_gap"]
    assert gap["measure"].tolist() == ["host"] and gap["n"].iloc[0] >= 8
    adam = table[table["kernel_class"] == "optimizer"].iloc[0]
    assert adam["mean"] == pytest.approx(90e-6, rel=0.1) and adam["cv"] == pytest.approx(
        0.1, rel=0.3
    )
    assert 1.1 < adam["p99_p50"] < 1.5
    one = read_kineto([tmp_path / "rank0.json"])
    lone = kernel_table(one)
    assert lone.loc[lone["name"].str.startswith("nccl"), "measure"].tolist() == ["includes waiting"]


def test_other_formats_and_steps_are_refused(tmp_path):
    tidy = make_trace({"duration": [1.0]}, "ops.csv", "tidy")
    with pytest.raises(PrismError, match=r"ops\.csv: .*tidy"):
        kernel_table(tidy)
    trace, *_ = make(tmp_path, 1)
    with pytest.raises(PrismError, match="step 99 .*10, 11"):
        infer_graph(trace, 99)


_NAMES = (
    "ncclKernel_x", "ProfilerStep#3", "ProfilerStep#4", "k", "nccl:all_reduce", "cudaLaunchKernel",
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaStreamWaitEvent",
    "Memcpy DtoH (Device -> Pageable)",
)  # fmt: skip
_EVENT = st.fixed_dictionaries(
    {
        "ph": st.just("X"),
        "cat": st.sampled_from(["kernel", "gpu_memcpy", "cuda_runtime", "cpu_op", "cuda_sync"]),
        "name": st.sampled_from(_NAMES),
        "ts": st.floats(0, 1e3),
        "dur": st.floats(0, 100),
        "tid": st.integers(0, 2),
        "args": st.fixed_dictionaries(
            {"correlation": st.integers(0, 6), "stream": st.integers(0, 2)},
            optional={
                "wait_on_stream": st.integers(0, 2),
                "wait_on_cuda_event_record_corr_id": st.integers(0, 6),
            },
        ),
    }
)


@given(st.lists(st.lists(_EVENT, min_size=4, max_size=25), min_size=1, max_size=2))
def test_any_trace_is_replayed_or_refused(tmp_path_factory, ranks):
    folder = tmp_path_factory.mktemp("any")
    paths = [folder / f"{i}.json" for i in range(len(ranks))]
    for path, events in zip(paths, ranks, strict=True):
        path.write_text(json.dumps({"traceEvents": events}))
    try:
        trace = read_kineto(paths)
        found = replay_trace(trace)
        laws = step_laws(trace)
    except PrismError as error:
        assert "expected" in str(error)
        return
    assert all(np.isfinite(row["replayed"]) for row in found["steps"])
    assert (laws.nominal >= 0.0).all()
