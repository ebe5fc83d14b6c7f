"""Published jobs, from their files alone: experiments/validation/public-jobs, few replicates."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from campaign import some
from drawn_steps import draw_steps

import prism

SCRIPT = Path(__file__).parents[1] / "experiments" / "validation" / "public-jobs" / "run.py"
SMALL = 128  # GPUs up to which jobs are simulated here


@pytest.fixture(scope="module")
def public():
    spec = importlib.util.spec_from_file_location("public_jobs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(public, name):
    """Read a table that run.py wrote."""
    return public.read(public.HERE / name)


@pytest.fixture(scope="module")
def jobs(public):
    """Job of every published step time, None where prism has no such device, model or precision."""
    out = []
    for entry in public.published():
        try:
            out.append((entry, public.job_of(entry)))
        except prism.PrismError:
            out.append((entry, None))
    return out


def test_every_published_layout_is_a_job_of_its_gpus(jobs) -> None:
    assert len(jobs) == 481
    for entry, job in jobs:
        assert entry.seconds > 0.0
        if job is not None:
            assert job.world_size == entry.gpus == job.n_nodes * job.cluster.gpus_per_node
        else:  # experts spread over tensor-parallel ranks too
            assert entry.group.endswith(" moe")


def test_a_row_names_its_source_and_no_prediction_stands_for_two_jobs(public) -> None:
    entries = public.published()
    assert {e.row["source"] for e in entries} == set(public.file()["sources"])
    rows = {e.key: e.row for e in entries}
    assert all(rows[e.key] is e.row for e in entries)
    held = {e.row["source"] for e in entries if e.held_out}
    assert {"megascale", "llama3", "bridge", "dgxc"} <= held
    assert any(e.row["source"] == "bridge" and not e.held_out for e in entries)


def test_results_are_those_of_the_jobs_at_this_commit(public, jobs) -> None:
    """A ninth of the small jobs anew, with few steps; bounds and README rest on the table."""
    rows = table(public, "results.csv")
    known = {(r["job"], r["precision"], r["gpus"]): r for r in rows}
    every = {e.key: (e, job) for e, job in jobs}.values()
    small = [
        (entry, job) for entry, job in every
        if job is not None and entry.gpus <= SMALL and entry.row["device"] in ("h100", "a100")
    ]  # fmt: skip
    assert len(small) > 150
    for i, (entry, job) in enumerate(some(small, 9)):
        (found,) = public.ideal_steps([entry])
        there = known[entry.key]
        assert found["ideal_s"] == pytest.approx(there["ideal_s"], rel=1e-4)
        if i % 3 == 0:
            mean = float(draw_steps(job, 64, 0).step_time.mean())
            assert mean == pytest.approx(there["mean_s"], rel=0.01)


def test_steps_from_job_files_alone_are_near_the_published(public) -> None:
    found = {(name, key): rest for name, key, *rest in public.classes(table(public, "results.csv"))}
    for name, n, off, std in (
        ("h100 megatron bf16", 51, 0.02, 0.031), ("h100 megatron fp8", 60, 0.02, 0.06),
        # attention not fused; InternEvo's slow networks
        ("a100 megatron-2022 bf16", 52, 0.065, 0.13),
        ("gb200 megatron bf16", 3, 0.055, 0.015), ("b200 megatron fp8", 4, 0.015, 0.03),
        ("b200 megatron mxfp8", 4, 0.01, 0.01), ("gb200 megatron fp8", 15, 0.025, 0.06),
        ("gb200 megatron mxfp8", 10, 0.025, 0.09), ("a100 eager-2023 bf16", 64, 0.015, 0.075),
        ("h100 eager-2023 bf16", 52, 0.03, 0.06), ("h100 eager-2023 fp8", 7, 0.04, 0.035),
        ("h100 compiled-2024 bf16", 4, 0.04, 0.07),
    ):  # fmt: skip
        assert found[name, "mean_s"][:2] == [n, pytest.approx(1.0, abs=off)], name
        assert found[name, "mean_s"][2] < std, name
    *_, low, high = found["h100 megatron bf16", "mean_s"]
    assert 0.95 < low < high < 1.1


def test_fp8_gains_what_was_published(public) -> None:
    rows = [r for r in table(public, "results.csv") if r["source"] == "dgxc"]
    dense = [(row, a, b) for row, a, b in public.pairs(rows) if not row["class"].endswith(" moe")]
    assert len(dense) == 54
    off = np.array([b - a for _, a, b in dense])
    assert np.abs(off).max() < 0.08  # releases of one layout differ by 0.09
    assert np.median(np.abs(off)) < 0.03


def test_medians_of_mlperf_from_job_files_alone(public) -> None:
    rows = [r for r in table(public, "spread.csv") if r["job"].startswith("llama31")]
    ratio = np.array([r["p50_s"] / r["measured_p50_s"] for r in rows])
    assert len(rows) == 16
    assert 0.96 < ratio.min() < ratio.max() < 1.15  # the highest is of nvfp4
    assert np.sort(ratio)[-2] < 1.065
    assert np.exp(np.log(ratio).mean()) == pytest.approx(1.0, abs=0.035)


def test_steps_grow_with_size_as_published(public) -> None:
    rows = [r for r in table(public, "results.csv") if r["class"] == "h100 megatron bf16"]
    series = public.growth(rows)
    assert len(series) == 9
    off = np.array([abs(predicted - published) for *_, published, predicted, _ in series])
    assert np.sum(off < 0.02) >= 7  # 8B in 25.02 and 405B in 24.09 are off by 2.0 and 2.2 points
    assert off.max() < 0.025


def test_steps_spread_as_measured_in_mlperf(public) -> None:
    rows = [r for r in table(public, "spread.csv") if r["device"] == "h100"]
    found = public.agreement(rows)
    assert found["systems"] == 15
    assert found["spearman"] > 0.2  # large jobs vary most, and more than by what is not hidden
    assert found["median error of the excess [points]"] < 0.17
    # one step effect for all: nine systems vary less than half as much, or more than twice
    assert found["p95 - p50 within a factor of 2"] >= 0.3
    assert 0.5 < found["between runs, median ratio"] < 2.0


def test_growth_pairs_and_agreement_are_computed_as_they_say(public) -> None:
    rows = [
        {"job": "a", "release": "1", "class": "x", "precision": precision, "gpus": g,
         "measured_s": m, "ideal_s": 1.0, "mean_s": p, "mean_se_s": 0.01 * p}
        for precision, g, m, p in (("bf16", 64, 10.0, 11.0), ("bf16", 8, 8.0, 10.0),
                                   ("fp8", 8, 6.0, 8.0))
    ]  # fmt: skip
    ((job, precision, _, first, last, measured, found, error),) = public.growth(rows)
    assert (job, precision, first, last) == ("a", "bf16", 8, 64)
    assert (measured, found) == pytest.approx((0.25, 0.1))
    assert error == pytest.approx(0.01 * np.sqrt(2.0))
    ((row, published, predicted),) = public.pairs(rows)
    assert row is rows[2]
    assert (published, predicted) == pytest.approx((0.75, 0.8))
    (_, key, n, mean, *_) = public.classes(rows[:2])[1]
    assert (key, n) == ("mean_s", 2)
    assert mean == pytest.approx(np.sqrt(1.1 * 1.25))
