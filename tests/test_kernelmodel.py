"""The model of a kernel trace: simulated steps against those of jobs whose graph is known."""

import json
from dataclasses import replace

import kineto_synth as synth
import numpy as np
import pytest

import prism
from prism import PrismError, estimate, fit, load_job, save, simulate, validate
from prism import replay as replay_file
from prism.analyses.replay import replay_trace
from prism.common.means import finite_mean
from prism.models.kerneltrace.graph import step_graph
from prism.models.kerneltrace.groups import node_groups
from prism.models.kerneltrace.model import fit_kernel_graph, fit_kernels, whole_step_graph
from prism.models.kerneltrace.steps import align, split_steps
from prism.simulation.tracemodel.graph import ends_of, filled
from prism.simulation.tracemodel.model import synthetic_graph
from prism.traces import read_trace

DEVICE_BOUND = synth.training_step(n_layers=3, kernels=4)
HOST_BOUND = synth.training_step(n_layers=3, kernels=4, mean_us=8.0, host_us=40.0)
N_STEPS = 24


def job(program, n_ranks, effect, seed, n_steps=N_STEPS):
    """Times of a job whose steps share an effect, or not, or whose host stalls now and then."""
    duration, host = synth.draw(program, n_steps, n_ranks, seed=seed)
    generator = np.random.default_rng(seed + 100)
    shared = np.exp(0.05 * generator.standard_normal((n_steps, 1, 1)))
    if effect == "device":
        duration *= shared
    if effect == "host":
        host *= shared
    if effect == "stalls":
        host += np.where(generator.random(host.shape) < 0.005, 1500.0, 0.0)
    return synth.simulate(program, duration, host)


def read(folder, program, times):
    return read_trace(synth.write(folder, program, times))


def measured_steps(trace):
    begin, _, end = split_steps(trace).bounds()
    return end - begin


def fitted(trace):
    """Model of a trace as `fit_kernels` makes it, less its report, and the measured steps [s]."""
    graph = whole_step_graph(split_steps(trace))
    return fit_kernel_graph(graph), graph.measured


def groups_of(trace):
    graph = step_graph(trace)
    return graph, node_groups(graph, finite_mean(graph.durations, axis=(1, 2)))


def simulated(model, seed=0, n=1_000):
    rng = np.random.default_rng(seed)
    return synthetic_graph(model, np.arange(n), rng).measured


@pytest.mark.parametrize("n_ranks", [1, 3])
@pytest.mark.parametrize("effect", ["none", "device", "host", "stalls"])
def test_simulated_steps_have_the_mean_and_spread_of_measured_ones(tmp_path, n_ranks, effect):
    program = HOST_BOUND if effect == "host" else DEVICE_BOUND
    model, measured = fitted(read(tmp_path, program, job(program, n_ranks, effect, seed=n_ranks)))
    drawn = simulated(model)
    assert drawn.mean() == pytest.approx(measured.mean(), rel=0.01)
    cv, expected = drawn.std() / drawn.mean(), measured.std(ddof=1) / measured.mean()
    # 24 steps tell their own spread to 15 %
    assert cv == pytest.approx(expected, rel=0.35)


@pytest.mark.parametrize(("program", "effect"), [(DEVICE_BOUND, "device"), (HOST_BOUND, "host")])
def test_without_what_steps_share_the_spread_is_lost(tmp_path, program, effect):
    # negative control of the test above
    model, measured = fitted(read(tmp_path, program, job(program, 1, effect, seed=1)))
    alone = simulated(replace(model, profile=np.ones_like(model.profile)))
    assert alone.std() / alone.mean() < 0.6 * measured.std() / measured.mean()


def test_steps_that_were_held_out_are_predicted_unless_kernels_are_independent(
    tmp_path, small_pools
):
    # many kernels whose times go up and down together, and enough steps to see that they do
    gemm = synth.Call("launch", "ampere_sgemm_64x64_nn", mean_us=60.0)
    program = [gemm] * 12 + [synth.Call("sync", host_us=5.0)]
    duration, host = synth.draw(program, 96, 1, seed=3, cv=0.02)
    duration *= np.exp(0.05 * np.random.default_rng(103).standard_normal((96, 1, 1)))
    paths = synth.write(tmp_path, program, synth.simulate(program, duration, host))
    found = {
        how: prism.summary(
            validate(trace=paths, dependence=how, bootstrap=19, replicates=320, seed=1)
        )
        for how in ("full", "none")
    }
    full, alone = found["full"], found["none"]
    assert (full["n_measured"], full["n_train"], full["ks_p_value_refit"]) == (48, 48, True)
    assert full["ks_p_value"] > 0.1 and abs(full["mean_error"]) < 0.05
    assert alone["ks_p_value"] == pytest.approx(0.05) and alone["ks"] > full["ks"]


def test_steps_share_nothing_where_nothing_is_shared(tmp_path):
    trace = read(tmp_path, DEVICE_BOUND, job(DEVICE_BOUND, 1, "none", seed=4))
    _, groups = groups_of(trace)
    computes = [g for g in groups if g.key.op_kind == "compute"]
    assert len(computes) > 10 and all(np.ptp(g.profile) < 0.04 for g in computes)
    gemm = next(g for g in groups if g.key.kernel_class == "gemm")
    assert gemm.std == pytest.approx(0.1, rel=0.4) and gemm.values.mean() == pytest.approx(1.0)


def test_nodes_are_in_one_group_at_most_and_means_are_kept(tmp_path):
    trace = read(tmp_path, DEVICE_BOUND, job(DEVICE_BOUND, 2, "stalls", seed=5))
    graph, groups = groups_of(trace)
    members = np.concatenate([g.nodes for g in groups])
    assert np.unique(members).size == members.size
    assert all(g.profile.mean() == pytest.approx(1.0) and g.profile.min() >= 0 for g in groups)
    role = graph.roles.role
    assert set(members) >= set(np.flatnonzero(role == "device"))
    assert not np.isin(role[members], ("arrival", "source")).any()


@pytest.mark.parametrize("name", ["ampere_sgemm_64x64_nn", "void reduce_metrics<float>", "nccl"])
def test_doubling_a_kernel_of_the_model_moves_the_mean_step_as_in_the_job(tmp_path, name):
    duration, host = synth.draw(DEVICE_BOUND, 12, 2, seed=6)
    trace = read(tmp_path, DEVICE_BOUND, synth.simulate(DEVICE_BOUND, duration, host))
    calls = [i for i, call in enumerate(DEVICE_BOUND) if call.name.startswith(name)]
    duration[:, :, calls] *= 2.0
    after = read(tmp_path, DEVICE_BOUND, synth.simulate(DEVICE_BOUND, duration, host))
    model, measured = fitted(trace)
    theirs = np.array([n.kind == "op" and n.name.startswith(name) for n in model.nodes])
    doubled = replace(model, mean=np.where(theirs[:, None], 2.0, 1.0) * model.mean)
    moved = simulated(doubled).mean() / simulated(model).mean()
    expected = measured_steps(after).mean() / measured.mean()
    assert theirs.any() and moved == pytest.approx(expected, rel=0.01)


def test_the_engine_simulates_the_same_model(tmp_path):
    trace = tmp_path / "trace"
    trace.mkdir()
    synth.write(trace, DEVICE_BOUND, job(DEVICE_BOUND, 2, "device", seed=7))
    save(fit(trace, 0), tmp_path / "model.nc")
    found = simulate(load_job(tmp_path / "model.nc"), replicates=3_200, seed=1)
    model, _ = fitted(read_trace(trace))
    drawn = simulated(model)
    step = found.step_time.values
    assert step.mean() == pytest.approx(drawn.mean(), rel=0.005)
    assert step.std() == pytest.approx(drawn.std(), rel=0.1)


def runs_of(folder, program, n_steps=30):
    """Summary of a fit, a run of 1,000 steps, and its time at the true pace, over the steps'."""
    times = synth.simulate(program, *synth.draw(program, n_steps, 2, seed=11))
    trace = folder / "trace"
    trace.mkdir()
    synth.write(trace, program, times)
    found = fit(trace)
    save(found, folder / "model.nc")
    drawn = estimate(folder / "model.nc", replicates=1_280, run_replicates=200, steps=1_000, seed=1)
    period_s = 1e-6 * float(np.diff(np.nanmax(times.end, axis=(1, 2))).mean())
    run_over_steps = float(drawn.time_to_train.mean() / (1_000 * drawn.step_time.mean()))
    return prism.summary(found), period_s, run_over_steps


def test_a_run_counts_the_time_between_steps_where_a_host_runs_ahead(tmp_path):
    ahead = [call for call in DEVICE_BOUND if call.do not in ("sync", "copy_back")]
    numbers, period_s, run_over_steps = runs_of(tmp_path, ahead)
    assert numbers["step_period"]["mean"] == pytest.approx(period_s, rel=1e-3)
    # a step takes longer than from one to the next, as far as the host is ahead
    assert numbers["step_time"]["mean"] > 1.5 * period_s
    expected = period_s / numbers["step_time"]["mean"]
    assert run_over_steps == pytest.approx(expected, rel=0.01)
    assert numbers["step_period"]["ratio"] == pytest.approx(expected, rel=1e-3)


def test_a_host_that_waits_for_its_steps_changes_nothing(tmp_path):
    numbers, period_s, run_over_steps = runs_of(tmp_path, DEVICE_BOUND)
    assert numbers["step_period"]["mean"] == pytest.approx(period_s, rel=1e-3)
    assert run_over_steps == pytest.approx(1.0, abs=0.03)


# ---------------------------------------------------------------- steps that differ
def edited(folder, program, times, edit):
    """Trace of one rank whose events were changed, and its path."""
    made = synth.events(program, times, 0)
    made["traceEvents"] = edit(made["traceEvents"])
    path = folder / "edited.json"
    path.write_text(json.dumps(made))
    return read_trace([path])


def ends_in_the_typical_step(trace):
    """Ends of all steps replayed in the graph of the typical one, and measured [s]."""
    steps = split_steps(trace)
    graph = step_graph(steps)
    begin, _, end = steps.bounds()
    return ends_of(graph, filled(graph)).max(axis=(0, 1)), end - begin


@pytest.mark.parametrize("seed", [8, 9, 10])
def test_launches_that_one_step_lacks_do_not_lose_the_hosts_time(tmp_path, seed):
    times = job(HOST_BOUND, 1, "none", seed=seed, n_steps=6)
    # not the first and the last ones, which set the step's begin and end
    plain = [i for i, c in enumerate(HOST_BOUND) if c.do == "launch" and c.stream == 7][1:-3]
    generator = np.random.default_rng(seed)
    gone = {
        2 * (step * len(HOST_BOUND) + i + 1)
        for step in range(6)
        for i in generator.choice(plain, step)
    }
    trace = edited(
        tmp_path, HOST_BOUND, times,
        lambda events: [e for e in events if e["args"].get("correlation") not in gone],
    )  # fmt: skip
    steps = split_steps(trace)
    sizes = {step: steps.views[step, 0].row.size for step in steps.steps}
    assert max(sizes.values()) - min(sizes.values()) >= 3
    ends, measured = ends_in_the_typical_step(trace)
    assert ends == pytest.approx(measured, rel=0.01)


def test_launch_shapes_that_follow_the_data_are_the_same_kernel(tmp_path):
    times = job(DEVICE_BOUND, 1, "none", seed=9, n_steps=4)
    number = iter(range(100_000))

    def edit(events):
        for event in events:
            if event["name"].startswith("ampere"):
                event["args"]["grid"] = [next(number), 1, 1]
        return events

    trace = edited(tmp_path, DEVICE_BOUND, times, edit)
    steps = split_steps(trace)
    first, second = (steps.views[step, 0] for step in steps.steps[:2])
    assert (first.key != second.key).any()
    assert (align(first, second) == np.arange(first.row.size)).all()
    ends, measured = ends_in_the_typical_step(trace)
    assert ends == pytest.approx(measured, rel=0.01)


# ---------------------------------------------------------------- what is told
def test_a_fit_tells_its_kernels_and_who_is_missing(tmp_path):
    times = job(DEVICE_BOUND, 2, "none", seed=3, n_steps=5)
    paths = synth.write(tmp_path, DEVICE_BOUND, times)
    both, lone = prism.summary(fit(paths, 0)), prism.summary(fit(paths[0], 0))
    for summary in (both, lone):
        json.dumps(summary, allow_nan=False)
        rows = {row["name"]: row for row in summary["kernels"]}
        assert rows["launch gap"]["op_kind"] == "launch_gap" and rows["launch gap"]["n"] > 0
        shares = [row["step_share"] for row in summary["kernels"]]
        assert shares == sorted(shares, reverse=True) and 0.9 < sum(shares) < 1.6
        assert summary["steps"] == 5 and any("5 steps" in text for text in summary["warnings"])
        check = summary["cross_check"]
        assert check["model"]["mean"] == pytest.approx(check["measured"]["mean"], rel=0.03)
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"
    assert f"all_reduce: {name}" in {row["name"] for row in both["kernels"]}
    assert f"all_reduce, includes waiting: {name}" in {row["name"] for row in lone["kernels"]}
    assert any("waiting" in note for note in lone["notes"])
    assert any("waiting" in text for text in lone["warnings"])
    assert not any("waiting" in text for text in (*both["notes"], *both["warnings"]))


def test_a_replay_tells_spans_and_causes(tmp_path):
    times = job(DEVICE_BOUND, 2, "none", seed=3, n_steps=5)
    paths = synth.write(tmp_path, DEVICE_BOUND, times)
    found = replay_file(paths[0])
    summary = prism.summary(found)
    json.dumps(summary, allow_nan=False)
    assert summary["max_abs_error"] < 0.01 and summary["steps"] == 5
    assert found.measured_step_time.values == pytest.approx(
        [times.span(step, 0) * 1e-6 for step in range(5)], rel=1e-4
    )
    assert summary["slowdown"] is None and summary["slowdown_same_work"] > 0.97
    assert {"compute", "host", "all_reduce"} <= set(summary["by_op_kind"])
    assert sum("waiting" in note for note in summary["notes"]) == 1
    assert prism.summary(replay_trace(read_trace(paths)))["max_abs_error"] < 0.01


def test_one_step_is_too_little(tmp_path):
    trace = read(tmp_path, DEVICE_BOUND, job(DEVICE_BOUND, 1, "none", seed=0, n_steps=1))
    with pytest.raises(PrismError, match="1 whole step; .*2 "):
        fit_kernels(trace)


def test_two_steps_are_a_model_without_nonsense(tmp_path):
    trace = read(tmp_path, DEVICE_BOUND, job(DEVICE_BOUND, 2, "stalls", seed=2, n_steps=2))
    drawn = simulated(fit_kernels(trace))
    assert np.isfinite(drawn).all() and drawn.min() > 0.0
    assert drawn.mean() == pytest.approx(measured_steps(trace).mean(), rel=0.05)
