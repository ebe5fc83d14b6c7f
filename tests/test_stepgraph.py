"""Step graphs through the engine: closed forms, blocking transfers, fsdp, the end of a step."""

from collections import Counter
from dataclasses import replace

import naive
import numpy as np
import pytest
from campaign import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from prism import PrismError, engine, load_job, make_schedule
from prism.distributions.distribution import gamma
from prism.jobs.schedule import Action
from prism.simulation.assembly import build_program
from prism.simulation.prepare import prepare, prepare_variability
from prism.simulation.steps import run_blocks
from prism.workload import stepgraph as sg
from prism.workload.build import ChunkWork, Collective, Kernel, Workload
from prism.workload.opgraph import nominal_duration


def kernel(name, duration):
    return Kernel(name, "compute", duration, 0.0, 0.0, "residual/compute")


def collective(name, op_kind, duration):
    return Collective(name, op_kind, f"dp_{op_kind}", duration, 0.0, "residual/network_large")


def workload(forward, backward, **extra):
    """Workload of durations [stage][chunk]; collectives by field, none where not given."""
    forward, backward = np.atleast_2d(forward), np.atleast_2d(backward)
    p, v = forward.shape
    chunks = tuple(
        tuple(
            ChunkWork((kernel("f", forward[s, c]),), (kernel("b", backward[s, c]),))
            for c in range(v)
        )
        for s in range(p)
    )
    nothing = (((),) * v,) * p
    return Workload(**({"chunks": chunks, "gathers": nothing, "reduces": nothing} | extra))


def per_chunk(name, op_kind, durations):
    return tuple(
        tuple((collective(name, op_kind, d),) if d else () for d in row)
        for row in np.atleast_2d(durations)
    )


def run(work, schedule, effects=None, slow=(), **options):
    """Graph, and times [lane] of one block."""
    options = sg.GraphOptions(**options)
    job = load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 1.0}},
        "parallelism": {"pp": len(schedule), "dp": options.n_replicas, "microbatches": 1},
        "cluster": {"gpus_per_node": 1, "node_slowdowns": dict(slow)},
        "variability": {"library": None, "effects": effects or {}},
    })  # fmt: skip
    graph = sg.build_step_graph(work, schedule, options)
    program = build_program(job, graph, prepare_variability(job), 0)
    return graph, run_blocks(program, range(1), 0)[0][0]


def step_time(work, schedule, **options):
    times = run(work, schedule, **options)[1]
    assert np.all(times == times[0])
    return float(times[0])


def job_time(forward, backward, **parallelism):
    job = load_job({
        "model": {"durations": {"forward_s": forward, "backward_s": backward}},
        "parallelism": parallelism, "variability": {"library": None},
    })  # fmt: skip
    return float(run_blocks(prepare(job, 0).program, range(1), 0)[0][0, 0])


SHAPES = [(2, 2), (3, 7), (4, 4), (8, 32), (5, 16), (1, 3)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_equal_stages(schedule, p, m):
    time = job_time(1.0, 2.25, pp=p, microbatches=m, schedule=schedule)
    assert time == pytest.approx((m + p - 1) * 3.25, rel=1e-6)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 3), (4, 4, 4), (8, 16, 2)])
def test_interleaved_divides_the_bubble(p, m, v):
    time = job_time(1.0, 2.0, pp=p, vpp=v, microbatches=m)
    assert time == pytest.approx(m * 3.0 + (p - 1) * 3.0 / v, rel=1e-6)


@pytest.mark.parametrize(("p", "m"), [(4, 4), (4, 9), (8, 8), (16, 16)])
@pytest.mark.parametrize("x", [0.05, 0.2, 0.7, 1.5])
@pytest.mark.parametrize("t_b", [0.5, 1.0, 2.0])
def test_one_slow_stage(p, m, x, t_b):
    """The closed form of one stage slower by 1 + x; it holds for m >= p."""
    t = 1.0 + t_b
    for s in {0, 1, p // 2, p - 1}:
        forward, backward = [1.0] * p, [t_b] * p
        forward[s], backward[s] = 1.0 + x, t_b * (1.0 + x)
        hidden = (p - 1 - s) * min(x * t, (1 + x) * min(1.0, t_b), t)
        expected = (m + p - 1) * t + m * x * t - hidden
        time = job_time(forward, backward, pp=p, microbatches=m)
        assert time == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 5), (3, 2), (4, 4), (4, 13), (6, 3), (8, 20)])
@pytest.mark.parametrize("transfer", [0.0, 0.25])
def test_blocking_transfers_are_rendezvous(schedule, p, m, transfer):
    rng = np.random.default_rng(100 * p + m)
    forward, backward = rng.uniform(0.5, 1.5, (p, 1)), rng.uniform(1.0, 3.0, (p, 1))
    actions = make_schedule(schedule, p, m)
    duration = {
        (s, i): (forward if a.kind == "F" else backward)[s, 0]
        for s, row in enumerate(actions)
        for i, a in enumerate(row)
    }
    sent = Collective("transfer", "transfer", "p2p", transfer, 0.0, "residual/p2p")
    work = workload(forward, backward, transfer=sent)
    expected = naive.finish_blocking(actions, duration, transfer, schedule == "gpipe")
    assert step_time(work, actions, p2p="blocking") == pytest.approx(expected, rel=1e-6)
    free = naive.finish(actions, duration, 1, transfer)
    assert step_time(work, actions) == pytest.approx(free, rel=1e-6)
    assert free <= expected


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_blocking_steps_equal_the_oracle(schedule):
    """Every op with a duration of its own: which stage waits for which differs by replicate."""
    values = {
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"pp": 4, "dp": 2, "microbatches": 7, "schedule": schedule},
        "variability": {"library": None, "effects": {"residual": {"law": "gamma", "cv": 1.5}}},
    }
    free = load_job(values)
    values["parallelism"]["p2p"] = "blocking"
    job = load_job(values)
    times, free_times = (run_blocks(prepare(j, 9).program, range(1), 9)[0][0] for j in (job, free))
    v = prepare_variability(job)
    for replicate in range(0, 64, 7):
        expected = naive.step_time(job, v, 9, replicate)
        assert times[replicate] == pytest.approx(expected, rel=3e-6)
    # negative control: free transfers would fail
    assert np.all(free_times <= times * (1 + 1e-6))
    assert np.mean(free_times < 0.999 * times) > 0.2


@pytest.mark.parametrize("p2p", ["async", "blocking"])
@pytest.mark.parametrize("p", [1, 2, 5])
def test_one_microbatch_waits_for_every_transfer(p2p, p):
    sent = Collective("transfer", "transfer", "p2p", 0.125, 0.0, "residual/p2p")
    work = workload(np.ones((p, 1)), 2 * np.ones((p, 1)), transfer=sent)
    time = step_time(work, make_schedule("1f1b", p, 1), p2p=p2p)
    assert time == p * 3.0 + 2 * (p - 1) * 0.125


def use_times(gather, forward, backward, prefetch, reshard, microbatches):
    """End of a lone stage under fsdp, from the definition: a gather stream `prefetch` ahead."""
    n = len(forward)
    uses = [("F", c) for c in range(n)] + [("B", c) for c in reversed(range(n))]
    clock = stream = 0.0
    begun, have = [], set()
    for kind, c in uses * microbatches:
        if reshard or c not in have:
            have.add(c)
            begun.append(clock)  # this use is next: its own gather may be under way for long
            k = len(begun) - 1 - prefetch
            stream = max(stream, begun[k] if k >= 0 else 0.0) + gather[c]
            clock = max(clock, stream)
        clock += forward[c] if kind == "F" else backward[c]
    return clock


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
@pytest.mark.parametrize("reshard", [False, True])
def test_gathers_run_ahead_as_far_as_prefetch(prefetch, reshard):
    rng = np.random.default_rng(7)
    gather, forward, backward = rng.uniform(0.1, 2.0, (3, 6))
    work = workload(forward, backward, gathers=per_chunk("g", "all_gather", gather))
    schedule = make_schedule("1f1b", 1, 3, 6)
    time = step_time(work, schedule, prefetch=prefetch, reshard_after_forward=reshard)
    expected = use_times(gather, forward, backward, prefetch, reshard, 3)
    assert time == pytest.approx(expected, rel=1e-6)
    no_overlap = step_time(
        work, schedule, prefetch=prefetch, reshard_after_forward=reshard, overlap=False
    )
    n = 3 * 2 if reshard else 1
    assert no_overlap == pytest.approx(3 * (forward + backward).sum() + n * gather.sum(), rel=1e-6)


@pytest.mark.parametrize(("gather", "expected"), [(0.5, 0.5 + 8 * 3.0), (1.5, 8 * 1.5 + 1 + 16)])
def test_gathers_hide_behind_compute(gather, expected):
    """Short gathers: the first is exposed. Long ones: forward runs at their pace."""
    work = workload([1.0] * 8, [2.0] * 8, gathers=per_chunk("g", "all_gather", [gather] * 8))
    assert step_time(work, make_schedule("1f1b", 1, 1, 8)) == expected


@pytest.mark.parametrize("reduce", [0.5, 3.0])
def test_reduces_follow_the_last_backward(reduce):
    n, m = 5, 4
    work = workload([1.0] * n, [2.0] * n, reduces=per_chunk("r", "reduce_scatter", [reduce] * n))
    schedule = make_schedule("1f1b", 1, m, n)
    total = m * n * 3.0
    # the first bucket is ready n - 1 backwards before the end; the stream then is busy or waits
    assert step_time(work, schedule) == max(total + reduce, total - (n - 1) * 2.0 + n * reduce)
    assert step_time(work, schedule, overlap=False) == total + n * reduce
    graph = run(work, schedule)[0]
    kinds = [graph.op_types[t].op_kind for t in graph.op_type[graph.op_type >= 0]]
    assert kinds.count("reduce_scatter") == n
    graph = run(work, schedule, reshard_after_forward=True)[0]
    kinds = [graph.op_types[t].op_kind for t in graph.op_type[graph.op_type >= 0]]
    assert kinds.count("reduce_scatter") == n * m


@pytest.mark.parametrize(
    ("among", "expected"), [("dp_cp", 8 * 2 + 8 * 2 + 8 * 3), ("", 7 * 2 + 2 * 2 + 8 * 3)]
)
def test_gathers_and_reductions_of_a_group_take_turns(among, expected):
    """Compute of no length: one communicator takes the sum; of two only what came first adds."""

    def of(group, name, op_kind, seconds):
        rows = per_chunk(name, op_kind, [seconds] * 8)
        return tuple(tuple((replace(x, group=group),) for (x,) in row) for row in rows)

    gathers = of("dp_cp", "g", "all_gather", 2.0)
    reduces = of(among, "r", "reduce_scatter", 3.0)
    work = workload([1e-9] * 8, [1e-9] * 8, gathers=gathers, reduces=reduces)
    time = step_time(work, make_schedule("1f1b", 1, 1, 8), reshard_after_forward=True)
    assert time == pytest.approx(expected, rel=1e-6)


def test_pipeline_reduces_once_per_chunk_and_gathers_once():
    p, v, m = 2, 2, 4
    work = workload(
        np.ones((p, v)), 2 * np.ones((p, v)),
        gathers=per_chunk("g", "all_gather", np.full((p, v), 0.25)),
        reduces=per_chunk("r", "reduce_scatter", np.full((p, v), 0.25)),
    )  # fmt: skip
    schedule = make_schedule("interleaved", p, m, v)
    graph = run(work, schedule)[0]
    kinds = [graph.op_types[t].op_kind for t in graph.op_type[graph.op_type >= 0]]
    assert kinds.count("all_gather") == kinds.count("reduce_scatter") == p * v
    pipeline = m * v * 3.0 + (p - 1) * 3.0
    # exposed: the first gather and the last reduce; the other gathers were prefetched
    assert step_time(work, schedule) == pipeline + 0.5


def end_of_step(p, optimizer, gathers):
    return {
        "reduces": per_chunk("r", "reduce_scatter", np.full((p, 1), 0.5)),
        "layernorm_reduce": collective("ln", "all_reduce", 0.25),
        "embedding_reduce": collective("emb", "all_reduce", 0.125),
        "grad_norm_reduce": collective("norm", "all_reduce", 0.0625),
        "optimizer": tuple(collective("adam", "optimizer", d) for d in optimizer),
        "param_gathers": (tuple(collective("pg", "all_gather", d) for d in gathers),),
    }


@pytest.mark.parametrize("dp", [1, 3])
@pytest.mark.parametrize("p", [2, 4])
def test_end_of_step_is_a_chain_of_barriers(p, dp):
    """The last stage to end is the first one; its chain, then all, then the slowest optimizer."""
    m = 6
    optimizer, gathers = np.arange(1, p + 1) / 8, np.arange(p, 0, -1) / 4
    work = workload(np.ones((p, 1)), 2 * np.ones((p, 1)), **end_of_step(p, optimizer, gathers))
    schedule = make_schedule("1f1b", p, m)
    pipeline = (m + p - 1) * 3.0
    exposed = 0.5 + 0.25 + 0.125 + 0.0625 + (optimizer + gathers).max()
    graph, times = run(work, schedule, n_replicas=dp)
    assert np.all(times == pipeline + exposed)
    ends = [graph.op_types[t].collective for t in graph.op_type[graph.op_type >= 0]]
    names = [c.name for c in ends if c is not None]
    counts = {"r": p, "ln": p, "emb": 1, "norm": 1, "adam": p, "pg": p}
    assert {n: names.count(n) for n in counts} == counts


def test_embedding_reduce_waits_for_first_and_last_stage_only():
    work = workload(
        [[1.0], [1.0], [1.0]], [[2.0], [9.0], [2.0]],
        embedding_reduce=collective("emb", "all_reduce", 4.0),
    )  # fmt: skip
    # F F F, B(2) 2, B(1) 9, B(0) 2: the middle stage's end is not waited for, the first one's is
    assert step_time(work, make_schedule("1f1b", 3, 1)) == 3 + 13 + 4.0


def test_deadlock_is_an_error():
    f, b = Action("F", 0, 0), Action("B", 0, 0)
    with pytest.raises(PrismError, match="deadlock"):
        sg.build_step_graph(workload([[1], [1]], [[1], [1]]), ((b, f), (f, b)), sg.GraphOptions())


def test_blocking_deadlock_is_an_error():
    """GPipe above 1F1B: with free transfers it runs, with blocking ones it stands still."""
    mixed = (make_schedule("gpipe", 2, 3)[0], make_schedule("1f1b", 2, 3)[1])
    work = workload([[1], [1]], [[2], [2]])
    assert step_time(work, mixed) > 0
    with pytest.raises(PrismError, match="deadlock"):
        sg.build_step_graph(work, mixed, sg.GraphOptions(p2p="blocking"))


@st.composite
def valid_schedules(draw):
    """Any order in which every action's inputs exist."""
    p, v, m = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = p * v
    done = set()
    rows = [[] for _ in range(p)]
    todo = [(k, x, i) for k in "FB" for x in range(n) for i in range(m)]
    while todo:
        ready = [
            t for t in todo
            if (t[0] == "F" and (t[1] == 0 or ("F", t[1] - 1, t[2]) in done))
            or (t[0] == "B" and ("F", t[1], t[2]) in done
                and (t[1] == n - 1 or ("B", t[1] + 1, t[2]) in done))
        ]  # fmt: skip
        kind, virtual, i = ready[rng.integers(len(ready))]
        rows[virtual % p].append(Action(kind, virtual // p, i))
        done.add((kind, virtual, i))
        todo.remove((kind, virtual, i))
    return tuple(map(tuple, rows)), rng


def longest_path(steps, schedule, law, slow, n_replicas, lane):
    """End of the builder's nodes, each replica by itself, durations drawn by the oracle."""
    draws = naive.Draws(0)
    types = list(steps.b.types)
    alike = Counter(node.op_type for node in steps.b.nodes[1:])
    ends, count = [np.zeros(n_replicas)], {}
    for node in steps.b.nodes[1:]:
        assert len(node.preds) <= 2 and all(p < len(ends) for p in node.preds)
        start = np.max([ends[p] for p in node.preds or [0]], axis=0)
        if node.is_global:
            start = np.full(n_replicas, start.max())
        if node.op_type >= 0:
            key = (node.is_global, node.stage)
            index = count.setdefault(key, 0)
            count[key] += 1
            op_type = types[node.op_type]
            stream = engine.GLOBAL if node.is_global else engine.RESIDUAL
            for r in range(n_replicas):
                who = 0 if node.is_global else r
                x = draws.residual(
                    law, alike[node.op_type] * n_replicas, stream, node.stage, index, who, lane
                )
                gpu = node.stage * n_replicas + r
                if op_type.collective is None:
                    x *= slow.get(gpu, 1.0)
                start[r] += nominal_duration(op_type) * x
        ends.append(start)
    return ends


@given(
    valid=valid_schedules(),
    dp=st.integers(1, 3),
    prefetch=st.integers(0, 2),
    overlap=st.booleans(),
    reshard=st.booleans(),
    gathers=st.booleans(),
)
@settings(max_examples=examples(60))
def test_engine_is_the_longest_path(valid, dp, prefetch, overlap, reshard, gathers):
    """Slots are reused, phases alternate, and still every op reads its own predecessors' ends."""
    schedule, rng = valid
    p, v = len(schedule), 1 + max(a.chunk for a in schedule[0])
    extra = end_of_step(p, rng.uniform(0.1, 1, p), rng.uniform(0.1, 1, p))
    extra["reduces"] = per_chunk("r", "reduce_scatter", rng.uniform(0.1, 2, (p, v)))
    if gathers:
        extra["gathers"] = per_chunk("g", "all_gather", rng.uniform(0.1, 2, (p, v)))
    extra["transfer"] = Collective("t", "transfer", "p2p", 0.3, 0.0, "residual/p2p")
    work = workload(rng.uniform(0.5, 2, (p, v)), rng.uniform(0.5, 2, (p, v)), **extra)
    slow = {int(g): 1.0 + 0.5 * rng.random() for g in range(p * dp)}
    options = {
        "n_replicas": dp, "prefetch": prefetch, "overlap": overlap, "reshard_after_forward": reshard
    }  # fmt: skip
    times = run(work, schedule, {"residual": {"law": "gamma", "cv": 0.5}}, slow, **options)[1]
    steps = sg._StepBuilder(work, schedule, sg.GraphOptions(**options))
    final = steps.build()[1]
    for lane in (0, 41):
        ends = longest_path(steps, schedule, gamma(0.5), slow, dp, lane)
        assert times[lane] == pytest.approx(ends[final].max(), rel=3e-6)
        assert ends[final].max() == max(e.max() for e in ends)
