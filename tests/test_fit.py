"""`prism.fit` of pipeline traces: what it reports is what the trace was made from."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from campaign import examples
from pipeline_synth import Effects, Layout, as_production, make_trace

import prism
from prism import PrismError, estimate, fit, load_job, save, simulate, summary
from prism.simulation.prepare import prepare_trace
from prism.simulation.steps import run_blocks
from prism.simulation.tracemodel.file import load_model

TRUTH = Path(__file__).parents[1] / "experiments" / "verification" / "synthetic_truth.py"


def write(folder, layout, effects, seed=1, name="trace.csv"):
    frame, truth = make_trace(layout, effects, seed)
    path = folder / name
    as_production(frame).to_csv(path, index=False)
    return path, truth


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    effects = Effects(
        rank_sd=0.006, step_sd=0.012, content_sd=0.02, residual_sd=0.006, gap_s=0.002,
        lemons={(2, 1): 1.7},
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("fit")
    path, truth = write(folder, Layout(4, 2, 6, 24), effects)
    dataset = fit(path, 0)
    save(dataset, folder / "model.nc")
    return dataset, truth, folder / "model.nc"


def test_runs_of_a_fitted_trace_can_hold_an_error_of_the_model(fitted):
    job = load_job(fitted[2])
    asked = {"replicates": 640, "run_replicates": 1_000, "steps": 500, "seed": 1}
    wrong, right = (
        summary(estimate(job.replace(f"variability.model_error={x}"), **asked)) for x in (0.05, 0)
    )
    assert right["step_time"] == wrong["step_time"] and "model_error" not in right
    run = wrong["time_to_train"]
    assert run["model_error_std"] == pytest.approx(0.05 * run["mean"], rel=0.1)
    with pytest.raises(PrismError, match="variability.effects"):
        estimate(job.replace("variability.effects.jitter.mean_s=0.1"), **asked)


def test_the_report_is_what_the_trace_was_made_from(fitted):
    dataset, truth, _ = fitted
    report = prism.summary(dataset)
    json.dumps(report, allow_nan=False)
    assert report["kind"] == "trace"
    sizes = {k: report[k] for k in ("steps", "dp_size", "stages", "workers", "p2p")}
    assert sizes == {"steps": 24, "dp_size": 4, "stages": 2, "workers": 8, "p2p": "blocking"}
    assert report["step_time"]["mean"] == pytest.approx(truth.step_times.mean(), rel=1e-5)
    ((lemon),) = report["lemons"]
    assert (lemon["replica"], lemon["stage"]) == (2, 1)
    assert lemon["slowdown"] == pytest.approx(1.7, rel=0.03)
    assert any("1.7" in warning and "peers" in warning for warning in report["warnings"])
    forward = {k: e["by_op_kind"]["forward"] for k, e in report["effects"].items() if k != "call"}
    for name, true in (("microbatch", 0.02), ("residual", 0.006)):
        low, high = forward[name]["ci"]
        assert 0.9 * low < true < 1.1 * high
        assert forward[name]["cv"] == pytest.approx(true, rel=0.15)
    assert forward["step"]["cv"] == pytest.approx(0.012, rel=0.4)
    assert report["effects"]["call"]["cv"] is None
    shares = sum(e["share"] for e in forward.values())
    assert shares == pytest.approx(1.0)
    said = " ".join(report["not_identifiable"])
    for word in ("tp and cp ranks", "node share", "congestion"):
        assert word in said


def test_kernels_are_ranked_by_time_and_gaps_are_among_them(fitted):
    kernels = prism.summary(fitted[0])["kernels"]
    shares = [k["step_share"] for k in kernels]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1.0)
    assert {k["op_kind"] for k in kernels} >= {"forward", "backward", "transfer", "launch_gap"}
    (backward,) = [k for k in kernels if k["name"].startswith("backward stage 0")]
    assert backward["n"] == 4 * 24 * 6
    assert backward["mean"] == pytest.approx(0.4, rel=0.02)


def test_the_cross_check_agrees_with_the_measurement(fitted):
    check = prism.summary(fitted[0])["cross_check"]
    for name in ("model", "resampled"):
        assert check[name]["mean"] == pytest.approx(check["measured"]["mean"], rel=0.01)
        assert check[name]["cv"] == pytest.approx(check["measured"]["cv"], rel=0.5)
    assert check["ideal"] < check["measured"]["mean"]


def test_a_fit_needs_no_luck(fitted, tmp_path):
    path, _ = write(tmp_path, Layout(2, 2, 4, 6), Effects(content_sd=0.02))
    drawn = fit(path)  # with a seed of its own, which gives the same again
    assert drawn.identical(fit(path, prism.summary(drawn)["seed"]))
    one, other = prism.summary(drawn), prism.summary(fit(path))
    assert one["seed"] != other["seed"]
    assert one["cross_check"]["model"] != other["cross_check"]["model"]


def test_the_model_s_file_simulates_the_traced_job(fitted):
    _, truth, path = fitted
    drawn = simulate(load_job(path), 4096, 1)
    mean, std = truth.step_times.mean(), truth.step_times.std(ddof=1)
    assert float(drawn.step_time.mean()) == pytest.approx(mean, rel=0.005)
    assert float(drawn.step_time.std()) == pytest.approx(std, rel=0.4)
    run = estimate(load_job(path), steps=100, seed=1, replicates=1024, run_replicates=256)
    assert float(run.time_to_train.mean()) == pytest.approx(100 * mean, rel=0.01)


def test_few_steps_and_replicas_are_said_to_be_few(tmp_path):
    path, _ = write(tmp_path, Layout(1, 2, 4, 4), Effects(content_sd=0.02))
    warnings = " ".join(prism.summary(fit(path, 0))["warnings"])
    assert "4 steps: the step effect" in warnings
    assert "1 dp replica:" in warnings
    path, _ = write(tmp_path, Layout(1, 1, 1, 4), Effects(), name="one.csv")
    report = prism.summary(fit(path, 0))
    assert report["effects"] == {} and report["loadings"] == {}
    assert any("effects" in text and "separated" in text for text in report["warnings"])
    json.dumps(report, allow_nan=False)


def test_one_step_is_refused(tmp_path):
    path, _ = write(tmp_path, Layout(2, 2, 4, 1), Effects())
    with pytest.raises(PrismError, match="at least 2"):
        fit(path)


# --------------------------------------------------------------------- the whole chain, many times
def truth_module():
    spec = importlib.util.spec_from_file_location("synthetic_truth", TRUTH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_intervals_of_whole_traces_cover_the_truth():
    """Some traces of one job; the full table is experiments/verification/synthetic_truth.py."""
    truth = truth_module()
    case = truth.CASES[1]  # with a lemon
    small = case._replace(layout=Layout(4, 2, 6, 12))
    n = examples(10)
    found = truth.coverage(small, n, 7)
    # two intervals of each, half of them independent: of 0.9, five standard errors down
    for name, (share, ratio) in found.items():
        assert share > 0.9 - 5.0 * np.sqrt(0.09 / n), name
        assert abs(ratio) < 0.3, name
    pooled = truth.coverage(small._replace(effects=truth.PLAIN), examples(4), 7, pooled=True)
    assert pooled["rank"][0] < 0.3 and pooled["residual"][0] < 0.3  # the negative control


def layered(tmp_path, labels):
    """A job whose microbatch is two forward and two backward ops, all with the same content."""
    rng = np.random.default_rng(0)
    means = {("forward", "attn"): 0.01, ("forward", "mlp"): 0.03}
    means |= {("backward", "mlp_b"): 0.06, ("backward", "attn_b"): 0.02}
    rows = []
    for step in range(24):
        slow, ends = np.exp(0.02 * rng.standard_normal()), []
        for rank in range(4):
            at = 0.0
            for microbatch in range(4):
                work = slow * np.exp(0.03 * rng.standard_normal())
                for (kind, name), mean in means.items():
                    took = mean * work * np.exp(0.005 * rng.standard_normal())
                    mb = {"named": microbatch, "none": -1, "one": 0}[labels]
                    rows.append((step, rank, kind, name, at, took, mb))
                    at += took
            ends.append(at)
        for rank, at in enumerate(ends):
            rows.append((step, rank, "all_reduce", "grads", at, max(ends) + 0.01 - at, -1))
    names = ["step", "rank", "op_kind", "name", "start_s", "duration_s", "microbatch"]
    path = tmp_path / f"{labels}.csv"
    pd.DataFrame(rows, columns=names).to_csv(path, index=False)
    return path


@pytest.mark.parametrize("labels", ["named", "none", "one"])
def test_a_microbatch_of_several_ops_keeps_each_of_them(tmp_path, labels):
    summary = prism.summary(fit(layered(tmp_path, labels), 0))
    means = {k["name"]: k["mean"] for k in summary["kernels"]}
    assert means["attn stage 0"] == pytest.approx(0.01, rel=0.03)
    assert means["mlp_b stage 0"] == pytest.approx(0.06, rel=0.03)
    assert summary["effects"]["microbatch"]["cv"] == pytest.approx(0.03, rel=0.15)
    check = summary["cross_check"]
    assert check["model"]["mean"] == pytest.approx(check["measured"]["mean"], rel=0.01)
    assert any("numbered" in note for note in summary["notes"]) == (labels != "named")


def test_exposed_communication_of_a_trace(fitted):
    """What the step saves if the trace's messages take no time."""
    job = load_job(str(fitted[2]))
    drawn = simulate(job, 256, seed=2)
    model = load_model(job.variability.model)
    mean = model.mean.copy()
    for i, node in enumerate(model.nodes):
        if node.kind == "op" and node.op_kind not in ("forward", "backward", "optimizer"):
            mean[i] = 0.0
    free = prepare_trace(job, replace(model, mean=mean), 2)
    rest = run_blocks(free.program, range(4), 2)[0].mean(dtype=np.float64)
    saved = 1.0 - float(rest) / float(drawn.step_time.mean())
    assert float(drawn.exposed_communication) == pytest.approx(saved, abs=1e-6)
    assert 0.0 < saved < 0.5
