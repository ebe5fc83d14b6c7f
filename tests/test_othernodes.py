"""Workers of a trace at other places: as a trace in which they are there."""

import numpy as np
import pytest
from drawn_steps import draw_steps
from pipeline_synth import Effects, Layout, as_production, make_trace

import prism

WHERE = {"here": {(1, 0): 2.0}, "on the last stage": {(1, 1): 2.0}}  # lemons


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models of traces that differ in where the slow worker is."""
    folder, found = tmp_path_factory.mktemp("traces"), {}
    for name, lemons in WHERE.items():
        effects = Effects(rank_sd=0.01, step_sd=0.015, content_sd=0.03, lemons=lemons)
        trace = folder / f"{len(found)}.csv"
        as_production(make_trace(Layout(3, 2, 4, 10), effects, 1)[0]).to_csv(trace, index=False)
        path = trace.with_suffix(".nc")
        prism.save(prism.fit(trace, 0), path)
        found[name] = prism.load_job(path)
    return found


def test_workers_take_what_was_measured_along(models):
    step = {
        name: float(np.median(draw_steps(job, 1280, 1).step_time)) for name, job in models.items()
    }
    found = prism.summary(prism.place(models["here"], seed=1))
    rows = {row["name"]: row for row in found["placements"]}
    assert rows["current"]["p50"] == pytest.approx(step["here"], rel=0.01)
    assert rows["worst"]["stages"] == [1]
    assert rows["worst"]["p50"] == pytest.approx(step["on the last stage"], rel=0.02)
    assert rows["worst"]["p50"] > 1.05 * rows["current"]["p50"]
    assert found["healthy"]["p50"] < 0.75 * step["here"]
    assert found["alternatives"]["drop_nodes"]["p50"] < 0.7 * step["here"]


def test_slowdowns_of_workers_come_on_top(models):
    """The slow one becomes slower; a factor on transfers is not known of a trace."""
    twice = {1: prism.slow_node(1.5)}
    (row,) = prism.summary(prism.place(models["here"], nodes=twice, seed=1))["slow_nodes"]
    assert row["compute"] == pytest.approx(1.5 * 2.0, rel=0.05)
    with pytest.raises(prism.PrismError, match="node 2"):
        prism.place(models["here"], nodes={2: prism.slow_node(1.2, "network")}, seed=1)
    with pytest.raises(prism.PrismError, match=r"node.* 6\b"):
        prism.place(models["here"], nodes={6: prism.slow_node(1.2)}, seed=1)
