"""Profiler traces of jobs whose graph is known: replays, critical paths, fits and their models.

`kineto_synth` walks the same program with other durations, so that what a step would have been has
a true answer; the waits of the program are known, too.
"""

import itertools
import json

import kineto_synth as synth
import numpy as np
import pytest
from campaign import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import prism
from prism import PrismError, load_job

PROGRAM = synth.training_step()
N_WAITS, NEVER_BINDING = 14, 1
"""Waits between streams, of which one awaits what always ended long before: no trace shows it."""
DEVICE_BOUND = synth.training_step(n_layers=3, kernels=4)
HOST_BOUND = synth.training_step(n_layers=3, kernels=4, mean_us=20.0, host_us=80.0)
HOST_ONLY = synth.training_step(n_layers=3, kernels=4, mean_us=8.0, host_us=40.0)
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"


def numbers(program, word):
    return [i for i, call in enumerate(program) if word in call.name]


def record(folder, program, times, **options):
    """Write a trace, each rank by a clock of its own; returns the folder."""
    folder.mkdir(exist_ok=True)
    offsets = 12_345.0 * np.arange(times.call.shape[1])
    synth.write(folder, program, times, offsets_us=offsets, **options)
    return folder


def periods(times):
    """From the last end of a step's activities over ranks to that of the next one's, [step] s."""
    return 1e-6 * np.diff(np.nanmax(times.end, axis=(1, 2)))


def figures(analysis, *arguments, **options):
    found = prism.summary(analysis(*arguments, **options))
    json.dumps(found, allow_nan=False)
    return found


# ----------------------------------------------------------------------------- graph and replay
@pytest.fixture(
    scope="module", params=[(1, False), (4, False), (2, True), (2, False, 11), (1, True)], ids=str
)
def made(request, tmp_path_factory):
    n_ranks, recorded, *seed = request.param
    drawn = synth.draw(PROGRAM, 8, n_ranks, seed=(*seed, 3)[0])
    times = synth.simulate(PROGRAM, *drawn)
    folder = record(tmp_path_factory.mktemp("trace"), PROGRAM, times, recorded=recorded)
    return folder, times, drawn, recorded


def test_every_step_is_replayed_through_the_waits_of_the_others(made):
    folder, times, _, recorded = made
    n_ranks = times.call.shape[1]
    dataset = prism.replay(folder)
    found = prism.summary(dataset)
    assert dataset.step.values.tolist() == list(range(11, 18))
    assert dataset.measured_step_time.values == pytest.approx(periods(times), rel=1e-4)
    assert found["steps"] == 7 and found["max_abs_error"] < 0.002
    rows = {(row["step"], row["rank"]): row for row in found["gpu_spans"]}
    assert len(rows) == len(found["gpu_spans"]) == 7 * n_ranks
    for (step, rank), row in rows.items():
        assert row["measured"] == pytest.approx(1e-6 * times.span(step - 10, rank), rel=1e-6)
        assert abs(row["replayed"] / row["measured"] - 1.0) < 0.002
    counts = found["edges_recorded"] / (7 * n_ranks), found["edges_inferred"] / (7 * n_ranks)
    expected = (N_WAITS, 0) if recorded else (0, N_WAITS - NEVER_BINDING)
    assert counts == pytest.approx(expected, rel=0.01)
    assert found["unexplained_starts"] <= 0.01 * max(1, found["late_starts"])
    assert found["slowdown"] is None and found["warnings"] == []


CLASSES = {
    "memcpy_h2d": ["HtoD"], "memcpy_d2h": ["DtoH"], "gemm": ["ampere"], "optimizer": ["Adam"],
    "elementwise": ["backward", "reduce_metrics"], "all_reduce": ["nccl"],
}  # fmt: skip


def test_the_critical_path_is_what_longer_kernels_would_lengthen(made):
    folder, times, (duration, host), _ = made
    step = figures(prism.timeline, folder, step=13)["steps"][0]
    expected = {}
    for name, words in CLASSES.items():
        longer = duration.copy()
        for word in words:
            longer[:, :, numbers(PROGRAM, word)] *= 1.0 + 1e-4
        again = periods(synth.simulate(PROGRAM, longer, host))[2]
        expected[name] = 1e4 * (again - periods(times)[2])
    # of ranks that end within microseconds of each other, either may be the last
    near = 1e-5 if times.call.shape[1] == 1 else 0.01
    for name, seconds in expected.items():
        found = step["critical_path"].get(name, 0.0)
        assert found == pytest.approx(seconds, abs=near * step["step_time"]), name
    assert expected["all_reduce"] > 0.04 * step["step_time"]
    assert sum(step["critical_path"].values()) == pytest.approx(step["step_time"])
    assert step["step_time"] == pytest.approx(step["measured_step_time"], rel=0.002)


def test_the_ideal_step_has_every_op_at_its_mean(tmp_path):
    duration, host = synth.draw(DEVICE_BOUND, 10, 3, seed=4, cv=0.05)
    for step in range(10):  # the ranks take turns in being slow
        duration[step, step % 3] *= 1.5
    times = synth.simulate(DEVICE_BOUND, duration, host)
    found = figures(prism.replay, record(tmp_path, DEVICE_BOUND, times, recorded=True))
    assert found["max_abs_error"] < 0.002
    # the first step has no period: what it took is not in the mean
    alike = [np.broadcast_to(x[1:].mean(axis=0), x.shape) for x in (duration, host)]
    collectives = numbers(DEVICE_BOUND, "nccl")
    alike[0] = alike[0].copy()  # a transfer is that of its slowest member
    alike[0][:, :, collectives] = duration[1:].max(axis=1)[:, collectives].mean(axis=0)
    ideal = periods(synth.simulate(DEVICE_BOUND, *alike)).mean()
    assert found["ideal_mean"] == pytest.approx(ideal, rel=0.005)
    slowdown = periods(times).mean() / ideal
    assert found["slowdown_same_work"] == pytest.approx(slowdown, rel=0.006) and slowdown > 1.09


def test_edges_come_from_the_other_steps_only(tmp_path):
    for n_steps in (3, 2, 1):
        times = synth.simulate(PROGRAM, *synth.draw(PROGRAM, n_steps, 1, seed=3))
        found = figures(prism.replay, record(tmp_path / str(n_steps), PROGRAM, times))
        n_replayed = max(1, n_steps - 1)
        assert found["steps"] == n_replayed
        if n_steps > 1:  # the first one has no period, and is learnt from
            assert 0 < found["edges_inferred"] <= n_replayed * N_WAITS
            assert found["max_abs_error"] < 0.01
    assert found["edges_inferred"] == 0 and found["notes"]
    span = 1e-6 * times.span(0, 0)
    assert found["measured_mean"] == pytest.approx(span, rel=1e-6)
    assert found["replayed_mean"] <= span * 1.001
    with pytest.raises(PrismError, match="11, 12"):
        prism.timeline(tmp_path / "3", step=99)


def test_late_starts_that_nothing_explains_give_no_edges(tmp_path):
    """Two streams that never wait for each other; every tenth kernel starts late by chance."""
    program = [
        synth.Call("launch", f"void {name}{k % 7}", stream, mean, host_us=12.0)
        for k in range(60) for name, stream, mean in (("a", 7, 60.0), ("b", 21, 45.0))
    ]  # fmt: skip
    program.append(synth.Call("sync", stream=7, host_us=5.0))
    n_late = n_edges = 0
    for seed in range(2):
        stalls = np.random.default_rng(seed)
        shape = (4, 1, len(program))
        late_us = np.where(stalls.random(shape) < 0.1, stalls.uniform(10.0, 60.0, shape), 0.0)
        times = synth.simulate(program, *synth.draw(program, 4, 1, seed=seed), late_us=late_us)
        found = figures(prism.replay, record(tmp_path / str(seed), program, times))
        n_late, n_edges = n_late + found["late_starts"], n_edges + found["edges_inferred"]
    assert n_late > 100 and n_edges <= 0.05 * n_late


# ----------------------------------------------------------------------------------- the model
def job(program, n_ranks, effect, seed, n_steps=24):
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


def fitted(folder, program, times, **options):
    """Figures of a fit, and of an estimate by its model."""
    dataset = prism.fit(record(folder / "trace", program, times, **options), 0)
    found, model = prism.summary(dataset), folder / "model.nc"
    json.dumps(found, allow_nan=False)
    prism.save(dataset, model)
    return found, model


@pytest.mark.parametrize(
    ("effect", "n_ranks"), [("device", 1), ("device", 3), ("host", 1), ("none", 3), ("stalls", 3)]
)
def test_simulated_steps_have_the_mean_and_spread_of_measured_ones(tmp_path, n_ranks, effect):
    program = HOST_ONLY if effect == "host" else DEVICE_BOUND
    times = job(program, n_ranks, effect, seed=n_ranks)
    found, model = fitted(tmp_path, program, times)
    measured = periods(times)
    mean, cv = measured.mean(), measured.std(ddof=1) / measured.mean()
    assert found["step_time"]["mean"] == pytest.approx(mean, rel=2e-3)
    estimated = figures(prism.estimate, model, replicates=1024, seed=1)["step_time"]
    for drawn in (found["cross_check"]["model"], estimated):
        assert drawn["mean"] == pytest.approx(mean, rel=0.01)
        assert drawn["cv"] == pytest.approx(cv, rel=0.35)  # 24 steps tell their spread to 15 %
    if (n_ranks, effect) in ((1, "device"), (1, "host")):
        # negative control: without what steps share the spread is lost
        alone = load_job(model).replace("variability.dependence=none")
        without = periods(job(program, n_ranks, "none", n_ranks, 400))
        expected = without.std() / without.mean() if effect == "host" else 0.0
        got = figures(prism.estimate, alone, replicates=256, seed=1)["step_time"]["cv"]
        assert got < max(0.6 * cv, 1.3 * expected) < 0.75 * cv
    if (n_ranks, effect) == (1, "device"):
        assert found["effects"]["step"]["cv"] == pytest.approx(0.05, rel=0.35)


def test_steps_that_were_held_out_are_predicted_unless_kernels_are_independent(
    tmp_path, small_pools
):
    # many kernels whose times go up and down together, and enough steps to see that they do
    gemm = synth.Call("launch", "ampere_sgemm_64x64_nn", mean_us=60.0)
    program = [gemm] * 12 + [synth.Call("sync", host_us=5.0)]
    duration, host = synth.draw(program, 96, 1, seed=3, cv=0.02)
    duration *= np.exp(0.05 * np.random.default_rng(103).standard_normal((96, 1, 1)))
    folder = record(tmp_path, program, synth.simulate(program, duration, host))
    full, alone = (
        figures(prism.validate, trace=folder, dependence=how, bootstrap=19, replicates=320, seed=1)
        for how in ("full", "none")
    )
    assert (full["n_measured"], full["n_train"], full["ks_p_value_refit"]) == (48, 47, True)
    assert full["ks_p_value"] > 0.1 and abs(full["mean_error"]) < 0.05
    assert alone["ks_p_value"] <= 0.1 and alone["ks"] > alone["ks_critical_5pct"] > full["ks"]
    assert alone["cv_ratio"] < 0.5 < 0.8 < full["cv_ratio"] < 1.25


def test_exposed_communication_is_what_free_collectives_would_save(tmp_path):
    duration, host = synth.draw(PROGRAM, 12, 1, seed=3)
    times = synth.simulate(PROGRAM, duration, host)
    _, model = fitted(tmp_path, PROGRAM, times, recorded=True)
    found = figures(prism.estimate, model, replicates=512, seed=1)
    duration[:, :, numbers(PROGRAM, "nccl")] = 0.0
    free = periods(synth.simulate(PROGRAM, duration, host)).mean()
    expected = 1.0 - free / periods(times).mean()
    assert found["exposed_communication"] == pytest.approx(expected, rel=0.05)
    parts = {part["name"]: part["mean_share"] for part in found["time_loss"]}
    assert parts["exposed_dp"] == pytest.approx(found["exposed_communication"], rel=1e-6)
    hidden = 6 * 330e-6 / found["step_time"]["mean"]  # six of them, all but the last beside others
    assert expected < 0.2 * hidden


@pytest.mark.parametrize("ahead", [True, False])
def test_a_run_is_as_many_periods_as_it_has_steps(tmp_path, ahead):
    """A host that runs ahead begins steps before the device is done: they overlap."""
    waits = ("sync", "copy_back")
    program = [call for call in DEVICE_BOUND if not (ahead and call.do in waits)]
    times = synth.simulate(program, *synth.draw(program, 30, 2, seed=11))
    found, model = fitted(tmp_path, program, times)
    drawn = prism.estimate(model, replicates=1_280, run_replicates=200, steps=1_000, seed=1)
    period_s = periods(times).mean()
    assert found["step_time"]["mean"] == pytest.approx(period_s, rel=1e-3)
    assert float(drawn.step_time.mean()) == pytest.approx(period_s, rel=0.01)
    run_over_steps = float(drawn.time_to_train.mean() / (1_000 * drawn.step_time.mean()))
    assert run_over_steps == pytest.approx(1.0, rel=0.002)
    # of each rank's host, against the end of the step before on the device
    ends = np.nanmax(times.end, axis=(1, 2))
    lead = 1e-6 * (ends[:-1, None] - times.step_start[1:]).mean()
    assert found["lead"]["mean"] == pytest.approx(lead, abs=0.01 * period_s)
    assert (lead > period_s) == ahead and (ahead or lead < 0.0)


# --------------------------------------------------------------------------- steps that differ
def edited(folder, program, times, edit):
    """Trace of one rank whose events were changed."""
    made = synth.events(program, times, 0)
    made["traceEvents"] = edit(made["traceEvents"])
    path = folder / "edited.json"
    path.write_text(json.dumps(made))
    return path


@pytest.mark.parametrize("seed", [8, 9])
def test_launches_that_one_step_lacks_do_not_lose_the_hosts_time(tmp_path, seed):
    times = job(HOST_ONLY, 1, "none", seed=seed, n_steps=6)
    # not the first and the last ones, which set the step's begin and end
    plain = [i for i, c in enumerate(HOST_ONLY) if c.do == "launch" and c.stream == 7][1:-3]
    generator = np.random.default_rng(seed)
    gone = {
        2 * (step * len(HOST_ONLY) + i + 1)
        for step in range(6)
        for i in generator.choice(plain, step)
    }
    path = edited(
        tmp_path, HOST_ONLY, times,
        lambda events: [e for e in events if e["args"].get("correlation") not in gone],
    )  # fmt: skip
    found = figures(prism.fit, path, 0)
    measured = periods(times)
    assert found["step_time"]["mean"] == pytest.approx(measured.mean(), rel=1e-3)
    assert found["cross_check"]["model"]["mean"] == pytest.approx(measured.mean(), rel=0.01)
    assert figures(prism.replay, path)["max_abs_error"] < 0.01


def test_launch_shapes_that_follow_the_data_are_the_same_kernel(tmp_path):
    times = job(DEVICE_BOUND, 1, "none", seed=9, n_steps=4)
    number = iter(range(100_000))

    def edit(events):
        for event in events:
            if event["name"].startswith("ampere"):
                event["args"]["grid"] = [next(number), 1, 1]
        return events

    path = edited(tmp_path, DEVICE_BOUND, times, edit)
    assert figures(prism.replay, path)["max_abs_error"] < 0.01
    check = figures(prism.fit, path, 0)["cross_check"]
    assert check["model"]["mean"] == pytest.approx(check["measured"]["mean"], rel=0.01)


# --------------------------------------------------------------------------------- what is told
def test_a_fit_tells_its_kernels_and_who_is_missing(tmp_path):
    duration, host = synth.draw(DEVICE_BOUND, 12, 2, seed=3)
    duration[:, 1, numbers(DEVICE_BOUND, "ampere")[0]] += 200.0  # rank 1 is late everywhere
    times = synth.simulate(DEVICE_BOUND, duration, host)
    record(tmp_path, DEVICE_BOUND, times)
    both, lone = (figures(prism.fit, path, 0) for path in (tmp_path, tmp_path / "rank0.json"))
    for found in (both, lone):
        rows = {row["name"]: row for row in found["kernels"]}
        assert rows["launch gap"]["op_kind"] == "launch_gap" and rows["launch gap"]["n"] > 0
        shares = [row["step_share"] for row in found["kernels"]]
        assert shares == sorted(shares, reverse=True) and 0.9 < sum(shares) < 1.6
        check = found["cross_check"]
        assert check["model"]["mean"] == pytest.approx(check["measured"]["mean"], rel=0.03)
    (transfer,) = (row for row in both["kernels"] if row["name"] == f"all_reduce: {NCCL}")
    nccl, adam = numbers(DEVICE_BOUND, "nccl"), numbers(DEVICE_BOUND, "Adam")
    # both ranks record a transfer: it counts once, from the last arrival
    assert (transfer["measure"], transfer["n"]) == ("transfer", len(nccl) * 12)
    mean = 1e-6 * duration[:, :, nccl].max(axis=1).mean()
    assert transfer["mean"] == pytest.approx(mean, rel=0.01)
    own = next(row for row in both["kernels"] if row["kernel_class"] == "optimizer")
    assert own["n"] == 2 * 12 * len(adam)
    assert own["mean"] == pytest.approx(1e-6 * duration[:, :, adam].mean(), rel=1e-4)
    assert own["cv"] == pytest.approx(0.1, rel=0.3) and 1.1 < own["p99_p50"] < 1.5
    (waiting,) = (row for row in lone["kernels"] if NCCL in row["name"])
    recorded = 1e-6 * (times.end - times.start)[:, 0, nccl].mean()
    assert waiting["measure"] == "includes waiting"
    assert waiting["mean"] == pytest.approx(recorded, rel=1e-4) and recorded > 1.05 * mean
    assert len(lone["warnings"]) == 1 + len(both["warnings"])


# ---------------------------------------------------------------------------------- launch gaps
@pytest.fixture(scope="module", params=[1, 2])
def host_bound(request, tmp_path_factory):
    drawn = synth.draw(HOST_BOUND, 4, request.param, seed=3, cv=0.02, host_cv=0.02)
    times = synth.simulate(HOST_BOUND, *drawn)
    folder = tmp_path_factory.mktemp("gaps")
    synth.write(folder, HOST_BOUND, times)
    return folder, times


def known_gaps(times, rank, collectives=True):
    """Launch gaps of a rank over the whole trace, [gap, (begin, end)] s: second by second."""
    start, end = times.start[:, rank].ravel(), times.end[:, rank].ravel()
    if not collectives:
        start = np.where(np.tile([c.do == "collective" for c in HOST_BOUND], 4), np.nan, start)
    blocks = np.tile([call.do == "copy_back" for call in HOST_BOUND], 4)
    issued = np.where(blocks, times.call[:, rank].ravel(), times.call_end[:, rank].ravel())
    found, until = [], np.inf
    for i in np.argsort(start):
        if np.isfinite(start[i]):
            if start[i] > until and issued[i] > until:
                found.append((until, start[i]))
            until = max(end[i], until if np.isfinite(until) else 0.0)
    return 1e-6 * np.array(found)


def within(gaps, begin, end):
    """Time of gaps that lies between two moments [s]."""
    return float(np.maximum(0.0, np.minimum(gaps[:, 1], end) - np.maximum(gaps[:, 0], begin)).sum())


def test_a_trace_lists_its_launch_gaps(run, host_bound):
    folder, times = host_bound
    gaps = [known_gaps(times, rank) for rank in range(times.start.shape[1])]
    rows = json.loads(run("show", folder, "--json")[1])["ops"]
    row = next(row for row in rows if row["op_kind"] == "launch_gap")
    assert row["n"] == sum(map(len, gaps)) > 80
    total = sum(np.diff(of_rank).sum() for of_rank in gaps)
    assert row["n"] * row["mean"] == pytest.approx(total, rel=1e-4)


def test_a_timeline_shows_its_launch_gaps(host_bound):
    folder, times = host_bound
    step = figures(prism.timeline, folder, step=11)["steps"][0]
    begin, end = 1e-6 * np.nanmax(times.end, axis=(1, 2))[:2]
    for rank, row in enumerate(step["rows"]):
        expected = within(known_gaps(times, rank), begin, end)
        assert row["waits"]["host"]["seconds"] == pytest.approx(expected, rel=0.02)
        assert expected > 0.2 * step["step_time"]


def test_an_estimate_finds_its_launch_gaps(host_bound, tmp_path):
    folder, times = host_bound
    prism.save(prism.fit(folder, seed=1), tmp_path / "model.nc")
    found = figures(prism.estimate, tmp_path / "model.nc", replicates=256, seed=1)
    share = {part["name"]: part["mean_share"] for part in found["time_loss"]}
    seconds = {name: part * found["step_time"]["mean"] for name, part in share.items()}
    bounds = list(itertools.pairwise(1e-6 * np.nanmax(times.end, axis=(1, 2))))
    expected = [
        np.mean([within(known_gaps(times, rank, collectives=False), *step) for step in bounds])
        for rank in range(times.start.shape[1])
    ]
    assert min(expected) * 0.97 < seconds["launch_gaps"] < max(expected) * 1.03
    assert sum(share.values()) == pytest.approx(1.0) and share["bubble"] == 0.0
    kernels = np.array([call.do != "collective" for call in HOST_BOUND])
    busy = 1e-6 * np.nansum((times.end - times.start)[:, :, kernels], axis=2).mean()
    assert seconds["compute"] + seconds["optimizer"] == pytest.approx(busy, rel=0.03)
    adam = numbers(HOST_BOUND, "Adam")
    of_adam = 1e-6 * np.nansum((times.end - times.start)[:, :, adam], axis=2).mean()
    assert seconds["optimizer"] == pytest.approx(of_adam, rel=0.03)


# --------------------------------------------------------------------------------- any trace
_NAMES = (
    "ncclKernel_x", "ProfilerStep#3", "ProfilerStep#4", "k", "nccl:all_reduce", "cudaLaunchKernel",
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaStreamWaitEvent",
    "Memcpy DtoH (Device -> Pageable)",
)  # fmt: skip
_EVENT = st.fixed_dictionaries({
    "ph": st.just("X"),
    "cat": st.sampled_from(["kernel", "gpu_memcpy", "cuda_runtime", "cpu_op", "cuda_sync"]),
    "name": st.sampled_from(_NAMES),
    "ts": st.floats(0, 1e3), "dur": st.floats(0, 100), "tid": st.integers(0, 2),
    "args": st.fixed_dictionaries(
        {"correlation": st.integers(0, 6), "stream": st.integers(0, 2)},
        optional={
            "wait_on_stream": st.integers(0, 2),
            "wait_on_cuda_event_record_corr_id": st.integers(0, 6),
        },
    ),
})  # fmt: skip


@settings(max_examples=examples(25))
@given(st.lists(st.lists(_EVENT, min_size=4, max_size=25), min_size=1, max_size=2))
def test_any_trace_is_replayed_or_refused(tmp_path_factory, ranks):
    folder = tmp_path_factory.mktemp("any")
    paths = [folder / f"{i}.json" for i in range(len(ranks))]
    for path, events in zip(paths, ranks, strict=True):
        path.write_text(json.dumps({"traceEvents": events}))
    try:
        found = figures(prism.replay, paths)
    except PrismError:
        return
    assert all(np.isfinite(row["replayed"]) for row in found["gpu_spans"])
