"""prism sweep: which settings there are, which go on, and what is said of them."""

import json
from itertools import product

import numpy as np
import pytest
from campaign import some
from hypothesis import given, settings
from hypothesis import strategies as st

import prism
from prism import PrismError, load, load_job, save, simulate, sweep
from prism.analyses.selection import difference, pareto, probability_best
from prism.analyses.sweep import reproduce
from prism.analyses.sweeps.grid import job_at, parse_vary
from prism.analyses.sweeps.layouts import KEYS, layouts
from prism.analyses.sweeps.points import Bench, Point, least_seconds, simulate_points
from prism.analyses.sweeps.rows import choose, make_rows
from prism.jobs.job import given_values, job_from_dict
from prism.jobs.layersplit import auto_split
from prism.workload.memory import estimate_memory, memory_limit

PIPELINE = """
model: {durations: {forward_s: 1.0, backward_s: 2.0}}
parallelism: {pp: 4, dp: 2, microbatches: 8}
variability:
  library: none
  effects: {rank: {cv: 0.02}, step: {cv: 0.01}, residual: {law: lognormal, cv: 0.05}}
run: {steps: 1000}
"""
SMALL = """
model: {name: llama3-8b, n_layers: 8}
parallelism: {tp: 2, pp: 2, dp: 4, data_parallel: zero1, microbatches: 4}
cluster: {nodes: 2}
run: {steps: 1000}
"""
BLOCK = 64


@pytest.fixture
def few_quiet(monkeypatch):
    """Quiet times of few clusters, where errors are not what is tested."""
    monkeypatch.setattr("prism.analyses.selection.QUIET_BATCHES", (1, 1))


@pytest.fixture
def pipeline(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(PIPELINE)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("jobs") / "small.yaml"
    path.write_text(SMALL)
    return load_job(path)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The small job with few layers and little that varies, where only layouts are told."""
    path = tmp_path_factory.mktemp("jobs") / "bare.yaml"
    path.write_text(SMALL + "variability: {library: none, effects: {rank: {cv: 0.01}}}\n")
    return load_job(path, ["model.n_layers=4"])


@pytest.fixture(scope="module")
def all_layouts(small):
    return prism.summary(sweep(small, layouts=True, replicates=16 * BLOCK, seed=1))


def row_at(numbers, **keys):
    (found,) = [
        row for row in numbers["rows"]
        if all(row[f"parallelism.{key}"] == value for key, value in keys.items())
    ]  # fmt: skip
    return found


# ------------------------------------------------------------------------------ grids
def test_values_ranges_lists_and_quotes():
    grid = parse_vary(["a.b=1:3,9", "a.c=[1, 2],[3]", "a.d='x,y',z", "a.e={k: 1, l: 2},1:7:3"])
    assert grid == {
        "a.b": ["1", "2", "3", "9"],
        "a.c": ["[1, 2]", "[3]"],
        "a.d": ["'x,y'", "z"],
        "a.e": ["{k: 1, l: 2}", "1", "4", "7"],
    }


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["parallelism.dp"], "expected key=value"),
        (["=1,2"], "expected key=value"),
        (["a.b=1,,2"], "empty value"),
        (["a.b=1,2,1"], "1 is there twice"),
        (["a.b=1", "a.b=2"], "varied twice"),
        (["a.b=8:2"], "no end"),
        (["a.b=1:9:0"], "no end"),
        (["a.b=1:99999"], "more than 20,000"),
        (["a.b=1:200", "a.c=1:200"], "40,000 settings"),
    ],
)
def test_bad_grids(texts, words):
    with pytest.raises(PrismError, match=words):
        parse_vary(texts)


def test_what_was_not_given_follows_from_the_setting(small):
    values = given_values(load_job("llama3-405b-16k"))
    drop = ("parallelism.reshard_after_forward",)
    setting = {"parallelism.vpp": "1", "cluster.device": "gb200"}
    job = job_at(values | {"variability": {}}, setting, drop, "job")
    assert job.parallelism.schedule == "1f1b"
    assert job.variability.library == "gb200-healthy"
    assert not job.parallelism.reshard_after_forward  # pp > 1
    assert job_at(given_values(small), {}, (), small.name) == small


def test_a_rebuilt_job_knows_all_its_values(small):
    rebuilt = job_from_dict(small.model_dump(mode="json", exclude={"name", "source"}), small.name)
    assert job_at(given_values(rebuilt), {"parallelism.dp": "4"}, (), small.name) == small


# ------------------------------------------------------------------------------ layouts
def test_layouts_are_all_that_the_rules_allow(small):
    found = {tuple(int(v) for v in setting.values()) for setting, _ in layouts(small, 16)}
    n_layers, batch, world = 8, 16, 16
    brute = set()
    for tp, cp, pp, vpp, dp in product(
        range(1, 9), range(1, 17), range(1, 17), range(1, 11), range(1, 17)
    ):
        if tp * cp * pp * dp != world or batch % dp or 32 % tp:
            continue
        m = batch // dp
        if pp == 1 and vpp > 1 or vpp > 1 and m % pp:
            continue
        if pp > 1 and auto_split(n_layers, pp * vpp) is None:
            continue
        brute.add((tp, cp, pp, vpp, dp, m))
    assert found == brute
    assert len(found) > 50


def test_every_layout_is_a_row_or_refused_for_its_memory(small, all_layouts):
    total = sum(1 for _ in layouts(small, 16))
    assert len(all_layouts["rows"]) + len(all_layouts["refused"]) == total
    values = given_values(small)
    for setting, follows in layouts(small, 16):
        job = job_at(values, setting, follows, small.name)
        assert job.world_size == 16
        assert job.tokens_per_step == small.tokens_per_step
        sizes = {key: getattr(job.parallelism, key) for key in KEYS}
        kept = [r for r in all_layouts["rows"]
                if all(r[f"parallelism.{k}"] == v for k, v in sizes.items())]  # fmt: skip
        fits = estimate_memory(job).total <= memory_limit(job)
        assert len(kept) == int(fits or job == small)
    assert all("GiB" in row["reason"] for row in all_layouts["refused"])


class Pretended(Bench):
    """Settings whose ideal steps and spreads are given, in place of simulations."""

    def __init__(self, known):
        super().__init__(1, 1)
        self.known = known  # by setting: ideal step [s], CV [1]

    def find_ideal(self, point):
        point.ideal, _ = self.known[point.setting["name"]]

    def extend(self, point, n):
        ideal, cv = self.known[point.setting["name"]]
        lanes = np.where(np.arange(BLOCK) % 2, 1.0, -1.0)
        point.times = np.tile(ideal * (1.0 + cv * lanes), (n, 1))

    def find_exposed(self, point, n):
        return point.exposed


def test_a_spread_found_late_brings_back_what_was_left_out(small):
    """A wide setting's p50 may lie far below its mean; how wide they get shows on the way."""
    known = {"own": (1.0, 0.001), "wide": (1.0005, 0.1), "late": (1.04, 0.1), "far": (1.2, 0.1)}
    least = {"own": 0.9, "wide": 0.95, "late": 1.03, "far": 1.15}
    points = [
        Point(setting={"name": name}, job=small, own=name == "own", least=least[name])
        for name in known
    ]
    simulate_points(points, Pretended(known), 2, "p50", skip=True)
    assert [bool(point.n) for point in points] == [True, True, True, False]


@pytest.mark.usefixtures("few_quiet")
def test_skipping_loses_none_of_the_best(small):
    """Every layout simulated to the end gives the same choices."""
    values, bench = given_values(small), Bench(1, 2)
    points, every = [], []
    for setting, follows in some(layouts(small, 16), 4):
        job = job_at(values, setting, follows, "job")
        least = least_seconds(job)
        points.append(Point(setting=setting, job=job, least=least, own=job == small))
        every.append(Point(setting=setting, job=job))
        bench.find_ideal(every[-1])
        assert 0.0 < least <= every[-1].ideal
    simulate_points(points, bench, 16, "p95", skip=True)
    run = [point for point in points if point.n]
    for point in every:
        bench.extend(point, 16)
        point.slope = run[0].slope
    assert 0 < len(run) < len(points)
    assert 0 < sum(point.done for point in points) <= len(run)
    figures = np.array([[p.figure("p50"), p.figure("p95")] for p in every])
    assert (figures >= [[p.ideal * 0.999] * 2 for p in every]).all()
    chosen, row = choose(points, "p95"), make_rows(points, "p95")
    best = [every[i].setting for i in (*figures.argmin(axis=0), *pareto(figures))]
    found = [row[i] for i in (chosen["fastest"], chosen["robust"], *chosen["frontier"])]
    assert [[str(r[key]) for key in best[0]] for r in found] == [list(b.values()) for b in best]
    assert [r["p95"] for r in found] == [every[i].figure("p95") for i in (
        *figures.argmin(axis=0), *pareto(figures))]  # fmt: skip
    assert all(r["p50"] is None for r in row if r["figures"] == "bound")


@pytest.mark.parametrize("seed", [1, 4])
def test_few_clusters_tell_what_rare_slow_gpus_do(small, seed):
    """8 clusters, of which too many or none hold a lemon, against 256."""
    keys = {"variability.effects.rank.lemon_fraction": "0.006",
            "variability.effects.rank.lemon_slowdown": "[1.24, 1.25]"}  # fmt: skip
    job = job_at(given_values(small), keys, (), "job")
    few, many = (Point(setting={}, job=job, slope=1.0) for _ in range(2))
    Bench(seed, 2).extend(few, 8)
    Bench(seed, 2).extend(many, 256)
    truth = np.quantile(many.times, 0.95)
    assert few.figure("p95") == pytest.approx(truth, rel=0.015)
    assert abs(np.quantile(few.times, 0.95) / truth - 1.0) > 0.08  # what they say alone


@pytest.mark.usefixtures("few_quiet")
def test_layouts_of_other_clusters_and_microbatches(bare):
    sizes = {"cluster.nodes": [1, 2], "parallelism.microbatch_size": [1, 2, 3]}
    vary = sizes | {"parallelism.cp": [1]}
    numbers = prism.summary(sweep(bare, vary, layouts=True, replicates=BLOCK, seed=1))
    for row in numbers["rows"]:
        sizes = {key: row[f"parallelism.{key}"] for key in KEYS}
        gpus = sizes["tp"] * sizes["cp"] * sizes["pp"] * sizes["dp"]
        assert row["world_size"] == gpus == 8 * row["cluster.nodes"]
        mbs = row["parallelism.microbatch_size"]
        assert sizes["dp"] * sizes["microbatches"] * mbs == 16
        assert row["work"] == 1.0
    assert sum(row["own"] for row in numbers["rows"]) == 1
    refused = [row for row in numbers["refused"] if "does not divide the global" in row["reason"]]
    assert [row["cluster.nodes"] for row in refused] == ["1", "2"]


def test_keys_of_a_layout_say_which_are_taken(small, all_layouts):
    vary = {"parallelism.cp": [1], "parallelism.pp": [1, 2]}
    numbers = prism.summary(sweep(small, vary, layouts=True, replicates=BLOCK, seed=1))
    asked = [row for row in all_layouts["rows"]
             if row["parallelism.cp"] == 1 and row["parallelism.pp"] in (1, 2)]  # fmt: skip
    layout = [tuple(row[f"parallelism.{key}"] for key in KEYS) for row in numbers["rows"]]
    assert sorted(layout) == sorted(tuple(r[f"parallelism.{k}"] for k in KEYS) for r in asked)
    assert "by_setting" not in numbers
    with pytest.raises(PrismError, match="no layout of those asked for"):
        sweep(small, {"parallelism.tp": [7]}, layouts=True)


@pytest.mark.usefixtures("few_quiet")
def test_a_setting_that_no_layout_mends_is_refused_once(small):
    vary = {"variability.library": ["h100-healthy", "h100x"], "parallelism.cp": [1]}
    numbers = prism.summary(sweep(small, vary, layouts=True, replicates=BLOCK, seed=1))
    wrong = [row for row in numbers["refused"] if "h100x" in row["reason"]]
    assert [row["variability.library"] for row in wrong] == ["h100x"]


def test_explicit_durations_have_one_layout(pipeline):
    with pytest.raises(PrismError, match="--layouts needs a model's sizes"):
        sweep(pipeline, layouts=True)


@pytest.mark.usefixtures("few_quiet")
def test_layouts_by_a_setting_varied_by_hand(bare):
    key = "variability.effects.rank.cv"
    vary = {key: [0.01, 0.08], "parallelism.cp": [1]}
    numbers = prism.summary(sweep(bare, vary, layouts=True, replicates=BLOCK, seed=1))
    assert [row[key] for row in numbers["by_setting"]] == [0.01, 0.08]
    for found in numbers["by_setting"]:
        mine = [row for row in numbers["rows"] if row[key] == found[key]]
        chosen = numbers["rows"][found["robust"]]
        assert chosen in mine
        assert chosen["p95"] == min(row["p95"] for row in mine if row["p95"] is not None)
        (own,) = [row for row in mine if row["own"]]
        assert own["figures"] == "full"
        assert chosen["p95_change"] is None or chosen["p95_change"] < 0.05


# ------------------------------------------------------------------------------ figures
def test_rows_are_what_a_simulation_says(small):
    vary = {"parallelism.microbatches": [4, 8]}
    numbers = prism.summary(sweep(small, vary, replicates=2 * BLOCK, seed=5))
    for m in (4, 8):
        row = row_at(numbers, microbatches=m)
        alone = simulate(job_at(given_values(small), {"parallelism.microbatches": str(m)}, (),
                                "job"), 2 * BLOCK, seed=5)  # fmt: skip
        steps = alone.step_time.to_numpy()
        assert row["step_time"]["p50"] == np.quantile(steps, 0.5)
        assert row["step_time"]["p95"] == np.quantile(steps, 0.95)
        assert row["ideal_step_time"] == float(alone.ideal_step_time)
        assert row["mfu"] == pytest.approx(float(alone.mfu))
        assert row["exposed_communication"] == pytest.approx(
            float(alone.exposed_communication), rel=0.2, abs=0.01
        )
        assert row["own"] == (m == 4)


def test_unequal_work_is_compared_per_token(pipeline):
    # without noise a step takes (m + p - 1) (t_f + t_b) = 3 (m + 3)
    lines = PIPELINE.splitlines(keepends=True)
    pipeline.write_text("".join(line for line in lines if "effects" not in line))
    vary = {"parallelism.microbatches": [4, 8, 16]}
    numbers = prism.summary(sweep(pipeline, vary, replicates=2 * BLOCK, seed=1))
    for m in (4, 8, 16):
        row = row_at(numbers, microbatches=m)
        assert row["p50"] == pytest.approx(3 * (m + 3), rel=1e-6)
        assert row["p50_same_work"] == pytest.approx(3 * (m + 3) * 8 / m, rel=1e-6)
        assert (
            row["p95_change"] is None
            if m == 8
            else row["p95_change"] == pytest.approx((m + 3) * 8 / m / 11 - 1, rel=1e-5)
        )
    assert numbers["rows"][numbers["fastest"]]["parallelism.microbatches"] == 16
    assert numbers["frontier"] == [0]
    assert "per token" in " ".join(numbers["notes"])


def test_other_numbers_of_gpus_are_said(pipeline):
    vary = {"parallelism.dp": [2, 4]}
    numbers = prism.summary(sweep(pipeline, vary, replicates=BLOCK, seed=1))
    assert [row["work"] for row in sorted(numbers["rows"], key=lambda r: r["work"])] == [1.0, 2.0]
    assert "different numbers of GPUs" in " ".join(numbers["notes"])


def test_same_bits_for_any_threads_and_any_order(pipeline):
    vary = {"parallelism.microbatches": [4, 8, 12], "variability.effects.residual.cv": [0.02, 0.1]}
    one = prism.summary(sweep(pipeline, vary, replicates=6 * BLOCK, seed=3, threads=1))
    turned = {key: values[::-1] for key, values in reversed(vary.items())}
    two = prism.summary(sweep(pipeline, turned, replicates=6 * BLOCK, seed=3, threads=2))
    keys = ("p50", "p95", "mean", "clusters", "figures", "p95_change")
    assert [[row[k] for k in (*vary, *keys)] for row in one["rows"]] == [
        [row[k] for k in (*vary, *keys)] for row in two["rows"]
    ]


def test_common_random_numbers_make_differences_sharp(pipeline):
    """Two settings that differ little: the paired error is far below that of either."""
    bench = Bench(2, 1)
    base, other = load_job(pipeline), load_job(pipeline, ["parallelism.microbatches=9"])
    points = [Point(setting={}, job=base), Point(setting={}, job=other, work=9 / 8)]
    for point in points:
        bench.extend(point, 32)
    paired = difference(points[1], points[0], "p95")
    alone = [p.values("p95").std(ddof=1) / np.sqrt(32) / p.figure("p95") for p in points]
    base = points[0].figure("p95")
    assert paired.error / base < 0.5 * np.hypot(*alone)
    assert paired.mean / base == pytest.approx((9 + 3) / 9 * 8 / 11 - 1, abs=0.01)


# ------------------------------------------------------------------------------ choosing
@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_the_frontier_is_what_no_setting_beats(points):
    figures = np.array(points, float)
    found = pareto(figures)
    for i, a in enumerate(points):
        beaten = any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in points)
        assert (i in found) == (not beaten)


def test_how_sure_a_choice_is(pipeline):
    bench = Bench(2, 1)
    job = load_job(pipeline)
    best, same, far = (Point(setting={}, job=job) for _ in range(3))
    for point in (best, same, far):
        bench.extend(point, 8)
    far.times = far.times * 1.05
    assert probability_best(best, [best, same, far], "p95", 0.001) > 0.99
    assert probability_best(far, [best, same, far], "p95", 0.001) < 0.01


# ------------------------------------------------------------------------------ what is wrong
def test_one_bad_setting_is_refused_and_the_others_run(pipeline):
    vary = {"parallelism.microbatches": [4, 6], "parallelism.schedule": ["1f1b", "interleaved"]}
    numbers = prism.summary(sweep(pipeline, vary, replicates=BLOCK, seed=1))
    assert len(numbers["rows"]) + len(numbers["refused"]) == 4 and numbers["refused"]
    (told,) = numbers["warnings"]
    assert f"{len(numbers['refused'])} of 4" in told


@pytest.mark.parametrize(
    ("key", "values", "wrong"),
    [
        ("parallelism.recompute", ["none", "attention"], "attention"),
        ("parallelism.data_parallel", ["ddp", "zero2"], "zero2"),
        ("parallelism.microbatches", [4, 0], "0"),
        ("parallelism.tpp", [1, 2], "1"),
        ("cluster.links.network.efficiency", [0.5, 1.5], "1.5"),
    ],
)
def test_a_value_that_is_never_legal_ends_the_sweep(pipeline, key, values, wrong):
    with pytest.raises(PrismError, match=f"^vary {key}={wrong}: "):
        sweep(pipeline, {key: values, "run.steps": [1, 2]}, replicates=BLOCK, seed=1)


@pytest.mark.parametrize(
    ("vary", "words"),
    [
        ({}, "nothing to vary"),
        ({"parallelism.dq": [1, 2]}, r"(?s)vary parallelism.dq="),
        ({"dp": [1]}, "vary dp="),
        ({"parallelism.dp": "1,2"}, "expected a list"),
        ({"parallelism.dp": []}, "no values"),
    ],
)
def test_nothing_to_run(pipeline, vary, words):
    with pytest.raises(PrismError, match=words):
        sweep(pipeline, vary, seed=1)


def test_numbers_out_of_range(pipeline):
    vary = {"parallelism.dp": [1, 2]}
    with pytest.raises(PrismError, match="objective p42"):
        sweep(pipeline, vary, objective="p42")
    with pytest.raises(PrismError, match="replicates = 0"):
        sweep(pipeline, vary, replicates=0)


# ------------------------------------------------------------------------------ kept and rebuilt
def test_a_result_is_kept_and_rebuilds_its_call(pipeline, tmp_path):
    vary = {"parallelism.microbatches": [4, 8], "parallelism.schedule": ["1f1b", "gpipe"]}
    made = prism.sweep(pipeline, vary, replicates=2 * BLOCK, seed=7, objective="mean")
    save(made, tmp_path / "result.nc")
    kept = load(tmp_path / "result.nc")
    again = reproduce(kept, threads=1)
    for name in ("p50", "p95", "mean", "clusters", "memory_gib"):
        if name in made:
            np.testing.assert_array_equal(kept[name], again[name])
    assert kept.parallelism_schedule.to_numpy().tolist().count("gpipe") == 2
    assert all(kept[name].attrs["units"] and kept[name].attrs["long_name"] for name in kept)
    assert prism.summary(kept) == json.loads(json.dumps(prism.summary(made)))
    per_token = (made["mean"] / made["work"]).to_numpy()
    assert per_token[0] == per_token.min() == prism.summary(kept)["rows"][0]["mean_same_work"]


@pytest.mark.usefixtures("few_quiet")
def test_chunks_follow_a_schedule_that_is_varied():
    sizes = {"n_layers": 8, "hidden_size": 256, "ffn_size": 512, "n_heads": 4, "vocab_size": 512,
             "seq_len": 128}  # fmt: skip
    layout = {"pp": 4, "dp": 2, "microbatches": 8}
    rest = {"cluster": {"nodes": 1}, "variability": {"library": None}}
    job = job_from_dict({"model": sizes, "parallelism": layout, **rest})
    vary = {"parallelism.schedule": ["gpipe", "1f1b", "interleaved"]}
    found = prism.summary(sweep(job, vary, replicates=64, seed=1))
    taken = {row["parallelism.schedule"]: row["parallelism.vpp"] for row in found["rows"]}
    assert taken == {"gpipe": 1, "1f1b": 1, "interleaved": 2}
    own = [row for row in found["rows"] if row["own"]]
    assert [row["parallelism.schedule"] for row in own] == ["1f1b"]
    # the job's own chunks and split where the schedule takes them
    split = [1, 1, 1, 1, 1, 1, 1, 1]
    layout_of = {"parallelism": {**layout, "vpp": 2, "layer_split": split}}
    chunked = job_from_dict({"model": sizes, **rest, **layout_of})
    found = prism.summary(sweep(chunked, vary, replicates=64, seed=1))
    assert {row["parallelism.vpp"] for row in found["rows"]} == {1, 2}
    assert [row["parallelism.schedule"] for row in found["rows"] if row["own"]] == ["interleaved"]
    assert not found["refused"]
    # what other chunks do not mend is said, and vpp that is varied too does not follow
    uneven = job_from_dict({
        "model": sizes, **rest, "parallelism": {**layout, "microbatches": 6}
    })  # fmt: skip
    found = prism.summary(sweep(uneven, vary, replicates=64, seed=1))
    (refused,) = found["refused"]
    assert refused["parallelism.schedule"] == "interleaved"
    assert "interleaved with 6 microbatches" in refused["reason"]
    found = prism.summary(sweep(job, vary | {"parallelism.vpp": [1, 2]}, replicates=64, seed=1))
    assert (len(found["rows"]), len(found["refused"])) == (3, 3)


@pytest.mark.usefixtures("few_quiet")
def test_replicas_and_microbatches_follow_sizes_that_are_varied(bare):
    found = prism.summary(sweep(bare, {"parallelism.tp": [1, 2, 4]}, replicates=64, seed=1))
    rows = {row["parallelism.tp"]: row for row in found["rows"]}
    assert sorted(rows) == [1, 2, 4] and not found["refused"]
    for tp, row in rows.items():
        assert row["parallelism.dp"] * tp * 2 == row["world_size"] == 16
        assert row["parallelism.dp"] * row["parallelism.microbatches"] == 16  # the job's batch
    assert [tp for tp, row in rows.items() if row["own"]] == [2]
    # sizes that are varied too do not follow, and what does not divide is refused as ever
    fixed = {"parallelism.tp": [2, 4], "parallelism.dp": [4]}
    found = prism.summary(sweep(bare, fixed, replicates=64, seed=1))
    assert (len(found["rows"]), len(found["refused"])) == (1, 1)
    odd = prism.summary(sweep(bare, {"parallelism.pp": [2, 3]}, replicates=64, seed=1))
    assert [row["parallelism.pp"] for row in odd["refused"]] == ["3"]
    nodes = prism.summary(sweep(bare, {"cluster.nodes": [2, 4]}, replicates=64, seed=1))
    assert [row["world_size"] for row in nodes["rows"]] == [32, 16]
    assert {row["work"] for row in nodes["rows"]} == {1.0}


def test_exposed_communication_is_that_of_an_estimate(small):
    found = sweep(small, {"variability.effects.step.cv": [0.0, 0.01]}, replicates=512, seed=4)
    rows = [r for r in prism.summary(found)["rows"] if r["variability.effects.step.cv"] == 0.01]
    job = job_at(given_values(small), {"variability.effects.step.cv": "0.01"}, (), small.name)
    alone = simulate(job, replicates=512, seed=4)
    assert rows[0]["exposed_communication"] == float(alone.exposed_communication) > 0.0


# ------------------------------------------------------------------------------ what fits
@pytest.fixture(scope="module")
def tight():
    """A job whose fastest settings keep everything, which its GPUs cannot."""
    return load_job("llama3-70b-fsdp-512", TIGHT)


TIGHT = ["cluster.nodes=8", "parallelism.dp=64"]
VARIED = {"parallelism.recompute": ["full", "none"], "parallelism.microbatch_size": ["1", "2"]}


@pytest.mark.usefixtures("few_quiet")
@pytest.mark.parametrize("least", [0.5, 0.9])
def test_what_is_not_likely_to_fit_is_not_chosen(tight, least):
    made = sweep(tight, VARIED, replicates=2 * BLOCK, seed=1, min_p_fits=least)
    found = prism.summary(made)
    rows = found["rows"]
    chances = [row["memory"]["p_fits"] for row in rows]
    np.testing.assert_array_equal(made["p_fits"], chances)
    fastest = min(rows, key=lambda row: row["p95_same_work"])
    assert fastest["memory"]["p_fits"] < 0.01 and not fastest["likely_fits"]
    fit = [i for i, row in enumerate(rows) if row["memory"]["p_fits"] >= least]
    assert 0 < len(fit) < len(rows) and fit == list(range(len(fit)))  # first, then the others
    for name, measure in {"fastest": "p50", "robust": "p95", "best": "p95"}.items():
        assert found[name] == min(fit, key=lambda i: rows[i][f"{measure}_same_work"])
    assert set(found["frontier"]) <= set(fit)
    assert rows[0]["best_change"] is None
    codes = [finding.code for finding in prism.answer(made).findings]
    assert "does_not_fit" in codes


@pytest.mark.usefixtures("few_quiet")
def test_layouts_and_varied_settings_are_held_to_the_same():
    job = load_job("llama3-70b-fsdp-512", [*TIGHT, "parallelism.recompute=none"])
    keys = {
        "parallelism.tp": ["1", "8"],
        "parallelism.pp": ["1", "2", "4"],
        "parallelism.cp": ["1"],
    }
    for least in (0.5, 0.9):
        options = {"replicates": BLOCK, "seed": 1, "min_p_fits": least}
        found = prism.summary(sweep(job, keys, layouts=True, **options))
        rows = {i: row for i, row in enumerate(found["rows"]) if not row["own"]}
        assert rows and all(row["memory"]["p_fits"] >= least for row in rows.values())
        (own,) = [row for row in found["rows"] if row["own"]]
        assert own["memory"]["p_fits"] < 0.01 and own["p95"] is not None
        # the own setting is faster than what fits, and neither chosen nor cause to skip that
        assert own["p95"] < min(row["p95"] for row in rows.values() if row["p95"])
        assert {found["fastest"], found["robust"], found["best"]} <= set(rows)
        assert all("P(fits)" in row["reason"] for row in found["refused"])


@pytest.mark.usefixtures("few_quiet")
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
    assert (tmp_path / "out" / "sweep.png").exists()
    assert run("report", tmp_path / "out", "-o", tmp_path / "page.html", "-q")[0] == 0


def test_a_probability_of_fitting_is_one(pipeline, run):
    with pytest.raises(PrismError, match="min_p_fits"):
        sweep(pipeline, {"run.steps": [1, 2]}, min_p_fits=90.0)
    assert run("sweep", pipeline, "--vary", "run.steps=1,2", "--min-p-fits", 90)[0] == 2
    # where no memory is known all settings may be chosen
    found = prism.summary(sweep(pipeline, {"run.steps": [1, 2]}, replicates=BLOCK, min_p_fits=1))
    assert found["fastest"] is not None and found["rows"][0]["memory"] is None
