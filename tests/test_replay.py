"""Replays of pipeline traces of known jobs: the measured steps, and steps without stragglers.

Every slowdown that a replay reports is a question of what the step would have been. The event loop
of `pipeline_synth` answers it from the durations that the job had, so an edge too few or too many
shows. Exact are jobs whose durations are products of factors: then an op's mean is its ideal.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from campaign import examples, some
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pipeline_synth import Effects, Layout, as_production, make_trace, run, write_tidy

import prism
from prism import PrismError

FACTORS = Effects(
    rank_sd=0.005, step_sd=0.05, residual_sd=0.0, first_microbatch=0.9, other_sd=0.6, gap_s=0.02,
    transfer_s=0.02,
)  # fmt: skip
NOISY = Effects(residual_sd=0.03, content_sd=0.02, rank_sd=0.02, step_sd=0.02, gap_s=0.004)
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
    "lemon": replace(FACTORS, lemons={(1, 0): 2.4}),
    "uneven stages": replace(FACTORS, stage=(1.0, 0.7)),
    "groups": replace(FACTORS, groups=True),
    "verbs": replace(FACTORS, wording="verbs"),
    "short": replace(FACTORS, wording="short"),
    "batched": replace(FACTORS, wording="batched"),
}
LOCAL = ("forward", "backward", "optimizer")
SCATTER, NORM = "grads-reduce-scatter", "layernorm-grads-all-reduce"
OP_KIND = {
    "gap": "launch_gap", "params-all-gather": "all_gather", SCATTER: "reduce_scatter",
    NORM: "all_reduce", "embedding-grads-all-reduce": "all_reduce",
    "optimizer-clip-main-grad": "all_reduce",
}  # fmt: skip


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """Replay a table: its dataset and figures."""
    path = tmp_path_factory.mktemp("replay") / "ops.csv"

    def call(frame):
        dataset = prism.replay(write_tidy(frame, path))
        return dataset, prism.summary(dataset)

    return call


# ------------------------------------------------------------------------------------ the oracle
def mean_step(truth, durations):
    return run(truth.layout, truth.effects, durations)[1].mean()


def published(truth):
    """Slowdown by the definition of arXiv:2505.05713, from the durations the job had."""
    durations = {k: 0.0 * v if k[0] == "gap" else v for k, v in truth.durations.items()}
    classes = {}
    for key, value in durations.items():  # every message of a batch counts
        classes.setdefault(key[0], []).extend(
            [value] * (len(key[2]) if key[0] == "transfer" else 1)
        )
    level = {k: np.mean(v) if k in LOCAL else np.median(v) for k, v in classes.items()}
    ideal = {k: np.full_like(v, level[k[0]]) for k, v in durations.items()}
    return mean_step(truth, durations) / mean_step(truth, ideal)


def at_mean(truth):
    """Every op at its mean over steps and replicas, those of lemons apart."""
    found = {}
    for key, value in truth.durations.items():
        slow = key[0] in LOCAL[:2] and key[1:3] in truth.effects.lemons
        found.setdefault((key[0], *key[2:]), []).extend([] if slow else [value])
    return {k: np.full_like(v, np.mean(found[k[0], *k[2:]])) for k, v in truth.durations.items()}


def slowdown_without(truth, chosen):
    """Mean step over that in which the chosen ops are at their mean."""
    ideal = at_mean(truth)
    durations = {k: ideal[k] if chosen(k) else v for k, v in truth.durations.items()}
    return truth.step_times.mean() / mean_step(truth, durations)


def is_local(key):
    return key[0] in (*LOCAL, "gap", NORM)


def check(replayed, layout, effects, seed=0, each=True):
    """Replay of a trace agrees with the job it was made from; the figures, and the truth."""
    frame, truth = make_trace(layout, effects, seed)
    dataset, found = replayed(frame)
    measured, again = dataset.measured_step_time.values, dataset.replayed_step_time.values
    np.testing.assert_allclose(measured, truth.step_times, rtol=1e-12)
    np.testing.assert_allclose(again, truth.step_times, rtol=1e-9)
    assert (found["steps"], dataset.measured_step_time.attrs["units"]) == (layout.steps, "s")
    assert found["slowdown"] == pytest.approx(published(truth), rel=1e-6)
    whole = slowdown_without(truth, lambda key: True)
    assert found["slowdown_same_work"] == pytest.approx(whole, rel=1e-6)
    assert found["ideal_mean"] == pytest.approx(truth.step_times.mean() / whole, rel=1e-6)
    for kind, slowdown in found["by_op_kind"].items() if each else ():
        expected = slowdown_without(
            truth, lambda key, kind=kind: OP_KIND.get(key[0], key[0]) == kind
        )
        assert slowdown == pytest.approx(expected, rel=1e-6), kind
    for stage, slowdown in found["by_stage"].items() if each else ():
        expected = slowdown_without(
            truth, lambda key, stage=int(stage): is_local(key) and key[2] == stage
        )
        assert slowdown == pytest.approx(expected, rel=1e-6), stage
    for row in found["by_worker"] if each else ():
        place = row["dp_rank"], row["stage"]
        expected = slowdown_without(
            truth, lambda key, place=place: is_local(key) and key[1:3] == place
        )
        assert row["slowdown"] == pytest.approx(expected, rel=1e-6), place
    return found, truth


# ---------------------------------------------------------------------------------- known graphs
@pytest.mark.parametrize("name", LAYOUTS)
def test_replay_and_what_if_of_every_layout(replayed, name):
    layout = LAYOUTS[name]
    found, _ = check(replayed, layout, FACTORS)
    assert found["p2p"] == ("none" if layout.stages == 1 else layout.p2p)
    assert found["edges_inferred"] == 0 and found["notes"] == [] and found["warnings"] == []
    stages, gathers = layout.stages, layout.gather != "none"
    transfers = 2 * (stages * layout.chunks - 1) * layout.microbatches
    # scatter and gather of each stage count once for all stages, then clip and embedding
    assert found["edges_recorded"] == transfers + 1 + gathers + 1 + (stages > 1)


@pytest.mark.parametrize("name", RECORDINGS)
@pytest.mark.parametrize("layout", ["pp2", "1f1b", "1f1b-async"])
def test_replay_and_what_if_of_every_recording(replayed, name, layout):
    if (name, layout) == ("batched", "1f1b-async"):
        pytest.skip("nothing is issued as a batch")
    found, truth = check(replayed, LAYOUTS[layout], RECORDINGS[name])
    assert found["edges_inferred"] == 0
    if name == "lemon":
        worst = max(found["by_worker"], key=lambda row: row["slowdown"])
        assert (worst["dp_rank"], worst["stage"]) == (1, 0) and worst["slowdown"] > 1.2
        cured = {k: v / (2.4 if k[0] in LOCAL[:2] and k[1:3] == (1, 0) else 1.0)
                 for k, v in truth.durations.items()}  # fmt: skip
        saved = truth.step_times.mean() / mean_step(truth, cured)
        assert worst["slowdown"] == pytest.approx(saved, rel=0.03)


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 7), st.integers(2, 4),
    st.sampled_from(["1f1b", "gpipe"]), st.sampled_from(["blocking", "async"]), st.integers(0, 99),
)  # fmt: skip
@example(4, 2, 2, 2, "gpipe", "blocking", 4)  # both stages' reduce-scatters end together by chance
@example(2, 2, 2, 2, "gpipe", "blocking", 22591)  # both replicas' embedding all-reduces, in a step
def test_any_size(replayed, replicas, stages, microbatches, steps, schedule, p2p, seed):
    frame, truth = make_trace(
        Layout(replicas, stages, microbatches, steps, schedule, p2p), NOISY, seed
    )
    dataset, found = replayed(frame)
    np.testing.assert_allclose(dataset.replayed_step_time, truth.step_times, rtol=1e-6)
    assert found["slowdown"] == pytest.approx(published(truth), rel=1e-6)


BARRIERS = {
    (SCATTER, "replica", -1): 2, (SCATTER, "replica", 0): 1, (NORM, "stage", 0): 1,
    (NORM, "stage", 3): 1, (NORM, "world", -1): 4 + 2,  # by stages and replicas
}  # fmt: skip


@pytest.mark.parametrize("barrier", BARRIERS)
@pytest.mark.parametrize("p2p", ["blocking", "async"])
def test_barriers_that_no_op_names_are_found_where_they_are(replayed, barrier, p2p):
    layout = Layout(2, 4, 4, 8, p2p=p2p)
    effects = Effects(residual_sd=0.03, content_sd=0.1, rank_sd=0.02, gap_s=0.004)
    effects = replace(effects, barriers=(barrier,))
    frame, truth = make_trace(layout, effects, 1)
    dataset, found = replayed(frame)
    assert len(found["notes"]) == found["edges_inferred"] == BARRIERS[barrier]
    np.testing.assert_allclose(dataset.replayed_step_time, truth.step_times, rtol=1e-6)
    assert found["slowdown"] == pytest.approx(published(truth), rel=1e-6)
    lossy, _ = make_trace(layout, replace(effects, missing=0.005), 1)
    assert replayed(lossy)[1]["edges_inferred"] == BARRIERS[barrier]


@pytest.mark.parametrize("gap_s", [0.0, 0.004, 0.02])
@pytest.mark.parametrize(
    "layout", [Layout(1, 2, 1, 6, p2p="async"), Layout(2, 4, 4, 6), Layout(4, 2, 3, 2)]
)
def test_no_barrier_is_found_where_none_is(replayed, layout, gap_s):
    effects = Effects(residual_sd=0.03, content_sd=0.1, rank_sd=0.02, gap_s=gap_s)
    for seed in some(range(15), 3):
        found = replayed(make_trace(layout, effects, seed)[0])[1]
        assert (found["notes"], found["edges_inferred"]) == ([], 0)


def test_a_worker_that_is_late_by_a_fixed_time(replayed):
    layout, effects = Layout(4, 4, 8, 8), Effects(residual_sd=0.02, delays={(1, 3): 0.15})
    frame, truth = make_trace(layout, effects)
    found = replayed(frame)[1]
    cured = {k: v - 0.15 * (k[0] in LOCAL[:2] and k[1:3] == (1, 3))
             for k, v in truth.durations.items()}  # fmt: skip
    saved = truth.step_times.mean() / mean_step(truth, cured)
    worst, *others = sorted(found["by_worker"], key=lambda row: -row["slowdown"])
    assert (worst["dp_rank"], worst["stage"]) == (1, 3)
    assert worst["slowdown"] == pytest.approx(saved, rel=0.02)
    assert worst["slowdown"] > 1.15 > 1.03 > max(row["slowdown"] for row in others)
    assert found["slowdown"] == pytest.approx(published(truth), rel=1e-6)


def test_contents_of_microbatches_slow_the_op_that_follows_them_most(replayed):
    effects = Effects(content_sd=0.3, content_backward=0.2)
    frame, truth = make_trace(Layout(8, 2, 8, 12), effects)
    found = replayed(frame)[1]
    assert max(found["by_op_kind"], key=found["by_op_kind"].get) == "forward"
    whole = slowdown_without(truth, lambda key: True)
    assert found["slowdown_same_work"] == pytest.approx(whole, rel=0.01) and whole > 1.1


# ------------------------------------------------------------------------------- how it is recorded
@pytest.mark.parametrize("layout", ["1f1b", "1f1b-async", "gpipe", "interleaved", "pp1"])
def test_clock_jitter_and_float32(replayed, layout):
    frame, truth = make_trace(LAYOUTS[layout], replace(NOISY, jitter_s=1e-5, float32=True))
    dataset, found = replayed(frame)
    np.testing.assert_allclose(dataset.replayed_step_time, truth.step_times, rtol=3e-4)
    assert found["p2p"] == ("none" if layout == "pp1" else LAYOUTS[layout].p2p)
    assert (found["edges_inferred"], found["notes"]) == (0, [])
    assert found["slowdown"] == pytest.approx(published(truth), rel=1e-3)


@pytest.mark.parametrize("layout", ["1f1b", "1f1b-async", "gpipe", "pp2", "pp1"])
@pytest.mark.parametrize("seed", [0, 1])
def test_missing_ops_last_as_long_as_their_kind(replayed, layout, seed):
    frame, truth = make_trace(LAYOUTS[layout], replace(NOISY, missing=0.02), seed)
    dataset, found = replayed(frame)
    error = dataset.replayed_step_time.values / truth.step_times - 1
    assert np.abs(error).max() < 0.01 and abs(error.mean()) < 0.002
    assert found["edges_inferred"] == 0 and found["notes"]


def test_steps_with_other_numbers_of_microbatches_are_left_out(replayed):
    layout = replace(SHAPE, steps=8)
    frame, truth = make_trace(layout, replace(NOISY, odd_steps={2: 4, 5: 7}))
    dataset, found = replayed(frame)
    assert list(dataset.step) == list(truth.steps) == [0, 1, 3, 4, 6, 7]
    np.testing.assert_allclose(dataset.replayed_step_time, truth.step_times, rtol=1e-6)
    assert len(found["notes"]) == 1


def test_rare_ops_are_no_part_of_the_graph_but_of_the_measured_step(replayed):
    frame, truth = make_trace(Layout(2, 2, 4, 6), NOISY)
    rare = frame.query("name == 'optimizer' and step == 4").assign(name="evaluate", op_kind="other")
    rare["start"] += 1.0
    dataset, found = replayed(pd.concat([frame, rare], ignore_index=True))
    longer = np.array([0.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    np.testing.assert_allclose(dataset.measured_step_time, truth.step_times + longer, rtol=1e-12)
    np.testing.assert_allclose(dataset.replayed_step_time, truth.step_times, rtol=1e-6)
    assert len(found["notes"]) == 1


def test_steps_without_their_end_and_ops_without_a_start_are_left_out(replayed):
    frame, truth = make_trace(Layout(2, 2, 4, 6), NOISY)
    ends = frame["name"].isin(["optimizer", "optimizer-clip-main-grad"])
    dataset, _ = replayed(frame[~((frame["step"] == 5) & ends)])
    assert list(dataset.step) == [0, 1, 2, 3, 4]
    frame.loc[[7, 70], "start"] = np.nan
    dataset, found = replayed(frame)
    assert len(found["notes"]) == 2
    np.testing.assert_allclose(dataset.replayed_step_time, truth.step_times, rtol=0.01)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_stage_of_a_pipeline_is_replayed_with_its_waiting(replayed, stage):
    """The other sides of its transfers are not there; overlapping ones are one wait, not two."""
    frame, _ = make_trace(Layout(4, 4, 8, 8), NOISY, 3)
    found = replayed(frame[frame["stage"] == stage])[1]
    assert abs(found["mean_error"]) < 1e-3 and found["warnings"] == [] and len(found["notes"]) == 1


@pytest.mark.parametrize("layout", ["1f1b", "1f1b-async", "interleaved"])
def test_passes_of_several_ops(replayed, layout):
    """Each pass recorded as two layers whose names forward and backward share."""
    frame, truth = make_trace(LAYOUTS[layout], FACTORS)
    _, whole = replayed(frame)
    compute = frame["op_kind"].isin(["forward", "backward"])
    second = frame[compute].copy()
    frame.loc[compute, "duration"] *= 0.4
    second["start"] += 0.4 * second["duration"]
    second["duration"] *= 0.6
    frame.loc[compute, "name"], second["name"] = "layer 0", "layer 1"
    parts = pd.concat([frame, second]).sort_values(["step", "rank", "start"])
    dataset, found = replayed(parts)
    np.testing.assert_allclose(dataset.replayed_step_time, truth.step_times, rtol=1e-6)
    for name in ("slowdown_same_work", "by_stage"):
        assert found[name] == pytest.approx(whole[name], rel=1e-6)


def test_weight_gradients_apart_are_an_op_that_nobody_receives_for(replayed):
    frame, truth = make_trace(LAYOUTS["1f1b-async"], NOISY)
    back = frame["op_kind"] == "backward"
    weight = frame[back].copy()
    weight["duration"] *= 0.5
    weight["start"] += weight["duration"]
    weight[["op_kind", "name"]] = ["backward_weight", "backward-weight-compute"]
    frame.loc[back, "duration"] *= 0.5
    dataset, found = replayed(pd.concat([frame, weight]).sort_values(["step", "rank", "start"]))
    assert found["p2p"] == "async" and "backward_weight" in found["by_op_kind"]
    np.testing.assert_allclose(dataset.replayed_step_time, truth.step_times, rtol=1e-6)


@pytest.mark.parametrize("change", ["no names", "no microbatches", "production columns"])
def test_what_names_and_numbers_say_the_order_says_too(replayed, tmp_path, change):
    frame, _ = make_trace(LAYOUTS["1f1b"], FACTORS)
    expected = replayed(frame)[1]
    if change == "no names":
        frame["name"] = frame["name"].where(frame["op_kind"] == "transfer", "")
    if change == "no microbatches":
        frame["microbatch"] = -1
    if change == "production columns":
        as_production(frame).to_csv(tmp_path / "ops.csv", index=False)
        found = prism.summary(prism.replay(tmp_path / "ops.csv"))
    else:
        found = replayed(frame)[1]
    assert found["edges_recorded"] == expected["edges_recorded"]
    exact = 1e-5 if change == "production columns" else 1e-9  # seconds are of 32 bits there
    for name in ("slowdown", "slowdown_same_work", "replayed_mean", "by_op_kind", "by_stage"):
        assert found[name] == pytest.approx(expected[name], rel=exact), name


# --------------------------------------------------------------------------------- who meets whom
WORDINGS = [
    ("send_forward", "recv_forward", "send_backward", "recv_backward"),
    ("fwd_send", "fwd-recv", "bwd_send", "bwd-recv"),
    ("SendForward", "RecvForward", "SendBackward", "RECV_BWD"),
    ("isend_f", "irecv_f", "isend_b", "irecv_b"),
    ("f_send", "f_irecv", "b_send", "b_irecv"),
    ("send forward", "receive forward", "send backward", "receive backward"),
    ("send_next", "recv_prev", "send_prev", "recv_next"),
]


@pytest.mark.parametrize("words", WORDINGS, ids=lambda words: words[0])
def test_names_of_transfers_say_whom_they_join(replayed, words):
    frame, _ = make_trace(LAYOUTS["1f1b"], FACTORS)
    expected = replayed(frame)[1]
    ours = ("forward-send", "forward-recv", "backward-send", "backward-recv")
    frame["name"] = frame["name"].replace(dict(zip(ours, words, strict=True)))
    found = replayed(frame)[1]
    for name in ("p2p", "edges_recorded", "slowdown", "slowdown_same_work"):
        assert found[name] == expected[name], name


@pytest.mark.parametrize("name", ["p2p", "sendrecv", "ncclDevKernel_SendRecv", ""])
def test_names_that_say_nothing_join_nobody_unless_their_groups_do(replayed, name):
    frame, truth = make_trace(LAYOUTS["pp2"], replace(NOISY, groups=True))
    frame.loc[frame["op_kind"] == "transfer", ["name", "microbatch"]] = [name, -1]
    frame = frame.drop_duplicates(["step", "rank", "start", "op_kind"])
    dataset, found = replayed(frame)
    np.testing.assert_allclose(dataset.replayed_step_time, truth.step_times, rtol=1e-6)
    assert (found["p2p"], found["edges_inferred"], found["notes"]) == ("blocking", 0, [])
    assert found["slowdown"] == pytest.approx(published(truth), rel=1e-5)  # a batch is one message
    dataset, found = replayed(frame.assign(group=""))
    np.testing.assert_allclose(dataset.replayed_step_time, truth.step_times, rtol=1e-6)
    assert found["p2p"] == "none" and len(found["notes"]) == 1


def test_named_groups_decide_over_the_class(replayed):
    """A collective whose name says nothing joins those of its named group, or that end with it."""
    frame, truth = make_trace(LAYOUTS["1f1b"], replace(NOISY, groups=True))
    with_class = replayed(frame)[1]
    frame["kernel_class"] = ""
    named, bare = replayed(frame)[1], replayed(frame.assign(group=""))[1]
    assert (named["edges_inferred"], bare["edges_inferred"]) == (0, 4)
    assert bare["edges_recorded"] == named["edges_recorded"] - 4 and bare["notes"]
    for found in (with_class, named, bare):
        assert found["max_abs_error"] < 1e-6
        assert found["slowdown"] == pytest.approx(published(truth), rel=1e-6)


@pytest.mark.parametrize("groups", ["one name for all of a kind", "another in one step", "halves"])
def test_names_of_groups_that_cannot_be_are_none(replayed, groups):
    frame, truth = make_trace(
        replace(SHAPE, replicas=4), replace(NOISY, groups=True, lemons={(0, 2): 1.5})
    )
    scatter = frame["name"] == SCATTER
    if groups == "one name for all of a kind":
        frame["group"] = frame["group"].str.rstrip("0123456789")
    elif groups == "another in one step":
        frame.loc[scatter & (frame["step"] == 2), "group"] = "else"
    else:
        half = frame["group"] + (frame["dp_rank"] // 2).astype(str)
        frame["group"] = frame["group"].where(~scatter, half)
    found = replayed(frame)[1]
    assert found["max_abs_error"] < 1e-6 and found["edges_inferred"] == 0
    assert found["slowdown"] == pytest.approx(published(truth), rel=2e-4)
    assert bool(found["notes"]) == (groups != "another in one step")


def test_a_class_unlike_what_happened_is_not_followed(replayed):
    frame, _ = make_trace(Layout(4, 4, 4, 6), replace(NOISY, lemons={(1, 0): 1.5}))
    whole = replayed(frame)[1]
    frame.loc[frame["name"] == SCATTER, "duration"] = 0.05  # each worker alone
    found = replayed(frame)[1]
    assert found["edges_recorded"] == whole["edges_recorded"] - 1 and found["notes"]
    assert found["max_abs_error"] < 1e-6


def test_transfers_without_another_side_are_told(replayed):
    frame, _ = make_trace(LAYOUTS["1f1b"], NOISY)
    whole, found = (replayed(part)[1] for part in (frame, frame[frame["name"] != "backward-recv"]))
    assert found["edges_recorded"] == whole["edges_recorded"] - 10 and len(found["notes"]) == 1


def ring(rows, took, transfer, sides=("forward-send", "forward-recv")):
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
            rows.append((t, s, s, "forward", "forward-compute", k, at[s, t], took[s, k, t]))
            for name in sides:
                rows.append((t, s, s, "transfer", name, k, done[s, t], after[s, t] - done[s, t]))
        at = after
    return at.max(axis=0)


@pytest.mark.parametrize("sides", [("forward-send", "forward-recv"), ("send_next_recv_prev",)])
@pytest.mark.parametrize("n_stages", [3, 5])
def test_workers_in_a_ring_wait_for_their_own_neighbours_only(replayed, n_stages, sides):
    took = np.random.default_rng(6).uniform(0.9, 1.1, (n_stages, 6, 8))
    rows = []
    measured = ring(rows, took, 0.01, sides)
    names = ["step", "stage", "rank", "op_kind", "name", "microbatch", "start", "duration"]
    dataset, found = replayed(pd.DataFrame(rows, columns=names).assign(dp_rank=0))
    assert found["p2p"] == "blocking"
    assert dataset.replayed_step_time.values == pytest.approx(measured, rel=1e-6)
    alike = ring([], np.full_like(took, took.mean()), 0.01)
    assert found["slowdown"] == pytest.approx(measured.mean() / alike.mean(), rel=1e-3)


# ------------------------------------------------------------------------------------- bad traces
def test_a_replay_far_off_says_so(replayed):
    beside = (("forward", "a", 0.0), ("memory", "b", 0.5))
    rows = [(s, kind, name, at, 1.0) for s in range(4) for kind, name, at in beside]
    names = ["step", "op_kind", "name", "start", "duration"]
    found = replayed(pd.DataFrame(rows, columns=names))[1]
    assert found["mean_error"] == pytest.approx(1 / 3) and len(found["warnings"]) == 1


def bad_tables():
    frame, _ = make_trace(SHAPE)
    yield "no starts", frame.assign(start=np.nan)
    yield "no ops", frame[:0]
    for seconds in (0.3, 0.01):
        other, _ = make_trace(SHAPE, Effects(forward_s=seconds), 1)
        other["start"] += 0.05
        yield f"two jobs, {seconds} s", pd.concat([frame, other])
    small, _ = make_trace(replace(SHAPE, microbatches=4))
    yield "two layouts", pd.concat([frame, small.assign(step=small["step"] + 100)])
    shuffled = np.random.default_rng(0).permutation(frame["start"].to_numpy())
    yield "shuffled", frame.assign(start=shuffled)
    stage = frame["stage"].where(frame.index != 40, 7)
    yield "a stage of one op", frame.assign(stage=stage)


BAD = dict(bad_tables())


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_trace_of_one_job_is_refused(replayed, name):
    with pytest.raises(PrismError, match=r"ops\.csv"):
        replayed(BAD[name].sort_values(["step", "rank", "start"]))


SMALL = {p: make_trace(Layout(2, 3, 3, 3, p2p=p), NOISY)[0] for p in ("blocking", "async")}


def damaged(p2p, seed, damage):
    """Return a small trace with something wrong."""
    g, frame = np.random.default_rng(seed), SMALL[p2p].copy()
    some_rows = g.random(len(frame)) < g.choice([0.005, 0.05, 0.3, 0.9])
    column = {"nan start": "start", "nan duration": "duration"}.get(damage)
    if damage == "drop":
        frame = frame[~some_rows]
    elif damage == "drop stage":
        frame = frame[(frame["stage"] != g.integers(3)) | (frame["step"] != g.integers(3))]
    elif damage == "drop name":
        frame = frame[frame["name"] != g.choice(frame["name"].unique())]
    elif column:
        frame.loc[some_rows, column] = np.nan
    elif damage in ("swap names", "shuffle"):
        columns = ["name", "op_kind"] if damage == "swap names" else ["start"]
        order = g.permutation(some_rows.sum())
        frame.loc[some_rows, columns] = frame.loc[some_rows, columns].to_numpy()[order]
    elif damage == "microbatch":
        frame.loc[some_rows, "microbatch"] = g.integers(-1, 4, some_rows.sum())
    elif damage == "groups":
        frame["group"] = g.choice(["", "a", "b"], len(frame))
    elif damage == "negative":
        frame.loc[some_rows, "duration"] *= -1
    elif damage == "one kind":
        frame["op_kind"] = str(g.choice(["transfer", "all_reduce", "other", "forward"]))
    else:
        frame.loc[some_rows, "start"] += 1e6
    return frame


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(SMALL)), st.integers(0, 2**32 - 1), st.sampled_from(
    ["drop", "drop stage", "drop name", "nan start", "nan duration", "swap names", "shuffle",
     "microbatch", "groups", "negative", "one kind", "huge"],
))  # fmt: skip
def test_damaged_traces_are_replayed_or_refused(replayed, p2p, seed, damage):
    try:
        dataset, _ = replayed(damaged(p2p, seed, damage))
    except PrismError:
        return
    assert np.isfinite(dataset.replayed_step_time).all()
