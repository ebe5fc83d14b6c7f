"""Durations of kernels by shape, as `prism.kernel` gives them from a library's tables."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import prism

SETS = sorted(p.stem for p in (Path(__file__).parents[1] / "distributions").glob("*.nc"))
H100 = prism.load_library("h100-healthy")
COPY = H100.kernels["memory/copy"]
FIT = replace(
    COPY, ends={"rows": (4.0, 4096.0), "columns": (16.0, 1024.0)}, source="measured",
    terms=tuple(
        replace(COPY.terms[0], coefficient=coefficient, powers=powers)
        for coefficient, powers in ((2e-6, {}), (1e-12, {"rows": 1.0, "columns": 1.0}),
                                    (3e-9, {"rows": 0.5}))
    ),
)  # fmt: skip
GRID = replace(
    H100.tables["gemm/bf16"],
    axes={"m": np.array([1.0, 2.0]), "n": np.array([4.0]), "k": np.array([8.0, 16.0, 32.0])},
    rate=np.array([[[1e12, 2e12, 3e12]], [[2e12, 3e12, 4e12]]]), source="measured",
)  # fmt: skip
ATTENTION = {"batch": 2, "heads": 16, "kv_heads": 8, "seq": 4096, "head_dim": 128}


def one(name, table, place="kernels"):
    """H100's set with a single table."""
    return replace(H100, **({"tables": {}, "kernels": {}} | {place: {name: table}}))


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


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_no_shipped_fit_falls_with_a_size(data):
    library = prism.load_library(data.draw(st.sampled_from(SETS)))
    fits = [fit for fit in library.kernels.values() if isinstance(fit, type(COPY))]
    for fit in fits:
        known = sorted({size for term in fit.terms for size in term.powers})
        sizes = {key: data.draw(st.floats(1.0, 1e5)) for key in known}
        grown = data.draw(st.sampled_from(known))
        assert fit.seconds(**{**sizes, grown: 1.5 * sizes[grown]}) >= fit.seconds(**sizes) > 0.0


def test_work_of_a_window():
    causal = prism.kernel("attention", device="h200", **ATTENTION)
    window = prism.kernel("attention", device="h200", window=512, **ATTENTION)
    work = 1e12 * window["tflops"] * window["mean"]
    assert work == pytest.approx(4.0 * 2 * 16 * 128 * (512 * 4096 - 512**2 / 2))
    assert window["mean"] < causal["mean"]
    wide = prism.kernel("attention", device="h200", window=9e9, **ATTENTION)
    assert wide["mean"] == causal["mean"]
    narrow = prism.kernel("attention", device="h200", v_head_dim=64, **ATTENTION)
    work = [x["tflops"] * x["mean"] for x in (narrow, causal)]
    assert work[0] == pytest.approx(0.75 * work[1])


@pytest.mark.parametrize("gpu", ["a100", "h100", "gb200", "mi300x"])
def test_deterministic_attention_takes_longer(gpu):
    usual, fixed = (
        prism.kernel("attention", device=gpu, backward=True, deterministic=d, **ATTENTION)["mean"]
        for d in (False, True)
    )
    assert 1.05 < fixed / usual < 2.0


def test_attention_kernel_by_kernel_on_a100_is_its_own():
    """Megatron's softmax, as measured, is a part of it; each pass reads and writes all scores."""
    sizes = {"batch": 4, "heads": 32, "seq": 2048, "head_dim": 128, "backend": "math"}
    for backward, softmax_s in ((False, 2.3e-12), (True, 3.3e-12)):
        found = prism.kernel("attention", device="a100", backward=backward, **sizes)
        scores = 4 * 32 * 2048**2
        assert found["source"].startswith("measured: 306 of Megatron's") and found["tflops"] < 150
        assert 1.5 < found["mean"] / (softmax_s * scores) < 6.0
        twice = prism.kernel("attention", device="a100", backward=backward, mask="full", **sizes)
        assert twice["mean"] == pytest.approx(found["mean"], rel=1e-6)  # computed in full


def test_both_gradients_of_a_product_are_two_products():
    m, n, k = 8192, 2048, 4096
    both = prism.kernel("gemm", device="h100", m=m, n=n, k=k, backward=True)
    parts = [
        prism.kernel("gemm", device="h100", m=m, n=k, k=n),
        prism.kernel("gemm", device="h100", m=k, n=n, k=m),
    ]
    assert both["mean"] == pytest.approx(sum(part["mean"] for part in parts))


@pytest.mark.parametrize("gpu", ["a100", "h100", "b200", "mi300x"])
@pytest.mark.parametrize("backward", [False, True])
def test_no_product_is_faster_than_a_kernel_can_be(gpu, backward):
    fixed = prism.load_library(f"{gpu}-healthy").kernels["memory/copy"].terms[0].coefficient

    def seconds(m, n, k):
        return prism.kernel("gemm", device=gpu, m=m, n=n, k=k, backward=backward)["mean"]

    assert 1e-6 < fixed <= seconds(8.0, 8.0, 8.0) < 50e-6
    for side in (8.0, 64.0, 128.0):  # a larger size takes as long or longer, without a jump
        for other in (16.0, 512.0):
            found = [seconds(s, other, 4096.0) for s in (side / 2.0, side, side * (1 + 1e-9))]
            assert found[0] <= found[1] == pytest.approx(found[2], rel=1e-6)


@pytest.mark.parametrize("place", ["tables", "kernels"])
def test_attention_is_found_in_either_place(place):
    axes = {"batch": [1.0], "heads": [16.0], "seq": [1e3, 4e3], "head_dim": [128.0]}
    table = replace(
        GRID, axes={k: np.array(x) for k, x in axes.items()}, rate=np.full((1, 1, 2, 1), 1e14),
        source="measured: here",
    )  # fmt: skip
    library = one("attention/math/bf16/causal/forward", table, place)
    found = prism.kernel("attention", library=library, **ATTENTION | {"batch": 1})
    assert (found["source"], found["backend"]) == ("measured: here", "math")
    assert found["tflops"] == pytest.approx(100.0)


def test_what_stands_in_is_said():
    library, sizes = one("rms_norm/te/forward", FIT), {"rows": 8, "columns": 32}
    own = prism.kernel("rms_norm", library=library, backend="te", **sizes)
    other = prism.kernel("rms_norm", library=library, backend="eager", **sizes)
    assert own["mean"] == other["mean"] == FIT.seconds(rows=8.0, columns=32.0)
    assert (own["extrapolated"], other["extrapolated"]) == (False, True)
    assert own["source"] == "measured"
    assert "rms_norm/te/forward" in other["source"]
    found = prism.kernel("rms_norm", library=library, **sizes)  # the one there is
    assert (found["mean"], found["backend"]) == (own["mean"], "te")
    assert prism.kernel("rms_norm", library=library, backend="te", rows=1e6, columns=32)[
        "extrapolated"
    ]
    sheet = prism.kernel("memory", library=library, bytes=1e9)
    assert sheet["extrapolated"]
    assert sheet["mean"] > 1e9 / 3.35e12


def test_eight_bits_without_a_table_are_bf16_by_the_peaks():
    grid = replace(GRID, axes={k: 64.0 * v for k, v in GRID.axes.items()})
    library, sizes = one("gemm/bf16", grid), {"m": 512, "n": 1024, "k": 4096}
    half = prism.kernel("gemm", library=library, dtype="fp8", **sizes)
    whole = prism.kernel("gemm", library=library, **sizes)
    assert half["mean"] == pytest.approx(whole["mean"] * 989 / 1979)
    assert half["extrapolated"]
