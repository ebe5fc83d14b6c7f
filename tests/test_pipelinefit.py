"""Fit of pipeline traces: known effects come back, small and broken traces give no nonsense."""

import dataclasses

import numpy as np
import pytest
from pipeline_synth import Effects, Layout, as_trace, draw, make_trace, run

from prism.models.pipelinetrace.build import build_trace_graph
from prism.models.pipelinetrace.fit import fit_graph
from prism.models.pipelinetrace.reduce import crossed_table, resample, simplify
from prism.simulation.tracemodel.graph import WORKER, TraceGraph, TraceNode, filled, replay
from prism.simulation.tracemodel.model import draw_durations, synthetic_graph

LAYOUTS = {
    "1f1b": Layout(2, 4, 6, 10),
    "async": Layout(2, 3, 6, 10, p2p="async"),
    "gpipe": Layout(2, 3, 4, 10, schedule="gpipe"),
    "interleaved": Layout(2, 2, 4, 10, "interleaved", "async", 2),
    "no pipeline": Layout(4, 1, 4, 10),
    "one replica": Layout(1, 3, 4, 10),
    "one microbatch": Layout(4, 2, 1, 10),
    "two steps": Layout(2, 2, 4, 2),
    "one worker, one microbatch": Layout(1, 1, 1, 10),
}


def graph_of(layout, effects, seed=1):
    frame, truth = make_trace(layout, effects, seed)
    return build_trace_graph(as_trace(frame)), truth


def group_of(model, op_kind, stage):
    (found,) = [g for g in model.groups if g.op_kind == op_kind and g.stage == stage]
    return found


def chain(durations, kinds=("gap", "op")):
    """Graph of one worker: gaps and ops by turns, [node, replica, step] seconds."""
    nodes = tuple(
        TraceNode(kinds[i % len(kinds)], "optimizer" if kinds[i % len(kinds)] == "op" else
                  "launch_gap", "", f"n{i}", WORKER, (0,), -1, 0, -1, (i - 1,) if i else ())
        for i in range(len(durations))
    )  # fmt: skip
    graph = TraceGraph(
        nodes, durations, np.arange(durations.shape[2]), np.ones(durations.shape[2]), 1,
        durations.shape[1], "none",
    )  # fmt: skip
    return dataclasses.replace(graph, measured=replay(graph))


# ------------------------------------------------------------------------------------ simplify
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_simplify_keeps_every_step(layout):
    effects = Effects(step_sd=0.01, content_sd=0.05, gap_s=1e-5, jitter_s=1e-6)
    graph, _ = graph_of(layout, effects)
    simple = simplify(graph)
    assert len(simple.nodes) < len(graph.nodes)
    assert replay(simple) == pytest.approx(replay(graph), rel=1e-9)


def test_simplify_keeps_steps_with_barriers_that_no_op_names():
    layout = Layout(3, 3, 4, 20)
    effects = Effects(
        content_sd=0.1, gap_s=2e-4, rank_sd=0.02,
        barriers=(("layernorm-grads-all-reduce", "replica", 0),),
    )  # fmt: skip
    graph, _ = graph_of(layout, effects)
    assert any(n.kind == "join" and n.replica == 0 for n in graph.nodes)
    assert replay(simplify(graph)) == pytest.approx(graph.measured, rel=1e-4)


def test_simplify_keeps_large_gaps_and_missing_durations():
    durations = np.ones((6, 2, 3))
    durations[0], durations[2], durations[4] = 1e-7, 0.5, 0.0
    durations[3, 0, 1] = np.nan
    graph = chain(durations)
    simple = simplify(graph)
    assert [n.name for n in simple.nodes] == ["n1", "n2", "n3", "n5"]
    assert np.isnan(simple.durations[2, 0, 1]) and np.isnan(simple.durations).sum() == 1
    assert replay(simple) == pytest.approx(replay(graph), rel=1e-12)
    spike = np.array(durations)
    spike[4, 0, 0] = 0.5  # rare but long: no part of the next op
    assert [n.name for n in simplify(chain(spike)).nodes] == ["n1", "n2", "n3", "n4", "n5"]


# ------------------------------------------------------------------------------ known effects
def test_components_come_back():
    layout = Layout(8, 3, 8, 40)
    effects = Effects(
        rank_sd=0.01, step_sd=0.015, content_sd=0.03, content_last=0.5, residual_sd=0.008,
        first_microbatch=0.97, stage=(1.0, 1.3, 1.1),
    )  # fmt: skip
    rng = np.random.default_rng(5)
    durations, rank, step, _ = draw(layout, effects, rng)
    drift = rng.standard_normal((8, 40))
    for key in durations:
        if key[0] in ("forward", "backward"):
            durations[key] = durations[key] * np.exp(0.006 * drift[key[1]])
    frame, times = run(layout, effects, durations)
    model = fit_graph(build_trace_graph(as_trace(frame)))
    for stage, last in ((0, 1.0), (1, 1.0), (2, 0.5)):
        for kind, power in (("forward", 1.0), ("backward", 1.5)):
            group = group_of(model, kind, stage)
            assert group.content == pytest.approx(0.03 * power * last, rel=0.1)
            assert group.rank_step == pytest.approx(0.006, rel=0.25)
            assert group.residual.std == pytest.approx(0.008, rel=0.1)
            nodes = [i for i, n in enumerate(model.nodes) if n.op_kind == kind]
            here = [i for i in nodes if model.nodes[i].stages == (stage,)]
            first = [i for i in here if model.nodes[i].microbatch == 0]
            later = [i for i in here if model.nodes[i].microbatch > 0]
            ratio = model.mean[first].mean() / model.mean[later].mean()
            assert ratio == pytest.approx(0.97, abs=0.006)
            profile = model.profile[model.group[first[0]], 0]
            true = step[model.steps]
            assert np.corrcoef(profile, true)[0, 1] > 0.85
            assert profile.std() == pytest.approx(true.std() / true.mean(), rel=0.12)
    assert model.lemons == ()
    true_rank = (rank / rank.mean(axis=0)).T
    for k in range(2):
        assert model.rank[k] == pytest.approx(true_rank, abs=0.004)
    simulated = synthetic_graph(model, np.arange(2000) * 10**6, np.random.default_rng(1)).measured
    assert simulated.mean() == pytest.approx(times.mean(), rel=0.005)
    assert simulated.std() / times.std() == pytest.approx(1.0, abs=0.3)


@pytest.mark.parametrize("slow", [{"lemons": {(1, 0): 2.2}}, {"delays": {(1, 0): 0.3}}])
def test_lemons_are_found_and_follow_what_they_did(slow):
    layout = Layout(5, 2, 8, 40)
    effects = Effects(rank_sd=0.004, step_sd=0.02, content_sd=0.05, residual_sd=0.01, **slow)
    graph, _ = graph_of(layout, effects)
    model = fit_graph(graph)
    ((replica, stage, slowdown),) = model.lemons
    assert (replica, stage) == (1, 0)
    expected = {"forward": 2.2, "backward": 2.2} if "lemons" in slow else {
        "forward": 1.0 + 0.3 / 0.2, "backward": 1.0 + 0.3 / 0.4
    }  # fmt: skip
    assert slowdown == pytest.approx(np.mean(list(expected.values())), rel=0.03)
    for k, kind in enumerate(model.rank_kinds):
        assert model.rank[k, 0, 1] == pytest.approx(expected[kind], rel=0.02)
        share = 1.0 if "lemons" in slow else 1.0 / expected[kind]
        assert model.follows[k, 0, 1] == pytest.approx(share, abs=0.08)
        group = group_of(model, kind, 0)
        power = 1.0 if kind == "forward" else 1.5
        assert group.content == pytest.approx(0.05 * power, rel=0.1)  # the body's, undiluted
        assert group.residual.std == pytest.approx(0.01, rel=0.1)
        profile = model.profile[model.groups.index(group)]
        assert profile[0].std() == pytest.approx(0.02, rel=0.45)
        assert profile[0] == pytest.approx(profile[2])
    simulated = synthetic_graph(model, np.arange(3000) * 10**6, np.random.default_rng(2))
    nodes = [i for i, n in enumerate(model.nodes) if n.op_kind == "forward" and n.stages == (0,)]
    measured = filled(simplify(graph))[nodes]
    for replica in (0, 1):
        here, there = simulated.durations[nodes, replica], measured[:, replica]
        assert here.mean() == pytest.approx(there.mean(), rel=0.01)
        assert here.std() == pytest.approx(there.std(), rel=0.2)


def test_content_that_speeds_up_where_it_slows_others_down_keeps_its_sign():
    layout, effects = Layout(4, 4, 8, 20), Effects(residual_sd=0.004)
    rng = np.random.default_rng(3)
    durations, *_ = draw(layout, effects, rng)
    content = rng.standard_normal((4, 8, 20))
    for key in durations:
        if key[0] in ("forward", "backward"):
            _, r, s, _, m = key
            durations[key] = durations[key] * np.exp((0.03, 0.03, 0.02, -0.02)[s] * content[r, m])
    frame, _ = run(layout, effects, durations)
    model = fit_graph(build_trace_graph(as_trace(frame)))
    sign = np.sign(group_of(model, "forward", 0).content)
    for kind in ("forward", "backward"):
        assert sign * group_of(model, kind, 0).content == pytest.approx(0.03, rel=0.1)
        assert sign * group_of(model, kind, 3).content == pytest.approx(-0.02, rel=0.1)
    drawn = draw_durations(model, np.arange(400) * 10**6, np.random.default_rng(4))
    table = crossed_table(
        dataclasses.replace(
            synthetic_graph(model, np.arange(400), np.random.default_rng(4)), durations=drawn
        )
    )
    log = np.log(table.seconds)
    by_stage = {c.stage: log[i] for i, c in enumerate(table.columns) if c.op_kind == "forward"}
    assert np.corrcoef(by_stage[0].ravel(), by_stage[3].ravel())[0, 1] < -0.9
    assert by_stage[3].std() == pytest.approx(0.0204, rel=0.1)


def test_memory_over_steps_is_found_and_absent_memory_is_not():
    graph, _ = graph_of(Layout(2, 2, 4, 120), Effects(step_sd=0.02, step_memory=0.9))
    model = fit_graph(graph)
    assert 3.0 < model.correlation_steps < 40.0  # truth: -1 / ln 0.9 = 9.5
    assert model.correlation_share > 0.5
    graph, _ = graph_of(Layout(2, 2, 4, 120), Effects(step_sd=0.02), seed=2)
    assert fit_graph(graph).correlation_steps == 0.0


# ------------------------------------------------------------------------------- small traces
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    "effects",
    [
        Effects(step_sd=0.02, content_sd=0.1, rank_sd=0.01, gap_s=0.002),
        Effects(residual_sd=0.0, other_sd=0.0),
        Effects(step_sd=0.02, missing=0.03),
    ],
    ids=["effects", "zero variance", "missing"],
)
def test_no_trace_gives_nonsense(layout, effects):
    if effects.missing and (layout.steps * layout.microbatches < 20 or layout.p2p == "async"):
        effects = dataclasses.replace(effects, missing=0.0)  # messages are paired by their order
    graph, truth = graph_of(layout, effects)
    model = fit_graph(graph)
    for name in ("mean", "profile", "rank", "follows", "weight", "rank_power"):
        values = getattr(model, name)
        assert np.isfinite(values).all() and (values >= 0.0).all(), name
    assert model.weight.sum() == pytest.approx(1.0)
    if model.profile.shape[2]:
        assert model.profile.mean(axis=2) == pytest.approx(1.0)
    drawn = synthetic_graph(model, np.arange(200) * 10**6, np.random.default_rng(1))
    assert np.isfinite(drawn.durations).all() and (drawn.durations >= 0.0).all()
    assert drawn.measured.mean() == pytest.approx(graph.measured.mean(), rel=0.06)
    if effects.residual_sd == 0.0:
        assert drawn.measured == pytest.approx(truth.step_times.mean(), rel=1e-6)
    again = resample(graph, 100, np.random.default_rng(1))
    assert np.isfinite(again).all() and again.mean() == pytest.approx(
        graph.measured.mean(), rel=0.06
    )


def test_a_worker_that_lacks_a_whole_step_or_an_op_everywhere():
    frame, truth = make_trace(Layout(3, 2, 4, 10), Effects(content_sd=0.05, step_sd=0.02), 1)
    compute = frame["op_kind"].isin(["forward", "backward"])
    gone = (frame["dp_rank"] == 1) & (frame["stage"] == 0) & (frame["step"] == 4) & compute
    gone |= (frame["dp_rank"] == 2) & (frame["name"] == "forward-compute") & (
        frame["microbatch"] == 3
    )  # fmt: skip
    graph = build_trace_graph(as_trace(frame[~gone]))
    assert np.isnan(graph.durations).any()
    model = fit_graph(graph)
    drawn = synthetic_graph(model, np.arange(300) * 10**6, np.random.default_rng(1))
    assert np.isfinite(drawn.measured).all()
    assert drawn.measured.mean() == pytest.approx(truth.step_times.mean(), rel=0.03)
    assert np.isfinite(resample(graph, 50, np.random.default_rng(1))).all()


def test_ops_placed_between_neighbours_are_replayed_but_not_measured():
    effects = Effects(residual_sd=0.005, gap_s=0.004, missing=0.02)
    frame, truth = make_trace(Layout(4, 2, 6, 12), effects, 3)
    graph = build_trace_graph(as_trace(frame))
    assert graph.placed is not None and graph.placed.any()
    assert np.isfinite(graph.durations[graph.placed]).all()
    np.testing.assert_allclose(replay(graph), truth.step_times, rtol=5e-3)
    for part in (simplify(graph), graph.select(np.arange(5))):
        crossed = crossed_table(part)
        for c, nodes in enumerate(crossed.node):
            for m, i in enumerate(nodes):
                lost = part.placed[i] | ~np.isfinite(part.durations[i])
                assert np.array_equal(np.isnan(crossed.seconds[c, :, :, m]), lost)
