"""The shipped sets: complete, sourced, mean 1; and the file they come in."""

import csv
from pathlib import Path

import numpy as np
import pytest

from prism import PrismError, load_job, load_library
from prism.cluster.devices import DEVICES, device_key
from prism.distributions.distribution import empirical, lognormal, mixture, quantile_table
from prism.distributions.kerneltables import KernelTable
from prism.distributions.library import (
    Entry,
    Library,
    library_names,
    library_path,
    save_library,
    to_dataset,
)
from prism.present.show import describe

STATES = ("healthy", "uncurated", "stressed")
SETS = [f"{gpu}-{state}" for gpu in ("a100", "gb200", "h100") for state in STATES]
SIZES = [
    f"{tier}_{size}" for tier in ("nvlink", "network") for size in ("small", "medium", "large")
]
KERNELS = ["gemm_large", "gemm_small", "attention", "memory", "optimizer", "compute", "p2p"]
LAWS = [*(f"residual/{name}" for name in KERNELS + SIZES), "rank", "step", "call"]
CLASSES = {
    "h100": "megatron compiled eager experts", "a100": "megatron eager", "b200": "megatron experts",
    "b300": "experts", "gb200": "megatron experts", "gb300": "megatron experts",
}  # fmt: skip
"""Classes of jobs that were published, by device."""
FIGURES = [
    "rank/node_share",
    "rank/memory_loading",
    "step/correlation_time_s",
    "microbatch/backward_loading",
    "microbatch/loss_loading",
    "run/cv",
    "run/model_error_unmeasured",
    "run/model_error_growth",
    "regime/probability",
    "regime/factor",
    "regime/duration_s",
    "stall/rate_per_hour",
    "stall/duration_s",
    "stall/duration_cv",
    "nominal/gemm_efficiency_max",
    "nominal/gemm_half_flop",
    "nominal/attention_efficiency",
    "nominal/attention_backward_efficiency",
    "nominal/cast_efficiency",
    "nominal/overlap_cost",
    "nominal/expert_layer_s",
    *(
        f"nominal/{name}_{framework}"
        for name in ("derate", "traffic", "attention")
        for framework in ("megatron", "compiled", "eager")
    ),
    "nominal/memory_efficiency",
    "nominal/nvlink_efficiency",
    "nominal/network_efficiency",
    "nominal/kernel_launch_s",
]
# on devices whose kernels were measured, or one of whose generation
DISPATCH = [f"nominal/deepep_{name}" for name in (
    "start_s", "local_s_per_byte", "copy_s", "nvlink_efficiency", "network_efficiency",
)] + ["nominal/hybridep_ratio"]  # fmt: skip


@pytest.fixture(scope="module", params=SETS)
def shipped(request):
    return load_library(request.param)


def small_library():
    entries = [
        Entry("residual/a", "text", "one", law=lognormal(0.02), n=3, device="V100"),
        Entry("residual/b", "text", "two", law=empirical([0, 0.5, 1], [0.9, 1.0, 1.3])),
        Entry("c", "text", law=mixture([0.9, 0.1], [lognormal(0.1), lognormal(0.2).times(2.0)])),
        Entry("rank/node_share", "text", "four", number=0.25, units="1"),
    ]
    sizes = {"m": np.array([64.0, 256.0]), "n": np.array([128.0])}
    table = KernelTable(sizes, np.array([[1e14], [4e14]]), source="text")
    rows = {entry.name: entry for entry in entries}
    return Library("small", "a device", rows, "2026-01-01", {"gemm/bf16": table})


def test_all_sets_are_shipped():
    assert set(SETS) <= set(library_names())


def test_a_set_is_complete_and_sourced(shipped):
    content = {"microbatch"} if shipped.name.endswith("stressed") else set()
    dispatch = set() if shipped.name.startswith("a100") else set(DISPATCH)
    classes = {
        f"run/{name}_{kind}"
        for name in ("model_error", "largest_gpus")
        for kind in CLASSES.get(shipped.name.partition("-")[0], "").split()
    }
    assert set(LAWS) | set(FIGURES) | content | dispatch | classes == set(shipped.entries)
    for name, entry in shipped.entries.items():
        assert len(entry.source) >= 10, name
        assert entry.long_name and entry.units, name
    assert shipped.device and shipped.date


def test_laws_have_mean_one_and_a_table(shipped):
    for name in LAWS:
        law = shipped.law(name)
        assert law.mean == pytest.approx(1.0, abs=1e-9), name
        assert float(law.ppf(0.0 if law.family == "empirical" else 1e-9)) > 0.0, name
        assert np.isfinite(quantile_table(law, 1.5)).all(), name


def test_figures_are_in_range(shipped):
    for name in [*FIGURES, *(name for name in DISPATCH if name in shipped)]:
        value = shipped.value(name)
        assert np.isfinite(value) and value >= 0.0, name
        if (
            name.endswith("efficiency")
            or "/attention_" in name
            or name.endswith(("_max", "probability", "_share"))
        ):
            assert value <= 1.0, name


def test_healthy_h100_is_as_documented():
    library = load_library("h100-healthy")
    assert library.law("rank").params[2] == 0.0  # no lemons after a burn-in
    assert library.law("residual/gemm_large").cv == pytest.approx(0.0124, abs=5e-4)
    p2p = library.law("residual/p2p")
    assert float(p2p.ppf(0.99) / p2p.ppf(0.5)) == pytest.approx(1.3, abs=0.01)
    assert library.value("regime/probability") == 0.0
    assert library.value("stall/rate_per_hour") == 0.0
    assert library.value("nominal/gemm_efficiency_max") == pytest.approx(0.70, abs=0.01)


@pytest.mark.parametrize("name", library_names())
def test_tables_of_shipped_sets_are_plausible(name):
    library = load_library(name)
    device = DEVICES[device_key(library.device)]
    for kind, table in library.tables.items():
        assert list(table.rate.shape) == [len(grid) for grid in table.axes.values()]
        if kind.startswith("gemm/"):
            best = table.rate.max() / device.flop_per_s(kind.removeprefix("gemm/"))
            assert 0.4 < best < 1.0, kind


def test_libraries_hold_what_was_fitted_to_published_jobs():
    path = Path(__file__).parents[1] / "experiments" / "public-jobs" / "fitted.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["device"] for row in rows} == {"h100", "a100", "gb200", "b200", "b300", "gb300"}
    for row in rows:
        library, value = load_library(f"{row['device']}-healthy"), float(row["value"])
        found = {
            "rank/body_cv": lambda s: s.law("rank").params[0], "step/cv": lambda s: s.law("step").cv
        }.get(row["entry"], lambda s, row=row: s.value(row["entry"]))(library)  # fmt: skip
        rounded = 5e-3 if row["entry"] == "rank/node_share" else 0.0
        assert found == pytest.approx(value, rel=5e-3, abs=rounded)
        if row["low"] != "nan":
            assert float(row["low"]) <= value <= float(row["high"])


def test_the_error_of_a_class_nobody_measured_is_that_of_classes_not_fitted():
    path = Path(__file__).parents[1] / "experiments" / "public-jobs" / "unfitted.csv"
    with path.open(newline="") as file:
        squares = [float(r["mean"]) ** 2 + float(r["sd"]) ** 2 for r in csv.DictReader(file)]
    assert len(squares) == 16
    for library in map(load_library, library_names()):
        error = library.value("run/model_error_unmeasured")
        assert error == pytest.approx(np.sqrt(np.mean(squares)), rel=0.02)
        own = [library.value(n) for n in library.entries if n.startswith("run/model_error_")]
        assert max(own) == error  # no class that was measured is wider


def test_uncurated_differs_in_its_gpus_alone():
    for gpu in ("a100", "h100", "gb200"):
        healthy, other = (load_library(f"{gpu}-{state}") for state in ("healthy", "uncurated"))
        changed = {n for n, e in healthy.entries.items() if e != other.entry(n)}
        assert changed == {"rank", "rank/node_share"}
        params = other.law("rank").params
        # 392 V100 (gpu_variability): 1.6 % and four GPUs of up to 1.203
        assert params[0] == pytest.approx(0.0162, abs=5e-4)
        assert (params[2], params[4]) == pytest.approx((4 / 392, 1.203), abs=1e-3)


def test_stressed_varies_more():
    for gpu in ("a100", "h100", "gb200"):
        healthy, stressed = (load_library(f"{gpu}-{state}") for state in ("healthy", "stressed"))
        for name in LAWS:
            assert stressed.law(name).cv >= healthy.law(name).cv - 1e-12, name


def test_carried_over_entries_say_so():
    library = load_library("gb200-healthy")
    for name in LAWS[: len(KERNELS + SIZES)]:
        assert "assumption: carried over from H100" in library.source(name)


def test_file_round_trip(tmp_path):
    library = small_library()
    path = tmp_path / "small.nc"
    save_library(library, path)
    again = load_library(path)
    assert [entry.source for entry in again.entries.values()] == ["text"] * 4
    assert again.entry("residual/a") == library.entry("residual/a")
    assert again.value("rank/node_share") == 0.25
    q = np.linspace(0.01, 0.99, 9)
    for name in ("residual/a", "residual/b", "c"):
        np.testing.assert_allclose(again.law(name).ppf(q), library.law(name).ppf(q), rtol=1e-12)
    table = again.tables["gemm/bf16"]
    assert table.rate.ravel() == pytest.approx([1e14, 4e14], rel=1e-4)
    assert table(m=128, n=1) == pytest.approx(2e14, rel=1e-4)  # half way in logarithms
    assert list(tmp_path.iterdir()) == [path]


def test_same_library_gives_the_same_bytes(tmp_path):
    for name in ("a.nc", "b.nc"):
        save_library(small_library(), tmp_path / name)
    assert (tmp_path / "a.nc").read_bytes() == (tmp_path / "b.nc").read_bytes()


def test_every_variable_has_units_and_a_long_name():
    dataset = to_dataset(small_library())
    for name in dataset.data_vars:
        assert dataset[name].attrs.get("units"), name
        assert dataset[name].attrs.get("long_name"), name


def test_show_lists_every_entry(shipped):
    rows = describe(shipped.name).figures["entries"]
    assert [row["entry"] for row in rows] == list(shipped.entries)


def test_errors_name_a_way_out(tmp_path):
    with pytest.raises(PrismError, match="h100-healthy"):
        load_library("h100-helthy")
    with pytest.raises(PrismError, match="residual/gemm_large"):
        load_library("h100-healthy").law("residual/gemm_lage")
    with pytest.raises(PrismError, match="use value"):
        load_library("h100-healthy").law("rank/node_share")
    with pytest.raises(PrismError, match="use law"):
        load_library("h100-healthy").value("rank")
    for content in (b"", b"not a file", b"\x89HDF\r\n\x1a\n" + bytes(100)):
        path = tmp_path / "bad.nc"
        path.write_bytes(content)
        with pytest.raises(PrismError, match="bad.nc"):
            load_library(path)
    with pytest.raises(PrismError):
        load_library(tmp_path)


def test_another_netcdf_file_is_refused(tmp_path):
    import xarray as xr

    path = tmp_path / "other.nc"
    xr.Dataset({"x": ("i", [1.0])}).to_netcdf(path, engine="h5netcdf")
    with pytest.raises(PrismError, match=r"other\.nc: .*library"):
        load_library(path)


def test_a_library_is_no_job():
    with pytest.raises(PrismError, match="--set variability.library="):
        load_job(library_path("h100-healthy"))


def test_only_lognormal_mixtures_go_to_a_file(tmp_path):
    from prism.distributions.distribution import normal

    entry = Entry("a", "text", law=mixture([1, 1], [normal(0.1), normal(0.2)]))
    with pytest.raises(PrismError, match="lognormal"):
        save_library(Library("x", "y", {"a": entry}), tmp_path / "x.nc")
    assert not list(tmp_path.iterdir())
