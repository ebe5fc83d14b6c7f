"""Plots show what the data holds, on axes of their own, in colours that can be told apart."""

import sys
from itertools import combinations

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

import prism
from prism import plots


def texts(ax):
    """All that is written in a plot: beside curves and in the legend."""
    return [text.get_text() for text in (*ax.texts, *ax.get_legend().get_texts())]


def test_step_time_marks_are_the_quantiles_of_the_data(made_up_result):
    ax = plots.plot_step_time(made_up_result)
    marks = [line.get_data() for line in ax.lines if line.get_marker() == "o"]
    expected = np.quantile(made_up_result["step_time"], [0.5, 0.95, 0.99])
    assert [float(x[0]) for x, _ in marks] == pytest.approx(list(expected))
    assert [float(y[0]) for _, y in marks] == pytest.approx([0.5, 0.95, 0.99])
    assert any("10.50 s" in text for text in texts(ax))
    assert ax.get_xlabel() == "step time [s]"


def test_the_curve_is_the_share_of_steps_and_its_band_holds_the_truth():
    """Steps of a cluster are alike: the band is by cluster, 95 %, of 200 seeds."""
    frame = prism.simulate("pipeline-8x32", 64, seed=1).to_xarray().drop_dims("replicate")
    rng, cluster, hits = np.random.default_rng(5), np.repeat(np.arange(40), 16), 0
    for _ in range(200):
        values = 11.0 + rng.standard_normal(40)[cluster] + 0.3 * rng.standard_normal(640)
        made = frame.assign(
            step_time=("replicate", values, {"units": "s"}), cluster_idx=("replicate", cluster),
        )  # fmt: skip
        ax = plots.plot_step_time(made, Figure().add_subplot())
        (band,) = (c for c in ax.collections if len(c.get_paths()) == 1)
        corners = band.get_paths()[0].vertices
        at = corners[np.abs(corners[:, 0] - 11.0) < 0.2][:, 1]
        hits += at.min() <= 0.5 <= at.max()
    assert hits / 200 > 0.9


def test_axis_ends_near_p99_and_counts_what_is_beyond(made_up_result):
    slow = made_up_result.copy(deep=True)
    slow["step_time"][:3] = 400.0
    ax = plots.plot_step_time(slow)
    assert ax.get_xlim()[1] < 13.0
    beyond = int((slow["step_time"] > ax.get_xlim()[1]).sum())
    assert 3 <= beyond <= 10
    assert any(f"{beyond} of 1,000" in text for text in texts(ax))


@pytest.mark.parametrize("ideal, drawn", [(10.5, True), (11.0, True), (8.0, False)])
def test_the_ideal_lies_on_the_axis_not_over_the_curve(made_up_result, ideal, drawn):
    ax = plots.plot_step_time(made_up_result.assign(ideal_step_time=ideal))
    (*_, curve) = (line for line in ax.lines if line.get_marker() == "^") if drawn else (None,)
    if drawn:
        assert curve.get_xydata().tolist() == [[ideal, 0.0]]
    assert any("ideal" in text.get_text() for text in ax.texts) is not drawn
    assert any("ideal" in text.get_text() for text in ax.get_legend().get_texts()) is drawn


def test_time_to_train_is_in_days_and_has_its_deadline(made_up_result):
    ax = plots.plot_time_to_train(made_up_result)
    done = float(np.mean(made_up_result["time_to_train"] <= made_up_result["deadline"]))
    assert ax.get_xlabel() == "time-to-train [days]"
    assert any(f"{100 * done:.3g} %" in text for text in texts(ax))
    ax = plots.plot_time_to_train(made_up_result.drop_vars("deadline"))
    assert not any("deadline" in text for text in texts(ax))


def test_given_axes_are_used_and_pyplot_is_not(made_up_result):
    ax = Figure().add_subplot()
    assert plots.plot_step_time(made_up_result, ax) is ax
    assert plots.plot_time_to_train(made_up_result, Figure().add_subplot()) is not ax
    assert "matplotlib.pyplot" not in sys.modules or not matplotlib.pyplot.get_fignums()


def test_constant_result_can_be_drawn(made_up_result, tmp_path):
    constant = made_up_result.copy(deep=True)
    constant["step_time"][:] = 117.0
    constant["time_to_train"][:] = 117_000.0
    for plot in (plots.plot_step_time, plots.plot_time_to_train):
        plots.save_figure(plot(constant), tmp_path / f"{plot.__name__}.png")
        assert (tmp_path / f"{plot.__name__}.png").stat().st_size > 1_000


def test_dependence_has_one_curve_each(made_up_result):
    narrow = made_up_result.copy(deep=True)
    narrow["step_time"][:] = 11.0 + 0.01 * (made_up_result["step_time"] - 11.0)
    ax = plots.plot_dependence({"full": made_up_result, "none": narrow})
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert [label.split(":")[0] for label in labels] == ["full", "none"]
    assert len({line.get_color() for line in ax.lines}) == 2


@pytest.mark.parametrize("name, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_schedule_has_one_bar_per_action(name, chunks):
    schedule = prism.make_schedule(name, 4, 8, chunks)
    ax = plots.plot_schedule(schedule)
    assert len(ax.patches) == sum(len(row) for row in schedule)
    assert len(ax.get_legend().get_texts()) == 2


# -- styles ------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes (2009), doi:10.1109/TVCG.2009.113: complete colour blindness
SEEN = {
    "all colours": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                     [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                   [0.004733, 0.691367, 0.303900]],
}  # fmt: skip
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("light", "dark")


def rc_colour(key):
    """Give a colour of the style in force."""
    value = matplotlib.rcParams[key]
    return value if value.startswith("#") else f"#{value}"


def linear(colour):
    c = np.array(to_rgb(colour))
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """Contrast ratio of WCAG 2.2."""
    low, high = sorted(0.05 + linear(c) @ [0.2126, 0.7152, 0.0722] for c in (one, other))
    return high / low


def lab(colour, seen):
    """Oklab of Ottosson (2020), times 100."""
    to_lms = [[0.4122214708, 0.5363325363, 0.0514459929],
              [0.2119034982, 0.6806995451, 0.1073969566],
              [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
    to_lab = [[0.2104542553, 0.7936177850, -0.0040720468],
              [1.9779984951, -2.4285922050, 0.4505937099],
              [0.0259040371, 0.7827717662, -0.8086757660]]  # fmt: skip
    return 100 * np.array(to_lab) @ np.cbrt(to_lms @ np.clip(np.array(seen) @ linear(colour), 0, 1))


def least_difference(colours):
    return min(
        float(np.linalg.norm(lab(one, seen) - lab(other, seen)))
        for seen in SEEN.values()
        for one, other in combinations(colours, 2)
    )


@pytest.mark.parametrize("name", STYLES)
def test_colours_stand_out_and_apart(name):
    with plots.style(name):
        paper = rc_colour("axes.facecolor")
        colours = [to_hex(c) for c in matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]]
        assert len(colours) >= 7
        for colour in colours:  # graphics 3 : 1
            assert contrast(colour, paper) >= 3.0, colour
        for key in ("text.color", "xtick.labelcolor"):
            assert contrast(rc_colour(key), paper) >= 7.0
        # six colours are at least nearly as far apart as those of Okabe and Ito
        assert least_difference(colours[:6]) >= 0.9 * least_difference(OKABE_ITO)
    assert least_difference(["#009E73", "#0A956D"]) < 0.9 * least_difference(OKABE_ITO)


def test_a_picture_keeps_the_style_it_was_drawn_in(made_up_result, tmp_path):
    with plots.style("dark"):
        dark = plots.plot_step_time(made_up_result)
        own = Figure().add_subplot()
    for name, ax in (("dark", dark), ("light", plots.plot_step_time(made_up_result))):
        plots.save_figure(ax, tmp_path / f"{name}.svg")
    pictures = {name: (tmp_path / f"{name}.svg").read_text() for name in STYLES}
    for name, other in zip(STYLES, reversed(STYLES), strict=True):
        with plots.style(name):
            colours = [to_hex("C0"), to_hex("C7"), rc_colour("axes.facecolor")]
        for colour in colours:
            assert colour.lower() in pictures[name] and colour.lower() not in pictures[other]
    assert plots.plot_step_time(made_up_result, own).get_facecolor() == dark.get_facecolor()
    with pytest.raises(prism.PrismError, match="light, dark"):
        plots.style("grey")
