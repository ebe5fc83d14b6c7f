"""Ranking: shares, savings and intervals of jobs whose answers are known in closed form."""

import math

import numpy as np
import pytest
from pipeline_synth import Effects, Layout, as_production, make_trace

import prism

DENSE = {
    "n_layers": 4, "hidden_size": 2048, "ffn_size": 5632, "n_heads": 16, "vocab_size": 32000,
    "seq_len": 4096,
}  # fmt: skip
LOGNORMAL = {"law": "lognormal"}


def chain(m=1, dp=1, backward=2.0, of_run=None, model_error=None, **effects):
    """One stage without neighbours: a step is the sum of its ops, the latest of dp sums."""
    variability = {"library": None, "effects": effects}
    return prism.load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": backward}},
        "parallelism": {"microbatches": m, "dp": dp}, "run": of_run or {},
        "variability": variability | ({"model_error": model_error} if model_error else {}),
    })  # fmt: skip


def small(resolution="op", steps=1000, **effects):
    """A job with tensor parallelism, a pipeline and every kind of kernel."""
    return prism.load_job({
        "model": DENSE, "parallelism": {"tp": 2, "pp": 2, "dp": 2, "microbatches": 4},
        "cluster": {"nodes": 1, "gpus_per_node": 8}, "run": {"steps": steps},
        "variability": {"library": None, "resolution": resolution, "effects": effects},
    })  # fmt: skip


def ranked(job, target="step_time", **options):
    """A ranking's summary, and its rows by name."""
    found = prism.summary(prism.rank(job, target, **{"seed": 1, **options}))
    return found, {row["name"]: row for kind in ("kernels", "effects") for row in found[kind]}


def holds(row, name, value, times=1.5):
    """Whether a figure and its 95 % interval, that many times as wide, hold a value."""
    low, high = row[f"{name}_ci"]
    assert low - 1e-9 <= row[name] <= high + 1e-9
    return abs(row[name] - value) <= times * (high - low) / 2.0 + 1e-9


# ------------------------------------------------------------------------------------ shares
@pytest.fixture(scope="module")
def product():
    """A step that is a product of three independent factors of mean 1, times 3 s."""
    job = chain(step={"cv": 0.4}, microbatch={"cv": 0.4, "backward_loading": 1.0},
                residual=LOGNORMAL | {"cv": 0.6})  # fmt: skip
    return ranked(job, speed_up=0.25)


def test_shares_of_a_product_are_known(product):
    """First order v / V, total order v times the others' 1 + v over V; V = prod(1 + v) - 1."""
    found, rows = product
    squares = {"step": 0.16, "microbatch": 0.16, "compute": 0.36 * 5 / 9}
    whole = math.prod(1.0 + v for v in squares.values()) - 1.0
    for name, v in squares.items():
        row, first, total = rows[name], v / whole, v * (1.0 + whole) / (1.0 + v) / whole
        assert holds(row, "first_order", first) and holds(row, "total_order", total)
        assert total - first > 4.0 * np.ptp(row["total_order_ci"]) / 4.0 > 0.0
        assert np.ptp(row["total_order_ci"]) < 0.13
    assert found["std"] == pytest.approx(3.0 * whole**0.5, rel=0.1)
    assert found["mean"] == pytest.approx(3.0, rel=0.04)
    assert rows["step"]["cv"] == pytest.approx(0.4, rel=1e-3)
    for share in ("covariance_share", "tail_share", "critical_path_share", "time_share"):
        assert rows["compute"][share] == pytest.approx(1.0)
        assert rows["step"][share] is None


def test_a_class_made_faster_saves_that_share_of_its_time(product):
    row = product[1]["compute"]
    for figure in ("mean", "std", "p50", "p95", "p99"):
        assert row[f"{figure}_reduction_faster"] == pytest.approx(0.25, abs=1e-5)
    assert row["p95_if_faster"] == pytest.approx(0.75 * product[0]["p95"], rel=1e-5)
    assert product[1]["step"]["mean_if_faster"] is None


def test_shares_of_a_sum():
    """Eight normal ops under a step effect: their variances add, but for a small product."""
    rows = ranked(chain(4, step={"cv": 0.01}, residual={"law": "normal", "cv": 0.03}))[1]
    step, own = (12 * 0.01) ** 2, 4 * (1 + 4) * 0.03**2
    for name, part in (("step", step), ("compute", own)):
        for order in ("first_order", "total_order"):
            assert holds(rows[name], order, part / (step + own))


def test_shares_of_the_later_of_two_and_their_order():
    """S max(A1 + B1, A2 + B2) of normal A (microbatch) and B (residual), S of the whole step.

    The maximum is half of the sum and half of the absolute difference; for normal x, y of unit
    variance and correlation r, Cov(|x|, |y|) = 2/pi (r asin r + sqrt(1 - r^2) - 1). S lies between
    the first and the total order of A, so that the two sort causes differently.
    """
    a, whole = 0.01, 1.0 - 1.0 / math.pi

    def shared(r):
        return r / 2 + (r * math.asin(r) + math.sqrt(1 - r * r) - 1) / math.pi

    first, total = shared(0.5) / whole, 1.0 - shared(0.5) / whole
    part = 2.0 / 3.0  # of the variance that is the maximum's
    step = math.sqrt((1 / part - 1) * 2 * a * a * whole)
    job = chain(1, 2, 1e-9, step={"cv": step}, microbatch={"cv": a},
                residual={"law": "normal", "cv": a})  # fmt: skip
    found, rows = ranked(job)
    for name in ("microbatch", "compute"):
        assert holds(rows[name], "first_order", part * first)
        assert holds(rows[name], "total_order", part * total)
    assert holds(rows["step"], "total_order", 1.0 - part)
    assert rows["microbatch"]["total_order"] > rows["step"]["total_order"]
    assert rows["step"]["first_order"] > rows["microbatch"]["first_order"]
    assert [row["name"] for row in found["effects"]] == ["microbatch", "step"]


def test_what_lasts_is_the_variance_between_clusters():
    """One GPU: rank effect, step effect and op noise multiply; only the first differs by draw."""
    effects = {"rank": {"cv": 0.06}, "step": {"cv": 0.04}, "residual": LOGNORMAL | {"cv": 0.06}}
    found, rows = ranked(chain(**effects))
    squares = {"rank": 0.0036, "step": 0.0016, "compute": 0.0036 * 5 / 9}
    for name, v in squares.items():
        assert holds(rows[name], "first_order", v / sum(squares.values()), 2.0)
    assert found["between_cluster_std"] == pytest.approx(3.0 * 0.06, rel=0.25)
    assert found["within_cluster_std"] == pytest.approx(3.0 * 0.06, rel=0.05)
    parts = math.hypot(found["within_cluster_std"], found["between_cluster_std"])
    assert found["std"] == pytest.approx(parts, rel=1e-9)


def test_rare_slow_gpus_have_their_share_though_few_clusters_meet_one():
    """One GPU of twenty is slower by a quarter: two values, beside a step effect."""
    slow = {"cv": 0.0, "lemon_fraction": 0.05, "lemon_slowdown": [1.2499, 1.25]}
    square = 0.05 * 0.95 * 0.25**2 / (1.0 + 0.05 * 0.25) ** 2
    for seed in range(4):  # of some the first clusters have none
        rows = ranked(chain(rank=slow, step={"cv": 0.05}), seed=seed)[1]
        assert rows["rank"]["total_order"] == pytest.approx(square / (square + 0.0025), abs=0.1)


@pytest.mark.parametrize(("per_hour", "seconds"), [(0.02, 30.0), (60.0, 1.0)])
def test_stalls_have_their_share_however_rare(per_hour, seconds):
    """One step in 60,000 stalls for half a minute: never met, yet what it adds is known."""
    stall = {"rate_per_hour": per_hour, "duration_s": seconds, "duration_cv": 0.5, "entity": "job"}
    found, rows = ranked(chain(residual={"law": "normal", "cv": 0.1}, stall=stall))
    rate, noise = per_hour / 3600 * 3, 5 * 0.1**2
    added = rate * seconds**2 * 1.25 - (rate * seconds) ** 2
    for order in ("first_order", "total_order"):
        assert holds(rows["stall"], order, added / (added + noise), 2.0)
    assert rows["compute"]["total_order"] == pytest.approx(noise / (added + noise), abs=0.05)
    saved = 1.0 - math.sqrt(noise / (added + noise))
    assert holds(rows["stall"], "std_reduction", saved, 2.0)
    assert holds(rows["stall"], "mean_reduction", rate * seconds / 3, 2.0)
    std = found["std_with_rare_stalls"] or found["std"]
    assert std == pytest.approx(math.sqrt(added + noise), rel=0.15)


# -------------------------------------------------------------------------------- what it saves
def test_a_frozen_cause_is_at_its_median():
    """A lognormal factor of mean 1 has its median at 1 / sqrt(1 + cv^2)."""
    rows = ranked(chain(4, residual=LOGNORMAL | {"cv": 0.6}))[1]
    assert holds(rows["compute"], "mean_reduction", 1.0 - 1.36**-0.5)
    assert rows["compute"]["mean_reduction"] > 0.08
    assert rows["compute"]["std_reduction"] == pytest.approx(1.0, abs=1e-5)
    effects = {"step": {"cv": 0.8}, "residual": {"law": "normal", "cv": 0.05}}
    found, rows = ranked(chain(4, **effects))
    median = 1.64**-0.5
    assert holds(rows["step"], "mean_reduction", 1.0 - median)
    assert rows["step"]["mean_reduction"] > 0.1
    assert rows["step"]["std_if_frozen"] == pytest.approx(
        12 * median * 0.05 * math.sqrt(5 / 9 / 4), rel=0.25
    )
    assert rows["step"]["p95_if_frozen"] == pytest.approx(12 * median, rel=0.1)
    p95 = 12 * median * math.exp(1.645 * math.sqrt(math.log(1.64)))
    assert found["p95"] == pytest.approx(p95, rel=0.1)
    assert rows["step"]["p95_reduction"] == pytest.approx(1 - 12 * median / p95, abs=0.06)


def test_a_class_is_its_own_noise_at_its_median_too_and_rows_tell_what_recurs():
    """One GPU: at its median, op noise leaves the rank effect, whose slow GPUs stay slow."""
    job = chain(4, of_run={"steps": 100, "failures": "none"}, rank={"cv": 0.05},
                residual=LOGNORMAL | {"cv": 0.2})  # fmt: skip
    rows = ranked(job)[1]
    noise, rank = 0.04 * 5 / 9 / 4, 0.0025
    left = math.sqrt(rank / (rank + noise)) / math.sqrt(1.04)
    assert rows["compute"]["std_reduction"] == pytest.approx(1.0 - left, abs=0.1)
    assert rows["compute"]["total_order"] == pytest.approx(noise / (rank + noise), abs=0.08)
    assert holds(rows["compute"], "mean_reduction", 1.0 - 1.04**-0.5)
    assert rows["compute"]["run_reduction"] == pytest.approx(1.0 - 1.04**-0.5, abs=2e-3)
    assert [rows[name]["recurrence"] for name in ("rank", "compute")] == ["persistent", "rotating"]
    assert rows["rank"]["lasting_share"] == pytest.approx(1.0, abs=0.1)
    stall = {"rate_per_hour": 60.0, "duration_s": 1.0, "duration_cv": 0.5, "entity": "job"}
    rows = ranked(chain(residual={"law": "normal", "cv": 0.1}, stall=stall))[1]
    assert rows["stall"]["recurrence"] == "occasional" and rows["stall"]["few_steps_share"] > 0.7


def test_a_frozen_cause_is_compared_under_the_same_draws():
    """One in a thousand of the spread: its saving is known far better than either step."""
    rows = ranked(chain(4, step={"cv": 0.2}, microbatch={"cv": 0.005, "backward_loading": 1.0}))[1]
    row = rows["microbatch"]
    for figure in ("mean", "std", "p50"):
        assert abs(row[f"{figure}_reduction"]) < 3e-3
        assert np.ptp(row[f"{figure}_reduction_ci"]) < 6e-3
    assert np.ptp(row["mean_reduction_ci"]) < 1e-3  # of independent runs: 0.03


def test_congestion_frozen_is_at_its_mean_and_all_of_the_variance():
    """Transfers after the backward, slowed by links alone: what links multiply has mean 1."""
    job = prism.load_job({
        "model": DENSE, "parallelism": {"dp": 8, "microbatches": 1, "overlap": False},
        "cluster": {"nodes": 2, "gpus_per_node": 4, "leaf_nodes": 1},
        "variability": {
            "library": None, "effects": {"regime": {"probability": 0.2, "factor": 3.0}},
        },
    })  # fmt: skip
    rows = ranked(job)[1]
    transfers = rows["dp_all_reduce"]["critical_path_share"]
    assert 0.2 < transfers < 0.8
    assert rows["regime"]["total_order"] == rows["regime"]["std_reduction"] == 1.0
    assert holds(rows["regime"], "mean_reduction", 0.0)
    assert abs(rows["regime"]["mean_reduction"]) < 0.1 * transfers
    # transfers make all of the variance and of the tail, kernels most of the rest of the time
    for share in ("covariance_share", "tail_share"):
        assert rows["dp_all_reduce"][share] == pytest.approx(1.0, abs=0.02)
        assert rows["attention"][share] == pytest.approx(0.0, abs=1e-5)
    assert rows["attention"]["critical_path_share"] > 0.05
    assert rows["attention"]["total_order"] == 0.0


@pytest.mark.usefixtures("few_clusters")
def test_congestion_of_a_job_that_sends_nothing_costs_nothing():
    job = chain(5, dp=8, regime={"probability": 0.01, "factor": 1.1}, rank={"cv": 0.01})
    rows = ranked(job)[1]
    assert rows["rank"]["total_order"] == pytest.approx(1.0, abs=1e-6)
    assert "regime" not in rows or rows["regime"]["total_order"] == 0.0


@pytest.mark.usefixtures("few_clusters")
def test_both_resolutions_give_one_ranking():
    effects = {"rank": {"cv": 0.01}, "step": {"cv": 0.01}, "microbatch": {"cv": 0.02},
               "call": {"cv": 0.01}, "residual": {"cv": 0.08}}  # fmt: skip
    op, kernel = (ranked(small(r, **effects), seed=2) for r in ("op", "kernel"))
    assert op[1].keys() == kernel[1].keys()
    for name, row in op[1].items():
        other = kernel[1][name]
        widths = [np.ptp(x["total_order_ci"]) / 2.0 for x in (row, other)]
        apart = abs(row["total_order"] - other["total_order"])
        assert apart < 0.01 + 1.5 * math.hypot(*widths), name
        for figure in ("std_reduction", "p95_reduction"):
            assert row[figure] == pytest.approx(other[figure], abs=0.06), name
    for found, rows in (op, kernel):
        for kind in ("kernels", "effects"):
            totals = [row["total_order"] for row in found[kind]]
            assert totals == sorted(totals, reverse=True)
        for share in ("covariance_share", "tail_share", "critical_path_share", "time_share"):
            assert sum(row[share] for row in found["kernels"]) == pytest.approx(1.0, abs=1e-12)
        assert all(row["total_order"] >= row["first_order"] - 1e-12 for row in rows.values())


# ----------------------------------------------------------------------------------------- runs
def test_of_a_run_what_lasts_remains():
    """Ten steps: op noise of a step's variance is divided by them, the rank effect is not."""
    noise = 0.3**2 * 5 / 9
    job = chain(of_run={"steps": 10, "failures": "none"}, rank={"cv": (noise / 10) ** 0.5},
                residual=LOGNORMAL | {"cv": 0.3})  # fmt: skip
    of_step = ranked(job)[1]
    assert holds(of_step["rank"], "total_order", 1 / 11, 2.0)
    found, of_run = ranked(job, "time_to_train")
    assert holds(of_run["rank"], "total_order", 0.5, 2.0)
    assert of_run["compute"]["total_order"] == pytest.approx(0.5, abs=0.15)
    assert found["std"] == pytest.approx(30 * (2 * noise / 10) ** 0.5, rel=0.15)
    assert found["mean"] == pytest.approx(30, rel=0.03)
    assert of_run["rank"]["std_reduction"] == pytest.approx(1 - 0.5**0.5, abs=0.12)


EFFECTS = {"rank": {"cv": 0.02}, "step": {"cv": 0.02, "correlation_time_s": 60},
           "microbatch": {"cv": 0.02}, "residual": {"cv": 0.05}}  # fmt: skip
FAILURES = {
    "steps": 2500, "failures": {"per_1000_node_days": 5e4, "restart": "2min"},
    "checkpoint": {"interval_steps": 20, "write_s": 3.0},
    "evaluation": {"interval_steps": 500, "duration": "1min"},
}  # fmt: skip


@pytest.mark.usefixtures("few_clusters")
@pytest.mark.parametrize(
    ("effects", "run", "model_error"),
    [
        (EFFECTS, {"steps": 2500}, None),
        (EFFECTS, FAILURES, None),
        (EFFECTS | {"run": {"cv": 0.01}, "jitter": {"mean_s": 0.2}}, {"steps": 2500}, 0.02),
    ],
    ids=["steps", "failures", "model-error"],
)
def test_a_ranking_is_of_the_runs_of_its_estimate(effects, run, model_error):
    """Of the same job and seed: mean, spread and terms; causes make what steps do of it."""
    job = chain(4, 2, 2.1, run, model_error, **effects)
    whole = prism.summary(prism.estimate(job, replicates=2560, seed=3))
    for target in ("step_time", "time_to_train"):
        found, causes = ranked(job, target, seed=3)
        assert (found["target"], found["seed"]) == (target, 3)
        for figure in ("mean", "std", "p95", "within_cluster_std", "between_cluster_std"):
            assert found[figure] == pytest.approx(whole[target][figure], rel=1e-12)
    terms, errors = whole["variance_by_term"], whole["variance_by_term_se"]
    assert found["variance_by_term"] == terms
    assert sum(terms.values()) == pytest.approx(1.0, abs=1e-9)
    of_steps = sum(terms.get(name, 0.0) for name in ("step_noise", "slow_steps", "drift"))
    first, total = (sum(r[f"{x}_order"] for r in causes.values()) for x in ("first", "total"))
    assert first < 1.06 * of_steps + 0.01 and total > 0.94 * of_steps - 0.01
    for cause, term in (("rank", "slow_steps"), ("step", "drift")):
        half = np.ptp(causes[cause]["first_order_ci"]) / 2
        assert abs(causes[cause]["first_order"] - terms[term]) < 4.0 * errors[term] + 2.0 * half


@pytest.mark.usefixtures("few_clusters")
def test_a_run_with_a_cause_held_is_the_estimate_without_it():
    """Its other parts stay: failures, checkpoints, the model's error."""
    job = chain(4, 4, of_run=FAILURES, model_error=0.01, **EFFECTS)
    held = ranked(job, "time_to_train", seed=3)[1]["rank"]
    whole, calm = (
        prism.summary(prism.estimate(x, replicates=2560, run_replicates=4000, seed=3))[
            "time_to_train"
        ]
        for x in (job, job.replace("variability.effects.rank.cv=0"))
    )
    errors = {
        "mean": math.hypot(whole["mean_se"], calm["mean_se"]) / whole["mean"],
        "std": math.hypot(1.0, calm["std"] / whole["std"]) / math.sqrt(2.0 * 4000),
    }
    for figure, error in errors.items():
        saved, half = held[f"{figure}_reduction"], np.ptp(held[f"{figure}_reduction_ci"]) / 2.0
        assert abs(saved - (1.0 - calm[figure] / whole[figure])) < 1.5 * half + 3.0 * error
    assert held["mean_reduction"] > 0.005 and held["std_if_frozen"] > 0.8 * whole["std"]


# --------------------------------------------------------------------------------- fitted traces
def fitted(folder, layout=None, **effects):
    frame, _ = make_trace(layout or Layout(2, 2, 4, 24), Effects(**effects), 1)
    as_production(frame).to_csv(folder / "ops.csv", index=False)
    prism.save(prism.fit(folder / "ops.csv", 0), folder / "m.nc")
    return prism.load_job(str(folder / "m.nc"))


@pytest.mark.usefixtures("few_clusters")
def test_a_slow_worker_of_a_trace_explains_the_mean_and_no_variance(tmp_path):
    job = fitted(tmp_path, residual_sd=0.01, step_sd=0.01, lemons={(1, 1): 1.7})
    found, rows = ranked(job)
    assert {"forward", "backward", "p2p"} <= {row["name"] for row in found["kernels"]}
    assert rows["rank"]["mean_reduction"] > 0.25 and rows["rank"]["total_order"] == 0.0
    assert rows["step"]["total_order"] > 0.5 and abs(rows["step"]["mean_reduction"]) < 0.02


@pytest.mark.usefixtures("few_clusters")
@pytest.mark.parametrize(("effect", "name"), [("content_sd", "microbatch"), ("step_sd", "step")])
def test_what_a_trace_was_made_with_comes_out_on_top(tmp_path, effect, name):
    found, rows = ranked(fitted(tmp_path, residual_sd=0.01, **{effect: 0.1}), seed=2)
    assert max(rows.values(), key=lambda row: row["total_order"])["name"] == name
    assert rows[name]["total_order"] > 0.7


# ---------------------------------------------------------------------------------------- the rest
def test_the_same_seed_gives_the_same_ranking_whatever_the_threads():
    job = chain(rank={"cv": 0.02}, step={"cv": 0.01}, residual={"cv": 0.03})
    one, two = (prism.rank(job, seed=5, threads=n).to_xarray().drop_attrs() for n in (1, 2))
    assert one.identical(two)
    other = prism.rank(job, seed=6)
    assert not np.array_equal(one.total_order, other.total_order)
    for variable in other.to_xarray().data_vars.values():
        assert set(variable.attrs) >= ({"long_name"} if variable.dtype == object else
                                       {"units", "long_name"})  # fmt: skip


@pytest.mark.parametrize(
    ("job", "options"),
    [
        (chain(residual={"cv": 0.1}), {"target": "loss"}),
        (chain(residual={"cv": 0.1}), {"speed_up": 1.0}),
        (chain(residual={"cv": 0.1}), {"speed_up": 0.0}),
        (chain(residual={"cv": 0.1}).replace("variability.dependence=none"), {}),
    ],
)
def test_bad_requests(job, options):
    with pytest.raises(prism.PrismError):
        prism.rank(job, **options)
