"""The reader, the table and the replay on measured profiler traces."""

import gzip
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import prism
from prism import PrismError
from prism.analyses.replay import replay_trace
from prism.models.kerneltrace.model import fit_kernels
from prism.traces import read_trace
from prism.traces.kineto.events import decode_events

DATA = Path(os.environ.get("PRISM_DATA", Path(__file__).parents[2] / "shared" / "data"))
TRACES = DATA / "kineto_traces"

pytestmark = pytest.mark.skipif(
    not TRACES.is_dir(), reason=f"no measured data in {TRACES}; set PRISM_DATA to its folder"
)


@cache
def read(*names):
    return read_trace([TRACES / f"{name}.json.gz" for name in names])


@cache
def replayed(*names):
    return prism.summary(replay_trace(read(*names)))


@cache
def report(*names):
    return fit_kernels(read(*names)).report


def test_training_step_has_six_steps_and_all_activities():
    trace = read("training_step_a100")
    kind = trace.ops["op_kind"].astype(str)
    assert sorted(trace.ops["step"].unique()) == list(range(1009, 1015))
    assert (kind != "launch_gap").sum() == 8_568 + 228 + 654
    assert kind.isin(["all_to_all", "all_reduce"]).sum() == 60
    assert (trace.ops["rank"] == 3).all() and trace.meta["world_size"] == 8
    assert trace.meta["ranks"][0]["idle_share"] == pytest.approx(0.164, abs=0.002)
    assert any("waiting" in note and " 60 " in note for note in trace.notes)


def test_send_receive_kernels_of_the_pair_are_what_launched_them():
    trace = read("pair_rank0", "pair_rank1")
    ops = trace.ops[trace.ops["name"].astype(str).str.startswith("nccl")]
    assert set(ops["name"].astype(str).str.slice(0, 19)) == {"ncclKernel_SendRecv"}
    counts = ops["op_kind"].astype(str).value_counts().to_dict()
    assert counts == {"all_to_all": 8, "all_reduce": 8, "all_gather": 4}
    # the traces hold a sample of the events: five collectives are in both
    assert trace.meta["n_collectives_matched"] == 5 and trace.meta["n_members_unmatched"] == 10
    matched = ops[ops["collective"] >= 0]
    assert (matched["transfer"] <= matched["duration"] + 1e-9).all()
    assert matched.groupby("collective")["op_kind"].nunique().eq(1).all()


def test_collectives_with_arguments_have_group_and_bytes():
    trace = read("nccl_collectives")
    ops = trace.ops[trace.ops["op_kind"].isin(["all_reduce", "broadcast"])]
    assert len(ops) == 21 and set(ops["group"]) == {"[0, 1]"} and ops["bytes"].gt(0).all()
    assert sorted(trace.ops["step"].unique()) == [4, 5, 6]


def test_a_trace_without_kernels_is_refused():
    with pytest.raises(PrismError, match="2,467 host events .*no device"):
        read("no_distributed_info")


@pytest.mark.parametrize(
    "names", [("training_step_a100",), ("pair_rank0", "pair_rank1"), ("nccl_collectives",)]
)
def test_replay_is_within_three_percent_and_the_table_is_whole(names):
    trace = read(*names)
    found = replayed(*names)
    assert found["max_abs_error"] < 0.03
    assert found["steps"] == trace.ops.loc[trace.ops["step"] >= 0, "step"].nunique()
    assert len(found["gpu_spans"]) == found["steps"] * len(names)
    assert max(abs(row["error"]) for row in found["gpu_spans"]) < 0.03
    assert any("ranks traced" in note for note in trace.notes)
    table = report(*names)["kernels"]
    again = trace.ops["collective"].duplicated() & (trace.ops["collective"] >= 0)
    assert sum(row["n"] for row in table) == len(trace.ops) - again.sum()
    assert sum(row["op_kind"] == "launch_gap" for row in table) == 1
    shares = [row["step_share"] for row in table]
    assert np.isfinite(shares).all() and shares == sorted(shares, reverse=True)


@pytest.mark.parametrize(
    ("names", "mean", "cv"),
    [
        (("training_step_a100",), 0.025, (0.6, 1.2)),
        (("nccl_collectives",), 0.01, (0.5, 1.2)),
        (("pair_rank0", "pair_rank1"), 0.01, (0.5, 1.2)),
        (("pair_rank0",), 0.01, (0.5, 1.2)),
    ],
)
def test_the_model_has_the_mean_and_the_spread_of_the_steps(names, mean, cv):
    check = report(*names)["cross_check"]
    measured, model = check["measured"], check["model"]
    assert abs(model["mean"] / measured["mean"] - 1.0) < mean
    assert cv[0] < model["cv"] / measured["cv"] < cv[1]


def test_waits_on_collectives_are_inferred():
    found = replayed("training_step_a100")
    assert found["edges_inferred"] >= 12 and found["edges_recorded"] == 0


def test_read_trace_finds_the_format_by_content():
    assert read_trace(TRACES / "nccl_collectives.json.gz").format == "kineto"


def test_a_truncated_real_trace_is_salvaged():
    data = gzip.decompress((TRACES / "pair_rank0.json.gz").read_bytes())
    n = len(decode_events(data, "x").events)
    for share in (0.2, 0.61, 0.97):
        raw = decode_events(data[: int(share * len(data))], "x")
        assert raw.n_dropped <= 1 and raw.rank == 0
        assert len(raw.events) > (share - 0.15) * n


def test_foreign_json_in_a_folder_is_left_out_and_named_is_refused(tmp_path):
    for rank in (0, 1):
        name = f"pair_rank{rank}.json.gz"
        (tmp_path / name).symlink_to(TRACES / name)
    (tmp_path / "config.json").write_text('{"a": 1}')
    trace = read_trace(tmp_path)
    assert set(trace.ops["rank"]) == {0, 1}
    assert any("config.json" in note and note.startswith("left out") for note in trace.notes)
    with pytest.raises(PrismError, match="config.json"):
        read_trace([tmp_path / "pair_rank0.json.gz", tmp_path / "config.json"])
