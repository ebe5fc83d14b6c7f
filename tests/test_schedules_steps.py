"""Steps with split backwards: times, transfers, gradients, effects, memory, layouts, sweeps."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_memory import job as gpt
from test_schedules import items_of, span
from test_stepgraph import collective, kernel, step_time, workload

import prism
from prism import PrismError, load_job, make_schedule, sweep
from prism.analyses.placements import alternatives
from prism.analyses.placements.problem import make_problem
from prism.analyses.sweeps.layouts import layouts
from prism.analyses.sweeps.points import least_seconds
from prism.cluster.linkcongestion import congested_links
from prism.cluster.machine import build_cluster
from prism.cluster.nodemap import Placement
from prism.cluster.wiring import Wiring
from prism.jobs.job import layer_split
from prism.jobs.schedule import Slots, action_times, play_schedule
from prism.simulation.prepare import prepare
from prism.simulation.steps import run_blocks
from prism.workload.build import ChunkWork, build_workload, nominal_library
from prism.workload.kernels import split_backward
from prism.workload.memory import estimate_memory, layer_activation_bytes
from prism.workload.stepgraph import GraphOptions, build_step_graph

SPLIT = ("zb-h1", "zb-v", "dualpipe-v")
V = ("zb-v", "dualpipe-v")


def pipeline(effects=None, durations=None, **parallelism):
    return load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0, **(durations or {})}},
        "parallelism": parallelism,
        "variability": {"library": None, "effects": effects or {}},
    })  # fmt: skip


def job_time(job):
    times = run_blocks(prepare(job, 0).program, range(1), 0)[0][0]
    assert np.all(times == times[0])
    return float(times[0])


def with_chunks(schedule, f, b, w, **extra):
    """Workload of equal chunks, with halves beside the whole backward."""
    work = ChunkWork(*((kernel(n, x),) for n, x in zip("fbiw", (f, b + w, b, w), strict=True)))
    shape = np.ones((len(schedule), schedule.n_chunks))
    return workload(shape, shape, chunks=((work,) * schedule.n_chunks,) * len(schedule), **extra)


# --------------------------------------------------------------------------------- step times
@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 7), (4, 12)])
@pytest.mark.parametrize("weight_s", [None, 0.7])
def test_a_step_is_the_longest_path(name, p, m, weight_s):
    given = {} if weight_s is None else {"weight_s": weight_s}
    job = pipeline(durations=given, pp=p, microbatches=m, schedule=name)
    v, w = job.parallelism.vpp, 1.0 if weight_s is None else weight_s
    assert v == (1 if name == "zb-h1" else 2)
    rows = items_of(name, make_schedule(name, p, m), 1.0 / v, (2.0 - w) / v, w / v)
    assert job_time(job) == pytest.approx(span(rows)[0], rel=1e-6)


def test_weights_by_stage():
    given = {"backward_s": [2.0, 3.0], "weight_s": [1.0, 2.5]}
    job = pipeline({}, given, pp=2, microbatches=1, schedule="zb-h1")
    # F F, B of stage 1, B of stage 0, and its W; stage 1's W is done by then
    assert job_time(job) == pytest.approx(1 + 1 + 0.5 + max(1.0 + 1.0, 2.5), rel=1e-6)
    with pytest.raises(PrismError, match="weight_s: .*backward_s"):
        pipeline({}, {"weight_s": 2.5}, pp=2, microbatches=1)
    with pytest.raises(PrismError, match="weight_s: .*3 durations"):
        pipeline({}, {"weight_s": [1.0] * 3}, pp=2, microbatches=1)


@pytest.mark.parametrize(("name", "hops"), [("zb-h1", 3), ("zb-v", 6)])
def test_nothing_is_sent_where_a_v_turns(name, hops):
    # one microbatch: there and back over all virtual stages, twice each hop between stages
    schedule = make_schedule(name, 4, 1)
    n = 4 * schedule.n_chunks
    sent = collective("t", "transfer", 0.25)
    work = with_chunks(schedule, 1.0, 2.0, 0.0, transfer=sent)
    assert step_time(work, schedule) == pytest.approx(n * 3.0 + 2 * hops * 0.25, rel=1e-6)
    graph = build_step_graph(work, schedule, GraphOptions())
    links = [graph.op_types[t].link for t in graph.op_type if t >= 0]
    counts = {s: links.count(s) for s in range(4)}
    # forward and back again, by both chunks in a V; nothing from the last stage to the first
    each = 2 * schedule.n_chunks
    assert counts == {0: each, 1: each, 2: each, 3: 0}


@pytest.mark.parametrize("name", SPLIT)
def test_gradients_are_reduced_after_the_last_weights(name):
    schedule = make_schedule(name, 2, 4)
    reduces = (((collective("r", "reduce_scatter", 100.0),),) * schedule.n_chunks,) * 2
    time = step_time(with_chunks(schedule, 1.0, 1.0, 1.0, reduces=reduces), schedule)
    # a stage's reductions follow each other, the first one after that chunk's last W (or whole B)
    slots, expected = Slots(1.0, 2.0, 1.0), []
    starts, lengths = play_schedule(schedule, *slots), action_times(schedule, slots)
    for row, start, length in zip(schedule, starts, lengths, strict=True):
        last = {a.chunk: begin + d for a, begin, d in zip(row, start, length, strict=True)
                if a.kind != "F"}  # fmt: skip
        end = 0.0
        for done in sorted(last.values()):
            end = max(end, done) + 100.0
        expected.append(end)
    assert time == pytest.approx(max(expected), rel=1e-6)


# ------------------------------------------------------------------------------ what is in a half
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("tp", [1, 8])
def test_halves_hold_what_the_whole_does(recompute, tp):
    job = gpt(pp=4, tp=tp, schedule="zb-v", recompute=recompute)
    for row in build_workload(job, None).chunks:
        for chunk in row:
            both = chunk.inputs + chunk.weights
            assert sum(k.flop for k in both) == pytest.approx(sum(k.flop for k in chunk.backward))
            assert sorted(k.name for k in both) == sorted(k.name for k in chunk.backward)
            assert not any(k.group for k in chunk.weights)
            assert all("recompute" not in k.name for k in chunk.weights)
            hidden = sum(k.hidden_s for k in chunk.backward)
            assert (hidden > 0) == (tp > 1)
            spent = sum(k.duration for k in chunk.backward) + hidden
            assert sum(k.duration for k in both) == pytest.approx(spent)
    # weight gradients are the products of backward that inputs' gradients are not: half of it
    products = [k for k in row[0].backward if k.kernel_class.startswith("gemm")]
    weights = [k for k in products if k.is_weight]
    again = sum(k.flop for k in products if k.name.startswith("recompute"))
    assert 2 * sum(k.flop for k in weights) == pytest.approx(sum(k.flop for k in products) - again)


def test_a_hidden_collective_shows_where_the_backward_is_split():
    kernels = build_workload(gpt(pp=2, tp=8), None).chunks[0][0].backward
    inputs, _ = split_backward(kernels)
    whole = [k for k in build_workload(gpt(pp=2, tp=8), None).chunks[0][0].forward
             if k.name == "mlp_reduce_scatter"]  # fmt: skip
    shown, before = ([k for k in half if k.name == "mlp_backward_reduce_scatter"]
                     for half in (inputs, kernels))  # fmt: skip
    assert before[0].duration < shown[0].duration == pytest.approx(whole[0].duration)


@pytest.mark.parametrize("layout", [{"pp": 4}, {"pp": 1, "schedule": "zb-h1"}])
def test_no_half_where_nothing_is_split(layout):
    chunk = build_workload(gpt(**layout), None).chunks[0][0]
    assert chunk.inputs == chunk.weights == ()


def test_ends_on_one_stage_share_a_tied_table():
    tied = {"tied_embeddings": True, "vocab_size": 51_200}
    plain, v = (build_workload(gpt(tied, pp=4, dp=2, schedule=s), None) for s in ("1f1b", "zb-v"))
    assert plain.embedding_reduce is not None
    assert v.embedding_reduce is None
    # one table on two stages is two copies
    two, one = (sum(c.bytes for c in work.optimizer) for work in (plain, v))
    assert two - one == pytest.approx(30.0 * 51_200 * 1024, rel=1e-6)


def test_layers_go_where_their_virtual_stage_lies():
    split = [1, 2, 3, 4, 5, 6, 2, 1]
    job = gpt(pp=4, schedule="zb-v", layer_split=split)
    names = [[sum(k.name == "qkv" for k in chunk.forward) for chunk in row]
             for row in build_workload(job, None).chunks]  # fmt: skip
    assert names == [[1, 1], [2, 2], [3, 6], [4, 5]]
    assert layer_split(job) == split


# ------------------------------------------------------------------------------------- effects
@pytest.mark.parametrize("name", SPLIT)
def test_all_of_a_microbatch_follow_one_draw(name):
    effects = {"microbatch": {"cv": 0.2, "backward_loading": 1.5}}
    step = prepare(pipeline(effects, pp=3, microbatches=6, schedule=name), 0)
    graph, bank, vec = step.graph, step.program.bank, step.program.ops.vec
    kinds = np.array([t.op_kind for t in graph.op_types])[np.maximum(graph.op_type, 0)]
    kinds[graph.op_type < 0] = ""
    late = kinds == "backward_weight"
    assert late.sum() == {"zb-h1": 18, "zb-v": 36}.get(name, late.sum())
    for kind in ("forward", "backward", "backward_weight"):
        own = kinds == kind
        assert (bank.mb[vec[own, 0]] == graph.microbatch[own]).all()
        assert len(set(bank.mb_table[vec[own, 0]])) == 1
    tables = [bank.mb_table[vec[kinds == k, 0]][0] for k in ("forward", "backward")]
    assert bank.mb_table[vec[late, 0]][0] == tables[1] != tables[0]


def test_spread_is_not_changed_by_splitting_one_stage_after_another():
    # microbatch effects alone, one microbatch: halves of the same draw add up to the whole
    effects = {"microbatch": {"cv": 0.3}}
    plain, split = (
        run_blocks(prepare(pipeline(effects, {"weight_s": 0.5}, pp=2, microbatches=1,
                                    schedule=name), 3).program, range(2), 3)[0]
        for name in ("1f1b", "zb-h1")
    )  # fmt: skip
    # F F B B against F F I I W, all following one draw x: 2 x + 4 y and 2 x + 3.5 y
    x = split - plain
    assert np.all(x < 0)
    y = -x / 0.5
    assert y.mean() == pytest.approx(1.0, abs=0.1)
    assert np.corrcoef(y.ravel(), (plain - 4 * y).ravel() / 2)[0, 1] > 0.99


@pytest.mark.parametrize("name", SPLIT)
def test_resolutions_agree(name):
    def at(resolution):
        job = load_job("llama3-70b-fsdp-512", [
            f"parallelism={{tp: 2, cp: 1, pp: 2, dp: 1, microbatches: 4, schedule: {name}}}",
            "parallelism.data_parallel=none", "cluster={nodes: 1, gpus_per_node: 4}",
            "model.n_layers=6", f"variability.resolution={resolution}",
        ])  # fmt: skip
        return prepare(job, 1)

    op, by_kernel = (at(resolution) for resolution in ("op", "kernel"))
    means = [run_blocks(step.program, range(8), 1)[0].mean() for step in (op, by_kernel)]
    assert means[0] == pytest.approx(means[1], rel=5e-3)
    late = [t for t in by_kernel.graph.op_types if t.op_kind == "backward_weight"]
    assert {k.name for t in late for k in t.kernels} >= {"qkv_wgrad", "mlp_down_wgrad"}
    assert by_kernel.graph.nominal_s == pytest.approx(op.graph.nominal_s)


@pytest.mark.parametrize("mode", ["ddp", "zero1", "fsdp", "hsdp"])
@pytest.mark.parametrize("name", SPLIT)
def test_every_kind_of_data_parallelism(name, mode):
    sizes = {"n_layers": 8, "hidden_size": 4096, "ffn_size": 14_336, "seq_len": 4096}
    layout = {"pp": 2, "dp": 4, "data_parallel": mode, "microbatches": 8}
    if mode == "hsdp":
        layout["shard_size"] = 2
    plain, split = (prepare(gpt(sizes, **layout, schedule=s), 0) for s in ("1f1b", name))
    assert split.graph.nominal_s < plain.graph.nominal_s
    kinds = [[t.op_kind for t in step.graph.op_types] for step in (plain, split)]
    assert set(kinds[1]) == set(kinds[0]) | {"backward_weight"}
    times = run_blocks(split.program, range(1), 0)[0]
    assert times.min() > split.graph.nominal_s * 0.9


# -------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("1f1b", 4),  # p microbatches of a stage
        ("zb-h1", 4),
        ("zb-v", 8),  # of half a stage
        ("dualpipe-v", 9),  # 2 p + 1
    ],
)
def test_memory_is_the_published_counts(name, chunks):
    found = estimate_memory(gpt(pp=4, schedule=name, microbatches=16))
    _, kept = layer_activation_bytes(gpt())
    layers = 24 // (4 * (1 if name in ("1f1b", "zb-h1") else 2))
    # where the loss is, its logits come on top: on the last stage, in a V on the first
    loss = 512 * (4 * 512 + 4 * 1024)
    late = 512 * (2 * 512 + 2 * 1024)
    most = chunks * layers * kept
    assert most <= found.activations <= most + 4 * max(loss, late)


@settings(max_examples=25)
@given(name=st.sampled_from(SPLIT), pp=st.sampled_from([2, 3, 4]), rounds=st.integers(2, 9),
       mode=st.sampled_from(["ddp", "fsdp"]), reshard=st.booleans(),
       recompute=st.sampled_from(["none", "full"]))  # fmt: skip
def test_many_microbatches_hold_no_more(name, pp, rounds, mode, reshard, recompute):
    layout = {"pp": pp, "dp": 2, "data_parallel": mode, "schedule": name, "recompute": recompute}
    few, many = (
        estimate_memory(gpt({"n_layers": 48}, **layout, microbatches=n * pp,
                            reshard_after_forward=reshard))
        for n in (rounds, 40)
    )  # fmt: skip
    assert few.total <= many.total * (1 + 1e-9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prism.workload.memory.STEADY_ROUNDS", 10**6)
        walked = estimate_memory(gpt({"n_layers": 48}, **layout, microbatches=40 * pp,
                                     reshard_after_forward=reshard))  # fmt: skip
    assert many.total == pytest.approx(walked.total)


@pytest.mark.parametrize("name", SPLIT)
def test_gradients_and_weights_are_counted_once(name):
    # each is whole on a stage once at most, however many halves are under way
    layout = {"pp": 4, "schedule": name, "microbatches": 16}
    found = estimate_memory(gpt(**layout, dp=8, data_parallel="fsdp"))
    whole = estimate_memory(gpt(**layout))
    assert found.weights <= whole.weights * (1 + 1e-9)
    assert found.gradients <= whole.gradients * (1 + 1 / 8 + 1e-9)


def test_recomputed_activations_wait_for_their_weights():
    # full recomputation keeps little for B, but what W needs is there from B on
    little, more = (estimate_memory(gpt(pp=4, schedule=name, microbatches=16, recompute="full"))
                    for name in ("1f1b", "zb-h1"))  # fmt: skip
    assert more.activations > 2 * little.activations
    assert more.stage == 3  # which puts off most


# ------------------------------------------------------------------------------------ the wires
@pytest.mark.parametrize("order", ["megatron", "tp-cp-pp-dp"])
def test_a_v_has_no_way_from_the_last_stage_to_the_first(order):
    def at(**layout):
        return load_job("llama3-405b-16k", [
            f"cluster.placement={order}",
            *(f"parallelism.{key}={value}" for key, value in layout.items()),
        ])  # fmt: skip

    plain, v = at(schedule="1f1b", vpp=1), at(schedule="zb-v", vpp=2)
    library = nominal_library(v, None)
    one, other = (build_cluster(job, library) for job in (plain, v))
    assert one.transfer_time(1e8) == other.transfer_time(1e8)
    leaves = [congested_links(Placement(j), 16) for j in (plain, v)]
    assert all(np.array_equal(a, b) for a, b in zip(*leaves, strict=True))
    hops = [Wiring(c, Placement(j)).seconds("hop", 1e8, 3) for c, j in ((one, plain), (other, v))]
    assert np.array_equal(*hops)


def test_a_layer_moves_off_the_virtual_stages_of_a_slow_node(monkeypatch):
    split = [8, 10, 10, 9, 13, 10, 10, 10]  # stage 3 has the 9 and the 13, stage 0 the ends
    job = load_job("llama3-70b-fsdp-512", [
        "parallelism={tp: 8, cp: 1, pp: 4, vpp: 2, dp: 1, microbatches: 8, schedule: zb-v}",
        "parallelism.data_parallel=none", f"parallelism.layer_split={split}",
        "cluster={nodes: 4, node_slowdowns: {3: 1.3}}",
    ])  # fmt: skip
    seen, changed_job = [], alternatives.changed_job

    def change(*args, **blocks):
        seen.append(blocks["parallelism"]["layer_split"])
        return changed_job(*args, **blocks)

    monkeypatch.setattr(alternatives, "changed_job", change)
    problem = make_problem(prepare(job, 0), Placement(job).slowdowns(), 1)
    moved = alternatives.fewer_layers(problem, np.arange(4), 0)
    assert re.search("stage 3, .* stage 0", moved.label)
    assert seen == [[9, 10, 10, 9, 12, 10, 10, 10]]


# -------------------------------------------------------------------------------- sweeps, words
def test_a_schedule_varied_by_hand_brings_its_chunks():
    job = pipeline(pp=4, vpp=2, microbatches=8)
    vary = {"parallelism.schedule": ["1f1b", "interleaved", *SPLIT]}
    found = prism.summary(sweep(job, vary, replicates=64, seed=1))
    assert not found["refused"]
    times = {row["parallelism.schedule"]: row["p50"] for row in found["rows"]}
    assert times["zb-v"] <= times["zb-h1"] <= times["interleaved"] <= times["1f1b"]
    assert times["1f1b"] == pytest.approx(33.0)
    assert times["zb-h1"] == pytest.approx(27.0)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("zb-h1", [1, 1, 1, 21]),
        ("zb-h1", [21, 1, 1, 1]),
        *((name, "auto") for name in SPLIT),
        *((name, [1, 2, 3, 4, 5, 4, 3, 2]) for name in V),
        *((name, [14, 1, 1, 1, 4, 1, 1, 1]) for name in V),
    ],
)
def test_no_step_is_shorter_than_its_bound(name, split):
    job = gpt(pp=4, schedule=name, microbatches=8, layer_split=split)
    assert least_seconds(job) <= prepare(job, 0).graph.nominal_s


def test_layouts_keep_the_schedules_family():
    def of(**keys):
        job = gpt(pp=2, dp=4, microbatches=8, data_parallel="zero1", **keys)
        return [dict(zip(("pp", "vpp", "dp", "m"), (int(s[f"parallelism.{k}"]) for k in
                     ("pp", "vpp", "dp", "microbatches")), strict=True)) | {"drop": drop}
                for s, drop in layouts(job, 32)]  # fmt: skip

    for name in SPLIT:
        found = of(schedule=name)
        chunks = 1 if name == "zb-h1" else 2
        assert {row["vpp"] for row in found if row["pp"] > 1} == {chunks}
        assert all("parallelism.schedule" not in row["drop"] for row in found)
        if name == "dualpipe-v":
            assert all(row["m"] >= 2 * row["pp"] for row in found if row["pp"] > 1)
    assert all("parallelism.schedule" in row["drop"] for row in of())


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"schedule": "zb-v", "vpp": 4}, "zb-v .*2 chunks .*vpp = 4; .*vpp: 2"),
        ({"schedule": "zb-h1", "vpp": 2}, "zb-h1 .*one chunk .*vpp = 2; .*vpp: 1"),
        ({"schedule": "dualpipe-v", "microbatches": 7},
         "7, .*dualpipe-v .*2 .*4 stages; .* 8 "),
        ({"schedule": "zb-v", "p2p": "blocking"}, "blocking with zb-v"),
    ],
)  # fmt: skip
def test_what_a_schedule_cannot_have(layout, message):
    with pytest.raises(PrismError, match=message):
        pipeline(**{"pp": 4, "microbatches": 8, **layout})


def test_pooled_steps_keep_the_mean_and_lose_what_ops_share():
    effects = {"residual": {"cv": 0.1}, "microbatch": {"cv": 0.1}}
    job = pipeline(effects, pp=2, microbatches=1, schedule="zb-h1")
    variability = {"library": None, "dependence": "none", "effects": effects}
    blocks = job.model_dump(exclude={"name", "source"}) | {"variability": variability}
    full, none = (run_blocks(prepare(j, 2).program, range(32), 2)[0]
                  for j in (job, load_job(blocks)))  # fmt: skip
    assert none.mean() == pytest.approx(full.mean(), rel=0.01)
    assert none.std() < full.std()
