"""Steps op by op: closed forms, blocking transfers, split backwards, fsdp, the end of a step."""

from collections import Counter
from functools import cache

import naive
import numpy as np
import pytest
from played_ops import of_kind, play
from test_schedules import NAMES, items_of, span

import prism

SPLIT = ("zb-h1", "zb-v", "dualpipe-v")
COMPUTE = ("forward", "backward", "backward_weight")
MODEL = {
    "n_layers": 8, "hidden_size": 1024, "ffn_size": 2816, "n_heads": 8, "vocab_size": 8000,
    "seq_len": 1024,
}  # fmt: skip


HELD = 8 * (4 * 1024**2 + 3 * 1024 * 2816) + 2 * 8000 * 1024  # parameters, but for norms


def given(forward=1.0, backward=2.0, effects=None, weight=None, **parallelism):
    """A job of explicit durations [s]."""
    durations = {"forward_s": forward, "backward_s": backward}
    durations |= {} if weight is None else {"weight_s": weight}
    return prism.load_job({
        "model": {"durations": durations}, "parallelism": parallelism,
        "variability": {"library": None, "effects": effects or {}},
    })  # fmt: skip


def sized(model=None, cluster=None, effects=None, **parallelism):
    """A job of a small model, by default a GPU a node. Nothing varies, launches are free."""
    gpus = int(np.prod([parallelism.get(key, 1) for key in ("tp", "cp", "pp", "dp")]))
    machine = {"gpus_per_node": 1, **(cluster or {})}
    machine.setdefault("nodes", gpus // machine["gpus_per_node"])
    return prism.load_job({
        "model": MODEL | (model or {}), "parallelism": {"microbatches": 2} | parallelism,
        "cluster": machine,
        "variability": {"library": None, "host_scale": 1e-9, "effects": effects or {}},
    })  # fmt: skip


def step_time(job):
    """The step, which does not vary [s]."""
    found = prism.simulate(job, 64, seed=1)
    assert np.ptp(found.step_time.values) == 0.0
    assert float(found.ideal_step_time) == float(found.step_time[0])
    return float(found.ideal_step_time)


# ---------------------------------------------------------------------------- explicit durations
@pytest.mark.parametrize(("p", "m"), [(4, 4), (4, 9), (8, 8)])
@pytest.mark.parametrize(("x", "t_b"), [(0.05, 2.0), (0.2, 0.5), (0.7, 1.0), (1.5, 2.0)])
def test_one_slow_stage(p, m, x, t_b):
    """The closed form of one stage slower by 1 + x; it holds for m >= p."""
    t = 1.0 + t_b
    for s in {0, 1, p // 2, p - 1}:
        forward, backward = [1.0] * p, [t_b] * p
        forward[s], backward[s] = 1.0 + x, t_b * (1.0 + x)
        hidden = (p - 1 - s) * min(x * t, (1 + x) * min(1.0, t_b), t)
        time = step_time(given(forward, backward, pp=p, microbatches=m))
        assert time == pytest.approx((m + p - 1) * t + m * x * t - hidden, rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 9), (8, 32)])
@pytest.mark.parametrize("weight", [None, 0.7])
def test_steps_are_the_longest_path(name, p, m, weight):
    """Of equal stages, whose chunks take their share; `test_schedules` has the closed forms."""
    v = 1 if name in ("gpipe", "1f1b", "zb-h1") else 2
    job = given(weight=weight, pp=p, vpp=v, microbatches=m, schedule=name)
    w = 1.0 if weight is None else weight
    rows = items_of(name, prism.make_schedule(name, p, m, v), 1.0 / v, (2.0 - w) / v, w / v)
    assert step_time(job) == pytest.approx(span(rows)[0], rel=1e-6)


def test_weights_by_stage():
    job = given(1.0, [2.0, 3.0], weight=[1.0, 2.5], pp=2, microbatches=1, schedule="zb-h1")
    # F F, B of stage 1, B of stage 0, and its W; stage 1's W is done by then
    assert step_time(job) == pytest.approx(1 + 1 + 0.5 + max(1.0 + 1.0, 2.5), rel=1e-6)
    for wrong in (2.5, [1.0] * 3):
        with pytest.raises(prism.PrismError, match="weight_s"):
            given(weight=wrong, pp=2, microbatches=1)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 5), (3, 2), (4, 4), (4, 13), (6, 3)])
def test_blocking_transfers_are_rendezvous(schedule, p, m):
    rng = np.random.default_rng(100 * p + m)
    forward, backward = rng.uniform(0.5, 1.5, p), rng.uniform(1.0, 3.0, p)
    rows = prism.make_schedule(schedule, p, m)
    duration = {
        (s, i): (forward if a.kind == "F" else backward)[s]
        for s, row in enumerate(rows)
        for i, a in enumerate(row)
    }
    layout = {"pp": p, "microbatches": m, "schedule": schedule}
    times = [
        step_time(given(forward.tolist(), backward.tolist(), p2p=p2p, **layout))
        for p2p in ("async", "blocking")
    ]
    expected = [
        naive.finish(rows, duration, 1),
        naive.finish_blocking(rows, duration, gpipe=schedule == "gpipe"),
    ]
    assert times == pytest.approx(expected, rel=1e-6)
    assert times[0] <= times[1]


def test_halves_of_a_backward_follow_one_draw():
    """One microbatch, whose content alone varies: F F B B against F F I I W."""
    plain, split = (
        prism.simulate(given(
            effects={"microbatch": {"cv": 0.3}}, weight=0.5, pp=2, microbatches=1, schedule=name,
        ), 128, seed=3).step_time.values
        for name in ("1f1b", "zb-h1")
    )  # fmt: skip
    forward, backward = (4 * split - 3.5 * plain) / 1.0, (plain - split) / 0.5
    # 2 x + 4 y and 2 x + 3.5 y, where both are quantiles of one uniform
    assert np.corrcoef(forward, backward)[0, 1] > 0.99
    assert backward.mean() == pytest.approx(1.0, abs=5 * backward.std() / 128**0.5)


def test_microbatches_differ_from_each_other():
    """Six in turn, each with a content of its own: a tenth of 3 s, six times."""
    effects = {"microbatch": {"cv": 0.1, "backward_loading": 1.0}}
    times = prism.simulate(given(effects=effects, microbatches=6), 6400, seed=1)
    expected = 0.1 * 3.0 * 6**0.5
    assert float(times.step_time.std()) == pytest.approx(expected, rel=5 / 12_800**0.5)
    assert float(times.step_time.mean()) == pytest.approx(18.0, abs=5 * expected / 80)


# ------------------------------------------------------------------------------------- transfers
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("p2p", ["async", "blocking"])
@pytest.mark.parametrize("slow_network", [1.0, 20.0])
def test_a_pipeline_with_transfers_is_the_oracles(schedule, p2p, slow_network):
    """Stages of unequal work: which waits for which changes with the length of a transfer."""
    layout = {"pp": 4, "microbatches": 6, "p2p": p2p, "schedule": schedule, "layer_split": None}
    layout["layer_split"] = [3, 1, 2, 2]
    links = {"network": {"bandwidth_gbytes_per_s": 50.0 / slow_network}}
    ops = play(sized(cluster={"links": links}, **layout))
    sent = {round(op.duration, 12) for op in of_kind(ops, "transfer")}
    transfer = max(sent)
    assert transfer == pytest.approx(min(sent), rel=1e-3)
    rows = prism.make_schedule(schedule, 4, 6)
    letters = {"F": "forward", "B": "backward"}
    took = {(op.stage, op.kind, op.microbatch): op.duration for op in of_kind(ops, *COMPUTE)}
    duration = {
        (s, i): took[s, letters[a.kind], a.microbatch]
        for s, row in enumerate(rows)
        for i, a in enumerate(row)
    }
    ends = {}
    if p2p == "async":
        naive.finish(rows, duration, 1, transfer, ends)
    else:
        naive.finish_blocking(rows, duration, transfer, schedule == "gpipe", ends)
    found = {(op.stage, op.kind, op.microbatch): op.end for op in of_kind(ops, *COMPUTE)}
    for (s, i), end in ends.items():
        action = rows[s][i]
        assert found[s, letters[action.kind], action.microbatch] == pytest.approx(end, rel=1e-5)


@pytest.mark.parametrize(("name", "back"), [("interleaved", 1), ("zb-v", 0), ("dualpipe-v", 0)])
def test_nothing_is_sent_where_a_v_turns_or_ends(name, back):
    p, m = 4, 8
    sent = Counter(
        op.stage for op in of_kind(play(sized(pp=p, vpp=2, microbatches=m, schedule=name)),
                                   "transfer")
    )  # fmt: skip
    # by both chunks there and back; from the last stage to the first only in a loop
    inner = 4 * m
    expected = {s: inner for s in range(p)}
    expected[0] -= (1 - back) * m * 2 if name != "interleaved" else m
    expected[p - 1] -= m if name == "interleaved" else 2 * m
    assert sent == expected


# ------------------------------------------------------------------- split backwards of a model
@cache
def chunk_seconds(schedule, pp=4, **layout):
    """Seconds of every (kind, stage, chunk) of a model."""
    ops = play(sized(pp=pp, microbatches=8, schedule=schedule, **layout))
    return {(op.kind, op.stage, op.chunk): op.duration for op in of_kind(ops, *COMPUTE)}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_halves_take_what_the_whole_does(recompute):
    whole = chunk_seconds("1f1b", recompute=recompute)
    halves = chunk_seconds("zb-h1", recompute=recompute)
    for s in range(4):
        late = halves["backward_weight", s, 0]
        both = halves["backward", s, 0] + late
        assert both == pytest.approx(whole["backward", s, 0], rel=1e-5)
        assert late == pytest.approx(chunk_seconds("zb-h1")["backward_weight", s, 0], rel=1e-6)
    assert "backward_weight" not in {kind for kind, *_ in whole}


@pytest.mark.parametrize(("tp", "least", "most"), [(1, 1.0, 1.0), (8, 1.05, 1.3)])
def test_a_collective_that_weights_hid_shows_where_the_backward_is_split(
    tp, least, most, monkeypatch
):
    """Of which compute beside it would become none the longer."""
    whole = "prism.workload.expand.exposed"
    monkeypatch.setattr(whole, lambda seconds, beside_s, cost: max(0.0, seconds - beside_s))
    wide = {"hidden_size": 4096, "ffn_size": 8192, "n_heads": 32}

    def seconds(schedule):
        ops = play(sized(wide, {"gpus_per_node": tp}, pp=2, tp=tp, schedule=schedule))
        mine = [op for op in ops if (op.stage, op.microbatch) == (0, 1)]
        return sum(op.duration for op in of_kind(mine, "backward", "backward_weight"))

    assert least - 1e-5 <= seconds("zb-h1") / seconds("1f1b") <= most + 1e-5


def test_layers_go_where_their_virtual_stage_lies():
    """Virtual stages of 1 to 6 layers, there and back; chunks take a time beside their layers."""
    split = [1, 2, 3, 4, 5, 6, 2, 1]
    ops = play(sized({"n_layers": 24}, pp=4, microbatches=8, schedule="zb-v", layer_split=split))
    took = {(op.stage, op.chunk): op.duration for op in of_kind(ops, "forward")}
    layer = took[2, 0] - took[1, 0]
    layers = {(1, 1): 2, (2, 1): 6, (3, 0): 4, (3, 1): 5}
    found = {key: 2 + (took[key] - took[1, 0]) / layer for key in layers}
    assert found == pytest.approx(layers, rel=1e-3)


@pytest.mark.parametrize("name", SPLIT)
def test_resolutions_agree_and_every_mode_shares_gradients(name):
    op, kernel = (
        sized(pp=2, tp=2, microbatches=4, schedule=name, cluster={"gpus_per_node": 4}).replace(
            {"variability.resolution": resolution}
        )
        for resolution in ("op", "kernel")
    )
    assert step_time(op) == pytest.approx(step_time(kernel), rel=1e-5)
    for mode, more in (("ddp", {}), ("zero1", {}), ("fsdp", {}), ("hsdp", {"shard_size": 2})):
        job = sized(pp=2, dp=4, microbatches=8, schedule=name, data_parallel=mode, **more)
        ops = play(job, replicas=(0,), stages=(0,))
        late = [op for op in of_kind(ops, "backward_weight", "backward") if op.microbatch == 7]
        for chunk in range(job.parallelism.vpp):
            last = max(op.end for op in late if op.chunk == chunk)
            assert any(op.start >= last - 1e-9 for op in of_kind(ops, "gradient_reduce"))
        reduces = of_kind(ops, "gradient_reduce")
        # in buckets of 160 MB, of which the last comes after the backward; fsdp's units are whole
        split = mode in ("ddp", "zero1") and 4 * HELD / 2 / job.parallelism.vpp > 160e6
        assert len(reduces) == job.parallelism.vpp * (1 + split)
        assert len(of_kind(ops, "gradient_replicate")) == len(reduces) * (mode == "hsdp")
        assert reduces[-1].start >= max(op.end for op in late) - 1e-9


# ----------------------------------------------------------- gathers and reductions of one stage
def ends_of_streams(ops, prefetch, overlap, reshard, microbatches):
    """When compute and collectives of a lone stage end, by the rules of the two streams.

    A use's parameters are gathered `prefetch` uses ahead of compute; one communicator runs gathers
    and reductions one at a time, in the order in which they are issued.
    """
    (norm,) = of_kind(ops, "grad_norm_reduce")
    ops = [op for op in ops if op.start < norm.start]
    gathers = iter(op.duration for op in of_kind(ops, "parameter_gather"))
    reduces = iter(op.duration for op in of_kind(ops, "gradient_reduce"))
    computes, issued, waiting, uses, have = of_kind(ops, *COMPUTE), [], 0, [], set()
    for op in computes:
        if reshard or op.chunk not in have:
            uses.append(op)
        have.add(op.chunk)
    has_gathers = bool(of_kind(ops, "parameter_gather"))
    clock = wire = 0.0
    used = 0
    for op in computes:
        if has_gathers and used < len(uses) and uses[used] is op:
            used += 1
            while len(issued) < min(len(uses), used + (prefetch if overlap else 0)):
                wire = max(wire, clock) + next(gathers)
                issued.append(wire)
            clock = max(clock, issued[used - 1])
        clock += op.duration
        if op.kind == "backward" and (reshard or op.microbatch == microbatches - 1):
            waiting += 1
        while waiting and overlap:
            wire, waiting = max(wire, clock) + next(reduces), waiting - 1
    for _ in range(waiting):
        wire = max(wire, clock) + next(reduces)
    assert next(gathers, None) is None and next(reduces, None) is None
    return clock, wire


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("gbytes_per_s", [50.0, 20.0])
def test_gathers_run_ahead_as_far_as_prefetch(prefetch, reshard, gbytes_per_s):
    """The tables of a large vocabulary take longer than the compute of a layer."""
    links = {"network": {"bandwidth_gbytes_per_s": gbytes_per_s}}
    layout = {"dp": 4, "data_parallel": "fsdp", "microbatches": 2, "prefetch": prefetch}
    model = {"vocab_size": 128_000}
    job = sized(model, {"links": links}, reshard_after_forward=reshard, **layout)
    ops = play(job, replicas=(0,))
    (norm,) = of_kind(ops, "grad_norm_reduce")
    end = max(ends_of_streams(ops, prefetch, True, reshard, 2))
    assert norm.start == pytest.approx(end, rel=1e-5)
    if prefetch != 1 and reshard:  # negative control: the rule tells one from the other
        assert max(ends_of_streams(ops, 1, True, reshard, 2)) != pytest.approx(end, rel=1e-4)


@pytest.mark.parametrize("mode", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize("overlap", [True, False])
def test_reductions_follow_the_last_backward(mode, overlap):
    """In order of the backward; beside it, or all after it."""
    job = sized(dp=4, microbatches=3, data_parallel=mode, overlap=overlap, bucket_layers=2)
    ops, reshard = play(job, replicas=(0,)), mode == "fsdp"
    clock, wire = ends_of_streams(ops, 1, overlap, reshard, 3)
    (norm,) = of_kind(ops, "grad_norm_reduce")
    assert norm.start == pytest.approx(max(clock, wire), rel=1e-5)
    chunks = 1 + max(op.chunk for op in of_kind(ops, *COMPUTE))
    assert len(of_kind(ops, "gradient_reduce")) == chunks * (3 if reshard else 1)
    if not overlap:
        spent = sum(op.duration for op in ops)
        assert step_time(job) == pytest.approx(spent, rel=1e-5)


# -------------------------------------------------------------------------------- end of a step
@pytest.mark.parametrize(("pp", "tp"), [(3, 1), (4, 2)])
@pytest.mark.parametrize("framework", ["megatron", "eager", "nanotron"])
def test_end_of_step_is_a_chain_of_barriers(pp, tp, framework):
    """Each stage's reductions, both ends of the pipeline, then all, and each one's optimizer.

    But for nanotron, gradients are reduced beside the last backward, a last message after it;
    Megatron gathers parameters before and beside the first forward, others after the optimizer.
    """
    job = sized({"tied_embeddings": True, "n_layers": 12}, {"gpus_per_node": 2}, None,
                pp=pp, tp=tp, dp=2, microbatches=5, data_parallel="zero1",
                framework=framework)  # fmt: skip
    ops, done = play(job, replicas=(0,)), []
    for s in range(pp):
        mine = [op for op in ops if op.stage == s]
        chain = of_kind(mine, *COMPUTE)[-1:]
        *beside, last = of_kind(mine, "gradient_reduce")
        assert len(beside) <= (framework != "nanotron")
        for op in beside:
            assert op.start == pytest.approx(chain[0].start, rel=1e-5)
        assert last.start == pytest.approx(max(op.end for op in chain + beside), rel=1e-5)
        chain.append(last)
        for name in ("layernorm_reduce",):
            if name == "layernorm_reduce" and tp == 1:
                assert not of_kind(mine, name)
                continue
            (op,) = of_kind(mine, name)
            assert op.start == pytest.approx(chain[-1].end, rel=1e-5)
            chain.append(op)
        done.append(chain[-1].end)
    tables = of_kind(ops, "embedding_reduce")
    assert {op.stage for op in tables} == {0, pp - 1}
    for op in tables:
        assert op.start == pytest.approx(max(done[0], done[-1]), rel=1e-5)
    assert max(done[1:-1]) < tables[0].end
    norms = of_kind(ops, "grad_norm_reduce")
    assert len(norms) == pp
    adams, gathers = (of_kind(ops, name) for name in ("optimizer", "parameter_gather"))
    for norm, adam in zip(norms, adams, strict=True):
        assert norm.start == pytest.approx(max(*done, tables[0].end), rel=1e-5)
        assert adam.start == pytest.approx(norm.end, rel=1e-5)
    if framework == "megatron":
        for s in range(pp):
            forward = min(op.start for op in of_kind(ops, "forward") if op.stage == s)
            first, *beside = (op for op in gathers if op.stage == s)
            assert first.start == 0.0 and first.end <= forward * (1.0 + 1e-5)
            assert all(op.start == first.end for op in beside)
    else:
        assert [op.start for op in gathers] == pytest.approx([op.end for op in adams], rel=1e-5)
    assert step_time(job) == pytest.approx(max(op.end for op in ops), rel=1e-5)


def test_the_middle_of_a_pipeline_holds_up_only_the_norm():
    """Its work ends last in a slow middle stage; the tables of both ends do not wait for it."""
    job = sized({"tied_embeddings": True}, {"node_slowdowns": {1: 3.0}}, pp=3, microbatches=1,
                layer_split=[1, 6, 1])  # fmt: skip
    ops = play(job.replace({"parallelism.schedule": "zb-h1"}), ideal=False)
    last = [max(op.end for op in of_kind(ops, *COMPUTE) if op.stage == s) for s in range(3)]
    assert last[1] > max(last[0], last[2])
    for op in of_kind(ops, "embedding_reduce"):
        assert op.start == pytest.approx(max(last[0], last[2]), rel=1e-5)
    for op in of_kind(ops, "grad_norm_reduce"):
        assert op.start == pytest.approx(max(last[1], op.start), rel=1e-5)


def test_ends_on_one_stage_share_a_tied_table():
    tied = {"tied_embeddings": True}
    plain, v = (play(sized(tied, pp=4, microbatches=8, schedule=s)) for s in ("1f1b", "zb-v"))
    assert of_kind(plain, "embedding_reduce") and not of_kind(v, "embedding_reduce")


# ---------------------------------------------------------------------------------------- memory
@cache
def activation_gib(schedule, microbatches=16, recompute="none", **layout):
    """What activations take on the stage that needs most [GiB]; little of it by the loss."""
    job = sized({"n_layers": 24, "vocab_size": 512}, pp=4, microbatches=microbatches,
                schedule=schedule, recompute=recompute, **layout)  # fmt: skip
    result = prism.estimate(job, replicates=64, run_replicates=1, steps=1, seed=1)
    parts = prism.summary(result)["memory"]["parts"]
    return sum(parts[kind] for kind in ("checkpoints", "norms", "attention", "mlp", "logits"))


def test_memory_is_the_published_counts():
    """Chunk activations in flight: p of a stage, 2 p + 1 of half a stage for DualPipeV."""
    layers = {"1f1b": 4 * 6, "zb-h1": 4 * 6, "zb-v": 8 * 3, "dualpipe-v": 9 * 3, "gpipe": 16 * 6}
    found = {name: activation_gib(name) for name in layers}
    expected = {name: found["1f1b"] * n / layers["1f1b"] for name, n in layers.items()}
    assert found == pytest.approx(expected, rel=0.03)
    for name in ("1f1b", *SPLIT):  # more microbatches hold no more
        assert activation_gib(name, 80) == pytest.approx(found[name], rel=1e-9)
    # full recomputation keeps little for B, but what W needs is there from B on
    assert activation_gib("zb-h1", recompute="full") > 2 * activation_gib("1f1b", recompute="full")


# ------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    "layout",
    [
        {"schedule": "zb-v", "vpp": 4},
        {"schedule": "zb-h1", "vpp": 2},
        {"schedule": "dualpipe-v", "microbatches": 7},
        {"schedule": "zb-v", "p2p": "blocking"},
        {"schedule": "interleaved", "vpp": 2, "microbatches": 6},
    ],
)
def test_what_a_schedule_cannot_have(layout):
    with pytest.raises(prism.PrismError, match=r"parallelism\."):
        given(**{"pp": 4, "microbatches": 8, **layout})


def test_a_schedule_varied_by_hand_brings_its_chunks():
    vary = {"parallelism.schedule": ["1f1b", "interleaved", *SPLIT]}
    found = prism.sweep(given(pp=4, vpp=2, microbatches=8), vary, replicates=64, seed=1)
    rows = prism.summary(found)["rows"]
    times = {row["parallelism.schedule"]: row["p50"] for row in rows}
    assert times["zb-v"] <= times["zb-h1"] <= times["interleaved"] <= times["1f1b"]
    assert (times["1f1b"], times["zb-h1"]) == pytest.approx((33.0, 27.0))
