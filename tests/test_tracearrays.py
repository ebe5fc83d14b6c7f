"""A fitted trace: the engine's program against plain NumPy draws and replays, and these."""

import dataclasses
from functools import cache

import numpy as np
import pytest
from campaign import examples
from pipeline_synth import Effects, Layout, as_trace, make_trace
from scipy.special import ndtri
from scipy.stats import ks_2samp

from prism.distributions.tables import sample_table
from prism.models.pipelinetrace.build import build_trace_graph
from prism.models.pipelinetrace.fit import fit_graph
from prism.simulation.execution.context import RunContext
from prism.simulation.no_dependence import pool_program
from prism.simulation.program import ideal_program
from prism.simulation.steps import run_blocks
from prism.simulation.tracemodel.arrays import (
    build_trace_graph_arrays,
    build_trace_program,
    drawn_rank_table,
    step_profile,
)
from prism.simulation.tracemodel.graph import COMPUTE, TraceNode, replay
from prism.simulation.tracemodel.model import (
    conditioned,
    draw_durations,
    independent_graph,
    score_distribution,
    synthetic_graph,
)

FULL = Effects(rank_sd=0.01, step_sd=0.015, content_sd=0.03, gap_s=0.003, content_last=0.7)
CASES = {
    "1f1b": (Layout(2, 4, 6, 12), FULL),
    "lemon": (Layout(4, 2, 4, 12), dataclasses.replace(FULL, lemons={(1, 0): 2.0})),
    "delay": (Layout(4, 2, 4, 12), dataclasses.replace(FULL, delays={(2, 1): 0.2})),
    "gpipe": (Layout(2, 3, 4, 12, "gpipe"), FULL),
    "async": (Layout(2, 3, 4, 12, p2p="async"), FULL),
    "interleaved": (Layout(2, 2, 4, 12, "interleaved", "async", 2), FULL),
    "no pipeline": (Layout(4, 1, 4, 12), FULL),
    "one replica": (Layout(1, 3, 4, 12), FULL),
    "one microbatch": (Layout(3, 2, 1, 12), FULL),
    "barriers": (Layout(3, 3, 4, 20), dataclasses.replace(
        FULL, gap_s=3e-4, barriers=(("layernorm-grads-all-reduce", "stage", 2),))),
}  # fmt: skip
N_BLOCKS, N_DRAWS = 96, 4000


def fitted(layout, effects, seed=1):
    frame, _ = make_trace(layout, effects, seed)
    return fit_graph(build_trace_graph(as_trace(frame)))


@cache
def fitted_case(name, seed=1):
    return fitted(*CASES[name], seed)


def program_of(model, replicas=None, measured=True):
    replicas = replicas or model.n_replicas
    graph = build_trace_graph_arrays(model, replicas)
    return build_trace_program(model, graph, measured), graph


def engine_times(program, seed=3, blocks=N_BLOCKS):
    return run_blocks(program, range(blocks), RunContext(seed))[0].astype(np.float64)


def agree(engine, numpy):
    """Whether two samples of step times are of one law, by three figures."""
    n = min(engine.size, numpy.size)
    same = ks_2samp(engine, numpy, method="asymp").statistic < 1.95 * np.sqrt(
        1.0 / engine.size + 1.0 / numpy.size
    )
    error = np.hypot(engine.std() / np.sqrt(engine.size), numpy.std() / np.sqrt(numpy.size))
    mean = abs(engine.mean() - numpy.mean()) < 5.0 * error
    spread = abs(engine.std() / numpy.std() - 1.0) < 5.0 / np.sqrt(n)
    return same and mean and spread


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(1, 1 + examples(1)))
def test_the_engine_agrees_with_numpy(name, seed):
    model = fitted_case(name, seed)
    rng = np.random.default_rng(seed)
    numpy = synthetic_graph(model, np.arange(N_DRAWS) * 10**6, rng).measured
    engine = engine_times(program_of(model)[0], seed).ravel()
    # float32 and 12 measured steps: times come in lumps, which a KS distance sees
    assert agree(engine, numpy)
    # negative controls: a spread or a mean that is wrong by little
    wrong = numpy.mean() + 1.12 * (numpy - numpy.mean())
    assert not agree(engine, wrong)
    assert not agree(engine, numpy * (1.0 + 0.25 * numpy.std() / numpy.mean()))


def test_every_effect_matters_to_the_engine():
    """Negative controls of the comparison: a model that lacks one effect is told from the full."""
    model = fitted_case("lemon")
    numpy = synthetic_graph(model, np.arange(N_DRAWS) * 10**6, np.random.default_rng(1)).measured
    no_content = [g._replace(content=0.0) for g in model.groups]
    for change in (
        {"groups": tuple(no_content)},
        {"profile": np.ones_like(model.profile)},
        {"rank": np.ones_like(model.rank)},
    ):
        lacking = dataclasses.replace(model, **change)
        assert not agree(engine_times(program_of(lacking)[0]).ravel(), numpy)


def test_conditioned_weights_reach_the_engine():
    model = fitted(Layout(2, 2, 4, 40), Effects(step_sd=0.03, step_memory=0.95, content_sd=0.01))
    assert model.correlation_steps > 0.0
    near = conditioned(model, model.steps[:1])
    chosen = near.weight / near.weight.sum()
    numpy = synthetic_graph(
        dataclasses.replace(model, correlation_steps=0.0), np.arange(N_DRAWS),
        np.random.default_rng(1),
    ).measured  # fmt: skip
    engine = engine_times(program_of(near)[0])
    flat = engine_times(program_of(model)[0])
    profile = step_profile(model)
    expected = float(chosen @ profile) / float(profile.mean())
    assert engine.mean() / flat.mean() == pytest.approx(expected, abs=0.002)
    assert flat.mean() == pytest.approx(numpy.mean(), rel=0.002)
    assert abs(expected - 1.0) > 0.01


def test_the_ideal_step_has_every_effect_at_one():
    model = fitted_case("lemon")
    program, _ = program_of(model)
    seconds = engine_times(ideal_program(program), blocks=1)
    mean = np.repeat(model.mean.mean(axis=1, keepdims=True), model.n_replicas, axis=1)[..., None]
    graph = synthetic_graph(model, np.arange(1), np.random.default_rng(0))
    assert seconds == pytest.approx(float(replay(graph, mean)[0]), rel=1e-5)
    assert np.ptp(seconds) == 0.0


# ------------------------------------------------------------------------------ another dp size
def test_drawn_workers_have_the_body_s_spread_and_lemons_in_proportion():
    effects = Effects(rank_sd=0.01, residual_sd=0.004, lemons={(1, 0): 2.0, (3, 1): 1.5})
    model = fitted(Layout(8, 2, 6, 12), effects)
    assert len(model.lemons) == 2
    u = np.random.default_rng(1).integers(0, 1 << 32, 400_000, dtype=np.uint32)
    for k in range(2):
        table, mean = drawn_rank_table(model, k)
        drawn = mean * (1.0 + sample_table(table, u))
        assert drawn.mean() == pytest.approx(mean, rel=1e-3)
        share = 1.0 / 16.0
        assert np.mean(drawn > 1.75) == pytest.approx(share, abs=0.002)
        assert np.mean((drawn > 1.25) & (drawn < 1.75)) == pytest.approx(share, abs=0.002)
        body = drawn[drawn < 1.25]
        assert body.mean() == pytest.approx(1.0, abs=1e-3)
        assert body.std() == pytest.approx(
            model.rank_distribution.std * model.rank_power[k], rel=0.03
        )
        assert mean == pytest.approx(1.0 + (1.0 + 0.5) / 16.0, rel=0.02)


def test_a_rare_lemon_is_no_ramp_and_has_its_own_slowdown_in_each_op_kind():
    model = fitted(Layout(8, 2, 6, 12), Effects(rank_sd=0.01, lemons={(1, 0): 2.0}))
    lemon = (model.lemons[0][0], model.lemons[0][1])
    rank = np.array(model.rank)
    rank[1, lemon[1], lemon[0]] = 1.2  # backward suffers less; its body has three times the spread
    wide = dataclasses.replace(
        model, n_replicas=400, rank=np.pad(rank, ((0, 0), (0, 0), (0, 392)), constant_values=1.0),
        rank_power=np.array([1 / 3, 1.0]),
    )  # fmt: skip
    u = np.random.default_rng(2).integers(0, 1 << 32, 1_000_000, dtype=np.uint32)
    (forward, a), (backward, b) = (drawn_rank_table(wide, k) for k in range(2))
    x, y = a * (1.0 + sample_table(forward, u)), b * (1.0 + sample_table(backward, u))
    slow = x > 1.5
    assert slow.mean() == pytest.approx(1.0 / 800.0, rel=0.12)
    assert x[slow] == pytest.approx(rank[0, lemon[1], lemon[0]], rel=1e-5)
    assert y[slow] == pytest.approx(1.2, rel=1e-5)
    assert np.mean((x > 1.1) & (x < 1.9)) == 0.0


# --------------------------------------------------------------------------------- independence
@pytest.mark.parametrize("name", ["1f1b", "lemon", "delay", "no pipeline"])
def test_pooling_keeps_every_op_s_variance_and_removes_what_is_shared(name, small_pools):
    model = fitted_case(name)
    program, graph = program_of(model)
    pooled = pool_program(program, graph, 5)
    drawn = draw_durations(model, np.arange(4000) * 10**6, np.random.default_rng(1))
    for i in range(graph.op_type.size):
        if graph.op_type[i] < 0:
            continue
        c = graph.op_type[i]
        node = int(graph.op_types[c].collective.name)
        seconds = drawn[node].ravel()
        if seconds.std() < 1e-4 * seconds.mean():
            continue
        mean, cv = pooled.low.fixed_mean[0, c, 0], pooled.low.table_std[c]
        error = cv / np.sqrt(4000.0)
        assert mean == pytest.approx(seconds.mean(), rel=max(0.005, 5.0 * error))
        assert cv == pytest.approx(seconds.std() / seconds.mean(), rel=0.08, abs=1e-4)
    full, independent = engine_times(program), engine_times(pooled)
    if name == "1f1b":
        assert independent.std() < 0.7 * full.std()


def test_ops_of_one_group_whose_replicas_differ_are_pooled_apart():
    """A gap that only one replica has before one op, and another before the next."""
    model = fitted(Layout(2, 1, 2, 12), Effects(gap_s=0.01))
    gaps = [i for i, n in enumerate(model.nodes) if n.kind == "gap" and "forward" in n.name][:2]
    assert model.group[gaps[0]] == model.group[gaps[1]]
    mean = np.array(model.mean)
    mean[gaps[0]], mean[gaps[1]] = (0.0, 0.1), (0.05, 0.05)
    model = dataclasses.replace(model, mean=mean)
    program, graph = program_of(model)
    pooled = pool_program(program, graph, 5)
    drawn = draw_durations(model, np.arange(4000) * 10**6, np.random.default_rng(1))
    by_node = {int(t.collective.name): c for c, t in enumerate(graph.op_types) if t.collective}
    for i in gaps:
        seconds, c = drawn[i].ravel(), by_node[i]
        std = pooled.low.fixed_mean[0, c, 0] * pooled.low.table_std[c]
        assert std == pytest.approx(seconds.std(), rel=0.1)


def test_barriers_of_one_replica_are_passed_by_the_engine():
    model = fitted(Layout(2, 2, 2, 8), FULL)
    tail = len(model.nodes)
    last = [i for i, n in enumerate(model.nodes) if n.op_kind == "backward"][-2:]
    join = TraceNode("join", "join", "", "barrier", model.nodes[last[0]].scope,
                     model.nodes[last[0]].stages, 0, 0, -1, tuple(last))  # fmt: skip
    more = dataclasses.replace(
        model, nodes=(*model.nodes, join), group=np.append(model.group, -1),
        mean=np.vstack([model.mean, np.zeros(2)]),
    )  # fmt: skip
    assert len(more.nodes) == tail + 1
    assert engine_times(program_of(more)[0]) == pytest.approx(engine_times(program_of(model)[0]))


@pytest.mark.parametrize(
    ("layout", "effects"),
    [
        (Layout(2, 2, 4, 2), FULL),
        (Layout(1, 1, 1, 6), FULL),
        (Layout(1, 2, 1, 6), FULL),
        (Layout(3, 1, 1, 6), FULL),
        (Layout(2, 2, 2, 6), Effects(residual_sd=0.0, other_sd=0.0)),
        (Layout(2, 2, 2, 2), Effects(residual_sd=0.0, other_sd=0.0, lemons={(0, 1): 3.0})),
    ],
)
def test_small_traces_simulate_without_nonsense(layout, effects, small_pools):
    model = fitted(layout, effects)
    for dp, measured in ((model.n_replicas, True), (model.n_replicas, False), (5, False)):
        program, graph = program_of(model, dp, measured)
        times = engine_times(program, blocks=4)
        assert np.isfinite(times).all() and (times > 0.0).all()
        assert times.mean() == pytest.approx(model.measured_mean, rel=1.2)
        pooled = engine_times(pool_program(program, graph, 1), blocks=4)
        assert np.isfinite(pooled).all() and (pooled > 0.0).all()
        if measured:
            assert times.mean() == pytest.approx(model.measured_mean, rel=0.06)


def test_drifts_of_stages_are_drawn_apart():
    """Stages that drift alone: the slowest of several, where one draw would move all together."""
    model = fitted_case("1f1b")
    groups = [
        g._replace(rank_step=0.08, drift=g.stage) if g.op_kind in COMPUTE else g
        for g in model.groups
    ]
    distribution = _normal_scores()
    apart = dataclasses.replace(model, groups=tuple(groups), rank_step=distribution)
    together = dataclasses.replace(apart, groups=tuple(g._replace(drift=0) for g in groups))
    rng = np.random.default_rng(2)
    numpy = synthetic_graph(apart, np.arange(N_DRAWS) * 10**6, rng).measured
    assert agree(engine_times(program_of(apart)[0]).ravel(), numpy)
    assert not agree(engine_times(program_of(together)[0]).ravel(), numpy)


def _normal_scores():
    z = ndtri((np.arange(400) + 0.5) / 400)
    return score_distribution(z / z.std())


# ------------------------------------------------------------------ draws in plain NumPy
@pytest.fixture(scope="module")
def model():
    effects = Effects(rank_sd=0.01, step_sd=0.03, content_sd=0.03, lemons={(1, 0): 1.8})
    return fitted(Layout(4, 2, 4, 12), effects)


def with_memory(model, steps, length=20.0, share=0.9):
    """The same model, its measured steps (fast to slow) at these numbers."""
    return dataclasses.replace(
        model, steps=np.asarray(steps), correlation_steps=length, correlation_share=share
    )


def test_neighbouring_steps_decide_as_far_as_steps_remember(model):
    assert model.correlation_steps == 0.0
    assert conditioned(model, np.array([3, 4])) is model
    assert model.weight == pytest.approx(1.0 / 12.0)
    # measured: a fast stretch at 0..50, a slow one at 1000..1050
    remembering = with_memory(model, np.r_[np.arange(6) * 10, 1000 + np.arange(6) * 10])
    for steps, share in (([25], 0.92), ([1025], 0.08), ([25, 1025], 0.5), ([10**6], 0.5)):
        weight = conditioned(remembering, np.array(steps)).weight
        assert weight.sum() == pytest.approx(1.0) and (weight >= 0.0).all()
        assert weight[:6].sum() == pytest.approx(share, abs=0.1)
    spread = [
        float(conditioned(with_memory(model, np.arange(12) * 10, 100.0, share), np.array([35]))
              .weight.max()) for share in (0.3, 0.6, 0.9, 1.0)
    ]  # fmt: skip
    assert spread == sorted(spread) and spread[-1] > 2.0 * spread[0]


def test_conditioning_predicts_better_than_the_marginal_where_steps_remember():
    """Half of the steps, by turns, tell of the others; the negative control has no memory."""
    effects = Effects(step_sd=0.03, step_memory=0.97)
    errors = {"remembering": [], "marginal": []}
    for seed in range(6):
        frame, _ = make_trace(Layout(2, 2, 2, 60), effects, seed)
        graph = build_trace_graph(as_trace(frame))
        fitted = fit_graph(graph.select(np.arange(0, 60, 2)))
        assert fitted.correlation_steps > 0.0
        total = np.einsum("i,ik->k", fitted.mean.mean(axis=1), fitted.profile[fitted.group, 0])
        for t in range(1, 60, 8):
            near = conditioned(fitted, graph.steps[[t]])
            for name, weight in (("remembering", near.weight), ("marginal", fitted.weight)):
                guess = float(weight @ total / total.mean()) * graph.measured.mean()
                errors[name].append((guess / graph.measured[t] - 1.0) ** 2)
    assert np.mean(errors["remembering"]) < 0.4 * np.mean(errors["marginal"])


def test_draws_have_every_op_s_mean_and_are_equal_for_ops_that_all_wait_for(model):
    drawn = draw_durations(model, np.arange(3000) * 10**6, np.random.default_rng(1))
    expected = np.array(model.mean)
    for i, node in enumerate(model.nodes):
        kind = model.rank_index(node)
        if kind >= 0:
            expected[i] = expected[i] * model.rank[kind, node.stages[0]]
        if node.is_global:
            assert (drawn[i] == drawn[i, :1]).all()
    assert drawn.mean(axis=2) == pytest.approx(expected, rel=0.02, abs=1e-9)
    assert (drawn >= 0.0).all()


def test_steps_remember_over_their_gaps(model):
    remembering = with_memory(model, model.steps, 10.0, 1.0)
    rng = np.random.default_rng(1)
    near = synthetic_graph(remembering, np.arange(4000), rng).measured
    apart = synthetic_graph(remembering, np.arange(4000) * 1000, rng).measured
    lag = [float(np.corrcoef(x[:-1], x[1:])[0, 1]) for x in (near, apart)]
    assert lag[0] > 0.4 and abs(lag[1]) < 0.07
    assert near.std() == pytest.approx(apart.std(), rel=0.15)


def test_independent_draws_keep_variances_and_lose_what_is_shared(model):
    steps = np.arange(1500) * 10**6
    full = synthetic_graph(model, steps, np.random.default_rng(1))
    none = independent_graph(model, steps, np.random.default_rng(1))
    nodes = [i for i, n in enumerate(model.nodes) if n.op_kind == "forward"]
    for i in nodes:
        a, b = full.durations[i].ravel(), none.durations[i].ravel()
        assert b.mean() == pytest.approx(a.mean(), rel=0.02)
        assert b.std() == pytest.approx(a.std(), rel=0.06)
    one = nodes[0]
    other = next(
        i for i in nodes if model.nodes[i].stages == (1,) and model.nodes[i].microbatch == 0
    )
    shared = [np.corrcoef(g.durations[one, 0], g.durations[other, 0])[0, 1]
              for g in (full, none)]  # fmt: skip
    assert shared[0] > 0.5 and abs(shared[1]) < 0.13
    assert none.measured.mean() < 0.95 * full.measured.mean()  # nobody is always slow any more
