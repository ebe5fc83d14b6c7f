"""Lowering: moments, segments and terms by hand, and op resolution against kernel resolution."""

import dataclasses
import functools

import numpy as np
import pytest
from scipy.stats import ks_2samp, norm

from prism import engine, load_job
from prism.distributions.distribution import (
    constant,
    empirical,
    lognormal,
    normal,
    quantile_table,
)
from prism.distributions.sums import Draws
from prism.simulation.draws import lower
from prism.simulation.lowering import (
    Lowerer,
    Term,
    lowering_arrays,
    residual_of,
    standardised_cdf,
    variance_of,
)
from prism.simulation.prepare import prepare
from prism.simulation.steps import run_blocks
from prism.simulation.variability import CongestionEffect, StallEffect, Variability
from prism.workload.build import Collective, Kernel
from prism.workload.opgraph import OpType


def effects(**changes):
    """Build effects without a library; residual lognormal 2 %."""
    none = constant()
    values = {
        "rank": none, "step": none, "microbatch": none, "call": none, "regime": CongestionEffect(),
        "stall": StallEffect(), "dependence": "full", "loss_loading": 0.5, "memory_loading": 0.25,
        "replaced_residual": lognormal(0.02),
    }  # fmt: skip
    return Variability(**(values | changes))


GEMM = Kernel("gemm", "gemm_mlp", 3.0, 0.0, 0.0, "residual/compute")
NORM = Kernel("norm", "memory", 1.0, 0.0, 0.0, "residual/compute")
LOSS = Kernel("loss", "loss", 2.0, 0.0, 0.0, "residual/compute")
TP = Kernel("ag", "tp_all_gather", 0.5, 0.0, 0.0, "residual/compute", "tp")
LAYERS = OpType("forward", 0, (NORM, GEMM, TP, NORM, GEMM, TP, LOSS))


def test_segments_lie_between_barriers():
    lowerer = Lowerer(effects())
    assert lowerer.loadings == (0.0, 1.0, 0.25)
    op = lowerer.lower(LAYERS)
    (layer, layers), (loss, losses) = op.segments
    assert (layers, losses) == (2.0, 1.0)
    assert layer.mean == (0.0, 3.0, 1.0) and loss.mean == (0.0, 2.0, 0.0)
    spread = 0.02**2 * 10.0, 0.02**2 * 4.0
    assert tuple(map(variance_of, (layer.noise, loss.noise))) == pytest.approx(spread)
    assert [(name, d.seconds) for name, d in layer.noise] == [("memory", 1.0), ("gemm_mlp", 3.0)]
    compute, half, network = Term(1.0, True), Term(0.5, True), Term(0.0, False)
    assert op.terms == (compute, half, network)
    assert layer.split == ((compute, 1.0),) and loss.split == ((half, 1.0),)
    assert op.fixed == (0.0, 0.0, 1.0)
    assert op.noise == (("tp_all_gather", Draws(lognormal(0.02), 0.5, 2.0)),)
    expected = {"memory": 2 / 11, "gemm_mlp": 6 / 11, "tp_all_gather": 1 / 11, "loss": 2 / 11}
    assert dict(op.shares) == pytest.approx(expected)


def test_a_segment_has_the_terms_and_the_call_effect_of_all_its_kernels():
    lowerer = Lowerer(effects(), call=normal(0.03))
    ((both, _),) = lowerer.lower(OpType("forward", 0, (GEMM, LOSS))).segments
    assert dict(both.split) == pytest.approx({Term(1.0, True): 0.6, Term(0.5, True): 0.4})
    residuals, call = 0.02**2 * (3.0**2 + 2.0**2), 0.03 * (3.0 + 2.0)
    assert variance_of(both.noise) == pytest.approx(residuals + call**2)


def test_backward_loads_more_on_the_microbatch():
    op = Lowerer(effects()).lower(LAYERS._replace(op_kind="backward"))
    assert op.terms == (Term(1.5, True), Term(0.75, True), Term(0.0, False))


def test_collective_is_one_fixed_part():
    c = Collective("r", "all_reduce", "dp_all_reduce", 2.0, 0.0, "residual/network_large")
    op = Lowerer(effects()).lower(OpType("all_reduce", 0, collective=c))
    assert op.segments == () and op.fixed == (2.0,) and op.terms == (Term(0.0, False),)
    assert op.noise == (("dp_all_reduce", Draws(lognormal(0.02), 2.0)),)
    alone = Lowerer(effects()).lower(OpType("forward", 0, (GEMM,)))
    assert residual_of(op, 8, None) == residual_of(alone, 1, None) == lognormal(0.02)


def lowered(v, x, call=None, op_type=LAYERS):
    """Coefficients [term] and relative spread of one op on a group with slowdowns x."""
    lowerer = Lowerer(v)
    group = np.arange(len(x), dtype=np.int32).reshape(1, 1, -1)
    low = lowering_arrays([lowerer.lower(op_type)], (op_type,), group, call)
    slow = np.array([np.power(x, loading) for loading in lowerer.loadings], np.float32)
    a, r = lower(low, slow)
    return a[0, 0], float(r[0, 0])


def test_one_gpu_is_the_plain_sum():
    a, r = lowered(effects(), [1.1])
    np.testing.assert_allclose(a, [2 * (3 * 1.1 + 1.1**0.25), 2 * 1.1, 1.0], rtol=1e-6)
    layer = 0.02 * 10**0.5 / 4 * (3 * 1.1 + 1.1**0.25)  # spread follows the mean
    expected = (2 * layer**2 + (0.04 * 1.1) ** 2 + 2 * 0.01**2) ** 0.5 / a.sum()
    assert r == pytest.approx(expected, rel=1e-5)


def test_group_is_a_sum_of_maxima():
    """Against brute force: sum over segments of the largest of eight."""
    x = np.array([1.0, 1.0, 0.99, 1.01, 1.0, 1.02, 0.98, 1.0])
    rng = np.random.default_rng(5)
    total = np.zeros(100_000)
    for times, segment in ((2, (3.0, 1.0)), (1, (2.0, 0.0))):
        for _ in range(times):
            scale, memory = segment[0] * x, segment[1] * x**0.25
            nominal = sum(segment)
            cv = 0.02 * (segment[0] ** 2 + segment[1] ** 2) ** 0.5 / nominal
            z = rng.lognormal(-np.log1p(cv**2) / 2, np.log1p(cv**2) ** 0.5, (total.size, 8))
            total += (z * (scale + memory)).max(axis=1)
    total += 0.5 * (1 + 0.02 * rng.standard_normal((2, total.size))).sum(axis=0)
    a, r = lowered(effects(), x)
    assert a.sum() == pytest.approx(total.mean(), abs=5 * total.std() / total.size**0.5 + 2e-4)
    assert r * a.sum() == pytest.approx(total.std(), rel=0.01)
    # negative control: the maximum of x alone is too fast
    assert lowered(effects(), [x.max()])[0].sum() < 0.995 * total.mean()


@pytest.mark.parametrize("slow", [0.0, 0.005])
def test_the_slowest_of_many_with_a_heavy_tail(slow):
    """One kernel in 300 takes twice as long, on 64 GPUs: beyond what a few nodes reach."""
    law = empirical([0.0, 0.9966, 0.9967, 1.0], [0.99, 1.01, 1.9, 2.1])
    alone = OpType("forward", 0, (GEMM,))
    rng = np.random.default_rng(3)
    x = 1.0 + slow * rng.standard_normal(64)
    found = 3.0 * (law.ppf(rng.random((50_000, 64))) * x).max(axis=1)
    a, r = lowered(effects(replaced_residual=law), x, op_type=alone)
    error = found.std() / found.size**0.5
    assert a.sum() == pytest.approx(found.mean(), abs=4 * error + 3 * slow * found.mean())
    assert r * a.sum() == pytest.approx(found.std(), rel=0.01 + 12 * slow)
    cells = engine.cdf_cells(standardised_cdf(law))
    mean, variance = engine.group_max(3.0 * x, law.std, cells)  # negative control
    assert mean < 0.95 * found.mean() and variance**0.5 < 0.7 * found.std()


def test_groups_lowered_together_are_those_lowered_alone():
    """As slow as the one before, and not; a maximum is worked out only where its means are new."""
    alike, other = [1.0, 1.0, 0.99, 1.02], [1.0, 1.0, 1.02, 0.99]
    x = np.array([alike, alike, other, alike, [1.0] * 4])
    lowerer, group = Lowerer(effects()), np.arange(x.size, dtype=np.int32).reshape(-1, 1, 4)
    low = lowering_arrays([lowerer.lower(LAYERS)], (LAYERS,), group, None)
    slow = np.array([np.power(x.ravel(), loading) for loading in lowerer.loadings], np.float32)
    together = lower(low, slow)
    for replica in range(len(x)):
        for whole, alone in zip(together, lower(low, slow, np.array([replica])), strict=True):
            np.testing.assert_array_equal(whole[replica], alone[0], strict=True)


def test_call_is_shared_by_all_terms_of_an_op():
    """One call multiplies layers and loss together: their spreads add, not their variances."""
    a, r = lowered(effects(replaced_residual=constant()), [1.0], call=lognormal(0.01))
    assert r * a.sum() == pytest.approx(0.01 * 10.0, rel=1e-6)  # all but the collectives


def test_standardised_cdf():
    z = np.linspace(-engine.CDF_RANGE, engine.CDF_RANGE, engine.CDF_ROWS)
    np.testing.assert_allclose(standardised_cdf(normal(0.1)), norm.cdf(z), atol=1e-12)
    step = standardised_cdf(constant())
    assert set(step) == {0.0, 1.0} and np.all(np.diff(step) >= 0)


# -- kernel against op resolution (the design's job: tp 8, pp 2, dp 2, vpp 2) ----------------

SHARED = {
    "off": {"step": {"cv": 0.0}, "microbatch": {"cv": 0.0}, "call": {"cv": 0.0}},
    "on": {"step": {"cv": 0.01}, "microbatch": {"cv": 0.02}, "call": {"cv": 0.01}},
}
HOT_GPU = 11


@functools.cache
def prepared(resolution, rank_cv, residual_cv, shared):
    job = load_job({
        "model": {
            "n_layers": 8, "hidden_size": 1024, "ffn_size": 4096, "n_heads": 16,
            "vocab_size": 32_000, "seq_len": 2048,
        },
        "parallelism": {
            "tp": 8, "pp": 2, "dp": 2, "vpp": 2, "microbatches": 4, "layer_split": [2, 2, 2, 2]
        },
        "cluster": {"nodes": 4, "gpus_per_node": 8},
        "variability": {
            "library": None, "resolution": resolution,
            "effects": {
                "rank": {"cv": rank_cv}, "residual": {"law": "lognormal", "cv": residual_cv},
                **SHARED[shared],
            },
        },
    })  # fmt: skip
    return prepare(job, 17).program


def program(resolution, rank_cv, residual_cv, hot, shared):
    made = prepared(resolution, rank_cv, residual_cv, shared)
    if hot:
        factor = made.ranks.factor.copy()
        factor[:, HOT_GPU] = 1.2 ** np.array(Lowerer(effects(memory_loading=0.0)).loadings)
        made = dataclasses.replace(made, ranks=made.ranks._replace(factor=factor))
    return made


def times_of(made, n_blocks):
    return run_blocks(made, range(n_blocks), 17, threads=2)[0].astype(np.float64)


CASES = [(r, e, hot, "off") for r in (0.005, 0.015) for e in (0.005, 0.02) for hot in (False, True)]
CASES.append((0.015, 0.02, True, "on"))


@pytest.mark.parametrize(("rank_cv", "residual_cv", "hot", "shared"), CASES)
def test_resolutions_agree(rank_cv, residual_cv, hot, shared):
    """Same keys, so same clusters; `experiments/verification/lowering.py` runs it at 1e5."""
    kernel, op = (
        times_of(program(r, rank_cv, residual_cv, hot, shared), 150) for r in ("kernel", "op")
    )
    assert ks_2samp(kernel.ravel(), op.ravel(), method="asymp").statistic <= 0.03
    assert op.mean() == pytest.approx(kernel.mean(), rel=1e-3)
    assert op.mean(axis=1).std() == pytest.approx(kernel.mean(axis=1).std(), rel=0.05)


def test_pooling_over_gpus_fails():
    """Negative control: one GPU of the group, taken at random, instead of the group's maximum."""
    kernel = times_of(program("kernel", 0.015, 0.02, False, "off"), 100)
    made = program("op", 0.015, 0.02, False, "off")
    member = made.low.member
    pick = np.random.default_rng(1).integers(0, 8, (*member.shape[:2], 1))
    pooled = np.ascontiguousarray(np.take_along_axis(member, pick, axis=2))
    made = dataclasses.replace(made, low=made.low._replace(member=pooled))
    assert ks_2samp(kernel.ravel(), times_of(made, 100).ravel(), method="asymp").statistic > 0.15


# -- kernels' own runtimes alone: where many ranks wait for each other the tails decide ----------
def own_noise(resolution):
    """Step times of an fsdp job of 32 ranks in which nothing else varies."""
    off = {name: {"cv": 0.0} for name in ("step", "microbatch", "call")}
    off |= {"rank": {"cv": 0.0, "lemon_fraction": 0.0}, "regime": {"probability": 0.0}}
    return prepare(load_job({
        "model": {
            "n_layers": 4, "hidden_size": 2048, "ffn_size": 5632, "n_heads": 16,
            "vocab_size": 32_000, "seq_len": 4096,
        },
        "parallelism": {
            "tp": 2, "dp": 16, "microbatches": 2, "data_parallel": "fsdp",
            "reshard_after_forward": True,
        },
        "cluster": {"nodes": 4, "gpus_per_node": 8},
        "variability": {"library": "h100-healthy", "resolution": resolution, "effects": off},
    }), 17).program  # fmt: skip


def test_resolutions_agree_in_own_noise():
    """A residual of the right spread without its tail is the negative control."""
    op = own_noise("op")
    table = quantile_table(normal(0.1))[None]
    plain = dataclasses.replace(
        op, tables=np.concatenate([op.tables, table]),
        ops=op.ops._replace(table=np.full_like(op.ops.table, len(op.tables))),
        low=op.low._replace(table_std=np.full_like(op.low.table_std, 0.1)),
    )  # fmt: skip
    kernel, found, control = (times_of(p, 600) for p in (own_noise("kernel"), op, plain))
    error = kernel.std(axis=1).std() / 600**0.5 / kernel.std()  # of the spread
    assert error < 0.01
    assert found.std() == pytest.approx(kernel.std(), rel=6 * error)
    assert control.std() < 0.8 * kernel.std()
    assert found.mean() == pytest.approx(kernel.mean(), abs=6 * kernel.std() / kernel.size**0.5)
    assert ks_2samp(kernel.ravel(), found.ravel(), method="asymp").statistic < 0.02
