"""Traces of known graphs: replay gives their steps, and what-ifs those the job would have had."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from campaign import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pipeline_synth import Effects, Layout, as_production, as_trace, make_trace, run

from prism import PrismError
from prism.models.fit import warnings_of
from prism.models.pipelinetrace.build import build_trace_graph
from prism.models.pipelinetrace.fit import fit_graph
from prism.models.pipelinetrace.laying import Item, Laying
from prism.models.pipelinetrace.times import read_times
from prism.simulation.tracemodel.graph import REPLICA, replay
from prism.traces import make_trace as make_trace_table
from prism.traces import read_trace

VARIED = Effects(residual_sd=0.03, content_sd=0.02, rank_sd=0.02, step_sd=0.02, gap_s=0.004)
SHAPE = Layout(stages=3, microbatches=5, steps=4)  # a stage between others, a steady state
LAYOUTS = {
    "1f1b": SHAPE,
    "1f1b-async": replace(SHAPE, p2p="async"),
    "gpipe": replace(SHAPE, schedule="gpipe"),
    "gpipe-async": replace(SHAPE, schedule="gpipe", p2p="async"),
    "interleaved": Layout(2, 2, 4, 4, schedule="interleaved", p2p="async", chunks=2),
    "interleaved3": Layout(2, 3, 6, 5, schedule="interleaved", p2p="async", chunks=3),
    "pp1": replace(SHAPE, stages=1),
    "dp1": replace(SHAPE, replicas=1),
    "pp1-dp1": replace(SHAPE, replicas=1, stages=1),
    "pp2": Layout(replicas=4, stages=2, microbatches=5, steps=4, gather="last"),
    "pp2-async": Layout(replicas=3, stages=2, microbatches=5, steps=4, p2p="async"),
    "few-microbatches": replace(SHAPE, microbatches=2),
    "one-microbatch": replace(SHAPE, microbatches=1, gather="none"),
    "two-steps": replace(SHAPE, steps=2),
}
RECORDINGS = {
    "lemon": replace(VARIED, lemons={(1, 0): 2.4}),
    "delay": replace(VARIED, delays={(0, 0): 0.1}),
    "uneven stages": replace(VARIED, stage=(1.0, 0.7)),
    "groups": replace(VARIED, groups=True),
    "verbs": replace(VARIED, wording="verbs"),
    "short": replace(VARIED, wording="short"),
    "batched": replace(VARIED, wording="batched"),
}


def changed(truth, generator):
    """Other durations of everything, and the same for a graph's nodes."""
    shape = (truth.layout.steps,)
    factor = {k: generator.uniform(0.5, 2.0, shape) if k[0] in ("forward", "backward") else None
              for k in truth.durations}  # fmt: skip
    whole = {"transfer": 20.0, "gap": 3.0, "optimizer": 2.0, "join": 1.0}
    durations = {
        k: v * (whole.get(k[0], 4.0) if factor[k] is None else factor[k])
        for k, v in truth.durations.items()
    }

    def of(graph):
        out = graph.durations.copy()
        for i, n in enumerate(graph.nodes):
            for r in range(graph.n_replicas):
                key = (n.op_kind, r, n.stages[0], n.chunk, n.microbatch)
                kind = "gap" if n.kind == "gap" else n.kind if n.kind == "join" else n.op_kind
                out[i, r] *= factor.get(key, whole.get(kind, 4.0))
        return out

    return durations, of


def check(layout, effects, seed=0):
    """Replay and what-if of a trace agree with the job it was made from."""
    frame, truth = make_trace(layout, effects, seed)
    graph = build_trace_graph(as_trace(frame))
    np.testing.assert_allclose(graph.measured, truth.step_times, rtol=1e-12)
    np.testing.assert_allclose(replay(graph), truth.step_times, rtol=1e-6)
    durations, of = changed(truth, np.random.default_rng(seed + 1))
    _, what_if = run(layout, effects, durations)
    np.testing.assert_allclose(replay(graph, of(graph)), what_if, rtol=1e-6)
    assert np.abs(what_if / truth.step_times - 1).min() > 0.1  # they are others
    return graph


@pytest.mark.parametrize("name", LAYOUTS)
def test_replay_and_what_if_of_every_layout(name):
    layout = LAYOUTS[name]
    graph = check(layout, VARIED)
    assert graph.p2p == ("none" if layout.stages == 1 else layout.p2p)
    assert graph.edges_inferred == 0 and graph.notes == ()
    stages, chunks = layout.stages, layout.chunks
    transfers = 2 * (stages * chunks - 1) * layout.microbatches
    meetings = stages * (2 - (layout.gather == "none")) + 1 + (stages > 1)
    assert graph.edges_recorded == transfers + ends_of(meetings, stages, layout)


def ends_of(meetings, stages, layout):
    """Meetings of the step's end by name: a stage's op counts once, not once per stage."""
    return meetings - (stages - 1) * (2 - (layout.gather == "none"))


@pytest.mark.parametrize("name", RECORDINGS)
@pytest.mark.parametrize("layout", ["pp2", "1f1b", "1f1b-async"])
def test_replay_and_what_if_of_every_recording(name, layout):
    if (name, layout) == ("batched", "1f1b-async"):
        pytest.skip("nothing is issued as a batch")
    graph = check(LAYOUTS[layout], RECORDINGS[name])
    assert graph.edges_inferred == 0


@settings(max_examples=25)
@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 7), st.integers(2, 4),
    st.sampled_from(["1f1b", "gpipe"]), st.sampled_from(["blocking", "async"]), st.integers(0, 99),
)  # fmt: skip
@example(4, 2, 2, 2, "gpipe", "blocking", 4)  # both stages' reduce-scatters end together by chance
@example(2, 2, 2, 2, "gpipe", "blocking", 22591)  # both replicas' embedding all-reduces, in a step
def test_any_size(replicas, stages, microbatches, steps, schedule, p2p, seed):
    check(Layout(replicas, stages, microbatches, steps, schedule, p2p), VARIED, seed)


def test_a_tenth_more_on_one_op_is_no_more_than_that():
    frame, _ = make_trace(LAYOUTS["1f1b"], VARIED)
    graph = build_trace_graph(as_trace(frame))
    before = replay(graph)
    for i in range(0, len(graph.nodes), 17):
        longer = graph.durations.copy()
        longer[i] += 0.1
        delay = replay(graph, longer) - before
        assert delay.min() >= 0.0 and delay.max() <= 0.1 + 1e-12


@pytest.mark.parametrize("layout", ["1f1b", "1f1b-async", "gpipe", "interleaved", "pp1"])
def test_clock_jitter_and_float32(layout):
    effects = replace(VARIED, jitter_s=1e-5, float32=True)
    frame, truth = make_trace(LAYOUTS[layout], effects)
    graph = build_trace_graph(as_trace(frame))
    assert graph.p2p == ("none" if layout == "pp1" else LAYOUTS[layout].p2p)
    np.testing.assert_allclose(replay(graph), truth.step_times, rtol=3e-4)
    assert graph.edges_inferred == 0 and graph.notes == ()


@pytest.mark.parametrize("layout", ["1f1b", "1f1b-async", "gpipe", "pp2", "pp1"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_missing_ops_are_bridged(layout, seed):
    effects = replace(VARIED, missing=0.02)
    frame, truth = make_trace(LAYOUTS[layout], effects, seed)
    graph = build_trace_graph(as_trace(frame))
    error = replay(graph) / truth.step_times - 1
    assert np.abs(error).max() < 0.01 and abs(error.mean()) < 0.002
    assert any(" missing: " in n for n in graph.notes)
    assert graph.edges_inferred == 0


def test_an_op_that_one_worker_lost_lasts_as_long_as_its_neighbours_leave():
    frame, truth = make_trace(LAYOUTS["1f1b"], replace(VARIED, gap_s=0.0), 3)
    row = frame.query("name == 'forward-compute' and microbatch == 4 and stage == 2 "
                      "and dp_rank == 1 and step == 2").index  # fmt: skip
    graph = build_trace_graph(as_trace(frame.drop(row)))
    (i,) = graph.where(op_kind="forward", microbatch=4, stages=(2,))
    expected = truth.durations["forward", 1, 2, 0, 4][2]
    assert graph.durations[i, 1, 2] == pytest.approx(expected, rel=1e-9)
    np.testing.assert_allclose(replay(graph), truth.step_times, rtol=1e-6)


def test_steps_with_other_numbers_of_microbatches_are_left_out_with_a_note():
    effects = replace(VARIED, odd_steps={2: 4, 5: 7})
    frame, truth = make_trace(replace(SHAPE, steps=8), effects)
    graph = build_trace_graph(as_trace(frame))
    assert list(graph.steps) == list(truth.steps) == [0, 1, 3, 4, 6, 7]
    np.testing.assert_allclose(replay(graph), truth.step_times, rtol=1e-6)
    (note,) = graph.notes
    assert "2 of 8 steps" in note and "microbatches than 5" in note and "step 2" in note


def test_no_recorded_time_of_a_meeting_holds_the_wait():
    frame, truth = make_trace(LAYOUTS["1f1b"], replace(VARIED, lemons={(1, 2): 2.0}))
    graph = build_trace_graph(as_trace(frame))
    for kind, mean in (("transfer", 0.001), ("reduce_scatter", 0.05)):
        own = graph.durations[graph.where(op_kind=kind)]
        recorded = frame.loc[frame["op_kind"] == kind, "duration"]
        assert own.max() < 1.1 * mean < 5 * mean < recorded.max()
    assert truth.step_times.mean() > 7.0


# -------------------------------------------------------------------------------- groups
def test_named_groups_decide_over_the_class():
    """A collective whose name says nothing joins those of its named group."""
    frame, truth = make_trace(LAYOUTS["1f1b"], replace(VARIED, groups=True))
    frame["kernel_class"] = ""
    graph = build_trace_graph(as_trace(frame))
    assert graph.edges_inferred == 0
    np.testing.assert_allclose(replay(graph), truth.step_times, rtol=1e-6)
    frame["group"] = ""
    bare = build_trace_graph(as_trace(frame))
    assert bare.edges_inferred == 4 and bare.edges_recorded == graph.edges_recorded - 4
    assert any("coinciding ends" in n for n in bare.notes)
    np.testing.assert_allclose(replay(bare), truth.step_times, rtol=1e-6)


def test_a_name_for_all_groups_of_a_kind_is_no_group():
    frame, truth = make_trace(LAYOUTS["1f1b"], replace(VARIED, groups=True, lemons={(0, 2): 1.5}))
    frame["group"] = frame["group"].str.rstrip("0123456789")
    graph = build_trace_graph(as_trace(frame))
    assert any("embedding-grads-all-reduce: " in n and "groups" in n for n in graph.notes)
    np.testing.assert_allclose(replay(graph), truth.step_times, rtol=1e-6)


def test_groups_of_other_workers_than_a_stage_or_replica_get_a_note():
    frame, _ = make_trace(replace(SHAPE, replicas=4), replace(VARIED, groups=True))
    scatter = frame["name"] == "grads-reduce-scatter"
    half = frame["group"] + (frame["dp_rank"] // 2).astype(str)
    frame["group"] = frame["group"].where(~scatter, half)
    graph = build_trace_graph(as_trace(frame))
    assert any("grads-reduce-scatter" in n and "other workers" in n for n in graph.notes)


def test_transfers_without_direction_pair_by_group():
    frame, truth = make_trace(LAYOUTS["pp2"], replace(VARIED, groups=True))
    frame.loc[frame["op_kind"] == "transfer", ["name", "microbatch"]] = ["p2p", -1]
    frame = frame.drop_duplicates(["step", "rank", "start", "name"])
    graph = build_trace_graph(as_trace(frame))
    assert (graph.p2p, graph.edges_inferred) == ("blocking", 0)
    np.testing.assert_allclose(replay(graph), truth.step_times, rtol=1e-6)


def test_transfers_without_another_side_are_named():
    frame, _ = make_trace(LAYOUTS["1f1b"], VARIED)
    graph = build_trace_graph(as_trace(frame[frame["name"] != "backward-recv"]))
    assert any("10 transfers" in n and "backward-send" in n for n in graph.notes)


def test_split_backward():
    """Weight gradients apart: an op of its own, that nobody receives for."""
    frame, truth = make_trace(LAYOUTS["1f1b-async"], VARIED)
    back = frame["op_kind"] == "backward"
    weight = frame[back].copy()
    weight["duration"] *= 0.5
    weight["start"] += weight["duration"]
    weight[["op_kind", "name"]] = ["backward_weight", "backward-weight-compute"]
    frame.loc[back, "duration"] *= 0.5
    frame = pd.concat([frame, weight]).sort_values(["step", "rank", "start"])
    graph = build_trace_graph(as_trace(frame))
    assert (graph.p2p, len(graph.where(op_kind="backward_weight"))) == ("async", 15)
    np.testing.assert_allclose(replay(graph), truth.step_times, rtol=1e-6)


@pytest.mark.parametrize("layout", ["1f1b", "1f1b-async", "interleaved"])
def test_passes_of_several_ops(layout):
    """Each forward recorded as two layers whose names forward and backward share."""
    frame, truth = make_trace(LAYOUTS[layout], VARIED)
    compute = frame["op_kind"].isin(["forward", "backward"])
    second = frame[compute].copy()
    frame.loc[compute, "duration"] *= 0.4
    second["start"] += 0.4 * second["duration"]
    second["duration"] *= 0.6
    frame.loc[compute, "name"], second["name"] = "layer 0", "layer 1"
    frame = pd.concat([frame, second]).sort_values(["step", "rank", "start"])
    graph = build_trace_graph(as_trace(frame))
    np.testing.assert_allclose(replay(graph), truth.step_times, rtol=1e-6)
    durations, of = changed(truth, np.random.default_rng(1))
    what_if = run(truth.layout, VARIED, durations)[1]
    np.testing.assert_allclose(replay(graph, of(graph)), what_if, rtol=1e-6)


def test_a_trace_without_names():
    frame, truth = make_trace(LAYOUTS["1f1b"], VARIED)
    named = build_trace_graph(as_trace(frame))
    frame["name"] = frame["name"].where(frame["op_kind"] == "transfer", "")
    graph = build_trace_graph(as_trace(frame))
    np.testing.assert_allclose(replay(graph), truth.step_times, rtol=1e-6)
    assert graph.p2p == "blocking"
    plain = [n._replace(name="") for n in named.nodes]
    assert [n._replace(name="") for n in graph.nodes] == plain
    frame["name"] = ""
    frame.loc[frame["op_kind"] == "transfer", "microbatch"] = -1
    frame = frame.drop_duplicates(["step", "rank", "start", "op_kind"])
    graph = build_trace_graph(as_trace(frame))
    np.testing.assert_allclose(replay(graph), truth.step_times, rtol=1e-6)
    assert graph.p2p == "none" and any("no other side" in n for n in graph.notes)


# -------------------------------------------------------------------------------- bad traces
def refused(frame, *words):
    with pytest.raises(PrismError) as error:
        build_trace_graph(as_trace(frame, "bad.csv"))
    text = str(error.value)
    assert text.startswith("bad.csv: ") and all(w in text for w in words), text


def test_a_trace_without_starts_is_refused():
    frame, _ = make_trace(SHAPE)
    frame["start"] = np.nan
    refused(frame, "without a start time", "start_s")


def test_two_jobs_in_one_trace_are_refused():
    one, _ = make_trace(SHAPE)
    for forward_s in (0.3, 0.01):
        two, _ = make_trace(SHAPE, Effects(forward_s=forward_s), 1)
        two["start"] += 0.05
        refused(pd.concat([one, two]).sort_values(["step", "rank", "start"]), "one job")


def swapped(frame, share, seed=0):
    """Swap the starts of neighbouring ops of one worker."""
    frame = frame.sort_values(["step", "rank", "start"]).reset_index(drop=True)
    worker = (frame["step"] * 1000 + frame["rank"]).to_numpy()
    start, took = frame["start"].to_numpy().copy(), frame["duration"].to_numpy()
    same = worker[1:] == worker[:-1]
    for i in np.flatnonzero(same & (np.random.default_rng(seed).random(same.size) < share)):
        first, end = min(start[i : i + 2]), max(start[i : i + 2] + took[i : i + 2])
        start[i + 1], start[i] = first, max(end - took[i], first + 1e-3)
    return frame.assign(start=start)


@pytest.mark.parametrize("layout", ["1f1b", "1f1b-async", "gpipe"])
def test_ops_in_another_order_put_the_replay_off(layout):
    frame, _ = make_trace(LAYOUTS[layout], VARIED)
    graph = build_trace_graph(as_trace(swapped(frame, 0.02)))
    (warning,) = (w for w in warnings_of(graph, fit_graph(graph), None) if "another order" in w)
    assert 0.015 < replay(graph).mean() / graph.measured.mean() - 1.0 < 0.3


def test_two_layouts_in_one_trace_are_refused():
    one, _ = make_trace(SHAPE)
    two, _ = make_trace(replace(SHAPE, microbatches=4))
    two["step"] += 100
    refused(pd.concat([one, two]), "microbatches", "5 in 4 steps")


def test_circular_waits_are_refused():
    frame, _ = make_trace(Layout(stages=2, microbatches=2))
    times, _, _ = read_times(as_trace(frame))
    one, other = (Item("op", frozenset({(0, f"{w}-send", 0), (1, f"{w}-recv", 0)}), REPLICA, (0, 1))
                  for w in ("forward", "backward"))  # fmt: skip
    chains = [[one, other], [other, one]]
    laying = Laying("bad.csv", times, chains, blocking=True)
    with pytest.raises(PrismError, match=r"bad\.csv: stage 0 waits .*forward-"):
        laying.walk()


def test_shuffled_order_is_refused():
    frame, _ = make_trace(SHAPE)
    frame["start"] = np.random.default_rng(0).permutation(frame["start"].to_numpy())
    refused(frame, "one job")


def test_one_step_has_a_graph_but_nothing_to_fit():
    frame, truth = make_trace(replace(SHAPE, steps=1), VARIED)
    graph = build_trace_graph(as_trace(frame))
    np.testing.assert_allclose(replay(graph), truth.step_times, rtol=1e-6)
    with pytest.raises(PrismError, match=r"made\.csv: 1 step; .*2 "):
        fit_graph(graph, "made.csv")


def test_production_columns_read_from_a_file_give_the_same_graph(tmp_path):
    frame, truth = make_trace(SHAPE, VARIED)
    as_production(frame).to_csv(tmp_path / "ops.csv", index=False)
    graph = build_trace_graph(read_trace(tmp_path / "ops.csv"))
    same = build_trace_graph(as_trace(frame)).nodes  # but transfers have no chunk there
    assert [n._replace(chunk=0) for n in graph.nodes] == list(same)
    np.testing.assert_allclose(replay(graph), truth.step_times, rtol=1e-5)


SMALL = {p: make_trace(Layout(2, 3, 3, 3, p2p=p), VARIED)[0] for p in ("blocking", "async")}


def damaged(p2p, seed, damage):
    """Return a small trace with something wrong."""
    g, frame = np.random.default_rng(seed), SMALL[p2p].copy()
    some = g.random(len(frame)) < g.choice([0.005, 0.05, 0.3, 0.9])
    column = {"nan start": "start", "nan duration": "duration"}.get(damage)
    if damage == "drop":
        frame = frame[~some]
    elif damage == "drop stage":
        frame = frame[(frame["stage"] != g.integers(3)) | (frame["step"] != g.integers(3))]
    elif damage == "drop name":
        frame = frame[frame["name"] != g.choice(frame["name"].unique())]
    elif column:
        frame.loc[some, column] = np.nan
    elif damage in ("swap names", "shuffle"):
        columns = ["name", "op_kind"] if damage == "swap names" else ["start"]
        frame.loc[some, columns] = frame.loc[some, columns].to_numpy()[g.permutation(some.sum())]
    elif damage == "microbatch":
        frame.loc[some, "microbatch"] = g.integers(-1, 4, some.sum())
    elif damage == "same group":
        frame["group"] = "a"
    elif damage == "other groups":
        frame["group"] = g.choice(["", "a", "b"], len(frame))
    elif damage == "double":
        frame = pd.concat([frame, frame[some]])
    elif damage == "negative":
        frame.loc[some, "duration"] *= -1
    elif damage == "one kind":
        frame["op_kind"] = str(g.choice(["transfer", "all_reduce", "other", "forward"]))
    else:
        frame.loc[some, "start"] += 1e6
    return frame


@settings(max_examples=examples(60))
@given(st.sampled_from(sorted(SMALL)), st.integers(0, 2**32 - 1), st.sampled_from(
    ["drop", "drop stage", "drop name", "nan start", "nan duration", "swap names", "shuffle",
     "microbatch", "same group", "other groups", "double", "negative", "one kind", "huge"],
))  # fmt: skip
def test_damaged_traces_give_a_graph_or_a_prism_error(p2p, seed, damage):
    try:
        graph = build_trace_graph(as_trace(damaged(p2p, seed, damage)))
    except PrismError:
        return
    assert np.isfinite(replay(graph)).all()


def ring(rows, took, transfer):
    """Workers that compute, then send on and receive at once: a batch ends with its last transfer.

    took : [stage, round, step] of the computation; transfer : seconds. Returns step times.
    """
    n_stages, n_rounds, n_steps = took.shape
    at = np.zeros((n_stages, n_steps))
    for k in range(n_rounds):
        done = at + took[:, k]
        passed = np.maximum(done, np.roll(done, 1, axis=0)) + transfer  # [s]: from s - 1 to s
        after = np.maximum(passed, np.roll(passed, -1, axis=0))
        for s, t in np.ndindex(n_stages, n_steps):
            rows.append((t, s, "forward", "forward-compute", k, at[s, t], took[s, k, t]))
            for name in ("forward-send", "forward-recv"):
                rows.append((t, s, "transfer", name, k, done[s, t], after[s, t] - done[s, t]))
        at = after
    return at.max(axis=0)


@pytest.mark.parametrize("n_stages", [3, 5])
def test_workers_in_a_ring_wait_for_their_own_neighbours_only(n_stages):
    took = np.random.default_rng(6).uniform(0.9, 1.1, (n_stages, 6, 8))
    rows = []
    measured = ring(rows, took, 0.01)
    names = ["step", "stage", "op_kind", "name", "microbatch", "start", "duration"]
    table = pd.DataFrame(rows, columns=names)
    table["rank"] = table["stage"]
    graph = build_trace_graph(make(table))
    assert graph.p2p == "blocking"
    assert replay(graph) == pytest.approx(measured, rel=1e-6)
    # a slower worker reaches others hop by hop, not at once; a transfer that is not the last of
    # its batch is known up to the batch's end only
    durations = graph.durations.copy()
    slow = graph.where(op_kind="forward", microbatch=0, stages=(0,))
    durations[slow] += 2.0
    took[0, 0] += 2.0
    assert replay(graph, durations) == pytest.approx(ring([], took, 0.01), rel=2e-2)
    together = replay(graph).mean() + 2.0
    assert replay(graph, durations).mean() < together


def make(table):
    columns = {
        c: table[c].to_numpy() for c in ("step", "stage", "rank", "microbatch", "start", "duration")
    }
    columns |= {c: pd.Categorical(table[c]) for c in ("op_kind", "name")}
    return make_trace_table(columns, "ring", "tidy", [])
