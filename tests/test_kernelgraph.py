"""Step graphs of generated traces: edges recovered, what-ifs as in the true graph."""

import json
from dataclasses import replace

import kineto_synth as synth
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import prism
from prism import PrismError
from prism.analyses.replay import replay_trace
from prism.models.kerneltrace.graph import step_graph
from prism.models.kerneltrace.steps import split_steps
from prism.models.kerneltrace.table import kernel_table
from prism.simulation.tracemodel.graph import ends_of, filled, replay, span
from prism.traces import read_trace
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
    return read_trace(paths), times, duration, host


@pytest.fixture(
    scope="module", params=[(1, False), (4, False), (2, True), (2, False, 11), (3, False, 12)]
)
def made(request, tmp_path_factory):
    trace, *truth = make(tmp_path_factory.mktemp("trace"), *request.param)
    return trace, step_graph(trace, STEP), *truth, request.param[1]


def wait_edges(graph):
    """Waits of a graph between streams of the first rank, in numbers of the program's calls."""
    calls = [i for i, call in enumerate(PROGRAM) if call.do != "wait"]
    event, stream = graph.roles.event, graph.stream
    found = set()
    for i in np.flatnonzero((graph.roles.rank == 0) & graph.bounds):
        for p in graph.nodes[i].preds:
            if graph.roles.role[p] == "device" and stream[p] != stream[i]:
                found.add((calls[event[p]], calls[event[i]]))
    return found


def own(graph):
    """Durations of the graph's own step."""
    return graph.durations[:, :, graph.own]


def gpu_span(graph, durations, stage=0):
    """Span of one rank, [step] s."""
    return span(ends_of(graph, durations), durations, graph.taken_by(stage))


def test_edges_are_recovered_and_none_is_made_up(made):
    _, graph, times, *_, recorded = made
    found = wait_edges(graph)
    assert NEVER_BINDING in times.edges and len(times.edges) == 14
    assert found == (times.edges if recorded else times.edges - {NEVER_BINDING})
    n = len(found) * len(graph.ranks)
    expected = (n, 0) if recorded else (0, n)
    assert (graph.edges_recorded, graph.edges_inferred) == expected


def test_replay_of_every_step_is_its_measured_span(made):
    found = prism.summary(replay_trace(made[0]))
    assert len(found["gpu_spans"]) == 8 * len(made[0].meta["ranks"])
    assert max(abs(row["error"]) for row in found["gpu_spans"]) < 0.002
    assert found["max_abs_error"] < 0.002
    assert found["unexplained_starts"] <= 0.01 * max(1, found["late_starts"])


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_changing_a_kernel_moves_the_step_as_the_true_graph_does(made, factor):
    _, graph, times, duration, host, _ = made
    moved = []
    for name in sorted({call.name for call in PROGRAM if call.name}):
        calls = [i for i, call in enumerate(PROGRAM) if call.name == name]
        changed = duration.copy()
        changed[:, :, calls] *= factor
        true = synth.simulate(PROGRAM, changed, host).span(STEP - 10, 0) * 1e-6
        theirs = np.array([node.name == name for node in graph.nodes])[:, None, None]
        what_if = np.where(theirs, factor, 1.0) * own(graph)
        assert gpu_span(graph, what_if) == pytest.approx(true, rel=0.01)
        moved.append(abs(true / (times.span(STEP - 10, 0) * 1e-6) - 1.0))
    assert max(moved) > 0.03


def test_without_its_inferred_edges_the_graph_fails(made):
    # negative control: the edges carry the what-if, not slack in the check
    _, graph, _, duration, host, _ = made
    role, stream = graph.roles.role, graph.stream
    nodes = list(graph.nodes)
    for i in np.flatnonzero(graph.bounds):
        edges = zip(nodes[i].preds, nodes[i].lags or (0.0,) * len(nodes[i].preds), strict=True)
        kept = [(p, x) for p, x in edges if role[p] != "device" or stream[p] == stream[i]]
        preds, lags = zip(*kept, strict=True)
        nodes[i] = nodes[i]._replace(preds=preds, lags=lags)
    cut = replace(graph, nodes=tuple(nodes))
    calls = [i for i, call in enumerate(PROGRAM) if call.do == "collective"]
    changed = duration.copy()
    changed[:, :, calls] *= 2.0
    true = synth.simulate(PROGRAM, changed, host).span(STEP - 10, 0) * 1e-6
    theirs = (graph.op_kinds() == "all_reduce")[:, None, None]
    what_if = np.where(theirs, 2.0, 1.0) * own(graph)
    assert abs(gpu_span(cut, what_if)[0] / true - 1.0) > 0.02


def test_edges_come_from_the_other_steps_only(tmp_path):
    trace, times, *_ = make(tmp_path, 1, n_steps=2)
    one = step_graph(trace, 11)
    assert 0 < one.edges_inferred <= 13 and wait_edges(one) <= times.edges
    one_step, *_ = make(tmp_path, 1, n_steps=1)
    assert step_graph(one_step).edges_inferred == 0
    assert any("one step" in note for note in prism.summary(replay_trace(one_step))["notes"])


def test_late_starts_that_nothing_explains_give_no_edges(tmp_path):
    """Two streams that never wait for each other; every tenth kernel starts late by chance."""
    program = [
        synth.Call("launch", f"void {name}{k % 7}", stream, mean, host_us=12.0)
        for k in range(60) for name, stream, mean in (("a", 7, 60.0), ("b", 21, 45.0))
    ]  # fmt: skip
    program.append(synth.Call("sync", stream=7, host_us=5.0))
    n_late = n_edges = 0
    for seed in range(3):
        stalls = np.random.default_rng(seed)
        shape = (4, 1, len(program))
        late_us = np.where(stalls.random(shape) < 0.1, stalls.uniform(10.0, 60.0, shape), 0.0)
        times = synth.simulate(program, *synth.draw(program, 4, 1, seed=seed), late_us=late_us)
        (tmp_path / str(seed)).mkdir()
        graph = step_graph(read_trace(synth.write(tmp_path / str(seed), program, times)))
        n_late, n_edges = n_late + graph.n_late, n_edges + graph.edges_inferred
    assert n_late > 60 and n_edges <= 0.05 * n_late


def test_collective_starts_with_its_last_member(tmp_path):
    trace, *_ = make(tmp_path, 2)
    graph = step_graph(trace, STEP)
    shared = [node for node in graph.nodes if len(node.stages) > 1]
    assert len(shared) == 6 and {node.op_kind for node in shared} == {"all_reduce"}
    assert (graph.roles.role == "arrival").sum() == 12
    # a slow rank holds the other one up through the collective
    mine = (graph.roles.rank == 1) & (graph.roles.role == "device")
    mine &= graph.op_kinds() != "all_reduce"
    slow = np.where(mine[:, None, None], 2.0, 1.0) * own(graph)
    held = [gpu_span(graph, slow, stage)[0] for stage in (0, 1)]
    assert held[0] > 1.3 * gpu_span(graph, own(graph))[0]
    assert replay(graph, slow)[0] >= held[1] >= held[0] * 0.9


def test_durations_are_columns(tmp_path):
    trace, *_ = make(tmp_path, 2)
    graph = step_graph(trace)
    many = own(graph) * np.array([1.0, 2.0, 1.0])
    assert ends_of(graph, many).shape == (len(graph.nodes), 1, 3)
    spans = gpu_span(graph, many)
    assert spans[0] == spans[2] == gpu_span(graph, own(graph))[0] and spans[1] > 1.9 * spans[0]
    with pytest.raises(PrismError, match="node"):
        replay(graph, np.ones((3, 1, 1)))


def test_longer_nodes_never_shorten_the_step(tmp_path):
    trace = make(tmp_path, 1)[0]
    graph = step_graph(trace)
    end = ends_of(graph, own(graph)).max()
    longer = np.random.default_rng(0).exponential(0.2, (len(graph.nodes), 1, 20))
    assert (ends_of(graph, own(graph) * (1.0 + longer)).max(axis=(0, 1)) >= end).all()


def test_the_typical_steps_graph_rebuilds_the_measured_steps(tmp_path):
    trace, *_ = make(tmp_path, 2)
    steps = split_steps(trace)
    graph = step_graph(steps)
    assert graph.step == steps.typical() and len(graph.steps) == 8
    assert np.isfinite(graph.durations).all() and graph.durations.min() >= 0.0
    measured = [steps.views[step, 0].span() for step in steps.steps]
    assert gpu_span(graph, graph.durations) == pytest.approx(measured, rel=0.01)
    assert replay(graph) == pytest.approx(graph.measured, rel=0.01)


def test_kernel_table_has_counts_spreads_and_launch_gaps(tmp_path):
    trace, *_ = make(tmp_path, 2)
    table = kernel_table(trace)
    (named,) = (row for row in table if row.name.startswith("nccl"))
    # both ranks record a transfer: it counts once, and its time on each
    assert (named.measure, named.n) == ("transfer", 6 * 8)
    # six transfers of 330 us x the larger of two factors of CV 10 %
    assert named.cv == pytest.approx(0.083, rel=0.25)
    gap = next(row for row in table if row.op_kind == "launch_gap")
    assert gap.measure == "host" and gap.n >= 8
    adam = next(row for row in table if row.kernel_class == "optimizer")
    assert adam.mean == pytest.approx(90e-6, rel=0.1) and adam.cv == pytest.approx(0.1, rel=0.3)
    assert 1.1 < adam.p99_p50 < 1.5
    lone = kernel_table(read_trace([tmp_path / "rank0.json"]))
    assert [row.measure for row in lone if row.name.startswith("nccl")] == ["includes waiting"]


def test_other_formats_and_steps_are_refused(tmp_path):
    tidy = make_trace({"duration": [1.0]}, "ops.csv", "tidy")
    with pytest.raises(PrismError, match=r"ops\.csv: .*tidy"):
        kernel_table(tidy)
    trace, *_ = make(tmp_path, 1)
    with pytest.raises(PrismError, match="step 99 .*10, 11"):
        step_graph(trace, 99)


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
        trace = read_trace(paths)
        found = prism.summary(replay_trace(trace))
        graph = step_graph(trace)
    except PrismError as error:
        assert "expected" in str(error)
        return
    assert all(np.isfinite(row["replayed"]) for row in found["gpu_spans"])
    assert (filled(graph) >= 0.0).all()
