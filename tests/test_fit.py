"""Fits of pipeline traces: known effects come back, and the model simulates the traced job."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from campaign import examples
from drawn_steps import draw_steps
from pipeline_synth import Effects, Layout, draw, make_trace, run, write_tidy

import prism
from prism import PrismError, load_job

COMPUTE = ("forward", "backward")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """Fit a table: its figures, and the path of the model where one is to be simulated."""
    folder = tmp_path_factory.mktemp("fit")
    made = []

    def call(frame, simulated=False, seed=0):
        model = prism.fit(write_tidy(frame, folder / "ops.csv"), seed)
        found = SimpleNamespace(**prism.summary(model))
        json.dumps(vars(found), allow_nan=False)
        if simulated:
            made.append(found)
            found.path = folder / f"{len(made)}.nc"
            prism.save(model, found.path)
        return found

    return call


def with_drift(durations, sd, rng, apart=False):
    """Let all workers of a replica drift together from step to step, or its stages apart."""
    drift = np.exp(sd * rng.standard_normal((10, 10, next(iter(durations.values())).size)))
    return {
        k: v * drift[k[1], k[2] if apart else 0] if k[0] in COMPUTE else v
        for k, v in durations.items()
    }


def population(layout, effects, seed=77, steps=1500):
    """Step times of the job without anything fitted, workers' factors apart."""
    layout = replace(layout, steps=steps)
    durations, *_ = draw(layout, effects, np.random.default_rng(seed))
    return run(layout, effects, durations)[1]


# ------------------------------------------------------------------------------ known effects
def test_effects_come_back_with_their_shares_and_loadings(fitted):
    layout = Layout(8, 3, 8, 40)
    effects = Effects(
        rank_sd=0.01, step_sd=0.015, content_sd=0.03, content_last=0.5, residual_sd=0.008,
        first_microbatch=0.97, stage=(1.0, 1.3, 1.1), gap_s=0.002,
    )  # fmt: skip
    rng = np.random.default_rng(5)
    durations, rank, step, _ = draw(layout, effects, rng)
    frame, times = run(layout, effects, with_drift(durations, 0.012, rng))
    found = fitted(frame)
    position = abs(np.log(0.97)) * np.sqrt(7.0) / 8.0
    drawn_rank = np.log(rank).std(axis=0, ddof=1)  # of each stage
    within = {"position": 0.1, "rank": 0.15, "step": 0.15, "rank_step": 0.25, "residual": 0.05}
    for kind, power in (("forward", 1.0), ("backward", 1.5)):
        content = 0.03 * power * np.array([1.0, 1.0, 0.5])
        true = {
            "position": position, "rank": np.sqrt((drawn_rank**2).mean()),
            "step": np.log(step).std(ddof=1), "rank_step": 0.012,
            "microbatch": np.sqrt((content**2).mean()), "residual": 0.008,
        }  # fmt: skip
        total = sum(std**2 for std in true.values())
        for name, std in true.items():
            row = found.effects[name]["by_op_kind"][kind]
            assert row["cv"] == pytest.approx(std, rel=within.get(name, 0.05)), (kind, name)
            assert row["ci"][0] < row["cv"] < row["ci"][1]
            assert row["share"] == pytest.approx(std**2 / total, abs=0.03), (kind, name)
        for stage in range(3):
            loadings = found.loadings[f"{kind} stage {stage}"]
            assert loadings["microbatch"] == pytest.approx(content[stage], rel=0.1)
            assert loadings["step"] == pytest.approx(true["step"], rel=0.15)
            assert loadings["rank_step"] == pytest.approx(0.012, rel=0.3)
            assert loadings["residual"] == pytest.approx(0.008, rel=0.05)
    for row in found.effects.values():  # pooled over op kinds
        of_kinds = row["by_op_kind"].values()
        if of_kinds:
            mean_square = np.mean([of_kind["cv"] ** 2 for of_kind in of_kinds])
            assert row["cv"] ** 2 == pytest.approx(mean_square)
    whole = sum(row["cv"] ** 2 for row in found.effects.values() if row["cv"])
    for name, row in found.effects.items():
        if name != "call":
            assert row["share"] == pytest.approx(row["cv"] ** 2 / whole), name
    assert found.effects["call"]["cv"] is None and found.lemons == []
    assert found.step_time["mean"] == pytest.approx(times.mean())
    assert found.step_time["cv"] == pytest.approx(times.std(ddof=1) / times.mean())
    check = found.cross_check
    for name in ("model", "resampled"):
        assert check[name]["mean"] == pytest.approx(times.mean(), rel=0.005)
        assert check[name]["cv"] == pytest.approx(check["measured"]["cv"], rel=0.3)
    kernels = {row["name"]: row for row in found.kernels}
    shares = [row["step_share"] for row in found.kernels]
    assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1.0)
    assert kernels["backward stage 1"]["n"] == 8 * 40 * 8
    recorded = frame.query("name == 'backward-compute' and stage == 1")["duration"]
    tail = recorded.quantile(0.99) / recorded.median()
    spread = recorded.std(ddof=0) / recorded.mean()
    assert kernels["backward stage 1"]["cv"] == pytest.approx(spread)
    assert kernels["backward stage 1"]["p99_p50"] == pytest.approx(tail, rel=1e-3)
    assert kernels["backward stage 1"]["residual_cv"] == pytest.approx(0.008, rel=0.05)
    assert kernels["backward stage 1"]["mean"] == pytest.approx(0.4 * 1.3, rel=0.01)
    busy = {name: seconds * 1.3 * 8 for name, seconds in (("forward", 0.2), ("backward", 0.4))}
    ratio = kernels["backward stage 1"]["step_share"] / kernels["forward stage 1"]["step_share"]
    assert ratio == pytest.approx(busy["backward"] / busy["forward"], rel=0.01)
    assert {row["op_kind"] for row in found.kernels} >= {"transfer", "launch_gap", "optimizer"}


def test_the_ideal_of_a_fit_is_the_step_with_every_effect_at_one(fitted):
    layout, effects = Layout(4, 3, 6, 12), Effects(
        rank_sd=0.005, step_sd=0.03, residual_sd=0.0, gap_s=0.01, lemons={(1, 1): 1.8}
    )  # fmt: skip
    frame, truth = make_trace(layout, effects, 2)
    found = fitted(frame, simulated=True)
    cured = {k: v / 1.8 if k[0] in COMPUTE and k[1:3] == (1, 1) else v
             for k, v in truth.durations.items()}  # fmt: skip
    ideal = {}
    for key, value in cured.items():
        alike = [v for k, v in cured.items() if (k[0], *k[2:]) == (key[0], *key[2:])
                 and not (k[0] in COMPUTE and k[1:3] == (1, 1))]  # fmt: skip
        ideal[key] = np.full_like(value, np.mean(alike))
    expected = run(layout, effects, ideal)[1].mean()
    assert found.cross_check["ideal"] == pytest.approx(expected, rel=1e-6)
    estimated = prism.summary(prism.estimate(found.path, replicates=64, seed=1))
    assert estimated["ideal_step_time"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "slow", [{"lemons": {(1, 0): 2.2}}, {"delays": {(1, 0): 0.3}}, {"lemons": {(1, 0): 1.1}}]
)
def test_lemons_are_found_and_follow_what_they_did(fitted, slow):
    layout = Layout(5, 2, 8, 40)
    effects = Effects(content_sd=0.05, residual_sd=0.01, gap_s=0.002, **slow)
    found = fitted(make_trace(layout, effects, 1)[0], simulated=True)
    (lemon,) = found.lemons
    assert (lemon["replica"], lemon["stage"]) == (1, 0)
    factors = list(slow.get("lemons", {}).values()) or [1 + 0.3 / 0.2, 1 + 0.3 / 0.4]
    assert lemon["slowdown"] == pytest.approx(np.mean(factors), rel=0.01)
    assert found.effects["rank"]["cv"] < 0.004  # the body's, undiluted
    for kind, power in zip(COMPUTE, (1.0, 1.5), strict=True):
        assert found.loadings[f"{kind} stage 0"]["microbatch"] == pytest.approx(
            0.05 * power, rel=0.05
        )
        assert found.loadings[f"{kind} stage 0"]["residual"] == pytest.approx(0.01, rel=0.05)
    drawn = draw_steps(load_job(found.path), 2048, 1).step_time
    true = population(layout, effects)
    # the lemon's own mean is known to 0.4 %; a delay that followed the contents would vary more
    assert float(drawn.mean()) == pytest.approx(true.mean(), rel=0.008)
    assert float(drawn.std()) == pytest.approx(true.std(), rel=0.12)


SOURCES = {
    "residuals": Effects(residual_sd=0.1),
    "communication": Effects(residual_sd=0.0, other_sd=0.5, collective_s=0.5, transfer_s=0.02),
    "gaps": Effects(residual_sd=0.0, other_sd=0.0, gap_s=0.03),
    "steps": Effects(step_sd=0.05), "contents": Effects(content_sd=0.2, content_last=0.5),
    "drift of replicas": Effects(), "drift of workers": Effects(),
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_a_model_varies_as_its_job_whatever_it_varies_by(fitted, source):
    layout, effects = Layout(3, 2, 4, 60), SOURCES[source]

    def times(steps, seed):
        rng = np.random.default_rng(seed)
        shape = replace(layout, steps=steps)
        durations, *_ = draw(shape, effects, rng)
        if source.startswith("drift"):
            durations = with_drift(durations, 0.04, rng, apart=source.endswith("workers"))
        return run(shape, effects, durations)

    found = fitted(times(60, 1)[0], simulated=True)
    drawn = draw_steps(load_job(found.path), 2048, 1).step_time
    true = times(1000, 2)[1]
    error = true.std() / np.sqrt(60)
    assert float(drawn.mean()) == pytest.approx(true.mean(), abs=3.0 * error)
    assert float(drawn.std()) == pytest.approx(true.std(), rel=0.3)  # 60 steps tell 10 % of it
    check = found.cross_check["model"]
    assert check["cv"] * check["mean"] == pytest.approx(float(drawn.std()), rel=0.1)


def test_workers_are_drawn_from_the_traced_ones_lemons_among_them(fitted):
    effects = Effects(residual_sd=0.0, other_sd=0.0, lemons={(3, 0): 1.5})
    found = fitted(make_trace(Layout(16, 1, 4, 4), effects)[0], simulated=True)
    measured = load_job(found.path)
    steps = {
        how: draw_steps(measured.replace(f"variability.ranks={how}"), 64 * n, 1).step_time
        for how, n in (("measured", 1), ("drawn", 400))
    }
    healthy, slow = 4 * 0.6, 4 * 0.6 * 1.5
    rest = float(steps["measured"].mean()) - slow
    assert rest == pytest.approx(4 * 0.05 + 0.02, abs=1e-4)  # what is no forward or backward
    kinds = np.round(steps["drawn"].values - rest, 2)
    assert np.unique(kinds).tolist() == pytest.approx([healthy, slow])
    # one in 16 workers, 16 of them: none in 36 % of 400 clusters, of a standard error of 2.4 %
    assert np.mean(kinds < 3.0) == pytest.approx((15 / 16) ** 16, abs=0.1)


def test_drawn_workers_differ_as_the_traced_ones_do(fitted):
    effects = Effects(residual_sd=0.001, other_sd=0.0, rank_sd=0.01)
    found = fitted(make_trace(Layout(16, 1, 4, 10), effects, 3)[0], simulated=True)
    job = load_job(found.path).replace("variability.ranks=drawn")
    slowest = (draw_steps(job, 6400, 1).step_time.values - 4 * 0.05 - 0.02) / (4 * 0.6)
    # the largest of 16 normal numbers is 1.77 above their mean, of a bounded body somewhat less
    spread = found.effects["rank"]["cv"]
    assert slowest.mean() - 1.0 == pytest.approx(1.7 * spread, rel=0.2)


def test_content_that_speeds_up_where_it_slows_others_down_keeps_its_sign(fitted):
    layout, effects = Layout(4, 4, 8, 40), Effects(residual_sd=0.004)
    loadings = (0.03, 0.03, 0.02, -0.02)

    def contents(layout, rng):
        durations, *_ = draw(layout, effects, rng)
        content = rng.standard_normal((4, 8, layout.steps))
        return run(layout, effects, {
            k: v * np.exp(loadings[k[2]] * content[k[1], k[4]]) if k[0] in COMPUTE else v
            for k, v in durations.items()
        })  # fmt: skip

    found = fitted(contents(layout, np.random.default_rng(3))[0], simulated=True)
    sign = np.sign(found.loadings["forward stage 0"]["microbatch"])
    for kind in COMPUTE:
        for stage, loading in enumerate(loadings):
            there = sign * found.loadings[f"{kind} stage {stage}"]["microbatch"]
            assert there == pytest.approx(loading, rel=0.1)
    drawn = draw_steps(load_job(found.path), 2048, 1).step_time
    true = contents(replace(layout, steps=3000), np.random.default_rng(4))[1]
    assert float(drawn.mean()) == pytest.approx(true.mean(), rel=0.001)
    assert float(drawn.std()) == pytest.approx(true.std(), rel=0.08)


def test_memory_over_steps_is_found_and_absent_memory_is_not(fitted):
    layout = Layout(2, 2, 4, 120)
    found = fitted(make_trace(layout, Effects(step_sd=0.02, step_memory=0.9), 1)[0])
    assert 3.0 < found.step_correlation_steps < 40.0  # truth: -1 / ln 0.9 = 9.5
    found = fitted(make_trace(layout, Effects(step_sd=0.02), 2)[0])
    assert found.step_correlation_steps is None


def test_intervals_of_whole_traces_cover_the_truth(fitted):
    """Some traces of one job; the full table is experiments/checks/synthetic_truth.py."""
    true = {"rank": 0.008, "step": 0.01, "rank_step": 0.004, "microbatch": 0.015,
            "residual": 0.005}  # fmt: skip
    effects = Effects(
        rank_sd=0.008, step_sd=0.01, content_sd=0.015, residual_sd=0.005, content_backward=1.0,
        first_microbatch=0.99, lemons={(1, 0): 2.4},
    )  # fmt: skip
    layout, n = Layout(4, 3, 6, 12), examples(10)
    rows = {name: [] for name in true}
    for seed in range(n):
        rng = np.random.default_rng(seed)
        durations = with_drift(draw(layout, effects, rng)[0], 0.004, rng)
        found = fitted(run(layout, effects, durations)[0])
        for name in true:
            rows[name] += found.effects[name]["by_op_kind"].values()
    for name, std in true.items():
        low, high = np.array([row["ci"] for row in rows[name]]).T
        # two intervals a trace, half of them independent: of 0.9, five standard errors down
        assert np.mean((low <= std) & (std <= high)) > 0.9 - 5.0 * np.sqrt(0.09 / n), name
        assert np.mean([row["cv"] for row in rows[name]]) == pytest.approx(std, rel=0.3), name
        # negative control: they are no wider than to tell it from 2.5 times as much
        assert np.mean((low <= 2.5 * std) & (2.5 * std <= high)) < 0.3, name


# ---------------------------------------------------------------------- the model as a job
@pytest.fixture(scope="module")
def model(fitted):
    effects = Effects(
        rank_sd=0.006, step_sd=0.012, content_sd=0.02, residual_sd=0.006, gap_s=0.002
    )  # fmt: skip
    frame, truth = make_trace(Layout(4, 2, 6, 24), effects, 1)
    return fitted(frame, simulated=True), truth


def test_a_model_simulates_the_traced_job(model, small_pools):
    found, truth = model
    sizes = (found.kind, found.steps, found.dp_size, found.stages, found.workers, found.p2p)
    assert sizes == ("trace", 24, 4, 2, 8, "blocking")
    mean, std = truth.step_times.mean(), truth.step_times.std(ddof=1)
    asked = {"replicates": 1024, "run_replicates": 256, "steps": 100, "seed": 1}
    whole = prism.summary(prism.estimate(found.path, **asked))
    assert whole["world_size"] == 8
    assert whole["step_time"]["mean"] == pytest.approx(mean, rel=0.005)
    assert whole["step_time"]["std"] == pytest.approx(std, rel=0.4)  # 24 steps show 15 % of it
    assert whole["time_to_train"]["mean"] == pytest.approx(100 * mean, rel=0.01)
    alone = load_job(found.path).replace("variability.dependence=none")
    less = prism.summary(prism.estimate(alone, replicates=256, seed=1))["step_time"]["std"]
    assert less < 0.6 * whole["step_time"]["std"]
    drawn = load_job(found.path).replace("variability.ranks=drawn")
    drawn = prism.summary(prism.estimate(drawn, replicates=2048, seed=1))["step_time"]
    assert drawn["between_cluster_std"] > 2.0 * whole["step_time"]["between_cluster_std"]


def test_a_model_is_a_job_of_the_traced_layout(model):
    job = load_job(model[0].path)
    p, durations = job.parallelism, job.model.durations
    assert (p.pp, p.dp, p.microbatches, p.p2p) == (2, 4, 6, "blocking")
    assert durations.forward_s == pytest.approx([0.2, 0.2], rel=0.02)
    assert durations.backward_s == pytest.approx([0.4, 0.4], rel=0.02)
    few, many = (
        prism.summary(prism.estimate(job.replace(f"parallelism.dp={dp}"), replicates=256, seed=1))
        for dp in (4, 16)
    )
    assert (few["world_size"], many["world_size"]) == (8, 32)
    assert many["ideal_step_time"] == pytest.approx(few["ideal_step_time"], rel=1e-6)
    assert many["step_time"]["mean"] > 1.002 * few["step_time"]["mean"]  # the slowest of more


def test_a_ranking_of_a_model_names_the_effect_that_decides(model, few_clusters):
    found, truth = model
    ranked = prism.summary(prism.rank(load_job(found.path), seed=1))
    shares = [effect["total_order"] for effect in ranked["effects"]]
    assert shares == sorted(shares, reverse=True)
    step, content = ranked["effects"][:2]
    assert (step["name"], content["name"]) == ("step", "microbatch")
    durations = {k: v / truth.step if k[0] in COMPUTE else v for k, v in truth.durations.items()}
    frozen = run(truth.layout, truth.effects, durations)[1].std(ddof=1)
    assert step["std_if_frozen"] == pytest.approx(frozen, rel=0.4)  # 24 steps tell 15 % of it
    assert step["std_if_frozen"] < 0.8 * ranked["std"]
    assert step["total_order"] == pytest.approx(1 - (frozen / ranked["std"]) ** 2, abs=0.2)


def test_runs_of_a_model_can_hold_an_error_of_it(model):
    job = load_job(model[0].path)
    asked = {"replicates": 640, "run_replicates": 1_000, "steps": 500, "seed": 1}
    wrong, right = (
        prism.summary(prism.estimate(job.replace(f"variability.model_error={x}"), **asked))
        for x in (0.05, 0)
    )
    assert right["step_time"] == wrong["step_time"] and "model_error" not in right
    of_run = wrong["time_to_train"]
    assert of_run["model_error_std"] == pytest.approx(0.05 * of_run["mean"], rel=0.1)
    with pytest.raises(PrismError, match="variability.effects"):
        prism.estimate(job.replace("variability.effects.jitter.mean_s=0.1"), **asked)


def test_a_seed_gives_the_same_fit_again(tmp_path):
    path = write_tidy(
        make_trace(Layout(2, 2, 4, 6), Effects(content_sd=0.02))[0], tmp_path / "a.csv"
    )
    drawn = prism.fit(path)  # with a seed of its own, which gives the same again
    one, other = prism.summary(drawn), prism.summary(prism.fit(path))
    assert drawn.to_xarray().identical(prism.fit(path, one["seed"]).to_xarray())
    assert one["seed"] != other["seed"]
    assert one["cross_check"]["model"] != other["cross_check"]["model"]


# ------------------------------------------------------------------------------- small traces
LAYOUTS = {
    "1f1b": Layout(2, 4, 6, 10), "async": Layout(2, 3, 6, 10, p2p="async"),
    "gpipe": Layout(2, 3, 4, 10, schedule="gpipe"),
    "interleaved": Layout(2, 2, 4, 10, "interleaved", "async", 2),
    "no pipeline": Layout(4, 1, 4, 10), "one replica": Layout(1, 3, 4, 10),
    "one microbatch": Layout(4, 2, 1, 10), "two steps": Layout(2, 2, 4, 2),
    "one worker, one microbatch": Layout(1, 1, 1, 10),
}  # fmt: skip


VARIED = {
    "effects": Effects(step_sd=0.02, content_sd=0.1, rank_sd=0.01, gap_s=0.002),
    "zero variance": Effects(residual_sd=0.0, other_sd=0.0),
    "missing": Effects(step_sd=0.02, missing=0.03),
    "small gaps": Effects(content_sd=0.05, gap_s=1e-5, jitter_s=1e-6),
}
# messages are paired by their order: none may be missing of those that overlap
SOME = {"missing": ("1f1b", "gpipe", "no pipeline"), "small gaps": ("1f1b", "interleaved")}


@pytest.mark.parametrize(
    ("varied", "name"), [(v, name) for v in VARIED for name in SOME.get(v, LAYOUTS)]
)
def test_no_trace_gives_nonsense(fitted, varied, name):
    layout, effects = LAYOUTS[name], VARIED[varied]
    frame, truth = make_trace(layout, effects, 1)
    found = fitted(frame)
    mean = truth.step_times.mean()
    for name in ("model", "resampled"):
        assert found.cross_check[name]["mean"] == pytest.approx(mean, rel=0.06)
        if effects.residual_sd == 0.0:
            assert found.cross_check[name]["mean"] == pytest.approx(mean, rel=1e-6)
            assert found.cross_check[name]["cv"] < 1e-6
    if layout.steps * layout.replicas < 20:
        assert found.warnings
    assert bool(found.effects) == (layout.microbatches * layout.replicas > 1)


def test_a_worker_that_lacks_a_whole_step_or_an_op_everywhere(fitted):
    frame, truth = make_trace(Layout(3, 2, 4, 10), Effects(content_sd=0.05, step_sd=0.02), 1)
    compute = frame["op_kind"].isin(COMPUTE)
    gone = (frame["dp_rank"] == 1) & (frame["stage"] == 0) & (frame["step"] == 4) & compute
    forwards = (frame["name"] == "forward-compute") & (frame["microbatch"] == 3)
    gone |= (frame["dp_rank"] == 2) & forwards
    found = fitted(frame[~gone])
    for name in ("model", "resampled"):
        assert found.cross_check[name]["mean"] == pytest.approx(truth.step_times.mean(), rel=0.03)


def test_one_step_is_refused(fitted):
    with pytest.raises(PrismError):
        fitted(make_trace(Layout(2, 2, 4, 1), Effects())[0])


def layered(labels):
    """A job whose microbatch is two forward and two backward ops, all with the same content."""
    rng = np.random.default_rng(0)
    means = {("forward", "attn"): 0.01, ("forward", "mlp"): 0.03}
    means |= {("backward", "mlp_b"): 0.06, ("backward", "attn_b"): 0.02}
    rows = []
    for step in range(24):
        slow, ends = np.exp(0.02 * rng.standard_normal()), []
        for rank in range(4):
            at = 0.0
            for microbatch in range(4):
                work = slow * np.exp(0.03 * rng.standard_normal())
                for (kind, name), mean in means.items():
                    took = mean * work * np.exp(0.005 * rng.standard_normal())
                    mb = {"named": microbatch, "none": -1, "one": 0}[labels]
                    rows.append((step, rank, kind, name, at, took, mb))
                    at += took
            ends.append(at)
        for rank, at in enumerate(ends):
            rows.append((step, rank, "all_reduce", "grads", at, max(ends) + 0.01 - at, -1))
    names = ["step", "rank", "op_kind", "name", "start", "duration", "microbatch"]
    return pd.DataFrame(rows, columns=names)


@pytest.mark.parametrize("labels", ["named", "none", "one"])
def test_a_microbatch_of_several_ops_keeps_each_of_them(fitted, labels):
    found = fitted(layered(labels))
    means = {row["name"]: row["mean"] for row in found.kernels}
    assert means["attn stage 0"] == pytest.approx(0.01, rel=0.03)
    assert means["mlp_b stage 0"] == pytest.approx(0.06, rel=0.03)
    assert found.effects["microbatch"]["cv"] == pytest.approx(0.03, rel=0.15)
    check = found.cross_check
    assert check["model"]["mean"] == pytest.approx(check["measured"]["mean"], rel=0.01)


def test_tables_of_a_model_are_the_figures_of_its_json(tmp_path):
    model = prism.fit(Path(__file__).parents[1] / "experiments" / "samples" / "trace.csv", seed=1)
    found = prism.summary(model)
    assert model.kernels["mean"].to_dict() == {row["name"]: row["mean"] for row in found["kernels"]}
    assert set(model.kernels.distribution) == {"empirical"}
    rank = found["effects"]["rank"]
    row = model.effects.loc["rank"]
    assert [row.cv, [row.cv_low, row.cv_high], row.share] == [
        rank[k] for k in ("cv", "ci", "share")
    ]
    assert model.kernels.attrs["fields"]["mean"]["unit"] == "s"
    prism.save(model, tmp_path / "m.nc")
    assert prism.load(tmp_path / "m.nc").kernels.equals(model.kernels)
