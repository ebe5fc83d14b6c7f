"""prism sweep: which settings there are, their figures, which is best, and what is said of them."""

import json
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import prism
from prism import plots

PIPELINE = """
model: {durations: {forward_s: 1.0, backward_s: 2.0}}
parallelism: {pp: 4, dp: 2, microbatches: 8}
variability:
  library: none
  effects: {rank: {cv: 0.02}, step: {cv: 0.01}, residual: {law: lognormal, cv: 0.05}}
run: {steps: 1000}
"""
CALM = {f"variability.effects.{name}.cv": 0 for name in ("rank", "step", "residual")}
BLOCK = 64
KEYS = ("tp", "cp", "pp", "vpp", "dp", "microbatches")


@pytest.fixture
def pipeline(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(PIPELINE)
    return path


@pytest.fixture(scope="module")
def small():
    return prism.load_job({
        "model": {"name": "llama3-8b", "n_layers": 8},
        "parallelism": {"tp": 2, "pp": 2, "dp": 4, "data_parallel": "zero1", "microbatches": 4},
        "cluster": {"nodes": 2}, "run": {"steps": 1000},
    })  # fmt: skip


@pytest.fixture(scope="module")
def bare(small):
    """The small job with few layers and little that varies, where only layouts are told."""
    effects = {"library": "none", "effects": {"rank": {"cv": 0.01}}}
    return small.replace("model.n_layers=4", {"variability": effects})


def swept(job, vary=None, **options):
    return prism.summary(prism.sweep(job, vary, **{"replicates": BLOCK, "seed": 1, **options}))


def by(found, key):
    return {row[key]: row for row in found["rows"]}


def layout(row):
    return tuple(row[f"parallelism.{key}"] for key in KEYS)


@pytest.fixture(scope="module")
def all_layouts(small):
    return swept(small, layouts=True, replicates=16 * BLOCK)


# ------------------------------------------------------------------------------------ grids
def test_values_ranges_lists_and_quotes(run, pipeline):
    status, out, err = run(
        "sweep", pipeline, "--vary", "parallelism.microbatches=4:6,8:16:8", "--vary",
        "model.durations.forward_s=1,[1, 1, 1, 2]", "--replicates", 64, "--seed", 1, "--json", "-q",
    )  # fmt: skip
    assert status == 0, err
    rows = json.loads(out)["rows"]
    assert {row["parallelism.microbatches"] for row in rows} == {4, 5, 6, 8, 16}
    assert {row["model.durations.forward_s"] for row in rows} == {1, "[1, 1, 1, 2]"}
    assert len(rows) == 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--vary"),
        (("--vary", "parallelism.dp"), "key=value"),
        (("--vary", "=1,2"), "key=value"),
        (("--vary", "parallelism.pp=1,,2"), "parallelism.pp"),
        (("--vary", "parallelism.pp=1,2,1"), "1"),
        (("--vary", "run.steps=1", "--vary", "run.steps=2"), "run.steps"),
        (("--vary", "run.steps=8:2"), "8:2"),
        (("--vary", "run.steps=1:9:0"), "1:9:0"),
        (("--vary", "run.steps=1:99999"), "20,000"),
        (("--vary", "run.steps=1:200", "--vary", "parallelism.pp=1:200"), "40,000"),
        (("--vary", "parallelism.dq=1,2"), "dq"),
        (("--vary", "parallelism.recompute=none,attention"), "attention"),
        (("--vary", "parallelism.data_parallel=ddp,zero2"), "zero2"),
        (("--vary", "parallelism.microbatches=4,0"), "0"),
        (("--vary", "cluster.links.network.efficiency=0.5,1.5"), "1.5"),
        (("--layouts",), "--layouts"),
        (("--vary", "parallelism.pp=4", "--objective", "p42"), "p42"),
        (("--vary", "parallelism.pp=4", "--set", "parallelism.pp=x"), "parallelism.pp"),
        (("--vary", "run.steps=1,2", "--min-p-fits", 90), "--min-p-fits"),
        (("--vary", "run.steps=1,2", "--replicates", 0), "--replicates"),
        (("--vary", "run.steps=1,2", "-o", "{file}"), "file"),
    ],
)
def test_bad_input_is_told_without_a_traceback(run, pipeline, tmp_path, options, words):
    (tmp_path / "file").write_text("")
    options = [str(x).format(file=tmp_path / "file") for x in options]
    status, out, err = run("sweep", pipeline, *options)
    assert (status, out) == (2, "")
    assert words in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("vary", "options"),
    [
        ({}, {}), ({"dp": [1]}, {}), ({"parallelism.dp": "1,2"}, {}), ({"parallelism.dp": []}, {}),
        ({"run.steps": [1, 2]}, {"objective": "p42"}), ({"run.steps": [1]}, {"replicates": 0}),
        ({"run.steps": [1, 2]}, {"min_p_fits": 90.0}),
    ],
)  # fmt: skip
def test_bad_calls_are_refused(pipeline, vary, options):
    with pytest.raises(prism.PrismError):
        prism.sweep(pipeline, vary, seed=1, **options)


def test_one_bad_setting_is_refused_and_the_others_run(pipeline):
    vary = {"parallelism.microbatches": [4, 6], "parallelism.schedule": ["1f1b", "interleaved"]}
    found = swept(pipeline, vary)
    assert len(found["rows"]) + len(found["refused"]) == 4 and found["refused"]
    assert len(found["warnings"]) == 1 and all(row["reason"] for row in found["refused"])


# ----------------------------------------------------------------------------------- layouts
def test_layouts_are_all_that_the_rules_allow(small, all_layouts):
    """16 GPUs, 8 layers, 16 sequences; interleaved chunks are equal, or shorter at the ends."""
    brute = set()
    for tp, cp, pp, vpp, dp in product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16),
                                       range(1, 11), (1, 2, 4, 8, 16)):  # fmt: skip
        m = 16 // dp
        if tp * cp * pp * dp != 16 or (pp == 1 and vpp > 1) or (vpp > 1 and m % pp):
            continue
        if vpp > 1 and 8 % (pp * vpp) and 10 % (pp * vpp):
            continue
        schedule = "interleaved" if vpp > 1 else "1f1b"
        sizes = dict(zip(KEYS, (tp, cp, pp, vpp, dp, m), strict=True))
        keys = {f"parallelism.{key}": value for key, value in sizes.items()}
        try:
            made = small.replace({**keys, "parallelism.schedule": schedule})
        except prism.PrismError:  # what the layers do not divide into
            continue
        assert made.world_size == 16 and made.tokens_per_step == small.tokens_per_step
        brute.add((tp, cp, pp, vpp, dp, m))
    assert {layout(row) for row in all_layouts["rows"]} == brute and len(brute) > 50
    assert not all_layouts["refused"]
    assert [layout(row) for row in all_layouts["rows"] if row["own"]] == [(2, 1, 2, 1, 4, 4)]
    assert {row["world_size"] for row in all_layouts["rows"]} == {16}


@pytest.mark.parametrize("least", [0.5, 0.9])
def test_layouts_that_are_not_likely_to_fit_are_refused(bare, least):
    """Of all layouts without a limit, those that are likely to fit, however near the others."""
    big, keys = bare.replace("model.n_layers=32"), {"parallelism.cp": [1]}
    every = swept(big, keys, layouts=True, min_p_fits=0.0)
    chances = {layout(row): row["memory"]["p_fits"] for row in every["rows"]}
    found = swept(big, keys, layouts=True, min_p_fits=least)
    kept = {layout(row) for row in found["rows"]}
    assert kept == {key for key, chance in chances.items() if chance >= least}
    assert len(found["refused"]) == len(chances) - len(kept) > 0 == len(every["refused"])
    assert all("GiB" in row["reason"] for row in found["refused"])
    memory = next(row["memory"] for row in every["rows"] if row["memory"]["p_fits"] < 0.5)
    assert 1.0 < memory["gib"] / memory["limit_gib"] < 1.25
    # the job's own stays, whatever it needs, and is not chosen
    sizes = {
        f"parallelism.{key}": n for key, n in zip(KEYS, min(chances, key=chances.get), strict=True)
    }
    own = swept(big.replace(sizes), keys | {"parallelism.tp": [1]}, layouts=True, min_p_fits=least)
    (row,) = [row for row in own["rows"] if row["own"]]
    assert not row["likely_fits"] and row["p95"] is not None
    assert own["rows"].index(row) not in {own[x] for x in ("fastest", "robust", "best")}


def test_skipping_loses_none_of_the_best(bare):
    """Settings one by one, all to the end: the same choices as of layouts that may skip."""
    found = swept(bare, {"parallelism.cp": [1]}, layouts=True, replicates=8 * BLOCK)
    rows = found["rows"]
    assert {row["figures"] for row in rows} >= {"full", "bound"}
    assert all(row["p50"] is None for row in rows if row["figures"] == "bound")
    every = {}
    for row in rows:
        keys = {f"parallelism.{key}": value for key, value in zip(KEYS, layout(row), strict=True)}
        schedule = "interleaved" if row["parallelism.vpp"] > 1 else "1f1b"
        job = bare.replace({**keys, "parallelism.schedule": schedule})
        steps = prism.simulate(job, replicates=8 * BLOCK, seed=1)
        every[layout(row)] = float(np.quantile(steps.step_time, 0.95))
        assert row["at_least"] <= float(steps.ideal_step_time) * (1.0 + 1e-6)
        if row["figures"] == "full":
            assert row["p95"] == pytest.approx(every[layout(row)], rel=0.005)
    chosen = layout(rows[found["robust"]])
    assert every[chosen] <= 1.002 * min(every.values())


def test_layouts_of_other_clusters_and_microbatches(bare):
    vary = {"cluster.nodes": [1, 2], "parallelism.microbatch_size": [1, 2, 3],
            "parallelism.cp": [1]}  # fmt: skip
    found = swept(bare, vary, layouts=True)
    for row in found["rows"]:
        tp, cp, pp, _, dp, m = layout(row)
        assert row["world_size"] == tp * cp * pp * dp == 8 * row["cluster.nodes"]
        assert dp * m * row["parallelism.microbatch_size"] == 16 and row["work"] == 1.0
    assert sum(row["own"] for row in found["rows"]) == 1
    assert {row["parallelism.microbatch_size"] for row in found["refused"]} == {"3"}


def test_keys_of_a_layout_say_which_are_taken(small, all_layouts):
    found = swept(small, {"parallelism.cp": [1], "parallelism.pp": [1, 2]}, layouts=True)
    asked = {layout(r) for r in all_layouts["rows"] if layout(r)[1] == 1 and layout(r)[2] < 3}
    assert {layout(row) for row in found["rows"]} == asked and "by_setting" not in found
    with pytest.raises(prism.PrismError):
        prism.sweep(small, {"parallelism.tp": [7]}, layouts=True)
    # a setting that no layout mends is refused once
    wrong = {"variability.library": ["h100-healthy", "h100x"], "parallelism.cp": [1]}
    refused = swept(small, wrong, layouts=True)["refused"]
    assert [row["variability.library"] for row in refused] == ["h100x"]


def test_layouts_by_a_setting_varied_by_hand(bare):
    key = "variability.effects.rank.cv"
    found = swept(bare, {key: [0.01, 0.08], "parallelism.cp": [1]}, layouts=True)
    (own,) = [row for row in found["rows"] if row["own"]]  # what all are compared with
    by_batch = bare.replace("parallelism.microbatches=", "parallelism.global_batch=16")
    again = swept(by_batch, {key: [0.01, 0.08], "parallelism.cp": [1]}, layouts=True)
    assert [row["p50_change"] for row in again["rows"]] == [r["p50_change"] for r in found["rows"]]
    assert all(
        row["p50_change"] == pytest.approx(row["p50"] / own["p50"] - 1.0, abs=1e-6)
        for row in found["rows"] if row["p50"] and row is not own
    )  # fmt: skip
    assert [row[key] for row in found["by_setting"]] == [0.01, 0.08]
    for group in found["by_setting"]:
        mine = [row for row in found["rows"] if row[key] == group[key]]
        for name, figure in (("robust", "p95"), ("fastest", "p50")):
            chosen = found["rows"][group[name]]
            done = [row[figure] for row in mine if row["figures"] == "full"]
            assert chosen in mine and chosen[figure] == min(done)
        assert [row["figures"] for row in mine if layout(row) == layout(own)] == ["full"]


# ----------------------------------------------------------------------------- what follows
def test_chunks_follow_a_schedule_that_is_varied():
    sizes = {"n_layers": 8, "hidden_size": 256, "ffn_size": 512, "n_heads": 4, "vocab_size": 512,
             "seq_len": 128}  # fmt: skip
    taken = {"pp": 4, "dp": 2, "microbatches": 8}
    job = prism.load_job({"model": sizes, "parallelism": taken, "cluster": {"nodes": 1},
                          "variability": {"library": None}})  # fmt: skip
    vary = {"parallelism.schedule": ["gpipe", "1f1b", "interleaved"]}
    rows = by(swept(job, vary), "parallelism.schedule")
    chunks = {name: row["parallelism.vpp"] for name, row in rows.items()}
    assert chunks == {"gpipe": 1, "1f1b": 1, "interleaved": 2}
    assert [name for name, row in rows.items() if row["own"]] == ["1f1b"]
    chunked = job.replace("parallelism.vpp=2", "parallelism.schedule=interleaved",
                          {"parallelism.layer_split": [1] * 8})  # fmt: skip
    rows = by(swept(chunked, vary), "parallelism.schedule")
    assert [name for name, row in rows.items() if row["own"]] == ["interleaved"]
    refused = swept(job.replace("parallelism.microbatches=6"), vary)["refused"]
    assert [row["parallelism.schedule"] for row in refused] == ["interleaved"]
    found = swept(job, vary | {"parallelism.vpp": [1, 2]})
    assert (len(found["rows"]), len(found["refused"])) == (3, 3)


def test_replicas_and_microbatches_follow_sizes_that_are_varied(bare):
    rows = by(swept(bare, {"parallelism.tp": [1, 2, 4]}), "parallelism.tp")
    for tp, row in rows.items():
        assert row["parallelism.dp"] * tp * 2 == row["world_size"] == 16
        assert row["parallelism.dp"] * row["parallelism.microbatches"] == 16  # the job's batch
    assert [tp for tp, row in rows.items() if row["own"]] == [2] and len(rows) == 3
    # sizes that are varied too do not follow, and what does not divide is refused as ever
    fixed = swept(bare, {"parallelism.tp": [2, 4], "parallelism.dp": [4]})
    assert (len(fixed["rows"]), len(fixed["refused"])) == (1, 1)
    odd = swept(bare, {"parallelism.pp": [2, 3]})["refused"]
    assert [row["parallelism.pp"] for row in odd] == ["3"]
    nodes = swept(bare, {"cluster.nodes": [2, 4]})["rows"]
    assert {(row["world_size"], row["work"]) for row in nodes} == {(32, 1.0), (16, 1.0)}


# ----------------------------------------------------------------------------------- figures
def test_rows_are_what_a_simulation_says(small):
    job = small.replace("variability.effects.step.cv=0.01")
    found = swept(job, {"parallelism.microbatches": [4, 8]}, replicates=4 * BLOCK, seed=5)
    for m, row in by(found, "parallelism.microbatches").items():
        alone = prism.simulate(
            job.replace(f"parallelism.microbatches={m}"), replicates=4 * BLOCK, seed=5
        )
        steps = alone.step_time.to_numpy()
        for figure, q in (("p50", 0.5), ("p95", 0.95)):
            assert row["step_time"][figure] == np.quantile(steps, q)
        assert row["step_time"]["mean"] == pytest.approx(steps.mean(), rel=1e-6)
        assert row["ideal_step_time"] == float(alone.ideal_step_time)
        assert row["mfu"] == pytest.approx(float(alone.mfu))
        assert row["exposed_communication"] == float(alone.exposed_communication) > 0.0
        assert row["own"] == (m == 4) and row["work"] == m / 4
        assert row["tokens_per_second"] == pytest.approx(
            job.tokens_per_step * row["work"] / row["mean"], rel=1e-6
        )


def test_unequal_work_is_compared_per_token(pipeline):
    """Without noise a step takes (m + p - 1)(t_f + t_b) = 3 (m + 3)."""
    job = prism.load_job(pipeline).replace(CALM)
    found = swept(job, {"parallelism.microbatches": [4, 8, 16]}, replicates=2 * BLOCK)
    for m, row in by(found, "parallelism.microbatches").items():
        for figure in ("p50", "p95", "mean"):
            assert row[figure] == pytest.approx(3 * (m + 3), rel=1e-6)
            assert row[f"{figure}_same_work"] == pytest.approx(3 * (m + 3) * 8 / m, rel=1e-6)
            change = (m + 3) * 8 / m / 11 - 1
            expected = None if m == 8 else pytest.approx(change, rel=1e-5)
            assert row[f"{figure}_change"] == expected
        assert row["at_least"] == pytest.approx(row["mean_same_work"], rel=1e-6)
    order = [row["parallelism.microbatches"] for row in found["rows"]]
    assert order == [16, 8, 4] and found["frontier"] == [0] and len(found["notes"]) == 1
    assert found["fastest"] == found["robust"] == found["best"] == 0
    sized = swept(pipeline, {"parallelism.dp": [2, 4]})
    assert sorted(row["work"] for row in sized["rows"]) == [1.0, 2.0] and len(sized["notes"]) == 1


def test_differences_are_paired_and_their_errors_hold(pipeline):
    """One microbatch more costs a known share, told far better than either figure is."""
    vary = {"parallelism.microbatches": [8, 9]}
    found = swept(pipeline, vary, replicates=32 * BLOCK, seed=2)
    rows = by(found, "parallelism.microbatches")
    truth = (9 + 3) / 9 * 8 / 11 - 1
    for figure in ("p50", "p95", "mean"):
        change, error = (rows[9][f"{figure}_{x}"] for x in ("change", "change_se"))
        alone = [rows[m][f"{figure}_se"] / rows[m][figure] for m in (8, 9)]
        assert 0.0 < error < 0.5 * np.hypot(*alone)
        assert abs(change - truth) < 4.0 * error + 0.004
    best = rows[9] if found["rows"][0] is rows[9] else rows[8]
    other = rows[8] if best is rows[9] else rows[9]
    assert best["best_change"] is None and not other["indistinguishable_from_best"]
    assert other["best_change"] == pytest.approx(1 / (1 + truth) - 1, abs=0.01)


# ------------------------------------------------------------------------------- what is best
@pytest.fixture(scope="module")
def trade():
    """Two forwards, and step effects: the faster in the median is the slower at p95.

    A lognormal factor of mean 1 and cv c has its median at 1/sqrt(1 + c^2).
    """
    job = prism.load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"microbatches": 8}, "variability": {"library": None},
    })  # fmt: skip
    return job, {"variability.effects.step.cv": [0.02, 0.1, 0.3],
                 "model.durations.forward_s": [1.0, 1.03]}  # fmt: skip


@pytest.mark.parametrize("objective", ["p50", "p95", "mean"])
def test_fastest_robust_and_best_are_each_by_their_own_figure(trade, objective):
    job, vary = trade
    found = swept(job, vary, replicates=16 * BLOCK, seed=3, objective=objective)
    rows = found["rows"]
    setting = [tuple(row[key] for key in vary) for row in rows]
    assert setting[found["fastest"]] == (0.3, 1.0) and setting[found["robust"]] == (0.02, 1.0)
    best = {"p50": (0.3, 1.0), "p95": (0.02, 1.0)}
    assert objective == "mean" or setting[found["best"]] == best[objective]
    assert found["objective"] == objective and found["best"] == 0
    figures = [row[objective] for row in rows]
    assert figures == sorted(figures)
    for name, figure in (("fastest", "p50"), ("robust", "p95"), ("best", objective)):
        assert rows[found[name]][figure] == min(row[figure] for row in rows)
        assert 0.0 <= found["p_correct"][name] <= 1.0
    for row in rows:  # independent steps of 24 s, by cluster draws of 64
        seconds = 16 + 8 * row["model.durations.forward_s"]
        std = seconds * row["variability.effects.step.cv"]
        assert row["mean"] == pytest.approx(seconds, abs=5 * std / row["replicates"] ** 0.5)
        assert row["mean_se"] == pytest.approx(std / row["replicates"] ** 0.5, rel=0.7)
        assert row["step_time"]["std"] == pytest.approx(std, rel=0.2)
        assert row["replicates"] == 64 * row["clusters"]
    median = 8 * 3 / (1 + 0.3**2) ** 0.5
    assert rows[found["fastest"]]["p50"] == pytest.approx(median, rel=0.03)
    # the frontier is what no setting beats, by the first figure
    points = {i: (r["p50"], r["p95"]) for i, r in enumerate(rows) if r["figures"] == "full"}
    on = [
        i for i, (a, b) in points.items()
        if not any(x <= a and y <= b and (x, y) != (a, b) for x, y in points.values())
    ]  # fmt: skip
    assert found["frontier"] == sorted(on, key=points.get)
    assert {(0.3, 1.0), (0.02, 1.0)} <= {setting[i] for i in on} and len(on) < len(rows)


def test_how_sure_a_choice_is(pipeline):
    """Settings that are the same but for what does not matter, and one that is far off."""
    same = swept(pipeline, {"run.steps": [1, 2]}, replicates=8 * BLOCK)
    assert same["p_correct"] == dict.fromkeys(("fastest", "robust", "best"), 1.0)
    near = swept(pipeline, {"variability.effects.residual.cv": [0.05, 0.0505]}, replicates=BLOCK)
    assert near["rows"][1]["best_change"] is None  # of one cluster draw nothing is known
    off = swept(pipeline, {"model.durations.forward_s": [1.0, 1.2]}, replicates=8 * BLOCK)
    assert min(off["p_correct"].values()) > 0.99
    assert not off["rows"][1]["indistinguishable_from_best"]
    assert off["rows"][1]["figures"] == "screen" or off["rows"][1]["clusters"] <= 8


TIGHT = ["cluster.nodes=8", "parallelism.dp=64"]
VARIED = {"parallelism.recompute": ["full", "none"], "parallelism.microbatch_size": ["1", "2"]}


@pytest.mark.parametrize("least", [0.5, 0.9])
def test_what_is_not_likely_to_fit_is_not_chosen(least):
    job = prism.load_job("llama3-70b-fsdp-512", TIGHT)
    made = prism.sweep(job, VARIED, replicates=2 * BLOCK, seed=1, min_p_fits=least)
    found = prism.summary(made)
    rows = found["rows"]
    fastest = min(rows, key=lambda row: row["p95_same_work"])
    assert fastest["memory"]["p_fits"] < 0.01 and not fastest["likely_fits"]
    fit = [i for i, row in enumerate(rows) if row["memory"]["p_fits"] >= least]
    assert 0 < len(fit) < len(rows) and fit == list(range(len(fit)))  # first, then the others
    for name, measure in {"fastest": "p50", "robust": "p95", "best": "p95"}.items():
        assert found[name] == min(fit, key=lambda i: rows[i][f"{measure}_same_work"])
    assert set(found["frontier"]) <= set(fit)
    assert "does_not_fit" in [finding.code for finding in prism.answer(made).findings]


@given(st.floats(7.0, 40.0), st.floats(0.05, 1.0), st.booleans(), st.sampled_from(["p50", "p95"]))
@settings(max_examples=12, deadline=None)
def test_a_layout_that_is_unlikely_to_fit_is_never_recommended(gib, least, layouts, objective):
    """Whatever the card, the probability asked for, and what settings are sorted by."""
    job = prism.load_job({
        "model": {"name": "llama3-8b", "n_layers": 6}, "cluster": {"nodes": 1, "memory_gib": gib},
        "parallelism": {"tp": 2, "dp": 4, "data_parallel": "zero1", "microbatches": 4},
        "variability": {"library": "none"},
    })  # fmt: skip
    vary = {"parallelism.cp": [1], "parallelism.recompute": ["none", "full"]}
    if not layouts:
        vary = {"parallelism.tp": [1, 2, 4, 8], "parallelism.recompute": ["none", "full"]}
    found = swept(job, vary, layouts=layouts, min_p_fits=least, objective=objective)
    chosen = [found["rows"][i] for i in found["frontier"]]
    chosen += [
        found["rows"][found[x]] for x in ("fastest", "robust", "best") if found[x] is not None
    ]
    assert all(row["memory"]["p_fits"] >= least and row["likely_fits"] for row in chosen)
    assert all(row["memory"]["limit_gib"] == gib for row in found["rows"])
    likely = [row for row in found["rows"] if row["memory"]["p_fits"] >= least]
    assert bool(chosen) is bool(likely)
    if layouts:
        own = (2, 1, 1, 1, 4, 4)  # stays, whatever it needs
        assert all(layout(row) == own for row in found["rows"] if not row["likely_fits"])
        groups = [group["fastest"] for group in found["by_setting"]]
        rows = [found["rows"][i] for i in groups if i is not None]
        assert all(row["memory"]["p_fits"] >= least for row in rows)


def test_layouts_are_sorted_by_p50_and_settings_by_p95(bare, pipeline):
    found = swept(bare, {"parallelism.cp": [1]}, layouts=True)
    assert found["objective"] == "p50" and found["min_p_fits"] == 0.9
    assert swept(pipeline, {"run.steps": [1, 2]})["objective"] == "p95"


def test_where_nothing_fits_nothing_is_chosen(run, tmp_path):
    status, out, _ = run(
        "sweep", "llama3-70b-fsdp-512", "--vary", "parallelism.recompute=none", "--vary",
        "parallelism.microbatch_size=1,2", "--replicates", BLOCK, "--seed", 1, "--json", "-q",
        "-o", tmp_path / "out",
    )  # fmt: skip
    found = json.loads(out)
    assert status == 0
    assert [found[name] for name in ("fastest", "robust", "best")] == [None] * 3
    assert [finding["code"] for finding in found["findings"]] == ["none_fits"]
    assert all(row["p95"] is not None for row in found["rows"])
    assert run("report", tmp_path / "out", "-o", tmp_path / "page.html", "-q")[0] == 0


# ---------------------------------------------------------------------------------- the command
def test_the_command_gives_what_python_does_and_keeps_it(run, pipeline, tmp_path):
    vary = ("--vary", "parallelism.schedule=1f1b,gpipe", "--vary", "parallelism.microbatches=4,8")
    out = tmp_path / "out"
    asked = (*vary, "--replicates", 1024, "--seed", 3, "--objective", "mean")
    status, text, err = run("sweep", pipeline, *asked, "--json", "-q", "-o", out)
    assert status == 0, err
    found = json.loads(text)
    assert found["varied"] == ["parallelism.schedule", "parallelism.microbatches"]
    assert (found["seed"], found["objective"]) == (3, "mean")
    row = found["rows"][0]
    assert {"step_time", "p50", "p95", "p50_se", "p95_se", "memory", "ideal_step_time",
            "exposed_communication", *found["varied"]} <= set(row)  # fmt: skip
    assert {"mean", "std", "p5", "p99", "p95_ci", "between_cluster_std"} <= set(row["step_time"])
    grid = {"parallelism.microbatches": [8, 4], "parallelism.schedule": ["gpipe", "1f1b"]}
    made = prism.sweep(pipeline, grid, replicates=1024, seed=3, objective="mean", threads=1)
    keys = (*grid, "p50", "p95", "mean", "clusters", "figures", "p95_change")
    assert [[r[k] for k in keys] for r in prism.summary(made)["rows"]] == [
        [r[k] for k in keys] for r in found["rows"]
    ]
    assert {file.name for file in out.iterdir()} == {
        "result.nc", "summary.json", "sweep.png", "sweep.svg"
    }  # fmt: skip
    kept = prism.load(out / "result.nc")
    assert kept["p95"].to_numpy().tolist() == [r["p95"] for r in found["rows"]]
    for variable in kept.to_xarray().data_vars.values():
        words = variable.dtype.kind in "OUT"
        assert variable.attrs["long_name"] and (words or variable.attrs["units"])
    assert prism.summary(kept) == found
    table = kept.settings
    assert table.p95.tolist() == [r["p95"] for r in found["rows"]]
    for key in grid:
        assert table[key].tolist() == [r[key] for r in found["rows"]]
    assert table.attrs["fields"]["p95"]["unit"] == "s" and len(kept.refused) == 0
    shown = json.loads(run("show", out / "result.nc", "--json")[1])
    assert (shown["kind"], shown["summary"]) == ("sweep", found)


def test_tables_and_the_plot_show_the_figures_of_the_json(trade):
    job, vary = trade
    made = prism.sweep(job, vary, replicates=16 * BLOCK, seed=3)
    found, answer = prism.summary(made), prism.answer(made)
    assert [f.code for f in answer.findings][:2] == ["fastest", "robust"]
    (table,) = [table for table in answer.tables if table.title == "Settings"]
    titles = [column.title for column in table.columns]
    for figure in ("p50", "p95"):
        cells = [row[titles.index(figure)].value for row in table.rows]
        assert set(cells) <= {row[figure] for row in found["rows"]} and cells
    facts = [cell.value for _, cell in answer.facts]
    assert facts == [found["rows"][found["fastest"]]["p50"], found["rows"][found["robust"]]["p95"]]
    ax = plots.plot_sweep(made)
    (line,) = [line for line in ax.lines if line.get_label() == "frontier"]
    points = [(found["rows"][i]["p50"], found["rows"][i]["p95"]) for i in found["frontier"]]
    np.testing.assert_allclose(line.get_xydata(), points)
    one = prism.answer(prism.sweep(job, {"run.steps": [1, 2]}, replicates=BLOCK, seed=3))
    assert one.findings[0].code == "fastest_and_robust"


def test_a_sweep_by_the_deadline_has_estimates_probabilities(run):
    """Of the work of the job's run: twice the batch takes half the steps."""
    job = prism.load_job("gpt3-175b-512", {"run.deadline": "52min"})
    vary = {"parallelism.microbatch_size": [1, 2]}
    result = prism.sweep(job, vary, replicates=128, objective="done_by", min_p_fits=0.5, seed=1)
    figures = result.figures()
    rows = figures["rows"]
    done = [row["p_done"] for row in rows]
    assert done == sorted(done, reverse=True) and done[0] > done[-1]
    assert figures["best"] == 0 and "best" not in figures["p_correct"]
    for row in rows:
        setting = {key: row[key] for key in vary}
        steps = job.n_steps // row["parallelism.microbatch_size"]
        alone = prism.estimate(job.replace(setting), steps=steps, replicates=128, seed=1).figures()
        assert row["p_done"] == alone["finish_by"]["probability"]
    for words in (
        ("parallelism.vpp=6,12", "--set", "run.deadline=none"), ("run.deadline=none,52min",)
    ):  # fmt: skip
        words = ("--vary", *words, "--objective", "done_by")
        status, out, err = run("sweep", "gpt3-175b-512", *words)
        assert (status, out) == (2, "") and "run.deadline" in err
