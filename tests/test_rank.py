"""Ranking: keys that redraw one input, known shares, interventions, both resolutions."""

import dataclasses
import math

import naive
import numpy as np
import pytest
from campaign import some
from rank_jobs import chain, sampled, small

import prism
from prism import PrismError, engine, load_job, rank
from prism.analyses.rankings import shares as ranking
from prism.analyses.rankings.freezing import freeze_effect, median_table, treat_ops
from prism.analyses.rankings.shares import Sampler, sample_shares
from prism.distributions.distribution import gamma, lognormal, quantile_table
from prism.distributions.tables import sample_table
from prism.simulation.causes import (
    Input,
    measure_residuals,
    partition,
    step_spread,
    swap_keys,
)
from prism.simulation.classops import split_classes
from prism.simulation.draws import seed_key
from prism.simulation.prepare import prepare, prepare_variability
from prism.simulation.program import make_keys
from prism.simulation.runs.parts import OF_STEPS
from prism.simulation.steps import run_blocks
from prism.simulation.variability import Treatment


def test_keys_of_an_input_against_python():
    """Residuals of two keys, written from the definition."""
    job, seeds, owns = chain(residual={"law": "gamma", "cv": 0.2}), (3, 4), np.array([False, True])
    program = prepare(job, 3).program
    times = run_blocks(program, range(2), swap_keys(Input("x", "kernels", owns=owns), *seeds))[0]
    table = naive.quantile_table(prepare_variability(job).residual("residual/compute"))
    coefs = program.ops.coef[program.ops.kind == engine.DRAW]  # forward, backward by turns
    for replicate in (0, 63, 64):
        expected = 0.0
        for i, coef in enumerate(coefs):
            key = tuple(map(int, seed_key(seeds[int(owns[coef])])))
            word = naive.philox4x32((i >> 2, 0, replicate, engine.RESIDUAL), key)[i & 3]
            eps = sample_table(table, np.array([word], np.uint32))[0]
            expected += (1.0, 2.0)[coef] * (1.0 + float(eps))
        assert times.ravel()[replicate] == pytest.approx(expected, rel=3e-6)


def test_swapping_everything_is_the_other_run():
    job = small(rank={"cv": 0.02}, step={"cv": 0.01}, microbatch={"cv": 0.02},
                call={"cv": 0.01}, residual={"cv": 0.02})  # fmt: skip
    program = prepare(job, 1).program
    everything = Input("all", "effects", tuple(range(9)))
    other = run_blocks(program, range(2), 7)[0]
    assert np.array_equal(run_blocks(program, range(2), swap_keys(everything, 1, 7))[0], other)
    n = program.shares.shape[0]
    streams = tuple(set(range(9)) - {engine.RESIDUAL, engine.GLOBAL})
    whole = Input("residuals", "kernels", streams, np.ones(n, bool))
    assert np.array_equal(run_blocks(program, range(2), swap_keys(whole, 1, 7))[0], other)
    nothing = Input("none", "kernels", owns=np.zeros(n, bool))
    base = run_blocks(program, range(2), 1)[0]
    assert np.array_equal(run_blocks(program, range(2), swap_keys(nothing, 1, 7))[0], base)
    assert np.array_equal(run_blocks(program, range(2), make_keys(1))[0], base)


def test_ops_split_by_class_take_as_long():
    """The same mean, spread and tail, and the same times where residuals are off."""
    shared = {"rank": {"cv": 0.01}, "step": {"cv": 0.01}, "microbatch": {"cv": 0.02}}
    calm = prepare(small(**shared), 1)
    split = split_classes(calm).program
    assert np.array_equal(*(run_blocks(p, range(2), 1)[0] for p in (calm.program, split)))
    stall = {"rate_per_hour": 1e5, "duration_s": 0.002, "entity": "rank"}
    noisy = prepare(small(**shared, call={"cv": 0.05}, residual={"cv": 0.1}, stall=stall), 1)
    ops = split_classes(noisy)
    assert ops.program.n_draws > 3 * noisy.program.n_draws
    whole, parts = (run_blocks(p, range(400), 1, 2)[0] for p in (noisy.program, ops.program))
    error = (whole - parts).mean(axis=1).std() / 20.0  # of the mean over clusters, each in both
    assert abs(whole.mean() - parts.mean()) < 4.0 * error
    assert parts.std() == pytest.approx(whole.std(), rel=0.03)
    assert np.quantile(parts, 0.99) == pytest.approx(np.quantile(whole, 0.99), rel=0.002)


def test_additive_chain_has_known_shares():
    """Sum of eight ops times the step effect: variances add, but for their small product."""
    found, _ = sampled(chain(step={"cv": 0.01}, residual={"law": "normal", "cv": 0.03}))
    step, own = (12 * 0.01) ** 2, 4 * (1 + 4) * 0.03**2
    for name, part in (("step", step), ("compute", own)):
        share = part / (step + own)
        for estimate in (found[name].first, found[name].total):
            assert abs(estimate.value - share) < 2 * estimate.half_width
            assert estimate.half_width <= 0.06


def test_latest_of_two_has_its_analytic_shares():
    """max(A1 + B1, A2 + B2) of normal A (microbatch) and B (residual).

    The maximum is half of the sum and half of the absolute difference; for normal x, y of unit
    variance and correlation r, Cov(|x|, |y|) = 2/pi (r asin r + sqrt(1 - r^2) - 1).
    """
    job = load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 1e-9}},
        "parallelism": {"microbatches": 1, "dp": 2},
        "variability": {"library": None, "effects": {
            "microbatch": {"cv": 0.01}, "residual": {"law": "normal", "cv": 0.02}}},
    })  # fmt: skip
    found, _ = sampled(job)

    def shared(r):
        return r / 2 + (r * math.asin(r) + math.sqrt(1 - r * r) - 1) / math.pi

    whole, r = 1 - 1 / math.pi, 0.2  # 0.01^2 / (0.01^2 + 0.02^2)
    exact = {"microbatch": r, "compute": 1 - r}
    for name, kept in exact.items():
        first, total = shared(kept) / whole, 1 - shared(1 - kept) / whole
        assert total > first
        assert abs(found[name].first.value - first) < 2 * found[name].first.half_width
        assert abs(found[name].total.value - total) < 2 * found[name].total.half_width


def test_agreement_with_salib_on_independent_samples():
    """A chain's shares by SALib from its own draws of the same laws."""
    sample = pytest.importorskip("SALib.sample.sobol", reason="oracle, in the dev extra")
    from SALib.analyze import sobol

    job = chain(m=1, step={"cv": 0.02}, microbatch={"cv": 0.03, "backward_loading": 1.0},
                residual={"law": "normal", "cv": 0.02})  # fmt: skip
    v = prepare_variability(job)
    names = ["step", "microbatch", "forward", "backward"]
    groups = ["step", "microbatch", "compute", "compute"]
    problem = {"num_vars": 4, "names": names, "groups": groups, "bounds": [[1e-9, 1 - 1e-9]] * 4}
    u = sample.sample(problem, 2048, calc_second_order=False, seed=1).T
    own = v.residual("residual/compute")
    y = v.step.ppf(u[0]) * v.microbatch.ppf(u[1]) * (own.ppf(u[2]) + 2 * own.ppf(u[3]))
    oracle = sobol.analyze(problem, y, calc_second_order=False, seed=1)
    found, _ = sampled(job)
    for i, name in enumerate(("step", "microbatch", "compute")):
        for mine, theirs in ((found[name].first, "S1"), (found[name].total, "ST")):
            assert abs(mine.value - oracle[theirs][i]) < 0.06


def test_shares_are_those_of_brute_force():
    """Total order by redrawing all but one input many times over: E[Var(T | the others)]."""
    job = small(step={"cv": 0.01}, microbatch={"cv": 0.03}, residual={"cv": 0.03})
    found, sampler = sampled(job)
    variance = run_blocks(sampler.program, range(200), 1)[0].var()
    for entry in (found["microbatch"], found["gemm_mlp"]):
        runs = [run_blocks(sampler.program, range(20), swap_keys(entry.entry, 1, 50 + k))[0]
                for k in range(12)]  # fmt: skip
        brute = np.var(np.stack(runs), axis=0, ddof=1).mean() / variance
        assert brute == pytest.approx(entry.total.value, abs=2 * entry.total.half_width)


def test_resolutions_agree():
    effects = {"rank": {"cv": 0.01}, "step": {"cv": 0.005}, "microbatch": {"cv": 0.01},
               "call": {"cv": 0.01}, "residual": {"cv": 0.08}}  # fmt: skip
    op, kernel = (sampled(small(r, **effects))[0] for r in ("op", "kernel"))
    assert op.keys() == kernel.keys()
    for name in op:
        a, b = op[name].total, kernel[name].total
        assert abs(a.value - b.value) < 0.01 + 1.5 * math.hypot(a.half_width, b.half_width), name


def test_resolutions_agree_on_skewed_residuals():
    """Of a library, whose rare slow kernels decide what 32 ranks wait for."""
    off = {name: {"cv": 0.0} for name in ("step", "microbatch", "call")}
    off |= {"rank": {"cv": 0.0, "lemon_fraction": 0.0}, "regime": {"probability": 0.0}}
    data = small(pp=1, data_parallel="fsdp").model_dump(
        exclude={"source", "name"}, exclude_none=True
    )
    data["parallelism"] |= {"tp": 1, "dp": 32, "reshard_after_forward": True}
    data["cluster"] = {"nodes": 4, "gpus_per_node": 8, "scale": {"network": {"cv": 0.3}}}
    shares = {}
    for resolution in ("op", "kernel"):
        v = {"library": "h100-stressed", "resolution": resolution, "effects": off}
        shares[resolution] = sampled(load_job(data | {"variability": v}))[0]
    for name, kernel in shares["kernel"].items():
        op = shares["op"][name]
        for a, b in ((op.first, kernel.first), (op.total, kernel.total)):
            assert abs(a.value - b.value) < 0.01 + 1.5 * math.hypot(a.half_width, b.half_width), (
                name
            )
    assert shares["kernel"]["attention"].total.value > 0.2


def test_frozen_class_agrees_between_resolutions(monkeypatch):
    monkeypatch.setattr("prism.analyses.rankings.interventions.KERNEL_CONTROL", 64)
    monkeypatch.setattr(ranking, "MAX_BLOCKS", 4)  # the shares are not looked at
    effects = {"rank": {"cv": 0.02}, "step": {"cv": 0.01}, "microbatch": {"cv": 0.03},
               "residual": {"cv": 0.05}}  # fmt: skip
    op, kernel = (
        {r["name"]: r for r in prism.summary(rank(small(x, **effects), seed=2))["kernels"]}
        for x in ("op", "kernel")
    )
    for name in ("gemm_mlp", "gemm_attention", "attention", "tp_all_gather"):
        for figure in ("std_reduction", "p95_reduction"):
            assert op[name][figure] == pytest.approx(kernel[name][figure], abs=0.04), name


@pytest.mark.parametrize("name", ["step", "microbatch"])
def test_frozen_effect_is_the_job_without_it_at_its_median(name):
    effects = {"rank": {"cv": 0.02}, "step": {"cv": 0.1}, "residual": {"cv": 0.02},
               "microbatch": {"cv": 0.1, "backward_loading": 1.0}}  # fmt: skip
    job = chain(m=3, **effects)
    calm = chain(m=3, **(effects | {name: {"cv": 0.0}}))
    frozen = freeze_effect(prepare(job, 3).program, name)
    times = run_blocks(frozen, range(4), 3)[0]
    median = 1.0 / math.sqrt(1.01)  # of a lognormal law of mean 1
    steady = run_blocks(prepare(calm, 3).program, range(4), 3)[0]
    np.testing.assert_allclose(times, median * steady, rtol=1e-4)


def test_everything_frozen_does_not_vary():
    job = small(rank={"cv": 0.02}, step={"cv": 0.02}, microbatch={"cv": 0.03},
                call={"cv": 0.01}, residual={"cv": 0.05})  # fmt: skip
    step = prepare(job, 1)
    program = treat_ops(step.program, np.ones(step.program.shares.shape[0], bool),
                        Treatment(frozen=True))  # fmt: skip
    times = run_blocks(program, range(2), 1)[0]
    assert times.std() < 1e-5 * times.mean()


def test_faster_class_saves_what_it_takes():
    values = prism.summary(rank(chain(residual={"cv": 0.05}), speed_up=0.1, seed=1))
    row = values["kernels"][0]
    assert row["p50_if_faster"] == pytest.approx(0.9 * 12, rel=0.01)
    assert row["std_reduction_faster"] == pytest.approx(0.1, abs=1e-4)


def test_the_table_of_a_median():
    table = naive.quantile_table(prepare_variability(chain(residual={"cv": 0.3})).residual("x"))
    u = np.linspace(0, 2**32 - 1, 10_001).astype(np.uint32)
    whole, held = sample_table(table, u), sample_table(median_table(table), u)
    assert np.ptp(held) == 0.0 and held[0] == pytest.approx(np.median(whole), abs=1e-4)


def test_noisy_class_off_the_path_ranks_last():
    """Stage 1 waits for stage 0 all the time, so its kernels may vary as they like."""
    job = load_job({
        "model": {"durations": {"forward_s": [1.0, 0.05], "backward_s": [2.0, 0.1]}},
        "parallelism": {"pp": 2, "microbatches": 8, "dp": 1, "p2p": "async"},
        "variability": {"library": None, "effects": {"residual": {"law": "normal", "cv": 0.02}}},
    })  # fmt: skip
    step = prepare(job, 1)
    program = step.program
    second = np.array([t.stage == 1 for t in step.graph.op_types])
    shares = np.stack([~second, second], axis=1).astype(np.float32)
    program = dataclasses.replace(program, shares=shares, classes=("busy", "waiting"))
    seg_cv = program.low.seg_cv.copy()
    for c in np.flatnonzero(second):  # ten times the spread of the busy stage
        seg_cv[program.low.coef_seg[program.low.coef_seg_ptr[c]]] *= 10.0
    program = dataclasses.replace(program, low=program.low._replace(seg_cv=seg_cv))
    residuals = measure_residuals(dataclasses.replace(step, program=program, workload=None), 1)
    inputs = partition(program, residuals, second.astype(np.int64))
    sampler = Sampler(program, program, 1, 2)
    found = {s.entry.name: s for s in sample_shares(sampler, inputs)}
    _, _, path, _ = run_blocks(program, range(2), 1, track=True)
    assert path[:, 1].mean() < 0.05 * path[:, 0].mean()
    assert found["waiting"].total.value < 0.05 < 0.9 < found["busy"].total.value


def test_the_share_of_the_step_effect_is_sure_from_few_clusters(monkeypatch):
    """As its spread is known; where it is left to chance, clusters differ by more."""
    monkeypatch.setattr(ranking, "MAX_BLOCKS", 4)
    job = chain(step={"cv": 0.01}, residual={"law": "normal", "cv": 0.01})
    own, other = (12 * 0.01) ** 2, 4 * (1 + 4) * 0.01**2

    def errors():
        found = [sampled(job, seed)[0]["step"] for seed in range(12)]
        return np.array([s.total.value - own / (own + other) for s in found])

    matched = errors()
    monkeypatch.setattr(Sampler, "_match", lambda self, steps, *effects: effects)
    assert abs(matched.mean()) < 4.0 * matched.std(ddof=1) / matched.size**0.5 + 1e-3
    assert matched.std() < 0.5 * errors().std()


def test_a_step_effect_of_rare_slow_steps_is_left_to_chance():
    program = prepare(chain(step={"cv": 0.01}), 1).program
    assert step_spread(program) == pytest.approx(0.01, rel=1e-4)
    assert step_spread(prepare(chain(), 1).program) == 0.0
    for law, spread in ((gamma(0.5), 0.5), (lognormal(1.0), 0.0)):
        tables = program.tables.copy()
        tables[program.step_table] = quantile_table(law)
        found = step_spread(dataclasses.replace(program, tables=tables))
        assert found == pytest.approx(spread, rel=1e-3)


def test_a_class_is_left_at_one_cluster_where_its_bound_and_that_cluster_are_small():
    step = prepare(small(step={"cv": 0.01}, residual={"cv": 0.03}), 1)
    ops = split_classes(step)
    inputs = partition(step.program, measure_residuals(step, 1), ops.owner)

    def run(bound):
        sampler = Sampler(ops.program, step.program, 1, 2)
        sampler.bounds = np.full(len(step.program.classes), bound)
        sampler.whole = float(run_blocks(step.program, range(4), 1)[0].astype(float).var())
        return {s.entry.name: s for s in sample_shares(sampler, inputs)}

    whole, few = run(np.inf), run(0.0)
    small_ones = [name for name, s in few.items() if len(s.ab) == 1]
    assert 0 < len(small_ones) < len(step.program.classes)  # no bound outvotes the cluster
    for name, shares in whole.items():
        assert not len(shares.ab) or len(shares.ab) >= ranking.PILOT_BLOCKS  # nor it the bound
        if name in small_ones:
            assert 0.0 <= shares.total.value < few[name].total.high == ranking.NEGLIGIBLE
            assert few[name].variances[1] == pytest.approx(shares.variances[1], rel=0.5)
        else:
            assert few[name].variances[0] == pytest.approx(shares.variances[0], rel=0.1, abs=1e-12)


@pytest.mark.usefixtures("few_clusters")
def test_dataset_and_summary():
    job = small(rank={"cv": 0.02}, step={"cv": 0.01}, residual={"cv": 0.03})
    dataset = rank(job, seed=5)
    for variable in dataset.data_vars.values():
        assert {"units", "long_name"} <= set(variable.attrs)
    values = prism.summary(dataset)
    assert values["target"] == "step_time"
    for kind in ("kernels", "effects"):
        totals = [row["total_order"] for row in values[kind]]
        assert totals == sorted(totals, reverse=True)
        for row in values[kind]:
            assert row["total_order"] >= row["first_order"]
            assert {"name", "time_share", "cv", "covariance_share", "tail_share", "std_if_frozen",
                    "p95_if_frozen", "p95_reduction", "critical_path_share",
                    "total_order_ci"} <= set(row)  # fmt: skip
    for share in ("covariance_share", "tail_share", "critical_path_share", "time_share"):
        assert sum(r[share] for r in values["kernels"]) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.usefixtures("few_clusters")
def test_threads_change_nothing():
    job = chain(rank={"cv": 0.02}, step={"cv": 0.01}, residual={"cv": 0.03})
    one, two = (rank(job, seed=5, threads=n).drop_attrs() for n in (1, 2))
    assert one.identical(two)


@pytest.mark.parametrize("target", ["step_time", "time_to_train"])
@pytest.mark.parametrize("seed", some(range(10), 3))
def test_parts_make_up_the_whole(seed, target):
    """Parts are told from other draws than their total, of some clusters the same."""
    job = small(steps=100, rank={"cv": 0.03}, step={"cv": 0.01}, residual={"cv": 0.03})
    found = prism.summary(rank(job, target, seed=seed))
    parts = math.hypot(found["within_cluster_std"], found["between_cluster_std"])
    assert found["std"] == pytest.approx(parts, rel=1e-9)
    share = {row["name"]: row["first_order"] for row in found["effects"]}["rank"]
    assert share * found["std"] ** 2 == pytest.approx(found["between_cluster_std"] ** 2, rel=0.1)
    if target == "step_time":  # 3,000 clusters: mean 29.706 ms, std 0.473 ms, p95 30.50 ms
        assert found["mean"] == pytest.approx(29.706e-3, rel=0.003)
        assert found["std"] == pytest.approx(0.473e-3, rel=0.1)
        assert found["p95"] == pytest.approx(30.50e-3, rel=0.005)


@pytest.mark.usefixtures("few_clusters")
def test_a_run_remembers_its_cluster():
    """Over many steps the rank effect stays and the residuals average out."""
    job = small(steps=100_000, rank={"cv": 0.01}, residual={"cv": 0.1}, microbatch={"cv": 0.05})
    step, run = (
        {r["name"]: r for r in prism.summary(rank(job, target, seed=7))["effects"]}
        for target in ("step_time", "time_to_train")
    )
    assert step["rank"]["total_order"] < 0.9 < run["rank"]["total_order"] <= 1.0 + 1e-9
    assert run["microbatch"]["total_order"] < 0.01
    assert run["rank"]["std_if_frozen"] < 0.3 * run["microbatch"]["std_if_frozen"]


EFFECTS = {"rank": {"cv": 0.02}, "step": {"cv": 0.02, "correlation_time_s": 60},
           "microbatch": {"cv": 0.02}, "residual": {"cv": 0.05}}  # fmt: skip
RUNS = {
    "steps alone": (EFFECTS, {}),
    "one cause": ({"residual": {"cv": 0.1}}, {}),
    "failures": (EFFECTS, {
        "failures": {"per_1000_node_days": 5e4, "restart": "2min"},
        "checkpoint": {"interval_steps": 20, "write_s": 3.0},
        "evaluation": {"interval_steps": 500, "duration": "1min"}}),
    "model error and runs": (EFFECTS | {"run": {"cv": 0.01}, "jitter": {"mean_s": 0.2}}, {}),
    "stalls": (EFFECTS | {"stall": {"rate_per_hour": 5.0, "duration_s": 20.0}}, {}),
}  # fmt: skip


@pytest.mark.usefixtures("few_clusters")
@pytest.mark.parametrize("name", RUNS)
def test_a_ranking_is_of_the_runs_of_its_estimate(name):
    """Of the same job and seed: mean, spread and terms; causes make what steps do of it."""
    effects, run = RUNS[name]
    job = load_job({
        "model": {"durations": {"forward_s": [1.0, 1.1], "backward_s": [2.0, 2.1]}},
        "parallelism": {"pp": 2, "microbatches": 4, "dp": 2}, "run": {"steps": 2500} | run,
        "variability": {"library": None, "effects": effects,
                        "model_error": 0.02 if name.startswith("model") else 0.0},
    })  # fmt: skip
    whole = prism.summary(prism.estimate(job, replicates=2560, seed=3))
    for target in ("step_time", "time_to_train"):
        found = prism.summary(rank(job, target, seed=3))
        for figure in ("mean", "std", "p95", "within_cluster_std", "between_cluster_std"):
            assert found[figure] == pytest.approx(whole[target][figure], rel=1e-12)
        causes = {r["name"]: r for kind in ("kernels", "effects") for r in found[kind]}
        terms = found.get("variance_by_term", {"step_noise": 1.0})
        assert sum(terms.values()) == pytest.approx(1.0, abs=1e-9)
        of_steps = sum(part for term, part in terms.items() if term in OF_STEPS)
        first, total = (
            sum(r[f"{order}_order"] for r in causes.values()) for order in ("first", "total")
        )
        assert first < 1.06 * of_steps + 1e-9 and total > 0.94 * of_steps
        assert "compute" in causes and (name == "one cause") == (len(causes) == 1)
        if name == "one cause":
            assert first == total == pytest.approx(of_steps)
    assert terms == whole["variance_by_term"]
    errors = whole["variance_by_term_se"]
    for cause, term in (("rank", "slow_steps"), ("step", "drift"), ("stall", "stalls")):
        if cause in causes:
            part, half = causes[cause]["first_order"], np.ptp(causes[cause]["first_order_ci"]) / 2
            assert abs(part - terms[term]) < 4.0 * errors[term] + 2.0 * half


@pytest.mark.usefixtures("few_clusters")
def test_a_run_with_a_cause_held_is_the_estimate_without_it():
    """Its other parts stay: failures, checkpoints, the model's error."""
    effects, run = RUNS["failures"]

    def build(**changed):
        return load_job({
            "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
            "parallelism": {"microbatches": 4, "dp": 4}, "run": {"steps": 2500} | run,
            "variability": {"library": None, "effects": effects | changed, "model_error": 0.01},
        })  # fmt: skip

    rows = prism.summary(rank(build(), "time_to_train", seed=3))["effects"]
    held = next(row for row in rows if row["name"] == "rank")
    whole, calm = (
        prism.summary(prism.estimate(job, replicates=2560, run_replicates=4000, seed=3))
        for job in (build(), build(rank={"cv": 0.0}))
    )
    whole, calm = whole["time_to_train"], calm["time_to_train"]
    errors = {
        "mean": math.hypot(whole["mean_se"], calm["mean_se"]) / whole["mean"],
        "std": math.hypot(1.0, calm["std"] / whole["std"]) / math.sqrt(2.0 * 4000),
    }
    for figure, error in errors.items():
        saved, half = held[f"{figure}_reduction"], np.ptp(held[f"{figure}_reduction_ci"]) / 2.0
        assert abs(saved - (1.0 - calm[figure] / whole[figure])) < 1.5 * half + 3.0 * error
    assert held["mean_reduction"] > 0.005 and held["std_if_frozen"] > 0.8 * whole["std"]


def test_faster_by_how_much_is_asked():
    job = chain(residual={"cv": 0.01})
    saved = {}
    for share in (0.1, 0.25):
        values = prism.summary(rank(job, speed_up=share, seed=3))
        saved[share] = values["kernels"][0]["p50_reduction_faster"]
    assert saved == pytest.approx({0.1: 0.1, 0.25: 0.25}, abs=1e-5)


def test_bad_requests():
    with pytest.raises(PrismError, match="step_time or time_to_train"):
        rank(chain(residual={"cv": 0.1}), "loss")
    with pytest.raises(PrismError, match="speed_up 1: expected a share"):
        rank(chain(residual={"cv": 0.1}), speed_up=1.0)
    none = load_job(chain(residual={"cv": 0.1}).model_dump(
        exclude={"source", "name"}, exclude_none=True) | {
        "variability": {"library": None, "dependence": "none"}})  # fmt: skip
    with pytest.raises(PrismError, match="dependence"):
        rank(none)
