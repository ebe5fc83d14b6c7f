"""Timelines: the sampled step of a job, and the recorded one of a trace, op by op."""

import gzip
import json
import os
from pathlib import Path

import kineto_synth as synth
import numpy as np
import pandas as pd
import programs_made
import pytest
from deviceprogram import simulate
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from job_files import job_files
from pipeline_synth import Effects, Layout, make_trace, write_tidy
from pipeline_synth import run as play
from trace_events import BadTrace, check_trace

import prism
from prism import PrismError, load_job

DATA = Path(os.environ.get("PRISM_DATA", Path(__file__).parents[2] / "shared" / "data"))
SAMPLES = Path(__file__).parents[1] / "experiments" / "samples"
EFFECTS = {"rank": {"cv": 0.02}, "step": {"cv": 0.01}, "microbatch": {"cv": 0.02},
           "residual": {"cv": 0.02}}  # fmt: skip


def explicit(schedule="1f1b", effects=EFFECTS, model=None, cluster=None, **layout):
    durations = {"forward_s": [1.0, 1.2, 1.1, 0.9], "backward_s": 2.0} | (model or {})
    return load_job({
        "model": {"durations": durations}, "cluster": cluster or {},
        "parallelism": {"pp": 4, "microbatches": 8, "dp": 2, "schedule": schedule, **layout},
        "variability": {"library": None, "effects": effects},
    })  # fmt: skip


def modelled(resolution="op", dependence="full", **layout):
    variability = {"library": None, "effects": EFFECTS, "resolution": resolution}
    gpus = int(np.prod([layout.get(k, 1) for k in ("tp", "pp", "dp")]))
    return load_job({
        "model": {"n_layers": 4, "hidden_size": 1024, "ffn_size": 4096, "n_heads": 16,
                  "vocab_size": 32000, "seq_len": 2048},
        "parallelism": {"microbatches": 2, **layout},
        "cluster": {"nodes": 1, "gpus_per_node": gpus},
        "variability": variability | {"dependence": dependence},
    })  # fmt: skip


def stalls(entity, rate):
    stall = {"entity": entity, "rate_per_hour": rate, "duration_s": 5.0}
    return explicit(effects=EFFECTS | {"stall": stall})


JOBS = {
    "1f1b": explicit(), "gpipe": explicit("gpipe"), "interleaved": explicit("interleaved", vpp=2),
    "zb-v": explicit("zb-v", vpp=2, model={"weight_s": 1.0}),
    "blocking": explicit(p2p="blocking"),
    "job stalls": stalls("job", 300.0), "rank stalls": stalls("rank", 60.0),
    "fsdp": modelled(tp=2, pp=2, vpp=2, dp=2, data_parallel="fsdp"),
    "hsdp": modelled(dp=4, data_parallel="hsdp", shard_size=2),
    "kernels": modelled("kernel", tp=2, pp=2, dp=2),
    "independent": modelled(dependence="none", tp=2, pp=2, dp=2),
}  # fmt: skip

OVER_RANKS = {"communication", "replica"}
WAITED_FOR = {
    "job stalls": {"bubble", "replica", "stall"}, "hsdp": OVER_RANKS,
    "fsdp": OVER_RANKS | {"bubble", "transfer"}, "independent": OVER_RANKS | {"bubble", "transfer"},
    "kernels": OVER_RANKS | {"bubble", "transfer", "group"},
}  # fmt: skip


def events_of(made, step=0):
    """Events of one of the steps as a table, with what their row is."""
    texts = ("stream", "kind", "name")
    columns = {n: made.label.values[made[f"event_{n}"].values] for n in texts}
    numbers = ("lane", "start", "duration", "nominal", "microbatch", "chunk")
    columns |= {n: made[n].values for n in numbers}
    row = made.event_row.values
    columns |= {n: made[n].values[row] for n in ("replica", "stage", "member", "row_step")}
    frame = pd.DataFrame(columns | {"row": row})
    frame["end"] = frame["start"] + frame["duration"]
    return frame[frame["row_step"] == step]


def check_timeline(made):
    """What holds of every timeline: rows are covered, and no two events of a track overlap."""
    found = prism.summary(made)
    assert sum(len(step["rows"]) for step in found["steps"]) == made.sizes["row"]
    table = made[["wait_row", "wait_cause", "wait_for", "wait_seconds"]].to_dataframe()
    assert not table.duplicated(["wait_row", "wait_cause", "wait_for"]).any()
    assert (table["wait_seconds"] > 0.0).all()
    for k, step in enumerate(found["steps"]):
        events, total = events_of(made, k), step["step_time"]
        rows, waits = [row["label"] for row in step["rows"]], pd.DataFrame(step["waits"])
        assert len(waits) == (made.row_step.values[table["wait_row"]] == k).sum()
        for about, (_, mine) in zip(step["rows"], events.groupby("row"), strict=True):
            waited = sum(w["seconds"] for w in about["waits"].values())
            assert about["busy"] + waited == pytest.approx(total, rel=1e-6)
            assert sum(w["share"] for w in about["waits"].values()) == pytest.approx(waited / total)
            listed = waits[waits["row"] == about["label"]] if len(waits) else waits
            for cause, wait in about["waits"].items():
                of_cause = listed[listed["cause"] == cause]
                assert of_cause["seconds"].sum() == pytest.approx(wait["seconds"])
                if cause in ("bubble", "replica", "rank", "group"):
                    others = set(of_cause["for"].dropna())
                    assert about["label"] not in others
                    if not step["left_out"]:
                        assert others <= set(rows)
            waiting = mine[mine["stream"] == "waiting"]
            assert waiting["duration"].sum() == pytest.approx(waited, rel=1e-6, abs=1e-9)
            assert mine["start"].min() >= -1e-9
            assert mine["end"].max() == pytest.approx(total, rel=1e-6)
            if not mine["stream"].str.startswith("stream").any():  # kernels run beside each other
                cover = mine[mine["stream"].isin(["compute", "waiting"])].sort_values("start")
                np.testing.assert_allclose(cover["start"][1:], cover["end"][:-1], atol=2e-9)
                assert cover["start"].iloc[0] == pytest.approx(0.0, abs=2e-9)
            for _, track in mine.sort_values("start").groupby(["stream", "lane"]):
                assert (track["start"].to_numpy()[1:] >= track["end"].to_numpy()[:-1] - 2e-9).all()
        assert sum(step["critical_path"].values()) == pytest.approx(total, rel=1e-5)
        assert 0.0 < step["decided_by"]["share_of_path"] <= 1.0 + 1e-6
    return found


# ------------------------------------------------------------------------------------------- jobs
def check_order(made, job):
    """Each op begins when the one before it on its GPU and the one it has its input of end."""
    p = job.parallelism
    kinds = {"F": ("forward",), "B": ("backward",), "W": ("backward_weight", "weight")}
    schedule = prism.make_schedule(p.schedule, p.pp, p.microbatches, p.vpp)
    computes = events_of(made).query("stream == 'compute'").sort_values("start")
    last = p.pp * p.vpp - 1

    def place_of(action, s):
        back = p.schedule == "zb-v" and action.chunk == 1
        return last - s if back else action.chunk * p.pp + s

    for _, of_replica in computes.groupby("replica"):
        end, rows = {}, {}
        for s, mine in of_replica.groupby("stage"):
            rows[s] = list(zip(schedule[s], mine.itertuples(), strict=True))
            for action, event in rows[s]:
                assert event.kind in kinds[action.kind] or action.kind == "W"
                assert (event.chunk, event.microbatch) == (action.chunk, action.microbatch)
                end[action.kind, place_of(action, s), action.microbatch] = event.end
        for s, row in rows.items():
            free = 0.0
            for action, event in row:
                place = place_of(action, s)
                needs = {"F": ("F", place - 1), "B": ("B", place + 1), "W": ("B", place)}
                ready = end.get((*needs[action.kind], action.microbatch), 0.0)
                if action.kind == "B" and place == last:
                    ready = end["F", last, action.microbatch]
                assert event.start == pytest.approx(max(free, ready), abs=3e-5)
                free = event.end


@pytest.mark.parametrize("name", JOBS)
def test_steps_are_the_sampled_ones_op_by_op(name):
    job = JOBS[name]
    drawn = prism.simulate(job, replicates=128, seed=5)
    times = drawn.step_time.values.astype(float)
    made = prism.timeline(job, replicates=128, seed=5, ideal=True)
    found = check_timeline(made)
    assert [step["kind"] for step in found["steps"]] == ["replicate", "replicate", "ideal"]
    for step, p in zip(found["steps"], (50, 99), strict=False):
        assert step["percentile"] == p
        assert step["replicate"] == np.argmin(np.abs(times - np.quantile(times, p / 100)))
        assert np.float32(step["step_time"]) == times[step["replicate"]]
    ideal = float(drawn.ideal_step_time)
    assert found["steps"][2]["step_time"] == pytest.approx(ideal, rel=1e-6)
    if name in ("1f1b", "gpipe", "interleaved", "zb-v"):
        check_order(made, job)
    causes = {cause for s in found["steps"] for row in s["rows"] for cause in row["waits"]}
    assert causes == WAITED_FOR.get(name, {"bubble", "replica"})
    if name == "job stalls":  # one of 5 s, in the slow step alone
        assert all(row["waits"]["stall"]["seconds"] == pytest.approx(5.0)
                   for row in found["steps"][1]["rows"])  # fmt: skip
    if "stalls" not in name:
        computes = events_of(made).query("stream == 'compute'")
        ratio = computes["duration"].sum() / computes["nominal"].sum()
        assert ratio == pytest.approx(1.0, abs=0.06)
    quiet = events_of(made, 2).query("stream == 'compute'")
    np.testing.assert_allclose(quiet["duration"], quiet["nominal"], rtol=1e-4)


def test_a_quiet_pipeline_waits_for_its_bubble_alone():
    """1F1B of equal stages: every stage waits (p - 1)(t_f + t_b), for other stages alone."""
    job = load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"pp": 4, "microbatches": 8}, "variability": {"library": None},
    })  # fmt: skip
    found = check_timeline(prism.timeline(job, replicates=64, seed=1, percentiles=[50]))
    (step,) = found["steps"]
    assert step["replicate"] == 0  # the first of equals
    for row in step["rows"]:
        assert row["waits"] == {"bubble": {"seconds": 9.0, "share": 9.0 / 33.0}}
        assert (row["busy"], row["busy_share"]) == (24.0, 24.0 / 33.0)
    # forwards down, then the last stage's rows of both, and backwards up
    assert step["critical_path"] == {"backward": 22.0, "forward": 11.0}
    assert found["flows"] == 2 * 3 * 8  # a message per microbatch, direction and boundary


def test_a_slow_replica_is_what_the_other_waits_for():
    """One GPU a node, ranks in the order tp-cp-ep-dp-pp: node 5 is replica 1 of stage 2."""
    cluster = {"nodes": 8, "gpus_per_node": 1, "node_slowdowns": {5: 2.0}}
    job = explicit(effects={}, model={"forward_s": 1.0}, cluster=cluster)
    made = prism.timeline(job, replicates=64, seed=1, percentiles=[50])
    (step,) = check_timeline(made)["steps"]
    assert (step["decided_by"]["replica"], step["decided_by"]["stage"]) == (1, 2)
    roles = {row["replica"]: row["role"] for row in step["rows"]}
    assert "decides" in roles[1] and "slowest" in roles[1]
    # replica 0 is done after (m + p - 1)(t_f + t_b), and waits from then on
    for row in step["rows"]:
        assert ("replica" in row["waits"]) == (row["replica"] == 0)
        others = {w["for"] for w in step["waits"] if w["row"] == row["label"] and
                  w["cause"] == "replica"}  # fmt: skip
        assert all(other.startswith("replica 1 ") for other in others)
        if row["stage"] == 0 and row["replica"] == 0:
            assert row["waits"]["replica"]["seconds"] == pytest.approx(step["step_time"] - 33.0)
    slow = events_of(made).query("replica == 1 and stage == 2 and stream == 'compute'")
    np.testing.assert_allclose(slow["duration"] / slow["nominal"], 2.0, rtol=1e-4)


@settings(
    deadline=None, database=None, derandomize=True, phases=[Phase.generate], max_examples=6,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(job_files(), st.integers(0, 2**40))
def test_random_jobs(tree, seed):
    try:
        job = load_job(tree)
        assume(job.world_size * job.parallelism.microbatches < 4_000)
        made = prism.timeline(job, replicates=64, seed=seed, percentiles=[90])
    except PrismError:
        assume(False)
    (step,) = check_timeline(made)["steps"]
    drawn = prism.simulate(job, replicates=64, seed=seed).step_time.values
    assert np.float32(step["step_time"]) == np.float32(drawn[step["replicate"]])


def test_what_is_shown_can_be_chosen():
    job = JOBS["fsdp"]
    assert (
        prism.timeline(job, replicates=64, seed=1, ranks=[0, 5], percentiles=[50]).sizes["row"] == 2
    )
    few = prism.timeline(job, replicates=64, seed=1, replicas=[1], stages=[0], percentiles=[50])
    assert [str(x) for x in few["row_label"].values] == ["replica 1 stage 0"]
    assert prism.summary(few)["notes"]
    wrong = (
        {"ranks": [8]}, {"replicas": [2]}, {"stages": [-1]}, {"ranks": [0], "stages": [1]},
        {"step": 3},
    )  # fmt: skip
    for chosen in wrong:
        with pytest.raises(PrismError):
            prism.timeline(job, replicates=64, seed=1, **chosen)


def test_of_many_replicas_those_worth_seeing_are_shown():
    job = load_job("llama3-70b-fsdp-512")
    found = prism.summary(prism.timeline(job, replicates=64, seed=2, percentiles=[50]))
    rows = found["steps"][0]["rows"]
    assert len(rows) in (3, 4) and "decides" in rows[0]["role"]
    assert {"typical", "fastest"} <= {row["role"] for row in rows}
    busy = {row["role"]: row["busy"] for row in rows}
    assert busy["fastest"] < busy["typical"] < max(busy.values())


# ------------------------------------------------------------------------------------ the command
def opened(path):
    """Check the file of a timeline; its slices by track."""
    return check_trace(json.loads(gzip.decompress(path.read_bytes())))


def test_the_command_and_a_result_give_the_same_steps(run, tmp_path):
    job, out, result = tmp_path / "job.yaml", tmp_path / "out", tmp_path / "result.nc"
    job.write_text(
        "model: {durations: {forward_s: 1.0, backward_s: 2.0}}\n"
        "parallelism: {pp: 4, microbatches: 8, dp: 2}\n"
        "variability: {library: h100-healthy}\n"
    )
    size = ("--replicates", 256, "--seed", 4)
    status, text, _ = run("timeline", job, *size, "--json", "-o", out)
    first = json.loads(text)
    assert status == 0 and {f.name for f in out.iterdir()} == {
        "result.nc", "summary.json", "timeline.json.gz",
    }  # fmt: skip
    prism.save(prism.simulate(str(job), 256, seed=4), result)
    assert json.loads(run("timeline", result, "--json", "-q")[1])["steps"] == first["steps"]
    shown = json.loads(run("show", out / "result.nc", "--json")[1])
    assert shown == {"kind": "timeline", "summary": first}
    for wrong in ((result, "--seed", 0), (result, "--replicates", 64), (out / "result.nc",)):
        assert run("timeline", *wrong)[0] == 2
    status, text, _ = run("timeline", job, *size, "--percentiles", "50")
    assert status == 0 and text
    # the file holds what the result does, in microseconds
    slices, made = opened(out / "timeline.json.gz"), prism.load(out / "result.nc")
    assert (out / "timeline.json.gz").read_bytes() == prism.to_perfetto(made)
    flat = [event for track in slices.values() for event in track]
    assert len(flat) == made.sizes["event"] and len(slices) == 2 * 16
    for name, key in (("start", "ts"), ("duration", "dur")):
        expected = np.sort(made[name].values) * 1e6
        np.testing.assert_allclose(np.sort([e[key] for e in flat]), expected, atol=2e-3)


def test_a_result_whose_job_is_spoilt_is_refused(run, tmp_path):
    result = prism.simulate(JOBS["1f1b"], 64, seed=1)
    for spoilt in (json.loads(result.attrs["job"]) | {"name": 5}, [1]):
        result.attrs["job"] = json.dumps(spoilt)
        prism.save(result, tmp_path / "x.nc")
        status, out, err = run("timeline", tmp_path / "x.nc")
        assert status == 2 and not out and str(tmp_path / "x.nc") in err


@pytest.mark.parametrize(
    "arguments",
    [("nothing.yaml",), ("pipeline-8x32", "--step", 3), ("pipeline-8x32", "--step", 0),
     ("pipeline-8x32", "--percentiles", "101"), ("pipeline-8x32", "--stages", "8"),
     ("pipeline-8x32", "--ranks", "1-3"), ("steps.csv",), ("out.nc",)],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_shown_is_refused(run, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.csv").write_text("step_s\n1.0\n1.1\n")
    (tmp_path / "out.nc").write_text("no")
    status, out, err = run("timeline", *arguments)
    assert (status, out) == (2, "") and (arguments[0] in err or arguments[1] in err)


def test_the_checker_fails_what_is_wrong(run, tmp_path):
    """Negative controls."""
    run("timeline", "pipeline-8x32", "--replicates", 64, "--percentiles", 50, "-o", tmp_path)
    content = gzip.decompress((tmp_path / "timeline.json.gz").read_bytes())
    check_trace(json.loads(content))
    for phase, key, factor in (("X", "dur", 1.2), ("f", "id", 10**6), ("X", "ts", float("nan"))):
        trace = json.loads(content)
        event = next(e for e in trace["traceEvents"] if e["ph"] == phase)
        event[key] *= factor
        with pytest.raises(BadTrace):
            check_trace(trace)


# ----------------------------------------------------------------------------------------- traces
def check_recorded(made, frame, tolerance):
    """Compute events of the step shown stand where the table has them; how many there are."""
    keys = ["dp_rank", "stage", "op_kind", "microbatch", "chunk"]
    frame = frame[frame["step"] == prism.summary(made)["steps"][0]["step"]]
    begin = frame["start"].min()
    shown = events_of(made).rename(columns={"replica": "dp_rank", "kind": "op_kind"})
    shown = shown[(shown["stream"] == "compute") & shown["op_kind"].isin(["forward", "backward"])]
    rows = frame[frame["op_kind"].isin(["forward", "backward"])]
    rows = rows[rows["dp_rank"].isin(shown["dp_rank"])]
    both = rows.merge(shown, on=keys, how="outer", suffixes=("_recorded", ""))
    assert len(both) == len(rows) == len(shown)
    assert (both["start"] - (both["start_recorded"] - begin)).abs().max() <= tolerance
    assert (both["duration"] - both["duration_recorded"]).abs().max() <= 1e-6
    return len(shown)


KIND = {"transfer": "transfer", "gap": "launch_gap", "optimizer": "optimizer",
        "params-all-gather": "all_gather", "grads-reduce-scatter": "reduce_scatter"}  # fmt: skip


@pytest.mark.parametrize("p2p", ["blocking", "async"])
def test_replayed_events_stand_where_they_were_recorded(tmp_path, p2p):
    layout = Layout(2, 4, 6, 5, p2p=p2p)
    effects = Effects(rank_sd=0.02, residual_sd=0.02, gap_s=0.002, lemons={(1, 2): 1.5})
    frame, truth = make_trace(layout, effects)
    path = write_tidy(frame, tmp_path / "ops.csv")
    made = prism.timeline(path, step=3)
    replayed, ideal = check_timeline(made)["steps"]
    assert (replayed["kind"], replayed["step"], ideal["kind"]) == ("replayed", 3, "ideal")
    assert replayed["step_time"] == pytest.approx(truth.step_times[3], rel=1e-9)
    assert replayed["measured_step_time"] == pytest.approx(truth.step_times[3], rel=1e-9)
    figures = prism.summary(prism.replay(path))
    assert ideal["step_time"] == pytest.approx(figures["ideal_mean"], rel=1e-9)
    assert check_recorded(made, frame, 1e-9) == 2 * 2 * 4 * 6
    lemon = events_of(made).query("replica == 1 and stage == 2 and kind == 'forward'")
    assert np.median(lemon["duration"] / lemon["nominal"]) == pytest.approx(1.5, rel=0.05)

    def longer(chosen):
        durations = {k: v * (1.0 + 1e-6 * chosen(k)) for k, v in truth.durations.items()}
        return 1e6 * (play(layout, effects, durations)[1][3] - truth.step_times[3])

    for kind, seconds in replayed["critical_path"].items():
        # what longer ops of a kind would lengthen is what of them is on the critical path
        expected = longer(lambda key, kind=kind: KIND.get(key[0], key[0] if key[0] in (
            "forward", "backward") else "all_reduce") == kind)  # fmt: skip
        assert seconds == pytest.approx(expected, abs=1e-5), kind
    local = ("forward", "backward", "optimizer", "gap", "layernorm-grads-all-reduce")
    on_path = {
        place: longer(lambda key, place=place: key[0] in local and key[1:3] == place)
        for place in np.ndindex(2, 4)
    }
    by = replayed["decided_by"]
    assert (by["replica"], by["stage"]) == max(on_path, key=on_path.get) == (1, 2)
    assert by["share_of_path"] * replayed["step_time"] == pytest.approx(on_path[1, 2], abs=1e-4)
    for wrong in ({"step": 99}, {"replicates": 64}, {"ranks": [0]}):
        with pytest.raises(PrismError):
            prism.timeline(path, **wrong)


def test_waits_of_quiet_traces_are_known(tmp_path):
    effects = Effects(
        residual_sd=0.0, other_sd=0.0, transfer_s=0.05, collective_s=0.3, optimizer_s=0.4
    )  # fmt: skip
    found = {}
    for stages, microbatches, gap_s in ((1, 4, 0.01), (2, 3, 0.0)):
        layout = Layout(1, stages, microbatches, 3)
        durations = {
            k: np.full(3, gap_s * (k[3] > 0)) if k[0] == "gap" else v
            for k, v in make_trace(layout, effects)[1].durations.items()
        }
        path = write_tidy(play(layout, effects, durations)[0], tmp_path / f"{stages}.csv")
        found[stages] = check_timeline(prism.timeline(path))["steps"][0]
    (row,) = found[1]["rows"]
    assert row["busy"] == pytest.approx(4 * 0.6 + 0.4)
    waits = {cause: wait["seconds"] for cause, wait in row["waits"].items()}
    assert waits == pytest.approx({"communication": 4 * 0.3, "host": 12 * 0.01})
    path = {"backward": 1.6, "forward": 0.8, "all_reduce": 0.6, "all_gather": 0.3,
            "reduce_scatter": 0.3, "optimizer": 0.4, "launch_gap": 0.12}  # fmt: skip
    assert found[1]["critical_path"] == pytest.approx(path)
    # of two stages also the embedding's all-reduce, and four transfers in a row
    path |= {"all_reduce": 0.9, "transfer": 0.2}
    del path["launch_gap"]
    assert found[2]["critical_path"] == pytest.approx(path)
    for row in found[2]["rows"]:
        assert row["busy"] == pytest.approx(3 * 0.6 + 0.4)
        assert row["waits"]["transfer"]["seconds"] == pytest.approx(0.2)
    assert found[2]["rows"][0]["waits"]["bubble"]["seconds"] == pytest.approx(0.6)


def test_a_model_of_a_trace_shows_its_sampled_steps(tmp_path):
    frame, _ = make_trace(Layout(2, 4, 6, 5), Effects(rank_sd=0.02, residual_sd=0.02, gap_s=0.002))
    model = tmp_path / "model.nc"
    prism.save(prism.fit(write_tidy(frame, tmp_path / "ops.csv"), seed=1), model)
    steps = check_timeline(prism.timeline(model, replicates=128, seed=1))["steps"]
    times = prism.simulate(load_job(model), 128, seed=1).step_time.values
    assert [step["percentile"] for step in steps] == [50, 99]
    for step in steps:
        assert np.float32(step["step_time"]) == times[step["replicate"]]
        assert len(step["rows"]) == 8 and "transfer" in step["critical_path"]


def test_kernels_stand_where_they_were_recorded(tmp_path):
    program = synth.training_step()
    times = synth.simulate(program, *synth.draw(program, 5, 2))
    synth.write(tmp_path, program, times)
    made = prism.timeline(tmp_path, step=12)
    step = check_timeline(made)["steps"][0]
    assert [row["label"] for row in step["rows"]] == ["rank 0", "rank 1"]
    assert any({"rank", "communication"} & set(row["waits"]) for row in step["rows"])
    begin = np.nanmax(times.end[1])  # time zero is the end of the step before
    period = 1e-6 * (np.nanmax(times.end[2]) - begin)
    assert step["measured_step_time"] == pytest.approx(period, rel=1e-5)
    for rank in (0, 1):
        shown = events_of(made).query("stage == @rank and kind == 'gemm'").sort_values("start")
        calls = [i for i, call in enumerate(program) if "ampere" in call.name]
        took = 1e-6 * (times.end - times.start)[2, rank, calls]
        np.testing.assert_allclose(shown["duration"], took, atol=2e-9)
        start = 1e-6 * (times.start[2, rank, calls] - begin)
        np.testing.assert_allclose(shown["start"], start, atol=2e-5)
    few = prism.timeline(tmp_path, ranks=[1])
    assert {str(x) for x in few["row_label"].values} == {"rank 1"}


@pytest.mark.parametrize("name", ["host_bound", "device_bound", "two_streams"])
def test_a_model_of_kernels_is_played_from_its_step_s_begin(tmp_path, name):
    """Its host begins before; the engine's op that takes that off again is no activity."""
    model = tmp_path / "model.nc"
    prism.save(
        prism.fit(simulate(programs_made.PROGRAMS[name](), 6).write(tmp_path), seed=1), model
    )
    found = check_timeline(prism.timeline(model, replicates=128, seed=1))
    for step in found["steps"]:
        assert sum(step["critical_path"].values()) == pytest.approx(step["step_time"], rel=1e-5)


@pytest.mark.parametrize("profiler", ["nsys", "chakra"])
def test_other_profilers_traces_have_timelines_by_rank(profiler):
    made = prism.timeline(SAMPLES / profiler)
    step = check_timeline(made)["steps"][0]
    assert [row["label"] for row in step["rows"]] == ["rank 0", "rank 1"]
    assert step["step_time"] == pytest.approx(step["measured_step_time"], rel=1e-3)
    assert len(events_of(made).query("kind == 'gemm'")) > 0
    named = prism.timeline(SAMPLES / profiler, step_range="ProfilerStep.*|step.*")
    assert named.attrs["steps"] == made.attrs["steps"]
    with pytest.raises(PrismError):
        prism.timeline(SAMPLES / profiler, step_range="nothing")


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data in {DATA}; set PRISM_DATA")
def test_a_production_trace():
    """Starts within milliseconds of a step of seconds, durations exactly."""
    pytest.importorskip("pyarrow")
    path = DATA / "production_traces" / "ops_AR.parquet"
    made = prism.timeline(path, replicas=range(4))
    raw = pd.read_parquet(path)
    frame = pd.DataFrame({
        "dp_rank": raw["dp_rank"], "stage": raw["stage"], "step": raw["step"],
        "op_kind": raw["optype"].astype(str).str.removesuffix("-compute"),
        "microbatch": raw["mb_id"], "chunk": raw["mc"].clip(lower=0),
        "start": raw["start_ts"].astype(float), "duration": raw["duration"].astype(float),
    })  # fmt: skip
    assert check_recorded(made, frame, 2e-3) == 1024
