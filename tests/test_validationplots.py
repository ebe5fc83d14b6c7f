"""Pictures of validations and replays show what the data holds."""

import numpy as np
import pytest
import xarray as xr

from prism.plots import draw_validation, plot_quantiles, plot_replay, plot_validation, plot_workers


def validation(n=22, independent=1.0, scale=10.0, parts=True):
    generator = np.random.default_rng(1)
    predicted = scale * (1.0 + 0.02 * generator.standard_normal(2_000))
    result = xr.Dataset(
        {
            "measured": ("measured_idx", scale * (1.0 + 0.02 * generator.standard_normal(n))),
            "predicted": ("replicate", predicted),
        }
    )
    if parts:
        x = np.quantile(predicted, np.linspace(0.0, 1.0, 50))
        p = np.linspace(0.0, 1.0, 50)
        result["training"] = ("training_idx", scale * np.linspace(0.98, 1.02, 7))
        result["predicted_independent"] = ("replicate", independent * predicted)
        result["cdf_time"] = ("point", x)
        result["cdf_lo"] = ("point", np.maximum(p - 0.1, 0.0))
        result["cdf_hi"] = ("point", np.minimum(p + 0.1, 1.0))
    return result


def replay(n_stages=4, n_replicas=4):
    slowdown = np.ones((n_replicas, n_stages))
    slowdown[1, 2] = 1.6
    measured = np.linspace(9.9, 10.1, 6)
    replayed = measured.copy()
    replayed[3] *= 1.03
    return xr.Dataset(
        {
            "measured_step_time": ("step", measured),
            "replayed_step_time": ("step", replayed),
            "slowdown_by_worker": (("dp_rank", "stage"), slowdown),
            "ideal_step_time": 8.0,
        },
        coords={"step": 16 + 5 * np.arange(6)},
    )


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_every_sample_has_its_curve():
    result = validation()
    ax = plot_validation(result)
    found = {label.split(",")[0] for label in labels(ax)}
    assert found == {"measured", "training", "predicted", "independent sampling"}
    measured = next(line for line in ax.lines if line.get_label().startswith("measured"))
    assert np.array_equal(measured.get_xdata()[1:], np.sort(result["measured"]))
    assert measured.get_ydata()[-1] == 1.0
    assert measured.get_drawstyle() == "steps-post"
    p95 = float(np.quantile(result["measured"], 0.95))
    assert any(f"n = 22, p95 {p95:.2f} s" in label for label in labels(ax))
    assert len(ax.collections) == 1  # the band
    assert ax.get_xlabel() == "step time [s]"


def test_what_a_result_lacks_is_left_out():
    ax = plot_validation(validation(parts=False))
    assert [label.split(",")[0] for label in labels(ax)] == ["predicted", "measured"]
    assert not ax.collections


@pytest.mark.parametrize("factor, arrow", [(1.34, "→"), (0.7, "←")])
def test_sampling_that_is_far_off_does_not_squeeze_the_rest(factor, arrow):
    ax = plot_validation(validation(independent=factor))
    low, high = ax.get_xlim()
    assert high - low < 3.0
    assert any("independent" in text and arrow in text for text in texts(ax))
    assert not any("independent" in label for label in labels(ax))


def test_quantiles_lie_on_the_line_where_both_agree():
    result = validation(n=5, parts=False)
    result["predicted"] = ("replicate", np.sort(result["measured"].to_numpy()))
    ax = plot_quantiles(result)
    x, y = next(line for line in ax.lines if line.get_label() == "predicted").get_data()
    assert np.array_equal(x, np.sort(result["measured"]))
    assert y == pytest.approx(np.quantile(x, (np.arange(5) + 0.5) / 5))
    assert ax.get_xlim() == ax.get_ylim()


def test_two_panels_and_days_for_runs(tmp_path):
    result = validation(scale=5e6).assign_attrs(quantity="time_to_train")
    ax = draw_validation(result)
    assert len(ax.figure.axes) == 2
    assert ax.get_xlabel() == "time-to-train [days]"
    ax.figure.savefig(tmp_path / "a.png")


@pytest.mark.parametrize("n", [1, 2])
def test_few_measured_values_can_be_drawn(n, tmp_path):
    result = validation(n=n)
    result["predicted"][:] = 10.0
    draw_validation(result).figure.savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1_000


def test_replay_names_the_steps_that_are_off():
    ax = plot_replay(replay())
    assert texts(ax) == ["step 31"]
    assert "8.0" in ax.get_title(loc="left")


def test_workers_have_stages_as_rows_and_their_numbers():
    ax = plot_workers(replay())
    assert ax.images[0].get_array().shape == (4, 4)
    assert float(ax.images[0].get_array()[2, 1]) == 1.6
    written = [(t.get_position(), t.get_text()) for t in ax.texts if t.get_text() == "1.60"]
    assert written == [((1, 2), "1.60")]
    assert [t.get_text() for t in ax.get_yticklabels()][2] == "stage 2"


def test_many_workers_have_no_numbers_and_few_ticks():
    ax = plot_workers(replay(16, 64))
    assert not ax.texts
    assert len(ax.get_xticklabels()) <= 32


def test_a_healthy_cluster_does_not_look_ill():
    result = replay()
    result["slowdown_by_worker"][:] = 1.0001
    low, high = plot_workers(result).images[0].get_clim()
    assert (low, high) == (1.0, 1.02)
