"""Who meets: named, by class, by coinciding ends; and barriers that no op names."""

from dataclasses import replace

import numpy as np
import pytest
from campaign import some
from pipeline_synth import Effects, Layout, as_trace, make_trace, run

from prism.models.pipelinetrace.build import build_trace_graph
from prism.models.pipelinetrace.groups import (
    Barrier,
    coincide,
    hidden_barriers,
    named_scope,
    release,
)
from prism.simulation.tracemodel.graph import REPLICA, STAGE, WORKER, WORLD, replay

EFFECTS = Effects(residual_sd=0.03, content_sd=0.1, rank_sd=0.02, gap_s=0.004)
SCATTER, NORM = "grads-reduce-scatter", "layernorm-grads-all-reduce"
WHERE = {
    (SCATTER, "replica", -1): ("of replica", SCATTER),
    (SCATTER, "replica", 0): ("replica 0", SCATTER),
    (NORM, "stage", 0): ("stage 0", NORM),
    (NORM, "stage", 3): ("stage 3", NORM),
    (NORM, "world", -1): ("all workers", NORM),
}


@pytest.mark.parametrize("barrier", WHERE)
@pytest.mark.parametrize("p2p", ["blocking", "async"])
@pytest.mark.parametrize("missing", [0.0, 0.005])
def test_hidden_barriers_are_found_where_they_are(barrier, p2p, missing):
    effects = replace(EFFECTS, barriers=(barrier,))
    for seed in some(range(3), 3):
        layout = Layout(2, 4, 4, 8, p2p=p2p)
        frame, truth = make_trace(layout, replace(effects, missing=missing), seed)
        graph = build_trace_graph(as_trace(frame))
        found = [n for n in graph.notes if "barrier" in n]
        assert all(part in note for part in WHERE[barrier] for note in found)
        assert (
            len(found)
            == graph.edges_inferred
            == (layout.replicas if "of r" in WHERE[barrier][0] else 1)
        )
        if missing:
            continue
        np.testing.assert_allclose(replay(graph), truth.step_times, rtol=1e-6)
        slow = {k: v * (1.5 if k[:3] == ("backward", 0, 2) else 1.0)
                for k, v in truth.durations.items()}  # fmt: skip
        changed = graph.durations.copy()
        changed[graph.where(op_kind="backward", stages=(2,)), 0] *= 1.5
        _, what_if = run(layout, effects, slow)
        np.testing.assert_allclose(replay(graph, changed), what_if, rtol=1e-6)


@pytest.mark.parametrize("gap_s", [0.0, 0.004, 0.02])
@pytest.mark.parametrize(
    "layout", [Layout(1, 2, 1, 6, p2p="async"), Layout(2, 4, 4, 6), Layout(4, 2, 3, 2)]
)
def test_no_barrier_is_found_where_none_is(layout, gap_s):
    for seed in some(range(15), 3):
        frame, _ = make_trace(layout, replace(EFFECTS, gap_s=gap_s), seed)
        graph = build_trace_graph(as_trace(frame))
        assert graph.notes == () and graph.edges_inferred == 0


def test_hidden_barriers_of_made_up_times():
    g = np.random.default_rng(0)
    ready = g.uniform(0.0, 2.0, (3, 4, 20))
    for barrier in (Barrier(STAGE, 1), Barrier(REPLICA, 2), Barrier(WORLD, -1)):
        starts = release(ready, barrier) + g.exponential(1e-3, ready.shape)
        assert hidden_barriers(ready, starts, 10.0) == [barrier]
    each = starts - release(ready, Barrier(WORLD, -1)) + release(ready, Barrier(REPLICA, -1))
    assert hidden_barriers(ready, each, 10.0) == [Barrier(REPLICA, r) for r in range(4)]
    assert hidden_barriers(ready, ready + 1e-3, 10.0) == []
    assert hidden_barriers(ready[..., :3], starts[..., :3], 10.0) == []  # too few steps
    starts[0, 0] = np.nan
    assert hidden_barriers(ready, starts, 10.0) == [Barrier(WORLD, -1)]


def meeting(scope, seed=0, shape=(3, 4, 20)):
    g = np.random.default_rng(seed)
    starts = g.uniform(0.0, 1.0, shape)
    return starts, scope.latest(starts) + 0.1


@pytest.mark.parametrize("scope", [WORKER, REPLICA, STAGE, WORLD])
def test_coinciding_ends_tell_who_meets(scope):
    starts, ends = meeting(scope)
    meets = {WORKER: set(), REPLICA: {REPLICA}, STAGE: {STAGE}, WORLD: {REPLICA, STAGE, WORLD}}
    for other in (REPLICA, STAGE, WORLD):
        assert coincide(starts, ends, other) == (other in meets[scope])
    ends[:, :, ::3] = np.nan
    starts[:, :, ::3] = np.nan
    assert coincide(starts, ends, scope)


def test_a_class_unlike_what_happened_gets_a_note():
    effects = replace(EFFECTS, lemons={(1, 0): 1.5})
    frame, truth = make_trace(Layout(4, 4, 4, 6), effects)
    trace = as_trace(frame)
    scatter = trace.ops["name"] == SCATTER  # each worker alone
    trace.ops.loc[scatter, "duration"] = 0.05
    graph = build_trace_graph(trace)
    assert any(SCATTER in n and "class" in n for n in graph.notes)
    assert all(graph.nodes[i].scope == WORKER for i in graph.where(name=SCATTER))


def test_named_scope():
    at = np.indices((3, 4))
    assert named_scope(np.full((3, 4), -1), None) is None
    assert named_scope(at[0], None) == STAGE and named_scope(at[1] + 5, None) == REPLICA
    assert named_scope(np.zeros((3, 4), int), STAGE) == WORLD
    assert named_scope(at[0] * 4 + at[1], STAGE) == WORKER
    assert named_scope(at[0] * 2 + at[1] // 2, STAGE) is None  # halves of a stage
    ends = np.where(at[0] == 1, -1, at[1])  # first and last stage only
    assert named_scope(ends, REPLICA) == REPLICA
    alone = np.array([[0], [1], [2]])  # one replica: stage and worker are the same
    assert named_scope(alone, STAGE) == STAGE and named_scope(alone, None) == STAGE
