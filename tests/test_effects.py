"""Effects by closed forms: jobs of a few ops of known length, of which one thing varies."""

import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from drawn_steps import draw_steps
from scipy import stats

import prism

LANES = 64  # steps that share their GPUs
N = 12_800


@functools.cache
def _job(text):
    return prism.load_job(json.loads(text))


def made(effects=None, *, cluster=None, run=None, seconds=(1.0, 2.0), variability=None, **layout):
    """A job of stages that take 1 s forward and 2 s backward."""
    values = {
        "model": {"durations": {"forward_s": seconds[0], "backward_s": seconds[1]}},
        "parallelism": layout,
        "cluster": cluster or {},
        "variability": {"library": "none", "effects": effects or {}} | (variability or {}),
        "run": run or {},
    }
    return _job(json.dumps(values))


def times(job, n=N, seed=1):
    """Step times [replicate]."""
    return draw_steps(job, n, seed).step_time.to_numpy().astype(float)


def by_cluster(job, n=1000, seed=1):
    """Mean step of each draw of GPUs [cluster]."""
    return times(job, n * LANES, seed).reshape(n, LANES).mean(axis=1)


def runs(job, steps, n=2000, **options):
    """Lengths of runs [run]."""
    found = prism.estimate(job, replicates=6400, run_replicates=n, steps=steps, seed=1, **options)
    return found.time_to_train.to_numpy()


def check(x, mean, std):
    """Compare with a mean and a deviation, within five standard errors of each."""
    kurtosis = ((x - x.mean()) ** 4).mean() / x.var() ** 2
    assert x.mean() == pytest.approx(mean, abs=5 * x.std() / x.size**0.5)
    assert x.std() == pytest.approx(std, rel=5 * ((kurtosis - 1) / (4 * x.size)) ** 0.5)


# -------------------------------------------------------------------------- what is drawn how often
S2 = math.log1p(0.01)  # of a lognormal of CV 0.1


def microbatch_std(forward, backward, loading=1.5):
    """Spread of x and of x ** loading over its mean, x lognormal of CV 0.1."""
    parts = ((forward, 1.0), (backward, loading))
    return sum(a * b * math.expm1(p * q * S2) for a, p in parts for b, q in parts) ** 0.5


@pytest.mark.parametrize(
    ("effects", "layout", "mean", "std"),
    [
        # all ops of a step together: as spread as one op, relative to the whole step
        ({"step": {"cv": 0.1}}, {"pp": 4, "microbatches": 8}, 33.0, 3.3),
        ({"residual": {"cv": 0.1}}, {"microbatches": 4}, 12.0, 0.1 * (4 * 5) ** 0.5),
        ({"call": {"cv": 0.1}}, {"microbatches": 4}, 12.0, 0.1 * (4 * 5) ** 0.5),
        # a microbatch is as long in all stages, and varies more backward
        ({"microbatch": {"cv": 0.1}}, {"microbatches": 4}, 12.0, 2 * microbatch_std(1, 2)),
        ({"microbatch": {"cv": 0.1}}, {"pp": 2, "microbatches": 1}, 6.0, microbatch_std(2, 4)),
        (
            {"microbatch": {"cv": 0.1, "backward_loading": 0.5}}, {"pp": 2, "microbatches": 1},
            6.0, microbatch_std(2, 4, 0.5),
        ),
        # a time on top, exponential-like where only its mean is said
        ({"jitter": {"mean_s": 0.5}}, {"pp": 2, "microbatches": 1}, 6.5, 0.5),
        ({"jitter": {"mean_s": 0.5, "cv": 0.2}}, {"microbatches": 4}, 12.5, 0.1),
        # apart from what all ranks share
        ({"jitter": {"mean_s": 0.5}, "step": {"cv": 0.1}}, {}, 3.5, (0.09 + 0.25) ** 0.5),
        (
            {"residual": {"cv": 0.1}, "step": {"cv": 0.1}}, {},
            3.0, (0.09 + 0.05 * 1.01) ** 0.5,
        ),
    ],
)  # fmt: skip
def test_a_step_spreads_by_its_effects(effects, layout, mean, std):
    job = made(effects, **layout)
    check(times(job), mean, std)
    extra = effects.get("jitter", {}).get("mean_s", 0.0)
    assert float(prism.simulate(job, replicates=64, seed=1).ideal_step_time) == mean - extra


@pytest.mark.parametrize(
    "distribution",
    [stats.lognorm(s=math.log1p(0.25) ** 0.5, scale=1.25**-0.5), stats.gamma(4.0, scale=0.25)],
)
def test_a_family_is_that_of_statistics(distribution):
    """Also far out, of which a fit of two moments says nothing."""
    name = "lognormal" if distribution.dist.name == "lognorm" else "gamma"
    x = times(made({"residual": {"law": name, "cv": 0.5}}, seconds=(1.0, 0.0)), 64_000)
    for q in (1e-3, 0.05, 0.5, 0.95, 0.999):
        share = (x <= distribution.ppf(q)).mean()
        assert share == pytest.approx(q, abs=5 * (q * (1 - q) / x.size) ** 0.5)


def test_a_normal_residual_has_no_skew():
    x = times(made({"residual": {"law": "normal", "cv": 0.15}}, seconds=(1.0, 0.0)), 64_000)
    assert stats.skew(x) == pytest.approx(0.0, abs=5 * (6 / x.size) ** 0.5)
    assert x.std() == pytest.approx(0.15, rel=0.015)


@pytest.mark.parametrize("n", [64, 4096])
@pytest.mark.parametrize(
    ("distribution", "quantile"),
    [
        ("normal", lambda q: 1.0 + 0.1 * stats.norm.ppf(q)),
        ("lognormal", stats.lognorm(s=S2**0.5, scale=math.exp(-S2 / 2)).ppf),
        ("gamma", stats.gamma(100.0, scale=0.01).ppf),
    ],
)
def test_a_step_waits_for_the_slowest_of_many_ranks(distribution, quantile, n):
    """Of n replicas: the mean of their maximum, a quantile near 1 - 1 / n."""
    q = (np.arange(20_000) + 0.5) / 20_000
    slowest = quantile(q ** (1.0 / n))
    cluster = {"nodes": n // 8, "gpus_per_node": 8}
    residual = {"residual": {"law": distribution, "cv": 0.1}}
    job = made(residual, dp=n, seconds=(1.0, 0.0), cluster=cluster)
    found = draw_steps(job, 1280, 1, engine="exact")
    x = found.step_time.to_numpy().astype(float)
    assert x.mean() == pytest.approx(slowest.mean(), abs=5 * x.std() / x.size**0.5)
    assert x.std() == pytest.approx(slowest.std(), rel=0.15)
    # some replicas stand for all
    assert times(job, 1280).mean() == pytest.approx(slowest.mean(), rel=0.01)


def test_families_that_reach_below_zero_are_refused():
    for effects in (
        {"residual": {"law": "normal", "cv": 0.5}}, {"rank": {"cv": 1.0}},
        {"residual": {"law": "normal"}}, {"residual": {"cv": -0.1}},
    ):  # fmt: skip
        with pytest.raises(prism.PrismError, match="residual|rank"):
            times(made(effects), 64)
    for changed in ({"seconds": (1e38, 1.0)}, {"cluster": {"node_slowdowns": {0: 1e300}}}):
        with pytest.raises(prism.PrismError):
            times(made(**changed), 64)


# ---------------------------------------------------------------------------------------- the GPUs
def body(z, shape=-0.15):
    """Slowdowns of GPUs by standard normal numbers, up to location and scale: a bounded tail."""
    start = stats.norm.ppf(0.9)
    scale = 0.1 / stats.norm.pdf(start)
    out = np.minimum(1.0, stats.norm.sf(z) / 0.1) ** -shape
    return np.where(z <= start, z, start + scale / shape * (out - 1.0))


def test_gpus_keep_their_speed_and_the_spread_lies_between_draws_of_them():
    job = made({"rank": {"cv": 0.05}}, microbatches=4)
    x = times(job, 64_000).reshape(-1, LANES)
    assert np.ptp(x, axis=1).max() < 1e-5
    check(x[:, 0], 12.0, 0.6)
    # a bounded tail: no GPU is more than 5.1 deviations of the bulk slower
    assert 12.6 + 0.6 < x.max() < 12.0 + 5.1 * 0.6
    top = (x[:, 0] > 12.0 + 0.6 * stats.norm.ppf(0.9)).mean()
    assert top == pytest.approx(0.1, abs=0.04)
    told = prism.summary(prism.simulate(job, replicates=64_000, seed=1))["step_time"]
    assert told["between_cluster_std"] == pytest.approx(0.6, rel=0.1)
    assert told["within_cluster_std"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("layout", [{"tp": 16}, {"dp": 16}])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_gpus_of_a_node_are_alike_by_their_share(layout, share):
    """All wait for the slowest of 2 x 8 GPUs, which the node's part makes alike."""
    rng = np.random.default_rng(1)
    node, own = rng.standard_normal((40_000, 2, 1)), rng.standard_normal((40_000, 2, 8))
    z = body(own)
    x = body(share**0.5 * node + (1.0 - share) ** 0.5 * own)
    slowest = 3.0 * (1.0 + 0.05 * (x - z.mean()) / z.std()).max(axis=(1, 2))
    job = made({"rank": {"cv": 0.05, "node_share": share}},
               cluster={"nodes": 2, "gpus_per_node": 8}, **layout)  # fmt: skip
    check(by_cluster(job), slowest.mean(), slowest.std())


def test_lemons_are_a_share_of_gpus_and_the_worst_are_taken_out():
    """Of mean 1 in all: a fifth is 1.1 to 1.2 times slower than the others."""
    lemons = {"cv": 1e-4, "lemon_fraction": 0.2, "lemon_slowdown": [1.1, 1.2]}
    x = by_cluster(made({"rank": lemons})) / 3.0
    slow = x > 1.05
    assert slow.mean() == pytest.approx(0.2, abs=5 * (0.16 / x.size) ** 0.5)
    assert x[~slow].mean() == pytest.approx(1 / 1.03, rel=1e-3)
    assert np.quantile(x[slow], 0.03) == pytest.approx(1.1 / 1.03, rel=4e-3)
    assert x[slow].max() == pytest.approx(1.2 / 1.03, rel=2e-3)
    beyond = lemons | {"lemon_slowdown": [1.1, 1.4]}
    with pytest.raises(prism.PrismError, match="1.4"):
        by_cluster(made({"rank": beyond}), 1)
    allowed = by_cluster(made({"rank": beyond}, cluster={"max_slowdown": 1.4}))
    assert allowed.max() == pytest.approx(3.0 * 1.4 / 1.05, rel=5e-3)


# -------------------------------------------------------------------------------- what is rare
STALL = {"rate_per_hour": 24.0, "duration_s": 1.0}


@pytest.mark.parametrize(("entity", "count"), [("rank", 4), ("node", 2), ("job", 1)])
def test_stalls_come_by_what_stalls_and_are_part_of_the_mean_step(entity, count):
    """Four ranks on two nodes, at work for all of a step of 3 s."""
    job = made({"stall": STALL | {"entity": entity}}, tp=4,
               cluster={"nodes": 2, "gpus_per_node": 2})  # fmt: skip
    x = times(job, 64_000)
    p = -math.expm1(-count * 3.0 * 24.0 / 3600.0)
    hit = x > 3.5
    assert hit.mean() == pytest.approx(p, abs=5 * (p / x.size) ** 0.5)
    assert x[hit].mean() - x[~hit].mean() == pytest.approx(1.0, abs=0.01)
    # each rank's own mean stays 3 s: only the stalls of others delay it
    own = -math.expm1(-3.0 * 24.0 / 3600.0) if entity == "job" else p / count
    assert x[~hit].mean() == pytest.approx(3.0 - own, abs=2e-4)


def test_stalls_have_lengths_of_a_mean_and_a_spread_and_leave_time_to_work():
    long = STALL | {"entity": "job", "rate_per_hour": 240.0, "duration_cv": 1.0}
    x = times(made({"stall": long}), 64_000)
    length = x[x > x.min() + 1e-4] - x.min()
    check(length, 1.0, 1.0)
    with pytest.raises(prism.PrismError, match="stall"):
        times(made({"stall": {"rate_per_hour": 3600.0, "duration_s": 10.0}}), 64)
    often = {"rate_per_hour": 1e9, "duration_s": 1e-3}
    assert np.isfinite(times(made({"stall": often}), 64)).all()


# ------------------------------------------------------------------------------------ dependence
@pytest.mark.parametrize(
    ("effects", "full", "none"),
    [
        ({"rank": {"cv": 0.05}}, 48 * 0.05, 0.05 * 80**0.5),
        ({"step": {"cv": 0.05}}, 48 * 0.05, 0.05 * 80**0.5),
        ({"residual": {"cv": 0.05}}, 0.05 * 80**0.5, 0.05 * 80**0.5),
        ({"rank": {"cv": 0.05}, "step": {"cv": 0.05}}, 48 * 0.0708, 0.0708 * 80**0.5),
    ],
)
def test_without_dependence_each_op_redraws_all_of_its_spread(effects, full, none):
    """Sixteen forwards of 1 s and backwards of 2 s, together or one by one."""
    whole = times(made(effects, microbatches=16), 64_000)
    assert whole.std() == pytest.approx(full, rel=0.12)
    apart = times(made(effects, microbatches=16, variability={"dependence": "none"}))
    assert apart.mean() == pytest.approx(48.0, abs=0.15)
    # 16 pooled clusters stand for the GPUs
    assert apart.std() == pytest.approx(none, rel=0.2 if "rank" in effects else 0.04)


# ------------------------------------------------------------------------------ keys of the draws
EACH = {
    "rank": {"cv": 0.02}, "step": {"cv": 0.02}, "microbatch": {"cv": 0.02}, "call": {"cv": 0.02},
    "residual": {"cv": 0.02}, "jitter": {"mean_s": 0.1, "cv": 1.0},
    "stall": {"entity": "node", "rate_per_hour": 100.0, "duration_s": 0.5},
}  # fmt: skip
HARDLY = {name: {"cv": 1e-7} for name in ("rank", "step", "microbatch", "call", "residual")}
HARDLY |= {
    "jitter": {"mean_s": 1e-7, "cv": 1.0}, "stall": {"rate_per_hour": 100.0, "duration_s": 1e-8},
}  # fmt: skip


@pytest.mark.parametrize("name", EACH)
def test_an_effect_that_is_off_changes_no_draw_of_another(name):
    layout = {"dp": 2, "tp": 2, "pp": 2, "microbatches": 2}
    alone = times(made({name: EACH[name]}, **layout), 1280)
    assert alone.std() > 1e-3
    others = {other: block for other, block in HARDLY.items() if other != name}
    np.testing.assert_allclose(times(made({name: EACH[name], **others}, **layout), 1280), alone,
                               rtol=1e-5)  # fmt: skip


def test_draws_are_keyed_by_seed_and_replicate():
    job = made(EACH, dp=2, pp=2, microbatches=2)
    x = times(job, 640)
    assert np.array_equal(x[:192], times(job, 192))
    one_thread = prism.simulate(job, replicates=640, seed=1, threads=1).step_time
    assert np.array_equal(x, one_thread)
    other = times(job, 640, seed=2)
    assert not np.isclose(x, other, rtol=1e-6).any()
    assert abs(np.corrcoef(x, other)[0, 1]) < 0.3


# ---------------------------------------------------------------------------------------- the run
def test_a_drift_adds_up_over_its_correlation_time():
    """Sum of n values of an AR(1) series, by adding up all pairs."""
    n, tau = 400, 60.0
    lag = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    for correlation, pairs in ((0.0, n), (tau, np.exp(-lag * 3.0 / tau).sum())):
        effect = {"cv": 0.1, "correlation_time_s": correlation}
        x = runs(made({"step": effect}), n)
        assert x.std() == pytest.approx(0.3 * pairs**0.5, rel=0.08)
        assert x.mean() == pytest.approx(3.0 * n, abs=5 * x.std() / x.size**0.5 + 0.1)


def test_a_daily_wave_is_slow_at_its_peak():
    effect = {"step": {"diurnal_cv": 0.1, "diurnal_peak_h": 9}}
    for hour, sign in (("09", 1), ("21", -1), ("03", 0)):
        start = f"2026-01-31T{hour}:00"
        x = runs(made(effect), 20, 64, start=start).mean()
        assert x == pytest.approx(60.0 * (1.0 + sign * 0.1 * 2**0.5), rel=2e-3)


@pytest.mark.parametrize(("key", "block"), [("run", {}), ("model_error", {})])
def test_what_a_whole_run_shares_spreads_it_and_keeps_its_middle(key, block):
    if key == "run":
        job = made({"run": {"cv": 0.05}})
    else:
        job = made(variability={"model_error": 0.05})
    x = np.log(runs(job, 1000) / 3000.0)
    assert np.median(x) == pytest.approx(0.0, abs=5 * 1.25 * 0.05 / x.size**0.5)
    assert x.std() == pytest.approx(0.05, rel=0.09)
    assert times(job, 64).std() == 0.0
    if key == "model_error":
        told = prism.summary(prism.estimate(job, replicates=64, steps=10, seed=1))["model_error"]
        assert told["spread"] == 0.05


@pytest.mark.parametrize("entity", ["rank", "job"])
def test_a_run_has_the_mean_of_its_steps_where_they_stall(entity):
    stall = {"entity": entity, "rate_per_hour": 12.0, "duration_s": 30.0, "duration_cv": 1.0}
    found = prism.estimate(
        made({"stall": stall}, dp=2), replicates=64_000, run_replicates=1000, steps=2000, seed=1
    )
    x, step = found.time_to_train.to_numpy() / 2000, found.step_time.to_numpy()
    error = math.hypot(x.std() / x.size**0.5, step.std() / step.size**0.5)
    assert x.mean() == pytest.approx(step.mean(), abs=5 * error)
    terms = prism.summary(found)["variance_by_term"]
    assert terms["stalls"] > 0.9 and sum(terms.values()) == pytest.approx(1.0)


# ------------------------------------------------------------------------------------ congestion
MODEL = {
    "n_layers": 4, "hidden_size": 512, "ffn_size": 2048, "n_heads": 8, "vocab_size": 1024,
    "seq_len": 512,
}  # fmt: skip


@functools.cache
def congested(probability=0.3, factor=4.0, leaf_nodes=1, duration=None, dp=2, scale=1.0):
    """A replica a node; all that takes the network is the gradients' reduction at the end."""
    regime = {"probability": probability, "factor": factor}
    if duration:
        regime["duration_s"] = duration
    return prism.load_job({
        "model": MODEL,
        "parallelism": {"dp": dp, "overlap": False},
        "cluster": {"nodes": dp, "gpus_per_node": 1, "leaf_nodes": leaf_nodes,
                    "scale": {"network": {"cv": scale}}},
        "variability": {"library": "none", "host_scale": 1e-9, "effects": {"regime": regime}},
    })  # fmt: skip


@pytest.mark.parametrize(("leaf_nodes", "dp"), [(1, 2), (1, 4), (2, 4), (4, 4)])
def test_a_message_is_hit_if_any_leaf_of_its_way_is_and_keeps_its_mean(leaf_nodes, dp):
    found = prism.simulate(congested(leaf_nodes=leaf_nodes, dp=dp), replicates=N, seed=1)
    x, ideal = found.step_time.to_numpy(), float(found.ideal_step_time)
    levels = np.unique(np.round(x / ideal, 5))
    assert levels.size == 2
    p = 1.0 - 0.7 ** (dp // leaf_nodes)
    hit = x > x.mean()
    assert hit.mean() == pytest.approx(p, abs=5 * (p * (1 - p) / N) ** 0.5)
    # both levels about the ideal: (1 - p) quiet + p hit
    still = p * x[hit].mean() + (1 - p) * x[~hit].mean()
    assert still == pytest.approx(ideal, rel=1e-5)
    # and one is the factor times the other: what is beyond compute, which a free network tells
    message = (x[hit].mean() - x[~hit].mean()) * (1.0 + 3.0 * p) / 3.0
    compute = prism.simulate(
        congested(leaf_nodes=leaf_nodes, dp=dp).replace("cluster.scale.network.time=1e-9"),
        replicates=64, seed=1,
    )  # fmt: skip
    assert message == pytest.approx(ideal - float(compute.ideal_step_time), rel=0.01)


def test_congestion_is_wider_on_another_network_and_cannot_be_any():
    one, two = (times(congested(scale=cv)) for cv in (1.0, 1.2))
    assert two.std() / one.std() == pytest.approx(1.2, rel=1e-3)
    assert times(congested(scale=0.0)).std() == 0.0
    with pytest.raises(prism.PrismError, match="network.cv"):
        times(congested(scale=3.0), 64)


def test_congestion_that_lasts_keeps_the_mean_of_runs_and_widens_them():
    short, long = (
        prism.estimate(congested(duration=s), replicates=6400, run_replicates=500, steps=20_000,
                       seed=1) for s in (1e-6, 5.0)
    )  # fmt: skip
    step = long.step_time.to_numpy()
    a, b = (found.time_to_train.to_numpy() / 20_000 for found in (short, long))
    error = math.hypot(b.std() / b.size**0.5, step.std() / step.size**0.5)
    assert a.mean() == pytest.approx(b.mean(), abs=5 * error)
    assert b.std() > 2.0 * a.std()
    assert prism.summary(long)["variance_by_term"]["congestion"] > 0.9


def test_congestion_too_quick_to_follow_spreads_runs_as_much_as_what_is_followed():
    """A variance per step of 50,000 followed steps, and of more than are followed."""
    job = congested(duration=0.1).replace("run.failures=none")
    short, long = (
        prism.estimate(job, replicates=6400, run_replicates=1000, steps=n, seed=1)
        for n in (50_000, 400_000)
    )
    assert short.run_term_time.sel(term="congestion").values.std() > 0.0
    assert np.all(long.run_term_time.sel(term="congestion") == 0.0)  # that is, not followed
    followed, counted = (
        float(x.time_to_train.var()) / n for x, n in ((short, 50_000), (long, 400_000))
    )
    assert counted == pytest.approx(followed, rel=0.2)  # five errors of 4.5 % each, nearly
    step = long.step_time.to_numpy()
    assert followed > 10.0 * step.var()  # steps that know nothing of each other
    error = step.std() / step.size**0.5
    assert long.time_to_train.mean() / 400_000 == pytest.approx(step.mean(), abs=5.0 * error)


# ---------------------------------------------- a library, and what a job sets
def on_library(name="h100-uncurated", effects=None, cluster=None, **layout):
    """A transformer on one GPU, of which nothing but GPUs varies."""
    off = {key: {"cv": 0.0} for key in ("step", "call", "residual", "microbatch", "run")}
    off |= {"stall": {"rate_per_hour": 0.0}, "regime": {"probability": 0.0}}
    return prism.load_job({
        "model": MODEL, "parallelism": layout,
        "cluster": {"nodes": 1, "gpus_per_node": 1} | (cluster or {}),
        "variability": {"library": name, "host_scale": 1e-9, "effects": off | (effects or {})},
    })  # fmt: skip


def relative(job, n=2000):
    """How slow each draw of GPUs is over the ideal, but for what follows no GPU [cluster]."""
    found = prism.simulate(job, replicates=n * LANES, seed=1)
    shares = {x["name"]: x["mean_share"] for x in prism.summary(found)["time_loss"]}
    x = found.step_time.to_numpy()[::LANES] / float(found.ideal_step_time)
    return 1.0 + (x - 1.0) / (1.0 - shares["optimizer"] - shares["launch_gaps"])


def test_what_a_job_leaves_out_of_an_effect_is_its_library_s():
    distribution = prism.load_library("h100-uncurated").distribution("rank")
    follow = {"memory_loading": 1.0}
    for given, expected in (
        ({}, distribution), ({"cv": 0.03}, distribution.with_params(body_cv=0.03)),
        ({"lemon_fraction": 0.2}, distribution.with_params(lemon_fraction=0.2)),
    ):  # fmt: skip
        x = relative(on_library(effects={"rank": follow | given}))
        assert stats.kstest(x, expected.cdf).statistic < 1.95 / x.size**0.5
        n = x.size * (1.0 - float(expected.cdf(1.1)))
        assert (x > 1.1).sum() == pytest.approx(n, abs=5 * n**0.5)
    assert relative(on_library(effects={"rank": follow | {"lemon_fraction": 0}})).max() < 1.09
    culled = relative(on_library(effects={"rank": follow}, cluster={"max_slowdown": 1.08}))
    assert 1.06 < culled.max() == pytest.approx(1.08, rel=3e-3)
    off = relative(on_library(effects={"rank": {"cv": 0.0, "lemon_fraction": 0.0}}), 8)
    assert off == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("loading", [0.5, 1.0, 8.0])
def test_memory_bound_kernels_keep_their_mean(loading):
    """E[X ** 8] of a CV of 10 % is 1.32, of which each multiplier has to be free."""
    job = prism.load_job({
        "model": {"name": "llama3.2-1b"}, "cluster": {"nodes": 1, "gpus_per_node": 1},
        "parallelism": {"microbatches": 1}, "variability": {
            "library": "none", "effects": {"rank": {"cv": 0.1, "memory_loading": loading}}},
    })  # fmt: skip
    x = by_cluster(job, 4000)
    ideal = float(prism.simulate(job, replicates=64, seed=1).ideal_step_time)
    assert x.mean() == pytest.approx(ideal, abs=4 * x.std() / x.size**0.5)
    assert x.std() / x.size**0.5 < 0.006 * ideal


def test_memory_bound_kernels_follow_gpus_by_their_loading():
    none, half, whole = (
        relative(
            on_library("h100-healthy", {"rank": {"cv": 0.02, "memory_loading": loading}})
        ).std()
        for loading in (0.0, 0.5, 1.0)
    )
    assert whole == pytest.approx(0.02, rel=0.08)
    assert none < 0.9 * whole
    assert half == pytest.approx((none + whole) / 2, rel=1e-3)


@pytest.mark.parametrize("key", ["step", "call", "residual"])
def test_a_spread_is_the_library_s_unless_the_job_sets_or_scales_it(key):
    def spread(block):
        effects = {"rank": {"cv": 0.0, "lemon_fraction": 0.0}, "step": {"cv": 0.0}}
        if block is None:
            block = {}
        job = on_library("h100-healthy", effects | {key: block})
        return times(job, 6400).std() / times(job, 6400).mean()

    library = prism.load_library("h100-healthy")
    own = spread(None)
    assert own > 1e-4
    if key == "step":
        assert own == pytest.approx(library.distribution("step").cv, rel=0.06)
        assert spread({"cv": 0.03}) == pytest.approx(0.03, rel=0.06)
    elif key == "call":
        assert spread({"cv": 3 * library.distribution("call").cv}) == pytest.approx(
            3 * own, rel=0.06
        )
    else:
        assert spread({"scale": 2.0}) == pytest.approx(2 * own, rel=0.06)


def model_error(model="llama3-8b", device="h100", library=None, nodes=1, **layout):
    """What a command tells of the model's error."""
    job = prism.load_job({
        "model": {"name": model, "n_layers": 8}, "parallelism": {"dp": 8 * nodes} | layout,
        "cluster": {"nodes": nodes, "device": device},
        "variability": {} if library is None else {"library": library},
    })  # fmt: skip
    found = prism.estimate(job, replicates=64, run_replicates=8, steps=10, seed=1)
    told = prism.summary(found)
    told["model_error"]["warned"] = any(x.startswith("model error:") for x in told["warnings"])
    return told["model_error"]


FSDP = {"data_parallel": "fsdp"}


@pytest.mark.parametrize(
    ("device", "layout", "model", "kind"),
    [
        ("h100", {}, "llama3-8b", "megatron"), ("a100", {}, "llama3-8b", "megatron"),
        ("h100", FSDP, "llama3-8b", "compiled"),
        ("h100", FSDP | {"framework": "eager"}, "llama3-8b", "eager"),
        # nobody published such a job
        ("mi300x", {}, "llama3-8b", None), ("a100", FSDP, "llama3-8b", None),
        ("h100", {"framework": "eager"}, "llama3-8b", None),
        ("h100", FSDP | {"framework": "megatron"}, "llama3-8b", None),
        ("a100", {"ep": 8}, "qwen3-30b-a3b", None),
    ],
)  # fmt: skip
def test_only_classes_with_published_jobs_have_an_error_of_their_own(device, layout, model, kind):
    library = prism.load_library(f"{device}-healthy")
    told = model_error(model, device, **layout)
    wide = library.value("run/model_error_unmeasured")
    assert 0.1 < wide < 0.4
    assert told["spread"] == (wide if kind is None else library.value(f"run/model_error_{kind}"))
    assert told["measured"] is (kind is not None) and told["warned"] is (kind is None)


def test_the_model_s_error_grows_with_gpus_beyond_the_largest_job_and_stays_on_its_device(tmp_path):
    shipped = Path(__file__).parents[1] / "distributions" / "h100-healthy.nc"
    whole = xr.load_dataset(shipped, engine="h5netcdf")
    row = whole.entry.values.tolist().index("run/model_error_growth")
    whole["mean"][row] = 0.05
    own = tmp_path / "own.nc"
    whole.to_netcdf(own, engine="h5netcdf")
    error, largest = (
        prism.load_library(own).value(f"run/{x}_compiled") for x in ("model_error", "largest_gpus")
    )
    for times_larger in (0.5, 4):
        nodes = int(times_larger * largest) // 8
        found = model_error(nodes=nodes, library=str(own), **FSDP)["spread"]
        more = 0.05 * math.log(max(1.0, times_larger))
        assert found == pytest.approx(math.hypot(error, more))
    other = model_error(device="h200", library="h100-healthy", **FSDP)
    wide = prism.load_library("h100-healthy").value("run/model_error_unmeasured")
    assert other["spread"] == wide


def test_a_result_holds_what_gives_it_again():
    found = prism.simulate(made(EACH, pp=2, microbatches=2), replicates=128, seed=5)
    job = json.loads(found.attrs["job"])
    job.pop("source", None), job.pop("name", None)
    again = prism.simulate(prism.load_job(job), replicates=128, seed=int(found.attrs["seed"]))
    assert np.array_equal(found.step_time, again.step_time)
