"""A GPU and the host that launches its kernels; what frameworks hide of replicas' messages."""

import csv
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from costs_made import SMALL, make_job, parameters
from hypothesis import given
from hypothesis import strategies as st

import prism
from prism.workload.build import build_workload
from prism.workload.host import BLOCKS, Host
from prism.workload.kernels import ChunkWork, Kernel

DATA = Path(os.environ.get("PRISM_DATA", Path(__file__).parents[2] / "shared" / "data"))
OURS, NANOTRON = DATA / "h100_device", DATA / "layout_sweep" / "nanotron_h100.csv"


# --------------------------------------------------------------------- a chunk: host or device
def work_of(forward, backward):
    """A chunk of kernels, each of (seconds, launches); None where the host waits."""

    def kernels(each):
        return tuple(
            BLOCKS if x is None
            else Kernel(f"k{i}", "memory", x[0], 0.0, 0.0, "residual/memory", launches=x[1])
            for i, x in enumerate(each)
        )  # fmt: skip

    return ChunkWork(kernels(forward), kernels(backward))


def total(work):
    return sum(k.duration for k in work.forward + work.backward)


def seconds_of(kernels, host, i):
    """Seconds of host and of device in pass i, with gaps, but for what the host waits."""
    launches = sum(k.launches for k in kernels)
    device = sum(k.duration for k in kernels) + host.gap_s * launches
    return np.array([launches * host.launch_s[i], device])


kernel = st.tuples(st.floats(0.0, 100e-6), st.integers(0, 5))
passes = st.lists(kernel, min_size=1, max_size=12)
hosts = st.builds(
    Host, st.tuples(st.floats(0.0, 60e-6), st.floats(0.0, 60e-6)), st.floats(0.0, 2e-6),
    st.floats(0.0, 2e-3),
)  # fmt: skip


@given(passes, passes, hosts)
def test_a_chunk_takes_as_long_as_host_or_device(forward, backward, host):
    """Forward and backward together: what the host lags in one it may catch up in the other."""
    work = work_of(forward, backward)
    found = host.pace(work)
    host_s, device_s = seconds_of(work.forward, host, 0) + seconds_of(work.backward, host, 1)
    assert total(found) == pytest.approx(max(host_s, device_s), rel=1e-9, abs=1e-15)
    for given_, paced in ((work.forward, found.forward), (work.backward, found.backward)):
        assert tuple(k for k in paced if k.name != "launch_gaps") == given_
    if host_s <= device_s:  # no pass has more than its gaps
        own = seconds_of(work.forward, host, 0)[1]
        assert sum(k.duration for k in found.forward) == pytest.approx(own, rel=1e-9, abs=1e-15)


@given(passes, passes, hosts)
def test_launches_one_after_the_other_take_as_long(forward, backward, host):
    """Played launch by launch: the host runs ahead, the device waits for it, and neither rests."""
    work, n = work_of(forward, backward), 100
    clock = device = 0.0
    for _ in range(n):
        for i, kernels in enumerate((work.forward, work.backward)):
            for k in kernels:
                clock += k.launches * host.launch_s[i]
                device = max(device, clock) + k.duration + host.gap_s * k.launches
    once = sum(seconds_of(work.forward, host, 0) + seconds_of(work.backward, host, 1))
    assert device / n == pytest.approx(total(host.pace(work)), abs=once / n + 1e-15)


@given(passes, passes, hosts, st.floats(1.0, 3.0), st.sampled_from([0, 1]))
def test_slower_launches_never_shorten_a_chunk(forward, backward, host, factor, i):
    slower = list(host.launch_s)
    slower[i] *= factor
    work = work_of(forward, backward)
    assert total(host._replace(launch_s=tuple(slower)).pace(work)) >= total(host.pace(work)) - 1e-12


@given(passes, passes, hosts, st.data())
def test_where_the_host_waits_its_lead_is_gone(forward, backward, host, data):
    """Between two waits host or device decides; what follows the last goes on in the next one."""
    n = len(forward) + len(backward)
    at = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=4, unique=True))
    marked = [(forward + backward)[j] for j in range(n)]
    flagged, spans = [], [[]]
    for j, x in enumerate(marked):
        if j in at:
            flagged.append((j, None))
            spans.append([])
        flagged.append((j, x))
        spans[-1].append((j >= len(forward), x))
    spans = [spans[-1] + spans[0], *spans[1:-1]]
    expected = len(at) * host.wait_s
    for span in spans:
        device = sum(x[0] + host.gap_s * x[1] for _, x in span)
        expected += max(device, sum(host.launch_s[i] * x[1] for i, x in span))
    cut = [x for j, x in flagged if j < len(forward)], [x for j, x in flagged if j >= len(forward)]
    found = total(host.pace(work_of(*cut)))
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-15)
    whole = total(host.pace(work_of(forward, backward)))
    assert found >= whole + len(at) * host.wait_s - 1e-12


def test_halves_of_a_backward_have_the_gaps_of_the_whole():
    layout = {"pp": 2, "microbatches": 2, "tp": 2, "recompute": "selective"}
    machine = {"gpus_per_node": 4}
    whole, halves = (
        build_workload(
            make_job(layout | {"schedule": name}, cluster=machine).replace(
                {"variability.host_scale": 1.0}
            ),
            None,
        ).chunks[0][0]
        for name in ("1f1b", "zb-h1")
    )

    def gaps(kernels):
        return sum(k.duration for k in kernels if k.kernel_class == "launch_gaps")

    assert gaps(halves.inputs) > 0.0 and gaps(halves.weights) > 0.0
    assert gaps(halves.inputs + halves.weights) == pytest.approx(gaps(halves.backward), rel=1e-9)
    assert gaps(whole.backward) == pytest.approx(gaps(halves.backward), rel=1e-9)


# ------------------------------------------------------------------------------ jobs of one GPU
def one_gpu(scale, seq_len=512, **layout):
    job = make_job({"framework": "eager", "microbatches": 3} | layout, {"seq_len": seq_len})
    return job.replace({"variability.host_scale": scale})


@cache
def figures(job):
    return prism.summary(prism.simulate(job, replicates=64, seed=1))


def rows_of(job):
    """Seconds of a step by where its time goes."""
    found = figures(job)
    return {r["name"]: r["mean_share"] * found["step_time"]["mean"] for r in found["time_loss"]}


def launches_of(job):
    """Launches of a step in forward and in backward, by the kernels that its workload has."""
    (row,) = build_workload(job, None).chunks
    each = [sum(k.launches for c in row for k in getattr(c, of)) for of in ("forward", "backward")]
    return job.parallelism.microbatches * np.array(each)


def launching(job):
    """Seconds of a step's launches."""
    return job.variability.host_scale * float(launches_of(job) @ (36e-6, 54e-6))


def test_launch_gaps_are_what_the_host_takes_longer():
    job, free = one_gpu(1.0), one_gpu(1e-9)
    rows, least = rows_of(job), rows_of(free)
    step = figures(job)["step_time"]["mean"]
    assert sum(rows.values()) == pytest.approx(step, rel=1e-6)
    assert step == pytest.approx(launching(job) + rows["optimizer"], rel=1e-6)
    assert rows["launch_gaps"] == pytest.approx(launching(job) - rows["compute"], rel=1e-5)
    assert rows["launch_gaps"] > 2.0 * rows["compute"]  # the host decides here
    # with free launches, only the gaps of the device are left
    assert rows["compute"] == pytest.approx(least["compute"], rel=1e-5)
    gap = prism.load_library("mi300x-healthy").value("nominal/kernel_launch_s")
    assert least["launch_gaps"] == pytest.approx(gap * launches_of(job).sum(), rel=1e-5)


def test_a_host_half_as_fast_doubles_what_it_decides_and_nothing_else():
    once, twice = (
        figures(one_gpu(scale))["ideal_step_time"] - rows_of(one_gpu(scale))["optimizer"]
        for scale in (1.0, 2.0)
    )
    assert twice == pytest.approx(2.0 * once, rel=1e-6)
    large = [one_gpu(s, 4096, microbatch_size=16) for s in (0.1, 0.2)]
    steps = [figures(job)["ideal_step_time"] for job in large]
    assert launching(large[1]) < 0.5 * steps[0]
    assert steps[1] == pytest.approx(steps[0], rel=1e-9)


# ------------------------------------------------------------------------- gradients in buckets
BUCKETS = {
    "megatron": lambda ranks: max(160e6, 4e6 * ranks), "eager": lambda _: 25.0 * 2**20,
    "nanotron": lambda _: 25.0 * 2**20, "megatron-2022": lambda _: np.inf,
}  # fmt: skip


@pytest.mark.parametrize("framework", BUCKETS)
@pytest.mark.parametrize("dp", [16, 64])
def test_gradients_are_reduced_in_buckets(framework, dp):
    """One bucket after the last backward, the others beside it; not with those that hide none."""
    sent = []
    for n_layers in (1, 4, 16):
        sizes = {"n_layers": n_layers}
        layout = {"dp": dp, "framework": framework, "bucket_layers": n_layers}
        ((found,),) = build_workload(make_job(layout, sizes), None).reduces
        n_bytes = 4.0 * parameters(SMALL | sizes)
        messages = max(1.0, n_bytes / BUCKETS[framework](dp))
        assert sum(c.messages for c in found) == pytest.approx(messages, rel=1e-9)
        assert sum(c.messages * c.bytes for c in found) == pytest.approx(n_bytes, rel=1e-9)
        *beside, last = found
        assert [c.beside for c in found] == [True] * len(beside) + [False]
        hides = framework in ("megatron", "eager")
        assert len(beside) == (hides and messages > 1.0)
        assert last.messages == pytest.approx(1.0 if hides else messages)
        each = {round(c.duration / c.messages, 15) for c in found}
        assert len(each) == 1  # as long as any other
        sent.append(sum(c.duration for c in found))
    assert sent == sorted(sent)


@pytest.mark.usefixtures("free_beside")
@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_frameworks_expose_what_they_do_not_hide(mode):
    """On 256 GPUs without a pipeline, without what compute beside is longer by."""
    shown = {}
    for framework in ("nanotron", "eager", "megatron"):
        job = prism.load_job({
            "model": {"name": "llama3-8b"}, "cluster": {"nodes": 32},
            "parallelism": {"tp": 8, "dp": 32, "microbatches": 4, "data_parallel": mode,
                            "framework": framework, "bucket_layers": 32},
            "variability": {"library": None},
        })  # fmt: skip
        shown[framework] = rows_of(job)["exposed_dp"]
        apart = rows_of(job.replace({"parallelism.overlap": False}))["exposed_dp"]
        if framework == "nanotron":
            assert shown[framework] == pytest.approx(apart, rel=1e-6)
        else:
            assert shown[framework] < 0.9 * apart
    if mode == "zero1":  # parameters
        assert shown["nanotron"] > 1.5 * shown["eager"] > 1.5 * shown["megatron"]
    else:
        assert shown["nanotron"] > 1.5 * shown["eager"]


# ------------------------------------------------------------------------------------- measured
# kernels and memsets of a layer, sums of gradients; seconds of a launch [s]
LAUNCHES = {
    "eager": (33 + 6, 58 + 12 + 9, 36e-6, 54e-6), "compiled": (15 + 6, 28 + 11 + 9, 39e-6, 53e-6),
}  # fmt: skip


@pytest.mark.skipif(not OURS.is_dir(), reason=f"no {OURS}")
@pytest.mark.parametrize("framework", LAUNCHES)
@pytest.mark.parametrize("change", [{"parallelism.microbatch_size": 1}, {"model.seq_len": 408}])
def test_a_smaller_job_of_ours_takes_as_long_as_its_launches(framework, change):
    """Counted in its profile: 16 layers, two microbatches."""
    own = {"gradient_dtype": "bf16", "optimizer_dtype": "bf16", "framework": framework,
           "attention": "cudnn"}  # fmt: skip
    job = prism.load_job(OURS / "job.yaml").replace({"parallelism": own}).replace(change)
    forward, backward, first, second = LAUNCHES[framework]
    host = 2 * 16 * (forward * first + backward * second)
    device = figures(job.replace({"variability.host_scale": 1e-9}))["ideal_step_time"]
    assert figures(job)["ideal_step_time"] == pytest.approx(max(host, device), rel=0.15)
    if "model.seq_len" in change or framework == "eager":
        assert device < 0.9 * host  # else it tells nothing of the host


def nanotron(row):
    """A job of a row of the sweep."""
    sharding = ("zero1" if int(row["zero_stage"]) else "ddp") if int(row["dp"]) > 1 else "none"
    sizes = {"n_layers": "num_layers", "hidden_size": "hidden_size", "ffn_size": "interm_dim",
             "n_heads": "num_heads", "n_kv_heads": "num_kv_heads", "vocab_size": "vocab_size",
             "seq_len": "seq_len"}  # fmt: skip
    layout = {"tp": "tp", "dp": "dp", "microbatches": "batch_accum"}
    return prism.load_job({
        "model": {key: int(float(row[name])) for key, name in sizes.items()}
        | {"tied_embeddings": row["tie_word_embeddings"] == "True"},
        "parallelism": {key: int(row[name]) for key, name in layout.items()}
        | {"framework": "nanotron", "data_parallel": sharding},
        "cluster": {"nodes": 1, "gpus_per_node": 8, "device": "h100"},
    })  # fmt: skip


@pytest.mark.skipif(not NANOTRON.is_file(), reason=f"no {NANOTRON}")
def test_nanotron_on_a_node_takes_as_long_as_measured():
    """Microbatches of one sequence, tp 2 to 8: with free launches a third less."""
    logs = []
    for row in csv.DictReader(NANOTRON.read_text().splitlines()):
        key = (row["status"], row["nodes"], row["pp"], row["mbs"])
        if key == ("Success", "1", "1", "1") and row["tp"] in ("2", "4", "8"):
            job = nanotron(row)
            both = job, job.replace({"variability.host_scale": 1e-9})
            steps = np.array([figures(each)["ideal_step_time"] for each in both])
            logs.append(np.log(steps / float(row["step_s"])))
    assert len(logs) == 14
    found, free = np.mean(logs, axis=0)
    assert abs(found) < np.log(1.08) and free < np.log(0.75)
    assert np.std(logs, axis=0)[0] < 0.08


# --------------------------------------------------------------------- another placement
def test_a_late_host_hides_longer_messages_of_a_placement():
    """A tp group that crosses the pods once or everywhere, by what joins a pod to the others."""
    tree = {
        "model": {"n_layers": 6, "hidden_size": 256, "ffn_size": 512, "n_heads": 16,
                  "vocab_size": 16000, "seq_len": 2048},
        "parallelism": {"framework": "eager", "tp": 4, "microbatches": 4},
    }  # fmt: skip
    default, apart = [0, 1, 2, 3], [0, 2, 1, 3]

    def step(hosts, gbits, host):
        tiers = {"pod": {"gpus": 2, "total_gbits_per_s": gbits}, "site": {"gpus": 4}}
        cluster = {"nodes": 4, "gpus_per_node": 1, "hosts": hosts, "tiers": tiers}
        variability = {"library": "none", "host_scale": host}
        job = prism.load_job(tree | {"variability": variability, "cluster": cluster})
        return figures(job)["ideal_step_time"]

    def steps(gbits, host):
        return np.array([step(hosts, gbits, host) for hosts in (default, apart)])

    late = np.array([steps(gbits, 1.0) for gbits in (5.0, 50.0, 400.0)])
    assert np.all(np.diff(late, axis=0) <= 0.0)  # no faster link makes it longer
    assert late[2] == pytest.approx(late[1, ::-1], rel=1e-3)  # the host takes longer
    assert late[0, 1] > 2.0 * late[2, 1]  # and here the messages
    free = np.array([steps(gbits, 1e-9) for gbits in (5.0, 50.0)])
    assert np.all(free[:, 1] > 1.4 * free[:, 0])  # nothing is late: all of it shows
    assert free[0] == pytest.approx(late[0], rel=0.02)


# ------------------------------------------------------------------------------ a slow node
def test_only_a_slow_host_makes_launch_gaps_longer():
    """Each factor of 2 adds its own part of a step once more."""
    tree = {
        "model": {"n_layers": 2, "hidden_size": 256, "ffn_size": 512, "n_heads": 4,
                  "vocab_size": 512, "seq_len": 512},
        "parallelism": {"framework": "transformers", "microbatches": 2},
        "variability": {"library": "none"},
    }  # fmt: skip

    def step(**slow):
        cluster = {"nodes": 1, "gpus_per_node": 1, "node_slowdowns": {0: slow} if slow else {}}
        job = prism.load_job(tree | {"cluster": cluster})
        return prism.summary(prism.estimate(job, replicates=64, run_replicates=5, seed=1))

    healthy = step()
    mean = healthy["step_time"]["mean"]
    shares = {row["name"]: row["mean_share"] for row in healthy["time_loss"]}
    more = {
        part: step(**{part: 2.0})["step_time"]["mean"] / mean - 1.0
        for part in ("compute", "memory", "other")
    }
    assert shares["launch_gaps"] > 0.9
    assert more["other"] == pytest.approx(shares["launch_gaps"], rel=1e-4)
    assert more["compute"] + more["memory"] == pytest.approx(
        shares["compute"] + shares["optimizer"], rel=1e-4
    )
