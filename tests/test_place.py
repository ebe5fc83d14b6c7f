"""Placing slow nodes: closed forms of pipelines, every placement by hand, alternatives, errors."""

import json
from itertools import permutations
from math import comb

import numpy as np
import pytest
from drawn_steps import draw_steps
from pipeline_synth import Effects, Layout, as_production, make_trace

import prism

NOISE = {"rank": {"cv": 0.01}, "step": {"cv": 0.01}, "microbatch": {"cv": 0.02},
         "residual": {"law": "lognormal", "cv": 0.02}}  # fmt: skip


def pipeline(p, m, forward, backward, dp=1, effects=None, cluster=None, **parallelism):
    """Explicit durations, one GPU per node: nodes are stages, by replica."""
    layout = {"pp": p, "microbatches": m, "dp": dp, "schedule": "1f1b", "p2p": "async"}
    return prism.load_job({
        "model": {"durations": {"forward_s": forward, "backward_s": backward}},
        "parallelism": layout | parallelism,
        "cluster": {"gpus_per_node": 1, "placement": "tp-cp-pp-dp", **(cluster or {})},
        "variability": {"library": None, "effects": effects or {}},
    })  # fmt: skip


def small(dp=3, pp=4, tp=2, cluster=None, effects=NOISE, run=None, **parallelism):
    """A small model, one (tp) group per node."""
    return prism.load_job({
        "model": {
            "n_layers": 8, "hidden_size": 2048, "ffn_size": 5632, "n_heads": 16,
            "vocab_size": 32_000, "seq_len": 4096,
        },
        "parallelism": {"tp": tp, "pp": pp, "dp": dp, "microbatches": 4} | parallelism,
        "cluster": {
            "nodes": dp * pp, "gpus_per_node": tp, "placement": "tp-cp-pp-dp", **(cluster or {})
        },
        "variability": {"library": None, "effects": effects}, "run": run or {},
    })  # fmt: skip


def slow(**nodes):
    """Slow nodes by number: n3=1.2."""
    return {int(name[1:]): prism.slow_node(factor) for name, factor in nodes.items()}


def placed(job, **options):
    """A summary, and its placements by name."""
    found = prism.summary(prism.place(job, **{"seed": 1, **options}))
    rows = {row["name"]: row for row in found["placements"]}
    return found, {which: rows[found[which]] for which in ("current", "best", "worst")} | rows


def one_slow_stage(p, m, backward, x):
    """``T(s)`` of one slow stage s in asynchronous 1F1B whose transfers take no time."""
    t = 1.0 + backward
    hidden = min(x * t, (1.0 + x) * min(1.0, backward), t)
    return (m + p - 1) * t + m * x * t - (p - 1 - np.arange(p)) * hidden


def step_of(job):
    """Step of a job that does not vary [s]."""
    return float(draw_steps(job, 64, 1).step_time.mean())


# ------------------------------------------------------------------------------- closed forms
@pytest.mark.parametrize(
    ("p", "m", "backward", "x"),
    [(2, 2, 2.0, 0.2), (4, 4, 0.5, 0.7), (4, 9, 3.1, 0.05), (8, 32, 1.0, 1.0), (5, 40, 2.0, 2.5),
     (16, 16, 2.0, 0.2)],
)  # fmt: skip
def test_one_slow_node_of_a_pipeline(p, m, backward, x):
    """What it costs at each stage, and so where it is best and worst, and what that saves."""
    form, own = one_slow_stage(p, m, backward, x), p // 2
    found, rows = placed(pipeline(p, m, 1.0, backward), nodes={own: prism.slow_node(1.0 + x)})
    base = (m + p - 1) * (1.0 + backward)
    cost = np.array(found["slot_cost"])[:, 0]
    np.testing.assert_allclose(cost, form - base, rtol=1e-3, atol=1e-4 * base)
    assert [row["cost"] for row in found["stage_slack"]] == pytest.approx(cost.tolist(), rel=1e-3)
    assert found["alike_step"] == pytest.approx(base, rel=1e-5)
    assert found["n_screened"] == p and found["method"] == "all placements up to symmetry"
    for which, stage in (("best", 0), ("current", own), ("worst", p - 1)):
        assert rows[which]["stages"] == [stage]
        for figure in ("mean", "p50", "p95", "p99", "objective", "nominal"):
            assert rows[which][figure] == pytest.approx(form[stage], rel=1e-5)
        assert rows[which]["saved"] == pytest.approx(1.0 - form[stage] / form[own], abs=1e-5)
    assert found["healthy"]["p50"] == pytest.approx(base, rel=1e-5)
    assert found["healthy"]["saved"] == pytest.approx(1.0 - base / form[own], abs=1e-5)
    for figure in ("p50", "p95"):
        assert found[f"worst_over_best_{figure}"] == pytest.approx(form[-1] / form[0], rel=1e-5)
    (node,) = found["slow_nodes"]
    assert node["compute"] == pytest.approx(1.0 + x)
    assert (node["before"]["stages"], node["after"]["stages"]) == ([own], [0])
    assert found["p_correct"] == 1.0
    assert found["slow_nodes"][0]["node"] == own and rows["best"]["hosts_changed"] == 2


def test_schedules_differ_in_what_they_hide():
    """GPipe hides nothing: every stage costs what the last one does in 1F1B, and nodes stay.

    A rendezvous of transfers that take no time hides what asynchronous ones do.
    """
    form = one_slow_stage(5, 9, 1.3, 0.4) - 13 * 2.3
    gpipe, rows = placed(pipeline(5, 9, 1.0, 1.3, schedule="gpipe"), nodes=slow(n2=1.4))
    assert np.ravel(gpipe["slot_cost"]) == pytest.approx([form[-1]] * 5, rel=1e-3)
    assert rows["best"] is rows["current"] and gpipe["p_correct"] == 1.0
    assert gpipe["action"] == "current"
    blocking = placed(pipeline(5, 9, 1.0, 1.3, p2p="blocking"), nodes=slow(n2=1.4))[0]
    assert np.ravel(blocking["slot_cost"]) == pytest.approx(form, rel=1e-3)


def test_slack_of_stages():
    """Equal stages have none; one of two thirds of the work may be slower by half."""
    even = placed(pipeline(4, 8, 1.0, 2.0), nodes=slow(n0=1.2))[0]
    assert max(row["slack"] for row in even["stage_slack"]) < 1e-3
    heavy = [3.0, 3.0, 2.0, 3.0]
    job = pipeline(4, 64, heavy, [2.0 * t for t in heavy])
    found, rows = placed(job, nodes=slow(n0=1.2))
    slack = [row["slack"] for row in found["stage_slack"]]
    assert [row["stage"] for row in found["stage_slack"]] == [0, 1, 2, 3]
    assert 0.45 < slack[2] < 0.6 and max(slack[i] for i in (0, 1, 3)) < 0.01
    assert rows["best"]["stages"] == [2]
    # a tenth of what a node that works all the time would cost is not felt yet
    at, base = (step_of(job.replace({"cluster.node_slowdowns": {2: 1.0 + x}}))
                for x in (slack[2], 0.0))  # fmt: skip
    assert at - base == pytest.approx(0.1 * slack[2] * base, rel=0.05)
    # one microbatch: a node works a quarter of the time, and all that it loses is lost
    single = placed(pipeline(4, 1, 1.0, 2.0), nodes=slow(n0=1.2))[0]
    assert [row["cost"] for row in single["stage_slack"]] == pytest.approx([0.6] * 4, rel=1e-3)
    assert max(row["slack"] for row in single["stage_slack"]) < 1e-3


@pytest.mark.parametrize("p", [3, 4])
def test_number_of_placements_up_to_symmetry(p):
    """Three equal nodes: C(p, 3) in one replica, C(p, 2) p in two, C(p + 2, 3) in three."""
    found = placed(pipeline(p, 4, 1.0, 2.0, dp=4), nodes=slow(n0=1.2, n5=1.2, n9=1.2))[0]
    assert found["n_screened"] == comb(p, 3) + comb(p, 2) * p + comb(p + 2, 3)


@pytest.mark.parametrize("kind", ["compute", "memory", "network", "everything"])
def test_the_best_and_the_worst_of_every_placement(kind):
    """Each placement of two nodes, by hand: hosts permuted in the job itself."""
    nodes = {1: prism.slow_node(1.5, kind), 4: prism.slow_node(1.2, kind)}
    calm = {name: {"cv": 0.0} for name in NOISE}
    job = small(2, 3, 2, effects=calm, layer_split=[3, 3, 2])
    found, rows = placed(job, nodes=nodes, tolerance=1e-6)
    keys = ("compute", "memory", "network", "other")
    factors = {n: {k: x for k, x in zip(keys, f, strict=True) if x is not None}
               for n, f in nodes.items()}  # fmt: skip
    steps = {}
    for first, last in permutations(range(6), 2):
        rest = iter(n for n in range(6) if n not in nodes)
        hosts = [{first: 1, last: 4}.get(slot) or next(rest) for slot in range(6)]
        hosts = [1 if s == first else 4 if s == last else h for s, h in enumerate(hosts)]
        changed = {"cluster.hosts": hosts, "cluster.node_slowdowns": factors}
        steps[first, last] = step_of(job.replace(changed))
    assert rows["current"]["p50"] == pytest.approx(steps[1, 4], rel=1e-5)
    assert rows["best"]["p50"] == pytest.approx(min(steps.values()), rel=1e-5)
    assert rows["worst"]["p50"] == pytest.approx(max(steps.values()), rel=1e-5)
    assert max(steps.values()) > 1.001 * min(steps.values())


# ------------------------------------------------------------------------------ alternatives
def test_alternatives_have_their_own_closed_forms():
    """Two slow nodes in one of four replicas, one spare: what each alternative leaves."""
    job = pipeline(4, 8, 1.0, 2.0, dp=4)
    found, rows = placed(job, nodes=slow(n1=1.5, n2=1.2), spares=1)
    others = found["alternatives"]
    assert list(others) == ["all_in_one_replica", "random", "drop_nodes", "spares", "fewer_layers"]
    base = 11 * 3.0
    # the spare takes the place of the slowest; the other goes where it costs least
    spared = one_slow_stage(4, 8, 2.0, 0.2)[0]
    assert others["spares"]["p95"] == pytest.approx(spared, rel=1e-5)
    assert others["spares"]["saved"] == pytest.approx(1 - spared / rows["current"]["p95"], abs=1e-5)
    # 14 nodes and the spare hold three replicas of four: as fast, of three quarters of the batch
    drop = others["drop_nodes"]
    assert drop["work"] == 0.75 and drop["p50"] == pytest.approx(base, rel=1e-5)
    for figure in ("mean", "p50", "p95", "p99", "objective"):
        assert drop[f"{figure}_same_work"] == pytest.approx(base / 0.75, rel=1e-5)
    lost = 1 - base / 0.75 / rows["current"]["p95"]
    assert drop["saved"] == pytest.approx(lost, abs=1e-5)
    low, high = (rows[which]["objective"] for which in ("best", "worst"))
    assert low <= others["random"]["p5_of_objective"] <= others["random"]["objective"]
    assert others["random"]["objective"] <= others["random"]["p95_of_objective"] <= high * 1.00001
    assert "impossible" in others["fewer_layers"] and "p95" not in others["fewer_layers"]
    assert found["action"] == "spares"


@pytest.mark.parametrize(("spares", "left"), [
    ({16: 1.03, 17: 0.97}, 0.0), ({16: 0.97, 17: 1.03}, 0.0), ({16: 1.03}, 0.03),
    ({16: 1.04, 17: 1.03}, 0.03), ({16: 1.5}, None), ({16: 1.7}, None),
])  # fmt: skip
def test_the_fastest_spare_takes_the_place_if_it_is_faster(spares, left):
    machine = {"hosts": [*range(16)], "nodes": 16 + len(spares)}
    job = pipeline(4, 8, 1.0, 2.0, dp=4, cluster=machine)
    nodes = {node: prism.slow_node(x) for node, x in ({1: 1.5} | spares).items()}
    row = placed(job, nodes=nodes)[0]["alternatives"]["spares"]
    if left is None:
        assert "impossible" in row
    else:  # another replica has no slow node
        expected = max(one_slow_stage(4, 8, 2.0, left)[1], 33.0)
        assert row["p95"] == pytest.approx(expected, rel=1e-5)


def test_inventories_in_which_all_nodes_differ_may_have_spares():
    job = pipeline(4, 8, 1.0, 2.0, dp=4, cluster={"hosts": [*range(16)], "nodes": 17})
    speeds = {n: (0.98, 1.0, 1.02)[n % 3] for n in range(16)} | {1: 1.5, 16: 0.97}
    found, rows = placed(job, nodes={n: prism.slow_node(x) for n, x in speeds.items()})
    assert found["alternatives"]["spares"]["p95"] < rows["best"]["p95"] <= rows["current"]["p95"]


def test_what_cannot_be_done_is_said():
    one = placed("pipeline-8x32", nodes=slow(n0=1.2))[0]["alternatives"]
    assert all("impossible" in one[name] for name in ("drop_nodes", "spares", "fewer_layers"))
    # nothing can be done about a node that no rank is on, though layers could move
    cluster = {"nodes": 3, "hosts": [1], "gpus_per_node": 2}
    job = small(1, 2, 1, cluster, layer_split=[5, 3])
    found, rows = placed(job, nodes=slow(n0=1.1))
    assert rows["best"] is rows["current"]
    assert ["impossible" in found["alternatives"][x] for x in ("drop_nodes", "fewer_layers")] == [
        True, True
    ]  # fmt: skip
    # where all nodes are slow alike no place is better, and a spare still is
    found, rows = placed(pipeline(4, 8, 1.0, 2.0), slow_nodes=4, slowdown=1.2, spares=1)
    assert rows["best"] is rows["current"] and "p95" in found["alternatives"]["spares"]


@pytest.fixture(scope="module")
def noisy():
    """Sixteen nodes of which two are slow, and a spare, with every effect."""
    job = small(dp=4)
    return job, prism.place(job, nodes=slow(n1=1.3, n7=1.3), spares=1, seed=5, threads=2)


def test_a_job_without_its_slow_nodes_is_the_smaller_job(noisy):
    job, result = noisy
    found = prism.summary(result)
    nodes = [node["node"] for node in found["slow_nodes"]]
    for name, other in {"drop_nodes": job.replace("parallelism.dp=3", "cluster.nodes=12"),
                        "fewer_layers": None}.items():  # fmt: skip
        row = found["alternatives"][name]
        if other is not None:
            steps = draw_steps(other, 64 * 32, 9).step_time
            for q in (0.5, 0.95):
                figure = float(np.quantile(steps, q))
                assert row[f"p{round(100 * q)}"] == pytest.approx(figure, rel=0.01)
        assert row["p50"] < row["p95"] < row["p99"]
    healthy = draw_steps(job, 64 * 32, 9).step_time
    assert found["healthy"]["p95"] == pytest.approx(float(np.quantile(healthy, 0.95)), rel=0.01)
    now = job.replace({"cluster.node_slowdowns": dict.fromkeys(nodes, 1.3)})
    rows = {row["name"]: row for row in found["placements"]}
    steps = draw_steps(now, 64 * 32, 9).step_time
    assert rows[found["current"]]["p95"] == pytest.approx(float(np.quantile(steps, 0.95)), rel=0.01)


@pytest.mark.parametrize("node", range(4))
def test_the_replica_with_the_slow_node_is_dropped(node):
    """A replica per rack: the other one stays whole, and sends nothing between racks."""
    racks = {"tiers": {"rack": {"gpus": 4, "latency_us": 5000.0}}}
    job = small(2, 2, 2, cluster=racks, effects={name: {"cv": 0.0} for name in NOISE})
    one = job.replace("parallelism.dp=1", "cluster.nodes=2")
    found, _ = placed(job, nodes={node: prism.slow_node(1.5)})
    assert found["alternatives"]["drop_nodes"]["mean"] == pytest.approx(step_of(one), rel=1e-6)
    apart = one.replace("cluster.nodes=4", {"cluster.hosts": [0, 2]})
    assert step_of(apart) > 1.5 * step_of(one)


def test_a_layer_of_the_slow_stage_goes_to_the_stage_with_least_work():
    """Beside embedding and loss of the ends; the slow node where it costs least."""
    job = small(2, 4, 2, effects={name: {"cv": 0.0} for name in NOISE})
    at = [step_of(job.replace({"cluster.node_slowdowns": {s: 1.5}})) for s in range(4)]
    stage = int(np.argmin(at))
    steps = []
    for target in (1, 2):
        split = [2, 2, 2, 2]
        split[stage], split[target] = 1, 3
        keys = {"parallelism.layer_split": split, "cluster.node_slowdowns": {stage: 1.5}}
        steps.append(step_of(job.replace(keys)))
    row = placed(job, nodes=slow(n3=1.5))[0]["alternatives"]["fewer_layers"]
    assert row["p50"] == pytest.approx(steps[0], rel=1e-5) or stage in (1, 2)
    assert row["saved"] == pytest.approx(1.0 - row["p95"] / at[3], rel=1e-4)


@pytest.mark.parametrize("size", [2, 4])
def test_shard_groups_are_left_out_whole(size):
    job = small(8, 1, 1, data_parallel="hsdp", shard_size=size)
    drop = placed(job, slow_nodes=1, slowdown=1.3)[0]["alternatives"]["drop_nodes"]
    assert drop["work"] == 1.0 - size / 8


def test_world_wide_shards_do_not_care_where_a_node_is_and_groups_do():
    assert placed(small(8, 1, 1, data_parallel="fsdp"), nodes=slow(n3=1.2))[0]["n_screened"] == 1
    groups = small(8, 1, 1, data_parallel="hsdp", shard_size=4)
    # in one shard group, or in two
    assert placed(groups, nodes=slow(n0=1.2, n5=1.2))[0]["n_screened"] == 2


# ------------------------------------------------------------------------------------- choosing
def test_what_is_chosen_is_best_by_the_objective_and_paired(noisy):
    found = prism.summary(noisy[1])
    rows = {row["name"]: row for row in found["placements"]}
    best, now, worst = (rows[found[key]] for key in ("best", "current", "worst"))
    assert best["objective"] == best["p95"] and 0.9 < found["p_correct"] <= 1.0
    assert best["objective"] <= min(row["objective"] for row in rows.values()) * 1.001
    assert worst["objective"] == max(row["objective"] for row in rows.values())
    assert now["saved"] == 0.0 and best["saved"] > 0.01
    assert now["saved_ci"] == [0.0, 0.0]  # against itself nothing is left to chance
    for row in rows.values():
        assert row["p50"] < row["p95"] < row["p99"]
        assert row["objective_se"] == row["p95_se"]
        assert row["saved_ci"][0] <= row["saved"] <= row["saved_ci"][1]
    assert now["p95_se"] < 1.5 * best["p95_se"]
    own_draws = 2 * 1.96 * np.hypot(best["p95_se"], now["p95_se"] * best["p95"] / now["p95"])
    assert np.ptp(best["saved_ci"]) < 0.7 * own_draws / now["p95"]  # on the same: sharper
    saved = {name: row["saved"] for name, row in (found["alternatives"] | rows).items()
             if "saved_ci" in row and name != "all_in_one_replica"}  # fmt: skip
    assert saved[found["action"]] == max(saved.values())
    assert np.shape(found["slot_cost"]) == (4, 4)
    assert json.loads(json.dumps(found)) == found


def test_a_tolerance_is_what_no_node_is_moved_for():
    """Moving the node of stage 1 to stage 0 gains 1.6 %."""
    job = pipeline(4, 8, 1.0, 2.0)
    for tolerance, moved in ((0.001, True), (0.02, True), (0.05, False)):
        found, rows = placed(job, nodes=slow(n1=1.2), tolerance=tolerance)
        assert (rows["best"] is not rows["current"]) == moved
        assert (found["tolerance"], found["p_correct"]) == (tolerance, 1.0)


def test_objectives_are_what_is_minimised_and_how_surely():
    """Two slow nodes at the same stage or in the same replica: nearly as good, with noise."""
    effects = {"residual": {"law": "normal", "cv": 0.2}}
    job = pipeline(2, 16, 1.0, 2.0, dp=2, effects=effects).replace("run.steps=50")
    sure = {}
    for objective in ("mean", "p50", "p95", "p99", "time_to_train"):
        found, rows = placed(job, nodes=slow(n0=1.05, n1=1.05), objective=objective)
        figure = "mean" if objective == "time_to_train" else objective
        factor = 50.0 if objective == "time_to_train" else 1.0
        for row in rows.values():
            assert row["objective"] == pytest.approx(factor * row[figure], rel=0.03)
        assert found["objective"] == objective and rows["best"]["stages"] == [0, 0]
        sure[objective] = found["p_correct"]
    assert len(set(sure.values())) == 5 and sure["mean"] > sure["p99"] > 0.5


def test_fast_node_goes_where_every_place_was_simulated_to_be_best():
    """Noise adds unequally to places: the deterministic best, stage 7, is not the best."""
    job = prism.load_job("pipeline-8x32", ["cluster.gpus_per_node=1", "cluster.nodes=8"])
    found, rows = placed(job, nodes=slow(n3=0.8))
    nominal = min(rows.values(), key=lambda row: row["nominal"])
    assert nominal["stages"] == [7] and rows["best"]["stages"] == [5]
    assert rows["best"]["objective"] == min(row["objective"] for row in rows.values())
    assert found["stage_slack"] == []  # no node is slower than the others


def test_the_same_seed_gives_the_same_answer_whatever_the_threads(noisy):
    job = small(2, 2)
    kept = [placed(job, slow_nodes=1, slowdown=1.2, seed=2, threads=n)[0] for n in (1, 3)]
    assert kept[0] | {"wall_seconds": 0} == kept[1] | {"wall_seconds": 0}
    # drawn by the seed
    drawn = {placed(job, slow_nodes=1, slowdown=1.2, seed=s)[0]["slow_nodes"][0]["node"]
             for s in range(6)}  # fmt: skip
    assert len(drawn) > 1


# ----------------------------------------------------------------------------- which are slow
def test_slow_nodes_of_the_job_itself_and_of_an_inventory(tmp_path):
    cluster = {"node_slowdowns": {5: 1.3, 6: {"network": 1.2}}}
    found = placed(small(cluster=cluster), objective="mean")[0]
    assert [node["node"] for node in found["slow_nodes"]] == [5, 6]
    assert found["slow_nodes"][1]["network"] == 1.2 and found["notes"] == []
    (tmp_path / "a.csv").write_text("node,slowdown\ng3,1.3\ng6,1.2\n")
    (tmp_path / "b.csv").write_text("node,network\ng3,1.4\n")
    files = [tmp_path / "a.csv", tmp_path / "b.csv"]
    nodes = prism.read_inventory(files, 16, hosts="g[0-15]")
    assert dict(nodes) == {3: prism.NodeSlowdown(1.3, network=1.4), 6: prism.NodeSlowdown(1.2)}
    result = prism.place(small(dp=4), nodes=nodes, seed=1)
    hosts = {node["host"]: node["compute"] for node in prism.summary(result)["slow_nodes"]}
    assert hosts == {"g3": 1.3, "g6": 1.2}
    prism.save(result, tmp_path / "result.nc")
    kept = prism.load(tmp_path / "result.nc")
    assert kept["host"].to_numpy().tolist() == [f"g{i}" for i in range(16)]
    assert prism.summary(kept) == prism.summary(result)
    order = kept["hosts"].sel(placement=kept.attrs["best"]).to_numpy()
    assert sorted(order) == list(range(16))
    for variable in kept.to_xarray().data_vars.values():
        words = variable.dtype.kind in "OUT"
        assert set(variable.attrs) >= {"long_name"} | (set() if words else {"units"})
    with pytest.raises(prism.PrismError):
        prism.read_inventory(tmp_path / "a.csv", 16)


def test_where_most_nodes_are_slow_the_others_are_placed_and_all_are_left_out():
    job = pipeline(4, 8, 1.0, 2.0, dp=6, cluster={"nodes": 26, "hosts": list(range(24))})
    found = placed(job, nodes={n: prism.slow_node(1.2) for n in range(22)})[0]
    assert [node["node"] for node in found["slow_nodes"]] == [22, 23]
    drop = found["alternatives"]["drop_nodes"]
    assert drop["work"] == 1 / 6  # four nodes are left, two of them spares
    assert drop["p50"] == pytest.approx(33.0, rel=1e-5)


def test_a_fitted_trace_finds_its_slow_worker(tmp_path):
    """Its measured workers are the inventory: the lemon stands out, and can be moved or dropped."""
    effects = Effects(rank_sd=0.01, step_sd=0.02, content_sd=0.03, lemons={(1, 0): 2.0})
    trace, path = tmp_path / "trace.csv", tmp_path / "lemon.nc"
    as_production(make_trace(Layout(4, 2, 4, 12), effects, 1)[0]).to_csv(trace, index=False)
    prism.save(prism.fit(trace, 0), path)
    found, rows = placed(str(path))
    (node,) = found["slow_nodes"]
    assert (node["before"]["stages"], node["before"]["replicas"]) == ([0], [1])
    assert node["compute"] == pytest.approx(2.0, rel=0.05)
    drop = found["alternatives"]["drop_nodes"]
    assert drop["work"] == 0.75 and drop["p50"] < 0.7 * rows["current"]["p50"]
    assert "impossible" in found["alternatives"]["fewer_layers"]
    for asked in ({"slow_nodes": 1, "slowdown": 1.2}, {"nodes": slow(n0=1.5)}):
        assert len(placed(str(path), **asked)[0]["slow_nodes"]) == 2
    with pytest.raises(prism.PrismError):
        prism.place(str(path), spares=1)


# ---------------------------------------------------------------------------- segments, tables
@pytest.mark.parametrize(("size", "nodes"), [(2, {1: 1.5, 3: 1.2}), (4, {5: 1.3}), (3, {0: 1.5})])
def test_segments_stay_whole_and_the_best_of_those_placements_is_found(size, nodes):
    """Against every permutation of segments, and of the nodes within each that has a slow one."""
    job = pipeline(3, 6, [2.0, 1.0, 2.0], [4.0, 2.0, 4.0], dp=4)
    found, rows = placed(job, nodes={n: prism.slow_node(x) for n, x in nodes.items()},
                         keep_segments=size, tolerance=1e-6)  # fmt: skip
    result = prism.place(job, nodes={n: prism.slow_node(x) for n, x in nodes.items()}, seed=1,
                         keep_segments=size, tolerance=1e-6)  # fmt: skip
    for order in result["hosts"].values:
        for segment in order.reshape(-1, size):
            assert len(set(segment // size)) == 1
    racks = [r for r in range(12 // size) if {n // size for n in nodes} & {r}]
    steps = {}
    for places in permutations(range(12 // size), len(racks)):
        for within in permutations(range(size)):
            rest = iter(r for r in range(12 // size) if r not in racks)
            racked = dict(zip(places, racks, strict=True))
            order = [racked[i] if i in racked else next(rest) for i in range(12 // size)]
            hosts = [
                r * size + (within[k] if r in racks else k) for r in order for k in range(size)
            ]
            at = tuple(hosts.index(n) for n in nodes)
            if at not in steps:
                keys = {"cluster.hosts": hosts, "cluster.node_slowdowns": nodes}
                steps[at] = step_of(job.replace(keys))
    assert rows["best"]["p50"] == pytest.approx(min(steps.values()), rel=1e-5)
    free = placed(job, nodes={n: prism.slow_node(x) for n, x in nodes.items()}, tolerance=1e-6)[1]
    assert free["best"]["p50"] <= rows["best"]["p50"] * 1.000001
    assert found["keep_segments"] == size


def test_a_spare_takes_a_place_only_in_its_own_rack():
    machine = {"hosts": [0, 1, 2, 4, 5, 6], "nodes": 8}
    job = pipeline(3, 6, 1.0, 2.0, dp=2, cluster=machine)
    for size, helped in ((3, True), (2, False)):
        if size == 3:  # racks of four, of which a segment takes three: one spare in each
            job = job.replace({"cluster.nvlink_domain_gpus": 4})
        else:
            job = pipeline(3, 6, 1.0, 2.0, dp=2, cluster={"hosts": [*range(6)], "nodes": 8})
        others = placed(job, nodes=slow(n1=1.5), keep_segments=size)[0]["alternatives"]
        assert ("p95" in others["spares"]) is helped
    with pytest.raises(prism.PrismError):  # slots 0 to 3 are on two racks as they are
        machine = {"hosts": [0, 1, 4, 5, 2, 3], "nodes": 8}
        placed(pipeline(3, 6, 1.0, 2.0, dp=2, cluster=machine), nodes=slow(n1=1.5), keep_segments=4)


def test_tables_and_files_of_a_result(noisy, tmp_path):
    job, result = noisy
    found = prism.summary(result)
    table = result.placements
    for row in found["placements"]:
        for key in ("p50", "p95", "p95_se", "saved", "run_saved"):
            assert table[key][row["name"]] == row[key]
        assert table.saved_low[row["name"]] == row["saved_ci"][0]
        # over the run's steps, in the mean
        now = next(r for r in found["placements"] if r["name"] == found["current"])
        saved = (now["mean"] - row["mean"]) * job.n_steps
        assert row["run_saved"] == pytest.approx(saved, rel=1e-6, abs=1e-6)
    assert table.attrs["fields"]["p95"]["unit"] == "s"
    assert set(result.alternatives.index) == set(found["alternatives"])
    assert result.stages.cost.tolist() == [row["cost"] for row in found["stage_slack"]]
    assert result.slow_nodes.index.tolist() == [1, 7]
    for which in ("best", "current"):
        files = result.host_files(found[which])
        order = result["hosts"].sel(placement=found[which]).values.tolist()
        assert files["hostfile.txt"].split() == list(map(str, order))
        (tmp_path / "hosts.csv").write_text(files["hosts.csv"])
        assert job.replace({"cluster.hosts": str(tmp_path / "hosts.csv"), "cluster.nodes": 17})
    assert (
        result.hosts.node.tolist() == result["hosts"].sel(placement=found["best"]).values.tolist()
    )


@pytest.mark.parametrize("asked", [
    {"slow_nodes": 1, "slowdown": 1.2, "keep_segments": 0},
    {"slow_nodes": 13, "slowdown": 1.2}, {"slow_nodes": 0, "slowdown": 1.2},
    {"slow_nodes": 1, "slowdown": 0.0}, {"slow_nodes": 1, "slowdown": float("nan")},
    {"slow_nodes": 1}, {"slowdown": 1.2}, {"slow_nodes": 1, "slowdown": 1.2, "kind": "gpu"},
    {"slow_nodes": 1, "slowdown": 1.2, "objective": "p90"},
    {"slow_nodes": 1, "slowdown": 1.2, "tolerance": 0.0},
    {"slow_nodes": 1, "slowdown": 1.2, "spares": -1}, {"nodes": slow(n12=1.2)},
    {"nodes": {0: prism.NodeSlowdown(compute=-1.0)}},
    {"nodes": slow(n0=1.2), "slow_nodes": 1, "slowdown": 1.2}, {}, {"nodes": {}},
    {"slow_nodes": 1, "slowdown": 1.0},
])  # fmt: skip
def test_questions_that_cannot_be_answered(asked):
    with pytest.raises(prism.PrismError):
        prism.place(small(), seed=1, **asked)


def test_independent_ops_have_no_nodes():
    with pytest.raises(prism.PrismError):
        job = small().replace("variability.dependence=none")
        prism.place(job, slow_nodes=1, slowdown=1.2)


def test_tables_and_launcher_files_are_those_of_the_json_and_the_command(run, tmp_path):
    job, slow = "gpt3-175b-512", ("--at", "9,45", "--slowdown", "1.3", "--spares", "2")
    status, text, err = run("place", job, *slow, "--seed", 1, "--json", "-o", tmp_path / "out")
    assert status == 0, err
    found = json.loads(text)
    placed = prism.load(tmp_path / "out")
    for name, row in placed.placements.iterrows():
        shown = next(r for r in found["placements"] if r["name"] == name)
        assert (row.p95, [row.saved_low, row.saved_high]) == (shown["p95"], shown["saved_ci"])
    known = {k: r["p95"] for k, r in found["alternatives"].items() if "p95" in r}
    assert placed.alternatives.p95.dropna().to_dict() == known
    assert placed.alternatives.index[0] == "spares"
    assert list(placed.slow_nodes.index) == [9, 45]
    files = placed.host_files()
    assert len(files) >= 2
    for name, content in files.items():
        assert (tmp_path / "out" / name).read_text() == content
    assert placed.host_files("current") != files
    with pytest.raises(prism.PrismError, match="current"):
        placed.host_files("nowhere")
