"""Hardware variants (`cluster.scale`): means and spreads of a part of the machine, each apart."""

import numpy as np
import pytest
import yaml

import prism
from prism import PrismError, load_job, load_library, place, rank, sweep
from prism.analyses.placements.screen import Screen
from prism.distributions import distribution as laws
from prism.jobs.job import job_from_dict
from prism.models.calibration.model import with_factors, with_spreads
from prism.simulation.prepare import prepare
from prism.simulation.program import ideal_program
from prism.simulation.steps import run_blocks
from prism.simulation.variability import residual_part, resolve_variability
from prism.workload.build import build_workload
from prism.workload.memory import estimate_memory

PARTS = ("compute", "memory", "nvlink", "network")
OFF = {"rank": {"cv": 0.0, "lemon_fraction": 0.0}, "step": {"cv": 0.0}, "microbatch": {"cv": 0.0},
       "call": {"cv": 0.0}, "residual": {"cv": 0.0}, "regime": {"probability": 0.0},
       "stall": {"rate_per_hour": 0.0}}  # fmt: skip


def made(scale=None, effects=None, **more):
    """A small transformer over two nodes with every kind of kernel and message."""
    values = {
        "model": {"n_layers": 4, "hidden_size": 2048, "ffn_size": 8192, "n_heads": 16,
                  "vocab_size": 32000, "seq_len": 2048},
        "parallelism": {"tp": 4, "pp": 2, "dp": 4, "microbatches": 4, "data_parallel": "zero1"},
        "cluster": {"nodes": 4, **({} if scale is None else {"scale": scale})},
        "variability": {"effects": OFF | (effects or {})},
    }  # fmt: skip
    for block, given in more.items():
        values[block] = values[block] | given
    return job_from_dict(values, "made")


def ideal(job):
    program = ideal_program(prepare(job, 0).program)
    return float(Screen(program, 1).times([program])[0])


def steps(job, n=8, seed=3):
    return run_blocks(prepare(job, seed).program, range(n), seed, 1)[0].astype(np.float64)


def kernels(job):
    work = build_workload(job, load_library("h100-healthy"))
    return [k for row in work.chunks for c in row for k in (*c.forward, *c.backward)]


@pytest.mark.parametrize("resolution", ["op", "kernel"])
def test_a_machine_with_all_parts_alike_scales_the_step(resolution):
    more = {"variability": {"effects": OFF, "resolution": resolution}}
    plain = ideal(made(**more))
    every = {part: {"time": 0.5} for part in PARTS}
    assert ideal(made(every, **more)) == pytest.approx(0.5 * plain, rel=1e-6)
    # a step takes what its noise-free program takes
    assert steps(made(every, **more), 1) == pytest.approx(0.5 * plain, rel=1e-6)
    # negative control: each part alone brings less, and something
    alone = [plain - ideal(made({part: {"time": 0.5}}, **more)) for part in PARTS]
    assert all(0.0 < saved < 0.5 * plain for saved in alone)
    # nothing waits longer for the other's half than for both
    assert sum(alone) < 0.5 * plain * 1.05


def test_a_part_scales_its_own_durations_alone():
    plain = {(k.name, i): k for i, k in enumerate(kernels(made()))}
    for part in ("compute", "memory"):
        other = kernels(made({part: {"time": 4.0}}))
        ratio = np.array([k.duration for k in other]) / [k.duration for k in plain.values()]
        own = np.array([residual_part(k.law, False) == part for k in plain.values()])
        link = np.array([k.group == "tp" for k in plain.values()])
        assert ratio[own] == pytest.approx(4.0)
        # a product that was bound by compute may become bound by its memory traffic
        assert ((ratio[~own & ~link] >= 1.0) & (ratio[~own & ~link] < 4.0)).all()
        assert [k.law for k in other] == [k.law for k in plain.values()]  # spreads stay
    work = [build_workload(made(scale), load_library("h100-healthy"))
            for scale in (None, {"network": {"time": 3.0}}, {"nvlink": {"time": 3.0}})]  # fmt: skip
    transfer = [w.transfer.duration for w in work]
    assert transfer[1] / transfer[0] == pytest.approx(3.0)  # stages lie on different nodes
    assert transfer[2] == transfer[0]
    reduce = [w.layernorm_reduce.duration for w in work]  # inside a node
    assert reduce[1] == reduce[0]
    assert reduce[2] / reduce[0] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("part", "effects"),
    [
        ("compute", {"rank": {"cv": 0.01, "lemon_fraction": 0.0}}),
        ("compute", {"residual": {"cv": 0.02}}),
        ("network", {"regime": {"probability": 0.2, "factor": 2.0}}),
    ],
)
def test_the_step_spreads_by_the_factor_of_its_only_effect(part, effects):
    layout = {"tp": 1, "pp": 1, "dp": 1, "data_parallel": "none", "microbatches": 1}
    nodes = {"nodes": 1, "gpus_per_node": 1}
    if part == "network":  # every step waits for messages between two nodes
        layout |= {"dp": 16, "data_parallel": "zero1"}
        nodes = {"nodes": 2}
    still = {other: {"cv": 0.0} for other in PARTS if other != part}

    def at(cv):
        cluster = nodes | {"scale": still | {part: {"cv": cv}}}
        return steps(made(None, effects, parallelism=layout, cluster=cluster), 64)

    one, two = at(1.0), at(2.0)
    assert one.std() > 1e-4 * one.mean()
    assert two.std() / one.std() == pytest.approx(2.0, rel=0.02)
    assert two.mean() == pytest.approx(one.mean(), abs=5.0 * one.std() / 8.0)


def test_other_effects_do_not_follow_a_part():
    """Negative control: what a part does not own keeps its spread."""
    effects = {"step": {"cv": 0.01}, "microbatch": {"cv": 0.01}, "call": {"cv": 0.01}}
    every = {part: {"cv": 5.0} for part in PARTS}
    np.testing.assert_array_equal(steps(made(None, effects), 2), steps(made(every, effects), 2))


def test_variants_at_one_are_bit_identical():
    every = {part: {"time": 1.0, "cv": 1.0} for part in PARTS}
    some = {"rank": {"cv": 0.02}, "residual": {}, "regime": {"probability": 0.1, "factor": 2.0}}
    np.testing.assert_array_equal(steps(made(None, some), 2), steps(made(every, some), 2))


def test_laws_are_those_of_the_parts():
    cvs = {"compute": 2.0, "memory": 3.0, "nvlink": 0.0, "network": 0.5}
    job = made({part: {"cv": cv} for part, cv in cvs.items()}, {"residual": {}})
    base, library = made(None, {"residual": {}}), load_library("h100-healthy")
    plain, wide = resolve_variability(base, library), resolve_variability(job, library)
    for entry in library.entries:
        if entry.startswith("residual/"):
            factor = cvs[residual_part(entry, wide.one_domain)]
            assert wide.residual(entry).cv == pytest.approx(
                factor * plain.residual(entry).cv, rel=0.02
            ), entry
            assert wide.residual(entry).mean == pytest.approx(1.0, rel=1e-6)
    assert residual_part("residual/p2p", False) == "network"
    assert residual_part("residual/p2p", True) == "nvlink"
    # memory-bound kernels follow a GPU's speed by their own factor, whatever compute's is
    some = {"rank": {"cv": 0.01, "memory_loading": 0.5, "lemon_fraction": 0.0}}
    follows = [
        resolve_variability(made({"compute": {"cv": c}, "memory": {"cv": m}}, some), library)
        for c, m in ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0), (2.0, 2.0))
    ]
    spread = [v.rank.std * v.rank_loading("memory") for v in follows]
    assert spread == pytest.approx([0.005, 0.005, 0.01, 0.01], rel=1e-6)
    assert [v.memory_loading for v in follows] == [0.5] * 4  # as known slow nodes have it
    frozen = resolve_variability(made({"compute": {"cv": 0.0}}, some), library)
    assert frozen.rank == laws.constant()


def test_known_slow_nodes_stay():
    slow = {"node_slowdowns": {0: 1.3}}
    still = {"rank": {"cv": 0.0, "memory_loading": 0.5, "lemon_fraction": 0.0}}
    plain = made(effects=still, cluster={"nodes": 4, **slow})
    scale = {"compute": {"cv": 3.0}, "memory": {"cv": 2.0}}
    other = made(effects=still, cluster={"nodes": 4, "scale": scale, **slow})
    assert steps(plain, 1).mean() > 1.02 * steps(made(effects=still), 1).mean()
    np.testing.assert_array_equal(steps(plain, 1), steps(other, 1))


def test_congestion_keeps_its_mean_and_what_it_cannot_be_is_said():
    """Both levels of every link, of whatever number of leaves, lie as many times as far off."""
    effects = {"regime": {"probability": 0.3, "factor": 3.0}}

    def links(cv):
        cluster = {"leaf_nodes": 1, "scale": {"network": {"cv": cv}}}
        return prepare(made(None, effects, cluster=cluster), 1).program.links

    one, two = links(1.0), links(1.2)
    used = one.n_touched > 0
    assert set(one.n_touched[used]) == {2, 4}
    for n in (2, 4):
        hit, of_n = 1.0 - 0.7**n, one.n_touched == n
        assert one.quiet[of_n] == pytest.approx(1.0 / (1.0 + hit * 2.0), rel=1e-6)
        assert (1.0 - hit) * two.quiet[of_n] + hit * two.congested[of_n] == pytest.approx(1.0)
    for a, b in ((one.quiet, two.quiet), (one.congested, two.congested)):
        assert b[used] - 1.0 == pytest.approx(1.2 * (a[used] - 1.0), rel=1e-5)
    assert links(0.0).n_leaves == 0
    with pytest.raises(PrismError, match=r"cluster\.scale\.network\.cv: 3 .* 1\.66"):
        links(3.0)


def test_a_rank_law_moves_its_lemons_and_its_limit():
    law = laws.bounded_body_lemons(0.01, lemon_fraction=0.02, lo=1.1, hi=1.2, max_slowdown=1.25)
    wide = law.spread_by(2.0)
    assert wide.mean == pytest.approx(1.0)
    assert wide.std / law.std == pytest.approx(2.0, rel=0.01)
    assert float(wide.ppf(1.0)) > 1.35  # a lemon of 1.2 has become one of 1.4
    assert law.spread_by(0.0) == laws.constant()


def test_variants_compose_with_a_calibration():
    library = with_spreads(with_factors(load_library("h100-healthy"), 1.2, 1.5), 2.0, 3.0)
    half = {"compute": {"time": 0.5, "cv": 2.0}, "network": {"time": 0.5}}
    plain, scaled = (build_workload(made(s), library) for s in (None, half))
    kernels = [
        [k for row in w.chunks for c in row for k in (*c.forward, *c.backward)]
        for w in (plain, scaled)
    ]
    ratio = [b.duration / a.duration for a, b in zip(*kernels, strict=True) if a.flop > 1e10]
    # the few that become bound by their memory traffic are halved less
    assert len(ratio) > 20
    assert np.median(ratio) == pytest.approx(0.5)
    assert 0.5 - 1e-9 <= min(ratio) <= max(ratio) < 1.0
    assert np.mean(np.isclose(ratio, 0.5)) > 0.6
    assert scaled.transfer.duration == pytest.approx(0.5 * plain.transfer.duration)
    spread = [resolve_variability(made(s, {"rank": {}}), library).rank.std for s in (None, half)]
    assert spread[1] == pytest.approx(2.0 * spread[0], rel=0.05)


def test_variants_through_sweep_rank_and_place():
    vary = {"cluster.scale.compute.time": [1, 0.5], "cluster.scale.compute.cv": [1, 3]}
    effects = {"rank": {"cv": 0.01}, "residual": {}}
    found = prism.summary(sweep(made(None, effects), vary, replicates=512, seed=1))
    mean = {(row["cluster.scale.compute.time"], row["cluster.scale.compute.cv"]): row
            for row in found["rows"]}  # fmt: skip
    assert mean[0.5, 1]["ideal_step_time"] < 0.8 * mean[1, 1]["ideal_step_time"]
    assert mean[1, 3]["ideal_step_time"] == mean[1, 1]["ideal_step_time"]
    cv = {key: row["step_time"]["cv"] for key, row in mean.items()}
    assert cv[1, 3] > 1.8 * cv[1, 1]
    assert len({row["memory"]["gib"] for row in found["rows"]}) == 1
    ranks = []
    for cv in (1.0, 3.0):
        job = made({"compute": {"cv": cv}}, effects | {"step": {"cv": 0.01}})
        rows = prism.summary(rank(job, seed=1))["effects"]
        ranks += [row["first_order"] for row in rows if row["name"] == "rank"]
    assert ranks[1] > ranks[0] + 0.1
    slow = {"nodes": 4, "node_slowdowns": {0: 1.3}}
    placed = [
        prism.summary(place(made(None, effects, cluster={**slow, "scale": s}), seed=1))
        for s in ({}, {"compute": {"time": 0.5}})
    ]
    assert placed[1]["placements"][0]["p50"] < 0.8 * placed[0]["placements"][0]["p50"]


def test_memory_does_not_follow():
    every = {part: {"time": 0.5, "cv": 2.0} for part in PARTS}
    assert estimate_memory(made(every)) == estimate_memory(made())


def test_what_has_no_such_part_says_so(tmp_path):
    values = {
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"pp": 2, "microbatches": 4},
        "variability": {"library": "none"},
    }
    halved = values | {"cluster": {"scale": {"compute": {"time": 0.5}}}}
    assert ideal(job_from_dict(halved)) == pytest.approx(0.5 * ideal(job_from_dict(values)))
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(values | {"cluster": {"scale": {"network": {"time": 0.5}}}}))
    with pytest.raises(PrismError, match=r"job\.yaml:\d+: cluster\.scale\.network: .*no effect"):
        load_job(path)
    with pytest.raises(PrismError, match=r"cluster\.scale\.compute\.time: .* 0"):
        made({"compute": {"time": 0.0}})
    with pytest.raises(PrismError, match=r"cluster\.scale\.compute\.cv: .*-1"):
        made({"compute": {"cv": -1.0}})
    with pytest.raises(PrismError, match="nvlnik: unknown key.* nvlink"):
        made({"nvlnik": {"time": 1.0}})
