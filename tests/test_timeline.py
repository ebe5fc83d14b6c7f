"""Timelines of jobs: the sampled step, op by op, against the oracle, the graph and the format."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from job_files import job_files
from naive import step_time as naive_step
from trace_events import BadTrace, check_trace

import prism
from prism import PrismError, engine, load_job, make_schedule, save, simulate, timeline
from prism.analyses.timeline import nearest_replicate
from prism.analyses.timelines.chrome import chrome_trace
from prism.analyses.timelines.jobs import JobPlayer
from prism.analyses.timelines.played import COMPUTE, JOIN
from prism.analyses.timelines.table import texts
from prism.plots import plot_gantt
from prism.plots.gantt import MOST_ROWS
from prism.simulation.prepare import prepare, prepare_variability
from prism.simulation.steps import run_blocks

EFFECTS = {"rank": {"cv": 0.02}, "step": {"cv": 0.01}, "microbatch": {"cv": 0.02},
           "residual": {"cv": 0.02}}  # fmt: skip
MODEL = {
    "n_layers": 4, "hidden_size": 1024, "ffn_size": 4096, "n_heads": 16, "vocab_size": 32000,
    "seq_len": 2048,
}  # fmt: skip


def explicit(schedule="1f1b", effects=EFFECTS, model=None, **layout):
    durations = {"forward_s": [1.0, 1.2, 1.1, 0.9], "backward_s": 2.0} | (model or {})
    return load_job({
        "model": {"durations": durations},
        "parallelism": {"pp": 4, "microbatches": 8, "dp": 2, "schedule": schedule, **layout},
        "variability": {"library": None, "effects": effects},
    })  # fmt: skip


def modelled(resolution="op", dependence="full", **layout):
    variability = {"library": None, "effects": EFFECTS, "resolution": resolution}
    gpus = int(np.prod([layout.get(k, 1) for k in ("tp", "pp", "dp")]))
    return load_job({
        "model": MODEL, "parallelism": {"microbatches": 2, **layout},
        "cluster": {"nodes": 1, "gpus_per_node": gpus},
        "variability": variability | {"dependence": dependence},
    })  # fmt: skip


JOBS = {
    "1f1b": explicit(),
    "blocking": explicit(p2p="blocking"),
    "zb-v": explicit("zb-v", vpp=2, model={"weight_s": 1.0}),
    "job stalls": explicit(effects=EFFECTS | {
        "stall": {"entity": "job", "rate_per_hour": 300.0, "duration_s": 5.0}}),
    "rank stalls": explicit(effects=EFFECTS | {
        "stall": {"entity": "rank", "rate_per_hour": 60.0, "duration_s": 5.0}}),
    "fsdp": modelled(tp=2, pp=2, vpp=2, dp=2, data_parallel="fsdp"),
    "hsdp": modelled(dp=4, data_parallel="hsdp", shard_size=2),
    "kernels": modelled("kernel", tp=2, pp=2, dp=2),
    "independent": modelled(dependence="none", tp=2, pp=2, dp=2),
}  # fmt: skip


def check_timeline(made):
    """What holds of every timeline: rows are covered, no track overlaps, the format is right."""
    summary = prism.summary(made)
    row, start, lane = (made[k].values for k in ("event_row", "start", "lane"))
    end, stream = start + made["duration"].values, texts(made, "stream")
    rows = [r for step in summary["steps"] for r in step["rows"]]
    assert len(rows) == made.sizes["row"]
    for k, about in enumerate(rows):
        total = summary["steps"][int(made["row_step"][k])]["step_time"]
        mine = row == k
        waited = sum(w["seconds"] for w in about["waits"].values())
        assert about["busy"] + waited == pytest.approx(total, rel=1e-6)
        assert start[mine].min() >= -1e-9 and end[mine].max() == pytest.approx(total, rel=1e-6)
        cover = mine & ((stream == "compute") | (stream == "waiting"))
        order = np.flatnonzero(cover)[np.argsort(start[cover], kind="stable")]
        if not np.char.startswith(stream[mine], "stream").any():  # kernels run beside each other
            np.testing.assert_allclose(start[order][1:], end[order][:-1], atol=2e-9)
            assert start[order][0] == pytest.approx(0.0, abs=2e-9)
        for track in {(s, n) for s, n in zip(stream[mine], lane[mine], strict=True)}:
            on = mine & (stream == track[0]) & (lane == track[1])
            at = np.argsort(start[on], kind="stable")
            assert np.all(start[on][at][1:] >= end[on][at][:-1] - 2e-9)
    for step in summary["steps"]:
        assert sum(step["critical_path"].values()) == pytest.approx(step["step_time"], rel=1e-5)
        assert 0.0 < step["decided_by"]["share_of_path"] <= 1.0 + 1e-6
    slices = check_trace(json.loads(json.dumps(chrome_trace(made))))
    assert sum(map(len, slices.values())) == made.sizes["event"]
    return summary


def check_against_graph(step, played):
    """Every op begins when the last of what its slots hold has ended, replica by replica."""
    ops, graph = step.program.ops, step.graph
    end = played.end
    shared = np.zeros(graph.n_slots + graph.n_global_slots)
    local = np.zeros((graph.n_replicas, graph.n_slots))
    phases = zip(graph.phase_global, graph.phase_lo, graph.phase_hi, strict=True)
    for is_global, lo, hi in phases:
        for r in range(1 if is_global else graph.n_replicas):
            for i in range(lo, hi):
                slots = int(ops.pred0[i]), int(ops.pred1[i])
                ready = max(local[r, s] if s < graph.n_slots else shared[s] for s in slots)
                out = int(ops.out[i])
                if ops.kind[i] == engine.EXPORT:
                    shared[out] = max(shared[out], ready)
                    continue
                assert played.start(i, r) == ready
                assert end[r, i] >= ready
                if out < graph.n_slots:
                    local[r, out] = end[r, i]
                else:
                    shared[out] = end[0, i]
                    assert np.all(end[:, i] == end[0, i])


@pytest.mark.parametrize("name", JOBS)
def test_steps_are_the_sampled_ones_op_by_op(name):
    job = JOBS[name]
    step = prepare(job, 5)
    times, _, path, _ = run_blocks(step.program, range(2), 5, track=True)
    for replicate in (3, 100):
        played = JobPlayer(step, 5).play(replicate)
        block, lane = divmod(replicate, 64)
        assert np.float32(played.step_time) == times[block, lane]
        scaled = step.program.stalls.entity == engine.JOB_STALL
        if not scaled:
            check_against_graph(step, played)
            assert played.end[0, played.final] == times[block, lane]
        # the critical path by class is the one that the engine follows
        found = np.zeros(len(step.program.classes))
        for op, _, begin, end in played.path():
            for kernel_class, share in played.ops[op].classes:
                found[step.program.classes.index(kernel_class)] += share * (end - begin)
        if not scaled:
            np.testing.assert_allclose(found, path[block, :, lane], rtol=1e-4, atol=1e-6)
    made = timeline(job, replicates=128, seed=5, ideal=True)
    summary = check_timeline(made)
    assert [s["kind"] for s in summary["steps"]] == ["replicate", "replicate", "ideal"]
    for about, p in zip(summary["steps"], (50, 99), strict=False):
        nearest = np.argmin(
            np.abs(times.ravel() - np.quantile(times.ravel().astype(float), p / 100))
        )
        assert about["replicate"] == nearest
        assert np.float32(about["step_time"]) == times.ravel()[nearest]


@pytest.mark.parametrize(
    "job",
    [explicit(), explicit("gpipe"), explicit(p2p="blocking"), explicit("gpipe", p2p="blocking"),
     explicit("interleaved", vpp=2)],
    ids=["1f1b", "gpipe", "1f1b blocking", "gpipe blocking", "interleaved"],
)  # fmt: skip
def test_ends_are_those_of_the_oracle(job):
    """Followed action by action in plain Python."""
    ends = {}
    naive_step(job, prepare_variability(job), 9, 70, ends)
    step = prepare(job, 9)
    played, p = JobPlayer(step, 9).play(70), job.parallelism
    schedule = make_schedule(p.schedule, p.pp, p.microbatches, p.vpp)
    index = {
        (s, a.kind, a.chunk, a.microbatch): i for s, row in enumerate(schedule)
        for i, a in enumerate(row)
    }  # fmt: skip
    kinds = {"forward": "F", "backward": "B"}
    seen = 0
    for i, op in enumerate(played.ops):
        if op.stream == COMPUTE:
            at = index[op.stages[0], kinds[op.op_kind], op.chunk, op.microbatch]
            for r in range(p.dp):
                assert played.end[r, i] == pytest.approx(ends[r, op.stages[0], at], abs=3e-5)
                seen += 1
    assert seen == len(ends)


def test_waits_of_a_quiet_pipeline_are_its_bubble():
    """1F1B of equal stages: every stage waits (p - 1)(t_f + t_b), for other stages alone."""
    job = load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"pp": 4, "microbatches": 8}, "variability": {"library": None},
    })  # fmt: skip
    summary = check_timeline(timeline(job, replicates=64, seed=1, percentiles=[50]))
    for row in summary["steps"][0]["rows"]:
        assert row["waits"] == {"bubble": {"seconds": 9.0, "share": 9.0 / 33.0}}
        assert row["busy"] == 24.0
    assert summary["flows"] == 2 * 3 * 8  # a message per microbatch, direction and boundary


def test_a_slow_replica_is_what_the_other_waits_for():
    slow = load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"pp": 4, "microbatches": 8, "dp": 2},
        "cluster": {"nodes": 8, "gpus_per_node": 1, "node_slowdowns": {5: 2.0}},
        "variability": {"library": None},
    })  # fmt: skip
    members = prepare(slow, 1).program.low.member  # one GPU a node
    replica, stage, _ = (int(k[0]) for k in np.nonzero(members == 5))
    summary = check_timeline(timeline(slow, replicates=64, seed=1, percentiles=[50]))
    step = summary["steps"][0]
    assert (step["decided_by"]["replica"], step["decided_by"]["stage"]) == (replica, stage)
    for row in step["rows"]:
        assert ("replica" in row["waits"]) == (row["replica"] != replica)
    roles = {row["replica"]: row["role"] for row in step["rows"]}
    assert "decides" in roles[replica] and "slowest" in roles[replica]


@settings(
    deadline=None, database=None, derandomize=True, phases=[Phase.generate], max_examples=6,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(job_files(), st.integers(0, 2**40))
def test_random_jobs(tree, seed):
    try:
        job = load_job(tree)
        step = prepare(job, seed)
    except PrismError:
        assume(False)
    assume(step.graph.n_draws < 40_000)
    made = timeline(job, replicates=64, seed=seed, percentiles=[90])
    check_timeline(made)
    replicate = prism.summary(made)["steps"][0]["replicate"]
    played = JobPlayer(step, seed).play(replicate)
    if step.program.stalls.entity != engine.JOB_STALL:
        check_against_graph(step, played)
    for i, op in enumerate(played.ops):
        for p in op.preds:
            before = played.end[:, p].max() if op.is_global else played.end[:, p]
            assert np.all(played.end[:, i] >= before), (op, p)


def test_what_is_shown_can_be_chosen():
    job = JOBS["fsdp"]
    made = timeline(job, replicates=64, seed=1, ranks=[0, 5], percentiles=[50])
    assert made.sizes["row"] == 2
    few = timeline(job, replicates=64, seed=1, replicas=[1], stages=[0], percentiles=[50])
    assert [str(x) for x in few["row_label"].values] == ["replica 1 stage 0"]
    assert "3 of 4 rows are left out" in json.loads(few.attrs["notes"])[0]
    for wrong in (
        {"ranks": [8]},
        {"replicas": [2]},
        {"stages": [-1]},
        {"ranks": [0], "stages": [1]},
    ):
        with pytest.raises(PrismError, match="there are|no rank is in all"):
            timeline(job, replicates=64, seed=1, **wrong)
    with pytest.raises(PrismError, match=": step does not apply"):
        timeline(job, step=3)


def test_of_many_replicas_those_worth_seeing_are_shown():
    made = timeline(load_job("llama3-70b-fsdp-512"), replicates=64, seed=2, percentiles=[50])
    rows = prism.summary(made)["steps"][0]["rows"]
    assert len(rows) in (3, 4) and "decides" in rows[0]["role"]
    assert {"typical", "fastest"} <= {row["role"] for row in rows}


def test_a_result_whose_job_is_spoilt_is_refused(run, tmp_path):
    result = simulate(JOBS["1f1b"], 64, seed=1)
    for spoilt in (json.loads(result.attrs["job"]) | {"name": 5}, [1]):
        result.attrs["job"] = json.dumps(spoilt)
        save(result, tmp_path / "x.nc")
        status, out, err = run("timeline", tmp_path / "x.nc")
        assert status == 2 and not out and str(tmp_path / "x.nc") in err


def test_the_command_and_a_result_give_the_same_steps(run, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: {durations: {forward_s: 1.0, backward_s: 2.0}}\n"
        "parallelism: {pp: 4, microbatches: 8, dp: 2}\n"
        "variability: {library: h100-healthy}\n"
    )
    size = ("--replicates", 256, "--seed", 4, "--json")
    status, out, _ = run("timeline", path, *size, "-o", tmp_path / "out")
    assert status == 0
    first = json.loads(out)
    assert {f.name for f in (tmp_path / "out").iterdir()} == {
        "result.nc", "summary.json", "timeline.json.gz", "timeline.png", "timeline.svg",
    }  # fmt: skip
    result = tmp_path / "result.nc"
    save(simulate(str(path), 256, seed=4), result)
    again = json.loads(run("timeline", result, "--json", "-q")[1])
    assert again["steps"] == first["steps"]
    shown = json.loads(run("show", tmp_path / "out" / "result.nc", "--json")[1])
    assert shown == {"kind": "timeline", "summary": first}
    for option in ("--seed", "--replicates"):
        status, _, err = run("timeline", result, option, 0 if option == "--seed" else 64)
        assert status == 2 and f"{option} does not apply" in err
    status, _, err = run("timeline", tmp_path / "out" / "result.nc")
    assert status == 2 and "holds no simulated steps of a job" in err
    packed = (tmp_path / "out" / "timeline.json.gz").read_bytes()
    assert len(check_trace(json.loads(gzip.decompress(packed)))) == 16 * 2
    status, out, _ = run("timeline", path, *size[:4], "--percentiles", "50")
    assert status == 0 and "computes" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing.yaml",), "nothing.yaml"),
        (("pipeline-8x32", "--step", 3), "--step does not apply"),
        (("pipeline-8x32", "--step", 0), "--step does not apply"),
        (("pipeline-8x32", "--percentiles", "101"), "between 0 and 100"),
        (("pipeline-8x32", "--stages", "8"), "there are 8, 0 to 7"),
        (("pipeline-8x32", "--ranks", "1-3"), "0,3 or 0:7"),
        (("steps.csv",), "without the ops in them"),
        (("out.nc",), "out.nc"),
    ],
)
def test_what_cannot_be_shown_says_so(run, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.csv").write_text("step_s\n1.0\n1.1\n")
    (tmp_path / "out.nc").write_text("no")
    status, out, err = run("timeline", *arguments, "--replicates" if "8x32" in arguments[0] else
                           "--quiet", *([64] if "8x32" in arguments[0] else []))  # fmt: skip
    assert (status, out) == (2, "") and said in err and "Traceback" not in err


def test_pictures_have_all_that_is_named():
    made = timeline(JOBS["1f1b"], replicates=64, seed=3)
    ax = plot_gantt(made)
    labels = {text.get_text() for text in ax.get_legend().get_texts()}
    assert labels >= {"forward", "backward", "critical path", "waits: another replica"}
    assert ax.get_xlabel() == "time since the step began [s]"
    assert len(ax.get_yticks()) == made.sizes["row"] == 16
    part = plot_gantt(timeline(JOBS["1f1b"], replicates=64, seed=3, window=(50, 60)))
    longest = max(step["step_time"] for step in prism.summary(made)["steps"])
    assert part.get_xlim() == pytest.approx((0.5 * longest, 0.6 * longest))
    drawn = [sum(len(group.get_paths()) for group in axes.collections) for axes in (ax, part)]
    assert 0 < drawn[1] < 0.4 * drawn[0]
    for window in ((60, 50), (50,), (-1, 50)):
        with pytest.raises(PrismError, match="percent of the longest step"):
            timeline(JOBS["1f1b"], replicates=64, seed=3, window=window)
    many = timeline(JOBS["1f1b"], replicates=64, seed=3, percentiles=range(0, 100, 10))
    assert many.sizes["row"] > MOST_ROWS
    assert len(plot_gantt(many).get_yticks()) <= MOST_ROWS


def test_the_nearest_replicate_is_the_first_of_equals():
    assert nearest_replicate(np.array([3.0, 1.0, 2.0, 2.0]), 50) == 2


def good():
    made = timeline(JOBS["1f1b"], replicates=64, seed=3, percentiles=[50])
    return json.loads(json.dumps(chrome_trace(made)))


@pytest.mark.parametrize("damage", ["overlap", "flow", "pid", "name", "nan", "thread"])
def test_the_checker_fails_what_is_wrong(damage):
    """Negative controls."""
    trace = good()
    check_trace(trace)
    events = trace["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    if damage == "overlap":
        first, second = [e for e in slices if e["tid"] == slices[0]["tid"]][:2]
        first["dur"] = second["ts"] + 0.5 * second["dur"] - first["ts"]
    elif damage == "flow":
        events.remove(next(e for e in events if e["ph"] == "f"))
    elif damage == "pid":
        slices[0]["pid"] = "1"
    elif damage == "name":
        del slices[0]["name"]
    elif damage == "nan":
        slices[0]["ts"] = float("nan")
    else:
        events.remove(next(e for e in events if e["name"] == "thread_name"))
    with pytest.raises(BadTrace):
        check_trace(trace)


def test_joins_take_no_time():
    played = JobPlayer(prepare(JOBS["fsdp"], 1), 1).play(0)
    joins = [i for i, op in enumerate(played.ops) if op.stream == JOIN and op.preds]
    exports = prepare(JOBS["fsdp"], 1).program.ops.kind == engine.EXPORT
    for i in joins:
        if not exports[i]:
            assert played.start(i, 1) == played.end[1, i]
