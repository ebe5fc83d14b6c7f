"""One slow stage in 1F1B against the closed form, and what other schedules make of it."""

import numpy as np
import pytest

from prism import load_job, slow_node
from prism.analyses.placements.problem import make_problem
from prism.analyses.placements.slack import level, slot_cost, stage_slack
from prism.simulation.prepare import prepare


def pipeline(p, m, forward, backward, **parallelism):
    return load_job({
        "model": {"durations": {"forward_s": forward, "backward_s": backward}},
        "parallelism": {"pp": p, "microbatches": m, "schedule": "1f1b", "p2p": "async"}
        | parallelism,
        "cluster": {"gpus_per_node": 1},
        "variability": {"library": None},
    })  # fmt: skip


def slowed(job, x, **kinds):
    """Step times with the node of each stage slower by a factor of 1 + x in turn [s]."""
    slow = {0: slow_node(1.0 + x)}
    problem = make_problem(prepare(job, 1), slow, 1)
    cases = [(problem.hosts, {int(node): slow[0]}) for node in problem.hosts]
    return problem.slowed_times(cases), problem


def closed_form(p, m, forward, backward, x):
    """``T(s)`` of one slow stage s in asynchronous 1F1B whose transfers take no time."""
    t = forward + backward
    s = np.arange(p)
    hidden = min(x * t, (1.0 + x) * min(forward, backward), t)
    return (m + p - 1) * t + m * x * t - (p - 1 - s) * hidden


@pytest.mark.parametrize("p, m", [(2, 2), (4, 4), (4, 9), (8, 32), (16, 16), (5, 40)])
@pytest.mark.parametrize("x", [0.05, 0.2, 0.7, 1.0, 2.5])
@pytest.mark.parametrize("backward", [0.5, 1.0, 2.0, 3.1])
def test_one_slow_stage(p, m, x, backward):
    times, _ = slowed(pipeline(p, m, 1.0, backward), x)
    np.testing.assert_allclose(times, closed_form(p, m, 1.0, backward, x), rtol=2e-6)


def test_reference_pipeline():
    """8 stages, 32 microbatches: 132.0 + 0.6 s at 20 %, 199 + 2 s at 100 %, 117 without."""
    values = load_job("pipeline-8x32").model_dump(mode="json", exclude={"name", "source"})
    values["cluster"] |= {"gpus_per_node": 1, "nvlink_domain_gpus": 1}
    job, stage = load_job(values), np.arange(8)
    times, problem = slowed(job, 0.2)
    np.testing.assert_allclose(times, 132.0 + 0.6 * stage, rtol=2e-6)
    np.testing.assert_allclose(slowed(job, 1.0)[0], 199.0 + 2.0 * stage, rtol=2e-6)
    np.testing.assert_allclose(problem.slowed_times([(problem.hosts, {})]), 117.0, rtol=1e-6)


def test_costs_and_slack_of_equal_stages():
    """Every stage of a full pipeline works all the time: none has slack, the last costs most."""
    _, problem = slowed(pipeline(4, 8, 1.0, 2.0), 0.2)
    rows = stage_slack(level(problem), slow_node(1.2))
    cost = closed_form(4, 8, 1.0, 2.0, 0.2) - closed_form(4, 8, 1.0, 2.0, 0.0)
    np.testing.assert_allclose([row.cost for row in rows], cost, rtol=1e-4)
    assert max(row.slack for row in rows) < 1e-3
    np.testing.assert_allclose(slot_cost(level(problem), slow_node(1.2))[:, 0], cost, rtol=1e-4)


def test_slack_of_a_light_stage():
    """A stage with two thirds of the others' work may be slower by half, as they set the pace."""
    heavy, light = [3.0, 3.0, 2.0, 3.0], 2
    job = pipeline(4, 64, heavy, [2.0 * t for t in heavy])
    _, problem = slowed(job, 0.2)
    rows = stage_slack(level(problem), slow_node(1.2))
    assert 0.45 < rows[light].slack < 0.6
    assert max(rows[i].slack for i in (0, 1, 3)) < 0.01
    at, base = slowed(job, rows[light].slack)[0], problem.slowed_times([(problem.hosts, {})])[0]
    assert at[light] - base == pytest.approx(0.1 * rows[light].slack * base, rel=0.02)


def test_no_slack_where_every_stage_waits_for_the_others():
    """One microbatch: a node works a sixteenth of the time, and all that it loses is lost."""
    _, problem = slowed(pipeline(16, 1, 1.0, 2.0), 0.2)
    rows = stage_slack(level(problem), slow_node(1.2))
    assert max(row.slack for row in rows) < 1e-3
    np.testing.assert_allclose([row.cost for row in rows], 0.6, rtol=1e-4)


@pytest.mark.parametrize(
    "p, m, backward, x", [(8, 32, 2.0, 0.2), (8, 32, 2.0, 1.0), (5, 9, 1.3, 0.4)]
)
def test_schedules_differ_in_what_they_hide(p, m, backward, x):
    """GPipe hides nothing: every stage costs what the last one does in 1F1B.

    A rendezvous of transfers that take no time hides what asynchronous ones do.
    """
    form = closed_form(p, m, 1.0, backward, x)
    gpipe = slowed(pipeline(p, m, 1.0, backward, schedule="gpipe"), x)[0]
    np.testing.assert_allclose(gpipe, form[-1], rtol=2e-6)
    blocking = slowed(pipeline(p, m, 1.0, backward, p2p="blocking"), x)[0]
    np.testing.assert_allclose(blocking, form, rtol=2e-6)
