"""Durations of kernels by shape: fits, their file, and what `kernel_cost` makes of them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import prism
from prism.distributions.kerneltables import KernelFit, KernelTable, Term, fit_kernel
from prism.distributions.library import Library, library_names, load_library, save_library
from prism.distributions.ranges import KERNEL_SIZES, check_kernels
from prism.workload.kernelcost import BACKENDS, KINDS, kernel_cost

FIT = KernelFit(
    (Term(2e-6), Term(1e-12, {"rows": 1.0, "columns": 1.0}), Term(3e-9, {"rows": 0.5})),
    {"rows": (4.0, 4096.0), "columns": (16.0, 1024.0)},
    "measured", 7, 0.05,
)  # fmt: skip
GRID = KernelTable(
    {"m": np.array([1.0, 2.0]), "n": np.array([4.0]), "k": np.array([8.0, 16.0, 32.0])},
    np.array([[[1e12, 2e12, 3e12]], [[2e12, 3e12, 4e12]]]), source="measured",
)  # fmt: skip
ATTENTION = {"batch": 2.0, "heads": 16.0, "kv_heads": 8.0, "seq": 4096.0, "head_dim": 128.0}
SIZES = {
    "gemm": {"m": 4096.0, "n": 4096.0, "k": 4096.0},
    "grouped_gemm": {"experts": 16.0, "m": 512.0, "n": 2048.0, "k": 4096.0},
    "attention": ATTENTION,
    "rms_norm": {"rows": 8192.0, "columns": 4096.0},
    "layer_norm": {"rows": 8192.0, "columns": 4096.0},
    "memory": {"bytes": 1e9},
    "gated_delta": {"tokens": 8192.0, "heads": 32.0, "head_dim": 128.0},
    "kda": {"tokens": 8192.0, "heads": 32.0, "head_dim": 128.0},
    "mamba2": {"tokens": 8192.0, "heads": 64.0, "head_dim": 64.0, "state": 128.0},
}


def one(name, table):
    return Library("made", "NVIDIA H100 SXM", {}, kernels={name: table})


def test_seconds_are_the_sum_of_terms():
    assert FIT.seconds(rows=100.0, columns=50.0) == pytest.approx(2e-6 + 5e-9 + 3e-8, rel=1e-12)
    assert FIT.covers(rows=4.0, columns=1024.0)
    assert not FIT.covers(rows=3.9, columns=1024.0)
    assert FIT.scaled(2.0, "other").seconds(rows=9.0, columns=9.0) == pytest.approx(
        2.0 * FIT.seconds(rows=9.0, columns=9.0)
    )


def test_seconds_of_a_grid_are_work_over_rate():
    assert GRID.seconds(m=2.0, n=4.0, k=16.0) == pytest.approx(2.0 * 2 * 4 * 16 / 3e12)
    assert GRID.covers(m=1.5, n=4.0, k=9.0)
    assert not GRID.covers(m=1.5, n=5.0, k=9.0)
    assert GRID.scaled(2.0, "").seconds(m=2.0, n=4.0, k=16.0) == pytest.approx(
        2.0 * GRID.seconds(m=2.0, n=4.0, k=16.0)
    )


def test_a_fit_finds_the_terms_that_made_its_rows():
    rng = np.random.default_rng(1)
    rows, columns = rng.uniform(4, 4096, 200), rng.uniform(16, 1024, 200)
    seconds = [FIT.seconds(rows=r, columns=c) for r, c in zip(rows, columns, strict=True)]
    powers = [term.powers for term in FIT.terms] + [{"columns": 2.0}]
    found = fit_kernel(powers, {"rows": rows, "columns": columns}, seconds)
    assert [t.powers for t in found.terms][:3] == [t.powers for t in FIT.terms]
    for mine, theirs in zip(found.terms, FIT.terms, strict=False):
        assert mine.coefficient == pytest.approx(theirs.coefficient, rel=1e-3)
    assert found.sd < 1e-3
    assert found.n == 200


def test_a_fit_has_no_mean_error_of_the_logarithm():
    rng = np.random.default_rng(2)
    x = np.geomspace(1, 1e4, 300)
    seconds = (1e-6 + 1e-9 * x) * np.exp(0.2 * rng.standard_normal(300))
    fit = fit_kernel([{}, {"bytes": 1.0}], {"bytes": x}, seconds)
    error = np.log([fit.seconds(bytes=b) for b in x] / seconds)
    assert abs(error.mean()) < 1e-5
    assert fit.sd == pytest.approx(0.2, rel=0.15)


def test_kernels_come_back_from_a_file(tmp_path):
    library = replace(
        load_library("h100-healthy"),
        kernels={"rms_norm/te/forward": FIT, "gemm/bf16": GRID, "layer_norm/te/forward": FIT},
    )
    save_library(library, tmp_path / "made.nc")
    found = load_library(tmp_path / "made.nc").kernels
    assert set(found) == set(library.kernels)
    assert found["rms_norm/te/forward"] == FIT
    np.testing.assert_allclose(found["gemm/bf16"].rate, GRID.rate, rtol=1e-4)
    assert list(found["gemm/bf16"].axes) == ["m", "n", "k"]


@pytest.mark.parametrize(
    "broken",
    [
        {"nothing/bf16": FIT},
        {"gemm/bf16": FIT},
        {"rms_norm/te/forward": replace(FIT, terms=())},
        {"rms_norm/te/forward": replace(FIT, terms=(Term(-1.0),))},
        {"rms_norm/te/forward": replace(FIT, terms=(Term(1.0, {"rows": -1.0}),))},
        {"rms_norm/te/forward": replace(FIT, ends={"rows": (5.0, 4.0)})},
        {"gemm/bf16": replace(GRID, rate=-GRID.rate)},
    ],
)
def test_broken_kernels_are_refused(broken):
    with pytest.raises(ValueError, match=next(iter(broken))):
        check_kernels(broken)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_no_shipped_fit_falls_with_a_size(data):
    library = load_library(data.draw(st.sampled_from(library_names())))
    fits = {k: v for k, v in library.kernels.items() if isinstance(v, KernelFit)}
    for name, fit in fits.items():
        known = [*KERNEL_SIZES[name.partition("/")[0]], "flop", "scores"]
        sizes = {key: data.draw(st.floats(1.0, 1e5)) for key in known}
        grown = data.draw(st.sampled_from(known))
        assert fit.seconds(**{**sizes, grown: 1.5 * sizes[grown]}) >= fit.seconds(**sizes) > 0.0


@pytest.mark.parametrize("name", [n for n in library_names() if n.endswith("healthy")])
def test_every_device_has_every_kind(name):
    library = load_library(name)
    for kind, sizes in SIZES.items():
        for backend in BACKENDS.get(kind, ("",)):
            for backward in (False, True):
                cost = kernel_cost(library, kind, backend=backend, backward=backward, **sizes)
                assert 1e-6 < cost.seconds < 1.0
                assert not cost.source.endswith("of the data sheet")  # that is, no table
                if cost.flop:  # below the peak of any device
                    assert cost.flop / cost.seconds < 2.5e15
                assert cost.residual in library.entries
    assert set(SIZES) == set(KINDS)


def test_work_of_attention():
    library = load_library("h200-healthy")
    pairs = 4096.0**2
    full = kernel_cost(library, "attention", mask="full", **ATTENTION)
    assert full.flop == 4.0 * 2 * 16 * 128 * pairs
    causal = kernel_cost(library, "attention", **ATTENTION)
    assert causal.flop == full.flop / 2
    assert kernel_cost(library, "attention", backward=True, **ATTENTION).flop == 2.5 * causal.flop
    window = kernel_cost(library, "attention", window=512.0, **ATTENTION)
    assert window.flop == 4.0 * 2 * 16 * 128 * (512 * 4096 - 512**2 / 2)
    assert window.seconds < causal.seconds < full.seconds
    assert kernel_cost(library, "attention", window=9e9, **ATTENTION) == causal
    narrow = kernel_cost(library, "attention", v_head_dim=64.0, **ATTENTION)
    assert narrow.flop == 0.75 * causal.flop


def test_both_gradients_of_a_product_are_two_products():
    library = load_library("h100-healthy")
    m, n, k = 8192.0, 2048.0, 4096.0
    both = kernel_cost(library, "gemm", m=m, n=n, k=k, backward=True)
    parts = [
        kernel_cost(library, "gemm", m=m, n=k, k=n), kernel_cost(library, "gemm", m=k, n=n, k=m),
    ]  # fmt: skip
    assert both.seconds == pytest.approx(sum(part.seconds for part in parts))
    assert both.flop == sum(part.flop for part in parts)


@pytest.mark.parametrize("gpu", ["a100", "h100", "b200", "mi300x"])
@pytest.mark.parametrize("backward", [False, True])
def test_no_product_is_faster_than_a_kernel_can_be(gpu, backward):
    library = load_library(f"{gpu}-healthy")
    fixed = library.kernels["memory/copy"].terms[0].coefficient

    def seconds(m, n, k):
        return kernel_cost(library, "gemm", m=m, n=n, k=k, backward=backward).seconds

    assert 1e-6 < fixed <= seconds(8.0, 8.0, 8.0) < 50e-6
    for side in (8.0, 64.0, 128.0):  # a larger size takes as long or longer, without a jump
        for other in (16.0, 512.0):
            found = [seconds(s, other, 4096.0) for s in (side / 2.0, side, side * (1 + 1e-9))]
            assert found[0] <= found[1] == pytest.approx(found[2], rel=1e-6)


def test_attention_is_found_in_either_place():
    axes = {"batch": np.array([1.0]), "heads": np.array([16.0]), "seq": np.array([1e3, 4e3]),
            "head_dim": np.array([128.0])}  # fmt: skip
    table = KernelTable(axes, np.full((1, 1, 2, 1), 1e14), source="measured: here")
    named = {"attention/math/bf16/causal/forward": table}
    sizes = ATTENTION | {"batch": 1.0, "kv_heads": 16.0}
    for place in ("tables", "kernels"):
        library = Library("made", "NVIDIA H100 SXM", {}, **{place: named})
        cost = kernel_cost(library, "attention", **sizes)
        assert cost.source == "measured: here"
        assert cost.seconds == pytest.approx(cost.flop / 1e14)


def test_deterministic_attention_takes_longer():
    for name in ("a100", "h100", "gb200", "mi300x"):
        library = load_library(f"{name}-healthy")
        usual, fixed = (
            kernel_cost(library, "attention", backward=True, deterministic=d, **ATTENTION).seconds
            for d in (False, True)
        )
        assert 1.05 < fixed / usual < 2.0


def test_what_stands_in_is_said():
    library = one("rms_norm/te/forward", FIT)
    own = kernel_cost(library, "rms_norm", backend="te", rows=8.0, columns=32.0)
    other = kernel_cost(library, "rms_norm", backend="eager", rows=8.0, columns=32.0)
    assert own.seconds == other.seconds == FIT.seconds(rows=8.0, columns=32.0)
    assert (own.extrapolated, other.extrapolated) == (False, True)
    assert own.source == "measured"
    assert "rms_norm/te/forward" in other.source
    assert kernel_cost(library, "rms_norm", rows=8.0, columns=32.0) == own  # the one there is
    assert kernel_cost(library, "rms_norm", backend="te", rows=1e6, columns=32.0).extrapolated
    sheet = kernel_cost(library, "memory", bytes=1e9)
    assert sheet.extrapolated
    assert sheet.seconds > 1e9 / 3.35e12


def test_eight_bits_without_a_table_are_bf16_by_the_peaks():
    grid = replace(GRID, axes={k: 64.0 * v for k, v in GRID.axes.items()})
    library = one("gemm/bf16", grid)
    sizes = {"m": 128.0, "n": 256.0, "k": 1024.0}
    half = kernel_cost(library, "gemm", dtype="fp8", **sizes)
    whole = kernel_cost(library, "gemm", **sizes)
    assert half.seconds == pytest.approx(whole.seconds * 989 / 1979)
    assert half.extrapolated


@pytest.mark.parametrize(
    ("kind", "settings_", "named"),
    [
        ("gem", SIZES["gemm"], "gemm"),
        ("attention", {**ATTENTION, "backend": "fa5"}, "fa4"),
        ("attention", {**ATTENTION, "mask": "casual"}, "causal"),
        ("gemm", {**SIZES["gemm"], "dtype": "bf61"}, "bf16"),
        ("gemm", {**SIZES["gemm"], "q": 1.0}, "m, n, k"),
        ("gemm", {"m": 1.0, "n": 1.0}, "k"),
        ("gemm", {"m": 1.0, "n": 1.0, "k": 0.0}, "k"),
        ("gemm", {**SIZES["gemm"], "dtype": "mxfp8"}, "mxfp8"),
    ],
)
def test_unknown_kernels_are_refused(kind, settings_, named):
    with pytest.raises(prism.PrismError, match=named):
        kernel_cost(load_library("h100-healthy"), kind, **settings_)
