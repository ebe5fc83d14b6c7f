"""Plots of a placement show what its summary holds, on axes of their own."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from placement_made import place_of, placement

from prism.plots import plot_alternatives, plot_slots, save_figure
from prism.plots.place import MOST_COLUMNS


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_alternatives_are_points_at_p50_and_p95_for_the_same_work():
    ax = plot_alternatives(placement())
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[0].startswith("as is: stage 3") and labels[1].startswith("best")
    assert not any("durations" in label for label in labels)  # impossible: no point
    points = {
        (float(y), round(float(x), 3))
        for line in ax.lines if line.get_marker() == "o"
        for x, y in line.get_xydata()
    }  # fmt: skip
    assert points >= {(0.0, 10.0), (0.0, 10.4), (1.0, 9.4), (1.0, 9.8), (4.0, 15.52)}
    assert "-5.8 %" in texts(ax) and "+49.2 %" in texts(ax)
    assert ax.get_xlabel() == "step time, for the same work [s]"


def test_lines_are_intervals_of_the_difference():
    ax = plot_alternatives(placement())
    ends = [segment[:, 0] for group in ax.collections for segment in group.get_segments()]
    best = next(end for end in ends if np.isclose(end.mean(), 9.8))
    assert np.ptp(best) == pytest.approx(0.002 * 10.4)
    assert any(np.allclose(end, [9.85, 10.45]) for end in ends)  # placed at random


def test_replicas_alike_are_bars_by_stage_with_their_slack():
    ax = plot_slots(placement())
    widths = [bar.get_width() for bar in ax.patches]
    assert widths == pytest.approx([0.01, 0.11, 0.21, 0.31])  # percent of 10 s
    assert texts(ax) == ["slack 31 %", "slack 31 %", "slack 8 %", "no slack"]


def test_replicas_that_differ_are_a_map_with_the_slow_nodes_in_it():
    cost = np.arange(32.0).reshape(4, 8) / 100.0
    ax = plot_slots(placement(slot_cost=cost.tolist()))
    (image,) = ax.images
    assert np.asarray(image.get_array()) == pytest.approx(10.0 * cost)
    now, best = (line.get_xydata().tolist() for line in ax.lines)
    assert now == [[0.0, 3.0], [1.0, 3.0], [2.0, 3.0]] and best[0] == [0.0, 0.0]
    assert ax.get_xlabel() == "replica"


def test_many_replicas_share_columns_and_the_worst_is_shown():
    cost = np.zeros((2, 300))
    cost[1, 123] = 1.0
    nodes = [{"node": 1, "compute": 1.2, "before": place_of(0, 1, 299), "after": None}]
    ax = plot_slots(placement(slot_cost=cost.tolist(), slow_nodes=nodes, stage_slack=[]))
    shown = np.asarray(ax.images[0].get_array())
    assert shown.shape == (2, 60) and shown.shape[1] <= MOST_COLUMNS
    assert shown[1, 123 // 5] == pytest.approx(10.0) and (shown > 0).sum() == 1
    assert "5 per column" in ax.get_xlabel()
    assert ax.lines[0].get_xydata().tolist() == [[299.0, 1.0]]


def test_given_axes_are_used_and_files_written(tmp_path):
    for plot in (plot_alternatives, plot_slots):
        ax = Figure().add_subplot()
        assert plot(placement(), ax) is ax
        save_figure(plot(placement(objective="time_to_train")), tmp_path / "a.png")
        assert (tmp_path / "a.png").stat().st_size > 1_000


def test_a_job_of_one_stage_can_be_drawn(tmp_path):
    one = placement(slot_cost=[[0.5, 0.5]], stage_slack=[{"stage": 0, "slack": 0.0, "cost": 0.5}])
    ax = plot_slots(one)
    assert len(ax.patches) == 1
    save_figure(ax, tmp_path / "one.png")
    none = placement(slot_cost=[[0.0, 0.0]], stage_slack=[{"stage": 0, "slack": 1.0, "cost": 0.0}])
    save_figure(plot_slots(none), tmp_path / "none.png")
