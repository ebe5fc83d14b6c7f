"""The load of experts as an effect, and the wait inside ep groups, against closed forms."""

from itertools import product

import numpy as np
import pytest
from campaign import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_jobs import LATENT, OFF, make_job, times
from rank_jobs import sampled
from touched import touched

from prism import load_job, simulate
from prism.analyses.rankings.freezing import freeze_effect
from prism.analyses.rankings.shares import list_inputs
from prism.cluster.linkcongestion import congested_links, n_own_links
from prism.cluster.nodemap import Placement
from prism.simulation.causes import measure_residuals
from prism.simulation.classops import split_classes
from prism.simulation.draws import draw_ranks, seed_key
from prism.simulation.lowering import Lowerer
from prism.simulation.othernodes import relocate
from prism.simulation.prepare import prepare, prepare_variability
from prism.simulation.program import ideal_program
from prism.simulation.variability import EXPERT_CV
from prism.workload.build import build_workload
from prism.workload.memory import estimate_memory

CV = 0.1


def kernels(job):
    work = build_workload(job, None)
    return [k for c in work.chunks[0] for k in (*c.forward, *c.backward)]


def expert(cv=CV, **parallelism):
    """One stage whose ranks form one ep group unless dp says more; only experts vary."""
    layout = {"dp": 8, "ep": 8, "overlap": False} | parallelism
    return make_job(effects=OFF | {"expert": {"cv": cv}}, **layout)


def routed_seconds(job):
    return sum(k.duration for k in kernels(job) if k.routed)


# --------------------------------------------------------------------------------- its own law
def test_one_group_varies_as_its_experts_do():
    """One stage: a step adds up its microbatches, each with a draw of its own for all layers."""
    job = expert(microbatches=6)
    program = prepare(job, 1).program
    found = times(program, 64).ravel()
    routed, n = routed_seconds(job), found.size
    std = routed * CV * 6**0.5
    ideal = float(times(ideal_program(program))[0, 0])
    assert found.mean() == pytest.approx(ideal, abs=5 * std / n**0.5)
    assert found.std(ddof=1) == pytest.approx(std, rel=5 / (2 * n) ** 0.5)
    # negative control: forward and backward drawn apart would vary less
    work = build_workload(job, None)
    parts = [sum(k.duration for c in work.chunks[0] for k in getattr(c, d) if k.routed)
             for d in ("forward", "backward")]  # fmt: skip
    apart = CV * (6 * (parts[0] ** 2 + parts[1] ** 2)) ** 0.5
    assert abs(found.std(ddof=1) / apart - 1.0) > 5 / (2 * n) ** 0.5


def test_two_groups_draw_apart_and_the_later_one_decides():
    one, two = (times(prepare(expert(dp=dp), 1).program, 64).ravel() for dp in (8, 16))
    still = float(times(prepare(expert(dp=16, cv=0.0), 1).program)[0, 0])
    base = float(times(prepare(expert(dp=8, cv=0.0), 1).program)[0, 0])
    std = one.std()
    # E max of two sums is std / sqrt(pi) over their mean; lognormal draws of 10 % add to it
    assert two.mean() - still == pytest.approx(std / np.pi**0.5, rel=0.06)
    assert one.mean() - base == pytest.approx(0.0, abs=5 * std / one.size**0.5)


def test_the_stages_of_a_group_see_the_same_draw():
    """A pipeline without bubbles to speak of: every stage's routed work follows one draw."""
    job = make_job(effects=OFF | {"expert": {"cv": CV}}, dp=4, ep=4, pp=2, microbatches=2,
                   layer_split=[2, 2], model={"n_dense_layers": 0})  # fmt: skip
    bank = prepare(job, 1).program.bank
    drawn = {(int(t), int(d)) for t, d in zip(bank.call_table, bank.call_draw, strict=True)
             if t >= 0}  # fmt: skip
    assert len({t for t, _ in drawn}) == 1 and {d for _, d in drawn} == {0, 1}


def test_other_draws_stay_where_experts_vary():
    """Switching the effect on moves no other effect's draws: step factors are the same."""
    effects = OFF | {"step": {"cv": 0.02}, "microbatch": {"cv": 0.05}}
    runs = []
    for cv in (0.0, 1e-6):
        job = make_job(effects=effects | {"expert": {"cv": cv}}, dp=8, ep=8)
        runs.append(times(prepare(job, 1).program, 8))
    assert np.allclose(*runs, rtol=1e-5)
    assert runs[0].std() > 0.01 * runs[0].mean()


def test_routed_work_follows_experts_and_all_else_the_microbatch():
    job = make_job(effects=OFF | {"microbatch": {"cv": 0.05}, "expert": {"cv": CV}}, dp=8, ep=8)
    step = prepare(job, 1)
    lowerer = Lowerer(prepare_variability(job))
    terms = {t for op in map(lowerer.lower, step.graph.op_types) for t in op.terms}
    assert {t.mb_loading for t in terms if t.routed} == {0.0}
    assert {t.mb_loading for t in terms if t.compute and not t.routed} >= {1.0, 1.5}
    assert any(t.far for t in terms) and all(t.routed for t in terms if t.far)


# ------------------------------------------------------------------------------- in the analyses
def test_experts_have_a_row_of_their_own_in_a_ranking():
    shares, _ = sampled(expert(microbatches=4))
    assert shares["expert"].total.value == pytest.approx(1.0, abs=0.06)
    assert "call" not in shares and "rank_step" not in shares
    mixed = make_job(effects=OFF | {"expert": {"cv": 0.03}, "step": {"cv": 0.01}}, dp=8, ep=8)
    both, _ = sampled(mixed)
    found = times(prepare(mixed, 1).program, 64).ravel()
    alone = times(prepare(make_job(effects=OFF | {"expert": {"cv": 0.03}}, dp=8, ep=8), 1).program,
                  64).ravel()  # fmt: skip
    assert both["expert"].total.value == pytest.approx(alone.var() / found.var(), abs=0.06)
    assert both["expert"].total.value + both["step"].total.value == pytest.approx(1.0, abs=0.06)


def test_frozen_experts_do_not_vary():
    program = prepare(expert(), 1).program
    frozen = times(freeze_effect(program, "expert"), 2)
    assert np.ptp(frozen) == 0.0 and frozen.mean() < times(program, 16).mean()
    assert np.ptp(times(freeze_effect(program, "microbatch"), 2)) > 0.0  # negative control


def test_without_dependence_an_op_keeps_its_variance():
    """Forward and backward are then drawn apart, each as spread as before."""
    job = expert(microbatches=6)
    pooled = job.model_copy(update={
        "variability": job.variability.model_copy(update={"dependence": "none"})
    })  # fmt: skip
    found = times(prepare(pooled, 1).program, 64).ravel()
    work = build_workload(job, None)
    var = 0.0
    for chunk, d in product(work.chunks[0], ("forward", "backward")):
        var += 6 * (CV * sum(k.duration for k in getattr(chunk, d) if k.routed)) ** 2
    assert found.std() == pytest.approx(var**0.5, rel=5 / (2 * found.size) ** 0.5 + 0.01)


# ------------------------------------------------------------------------------ group maxima
def test_all_wait_for_the_slowest_gpu_of_the_group():
    """Ranks alone: each cluster's step has its slowest GPU's compute, as drawn one by one."""
    effects = OFF | {"rank": {"cv": 0.03, "memory_loading": 1.0}, "expert": {"cv": 0.0}}
    job = make_job(effects=effects, dp=16, ep=16, overlap=False, microbatch_size=8)
    program = prepare(job, 1).program
    found = times(program, 32)[:, 0]
    compute = 2 * sum(k.duration for k in kernels(job) if not k.group)
    ideal = float(times(ideal_program(program))[0, 0])
    slowest = []
    for cluster in range(32):
        x = draw_ranks(program.ranks, program.tables, cluster, seed_key(1))
        slowest.append(float(x[1].max()))
    want = ideal + compute * (np.array(slowest) - 1.0)
    assert found == pytest.approx(want, rel=1e-5)
    # negative control: a group of one would follow its own GPU
    assert not np.allclose(found, ideal + compute * float(x[1].mean() - 1.0), rtol=1e-5)


def test_residuals_are_maximised_between_all_to_alls():
    """Brute force: kernels of 8 ranks one by one, the latest at every all-to-all."""
    effects = OFF | {"residual": {"law": "normal", "cv": 0.05}, "expert": {"cv": 0.0}}
    job = make_job(effects=effects, dp=8, ep=8, overlap=False, microbatches=1)
    found = times(prepare(job, 1).program, 128).ravel()
    work, rng, n = build_workload(job, None), np.random.default_rng(3), 4000
    total = np.zeros(n)
    for direction in ("forward", "backward"):
        for chunk in work.chunks[0] if direction == "forward" else work.chunks[0][::-1]:
            ranks = np.zeros((n, 8))
            for k in getattr(chunk, direction):
                if k.group:
                    own = k.duration * (1 + 0.05 * rng.standard_normal((n, 1)))
                    ranks = ranks.max(axis=1, keepdims=True) + own + np.zeros((n, 8))
                else:
                    ranks += k.duration * (1 + 0.05 * rng.standard_normal((n, 8)))
            total += ranks.max(axis=1)
    ends = [c for row in work.reduces for each in row for c in each]
    for c in (*ends, work.grad_norm_reduce, work.optimizer[0]):
        total += c.duration * (1 + 0.05 * rng.standard_normal(n))
    error = 5 * np.hypot(total.std() / n**0.5, found.std() / found.size**0.5)
    # quadrature of the maximum, of segments taken as normal: 0.1 %
    assert found.mean() == pytest.approx(total.mean(), abs=error + 1e-3 * total.mean())
    ideal = float(times(ideal_program(prepare(job, 1).program))[0, 0])
    assert total.mean() > ideal * 1.01  # what is compared is there
    assert found.std() == pytest.approx(total.std(), rel=0.05)


# --------------------------------------------------------------------------------- congestion
def test_congestion_of_all_to_alls_is_the_groups_own():
    effects = OFF | {"regime": {"probability": 0.3, "factor": 3.0}}
    job = make_job(effects=effects, dp=16, ep=8, cluster={"leaf_nodes": 1})
    found = congested_links(Placement(job), 1)
    assert n_own_links(job) == 2
    assert [touched(found, 1, r) for r in range(2)] == [{0, 1}, {2, 3}]
    program = prepare(job, 1).program
    assert (1, 0) in {(int(x), int(g)) for x, g in zip(program.bank.link, program.bank.is_global,
                                                       strict=True)}  # fmt: skip
    assert times(program, 4).std() > 0.0
    inside = make_job(effects=effects, dp=4, ep=4)  # all on one node
    assert times(prepare(inside, 1).program, 4).std() == 0.0


# ------------------------------------------------------------------------------------ defaults
def test_the_default_is_the_librarys_or_off():
    job = load_job("deepseek-v3-2048", ["variability.effects.expert=null"])
    assert prepare_variability(job).expert.cv == pytest.approx(EXPERT_CV)
    assert prepare_variability(make_job()).expert.std == 0.0
    plain = load_job("llama3-405b-16k")
    assert prepare_variability(plain).expert.std == 0.0


@pytest.mark.slow
def test_the_shipped_job_simulates():
    found = simulate(load_job("deepseek-v3-2048"), 64, seed=1)
    hours = float(found.step_time.mean()) * 1e12 / (15_360 * 4_096) * 2_048 / 3_600
    # 180K H800 hours were published
    assert 0.8 * 180e3 < hours < 1.25 * 180e3
    assert 0.2 < float(found.mfu) < 0.5


@st.composite
def random_jobs(draw):
    """Any layout, mode and effects of a small model with experts."""
    ep = draw(st.sampled_from([1, 2, 4]))
    tp, cp, pp = (draw(st.sampled_from([1, 2])) for _ in range(3))
    layout = {
        "tp": tp, "cp": cp, "pp": pp, "ep": ep, "dp": ep * draw(st.sampled_from([1, 2, 3])),
        "data_parallel": draw(st.sampled_from(["ddp", "zero1", "fsdp"])),
        "recompute": draw(st.sampled_from(["none", "full"])),
        "microbatches": draw(st.sampled_from([2, 4])), "overlap": draw(st.booleans()),
        "expert_imbalance": draw(st.sampled_from([1.0, 1.3])),
    }  # fmt: skip
    effects = {name: {"cv": 0.02} for name in ("rank", "call", "residual", "microbatch")}
    effects["regime"] = {"probability": 0.1, "factor": 2.0}
    if ep > 1:
        layout["expert_overlap"] = draw(st.booleans())
        layout["expert_node_limit"] = draw(st.sampled_from([None, 1]))
        effects["expert"] = {"cv": draw(st.sampled_from([0.0, 0.1]))}
    model = LATENT if draw(st.booleans()) else {}
    order = draw(st.sampled_from(["megatron", "tp-cp-pp-dp"]))
    return make_job(effects, model, {"placement": order, "gpus_per_node": 1,
                                     "nodes": tp * cp * pp * layout["dp"],
                                     "nvlink_domain_gpus": 4}, **layout)  # fmt: skip


@settings(max_examples=examples(12), deadline=None)
@given(job=random_jobs())
def test_any_layout_runs_and_noise_only_adds(job):
    step = prepare(job, 1)
    found, still = times(step.program, 2), times(ideal_program(step.program))
    assert np.ptp(still) == 0.0 and still[0, 0] > 0.0
    assert found.mean() > 0.97 * still[0, 0]  # two clusters of a step that varies by some percent
    assert estimate_memory(job).total > 0.0
    names = {entry.name for entry in list_inputs(step, _residuals(step), split_classes(step))}
    drawn = job.variability.effects.expert
    assert ("expert" in names) == (drawn is not None and drawn.cv > 0.0)
    again = times(relocate(step, Placement(job).slots, {}), 2)
    assert np.array_equal(again, found)


def _residuals(step):
    return measure_residuals(step, 1)
