"""Plots show what the data holds, on axes of their own."""

import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from prism.common.cdf import empirical_cdf
from prism.common.errors import PrismError
from prism.jobs.schedule import make_schedule
from prism.plots.base import StyledFigure, save_figure, style
from prism.plots.estimate import plot_dependence, plot_step_time, plot_time_to_train
from prism.plots.schedule import plot_schedule


def texts(ax):
    """All that is written in a plot: beside curves and in the legend."""
    return [text.get_text() for text in (*ax.texts, *ax.get_legend().get_texts())]


def test_step_time_marks_are_the_quantiles_of_the_data(made_up_result):
    ax = plot_step_time(made_up_result)
    marks = [line.get_data() for line in ax.lines if line.get_marker() == "o"]
    expected = np.quantile(made_up_result["step_time"], [0.5, 0.95, 0.99])
    assert [float(x[0]) for x, _ in marks] == pytest.approx(list(expected))
    assert [float(y[0]) for _, y in marks] == pytest.approx([0.5, 0.95, 0.99])
    assert any("ideal 10.50 s" in text for text in texts(ax))
    assert ax.get_xlabel() == "step time [s]"


def test_axis_ends_near_p99_and_counts_what_is_beyond(made_up_result):
    slow = made_up_result.copy(deep=True)
    slow["step_time"][:3] = 400.0
    ax = plot_step_time(slow)
    assert ax.get_xlim()[1] < 13.0
    beyond = int((slow["step_time"] > ax.get_xlim()[1]).sum())
    assert 3 <= beyond <= 10
    assert any(f"{beyond} of 1,000" in text for text in texts(ax))


@pytest.mark.parametrize("ideal, drawn", [(10.5, True), (11.0, True), (8.0, False)])
def test_the_ideal_lies_on_the_axis_not_over_the_curve(made_up_result, ideal, drawn):
    ax = plot_step_time(made_up_result.assign(ideal_step_time=ideal))
    (*_, curve) = (line for line in ax.lines if line.get_marker() == "^") if drawn else (None,)
    if drawn:
        assert curve.get_xydata().tolist() == [[ideal, 0.0]]
    assert any("ideal" in text.get_text() for text in ax.texts) is not drawn
    assert any("ideal" in text.get_text() for text in ax.get_legend().get_texts()) is drawn


def test_time_to_train_is_in_days_and_has_its_deadline(made_up_result):
    ax = plot_time_to_train(made_up_result)
    done = float(np.mean(made_up_result["time_to_train"] <= made_up_result["deadline"]))
    assert ax.get_xlabel() == "time-to-train [days]"
    assert any(f"P(done) = {100 * done:.3g} %" in text for text in texts(ax))


def test_no_deadline_no_line(made_up_result):
    ax = plot_time_to_train(made_up_result.drop_vars("deadline"))
    assert not any("deadline" in text for text in texts(ax))


def test_given_axes_are_used_and_pyplot_is_not(made_up_result):
    ax = Figure().add_subplot()
    assert plot_step_time(made_up_result, ax) is ax
    assert plot_time_to_train(made_up_result, Figure().add_subplot()) is not ax
    assert "matplotlib.pyplot" not in sys.modules or not matplotlib.pyplot.get_fignums()


def test_a_picture_keeps_the_style_it_was_drawn_in(made_up_result, tmp_path):
    with style("dark"):
        dark = plot_step_time(made_up_result)
        own = Figure().add_subplot()
    for name, ax in (("dark", dark), ("light", plot_step_time(made_up_result))):
        assert isinstance(ax.figure, StyledFigure)
        save_figure(ax, tmp_path / f"{name}.svg")
    pictures = {name: (tmp_path / f"{name}.svg").read_text() for name in ("dark", "light")}
    for name, other in (("dark", "light"), ("light", "dark")):
        with style(name):
            colours = [matplotlib.colors.to_hex(f"C{i}") for i in (0, 7)]
            paper = matplotlib.rcParams["axes.facecolor"]
        for colour in (*colours, paper if paper.startswith("#") else f"#{paper}"):
            assert colour.lower() in pictures[name] and colour.lower() not in pictures[other]
    assert plot_step_time(made_up_result, own).get_facecolor() == dark.get_facecolor()
    with pytest.raises(PrismError, match="light, dark"):
        style("grey")


def test_constant_result_can_be_drawn(made_up_result, tmp_path):
    constant = made_up_result.copy(deep=True)
    constant["step_time"][:] = 117.0
    constant["time_to_train"][:] = 117_000.0
    for name, plot in (("step", plot_step_time), ("run", plot_time_to_train)):
        plot(constant).figure.savefig(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 1_000


def test_dependence_has_one_curve_each(made_up_result):
    narrow = made_up_result.copy(deep=True)
    narrow["step_time"][:] = 11.0 + 0.01 * (made_up_result["step_time"] - 11.0)
    ax = plot_dependence({"full": made_up_result, "none": narrow})
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert [label.split(":")[0] for label in labels] == ["full", "none"]
    assert len({line.get_color() for line in ax.lines}) == 2


@pytest.mark.parametrize("name, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_schedule_has_one_bar_per_action(name, chunks):
    schedule = make_schedule(name, 4, 8, chunks)
    ax = plot_schedule(schedule)
    assert len(ax.patches) == sum(len(row) for row in schedule)
    assert len(ax.get_legend().get_texts()) == 2


def test_cdf_error_is_binomial_without_clusters():
    curve = empirical_cdf(np.arange(100.0))
    assert np.array_equal(curve.x, np.arange(100.0))
    assert curve.p == pytest.approx((np.arange(100) + 1) / 100)
    assert curve.se == pytest.approx(np.sqrt(curve.p * (1 - curve.p) / 99))


def test_cdf_error_with_a_cluster_per_value_is_the_same():
    sample = np.random.default_rng(1).permutation(200.0 * np.arange(200))
    alone, clustered = empirical_cdf(sample), empirical_cdf(sample, np.arange(200))
    assert clustered.se == pytest.approx(alone.se)


def test_cdf_error_covers_clustered_samples_and_the_binomial_one_does_not():
    """The band by cluster holds the truth as often as it should; iid error is the control."""
    generator = np.random.default_rng(5)
    cluster = np.repeat(np.arange(40), 16)
    hits, iid_hits, n = 0, 0, 200
    for _ in range(n):
        sample = generator.standard_normal(40)[cluster] + 0.3 * generator.standard_normal(640)
        by_cluster, iid = empirical_cdf(sample, cluster), empirical_cdf(sample)
        middle = np.searchsorted(by_cluster.x, 0.0)
        hits += abs(by_cluster.p[middle] - 0.5) < 2.0 * by_cluster.se[middle]
        iid_hits += abs(iid.p[middle] - 0.5) < 2.0 * iid.se[middle]
    assert hits / n == pytest.approx(0.95, abs=5 * np.sqrt(0.95 * 0.05 / n))
    assert iid_hits / n < 0.7


def test_cdf_refuses_what_has_no_order():
    with pytest.raises(ValueError, match="finite"):
        empirical_cdf([1.0, np.nan])
