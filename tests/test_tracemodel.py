"""A fitted model's laws and draws: tables, conditioning on neighbouring steps, independence."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_synth import Effects, Layout, as_trace, make_trace

from prism.distributions.tables import sample_table
from prism.models.pipelinetrace.build import build_trace_graph
from prism.models.pipelinetrace.fit import fit_graph
from prism.simulation.tracemodel.model import (
    conditioned,
    draw_durations,
    figures,
    independent_graph,
    profile_table,
    sample_law,
    score_law,
    synthetic_graph,
)


@pytest.fixture(scope="module")
def model():
    effects = Effects(rank_sd=0.01, step_sd=0.03, content_sd=0.03, lemons={(1, 0): 1.8})
    frame, _ = make_trace(Layout(4, 2, 4, 12), effects, 1)
    return fit_graph(build_trace_graph(as_trace(frame)))


def with_memory(model, steps, length=20.0, share=0.9):
    """The same model, its measured steps (fast to slow) at these numbers."""
    return dataclasses.replace(
        model, steps=np.asarray(steps), correlation_steps=length, correlation_share=share
    )


# -------------------------------------------------------------------------------------- tables
@given(
    st.lists(st.floats(0.5, 2.0), min_size=1, max_size=60),
    st.integers(0, 2**32 - 1),
)
def test_profile_table_takes_each_value_with_its_probability(values, seed):
    profile = np.array(values)
    weight = np.random.default_rng(seed).dirichlet(np.ones(profile.size))
    u = np.linspace(0, 2**32 - 1, 200_001).astype(np.uint32)
    drawn = 1.0 + sample_table(profile_table(profile, weight), u)
    assert np.isin(np.float32(drawn), np.float32(profile)).mean() > 0.999 or np.allclose(
        np.min(np.abs(drawn[:, None] - profile), axis=1), 0.0, atol=1e-6
    )
    assert drawn.mean() == pytest.approx(profile @ weight, abs=2.0 / 1024 * profile.size)
    for value in set(values):
        share = np.mean(np.abs(drawn - value) < 1e-6)
        assert share == pytest.approx(
            weight[np.abs(profile - value) < 1e-6].sum(), abs=2.0 / 1024 + 1e-3
        )


def test_sample_law_has_mean_one_and_the_spread_of_its_values():
    rng = np.random.default_rng(1)
    for n in (2, 5, 300, 5000):
        values = rng.gamma(4.0, size=n)
        law = sample_law(values)
        assert law.mean == pytest.approx(1.0)
        assert law.cv == pytest.approx(values.std() / values.mean(), rel=0.02)
        assert float(law.ppf(0.0)) > 0.0
    assert sample_law(np.full(9, 3.0)).std == 0.0
    assert sample_law(np.array([2.0])).std == 0.0
    assert sample_law(np.array([1.0, np.nan, 1.0])).std == 0.0
    mostly_nothing = np.r_[np.zeros(90), np.full(10, 5.0)]  # a gap that is rarely there
    law = sample_law(mostly_nothing)
    assert law.mean == pytest.approx(1.0) and law.cv == pytest.approx(3.0, rel=0.1)


def test_score_law_is_that_of_standardised_scores():
    scores = np.random.default_rng(2).gamma(2.0, size=2000)
    law = score_law(7.0 + 3.0 * scores)
    assert law == score_law(scores) or law.cv == pytest.approx(score_law(scores).cv, rel=1e-6)
    assert law.cv == pytest.approx(0.1, rel=0.1)  # SCORE_STD
    assert score_law(np.full(5, 1.0)).std == 0.0


# --------------------------------------------------------------------------------- conditioned
def test_without_memory_all_measured_steps_are_equally_likely(model):
    assert model.correlation_steps == 0.0
    assert conditioned(model, np.array([3, 4])) is model
    assert model.weight == pytest.approx(1.0 / 12.0)


def test_with_memory_the_neighbours_decide(model):
    # measured: a fast stretch at 0..50, a slow one at 1000..1050
    numbers = np.r_[np.arange(6) * 10, 1000 + np.arange(6) * 10]
    remembering = with_memory(model, numbers)
    for steps, side in (([25], slice(0, 6)), ([1025], slice(6, 12))):
        weight = conditioned(remembering, np.array(steps)).weight
        assert weight.sum() == pytest.approx(1.0) and (weight >= 0.0).all()
        assert weight[side].sum() > 0.85
    far = conditioned(remembering, np.array([10**6])).weight
    assert far == pytest.approx(1.0 / 12.0, abs=1e-6)
    both = conditioned(remembering, np.array([25, 1025])).weight
    assert both[:6].sum() == pytest.approx(0.5, abs=0.1)


def test_more_memory_concentrates_more(model):
    numbers = np.arange(12) * 10
    spread = []
    for share in (0.3, 0.6, 0.9, 1.0):
        weight = conditioned(with_memory(model, numbers, 100.0, share), np.array([35])).weight
        spread.append(float(weight.max()))
    assert spread == sorted(spread) and spread[-1] > 2.0 * spread[0]


@given(
    st.lists(st.integers(0, 2000), min_size=12, max_size=12, unique=True),
    st.lists(st.integers(0, 4000), min_size=1, max_size=8),
    st.floats(0.01, 1e5),
    st.floats(0.0, 1.0),
)
def test_conditioned_weights_are_probabilities(numbers, asked, length, share):
    n = len(numbers)
    made = dataclasses.replace(
        SMALL, steps=np.array(numbers), weight=np.full(n, 1.0 / n), correlation_steps=length,
        correlation_share=share,
    )  # fmt: skip
    weight = conditioned(made, np.array(asked)).weight
    assert weight.shape == (n,) and np.isfinite(weight).all() and (weight >= -1e-12).all()
    assert weight.sum() == pytest.approx(1.0)


def _small():
    frame, _ = make_trace(Layout(2, 1, 2, 12), Effects(step_sd=0.03), 1)
    return fit_graph(build_trace_graph(as_trace(frame)))


SMALL = _small()


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


# --------------------------------------------------------------------------------------- draws
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


def test_figures_of_step_times():
    found = figures(np.array([1.0, 2.0, 3.0, 4.0]))
    assert found["n"] == 4 and found["mean"] == 2.5 and found["p50"] == 2.5
    assert found["p95"] == pytest.approx(3.85) and found["cv"] == pytest.approx(0.5163977795)
    assert figures(np.array([2.0]))["cv"] == 0.0
